//! The port of an exchange for gradients.

use crate::device::{DeviceSlice, Kernels, Stream};
use crate::error::Result;
use crate::model::Model;
use crate::model::sequence::Handover;
use std::ops::Range;

/// Gradients and activations that ranks exchange during the passes of a step.
///
/// Methods poll, unless their documentation says that they wait.
pub(crate) trait GradientPort<D: Kernels> {
    /// The stream that computes sums and everything after them until the gradient leaves.
    fn sums_on(&self) -> Stream;

    /// The gradient of this round's partial sum of `bucket` is enqueued, in the flat `grads`. Returns true if it is the gradient of the whole
    /// step. Over NCCL it waits until the local ranks have written the gradients that must be exchanged first.
    fn written(&mut self, dev: &mut D, grads: DeviceSlice, bucket: usize) -> Result<bool>;

    /// The gradient of a partial sum is enqueued for `range`, in the flat `grads`, in a step of several segments of layers. It is added to the
    /// sums of the range; after the last partial sum their sum replaces it. Returns true if this addition is enqueued; if not, it follows in
    /// [`GradientPort::poll`].
    ///
    /// # Errors
    /// Errors of the device; the failure that ended another rank.
    fn sum_range(&mut self, dev: &mut D, grads: DeviceSlice, range: &Range<usize>, partial_sum: usize) -> Result<bool>;

    /// Enqueues the sums with all parts available. Returns a bucket when its gradient of the whole step is enqueued.
    fn poll(&mut self, _dev: &mut D, _grads: DeviceSlice) -> Result<Option<usize>> {
        Ok(None)
    }

    /// Whether the sums of all written gradients are enqueued.
    fn is_summed(&self) -> bool {
        true
    }

    /// Whether the gradients before the flat position `end` that were written last may be overwritten: all ranks have enqueued their pulls and
    /// sums. If so, later work on the compute stream waits for these.
    fn may_overwrite(&mut self, dev: &mut D, end: usize) -> Result<bool>;

    /// Location of the step's gradient of `flat`, a part of this rank's slice of a bucket that begins at `local` in the local order.
    fn own_grads(&self, grads: DeviceSlice, flat: &Range<usize>, _local: usize) -> DeviceSlice {
        grads.slice(flat.start, flat.len())
    }

    /// Bytes of gradient sums that crossed the link since the last call: to the device, and to the host.
    fn crossed(&mut self) -> [u64; 2] {
        [0; 2]
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
}
