//! Reading a checkpoint: every returned byte was compared with its checksum.

use super::format::{FileEntry, MANIFEST, MODEL, Manifest, STATE, TensorEntry};
use super::part_files::{PartFiles, start_of};
use super::read_ahead::{self, PIECES, READERS};
use super::state_file::{StateFile, open_sized};
use crate::error::{Error, Result};
use crate::model::shape::ModelShape;
use crate::model::tensors::HEAD;
use crate::model_dir::CONFIG;
use crate::optim::PIECE_ELEMS;
use crate::optim::int8::whole_groups;
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
    let loaded = open(dir)?;
    loaded.manifest.files.iter().try_for_each(|entry| read_file(&dir.join(MODEL).join(&entry.name), entry).map(drop))?;
    match &loaded.state {
        StateSource::Whole(file) => file.for_each_chunk(|_| ())?,
        StateSource::Parts(files) => files.verify()?,
    }
    Ok(loaded.manifest)
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

    /// The shape that the checkpoint's `config.json` describes, with the output matrix apart from the embedding where the checkpoint has it.
    ///
    /// # Errors
    /// Errors of [`ModelShape::read`].
    pub(crate) fn shape(&self) -> Result<ModelShape> {
        Ok(self.as_trained(ModelShape::read(&self.model_dir().join(CONFIG))?))
    }

    /// `shape` of the model's configuration, with the output matrix apart from the embedding where the checkpoint has it.
    pub(crate) fn as_trained(&self, shape: ModelShape) -> ModelShape {
        shape.untied_if(self.manifest.tensors.iter().any(|tensor| tensor.name == HEAD))
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

    /// Reads one tensor's parameters only.
    ///
    /// # Errors
    /// As [`Loaded::read_elems`], and another length than the tensor's.
    pub fn read_params(&mut self, name: &str, params: &mut [f32]) -> Result<()> {
        let elems = self.entry(name)?.1.elems;
        if params.len() as u64 != elems {
            return Err(Error::format(self.state_path(), format_args!("tensor {name} has {elems} elements, expected {}", params.len())));
        }
        self.read_elems(name, StatePart::PARAMS, 0, params)
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
        self.for_each_piece(PIECE_ELEMS, Self::read_elems, |_, part, _, elems| {
            arrays[part].stored(elems, |bytes| {
                visit(bytes);
                Ok(())
            })
        })
    }

    /// Reads the state in canonical order by `read`, with several threads that together hold at most `piece_elems` elements. `take` gets the
    /// number of a tensor, a part of its state, the first element and the elements.
    ///
    /// # Errors
    /// The first error in canonical order, of `read` or of `take`; `Resource` when no thread can be started.
    pub(super) fn for_each_piece(
        &self,
        piece_elems: usize,
        read: impl Fn(&mut Self, &str, StatePart, usize, &mut [f32]) -> Result<()> + Sync,
        mut take: impl FnMut(usize, StatePart, usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let (arrays, tensors, each) = (self.manifest.arrays(), &self.manifest.tensors, whole_groups(piece_elems / PIECES));
        let of = |(nth, tensor): (usize, &TensorEntry)| {
            let elems = tensor.elems as usize;
            arrays.parts().flat_map(move |part| (0..elems).step_by(each).map(move |start| (nth, part, start..elems.min(start + each))))
        };
        let pieces: Vec<_> = tensors.iter().enumerate().flat_map(of).collect();
        let readers = (0..READERS).map(|_| self.reopened()).collect::<Result<Vec<_>>>()?;
        let fill = |loaded: &mut Self, piece: usize, elems: &mut Vec<f32>| {
            let (nth, part, range) = &pieces[piece];
            elems.resize(range.len(), 0.0);
            read(loaded, &tensors[*nth].name, *part, range.start, elems)
        };
        read_ahead::in_order(readers, pieces.len(), fill, |piece, elems| {
            let (nth, part, range) = &pieces[piece];
            take(*nth, *part, range.start, elems)
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
