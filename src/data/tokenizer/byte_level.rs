//! Byte-level BPE, as Llama 3, Qwen and GPT-2 have it, without the library's overhead: the library records the origin of every byte,
//! copies every word several times, and searches words with a regular expression that looks ahead.
//!
//! This module finds words by an automaton and caches the tokens of a word: a text has few new words. The library's model tokenizes new
//! words. Unexpected texts are left to the library whole, so that ids and places are always the library's.

use super::token::{Token, floor_boundary};
use regex_automata::hybrid::dfa::{Cache, DFA};
use regex_automata::meta::Regex;
use regex_automata::{Anchored, Input};
use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use tokenizers::models::bpe::BPE;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::{AddedToken, Model, ModelWrapper, NormalizerWrapper, PreTokenizerWrapper, SplitDelimiterBehavior};
use unicode_normalization_alignments::{IsNormalized, is_nfc_quick};

/// The words of GPT-2, the library's default.
const GPT2_WORDS: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
/// How such expressions end: white space, all but its last character where a word follows. It is the only place where they look ahead.
const LAST_WORDS: &str = r"|\s+(?!\S)|\s+";
const WHITE_SPACE: usize = 1;
/// Longer words are seldom and not kept.
const KEPT_BYTES_MAX: usize = 64;
/// Words in each of two generations: some megabytes a thread.
const GENERATION: usize = 1 << 14;

/// A tokenizer of this kind.
pub(super) struct ByteLevelBpe {
    /// All words but white space, and white space.
    words: DFA,
    added: Option<AddedTokens>,
    /// Whether text must be in Unicode's form NFC.
    is_nfc: bool,
    /// Scratch memory for searching and caching words that no thread uses at present.
    idle: Mutex<Vec<WordScratch>>,
}

/// Tokens that are found in text before anything else.
struct AddedTokens {
    pattern: Regex,
    ids: HashMap<String, u32>,
}

/// Scratch memory of one thread at a time.
struct WordScratch {
    search: Cache,
    kept: KeptWords,
    mapped: String,
}

/// Cache of the tokens of recent words.
#[derive(Default)]
struct KeptWords {
    young: HashMap<Box<str>, Box<[Token]>>,
    old: HashMap<Box<str>, Box<[Token]>>,
}

impl ByteLevelBpe {
    /// `tokenizer` as one of this kind; `None` where it does anything that is not done here.
    pub(super) fn new(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let is_nfc = match tokenizer.get_normalizer() {
            None => false,
            Some(NormalizerWrapper::NFC(_)) => true,
            Some(_) => return None,
        };
        model(tokenizer).filter(|model| is_complete(model))?;
        let head = words(tokenizer.get_pre_tokenizer()?)?.strip_suffix(LAST_WORDS)?;
        let words = DFA::new_many(&[head, r"\s+"]).ok()?;
        let added: Vec<&AddedToken> = tokenizer.get_added_vocabulary().get_added_tokens_decoder().values().collect();
        let is_plain = |token: &&AddedToken| !(token.single_word || token.lstrip || token.rstrip || token.normalized && is_nfc);
        let splits_special = tokenizer.get_added_vocabulary().get_encode_special_tokens();
        let in_one_pass = added.windows(2).all(|pair| pair[0].normalized == pair[1].normalized);
        if splits_special || !in_one_pass || !added.iter().all(is_plain) {
            return None;
        }
        let added = if added.is_empty() { None } else { Some(AddedTokens::new(tokenizer)?) };
        Some(Self { words, added, is_nfc, idle: Mutex::default() })
    }

    /// Gives `each` the tokens of `text`, some at a time, and where they begin; `None` where the library must be asked instead.
    pub(super) fn encode(&self, tokenizer: &tokenizers::Tokenizer, text: &str, mut each: impl FnMut(&[Token], usize)) -> Option<()> {
        if self.is_nfc && !text.is_ascii() && is_nfc_quick(text.chars()) != IsNormalized::Yes {
            return None;
        }
        let idle = || self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let taken = idle().pop();
        let mut scratch = taken.unwrap_or_else(|| WordScratch::new(&self.words));
        let outcome = self.encode_with(&mut scratch, model(tokenizer)?, text, &mut each);
        idle().push(scratch);
        outcome
    }

    fn encode_with(&self, scratch: &mut WordScratch, model: &BPE, text: &str, each: &mut impl FnMut(&[Token], usize)) -> Option<()> {
        let mut done = 0;
        for (begin, end, id) in self.added.iter().flat_map(|added| added.find(text)) {
            self.encode_words(scratch, model, &text[done..begin], done, each)?;
            each(&[Token { id, start: 0, end: (end - begin) as u32 }], begin);
            done = end;
        }
        self.encode_words(scratch, model, &text[done..], done, each)
    }

    /// As [`Self::encode`], of a text without added tokens, which begins at `start`.
    fn encode_words(
        &self,
        scratch: &mut WordScratch,
        model: &BPE,
        text: &str,
        start: usize,
        each: &mut impl FnMut(&[Token], usize),
    ) -> Option<()> {
        let mut at = 0;
        while at < text.len() {
            let end = self.word_end(text, at, &mut scratch.search)?;
            let word = &text[at..end];
            if let Some(tokens) = scratch.kept.young.get(word) {
                each(tokens, start + at);
            } else {
                let tokens = match scratch.kept.old.remove(word) {
                    Some(tokens) => tokens,
                    None => tokens(model, word, &mut scratch.mapped)?,
                };
                each(&tokens, start + at);
                scratch.kept.keep(word, tokens);
            }
            at = end;
        }
        Some(())
    }

    /// Where the word ends that begins at `at`.
    fn word_end(&self, text: &str, at: usize, search: &mut Cache) -> Option<usize> {
        let input = Input::new(text).range(at..).anchored(Anchored::Yes);
        let found = self.words.try_search_fwd(search, &input).ok()??;
        let (end, is_white) = (found.offset(), found.pattern().as_usize() == WHITE_SPACE);
        let last = || text[at..end].char_indices().next_back().map_or(0, |(last, _)| last);
        let end = if is_white && end < text.len() && last() > 0 { at + last() } else { end };
        (end > at).then_some(end)
    }
}

impl AddedTokens {
    fn new(tokenizer: &tokenizers::Tokenizer) -> Option<Self> {
        let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        let ids: HashMap<String, u32> = added.iter().map(|(id, token)| (token.content.clone(), *id)).collect();
        let mut contents: Vec<&String> = ids.keys().collect();
        // The first that matches wins: the longest.
        contents.sort_by_key(|content| (std::cmp::Reverse(content.len()), *content));
        let literal = |content: &&String| content.chars().map(|c| format!(r"\x{{{:X}}}", u32::from(c))).collect::<String>();
        let pattern = Regex::new(&contents.iter().map(literal).collect::<Vec<_>>().join("|")).ok()?;
        (ids.len() == added.len() && !ids.contains_key("")).then_some(Self { pattern, ids })
    }

    /// Where added tokens begin and end in `text`, and which they are.
    fn find<'a>(&'a self, text: &'a str) -> impl Iterator<Item = (usize, usize, u32)> + 'a {
        self.pattern.find_iter(text).map(|found| (found.start(), found.end(), self.ids[&text[found.range()]]))
    }
}

impl WordScratch {
    fn new(words: &DFA) -> Self {
        Self { search: words.create_cache(), kept: KeptWords::default(), mapped: String::new() }
    }
}

impl KeptWords {
    fn keep(&mut self, word: &str, tokens: Box<[Token]>) {
        if word.len() > KEPT_BYTES_MAX {
            return;
        }
        if self.young.len() == GENERATION {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(word.into(), tokens);
    }
}

/// The model of `tokenizer`, if it is BPE.
fn model(tokenizer: &tokenizers::Tokenizer) -> Option<&BPE> {
    if let ModelWrapper::BPE(bpe) = tokenizer.get_model() { Some(bpe) } else { None }
}

/// Whether `model` always makes the same of a word, and something of each of its bytes.
fn is_complete(model: &BPE) -> bool {
    let has_byte = |byte| model.token_to_id(character(byte).encode_utf8(&mut [0; 4])).is_some();
    model.dropout.is_none() && (0..=255).all(has_byte)
}

/// The expression that matches words, where each word becomes the characters that its bytes stand for.
fn words(pre_tokenizer: &PreTokenizerWrapper) -> Option<&str> {
    let by_itself = |part: &PreTokenizerWrapper, searches| matches!(part, PreTokenizerWrapper::ByteLevel(bytes) if bytes.use_regex == searches && !bytes.add_prefix_space);
    match pre_tokenizer {
        part if by_itself(part, true) => Some(GPT2_WORDS),
        PreTokenizerWrapper::Sequence(parts) => match parts.as_ref() {
            [PreTokenizerWrapper::Split(split), bytes] if by_itself(bytes, false) => match &split.pattern {
                SplitPattern::Regex(words) if split.behavior == SplitDelimiterBehavior::Isolated && !split.invert => Some(words),
                _ => None,
            },
            _ => None,
        },
        _ => None,
    }
}

/// Tokens of a word by the model; places are byte offsets in `word`, at boundaries of characters.
fn tokens(model: &BPE, word: &str, mapped: &mut String) -> Option<Box<[Token]>> {
    mapped.clear();
    mapped.extend(word.bytes().map(character));
    let tokens = model.tokenize(mapped).ok()?;
    // Characters that stand for bytes are one byte long or two.
    let bytes = |until: usize| mapped[..until].chars().count();
    let place = |token: &tokenizers::Token| {
        let (start, end) = (bytes(token.offsets.0), bytes(token.offsets.1));
        let whole = (end..=word.len()).find(|&end| word.is_char_boundary(end)).unwrap_or(word.len());
        Token { id: token.id, start: floor_boundary(word, start) as u32, end: whole as u32 }
    };
    Some(tokens.iter().map(place).collect())
}

/// The character that stands for a byte, as in GPT-2: itself if it can be seen, else one from 256 on.
fn character(byte: u8) -> char {
    let nth = match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff => return byte.into(),
        0..=b' ' => u32::from(byte),
        0x7f..=0xa0 => u32::from(byte) - 0x7f + 33,
        0xad => 67,
    };
    char::from_u32(256 + nth).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::{Value, json};

    const LLAMA3_WORDS: &str =
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

    fn split(words: &str) -> Value {
        let split = json!({"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": false});
        let bytes = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
        json!({"type": "Sequence", "pretokenizers": [split, bytes]})
    }

    /// A tokenizer of all bytes and of some merges, with these parts in place of its own.
    fn tokenizer(parts: Value) -> tokenizers::Tokenizer {
        let merges = [
            "\u{120} a",
            "a b",
            "ab a",
            "\u{120} \u{120}",
            "\u{120}\u{120} \u{120}\u{120}",
            "\u{c3} \u{a9}",
            "' s",
            "1 2",
            "12 1",
            "\u{10a} \u{10a}",
            "\u{120}a b",
        ];
        let mut vocab: serde_json::Map<String, Value> = (0..=255u8).map(|byte| (character(byte).into(), byte.into())).collect();
        merges.iter().for_each(|merge| {
            vocab.insert(merge.replace(' ', ""), vocab.len().into());
        });
        let added = |id: u32, content: &str| json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true});
        let mut all = json!({"version": "1.0", "normalizer": null, "pre_tokenizer": split(LLAMA3_WORDS),
            "added_tokens": [added(300, "<|a|>"), added(301, "<|a|>b"), added(302, "|>")],
            "model": {"type": "BPE", "vocab": vocab, "merges": merges, "ignore_merges": false, "dropout": null}});
        parts.as_object().unwrap().iter().for_each(|(pointer, part)| *all.pointer_mut(pointer).unwrap() = part.clone());
        serde_json::from_value(all).unwrap()
    }

    /// Tokenizers that this module supports, in three configurations.
    fn known() -> Vec<tokenizers::Tokenizer> {
        let gpt2 = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
        [
            json!({"/model/ignore_merges": true}),
            json!({"/normalizer": {"type": "NFC"}, "/pre_tokenizer": split(&LLAMA3_WORDS.replace("{1,3}", ""))}),
            json!({"/pre_tokenizer": gpt2, "/added_tokens/0/normalized": true, "/added_tokens/1/normalized": true, "/added_tokens/2/normalized": true}),
        ]
        .map(tokenizer)
        .into()
    }

    /// The tokens of `text` here, and the library's.
    fn both(tokenizer: &tokenizers::Tokenizer, text: &str) -> (Option<Vec<Token>>, Vec<Token>) {
        let (byte_level, mut tokens) = (ByteLevelBpe::new(tokenizer).unwrap(), Vec::new());
        let mut encode = || {
            tokens.clear();
            byte_level.encode(tokenizer, text, |some, at| tokens.extend(some.iter().map(|token| token.after(at))))
        };
        // The second time words are known.
        let outcome = encode().and_then(|()| encode());
        let library = tokenizer.encode(text, false).unwrap();
        let placed = library.get_ids().iter().zip(library.get_offsets());
        let placed = placed.map(|(&id, &(start, end))| Token { id, start: start as u32, end: end as u32 }).collect();
        (outcome.map(|()| tokens), placed)
    }

    #[test]
    fn text_of_every_kind_is_encoded_as_by_the_library() {
        let texts = [
            "",
            " ",
            "ab aba  ab\n\n \n  a",
            "it's IT'S it\u{2019}s '\u{17f} 'LL",
            "121 12121",
            "  \u{3000} a",
            "\u{e9}\u{1d11e}\u{4e2d}\u{6587}, na\u{ef}ve",
            "x<|a|>b<|a|> |> <|a",
            "\t\ta\r\n\r\n b\u{85}\u{a0}\u{2028}",
            "!!\n?? ..\r",
            "\0\u{7f}\u{ad}\u{a1}",
        ];
        for tokenizer in known() {
            for text in texts.iter().map(ToString::to_string).chain([texts.join("|"), " ".repeat(3000) + "a", "a".repeat(200)]) {
                let (here, library) = both(&tokenizer, &text);
                assert_eq!(here.as_ref(), Some(&library), "{text:?}");
            }
        }
    }

    #[test]
    fn unknown_components_are_left_to_the_library() {
        let none = |parts: Value| assert!(ByteLevelBpe::new(&tokenizer(parts.clone())).is_none(), "{parts}");
        none(json!({"/normalizer": {"type": "NFKC"}}));
        none(json!({"/pre_tokenizer": {"type": "Whitespace"}}));
        none(json!({"/pre_tokenizer/pretokenizers/0/invert": true}));
        none(json!({"/pre_tokenizer/pretokenizers/0/behavior": "Removed"}));
        none(json!({"/pre_tokenizer/pretokenizers/0/pattern/Regex": "\\p{L}+"}));
        none(json!({"/pre_tokenizer/pretokenizers/0/pattern/Regex": format!("a(?=b)|{LLAMA3_WORDS}")}));
        none(json!({"/pre_tokenizer/pretokenizers/1/add_prefix_space": true}));
        none(json!({"/pre_tokenizer/pretokenizers/1/use_regex": true}));
        none(json!({"/added_tokens/1/lstrip": true}));
        none(json!({"/added_tokens/1/single_word": true}));
        none(json!({"/added_tokens/1/normalized": true}));
        none(json!({"/model/vocab": {"a": 0, "b": 1, "ab": 2}, "/model/merges": ["a b"]}));
        none(json!({"/model/dropout": 0.1}));
        none(json!({"/model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}));
        let mut splits_special = tokenizer(json!({}));
        splits_special.set_encode_special_tokens(true);
        assert!(ByteLevelBpe::new(&splits_special).is_none());
        let nfc = tokenizer(json!({"/normalizer": {"type": "NFC"}}));
        assert!(both(&nfc, "e\u{301}").0.is_none() && both(&nfc, "\u{e9}").0.is_some());
        // An expression that does not match everywhere.
        let letters = tokenizer(json!({"/pre_tokenizer": split(r"\p{L}+|\s+(?!\S)|\s+")}));
        assert!(both(&letters, "ab, a").0.is_none() && both(&letters, "ab  a").0.is_some());
    }

    #[test]
    fn the_word_cache_keeps_few_recent_words() {
        let (tokenizer, mut kept) = (tokenizer(json!({})), 0);
        let byte_level = ByteLevelBpe::new(&tokenizer).unwrap();
        for n in 0..5 * GENERATION {
            let word: String = n.to_string().bytes().map(|digit| char::from(digit + b'a' - b'0')).collect();
            byte_level.encode(&tokenizer, &format!("b.{word} {}", "x".repeat(KEPT_BYTES_MAX + 1)), |_, _| ()).unwrap();
            let idle = byte_level.idle.lock().unwrap();
            let KeptWords { young, old } = &idle[0].kept;
            assert!(idle.len() == 1 && (young.contains_key("b") || old.contains_key("b")), "asked for all the time");
            kept = kept.max(young.len() + old.len());
        }
        assert!((GENERATION..=2 * GENERATION).contains(&kept), "{kept}");
        let idle = byte_level.idle.lock().unwrap();
        assert!(!idle[0].kept.young.keys().any(|word| word.len() > KEPT_BYTES_MAX));
    }

    proptest! {
        #[test]
        fn any_text_is_encoded_as_by_the_library(
            text in "([ab]{1,4}|[ \n\r\t]{1,4}|['\u{2019}](s|LL|ſ|re)|[0-9]{1,5}|<\\|a\\|>|\\|>|\\PC|[\u{0}-\u{10ffff}]|\u{1f468}\u{200d}|e\u{301}|한|Σ|ß){0,40}",
        ) {
            for tokenizer in known() {
                let (here, library) = both(&tokenizer, &text);
                if let Some(here) = here {
                    prop_assert_eq!(here, library);
                } else {
                    prop_assert!(tokenizer.get_normalizer().is_some() && !text.is_ascii());
                }
            }
        }
    }
}
