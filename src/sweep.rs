//! How much the tests beside the code try, and how long they wait.

use std::time::Duration;

/// Limit of the time until a process, thread or wait ends after it was stopped, on a machine whose CPUs are busy with other tests. A wait
/// that is not stopped takes longer, or ends with another result.
pub(crate) const PROMPTLY: Duration = Duration::from_secs(60);

/// `few`, or `all` where `SUPEROFFLOAD_SWEEP=all` asks for it, which takes minutes more.
pub(crate) fn sweep<T>(few: T, all: T) -> T {
    if std::env::var_os("SUPEROFFLOAD_SWEEP").is_some_and(|which| which == "all") { all } else { few }
}
