//! Data files: which there are, and what each holds.
//!
//! `.txt` is one document of UTF-8; `.jsonl` holds one object a line whose string `text` is a document, blank lines aside; `.bin`
//! holds token ids (see [`crate::data::token_file`]). A directory stands for the files of these kinds in it, by name.

use crate::data::stream::TokenStream;
use crate::data::token_file::TokenFile;
use crate::data::tokenizer::Tokenizer;
use crate::error::{Error, Result};
use std::path::{Path, PathBuf};

#[derive(Clone, Copy)]
enum Kind {
    Text,
    JsonLines,
    Tokens,
}

/// What the extensions of [`Kind`] are called in messages.
const KINDS: &str = ".txt, .jsonl or .bin";

/// One line of a `.jsonl` file; other keys are ignored.
#[derive(serde::Deserialize)]
struct Line {
    text: String,
}

/// The data files that `paths` name, directories replaced by what they hold, in order.
///
/// # Errors
/// `Io` for what cannot be read; `Format` for a file of another kind and for a directory without data.
pub fn find_files(paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for path in paths {
        if path.metadata().map_err(|e| Error::io("read", path, e))?.is_dir() {
            files.extend(files_in(path)?);
        } else if kind(path).is_some() {
            files.push(path.clone());
        } else {
            return Err(Error::format(path, format!("not a {KINDS} file")));
        }
    }
    Ok(files)
}

/// Appends what the file at `path` holds.
///
/// # Errors
/// `Io` when it cannot be read; `Format` that names the place of whatever is wrong: an empty file, bytes that are not UTF-8, a line
/// without `text`, an id outside the vocabulary.
pub fn push_file(stream: &mut TokenStream, tokenizer: &Tokenizer, path: &Path) -> Result<()> {
    match kind(path) {
        Some(Kind::Text) => push_document(stream, tokenizer, path, "", &read_text(path)?),
        Some(Kind::JsonLines) => push_json_lines(stream, tokenizer, path, &read_text(path)?),
        Some(Kind::Tokens) => TokenFile::open(path, stream.vocab_size()).map(|file| stream.push_file(file)),
        None => Err(Error::format(path, format!("not a {KINDS} file"))),
    }
}

/// Whether the file at `path` holds text, which needs a tokenizer.
pub fn is_text(path: &Path) -> bool {
    matches!(kind(path), Some(Kind::Text | Kind::JsonLines))
}

fn kind(path: &Path) -> Option<Kind> {
    match path.extension()?.to_str()? {
        "txt" => Some(Kind::Text),
        "jsonl" => Some(Kind::JsonLines),
        "bin" => Some(Kind::Tokens),
        _ => None,
    }
}

fn files_in(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(dir).map_err(|e| Error::io("read", dir, e))?;
    let paths: Vec<PathBuf> =
        entries.map(|entry| Ok(entry?.path())).collect::<std::io::Result<_>>().map_err(|e| Error::io("read", dir, e))?;
    let mut files: Vec<PathBuf> = paths.into_iter().filter(|path| kind(path).is_some() && !path.is_dir()).collect();
    if files.is_empty() {
        return Err(Error::format(dir, format!("no {KINDS} file in this directory")));
    }
    files.sort();
    Ok(files)
}

/// The file as text, without a byte-order mark.
fn read_text(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).map_err(|e| Error::io("read", path, e))?;
    if bytes.is_empty() {
        return Err(Error::format(path, "the file is empty"));
    }
    let text =
        String::from_utf8(bytes).map_err(|e| Error::format(path, format!("byte offset {}: not UTF-8", e.utf8_error().valid_up_to())))?;
    Ok(text.strip_prefix('\u{feff}').map(str::to_string).unwrap_or(text))
}

fn push_json_lines(stream: &mut TokenStream, tokenizer: &Tokenizer, path: &Path, lines: &str) -> Result<()> {
    let mut documents = 0;
    for (idx, line) in lines.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let place = format!("line {}: ", idx + 1);
        let document: Line = serde_json::from_str(line).map_err(|e| Error::format(path, format!("{place}{}", json_cause(&e))))?;
        push_document(stream, tokenizer, path, &place, &document.text)?;
        documents += 1;
    }
    if documents == 0 { Err(Error::format(path, "no line holds a document")) } else { Ok(()) }
}

/// The parser's message with the column, but not with its line, which is always 1.
fn json_cause(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let cause = message.rsplit_once(" at line ").map_or(message.as_str(), |(cause, _)| cause);
    format!("{cause} (column {})", error.column())
}

/// Appends one document; `place` is where in the file it stands and ends in a colon, or is empty.
fn push_document(stream: &mut TokenStream, tokenizer: &Tokenizer, path: &Path, place: &str, text: &str) -> Result<()> {
    let ids = tokenizer.encode(text).map_err(|e| Error::format(path, format!("{place}{e}")))?;
    stream.push_document(&[tokenizer.begin_of_text(), &ids].concat()).map_err(|outside| {
        let vocab_size = stream.vocab_size();
        Error::format(path, format!("{place}token {} has id {}, outside the vocabulary of {vocab_size}", outside.token_idx, outside.id))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::tokenizer::tests::{WORDS, load_or_bytes, model_dir, with_bos};
    use proptest::prelude::*;

    /// Every token of the file `name` with this content, in bytes or, with `words`, in words.
    fn tokens(name: &str, content: &[u8], words: bool, vocab_size: usize) -> Result<Vec<i32>> {
        let dir = if words { model_dir(&[("tokenizer.json", WORDS)]) } else { model_dir(&[]) };
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        let tokenizer = load_or_bytes(dir.path())?;
        let mut stream = TokenStream::new(vocab_size, tokenizer.end_of_text())?;
        push_file(&mut stream, &tokenizer, &path)?;
        let mut tokens = vec![0; stream.tokens()];
        stream.read(0, &mut tokens)?;
        Ok(tokens)
    }

    #[test]
    fn text_is_one_document_and_json_lines_are_many() {
        assert_eq!(tokens("a.txt", "\u{feff}ab\n".as_bytes(), false, 256).unwrap(), [97, 98, 10]);
        let lines = "{\"text\": \"a b\"}\r\n\n  \n{\"id\": 1, \"text\": \"b\"}";
        assert_eq!(tokens("a.jsonl", lines.as_bytes(), true, 8).unwrap(), [0, 1, 7, 1]);
        assert_eq!(tokens("a.bin", &[5, 0, 6, 0], false, 256).unwrap(), [5, 6]);
    }

    #[test]
    fn every_document_begins_with_the_tokenizers_token() {
        let dir = model_dir(&[("tokenizer.json", &with_bos(WORDS)), ("a.jsonl", "{\"text\": \"a b\"}\n{\"text\": \"a\"}")]);
        let tokenizer = load_or_bytes(dir.path()).unwrap();
        let mut stream = TokenStream::new(8, tokenizer.end_of_text()).unwrap();
        push_file(&mut stream, &tokenizer, &dir.path().join("a.jsonl")).unwrap();
        let mut tokens = vec![0; stream.tokens()];
        stream.read(0, &mut tokens).unwrap();
        assert_eq!((tokens, stream.documents()), (vec![1, 0, 1, 7, 1, 0], 2));
    }

    #[test]
    fn errors_name_file_place_and_cause() {
        let cases: &[(&str, &[u8], &str)] = &[
            ("a.txt", b"", "a.txt: the file is empty"),
            ("a.jsonl", b"", "a.jsonl: the file is empty"),
            ("a.jsonl", b"\n \n", "a.jsonl: no line holds a document"),
            ("a.txt", b"abc\xffd", "a.txt: byte offset 3: not UTF-8"),
            ("a.jsonl", b"{\"text\": \"a\"}\n\xff", "a.jsonl: byte offset 14: not UTF-8"),
            ("a.jsonl", b"{\"text\": \"a\"}\n\n{\"txt\": \"b\"}", "a.jsonl: line 3: missing field `text`"),
            ("a.jsonl", b"{\"text\": 5}", "a.jsonl: line 1: invalid type: integer `5`, expected a string"),
            ("a.jsonl", b"\n{\"text\": \"a", "a.jsonl: line 2: EOF while parsing a string (column 11)"),
            ("a.txt", b"aaz", "a.txt: token 2 has id 122, outside the vocabulary of 100"),
            ("a.jsonl", b"{\"text\": \"a\"}\n{\"text\": \"az\"}", "a.jsonl: line 2: token 1 has id 122, outside the vocabulary of 100"),
            ("a.csv", b"a", "a.csv: not a .txt, .jsonl or .bin file"),
        ];
        for (name, content, cause) in cases {
            let message = tokens(name, content, false, 100).unwrap_err().to_string();
            assert!(message.contains(cause) && !message.contains('\n'), "{cause:?} is not in {message:?}");
        }
    }

    #[test]
    fn directories_stand_for_their_data_files_by_name() {
        let dir = model_dir(&[("b.txt", "b"), ("a.jsonl", "{}"), ("c.bin", "cc"), ("c.bin.json", "{}"), ("README.md", "")]);
        std::fs::create_dir(dir.path().join("d.txt")).unwrap();
        let found = find_files(&[dir.path().join("c.bin"), dir.path().into()]).unwrap();
        let names: Vec<_> = found.iter().map(|path| path.file_name().unwrap().to_str().unwrap()).collect();
        assert_eq!(names, ["c.bin", "a.jsonl", "b.txt", "c.bin"]);
        let refusal = |path: &str| find_files(&[dir.path().join(path)]).unwrap_err().to_string();
        assert!(refusal("d.txt").contains("d.txt: no .txt, .jsonl or .bin file in this directory"));
        assert!(refusal("README.md").contains("README.md: not a .txt"));
        assert!(refusal("missing.txt").starts_with("read ") && refusal("missing.txt").contains("missing.txt: No such file"));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(content: Vec<u8>, lines: bool) {
            let _ = tokens(if lines { "a.jsonl" } else { "a.txt" }, &content, false, 256);
        }

        #[test]
        fn arbitrary_lines_never_panic(lines in prop::collection::vec("[{}\\[\\]\":,a-z0-9\\\\ ]{0,30}|\\{\"text\": \".{0,9}\"\\}", 0..6)) {
            let _ = tokens("a.jsonl", lines.join("\n").as_bytes(), false, 256);
        }
    }
}
