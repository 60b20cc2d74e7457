//! Ends the program in words where a rendering's stack ends: the template engine writes a namespace that was put into itself, and has no end
//! (minijinja 3.1.0). Rust aborts then.
#![allow(unsafe_code)]

use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use std::cell::Cell;
use std::ffi::c_int;
use std::sync::{Once, OnceLock};

const SAYS: &str = "error: the chat template needs more stack than there is: does it put a value into itself?\n";

thread_local!(static RENDERS: Cell<bool> = const { Cell::new(false) });

/// What a fault did before.
static BEFORE: OnceLock<SigAction> = OnceLock::new();

/// Runs `render`: where its stack ends, the program does.
pub(super) fn watched<T>(render: impl FnOnce() -> T) -> T {
    static HEARD: Once = Once::new();
    HEARD.call_once(hear_faults);
    RENDERS.set(true);
    let _ended = OnStack;
    render()
}

/// A rendering may end by a panic, which may be caught.
struct OnStack;

impl Drop for OnStack {
    fn drop(&mut self) {
        RENDERS.set(false);
    }
}

fn hear_faults() {
    let action = SigAction::new(SigHandler::Handler(on_fault), SaFlags::SA_ONSTACK, SigSet::empty());
    // SAFETY: the handler does only what a handler may. Where it cannot be set, a stack's end aborts the program, as it did.
    if let Ok(before) = unsafe { sigaction(Signal::SIGSEGV, &action) } {
        let _ = BEFORE.set(before);
    }
}

/// A page is touched that is not there: below the stack, if this thread renders. Whatever else it is goes on as it did before.
extern "C" fn on_fault(_: c_int) {
    if RENDERS.get() {
        // SAFETY: writes bytes that live for ever, and ends.
        unsafe {
            libc::write(libc::STDERR_FILENO, SAYS.as_ptr().cast(), SAYS.len());
            libc::_exit(1);
        }
    }
    let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
    // SAFETY: sets again what was there before. The touch is repeated when this returns, and that is told of it.
    let _ = unsafe { sigaction(Signal::SIGSEGV, BEFORE.get().unwrap_or(&default)) };
}
