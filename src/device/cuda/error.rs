//! Status codes of NVIDIA's libraries as errors. Codes are compared as numbers: the libraries know more codes than any enum here, and
//! receiving an unknown code as an enum would be undefined behaviour.

use crate::error::{Error, Result};
use cust::sys::CUresult;
use std::ffi::{CStr, c_char};

/// Turns a driver status into a result; `operation` names what was attempted and on what.
pub(super) fn check(status: CUresult, operation: impl FnOnce() -> String) -> Result<()> {
    match status as u32 {
        0 => Ok(()),
        code => Err(failed(code, operation())),
    }
}

pub(super) fn failed(code: u32, operation: String) -> Error {
    let hint = match code {
        2 => "; less --per-device-train-batch-size, --seq-length or --resident-buckets, or more recomputation, needs less",
        46 => "; another process has exclusive use of the GPU",
        // The context is lost with all its memory; only a new process helps.
        700 | 702 | 709 | 710 | 714..=719 => "; the GPU's context is lost: resume from the last checkpoint",
        _ => "",
    };
    Error::resource(operation, format!("CUDA error {code} ({}){hint}", text(code)))
}

/// The driver's description of the code.
fn text(code: u32) -> String {
    type Describe = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;
    // SAFETY: looks up a name in the libraries that are already loaded.
    let describe = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"cuGetErrorString".as_ptr()) };
    if describe.is_null() {
        return "no driver".into();
    }
    // SAFETY: the driver's function has this signature, and passes enums as 32-bit integers.
    let describe: Describe = unsafe { std::mem::transmute(describe) };
    let mut message = std::ptr::null();
    // SAFETY: the pointer is written, or stays null for codes that the driver does not know.
    match unsafe { describe(code, &mut message) } {
        // SAFETY: the driver's strings are constants.
        0 if !message.is_null() => unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned(),
        _ => "unknown to the driver".into(),
    }
}
