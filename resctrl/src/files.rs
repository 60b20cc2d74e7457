//! Files and directories with errors that name them.

use crate::{Error, Result};
use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::Path;

/// The commands that the kernel takes through the tree. Tests put a kernel of their own in its place.
pub(crate) trait Kernel {
    /// Writes `text`, a whole command, into a file that exists.
    fn write(&self, path: &Path, text: &str) -> io::Result<()>;
    /// Makes a group.
    fn create(&self, dir: &Path) -> io::Result<()>;
    /// Removes a group.
    fn remove(&self, dir: &Path) -> io::Result<()>;
}

/// The kernel of this machine.
pub(crate) struct Linux;

impl Kernel for Linux {
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        // A command must arrive in one write(2): no buffer, no formatting into the file.
        fs::OpenOptions::new().write(true).open(path)?.write_all(text.as_bytes())
    }

    fn create(&self, dir: &Path) -> io::Result<()> {
        fs::create_dir(dir)
    }

    fn remove(&self, dir: &Path) -> io::Result<()> {
        fs::remove_dir(dir)
    }
}

/// Whether `path` is there. "May not look" is an error, not a no.
pub(crate) fn exists(path: &Path) -> Result<bool> {
    match fs::metadata(path) {
        Ok(_) => Ok(true),
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(false),
        Err(source) => Err(Error::io("read", path, source)),
    }
}

/// The text of a file.
pub(crate) fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|source| Error::io("read", path, source))
}

/// Names in `dir`, sorted; only directories or only other files. Names that are not UTF-8 are left out: the kernel makes none.
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
