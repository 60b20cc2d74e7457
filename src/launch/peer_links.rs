//! The links between GPUs that train together: lines for the user, and the route of copies for the planner.

use super::gpu::unlinked;
use crate::error::Result;
use crate::hardware::gpu::{GpuId, GpuLink, links};
use crate::hardware::peer_route::PeerRoute;

/// The links between each pair of several GPUs.
#[derive(Clone, Debug, Default)]
pub(crate) struct PeerLinks {
    gpus: Vec<GpuId>,
    known: Vec<([usize; 2], GpuLink)>,
    /// Why NVIDIA's management library reports no links.
    why_unknown: Option<String>,
    /// Pairs that cannot access each other's memory.
    unlinked: Vec<[usize; 2]>,
}

impl PeerLinks {
    /// Finds the links between each pair of `gpus`.
    ///
    /// # Errors
    /// Errors of the CUDA driver.
    pub(crate) fn between(gpus: &[GpuId]) -> Result<Self> {
        if gpus.len() < 2 {
            return Ok(Self::default());
        }
        let (known, why_unknown) = links(gpus).map_or_else(|why| (Vec::new(), Some(why.to_string())), |known| (known, None));
        Ok(Self { known, why_unknown, unlinked: unlinked(gpus)?, gpus: gpus.to_vec() })
    }

    /// The slowest route of any copy, since every step waits for the slowest copy. A link of unknown type counts as [`PeerRoute::Own`], for
    /// which the rates of the profile apply.
    pub(crate) fn route(&self) -> PeerRoute {
        let over_pcie = self.known.iter().any(|(_, link)| matches!(link, GpuLink::Pcie(_)));
        match (self.unlinked.is_empty(), over_pcie) {
            (false, _) => PeerRoute::Host,
            (true, true) => PeerRoute::Links,
            (true, false) => PeerRoute::Own,
        }
    }

    /// One line for each pair.
    pub(crate) fn pairs(&self) -> Vec<String> {
        let pairs = (0..self.gpus.len()).flat_map(|other| (0..other).map(move |one| [one, other]));
        pairs
            .map(|pair @ [one, other]| format!("GPU {} and GPU {}: {}", self.gpus[one].index, self.gpus[other].index, self.of(pair)))
            .collect()
    }

    /// One line for all pairs if there are several and all links are equal, else one line for each pair.
    pub(crate) fn lines(&self) -> Vec<String> {
        let pairs = self.pairs();
        let words = |line: &String| line.split_once(": ").map(|(_, words)| words.to_owned());
        match pairs.first().and_then(words) {
            Some(first) if pairs.len() > 1 && pairs.iter().all(|line| words(line).as_ref() == Some(&first)) => {
                vec![format!("each two of {} GPUs: {first}", self.gpus.len())]
            }
            _ => pairs,
        }
    }

    /// Describes the link of a pair.
    fn of(&self, pair: [usize; 2]) -> String {
        let known = self.known.iter().find(|(known, _)| *known == pair).map(|(_, link)| link.to_string());
        let unknown = || format!("unknown link ({})", self.why_unknown.as_deref().unwrap_or("no link information"));
        let access = if self.unlinked.contains(&pair) {
            "no direct access, so that gradients and weights pass through host memory"
        } else {
            "direct"
        };
        format!("{}; {access}", known.unwrap_or_else(unknown))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn linked(links: &[GpuLink], unlinked: &[[usize; 2]]) -> PeerLinks {
        let gpus = (0..3).map(|index| GpuId { index, pci: format!("0000:{index}F:00.0"), model: "NVIDIA H200".into() }).collect();
        let known = [[0, 1], [0, 2], [1, 2]].into_iter().zip(links.iter().copied()).collect();
        PeerLinks { gpus, known, why_unknown: None, unlinked: unlinked.to_vec() }
    }

    #[test]
    fn a_step_waits_for_the_slowest_link() {
        use GpuLink::{NvSwitch, Pcie};
        let route = |links: &[GpuLink], unlinked| linked(links, unlinked).route();
        assert_eq!(route(&[NvSwitch(18); 3], &[]), PeerRoute::Own);
        assert_eq!(route(&[NvSwitch(18), Pcie("across memory nodes"), NvSwitch(18)], &[]), PeerRoute::Links);
        assert_eq!(route(&[NvSwitch(18); 3], &[[0, 2]]), PeerRoute::Host);
        assert_eq!(route(&[], &[]), PeerRoute::Own, "no link information");
    }

    #[test]
    fn pairs_that_are_alike_are_one_line() {
        use GpuLink::{NvSwitch, Pcie};
        assert_eq!(linked(&[NvSwitch(18); 3], &[]).lines(), ["each two of 3 GPUs: 18 NVLinks through switches; direct"]);
        let mixed = linked(&[NvSwitch(18), Pcie("across memory nodes")], &[[0, 2]]);
        let through_host = "no direct access, so that gradients and weights pass through host memory";
        assert_eq!(
            mixed.lines(),
            [
                "GPU 0 and GPU 1: 18 NVLinks through switches; direct".to_owned(),
                format!("GPU 0 and GPU 2: PCIe, across memory nodes; {through_host}"),
                "GPU 1 and GPU 2: unknown link (no link information); direct".to_owned(),
            ]
        );
        assert_eq!(PeerLinks::default().lines(), Vec::<String>::new());
    }
}
