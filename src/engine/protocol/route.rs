//! A bucket's path through a step as data: the hops, the stream of each, and the hops of each tier.
//!
//! README.md follows a bucket along its path. A new hop is a row here, a copy or kernel in `hops.rs`, and a phase of the coordinator if the
//! coordinator decides when it starts.

use crate::bucket::layout::Tier;
use crate::device::Stream;
use crate::planner::budget::PAGED_WINDOW;

/// An asynchronous operation on a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Hop {
    /// The device computes the bucket's gradient.
    Backward,
    /// The gradient is copied to a host slot.
    GradsOut,
    /// The pool applies a gradient to the state, and writes new weights into a host slot.
    Optimize,
    /// The new weights are copied to the device.
    ParamsIn,
    /// The state is moved to the device.
    PageIn,
    /// The device applies the gradient to the state, and writes new weights.
    StepOnDevice,
    /// The state is moved back to the host.
    PageOut,
    /// The device computes the output matrix's gradient, which is the gradient of a tied embedding except for the rows of the batch.
    HeadBackward,
    /// The gradient of these rows is copied to a parameter slot.
    RowsOut,
    /// The new weights of these rows are copied to the device and scattered to their rows.
    RowsIn,
    /// A save reads the state, which is not written meanwhile.
    Save,
    /// A save reads a copy of the state.
    SaveCopy,
}

pub(in crate::engine) struct Leg {
    /// The stream of the hop; `None` for the optimizer's pool and for saves.
    pub stream: Option<Stream>,
    /// Hops that this hop waits for on its stream, if the bucket takes them.
    pub after: &'static [Hop],
    /// Number of buckets that may be in the hop at once, in turn; `None` means all.
    pub window: Option<usize>,
    /// Whether a bucket may be in the hop twice at once; its two slots then distinguish the two passes.
    pub(crate) by_slot: bool,
    /// Description of the data, for hops that the coordinator waits for.
    pub noun: &'static str,
    /// Description of the start of the hop, and of the wait that follows.
    pub begun: [&'static str; 2],
    /// Description of the end of the hop, and of the wait that follows.
    pub done: [&'static str; 2],
}

const LEG: Leg = Leg { stream: None, after: &[], window: None, by_slot: false, noun: "", begun: ["", ""], done: ["", ""] };

/// Every hop, in the order of [`Hop`].
const LEGS: [Leg; 12] = [
    Leg {
        stream: Some(Stream::Compute),
        noun: "the gradient",
        begun: ["gradient enqueued: bucket", "waits for the device to compute its gradient"],
        done: ["gradient computed: bucket", "waits for a staging slot for its gradient"],
        ..LEG
    },
    Leg {
        stream: Some(Stream::D2h),
        after: &[Hop::Backward, Hop::HeadBackward],
        noun: "the gradient's copy",
        begun: ["copy gradient: bucket", "waits for its gradient's copy to the host"],
        done: ["gradient arrived: bucket", "waits for the optimizer's workers, or for the verdict"],
        ..LEG
    },
    Leg {
        begun: ["give the workers bucket", "is with the optimizer's workers"],
        done: ["workers done: bucket", "waits for the verdict, or is done"],
        ..LEG
    },
    Leg {
        stream: Some(Stream::H2d),
        by_slot: true,
        noun: "the parameters' copy",
        begun: ["copy parameters: bucket", "waits for its parameters' copy to the device"],
        done: ["parameters copied: bucket", "nothing is pending"],
        ..LEG
    },
    Leg {
        stream: Some(Stream::H2d),
        after: &[Hop::PageOut],
        window: Some(PAGED_WINDOW),
        begun: ["page in: bucket", "waits for its state to come to the device"],
        ..LEG
    },
    Leg {
        stream: Some(Stream::Compute),
        after: &[Hop::PageIn],
        window: Some(PAGED_WINDOW),
        begun: ["step on the device: bucket", "is stepped by the device"],
        ..LEG
    },
    Leg {
        stream: Some(Stream::D2h),
        after: &[Hop::StepOnDevice],
        window: Some(PAGED_WINDOW),
        begun: ["page out: bucket", "is stepped by the device"],
        ..LEG
    },
    Leg {
        stream: Some(Stream::Compute),
        noun: "the output matrix's gradient",
        begun: ["output matrix's gradient enqueued: bucket", "waits for the device to compute the output matrix's gradient"],
        done: ["output matrix's gradient computed: bucket", "waits for a staging slot for its gradient"],
        ..LEG
    },
    Leg {
        stream: Some(Stream::D2h),
        after: &[Hop::Backward],
        noun: "the copy of its rows' gradient",
        begun: ["copy gradient of rows: bucket", "waits for the copy of its rows' gradient to the host"],
        done: ["gradient of rows arrived: bucket", "waits for the optimizer's workers"],
        ..LEG
    },
    Leg {
        stream: Some(Stream::H2d),
        by_slot: true,
        noun: "the copy of its rows' parameters",
        begun: ["copy parameters of rows: bucket", "waits for the copy of its rows' parameters to the device"],
        done: ["parameters of rows copied: bucket", "nothing is pending"],
        ..LEG
    },
    Leg {
        begun: ["hold for the save: bucket", "keeps its state until it is saved"],
        done: ["held no longer: bucket", "nothing is pending"],
        ..LEG
    },
    Leg {
        begun: ["save the copy of bucket", "is written to the disk from a copy"],
        done: ["copy saved: bucket", "nothing is pending"],
        ..LEG
    },
];

impl Hop {
    /// All hops, in the order of their numbers.
    pub(in crate::engine) const ALL: [Self; LEGS.len()] = [
        Self::Backward,
        Self::GradsOut,
        Self::Optimize,
        Self::ParamsIn,
        Self::PageIn,
        Self::StepOnDevice,
        Self::PageOut,
        Self::HeadBackward,
        Self::RowsOut,
        Self::RowsIn,
        Self::Save,
        Self::SaveCopy,
    ];

    pub(crate) fn leg(self) -> &'static Leg {
        &LEGS[self as usize]
    }
}

/// The hops of a bucket of `tier`, in order; with `early`, of one that leaves early. For an offloaded bucket the coordinator starts each
/// hop and receives its completion. For other buckets it starts all hops after the verdict at once.
pub(in crate::engine) fn route(tier: Tier, early: bool) -> &'static [Hop] {
    match tier {
        Tier::Host if early => {
            &[Hop::HeadBackward, Hop::GradsOut, Hop::Optimize, Hop::ParamsIn, Hop::Backward, Hop::RowsOut, Hop::Optimize, Hop::RowsIn]
        }
        Tier::Host => &[Hop::Backward, Hop::GradsOut, Hop::Optimize, Hop::ParamsIn],
        Tier::Unified => &[Hop::Backward, Hop::PageIn, Hop::StepOnDevice, Hop::PageOut],
        Tier::Device => &[Hop::Backward, Hop::StepOnDevice],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_hop_has_a_row_and_its_predecessors_alternate_alike() {
        assert!(Hop::ALL.iter().enumerate().all(|(row, hop)| *hop as usize == row && !hop.leg().begun[0].is_empty()));
        let mut waits = Hop::ALL.into_iter().flat_map(|hop| hop.leg().after.iter().map(move |after| (hop.leg(), after.leg())));
        assert!(waits.all(|(hop, after)| after.window == hop.window && after.stream != hop.stream));
    }

    /// Hops that are reported to the coordinator have descriptions; other hops have none and end without an event.
    #[test]
    fn the_hops_of_a_route_are_reported_or_enqueued() {
        for (tier, early) in [(Tier::Host, false), (Tier::Host, true), (Tier::Unified, false), (Tier::Device, false)] {
            for hop in route(tier, early) {
                let Leg { stream, noun, done, .. } = hop.leg();
                let is_recorded = tier.is_offloaded() || *hop == Hop::Backward;
                assert_eq!((is_recorded, is_recorded && stream.is_some()), (!done[0].is_empty(), !noun.is_empty()), "{hop:?} of {tier:?}");
            }
        }
    }
}
