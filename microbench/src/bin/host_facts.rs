//! Measures the properties of CPUs and memory that limit the optimizer's part of a step: memory bandwidth by number of threads, the pool's
//! wake-up time, sums of squares, and casts. It prints one JSON line per fact to stdout and a table to stderr. Every result is verified.

use clap::Parser;
use microbench::facts::Facts;
use microbench::run::{Setting, host_memory, run};
use microbench::stream::{ArrayKernel, Arrays};
use microbench::values;
use serde_json::{Value, json};
use std::fmt;
use std::time::Instant;
use superoffload::internals::dtype::Dtype;
use superoffload::internals::hardware::Topology;
use superoffload::internals::host::{CpuPlacement, HugePagesChoice, Latency, ResctrlGroup, WakeUp};
use superoffload::internals::optim::{AdamKernels, BLOCK, Grads, Isa, Weights};
use superoffload::{Error, Result};

/// Measures the host.
#[derive(Parser, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
struct Options {
    /// Threads for memory's speed; by default 1, 2, 4, ... and all CPUs.
    #[arg(long, value_name = "N,...", value_delimiter = ',')]
    threads: Vec<usize>,
    /// Elements of each of three fp32 arrays: several times the last-level cache.
    #[arg(long, value_name = "N", default_value_t = 1 << 27)]
    elems: usize,
    /// Time for each fact.
    #[arg(long, value_name = "SECONDS", default_value_t = 0.3)]
    seconds: f64,
}

/// A measured value.
struct Fact {
    what: String,
    threads: usize,
    value: f64,
    unit: &'static str,
}

impl Fact {
    fn json(&self, facts: &Facts) -> Value {
        facts.line(json!({ "what": self.what, "threads": self.threads, "value": self.value, "unit": self.unit }))
    }
}

impl fmt::Display for Fact {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<40} {:>7} {:>10.2} {}", self.what, self.threads, self.value, self.unit)
    }
}

#[allow(unsafe_code)]
fn memory(options: &Options, threads: &[usize]) -> Result<Vec<Fact>> {
    let mut host = host_memory(HugePagesChoice::Auto)?;
    // SAFETY: `run` waits for each job and ends its threads; `host` is dropped after the last job.
    let arrays = unsafe { Arrays::new(&mut host, options.elems) }?;
    let kernels = AdamKernels::new(Isa::detect())?;
    let mut facts = Vec::new();
    for &threads in threads {
        for kernel in ArrayKernel::ALL {
            let setting = Setting { threads, pin: true, seconds: options.seconds, group: &ResctrlGroup::None };
            let timing = run(setting, |_| arrays.job(kernel, kernels))?;
            if !arrays.verify(&host, kernel) {
                return Err(Error::resource(format!("verify {}", kernel.name()), "it wrote something else"));
            }
            let bytes = (options.elems * kernel.bytes() * timing.jobs) as f64;
            facts.push(Fact { what: format!("memory {}", kernel.name()), threads, value: bytes * 1e-9 / timing.wall_s, unit: "GB/s" });
        }
    }
    Ok(facts)
}

/// Measures the time from a job's submission to its end for an empty job, with spinning workers and with sleeping workers.
fn wake_up(threads: usize) -> Result<Vec<Fact>> {
    let measured = WakeUp::measure(threads, CpuPlacement::on(&Topology::this_machine(), threads))?;
    let fact = |what: &str, ns: u64| Fact { what: format!("wake-up, {what}"), threads, value: ns as f64 * 1e-3, unit: "us" };
    let kinds = [("spinning", measured.spinning), ("asleep", measured.parked)];
    let facts = |(what, latency): (&str, Latency)| {
        [fact(&format!("workers {what}, median"), latency.ns_median), fact(&format!("workers {what}, 99th percentile"), latency.ns_p99)]
    };
    Ok(kinds.into_iter().flat_map(facts).collect())
}

/// Shortest time of a repeated call, in seconds.
fn least_s(seconds: f64, mut call: impl FnMut()) -> f64 {
    let (started, mut least) = (Instant::now(), f64::INFINITY);
    while started.elapsed().as_secs_f64() < seconds || least.is_infinite() {
        let begun = Instant::now();
        call();
        least = least.min(begun.elapsed().as_secs_f64());
    }
    least
}

/// Measures sums of squares, and casts to the link's formats, on one thread.
fn passes(options: &Options) -> Result<Vec<Fact>> {
    let elems = options.elems.min(1 << 24) / BLOCK * BLOCK;
    let (wide, kernels, specified) = (values(1, elems), AdamKernels::new(Isa::detect())?, AdamKernels::new(Isa::Scalar)?);
    let mut facts = Vec::new();
    for dtype in [Dtype::Float32, Dtype::Bfloat16, Dtype::Float16] {
        let (mut narrow, mut wanted) = (vec![0u32; elems * dtype.bytes() / 4], vec![0u32; elems * dtype.bytes() / 4]);
        let cast_s = least_s(options.seconds, || kernels.emit(&wide, Weights::from_bytes(dtype, bytemuck::cast_slice_mut(&mut narrow))));
        specified.emit(&wide, Weights::from_bytes(dtype, bytemuck::cast_slice_mut(&mut wanted)));
        let grads = Grads::from_bytes(dtype, bytemuck::cast_slice(&narrow));
        let (mut partials, mut wanted_partials) = (vec![0.0; elems / BLOCK], vec![0.0; elems / BLOCK]);
        let norm_s = least_s(options.seconds, || _ = kernels.partials(grads, &mut partials));
        specified.partials(grads, &mut wanted_partials);
        if narrow != wanted || partials != wanted_partials {
            return Err(Error::resource(format!("verify casts and norms of {dtype}"), "they differ from the scalar specification"));
        }
        let gb_s = |bytes_per_elem: usize, seconds: f64| (elems * bytes_per_elem) as f64 * 1e-9 / seconds;
        facts.push(Fact { what: format!("cast float32 to {dtype}"), threads: 1, value: gb_s(4 + dtype.bytes(), cast_s), unit: "GB/s" });
        facts.push(Fact { what: format!("sums of squares, {dtype}"), threads: 1, value: gb_s(dtype.bytes(), norm_s), unit: "GB/s" });
    }
    Ok(facts)
}

fn start(options: &Options) -> Result<()> {
    let about = Facts::new("host_facts", &Topology::this_machine(), options);
    let cpus = about.machine.usable_cpus.unwrap_or(1);
    let threads = match &options.threads[..] {
        [] => std::iter::successors(Some(1), |threads| Some(threads * 2)).take_while(|&t| t < cpus).chain([cpus]).collect(),
        requested => requested.to_vec(),
    };
    let mut facts = memory(options, &threads)?;
    for &threads in &threads {
        facts.extend(wake_up(threads)?);
    }
    facts.extend(passes(options)?);
    facts.iter().for_each(|fact| println!("{}", fact.json(&about)));
    eprintln!("\n{about}\n{:<40} {:>7} {:>10}", "fact", "threads", "value");
    facts.iter().for_each(|fact| eprintln!("{fact}"));
    Ok(())
}

fn main() -> std::process::ExitCode {
    microbench::exit_code(start(&Options::parse()))
}
