//! Angles of the rotary position embedding, with the rounding of `transformers`: frequencies and angles are fp32.

use super::shape::{RopeConfig, RopeScaling};
use std::ops::Range;

/// The table of [`crate::device::Rope`]: (cos, sin) fp32 `[seq_length, rotary_dim / 2, 2]`.
pub(crate) struct RopeTable {
    /// Radians per position, `[rotary_dim / 2]`.
    frequencies: Vec<f32>,
    factor: f32,
}

impl RopeTable {
    pub(crate) fn new(rope: &RopeConfig, seq_length: usize) -> Self {
        Self { frequencies: inverse_frequencies(rope, seq_length), factor: rope.attention_factor }
    }

    /// Writes a range of the table that consists of whole pairs.
    pub(crate) fn write(&self, elems: Range<usize>, to: &mut [f32]) {
        let pairs = self.frequencies.len();
        for (pair, values) in (elems.start / 2..elems.end / 2).zip(to.as_chunks_mut().0) {
            let angle = (pair / pairs) as f32 * self.frequencies[pair % pairs];
            let (sin, cos) = libm::sincos(f64::from(angle));
            *values = [cos as f32, sin as f32].map(|x| x * self.factor);
        }
    }
}

/// Radians per position for each rotating pair of channels, `[rotary_dim / 2]`, for sequences of `seq_length`.
fn inverse_frequencies(rope: &RopeConfig, seq_length: usize) -> Vec<f32> {
    let (theta, dim) = (f64::from(rope.theta as f32), rope.rotary_dim);
    let power = |theta: f64, pair: usize| libm::pow(theta, f64::from((2 * pair) as f32 / dim as f32)) as f32;
    let plain = |pair: usize| 1.0 / power(theta, pair);
    let frequency: &dyn Fn(usize) -> f32 = match rope.scaling {
        RopeScaling::Default => &plain,
        RopeScaling::Proportional { pairs } => &move |pair| if pair < pairs { plain(pair) } else { 0.0 },
        RopeScaling::Linear { factor } => &move |pair| plain(pair) / factor as f32,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
            let bends = (low_freq_factor, high_freq_factor);
            &move |pair| llama3(plain(pair), factor as f32, bends, original_max_positions as f32)
        }
        RopeScaling::Yarn { factor, beta_fast, beta_slow, truncate, original_max_positions } => {
            let [low, high] = [beta_fast, beta_slow].map(|beta| turning_pair(rope, original_max_positions as f64 / beta));
            let (low, high) = blend(if truncate { (low.floor(), high.ceil()) } else { (low, high) }, dim as f64);
            let divided = move |pair| 1.0 / (factor as f32 * power(theta, pair));
            let kept = move |pair: usize| 1.0 - ((pair as f32 - low) / (high - low)).clamp(0.0, 1.0);
            &move |pair| divided(pair) * (1.0 - kept(pair)) + plain(pair) * kept(pair)
        }
        RopeScaling::Long { ref short, ref long, original_max_positions } => {
            let divisors = if seq_length > original_max_positions { long } else { short };
            &move |pair| 1.0 / (divisors[pair] * power(theta, pair))
        }
        RopeScaling::Dynamic { factor, max_positions } => {
            let length = seq_length.max(max_positions) as f64 / max_positions as f64;
            let growth = libm::pow(factor * length - (factor - 1.0), dim as f64 / (dim as f64 - 2.0));
            &move |pair| 1.0 / power(f64::from((rope.theta * growth) as f32), pair)
        }
    };
    (0..dim / 2).map(frequency).collect()
}

fn llama3(frequency: f32, factor: f32, (low_freq_factor, high_freq_factor): (f64, f64), context: f32) -> f32 {
    let wavelength = std::f32::consts::TAU / frequency;
    let (longest, shortest) = (context / low_freq_factor as f32, context / high_freq_factor as f32);
    if wavelength < shortest {
        return frequency;
    }
    if wavelength > longest {
        return frequency / factor;
    }
    let smooth = (context / wavelength - low_freq_factor as f32) / (high_freq_factor - low_freq_factor) as f32;
    (1.0 - smooth) * frequency / factor + smooth * frequency
}

/// The fractional index of the pair of channels that completes one rotation in `positions`.
fn turning_pair(rope: &RopeConfig, positions: f64) -> f64 {
    rope.rotary_dim as f64 * libm::log(positions / std::f64::consts::TAU) / (2.0 * libm::log(rope.theta))
}

/// Begin and end of a blend from `low` to `high`, among pairs. They always differ, even if `low` equals `high`.
fn blend((low, high): (f64, f64), dim: f64) -> (f32, f32) {
    let (low, high) = (low.max(0.0), high.min(dim - 1.0));
    (low as f32, if low == high { high + 0.001 } else { high } as f32)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA3: RopeConfig = RopeConfig {
        theta: 500_000.0,
        rotary_dim: 64,
        interleaved: false,
        attention_factor: 1.0,
        scaling: RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 8192 },
    };

    /// `LlamaRotaryEmbedding(...).inv_freq` of transformers for these parameters, as bits.
    const LLAMA3_FREQUENCIES: [u32; 32] = [
        0x3f800000, 0x3f29e1c6, 0x3ee177bc, 0x3e959ee3, 0x3e4693b0, 0x3e03c6a0, 0x3daee4ad, 0x3d681e67, 0x3d1a08c8, 0x3ccc6f49, 0x3c87a9c3,
        0x3c340d6d, 0x3beef74f, 0x3b9e9402, 0x3b527720, 0x3ab3d11d, 0x3a0995d2, 0x393b2dd2, 0x38a3418d, 0x3858ac81, 0x380fc8f8, 0x37bed4f4,
        0x377d45c3, 0x3728126b, 0x36df10c4, 0x369406cb, 0x36447610, 0x36025f34, 0x35ad07a7, 0x3565a54d, 0x351864a7, 0x34ca41b0,
    ];

    #[test]
    fn llama3_frequencies_are_those_of_transformers() {
        // The power function of transformers has an error of up to one ulp; the blend of two such frequencies adds up to two more.
        for (pair, (computed, expected)) in inverse_frequencies(&LLAMA3, 16).iter().zip(LLAMA3_FREQUENCIES).enumerate() {
            assert!(computed.to_bits().abs_diff(expected) <= 3, "pair {pair}: {computed} and {}", f32::from_bits(expected));
        }
    }

    #[test]
    fn the_table_holds_cosines_and_sines_by_position() {
        let rope = plain(4, RopeScaling::Linear { factor: 2.0 });
        let table = table(&rope, 3);
        assert_eq!(table[..4], [1.0, 0.0, 1.0, 0.0]);
        // Position 2, frequencies 1/2 and 1/200.
        let want = [1.0f64.cos(), 1.0f64.sin(), 0.01f64.cos(), 0.01f64.sin()];
        assert!(table[8..].iter().zip(want).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-7), "{table:?}");
    }

    fn table(rope: &RopeConfig, seq_length: usize) -> Vec<f32> {
        let mut table = vec![0.0; seq_length * rope.rotary_dim];
        RopeTable::new(rope, seq_length).write(0..table.len(), &mut table);
        table
    }

    /// A range may begin at any pair, and its bits do not depend on the other pairs of the range.
    #[test]
    fn pieces_of_a_table_are_those_of_the_whole() {
        let rope = plain(6, RopeScaling::Default);
        let whole = table(&rope, 5000);
        for (piece, from) in whole.chunks(14).zip((0..).step_by(14)) {
            let mut alone = vec![0.0; piece.len()];
            RopeTable::new(&rope, 5000).write(from..from + piece.len(), &mut alone);
            assert_eq!(alone, piece, "from element {from} on");
        }
        let frequencies = inverse_frequencies(&rope, 5000);
        let angles = (0..5000).flat_map(|position| frequencies.iter().map(move |frequency| f64::from(position as f32 * frequency)));
        let each: Vec<f32> = angles.flat_map(|angle| [libm::cos(angle) as f32, libm::sin(angle) as f32]).collect();
        assert_eq!(whole, each);
    }

    fn plain(rotary_dim: usize, scaling: RopeScaling) -> RopeConfig {
        RopeConfig { theta: 10_000.0, rotary_dim, interleaved: false, scaling, attention_factor: 1.0 }
    }

    #[test]
    fn a_dynamic_base_grows_beyond_the_model_s_positions_alone() {
        let dynamic = plain(8, RopeScaling::Dynamic { factor: 2.0, max_positions: 64 });
        let default = inverse_frequencies(&plain(8, RopeScaling::Default), 64);
        assert_eq!(inverse_frequencies(&dynamic, 64), default);
        // For twice the positions, the base is multiplied by 3^(8/6).
        let grown = inverse_frequencies(&RopeConfig { theta: 10_000.0 * 3f64.powf(8.0 / 6.0), ..plain(8, RopeScaling::Default) }, 1);
        assert!(inverse_frequencies(&dynamic, 128).iter().zip(&grown).all(|(a, b)| (a / b - 1.0).abs() < 1e-6));
    }

    #[test]
    fn a_proportional_rotation_leaves_the_last_pairs() {
        let frequencies = inverse_frequencies(&plain(16, RopeScaling::Proportional { pairs: 2 }), 1);
        assert_eq!(frequencies[..2], inverse_frequencies(&plain(16, RopeScaling::Default), 1)[..2]);
        assert_eq!(frequencies[2..], [0.0; 6]);
    }

    #[test]
    fn longrope_chooses_its_divisors_by_the_sequence() {
        let (short, long) = (vec![1.0, 2.0], vec![4.0, 8.0]);
        let rope = plain(4, RopeScaling::Long { short, long, original_max_positions: 16 });
        assert_eq!(inverse_frequencies(&rope, 16), [1.0, 1.0 / 200.0]);
        assert_eq!(inverse_frequencies(&rope, 17), [0.25, 1.0 / 800.0]);
    }

    #[test]
    fn yarn_keeps_high_frequencies_and_divides_low_ones() {
        let yarn = |truncate| RopeScaling::Yarn { factor: 8.0, beta_fast: 32.0, beta_slow: 1.0, truncate, original_max_positions: 4096 };
        let default = inverse_frequencies(&plain(64, RopeScaling::Default), 1);
        for truncate in [false, true] {
            let stretched = inverse_frequencies(&plain(64, yarn(truncate)), 1);
            let divisors: Vec<f32> = default.iter().zip(&stretched).map(|(plain, stretched)| plain / stretched).collect();
            assert!(divisors[0] == 1.0 && (divisors[31] - 8.0).abs() < 1e-5 && divisors.is_sorted(), "{divisors:?}");
        }
        assert_ne!(inverse_frequencies(&plain(64, yarn(false)), 1), inverse_frequencies(&plain(64, yarn(true)), 1));
    }

    #[test]
    fn the_attention_factor_is_on_cosines_and_sines() {
        let rope = RopeConfig { attention_factor: 1.5, ..plain(2, RopeScaling::Default) };
        assert_eq!(table(&rope, 1), [1.5, 0.0]);
    }
}
