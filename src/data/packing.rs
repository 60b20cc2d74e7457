//! The stream cut into sequences: sequence `i` of `S` tokens covers stream tokens `i S ..= i S + S`: `S` inputs, and the `S`
//! tokens that follow each of them. Consecutive sequences share one token; what is left at the end is less than one.

use crate::data::demo::DEMO_TEXT;
use crate::data::source;
use crate::data::stream::TokenStream;
use crate::data::tokenizer::Tokenizer;
use crate::error::{Error, Result};
use std::path::PathBuf;

/// A stream of tokens in sequences of equal length.
pub struct Dataset {
    stream: TokenStream,
    seq_length: usize,
    sequences: usize,
}

impl Dataset {
    /// Reads the files and directories in `paths`, or the text that ships with the program when there are none, for a
    /// model with `vocab_size` ids.
    ///
    /// # Errors
    /// Those of [`source::find_files`], [`source::push_file`] and [`TokenStream::new`]; `Format` (or `Usage`, for the
    /// shipped text) when all of it is less than one sequence and the token after it.
    ///
    /// # Panics
    /// If `seq_length` is 0.
    pub fn open(paths: &[PathBuf], tokenizer: &Tokenizer, vocab_size: usize, seq_length: usize) -> Result<Self> {
        let mut stream = TokenStream::new(vocab_size, tokenizer.end_of_text())?;
        let files = source::find_files(paths)?;
        for file in &files {
            source::push_file(&mut stream, tokenizer, file)?;
        }
        if files.is_empty() {
            push_demo(&mut stream, tokenizer)?;
        }
        let tokens = stream.tokens();
        Self::new(stream, seq_length).ok_or_else(|| too_short(&files, tokens, seq_length))
    }

    /// Cuts `stream`; `None` when it is less than one sequence and the token after it.
    ///
    /// # Panics
    /// If `seq_length` is 0.
    pub fn new(stream: TokenStream, seq_length: usize) -> Option<Self> {
        let sequences = stream.tokens().saturating_sub(1) / seq_length;
        (sequences > 0).then_some(Self { stream, seq_length, sequences })
    }

    /// Sequences in one pass over the data, at least 1.
    pub fn sequences(&self) -> usize {
        self.sequences
    }

    /// Tokens of a sequence.
    pub fn seq_length(&self) -> usize {
        self.seq_length
    }

    /// Tokens in the stream, those after the last sequence included.
    pub fn tokens(&self) -> usize {
        self.stream.tokens()
    }

    /// Documents of text in the stream; token files are not counted.
    pub fn documents(&self) -> usize {
        self.stream.documents()
    }

    /// Writes sequence `idx`: `inputs` and `targets`, `[seq_length]` each, the targets one token further.
    ///
    /// # Errors
    /// When a token file cannot be read any more or has changed for the worse.
    ///
    /// # Panics
    /// If there is no such sequence or the slices have another length.
    pub fn read_sequence(&self, idx: usize, inputs: &mut [i32], targets: &mut [i32]) -> Result<()> {
        assert!(idx < self.sequences, "sequence {idx} of {}", self.sequences);
        assert_eq!((inputs.len(), targets.len()), (self.seq_length, self.seq_length));
        let start = idx * self.seq_length;
        let (shared, last) = targets.split_at_mut(self.seq_length - 1);
        self.stream.read(start, inputs)?;
        shared.copy_from_slice(&inputs[1..]);
        self.stream.read(start + self.seq_length, last)
    }
}

fn push_demo(stream: &mut TokenStream, tokenizer: &Tokenizer) -> Result<()> {
    stream.push_document(&tokenizer.encode(DEMO_TEXT)?).map_err(|outside| {
        let vocab_size = stream.vocab_size();
        Error::Unsupported(format!("the built-in text needs token {}, outside the model's vocabulary of {vocab_size}", outside.id))
    })
}

fn too_short(files: &[PathBuf], tokens: usize, seq_length: usize) -> Error {
    let need = format!("{tokens} tokens, less than one sequence of {seq_length} and the token after it");
    match files {
        [] => Error::usage(format!("--seq-length {seq_length}: the built-in text has {need}")),
        [file] => Error::format(file, need),
        [file, others @ ..] => Error::format(file, format!("with {} more files {need}", others.len())),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Tokens 0, 1, 2, ... in sequences of `seq_length`.
    pub(crate) fn counting(tokens: usize, seq_length: usize) -> Option<Dataset> {
        let mut stream = TokenStream::new(1 << 20, None).unwrap();
        stream.push_document(&(0..tokens as u32).collect::<Vec<_>>()).unwrap();
        Dataset::new(stream, seq_length)
    }

    #[test]
    fn the_shipped_text_is_read_when_no_path_is_given() {
        let dataset = Dataset::open(&[], &Tokenizer::bytes(), 256, 256).unwrap();
        assert_eq!(dataset.tokens(), DEMO_TEXT.len());
        let (mut inputs, mut targets) = (vec![0; 256], vec![0; 256]);
        dataset.read_sequence(0, &mut inputs, &mut targets).unwrap();
        assert!(inputs.iter().zip(DEMO_TEXT.bytes()).all(|(&token, byte)| token == i32::from(byte)));
        assert!(targets.iter().zip(DEMO_TEXT.bytes().skip(1)).all(|(&token, byte)| token == i32::from(byte)));
    }

    #[test]
    fn too_little_data_is_refused_with_the_file() {
        let dir = crate::data::tokenizer::tests::model_dir(&[("a.txt", "abcd"), ("b.txt", "ef")]);
        let open = |paths: &[PathBuf], seq_length| Dataset::open(paths, &Tokenizer::bytes(), 256, seq_length);
        let a = dir.path().join("a.txt");
        assert_eq!(open(std::slice::from_ref(&a), 3).unwrap().sequences(), 1);
        let message = open(&[a], 4).err().unwrap().to_string();
        assert!(message.contains("a.txt: 4 tokens, less than one sequence of 4"), "{message}");
        let message = open(&[dir.path().into()], 6).err().unwrap().to_string();
        assert!(message.contains("a.txt: with 1 more files 6 tokens"), "{message}");
        assert_eq!(open(&[], usize::MAX).err().unwrap().exit_code(), 2);
        assert!(Dataset::open(&[], &Tokenizer::bytes(), 100, 8).err().unwrap().to_string().contains("vocabulary of 100"));
    }

    proptest! {
        #[test]
        fn every_token_but_the_tail_is_an_input_once_and_its_successor_the_target(tokens in 0..500usize, seq_length in 1..40usize) {
            let Some(dataset) = counting(tokens, seq_length) else {
                prop_assert!(tokens < seq_length + 1);
                return Ok(());
            };
            let (mut inputs, mut targets) = (vec![0; seq_length], vec![0; seq_length]);
            let mut next = 0;
            for idx in 0..dataset.sequences() {
                dataset.read_sequence(idx, &mut inputs, &mut targets).unwrap();
                for (&input, &target) in inputs.iter().zip(&targets) {
                    prop_assert_eq!((input, target), (next, next + 1));
                    next += 1;
                }
            }
            prop_assert!(tokens - (next as usize + 1) < seq_length);
        }
    }
}
