//! Memory of a micro-batch, asked for by its sizes: these are checked, and layers have parts of one allocation.

use crate::device::DeviceSlice;
use crate::dtype::Dtype;
use crate::error::{Error, Result};

/// Each part of an allocation for layers starts at a multiple of this many elements.
pub(super) const PART_ALIGN_ELEMS: usize = 128;

/// Gives memory of so many elements the name that it is planned under.
pub(super) type Alloc<'a> = dyn FnMut(&'static str, usize, Dtype) -> Result<DeviceSlice> + 'a;

/// Asks for memory with checked sizes.
pub(super) struct SizedAllocator<'a> {
    pub alloc: &'a mut Alloc<'a>,
    /// Of the micro-batch.
    pub tokens: usize,
    /// What it is computed in.
    pub dtype: Dtype,
}

impl SizedAllocator<'_> {
    pub(super) fn matrix(&mut self, name: &'static str, dims: &[usize], dtype: Dtype) -> Result<DeviceSlice> {
        (self.alloc)(name, product(dims)?, dtype)
    }

    pub(super) fn rows(&mut self, name: &'static str, cols: usize) -> Result<DeviceSlice> {
        self.matrix(name, &[self.tokens, cols], self.dtype)
    }

    /// One allocation for all layers, none if no layer has `cols`.
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
        // The last part is only as long as whoever has it needs.
        let mut ends = parts.of_layers.iter().zip(&elems).map(|((part, _), elems)| product(&[*part, stride]).map(|start| start + elems));
        let total = ends.try_fold(0, |most, end| Ok(most.max(end?)))?.next_multiple_of(PART_ALIGN_ELEMS);
        let all = if stride == 0 { DeviceSlice::at(0, 0, dtype) } else { self.matrix(name, &[total], dtype)? };
        Ok(ByLayer { all, elems, stride, parts })
    }
}

/// Where layers have an array: in parts of their own, in those that they take in turns, or in one that all others share.
pub(super) struct LayerParts {
    /// By layer: which part, and of how many tokens.
    pub(super) of_layers: Vec<(usize, usize)>,
    /// The part that layers without one of their own share; the last.
    pub(super) shared: usize,
}

impl LayerParts {
    /// Of `tokens` each: those that keep have a part of their own, those that send take `turns` with each other, the others share one.
    pub(super) fn new(layers: usize, tokens: usize, turns: usize, keeps: impl Fn(usize) -> bool, sends: impl Fn(usize) -> bool) -> Self {
        let kept = (0..layers).filter(|l| keeps(*l)).count();
        let shared = kept + (0..layers).filter(|l| sends(*l)).count().min(turns);
        let (mut own, mut turn) = (0..kept, (kept..shared).cycle());
        let part = |l: usize| match l {
            l if keeps(l) => own.next(),
            l if sends(l) => turn.next(),
            _ => None,
        };
        Self { of_layers: (0..layers).map(part).map(|part| (part.unwrap_or(shared), tokens)).collect(), shared }
    }

    /// The same parts, of which the shared one is of so many tokens, by layer.
    pub(super) fn with_shared(&self, tokens: impl Iterator<Item = usize>) -> Self {
        let shorter = |(&(part, all), tokens)| (part, if part == self.shared { tokens } else { all });
        Self { of_layers: self.of_layers.iter().zip(tokens).map(shorter).collect(), shared: self.shared }
    }
}

/// One allocation cut into parts, each of one layer or shared by several.
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

/// The number of elements, small enough that sums of all allocations and rounding up fit as well.
pub(super) fn product(dims: &[usize]) -> Result<usize> {
    let elems = dims.iter().try_fold(1usize, |n, dim| n.checked_mul(*dim));
    elems.filter(|elems| *elems <= 1 << 48).ok_or_else(too_large)
}

pub(super) fn too_large() -> Error {
    Error::usage("activations: this batch size and sequence length overflow")
}
