//! Cross-entropy over a vocabulary in tiles.

use super::bounds::{Near, U, growth};
use super::formats::{FLOATS, wide};
use super::harness::{Bench, Case, Handle, Slices, Want};
use super::kernels::Suite;
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::Result;
use superoffload::internals::device::{
    Cast, CrossEntropyGrad, CrossEntropyLoss, CrossEntropyRowGrad, CrossEntropyStats, Kernels, PairLosses, PolicyLosses, Stream,
};
use superoffload::internals::dtype::Dtype;
use superoffload::internals::objective::{PolicyLoss, PolicyLossKind, PolicyToken};
use superoffload::internals::pair_loss::{AnswerSum, PairLoss, PairLossKind};

const FP32: Dtype = Dtype::Float32;

/// Rows, columns of the tile, its first token, the vocabulary.
#[derive(Clone, Copy)]
struct Tile {
    rows: usize,
    cols: usize,
    start: usize,
    vocab: usize,
}

const TILES: [Tile; 7] = [
    Tile { rows: 1, cols: 1, start: 0, vocab: 1 },
    Tile { rows: 3, cols: 7, start: 5, vocab: 20 },
    Tile { rows: 33, cols: 257, start: 0, vocab: 257 },
    Tile { rows: 17, cols: 1024, start: 1024, vocab: 4096 },
    Tile { rows: 5, cols: 50257, start: 0, vocab: 50257 },
    Tile { rows: 4, cols: 1105, start: 49152, vocab: 50257 },
    Tile { rows: 130, cols: 40, start: 80, vocab: 120 },
];
const FULL: Tile = Tile { rows: 512, cols: 50257, start: 0, vocab: 50257 };

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    for dtype in FLOATS {
        let full = suite.full(dtype);
        for tile in TILES.into_iter().chain(full.then_some(FULL)) {
            let Tile { rows, cols, start, vocab } = tile;
            let name = |kernel: &str| format!("{kernel} {dtype} {rows} rows, tokens {start}..{} of {vocab}", start + cols);
            for (kind, softcap) in [("", None), (" capped", Some(4.0))] {
                suite.case(&name(&format!("cross_entropy_stats{kind}")), |bench, random| stats(bench, random, dtype, tile, softcap));
            }
        }
    }
    for formats in [[Dtype::Bfloat16; 2], [Dtype::Float16; 2], [FP32; 2], [FP32, Dtype::Bfloat16], [FP32, Dtype::Float16]] {
        gradient_cases(suite, formats);
    }
    for rows in [1, 2, 31, 257, 4096] {
        suite.case(&format!("cross_entropy_loss {rows} rows"), move |bench, random| loss(bench, random, rows));
    }
    for kind in [
        PairLossKind::Dpo,
        PairLossKind::Hinge,
        PairLossKind::Ipo,
        PairLossKind::Robust,
        PairLossKind::ApoZero,
        PairLossKind::ApoDown,
        PairLossKind::SigmoidNorm,
        PairLossKind::Simpo,
        PairLossKind::Cpo,
        PairLossKind::Orpo,
    ] {
        for pairs in [1, 3, 40, 257] {
            suite.case(&format!("pair_losses {kind:?} {pairs} pairs"), move |bench, random| pair_losses(bench, random, kind, pairs));
        }
    }
    for kind in [PolicyLossKind::Dapo, PolicyLossKind::Grpo, PolicyLossKind::DrGrpo] {
        for (rows, beta) in [(1, 0.0), (600, 0.0), (600, 0.04), (4097, 0.04)] {
            let name = format!("policy_losses {kind:?} {rows} rows, beta {beta}");
            suite.case(&name, move |bench, random| policy_losses(bench, random, (kind, beta), rows));
        }
    }
}

/// Gradients of `logits` in the format `gradients`.
fn gradient_cases<W: Write>(suite: &mut Suite<'_, W>, [logits, gradients]: [Dtype; 2]) {
    let (formats, full) = ([logits, gradients], suite.full(gradients));
    let name_of_formats = if logits == gradients { logits.to_string() } else { format!("{logits} to {gradients}") };
    for tile in TILES.into_iter().chain(full.then_some(FULL)) {
        let Tile { rows, cols, start, vocab } = tile;
        let name = |kernel: &str| format!("{kernel} {name_of_formats} {rows} rows, tokens {start}..{} of {vocab}", start + cols);
        for (kind, softcap) in [("", None), (" capped", Some(4.0))] {
            suite.case(&name(&format!("cross_entropy_grad{kind}")), |bench, random| grad(bench, random, formats, tile, softcap));
            let row_grad = name(&format!("cross_entropy_row_grad{kind}"));
            suite.case(&row_grad, |bench, random| row_grads(bench, random, formats, tile, softcap));
        }
    }
}

/// Buffers of logits that become gradients.
#[derive(Clone, Copy)]
struct GradientBuffers {
    logits: Handle,
    /// The gradients without the bytes between their rows, if their format is narrower than that of the logits.
    narrow: Option<Handle>,
}

impl GradientBuffers {
    fn new(case: &mut Case, logits: &[f32], [dtype, gradients]: [Dtype; 2]) -> Self {
        if dtype == gradients {
            return Self { logits: case.updated("logits", dtype, logits, Want::Same), narrow: None };
        }
        let narrow = case.output("gradients", FP32, logits.len(), Want::Same);
        Self { logits: case.updated("logits", dtype, logits, Want::Any), narrow: Some(narrow) }
    }

    /// Copies gradients of a narrower format out of rows of `cols` logits.
    fn take(self, dev: &mut dyn Kernels, at: &Slices, gradients: Dtype, cols: usize) -> Result<()> {
        let Some(narrow) = self.narrow else { return Ok(()) };
        (0..at[narrow].elems() / cols).try_for_each(|row| {
            let src = at[self.logits].view(row * cols * FP32.bytes(), cols, gradients);
            dev.launch(Cast { stream: Stream::Compute, src, dst: at[narrow].slice(row * cols, cols) })
        })
    }
}

/// Targets, most of them in the tile, including its edges, some with weights and some ignored ones.
fn targets(random: &mut Random, tile: Tile) -> Vec<i32> {
    let Tile { rows, cols, start, vocab } = tile;
    let edges = [start, start + cols - 1, (start + cols).min(vocab - 1), start.saturating_sub(1)];
    let mut target = |row: usize| {
        edges.get(row).copied().unwrap_or_else(|| if row.is_multiple_of(4) { random.below(vocab) } else { start + random.below(cols) })
    };
    (0..rows)
        .map(|row| match row % 8 {
            2 => [-1, i32::MIN][row / 8 % 2],
            3 | 6 => lacking(target(row) as i32, 1 + 97 * row as i32 % 4095),
            _ => target(row) as i32,
        })
        .collect()
}

/// The target `id` with so many units less than the weight 1, which has 4096.
fn lacking(id: i32, units: i32) -> i32 {
    id | units << 19
}

/// The token of a target.
fn id(word: i32) -> i32 {
    word & ((1 << 19) - 1)
}

/// The weight of a target.
fn weight(word: i32) -> f64 {
    if word < 0 { 0.0 } else { f64::from(4096 - (word >> 19)) / 4096.0 }
}

/// The largest logit and the target's logit are exact. An exponential is within 2 ulp (the CPU 1.1, the GPU 2). The rounding of its
/// argument is at most `u` times the largest argument for each change of the maximum, of which there are at most two. This gives a relative
/// error of `4 u |x - max|`, including the rescaling of the old sum. The sum of positive terms adds `growth`.
fn stats(bench: &mut Bench, random: &mut Random, dtype: Dtype, tile: Tile, softcap: Option<f32>) -> Outcome {
    let Tile { rows, cols, start, .. } = tile;
    let (logits, targets) = (random.scaled(dtype, rows * cols, 6.0), targets(random, tile));
    let bend = |x: f64| softcap.map(f64::from).map_or(x, |cap| cap * (x / cap).tanh());
    let logits_wide: Vec<f64> = wide(&logits).into_iter().map(bend).collect();
    // A soft cap takes up to 8 roundings.
    let bent = |x: f64| if softcap.is_some() { 8.0 * U * x.abs() } else { 0.0 };
    let mut worst = 0f64;
    for first in [true, false] {
        // Some rows continue from a larger maximum, some from a smaller one.
        let before: Vec<f32> = (0..rows).flat_map(|row| [random.scaled(FP32, 1, 9.0)[0], 1.0 + row as f32, 0.25]).collect();
        let mut want = Vec::new();
        for (row, logits) in logits_wide.chunks_exact(cols).enumerate() {
            if targets[row] < 0 {
                want.extend([0.0, 1.0, 0.0].map(Near::exact));
                continue;
            }
            let [old_max, old_sum, old_target] =
                if first { [f64::NEG_INFINITY, 0.0, 0.0] } else { [0, 1, 2].map(|i| f64::from(before[3 * row + i])) };
            let max = logits.iter().copied().fold(old_max, f64::max);
            let term = |x: f64, count: f64| {
                let e = count * (x - max).exp();
                (e, e * (U * (growth(cols + 1) + 4.0 + 4.0 * (x - max).abs()) + bent(x) + bent(max)))
            };
            let old = if first { (0.0, 0.0) } else { term(old_max, old_sum) };
            let (sum, error) = logits.iter().map(|&x| term(x, 1.0)).fold(old, |(a, b), (c, d)| (a + c, b + d));
            let target = (id(targets[row]) as usize).checked_sub(start).filter(|&col| col < cols);
            let near = |x: f64| Near { want: x, error: bent(x) };
            let target = target.map_or(Near::exact(old_target), |col| near(logits[col]));
            want.extend([near(max), Near { want: sum, error }, target]);
        }
        let mut case = Case::default();
        let (logits, targets) = (case.input("logits", dtype, &logits), case.ints("targets", &targets));
        let stats = match first {
            true => case.output("stats", FP32, 3 * rows, Want::Near(want)),
            false => case.updated("stats", FP32, &before, Want::Near(want)),
        };
        let outcome = case.check(bench, &|dev, at| {
            let (logits, targets, stats) = (at[logits], at[targets], at[stats]);
            dev.launch(CrossEntropyStats { logits, targets, stats, vocab_start: start, cols, softcap, first })
        });
        worst = worst.max(outcome?);
    }
    Ok(worst)
}

/// Like [`grad`], with a scale for each row.
fn row_grads(bench: &mut Bench, random: &mut Random, formats: [Dtype; 2], tile: Tile, softcap: Option<f32>) -> Outcome {
    let (Tile { rows, cols, start, .. }, [dtype, gradients]) = (tile, formats);
    let (logits, targets) = (random.scaled(dtype, rows * cols, 6.0), targets(random, tile));
    let stats: Vec<f32> =
        (0..rows).flat_map(|row| [6.0 + row as f32 / 64.0, 1.0 + random.positive(1)[0] * cols as f32 / 6.0, 0.5]).collect();
    let scales: Vec<f32> = (0..rows).map(|row| if row % 5 == 4 { 0.0 } else { random.scaled(FP32, 1, 2.0)[0] }).collect();
    let mut case = Case::default();
    let buffers = GradientBuffers::new(&mut case, &logits, formats);
    let (targets, stats, scales) = (case.ints("targets", &targets), case.input("stats", FP32, &stats), case.input("scales", FP32, &scales));
    case.check(bench, &|dev, at| {
        let (logits, targets, stats, scales) = (at[buffers.logits], at[targets], at[stats], at[scales]);
        dev.launch(CrossEntropyRowGrad { logits, gradients, targets, stats, scales, vocab_start: start, cols, softcap })?;
        buffers.take(dev, at, gradients, cols)
    })
}

/// Sums in f64, whose errors are far below a rounding to fp32. The first place and each 7th one have no pair.
fn pair_losses(bench: &mut Bench, random: &mut Random, kind: PairLossKind, places: usize) -> Outcome {
    let loss = PairLoss { kind, beta: 0.1, label_smoothing: 0.2, margin: 0.5, alpha: 0.7 };
    let prompt_word = 5 | 4095 << 19;
    let (mut words, mut stats, mut targets, mut scales) = (vec![0; 8 * places], vec![0.0; 9], vec![-1; 3], vec![Near::exact(0.0); 3]);
    let (step_pairs, scale, mut total) = (3.0, 4.0f32, [0.0; 6]);
    for place in (0..places).filter(|place| places == 1 || place % 7 > 0) {
        let mut answer = || {
            let (first, reference) = (targets.len(), -30.0 * f64::from(random.positive(1)[0]));
            let (mut sum, mut tokens, mut prompt) = (0.0, 0.0, [0.0; 2]);
            for row in 0..1 + random.below(70) {
                let (is_of_prompt, is_ignored) = (row % 5 == 4, row % 3 == 1);
                targets.push(if is_ignored {
                    -1
                } else if is_of_prompt {
                    prompt_word
                } else {
                    5
                });
                let is_trained = !is_ignored;
                let (max, exponentials) = (random.scaled(FP32, 1, 2.0)[0], 1.0 + random.positive(1)[0]);
                let target = max - random.positive(1)[0];
                stats.extend(if is_trained { [max, exponentials, target] } else { [0.0, 1.0, 0.0] });
                let logp = f64::from(target) - f64::from(max) - f64::from(exponentials).ln();
                if is_trained && is_of_prompt {
                    prompt = [prompt[0] + logp, prompt[1] + 1.0];
                } else if is_trained {
                    (sum, tokens) = (sum + logp, tokens + 1.0);
                }
            }
            (first, AnswerSum { sum, tokens, reference, prompt })
        };
        let [(first, chosen), (middle, rejected)] = [answer(), answer()];
        let (end, terms) = (targets.len(), loss.terms(chosen, rejected));
        let halves =
            [chosen, rejected].map(|answer| answer.reference.to_bits()).map(|bits| [bits as u32 as i32, (bits >> 32) as u32 as i32]);
        words[8 * place..][..3].copy_from_slice(&[first, middle, end].map(|row| row as i32));
        words[8 * place + 4..][..4].copy_from_slice(halves.as_flattened());
        let near = |slope: f64| Near { want: -slope / step_pairs * f64::from(scale), error: 1e-12 };
        let slope = |row: usize| if targets[row] == prompt_word { terms.prompt_slope } else { terms.slopes[usize::from(row >= middle)] };
        scales.extend((first..end).map(|row| near(slope(row))));
        let [c, r] = terms.rewards;
        let numbers = [terms.loss, c, r, f64::from(u8::from(c > r)), chosen.sum, rejected.sum];
        total.iter_mut().zip(numbers).for_each(|(total, number)| *total += number);
    }
    let mut case = Case::default();
    let (pairs, targets) = (case.ints("pairs", &words), case.ints("targets", &targets));
    let (stats, before) = (case.input("stats", FP32, &stats), vec![0.0; scales.len()]);
    let scales = case.updated("scales", FP32, &before, Want::Near(scales));
    let sums = case.output("sums", Dtype::Int32, 4 * places, Want::Any);
    let totals = case.output("totals", Dtype::Int32, 12, Want::Any);
    let means = total.map(|total| Near { want: total / step_pairs, error: 1e-10 });
    let report = case.output("report", FP32, 6, Want::Near(means.to_vec()));
    case.check(bench, &|dev, at| {
        let (pairs, targets, stats, scales) = (at[pairs], at[targets], at[stats], at[scales]);
        let (sums, totals, report) = (at[sums], at[totals], at[report]);
        dev.launch(PairLosses { pairs, targets, stats, scales, sums, totals, report, loss, step_pairs, scale, accumulate: false })
    })
}

/// Sums in f64. Some rows have no target, some no old log-probability, some no reference, which the kernel writes where the loss has one, and
/// ratios lie on both sides of both bounds.
fn policy_losses(bench: &mut Bench, random: &mut Random, (kind, beta): (PolicyLossKind, f64), rows: usize) -> Outcome {
    let loss = PolicyLoss { kind, epsilon: 0.2, epsilon_high: 0.3, beta, max_completion_length: 20 };
    let (mut words, mut stats, mut targets, mut scales) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (count, scale, mut total, mut after) = (7.0, 4.0f32, [0.0; 6], Vec::new());
    for row in 0..rows {
        let [max, target, advantage] = [(); 3].map(|()| random.scaled(FP32, 1, 2.0)[0]);
        let exponentials = 1.0 + random.positive(1)[0];
        let logp = loss.rounded(f64::from(target) - f64::from(max) - f64::from(exponentials).ln());
        let mut near = || logp as f32 + random.scaled(FP32, 1, 0.5)[0];
        let old = if row % 11 == 7 { f32::NAN } else { near() };
        let reference = if row % 7 == 2 { f32::NAN } else { near() };
        let (tokens, is_trained) = (1 + row as i32 % 30, row % 5 != 3);
        let at = words.len();
        words.extend([advantage, old, reference].map(|x| x.to_bits() as i32).into_iter().chain([tokens]));
        after.extend_from_slice(&words[at..]);
        targets.push(if is_trained { 5 } else { -1 });
        stats.extend(if is_trained { [max, exponentials, target] } else { [0.0, 1.0, 0.0] });
        let [advantage, old, reference] = [advantage, old, reference].map(f64::from);
        let numbers = loss.with_reference(PolicyToken { advantage, old, reference, tokens: tokens.into() }, logp);
        let terms = loss.terms(logp, numbers);
        after[at + 2] = if is_trained && loss.has_reference() { (numbers.reference as f32).to_bits() as i32 } else { after[at + 2] };
        let [low, high] = terms.is_clipped.map(|is_clipped| f64::from(u8::from(is_clipped)));
        scales.push(if is_trained { Near { want: -terms.slope / count * f64::from(scale), error: 1e-11 } } else { Near::exact(0.0) });
        let numbers = [terms.loss, terms.ratio, low, high, terms.kl, 1.0];
        total.iter_mut().zip(numbers).for_each(|(total, number)| *total += if is_trained { number } else { 0.0 });
    }
    let mut case = Case::default();
    let (tokens, targets) = (case.updated_ints("tokens", &words, &after), case.ints("targets", &targets));
    let (stats, before) = (case.input("stats", FP32, &stats), vec![0.0; scales.len()]);
    let scales = case.updated("scales", FP32, &before, Want::Near(scales));
    let totals = case.output("totals", Dtype::Int32, 12, Want::Any);
    let means = total.map(|total| Near { want: total / count, error: 1e-9 });
    let report = case.output("report", FP32, 6, Want::Near(means.to_vec()));
    case.check(bench, &|dev, at| {
        let (tokens, targets, stats, scales) = (at[tokens], at[targets], at[stats], at[scales]);
        let (totals, report) = (at[totals], at[report]);
        dev.launch(PolicyLosses { tokens, targets, stats, scales, totals, report, loss, count, scale, accumulate: false })
    })
}

/// Elementwise from given statistics: the CPU's bits. Ignored rows may have any logits.
fn grad(bench: &mut Bench, random: &mut Random, formats: [Dtype; 2], tile: Tile, softcap: Option<f32>) -> Outcome {
    let (Tile { rows, cols, start, .. }, [dtype, gradients]) = (tile, formats);
    let (mut logits, targets) = (random.scaled(dtype, rows * cols, 6.0), targets(random, tile));
    let masked = logits.chunks_exact_mut(cols).zip(&targets).filter(|(_, target)| **target < 0);
    masked.for_each(|(row, _)| row.iter_mut().zip([f32::NAN, 1e4, f32::INFINITY]).for_each(|(x, wild)| *x = wild));
    let stats: Vec<f32> =
        (0..rows).flat_map(|row| [6.0 + row as f32 / 64.0, 1.0 + random.positive(1)[0] * cols as f32 / 6.0, 0.5]).collect();
    for scale in [1.0 / 4096.0, 16.0] {
        let mut case = Case::default();
        let buffers = GradientBuffers::new(&mut case, &logits, formats);
        let (targets, stats) = (case.ints("targets", &targets), case.input("stats", FP32, &stats));
        case.check(bench, &|dev, at| {
            let (logits, targets, stats) = (at[buffers.logits], at[targets], at[stats]);
            dev.launch(CrossEntropyGrad { logits, gradients, targets, stats, vocab_start: start, cols, softcap, scale })?;
            buffers.take(dev, at, gradients, cols)
        })?;
    }
    Ok(0.0)
}

/// Summed in f64, whose errors are negligible relative to the one rounding to fp32: four roundings of `2^-53` per row, and two for the
/// result.
fn loss(bench: &mut Bench, random: &mut Random, rows: usize) -> Outcome {
    let stats: Vec<f32> =
        (0..rows).flat_map(|_| [random.scaled(FP32, 1, 9.0)[0], 1e3 * random.positive(1)[0], random.uniform(FP32, 1)[0]]).collect();
    let scale = 1.0 / rows as f32;
    let targets: Vec<i32> = (0..rows as i32).map(|row| if row % 3 == 1 { lacking(5, 1 + 31 * row % 4095) } else { 5 }).collect();
    let term = |([max, sum, target], word): (&[f64; 3], &i32)| weight(*word) * (max + sum.ln() - target);
    let terms = wide(&stats).as_chunks::<3>().0.iter().zip(&targets).map(term).collect::<Vec<_>>();
    for before in [None, Some([2.5f32])] {
        let old = before.map_or(0.0, |before| f64::from(before[0]));
        let want = old + f64::from(scale) * terms.iter().sum::<f64>();
        let size = old.abs() + f64::from(scale) * terms.iter().map(|t| t.abs()).sum::<f64>();
        let near = Near { want, error: size * (4.0 * rows as f64 + 2.0) / (1u64 << 53) as f64 };
        let mut case = Case::default();
        let (targets, stats) = (case.ints("targets", &targets), case.input("stats", FP32, &stats));
        let loss = match before {
            None => case.output("loss", FP32, 1, Want::Near(vec![near])),
            Some(before) => case.updated("loss", FP32, &before, Want::Near(vec![near])),
        };
        case.check(bench, &|dev, at| {
            let (targets, stats, loss) = (at[targets], at[stats], at[loss]);
            dev.launch(CrossEntropyLoss { targets, stats, loss, scale, accumulate: before.is_some() })
        })?;
    }
    Ok(0.0)
}
