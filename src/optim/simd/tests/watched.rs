//! Passes with ordinary blocks first and denormal moments last, with and without a CPU flag at the beginning.

use super::*;
use crate::optim::simd::lifting::DenormalWatch;

/// Makes the CPU set or clear its underflow flag.
fn prepare(noted: bool) {
    shells::forget_denormals();
    if noted {
        std::hint::black_box(std::hint::black_box(1e-40f32) * 0.5);
    }
}

#[test]
fn a_note_begins_and_small_blocks_keep_the_watch() {
    prepare(false);
    assert!(!DenormalWatch::new(Isa::Avx2).is_careful());
    prepare(true);
    assert!(!DenormalWatch::new(Isa::Scalar).is_careful());
    let mut watch = DenormalWatch::new(Isa::Avx2);
    for small in [false, false, true, false, false, false, false, false, false, false] {
        assert!(watch.is_careful());
        watch.saw(small);
    }
    assert!(watch.is_careful() && shells::denormals_noted());
    watch.saw(false);
    assert!(!watch.is_careful() && !shells::denormals_noted());
}

#[test]
fn a_pass_over_denormal_moments_has_the_same_bits_with_and_without_a_note() {
    let (ordinary, faint) = (12 * DenormalWatch::ELEMS, 4 * DenormalWatch::ELEMS + 77);
    let mut case = Case::<f32, f32, bf16>::ordinary(ordinary + faint);
    case.m[ordinary..].iter_mut().for_each(|m| *m *= 1e-41);
    case.grads[ordinary + DenormalWatch::ELEMS..].fill(0.0);
    for pass in PASSES {
        let mut golden = case.clone();
        golden.by_specification(pass, steps());
        for (isa, noted) in Isa::available().into_iter().flat_map(|isa| [(isa, false), (isa, true)]) {
            let mut got = case.clone();
            prepare(noted);
            got.by_kernels(AdamKernels::new(isa).unwrap(), pass, steps(), [0, 0]);
            let label = |field| format!("{isa} {pass:?}, noted {noted}: {field}");
            assert_same(&got.params, &golden.params, &label("params"));
            assert_same(&got.m, &golden.m, &label("m"));
            assert_same(&got.v, &golden.v, &label("v"));
            assert_same(&got.out, &golden.out, &label("out"));
        }
    }
}
