//! What forward and backward of a micro-batch cost on the device: the model's own loop, on a device that only counts.

use super::budget::Workload;
use crate::device::sim::SimDevice;
use crate::device::{Device, Lease, Peers, Stream};
use crate::error::Result;
use crate::host::memory_policy::MemoryPolicy;
use crate::host::pinned::HostMemory;
use crate::model::Model;
use crate::model::activations::LossTile;
use crate::model::heads::SequenceRank;
use crate::model::policy::LayerPolicy;
use crate::model::sequence::{Handover, PassRunner, SharedActivations};
use crate::model::tensors::TensorTable;
use crate::optim::simd::Isa;

/// Rows of the loss's tile here: a product with more is no faster.
const TILE_ROWS_MAX: usize = 16 << 10;

/// Attention is long where it is this part of what a layer computes again. Where it is less, its output's way over the link costs other copies
/// and products more than an estimate as if everything overlapped can tell.
const LONG_ATTENTION: f64 = 0.2;

/// Seconds of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassTimes {
    /// Forward and backward when every layer keeps everything.
    keep_s: f64,
    /// What a layer adds that computes its cheap parts again.
    cheap_s: f64,
    /// What a layer adds that computes all of its forward pass again.
    block_s: f64,
    /// Attention's part of that.
    attention_s: f64,
}

impl PassTimes {
    pub(super) fn of(workload: &Workload) -> Result<Self> {
        let of = |policy| micro_step_s(workload, policy);
        let keep_s = of(LayerPolicy::Keep)?;
        // The last layer that shares its buffers still has its values.
        let layers = (workload.shape.layers.len() - 1).max(1) as f64;
        let added_s = |policy| of(policy).map(|s| (s - keep_s) / layers);
        Ok(Self {
            keep_s,
            cheap_s: added_s(LayerPolicy::RecomputeCheap)?,
            block_s: added_s(LayerPolicy::RecomputeBlock)?,
            attention_s: attention_s(workload),
        })
    }

    pub(super) fn attends_long(&self) -> bool {
        self.attention_s > LONG_ATTENTION * self.block_s
    }

    pub(crate) fn micro_step_s(&self, policies: &[LayerPolicy]) -> f64 {
        let added_s = |policy: &LayerPolicy| match policy {
            LayerPolicy::Keep => 0.0,
            LayerPolicy::RecomputeCheap => self.cheap_s,
            LayerPolicy::RecomputeBlock | LayerPolicy::Host => self.block_s,
            // What comes from the host is counted with all that crosses the link.
            LayerPolicy::HostAttention => self.block_s - self.attention_s,
        };
        self.keep_s + policies.iter().map(added_s).sum::<f64>()
    }
}

/// A device that shares sequences with its mirror images.
struct Mirrored<'a> {
    dev: &'a mut SimDevice,
    model: &'a Model,
    /// What each of them has, if they share any.
    shared: Option<&'a SharedActivations>,
}

impl PassRunner for Mirrored<'_> {
    type Dev = SimDevice;

    fn dev(&mut self) -> &mut SimDevice {
        self.dev
    }

    fn hand_over(&mut self, what: Handover, layer: usize) -> Result<()> {
        let Some(shared) = self.shared else { return Ok(()) };
        let pull = |dev: &mut SimDevice, peer, from, to| dev.pull_rows(Stream::Compute, peer, from, to);
        self.model.take_over(self.dev, (what, layer), |_| shared, pull)
    }
}

/// Of the mean layer, forward, with as many heads as the first rank has.
fn attention_s(workload: &Workload) -> f64 {
    let Workload { shape, batch, seq_length, sequence_ranks: ranks, .. } = *workload;
    let layers = shape.layers.len();
    let first = SequenceRank { rank: 0, ranks };
    let flops: f64 = (0..layers).map(|layer| shape.attention_of((batch, seq_length), layer, first).flops()).sum();
    flops / layers as f64 / workload.machine.rates.attention_forward_flops
}

fn micro_step_s(workload: &Workload, policy: LayerPolicy) -> Result<f64> {
    let (shape, machine) = (workload.shape, &workload.machine);
    let (mut dev, _) = SimDevice::new("passes", &machine.rates, (machine.kind, machine.device), (1, Isa::Scalar, workload.moments), 0);
    let tokens = workload.batch * workload.seq_length / workload.sequence_ranks;
    let tile = LossTile { rows: tokens.min(TILE_ROWS_MAX), vocab: shape.vocab };
    let plan = workload.activations(&vec![policy; shape.layers.len()], tile)?;
    let activations = plan.allocate(&mut dev, &mut HostMemory::new(MemoryPolicy::unbacked()), &mut Lease::default())?;
    let mut flat = |name| dev.alloc(name, TensorTable::new(shape).flat_elems(), workload.dtype);
    let model = Model::new(shape.clone(), flat("weights")?, flat("gradients")?, activations)?;
    let shared = model.shared_activations();
    let layers: Vec<usize> = (0..shape.layers.len()).collect();
    model.micro_step(&mut Mirrored { dev: &mut dev, model: &model, shared: shared.as_ref() }, &layers, |_| Ok(()))?;
    let done = dev.event()?;
    dev.record(done, Stream::Compute)?;
    dev.synchronize(done)?;
    Ok(dev.now_ns() as f64 / 1e9)
}
