//! The setting for a cache and bandwidth partition; module `partition` joins it.

/// The resctrl group that the optimizer's threads join.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case", from = "String")]
pub enum ResctrlGroup {
    /// The group that `superoffload-resctrl` prepares, if it exists.
    Auto,
    /// No group.
    None,
    Named(String),
}

impl From<String> for ResctrlGroup {
    fn from(name: String) -> Self {
        match name.as_str() {
            "auto" => Self::Auto,
            "none" => Self::None,
            _ => Self::Named(name),
        }
    }
}
