//! One chunk of the gated delta rule for one value head: its inputs, and the solution of its triangular system.
//!
//! With the decay `D_ij = e^(g_i - g_j)` from token `j` to token `i` of a chunk, `g` the running sum of `al`, the corrections of all tokens
//! follow from the state `S` before the chunk: `(I + A) N = beta v - beta e^g k S`, `A_ij = beta_i (k_i k_j) D_ij` for `i > j`. Exponents are
//! differences that are never positive.

use super::Arena;
use super::delta_inputs::{DeltaInputs, RuleHeads};
use super::isa::{KernelIsa, vectorised};
use super::math::exp;
use super::reduce::{fold, fold2};
use crate::device::{CHUNK, UNIT_EPS};
use crate::dtype::Element;
use std::ops::Range;

/// Matrices have a row for each token of the chunk.
pub(super) struct Chunk<'a> {
    /// Channels of a head.
    pub(super) d: usize,
    /// Queries of unit length, divided by the root of `d`.
    pub(super) q: &'a mut [f32],
    /// Keys of unit length.
    pub(super) k: &'a mut [f32],
    pub(super) v: &'a mut [f32],
    pub(super) beta: &'a mut [f32],
    /// Logarithms of the decays.
    pub(super) al: &'a mut [f32],
    /// Their running sum.
    pub(super) g: &'a mut [f32],
    /// `D`, zero above the diagonal.
    pub(super) decay: &'a mut [f32],
    /// `A`, zero on the diagonal and above.
    pub(super) a: &'a mut [f32],
    /// `(q_i k_j) D_ij`, zero above the diagonal.
    pub(super) p: &'a mut [f32],
    /// `(I + A)^-1 beta v`
    pub(super) u: &'a mut [f32],
    /// `(I + A)^-1 beta e^g k`
    pub(super) w: &'a mut [f32],
    /// The corrections `u - w S`.
    pub(super) new: &'a mut [f32],
    /// `e^g q`, later `e^(g_last - g) k`
    pub(super) scaled: &'a mut [f32],
}

impl<'a> Chunk<'a> {
    /// Floats of a chunk's matrices.
    pub(super) fn elems(d: usize) -> usize {
        7 * CHUNK * d + 3 * CHUNK + 3 * CHUNK * CHUNK
    }

    pub(super) fn new(arena: &mut Arena<'a>, d: usize) -> Self {
        let mut rows = || arena.take(CHUNK * d);
        let [q, k, v, u, w, new, scaled] = std::array::from_fn(|_| rows());
        let mut squares = || arena.take(CHUNK * CHUNK);
        let [decay, a, p] = std::array::from_fn(|_| squares());
        let [beta, al, g] = std::array::from_fn(|_| arena.take(CHUNK));
        Self { d, q, k, v, beta, al, g, decay, a, p, u, w, new, scaled }
    }

    /// Reads `tokens` and solves the system; `new` is not yet computed.
    pub(super) fn load<T: Element>(&mut self, isa: KernelIsa, input: &DeltaInputs<'_, T>, heads: RuleHeads, tokens: Range<usize>) {
        let (d, n) = (self.d, tokens.len());
        let scale = 1.0 / (d as f32).sqrt();
        for (row, token) in tokens.clone().enumerate() {
            let [q, k, v] = input.rows(token, heads);
            let at = row * d..(row + 1) * d;
            unit(isa, q, scale, &mut self.q[at.clone()]);
            unit(isa, k, 1.0, &mut self.k[at.clone()]);
            self.v[at].iter_mut().zip(v).for_each(|(out, x)| *out = x.to_f32());
        }
        let mut sum = 0.0f32;
        for (row, token) in tokens.enumerate() {
            (self.al[row], self.beta[row]) = input.gates(token, heads.value);
            sum += self.al[row];
            self.g[row] = sum;
        }
        scores(isa, d, (&self.q[..n * d], &self.k[..n * d]), (self.g, self.beta), (self.decay, self.a, self.p));
        for row in 0..n {
            let (beta, decayed) = (self.beta[row], self.beta[row] * exp(self.g[row]));
            let at = row * d..(row + 1) * d;
            self.u[at.clone()].iter_mut().zip(&self.v[at.clone()]).for_each(|(u, v)| *u = beta * v);
            self.w[at.clone()].iter_mut().zip(&self.k[at]).for_each(|(w, k)| *w = decayed * k);
        }
        solve(isa, self.a, d, &mut self.u[..n * d]);
        solve(isa, self.a, d, &mut self.w[..n * d]);
    }

    /// Computes the corrections of the first `n` tokens from the `state` before the chunk.
    pub(super) fn correct(&mut self, isa: KernelIsa, n: usize, state: &[f32]) {
        let d = self.d;
        self.new[..n * d].copy_from_slice(&self.u[..n * d]);
        add_product(isa, -1.0, (&self.w[..n * d], d), (state, d), &mut self.new[..n * d]);
    }

    /// Sets `scaled` to queries times their decay since the beginning of the chunk.
    pub(super) fn decay_queries(&mut self, n: usize) {
        for row in 0..n {
            let (at, decay) = (row * self.d..(row + 1) * self.d, exp(self.g[row]));
            self.scaled[at.clone()].iter_mut().zip(&self.q[at]).for_each(|(out, q)| *out = decay * q);
        }
    }

    /// Decay from token `row` to the last of `n` tokens.
    pub(super) fn until_end(&self, n: usize, row: usize) -> f32 {
        exp(self.g[n - 1] - self.g[row])
    }

    /// Moves the `state` from before the chunk to its end.
    pub(super) fn advance(&mut self, isa: KernelIsa, n: usize, state: &mut [f32]) {
        let (d, whole) = (self.d, exp(self.g[n - 1]));
        for row in 0..n {
            let (at, decay) = (row * d..(row + 1) * d, self.until_end(n, row));
            self.scaled[at.clone()].iter_mut().zip(&self.k[at]).for_each(|(out, k)| *out = decay * k);
        }
        state.iter_mut().for_each(|x| *x *= whole);
        add_transposed(isa, 1.0, (&self.scaled[..n * d], d), (&self.new[..n * d], d), state);
    }
}

vectorised! {
    /// Writes `x` with length `scale`, and returns the reciprocal of its length.
    pub(super) fn unit<T>(x: &[T], scale: f32, out: &mut [f32]) -> f32 {
        let reciprocal = 1.0 / (fold(x, |sum, x| x.mul_add(x, sum)) + UNIT_EPS).sqrt();
        out.iter_mut().zip(x).for_each(|(out, x)| *out = x.to_f32() * reciprocal * scale);
        reciprocal
    }
}

vectorised! {
    /// Fills the square matrices of a chunk of vectors with `d` channels; their rows have [`CHUNK`] columns.
    fn scores(d: usize, vectors: (&[f32], &[f32]), gates: (&[f32], &[f32]), out: (&mut [f32], &mut [f32], &mut [f32])) {
        let ((q, k), (g, beta), (decay, a, p)) = (vectors, gates, out);
        for row in 0..q.len() / d {
            let at = row * CHUNK..(row + 1) * CHUNK;
            let (decay, a, p) = (&mut decay[at.clone()], &mut a[at.clone()], &mut p[at]);
            [&mut *decay, &mut *a, &mut *p].into_iter().for_each(|row| row.fill(0.0));
            let (q, own) = (&q[row * d..][..d], &k[row * d..][..d]);
            for (col, k) in k.chunks_exact(d).enumerate().take(row + 1) {
                decay[col] = exp(g[row] - g[col]);
                p[col] = fold2(q, k, |sum, q, k| q.mul_add(k, sum)) * decay[col];
                if col < row {
                    a[col] = beta[row] * fold2(own, k, |sum, a, b| a.mul_add(b, sum)) * decay[col];
                }
            }
        }
    }
}

vectorised! {
    /// `x = (I + A)^-1 x`, for rows of `d`.
    pub(super) fn solve(a: &[f32], d: usize, x: &mut [f32]) {
        for row in 1..x.len() / d {
            let (before, own) = x.split_at_mut(row * d);
            for (x, factor) in before.chunks_exact(d).zip(&a[row * CHUNK..]) {
                own[..d].iter_mut().zip(x).for_each(|(own, x)| *own = (-factor).mul_add(*x, *own));
            }
        }
    }
}

vectorised! {
    /// `x = (I + A)^-T x`, for rows of `d`.
    pub(super) fn solve_transposed(a: &[f32], d: usize, x: &mut [f32]) {
        for row in (1..x.len() / d).rev() {
            let (before, own) = x.split_at_mut(row * d);
            for (x, factor) in before.chunks_exact_mut(d).zip(&a[row * CHUNK..]) {
                x.iter_mut().zip(&own[..d]).for_each(|(x, own)| *x = (-factor).mul_add(*own, *x));
            }
        }
    }
}

vectorised! {
    /// `c += scale a b`, for a matrix `b` of as many rows as `a` has columns, `inner`, and rows of `c` as long as those of `b`.
    pub(super) fn add_product(scale: f32, a: (&[f32], usize), b: (&[f32], usize), c: &mut [f32]) {
        let ((a, inner), (b, cols)) = (a, b);
        for (a, c) in a.chunks(inner).zip(c.chunks_exact_mut(cols)) {
            for (factor, b) in a.iter().zip(b.chunks_exact(cols)) {
                let factor = scale * factor;
                c.iter_mut().zip(b).for_each(|(c, b)| *c = factor.mul_add(*b, *c));
            }
        }
    }
}

vectorised! {
    /// `c += scale a^T b`; `a` and `b` have equally many rows.
    pub(super) fn add_transposed(scale: f32, a: (&[f32], usize), b: (&[f32], usize), c: &mut [f32]) {
        let ((a, inner), (b, cols)) = (a, b);
        for (a, b) in a.chunks(inner).zip(b.chunks_exact(cols)) {
            for (factor, c) in a.iter().zip(c.chunks_exact_mut(cols)) {
                let factor = scale * factor;
                c.iter_mut().zip(b).for_each(|(c, b)| *c = factor.mul_add(*b, *c));
            }
        }
    }
}

vectorised! {
    /// `c += scale a b^T`, for rows of `inner` in `a` and `b`; a row of `c` has `pitch` columns, of which there are as many as `b` has rows.
    pub(super) fn add_dots(scale: f32, a: &[f32], b: &[f32], inner: usize, c: (&mut [f32], usize)) {
        for (a, c) in a.chunks_exact(inner).zip(c.0.chunks_mut(c.1)) {
            for (b, c) in b.chunks_exact(inner).zip(c) {
                *c += scale * fold2(a, b, |sum, a, b| a.mul_add(b, sum));
            }
        }
    }
}

vectorised! {
    pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
        fold2(a, b, |sum, a, b| a.mul_add(b, sum))
    }
}
