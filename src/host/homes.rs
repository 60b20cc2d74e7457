//! Where the optimizer's workers are at home.

/// Which memory node each worker is near.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Homes {
    /// Nodes that share a job's pieces, in order and equally; at least 1.
    pub nodes: usize,
    /// Index of each worker's node; a worker that is not named is on the first.
    pub(crate) of_worker: Vec<usize>,
}

impl Default for Homes {
    /// One node.
    fn default() -> Self {
        Self { nodes: 1, of_worker: Vec::new() }
    }
}
