//! CUDA graphs: kernels that are recorded once and enqueued together. The engine uses none, because the launches of a step overlap with
//! running kernels. `device_facts` measures the launch cost of kernels in a graph.

use cust::sys;

#[derive(Clone, Copy, Debug)]
pub struct GraphId(pub(super) u32);

/// A recorded graph, ready to be enqueued.
pub(super) struct GraphExec(pub(super) sys::CUgraphExec);

impl Drop for GraphExec {
    fn drop(&mut self) {
        // SAFETY: made by `record_graph`, destroyed once.
        unsafe { sys::cuGraphExecDestroy(self.0) };
    }
}
