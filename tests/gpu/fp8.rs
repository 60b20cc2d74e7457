//! 8-bit formats: scales and roundings have the reference's bits, and products are within a bound of f64.

use super::bounds::{Near, U, fp8_growth, growth, unit};
use super::harness::{Bench, Case, Want};
use super::kernels::Suite;
use super::matmul::multiply;
use super::random::Random;
use super::report::{Missed, Outcome};
use std::io::Write;
use superoffload::Error;
use superoffload::internals::device::{AbsMaxScale, MatmulLayout, MatmulShape, Quantize, ScaledMatmul};
use superoffload::internals::dtype::Dtype;

pub const FORMATS: [Dtype; 2] = [Dtype::Float8E4m3, Dtype::Float8E5m2];
const BF16: Dtype = Dtype::Bfloat16;

/// Numbers of elements: less than a vector, tails, several blocks, more than the grid covers at once.
const LENGTHS: [usize; 6] = [1, 7, 16, 4099, 100_003, 3_000_001];
/// Longer arrays are tried with fewer inputs.
const LARGE: usize = 1 << 20;
/// Rows and columns: less than a tile, one tile, and tails on either side.
const MATRICES: [(usize, usize); 6] = [(16, 16), (128, 128), (48, 400), (400, 48), (144, 272), (1024, 1040)];
/// m, n, k.
const PRODUCTS: [(usize, usize, usize); 5] = [(16, 16, 16), (64, 128, 96), (128, 64, 2048), (272, 144, 400), (32, 4096, 512)];
/// Indices of the scales of a product among all scales, at the minimum distance used in training.
pub const SCALES_AT: [usize; 2] = [4, 8];
pub const SCALES: usize = 12;
/// The products of a real layer.
const FULL: [(usize, usize, usize); 3] = [(2048, 4096, 4096), (2048, 4096, 14_336), (4096, 2048, 16_384)];

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    for format in FORMATS {
        suite.case(&format!("abs_max_scale {format}"), |bench, random| scales(bench, random, format));
        suite.case(&format!("quantize {format}, every number"), |bench, _| every_number(bench, format));
        for (rows, cols) in MATRICES {
            let name = format!("quantize {format} {rows}x{cols}");
            suite.case(&name, |bench, random| quantize(bench, format, cols, &random.scaled(BF16, rows * cols, 3.0), 0.125));
        }
        let full = if suite.full(BF16) { &FULL[..] } else { &[] };
        for &(m, n, k) in PRODUCTS.iter().chain(full) {
            suite.case(&format!("scaled_matmul {format} {m}x{n}x{k}"), |bench, random| product(bench, random, format, [m, n, k]));
        }
    }
}

/// Products in parts, `way` in words.
pub fn in_parts<W: Write>(suite: &mut Suite<'_, W>, way: &str) {
    for format in FORMATS {
        for (m, n, k) in PRODUCTS.into_iter().filter(|(_, _, k)| *k > 16) {
            let name = format!("scaled_matmul {format} {m}x{n}x{k} {way}");
            suite.case(&name, |bench, random| product(bench, random, format, [m, n, k]));
        }
    }
}

/// Skips the case if the device has no FP8.
pub fn needs_fp8(bench: &mut Bench) -> Result<(), Missed> {
    match bench.subject.dev.prepare_fp8() {
        Err(e @ Error::Unsupported(_)) => Err(Missed::Skipped(e.to_string())),
        ready => Ok(ready?),
    }
}

/// Numbers of every magnitude, zeros only, and infinities or NaN in the first or last place.
fn scales(bench: &mut Bench, random: &mut Random, format: Dtype) -> Outcome {
    needs_fp8(bench)?;
    for elems in LENGTHS {
        let exponents: &[i32] = if elems > LARGE { &[0] } else { &[-130, -120, -20, 0, 5, 100, 126] };
        for exponent in exponents {
            scale(bench, &random.scaled(BF16, elems, 2f32.powi(*exponent)), format)?;
        }
        scale(bench, &vec![-0.0; elems], format)?;
        let odds: &[f32] = if elems > LARGE { &[f32::MAX] } else { &[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::MAX] };
        for (odd, at) in odds.iter().flat_map(|odd| [(*odd, 0), (*odd, elems - 1)]) {
            let mut x = random.uniform(BF16, elems);
            x[at] = odd;
            scale(bench, &x, format)?;
        }
    }
    Ok(0.0)
}

fn scale(bench: &mut Bench, x: &[f32], format: Dtype) -> Outcome {
    let mut case = Case::default();
    case.aligned();
    let (x, scale) = (case.input("x", BF16, x), case.output("scale", Dtype::Float32, 1, Want::Same));
    case.check(bench, &|dev, at| dev.launch(AbsMaxScale { x: at[x], scale: at[scale], format }))
}

/// All 16-bit numbers, with scales that keep the smallest and the largest, and with invalid scales.
fn every_number(bench: &mut Bench, format: Dtype) -> Outcome {
    needs_fp8(bench)?;
    let all: Vec<f32> = (0..=u16::MAX).map(|bits| f32::from_bits(u32::from(bits) << 16)).collect();
    for scale in [1.0, 2f32.powi(-126), 2f32.powi(119), 0.03125, f32::NAN, 0.0] {
        quantize(bench, format, 256, &all, scale)?;
    }
    Ok(0.0)
}

/// Quantizes unchanged, transposed, and both.
fn quantize(bench: &mut Bench, format: Dtype, cols: usize, x: &[f32], scale: f32) -> Outcome {
    needs_fp8(bench)?;
    for [as_it_is, turned] in [[true, true], [true, false], [false, true]] {
        let mut case = Case::default();
        case.aligned();
        let (input, scale) = (case.input("x", BF16, x), case.input("scale", Dtype::Float32, &[scale]));
        let out = as_it_is.then(|| case.output("out", format, x.len(), Want::Same));
        let transposed = turned.then(|| case.output("transposed", format, x.len(), Want::Same));
        case.check(bench, &|dev, at| {
            let [out, transposed] = [out, transposed].map(|handle| handle.map(|handle| at[handle]));
            dev.launch(Quantize { x: at[input], scale: at[scale], out, transposed, cols })
        })?;
    }
    Ok(0.0)
}

/// With a bias or without, and without a base, with the output as base, and with another matrix as base.
fn product(bench: &mut Bench, random: &mut Random, format: Dtype, [m, n, k]: [usize; 3]) -> Outcome {
    needs_fp8(bench)?;
    let (a, b) = (random.scaled(format, m * k, 400.0), random.scaled(Dtype::Float8E4m3, n * k, 400.0));
    let [a_scale, b_scale] = [2f32.powi(-9), 0.03125];
    let mut scales = [f32::NAN; SCALES];
    SCALES_AT.into_iter().zip([a_scale, b_scale]).for_each(|(place, scale)| scales[place] = scale);
    let growth = if bench.same_bits { growth(k) } else { fp8_growth(k) };
    let scale = f64::from(a_scale * b_scale);
    let exact = multiply(MatmulShape { layout: MatmulLayout::Nt, m, n, k }, &a, &b, U * growth);
    let size = (scale * exact.iter().map(|near| near.want * near.want).sum::<f64>().sqrt() / (exact.len() as f64).sqrt()) as f32;
    let (bias, before) = (random.scaled(BF16, n, size), random.scaled(BF16, m * n, size));
    let mut worst = 0f64;
    for (with_bias, with_base, apart) in [(false, false, false), (true, true, true), (false, true, false)] {
        let sum = |(i, near): (usize, &Near)| {
            let product = Near { want: near.want * scale, error: near.error * scale };
            // A library may round before the addition.
            let rounded =
                if bench.same_bits || !(with_bias || with_base) { 0.0 } else { unit(BF16) * (product.want.abs() + f64::from(size)) };
            let added = [with_bias.then(|| bias[i % n]), with_base.then(|| before[i])];
            added.into_iter().flatten().fold(Near { error: product.error + rounded, ..product }, |sum, x| sum.plus(f64::from(x)))
        };
        let sums: Vec<Near> = exact.iter().enumerate().map(sum).collect();
        let mut case = Case::default();
        case.aligned();
        let (a, b) = (case.input("a", format, &a), case.input("b", Dtype::Float8E4m3, &b));
        let scales = case.input("scales", Dtype::Float32, &scales);
        let bias = case.input("bias", BF16, &bias);
        let base = apart.then(|| case.input("base", BF16, &before));
        let c = match with_base && !apart {
            true => case.updated("c", BF16, &before, Want::Near(sums)),
            false => case.output("c", BF16, m * n, Want::Near(sums)),
        };
        worst = worst.max(case.check(bench, &|dev, at| {
            let base = if apart { base.map(|base| at[base]) } else { with_base.then_some(at[c]) };
            let ([a_scale, b_scale], bias) = (SCALES_AT.map(|place| at[scales].slice(place, 1)), with_bias.then_some(at[bias]));
            dev.launch(ScaledMatmul { a: at[a], a_scale, b: at[b], b_scale, bias, base, c: at[c], m, n, k })
        })?);
    }
    Ok(worst)
}
