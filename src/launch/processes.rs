//! Several processes, a rank each: the engine of this one, and what it does. Process 0 leads, the others follow.

use super::engine::{UseEngine, cpu_device, cpu_pool};
use super::share;
use crate::bucket::slices::Slices;
use crate::device::cpu::CpuDevice;
use crate::engine::hall::Hall;
use crate::engine::orders::RankEngine;
use crate::error::{Error, Result};
use crate::hardware::topology::Topology;
use crate::model::shape::ModelShape;
use crate::planner::plan::Plan;
use crate::ranks::Seat;
use crate::ranks::board::Board;
use crate::ranks::links::Links;
use std::sync::Arc;

/// The engine of this process's rank on CPUs, once all others have theirs.
///
/// # Errors
/// `Resource` when memory or threads cannot be had; `Rank` when another process has ended.
fn join(plan: &Plan, shape: &ModelShape, topology: &Topology, links: &Links) -> Result<(RankEngine<CpuDevice>, Seat)> {
    let slices = Slices::new(plan.layout.clone(), links.process(), plan.ranks);
    let parcel_bytes = slices.longest() * plan.dtype.bytes();
    if u32::try_from(parcel_bytes).is_err() {
        return Err(Error::usage(format!("--bucket-mib: a slice of {parcel_bytes} bytes is too long for one parcel; use smaller buckets")));
    }
    let (board, lanes) = links.attach(|abroad| Board::linked(plan.board_sizes(), abroad), parcel_bytes)?;
    let seat = Seat { board, rank: links.process() };
    let join = || -> Result<_> {
        // All of the machine is this rank's, and so is what an adversary draws.
        let adversary = plan.adversary.map(|seed| seed.wrapping_add(seat.rank as u64));
        let share = share::whole(&Plan { ranks: 1, adversary, ..plan.clone() }, topology);
        let bell = seat.board.bell(seat.rank);
        let (dev, pool) = (cpu_device(&share.plan, &bell)?, cpu_pool(&share, &bell)?);
        let own = Plan { ranks: plan.ranks, ..share.plan };
        RankEngine::join((own, shape.clone()), (dev, pool), &seat, &Arc::new(Hall::new(1)), Some(lanes))
    };
    let engine = join().map_err(|error| seat.blame(error))?;
    Ok((engine, seat))
}

/// What `user` makes of the engine of process 0, which leads all others.
///
/// # Errors
/// As [`join`]; those of `user`.
pub(crate) fn lead<U: UseEngine>(plan: &Plan, shape: &ModelShape, topology: &Topology, links: &Links, user: U) -> Result<U::Output> {
    user.run(join(plan, shape, topology, links)?.0)
}

/// Does what process 0 says, until the run is over or a process has ended: returns which. `save` saves this process's slices.
pub(crate) fn follow(
    plan: &Plan,
    shape: &ModelShape,
    topology: &Topology,
    links: &Links,
    save: impl FnMut(&mut RankEngine<CpuDevice>, [u64; 2]) -> Result<Vec<u32>>,
) -> Error {
    let followed = join(plan, shape, topology, links)
        .and_then(|(mut engine, seat)| engine.follow_and_save(|| Ok(()), save).map_err(|error| seat.blame(error)));
    followed.err().unwrap_or_else(|| Error::resource("follow process 0", "it gave no more orders"))
}
