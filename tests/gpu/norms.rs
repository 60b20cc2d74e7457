//! RMS and layer normalisation, forward and backward.
//!
//! Notation: `n` is the number of columns and `u` the unit roundoff of fp32. First-order errors add up; `U * c * x` stands for `c`
//! roundings of `x`.

use super::bounds::{Near, Sum, U, growth};
use super::formats::{FLOATS, wide};
use super::harness::{Bench, Case, Want};
use super::kernels::{Suite, parallel};
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::{LayerNorm, LayerNormBackward, RmsNorm, RmsNormBackward};
use superoffload::internals::dtype::Dtype;

const FP32: Dtype = Dtype::Float32;
const EPS: f32 = 1e-5;

/// Rows and columns: one element, one row, odd tails, many rows, the widths of real models.
const MATRICES: [(usize, usize); 9] = [(1, 1), (1, 257), (3, 7), (65, 33), (129, 64), (300, 20), (5, 2560), (67, 768), (3, 4096)];
const FULL: (usize, usize) = (4096, 2560);

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    for dtype in FLOATS {
        let full = suite.full(dtype);
        for (rows, cols) in MATRICES.into_iter().chain(full.then_some(FULL)) {
            let name = |kernel: &str| format!("{kernel} {dtype} {rows}x{cols}");
            for (kind, plus_one) in [("rms_norm", false), ("rms_norm plus one", true)] {
                suite.case(&name(kind), |bench, random| rms(bench, random, dtype, (rows, cols), plus_one));
                suite.case(&name(&format!("{kind}, backward")), |bench, random| rms_backward(bench, random, dtype, (rows, cols), plus_one));
            }
            suite.case(&name("layer_norm"), |bench, random| layer(bench, random, dtype, rows, cols));
            suite.case(&name("layer_norm_backward"), |bench, random| layer_backward(bench, random, dtype, rows, cols));
        }
    }
}

/// `1/sqrt(mean(x^2) + eps)` of one row.
///
/// The terms of the mean are positive, so its relative error is that of the sum, `growth(n) u`, plus one for the division and one for eps.
/// The root halves it. Root and reciprocal, or the GPU's reciprocal root with 2 ulp, add up to 4.
pub fn rms_rstd(x: &[f64]) -> Near {
    let mean = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let want = 1.0 / (mean + f64::from(EPS)).sqrt();
    Near { want, error: want * U * ((growth(x.len()) + 2.0) / 2.0 + 4.0) }
}

/// `x * rstd * weight` of one row: the error of `rstd`, and two roundings.
pub fn rms_row<'a>(x: &'a [f64], weight: &'a [f64], rstd: Near) -> impl Iterator<Item = Near> + 'a {
    x.iter().zip(weight).map(move |(x, w)| {
        let want = x * rstd.want * w;
        Near { want, error: (x * w).abs() * rstd.error + 2.0 * U * want.abs() }
    })
}

/// The gradient of one row's input, `rstd * (dout w - xhat * mean(dout w xhat))` with `xhat = x * rstd`.
///
/// The terms of the mean have three roundings each before the sum. The product with the rounded `xhat`, the difference and the product with
/// `rstd` add 4 roundings of either part.
pub fn rms_row_backward(dout: &[f64], x: &[f64], weight: &[f64], rstd: f64) -> Vec<Near> {
    let n = x.len() as f64;
    let mean = Sum::of((0..x.len()).map(|c| dout[c] * weight[c] * x[c] * rstd)).near(growth(x.len()) + 4.0);
    let (mean, mean_error) = (mean.want / n, mean.error / n);
    let gradient = |c: usize| {
        let (g, xhat) = (dout[c] * weight[c], x[c] * rstd);
        let error = rstd * (xhat.abs() * mean_error + 4.0 * U * (g.abs() + (xhat * mean).abs()));
        Near { want: rstd * (g - xhat * mean), error }
    };
    (0..x.len()).map(gradient).collect()
}

/// The factors of stored weights: the weights themselves, or the weights plus one, rounded.
pub fn factors(weights: &[f32], plus_one: bool) -> Vec<f64> {
    weights.iter().map(|w| f64::from(if plus_one { 1.0 + w } else { *w })).collect()
}

fn rms(bench: &mut Bench, random: &mut Random, dtype: Dtype, (rows, cols): (usize, usize), plus_one: bool) -> Outcome {
    let (x, weight) = (random.scaled(dtype, rows * cols, 3.0), random.uniform(dtype, cols));
    let (x_wide, weight_wide) = (wide(&x), factors(&weight, plus_one));
    let rstd: Vec<Near> = x_wide.chunks_exact(cols).map(rms_rstd).collect();
    let out = x_wide.chunks_exact(cols).zip(&rstd).flat_map(|(x, &rstd)| rms_row(x, &weight_wide, rstd)).collect();
    let mut case = Case::default();
    let (x, weight) = (case.input("x", dtype, &x), case.input("weight", dtype, &weight));
    let (out, rstd) = (case.output("out", dtype, rows * cols, Want::Near(out)), case.output("rstd", FP32, rows, Want::Near(rstd)));
    case.check(bench, &|dev, at| dev.launch(RmsNorm { x: at[x], weight: at[weight], plus_one, eps: EPS, out: at[out], rstd: at[rstd] }))
}

fn rms_backward(bench: &mut Bench, random: &mut Random, dtype: Dtype, (rows, cols): (usize, usize), plus_one: bool) -> Outcome {
    let (dout, x, before) =
        (random.uniform(dtype, rows * cols), random.scaled(dtype, rows * cols, 3.0), random.uniform(dtype, rows * cols));
    let (weight, dweight_before, rstd) = (random.uniform(dtype, cols), random.uniform(dtype, cols), random.positive(rows));
    let (dout_wide, x_wide, weight_wide) = (wide(&dout), wide(&x), factors(&weight, plus_one));
    let dx = parallel(rows, |row| {
        let row_of = |all| row_of(all, row, cols);
        rms_row_backward(row_of(&dout_wide), row_of(&x_wide), &weight_wide, f64::from(rstd[row]))
    });
    let dx: Vec<Near> = dx.into_iter().flatten().zip(&before).map(|(near, &before)| near.plus(f64::from(before))).collect();
    // The normalised input is rounded, and so is its product with the gradient.
    let xhat = |row: usize, col: usize| x_wide[row * cols + col] * f64::from(rstd[row]);
    let dweight = column_sums(rows, cols, growth(rows) + 2.0, |row, col| dout_wide[row * cols + col] * xhat(row, col));
    let mut worst = 0f64;
    for accumulate in [false, true] {
        let mut case = Case::default();
        let (dout, x, weight) = (case.input("dout", dtype, &dout), case.input("x", dtype, &x), case.input("weight", dtype, &weight));
        let rstd = case.input("rstd", FP32, &rstd);
        let dx = case.updated("dx", dtype, &before, Want::Near(dx.clone()));
        let dweight = case.gradient("dweight", dtype, accumulate.then_some(&dweight_before), dweight.clone());
        let outcome = case.check(bench, &|dev, at| {
            let (dout, x, weight, rstd) = (at[dout], at[x], at[weight], at[rstd]);
            dev.launch(RmsNormBackward { dout, x, weight, plus_one, rstd, dx: at[dx], dweight: at[dweight], accumulate })
        });
        worst = worst.max(outcome?);
    }
    Ok(worst)
}

/// Mean and reciprocal standard deviation of one row.
///
/// The error of the mean is `growth(n) u mean(|x|)`. A deviation `x - mean` has its own rounding error, and the error of the mean, which
/// all deviations share. In the mean of squares the latter gives `2 error mean(|x - mean|) + error^2`, in addition to 3 roundings of each
/// square and those of the sum. Root and reciprocal are as in [`rms_rstd`].
fn layer_stats(x: &[f64]) -> (Near, Near) {
    let n = x.len() as f64;
    let sum = Sum::of(x.iter().copied()).near(growth(x.len()) + 1.0);
    let mean = Near { want: sum.want / n, error: sum.error / n };
    let deviation = x.iter().map(|x| (x - mean.want).abs()).sum::<f64>() / n;
    let variance = x.iter().map(|x| (x - mean.want).powi(2)).sum::<f64>() / n;
    let variance_error = U * (growth(x.len()) + 4.0) * variance + 2.0 * mean.error * deviation + mean.error.powi(2);
    let shifted = variance + f64::from(EPS);
    let want = 1.0 / shifted.sqrt();
    (mean, Near { want, error: want * (variance_error / shifted / 2.0 + 5.0 * U) })
}

/// The error of the mean affects every output. The rest is the error of `rstd`, the rounding of the deviation, two products and a sum.
fn layer(bench: &mut Bench, random: &mut Random, dtype: Dtype, rows: usize, cols: usize) -> Outcome {
    // Shifted data, which would reveal a variance computed as a difference of large numbers.
    let x: Vec<f32> = random.scaled(dtype, rows * cols, 3.0).iter().map(|x| super::formats::round(dtype, x + 5.0)).collect();
    let (weight, bias) = (random.uniform(dtype, cols), random.uniform(dtype, cols));
    let (mut out, mut stats) = (Vec::new(), Vec::new());
    for x in wide(&x).chunks_exact(cols) {
        let (mean, rstd) = layer_stats(x);
        stats.extend([mean, rstd]);
        for (x, (w, b)) in x.iter().zip(weight.iter().zip(&bias)) {
            let (w, b, deviation) = (f64::from(*w), f64::from(*b), x - mean.want);
            let scaled = deviation * rstd.want * w;
            let error = w.abs() * (rstd.want * mean.error + deviation.abs() * rstd.error) + U * (3.0 * scaled.abs() + (scaled + b).abs());
            out.push(Near { want: scaled + b, error });
        }
    }
    let mut case = Case::default();
    let (x, weight, bias) = (case.input("x", dtype, &x), case.input("weight", dtype, &weight), case.input("bias", dtype, &bias));
    let (out, stats) = (case.output("out", dtype, rows * cols, Want::Near(out)), case.output("stats", FP32, 2 * rows, Want::Near(stats)));
    case.check(bench, &|dev, at| {
        dev.launch(LayerNorm { x: at[x], weight: at[weight], bias: at[bias], eps: EPS, out: at[out], stats: at[stats] })
    })
}

/// The gradient of one row's input, `rstd * (g - mean(g) - xhat * mean(g xhat))` with `g = dout w` and `xhat = (x - mean) * rstd`. The
/// errors are as in [`rms_row_backward`], with one more rounding for the deviation and one more mean.
fn layer_row_backward(dout: &[f64], x: &[f64], weight: &[f64], (mean, rstd): (f64, f64)) -> Vec<Near> {
    let n = x.len() as f64;
    let xhat = |c: usize| (x[c] - mean) * rstd;
    let mean_g = Sum::of((0..x.len()).map(|c| dout[c] * weight[c])).near(growth(x.len()) + 2.0);
    let mean_gx = Sum::of((0..x.len()).map(|c| dout[c] * weight[c] * xhat(c))).near(growth(x.len()) + 5.0);
    let gradient = |c: usize| {
        let (g, xhat) = (dout[c] * weight[c], xhat(c));
        let (a, b) = (mean_g.want / n, xhat * mean_gx.want / n);
        let error = mean_g.error / n + xhat.abs() * mean_gx.error / n + 5.0 * U * (g.abs() + a.abs() + b.abs());
        Near { want: rstd * (g - a - b), error: rstd * error }
    };
    (0..x.len()).map(gradient).collect()
}

fn layer_backward(bench: &mut Bench, random: &mut Random, dtype: Dtype, rows: usize, cols: usize) -> Outcome {
    let (dout, x, before) =
        (random.uniform(dtype, rows * cols), random.scaled(dtype, rows * cols, 3.0), random.uniform(dtype, rows * cols));
    let [weight, dweight_before, dbias_before] = [(); 3].map(|()| random.uniform(dtype, cols));
    let means = random.uniform(FP32, rows);
    let stats: Vec<f32> = means.into_iter().zip(random.positive(rows)).flat_map(|(mean, rstd)| [mean, rstd]).collect();
    let (dout_wide, x_wide, weight_wide, stats_wide) = (wide(&dout), wide(&x), wide(&weight), wide(&stats));
    let stats_of = |row: usize| (stats_wide[2 * row], stats_wide[2 * row + 1]);
    let dx = parallel(rows, |row| {
        let row_of = |all| row_of(all, row, cols);
        layer_row_backward(row_of(&dout_wide), row_of(&x_wide), &weight_wide, stats_of(row))
    });
    let dx: Vec<Near> = dx.into_iter().flatten().zip(&before).map(|(near, &before)| near.plus(f64::from(before))).collect();
    let xhat = |row: usize, col: usize| (x_wide[row * cols + col] - stats_of(row).0) * stats_of(row).1;
    let dweight = column_sums(rows, cols, growth(rows) + 3.0, |row, col| dout_wide[row * cols + col] * xhat(row, col));
    let dbias = column_sums(rows, cols, growth(rows), |row, col| dout_wide[row * cols + col]);
    let mut worst = 0f64;
    for accumulate in [false, true] {
        let mut case = Case::default();
        let (dout, x, weight) = (case.input("dout", dtype, &dout), case.input("x", dtype, &x), case.input("weight", dtype, &weight));
        let stats = case.input("stats", FP32, &stats);
        let dx = case.updated("dx", dtype, &before, Want::Near(dx.clone()));
        let dweight = case.gradient("dweight", dtype, accumulate.then_some(&dweight_before), dweight.clone());
        let dbias = case.gradient("dbias", dtype, accumulate.then_some(&dbias_before), dbias.clone());
        let outcome = case.check(bench, &|dev, at| {
            let (dout, x, weight, stats) = (at[dout], at[x], at[weight], at[stats]);
            let (dx, dweight, dbias) = (at[dx], at[dweight], at[dbias]);
            dev.launch(LayerNormBackward { dout, x, weight, stats, dx, dweight, dbias, accumulate })
        });
        worst = worst.max(outcome?);
    }
    Ok(worst)
}

fn row_of(all: &[f64], row: usize, cols: usize) -> &[f64] {
    &all[row * cols..][..cols]
}

/// Sums of `term(row, col)` over the rows.
fn column_sums(rows: usize, cols: usize, growth: f64, term: impl Fn(usize, usize) -> f64 + Sync) -> Vec<Near> {
    parallel(cols, |col| Sum::of((0..rows).map(|row| term(row, col))).near(growth))
}
