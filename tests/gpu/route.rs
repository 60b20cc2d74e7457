//! The router: logits within their bound, choices and weights with the CPU's bits for all logits, and the order of rows.

use super::bounds::{Near, U, product_growth};
use super::formats::FLOATS;
use super::harness::{Bench, Case, Want};
use super::kernels::Suite;
use super::matmul::multiply;
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::{
    CORRECTION_PARTS, Combine, Dispatch, MatmulLayout, MatmulShape, Route, RouteShape, RouterBackward, RouterBalance, RouterLogits,
    RouterRule, Segments, SigmoidRule,
};
use superoffload::internals::dtype::Dtype;

const FP32: Dtype = Dtype::Float32;

/// Tokens, experts, choices: one of each, all experts, numbers of real models, numbers that do not fill warps and blocks.
const ROUTES: [(usize, usize, usize); 8] =
    [(1, 1, 1), (1, 8, 8), (5, 3, 2), (67, 33, 4), (65, 128, 8), (700, 32, 4), (300, 64, 8), (130, 1000, 3)];

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    for (tokens, experts, top_k) in ROUTES {
        for (rule_name, rule) in rules(experts, top_k) {
            let shape = RouteShape { tokens, experts, top_k, rule };
            let name = |kernel: &str| format!("{kernel} {tokens} tokens, {top_k} of {experts} experts, {rule_name}");
            for (kind, logits) in [("ordinary", Random::uniform as Values), ("wild", Random::wild), ("ties", ties)] {
                suite.case(&format!("{} {kind}", name("route")), |bench, random| {
                    route(bench, shape, &logits(random, FP32, tokens * experts), None)
                });
            }
            for dtype in FLOATS.into_iter().filter(|_| matches!(rule, RouterRule::Sigmoid(_))) {
                suite.case(&format!("{} corrected {dtype}", name("route")), |bench, random| {
                    let (logits, correction) = (random.uniform(FP32, tokens * experts), random.uniform(dtype, CORRECTION_PARTS * experts));
                    route(bench, shape, &logits, Some((dtype, &correction)))
                });
            }
            for dtype in FLOATS {
                suite.case(&format!("{} {dtype}", name("router_backward")), |bench, random| backward(bench, random, dtype, shape));
                suite.case(&format!("{} {dtype}", name("router_balance")), |bench, random| balance(bench, random, dtype, shape));
            }
        }
        let shape = RouteShape { tokens, experts, top_k, rule: RouterRule::Chosen };
        for (kind, choice) in [("spread", spread as Choice), ("all to one", to_one)] {
            suite.case(&format!("segments {tokens} tokens, {top_k} of {experts} experts, {kind}"), |bench, random| {
                segments(bench, shape, &choice(random, shape))
            });
        }
    }
    for dtype in FLOATS {
        for (tokens, channels, experts) in [(1, 1, 1), (3, 7, 5), (130, 64, 32), (67, 515, 33), (200, 256, 128)] {
            let name = format!("router_logits {dtype} {tokens}x{channels}, {experts} experts");
            suite.case(&name, |bench, random| logits(bench, random, dtype, [tokens, channels, experts]));
        }
        for (tokens, top_k, cols) in [(1, 1, 1), (5, 3, 7), (33, 8, 64), (9, 4, 2880)] {
            let name = format!("combine {dtype} {tokens}x{cols}, {top_k} rows each");
            suite.case(&name, |bench, random| combine(bench, random, dtype, [tokens, top_k, cols]));
            let name = format!("dispatch {dtype} {tokens}x{cols}, {top_k} rows each");
            suite.case(&name, |bench, random| dispatch(bench, random, dtype, [tokens, top_k, cols]));
        }
    }
}

/// Draws inputs.
type Values = fn(&mut Random, Dtype, usize) -> Vec<f32>;
type Choice = fn(&mut Random, RouteShape) -> Vec<i32>;

/// Numbers with many ties.
fn ties(random: &mut Random, _: Dtype, elems: usize) -> Vec<f32> {
    (0..elems).map(|_| random.below(3) as f32 - 1.0).collect()
}

/// Different experts for each token.
pub fn spread(random: &mut Random, shape: RouteShape) -> Vec<i32> {
    let RouteShape { tokens, experts, top_k, .. } = shape;
    (0..tokens).map(|_| random.below(experts)).flat_map(|first| (0..top_k).map(move |j| ((first + j) % experts) as i32)).collect()
}

/// Selects equal experts for all tokens, so that the others have no rows.
pub fn to_one(_: &mut Random, shape: RouteShape) -> Vec<i32> {
    (0..shape.tokens).flat_map(|_| (0..shape.top_k).map(|j| (shape.experts - 1 - j) as i32)).collect()
}

/// The expected outputs of [`Segments`] for `experts`: bounds, slots, entries.
pub fn sorted(shape: RouteShape, experts: &[i32]) -> [Vec<i32>; 3] {
    let mut entries: Vec<i32> = (0..experts.len() as i32).collect();
    entries.sort_by_key(|&entry| experts[entry as usize]);
    let mut slots = vec![0; experts.len()];
    entries.iter().zip(0..).for_each(|(&entry, row)| slots[entry as usize] = row);
    let bounds = (0..=shape.experts as i32).map(|expert| experts.iter().filter(|&&e| e < expert).count() as i32).collect();
    [bounds, slots, entries]
}

/// Both rules of the softmax, and sigmoids: whole, and by as many groups as divide the experts.
fn rules(experts: usize, top_k: usize) -> impl Iterator<Item = (String, RouterRule)> {
    let grouped = [2, 8, 32].into_iter().flat_map(|groups| [1, groups / 2, groups].map(|top_groups| (groups, top_groups)));
    let sigmoid = [(1, 1)].into_iter().chain(grouped).flat_map(move |(groups, top_groups)| {
        let rule = |renormalised, scale| SigmoidRule { groups, top_groups, renormalised, scale };
        [rule(true, 2.5), rule(false, 1.0)]
    });
    let allowed = sigmoid.filter(move |rule| rule.allows(experts, top_k));
    let by_score = allowed.map(|rule| (format!("{rule:?}"), RouterRule::Sigmoid(rule)));
    [("Chosen".into(), RouterRule::Chosen), ("All".into(), RouterRule::All)].into_iter().chain(by_score)
}

fn route(bench: &mut Bench, shape: RouteShape, logits: &[f32], correction: Option<(Dtype, &[f32])>) -> Outcome {
    let mut case = Case::default();
    let correction = correction.map(|(dtype, parts)| case.input("correction", dtype, parts));
    let logits = case.input("logits", FP32, logits);
    let experts = case.output("experts", Dtype::Int32, shape.rows(), Want::Same);
    let weights = case.output("weights", FP32, shape.rows(), Want::Same);
    case.check(bench, &|dev, at| {
        let correction = correction.map(|parts| at[parts]);
        dev.launch(Route { logits: at[logits], correction, experts: at[experts], weights: at[weights], shape })
    })
}

fn segments(bench: &mut Bench, shape: RouteShape, choices: &[i32]) -> Outcome {
    let mut case = Case::default();
    let experts = case.ints("experts", choices);
    let [bounds, slots, entries] = sorted(shape, choices);
    let mut output = |name, want: Vec<i32>| case.output(name, Dtype::Int32, want.len(), Want::Bits(bytemuck::cast_slice(&want).to_vec()));
    let (bounds, slots, entries) = (output("bounds", bounds), output("slots", slots), output("entries", entries));
    case.check(bench, &|dev, at| {
        dev.launch(Segments { experts: at[experts], bounds: at[bounds], slots: at[slots], entries: at[entries], shape })
    })
}

fn logits(bench: &mut Bench, random: &mut Random, dtype: Dtype, [m, k, n]: [usize; 3]) -> Outcome {
    let (x, weight, bias) = (random.uniform(dtype, m * k), random.uniform(dtype, n * k), random.uniform(dtype, n));
    let exact = multiply(MatmulShape { layout: MatmulLayout::Nt, m, n, k }, &x, &weight, U * product_growth(dtype, k));
    for biased in [false, true] {
        let mut case = Case::default();
        let sums = exact.iter().enumerate().map(|(i, near)| if biased { near.plus(f64::from(bias[i % n])) } else { *near }).collect();
        let (x, weight, bias) = (case.input("x", dtype, &x), case.input("weight", dtype, &weight), case.input("bias", dtype, &bias));
        let logits = case.output("logits", FP32, m * n, Want::Near(sums));
        case.check(bench, &|dev, at| {
            let bias = biased.then(|| at[bias]);
            dev.launch(RouterLogits { x: at[x], weight: at[weight], bias, logits: at[logits], channels: k })
        })?;
    }
    Ok(0.0)
}

fn dispatch(bench: &mut Bench, random: &mut Random, dtype: Dtype, [tokens, top_k, cols]: [usize; 3]) -> Outcome {
    let shape = RouteShape { tokens, experts: 9, top_k, rule: RouterRule::Chosen };
    let choices = spread(random, shape);
    let [_, slots, entries] = sorted(shape, &choices);
    let values = random.uniform(dtype, tokens * cols);
    let copy = |i: usize| Near::exact(f64::from(values[entries[i / cols] as usize / top_k * cols + i % cols]));
    let want = Want::Near((0..shape.rows() * cols).map(copy).collect());
    let mut case = Case::default();
    let (x, slots, out) =
        (case.input("x", dtype, &values), case.ints("slots", &slots), case.output("out", dtype, shape.rows() * cols, want));
    case.check(bench, &|dev, at| dev.launch(Dispatch { x: at[x], slots: at[slots], out: at[out], cols }))
}

fn combine(bench: &mut Bench, random: &mut Random, dtype: Dtype, [tokens, top_k, cols]: [usize; 3]) -> Outcome {
    let shape = RouteShape { tokens, experts: 9, top_k, rule: RouterRule::Chosen };
    let choices = spread(random, shape);
    let [_, slots, _] = sorted(shape, &choices);
    let (rows, weights) = (random.uniform(dtype, shape.rows() * cols), random.uniform(FP32, shape.rows()));
    let residual = random.uniform(dtype, tokens * cols);
    for (weighted, based) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut case = Case::default();
        let (x, slots, weights) = (case.input("x", dtype, &rows), case.ints("slots", &slots), case.input("weights", FP32, &weights));
        let base = case.input("base", dtype, &residual);
        let out = case.output("out", dtype, tokens * cols, Want::Same);
        case.check(bench, &|dev, at| {
            let (weights, base) = (weighted.then(|| at[weights]), based.then(|| at[base]));
            dev.launch(Combine { x: at[x], slots: at[slots], weights, base, out: at[out], cols })
        })?;
    }
    Ok(0.0)
}

fn backward(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: RouteShape) -> Outcome {
    let choices = spread(random, shape);
    let [_, slots, _] = sorted(shape, &choices);
    let mut case = Case::default();
    let logits = case.input("logits", FP32, &random.scaled(FP32, shape.tokens * shape.experts, 4.0));
    let (experts, slots) = (case.ints("experts", &choices), case.ints("slots", &slots));
    let weights = case.input("weights", FP32, &random.uniform(FP32, shape.rows()));
    let dweights = case.input("dweights", FP32, &random.uniform(FP32, shape.rows()));
    let dlogits = case.output("dlogits", dtype, shape.tokens * shape.experts, Want::Same);
    case.check(bench, &|dev, at| {
        let (logits, experts, weights, slots) = (at[logits], at[experts], at[weights], at[slots]);
        dev.launch(RouterBackward { logits, experts, weights, slots, dweights: at[dweights], dlogits: at[dlogits], shape })
    })
}

/// The choices of three layers, at the distance that activations have.
fn balance(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: RouteShape) -> Outcome {
    let (stride, mut choices) = ((shape.experts + 1).next_multiple_of(128), Vec::new());
    let mut all = Vec::new();
    for _ in 0..3 {
        choices = spread(random, shape);
        let [bounds, ..] = sorted(shape, &choices);
        all.extend(bounds);
        all.resize(all.len().next_multiple_of(stride), -1);
    }
    let mut case = Case::default();
    let logits = case.input("logits", FP32, &random.scaled(FP32, shape.tokens * shape.experts, 4.0));
    let (experts, bounds) = (case.ints("experts", &choices), case.ints("bounds", &all));
    let dlogits = case.updated("dlogits", dtype, &random.uniform(dtype, shape.tokens * shape.experts), Want::Same);
    case.check(bench, &|dev, at| {
        let (logits, experts, bounds, dlogits) = (at[logits], at[experts], at[bounds], at[dlogits]);
        dev.launch(RouterBalance { logits, experts, bounds, stride, dlogits, factor: 1e-3, shape })
    })
}
