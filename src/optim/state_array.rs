//! The state of an optimizer as a list of named arrays, each with one value for each parameter.
//!
//! Memory, transfers, checkpoints and digests go through the list, so the bytes and formats of a state follow from it alone.

use crate::dtype::Dtype;
use crate::error::Result;
use crate::optim::moments::{Moment, Rounding};
use half::bf16;
use std::ops::Index;

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
}

/// One array of an optimizer's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateArray {
    /// Name in messages and in lists of allocations.
    pub name: &'static str,
    /// Format between steps. A step computes in fp32.
    pub dtype: Dtype,
    /// Rounding to that format.
    pub rounding: ArrayRounding,
    /// Whether a value below zero is damage.
    pub is_nonnegative: bool,
}

impl StateArray {
    /// The master weights.
    pub const PARAMS: Self = Self { name: "parameters", dtype: Dtype::Float32, rounding: ArrayRounding::Nearest, is_nonnegative: false };

    /// The lower halves of split master weights, in memory only.
    pub(super) const LOWER: Self =
        Self { name: "lower halves", dtype: Dtype::Uint16, rounding: ArrayRounding::Nearest, is_nonnegative: false };

    /// Bytes of the values of `elems` parameters.
    pub const fn bytes(&self, elems: usize) -> usize {
        elems * self.dtype.bytes()
    }

    /// Fills `to` with the stored form of fp32 `values`. Values that the format does not represent are rounded; `rounding` has the random
    /// bits.
    ///
    /// # Panics
    /// If `to` has another size.
    pub(crate) fn store(&self, values: &[f32], rounding: Rounding, to: &mut [u8]) {
        match (self.dtype, self.rounding) {
            (Dtype::Bfloat16, ArrayRounding::Stochastic) => narrow(values, to, |i, v| bf16::second(v, rounding.bits(i))),
            (Dtype::Bfloat16, ArrayRounding::Nearest) => narrow(values, to, |_, x| bf16::from_f32(x)),
            _ => to.copy_from_slice(bytemuck::cast_slice(values)),
        }
    }

    /// Passes the stored form of fp32 `values` to `each`, in pieces. The format must represent the values exactly.
    ///
    /// # Errors
    /// Errors of `each`.
    pub(crate) fn stored(&self, values: &[f32], mut each: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        if self.dtype == Dtype::Float32 {
            return each(bytemuck::cast_slice(values));
        }
        let mut buffer = [0; 2 * 4096];
        values.chunks(buffer.len() / 2).try_for_each(|values| {
            let bytes = &mut buffer[..2 * values.len()];
            narrow(values, bytes, |_, x| bf16::from_f32(x));
            each(bytes)
        })
    }

    /// Sets `values` from their stored form, which `read` provides.
    ///
    /// # Errors
    /// Errors of `read`.
    pub(crate) fn load(&self, values: &mut [f32], read: impl FnOnce(&mut [u8]) -> Result<()>) -> Result<()> {
        let elems = values.len();
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

fn narrow(values: &[f32], to: &mut [u8], stored: impl Fn(usize, f32) -> bf16) {
    assert_eq!(to.len(), 2 * values.len(), "room for the stored values");
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

    /// Bytes of a parameter's state.
    pub fn state_bytes(self) -> usize {
        self.bytes(1)
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
        self.0.iter().map(|array| array.bytes(1)).min().unwrap_or(1)
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

    /// An optimizer with a single moment.
    const MOMENTUM: [StateArray; 2] = [
        StateArray::PARAMS,
        StateArray { name: "momentum", dtype: Dtype::Bfloat16, rounding: ArrayRounding::Nearest, is_nonnegative: false },
    ];

    #[test]
    fn bytes_and_places_of_a_state_follow_from_its_list() {
        let lists = [Moments::Float32.arrays(), Moments::Bfloat16.arrays(), StateArrays::new(&MOMENTUM)];
        assert_eq!(lists.map(|list| (list.state_bytes(), list.narrowest_bytes())), [(12, 4), (8, 2), (6, 2)]);
        let places = |list: StateArrays| list.parts().map(|part| list.offset(part, 10)).collect::<Vec<_>>();
        assert_eq!(lists.map(places), [vec![0, 40, 80], vec![0, 40, 60], vec![0, 40]]);
        for list in lists {
            let end: usize = list.parts().map(|part| list[part].bytes(10)).sum();
            assert_eq!((list.bytes(10), list.bytes(10)), (end, 10 * list.state_bytes()));
            let parts: Vec<_> = list.parts().collect();
            assert_eq!((0..4).map_while(|index| list.part(index)).collect::<Vec<_>>(), parts);
        }
        assert_eq!(lists[2].part(u64::MAX), None);
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
