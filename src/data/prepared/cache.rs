//!
//! Cache of prepared text. One run prepares a text, and other runs that need this text wait for it.
//! A folder is named by a SHA-256 over the format, the rules of records, the program's version, the tokenizer, the separator, and for each
//! text file its path, size, time and inode: so a resumed run finds its folder without reading the text. Beside the folder `KEY` there may
//! be `KEY.lock`, held by the run that prepares it (the lock ends with the process, however it ends), and `.KEY.tmp`, which is being
//! written, or was left by a killed run if no process holds the lock. Files with such names that the program did not make are left alone.

use super::checked_files::CheckedFiles;
use super::folder::{FOLDER, FORMAT_VERSION, FolderWriter, Prepared, PreparedFrom, files_in, open};
use crate::data::chat::record::RULES_VERSION;
use crate::data::checksum::hex;
use crate::data::context::Preparation;
use crate::data::encode::text_files::{bytes_of, tokenize, usual_bytes_of};
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::data::read::files::kind;
use crate::data::run_sources::{CachedTokens, KnownSources};
use crate::disk::{Dir, FileKind, InFile, Lock, OwnMark, OwnedName, Records, try_lock};
use crate::error::{Error, Result};
use crate::units::Bytes;
use nix::fcntl::OFlag;
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::path::Path;
use std::time::Duration;

/// In the run's folder of records: where text goes when the user's cache cannot be written.
pub(crate) const BESIDE_THE_RUN: OwnedName =
    OwnedName { pattern: "prepared", kind: "folder of prepared text", mark: OwnMark::Folder(|_| Ok(true)) };
/// In the run's folder of records: where small text goes.
pub(crate) const SMALL: OwnedName = OwnedName { pattern: "tokens", ..BESIDE_THE_RUN };
/// Where runs keep large text and small text, each with its name in the output directory before there was that folder. It is read there.
const PLACES: [(OwnedName, &str); 2] = [(BESIDE_THE_RUN, ".data"), (SMALL, "data-tokens")];

/// A text to be prepared, and how.
struct WantedText<'a> {
    origin: PreparedFrom<'a>,
    texts: &'a [&'a Path],
    tokenizer: &'a Tokenizer,
    vocab_size: usize,
    is_small: bool,
}

/// The prepared tokens of `texts`: found, or made now.
///
/// # Errors
/// Errors of [`tokenize`]; `Io` and `Resource` when there is no place or no room to keep the tokens.
pub(in crate::data) fn find_or_prepare(
    texts: &[&Path],
    tokenizer: &Tokenizer,
    vocab_size: usize,
    checked: &mut CheckedFiles,
    preparation: &mut Preparation<'_>,
) -> Result<Prepared> {
    let prepared = match stand_in(texts, tokenizer, checked, preparation)? {
        Some(prepared) => prepared,
        None => find_or_make(texts, tokenizer, vocab_size, checked, preparation)?,
    };
    match prepared.largest_id {
        id if id as usize >= vocab_size => {
            Err(Error::format(texts[0], format_args!("the text has token {id}, outside the vocabulary of {vocab_size}")))
        }
        _ => Ok(prepared),
    }
}

/// Removes the prepared tokens in `output_dir` of small text that the run does not use any more, as after a change of the text. A folder
/// that cannot be removed is ignored, and files that the program did not make are left alone.
pub(crate) fn remove_others(output_dir: &Dir, known: &KnownSources) {
    let Some(dir) = Records::find(output_dir).and_then(|records| records.dir().open_dir(SMALL.pattern).ok()) else { return };
    for name in dir.names().unwrap_or_default() {
        let name = name.to_string_lossy();
        let key = name.strip_suffix(".lock").unwrap_or(&name);
        if !is_key(key) || known.keeps(key) {
            continue;
        }
        // Errors are ignored: the next start tries again.
        let _ = if key != name && dir.kind(&*name).is_ok_and(|kind| kind == Some(FileKind::File(0))) {
            dir.remove(&*name)
        } else {
            remove_folder(&dir, &name).map(drop)
        };
    }
}

/// The prepared tokens of `texts` of which a file is missing, if they are known; `None` where none is missing.
///
/// # Errors
/// An error that names the missing file and the folder, where the folder cannot be opened either; `Interrupted`.
fn stand_in(
    texts: &[&Path],
    tokenizer: &Tokenizer,
    checked: &mut CheckedFiles,
    preparation: &mut Preparation<'_>,
) -> Result<Option<Prepared>> {
    let Some(CachedTokens { folder, dir, why }) = preparation.known.stand_in(texts) else { return Ok(None) };
    let name = folder.file_name().unwrap_or_default().to_owned();
    let (key, mut cause) = (name.to_string_lossy(), None);
    let origin = PreparedFrom::new(&key, tokenizer, texts);
    // A run that was moved took its folders along, and so may a cache have been.
    let kept = folder.parent().and_then(|root| Dir::open(root).ok());
    let moved = kept_roots(&dir, &PLACES).into_iter().chain(preparation.cache.as_ref().and_then(|cache| Dir::open(cache).ok()));
    for root in kept.into_iter().chain(moved) {
        match open(&root, &origin, false, checked, preparation) {
            Ok(Some(found)) => {
                let place = root.join(&name);
                preparation.note(format!("{why}: training continues with the tokens that were prepared from it, in {}", place.display()));
                return Ok(Some(found));
            }
            Err(error @ Error::Interrupted(_)) => return Err(error),
            Ok(None) => {}
            Err(error) => drop(cause.get_or_insert(error.to_string())),
        }
    }
    let cause = cause.unwrap_or_else(|| format!("{} is not there", folder.display()));
    let remedy = "restore the file, or give its new path with --data";
    Err(Error::resource(why, format_args!("the tokens that were prepared from it are not available either: {cause}; {remedy}")))
}

/// Of `places` the folders that the run in `output_dir` has, and those of an earlier version.
fn kept_roots(output_dir: &Path, places: &[(OwnedName, &str)]) -> Vec<Dir> {
    let Ok(dir) = Dir::open(output_dir) else { return vec![] };
    let records = Records::find(&dir);
    let now = places.iter().filter_map(|(name, _)| records.as_ref()?.dir().open_dir(name.pattern).ok());
    now.chain(places.iter().filter_map(|(_, earlier)| dir.open_dir(earlier).ok())).collect()
}

fn find_or_make(
    texts: &[&Path],
    tokenizer: &Tokenizer,
    vocab_size: usize,
    checked: &mut CheckedFiles,
    preparation: &mut Preparation<'_>,
) -> Result<Prepared> {
    let key = key(texts, tokenizer, RULES_VERSION)?;
    let origin = PreparedFrom::new(&key, tokenizer, texts);
    let is_small = bytes_of(texts, &preparation.known) <= preparation.in_memory_bytes_max;
    let wanted = WantedText { origin, texts, tokenizer, vocab_size, is_small };
    let cache = preparation.cache.clone().filter(|_| !is_small);
    let roots = cache.iter().filter_map(|cache| Dir::open(cache).ok());
    let kept = preparation.output_dir.as_deref().map(|dir| kept_roots(dir, &PLACES[usize::from(is_small)..][..1]));
    for root in roots.chain(kept.unwrap_or_default()) {
        match open(&root, &wanted.origin, false, checked, preparation) {
            Ok(Some(found)) => return Ok(found),
            Err(error @ Error::Interrupted(_)) => return Err(error),
            // The process that holds the lock reports errors of the folder.
            Ok(None) | Err(_) => {}
        }
    }
    match cache {
        None => make_beside(&wanted, checked, preparation),
        Some(cache) => match make_in_cache(&cache, &wanted, checked, preparation) {
            // It is the place that fails, be it full, or another user's, and there is another place.
            Err(error) if preparation.output_dir.is_some() && is_about(&cache, &error) => {
                preparation.warn(format!("{error}: prepared text is kept in the output directory instead"));
                make_beside(&wanted, checked, preparation)
            }
            made => made,
        },
    }
}

/// Whether `error` concerns the folder `root` or its content.
fn is_about(root: &Path, error: &Error) -> bool {
    match error {
        Error::Io { path, .. } | Error::Format { path, .. } => path.starts_with(root),
        Error::Resource { operation, .. } => *operation == preparing_in(root),
        _ => false,
    }
}

fn make_in_cache(cache: &Path, wanted: &WantedText<'_>, checked: &mut CheckedFiles, preparation: &mut Preparation<'_>) -> Result<Prepared> {
    fs::create_dir_all(cache).map_err(|e| Error::io("create", cache, e))?;
    let root = Dir::open(cache)?;
    let _lock = lock(&root, wanted.origin.key, preparation)?;
    make(&root, wanted, checked, preparation)
}

/// Prepares text in the output directory, which belongs to this run alone: a lock is not required there. Foreign files with the names that
/// are needed are renamed.
fn make_beside(wanted: &WantedText<'_>, checked: &mut CheckedFiles, preparation: &mut Preparation<'_>) -> Result<Prepared> {
    let no_place = || Error::resource("keep prepared text", "neither HOME nor SUPEROFFLOAD_CACHE names a directory");
    let records = Records::at(preparation.output_dir.as_deref().ok_or_else(no_place)?)?;
    let name = if wanted.is_small { SMALL.pattern } else { BESIDE_THE_RUN.pattern };
    let root = match records.dir().kind(name)? {
        None => records.dir().create_dir(name)?,
        Some(_) => records.dir().open_dir(name)?,
    };
    let key = wanted.origin.key;
    for (name, mark) in [(key.to_string(), &FOLDER), (tmp_name(key), &FOLDER)] {
        if root.kind(&name)?.is_some() && !mark.is_own(&root, &name)? {
            let (path, aside) = (root.join(&name), root.set_aside(&name)?);
            preparation.warn(format!("{}: not prepared text of this program; it is now {}", path.display(), aside.display()));
        }
    }
    let _lock = lock(&root, key, preparation).ok();
    preparation.check_stop()?;
    make(&root, wanted, checked, preparation)
}

/// Makes the folder in `root`, unless another process has made it meanwhile. The caller holds the folder's lock.
fn make(root: &Dir, wanted: &WantedText<'_>, checked: &mut CheckedFiles, preparation: &mut Preparation<'_>) -> Result<Prepared> {
    let WantedText { origin, texts, tokenizer, vocab_size, is_small } = wanted;
    let folder = root.join(origin.key);
    match open(root, origin, false, checked, preparation) {
        Ok(Some(found)) => return Ok(found),
        Ok(None) => {}
        Err(damage @ Error::Format { .. }) => {
            remove_folder(root, origin.key)?;
            preparation.warn(format!("{damage}; the text is prepared again"));
        }
        Err(error) => return Err(error),
    }
    remove_leftovers(root, origin.key);
    check_free_bytes(root, texts, tokenizer, *is_small)?;
    let writer = FolderWriter::create(root, &tmp_name(origin.key))?;
    if !is_small {
        preparation.note(format!("preparing {} of text in {}", Bytes(usual_bytes_of(texts)), folder.display()));
    }
    let (totals, read) = tokenize(texts, tokenizer, *vocab_size, writer, preparation)?;
    FolderWriter::publish(totals, read, origin)?;
    let prepared = open(root, origin, true, checked, preparation)?;
    prepared.ok_or_else(|| Error::format(&folder, "removed while it was opened"))
}

fn tmp_name(key: &str) -> String {
    format!(".{key}.tmp")
}

/// Whether `name` has the form of a [`key`].
fn is_key(name: &str) -> bool {
    name.len() == 64 && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn key(texts: &[&Path], tokenizer: &Tokenizer, rules: u32) -> Result<String> {
    let source = |path: &&Path| {
        let absolute = path.canonicalize().map_err(|e| Error::io("read", path, e))?;
        Ok((kind(path), absolute, InFile::open(path)?.stamp()?))
    };
    let sources = texts.iter().map(source).collect::<Result<Vec<_>>>()?;
    let of = (FORMAT_VERSION, rules, env!("CARGO_PKG_VERSION"), tokenizer.identity(), tokenizer.end_of_text(), sources);
    let json = serde_json::to_vec(&of).map_err(|e| Error::format(texts[0], e))?;
    Ok(hex(Sha256::digest(json)))
}

/// Waits until nobody else prepares the folder `key`.
fn lock(root: &Dir, key: &str, preparation: &mut Preparation<'_>) -> Result<File> {
    let path = root.join(lock_name(key));
    let file = root.open_at(lock_name(key), OFlag::O_RDWR | OFlag::O_CREAT).map_err(|e| Error::io("write", &path, e))?;
    let mut waits = false;
    loop {
        match try_lock(&file).map_err(|e| Error::io("lock", &path, e))? {
            Lock::Held => return Ok(file),
            Lock::Unsupported => return Err(Error::format(&path, "this file system has no locks")),
            Lock::Taken if !waits => preparation.note("another run prepares this text: waiting for it"),
            Lock::Taken => std::thread::sleep(Duration::from_millis(100)),
        }
        waits = true;
        preparation.check_stop()?;
    }
}

fn lock_name(key: &str) -> String {
    format!("{key}.lock")
}

/// Removes the folder `name`, if the program made it.
fn remove_folder(root: &Dir, name: &str) -> Result<()> {
    let not_ours = || Error::format(root.join(name), "not prepared text of this program, and not removed; move it away");
    if !FOLDER.is_own(root, name)? || !root.remove_listed(name, &files_in(&root.open_dir(name)?)?)? {
        return Err(not_ours());
    }
    Ok(())
}

/// Removes the temporary folders of killed runs: those whose lock is free, and the one of `key`, whose lock the caller holds. Errors are
/// ignored.
fn remove_leftovers(root: &Dir, key: &str) {
    for name in root.names().unwrap_or_default() {
        let name = name.to_string_lossy();
        let Some(other) = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp")).filter(|key| is_key(key)) else { continue };
        let is_free = |lock: File| try_lock(&lock).is_ok_and(|lock| lock == Lock::Held);
        if other == key || root.open_at(lock_name(other), OFlag::O_RDWR).is_ok_and(is_free) {
            let _ = remove_folder(root, &name);
        }
    }
}

/// The operation that a refusal for want of room names.
fn preparing_in(root: &Path) -> String {
    format!("prepare text in {}", root.display())
}

/// Bytes become ids of four bytes; other tokenizers make about one id of four bytes.
fn check_free_bytes(root: &Dir, texts: &[&Path], tokenizer: &Tokenizer, is_small: bool) -> Result<()> {
    let needed = usual_bytes_of(texts) * if tokenizer.is_bytes() { 4 } else { 1 };
    let free = root.free_bytes()?.unwrap_or(u64::MAX);
    if free >= needed {
        return Ok(());
    }
    let remedy = if is_small { "another --output-dir" } else { "another directory with SUPEROFFLOAD_CACHE" };
    let cause = format!("{} free, about {} needed ({needed} bytes): make room, or name {remedy}", Bytes(free), Bytes(needed));
    Err(Error::resource(preparing_in(root.path()), cause))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk;
    use crate::progress_event::ProgressEvent;
    use crate::signals::StopFlag;
    use std::cell::RefCell;
    use std::path::PathBuf;

    struct Case {
        dir: tempfile::TempDir,
        text: RefCell<String>,
    }

    impl Case {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join("a.txt"), "abc".repeat(1000)).unwrap();
            fs::create_dir(dir.path().join("run")).unwrap();
            Self { dir, text: RefCell::default() }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        /// Opens `a.txt` with a cache at `cache`, as a run of its own: nothing is known to be checked.
        fn open(&self, cache: &str, stop: &StopFlag) -> Result<Prepared> {
            self.text.take();
            let emit = |event: ProgressEvent<'_>| match event {
                ProgressEvent::Note(line) | ProgressEvent::Detail(line) | ProgressEvent::Warn(line) => {
                    *self.text.borrow_mut() += &format!("{line}\n")
                }
                ProgressEvent::Progress { .. } => {}
            };
            let mut preparation = Preparation::new(stop, Some(self.path(cache)), Some(self.path("run")), emit);
            preparation.in_memory_bytes_max = 0;
            find_or_prepare(&[&self.path("a.txt")], &Tokenizer::bytes(), 256, &mut CheckedFiles::default(), &mut preparation)
        }

        fn good(&self, cache: &str) -> String {
            assert_eq!(self.open(cache, &StopFlag::default()).unwrap().source_ends, [3000]);
            self.text.take()
        }

        fn names(&self, dir: &str) -> Vec<String> {
            let mut names: Vec<_> = fs::read_dir(self.path(dir)).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
            names.sort();
            names
        }
    }

    #[test]
    fn text_is_prepared_once_and_again_when_it_changes() {
        let case = Case::new();
        assert!(case.good("cache").starts_with("preparing 2.9 KiB of text in "));
        assert_eq!((case.good("cache"), case.names("cache").len()), (String::new(), 2));
        // Other text of the same size, time and inode: a run that finds the folder has not read the text.
        let modified = fs::metadata(case.path("a.txt")).unwrap().modified().unwrap();
        fs::write(case.path("a.txt"), "xyz".repeat(1000)).unwrap();
        File::options().write(true).open(case.path("a.txt")).unwrap().set_modified(modified).unwrap();
        assert_eq!(case.good("cache"), "");
        fs::write(case.path("a.txt"), "abd".repeat(1000)).unwrap();
        assert!(case.good("cache").starts_with("preparing "));
        assert_eq!(case.names("cache").len(), 4);
    }

    #[test]
    fn tokens_that_other_rules_made_are_not_read() {
        let case = Case::new();
        case.good("cache");
        let key = |rules: u32| key(&[&case.path("a.txt")], &Tokenizer::bytes(), rules).unwrap();
        let folder = |rules: u32| case.path("cache").join(key(rules));
        fs::rename(folder(RULES_VERSION), folder(RULES_VERSION - 1)).unwrap();
        assert!(case.good("cache").starts_with("preparing "));
        assert!(folder(RULES_VERSION).is_dir() && folder(RULES_VERSION - 1).is_dir(), "{:?}", case.names("cache"));
    }

    #[test]
    fn a_damaged_folder_is_prepared_again_with_a_warning() {
        let case = Case::new();
        case.good("cache");
        let folder = case.path("cache").join(&case.names("cache")[0]);
        fs::write(folder.join("tokens.u32"), "0".repeat(12_000)).unwrap();
        let text = case.good("cache");
        assert!(text.contains("tokens.u32: damaged: the checksum of block 0 differs; the text is prepared again"), "{text}");
        assert_eq!(case.good("cache"), "");
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_replaced_by_the_runs_directory() {
        let case = Case::new();
        fs::write(case.path("cache"), "a file").unwrap();
        let text = case.good("cache");
        assert!(
            text.contains("cache") && text.contains("kept in the output directory") && text.contains("/run/.superoffload/prepared/"),
            "{text}"
        );
        assert_eq!(case.good("cache"), "", "found again");
    }

    #[test]
    fn own_leftovers_go_and_foreign_or_active_files_stay() {
        let case = Case::new();
        case.good("cache");
        let (key, cache) = (case.names("cache").remove(0), Dir::open(&case.path("cache")).unwrap());
        fs::remove_dir_all(case.path("cache").join(&key)).unwrap();
        let [dead, live, foreign] = ["d", "a", "f"].map(|digit| digit.repeat(64));
        for left in [&key, &dead, &live, &foreign, &"thesis".to_string()] {
            fs::create_dir(case.path("cache").join(tmp_name(left))).unwrap();
            fs::write(case.path("cache").join(tmp_name(left)).join("tokens.u32"), "x").unwrap();
            fs::write(case.path("cache").join(lock_name(left)), "").unwrap();
        }
        fs::write(case.path("cache").join(tmp_name(&foreign)).join("notes"), "mine").unwrap();
        let lock = cache.open_at(lock_name(&live), OFlag::O_RDWR).unwrap();
        lock.lock().unwrap();
        case.good("cache");
        let exists = [&dead, &live, &foreign, &"thesis".to_string()].map(|left| case.names("cache").contains(&tmp_name(left)));
        assert_eq!(exists, [false, true, true, true]);
        assert!(case.names("cache").contains(&key));
    }

    /// In a cache that several users share, files of another user cannot be removed; the disk's quota may be used up.
    #[test]
    fn data_is_prepared_beside_the_run_where_the_cache_is_not_writable() {
        let case = Case::new();
        case.good("cache");
        let folder = case.path("cache").join(&case.names("cache")[0]);
        let leave = |action: &dyn Fn()| {
            fs::remove_dir_all(&folder).unwrap();
            let _ = fs::remove_dir_all(case.path("run/.superoffload"));
            action();
            case.good("cache")
        };
        let tmp = folder.with_file_name(format!(".{}.tmp", folder.file_name().unwrap().to_str().unwrap()));
        let foreign = |path: &Path| {
            fs::create_dir(path).unwrap();
            fs::write(path.join("thesis.tex"), "mine").unwrap();
        };
        for place in [&folder, &tmp] {
            let text = leave(&|| foreign(place));
            assert!(text.contains("kept in the output directory") && text.contains("/run/.superoffload/prepared/"), "{text}");
            assert_eq!(fs::read_to_string(place.join("thesis.tex")).unwrap(), "mine");
            fs::remove_dir_all(place).unwrap();
            fs::create_dir_all(&folder).unwrap();
        }
        fs::remove_dir_all(case.path("run/.superoffload")).unwrap();
        fs::remove_dir_all(&folder).unwrap();
        std::os::unix::fs::symlink(case.path("run"), &folder).unwrap();
        let text = case.good("cache");
        assert!(text.contains("kept in the output directory") && folder.is_symlink(), "a link is not followed: {text}");
        fs::remove_file(&folder).unwrap();
        for at in 0..3 {
            let _ = fs::remove_dir_all(case.path("run/.superoffload"));
            // The folder, its files, the writing: the disk is full for each.
            disk::faults::arm(Some((at, disk::faults::Mode::Error)));
            let opened = case.open("cache", &StopFlag::default());
            disk::faults::disarm();
            assert!(opened.is_ok() && case.text.take().contains("No space left on device (os error 28): prepared text is kept in"));
            assert!(!folder.exists());
        }
    }

    #[test]
    fn the_loser_waits_and_takes_the_winners_and_a_stop_ends_the_wait() {
        let case = Case::new();
        case.good("cache");
        let (key, cache) = (case.names("cache").remove(0), case.path("cache"));
        let hold = || {
            let lock = Dir::open(&cache).unwrap().open_at(lock_name(&key), OFlag::O_RDWR).unwrap();
            lock.lock().unwrap();
            fs::rename(cache.join(&key), cache.join("aside")).unwrap();
            lock
        };
        let lock = hold();
        let stop = StopFlag::default();
        stop.request();
        assert_eq!(case.open("cache", &stop).err().unwrap().exit_code(), 75);
        let winner = std::thread::spawn({
            let (cache, key) = (cache.clone(), key.clone());
            move || {
                std::thread::sleep(Duration::from_millis(300));
                fs::rename(cache.join("aside"), cache.join(key)).unwrap();
                drop(lock);
            }
        });
        assert_eq!(case.good("cache"), "another run prepares this text: waiting for it\n");
        winner.join().unwrap();
    }

    #[test]
    fn a_stop_removes_partial_output() {
        let case = Case::new();
        let stop = StopFlag::default();
        let mut preparation = Preparation::new(&stop, Some(case.path("cache")), Some(case.path("run")), |event| {
            if let ProgressEvent::Progress { .. } = event {
                stop.request();
            }
        });
        preparation.in_memory_bytes_max = 0;
        let stopped = find_or_prepare(&[&case.path("a.txt")], &Tokenizer::bytes(), 256, &mut CheckedFiles::default(), &mut preparation);
        assert_eq!(stopped.err().unwrap().exit_code(), 75);
        assert!(case.names("cache").iter().all(|name| name.ends_with(".lock")), "{:?}", case.names("cache"));
    }
}
