//! Adapts a profile to a machine that differs from the profile's reference machine.
//!
//! - Domain IDs: a profile has none. Every domain of the machine gets the same limits.
//! - Masks: the ends of each run of bits are scaled to the machine's mask and rounded. Adjacent runs stay adjacent, and disjoint masks stay
//!   disjoint. With L3CODE and L3DATA, both get the mask.
//! - Cores: the cores of each L3 cache are divided in the proportions of the reference machine, in order of their numbers. Hardware threads
//!   of a core stay together. A group that would get no core of a cache takes one from the group with the most cores.
//! - Bandwidth: the limit is in percent, and at least the kernel's minimum. It is omitted on machines with absolute limits.
//!
//! A limit that the machine cannot represent is an error. A resource that the machine lacks is omitted with a note.

use crate::info::{Info, Kind, Resource};
use crate::machine::Machine;
use crate::profile::{Group, Profile};
use crate::schemata::{Line, Schemata, Values};
use crate::{CpuSet, Error, GroupPath, Result};

/// The resources of a group on this machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fitted {
    /// Path of the group.
    pub path: GroupPath,
    /// CPUs of the group; may be empty.
    pub cpus: CpuSet,
    /// Limits of the group. Resources without a line keep the kernel's defaults.
    pub schemata: Schemata,
}

impl Profile {
    /// Adapts the groups to `machine`, whose resources `info` describes. `default` has the limits of the machine's default group. Also
    /// returns one line for each resource that the machine lacks.
    ///
    /// # Errors
    /// `Refused` if a mask would be narrower than the hardware's minimum.
    pub fn fit(&self, machine: &Machine, info: &Info, default: &Schemata) -> Result<(Vec<Fitted>, Vec<String>)> {
        let (mut fitted, mut notes) = (Vec::new(), Vec::new());
        let cpus = self.divide(machine);
        for (group, cpus) in self.groups.iter().zip(cpus) {
            let refuse = |cause: String| Error::refused(format!("group {} on this machine", group.name), cause);
            if cpus.is_empty() && !group.cpus.is_empty() {
                notes.push(format!("{}: no CPUs, there are too few", group.name));
            }
            let masks = self.mask_lines(group, info, default).map_err(refuse)?;
            let limits = limit_lines(group, info, default);
            if masks.is_empty() && group.l3.is_some() {
                notes.push(format!("{}: no part of an L3 cache, this machine divides none", group.name));
            }
            if limits.is_empty() && group.mb_percent.is_some_and(|percent| percent < 100) {
                notes.push(format!("{}: no limit of bandwidth, this machine has none in percent", group.name));
            }
            fitted.push(Fitted { path: group.path(), cpus, schemata: Schemata { lines: [masks, limits].concat() } });
        }
        Ok((fitted, notes))
    }

    fn mask_lines(&self, group: &Group, info: &Info, default: &Schemata) -> std::result::Result<Vec<Line>, String> {
        let Some(mask) = group.l3 else { return Ok(Vec::new()) };
        let mut lines = Vec::new();
        for (resource, line) in present(info, default).filter(|(resource, _)| ["L3", "L3CODE", "L3DATA"].contains(&&*resource.name)) {
            let (&Kind::Cache { cbm_mask, min_cbm_bits, .. }, Values::Masks(domains)) = (&resource.kind, &line.values) else { continue };
            let (bits, min) = (64 - cbm_mask.leading_zeros(), min_cbm_bits.unwrap_or(1));
            let scaled = scale_mask(mask, self.reference.l3_bits, bits, min)
                .ok_or_else(|| format!("mask {mask:x} of {} bits would be narrower than {min} of {bits}", self.reference.l3_bits))?;
            lines.push(Line { resource: line.resource.clone(), values: Values::Masks(all(domains, scaled)) });
        }
        Ok(lines)
    }

    /// CPUs of each group.
    fn divide(&self, machine: &Machine) -> Vec<CpuSet> {
        let mut cpus = vec![CpuSet::default(); self.groups.len()];
        for cores in &machine.l3_domains {
            for (owner, core) in self.owners(cores.len()).into_iter().zip(cores) {
                if let Some(group) = owner {
                    cpus[group] = cpus[group].or(core);
                }
            }
        }
        cpus
    }

    /// The group of each of the `cores` cores of a cache.
    fn owners(&self, cores: usize) -> Vec<Option<usize>> {
        let reference = self.reference.cpus as usize;
        let owner =
            |core: usize| self.groups.iter().position(|group| group.cpus.contains(((2 * core + 1) * reference / (2 * cores)) as u32));
        let mut owners: Vec<_> = (0..cores).map(owner).collect();
        let count = |owners: &[Option<usize>], group| owners.iter().filter(|&&owner| owner == Some(group)).count();
        for group in 0..self.groups.len() {
            let wanted: Vec<_> = self.groups[group].cpus.iter().collect();
            if wanted.is_empty() || count(&owners, group) > 0 {
                continue;
            }
            let Some(most) = (0..self.groups.len()).max_by_key(|&other| count(&owners, other)).filter(|&most| count(&owners, most) > 1)
            else {
                continue;
            };
            let place = wanted[wanted.len() / 2] as usize * cores / reference;
            let nearest = (0..cores).filter(|&core| owners[core] == Some(most)).min_by_key(|&core| core.abs_diff(place));
            owners[nearest.expect("it has more than one")] = Some(group);
        }
        owners
    }
}

/// Bandwidth limits of a group. Empty if the machine's limits are not percentages.
fn limit_lines(group: &Group, info: &Info, default: &Schemata) -> Vec<Line> {
    let Some(percent) = group.mb_percent else { return Vec::new() };
    let percentages = present(info, default).filter(|(resource, line)| resource.name == "MB" && info.limits_are_percent(line));
    let limits = percentages.filter_map(|(resource, line)| {
        let (&Kind::Bandwidth { min_bandwidth, .. }, Values::Limits(domains)) = (&resource.kind, &line.values) else { return None };
        let limit = percent.max(min_bandwidth.unwrap_or(0)).into();
        Some(Line { resource: line.resource.clone(), values: Values::Limits(all(domains, limit)) })
    });
    limits.collect()
}

/// Resources that are both in `info` and in the default group's limits.
fn present<'a>(info: &'a Info, default: &'a Schemata) -> impl Iterator<Item = (&'a Resource, &'a Line)> {
    default.lines.iter().filter_map(|line| Some((info.resources.iter().find(|known| known.name == line.resource)?, line)))
}

/// Assigns `value` to every domain.
fn all(domains: &[(u32, u64)], value: u64) -> Vec<(u32, u64)> {
    domains.iter().map(|&(id, _)| (id, value)).collect()
}

/// Scales `mask` from `from` bits to `to` bits; `None` if a run of bits would be shorter than `min`.
fn scale_mask(mask: u64, from: u32, to: u32, min: u32) -> Option<u64> {
    let scale = |end: u32| (2 * end * to + from) / (2 * from);
    let (mut rest, mut scaled, mut low) = (mask, 0, 0);
    while rest != 0 {
        let gap = rest.trailing_zeros();
        let run = (rest >> gap).trailing_ones();
        let (first, end) = (scale(low + gap), scale(low + gap + run));
        if end < first + min.max(1) {
            return None;
        }
        scaled |= (u64::MAX >> (64 - (end - first))) << first;
        low += gap + run;
        rest = if low < 64 { mask >> low } else { 0 };
    }
    Some(scaled)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Core;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn machine(caches: &[u32]) -> Machine {
        let mut next = 0..;
        let domain = |&cores: &u32| next.by_ref().take(cores as usize).map(|cpu: u32| Core::from_iter([cpu])).collect();
        Machine { l3_domains: caches.iter().map(domain).collect() }
    }

    fn info(names: &[&str], cbm_mask: u64, min_cbm_bits: u32, linear: bool) -> Info {
        let resource = |&name: &&str| {
            let kind = match name {
                "MB" => Kind::Bandwidth { min_bandwidth: Some(10), bandwidth_gran: Some(10), num_closids: Some(8) },
                _ => Kind::Cache {
                    cbm_mask,
                    min_cbm_bits: Some(min_cbm_bits),
                    num_closids: Some(8),
                    shareable_bits: None,
                    sparse_masks: None,
                },
            };
            let other = BTreeMap::from([("delay_linear".to_owned(), u32::from(linear).to_string())]);
            Resource { name: name.into(), kind, other }
        };
        Info { resources: names.iter().map(resource).collect(), other: BTreeMap::new() }
    }

    /// Groups as `name: cpus, schemata`, and the notes.
    fn fit(machine: &Machine, info: &Info, default: &str) -> (Vec<String>, Vec<String>) {
        let (fitted, notes) = Profile::load("paper").unwrap().fit(machine, info, &Schemata::parse(default).unwrap()).unwrap();
        (fitted.iter().map(|group| format!("{}: {}, {}", group.path, group.cpus, group.schemata)).collect(), notes)
    }

    #[test]
    fn a_grace_gets_the_papers_numbers() {
        let (groups, notes) = fit(&machine(&[72]), &info(&["L3", "MB"], 0xfff, 1, true), "MB:36=100\nL3:36=fff\nMB_HLIM:36=0");
        assert_eq!(groups, ["superoffload-driver: 0-6, L3:36=ff0 MB:36=100", "superoffload-adam: 7-71, L3:36=f MB:36=20"]);
        assert!(notes.is_empty());
    }

    #[test]
    fn two_graces_are_each_divided() {
        let (groups, _) = fit(&machine(&[72, 72]), &info(&["L3", "MB"], 0xfff, 1, true), "MB:36=100;2364=100\nL3:36=fff;2364=fff");
        assert_eq!(groups[0], "superoffload-driver: 0-6,72-78, L3:36=ff0;2364=ff0 MB:36=100;2364=100");
        assert_eq!(groups[1], "superoffload-adam: 7-71,79-143, L3:36=f;2364=f MB:36=20;2364=20");
    }

    #[test]
    fn small_caches_still_give_every_group_a_core() {
        let (groups, notes) = fit(&machine(&[2, 2]), &info(&["L3CODE", "L3DATA"], 0xf_ffff, 1, true), "L3DATA:0=fffff\nL3CODE:0=fffff");
        assert_eq!(groups[0], "superoffload-driver: 0,2, L3DATA:0=fff80 L3CODE:0=fff80");
        assert_eq!(groups[1], "superoffload-adam: 1,3, L3DATA:0=7f L3CODE:0=7f");
        assert_eq!(notes, ["superoffload-adam: no limit of bandwidth, this machine has none in percent"]);
        let (groups, notes) = fit(&machine(&[1]), &info(&[], 0, 0, true), "");
        assert_eq!(groups, ["superoffload-driver: , ", "superoffload-adam: 0, "]);
        assert_eq!(notes.len(), 4, "{notes:?}");
    }

    /// An AMD machine: limits in eighths of a GB/s, masks of sixteen bits, eight cores per cache.
    #[test]
    fn absolute_limits_are_left_alone() {
        let (groups, notes) = fit(&machine(&[8, 8]), &info(&["L3", "MB"], 0xffff, 1, false), "MB:0=2048;1=2048\nL3:0=ffff;1=ffff");
        assert_eq!(groups, ["superoffload-driver: 0,8, L3:0=ffe0;1=ffe0", "superoffload-adam: 1-7,9-15, L3:0=1f;1=1f"]);
        assert_eq!(notes, ["superoffload-adam: no limit of bandwidth, this machine has none in percent"]);
    }

    #[test]
    fn hardware_threads_stay_together_and_low_limits_are_raised() {
        let cores = (0..8).map(|core| Core::from_iter([core, core + 8])).collect();
        let profile = Profile::parse(&include_str!("../profiles/paper.toml").replace("= 20", "= 2")).unwrap();
        let default = Schemata::parse("MB:0=100\nL3:0=fff").unwrap();
        let (groups, _) = profile.fit(&Machine { l3_domains: vec![cores] }, &info(&["L3", "MB"], 0xfff, 1, true), &default).unwrap();
        assert_eq!((groups[0].cpus.to_string(), groups[1].schemata.to_string()), ("0,8".into(), "L3:0=f MB:0=10".into()));
    }

    #[test]
    fn a_mask_that_would_be_too_narrow_is_refused() {
        let default = Schemata::parse("L3:0=f").unwrap();
        let error = Profile::load("paper").unwrap().fit(&machine(&[4]), &info(&["L3"], 0xf, 2, true), &default).unwrap_err();
        assert_eq!(error.to_string(), "group superoffload-adam on this machine: mask f of 12 bits would be narrower than 2 of 4");
    }

    proptest! {
        #[test]
        fn masks_apart_stay_apart_and_within(mask in 1u64..0xfff, to in 1u32..=64) {
            let (one, other) = (scale_mask(mask, 12, to, 1), scale_mask(!mask & 0xfff, 12, to, 1));
            if let (Some(one), Some(other)) = (one, other) {
                prop_assert_eq!(one & other, 0);
                prop_assert_eq!(one | other, u64::MAX >> (64 - to));
            }
            prop_assert_eq!(scale_mask(mask, 12, 12, 1), Some(mask));
        }

        #[test]
        fn every_core_of_a_full_profile_has_one_group(cores in 1u32..200) {
            let cpus = Profile::load("paper").unwrap().divide(&machine(&[cores]));
            prop_assert!(cpus[0].and(&cpus[1]).is_empty());
            prop_assert_eq!(cpus[0].or(&cpus[1]), (0..cores).collect::<CpuSet>());
            prop_assert!(cores < 2 || !cpus[0].is_empty());
        }
    }
}
