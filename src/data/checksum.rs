//! SHA-256 of data files. Each file is read once: its checksum is kept in a record of the run, and a data file is read
//! again only when its size, its time or its inode differ.

use crate::disk::{InFile, OwnMark, OwnedName, Records, RunRecord, Stamp};
use crate::error::{Error, Result};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// Bytes that are read at once.
const PIECE_BYTES: usize = 1 << 20;
/// Fingerprints by the paths of their files.
pub(crate) const CHECKSUMS: RunRecord = RunRecord {
    file: OwnedName {
        pattern: "data-checksums.json",
        kind: "record of checksums",
        mark: OwnMark::Head("{\"superoffload\":\"data checksums\","),
    },
    old_name: "data.json",
    // Some hundred bytes for each of a million data files.
    bytes_max: 1 << 30,
};

/// Checksum of a file's content, with metadata that shows a change of the file without reading it.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Fingerprint {
    pub bytes: u64,
    /// Time of the last change in nanoseconds since 1970.
    pub(crate) mtime_ns: i64,
    /// The file system's number of the file.
    pub(crate) inode: u64,
    /// SHA-256 of the content in hexadecimal.
    pub(crate) sha256: String,
}

impl Fingerprint {
    /// Reads the file at `path` in pieces of 1 MiB. After each, `progress` gets the number of bytes read; its error ends the reading.
    ///
    /// # Errors
    /// `Io` or `Format` when it cannot be read, is no regular file, or changes meanwhile; those of `progress`.
    pub(crate) fn read(path: &Path, progress: &mut dyn FnMut(u64) -> Result<()>) -> Result<Self> {
        let file = InFile::open(path)?;
        let before = Self::without_content(&file)?;
        let (mut hash, mut piece, mut done) = (Sha256::new(), vec![0; PIECE_BYTES.min(before.bytes as usize)], 0);
        while done < before.bytes {
            let length = (before.bytes - done).min(PIECE_BYTES as u64) as usize;
            file.read_at(done, &mut piece[..length])?;
            hash.update(&piece[..length]);
            done += length as u64;
            progress(done)?;
        }
        if Self::without_content(&file)? != before {
            return Err(Error::format(path, "changed while it was read"));
        }
        Ok(Self { sha256: hex(hash.finalize()), ..before })
    }

    /// Size, time and inode; the checksum is empty.
    pub(super) fn without_content(file: &InFile) -> Result<Self> {
        let Stamp { bytes, modified: (seconds, nanoseconds), inode } = file.stamp()?;
        let mtime_ns = seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds);
        Ok(Self { bytes, mtime_ns, inode, sha256: String::new() })
    }

    /// Whether the file at `path` looks as it did when this was read.
    ///
    /// # Errors
    /// Why there is no regular file at `path` that can be read.
    pub(super) fn holds(&self, path: &Path) -> Result<bool> {
        let now = Self::without_content(&InFile::open(path)?)?;
        Ok(now == Self { sha256: String::new(), ..self.clone() })
    }
}

/// Fingerprints of `files`, in order. The run in `output_dir`, if there is one, has a record of those of earlier starts; it is written
/// again when one is new, also when `progress` ends the reading. `progress` gets the file and the number of its bytes read. A file with a
/// fingerprint in `missing` is not read.
///
/// # Errors
/// As [`Fingerprint::read`]; `Io` when the record cannot be written.
pub(crate) fn fingerprints(
    files: &[PathBuf],
    missing: impl Fn(&Path) -> Option<Fingerprint>,
    output_dir: Option<&Path>,
    progress: &mut dyn FnMut(&Path, u64) -> Result<()>,
) -> Result<Vec<Fingerprint>> {
    let known: BTreeMap<String, Fingerprint> = output_dir.and_then(|dir| CHECKSUMS.read(dir)).unwrap_or_default();
    let (mut now, mut is_new) = (BTreeMap::new(), false);
    let mut fingerprint = |file: &PathBuf| {
        if let Some(missing) = missing(file) {
            return Ok(missing);
        }
        let name = std::path::absolute(file).unwrap_or(file.clone()).display().to_string();
        let found = match now.get(&name).or(known.get(&name)) {
            Some(known) if known.holds(file)? => known.clone(),
            _ => {
                is_new = true;
                Fingerprint::read(file, &mut |bytes| progress(file, bytes))?
            }
        };
        now.insert(name, found.clone());
        Ok(found)
    };
    let all: Result<Vec<Fingerprint>> = files.iter().map(&mut fingerprint).collect();
    if let Some(dir) = output_dir.filter(|_| is_new) {
        Records::at(dir)?.write(&CHECKSUMS, &now)?;
    }
    all
}

/// SHA-256 of `bytes` in hexadecimal.
pub(crate) fn sha256(bytes: &[u8]) -> String {
    hex(Sha256::digest(bytes))
}

/// `bytes` in hexadecimal.
pub(crate) fn hex(bytes: impl AsRef<[u8]>) -> String {
    bytes.as_ref().iter().fold(String::new(), |mut hex, byte| {
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::encode::tokenizer_handle::tests::model_dir;
    use std::fs::{self, File};
    use std::time::{Duration, SystemTime};

    /// The checksums of `files`, and how often one was read.
    fn read(files: &[PathBuf], output_dir: &Path) -> (Vec<String>, usize) {
        let mut pieces = 0;
        let mut progress = |_: &Path, _| {
            pieces += 1;
            Ok(())
        };
        let all = fingerprints(files, |_| None, Some(output_dir), &mut progress).unwrap();
        (all.into_iter().map(|f| f.sha256).collect(), pieces)
    }

    #[test]
    fn the_checksum_is_that_of_the_whole_file_in_any_number_of_pieces() {
        let dir = model_dir(&[("abc", "abc"), ("none", "")]);
        let sum = |name: &str| Fingerprint::read(&dir.path().join(name), &mut |_| Ok(())).unwrap().sha256;
        assert_eq!(sum("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
        assert_eq!(sum("none"), sha256(b""));
        let long: Vec<u8> = (0..2 * PIECE_BYTES + 5).map(|i| (i % 251) as u8).collect();
        fs::write(dir.path().join("long"), &long).unwrap();
        let mut messages = vec![];
        let read = Fingerprint::read(&dir.path().join("long"), &mut |bytes| {
            messages.push(bytes as usize);
            Ok(())
        });
        assert_eq!(read.unwrap().sha256, sha256(&long));
        assert_eq!(messages, [PIECE_BYTES, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 5]);
    }

    #[test]
    fn a_file_is_read_again_only_when_size_time_or_inode_differ() {
        let dir = model_dir(&[("a", "one"), ("b", "two"), ("other", "six")]);
        let path = |name: &str| dir.path().join(name);
        let (files, kept) = ([path("a"), path("b"), path("a")], dir.path().to_path_buf());
        let first = read(&files, &kept);
        assert_eq!(first, (vec![sha256(b"one"), sha256(b"two"), sha256(b"one")], 2));
        assert_eq!(read(&files, &kept), (first.0.clone(), 0), "nothing is read twice");
        let reads = |change: &dyn Fn()| {
            change();
            (read(&files, &kept).1, read(&files, &kept).1)
        };
        let set_time = |at| File::options().write(true).open(path("a")).unwrap().set_modified(at).unwrap();
        let (then, later) = (path("a").metadata().unwrap().modified().unwrap(), SystemTime::now() + Duration::from_secs(9));
        assert_eq!(reads(&|| set_time(later)), (1, 0), "time");
        assert_eq!(reads(&|| fs::write(path("a"), "longer").map(|()| set_time(later)).unwrap()), (1, 0), "size");
        let replace = || {
            fs::rename(path("other"), path("b")).unwrap();
            File::options().write(true).open(path("b")).unwrap().set_modified(then).unwrap();
        };
        assert_eq!(reads(&replace), (1, 0), "inode");
        assert_eq!(read(&files, &kept).0, [sha256(b"longer"), sha256(b"six"), sha256(b"longer")]);
        let record = kept.join(".superoffload/data-checksums.json");
        assert_eq!(reads(&|| fs::write(&record, "{\"a\": 5").unwrap()), (2, 0), "kept checksums that are broken");
        // As they were kept before there was the folder.
        let content = CHECKSUMS.read::<serde_json::Value>(&kept).unwrap();
        fs::remove_dir_all(kept.join(".superoffload")).unwrap();
        fs::write(path("data.json"), content.to_string()).unwrap();
        assert_eq!(read(&files, &kept).1, 0, "an earlier version's");
    }

    #[test]
    fn bytes_read_before_the_end_are_kept() {
        let dir = model_dir(&[("a", "one"), ("b", "two")]);
        let (files, kept) = ([dir.path().join("a"), dir.path().join("b")], dir.path());
        let mut stop_at_b = |file: &Path, _| if file.ends_with("b") { Err(Error::usage("stopped")) } else { Ok(()) };
        assert_eq!(fingerprints(&files, |_| None, Some(kept), &mut stop_at_b).unwrap_err().to_string(), "stopped");
        assert_eq!(read(&files, kept).1, 1, "only b was left");
        let message = Fingerprint::read(dir.path(), &mut |_| Ok(())).unwrap_err().to_string();
        assert!(message.ends_with("not a regular file"), "{message}");
    }

    #[test]
    fn a_file_that_changes_while_it_is_read_is_refused() {
        let dir = model_dir(&[("a", "one")]);
        let path = dir.path().join("a");
        let mut grow = |_| fs::write(&path, "longer").map_err(|e| Error::io("write", &path, e));
        let message = Fingerprint::read(&path, &mut grow).unwrap_err().to_string();
        assert!(message.ends_with("a: changed while it was read"), "{message}");
    }
}
