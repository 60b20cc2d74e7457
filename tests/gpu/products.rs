//! Every matrix product of a step of the workloads at its real size, because the library's algorithm depends on the size.
//!
//! The reference would take hours for all elements. Instead, blocks of rows of the result are summed with a random sign per row, and
//! compared with the same sum of `a` times `b` in f64. A wrong element exceeds the rounding errors of the results.

use super::formats::encode;
use super::fp8::{SCALES, SCALES_AT, needs_fp8};
use super::harness::{Bench, Harness};
use super::kernels::{Suite, parallel};
use super::random::Random;
use super::report::{Outcome, require};
use half::bf16;
use std::io::Write;
use std::path::Path;
use superoffload::Result;
use superoffload::internals::device::{DeviceSlice, Matmul, MatmulLayout, MatmulShape, ScaledMatmul, Stream};
use superoffload::internals::dtype::Dtype;
use superoffload::internals::model::{presets, products};

/// Models, and tokens of a micro-batch.
const WORKLOADS: [(&str, usize); 4] = [("qwen3-4b", 4 * 4096), ("llama-8b", 4 * 4096), ("gpt-5b", 8 * 1024), ("qwen3-14b", 4 * 4096)];
/// Number of rows in a sum. More rows are faster to check, but hide smaller errors.
const BLOCK_ROWS: usize = 1024;
/// Distance between equal elements of an input: a prime, so that rows and partial sums differ.
const PERIOD: usize = 1_048_573;
/// Permitted standard deviations of a sum of roundings; there are about 10^7 sums.
const DEVIATIONS: f64 = 7.0;

/// Formats of the factors.
#[derive(Clone, Copy, PartialEq)]
pub enum Factors {
    Bfloat16,
    /// Both in rows of k. The first factor is E5M2 if it is the gradient of an output.
    Fp8,
}

impl Factors {
    pub fn formats(self, layout: MatmulLayout) -> [Dtype; 2] {
        match self {
            Self::Bfloat16 => [Dtype::Bfloat16; 2],
            Self::Fp8 if layout == MatmulLayout::Nt => [Dtype::Float8E4m3; 2],
            Self::Fp8 => [Dtype::Float8E5m2, Dtype::Float8E4m3],
        }
    }

    /// Ratio of the spread of the sums to that of rounded results alone. The truncation of 8-bit sums by tensor cores at most doubles it:
    /// see [`super::bounds::fp8_growth`].
    fn spread(self) -> f64 {
        if self == Self::Fp8 { 2.0 } else { 1.0 }
    }
}

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    let small = MatmulLayout::ALL.map(|layout| MatmulShape { layout, m: 1100, n: 70, k: 130 });
    suite.case("products by signed sums", |bench, random| check_all(bench, random, &small, Factors::Bfloat16));
    let small = MatmulLayout::ALL.map(|layout| MatmulShape { layout, m: 1104, n: 80, k: 144 });
    suite.case("products in FP8 by signed sums", |bench, random| check_all(bench, random, &small, Factors::Fp8));
    suite.case("products by signed sums, one element wrong", |_, random| finds_one_wrong(random));
    if !suite.full(Dtype::Bfloat16) || suite.bench.same_bits {
        return;
    }
    // Few rows and a long sum: on Hopper, all suggestions of cuBLASLt 13.1 use the algorithm that may be wrong.
    let split = [MatmulShape { layout: MatmulLayout::Nn, m: 128, n: 2048, k: 16_384 }];
    suite.case("products of few rows", |bench, random| check_all(bench, random, &split, Factors::Bfloat16));
    for (model, tokens) in WORKLOADS {
        let Ok(shape) = presets::shape(Path::new(model)) else { continue };
        let products = products(&shape, tokens);
        suite.case(&format!("products of {model}"), |bench, random| check_all(bench, random, &products, Factors::Bfloat16));
        let of_layers: Vec<_> = products.iter().filter(|p| ![p.m, p.n, p.k].contains(&shape.vocab)).copied().collect();
        suite.case(&format!("products of {model} in FP8"), |bench, random| check_all(bench, random, &of_layers, Factors::Fp8));
    }
}

/// Random numbers in a format, repeated with [`PERIOD`].
struct Input(Dtype, Vec<f32>);

impl Input {
    fn new(random: &mut Random, dtype: Dtype) -> Self {
        Self(dtype, random.uniform(dtype, PERIOD))
    }

    fn at(&self, i: usize) -> f64 {
        f64::from(self.1[i % PERIOD])
    }
}

/// The largest error of all `products` relative to the bound.
pub fn check_all(bench: &mut Bench, random: &mut Random, products: &[MatmulShape], factors: Factors) -> Outcome {
    if factors == Factors::Fp8 {
        needs_fp8(bench)?;
    }
    let most = |of: fn(&MatmulShape) -> usize| products.iter().map(of).max().unwrap_or(0);
    let harness = &mut bench.subject;
    let mut memory = |name: &str, elems, dtype| harness.dev.alloc(name, elems, dtype);
    let [a_width, b_width] = factors.formats(MatmulLayout::Nt);
    let (a, b) = (memory("a", most(|p| p.m * p.k), a_width)?, memory("b", most(|p| p.k * p.n), b_width)?);
    let (c, scales) = (memory("c", most(|p| p.m * p.n), Dtype::Bfloat16)?, memory("scales", SCALES, Dtype::Float32)?);
    fill(harness, scales, &Input(Dtype::Float32, vec![1.0; PERIOD]))?;
    let [a_scale, b_scale] = SCALES_AT.map(|place| scales.slice(place, 1));
    let mut worst = 0f64;
    for &shape in products {
        let MatmulShape { m, n, k, layout } = shape;
        let [a_format, b_format] = factors.formats(layout);
        let (a, b, c) = (a.view(0, m * k, a_format), b.view(0, k * n, b_format), c.slice(0, m * n));
        let (left, right) = (Input::new(random, a_format), Input::new(random, b_format));
        fill(harness, a, &left)?;
        fill(harness, b, &right)?;
        let shape = match factors {
            Factors::Bfloat16 => shape,
            Factors::Fp8 => MatmulShape { layout: MatmulLayout::Nt, ..shape },
        };
        match factors {
            Factors::Bfloat16 => harness.dev.launch(Matmul::plain(shape, [a, b, c]))?,
            Factors::Fp8 => harness.dev.launch(ScaledMatmul { a, a_scale, b, b_scale, bias: None, base: None, c, m, n, k })?,
        }
        let signs: Vec<f64> = (0..m).map(|_| if random.bits() & 1 == 0 { 1.0 } else { -1.0 }).collect();
        for start in (0..m).step_by(BLOCK_ROWS) {
            let rows = start..m.min(start + BLOCK_ROWS);
            let got = read(harness, c.slice(start * n, rows.len() * n))?;
            let want = signed_sum(shape, &left, &right, &signs, rows.clone());
            worst = worst.max(compare(shape, factors, &got, &want, &signs[rows])?);
        }
    }
    Ok(worst)
}

/// Checks the method: a result with one element of the wrong sign must fail, like one that lacks most of its terms.
fn finds_one_wrong(random: &mut Random) -> Outcome {
    let shape = MatmulShape { layout: MatmulLayout::Nt, m: BLOCK_ROWS, n: 2, k: 1 };
    let mut got: Vec<bf16> = random.uniform(Dtype::Bfloat16, 2 * BLOCK_ROWS).into_iter().map(bf16::from_f32).collect();
    got[14] = bf16::ONE;
    let signs: Vec<f64> = (0..BLOCK_ROWS).map(|_| if random.bits() & 1 == 0 { 1.0 } else { -1.0 }).collect();
    let column = |j: usize| signs.iter().enumerate().map(|(i, sign)| sign * f64::from(got[2 * i + j].to_f32())).sum();
    let want = [column(0), column(1)];
    let right = compare(shape, Factors::Bfloat16, &got, &want, &signs)?;
    got[14] = -bf16::ONE;
    require(compare(shape, Factors::Bfloat16, &got, &want, &signs).is_err(), || "was not found".into())?;
    Ok(right)
}

fn fill(harness: &mut Harness, memory: DeviceSlice, input: &Input) -> Result<()> {
    let bytes = encode(input.0, &input.1);
    let source = harness.host.slice(0, bytes.len());
    harness.memory.lend_mut(source).copy_from_slice(&bytes);
    for start in (0..memory.elems()).step_by(PERIOD) {
        let part = memory.slice(start, PERIOD.min(memory.elems() - start));
        harness.dev.copy_h2d(Stream::Compute, source.slice(0, part.bytes()), part)?;
    }
    harness.synchronize(Stream::Compute)
}

/// Reads the elements of `memory` in pieces that fit the host buffer.
fn read(harness: &mut Harness, memory: DeviceSlice) -> Result<Vec<bf16>> {
    let mut all = vec![bf16::ZERO; memory.elems()];
    let at_once = harness.host.bytes() / 2;
    for (part, out) in (0..memory.elems()).step_by(at_once).zip(all.chunks_mut(at_once)) {
        let to = harness.host.slice(0, 2 * out.len());
        harness.dev.copy_d2h(Stream::Compute, memory.slice(part, out.len()), to)?;
        harness.synchronize(Stream::Compute)?;
        out.copy_from_slice(harness.memory.lend(to));
    }
    Ok(all)
}

/// `sum_i signs[i] a[i, :] b` over `rows`: `n` numbers.
fn signed_sum(shape: MatmulShape, a: &Input, b: &Input, signs: &[f64], rows: std::ops::Range<usize>) -> Vec<f64> {
    let MatmulShape { layout, m, n, k } = shape;
    let a_at = |i: usize, l: usize| if layout == MatmulLayout::Tn { a.at(l * m + i) } else { a.at(i * k + l) };
    let summed: Vec<f64> = parallel(k, |l| rows.clone().map(|i| signs[i] * a_at(i, l)).sum());
    if layout == MatmulLayout::Nt {
        return parallel(n, |j| summed.iter().enumerate().map(|(l, x)| x * b.at(j * k + l)).sum());
    }
    // `b` by rows: every thread takes some columns of all rows.
    const COLUMNS: usize = 256;
    let columns = |part: usize| {
        let range = part * COLUMNS..n.min((part + 1) * COLUMNS);
        let mut sums = vec![0.0; range.len()];
        for (l, x) in summed.iter().enumerate() {
            range.clone().zip(&mut sums).for_each(|(j, sum)| *sum += x * b.at(l * n + j));
        }
        sums
    };
    parallel(n.div_ceil(COLUMNS), columns).into_iter().flatten().collect()
}

/// Compares every column's signed sum with the expected one. Each element is an fp32 sum that was rounded once to the format.
fn compare(shape: MatmulShape, factors: Factors, got: &[bf16], want: &[f64], signs: &[f64]) -> Outcome {
    let n = shape.n;
    let errors = parallel(n, |j| {
        let (mut sum, mut squares) = (0.0, 0.0);
        for (i, sign) in signs.iter().enumerate() {
            let x = f64::from(got[i * n + j].to_f32());
            sum += sign * x;
            squares += x * x;
        }
        // Rounding to nearest has an error of at most 2^-8 of the number, uniformly distributed. Errors of fp32 sums are negligible in
        // comparison.
        let deviation = (squares / 3.0).sqrt() / 256.0;
        (sum - want[j]).abs() / (DEVIATIONS * factors.spread() * deviation)
    });
    let (column, worst) = errors.into_iter().enumerate().fold((0, 0f64), |max, at| if at.1 > max.1 || at.1.is_nan() { at } else { max });
    require(worst <= 1.0, || format!("{shape:?}: column {column} is {worst:.2} of the bound off"))?;
    Ok(worst)
}
