//! Synchronization primitives: the atomics, cells and threads of the doorbell, the pool and the CPU device's streams.
//!
//! They are those of `std`. Under `--cfg loom` they are loom's, which runs a test once for every order that the memory model allows
//! (`tests/threads/loom.sh`), so that loom explores the production code and not a copy.

#[cfg(not(loom))]
pub(crate) use self::plain::UnsafeCell;
#[cfg(not(loom))]
pub(crate) use std::{
    sync::{OnceLock, atomic, mpsc},
    thread,
};

#[cfg(loom)]
pub(crate) use self::explored::OnceLock;
#[cfg(loom)]
pub(crate) use loom::{
    cell::UnsafeCell,
    sync::{atomic, mpsc},
    thread,
};

#[cfg(not(loom))]
mod plain {
    /// The cell of `std` with loom's interface: a pointer is valid for one call, so that loom sees each use of a cell.
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        /// Calls `read` with a pointer to the value.
        pub(crate) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
            read(self.0.get())
        }

        /// Calls `write` with a pointer to the value.
        pub(crate) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
            write(self.0.get())
        }
    }
}

#[cfg(loom)]
mod explored {
    use loom::sync::atomic::{AtomicBool, Ordering};

    /// A replacement, since loom has none. Readers see the value only after it was set in loom's order.
    pub(crate) struct OnceLock<T> {
        value: std::sync::OnceLock<T>,
        is_set: AtomicBool,
    }

    impl<T> Default for OnceLock<T> {
        fn default() -> Self {
            Self { value: std::sync::OnceLock::new(), is_set: AtomicBool::new(false) }
        }
    }

    impl<T> OnceLock<T> {
        pub(crate) fn get(&self) -> Option<&T> {
            self.is_set.load(Ordering::Acquire).then(|| self.value.get()).flatten()
        }

        pub(crate) fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
            let value = self.value.get_or_init(make);
            self.is_set.store(true, Ordering::Release);
            value
        }
    }
}
