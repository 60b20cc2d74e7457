//! The gated delta rule, forward. A unit of work is a document and a key head, with the value heads that read it.

use super::arithmetic::CpuArithmetic;
use super::delta_chunk::{Chunk, add_product};
use super::delta_inputs::{DeltaInputs, RuleHeads, chunks};
use super::isa::KernelIsa;
use super::split::{Bands, Chunks, MatMut};
use super::{Arena, Compute};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{CHUNK, DeltaRule, DeltaShape};
use crate::dtype::Element;
use std::ops::Range;

impl CpuArithmetic for DeltaRule {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let [qkv, a, b, a_log, dt_bias] = [self.qkv, self.a, self.b, self.a_log, self.dt_bias].map(|slice| memory.read::<T>(slice));
        let documents = self.documents.map(|documents| memory.read(documents));
        delta_rule(cx, DeltaInputs { shape: self.shape, qkv, a, b, a_log, dt_bias, documents }, memory.write(self.out));
    }
}

/// See [`DeltaRule`].
pub(crate) fn delta_rule<T: Element>(cx: &mut Compute, input: DeltaInputs<'_, T>, out: &mut [T]) {
    let DeltaShape { key_heads, value_heads, width: d, .. } = input.shape;
    let (isa, sharing) = (cx.isa, value_heads / key_heads);
    let mut documents = std::mem::take(&mut cx.documents);
    input.list_documents(&mut documents);
    let elems = Chunk::elems(d) + d * d + CHUNK * d;
    let scratch = Chunks::new(cx.local.get(cx.team.threads() * elems), elems);
    let parts = Bands::new(MatMut::new(out, value_heads * d), &documents, sharing * d);
    cx.team.for_each_with(scratch, parts, |scratch, unit, mut out| {
        let (document, key) = (&documents[unit / key_heads], unit % key_heads);
        for (place, heads) in input.readers(key).enumerate() {
            head(isa, &input, (document, heads), scratch, out.columns(place * d..(place + 1) * d));
        }
    });
    cx.documents = documents;
}

/// One value head of a document.
fn head<T: Element>(
    isa: KernelIsa,
    input: &DeltaInputs<'_, T>,
    (document, heads): (&Range<usize>, RuleHeads),
    scratch: &mut [f32],
    mut out: MatMut<'_, T>,
) {
    let d = input.shape.width;
    let mut arena = Arena(scratch);
    let (state, sums) = (arena.take(d * d), arena.take(CHUNK * d));
    let mut chunk = Chunk::new(&mut arena, d);
    state.fill(0.0);
    for tokens in chunks(document) {
        let n = tokens.len();
        chunk.load(isa, input, heads, tokens.clone());
        chunk.correct(isa, n, state);
        chunk.decay_queries(n);
        let sums = &mut sums[..n * d];
        sums.fill(0.0);
        add_product(isa, 1.0, (&chunk.scaled[..n * d], d), (state, d), sums);
        add_product(isa, 1.0, (&chunk.p[..n * CHUNK], CHUNK), (&chunk.new[..n * d], d), sums);
        for (row, sums) in sums.chunks_exact(d).enumerate() {
            out.row(tokens.start - document.start + row).iter_mut().zip(sums).for_each(|(out, x)| *out = T::from_f32(*x));
        }
        chunk.advance(isa, n, state);
    }
}
