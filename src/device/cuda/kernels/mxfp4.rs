//! Expansion of matrices in MXFP4.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::grid::whole_vectors;
use crate::device::{ExpandMxfp4, Kernel, Stream};
use crate::error::{Error, Result};

pub(super) const SOURCE: PtxSource = PtxSource { file: ptx_file!("generated/mxfp4.ptx"), typed: &[], plain: &["expand_mxfp4"] };

/// Constants of `mxfp4.cu`: threads of a block, codes in a word, and words of a thread.
const THREADS: usize = 256;
const CODES: usize = 8;
const WORDS_EACH: usize = 4;

impl GpuKernel for ExpandMxfp4 {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { codes, scales, out } = self;
        if !whole_vectors(out.elems(), &[out]) || !codes.addr().is_multiple_of(4) {
            let (codes, out) = (codes.addr(), out.addr());
            return Err(Error::Unsupported(format!("MXFP4 from {codes:x} to {out:x}: the kernel takes multiples of 4 and of 16 bytes")));
        }
        let words = out.elems() / CODES;
        let blocks = LaunchConfig::new(size(words.div_ceil(THREADS * WORDS_EACH))?, THREADS as u32);
        queue.launch(Stream::Compute, Self::NAME, None, blocks, args![codes, scales, out, words as u64])
    }
}
