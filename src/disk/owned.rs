//! Names that the program owns, and how it recognises its own files by content. A run replaces and removes only recognised files. A file
//! with an owned name that is not recognised is foreign.

use super::{Dir, FileKind};
use crate::error::{Error, Result};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// A name in a directory that the program writes, replaces or removes.
#[derive(Debug)]
pub(crate) struct OwnedName {
    /// The name. `#` stands for a number.
    pub(crate) pattern: &'static str,
    /// Description for messages.
    pub(crate) kind: &'static str,
    pub(crate) mark: OwnMark,
}

/// Criterion by which content is recognised.
#[derive(Clone, Copy, Debug)]
pub(crate) enum OwnMark {
    /// A regular file that begins with this text. A prefix of the text is accepted, because a power failure may cut a file short.
    Head(&'static str),
    /// A regular file that is empty or passes the check.
    File(fn(File) -> io::Result<bool>),
    /// A directory that passes the check.
    Folder(fn(&Dir) -> Result<bool>),
}

impl OwnedName {
    /// Whether `name` matches the pattern, with any number in place of `#`.
    pub(crate) fn matches(&self, name: &OsStr) -> bool {
        name.to_str().is_some_and(|name| matches(self.pattern, name))
    }

    /// Whether the entry `name` in `dir` belongs to the program. Entries that this user may not read are not recognised.
    ///
    /// # Errors
    /// `Io` if the directory cannot be read.
    pub(crate) fn is_own(&self, dir: &Dir, name: impl AsRef<Path>) -> Result<bool> {
        let found = match (dir.kind(&name)?, self.mark) {
            (Some(FileKind::File(0)), OwnMark::Head(_) | OwnMark::File(_)) => return Ok(true),
            (Some(FileKind::File(_)), OwnMark::Head(head)) => self.read(dir, &name, |file| begins_with(file, head)),
            (Some(FileKind::File(_)), OwnMark::File(passes)) => self.read(dir, &name, passes),
            (Some(FileKind::Dir), OwnMark::Folder(passes)) => dir.open_dir(&name).and_then(|folder| passes(&folder)),
            _ => return Ok(false),
        };
        match found {
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::PermissionDenied => Ok(false),
            found => found,
        }
    }

    fn read(&self, dir: &Dir, name: impl AsRef<Path>, passes: impl FnOnce(File) -> io::Result<bool>) -> Result<bool> {
        let Some(file) = dir.open_file(&name)? else { return Ok(false) };
        passes(file).map_err(|e| Error::io("read", dir.join(&name), e))
    }
}

/// Whether `name` is `pattern` with numbers, formatted as the program prints them, in place of `#`.
fn matches(pattern: &str, name: &str) -> bool {
    let Some((before, after)) = pattern.split_once('#') else { return pattern == name };
    let Some(rest) = name.strip_prefix(before) else { return false };
    let (number, rest) = rest.split_at(rest.bytes().take_while(u8::is_ascii_digit).count());
    canonical::<u64>(number).is_some() && matches(after, rest)
}

/// Parses a number in the format that the program prints: without sign or leading zeros.
pub(crate) fn canonical<T: std::str::FromStr + ToString>(text: &str) -> Option<T> {
    text.parse().ok().filter(|n: &T| n.to_string() == text)
}

fn begins_with(file: File, head: &str) -> io::Result<bool> {
    let mut found = vec![];
    file.take(head.len() as u64).read_to_end(&mut found)?;
    Ok(head.as_bytes().starts_with(&found))
}

/// Prefix of the temporary names under which the file `name` is written.
fn beside_prefix(name: &OsStr) -> OsString {
    let mut prefix = OsString::from(".");
    prefix.push(OsStr::from_bytes(name.as_bytes().strip_prefix(b".").unwrap_or(name.as_bytes())));
    prefix.push(".tmp-");
    prefix
}

impl Dir {
    /// Creates a file with an unused temporary name next to `name`. The caller writes it and renames it.
    pub(crate) fn create_beside(&self, name: impl AsRef<Path>) -> Result<(super::OutFile, OsString)> {
        let mut number = u64::from(std::process::id());
        loop {
            let mut beside = beside_prefix(name.as_ref().as_os_str());
            beside.push(number.to_string());
            if self.kind(&beside)?.is_none() {
                return Ok((self.create_file(&beside)?, beside));
            }
            number += 1;
        }
    }

    /// Replaces the file `name` atomically by one with `bytes`. The caller has checked that an existing file is the program's own.
    pub(crate) fn replace_file(&self, name: impl AsRef<Path>, bytes: &[u8]) -> Result<()> {
        let (mut file, beside) = self.create_beside(&name)?;
        let written = file.write(bytes).and_then(|()| file.sync()).and_then(|()| self.rename(&beside, &name));
        // The write error is the one to report.
        written.inspect_err(|_| drop(self.remove(&beside)))
    }

    /// Removes temporary files of `owned` that a killed run left. Unrecognised files stay. Folders stay, too, because only files are
    /// written under temporary names.
    ///
    /// # Errors
    /// `Io` if the directory cannot be read, or a temporary file cannot be removed.
    pub(crate) fn remove_beside(&self, owned: &OwnedName) -> Result<()> {
        if matches!(owned.mark, OwnMark::Folder(_)) {
            return Ok(());
        }
        let prefix = beside_prefix(OsStr::new(owned.pattern));
        for name in self.names()? {
            let number = name.as_bytes().strip_prefix(prefix.as_bytes()).and_then(|number| std::str::from_utf8(number).ok());
            if number.and_then(canonical::<u64>).is_some() && owned.is_own(self, &name)? {
                self.remove(&name)?;
            }
        }
        Ok(())
    }

    /// Renames the entry `name` to `<name>.foreign-<n>` without changing its content, and returns the new name.
    pub(crate) fn set_aside(&self, name: impl AsRef<Path>) -> Result<OsString> {
        self.set_aside_as(&name, name.as_ref().as_os_str())
    }

    /// Renames the entry `name` like [`Dir::set_aside`], to the name for foreign content of `meant`.
    pub(crate) fn set_aside_as(&self, name: impl AsRef<Path>, meant: &OsStr) -> Result<OsString> {
        let mut number = 1u64;
        loop {
            let mut aside = meant.to_os_string();
            aside.push(format!(".foreign-{number}"));
            if self.kind(&aside)?.is_none() {
                return self.rename(&name, &aside).map(|()| aside);
            }
            number += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::symlink;

    const NOTES: OwnedName = OwnedName { pattern: "notes-#.x", kind: "notes", mark: OwnMark::Head("own ") };

    #[test]
    fn a_pattern_takes_numbers_as_the_program_prints_them() {
        let names = ["notes-0.x", "notes-17.x", "notes-017.x", "notes-.x", "notes-+1.x", "notes-1.xy", "anotes-1.x", "notes-1x"];
        let taken = names.map(|name| NOTES.matches(OsStr::new(name)));
        assert_eq!(taken, [true, true, false, false, false, false, false, false]);
        assert!(matches(".c-#.t-#", ".c-4.t-5") && !matches(".c-#.t-#", ".c-4.t-") && matches("plain", "plain"));
    }

    #[test]
    fn content_decides_and_a_link_is_never_own() {
        let tmp = tempfile::tempdir().unwrap();
        let (dir, path) = (Dir::open(tmp.path()).unwrap(), |name: &str| tmp.path().join(name));
        for (name, content) in [("whole", "own text"), ("cut", "ow"), ("empty", ""), ("foreign", "our text"), ("short", "x")] {
            fs::write(path(name), content).unwrap();
        }
        symlink("whole", path("link")).unwrap();
        fs::create_dir(path("folder")).unwrap();
        nix::unistd::mkfifo(&path("pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let own = |name: &str| NOTES.is_own(&dir, name).unwrap();
        assert!(["whole", "cut", "empty"].into_iter().all(own));
        assert!(!["foreign", "short", "link", "folder", "pipe", "absent"].into_iter().any(own));
    }

    #[test]
    fn a_replaced_file_is_whole_and_foreign_files_beside_it_stay() {
        let tmp = tempfile::tempdir().unwrap();
        let (dir, path) = (Dir::open(tmp.path()).unwrap(), |name: String| tmp.path().join(name));
        let pid = std::process::id();
        let notes = OwnedName { pattern: ".notes", ..NOTES };
        fs::write(path(format!(".notes.tmp-{pid}")), "foreign").unwrap();
        fs::write(path(format!(".notes.tmp-{}", pid + 1)), "own half").unwrap();
        symlink("nowhere", path(".notes.tmp-7".into())).unwrap();
        dir.replace_file(".notes", b"own new").unwrap();
        assert_eq!(fs::read_to_string(path(".notes".into())).unwrap(), "own new");
        dir.remove_beside(&notes).unwrap();
        let left = dir.names().unwrap();
        let kept = [".notes".into(), ".notes.tmp-7".into(), format!(".notes.tmp-{pid}")].map(OsString::from);
        assert!(left.len() == 3 && kept.iter().all(|name| left.contains(name)), "{left:?}");
        fs::create_dir(path(".notes.tmp-8".into())).unwrap();
        dir.remove_beside(&OwnedName { mark: OwnMark::Folder(|_| Ok(true)), ..notes }).unwrap();
        assert!(path(".notes.tmp-8".into()).is_dir(), "nothing is written beside a folder");
    }

    #[test]
    fn foreign_content_gets_the_next_free_name_with_its_bytes() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = Dir::open(tmp.path()).unwrap();
        for (round, content) in ["first", "second"].into_iter().enumerate() {
            fs::write(tmp.path().join("a"), content).unwrap();
            let aside = dir.set_aside("a").unwrap();
            assert_eq!(aside, format!("a.foreign-{}", round + 1).as_str());
            assert_eq!(fs::read_to_string(tmp.path().join(aside)).unwrap(), content);
        }
    }
}
