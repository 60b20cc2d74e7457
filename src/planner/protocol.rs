//! How the steps of a run proceed. It stays for the whole run, and no bit of a result depends on it.

use super::rules::Rules;
use super::techniques::Techniques;
use crate::dtype::Dtype;
use crate::optim::split::Masters;
use crate::request::choices::Strategy;

/// How the steps of a run proceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// Named set of techniques.
    pub strategy: Strategy,
    /// Techniques in force.
    pub techniques: Techniques,
    /// Permissions of the coordinator.
    pub rules: Rules,
    /// The next forward waits for all parameters, not per bucket (ZeRO-Offload).
    pub barrier: bool,
    /// Storage of master weights whose buckets the device steps, and of streamed weights if the placement says so.
    pub masters: Masters,
    /// Format of gradients and parameters on the link; fp32 when the device casts.
    pub link_dtype: Dtype,
}
