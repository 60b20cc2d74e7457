//! The `info` directory, which describes the resources that the machine can partition and monitor.

use crate::{Error, Line, Result, files};
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

/// All resources below `info`, by name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Info {
    /// One resource per directory: `L3`, `L3CODE`, `MB`, `L3_MON`.
    pub resources: Vec<Resource>,
    /// Texts of the files beside the directories: `last_cmd_status`.
    pub other: BTreeMap<String, String>,
}

/// One directory below `info`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resource {
    /// The kernel's name.
    pub name: String,
    /// The resource's parsed description.
    pub kind: Kind,
    /// Texts of files that this crate does not parse.
    pub other: BTreeMap<String, String>,
}

/// The kind of a resource. A field is `None` if this kernel lacks the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A cache with ways that can be assigned to groups.
    Cache {
        /// Mask with all bits set.
        cbm_mask: u64,
        /// Minimum number of bits in a mask.
        min_cbm_bits: Option<u32>,
        /// Number of control groups, including the default group.
        num_closids: Option<u32>,
        /// Bits that devices also use.
        shareable_bits: Option<u64>,
        /// Whether a mask may have gaps.
        sparse_masks: Option<bool>,
    },
    /// Memory bandwidth with limits.
    Bandwidth {
        /// Minimum limit.
        min_bandwidth: Option<u32>,
        /// Step between limits, to which the kernel rounds.
        bandwidth_gran: Option<u32>,
        /// Number of control groups, including the default group.
        num_closids: Option<u32>,
    },
    /// Counters.
    Monitor {
        /// Number of monitor groups, including control groups. Not meaningful on Arm.
        num_rmids: Option<u32>,
        /// Names of the counters: `llc_occupancy`, `mbm_total_bytes`.
        mon_features: Vec<String>,
    },
    /// An unknown kind. All files are in [`Resource::other`].
    Unknown,
}

impl Info {
    /// Reads the directory `info`.
    ///
    /// # Errors
    /// An error if the directory cannot be listed, or if a known file does not hold a number.
    pub fn read(info: &Path) -> Result<Self> {
        let resources = files::names(info, true)?.into_iter().map(|name| Resource::read(info, name)).collect::<Result<_>>()?;
        Ok(Self { resources, other: texts(info)? })
    }

    /// Number of control groups that can exist, including the default group: the minimum over all resources.
    pub fn num_closids(&self) -> Option<u32> {
        self.resources.iter().filter_map(Resource::num_closids).min()
    }
}

impl Info {
    /// Whether the limits in `line` are percentages of the full bandwidth, as on Intel and Arm. AMD's limits are in eighths of a GB/s.
    /// Limits of a tree mounted with `mba_MBps` are in MiB/s. Both are recognized by `delay_linear`, or by a limit above 100.
    pub fn limits_are_percent(&self, line: &Line) -> bool {
        let is_nonlinear =
            |known: &Resource| known.name == line.resource && known.other.get("delay_linear").is_some_and(|linear| linear == "0");
        line.values.pairs().is_some_and(|pairs| pairs.iter().all(|pair| pair.1 <= 100)) && !self.resources.iter().any(is_nonlinear)
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

/// The files of one directory. Parsed files are removed from `texts`.
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

/// Texts of all files in `dir`, trimmed. An unreadable file has its error as text, because a newer kernel may have write-only files.
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

    /// An Intel server. The smaller number of CLOSIDs limits the number of groups.
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

    /// An AMD server with SMBA beside MB, and a directory of an unknown future kernel.
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
