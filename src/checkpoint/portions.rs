//! A checkpoint's state in portions. A portion is read by one reader, and its pieces lie in one chunk of the file, so that each chunk is
//! read and checked once.

use super::format::{CHUNK_BYTES, Manifest};
use crate::optim::state_array::StatePart;
use std::ops::Range;

/// Consecutive elements of an array of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct StatePiece {
    /// Position of the tensor in the manifest.
    pub(super) tensor: usize,
    pub(super) part: StatePart,
    pub(super) elems: Range<usize>,
}

/// Pieces in canonical order.
#[derive(Debug, PartialEq)]
pub(super) struct Portion {
    pub(super) pieces: Vec<StatePiece>,
    pub(super) elems: usize,
    /// The chunk in which the pieces begin.
    chunk: usize,
}

/// The arrays `arrays` of tensors in portions of at most `elems_max` elements, or of `grain` elements. Pieces end at multiples of `grain`
/// elements, or with the array.
pub(super) fn portions(
    manifest: &Manifest,
    arrays: impl Iterator<Item = (usize, StatePart)>,
    (elems_max, grain): (usize, usize),
) -> Vec<Portion> {
    let list = manifest.arrays();
    let grain = grain.max(list.unit_elems());
    let (elems_max, mut portions) = ((elems_max - elems_max % grain).max(grain), Vec::new());
    for (nth, part) in arrays {
        let (tensor, array, mut start) = (&manifest.tensors[nth], list[part], 0);
        let elems = tensor.elems as usize;
        let first = tensor.offset as usize + list.offset(part, elems);
        while start < elems {
            let at = first + array.bytes(start);
            // The files of several processes have the elements in another order.
            let in_chunk =
                if manifest.parts.is_some() { elems_max } else { array.elems_of(CHUNK_BYTES - at % CHUNK_BYTES).next_multiple_of(grain) };
            let end = elems.min(start + elems_max.min(in_chunk));
            push(&mut portions, StatePiece { tensor: nth, part, elems: start..end }, at / CHUNK_BYTES, elems_max);
            start = end;
        }
    }
    portions
}

/// Appends a piece that begins in `chunk`.
fn push(portions: &mut Vec<Portion>, piece: StatePiece, chunk: usize, elems_max: usize) {
    let elems = piece.elems.len();
    match portions.last_mut() {
        Some(last) if last.chunk == chunk && last.elems + elems <= elems_max => {
            last.elems += elems;
            last.pieces.push(piece);
        }
        _ => portions.push(Portion { pieces: vec![piece], elems, chunk }),
    }
}

#[cfg(test)]
#[path = "portions_tests.rs"]
mod tests;
