//! The techniques of a run.

use crate::request::Request;
use crate::request::choices::{HostMemoryKind, Strategy, Technique};
use clap::ValueEnum;

/// The techniques of a run: those that are compiled in, part of the strategy, and not turned off.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Techniques {
    /// Speculation-then-validation.
    pub stv: bool,
    /// No speculation while clips are frequent.
    pub adaptive: bool,
    /// Writes known updates between two backward passes.
    pub(crate) early_commit: bool,
    /// Earliest deadline first.
    pub(crate) deadline_order: bool,
    /// Resident tail buckets.
    pub repartition: bool,
    /// Casts on the device with fp32 on the link, if the settings request it.
    pub(crate) superchip_cast: bool,
    /// Vector CPU Adam.
    pub(crate) grace_adam: bool,
    /// Core affinity and partitions.
    pub(crate) mpam: bool,
    /// Streams weights layer by layer, if the model does not fit otherwise or the settings request it.
    pub weight_flow: bool,
}

impl Techniques {
    pub(super) fn new(request: &Request) -> Self {
        let on = |compiled: bool, technique| compiled && !request.wanted.without.contains(&technique);
        let superoffload = request.strategy == Strategy::Superoffload;
        // Buckets that the device steps wait for the verdict.
        let stv = superoffload && request.site.memory == HostMemoryKind::Pinned && on(cfg!(feature = "stv"), Technique::Stv);
        Self {
            stv,
            adaptive: stv && on(true, Technique::Adaptive),
            early_commit: stv && on(true, Technique::EarlyCommit),
            deadline_order: superoffload && on(cfg!(feature = "deadline-order"), Technique::DeadlineOrder),
            repartition: superoffload && on(cfg!(feature = "repartition"), Technique::Repartition),
            superchip_cast: on(cfg!(feature = "superchip-cast"), Technique::SuperchipCast),
            grace_adam: on(cfg!(feature = "grace-adam"), Technique::GraceAdam),
            mpam: on(cfg!(feature = "mpam"), Technique::Mpam),
            weight_flow: on(cfg!(feature = "weight-flow"), Technique::WeightFlow),
        }
    }

    fn all(self) -> [(Technique, bool); 9] {
        [
            (Technique::Stv, self.stv),
            (Technique::Adaptive, self.adaptive),
            (Technique::EarlyCommit, self.early_commit),
            (Technique::DeadlineOrder, self.deadline_order),
            (Technique::Repartition, self.repartition),
            (Technique::SuperchipCast, self.superchip_cast),
            (Technique::GraceAdam, self.grace_adam),
            (Technique::Mpam, self.mpam),
            (Technique::WeightFlow, self.weight_flow),
        ]
    }

    /// The techniques that are not in force.
    pub(crate) fn off(self) -> Vec<Technique> {
        self.all().into_iter().filter(|(_, on)| !on).map(|(technique, _)| technique).collect()
    }

    pub(super) fn names(self) -> String {
        let on = self.all().into_iter().filter(|(_, on)| *on);
        let names = on.filter_map(|(technique, _)| Some(technique.to_possible_value()?.get_name().to_string()));
        let names: Vec<_> = names.collect();
        if names.is_empty() { "none".into() } else { names.join(", ") }
    }
}
