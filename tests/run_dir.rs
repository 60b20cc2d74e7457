//! A run owns its output directory: no second run may use it, links are not followed out of it, and files that a user removed cause no
//! loss.

use crate::program::{CONFIG, Outcome, STEPS, Workspace, program, run};
use crate::resume::{await_line, await_write};
use crate::support::emulator;
use crate::sweep::PROMPTLY;
use nix::sys::signal::{Signal, kill};
use nix::sys::stat::Mode;
use nix::unistd::{Pid, mkfifo};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// A run that is stopped by a signal after its third step, in a save beside steps or after it.
fn stopped(workspace: &Workspace, out: &str, flags: &[&str]) -> Child {
    stopped_after(workspace, out, flags, "step      3")
}

/// A run that is stopped by a signal when it has printed `words`.
fn stopped_after(workspace: &Workspace, out: &str, flags: &[&str], words: &str) -> Child {
    let mut child = workspace.train(out, flags).spawn().unwrap();
    await_line(&mut child, words);
    signal(&child, Signal::SIGSTOP);
    child
}

fn signal(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
}

fn finish(child: Child) -> Outcome {
    signal(&child, Signal::SIGCONT);
    child.wait_with_output().unwrap().into()
}

/// All entries in `dir` and below, with their modification times.
fn listing(dir: &Path) -> Vec<(String, std::time::SystemTime)> {
    let mut found = vec![];
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        found.push((entry.path().display().to_string(), entry.metadata().unwrap().modified().unwrap()));
        if entry.file_type().unwrap().is_dir() {
            found.extend(listing(&entry.path()));
        }
    }
    found.sort();
    found
}

fn assert_steps(workspace: &Workspace, out: &str, steps: u64) {
    let found: Vec<_> = workspace.metrics(out).iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(found, Vec::from_iter(1..=steps), "metrics of {out}");
}

#[test]
fn a_second_run_is_refused_at_once_and_the_first_does_not_notice() {
    let workspace = Workspace::new();
    let alone = run(&mut workspace.train("alone", &[])).digest().to_string();
    let first = stopped_after(&workspace, "r", &[], "checkpoint-2");
    let before = listing(&workspace.path("r"));
    let (pid, host) = (format!("pid {} ", first.id()), fs::read_to_string("/proc/sys/kernel/hostname").unwrap());
    // The second run is rejected before it reads its model, but not before it checks that the model exists.
    workspace.write("broken/config.json", "{");
    let broken = workspace.path("broken");
    for flags in [&["--seed", "2"][..], &["--resume-from-checkpoint", "auto"], &["--model", broken.to_str().unwrap()]] {
        let start = Instant::now();
        let second = run(&mut workspace.train("r", flags));
        second.refused(1, &[workspace.path("r").to_str().unwrap(), &pid, host.trim(), "started 20", "--output-dir"]);
        assert!(second.stdout.is_empty() && start.elapsed() < PROMPTLY, "{second:?}");
    }
    fs::write(workspace.path("r/trace.json"), "mine").unwrap();
    run(&mut workspace.train("r", &[])).refused(1, &["another run", &pid]);
    fs::remove_file(workspace.path("r/trace.json")).unwrap();
    run(&mut workspace.train("r", &["--model", "/nowhere"])).refused(2, &["--model /nowhere: no such directory"]);
    run(program(&["digest"]).arg(workspace.path("r/checkpoint-2"))).digest();
    let exported = run(program(&["export"]).arg(workspace.path("r")).arg(workspace.path("exported")));
    // A later checkpoint may have been published before the signal.
    assert!(exported.code == 0 && exported.stdout.contains("exported step "), "{exported:?}");
    assert_eq!(listing(&workspace.path("r")), before, "somebody else wrote into it");
    let ended = finish(first);
    assert!(ended.digest() == alone && ended.stderr.is_empty(), "{ended:?}");
    assert_steps(&workspace, "r", STEPS);
    assert_eq!(run(&mut workspace.train("r", &[])).digest(), alone, "it is free again");
}

#[test]
fn of_runs_that_start_together_one_has_the_directory() {
    let workspace = Workspace::new();
    for round in 0..3 {
        let out = format!("r{round}");
        // The runs are long enough to overlap.
        let start = |seed| workspace.train(&out, &["--seed", seed, "--max-steps", "60", "--save-steps", "20"]).spawn().unwrap();
        let runs = ["1", "2", "3"].map(start).map(|child| Outcome::from(child.wait_with_output().unwrap()));
        let winners: Vec<_> = runs.iter().filter(|run| run.code == 0).collect();
        assert_eq!(winners.len(), 1, "{runs:?}");
        runs.iter().filter(|run| run.code != 0).for_each(|run| run.refused(1, &["another run", "pid "]));
        assert_eq!(workspace.names(&out, "checkpoint-").len(), 3);
        assert_eq!(run(program(&["digest"]).arg(workspace.path(&out).join("checkpoint-60"))).digest(), winners[0].digest());
    }
}

#[test]
fn a_killed_run_leaves_its_directory_free_and_auto_goes_on() {
    let workspace = Workspace::new();
    let digest = run(&mut workspace.train("alone", &[])).digest().to_string();
    let mut first = stopped(&workspace, "r", &[]);
    run(&mut workspace.resume("r", &[])).refused(1, &["another run"]);
    first.kill().unwrap();
    first.wait().unwrap();
    assert_eq!(run(&mut workspace.resume("r", &[])).digest(), digest);
    assert_steps(&workspace, "r", STEPS);
}

#[test]
fn leftovers_of_a_killed_save_go_though_its_process_seems_to_live() {
    let workspace = Workspace::new();
    let digest = run(&mut workspace.train("alone", &[])).digest().to_string();
    let mut first = workspace.train("r", &[]).spawn().unwrap();
    assert!(await_write(&mut first, &workspace.path("r"), 2));
    first.kill().unwrap();
    first.wait().unwrap();
    // In another container this process id belongs to another process: 1 is always alive.
    for name in workspace.names("r", ".checkpoint-") {
        let (rest, _) = name.rsplit_once('-').unwrap();
        fs::rename(workspace.path("r").join(&name), workspace.path("r").join(format!("{rest}-1"))).unwrap();
    }
    fs::rename(workspace.path("r/checkpoint-2"), workspace.path("r/.checkpoint-2.old-1")).unwrap();
    fs::create_dir(workspace.path("r/.checkpoint-6.tmp-1")).unwrap();
    let resumed = run(&mut workspace.resume("r", &[]));
    assert!(resumed.digest() == digest && resumed.stderr.is_empty(), "{resumed:?}");
    assert_eq!(workspace.names("r", "."), [".lock", ".superoffload"]);
    assert!(workspace.path("r/checkpoint-2").is_dir());
}

#[test]
fn links_and_pipes_where_a_run_writes_are_not_followed_nor_waited_for() {
    let workspace = Workspace::new();
    let victim = workspace.write("victim", "mine");
    let names = [".write-probe", "metrics.jsonl.tmp", "metrics.jsonl", "trace.json", ".lock", "tb", ".superoffload"];
    for (round, name) in names.into_iter().enumerate() {
        for (kind, make) in [("link", true), ("pipe", false)] {
            let out = format!("{kind}-{round}");
            let at = workspace.path(&out).join(name);
            fs::create_dir(workspace.path(&out)).unwrap();
            if make {
                symlink(&victim, &at).unwrap()
            } else {
                mkfifo(&at, Mode::S_IRWXU).unwrap()
            }
            let mut child = workspace.train(&out, &["--max-steps", "2"]).spawn().unwrap();
            let start = Instant::now();
            while child.try_wait().unwrap().is_none() {
                if start.elapsed() > Duration::from_secs(60) {
                    child.kill().unwrap();
                }
                std::thread::sleep(Duration::from_millis(10));
            }
            let ended = Outcome::from(child.wait_with_output().unwrap());
            match name {
                ".write-probe" | "metrics.jsonl.tmp" => assert_eq!(ended.code, 0, "{out} {name}: {ended:?}"),
                "trace.json" => ended.refused(2, &["trace.json", "--trace"]),
                _ => ended.refused(2, &[name, "--output-dir"]),
            }
            assert!(at.symlink_metadata().is_ok_and(|found| !found.is_file()), "{out} {name}");
        }
    }
    assert_eq!(fs::read_to_string(victim).unwrap(), "mine");
}

#[test]
fn a_timeline_replaces_timelines_only() {
    let workspace = Workspace::new();
    run(&mut workspace.train("r", &["--max-steps", "2"])).digest();
    for name in ["data.txt", "model/config.json", "r/metrics.jsonl", "r/checkpoint-2/state.bin"] {
        let (path, before) = (workspace.path(name), fs::read(workspace.path(name)).unwrap());
        let out = if name.starts_with("r/") { "r" } else { "other" };
        let refused = run(&mut workspace.resume(out, &["--trace", path.to_str().unwrap()]));
        refused.refused(2, &["--trace", name]);
        assert!(!refused.stdout.contains("step ") && fs::read(&path).unwrap() == before, "{name}: {refused:?}");
    }
    assert!(!workspace.path("other").exists(), "a refused run leaves nothing");
    let trace = workspace.path("r/trace.json");
    let before = fs::read(&trace).unwrap();
    let finished = run(&mut workspace.resume("r", &["--max-steps", "2"]));
    assert!(finished.code == 0 && finished.stdout.contains("nothing to do: step 2 was already done"), "{finished:?}");
    assert_eq!(fs::read(&trace).unwrap(), before, "a finished run's timeline stays");
    run(&mut workspace.resume("r", &["--max-steps", "4"])).digest();
    assert_ne!(fs::read(&trace).unwrap(), before, "and is replaced by that of more steps");
}

#[test]
fn names_of_checkpoints_that_are_none_are_refused_by_a_new_run_and_renamed_by_one_that_goes_on() {
    let workspace = Workspace::new();
    let digest = run(&mut workspace.train("alone", &[])).digest().to_string();
    for (name, target) in [("dangling", "/nowhere"), ("looping", "checkpoint-4"), ("elsewhere", "../model")] {
        run(&mut workspace.train(name, &["--max-steps", "2"])).digest();
        symlink(target, workspace.path(name).join("checkpoint-4")).unwrap();
        run(&mut workspace.train(name, &[])).refused(2, &["checkpoint-4: not a checkpoint of this program", "--output-dir"]);
        let from = workspace.path(name).join("checkpoint-2");
        let ended = run(&mut workspace.train(name, &["--resume-from-checkpoint", from.to_str().unwrap()]));
        assert_eq!(ended.digest(), digest, "{name}");
        assert!(ended.stderr.contains("it is now checkpoint-4.foreign-1"), "{ended:?}");
        assert_eq!(fs::read_link(workspace.path(name).join("checkpoint-4.foreign-1")).unwrap(), Path::new(target));
        assert!(workspace.path(name).join("checkpoint-4").symlink_metadata().unwrap().is_dir());
    }
    assert_eq!(fs::read_to_string(workspace.path("model/config.json")).unwrap(), CONFIG);
}

#[test]
fn a_timeline_that_finds_no_place_at_the_very_end_is_a_warning_as_all_steps_are_saved() {
    let workspace = Workspace::new();
    let digest = run(&mut workspace.train("alone", &[])).digest().to_string();
    let child = stopped(&workspace, "r", &[]);
    fs::create_dir(workspace.path("r/trace.json")).unwrap();
    let ended = finish(child);
    assert_eq!(ended.digest(), digest);
    assert!(ended.stderr.contains("warning: ") && ended.stderr.contains("trace.json: not a timeline"), "{ended:?}");
    assert!(ended.stdout.contains("lost          the timeline"), "{ended:?}");
}

#[test]
fn removed_metrics_are_written_again() {
    let workspace = Workspace::new();
    let digest = run(&mut workspace.train("alone", &[])).digest().to_string();
    let child = stopped(&workspace, "r", &[]);
    fs::remove_file(workspace.path("r/metrics.jsonl")).unwrap();
    let ended = finish(child);
    assert_eq!(ended.digest(), digest);
    assert!(ended.stderr.lines().count() == 1 && ended.stderr.contains("metrics.jsonl was removed"), "{ended:?}");
    assert_steps(&workspace, "r", STEPS);
}

#[test]
fn a_removed_directory_is_created_again_with_later_files() {
    let workspace = Workspace::new();
    let digest = run(&mut workspace.train("alone", &[])).digest().to_string();
    let child = stopped(&workspace, "r", &[]);
    fs::remove_dir_all(workspace.path("r")).unwrap();
    let ended = finish(child);
    assert_eq!(ended.digest(), digest);
    assert!(ended.stderr.contains("r was removed during the run"), "{ended:?}");
    let mut names = workspace.names("r", "checkpoint-");
    // If the save of step 2 found its directory removed, the state of the next step was saved instead.
    names.retain(|name| name != "checkpoint-3");
    assert_eq!(names, ["checkpoint-10", "checkpoint-12", "checkpoint-4", "checkpoint-6", "checkpoint-8"]);
    assert_steps(&workspace, "r", STEPS);
    let line = ended.stdout.lines().find(|line| line.starts_with("  checkpoint  ")).unwrap_or_else(|| panic!("{ended:?}"));
    let files: Vec<_> = line.split([' ', ';']).filter(|word| word.starts_with('/')).collect();
    assert!(files.len() == 2 && files.iter().all(|path| Path::new(path).exists()), "{files:?}");
}

#[test]
fn a_link_in_the_place_of_the_directory_leads_nowhere() {
    let workspace = Workspace::new();
    let digest = run(&mut workspace.train("alone", &[])).digest().to_string();
    fs::create_dir(workspace.path("elsewhere")).unwrap();
    let moved = stopped(&workspace, "r", &[]);
    fs::rename(workspace.path("r"), workspace.path("r2")).unwrap();
    symlink("elsewhere", workspace.path("r")).unwrap();
    let ended = finish(moved);
    assert!(ended.digest() == digest && ended.stderr.contains("continues in"), "{ended:?}");
    assert_eq!(workspace.names("r2", "checkpoint-").len(), 6);
    fs::remove_file(workspace.path("r")).unwrap();
    let removed = stopped(&workspace, "r", &[]);
    fs::remove_dir_all(workspace.path("r")).unwrap();
    symlink("elsewhere", workspace.path("r")).unwrap();
    finish(removed).refused(1, &["create", "File exists"]);
    assert_eq!(workspace.names("elsewhere", ""), [""; 0]);
}

#[test]
fn a_log_that_cannot_be_read_stops_no_resume() {
    let workspace = Workspace::new();
    let digest = run(&mut workspace.train("alone", &[])).digest().to_string();
    run(&mut workspace.train("r", &["--max-steps", "4"])).digest();
    let path = workspace.path("r/metrics.jsonl");
    fs::write(&path, [&fs::read(&path).unwrap()[..], b"\xff\n{\"step\"\n"].concat()).unwrap();
    let resumed = run(&mut workspace.resume("r", &[]));
    assert_eq!(resumed.digest(), digest);
    assert!(resumed.stderr.contains("metrics.jsonl: 2 lines are damaged"), "{resumed:?}");
    assert_steps(&workspace, "r", STEPS);
}

#[test]
fn a_killed_export_leaves_nothing_for_long_and_a_link_is_refused() {
    let workspace = Workspace::new();
    run(&mut workspace.train("r", &["--max-steps", "2"])).digest();
    let export = |out: &str| run(program(&["export"]).arg(workspace.path("r")).arg(workspace.path(out)));
    workspace.write(".out.tmp-4711/.superoffload-export", "an export of superoffload\n");
    workspace.write(".out.tmp-4711/model.safetensors", "half");
    workspace.write(".out.tmp-4712/model.safetensors", "mine");
    assert_eq!(export("out").code, 0);
    assert_eq!(workspace.names(".", "."), [".out.tmp-4712"]);
    fs::create_dir(workspace.path("empty")).unwrap();
    symlink("empty", workspace.path("link")).unwrap();
    export("link").refused(2, &["link", "is a link"]);
}

/// A network file system without a lock service.
#[test]
fn a_file_system_without_locks_is_warned_of_once_and_trains_the_same() {
    if emulator().is_some() {
        return;
    }
    let workspace = Workspace::new();
    let source = workspace.write("nolocks.c", "#include <errno.h>\nint flock(int fd, int how) { errno = ENOLCK; return -1; }\n");
    let library = workspace.path("nolocks.so");
    let built = Command::new("cc").args(["-shared", "-fPIC", "-o"]).arg(&library).arg(source).output();
    assert!(built.unwrap_or_else(|e| panic!("cc: {e}; a C compiler is needed")).status.success());
    let alone = run(&mut workspace.train("alone", &[]));
    let unlocked = run(workspace.train("unlocked", &[]).env("LD_PRELOAD", &library));
    let message = format!(
        "warning: {}: this file system has no locks; two runs in it would overwrite each other",
        workspace.path("unlocked").display()
    );
    assert_eq!(unlocked.stderr.lines().filter(|line| *line == message).count(), 1, "{unlocked:?}");
    assert_eq!(unlocked.digest(), alone.digest());
}
