//! Reading a checkpoint: nothing leaves here whose checksum was not compared.

use super::format::{CHUNK_BYTES, FileEntry, MANIFEST, MODEL, Manifest, STATE, TensorEntry};
use crate::disk::InFile;
use crate::error::{Error, Result};
use crate::optim::StatePart;
use std::path::{Path, PathBuf};

/// An open checkpoint whose manifest is sound and whose files have the right sizes.
pub struct Loaded {
    dir: PathBuf,
    manifest: Manifest,
    file: InFile,
    /// Content of `current`, the chunk read last.
    chunk: Vec<u8>,
    current: Option<usize>,
}

/// Opens the checkpoint in `dir` without reading its tensors.
///
/// # Errors
/// A missing or damaged manifest, a missing file, a file of the wrong size. The error names the file.
pub fn open(dir: &Path) -> Result<Loaded> {
    let manifest = Manifest::read(dir)?;
    let file = open_sized(&dir.join(STATE), manifest.state_bytes)?;
    for entry in &manifest.files {
        open_sized(&dir.join(MODEL).join(&entry.name), entry.bytes)?;
    }
    Ok(Loaded { dir: dir.to_path_buf(), manifest, file, chunk: Vec::new(), current: None })
}

/// Reads every byte of the checkpoint in `dir` and compares every checksum.
///
/// # Errors
/// The first thing that is wrong, with the file and the place.
pub fn verify(dir: &Path) -> Result<Manifest> {
    let mut loaded = open(dir)?;
    loaded.manifest.files.iter().try_for_each(|entry| read_file(&dir.join(MODEL).join(&entry.name), entry).map(drop))?;
    loaded.for_each_chunk(|_| ())?;
    Ok(loaded.manifest)
}

impl Loaded {
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
                    return Err(Error::format(self.file.path(), cause));
                }
            }
        }
    }

    /// Reads one tensor's parameters only.
    ///
    /// # Errors
    /// As [`Loaded::read_elems`], and another length than the tensor's.
    pub fn read_params(&mut self, name: &str, params: &mut [f32]) -> Result<()> {
        let elems = self.entry(name)?.elems;
        if params.len() as u64 != elems {
            return Err(Error::format(self.file.path(), format_args!("tensor {name} has {elems} elements, wanted {}", params.len())));
        }
        self.read_elems(name, StatePart::Params, 0, params)
    }

    /// The files of `model/`: name and content, verified.
    ///
    /// # Errors
    /// A file that cannot be read or whose checksum differs.
    pub fn read_model_files(&self) -> Result<Vec<(String, Vec<u8>)>> {
        let read = |entry: &FileEntry| Ok((entry.name.clone(), read_file(&self.dir.join(MODEL).join(&entry.name), entry)?));
        self.manifest.files.iter().map(read).collect()
    }

    /// Reads elements `start..start + out.len()` of one part of a tensor.
    ///
    /// # Errors
    /// An unknown name, elements that the tensor does not have, a checksum that differs. `out` may then be partly written.
    pub(crate) fn read_elems(&mut self, name: &str, part: StatePart, start: usize, out: &mut [f32]) -> Result<()> {
        let entry = self.entry(name)?;
        let (offset, elems, end) = (entry.offset, entry.elems, (start + out.len()) as u64);
        if end > elems {
            return Err(Error::format(self.file.path(), format_args!("tensor {name} has {elems} elements, wanted {end}")));
        }
        let moments = self.manifest.moments();
        let width = |part| moments.dtype(part).bytes() as u64;
        let before: u64 = StatePart::ALL.into_iter().take(part as usize).map(|before| elems * width(before)).sum();
        let at = offset + before + start as u64 * width(part);
        moments.load(part, out, |bytes| self.read_at(at, bytes))
    }

    fn entry(&self, name: &str) -> Result<&TensorEntry> {
        let found = self.manifest.tensors.iter().find(|t| t.name == name);
        found.ok_or_else(|| Error::format(self.file.path(), format_args!("holds no tensor {name}")))
    }

    /// Gives every chunk of `state.bin` to `visit`, in order, checked.
    pub(super) fn for_each_chunk(&mut self, mut visit: impl FnMut(&[u8])) -> Result<()> {
        for idx in 0..self.manifest.state_crc32c.len() {
            visit(self.load_chunk(idx)?);
        }
        Ok(())
    }

    fn read_at(&mut self, mut offset: u64, mut out: &mut [u8]) -> Result<()> {
        while !out.is_empty() {
            let start = (offset % CHUNK_BYTES as u64) as usize;
            let chunk = self.load_chunk((offset / CHUNK_BYTES as u64) as usize)?;
            let n = out.len().min(chunk.len() - start);
            let (head, rest) = out.split_at_mut(n);
            head.copy_from_slice(&chunk[start..start + n]);
            out = rest;
            offset += n as u64;
        }
        Ok(())
    }

    fn load_chunk(&mut self, idx: usize) -> Result<&[u8]> {
        if self.current != Some(idx) {
            self.current = None;
            let start = idx as u64 * CHUNK_BYTES as u64;
            let bytes = (self.manifest.state_bytes - start).min(CHUNK_BYTES as u64) as usize;
            self.chunk.resize(bytes, 0);
            self.file.read_at(start, &mut self.chunk)?;
            if crc32c::crc32c(&self.chunk) != self.manifest.state_crc32c[idx] {
                let cause = format_args!("damaged: the checksum of bytes {start}..{} differs", start + bytes as u64);
                return Err(Error::format(self.file.path(), cause));
            }
            self.current = Some(idx);
        }
        Ok(&self.chunk)
    }
}

fn open_sized(path: &Path, bytes: u64) -> Result<InFile> {
    let file = InFile::open(path)?;
    if file.bytes() != bytes {
        return Err(Error::format(path, format_args!("has {} bytes, should have {bytes}", file.bytes())));
    }
    Ok(file)
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
