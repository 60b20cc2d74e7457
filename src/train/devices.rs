//! Which device a run gets.

use crate::config::options::DeviceChoice;
use crate::config::settings::Settings;
#[cfg(feature = "cuda")]
use crate::device::cuda::{self, Attention, CudaDevice, CudaOptions};
use crate::error::Result;

/// The device of a run.
#[expect(clippy::large_enum_variant, reason = "a run has one")]
pub enum Chosen {
    /// The CPU, and why not a GPU if that was open.
    Cpu(Option<String>),
    /// The first GPU.
    #[cfg(feature = "cuda")]
    Cuda(CudaDevice),
}

/// Opens what `settings` ask for; `auto` is a GPU where there is one.
///
/// # Errors
/// `Resource` when the GPU was asked for and cannot be had, or is there and one of NVIDIA's libraries is not.
pub fn choose(settings: &Settings) -> Result<Chosen> {
    match settings.device {
        DeviceChoice::Cpu => Ok(Chosen::Cpu(None)),
        DeviceChoice::Cuda => open(settings),
        DeviceChoice::Auto => match probe() {
            Ok(()) => open(settings),
            Err(why) => Ok(Chosen::Cpu(Some(why.to_string()))),
        },
    }
}

#[cfg(feature = "cuda")]
fn probe() -> Result<()> {
    cuda::probe()
}

#[cfg(feature = "cuda")]
fn open(_settings: &Settings) -> Result<Chosen> {
    let options = CudaOptions { libraries: Vec::new(), attention: Attention::Cudnn, deterministic: true };
    CudaDevice::new(&options).map(Chosen::Cuda)
}

#[cfg(not(feature = "cuda"))]
fn probe() -> Result<()> {
    Err(crate::error::Error::Unsupported("this build has no CUDA device".into()))
}

#[cfg(not(feature = "cuda"))]
fn open(_: &Settings) -> Result<Chosen> {
    probe().map(|()| Chosen::Cpu(None))
}
