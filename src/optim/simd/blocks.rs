//! Execution of a pass block by block.

use super::lifting::DenormalWatch;
use super::{AdamKernels, ArraySpan, BLOCK, Isa, LINE_BYTES, PassAccess, Stores, shells};
use std::ops::Range;

impl AdamKernels {
    /// Runs `pass` block by block over `elems` elements of `arrays`; `pass` returns whether it was careful and found small numbers. Blocks
    /// begin where all `written` arrays begin a cache line, if there are such elements.
    ///
    /// Careful blocks run in a separate function, because beside them the compiler generates worse code for ordinary blocks. The elements
    /// before and behind the blocks, and all elements without vectors, go through scalar code, so that each pass is compiled five times
    /// for x86-64: two functions for each vector instruction set, and scalar code.
    #[inline(always)]
    pub(super) fn run_blocks<S, const W: usize>(
        self,
        elems: usize,
        written: [ArraySpan; W],
        arrays: S,
        pass: impl Fn(&mut S, PassAccess, Range<usize>) -> bool + Copy,
    ) {
        assert!(written.iter().all(|place| place.elems == elems), "every array that is written must be as long as the gradients");
        let lead = (0..BLOCK).find(|&lead| written.iter().all(|place| place.at(lead).is_multiple_of(LINE_BYTES)));
        self.run_blocks_from(lead.unwrap_or(0), lead.is_some(), elems, arrays, pass);
    }

    /// [`AdamKernels::run_blocks`] with blocks from element `lead` on; `lines` says whether they begin at cache lines.
    #[inline(always)]
    pub(super) fn run_blocks_from<S>(
        self,
        lead: usize,
        lines: bool,
        elems: usize,
        mut arrays: S,
        pass: impl Fn(&mut S, PassAccess, Range<usize>) -> bool + Copy,
    ) {
        let start = lead.min(elems);
        let end = if self.isa == Isa::Scalar { start } else { elems - (elems - start) % BLOCK };
        let mut next = start;
        while next < end {
            (next, arrays) = self.run_vectors(
                #[inline(always)]
                move |isa| self.run_ordinary(self.access(isa, lines), next..end, arrays, pass),
            );
            (next, arrays) = self.run_vectors(
                #[inline(always)]
                move |isa| self.run_careful(self.access(isa, lines), next..end, arrays, pass),
            );
        }
        for edge in [0..start, end..elems] {
            for block in edge.clone().step_by(BLOCK) {
                pass(&mut arrays, self.access(Isa::Scalar, false), block..edge.end.min(block + BLOCK));
            }
        }
        shells::fence();
    }

    /// Memory access for blocks; `lines` says whether they begin at cache lines.
    #[inline(always)]
    fn access(self, isa: Isa, lines: bool) -> PassAccess {
        let lines = lines && isa != Isa::Scalar;
        PassAccess {
            isa,
            stream_state: lines && self.stores == Stores::Streaming,
            stream_out: lines && self.stores != Stores::Temporal,
            prefetch_elems: self.prefetch_elems,
            careful: false,
        }
    }

    /// Runs blocks until the CPU's flags show a denormal number. Returns the beginning of the next block.
    #[inline(always)]
    fn run_ordinary<S>(
        self,
        access: PassAccess,
        at: Range<usize>,
        mut arrays: S,
        pass: impl Fn(&mut S, PassAccess, Range<usize>) -> bool,
    ) -> (usize, S) {
        let (mut next, mut watch) = (at.start, DenormalWatch::new(access.isa));
        while next < at.end && !watch.is_careful() {
            let stop = at.end.min(next + DenormalWatch::ELEMS);
            for block in (next..stop).step_by(BLOCK) {
                pass(&mut arrays, access, block..block + BLOCK);
            }
            next = stop;
            watch.poll();
        }
        (next, arrays)
    }

    /// Runs blocks with checks until no small block is expected. Returns the beginning of the next block.
    #[inline(always)]
    fn run_careful<S>(
        self,
        access: PassAccess,
        at: Range<usize>,
        mut arrays: S,
        pass: impl Fn(&mut S, PassAccess, Range<usize>) -> bool,
    ) -> (usize, S) {
        let (mut next, mut watch) = (at.start, DenormalWatch::new(access.isa));
        while next < at.end && watch.is_careful() {
            let (stop, mut small) = (at.end.min(next + DenormalWatch::ELEMS), false);
            for block in (next..stop).step_by(BLOCK) {
                small |= pass(&mut arrays, PassAccess { careful: true, ..access }, block..block + BLOCK);
            }
            next = stop;
            watch.saw(small);
        }
        (next, arrays)
    }
}
