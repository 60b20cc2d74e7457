//! Random initialisation as in Hugging Face, with values that depend only on the seed.

use super::tensors::{Init, TENSOR_ALIGN_ELEMS, TensorSpec, TensorTable};
use crate::error::{Error, Result};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Minimum elements of one thread: a multiple of the alignment, so that pairs stay whole.
const PART_ELEMS: usize = 512 * TENSOR_ALIGN_ELEMS;

/// Fills `out` with the initial values of the tensor `spec`. Every tensor has its own stream of the generator, so tensors can be filled in
/// any order and by any thread. The functions of the normal distribution are implemented in software, so every platform produces the same
/// bits.
///
/// # Panics
/// If the length of `out` is not that of the tensor.
pub fn init_tensor(spec: &TensorSpec, seed: u64, out: &mut [f32]) {
    assert_eq!(out.len(), spec.elems(), "initialise {}", spec.name);
    init_part(spec, seed, 0, out);
}

/// Fills `out` with the initial values of the flat range of `table` that begins at element `start`, on `threads` threads. The bits are
/// those of [`init_tensor`], with zero between the tensors.
///
/// # Errors
/// `Resource` when a thread cannot start.
///
/// # Panics
/// If `start` is odd, or `out` exceeds the flat range.
pub(crate) fn init_flat(table: &TensorTable, seed: u64, start: usize, out: &mut [f32], threads: usize) -> Result<()> {
    init_specs((table.specs(), table.flat_elems()), seed, start, out, threads)
}

/// As [`init_flat`], for the range of frozen tensors.
///
/// # Errors
/// As [`init_flat`].
///
/// # Panics
/// As [`init_flat`].
pub(crate) fn init_frozen(table: &TensorTable, seed: u64, start: usize, out: &mut [f32], threads: usize) -> Result<()> {
    init_specs((table.frozen(), table.frozen_elems()), seed, start, out, threads)
}

/// The scale of random packed weights, `2^-7`: with all codes equally likely, their standard deviation is 0.023.
pub(crate) const INIT_SCALE: u8 = 120;

/// Fills `out` with random codes of packed weights, from byte `start` of the range on. They serve to measure times: random weights cannot be
/// frozen in a run.
pub(crate) fn init_codes(seed: u64, start: usize, out: &mut [u8]) {
    let mut rng = stream(seed, usize::MAX, start.div_ceil(4));
    rng.fill_bytes(out);
}

/// Fills `out` from element `start` of the range of `specs` on, which has `all` elements.
fn init_specs((specs, all): (&[TensorSpec], usize), seed: u64, start: usize, out: &mut [f32], threads: usize) -> Result<()> {
    assert!(
        start.is_multiple_of(2) && start + out.len() <= all,
        "elements {start} to {}: the start is odd, or the end is outside the table",
        start + out.len()
    );
    let part_elems = out.len().div_ceil(threads.max(1)).max(1).next_multiple_of(PART_ELEMS);
    std::thread::scope(|scope| {
        for (i, out) in out.chunks_mut(part_elems).enumerate() {
            let fill = move || init_range(specs, seed, start + i * part_elems, out);
            let spawned = std::thread::Builder::new().name(format!("init-{i:02}")).spawn_scoped(scope, fill);
            spawned.map_err(|e| Error::resource(format!("start initialisation thread {i}"), e))?;
        }
        Ok(())
    })
}

fn init_range(specs: &[TensorSpec], seed: u64, start: usize, out: &mut [f32]) {
    let end = start + out.len();
    out.fill(0.0);
    for spec in specs {
        let part = spec.offset_elems.max(start)..spec.range().end.min(end);
        if !part.is_empty() {
            init_part(spec, seed, part.start - spec.offset_elems, &mut out[part.start - start..part.end - start]);
        }
    }
}

/// Fills `out` with the tensor's initial values from its element `first` on, which is even, so that pairs stay whole.
fn init_part(spec: &TensorSpec, seed: u64, first: usize, out: &mut [f32]) {
    match spec.init {
        Init::Zeros => out.fill(0.0),
        Init::Ones => out.fill(1.0),
        Init::Normal { std } => fill_normal(&mut stream(seed, spec.index, first), std, out),
        Init::LogUniform { low, high } => fill_log_uniform(&mut stream(seed, spec.index, first), (low, high), out),
    }
}

/// The generator of the tensor `index`, positioned at element `first`: a pair of elements uses two words.
fn stream(seed: u64, index: usize, first: usize) -> ChaCha8Rng {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut rng = ChaCha8Rng::from_seed(key);
    rng.set_stream(index as u64);
    rng.set_word_pos(first as u128);
    rng
}

/// Logarithms of uniform numbers, one for each word.
fn fill_log_uniform(rng: &mut ChaCha8Rng, (low, high): (f32, f32), out: &mut [f32]) {
    for x in out {
        let uniform = (rng.next_u32() >> 8) as f32 / (1 << 24) as f32;
        *x = libm::logf(low + (high - low) * uniform);
    }
}

/// Box-Muller: two normal numbers from two uniform numbers.
fn fill_normal(rng: &mut ChaCha8Rng, std: f32, out: &mut [f32]) {
    for pair in out.chunks_mut(2) {
        // 24 bits each; the first is never 0, because the logarithm of 0 is infinite.
        let (u1, u2) = (rng.next_u32() >> 8, rng.next_u32() >> 8);
        let radius = std * libm::sqrtf(-2.0 * libm::logf((u1 + 1) as f32 / (1 << 24) as f32));
        let angle = std::f32::consts::TAU * (u2 as f32 / (1 << 24) as f32);
        let normal = [radius * libm::cosf(angle), radius * libm::sinf(angle)];
        pair.copy_from_slice(&normal[..pair.len()]);
    }
}

#[cfg(test)]
mod tests {
    use super::super::layer_shape::{Ffn, LayerShape, Mlp};
    use super::super::shape::ModelShape;
    use super::super::tensors::{Module, Role, TensorTable};
    use super::*;

    fn values(spec: &TensorSpec, seed: u64) -> Vec<f32> {
        let mut out = vec![f32::NAN; spec.elems()];
        init_tensor(spec, seed, &mut out);
        out
    }

    #[test]
    fn matrices_are_normal_and_norms_are_one() {
        let table = TensorTable::new(&ModelShape::demo());
        let spec = table.find(Module::Layer(2), Role::MlpIn).unwrap();
        let x: Vec<f64> = values(spec, 7).into_iter().map(f64::from).collect();
        let n = x.len() as f64;
        let moment = |power: i32| x.iter().map(|v| (v / 0.02).powi(power)).sum::<f64>() / n;
        // Moments 0, 1, 0, 3 of the normal distribution, each within five standard deviations of its estimate.
        for (power, want, variance) in [(1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0f64)] {
            assert!((moment(power) - want).abs() < 5.0 * (variance / n).sqrt(), "moment {power}: {}", moment(power));
        }
        let norm = table.find(Module::Head, Role::FinalNorm).unwrap();
        assert!(values(norm, 7).iter().all(|v| *v == 1.0));
    }

    #[test]
    fn rates_of_decay_are_logarithms_of_uniform_numbers() {
        let table = TensorTable::new(&ModelShape::demo());
        let spec = TensorSpec { init: Init::LogUniform { low: 0.01, high: 16.0 }, shape: vec![100_000], ..table.specs()[0].clone() };
        let rates: Vec<f64> = values(&spec, 7).into_iter().map(|x| f64::from(x).exp()).collect();
        assert!(rates.iter().all(|rate| (0.0099..16.001).contains(rate)));
        let below = |bound: f64| rates.iter().filter(|rate| **rate < bound).count() as f64 / rates.len() as f64;
        assert!([(2.0, 0.1245), (8.0, 0.4997), (14.0, 0.8749)].iter().all(|(bound, share)| (below(*bound) - share).abs() < 0.008));
        let mut rest = vec![0.0; 100_000 - 10];
        init_part(&spec, 7, 10, &mut rest);
        assert!(rest == values(&spec, 7)[10..]);
    }

    #[test]
    fn threads_and_parts_make_the_same_bits() {
        // Odd sizes cause padding between tensors, and pairs divided at their ends.
        let mut shape = ModelShape { vocab: 259, channels: 255, ..ModelShape::demo() };
        shape.layers.iter_mut().for_each(|LayerShape { mlp, .. }| *mlp = Mlp::Dense(Ffn { width: 501, ..mlp.ffn() }));
        let table = TensorTable::new(&shape);
        let mut whole = vec![0.0; table.flat_elems()];
        for spec in table.specs() {
            init_tensor(spec, 7, &mut whole[spec.range()]);
        }
        for threads in [1, 3, 16] {
            let mut flat = vec![f32::NAN; table.flat_elems()];
            init_flat(&table, 7, 0, &mut flat, threads).unwrap();
            assert!(flat == whole, "{threads} threads");
        }
        for start in [2, 4096, (table.flat_elems() / 2) & !1, table.flat_elems()] {
            let mut rest = vec![f32::NAN; table.flat_elems() - start];
            init_flat(&table, 7, start, &mut rest, 2).unwrap();
            assert!(rest == whole[start..], "from {start}");
        }
    }

    #[test]
    fn the_bits_depend_on_seed_and_tensor_alone() {
        let table = TensorTable::new(&ModelShape::demo());
        let (a, b) = (table.find(Module::Layer(0), Role::Qkv).unwrap(), table.find(Module::Layer(1), Role::Qkv).unwrap());
        assert_eq!(values(a, 1), values(a, 1));
        assert_ne!(values(a, 1), values(a, 2));
        assert_ne!(values(a, 1), values(b, 1));
        // Pinned values: random initialisation must produce these bits on every platform and in every version.
        let pinned = [3167459569u32, 1024419113, 3156250409, 1026552247];
        let first = TensorSpec { index: 0, ..a.clone() };
        assert_eq!(values(&first, 42)[..4].iter().map(|v| v.to_bits()).collect::<Vec<_>>(), pinned);
    }
}
