//! The disk of the simulated machine. It writes the pieces of a save, one after another.

use super::disk_writes::DiskWrites;
use super::world::World;
use std::cell::RefCell;
use std::rc::Rc;

/// The disk of a [`SimDevice`](super::SimDevice).
pub(crate) struct SimDisk {
    pub(super) world: Rc<RefCell<World>>,
}

impl SimDisk {
    /// Writes the pieces of a save at `bytes_per_s` from now on. `next_piece` returns the bytes of the next piece, or `None` while no piece
    /// is ready. At most `most` pieces are in memory at once.
    pub(crate) fn write(&self, bytes_per_s: f64, most: usize, next_piece: impl FnMut() -> Option<usize> + 'static) {
        self.world.borrow_mut().write(DiskWrites { bytes_per_s, most, next_piece: Box::new(next_piece) });
    }
}
