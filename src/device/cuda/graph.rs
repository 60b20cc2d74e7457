//! Kernels that are recorded once and enqueued as one. The engine uses none: a step's kernels are hidden behind those before
//! them. What launches would cost in a graph is measured by `device_facts`.

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
