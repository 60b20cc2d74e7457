//! Allocation of a micro-batch's memory by dimensions, with overflow checks, and with parts of one allocation for layers.

use crate::device::DeviceSlice;
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// Each part of an allocation for layers starts at a multiple of this many elements.
pub(super) const PART_ALIGN_ELEMS: usize = 128;

/// Allocates memory of a number of elements, under its name in the plan.
pub(super) type Alloc<'a> = dyn FnMut(&'static str, usize, Dtype) -> Result<DeviceSlice> + 'a;

/// An allocator with checked sizes.
pub(super) struct SizedAllocator<'a> {
    pub alloc: &'a mut Alloc<'a>,
    /// Tokens of the micro-batch.
    pub tokens: usize,
    /// Compute format.
    pub dtype: Dtype,
}

impl SizedAllocator<'_> {
    pub(super) fn matrix(&mut self, name: &'static str, dims: &[usize], dtype: Dtype) -> Result<DeviceSlice> {
        (self.alloc)(name, product(dims)?, dtype)
    }

    pub(super) fn rows(&mut self, name: &'static str, cols: usize) -> Result<DeviceSlice> {
        self.matrix(name, &[self.tokens, cols], self.dtype)
    }

    /// One allocation for all layers, none if `cols` is 0 in all layers.
    pub(super) fn by_layer<'a>(
        &mut self,
        name: &'static str,
        parts: &'a LayerParts,
        cols: Vec<usize>,
        dtype: Dtype,
    ) -> Result<ByLayer<'a>> {
        let elems: Result<Vec<usize>> = parts.of_layers.iter().zip(cols).map(|(&(_, tokens), cols)| product(&[tokens, cols])).collect();
        let elems = elems?;
        let longest = elems.iter().max().copied().unwrap_or(0);
        let stride = longest.checked_next_multiple_of(PART_ALIGN_ELEMS).ok_or_else(too_large)?;
        // The last part is only as long as its layers need.
        let mut ends = parts.of_layers.iter().zip(&elems).map(|((part, _), elems)| product(&[*part, stride]).map(|start| start + elems));
        let total = ends.try_fold(0, |most, end| Ok(most.max(end?)))?.next_multiple_of(PART_ALIGN_ELEMS);
        let all = if stride == 0 { DeviceSlice::at(0, 0, dtype) } else { self.matrix(name, &[total], dtype)? };
        Ok(ByLayer { all, elems, stride, parts })
    }
}

/// Assignment of layers to parts of an array: own parts, parts that several layers use alternately, and one shared part.
pub(super) struct LayerParts {
    /// For each layer, the index of its part and its number of tokens.
    pub(super) of_layers: Vec<(usize, usize)>,
    /// Index of the shared part, which is the last one.
    pub(super) shared: usize,
}

impl LayerParts {
    /// Parts of `tokens` each. Layers for which `keeps` holds have their own part in their segment, layers for which `sends` holds alternate
    /// between `turns` parts, all others share one part. Segments begin with the layers `starts` and use the same parts.
    pub(super) fn new(
        layers: usize,
        starts: &[usize],
        (tokens, turns): (usize, usize),
        keeps: impl Fn(usize) -> bool,
        sends: impl Fn(usize) -> bool,
    ) -> Self {
        let ends = starts.iter().skip(1).copied().chain([layers]);
        let kept = starts.iter().zip(ends).map(|(start, end)| (*start..end).filter(|l| keeps(*l)).count()).max().unwrap_or(0);
        let shared = kept + (0..layers).filter(|l| sends(*l)).count().min(turns);
        let (mut own, mut turn) = (0..kept, (kept..shared).cycle());
        let part = |l: usize| {
            if starts.contains(&l) {
                own = 0..kept;
            }
            match l {
                l if keeps(l) => own.next(),
                l if sends(l) => turn.next(),
                _ => None,
            }
        };
        Self { of_layers: (0..layers).map(part).map(|part| (part.unwrap_or(shared), tokens)).collect(), shared }
    }

    /// The parts with another number of tokens for layers in the shared part; `tokens` iterates over all layers.
    pub(super) fn with_shared(&self, tokens: impl Iterator<Item = usize>) -> Self {
        let shorter = |(&(part, all), tokens)| (part, if part == self.shared { tokens } else { all });
        Self { of_layers: self.of_layers.iter().zip(tokens).map(shorter).collect(), shared: self.shared }
    }
}

/// One allocation divided into parts, each for one layer or shared by several.
pub(super) struct ByLayer<'a> {
    all: DeviceSlice,
    elems: Vec<usize>,
    stride: usize,
    parts: &'a LayerParts,
}

impl ByLayer<'_> {
    pub(super) fn at(&self, layer: usize) -> DeviceSlice {
        self.all.slice(self.parts.of_layers[layer].0 * self.stride, self.elems[layer])
    }
}

/// The product of the dimensions, limited so that sums of all allocations and rounding cannot overflow.
pub(super) fn product(dims: &[usize]) -> Result<usize> {
    let elems = dims.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim));
    elems.filter(|elems| *elems <= 1 << 48).ok_or_else(too_large)
}

pub(super) fn too_large() -> Error {
    Error::usage("activations: this batch size and sequence length overflow")
}
