//! Attention heads, and their division among the ranks of sequence parallelism.

use super::layer_shape::{Attn, AttnKind, LayerShape};
use crate::device::PARTS_MAX;
use std::ops::Range;

/// Index of a rank among the ranks that share its sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SequenceRank {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
}

/// Heads for which one rank computes attention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HeadShare {
    pub(crate) heads: Range<usize>,
    /// Key heads that these query heads read. With fewer key heads than ranks, several ranks have the same key head.
    pub(crate) kv_heads: Range<usize>,
}

impl HeadShare {
    /// Whole key heads with all query heads that read them; if they do not divide evenly, the first ranks have one more. With fewer key
    /// heads than ranks, each rank has the same number of query heads of one key head.
    pub(crate) fn of(attn: &Attn, SequenceRank { rank, ranks }: SequenceRank) -> Self {
        let (kv_heads, per_kv_head) = (attn.kv_heads, attn.heads / attn.kv_heads);
        if kv_heads < ranks {
            let (each, kv_head) = (attn.heads / ranks, rank / sharers(attn, ranks));
            return Self { heads: rank * each..(rank + 1) * each, kv_heads: kv_head..kv_head + 1 };
        }
        let before = |rank: usize| rank * (kv_heads / ranks) + rank.min(kv_heads % ranks);
        let kv_heads = before(rank)..before(rank + 1);
        Self { heads: kv_heads.start * per_kv_head..kv_heads.end * per_kv_head, kv_heads }
    }

    /// The columns of these heads in queries, keys and values, or in attention's output.
    pub(super) fn columns(&self, attn: &Attn, is_qkv: bool) -> HeadColumns {
        let (d, keys, values) = (attn.head_dim, attn.heads, attn.heads + attn.kv_heads);
        let columns = |first: usize, heads: &Range<usize>| (first + heads.start) * d..(first + heads.end) * d;
        let queries = columns(0, &self.heads);
        if is_qkv {
            let ranges = [queries, columns(keys, &self.kv_heads), columns(values, &self.kv_heads)];
            return HeadColumns { own: ranges.iter().map(Range::len).sum(), ranges, all: attn.qkv_cols() };
        }
        HeadColumns { own: queries.len(), ranges: [queries, 0..0, 0..0], all: attn.out_cols() }
    }
}

/// Columns of some heads in a row of all heads.
pub(super) struct HeadColumns {
    /// Column ranges, in the order of a row with these heads only.
    ranges: [Range<usize>; 3],
    /// Number of columns in a row of all heads, and in a row of these heads only.
    pub(super) all: usize,
    pub(super) own: usize,
}

impl HeadColumns {
    /// Pairs of column ranges: in a row of all heads, and in a row of these heads only.
    pub(super) fn pairs(&self) -> impl Iterator<Item = (Range<usize>, Range<usize>)> + '_ {
        let next = |first: &mut usize, all: &Range<usize>| {
            *first += all.len();
            Some((all.clone(), *first - all.len()..*first))
        };
        self.ranges.iter().filter(|all| !all.is_empty()).scan(0, next)
    }
}

/// Number of ranks that read the same key head.
pub(super) fn sharers(attn: &Attn, ranks: usize) -> usize {
    (ranks / attn.kv_heads).max(1)
}

/// Maximum columns of one rank's heads over all `ranks` ranks: of queries, keys and values, and of attention's output.
pub(super) fn widest_cols(attn: &Attn, ranks: usize) -> [usize; 2] {
    let HeadShare { heads, kv_heads } = HeadShare::of(attn, SequenceRank { rank: 0, ranks });
    [(heads.len() + 2 * kv_heads.len()) * attn.head_dim, heads.len() * attn.head_dim]
}

/// Columns of the gradients of keys and values that several ranks contribute to, and of their sum.
pub(super) fn shared_cols(attn: &Attn, ranks: usize) -> usize {
    let sharers = sharers(attn, ranks);
    if sharers > 1 { (sharers + 1) * 2 * attn.kv_heads * attn.head_dim } else { 0 }
}

/// Minimum and maximum query heads of one of `ranks` ranks, in the layer where they differ most; `None` if they are equal in all layers.
pub(crate) fn uneven(layers: &[LayerShape], ranks: usize) -> Option<[usize; 2]> {
    let of = |attn, rank| HeadShare::of(attn, SequenceRank { rank, ranks }).heads.len();
    let each = layers.iter().map(|layer| [of(&layer.attn, ranks - 1), of(&layer.attn, 0)]);
    each.max_by_key(|[fewest, most]| most - fewest).filter(|[fewest, most]| fewest < most)
}

fn can_divide(attn: &Attn, ranks: usize) -> bool {
    ranks <= attn.kv_heads || ranks.is_multiple_of(attn.kv_heads) && attn.heads.is_multiple_of(ranks)
}

/// Checks whether `ranks` ranks can share the heads of every layer. The error gives the reason and the possible numbers of ranks.
pub(crate) fn check_degree(layers: &[LayerShape], ranks: usize) -> std::result::Result<(), String> {
    let layers = || layers.iter().map(|layer| &layer.attn);
    if ranks > 1 && layers().any(|attn| attn.kind != AttnKind::Softmax) {
        let kind = if layers().any(|attn| attn.latent().is_some()) { "latent" } else { "gated" };
        return Err(format!("--sequence-ranks {ranks}: ranks cannot share {kind} attention, which this model has; use 1"));
    }
    let Some(attn) = layers().find(|attn| !can_divide(attn, ranks)) else { return Ok(()) };
    let works = |ranks: &usize| layers().all(|attn| can_divide(attn, *ranks));
    let degrees: Vec<_> = (1..=PARTS_MAX).filter(works).map(|ranks| ranks.to_string()).collect();
    let Attn { heads, kv_heads, .. } = attn;
    Err(format!(
        "--sequence-ranks {ranks}: {heads} query heads on {kv_heads} key heads cannot be shared by so many; use {}",
        degrees.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shape::ModelShape;

    fn attn(heads: usize, kv_heads: usize) -> Attn {
        Attn { heads, kv_heads, head_dim: 8, ..ModelShape::demo().layers[0].attn }
    }

    /// Number of heads of each of `ranks` ranks, and the key heads that they read.
    fn parts(attn: &Attn, ranks: usize) -> Vec<(usize, Range<usize>)> {
        let of = |rank| HeadShare::of(attn, SequenceRank { rank, ranks });
        (0..ranks).map(|rank| (of(rank).heads.len(), of(rank).kv_heads)).collect()
    }

    #[test]
    fn heads_are_shared_whole_groups_first_and_few_key_heads_by_several() {
        assert_eq!(parts(&attn(8, 4), 1), [(8, 0..4)]);
        assert_eq!(parts(&attn(8, 4), 2), [(4, 0..2), (4, 2..4)]);
        assert_eq!(parts(&attn(20, 10), 4), [(6, 0..3), (6, 3..6), (4, 6..8), (4, 8..10)]);
        assert_eq!(parts(&attn(8, 2), 4), [(2, 0..1), (2, 0..1), (2, 1..2), (2, 1..2)]);
        for (heads, kv_heads, ranks) in [(8, 4, 2), (20, 10, 4), (8, 2, 4), (8, 1, 8), (6, 6, 5)] {
            let attn = attn(heads, kv_heads);
            let of = |rank| HeadShare::of(&attn, SequenceRank { rank, ranks });
            let all: Vec<usize> = (0..ranks).flat_map(|rank| of(rank).heads).collect();
            assert!(all.iter().copied().eq(0..heads), "{heads} on {ranks}: {all:?}");
            for rank in 0..ranks {
                let HeadShare { heads: own, kv_heads: read } = of(rank);
                // The kernel's mapping from query heads to key heads, in its own numbering, must agree with the model's.
                let per = own.len() / read.len();
                assert!(own.clone().all(|head| head / (heads / kv_heads) == read.start + (head - own.start) / per), "{own:?} {read:?}");
            }
        }
    }

    #[test]
    fn degrees_that_heads_do_not_allow_are_refused_with_those_that_they_do() {
        let shape = |heads, kv_heads| {
            let mut shape = ModelShape::demo();
            shape.layers.iter_mut().for_each(|layer| layer.attn = attn(heads, kv_heads));
            shape
        };
        let degrees =
            |heads, kv_heads| (1..=PARTS_MAX).filter(|&k| check_degree(&shape(heads, kv_heads).layers, k).is_ok()).collect::<Vec<_>>();
        assert_eq!(degrees(8, 4), [1, 2, 3, 4, 8]);
        assert_eq!(degrees(12, 2), [1, 2, 4, 6]);
        assert_eq!(degrees(5, 1), [1, 5]);
        let refused = check_degree(&shape(12, 2).layers, 3).unwrap_err();
        assert_eq!(refused, "--sequence-ranks 3: 12 query heads on 2 key heads cannot be shared by so many; use 1, 2, 4, 6");
        assert_eq!([1, 2, 3, 4].map(|ranks| uneven(&shape(8, 4).layers, ranks)), [None, None, Some([2, 4]), None]);
        // All layers are checked.
        let mut mixed = shape(12, 2);
        mixed.layers[3].attn = attn(4, 4);
        assert!(check_degree(&mixed.layers, 6).unwrap_err().contains("4 query heads on 4 key heads"));
    }
}
