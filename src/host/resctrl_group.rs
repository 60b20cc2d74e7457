//! The choice of a partition of cache and bandwidth; joining it is `partition`.

/// Which resctrl group the optimizer's threads join.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case", from = "String")]
pub enum ResctrlGroup {
    /// The one that `superoffload-resctrl` prepares, if it is there.
    Auto,
    /// None.
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
