//! The arithmetic of the CPU device on plain slices, independent of streams and devices.
//!
//! Every output element and every sum has one fixed order, so results do not depend on the number of threads, on timing or on the
//! instruction set. Block sizes follow from shapes alone.

pub(super) mod arithmetic;
pub(crate) mod attention;
pub(crate) mod attention_backward;
pub(crate) mod cross_entropy;
pub(crate) mod delta;
pub(crate) mod delta_backward;
mod delta_chunk;
mod delta_inputs;
#[cfg(test)]
mod delta_tests;
pub(crate) mod embed;
pub(crate) mod experts;
pub(crate) mod gated_norm;
pub(crate) mod grouped;
pub(crate) mod isa;
pub(crate) mod key_gradients;
mod latent;
pub(crate) mod math;
pub(crate) mod matmul;
mod mxfp4;
pub(crate) mod norm;
mod normed_values;
pub(crate) mod optimizer;
mod pair_losses;
pub(crate) mod panels;
pub(crate) mod pointwise;
mod policy_losses;
pub(crate) mod qk_norm;
pub(crate) mod quantize;
pub(crate) mod reduce;
pub(crate) mod rope;
pub(crate) mod route;
mod scores;
pub(crate) mod short_conv;
pub(crate) mod sinks;
pub(crate) mod split;
mod sum;
mod teacher;
mod transfer;

use super::team::Team;
use crate::error::Result;
use isa::KernelIsa;
use std::ops::Range;

/// Terms of one block of a long fp32 sum. A block is one chain in ascending order, and the blocks are added in ascending order, so the
/// rounding error grows with the length of a block and the number of blocks, not with their product. The recipe records it.
pub(crate) const SUM_BLOCK: usize = 128;
/// Rows of one block in kernels that process rows.
const ROW_BLOCK: usize = 64;
/// Columns that are summed at a time in sums over rows.
const SUMS: usize = 64;

/// The resources of kernels: threads, the instruction set, and scratch memory that grows when a shape first needs it.
pub(crate) struct Compute {
    pub(crate) team: Team,
    pub(crate) isa: KernelIsa,
    /// Scratch shared by all threads: packed matrices, partial sums.
    shared: Buffer,
    /// Scratch with one equal part for each thread.
    local: Buffer,
    /// Tokens in sorted order.
    sorted: Vec<u64>,
    /// Documents of a micro-batch, as ranges of tokens.
    documents: Vec<Range<usize>>,
}

impl Compute {
    /// `threads` threads (the caller's included) on instruction set `isa`.
    ///
    /// # Errors
    /// `Resource` when a thread cannot be started.
    pub(crate) fn new(threads: usize, isa: KernelIsa) -> Result<Self> {
        Ok(Self {
            team: Team::new(threads)?,
            isa,
            shared: Buffer::default(),
            local: Buffer::default(),
            sorted: Vec::new(),
            documents: Vec::new(),
        })
    }
}

#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
struct CacheLine([f32; 16]);

/// Reusable scratch, aligned to cache lines. Its content is undefined: it holds the values of its last use.
#[derive(Default)]
struct Buffer(Vec<CacheLine>);

impl Buffer {
    /// Returns `elems` floats; allocates only if no earlier call requested as many.
    fn get(&mut self, elems: usize) -> &mut [f32] {
        let lines = elems.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, CacheLine([0.0; 16]));
        }
        &mut bytemuck::cast_slice_mut(&mut self.0[..lines])[..elems]
    }
}

/// Splits a scratch slice into consecutive parts.
struct Arena<'a>(&'a mut [f32]);

impl<'a> Arena<'a> {
    /// The next `elems` floats.
    fn take(&mut self, elems: usize) -> &'a mut [f32] {
        let (part, rest) = std::mem::take(&mut self.0).split_at_mut(elems);
        self.0 = rest;
        part
    }
}

#[cfg(test)]
pub(crate) mod testing;
