//! Every kernel, copy and event of a device, compared with the CPU device and with f64.
//!
//! Elementwise kernels have the CPU's bits, and so do the optimizer and its norm. Kernels with sums are within a bound of the exact result,
//! which is computed here in f64 from the same inputs. A CPU device under test must have the reference's bits there, too.

use super::harness::Bench;
use super::random::Random;
use super::report::{Outcome, Report};
use super::{
    attention, attention_parts, casts, copies, cross_entropy, delta, embed, experts, fp8, heads, key_gradients, latent, matmul, mxfp4,
    normed_values, norms, optimizer, plans, pointwise, products, route, scales, sinks, teacher,
};
use std::io::Write;
use superoffload::internals::dtype::Dtype;

/// Context of the cases: the devices and the report.
pub struct Suite<'a, W: Write> {
    pub bench: &'a mut Bench,
    pub report: &'a mut Report<W>,
    pub seed: u64,
    /// The device no longer works, so later results are meaningless.
    pub lost: bool,
}

impl<W: Write> Suite<'_, W> {
    /// Runs the case `kernels/<name>`.
    pub fn case(&mut self, name: &str, body: impl FnOnce(&mut Bench, &mut Random) -> Outcome) {
        let name = format!("kernels/{name}");
        if self.lost || !self.report.wants(&name) {
            return;
        }
        let failed = self.report.case(&name, || body(self.bench, &mut Random::new(self.seed, &name)));
        if failed && !self.bench.subject.is_alive() {
            self.lost = true;
            self.report.print_line("the device no longer works: the remaining kernels are not tried");
        }
    }

    /// Whether to run the sizes of real workloads: if requested, in the format of training.
    pub fn full(&self, dtype: Dtype) -> bool {
        self.bench.full && dtype == Dtype::Bfloat16
    }
}

/// Runs all kernel cases.
pub fn run<W: Write>(suite: &mut Suite<'_, W>) {
    copies::cases(suite);
    casts::cases(suite);
    pointwise::cases(suite);
    embed::cases(suite);
    optimizer::cases(suite);
    norms::cases(suite);
    heads::cases(suite);
    normed_values::cases(suite);
    latent::cases(suite);
    cross_entropy::cases(suite);
    teacher::cases(suite);
    matmul::cases(suite);
    attention::cases(suite);
    attention_parts::cases(suite);
    key_gradients::cases(suite);
    delta::cases(suite);
    products::cases(suite);
    plans::cases(suite);
    route::cases(suite);
    experts::cases(suite);
    mxfp4::cases(suite);
    sinks::cases(suite);
    fp8::cases(suite);
    scales::cases(suite);
}

/// Computes `work(i)` for all `i` below `count`, in order, on all cores.
pub fn parallel<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(count.max(1));
    let part = |thread: usize| (count * thread / threads..count * (thread + 1) / threads).map(&work).collect::<Vec<T>>();
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..threads).map(|thread| scope.spawn(move || part(thread))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))).collect()
    })
}
