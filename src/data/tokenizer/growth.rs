//! Limits of a tokenizer's file that hold before memory is taken: normalizers that make a text longer stage by stage, and models that
//! take a quadratic time for a word.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::{NormalizedString, Normalizer, NormalizerWrapper, PreTokenizerWrapper};

/// Stages may make a text so many times as long without being looked at.
const FACTOR_MAX: f64 = 1000.0;
/// Bytes that stages may make of a text: this many, and so many for each byte of it.
const TEXT_BYTES_MAX: usize = 1 << 20;
const BYTES_PER_BYTE_MAX: usize = 64;
/// `ByteLevel` doubles a text that went through it before; no tokenizer has more than one of them.
const BYTE_LEVELS_MAX: usize = 4;
/// Characters of a word that `WordPiece` may search: it takes the cube of them. Models have 100.
const WORD_CHARS_MAX: u64 = 1000;
/// Assumed growth of a text in one stage of a precompiled map.
const PRECOMPILED_FACTOR: f64 = 8.0;

/// Normalizers that may make a text much longer, stage by stage.
pub(super) struct Growth(Vec<Stage>);

struct Stage {
    normalizer: NormalizerWrapper,
    /// A text and its replacement.
    replaced: Option<(String, String)>,
}

/// Whether a tokenizer's file can be used at all.
///
/// # Errors
/// The limit that it exceeds, and the library's, in words.
pub(super) fn check_file(file: &serde_json::Map<String, Value>) -> Result<(), String> {
    let part = |name: &str| file.get(name).unwrap_or(&Value::Null);
    let normalizer = as_read::<NormalizerWrapper>(part("normalizer")).map_err(|e| e.to_string())?;
    let pre_tokenizer = as_read::<PreTokenizerWrapper>(part("pre_tokenizer")).map_err(|e| e.to_string())?;
    let chains = [stages(&normalizer, "normalizers"), stages(&pre_tokenizer, "pretokenizers")];
    let byte_levels = chains.concat().iter().filter(|stage| stage["type"] == "ByteLevel").count();
    if byte_levels > BYTE_LEVELS_MAX {
        return Err(format!("{byte_levels} stages of ByteLevel, each of which may double a text: at most {BYTE_LEVELS_MAX} are supported"));
    }
    let word_chars = part("model")["max_input_chars_per_word"].as_u64().unwrap_or(0);
    if word_chars > WORD_CHARS_MAX {
        return Err(format!("model: max_input_chars_per_word {word_chars}: at most {WORD_CHARS_MAX} is supported"));
    }
    Ok(())
}

/// A part of the file as the library reads it: under a type that it does not know, it reads a chain or a replacement all the same.
fn as_read<T: DeserializeOwned + Serialize>(part: &Value) -> serde_json::Result<Value> {
    if part.is_null() { Ok(Value::Null) } else { serde_json::to_value(serde_json::from_value::<T>(part.clone())?) }
}

/// The stages of a chain, which may hold chains under `list`.
fn stages<'a>(chain: &'a Value, list: &str) -> Vec<&'a Value> {
    match chain[list].as_array() {
        Some(chains) => chains.iter().flat_map(|chain| stages(chain, list)).collect(),
        None => vec![chain],
    }
}

impl Growth {
    /// Stages of `normalizer` in a tokenizer's file that lengthen text; `None` where no text becomes much longer.
    pub(super) fn new(normalizer: &Value) -> serde_json::Result<Option<Self>> {
        let normalizer = as_read::<NormalizerWrapper>(normalizer)?;
        let stages = stages(&normalizer, "normalizers");
        if stages.iter().map(|stage| factor(stage)).product::<f64>() <= FACTOR_MAX {
            return Ok(None);
        }
        let stage = |stage: &&Value| Ok(Stage { normalizer: serde_json::from_value((*stage).clone())?, replaced: replaced(stage) });
        stages.iter().map(stage).collect::<serde_json::Result<_>>().map(|stages| Some(Self(stages)))
    }

    /// Whether the stages make no more of `text` than is tokenized in one piece.
    ///
    /// # Errors
    /// The limit, and the library's, in words.
    pub(super) fn check(&self, text: &str) -> Result<(), String> {
        let mut normalized = text.to_string();
        for (at, stage) in self.0.iter().enumerate() {
            let bytes = stage.bytes_after(&normalized);
            let bytes_max = TEXT_BYTES_MAX + BYTES_PER_BYTE_MAX * text.len();
            if bytes > bytes_max {
                return Err(format!(
                    "normalizer {at} would make {bytes} bytes of a text of {}: at most {bytes_max} are allowed",
                    text.len()
                ));
            }
            normalized = stage.after(&normalized)?;
        }
        Ok(())
    }
}

impl Stage {
    /// Bytes that this stage makes of `text`, as far as they are known before.
    fn bytes_after(&self, text: &str) -> usize {
        let Some((pattern, content)) = &self.replaced else { return text.len() };
        let count = match *pattern.as_bytes() {
            // The search for longer texts takes some seventy times as long where each byte is found.
            [byte] => text.bytes().filter(|&other| other == byte).count(),
            _ => text.matches(pattern.as_str()).count(),
        };
        (text.len() - count * pattern.len()).saturating_add(count.saturating_mul(content.len()))
    }

    /// Applies this stage to `text`. This is faster than the library, which also records the origin of each byte.
    fn after(&self, text: &str) -> Result<String, String> {
        if let Some((pattern, content)) = self.replaced.as_ref().filter(|(pattern, _)| !pattern.is_empty()) {
            return Ok(text.replace(pattern.as_str(), content));
        }
        let mut normalized = NormalizedString::from(text);
        self.normalizer.normalize(&mut normalized).map_err(|e| e.to_string())?;
        Ok(normalized.get().to_string())
    }
}

/// The pattern of a stage that replaces a text, and its content.
fn replaced(stage: &Value) -> Option<(String, String)> {
    let pattern = stage["pattern"]["String"].as_str().filter(|_| stage["type"] == "Replace")?;
    Some((pattern.into(), stage["content"].as_str()?.into()))
}

/// How many times as long a stage may make a text.
fn factor(stage: &Value) -> f64 {
    let content = stage["content"].as_str().map_or(1, str::len) as f64;
    let factor = match (stage["type"].as_str(), replaced(stage)) {
        (Some("Replace"), Some((pattern, _))) => content / (pattern.len().max(1)) as f64,
        // An expression may match between characters.
        (Some("Replace"), None) => content + 1.0,
        (Some("Precompiled"), _) => PRECOMPILED_FACTOR,
        (Some("ByteLevel"), _) => 2.0,
        _ => 1.0,
    };
    factor.max(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn replace(pattern: Value, content: &str) -> Value {
        json!({"type": "Replace", "pattern": pattern, "content": content})
    }

    fn sequence(normalizers: &[Value]) -> Value {
        json!({"type": "Sequence", "normalizers": normalizers})
    }

    #[test]
    fn stages_that_make_a_text_longer_and_longer_are_refused_before_they_do() {
        let grow = replace(json!({"String": "a"}), "aaaaaaaaaa");
        let nested = sequence(&[sequence(&vec![grow.clone(); 6]), sequence(&vec![grow.clone(); 6])]);
        for normalizer in [sequence(&vec![grow.clone(); 12]), nested] {
            let growth = Growth::new(&normalizer).unwrap().unwrap();
            let refused = growth.check("a").unwrap_err();
            assert_eq!(refused, "normalizer 6 would make 10000000 bytes of a text of 1: at most 1048640 are allowed");
            assert_eq!(growth.check("b a c".replace('a', "d").as_str()), Ok(()));
        }
        for disguised in [json!("Sequene"), Value::Null] {
            let mut chain = sequence(&vec![grow.clone(); 12]);
            chain["normalizers"][3]["type"] = disguised.clone();
            chain["type"] = disguised;
            assert!(Growth::new(&chain).unwrap().unwrap().check("a").is_err(), "{chain}");
        }
        let usual = [json!({"type": "Prepend", "prepend": "▁"}), replace(json!({"String": " "}), "▁"), json!({"type": "NFKC"})];
        assert!(Growth::new(&sequence(&usual)).unwrap().is_none() && Growth::new(&Value::Null).unwrap().is_none());
        let at_once = replace(json!({"String": "a"}), &"b".repeat(1 << 20));
        assert!(Growth::new(&at_once).unwrap().unwrap().check(&"a".repeat(100)).is_err());
        let expression = replace(json!({"Regex": ""}), &"b".repeat(2000));
        assert!(Growth::new(&expression).unwrap().is_some());
    }

    #[test]
    fn files_with_stages_or_words_without_end_are_refused() {
        let file = |part: &str, value: Value| serde_json::Map::from_iter([(part.to_string(), value)]);
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true});
        let byte_levels = |count: usize, list: &str| json!({"type": "Sequence", list: vec![byte_level.clone(); count]});
        for (part, list) in [("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")] {
            assert_eq!(check_file(&file(part, byte_levels(BYTE_LEVELS_MAX, list))), Ok(()));
            let refused = check_file(&file(part, byte_levels(BYTE_LEVELS_MAX + 1, list))).unwrap_err();
            assert_eq!(refused, "5 stages of ByteLevel, each of which may double a text: at most 4 are supported");
        }
        // The library takes an unknown type of normalizer for a sequence, and refuses one of pre-tokenizer.
        let disguised = json!({"type": "Sequene", "normalizers": vec![json!({"type": "ByteLevel"}); BYTE_LEVELS_MAX + 1]});
        assert!(check_file(&file("normalizer", disguised)).unwrap_err().starts_with("5 stages of ByteLevel"));
        let words = |chars: u64| check_file(&file("model", json!({"type": "WordPiece", "max_input_chars_per_word": chars})));
        assert!(words(100).is_ok() && words(WORD_CHARS_MAX).is_ok());
        let refused = words(1_000_000_000).unwrap_err();
        assert_eq!(refused, "model: max_input_chars_per_word 1000000000: at most 1000 is supported");
    }
}
