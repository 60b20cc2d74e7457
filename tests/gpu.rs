//! Conformance of devices: one binary, without cargo or a test harness, to be copied to a machine with a GPU.
//!
//! `gpu [FILTER]...` runs the cases whose name holds a filter (`kernels`, `training`, `faults`, `kernels/matmul Tn bfloat16`), on the CPU
//! device with other settings and on the GPU if there is one. It exits 1 if a case failed, 2 if it could not do what was asked,
//! or, with `--require-gpu`, when no case is called so.
//!
//! - `--skip TEXT`: no case whose name holds it; can be given again
//! - `--device cpu|cuda`: only this one
//! - `--attention cudnn|plain`: who computes it on the GPU
//! - `--portable`: only kernels that every GPU since Ampere takes
//! - `--require-gpu`: no GPU is an error
//! - `--full`: the sizes of real workloads and 200 steps of training, which the GPU gets anyway, on the CPU device, too
//! - `--small`: neither on the GPU, as for a tool that slows every kernel down
//! - `--seed N`: other inputs
//! - `--json FILE`: every case with its time and its largest error as a part of the bound
//! - `--verbose`: a line for every case that passes, too
//! - `--lose-gpu`: instead of all this, lets a kernel read where no memory is and ends with that error: what one case starts
#![allow(unsafe_code)]

#[path = "gpu/mod.rs"]
mod suite;

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use suite::harness::{Bench, Harness};
use suite::kernels::Suite;
#[cfg(feature = "cuda")]
use suite::peers::Disturbance;
use suite::peers::Ranks;
use suite::report::Report;
use suite::training::Subject;
use superoffload::internals::device::{CpuDevice, Kernels, Schedule};
#[cfg(feature = "cuda")]
use superoffload::internals::device::{Matmul, MatmulLayout, MatmulShape, Stream};
#[cfg(feature = "cuda")]
use superoffload::internals::dtype::Dtype;
#[cfg(feature = "cuda")]
use superoffload::internals::launch::on_gpus;
use superoffload::internals::launch::{cpu_engine, on_cpus};
use superoffload::internals::planner::Machine;
use superoffload::{Error, Result};

/// Steps of a training run.
const STEPS: usize = 30;
const FULL_STEPS: usize = 200;
/// Room for one case: as much as a CPU run needs, and as the sizes of real workloads need.
const CASE_BYTES: usize = 64 << 20;
const FULL_CASE_BYTES: usize = 1 << 30;

/// What the command line asks for.
#[derive(Default)]
struct Options {
    filters: Vec<String>,
    skips: Vec<String>,
    device: Option<String>,
    plain_attention: bool,
    portable: bool,
    require_gpu: bool,
    full: bool,
    small: bool,
    verbose: bool,
    lose_gpu: bool,
    seed: u64,
    json: Option<PathBuf>,
}

impl Options {
    fn parse(mut args: impl Iterator<Item = String>) -> Result<Self> {
        let mut options = Self::default();
        while let Some(arg) = args.next() {
            let mut value = || args.next().ok_or_else(|| Error::usage(format!("{arg}: a value is missing")));
            match arg.as_str() {
                "--skip" => options.skips.push(value()?),
                "--device" => options.device = Some(value()?),
                "--attention" => options.plain_attention = value()? == "plain",
                "--seed" => options.seed = value()?.parse().map_err(|e| Error::usage(format!("--seed: {e}")))?,
                "--json" => options.json = Some(value()?.into()),
                "--portable" => options.portable = true,
                "--require-gpu" => options.require_gpu = true,
                "--full" => options.full = true,
                "--small" => options.small = true,
                "--verbose" => options.verbose = true,
                "--lose-gpu" => options.lose_gpu = true,
                // cargo test hands every binary the options of the usual harness; these change nothing here.
                "--nocapture" | "--no-capture" | "--quiet" | "-q" => {}
                "--test-threads" => drop(value()?),
                _ if arg.starts_with("--test-threads=") => {}
                _ if arg.starts_with('-') => return Err(Error::usage(format!("{arg}: unknown; see the head of tests/gpu.rs"))),
                _ => options.filters.push(arg),
            }
        }
        match options.device.as_deref() {
            None | Some("cpu" | "cuda") => Ok(options),
            Some(other) => Err(Error::usage(format!("--device {other}: cpu or cuda"))),
        }
    }

    fn wants(&self, device: &str) -> bool {
        self.device.as_deref().is_none_or(|wanted| wanted == device)
    }
}

fn main() -> ExitCode {
    let mut report = Report::new(std::io::stdout(), Vec::new(), Vec::new(), false);
    let start = |options: Options| if options.lose_gpu { lose_gpu().map(|()| 0) } else { run(&options) };
    match Options::parse(std::env::args().skip(1)).and_then(start) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            report.say(&format!("error: {e}"));
            ExitCode::from(2)
        }
    }
}

/// Runs what is asked for; returns the exit code.
fn run(options: &Options) -> Result<u8> {
    let mut report = Report::new(std::io::stdout(), options.filters.clone(), options.skips.clone(), options.verbose);
    if options.wants("cpu") {
        // More threads than cores and than the reference has; then streams that run in any order that their events allow.
        cpu(&mut report, options, 5, Schedule::Threads)?;
        cpu(&mut report, options, 3, Schedule::Adversary { seed: 3 })?;
    }
    let gpu = if options.wants("cuda") { find_gpu() } else { Ok(()) };
    match &gpu {
        Ok(()) if options.wants("cuda") => cuda(&mut report, options)?,
        Ok(()) => {}
        Err(why) => report.say(&format!("cuda: skipped ({why})")),
    }
    report.finish();
    // With cargo's filters, which are of other tests, too, there may be none.
    if options.require_gpu && gpu.is_ok() && !report.has_run() {
        return Err(Error::usage("no case is called so; `--verbose` names all"));
    }
    if let Some(path) = &options.json {
        report.write(path, options.seed)?;
    }
    Ok(if gpu.is_err() && options.require_gpu { 2 } else { u8::from(report.has_failed()) })
}

#[cfg(feature = "cuda")]
fn find_gpu() -> Result<()> {
    superoffload::internals::device::cuda::probe(0).map(drop)
}

#[cfg(feature = "cuda")]
fn cuda<W: Write>(report: &mut Report<W>, options: &Options) -> Result<()> {
    use superoffload::internals::device::{
        Attention, DeviceKind,
        cuda::{CudaDevice, CudaOptions, free_bytes, probe, visible_gpus},
    };
    use superoffload::internals::memory::DeviceMemory;
    let attention = if options.plain_attention { Attention::Plain } else { Attention::Cudnn { deterministic: true } };
    let settings = if options.plain_attention { "device = \"cuda\"\nattention = \"plain\"\n" } else { "device = \"cuda\"\n" };
    let machine =
        Machine { kind: DeviceKind::Gpu, device: DeviceMemory::Own { bytes: free_bytes(0)?, addressing: probe(0)? }, ..Machine::cpu(4) };
    let subject = Subject {
        engine: &superoffload::internals::launch::gpu_engine,
        machine,
        settings,
        same_bits: false,
        overlaps: true,
        steps: if options.small { STEPS } else { FULL_STEPS },
    };
    let options_of_gpu = &CudaOptions { libraries: Vec::new(), attention, trace_spans: 0, portable: options.portable };
    let open_at = |ordinal| -> Result<Box<dyn Kernels>> {
        // SAFETY: as for the CPU, and tokens lie inside of their tables.
        Ok(Box::new(unsafe { CudaDevice::new(ordinal, options_of_gpu) }?))
    };
    conform(report, options, &|| open_at(0), &subject, !options.small)?;
    let ranks = Ranks {
        launch: &|plan, shape, topology, training| on_gpus(plan, shape, topology, training),
        machine: subject.machine.clone(),
        settings,
        devices: visible_gpus()?.len(),
        overlaps: true,
        disturb: &|rank, disturbance| multiply_now_and_then(&mut *open_at(rank)?, rank, disturbance),
        steps: STEPS,
        late_runs: if options.small { 5 } else { 100 },
    };
    suite::peers::run(report, &ranks);
    report.case("faults/a lost GPU", || suite::faults::lost_gpu(&["--lose-gpu"]));
    Ok(())
}

/// Products on a stream of its own keep the GPU's multiprocessors from the rank that trains there, for some milliseconds each time.
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

/// A sticky fault takes the whole context with it, so that this needs a process of its own.
#[cfg(feature = "cuda")]
fn lose_gpu() -> Result<()> {
    use superoffload::internals::device::cuda::{CudaDevice, CudaOptions};
    let attention = superoffload::internals::device::Attention::Plain;
    let options = CudaOptions { libraries: Vec::new(), attention, trace_spans: 0, portable: false };
    // SAFETY: what is read outside of its table is read by the GPU, which refuses; this process has no other use for it.
    let gpu = unsafe { CudaDevice::new(0, &options) }?;
    suite::faults::read_nowhere(&mut Harness::new(Box::new(gpu), 1 << 20)?)
}

#[cfg(not(feature = "cuda"))]
fn lose_gpu() -> Result<()> {
    find_gpu()
}

#[cfg(not(feature = "cuda"))]
fn cuda<W: Write>(_: &mut Report<W>, _: &Options) -> Result<()> {
    find_gpu()
}

#[cfg(not(feature = "cuda"))]
fn find_gpu() -> Result<()> {
    Err(Error::Unsupported("this build has no CUDA device".into()))
}

fn cpu<W: Write>(report: &mut Report<W>, options: &Options, threads: usize, schedule: Schedule) -> Result<()> {
    let lines = format!("device = \"cpu\"\nthreads = {threads}\n");
    let settings = match schedule {
        Schedule::Threads => lines,
        Schedule::Adversary { seed } => format!("{lines}adversary = {seed}\n"),
    };
    let subject = Subject {
        engine: &cpu_engine,
        machine: Machine::cpu(2),
        settings: &settings,
        same_bits: true,
        // Whether threads of a busy machine ran side by side is the scheduler's affair.
        overlaps: false,
        steps: if options.full { FULL_STEPS } else { STEPS },
    };
    let open = || cpu_device(threads, schedule);
    conform(report, options, &open, &subject, options.full)?;
    if schedule != Schedule::Threads {
        // tests/exactness.rs has the adversary meet up to four devices.
        return Ok(());
    }
    let ranks = Ranks {
        launch: &|plan, shape, topology, training| on_cpus(plan, shape, topology, training),
        machine: subject.machine.clone(),
        settings: subject.settings,
        devices: 2,
        overlaps: false,
        // Cores are crowded as it is.
        disturb: &|_, _| Ok(()),
        steps: 8,
        late_runs: 3,
    };
    suite::peers::run(report, &ranks);
    Ok(())
}

fn cpu_device(threads: usize, schedule: Schedule) -> Result<Box<dyn Kernels>> {
    // SAFETY: the cases wait for what they have enqueued, and a harness drops its device before the memory that it copies.
    Ok(Box::new(unsafe { CpuDevice::new(threads, schedule, Arc::default(), 0) }?))
}

/// Everything that is asked for, on the device that `open` opens. The engines of `subject` open their own.
fn conform<D: Kernels, W: Write>(
    report: &mut Report<W>,
    options: &Options,
    open: &dyn Fn() -> Result<Box<dyn Kernels>>,
    subject: &Subject<'_, D>,
    full: bool,
) -> Result<()> {
    let bytes = if full { FULL_CASE_BYTES } else { CASE_BYTES };
    // The sizes of real workloads take the reference a while.
    let threads = if full { std::thread::available_parallelism().map_or(2, |cpus| cpus.get()) } else { 2 };
    let reference = Harness::new(cpu_device(threads, Schedule::Threads)?, bytes)?;
    let mut bench = Bench { subject: Harness::new(open()?, bytes)?, reference, same_bits: subject.same_bits, full };
    report.begin(&format!("{}: {}", bench.subject.dev.describe(), subject.settings.trim_end().replace('\n', ", ")));
    suite::kernels::run(&mut Suite { bench: &mut bench, report, seed: options.seed, lost: false });
    suite::faults::run(report, &mut bench.subject);
    // A GPU has no room for two who take what they find.
    drop(bench);
    suite::training::run(report, subject);
    Ok(())
}
