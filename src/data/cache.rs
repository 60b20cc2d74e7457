//! Where prepared text is kept, and who prepares it: one run, while others that want the same wait.
//!
//! A folder is named by a SHA-256 over the format, the program's version, the tokenizer, the separator, and for each text file its path,
//! size, time and inode: so a resumed run finds its folder without reading the text. Beside the folder `KEY` there may be `KEY.lock`,
//! held by the run that prepares it (the lock ends with the process, however it ends), and `.KEY.tmp`, which is being written, or was left
//! by a killed run if nobody holds the lock.

use super::checked::CheckedFiles;
use super::checksum::hex;
use super::files::kind;
use super::known_sources::{KnownSources, StandIn};
use super::preparation::Preparation;
use super::prepared::{FORMAT_VERSION, FolderWriter, Prepared, PreparedFrom, open};
use super::source::{bytes_of, tokenize, usual_bytes_of};
use super::tokenizer::Tokenizer;
use crate::disk::{self, Dir, InFile};
use crate::error::{Error, Result};
use crate::units::Bytes;
use sha2::{Digest, Sha256};
use std::fs::{self, File, TryLockError};
use std::iter;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// In the output directory: where text goes when the user's cache cannot be written.
const BESIDE_THE_RUN: &str = ".data";
/// In the output directory: where small text goes.
const SMALL: &str = "data-tokens";

/// The prepared tokens of `texts`: found, or made now.
///
/// # Errors
/// Those of [`tokenize`]; `Io` and `Resource` when there is no place or no room to keep them.
pub(super) fn find_or_prepare(
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

/// Removes what the run in `output_dir` keeps of data that it had before, and not any more: of small text that changes from start to start.
/// What cannot be removed is in nobody's way.
pub(crate) fn remove_others(output_dir: &Path, known: &KnownSources) {
    let Ok(dir) = Dir::open(&output_dir.join(SMALL)) else { return };
    for name in dir.names().unwrap_or_default() {
        let name = name.to_string_lossy();
        if !known.keeps(name.strip_suffix(".lock").unwrap_or(&name)) {
            let _ = dir.remove(&*name);
        }
    }
}

/// The prepared tokens of `texts` of which a file is missing, if they are known; `None` where none is missing.
///
/// # Errors
/// That names the file and the folder where there is neither; `Interrupted`.
fn stand_in(
    texts: &[&Path],
    tokenizer: &Tokenizer,
    checked: &mut CheckedFiles,
    preparation: &mut Preparation<'_>,
) -> Result<Option<Prepared>> {
    let Some(StandIn { folder, dir, why }) = preparation.known.stand_in(texts) else { return Ok(None) };
    let name = folder.file_name().unwrap_or_default().to_owned();
    let (key, mut cause) = (name.to_string_lossy(), None);
    let origin = PreparedFrom::new(&key, tokenizer, texts);
    // A run that was moved took its folders along, and so may a cache have been.
    let roots = [Some(dir.join(SMALL)), Some(dir.join(BESIDE_THE_RUN)), preparation.cache.clone()];
    let moved = roots.into_iter().flatten().map(|root| root.join(&name));
    for place in iter::once(folder.clone()).chain(moved) {
        match open(&place, &origin, false, checked, preparation) {
            Ok(Some(found)) => {
                preparation.note(format!("{why}: training goes on with the tokens that were made of it, in {}", place.display()));
                return Ok(Some(found));
            }
            Err(error @ Error::Interrupted(_)) => return Err(error),
            Ok(None) => {}
            Err(error) => drop(cause.get_or_insert(error.to_string())),
        }
    }
    let cause = cause.unwrap_or_else(|| format!("{} is not there", folder.display()));
    let remedy = "put the file back as it was, or name by --data where it is now";
    Err(Error::resource(why, format_args!("the tokens that were made of it cannot be had either: {cause}; {remedy}")))
}

fn find_or_make(
    texts: &[&Path],
    tokenizer: &Tokenizer,
    vocab_size: usize,
    checked: &mut CheckedFiles,
    preparation: &mut Preparation<'_>,
) -> Result<Prepared> {
    let key = key(texts, tokenizer)?;
    let origin = PreparedFrom::new(&key, tokenizer, texts);
    let is_small = bytes_of(texts, &preparation.known) <= preparation.in_memory_bytes_max;
    let beside = preparation.output_dir.as_ref().map(|dir| dir.join(if is_small { SMALL } else { BESIDE_THE_RUN }));
    let cache = preparation.cache.clone().filter(|_| !is_small);
    for root in cache.iter().chain(&beside).cloned().collect::<Vec<_>>() {
        match open(&root.join(&key), &origin, false, checked, preparation) {
            Ok(Some(found)) => return Ok(found),
            Err(error @ Error::Interrupted(_)) => return Err(error),
            // What is wrong with it says the one who holds the lock.
            Ok(None) | Err(_) => {}
        }
    }
    let (root, _lock) = place(&key, cache, beside, preparation)?;
    let folder = root.join(&key);
    match open(&folder, &origin, false, checked, preparation) {
        Ok(Some(found)) => return Ok(found),
        Ok(None) => {}
        Err(damage @ Error::Format { .. }) => {
            preparation.warn(format!("{damage}; the text is prepared again"));
            disk::remove_dir(&folder)?;
        }
        Err(error) => return Err(error),
    }
    remove_leftovers(&root, &key);
    check_room(&root, texts, tokenizer)?;
    let writer = FolderWriter::create(&root, &tmp_name(&key))?;
    if !is_small {
        preparation.note(format!("preparing {} of text in {}", Bytes(usual_bytes_of(texts)), folder.display()));
    }
    let (totals, read) = tokenize(texts, tokenizer, vocab_size, writer, preparation)?;
    FolderWriter::publish(totals, read, &origin)?;
    let prepared = open(&folder, &origin, true, checked, preparation)?;
    prepared.ok_or_else(|| Error::format(&folder, "removed while it was opened"))
}

fn tmp_name(key: &str) -> String {
    format!(".{key}.tmp")
}

fn key(texts: &[&Path], tokenizer: &Tokenizer) -> Result<String> {
    let source = |path: &&Path| {
        let absolute = path.canonicalize().map_err(|e| Error::io("read", path, e))?;
        Ok((kind(path), absolute, InFile::open(path)?.stamp()?))
    };
    let sources = texts.iter().map(source).collect::<Result<Vec<_>>>()?;
    let of = (FORMAT_VERSION, env!("CARGO_PKG_VERSION"), tokenizer.identity(), tokenizer.end_of_text(), sources);
    let json = serde_json::to_vec(&of).map_err(|e| Error::format(texts[0], e))?;
    Ok(hex(Sha256::digest(json)))
}

/// Where the folder is made, and the lock on its name: in the cache if it can be, else beside the run, which has its directory
/// for itself, so that it can do without locks there.
fn place(key: &str, cache: Option<PathBuf>, beside: Option<PathBuf>, preparation: &mut Preparation<'_>) -> Result<(PathBuf, Option<File>)> {
    if let Some(root) = cache {
        match lock(&root, key, preparation) {
            Ok(lock) => return Ok((root, Some(lock))),
            Err(error @ Error::Interrupted(_)) => return Err(error),
            Err(error) if beside.is_none() => return Err(error),
            Err(error) => preparation.warn(format!("{error}: prepared text is kept beside the run")),
        }
    }
    let no_place = || Error::resource("keep prepared text", "neither HOME nor SUPEROFFLOAD_CACHE names a directory");
    let root = beside.ok_or_else(no_place)?;
    fs::create_dir_all(&root).map_err(|e| Error::io("create", &root, e))?;
    let lock = lock(&root, key, preparation).ok();
    preparation.go_on().map(|()| (root, lock))
}

/// Waits until nobody else prepares the folder `key`.
fn lock(root: &Path, key: &str, preparation: &mut Preparation<'_>) -> Result<File> {
    fs::create_dir_all(root).map_err(|e| Error::io("create", root, e))?;
    let path = lock_path(root, key);
    let file = open_lock(&path, true).map_err(|e| Error::io("write", &path, e))?;
    let mut waits = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::Error(e)) => return Err(Error::io("lock", &path, e)),
            Err(TryLockError::WouldBlock) if !waits => preparation.note("another run prepares this text: waiting for it"),
            Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(100)),
        }
        waits = true;
        preparation.go_on()?;
    }
}

fn lock_path(root: &Path, key: &str) -> PathBuf {
    root.join(format!("{key}.lock"))
}

fn open_lock(path: &Path, create: bool) -> std::io::Result<File> {
    File::options().read(true).write(true).create(create).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)
}

/// Removes what killed runs left: what nobody holds the lock of. The caller holds that of `key`. What cannot be removed is in nobody's way.
fn remove_leftovers(root: &Path, key: &str) {
    for name in fs::read_dir(root).into_iter().flatten().flatten().map(|entry| entry.file_name()) {
        let name = name.to_string_lossy();
        let Some(other) = name.strip_prefix('.').and_then(|name| name.strip_suffix(".tmp")) else { continue };
        let lock = open_lock(&lock_path(root, other), false);
        if other == key || lock.is_ok_and(|lock| lock.try_lock().is_ok()) {
            let _ = disk::remove_dir(&root.join(&*name));
        }
    }
}

/// Bytes become ids of four bytes; other tokenizers make about one id of four bytes.
fn check_room(root: &Path, texts: &[&Path], tokenizer: &Tokenizer) -> Result<()> {
    let needed = usual_bytes_of(texts) * if tokenizer.is_bytes() { 4 } else { 1 };
    let stat = nix::sys::statvfs::statvfs(root).map_err(|e| Error::io("read the free space of", root, e.into()))?;
    let free = stat.blocks_available() as u64 * stat.fragment_size() as u64;
    if free >= needed {
        return Ok(());
    }
    let elsewhere = if root.ends_with(SMALL) { "another --output-dir" } else { "another place by SUPEROFFLOAD_CACHE" };
    let cause = format!("{} free, about {} needed ({needed} bytes): make room, or name {elsewhere}", Bytes(free), Bytes(needed));
    Err(Error::resource(format_args!("prepare text in {}", root.display()), cause))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::news::News;
    use crate::signals::StopFlag;
    use std::cell::RefCell;

    struct Case {
        dir: tempfile::TempDir,
        said: RefCell<String>,
    }

    impl Case {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join("a.txt"), "abc".repeat(1000)).unwrap();
            fs::create_dir(dir.path().join("run")).unwrap();
            Self { dir, said: RefCell::default() }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.dir.path().join(name)
        }

        /// Opens `a.txt` with a cache at `cache`, as a run of its own: nothing is known to be checked.
        fn open(&self, cache: &str, stop: &StopFlag) -> Result<Prepared> {
            self.said.take();
            let emit = |news: News<'_>| match news {
                News::Note(line) | News::Warn(line) => *self.said.borrow_mut() += &format!("{line}\n"),
                News::Progress { .. } => {}
            };
            let mut preparation = Preparation::new(stop, Some(self.path(cache)), Some(self.path("run")), emit);
            preparation.in_memory_bytes_max = 0;
            find_or_prepare(&[&self.path("a.txt")], &Tokenizer::bytes(), 256, &mut CheckedFiles::default(), &mut preparation)
        }

        fn good(&self, cache: &str) -> String {
            assert_eq!(self.open(cache, &StopFlag::default()).unwrap().source_ends, [3000]);
            self.said.take()
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
        // Other text of the same size, time and inode: whoever finds the folder has not read it.
        let modified = fs::metadata(case.path("a.txt")).unwrap().modified().unwrap();
        fs::write(case.path("a.txt"), "xyz".repeat(1000)).unwrap();
        File::options().write(true).open(case.path("a.txt")).unwrap().set_modified(modified).unwrap();
        assert_eq!(case.good("cache"), "");
        fs::write(case.path("a.txt"), "abd".repeat(1000)).unwrap();
        assert!(case.good("cache").starts_with("preparing "));
        assert_eq!(case.names("cache").len(), 4);
    }

    #[test]
    fn a_damaged_folder_is_prepared_again_with_a_warning() {
        let case = Case::new();
        case.good("cache");
        let folder = case.path("cache").join(&case.names("cache")[0]);
        fs::write(folder.join("tokens.u32"), "0".repeat(12_000)).unwrap();
        let said = case.good("cache");
        assert!(said.contains("tokens.u32: damaged: the checksum of block 0 differs; the text is prepared again"), "{said}");
        assert_eq!(case.good("cache"), "");
    }

    #[test]
    fn a_cache_that_cannot_be_written_is_replaced_by_the_runs_directory() {
        let case = Case::new();
        fs::write(case.path("cache"), "a file").unwrap();
        let said = case.good("cache");
        assert!(said.contains("cache") && said.contains("kept beside the run") && said.contains("/run/.data/"), "{said}");
        assert_eq!(case.good("cache"), "", "found again");
    }

    #[test]
    fn leftovers_go_and_what_others_write_stays() {
        let case = Case::new();
        case.good("cache");
        let key = case.names("cache").remove(0);
        fs::remove_dir_all(case.path("cache").join(&key)).unwrap();
        for left in [&key, "dead", "live"] {
            fs::create_dir(case.path("cache").join(tmp_name(left))).unwrap();
            fs::write(case.path("cache").join(tmp_name(left)).join("tokens.u32"), "x").unwrap();
            fs::write(lock_path(&case.path("cache"), left), "").unwrap();
        }
        let live = open_lock(&lock_path(&case.path("cache"), "live"), false).unwrap();
        live.lock().unwrap();
        case.good("cache");
        let names = case.names("cache");
        assert!(names.contains(&".live.tmp".into()) && !names.contains(&".dead.tmp".into()) && names.contains(&key), "{names:?}");
    }

    #[test]
    fn the_loser_waits_and_takes_the_winners_and_a_stop_ends_the_wait() {
        let case = Case::new();
        case.good("cache");
        let (key, cache) = (case.names("cache").remove(0), case.path("cache"));
        let hold = || {
            let lock = open_lock(&lock_path(&cache, &key), false).unwrap();
            lock.lock().unwrap();
            fs::rename(cache.join(&key), cache.join("aside")).unwrap();
            lock
        };
        let lock = hold();
        let stop = StopFlag::default();
        stop.ask();
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
    fn a_stop_removes_what_was_begun() {
        let case = Case::new();
        let stop = StopFlag::default();
        let mut preparation = Preparation::new(&stop, Some(case.path("cache")), Some(case.path("run")), |news| {
            if let News::Progress { .. } = news {
                stop.ask();
            }
        });
        preparation.in_memory_bytes_max = 0;
        let stopped = find_or_prepare(&[&case.path("a.txt")], &Tokenizer::bytes(), 256, &mut CheckedFiles::default(), &mut preparation);
        assert_eq!(stopped.err().unwrap().exit_code(), 75);
        assert!(case.names("cache").iter().all(|name| name.ends_with(".lock")), "{:?}", case.names("cache"));
    }
}
