//! Expert products compared with f64, with segments of every length, and the operations on their rows: elementwise results with the CPU's
//! bits, and sums within their bound.

use super::bounds::{Near, Sum, U, growth, product_growth};
use super::formats::FLOATS;
use super::harness::{Bench, Case, Want};
use super::kernels::Suite;
use super::matmul::multiply;
use super::random::Random;
use super::report::Outcome;
use super::route::{sorted, spread, to_one};
use std::io::Write;
use superoffload::internals::device::{
    ClampedSwiglu, ExpertActivation, ExpertBackward, ExpertBias, ExpertBiasDot, GroupedMatmul, GroupedShape, MatmulLayout, MatmulShape,
    RouteShape, RouterRule, ScaleChoices, ScaleChoicesBackward, SegmentSums,
};
use superoffload::internals::dtype::Dtype;

const FP32: Dtype = Dtype::Float32;
const ACTIVATIONS: [ExpertActivation; 3] =
    [ExpertActivation::Swiglu, ExpertActivation::Clamped { alpha: 1.702, limit: 3.0 }, ExpertActivation::Geglu];
/// Roundings of a term, which is an activation, in addition to the fp32 sum of a row: several roundings and an exponential.
const ACTIVATION_ROUNDINGS: f64 = 40.0;
/// `2 sqrt(2 / pi)`, in the tanh form of GELU.
const GELU: f64 = 1.595_769_121_605_730_7;

/// The products alone, by the implementation on the device of the suite.
pub fn products<W: Write>(suite: &mut Suite<'_, W>) {
    let by_cublaslt = suite.bench.by_cublaslt;
    let by = if by_cublaslt { ", by cuBLASLt" } else { "" };
    // cuBLASLt supports only narrow formats and rows of whole vectors.
    let takes = |dtype: Dtype, outs: usize, ins: usize| !by_cublaslt || (dtype != FP32 && outs.is_multiple_of(8) && ins.is_multiple_of(8));
    for (dtype, layout) in FLOATS.into_iter().flat_map(|dtype| MatmulLayout::ALL.map(|layout| (dtype, layout))) {
        for (outs, ins) in [(1, 1), (7, 5), (40, 64), (136, 200), (130, 33)].into_iter().filter(|(outs, ins)| takes(dtype, *outs, *ins)) {
            for bounds in BOUNDS {
                let name = format!("grouped_matmul {layout:?} {dtype} {outs}x{ins}, segments {bounds:?}{by}");
                suite.case(&name, |bench, random| product(bench, random, dtype, (layout, outs, ins), bounds));
            }
        }
        if suite.full(dtype) && takes(dtype, 1536, 2048) {
            let bounds: Vec<i32> = (0..=8).map(|e| e * e * 64).collect();
            let name = format!("grouped_matmul {layout:?} {dtype} 1536x2048, 8 experts{by}");
            suite.case(&name, |bench, random| product(bench, random, dtype, (layout, 1536, 2048), &bounds));
        }
    }
}

/// Segment bounds: no rows, one row, no rows at the start, in between and at the end, rows that do not fill a tile, one expert with all
/// rows.
const BOUNDS: [&[i32]; 6] = [&[0, 0, 0], &[0, 1], &[0, 0, 3, 3, 70, 199, 200, 200], &[0, 200], &[0, 0, 0, 300], &[0, 128, 129, 257, 300]];

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    products(suite);
    for dtype in FLOATS {
        let full = suite.full(dtype).then_some((4096, 4, 2880));
        for (tokens, top_k, cols) in [(1, 1, 1), (5, 2, 7), (33, 3, 64), (300, 4, 45), (71, 3, 2888)].into_iter().chain(full) {
            let shape = RouteShape { tokens, experts: 6, top_k, rule: RouterRule::Chosen };
            for (kind, choices) in [("spread", spread as fn(&mut Random, RouteShape) -> Vec<i32>), ("all to one", to_one)] {
                let name = |kernel: &str| format!("{kernel} {dtype} {tokens}x{top_k} rows of {cols}, {kind}");
                suite.case(&name("segment_sums"), |bench, random| {
                    let choices = choices(random, shape);
                    sums(bench, random, dtype, shape, &choices, cols)
                });
                suite.case(&name("expert_bias"), |bench, random| {
                    let choices = choices(random, shape);
                    biases(bench, random, dtype, shape, &choices, cols)
                });
                if cols < 64 {
                    suite.case(&format!("scale_choices {dtype} {tokens}x{top_k}, {kind}"), |bench, random| {
                        let choices = choices(random, shape);
                        scales(bench, random, dtype, shape, &choices)
                    });
                }
            }
            for activation in ACTIVATIONS {
                suite.case(&format!("expert_backward {activation:?} {dtype} {tokens}x{top_k} rows of {cols}"), |bench, random| {
                    backward(bench, random, dtype, shape, activation, cols)
                });
            }
        }
        for (kind, values) in [("ordinary", ordinary as fn(&mut Random, Dtype, usize) -> Vec<f32>), ("wild", Random::wild)] {
            for elems in [1, 255, 40_000] {
                suite.case(&format!("clamped_swiglu {dtype} {elems} {kind}"), |bench, random| {
                    let mut case = Case::default();
                    let gate_up = case.input("gate_up", dtype, &values(random, dtype, 2 * elems));
                    let out = case.output("out", dtype, elems, Want::Same);
                    let call = |gate_up, out| ClampedSwiglu { gate_up, out, alpha: 1.702, limit: 7.0 };
                    case.check(bench, &|dev, at| dev.launch(call(at[gate_up], at[out])))
                });
            }
        }
    }
}

/// Values on both sides of the limits.
fn ordinary(random: &mut Random, dtype: Dtype, elems: usize) -> Vec<f32> {
    random.scaled(dtype, elems, 12.0)
}

/// Rows `from..to` of a matrix with `cols` columns.
fn part(x: &[f32], from: usize, to: usize, cols: usize) -> &[f32] {
    &x[from * cols..to * cols]
}

fn product(
    bench: &mut Bench,
    random: &mut Random,
    dtype: Dtype,
    (layout, outs, ins): (MatmulLayout, usize, usize),
    bounds: &[i32],
) -> Outcome {
    let (experts, rows) = (bounds.len() - 1, bounds[bounds.len() - 1] as usize);
    let shape = GroupedShape { layout, experts, rows, outs, ins };
    let (x, y, w) = (rows * ins, rows * outs, experts * outs * ins);
    let (a_elems, b_elems) = match layout {
        MatmulLayout::Nt => (x, w),
        MatmulLayout::Nn => (y, w),
        MatmulLayout::Tn => (y, x),
    };
    let (a, b) = (random.uniform(dtype, a_elems), random.uniform(dtype, b_elems));
    let segment = |e: usize| {
        let (from, to) = (bounds[e] as usize, bounds[e + 1] as usize);
        let rows = to - from;
        let (m, n, k) = match layout {
            MatmulLayout::Nt => (rows, outs, ins),
            MatmulLayout::Nn => (rows, ins, outs),
            MatmulLayout::Tn => (outs, ins, rows),
        };
        let (a, b) = match layout {
            MatmulLayout::Nt => (part(&a, from, to, ins), part(&b, e, e + 1, outs * ins)),
            MatmulLayout::Nn => (part(&a, from, to, outs), part(&b, e, e + 1, outs * ins)),
            MatmulLayout::Tn => (part(&a, from, to, outs), part(&b, from, to, ins)),
        };
        multiply(MatmulShape { layout, m, n, k }, a, b, U * product_growth(dtype, k))
    };
    let exact: Vec<Near> = (0..experts).flat_map(segment).collect();
    let mut worst = 0f64;
    for accumulate in [false, true].into_iter().take(if layout == MatmulLayout::Tn { 2 } else { 1 }) {
        let mut case = Case::default();
        if bench.by_cublaslt {
            case.aligned();
        }
        let before = random.uniform(dtype, exact.len());
        let (a, b, bounds) = (case.input("a", dtype, &a), case.input("b", dtype, &b), case.ints("bounds", bounds));
        let c = case.gradient("c", dtype, accumulate.then_some(&before[..]), exact.clone());
        worst =
            worst.max(case.check(bench, &|dev, at| {
                dev.launch(GroupedMatmul { shape, a: at[a], b: at[b], bounds: at[bounds], c: at[c], accumulate })
            })?);
    }
    Ok(worst)
}

fn sums(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: RouteShape, choices: &[i32], cols: usize) -> Outcome {
    let [bounds, _, entries] = sorted(shape, choices);
    let (rows, by_choice) = (random.uniform(dtype, shape.rows() * cols), random.uniform(FP32, shape.rows()));
    let before = random.uniform(dtype, shape.experts * cols);
    for (weighted, accumulate) in [(false, false), (true, false), (true, true)] {
        let weight = |row: usize| if weighted { f64::from(by_choice[entries[row] as usize]) } else { 1.0 };
        let near = |i: usize| {
            let (expert, col) = (i / cols, i % cols);
            let segment = bounds[expert] as usize..bounds[expert + 1] as usize;
            let count = segment.len();
            Sum::of(segment.map(|row| weight(row) * f64::from(rows[row * cols + col]))).near(growth(count))
        };
        let mut case = Case::default();
        let (x, weights) = (case.input("x", dtype, &rows), case.input("weights", FP32, &by_choice));
        let (entries, bounds) = (case.ints("entries", &entries), case.ints("bounds", &bounds));
        let out = case.gradient("out", dtype, accumulate.then_some(&before[..]), (0..shape.experts * cols).map(near).collect());
        case.check(bench, &|dev, at| {
            let (x, weights) = (at[x], weighted.then(|| at[weights]));
            dev.launch(SegmentSums { x, weights, entries: at[entries], bounds: at[bounds], out: at[out], accumulate, cols })
        })?;
    }
    Ok(0.0)
}

fn biases(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: RouteShape, choices: &[i32], cols: usize) -> Outcome {
    let [.., entries] = sorted(shape, choices);
    let (rows, table) = (random.uniform(dtype, shape.rows() * cols), random.uniform(dtype, shape.experts * cols));
    let mut case = Case::default();
    let (x, bias) = (case.updated("x", dtype, &rows, Want::Same), case.input("bias", dtype, &table));
    let (experts, of_rows) = (case.ints("experts", choices), case.ints("entries", &entries));
    case.check(bench, &|dev, at| dev.launch(ExpertBias { x: at[x], bias: at[bias], experts: at[experts], entries: at[of_rows], cols }))?;
    let before = random.uniform(FP32, shape.rows());
    let near = |row: usize| {
        let expert = choices[entries[row] as usize] as usize;
        let term = |col: usize| f64::from(rows[row * cols + col]) * f64::from(table[expert * cols + col]);
        Sum::of((0..cols).map(term)).near(growth(cols))
    };
    let mut case = Case::default();
    let (dout, bias) = (case.input("dout", dtype, &rows), case.input("bias", dtype, &table));
    let (experts, of_rows) = (case.ints("experts", choices), case.ints("entries", &entries));
    let dweights = case.gradient("dweights", FP32, Some(&before), (0..shape.rows()).map(near).collect());
    case.check(bench, &|dev, at| {
        let (experts, entries, dweights) = (at[experts], at[of_rows], at[dweights]);
        dev.launch(ExpertBiasDot { dout: at[dout], bias: at[bias], experts, entries, dweights, cols })
    })
}

/// Factors of experts on the weights of choices, and their gradients.
fn scales(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: RouteShape, choices: &[i32]) -> Outcome {
    let [bounds, _, entries] = sorted(shape, choices);
    let (by_choice, by_row) = (random.uniform(FP32, shape.rows()), random.uniform(FP32, shape.rows()));
    let (factors, before) = (random.uniform(dtype, shape.experts), random.uniform(dtype, shape.experts));
    let mut case = Case::default();
    let (weights, experts) = (case.input("weights", FP32, &by_choice), case.ints("experts", choices));
    let (scale, out) = (case.input("scale", dtype, &factors), case.output("out", FP32, shape.rows(), Want::Same));
    case.check(bench, &|dev, at| dev.launch(ScaleChoices { weights: at[weights], experts: at[experts], scale: at[scale], out: at[out] }))?;
    let near = |expert: usize| {
        let segment = bounds[expert] as usize..bounds[expert + 1] as usize;
        let count = segment.len();
        Sum::of(segment.map(|row| f64::from(by_choice[entries[row] as usize]) * f64::from(by_row[row]))).near(growth(count))
    };
    let mut worst = 0f64;
    for accumulate in [false, true] {
        let mut case = Case::default();
        let (weights, scale) = (case.input("weights", FP32, &by_choice), case.input("scale", dtype, &factors));
        let (entries, bounds) = (case.ints("entries", &entries), case.ints("bounds", &bounds));
        let dweights = case.updated("dweights", FP32, &by_row, Want::Same);
        let dscale = case.gradient("dscale", dtype, accumulate.then_some(&before[..]), (0..shape.experts).map(near).collect());
        worst = worst.max(case.check(bench, &|dev, at| {
            let (weights, entries, bounds, scale) = (at[weights], at[entries], at[bounds], at[scale]);
            dev.launch(ScaleChoicesBackward { weights, entries, bounds, scale, dweights: at[dweights], dscale: at[dscale], accumulate })
        })?);
    }
    Ok(worst)
}

/// The activation of channel `c` of a row in f64.
fn activation_of(activation: ExpertActivation, row: &[f32], c: usize) -> f64 {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let at = |i: usize| f64::from(row[i]);
    match activation {
        ExpertActivation::Swiglu => at(c) * sigmoid(at(c)) * at(row.len() / 2 + c),
        ExpertActivation::Geglu => at(c) * sigmoid(GELU * (at(c) + 0.044_715 * at(c).powi(3))) * at(row.len() / 2 + c),
        ExpertActivation::Clamped { alpha, limit } => {
            let (alpha, limit) = (f64::from(alpha), f64::from(limit));
            let (gate, up) = (at(2 * c).min(limit), at(2 * c + 1).clamp(-limit, limit));
            (up + 1.0) * gate * sigmoid(alpha * gate)
        }
    }
}

fn backward(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: RouteShape, activation: ExpertActivation, cols: usize) -> Outcome {
    let choices = spread(random, shape);
    let [.., entries] = sorted(shape, &choices);
    let (da, gate_up) = (random.uniform(dtype, shape.rows() * cols), random.scaled(dtype, 2 * shape.rows() * cols, 6.0));
    let dweight = |row: usize| {
        let gate_up = part(&gate_up, row, row + 1, 2 * cols);
        let term = |c: usize| f64::from(da[row * cols + c]) * activation_of(activation, gate_up, c);
        Sum::of((0..cols).map(term)).near(growth(cols) + ACTIVATION_ROUNDINGS)
    };
    let mut case = Case::default();
    let dweights = case.output("dweights", FP32, shape.rows(), Want::Near((0..shape.rows()).map(dweight).collect()));
    let (da, gate_up) = (case.input("da", dtype, &da), case.input("gate_up", dtype, &gate_up));
    let weights = case.input("weights", FP32, &random.uniform(FP32, shape.rows()));
    let entries = case.ints("entries", &entries);
    let dgate_up = case.output("dgate_up", dtype, 2 * shape.rows() * cols, Want::Same);
    let weighted = case.output("weighted", dtype, shape.rows() * cols, Want::Same);
    case.check(bench, &|dev, at| {
        let (da, gate_up, weights, entries) = (at[da], at[gate_up], at[weights], at[entries]);
        let (dgate_up, weighted, dweights) = (at[dgate_up], at[weighted], at[dweights]);
        dev.launch(ExpertBackward { da, gate_up, weights, entries, dgate_up, weighted, dweights, activation, cols })
    })
}
