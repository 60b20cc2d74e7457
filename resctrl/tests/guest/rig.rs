//! A machine with other users' groups and threads, and the program under test.

use crate::snapshot::Snapshot;
use nix::mount::{MsFlags, mount, umount};
use nix::sched::{CloneFlags, CpuSet, sched_setaffinity, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, Output, Stdio};
use std::time::{Duration, Instant};

pub const ROOT: &str = "/sys/fs/resctrl";
pub const PROGRAM: &str = "./superoffload-resctrl";
/// An unprivileged user.
pub const USER: u32 = 1000;

/// Mounts the tree with `options`.
pub fn mount_tree(options: &str) {
    mount(Some("resctrl"), ROOT, Some("resctrl"), MsFlags::empty(), Some(options)).unwrap();
}

/// Unmounts the tree, which removes every group.
pub fn unmount_tree() {
    umount(ROOT).unwrap();
}

/// Remounts the tree with `flags`.
pub fn remount(flags: MsFlags) {
    mount(None::<&str>, ROOT, None::<&str>, MsFlags::MS_REMOUNT | flags, None::<&str>).unwrap();
}

/// Writes a command like a shell.
pub fn write(file: &str, text: &str) {
    fs::write(Path::new(ROOT).join(file), format!("{text}\n")).unwrap_or_else(|e| panic!("write {text:?} to {file}: {e}"));
}

/// Reads a file of the tree.
pub fn read(file: &str) -> String {
    fs::read_to_string(Path::new(ROOT).join(file)).unwrap_or_else(|e| panic!("read {file}: {e}"))
}

/// A mounted tree with groups, CPUs, monitor groups and limits, and threads of other users, some of them pinned. Dropping the value removes
/// all of them.
pub struct Others {
    pub tids: Vec<i32>,
    sleepers: Vec<Child>,
    before: Snapshot,
}

impl Others {
    pub fn new() -> Self {
        mount_tree("");
        for group in ["p0", "p0/mon_groups/m0", "p0/mon_groups/m2", "mon_groups/m1"] {
            fs::create_dir(Path::new(ROOT).join(group)).unwrap();
        }
        write("p0/schemata", "L3:0=f0;1=3f\nMB:1=50");
        write("p0/cpus_list", "1-2");
        write("p0/mon_groups/m0/cpus_list", "1");
        write("p0/mon_groups/m2/cpus_list", "2");
        write("mon_groups/m1/cpus_list", "0");
        write("schemata", "L3:1=7ff");
        let sleepers: Vec<_> = (0..4).map(|_| Command::new("sleep").arg("1000").spawn().unwrap()).collect();
        let tids: Vec<_> = sleepers.iter().map(|sleeper| sleeper.id() as i32).collect();
        for (tid, groups) in tids.iter().zip([&["p0", "p0/mon_groups/m0"][..], &["p0"], &["mon_groups/m1"], &[]]) {
            groups.iter().for_each(|group| write(&format!("{group}/tasks"), &tid.to_string()));
            let mut cpus = CpuSet::new();
            cpus.set(*tid as usize % 4).unwrap();
            sched_setaffinity(Pid::from_raw(*tid), &cpus).unwrap();
        }
        Self { tids, sleepers, before: Snapshot::take() }
    }

    /// Differences from the state at the beginning.
    pub fn differences(&self) -> Vec<String> {
        self.before.differences(&Snapshot::take())
    }

    /// Panics if there is a difference.
    pub fn expect_untouched(&self) {
        assert_eq!(self.differences(), Vec::<String>::new());
    }

    /// Describes the amount of compared data.
    pub fn describe(&self) -> String {
        let (files, threads) = self.before.size();
        format!("compared {files} files with modes and owners, {threads} threads with groups and affinity: no difference")
    }
}

impl Drop for Others {
    fn drop(&mut self) {
        for sleeper in &mut self.sleepers {
            let _ = sleeper.kill();
            let _ = sleeper.wait();
        }
        let _ = umount(ROOT);
    }
}

/// Runs the program to its end. Returns its exit status and its output.
pub fn run(args: &[&str]) -> (i32, String) {
    outcome(Command::new(PROGRAM).args(args).output().unwrap())
}

/// Runs the program as an unprivileged user.
pub fn run_as_user(args: &[&str]) -> (i32, String) {
    outcome(Command::new(PROGRAM).args(args).uid(USER).gid(USER).output().unwrap())
}

/// Runs the program as root of a container: in a user namespace that maps only root.
pub fn run_in_container(args: &[&str]) -> (i32, String) {
    outcome(Command::new("/proc/self/exe").arg("in-user-namespace").args(args).output().unwrap())
}

/// The child process of [`run_in_container`].
pub fn in_user_namespace(args: &[String]) -> ExitCode {
    unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS).unwrap();
    fs::write("/proc/self/uid_map", "0 0 1").unwrap();
    panic!("{}", Command::new(PROGRAM).args(args).exec())
}

fn outcome(output: Output) -> (i32, String) {
    let text = [output.stdout, output.stderr].concat();
    (output.status.code().unwrap_or(-1), String::from_utf8(text).unwrap().trim().to_owned())
}

/// A running `hold` that has created all groups.
pub struct Hold(Child);

impl Hold {
    pub fn start() -> Self {
        let args = ["hold", "--profile", "paper", "--user", "1000"];
        let mut child = Command::new(PROGRAM).args(args).stdout(Stdio::piped()).spawn().unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        assert!(out.lines().any(|line| line.unwrap() == "holding until a signal"), "hold ended early");
        Self(child)
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    /// Sends `signal`. Returns the exit status; `None` if the process was killed.
    pub fn end(mut self, signal: Signal) -> Option<i32> {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
        self.0.wait().unwrap().code()
    }
}

/// Starts `command` and kills it after `delay`. Returns whether it was still running.
pub fn kill_after(command: &mut Command, delay: Duration) -> bool {
    let start = Instant::now();
    let mut child = command.stdout(Stdio::null()).spawn().unwrap();
    std::thread::sleep(delay.saturating_sub(start.elapsed()));
    let _ = child.kill();
    child.wait().unwrap().code().is_none()
}
