//! Types for memory that all modules share: memory spaces, the device's memory, rings, and the device's access to host memory.

use std::fmt;

/// The memory space of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemorySpace {
    Device,
    /// Host memory.
    Host,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceMemory {
    /// The host's memory, as for the CPU device, and for GPUs that share one memory with the host.
    Shared,
    Own {
        /// Free bytes.
        bytes: u64,
        /// The device's access to host memory.
        addressing: Addressing,
    },
}

/// Shape of a ring: below `ringed_elems`, elements at a distance of a multiple of `period_elems` are the same memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingShape {
    /// End of the ring; later elements are ordinary memory.
    pub ringed_elems: usize,
    /// Elements of physical memory in the ring.
    pub period_elems: usize,
}

/// Access of a device's kernels to host memory by the host's own addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Addressing {
    /// No memory that both can use at the same time.
    Separate,
    /// Managed memory: both have page tables for the same addresses, and pages migrate.
    Managed,
    /// All host memory: the device uses the host's page tables (GH200).
    #[serde(rename = "shared")]
    Coherent,
}

impl fmt::Display for Addressing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Separate => "separate memories",
            Self::Managed => "managed memory with pages that move",
            Self::Coherent => "page tables shared with the host: direct access to host memory",
        })
    }
}
