//! Writing a checkpoint beside, then publishing it.

use super::format::{FileEntry, MANIFEST, MODEL, Manifest, STATE, TensorEntry, TrainerState};
use super::placed_state::WrittenState;
use super::save_rate::SaveRate;
use super::state_parts::{StateParts, file_name};
use super::state_writer::StateWriter;
use super::store::{self, HiddenRole, RetainedCheckpoints};
use super::writers::Writers;
use super::written::Written;
use crate::disk::{Dir, FileId, TmpDir};
use crate::error::Result;
use crate::optim::state_array::{StateArrays, StatePart};
use serde_json::{Map, Value};
use std::num::NonZeroUsize;
use std::path::PathBuf;

// `state.bin` is the memory of the slices.
const _: () = assert!(cfg!(target_endian = "little"));

/// A checkpoint that is safely on disk.
#[derive(Debug)]
pub(crate) struct Saved {
    pub path: PathBuf,
    /// Failed cleanups around the checkpoint (old checkpoints, remains of dead runs); the save itself is good.
    pub warnings: Vec<String>,
}

/// A checkpoint being written. Dropping it before [`Writer::finish`] removes its files.
///
/// Tensors are streamed through a few pieces of 2 MiB, so that memory stays flat.
pub(crate) struct Writer {
    tmp: TmpDir,
    manifest: Manifest,
    /// Unless each of several processes writes its own.
    state: Option<StateWriter>,
    written: Written,
    warnings: Vec<String>,
}

/// Bytes that a checkpoint of so many parameters takes on disk, but for its manifest, which is small.
pub(crate) fn checkpoint_bytes(params: usize, arrays: StateArrays, model_files: &[(String, Vec<u8>)]) -> u64 {
    arrays.bytes(params) as u64 + model_files.iter().map(|(_, bytes)| bytes.len() as u64).sum::<u64>()
}

impl Writer {
    /// Starts `output_dir/checkpoint-<trainer.step>` of a run that learns with and from `run`. `rate` limits the writes of its state, and
    /// `output_dir` is the caller's. Remains of dead runs are removed first.
    ///
    /// # Errors
    /// The directory cannot be listed or written.
    pub(crate) fn create(output_dir: &Dir, trainer: TrainerState, run: Map<String, Value>, rate: SaveRate) -> Result<Self> {
        let writer = Self::create_shared(output_dir, trainer, run)?;
        let state = StateWriter::create(writer.dir(), STATE, rate)?;
        Ok(Self { state: Some(state), ..writer })
    }

    /// Creates a checkpoint with state written by several processes: tensors are begun, and [`Writer::set_parts`] sets their places.
    ///
    /// # Errors
    /// Errors of [`Writer::create`].
    pub(super) fn create_shared(output_dir: &Dir, trainer: TrainerState, run: Map<String, Value>) -> Result<Self> {
        let (mut warnings, name) = (store::clean(output_dir)?, store::hidden(trainer.step, HiddenRole::Tmp));
        if output_dir.kind(&name)?.is_some() {
            let (path, aside) = (output_dir.join(&name), output_dir.set_aside(&name)?);
            warnings.push(format!("{}: not a checkpoint of this program; it is now {}", path.display(), aside.display()));
        }
        let tmp = TmpDir::create(output_dir, name)?;
        Ok(Self { tmp, manifest: Manifest::new(trainer, run), state: None, written: Written::default(), warnings })
    }

    /// The directory that is written.
    pub(super) fn dir(&self) -> &Dir {
        self.tmp.dir()
    }

    /// The state lies in files of several processes.
    pub(super) fn set_parts(&mut self, parts: StateParts) {
        for rank in 0..parts.state_crc32c.len() {
            self.written.add_of_another(file_name(rank), parts.file_bytes(rank, self.manifest.arrays()));
        }
        self.manifest.state_bytes = self.state_bytes();
        self.manifest.set_parts(parts);
    }

    /// Begins a tensor, whose elements follow in calls of [`Writer::elems`].
    /// The order of the tensors is the order in the file and in the state's digest.
    pub(crate) fn begin(&mut self, name: &str, shape: &[usize]) {
        let (offset, elems) = (self.state_bytes(), shape.iter().product::<usize>() as u64);
        self.manifest.tensors.push(TensorEntry { name: name.into(), shape: shape.into(), offset, elems });
    }

    /// Reserves disk space for the state of all tensors, which were begun.
    ///
    /// # Errors
    /// `Io` when the disk is full.
    pub(crate) fn reserve(&self) -> Result<()> {
        self.state.as_ref().map_or(Ok(()), |state| state.reserve(self.state_bytes()))
    }

    /// Bytes of the state of the tensors that were begun.
    fn state_bytes(&self) -> u64 {
        self.manifest.tensors.last().map_or(0, |last| last.offset + self.manifest.arrays().bytes(last.elems as usize) as u64)
    }

    /// Appends the next elements of `part`: of the first tensor all parameters, then all of each further array, then those of the next
    /// tensor. More or fewer elements than those of all tensors are an error when the checkpoint is finished.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(crate) fn elems(&mut self, part: StatePart, elems: &[f32]) -> Result<()> {
        let state = self.state.as_mut();
        if let Some(state) = state { self.manifest.arrays()[part].stored(elems, |bytes| state.append(bytes)) } else { Ok(()) }
    }

    /// Writes `model/` and the manifest, syncs, and publishes the directory under its final name. Then keeps the
    /// newest `total_limit` checkpoints, this one always among them, and beside them the `spared`.
    ///
    /// # Errors
    /// The first operation that failed; checkpoints that were there before are as they were.
    pub(crate) fn finish(
        mut self,
        model_files: &[(String, Vec<u8>)],
        total_limit: Option<NonZeroUsize>,
        spared: RetainedCheckpoints,
    ) -> Result<Saved> {
        self.complete(model_files)?;
        self.publish(total_limit, spared)
    }

    /// Writes all that is missing but for the name.
    pub(super) fn complete(&mut self, model_files: &[(String, Vec<u8>)]) -> Result<()> {
        if let Some(state) = self.state.take() {
            self.set_state(state.finish()?);
        }
        self.write_model(model_files)?;
        let manifest = self.manifest.encode(&self.tmp.dir().join(MANIFEST))?;
        self.written.add(None, MANIFEST, self.tmp.dir().write_file(MANIFEST, &manifest)?);
        Ok(())
    }

    /// The file of the state is complete.
    pub(super) fn set_state(&mut self, state: WrittenState) {
        (self.manifest.state_bytes, self.manifest.state_crc32c) = (state.id.bytes, state.crc32c);
        self.written.add(None, STATE, state.id);
    }

    /// The threads of the state's file, to which nothing was appended, and the list of its tensors.
    pub(super) fn take_writers(&mut self) -> Option<(Writers, Vec<TensorEntry>, StateArrays)> {
        let state = self.state.take()?;
        Some((state.into_writers(), self.manifest.tensors.clone(), self.manifest.arrays()))
    }

    pub(super) fn publish(mut self, total_limit: Option<NonZeroUsize>, spared: RetainedCheckpoints) -> Result<Saved> {
        let step = self.manifest.trainer.step;
        let path = store::publish(step, &mut self.tmp, &self.written, &mut self.warnings)?;
        if let Some(limit) = total_limit {
            store::prune(self.tmp.parent(), step, limit, spared, &mut self.warnings);
        }
        Ok(Saved { path, warnings: self.warnings })
    }

    fn write_model(&mut self, model_files: &[(String, Vec<u8>)]) -> Result<()> {
        let dir = self.tmp.dir().create_dir(MODEL)?;
        for (name, bytes) in model_files {
            self.written.add(Some(MODEL), name, write_model_file(&dir, name, bytes)?);
            self.manifest.files.push(FileEntry { name: name.clone(), bytes: bytes.len() as u64, crc32c: crc32c::crc32c(bytes) });
        }
        dir.sync()
    }
}

/// Writes a model's file into `dir`: directly, or as one of the model's additional chat templates.
pub(super) fn write_model_file(dir: &Dir, name: &str, bytes: &[u8]) -> Result<FileId> {
    let Some((folder, name)) = name.split_once('/') else { return dir.write_file(name, bytes) };
    let folder = if dir.kind(folder)?.is_some() { dir.open_dir(folder)? } else { dir.create_dir(folder)? };
    let id = folder.write_file(name, bytes)?;
    folder.sync()?;
    Ok(id)
}
