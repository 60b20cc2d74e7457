//! Downloads a repository's files into the cache: fetches the file list, checks the free disk space, fetches several files in parallel, and
//! creates the snapshot's links last.

use super::cache::{HubCache, SNAPSHOTS, folder, is_commit};
use super::client::{ATTEMPTS, HttpFailure, HubClient, file_path, listing_path};
use super::fetch::{Fetcher, NAP, check_stop, interrupted, sleep};
use super::listing::{HubListing, RemoteFile};
use super::name::{HubName, RepoKind};
use super::parts::FileInParts;
use crate::disk::{self, Dir, FileKind, TmpDir};
use crate::error::{Error, Result};
use crate::model_dir::CONFIG;
use crate::progress_event::ProgressEvent;
use crate::signals::StopFlag;
use crate::units::{Bytes, counted};
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// Number of download threads. Each thread fetches one file or one part of a file.
const THREADS: usize = 4;
/// Pause before the second attempt to fetch a file.
pub(super) const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LISTING_BYTES_MAX: u64 = 64 << 20;
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

/// A download and the receiver of its progress events.
pub(super) struct Download<'a> {
    pub(super) cache: &'a HubCache,
    pub(super) name: &'a HubName,
    pub(super) with_weights: bool,
    pub(super) stop: &'a StopFlag,
    pub(super) emit: &'a mut dyn FnMut(ProgressEvent<'_>),
    /// Pause before a second attempt. Pauses before later attempts are longer.
    pub(super) pause: Duration,
    /// Files of at least this size are downloaded in parts.
    pub(super) large_bytes: u64,
}

/// The files, their parts, and the index of the next part to download.
struct DownloadQueue {
    files: Vec<FileInParts>,
    /// Pairs of a file's index and a part's index within that file.
    parts: Vec<(usize, usize)>,
    next: AtomicUsize,
}

impl Download<'_> {
    /// Downloads all files that are missing in the cache and returns the directory with the files.
    ///
    /// # Errors
    /// `Resource` for an error of the hub or a full disk; `Io`; `Interrupted`.
    pub(super) fn run(self, client: HubClient) -> Result<PathBuf> {
        let Self { cache, name, .. } = &self;
        let (repo, endpoint, client) = (cache.repo(name), client.endpoint().to_string(), Arc::new(client));
        let refused = |cause| Error::resource(format_args!("download {name}, which is not available locally, from {endpoint}"), cause);
        let listing = self.listing(&client, &refused)?;
        expect_commit(name, &listing.commit).map_err(refused)?;
        let snapshot = repo.join(SNAPSHOTS).join(&listing.commit);
        let (files, dir) = match name.kind {
            RepoKind::Model => (listing.model(self.with_weights).map_err(refused)?, snapshot.clone()),
            RepoKind::Dataset => listing.data(&name.part).map(|(files, folder)| (files, snapshot.join(folder))).map_err(refused)?,
        };
        let locks = cache.root.join(".locks").join(folder(name));
        for dir in [&repo.join("blobs"), &snapshot, &locks] {
            fs::create_dir_all(dir).map_err(|e| Error::io("create", dir, e))?;
        }
        let (blobs, locks) = (Dir::open(&repo.join("blobs"))?, Dir::open(&locks)?);
        let fetcher = Fetcher { client, blobs, locks, stop: self.stop.clone(), pause: self.pause, messages: Mutex::default() };
        let (fetcher, name) = (Arc::new(fetcher), *name);
        self.fetch_all(&fetcher, &files, &listing.commit)?;
        let _lock = fetcher.lock(&format!("{}.lock", listing.commit))?;
        match name.kind {
            RepoKind::Model => publish(&snapshot, files)?,
            RepoKind::Dataset => publish_part(&dir, &files)?,
        }
        record_revision(&repo, &name.revision, &listing.commit)?;
        Ok(dir)
    }

    fn listing(&self, client: &Arc<HubClient>, refused: &impl Fn(String) -> Error) -> Result<HubListing> {
        let (path, mut attempt) = (listing_path(self.name), 1);
        loop {
            match self.get_bytes(client, &path)? {
                Ok(json) => return HubListing::parse(&json).map_err(refused),
                Err(HttpFailure::Passing(_)) if attempt < ATTEMPTS => sleep(self.stop, self.pause * attempt)?,
                Err(HttpFailure::Passing(cause)) => return Err(refused(format!("{cause}, {ATTEMPTS} times in a row"))),
                Err(HttpFailure::Lasting(cause)) => return Err(refused(cause)),
            }
            attempt += 1;
        }
    }

    /// Reads the bytes at `path` on a separate thread, because a blocking request cannot check the stop flag. The outer error is local, the
    /// inner one is from the hub.
    fn get_bytes(&self, client: &Arc<HubClient>, path: &str) -> Result<std::result::Result<Vec<u8>, HttpFailure>> {
        let (client, path, (answer, come)) = (client.clone(), path.to_owned(), mpsc::channel());
        let failed = |cause: &dyn fmt::Display| Error::resource("start a thread for the list of files", cause);
        // The receiver is gone after an interruption.
        let get_listing = move || drop(answer.send(client.get_bytes(&path, LISTING_BYTES_MAX)));
        thread::Builder::new().spawn(get_listing).map_err(|e| failed(&e))?;
        loop {
            match come.recv_timeout(NAP) {
                Ok(answer) => return Ok(answer),
                Err(RecvTimeoutError::Timeout) => check_stop(self.stop)?,
                Err(e) => return Err(failed(&e)),
            }
        }
    }

    fn fetch_all(self, fetcher: &Arc<Fetcher>, files: &[RemoteFile], commit: &str) -> Result<()> {
        let Self { name, stop, emit, large_bytes, .. } = self;
        let (all, into) = (files.iter().map(|file| file.bytes).sum(), &fetcher.blobs);
        let in_parts = |file: &RemoteFile| FileInParts::new(file.clone(), file_path(name, commit, &file.name), large_bytes);
        let queue = Arc::new(DownloadQueue::new(files.iter().map(in_parts).collect()));
        expect_free_bytes(into, &queue.files)?;
        let activity = format!("{} of {} into {}", counted(files.len(), "file"), Bytes(all), into.path().display());
        emit(ProgressEvent::Note(&format!("downloading {name} at commit {commit}: {activity}")));
        let spawn = |_| {
            let (queue, fetcher) = (queue.clone(), fetcher.clone());
            thread::Builder::new().spawn(move || queue.work(&fetcher)).map_err(|e| Error::resource("start a thread that downloads", e))
        };
        let threads: Vec<JoinHandle<Result<()>>> = (0..THREADS.min(queue.parts.len())).map(spawn).collect::<Result<_>>()?;
        let mut is_done = false;
        while !is_done {
            // An interruption does not join the threads, whose servers may be silent. They end soon, and partial files are kept.
            if stop.is_set() {
                return Err(interrupted());
            }
            thread::sleep(PROGRESS_INTERVAL);
            is_done = threads.iter().all(JoinHandle::is_finished);
            let messages = std::mem::take(&mut *fetcher.messages.lock().unwrap_or_else(PoisonError::into_inner));
            for line in &messages {
                emit(ProgressEvent::Note(line));
            }
            emit(ProgressEvent::Progress { activity: "downloading", done: queue.received(), all });
        }
        threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    }
}

impl DownloadQueue {
    fn new(files: Vec<FileInParts>) -> Self {
        let parts = files.iter().enumerate().flat_map(|(file, of)| (0..of.parts().len()).map(move |part| (file, part))).collect();
        Self { files, parts, next: AtomicUsize::new(0) }
    }

    /// Number of bytes that are on disk.
    fn received(&self) -> u64 {
        self.files.iter().map(FileInParts::received).sum()
    }

    /// Downloads parts until none is left. A failure empties the queue for all threads.
    fn work(&self, fetcher: &Fetcher) -> Result<()> {
        while let Some(&(file, part)) = self.parts.get(self.next.fetch_add(1, Ordering::Relaxed)) {
            fetcher.fetch(&self.files[file], part).inspect_err(|_| self.next.store(self.parts.len(), Ordering::Relaxed))?;
        }
        Ok(())
    }
}

/// Checks that the disk has room for all missing bytes.
fn expect_free_bytes(blobs: &Dir, files: &[FileInParts]) -> Result<()> {
    let held = |name: &str| Ok::<_, Error>(blobs.kind(name)?.map_or(0, |kind| if let FileKind::File(bytes) = kind { bytes } else { 0 }));
    let missing = |whole: &FileInParts| {
        let parts = (0..whole.parts().len()).map(|part| held(&whole.name(part))).sum::<Result<u64>>()?;
        Ok(whole.file.bytes.saturating_sub(held(whole.file.checksum.hex())?.max(parts)))
    };
    // While the parts of a file are joined, one part exists twice on disk.
    let mut joined: Vec<u64> = files.iter().filter(|whole| whole.parts().len() > 1).map(|whole| whole.parts()[0].end).collect();
    joined.sort_unstable_by(|a, b| b.cmp(a));
    let missing = files.iter().map(missing).sum::<Result<u64>>()?;
    let needed = if missing == 0 { 0 } else { missing + joined.iter().take(THREADS).sum::<u64>() };
    match blobs.free_bytes()? {
        Some(free) if free < needed => {
            let cause = format!(
                "{} free, {} needed ({needed} bytes): make room, or set HF_HUB_CACHE to another directory",
                Bytes(free),
                Bytes(needed)
            );
            Err(Error::resource(format_args!("download into {}", blobs.path().display()), cause))
        }
        _ => Ok(()),
    }
}

/// Links the blobs under their names in the snapshot. `config.json` comes last, because a snapshot without it is not used.
fn publish(snapshot: &Path, mut files: Vec<RemoteFile>) -> Result<()> {
    let dir = Dir::open(snapshot)?;
    files.sort_by_key(|file| file.name == CONFIG);
    files.iter().try_for_each(|file| link_blob(&dir, file))?;
    dir.sync()
}

/// Links the blob of `file` under its name in a snapshot, or in a folder of the snapshot.
fn link_blob(snapshot: &Dir, file: &RemoteFile) -> Result<()> {
    let Some((folder, name)) = file.name.split_once('/') else {
        return snapshot.link(&file.name, &Path::new("../../blobs").join(file.checksum.hex()));
    };
    let path = snapshot.join(folder);
    fs::create_dir_all(&path).map_err(|e| Error::io("create", &path, e))?;
    let folder = snapshot.open_dir(folder)?;
    folder.link(name, &Path::new("../../../blobs").join(file.checksum.hex()))?;
    folder.sync()
}

/// Links the blobs of one split of a data set under their names, all at once: readers treat an existing folder as complete.
fn publish_part(dir: &Path, files: &[RemoteFile]) -> Result<()> {
    if dir.is_dir() {
        return Ok(());
    }
    let (parent, name) = (dir.parent().unwrap_or(dir), dir.file_name().unwrap_or_default());
    fs::create_dir_all(parent).map_err(|e| Error::io("create", parent, e))?;
    let parent = Dir::open(parent)?;
    let tmp_name = format!(".{}.tmp", name.to_string_lossy());
    if parent.kind(&tmp_name)?.is_some() {
        parent.remove(&tmp_name)?;
    }
    let mut tmp = TmpDir::create(&parent, &tmp_name)?;
    for RemoteFile { name, checksum, .. } in files {
        tmp.dir().link(name.rsplit('/').next().unwrap_or(name), &Path::new("../../../../blobs").join(checksum.hex()))?;
    }
    tmp.dir().sync()?;
    tmp.publish(name)
}

/// Checks that the hub lists the requested commit, if the revision is a commit. Any commit is valid for a branch or tag.
fn expect_commit(name: &HubName, commit: &str) -> std::result::Result<(), String> {
    match name.revision.as_str() {
        received if is_commit(received) && received != commit => {
            Err(format!("its list of files is of commit {commit} where commit {received} was asked for"))
        }
        _ => Ok(()),
    }
}

/// Records in `refs` the commit of a branch or tag.
fn record_revision(repo: &Path, revision: &str, commit: &str) -> Result<()> {
    if is_commit(revision) {
        return Ok(());
    }
    let path = repo.join("refs").join(revision);
    let parent = path.parent().unwrap_or(repo);
    fs::create_dir_all(parent).map_err(|e| Error::io("create", parent, e))?;
    disk::replace_file(&path, commit.as_bytes())
}
