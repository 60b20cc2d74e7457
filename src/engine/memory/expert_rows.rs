//! Counts the rows of each expert in a step. The routers' choices are copied from the device after each forward pass, in one small copy,
//! and are read when the step's loss has arrived. No thread waits for them.

use crate::device::{Device, DeviceSlice, Sides, Stream};
use crate::error::Result;
use crate::host::pinned::{HostMemory, PinnedSlice};
use crate::model::activations::{bounds_elems, expert_bounds};
use crate::model::shape::ModelShape;
use std::ops::Range;

/// How evenly routers distributed the rows of a step to experts.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct ExpertLoad {
    /// Rows of the expert with the most rows divided by the mean of its layer, in the least balanced layer. A value of 1 is even.
    #[serde(rename = "expert_largest_over_mean")]
    pub largest_over_mean: f64,
    /// Fraction of all layers' experts that had no row.
    #[serde(rename = "expert_unused_share")]
    pub unused_fraction: f64,
}

/// Rows of the experts of all layers; empty for a model without experts.
pub(in crate::engine) struct ExpertRows {
    /// By layer, the indices of its experts' segment bounds in the bounds of a micro-batch. The last index is the end of the last segment.
    bounds: Vec<Range<usize>>,
    /// The bounds of every micro-batch of a step.
    host_bounds: PinnedSlice,
    micro_batch_bytes: usize,
    /// Rows by layer and expert, as counted last.
    pub(in crate::engine) rows: Vec<u64>,
}

impl ExpertRows {
    pub(in crate::engine) fn new<D: Device>(shape: &ModelShape, micro_batches: usize, (dev, host): Sides<'_, D>) -> Result<Self> {
        let micro_batch_bytes = 4 * bounds_elems(shape);
        let host_bounds = host.alloc("rows of experts", micro_batches * micro_batch_bytes)?;
        dev.pin(host_bounds)?;
        let bounds: Vec<_> = expert_bounds(shape).collect();
        let rows = vec![0; bounds.iter().map(|bounds| bounds.len() - 1).sum()];
        Ok(Self { bounds, host_bounds, micro_batch_bytes, rows })
    }

    /// Enqueues the copy of `bounds`, the routers' choices, after the forward pass of micro-batch `micro_step`.
    pub(in crate::engine) fn copy<D: Device>(&self, dev: &mut D, bounds: DeviceSlice, micro_step: usize) -> Result<()> {
        dev.copy_d2h(Stream::Compute, bounds, self.host_bounds.slice(micro_step * self.micro_batch_bytes, self.micro_batch_bytes))
    }

    /// Like [`Self::copy`], for a part of the bounds.
    pub(in crate::engine) fn copy_part<D: Device>(
        &self,
        dev: &mut D,
        bounds: DeviceSlice,
        micro_step: usize,
        part: Range<usize>,
    ) -> Result<()> {
        let host = self.host_bounds.slice(micro_step * self.micro_batch_bytes + 4 * part.start, 4 * part.len());
        dev.copy_d2h(Stream::Compute, bounds.slice(part.start, part.len()), host)
    }

    /// Enqueues the copy of the bounds of micro-batch `micro_step` back to the device.
    pub(in crate::engine) fn restore<D: Device>(&self, dev: &mut D, bounds: DeviceSlice, micro_step: usize) -> Result<()> {
        dev.copy_h2d(Stream::Compute, self.host_bounds.slice(micro_step * self.micro_batch_bytes, self.micro_batch_bytes), bounds)
    }

    /// Adds the micro-batches of this rank, once all copies have arrived.
    pub(in crate::engine) fn count(&mut self, host: &HostMemory) {
        self.rows.fill(0);
        if !self.rows.is_empty() {
            for bounds in host.lend::<i32>(self.host_bounds).chunks_exact(self.micro_batch_bytes / 4) {
                let segments = self.bounds.iter().flat_map(|layer| bounds[layer.clone()].windows(2));
                for (rows, ends) in self.rows.iter_mut().zip(segments) {
                    *rows += ends[0].abs_diff(ends[1]) as u64;
                }
            }
        }
    }

    /// The load of the counted rows. `None` if no expert had a row, as on a device that computes nothing.
    pub(in crate::engine) fn load(&self) -> Option<ExpertLoad> {
        let (mut largest_over_mean, mut rest) = (0f64, &self.rows[..]);
        for layer in &self.bounds {
            let (rows, others) = rest.split_at(layer.len() - 1);
            let mean = rows.iter().sum::<u64>() as f64 / rows.len() as f64;
            largest_over_mean = largest_over_mean.max(rows.iter().max().map_or(0.0, |&largest| largest as f64 / mean));
            rest = others;
        }
        let unused = self.rows.iter().filter(|&&rows| rows == 0).count();
        let load = ExpertLoad { largest_over_mean, unused_fraction: unused as f64 / self.rows.len() as f64 };
        (unused < self.rows.len()).then_some(load)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(bounds: &[Range<usize>], micro_batches: &[&[i32]]) -> (Vec<u64>, Option<ExpertLoad>) {
        let mut host = HostMemory::default();
        let elems = micro_batches.first().map_or(0, |bounds| bounds.len());
        let host_bounds = host.alloc("rows of experts", 4 * elems * micro_batches.len()).unwrap();
        host.lend_mut::<i32>(host_bounds).copy_from_slice(&micro_batches.concat());
        let rows = vec![7; bounds.iter().map(|bounds| bounds.len() - 1).sum()];
        let mut expert_rows = ExpertRows { bounds: bounds.to_vec(), host_bounds, micro_batch_bytes: 4 * elems, rows };
        expert_rows.count(&host);
        (expert_rows.rows.clone(), expert_rows.load())
    }

    #[test]
    fn rows_of_micro_batches_add_up_by_layer() {
        // Two layers, of two and of three experts; the element between their bounds is never written.
        let (rows, load) = counted(&[0..3, 4..8], &[&[0, 2, 8, -9, 0, 0, 1, 8], &[0, 0, 8, -9, 0, 0, 8, 8]]);
        assert_eq!(rows, [2, 14, 0, 9, 7]);
        assert_eq!(load, Some(ExpertLoad { largest_over_mean: 14.0 / 8.0, unused_fraction: 0.2 }));
        let (_, even) = counted(&[0..3, 3..5], &[&[0, 4, 8, 0, 8]]);
        assert_eq!(even, Some(ExpertLoad { largest_over_mean: 1.0, unused_fraction: 0.0 }));
    }

    #[test]
    fn a_device_that_computes_nothing_and_a_model_without_experts_have_no_load() {
        assert_eq!(counted(&[0..3, 3..5], &[&[0, 0, 0, 0, 0]]), (vec![0, 0, 0], None));
        assert_eq!(counted(&[], &[]), (vec![], None));
    }
}
