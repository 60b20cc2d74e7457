//! Products, and the calls of the library that compute them.

use crate::device::{BatchedMatmul, DeviceSlice, Kernel, Matmul, MatmulLayout, MatmulShape, ProductRequest, ScaledMatmul, StridedMatrices};
use crate::dtype::Dtype;
use crate::error::Result;

/// The largest alignment that is distinguished, in bytes; larger ones gain nothing.
pub(crate) const ALIGNED: u16 = 256;

/// The largest alignment of matrices of a batch that is distinguished, in bytes: that of vectors, which all heads have, wherever they lie.
const BATCH_ALIGNED: u16 = 16;
/// Number of matrices for which the algorithm of any number of them is chosen.
const TYPICAL_COUNT: usize = 8;

/// A product with or without scales.
#[derive(Clone, Copy)]
pub(crate) struct CublasProduct {
    pub(crate) shape: MatmulShape,
    pub(crate) a: DeviceSlice,
    /// Elements between the beginnings of two stored rows of `a`.
    a_pitch: usize,
    pub(crate) b: DeviceSlice,
    /// Scales of a and b, if they have scales.
    pub(crate) scales: Option<[DeviceSlice; 2]>,
    pub(crate) bias: Option<DeviceSlice>,
    pub(crate) base: Option<DeviceSlice>,
    pub(crate) c: DeviceSlice,
    pub(super) formats: Formats,
}

impl CublasProduct {
    /// # Errors
    /// `Unsupported` when the operands have different formats.
    pub(crate) fn of(kernel: Matmul) -> Result<Self> {
        let Matmul { shape, a, b, bias, base, c, .. } = kernel;
        let (dtype, a_pitch) = (kernel.float_format()?, kernel.pitch());
        Ok(Self { shape, a, a_pitch, b, scales: None, bias, base, c, formats: Formats { a: dtype, b: dtype, c: c.dtype() } })
    }

    /// # Errors
    /// `Unsupported` when bias or base have another format than the result.
    pub(crate) fn scaled(kernel: ScaledMatmul) -> Result<Self> {
        let ScaledMatmul { a, a_scale, b, b_scale, bias, base, c, .. } = kernel;
        let formats = Formats { a: a.dtype(), b: b.dtype(), c: kernel.float_format()? };
        Ok(Self { shape: kernel.shape(), a, a_pitch: kernel.k, b, scales: Some([a_scale, b_scale]), bias, base, c, formats })
    }

    /// The properties that decide how the product is computed.
    pub(crate) fn key(&self) -> ProductKey {
        let Self { shape, a, a_pitch, b, bias, base, c, formats, .. } = *self;
        let alignments = [a, b, base.unwrap_or(c), c].map(alignment);
        ProductKey { shape, a_pitch, formats, alignments, bias: bias.map_or(0, alignment) }
    }
}

/// Formats of the factors and of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Formats {
    pub(crate) a: Dtype,
    pub(crate) b: Dtype,
    pub(crate) c: Dtype,
}

/// The properties of a product that decide how it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProductKey {
    pub(super) shape: MatmulShape,
    /// Elements between the beginnings of two stored rows of a.
    a_pitch: usize,
    pub(super) formats: Formats,
    /// Alignments of a, b, base and c in bytes.
    pub(super) alignments: [u16; 4],
    /// Alignment of the bias in bytes; 0 without a bias.
    pub(super) bias: u16,
}

impl ProductKey {
    /// The product of well aligned matrices.
    pub(super) fn aligned(request: ProductRequest) -> Self {
        let ProductRequest { shape, formats: [a, b, c], bias } = request;
        let bias = if bias { ALIGNED } else { 0 };
        let a_pitch = if shape.layout == MatmulLayout::Tn { shape.m } else { shape.k };
        Self { shape, a_pitch, formats: Formats { a, b, c }, alignments: [ALIGNED; 4], bias }
    }

    /// Whether the factors have 8 bits.
    pub(super) fn is_fp8(&self) -> bool {
        self.formats.a.is_fp8()
    }

    /// Elements between the beginnings of two stored rows of each factor.
    pub(crate) fn pitches(&self) -> [usize; 2] {
        let MatmulShape { layout, n, k, .. } = self.shape;
        [self.a_pitch, if layout == MatmulLayout::Nt { k } else { n }]
    }
}

/// Several products of one shape in one call, at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct CallBatch {
    pub(crate) count: usize,
    /// Elements between the beginnings of two of a, b and c.
    pub(crate) strides: [usize; 3],
}

/// A call of the library, apart from addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct LibraryProduct {
    pub(crate) shape: MatmulShape,
    /// See [`ProductKey::pitches`], and the same of the result.
    pub(crate) pitches: [usize; 3],
    pub(crate) formats: Formats,
    /// See [`ProductKey::alignments`].
    pub(crate) alignments: [u16; 4],
    /// See [`ProductKey::bias`].
    pub(crate) bias: u16,
    pub(crate) batch: Option<CallBatch>,
}

impl LibraryProduct {
    /// The call that computes a whole product.
    pub(super) fn whole(key: &ProductKey) -> Self {
        let &ProductKey { shape, formats, alignments, bias, .. } = key;
        let [a, b] = key.pitches();
        Self { shape, pitches: [a, b, shape.n], formats, alignments, bias, batch: None }
    }
}

impl LibraryProduct {
    /// The call that computes a [`BatchedMatmul`], and its addresses.
    pub(crate) fn batched(kernel: &BatchedMatmul) -> Result<(Self, CallAddresses)> {
        let &BatchedMatmul { shape, count, a, b, c, accumulate } = kernel;
        let (dtype, matrices) = (kernel.float_format()?, [a, b, c]);
        let formats = Formats { a: dtype, b: dtype, c: c.memory.dtype() };
        let [of_a, of_b, of_c] = matrices.map(|matrices| Self::alignment_of(&matrices, count));
        let batch = Some(CallBatch { count, strides: matrices.map(|matrices| matrices.stride) });
        let pitches = matrices.map(|matrices| matrices.pitch);
        let call = Self { shape, pitches, formats, alignments: [of_a, of_b, of_c, of_c], bias: 0, batch };
        let [a, b, c] = matrices.map(|matrices| matrices.memory.addr());
        Ok((call, CallAddresses { a, b, addend: c, adds: accumulate, c, pointers: Pointers::NONE }))
    }

    /// The call whose algorithm this batched one takes, so that the number of matrices does not decide the bits of each.
    pub(super) fn standing_for_batch(&self) -> Self {
        Self { batch: self.batch.map(|batch| CallBatch { count: TYPICAL_COUNT, ..batch }), ..*self }
    }

    /// Alignment of all of `count` matrices.
    fn alignment_of(matrices: &StridedMatrices, count: usize) -> u16 {
        let step = matrices.stride * matrices.memory.dtype().bytes();
        let of_steps = if count > 1 && step > 0 { 1 << step.trailing_zeros().min(BATCH_ALIGNED.ilog2()) } else { BATCH_ALIGNED };
        alignment(matrices.memory).min(of_steps)
    }
}

/// Addresses of a call.
#[derive(Clone, Copy)]
pub(crate) struct CallAddresses {
    pub(crate) a: u64,
    pub(crate) b: u64,
    /// Addend of the product; without one, any address of its alignment.
    pub(crate) addend: u64,
    /// Whether the addend is added.
    pub(crate) adds: bool,
    pub(crate) c: u64,
    pub(crate) pointers: Pointers,
}

impl CallAddresses {
    /// The addresses of a product that one call computes.
    pub(super) fn of(product: &CublasProduct) -> Self {
        let CublasProduct { a, b, base, c, .. } = *product;
        let (addend, pointers) = (base.unwrap_or(c).addr(), Pointers::of(product));
        Self { a: a.addr(), b: b.addr(), addend, adds: base.is_some(), c: c.addr(), pointers }
    }
}

/// Device addresses in a matmul descriptor, which are set for each product; 0 for absent operands.
#[derive(Clone, Copy)]
pub(crate) struct Pointers {
    pub(super) bias: u64,
    /// Scales of a and b.
    pub(crate) scales: [u64; 2],
}

impl Pointers {
    pub(crate) const NONE: Self = Self { bias: 0, scales: [0; 2] };

    fn of(product: &CublasProduct) -> Self {
        Self { bias: product.bias.map_or(0, DeviceSlice::addr), ..Self::of_scales(product.scales) }
    }

    pub(crate) fn of_scales(scales: Option<[DeviceSlice; 2]>) -> Self {
        Self { bias: 0, scales: scales.map_or([0; 2], |scales| scales.map(DeviceSlice::addr)) }
    }

    /// The pointers that a call of the product takes. A part of a product has no bias. Widened factors have no scales, which the library
    /// rejects beside 16-bit factors.
    pub(super) fn of_call(self, call: &LibraryProduct) -> Self {
        let bias = if call.bias > 0 { self.bias } else { 0 };
        let scales = if call.formats.a.is_fp8() { self.scales } else { [0; 2] };
        Self { bias, scales }
    }

    /// Addresses that stand for those of any product with `key`, to choose its algorithm before it has memory.
    pub(super) fn standing_for(key: &ProductKey) -> Self {
        let somewhere = |alignment: u16| if alignment > 0 { 1 << 40 | u64::from(alignment) } else { 0 };
        Self { bias: somewhere(key.bias), scales: [somewhere(if key.is_fp8() { ALIGNED } else { 0 }); 2] }
    }
}

/// The largest power of two that divides the address, at most [`ALIGNED`].
pub(super) fn alignment(slice: DeviceSlice) -> u16 {
    1 << slice.addr().trailing_zeros().min(ALIGNED.ilog2())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alignment_is_the_largest_power_of_two_up_to_256() {
        let slice = |addr| DeviceSlice::at(addr, 1, Dtype::Bfloat16);
        assert_eq!([2, 48, 4096 + 256, 1 << 40].map(|addr| alignment(slice(addr))), [2, 16, 256, 256]);
    }

    #[test]
    fn batched_products_are_aligned_as_their_strides_are() {
        let x = DeviceSlice::at(1 << 20, 1 << 16, Dtype::Bfloat16);
        let [a, b] = [64, 20].map(|stride| StridedMatrices::of(x, 0, [16, 32, 3], [512, stride]));
        let c = StridedMatrices::of(DeviceSlice::at(2 << 20, 1 << 16, Dtype::Float32), 0, [16, 16, 3], [16, 256]);
        let shape = MatmulShape { layout: MatmulLayout::Nt, m: 16, n: 16, k: 32 };
        let (call, addresses) = LibraryProduct::batched(&BatchedMatmul { shape, count: 3, a, b, c, accumulate: true }).unwrap();
        assert_eq!((call.alignments, call.pitches), ([16, 8, 16, 16], [512, 512, 16]));
        assert_eq!(call.batch, Some(CallBatch { count: 3, strides: [64, 20, 256] }));
        assert_eq!(call.standing_for_batch().batch, Some(CallBatch { count: 8, strides: [64, 20, 256] }));
        assert!(addresses.adds && addresses.addend == addresses.c && call.formats.c == Dtype::Float32);
    }

    #[test]
    fn widened_factors_have_no_scales_and_parts_no_bias() {
        let request = ProductRequest {
            shape: MatmulShape { layout: MatmulLayout::Nt, m: 64, n: 128, k: 96 },
            formats: [Dtype::Float8E5m2, Dtype::Float8E4m3, Dtype::Bfloat16],
            bias: true,
        };
        let key = ProductKey::aligned(request);
        let pointers = Pointers::standing_for(&key);
        let whole = LibraryProduct::whole(&key);
        let Pointers { bias, scales } = pointers.of_call(&whole);
        assert!(bias != 0 && scales == pointers.scales && scales[0] != 0);
        let narrow = Formats { a: Dtype::Bfloat16, b: Dtype::Bfloat16, c: Dtype::Float32 };
        let Pointers { bias, scales } = pointers.of_call(&LibraryProduct { formats: narrow, bias: 0, ..whole });
        assert_eq!((bias, scales), (0, [0; 2]));
    }

    #[test]
    fn addresses_that_stand_for_others_have_their_alignment() {
        let request = |dtype, bias| ProductRequest {
            shape: MatmulShape { layout: MatmulLayout::Nt, m: 16, n: 16, k: 16 },
            formats: [dtype, dtype, Dtype::Bfloat16],
            bias,
        };
        let of = |dtype, bias| {
            let Pointers { bias, scales } = Pointers::standing_for(&ProductKey::aligned(request(dtype, bias)));
            [bias, scales[0], scales[1]].map(|address| if address > 0 { address.trailing_zeros() } else { 0 })
        };
        assert_eq!([of(Dtype::Float8E4m3, true), of(Dtype::Bfloat16, true), of(Dtype::Bfloat16, false)], [[8, 8, 8], [8, 0, 0], [0, 0, 0]]);
    }
}
