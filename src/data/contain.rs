//! Keeps the panics of a foreign library from reaching the person: they become errors.
//!
//! The libraries of tokenizers and of parquet read files that anybody may have written and panic on some of them, for instance on
//! a normaliser that prepends nothing.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    static IS_CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Runs `call` of `library`, which must leave nothing half done that is used after a panic.
///
/// # Errors
/// The message of a panic in it, on one line. The panic is not reported otherwise; those of other threads are.
pub(crate) fn contain<T>(library: &str, call: impl FnOnce() -> T) -> Result<T, String> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let report = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if !IS_CONTAINED.get() {
                report(panic);
            }
        }));
    });
    IS_CONTAINED.set(true);
    let outcome = panic::catch_unwind(AssertUnwindSafe(call));
    IS_CONTAINED.set(false);
    outcome.map_err(|payload| {
        let literal = payload.downcast_ref::<&str>().copied();
        let message = literal.or(payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("unknown");
        format!("the {library} library fails on it: {}", message.replace('\n', " "))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_its_message_and_a_value_passes() {
        assert_eq!(contain("tokenizer", || 5), Ok(5));
        assert_eq!(contain("tokenizer", || panic!("bad\n{}", 7)), Err::<(), _>("the tokenizer library fails on it: bad 7".to_string()));
        assert!(!IS_CONTAINED.get());
    }
}
