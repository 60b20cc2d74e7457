//! Angles of the rotary position embedding, rounded where `transformers` rounds: frequencies and angles are fp32.

use super::shape::{RopeConfig, RopeScaling};

/// The table of [`crate::device::Kernels::rope`]: (cos, sin) fp32 `[seq_length, rotary_dim / 2, 2]`.
pub(crate) fn rope_table(rope: &RopeConfig, seq_length: usize) -> Vec<f32> {
    let frequencies = inverse_frequencies(rope);
    let growth = match rope.scaling {
        RopeScaling::Yarn { attention_factor, .. } => attention_factor as f32,
        _ => 1.0,
    };
    let mut table = Vec::with_capacity(seq_length * rope.rotary_dim);
    for position in 0..seq_length {
        for frequency in &frequencies {
            let angle = f64::from(position as f32 * frequency);
            table.extend([libm::cos(angle) as f32 * growth, libm::sin(angle) as f32 * growth]);
        }
    }
    table
}

/// Radians per position for each rotating pair of channels, `[rotary_dim / 2]`.
fn inverse_frequencies(rope: &RopeConfig) -> Vec<f32> {
    let theta = f64::from(rope.theta as f32);
    let plain = |pair: usize| {
        let exponent = (2 * pair) as f32 / rope.rotary_dim as f32;
        1.0 / libm::pow(theta, f64::from(exponent)) as f32
    };
    (0..rope.rotary_dim / 2).map(|pair| stretch(rope, pair, plain(pair))).collect()
}

fn stretch(rope: &RopeConfig, pair: usize, frequency: f32) -> f32 {
    match rope.scaling {
        RopeScaling::Default => frequency,
        RopeScaling::Linear { factor } => frequency / factor as f32,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_positions } => {
            let (factor, context) = (factor as f32, original_max_positions as f32);
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
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_positions, truncate, .. } => {
            let bounds = [beta_fast, beta_slow].map(|turns| turning_pair(rope, turns, original_max_positions));
            let [low, high] = if truncate { [bounds[0].floor(), bounds[1].ceil()] } else { bounds };
            let (low, high) = (low.max(0.0), high.min(rope.rotary_dim as f64 - 1.0));
            let high = if low == high { high + 0.001 } else { high };
            let divided = ((pair as f32 - low as f32) / (high - low) as f32).clamp(0.0, 1.0);
            let kept = 1.0 - divided;
            frequency / factor as f32 * (1.0 - kept) + frequency * kept
        }
    }
}

/// The pair, as if there were some between them, that turns so often within `positions`.
fn turning_pair(rope: &RopeConfig, turns: f64, positions: usize) -> f64 {
    let wavelengths = positions as f64 / (turns * std::f64::consts::TAU);
    rope.rotary_dim as f64 * libm::log(wavelengths) / (2.0 * libm::log(rope.theta))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA3: RopeConfig = RopeConfig {
        theta: 500_000.0,
        rotary_dim: 64,
        scaling: RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_positions: 8192 },
    };

    /// `LlamaRotaryEmbedding(...).inv_freq` of transformers for the same parameters, as bits.
    const LLAMA3_FREQUENCIES: [u32; 32] = [
        0x3f800000, 0x3f29e1c6, 0x3ee177bc, 0x3e959ee3, 0x3e4693b0, 0x3e03c6a0, 0x3daee4ad, 0x3d681e67, 0x3d1a08c8, 0x3ccc6f49, 0x3c87a9c3,
        0x3c340d6d, 0x3beef74f, 0x3b9e9402, 0x3b527720, 0x3ab3d11d, 0x3a0995d2, 0x393b2dd2, 0x38a3418d, 0x3858ac81, 0x380fc8f8, 0x37bed4f4,
        0x377d45c3, 0x3728126b, 0x36df10c4, 0x369406cb, 0x36447610, 0x36025f34, 0x35ad07a7, 0x3565a54d, 0x351864a7, 0x34ca41b0,
    ];

    #[test]
    fn llama3_frequencies_are_those_of_transformers() {
        // Its power function is off by up to one unit in the last place, the blend of two such frequencies by two more.
        for (pair, (ours, theirs)) in inverse_frequencies(&LLAMA3).iter().zip(LLAMA3_FREQUENCIES).enumerate() {
            assert!(ours.to_bits().abs_diff(theirs) <= 3, "pair {pair}: {ours} and {}", f32::from_bits(theirs));
        }
    }

    #[test]
    fn the_table_holds_cosines_and_sines_by_position() {
        let rope = RopeConfig { theta: 10_000.0, rotary_dim: 4, scaling: RopeScaling::Linear { factor: 2.0 } };
        let table = rope_table(&rope, 3);
        assert_eq!(table.len(), 3 * 2 * 2);
        assert_eq!(table[..4], [1.0, 0.0, 1.0, 0.0]);
        // Position 2, frequencies 1/2 and 1/200.
        let want = [1.0f64.cos(), 1.0f64.sin(), 0.01f64.cos(), 0.01f64.sin()];
        assert!(table[8..].iter().zip(want).all(|(a, b)| (f64::from(*a) - b).abs() < 1e-7), "{table:?}");
    }
}
