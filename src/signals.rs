//! Signals. A stop signal makes the run write a checkpoint at the next step boundary and end. A second stop signal ends the process at
//! once, but only if it arrives at least one second after the first: launchers and schedulers send the same request twice within moments. A
//! file that exceeds the size limit is a write error and does not end the process.

use crate::error::{Error, Result};
use clap::ValueEnum;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGXCPU, SIGXFSZ};
use signal_hook::flag;
use signal_hook::low_level::pipe;
use std::io::Read;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

/// Signals within this time after the first one belong to the same request.
const GRACE: Duration = Duration::from_secs(1);

/// A signal that can stop a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, serde::Serialize, serde::Deserialize)]
pub enum StopSignal {
    /// Signal that schedulers, containers and `kill` send.
    #[value(name = "TERM", alias = "SIGTERM")]
    #[serde(rename = "TERM", alias = "SIGTERM", alias = "term", alias = "sigterm")]
    Term,
    /// Ctrl-C.
    #[value(name = "INT", alias = "SIGINT")]
    #[serde(rename = "INT", alias = "SIGINT", alias = "int", alias = "sigint")]
    Int,
    /// A terminal that is gone.
    #[value(name = "HUP", alias = "SIGHUP")]
    #[serde(rename = "HUP", alias = "SIGHUP", alias = "hup", alias = "sighup")]
    Hup,
    /// The warning of Slurm (`--signal=USR1@90`) and Grid Engine.
    #[value(name = "USR1", alias = "SIGUSR1")]
    #[serde(rename = "USR1", alias = "SIGUSR1", alias = "usr1", alias = "sigusr1")]
    Usr1,
    /// The warning of Grid Engine and LSF.
    #[value(name = "USR2", alias = "SIGUSR2")]
    #[serde(rename = "USR2", alias = "SIGUSR2", alias = "usr2", alias = "sigusr2")]
    Usr2,
    /// The limit of processor time (`ulimit -t`, PBS).
    #[value(name = "XCPU", alias = "SIGXCPU")]
    #[serde(rename = "XCPU", alias = "SIGXCPU", alias = "xcpu", alias = "sigxcpu")]
    Xcpu,
}

impl StopSignal {
    /// All signals, the default of a run.
    pub const ALL: [Self; 6] = [Self::Term, Self::Int, Self::Hup, Self::Usr1, Self::Usr2, Self::Xcpu];

    fn number(self) -> i32 {
        match self {
            Self::Term => SIGTERM,
            Self::Int => SIGINT,
            Self::Hup => SIGHUP,
            Self::Usr1 => SIGUSR1,
            Self::Usr2 => SIGUSR2,
            Self::Xcpu => SIGXCPU,
        }
    }

    /// Whether the signal is a warning of a batch system. A warning never ends the process at once, and does not count as the first of two
    /// signals: the kernel repeats XCPU every second, and Slurm sends TERM at the time limit that USR1 announced, and leaves time to save
    /// after it.
    fn is_warning(self) -> bool {
        matches!(self, Self::Usr1 | Self::Usr2 | Self::Xcpu)
    }
}

/// Whether the run was requested to stop, by a signal or by another process of the run. A request of another process does not count as the
/// first of two signals.
#[derive(Clone, Debug, Default)]
pub struct StopFlag {
    signalled: Arc<AtomicBool>,
    requested: Arc<AtomicBool>,
}

impl StopFlag {
    /// Handles `signals` from now on. A hang-up that was ignored at the start (`nohup`) stays ignored.
    ///
    /// # Errors
    /// `Resource` when the system refuses the handlers, or the thread that measures the time between two signals.
    pub fn on_signals(signals: &[StopSignal]) -> Result<Self> {
        let stop = Self::default();
        let wanted = signals.iter().filter(|signal| **signal != StopSignal::Hup || !is_ignored(SIGHUP));
        stop.listen(&wanted.copied().collect::<Vec<_>>()).map_err(|e| Error::resource("listen for signals", e))?;
        Ok(stop)
    }

    fn listen(&self, signals: &[StopSignal]) -> std::io::Result<()> {
        let is_late = Arc::new(AtomicBool::new(false));
        let (begun, begin) = UnixStream::pair()?;
        for signal in signals {
            let number = signal.number();
            if !signal.is_warning() {
                flag::register_conditional_shutdown(number, 128 + number, is_late.clone())?;
                pipe::register(number, begin.try_clone()?)?;
            }
            flag::register(number, self.signalled.clone())?;
        }
        thread::Builder::new().name("signals".into()).spawn(move || after_grace(begun, &is_late)).map(drop)
    }

    /// Requests a stop.
    pub(crate) fn request(&self) {
        self.requested.store(true, Ordering::Relaxed);
    }

    /// Whether a stop was requested.
    pub(crate) fn is_set(&self) -> bool {
        self.signalled.load(Ordering::Relaxed) || self.requested.load(Ordering::Relaxed)
    }
}

/// Sets `is_late` after the grace period, which begins when a byte arrives at `begun`.
fn after_grace(mut begun: UnixStream, is_late: &AtomicBool) {
    if begun.read_exact(&mut [0]).is_ok() {
        thread::sleep(GRACE);
        is_late.store(true, Ordering::Relaxed);
    }
}

/// Makes a write beyond the file size limit (`ulimit -f`) fail with EFBIG instead of ending the process. It installs a handler that does
/// nothing, since ignoring the signal would take unsafe code.
///
/// # Errors
/// `Resource` when the system refuses the handler.
pub(crate) fn outlive_file_size_limit() -> Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(|_| ()).map_err(|e| Error::resource("listen for signals", e))
}

/// Whether the process ignores `signal`, as the kernel reports it; false if it does not.
fn is_ignored(signal: i32) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask >> (signal - 1) & 1 == 1)
}
