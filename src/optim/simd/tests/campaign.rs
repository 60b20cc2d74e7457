//! Random vectors, by the million in campaigns: every instruction set against the specification, bit for bit.

use super::*;
use crate::optim::samples::{bewildered, even, faint, same};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use serde_json::{Map, Value, json};

#[path = "../../../../tests/campaign.rs"]
mod results;

impl<M: Moment, G: Element, O: Element> Case<M, G, O> {
    /// Mostly short vectors, because vector code is most error-prone at tails. One third are wild, one third have ordinary magnitudes,
    /// which round, and one third are so small that most numbers are denormal in fp32.
    fn random(rng: &mut ChaCha8Rng) -> Self {
        let longest = if rng.next_u32().is_multiple_of(32) { 300 } else { 48 };
        let (len, kind) = (rng.next_u32() as usize % longest, rng.next_u32() % 3);
        let mut values = |sign: fn(f32) -> f32| -> Vec<f32> {
            let scale = 2f32.powi(4 - (rng.next_u32() % 24) as i32);
            let value = |rng: &mut ChaCha8Rng| {
                let plain = sign(even(rng) * scale);
                match kind {
                    0 => bewildered(rng, plain),
                    1 => sign(faint(rng, -90)),
                    _ => plain,
                }
            };
            (0..len).map(|_| value(rng)).collect()
        };
        let [params, m, grads, pending_grads, out] = [(); 5].map(|()| values(|x| x));
        let v = values(f32::abs);
        let ([m, v], [grads, pending_grads]) = ([m, v].map(narrowed), [grads, pending_grads].map(narrowed));
        Self { first: rng.next_u64() as usize, params, m, v, grads, pending_grads, out: narrowed(out) }
    }

    /// Number of bits in which each of `isas` differs from the specification after `pass`.
    fn mismatched_bits(&self, pass: Pass, steps: (AdamStep, AdamStep), isas: &[Isa], rng: &mut ChaCha8Rng) -> Vec<u64> {
        let mut golden = self.clone();
        golden.by_specification(pass, steps);
        let stores = STORES[rng.next_u32() as usize % STORES.len()];
        let offset = rng.next_u32() as usize % 32;
        let differing = |&isa: &Isa| {
            let mut got = self.clone();
            got.by_kernels(AdamKernels::new(isa).unwrap().with_stores(stores), pass, steps, [offset, offset]);
            let moments = differing_bits(&got.m, &golden.m) + differing_bits(&got.v, &golden.v);
            differing_bits(&got.params, &golden.params) + moments + differing_bits(&got.out, &golden.out)
        };
        isas.iter().map(differing).collect()
    }
}

fn narrowed<T: Element>(values: Vec<f32>) -> Vec<T> {
    values.into_iter().map(T::from_f32).collect()
}

fn differing_bits<T: Element>(got: &[T], golden: &[T]) -> u64 {
    let differing = |(a, b): (f32, f32)| if same(a, b) { 0 } else { (a.to_bits() ^ b.to_bits()).count_ones().max(1).into() };
    got.iter().zip(golden).map(|(a, b)| differing((a.to_f32(), b.to_f32()))).sum()
}

fn random_steps(rng: &mut ChaCha8Rng) -> (AdamStep, AdamStep) {
    let unit = |rng: &mut ChaCha8Rng| f64::from(even(rng).abs());
    let hyper = AdamHyper {
        lr: 1e-2 * unit(rng),
        beta1: 0.5 + 0.49 * unit(rng),
        beta2: 0.9 + 0.0999 * unit(rng),
        eps: [1e-8, 1e-4, 0.0][rng.next_u32() as usize % 3],
        weight_decay: 0.1 * unit(rng),
    };
    let step = 1 + u64::from(rng.next_u32() % 1000);
    let consts = [step, step + 1].map(|step| AdamConsts::new(&hyper, step, !rng.next_u32().is_multiple_of(4)));
    let [pending, next] = consts.map(|consts| AdamStep { consts, scale: even(rng).abs() });
    (pending, next)
}

/// Runs one vector through every pass, adds the number of bits in which the `isas` differ, and returns the vector's length.
type Compare = fn(&[Isa], &mut Mismatches, &mut ChaCha8Rng) -> usize;

/// Mismatched bits by pass and instruction set.
type Mismatches = [Vec<u64>; PASSES.len()];

const COMPARE: [Compare; 18] = [
    compare_one::<f32, f32, f32>,
    compare_one::<f32, f32, bf16>,
    compare_one::<f32, f32, f16>,
    compare_one::<f32, bf16, f32>,
    compare_one::<f32, bf16, bf16>,
    compare_one::<f32, bf16, f16>,
    compare_one::<f32, f16, f32>,
    compare_one::<f32, f16, bf16>,
    compare_one::<f32, f16, f16>,
    compare_one::<bf16, f32, f32>,
    compare_one::<bf16, f32, bf16>,
    compare_one::<bf16, f32, f16>,
    compare_one::<bf16, bf16, f32>,
    compare_one::<bf16, bf16, bf16>,
    compare_one::<bf16, bf16, f16>,
    compare_one::<bf16, f16, f32>,
    compare_one::<bf16, f16, bf16>,
    compare_one::<bf16, f16, f16>,
];

fn compare_one<M: Moment, G: Element, O: Element>(isas: &[Isa], mismatches: &mut Mismatches, rng: &mut ChaCha8Rng) -> usize {
    let (steps, case) = (random_steps(rng), Case::<M, G, O>::random(rng));
    for (pass, sums) in PASSES.into_iter().zip(mismatches) {
        let bits = case.mismatched_bits(pass, steps, isas, rng);
        sums.iter_mut().zip(bits).for_each(|(sum, bits)| *sum += bits);
    }
    case.grads.len()
}

/// Length of SVE's vectors, if the CPU has SVE.
fn sve_bits() -> Option<u64> {
    /// Constant of linux/prctl.h.
    const PR_SVE_GET_VL: libc::c_int = 51;
    // SAFETY: the call only returns a number.
    let answer = unsafe { libc::prctl(PR_SVE_GET_VL) };
    u64::try_from(answer).ok().map(|answer| 8 * (answer & 0xffff))
}

/// `SUPEROFFLOAD_VECTORS=1000000 cargo test --release --lib random_vectors` runs the long campaign and records it; with
/// `tests/aarch64/cargo.sh` instead of `cargo` it runs on an Arm CPU. Each vector goes through every pass.
#[test]
fn random_vectors_agree_with_the_specification() {
    let requested: Option<u64> = std::env::var("SUPEROFFLOAD_VECTORS").ok().map(|n| n.parse().unwrap());
    let vectors = requested.unwrap_or(1000);
    let seed = std::env::var("SUPEROFFLOAD_SEED").map_or(0, |n| n.parse().unwrap());
    let (isas, rng) = (Isa::available(), &mut ChaCha8Rng::seed_from_u64(seed));
    let (mut mismatches, mut elems) = (PASSES.map(|_| vec![0; isas.len()]), 0);
    for _ in 0..vectors {
        let compare = COMPARE[rng.next_u32() as usize % COMPARE.len()];
        elems += compare(&isas, &mut mismatches, rng);
    }
    let by_isa =
        |bits: &Vec<u64>| -> Map<String, Value> { isas.iter().zip(bits).map(|(isa, &bits)| (isa.to_string(), bits.into())).collect() };
    let passes: Map<String, Value> =
        PASSES.iter().zip(&mismatches).map(|(pass, bits)| (format!("{pass:?}"), by_isa(bits).into())).collect();
    if requested.is_some() {
        let emulator = std::env::var("SUPEROFFLOAD_QEMU_CPU").ok();
        let (target, sve_bits) = (std::env::consts::ARCH, sve_bits());
        results::record(
            "adam",
            json!({ "target": target, "qemu_cpu": emulator, "sve_bits": sve_bits, "seed": seed,
            "vectors": vectors, "elements": elems, "mismatched_bits": passes }),
        );
    }
    assert_eq!(mismatches.iter().flatten().sum::<u64>(), 0, "mismatched bits: {passes:?}");
}
