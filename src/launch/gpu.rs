//! GPU functions for builds with and without the feature `cuda`, so that other code needs no conditional compilation.

#[cfg(feature = "cuda")]
use crate::device::FirstWay;
#[cfg(feature = "cuda")]
use crate::device::cuda::{self, CudaOptions};
use crate::device::{DeviceKind, Engines};
use crate::error::{Error, Result};
use crate::hardware::gpu::GpuId;
use crate::hardware::topology::Topology;
use crate::memory::DeviceMemory;
use crate::planner::machine::GroupedLayouts;
use crate::ranks::NcclUniqueId;
use crate::units::counted;
use std::path::PathBuf;

#[cfg(feature = "cuda")]
pub(crate) type GpuDevice = crate::device::cuda::CudaDevice;

/// Placeholder in builds without the feature `cuda`. [`open`] never returns one.
#[cfg(not(feature = "cuda"))]
pub(crate) type GpuDevice = crate::device::cpu::CpuDevice;

/// Opens the visible GPU `ordinal`, with memory for `trace_spans` trace spans per stream. `libraries` are folders that are searched for
/// NVIDIA's libraries before the usual ones. See [`CudaOptions::portable`] for `portable`.
///
/// # Errors
/// `Resource` if there is no such GPU or a library is missing; `Unsupported` in a build without the feature `cuda`.
#[cfg(feature = "cuda")]
pub(crate) fn open(ordinal: usize, libraries: Vec<PathBuf>, engines: Engines, trace_spans: usize, portable: bool) -> Result<GpuDevice> {
    super::open::gpu(ordinal, &CudaOptions { libraries, engines, trace_spans, portable, first_way: FirstWay::default() })
}

/// Fails, because this build lacks the feature `cuda`.
///
/// # Errors
/// Always `Unsupported`.
#[cfg(not(feature = "cuda"))]
pub(crate) fn open(_: usize, _: Vec<PathBuf>, _: Engines, _: usize, _: bool) -> Result<GpuDevice> {
    Err(no_cuda())
}

/// The GPUs that are visible to CUDA.
///
/// # Errors
/// `Resource` if there is none; `Unsupported` in a build without the feature `cuda`.
pub(crate) fn visible() -> Result<Vec<GpuId>> {
    #[cfg(feature = "cuda")]
    return cuda::visible_gpus();
    #[cfg(not(feature = "cuda"))]
    Err(no_cuda())
}

/// The first `count` GPUs of `visible`, which train together.
///
/// # Errors
/// `Usage` if there are fewer; `Unsupported` if their models differ, because results would not be bit-identical and their speeds differ.
pub(crate) fn first(visible: Vec<GpuId>, count: usize) -> Result<Vec<GpuId>> {
    let all = visible.len();
    if count > all {
        let are = format!("{} {}", if all == 1 { "is" } else { "are" }, counted(all, "GPU"));
        return Err(Error::usage(format!("--gpus {count}: there {are} here (see CUDA_VISIBLE_DEVICES); use --gpus {all}")));
    }
    let chosen: Vec<_> = visible.into_iter().take(count).collect();
    match chosen.iter().find(|gpu| gpu.model != chosen[0].model) {
        None => Ok(chosen),
        Some(other) => {
            let remedy = "name GPUs of one model in CUDA_VISIBLE_DEVICES";
            let [one, other] = [&chosen[0], other].map(|gpu| format!("{gpu} is a {}", gpu.model));
            Err(Error::Unsupported(format!("--gpus {count} of several models: {one}, {other}; {remedy}")))
        }
    }
}

/// The device kind of `gpus`, and the memory that is free on each of them.
///
/// # Errors
/// Errors of the CUDA driver.
#[cfg(feature = "cuda")]
pub(super) fn free_memory(gpus: &[GpuId]) -> Result<(DeviceKind, DeviceMemory)> {
    let free = gpus.iter().map(|gpu| cuda::free_bytes(gpu.index)).collect::<Result<Vec<_>>>()?;
    let bytes = free.into_iter().min().unwrap_or(0);
    Ok((DeviceKind::Gpu, DeviceMemory::Own { bytes, addressing: cuda::probe(gpus[0].index)? }))
}

#[cfg(not(feature = "cuda"))]
pub(super) fn free_memory(_: &[GpuId]) -> Result<(DeviceKind, DeviceMemory)> {
    Err(no_cuda())
}

/// Whether the cuBLASLt in `libraries` or the usual folders supports grouped matrix products on the first GPU.
pub fn grouped_layouts(libraries: &[PathBuf]) -> GroupedLayouts {
    #[cfg(feature = "cuda")]
    let obstacle = cuda::grouped_obstacle(libraries).unwrap_or_else(|error| Some(error.to_string()));
    #[cfg(not(feature = "cuda"))]
    let obstacle = {
        let _ = libraries;
        Some(no_cuda().to_string())
    };
    obstacle.map_or(GroupedLayouts::Usable, GroupedLayouts::Unusable)
}

/// The version of the NCCL in `libraries` or the usual folders.
///
/// # Errors
/// `Resource` if there is none, `Unsupported` if it is too old.
pub(crate) fn nccl_release(libraries: &[PathBuf]) -> Result<String> {
    #[cfg(feature = "cuda")]
    return cuda::nccl::release(libraries);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = libraries;
        Err(no_cuda())
    }
}

/// Creates a unique ID for an NCCL communicator between GPUs of several processes.
///
/// # Errors
/// Errors of [`nccl_release`] and of NCCL.
pub(crate) fn rail_key(libraries: &[PathBuf]) -> Result<NcclUniqueId> {
    #[cfg(feature = "cuda")]
    return cuda::nccl::new_key(libraries);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = libraries;
        Err(no_cuda())
    }
}

/// The NUMA node near each of `gpus`, if known.
pub(crate) fn gpu_nodes(gpus: &[GpuId], topology: &Topology) -> Vec<Option<usize>> {
    gpus.iter().map(|gpu| topology.node_of_gpu(&gpu.pci)).collect()
}

/// Pairs of indices into `gpus` that lack direct access in at least one direction.
///
/// # Errors
/// Errors of the CUDA driver.
pub(super) fn unlinked(gpus: &[GpuId]) -> Result<Vec<[usize; 2]>> {
    #[cfg(feature = "cuda")]
    return pairs_without(gpus.len(), |one, other| cuda::has_direct_link(gpus[one].index, gpus[other].index));
    #[cfg(not(feature = "cuda"))]
    pairs_without(gpus.len(), |_, _| Err(no_cuda()))
}

/// Pairs of indices below `count` of which one does not reach the other.
fn pairs_without(count: usize, reaches: impl Fn(usize, usize) -> Result<bool>) -> Result<Vec<[usize; 2]>> {
    let mut pairs = Vec::new();
    for (one, other) in (0..count).flat_map(|other| (0..other).map(move |one| (one, other))) {
        if !reaches(one, other)? || !reaches(other, one)? {
            pairs.push([one, other]);
        }
    }
    Ok(pairs)
}

/// A warning if there are more GPUs than CPUs for the threads that drive them.
pub(super) fn crowded(gpus: usize, cpus: usize) -> Option<String> {
    let remedy = "use fewer GPUs, or let the process use more CPUs";
    (gpus > cpus).then(|| format!("{cpus} CPUs for {gpus} GPUs: ranks share CPUs; {remedy}"))
}

#[cfg(not(feature = "cuda"))]
fn no_cuda() -> Error {
    Error::Unsupported("a GPU: this build lacks the cargo feature cuda".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpus(models: &[&str]) -> Vec<GpuId> {
        let gpu = |(index, model): (usize, &&str)| GpuId { index, pci: format!("0000:{index}F:00.0"), model: model.to_string() };
        models.iter().enumerate().map(gpu).collect()
    }

    #[test]
    fn gpus_that_are_not_there_are_refused_with_how_many_are() {
        let refused = |models: &[&str], count| first(gpus(models), count).unwrap_err().to_string();
        assert_eq!(refused(&["H200"; 2], 4), "--gpus 4: there are 2 GPUs here (see CUDA_VISIBLE_DEVICES); use --gpus 2");
        assert!(refused(&["H200"], 2).contains("there is 1 GPU here"));
    }

    #[test]
    fn fewer_cpus_than_gpus_are_worth_a_line() {
        assert_eq!((crowded(2, 2), crowded(0, 1)), (None, None));
        assert!(crowded(4, 2).unwrap().starts_with("2 CPUs for 4 GPUs"));
    }

    #[test]
    fn a_link_that_leads_one_way_is_none() {
        let reaches = |one: usize, other: usize| Ok((one, other) != (2, 0) && (one, other) != (1, 2));
        assert_eq!(pairs_without(3, reaches).unwrap(), [[0, 2], [1, 2]]);
        assert_eq!(pairs_without(1, |_, _| panic!("one needs no link")).unwrap(), Vec::<[usize; 2]>::new());
    }

    #[test]
    fn gpus_of_several_models_are_refused_with_both_names() {
        let mixed = gpus(&["H200", "H200", "H100"]);
        assert_eq!(first(mixed.clone(), 2).unwrap(), mixed[..2], "the third is not asked for");
        let refused = first(mixed, 3).unwrap_err().to_string();
        for part in ["--gpus 3", "GPU 0 (0000:0F:00.0) is a H200", "GPU 2 (0000:2F:00.0) is a H100", "CUDA_VISIBLE_DEVICES"] {
            assert!(refused.contains(part), "{refused}");
        }
    }
}
