//! A bucket's way through a step as data: which hops there are, where each is done, and which of them a bucket takes.
//!
//! README.md walks a bucket along it. A new hop is a row here, a copy or a kernel in `hops.rs`, and a phase of the coordinator
//! if it decides when the hop begins.

use crate::bucket::layout::Tier;
use crate::device::Stream;
use crate::planner::budget::PAGED_WINDOW;

/// Something that is begun for a bucket, and done later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Hop {
    /// The device computes the bucket's gradient.
    Backward,
    /// The gradient is copied to a host slot.
    GradsOut,
    /// The pool applies a gradient to the state, and writes new weights into a host slot.
    Optimize,
    /// The new weights are copied to the device.
    ParamsIn,
    /// The state comes to the device.
    PageIn,
    /// The device applies the gradient to the state, and writes new weights.
    StepOnDevice,
    /// The state goes back.
    PageOut,
    /// The device computes the output matrix's gradient, which is a tied embedding's but for the rows of the batch.
    HeadBackward,
    /// The gradient of these rows is copied to a parameter slot.
    RowsOut,
    /// The new weights of these rows are copied to the device, and put into their places there.
    RowsIn,
}

pub(super) struct Leg {
    /// The stream that does it; `None` is the optimizer's pool.
    pub stream: Option<Stream>,
    /// On its stream it waits for these hops, as far as the bucket takes them.
    pub after: &'static [Hop],
    /// Buckets that may be in it at once; they take turns. `None` is all.
    pub window: Option<usize>,
    /// A bucket may be in it twice at once; its slots tell the two apart.
    pub(crate) by_slot: bool,
    /// What is moved or done, where somebody waits for it.
    pub what: &'static str,
    /// What has happened when it begins, and what the bucket waits for then.
    pub begun: [&'static str; 2],
    /// What has happened when it is done, and what the bucket waits for then.
    pub done: [&'static str; 2],
}

const LEG: Leg = Leg { stream: None, after: &[], window: None, by_slot: false, what: "", begun: ["", ""], done: ["", ""] };

/// Every hop, in the order of [`Hop`].
const LEGS: [Leg; 10] = [
    Leg {
        stream: Some(Stream::Compute),
        what: "the gradient",
        begun: ["gradient enqueued: bucket", "waits for the device to compute its gradient"],
        done: ["gradient computed: bucket", "waits for a staging slot for its gradient"],
        ..LEG
    },
    Leg {
        stream: Some(Stream::D2h),
        after: &[Hop::Backward, Hop::HeadBackward],
        what: "the gradient's copy",
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
        what: "the parameters' copy",
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
        what: "the output matrix's gradient",
        begun: ["output matrix's gradient enqueued: bucket", "waits for the device to compute the output matrix's gradient"],
        done: ["output matrix's gradient computed: bucket", "waits for a staging slot for its gradient"],
        ..LEG
    },
    Leg {
        stream: Some(Stream::D2h),
        after: &[Hop::Backward],
        what: "the copy of its rows' gradient",
        begun: ["copy gradient of rows: bucket", "waits for the copy of its rows' gradient to the host"],
        done: ["gradient of rows arrived: bucket", "waits for the optimizer's workers"],
        ..LEG
    },
    Leg {
        stream: Some(Stream::H2d),
        by_slot: true,
        what: "the copy of its rows' parameters",
        begun: ["copy parameters of rows: bucket", "waits for the copy of its rows' parameters to the device"],
        done: ["parameters of rows copied: bucket", "nothing is pending"],
        ..LEG
    },
];

impl Hop {
    /// All hops, in the order of their numbers.
    pub(super) const ALL: [Self; LEGS.len()] = [
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
    ];

    pub(crate) fn leg(self) -> &'static Leg {
        &LEGS[self as usize]
    }
}

/// The hops of a bucket of `tier`, in order; those of one that leaves `early`. The coordinator leads an offloaded one from hop to hop, and
/// is told when each is done; of another it begins all that follow the verdict at once.
pub(super) fn route(tier: Tier, early: bool) -> &'static [Hop] {
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
    fn every_hop_has_a_row_and_what_it_waits_for_takes_turns_as_it_does() {
        assert!(Hop::ALL.iter().enumerate().all(|(row, hop)| *hop as usize == row && !hop.leg().begun[0].is_empty()));
        let mut waits = Hop::ALL.into_iter().flat_map(|hop| hop.leg().after.iter().map(move |after| (hop.leg(), after.leg())));
        assert!(waits.all(|(hop, after)| after.window == hop.window && after.stream != hop.stream));
    }

    /// What the coordinator is told of has words; what is only enqueued has none, and ends with no event.
    #[test]
    fn the_hops_of_a_route_are_told_of_or_enqueued() {
        for (tier, early) in [(Tier::Host, false), (Tier::Host, true), (Tier::Unified, false), (Tier::Device, false)] {
            for hop in route(tier, early) {
                let Leg { stream, what, done, .. } = hop.leg();
                let is_told = tier.is_offloaded() || *hop == Hop::Backward;
                assert_eq!((is_told, is_told && stream.is_some()), (!done[0].is_empty(), !what.is_empty()), "{hop:?} of {tier:?}");
            }
        }
    }
}
