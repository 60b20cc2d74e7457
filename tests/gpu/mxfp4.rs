//! Expansion of MXFP4, with the CPU's bits.

use super::harness::{Bench, Case, Want};
use super::kernels::Suite;
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::ExpandMxfp4;
use superoffload::internals::dtype::Dtype;

/// Numbers that share a scale, and their bytes.
const BLOCK_ELEMS: usize = 32;
const BLOCK_BYTES: usize = BLOCK_ELEMS / 2;
/// Blocks with every byte of two codes.
const BLOCKS: usize = 256 / BLOCK_BYTES;

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    suite.case("expand_mxfp4, every byte with every scale", |bench, _| {
        expand(bench, (0..=255u8).flat_map(|scale| [scale; BLOCKS]).collect(), |byte| byte as u8)
    });
    // Fewer blocks than a thread block takes, and one more than several take.
    for blocks in [1, 3, 255, 256, 3 * 256 + 1] {
        suite.case(&format!("expand_mxfp4, {blocks} blocks"), |bench, random| some(bench, random, blocks));
    }
    if suite.bench.full {
        suite.case("expand_mxfp4, an expert of GPT-OSS", |bench, random| some(bench, random, 5760 * 2880 / BLOCK_ELEMS));
    }
}

fn some(bench: &mut Bench, random: &mut Random, blocks: usize) -> Outcome {
    let values = random.uniform(Dtype::Float32, blocks);
    expand(bench, values.iter().map(|x| (127.0 + 9.0 * x) as u8).collect(), |byte| (byte * 37 + byte / 256) as u8)
}

/// Expands blocks with these scales, and with the codes `code` of each byte.
fn expand(bench: &mut Bench, scales: Vec<u8>, code: impl Fn(usize) -> u8) -> Outcome {
    let (mut case, blocks) = (Case::default(), scales.len());
    case.aligned();
    let codes = case.bits("codes", Dtype::Uint8, (0..blocks * BLOCK_BYTES).map(code).collect());
    let scales = case.bits("scales", Dtype::Uint8, scales);
    let out = case.output("out", Dtype::Bfloat16, blocks * BLOCK_ELEMS, Want::Same);
    case.check(bench, &|dev, at| dev.launch(ExpandMxfp4 { codes: at[codes], scales: at[scales], out: at[out] }))
}
