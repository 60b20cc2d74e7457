//! Pieces that several threads read and one thread takes in order.

use crate::error::{Error, Result};
use std::sync::mpsc::{self, Receiver, Sender, SyncSender};
use std::thread;

/// Readers of a checkpoint. One reader computes checksums while the disk serves another one, and disks serve several reads faster.
pub(super) const READERS: usize = 4;
/// Pieces that exist at once: each reader reads one piece while its last one is taken.
pub(super) const PIECES: usize = 2 * READERS;

/// The end of a lane that takes pieces.
struct PieceLane<T> {
    pieces: Receiver<Result<T>>,
    taken: Sender<T>,
}

/// Reads pieces `0..count` with `readers`, piece `n` with reader `n % readers.len()`, and calls `take` with each piece in order. At most
/// [`PIECES`] pieces exist with [`READERS`] readers; `read` gets one that was taken, or a default.
///
/// # Errors
/// The first error in the order of the pieces, of `read` or of `take`; `Resource` when no thread can be started.
///
/// # Panics
/// If there is no reader; if `read` panics.
pub(super) fn in_order<R: Send, T: Default + Send>(
    readers: Vec<R>,
    count: usize,
    read: impl Fn(&mut R, usize, &mut T) -> Result<()> + Sync,
    mut take: impl FnMut(usize, &T) -> Result<()>,
) -> Result<()> {
    let step = readers.len();
    thread::scope(|scope| {
        let start = |(first, mut reader)| {
            let (filled, pieces) = mpsc::sync_channel(0);
            let (taken, spare) = mpsc::channel();
            let read = &read;
            let run = move || fill((first..count).step_by(step), |nth, piece| read(&mut reader, nth, piece), &filled, &spare);
            let thread = thread::Builder::new().name("read ahead".into()).spawn_scoped(scope, run);
            thread.map(|_| PieceLane { pieces, taken }).map_err(|e| Error::resource("start a thread that reads a checkpoint", e))
        };
        let lanes = readers.into_iter().enumerate().map(start).collect::<Result<Vec<_>>>()?;
        for nth in 0..count {
            let PieceLane { pieces, taken } = &lanes[nth % step];
            let piece = pieces.recv().expect("a reader sends all of its pieces")?;
            take(nth, &piece)?;
            // A reader that has sent its last piece needs no other one.
            let _ = taken.send(piece);
        }
        Ok(())
    })
}

/// The loop of a reader. It ends after an error, and when nobody takes pieces any more.
fn fill<T: Default>(
    pieces: impl Iterator<Item = usize>,
    mut read: impl FnMut(usize, &mut T) -> Result<()>,
    filled: &SyncSender<Result<T>>,
    spare: &Receiver<T>,
) {
    for nth in pieces {
        let mut piece = spare.try_recv().unwrap_or_default();
        let outcome = read(nth, &mut piece);
        let is_last = outcome.is_err();
        if filled.send(outcome.map(|()| piece)).is_err() || is_last {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    static MADE: AtomicUsize = AtomicUsize::new(0);

    /// A buffer that counts how many of its kind were made.
    struct Counted(usize);

    impl Default for Counted {
        fn default() -> Self {
            MADE.fetch_add(1, Ordering::Relaxed);
            Self(0)
        }
    }

    thread_local! {
        static SEED: Cell<u64> = const { Cell::new(1) };
    }

    fn dawdle() {
        let seed = SEED.get().wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        SEED.set(seed);
        thread::sleep(Duration::from_micros(seed >> 55));
    }

    #[test]
    fn pieces_come_in_order_from_any_number_of_readers() {
        for (readers, count) in [(1, 7), (2, 7), (4, 3), (4, 100), (3, 0)] {
            let mut taken = Vec::new();
            let read = |reader: &mut usize, nth, piece: &mut Vec<usize>| {
                dawdle();
                assert_eq!(nth % readers, *reader);
                piece.clear();
                piece.extend([nth, nth * nth]);
                Ok(())
            };
            in_order((0..readers).collect(), count, read, |nth, piece| {
                dawdle();
                assert_eq!(piece, &[nth, nth * nth]);
                taken.push(nth);
                Ok(())
            })
            .unwrap();
            assert_eq!(taken, (0..count).collect::<Vec<_>>(), "{readers} readers");
        }
    }

    #[test]
    fn the_first_error_in_order_ends_all() {
        let read = |_: &mut (), nth, _: &mut ()| {
            dawdle();
            if nth >= 5 { Err(Error::usage(format!("piece {nth}"))) } else { Ok(()) }
        };
        for _ in 0..20 {
            let mut taken = 0;
            let ended = in_order(vec![(); 4], 50, read, |nth, ()| {
                taken = nth + 1;
                Ok(())
            });
            assert_eq!((ended.unwrap_err().to_string().as_str(), taken), ("piece 5", 5));
        }
        let ended = in_order(
            vec![(); 4],
            50,
            |_, _, _: &mut ()| Ok(()),
            |nth, ()| {
                if nth == 9 { Err(Error::usage("taken")) } else { Ok(()) }
            },
        );
        assert_eq!(ended.unwrap_err().to_string(), "taken");
    }

    #[test]
    fn so_many_pieces_exist_at_once() {
        let read = |_: &mut (), nth, piece: &mut Counted| {
            piece.0 = nth;
            Ok(())
        };
        in_order(vec![(); READERS], 500, read, |nth, piece| {
            assert_eq!(piece.0, nth);
            dawdle();
            Ok(())
        })
        .unwrap();
        assert!(MADE.load(Ordering::Relaxed) <= PIECES, "{MADE:?} pieces");
    }
}
