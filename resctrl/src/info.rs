//! The `info` directory: what the machine can partition and monitor.

use crate::{Error, Line, Result, files};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// Every resource under `info`, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// One a directory: `L3`, `L3CODE`, `MB`, `L3_MON`.
    pub resources: Vec<Resource>,
    /// Files beside the directories, as text: `last_cmd_status`.
    pub other: BTreeMap<String, String>,
}

/// One directory under `info`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// The kernel's name.
    pub name: String,
    /// What the kernel says about it, as far as this crate knows it.
    pub kind: Kind,
    /// The files this crate does not know, as text.
    pub other: BTreeMap<String, String>,
}

/// What a resource is. A file that this kernel does not have is `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A cache whose ways can be allotted.
    Cache {
        /// All bits of a mask.
        cbm_mask: u64,
        /// Fewest bits a mask may have.
        min_cbm_bits: Option<u32>,
        /// Control groups, the default one included.
        num_closids: Option<u32>,
        /// Bits that devices use too.
        shareable_bits: Option<u64>,
        /// Whether a mask may have gaps.
        sparse_masks: Option<bool>,
    },
    /// Memory bandwidth that can be limited.
    Bandwidth {
        /// Smallest limit.
        min_bandwidth: Option<u32>,
        /// Steps between limits; the kernel rounds to them.
        bandwidth_gran: Option<u32>,
        /// Control groups, the default one included.
        num_closids: Option<u32>,
    },
    /// Counters.
    Monitor {
        /// Monitor groups, control groups included. Says little on Arm.
        num_rmids: Option<u32>,
        /// Names of the counters: `llc_occupancy`, `mbm_total_bytes`.
        mon_features: Vec<String>,
    },
    /// None of these: everything is in [`Resource::other`].
    Unknown,
}

impl Info {
    /// Reads the directory `info`.
    ///
    /// # Errors
    /// When it cannot be listed, or a known file holds something else than a number.
    pub fn read(info: &Path) -> Result<Self> {
        let resources = files::names(info, true)?.into_iter().map(|name| Resource::read(info, name)).collect::<Result<_>>()?;
        Ok(Self { resources, other: texts(info)? })
    }

    /// How many control groups can exist, the default one included: the smallest number of all resources.
    pub fn num_closids(&self) -> Option<u32> {
        self.resources.iter().filter_map(Resource::num_closids).min()
    }
}

impl Info {
    /// Whether the limits in `line` are percent of the full bandwidth, as on Intel and Arm. AMD's are eighths of a GB/s, those of a tree
    /// mounted with `mba_MBps` MiB/s; then the kernel says so, or a domain without a limit shows more than 100.
    pub fn limits_are_percent(&self, line: &Line) -> bool {
        let says_no = |known: &Resource| known.name == line.resource && known.other.get("delay_linear").is_some_and(|linear| linear == "0");
        line.values.pairs().is_some_and(|pairs| pairs.iter().all(|pair| pair.1 <= 100)) && !self.resources.iter().any(says_no)
    }
}

impl Resource {
    fn read(info: &Path, name: String) -> Result<Self> {
        let dir = info.join(&name);
        let mut known = Files { dir: &dir, texts: texts(&dir)? };
        let kind = known.kind()?;
        Ok(Self { name, kind, other: known.texts })
    }

    fn num_closids(&self) -> Option<u32> {
        match self.kind {
            Kind::Cache { num_closids, .. } | Kind::Bandwidth { num_closids, .. } => num_closids,
            Kind::Monitor { .. } | Kind::Unknown => None,
        }
    }
}

/// Files of one directory; what is understood is taken out.
struct Files<'a> {
    dir: &'a Path,
    texts: BTreeMap<String, String>,
}

impl Files<'_> {
    fn kind(&mut self) -> Result<Kind> {
        if let Some(cbm_mask) = self.take("cbm_mask", hex)? {
            return Ok(Kind::Cache {
                cbm_mask,
                min_cbm_bits: self.take("min_cbm_bits", decimal)?,
                num_closids: self.take("num_closids", decimal)?,
                shareable_bits: self.take("shareable_bits", hex)?,
                sparse_masks: self.take("sparse_masks", decimal)?.map(|gaps| gaps != 0),
            });
        }
        if self.texts.contains_key("min_bandwidth") || self.texts.contains_key("bandwidth_gran") {
            return Ok(Kind::Bandwidth {
                min_bandwidth: self.take("min_bandwidth", decimal)?,
                bandwidth_gran: self.take("bandwidth_gran", decimal)?,
                num_closids: self.take("num_closids", decimal)?,
            });
        }
        let Some(mon_features) = self.texts.remove("mon_features") else { return Ok(Kind::Unknown) };
        let mon_features = mon_features.lines().map(str::to_owned).collect();
        Ok(Kind::Monitor { num_rmids: self.take("num_rmids", decimal)?, mon_features })
    }

    fn take<T>(&mut self, name: &str, parse: fn(&str) -> Option<T>) -> Result<Option<T>> {
        let Some(text) = self.texts.remove(name) else { return Ok(None) };
        let number = parse(&text).ok_or_else(|| Error::Format { path: self.dir.join(name), cause: format!("{text:?} is not a number") })?;
        Ok(Some(number))
    }
}

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

fn decimal(text: &str) -> Option<u32> {
    text.parse().ok()
}

/// Every file of `dir`, trimmed; why it could not be read where that is so (a newer kernel may have files for writing only).
fn texts(dir: &Path) -> Result<BTreeMap<String, String>> {
    let text = |name: String| {
        let text = std::fs::read_to_string(dir.join(&name)).unwrap_or_else(|e| format!("unreadable: {e}"));
        (name, text.trim().to_owned())
    };
    Ok(files::names(dir, false)?.into_iter().map(text).collect())
}

impl fmt::Display for Resource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.name)?;
        match &self.kind {
            Kind::Cache { cbm_mask, min_cbm_bits, num_closids, .. } => {
                write!(f, " cbm_mask {cbm_mask:x}")?;
                field(f, "min_cbm_bits", *min_cbm_bits)?;
                field(f, "num_closids", *num_closids)
            }
            Kind::Bandwidth { min_bandwidth, bandwidth_gran, num_closids } => {
                field(f, "min_bandwidth", *min_bandwidth)?;
                field(f, "bandwidth_gran", *bandwidth_gran)?;
                field(f, "num_closids", *num_closids)
            }
            Kind::Monitor { num_rmids, mon_features } => {
                field(f, "num_rmids", *num_rmids)?;
                mon_features.iter().try_for_each(|feature| write!(f, " {feature}"))
            }
            Kind::Unknown => self.other.keys().try_for_each(|name| write!(f, " {name}")),
        }
    }
}

fn field(f: &mut fmt::Formatter<'_>, name: &str, value: Option<u32>) -> fmt::Result {
    value.map_or(Ok(()), |value| write!(f, " {name} {value}"))
}

impl fmt::Display for Info {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let resources: Vec<_> = self.resources.iter().map(Resource::to_string).collect();
        f.write_str(&resources.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        dir
    }

    /// An Intel server: the smaller of the two counts of CLOSIDs is what can be used.
    #[test]
    fn reads_intel_rdt() {
        let dir = tree(&[
            ("last_cmd_status", "ok\n"),
            ("L3/bit_usage", "0=XXSSSSSSSSSS;1=XXSSSSSSSSSS\n"),
            ("L3/cbm_mask", "fff\n"),
            ("L3/min_cbm_bits", "1\n"),
            ("L3/num_closids", "16\n"),
            ("L3/shareable_bits", "c00\n"),
            ("L3/sparse_masks", "0\n"),
            ("MB/bandwidth_gran", "10\n"),
            ("MB/delay_linear", "1\n"),
            ("MB/min_bandwidth", "10\n"),
            ("MB/num_closids", "8\n"),
            ("MB/thread_throttle_mode", "max\n"),
            ("L3_MON/max_threshold_occupancy", "524288\n"),
            ("L3_MON/mon_features", "llc_occupancy\nmbm_total_bytes\nmbm_local_bytes\n"),
            ("L3_MON/num_rmids", "32\n"),
        ]);
        let info = Info::read(dir.path()).unwrap();
        assert_eq!(info.num_closids(), Some(8));
        assert_eq!(info.other["last_cmd_status"], "ok");
        let l3 = &info.resources[0];
        let kind = Kind::Cache {
            cbm_mask: 0xfff,
            min_cbm_bits: Some(1),
            num_closids: Some(16),
            shareable_bits: Some(0xc00),
            sparse_masks: Some(false),
        };
        assert_eq!(l3.kind, kind);
        assert_eq!(l3.other.keys().collect::<Vec<_>>(), ["bit_usage"]);
        assert_eq!(
            info.to_string(),
            "L3 cbm_mask fff min_cbm_bits 1 num_closids 16, \
             L3_MON num_rmids 32 llc_occupancy mbm_total_bytes mbm_local_bytes, \
             MB min_bandwidth 10 bandwidth_gran 10 num_closids 8"
        );
    }

    /// An AMD server has SMBA beside MB; a kernel from the future has a directory that nobody knows.
    #[test]
    fn reads_amd_and_keeps_the_unknown() {
        let dir = tree(&[
            ("MB/bandwidth_gran", "1\n"),
            ("MB/min_bandwidth", "1\n"),
            ("MB/num_closids", "16\n"),
            ("SMBA/bandwidth_gran", "1\n"),
            ("SMBA/num_closids", "16\n"),
            ("PERF_PKG_MON/energy/unit", "J\n"),
            ("PERF_PKG_MON/num_events", "3\n"),
        ]);
        let info = Info::read(dir.path()).unwrap();
        assert_eq!(
            info.to_string(),
            "MB min_bandwidth 1 bandwidth_gran 1 num_closids 16, PERF_PKG_MON num_events, SMBA bandwidth_gran 1 num_closids 16"
        );
        assert_eq!(info.resources[1].other["num_events"], "3");
    }

    #[test]
    fn a_number_that_is_none_names_its_file() {
        let dir = tree(&[("L3/cbm_mask", "many\n")]);
        let error = Info::read(dir.path()).unwrap_err().to_string();
        assert!(error.ends_with("L3/cbm_mask: \"many\" is not a number"), "{error}");
    }
}
