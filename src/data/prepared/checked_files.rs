//! Which files were read from begin to end and found good, kept beside the run so that no start reads them again.

use crate::disk::{InFile, OwnMark, OwnedName, Records, RunRecord, Stamp};
use crate::error::Result;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Checks that held.
pub(crate) const CHECKED: RunRecord = RunRecord {
    file: OwnedName {
        pattern: "data-checked.json",
        kind: "record of checked files",
        mark: OwnMark::Head("{\"superoffload\":\"checked data\","),
    },
    old_name: "data-checked.json",
    // A run has few data files.
    bytes_max: 16 << 20,
};

/// A file as it was when a claim about its content was checked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(in crate::data) struct Check {
    /// For people.
    pub(in crate::data) path: PathBuf,
    /// Any other claim is another check.
    pub(in crate::data) claim: String,
    /// Metadata of the file that differs once the file has changed.
    pub(in crate::data) stamp: Stamp,
}

#[derive(Default)]
pub(in crate::data) struct CheckedFiles {
    dir: Option<PathBuf>,
    known: Vec<Check>,
    /// Checks that were requested and are still valid.
    holding: Vec<Check>,
}

impl CheckedFiles {
    /// Checks that the run in the output directory `dir` keeps. A record that cannot be understood is as none: the data is checked again.
    pub(in crate::data) fn load(dir: Option<&Path>) -> Self {
        let known = dir.and_then(|dir| CHECKED.read(dir)).unwrap_or_default();
        Self { dir: dir.map(Path::to_path_buf), known, holding: Vec::new() }
    }

    /// Runs `check` unless it is known to hold; afterwards it is.
    pub(in crate::data) fn once(&mut self, check: Check, run: impl FnOnce() -> Result<()>) -> Result<()> {
        if !self.known.iter().any(|known| known.claim == check.claim && known.stamp == check.stamp) {
            run()?;
        }
        self.holding.push(check);
        Ok(())
    }

    /// Saves the valid checks, and earlier checks of other files that have not changed since, if this differs from the saved record.
    ///
    /// # Errors
    /// `Io` when the output directory cannot be written.
    pub(in crate::data) fn save(&self) -> Result<()> {
        let stands = |check: &&Check| InFile::open(&check.path).and_then(|file| file.stamp()).is_ok_and(|stamp| stamp == check.stamp);
        let others = self.known.iter().filter(|known| self.holding.iter().all(|check| check.path != known.path)).filter(stands);
        let mut kept: Vec<&Check> = others.chain(&self.holding).collect();
        kept.sort_by_key(|check| &check.path);
        let Some(dir) = self.dir.as_ref().filter(|_| !kept.iter().copied().eq(&self.known)) else { return Ok(()) };
        Records::at(dir)?.write(&CHECKED, &kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    #[test]
    fn a_check_runs_once_until_file_or_claim_changes() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.bin");
        let runs = |claim: &str| {
            let mut checked = CheckedFiles::load(Some(dir.path()));
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
        std::fs::write(&path, "abcd").unwrap();
        assert!(runs("y") && !runs("y"));
        std::fs::write(dir.path().join(".superoffload/data-checked.json"), "{").unwrap();
        assert!(runs("y") && !runs("y"));
        let mut checked = CheckedFiles::load(Some(dir.path()));
        let check = Check { path: path.clone(), claim: "z".into(), stamp: InFile::open(&path).unwrap().stamp().unwrap() };
        assert!(checked.once(check, || Err(Error::usage("no"))).is_err());
        checked.save().unwrap();
        assert!(runs("z"), "what failed is not kept");
    }

    #[test]
    fn the_check_of_a_file_is_kept_until_the_file_changes() {
        let dir = tempfile::tempdir().unwrap();
        let runs = |name: &str| {
            let (path, mut ran) = (dir.path().join(name), false);
            let mut checked = CheckedFiles::load(Some(dir.path()));
            let stamp = InFile::open(&path).unwrap().stamp().unwrap();
            let mut run = || {
                ran = true;
                Ok(())
            };
            checked.once(Check { path, claim: "x".into(), stamp }, &mut run).unwrap();
            checked.save().unwrap();
            ran
        };
        ["a.bin", "b.bin"].iter().for_each(|name| std::fs::write(dir.path().join(name), "abc").unwrap());
        assert!(runs("b.bin") && runs("a.bin") && !runs("b.bin") && !runs("a.bin"));
        std::fs::write(dir.path().join("b.bin"), "abcd").unwrap();
        assert!(!runs("a.bin") && runs("b.bin"));
        assert_eq!(CHECKED.read::<Vec<Check>>(dir.path()).unwrap().len(), 2);
    }
}
