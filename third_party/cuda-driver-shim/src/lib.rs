//! Every CUDA driver symbol that `cust_raw` declares, as a jump through a slot that [`load`] fills from `libcuda.so.1`.
//!
//! Why: `cust` links against the driver, and a program linked so does not start where there is none. A jump leaves
//! registers and stack as they are, so one form serves every signature.

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicPtr, Ordering};

mod symbols;
pub use symbols::SYMBOLS;
use symbols::{NAMES, SLOTS};

/// `CUDA_ERROR_STUB_LIBRARY`: what every call returns until the driver is loaded.
const STUB_LIBRARY: c_int = 34;

extern "C" fn unbound() -> c_int {
    STUB_LIBRARY
}

macro_rules! slots {
    ($($index:literal $name:ident)*) => {
        /// Symbols with a slot.
        pub const SYMBOLS: usize = [$($index),*].len();
        pub(crate) static SLOTS: [AtomicPtr<c_void>; SYMBOLS] = [const { AtomicPtr::new(crate::unbound as *mut c_void) }; SYMBOLS];
        pub(crate) const NAMES: [&str; SYMBOLS] = [$(concat!(stringify!($name), "\0")),*];
        $(
            #[unsafe(naked)]
            #[unsafe(no_mangle)]
            extern "C" fn $name() {
                #[cfg(target_arch = "x86_64")]
                std::arch::naked_asm!("jmp qword ptr [rip + {slots} + {at}]", slots = sym SLOTS, at = const $index * 8);
                #[cfg(target_arch = "aarch64")]
                std::arch::naked_asm!(
                    "adrp x16, {slots} + {at}",
                    "ldr x16, [x16, :lo12:{slots} + {at}]",
                    "br x16",
                    slots = sym SLOTS, at = const $index * 8
                );
            }
        )*
    };
}
pub(crate) use slots;

/// Binds the symbols to the driver, once; later calls repeat the first answer.
///
/// # Errors
/// The dynamic loader's words when there is no driver.
pub fn load() -> Result<(), String> {
    static LOADED: OnceLock<Result<(), String>> = OnceLock::new();
    LOADED.get_or_init(bind).clone()
}

/// Symbols that the loaded driver does not have; calling one returns error 34.
pub fn missing() -> impl Iterator<Item = &'static str> {
    let is_missing = |i: &usize| SLOTS[*i].load(Ordering::Relaxed) == unbound as *mut c_void;
    (0..SYMBOLS).filter(is_missing).map(|i| NAMES[i].trim_end_matches('\0'))
}

fn bind() -> Result<(), String> {
    // SAFETY: the name ends in NUL; the driver's constructors are the driver's own business.
    let driver = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    if driver.is_null() {
        return Err(loader_message());
    }
    for (slot, name) in SLOTS.iter().zip(NAMES) {
        // SAFETY: the handle is live and the name ends in NUL.
        let address = unsafe { libc::dlsym(driver, name.as_ptr().cast()) };
        if !address.is_null() {
            slot.store(address, Ordering::Release);
        }
    }
    Ok(())
}

fn loader_message() -> String {
    // SAFETY: dlerror returns null or a string that lives until this thread's next call of the loader.
    let message = unsafe { libc::dlerror() };
    if message.is_null() {
        return "the dynamic loader gave no reason".into();
    }
    // SAFETY: as above.
    unsafe { CStr::from_ptr(message) }.to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" {
        fn cuInit(flags: u32) -> c_int;
    }

    #[test]
    fn without_a_driver_every_call_says_so() {
        if load().is_ok() {
            return;
        }
        assert_eq!(missing().count(), SYMBOLS);
        // SAFETY: unbound, it only returns.
        assert_eq!(unsafe { cuInit(0) }, STUB_LIBRARY);
    }
}
