//! Signals: the first SIGTERM, SIGINT or SIGHUP asks for a checkpoint at the next step boundary, a second one ends the process at
//! once. A file that may not grow is an error of the write, not the end of the process.

use crate::error::{Error, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether somebody asked the run to stop: a signal, or another process of the run. The second does not count as the first of two signals.
#[derive(Clone, Debug, Default)]
pub struct StopFlag {
    signalled: Arc<AtomicBool>,
    asked: Arc<AtomicBool>,
}

impl StopFlag {
    /// Listens from now on for the signals that ask to stop. A hang-up that was ignored at the start (`nohup`) stays ignored.
    ///
    /// # Errors
    /// `Resource` when the system refuses the handlers.
    pub fn on_signals() -> Result<Self> {
        let stop = Self::default();
        for signal in [SIGTERM, SIGINT, SIGHUP].into_iter().filter(|&signal| signal != SIGHUP || !is_ignored(SIGHUP)) {
            // Order matters: the conditional exit must see the flag before this signal sets it.
            let exit = flag::register_conditional_shutdown(signal, 128 + signal, stop.signalled.clone());
            exit.and_then(|_| flag::register(signal, stop.signalled.clone())).map_err(|e| Error::resource("listen for signals", e))?;
        }
        Ok(stop)
    }

    /// Asks to stop.
    pub(crate) fn ask(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }

    /// Whether to stop.
    pub(crate) fn is_set(&self) -> bool {
        self.signalled.load(Ordering::Relaxed) || self.asked.load(Ordering::Relaxed)
    }
}

/// From now on a write beyond the file size limit (`ulimit -f`) fails as EFBIG instead of ending the process without a word: a
/// handler that does nothing serves like ignoring the signal, which takes unsafe code.
///
/// # Errors
/// `Resource` when the system refuses the handler.
pub(crate) fn outlive_file_size_limit() -> Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(|_| ()).map_err(|e| Error::resource("listen for signals", e))
}

/// Whether the process ignores `signal`, as the kernel says; if it does not say, no.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
