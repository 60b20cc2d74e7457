//! Files that were written into a checkpoint, found again before and after it gets its name: somebody may remove files meanwhile.

use crate::disk::{Dir, FileId};
use crate::error::{Error, Result};

/// Files of a checkpoint, by folder and name.
#[derive(Default)]
pub(super) struct Written(Vec<WrittenFile>);

struct WrittenFile {
    /// `None`: the checkpoint itself.
    folder: Option<&'static str>,
    name: String,
    bytes: u64,
    /// Of a file that this process wrote; another process's has another number where the file system is another machine's.
    id: Option<FileId>,
}

impl Written {
    /// Adds a file that this process wrote.
    pub(super) fn add(&mut self, folder: Option<&'static str>, name: &str, id: FileId) {
        self.0.push(WrittenFile { folder, name: name.into(), bytes: id.bytes, id: Some(id) });
    }

    /// Adds a file of so many bytes that another process wrote.
    pub(super) fn add_of_another(&mut self, name: String, bytes: u64) {
        self.0.push(WrittenFile { folder: None, name, bytes, id: None });
    }

    /// Makes sure that all of them are in `dir`.
    ///
    /// # Errors
    /// `Resource` that names the first that is not.
    pub(super) fn expect_in(&self, dir: &Dir) -> Result<()> {
        self.0.iter().try_for_each(|file| if file.is_in(dir)? { Ok(()) } else { Err(file.missing(dir)) })
    }
}

impl WrittenFile {
    fn is_in(&self, dir: &Dir) -> Result<bool> {
        let found = match self.folder {
            Some(folder) if dir.kind(folder)?.is_none() => None,
            Some(folder) => dir.open_dir(folder)?.file_id(&self.name)?,
            None => dir.file_id(&self.name)?,
        };
        Ok(found.is_some_and(|found| found.bytes == self.bytes && self.id.is_none_or(|id| id == found)))
    }

    fn missing(&self, dir: &Dir) -> Error {
        let folder = self.folder.map_or(String::new(), |folder| format!("{folder}/"));
        let cause = format_args!("{folder}{} was removed or replaced while the checkpoint was written", self.name);
        Error::resource(format_args!("publish {}", dir.path().display()), cause)
    }
}
