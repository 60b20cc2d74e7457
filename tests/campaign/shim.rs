//! Builds `shim.c`, which sees every call of the program that changes the disk, and reads what it wrote down.

use crate::harness::{Harness, Outcome};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The built library.
pub struct Shim(PathBuf);

/// One call that changed the disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Op {
    /// The call's number among all, of which those that failed by themselves have no op.
    pub call: u64,
    pub name: String,
    pub path: PathBuf,
    /// Where a rename leads.
    pub to: PathBuf,
    /// First byte of a write, size of a file that is resized.
    pub at: usize,
    pub data: Vec<u8>,
}

impl Shim {
    /// Builds it.
    pub fn new(harness: &Harness) -> Result<Self, String> {
        let source = harness.write("shim.c", include_bytes!("shim.c"));
        let library = harness.path("shim.so");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(source).args(["-ldl", "-lpthread"]);
        let built = compiler.output().map_err(|e| format!("cc: {e}; a C compiler is needed"))?;
        let why = String::from_utf8_lossy(&built.stderr).replace('\n', " | ");
        if built.status.success() { Ok(Self(library)) } else { Err(format!("cc: {why}")) }
    }

    /// Has `command` run under it; calls below `root` are seen.
    fn over(&self, harness: &Harness, command: &mut Command, root: &str) {
        let root = harness.path("").canonicalize().unwrap().join(root);
        command.env("LD_PRELOAD", &self.0).env("CAMPAIGN_ROOT", root);
    }

    /// Runs `command` and returns what it did below `root`.
    pub fn log(&self, harness: &Harness, mut command: Command, root: &str) -> Result<(Outcome, Vec<Op>), String> {
        self.over(harness, &mut command, root);
        let log = harness.path("calls");
        command.env("CAMPAIGN_LOG", &log);
        let outcome = harness.run(command);
        let ops = parse(&fs::read(&log).map_err(|e| format!("the shim wrote no log: {e}"))?);
        if ops.is_empty() { Err(format!("the shim saw no call: {outcome}")) } else { Ok((outcome, ops)) }
    }

    /// `command`, which is killed before its call number `at` below `root`.
    pub fn killed(&self, harness: &Harness, mut command: Command, root: &str, at: u64) -> Command {
        self.over(harness, &mut command, root);
        command.env("CAMPAIGN_KILL_AT", at.to_string());
        command
    }

    /// `command`, whose reads at offsets of `.bin` files never come back once the file `hang` is there.
    pub fn hanging(&self, harness: &Harness, mut command: Command, hang: &Path) -> Command {
        self.over(harness, &mut command, "");
        command.env("CAMPAIGN_HANG", hang);
        command
    }

    /// `command`, in which each call of the name `call` takes so many milliseconds longer.
    pub fn slow(&self, harness: &Harness, mut command: Command, call: &str, ms: u64) -> Command {
        self.over(harness, &mut command, "");
        command.env("CAMPAIGN_ONLY", call).env("CAMPAIGN_FAIL_AT", "0").env("CAMPAIGN_STICKY", "1");
        command.env("CAMPAIGN_DELAY_MS", ms.to_string());
        command
    }

    /// Runs `command`, whose call number `at` below `root` takes so many milliseconds longer.
    pub fn delay(&self, harness: &Harness, mut command: Command, root: &str, at: u64, ms: u64) -> Outcome {
        command.env("CAMPAIGN_DELAY_MS", ms.to_string());
        self.fail(harness, command, root, at, 0, false)
    }

    /// Runs `command` with its call number `at` below `root` failing; `sticky`: and all after it.
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
