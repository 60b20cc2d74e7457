//! The test cases, in order. Each leaves the machine as it was, with resctrl not mounted.

use crate::rig::{
    Hold, Others, PROGRAM, ROOT, USER, kill_after, mount_tree, read, remount, run, run_as_user, run_in_container, unmount_tree, write,
};
use crate::snapshot::Snapshot;
use nix::mount::MsFlags;
use nix::sys::signal::Signal;
use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};
use superoffload_resctrl::{GroupPath, Session, Tree, restore, total};

/// A test case, which returns lines for the log.
type Case = fn() -> Vec<String>;

pub const CASES: [(&str, Case); 17] = [
    ("nothing to partition", absent),
    ("not mounted", not_mounted),
    ("mounted and unmounted again", mounts_and_unmounts),
    ("a mount that others came to use stays", others_use_the_mount),
    ("prepare, an unprivileged trainer joins, restore", prepare_join_restore),
    ("hold ends by a signal", hold_ends_by_signals),
    ("hold is killed: restore", hold_is_killed),
    ("hold is killed: the next start", next_start),
    ("prepare is killed anywhere", killed_anywhere),
    ("one at a time", one_at_a_time),
    ("threads of others come back", moved_threads_come_back),
    ("no group left", out_of_closids),
    ("an exclusive group is in the way", overlap),
    ("not root", not_root),
    ("in a container", in_a_container),
    ("read-only", read_only),
    ("CDP and absolute limits", other_mounts),
];

const JOURNAL: &str = "/run/superoffload-resctrl/journal";
const PREPARE: [&str; 5] = ["prepare", "--profile", "paper", "--user", "1000"];

/// Runs the program, expects the exit status `status`, and returns the output.
fn expect(status: i32, args: &[&str]) -> String {
    let (code, output) = run(args);
    assert_eq!(code, status, "{args:?}: {output}");
    output
}

fn one_line(output: String) -> Vec<String> {
    assert_eq!(output.lines().count(), 1, "{output}");
    vec![output]
}

fn is_mounted() -> bool {
    Path::new(ROOT).join("info").exists()
}

fn absent() -> Vec<String> {
    one_line(expect(3, &["prepare", "--profile", "paper", "--root", "/sys/fs/nothing"]))
}

fn not_mounted() -> Vec<String> {
    expect(4, &["status"]).lines().map(str::to_owned).collect()
}

fn mounts_and_unmounts() -> Vec<String> {
    let before = Snapshot::take();
    let mut seen = vec![expect(0, &PREPARE)];
    assert!(is_mounted());
    seen.push(expect(0, &["restore"]));
    Hold::start().end(Signal::SIGKILL);
    assert!(is_mounted());
    seen.push(expect(0, &["restore"]));
    assert_eq!(before.differences(&Snapshot::take()), Vec::<String>::new());
    assert_eq!(expect(0, &["restore"]), "nothing to undo");
    seen.iter().flat_map(|text| text.lines()).map(str::to_owned).collect()
}

fn others_use_the_mount() -> Vec<String> {
    expect(0, &PREPARE);
    fs::create_dir(Path::new(ROOT).join("p9")).unwrap();
    let output = expect(0, &["restore"]);
    assert!(output.contains("left /sys/fs/resctrl mounted"), "{output}");
    assert_eq!(read("p9/tasks"), "");
    unmount_tree();
    vec![output.lines().last().unwrap().into()]
}

fn prepare_join_restore() -> Vec<String> {
    let others = Others::new();
    let mut seen: Vec<String> = expect(0, &PREPARE).lines().map(str::to_owned).collect();
    assert!(!others.differences().is_empty());
    assert_eq!(read("superoffload-adam/cpus_list").trim(), "1,3");
    let mut trainer = Command::new("/proc/self/exe");
    let mut trainer = trainer.args(["as-trainer", "superoffload-adam"]).uid(USER).gid(USER).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(trainer.stdout.take().unwrap()).lines();
    seen.extend(lines.by_ref().map(Result::unwrap).take_while(|line| line != "ready"));
    assert_eq!(read("superoffload-adam/tasks").lines().count(), 3);
    let adam = GroupPath::control("superoffload-adam").unwrap();
    let counters = Tree::open(Path::new(ROOT)).unwrap().counters(&adam).unwrap();
    let bytes = total(&counters, "mbm_total_bytes").expect("is counted");
    assert!(bytes > 0 && total(&counters, "llc_occupancy").is_some());
    seen.push(format!("{} counters of superoffload-adam, with a value each", counters.iter().filter(|c| c.bytes.is_some()).count()));
    trainer.kill().unwrap();
    trainer.wait().unwrap();
    assert_eq!(read("superoffload-adam/tasks"), "");
    seen.extend(expect(0, &["restore"]).lines().map(str::to_owned));
    others.expect_untouched();
    seen.push(others.describe());
    seen
}

/// Runs as a trainer without privileges: three threads join `group`, and all other changes are rejected. Waits to be killed.
pub fn as_trainer(group: &str) -> ExitCode {
    let group = GroupPath::control(group).unwrap();
    let report = |line: String| crate::print_line(&line);
    let tree = Tree::open(Path::new(ROOT)).unwrap();
    let refused = |outcome: std::io::Result<()>| outcome.unwrap_err().to_string();
    report(format!("the trainer may not change limits: {}", refused(fs::write(format!("{ROOT}/{group}/schemata"), "L3:0=fff\n"))));
    report(format!("the trainer may not move others: {}", tree.add_tasks(&group, &[1]).unwrap_err()));
    let join = || {
        tree.join(&group).unwrap();
        fs::read_to_string("/proc/thread-self/cpu_resctrl_groups").unwrap()
    };
    report(format!("the trainer's thread is in {}", join().replace('\n', " ").trim()));
    // Threads that the trainer starts from now on inherit the group.
    let worker = || std::thread::sleep(Duration::from_secs(60));
    (0..2).for_each(|_| drop(std::thread::spawn(worker)));
    while tree.tasks(&group).unwrap().len() < 3 {
        std::thread::sleep(Duration::from_millis(5));
    }
    report("ready".into());
    std::thread::sleep(Duration::from_secs(60));
    ExitCode::SUCCESS
}

fn hold_ends_by_signals() -> Vec<String> {
    let others = Others::new();
    for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
        let hold = Hold::start();
        assert!(!others.differences().is_empty());
        assert_eq!(hold.end(signal), Some(0));
        others.expect_untouched();
    }
    vec![others.describe()]
}

fn hold_is_killed() -> Vec<String> {
    let others = Others::new();
    assert_eq!(Hold::start().end(Signal::SIGKILL), None);
    assert!(!others.differences().is_empty());
    let status = expect(0, &["status"]);
    let mut seen = vec![status.lines().next().unwrap().split(" process").next().unwrap().to_owned()];
    seen.extend(expect(0, &["restore"]).lines().map(str::to_owned));
    others.expect_untouched();
    seen.push(others.describe());
    seen
}

fn next_start() -> Vec<String> {
    let others = Others::new();
    Hold::start().end(Signal::SIGKILL);
    Hold::start().end(Signal::SIGKILL);
    assert_eq!(Hold::start().end(Signal::SIGTERM), Some(0));
    others.expect_untouched();
    vec![others.describe()]
}

/// Kills `prepare` and `restore` at many points in time, alternating on the same journal.
fn killed_anywhere() -> Vec<String> {
    const KILLS: u32 = 30;
    let others = Others::new();
    // The fastest of several runs. A program that is killed later than this has probably ended.
    let whole = |args: &[&str]| {
        let start = Instant::now();
        expect(0, args);
        start.elapsed()
    };
    let (prepare, undo) = (0..3).map(|_| (whole(&PREPARE), whole(&["restore"]))).min().expect("three");
    let (mut changed, mut killed) = (0, 0);
    for nth in 0..KILLS {
        killed += u32::from(kill_after(Command::new(PROGRAM).args(PREPARE), prepare * nth / KILLS));
        changed += u32::from(!others.differences().is_empty());
        killed += u32::from(kill_after(Command::new(PROGRAM).arg("restore"), undo * (nth * 7 % KILLS) / KILLS));
        expect(0, &["restore"]);
        others.expect_untouched();
    }
    assert!(killed > KILLS / 3 && changed > 0, "{killed} kills, {changed} changes");
    vec![
        format!("{killed} of {} runs killed before their end; {changed} of {KILLS} times there was something to undo", 2 * KILLS),
        others.describe(),
    ]
}

fn one_at_a_time() -> Vec<String> {
    let others = Others::new();
    let hold = Hold::start();
    let output = expect(8, &PREPARE).replace(&hold.pid().to_string(), "N");
    assert_eq!(expect(8, &["restore"]).lines().count(), 1);
    hold.end(Signal::SIGTERM);
    others.expect_untouched();
    one_line(output)
}

fn moved_threads_come_back() -> Vec<String> {
    let others = Others::new();
    let (root, journal, adam) = (Path::new(ROOT), Path::new(JOURNAL), GroupPath::control("superoffload-adam").unwrap());
    let (mut session, _) = Session::start(root, journal).unwrap();
    session.create(&adam).unwrap();
    assert_eq!(session.move_tasks(&adam, &others.tids).unwrap(), 4);
    assert_eq!(read("superoffload-adam/tasks").lines().count(), 4);
    drop(session);
    others.expect_untouched();
    let tids = others.tids.iter().map(ToString::to_string);
    let mut mover = Command::new("/proc/self/exe").arg("move-and-wait").args(tids).stdout(Stdio::piped()).spawn().unwrap();
    BufReader::new(mover.stdout.take().unwrap()).lines().next().unwrap().unwrap();
    assert!(!others.differences().is_empty());
    mover.kill().unwrap();
    mover.wait().unwrap();
    let notes = restore(root, journal).unwrap();
    others.expect_untouched();
    notes.into_iter().chain([others.describe()]).collect()
}

/// Moves threads of other processes, reports it, and waits to be killed.
pub fn move_and_wait(tids: &[String]) -> ExitCode {
    let tids: Vec<i32> = tids.iter().map(|tid| tid.parse().unwrap()).collect();
    let adam = GroupPath::control("superoffload-adam").unwrap();
    let (mut session, _) = Session::start(Path::new(ROOT), Path::new(JOURNAL)).unwrap();
    session.create(&adam).unwrap();
    session.add_cpus(&adam, &"0-2".parse().unwrap()).unwrap();
    session.move_tasks(&adam, &tids).unwrap();
    crate::print_line("moved");
    std::thread::sleep(Duration::from_secs(60));
    ExitCode::SUCCESS
}

fn out_of_closids() -> Vec<String> {
    let others = Others::new();
    let mut made = Vec::new();
    while let name = Path::new(ROOT).join(format!("g{}", made.len()))
        && fs::create_dir(&name).is_ok()
    {
        made.push(name);
    }
    // One free group is left: the first group can be created, the second cannot.
    fs::remove_dir(made.pop().unwrap()).unwrap();
    let before = Snapshot::take();
    let output = expect(6, &PREPARE);
    assert_eq!(before.differences(&Snapshot::take()), Vec::<String>::new());
    made.iter().for_each(|group| fs::remove_dir(group).unwrap());
    others.expect_untouched();
    one_line(output)
}

fn overlap() -> Vec<String> {
    let others = Others::new();
    fs::create_dir(Path::new(ROOT).join("x")).unwrap();
    write("schemata", "L3:0=fc0;1=7c0");
    write("p0/schemata", "L3:0=f0;1=f0");
    write("x/schemata", "L3:0=f;1=f");
    write("x/mode", "exclusive");
    let before = Snapshot::take();
    let output = expect(1, &PREPARE);
    assert_eq!(before.differences(&Snapshot::take()), Vec::<String>::new());
    assert!(output.contains("Overlaps with exclusive group"), "{output}");
    drop(others);
    one_line(output)
}

fn not_root() -> Vec<String> {
    let others = Others::new();
    let mut seen = Vec::new();
    for journal in [JOURNAL, "/tmp/journal-of-a-user"] {
        let (status, output) = run_as_user(&[&PREPARE[..], &["--journal", journal]].concat());
        assert_eq!(status, 7, "{output}");
        seen.extend(one_line(output));
    }
    let (status, _) = run_as_user(&["status"]);
    assert_eq!(status, 0);
    others.expect_untouched();
    seen
}

fn in_a_container() -> Vec<String> {
    let (status, unmounted) = run_in_container(&PREPARE);
    assert_eq!(status, 7, "{unmounted}");
    let others = Others::new();
    let (status, mounted) = run_in_container(&[&PREPARE[..], &["--journal", "/tmp/journal-of-a-container"]].concat());
    assert_eq!(status, 7, "{mounted}");
    others.expect_untouched();
    [one_line(unmounted), one_line(mounted)].concat()
}

fn read_only() -> Vec<String> {
    let others = Others::new();
    remount(MsFlags::MS_RDONLY);
    let output = expect(5, &PREPARE);
    remount(MsFlags::empty());
    others.expect_untouched();
    one_line(output)
}

fn other_mounts() -> Vec<String> {
    let mut seen = Vec::new();
    for options in ["cdp", "mba_MBps", "debug"] {
        mount_tree(options);
        let before = Snapshot::take();
        let output = expect(0, &PREPARE);
        expect(0, &["restore"]);
        assert_eq!(before.differences(&Snapshot::take()), Vec::<String>::new(), "{options}");
        unmount_tree();
        seen.extend(output.lines().map(|line| format!("{options}: {line}")));
    }
    seen
}
