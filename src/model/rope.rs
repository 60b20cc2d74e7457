//! Angles of the rotary position embedding, rounded where `transformers` rounds: frequencies and angles are fp32.

use super::shape::{Rope, RopeScaling};

/// The table of [`crate::device::Kernels::rope`]: (cos, sin) fp32 `[seq_length, rotary_dim / 2, 2]`.
pub fn rope_table(rope: &Rope, seq_length: usize) -> Vec<f32> {
    let frequencies = inverse_frequencies(rope);
    let mut table = Vec::with_capacity(seq_length * rope.rotary_dim);
    for position in 0..seq_length {
        for frequency in &frequencies {
            let angle = f64::from(position as f32 * frequency);
            table.extend([libm::cos(angle) as f32, libm::sin(angle) as f32]);
        }
    }
    table
}

/// Radians per position for each rotating pair of channels, `[rotary_dim / 2]`.
fn inverse_frequencies(rope: &Rope) -> Vec<f32> {
    let theta = f64::from(rope.theta as f32);
    let plain = |pair: usize| {
        let exponent = (2 * pair) as f32 / rope.rotary_dim as f32;
        1.0 / libm::pow(theta, f64::from(exponent)) as f32
    };
    (0..rope.rotary_dim / 2).map(|pair| stretch(plain(pair), rope.scaling)).collect()
}

fn stretch(frequency: f32, scaling: RopeScaling) -> f32 {
    match scaling {
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
    }
}
