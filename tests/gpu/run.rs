//! The options of the suite, and the devices under test.

#![allow(unsafe_code)]

use super::experts;
use super::faults;
use super::harness::{Bench, Harness};
use super::kernels::{self, Suite};
#[cfg(feature = "cuda")]
use super::peers::Disturbance;
use super::peers::{self, Ranks};
use super::plans;
use super::report::Report;
use super::training::{self, Subject};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use superoffload::internals::device::{AttentionShape, CpuDevice, DeviceKind, ExpertProducts, FirstWay, Kernels, StreamOrder};
#[cfg(feature = "cuda")]
use superoffload::internals::device::{Matmul, MatmulLayout, MatmulShape, Stream};
#[cfg(feature = "cuda")]
use superoffload::internals::dtype::Dtype;
#[cfg(feature = "cuda")]
use superoffload::internals::launch::gpu::grouped_layouts;
use superoffload::internals::launch::{cpu_engine, on_cpus};
#[cfg(feature = "cuda")]
use superoffload::internals::launch::{gpu_engine, on_gpus};
use superoffload::internals::planner::{GroupedLayouts, Machine};
use superoffload::{Error, Result, TrainOptions};

/// Steps of a training run. The CPU device uses fewer, because tests/exactness.rs has many more.
#[cfg(feature = "cuda")]
const STEPS: usize = 30;
const CPU_STEPS: usize = 12;
const FULL_STEPS: usize = 200;
/// Memory of one case, for a CPU run and for the sizes of real workloads.
const CASE_BYTES: usize = 64 << 20;
const FULL_CASE_BYTES: usize = 1 << 30;

/// Cases to run, and on what: the CPU device with other settings than the reference has, and the GPU if there is one.
#[derive(clap::Args, Debug)]
pub struct Request {
    /// Run only cases with one of these texts in their names: kernels, training, "kernels/matmul Tn bfloat16".
    #[arg(value_name = "CASE")]
    cases: Vec<String>,

    /// Skip cases with this text in their names; may be given several times.
    #[arg(long, value_name = "CASE")]
    skip: Vec<String>,

    /// Test only this device.
    #[arg(long, value_enum)]
    device: Option<Tested>,

    /// Implementation of attention on the GPU.
    #[arg(long, value_enum, default_value_t = GpuAttention::Cudnn)]
    attention: GpuAttention,

    /// Implementation of expert matrix products on the GPU [default: cuBLASLt where supported, as in training].
    #[arg(long, value_enum)]
    expert_products: Option<ExpertProducts>,

    /// Directory to search first for NVIDIA's libraries.
    #[arg(long, value_name = "DIR")]
    cuda_libraries: Option<PathBuf>,

    /// Test only the kernels that every GPU since Ampere supports.
    #[arg(long)]
    portable: bool,

    /// Fail if there is no GPU.
    #[arg(long)]
    require_gpu: bool,

    /// Use the sizes of real workloads and 200 training steps on the CPU device, too, as on a GPU.
    #[arg(long)]
    full: bool,

    /// Use small sizes on the GPU, too, for a tool that slows kernels down.
    #[arg(long)]
    small: bool,

    /// Seed of the inputs.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Print a line for passed cases, too.
    #[arg(long)]
    verbose: bool,

    /// Let a kernel read where no memory is, and end with that error: what one case starts.
    #[arg(long, hide = true)]
    lose_gpu: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, clap::ValueEnum)]
enum Tested {
    Cpu,
    Cuda,
}

#[derive(Clone, Copy, Debug, PartialEq, clap::ValueEnum)]
enum GpuAttention {
    Cudnn,
    Products,
    Plain,
}

impl GpuAttention {
    /// Whether a GPU computes attention of a shape by products: all, or those that cuDNN lacks.
    fn by_products(self) -> fn(&AttentionShape) -> bool {
        match self {
            Self::Cudnn => |shape| shape.softcap.is_some() || shape.head_dim > 256,
            Self::Products => |_| true,
            Self::Plain => |_| false,
        }
    }

    /// The setting of training; `None` where training chooses it by itself.
    fn setting(self) -> Option<&'static str> {
        match self {
            Self::Cudnn => None,
            Self::Products => Some("products"),
            Self::Plain => Some("plain"),
        }
    }
}

impl Request {
    /// Every case on the GPU, as training uses it.
    pub fn of_the_gpu(cuda_libraries: Option<PathBuf>) -> Self {
        Self {
            cases: Vec::new(),
            skip: Vec::new(),
            device: Some(Tested::Cuda),
            attention: GpuAttention::Cudnn,
            expert_products: None,
            cuda_libraries,
            portable: false,
            require_gpu: true,
            full: false,
            small: false,
            seed: 0,
            verbose: false,
            lose_gpu: false,
        }
    }

    /// The settings of GPU trainings, as lines of a configuration file.
    ///
    /// # Errors
    /// `Usage` if the settings are invalid, which is checked without a GPU, too.
    fn output(&self) -> Result<String> {
        let attention = self.attention.setting().map(|name| format!("attention = {name:?}\n"));
        let libraries = self.cuda_libraries.as_ref().map(|dir| format!("cuda-libraries = {:?}\n", dir.display().to_string()));
        let output: String = ["device = \"cuda\"\n".into()].into_iter().chain(attention).chain(libraries).collect();
        TrainOptions::from_toml(&output)?;
        Ok(output)
    }

    /// Whether cuBLASLt computes expert products on the GPU: as requested, or as in training.
    #[cfg(feature = "cuda")]
    fn grouped_layouts(&self) -> GroupedLayouts {
        match self.expert_products {
            None => grouped_layouts(self.cuda_libraries.as_slice()),
            Some(ExpertProducts::Cublaslt) => GroupedLayouts::Usable,
            Some(ExpertProducts::Own) => GroupedLayouts::Unknown,
        }
    }

    fn wants(&self, device: Tested) -> bool {
        self.device.is_none_or(|wanted| wanted == device)
    }
}

/// Runs the selected cases and prints lines to `out`.
///
/// # Errors
/// `Resource` or `Unsupported` without a required GPU, `Usage` if no case has a selected name.
pub fn conduct(request: &Request, out: Box<dyn Write>) -> Result<Report<Box<dyn Write>>> {
    let mut report = Report::new(out, [request.cases.clone(), request.skip.clone()], request.verbose, request.seed);
    if request.lose_gpu {
        return lose_gpu().map(|()| report);
    }
    let output = request.output()?;
    if request.wants(Tested::Cpu) {
        // More threads than cores and than the reference has; then streams that run in any order that events permit.
        cpu(&mut report, request, 5, StreamOrder::Threads)?;
        cpu(&mut report, request, 3, StreamOrder::Adversary { seed: 3 })?;
    }
    let gpu = if request.wants(Tested::Cuda) { find_gpu() } else { Ok(()) };
    match gpu {
        Ok(()) if request.wants(Tested::Cuda) => cuda(&mut report, request, &output)?,
        Ok(()) => {}
        Err(why) if request.require_gpu => return Err(why),
        Err(why) => report.print_line(&format!("cuda: skipped ({why})")),
    }
    report.finish();
    let has_tried = request.wants(Tested::Cpu) || request.require_gpu;
    if has_tried && !report.has_run() {
        return Err(Error::usage("no case is called so; `--verbose` names all"));
    }
    Ok(report)
}

#[cfg(feature = "cuda")]
fn find_gpu() -> Result<()> {
    superoffload::internals::device::cuda::probe(0).map(drop)
}

#[cfg(feature = "cuda")]
fn cuda<W: Write>(report: &mut Report<W>, request: &Request, settings: &str) -> Result<()> {
    use superoffload::internals::device::{
        Attention, Engines,
        cuda::{CudaDevice, CudaOptions, free_bytes, probe, visible_gpus},
    };
    use superoffload::internals::memory::DeviceMemory;
    let attention = match request.attention {
        GpuAttention::Cudnn => Attention::CudnnOrProducts { deterministic: true },
        GpuAttention::Products => Attention::Products,
        GpuAttention::Plain => Attention::Plain,
    };
    let device = DeviceMemory::Own { bytes: free_bytes(0)?, addressing: probe(0)? };
    let machine = Machine { kind: DeviceKind::Gpu, device, grouped_layouts: request.grouped_layouts(), ..Machine::cpu(4) };
    let subject = Subject {
        engine: &|plan, shape, topology| gpu_engine(plan, shape, topology, request.portable),
        machine,
        settings,
        same_bits: false,
        overlaps: true,
        steps: if request.small { STEPS } else { FULL_STEPS },
    };
    let open_at = |ordinal, expert_products, first_way| -> Result<Box<dyn Kernels>> {
        let (libraries, engines) =
            (request.cuda_libraries.iter().cloned().collect(), Engines { attention, expert_products, ..Engines::OWN });
        let options = CudaOptions { libraries, engines, trace_spans: 0, portable: request.portable, first_way };
        // SAFETY: as for the CPU, and tokens are inside their tables.
        Ok(Box::new(unsafe { CudaDevice::new(ordinal, &options) }?))
    };
    conform(report, request, &|by, first_way| open_at(0, by, first_way), &subject, !request.small)?;
    let ranks = Ranks {
        launch: &|plan, shape, topology, training| on_gpus(plan, shape, topology, request.portable, training),
        machine: subject.machine.clone(),
        settings,
        devices: visible_gpus()?.len(),
        overlaps: true,
        disturb: &|rank, disturbance| multiply_now_and_then(&mut *open_at(rank, ExpertProducts::Own, FirstWay::Whole)?, rank, disturbance),
        steps: STEPS,
        late_runs: if request.small { 5 } else { 100 },
    };
    peers::run(report, &ranks);
    report.case("faults/a lost GPU", faults::lost_gpu);
    Ok(())
}

/// Products on a separate stream repeatedly occupy the GPU's multiprocessors for some milliseconds, which delays the rank.
#[cfg(feature = "cuda")]
fn multiply_now_and_then(dev: &mut dyn Kernels, rank: usize, disturbance: &Disturbance) -> Result<()> {
    const ELEMS: usize = 4096;
    let shape = MatmulShape { layout: MatmulLayout::Nn, m: ELEMS, n: ELEMS, k: ELEMS };
    let mut matrix = |name| dev.alloc(name, ELEMS * ELEMS, Dtype::Bfloat16);
    let (matrices, done) = ([matrix("a")?, matrix("b")?, matrix("c")?], dev.event()?);
    disturbance.while_late(rank, || {
        (0..8).try_for_each(|_| dev.launch(Matmul::plain(shape, matrices)))?;
        dev.record(done, Stream::Compute)?;
        dev.synchronize(done)
    })
}

/// A sticky error destroys the whole context, so it needs a separate process.
#[cfg(feature = "cuda")]
fn lose_gpu() -> Result<()> {
    use superoffload::internals::device::cuda::{CudaDevice, CudaOptions};
    let engines = superoffload::internals::device::Engines::OWN;
    let options = CudaOptions { libraries: Vec::new(), engines, trace_spans: 0, portable: false, first_way: FirstWay::default() };
    // SAFETY: only the GPU reads outside of its table, which it rejects. This process does not use it for anything else.
    let gpu = unsafe { CudaDevice::new(0, &options) }?;
    faults::read_nowhere(&mut Harness::new(Box::new(gpu), 1 << 20)?)
}

#[cfg(not(feature = "cuda"))]
fn lose_gpu() -> Result<()> {
    find_gpu()
}

#[cfg(not(feature = "cuda"))]
fn cuda<W: Write>(_: &mut Report<W>, _: &Request, _: &str) -> Result<()> {
    find_gpu()
}

#[cfg(not(feature = "cuda"))]
fn find_gpu() -> Result<()> {
    Err(Error::Unsupported("this build has no CUDA device".into()))
}

fn cpu<W: Write>(report: &mut Report<W>, request: &Request, threads: usize, schedule: StreamOrder) -> Result<()> {
    let lines = format!("device = \"cpu\"\nthreads = {threads}\n");
    let settings = match schedule {
        StreamOrder::Threads => lines,
        StreamOrder::Adversary { seed } => format!("{lines}adversary = {seed}\n"),
    };
    let subject = Subject {
        engine: &cpu_engine,
        machine: Machine::cpu(2),
        settings: &settings,
        same_bits: true,
        // The scheduler of a busy machine decides whether threads run in parallel.
        overlaps: false,
        steps: if request.full { FULL_STEPS } else { CPU_STEPS },
    };
    let open = |_, _| cpu_device(threads, schedule);
    conform(report, request, &open, &subject, request.full)?;
    if schedule != StreamOrder::Threads {
        // tests/exactness.rs runs the adversary on up to four devices.
        return Ok(());
    }
    let ranks = Ranks {
        launch: &|plan, shape, topology, training| on_cpus(plan, shape, topology, training),
        machine: subject.machine.clone(),
        settings: subject.settings,
        devices: 4,
        overlaps: false,
        // The cores are already oversubscribed.
        disturb: &|_, _| Ok(()),
        steps: 8,
        late_runs: 3,
    };
    peers::run(report, &ranks);
    Ok(())
}

fn cpu_device(threads: usize, schedule: StreamOrder) -> Result<Box<dyn Kernels>> {
    // SAFETY: the cases wait for their enqueued work, and a harness drops its device before the memory of its copies.
    Ok(Box::new(unsafe { CpuDevice::new(threads, schedule, Arc::default(), 0) }?))
}

/// Runs all selected cases on devices from `open`. The engines of `subject` open their own devices.
fn conform<D: Kernels, W: Write>(
    report: &mut Report<W>,
    request: &Request,
    open: &dyn Fn(ExpertProducts, FirstWay) -> Result<Box<dyn Kernels>>,
    subject: &Subject<'_, D>,
    full: bool,
) -> Result<()> {
    let bytes = if full { FULL_CASE_BYTES } else { CASE_BYTES };
    // The reference is slow at the sizes of real workloads.
    let threads = if full { std::thread::available_parallelism().map_or(2, |cpus| cpus.get()) } else { 2 };
    let reference = Harness::new(cpu_device(threads, StreamOrder::Threads)?, bytes)?;
    let own = Harness::new(open(ExpertProducts::Own, FirstWay::Whole)?, bytes)?;
    let by_products = if subject.machine.kind == DeviceKind::Gpu { request.attention.by_products() } else { |_: &_| false };
    let mut bench = Bench { subject: own, reference, same_bits: subject.same_bits, full, by_cublaslt: false, by_products };
    let kernels = if request.portable && subject.machine.kind == DeviceKind::Gpu { ", portable kernels" } else { "" };
    report.begin(&format!("{}: {}{kernels}", bench.subject.dev.describe(), subject.settings.trim_end().replace('\n', ", ")));
    kernels::run(&mut Suite { bench: &mut bench, report, seed: request.seed, lost: false });
    faults::run(report, &mut bench.subject);
    if subject.machine.grouped_layouts == GroupedLayouts::Usable {
        (bench.subject, bench.by_cublaslt) = (Harness::new(open(ExpertProducts::Cublaslt, FirstWay::Whole)?, bytes)?, true);
        experts::products(&mut Suite { bench: &mut bench, report, seed: request.seed, lost: false });
    }
    // The CPU device computes every product in one way.
    let later_ways = if subject.same_bits { &[][..] } else { &[FirstWay::Slices, FirstWay::Widened] };
    for &first_way in later_ways {
        bench.subject = Harness::new(open(ExpertProducts::Own, first_way)?, bytes)?;
        plans::parts(&mut Suite { bench: &mut bench, report, seed: request.seed, lost: false }, first_way);
    }
    // Drops the devices first, because a GPU cannot hold two users that allocate all free memory.
    drop(bench);
    training::run(report, subject);
    Ok(())
}
