//! The router of a mixture of experts: expert choices, their order by expert, dispatch and combination.

use super::arithmetic::CpuArithmetic;
use super::isa::vectorised;
use super::math::{exp, sigmoid};
use super::matmul::matmul;
use super::split::Chunks;
use super::{Compute, ROW_BLOCK, SUMS};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{
    Combine, Dispatch, EXPERTS_MAX, Route, RouteShape, RouterBackward, RouterBalance, RouterLogits, RouterRule, Segments, SigmoidRule,
};
use crate::dtype::Element;

/// Partial sums of a sum over all experts: one for each lane of a warp, so that a GPU gives the same bits.
const LANES: usize = 32;

impl CpuArithmetic for RouterLogits {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let bias = self.bias.map(|bias| memory.read::<T>(bias));
        matmul::<T, f32>(cx, self.product(), memory.read(self.x), memory.read(self.weight), bias, memory.write(self.logits), false);
    }
}

impl CpuArithmetic for Route {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let correction = self.correction.map(|parts| memory.read::<T>(parts));
        route(cx, self.shape, (memory.read(self.logits), correction), memory.write(self.experts), memory.write(self.weights));
    }
}

/// See [`Route`].
pub(crate) fn route<T: Element>(
    cx: &mut Compute,
    shape: RouteShape,
    (logits, correction): (&[f32], Option<&[T]>),
    experts: &mut [i32],
    weights: &mut [f32],
) {
    let RouteShape { experts: count, top_k, rule, .. } = shape;
    let parts = (Chunks::new(experts, ROW_BLOCK * top_k), Chunks::new(weights, ROW_BLOCK * top_k));
    cx.team.for_each(parts, |block, (experts, weights)| {
        let logits = logits[block * ROW_BLOCK * count..].chunks_exact(count);
        let rows = experts.chunks_exact_mut(top_k).zip(weights.chunks_exact_mut(top_k));
        for (logits, (experts, weights)) in logits.zip(rows) {
            match rule {
                RouterRule::Sigmoid(rule) => {
                    choose_by_score(rule, logits, correction, experts);
                    weigh_by_score(rule, logits, experts, weights);
                }
                RouterRule::Chosen | RouterRule::All => {
                    choose(logits, |_| true, experts);
                    weigh(rule, logits, experts, weights);
                }
            }
        }
    });
}

/// Selects the experts with the largest `keys`, of those that are `allowed`. NaN ranks below all numbers, so the chosen experts are distinct
/// whatever the keys are.
fn choose(keys: &[f32], allowed: impl Fn(usize) -> bool, experts: &mut [i32]) {
    let mut last = u64::MAX;
    for expert in experts {
        let places = keys.iter().zip(0u32..).filter(|(_, index)| allowed(*index as usize));
        let places = places.map(|(&key, index)| u64::from(order(key)) << 32 | u64::from(!index));
        last = places.filter(|place| *place < last).max().unwrap_or(0);
        *expert = !(last as u32) as i32;
    }
}

/// Selects experts by [`SigmoidRule`].
fn choose_by_score<T: Element>(rule: SigmoidRule, logits: &[f32], correction: Option<&[T]>, experts: &mut [i32]) {
    let count = logits.len();
    let mut keys = [0.0f32; EXPERTS_MAX];
    for (expert, (key, logit)) in keys.iter_mut().zip(logits).enumerate() {
        let part = |parts: &[T], part: usize| parts[part * count + expert].to_f32();
        let correction = correction.map_or(0.0, |parts| part(parts, 0) + part(parts, 1) + part(parts, 2));
        *key = sigmoid(*logit) + correction;
    }
    let (keys, group) = (&keys[..count], rule.group(count));
    if rule.top_groups == rule.groups {
        return choose(keys, |_| true, experts);
    }
    let mut sums = [0.0f32; SigmoidRule::GROUPS_MAX];
    for (sum, keys) in sums.iter_mut().zip(keys.chunks_exact(group)) {
        let mut best = [0; 2];
        choose(keys, |_| true, &mut best);
        *sum = keys[best[0] as usize] + keys[best[1] as usize];
    }
    let mut groups = [-1; SigmoidRule::GROUPS_MAX];
    choose(&sums[..rule.groups], |_| true, &mut groups[..rule.top_groups]);
    choose(keys, |expert| groups.contains(&((expert / group) as i32)), experts);
}

fn weigh_by_score(rule: SigmoidRule, logits: &[f32], experts: &[i32], weights: &mut [f32]) {
    weights.iter_mut().zip(experts).for_each(|(weight, &expert)| *weight = sigmoid(logits[expert as usize]));
    if rule.renormalised {
        let sum = weights.iter().fold(0.0, |sum, weight| sum + weight) + SigmoidRule::SUM_LEAST;
        weights.iter_mut().for_each(|weight| *weight /= sum);
    }
    weights.iter_mut().for_each(|weight| *weight *= rule.scale);
}

/// Maps floats to integers of the same order: both zeros are equal, and NaN is the least.
fn order(x: f32) -> u32 {
    let bits = (x + 0.0).to_bits();
    match (x.is_nan(), bits >> 31) {
        (true, _) => 0,
        (_, 0) => bits | 1 << 31,
        _ => !bits,
    }
}

/// Weights by a softmax.
fn weigh(rule: RouterRule, logits: &[f32], experts: &[i32], weights: &mut [f32]) {
    let largest = logits[experts[0] as usize];
    weights.iter_mut().zip(experts).for_each(|(weight, &expert)| *weight = exp(logits[expert as usize] - largest));
    let of_all = rule == RouterRule::All;
    let sum = if of_all { exp_sum(logits, largest) } else { weights.iter().fold(0.0, |sum, weight| sum + weight) };
    weights.iter_mut().for_each(|weight| *weight /= sum);
}

/// The sum of `exp(logit - largest)`.
fn exp_sum(logits: &[f32], largest: f32) -> f32 {
    lane_sum(logits.len(), |i, sum| sum + exp(logits[i] - largest))
}

/// A sum over `count` numbers with [`LANES`] partial sums, each in ascending order.
fn lane_sum(count: usize, add: impl Fn(usize, f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; LANES];
    for i in 0..count {
        lanes[i % LANES] = add(i, lanes[i % LANES]);
    }
    for half in [16, 8, 4, 2, 1] {
        (0..half).for_each(|lane| lanes[lane] += lanes[lane + half]);
    }
    lanes[0]
}

impl CpuArithmetic for Segments {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let (slots, entries) = (memory.write(self.slots), memory.write(self.entries));
        segments(cx, memory.read(self.experts), memory.write(self.bounds), slots, entries);
    }
}

/// See [`Segments`]: a stable counting sort.
pub(crate) fn segments(cx: &mut Compute, experts: &[i32], bounds: &mut [i32], slots: &mut [i32], entries: &mut [i32]) {
    bounds.fill(0);
    experts.iter().for_each(|&expert| bounds[expert as usize + 1] += 1);
    (1..bounds.len()).for_each(|end| bounds[end] += bounds[end - 1]);
    let next = &mut cx.sorted;
    next.clear();
    next.extend(bounds.iter().map(|&start| start as u64));
    for (entry, (&expert, slot)) in experts.iter().zip(slots).enumerate() {
        let row = next[expert as usize] as usize;
        next[expert as usize] += 1;
        (*slot, entries[row]) = (row as i32, entry as i32);
    }
}

impl CpuArithmetic for Dispatch {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        dispatch::<T>(cx, memory.read(self.x), memory.read(self.slots), memory.write(self.out), self.cols);
    }
}

/// See [`Dispatch`]. Threads divide the output rows, so this function first computes the token of each row.
pub(crate) fn dispatch<T: Element>(cx: &mut Compute, x: &[T], slots: &[i32], out: &mut [T], cols: usize) {
    let top_k = slots.len() * cols / x.len();
    let tokens = &mut cx.sorted;
    tokens.clear();
    tokens.resize(slots.len(), 0);
    slots.iter().enumerate().for_each(|(entry, &row)| tokens[row as usize] = (entry / top_k) as u64);
    let tokens = &*tokens;
    cx.team.for_each(Chunks::new(out, cols), |row, out| out.copy_from_slice(&x[tokens[row] as usize * cols..][..cols]));
}

impl CpuArithmetic for Combine {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let (weights, base) = (self.weights.map(|weights| memory.read(weights)), self.base.map(|base| memory.read::<T>(base)));
        combine(cx, memory.read(self.x), memory.read(self.slots), weights, base, memory.write(self.out), self.cols);
    }
}

/// See [`Combine`].
pub(crate) fn combine<T: Element>(
    cx: &mut Compute,
    x: &[T],
    slots: &[i32],
    weights: Option<&[f32]>,
    base: Option<&[T]>,
    out: &mut [T],
    cols: usize,
) {
    let (isa, top_k) = (cx.isa, slots.len() * cols / out.len());
    cx.team.for_each(Chunks::new(out, cols), |token, out| {
        let choices = token * top_k..(token + 1) * top_k;
        let base = base.map(|base| &base[token * cols..][..cols]);
        combine_row(isa, x, &slots[choices.clone()], weights.map(|weights| &weights[choices]), base, out);
    });
}

vectorised! {
    fn combine_row<T>(x: &[T], slots: &[i32], weights: Option<&[f32]>, base: Option<&[T]>, out: &mut [T]) {
        let cols = out.len();
        for (group, out) in out.chunks_mut(SUMS).enumerate() {
            let mut sums = [0.0f32; SUMS];
            for (j, &slot) in slots.iter().enumerate() {
                // A factor of 1 changes no bit.
                let weight = weights.map_or(1.0, |weights| weights[j]);
                let x = &x[slot as usize * cols + group * SUMS..][..out.len()];
                sums.iter_mut().zip(x).for_each(|(sum, x)| *sum = weight.mul_add(x.to_f32(), *sum));
            }
            if let Some(base) = base {
                sums.iter_mut().zip(&base[group * SUMS..]).for_each(|(sum, base)| *sum += base.to_f32());
            }
            out.iter_mut().zip(sums).for_each(|(out, sum)| *out = T::from_f32(sum));
        }
    }
}

impl CpuArithmetic for RouterBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let choices = Choices {
            logits: memory.read(self.logits),
            experts: memory.read(self.experts),
            weights: memory.read(self.weights),
            slots: memory.read(self.slots),
        };
        router_backward::<T>(cx, self.shape, choices, memory.read(self.dweights), memory.write(self.dlogits));
    }
}

/// The forward pass's choices, as [`RouterBackward`] reads them.
#[derive(Clone, Copy)]
pub(crate) struct Choices<'a> {
    pub(crate) logits: &'a [f32],
    pub(crate) experts: &'a [i32],
    pub(crate) weights: &'a [f32],
    pub(crate) slots: &'a [i32],
}

/// See [`RouterBackward`].
pub(crate) fn router_backward<T: Element>(cx: &mut Compute, shape: RouteShape, choices: Choices<'_>, dweights: &[f32], dlogits: &mut [T]) {
    let RouteShape { experts: count, top_k, rule, .. } = shape;
    cx.team.for_each(Chunks::new(dlogits, ROW_BLOCK * count), |block, dlogits| {
        for (row, dlogits) in dlogits.chunks_exact_mut(count).enumerate() {
            let token = block * ROW_BLOCK + row;
            let (first, own) = (token * top_k, token * top_k..(token + 1) * top_k);
            let (experts, weights) = (&choices.experts[own.clone()], &choices.weights[own]);
            let gradient = |j: usize| dweights[choices.slots[first + j] as usize];
            let mean = (0..top_k).fold(0.0f32, |sum, j| weights[j].mul_add(gradient(j), sum));
            match rule {
                RouterRule::Chosen => dlogits.fill(T::from_f32(0.0)),
                RouterRule::Sigmoid(rule) => {
                    scores_backward(rule, &choices.logits[token * count..][..count], experts, (gradient, mean), dlogits);
                    continue;
                }
                RouterRule::All => {
                    let logits = &choices.logits[token * count..][..count];
                    let largest = logits[experts[0] as usize];
                    let sum = exp_sum(logits, largest);
                    dlogits.iter_mut().zip(logits).for_each(|(d, l)| *d = T::from_f32(-(exp(l - largest) / sum * mean)));
                }
            }
            for (j, &expert) in experts.iter().enumerate() {
                dlogits[expert as usize] = T::from_f32(weights[j] * (gradient(j) - mean));
            }
        }
    });
}

/// The gradient of the logits of [`SigmoidRule`]; `mean` is the sum of the products of weights and their gradients.
fn scores_backward<T: Element>(
    rule: SigmoidRule,
    logits: &[f32],
    experts: &[i32],
    (gradient, mean): (impl Fn(usize) -> f32, f32),
    dlogits: &mut [T],
) {
    let score = |expert: i32| sigmoid(logits[expert as usize]);
    let (sum, mean) = if rule.renormalised {
        (experts.iter().fold(0.0, |sum, &expert| sum + score(expert)) + SigmoidRule::SUM_LEAST, mean)
    } else {
        (1.0, 0.0)
    };
    dlogits.fill(T::from_f32(0.0));
    for (j, &expert) in experts.iter().enumerate() {
        let score = score(expert);
        let dscore = rule.scale.mul_add(gradient(j), -mean) / sum;
        dlogits[expert as usize] = T::from_f32(dscore * (score * (1.0 - score)));
    }
}

impl CpuArithmetic for RouterBalance {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let bounds = memory.read::<i32>(self.bounds).chunks_exact(self.stride);
        let count = |expert: usize| bounds.clone().map(|bounds| bounds[expert + 1] - bounds[expert]).sum::<i32>() as f32;
        let (logits, experts) = (memory.read(self.logits), memory.read(self.experts));
        router_balance::<T>(cx, self.shape, (logits, experts), count, self.factor, memory.write(self.dlogits));
    }
}

/// See [`RouterBalance`]; `count` returns the number of choices of an expert.
pub(crate) fn router_balance<T: Element>(
    cx: &mut Compute,
    shape: RouteShape,
    (logits, experts): (&[f32], &[i32]),
    count: impl Fn(usize) -> f32 + Sync,
    factor: f32,
    dlogits: &mut [T],
) {
    let RouteShape { experts: all, top_k, .. } = shape;
    cx.team.for_each(Chunks::new(dlogits, ROW_BLOCK * all), |block, dlogits| {
        for (row, dlogits) in dlogits.chunks_exact_mut(all).enumerate() {
            let token = block * ROW_BLOCK + row;
            let logits = &logits[token * all..][..all];
            let largest = logits[experts[token * top_k] as usize];
            let sum = exp_sum(logits, largest);
            let p = |expert: usize| exp(logits[expert] - largest) / sum;
            let mean = lane_sum(all, |expert, sum| count(expert).mul_add(p(expert), sum));
            for (expert, d) in dlogits.iter_mut().enumerate() {
                *d = T::from_f32(factor.mul_add(p(expert) * (count(expert) - mean), d.to_f32()));
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_close, assert_rounded, assert_same_everywhere, bits, dot, fastest, slopes, values, wide, widened};
    use super::*;
    use crate::sweep::sweep;
    use RouterRule::{All, Chosen};
    use half::bf16;

    const TOKENS: usize = 67;
    const COUNT: usize = 41;

    fn shape(tokens: usize, experts: usize, top_k: usize, rule: RouterRule) -> RouteShape {
        RouteShape { tokens, experts, top_k, rule }
    }

    fn run(cx: &mut Compute, shape: RouteShape, logits: &[f32]) -> (Vec<i32>, Vec<f32>) {
        corrected(cx, shape, logits, None)
    }

    fn corrected(cx: &mut Compute, shape: RouteShape, logits: &[f32], correction: Option<&[f32]>) -> (Vec<i32>, Vec<f32>) {
        let (mut experts, mut weights) = (vec![-1; shape.rows()], vec![f32::NAN; shape.rows()]);
        route(cx, shape, (logits, correction), &mut experts, &mut weights);
        (experts, weights)
    }

    fn scores(groups: usize, top_groups: usize, renormalised: bool, scale: f32) -> RouterRule {
        RouterRule::Sigmoid(SigmoidRule { groups, top_groups, renormalised, scale })
    }

    /// Weights of the chosen experts in f64.
    fn reference(shape: RouteShape, logits: &[f64], experts: &[i32]) -> Vec<f64> {
        let of = |token: usize| {
            let logits = &logits[token * shape.experts..][..shape.experts];
            let experts = &experts[token * shape.top_k..][..shape.top_k];
            if let RouterRule::Sigmoid(rule) = shape.rule {
                let chosen: Vec<f64> = experts.iter().map(|&e| 1.0 / (1.0 + (-logits[e as usize]).exp())).collect();
                let sum = if rule.renormalised { chosen.iter().sum() } else { 1.0 };
                return chosen.into_iter().map(|chosen| f64::from(rule.scale) * chosen / sum).collect();
            }
            let chosen: Vec<f64> = experts.iter().map(|&e| logits[e as usize].exp()).collect();
            let sum: f64 = if shape.rule == Chosen { chosen.iter().sum() } else { logits.iter().map(|l| l.exp()).sum() };
            chosen.into_iter().map(|chosen| chosen / sum).collect::<Vec<_>>()
        };
        (0..shape.tokens).flat_map(of).collect()
    }

    #[test]
    fn the_largest_logits_are_chosen_in_their_order_and_weighed() {
        for (tokens, experts, top_k) in [(1, 1, 1), (1, 8, 2), (TOKENS, COUNT, 5), (3, COUNT, COUNT), (65, 128, 8)] {
            for rule in [Chosen, All, scores(1, 1, true, 2.5), scores(1, 1, false, 1.0)] {
                let shape = shape(tokens, experts, top_k, rule);
                let logits: Vec<f32> = values::<f32>(1, tokens * experts).iter().map(|x| 5.0 * x).collect();
                let (chosen, weights) = run(&mut fastest(), shape, &logits);
                for (logits, chosen) in logits.chunks(experts).zip(chosen.chunks(top_k)) {
                    let mut sorted: Vec<i32> = (0..experts as i32).collect();
                    sorted.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
                    assert_eq!(chosen, &sorted[..top_k]);
                }
                assert_close("weights", &weights, &reference(shape, &wide(&logits), &chosen), 1e-6);
            }
        }
    }

    #[test]
    fn of_equal_logits_the_first_is_chosen_and_nan_last() {
        let chosen = |logits: &[f32]| run(&mut fastest(), shape(1, logits.len(), 3, Chosen), logits).0;
        assert_eq!(chosen(&[1.0, 2.0, 2.0, 1.0, 2.0]), [1, 2, 4]);
        assert_eq!(chosen(&[0.0; 4]), [0, 1, 2]);
        assert_eq!(chosen(&[-0.0, 0.0, -1.0, -0.0]), [0, 1, 3]);
        assert_eq!(chosen(&[f32::NAN; 4]), [0, 1, 2]);
        assert_eq!(chosen(&[f32::NAN, -1.0, f32::NEG_INFINITY, f32::INFINITY]), [3, 1, 2]);
        assert_eq!(chosen(&[f32::NAN, -f32::NAN, f32::NEG_INFINITY, 1.0]), [3, 2, 0]);
    }

    /// The correction moves the choice and not the weights; groups limit the choice.
    #[test]
    fn scores_are_corrected_and_chosen_within_the_best_groups() {
        let logits = [2.0, -1.0, 0.5, 0.4, 0.3, 1.0, -3.0, -2.0];
        let chosen = |rule, top_k, correction: Option<&[f32]>| corrected(&mut fastest(), shape(1, 8, top_k, rule), &logits, correction);
        assert_eq!(chosen(scores(1, 1, true, 1.0), 3, None).0, [0, 5, 2]);
        let mut parts = [0.0; 24];
        (parts[7], parts[8 + 7], parts[16 + 6]) = (1.0, 0.5, 1.5);
        let (experts, weights) = chosen(scores(1, 1, false, 2.0), 3, Some(&parts));
        assert_eq!(experts, [7, 6, 0], "by sigmoid(-2) + 1.5, sigmoid(-3) + 1.5, sigmoid(2)");
        assert_close("weights", &weights, &[-2.0f64, -3.0, 2.0].map(|l| 2.0 / (1.0 + (-l).exp())), 1e-6);
        // Sums of two by groups of two: 1.15, 1.22, 1.31, 0.17.
        assert_eq!(chosen(scores(4, 2, true, 1.0), 4, None).0, [5, 2, 3, 4]);
        assert_eq!(chosen(scores(4, 1, true, 1.0), 2, None).0, [5, 4]);
        assert_eq!(chosen(scores(4, 4, true, 1.0), 3, None).0, [0, 5, 2]);
        let nan = [f32::NAN; 8];
        let of_nan = corrected(&mut fastest(), shape(1, 8, 4, scores(4, 2, true, 1.0)), &nan, None);
        assert_eq!(of_nan.0, [0, 1, 2, 3]);
    }

    fn sort(cx: &mut Compute, experts: &[i32], count: usize) -> [Vec<i32>; 3] {
        let (mut bounds, [mut slots, mut entries]) = (vec![-1; count + 1], [(); 2].map(|()| vec![-1; experts.len()]));
        segments(cx, experts, &mut bounds, &mut slots, &mut entries);
        [bounds, slots, entries]
    }

    #[test]
    fn rows_of_an_expert_lie_together_in_the_order_of_tokens() {
        let routed = run(&mut fastest(), shape(TOKENS, COUNT, 3, Chosen), &values(1, TOKENS * COUNT)).0;
        let one: Vec<i32> = (0..TOKENS as i32).flat_map(|_| [7, 0, 40]).collect();
        for experts in [routed, one, vec![5, 6, 7]] {
            let [bounds, slots, entries] = sort(&mut fastest(), &experts, COUNT);
            let mut want: Vec<i32> = (0..experts.len() as i32).collect();
            want.sort_by_key(|&entry| experts[entry as usize]);
            assert_eq!(entries, want);
            for (row, &entry) in entries.iter().enumerate() {
                assert_eq!(slots[entry as usize], row as i32);
                let expert = experts[entry as usize] as usize;
                assert!((bounds[expert]..bounds[expert + 1]).contains(&(row as i32)));
            }
            assert_eq!((bounds[0], bounds[COUNT]), (0, experts.len() as i32));
        }
    }

    #[test]
    fn every_row_is_a_copy_of_its_token() {
        let (tokens, top_k, cols) = (19, 3, 133);
        let experts = run(&mut fastest(), shape(tokens, 7, top_k, Chosen), &values(1, tokens * 7)).0;
        let [_, slots, entries] = sort(&mut fastest(), &experts, 7);
        let (x, mut out) = (values::<bf16>(2, tokens * cols), vec![bf16::NAN; tokens * top_k * cols]);
        dispatch(&mut fastest(), &x, &slots, &mut out, cols);
        for (out, entry) in out.chunks(cols).zip(entries) {
            assert_eq!(out, &x[entry as usize / top_k * cols..][..cols]);
        }
    }

    #[test]
    fn a_token_is_the_weighted_sum_of_its_rows() {
        let (tokens, top_k, cols) = (19, 3, 133);
        let experts = run(&mut fastest(), shape(tokens, 7, top_k, Chosen), &values(1, tokens * 7)).0;
        let [_, slots, _] = sort(&mut fastest(), &experts, 7);
        let (x, weights, base) =
            (values::<f32>(2, tokens * top_k * cols), values::<f32>(3, tokens * top_k), values::<f32>(4, tokens * cols));
        for (weighted, based) in [(false, false), (true, false), (false, true), (true, true)] {
            let (weights, base) = (weighted.then_some(&weights[..]), based.then_some(&base[..]));
            let mut out = vec![f32::NAN; tokens * cols];
            combine(&mut fastest(), &x, &slots, weights, base, &mut out, cols);
            let want = |i: usize| {
                let (token, col) = (i / cols, i % cols);
                let term = |j: usize| {
                    let entry = token * top_k + j;
                    f64::from(x[slots[entry] as usize * cols + col]) * weights.map_or(1.0, |w| f64::from(w[entry]))
                };
                (0..top_k).map(term).sum::<f64>() + base.map_or(0.0, |base| f64::from(base[i]))
            };
            assert_close("out", &out, &(0..tokens * cols).map(want).collect::<Vec<_>>(), 1e-6);
        }
    }

    fn backward<T: Element>(cx: &mut Compute, shape: RouteShape, logits: &[f32]) -> Vec<T> {
        let (experts, weights) = run(cx, shape, logits);
        let [_, slots, _] = sort(cx, &experts, shape.experts);
        let mut dlogits = vec![T::from_f32(f32::NAN); logits.len()];
        let choices = Choices { logits, experts: &experts, weights: &weights, slots: &slots };
        router_backward(cx, shape, choices, &values(2, shape.rows()), &mut dlogits);
        dlogits
    }

    #[test]
    fn the_gradient_of_logits_is_the_slope() {
        for (experts, top_k) in [(1, 1), (7, 3), (7, 7), (COUNT, 4)] {
            for rule in [Chosen, All, scores(1, 1, true, 2.5), scores(1, 1, false, 0.5)] {
                let one = shape(1, experts, top_k, rule);
                let logits: Vec<f32> = values::<f32>(5, experts).iter().map(|x| 3.0 * x).collect();
                let (chosen, _) = run(&mut fastest(), one, &logits);
                let [_, slots, _] = sort(&mut fastest(), &chosen, experts);
                let by_row = values::<f32>(2, top_k);
                let by_choice: Vec<f64> = slots.iter().map(|&slot| f64::from(by_row[slot as usize])).collect();
                let want = slopes(&wide(&logits), |logits| dot(&reference(one, logits, &chosen), &by_choice));
                assert_close("dlogits", &backward::<f32>(&mut fastest(), one, &logits), &want, 1e-6);
            }
        }
    }

    #[test]
    fn threads_and_instruction_sets_change_no_bit_and_bf16_rounds_once() {
        let logits = values::<f32>(1, TOKENS * COUNT);
        for rule in [Chosen, All, scores(1, 1, true, 2.5)] {
            let shape = shape(TOKENS, COUNT, 5, rule);
            assert_same_everywhere(|cx| bits(&backward::<bf16>(cx, shape, &logits)));
            assert_rounded("dlogits", &backward::<bf16>(&mut fastest(), shape, &logits), &backward::<f32>(&mut fastest(), shape, &logits));
        }
        let (x, slots) = (values::<bf16>(1, 12 * 70), [3, 5, 0, 1, 11, 2, 4, 7, 6, 8, 10, 9]);
        let sum = |cx: &mut Compute| {
            let mut out = vec![bf16::ZERO; 4 * 70];
            combine(cx, &x, &slots, Some(&values(3, 12)), Some(&x[..280]), &mut out, 70);
            out
        };
        assert_same_everywhere(|cx| bits(&sum(cx)));
        let mut exact = vec![0.0f32; 280];
        combine(&mut fastest(), &widened(&x), &slots, Some(&values(3, 12)), Some(&widened(&x[..280])), &mut exact, 70);
        assert_rounded("out", &sum(&mut fastest()), &exact);
    }

    /// Differentiates the balancing loss of transformers, in f64, over two layers; the logits of the second layer are varied.
    #[test]
    fn the_balance_is_the_slope_of_its_loss() {
        for (tokens, experts, top_k) in [(1, 1, 1), (7, 5, 2), (sweep(17, TOKENS), COUNT, 5), (9, 64, 64)] {
            let (shape, coefficient) = (shape(tokens, experts, top_k, Chosen), 0.7);
            let layers = [1, 2].map(|seed| values::<f32>(seed, tokens * experts).iter().map(|x| 3.0 * x).collect::<Vec<f32>>());
            let chosen = layers.each_ref().map(|logits| run(&mut fastest(), shape, logits).0);
            let count = |expert: usize| chosen.iter().flatten().filter(|chosen| **chosen == expert as i32).count() as f64;
            let rows = 2.0 * tokens as f64;
            let loss = |logits: &[f64]| {
                let softmax = |token: &[f64]| {
                    let sum: f64 = token.iter().map(|l| l.exp()).sum();
                    token.iter().map(|l| l.exp() / sum).enumerate().map(|(expert, p)| count(expert) / rows * p / rows).sum::<f64>()
                };
                coefficient * experts as f64 * logits.chunks_exact(experts).map(softmax).sum::<f64>()
            };
            let before = values::<f32>(3, tokens * experts);
            let (mut have, factor) = (before.clone(), (coefficient * experts as f64 / (rows * rows)) as f32);
            router_balance(&mut fastest(), shape, (&layers[1], &chosen[1]), |expert| count(expert) as f32, factor, &mut have);
            let want: Vec<f64> = slopes(&wide(&layers[1]), loss).iter().zip(&before).map(|(slope, d)| slope + f64::from(*d)).collect();
            assert_close("balance", &have, &want, 2e-6);
            assert_same_everywhere(|cx| {
                let mut narrow: Vec<bf16> = values(3, tokens * experts);
                router_balance(cx, shape, (&layers[1], &chosen[1]), |expert| count(expert) as f32, factor, &mut narrow);
                bits(&narrow)
            });
        }
    }
}
