//! The port of an exchange for weights.

use crate::device::{DeviceSlice, Kernels};
use crate::error::Result;
use std::ops::Range;

/// New weights that each rank receives from their owners, and weights that are fetched for a module.
///
/// Methods poll, unless their documentation says that they wait.
pub(crate) trait WeightPort<D: Kernels> {
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

    /// Whether the weights started by [`WeightPort::bring`] have arrived at all ranks of this process, or are enqueued to.
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
}
