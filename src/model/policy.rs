//! Activations that a layer saves between its forward and its backward pass.

use clap::ValueEnum;
use std::fmt;
use std::str::FromStr;

/// Activations that a layer saves for its backward pass. All others are recomputed, bit for bit, or fetched from the host. Ordered from
/// most memory and least time to least memory and most time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LayerPolicy {
    /// Everything.
    Keep,
    /// Everything but what one pass over memory makes again: the outputs of norms and of the activation function.
    RecomputeCheap,
    /// The layer's input.
    RecomputeBlock,
    /// The layer's input and attention's output with its log-sum-exp, in host memory.
    HostAttention,
    /// The layer's input, in host memory.
    Host,
}

impl LayerPolicy {
    /// Whether outputs of norms and of the activation function are saved.
    pub(super) fn keeps_cheap(self) -> bool {
        self == Self::Keep
    }

    /// Whether outputs of matrix products and attention, and all statistics, which are small, are saved.
    pub(super) fn keeps_costly(self) -> bool {
        matches!(self, Self::Keep | Self::RecomputeCheap)
    }

    /// Whether the layer's input is offloaded to host memory.
    pub(super) fn sends_input(self) -> bool {
        matches!(self, Self::HostAttention | Self::Host)
    }

    /// Whether attention's output and log-sum-exp are offloaded to host memory.
    pub(crate) fn sends_attention(self) -> bool {
        self == Self::HostAttention
    }

    /// Whether matrix products are recomputed.
    pub(crate) fn recomputes_block(self) -> bool {
        matches!(self, Self::RecomputeBlock | Self::HostAttention | Self::Host)
    }
}

impl FromStr for LayerPolicy {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        <Self as ValueEnum>::from_str(name, false)
    }
}

impl fmt::Display for LayerPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.to_possible_value().expect("no policy is hidden").get_name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_has_one_name() {
        let names = ["keep", "recompute-cheap", "recompute-block", "host-attention", "host"];
        assert_eq!(LayerPolicy::value_variants().len(), names.len());
        for (policy, name) in LayerPolicy::value_variants().iter().zip(names) {
            assert_eq!((policy.to_string().as_str(), name.parse()), (name, Ok(*policy)));
            assert_eq!(serde_json::to_string(policy).unwrap(), format!("\"{name}\""));
        }
        assert!("Keep".parse::<LayerPolicy>().is_err());
    }
}
