//! What memory gives to threads that do nothing else: copy, triad and read, in the manner of STREAM.

use std::hint::black_box;
use superoffload::error::Result;
use superoffload::host::pinned::{HostMemory, PinnedSlice};
use superoffload::host::pool::Job;
use superoffload::optim::simd::{AdamKernels, Stores, Weights};

/// fp32 elements that a worker takes at once.
const PIECE_ELEMS: usize = 32 << 10;

/// What is done with every element.
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
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Read, Self::Copy, Self::CopyPast, Self::Triad];

    /// The name in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Copy => "copy",
            Self::CopyPast => "copy past caches",
            Self::Triad => "triad",
        }
    }

    /// Bytes an element, as STREAM counts them.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Read => 4,
            Self::Copy | Self::CopyPast => 8,
            Self::Triad => 12,
        }
    }
}

/// Three arrays.
#[derive(Clone, Copy, Debug)]
pub struct Arrays {
    a: PinnedSlice,
    b: PinnedSlice,
    c: PinnedSlice,
    elems: usize,
}

impl Arrays {
    /// Arrays of `elems` elements: `a` is all 1, `b` all 2.
    ///
    /// # Errors
    /// `Resource` when there is no such memory.
    pub fn new(host: &mut HostMemory, elems: usize) -> Result<Self> {
        let mut array = |name| host.alloc(name, elems * 4);
        let arrays = Self { a: array("a")?, b: array("b")?, c: array("c")?, elems };
        crate::fill(arrays.a, 1.0f32);
        crate::fill(arrays.b, 2.0f32);
        crate::fill(arrays.c, 0.0f32);
        Ok(arrays)
    }

    /// Elements of each.
    pub fn elems(self) -> usize {
        self.elems
    }

    /// One pass of `kernel` over the arrays.
    pub fn job(self, kernel: ArrayKernel, adam: AdamKernels) -> ArrayPass {
        ArrayPass { arrays: self, kernel, adam: adam.with_stores(Stores::Streaming) }
    }

    /// Whether `kernel`, which ran last, wrote what it should.
    pub fn verify(self, kernel: ArrayKernel) -> bool {
        let want = match kernel {
            ArrayKernel::Read => return true,
            ArrayKernel::Copy | ArrayKernel::CopyPast => 1.0f32,
            ArrayKernel::Triad => 7.0,
        };
        self.c.with(|c: &mut [f32]| c.iter().all(|&x| x == want))
    }
}

/// A pass over [`Arrays`].
pub struct ArrayPass {
    arrays: Arrays,
    kernel: ArrayKernel,
    adam: AdamKernels,
}

impl Job for ArrayPass {
    fn label(&self) -> (&'static str, u32) {
        (self.kernel.name(), 0)
    }

    fn traffic_bytes(&self) -> u64 {
        (self.arrays.elems * self.kernel.bytes()) as u64
    }

    fn pieces(&self) -> usize {
        self.arrays.elems.div_ceil(PIECE_ELEMS)
    }

    fn run(&self, piece: usize) {
        let Arrays { a, b, c, elems } = self.arrays;
        let start = piece * PIECE_ELEMS;
        let part = |array: PinnedSlice| array.slice(start * 4, PIECE_ELEMS.min(elems - start) * 4);
        part(a).with(|a: &mut [f32]| match self.kernel {
            ArrayKernel::Read => _ = black_box(sum(a)),
            ArrayKernel::Copy => part(c).with(|c: &mut [f32]| c.copy_from_slice(a)),
            ArrayKernel::CopyPast => part(c).with(|c| self.adam.emit(a, Weights::F32(c))),
            ArrayKernel::Triad => part(b).with(|b: &mut [f32]| part(c).with(|c| triad(c, a, b))),
        });
    }
}

/// In sixteen sums, so that the compiler may use vectors.
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
    use superoffload::optim::simd::Isa;

    #[test]
    fn every_kernel_writes_what_is_verified() {
        let mut host = HostMemory::default();
        let arrays = Arrays::new(&mut host, PIECE_ELEMS + 24).unwrap();
        for kernel in ArrayKernel::ALL {
            let job = arrays.job(kernel, AdamKernels::new(Isa::detect()).unwrap());
            job.run(0);
            assert_eq!(arrays.verify(kernel), matches!(kernel, ArrayKernel::Read), "{kernel:?} after one piece of two");
            job.run(1);
            assert!(arrays.verify(kernel), "{kernel:?}");
            crate::fill(arrays.c, 0.0f32);
        }
    }
}
