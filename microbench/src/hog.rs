//! A neighbour that uses memory bandwidth: threads that copy until they are stopped.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

/// fp32 elements of each thread's arrays, which exceed a core's part of any cache.
const ELEMS: usize = 16 << 20;

/// Unpinned threads that copy; the scheduler places them on free CPUs. Dropping this value ends them.
pub struct Hog {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Hog {
    /// Starts `threads` threads and returns once all of them run.
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
            // The thread only copies: if it panics, this process is ending anyway.
            let _ = thread.join();
        }
    }
}
