//! Words for memory that every floor shares: the space it lies in, whose the device's is, and what the device reaches of the host's.

use std::fmt;

/// The memory space that something lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemorySpace {
    Device,
    /// In host memory.
    Host,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceMemory {
    /// The host's: that of the CPU device, and of GPUs with one memory for both.
    Shared,
    Own {
        /// Free bytes.
        bytes: u64,
        /// What it sees of the host's.
        addressing: Addressing,
    },
}

/// Memory that repeats: below `ringed_elems`, elements whose distance is a multiple of `period_elems` are one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingShape {
    /// Where the ring ends; elements from there on are their own.
    pub ringed_elems: usize,
    /// Elements that exist of the ring.
    pub period_elems: usize,
}

/// What a device's kernels reach of the host's memory by the host's own addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Addressing {
    /// Nothing that both may use at the same time.
    Separate,
    /// Managed memory: two page tables that agree, and pages that move.
    Managed,
    /// All of it: the device walks the host's page tables (GH200).
    #[serde(rename = "shared")]
    Coherent,
}

impl fmt::Display for Addressing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Separate => "separate memories",
            Self::Managed => "managed memory, whose pages move",
            Self::Coherent => "page tables shared with the host, whose memory is used directly",
        })
    }
}
