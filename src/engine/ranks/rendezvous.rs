//! Rendezvous of ranks, where they exchange memory addresses and events: before step 0, and after a new plan has moved their memory. It is
//! not used within a step.

use super::shards::Shards;
use crate::bucket::slices::Slices;
use crate::device::{DeviceSlice, EventId, ProductAlgorithm};
use crate::engine::save::frozen_state::FrozenState;
use crate::engine::watch::driver_state::DriverState;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::sequence::SharedActivations;
use crate::planner::plan::Plan;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Memory of a rank that its peers read.
#[derive(Clone)]
pub(crate) struct RankMemory {
    /// Flat gradients and weights.
    pub(in crate::engine) grads: DeviceSlice,
    pub(in crate::engine) weights: DeviceSlice,
    /// Weights without a permanent flat location.
    pub(in crate::engine) shards: Shards,
    /// Activations, if ranks share sequences.
    pub(in crate::engine) activations: Option<SharedActivations>,
}

impl RankMemory {
    /// The memory of `model`, without shards.
    pub(in crate::engine) fn of(model: &Model) -> Self {
        Self { grads: model.grads, weights: model.weights, shards: Shards::default(), activations: model.shared_activations() }
    }

    /// Location of the weights of the slice of `bucket` that `owner` owns. This rank holds its own slices, and those of inter-node peers
    /// that it relays.
    pub(in crate::engine) fn weights_of(&self, slices: &Slices, owner: usize, bucket: usize) -> DeviceSlice {
        let flat = slices.of(owner, bucket);
        self.shards.of(slices, owner, bucket).unwrap_or_else(|| self.weights.slice(flat.start, flat.len()))
    }

    /// Location of the part of this slice that lies within `flat`.
    pub(in crate::engine) fn weights_within(&self, slices: &Slices, owner: usize, bucket: usize, flat: &Range<usize>) -> DeviceSlice {
        let (whole, part) = (slices.of(owner, bucket), slices.within(owner, bucket, flat));
        self.weights_of(slices, owner, bucket).slice(part.start - whole.start, part.len())
    }
}

/// Information that a rank publishes to its peers.
#[derive(Clone)]
pub(in crate::engine) struct RankHandles<C> {
    pub(in crate::engine) device: C,
    pub(in crate::engine) memory: RankMemory,
    /// By piece: the gradient is written.
    pub(in crate::engine) written: Vec<EventId>,
    /// By piece: the peers' gradients are pulled.
    pub(in crate::engine) pulled: Vec<EventId>,
    /// By bucket: this rank's slice of the weights is written.
    pub(in crate::engine) stepped: Vec<EventId>,
    /// By bucket: the slices of its inter-node peers have arrived, if there are other processes.
    pub(in crate::engine) relayed: Vec<EventId>,
    /// The rank has pulled the weights that it fetched last.
    pub(in crate::engine) fetched: EventId,
    /// The activations for its sequence group are written; two events that alternate.
    pub(in crate::engine) handed: [EventId; 2],
    pub(in crate::engine) driver: Arc<DriverState>,
    /// The algorithms of its matrix products so far.
    pub(in crate::engine) products: Vec<ProductAlgorithm>,
}

/// The rendezvous of the ranks of one process. For a rank of another process, or a mirrored rank, the entry of the local rank with the same
/// index is used.
pub(crate) struct Rendezvous<C> {
    handles: Vec<Mutex<Option<RankHandles<C>>>>,
    /// The plan that all ranks change to.
    plan: Mutex<Option<Plan>>,
    /// The first rank that had no memory for this plan, and why.
    refusal: Mutex<Option<(usize, String)>>,
    /// Parts of the state of a save, of ranks other than rank 0.
    frozen: Mutex<Vec<FrozenState>>,
}

/// Locks an entry. Poisoning is ignored: a rank that panicked has already published its failure in the progress counters.
fn open<T>(place: &Mutex<T>) -> MutexGuard<'_, T> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<C> Rendezvous<C> {
    /// A rendezvous for `ranks` ranks.
    pub(crate) fn new(ranks: usize) -> Self {
        let handles = (0..ranks).map(|_| Mutex::default()).collect();
        Self { handles, plan: Mutex::default(), refusal: Mutex::default(), frozen: Mutex::default() }
    }

    fn place(&self, rank: usize) -> &Mutex<Option<RankHandles<C>>> {
        &self.handles[rank % self.handles.len()]
    }

    pub(in crate::engine) fn enter(&self, rank: usize, handles: RankHandles<C>) {
        *open(self.place(rank)) = Some(handles);
    }

    pub(in crate::engine) fn leave(&self, rank: usize) {
        *open(self.place(rank)) = None;
    }

    /// Whether all ranks are present.
    pub(in crate::engine) fn is_full(&self) -> bool {
        self.handles.iter().all(|place| open(place).is_some())
    }

    /// On rank 0, publishes the next plan and clears an earlier refusal.
    pub(in crate::engine) fn announce(&self, plan: Plan) {
        (*open(&self.plan), *open(&self.refusal)) = (Some(plan), None);
    }

    /// The plan that was announced last.
    pub(in crate::engine) fn announced(&self) -> Option<Plan> {
        open(&self.plan).clone()
    }

    /// Adds a rank's part of the state of a save.
    pub(in crate::engine) fn add_frozen(&self, state: FrozenState) {
        open(&self.frozen).push(state);
    }

    /// On rank 0, takes the parts of the state that all other ranks have added.
    pub(in crate::engine) fn take_frozen(&self) -> Vec<FrozenState> {
        std::mem::take(&mut open(&self.frozen))
    }

    pub(in crate::engine) fn refuse(&self, rank: usize, why: String) {
        open(&self.refusal).get_or_insert((rank, why));
    }

    pub(in crate::engine) fn refusal(&self) -> Option<(usize, String)> {
        open(&self.refusal).clone()
    }
}

impl<C: Clone> Rendezvous<C> {
    /// The entries of `ranks` ranks, which are all present.
    pub(in crate::engine) fn handles(&self, ranks: usize) -> Vec<RankHandles<C>> {
        (0..ranks).filter_map(|rank| open(self.place(rank)).clone()).collect()
    }
}

/// Checks that this rank's matrix products use the same algorithms as rank 0's, so that both compute the same bits.
///
/// # Errors
/// `Unsupported` that names a product, both algorithms and a remedy.
pub(in crate::engine) fn check_same_bits(own: &[ProductAlgorithm], of_first: &[ProductAlgorithm]) -> Result<()> {
    let differ = own.iter().zip(of_first).find(|(own, first)| own != first);
    let remedy = "use GPUs of one model under one driver, or --gpus 1";
    match differ {
        Some((own, first)) => Err(Error::Unsupported(format!(
            "results would differ from rank 0's: rank 0 computes a matrix product by {first}, this rank by {own}; {remedy}"
        ))),
        None if own.len() == of_first.len() => Ok(()),
        None => {
            let [own, first] = [own, of_first].map(<[_]>::len);
            Err(Error::Unsupported(format!(
                "results would differ from rank 0's: rank 0 prepared {first} matrix products, this rank {own}; {remedy}"
            )))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{MatmulLayout, MatmulShape, ProductWay};
    use crate::dtype::Dtype;

    #[test]
    fn ranks_that_would_compute_other_bits_are_refused_by_product() {
        let shape = MatmulShape { layout: MatmulLayout::Tn, m: 8, n: 16, k: 32 };
        let by = |algorithm, split_k| ProductAlgorithm {
            shape,
            experts: None,
            dtype: Dtype::Bfloat16,
            algorithm,
            split_k,
            passed_over: 0,
            way: ProductWay::Whole,
        };
        check_same_bits(&[], &[]).unwrap();
        check_same_bits(&[by(66, 1), by(71, 4)], &[by(66, 1), by(71, 4)]).unwrap();
        let refused = |own: &[_], first: &[_]| check_same_bits(own, first).unwrap_err().to_string();
        let other = refused(&[by(66, 1), by(71, 2)], &[by(66, 1), by(71, 4)]);
        for part in ["algorithm 71 in 4 parts", "algorithm 71 in 2 parts", "8 x 16 x 32", "--gpus 1"] {
            assert!(other.contains(part), "{other}");
        }
        assert!(refused(&[by(66, 1)], &[]).contains("rank 0 prepared 0 matrix products, this rank 1"));
        let of_experts = ProductAlgorithm { experts: Some(4), ..by(66, 1) };
        let other = refused(&[of_experts], &[ProductAlgorithm { algorithm: 72, ..of_experts }]);
        assert!(other.contains("by algorithm 72 for 8 x 16 x 32 (Tn) on bfloat16 of 4 experts, this rank by algorithm 66"), "{other}");
    }

    #[test]
    fn the_first_refusal_is_reported_until_another_plan_is_announced() {
        let rendezvous: Rendezvous<()> = Rendezvous::new(2);
        assert!(rendezvous.refusal().is_none() && !rendezvous.is_full());
        rendezvous.refuse(1, "no memory".into());
        rendezvous.refuse(0, "none here either".into());
        assert_eq!(rendezvous.refusal(), Some((1, "no memory".into())));
        let settings = crate::config::settings::Settings::demo();
        let machine = crate::planner::machine::Machine::cpu(1);
        rendezvous.announce(Plan::new(&settings.request(&crate::model::shape::ModelShape::demo()), &machine, false).unwrap());
        assert!(rendezvous.refusal().is_none() && rendezvous.announced().is_some());
    }
}
