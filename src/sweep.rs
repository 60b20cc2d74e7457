//! How much the tests beside the code try.

/// `few`, or `all` where `SUPEROFFLOAD_SWEEP=all` asks for it, which takes minutes more.
pub(crate) fn sweep<T>(few: T, all: T) -> T {
    if std::env::var_os("SUPEROFFLOAD_SWEEP").is_some_and(|which| which == "all") { all } else { few }
}
