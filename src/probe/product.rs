//! Matrix products: the rates of large products, rested and sustained, and the relative rates of small products.

use super::samples::{Samples, fraction_curve};
use super::timer::Timer;
use crate::device::{Cast, DeviceSlice, Kernels, Matmul, MatmulLayout, MatmulShape, Stream};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::hardware::sourced::Curve;
use crate::host::pinned::HostMemory;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Number of random elements that are repeated over a matrix. Regular data would draw less power and run at a higher clock.
const RANDOM_ELEMS: usize = 1 << 20;
/// The smallest product, with as few rows as the tokens of a short sequence. Sizes double while there is time.
pub(super) const SMALLEST: usize = 32;
/// Minimum number of runs of the largest product.
const RUNS_MIN: f64 = 8.0;
/// Number of rounds over all sizes, so that other load on a shared machine affects all sizes.
const ROUNDS: usize = 4;

/// Three square matrices of random numbers, in which products of various sizes are computed.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    pub(super) a: DeviceSlice,
    pub(super) b: DeviceSlice,
    pub(super) c: DeviceSlice,
    /// Rows and columns.
    pub n: usize,
}

impl Product {
    /// Matrices of `n` rows. They stay on the device for its lifetime.
    ///
    /// # Errors
    /// Errors of the device; `Resource` if they do not fit.
    pub fn new<D: Kernels>(dev: &mut D, dtype: Dtype, n: usize) -> Result<Self> {
        let (a, b, c) = (dev.alloc("matrix a", n * n, dtype)?, dev.alloc("matrix b", n * n, dtype)?, dev.alloc("matrix c", n * n, dtype)?);
        fill(dev, &[a, b])?;
        Ok(Self { a, b, c, n })
    }

    /// FLOPs of a product of `m` rows and all columns.
    pub(crate) fn flops(self, m: usize) -> f64 {
        MatmulShape { layout: MatmulLayout::Nt, m, n: self.n, k: self.n }.flops()
    }

    /// A smaller product in the same memory.
    fn of(self, n: usize) -> Self {
        Self { n, ..self }
    }

    /// Enqueues `c[m,n] = a[m,n] b[n,n]^T`.
    pub fn enqueue<D: Kernels>(self, dev: &mut D, m: usize) -> Result<()> {
        self.part(dev, MatmulLayout::Nt, [m, self.n, self.n])
    }

    /// Enqueues a linear layer's three products for `m` tokens: its output, the gradients of its input and of its weight.
    fn enqueue_layer<D: Kernels>(self, dev: &mut D, m: usize) -> Result<()> {
        self.enqueue(dev, m)?;
        self.part(dev, MatmulLayout::Nn, [m, self.n, self.n])?;
        self.part(dev, MatmulLayout::Tn, [self.n, self.n, m])
    }

    fn part<D: Kernels>(self, dev: &mut D, layout: MatmulLayout, [m, n, k]: [usize; 3]) -> Result<()> {
        let shape = MatmulShape { layout, m, n, k };
        dev.launch(Matmul::plain(shape, [self.a.slice(0, m * k), self.b.slice(0, n * k), self.c.slice(0, m * n)]))
    }
}

/// Fills `memory`, which has float formats, with uniform numbers between -1 and 1.
///
/// # Errors
/// Errors of the device.
pub fn fill<D: Kernels>(dev: &mut D, memory: &[DeviceSlice]) -> Result<()> {
    let elems = memory.iter().map(|part| part.elems()).max().unwrap_or(0).min(RANDOM_ELEMS);
    let (mut host, mut rng) = (HostMemory::default(), ChaCha8Rng::seed_from_u64(1));
    let (source, wide) = (host.alloc("random numbers", elems * 4)?, dev.alloc("random numbers", elems, Dtype::Float32)?);
    host.lend_mut::<f32>(source).fill_with(|| (rng.next_u32() as i32) as f32 / (1u32 << 31) as f32);
    dev.copy_h2d(Stream::Compute, source, wide)?;
    for whole in memory {
        for start in (0..whole.elems()).step_by(elems) {
            let part = whole.slice(start, elems.min(whole.elems() - start));
            dev.launch(Cast { stream: Stream::Compute, src: wide.slice(0, part.elems()), dst: part })?;
        }
    }
    // The copy reads `host`, which is dropped here.
    Timer::new(dev)?.settle()
}

/// FLOP/s of a linear layer's products, forward and backward.
#[derive(Clone, Debug)]
pub(crate) struct Products {
    /// Large products after a rest.
    pub(crate) burst: Samples,
    /// Large products at the power limit.
    pub(crate) sustained: Samples,
    /// Fraction of the sustained rate by the smallest dimension.
    pub(crate) share_by_least_dim: Curve,
    pub large: Product,
}

/// Measures products of at most `limit` rows in `dtype` for about `time_s`. The device must have rested before.
pub(crate) fn measure<D: Kernels>(timer: &mut Timer<'_, D>, dtype: Dtype, limit: usize, time_s: f64) -> Result<Products> {
    let memory = Product::new(timer.dev, dtype, limit)?;
    let large = largest(timer, memory, 0.05 * time_s)?;
    let flops =
        |timer: &mut Timer<'_, D>, m: usize, time_s: f64| timer.rates(time_s, 3.0 * large.flops(m), |dev| large.enqueue_layer(dev, m));
    let burst = flops(timer, large.n, 0.02 * time_s)?;
    // Runs until the device reaches its power limit.
    flops(timer, large.n, 0.2 * time_s)?;
    let sustained = flops(timer, large.n, 0.4 * time_s)?;
    let dims: Vec<usize> = doublings(SMALLEST.min(large.n), large.n).collect();
    let time_s = 0.3 * time_s / (ROUNDS * dims.len()) as f64;
    let mut round = || dims.iter().map(|&m| flops(timer, m, time_s)).collect::<Result<Vec<_>>>();
    let mut rates = round()?;
    for _ in 1..ROUNDS {
        rates = rates.into_iter().zip(round()?).map(|(before, now)| before.and(now)).collect();
    }
    let fractions: Vec<_> = dims.iter().map(|&m| m as f64).zip(rates).collect();
    Ok(Products { burst, sustained, share_by_least_dim: fraction_curve(&fractions), large })
}

/// The largest product in `memory` that runs [`RUNS_MIN`] times in `time_s`.
fn largest<D: Kernels>(timer: &mut Timer<'_, D>, memory: Product, time_s: f64) -> Result<Product> {
    let mut product = memory.of(SMALLEST.min(memory.n));
    loop {
        // The first launch may compile.
        timer.seconds(|dev| product.enqueue(dev, product.n))?;
        let seconds = timer.seconds(|dev| product.enqueue(dev, product.n))?;
        if 2 * product.n > memory.n || 8.0 * RUNS_MIN * seconds > time_s {
            return Ok(product);
        }
        product = memory.of(2 * product.n);
    }
}

/// `first`, `2 first`, ... and finally `last`.
pub(super) fn doublings(first: usize, last: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(first), |n| Some(2 * n)).take_while(move |&n| n < last).chain([last])
}
