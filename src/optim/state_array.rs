//! The state of an optimizer as a list of named arrays, each with one value for each parameter.
//!
//! Memory, transfers, checkpoints and digests go through the list, so the bytes and formats of a state follow from it alone.

use crate::dtype::Dtype;
use crate::error::Result;
use crate::optim::int8::{self, GROUP, MomentGroup, MomentKind};
use crate::optim::moments::{Moment, Rounding};
use crate::parallel::{self, PART_ELEMS};
use half::bf16;
use std::ops::{Index, Range};

/// Largest number of arrays of an optimizer's state.
const ARRAYS_MAX: usize = 3;

/// Position of an array in the list of its optimizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatePart(usize);

impl StatePart {
    /// The parameters, the first array of every optimizer.
    pub const PARAMS: Self = Self(0);

    /// The array at position `index`.
    pub(super) const fn at(index: usize) -> Self {
        Self(index)
    }

    /// Position in the list.
    pub const fn index(self) -> usize {
        self.0
    }
}

/// Rounding of values that the format of an array does not represent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrayRounding {
    /// To the nearest value.
    Nearest,
    /// Up or down at random, so that the mean is correct: see [`Rounding`].
    Stochastic,
    /// Of master weights beside 8-bit moments: see [`int8::settled`].
    Settled,
}

/// One array of an optimizer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateArray {
    /// Name in messages and in lists of allocations.
    pub name: &'static str,
    /// Format between steps. A step computes in fp32. Arrays of `uint8` consist of [`MomentGroup`]s.
    pub dtype: Dtype,
    /// Rounding to that format.
    pub rounding: ArrayRounding,
    /// Whether a value below zero is damage.
    pub is_nonnegative: bool,
}

impl StateArray {
    /// The master weights.
    pub const PARAMS: Self = Self { name: "parameters", dtype: Dtype::Float32, rounding: ArrayRounding::Nearest, is_nonnegative: false };

    /// The master weights beside 8-bit moments.
    pub(super) const SETTLED: Self = Self { rounding: ArrayRounding::Settled, ..Self::PARAMS };

    /// The lower halves of split master weights, in memory only.
    pub(super) const LOWER: Self =
        Self { name: "lower halves", dtype: Dtype::Uint16, rounding: ArrayRounding::Nearest, is_nonnegative: false };

    /// Elements and bytes of the smallest part that is stored by itself.
    const fn unit(&self) -> (usize, usize) {
        match self.dtype {
            Dtype::Uint8 => (GROUP, size_of::<MomentGroup>()),
            dtype => (1, dtype.bytes()),
        }
    }

    /// Bytes of the values of `elems` parameters.
    pub const fn bytes(&self, elems: usize) -> usize {
        let (unit_elems, unit_bytes) = self.unit();
        elems.div_ceil(unit_elems) * unit_bytes
    }

    /// Elements of the fewest whole units that take at least `bytes` bytes.
    pub(crate) const fn elems_of(&self, bytes: usize) -> usize {
        let (unit_elems, unit_bytes) = self.unit();
        bytes.div_ceil(unit_bytes) * unit_elems
    }

    /// Number of values of [`StateArray::dtype`] in which `elems` parameters are stored.
    pub(crate) const fn stored_values(&self, elems: usize) -> usize {
        self.bytes(elems) / self.dtype.bytes()
    }

    /// Bytes with the elements `range` in memory that begins with the unit of element `first`. They begin and end with whole units.
    pub(crate) const fn place(&self, first: usize, range: &Range<usize>) -> Range<usize> {
        let (unit_elems, unit_bytes) = self.unit();
        let before = first / unit_elems;
        (range.start / unit_elems - before) * unit_bytes..(range.end.div_ceil(unit_elems) - before) * unit_bytes
    }

    /// Whether values are stored in [`MomentGroup`]s.
    pub(crate) fn has_groups(&self) -> bool {
        self.groups_of().is_some()
    }

    /// Which moments an array of [`MomentGroup`]s has.
    fn groups_of(&self) -> Option<MomentKind> {
        let kind = if self.rounding == ArrayRounding::Stochastic { MomentKind::Second } else { MomentKind::First };
        (self.dtype == Dtype::Uint8).then_some(kind)
    }

    /// Fills `to` with the stored form of fp32 `values`. Values that the format does not represent are rounded; `rounding` has the random
    /// bits. The values of an array of [`MomentGroup`]s begin with a group, and zeros are stored behind the last value. Several threads store
    /// many values.
    ///
    /// # Panics
    /// If `to` has another size, or the values of groups begin inside one.
    pub(crate) fn store(&self, values: &[f32], rounding: Rounding, to: &mut [u8]) {
        assert_eq!(to.len(), self.bytes(values.len()), "room for the stored values");
        assert!(rounding.first.is_multiple_of(self.unit().0), "values of {} from element {} on", self.name, rounding.first);
        let parts = values.chunks(PART_ELEMS).zip(to.chunks_mut(self.bytes(PART_ELEMS))).enumerate();
        parallel::for_each(parts, |(nth, (values, to))| self.store_part(values, rounding.behind(nth * PART_ELEMS), to));
    }

    fn store_part(&self, values: &[f32], rounding: Rounding, to: &mut [u8]) {
        match (self.dtype, self.rounding) {
            (Dtype::Bfloat16, ArrayRounding::Stochastic) => narrow(values, to, |i, v| bf16::second(v, rounding.bits(i))),
            (Dtype::Bfloat16, _) => narrow(values, to, |_, x| bf16::from_f32(x)),
            _ => match self.groups_of() {
                Some(kind) => int8::encode_all(kind, values, rounding, to),
                None if self.rounding == ArrayRounding::Settled => {
                    for (to, &value) in to.chunks_exact_mut(4).zip(values) {
                        to.copy_from_slice(&int8::settled(value).to_le_bytes());
                    }
                }
                None => to.copy_from_slice(bytemuck::cast_slice(values)),
            },
        }
    }

    /// Rounds fp32 `values` that are stored in place.
    pub(crate) fn settle(&self, values: &mut [f32]) {
        if self.rounding == ArrayRounding::Settled {
            parallel::for_each(values.chunks_mut(PART_ELEMS), |values| values.iter_mut().for_each(|value| *value = int8::settled(*value)));
        }
    }

    /// The fp32 `value` of a master as it is stored.
    #[inline(always)]
    pub(super) fn settled(&self, value: f32) -> f32 {
        if self.rounding == ArrayRounding::Settled { int8::settled(value) } else { value }
    }

    /// Passes the stored form of fp32 `values` to `each`, in pieces. The format must represent the values exactly. The values of an array
    /// of [`MomentGroup`]s begin with a group, and they end with a group or a tensor.
    ///
    /// # Errors
    /// Errors of `each`.
    pub(crate) fn stored(&self, values: &[f32], mut each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        if self.dtype == Dtype::Float32 {
            return each(bytemuck::cast_slice(values));
        }
        let mut buffer = [0; 2 * PIECE];
        values.chunks(PIECE).try_for_each(|values| {
            let bytes = &mut buffer[..self.bytes(values.len())];
            match self.groups_of() {
                Some(kind) => int8::encode_all(kind, values, Rounding { key: 0, first: 0 }, bytes),
                None => narrow(values, bytes, |_, x| bf16::from_f32(x)),
            }
            each(bytes)
        })
    }

    /// Sets `values` from their stored form, which `read` provides. The values of an array of [`MomentGroup`]s begin with a group.
    ///
    /// # Errors
    /// Errors of `read`.
    pub(crate) fn load(&self, values: &mut [f32], read: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        let elems = values.len();
        if let Some(kind) = self.groups_of() {
            let mut bytes = vec![0; self.bytes(elems)];
            read(&mut bytes)?;
            let parts = values.chunks_mut(PART_ELEMS).zip(bytes.chunks(self.bytes(PART_ELEMS)));
            parallel::for_each(parts, |(values, bytes)| int8::decode_all(kind, bytes, values));
            return Ok(());
        }
        let bytes: &mut [u8] = bytemuck::cast_slice_mut(values);
        // The stored form is read to the end of the fp32 buffer, so that no other memory is needed.
        let start = bytes.len() - self.bytes(elems);
        read(&mut bytes[start..])?;
        for (to, from) in (0..start).step_by(2).map(|at| (2 * at, start + at)) {
            let value = bf16::from_le_bytes([bytes[from], bytes[from + 1]]).to_f32();
            bytes[to..to + 4].copy_from_slice(&value.to_le_bytes());
        }
        Ok(())
    }
}

/// Elements whose stored form is passed on at once: whole [`MomentGroup`]s.
const PIECE: usize = 4096;

fn narrow(values: &[f32], to: &mut [u8], stored: impl Fn(usize, f32) -> bf16) {
    for (i, (to, &value)) in to.chunks_exact_mut(2).zip(values).enumerate() {
        to.copy_from_slice(&stored(i, value).to_le_bytes());
    }
}

/// The arrays of an optimizer's state, in their order in memory, checkpoints and digests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateArrays(&'static [StateArray]);

impl StateArrays {
    /// The list of `arrays`.
    ///
    /// # Panics
    /// If the first array is not that of the parameters, or there are more than [`ARRAYS_MAX`].
    pub(super) const fn new(arrays: &'static [StateArray]) -> Self {
        assert!(!arrays.is_empty() && arrays.len() <= ARRAYS_MAX && matches!(arrays[0].dtype, Dtype::Float32 | Dtype::Uint16));
        Self(arrays)
    }

    /// The positions of all arrays, in order.
    pub fn parts(self) -> impl DoubleEndedIterator<Item = StatePart> + ExactSizeIterator {
        (0..self.0.len()).map(StatePart)
    }

    /// The array at position `index`, if there is one.
    pub(crate) fn part(self, index: u64) -> Option<StatePart> {
        usize::try_from(index).ok().filter(|&index| index < self.0.len()).map(StatePart)
    }

    /// Bytes of a parameter's state; 8-bit moments have a fraction of a byte for exponents.
    pub fn bytes_per_elem(self) -> f64 {
        self.bytes(GROUP) as f64 / GROUP as f64
    }

    /// Bytes of the state of `elems` parameters.
    pub fn bytes(self, elems: usize) -> usize {
        self.0.iter().map(|array| array.bytes(elems)).sum()
    }

    /// First byte of `part` if the arrays of `elems` parameters are stored one after the other.
    pub(crate) fn offset(self, part: StatePart, elems: usize) -> usize {
        self.0[..part.0].iter().map(|array| array.bytes(elems)).sum()
    }

    /// Bytes of a value in the narrowest array.
    pub(crate) fn narrowest_bytes(self) -> usize {
        self.0.iter().map(|array| array.dtype.bytes()).min().unwrap_or(1)
    }

    /// Multiples at which the elements of a tensor may be divided.
    pub(crate) fn unit_elems(self) -> usize {
        self.0.iter().map(|array| array.unit().0).max().unwrap_or(1)
    }
}

impl Index<StatePart> for StateArrays {
    type Output = StateArray;

    fn index(&self, part: StatePart) -> &StateArray {
        &self.0[part.0]
    }
}

/// A value for each array of a list, without memory on the heap.
#[derive(Clone, Copy, Debug)]
pub struct PerArray<T> {
    values: [Option<T>; ARRAYS_MAX],
}

impl<T> PerArray<T> {
    /// A value for each of `arrays`, made in order.
    ///
    /// # Errors
    /// The first error of `make`.
    pub(crate) fn try_new(arrays: StateArrays, mut make: impl FnMut(&StateArray) -> Result<T>) -> Result<Self> {
        let mut values = [const { None }; ARRAYS_MAX];
        for (value, array) in values.iter_mut().zip(arrays.0) {
            *value = Some(make(array)?);
        }
        Ok(Self { values })
    }

    /// The result of `of` for each value.
    pub fn map<U>(self, mut of: impl FnMut(StatePart, T) -> U) -> PerArray<U> {
        let mut nth = 0..;
        PerArray { values: self.values.map(|value| nth.next().zip(value).map(|(nth, value)| of(StatePart(nth), value))) }
    }

    /// The values as an array of the list's length.
    ///
    /// # Panics
    /// If the list has another length: the code of an optimizer was called with another optimizer's state.
    pub fn into_array<const N: usize>(self) -> [T; N] {
        let mut values = self.values.into_iter().flatten();
        let array = std::array::from_fn(|_| values.next().expect("an array of the optimizer's state"));
        assert!(values.next().is_none(), "more arrays than {N}");
        array
    }
}

impl<T, const N: usize> From<[T; N]> for PerArray<T> {
    /// # Panics
    /// If there are more than [`ARRAYS_MAX`] values.
    fn from(values: [T; N]) -> Self {
        assert!(N <= ARRAYS_MAX, "{N} arrays");
        let mut values = values.into_iter();
        Self { values: std::array::from_fn(|_| values.next()) }
    }
}

impl<T> IntoIterator for PerArray<T> {
    type Item = T;
    type IntoIter = std::iter::Flatten<std::array::IntoIter<Option<T>, ARRAYS_MAX>>;

    fn into_iter(self) -> Self::IntoIter {
        self.values.into_iter().flatten()
    }
}

impl<T> Index<StatePart> for PerArray<T> {
    type Output = T;

    /// # Panics
    /// If the list has no such array.
    fn index(&self, part: StatePart) -> &T {
        self.values[part.0].as_ref().expect("an array of the optimizer's state")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;
    use crate::optim::moments::Moments;
    use crate::optim::samples;

    const INT8_PARTS: [StatePart; 3] = [StatePart::PARAMS, StatePart::M, StatePart::V];

    /// An optimizer with a single moment.
    const MOMENTUM: [StateArray; 2] = [
        StateArray::PARAMS,
        StateArray { name: "momentum", dtype: Dtype::Bfloat16, rounding: ArrayRounding::Nearest, is_nonnegative: false },
    ];

    #[test]
    fn bytes_and_places_of_a_state_follow_from_its_list() {
        let lists = [Moments::Float32.arrays(), Moments::Bfloat16.arrays(), StateArrays::new(&MOMENTUM), Moments::Int8.arrays()];
        let bytes = |list: StateArrays| (list.bytes_per_elem(), list.narrowest_bytes(), list.unit_elems());
        assert_eq!(lists.map(bytes), [(12.0, 4, 1), (8.0, 2, 1), (6.0, 2, 1), (6.0625, 1, 128)]);
        let places = |list: StateArrays| list.parts().map(|part| list.offset(part, 10)).collect::<Vec<_>>();
        assert_eq!(lists.map(places), [vec![0, 40, 80], vec![0, 40, 60], vec![0, 40], vec![0, 40, 172]]);
        for list in lists {
            let end: usize = list.parts().map(|part| list[part].bytes(10)).sum();
            assert_eq!(list.bytes(10), end);
            let parts: Vec<_> = list.parts().collect();
            assert_eq!((0..4).map_while(|index| list.part(index)).collect::<Vec<_>>(), parts);
        }
        assert_eq!(lists[2].part(u64::MAX), None);
    }

    #[test]
    fn ranges_of_groups_are_whole_groups() {
        let [params, m, _] = INT8_PARTS.map(|part| Moments::Int8.arrays()[part]);
        assert_eq!((params.place(4096, &(4100..4200)), m.place(4096, &(4100..4200))), (16..416, 0..132));
        assert_eq!((m.place(4096, &(4096 + 127..4096 + 129)), m.place(4100, &(4352..4480))), (0..264, 264..396));
        assert_eq!((m.bytes(0), m.bytes(1), m.bytes(128), m.bytes(129)), (0, 132, 132, 264));
        assert_eq!(m.stored_values(256), 264);
        assert_eq!([0, 1, 127, 128, 1000].map(int8::whole_groups), [128, 128, 128, 128, 896]);
    }

    #[test]
    fn many_values_are_stored_and_loaded_in_parts_as_one_by_one() {
        let values: Vec<f32> = samples::split_masters(3, 3 * PART_ELEMS + 77).into_iter().map(f32::abs).collect();
        for moments in [Moments::Float32, Moments::Bfloat16, Moments::Int8] {
            for part in INT8_PARTS {
                let array = &moments.arrays()[part];
                let rounding = Rounding { key: 9, first: 2 * GROUP };
                let (mut stored, mut single) = (vec![1; array.bytes(values.len())], Vec::new());
                array.store(&values, rounding, &mut stored);
                for (nth, values) in values.chunks(GROUP).enumerate() {
                    let mut bytes = vec![1; array.bytes(values.len())];
                    array.store_part(values, rounding.behind(nth * GROUP), &mut bytes);
                    single.extend(bytes);
                }
                assert!(stored == single, "{moments}, {}", array.name);
                let loaded = |bytes: &[u8], out: &mut [f32]| {
                    let read = |to: &mut [u8]| {
                        to.copy_from_slice(bytes);
                        Ok(())
                    };
                    array.load(out, read).unwrap();
                };
                let mut whole = vec![0.0; values.len()];
                loaded(&stored, &mut whole);
                for (out, bytes) in whole.chunks(GROUP).zip(stored.chunks(array.bytes(GROUP))) {
                    let mut few = vec![0.0; out.len()];
                    loaded(bytes, &mut few);
                    assert_eq!(out, few, "{moments}, {}", array.name);
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "values of m from element 64 on")]
    fn groups_are_not_stored_from_within() {
        let m = Moments::Int8.arrays()[StatePart::M];
        m.store(&[0.0; 64], Rounding { key: 0, first: 64 }, &mut [0; 132]);
    }

    #[test]
    fn values_by_array_keep_their_order_and_stop_at_the_first_error() {
        let list = StateArrays::new(&MOMENTUM);
        let names = PerArray::try_new(list, |array| Ok(array.name)).unwrap();
        assert_eq!((names.into_array(), names[StatePart::PARAMS]), (["parameters", "momentum"], "parameters"));
        let lengths = names.map(|part, name| (part.index(), name.len()));
        assert_eq!(lengths.into_iter().collect::<Vec<_>>(), [(0, 10), (1, 8)]);
        let mut made = 0;
        let failed = PerArray::try_new(list, |_| {
            made += 1;
            Err::<(), _>(Error::usage("full"))
        });
        assert!(failed.is_err() && made == 1);
    }

    #[test]
    #[should_panic(expected = "more arrays than 2")]
    fn the_code_of_one_optimizer_does_not_take_the_state_of_another() {
        let [_, _] = PerArray::from([1, 2, 3]).into_array();
    }
}
