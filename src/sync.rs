//! Where threads meet: the atomics, cells and threads of the doorbell, the pool and the CPU device's streams.
//!
//! Plainly `std`'s. Under `--cfg loom` they are loom's, which runs a test once for every order that the memory model allows
//! (`tests/threads/loom.sh`), so that what it explores is this code and no copy of it.

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
    /// `std`'s cell behind loom's interface: a pointer is good for one call, so that loom sees when a cell is used.
    pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

    impl<T> UnsafeCell<T> {
        pub(crate) fn new(value: T) -> Self {
            Self(std::cell::UnsafeCell::new(value))
        }

        /// Lets `read` read what the pointer shows.
        pub(crate) fn with<R>(&self, read: impl FnOnce(*const T) -> R) -> R {
            read(self.0.get())
        }

        /// Lets `write` write it.
        pub(crate) fn with_mut<R>(&self, write: impl FnOnce(*mut T) -> R) -> R {
            write(self.0.get())
        }
    }
}

#[cfg(loom)]
mod explored {
    use loom::sync::atomic::{AtomicBool, Ordering};

    /// Loom has none. A reader sees the value only after it was set, in loom's order of things.
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
