//! SIGTERM and SIGINT: the first asks for a checkpoint at the next step boundary, the second ends the process at once.

use crate::error::{Error, Result};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Exit code of a run that was interrupted and can be resumed: EX_TEMPFAIL.
pub const EXIT_INTERRUPTED: i32 = 75;

/// Whether somebody asked the run to stop.
#[derive(Clone, Debug, Default)]
pub struct StopFlag(Arc<AtomicBool>);

impl StopFlag {
    /// Listens for both signals from now on.
    ///
    /// # Errors
    /// `Resource` when the system refuses the handlers.
    pub fn on_signals() -> Result<Self> {
        let stop = Self::default();
        for signal in [SIGTERM, SIGINT] {
            // Order matters: the conditional exit must see the flag before this signal sets it.
            let exit = flag::register_conditional_shutdown(signal, 128 + signal, stop.0.clone());
            exit.and_then(|_| flag::register(signal, stop.0.clone())).map_err(|e| Error::resource("listen for signals", e))?;
        }
        Ok(stop)
    }

    /// Asks to stop, as a signal does.
    #[cfg(test)]
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    /// Whether to stop.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}
