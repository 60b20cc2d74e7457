//! Prepared text: a folder of tokens that a run reads in place.
//!
//! | file | |
//! |---|---|
//! | `tokens.u32` | the ids of all documents, 32 bits each, little endian, separators between documents of text if the tokenizer has one; |
//! | | bits 19 to 31 hold the weight of the token, 0 for the weight 1: [`crate::data::loss_weight`] |
//! | `ends.u64` | for each document the number of tokens up to its end, 64 bits each, little endian; a separator belongs to neither side; |
//! | | the highest bit is set where the document is made of the same record as the one before |
//! | `manifest.json` | [`FORMAT_VERSION`], sources and tokenizer, sizes, a CRC-32C for each mebibyte of the files, and one of itself |
//!
//! A folder is written under a temporary name, synced and renamed, and so is whole or absent. Readers refuse unknown versions and fields.

use super::checked_files::{Check, CheckedFiles};
use super::parallel_scan::{BLOCK_BYTES, scan};
use crate::data::context::Preparation;
use crate::data::encode::documents::{DocumentTotals, Sink};
use crate::data::encode::text_files::Read;
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::data::run_sources::KeptText;
use crate::disk::{Dir, FileKind, InFile, OutFile, OwnMark, OwnedName, TmpDir};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

pub(crate) const FORMAT_VERSION: u32 = 5;

const TOKENS: &str = "tokens.u32";
const ENDS: &str = "ends.u64";
const MANIFEST: &str = "manifest.json";
/// A hundred thousand text files, or a hundred terabytes of tokens.
const MANIFEST_BYTES_MAX: u64 = 256 << 20;

/// Such a folder, whole or not: nothing but its files is in it, and a manifest is the program's.
pub(in crate::data) const FOLDER: OwnedName = OwnedName { pattern: "", kind: "prepared text", mark: OwnMark::Folder(is_prepared) };

fn is_prepared(dir: &Dir) -> Result<bool> {
    let manifest = OwnedName { pattern: MANIFEST, kind: "manifest", mark: OwnMark::Head("{\"format_version\":") };
    let is_whole = files_in(dir)?.len() == dir.names()?.len();
    Ok(is_whole && (dir.kind(MANIFEST)?.is_none() || manifest.is_own(dir, MANIFEST)?))
}

/// The program's files in the folder `dir`, the manifest first.
pub(in crate::data) fn files_in(dir: &Dir) -> Result<Vec<PathBuf>> {
    let mut files = vec![];
    for name in [MANIFEST, TOKENS, ENDS] {
        files.extend(matches!(dir.kind(name)?, Some(FileKind::File(_))).then(|| name.into()));
    }
    Ok(files)
}

/// Everything in `manifest.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PreparedManifest {
    format_version: u32,
    /// Name of the folder.
    key: String,
    tokenizer: String,
    separator: Option<u32>,
    tokens: u64,
    documents: u64,
    largest_id: u32,
    untrained: u64,
    /// Records without a trained token, which are not in here.
    skipped: u64,
    sources: Vec<TextSource>,
    files: Vec<PreparedFile>,
    /// Of this manifest with 0 in this place.
    crc32c: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct TextSource {
    path: PathBuf,
    bytes: u64,
    sha256: String,
    /// Tokens up to its end.
    tokens_end: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PreparedFile {
    name: String,
    bytes: u64,
    /// Of every block of 1 MiB; the last may be shorter.
    crc32c: Vec<u32>,
}

#[derive(Deserialize)]
struct PreparedVersion {
    format_version: u32,
}

pub(in crate::data) struct PreparedFrom<'a> {
    pub(in crate::data) key: &'a str,
    pub(in crate::data) tokenizer: String,
    pub(in crate::data) separator: Option<u32>,
    pub(in crate::data) sources: &'a [&'a Path],
}

impl<'a> PreparedFrom<'a> {
    pub(in crate::data) fn new(key: &'a str, tokenizer: &Tokenizer, sources: &'a [&'a Path]) -> Self {
        Self { key, tokenizer: tokenizer.identity().to_string(), separator: tokenizer.end_of_text(), sources }
    }
}

/// A folder to read.
pub(in crate::data) struct Prepared {
    pub(in crate::data) kept: KeptText,
    /// Whether this process has just made it.
    pub(in crate::data) is_fresh: bool,
    pub(in crate::data) tokens: InFile,
    /// For each document the tokens up to its end, 64 bits each.
    pub(in crate::data) ends: InFile,
    /// For each text file the tokens up to its end.
    pub(in crate::data) source_ends: Vec<u64>,
    pub(in crate::data) documents: u64,
    pub(in crate::data) largest_id: u32,
    pub(in crate::data) untrained: u64,
    pub(in crate::data) skipped: u64,
}

/// A file with checksums that is being written.
struct Chunked {
    name: &'static str,
    file: OutFile,
    chunk: Vec<u8>,
    bytes: u64,
    crc32c: Vec<u32>,
}

/// A folder being written. Dropping it removes the files, unless the folder was published.
pub(in crate::data) struct FolderWriter {
    tmp: TmpDir,
    tokens: Chunked,
    ends: Chunked,
}

impl Chunked {
    fn create(dir: &Dir, name: &'static str) -> Result<Self> {
        let file = dir.create_file(name)?;
        Ok(Self { name, file, chunk: Vec::with_capacity(BLOCK_BYTES), bytes: 0, crc32c: Vec::new() })
    }

    fn write(&mut self, mut bytes: &[u8]) -> Result<()> {
        while !bytes.is_empty() {
            let (head, rest) = bytes.split_at(bytes.len().min(BLOCK_BYTES - self.chunk.len()));
            self.chunk.extend_from_slice(head);
            bytes = rest;
            if self.chunk.len() == BLOCK_BYTES {
                self.flush()?;
            }
        }
        Ok(())
    }

    fn flush(&mut self) -> Result<()> {
        self.file.write(&self.chunk)?;
        self.bytes += self.chunk.len() as u64;
        self.crc32c.push(crc32c::crc32c(&self.chunk));
        self.chunk.clear();
        Ok(())
    }

    fn finish(mut self) -> Result<PreparedFile> {
        if !self.chunk.is_empty() {
            self.flush()?;
        }
        self.file.sync()?;
        Ok(PreparedFile { name: self.name.into(), bytes: self.bytes, crc32c: self.crc32c })
    }
}

// The files are the memory of the slices.
const _: () = assert!(cfg!(target_endian = "little"));

impl Sink for FolderWriter {
    fn append(&mut self, ids: &[u32]) -> Result<()> {
        self.tokens.write(bytemuck::cast_slice(ids))
    }

    fn end_document(&mut self, end: u64) -> Result<()> {
        self.ends.write(&end.to_le_bytes())
    }
}

impl FolderWriter {
    /// Starts a folder in `root` under the temporary name `tmp`, which must not exist.
    pub(in crate::data) fn create(root: &Dir, tmp: &str) -> Result<Self> {
        let tmp = TmpDir::create(root, tmp)?;
        let (tokens, ends) = (Chunked::create(tmp.dir(), TOKENS)?, Chunked::create(tmp.dir(), ENDS)?);
        Ok(Self { tmp, tokens, ends })
    }

    /// Makes `totals` durable and publishes the folder under its key.
    pub(in crate::data) fn publish(totals: DocumentTotals<Self>, read: Vec<Read>, origin: &PreparedFrom<'_>) -> Result<()> {
        let DocumentTotals { sink, tokens: count, documents, largest, source_ends, untrained, skipped, .. } = totals;
        let Self { mut tmp, tokens, ends } = sink;
        let entry = |((path, Read { bytes, sha256 }), tokens_end): ((&&Path, Read), u64)| TextSource {
            path: path.to_path_buf(),
            bytes,
            sha256,
            tokens_end,
        };
        let mut manifest = PreparedManifest {
            format_version: FORMAT_VERSION,
            key: origin.key.into(),
            tokenizer: origin.tokenizer.clone(),
            separator: origin.separator,
            tokens: count,
            documents,
            largest_id: largest,
            untrained,
            skipped,
            sources: origin.sources.iter().zip(read).zip(source_ends).map(entry).collect(),
            files: vec![tokens.finish()?, ends.finish()?],
            crc32c: 0,
        };
        let target = tmp.parent().join(origin.key);
        manifest.crc32c = manifest.checksum(&target)?;
        let json = serde_json::to_vec(&manifest).map_err(|e| Error::format(&target, e))?;
        tmp.dir().write_file(MANIFEST, &json)?;
        tmp.dir().sync()?;
        tmp.publish(origin.key)?;
        tmp.parent().sync()
    }
}

impl PreparedManifest {
    fn checksum(&self, path: &Path) -> Result<u32> {
        let unsealed = serde_json::to_vec(&Self { crc32c: 0, ..self.clone() });
        unsealed.map(|bytes| crc32c::crc32c(&bytes)).map_err(|e| Error::format(path, e))
    }

    /// Checks the version, the checksum and every claim that can be checked without the other files.
    fn decode(path: &Path, bytes: &[u8]) -> Result<Self> {
        let wrong = |cause: &str| Err(Error::format(path, cause));
        let version: PreparedVersion = serde_json::from_slice(bytes).map_err(|e| Error::format(path, e))?;
        if version.format_version != FORMAT_VERSION {
            let cause = format!("format {}, this build reads format {FORMAT_VERSION}", version.format_version);
            return wrong(&cause);
        }
        let manifest: Self = serde_json::from_slice(bytes).map_err(|e| Error::format(path, e))?;
        if manifest.checksum(path)? != manifest.crc32c {
            return wrong("damaged: its checksum differs");
        }
        let [tokens, ends] = &manifest.files[..] else { return wrong("it does not list two files") };
        let of = |file: &PreparedFile, name: &str, entries: u64, width: u64| {
            let blocks = file.bytes.div_ceil(BLOCK_BYTES as u64);
            file.name == name && entries.checked_mul(width) == Some(file.bytes) && file.crc32c.len() as u64 == blocks
        };
        let ends_rise = manifest.sources.iter().map(|source| source.tokens_end).is_sorted();
        let last = manifest.sources.last().map(|source| source.tokens_end);
        if of(tokens, TOKENS, manifest.tokens, 4) && of(ends, ENDS, manifest.documents, 8) && ends_rise && last == Some(manifest.tokens) {
            Ok(manifest)
        } else {
            wrong("its sizes contradict each other")
        }
    }
}

/// Opens the folder in `root` that `origin` names, through no link; `None` if it is not there. Its files are read once and compared with
/// their checksums, unless `checked` holds this check, or the folder `is_fresh`: this process has just written it.
///
/// # Errors
/// `Io`; `Format` when the folder is damaged or does not match its name; `Interrupted`.
pub(in crate::data) fn open(
    root: &Dir,
    origin: &PreparedFrom<'_>,
    is_fresh: bool,
    checked: &mut CheckedFiles,
    preparation: &mut Preparation<'_>,
) -> Result<Option<Prepared>> {
    let dir = match root.kind(origin.key)? {
        None => return Ok(None),
        Some(FileKind::Dir) => root.open_dir(origin.key)?,
        Some(_) => return Err(Error::format(root.join(origin.key), "not a directory")),
    };
    let path = dir.join(MANIFEST);
    if dir.kind(MANIFEST)?.is_none() {
        return Err(Error::format(&path, "missing"));
    }
    let bytes = InFile::open_in(&dir, MANIFEST)?.read_all(MANIFEST_BYTES_MAX)?;
    let manifest = PreparedManifest::decode(&path, &bytes)?;
    let made_with = (manifest.tokenizer.as_str(), manifest.separator);
    let is_of = manifest.key == origin.key && made_with == (origin.tokenizer.as_str(), origin.separator);
    if !is_of || manifest.sources.len() != origin.sources.len() {
        return Err(Error::format(&path, "its data does not match the name of its folder"));
    }
    let mut opened = Vec::new();
    for entry in &manifest.files {
        let file = InFile::open_in(&dir, &entry.name)?;
        if file.bytes() != entry.bytes {
            return Err(Error::format(file.path(), format_args!("{} bytes instead of {}", file.bytes(), entry.bytes)));
        }
        let claim = format!("as its manifest {:08x} says", manifest.crc32c);
        let check = Check { path: file.path().to_path_buf(), claim, stamp: file.stamp()? };
        checked.once(check, || if is_fresh { Ok(()) } else { verify(&file, entry, preparation) })?;
        opened.push(file);
    }
    let PreparedManifest { documents, largest_id, untrained, skipped, sources, .. } = manifest;
    let (source_ends, sha256) = sources.into_iter().map(|source| (source.tokens_end, source.sha256)).unzip();
    let kept = KeptText { folder: dir.path().into(), sha256 };
    let [tokens, ends] = <[InFile; 2]>::try_from(opened).map_err(|_| Error::format(&path, "it does not list two files"))?;
    Ok(Some(Prepared { kept, is_fresh, tokens, ends, source_ends, documents, largest_id, untrained, skipped }))
}

fn verify(file: &InFile, entry: &PreparedFile, preparation: &mut Preparation<'_>) -> Result<()> {
    scan(file, &format!("checking {}", file.path().display()), preparation, |block, bytes| {
        if crc32c::crc32c(bytes) == entry.crc32c[block as usize] {
            return Ok(());
        }
        Err(Error::format(file.path(), format_args!("damaged: the checksum of block {block} differs")))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::encode::documents::{DocumentPosition, Documents};
    use crate::disk::faults;

    const ORIGIN: fn(&str) -> PreparedFrom<'_> = |key| PreparedFrom { key, tokenizer: "bytes".into(), separator: Some(9), sources: &[] };

    /// Two documents of two files, of 1.5 blocks of tokens.
    fn write(dir: &Path, origin: &PreparedFrom<'_>) -> Result<PathBuf> {
        let mut documents = Documents::new(FolderWriter::create(&Dir::open(dir)?, "tmp")?, 10, origin.separator, &[]);
        for source in 0..2 {
            let place = DocumentPosition { path: origin.sources[source].into(), source, line: None };
            documents.begin()?;
            documents.append(&vec![source as u32 + 1; 3 * BLOCK_BYTES / 16], &place)?;
            documents.end(&place)?;
        }
        let read = ["aa", "bb"].map(|sha256| Read { bytes: 7, sha256: sha256.into() });
        FolderWriter::publish(documents.finish().unwrap(), read.into(), origin).map(|()| dir.join(origin.key))
    }

    fn reopen(dir: &Path, origin: &PreparedFrom<'_>) -> Result<Option<Prepared>> {
        open(&Dir::open(dir)?, origin, false, &mut CheckedFiles::default(), &mut Preparation::default())
    }

    #[test]
    fn published_data_reads_back_and_any_damage_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let sources = [Path::new("a.txt"), Path::new("b.txt")];
        let origin = PreparedFrom { sources: &sources, ..ORIGIN("key") };
        assert!(reopen(dir.path(), &origin).unwrap().is_none());
        let folder = write(dir.path(), &origin).unwrap();
        let tokens = 3 * BLOCK_BYTES / 16;
        let prepared = reopen(dir.path(), &origin).unwrap().unwrap();
        assert_eq!(prepared.source_ends, [tokens as u64, 2 * tokens as u64 + 1]);
        assert_eq!((prepared.tokens.bytes(), prepared.largest_id), (4 * (2 * tokens as u64 + 1), 9));
        let mut ends = [0; 16];
        InFile::open(&folder.join(ENDS)).unwrap().read_at(0, &mut ends).unwrap();
        assert_eq!(bytemuck::cast::<_, [u64; 2]>(ends), [tokens as u64, 2 * tokens as u64 + 1]);
        for (name, at) in [(TOKENS, 0), (TOKENS, BLOCK_BYTES + 5), (ENDS, 3), (MANIFEST, 30), (MANIFEST, 150)] {
            let path = folder.join(name);
            let good = std::fs::read(&path).unwrap();
            let damaged = |change: &dyn Fn(&mut Vec<u8>)| {
                let mut bytes = good.clone();
                change(&mut bytes);
                std::fs::write(&path, bytes).unwrap();
                matches!(reopen(dir.path(), &origin), Err(Error::Format { .. }))
            };
            assert!(damaged(&|bytes| bytes[at] ^= 1), "{name} {at}");
            assert!(damaged(&|bytes| bytes.truncate(at)), "{name} {at}");
            std::fs::write(&path, good).unwrap();
        }
        std::fs::rename(&folder, dir.path().join("other")).unwrap();
        assert!(reopen(dir.path(), &PreparedFrom { key: "other", sources: &sources, ..ORIGIN("other") }).is_err());
        std::fs::rename(dir.path().join("other"), &folder).unwrap();
        std::fs::remove_file(folder.join(MANIFEST)).unwrap();
        assert!(reopen(dir.path(), &origin).err().unwrap().to_string().ends_with("manifest.json: missing"));
    }

    #[test]
    fn versions_that_are_not_known_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let sources = [Path::new("a.txt"), Path::new("b.txt")];
        let origin = PreparedFrom { sources: &sources, ..ORIGIN("key") };
        let folder = write(dir.path(), &origin).unwrap();
        let path = folder.join(MANIFEST);
        let good: PreparedManifest = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let refusal = |mut manifest: PreparedManifest| {
            manifest.crc32c = manifest.checksum(&path).unwrap();
            std::fs::write(&path, serde_json::to_vec(&manifest).unwrap()).unwrap();
            reopen(dir.path(), &origin).err().unwrap().to_string()
        };
        assert!(refusal(PreparedManifest { format_version: 4, ..good.clone() }).contains("format 4, this build reads format 5"));
        assert!(refusal(PreparedManifest { tokens: u64::MAX, ..good.clone() }).contains("contradict"));
        assert!(refusal(PreparedManifest { files: vec![], ..good }).contains("two files"));
    }

    #[test]
    fn nothing_that_fails_leaves_a_folder() {
        let sources = [Path::new("a.txt"), Path::new("b.txt")];
        let origin = PreparedFrom { sources: &sources, ..ORIGIN("key") };
        let dir = tempfile::tempdir().unwrap();
        faults::arm(None);
        write(dir.path(), &origin).unwrap();
        let operations = faults::disarm();
        assert!(operations.len() > 10, "{operations:?}");
        for (at, operation) in operations.iter().enumerate() {
            let dir = tempfile::tempdir().unwrap();
            faults::arm(Some((at, faults::Mode::Error)));
            let outcome = write(dir.path(), &origin);
            faults::disarm();
            assert!(outcome.is_err(), "{operation:?}");
            let published = dir.path().join("key");
            assert!(!published.exists() || reopen(dir.path(), &origin).unwrap().is_some(), "half a folder: {operation:?}");
            assert!(!dir.path().join("tmp").exists());
        }
    }
}
