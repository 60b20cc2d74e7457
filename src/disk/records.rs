//! Records of a run in its output directory: the folder `.superoffload`, which a manifest marks as the program's own, and the records in
//! it, each recognised by its first bytes.

use super::owned::{OwnMark, OwnedName};
use super::{Dir, FileKind};
use crate::error::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::Read;
use std::path::Path;

/// The folder in the output directory.
pub(crate) const RECORDS: OwnedName = OwnedName { pattern: ".superoffload", kind: "folder of records", mark: OwnMark::Folder(is_records) };
/// The manifest that marks the folder.
pub(crate) const RECORDS_MANIFEST: OwnedName =
    OwnedName { pattern: "manifest.json", kind: "manifest of records", mark: OwnMark::Head(MANIFEST_HEAD) };
const MANIFEST_HEAD: &str = "{\"superoffload\":\"records of a run\",";

/// A record in the folder.
#[derive(Debug)]
pub(crate) struct RunRecord {
    /// The record's name and the text that it begins with.
    pub(crate) file: OwnedName,
    /// The record's name in the output directory of versions before the folder existed. Only read, and only if the folder has no such
    /// record.
    pub(crate) old_name: &'static str,
    /// Maximum size of a record in bytes.
    pub(crate) bytes_max: u64,
}

/// The content of a record, after its mark.
#[derive(Deserialize)]
struct ParsedRecord<T> {
    content: T,
}

/// The open folder.
pub(crate) struct Records(Dir);

impl Records {
    /// Opens the folder in `output_dir`, or creates it.
    ///
    /// # Errors
    /// `Io` if it cannot be created; `Format` if a foreign entry has its name.
    pub(crate) fn open(output_dir: &Dir) -> Result<Self> {
        let name = RECORDS.pattern;
        if output_dir.kind(name)?.is_none() {
            drop(output_dir.create_dir(name)?);
        }
        if !RECORDS.is_own(output_dir, name)? {
            return Err(Error::format(output_dir.join(name), "not the folder in which the program keeps its records; move it away"));
        }
        let records = Self(output_dir.open_dir(name)?);
        if records.0.kind(RECORDS_MANIFEST.pattern)?.is_none_or(|kind| kind == FileKind::File(0)) {
            records.0.replace_file(RECORDS_MANIFEST.pattern, format!("{MANIFEST_HEAD}\"version\":1}}\n").as_bytes())?;
        }
        Ok(records)
    }

    /// Opens the folder in the output directory at `path`, or creates it.
    ///
    /// # Errors
    /// Errors of [`Records::open`].
    pub(crate) fn at(path: &Path) -> Result<Self> {
        Self::open(&Dir::open(path)?)
    }

    /// Opens the folder in `output_dir`, if it exists and the program created it.
    pub(crate) fn find(output_dir: &Dir) -> Option<Self> {
        let is_own = RECORDS.is_own(output_dir, RECORDS.pattern).unwrap_or(false);
        is_own.then(|| output_dir.open_dir(RECORDS.pattern).ok()).flatten().map(Self)
    }

    pub(crate) fn dir(&self) -> &Dir {
        &self.0
    }

    /// Writes `content` as `record`, replacing the old one. A foreign file with its name is renamed.
    ///
    /// # Errors
    /// `Io` if it cannot be written.
    pub(crate) fn write(&self, record: &RunRecord, content: &impl Serialize) -> Result<()> {
        let (name, path) = (record.file.pattern, self.0.join(record.file.pattern));
        let OwnMark::Head(head) = record.file.mark else { return Err(Error::format(path, "a record without a head")) };
        let json = serde_json::to_string(content).map_err(|e| Error::format(&path, e))?;
        if self.0.kind(name)?.is_some() && !record.file.is_own(&self.0, name)? {
            self.0.set_aside(name)?;
        }
        self.0.replace_file(name, format!("{head}\"content\":{json}}}\n").as_bytes())
    }

    fn read<T: DeserializeOwned>(&self, record: &RunRecord) -> Option<T> {
        let noted = read(&self.0, record.file.pattern, record.bytes_max)?;
        record.file.is_own(&self.0, record.file.pattern).ok().filter(|is_own| *is_own)?;
        serde_json::from_slice::<ParsedRecord<T>>(&noted).ok().map(|noted| noted.content)
    }
}

impl RunRecord {
    /// Reads the record from the output directory at `path`. `None` if it cannot be parsed, because every record can be derived again from
    /// the data.
    pub(crate) fn read<T: DeserializeOwned>(&self, path: &Path) -> Option<T> {
        let output_dir = Dir::open(path).ok()?;
        let now = Records::find(&output_dir).and_then(|records| records.read(self));
        now.or_else(|| serde_json::from_slice(&read(&output_dir, self.old_name, self.bytes_max)?).ok())
    }
}

/// Reads a regular file of at most `bytes_max` bytes.
fn read(dir: &Dir, name: &str, bytes_max: u64) -> Option<Vec<u8>> {
    let mut bytes = vec![];
    let file = dir.open_file(name).ok().flatten()?;
    file.take(bytes_max + 1).read_to_end(&mut bytes).ok()?;
    (bytes.len() as u64 <= bytes_max).then_some(bytes)
}

/// Whether the folder has the mark, or was created but not yet marked by a run that was killed. One listing decides which: a run that
/// starts at this moment may mark its folder between two looks.
fn is_records(folder: &Dir) -> Result<bool> {
    let names = folder.names()?;
    match names.iter().any(|name| name == RECORDS_MANIFEST.pattern) {
        true => RECORDS_MANIFEST.is_own(folder, RECORDS_MANIFEST.pattern),
        false => Ok(names.iter().all(|name| name.to_string_lossy().starts_with(".manifest.json.tmp-"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    const RECORD: RunRecord = RunRecord {
        file: OwnedName { pattern: "numbers.json", kind: "record", mark: OwnMark::Head("{\"superoffload\":\"numbers\",") },
        old_name: "data.json",
        bytes_max: 100,
    };

    #[test]
    fn a_folder_that_a_run_marks_at_this_moment_is_recognised() {
        for _ in 0..50 {
            let tmp = tempfile::tempdir().unwrap();
            let dir = Dir::open(tmp.path()).unwrap();
            drop(dir.create_dir(RECORDS.pattern).unwrap());
            std::thread::scope(|scope| {
                let marking = scope.spawn(|| Records::at(tmp.path()).map(drop));
                while !marking.is_finished() {
                    assert!(RECORDS.is_own(&dir, RECORDS.pattern).unwrap(), "of a folder that is being marked");
                }
                marking.join().unwrap().unwrap();
            });
        }
    }

    #[test]
    fn a_record_reads_back_and_nothing_else_does() {
        let tmp = tempfile::tempdir().unwrap();
        let read = || RECORD.read::<Vec<u64>>(tmp.path());
        let path = tmp.path().join(".superoffload/numbers.json");
        assert_eq!(read(), None);
        fs::write(tmp.path().join("data.json"), "[1]").unwrap();
        assert_eq!(read(), Some(vec![1]), "where it was before there was the folder");
        Records::at(tmp.path()).unwrap().write(&RECORD, &[2, 3]).unwrap();
        assert_eq!(read(), Some(vec![2, 3]));
        fs::remove_file(tmp.path().join("data.json")).unwrap();
        for damage in ["", "{", "[5]", "{\"content\":[5]}", "{\"superoffload\":\"other\",\"content\":[5]}", &" ".repeat(101)] {
            fs::write(&path, damage).unwrap();
            assert_eq!(read(), None, "{damage:?}");
        }
        fs::write(&path, "mine").unwrap();
        Records::at(tmp.path()).unwrap().write(&RECORD, &[4]).unwrap();
        assert_eq!((read(), fs::read_to_string(path.with_extension("json.foreign-1")).unwrap()), (Some(vec![4]), "mine".into()));
    }

    #[test]
    fn only_a_marked_folder_is_taken_and_none_through_a_link() {
        let tmp = tempfile::tempdir().unwrap();
        let place = tmp.path().join(".superoffload");
        let opens = || Records::at(tmp.path()).is_ok();
        fs::create_dir(&place).unwrap();
        fs::write(place.join("thesis.tex"), "mine").unwrap();
        assert!(!opens());
        fs::remove_file(place.join("thesis.tex")).unwrap();
        fs::write(place.join(".manifest.json.tmp-7"), "").unwrap();
        assert!(opens() && place.join("manifest.json").exists());
        fs::write(place.join("thesis.tex"), "mine").unwrap();
        assert!(opens(), "what lies beside a manifest takes nothing from it");
        fs::write(place.join("manifest.json"), "{}").unwrap();
        assert!(!opens());
        fs::remove_dir_all(&place).unwrap();
        symlink(tempfile::tempdir().unwrap().keep(), &place).unwrap();
        assert!(!opens());
    }
}
