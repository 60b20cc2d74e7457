//! Nearly valid inputs: a file of the corpus with a few changes.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::Rng;
use std::fs;
use std::path::Path;

/// The corpus of one entry point.
pub struct Corpus(Vec<Vec<u8>>);

impl Corpus {
    /// Reads `fuzz/corpus/<door>`.
    pub fn read(door: &str) -> Result<Self, String> {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(door);
        let files: Vec<_> = crate::harness::files(&dir).iter().map(|path| fs::read(path).unwrap()).collect();
        if files.is_empty() { Err(format!("{}: no corpus", dir.display())) } else { Ok(Self(files)) }
    }
}

/// Maximum length of an input.
const BYTES_MAX: usize = 16 << 10;

/// Values that replace others.
const TOKENS: [&str; 36] = [
    "0",
    "-0",
    "1",
    "-1",
    "2",
    "255",
    "65536",
    "2147483648",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "-1e308",
    "1e-320",
    "1e999",
    "0.5",
    "nan",
    "inf",
    "null",
    "true",
    "false",
    "\"\"",
    "\"auto\"",
    "[]",
    "{}",
    "[[",
    "{\"a\":",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "../",
    "\u{feff}",
    "\u{202e}",
    "é",
    ",,",
];

/// Makes one input.
pub fn mutate(corpus: &Corpus, rng: &mut ChaCha8Rng) -> Vec<u8> {
    let mut bytes = corpus.0[pick(rng, corpus.0.len())].clone();
    for _ in 0..1 + pick(rng, 4) {
        change(corpus, rng, &mut bytes);
        bytes.truncate(BYTES_MAX);
    }
    bytes
}

fn pick(rng: &mut ChaCha8Rng, bound: usize) -> usize {
    (rng.next_u64() % bound.max(1) as u64) as usize
}

/// A random part of `bytes`, usually short.
fn part(rng: &mut ChaCha8Rng, bytes: &[u8]) -> std::ops::Range<usize> {
    let start = pick(rng, bytes.len() + 1);
    let most = [1, 4, 16, 64, 4096][pick(rng, 5)];
    start..(start + pick(rng, most + 1)).min(bytes.len())
}

fn change(corpus: &Corpus, rng: &mut ChaCha8Rng, bytes: &mut Vec<u8>) {
    let range = part(rng, bytes);
    let token = || TOKENS.iter().map(|token| token.as_bytes());
    match pick(rng, 9) {
        0 => range.for_each(|at| bytes[at] ^= 1 << pick(rng, 8)),
        1 => range.for_each(|at| bytes[at] = rng.next_u32() as u8),
        2 => drop(bytes.drain(range)),
        3 => drop(bytes.splice(range, token().nth(pick(rng, TOKENS.len())).unwrap().iter().copied())),
        4 => {
            let copy = bytes[range].repeat(1 + pick(rng, 3));
            let at = pick(rng, bytes.len() + 1);
            drop(bytes.splice(at..at, copy));
        }
        5 => {
            let other = &corpus.0[pick(rng, corpus.0.len())];
            let from = part(rng, other);
            drop(bytes.splice(range, other[from].iter().copied()));
        }
        6 => bytes.truncate(range.start),
        _ => value(rng, bytes),
    }
}

/// Replaces a value of JSON or TOML: the text after `:` or `=`, up to its end.
fn value(rng: &mut ChaCha8Rng, bytes: &mut Vec<u8>) {
    let starts: Vec<usize> = (0..bytes.len()).filter(|&at| matches!(bytes[at], b':' | b'=' | b'[')).map(|at| at + 1).collect();
    let Some(&start) = starts.get(pick(rng, starts.len())) else { return };
    let end = bytes[start..].iter().position(|byte| matches!(byte, b',' | b'}' | b']' | b'\n')).map_or(bytes.len(), |len| start + len);
    let token = TOKENS[pick(rng, TOKENS.len())];
    drop(bytes.splice(start..end, token.bytes()));
}
