//! Measures the speed at which the engine's optimizer pool updates buckets, without a model and without a GPU.
//!
//! Memory, pool, placement and jobs are those of `train`. Only the driver is simpler: it submits a job, waits for its end and submits the
//! next one. Before it times a pass, it compares the result with the scalar specification. It prints one JSON line per row to stdout and a
//! table to stderr.
//!
//! Rows without kernels measure memory: the same threads use the same memory without arithmetic. The limit in the last column is the best
//! copy that bypasses the caches, at 8 bytes per element.
//!
//! `busy` is the rate if workers never waited for a job or for each other. The difference to the measured rate has two parts: `skew`
//! (workers finish before the last one) and `handover` (from the end of the last worker's pieces to the start of the next job, including
//! the wake-up).

mod buckets;
mod row;

use buckets::{Buckets, PoolPass};
use clap::Parser;
use microbench::facts::Facts;
use microbench::hog::Hog;
use microbench::run::{Setting, host_memory, run};
use microbench::stream::{ArrayKernel, Arrays};
use row::{HEADER, Row};
use superoffload::internals::hardware::Topology;
use superoffload::internals::host::{HostMemory, HugePagesChoice, Job, ResctrlGroup};
use superoffload::internals::optim::{AdamKernels, Isa, Masters, Moments, Stores};
use superoffload::{Error, Result};

/// Measures the optimizer's pool.
#[derive(Parser, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
struct Options {
    /// Worker threads, one pool each.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,2,4,8,12,15,16")]
    threads: Vec<usize>,
    /// Parameters; each costs 16 bytes of memory, and their state should be several times the last-level cache.
    #[arg(long, value_name = "N", default_value_t = 1 << 30)]
    params: usize,
    /// Parameters of a bucket.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "33554432")]
    bucket_params: Vec<usize>,
    /// Passes to measure.
    #[arg(long, value_name = "PASS,...", value_delimiter = ',', default_value = "speculate,step,commit,commit_then_speculate")]
    passes: Vec<PoolPass>,
    /// Memory kernels to measure, which do no arithmetic of Adam.
    #[arg(long, value_name = "KERNEL,...", value_delimiter = ',', default_value = "copy-past,triad")]
    memory: Vec<ArrayKernel>,
    /// Format of the optimizer's moments.
    #[arg(long, value_name = "float32|bfloat16|int8", default_value = "float32")]
    moments: Moments,
    /// Split masters: their lower halves are stored beside the working weights, which are their upper halves. Their only pass is `step`.
    #[arg(long)]
    split_masters: bool,
    /// Fractions of the parameters with denormal first moments and gradients of zero.
    #[arg(long, value_name = "FRACTION,...", value_delimiter = ',', default_value = "0")]
    denormal_moments: Vec<f64>,
    /// Time for each row.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.4)]
    seconds: f64,
    /// Instruction sets; the fastest by default.
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', default_value = Isa::detect().name())]
    isa: Vec<Isa>,
    /// Kind of stores of results; by default as in training.
    #[arg(long, value_name = "KIND,...", value_delimiter = ',')]
    stores: Vec<Writes>,
    /// Distance of software prefetches in elements; 0 disables software prefetches.
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    prefetch: Vec<usize>,
    /// Threads beside the pool that copy as fast as they can.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "0")]
    hogs: Vec<usize>,
    /// Pin each worker to a CPU; `both` also measures workers that the kernel places.
    #[arg(long, value_name = "yes|no|both", default_value = "yes")]
    pin: Pin,
    /// Huge pages for all arrays, as in training.
    #[arg(long, value_name = "auto|explicit|off", default_value = "auto")]
    huge_pages: HugePagesChoice,
    /// Partition of cache and bandwidth that the workers join, as in training; the hogs stay outside.
    #[arg(long, value_name = "auto|none|NAME", default_value = "none")]
    resctrl_group: ResctrlGroup,
}

#[derive(Clone, Copy, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
enum Writes {
    Temporal,
    StreamWeights,
    Streaming,
}

#[derive(Clone, Copy, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
enum Pin {
    Yes,
    No,
    Both,
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

impl Options {
    /// Returns every combination of instruction set, stores and prefetch.
    fn kernels(&self) -> Result<Vec<AdamKernels>> {
        let mut all = self.isa.iter().map(|&isa| AdamKernels::new(isa)).collect::<Result<Vec<_>>>()?;
        if !self.stores.is_empty() {
            all = all.iter().flat_map(|kernels| self.stores.iter().map(|&stores| kernels.with_stores(stores.into()))).collect();
        }
        if !self.prefetch.is_empty() {
            all = all.iter().flat_map(|kernels| self.prefetch.iter().map(|&elems| kernels.with_prefetch(elems))).collect();
        }
        Ok(all)
    }

    fn masters(&self) -> Masters {
        if self.split_masters { Masters::Split } else { Masters::Float32 }
    }

    fn check(&self) -> Result<()> {
        if self.bucket_params.contains(&0) || self.threads.contains(&0) {
            return Err(Error::usage("--bucket-params and --threads: at least 1"));
        }
        if self.split_masters && self.passes != [PoolPass::Step] {
            return Err(Error::usage("--split-masters: needs --passes step, since split masters are stepped after the verdict"));
        }
        if self.denormal_moments.iter().any(|fraction| !(0.0..=1.0).contains(fraction)) {
            return Err(Error::usage("--denormal-moments: must be between 0 and 1"));
        }
        Ok(())
    }
}

/// Measures the rows of one bucket size, thread count, number of hogs and kind of placement.
fn measure(
    options: &Options,
    buckets: &mut Buckets,
    (arrays, host): (Arrays, &HostMemory),
    setting: Setting<'_>,
    hogs: usize,
) -> Result<Vec<Row>> {
    let _hog = Hog::start(hogs);
    let (mut rows, best) = (Vec::new(), AdamKernels::new(Isa::detect())?);
    let row = |pass, kernels, denormal, elems, bytes, timing| Row {
        denormal,
        pass,
        kernels,
        threads: setting.threads,
        hogs,
        params: options.params,
        elems,
        bytes_per_elem: bytes,
        timing,
        copy_gb_s: None,
    };
    for &kernel in &options.memory {
        let timing = run(setting, |_| arrays.job(kernel, best))?;
        if !arrays.verify(host, kernel) {
            return Err(Error::resource(format!("verify {}", kernel.name()), "it wrote something else"));
        }
        rows.push(row(kernel.name(), String::new(), 0.0, arrays.elems(), kernel.bytes() as f64, timing));
    }
    let past = rows.iter().filter(|row| row.pass == ArrayKernel::CopyPast.name());
    let copy_gb_s = past.map(Row::gb_s).reduce(f64::max);
    for &pass in &options.passes {
        for kernels in options.kernels()? {
            for &wanted in &options.denormal_moments {
                buckets.fill(wanted);
                let denormal = buckets.denormal_moments();
                buckets.verify(kernels, pass)?;
                let timing = run(setting, |index| buckets.job(kernels, pass, index))?;
                let bytes = buckets.job(kernels, pass, 0).traffic_bytes() as f64 / buckets.elems as f64;
                rows.push(row(pass.name(), kernels.to_string(), denormal, buckets.elems, bytes, timing));
            }
        }
    }
    rows.iter_mut().for_each(|row| row.copy_gb_s = copy_gb_s);
    Ok(rows)
}

#[allow(unsafe_code)]
fn start(options: &Options) -> Result<()> {
    options.check()?;
    let mut host = host_memory(options.huge_pages)?;
    // SAFETY: `run` waits for each job and ends its threads; `host` is dropped after the last job.
    let arrays = unsafe { Arrays::new(&mut host, options.params.min(1 << 28)) }?;
    let pins = match options.pin {
        Pin::Yes => &[true][..],
        Pin::No => &[false],
        Pin::Both => &[true, false],
    };
    let (facts, mut all) = (Facts::new("host_adam", &Topology::this_machine(), options), Vec::new());
    for &elems in &options.bucket_params {
        // SAFETY: `run` waits for each job and ends its threads; the buckets are dropped after the last job.
        let mut buckets =
            unsafe { Buckets::new(options.params, elems, (options.moments, options.masters()), host_memory(options.huge_pages)?) }?;
        for (&threads, &hogs) in options.threads.iter().flat_map(|threads| options.hogs.iter().map(move |hogs| (threads, hogs))) {
            for &pin in pins {
                let rows = measure(
                    options,
                    &mut buckets,
                    (arrays, &host),
                    Setting { threads, pin, seconds: options.seconds, group: &options.resctrl_group },
                    hogs,
                )?;
                rows.iter().for_each(|row| println!("{}", row.json(&facts)));
                all.extend(rows);
            }
        }
    }
    eprintln!("\n{facts}, {} parameters\narrays: {}\n{HEADER}", options.params, host.report(std::path::Path::new("/")));
    all.iter().for_each(|row| eprintln!("{row}"));
    Ok(())
}

fn main() -> std::process::ExitCode {
    microbench::exit_code(start(&Options::parse()))
}
