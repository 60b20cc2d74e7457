//! Embeddings, and sums over rows.

use super::bounds::{Near, Sum, growth};
use super::formats::FLOATS;
use super::harness::{Bench, Case, Want};
use super::kernels::Suite;
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::{BiasBackward, Embed, EmbedBackward, ScatterRows, Stream};
use superoffload::internals::dtype::Dtype;

/// Sequences, their length, channels, vocabulary.
#[derive(Clone, Copy)]
struct Shape {
    batch: usize,
    seq_length: usize,
    channels: usize,
    vocab: usize,
}

const SHAPES: [Shape; 7] = [
    Shape { batch: 1, seq_length: 1, channels: 1, vocab: 1 },
    Shape { batch: 2, seq_length: 5, channels: 7, vocab: 6 },
    Shape { batch: 3, seq_length: 33, channels: 65, vocab: 129 },
    Shape { batch: 2, seq_length: 100, channels: 768, vocab: 300 },
    Shape { batch: 1, seq_length: 40, channels: 2560, vocab: 64 },
    Shape { batch: 2, seq_length: 9, channels: 16, vocab: 5 },
    Shape { batch: 40, seq_length: 50, channels: 24, vocab: 51 },
];
const FULL: Shape = Shape { batch: 2, seq_length: 1024, channels: 768, vocab: 50257 };

/// Rows and columns of a gradient with column sums.
const MATRICES: [(usize, usize); 8] = [(1, 1), (63, 5), (64, 40), (65, 1), (300, 33), (77, 2560), (20, 9728), (3001, 17)];

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    for dtype in FLOATS {
        let full = suite.full(dtype);
        for shape in SHAPES.into_iter().chain(full.then_some(FULL)) {
            let Shape { batch, seq_length, channels, vocab } = shape;
            let name = |kernel: &str| format!("{kernel} {dtype} {batch}x{seq_length} tokens of {vocab}, {channels} channels");
            suite.case(&name("embed"), |bench, random| forward(bench, random, dtype, shape));
            suite.case(&name("embed_backward"), |bench, random| backward(bench, random, dtype, shape));
            suite.case(&name("scatter_rows"), |bench, random| scatter(bench, random, dtype, shape));
        }
        for (rows, cols) in MATRICES.into_iter().chain(full.then_some((4096, 2560))) {
            suite.case(&format!("bias_backward {dtype} {rows}x{cols}"), |bench, random| column_sums(bench, random, dtype, rows, cols));
        }
    }
}

/// Rounded once: the sum of two numbers has the same bits on all devices.
fn forward(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: Shape) -> Outcome {
    let Shape { batch, seq_length, channels, vocab } = shape;
    let (tokens, positions) = (random.tokens(batch * seq_length, vocab), positions(random, shape));
    let (wte, wpe) = (random.uniform(dtype, vocab * channels), random.uniform(dtype, (seq_length + 1) * channels));
    for learned in [false, true] {
        let mut case = Case::default();
        let (tokens_in, positions) = (case.ints("tokens", &tokens), case.ints("positions", &positions));
        let (wte, wpe) = (case.input("wte", dtype, &wte), case.input("wpe", dtype, &wpe));
        let out = case.output("out", dtype, tokens.len() * channels, Want::Same);
        case.check(bench, &|dev, at| {
            let (tokens, positions, wpe) = (at[tokens_in], at[positions], learned.then(|| at[wpe]));
            dev.launch(Embed { tokens, positions, wte: at[wte], wpe, out: at[out], channels })
        })?;
    }
    Ok(0.0)
}

fn backward(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: Shape) -> Outcome {
    let Shape { batch, seq_length, channels, vocab } = shape;
    let (tokens, positions) = (random.tokens(batch * seq_length, vocab), positions(random, shape));
    let dout = random.uniform(dtype, tokens.len() * channels);
    let (wte, wpe) = (random.uniform(dtype, vocab * channels), random.uniform(dtype, (seq_length + 1) * channels));
    let by_token = row_sums(&dout, channels, vocab, |row| tokens[row] as usize);
    let by_position = row_sums(&dout, channels, seq_length + 1, |row| positions[row] as usize);
    let mut worst = 0f64;
    // All tokens, or those from the second fifth to the last but one.
    let some = (vocab / 5, (vocab * 4 / 5).max(vocab / 5 + 1));
    for (learned, add_wte, add_wpe, (first, end)) in [
        (false, false, false, (0, vocab)),
        (false, true, false, (0, vocab)),
        (true, false, false, (0, vocab)),
        (true, true, true, (0, vocab)),
        (true, true, false, (0, vocab)),
        (false, false, false, some),
        (true, true, false, some),
    ] {
        let (wte, by_token) = (wte[first * channels..end * channels].to_vec(), by_token[first * channels..end * channels].to_vec());
        let mut case = Case::default();
        let (tokens, positions) = (case.ints("tokens", &tokens), case.ints("positions", &positions));
        let dout = case.input("dout", dtype, &dout);
        let dwte = case.gradient("dwte", dtype, add_wte.then_some(&wte), by_token);
        let dwpe = learned.then(|| case.gradient("dwpe", dtype, add_wpe.then_some(&wpe), by_position.clone()));
        let outcome = case.check(bench, &|dev, at| {
            dev.launch(EmbedBackward {
                tokens: at[tokens],
                positions: at[positions],
                dout: at[dout],
                dwte: at[dwte],
                first_token: first,
                accumulate_wte: add_wte,
                dwpe: dwpe.map(|d| at[d]),
                accumulate_wpe: add_wpe,
                channels,
            })
        });
        worst = worst.max(outcome?);
    }
    Ok(worst)
}

/// Every element keeps its bits: whole rows in a whole table, and truncated rows in a table without its first elements.
fn scatter(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: Shape) -> Outcome {
    let Shape { batch, seq_length, channels, vocab } = shape;
    let mut rows = random.tokens(batch * seq_length, vocab);
    rows.sort_unstable();
    rows.dedup();
    // Elements missing at the start of the first row and at the end of the last one, in whole and partial vectors.
    let vectors = if channels > 16 { (8, 16) } else { (0, 0) };
    for (skipped, missing) in [(0, 0), vectors, (channels / 3, channels / 2)] {
        let (below, elems) = (rows[0] as usize * channels + skipped, (rows.len() * channels).saturating_sub(skipped + missing));
        let mut case = Case::on(Stream::H2d);
        let (places, packed) = (case.ints("rows", &rows), case.input("packed", dtype, &random.uniform(dtype, elems)));
        let table = case.updated("table", dtype, &random.uniform(dtype, vocab * channels - below), Want::Same);
        case.check(bench, &|dev, at| {
            let (rows, packed, table) = (at[places], at[packed], at[table]);
            dev.launch(ScatterRows { stream: Stream::H2d, rows, packed, table, below, skipped, channels })
        })?;
    }
    Ok(0.0)
}

/// Rows of one document, and rows in which a second one starts at position 0.
fn positions(random: &mut Random, shape: Shape) -> Vec<i32> {
    let row = |second: usize| (0..shape.seq_length).map(move |t| if t < second { t } else { t - second } as i32);
    (0..shape.batch).flat_map(|i| row(if i % 2 == 0 { shape.seq_length } else { random.below(shape.seq_length) })).collect()
}

/// Sums of the rows of `dout` by their entry of a table. The entry of `n` rows is a sum of `n` terms.
fn row_sums(dout: &[f32], channels: usize, entries: usize, entry: impl Fn(usize) -> usize) -> Vec<Near> {
    let (mut sums, mut uses) = (vec![Sum::default(); entries * channels], vec![0; entries]);
    for (row, dout) in dout.chunks_exact(channels).enumerate() {
        uses[entry(row)] += 1;
        sums[entry(row) * channels..].iter_mut().zip(dout).for_each(|(sum, &x)| sum.add(f64::from(x)));
    }
    sums.chunks_exact(channels).zip(uses).flat_map(|(sums, uses)| sums.iter().map(move |sum| sum.near(growth(uses)))).collect()
}

/// Sums of columns, each over `rows` terms.
fn column_sums(bench: &mut Bench, random: &mut Random, dtype: Dtype, rows: usize, cols: usize) -> Outcome {
    let (dout, before) = (random.uniform(dtype, rows * cols), random.uniform(dtype, cols));
    let sums = row_sums(&dout, cols, 1, |_| 0);
    let mut worst = 0f64;
    for accumulate in [false, true] {
        let mut case = Case::default();
        let dout = case.input("dout", dtype, &dout);
        let dbias = case.gradient("dbias", dtype, accumulate.then_some(&before), sums.clone());
        worst = worst.max(case.check(bench, &|dev, at| dev.launch(BiasBackward { dout: at[dout], dbias: at[dbias], accumulate }))?);
    }
    Ok(worst)
}
