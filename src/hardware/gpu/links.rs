//! Links between two GPUs of a machine.

use std::fmt;

/// The connection of two GPUs.
#[cfg_attr(not(any(feature = "cuda", test)), expect(dead_code, reason = "only the management library knows links"))]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GpuLink {
    /// Direct NVLinks, with their number.
    NvLink(usize),
    /// NVLinks through switches, with their number per GPU.
    NvSwitch(usize),
    /// No NVLink; PCIe with this common part.
    Pcie(&'static str),
}

#[cfg(any(feature = "cuda", test))]
impl GpuLink {
    /// The connection of two GPUs. Each is given by its PCI address and the addresses at the far ends of its NVLinks. `gpus` has the
    /// addresses of all GPUs, and `pcie` describes the PCIe path between the two. A far end that is not a GPU is a switch.
    pub(super) fn between(first: (&str, &[String]), second: (&str, &[String]), gpus: &[String], pcie: &'static str) -> Self {
        let direct = first.1.iter().filter(|end| is_same_pci(end, second.0)).count();
        let to_switches = |ends: &[String]| ends.iter().filter(|end| !gpus.iter().any(|gpu| is_same_pci(gpu, end))).count();
        match (direct, to_switches(first.1).min(to_switches(second.1))) {
            (0, 0) => Self::Pcie(pcie),
            (0, switched) => Self::NvSwitch(switched),
            (direct, _) => Self::NvLink(direct),
        }
    }
}

impl fmt::Display for GpuLink {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NvLink(count) => write!(f, "{count} NVLinks"),
            Self::NvSwitch(count) => write!(f, "{count} NVLinks through switches"),
            Self::Pcie(part) => write!(f, "PCIe, {part}"),
        }
    }
}

/// Whether two PCI addresses are equal. CUDA and the kernel write the domain with four digits, the management library with eight.
pub(crate) fn is_same_pci(one: &str, other: &str) -> bool {
    let parts = |address: &str| {
        let (domain, place) = address.split_once(':')?;
        Some((u32::from_str_radix(domain, 16).ok()?, place.to_ascii_lowercase()))
    };
    parts(one).is_some() && parts(one) == parts(other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_the_same_in_every_spelling() {
        for (one, other, same) in [
            ("0000:0F:00.0", "00000000:0f:00.0", true),
            ("0001:0F:00.0", "00000001:0F:00.0", true),
            ("0000:0F:00.0", "0001:0F:00.0", false),
            ("0000:0F:00.0", "0000:1F:00.0", false),
            ("0000:00:0F.0", "0000:0F:00.0", false),
            ("", "", false),
            ("0000", "00000000", false),
        ] {
            assert_eq!((is_same_pci(one, other), is_same_pci(other, one)), (same, same), "{one} {other}");
        }
    }

    #[test]
    fn the_link_of_two_gpus_is_nvlink_where_there_is_one() {
        let gpus = ["00000000:0F:00.0", "00000000:1F:00.0", "00000000:2F:00.0"].map(String::from);
        let ends = |at: &[&str]| at.iter().map(|at| at.to_string()).collect::<Vec<_>>();
        let between = |first: &[&str], second: &[&str]| {
            GpuLink::between(("0000:0F:00.0", &ends(first)), ("0000:1F:00.0", &ends(second)), &gpus, "one host bridge").to_string()
        };
        assert_eq!(between(&["0000:1f:00.0", "0000:1f:00.0", "0000:2f:00.0"], &["0000:0f:00.0"; 2]), "2 NVLinks");
        assert_eq!(between(&["0000:aa:00.0"; 18], &["0000:ab:00.0"; 18]), "18 NVLinks through switches");
        // The third GPU is not a switch.
        assert_eq!(between(&["0000:2f:00.0"], &["0000:2f:00.0"]), "PCIe, one host bridge");
        assert_eq!(between(&[], &["0000:aa:00.0"]), "PCIe, one host bridge");
        // In a virtual machine the far end may have no address.
        assert_eq!(between(&[""], &[""]), "1 NVLinks through switches");
    }
}
