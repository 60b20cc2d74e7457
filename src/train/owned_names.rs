//! Every name that a run writes, replaces or removes in its output directory, in one table. Foreign content at one of them is found before
//! the run writes a byte: a new run is refused, and one that goes on in a directory of its own gives it another name.

use super::observer::Observer;
use super::reference::{REFERENCE, TOKEN_REFERENCE};
use super::run_lock::LOCK;
use super::sinks::metrics_file::METRICS;
use super::sinks::{SINKS, SinkKind};
use crate::checkpoint::carried::{self, CARRIED, CARRIED_BEING_WRITTEN};
use crate::checkpoint::{BEING_REMOVED, BEING_REPLACED, BEING_WRITTEN, CHECKPOINT};
use crate::config::settings::Settings;
use crate::data::checksum::CHECKSUMS;
use crate::data::prepared::cache::{BESIDE_THE_RUN, SMALL};
use crate::data::prepared::checked_files::CHECKED;
use crate::data::run_sources::SOURCES;
use crate::disk::{Dir, OwnMark, OwnedName, RECORDS, RECORDS_MANIFEST, Records};
use crate::error::{Error, Result};
use crate::trace::file::TRACE;
use std::ffi::{OsStr, OsString};

/// The names in the output directory, besides those of sinks.
const NAMES: [&OwnedName; 7] = [&LOCK, &RECORDS, &TRACE, &CHECKPOINT, &BEING_WRITTEN, &BEING_REPLACED, &BEING_REMOVED];
/// The names in its folder [`RECORDS`].
pub(crate) const RECORD_NAMES: [&OwnedName; 10] = [
    &REFERENCE.file,
    &TOKEN_REFERENCE.file,
    &RECORDS_MANIFEST,
    &CHECKSUMS.file,
    &CHECKED.file,
    &SOURCES.file,
    &SMALL,
    &BESIDE_THE_RUN,
    &CARRIED,
    &CARRIED_BEING_WRITTEN,
];
/// Written beside this name and removed, to know that files can be written. Nothing ever has the name itself.
pub(super) const PROBE: OwnedName = OwnedName { pattern: ".write-probe", kind: "probe", mark: OwnMark::Head("x") };
/// Files in the output directory that are written beside first, as `.<name>.tmp-<number>`.
const WRITTEN_BESIDE: [&OwnedName; 3] = [&METRICS, &TRACE, &PROBE];

/// Something at one of the names that the program did not make.
struct ForeignEntry {
    dir: Dir,
    name: OsString,
    owned: &'static OwnedName,
}

/// Refuses a directory in which foreign content has a name that a new run needs. Where a run goes on that the directory is known by,
/// such content gets another name, reported to `observer`. Otherwise nothing is written.
///
/// # Errors
/// `Usage` that names the first one and a remedy; `Io` when the directory cannot be read.
pub(super) fn claim(dir: &Dir, settings: &Settings, observer: &mut dyn Observer) -> Result<()> {
    check(dir, settings)?;
    set_aside(foreign(dir, settings)?, observer)
}

/// Rejects like [`claim`], but renames only a foreign lock: until the lock is held, other names may belong to a running run.
///
/// # Errors
/// Errors of [`claim`].
pub(super) fn claim_lock(dir: &Dir, settings: &Settings, observer: &mut dyn Observer) -> Result<()> {
    check(dir, settings)?;
    let found = foreign(dir, settings)?;
    set_aside(found.into_iter().filter(|foreign| foreign.owned.pattern == LOCK.pattern).collect(), observer)
}

fn set_aside(foreign: Vec<ForeignEntry>, observer: &mut dyn Observer) -> Result<()> {
    for ForeignEntry { dir, name, owned } in foreign {
        let (path, aside) = (dir.join(&name), dir.set_aside(&name)?);
        observer.warn(&format!("{}: not a {} of this program; it is now {}", path.display(), owned.kind, aside.display()));
    }
    Ok(())
}

/// Rejects the directories that [`claim`] rejects, and changes nothing: for a run that is only planned.
///
/// # Errors
/// Errors of [`claim`].
pub(super) fn check(dir: &Dir, settings: &Settings) -> Result<()> {
    let foreign = foreign(dir, settings)?;
    let resumes = settings.resume_from_checkpoint.is_some() && is_of_a_run(dir)?;
    if foreign.is_empty() || resumes { Ok(()) } else { Err(refusal(&foreign, dir, settings)) }
}

/// Removes the temporary files that killed runs left.
///
/// # Errors
/// `Io` when they cannot be read or removed.
pub(super) fn remove_remains(dir: &Dir) -> Result<()> {
    WRITTEN_BESIDE.iter().try_for_each(|owned| dir.remove_beside(owned))?;
    let records = Records::open(dir)?;
    carried::remove_remains(records.dir())?;
    RECORD_NAMES.iter().try_for_each(|owned| records.dir().remove_beside(owned))
}

/// Every name in the tables, as a path in the output directory, `#` in it for a number, with those under which files are written first.
pub fn patterns() -> Vec<String> {
    let beside = |owned: &OwnedName| format!(".{}.tmp-#", owned.pattern.trim_start_matches('.'));
    let records = RECORD_NAMES.into_iter().flat_map(|owned| [owned.pattern.to_string(), beside(owned)]);
    let names = names().map(|owned| owned.pattern.to_string()).chain(WRITTEN_BESIDE.into_iter().map(beside));
    names.chain(records.map(|name| format!("{}/{name}", RECORDS.pattern))).collect()
}

/// All names in the output directory.
fn names() -> impl Iterator<Item = &'static OwnedName> {
    NAMES.into_iter().chain(SINKS.into_iter().map(|kind| kind.name))
}

/// The name in the table that `name` is, in the output directory.
pub(super) fn named(name: &OsStr) -> Option<&'static OwnedName> {
    names().find(|owned| owned.matches(name))
}

fn foreign(dir: &Dir, settings: &Settings) -> Result<Vec<ForeignEntry>> {
    let mut found = foreign_of(dir, &Vec::from_iter(names()), |owned| is_needed(owned, settings))?;
    if let Some(records) = Records::find(dir) {
        found.extend(foreign_of(records.dir(), &RECORD_NAMES, |_| true)?);
    }
    found.sort_by(|a, b| (a.dir.path(), &a.name).cmp(&(b.dir.path(), &b.name)));
    Ok(found)
}

fn foreign_of(dir: &Dir, names: &[&'static OwnedName], is_needed: impl Fn(&OwnedName) -> bool) -> Result<Vec<ForeignEntry>> {
    let mut foreign = vec![];
    for name in dir.names()? {
        let owned = names.iter().find(|owned| owned.matches(&name) && is_needed(owned));
        if let Some(owned) = owned
            && !owned.is_own(dir, &name)?
        {
            foreign.push(ForeignEntry { dir: dir.try_clone()?, name, owned });
        }
    }
    Ok(foreign)
}

/// Hidden names hold the process's id, and a run that goes on leaves checkpoints that it stands on as they are.
fn is_needed(owned: &OwnedName, settings: &Settings) -> bool {
    match owned.pattern {
        pattern if pattern == TRACE.pattern => settings.trace.is_none(),
        pattern if pattern == CHECKPOINT.pattern => settings.resume_from_checkpoint.is_none(),
        pattern => match SinkKind::named(owned) {
            Some(kind) => kind.is_wanted(&settings.report_to),
            None => [LOCK.pattern, RECORDS.pattern].contains(&pattern),
        },
    }
}

/// Whether runs of this program were in `dir`.
fn is_of_a_run(dir: &Dir) -> Result<bool> {
    if Records::find(dir).is_some() {
        return Ok(true);
    }
    let checkpoints = dir.names()?.into_iter().filter(|name| CHECKPOINT.matches(name));
    checkpoints.map(|name| CHECKPOINT.is_own(dir, &name)).try_fold(false, |any, own| Ok(any || own?))
}

fn refusal(foreign: &[ForeignEntry], output_dir: &Dir, settings: &Settings) -> Error {
    let ForeignEntry { dir, name, owned } = &foreign[0];
    let more = match foreign.len() - 1 {
        0 => String::new(),
        more => format!(" (and {more} more there)"),
    };
    let other = match owned.pattern {
        _ if SinkKind::named(owned).is_some_and(|kind| !kind.is_required()) => ", or use --report-to none",
        pattern if pattern == TRACE.pattern => ", or another file for the timeline with --trace",
        _ => "",
    };
    let in_a_run = is_of_a_run(output_dir).unwrap_or(false) && settings.resume_from_checkpoint.is_none();
    let resume = if in_a_run { "; --resume-from-checkpoint auto renames it and continues" } else { "" };
    let (path, kind) = (dir.join(name), owned.kind);
    let remedy = format_args!("move it away, or name another --output-dir{other}{resume}");
    Error::usage(format_args!("{}: not a {kind} of this program, but the run needs this name{more}; {remedy}", path.display()))
}

#[cfg(test)]
#[path = "owned_names_tests.rs"]
mod tests;
