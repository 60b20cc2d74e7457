//! Plain English in texts that the program prints: string literals of its code, its help, and the strings of the Python package.

use super::prose::{OF_PAGES, complaints, read, without, words};
use crate::program::program;
use std::path::Path;

/// A literal with fewer words is a name, a unit or a fragment.
const WORDS_MIN: usize = 4;
/// Phrases without a technical noun, and forms of a message that another form replaces.
const UNCLEAR: [&str; 11] = [
    "allowed is",
    "allowed are",
    "can be told",
    "cannot be told",
    "does not say",
    "do not say",
    "goes on nevertheless",
    "it is so",
    "nobody",
    "of no account",
    "there is no torch here",
];
/// Commands of the program.
const COMMANDS: [&[&str]; 18] = [
    &[],
    &["train"],
    &["resume"],
    &["sample"],
    &["export"],
    &["digest"],
    &["doctor"],
    &["selftest"],
    &["plan"],
    &["probe"],
    &["simulate"],
    &["data"],
    &["prepare"],
    &["report"],
    &["convert-config"],
    &["bench", "step"],
    &["completions"],
    &["man"],
];

#[derive(Clone, Copy, PartialEq)]
enum Language {
    Rust,
    Python,
}

/// The string literals of `code`, in order. Comments and character literals are skipped.
fn literals(code: &str, language: Language) -> Vec<&str> {
    let (mut found, mut rest) = (Vec::new(), code);
    while !rest.is_empty() {
        let (literal, length) = token(rest, language);
        found.extend(literal);
        rest = &rest[length..];
    }
    found
}

/// The Rust code `code` without comments, strings and characters.
pub(super) fn code_alone(code: &str) -> String {
    let (mut out, mut rest) = (String::new(), code);
    while !rest.is_empty() {
        let (literal, length) = token(rest, Language::Rust);
        let is_code = literal.is_none() && !rest.starts_with("//") && !rest.starts_with('\'');
        out.push_str(if is_code { &rest[..length] } else { " " });
        rest = &rest[length..];
    }
    out
}

/// The string literal that `rest` begins with, and the length of the literal, comment or character that `rest` begins with.
fn token(rest: &str, language: Language) -> (Option<&str>, usize) {
    let (comment, raw): (&str, &[(&str, &str)]) = match language {
        Language::Rust => ("//", &[("r##\"", "\"##"), ("r#\"", "\"#"), ("r\"", "\"")]),
        Language::Python => ("#", &[("\"\"\"", "\"\"\"")]),
    };
    if rest.starts_with(comment) {
        return (None, rest.find('\n').unwrap_or(rest.len()));
    }
    for (open, close) in raw {
        if let Some(text) = rest.strip_prefix(open) {
            let end = text.find(close).unwrap_or_else(|| panic!("a literal without an end: {text}"));
            return (Some(&text[..end]), open.len() + end + close.len());
        }
    }
    let first = rest.chars().next().map_or(1, char::len_utf8);
    match rest.as_bytes()[0] {
        b'"' => quoted(rest),
        b'\'' if language == Language::Python => quoted(rest),
        // A character that is a quote; other ones do not matter, and a lifetime has no end.
        b'\'' if rest.starts_with("'\"'") => (None, 3),
        b'\'' if rest.starts_with("'\\") => (None, 3),
        _ => (None, first),
    }
}

/// The text between the quote that `rest` begins with and the next one without a backslash, and the length of all.
fn quoted(rest: &str) -> (Option<&str>, usize) {
    let bytes = rest.as_bytes();
    let mut end = 1;
    while bytes[end] != bytes[0] {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    (Some(&rest[1..end]), end + 1)
}

/// The prose of a literal, if it is a message: without placeholders, code, tags and escapes.
fn message(literal: &str) -> Option<String> {
    let text = without(&without(&without(literal, "{", "}", "X"), "`", "`", "X"), "<", ">", "");
    let text = text.replace("\\n", " ").replace('\\', "");
    (words(&text).count() >= WORDS_MIN && text.contains(' ')).then_some(text)
}

/// `code` before its unit tests.
pub(super) fn without_tests(code: &str) -> &str {
    let is_module = |at: &usize| code[*at..].lines().nth(1).is_some_and(|line| line.contains("mod ") && line.ends_with('{'));
    let end = code.match_indices("#[cfg(test)]\n").map(|(at, _)| at).find(is_module);
    &code[..end.unwrap_or(code.len())]
}

/// Messages in the code of the program, each with its file.
fn messages(root: &Path) -> Vec<(String, String)> {
    let is_test = |path: &Path| path.components().any(|part| part.as_os_str().to_string_lossy().trim_end_matches(".rs").ends_with("tests"));
    let sources = super::sources(root).into_iter().filter(|path| path.starts_with(root.join("src")));
    let names = sources.map(|path| path.strip_prefix(root).unwrap().to_path_buf()).filter(|name| !is_test(name));
    names.flat_map(|name| found_in(&name, without_tests(&read(&root.join(&name))), Language::Rust)).collect()
}

fn found_in(name: &Path, code: &str, language: Language) -> Vec<(String, String)> {
    literals(code, language).into_iter().filter_map(message).map(|text| (name.display().to_string(), text)).collect()
}

/// Docstrings and messages of the Python package and of its build scripts.
fn python(root: &Path) -> Vec<(String, String)> {
    let folders = ["packaging", "packaging/python/superoffload"].map(|folder| root.join(folder));
    let files = folders.iter().flat_map(|folder| std::fs::read_dir(folder).unwrap()).map(|entry| entry.unwrap().path());
    let files = files.filter(|path| path.extension().is_some_and(|end| end == "py" || end == "pyi"));
    files.flat_map(|path| found_in(path.strip_prefix(root).unwrap(), &read(&path), Language::Python)).collect()
}

/// The help of every command.
fn help() -> Vec<(String, String)> {
    let help = |command: &&[&str]| {
        let output = program(&[command, &["--help"][..]].concat()).output().unwrap();
        assert!(output.status.success(), "{command:?}");
        (format!("{} --help", command.join(" ")), without(&String::from_utf8(output.stdout).unwrap(), "`", "`", "X"))
    };
    COMMANDS.iter().map(help).collect()
}

#[test]
fn messages_help_and_python_name_their_subjects() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut wrong = Vec::new();
    for (kind, least, texts) in [("messages in src", 1000, messages(root)), ("help", 18, help()), ("Python strings", 200, python(root))] {
        assert!(texts.len() >= least, "found only {} {kind}", texts.len());
        let all: String = texts.iter().map(|(_, text)| format!("{text}\n")).collect();
        wrong.extend(complaints(kind, &all, OF_PAGES));
        for (file, text) in &texts {
            let unclear = UNCLEAR.iter().filter(|phrase| text.contains(**phrase));
            wrong.extend(unclear.map(|phrase| format!("{file}: \"{phrase}\" in: {}", text.trim())));
        }
    }
    assert!(wrong.is_empty(), "name the subject by its noun:\n{}", wrong.join("\n"));
}

#[test]
fn literals_are_found_and_cut() {
    let code = "let a = \"one \\\"two\\\"\"; // \"three\"\nlet b = ('\"', '\\'', r#\"four \"five\"\"#, r\"\\\");\nfn c<'a>(d: &'a str) {}\n\"six\"";
    assert_eq!(literals(code, Language::Rust), ["one \\\"two\\\"", "four \"five\"", "\\", "six"]);
    let code = "\"\"\"One \"two\".\"\"\"\na = 'three \"four\"'  # don't\nb = f\"{a}\"\n";
    assert_eq!(literals(code, Language::Python), ["One \"two\".", "three \"four\"", "{a}"]);
    assert_eq!(message("{path}: what `it` is,\\nwhat <b>else</b>").unwrap(), "X: what X is, what else");
    assert_eq!(message("three words and {here}").unwrap(), "three words and X");
    assert_eq!((message("only three words"), message("a/path/of/words")), (None, None));
    assert_eq!(without_tests("a\n#[cfg(test)]\nmod x;\nb\n#[cfg(test)]\nmod tests {\nc"), "a\n#[cfg(test)]\nmod x;\nb\n");
}
