//! Generated text, and a tokenizer trained on it. Words consist of syllables, and a few words are frequent but most are rare, as in natural
//! languages.

use serde_json::json;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;
use superoffload::{Error, Result};
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::{AddedToken, PreTokenizerWrapper, SplitDelimiterBehavior, Tokenizer};

/// The pre-tokenization pattern of Llama 3.
const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SYLLABLES: [&str; 48] = [
    "ka", "ter", "in", "o", "re", "the", "mis", "an", "lo", "per", "su", "ing", "de", "con", "ra", "ti", "est", "al", "um", "be", "ver",
    "ny", "is", "qua", "zo", "fen", "gra", "hu", "jo", "lim", "wor", "yt", "pl", "ex", "cy", "nd", "é", "mü", "ño", "ß", "ово", "ни", "ст",
    "語", "学", "の", "क", "한",
];
/// Index of the first syllable from another alphabet. Such syllables are rare.
const OTHERS: usize = 36;
const LEXICON: f64 = 1.5e6;
/// Maximum number of texts for training the tokenizer.
const TRAINED_ON: usize = 10_000;
const END_OF_TEXT: &str = "<|end_of_text|>";

/// Deterministic pseudorandom numbers (splitmix64).
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb)
    }

    fn below(&mut self, end: usize) -> usize {
        ((self.next() >> 32) as usize * end) >> 32
    }

    /// A uniform number in [0, 1).
    fn fraction(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Word number `rank` of the lexicon. Rare words are longer.
fn word(rank: u64) -> String {
    let mut numbers = Numbers(rank);
    let longest = 1 + rank.max(1).ilog2() as usize / 5;
    let others = numbers.below(12) == 0;
    let syllable = |numbers: &mut Numbers| {
        if others { SYLLABLES[OTHERS + numbers.below(SYLLABLES.len() - OTHERS)] } else { SYLLABLES[numbers.below(OTHERS)] }
    };
    (0..1 + numbers.below(longest)).map(|_| syllable(&mut numbers)).collect()
}

/// A text of some thousand bytes.
fn text(numbers: &mut Numbers) -> String {
    let (length, mut text) = (1000 + numbers.below(5000), String::new());
    while text.len() < length {
        // A word's frequency falls with its rank, as in natural languages.
        let word = word(LEXICON.powf(numbers.fraction()) as u64);
        match numbers.below(40) {
            0 => text += &format!(" {}", numbers.below(100_000)),
            1 => {
                let (first, rest) = word.split_at(word.chars().next().map_or(0, char::len_utf8));
                text += &format!(". {}{rest}", first.to_uppercase());
            }
            2 => text += &format!(", {word}"),
            3 => text += &format!(" {word}'s"),
            4 => text += &format!(".\n\n{word}"),
            _ => text += &format!(" {word}"),
        }
    }
    text
}

/// Writes JSON lines with at least `bytes` bytes in total.
///
/// # Errors
/// Errors of writing the file.
pub fn write_lines(path: &Path, bytes: u64) -> Result<()> {
    let (mut numbers, mut written) = (Numbers(0), 0);
    let mut write = || {
        let mut file = BufWriter::new(File::create(path)?);
        while written < bytes {
            let line = json!({ "text": text(&mut numbers) }).to_string();
            writeln!(file, "{line}")?;
            written += line.len() as u64 + 1;
        }
        file.flush()
    };
    write().map_err(|e| Error::io("write", path, e))
}

/// Writes a model directory with a tokenizer of `vocab_size` ids, trained on generated text.
///
/// # Errors
/// `Usage` if the text has fewer tokens than `vocab_size`; errors of training and of writing files.
pub fn write_model(dir: &Path, vocab_size: usize) -> Result<()> {
    let failed = |e: tokenizers::Error| Error::resource("train a tokenizer", e);
    let split = Split::new(SplitPattern::Regex(WORDS.into()), SplitDelimiterBehavior::Isolated, false).map_err(failed)?;
    let bytes = ByteLevel::new(false, true, false);
    let parts = vec![PreTokenizerWrapper::Split(split), PreTokenizerWrapper::ByteLevel(bytes)];
    let model = BPE::builder().ignore_merges(true).build().map_err(failed)?;
    let mut tokenizer = Tokenizer::new(model);
    tokenizer.with_pre_tokenizer(Some(PreTokenizerWrapper::Sequence(Sequence::new(parts))));
    let trainer = BpeTrainer::builder()
        .show_progress(false)
        .vocab_size(vocab_size)
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .special_tokens(vec![AddedToken::from(END_OF_TEXT, true)])
        .build();
    let mut numbers = Numbers(1);
    tokenizer
        .train(&mut TrainerWrapper::from(trainer), (0..TRAINED_ON.min(vocab_size / 10)).map(|_| text(&mut numbers)))
        .map_err(failed)?;
    let found = tokenizer.get_vocab_size(true);
    if found < vocab_size {
        return Err(Error::usage(format!("--vocab-size {vocab_size}: the text has no more than {found} tokens")));
    }
    tokenizer.save(dir.join("tokenizer.json"), false).map_err(failed)?;
    let config = json!({ "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": vocab_size, "hidden_size": 64,
        "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5, "rope_theta": 1e4, "tie_word_embeddings": true, "hidden_act": "silu" });
    for (name, content) in [("config.json", config), ("tokenizer_config.json", json!({ "eos_token": END_OF_TEXT }))] {
        let path = dir.join(name);
        fs::write(&path, content.to_string()).map_err(|e| Error::io("write", &path, e))?;
    }
    Ok(())
}
