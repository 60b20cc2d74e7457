//! How much the tests beside the code try, and how long they wait.

use std::time::Duration;

/// Limit of the time until a process, thread or wait ends after it was stopped, on a machine whose CPUs are busy with other tests. Where such
/// a test fails, the wait is at least twice as long: for a limit of 300 s, for a server that is silent, or for ever.
pub(crate) const PROMPTLY: Duration = Duration::from_secs(60);

/// `few`, or `all` where `SUPEROFFLOAD_SWEEP=all` asks for it, which takes minutes more.
pub(crate) fn sweep<T>(few: T, all: T) -> T {
    if std::env::var_os("SUPEROFFLOAD_SWEEP").is_some_and(|which| which == "all") { all } else { few }
}
