//! R16c: one of two processes cannot write to the shared output directory.

use crate::harness::*;
use crate::pair::{both, settings};
use std::process::Command;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R16c",
    what: "one of two processes may write no file as large as its part of a checkpoint, or is another user, or sees the output directory read-only (those two as \
           root alone): both end with exit 1 before the first step, and a line names the process, the path and what helps",
    runs: 12,
    smoke: 2,
    start,
};

/// Shell commands that restrict the process that runs `"$@"`, and texts in its error.
const WAYS: [(&str, &str, &str); 3] = [
    ("limited", "ulimit -f 120; exec \"$@\"", "ulimit -f allows files of 60.0 KiB"),
    ("another user", "exec setpriv --reuid=65534 --regid=65534 --clear-groups \"$@\"", "Permission denied (os error 13)"),
    (
        "read-only",
        "exec unshare -m sh -c 'mount --bind \"$0\" \"$0\" && mount -o remount,ro,bind \"$0\" && exec \"$@\"' \"$OUT\" \"$@\"",
        "Read-only file system (os error 30)",
    ),
];

fn start(harness: &Harness) -> Result<Trial, String> {
    expect(harness.has_flag("--processes"), || "this program has no --processes".into())?;
    settings(harness);
    let is_root = nix::unistd::geteuid().is_root();
    let world = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o755);
    std::fs::set_permissions(harness.path(""), world).map_err(|e| e.to_string())?;
    Ok(Box::new(move |harness, turn| {
        let ways = if is_root { WAYS.len() } else { 1 };
        let ((name, script, words), victim) = (WAYS[turn.index as usize % ways], 1 - turn.index as usize / ways % 2);
        turn.kind = format!("process {victim}: {name}");
        harness.fresh("shared");
        let change = |process, command: Command| if process == victim { by_shell(harness, script, &command) } else { command };
        let ends = both(harness, "processes.toml", "shared", &[], change).map(Running::finish);
        for outcome in &ends {
            outcome.expect_orderly(&[1])?;
            expect(outcome.stderr.contains(words), || format!("{words} is not said: {outcome}"))?;
            expect(!outcome.stdout.contains("\nstep "), || format!("a step was done: {outcome}"))?;
        }
        let other = &ends[1 - victim];
        expect(other.stderr.contains(&format!("process {victim} on ")), || format!("the other does not name it: {other}"))?;
        harness.expect_tidy("shared")
    }))
}

fn by_shell(harness: &Harness, script: &str, command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", script, "sh"]).arg(command.get_program()).args(command.get_args()).env("OUT", harness.path("shared"));
    shell
}
