//! What a layer keeps between its forward and its backward pass.

use clap::ValueEnum;
use std::fmt;
use std::str::FromStr;

/// What a layer keeps for its backward pass; the rest is computed again, bit for bit, or fetched. From most memory and least
/// time to the opposite.
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
    /// Outputs of norms and of the activation function stay.
    pub(super) fn keeps_cheap(self) -> bool {
        self == Self::Keep
    }

    /// Outputs of matrix products and attention stay, and all statistics, which are small.
    pub(super) fn keeps_costly(self) -> bool {
        matches!(self, Self::Keep | Self::RecomputeCheap)
    }

    /// The layer's input waits in host memory.
    pub(super) fn sends_input(self) -> bool {
        matches!(self, Self::HostAttention | Self::Host)
    }

    /// So do attention's output and log-sum-exp.
    pub(crate) fn sends_attention(self) -> bool {
        self == Self::HostAttention
    }

    /// Matrix products are computed again.
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
