//! Identifiers are nouns of the field, or verbs with an object: data does not speak, and a pronoun names nothing.

use super::messages::{code_alone, without_tests};
use super::prose::read;
use std::path::Path;

/// Words that no identifier of the engine contains.
const UNCLEAR: [&str; 20] = [
    "ask",
    "asked",
    "asks",
    "elsewhere",
    "hear",
    "heard",
    "hears",
    "nobody",
    "room",
    "said",
    "say",
    "says",
    "speaks",
    "spoken",
    "tell",
    "tells",
    "told",
    "who",
    "whom",
    "whose",
];

/// The words of an identifier: `PartialsTold` and `is_told` contain `told`.
fn words(identifier: &str) -> Vec<String> {
    let mut spaced = String::new();
    for c in identifier.chars() {
        if c.is_uppercase() && spaced.ends_with(char::is_lowercase) {
            spaced.push('_');
        }
        spaced.extend(c.to_lowercase());
    }
    spaced.split('_').map(String::from).collect()
}

/// Identifiers of `code` with an unclear word.
fn unclear(code: &str) -> Vec<String> {
    let code = code_alone(without_tests(code));
    let identifiers = code.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    identifiers.filter(|name| words(name).iter().any(|word| UNCLEAR.contains(&word.as_str()))).map(String::from).collect()
}

#[test]
fn identifiers_name_their_subjects() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let sources = super::sources(root).into_iter().filter(|path| path.starts_with(root.join("src")));
    let sources = sources.filter(|path| !path.to_string_lossy().contains("tests"));
    // The reader of parquet files is a module of that name.
    let is_module = |path: &Path, name: &str| name == "elsewhere" && path.ends_with("parquet_rows.rs");
    let found = |path: &Path| unclear(&read(path)).into_iter().filter(|name| !is_module(path, name)).collect::<Vec<_>>();
    let wrong: Vec<_> = sources.map(|path| (found(&path), path)).filter(|(names, _)| !names.is_empty()).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn words_of_identifiers_are_found_outside_of_text_and_tests() {
    let code =
        "let is_told = Topic::PartialsTold; // told\nlet told_at = \"who\"; fn mushroom() {}\n#[cfg(test)]\nmod tests {\n    fn asks() {}";
    assert_eq!(unclear(code), ["is_told", "PartialsTold", "told_at"]);
}
