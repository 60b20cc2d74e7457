//! Matrix products in every layout, with every permitted addend.

use super::bounds::{Near, U, product_growth, unit};
use super::formats::FLOATS;
use super::harness::{Bench, Case, Want};
use super::kernels::{Suite, parallel};
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::{Matmul, MatmulLayout, MatmulShape};
use superoffload::internals::dtype::Dtype;

/// m, n, k: one element, odd sizes, tails of tiles, the widths and depths of real models, a part of a vocabulary.
const SIZES: [(usize, usize, usize); 10] = [
    (1, 1, 1),
    (3, 5, 7),
    (17, 33, 65),
    (64, 64, 64),
    (130, 257, 96),
    (1, 2560, 256),
    (65, 128, 2560),
    (33, 4096, 128),
    (40, 70, 9728),
    (48, 1105, 768),
];
/// The matrices of a real layer, and a tile of logits.
const FULL: [(usize, usize, usize); 3] = [(2048, 2560, 2560), (512, 9728, 2560), (512, 50257, 768)];

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    for layout in MatmulLayout::ALL {
        for dtype in FLOATS {
            let full = if suite.full(dtype) { &FULL[..] } else { &[] };
            for &(m, n, k) in SIZES.iter().chain(full) {
                let shape = MatmulShape { layout, m, n, k };
                let kind = Product { dtype, result: dtype, shape, between: 0 };
                suite.case(&format!("matmul {layout:?} {dtype} {m}x{n}x{k}"), |bench, random| product(bench, random, kind));
            }
        }
    }
    logits_cases(suite);
}

/// The products of fp32 logits and of gradients in their place: 16-bit factors with an fp32 result, and rows of the first factor with gaps.
fn logits_cases<W: Write>(suite: &mut Suite<'_, W>) {
    for dtype in [Dtype::Bfloat16, Dtype::Float16] {
        let full = if suite.full(dtype) { &FULL[..] } else { &[] };
        for &(m, n, k) in SIZES.iter().chain(full) {
            let shape = MatmulShape { layout: MatmulLayout::Nt, m, n, k };
            let kind = Product { dtype, result: Dtype::Float32, shape, between: 0 };
            suite.case(&format!("matmul Nt {dtype} to float32 {m}x{n}x{k}"), |bench, random| product(bench, random, kind));
            for layout in [MatmulLayout::Nn, MatmulLayout::Tn] {
                let between = if layout == MatmulLayout::Tn { m } else { k };
                let kind = Product { dtype, result: dtype, shape: MatmulShape { layout, ..shape }, between };
                suite.case(&format!("matmul {layout:?} {dtype} {m}x{n}x{k} of rows with gaps"), |bench, random| {
                    product(bench, random, kind)
                });
            }
        }
    }
}

/// A kind of product.
#[derive(Clone, Copy)]
struct Product {
    /// Format of the factors.
    dtype: Dtype,
    /// Format of the result.
    result: Dtype,
    shape: MatmulShape,
    /// Elements between the stored rows of the first factor.
    between: usize,
}

impl Product {
    /// The first factor, and with the elements between its rows.
    fn first_factor(self, random: &mut Random) -> [Vec<f32>; 2] {
        let MatmulShape { layout, m, k, .. } = self.shape;
        let (rows, cols) = if layout == MatmulLayout::Tn { (k, m) } else { (m, k) };
        let pitch = cols + self.between;
        let stored = random.uniform(self.dtype, rows * pitch);
        [stored.chunks_exact(pitch).flat_map(|row| row[..cols].to_vec()).collect(), stored]
    }

    fn pitch(self) -> Option<usize> {
        let MatmulShape { layout, m, k, .. } = self.shape;
        (self.between > 0).then_some(self.between + if layout == MatmulLayout::Tn { m } else { k })
    }
}

/// Products of these sizes in parts.
const IN_PARTS: [(usize, usize, usize); 5] = [(3, 5, 70), (130, 257, 96), (65, 128, 2560), (33, 4096, 128), (48, 1105, 768)];

/// Products in slices.
pub fn in_slices<W: Write>(suite: &mut Suite<'_, W>) {
    for layout in MatmulLayout::ALL {
        for (dtype, (m, n, k)) in FLOATS.into_iter().flat_map(|dtype| IN_PARTS.map(|size| (dtype, size))) {
            let shape = MatmulShape { layout, m, n, k };
            let kind = Product { dtype, result: dtype, shape, between: 0 };
            suite.case(&format!("matmul {layout:?} {dtype} {m}x{n}x{k} in slices"), |bench, random| product(bench, random, kind));
        }
    }
}

/// The matrix to which a product is added.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Base {
    None,
    /// The output itself: gradients accumulate.
    Output,
    /// Another matrix: a residual branch.
    Apart,
}

/// With and without a bias, for every base. Additions do not depend on the size, so large products use only the first few combinations.
const ADDED: [(bool, Base); 6] =
    [(false, Base::None), (true, Base::Apart), (false, Base::Output), (true, Base::None), (false, Base::Apart), (true, Base::Output)];
const ADDED_TO_LARGE: usize = 3;
const LARGE: usize = 1 << 20;

/// The error is that of the sum, see [`product_growth`]. On a GPU each [`intermediate`] result may also be rounded to the format:
/// cuBLASLt's kernels for rows that are not whole 16-byte vectors add to an already rounded result.
fn product(bench: &mut Bench, random: &mut Random, kind: Product) -> Outcome {
    let Product { dtype, result, shape, .. } = kind;
    let MatmulShape { m, n, k, .. } = shape;
    let ([a, stored], b) = (kind.first_factor(random), random.uniform(dtype, k * n));
    let (bias, before) = (random.uniform(dtype, n), random.uniform(result, m * n));
    let exact = multiply(shape, &a, &b, U * product_growth(dtype, k));
    let mut worst = 0f64;
    let added = &ADDED[..if m * n * k > LARGE { ADDED_TO_LARGE } else { ADDED.len() }];
    for &(with_bias, base) in added.iter().filter(|(with_bias, _)| result == dtype || !with_bias) {
        let unit = if bench.same_bits { 0.0 } else { unit(result) };
        let sum = |(i, near): (usize, &Near)| {
            let added = [with_bias.then(|| bias[i % n]), (base != Base::None).then(|| before[i])].map(|x| x.map(f64::from));
            let rounded = intermediate(near.want, added);
            added.into_iter().flatten().fold(Near { error: near.error + unit * rounded, ..*near }, Near::plus)
        };
        let sums: Vec<Near> = exact.iter().enumerate().map(sum).collect();
        let mut case = Case::default();
        let (a, b, bias) = (case.input("a", dtype, &stored), case.input("b", dtype, &b), case.input("bias", dtype, &bias));
        let (base, c) = match base {
            Base::None => (None, case.output("c", result, m * n, Want::Near(sums))),
            Base::Output => {
                let c = case.updated("c", result, &before, Want::Near(sums));
                (Some(c), c)
            }
            Base::Apart => (Some(case.input("base", result, &before)), case.output("c", result, m * n, Want::Near(sums))),
        };
        let outcome = case.check(bench, &|dev, at| {
            let (bias, base) = (with_bias.then(|| at[bias]), base.map(|base| at[base]));
            dev.launch(Matmul { shape, a: at[a], a_pitch: kind.pitch(), b: at[b], bias, base, c: at[c] })
        });
        worst = worst.max(outcome?);
    }
    Ok(worst)
}

/// The magnitude of the results that may be rounded before the last addition, for either order of additions.
fn intermediate(product: f64, added: [Option<f64>; 2]) -> f64 {
    let largest_sum = |largest: f64, x: f64| largest.max((product + x).abs());
    match added {
        [None, None] => 0.0,
        [Some(bias), Some(base)] => product.abs() + [bias, base].into_iter().fold(0.0, largest_sum),
        _ => product.abs(),
    }
}

/// The product in f64. `error` is relative to the sum of magnitudes.
pub fn multiply(shape: MatmulShape, a: &[f32], b: &[f32], error: f64) -> Vec<Near> {
    let MatmulShape { layout, m, n, k } = shape;
    // Both as rows of length k.
    let a = if layout == MatmulLayout::Tn { transposed(a, k, m) } else { a.to_vec() };
    let b = if layout == MatmulLayout::Nt { b.to_vec() } else { transposed(b, k, n) };
    let row = |i: usize| {
        let a = &a[i * k..][..k];
        (0..n).map(|j| dot(a, &b[j * k..][..k], error)).collect::<Vec<_>>()
    };
    parallel(m, row).into_iter().flatten().collect()
}

fn transposed(x: &[f32], rows: usize, cols: usize) -> Vec<f32> {
    (0..cols).flat_map(|col| (0..rows).map(move |row| x[row * cols + col])).collect()
}

/// Eight parallel sums, so that the compiler can use vectors.
fn dot(a: &[f32], b: &[f32], error: f64) -> Near {
    const LANES: usize = 8;
    let (mut sums, mut sizes) = ([0.0; LANES], [0.0; LANES]);
    let ((a, a_tail), (b, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a.iter().zip(b) {
        for l in 0..LANES {
            let term = f64::from(a[l]) * f64::from(b[l]);
            sums[l] += term;
            sizes[l] += term.abs();
        }
    }
    let tail = a_tail.iter().zip(b_tail).map(|(&a, &b)| f64::from(a) * f64::from(b));
    let want = sums.iter().sum::<f64>() + tail.clone().sum::<f64>();
    let size = sizes.iter().sum::<f64>() + tail.map(f64::abs).sum::<f64>();
    Near { want, error: error * size }
}
