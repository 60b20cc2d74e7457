//! Counters of a group: occupied cache and transferred bytes.

use crate::{Result, files};
use std::path::Path;

/// One counter in one domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counter {
    /// The kernel's name of the domain: `mon_L3_00`.
    pub domain: String,
    /// The kernel's name of the event: `llc_occupancy`, `mbm_total_bytes`.
    pub event: String,
    /// Occupied bytes, or bytes transferred since the group was created. `None` while the hardware has no value (`Unavailable`,
    /// `Unassigned`, `Error`).
    pub bytes: Option<u64>,
}

/// Reads all counters in `mon_data` of the group at `dir`. A machine without monitoring has none.
///
/// Domains and events are listed, because they differ between kernels. Parts of a domain (`mon_sub_L3_00`) are skipped, because the domain
/// is their sum.
pub(crate) fn read(dir: &Path) -> Result<Vec<Counter>> {
    let mon_data = dir.join("mon_data");
    let mut counters = Vec::new();
    if !files::exists(&mon_data)? {
        return Ok(counters);
    }
    for domain in files::names(&mon_data, true)? {
        let dir = mon_data.join(&domain);
        for event in files::names(&dir, false)? {
            let bytes = files::read(&dir.join(&event))?.trim().parse().ok();
            counters.push(Counter { domain: domain.clone(), event, bytes });
        }
    }
    Ok(counters)
}

/// The sum of `event` over all domains; `None` if no domain has a value now.
pub fn total(counters: &[Counter], event: &str) -> Option<u64> {
    let counted: Vec<u64> = counters.iter().filter(|counter| counter.event == event).filter_map(|counter| counter.bytes).collect();
    if counted.is_empty() { None } else { Some(counted.iter().sum()) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn events_are_found_by_name_and_may_be_unavailable() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), []);
        for (path, text) in [
            ("mon_L3_36/llc_occupancy", "3145728\n"),
            ("mon_L3_36/mbm_total_bytes", "147456000\n"),
            ("mon_L3_2364/mbm_total_bytes", "4096\n"),
            ("mon_L3_2364/llc_occupancy", "Unavailable\n"),
            ("mon_L3_36/mon_sub_L3_00/llc_occupancy", "1\n"),
            ("mon_MB_36/mbm_local_bytes", "Unassigned\n"),
        ] {
            let path = dir.path().join("mon_data").join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let counters = read(dir.path()).unwrap();
        assert_eq!(counters.len(), 5);
        assert_eq!(counters[0], Counter { domain: "mon_L3_2364".into(), event: "llc_occupancy".into(), bytes: None });
        assert_eq!(total(&counters, "mbm_total_bytes"), Some(147_460_096));
        assert_eq!(total(&counters, "llc_occupancy"), Some(3_145_728));
        assert_eq!(total(&counters, "mbm_local_bytes"), None);
    }
}
