//! Products that the library computes in parts: which parts there are, and where their operands lie.
//!
//! The sum over `k` is cut into slices whose sums are fp32 matrices; a kernel adds them in their order. Rows of the result are computed in
//! blocks, so that the matrices fit the kernels' scratch memory.

use super::request::{ALIGNED, CallBatch, Formats, LibraryProduct, ProductKey};
use crate::device::footprint::gpu::SCRATCH_BYTES;
use crate::device::{MatmulLayout, MatmulShape, ProductWay};
use crate::dtype::Dtype;
use std::ops::Range;

/// Elements of scratch memory, in fp32.
pub(super) const SCRATCH_ELEMS: usize = SCRATCH_BYTES / 4;
/// Terms of a slice that is short: more slices than this requires are not tried, apart from [`SLICES_MAX`].
const TERMS_MAX: usize = 32_768;
/// Most slices of sums that need fewer to be short.
const SLICES_MAX: usize = 8;
/// Slices of factors whose rows are sums begin at multiples of this number of bytes, which FP8 operands require.
const GRAIN_BYTES: usize = 16;
/// The rows of a block and the terms of widened slices are multiples of the edge of a tile if possible, else of the smaller number.
const TILES: [usize; 2] = [128, 16];
/// Elements between matrices in scratch memory are multiples of this number, so that all have the alignment of the first.
const APART: usize = ALIGNED as usize / 4;

/// How the slices of a block are computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Course {
    /// All in one call.
    AtOnce,
    /// One call for each.
    InTurn,
    /// 8-bit factors, widened to bfloat16 slice by slice; each slice is added to the sum of the earlier ones.
    Widened,
}

/// How a product is cut into parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProductCut {
    key: ProductKey,
    /// Rows of a block; the last block may have fewer.
    rows: usize,
    /// Terms of a slice; the last slice may have fewer.
    terms: usize,
    pub(crate) course: Course,
}

/// A part of a product: some rows of the result, and some terms of their sums.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ProductPart {
    pub(crate) rows: Range<usize>,
    pub(crate) terms: Range<usize>,
}

impl ProductCut {
    /// Slices of equal length, except the last, in `elems` of scratch. `None` if `k` has not so many slices, or no block of rows fits.
    pub(crate) fn in_slices(key: &ProductKey, slices: usize, course: Course, elems: usize) -> Option<Self> {
        let MatmulShape { m, n, k, .. } = key.shape;
        let terms = k.div_ceil(slices).next_multiple_of(GRAIN_BYTES / key.formats.a.bytes());
        let is_possible = if course == Course::AtOnce { slices * terms == k } else { (slices - 1) * terms < k };
        let rows = fitting((elems / slices).saturating_sub(APART) / n).map(|rows| rows.min(m));
        rows.filter(|_| is_possible).map(|rows| Self { key: *key, rows, terms, course })
    }

    /// Slices of widened factors, in `elems` of scratch: half of it for sums, the rest for factors. `None` if none fits.
    pub(crate) fn widened(key: &ProductKey, elems: usize) -> Option<Self> {
        let MatmulShape { m, n, k, .. } = key.shape;
        let rows = fitting((elems / 2).saturating_sub(APART) / n)?.min(m);
        // Two elements of a factor in the place of one of a sum.
        let terms = fitting((elems / 2).saturating_sub(2 * APART) * 2 / (rows + n))?.min(k);
        Some(Self { key: *key, rows, terms, course: Course::Widened })
    }

    /// The numbers of slices into which attempts cut a sum of `k` terms: two, which is the fastest, and more while slices are refused.
    pub(super) fn counts(k: usize) -> impl Iterator<Item = usize> {
        let last = k.div_ceil(TERMS_MAX).next_power_of_two().max(SLICES_MAX);
        std::iter::successors(Some(2), |count| Some(2 * count)).take_while(move |count| *count <= last)
    }

    pub(crate) fn slices(&self) -> usize {
        self.key.shape.k.div_ceil(self.terms)
    }

    /// For logs.
    pub(super) fn way(&self) -> ProductWay {
        if self.course == Course::Widened { ProductWay::Widened } else { ProductWay::Slices(self.slices()) }
    }

    /// Elements between the sums of two slices.
    pub(crate) fn sums_apart(&self) -> usize {
        (self.rows * self.key.shape.n).next_multiple_of(APART)
    }

    /// Matrices of fp32 sums that exist at once.
    pub(crate) fn sums(&self) -> usize {
        if self.course == Course::Widened { 1 } else { self.slices() }
    }

    /// First elements of the widened factors, and the end, in fp32 elements of scratch.
    pub(crate) fn factors(&self) -> [usize; 3] {
        let narrow = |rows: usize| if self.course == Course::Widened { (rows * self.terms).div_ceil(2).next_multiple_of(APART) } else { 0 };
        let a = self.sums() * self.sums_apart();
        let b = a + narrow(self.rows);
        [a, b, b + narrow(self.key.shape.n)]
    }

    /// Elements of scratch, in fp32.
    pub(crate) fn scratch_elems(&self) -> usize {
        self.factors()[2]
    }

    /// Blocks of rows.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        pieces(self.key.shape.m, self.rows)
    }

    /// The slices of a block; the first, for all of them at once.
    pub(crate) fn parts(&self, rows: &Range<usize>) -> impl Iterator<Item = ProductPart> + use<> {
        let (rows, calls) = (rows.clone(), if self.course == Course::AtOnce { 1 } else { usize::MAX });
        pieces(self.key.shape.k, self.terms).take(calls).map(move |terms| ProductPart { rows: rows.clone(), terms })
    }

    /// Every call that the product needs, each once.
    pub(super) fn calls(&self) -> Vec<LibraryProduct> {
        let mut all = Vec::new();
        for rows in self.blocks() {
            for call in self.parts(&rows).map(|part| self.call(&part)) {
                if !all.contains(&call) {
                    all.push(call);
                }
            }
        }
        all
    }

    /// The call that computes `part`, or with it all slices of its block.
    pub(crate) fn call(&self, part: &ProductPart) -> LibraryProduct {
        let (m, k, MatmulShape { layout, n, .. }) = (part.rows.len(), part.terms.len(), self.key.shape);
        let shape = MatmulShape { layout, m, n, k };
        if self.course == Course::Widened {
            let formats = Formats { a: Dtype::Bfloat16, b: Dtype::Bfloat16, c: Dtype::Float32 };
            return LibraryProduct { shape, pitches: [k, k, n], formats, alignments: [ALIGNED; 4], bias: 0, batch: None };
        }
        let strides = [self.places([0, self.terms]), [self.sums_apart(), 0]];
        let batch = (self.course == Course::AtOnce)
            .then(|| CallBatch { count: self.slices(), strides: [strides[0][0], strides[0][1], strides[1][0]] });
        let formats = Formats { c: Dtype::Float32, ..self.key.formats };
        let [a, b] = self.key.pitches();
        LibraryProduct { shape, pitches: [a, b, n], formats, alignments: self.alignments(), bias: 0, batch }
    }

    /// First elements of a part's factors within a and b.
    pub(crate) fn first_elems(&self, part: &ProductPart) -> [usize; 2] {
        self.places([part.rows.start, part.terms.start])
    }

    /// Places of row `row` of the result and of term `term` within a and b.
    fn places(&self, [row, term]: [usize; 2]) -> [usize; 2] {
        let [a, b] = self.key.pitches();
        match self.key.shape.layout {
            MatmulLayout::Nt => [row * a + term, term],
            MatmulLayout::Nn => [row * a + term, term * b],
            MatmulLayout::Tn => [term * a + row, term * b],
        }
    }

    /// Alignments of all parts of a and b, and of their sums.
    fn alignments(&self) -> [u16; 4] {
        let (Formats { a, b, .. }, [of_a, of_b, ..]) = (self.key.formats, self.key.alignments);
        let row = if self.rows < self.key.shape.m { self.rows } else { 0 };
        let steps = [self.places([row, 0]), self.places([0, self.terms])];
        let of = |which: usize, whole: u16, bytes: usize| {
            let steps = steps.iter().map(|places| (places[which] * bytes) as u64).filter(|step| *step > 0);
            steps.fold(whole, |least, step| least.min(1 << step.trailing_zeros().min(ALIGNED.ilog2())))
        };
        [of(0, of_a, a.bytes()), of(1, of_b, b.bytes()), ALIGNED, ALIGNED]
    }
}

/// `count` rounded down to a multiple of one of [`TILES`]. `None` if it is smaller than both.
fn fitting(count: usize) -> Option<usize> {
    TILES.into_iter().map(|unit| count / unit * unit).find(|count| *count > 0)
}

/// Ranges of `each` that cover `all`; the last may be shorter.
fn pieces(all: usize, each: usize) -> impl Iterator<Item = Range<usize>> {
    (0..all).step_by(each).map(move |start| start..all.min(start + each))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::ProductRequest;

    fn key(layout: MatmulLayout, (m, n, k): (usize, usize, usize), a: Dtype) -> ProductKey {
        let formats = [a, if a.is_fp8() { Dtype::Float8E4m3 } else { a }, Dtype::Bfloat16];
        ProductKey::aligned(ProductRequest { shape: MatmulShape { layout, m, n, k }, formats, bias: false })
    }

    const E5M2: Dtype = Dtype::Float8E5m2;
    const BF16: Dtype = Dtype::Bfloat16;

    #[test]
    fn sums_get_two_slices_and_more_until_they_are_short() {
        let counts = |k| ProductCut::counts(k).collect::<Vec<_>>();
        assert_eq!([counts(96), counts(1 << 18), counts((1 << 18) + 16)], [vec![2, 4, 8], vec![2, 4, 8], vec![2, 4, 8, 16]]);
    }

    #[test]
    fn slices_are_aligned_and_the_last_may_be_shorter() {
        let cut = |k, slices, course| ProductCut::in_slices(&key(MatmulLayout::Nt, (896, 896, k), E5M2), slices, course, SCRATCH_ELEMS);
        let terms = |cut: Option<ProductCut>| cut.map(|cut| cut.parts(&(0..896)).map(|part| part.terms.len()).collect::<Vec<_>>());
        assert_eq!(terms(cut(65_536, 2, Course::InTurn)), Some(vec![32_768; 2]));
        assert_eq!(terms(cut(65_520, 2, Course::InTurn)), Some(vec![32_768, 32_752]));
        assert_eq!(terms(cut(80, 4, Course::InTurn)), None, "three slices of 32 terms cover 80 terms");
        // One call takes slices of equal length only.
        assert_eq!((terms(cut(65_520, 2, Course::AtOnce)), terms(cut(65_536, 2, Course::AtOnce))), (None, Some(vec![32_768])));
    }

    #[test]
    fn every_cut_fits_the_scratch_that_is_planned() {
        for (m, n) in [(896, 896), (4864, 896), (28_672, 8192), (131_072, 53_248), (1, 1)] {
            for course in [Course::AtOnce, Course::InTurn] {
                for slices in [2, 8, 16] {
                    let cut = ProductCut::in_slices(&key(MatmulLayout::Nt, (m, n, 1 << 20), E5M2), slices, course, SCRATCH_ELEMS).unwrap();
                    assert!(cut.scratch_elems() <= SCRATCH_ELEMS && cut.blocks().map(|rows| rows.len()).sum::<usize>() == m, "{cut:?}");
                }
            }
            let cut = ProductCut::widened(&key(MatmulLayout::Nt, (m, n, 1 << 20), E5M2), SCRATCH_ELEMS).unwrap();
            assert!(cut.scratch_elems() <= SCRATCH_ELEMS && cut.parts(&(0..1)).map(|part| part.terms.len()).sum::<usize>() == 1 << 20);
        }
        // Not even 16 rows fit.
        assert_eq!(ProductCut::in_slices(&key(MatmulLayout::Nt, (16, 1 << 20, 64), E5M2), 2, Course::InTurn, SCRATCH_ELEMS), None);
        assert_eq!(ProductCut::widened(&key(MatmulLayout::Nt, (16, 1 << 22, 64), E5M2), SCRATCH_ELEMS), None);
    }

    #[test]
    fn a_part_begins_where_its_rows_and_terms_do() {
        let first = |layout| {
            let cut = ProductCut { key: key(layout, (300, 40, 512), BF16), rows: 128, terms: 256, course: Course::InTurn };
            cut.first_elems(&ProductPart { rows: 128..256, terms: 256..512 })
        };
        assert_eq!(MatmulLayout::ALL.map(first), [[128 * 512 + 256, 256], [128 * 512 + 256, 256 * 40], [256 * 300 + 128, 256 * 40]]);
    }

    #[test]
    fn every_call_of_a_cut_is_listed_once() {
        let cut = ProductCut { key: key(MatmulLayout::Tn, (300, 40, 700), BF16), rows: 128, terms: 256, course: Course::InTurn };
        let sizes: Vec<_> = cut.calls().iter().map(|call| (call.shape.m, call.shape.k)).collect();
        assert_eq!(sizes, [(128, 256), (128, 188), (44, 256), (44, 188)]);
        let call = cut.calls()[3];
        assert_eq!((call.pitches, call.formats.c, call.batch, call.bias), ([300, 40, 40], Dtype::Float32, None, 0));
        let at_once = ProductCut { key: key(MatmulLayout::Nt, (16, 40, 512), BF16), rows: 16, terms: 128, course: Course::AtOnce };
        let batch = CallBatch { count: 4, strides: [128, 128, 640] };
        assert_eq!((at_once.calls().len(), at_once.calls()[0].batch), (1, Some(batch)));
    }

    #[test]
    fn parts_are_aligned_as_their_steps_are() {
        let alignments = |layout, (m, n, k), rows, terms| {
            let course = Course::InTurn;
            ProductCut { key: key(layout, (m, n, k), BF16), rows, terms, course }.alignments()
        };
        assert_eq!(alignments(MatmulLayout::Nt, (896, 896, 65_536), 896, 32_768), [256; 4]);
        assert_eq!(alignments(MatmulLayout::Nt, (896, 896, 80), 896, 48), [32, 32, 256, 256]);
        // Steps of rows count only where there are several blocks.
        assert_eq!(alignments(MatmulLayout::Nn, (896, 7, 45), 96, 32), [64, 64, 256, 256]);
        assert_eq!(alignments(MatmulLayout::Tn, (33, 7, 64), 16, 32), [32, 64, 256, 256]);
    }
}
