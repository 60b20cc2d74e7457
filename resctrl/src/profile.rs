//! Profiles of partitions: a TOML file lists the groups and their limits on a reference machine.

use crate::{CpuSet, Error, GroupPath, PREFIX, Result, files};
use serde::{Deserialize, Deserializer, de};
use std::path::Path;

/// Profiles that are part of this crate.
const EMBEDDED: [(&str, &str); 2] =
    [("paper", include_str!("../profiles/paper.toml")), ("cache-only", include_str!("../profiles/cache-only.toml"))];

/// Default group of the optimizer's threads.
pub const ADAM_GROUP: &str = "superoffload-adam";

/// A partition of a machine.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Short description of the profile's purpose.
    pub description: String,
    /// The machine that the limits refer to.
    pub reference: Reference,
    /// The groups.
    #[serde(rename = "group")]
    pub groups: Vec<Group>,
}

/// The properties of a machine that a profile depends on.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Reference {
    /// Number of cores that share an L3 cache. They are numbered from 0.
    pub cpus: u32,
    /// Number of bits in a mask of the L3 cache.
    pub l3_bits: u32,
}

/// The resources of a group on the reference machine.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Group {
    /// Name of the group, which starts with [`PREFIX`].
    pub name: String,
    /// Cores of each L3 cache. If empty, only threads that join the group belong to it.
    #[serde(default)]
    pub cpus: CpuSet,
    /// Mask of the L3 cache; `None` keeps the kernel's default.
    #[serde(default, deserialize_with = "mask")]
    pub l3: Option<u64>,
    /// Memory bandwidth in percent; `None` is unlimited.
    #[serde(default)]
    pub mb_percent: Option<u32>,
}

impl Profile {
    /// Loads the embedded profile of this name, or the file at this path.
    ///
    /// # Errors
    /// An error if there is neither, or if the file is invalid; names the file, line and key.
    pub fn load(name_or_file: &str) -> Result<Self> {
        if let Some((_, text)) = EMBEDDED.iter().find(|(name, _)| *name == name_or_file) {
            return Ok(Self::parse(text).expect("a test reads every embedded profile"));
        }
        let path = Path::new(name_or_file);
        if !files::exists(path)? {
            let known: Vec<_> = Self::embedded().collect();
            return Err(Error::refused(format!("profile {name_or_file}"), format!("neither a file nor one of {}", known.join(", "))));
        }
        Self::parse(&files::read(path)?).map_err(|cause| Error::Format { path: path.into(), cause })
    }

    /// Names of the embedded profiles.
    pub fn embedded() -> impl Iterator<Item = &'static str> {
        EMBEDDED.iter().map(|(name, _)| *name)
    }

    /// Parses a profile.
    ///
    /// # Errors
    /// A description of the problem and its position, in one line.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let profile: Self = toml::from_str(text).map_err(|e| {
            let start = e.span().map_or(0, |span| span.start);
            let number = text[..start].matches('\n').count() + 1;
            let line = text.lines().nth(number - 1).unwrap_or_default().trim();
            format!("line {number} `{line}`: {}", e.message().replace('\n', " "))
        })?;
        profile.check().map(|()| profile)
    }

    fn check(&self) -> std::result::Result<(), String> {
        let Reference { cpus, l3_bits } = self.reference;
        if cpus == 0 || !(1..=64).contains(&l3_bits) {
            return Err(format!("reference: {cpus} cpus and {l3_bits} l3_bits are no machine"));
        }
        if self.groups.is_empty() {
            return Err("group: the profile has no group".into());
        }
        for (index, group) in self.groups.iter().enumerate() {
            group.check(&self.reference).map_err(|cause| format!("group {}: {cause}", group.name))?;
            for other in &self.groups[..index] {
                if other.name == group.name {
                    return Err(format!("group {}: there are two", group.name));
                }
                if !other.cpus.and(&group.cpus).is_empty() {
                    return Err(format!("group {}: cpus: {} has some of them, too", group.name, other.name));
                }
            }
        }
        Ok(())
    }
}

impl Group {
    /// The group's path in a tree.
    ///
    /// # Panics
    /// If the group is not part of a parsed profile.
    pub fn path(&self) -> GroupPath {
        GroupPath::control(&self.name).expect("checked when the profile was read")
    }

    fn check(&self, reference: &Reference) -> std::result::Result<(), String> {
        if !GroupPath::control(&self.name)?.is_ours() {
            return Err(format!("name: must start with {PREFIX}, which marks groups of this program"));
        }
        if let Some(cpu) = self.cpus.iter().find(|&cpu| cpu >= reference.cpus) {
            return Err(format!("cpus: the reference machine has no {cpu}"));
        }
        let all = u64::MAX >> (64 - reference.l3_bits);
        if let Some(mask) = self.l3.filter(|&mask| mask == 0 || mask & !all != 0) {
            return Err(format!("l3: {mask:x} is not within {all:x}"));
        }
        match self.mb_percent {
            Some(percent) if !(1..=100).contains(&percent) => Err(format!("mb_percent: {percent} is not within 1 and 100")),
            _ => Ok(()),
        }
    }
}

/// Deserializes a hexadecimal mask, as in the kernel's files.
fn mask<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Option<u64>, D::Error> {
    let text = String::deserialize(deserializer)?;
    let mask = u64::from_str_radix(&text, 16).map_err(|_| de::Error::custom(format!("`{text}` is not a hexadecimal mask")))?;
    Ok(Some(mask))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn every_embedded_profile_is_one_and_has_a_group_for_adam() {
        for name in Profile::embedded() {
            let profile = Profile::load(name).unwrap();
            assert!(profile.groups.iter().any(|group| group.name == ADAM_GROUP), "{name}");
        }
        let [driver, adam] = &Profile::load("paper").unwrap().groups[..] else { panic!("two groups") };
        assert_eq!((driver.cpus.to_string().as_str(), driver.l3, driver.mb_percent), ("0-6", Some(0xff0), Some(100)));
        assert_eq!((adam.cpus.to_string().as_str(), adam.l3, adam.mb_percent), ("7-71", Some(0xf), Some(20)));
    }

    #[test]
    fn errors_name_file_line_and_key() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("mine.toml");
        let complaint = |from: &str, to: &str| {
            let text = EMBEDDED[0].1;
            assert!(text.contains(from), "{from}");
            std::fs::write(&path, text.replace(from, to)).unwrap();
            let error = Profile::load(path.to_str().unwrap()).unwrap_err().to_string();
            error.strip_prefix(&format!("read {}: ", path.display())).unwrap_or_else(|| panic!("{error}")).to_owned()
        };
        for (from, to, cause) in [
            ("= 20", "= \"20\"", "line 19 `mb_percent = \"20\"`: invalid type: string \"20\", expected u32"),
            ("= 20", "= 120", "group superoffload-adam: mb_percent: 120 is not within 1 and 100"),
            ("\"f\"", "\"0xf\"", "line 20 `l3 = \"0xf\"`: `0xf` is not a hexadecimal mask"),
            ("\"f\"", "\"1fff\"", "group superoffload-adam: l3: 1fff is not within fff"),
            ("7-71", "7-", "line 18 `cpus = \"7-\"`: \"7-\" is not a list of CPUs"),
            ("7-71", "7-72", "group superoffload-adam: cpus: the reference machine has no 72"),
            ("7-71", "6-71", "group superoffload-adam: cpus: superoffload-driver has some of them, too"),
            ("-driver", "-adam", "group superoffload-adam: there are two"),
            ("superoffload-driver", "p0", "group p0: name: must start with superoffload-, which marks groups of this program"),
            ("superoffload-driver", "../p0", "group ../p0: \"../p0\" cannot be the name of a group"),
            ("cpus = 72", "cpus = 0", "reference: 0 cpus and 12 l3_bits are no machine"),
        ] {
            assert_eq!(complaint(from, to), cause);
        }
        let unknown = complaint("mb_percent = 20", "mb = 20");
        assert!(unknown.starts_with("line 19 `mb = 20`: unknown field `mb`"), "{unknown}");
        assert_eq!(Profile::load("papre").unwrap_err().to_string(), "profile papre: neither a file nor one of paper, cache-only");
    }

    proptest! {
        #[test]
        fn any_text_is_read_or_refused_in_one_line(at in 0usize..900, insert in "[ -~\n]{0,6}", cut in 0usize..40) {
            let text = EMBEDDED[0].1;
            let at = at.min(text.len());
            let damaged = format!("{}{insert}{}", &text[..at], &text[(at + cut).min(text.len())..]);
            if let Err(cause) = Profile::parse(&damaged) {
                prop_assert!(!cause.contains('\n'), "{}", cause);
            }
        }
    }
}
