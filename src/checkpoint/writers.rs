//! Threads that write a file of state, piece by piece.

use super::format::CHUNK_BYTES;
use super::placed_state::{PlacedState, WrittenState};
use super::save_rate::SaveRate;
use crate::disk::{self, DIRECT_ALIGN};
use crate::error::{Error, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};

/// Threads of a file. Disks serve several writes faster than one, and each thread computes checksums while other threads wait for the disk.
pub(crate) const WRITERS: usize = 4;
/// Pieces of a file that exist at once: each thread writes one, and others are filled meanwhile.
pub(crate) const PIECES: usize = WRITERS + 2;
/// A piece ends at a multiple of this offset in the file.
pub(crate) const PIECE_BYTES: usize = 2 * CHUNK_BYTES;

/// Consecutive bytes of a file. Their addresses agree with their offsets in the file modulo [`DIRECT_ALIGN`], as direct writes need it.
#[derive(Default)]
pub(super) struct FilePiece {
    memory: Vec<u8>,
    start: usize,
    bytes: usize,
    offset: u64,
}

impl FilePiece {
    /// Begins an empty piece at `offset` in the file.
    fn begin(&mut self, offset: u64) {
        if self.memory.is_empty() {
            // Zeros of the system: of a file that is shorter than a piece, the rest of the memory is never touched.
            self.memory = vec![0; PIECE_BYTES + 2 * DIRECT_ALIGN];
        }
        let aligned = self.memory.as_ptr().align_offset(DIRECT_ALIGN);
        (self.start, self.bytes, self.offset) = (aligned + offset as usize % DIRECT_ALIGN, 0, offset);
    }

    /// Bytes that fit into the rest of the piece.
    fn free_bytes(&self) -> usize {
        PIECE_BYTES - self.offset as usize % PIECE_BYTES - self.bytes
    }

    pub(super) fn is_full(&self) -> bool {
        self.free_bytes() == 0
    }

    /// Extends the piece by `bytes` bytes, or as many as fit, and returns them to be set.
    pub(super) fn extend(&mut self, bytes: usize) -> &mut [u8] {
        let (start, bytes) = (self.start + self.bytes, bytes.min(self.free_bytes()));
        self.bytes += bytes;
        &mut self.memory[start..start + bytes]
    }

    fn content(&self) -> &[u8] {
        &self.memory[self.start..self.start + self.bytes]
    }
}

/// State of the threads of one file.
struct WritersShared {
    file: PlacedState,
    rate: SaveRate,
    /// The first error.
    failure: Mutex<Option<Error>>,
}

impl WritersShared {
    fn failure(&self) -> MutexGuard<'_, Option<Error>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes pieces until there are no more. After an error the remaining pieces are dropped.
    fn run(&self, full: &Mutex<Receiver<FilePiece>>, spare: &Sender<FilePiece>) {
        while let Ok(piece) = { full.lock().unwrap_or_else(PoisonError::into_inner).recv() } {
            if self.failure().is_none() {
                self.rate.pass(piece.bytes as u64);
                if let Err(error) = self.file.write(piece.offset, piece.content()) {
                    self.failure().get_or_insert(error);
                }
            }
            // Nobody needs the piece after the last one.
            let _ = spare.send(piece);
        }
    }
}

/// The threads of one file. Dropping them waits for their last writes.
pub(super) struct Writers {
    shared: Arc<WritersShared>,
    full: Option<SyncSender<FilePiece>>,
    spare: Mutex<Receiver<FilePiece>>,
    threads: Vec<JoinHandle<()>>,
    /// Pieces that were made so far.
    made: AtomicUsize,
}

impl Writers {
    /// Starts threads that write `file`.
    ///
    /// # Errors
    /// `Resource` when a thread cannot start.
    pub(super) fn start(file: PlacedState, rate: SaveRate) -> Result<Self> {
        let shared = Arc::new(WritersShared { file, rate, failure: Mutex::default() });
        let ((full, receiver), (sender, spare)) = (mpsc::sync_channel(PIECES), mpsc::channel());
        let receiver = Arc::new(Mutex::new(receiver));
        let (spare, threads) = (Mutex::new(spare), Vec::with_capacity(WRITERS));
        let mut writers = Self { shared, full: Some(full), spare, threads, made: AtomicUsize::new(0) };
        for _ in 0..WRITERS {
            let (shared, receiver, sender) = (writers.shared.clone(), receiver.clone(), sender.clone());
            let run = disk::continued(move || shared.run(&receiver, &sender));
            let thread = thread::Builder::new().name("save".into()).spawn(run);
            writers.threads.push(thread.map_err(|e| Error::resource("start a thread that writes a checkpoint", e))?);
        }
        Ok(writers)
    }

    /// See [`PlacedState::reserve`].
    pub(super) fn reserve(&self, bytes: u64) -> Result<()> {
        self.shared.file.reserve(bytes)
    }

    /// An empty piece at `offset` in the file. Waits until a thread has written one, if all are in use. A thread that has a piece must not
    /// ask for another one.
    ///
    /// # Errors
    /// The first error of a thread, once.
    pub(super) fn piece(&self, offset: u64) -> Result<FilePiece> {
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        let mut piece = match spare.try_recv() {
            Ok(piece) => piece,
            Err(_) if self.made.load(Ordering::Relaxed) < PIECES => {
                self.made.fetch_add(1, Ordering::Relaxed);
                FilePiece::default()
            }
            Err(_) => spare.recv().map_err(|e| Error::resource("write a checkpoint", e))?,
        };
        drop(spare);
        self.check()?;
        piece.begin(offset);
        Ok(piece)
    }

    /// Gives `piece` to a thread, which writes it.
    pub(super) fn write(&self, piece: FilePiece) {
        if let Some(full) = &self.full {
            // The threads take pieces until `full` is dropped.
            let _ = full.send(piece);
        }
    }

    /// Waits until everything is on the disk.
    ///
    /// # Errors
    /// The first error of a thread; errors of [`PlacedState::finish`].
    pub(super) fn finish(mut self) -> Result<WrittenState> {
        self.join();
        self.check()?;
        let shared = self.shared.clone();
        drop(self);
        let shared = Arc::into_inner(shared).expect("all threads have ended");
        shared.file.finish()
    }

    fn check(&self) -> Result<()> {
        self.shared.failure().take().map_or(Ok(()), Err)
    }

    fn join(&mut self) {
        self.full = None;
        self.threads.drain(..).for_each(|thread| thread.join().expect("a writer reports its failures"));
    }
}

impl Drop for Writers {
    fn drop(&mut self) {
        self.full = None;
        // A panic was reported by its thread.
        self.threads.drain(..).for_each(|thread| _ = thread.join());
    }
}
