//! The last words of a process: the task that it works on, and all that it prints. They lie in a file in memory that outlives it.

use super::process::ProcessEnd;
use super::task::{SandboxTask, TaskLimit};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::Signal;
use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;

/// Task and item, before the text.
const HEAD_BYTES: usize = 8;
/// Of the text no more is read.
const TEXT_BYTES_MAX: usize = 64 << 10;
/// Characters of a line in an error.
const LINE_MAX: usize = 200;

/// File of a process's last words, which outlives the process.
pub(super) struct Notes(File);

impl Notes {
    pub(super) fn new() -> io::Result<Self> {
        let mut file = File::from(memfd_create(c"superoffload-sandbox", MFdFlags::MFD_CLOEXEC)?);
        file.write_all_at(&[0; HEAD_BYTES], 0)?;
        file.seek(SeekFrom::Start(HEAD_BYTES as u64))?;
        Ok(Self(file))
    }

    /// The file, for the process itself.
    pub(super) fn file(&self) -> io::Result<OwnedFd> {
        self.0.try_clone().map(OwnedFd::from)
    }

    /// The head for a process that works on `item` of a message by `task`.
    pub(super) fn head(task: SandboxTask, item: u32) -> [u8; HEAD_BYTES] {
        let mut head = [0; HEAD_BYTES];
        head[..4].copy_from_slice(&(task as u32).to_le_bytes());
        head[4..].copy_from_slice(&item.to_le_bytes());
        head
    }

    /// The item of a message and the task that the process worked on when it ended, and a description of the cause.
    pub(super) fn explain(&self, ending: Option<ProcessEnd>) -> (usize, SandboxTask, String) {
        let mut bytes = vec![0; HEAD_BYTES + TEXT_BYTES_MAX];
        let read = self.0.read_at(&mut bytes, 0).unwrap_or(0).max(HEAD_BYTES);
        let number = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let text = String::from_utf8_lossy(&bytes[HEAD_BYTES..read]);
        let task = SandboxTask::numbered(number(0));
        (number(4) as usize, task, cause(task, ending, &text))
    }
}

fn cause(task: SandboxTask, ending: Option<ProcessEnd>, text: &str) -> String {
    let by = |signal: Signal| ending.is_some_and(|ending| ending.signal == signal as i32);
    if by(Signal::SIGPROF) {
        return task.exceeds(TaskLimit::CpuTime);
    }
    // Without a handler that prints the fault, its signal is the only evidence.
    if text.contains("overflowed its stack") || by(Signal::SIGSEGV) || by(Signal::SIGBUS) {
        return task.exceeds(TaskLimit::Stack);
    }
    if text.contains("memory allocation of") || text.contains("bad_alloc") {
        return task.exceeds(TaskLimit::Memory);
    }
    let name = task.name();
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).map(|line| line.chars().take(LINE_MAX).collect::<String>());
    let last = last.map_or(String::new(), |line| format!(": {line}"));
    match ending {
        Some(ProcessEnd { signal, .. }) if signal == Signal::SIGKILL as i32 => {
            format!("{name} was killed by signal 9; the machine may be short of memory")
        }
        Some(ProcessEnd { signal: 0, code }) => format!("{name} ended its process with code {code}{last}"),
        Some(ProcessEnd { signal, .. }) => format!("{name} ended its process by signal {signal}{last}"),
        None => format!("{name} ended its process{last}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ending_is_explained_by_its_signal_and_the_last_words() {
        let by = |signal: Signal| Some(ProcessEnd { signal: signal as i32, code: 0 });
        for (ending, text, words) in [
            (by(Signal::SIGPROF), "", "tokenizing one text takes more than 60 s of CPU time"),
            (by(Signal::SIGSEGV), "", "tokenizing one text takes more than 64.0 MiB of stack"),
            (by(Signal::SIGABRT), "thread 'sandbox' has overflowed its stack\n", "takes more than 64.0 MiB of stack"),
            (by(Signal::SIGABRT), "memory allocation of 9 bytes failed\n", "takes more than 4.0 GiB of memory"),
            (by(Signal::SIGABRT), "assertion\n\n", "ended its process by signal 6: assertion"),
            (by(Signal::SIGKILL), "", "short of memory"),
            (Some(ProcessEnd { signal: 0, code: 3 }), "", "ended its process with code 3"),
            (None, "", "ended its process"),
        ] {
            let found = cause(SandboxTask::Encode, ending, text);
            assert!(found.contains(words), "{found}");
        }
    }
}
