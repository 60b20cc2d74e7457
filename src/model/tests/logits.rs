//! Logits in fp32 beside logits in the format of the weights: distances from sums in f64 of the same hidden states and weights.

use super::*;

/// Factor on the output matrix, which makes the largest logits about 40.
const SCALE: f32 = 16.0;

/// Numbers of a micro-batch: log-probabilities of the targets, and gradients of the hidden states.
struct HeadNumbers {
    logps: Vec<f64>,
    gradients: Vec<f64>,
}

/// Largest distances from f64 with logits of `dtype`: of a log-probability, and of gradients relative to their length.
fn distances<E: Element>(logits_dtype: Dtype, tile: LossTile) -> [f64; 2] {
    let shape = golden_shape("llama");
    let policies = vec![Keep; shape.layers.len()];
    let micro_batch = MicroBatch { dtype: E::DTYPE, logits_dtype, tile, ..micro_batch(&shape, &policies) };
    let mut harness = Harness::of::<E>(micro_batch, StreamOrder::Adversary { seed: 3 });
    let output = harness.model.head.output.weight.value;
    let weights: Vec<E> = harness.download::<E>(output).into_iter().map(|x| E::from_f32(SCALE * x.to_f32())).collect();
    harness.upload(&weights, output);
    harness.feed(0);
    harness.forward();
    let micro = whole(&harness.model);
    harness.model.head(&mut harness.dev, micro, Some(HeadGradients::All)).unwrap();
    let act = &harness.model.activations;
    let (hidden, gradients, targets, stats) = (act.final_norm_out, act.dnorm, act.targets, act.loss_stats);
    let wide = |values: Vec<E>| values.into_iter().map(|x| f64::from(x.to_f32())).collect::<Vec<_>>();
    let (hidden, gradients, targets) =
        (wide(harness.download(hidden)), wide(harness.download(gradients)), harness.download::<i32>(targets));
    let want = in_f64(&hidden, &wide(weights), &targets, shape.channels);
    // The statistics are those of the last rows.
    let stats = harness.download::<f32>(stats);
    let logp = |[max, sum, target]: &[f32; 3]| f64::from(*target) - f64::from(*max) - f64::from(*sum).ln();
    let have: Vec<f64> = stats.as_chunks::<3>().0.iter().map(logp).collect();
    let last = (targets.len() - 1) / have.len() * have.len();
    let off = want.logps[last..].iter().zip(&have).map(|(want, have)| (want - have).abs()).fold(0.0, f64::max);
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let apart = norm(&mut gradients.iter().zip(&want.gradients).map(|(a, b)| a - b));
    [off, apart / norm(&mut want.gradients.iter().copied())]
}

fn in_f64(hidden: &[f64], weights: &[f64], targets: &[i32], channels: usize) -> HeadNumbers {
    let (mut logps, mut gradients) = (Vec::new(), Vec::new());
    for (hidden, target) in hidden.chunks_exact(channels).zip(targets) {
        let dot = |row: &[f64]| row.iter().zip(hidden).map(|(w, h)| w * h).sum::<f64>();
        let logits: Vec<f64> = weights.chunks_exact(channels).map(dot).collect();
        let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = logits.iter().map(|x| (x - max).exp()).sum();
        logps.push(logits[*target as usize] - max - sum.ln());
        let mut gradient = vec![0.0; channels];
        for (token, (row, logit)) in weights.chunks_exact(channels).zip(&logits).enumerate() {
            let slope = (logit - max).exp() / sum - if token == *target as usize { 1.0 } else { 0.0 };
            gradient.iter_mut().zip(row).for_each(|(gradient, w)| *gradient += slope / targets.len() as f64 * w);
        }
        gradients.extend(gradient);
    }
    HeadNumbers { logps, gradients }
}

#[test]
fn log_probabilities_of_fp32_logits_are_ten_times_nearer_to_f64() {
    let tiles = [
        ONE_TILE,
        LossTile { rows: 12, vocab: 27, tail: 0 },
        LossTile { rows: 24, vocab: usize::MAX, tail: 0 },
        LossTile { rows: 48, vocab: 64, tail: 13 },
    ];
    for tile in tiles {
        let [narrow, wide] = [Dtype::Bfloat16, Dtype::Float32].map(|logits| distances::<half::bf16>(logits, tile));
        assert!(wide[0] < 1e-4 && narrow[0] > 0.04 && wide[0] * 10.0 < narrow[0], "{tile}: {wide:?} with fp32 logits, else {narrow:?}");
        assert!(wide[1] < 0.005 && wide[1] * 3.0 < narrow[1], "{tile}: gradients {wide:?} with fp32 logits, else {narrow:?}");
        let [narrow, wide] = [Dtype::Float16, Dtype::Float32].map(|logits| distances::<half::f16>(logits, tile));
        assert!(wide[0] < 1e-4 && wide[0] * 10.0 < narrow[0], "{tile}: {wide:?} with fp32 logits of float16, else {narrow:?}");
        assert!(wide[1] < 0.001 && wide[1] * 3.0 < narrow[1], "{tile}: gradients {wide:?} with fp32 logits of float16, else {narrow:?}");
    }
}
