//! Memory bandwidth of threads that only copy, run a triad or read, similar to the STREAM benchmark.
#![allow(unsafe_code)]

use std::hint::black_box;
use superoffload::Result;
use superoffload::internals::host::{HostMemory, Job, PinnedSlice};
use superoffload::internals::optim::{AdamKernels, Stores, Weights};

/// fp32 elements of a piece.
const PIECE_ELEMS: usize = 32 << 10;

/// The operation on every element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ArrayKernel {
    /// `sum += a`: 4 bytes.
    Read,
    /// `c = a` through the caches: 8 bytes, and 4 that the caches read before they write.
    Copy,
    /// `c = a` past the caches: 8 bytes.
    CopyPast,
    /// `c = a + 3 b`: 12 bytes, and 4 as above.
    Triad,
}

impl ArrayKernel {
    /// All kernels.
    pub const ALL: [Self; 4] = [Self::Read, Self::Copy, Self::CopyPast, Self::Triad];

    /// Name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Copy => "copy",
            Self::CopyPast => "copy past caches",
            Self::Triad => "triad",
        }
    }

    /// Bytes per element, as STREAM counts them.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Read => 4,
            Self::Copy | Self::CopyPast => 8,
            Self::Triad => 12,
        }
    }
}

/// Three arrays in host memory.
#[derive(Clone, Copy, Debug)]
pub struct Arrays {
    a: PinnedSlice,
    b: PinnedSlice,
    c: PinnedSlice,
    elems: usize,
}

impl Arrays {
    /// Allocates arrays of `elems` elements: all elements of `a` are 1, all elements of `b` are 2.
    ///
    /// # Errors
    /// `Resource` if there is not enough memory.
    ///
    /// # Safety
    /// `host` outlives all jobs on these arrays, and one job runs at a time.
    pub unsafe fn new(host: &mut HostMemory, elems: usize) -> Result<Self> {
        let mut array = |name| host.alloc(name, elems * 4);
        let arrays = Self { a: array("a")?, b: array("b")?, c: array("c")?, elems };
        crate::fill(host, arrays.a, 1.0f32);
        crate::fill(host, arrays.b, 2.0f32);
        crate::fill(host, arrays.c, 0.0f32);
        Ok(arrays)
    }

    /// Number of elements of an array.
    pub fn elems(self) -> usize {
        self.elems
    }

    /// One pass of `kernel` over the arrays.
    pub fn job(self, kernel: ArrayKernel, adam: AdamKernels) -> ArrayPass {
        ArrayPass { arrays: self, kernel, adam: adam.with_stores(Stores::Streaming) }
    }

    /// Whether `kernel`, the last kernel that ran, wrote the expected values to memory of `host`.
    pub fn verify(self, host: &HostMemory, kernel: ArrayKernel) -> bool {
        let want = match kernel {
            ArrayKernel::Read => return true,
            ArrayKernel::Copy | ArrayKernel::CopyPast => 1.0f32,
            ArrayKernel::Triad => 7.0,
        };
        host.lend::<f32>(self.c).iter().all(|&x| x == want)
    }
}

/// A pass over [`Arrays`].
pub struct ArrayPass {
    arrays: Arrays,
    kernel: ArrayKernel,
    adam: AdamKernels,
}

// SAFETY: the caller of `Arrays::new` guarantees that the arrays stay and that one job runs at a time; a piece writes only its part of `c`.
unsafe impl Job for ArrayPass {
    fn label(&self) -> (&'static str, u32) {
        (self.kernel.name(), 0)
    }

    fn traffic_bytes(&self) -> u64 {
        (self.arrays.elems * self.kernel.bytes()) as u64
    }

    fn pieces(&self) -> usize {
        self.arrays.elems.div_ceil(PIECE_ELEMS)
    }

    unsafe fn run(&self, piece: usize) {
        let Arrays { a, b, c, elems } = self.arrays;
        let start = piece * PIECE_ELEMS;
        let part = |array: PinnedSlice| array.slice(start * 4, PIECE_ELEMS.min(elems - start) * 4);
        // SAFETY: no kernel writes `a` or `b`.
        let [a, b] = [a, b].map(|array| unsafe { part(array).as_slice::<f32>() });
        // SAFETY: no other thread runs this piece or accesses its part of `c`.
        let c = unsafe { part(c).as_mut_slice::<f32>() };
        match self.kernel {
            ArrayKernel::Read => _ = black_box(sum(a)),
            ArrayKernel::Copy => c.copy_from_slice(a),
            ArrayKernel::CopyPast => self.adam.emit(a, Weights::F32(c)),
            ArrayKernel::Triad => triad(c, a, b),
        }
    }
}

/// Uses sixteen partial sums, so that the compiler can vectorize the loop.
fn sum(a: &[f32]) -> f32 {
    let mut sums = [0.0; 16];
    for a in a.as_chunks::<16>().0 {
        sums.iter_mut().zip(a).for_each(|(sum, a)| *sum += a);
    }
    sums.iter().sum()
}

/// `c = a + 3 b`.
pub fn triad(c: &mut [f32], a: &[f32], b: &[f32]) {
    for ((c, a), b) in c.iter_mut().zip(a).zip(b) {
        *c = a + 3.0 * b;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use superoffload::internals::optim::Isa;

    #[test]
    fn every_kernel_writes_its_verified_ranges() {
        let mut host = HostMemory::default();
        // SAFETY: `host` lives until the end of the test, and jobs run one after the other.
        let arrays = unsafe { Arrays::new(&mut host, PIECE_ELEMS + 24) }.unwrap();
        for kernel in ArrayKernel::ALL {
            let job = arrays.job(kernel, AdamKernels::new(Isa::detect()).unwrap());
            // SAFETY: only this thread runs the job.
            unsafe { job.run(0) };
            assert_eq!(arrays.verify(&host, kernel), matches!(kernel, ArrayKernel::Read), "{kernel:?} after one piece of two");
            // SAFETY: only this thread runs the job, after the first piece.
            unsafe { job.run(1) };
            assert!(arrays.verify(&host, kernel), "{kernel:?}");
            crate::fill(&mut host, arrays.c, 0.0f32);
        }
    }
}
