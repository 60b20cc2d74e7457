//! Tokens of a teacher with their probabilities, which stand behind the tokens of their record: for each trained token the word of a count, and
//! so many ids with probabilities.

use super::token_stream::TokenStream;
use crate::data::loss_weight::id_of;
use crate::data::number_words::{NUMBER_WORDS, count_of, number_of};
use crate::error::{Error, Result};
use crate::teacher_loss::{ENTRY_WORDS, entry_words};
use std::ops::Range;

/// Words that are read at once.
const BLOCK: usize = 1024;

/// The words of a stream from a place on, read in blocks.
struct WordReader<'a> {
    stream: &'a TokenStream,
    /// Place behind the block.
    next: usize,
    /// The block, of which the words in `unread` are still to come.
    block: [i32; BLOCK],
    unread: Range<usize>,
}

impl<'a> WordReader<'a> {
    fn new(stream: &'a TokenStream, start: usize) -> Self {
        Self { stream, next: start, block: [0; BLOCK], unread: 0..0 }
    }

    /// Place of the next word.
    fn place(&self) -> usize {
        self.next - self.unread.len()
    }

    /// The next `N` words.
    fn take<const N: usize>(&mut self) -> Result<[i32; N]> {
        if self.unread.len() < N {
            self.fill()?;
        }
        let words = self.block[self.unread.clone()].first_chunk::<N>().ok_or_else(wrong)?;
        self.unread.start += N;
        Ok(*words)
    }

    /// Moves unread words to the begin of the block and reads more behind them.
    fn fill(&mut self) -> Result<()> {
        let kept = self.unread.len();
        self.block.copy_within(self.unread.clone(), 0);
        let more = (BLOCK - kept).min(self.stream.tokens() - self.next);
        self.stream.read(self.next, &mut self.block[kept..kept + more])?;
        self.next += more;
        self.unread = 0..kept + more;
        Ok(())
    }

    /// The number of the teacher's tokens for the next token.
    fn count(&mut self) -> Result<usize> {
        let [word] = self.take()?;
        Ok(count_of(word))
    }

    /// A token of the teacher: its id and its probability.
    fn entry(&mut self) -> Result<(u32, f32)> {
        let words = self.take::<NUMBER_WORDS>()?;
        Ok((id_of(words[0] as u32), number_of(&words)))
    }
}

fn wrong() -> Error {
    Error::format("the data", "a record does not have the tokens of a teacher for each trained token")
}

/// The largest number of a teacher's tokens for one of `trained` tokens, whose words are in `range`.
///
/// # Errors
/// `Format` if `range` holds other words; when the tokens cannot be read.
pub(super) fn widest(stream: &TokenStream, range: Range<u64>, trained: usize) -> Result<usize> {
    let (mut words, mut most) = (WordReader::new(stream, range.start as usize), 0);
    for _ in 0..trained {
        let count = words.count()?;
        (0..count).try_for_each(|_| words.entry().map(|_| ()))?;
        most = most.max(count);
    }
    if words.place() as u64 == range.end { Ok(most) } else { Err(wrong()) }
}

/// Reads the teacher's tokens for each trained target of a document, from place `start` of the stream on. Writes those of target i to
/// `top_k` places of `out` from place `top_k * i` on. Does not allocate.
///
/// # Errors
/// When the tokens cannot be read any more.
pub(super) fn read(stream: &TokenStream, start: usize, targets: &[i32], (top_k, out): (usize, &mut [i32])) -> Result<()> {
    let mut words = WordReader::new(stream, start);
    for (target, places) in targets.iter().zip(out.chunks_exact_mut(top_k * ENTRY_WORDS)) {
        if *target < 0 {
            continue;
        }
        let count = words.count()?;
        let places = places.as_chunks_mut::<ENTRY_WORDS>().0.get_mut(..count).ok_or_else(wrong)?;
        for place in places {
            let (id, probability) = words.entry()?;
            *place = entry_words(id, probability);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::number_words::{word_of_count, words_with_id};
    use crate::data::rows::token_stream::Tokens;

    /// The teacher's tokens of trained token `at`.
    fn teacher(at: usize) -> impl Iterator<Item = (u32, f32)> {
        (0..1 + at % 3).map(move |which| ((at + which) as u32, at as f32 / (which + 1) as f32))
    }

    fn stream(count: usize) -> TokenStream {
        let words = |at| {
            let entries = teacher(at).flat_map(|(id, number)| words_with_id(id, number));
            [word_of_count(1 + at % 3)].into_iter().chain(entries).collect::<Vec<_>>()
        };
        let mut stream = TokenStream::default();
        stream.push_all(Tokens::Memory([7, 7].into_iter().chain((0..count).flat_map(words)).collect()));
        stream
    }

    #[test]
    fn tokens_of_trained_targets_are_read_in_blocks() {
        let (count, top_k) = (400, 3);
        let stream = stream(count);
        let end = stream.tokens() as u64;
        assert!(end as usize > 2 * BLOCK && widest(&stream, 2..end, count).unwrap() == 3);
        assert!(widest(&stream, 2..end, count - 1).is_err() && widest(&stream, 2..end, count + 1).is_err());
        let targets: Vec<i32> = [-1, -1].into_iter().chain((0..count).map(|_| 3)).chain([-1]).collect();
        let mut out = vec![0; targets.len() * top_k * ENTRY_WORDS];
        read(&stream, 2, &targets, (top_k, &mut out)).unwrap();
        let places: Vec<&[i32]> = out.chunks(top_k * ENTRY_WORDS).collect();
        assert!([0, 1, count + 2].iter().all(|at| places[*at].iter().all(|word| *word == 0)), "no teacher of other targets");
        for at in 0..count {
            assert!(crate::teacher_loss::entries(places[at + 2]).eq(teacher(at)), "token {at}");
        }
        assert!(read(&stream, 2, &targets, (2, &mut out)).is_err(), "more tokens than places");
    }
}
