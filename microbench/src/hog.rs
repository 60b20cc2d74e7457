//! A neighbour that takes memory bandwidth: threads that copy until they are told to stop.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// fp32 elements of each thread's arrays: larger than a core's share of any cache.
const ELEMS: usize = 16 << 20;

/// Threads that copy, unpinned: the system puts them where CPUs are free. Dropping it ends them.
pub struct Hog {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Hog {
    /// Starts `threads` of them, and returns once all have begun.
    pub fn start(threads: usize) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let begun = Arc::new(std::sync::Barrier::new(threads + 1));
        let spawn = |_| {
            let (stop, begun) = (stop.clone(), begun.clone());
            std::thread::spawn(move || {
                let (from, mut to) = (vec![1.0f32; ELEMS], vec![0.0f32; ELEMS]);
                begun.wait();
                while !stop.load(Ordering::Relaxed) {
                    black_box(&mut to).copy_from_slice(black_box(&from));
                }
            })
        };
        let threads = (0..threads).map(spawn).collect();
        begun.wait();
        Self { stop, threads }
    }
}

impl Drop for Hog {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            // It only copies: a panic there is this process's end anyway.
            let _ = thread.join();
        }
    }
}
