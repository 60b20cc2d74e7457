//! How a rank's slices meet those of the others: gradients are summed over the shares of a step, and new weights come from their owners.
//! The driver calls it at points of its loop and from `pump`; nothing here blocks. [`Alone`] is one device; `pulls.rs` is several.

use super::bounce::Sides;
use super::hall::RankMemory;
pub(crate) use super::order::Order;
use super::sums::ShareSums;
use super::vitals::Vitals;
use super::watchdog::Watched;
use crate::bucket::layout::BucketLayout;
use crate::bucket::slices::Slices;
use crate::device::{DeviceSlice, EventId, Kernels, Stream};
use crate::error::{Error, Result};
use crate::model::Model;
use crate::model::sequence::Handover;
use crate::optim::norm;
use crate::planner::plan::Plan;
use crate::ranks::board::{ORDER_WORDS, StepOutcome};
use crate::trace::Recorder;
use crate::units::NormSq;
use std::ops::Range;
use std::sync::Arc;

/// What goes with an order.
pub(crate) type Words = [u64; ORDER_WORDS];

/// How the slices of ranks meet. Buckets go through it in flat order, round by round: in each, every rank computes one share.
pub(crate) trait Exchange<D: Kernels> {
    /// The stream on which sums are made, and all that follows them until the gradient leaves.
    fn sums_on(&self) -> Stream;

    /// What this rank owns.
    fn slices(&self) -> &Slices;

    /// Rank 0 tells the others which plan the next [`Order::Replan`] is about.
    fn announce(&mut self, _plan: &Plan) {}

    /// Lets the other ranks have their memory to themselves, and waits until this one has its own: nothing may be under way.
    ///
    /// # Errors
    /// The device's; what ended another rank.
    fn leave(&mut self, _dev: &mut D) -> Result<()> {
        Ok(())
    }

    /// From here on the same buckets lie in the places of `layout`. Memory that a plan decides is given back.
    ///
    /// # Errors
    /// The device's.
    fn rearrange(&mut self, sides: Sides<'_, D>, layout: &BucketLayout) -> Result<()>;

    /// Takes the memory that `plan` decides.
    ///
    /// # Errors
    /// `Resource` when there is none.
    fn take(&mut self, sides: Sides<'_, D>, plan: &Plan) -> Result<()>;

    /// Why not all ranks have their memory, of which this one may have met a `refusal`; nothing when they have.
    ///
    /// # Errors
    /// What ended another rank.
    fn agree(&mut self, refusal: Option<Error>) -> Result<Option<Error>> {
        Ok(refusal)
    }

    /// Leaves for the others what they need to know: where its memory lies, and by bucket what ends a step of its own slice of the weights.
    fn introduce(&mut self, _dev: &mut D, _memory: RankMemory, _stepped: Vec<EventId>, _vitals: &Arc<Vitals>) {}

    /// All have: finds out what they have left.
    ///
    /// # Errors
    /// `Unsupported` when this rank would compute other bits than the first; the device's.
    fn greet(&mut self, _dev: &mut D) -> Result<()> {
        Ok(())
    }

    /// Once all have come as far, opens the way from device to device, if that is how they reach each other.
    ///
    /// # Errors
    /// The device's; what ended another rank.
    fn connect(&mut self, _dev: &mut D) -> Result<()> {
        Ok(())
    }

    /// Introduces itself and greets the others once more, since memory and events are others now.
    ///
    /// # Errors
    /// The device's; what ended another rank.
    fn meet_again(&mut self, _dev: &mut D, _memory: RankMemory, _stepped: Vec<EventId>, _vitals: &Arc<Vitals>) -> Result<()> {
        Ok(())
    }

    /// What ranks that share this one's sequences lack of it is enqueued to be written.
    ///
    /// # Errors
    /// The device's; what ended another rank.
    fn hand_over(&mut self, _dev: &mut D) -> Result<()> {
        Ok(())
    }

    /// Whether all of them have said so.
    fn is_handed_over(&self) -> bool {
        true
    }

    /// Enqueues the copies of what this rank lacks of theirs, of a layer of `model`.
    ///
    /// # Errors
    /// The device's.
    fn take_over(&mut self, _dev: &mut D, _model: &Model, _what: (Handover, usize)) -> Result<()> {
        Ok(())
    }

    /// The gradient of this round's share is enqueued for `bucket`, in the flat `grads`. True when that of the step is.
    fn written(&mut self, dev: &mut D, grads: DeviceSlice, bucket: usize) -> Result<bool>;

    /// Enqueues the sums that can be; a bucket whose gradient of the step is enqueued now.
    fn poll(&mut self, _dev: &mut D, _grads: DeviceSlice) -> Result<Option<usize>> {
        Ok(None)
    }

    /// Whether all that was written is summed, as far as it was enqueued to be.
    fn is_summed(&self) -> bool {
        true
    }

    /// Whether what comes next may overwrite the gradient of `bucket`, written in this round, and those before it, as far as ranks pull
    /// and sum them; then what is computed from now on waits for that.
    fn may_overwrite(&mut self, _dev: &mut D, _bucket: usize) -> Result<bool> {
        Ok(true)
    }

    /// Where the step's gradient of `flat` lies, a part of this rank's slice of a bucket that begins at `local` of its own order.
    fn own_grads(&self, grads: DeviceSlice, flat: &Range<usize>, _local: usize) -> DeviceSlice {
        grads.slice(flat.start, flat.len())
    }

    /// Bytes of sums that crossed the link since the last call: to the device, and to the host.
    fn crossed(&mut self) -> [u64; 2] {
        [0; 2]
    }

    /// The next partial sums of the norm, in this rank's own order.
    fn add_partials(&mut self, partials: &[f32]);

    /// The rest of what this rank reports of `step`: whether one of its gradients is infinite or NaN, the losses of its shares.
    fn report(&mut self, step: u64, nonfinite: bool, losses: &[f32]);

    /// What all ranks report of `step`, once that is known. Asked for until it is.
    fn outcome(&mut self, step: u64) -> Option<StepOutcome>;

    /// Tells the losses of this rank's shares, outside of a step.
    fn tell_losses(&mut self, losses: &[f32]);

    /// The sum of all losses that were told last, in the order of shares; of several ranks once all have carried out their orders.
    fn losses(&self) -> f64;

    /// From here on the weights of every bucket are others: those of the next version.
    fn next_version(&mut self) {}

    /// Whether the others wait to hear of any bucket that its weights are final.
    fn is_owing(&self) -> bool {
        false
    }

    /// Whether the others wait to hear that this rank's weights of `bucket` are final.
    fn is_owed(&self, _bucket: usize) -> bool {
        false
    }

    /// They are, and what writes them is enqueued.
    fn settle(&mut self, _bucket: usize) {}

    /// Enqueues copies of the others' weights that are final; true when there were any.
    fn gather(&mut self, _dev: &mut D, _weights: DeviceSlice) -> Result<bool> {
        Ok(false)
    }

    /// Whether the others' weights of `bucket` have come, as far as that is enqueued.
    fn is_gathered(&self, _bucket: usize) -> bool {
        true
    }

    /// Buckets whose weights ranks have to swap, the last one first, before anybody computes with those of `bucket`. They are the same on all.
    fn to_swap(&self, _bucket: usize) -> Range<usize> {
        0..0
    }

    /// Enqueues that of `bucket`, of which this rank's weights are final.
    ///
    /// # Errors
    /// The device's; what ended another rank.
    fn swap_weights(&mut self, _dev: &mut D, _bucket: usize) -> Result<()> {
        Ok(())
    }

    /// All swaps so far, as one number: that of every rank, if all go on in one order.
    fn swapped(&self) -> u64 {
        0
    }

    /// Where this rank's weights of `flat` lie, a part of its slice of a bucket that begins at `local` of its own order.
    fn own_weights(&self, weights: DeviceSlice, flat: &Range<usize>, _local: usize) -> DeviceSlice {
        weights.slice(flat.start, flat.len())
    }

    /// Whether a module's weights are fetched before those of the module before it are computed with: where nothing is computed while they come.
    fn fetches_ahead(&self) -> bool {
        false
    }

    /// Has weights of `flat` come from other processes, where they do with each fetch, as soon as nobody of this one pulls what they overwrite;
    /// whether that is so.
    ///
    /// # Errors
    /// The device's; what ended another rank.
    fn bring(&mut self, _dev: &mut D, _flat: &Range<usize>) -> Result<bool> {
        Ok(true)
    }

    /// Whether they have come to all ranks of this process, as far as that is enqueued.
    ///
    /// # Errors
    /// The device's.
    fn is_brought(&mut self, _dev: &mut D, _flat: &Range<usize>) -> Result<bool> {
        Ok(true)
    }

    /// Enqueues copies of the weights of `flat` from all other ranks that keep their slices alone.
    fn fetch(&mut self, _dev: &mut D, _weights: DeviceSlice, _flat: Range<usize>) -> Result<()> {
        Ok(())
    }

    /// Enqueues copies of what this rank keeps alone of the weights of `flat`, which were fetched, between two modules on [`Stream::Compute`]:
    /// copies within a GPU take multiprocessors, and beside a module they would wait for each kernel to end.
    ///
    /// [`Stream::Compute`]: crate::device::Stream::Compute
    ///
    /// # Errors
    /// The device's.
    fn place_own(&self, _dev: &mut D, _weights: DeviceSlice, _flat: &Range<usize>) -> Result<()> {
        Ok(())
    }

    /// What is computed from now on finds the others' weights of `bucket`.
    fn arrive(&self, _dev: &mut D, _bucket: usize) -> Result<()> {
        Ok(())
    }

    /// Whether all ranks can go on, as far as is known.
    ///
    /// # Errors
    /// What ended the first that cannot.
    fn check(&self) -> Result<()> {
        Ok(())
    }

    /// What ended this rank is what ends all, unless another has ended before: what did, and whose it is.
    fn blame(&self, error: Error) -> Error {
        error
    }

    /// This rank, which has `vitals`, and all others.
    fn watched(&self, vitals: Arc<Vitals>) -> Watched {
        Watched::alone(vitals)
    }

    /// Nanoseconds so far in which the compute stream waited for what comes from peers.
    fn waited_ns(&self, _dev: &D) -> u64 {
        0
    }

    /// When a peer published last, by the device's clock; 0 before, and without peers.
    fn published_ns(&self) -> u64 {
        0
    }

    /// Tells rank 0 what this one did in a step.
    fn publish_amounts(&self, _amounts: &mut dyn Iterator<Item = u64>) {}

    /// What `rank` has told of its last step.
    fn amounts_of(&self, _rank: usize, _amounts: &mut dyn Iterator<Item = &mut u64>) {}

    /// Tells rank 0 how many rows each expert had on this one in a step.
    fn publish_expert_rows(&self, _rows: &[u64]) {}

    /// Adds what `rank` has told of them.
    fn add_expert_rows(&self, _rank: usize, _rows: &mut [u64]) {}

    /// Hands the tracks of the timeline over to rank 0.
    fn publish_tracks(&self, _tracks: Vec<Recorder>) {}

    /// The tracks of all ranks, once they are handed over; `own` are rank 0's.
    fn all_tracks(&self, own: Vec<Recorder>) -> Vec<Recorder> {
        own
    }

    /// Lets another rank go on, in a test that decides who does.
    fn pass(&self) -> Result<()> {
        Ok(())
    }

    /// In a test that decides who goes on: nothing is left to do here.
    ///
    /// # Errors
    /// `Resource` when that is so everywhere.
    fn pass_idle(&self) -> Result<()> {
        Err(Error::resource("wait for the step", "nothing is under way: a deadlock in the step protocol"))
    }

    /// Rank 0 has the others do this, too, once they have done what came before.
    fn lead(&mut self, _dev: &mut D, _order: Order, _words: Words) -> Result<()> {
        Ok(())
    }

    /// Rank 0 waits until the others have done what they were told.
    fn await_done(&mut self, _dev: &mut D) -> Result<()> {
        Ok(())
    }

    /// What rank 0 has this one do after `seen` other orders, once it has said so.
    ///
    /// # Errors
    /// `Resource` where nobody gives orders; what ended another rank.
    fn next_order(&mut self, _dev: &mut D, _seen: u64) -> Result<(Order, Words)> {
        Err(Error::resource("wait for an order", "this rank is the only one"))
    }

    /// It is done.
    fn obeyed(&self) {}

    /// The plan that all go over to.
    fn announced(&self) -> Option<Plan> {
        None
    }

    /// Where a part of a step's micro-batches lies in this rank's memory, if it is this rank's. Parts are counted micro-batch by micro-batch,
    /// one for each of the ranks that share its sequences.
    fn place(&self, part: usize) -> Option<usize> {
        Some(part)
    }

    /// Rank 0's room for a micro-batch of other ranks.
    fn room(&mut self) -> Vec<i32> {
        Vec::new()
    }

    /// Takes the room back.
    fn keep_room(&mut self, _room: Vec<i32>) {}

    /// Sends these `words` to the rank whose part of a micro-batch they are.
    fn send_part(&mut self, _part: usize, _words: &mut dyn Iterator<Item = &[i32]>) {}

    /// What lies at `place` in this rank's memory of micro-batches, if rank 0 has sent it.
    fn sent_batch(&self, _place: usize, _memory: &mut [i32]) {}

    /// Words for rank 0 to read, or of rank 0, behind an order: from `start` on.
    fn post(&self, _start: usize, _words: &[f32]) {}

    /// Those words.
    fn mail(&self, _start: usize, _words: &mut [f32]) {}

    /// State that passes at once: nothing is passed on where one rank has all.
    fn mail_words(&self) -> usize {
        usize::MAX
    }
}

/// One device: its slices are the buckets, and nobody else has weights.
#[derive(Debug)]
pub(crate) struct Alone {
    slices: Slices,
    /// Of the shares' gradients so far, where a step has several shares.
    sums: Option<ShareSums>,
    shares: usize,
    /// Shares that are whole; of the last bucket that was written.
    share: usize,
    norm_sq: NormSq,
    reported: Option<(bool, f32)>,
    /// Sum of the shares' losses that were told last.
    losses: f64,
}

impl Alone {
    /// # Errors
    /// `Resource` when memory for sums is needed and there is none.
    pub(super) fn new<D: Kernels>(sides: Sides<'_, D>, plan: &Plan) -> Result<Self> {
        let sums = (plan.shares > 1).then(|| ShareSums::new(plan, sides));
        Ok(Self {
            slices: Slices::new(plan.layout.clone(), 0, 1),
            sums: sums.transpose()?,
            shares: plan.shares,
            share: 0,
            norm_sq: NormSq(0.0),
            reported: None,
            losses: 0.0,
        })
    }
}

impl<D: Kernels> Exchange<D> for Alone {
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
        let (range, share) = (self.slices.global(bucket), self.share);
        let last = share + 1 == self.shares;
        if let Some(sums) = &mut self.sums {
            sums.add(dev, grads.slice(range.start, range.len()), bucket, &range, share)?;
        }
        if range.end == self.slices.elems() {
            self.share = (share + 1) % self.shares;
        }
        Ok(last)
    }

    fn may_overwrite(&mut self, dev: &mut D, bucket: usize) -> Result<bool> {
        self.sums.as_ref().map_or(Ok(()), |sums| sums.wait_for(dev, bucket)).map(|()| true)
    }

    fn crossed(&mut self) -> [u64; 2] {
        self.sums.as_mut().map_or([0; 2], ShareSums::crossed)
    }

    fn add_partials(&mut self, partials: &[f32]) {
        self.norm_sq = norm::fold(self.norm_sq, partials);
    }

    fn report(&mut self, _step: u64, nonfinite: bool, losses: &[f32]) {
        <Self as Exchange<D>>::tell_losses(self, losses);
        self.reported = Some((nonfinite, self.losses as f32));
    }

    fn tell_losses(&mut self, losses: &[f32]) {
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
