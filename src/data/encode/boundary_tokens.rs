//! Tokens around a document: the ids that it begins with, and the end of text. A document may hold them already, and they are not written
//! twice.

use crate::data::loss_weight::{LossWeight, id_of};

/// Of the ids `begin` those that a document of `tokens` lacks: all or none.
pub(in crate::data) fn missing_begin<'a>(tokens: &[u32], begin: &'a [u32]) -> &'a [u32] {
    let has = tokens.len() >= begin.len() && tokens.iter().zip(begin).all(|(token, id)| id_of(*token) == *id);
    if has { &[] } else { begin }
}

/// The id `end`, if a document of `tokens` lacks it: an end that is not trained is none.
pub(in crate::data) fn missing_end(tokens: &[u32], end: Option<u32>) -> Option<u32> {
    let has = |id: u32| tokens.last().is_some_and(|token| id_of(*token) == id && LossWeight::of(*token).is_trained());
    end.filter(|id| !has(*id))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::loss_weight::UNTRAINED;

    #[test]
    fn a_begin_is_missing_as_a_whole_and_an_end_unless_it_is_trained() {
        let begin = |tokens: &[u32]| missing_begin(tokens, &[1, 2]).len();
        assert_eq!((begin(&[1, 2, 3]), begin(&[1 | UNTRAINED, 2 | UNTRAINED]), begin(&[1, 3]), begin(&[1]), begin(&[])), (0, 0, 2, 2, 2));
        assert_eq!(missing_begin(&[5], &[]), [0; 0]);
        assert_eq!((missing_end(&[4, 9], Some(9)), missing_end(&[9, 4], Some(9)), missing_end(&[], Some(9))), (None, Some(9), Some(9)));
        assert_eq!((missing_end(&[9 | UNTRAINED], Some(9)), missing_end(&[4], None)), (Some(9), None));
        let quarter = |id| LossWeight::nearest(0.25).unwrap().word(id);
        assert_eq!((missing_end(&[quarter(9)], Some(9)), begin(&[quarter(1), 2])), (None, 0));
    }
}
