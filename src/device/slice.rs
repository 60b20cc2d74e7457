//! Device memory as a typed view.

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use std::ops::Range;

/// A typed view of memory that a device has allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlice {
    addr: u64,
    elems: usize,
    dtype: Dtype,
}

impl DeviceSlice {
    /// `elems` elements from `addr` on. Used by devices, which own the memory, and for layouts that are never dereferenced.
    pub(crate) fn at(addr: u64, elems: usize, dtype: Dtype) -> Self {
        Self { addr, elems, dtype }
    }

    /// Address of the first element on the device; only the device may dereference it.
    pub fn addr(self) -> u64 {
        self.addr
    }

    /// Number of elements.
    pub fn elems(self) -> usize {
        self.elems
    }

    /// Format of each element.
    pub fn dtype(self) -> Dtype {
        self.dtype
    }

    /// Size in bytes.
    pub fn bytes(self) -> usize {
        self.elems * self.dtype.bytes()
    }

    /// Address after the last element.
    fn end(self) -> u64 {
        self.addr + self.bytes() as u64
    }

    /// The part with `elems` elements from element `start` on.
    ///
    /// # Panics
    /// If the part exceeds the slice.
    pub fn slice(self, start: usize, elems: usize) -> Self {
        assert!(start.checked_add(elems).is_some_and(|end| end <= self.elems), "slice {start}+{elems} of {}", self.elems);
        Self { addr: self.addr + (start * self.dtype.bytes()) as u64, elems, dtype: self.dtype }
    }

    /// A view of the same memory as `elems` elements of `dtype`, from byte `start` on.
    ///
    /// # Panics
    /// If the view exceeds the slice or is not aligned.
    pub fn view(self, start: usize, elems: usize, dtype: Dtype) -> Self {
        let part = Self { addr: self.addr + start as u64, elems, dtype };
        assert!(start + part.bytes() <= self.bytes(), "view {start}+{} of {} bytes", part.bytes(), self.bytes());
        assert!(part.addr.is_multiple_of(dtype.bytes() as u64), "a view of {dtype} that is not aligned");
        part
    }

    /// Columns `cols` of rows `rows` of the matrix with `pitch` columns that begins here.
    ///
    /// # Panics
    /// If the part exceeds the slice, or has no rows.
    pub(crate) fn part(self, pitch: usize, rows: Range<usize>, cols: Range<usize>) -> MatrixPart {
        assert!(cols.end <= pitch && !rows.is_empty(), "columns {cols:?} of {pitch} in rows {rows:?}");
        MatrixPart {
            memory: self.slice(rows.start * pitch + cols.start, (rows.len() - 1) * pitch + cols.len()),
            pitch,
            cols: cols.len(),
            count: rows.len(),
        }
    }

    /// Whether the two slices share a byte.
    pub(super) fn overlaps(self, other: Self) -> bool {
        self.addr < other.end() && other.addr < self.end()
    }
}

/// Some columns of some rows of a matrix: parts of memory with equal length and equal distance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MatrixPart {
    /// Memory from the first element to the last.
    pub(super) memory: DeviceSlice,
    /// Elements between the beginnings of two rows.
    pitch: usize,
    cols: usize,
    pub(super) count: usize,
}

impl MatrixPart {
    /// Bytes between the beginnings of two rows.
    pub(super) fn pitch_bytes(self) -> usize {
        self.pitch * self.memory.dtype.bytes()
    }

    /// Bytes of a row.
    pub(super) fn row_bytes(self) -> usize {
        self.cols * self.memory.dtype.bytes()
    }

    /// Bytes of all rows.
    pub(super) fn bytes(self) -> usize {
        self.count * self.row_bytes()
    }

    /// Whether both parts have the same number and length of rows.
    pub(super) fn fits(self, other: Self) -> bool {
        (self.count, self.row_bytes()) == (other.count, other.row_bytes())
    }
}

/// All allocations of a device, in the order of their addresses.
#[derive(Clone, Default)]
pub(super) struct Allocated(Vec<DeviceSlice>);

impl Allocated {
    /// Adds a new allocation.
    pub(super) fn add(&mut self, memory: DeviceSlice) -> DeviceSlice {
        let index = self.0.partition_point(|known| known.addr < memory.addr);
        self.0.insert(index, memory);
        memory
    }

    /// Removes the allocation at the address of `memory`.
    pub(super) fn remove(&mut self, memory: DeviceSlice) {
        self.0.retain(|known| known.addr != memory.addr);
    }

    /// An error unless `part` lies inside one allocation.
    pub(super) fn check(&self, part: DeviceSlice) -> Result<()> {
        let before = self.0.partition_point(|known| known.addr <= part.addr);
        let is_inside = before.checked_sub(1).is_some_and(|index| part.end() <= self.0[index].end());
        if is_inside || part.elems == 0 {
            return Ok(());
        }
        let DeviceSlice { addr, elems, dtype } = part;
        Err(Error::resource(
            "use device memory",
            format!("{elems} {dtype} at {addr:#x} are not this device's: pass memory that it allocated"),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_without_an_owner_is_refused() {
        let mut allocated = Allocated::default();
        let at = |addr, elems| DeviceSlice::at(addr, elems, Dtype::Float32);
        for (addr, elems) in [(4096, 16), (256, 4), (1024, 8)] {
            allocated.add(at(addr, elems));
        }
        for part in [at(256, 4), at(260, 3), at(1024, 8), at(4156, 1), at(7, 0)] {
            allocated.check(part).unwrap();
        }
        allocated.remove(at(1024, 8));
        for part in [at(1024, 8), at(252, 1), at(256, 5), at(272, 1), at(1020, 2), at(4096, 17), at(1 << 40, 1)] {
            let message = allocated.check(part).unwrap_err().to_string();
            assert!(message.starts_with("use device memory: ") && message.contains(&format!("{:#x}", part.addr)), "{message}");
        }
    }

    #[test]
    fn rows_of_a_matrix_reach_from_their_first_element_to_their_last() {
        let rows = DeviceSlice::at(256, 5 * 8, Dtype::Bfloat16).part(8, 1..4, 2..5);
        assert_eq!((rows.memory.addr, rows.memory.elems, rows.count), (256 + 2 * 10, 2 * 8 + 3, 3));
        assert_eq!((rows.pitch_bytes(), rows.row_bytes(), rows.bytes()), (16, 6, 18));
    }

    #[test]
    #[should_panic(expected = "view 8+16 of 20 bytes")]
    fn a_view_stays_inside() {
        DeviceSlice::at(256, 10, Dtype::Bfloat16).view(8, 4, Dtype::Float32);
    }
}
