//! Norms and factors of experts beside an MLP, as in Gemma 4.

use super::{Init, Module, Role, TableBuilder};

/// Names in files.
const OF_CHANNELS: [(Role, &str); 4] = [
    (Role::RouterScale, "router.scale"),
    (Role::ExpertsNorm, "pre_feedforward_layernorm_2.weight"),
    (Role::PostExpertsNorm, "post_feedforward_layernorm_2.weight"),
    (Role::PostSharedNorm, "post_feedforward_layernorm_1.weight"),
];
const EXPERT_SCALE: &str = "router.per_expert_scale";

impl TableBuilder<'_> {
    pub(super) fn moe_norms(&mut self, module: Module, experts: usize, at: impl Fn(&str) -> String) {
        self.whole(module, Role::ExpertScale, vec![experts], Init::Ones, at(EXPERT_SCALE));
        for (role, name) in OF_CHANNELS {
            self.whole(module, role, vec![self.shape.channels], Init::Ones, at(name));
        }
    }
}
