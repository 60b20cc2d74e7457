//! Memory nodes of the optimizer's workers.

/// The nearest memory node of each worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerNodes {
    /// Number of nodes that share a job's pieces, in order and equally; at least 1.
    pub nodes: usize,
    /// Index of each worker's node; a worker beyond the end is on the first node.
    pub(crate) of_worker: Vec<usize>,
}

impl Default for WorkerNodes {
    /// One node.
    fn default() -> Self {
        Self { nodes: 1, of_worker: Vec::new() }
    }
}
