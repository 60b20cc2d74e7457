//! The directory of checkpoints: their names, publishing, finding the newest good one, removing old ones.
//!
//! Besides `checkpoint-<step>` there are hidden names, each with the id of the process that made it:
//! `.checkpoint-<step>.tmp-<pid>` is being written, `.old-` was moved aside to be replaced, `.del-` is being removed. A process that
//! writes here owns the directory, so that a hidden checkpoint that it did not make belongs to a dead run, whatever its id. Content with
//! such a name that is no checkpoint (see [`super::owned`]) is foreign: it is neither removed nor replaced.

use super::format::{MANIFEST, STATE};
use super::owned::{self, CHECKPOINT, published};
use super::reader::{self, Check, Loaded};
use super::state_parts::is_file_name;
use super::written::Written;
use crate::disk::{Dir, TmpDir, canonical};
use crate::error::{Error, Result};
use std::cmp::Reverse;
use std::ffi::OsStr;
use std::io::ErrorKind;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

/// Checkpoints that are kept beside the newest.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RetainedCheckpoints {
    /// The newest of those before this step.
    pub(crate) newest_before: Option<u64>,
    /// The best by evaluation.
    pub(crate) best: Option<u64>,
}

/// The role of a hidden directory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum HiddenRole {
    /// Being written.
    Tmp,
    /// Complete, moved aside while another takes its name.
    Old,
    /// Being removed.
    Del,
}

impl HiddenRole {
    fn name(self) -> &'static str {
        match self {
            Self::Tmp => "tmp",
            Self::Old => "old",
            Self::Del => "del",
        }
    }
}

/// A directory with a name of the program.
#[derive(Debug, PartialEq)]
struct StoreEntry {
    step: u64,
    /// Role and process id of a hidden one.
    hidden: Option<(HiddenRole, u32)>,
    path: PathBuf,
}

impl StoreEntry {
    fn name(&self) -> &OsStr {
        self.path.file_name().unwrap_or_default()
    }
}

/// Name of this process's hidden directory for `step`.
pub(super) fn hidden(step: u64, role: HiddenRole) -> String {
    format!(".checkpoint-{step}.{}-{}", role.name(), std::process::id())
}

/// Name of the directory that process `pid` writes for `step`.
pub(super) fn hidden_of(step: u64, pid: u64) -> String {
    format!(".checkpoint-{step}.{}-{pid}", HiddenRole::Tmp.name())
}

fn parse(path: PathBuf) -> Option<StoreEntry> {
    let name = path.file_name()?.to_str()?;
    let (step, hidden) = match name.strip_prefix(".checkpoint-") {
        None => (name.strip_prefix("checkpoint-")?, None),
        Some(rest) => {
            let (step, rest) = rest.split_once('.')?;
            let (role, pid) = rest.split_once('-')?;
            let role = [HiddenRole::Tmp, HiddenRole::Old, HiddenRole::Del].into_iter().find(|r| r.name() == role)?;
            (step, Some((role, canonical(pid)?)))
        }
    };
    Some(StoreEntry { step: canonical(step)?, hidden, path })
}

/// Everything of ours in `output_dir`; nothing if there is no such directory.
fn list(output_dir: &Path) -> Result<Vec<StoreEntry>> {
    match Dir::open(output_dir) {
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => Ok(vec![]),
        dir => entries(&dir?),
    }
}

/// Everything of ours in `dir`.
fn entries(dir: &Dir) -> Result<Vec<StoreEntry>> {
    Ok(dir.names()?.into_iter().filter_map(|name| parse(dir.join(name))).collect())
}

/// Tidies up after runs that died inside a save: removes their remains, gives back its name to a checkpoint that was
/// moved aside and not yet replaced. Returns a line for each thing that could not be done. Call it at the start of a
/// run; every save does. The caller owns the directory. Foreign content stays.
///
/// # Errors
/// `output_dir` cannot be read.
pub(crate) fn clean(output_dir: &Dir) -> Result<Vec<String>> {
    let mut warnings = vec![];
    for entry in entries(output_dir)? {
        let Some((role, _)) = entry.hidden else { continue };
        if !CHECKPOINT.is_own(output_dir, entry.name())? {
            continue;
        }
        let done = match role {
            HiddenRole::Old => give_back(output_dir, &entry),
            HiddenRole::Tmp | HiddenRole::Del => owned::remove(output_dir, entry.name(), entry.step),
        };
        warnings.extend(done.unwrap_or_else(|e| Some(e.to_string())));
    }
    Ok(warnings)
}

/// A checkpoint that was moved aside gets its name back, or goes if another one, a whole one, has it.
fn give_back(output_dir: &Dir, aside: &StoreEntry) -> Result<Option<String>> {
    let target = published(aside.step);
    let removed = match output_dir.kind(&target)? {
        None => None,
        Some(_) if !CHECKPOINT.is_own(output_dir, &target)? => {
            let cause = format_args!("kept under this name, because {target} is not a checkpoint of this program; move {target} away");
            return Err(Error::format(&aside.path, cause));
        }
        Some(_) if reader::open(&aside.path).is_err() || reader::open(&output_dir.join(&target)).is_ok() => {
            return owned::remove(output_dir, aside.name(), aside.step);
        }
        // If the checkpoint was moved by copying, the directory with its name may be a partly removed original.
        Some(_) => owned::remove(output_dir, &target, aside.step)?,
    };
    output_dir.rename(aside.name(), &target).and_then(|()| output_dir.sync())?;
    Ok(removed)
}

/// Gives the complete directory `tmp`, which holds `written`, its name. A checkpoint that has the name is moved aside, and removed only
/// when the new one is durable; [`newest_good`] and [`clean`] find it if we die in between. Foreign content gets another name.
pub(super) fn publish(step: u64, tmp: &mut TmpDir, written: &Written, warnings: &mut Vec<String>) -> Result<PathBuf> {
    tmp.dir().sync()?;
    written.expect_in(tmp.dir())?;
    let (output_dir, target) = (tmp.parent().try_clone()?, published(step));
    let replaced = make_way(&output_dir, step, &target, warnings)?;
    tmp.publish(&target).inspect_err(|_| {
        if let Some(old) = &replaced {
            // Should this fail too, `clean` does it at the next start.
            let _ = output_dir.rename(old, &target);
        }
    })?;
    // A concurrent removal of the directory may have deleted some of its files.
    written.expect_in(tmp.dir()).inspect_err(|_| drop(owned::remove(&output_dir, &target, step)))?;
    output_dir.sync()?;
    if let Some(old) = &replaced {
        warnings.extend(owned::remove(&output_dir, old, step).unwrap_or_else(|e| Some(e.to_string())));
    }
    Ok(output_dir.join(target))
}

/// Moves `target` aside; the hidden name of a checkpoint is returned.
fn make_way(output_dir: &Dir, step: u64, target: &str, warnings: &mut Vec<String>) -> Result<Option<String>> {
    if output_dir.kind(target)?.is_none() {
        return Ok(None);
    }
    if !CHECKPOINT.is_own(output_dir, target)? {
        let aside = output_dir.set_aside(target)?;
        warnings.push(format!("{}: not a checkpoint of this program; it is now {}", output_dir.join(target).display(), aside.display()));
        return Ok(None);
    }
    let old = hidden(step, HiddenRole::Old);
    output_dir.rename(target, &old).map(|()| Some(old))
}

/// Removes the oldest complete checkpoints until `limit` are left, never `newest_step`, the one just saved.
/// Incomplete ones are neither counted nor touched, nor are the spared, links, and those that their owner may not write.
pub(super) fn prune(output_dir: &Dir, newest_step: u64, limit: NonZeroUsize, spared: RetainedCheckpoints, warnings: &mut Vec<String>) {
    let entries = match entries(output_dir) {
        Ok(entries) => entries,
        Err(e) => return warnings.push(e.to_string()),
    };
    let is_ours = |entry: &&StoreEntry| entry.hidden.is_none() && is_removable(output_dir, entry) && reader::open(&entry.path).is_ok();
    let mut complete: Vec<u64> = entries.iter().filter(is_ours).map(|e| e.step).collect();
    complete.sort_unstable();
    let before = complete.iter().copied().filter(|&step| spared.newest_before.is_some_and(|before| step < before)).max();
    complete.retain(|&step| step == newest_step || Some(step) != before && Some(step) != spared.best);
    let excess = complete.len().saturating_sub(limit.get());
    for step in complete.into_iter().filter(|&step| step != newest_step).take(excess) {
        warnings.extend(remove_published(output_dir, step).unwrap_or_else(|e| Some(e.to_string())));
    }
}

/// Without write permission its owner has protected it.
fn is_removable(output_dir: &Dir, entry: &StoreEntry) -> bool {
    let is_own = CHECKPOINT.is_own(output_dir, entry.name()).unwrap_or(false);
    is_own && output_dir.open_dir(entry.name()).and_then(|dir| dir.is_writable()).unwrap_or(false)
}

/// Under a hidden name first, so that no half of one has the name of a checkpoint; one that cannot be renamed goes where it is.
fn remove_published(output_dir: &Dir, step: u64) -> Result<Option<String>> {
    let (name, del) = (published(step), hidden(step, HiddenRole::Del));
    if !output_dir.rename_in_place(&name, &del)? {
        return owned::remove(output_dir, &name, step);
    }
    owned::remove(output_dir, &del, step).inspect_err(|_| {
        if reader::open(&output_dir.join(&del)).is_ok() {
            // Nothing of it is gone: it need not be hidden.
            let _ = output_dir.rename(&del, &name);
        }
    })
}

/// Whether `dir` has the name of a published checkpoint.
pub(super) fn is_called_checkpoint(dir: &Path) -> bool {
    parse(dir.to_path_buf()).is_some_and(|entry| entry.hidden.is_none())
}

/// Whether `dir` itself is meant to be a checkpoint, good or damaged, and not a directory of them.
pub(crate) fn is_checkpoint(dir: &Path) -> bool {
    // An inaccessible manifest counts as one: reading it reports the error.
    !dir.join(MANIFEST).symlink_metadata().is_err_and(|e| matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory))
}

/// The newest checkpoint that passed a check.
#[derive(Debug)]
pub(crate) struct Newest<T> {
    /// The checkpoint's directory and the result of the check; `None` if there is no checkpoint, or all are damaged.
    pub found: Option<(PathBuf, T)>,
    /// A line for each newer one that is damaged: the file and its defect. Empty with nothing found: there is none.
    pub warnings: Vec<String>,
}

/// The newest checkpoint in `output_dir` that passes `check`. Reads only; changes nothing.
///
/// # Errors
/// Errors of [`newest_by`].
pub(crate) fn newest_good(output_dir: &Path, check: Check) -> Result<Newest<Loaded>> {
    newest_by(output_dir, |path| Ok(check.open(path)))
}

/// The newest checkpoint in `output_dir` that passes `check`; goes through all, highest step first. The inner error of `check` is a fault of
/// the checkpoint. The outer error is another failure and ends the search.
///
/// # Errors
/// `output_dir` exists and cannot be read; a checkpoint that may be good cannot be read, or is of a newer format: each is named, and each
/// that is damaged. Only damage is skipped: a failed read of a disk or network may succeed later. Outer errors of `check`.
pub(crate) fn newest_by<T>(output_dir: &Path, mut check: impl FnMut(&Path) -> Result<Result<T>>) -> Result<Newest<T>> {
    let mut entries = list(output_dir)?;
    entries.retain(|e| e.hidden.is_none_or(|(role, _)| role == HiddenRole::Old));
    entries.sort_by_key(|e| (Reverse(e.step), e.hidden.is_some()));
    let (mut denied, mut warnings) = (vec![], vec![]);
    for entry in entries {
        // A newer checkpoint may be good, so an older one is not checked, which may write an export.
        if !denied.is_empty() && expect_step(&entry).is_ok() {
            break;
        }
        match expect_step(&entry).map_or_else(|e| Ok(Err(e)), |()| check(&entry.path))? {
            Ok(checked) => return Ok(Newest { found: Some((entry.path, checked)), warnings }),
            Err(e) if is_damage(&e) => warnings.push(e.to_string()),
            Err(e) => denied.push(e),
        }
    }
    match denied.len() {
        0 => Ok(Newest { found: None, warnings }),
        1 if warnings.is_empty() => Err(denied.remove(0)),
        _ => Err(none_is_sure(output_dir, &denied, &warnings)),
    }
}

/// Some could not be read, and more than one has a cause.
fn none_is_sure(output_dir: &Path, denied: &[Error], damaged: &[String]) -> Error {
    let causes: Vec<_> = denied.iter().map(Error::to_string).chain(damaged.iter().cloned()).collect();
    Error::resource(format!("find the newest good checkpoint in {}", output_dir.display()), causes.join("; "))
}

/// Whether `error` means wrong, truncated or missing content, as opposed to a failed read.
pub(super) fn is_damage(error: &Error) -> bool {
    match error {
        Error::Format { .. } => true,
        Error::Io { path, source, .. } => match source.kind() {
            ErrorKind::UnexpectedEof => true,
            // The directory does not list the name. A link that leads nowhere may lead to a disk that is not mounted.
            ErrorKind::NotFound => path.symlink_metadata().is_err_and(|e| e.kind() == ErrorKind::NotFound),
            _ => false,
        },
        _ => false,
    }
}

/// Whether `error` names damage in a file of state.
pub(crate) fn is_state_damage(error: &Error) -> bool {
    let (Error::Format { path, .. } | Error::Io { path, .. }) = error else { return false };
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    is_damage(error) && (name == STATE || is_file_name(name))
}

/// Checks that the checkpoint opens and that its manifest has the step of its name.
fn expect_step(entry: &StoreEntry) -> Result<()> {
    let found = entry.path.metadata().map_err(|e| Error::io("read", &entry.path, e))?;
    if !found.is_dir() {
        return Err(Error::format(&entry.path, "not a directory"));
    }
    let step = reader::open(&entry.path)?.manifest().trainer.step;
    if step != entry.step {
        return Err(Error::format(&entry.path, format_args!("holds step {step}, not the one in its name")));
    }
    Ok(())
}
