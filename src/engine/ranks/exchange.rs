//! Exchange between ranks: gradients are summed over the partial sums of a step (parts of its micro-batches, `--gradient-shares`), and
//! each rank receives new weights from their owners. The driver calls the methods of five ports in its loop and from `pump`. [`SingleRank`]
//! implements them for one device, `peer_exchange.rs` for several ranks.

mod gradient_port;
mod order_port;
mod rendezvous_port;
mod report_port;
mod single_rank;
mod weight_port;

pub(crate) use gradient_port::GradientPort;
pub(crate) use order_port::{OrderPort, OrderWords};
pub(crate) use rendezvous_port::RendezvousPort;
pub(crate) use report_port::ReportPort;
pub(crate) use single_rank::SingleRank;
pub(crate) use weight_port::WeightPort;

use crate::bucket::layout::BucketLayout;
use crate::bucket::slices::Slices;
use crate::device::{Kernels, Sides};
use crate::error::Result;
use crate::planner::plan::Plan;

/// Exchange of slices between ranks. Buckets pass in flat order, once a round. In a round every rank computes one partial sum.
pub(crate) trait Exchange<D: Kernels>: GradientPort<D> + WeightPort<D> + ReportPort<D> + OrderPort<D> + RendezvousPort<D> {
    /// The slices that this rank owns.
    fn slices(&self) -> &Slices;

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
}
