//! Paths of groups.

use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::{Path, PathBuf};

/// Prefix of all groups that this crate creates, which distinguishes them from other programs' groups.
pub const PREFIX: &str = "superoffload-";

/// Names in the tree that are not groups.
const RESERVED: [&str; 5] = ["info", "mon_data", "mon_groups", ".", ".."];

/// Longest file name in bytes.
const NAME_BYTES_MAX: usize = 255;

/// Path of a group below the root: `` (the default group), `p0`, `p0/mon_groups/m0`, `mon_groups/m1`.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct GroupPath(String);

impl GroupPath {
    /// The default group, which is the root.
    pub fn root() -> Self {
        Self::default()
    }

    /// The control group `name`.
    ///
    /// # Errors
    /// An error if `name` is not a valid group name.
    pub fn control(name: &str) -> Result<Self, String> {
        check(name).map(|()| Self(name.into()))
    }

    /// The monitor group `name` of this control group.
    ///
    /// # Errors
    /// An error if `name` is not a valid group name, or if this group is itself a monitor group.
    pub fn monitor(&self, name: &str) -> Result<Self, String> {
        check(name)?;
        match self.0.as_str() {
            "" => Ok(Self(format!("mon_groups/{name}"))),
            control if self.is_monitor() => Err(format!("{control} is a monitor group: it can hold no other")),
            control => Ok(Self(format!("{control}/mon_groups/{name}"))),
        }
    }

    /// Whether this is a monitor group.
    pub fn is_monitor(&self) -> bool {
        self.0.contains('/')
    }

    /// The control group of a monitor group; a control group returns itself.
    pub fn control_group(&self) -> Self {
        Self(self.0.split('/').next().filter(|&name| name != "mon_groups").unwrap_or_default().into())
    }

    /// The group's directory below `root`.
    pub fn below(&self, root: &Path) -> PathBuf {
        if self.0.is_empty() { root.into() } else { root.join(&self.0) }
    }

    /// Whether the group has this crate's prefix, or is a monitor group of such a group.
    pub fn is_ours(&self) -> bool {
        self.0.rsplit('/').next().is_some_and(|name| name.starts_with(PREFIX)) || self.0.starts_with(PREFIX)
    }
}

fn check(name: &str) -> Result<(), String> {
    let fits = !name.is_empty() && name.len() <= NAME_BYTES_MAX && !RESERVED.contains(&name);
    let plain = !name.contains(['/', '\n', '\0']);
    if fits && plain { Ok(()) } else { Err(format!("{name:?} cannot be the name of a group")) }
}

impl TryFrom<String> for GroupPath {
    type Error = String;

    fn try_from(path: String) -> Result<Self, String> {
        match path.split('/').collect::<Vec<_>>()[..] {
            [""] => Ok(Self::root()),
            [control] => Self::control(control),
            ["mon_groups", monitor] => Self::root().monitor(monitor),
            [control, "mon_groups", monitor] => Self::control(control)?.monitor(monitor),
            _ => Err(format!("{path:?} is not the path of a group")),
        }
    }
}

impl From<GroupPath> for String {
    fn from(path: GroupPath) -> Self {
        path.0
    }
}

impl fmt::Display for GroupPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "/" } else { &self.0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn knows_parents_and_owners() {
        let adam = GroupPath::control("superoffload-adam").unwrap();
        let counted = adam.monitor("m0").unwrap();
        assert_eq!((counted.to_string().as_str(), counted.control_group()), ("superoffload-adam/mon_groups/m0", adam.clone()));
        assert!(adam.is_ours() && counted.is_ours() && counted.is_monitor() && !adam.is_monitor());
        let foreign = GroupPath::root().monitor("m1").unwrap();
        assert_eq!((foreign.control_group(), foreign.is_ours()), (GroupPath::root(), false));
        assert_eq!(foreign.below(Path::new("/r")), Path::new("/r/mon_groups/m1"));
        assert_eq!(GroupPath::root().below(Path::new("/r")), Path::new("/r"));
        assert!(counted.monitor("m2").is_err());
    }

    #[test]
    fn a_name_stays_below_the_root() {
        for name in ["", ".", "..", "info", "a/b", "../etc", "x\ny", "a\0", &"n".repeat(256)] {
            assert!(GroupPath::control(name).is_err(), "{name}");
        }
        for path in ["..", "p0/..", "p0/m0", "mon_groups/..", "p0/mon_groups/m0/x", "/p0"] {
            assert!(GroupPath::try_from(path.to_owned()).is_err(), "{path}");
        }
    }

    proptest! {
        #[test]
        fn written_paths_read_back_and_never_escape(text in "[a-z./_\\-]{0,12}|p0/mon_groups/[a-z./]{0,3}") {
            if let Ok(path) = GroupPath::try_from(text.clone()) {
                prop_assert!(path.below(Path::new("/r")).components().all(|part| part.as_os_str() != ".."));
                prop_assert_eq!(String::from(path), text);
            }
        }
    }
}
