//! Options of `probe`: the measured devices, the duration, and the file for the profile.

use super::profile_file::ProfileFile;
use crate::config::options::{DeviceChoice, GpuCount};
use crate::error::{Error, Result};
use crate::hardware::gpu::GpuId;
use crate::hardware::selected_profile::MachineId;
use crate::hardware::topology::Topology;
use crate::launch::gpu;
use std::fmt::Display;
use std::path::PathBuf;

/// Options of `probe`.
#[derive(clap::Args, Clone, Debug)]
pub struct ProbeOptions {
    /// Device to measure: auto, cpu or cuda.
    #[arg(long, value_name = "auto|cpu|cuda", default_value = "auto")]
    pub device: DeviceChoice,

    /// GPUs for the additional measurement of several GPUs at once: a number or all; all unless their models differ.
    #[arg(long, value_name = "N|all")]
    pub gpus: Option<GpuCount>,

    /// Approximate duration of the measurements; startup takes some seconds more.
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,

    /// Write the profile to this file, which is replaced.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,

    /// Save the profile, so that later runs on this machine's GPU are planned with it.
    #[arg(long, conflicts_with = "out")]
    pub save: bool,

    /// Directory to search first for NVIDIA's libraries.
    #[arg(long, value_name = "DIR")]
    pub cuda_libraries: Option<PathBuf>,
}

impl ProbeOptions {
    /// The device to measure. With `--save` it is a GPU, because only rates of GPUs are saved, and a GPU that does not open is an error.
    pub(super) fn device(&self) -> DeviceChoice {
        if self.save { DeviceChoice::Cuda } else { self.device }
    }

    pub(super) fn libraries(&self) -> Vec<PathBuf> {
        self.cuda_libraries.iter().cloned().collect()
    }

    /// The GPUs of `visible` that are measured together; empty without at least two of one model. `log` receives the reason.
    ///
    /// # Errors
    /// Errors of [`gpu::first`] for GPUs that the user requested.
    pub(super) fn joint_probe(&self, visible: Vec<GpuId>, log: &mut dyn FnMut(&dyn Display)) -> Result<Vec<GpuId>> {
        let all = visible.len();
        match self.gpus {
            Some(GpuCount::Count(count)) => gpu::first(visible, count),
            Some(GpuCount::All) => gpu::first(visible, all),
            None => Ok(gpu::first(visible, all).unwrap_or_else(|why| {
                log(&format_args!("not measured together: {why}"));
                Vec::new()
            })),
        }
    }

    /// The file for the profile, if one is requested.
    ///
    /// # Errors
    /// `Io` if it is not writable. With `save`: errors of [`MachineId::new`]; `Usage` for the CPU device, whose runs are planned without
    /// rates, and if neither `XDG_CACHE_HOME` nor `HOME` is set.
    pub fn file(&self) -> Result<Option<ProfileFile>> {
        if !self.save {
            return self.out.as_deref().map(ProfileFile::open).transpose();
        }
        if self.device == DeviceChoice::Cpu {
            return Err(Error::usage("--save: runs on the CPU device need no profile; use --out FILE"));
        }
        let path = MachineId::new(&Topology::this_machine())?.file();
        let path = path.ok_or_else(|| Error::usage("--save: neither XDG_CACHE_HOME nor HOME is set; use --out FILE"))?;
        ProfileFile::beside(&path).map(Some)
    }
}
