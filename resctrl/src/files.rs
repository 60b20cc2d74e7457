//! Reading files and directories with errors that name them.

use crate::{Error, Result};
use std::fs;
use std::io::{self, ErrorKind};
use std::path::Path;

/// Whether `path` is there. "May not look" is an error, not a no.
pub fn exists(path: &Path) -> Result<bool> {
    match fs::metadata(path) {
        Ok(_) => Ok(true),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(source) => Err(Error::Io { path: path.into(), source }),
    }
}

/// The text of a file.
pub fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })
}

/// Names in `dir`, sorted; only directories or only other files. Names that are not UTF-8 are left out: the kernel makes none.
pub fn names(dir: &Path, directories: bool) -> Result<Vec<String>> {
    list(dir, directories).map_err(|source| Error::Io { path: dir.into(), source })
}

fn list(dir: &Path, directories: bool) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() == directories {
            names.extend(entry.file_name().into_string());
        }
    }
    names.sort();
    Ok(names)
}
