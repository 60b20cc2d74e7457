//! Content of data files: their records, their tokens, their sizes.

use crate::data::chat::record::{DataFormat, RecordRules};
use crate::data::checksum::Fingerprint;
use crate::data::context::Preparation;
use crate::data::encode::documents::{DocumentPosition, DocumentTotals, Documents, Sink, place_word};
use crate::data::encode::encoder::{Encoder, encode};
use crate::data::encode::marked_text::{ShownDocument, joined};
use crate::data::encode::text_work::{Done, TextWork};
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::data::read::compression::{EXPANSION_MAX, is_compressed};
use crate::data::read::demo::DEMO_TEXT;
use crate::data::read::elements::Elements;
use crate::data::read::files::{SourceKind, is_text, kind};
#[cfg(feature = "parquet")]
use crate::data::read::parquet_rows::for_each_in_sandbox;
use crate::data::read::text::{Lines, RecordParts, TextReader};
use crate::data::run_sources::KnownSources;
use crate::error::{Error, Result};
use crate::signals::StopFlag;
use std::path::{Path, PathBuf};

/// Text is so many times as long as its compressed file, seldom more.
const EXPANSION_USUAL: u64 = 8;
/// Characters of a document that are shown to people.
const SHOWN_CHARACTERS: usize = 2000;

/// Whether each of `files` holds records that are not text, by its first one.
///
/// # Errors
/// When a file cannot be read, or the format of its first record cannot be detected.
pub(in crate::data) fn hold_records(files: &[&Path], rules: &RecordRules) -> Result<Vec<bool>> {
    files.iter().map(|path| Ok(!matches!(format(path, rules)?, None | Some(DataFormat::Text)))).collect()
}

/// Whether the first record of one of `files` may go through a chat template. An unreadable file may: reading it later reports the cause.
pub(crate) fn needs_template(files: &[PathBuf], rules: &RecordRules) -> bool {
    files.iter().any(|path| format(path, rules).map_or(true, |format| format.is_some_and(DataFormat::has_answers)))
}

/// Whether each of `files` holds records of token ids, or ids alone: such data needs no tokenizer.
pub(crate) fn hold_ids(files: &[PathBuf], rules: &RecordRules) -> bool {
    let holds_ids = |path: &PathBuf| !is_text(path) || matches!(format(path, rules), Ok(Some(DataFormat::InputIds)));
    !files.is_empty() && files.iter().all(holds_ids)
}

/// The first of `files` with answers in its records: of chats, of prompts or of instructions. An unreadable file counts as one without
/// answers; reading it later reports the cause.
pub(crate) fn with_answers<'a>(files: &'a [PathBuf], rules: &RecordRules) -> Option<&'a Path> {
    let has_answers = |path: &&PathBuf| matches!(format(path, rules), Ok(Some(format)) if format.has_answers());
    files.iter().find(has_answers).map(PathBuf::as_path)
}

/// The format of the file at `path`, by its first record; `None` where it holds no record.
fn format(path: &Path, rules: &RecordRules) -> Result<Option<DataFormat>> {
    let detect = |record: String| rules.detect(&record).map_err(|cause| Error::format(path, cause));
    first_record(path, rules)?.map(detect).transpose()
}

/// The first record of the file at `path`; `None` where it holds none.
fn first_record(path: &Path, rules: &RecordRules) -> Result<Option<String>> {
    let mut first = None;
    for_each_record(path, rules, |_, record| {
        first = Some(record.to_string());
        Ok(false)
    })?;
    Ok(first)
}

/// Gives `each` the records of the file at `path` with their lines, until it wants no more.
fn for_each_record(path: &Path, rules: &RecordRules, mut each: impl FnMut(u64, &str) -> Result<bool>) -> Result<()> {
    match kind(path) {
        Some(SourceKind::JsonLines) => for_each_of(path, Lines::default(), each),
        Some(SourceKind::JsonArray) => for_each_of(path, Elements::default(), each),
        Some(SourceKind::Parquet) => for_each_row(path, rules, &StopFlag::default(), &mut |row, record, _| each(row, record)),
        _ => Ok(()),
    }
}

/// Gives `each` the rows of a parquet file, with how many bytes are read, until `stop` is set.
#[cfg(feature = "parquet")]
fn for_each_row(path: &Path, rules: &RecordRules, stop: &StopFlag, each: &mut dyn FnMut(u64, &str, u64) -> Result<bool>) -> Result<()> {
    for_each_in_sandbox(path, |column| rules.reads(column), stop, each)
}

#[cfg(not(feature = "parquet"))]
fn for_each_row(path: &Path, _: &RecordRules, _: &StopFlag, _: &mut dyn FnMut(u64, &str, u64) -> Result<bool>) -> Result<()> {
    Err(Error::Unsupported(format!("{}: this program was built without the feature `parquet`", path.display())))
}

fn for_each_of(path: &Path, mut parts: impl RecordParts, mut each: impl FnMut(u64, &str) -> Result<bool>) -> Result<()> {
    let (mut reader, mut continues) = (TextReader::open(path)?, true);
    let mut give = |continues: &mut bool, line: u64, record: &str| {
        *continues = *continues && (record.trim().is_empty() || each(line, record)?);
        Ok(())
    };
    let mut is_empty = true;
    while continues && let Some(block) = reader.next()? {
        is_empty = false;
        parts.push(path, block, |line, record| give(&mut continues, line, record))?;
    }
    if continues && !is_empty { parts.finish(path, |line, record| give(&mut continues, line, record)) } else { Ok(()) }
}

/// The first `count` documents of the text files among `files`, as a model reads them.
///
/// # Errors
/// The fault of a file, with its place.
pub(crate) fn first_documents(files: &[PathBuf], tokenizer: &Tokenizer, count: usize, stop: &StopFlag) -> Result<Vec<ShownDocument>> {
    let mut first = Vec::new();
    for path in files.iter().filter(|path| is_text(path)) {
        let (rules, mut format) = (tokenizer.rules(), None);
        if first.len() >= count {
            break;
        }
        let text = if kind(path) == Some(SourceKind::Text) { beginning(path)? } else { String::new() };
        if !text.is_empty() {
            let shown = tokenizer.run(&[TextWork::ShownText(&text)], stop, |_, cause| Error::format(path, cause))?;
            first.extend(documents(path, None, shown));
        }
        for_each_record(path, rules, |line, record| {
            let wrong = |cause: String| Error::format(path, format_args!("{} {line}: {cause}", place_word(path)));
            let format = match format {
                Some(format) => format,
                None => *format.insert(rules.detect(record).map_err(wrong)?),
            };
            let shown = tokenizer.run(&[TextWork::ShownRecord(format, record)], stop, |_, cause| wrong(cause))?;
            first.extend(documents(path, Some(line), shown));
            Ok(first.len() < count)
        })?;
    }
    first.truncate(count);
    Ok(first)
}

/// The documents of a record, or of a file that is one.
fn documents(path: &Path, line: Option<u64>, done: Vec<Done>) -> Vec<ShownDocument> {
    let shown = done.into_iter().filter_map(|done| if let Done::Shown(documents) = done { Some(documents) } else { None });
    let document = |(tokens, pieces)| {
        let pieces = joined(pieces, SHOWN_CHARACTERS);
        ShownDocument { file: path.display().to_string(), line, tokens: line.map(|_| tokens), pieces }
    };
    shown.flatten().map(document).collect()
}

/// The beginning of a file that is one document, more than is shown.
fn beginning(path: &Path) -> Result<String> {
    let mut reader = TextReader::open(path)?;
    Ok(reader.next()?.unwrap_or_default().chars().take(SHOWN_CHARACTERS + 1).collect())
}

/// Largest possible size of all of `texts`, uncompressed; a file that cannot be found and is not `known` counts as empty.
pub(in crate::data) fn bytes_of(texts: &[&Path], known: &KnownSources) -> u64 {
    sum_of(texts, known, EXPANSION_MAX)
}

/// As [`bytes_of`], with the usual ratio of compression.
pub(in crate::data) fn usual_bytes_of(texts: &[&Path]) -> u64 {
    sum_of(texts, &KnownSources::default(), EXPANSION_USUAL)
}

fn sum_of(texts: &[&Path], known: &KnownSources, expansion: u64) -> u64 {
    let expands = |path: &Path| is_compressed(path) || kind(path) == Some(SourceKind::Parquet);
    let bytes = |path: &Path| known.missing(path).map(|missing| missing.bytes).or_else(|| Some(path.metadata().ok()?.len()));
    let size = |path: &&Path| Some(bytes(path)? * if expands(path) { expansion } else { 1 });
    texts.iter().filter_map(size).sum()
}

#[derive(Debug, PartialEq, Eq)]
pub(in crate::data) struct Read {
    pub(in crate::data) bytes: u64,
    /// In hexadecimal.
    pub(in crate::data) sha256: String,
}

/// Tokenizes the text files `texts`, or the text that ships with the program when there are none, into `sink`.
///
/// # Errors
/// `Io` when one cannot be read; `Format` that names the place of the fault: an empty file, bytes that are not UTF-8, a line
/// without `text`, an id outside the vocabulary or of other input than text; `Interrupted`.
pub(in crate::data) fn tokenize<S: Sink + Send>(
    texts: &[&Path],
    tokenizer: &Tokenizer,
    vocab_size: usize,
    sink: S,
    preparation: &mut Preparation<'_>,
) -> Result<(DocumentTotals<S>, Vec<Read>)> {
    let all = texts.iter().filter_map(|path| path.metadata().ok()).map(|metadata| metadata.len()).sum();
    let (mut read, mut empty, stop) = (Vec::new(), Vec::new(), preparation.stop().clone());
    let documents = Documents::new(sink, vocab_size, tokenizer.end_of_text(), tokenizer.begin_of_text());
    let documents = documents.without(tokenizer.media_tokens());
    let mut totals = encode(tokenizer, documents, &stop, |encoder| {
        if texts.is_empty() {
            encoder.begin(DocumentPosition { path: Path::new("the built-in text").into(), source: 0, line: None });
            encoder.push(DEMO_TEXT)?;
            return encoder.end();
        }
        let mut done = 0;
        for (source, path) in texts.iter().enumerate() {
            let place = DocumentPosition { path: (*path).into(), source, line: None };
            let mut progress = |offset| {
                preparation.progress("reading text", done + offset, all);
                preparation.check_stop()
            };
            let (file, holds) = read_file(encoder, place, &mut progress)?;
            done += file.bytes;
            empty.extend((holds == FolderContent::Nothing).then_some((*path, file.bytes)));
            read.push(file);
        }
        Ok(())
    })?;
    // Parts behind the last document end where it ends.
    totals.source_ends.resize(texts.len().max(totals.source_ends.len()), totals.tokens);
    log_empty(&empty, texts.len(), preparation)?;
    let all = totals.records + totals.skipped;
    for warning in &totals.remarks.warnings(all, tokenizer.end_token()) {
        preparation.warn(warning);
    }
    for note in &totals.remarks.notes(all) {
        preparation.note(note);
    }
    log_skipped(&totals, preparation)?;
    Ok((totals, read))
}

/// Reports the number of files, of `all`, that hold no document.
///
/// # Errors
/// `Format` at the first of them where no file holds one.
fn log_empty(empty: &[(&Path, u64)], all: usize, preparation: &mut Preparation<'_>) -> Result<()> {
    let Some((path, bytes)) = empty.first() else { return Ok(()) };
    if empty.len() < all {
        preparation.note(format!("{}: holds no document, like {} of {all} files; they are skipped", path.display(), empty.len()));
        return Ok(());
    }
    let word = place_word(path);
    Err(if *bytes == 0 {
        Error::format(path, "the file is empty")
    } else {
        Error::format(path, format_args!("no {word} holds a document"))
    })
}

/// Reports the number of records that were left out.
///
/// # Errors
/// `Format` at the first of them, when there are many: then the mask is probably not the intended one.
fn log_skipped<S>(totals: &DocumentTotals<S>, preparation: &mut Preparation<'_>) -> Result<()> {
    let DocumentTotals { skipped, records, first_skipped, .. } = totals;
    let Some(first) = first_skipped else { return Ok(()) };
    let cause = format!("no token is trained, as in {skipped} of {} records", skipped + records);
    if 100 * skipped > skipped + records {
        let advice = "answers have the role assistant, and --train-on selects the trained answers";
        return Err(first.error(format_args!("{cause}: {advice}")));
    }
    preparation.warn(format!("{}; they are left out", first.error(cause)));
    Ok(())
}

/// Whether a file holds documents.
#[derive(PartialEq)]
enum FolderContent {
    Documents,
    Nothing,
}

impl FolderContent {
    fn if_any(has_documents: bool) -> Self {
        if has_documents { Self::Documents } else { Self::Nothing }
    }
}

/// Reads the text file at `place`.
fn read_file(
    encoder: &mut Encoder<'_>,
    place: DocumentPosition,
    progress: &mut impl FnMut(u64) -> Result<()>,
) -> Result<(Read, FolderContent)> {
    if kind(&place.path) == Some(SourceKind::Parquet) {
        return read_rows(encoder, &place, progress);
    }
    let mut reader = TextReader::open(&place.path)?;
    let holds = match kind(&place.path) {
        Some(SourceKind::JsonLines) => read_records(encoder, &mut reader, &place, Lines::default(), progress)?,
        Some(SourceKind::JsonArray) => read_records(encoder, &mut reader, &place, Elements::default(), progress)?,
        _ => read_document(encoder, &mut reader, place, progress)?,
    };
    Ok((Read { bytes: reader.offset(), sha256: reader.sha256() }, holds))
}

fn read_document(
    encoder: &mut Encoder<'_>,
    reader: &mut TextReader,
    place: DocumentPosition,
    progress: &mut impl FnMut(u64) -> Result<()>,
) -> Result<FolderContent> {
    let mut holds = FolderContent::Nothing;
    while let Some(text) = reader.next()? {
        if holds == FolderContent::Nothing {
            encoder.begin(place.clone());
            holds = FolderContent::Documents;
        }
        encoder.push(text)?;
        progress(reader.offset())?;
    }
    encoder.end().map(|()| holds)
}

fn read_records(
    encoder: &mut Encoder<'_>,
    reader: &mut TextReader,
    place: &DocumentPosition,
    mut parts: impl RecordParts,
    progress: &mut impl FnMut(u64) -> Result<()>,
) -> Result<FolderContent> {
    let (mut format, mut is_empty) = (None, true);
    while let Some(block) = reader.next()? {
        is_empty = false;
        parts.push(&place.path, block, |number, record| read_record(encoder, place, &mut format, number, record))?;
        progress(reader.offset())?;
    }
    if !is_empty {
        parts.finish(&place.path, |number, record| read_record(encoder, place, &mut format, number, record))?;
    }
    Ok(FolderContent::if_any(format.is_some()))
}

/// Reads a parquet file.
fn read_rows(
    encoder: &mut Encoder<'_>,
    place: &DocumentPosition,
    progress: &mut impl FnMut(u64) -> Result<()>,
) -> Result<(Read, FolderContent)> {
    let (mut format, rules, stop) = (None, encoder.rules(), encoder.stop());
    for_each_row(&place.path, rules, stop, &mut |row, record, offset| {
        read_record(encoder, place, &mut format, row, record)?;
        progress(offset).map(|()| true)
    })?;
    let Fingerprint { bytes, sha256, .. } = Fingerprint::read(&place.path, &mut |_| progress(0))?;
    Ok((Read { bytes, sha256 }, FolderContent::if_any(format.is_some())))
}

/// Reads a record of a file; the first record determines `format`.
fn read_record(
    encoder: &mut Encoder<'_>,
    place: &DocumentPosition,
    format: &mut Option<DataFormat>,
    number: u64,
    record: &str,
) -> Result<()> {
    if record.trim().is_empty() {
        return Ok(());
    }
    let place = DocumentPosition { line: Some(number), ..place.clone() };
    let rules = encoder.rules();
    let format = match *format {
        Some(format) => format,
        None => *format.insert(rules.detect(record).map_err(|cause| place.error(cause))?),
    };
    encoder.record(place, format, record)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::encode::tokenizer_handle::tests::{WORDS, load_or_bytes, model_dir, with_bos};
    use proptest::prelude::*;

    /// Every token of the file `name` with this content, in bytes or, with `words`, in words.
    fn tokens(name: &str, content: &[u8], words: bool, vocab_size: usize) -> Result<Vec<u32>> {
        let dir = if words { model_dir(&[("tokenizer.json", WORDS)]) } else { model_dir(&[]) };
        let path = dir.path().join(name);
        std::fs::write(&path, content).unwrap();
        let tokenizer = load_or_bytes(dir.path())?;
        tokenize(&[&path], &tokenizer, vocab_size, Vec::new(), &mut Preparation::default()).map(|(totals, _)| totals.sink)
    }

    #[test]
    fn text_is_one_document_and_json_lines_are_many() {
        assert_eq!(tokens("a.txt", "\u{feff}ab\n".as_bytes(), false, 256).unwrap(), [97, 98, 10]);
        let lines = "{\"text\": \"a b\"}\r\n\n  \n{\"id\": 1, \"text\": \"b\"}";
        assert_eq!(tokens("a.jsonl", lines.as_bytes(), true, 8).unwrap(), [0, 1, 7, 1]);
        assert_eq!(tokens("a.jsonl", " {\"text\": \"\\u0061\\n\", \"id\": [1]}\r".as_bytes(), false, 256).unwrap(), [97, 10]);
    }

    #[test]
    fn every_document_begins_with_the_tokenizers_token() {
        let dir = model_dir(&[("tokenizer.json", &with_bos(WORDS)), ("a.jsonl", "{\"text\": \"a b\"}\n{\"text\": \"a\"}")]);
        let tokenizer = load_or_bytes(dir.path()).unwrap();
        let path = dir.path().join("a.jsonl");
        let (totals, _) = tokenize(&[&path], &tokenizer, 8, Vec::new(), &mut Preparation::default()).unwrap();
        assert_eq!((totals.sink, totals.documents), (vec![1, 0, 1, 7, 1, 0], 2));
    }

    #[test]
    fn errors_name_file_place_and_cause() {
        let cases: &[(&str, &[u8], &str)] = &[
            ("a.txt", b"", "a.txt: the file is empty"),
            ("a.jsonl", b"", "a.jsonl: the file is empty"),
            ("a.jsonl", b"\n \n", "a.jsonl: no line holds a document"),
            ("a.txt", b"abc\xffd", "a.txt: byte offset 3: not UTF-8"),
            ("a.jsonl", b"{\"text\": \"a\"}\n\xff", "a.jsonl: byte offset 14: not UTF-8"),
            ("a.jsonl", b"{\"text\": \"a\"}\n\n{\"txt\": \"b\"}", "a.jsonl: line 3: lacks the columns of text, which its file has"),
            ("a.jsonl", b"{\"text\": 5}", "a.jsonl: line 1: `text` is not a string"),
            ("a.jsonl", b"\n{\"text\": \"a", "a.jsonl: line 2: EOF while parsing a string (column 11)"),
            ("a.txt", b"aaz", "a.txt: token 2 has id 122, outside the vocabulary of 100"),
            ("a.jsonl", b"{\"text\": \"a\"}\n{\"text\": \"az\"}", "a.jsonl: line 2: token 1 has id 122, outside the vocabulary of 100"),
            ("a.jsonl", b"{\"text\": \"a\"}\n[\"text\"]", "a.jsonl: line 2: not an object"),
            ("a.jsonl", b"[{\"text\": \"a\"}]", "a.jsonl: line 1: not an object; each record must be an object"),
            ("a.jsonl", b"5", "a.jsonl: line 1: not an object"),
            ("a.jsonl", b"{\"txt\": \"a\"}", "a.jsonl: line 1: no known column (columns: txt; known: text, messages, "),
            (
                "a.jsonl",
                b"{\"text\": \"a\", \"messages\": []}",
                "line 1: its columns match text and messages; choose one with --data-format",
            ),
            ("a.jsonl", b"{\"messages\": []}", "a.jsonl: line 1: `messages` is empty"),
            ("a.jsonl", b"{\"messages\": [{\"role\": \"user\"}]}", "use --chat-template FILE"),
            ("a.jsonl", b"{\"prompt\": \"a\", \"completion\": \"\"}", "line 1: no token is trained, as in 1 of 1 records"),
            ("a.jsonl", b"{\"input_ids\": [1, 2], \"labels\": [1, 3]}", "line 1: token 1 has id 2 and label 3"),
            ("a.json", b"[{\"text\": \"a\"}, {\"text\": 1}]", "a.json: line 2: `text` is not a string"),
            ("a.json", b"[{\"text\": \"a\"}, {", "a.json: ends within record 2"),
            ("a.txt.gz", b"abc", "a.txt.gz: gzip: "),
            ("a.txt.zst", b"abc", "a.txt.zst: zstd: "),
        ];
        for (name, content, cause) in cases {
            let message = tokens(name, content, false, 100).unwrap_err().to_string();
            assert!(message.contains(cause) && !message.contains('\n'), "{cause:?} is not in {message:?}");
        }
    }

    #[test]
    fn an_empty_part_of_many_is_skipped_and_logged() {
        let dir = model_dir(&[]);
        let golden = |name: &str| std::fs::read(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/parquet").join(name)).unwrap();
        let (text, no_rows) = (golden("binary.parquet"), golden("no_rows.parquet"));
        let empty: [(&str, &[u8]); 7] = [
            ("0.jsonl", b""),
            ("0.json", b""),
            ("1.json", b" [ ]\n"),
            ("0.txt", b""),
            ("1.jsonl", b"\n \n"),
            ("0.JSONL.gz", b""),
            ("0.parquet", &no_rows),
        ];
        let full: [(&str, &[u8]); 2] = [("a.jsonl", b"{\"text\": \"ab\"}"), ("z.Parquet", &text)];
        for (name, content) in empty.iter().chain(&full) {
            std::fs::write(dir.path().join(name), content).unwrap();
        }
        for (full_name, _) in &full {
            for (name, _) in &empty {
                let paths = [dir.path().join(name), dir.path().join(full_name), dir.path().join(name)];
                let texts: Vec<&Path> = paths.iter().map(|path| path.as_path()).collect();
                let mut notes = Vec::new();
                let mut preparation = Preparation::new(&StopFlag::default(), None, None, |event| {
                    if let crate::progress_event::ProgressEvent::Note(line) = event {
                        notes.push(line.to_string());
                    }
                });
                let (totals, read) = tokenize(&texts, &Tokenizer::bytes(), 256, Vec::new(), &mut preparation).unwrap();
                drop(preparation);
                assert_eq!((read.len(), totals.source_ends), (3, vec![0, totals.tokens, totals.tokens]), "{name}");
                let output = format!("{name}: holds no document, like 2 of 3 files; they are skipped");
                assert!(notes.len() == 1 && notes[0].ends_with(&output), "{notes:?}");
                let alone = tokenize(&texts[..1], &Tokenizer::bytes(), 256, Vec::new(), &mut Preparation::default()).err().unwrap();
                assert!(alone.to_string().contains("the file is empty") || alone.to_string().contains("holds a document"), "{alone}");
                assert_eq!(hold_records(&texts[..1], &RecordRules::default()).unwrap(), [false], "{name}");
            }
        }
    }

    #[test]
    fn masks_come_with_tokens_and_compressed_files_are_read() {
        use crate::data::loss_weight::UNTRAINED;
        use flate2::{Compression, write::GzEncoder};
        use std::io::Write;
        let gz = |bytes: &[u8]| {
            let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
            encoder.write_all(bytes).unwrap();
            encoder.finish().unwrap()
        };
        let json = b"[{\"prompt\": \"a\", \"completion\": \"bc\"}]";
        let expected = [97 | UNTRAINED, 98, 99];
        assert_eq!(tokens("a.json", json, false, 256).unwrap(), expected);
        let zst = |bytes: &[u8]| zstd::encode_all(bytes, 1).unwrap();
        assert_eq!(tokens("a.json.gz", &gz(json), false, 256).unwrap(), expected);
        let [begin, end] = [&json[..9], &json[9..]];
        assert_eq!(tokens("a.json.zst", &[zst(begin), zst(end)].concat(), false, 256).unwrap(), expected, "frame after frame");
        let ids = b"{\"input_ids\": [1, 2, 3], \"labels\": [-100, 2, -100]}";
        assert_eq!(tokens("a.jsonl", ids, false, 256).unwrap(), [1 | UNTRAINED, 2, 3 | UNTRAINED]);
        let much = vec![b'a'; 20 << 20];
        for (name, bomb) in [("a.txt.gz", gz(&much)), ("a.txt.zst", zst(&much))] {
            let refused = tokens(name, &bomb, false, 256).unwrap_err().to_string();
            assert!(refused.ends_with("expands to more than 16777216 bytes, 200 times its size"), "{refused}");
        }
        for (name, whole, cause) in [("a.txt.gz", gz(b"abc"), "gzip: "), ("a.txt.zst", zst(b"abc"), "zstd: ")] {
            let refused = tokens(name, &whole[..whole.len() - 2], false, 256).unwrap_err().to_string();
            assert!(refused.contains(cause), "{refused}");
        }
        // Data does not need a window of 2 GiB; a decoder would hold all of it in memory.
        let wide = [0x28, 0xb5, 0x2f, 0xfd, 0, 0xa8, 1, 0, 0];
        let refused = tokens("a.txt.zst", &wide, false, 256).unwrap_err().to_string();
        assert!(refused.contains("zstd: ") && refused.contains("memory"), "{refused}");
    }

    #[test]
    fn few_records_without_a_trained_token_are_left_out() {
        let good = "{\"prompt\": \"a\", \"completion\": \"b\"}\n".repeat(100);
        let bad = "{\"prompt\": \"a\", \"completion\": \"\"}\n";
        assert_eq!(tokens("a.jsonl", format!("{good}{bad}").as_bytes(), false, 256).unwrap().len(), 200);
        let refused = tokens("a.jsonl", format!("{good}{bad}{bad}").as_bytes(), false, 256).unwrap_err().to_string();
        assert!(refused.contains("line 101: no token is trained, as in 2 of 102 records"), "{refused}");
    }

    #[test]
    fn irregular_files_are_refused_at_once() {
        let dir = model_dir(&[]);
        for name in ["pipe.txt", "pipe.jsonl"] {
            let path = dir.path().join(name);
            nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
            let refused = tokenize(&[&path], &Tokenizer::bytes(), 256, Vec::new(), &mut Preparation::default());
            assert!(refused.err().unwrap().to_string().ends_with("not a regular file"));
        }
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_never_panic(content: Vec<u8>, kind in 0..4usize) {
            let _ = tokens(["a.jsonl", "a.txt", "a.txt.gz", "a.txt.zst"][kind], &content, false, 256);
        }

        #[test]
        fn damaged_archives_never_panic(text in ".{0,200}", at: prop::sample::Index, byte: u8) {
            let mut bytes = zstd::encode_all(text.as_bytes(), 1).unwrap();
            let at = at.index(bytes.len());
            bytes[at] = byte;
            let _ = tokens("a.txt.zst", &bytes, false, 256);
        }

        #[test]
        fn arbitrary_lines_never_panic(lines in prop::collection::vec("[{}\\[\\]\":,a-z0-9\\\\ ]{0,30}|\\{\"text\": \".{0,9}\"\\}", 0..6)) {
            let _ = tokens("a.jsonl", lines.join("\n").as_bytes(), false, 256);
        }
    }
}
