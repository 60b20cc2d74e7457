//! Shared parts of the kernels' tests: inputs, runs in every configuration, and comparisons.

use super::Compute;
use super::isa::KernelIsa;
use crate::dtype::Element;

/// Repeatable values in -1..1, of both signs and all sizes.
pub(crate) fn values<T: Element>(seed: u64, elems: usize) -> Vec<T> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    };
    (0..elems).map(|_| T::from_f32(next())).collect()
}

/// The values in f64.
pub(crate) fn wide<T: Element>(x: &[T]) -> Vec<f64> {
    x.iter().map(|x| f64::from(x.to_f32())).collect()
}

/// The bytes of a result, for comparison.
pub(crate) fn bits<T: Element>(x: &[T]) -> Vec<u8> {
    bytemuck::cast_slice(x).to_vec()
}

/// Runs `kernel` on every instruction set and on 1, 2, 3 and 5 threads: the results, as [`bits`], must agree.
pub(crate) fn assert_same_everywhere(kernel: impl Fn(&mut Compute) -> Vec<u8>) {
    let mut runs = KernelIsa::available().flat_map(|isa| [1, 2, 3, 5].map(|threads| (isa, threads)));
    let run = |(isa, threads)| kernel(&mut Compute::new(threads, isa).unwrap());
    let first = run(runs.next().unwrap());
    for (isa, threads) in runs {
        assert!(run((isa, threads)) == first, "other bits on {isa} with {threads} threads");
    }
}

/// The gradient of `f` at `x` by central differences.
pub(crate) fn slopes(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let step = 1e-5;
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let old = x[i];
            x[i] = old + step;
            let above = f(&x);
            x[i] = old - step;
            let below = f(&x);
            x[i] = old;
            (above - below) / (2.0 * step)
        })
        .collect()
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The values in f32.
pub(crate) fn widened<T: Element>(x: &[T]) -> Vec<f32> {
    x.iter().map(|x| x.to_f32()).collect()
}

/// A [`Compute`] with the widest instruction set and two threads.
pub(crate) fn fastest() -> Compute {
    Compute::new(2, KernelIsa::detect()).unwrap()
}

/// Asserts `|got - want| <= tolerance * (1 + |want|)` for every element.
pub(crate) fn assert_close<T: Element>(name: &str, got: &[T], want: &[f64], tolerance: f64) {
    assert_eq!(got.len(), want.len(), "{name}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        let (got, error) = (got.to_f32(), (f64::from(got.to_f32()) - want).abs());
        assert!(error <= tolerance * (1.0 + want.abs()), "{name}[{i}]: {got} for {want}");
    }
}

/// Asserts that `got` is `want` rounded once.
pub(crate) fn assert_rounded<T: Element>(name: &str, got: &[T], want: &[f32]) {
    assert_eq!(got.len(), want.len(), "{name}");
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        assert_eq!(*got, T::from_f32(*want), "{name}[{i}]: {want} rounded");
    }
}
