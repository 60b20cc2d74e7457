//! What the privileged program promises, against the kernel of this machine: whatever it does and however it ends, afterwards the tree,
//! the group of every foreign thread and its affinity are as they were.
//!
//! It mounts, unmounts and fills the machine's resctrl, so it runs only where it is told to (`run.sh` beside it makes such a machine):
//! as root, with SUPEROFFLOAD_GUEST=1, resctrl not mounted, four CPUs in two L3 caches, `superoffload-resctrl` in the current folder.

mod cases;
mod rig;
mod snapshot;

use std::io::Write;
use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match args.first().map(String::as_str) {
        Some("as-trainer") => return cases::as_trainer(&args[1]),
        Some("move-and-wait") => return cases::move_and_wait(&args[1..]),
        Some("in-user-namespace") => return rig::in_user_namespace(&args[1..]),
        _ => {}
    }
    if std::env::var_os("SUPEROFFLOAD_GUEST").is_none() {
        say("not told that this is a guest: nothing is checked (see resctrl/README.md)");
        return ExitCode::SUCCESS;
    }
    let mut failed = 0;
    for (name, case) in cases::CASES {
        match std::panic::catch_unwind(case) {
            Ok(seen) => {
                say(&format!("ok     {name}"));
                seen.iter().for_each(|line| say(&format!("         {line}")));
            }
            Err(_) => {
                say(&format!("FAILED {name}"));
                failed += 1;
            }
        }
    }
    say(&format!("{} cases, {failed} failed", cases::CASES.len()));
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn say(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
