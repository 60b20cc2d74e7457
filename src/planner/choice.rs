//! The planner's choice: which buckets keep their optimizer state on the device, what each layer keeps for its backward pass, and the tile
//! of the loss.
//!
//! On a device with its own memory, all three compete for it. Candidates are ordered from no recomputation to the least memory. Each
//! candidate gets as many resident buckets as fit, and the fastest prediction wins. Weights are streamed only if no other candidate fits.

use super::budget::{Rings, Workload};
use super::predict::{Prediction, Predictor};
use super::protocol::Protocol;
use super::site::Site;
use crate::bucket::layout::BucketLayout;
use crate::device::DeviceKind;
use crate::device::footprint::MemoryClass;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::model::activations::{ActivationPlan, LossTile};
use crate::model::policy::LayerPolicy;
use crate::model::tensors::TensorTable;
use crate::optim::split::Masters;
use crate::request::choices::{ActivationsChoice, WeightsChoice};

/// Limits of a tile of logits on a device that shares the host's memory: columns and bytes.
const SHARED_TILE_VOCAB_MAX: usize = 32_768;
const SHARED_TILE_BYTES_MAX: usize = 64 << 20;
/// Bytes of a tile of logits on a GPU: 2048 tokens of a vocabulary of 152 k. Tiles over the vocabulary would need a second product with the
/// output matrix, and each further tile of rows adds to its gradient once more. The size depends neither on memory nor on the number of
/// GPUs, because the tile affects bits.
const TILE_BYTES: usize = 640 << 20;
/// Minimum rows of a tile. A product with fewer rows does not fill a GPU.
const TILE_ROWS_MIN: usize = 1024;
/// Alignment of a tile's rows, so that every tile fills the tiles of the matrix product.
const TILE_ROWS_ALIGN: usize = 128;
/// Largest depth at which the policy may change between any two layers. It exceeds the depth of every published model.
const SPLITS_MAX: usize = 256;
/// Positions at which the policy may change in deeper models, which only the search for the largest model tries. The cost of a candidate
/// grows with depth, and most of these models do not fit, so that all candidates are tried.
const SPLITS_DEEP: usize = 32;
/// On a device that shares the host's memory, one bucket in this many is resident, to exercise the path.
const SHARED_RESIDENT_ONE_IN: usize = 8;

/// Number of tail buckets with a resident optimizer state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Residency {
    /// Exactly this many buckets.
    Exactly(usize),
    /// As many buckets as fit.
    Largest,
}

/// The choices that a request leaves to the planner.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Permitted {
    pub(crate) residency: Residency,
    pub activations: ActivationsChoice,
    pub weights: WeightsChoice,
    /// Tile of the loss that a checkpoint prescribes.
    pub tile: Option<LossTile>,
}

/// The planner's choice and its consequences.
#[derive(Clone, Debug)]
pub(crate) struct Choice {
    /// Cut of the flat order into buckets, and their tiers.
    pub layout: BucketLayout,
    pub(crate) policies: Vec<LayerPolicy>,
    pub tile: LossTile,
    /// The tile if memory is unlimited.
    pub(crate) usual_tile: LossTile,
    /// Rings of the device's flat memory.
    pub(crate) rings: Rings,
    pub memory: Vec<MemoryClass>,
    /// Predicted step time; `None` on the CPU device, which has no assumed rates.
    pub(crate) predicted: Option<Prediction>,
}

/// Chooses a plan for a model cut as in `layout`, whose resident buckets are ignored. If nothing fits, the choice with the fewest missing
/// bytes is returned; see [`Workload::lacking`].
///
/// # Errors
/// `Usage` if batch and sequence length do not suit the model.
pub(crate) fn choose(workload: &Workload, table: &TensorTable, layout: &BucketLayout, permitted: Permitted) -> Result<Choice> {
    let planner = Planner { workload, table, layout, permitted };
    match workload.site.machine.kind {
        DeviceKind::Cpu => planner.on_cpus(),
        DeviceKind::Gpu => planner.search(&Predictor::new(workload, table)?),
    }
}

/// Whether any choice fits. No step is predicted, which is most of the work of [`choose`].
///
/// # Errors
/// Errors of [`choose`].
pub(crate) fn fits(workload: &Workload, table: &TensorTable, layout: &BucketLayout, permitted: Permitted) -> Result<bool> {
    let planner = Planner { workload, table, layout, permitted };
    match workload.site.machine.kind {
        DeviceKind::Cpu => planner.on_cpus().map(|choice| workload.lacking(&choice.memory) == (0, 0)),
        DeviceKind::Gpu => planner.has_fitting_candidate(),
    }
}

/// A choice with the keys by which choices are compared.
struct Scored {
    /// Missing bytes.
    lacking: u64,
    step_s: f64,
    choice: Choice,
}

impl Scored {
    /// Whether this choice has fewer missing bytes than `other`, or as many and a shorter step.
    fn is_before(&self, other: &Scored) -> bool {
        self.lacking < other.lacking || self.lacking == other.lacking && self.step_s < other.step_s
    }
}

/// Location of the weights. The ring is used only if it saves memory.
#[derive(Clone, Copy, PartialEq)]
enum WeightPlacement {
    /// In the flat array of each device.
    Flat,
    /// Streamed: from the host, or from slices over the ranks of each process.
    Streamed,
    /// Streamed from the host, as the upper halves of split masters.
    StreamedHalves,
    /// Streamed from slices over the ranks of all processes.
    FullySharded,
}

/// Requested rings and host locations. Each is used only if it saves memory.
#[derive(Clone, Copy)]
struct UseRings {
    grads: bool,
    weights: WeightPlacement,
    sums_on_host: bool,
}

struct Planner<'a> {
    workload: &'a Workload<'a>,
    table: &'a TensorTable,
    layout: &'a BucketLayout,
    permitted: Permitted,
}

impl Planner<'_> {
    /// The choice for the CPU device. Device and host share memory and cores, so there is no trade-off.
    fn on_cpus(&self) -> Result<Choice> {
        let (shape, width) = (self.workload.shape(), self.workload.recipe.numerics.dtype.bytes());
        let vocab = shape.vocab.min(SHARED_TILE_VOCAB_MAX);
        let chosen = LossTile { rows: self.tokens().min(SHARED_TILE_BYTES_MAX / (vocab * width)).max(1), vocab, tail: 0 };
        let tile = self.permitted.tile.unwrap_or(chosen);
        let policies = self.mixes(false).remove(0);
        // The first location is the requested one, or the flat array. Split masters that are asked for are split on the host as well.
        let weights = match self.weight_placements() {
            [WeightPlacement::Streamed, WeightPlacement::StreamedHalves] => WeightPlacement::StreamedHalves,
            placements => placements[0],
        };
        let use_rings = UseRings { grads: false, weights, sums_on_host: false };
        let layout = match self.permitted.residency {
            Residency::Exactly(resident) => self.resident(resident),
            Residency::Largest => self.resident((self.layout.count() / SHARED_RESIDENT_ONE_IN).min(self.most_resident(use_rings))),
        };
        let rings = self.rings(&layout, use_rings);
        let memory = self.workload.classes(&layout, rings, &self.workload.activations(&policies, tile)?);
        Ok(Choice { layout, policies, tile, usual_tile: tile, rings, memory, predicted: None })
    }

    /// The fastest fitting candidate, without streaming if possible. If nothing fits, the candidate with the fewest missing bytes. Slower
    /// options are tried before a smaller tile, which changes bits.
    fn search(&self, predictor: &Predictor) -> Result<Choice> {
        let mut best: Option<Scored> = None;
        for (tile, place) in self.tiles().into_iter().flat_map(|tile| self.places().into_iter().map(move |place| (tile, place))) {
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

    /// Whether a candidate of [`Self::search`] fits.
    fn has_fitting_candidate(&self) -> Result<bool> {
        let is_open = self.permitted.activations.policy().is_none();
        let layers = self.workload.shape().layers.len();
        for tile in self.tiles() {
            // In a deep model no policy takes less device memory than this one, so most models that do not fit are refused here.
            if is_open && layers > SPLITS_MAX && self.workload.segments.is_whole() {
                let least = self.workload.activations(&vec![LayerPolicy::Host; layers], tile)?.without_host_memory();
                if !self.fit_anywhere(&least) {
                    continue;
                }
            }
            for policies in self.mixes(is_open && Predictor::new(self.workload, self.table)?.attends_long()) {
                if self.fit_anywhere(&self.workload.activations(&policies, tile)?) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Whether these activations fit with any location of weights, sums and gradients.
    fn fit_anywhere(&self, activations: &ActivationPlan) -> bool {
        let with_rings = |place| [false, true].map(|grads| UseRings { grads, ..place });
        self.places().into_iter().flat_map(with_rings).any(|use_rings| {
            let (_, _, memory) = self.placed(activations, use_rings);
            self.workload.lacking(&memory) == (0, 0)
        })
    }

    /// Locations of the weights and of the sums, without a gradient ring.
    fn places(&self) -> Vec<UseRings> {
        // Sums on the host cross the link with every partial sum, so they are the last resort.
        let sums: &[bool] = if self.workload.may_sum_on_host() { &[false, true] } else { &[false] };
        let with = |sums_on_host| move |&weights| UseRings { grads: false, weights, sums_on_host };
        sums.iter().flat_map(|&on_host| self.weight_placements().iter().map(with(on_host))).collect()
    }

    /// Possible locations of the weights, the fastest first.
    fn weight_placements(&self) -> &'static [WeightPlacement] {
        use WeightPlacement::{Flat, FullySharded, Streamed, StreamedHalves};
        let Site { ranks, processes, .. } = *self.workload.site;
        match self.permitted.weights {
            // With one rank a process, slices over the ranks of a process would be all weights.
            WeightsChoice::Auto if processes > 1 && ranks == processes => &[Flat, FullySharded],
            WeightsChoice::Auto if processes > 1 => &[Flat, Streamed, FullySharded],
            WeightsChoice::Auto if self.may_stream_halves() => &[Flat, Streamed, StreamedHalves],
            WeightsChoice::Auto => &[Flat, Streamed],
            WeightsChoice::Replicated => &[Flat],
            WeightsChoice::FullySharded if processes > 1 => &[FullySharded],
            WeightsChoice::Flow if self.may_stream_halves() => &[Streamed, StreamedHalves],
            // With one process, its ranks are all ranks.
            WeightsChoice::Flow | WeightsChoice::Sharded | WeightsChoice::FullySharded => &[Streamed],
        }
    }

    /// Whether streamed weights can be the upper halves of masters: these are split, and one device streams bfloat16 weights from the host.
    fn may_stream_halves(&self) -> bool {
        let Protocol { masters, link_dtype, .. } = *self.workload.protocol;
        masters == Masters::Split && self.workload.site.ranks == 1 && link_dtype == Dtype::Bfloat16
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
                // On a tie the first candidate wins, because it recomputes least.
                if best.as_ref().is_none_or(|best| found.is_before(best)) {
                    best = Some(found);
                }
            }
        }
        Ok(best.expect("there is at least one mix"))
    }

    /// The candidate with these layer policies and their activations.
    fn candidate(
        &self,
        (policies, activations): (&[LayerPolicy], &ActivationPlan),
        tile: LossTile,
        use_rings: UseRings,
        predictor: &Predictor,
    ) -> Choice {
        let (layout, rings, memory) = self.placed(activations, use_rings);
        let predicted = Some(predictor.predict(&layout, rings, policies, activations));
        Choice { layout, policies: policies.to_vec(), tile, usual_tile: self.tiles()[0], rings, memory, predicted }
    }

    /// The buckets, rings and memory of a candidate with these activations.
    fn placed(&self, activations: &ActivationPlan, use_rings: UseRings) -> (BucketLayout, Rings, Vec<MemoryClass>) {
        let layout = match self.permitted.residency {
            Residency::Exactly(resident) => self.resident(resident),
            Residency::Largest => self.largest_residency(activations, use_rings),
        };
        let rings = self.rings(&layout, use_rings);
        let memory = self.workload.classes(&layout, rings, activations);
        (layout, rings, memory)
    }

    fn rings(&self, layout: &BucketLayout, use_rings: UseRings) -> Rings {
        let streams = use_rings.weights != WeightPlacement::Flat;
        let weights = streams.then(|| self.workload.weight_ring(layout, self.table)).flatten();
        Rings {
            grads: use_rings.grads.then(|| self.workload.grad_ring(layout, self.table)).flatten(),
            weights,
            split_masters: weights.is_some() && use_rings.weights == WeightPlacement::StreamedHalves,
            fully_sharded: weights.is_some() && use_rings.weights == WeightPlacement::FullySharded,
            sums_on_host: use_rings.sums_on_host && layout.offloaded() > 0,
            sums: self.workload.sum_ring(layout, self.table),
        }
    }

    /// Missing bytes of the device and the host with `resident` resident buckets.
    fn lacking(&self, resident: usize, use_rings: UseRings, activations: &ActivationPlan) -> (u64, u64) {
        let layout = self.resident(resident);
        self.workload.lacking(&self.workload.classes(&layout, self.rings(&layout, use_rings), activations))
    }

    /// As many resident buckets as the device holds. If the host cannot hold the rest, there are more, and the device's memory is short.
    fn largest_residency(&self, activations: &ActivationPlan, use_rings: UseRings) -> BucketLayout {
        let most = self.most_resident(use_rings);
        // If all of them are resident, there are no staging buffers.
        let fits_most = self.lacking(most, use_rings, activations).0 == 0;
        let fitting =
            if fits_most { most } else { partition_point(most, |resident| self.lacking(resident + 1, use_rings, activations).0 == 0) };
        self.resident(fitting.max(self.least_residency(activations, use_rings)))
    }

    /// The fewest resident buckets with which the host holds the rest; all buckets if the host cannot hold one.
    fn least_residency(&self, activations: &ActivationPlan, use_rings: UseRings) -> usize {
        partition_point(self.layout.count(), |resident| self.lacking(resident, use_rings, activations).1 > 0)
    }

    /// The maximum number of resident buckets: all buckets, or those entirely outside the range that streams from the host.
    fn most_resident(&self, use_rings: UseRings) -> usize {
        let from_host = self.rings(self.layout, use_rings).weights.filter(|_| self.workload.site.ranks == 1);
        let streamed = from_host.map_or(0, |ring| ring.ringed_elems);
        self.layout.count() - self.layout.overlapping(0..streamed).end
    }

    fn resident(&self, buckets: usize) -> BucketLayout {
        self.layout.with_resident(buckets)
    }

    /// Tokens of a micro-batch on one rank.
    fn tokens(&self) -> usize {
        self.workload.recipe.step.tokens_of_rank()
    }

    /// Candidate layer policies, the fastest first. Layers without a backward pass save as little as they can: they recompute nothing.
    fn mixes(&self, attends_long: bool) -> Vec<Vec<LayerPolicy>> {
        let (mut mixes, below) = (self.mixes_of_all(attends_long), self.table.first_backward_layer());
        mixes.iter_mut().for_each(|policies| policies[..below].fill(LayerPolicy::RecomputeBlock));
        mixes.dedup();
        mixes
    }

    /// Candidate policies if every layer has a backward pass. The last layers are needed first in the backward pass. They are the first to recompute
    /// cheap parts, then whole blocks. Next, the inputs of the first layers, which have the longest time to return, go to the host; if
    /// attention takes long, its outputs follow.
    fn mixes_of_all(&self, attends_long: bool) -> Vec<Vec<LayerPolicy>> {
        use LayerPolicy::{Host, HostAttention, Keep, RecomputeBlock, RecomputeCheap};
        let layers = self.workload.shape().layers.len();
        if let Some(policy) = self.permitted.activations.policy() {
            return vec![vec![policy; layers]];
        }
        if !self.workload.segments.is_whole() {
            return self.mixes_in_segments();
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
        // For hosts that cannot hold the attention outputs of all layers.
        let both = splits(layers).skip(1).rev().skip(1).rev().map(split(Host, HostAttention));
        mixes.chain(attention).chain(both).collect()
    }

    /// Candidate policies of layers in segments, the fastest first. All segments use the same memory, so the policy of a layer depends on its
    /// place in its segment. Inputs of layers stay on the device.
    fn mixes_in_segments(&self) -> Vec<Vec<LayerPolicy>> {
        use LayerPolicy::{Keep, RecomputeBlock, RecomputeCheap};
        let segments = self.workload.segments;
        let longest = (0..segments.count()).map(|segment| segments.layers(segment).len()).max().unwrap_or(0);
        let split = |first, last| {
            move |at: usize| {
                let of = |segment: usize| (0..segments.layers(segment).len()).map(move |place| if place < at { first } else { last });
                (0..segments.count()).flat_map(of).collect::<Vec<_>>()
            }
        };
        let cheap = (0..=longest).rev().map(split(Keep, RecomputeCheap));
        cheap.chain((0..longest).rev().map(split(RecomputeCheap, RecomputeBlock))).collect()
    }

    /// Tiles of the loss: the usual one, then smaller ones for plans that do not fit.
    fn tiles(&self) -> Vec<LossTile> {
        if let Some(tile) = self.permitted.tile {
            return vec![tile];
        }
        let vocab = self.workload.shape().vocab;
        let rows = rows_within(self.tokens(), TILE_BYTES / (vocab * self.workload.recipe.numerics.dtype.bytes()));
        let halves = std::iter::successors(Some(rows), |&rows| (rows > TILE_ROWS_MIN).then(|| rows_within(self.tokens(), rows / 2)));
        halves.map(|rows| LossTile::of_vocabulary(rows, vocab)).collect()
    }
}

/// Positions between layers at which the policy may change, ascending, from 0 to `layers`.
fn splits(layers: usize) -> impl DoubleEndedIterator<Item = usize> + ExactSizeIterator {
    let places = if layers > SPLITS_MAX { SPLITS_DEEP } else { layers };
    (0..places + 1).map(move |place| place * layers / places)
}

/// Rows of equal, aligned tiles of `tokens`: at most `rows_max`, but never fewer than [`TILE_ROWS_MIN`].
fn rows_within(tokens: usize, rows_max: usize) -> usize {
    let fewest_tiles = tokens.div_ceil(rows_max.max(TILE_ROWS_MIN));
    let aligned = |tiles: usize| tokens.div_ceil(tiles).next_multiple_of(TILE_ROWS_ALIGN).min(tokens);
    // Alignment may exceed the limit by less than one step; one more tile is then enough.
    (fewest_tiles..).map(aligned).find(|&rows| rows <= rows_max.max(TILE_ROWS_MIN)).unwrap_or(tokens)
}

/// The first index of `0..count` for which `holds` is false, or `count`. `holds` must be monotonic.
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
        assert_eq!((deep.len(), deep[0], deep[SPLITS_DEEP]), (SPLITS_DEEP + 1, 0, 1000));
        assert!(deep.windows(2).all(|two| (31..=32).contains(&(two[1] - two[0]))), "{deep:?}");
    }
}
