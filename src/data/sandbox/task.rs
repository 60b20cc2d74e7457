//! Tasks of a sandbox: their limits, and their names in error lines.

use crate::units::Bytes;

/// Stack of the thread that runs foreign code.
pub(super) const STACK_BYTES: usize = 64 << 20;

/// Work on a file that anybody may have written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::data) enum SandboxTask {
    /// Nothing foreign runs yet.
    Start,
    /// A chat template is compiled.
    Compile,
    /// A chat template is rendered once.
    Render,
    /// `tokenizer.json` is read.
    Load,
    /// One text is tokenized.
    Encode,
    /// Token ids are turned back into text.
    Decode,
    /// Some rows of a parquet file are read.
    Rows,
}

/// A limit of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TaskLimit {
    CpuTime,
    Memory,
    Stack,
}

/// A test that waits for the end of this time occupies a CPU until then.
const RENDERING_CPU_S: u32 = if cfg!(test) { 2 } else { 5 };

impl SandboxTask {
    const ALL: [Self; 7] = [Self::Start, Self::Compile, Self::Render, Self::Load, Self::Encode, Self::Decode, Self::Rows];

    /// The task with this number.
    pub(super) fn numbered(number: u32) -> Self {
        Self::ALL.into_iter().find(|task| *task as u32 == number).unwrap_or(Self::Start)
    }

    /// CPU time of one piece of work, in seconds. The template engine's own limit lets half a second through, and a text of some megabytes
    /// takes seconds; a slow machine has ten times that.
    pub(super) fn cpu_s(self) -> u32 {
        match self {
            Self::Compile | Self::Render => RENDERING_CPU_S,
            Self::Start | Self::Load | Self::Encode | Self::Decode | Self::Rows => 60,
        }
    }

    /// Memory in addition to the memory at the start of the process. The tokenizer library takes some hundred bytes a byte of text.
    pub(super) fn memory_bytes(self) -> u64 {
        match self {
            Self::Compile | Self::Render => 1 << 30,
            Self::Start | Self::Load | Self::Encode | Self::Decode | Self::Rows => 4 << 30,
        }
    }

    /// The library that does it.
    pub(super) fn foreign_library(self) -> &'static str {
        match self {
            Self::Start => "standard",
            Self::Compile | Self::Render => "template",
            Self::Load | Self::Encode | Self::Decode => "tokenizer",
            Self::Rows => "parquet",
        }
    }

    /// Text of an error line for work that exceeded `limit`.
    pub(super) fn exceeds(self, limit: TaskLimit) -> String {
        let most = match limit {
            TaskLimit::CpuTime => format!("{} s of CPU time", self.cpu_s()),
            TaskLimit::Memory => format!("{} of memory", Bytes(self.memory_bytes())),
            TaskLimit::Stack => format!("{} of stack", Bytes(STACK_BYTES as u64)),
        };
        format!("{} takes more than {most}{}", self.name(), self.question(limit))
    }

    /// The work, as the subject of a sentence.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Start => "the start of a process for foreign files",
            Self::Compile => "compiling the chat template",
            Self::Render => "rendering one conversation by the chat template",
            Self::Load => "reading the tokenizer",
            Self::Encode => "tokenizing one text",
            Self::Decode => "turning tokens back into text",
            Self::Rows => "reading rows",
        }
    }

    /// The usual cause.
    fn question(self, limit: TaskLimit) -> &'static str {
        match (self, limit) {
            (Self::Render, TaskLimit::Stack) => ": does it put a value into itself?",
            (Self::Render, _) => ": does it join lists in a loop?",
            (Self::Encode, _) => ": do its normalizers make the text longer and longer?",
            (Self::Decode, _) => ": does its decoder make the text longer and longer?",
            _ => "",
        }
    }
}
