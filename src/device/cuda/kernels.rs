//! Launchers: each checks its arguments, chooses a shape and enqueues a kernel of `ptx/`.

#[cfg(test)]
mod emulator;
mod transfer;
