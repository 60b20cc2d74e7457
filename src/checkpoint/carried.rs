//! Tensors that a run carries over from its model: in one file in the run's folder of records, which every checkpoint of the run names with
//! its SHA-256. The file's own name has a part of that number, so that runs of several models in one directory keep their files apart.

use super::Loaded;
use crate::data::checksum::hex;
use crate::disk::{Dir, FileKind, InFile, OwnMark, OwnedName, RECORDS, Records};
use crate::error::{Error, Result};
use crate::model::weights::ModelWeights;
use crate::model::weights::carried::{CarriedTensors, HEAD};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// The file in the folder of records.
pub(crate) const CARRIED: OwnedName =
    OwnedName { pattern: "carried-#.safetensors", kind: "file of carried tensors", mark: OwnMark::File(is_carried) };
/// A file of carried tensors while it is written.
pub(crate) const CARRIED_BEING_WRITTEN: OwnedName = OwnedName { pattern: ".carried.safetensors.tmp-#", ..CARRIED };
/// The name beside which it is written.
const BESIDE: &str = "carried.safetensors";
/// Key of the file's record in a checkpoint's `run`.
const KEY: &str = "carried";
const PIECE_BYTES: usize = 1 << 20;

/// Whether a file begins as every file of carried tensors does, or as much of that as it has after the length of its header.
fn is_carried(file: File) -> io::Result<bool> {
    let mut found = vec![];
    file.take((8 + HEAD.len()) as u64).read_to_end(&mut found)?;
    Ok(found.get(8..).is_some_and(|text| !text.is_empty() && HEAD.as_bytes().starts_with(text)))
}

/// The file of carried tensors, as a checkpoint records it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CarriedFile {
    bytes: u64,
    sha256: String,
}

impl CarriedFile {
    /// The file that `run` of a checkpoint records, if it does.
    fn of(run: &Map<String, Value>, checkpoint: &Path) -> Result<Option<Self>> {
        let Some(found) = run.get(KEY) else { return Ok(None) };
        let wrong = |cause: &dyn std::fmt::Display| Error::format(checkpoint, format_args!("its record of carried tensors: {cause}"));
        let file = Self::deserialize(found).map_err(|e| wrong(&e))?;
        let is_sum = file.sha256.len() == 64 && file.sha256.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        if is_sum { Ok(Some(file)) } else { Err(wrong(&"no SHA-256")) }
    }

    fn name(&self) -> String {
        let number = u64::from_str_radix(self.sha256.get(..16).unwrap_or_default(), 16).unwrap_or_default();
        CARRIED.pattern.replace('#', &number.to_string())
    }

    /// Whether `records` has the file, by name, kind and size.
    fn is_in(&self, records: &Dir) -> Result<bool> {
        Ok(records.kind(self.name())? == Some(FileKind::File(self.bytes)) && CARRIED.is_own(records, self.name())?)
    }

    /// Reads the file at `path` and compares its checksum.
    fn verify(&self, path: &Path) -> Result<()> {
        let (file, mut sum) = (InFile::open(path)?, Sha256::new());
        for_each_piece(&file, |piece| {
            sum.update(piece);
            Ok(())
        })?;
        if file.bytes() == self.bytes && hex(sum.finalize()) == self.sha256 {
            return Ok(());
        }
        Err(Error::format(path, "damaged: its checksum differs from the one in the checkpoint"))
    }
}

fn for_each_piece(file: &InFile, mut visit: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let mut piece = vec![0; PIECE_BYTES.min(file.bytes() as usize)];
    for start in (0..file.bytes()).step_by(PIECE_BYTES) {
        let length = (file.bytes() - start).min(PIECE_BYTES as u64) as usize;
        file.read_at(start, &mut piece[..length])?;
        visit(&piece[..length])?;
    }
    Ok(())
}

/// The carried tensors of the checkpoint `loaded`, verified; `None` if its run carries none. The file lies in the folder of records beside
/// the checkpoint, or beside the folder to which a later run moved it.
///
/// # Errors
/// `Format` for a missing or damaged file; `Io` when it cannot be read.
pub(crate) fn find(loaded: &Loaded) -> Result<Option<(PathBuf, CarriedFile)>> {
    let dir = loaded.dir();
    let Some(file) = CarriedFile::of(&loaded.manifest().run, dir)? else { return Ok(None) };
    let whole = dir.canonicalize().map_err(|e| Error::io("read", dir, e))?;
    let places: Vec<PathBuf> = whole.ancestors().skip(1).take(2).map(|dir| dir.join(RECORDS.pattern).join(file.name())).collect();
    let Some(path) = places.iter().find(|path| path.exists()) else {
        let cause = format_args!(
            "the tensors that training carries over are missing: no {} in {} of its run; copy the file there, with the checkpoint",
            file.name(),
            RECORDS.pattern
        );
        return Err(Error::format(dir, cause));
    };
    file.verify(path)?;
    Ok(Some((path.clone(), file)))
}

/// Opens the carried tensors of the checkpoint `loaded`, if its run carries any.
///
/// # Errors
/// Errors of [`find`]; a file that does not hold what it lists.
pub(super) fn open(loaded: &Loaded) -> Result<Option<CarriedTensors>> {
    find(loaded)?.map(|(path, _)| CarriedTensors::open(&path)).transpose()
}

/// Where a run has its carried tensors from.
enum CarriedSource {
    Model(Box<ModelWeights>),
    File(PathBuf),
}

/// The carried tensors of a running run.
pub(crate) struct Carrier {
    source: CarriedSource,
    /// The file, once it is known.
    file: Option<CarriedFile>,
}

impl Carrier {
    /// The tensors beside the trained tensors in `weights`; `None` for a model that is text only and has no frozen tensors.
    pub(crate) fn of(weights: ModelWeights) -> Option<Self> {
        weights.shape().carries_tensors().then(|| Self { source: CarriedSource::Model(Box::new(weights)), file: None })
    }

    /// The carried tensors of the checkpoint `loaded`; from the `weights` of the text part if the file is missing or damaged, or the checkpoint is one of
    /// the text model alone.
    ///
    /// # Errors
    /// Errors of [`find`] where `weights` cannot be opened either.
    pub(crate) fn resumed(loaded: &Loaded, weights: impl FnOnce() -> Result<ModelWeights>) -> Result<Self> {
        let of_model = |file| move |weights| Self { source: CarriedSource::Model(Box::new(weights)), file };
        match find(loaded) {
            Ok(Some((path, file))) => Ok(Self { source: CarriedSource::File(path), file: Some(file) }),
            Ok(None) => weights().map(of_model(None)),
            Err(fault) => {
                let file = CarriedFile::of(&loaded.manifest().run, loaded.dir())?;
                weights().map(of_model(file)).map_err(|_| fault)
            }
        }
    }

    /// The carried tensors of the checkpoint `loaded`, whose run has frozen tensors; from `weights`, which must have the same ones.
    ///
    /// # Errors
    /// A checkpoint without a record of carried tensors; `weights` with other tensors, or that cannot be read.
    pub(crate) fn frozen(loaded: &Loaded, weights: ModelWeights) -> Result<Self> {
        let file = CarriedFile::of(&loaded.manifest().run, loaded.dir())?;
        let file = file.ok_or_else(|| Error::format(loaded.manifest_path(), "has frozen tensors, and no record of their values"))?;
        let (mut sum, mut bytes) = (Sha256::new(), 0);
        weights.write_carried(|piece| {
            sum.update(piece);
            bytes += piece.len() as u64;
            Ok(())
        })?;
        if file != (CarriedFile { bytes, sha256: hex(sum.finalize()) }) {
            let cause = "its tensors that training does not change are not those of the checkpoint; use the model with which the run began";
            return Err(Error::format(weights.dir(), cause));
        }
        Ok(Self { source: CarriedSource::Model(Box::new(weights)), file: Some(file) })
    }

    /// The weights of the model, if the carried tensors are read from it.
    pub(crate) fn weights(&self) -> Option<&ModelWeights> {
        match &self.source {
            CarriedSource::Model(weights) => Some(weights),
            CarriedSource::File(_) => None,
        }
    }

    /// Bytes that the file will take in `output_dir`; 0 if the directory has it.
    ///
    /// # Errors
    /// Tensors that do not fit the model; `Io` when the directory cannot be read.
    pub(crate) fn missing_bytes(&self, output_dir: Option<&Dir>) -> Result<u64> {
        let records = output_dir.and_then(Records::find);
        match (&self.file, &self.source) {
            (Some(file), _) if records.map_or(Ok(false), |records| file.is_in(records.dir()))? => Ok(0),
            (Some(file), _) => Ok(file.bytes),
            (None, CarriedSource::Model(weights)) => weights.carried_bytes(),
            (None, CarriedSource::File(path)) => Ok(InFile::open(path)?.bytes()),
        }
    }

    /// Makes sure that `output_dir` has the file; `run`, with the file's record.
    ///
    /// # Errors
    /// `Io` when it cannot be written; `Format` for a source that has changed since the run began.
    pub(crate) fn kept_in(&mut self, output_dir: &Dir, mut run: Map<String, Value>) -> Result<Map<String, Value>> {
        let records = Records::open(output_dir)?;
        let file = match self.file.take() {
            Some(file) if file.is_in(records.dir())? => file,
            expected => {
                let written = self.write(records.dir(), expected.as_ref());
                self.file = expected;
                written?
            }
        };
        run.insert(KEY.into(), serde_json::to_value(&file).map_err(|e| Error::format(output_dir.path(), e))?);
        self.file = Some(file);
        Ok(run)
    }

    fn write(&self, records: &Dir, expected: Option<&CarriedFile>) -> Result<CarriedFile> {
        let (mut out, beside) = records.create_beside(BESIDE)?;
        let (mut sum, mut bytes) = (Sha256::new(), 0);
        let mut add = |piece: &[u8]| {
            sum.update(piece);
            bytes += piece.len() as u64;
            out.write(piece)
        };
        let written = match &self.source {
            CarriedSource::Model(weights) => weights.write_carried(&mut add),
            CarriedSource::File(path) => InFile::open(path).and_then(|file| for_each_piece(&file, &mut add)),
        };
        let file = CarriedFile { bytes, sha256: hex(sum.finalize()) };
        let published = written.and_then(|()| out.sync()).and_then(|()| {
            self.expect(&file, expected)?;
            publish(records, &beside, &file.name())
        });
        // The write error is the one to report.
        published.inspect_err(|_| drop(records.remove(&beside))).map(|()| file)
    }

    fn expect(&self, file: &CarriedFile, expected: Option<&CarriedFile>) -> Result<()> {
        if expected.is_none_or(|expected| expected == file) {
            return Ok(());
        }
        let path = match &self.source {
            CarriedSource::Model(weights) => weights.dir(),
            CarriedSource::File(path) => path,
        };
        Err(Error::format(path, "its carried tensors are not those of the checkpoint from which the run continues"))
    }
}

/// Gives the written file its name. Foreign content with the name gets another one.
fn publish(records: &Dir, beside: &OsStr, name: &str) -> Result<()> {
    if records.kind(name)?.is_some() && !CARRIED.is_own(records, name)? {
        records.set_aside(name)?;
    }
    records.rename(beside, name).and_then(|()| records.sync())
}

/// Removes the files that killed runs left while they wrote them.
///
/// # Errors
/// `Io` when the folder cannot be read, or a file cannot be removed.
pub(crate) fn remove_remains(records: &Dir) -> Result<()> {
    for name in records.names()?.into_iter().filter(|name| CARRIED_BEING_WRITTEN.matches(name)) {
        if CARRIED_BEING_WRITTEN.is_own(records, &name)? {
            records.remove(&name)?;
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "carried_tests.rs"]
mod tests;
