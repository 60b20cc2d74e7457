//! Finding and opening GPUs. This module calls the driver directly before it uses cust, and again when cust fails, because cust reports
//! every unknown status code as 999.

use super::error::check;
use crate::error::{Error, Result};
use cust::context::Context;
use cust::device::Device;
use cust::sys;
use std::ffi::{CStr, c_char};

/// Oldest CUDA release of a supported driver; the PTX of the kernels is of CUDA 12.0.
const OLDEST_CUDA: u32 = 12;

/// Oldest GPU generation that the kernels support: Ampere.
const OLDEST_GENERATION: i32 = 8;

/// First compute capability with FP8 products: Ada.
const FP8_CAPABILITY: (i32, i32) = (8, 9);

/// The generation for which kernels with `sm90a` in their names are compiled.
pub(super) const HOPPER: i32 = 9;

/// The GPU `ordinal` among those visible to CUDA. `CUDA_VISIBLE_DEVICES` sets their number and order.
pub(super) fn visible_gpu(ordinal: usize) -> Result<Device> {
    let find = || "find an NVIDIA GPU".to_string();
    cuda_driver_shim::load().map_err(|cause| Error::resource(find(), cause))?;
    // SAFETY: the flags are reserved and 0.
    check(unsafe { sys::cuInit(0) }, find)?;
    let mut gpu = 0;
    // SAFETY: writes one number.
    check(unsafe { sys::cuDeviceGet(&mut gpu, ordinal as i32) }, find)?;
    is_served(newest_cuda()?, generation(gpu)?)?;
    Device::get_device(ordinal as u32).or_else(|e| {
        // SAFETY: writes one number.
        check(unsafe { sys::cuDeviceGet(&mut gpu, ordinal as i32) }, find)?;
        Err(super::error::failed(e as u32, find()))
    })
}

/// The newest CUDA release that the driver supports, such as 13.
pub(super) fn newest_cuda() -> Result<u32> {
    let mut version = 0;
    // SAFETY: writes one number.
    check(unsafe { sys::cuDriverGetVersion(&mut version) }, || "query the driver's version".into())?;
    Ok(version as u32 / 1000)
}

/// Major number of the compute capability: 8 for Ampere and Ada, 9 for Hopper, 10 and 12 for Blackwell.
pub(super) fn generation(gpu: sys::CUdevice) -> Result<i32> {
    attribute(gpu, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)
}

/// Compute capability: (8, 9) for Ada.
pub(super) fn capability(gpu: sys::CUdevice) -> Result<(i32, i32)> {
    Ok((generation(gpu)?, attribute(gpu, sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?))
}

/// # Errors
/// `Unsupported` for a GPU without FP8 products.
pub(super) fn has_fp8((major, minor): (i32, i32)) -> Result<()> {
    if (major, minor) >= FP8_CAPABILITY {
        return Ok(());
    }
    let needed = "they need Ada or newer (8.9), as L40S, RTX 40, H100; use --matmul-dtype bfloat16";
    Err(Error::Unsupported(format!("products in FP8 on a GPU of compute capability {major}.{minor}: {needed}")))
}

/// # Errors
/// `Unsupported` for a driver or a GPU that is too old, with the requirement.
fn is_served(cuda: u32, generation: i32) -> Result<()> {
    if cuda < OLDEST_CUDA {
        return Err(Error::Unsupported(format!("a driver for CUDA {cuda}: the kernels need driver 525 or newer (CUDA {OLDEST_CUDA})")));
    }
    if generation < OLDEST_GENERATION {
        let needed = "the kernels need Ampere or newer (8.0), as A100, RTX 30, RTX 40, L40S, H100";
        return Err(Error::Unsupported(format!("a GPU of compute capability {generation}: {needed}")));
    }
    Ok(())
}

pub(super) fn count() -> Result<usize> {
    let mut gpus = 0;
    // SAFETY: writes one number.
    check(unsafe { sys::cuDeviceGetCount(&mut gpus) }, || "count the GPUs".into())?;
    Ok(gpus as usize)
}

/// The product name of a GPU.
pub(super) fn name(gpu: sys::CUdevice) -> Result<String> {
    // SAFETY: writes within this length.
    text::<256>(|to, length| unsafe { sys::cuDeviceGetName(to, length, gpu) }, || format!("query the name of GPU {gpu}"))
}

/// PCI address such as `0000:0F:00.0`.
pub(super) fn pci_address(gpu: sys::CUdevice) -> Result<String> {
    // SAFETY: writes within this length.
    text::<32>(|to, length| unsafe { sys::cuDeviceGetPCIBusId(to, length, gpu) }, || format!("query the PCI address of GPU {gpu}"))
}

/// The NUL-terminated string that `write` stores at the given address.
fn text<const N: usize>(write: impl FnOnce(*mut c_char, i32) -> sys::CUresult, operation: impl FnOnce() -> String) -> Result<String> {
    let mut text = [0; N];
    check(write(text.as_mut_ptr().cast(), N as i32), operation)?;
    Ok(CStr::from_bytes_until_nul(&text).unwrap_or_default().to_string_lossy().into_owned())
}

/// An attribute of the GPU.
pub(super) fn attribute(gpu: sys::CUdevice, attribute: sys::CUdevice_attribute) -> Result<i32> {
    let mut value = 0;
    // SAFETY: writes one integer.
    check(unsafe { sys::cuDeviceGetAttribute(&mut value, attribute, gpu) }, || format!("query {attribute:?} of the GPU"))?;
    Ok(value)
}

/// Opens the GPU's primary context and makes it current on this thread.
pub(super) fn open(gpu: Device) -> Result<Context> {
    let mut context = std::ptr::null_mut();
    // SAFETY: writes one handle.
    check(unsafe { sys::cuDevicePrimaryCtxRetain(&mut context, gpu.as_raw()) }, || "open the GPU".into())?;
    let opened = Context::new(gpu).map_err(|e| super::error::failed(e as u32, "open the GPU".into()));
    // SAFETY: retained above; `opened` has retained it itself.
    unsafe { sys::cuDevicePrimaryCtxRelease_v2(gpu.as_raw()) };
    opened
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_drivers_and_gpus_are_refused_with_the_requirement() {
        assert!(is_served(12, 8).is_ok() && is_served(13, 12).is_ok());
        let refused = |cuda, generation| is_served(cuda, generation).unwrap_err().to_string();
        assert!(refused(11, 9).contains("driver for CUDA 11") && refused(11, 9).contains("driver 525"));
        assert!(has_fp8((8, 9)).is_ok() && has_fp8((9, 0)).is_ok());
        assert!(has_fp8((8, 6)).unwrap_err().to_string().contains("of compute capability 8.6: they need Ada or newer"));
        assert!(refused(13, 7).contains("compute capability 7") && refused(13, 7).contains("Ampere or newer"));
    }
}
