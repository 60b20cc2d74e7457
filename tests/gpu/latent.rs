//! Queries, keys and values of latent attention, and the width of heads.

use super::formats::FLOATS;
use super::harness::{Bench, Case, Want};
use super::kernels::Suite;
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::{AssembleHeads, AssembleHeadsBackward, LatentHeads, ResizeRows};
use superoffload::internals::dtype::Dtype;

/// Positions of the table of angles.
const POSITIONS: usize = 50;

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    // Tokens, heads, channels of a head that do not rotate, that do, and those of a value: whole vectors and others.
    let small = [(1, 1, 1, 2, 1), (70, 3, 5, 6, 7), (33, 4, 16, 8, 16), (13, 20, 192, 64, 256), (21, 16, 128, 64, 128)];
    for dtype in FLOATS {
        let full = suite.full(dtype).then_some((4096, 16, 128, 64, 128));
        for (tokens, heads, plain, rotary, value) in small.into_iter().chain(full) {
            for interleaved in [false, true] {
                let of = LatentHeads { heads, plain, rotary, value, interleaved };
                let kind = if interleaved { " of neighbours" } else { "" };
                let name = |kernel: &str| format!("{kernel}{kind} {dtype} {tokens} tokens, {heads}x({plain}+{rotary}, {value})");
                suite.case(&name("assemble_heads"), |bench, random| forward(bench, random, dtype, (tokens, of)));
                suite.case(&name("assemble_heads_backward"), |bench, random| backward(bench, random, dtype, (tokens, of)));
            }
            let (d, rows) = (plain + rotary, tokens * heads);
            for (from, to) in [(d, value), (value, d)] {
                suite.case(&format!("resize_rows {dtype} {rows} from {from} to {to}"), |bench, random| {
                    let mut case = Case::default();
                    let x = case.input("x", dtype, &random.wild(dtype, rows * from));
                    let out = case.output("out", dtype, rows * to, Want::Same);
                    case.check(bench, &|dev, at| dev.launch(ResizeRows { x: at[x], out: at[out], from, to }))
                });
            }
        }
    }
}

/// Positions of tokens, and angles.
fn angles(random: &mut Random, tokens: usize, rotary: usize) -> (Vec<i32>, Vec<f32>) {
    ((0..tokens).map(|_| random.below(POSITIONS) as i32).collect(), random.uniform(Dtype::Float32, POSITIONS * rotary))
}

/// Columns of a token: queries, projected keys and values, and both as attention reads them.
fn columns(of: &LatentHeads) -> [usize; 3] {
    let d = of.plain + of.rotary;
    [of.heads * d, of.heads * (of.plain + of.value), 3 * of.heads * d]
}

fn forward(bench: &mut Bench, random: &mut Random, dtype: Dtype, (tokens, heads): (usize, LatentHeads)) -> Outcome {
    let ([queries, projected, all], (positions, table)) = (columns(&heads), angles(random, tokens, heads.rotary));
    let inputs = [queries, projected, heads.rotary].map(|cols| random.uniform(dtype, tokens * cols));
    let mut case = Case::default();
    let [queries, projected, key] = [("queries", 0), ("projected", 1), ("key", 2)].map(|(name, nth)| case.input(name, dtype, &inputs[nth]));
    let (positions, table) = (case.ints("positions", &positions), case.input("table", Dtype::Float32, &table));
    let qkv = case.output("qkv", dtype, tokens * all, Want::Same);
    case.check(bench, &|dev, at| {
        let [queries, projected, key, positions, table] = [queries, projected, key, positions, table].map(|handle| at[handle]);
        dev.launch(AssembleHeads { queries, projected, key, positions, table, qkv: at[qkv], heads })
    })
}

fn backward(bench: &mut Bench, random: &mut Random, dtype: Dtype, (tokens, heads): (usize, LatentHeads)) -> Outcome {
    let ([queries, projected, all], (positions, table)) = (columns(&heads), angles(random, tokens, heads.rotary));
    let mut case = Case::default();
    let dqkv = case.input("dqkv", dtype, &random.uniform(dtype, tokens * all));
    let (positions, table) = (case.ints("positions", &positions), case.input("table", Dtype::Float32, &table));
    let [dqueries, dprojected, dkey] = [("dqueries", queries), ("dprojected", projected), ("dkey", heads.rotary)]
        .map(|(name, cols)| case.output(name, dtype, tokens * cols, Want::Same));
    case.check(bench, &|dev, at| {
        let [dqkv, positions, table] = [dqkv, positions, table].map(|handle| at[handle]);
        let [dqueries, dprojected, dkey] = [dqueries, dprojected, dkey].map(|handle| at[handle]);
        dev.launch(AssembleHeadsBackward { dqkv, positions, table, dqueries, dprojected, dkey, heads })
    })
}
