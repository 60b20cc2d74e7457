//! Random initialisation as Hugging Face does it, with numbers that depend on nothing but the seed.

use super::tensors::{Init, TensorSpec};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Fills `out` with the initial values of the tensor `spec`. Every tensor has its own stream of the generator, so that
/// tensors can be filled in any order and by any thread; the functions behind the normal distribution are in software, so
/// that every platform makes the same bits.
///
/// # Panics
/// If `out` is not as long as the tensor.
pub fn init_tensor(spec: &TensorSpec, seed: u64, out: &mut [f32]) {
    assert_eq!(out.len(), spec.elems(), "initialise {}", spec.name);
    match spec.init {
        Init::Zeros => out.fill(0.0),
        Init::Ones => out.fill(1.0),
        Init::Normal { std } => fill_normal(&mut stream(seed, spec.index), std, out),
    }
}

fn stream(seed: u64, index: usize) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(index as u64);
    rng
}

/// Box-Muller: two normal numbers from two uniform ones.
fn fill_normal(rng: &mut ChaCha8Rng, std: f32, out: &mut [f32]) {
    for pair in out.chunks_mut(2) {
        // 24 bits each; the first is never 0, whose logarithm is infinite.
        let (u1, u2) = (rng.next_u32() >> 8, rng.next_u32() >> 8);
        let radius = std * libm::sqrtf(-2.0 * libm::logf((u1 + 1) as f32 / (1 << 24) as f32));
        let angle = std::f32::consts::TAU * (u2 as f32 / (1 << 24) as f32);
        let normal = [radius * libm::cosf(angle), radius * libm::sinf(angle)];
        pair.copy_from_slice(&normal[..pair.len()]);
    }
}
