//! Gradients of keys and values that are summed block by block: the CPU's bits.

use super::formats::FLOATS;
use super::harness::{Bench, Case, Want};
use super::kernels::Suite;
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::AddKeyGradients;
use superoffload::internals::dtype::Dtype;

/// Keys, columns of a row, the first columns of the keys' and values' gradients, their widths, keys with a sum, and finished keys.
type Shape = (usize, usize, [usize; 2], usize, [usize; 2]);

const SHAPES: [Shape; 5] = [
    (1, 2, [0, 1], 1, [0, 1]),
    (70, 35, [7, 21], 14, [33, 5]),
    (100, 768, [512, 640], 128, [64, 0]),
    (300, 1536, [1024, 1280], 128, [200, 300]),
    (129, 48, [40, 16], 8, [129, 64]),
];

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    for dtype in FLOATS {
        for shape in SHAPES {
            let (keys, pitch, [of_keys, of_values], width, [begun, done]) = shape;
            let columns = format!("{width} of {pitch} columns from {of_keys} and {of_values}");
            let name = format!("add_key_gradients {dtype} {keys} keys, {columns}, {begun} begun, {done} done");
            suite.case(&name, |bench, random| add(bench, random, dtype, shape));
        }
    }
}

fn add(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: Shape) -> Outcome {
    let (keys, pitch, columns, width, [begun, done]) = shape;
    let mut case = Case::default();
    let dqkv = case.updated("dqkv", dtype, &random.wild(dtype, keys * pitch), Want::Same);
    let sums = case.updated("sums", Dtype::Float32, &random.wild(Dtype::Float32, keys * 2 * width), Want::Same);
    case.check(bench, &|dev, at| dev.launch(AddKeyGradients { dqkv: at[dqkv], sums: at[sums], pitch, columns, width, begun, done }))
}
