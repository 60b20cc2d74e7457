//! Measures this machine's device, its link and the host's part of a step: copies, casts, latencies, buckets on their path through the
//! optimizer, and expert products. It prints one JSON line per case, with the physical limit. Every case checks its data.
#![allow(unsafe_code)]

mod bench;
mod cast;
mod graph;
mod grouped;
mod latency;
mod limits;
mod link;
mod load;
mod optimizer;
mod pipeline;

use bench::{DeviceBench, Sizes};
use clap::{Parser, ValueEnum};
use limits::Limits;
use load::small_caches;
use microbench::facts::Facts;
use superoffload::internals::config::DeviceChoice;
use superoffload::internals::device::{
    CpuDevice, Engines, ExpertProducts, Kernels, StreamOrder,
    cuda::{CudaDevice, CudaOptions},
};
use superoffload::internals::dtype::Dtype;
use superoffload::internals::hardware::Topology;
use superoffload::internals::host::HostMemory;
use superoffload::internals::launch::devices;
use superoffload::internals::memory::{Addressing, DeviceMemory};
use superoffload::internals::probe::{Product, States, Timer, kernels, memory_policy};
use superoffload::{Result, Settings};

/// The groups of cases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
enum Part {
    /// Copies by size, way, kind of memory and load.
    Link,
    /// Casts on either side, alone and with the copy.
    Cast,
    /// Launches, graphs, events, small copies, the verdict.
    Latency,
    /// Gradients out, the optimizer's pass, weights back, by the size of a bucket.
    Pipeline,
    /// Products of experts at the shapes of models, beside a loop of single products.
    Grouped,
}

/// Measures the device.
#[derive(Parser, Clone, Debug, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
struct Options {
    /// What computes.
    #[arg(long, value_name = "auto|cpu|cuda", default_value = "auto")]
    device: DeviceChoice,
    /// Small sizes and little time: whether it works.
    #[arg(long)]
    quick: bool,
    /// What is measured [default: all but grouped, which takes a GPU a minute and CPUs hours].
    #[arg(long, value_name = "PART,...", value_delimiter = ',', default_values = ["link", "cast", "latency", "pipeline"], hide_default_value = true)]
    parts: Vec<Part>,
    /// Largest copy, and largest tensor that is cast, in bytes [default: 1 GiB; 1 MiB with --quick].
    #[arg(long, value_name = "N")]
    max_bytes: Option<usize>,
    /// Time for each case [default: 0.2; 0.002 with --quick].
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<f64>,
    /// Who computes grouped products on a GPU.
    #[arg(long, value_enum, default_value_t = ExpertProducts::Own)]
    expert_products: ExpertProducts,
    /// Directory to search first for NVIDIA's libraries.
    #[arg(long, value_name = "DIR")]
    #[serde(skip)]
    cuda_libraries: Option<std::path::PathBuf>,
}

/// Size of the tensor that measures the bandwidth of device memory.
const POINTWISE_BYTES: usize = 256 << 20;

#[allow(unsafe_code)]
fn start(options: &Options) -> Result<()> {
    let machine = Topology::this_machine();
    let topology = if options.quick { small_caches(machine) } else { machine };
    let settings = Settings { device: options.device, cuda_libraries: options.cuda_libraries.clone(), ..Settings::default() };
    let chosen = devices::choose(&settings, &topology)?;
    chosen.note.iter().for_each(|why| eprintln!("no GPU and no link are measured: {why}"));
    // Users of the memory are declared later, so they are dropped earlier.
    let mut memory = HostMemory::new(memory_policy(&topology, chosen.machine.cpus)?);
    // SAFETY: loads run one job at a time and end before `memory` is dropped.
    let states = unsafe { States::new(&topology, &mut memory) }?;
    let cpus = chosen.machine.cpus;
    match chosen.machine.device {
        DeviceMemory::Shared => {
            // SAFETY: every case orders its streams by events, and `memory` outlives the device.
            let mut dev = unsafe { CpuDevice::new(cpus, StreamOrder::Threads, Default::default(), 0) }?;
            measure(options, (&mut dev, |_| Ok(())), None, &topology, &mut memory, &states)
        }
        DeviceMemory::Own { addressing, .. } => {
            let libraries = options.cuda_libraries.iter().cloned().collect();
            let engines = Engines { expert_products: options.expert_products, ..Engines::OWN };
            let gpu = CudaOptions { libraries, engines, trace_spans: 0, portable: false, first_way: Default::default() };
            // SAFETY: as for the CPU device; no kernel here reads indices.
            let mut dev = unsafe { CudaDevice::new(0, &gpu) }?;
            measure(options, (&mut dev, graph::measure), Some(addressing), &topology, &mut memory, &states)
        }
    }
}

/// Measures the chosen parts. `graphs` measures CUDA graphs if the device has them.
fn measure<D: Kernels>(
    options: &Options,
    (dev, graphs): (&mut D, impl Fn(&mut DeviceBench<'_, D>) -> Result<()>),
    addressing: Option<Addressing>,
    topology: &Topology,
    memory: &mut HostMemory,
    states: &States,
) -> Result<()> {
    let sizes = Sizes::new(options.quick, options.max_bytes, options.seconds);
    let facts = Facts::new("device_facts", topology, options);
    let mut timer = Timer::new(dev)?;
    let product = Product::new(timer.dev, Dtype::Bfloat16, sizes.product)?;
    let small = kernels::measure(&mut timer, sizes.max_bytes.min(POINTWISE_BYTES), product, 3.0 * sizes.seconds)?;
    let limits = Limits::measure(topology, states, addressing, (&facts, &small), sizes.seconds)?;
    let mut bench = DeviceBench { timer, memory, topology, states, addressing, sizes, limits, small, facts };
    for part in &options.parts {
        match part {
            Part::Link => link::measure(&mut bench)?,
            Part::Cast => cast::measure(&mut bench)?,
            Part::Latency => latency::measure(&mut bench).and_then(|()| graphs(&mut bench))?,
            Part::Pipeline => pipeline::measure(&mut bench)?,
            Part::Grouped => grouped::measure(&mut bench)?,
        }
    }
    Ok(())
}

fn main() -> std::process::ExitCode {
    microbench::exit_code(start(&Options::parse()))
}
