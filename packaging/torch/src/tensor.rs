//! Tensors as addresses, and the operations of a step on a range of a tensor. Only this module dereferences addresses.

use crate::Given;
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::ops::Range;
use superoffload::internals::optim::{
    AdamConsts, AdamHyper, AdamKernels, AdamState, AdamStep, BLOCK, Grads, Int8State, Moment, MomentGroup, MomentKind, Moments, Weights,
};

/// Addresses of fp32 weights, first moments, second moments, gradient and working weights. The last is 0 if the parameter itself is in
/// fp32.
pub(crate) type Addresses = (usize, usize, usize, usize, usize);
/// Formats of moments, gradient and working weights.
pub(crate) type Formats = (MomentFormat, Format, Format);

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Format {
    F32,
    Bf16,
    F16,
}

impl Format {
    pub(crate) fn bytes(self) -> usize {
        if self == Self::F32 { 4 } else { 2 }
    }
}

impl pyo3::FromPyObject<'_, '_> for Format {
    type Error = pyo3::PyErr;

    fn extract(name: pyo3::Borrowed<'_, '_, pyo3::PyAny>) -> pyo3::PyResult<Self> {
        match name.extract()? {
            "float32" => Ok(Self::F32),
            "bfloat16" => Ok(Self::Bf16),
            "float16" => Ok(Self::F16),
            other => Err(pyo3::exceptions::PyValueError::new_err(format!("unsupported format of a tensor: {other}"))),
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum MomentFormat {
    F32,
    Bf16,
    /// Groups of 128 elements, 132 bytes each; see `MomentGroup`.
    Int8,
}

impl MomentFormat {
    /// Bytes of one moment of `elems` elements.
    pub(crate) fn bytes(self, elems: usize) -> usize {
        match self {
            Self::F32 => 4 * elems,
            Self::Bf16 => 2 * elems,
            Self::Int8 => elems.div_ceil(MomentGroup::ELEMS) * size_of::<MomentGroup>(),
        }
    }

    fn align(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 => 2,
            Self::Int8 => align_of::<MomentGroup>(),
        }
    }

    /// Largest beta1 that moments in this format can follow.
    pub(crate) fn beta1_max(self) -> f64 {
        let moments = match self {
            Self::F32 => Moments::Float32,
            Self::Bf16 => Moments::Bfloat16,
            Self::Int8 => Moments::Int8,
        };
        moments.beta1_max()
    }
}

impl pyo3::FromPyObject<'_, '_> for MomentFormat {
    type Error = pyo3::PyErr;

    fn extract(name: pyo3::Borrowed<'_, '_, pyo3::PyAny>) -> pyo3::PyResult<Self> {
        match name.extract()? {
            "float32" => Ok(Self::F32),
            "bfloat16" => Ok(Self::Bf16),
            "int8" => Ok(Self::Int8),
            other => Err(pyo3::exceptions::PyValueError::new_err(format!("unsupported format of moments: {other}"))),
        }
    }
}

/// Number of groups of moments that are converted at once.
const CONVERTED_GROUPS: usize = 64;

/// Stores `elems` float32 values at the first address as groups of moments at the second one.
///
/// # Errors
/// An address that is 0 or not a multiple of the format's bytes.
pub(crate) fn pack_moment(kind: MomentKind, at: (usize, usize), elems: usize) -> Result<(), String> {
    convert(at, (align_of::<f32>(), align_of::<MomentGroup>()), elems, |elems, groups| {
        // SAFETY: the Python side owns both arrays, of `elems` values and their groups, and no other code writes them.
        let (values, groups) = unsafe { (read::<f32>(at.0, &elems), write::<MomentGroup>(at.1, &groups)) };
        groups.copy_from_slice(&kind.groups(values));
    })
}

/// Writes the float32 values of groups of moments at the first address to the second one.
///
/// # Errors
/// An address that is 0 or not a multiple of the format's bytes.
pub(crate) fn unpack_moment(kind: MomentKind, at: (usize, usize), elems: usize) -> Result<(), String> {
    convert(at, (align_of::<MomentGroup>(), align_of::<f32>()), elems, |elems, groups| {
        // SAFETY: as in `pack_moment`.
        let (groups, values) = unsafe { (read::<MomentGroup>(at.0, &groups), write::<f32>(at.1, &elems)) };
        values.copy_from_slice(&kind.values(groups)[..values.len()]);
    })
}

/// Calls `part` for ranges of elements and of their groups, after a check of the addresses.
fn convert(
    (from, to): (usize, usize),
    aligns: (usize, usize),
    elems: usize,
    part: impl Fn(Range<usize>, Range<usize>),
) -> Result<(), String> {
    if elems > 0 && (from == 0 || to == 0 || !from.is_multiple_of(aligns.0) || !to.is_multiple_of(aligns.1)) {
        return Err("an address of a moment is 0 or not a multiple of its format's bytes".into());
    }
    let groups = elems.div_ceil(MomentGroup::ELEMS);
    for first in (0..groups).step_by(CONVERTED_GROUPS) {
        let end = groups.min(first + CONVERTED_GROUPS);
        part(first * MomentGroup::ELEMS..elems.min(end * MomentGroup::ELEMS), first..end);
    }
    Ok(())
}

/// Like `Given`, with the address of the step count instead of the step number.
type Counted = (usize, Addresses, Formats, usize, usize, usize, usize);

/// A parameter in a step.
pub(crate) struct Tensor {
    /// Index of the parameter.
    index: usize,
    addresses: Addresses,
    formats: Formats,
    pub elems: usize,
    /// Offset of the first element in the flat order.
    first: usize,
    consts: AdamConsts,
    /// Address of the step count, an `f32` that a step of the whole tensor increments; 0 if the Python side counts.
    count: usize,
}

/// A memory range of the parameter `owner`.
#[derive(Clone, Copy)]
pub(crate) struct Span {
    pub start: usize,
    pub bytes: usize,
    pub owner: usize,
    pub written: bool,
}

/// Owners of two overlapping ranges of which at least one is written.
pub(crate) fn overlap(mut spans: Vec<Span>) -> Option<(usize, usize)> {
    spans.sort_unstable_by_key(|span| span.start);
    // Of the ranges that began so far: the one that ends last, and the written one that ends last.
    let (mut furthest, mut written): (Option<Span>, Option<Span>) = (None, None);
    let end = |span: Span| span.start + span.bytes;
    for span in spans.into_iter().filter(|span| span.bytes > 0) {
        let before = if span.written { furthest } else { written };
        if let Some(before) = before.filter(|&before| end(before) > span.start) {
            return Some((before.owner.min(span.owner), before.owner.max(span.owner)));
        }
        let further = |of: Option<Span>| of.is_none_or(|of| end(of) < end(span));
        furthest = if further(furthest) { Some(span) } else { furthest };
        written = if span.written && further(written) { Some(span) } else { written };
    }
    None
}

impl Tensor {
    pub(crate) fn new((index, addresses, formats, elems, first, step, group): Given, groups: &[AdamHyper]) -> Result<Self, String> {
        let hyper = groups.get(group).ok_or_else(|| format!("there is no group {group}"))?;
        if step == 0 {
            return Err("steps are counted from 1".into());
        }
        let (p, m, v, g, out) = addresses;
        let is_good = |address: usize, align: usize| elems == 0 || address != 0 && address.is_multiple_of(align);
        let moments_good = is_good(m, formats.0.align()) && is_good(v, formats.0.align());
        let weights_good = out == 0 || is_good(out, formats.2.bytes());
        if !(is_good(p, Format::F32.bytes()) && moments_good && is_good(g, formats.1.bytes()) && weights_good) {
            return Err(format!("an address of parameter {index} is 0 or not a multiple of its format's bytes"));
        }
        if formats.0 == MomentFormat::Int8 && !first.is_multiple_of(MomentGroup::ELEMS) {
            return Err(format!(
                "parameter {index} begins at element {first}, not at a multiple of {} as its moments in 8 bits do",
                MomentGroup::ELEMS
            ));
        }
        Ok(Self { index, addresses, formats, elems, first, consts: AdamConsts::new(hyper, step, true), count: 0 })
    }

    /// Creates the tensor of the step that follows the step count at the given address.
    pub(crate) fn counted((index, addresses, formats, elems, first, count, group): Counted, groups: &[AdamHyper]) -> Result<Self, String> {
        if count == 0 || !count.is_multiple_of(4) {
            return Err(format!("the step count of parameter {index} is not a float32"));
        }
        // SAFETY: the Python side owns the count, a float32 on the CPU.
        let steps = unsafe { read::<f32>(count, &(0..1)) }[0];
        let tensor = Self::new((index, addresses, formats, elems, first, steps as u64 + 1, group), groups)?;
        Ok(Self { count, ..tensor })
    }

    /// Index of the parameter and offset of the element `start`. Sorts the parts of all tensors in the flat order.
    pub(crate) fn place(&self, start: usize) -> (usize, usize) {
        (self.index, self.first + start)
    }

    /// Increments the step count, if this module counts.
    ///
    /// # Safety
    /// The count is valid, and no other code accesses it.
    pub(crate) unsafe fn count_step(&self) {
        if self.count != 0 {
            // SAFETY: guaranteed by the caller.
            let count = unsafe { write::<f32>(self.count, &(0..1)) };
            count[0] += 1.0;
        }
    }

    /// Updates fp32 weights whose working weights were changed by other code since the last step, that is, working weights that differ from
    /// the rounded fp32 weights.
    ///
    /// # Safety
    /// The conditions of [`Tensor::step`].
    pub(crate) unsafe fn take_changes(&self, at: &Range<usize>) {
        // SAFETY: guaranteed by the caller for each array.
        unsafe {
            match (self.addresses.4, self.formats.2) {
                (0, _) | (_, Format::F32) => {}
                (out, Format::Bf16) => take_changes(write(self.addresses.0, at), read::<bf16>(out, at)),
                (out, Format::F16) => take_changes(write(self.addresses.0, at), read::<f16>(out, at)),
            }
        }
    }

    pub(crate) fn spans(&self) -> [Span; 5] {
        let ((p, m, v, g, out), (moments, grads, weights)) = (self.addresses, self.formats);
        let span = |start: usize, bytes, written| Span { start, bytes: if start == 0 { 0 } else { bytes }, owner: self.index, written };
        let (moment, elems) = (moments.bytes(self.elems), self.elems);
        let [p, m, v] = [span(p, 4 * elems, true), span(m, moment, true), span(v, moment, true)];
        [p, m, v, span(g, elems * grads.bytes(), false), span(out, elems * weights.bytes(), true)]
    }

    /// Whether both tensors step the same state with gradients of the same format.
    pub(crate) fn follows(&self, before: &Self) -> bool {
        let arrays = |tensor: &Self| (tensor.addresses.0, tensor.addresses.1, tensor.addresses.2, tensor.elems, tensor.first);
        arrays(self) == arrays(before) && self.formats == before.formats
    }

    /// Elements `at` of the gradient.
    ///
    /// # Safety
    /// The gradient is valid, and no other code writes it during the lifetime of the result.
    pub(crate) unsafe fn grads(&self, at: &Range<usize>) -> Grads<'_> {
        let address = self.addresses.3;
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self.formats.1 {
                Format::F32 => Grads::F32(read(address, at)),
                Format::Bf16 => Grads::Bf16(read(address, at)),
                Format::F16 => Grads::F16(read(address, at)),
            }
        }
    }

    /// Steps the state of the elements `at` with gradients times `scale`, and writes working weights, if the parameter has them.
    ///
    /// # Safety
    /// All addresses are valid, and no other code accesses their memory.
    pub(crate) unsafe fn step(&self, kernels: AdamKernels, scale: f32, at: &Range<usize>) {
        // SAFETY: guaranteed by the caller.
        let out = unsafe { self.weights(at) };
        // SAFETY: as above.
        unsafe { self.with_state(at, Effect { kernels, scale, out, writes_state: true }) };
    }

    /// Writes the working weights that [`Tensor::step`] would write.
    ///
    /// # Safety
    /// The conditions of [`Tensor::step`].
    pub(crate) unsafe fn speculate(&self, kernels: AdamKernels, scale: f32, at: &Range<usize>) {
        // SAFETY: guaranteed by the caller.
        let out = unsafe { self.weights(at) };
        // SAFETY: as above.
        unsafe { self.with_state(at, Effect { kernels, scale, out, writes_state: false }) };
    }

    /// Steps the state as [`Tensor::step`] would.
    ///
    /// # Safety
    /// The conditions of [`Tensor::step`].
    pub(crate) unsafe fn commit(&self, kernels: AdamKernels, scale: f32, at: &Range<usize>) {
        // SAFETY: guaranteed by the caller.
        unsafe { self.with_state(at, Effect { kernels, scale, out: None, writes_state: true }) };
    }

    /// Steps the state as [`Tensor::commit`] of `before` does, and writes the working weights of the following step with unscaled
    /// gradients, in one pass over the state.
    ///
    /// # Safety
    /// The conditions of [`Tensor::step`] for both tensors; this tensor [`follows`](Tensor::follows) `before`.
    pub(crate) unsafe fn commit_then_speculate(&self, kernels: AdamKernels, before: &Self, scale: f32, at: &Range<usize>) {
        let (pending, next) = (AdamStep { consts: before.consts, scale }, AdamStep { consts: self.consts, scale: 1.0 });
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self.formats.0 {
                MomentFormat::F32 => self.fused::<f32>(kernels, (pending, before), next, at),
                MomentFormat::Bf16 => self.fused::<bf16>(kernels, (pending, before), next, at),
                MomentFormat::Int8 => self.fused_int8(kernels, (pending, before), next, at),
            }
        }
    }

    /// # Safety
    /// The conditions of [`Tensor::commit_then_speculate`]; `M` is the moments' format.
    unsafe fn fused<M: Moment>(&self, kernels: AdamKernels, (pending, before): (AdamStep, &Self), next: AdamStep, at: &Range<usize>) {
        // SAFETY: guaranteed by the caller.
        let (mut state, out) = unsafe { (self.state::<M>(at), self.weights(at)) };
        // SAFETY: as above.
        let (old, new) = unsafe { (before.grads(at), self.grads(at)) };
        match out {
            Some(out) => kernels.commit_then_speculate(pending, old, next, new, &mut state, out),
            None => kernels.commit(pending, &mut state, old),
        }
    }

    /// # Safety
    /// The conditions of [`Tensor::commit_then_speculate`]; the moments have 8 bits.
    unsafe fn fused_int8(&self, kernels: AdamKernels, (pending, before): (AdamStep, &Self), next: AdamStep, at: &Range<usize>) {
        // SAFETY: guaranteed by the caller.
        let (mut state, out) = unsafe { (self.int8_state(at), self.weights(at)) };
        // SAFETY: as above.
        let (old, new) = unsafe { (before.grads(at), self.grads(at)) };
        kernels.run_int8([Some((pending, old)), out.is_some().then_some((next, new))], &mut state, out);
    }

    /// # Safety
    /// The conditions of [`Tensor::step`].
    unsafe fn with_state(&self, at: &Range<usize>, effect: Effect<'_>) {
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self.formats.0 {
                MomentFormat::F32 => effect.on(self.consts, self.state::<f32>(at), self.grads(at)),
                MomentFormat::Bf16 => effect.on(self.consts, self.state::<bf16>(at), self.grads(at)),
                MomentFormat::Int8 => effect.on_int8(self.consts, self.int8_state(at), self.grads(at)),
            }
        }
    }

    /// # Safety
    /// The conditions of [`Tensor::step`]; `M` is the moments' format.
    unsafe fn state<M: Moment>(&self, at: &Range<usize>) -> AdamState<'_, M> {
        let (p, m, v, ..) = self.addresses;
        // SAFETY: guaranteed by the caller for each array.
        let (params, m, v) = unsafe { (write(p, at), write(m, at), write(v, at)) };
        AdamState { first: self.first + at.start, params, m, v }
    }

    /// The state with moments in 8 bits. `at` begins with a group of moments, as all pieces do.
    ///
    /// # Safety
    /// The conditions of [`Tensor::step`]; the moments have 8 bits.
    unsafe fn int8_state(&self, at: &Range<usize>) -> Int8State<'_> {
        let (p, m, v, ..) = self.addresses;
        let groups = at.start / MomentGroup::ELEMS..at.end.div_ceil(MomentGroup::ELEMS);
        // SAFETY: guaranteed by the caller for each array.
        let (params, m, v) = unsafe { (write(p, at), write::<MomentGroup>(m, &groups), write::<MomentGroup>(v, &groups)) };
        Int8State::new(self.first + at.start, params, m, v)
    }

    /// # Safety
    /// The conditions of [`Tensor::step`].
    unsafe fn weights(&self, at: &Range<usize>) -> Option<Weights<'_>> {
        let address = self.addresses.4;
        // SAFETY: guaranteed by the caller.
        (address != 0).then(|| unsafe {
            match self.formats.2 {
                Format::F32 => Weights::F32(write(address, at)),
                Format::Bf16 => Weights::Bf16(write(address, at)),
                Format::F16 => Weights::F16(write(address, at)),
            }
        })
    }
}

/// A 16-bit format of working weights.
trait Narrow: Copy + PartialEq + Into<f32> {
    fn round(param: f32) -> Self;
    /// Whether a parameter differs from its weight after rounding. May also be true for an unchanged NaN.
    fn differ(params: &[f32], weights: &[Self]) -> bool;
}

impl Narrow for bf16 {
    fn round(param: f32) -> Self {
        Self::from_f32(param)
    }

    fn differ(params: &[f32], weights: &[Self]) -> bool {
        // Rounds to nearest, ties to even, in integer arithmetic, which compilers vectorise. The result for NaN is wrong, which
        // `take_changes` handles.
        let round = |param: f32| (param.to_bits().wrapping_add(0x7fff + (param.to_bits() >> 16 & 1)) >> 16) as u16;
        params.iter().zip(weights).fold(0, |all, (&param, weight)| all | (round(param) ^ weight.to_bits())) != 0
    }
}

impl Narrow for f16 {
    fn round(param: f32) -> Self {
        Self::from_f32(param)
    }

    fn differ(params: &[f32], weights: &[Self]) -> bool {
        let mut rounded = [Self::ZERO; BLOCK];
        let rounded = &mut rounded[..params.len()];
        rounded.convert_from_f32_slice(params);
        rounded.iter().zip(weights).fold(0, |all, (rounded, weight)| all | (rounded.to_bits() ^ weight.to_bits())) != 0
    }
}

/// Replaces those `params` that do not round to their `weights` by the weights. A block is compared as a whole first.
fn take_changes<W: Narrow>(params: &mut [f32], weights: &[W]) {
    for (params, weights) in params.chunks_mut(BLOCK).zip(weights.chunks(BLOCK)).filter(|(params, weights)| W::differ(params, weights)) {
        for (param, &weight) in params.iter_mut().zip(weights) {
            let is_same = W::round(*param) == weight || param.is_nan() && weight.into().is_nan();
            *param = if is_same { *param } else { weight.into() };
        }
    }
}

/// Outputs of a step: the state, the working weights, or both.
struct Effect<'a> {
    kernels: AdamKernels,
    scale: f32,
    out: Option<Weights<'a>>,
    writes_state: bool,
}

impl Effect<'_> {
    fn on<M: Moment>(self, consts: AdamConsts, mut state: AdamState<'_, M>, grads: Grads<'_>) {
        let (kernels, step) = (self.kernels, AdamStep { consts, scale: self.scale });
        match (self.writes_state, self.out) {
            (true, Some(out)) => kernels.step(step, &mut state, grads, out),
            (true, None) => kernels.commit(step, &mut state, grads),
            (false, Some(out)) => kernels.speculate(step, &state, grads, out),
            (false, None) => {}
        }
    }

    fn on_int8(self, consts: AdamConsts, mut state: Int8State<'_>, grads: Grads<'_>) {
        let update = Some((AdamStep { consts, scale: self.scale }, grads));
        match (self.writes_state, self.out) {
            (true, out) => self.kernels.run_int8([update, None], &mut state, out),
            (false, Some(out)) => self.kernels.run_int8([None, update], &mut state, Some(out)),
            (false, None) => {}
        }
    }
}

/// # Safety
/// `address` is that of an array with the elements `at`, and no other code writes them during the lifetime of the result.
unsafe fn read<'a, T>(address: usize, at: &Range<usize>) -> &'a [T] {
    // SAFETY: guaranteed by the caller.
    unsafe { std::slice::from_raw_parts(std::ptr::with_exposed_provenance::<T>(address).add(at.start), at.len()) }
}

/// # Safety
/// The conditions of [`read`], and no other code reads the elements.
unsafe fn write<'a, T>(address: usize, at: &Range<usize>) -> &'a mut [T] {
    // SAFETY: guaranteed by the caller.
    unsafe { std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut::<T>(address).add(at.start), at.len()) }
}
