//! The exchange of one device.

use super::{Exchange, GradientPort, OrderPort, RendezvousPort, ReportPort, WeightPort};
use crate::bucket::layout::BucketLayout;
use crate::bucket::slices::Slices;
use crate::device::{DeviceSlice, Kernels, Sides, Stream};
use crate::engine::ranks::sums::PartialSums;
use crate::error::Result;
use crate::optim::norm;
use crate::pair_loss::{REPORT_WORDS, report_sums};
use crate::planner::plan::Plan;
use crate::ranks::progress::StepOutcome;
use crate::units::NormSq;
use std::ops::Range;

/// Exchange of one device: its slices are the whole buckets, and it has no peers.
#[derive(Debug)]
pub(crate) struct SingleRank {
    slices: Slices,
    /// Sums of the partial sums' gradients so far, if a step has several partial sums.
    sums: Option<PartialSums>,
    partial_sums: usize,
    /// Index of the current partial sum.
    partial_sum: usize,
    norm_sq: NormSq,
    reported: Option<(bool, f32)>,
    /// Sums of the numbers of the partial sums that were published last.
    sums_reported: [f64; REPORT_WORDS],
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
            sums_reported: [0.0; REPORT_WORDS],
        })
    }
}

impl<D: Kernels> GradientPort<D> for SingleRank {
    fn sums_on(&self) -> Stream {
        Stream::Compute
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

    fn sum_range(&mut self, dev: &mut D, grads: DeviceSlice, range: &Range<usize>, partial_sum: usize) -> Result<bool> {
        let grads = grads.slice(range.start, range.len());
        self.sums.as_ref().map_or(Ok(()), |sums| sums.add_range(dev, grads, range, partial_sum)).map(|()| true)
    }

    fn may_overwrite(&mut self, dev: &mut D, end: usize) -> Result<bool> {
        let Some(bucket) = self.slices.layout().overlapping(0..end).last() else { return Ok(true) };
        self.sums.as_ref().map_or(Ok(()), |sums| sums.wait_for(dev, bucket)).map(|()| true)
    }

    fn crossed(&mut self) -> [u64; 2] {
        self.sums.as_mut().map_or([0; 2], PartialSums::crossed)
    }
}

impl<D: Kernels> WeightPort<D> for SingleRank {}

impl<D: Kernels> ReportPort<D> for SingleRank {
    fn add_norm_partials(&mut self, norm_partials: &[f32]) {
        self.norm_sq = norm::fold(self.norm_sq, norm_partials);
    }

    fn report(&mut self, _step: u64, nonfinite: bool, losses: &[f32]) {
        <Self as ReportPort<D>>::publish_losses(self, losses);
        self.reported = Some((nonfinite, self.sums_reported[0] as f32));
    }

    fn outcome(&mut self, _step: u64) -> Option<StepOutcome> {
        let (nonfinite, loss) = self.reported.take()?;
        let norm_sq = std::mem::replace(&mut self.norm_sq, NormSq(0.0)).0;
        Some(StepOutcome { norm_sq, nonfinite, loss })
    }

    fn publish_losses(&mut self, losses: &[f32]) {
        self.sums_reported = report_sums(losses.iter().copied(), losses.len() / self.partial_sums);
    }

    fn reported(&self) -> [f64; REPORT_WORDS] {
        self.sums_reported
    }
}

impl<D: Kernels> OrderPort<D> for SingleRank {}

impl<D: Kernels> RendezvousPort<D> for SingleRank {}

impl<D: Kernels> Exchange<D> for SingleRank {
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
}
