//! The correction of the scores by which a router chooses experts, `e_score_correction_bias` in files.
//!
//! Training never changes a correction, but a step reads it like a parameter, and needs all bits of its fp32 elements: it decides between
//! scores that are nearly equal. The table of tensors therefore has each element as three bfloat16 numbers, whose sum is the element. Their
//! gradients are zeros and they do not decay, so that the optimizer leaves their bits, and buckets, ranks, plans and checkpoints need no rule
//! for them.

use crate::device::CORRECTION_PARTS;
use half::bf16;

/// Three bfloat16 numbers that add up to `x` in order, without rounding.
pub(crate) fn split(x: f32) -> [f32; CORRECTION_PARTS] {
    let high = bf16::from_f32(x).to_f32();
    let middle = bf16::from_f32(x - high).to_f32();
    [high, middle, x - high - middle]
}

/// Element `i` of the correction whose parts are in `parts`.
///
/// # Panics
/// If there is no such element.
pub(crate) fn join(parts: &[f32], i: usize) -> f32 {
    let experts = parts.len() / CORRECTION_PARTS;
    parts[i] + parts[experts + i] + parts[2 * experts + i]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_parts_have_every_bit() {
        let mut bits = 1u32;
        for _ in 0..1_000_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Magnitudes from 2^-100 to 2^100: below, parts would be subnormal.
            let exponent = (bits >> 3) % 200 + 27;
            let x = f32::from_bits(bits & 0x807f_ffff | exponent << 23);
            let parts = split(x);
            assert!(parts.iter().all(|part| bf16::from_f32(*part).to_f32() == *part), "{x}: {parts:?}");
            assert_eq!(join(&parts, 0).to_bits(), x.to_bits(), "{parts:?}");
        }
        assert_eq!(split(0.0), [0.0; 3]);
    }
}
