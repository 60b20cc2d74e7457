//! Tests of the privileged program's promise against a real kernel: however the program ends, the tree, the group of every other thread and
//! its CPU affinity are as they were before.
//!
//! The tests mount, unmount and fill the machine's resctrl tree, so they run only on request: as root, with SUPEROFFLOAD_GUEST=1, with
//! resctrl not mounted, on four CPUs in two L3 caches, with `superoffload-resctrl` in the current folder. `run.sh` creates such a virtual
//! machine.

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
        print_line("not told that this is a guest: nothing is checked (see resctrl/README.md)");
        return ExitCode::SUCCESS;
    }
    let mut failed = 0;
    for (name, case) in cases::CASES {
        match std::panic::catch_unwind(case) {
            Ok(seen) => {
                print_line(&format!("ok     {name}"));
                seen.iter().for_each(|line| print_line(&format!("         {line}")));
            }
            Err(_) => {
                print_line(&format!("FAILED {name}"));
                failed += 1;
            }
        }
    }
    print_line(&format!("{} cases, {failed} failed", cases::CASES.len()));
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn print_line(line: &str) {
    let _ = writeln!(std::io::stdout(), "{line}");
}
