//! Execution of a pass block by block.

use super::lifting::DenormalWatch;
use super::{AdamKernels, ArraySpan, BLOCK, Isa, LINE_BYTES, PassAccess, Stores, shells};
use std::ops::Range;

impl AdamKernels {
    /// Runs `pass` block by block over `elems` elements of `arrays`; `pass` returns whether it was careful and found small numbers. Blocks
    /// begin where all `written` arrays begin a cache line, if there are such elements.
    ///
    /// Careful blocks run in a separate function, because beside them the compiler generates worse code for ordinary blocks.
    #[inline(always)]
    pub(super) fn run_blocks<S, const W: usize>(
        self,
        elems: usize,
        written: [ArraySpan; W],
        mut arrays: S,
        pass: impl Fn(&mut S, PassAccess, Range<usize>) -> bool + Copy,
    ) {
        assert!(written.iter().all(|place| place.elems == elems), "every array that is written must be as long as the gradients");
        let lead = (0..BLOCK).find(|&lead| written.iter().all(|place| place.at(lead).is_multiple_of(LINE_BYTES)));
        let start = lead.unwrap_or(0).min(elems);
        let end = elems - (elems - start) % BLOCK;
        let mut next = start;
        while next < end {
            (next, arrays) = self.run(
                #[inline(always)]
                move |isa| self.run_ordinary(self.access(isa, lead.is_some()), next..end, arrays, pass),
            );
            (next, arrays) = self.run(
                #[inline(always)]
                move |isa| self.run_careful(self.access(isa, lead.is_some()), next..end, arrays, pass),
            );
        }
        self.run(
            #[inline(always)]
            move |isa| {
                for edge in [0..start, end..elems] {
                    pass(&mut arrays, self.access(isa, false), edge);
                }
            },
        );
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
