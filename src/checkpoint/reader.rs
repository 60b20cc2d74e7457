//! Reading a checkpoint: every returned byte was compared with its checksum.

use super::format::{FileEntry, MANIFEST, MODEL, Manifest, STATE, TensorEntry};
use super::frozen::{frozen_names, trained_tokens};
use super::part_files::{PartFiles, start_of};
use super::portions::{Portion, StatePiece, portions};
use super::read_ahead::{self, PIECES, READERS};
use super::state_file::{StateFile, open_sized};
use crate::error::{Error, Result};
use crate::model::shape::ModelShape;
use crate::model::tensors::HEAD;
use crate::model_dir::CONFIG;
use crate::optim::PIECE_ELEMS;
use crate::optim::state_array::StatePart;
use std::path::{Path, PathBuf};

/// An open checkpoint with a valid manifest and files of the right sizes.
pub struct Loaded {
    dir: PathBuf,
    manifest: Manifest,
    state: StateSource,
}

/// Where the state lies.
enum StateSource {
    Whole(StateFile),
    Parts(PartFiles),
}

/// Opens the checkpoint in `dir` without reading its tensors.
///
/// # Errors
/// A missing or damaged manifest, a missing file, a file of the wrong size. The error names the file.
pub fn open(dir: &Path) -> Result<Loaded> {
    let manifest = Manifest::read(dir)?;
    let state = match &manifest.parts {
        None => StateSource::Whole(StateFile::open(&dir.join(STATE), manifest.state_bytes, manifest.state_crc32c.clone())?),
        Some(parts) => StateSource::Parts(PartFiles::open(dir, parts, manifest.arrays())?),
    };
    for entry in &manifest.files {
        open_sized(&dir.join(MODEL).join(&entry.name), entry.bytes)?;
    }
    Ok(Loaded { dir: dir.to_path_buf(), manifest, state })
}

/// Reads every byte of the checkpoint in `dir` and compares every checksum.
///
/// # Errors
/// The first thing that is wrong, with the file and the place.
pub fn verify(dir: &Path) -> Result<Manifest> {
    Check::Now.open(dir).map(|loaded| loaded.manifest)
}

/// When the state of a checkpoint is compared with its checksums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Check {
    /// All of it, before anything is used.
    Now,
    /// Each chunk when it is read.
    WhenRead,
}

impl Check {
    /// Opens the checkpoint in `dir`. The files of its model are compared with their checksums in any case.
    ///
    /// # Errors
    /// The first thing that is wrong, with the file and the place.
    pub(crate) fn open(self, dir: &Path) -> Result<Loaded> {
        let loaded = open(dir)?;
        loaded.manifest.files.iter().try_for_each(|entry| read_file(&dir.join(MODEL).join(&entry.name), entry).map(drop))?;
        match (self, &loaded.state) {
            (Self::WhenRead, _) => {}
            (Self::Now, StateSource::Whole(file)) => file.for_each_chunk(|_| ())?,
            (Self::Now, StateSource::Parts(files)) => files.verify()?,
        }
        Ok(loaded)
    }
}

impl Loaded {
    /// This checkpoint, with its files opened again for another thread.
    ///
    /// # Errors
    /// A file that is missing or has another size by now.
    pub(super) fn reopened(&self) -> Result<Self> {
        let state = match &self.state {
            StateSource::Whole(file) => StateSource::Whole(file.reopened()?),
            StateSource::Parts(files) => StateSource::Parts(files.reopened()?),
        };
        Ok(Self { dir: self.dir.clone(), manifest: self.manifest.clone(), state })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// The directory of the model's files: configuration, tokenizer, templates.
    pub(crate) fn model_dir(&self) -> PathBuf {
        self.dir.join(MODEL)
    }

    /// The file that [`Loaded::manifest`] was read from, for messages.
    pub(crate) fn manifest_path(&self) -> PathBuf {
        self.dir.join(MANIFEST)
    }

    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The shape that the checkpoint's `config.json` describes, as the run trained it.
    ///
    /// # Errors
    /// Errors of [`ModelShape::read`].
    pub(crate) fn shape(&self) -> Result<ModelShape> {
        self.as_trained(ModelShape::read(&self.model_dir().join(CONFIG))?)
    }

    /// `shape` of the model's configuration, with the frozen tensors of the run, and with the output matrix apart from the embedding where the
    /// run had it.
    ///
    /// # Errors
    /// `Format` for a record of trained tokens that does not fit the model.
    pub(crate) fn as_trained(&self, shape: ModelShape) -> Result<ModelShape> {
        let frozen = frozen_names(&self.manifest.run);
        let trained_tokens = trained_tokens(&self.manifest.run, shape.vocab).map_err(|cause| Error::format(self.manifest_path(), cause))?;
        let has_head = frozen.contains(HEAD) || self.manifest.tensors.iter().any(|tensor| tensor.name == HEAD);
        let shape = ModelShape { frozen, trained_tokens, ..shape.untied_if(has_head) };
        if shape.trained_tokens.is_some() && shape.trains_a_table() {
            return Err(Error::format(self.manifest_path(), "lists trained tokens of a table that is not frozen"));
        }
        Ok(shape)
    }

    /// Compares the tensor list with a model's: the same names and shapes in the same order.
    ///
    /// # Errors
    /// `Format` that names the first difference.
    pub(crate) fn expect_tensors<'a>(&self, model: impl IntoIterator<Item = (&'a str, &'a [usize])>) -> Result<()> {
        let show = |t: Option<(&str, &[usize])>| t.map_or("nothing".into(), |(name, shape)| format!("{} {shape:?}", name.escape_debug()));
        let mut held = self.manifest.tensors.iter().map(|t| (t.name.as_str(), t.shape.as_slice()));
        let mut model = model.into_iter();
        loop {
            match (held.next(), model.next()) {
                (None, None) => return Ok(()),
                (held, wanted) if held == wanted => (),
                (held, wanted) => {
                    let cause = format_args!("holds {} where the model has {}", show(held), show(wanted));
                    return Err(Error::format(self.state_path(), cause));
                }
            }
        }
    }

    /// Reads one tensor's parameters only. Several threads read a large tensor.
    ///
    /// # Errors
    /// As [`Loaded::read_elems`], and another length than the tensor's.
    pub fn read_params(&mut self, name: &str, params: &mut [f32]) -> Result<()> {
        let (nth, &TensorEntry { elems, .. }) = self.entry(name)?;
        if params.len() as u64 != elems {
            return Err(Error::format(self.state_path(), format_args!("tensor {name} has {elems} elements, expected {}", params.len())));
        }
        if params.len() < PIECE_ELEMS / PIECES {
            return self.read_elems(name, StatePart::PARAMS, 0, params);
        }
        let array = [(nth, StatePart::PARAMS)].into_iter();
        self.read_portions(&portions(&self.manifest, array, (PIECE_ELEMS / PIECES, 1)), Self::read_elems, |piece, elems| {
            params[piece.elems.clone()].copy_from_slice(elems);
            Ok(())
        })
    }

    /// The files of `model/`: name and content, verified.
    ///
    /// # Errors
    /// A file that cannot be read or has another checksum.
    pub fn read_model_files(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let read = |entry: &FileEntry| Ok((entry.name.clone(), read_file(&self.dir.join(MODEL).join(&entry.name), entry)?));
        self.manifest.files.iter().map(read).collect()
    }

    /// Reads elements `start..start + out.len()` of one part of a tensor.
    ///
    /// # Errors
    /// An unknown name, elements that the tensor does not have, a checksum that differs. `out` may then be partly written.
    pub(crate) fn read_elems(&mut self, name: &str, part: StatePart, start: usize, out: &mut [f32]) -> Result<()> {
        let (nth, entry) = self.entry(name)?;
        let (offset, elems, end) = (entry.offset, entry.elems, (start + out.len()) as u64);
        if end > elems {
            return Err(Error::format(self.state_path(), format_args!("tensor {name} has {elems} elements, expected {end}")));
        }
        let (arrays, first) = (self.manifest.arrays(), start_of(&self.manifest, nth).unwrap_or(0));
        let at = offset + (arrays.offset(part, elems as usize) + arrays[part].bytes(start)) as u64;
        match &mut self.state {
            StateSource::Whole(file) => arrays[part].load(out, |bytes| file.read_at(at, bytes)),
            StateSource::Parts(files) => files.read((part, arrays), first + start, out),
        }
    }

    /// The file that is named where a tensor is not as it should be.
    fn state_path(&self) -> PathBuf {
        match &self.state {
            StateSource::Whole(file) => file.path().to_path_buf(),
            StateSource::Parts(_) => self.manifest_path(),
        }
    }

    fn entry(&self, name: &str) -> Result<(usize, &TensorEntry)> {
        let found = self.manifest.tensors.iter().enumerate().find(|(_, t)| t.name == name);
        found.ok_or_else(|| Error::format(self.state_path(), format_args!("holds no tensor {name}")))
    }

    /// Gives the state to `visit` as `state.bin` holds it, in order, checked. Several threads read.
    pub(super) fn for_each_byte(&self, mut visit: impl FnMut(&[u8])) -> Result<()> {
        if let StateSource::Whole(file) = &self.state {
            return file.for_each_chunk(visit);
        }
        let arrays = self.manifest.arrays();
        self.for_each_piece((PIECE_ELEMS, 1), Self::read_elems, |piece, elems| {
            arrays[piece.part].stored(elems, |bytes| {
                visit(bytes);
                Ok(())
            })
        })
    }

    /// Reads the state in canonical order by `read`, with several threads that together hold at most `piece_elems` elements. `take` gets
    /// each piece with its elements. Pieces end at multiples of `grain` elements, or with their tensor.
    ///
    /// # Errors
    /// The first error in canonical order, of `read` or of `take`; `Resource` when no thread can be started.
    pub(super) fn for_each_piece(
        &self,
        (piece_elems, grain): (usize, usize),
        read: impl Fn(&mut Self, &str, StatePart, usize, &mut [f32]) -> Result<()> + Sync,
        take: impl FnMut(&StatePiece, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let list = self.manifest.arrays();
        let arrays = (0..self.manifest.tensors.len()).flat_map(|nth| list.parts().map(move |part| (nth, part)));
        self.read_portions(&portions(&self.manifest, arrays, (piece_elems / PIECES, grain)), read, take)
    }

    fn read_portions(
        &self,
        portions: &[Portion],
        read: impl Fn(&mut Self, &str, StatePart, usize, &mut [f32]) -> Result<()> + Sync,
        mut take: impl FnMut(&StatePiece, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let tensors = &self.manifest.tensors;
        let readers = (0..READERS).map(|_| self.reopened()).collect::<Result<Vec<_>>>()?;
        let fill = |loaded: &mut Self, nth: usize, elems: &mut Vec<f32>| {
            let Portion { pieces, elems: all, .. } = &portions[nth];
            elems.resize(*all, 0.0);
            let mut rest = &mut elems[..];
            pieces.iter().try_for_each(|piece| {
                let out = rest.split_off_mut(..piece.elems.len()).expect("elements of all pieces");
                read(loaded, &tensors[piece.tensor].name, piece.part, piece.elems.start, out)
            })
        };
        read_ahead::in_order(readers, portions.len(), fill, |nth, elems| {
            let mut rest = &elems[..];
            portions[nth].pieces.iter().try_for_each(|piece| {
                let (of_piece, others) = rest.split_at(piece.elems.len());
                rest = others;
                take(piece, of_piece)
            })
        })
    }
}

fn read_file(path: &Path, entry: &FileEntry) -> Result<Vec<u8>> {
    let file = open_sized(path, entry.bytes)?;
    let mut bytes = vec![0; entry.bytes as usize];
    file.read_at(0, &mut bytes)?;
    if crc32c::crc32c(&bytes) != entry.crc32c {
        return Err(Error::format(path, "damaged: its checksum differs"));
    }
    Ok(bytes)
}
