//! Lines about saves that a run writes at most once.

/// The lines that were written.
#[derive(Default)]
pub(super) struct ReportedSaves {
    /// Saves stop training.
    pub(super) stops: bool,
    /// A save was due while the one before ran.
    pub(super) waits: bool,
}
