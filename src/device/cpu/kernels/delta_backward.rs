//! The gated delta rule, backward: the states before all chunks of a document, then the chunks from the last to the first.
//!
//! A query and a key enter each product together with their decays, so the gradient of `g` follows from products of vectors with their own
//! gradients: `dg = <q, dq> + <k, parts of dk with e^g> - <k, parts of dk with e^-g>`.

use super::arithmetic::CpuArithmetic;
use super::delta_chunk::{Chunk, add_dots, add_product, add_transposed, dot, solve_transposed, unit};
use super::delta_inputs::{DeltaInputs, RuleHeads, chunks};
use super::isa::KernelIsa;
use super::math::{exp, sigmoid};
use super::reduce::store;
use super::split::{Bands, Chunks, MatMut};
use super::{Arena, Compute};
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{CHUNK, DeltaRuleBackward, DeltaShape};
use crate::dtype::Element;
use std::ops::Range;

impl CpuArithmetic for DeltaRuleBackward {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let [qkv, a, b, a_log, dt_bias] = [self.qkv, self.a, self.b, self.a_log, self.dt_bias].map(|slice| memory.read::<T>(slice));
        let documents = self.documents.map(|documents| memory.read(documents));
        let input = DeltaInputs { shape: self.shape, qkv, a, b, a_log, dt_bias, documents };
        let gradients = DeltaGradients {
            dqkv: memory.write(self.dqkv),
            da: memory.write(self.da),
            db: memory.write(self.db),
            da_log: memory.write(self.da_log),
            ddt_bias: memory.write(self.ddt_bias),
            accumulate: self.accumulate,
        };
        delta_rule_backward(cx, input, memory.read(self.dout), gradients);
    }
}

/// Results of [`DeltaRuleBackward`].
pub(crate) struct DeltaGradients<'a, T> {
    pub(crate) dqkv: &'a mut [T],
    pub(crate) da: &'a mut [T],
    pub(crate) db: &'a mut [T],
    pub(crate) da_log: &'a mut [T],
    pub(crate) ddt_bias: &'a mut [T],
    pub(crate) accumulate: bool,
}

/// See [`DeltaRuleBackward`]. The gradients of `a_log` and `dt_bias` are sums over the tokens of a chunk, then over the chunks of a document from
/// the last to the first, then over documents.
pub(crate) fn delta_rule_backward<T: Element>(cx: &mut Compute, input: DeltaInputs<'_, T>, dout: &[T], gradients: DeltaGradients<'_, T>) {
    let DeltaShape { key_heads, value_heads, width: d, .. } = input.shape;
    let (isa, sharing) = (cx.isa, value_heads / key_heads);
    let mut documents = std::mem::take(&mut cx.documents);
    input.list_documents(&mut documents);
    let elems = BackwardScratch::elems(d, documents.iter().map(Range::len).max().unwrap_or(0));
    let scratch = Chunks::new(cx.local.get(cx.team.threads() * elems), elems);
    let sums = cx.shared.get(2 * value_heads * documents.len());
    let (dq, rest) = MatMut::new(gradients.dqkv, input.shape.qkv_cols()).split_cols(key_heads * d);
    let (dk, dv) = rest.split_cols(key_heads * d);
    let [da, db] = [gradients.da, gradients.db].map(|gradient| Bands::new(MatMut::new(gradient, value_heads), &documents, sharing));
    let [dq, dk, dv] = [(dq, d), (dk, d), (dv, sharing * d)].map(|(gradient, cols)| Bands::new(gradient, &documents, cols));
    let parts = (((dq, dk), (dv, Chunks::new(&mut *sums, 2 * sharing))), (da, db));
    cx.team.for_each_with(scratch, parts, |scratch, unit, (((dq, dk), (mut dv, sums)), (mut da, mut db))| {
        let (document, key) = (&documents[unit / key_heads], unit % key_heads);
        let mut scratch = BackwardScratch::new(scratch, d, document.len());
        for (place, heads) in input.readers(key).enumerate() {
            let gradients = DeltaHeadGradients {
                dv: dv.columns(place * d..(place + 1) * d),
                da: da.columns(place..place + 1),
                db: db.columns(place..place + 1),
            };
            let of_head = head(isa, &input, dout, (document, heads), &mut scratch, gradients);
            sums[2 * place..][..2].copy_from_slice(&of_head);
        }
        scratch.store_vectors(isa, &input, (document, key), dq, dk);
    });
    for (which, out) in [gradients.da_log, gradients.ddt_bias].into_iter().enumerate() {
        for (head, out) in out.iter_mut().enumerate() {
            let sum: f32 = sums.iter().skip(2 * head + which).step_by(2 * value_heads).sum();
            store(isa, &[sum], gradients.accumulate, std::slice::from_mut(out));
        }
    }
    cx.documents = documents;
}

/// Gradients of one value head of a document.
struct DeltaHeadGradients<'a, T> {
    dv: MatMut<'a, T>,
    da: MatMut<'a, T>,
    db: MatMut<'a, T>,
}

/// The memory of a unit of work.
struct BackwardScratch<'a> {
    d: usize,
    chunk: Chunk<'a>,
    /// States before all chunks.
    states: &'a mut [f32],
    /// Gradient of the state.
    dstate: &'a mut [f32],
    /// Gradients of all queries and keys of the document, summed over value heads.
    dq: &'a mut [f32],
    dk: &'a mut [f32],
    dout: &'a mut [f32],
    /// Gradient of the corrections.
    dnew: &'a mut [f32],
    /// Gradients of `u` and `w` before the triangular system.
    du: &'a mut [f32],
    dw: &'a mut [f32],
    /// Parts of the gradients of queries and keys.
    part: &'a mut [f32],
    less: &'a mut [f32],
    /// Gradients of `A` and of `p`, times the decay.
    x: &'a mut [f32],
    y: &'a mut [f32],
    /// Gradients of `g`.
    dg: &'a mut [f32],
    /// Gradients of the gates `b`.
    db: &'a mut [f32],
}

impl<'a> BackwardScratch<'a> {
    /// Floats for documents of at most `tokens`.
    fn elems(d: usize, tokens: usize) -> usize {
        let states = tokens.div_ceil(CHUNK) + 1;
        Chunk::elems(d) + states * d * d + 2 * tokens * d + 6 * CHUNK * d + 2 * CHUNK * CHUNK + 2 * CHUNK
    }

    fn new(memory: &'a mut [f32], d: usize, tokens: usize) -> Self {
        let mut arena = Arena(memory);
        let chunk = Chunk::new(&mut arena, d);
        let (states, dstate) = (arena.take(tokens.div_ceil(CHUNK) * d * d), arena.take(d * d));
        let [dq, dk] = std::array::from_fn(|_| arena.take(tokens * d));
        let [dout, dnew, du, dw, part, less] = std::array::from_fn(|_| arena.take(CHUNK * d));
        let [x, y] = std::array::from_fn(|_| arena.take(CHUNK * CHUNK));
        let [dg, db] = std::array::from_fn(|_| arena.take(CHUNK));
        dq.fill(0.0);
        dk.fill(0.0);
        Self { d, chunk, states, dstate, dq, dk, dout, dnew, du, dw, part, less, x, y, dg, db }
    }

    /// Computes the states before all chunks.
    fn states<T: Element>(&mut self, isa: KernelIsa, input: &DeltaInputs<'_, T>, document: &Range<usize>, heads: RuleHeads) {
        let (size, all) = (self.d * self.d, chunks(document));
        let last = all.len() - 1;
        self.states[..size].fill(0.0);
        for (place, tokens) in all.take(last).enumerate() {
            let (state, next) = self.states[place * size..(place + 2) * size].split_at_mut(size);
            self.chunk.load(isa, input, heads, tokens.clone());
            self.chunk.correct(isa, tokens.len(), state);
            next.copy_from_slice(state);
            self.chunk.advance(isa, tokens.len(), next);
        }
    }

    /// Gradients of the corrections, of the scores and of the system's right-hand sides, for chunk `place` with `n` tokens.
    fn inner_gradients(&mut self, isa: KernelIsa, place: usize, n: usize) {
        let (d, state) = (self.d, &self.states[place * self.d * self.d..][..self.d * self.d]);
        let Self { chunk, dstate, dout, dnew, du, dw, x, y, .. } = self;
        let [dout, dnew, du, dw] = [dout, dnew, du, dw].map(|rows| &mut rows[..n * d]);
        dnew.fill(0.0);
        add_product(isa, 1.0, (&chunk.k[..n * d], d), (dstate, d), dnew);
        for (row, dnew) in dnew.chunks_exact_mut(d).enumerate() {
            let decay = chunk.until_end(n, row);
            dnew.iter_mut().for_each(|x| *x *= decay);
        }
        add_transposed(isa, 1.0, (&chunk.p[..n * CHUNK], CHUNK), (dout, d), dnew);
        y[..n * CHUNK].fill(0.0);
        add_dots(isa, 1.0, dout, &chunk.new[..n * d], d, (&mut y[..n * CHUNK], CHUNK));
        dw.fill(0.0);
        add_dots(isa, -1.0, dnew, state, d, (dw, d));
        du.copy_from_slice(dnew);
        solve_transposed(isa, chunk.a, d, du);
        solve_transposed(isa, chunk.a, d, dw);
        x[..n * CHUNK].fill(0.0);
        add_dots(isa, -1.0, du, &chunk.u[..n * d], d, (&mut x[..n * CHUNK], CHUNK));
        add_dots(isa, -1.0, dw, &chunk.w[..n * d], d, (&mut x[..n * CHUNK], CHUNK));
        for row in 0..n {
            for col in 0..n {
                let (at, decay) = (row * CHUNK + col, chunk.decay[row * CHUNK + col]);
                y[at] *= decay;
                x[at] *= if col < row { decay } else { 0.0 };
            }
        }
    }

    /// Adds the gradients of queries to those of the document from row `first` on, and begins `dg`.
    fn queries(&mut self, isa: KernelIsa, place: usize, n: usize, first: usize) {
        let (d, state) = (self.d, &self.states[place * self.d * self.d..][..self.d * self.d]);
        let Self { chunk, dout, part, y, dq, dg, .. } = self;
        let part = &mut part[..n * d];
        part.fill(0.0);
        add_dots(isa, 1.0, &dout[..n * d], state, d, (part, d));
        scale_rows(part, d, |row| exp(chunk.g[row]));
        add_product(isa, 1.0, (&y[..n * CHUNK], CHUNK), (&chunk.k[..n * d], d), part);
        for (row, part) in part.chunks_exact(d).enumerate() {
            dg[row] = dot(isa, &chunk.q[row * d..][..d], part);
        }
        dq[first * d..].iter_mut().zip(part).for_each(|(sum, x)| *sum += *x);
    }

    /// Adds the gradients of keys, and completes `dg` and `db`. Returns the gradient of the chunk's whole decay.
    fn keys(&mut self, isa: KernelIsa, place: usize, n: usize, first: usize) -> f32 {
        let (d, state) = (self.d, &self.states[place * self.d * self.d..][..self.d * self.d]);
        let Self { chunk, dstate, du, dw, part, less, x, y, dk, dg, db, .. } = self;
        let (k, part, less) = (&chunk.k[..n * d], &mut part[..n * d], &mut less[..n * d]);
        less.fill(0.0);
        add_dots(isa, 1.0, &chunk.new[..n * d], dstate, d, (less, d));
        scale_rows(less, d, |row| chunk.until_end(n, row));
        let whole = dot(isa, k, less) + exp(chunk.g[n - 1]) * dot(isa, dstate, state);
        add_transposed(isa, 1.0, (&y[..n * CHUNK], CHUNK), (&chunk.q[..n * d], d), less);
        scale_rows(&mut x[..n * CHUNK], CHUNK, |row| chunk.beta[row]);
        part.copy_from_slice(&dw[..n * d]);
        scale_rows(part, d, |row| chunk.beta[row] * exp(chunk.g[row]));
        add_product(isa, 1.0, (&x[..n * CHUNK], CHUNK), (k, d), part);
        add_transposed(isa, 1.0, (&x[..n * CHUNK], CHUNK), (k, d), less);
        for row in 0..n {
            let at = row * d..(row + 1) * d;
            let (k, part, less) = (&k[at.clone()], &part[at.clone()], &less[at.clone()]);
            let own = dot(isa, k, part);
            db[row] = (1.0 - chunk.beta[row]) * chunk.beta[row].mul_add(dot(isa, &chunk.v[at.clone()], &du[at]), own);
            dg[row] += own - dot(isa, k, less);
            dk[(first + row) * d..].iter_mut().zip(less).zip(part).for_each(|((sum, less), part)| *sum += *less + *part);
        }
        whole
    }

    /// Moves the gradient of the state from the end of the chunk to before it.
    fn retreat(&mut self, isa: KernelIsa, n: usize) {
        let (d, whole) = (self.d, exp(self.chunk.g[n - 1]));
        self.chunk.decay_queries(n);
        self.dstate.iter_mut().for_each(|x| *x *= whole);
        add_transposed(isa, 1.0, (&self.chunk.scaled[..n * d], d), (&self.dout[..n * d], d), self.dstate);
        add_transposed(isa, -1.0, (&self.chunk.w[..n * d], d), (&self.dnew[..n * d], d), self.dstate);
    }

    /// Writes the gradients of the document's queries and keys before they were scaled to unit length.
    fn store_vectors<T: Element>(
        &mut self,
        isa: KernelIsa,
        input: &DeltaInputs<'_, T>,
        (document, key): (&Range<usize>, usize),
        mut dq: MatMut<'_, T>,
        mut dk: MatMut<'_, T>,
    ) {
        let d = self.d;
        let scale = 1.0 / (d as f32).sqrt();
        let (x, gradient) = (&mut self.chunk.q[..d], &mut self.part[..d]);
        for (row, token) in document.clone().enumerate() {
            let [q, k, _] = input.rows(token, RuleHeads { key, value: 0 });
            for (raw, scale, sums, out) in [(q, scale, &self.dq, dq.row(row)), (k, 1.0, &self.dk, dk.row(row))] {
                let reciprocal = unit(isa, raw, 1.0, x);
                gradient.iter_mut().zip(&sums[row * d..]).for_each(|(gradient, sum)| *gradient = scale * sum);
                let along = dot(isa, x, gradient);
                let parts = out.iter_mut().zip(&*gradient).zip(&*x);
                parts.for_each(|((out, gradient), x)| *out = T::from_f32(reciprocal * (-along).mul_add(*x, *gradient)));
            }
        }
    }
}

/// One value head of a document, from its last chunk to its first. Returns the gradients of `a_log` and `dt_bias`.
fn head<T: Element>(
    isa: KernelIsa,
    input: &DeltaInputs<'_, T>,
    dout: &[T],
    (document, heads): (&Range<usize>, RuleHeads),
    scratch: &mut BackwardScratch<'_>,
    mut gradients: DeltaHeadGradients<'_, T>,
) -> [f32; 2] {
    let d = scratch.d;
    scratch.states(isa, input, document, heads);
    scratch.dstate.fill(0.0);
    let mut sums = [0.0; 2];
    for (place, tokens) in chunks(document).enumerate().rev() {
        let (n, first) = (tokens.len(), tokens.start - document.start);
        scratch.chunk.load(isa, input, heads, tokens.clone());
        scratch.chunk.correct(isa, n, &scratch.states[place * d * d..][..d * d]);
        for (row, token) in tokens.clone().enumerate() {
            let dout = &dout[(token * input.shape.value_heads + heads.value) * d..][..d];
            scratch.dout[row * d..].iter_mut().zip(dout).for_each(|(out, x)| *out = x.to_f32());
        }
        scratch.inner_gradients(isa, place, n);
        scratch.queries(isa, place, n, first);
        let whole = scratch.keys(isa, place, n, first);
        scratch.retreat(isa, n);
        for (row, du) in scratch.du[..n * d].chunks_exact(d).enumerate() {
            let beta = scratch.chunk.beta[row];
            gradients.dv.row(first + row).iter_mut().zip(du).for_each(|(out, x)| *out = T::from_f32(beta * x));
        }
        let of_chunk = gates(input, heads, (tokens, first), (scratch, whole), &mut gradients);
        sums.iter_mut().zip(of_chunk).for_each(|(sum, x)| *sum += x);
    }
    sums
}

/// Writes the gradients of the gates of a chunk; `whole` is that of its whole decay. Returns the chunk's part of the gradients of `a_log` and
/// `dt_bias`.
fn gates<T: Element>(
    input: &DeltaInputs<'_, T>,
    heads: RuleHeads,
    (tokens, first): (Range<usize>, usize),
    (scratch, whole): (&BackwardScratch<'_>, f32),
    gradients: &mut DeltaHeadGradients<'_, T>,
) -> [f32; 2] {
    let (slope, bias) = (-exp(input.a_log[heads.value].to_f32()), input.dt_bias[heads.value].to_f32());
    let (mut dal, mut sums) = (whole, [0.0f32; 2]);
    for (row, token) in tokens.enumerate().rev() {
        dal += scratch.dg[row];
        let gate = input.a[token * input.shape.value_heads + heads.value].to_f32() + bias;
        let da = slope * sigmoid(gate) * dal;
        sums[0] = scratch.chunk.al[row].mul_add(dal, sums[0]);
        sums[1] += da;
        gradients.da.row(first + row)[0] = T::from_f32(da);
        gradients.db.row(first + row)[0] = T::from_f32(scratch.db[row]);
    }
    sums
}

/// Multiplies each row of `d` by its factor.
fn scale_rows(rows: &mut [f32], d: usize, factor: impl Fn(usize) -> f32) {
    for (row, x) in rows.chunks_exact_mut(d).enumerate() {
        let factor = factor(row);
        x.iter_mut().for_each(|x| *x *= factor);
    }
}
