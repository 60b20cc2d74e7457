//! The memory of a kernel's operands, as its task accesses them.
#![allow(unsafe_code)]

use crate::device::{DeviceSlice, Operand};
use std::cell::Cell;

/// The operands of one kernel, as its task accesses them.
pub(super) struct TaskMemory<'a> {
    operands: &'a [Operand],
    /// One bit for each operand that has been lent for writing.
    lent: Cell<u32>,
}

impl<'a> TaskMemory<'a> {
    /// The memory of a kernel's `operands`; each operand that the kernel writes is lent once.
    pub(super) fn new(operands: &'a [Operand]) -> Self {
        Self { operands, lent: Cell::new(0) }
    }

    /// An operand that the kernel reads.
    ///
    /// # Panics
    /// If the kernel has not declared the operand, or writes it.
    pub(super) fn read<T: bytemuck::Pod>(&self, slice: DeviceSlice) -> &'a [T] {
        assert!(self.find(slice, false).is_some() && self.find(slice, true).is_none(), "an operand that is read");
        // SAFETY: a `TaskMemory` is made in the task of a checked kernel: the device owns the operands, none of them overlaps a written
        // operand, and the order of the streams keeps other tasks away.
        unsafe { view(slice) }
    }

    /// An operand that the kernel writes.
    ///
    /// # Panics
    /// If the kernel has not declared the operand, or if it was lent before.
    pub(super) fn write<T: bytemuck::Pod>(&self, slice: DeviceSlice) -> &'a mut [T] {
        let index = self.find(slice, true).expect("an operand that is written");
        let lent = self.lent.replace(self.lent.get() | 1 << index);
        assert!(lent >> index & 1 == 0, "an operand that is written is lent once");
        // SAFETY: as above; the operand overlaps no other operand, and it is lent only once.
        unsafe { view_mut(slice) }
    }

    /// An operand that an earlier part of the kernel has written.
    ///
    /// # Panics
    /// If the kernel does not write the operand.
    pub(super) fn written<T: bytemuck::Pod>(&self, slice: DeviceSlice) -> &'a [T] {
        assert!(self.find(slice, true).is_some(), "an operand that is written");
        // SAFETY: as above; the part of the kernel that wrote the operand has returned, and a kernel does not keep its operands.
        unsafe { view(slice) }
    }

    fn find(&self, slice: DeviceSlice, written: bool) -> Option<usize> {
        let fits = |operand: &Operand| operand.slice == Some(slice) && operand.access.writes() == written;
        self.operands.iter().position(fits)
    }
}

/// The memory of `s` for reading. Call this only inside a task.
///
/// # Safety
/// `s` came from this process's CPU device, the device is alive, and no other task writes the memory at the same time. Stream order and
/// events ensure the last condition.
pub(super) unsafe fn view<'a, T: bytemuck::Pod>(s: DeviceSlice) -> &'a [T] {
    assert_eq!(size_of::<T>(), s.dtype().bytes());
    // SAFETY: the caller upholds the contract; the address is aligned because allocations and slices are aligned.
    unsafe { std::slice::from_raw_parts(s.addr() as *const T, s.elems()) }
}

/// The memory of `s` for writing. Call this only inside a task.
///
/// # Safety
/// The conditions of [`view`], and no other task reads or writes the memory at the same time.
pub(super) unsafe fn view_mut<'a, T: bytemuck::Pod>(s: DeviceSlice) -> &'a mut [T] {
    assert_eq!(size_of::<T>(), s.dtype().bytes());
    // SAFETY: the caller upholds the contract.
    unsafe { std::slice::from_raw_parts_mut(s.addr() as *mut T, s.elems()) }
}
