//! How fast the engine's own pool steps buckets, without a model and without a GPU.
//!
//! Memory, pool, placement and jobs are those of `train`; only the driver is simpler: it submits a job, waits for its end
//! and submits the next. One JSON line per row on stdout, a table at the end.
//!
//! The pass `copy` writes fp32 parameters into fp32 slots, past the caches with streaming stores: what the same threads get
//! out of the same memory without arithmetic, 8 bytes a parameter. The last column is a row's share of the best copy.
//!
//! `wall` is what the driver sees. `busy` is what the workers would reach without waiting for a job or for each other:
//! parameters over the mean time of a worker's shares. The difference is split into `skew` (workers that are done before
//! the last one) and `handover` (from the last share's end to the next one's start, waking included).

use clap::Parser;
use half::bf16;
use serde_json::json;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use superoffload::bucket::slot::Slot;
use superoffload::dtype::Dtype;
use superoffload::engine::coordinator::{GradUpdate, Update, Work};
use superoffload::engine::trace::Recorder;
use superoffload::error::{Error, Result};
use superoffload::hardware::topology::Topology;
use superoffload::host::affinity::{Placement, name_and_pin};
use superoffload::host::doorbell::Doorbell;
use superoffload::host::pinned::{HostMemory, PinnedSlice};
use superoffload::host::pool::{Job, Pool};
use superoffload::host::step_job::{HostState, Segment, SlotMemory, StepJob, StepMemory};
use superoffload::optim::adam::AdamHyper;
use superoffload::optim::simd::{AdamKernels, Isa, Stores};

/// Measures the optimizer's pool.
#[derive(Parser)]
struct Options {
    /// Worker threads, one pool each.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,2,4,8,12,15,16")]
    threads: Vec<usize>,
    /// Parameters; each costs 16 bytes of memory, and their state should be several times the last-level cache.
    #[arg(long, value_name = "N", default_value_t = 1 << 30)]
    params: usize,
    /// Parameters of a bucket.
    #[arg(long, value_name = "N", default_value_t = 32 << 20)]
    bucket_params: usize,
    /// Passes to measure.
    #[arg(long, value_name = "PASS,...", value_delimiter = ',', default_value = "copy,speculate,step,commit,commit_then_speculate")]
    passes: Vec<Pass>,
    /// Time for each row.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.4)]
    seconds: f64,
    /// Instruction set; the fastest by default.
    #[arg(long, value_name = "NAME", default_value_t = Isa::detect())]
    isa: Isa,
    /// How results are written.
    #[arg(long, value_name = "KIND,...", value_delimiter = ',', default_value = "temporal,stream-weights,streaming")]
    stores: Vec<Writes>,
    /// Elements by which software asks ahead for memory; 0: not at all.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "0,512")]
    prefetch: Vec<usize>,
}

#[derive(Clone, Copy, clap::ValueEnum)]
enum Writes {
    Temporal,
    StreamWeights,
    Streaming,
}

impl From<Writes> for Stores {
    fn from(writes: Writes) -> Self {
        match writes {
            Writes::Temporal => Self::Temporal,
            Writes::StreamWeights => Self::StreamWeights,
            Writes::Streaming => Self::Streaming,
        }
    }
}

#[derive(Clone, Copy, clap::ValueEnum)]
#[value(rename_all = "snake_case")]
enum Pass {
    Copy,
    Speculate,
    Step,
    Commit,
    CommitThenSpeculate,
}

/// Parameter slots: as many buckets may be on their way to the device.
const PARAM_SLOTS: usize = 4;

/// Jobs before the clock starts: pages are mapped, threads awake, branches known.
const WARM_UP: usize = 2;

/// Most jobs of a row; a worker's recorder has room for so many spans.
const JOBS_MAX: usize = 1 << 12;

impl Pass {
    const fn name(self) -> &'static str {
        match self {
            Self::Copy => "copy",
            Self::Speculate => "speculate",
            Self::Step => "step",
            Self::Commit => "commit",
            Self::CommitThenSpeculate => "commit_then_speculate",
        }
    }

    fn work(self, buckets: usize, bucket: usize) -> Work {
        let update = |optimizer_step| Update { optimizer_step, learning_rate: 1e-5, scale: 0.5 };
        let pending = GradUpdate { grads: Slot(bucket), update: update(1000) };
        let next = GradUpdate { grads: Slot(buckets + bucket), update: update(1001) };
        match self {
            Self::Copy => Work::Restore { undo: None },
            Self::Speculate => Work::CommitThenSpeculate { pending: None, next },
            Self::Step => Work::Step { undo: None, next },
            Self::Commit => Work::Commit(next),
            Self::CommitThenSpeculate => Work::CommitThenSpeculate { pending: Some(pending), next },
        }
    }
}

/// Buckets in mid-training, with two gradients each.
struct Buckets {
    memory: StepMemory,
    /// For copies.
    fp32_slots: SlotMemory,
    count: usize,
    elems: usize,
    /// Keeps what `memory` looks into.
    _host: HostMemory,
}

impl Buckets {
    fn new(options: &Options) -> Result<Self> {
        let (elems, mut host) = (options.bucket_params, HostMemory::default());
        let count = (options.params / elems).max(1);
        let mut slots = |name: &str, slots: usize, dtype: Dtype| -> Result<SlotMemory> {
            let memory = host.alloc(name, slots * elems * dtype.bytes())?;
            Ok(SlotMemory { memory, slot_elems: elems, dtype })
        };
        let grads = slots("gradient slots", 2 * count, Dtype::Bfloat16)?;
        let params = slots("parameter slots", PARAM_SLOTS, Dtype::Bfloat16)?;
        let fp32_slots = slots("fp32 slots", PARAM_SLOTS, Dtype::Float32)?;
        let mut state = |name: &str| host.alloc(name, count * elems * 4);
        let state = HostState { params: state("parameters")?, m: state("m")?, v: state("v")? };
        fill(state.params, 0.02f32);
        fill(state.m, 1e-3f32);
        fill(state.v, 1e-6f32);
        fill(grads.memory, bf16::from_f32(1e-3));
        fill(params.memory, bf16::ZERO);
        fill(fp32_slots.memory, 0.0f32);
        let memory = StepMemory {
            state,
            grads,
            params,
            segments: Arc::new([Segment { range: 0..count * elems, decay: true }]),
            hyper: AdamHyper { lr: 1e-5, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 },
            kernels: AdamKernels::new(options.isa)?,
        };
        Ok(Self { memory, fp32_slots, count, elems, _host: host })
    }

    /// The `index`th job of a row.
    fn job(&self, kernels: AdamKernels, pass: Pass, index: usize) -> StepJob {
        let bucket = index % self.count;
        let work = pass.work(self.count, bucket);
        let out = (!matches!(work, Work::Commit(_))).then_some(Slot(index % PARAM_SLOTS));
        let params = if matches!(pass, Pass::Copy) { self.fp32_slots } else { self.memory.params };
        // The index, not the bucket: the spans of one job find each other by it.
        StepJob {
            bucket: index,
            range: bucket * self.elems..(bucket + 1) * self.elems,
            work,
            out,
            memory: StepMemory { kernels, params, ..self.memory.clone() },
        }
    }
}

/// Writes `value` everywhere, on all CPUs.
fn fill<T: bytemuck::Pod + Send>(memory: PinnedSlice, value: T) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    memory.with(|all: &mut [T]| {
        let share = all.len().div_ceil(threads).max(1);
        std::thread::scope(|scope| all.chunks_mut(share).for_each(|part| drop(scope.spawn(move || part.fill(value)))));
    });
}

/// One line of the table.
struct Row {
    pass: &'static str,
    threads: usize,
    pinned: bool,
    kernels: AdamKernels,
    jobs: usize,
    bytes_per_param: f64,
    /// 1e9 parameters a second, over all jobs and of the median job.
    wall: f64,
    median: f64,
    busy: f64,
    /// Shares of the workers' time, in percent.
    skew: f64,
    handover: f64,
    /// The best copy of as many threads, if one was measured.
    copy_gb_s: Option<f64>,
}

impl Row {
    fn gb_s(&self) -> f64 {
        self.wall * self.bytes_per_param
    }

    fn share_of_copy(&self) -> Option<f64> {
        self.copy_gb_s.map(|copy| self.gb_s() / copy)
    }

    fn json(&self) -> serde_json::Value {
        json!({
            "pass": self.pass, "threads": self.threads, "pinned": self.pinned, "kernels": self.kernels.to_string(), "jobs": self.jobs,
            "gparam_s": self.wall, "gb_s": self.gb_s(), "share_of_copy": self.share_of_copy(),
            "median_gparam_s": self.median, "busy_gparam_s": self.busy, "busy_gb_s": self.busy * self.bytes_per_param,
            "skew_percent": self.skew, "handover_percent": self.handover,
        })
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pass, kernels, threads, wall, median, busy, bytes_per_param, skew, handover, .. } = self;
        let kernels = kernels.to_string();
        let (gb_s, busy_gb_s) = (self.gb_s(), busy * bytes_per_param);
        write!(
            f,
            "{kernels:<27} {pass:<22} {threads:>7} {wall:>8.3} {gb_s:>7.1} {median:>8.3} {busy:>8.3} {busy_gb_s:>7.1} {skew:>6.1} {handover:>8.1}"
        )?;
        self.share_of_copy().map_or(Ok(()), |share| write!(f, " {:>7.0}", 100.0 * share))
    }
}

const HEADER: &str =
    "kernels                     pass                   threads   Gpar/s    GB/s   median     busy    GB/s skew %  handover % of copy %";

fn measure(buckets: &Buckets, kernels: AdamKernels, pass: Pass, threads: usize, seconds: f64) -> Result<Row> {
    let bell = Arc::new(Doorbell::default());
    let cpus = worker_cpus(threads);
    let pinned = cpus.is_some();
    let on_start = move |worker: usize| cpus.as_ref().map_or(Ok(()), |cpus| name_and_pin("adam", worker, cpus[worker]));
    let mut pool = Pool::threads(threads, bell.clone(), JOBS_MAX, on_start)?;
    let mut run = |index| -> Result<Duration> {
        let started = Instant::now();
        pool.submit(buckets.job(kernels, pass, index));
        let mut idle = Ok(false);
        bell.wait_until(|| {
            idle = pool.is_idle();
            !matches!(idle, Ok(false))
        });
        idle.map(|_| started.elapsed())
    };
    for index in 0..WARM_UP {
        run(index)?;
    }
    let (started, mut times) = (Instant::now(), Vec::new());
    while WARM_UP + times.len() < JOBS_MAX && (times.is_empty() || started.elapsed().as_secs_f64() < seconds) {
        times.push(run(WARM_UP + times.len())?);
    }
    let wall_s = started.elapsed().as_secs_f64();
    times.sort_unstable();
    let sample = buckets.job(kernels, pass, 0);
    let spans = Spans::new(&pool.finish()?, times.len());
    let (jobs, elems) = (times.len(), buckets.elems as f64 * 1e-9);
    let busy_s = spans.shares_s / threads as f64;
    Ok(Row {
        pass: pass.name(),
        threads,
        pinned,
        kernels,
        jobs,
        bytes_per_param: sample.traffic_bytes() as f64 / buckets.elems as f64,
        wall: elems * jobs as f64 / wall_s,
        median: elems / times[jobs / 2].as_secs_f64(),
        busy: elems * jobs as f64 / busy_s,
        skew: 100.0 * (spans.longest_s - busy_s) / wall_s,
        handover: 100.0 * (wall_s - spans.longest_s) / wall_s,
        copy_gb_s: None,
    })
}

/// What the workers recorded of the jobs after the warm-up.
struct Spans {
    /// All shares.
    shares_s: f64,
    /// The jobs, each from the start of its first share to the end of its last.
    longest_s: f64,
}

impl Spans {
    fn new(workers: &[Recorder], jobs: usize) -> Self {
        let seconds = |ns: u64| ns as f64 * 1e-9;
        let of_job = |job: usize| workers.iter().map(move |worker| &worker.spans()[WARM_UP + job]);
        let length = |job| {
            let start = of_job(job).map(|span| span.start_ns).min().unwrap_or(0);
            let end = of_job(job).map(|span| span.start_ns + span.duration_ns).max().unwrap_or(0);
            seconds(end - start)
        };
        Self { shares_s: (0..jobs).flat_map(of_job).map(|span| seconds(span.duration_ns)).sum(), longest_s: (0..jobs).map(length).sum() }
    }
}

/// A CPU for each worker, where `train` would give it one.
fn worker_cpus(threads: usize) -> Option<Vec<usize>> {
    let topology = Topology::this_machine();
    let usable = topology.usable_cpus().filter(|usable| usable.quota.is_none())?;
    Placement::choose(&topology.cpus, &usable.affinity, threads).map(|placement| placement.workers)
}

/// Every combination of stores and prefetch.
fn kernels(options: &Options) -> Result<Vec<AdamKernels>> {
    let kernels = AdamKernels::new(options.isa)?;
    let stores = options.stores.iter().map(|&stores| kernels.with_stores(stores.into()));
    Ok(stores.flat_map(|kernels| options.prefetch.iter().map(move |&elems| kernels.with_prefetch(elems))).collect())
}

fn run(options: &Options) -> Result<()> {
    if options.bucket_params == 0 || options.threads.contains(&0) {
        return Err(Error::usage("--bucket-params and --threads: at least 1"));
    }
    let buckets = Buckets::new(options)?;
    let mut rows = Vec::new();
    for &threads in &options.threads {
        let first = rows.len();
        for &pass in &options.passes {
            for kernels in kernels(options)? {
                rows.push(measure(&buckets, kernels, pass, threads, options.seconds)?);
            }
        }
        let copies = rows[first..].iter().filter(|row| row.pass == Pass::Copy.name()).map(Row::gb_s);
        let copy_gb_s = copies.reduce(f64::max);
        for row in &mut rows[first..] {
            row.copy_gb_s = copy_gb_s;
            println!("{}", row.json());
        }
    }
    println!("\n{}: {} buckets of {}\n{HEADER}", microbench::Machine::here(), buckets.count, buckets.elems);
    rows.iter().for_each(|row| println!("{row}"));
    Ok(())
}

fn main() -> std::process::ExitCode {
    match run(&Options::parse()) {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            std::process::ExitCode::FAILURE
        }
    }
}
