//! Where ranks come to know each other: before step 0, and again where a plan has moved their memory. Nobody comes here within a step.

use super::shards::Shards;
use super::vitals::Vitals;
use crate::bucket::slices::Slices;
use crate::device::{DeviceSlice, EventId, ProductAlgorithm};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::sequence::SharedActivations;
use crate::planner::plan::Plan;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Where a rank's memory lies that others read.
#[derive(Clone)]
pub(crate) struct RankMemory {
    /// Its flat gradients and weights.
    pub(super) grads: DeviceSlice,
    pub(super) weights: DeviceSlice,
    /// Weights that have no flat place for good.
    pub(super) shards: Shards,
    /// Where ranks share sequences.
    pub(super) activations: Option<SharedActivations>,
}

impl RankMemory {
    /// That of `model`, without shards.
    pub(super) fn of(model: &Model) -> Self {
        Self { grads: model.grads, weights: model.weights, shards: Shards::default(), activations: model.shared_activations() }
    }

    /// Where the weights lie of the slice of `bucket` that `owner` owns: the rank whose memory this is, or one that it carries them for.
    pub(super) fn weights_of(&self, slices: &Slices, owner: usize, bucket: usize) -> DeviceSlice {
        let flat = slices.of(owner, bucket);
        self.shards.of(slices, owner, bucket).unwrap_or_else(|| self.weights.slice(flat.start, flat.len()))
    }

    /// The same of what of it lies within `flat`.
    pub(super) fn weights_within(&self, slices: &Slices, owner: usize, bucket: usize, flat: &Range<usize>) -> DeviceSlice {
        let (whole, part) = (slices.of(owner, bucket), slices.within(owner, bucket, flat));
        self.weights_of(slices, owner, bucket).slice(part.start - whole.start, part.len())
    }
}

/// What a rank tells the others of itself.
#[derive(Clone)]
pub(super) struct Introduction<C> {
    pub(super) card: C,
    pub(super) memory: RankMemory,
    /// By bucket: its gradient is written.
    pub(super) written: Vec<EventId>,
    /// By bucket: the gradients of others are pulled.
    pub(super) pulled: Vec<EventId>,
    /// By bucket: its own slice of the weights is written.
    pub(super) stepped: Vec<EventId>,
    /// By bucket: its namesakes' slices of the weights have come to it, where there are other processes.
    pub(super) carried: Vec<EventId>,
    /// It has pulled what it fetched last.
    pub(super) fetched: EventId,
    /// What it hands over is written; by turns.
    pub(super) handed: [EventId; 2],
    pub(super) vitals: Arc<Vitals>,
    /// The algorithms of its products so far.
    pub(super) products: Vec<ProductAlgorithm>,
}

/// What lies there, by rank of this process. Of a rank of another process, or a mirror image, there is what its namesake here tells.
pub(crate) struct Hall<C> {
    introductions: Vec<Mutex<Option<Introduction<C>>>>,
    /// The plan that all go over to.
    plan: Mutex<Option<Plan>>,
    /// Whoever found no memory for it first, and why.
    refusal: Mutex<Option<(usize, String)>>,
}

/// A rank that panicked has said so on the board, which all look at.
fn open<T>(place: &Mutex<T>) -> MutexGuard<'_, T> {
    place.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<C> Hall<C> {
    /// A hall for so many ranks.
    pub(crate) fn new(ranks: usize) -> Self {
        Self { introductions: (0..ranks).map(|_| Mutex::default()).collect(), plan: Mutex::default(), refusal: Mutex::default() }
    }

    fn place(&self, rank: usize) -> &Mutex<Option<Introduction<C>>> {
        &self.introductions[rank % self.introductions.len()]
    }

    pub(super) fn enter(&self, rank: usize, introduction: Introduction<C>) {
        *open(self.place(rank)) = Some(introduction);
    }

    pub(super) fn leave(&self, rank: usize) {
        *open(self.place(rank)) = None;
    }

    /// Whether all ranks are there.
    pub(super) fn is_full(&self) -> bool {
        self.introductions.iter().all(|place| open(place).is_some())
    }

    /// Rank 0 says what comes next; nobody has refused it yet.
    pub(super) fn announce(&self, plan: Plan) {
        (*open(&self.plan), *open(&self.refusal)) = (Some(plan), None);
    }

    /// What was announced last.
    pub(super) fn announced(&self) -> Option<Plan> {
        open(&self.plan).clone()
    }

    pub(super) fn refuse(&self, rank: usize, why: String) {
        open(&self.refusal).get_or_insert((rank, why));
    }

    pub(super) fn refusal(&self) -> Option<(usize, String)> {
        open(&self.refusal).clone()
    }
}

impl<C: Clone> Hall<C> {
    /// Those of `ranks`, who are all there.
    pub(super) fn introductions(&self, ranks: usize) -> Vec<Introduction<C>> {
        (0..ranks).filter_map(|rank| open(self.place(rank)).clone()).collect()
    }
}

/// Whether this rank, which multiplies matrices by the algorithms `own`, computes the bits of rank 0.
///
/// # Errors
/// `Unsupported` that names a product, both algorithms and a remedy.
pub(super) fn check_same_bits(own: &[ProductAlgorithm], of_first: &[ProductAlgorithm]) -> Result<()> {
    let differ = own.iter().zip(of_first).find(|(own, first)| own != first);
    let remedy = "use GPUs of one model under one driver, or --gpus 1";
    match differ {
        Some((own, first)) => {
            Err(Error::Unsupported(format!("other bits than rank 0's: its products are by {first}, here by {own}; {remedy}")))
        }
        None if own.len() == of_first.len() => Ok(()),
        None => {
            let [own, first] = [own, of_first].map(<[_]>::len);
            Err(Error::Unsupported(format!("other bits than rank 0's: it prepared {first} products, this one {own}; {remedy}")))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::{MatmulLayout, MatmulShape};
    use crate::dtype::Dtype;

    #[test]
    fn ranks_that_would_compute_other_bits_are_refused_by_product() {
        let shape = MatmulShape { layout: MatmulLayout::Tn, m: 8, n: 16, k: 32 };
        let by = |algorithm, split_k| ProductAlgorithm { shape, experts: None, dtype: Dtype::Bfloat16, algorithm, split_k, passed_over: 0 };
        check_same_bits(&[], &[]).unwrap();
        check_same_bits(&[by(66, 1), by(71, 4)], &[by(66, 1), by(71, 4)]).unwrap();
        let refused = |own: &[_], first: &[_]| check_same_bits(own, first).unwrap_err().to_string();
        let other = refused(&[by(66, 1), by(71, 2)], &[by(66, 1), by(71, 4)]);
        for part in ["algorithm 71 in 4 parts", "algorithm 71 in 2 parts", "8 x 16 x 32", "--gpus 1"] {
            assert!(other.contains(part), "{other}");
        }
        assert!(refused(&[by(66, 1)], &[]).contains("it prepared 0 products, this one 1"));
        let of_experts = ProductAlgorithm { experts: Some(4), ..by(66, 1) };
        let other = refused(&[of_experts], &[ProductAlgorithm { algorithm: 72, ..of_experts }]);
        assert!(other.contains("by algorithm 72 for 8 x 16 x 32 (Tn) on bfloat16 of 4 experts, here by algorithm 66"), "{other}");
    }

    #[test]
    fn the_first_refusal_is_told_until_another_plan_is_announced() {
        let hall: Hall<()> = Hall::new(2);
        assert!(hall.refusal().is_none() && !hall.is_full());
        hall.refuse(1, "no memory".into());
        hall.refuse(0, "none here either".into());
        assert_eq!(hall.refusal(), Some((1, "no memory".into())));
        let settings = crate::config::settings::Settings::demo();
        let machine = crate::planner::machine::Machine::cpu(1);
        hall.announce(Plan::new(&settings, &crate::model::shape::ModelShape::demo(), &machine, false).unwrap());
        assert!(hall.refusal().is_none() && hall.announced().is_some());
    }
}
