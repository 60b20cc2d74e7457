//! Builds `shim.c`, which intercepts all calls of the program that change the disk, and parses its log.

use crate::harness::{Harness, Outcome};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Path of the built library.
pub struct Shim(PathBuf);

/// A call that changed the disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// Index of the call among all calls. Calls that failed by themselves have no entry.
    pub call: u64,
    pub name: String,
    pub path: PathBuf,
    /// Target of a rename.
    pub to: PathBuf,
    /// Offset of a write, or the new size of a file.
    pub at: usize,
    pub data: Vec<u8>,
}

impl Shim {
    /// Builds the library.
    pub fn new(harness: &Harness) -> Result<Self, String> {
        let source = harness.write("shim.c", include_bytes!("shim.c"));
        let library = harness.path("shim.so");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(source).args(["-ldl", "-lpthread"]);
        let built = compiler.output().map_err(|e| format!("cc: {e}; a C compiler is needed"))?;
        let why = String::from_utf8_lossy(&built.stderr).replace('\n', " | ");
        if built.status.success() { Ok(Self(library)) } else { Err(format!("cc: {why}")) }
    }

    /// Preloads the library into `command`, to intercept calls below `root`.
    fn over(&self, harness: &Harness, command: &mut Command, root: &str) {
        let root = harness.path("").canonicalize().unwrap().join(root);
        command.env("LD_PRELOAD", &self.0).env("CAMPAIGN_ROOT", root);
    }

    /// Runs `command` and returns its operations below `root`.
    pub fn log(&self, harness: &Harness, mut command: Command, root: &str) -> Result<(Outcome, Vec<Op>), String> {
        self.over(harness, &mut command, root);
        let log = harness.path("calls");
        command.env("CAMPAIGN_LOG", &log);
        let outcome = harness.run(command);
        let ops = parse(&fs::read(&log).map_err(|e| format!("the shim wrote no log: {e}"))?);
        if ops.is_empty() { Err(format!("the shim saw no call: {outcome}")) } else { Ok((outcome, ops)) }
    }

    /// `command`, killed before its call number `at` below `root`.
    pub fn killed(&self, harness: &Harness, mut command: Command, root: &str, at: u64) -> Command {
        self.over(harness, &mut command, root);
        command.env("CAMPAIGN_KILL_AT", at.to_string());
        command
    }

    /// `command`, with reads of `.bin` files that never return once the file `hang` exists.
    pub fn hanging(&self, harness: &Harness, mut command: Command, hang: &Path) -> Command {
        self.over(harness, &mut command, "");
        command.env("CAMPAIGN_HANG", hang);
        command
    }

    /// `command`, with a delay of `ms` milliseconds in each call named `call`.
    pub fn slow(&self, harness: &Harness, mut command: Command, call: &str, ms: u64) -> Command {
        self.over(harness, &mut command, "");
        command.env("CAMPAIGN_ONLY", call).env("CAMPAIGN_FAIL_AT", "0").env("CAMPAIGN_STICKY", "1");
        command.env("CAMPAIGN_DELAY_MS", ms.to_string());
        command
    }

    /// Runs `command` with a delay of `ms` milliseconds in its call number `at` below `root`.
    pub fn delay(&self, harness: &Harness, mut command: Command, root: &str, at: u64, ms: u64) -> Outcome {
        command.env("CAMPAIGN_DELAY_MS", ms.to_string());
        self.fail(harness, command, root, at, 0, false)
    }

    /// Runs `command`. Its call number `at` below `root` fails, and with `sticky` all later calls, too.
    pub fn fail(&self, harness: &Harness, mut command: Command, root: &str, at: u64, errno: i32, sticky: bool) -> Outcome {
        self.over(harness, &mut command, root);
        command.env("CAMPAIGN_FAIL_AT", at.to_string()).env("CAMPAIGN_ERRNO", errno.to_string());
        if sticky {
            command.env("CAMPAIGN_STICKY", "1");
        }
        harness.run(command)
    }
}

fn parse(mut log: &[u8]) -> Vec<Op> {
    let mut ops = vec![];
    while let Some(end) = log.iter().position(|&byte| byte == b'\n') {
        let line = String::from_utf8_lossy(&log[..end]);
        let [call, name, path, to, at, len] = Vec::from_iter(line.split('\t'))[..] else { panic!("the shim wrote {line:?}") };
        let data = log[end + 1..][..len.parse().unwrap()].to_vec();
        ops.push(Op {
            call: call.parse().unwrap(),
            name: name.into(),
            path: path.into(),
            to: to.into(),
            at: at.parse().unwrap(),
            data: data.clone(),
        });
        log = &log[end + 1 + data.len()..];
    }
    ops
}
