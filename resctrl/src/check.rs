//! Checks requested limits of a group before the kernel gets them, and builds the command for the `schemata` file.
//!
//! The kernel's messages for some mistakes are short: an unknown domain is an "Invalid argument" without details.

use crate::info::{Info, Kind};
use crate::schemata::{Line, Schemata, Values};

/// Size limit in bytes of one command: the smallest page size.
const COMMAND_BYTES_MAX: usize = 4096;

/// A limit that the kernel has rounded to a value of the hardware.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rounded {
    /// The kernel's name of the resource.
    pub resource: String,
    /// Domain ID.
    pub domain: u32,
    /// The value that was written.
    pub wanted: u64,
    /// The value that was read back. For about a third of all values, MPAM drivers show one less than the value in force.
    pub got: u64,
}

impl Schemata {
    /// Builds the command that sets the limits `wanted` of a group. `self` is the current content of the group's `schemata` file. Domains
    /// that `wanted` omits keep their values.
    ///
    /// # Errors
    /// The first line that this machine does not support, and the reason.
    pub fn command(&self, wanted: &Self, info: &Info) -> Result<String, String> {
        let mut command = String::new();
        for line in &wanted.lines {
            self.check(line, info).map_err(|cause| format!("{line}: {cause}"))?;
            command += &format!("{line}\n");
        }
        match command.len() {
            0 => Err("nothing is wanted".into()),
            bytes if bytes > COMMAND_BYTES_MAX => Err(format!("{bytes} bytes; the kernel reads {COMMAND_BYTES_MAX} at once")),
            _ => Ok(command),
        }
    }

    /// Limits of `wanted` that the kernel has rounded. `self` must have been read after the write. Cache masks are never rounded.
    pub fn rounded(&self, wanted: &Self) -> Vec<Rounded> {
        let mut rounded = Vec::new();
        for line in &wanted.lines {
            let (Values::Limits(wanted), Some(got)) = (&line.values, self.line(&line.resource)) else { continue };
            for &(domain, wanted) in wanted {
                let got = got.values.get(domain).filter(|&got| got != wanted);
                rounded.extend(got.map(|got| Rounded { resource: line.resource.clone(), domain, wanted, got }));
            }
        }
        rounded
    }

    /// The line of `resource`.
    pub fn line(&self, resource: &str) -> Option<&Line> {
        self.lines.iter().find(|line| line.resource == resource)
    }

    fn check(&self, wanted: &Line, info: &Info) -> Result<(), String> {
        let known = info.resources.iter().find(|known| known.name == wanted.resource);
        let (Some(known), Some(has)) = (known, self.line(&wanted.resource)) else { return Err("not on this machine".into()) };
        if self.lines.iter().filter(|line| line.resource == wanted.resource).count() > 1 {
            return Err("the kernel shows it twice".into());
        }
        let values = wanted.values.pairs().filter(|values| !values.is_empty()).ok_or("no value")?;
        for (index, &(domain, value)) in values.iter().enumerate() {
            if values[..index].iter().any(|earlier| earlier.0 == domain) {
                return Err(format!("domain {domain} twice"));
            }
            if has.values.get(domain).is_none() {
                return Err(format!("there is no domain {domain}, only {}", has.values.ids()));
            }
            match (&known.kind, &wanted.values) {
                (&Kind::Cache { cbm_mask, min_cbm_bits, sparse_masks, .. }, Values::Masks(_)) => {
                    check_mask(value, cbm_mask, min_cbm_bits.unwrap_or(1), sparse_masks.unwrap_or(false))?;
                }
                (&Kind::Bandwidth { min_bandwidth, .. }, Values::Limits(_)) => {
                    let max = if info.limits_are_percent(has) { 100 } else { u64::from(u32::MAX) };
                    check_limit(value, min_bandwidth.filter(|_| max == 100).unwrap_or(0).into(), max)?;
                }
                _ => return Err("values of another kind".into()),
            }
        }
        Ok(())
    }
}

fn check_mask(mask: u64, cbm_mask: u64, min_cbm_bits: u32, sparse_masks: bool) -> Result<(), String> {
    let run = (mask >> mask.trailing_zeros().min(63)).trailing_ones();
    if mask == 0 || mask & !cbm_mask != 0 {
        Err(format!("mask {mask:x} is not within {cbm_mask:x}"))
    } else if run < mask.count_ones() && !sparse_masks {
        Err(format!("mask {mask:x} has gaps"))
    } else if run < min_cbm_bits {
        Err(format!("mask {mask:x} has fewer than {min_cbm_bits} consecutive bits"))
    } else {
        Ok(())
    }
}

fn check_limit(limit: u64, min: u64, max: u64) -> Result<(), String> {
    if (min..=max).contains(&limit) { Ok(()) } else { Err(format!("{limit} is not within {min} and {max}")) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::info::Resource;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn info(min_cbm_bits: u32, sparse: bool) -> Info {
        let resource = |name: &str, kind| Resource { name: name.into(), kind, other: BTreeMap::new() };
        let l3 = Kind::Cache {
            cbm_mask: 0xfff,
            min_cbm_bits: Some(min_cbm_bits),
            num_closids: Some(16),
            shareable_bits: None,
            sparse_masks: Some(sparse),
        };
        let mb = Kind::Bandwidth { min_bandwidth: Some(10), bandwidth_gran: Some(10), num_closids: Some(8) };
        Info { resources: vec![resource("L3", l3), resource("MB", mb)], other: BTreeMap::new() }
    }

    fn command(wanted: &str, info: &Info) -> Result<String, String> {
        let now = Schemata::parse("    MB:36=100;2364=100\n    L3:36=fff;2364=fff\nMB_HLIM:36=0\n").unwrap();
        now.command(&Schemata::parse(wanted).unwrap(), info)
    }

    #[test]
    fn writes_supported_values_only() {
        assert_eq!(command(" MB: 2364= 20\n L3:36=00f", &info(1, false)).unwrap(), "MB:2364=20\nL3:36=f\n");
        assert_eq!(command("L3:36=f0f", &info(4, true)).unwrap(), "L3:36=f0f\n");
    }

    #[test]
    fn refuses_the_kernel_s_refusals_with_more_detail() {
        for (wanted, cause) in [
            ("L3:0=f", "L3:0=f: there is no domain 0, only 36, 2364"),
            ("L3:36=0", "L3:36=0: mask 0 is not within fff"),
            ("L3:36=1fff", "L3:36=1fff: mask 1fff is not within fff"),
            ("L3:36=f0f", "L3:36=f0f: mask f0f has gaps"),
            ("L3:36=1", "L3:36=1: mask 1 has fewer than 2 consecutive bits"),
            ("MB:36=9", "MB:36=9: 9 is not within 10 and 100"),
            ("MB:36=101", "MB:36=101: 101 is not within 10 and 100"),
            ("L2:36=f", "L2:36=f: not on this machine"),
            ("MB_HLIM:36=1", "MB_HLIM:36=1: not on this machine"),
            ("L3:", "L3:: no value"),
            ("", "nothing is wanted"),
        ] {
            assert_eq!(command(wanted, &info(2, false)).unwrap_err(), cause);
        }
    }

    #[test]
    fn a_command_fits_a_page() {
        let ids: Vec<_> = (0..600).map(|id| format!("{id}=fff")).collect();
        let many = Schemata::parse(&format!("L3:{}", ids.join(";"))).unwrap();
        assert!(many.command(&many, &info(1, false)).unwrap_err().ends_with("bytes; the kernel reads 4096 at once"));
    }

    #[test]
    fn reports_what_was_rounded() {
        let wanted = Schemata::parse("MB:0=55;1=20\nL3:0=f").unwrap();
        let got = Schemata::parse("    MB:0= 60;1=20\n    L3:0=00f\n").unwrap();
        assert_eq!(got.rounded(&wanted), [Rounded { resource: "MB".into(), domain: 0, wanted: 55, got: 60 }]);
    }

    proptest! {
        #[test]
        fn a_mask_that_passes_is_one_the_kernel_takes(mask: u16, min in 1u32..4) {
            let binary = format!("{mask:b}");
            let one_run = !binary.trim_end_matches('0').contains('0') && mask != 0;
            let accepted = one_run && mask <= 0xfff && mask.count_ones() >= min;
            prop_assert_eq!(check_mask(mask.into(), 0xfff, min, false).is_ok(), accepted);
            prop_assert!(!accepted || check_mask(mask.into(), 0xfff, min, true).is_ok());
        }
    }
}
