//! The file to which `probe` writes a profile.

use crate::error::{Error, Result};
use crate::hardware::profile::Profile;
use std::path::{Path, PathBuf};

/// A file for a profile. It is opened before the measurement, so that a file error does not waste the measurement.
pub struct ProfileFile {
    path: PathBuf,
    /// The final name of a temporary file.
    keep_as: Option<PathBuf>,
    file: std::fs::File,
    /// Whether this probe created the file and has not written it.
    is_new: bool,
}

impl ProfileFile {
    /// Opens or creates `path`. Its content stays until [`ProfileFile::write`].
    ///
    /// # Errors
    /// `Io` if it is not writable.
    pub fn open(path: &Path) -> Result<Self> {
        let is_new = !path.exists();
        let file =
            std::fs::OpenOptions::new().write(true).create(true).truncate(false).open(path).map_err(|e| Error::io("write", path, e))?;
        Ok(Self { path: path.into(), keep_as: None, file, is_new })
    }

    /// A temporary file that replaces `path` when it is complete, so that other processes always read a complete profile.
    ///
    /// # Errors
    /// `Io` if the file or its directory is not writable.
    pub fn beside(path: &Path) -> Result<Self> {
        let folder = path.parent().unwrap_or(Path::new("/"));
        std::fs::create_dir_all(folder).map_err(|e| Error::io("create", folder, e))?;
        remove_parts(folder)?;
        let part = path.with_extension(format!("{}.part", std::process::id()));
        let mut file = Self::open(&part)?;
        file.keep_as = Some(path.into());
        Ok(file)
    }

    /// Replaces the content of the file by `profile`.
    ///
    /// # Errors
    /// `Io` if it cannot be written.
    pub fn write(mut self, profile: &Profile) -> Result<()> {
        use std::io::Write;
        let text = profile.to_string();
        let written = self.file.set_len(0).and_then(|()| self.file.write_all(text.as_bytes())).and_then(|()| self.file.sync_all());
        written.map_err(|e| Error::io("write", &self.path, e))?;
        if let Some(name) = &self.keep_as {
            std::fs::rename(&self.path, name).map_err(|e| Error::io("write", name, e))?;
        }
        self.is_new = false;
        Ok(())
    }
}

impl Drop for ProfileFile {
    /// Removes a file that a failed measurement created.
    fn drop(&mut self) {
        if self.is_new {
            // The file is empty, so a failed removal loses nothing.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes temporary files in `folder` of probes that were killed.
fn remove_parts(folder: &Path) -> Result<()> {
    let entries = std::fs::read_dir(folder).map_err(|e| Error::io("read", folder, e))?;
    let paths = entries.flatten().map(|entry| entry.path());
    paths
        .filter(|path| path.extension().is_some_and(|extension| extension == "part"))
        .try_for_each(|path| std::fs::remove_file(&path).map_err(|e| Error::io("remove", &path, e)))
}
