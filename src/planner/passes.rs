//! Device time of the forward and backward pass of a micro-batch: the model's own loop on a device that only counts time.

use super::budget::Workload;
use super::machine::Machine;
use crate::device::sim::SimDevice;
use crate::device::{Device, DeviceKind, Lease, Peers, Stream};
use crate::error::Result;
use crate::hardware::rates::Rates;
use crate::host::memory_policy::MemoryPolicy;
use crate::host::pinned::HostMemory;
use crate::memory::DeviceMemory;
use crate::model::activations::LossTile;
use crate::model::heads::SequenceRank;
use crate::model::policy::LayerPolicy;
use crate::model::segments::LayerSegments;
use crate::model::sequence::{Handover, PassRunner, SharedActivations};
use crate::model::tensors::TensorTable;
use crate::model::{FrozenMemory, Model, ParamMemory};
use crate::optim::simd::Isa;
use crate::recipe::{Recipe, StepShape};
use std::cell::RefCell;
use std::sync::Arc;

/// Maximum rows of the loss tile in this model of time. Products with more rows are not faster.
const TILE_ROWS_MAX: usize = 16 << 10;

/// Attention counts as long above this fraction of a layer's recomputation. Below it, copying attention outputs over the link slows other
/// copies and products by more than an estimate with perfect overlap can capture.
const LONG_ATTENTION: f64 = 0.2;

/// Seconds of a micro-batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct PassTimes {
    /// Forward and backward pass if every layer keeps all activations.
    keep_s: f64,
    /// Additional seconds of a layer that recomputes its cheap parts.
    cheap_s: f64,
    /// Additional seconds of a layer that recomputes its whole forward pass.
    block_s: f64,
    /// Attention's part of `block_s`.
    attention_s: f64,
}

/// All inputs of [`PassTimes`].
#[derive(PartialEq)]
struct PassInputs {
    recipe: Recipe,
    segments: LayerSegments,
    kind: DeviceKind,
    device: DeviceMemory,
    rates: Arc<Rates>,
}

impl PassInputs {
    fn of(workload: &Workload) -> Self {
        let Workload { recipe, segments, site, .. } = *workload;
        let Machine { kind, device, rates, .. } = &site.machine;
        Self { recipe: recipe.clone(), segments: segments.clone(), kind: *kind, device: *device, rates: rates.clone() }
    }
}

thread_local! {
    /// The times that this thread computed last. Most candidates of a search differ in places alone, and have equal times.
    static LAST: RefCell<Option<(PassInputs, PassTimes)>> = const { RefCell::new(None) };
}

impl PassTimes {
    pub(super) fn of(workload: &Workload, table: &TensorTable) -> Result<Self> {
        let inputs = PassInputs::of(workload);
        let known = LAST.with_borrow(|last| last.as_ref().filter(|(known, _)| *known == inputs).map(|(_, times)| *times));
        if let Some(times) = known {
            return Ok(times);
        }
        let times = Self::compute(workload, table)?;
        LAST.set(Some((inputs, times)));
        Ok(times)
    }

    fn compute(workload: &Workload, table: &TensorTable) -> Result<Self> {
        let of = |policy| micro_step_s(workload, table, policy);
        let keep_s = of(LayerPolicy::Keep)?;
        // The last layer with shared buffers still has its values, so it recomputes nothing.
        let first = table.first_backward_layer();
        let layers = (workload.shape().layers.len() - first).saturating_sub(1).max(1) as f64;
        let added_s = |policy| of(policy).map(|s| (s - keep_s) / layers);
        Ok(Self {
            keep_s,
            cheap_s: added_s(LayerPolicy::RecomputeCheap)?,
            block_s: added_s(LayerPolicy::RecomputeBlock)?,
            attention_s: attention_s(workload),
        })
    }

    /// Additional seconds of a layer that runs forward a second time.
    pub(super) fn block_s(&self) -> f64 {
        self.block_s
    }

    pub(super) fn attends_long(&self) -> bool {
        self.attention_s > LONG_ATTENTION * self.block_s
    }

    /// Seconds of a micro-batch, with the `policies` of the layers that have a backward pass.
    pub(crate) fn micro_step_s(&self, policies: &[LayerPolicy]) -> f64 {
        let added_s = |policy: &LayerPolicy| match policy {
            LayerPolicy::Keep => 0.0,
            LayerPolicy::RecomputeCheap => self.cheap_s,
            LayerPolicy::RecomputeBlock | LayerPolicy::Host => self.block_s,
            // Copies from the host are part of the link's time.
            LayerPolicy::HostAttention => self.block_s - self.attention_s,
        };
        self.keep_s + policies.iter().map(added_s).sum::<f64>()
    }
}

/// A device that shares sequences with simulated peers, which mirror it.
struct Mirrored<'a> {
    dev: &'a mut SimDevice,
    model: &'a Model,
    /// Buffers of each peer, if sequences are shared.
    shared: Option<&'a SharedActivations>,
}

impl PassRunner for Mirrored<'_> {
    type Dev = SimDevice;

    fn dev(&mut self) -> &mut SimDevice {
        self.dev
    }

    fn hand_over(&mut self, handover: Handover, layer: usize) -> Result<()> {
        let Some(shared) = self.shared else { return Ok(()) };
        let pull = |dev: &mut SimDevice, peer, from, to| dev.pull_rows(Stream::Compute, peer, from, to);
        self.model.take_over(self.dev, (handover, layer), |_| shared, pull)
    }
}

/// Seconds of attention's forward pass in a mean layer, with the head count of the first rank. Gated delta rules take little of it.
fn attention_s(workload: &Workload) -> f64 {
    let (shape, StepShape { micro_batch: batch, seq_length, sequence_ranks: ranks, .. }) = (workload.shape(), workload.recipe.step);
    let layers = shape.layers.len();
    let first = SequenceRank { rank: 0, ranks };
    let rates = &workload.site.machine.rates;
    let seconds: f64 = shape.layers_with_scores().map(|layer| shape.attention_of((batch, seq_length), layer, first).forward_s(rates)).sum();
    seconds / layers as f64
}

fn micro_step_s(workload: &Workload, table: &TensorTable, policy: LayerPolicy) -> Result<f64> {
    let (shape, machine) = (workload.shape(), &workload.site.machine);
    let (mut dev, _) =
        SimDevice::new("passes", &machine.rates, (machine.kind, machine.device), (1, Isa::Scalar, workload.recipe.numerics.moments), 0);
    let tokens = workload.recipe.step.tokens_of_rank();
    let tile = LossTile::of_vocabulary(tokens.min(TILE_ROWS_MAX), shape.vocab);
    let plan = workload.activations(&vec![policy; shape.layers.len()], tile)?;
    let activations = plan.allocate(&mut dev, &mut HostMemory::new(MemoryPolicy::unbacked()), &mut Lease::default())?;
    let dtype = workload.recipe.numerics.dtype;
    let frozen = FrozenMemory::alloc(&mut dev, table, dtype)?;
    let mut alloc = |name| dev.alloc(name, table.flat_elems(), dtype);
    let memory = ParamMemory { weights: alloc("weights")?, grads: alloc("gradients")?, frozen };
    let model = Model::new(shape.clone(), memory, activations)?;
    let shared = model.shared_activations();
    let layers: Vec<usize> = (0..shape.layers.len()).collect();
    model.micro_step(&mut Mirrored { dev: &mut dev, model: &model, shared: shared.as_ref() }, &layers, |_| Ok(()))?;
    let done = dev.event()?;
    dev.record(done, Stream::Compute)?;
    dev.synchronize(done)?;
    Ok(dev.now_ns() as f64 / 1e9)
}
