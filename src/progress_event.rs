//! Progress messages of a long preparation.

/// A progress message.
pub enum ProgressEvent<'a> {
    /// A line for people.
    Note(&'a str),
    /// A line for people who ask for details.
    Detail(&'a str),
    /// A line for people: something is not as it should be.
    Warn(&'a str),
    /// Of `all` bytes `done` are read; `activity` is done with them, in words.
    Progress {
        /// Verb and object.
        activity: &'a str,
        /// Bytes read.
        done: u64,
        /// Bytes to read.
        all: u64,
    },
}
