//! Which files were read from begin to end and found good, kept beside the run so that no start reads them again.

use crate::disk::{self, Stamp};
use crate::error::Result;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Name of the file in the output directory.
const FILE: &str = "data-checked.json";
/// A run has few data files.
const BYTES_MAX: u64 = 16 << 20;

/// A file as it was when a claim about its content was checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Check {
    /// For people.
    pub(super) path: PathBuf,
    /// Any other claim is another check.
    pub(super) claim: String,
    /// What tells whether the file changed since.
    pub(super) stamp: Stamp,
}

#[derive(Default)]
pub(super) struct CheckedFiles {
    dir: Option<PathBuf>,
    known: Vec<Check>,
    /// Those that hold for this start; only they are kept.
    holding: Vec<Check>,
}

impl CheckedFiles {
    /// What is kept in `dir`. A file that cannot be understood is as none: the data is checked again.
    ///
    /// # Errors
    /// `Io` when the file is there and cannot be read.
    pub(super) fn load(dir: Option<&Path>) -> Result<Self> {
        let bytes = dir.map(|dir| disk::read_if_present(&dir.join(FILE), BYTES_MAX)).transpose()?.flatten();
        let known = bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default();
        Ok(Self { dir: dir.map(Path::to_path_buf), known, holding: Vec::new() })
    }

    /// Runs `check` unless it is known to hold; afterwards it is.
    pub(super) fn once(&mut self, check: Check, run: impl FnOnce() -> Result<()>) -> Result<()> {
        if !self.known.iter().any(|known| known.claim == check.claim && known.stamp == check.stamp) {
            run()?;
        }
        self.holding.push(check);
        Ok(())
    }

    /// Keeps what holds, if that is new.
    ///
    /// # Errors
    /// `Io` when the output directory cannot be written.
    pub(super) fn save(&self) -> Result<()> {
        let Some(dir) = self.dir.as_ref().filter(|_| self.known != self.holding) else { return Ok(()) };
        let path = dir.join(FILE);
        let json = serde_json::to_vec_pretty(&self.holding).map_err(|e| crate::error::Error::format(&path, e))?;
        disk::replace_file(&path, &json)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::InFile;
    use crate::error::Error;

    #[test]
    fn a_check_runs_once_until_file_or_claim_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.bin");
        let runs = |claim: &str| {
            let mut checked = CheckedFiles::load(Some(dir.path())).unwrap();
            let stamp = InFile::open(&path).unwrap().stamp().unwrap();
            let mut ran = false;
            let check = Check { path: path.clone(), claim: claim.into(), stamp };
            checked
                .once(check, || {
                    ran = true;
                    Ok(())
                })
                .unwrap();
            checked.save().unwrap();
            ran
        };
        std::fs::write(&path, "abc").unwrap();
        assert!(runs("x") && !runs("x") && runs("y") && !runs("y"));
        std::fs::write(dir.path().join(".data-checked.json.tmp"), "left by a killed run").unwrap();
        std::fs::write(&path, "abcd").unwrap();
        assert!(runs("y") && !runs("y"));
        std::fs::write(dir.path().join(FILE), "{").unwrap();
        assert!(runs("y") && !runs("y"));
        let mut checked = CheckedFiles::load(Some(dir.path())).unwrap();
        let check = Check { path: path.clone(), claim: "z".into(), stamp: InFile::open(&path).unwrap().stamp().unwrap() };
        assert!(checked.once(check, || Err(Error::usage("no"))).is_err());
        checked.save().unwrap();
        assert!(runs("z"), "what failed is not kept");
    }
}
