//! What this program can do with the GPU that is here.

use crate::error::Result;
use crate::hardware::gpu::GpuFacts;
use crate::memory::Addressing;
use std::path::PathBuf;

/// Whether there is a GPU, and whether this program can compute on it.
#[derive(Debug)]
pub(crate) struct GpuReport {
    /// What it is, or why that cannot be said.
    pub facts: Result<GpuFacts>,
    /// What CUDA, which opens it, says of the host's memory; or why it does not open.
    pub usable: Result<Addressing>,
    /// NVIDIA's libraries, where there is a GPU to use them: the path, or why one cannot be opened.
    pub libraries: Vec<(&'static str, Result<PathBuf>)>,
}

impl GpuReport {
    pub(crate) fn this_machine() -> Self {
        #[cfg(feature = "cuda")]
        let (usable, libraries) = (crate::device::cuda::probe(0), crate::device::cuda::libraries);
        #[cfg(not(feature = "cuda"))]
        let (usable, libraries) = (Err(crate::hardware::gpu::no_cuda()), Vec::new);
        let libraries = if usable.is_ok() { libraries() } else { Vec::new() };
        Self { facts: GpuFacts::read(), usable, libraries }
    }
}
