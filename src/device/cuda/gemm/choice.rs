//! The rule by which a product gets its algorithm. It depends on the product's shape, formats and alignments and on the answers of the
//! library, so it has the same result in every process with this library on this GPU. It measures no time.
//!
//! 1. The library's first suggestion whose sums are fp32 in a fixed order and whose results are right.
//! 2. If it suggests only to split a long sum by an algorithm with possibly wrong results, slices of the sum that a kernel adds: see
//!    [`cut`](super::cut).
//! 3. Its first suggestion that splits no sum.
//! 4. If it refuses the product, slices of the sum in as many calls as it needs.
//! 5. If it refuses the slices of 8-bit factors, too, slices of factors widened to bfloat16.

use super::cut::{Course, ProductCut, SCRATCH_ELEMS};
use super::request::{LibraryProduct, ProductKey};
use crate::device::{FirstWay, LongSums};
use crate::error::Result;

/// NVIDIA's release notes list wrong results of this algorithm with split-K on Hopper, in cuBLAS 12.6.3 to 13.7. It is skipped in every
/// version and on every GPU, because fixed versions offer other algorithms of the same speed.
const WRONG_WITH_SPLIT_K: i32 = 66;

/// Sums that the library may split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Reductions {
    /// Parts are kept in fp32 and added by a second pass.
    InFp32,
    /// No sum is split.
    None,
}

/// Configuration of an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AlgorithmChoice {
    pub(super) algorithm: i32,
    pub(super) split_k: i32,
    pub(super) passed_over: usize,
}

impl AlgorithmChoice {
    /// See [`WRONG_WITH_SPLIT_K`].
    fn may_be_wrong(self) -> bool {
        self.algorithm == WRONG_WITH_SPLIT_K && !matches!(self.split_k, 0 | 1)
    }
}

/// The answer of the library for one of its products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer<T> {
    /// It has an algorithm.
    Found(T),
    /// The results of all suggestions, of this number, may be wrong.
    Excluded(usize),
    /// It has no algorithm.
    Refused,
}

impl<T> Answer<T> {
    pub(super) fn found(self) -> Option<T> {
        if let Self::Found(found) = self { Some(found) } else { None }
    }
}

/// The first of the library's `suggestions` whose results are right.
pub(super) fn first_right<A>(suggestions: Vec<(A, AlgorithmChoice)>) -> Answer<(A, AlgorithmChoice)> {
    let all = suggestions.len();
    match suggestions.into_iter().enumerate().find(|(_, (_, one))| !one.may_be_wrong()) {
        Some((passed_over, (algorithm, chosen))) => Answer::Found((algorithm, AlgorithmChoice { passed_over, ..chosen })),
        None if all > 0 => Answer::Excluded(all),
        None => Answer::Refused,
    }
}

/// A library that makes plans of products.
pub(super) trait PlanProducts {
    type Plan: Copy;

    /// The plan for a call.
    ///
    /// # Errors
    /// Errors of the library other than a refusal.
    fn plan(&mut self, call: &LibraryProduct, reductions: Reductions) -> Result<Answer<Self::Plan>>;
}

/// How a product is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way<P> {
    /// By one call, with the number of suggestions that were skipped before those without split sums.
    Whole(P, usize),
    /// In parts, each of which has a plan without split sums.
    InParts(ProductCut),
}

/// The way of a product: the first that the library has plans for. `None`: it has none.
pub(super) fn way<L: PlanProducts>(
    library: &mut L,
    key: &ProductKey,
    (long_sums, first): (LongSums, FirstWay),
) -> Result<Option<Way<L::Plan>>> {
    if first == FirstWay::Whole
        && let Some(way) = whole(library, key, long_sums)?
    {
        return Ok(Some(way));
    }
    let sliced = sliced(key, &[Course::AtOnce, Course::InTurn]).filter(|_| first != FirstWay::Widened);
    let widened = Some(key).filter(|key| key.is_fp8()).and_then(|key| ProductCut::widened(key, SCRATCH_ELEMS));
    first_planned(library, sliced.chain(widened))
}

/// Steps 1 to 3 of the rule.
fn whole<L: PlanProducts>(library: &mut L, key: &ProductKey, long_sums: LongSums) -> Result<Option<Way<L::Plan>>> {
    let call = LibraryProduct::whole(key);
    let skipped = match library.plan(&call, Reductions::InFp32)? {
        Answer::Found(plan) => return Ok(Some(Way::Whole(plan, 0))),
        Answer::Excluded(skipped) => skipped,
        Answer::Refused => 0,
    };
    if skipped > 0 && long_sums.slices(key.shape.k) {
        let found = first_planned(library, sliced(key, &[Course::AtOnce]))?;
        if found.is_some() {
            return Ok(found);
        }
    }
    Ok(library.plan(&call, Reductions::None)?.found().map(|plan| Way::Whole(plan, skipped)))
}

/// The cuts of a product into slices, the fewest slices first.
fn sliced<'a>(key: &'a ProductKey, courses: &'a [Course]) -> impl Iterator<Item = ProductCut> + 'a {
    let cuts = move |slices| courses.iter().filter_map(move |&course| ProductCut::in_slices(key, slices, course, SCRATCH_ELEMS));
    ProductCut::counts(key.shape.k).flat_map(cuts)
}

/// The first of `cuts` of which every call has a plan.
fn first_planned<L: PlanProducts>(library: &mut L, cuts: impl Iterator<Item = ProductCut>) -> Result<Option<Way<L::Plan>>> {
    for cut in cuts {
        if has_all(library, &cut)? {
            return Ok(Some(Way::InParts(cut)));
        }
    }
    Ok(None)
}

fn has_all<L: PlanProducts>(library: &mut L, cut: &ProductCut) -> Result<bool> {
    for call in cut.calls() {
        if library.plan(&call, Reductions::None)?.found().is_none() {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{MatmulLayout, MatmulShape, ProductRequest, ProductWay};
    use crate::dtype::Dtype;
    use crate::error::Error;

    /// Algorithm and split of each suggestion for a call.
    type Suggests = fn(&LibraryProduct, Reductions) -> Vec<(i32, i32)>;

    /// A library with these suggestions.
    struct Fake {
        suggests: Suggests,
        asked: usize,
    }

    impl PlanProducts for Fake {
        type Plan = AlgorithmChoice;

        fn plan(&mut self, call: &LibraryProduct, reductions: Reductions) -> Result<Answer<AlgorithmChoice>> {
            self.asked += 1;
            let chosen = |(algorithm, split_k)| ((), AlgorithmChoice { algorithm, split_k, passed_over: 0 });
            Ok(match first_right((self.suggests)(call, reductions).into_iter().map(chosen).collect()) {
                Answer::Found(((), chosen)) => Answer::Found(chosen),
                Answer::Excluded(all) => Answer::Excluded(all),
                Answer::Refused => Answer::Refused,
            })
        }
    }

    fn key(a: Dtype, k: usize) -> ProductKey {
        let formats = [a, if a.is_fp8() { Dtype::Float8E4m3 } else { a }, Dtype::Bfloat16];
        let shape = MatmulShape { layout: MatmulLayout::Nt, m: 896, n: 896, k };
        ProductKey::aligned(ProductRequest { shape, formats, bias: false })
    }

    fn way_by(long_sums: LongSums, key: &ProductKey, suggests: Suggests) -> Option<Way<AlgorithmChoice>> {
        way(&mut Fake { suggests, asked: 0 }, key, (long_sums, FirstWay::Whole)).unwrap()
    }

    fn way_of(key: &ProductKey, suggests: Suggests) -> Option<Way<AlgorithmChoice>> {
        way_by(LongSums::Slices, key, suggests)
    }

    fn chosen(algorithm: i32, split_k: i32, passed_over: usize, skipped: usize) -> Option<Way<AlgorithmChoice>> {
        Some(Way::Whole(AlgorithmChoice { algorithm, split_k, passed_over }, skipped))
    }

    fn cut(way: Option<Way<AlgorithmChoice>>) -> (ProductWay, Course) {
        let Some(Way::InParts(cut)) = way else { panic!("{way:?}") };
        (cut.way(), cut.course)
    }

    const E5M2: Dtype = Dtype::Float8E5m2;
    const BF16: Dtype = Dtype::Bfloat16;

    /// The library on an H200: it wants to split, and without split sums it has a slow algorithm in bfloat16 and none in FP8.
    fn wants_to_split(call: &LibraryProduct, reductions: Reductions) -> Vec<(i32, i32)> {
        match reductions {
            Reductions::InFp32 => vec![(66, 3); 8],
            Reductions::None if call.batch.is_some() => vec![(66, 1)],
            Reductions::None if call.formats.a.is_fp8() => Vec::new(),
            Reductions::None => vec![(41, 1)],
        }
    }

    fn only_up_to(call: &LibraryProduct, most: usize) -> Vec<(i32, i32)> {
        if call.shape.k <= most { vec![(70, 1)] } else { Vec::new() }
    }

    #[test]
    fn the_first_suggestion_is_taken_unless_its_results_may_be_wrong() {
        let key = key(BF16, 65_536);
        assert_eq!(way_of(&key, |_, _| vec![(71, 4), (66, 1)]), chosen(71, 4, 0, 0));
        assert_eq!(way_of(&key, |_, _| vec![(66, 2), (66, -1), (66, 1)]), chosen(66, 1, 2, 0));
        assert_eq!(way_of(&key, |_, _| vec![(66, 0)]), chosen(66, 0, 0, 0));
    }

    #[test]
    fn a_long_sum_that_the_library_wants_to_split_is_cut_into_two_slices() {
        for dtype in [BF16, E5M2] {
            for k in [8_192, 65_536] {
                assert_eq!(cut(way_of(&key(dtype, k), wants_to_split)), (ProductWay::Slices(2), Course::AtOnce), "{dtype} {k}");
            }
        }
        // Slices of different lengths are not one call. Those of 16-bit factors are multiples of 8 terms.
        assert_eq!(way_of(&key(BF16, 65_528), wants_to_split), chosen(41, 1, 0, 8));
        assert_eq!(cut(way_of(&key(BF16, 65_520), wants_to_split)), (ProductWay::Slices(2), Course::AtOnce));
    }

    #[test]
    fn short_sums_and_older_runs_take_one_call_without_split_sums() {
        assert_eq!(way_of(&key(BF16, 8_176), wants_to_split), chosen(41, 1, 0, 8));
        assert_eq!(way_by(LongSums::Library, &key(BF16, 65_536), wants_to_split), chosen(41, 1, 0, 8));
        // A product that has no other way is cut in older runs, too.
        let old = way_by(LongSums::Library, &key(E5M2, 65_536), wants_to_split);
        assert_eq!(cut(old), (ProductWay::Slices(2), Course::AtOnce));
    }

    #[test]
    fn sums_are_not_split_where_the_library_refuses_to() {
        let suggests: Suggests = |_, reductions| if reductions == Reductions::None { vec![(67, 1)] } else { Vec::new() };
        assert_eq!(way_of(&key(E5M2, 65_536), suggests), chosen(67, 1, 0, 0));
    }

    #[test]
    fn a_refused_sum_is_cut_into_the_longest_slices_that_are_not() {
        let key = |k| key(E5M2, k);
        assert_eq!(cut(way_of(&key(65_536), |call, _| only_up_to(call, 32_768))), (ProductWay::Slices(2), Course::AtOnce));
        assert_eq!(cut(way_of(&key(131_072), |call, _| only_up_to(call, 16_384))), (ProductWay::Slices(8), Course::AtOnce));
        // Slices of different lengths need a call each.
        assert_eq!(cut(way_of(&key(65_520), |call, _| only_up_to(call, 32_768))), (ProductWay::Slices(2), Course::InTurn));
        let one_by_one: Suggests = |call, _| if call.batch.is_none() { only_up_to(call, 32_768) } else { Vec::new() };
        assert_eq!(cut(way_of(&key(65_536), one_by_one)), (ProductWay::Slices(2), Course::InTurn));
    }

    #[test]
    fn refused_factors_of_8_bits_are_widened() {
        let no_fp8: Suggests = |call, _| if call.formats.a.is_fp8() { Vec::new() } else { vec![(66, 1)] };
        assert_eq!(cut(way_of(&key(E5M2, 65_536), no_fp8)), (ProductWay::Widened, Course::Widened));
        let no_e5m2: Suggests = |call, _| if call.formats.a == E5M2 { Vec::new() } else { vec![(70, 1)] };
        assert_eq!(cut(way_of(&key(E5M2, 64), no_e5m2)), (ProductWay::Widened, Course::Widened));
        assert_eq!(way_of(&key(Dtype::Float8E4m3, 64), no_e5m2), chosen(70, 1, 0, 0));
        assert_eq!(way_of(&key(BF16, 64), |_, _| Vec::new()), None, "bfloat16 is not widened");
        assert_eq!(way_of(&key(E5M2, 64), |_, _| Vec::new()), None);
    }

    #[test]
    fn every_call_of_a_cut_has_a_plan() {
        // The last slice of 65,520 terms is refused, and so are those of four slices; eight are accepted.
        let suggests: Suggests = |call, _| if [32_752, 16_368, 65_520].contains(&call.shape.k) { Vec::new() } else { vec![(70, 1)] };
        assert_eq!(cut(way_of(&key(E5M2, 65_520), suggests)), (ProductWay::Slices(8), Course::InTurn));
    }

    #[test]
    fn parts_split_no_sum() {
        let suggests: Suggests = |call, reductions| match (call.formats.c, reductions) {
            (Dtype::Float32, Reductions::None) => vec![(70, 1)],
            (Dtype::Float32, Reductions::InFp32) => panic!("a part of a product that the library may split"),
            _ => Vec::new(),
        };
        assert_eq!(cut(way_of(&key(E5M2, 64), suggests)), (ProductWay::Slices(2), Course::AtOnce));
    }

    #[test]
    fn errors_other_than_a_refusal_end_the_search() {
        struct Broken;
        impl PlanProducts for Broken {
            type Plan = ();
            fn plan(&mut self, _: &LibraryProduct, _: Reductions) -> Result<Answer<()>> {
                Err(Error::resource("choose", "the GPU is lost"))
            }
        }
        let error = way(&mut Broken, &key(E5M2, 64), (LongSums::Slices, FirstWay::Whole)).unwrap_err();
        assert!(error.to_string().contains("the GPU is lost"));
    }

    #[test]
    fn tests_may_begin_with_a_later_way() {
        let mut library = Fake { suggests: |_, _| vec![(70, 1)], asked: 0 };
        let mut begin = |first| cut(way(&mut library, &key(E5M2, 256), (LongSums::Slices, first)).unwrap());
        assert_eq!(begin(FirstWay::Slices), (ProductWay::Slices(2), Course::AtOnce));
        assert_eq!(begin(FirstWay::Widened), (ProductWay::Widened, Course::Widened));
        assert_eq!(library.asked, 2, "only the calls of these two cuts were planned");
    }
}
