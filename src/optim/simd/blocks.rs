//! How a pass runs block by block.

use super::lifting::DenormalWatch;
use super::{AdamKernels, ArraySpan, BLOCK, Isa, LINE_BYTES, PassAccess, Stores, shells};
use std::ops::Range;

impl AdamKernels {
    /// Runs `pass`, which returns whether it was careful and met small numbers, block by block over `elems` elements of `arrays`. Blocks
    /// begin where all that is `written` begins lines, if such elements exist.
    ///
    /// Careful blocks run in a function of their own: beside them the compiler makes worse of the ordinary ones.
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

    /// Access to arrays that begin blocks where they begin `lines`, or elsewhere.
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

    /// Blocks until the CPU makes its note. Returns where the next one begins.
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
            watch.ask();
        }
        (next, arrays)
    }

    /// Blocks that are looked at, until none is expected to be small. Returns where the next one begins.
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
