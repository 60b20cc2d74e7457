//! Casts, exact to the bit: all values of the narrow formats, a million of fp32 with all rounding boundaries, on every stream.

use super::formats::{FLOATS, encode};
use super::harness::{Case, Want};
use super::kernels::Suite;
use super::random::Random;
use std::io::Write;
use superoffload::internals::device::{Cast, Poke, Stream, Zero};
use superoffload::internals::dtype::Dtype;

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    let pairs = FLOATS.into_iter().flat_map(|from| FLOATS.map(|to| (from, to)));
    for (from, to) in pairs.filter(|&(from, to)| from == to || from == Dtype::Float32 || to == Dtype::Float32) {
        for stream in Stream::ALL {
            suite.case(&format!("cast {from} to {to} on {stream:?}"), |bench, random| {
                let bytes = patterns(from, random);
                let elems = bytes.len() / from.bytes();
                let mut case = Case::on(stream);
                let src = case.bits("src", from, bytes);
                let dst = case.output("dst", to, elems, Want::Same);
                case.check(bench, &|dev, at| dev.launch(Cast { stream, src: at[src], dst: at[dst] }))
            });
        }
        suite.case(&format!("cast {from} to {to} of odd lengths"), |bench, random| {
            for elems in [1, 2, 3, 7, 8, 9, 15, 17, 31, 255, 1023, 4097] {
                let mut case = Case::default();
                let src = case.input("src", from, &random.wild(from, elems));
                let dst = case.output("dst", to, elems, Want::Same);
                case.check(bench, &|dev, at| dev.launch(Cast { stream: Stream::Compute, src: at[src], dst: at[dst] }))?;
            }
            Ok(0.0)
        });
    }
    for dtype in [Dtype::Bfloat16, Dtype::Float16, Dtype::Float32, Dtype::Int32] {
        suite.case(&format!("zero {dtype}"), |bench, _| {
            for elems in [1, 3, 8, 1021, 70_001] {
                let mut case = Case::default();
                let x = case.output("x", dtype, elems, Want::Bits(vec![0; elems * dtype.bytes()]));
                case.check(bench, &|dev, at| dev.launch(Zero { x: at[x] }))?;
            }
            Ok(0.0)
        });
    }
    for dtype in FLOATS {
        suite.case(&format!("poke {dtype}"), |bench, random| {
            for value in [1e3, -0.3, 1e-7, f32::INFINITY, f32::NEG_INFINITY, f32::NAN] {
                let (before, index) = (random.uniform(dtype, 1025), random.below(1025));
                let mut after = before.clone();
                after[index] = value;
                let mut case = Case::default();
                let want = if value.is_nan() { Want::Same } else { Want::Bits(encode(dtype, &after)) };
                let x = case.updated("x", dtype, &before, want);
                case.check(bench, &|dev, at| dev.launch(Poke { x: at[x], index, value }))?;
            }
            Ok(0.0)
        });
    }
}

/// All bit patterns of a narrow format. For fp32: for every upper half the lower halves that decide rounding, and equally many random
/// patterns.
fn patterns(dtype: Dtype, random: &mut Random) -> Vec<u8> {
    if dtype.bytes() == 2 {
        return (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
    }
    let edges = [0u32, 1, 0x0fff, 0x1000, 0x1001, 0x1fff, 0x7fff, 0x8000, 0x8001, 0xffff];
    let upper = (0..=0xffffu32).flat_map(|upper| edges.map(|lower| upper << 16 | lower));
    upper.chain((0..400_001).map(|_| random.bits())).flat_map(u32::to_le_bytes).collect()
}
