//! File operations with errors that name the file.

use crate::{Error, Result};
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

/// The write operations that the kernel accepts in the tree. Tests use a fake kernel.
pub(crate) trait Kernel {
    /// Writes `text`, one whole command, into an existing file.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;
    /// Creates a group.
    fn create(&self, dir: &Path) -> io::Result<()>;
    /// Removes a group.
    fn remove(&self, dir: &Path) -> io::Result<()>;
}

/// The kernel of this machine.
pub(crate) struct Linux;

impl Kernel for Linux {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        // A command must arrive in one write(2), so there is no buffer and no formatting into the file.
        fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
    }

    fn create(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir(dir)
    }

    fn remove(&self, dir: &Path) -> io::Result<()> {
        fs::remove_dir(dir)
    }
}

/// Whether `path` exists. A missing permission to find out is an error.
pub(crate) fn exists(path: &Path) -> Result<bool> {
    match fs::metadata(path) {
        Ok(_) => Ok(true),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(source) => Err(Error::io("read", path, source)),
    }
}

/// Reads a text file.
pub(crate) fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|source| Error::io("read", path, source))
}

/// Sorted names in `dir`: only directories, or only other files. Names that are not UTF-8 are skipped, because the kernel creates none.
pub(crate) fn names(dir: &Path, directories: bool) -> Result<Vec<String>> {
    list(dir, directories).map_err(|source| Error::io("read", dir, source))
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
