//! Record of a run's data files: their paths, their checksums and the folder of their tokens. The record lies in the output directory. A
//! run continues with it when the files are gone, and does not read unchanged files again.

use super::chat::record::{DataFormat, RecordRules};
use super::checksum::Fingerprint;
use super::read::files::{self, SourceKind, is_text, kind};
use crate::disk::{self, OwnMark, OwnedName, Records, RunRecord};
use crate::error::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// The record of data files.
pub(crate) const SOURCES: RunRecord = RunRecord {
    file: OwnedName {
        pattern: "data-sources.json",
        kind: "record of data files",
        mark: OwnMark::Head("{\"superoffload\":\"data sources\","),
    },
    old_name: "data-sources.json",
    // Some hundred bytes for each of a million files.
    bytes_max: 1 << 30,
};

/// Known facts about the data of a run.
#[derive(Default)]
pub(crate) struct KnownSources {
    /// Where the run was, of which something is known.
    dir: PathBuf,
    /// Of a run before, as far as it still holds.
    before: Vec<UnchangedSources>,
    rules: Option<KnownRules>,
    /// Of this one.
    now: Vec<SourceList>,
}

/// Content of the record.
#[derive(PartialEq, Serialize, Deserialize)]
struct KeptSources {
    rules: KnownRules,
    lists: Vec<SourceList>,
}

/// Result of reading the first records of all files, and the rules by which they were read.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
struct KnownRules {
    format: DataFormat,
    columns: BTreeMap<String, String>,
    has_answers: bool,
}

/// The files of training or of evaluation.
#[derive(PartialEq, Serialize, Deserialize)]
pub(super) struct SourceList {
    /// Paths that the user named, absolute.
    pub(super) named: Vec<PathBuf>,
    /// Absolute. The checksum is empty where nobody knows it.
    pub(super) files: Vec<(PathBuf, Fingerprint)>,
    /// For each file whether it holds records that are not text; empty where nobody asked.
    pub(super) holds_records: Vec<bool>,
    /// The prepared folder, absolute; none without text.
    pub(super) folder: Option<PathBuf>,
}

/// Where text is kept.
pub(super) struct KeptText {
    pub(super) folder: PathBuf,
    /// Of each text file, in hexadecimal.
    pub(super) sha256: Vec<String>,
}

/// A list of files of which none has changed; some may be missing.
struct UnchangedSources {
    list: SourceList,
    missing: BTreeMap<PathBuf, MissingFile>,
}

struct MissingFile {
    fingerprint: Fingerprint,
    why: Error,
}

/// Where the tokens of text lie of which a file is missing.
pub(super) struct CachedTokens {
    /// As they were kept.
    pub(super) folder: PathBuf,
    /// The run that they were kept for.
    pub(super) dir: PathBuf,
    /// Why a file cannot be read, and how many more there are, in words.
    pub(super) why: String,
}

impl UnchangedSources {
    /// `list`, unless one of its files has changed or there are more now. Token files are read where they are: none may be missing.
    fn of(list: SourceList) -> Option<Self> {
        let mut missing = BTreeMap::new();
        for (path, fingerprint) in &list.files {
            match fingerprint.holds(path) {
                Ok(true) => {}
                Err(why) if is_text(path) => drop(missing.insert(path.clone(), MissingFile { fingerprint: fingerprint.clone(), why })),
                Ok(false) | Err(_) => return None,
            }
        }
        let known: BTreeSet<&PathBuf> = list.files.iter().map(|(path, _)| path).collect();
        let files_of = |named| files::find_files(std::slice::from_ref(named)).unwrap_or_default();
        let is_whole = list.named.iter().flat_map(files_of).all(|path| known.contains(&path));
        is_whole.then_some(Self { list, missing })
    }

    fn texts(&self) -> impl Iterator<Item = &Path> {
        self.list.files.iter().map(|(path, _)| path.as_path()).filter(|path| is_text(path))
    }
}

impl KnownSources {
    /// Loads the record of the run in `dir`, without outdated entries. An unreadable record is ignored, and the data is read again.
    pub(crate) fn load(dir: &Path) -> Self {
        let Some(KeptSources { rules, lists }) = SOURCES.read(dir) else { return Self::default() };
        let all = lists.len();
        let before: Vec<_> = lists.into_iter().filter_map(UnchangedSources::of).collect();
        let rules = (before.len() == all).then_some(rules);
        Self { dir: dir.into(), rules, before, now: Vec::new() }
    }

    /// As [`files::find_files`], with the missing ones that are known.
    ///
    /// # Errors
    /// Errors of [`files::find_files`].
    pub(crate) fn find_files(&self, paths: &[PathBuf]) -> Result<Vec<PathBuf>> {
        match self.before(paths).filter(|before| !before.missing.is_empty()) {
            Some(before) => Ok(before.list.files.iter().map(|(path, _)| path.clone()).collect()),
            None => files::find_files(paths),
        }
    }

    /// The fingerprint of the missing file at `path`.
    pub(crate) fn missing(&self, path: &Path) -> Option<&Fingerprint> {
        self.before.iter().find_map(|before| before.missing.get(path)).map(|missing| &missing.fingerprint)
    }

    /// Whether a record may go through a chat template, if that is known of all that `lists` name, read by `rules`.
    pub(crate) fn has_answers(&self, lists: &[&[PathBuf]], rules: &RecordRules) -> Option<bool> {
        let known = self.rules.as_ref().filter(|known| (known.format, &known.columns) == (rules.format, &rules.columns))?;
        let requested = lists.iter().filter(|paths| !paths.is_empty());
        let is_known = requested.clone().all(|paths| self.before(paths).is_some()) && requested.count() == self.before.len();
        is_known.then_some(known.has_answers)
    }

    /// For each of `files` whether it holds records that are not text, if that is known.
    pub(super) fn holds_records(&self, paths: &[PathBuf], files: usize) -> Option<&[bool]> {
        let known = &self.before(paths)?.list.holds_records;
        (known.len() == files).then_some(known)
    }

    /// Prepared tokens that replace `texts`, if one of `texts` is missing.
    pub(super) fn stand_in(&self, texts: &[&Path]) -> Option<CachedTokens> {
        let before = self.before.iter().find(|before| !before.missing.is_empty() && before.texts().eq(texts.iter().copied()))?;
        let (first, folder) = (&before.missing.values().next()?.why, before.list.folder.clone()?);
        let why = match before.missing.len() - 1 {
            0 => first.to_string(),
            more => format!("{first}, and the same for {more} more"),
        };
        Some(CachedTokens { folder, dir: self.dir.clone(), why })
    }

    /// Adds the fingerprints of the `files` that `paths` name, and the folder of the tokens of their text.
    ///
    /// # Errors
    /// `Io` where a file cannot be read that is not known to be missing.
    pub(super) fn add(&mut self, paths: &[PathBuf], files: &[PathBuf], holds_records: &[bool], kept: Option<KeptText>) -> Result<()> {
        let (folder, sha256) = kept.map(|KeptText { folder, sha256 }| (absolute(folder), sha256)).unzip();
        let mut sha256 = sha256.into_iter().flatten();
        let known = |path: &PathBuf| {
            let fingerprint = match self.missing(path) {
                Some(fingerprint) => fingerprint.clone(),
                None => Fingerprint::without_content(&disk::InFile::open(path)?)?,
            };
            let sha256 = if kind(path) == Some(SourceKind::Tokens) { None } else { sha256.next() };
            Ok((absolute(path), Fingerprint { sha256: sha256.unwrap_or_default(), ..fingerprint }))
        };
        let files = files.iter().map(known).collect::<Result<_>>()?;
        let named = paths.iter().map(absolute).collect();
        self.now.push(SourceList { named, files, holds_records: holds_records.into(), folder });
        Ok(())
    }

    /// Saves in `dir` the record of this run's data, which was read by `rules`.
    ///
    /// # Errors
    /// `Io` when it cannot be written.
    pub(crate) fn save(self, dir: &Path, rules: &RecordRules) -> Result<()> {
        let RecordRules { format, columns, has_answers, .. } = rules;
        let rules = KnownRules { format: *format, columns: columns.clone(), has_answers: *has_answers };
        let known = KeptSources { rules, lists: self.now };
        if SOURCES.read(dir).is_some_and(|kept: KeptSources| kept == known) {
            return Ok(());
        }
        Records::at(dir)?.write(&SOURCES, &known)
    }

    /// Whether this run found its tokens in a folder of this name.
    pub(super) fn keeps(&self, name: &str) -> bool {
        self.now.iter().filter_map(|list| list.folder.as_ref()?.file_name()).any(|folder| folder == name)
    }

    /// The recorded list of the files that `paths` name.
    fn before(&self, paths: &[PathBuf]) -> Option<&UnchangedSources> {
        let named = || paths.iter().map(absolute);
        self.before.iter().find(|before| before.list.named.iter().cloned().eq(named()))
    }
}

fn absolute(path: impl AsRef<Path>) -> PathBuf {
    std::path::absolute(path.as_ref()).unwrap_or(path.as_ref().into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    /// Two texts and ids, known of a run in `dir`.
    fn kept(dir: &Path) -> [PathBuf; 3] {
        let files = ["a.txt", "b.bin", "c.jsonl"].map(|name| dir.join(name));
        files.iter().for_each(|file| fs::write(file, "1234").unwrap());
        let mut known = KnownSources::default();
        let text = KeptText { folder: dir.join("folder"), sha256: vec!["aa".into(), "cc".into()] };
        known.add(&files, &files, &[], Some(text)).unwrap();
        known.save(dir, &RecordRules::default()).unwrap();
        files
    }

    #[test]
    fn text_may_be_missing_and_keeps_its_size_and_checksum() {
        let dir = tempfile::tempdir().unwrap();
        let files = kept(dir.path());
        let known = KnownSources::load(dir.path());
        assert!(known.missing(&files[0]).is_none() && known.stand_in(&[&files[0], &files[2]]).is_none());
        fs::remove_file(&files[2]).unwrap();
        let known = KnownSources::load(dir.path());
        assert_eq!(known.find_files(&files).unwrap(), files);
        let missing = known.missing(&files[2]).unwrap();
        assert_eq!((missing.bytes, missing.sha256.as_str()), (4, "cc"));
        let CachedTokens { folder, why, .. } = known.stand_in(&[&files[0], &files[2]]).unwrap();
        assert!(folder == dir.path().join("folder") && why.contains("c.jsonl: No such file") && !why.contains("more"), "{why}");
        assert!(known.stand_in(&[&files[2]]).is_none(), "other text");
        assert!(known.find_files(&files[2..]).is_err(), "nobody knows of it alone");
    }

    #[test]
    fn changed_files_and_files_without_text_have_no_stand_in() {
        type Change = fn(&[PathBuf; 3]);
        let changes: [Change; 3] = [|_| {}, |files| fs::write(&files[0], "12345").unwrap(), |files| fs::remove_file(&files[1]).unwrap()];
        let is_known = changes.map(|change| {
            let dir = tempfile::tempdir().unwrap();
            let files = kept(dir.path());
            fs::remove_file(&files[2]).unwrap();
            change(&files);
            KnownSources::load(dir.path()).find_files(&files).is_ok()
        });
        assert_eq!(is_known, [true, false, false]);
    }

    #[test]
    fn record_rules_are_reused_where_files_and_settings_are_unchanged() {
        let dir = tempfile::tempdir().unwrap();
        let files = kept(dir.path());
        let requested = |lists: &[&[PathBuf]], rules: &RecordRules| KnownSources::load(dir.path()).has_answers(lists, rules);
        let rules = RecordRules::default();
        assert_eq!(requested(&[&files, &[]], &rules), Some(false));
        assert_eq!(requested(&[&files[1..], &[]], &rules), None);
        assert_eq!(requested(&[&files, &files], &rules), None);
        assert_eq!(requested(&[&files], &RecordRules { format: DataFormat::Text, ..RecordRules::default() }), None);
        fs::write(dir.path().join(".superoffload/data-sources.json"), "{").unwrap();
        assert_eq!(requested(&[&files], &rules), None);
    }
}
