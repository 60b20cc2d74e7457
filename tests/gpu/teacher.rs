//! Distillation: rows of logits beside the tokens of a teacher.

use super::bounds::{Near, U, growth};
use super::formats::{FLOATS, wide};
use super::harness::{Bench, Case, Want};
use super::kernels::Suite;
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::{TeacherGrad, TeacherLosses, TeacherStats};
use superoffload::internals::dtype::Dtype;
use superoffload::internals::objective::{TeacherEntry, TeacherLoss, TeacherRow};

const FP32: Dtype = Dtype::Float32;

/// Rows, columns of the tile, its first token, the vocabulary, the teacher's tokens of a row.
#[derive(Clone, Copy)]
struct Tile {
    rows: usize,
    cols: usize,
    start: usize,
    vocab: usize,
    top_k: usize,
}

const TILES: [Tile; 6] = [
    Tile { rows: 1, cols: 1, start: 0, vocab: 1, top_k: 1 },
    Tile { rows: 9, cols: 7, start: 5, vocab: 20, top_k: 20 },
    Tile { rows: 33, cols: 257, start: 0, vocab: 257, top_k: 8 },
    Tile { rows: 17, cols: 1024, start: 1024, vocab: 4096, top_k: 64 },
    Tile { rows: 5, cols: 50257, start: 0, vocab: 50257, top_k: 64 },
    Tile { rows: 130, cols: 40, start: 80, vocab: 120, top_k: 33 },
];
const FULL: Tile = Tile { rows: 512, cols: 50257, start: 0, vocab: 50257, top_k: 64 };

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    for dtype in FLOATS {
        let full = suite.full(dtype);
        for tile in TILES.into_iter().chain(full.then_some(FULL)) {
            let Tile { rows, cols, start, vocab, top_k } = tile;
            let name = |kernel: &str| format!("{kernel} {dtype} {rows} rows of {top_k}, tokens {start}..{} of {vocab}", start + cols);
            for (kind, softcap) in [("", None), (" capped", Some(4.0))] {
                suite.case(&name(&format!("teacher_stats{kind}")), |bench, random| stats(bench, random, dtype, tile, softcap));
            }
            suite.case(&name("teacher_grad"), |bench, random| grads(bench, random, dtype, (tile, cols)));
            suite.case(&name("teacher_grad in wider rows"), |bench, random| grads(bench, random, dtype, (tile, 2 * cols)));
        }
    }
    for (rows, top_k) in [(1, 1), (40, 8), (700, 64), (513, 33)] {
        for (kd_ratio, softcap) in [(1.0, None), (0.25, None), (0.75, Some(9.0))] {
            let name = format!("teacher_losses {rows} rows of {top_k}, ratio {kd_ratio}, cap {softcap:?}");
            suite.case(&name, move |bench, random| losses(bench, random, (rows, top_k), (kd_ratio, softcap)));
        }
    }
}

/// The tokens of each row's teacher: up to `top_k` different ones, of which the first row has all.
fn teachers(random: &mut Random, rows: usize, vocab: usize, top_k: usize) -> Vec<Vec<usize>> {
    let mut teacher = |row: usize| {
        let count = if row == 0 { top_k } else { 1 + random.below(top_k) };
        // Different, because the step has no common divisor with the vocabulary.
        let (first, step) = (random.below(vocab), if vocab.is_multiple_of(7) { 1 } else { 7 });
        (0..count.min(vocab)).map(|at| (first + at * step) % vocab).collect()
    };
    (0..rows).map(&mut teacher).collect()
}

/// The words of teachers, with the probability of each of their tokens.
fn words(teachers: &[Vec<usize>], top_k: usize, probability: impl Fn(usize, usize) -> f32) -> Vec<i32> {
    let word = |(row, teacher): (usize, &Vec<usize>)| {
        let probability = &probability;
        let place = move |at: usize| teacher.get(at).map_or([0, 0], |id| [*id as i32 + 1, probability(row, at).to_bits() as i32]);
        (0..top_k).flat_map(place).collect::<Vec<_>>()
    };
    teachers.iter().enumerate().flat_map(word).collect()
}

/// Targets: some are tokens of the teacher, some have weights, some do not count.
fn targets(random: &mut Random, teachers: &[Vec<usize>], vocab: usize) -> Vec<i32> {
    let mut target = |(row, teacher): (usize, &Vec<usize>)| match row % 6 {
        5 => -1,
        4 => random.below(vocab) as i32 | (1 + 97 * row as i32 % 4095) << 19,
        1 | 2 => teacher[row % teacher.len()] as i32,
        _ => random.below(vocab) as i32,
    };
    teachers.iter().enumerate().map(&mut target).collect()
}

/// The bounds are those of the statistics of the cross-entropy: see `cross_entropy.rs`.
fn stats(bench: &mut Bench, random: &mut Random, dtype: Dtype, tile: Tile, softcap: Option<f32>) -> Outcome {
    let Tile { rows, cols, start, vocab, top_k } = tile;
    let (logits, teachers) = (random.scaled(dtype, rows * cols, 6.0), teachers(random, rows, vocab, top_k));
    let targets = targets(random, &teachers, vocab);
    let bend = |x: f64| softcap.map(f64::from).map_or(x, |cap| cap * (x / cap).tanh());
    let bent = |x: f64| if softcap.is_some() && x.is_finite() { 8.0 * U * x.abs() } else { 0.0 };
    let near = |x: f64| Near { want: x, error: bent(x) };
    let column = |id: usize| id.checked_sub(start).filter(|&col| col < cols);
    let mut worst = 0f64;
    for first in [true, false] {
        let before: Vec<f32> = (0..rows).flat_map(|row| [random.scaled(FP32, 1, 9.0)[0], 1.0 + row as f32, 0.25]).collect();
        let (mut want, mut want_entries, mut want_logits) = (Vec::new(), vec![Near::exact(0.5); rows * (top_k + 1)], logits.clone());
        for (row, logits) in wide(&logits).chunks_exact(cols).enumerate() {
            if targets[row] < 0 {
                want.extend([0.0, 1.0, 0.0].map(Near::exact));
                continue;
            }
            let mut outside: Vec<f64> = logits.iter().map(|x| bend(*x)).collect();
            for (place, col) in teachers[row].iter().enumerate().filter_map(|(place, id)| Some((place, column(*id)?))) {
                want_entries[row * (top_k + 1) + place] = near(bend(logits[col]));
                want_logits[row * cols + col] = f32::NEG_INFINITY;
                outside[col] = f64::NEG_INFINITY;
            }
            let [old_max, old_sum, old_target] =
                if first { [f64::NEG_INFINITY, 0.0, 0.0] } else { [0, 1, 2].map(|i| f64::from(before[3 * row + i])) };
            let max = outside.iter().copied().fold(old_max, f64::max);
            let target = column(targets[row] as usize & 0x7_ffff).map_or(Near::exact(old_target), |col| near(bend(logits[col])));
            let term = |x: f64, count: f64| {
                let e = if x == f64::NEG_INFINITY { 0.0 } else { count * (x - max).exp() };
                let error = if e == 0.0 { 0.0 } else { U * (growth(cols + 1) + 4.0 + 4.0 * (x - max).abs()) + bent(x) + bent(max) };
                (e, e * error)
            };
            let (sum, error) = outside.iter().map(|&x| term(x, 1.0)).fold(term(old_max, old_sum), |(a, b), (c, d)| (a + c, b + d));
            // The GPU takes exponentials below e^-86 for e^-86.
            want.extend([near(max), Near { want: sum, error: error + cols as f64 * 1e-37 }, target]);
        }
        let mut case = Case::default();
        let masked = Want::Near(wide(&want_logits).into_iter().map(Near::exact).collect());
        let logits = case.updated("logits", dtype, &logits, masked);
        let (targets, teacher) = (case.ints("targets", &targets), case.ints("teacher", &words(&teachers, top_k, |_, _| 0.0)));
        let stats = match first {
            true => case.output("stats", FP32, 3 * rows, Want::Near(want)),
            false => case.updated("stats", FP32, &before, Want::Near(want)),
        };
        let entries = case.updated("entries", FP32, &vec![0.5; rows * (top_k + 1)], Want::Near(want_entries));
        let outcome = case.check(bench, &|dev, at| {
            let (logits, targets, teacher, stats, entries) = (at[logits], at[targets], at[teacher], at[stats], at[entries]);
            dev.launch(TeacherStats { logits, targets, teacher, stats, entries, top_k, vocab_start: start, cols, softcap, first })
        });
        worst = worst.max(outcome?);
    }
    Ok(worst)
}

/// Gradients overwrite their columns, with one rounding. Rows of gradients begin `pitch` elements apart.
fn grads(bench: &mut Bench, random: &mut Random, dtype: Dtype, (tile, pitch): (Tile, usize)) -> Outcome {
    let Tile { rows, cols, start, vocab, top_k } = tile;
    let (logits, teachers) = (random.scaled(dtype, rows * pitch, 6.0), teachers(random, rows, vocab, top_k));
    let (targets, mut entries) = (targets(random, &teachers, vocab), random.scaled(dtype, rows * (top_k + 1), 2.0));
    let column = |id: usize| id.checked_sub(start).filter(|&col| col < cols);
    let mut want = logits.clone();
    for (row, teacher) in teachers.iter().enumerate().filter(|(row, _)| targets[*row] >= 0) {
        let (entries, target) = (&mut entries[row * (top_k + 1)..][..top_k + 1], targets[row] as usize & 0x7_ffff);
        if let Some(place) = teacher.iter().position(|id| *id == target) {
            entries[top_k] = entries[place];
        }
        let places = teacher.iter().zip(&*entries).chain([(&target, &entries[top_k])]);
        places.filter_map(|(id, entry)| Some((column(*id)?, entry))).for_each(|(col, entry)| want[row * pitch + col] = *entry);
    }
    let mut case = Case::default();
    let logits = case.updated("logits", dtype, &logits, Want::Near(wide(&want).into_iter().map(Near::exact).collect()));
    let (targets, teacher) = (case.ints("targets", &targets), case.ints("teacher", &words(&teachers, top_k, |_, _| 0.0)));
    let entries = case.input("entries", FP32, &entries);
    case.check(bench, &|dev, at| {
        let (logits, targets, teacher, entries) = (at[logits], at[targets], at[teacher], at[entries]);
        dev.launch(TeacherGrad { logits, pitch, targets, teacher, entries, top_k, vocab_start: start, cols })
    })
}

/// Sums in f64. Some teachers have a tail, some have none; some rows have no token outside, and some are nearly certain of the teacher's tokens.
fn losses(bench: &mut Bench, random: &mut Random, (rows, top_k): (usize, usize), (kd_ratio, softcap): (f64, Option<f32>)) -> Outcome {
    let (loss, vocab) = (TeacherLoss { kd_ratio, top_k }, 1000);
    let teachers = teachers(random, rows, vocab, top_k);
    let targets = targets(random, &teachers, vocab);
    let share = |row: usize| if row.is_multiple_of(3) { 1.0 } else { 0.75 };
    let probability = |row: usize, at: usize| {
        let count = teachers[row].len();
        share(row) * 2.0 * (count - at) as f32 / (count * (count + 1)) as f32
    };
    let (mut stats, mut entries, mut total) = (Vec::new(), vec![0.25; rows * (top_k + 1)], [0.0; 6]);
    let (mut want, mut scales) = (Vec::new(), Vec::new());
    let (weight, scale) = (3.5, 4.0f32);
    for (row, teacher) in teachers.iter().enumerate() {
        let lift = if row % 7 == 3 { 60.0 } else { 0.0 };
        let (max, sum, target) =
            (random.scaled(FP32, 1, 3.0)[0] - lift, 1.0 + random.positive(1)[0], random.scaled(FP32, 1, 3.0)[0] - lift);
        let id = targets[row] & 0x7_ffff;
        let places = &mut entries[row * (top_k + 1)..][..top_k];
        places.iter_mut().take(teacher.len()).for_each(|place| *place = random.scaled(FP32, 1, 3.0)[0]);
        let inside = teacher.iter().position(|token| *token as i32 == id);
        let is_whole = row % 11 == 8 && inside.is_some();
        want.extend(entries[row * (top_k + 1)..][..top_k + 1].iter().map(|entry| Near::exact((*entry).into())));
        let target = inside.map_or(target.min(max), |place| entries[row * (top_k + 1) + place]);
        let [outside_max, outside_sum] = if is_whole { [f32::NEG_INFINITY, 0.0] } else { [max, sum] };
        stats.extend(if targets[row] < 0 { [0.0, 1.0, 0.0] } else { [outside_max, outside_sum, target] });
        if targets[row] < 0 {
            scales.push(Near::exact(0.0));
            continue;
        }
        let entry = |(at, logit): (usize, &f32)| TeacherEntry {
            probability: probability(row, at).into(),
            logit: f64::from(*logit),
            is_target: inside == Some(at),
        };
        let found: Vec<_> = entries[row * (top_k + 1)..][..teacher.len()].iter().enumerate().map(entry).collect();
        let mut gradients = vec![0.0; found.len()];
        let row_logits = TeacherRow { entries: &found, outside: [outside_max, outside_sum].map(f64::from), target: target.into() };
        let terms = loss.terms(row_logits, &mut gradients);
        let own = f64::from(4096 - (targets[row] >> 19)) / 4096.0;
        let factor = own / weight * f64::from(scale);
        let slope = |logit: f64| softcap.map_or(1.0, |cap| 1.0 - (logit / f64::from(cap)).powi(2));
        let near = |x: f64| Near { want: x * factor, error: 1e-12 };
        scales.push(near(terms.outside));
        let at = row * (top_k + 1);
        found.iter().zip(&gradients).enumerate().for_each(|(place, (entry, x))| want[at + place] = near(x * slope(entry.logit)));
        want[at + top_k] = inside.map_or_else(|| near(terms.target * slope(target.into())), |place| want[at + place]);
        let numbers = [terms.loss, terms.kl, terms.cross_entropy, 0.0, 0.0, 1.0].map(|number| number * own);
        total.iter_mut().zip(numbers).for_each(|(total, number)| *total += number);
    }
    let mut case = Case::default();
    let (teacher, targets) = (case.ints("teacher", &words(&teachers, top_k, probability)), case.ints("targets", &targets));
    let stats = case.input("stats", FP32, &stats);
    let entries = case.updated("entries", FP32, &entries, Want::Near(want));
    let scales = case.output("scales", FP32, rows, Want::Near(scales));
    let totals = case.output("totals", Dtype::Int32, 12, Want::Any);
    let means = total.map(|total| Near { want: total / weight, error: 1e-9 });
    let report = case.output("report", FP32, 6, Want::Near(means.to_vec()));
    case.check(bench, &|dev, at| {
        let (teacher, targets, stats, entries, scales) = (at[teacher], at[targets], at[stats], at[entries], at[scales]);
        let (totals, report, accumulate) = (at[totals], at[report], false);
        dev.launch(TeacherLosses { teacher, targets, stats, entries, scales, totals, report, loss, softcap, weight, scale, accumulate })
    })
}
