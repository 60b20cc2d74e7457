//! Batches through the engine on the CPU device. Documents that share a row give the results of separate rows, ignored targets have no
//! effect, a step is the mean over the counted targets in any division into micro-batches, and speculation changes no bit.

use crate::support::{Noise, digest, random_params, read_params, settings, start, tiny_llama};
use std::path::Path;
use superoffload::internals::data::{Batch, Batches};
use superoffload::internals::device::CpuDevice;
use superoffload::internals::engine::{Engine, StepReport};
use superoffload::internals::model::ModelShape;
use superoffload::internals::planner::Machine;
use superoffload::{Plan, Result};

const VOCAB: usize = 64;
const NO_TARGET: i32 = -1;

/// A document: its tokens and its targets, of which some are ignored.
#[derive(Clone)]
struct Document {
    tokens: Vec<i32>,
    targets: Vec<i32>,
}

impl Document {
    /// Random tokens. Every `masked`-th target is ignored; 0 ignores none.
    fn new(seed: u64, tokens: usize, masked: usize) -> Self {
        let mut noise = Noise::new(seed, VOCAB);
        let targets = (0..tokens).map(|i| if masked > 0 && i % masked == 0 { NO_TARGET } else { noise.next() }).collect();
        Self { tokens: (0..tokens).map(|_| noise.next()).collect(), targets }
    }
}

/// Rows of documents, repeated in order.
struct Rows {
    rows: Vec<Vec<Document>>,
    next: usize,
    /// Whether positions restart at each document.
    restart_positions: bool,
}

impl Rows {
    fn new(rows: Vec<Vec<Document>>) -> Self {
        Self { rows, next: 0, restart_positions: true }
    }
}

impl Batches for Rows {
    /// The unused end of a row is filled with padding tokens in a separate document, with ignored targets.
    fn fill(&mut self, batch: &mut Batch<'_>) -> Result<()> {
        for start in (0..batch.tokens.len()).step_by(batch.seq_length) {
            let mut column = 0;
            let row = &self.rows[self.next % self.rows.len()];
            let rest = batch.seq_length - row.iter().map(|document| document.tokens.len()).sum::<usize>();
            let padding = Document { tokens: vec![7; rest], targets: vec![NO_TARGET; rest] };
            for Document { tokens, targets } in row.iter().chain([&padding]) {
                let range = start + column..start + column + tokens.len();
                batch.tokens[range.clone()].copy_from_slice(tokens);
                batch.targets[range.clone()].copy_from_slice(targets);
                if self.restart_positions {
                    (0..).zip(&mut batch.positions[range.clone()]).for_each(|(place, position)| *position = place);
                }
                batch.documents.iter_mut().for_each(|documents| documents[range.clone()].fill(column as i32));
                column += tokens.len();
            }
            self.next += 1;
        }
        Ok(())
    }
}

const COMMON: &str = "learning-rate = 1e-2\nweight-decay = 0.1\nadam-epsilon = 1e-3\nmax-steps = 99\nseed = 5\nmax-grad-norm = 1.7\n\
                      bucket-mib = 0.0156\n";

fn plan(shape: &ModelShape, (rows, seq_length, accum): (usize, usize, usize), separates_documents: bool, lines: &str) -> Plan {
    let sizes = format!("per-device-train-batch-size = {rows}\nseq-length = {seq_length}\ngradient-accumulation-steps = {accum}");
    let packing = if separates_documents { "bfd" } else { "wrapped" };
    let settings = settings(&format!("{COMMON}{sizes}\npacking = '{packing}'\n{lines}"));
    Plan::new(&settings.request(shape), &Machine::cpu(2), false).unwrap()
}

fn engine(shape: &ModelShape, sizes: (usize, usize, usize), separates_documents: bool, lines: &str) -> Engine<CpuDevice> {
    start(&plan(shape, sizes, separates_documents, lines), shape, random_params(5))
}

fn steps(engine: &mut Engine<CpuDevice>, rows: &mut Rows, count: usize) -> Vec<StepReport> {
    (0..count).map(|_| engine.step(1e-2, rows).unwrap()).collect()
}

/// Losses, norms and the digest of the state after four steps.
fn bits(engine: &mut Engine<CpuDevice>, mut rows: Rows) -> (Vec<(u32, u64)>, String) {
    let reports = steps(engine, &mut rows, 4);
    (reports.iter().map(|report| (report.loss.to_bits(), report.grad_norm.0.to_bits())).collect(), digest(engine))
}

fn golden_shape(family: &str) -> ModelShape {
    ModelShape::read(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(family).join("config.json")).unwrap()
}

/// Models with rotary positions, learned positions, and a sliding window.
fn shapes() -> [ModelShape; 3] {
    [tiny_llama(2, 32, VOCAB, true), golden_shape("gpt2"), golden_shape("mistral")]
}

/// The order of the tokens is fixed, so every sum has the same terms in the same order.
#[test]
fn documents_that_share_a_row_equal_documents_in_separate_rows_to_the_bit() {
    let documents: Vec<Document> = (0..16).map(|seed| Document::new(seed, 4, seed as usize % 4)).collect();
    let rows = |in_a_row: usize| Rows::new(documents.chunks(in_a_row).map(<[Document]>::to_vec).collect());
    for shape in shapes() {
        for dtype in ["float32", "bfloat16"] {
            let lines = format!("dtype = '{dtype}'\nstrategy = 'superoffload'\ndevice = 'cpu'\nadversary = 3");
            let alone = bits(&mut engine(&shape, (4, 4, 1), false, &lines), rows(1));
            assert!(bits(&mut engine(&shape, (2, 8, 1), true, &lines), rows(2)) == alone, "{:?} {dtype}", shape.family);
            assert!(bits(&mut engine(&shape, (1, 16, 1), true, &lines), rows(4)) == alone, "{:?} {dtype}, four", shape.family);
            // Document bounds and restarted positions are both necessary.
            assert!(bits(&mut engine(&shape, (2, 8, 1), false, &lines), rows(2)) != alone, "{:?} {dtype}, together", shape.family);
            let on = Rows { restart_positions: false, ..rows(2) };
            assert!(bits(&mut engine(&shape, (2, 8, 1), true, &lines), on) != alone, "{:?} {dtype}, positions go on", shape.family);
        }
    }
}

/// Compares two steps that differ only in the order of sums.
fn assert_near(have: (&StepReport, &[f32]), want: (&StepReport, &[f32]), case: &str) {
    let near = |a: f64, b: f64| (a / b - 1.0).abs() < 4e-6;
    assert!(near(f64::from(have.0.loss), f64::from(want.0.loss)), "{case}: loss {} and {}", have.0.loss, want.0.loss);
    assert!(near(have.0.grad_norm.0, want.0.grad_norm.0), "{case}: norm {:?} and {:?}", have.0.grad_norm, want.0.grad_norm);
    // An update is at most the learning rate, with an error proportional to that of the gradient over epsilon.
    let furthest = have.1.iter().zip(want.1).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(furthest < 1e-6, "{case}: parameters differ by {furthest}");
}

fn one_step(
    shape: &ModelShape,
    sizes: (usize, usize, usize),
    separates_documents: bool,
    rows: Vec<Vec<Document>>,
) -> (StepReport, Vec<f32>) {
    let mut engine = engine(shape, sizes, separates_documents, "dtype = 'float32'");
    let report = steps(&mut engine, &mut Rows::new(rows), 1)[0];
    (report, read_params(&mut engine))
}

#[test]
fn documents_of_any_length_share_a_row_without_a_trace_of_padding() {
    let [short, long, tail] = [(1, 5), (2, 9), (3, 1)].map(|(seed, tokens)| Document::new(seed, tokens, 3));
    let whole = Document::new(4, 16, 0);
    for shape in shapes() {
        let alone: Vec<_> = [&short, &long, &tail, &whole].map(|document| vec![document.clone()]).to_vec();
        let packed = vec![vec![short.clone(), long.clone(), tail.clone()], vec![whole.clone()]];
        let (want, have) = (one_step(&shape, (4, 16, 1), false, alone), one_step(&shape, (2, 16, 1), true, packed));
        assert_near((&have.0, &have.1), (&want.0, &want.1), &format!("{:?}", shape.family));
    }
}

/// Computes the loss from logits, in f64.
#[test]
fn the_loss_is_the_mean_over_the_targets_that_count() {
    let rows = || Rows::new(vec![vec![Document::new(1, 16, 2)], vec![Document::new(2, 16, 3)], vec![Document::new(3, 16, 0)]]);
    for shape in shapes() {
        let mut engine = engine(&shape, (3, 16, 1), false, "dtype = 'float32'");
        let logits = engine.logits(&mut rows()).unwrap();
        let targets: Vec<i32> = rows().rows.iter().flatten().flat_map(|document| document.targets.clone()).collect();
        let losses = logits.chunks_exact(shape.vocab).zip(&targets).filter(|(_, target)| **target >= 0).map(|(row, target)| {
            let sum: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            sum.ln() - f64::from(row[*target as usize])
        });
        let losses: Vec<f64> = losses.collect();
        assert_eq!(losses.len(), 8 + 10 + 16);
        let (want, have) = (losses.iter().sum::<f64>() / 34.0, f64::from(steps(&mut engine, &mut rows(), 1)[0].loss));
        assert!((have / want - 1.0).abs() < 1e-6, "{:?}: {have}, from logits {want}", shape.family);
    }
}

/// A target whose weight lacks so many units of 1/4096.
fn lacking(target: i32, units: i32) -> i32 {
    target | units << 19
}

/// Computes the loss from logits, in f64.
#[test]
fn the_loss_is_the_weighted_mean_over_the_targets_of_all_micro_batches() {
    let mut documents = [1, 2, 3].map(|seed| Document::new(seed, 16, seed as usize));
    for (row, document) in (0..).zip(&mut documents) {
        let counted = document.targets.iter_mut().filter(|target| **target >= 0);
        (0..).zip(counted).for_each(|(at, target)| *target = lacking(*target, (row * 1500 + at * 37) % 4096));
    }
    let rows = || Rows::new(documents.iter().map(|document| vec![document.clone()]).collect());
    for shape in shapes() {
        let mut whole = engine(&shape, (3, 16, 1), false, "dtype = 'float32'");
        let logits = whole.logits(&mut rows()).unwrap();
        let (mut sum, mut weights) = (0.0, 0.0);
        for (row, word) in logits.chunks_exact(shape.vocab).zip(documents.iter().flat_map(|document| &document.targets)) {
            let weight = if *word < 0 { 0.0 } else { f64::from(4096 - (word >> 19)) / 4096.0 };
            let exponentials: f64 = row.iter().map(|x| f64::from(*x).exp()).sum();
            sum += weight * (exponentials.ln() - f64::from(row[(word & ((1 << 19) - 1)) as usize % shape.vocab]));
            weights += weight;
        }
        let mut cut = engine(&shape, (1, 16, 3), false, "dtype = 'float32'");
        for engine in [&mut whole, &mut cut] {
            let evaluated = engine.evaluate(&mut rows()).unwrap();
            let loss = f64::from(steps(engine, &mut rows(), 1)[0].loss);
            assert!((loss / (sum / weights) - 1.0).abs() < 1e-6, "{:?}: {loss}, from logits {}", shape.family, sum / weights);
            assert_eq!((evaluated.loss as f32, evaluated.targets), (loss as f32, 8 + 10));
        }
    }
}

#[test]
fn equal_weights_that_are_powers_of_two_train_to_the_bits_of_no_weights() {
    let shape = tiny_llama(2, 32, VOCAB, true);
    let rows = |units: i32| {
        let mut documents = [1, 2, 3].map(|seed| Document::new(seed, 16, seed as usize));
        let targets = documents.iter_mut().flat_map(|document| &mut document.targets);
        targets.filter(|target| **target >= 0).for_each(|target| *target = lacking(*target, units));
        Rows::new(documents.map(|document| vec![document]).to_vec())
    };
    for dtype in ["float32", "bfloat16"] {
        let run = |units| bits(&mut engine(&shape, (1, 16, 3), false, &format!("dtype = '{dtype}'")), rows(units));
        assert!(run(2048) == run(0) && run(4096 - 16) == run(0), "{dtype}");
    }
}

/// No counted target depends on the last tokens of the row. They may have any value, and so may the marker of ignored targets.
#[test]
fn padding_leaves_no_trace() {
    for shape in shapes() {
        for dtype in ["float32", "bfloat16", "float16"] {
            let run = |tail: i32, none: i32| {
                let mut document = Document::new(1, 16, 3);
                document.tokens[12..].fill(tail);
                document.targets[12..].fill(none);
                bits(&mut engine(&shape, (1, 16, 1), false, &format!("dtype = '{dtype}'")), Rows::new(vec![vec![document]]))
            };
            let want = run(3, NO_TARGET);
            assert!(run(4, -100) == want && run(3, i32::MIN) == want, "{:?} {dtype}", shape.family);
            assert!(run(3, 5) != want, "{:?} {dtype}: a target that counts", shape.family);
        }
    }
}

#[test]
fn micro_batches_weigh_as_much_as_they_have_targets_that_count() {
    let rows: Vec<_> = [(1, 0), (2, 1), (3, 16)].map(|(seed, masked)| vec![Document::new(seed, 16, masked)]).to_vec();
    let mut few = rows.clone();
    few[1][0].targets[9] = 4;
    for shape in shapes() {
        for (case, rows) in [("one micro-batch without a target", &rows), ("one with a single target", &few)] {
            let (want, have) = (one_step(&shape, (3, 16, 1), false, rows.clone()), one_step(&shape, (1, 16, 3), false, rows.clone()));
            assert_near((&have.0, &have.1), (&want.0, &want.1), &format!("{:?}, {case}", shape.family));
        }
    }
}

#[test]
fn speculation_is_exact_with_masks_and_documents() {
    let documents: Vec<Document> = (0..24).map(|seed| Document::new(seed, [3, 8, 5][seed as usize % 3], seed as usize % 5)).collect();
    let rows = || Rows::new(documents.chunks(3).map(<[Document]>::to_vec).collect());
    let shape = tiny_llama(3, 32, VOCAB, true);
    let (mut speculated, mut clipped) = (0, 0);
    for seed in 0..12 {
        let fault = if seed % 3 == 0 { "inject = [{step = 3, element = 5000, value = 'nan'}]\n" } else { "" };
        let lines = format!("dtype = '{}'\n{fault}", ["bfloat16", "float16", "float32"][seed % 3]);
        let sizes = (2, 16, 1 + seed % 2);
        let want = bits(&mut engine(&shape, sizes, true, &format!("strategy = 'no-offload'\nthreads = 1\n{lines}")), rows());
        for strategy in ["superoffload", "zero-offload"] {
            let way = format!("strategy = '{strategy}'\nslots = {}\ndevice = 'cpu'\nadversary = {seed}\n{lines}", 1 + seed % 3);
            let mut engine = engine(&shape, sizes, true, &way);
            let mut data = rows();
            let reports = steps(&mut engine, &mut data, 4);
            let have: Vec<_> = reports.iter().map(|report| (report.loss.to_bits(), report.grad_norm.0.to_bits())).collect();
            assert!((have, digest(&mut engine)) == want, "seed {seed}, {strategy}");
            speculated += reports.iter().map(|report| report.counts.speculated).sum::<u64>();
            clipped += reports.iter().map(|report| report.counts.clipped).sum::<u64>();
        }
    }
    assert!((speculated > 0) == cfg!(feature = "stv") && clipped > 0, "{speculated} speculated, {clipped} clipped");
}

/// The error is raised before anything runs, so the engine continues with other data as if nothing had happened.
#[test]
fn a_step_that_nothing_can_be_learned_from_is_an_error_that_names_it() {
    let shape = tiny_llama(2, 32, VOCAB, true);
    let good = || Rows::new(vec![vec![Document::new(1, 8, 2)]]);
    let masked = Document::new(1, 8, 1);
    let wrong = |change: fn(&mut Document)| {
        let mut document = Document::new(1, 8, 0);
        change(&mut document);
        document
    };
    let cases = [
        (masked, "none of its 16 targets is trained"),
        (wrong(|document| document.tokens[3] = 64), "micro-batch 0: token 64 in row 0, column 3 must be below 64"),
        (wrong(|document| document.targets[7] = 64), "micro-batch 0: target 64 in row 0, column 7 must be below 64"),
    ];
    let want = bits(&mut engine(&shape, (1, 8, 2), false, ""), good());
    for (document, words) in cases {
        let mut engine = engine(&shape, (1, 8, 2), false, "");
        let mut first = steps(&mut engine, &mut good(), 1);
        let refused = engine.step(1e-2, &mut Rows::new(vec![vec![document]])).unwrap_err().to_string();
        assert!(refused.starts_with("use the data of step 2: ") && refused.contains(words), "{refused}");
        first.extend(steps(&mut engine, &mut good(), 3));
        let have: Vec<_> = first.iter().map(|report| (report.loss.to_bits(), report.grad_norm.0.to_bits())).collect();
        assert!((have, digest(&mut engine)) == want, "{words}");
    }
}

/// Every micro-batch of a step has three or four arrays. `plan_memory` compares the plan with the allocations.
#[test]
fn the_plan_counts_the_memory_of_batches() {
    let shape = tiny_llama(2, 32, VOCAB, true);
    let bytes = |sizes, separates_documents| {
        let plan = plan(&shape, sizes, separates_documents, "");
        plan.forecast.memory.iter().find(|class| class.name == "batches, norm").map(|class| class.bytes).unwrap()
    };
    assert_eq!(bytes((2, 8, 5), false) - bytes((2, 8, 1), false), 4 * 3 * 16 * 4);
    assert_eq!(bytes((2, 8, 5), true) - bytes((2, 8, 5), false), 5 * 16 * 4);
    let of_loss = |lines: &str| {
        let plan =
            plan(&shape, (2, 8, 5), true, &format!("loss = \"dapo\"\ndata = [\"records.jsonl\"]\ndata-format = \"rollouts\"\n{lines}"));
        plan.forecast.memory.iter().find(|class| class.name == "batches, norm").map(|class| class.bytes).unwrap()
    };
    assert_eq!(of_loss("beta = 0.1") - of_loss(""), 5 * 16 * 4 * 4, "a list that goes back to the host");
}
