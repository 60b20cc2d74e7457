//! Prepares cache and bandwidth partitions for a trainer that does not run as root.

use clap::{Args, Parser, Subcommand};
use nix::unistd::{Uid, User};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use superoffload_resctrl::{
    Condition, DEFAULT_CPUS, DEFAULT_JOURNAL, DEFAULT_ROOT, Discovery, Error, GroupPath, Machine, Profile, Result, Session, Tree,
    describe_journal, discover, prepare, restore,
};

/// Prepares cache and memory-bandwidth partitions (Intel RDT, AMD QoS, Arm MPAM), and undoes them.
///
/// Run `prepare` or `hold` as root; the trainer then runs as USER and its optimizer's threads join the group superoffload-adam.
///
/// Exit status: 0 done, 1 failed, 2 the request makes no sense here, 3 nothing to partition, 4 not mounted, 5 mounted read-only,
/// 6 no group of the hardware is left, 7 not allowed (not root, or in a container), 8 another process is at it.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// Where resctrl is, or is to be, mounted.
    #[arg(long, global = true, default_value = DEFAULT_ROOT, value_name = "DIR")]
    root: PathBuf,
    /// Where to write down what is changed, and what it was before.
    #[arg(long, global = true, default_value = DEFAULT_JOURNAL, value_name = "FILE")]
    journal: PathBuf,
}

#[derive(Subcommand)]
enum Command {
    /// Make the groups and leave them until `restore`.
    Prepare(Groups),
    /// Make the groups and undo them on SIGINT, SIGTERM or SIGHUP.
    Hold(Groups),
    /// Undo what `prepare`, or a `hold` that was killed, left.
    Restore,
    /// Show groups, limits, counters, and what there is to undo. Changes nothing.
    Status,
}

#[derive(Args)]
struct Groups {
    /// What to make: `paper`, `cache-only`, or a file.
    #[arg(long, value_name = "NAME|FILE")]
    profile: String,
    /// Who may put their own threads into the groups.
    #[arg(long, value_name = "NAME|UID")]
    user: Option<String>,
}

fn main() -> ExitCode {
    match run(&Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let advice = error.condition().advice();
            let advice = if advice.is_empty() { String::new() } else { format!("; {advice}") };
            let _ = writeln!(std::io::stderr(), "superoffload-resctrl: {error}{advice}");
            ExitCode::from(error.condition().exit_code())
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    match &cli.command {
        Command::Prepare(groups) => make(cli, groups, false),
        Command::Hold(groups) => make(cli, groups, true),
        Command::Restore => {
            let _signals = deferred_signals()?;
            let notes = restore(&cli.root, &cli.journal)?;
            print(if notes.is_empty() { vec!["nothing to undo".into()] } else { notes });
            Ok(())
        }
        Command::Status => status(&cli.root, &cli.journal),
    }
}

/// Signals are queued from here on, so that no change is interrupted halfway.
fn deferred_signals() -> Result<Signals> {
    Signals::new([SIGHUP, SIGINT, SIGTERM]).map_err(|e| Error::io("catch signals for", "this process", e))
}

fn make(cli: &Cli, groups: &Groups, hold: bool) -> Result<()> {
    let profile = Profile::load(&groups.profile)?;
    let user = groups.user.as_deref().map(find_user).transpose()?;
    let machine = Machine::read(Path::new(DEFAULT_CPUS))?;
    let mut signals = deferred_signals()?;
    let (mut session, notes) = Session::start(&cli.root, &cli.journal)?;
    print(notes.into_iter().map(|note| format!("left by an earlier run: {note}")));
    print(prepare(&mut session, &profile, &machine, user)?);
    let stopped = signals.pending().next().is_some();
    if !hold && !stopped {
        return session.keep();
    }
    if !stopped {
        print(["holding until a signal".into()]);
        signals.forever().next();
    }
    print(session.restore()?);
    Ok(())
}

fn find_user(name: &str) -> Result<Uid> {
    let unknown = |cause: String| Error::Refused { subject: format!("--user {name}"), cause };
    if let Ok(uid) = name.parse() {
        return Ok(Uid::from_raw(uid));
    }
    let user = User::from_name(name).map_err(|errno| unknown(errno.to_string()))?;
    user.map(|user| user.uid).ok_or_else(|| unknown("no such user".into()))
}

fn status(root: &Path, journal: &Path) -> Result<()> {
    // A journal that only root can read must not prevent the output of the partitions.
    match describe_journal(journal) {
        Ok(None) => print(["journal: nothing to undo".into()]),
        Ok(Some(held)) => print([format!("journal: {held}")]),
        Err(error) if error.condition() == Condition::NotAllowed => print([format!("journal: {error}")]),
        Err(error) => return Err(error),
    }
    match discover(root)? {
        Discovery::NoMountPoint => return Err(Error::Absent(root.into())),
        Discovery::NotMounted => return Err(Error::NotMounted(root.into())),
        Discovery::Mounted(found) => {
            print([found.info.to_string()]);
            print(found.groups.iter().map(ToString::to_string));
        }
    }
    let tree = Tree::open(root)?;
    for group in tree.groups()?.iter().filter(|&group| *group == GroupPath::root() || group.is_ours()) {
        let counters = tree.counters(group)?;
        print(counters.iter().map(|c| {
            let bytes = c.bytes.map_or("unavailable".into(), |bytes| bytes.to_string());
            format!("{group} {} {}: {bytes}", c.domain, c.event)
        }));
    }
    Ok(())
}

/// Prints lines. A closed pipe (`status | head`) is ignored, because partitions must not stay half made.
fn print(lines: impl IntoIterator<Item = String>) {
    let mut out = std::io::stdout().lock();
    lines.into_iter().for_each(|line| drop(writeln!(out, "{line}")));
}
