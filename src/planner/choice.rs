//! The planner's choice: whose optimizer stays on the device, what each layer keeps, and the tile of the loss.
//!
//! On a device with its own memory all three compete for it. Candidates are ordered from the plan that computes nothing
//! twice to the most frugal one; each gets as many resident buckets as still fit, and the fastest prediction wins. Weights
//! are streamed only where no other candidate fits.

use super::budget::{Rings, Workload};
use super::predict::{Prediction, Predictor};
use crate::bucket::layout::BucketLayout;
use crate::config::options::{ActivationsChoice, WeightsChoice};
use crate::device::DeviceKind;
use crate::device::footprint::MemoryClass;
use crate::error::Result;
use crate::model::activations::{ActivationPlan, LossTile};
use crate::model::policy::LayerPolicy;
use crate::model::tensors::TensorTable;

/// Logits of one tile on a device that shares the host's memory: columns at most, and bytes at most.
const SHARED_TILE_VOCAB_MAX: usize = 32_768;
const SHARED_TILE_BYTES_MAX: usize = 64 << 20;
/// Logits of one tile on a GPU: 2048 tokens of a vocabulary of 152 k. Several tiles of the vocabulary would cost a second product with the
/// output matrix, several tiles of rows add to its gradient once more each. It depends on no memory and on no number of GPUs, since the
/// tile decides about bits.
const TILE_BYTES: usize = 640 << 20;
/// A product with fewer rows would not fill a GPU.
const TILE_ROWS_MIN: usize = 1024;
/// Rows of a tile are a multiple of this many, so that every tile fills the product's tiles.
const TILE_ROWS_ALIGN: usize = 128;
/// Two policies meet at one of so many places: behind each layer of any model that is published. Of deeper ones, which the search for the
/// largest model tries, every second layer or fewer: what each costs grows with its depth, and so would their number.
const SPLITS_MAX: usize = 256;
/// One bucket in this many keeps its optimizer on a device that shares the host's memory, to exercise the path.
const SHARED_RESIDENT_ONE_IN: usize = 8;

/// How many tail buckets keep their optimizer on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Residency {
    /// This many.
    Exactly(usize),
    /// As many as fit.
    Largest,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Request {
    pub(crate) residency: Residency,
    pub activations: ActivationsChoice,
    pub weights: WeightsChoice,
    /// Tile of the loss, where a checkpoint decides.
    pub tile: Option<LossTile>,
}

/// A choice and what follows from it.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    /// How the flat order is cut, and which buckets are resident.
    pub layout: BucketLayout,
    pub(crate) policies: Vec<LayerPolicy>,
    pub tile: LossTile,
    /// The tile that it would be where memory is no matter.
    pub(crate) usual_tile: LossTile,
    /// What of the device's flat memory repeats.
    pub(crate) rings: Rings,
    pub memory: Vec<MemoryClass>,
    /// The step's time; none on the CPU device, whose rates nobody assumes.
    pub(crate) predicted: Option<Prediction>,
}

/// Chooses for a model cut as `layout` says; its resident buckets do not count. When nothing fits, the choice is the one that
/// lacks the fewest bytes: [`Workload::lacking`] tells.
///
/// # Errors
/// `Usage` when batch and sequence make no sense for the model.
pub(crate) fn choose(workload: &Workload, table: &TensorTable, layout: &BucketLayout, request: Request) -> Result<Choice> {
    let planner = Planner { workload, table, layout, request };
    match workload.machine.kind {
        DeviceKind::Cpu => planner.on_cpus(),
        DeviceKind::Gpu => planner.search(&Predictor::new(workload, table)?),
    }
}

/// A choice by what choices are compared by.
struct Scored {
    /// Bytes that it lacks.
    lacking: u64,
    step_s: f64,
    choice: Choice,
}

impl Scored {
    /// Whether it lacks less than `other`, or as little and takes less time.
    fn is_before(&self, other: &Scored) -> bool {
        self.lacking < other.lacking || self.lacking == other.lacking && self.step_s < other.step_s
    }
}

/// Where weights are to lie, where that saves memory.
#[derive(Clone, Copy, PartialEq)]
enum WeightPlace {
    /// In their flat places.
    Flat,
    /// Where they stream from: on the host, or over the ranks of each process.
    Streamed,
    /// Over the ranks of all processes.
    FullySharded,
}

/// What of the device's flat memory is to repeat or to lie elsewhere, where that saves memory.
#[derive(Clone, Copy)]
struct UseRings {
    grads: bool,
    weights: WeightPlace,
    sums_on_host: bool,
}

struct Planner<'a> {
    workload: &'a Workload<'a>,
    table: &'a TensorTable,
    layout: &'a BucketLayout,
    request: Request,
}

impl Planner<'_> {
    /// One memory and the same cores for both sides: there is nothing to weigh against each other.
    fn on_cpus(&self) -> Result<Choice> {
        let (shape, width) = (self.workload.shape, self.workload.dtype.bytes());
        let vocab = shape.vocab.min(SHARED_TILE_VOCAB_MAX);
        let chosen = LossTile { rows: self.tokens().min(SHARED_TILE_BYTES_MAX / (vocab * width)).max(1), vocab };
        let tile = self.request.tile.unwrap_or(chosen);
        let policies = self.mixes(false).remove(0);
        // The first is what is asked for, or that all stay.
        let use_rings = UseRings { grads: false, weights: self.weight_places()[0], sums_on_host: false };
        let layout = match self.request.residency {
            Residency::Exactly(resident) => self.resident(resident),
            Residency::Largest => self.resident((self.layout.count() / SHARED_RESIDENT_ONE_IN).min(self.most_resident(use_rings))),
        };
        let rings = self.rings(&layout, use_rings);
        let memory = self.workload.classes(&layout, rings, &self.workload.activations(&policies, tile)?);
        Ok(Choice { layout, policies, tile, usual_tile: tile, rings, memory, predicted: None })
    }

    /// The fastest candidate that fits, with weights that stay if one fits so; or, when none does, the one that lacks least. Whatever costs
    /// time comes before a smaller tile, which changes bits.
    fn search(&self, predictor: &Predictor) -> Result<Choice> {
        let weight_places = self.weight_places();
        // Sums that pass over the link with every share are the last resort.
        let sums: &[bool] = if self.workload.may_sum_on_host() { &[false, true] } else { &[false] };
        let places = || {
            sums.iter().flat_map(|&sums_on_host| weight_places.iter().map(move |&weights| UseRings { grads: false, weights, sums_on_host }))
        };
        let mut best: Option<Scored> = None;
        for (tile, place) in self.tiles().into_iter().flat_map(|tile| places().map(move |place| (tile, place))) {
            let found = self.search_with(tile, place, predictor)?;
            if best.as_ref().is_none_or(|best| found.lacking < best.lacking) {
                best = Some(found);
            }
            if best.as_ref().is_some_and(|best| best.lacking == 0) {
                break;
            }
        }
        Ok(best.expect("there is at least one tile").choice)
    }

    /// Where weights may lie, the cheapest in time first.
    fn weight_places(&self) -> &'static [WeightPlace] {
        use WeightPlace::{Flat, FullySharded, Streamed};
        let Workload { ranks, processes, .. } = *self.workload;
        match self.request.weights {
            // A rank of a process of its own would keep all that it carries: everything.
            WeightsChoice::Auto if processes > 1 && ranks == processes => &[Flat, FullySharded],
            WeightsChoice::Auto if processes > 1 => &[Flat, Streamed, FullySharded],
            WeightsChoice::Auto => &[Flat, Streamed],
            WeightsChoice::Replicated => &[Flat],
            WeightsChoice::FullySharded if processes > 1 => &[FullySharded],
            // Ranks of one process are all there are.
            WeightsChoice::Flow | WeightsChoice::Sharded | WeightsChoice::FullySharded => &[Streamed],
        }
    }

    /// The best candidate with this tile.
    fn search_with(&self, tile: LossTile, place: UseRings, predictor: &Predictor) -> Result<Scored> {
        let use_rings = |grads| UseRings { grads, ..place };
        let mut best: Option<Scored> = None;
        for policies in self.mixes(predictor.attends_long()) {
            let activations = self.workload.activations(&policies, tile)?;
            for use_rings in [false, true].map(use_rings) {
                let choice = self.candidate((&policies, &activations), tile, use_rings, predictor);
                let (device, host) = self.workload.lacking(&choice.memory);
                let step_s = choice.predicted.map_or(0.0, |predicted| predicted.mean_s());
                let found = Scored { lacking: device + host, step_s, choice };
                // The first of equals computes least twice.
                if best.as_ref().is_none_or(|best| found.is_before(best)) {
                    best = Some(found);
                }
            }
        }
        Ok(best.expect("there is at least one mix"))
    }

    /// With layers that keep what `policies` say, and so have such activations.
    fn candidate(
        &self,
        (policies, activations): (&[LayerPolicy], &ActivationPlan),
        tile: LossTile,
        use_rings: UseRings,
        predictor: &Predictor,
    ) -> Choice {
        let layout = match self.request.residency {
            Residency::Exactly(resident) => self.resident(resident),
            Residency::Largest => self.largest_residency(activations, use_rings),
        };
        let rings = self.rings(&layout, use_rings);
        let memory = self.workload.classes(&layout, rings, activations);
        let predicted = Some(predictor.predict(&layout, rings, policies, activations));
        Choice { layout, policies: policies.to_vec(), tile, usual_tile: self.tiles()[0], rings, memory, predicted }
    }

    fn rings(&self, layout: &BucketLayout, use_rings: UseRings) -> Rings {
        let streams = use_rings.weights != WeightPlace::Flat;
        let weights = streams.then(|| self.workload.weight_ring(layout, self.table)).flatten();
        Rings {
            grads: use_rings.grads.then(|| self.workload.grad_ring(layout, self.table)).flatten(),
            weights,
            fully_sharded: weights.is_some() && use_rings.weights == WeightPlace::FullySharded,
            sums_on_host: use_rings.sums_on_host && layout.offloaded() > 0,
        }
    }

    /// Bytes that the device and the host lack when `resident` buckets stay on the device.
    fn lacking(&self, resident: usize, use_rings: UseRings, activations: &ActivationPlan) -> (u64, u64) {
        let layout = self.resident(resident);
        self.workload.lacking(&self.workload.classes(&layout, self.rings(&layout, use_rings), activations))
    }

    /// As many resident buckets as the device holds. If host memory asks for more, the device will lack for them.
    fn largest_residency(&self, activations: &ActivationPlan, use_rings: UseRings) -> BucketLayout {
        let most = self.most_resident(use_rings);
        // With all of them resident there are no staging buffers either.
        if self.lacking(most, use_rings, activations).0 == 0 {
            return self.resident(most);
        }
        let fitting = partition_point(most, |resident| self.lacking(resident + 1, use_rings, activations).0 == 0);
        self.resident(fitting.max(self.least_residency(activations, use_rings)))
    }

    /// The fewest resident buckets that let the host hold the rest; all of them when it cannot hold one.
    fn least_residency(&self, activations: &ActivationPlan, use_rings: UseRings) -> usize {
        partition_point(self.layout.count(), |resident| self.lacking(resident, use_rings, activations).1 > 0)
    }

    /// All buckets, or, where weights are streamed, those that lie wholly beyond what is.
    fn most_resident(&self, use_rings: UseRings) -> usize {
        let from_host = self.rings(self.layout, use_rings).weights.filter(|_| self.workload.ranks == 1);
        let streamed = from_host.map_or(0, |ring| ring.ringed_elems);
        self.layout.count() - self.layout.overlapping(0..streamed).end
    }

    fn resident(&self, buckets: usize) -> BucketLayout {
        self.layout.with_resident(buckets)
    }

    /// Of a micro-batch, on one rank.
    fn tokens(&self) -> usize {
        self.workload.batch * self.workload.seq_length / self.workload.sequence_ranks
    }

    /// What layers may keep, cheapest in time first. The last layers, which backward needs first, are the first to compute
    /// cheap parts again, then the whole block; then the inputs of the first layers, which have longest to come back, wait on
    /// the host; and where attention is long, what it made as well.
    fn mixes(&self, attends_long: bool) -> Vec<Vec<LayerPolicy>> {
        use LayerPolicy::{Host, HostAttention, Keep, RecomputeBlock, RecomputeCheap};
        let layers = self.workload.shape.layers.len();
        if let Some(policy) = self.request.activations.policy() {
            return vec![vec![policy; layers]];
        }
        let split = |first, last| move |at: usize| [vec![first; at], vec![last; layers - at]].concat();
        let cheap = splits(layers).rev().map(split(Keep, RecomputeCheap));
        let block = splits(layers).rev().skip(1).map(split(RecomputeCheap, RecomputeBlock));
        let host = splits(layers).skip(1).map(split(Host, RecomputeBlock));
        let mixes = cheap.chain(block).chain(host);
        if !attends_long {
            return mixes.collect();
        }
        let attention = splits(layers).skip(1).map(split(HostAttention, RecomputeCheap));
        // Where host memory does not hold it of all layers.
        let both = splits(layers).skip(1).rev().skip(1).rev().map(split(Host, HostAttention));
        mixes.chain(attention).chain(both).collect()
    }

    /// Tiles of the loss: the usual one, and smaller ones for where nothing else fits.
    fn tiles(&self) -> Vec<LossTile> {
        if let Some(tile) = self.request.tile {
            return vec![tile];
        }
        let vocab = self.workload.shape.vocab;
        let rows = rows_within(self.tokens(), TILE_BYTES / (vocab * self.workload.dtype.bytes()));
        let halves = std::iter::successors(Some(rows), |&rows| (rows > TILE_ROWS_MIN).then(|| rows_within(self.tokens(), rows / 2)));
        halves.map(|rows| LossTile { rows, vocab }).collect()
    }
}

/// Behind how many of so many layers two policies may meet, ascending: none and all among them.
fn splits(layers: usize) -> impl DoubleEndedIterator<Item = usize> + ExactSizeIterator {
    let places = layers.min(SPLITS_MAX);
    (0..places + 1).map(move |place| place * layers / places)
}

/// Equal tiles of `tokens`, aligned, of at most `rows_max` rows; but never fewer than [`TILE_ROWS_MIN`].
fn rows_within(tokens: usize, rows_max: usize) -> usize {
    let fewest_tiles = tokens.div_ceil(rows_max.max(TILE_ROWS_MIN));
    let aligned = |tiles: usize| tokens.div_ceil(tiles).next_multiple_of(TILE_ROWS_ALIGN).min(tokens);
    // Rounding up may pass the limit by less than one alignment: then one tile more does.
    (fewest_tiles..).map(aligned).find(|&rows| rows <= rows_max.max(TILE_ROWS_MIN)).unwrap_or(tokens)
}

/// The first of `0..count` for which `holds` is false, or `count`; `holds` must not become true again.
fn partition_point(count: usize, holds: impl Fn(usize) -> bool) -> usize {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low.midpoint(high);
        if holds(middle) { low = middle + 1 } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn policies_meet_behind_every_layer_of_a_model_and_at_so_many_places_of_a_deeper_one() {
        assert!(splits(3).eq(0..=3) && splits(SPLITS_MAX).eq(0..=SPLITS_MAX));
        let deep: Vec<_> = splits(1000).collect();
        assert_eq!((deep.len(), deep[0], deep[SPLITS_MAX]), (SPLITS_MAX + 1, 0, 1000));
        assert!(deep.windows(2).all(|two| (1..=4).contains(&(two[1] - two[0]))), "{deep:?}");
    }
}
