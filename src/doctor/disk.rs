//! The rate at which a save can write into a directory.

use crate::checkpoint::{WRITERS, disk_rate};
use crate::disk::Dir;
use crate::error::Result;
use crate::units::Bytes;
use std::fmt::{self, Display};
use std::path::{Path, PathBuf};

/// Bytes a second by the number of threads that write at once.
#[derive(Debug)]
pub(crate) struct DiskRates {
    dir: PathBuf,
    rates: [(usize, f64); 3],
}

impl DiskRates {
    /// Writes files into `dir` for about a second, and removes them again.
    ///
    /// # Errors
    /// `Io` when there is no such directory, or the disk is full or fails.
    pub(crate) fn measure(dir: &Path) -> Result<Self> {
        let open = Dir::open(dir)?;
        let mut rates = [1, 2, WRITERS].map(|writers| (writers, 0.0));
        for (writers, rate) in &mut rates {
            *rate = disk_rate(&open, *writers)?;
        }
        Ok(Self { dir: dir.to_path_buf(), rates })
    }
}

impl Display for DiskRates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rates = self.rates.map(|(writers, rate)| format!("{} ({writers})", Bytes(rate as u64)));
        write!(f, "{} takes {} a second (by so many writers)", self.dir.display(), rates.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rates_of_a_directory_are_measured_and_a_missing_one_is_named() {
        let tmp = tempfile::tempdir().unwrap();
        let rates = DiskRates::measure(tmp.path()).unwrap().to_string();
        assert!(rates.contains(" (1), ") && rates.contains(" (2), ") && rates.ends_with(" (4) a second (by so many writers)"), "{rates}");
        assert_eq!(std::fs::read_dir(tmp.path()).unwrap().count(), 0);
        let missing = DiskRates::measure(&tmp.path().join("absent")).unwrap_err().to_string();
        assert!(missing.contains("absent"), "{missing}");
    }
}
