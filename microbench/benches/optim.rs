//! The optimizer's passes on every instruction set, next to the rate at which one thread copies memory.
//!
//! criterion prints two rates for each case: parameters (elem/s) and memory traffic (B/s).
#![allow(missing_docs, reason = "criterion's macros write functions without docs")]

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use microbench::facts::Facts;
use microbench::stream::triad;
use microbench::{BucketArrays, Pass, values};
use std::hint::black_box;
use std::time::Duration;
use superoffload::internals::dtype::Dtype;
use superoffload::internals::hardware::Topology;
use superoffload::internals::optim::{AdamKernels, BLOCK, Isa};

/// Parameters of a case. Their state is several times larger than the last-level cache of most machines.
const ELEMS: usize = 1 << 24;

/// Formats of gradients and working weights.
const FORMATS: [(Dtype, Dtype); 3] =
    [(Dtype::Bfloat16, Dtype::Bfloat16), (Dtype::Float32, Dtype::Bfloat16), (Dtype::Float16, Dtype::Float16)];

fn traffic(bytes_per_elem: usize) -> Throughput {
    Throughput::ElementsAndBytes { elements: ELEMS as u64, bytes: (ELEMS * bytes_per_elem) as u64 }
}

fn available_kernels() -> Vec<AdamKernels> {
    Isa::available().into_iter().map(|isa| AdamKernels::new(isa).expect("listed as available")).collect()
}

fn ceiling(c: &mut Criterion) {
    println!("machine: {}", Facts::new("optim", &Topology::this_machine(), serde_json::json!({})));
    let (a, b, mut out) = (values(1, ELEMS), values(2, ELEMS), vec![0.0f32; ELEMS]);
    let mut group = c.benchmark_group("ceiling");
    group.throughput(traffic(8));
    out.copy_from_slice(&a);
    assert_eq!(out, a);
    group.bench_function("copy", |bench| bench.iter(|| black_box(&mut out).copy_from_slice(black_box(&a))));
    group.throughput(traffic(12));
    triad(&mut out, &a, &b);
    assert!(out.iter().zip(&a).zip(&b).all(|((out, a), b)| *out == a + 3.0 * b));
    group.bench_function("triad", |bench| bench.iter(|| triad(black_box(&mut out), black_box(&a), black_box(&b))));
}

fn adam(c: &mut Criterion) {
    let all = available_kernels();
    for (grads, weights) in FORMATS {
        let bucket = BucketArrays::new(ELEMS, grads, weights, all[0]);
        for pass in Pass::ALL {
            let mut specified = bucket.clone();
            specified.run(all[0], pass);
            for &kernels in &all {
                let mut group = c.benchmark_group(format!("{}/{}", kernels.isa(), pass.name()));
                group.throughput(traffic(pass.bytes_per_param(grads, weights)));
                let mut bucket = bucket.clone();
                bucket.run(kernels, pass);
                assert!(bucket == specified, "{} {} differs from the specification", kernels.isa(), pass.name());
                group.bench_function(format!("{grads}-{weights}"), |bench| bench.iter(|| bucket.run(kernels, pass)));
            }
        }
    }
}

fn norm_partials(c: &mut Criterion) {
    let all = available_kernels();
    for (grads, weights) in FORMATS {
        let bucket = BucketArrays::new(ELEMS, grads, weights, all[0]);
        let (mut specified, mut partials) = (vec![0.0; ELEMS / BLOCK], vec![0.0; ELEMS / BLOCK]);
        bucket.partials(all[0], &mut specified);
        for &kernels in &all {
            let mut group = c.benchmark_group(format!("{}/norm_partials", kernels.isa()));
            group.throughput(traffic(grads.bytes()));
            bucket.partials(kernels, &mut partials);
            assert_eq!(partials, specified, "{}", kernels.isa());
            group.bench_function(grads.to_string(), |bench| bench.iter(|| bucket.partials(kernels, black_box(&mut partials))));
        }
    }
}

fn short_runs() -> Criterion {
    Criterion::default().sample_size(10).warm_up_time(Duration::from_millis(200)).measurement_time(Duration::from_millis(500))
}

criterion_group!(name = benches; config = short_runs(); targets = ceiling, adam, norm_partials);
criterion_main!(benches);
