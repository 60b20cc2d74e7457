//! Exchange between ranks: gradients are summed over the gradient shares of a step (parts of its micro-batches, `--gradient-shares`), and
//! each rank receives new weights from their owners. The driver calls these methods in its loop and from `pump`. Methods poll, unless their
//! documentation says that they wait. [`SingleRank`] is the implementation for one device, `peer_exchange.rs` for several ranks.

use super::rendezvous::RankMemory;
use super::sums::PartialSums;
use crate::bucket::layout::BucketLayout;
use crate::bucket::slices::Slices;
use crate::device::{DeviceSlice, EventId, Kernels, Sides, Stream};
pub(crate) use crate::engine::protocol::order::Order;
use crate::engine::watch::driver_state::DriverState;
use crate::engine::watch::watchdog::Watched;
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::sequence::Handover;
use crate::optim::norm;
use crate::planner::plan::Plan;
use crate::ranks::progress::{ORDER_WORDS, StepOutcome};
use crate::trace::Recorder;
use crate::units::NormSq;
use std::ops::Range;
use std::sync::Arc;

/// Arguments of an order.
pub(crate) type OrderWords = [u64; ORDER_WORDS];

/// Exchange of slices between ranks. Buckets pass in flat order, once a round. In a round every rank computes one share.
pub(crate) trait Exchange<D: Kernels> {
    /// The stream that computes sums and everything after them until the gradient leaves.
    fn sums_on(&self) -> Stream;

    /// The slices that this rank owns.
    fn slices(&self) -> &Slices;

    /// On rank 0, makes `plan` available to the other ranks for the next [`Order::Replan`].
    fn announce(&mut self, _plan: &Plan) {}

    /// Drops all peer mappings and waits until the peers have dropped theirs. No work may be pending.
    ///
    /// # Errors
    /// Errors of the device; the failure that ended another rank.
    fn leave(&mut self, _dev: &mut D) -> Result<()> {
        Ok(())
    }

    /// Changes to `layout`, which has the same buckets in other tiers. Frees the memory that depends on the plan.
    ///
    /// # Errors
    /// Errors of the device.
    fn rearrange(&mut self, sides: Sides<'_, D>, layout: &BucketLayout) -> Result<()>;

    /// Allocates the memory that depends on `plan`.
    ///
    /// # Errors
    /// `Resource` when memory is not available.
    fn take(&mut self, sides: Sides<'_, D>, plan: &Plan) -> Result<()>;

    /// Waits until all ranks have tried to allocate the memory of a new plan. `refusal` is this rank's failure, if it failed. Returns the
    /// first failure of any rank.
    ///
    /// # Errors
    /// The failure that ended another rank.
    fn agree(&mut self, refusal: Option<Error>) -> Result<Option<Error>> {
        Ok(refusal)
    }

    /// Publishes this rank's memory addresses and events to its peers. By bucket, `stepped` is the event after which this rank's slice of
    /// the weights is written.
    fn introduce(&mut self, _dev: &mut D, _memory: RankMemory, _stepped: Vec<EventId>, _vitals: &Arc<DriverState>) {}

    /// Reads the memory addresses and events that all peers have published.
    ///
    /// # Errors
    /// `Unsupported` when this rank would compute other bits than rank 0; errors of the device.
    fn exchange_handles(&mut self, _dev: &mut D) -> Result<()> {
        Ok(())
    }

    /// Opens direct connections between devices of different processes, if the transport has them, once all ranks have arrived.
    ///
    /// # Errors
    /// Errors of the device; the failure that ended another rank.
    fn connect(&mut self, _dev: &mut D) -> Result<()> {
        Ok(())
    }

    /// Repeats [`Exchange::introduce`] and [`Exchange::greet`] after memory and events have changed.
    ///
    /// # Errors
    /// Errors of the device; the failure that ended another rank.
    fn meet_again(&mut self, _dev: &mut D, _memory: RankMemory, _stepped: Vec<EventId>, _vitals: &Arc<DriverState>) -> Result<()> {
        Ok(())
    }

    /// Publishes that the activations for the peers of this rank's sequence group are enqueued.
    ///
    /// # Errors
    /// Errors of the device; the failure that ended another rank.
    fn hand_over(&mut self, _dev: &mut D) -> Result<()> {
        Ok(())
    }

    /// Whether all ranks of the sequence group have published this exchange.
    fn is_handed_over(&self) -> bool {
        true
    }

    /// Enqueues copies of the peers' activations that this rank needs in a layer of `model`.
    ///
    /// # Errors
    /// Errors of the device.
    fn take_over(&mut self, _dev: &mut D, _model: &Model, _what: (Handover, usize)) -> Result<()> {
        Ok(())
    }

    /// The gradient of this round's share of `bucket` is enqueued, in the flat `grads`. Returns true if it is the gradient of the whole
    /// step. Over NCCL it waits until the local ranks have written the gradients that must be exchanged first.
    fn written(&mut self, dev: &mut D, grads: DeviceSlice, bucket: usize) -> Result<bool>;

    /// Enqueues the sums with all parts available. Returns a bucket when its gradient of the whole step is enqueued.
    fn poll(&mut self, _dev: &mut D, _grads: DeviceSlice) -> Result<Option<usize>> {
        Ok(None)
    }

    /// Whether the sums of all written gradients are enqueued.
    fn is_summed(&self) -> bool {
        true
    }

    /// Whether the gradients of `bucket` and of the buckets before it, written in this round, may be overwritten: all ranks have enqueued
    /// their pulls and sums. If so, later work on the compute stream waits for these.
    fn may_overwrite(&mut self, _dev: &mut D, _bucket: usize) -> Result<bool> {
        Ok(true)
    }

    /// Location of the step's gradient of `flat`, a part of this rank's slice of a bucket that begins at `local` in the local order.
    fn own_grads(&self, grads: DeviceSlice, flat: &Range<usize>, _local: usize) -> DeviceSlice {
        grads.slice(flat.start, flat.len())
    }

    /// Bytes of gradient sums that crossed the link since the last call: to the device, and to the host.
    fn crossed(&mut self) -> [u64; 2] {
        [0; 2]
    }

    /// Adds the next partial sums of the norm, in the local order.
    fn add_norm_partials(&mut self, norm_partials: &[f32]);

    /// Completes this rank's report of `step`: whether one of its gradients is infinite or NaN, and the losses of its shares.
    fn report(&mut self, step: u64, nonfinite: bool, losses: &[f32]);

    /// The merged outcome of `step` over all ranks, once it is known. Poll it until then.
    fn outcome(&mut self, step: u64) -> Option<StepOutcome>;

    /// Publishes the losses of this rank's shares outside of a step.
    fn publish_losses(&mut self, losses: &[f32]);

    /// Sum of the losses that were published last, in the order of shares. With several ranks, it is valid after all have completed their
    /// orders.
    fn losses(&self) -> f64;

    /// Begins the next version of the weights: the weights of every bucket will change.
    fn next_version(&mut self) {}

    /// Whether this rank has not yet published some bucket's weights as final.
    fn is_owing(&self) -> bool {
        false
    }

    /// Whether this rank has not yet published its weights of `bucket` as final.
    fn is_owed(&self, _bucket: usize) -> bool {
        false
    }

    /// Publishes that this rank's weights of `bucket` are final and that the work that writes them is enqueued.
    fn settle(&mut self, _bucket: usize) {}

    /// Enqueues copies of the peers' final weights. Returns true if there were any.
    fn gather(&mut self, _dev: &mut D, _weights: DeviceSlice) -> Result<bool> {
        Ok(false)
    }

    /// Whether copies of the peers' weights of `bucket` are enqueued.
    fn is_gathered(&self, _bucket: usize) -> bool {
        true
    }

    /// Buckets whose weights the ranks must exchange before any rank computes with `bucket`, to be exchanged from the last to the first.
    /// The range is equal on all ranks.
    fn to_swap(&self, _bucket: usize) -> Range<usize> {
        0..0
    }

    /// Enqueues the exchange of the weights of `bucket`; this rank's slice is final.
    ///
    /// # Errors
    /// Errors of the device; the failure that ended another rank.
    fn swap_weights(&mut self, _dev: &mut D, _bucket: usize) -> Result<()> {
        Ok(())
    }

    /// Hash of all exchanges so far. It is equal on all ranks if they exchange in the same order.
    fn swapped(&self) -> u64 {
        0
    }

    /// Location of this rank's weights of `flat`, a part of its slice of a bucket that begins at `local` in the local order.
    fn own_weights(&self, weights: DeviceSlice, flat: &Range<usize>, _local: usize) -> DeviceSlice {
        weights.slice(flat.start, flat.len())
    }

    /// Whether a module's weights are fetched before the previous module is computed. This holds for a transport that blocks the compute
    /// stream.
    fn fetches_ahead(&self) -> bool {
        false
    }

    /// For weights that cross between processes with every fetch: starts to receive the weights of `flat` once no local rank pulls from the
    /// memory that they overwrite. Returns whether it has started.
    ///
    /// # Errors
    /// Errors of the device; the failure that ended another rank.
    fn bring(&mut self, _dev: &mut D, _flat: &Range<usize>) -> Result<bool> {
        Ok(true)
    }

    /// Whether the weights started by [`Exchange::bring`] have arrived at all ranks of this process, or are enqueued to.
    ///
    /// # Errors
    /// Errors of the device.
    fn is_brought(&mut self, _dev: &mut D, _flat: &Range<usize>) -> Result<bool> {
        Ok(true)
    }

    /// Enqueues copies of the weights of `flat` from all other ranks that hold a slice of them.
    fn fetch(&mut self, _dev: &mut D, _weights: DeviceSlice, _flat: Range<usize>) -> Result<()> {
        Ok(())
    }

    /// Enqueues copies of this rank's own slice of fetched weights in `flat`, on [`Stream::Compute`] between two modules. A copy within a
    /// GPU uses its multiprocessors, so beside a module it would wait for each kernel to end.
    ///
    /// [`Stream::Compute`]: crate::device::Stream::Compute
    ///
    /// # Errors
    /// Errors of the device.
    fn place_own(&self, _dev: &mut D, _weights: DeviceSlice, _flat: &Range<usize>) -> Result<()> {
        Ok(())
    }

    /// Makes later work on the compute stream wait for the peers' weights of `bucket`.
    fn arrive(&self, _dev: &mut D, _bucket: usize) -> Result<()> {
        Ok(())
    }

    /// Checks that no rank has failed so far.
    ///
    /// # Errors
    /// The failure of the first rank that failed.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Records `error` as the failure that ends all ranks, unless another rank failed before. Returns the first failure, with the name of
    /// its rank.
    fn attribute(&self, error: Error) -> Error {
        error
    }

    /// The driver states of the local ranks, including this rank's `driver_state`, and the progress counters, for the watchdog.
    fn watched(&self, driver_state: Arc<DriverState>) -> Watched {
        Watched::alone(driver_state)
    }

    /// Nanoseconds so far in which the compute stream waited for peers.
    fn waited_ns(&self, _dev: &D) -> u64 {
        0
    }

    /// Time of the last publication of a peer, by the device's clock; 0 before the first, and without peers.
    fn published_ns(&self) -> u64 {
        0
    }

    /// Publishes this rank's amounts of a step for rank 0.
    fn publish_amounts(&self, _amounts: &mut dyn Iterator<Item = u64>) {}

    /// Reads the amounts of the last step that `rank` has published.
    fn amounts_of(&self, _rank: usize, _amounts: &mut dyn Iterator<Item = &mut u64>) {}

    /// Publishes the number of rows of each expert on this rank in a step, for rank 0.
    fn publish_expert_rows(&self, _rows: &[u64]) {}

    /// Adds the rows of each expert that `rank` has published to `rows`.
    fn add_expert_rows(&self, _rank: usize, _rows: &mut [u64]) {}

    /// Passes this rank's tracks of the timeline to rank 0.
    fn publish_tracks(&self, _tracks: Vec<Recorder>) {}

    /// The tracks of all ranks, once they are published; `own` are those of rank 0.
    fn all_tracks(&self, own: Vec<Recorder>) -> Vec<Recorder> {
        own
    }

    /// Lets another rank run, in a test that schedules ranks.
    fn pass(&self) -> Result<()> {
        Ok(())
    }

    /// Reports that this rank has no runnable work, in a test that schedules ranks.
    ///
    /// # Errors
    /// `Resource` when no rank has runnable work: a deadlock.
    fn pass_idle(&self) -> Result<()> {
        Err(Error::resource("wait for the step", "no operation is in progress: a deadlock in the step protocol"))
    }

    /// On rank 0, issues an order to all other ranks, once they have completed the order before it.
    fn give_order(&mut self, _dev: &mut D, _order: Order, _words: OrderWords) -> Result<()> {
        Ok(())
    }

    /// On rank 0, waits until all other ranks have completed their order.
    fn await_done(&mut self, _dev: &mut D) -> Result<()> {
        Ok(())
    }

    /// Waits for the order that rank 0 issues after `seen` other orders.
    ///
    /// # Errors
    /// `Resource` on a single rank; the failure that ended another rank.
    fn next_order(&mut self, _dev: &mut D, _seen: u64) -> Result<(Order, OrderWords)> {
        Err(Error::resource("wait for an order", "this rank is the only one"))
    }

    /// Publishes that this rank has completed its order.
    fn publish_done(&self) {}

    /// The plan that all ranks change to.
    fn announced(&self) -> Option<Plan> {
        None
    }

    /// Index in this rank's memory of a part of a step's micro-batches, if the part belongs to this rank. Parts are counted micro-batch by
    /// micro-batch, with one part for each rank of a sequence group.
    fn place(&self, part: usize) -> Option<usize> {
        Some(part)
    }

    /// On rank 0, takes the buffer for a micro-batch of other ranks.
    fn room(&mut self) -> Vec<i32> {
        Vec::new()
    }

    /// Returns the buffer.
    fn keep_room(&mut self, _room: Vec<i32>) {}

    /// Sends a part of a micro-batch to its rank.
    fn send_part(&mut self, _part: usize, _words: &mut dyn Iterator<Item = &[i32]>) {}

    /// Copies the micro-batch for index `place` of this rank's memory from the words that rank 0 has sent, if it has.
    fn sent_batch(&self, _place: usize, _memory: &mut [i32]) {}

    /// Writes the words that belong to an order, for rank 0 or from rank 0, beginning at `start`.
    fn post(&self, _start: usize, _words: &[f32]) {}

    /// Reads these words.
    fn mail(&self, _start: usize, _words: &mut [f32]) {}

    /// Words of state that one order can carry. A single rank sends no state.
    fn mail_words(&self) -> usize {
        usize::MAX
    }
}

/// Exchange of one device: its slices are the whole buckets, and it has no peers.
#[derive(Debug)]
pub(crate) struct SingleRank {
    slices: Slices,
    /// Sums of the shares' gradients so far, if a step has several shares.
    sums: Option<PartialSums>,
    partial_sums: usize,
    /// Index of the current share.
    partial_sum: usize,
    norm_sq: NormSq,
    reported: Option<(bool, f32)>,
    /// Sum of the shares' losses that were published last.
    losses: f64,
}

impl SingleRank {
    /// # Errors
    /// `Resource` when memory for sums is needed and not available.
    pub(in crate::engine) fn new<D: Kernels>(sides: Sides<'_, D>, plan: &Plan) -> Result<Self> {
        let sums = (plan.recipe.step.shares > 1).then(|| PartialSums::new(plan, sides));
        Ok(Self {
            slices: Slices::new(plan.placement.layout.clone(), 0, 1),
            sums: sums.transpose()?,
            partial_sums: plan.recipe.step.shares,
            partial_sum: 0,
            norm_sq: NormSq(0.0),
            reported: None,
            losses: 0.0,
        })
    }
}

impl<D: Kernels> Exchange<D> for SingleRank {
    fn sums_on(&self) -> Stream {
        Stream::Compute
    }

    fn slices(&self) -> &Slices {
        &self.slices
    }

    fn rearrange(&mut self, sides: Sides<'_, D>, layout: &BucketLayout) -> Result<()> {
        self.slices = Slices::new(layout.clone(), 0, 1);
        self.sums.as_mut().map_or(Ok(()), |sums| sums.give_back(sides))
    }

    fn take(&mut self, sides: Sides<'_, D>, plan: &Plan) -> Result<()> {
        self.sums.as_mut().map_or(Ok(()), |sums| sums.take(plan, sides))
    }

    fn written(&mut self, dev: &mut D, grads: DeviceSlice, bucket: usize) -> Result<bool> {
        let (range, partial_sum) = (self.slices.global(bucket), self.partial_sum);
        let last = partial_sum + 1 == self.partial_sums;
        if let Some(sums) = &mut self.sums {
            sums.add(dev, grads.slice(range.start, range.len()), bucket, &range, partial_sum)?;
        }
        if range.end == self.slices.elems() {
            self.partial_sum = (partial_sum + 1) % self.partial_sums;
        }
        Ok(last)
    }

    fn may_overwrite(&mut self, dev: &mut D, bucket: usize) -> Result<bool> {
        self.sums.as_ref().map_or(Ok(()), |sums| sums.wait_for(dev, bucket)).map(|()| true)
    }

    fn crossed(&mut self) -> [u64; 2] {
        self.sums.as_mut().map_or([0; 2], PartialSums::crossed)
    }

    fn add_norm_partials(&mut self, norm_partials: &[f32]) {
        self.norm_sq = norm::fold(self.norm_sq, norm_partials);
    }

    fn report(&mut self, _step: u64, nonfinite: bool, losses: &[f32]) {
        <Self as Exchange<D>>::publish_losses(self, losses);
        self.reported = Some((nonfinite, self.losses as f32));
    }

    fn publish_losses(&mut self, losses: &[f32]) {
        self.losses = losses.iter().map(|&loss| f64::from(loss)).sum();
    }

    fn losses(&self) -> f64 {
        self.losses
    }

    fn outcome(&mut self, _step: u64) -> Option<StepOutcome> {
        let (nonfinite, loss) = self.reported.take()?;
        let norm_sq = std::mem::replace(&mut self.norm_sq, NormSq(0.0)).0;
        Some(StepOutcome { norm_sq, nonfinite, loss })
    }
}
