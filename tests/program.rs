//! Runs the program itself: a directory with a tiny model and data, commands, and their results.

use crate::support::emulator;
use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

const PROGRAM: &str = env!("CARGO_BIN_EXE_superoffload");

/// Steps of a run, unless its flags set another number.
pub const STEPS: u64 = 12;

/// Settings of every run. Flags take precedence.
const SETTINGS: &str = include_str!("run.toml");

/// A llama with 16 thousand parameters and byte tokens.
pub const CONFIG: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 64, "vocab_size": 256, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true
}"#;

/// A temporary directory with `run.toml`, `model/config.json` and `data.txt`. Runs write into directories next to them.
pub struct Workspace(tempfile::TempDir);

impl Workspace {
    pub fn new() -> Self {
        let workspace = Self(tempfile::tempdir().unwrap());
        workspace.write("model/config.json", CONFIG);
        workspace.write("data.txt", "Colourless green ideas sleep furiously; furiously sleep ideas green colourless.\n".repeat(30));
        workspace.settings("");
        workspace
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    /// Rewrites `run.toml` with additional lines. With `SUPEROFFLOAD_DEVICE=cuda` runs need a GPU.
    pub fn settings(&self, more: &str) {
        let (model, data) = (self.path("model"), self.path("data.txt"));
        let device = std::env::var("SUPEROFFLOAD_DEVICE").map_or(String::new(), |device| format!("device = {device:?}\n"));
        self.write("run.toml", format!("model = {model:?}\ndata = {data:?}\n{device}{SETTINGS}\n{more}"));
    }

    /// The command `train` into the directory `out` with the shared settings, these flags and details, from another working directory.
    pub fn train(&self, out: &str, flags: &[&str]) -> Command {
        let mut command = program(&["train", "--verbose", "--config"]);
        command.arg(self.path("run.toml")).arg("--output-dir").arg(self.path(out)).args(flags);
        command
    }

    /// Resumes from the newest checkpoint in `out`.
    pub fn resume(&self, out: &str, flags: &[&str]) -> Command {
        self.train(out, &[&["--resume-from-checkpoint", "auto"], flags].concat())
    }

    /// Creates an output directory with these checkpoints and the metrics of `from`.
    pub fn copy_checkpoints(&self, from: &str, to: &str, steps: &[u64]) {
        let (from, to) = (self.path(from), self.path(to));
        fs::create_dir(&to).unwrap();
        fs::copy(from.join("metrics.jsonl"), to.join("metrics.jsonl")).unwrap();
        for step in steps {
            copy_dir(&from.join(format!("checkpoint-{step}")), &to.join(format!("checkpoint-{step}")));
        }
    }

    /// The names in `dir` with the prefix `prefix`, sorted.
    pub fn names(&self, dir: &str, prefix: &str) -> Vec<String> {
        let entries = fs::read_dir(self.path(dir)).into_iter().flatten().flatten();
        let mut names: Vec<_> = entries.map(|e| e.file_name().into_string().unwrap()).filter(|n| n.starts_with(prefix)).collect();
        names.sort();
        names
    }

    /// The records in `metrics.jsonl` of `out`, one for each step or evaluation.
    pub fn metrics(&self, out: &str) -> Vec<serde_json::Value> {
        self.metrics_and_facts(out).into_iter().filter(|line| line.get("facts").is_none()).collect()
    }

    /// All records in `metrics.jsonl` of `out`, including facts.
    pub fn metrics_and_facts(&self, out: &str) -> Vec<serde_json::Value> {
        let text = fs::read_to_string(self.path(out).join("metrics.jsonl")).unwrap();
        text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }
}

/// Copies a directory with its content; `to` must not exist.
pub fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        if entry.path().is_dir() {
            copy_dir(&entry.path(), &target);
        } else {
            fs::copy(entry.path(), target).unwrap();
        }
    }
}

/// The program with these arguments and captured output. Environment variables may select another machine's program and an emulator.
pub fn program(args: &[&str]) -> Command {
    let program = std::env::var_os("SUPEROFFLOAD_PROGRAMS").map_or(PROGRAM.into(), |dir| Path::new(&dir).join("superoffload"));
    let mut command = Command::new(emulator().unwrap_or(program.clone().into()));
    command
        .args(emulator().map(|_| program))
        .args(args)
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    command
}

/// The exit code and the output of a process.
#[derive(Debug)]
pub struct Outcome {
    /// Exit code, or the negative number of the signal that ended the process.
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Outcome {
    fn from(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let code = output.status.code().or_else(|| output.status.signal().map(|signal| -signal)).unwrap();
        Self { code, stdout: text(output.stdout), stderr: text(output.stderr) }
    }
}

impl Outcome {
    /// The digest, which is the last line. Asserts success.
    pub fn digest(&self) -> &str {
        assert_eq!(self.code, 0, "{self:?}");
        let last = self.stdout.lines().last().unwrap_or_default();
        last.strip_prefix("digest: ").unwrap_or_else(|| panic!("no digest: {self:?}"))
    }

    /// Asserts that the program failed with `code` and one error line that contains all of `words`.
    pub fn refused(&self, code: i32, words: &[&str]) {
        assert_eq!(self.code, code, "{self:?}");
        let is_progress = |line: &str| line.starts_with("searching for the fastest plan: ");
        let mut errors = self.stderr.lines().filter(|line| !line.starts_with("warning: ") && !is_progress(line));
        let (line, rest) = (errors.next().unwrap_or_default(), errors.count());
        assert!(line.starts_with("error: ") && rest == 0, "not one line: {self:?}");
        assert!(!self.stderr.contains("panicked"), "{self:?}");
        words.iter().for_each(|word| assert!(line.contains(word), "{word:?} is not in {line:?}"));
    }
}

/// Runs the command to its end.
pub fn run(command: &mut Command) -> Outcome {
    command.output().unwrap().into()
}
