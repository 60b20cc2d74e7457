//! Weights in MXFP4 in words of the mail buffer: the codes of a piece, then its scales.

use crate::dtype::mxfp4::{BLOCK_BYTES, BLOCK_ELEMS, Mxfp4};

/// Blocks of MXFP4 with a whole number of words, and that number.
const BLOCKS: usize = size_of::<f32>();
const WORDS: usize = BLOCK_BYTES + 1;

/// Elements of a piece that `words` words carry.
pub(super) const fn elems(words: usize) -> usize {
    (words / WORDS).saturating_mul(BLOCKS * BLOCK_ELEMS)
}

/// The words that carry `piece`.
pub(super) fn words(piece: Mxfp4<'_>) -> Vec<f32> {
    let mut words = empty(piece.elems());
    let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut words);
    let (codes, rest) = bytes.split_at_mut(piece.codes.len());
    codes.copy_from_slice(piece.codes);
    rest[..piece.scales.len()].copy_from_slice(piece.scales);
    words
}

/// Zeros in place of the words that carry `elems` elements.
pub(super) fn empty(elems: usize) -> Vec<f32> {
    vec![0.0; (elems / BLOCK_ELEMS * WORDS).div_ceil(BLOCKS)]
}

/// The piece of `elems` elements that `words` carry.
///
/// # Panics
/// If there are too few words.
pub(super) fn piece(words: &[f32], elems: usize) -> Mxfp4<'_> {
    let (bytes, [codes, scales]): (&[u8], _) = (bytemuck::cast_slice(words), Mxfp4::bytes(elems));
    Mxfp4 { codes: &bytes[..codes], scales: &bytes[codes..codes + scales] }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_piece_of_any_length_returns_from_its_words() {
        let (codes, scales): (Vec<u8>, Vec<u8>) = ((0..=255).cycle().take(7 * 16).collect(), (200..207).collect());
        let all = Mxfp4 { codes: &codes, scales: &scales };
        for (start, blocks) in [(0, 7), (0, 1), (2, 4), (1, 5), (3, 0)] {
            let sent = all.slice(start * BLOCK_ELEMS, blocks * BLOCK_ELEMS);
            let words = words(sent);
            assert!(elems(words.len().next_multiple_of(WORDS)) >= sent.elems());
            let read = piece(&words, sent.elems());
            assert_eq!((read.codes, read.scales), (sent.codes, sent.scales), "{start} {blocks}");
        }
        assert_eq!((elems(16), elems(17), elems(35), empty(128).len()), (0, 128, 256, 17));
        assert!(elems(usize::MAX) > 1 << 60);
    }
}
