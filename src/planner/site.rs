//! Where a run takes place: its machine and its processes. No bit of a result depends on them.

use super::machine::Machine;
use crate::faults::RankFault;
use crate::host::memory_policy::MemoryPolicy;
use crate::optim::simd::Isa;
use crate::request::choices::SaveMemory;
use std::path::PathBuf;

/// The machine and the processes of a run.
#[derive(Clone, Debug)]
pub struct Site {
    /// The machine of each process, with the limits of the settings.
    pub machine: Machine,
    /// Devices that train together. Each computes its shares and owns its slice of every bucket.
    pub ranks: usize,
    /// Processes of the run. All have equally many ranks.
    pub processes: usize,
    /// Whether NCCL transfers the data between processes.
    pub by_nccl: bool,
    /// Directories that are searched first for NVIDIA's libraries.
    pub cuda_libraries: Vec<PathBuf>,
    /// Instruction set of the optimizer.
    pub isa: Isa,
    /// Number of compute threads, and of optimizer workers.
    pub threads: usize,
    /// Bytes of the training data held in memory and of its order.
    pub data_bytes: usize,
    /// Source of host memory. The caller that starts the engine sets it, because it knows the machine.
    pub host_memory: MemoryPolicy,
    /// Host memory for copies of states that wait to be saved.
    pub save_memory: SaveMemory,
    /// Capacity of each timeline track in spans; 0 records none.
    pub trace_spans: usize,
    /// Whether the plan is for another machine. Its instruction set is unknown.
    pub for_other_machine: bool,
    /// A line about the implementation of expert products and its reason; `None` without experts.
    pub expert_products_note: Option<String>,
    /// Ranks with an injected fault.
    pub rank_faults: Vec<RankFault>,
    /// Reorder events with this seed (cpu device).
    pub adversary: Option<u64>,
}
