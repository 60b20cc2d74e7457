//! Signals: one that asks to stop has a checkpoint written at the next step boundary. A second one ends the process at once, but only a second
//! after the first one: launchers and schedulers send the same request twice within a moment. A file that may not grow is an error of the
//! write, not the end of the process.

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

/// Signals within this time after the first one are the same request.
const GRACE: Duration = Duration::from_secs(1);

/// A signal that may ask a run to stop.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, serde::Serialize, serde::Deserialize)]
pub enum StopSignal {
    /// What schedulers, containers and `kill` send.
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
    /// Those that stop a run unless somebody names others: all.
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

    /// Whether it is a warning of a batch system. It never ends the process at once, and the request that follows it, with time to save, is a
    /// first one: the kernel repeats XCPU every second, and Slurm sends TERM at the time limit of which USR1 has warned.
    fn is_warning(self) -> bool {
        matches!(self, Self::Usr1 | Self::Usr2 | Self::Xcpu)
    }
}

/// Whether somebody asked the run to stop: a signal, or another process of the run. The second does not count as the first of two signals.
#[derive(Clone, Debug, Default)]
pub struct StopFlag {
    signalled: Arc<AtomicBool>,
    asked: Arc<AtomicBool>,
}

impl StopFlag {
    /// Listens from now on for these signals. A hang-up that was ignored at the start (`nohup`) stays ignored.
    ///
    /// # Errors
    /// `Resource` when the system refuses the handlers, or the thread that waits out the time between two signals.
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

    /// Asks to stop.
    pub(crate) fn ask(&self) {
        self.asked.store(true, Ordering::Relaxed);
    }

    /// Whether to stop.
    pub(crate) fn is_set(&self) -> bool {
        self.signalled.load(Ordering::Relaxed) || self.asked.load(Ordering::Relaxed)
    }
}

/// Sets `is_late` once the grace after the first signal is over, of which `begun` gets a byte.
fn after_grace(mut begun: UnixStream, is_late: &AtomicBool) {
    if begun.read_exact(&mut [0]).is_ok() {
        thread::sleep(GRACE);
        is_late.store(true, Ordering::Relaxed);
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
