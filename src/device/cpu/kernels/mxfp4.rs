//! Expansion of matrices in MXFP4.

use super::Compute;
use super::arithmetic::CpuArithmetic;
use super::pointwise::BLOCK_ELEMS;
use super::split::Chunks;
use crate::device::ExpandMxfp4;
use crate::device::cpu::task_memory::TaskMemory;
use crate::dtype::Element;
use crate::dtype::mxfp4::{self, Mxfp4};
use half::bf16;

const _: () = assert!(BLOCK_ELEMS.is_multiple_of(mxfp4::BLOCK_ELEMS));

impl CpuArithmetic for ExpandMxfp4 {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let numbers = Mxfp4 { codes: memory.read(self.codes), scales: memory.read(self.scales) };
        expand(cx, numbers, memory.write(self.out));
    }
}

/// See [`ExpandMxfp4`].
fn expand(cx: &mut Compute, numbers: Mxfp4<'_>, out: &mut [bf16]) {
    cx.team.for_each(Chunks::new(out, BLOCK_ELEMS), |block, out| numbers.slice(block * BLOCK_ELEMS, out.len()).widen(out));
}

#[cfg(test)]
mod tests {
    use super::super::testing::{assert_same_everywhere, bits};
    use super::*;

    /// Every byte of codes with every scale, and a last chunk that is not full.
    fn all() -> (Vec<u8>, Vec<u8>) {
        let codes = (0..=255u8).cycle().take(256 * 256 + 16 * 3).collect();
        (codes, (0..=255u8).flat_map(|scale| [scale; 16]).chain([130; 3]).collect())
    }

    #[test]
    fn every_byte_with_every_scale_expands_as_it_widens() {
        let (codes, scales) = all();
        assert_same_everywhere(|cx| {
            let (mut out, mut want) = (vec![bf16::NAN; 2 * codes.len()], vec![0.0f32; 2 * codes.len()]);
            let numbers = Mxfp4 { codes: &codes, scales: &scales };
            expand(cx, numbers, &mut out);
            numbers.widen(&mut want);
            let narrow: Vec<bf16> = want.into_iter().map(Element::from_f32).collect();
            assert_eq!(bits(&out), bits(&narrow));
            bits(&out)
        });
    }
}
