//! The `schemata` file: the limits of a group, one line per resource.

use crate::{Error, Result};
use std::fmt;
use std::path::Path;

/// A parsed `schemata` file, with lines in the kernel's order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schemata {
    /// One line per resource.
    pub lines: Vec<Line>,
}

/// One line: `L3:0=fff;1=fff`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Line {
    /// The kernel's name of the resource: `L3`, `L3CODE`, `MB`.
    pub resource: String,
    /// The values of all domains.
    pub values: Values,
}

/// Values by domain ID. IDs may start above 0, have gaps, be unsorted, and differ between resources.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Values {
    /// Masks of a cache (L2, L3).
    Masks(Vec<(u32, u64)>),
    /// Limits of memory bandwidth (MB, SMBA): percent on Intel and Arm, eighths of a GB/s on AMD, MiB/s with the mount option `mba_MBps`.
    Limits(Vec<(u32, u64)>),
    /// Unparsed text: a resource of a newer kernel, or a group in the process of pseudo-locking.
    Text(String),
}

impl Schemata {
    /// Parses the kernel's text.
    ///
    /// # Errors
    /// An error for a line without a colon, for a domain or value of a known resource that is not a number, and for a repeated domain.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let lines = text.lines().filter(|line| !line.trim().is_empty());
        Ok(Self { lines: lines.map(Line::parse).collect::<std::result::Result<_, _>>()? })
    }

    /// Reads and parses `path`.
    pub(crate) fn read(path: &Path) -> Result<Self> {
        Self::parse(&crate::files::read(path)?).map_err(|cause| Error::Format { path: path.into(), cause })
    }
}

impl Values {
    /// Domain IDs and values; `None` for unparsed text.
    pub fn pairs(&self) -> Option<&[(u32, u64)]> {
        match self {
            Self::Masks(pairs) | Self::Limits(pairs) => Some(pairs),
            Self::Text(_) => None,
        }
    }

    /// The value of `domain`.
    pub fn get(&self, domain: u32) -> Option<u64> {
        self.pairs()?.iter().find(|pair| pair.0 == domain).map(|pair| pair.1)
    }

    /// The domain IDs as text: `0, 1`.
    pub fn ids(&self) -> String {
        let ids = self.pairs().unwrap_or_default().iter().map(|pair| pair.0.to_string());
        ids.collect::<Vec<_>>().join(", ")
    }
}

impl Line {
    fn parse(line: &str) -> std::result::Result<Self, String> {
        let (resource, body) = line.split_once(':').ok_or_else(|| format!("no colon in {line:?}"))?;
        let (resource, body) = (resource.trim(), body.trim());
        let values = match resource {
            _ if body == "uninitialized" => Values::Text(body.into()),
            "L2" | "L2CODE" | "L2DATA" | "L3" | "L3CODE" | "L3DATA" => Values::Masks(domains(body, 16)?),
            "MB" | "SMBA" => Values::Limits(domains(body, 10)?),
            _ => Values::Text(body.into()),
        };
        Ok(Self { resource: resource.into(), values })
    }
}

/// Parses `0=fff;1=0ff` with values in base `radix`. Some kernels pad values with blanks or zeros.
fn domains(body: &str, radix: u32) -> std::result::Result<Vec<(u32, u64)>, String> {
    let mut values: Vec<(u32, u64)> = Vec::new();
    for item in body.split(';').filter(|item| !item.trim().is_empty()) {
        let (id, value) = item
            .split_once('=')
            .and_then(|(id, value)| Some((id.trim().parse().ok()?, u64::from_str_radix(value.trim(), radix).ok()?)))
            .ok_or_else(|| format!("{item:?} is not a domain and its value"))?;
        if values.iter().any(|known| known.0 == id) {
            return Err(format!("domain {id} twice in {body:?}"));
        }
        values.push((id, value));
    }
    Ok(values)
}

impl fmt::Display for Schemata {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lines: Vec<_> = self.lines.iter().map(Line::to_string).collect();
        f.write_str(&lines.join(" "))
    }
}

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let body = match &self.values {
            Values::Masks(values) => join(values, |value| format!("{value:x}")),
            Values::Limits(values) => join(values, |value| value.to_string()),
            Values::Text(text) => text.clone(),
        };
        write!(f, "{}:{body}", self.resource)
    }
}

fn join(values: &[(u32, u64)], print: impl Fn(u64) -> String) -> String {
    values.iter().map(|&(id, value)| format!("{id}={}", print(value))).collect::<Vec<_>>().join(";")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn printed(text: &str) -> String {
        Schemata::parse(text).unwrap().to_string()
    }

    /// Lines of kernels 6.12 (with padded values) and 7.2: plain, with CDP, and with `mba_MBps`.
    #[test]
    fn reads_what_kernels_print() {
        assert_eq!(printed("    MB:0= 55;1=100\n    L2:0=0ff;1=0ff\n    L3:0=fff;1=f0\n"), "MB:0=55;1=100 L2:0=ff;1=ff L3:0=fff;1=f0");
        assert_eq!(printed("    MB:0=100\nL3DATA:0=f\nL3CODE:0=f0\n"), "MB:0=100 L3DATA:0=f L3CODE:0=f0");
        assert_eq!(printed("    MB:0=4294967295;1=5\n"), "MB:0=4294967295;1=5");
        assert_eq!(printed("  SMBA:0=2048\n    MB:2364=2048;36=64\n"), "SMBA:0=2048 MB:2364=2048;36=64");
    }

    #[test]
    fn masks_are_hexadecimal_and_limits_decimal() {
        let lines = Schemata::parse("L3:1=10\nMB:1=10\n").unwrap().lines;
        assert_eq!(lines[0].values, Values::Masks(vec![(1, 16)]));
        assert_eq!(lines[1].values, Values::Limits(vec![(1, 10)]));
    }

    #[test]
    fn keeps_unknown_entries() {
        assert_eq!(printed("L3_MAX:1=80%\nL3:uninitialized\n"), "L3_MAX:1=80% L3:uninitialized");
    }

    #[test]
    fn refuses_nonsense() {
        for (text, cause) in [
            ("L3", "no colon in \"L3\""),
            ("L3:0", "\"0\" is not a domain and its value"),
            ("L3:0=zz", "\"0=zz\" is not a domain and its value"),
            ("MB:0=0x32", "\"0=0x32\" is not a domain and its value"),
            ("L3:0=f;0=f", "domain 0 twice in \"0=f;0=f\""),
        ] {
            assert_eq!(Schemata::parse(text).unwrap_err(), cause);
        }
    }

    proptest! {
        #[test]
        fn never_panics_and_prints_parseable_output(text in "([A-Z3]{0,4}[: ]([0-9]{1,3}=[0-9a-f]{0,3}[;, ]?){0,3}\n?){0,3}") {
            if let Ok(parsed) = Schemata::parse(&text) {
                let lines: Vec<_> = parsed.lines.iter().map(Line::to_string).collect();
                prop_assert_eq!(Schemata::parse(&lines.join("\n")).unwrap(), parsed);
            }
        }
    }
}
