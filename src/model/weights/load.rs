//! Loads a directory's safetensors into the flat fp32 range, one block at a time; neither the model nor a tensor is in memory as a whole.

use super::mxfp4;
use super::safetensors::{TensorFile, UniqueMap};
use crate::disk::{self, is_plain_file_name};
use crate::dtype::{Element, first_nonfinite};
use crate::error::{Error, Result};
use crate::model::shape::ModelShape;
use crate::model::tensors::{HfPart, Role, TensorSpec, TensorTable};
use crate::model_dir::{INDEX, INDEX_BYTES_MAX, ModelDir, SINGLE};
use crate::optim::PIECE_ELEMS;
use ::safetensors::tensor::{Dtype, TensorInfo};
use half::{bf16, f16};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// Elements passed to the writer at once; few in tests, so that small tensors have many blocks. In addition, the reader holds a column or a
/// second copy.
const BLOCK_ELEMS: usize = if cfg!(test) { 96 } else { 1 << 20 };
const _: () = assert!(BLOCK_ELEMS.is_multiple_of(mxfp4::BLOCK_ELEMS));
/// Two blocks take at most the memory that the plan counts for a piece of state.
const _: () = assert!(2 * BLOCK_ELEMS <= PIECE_ELEMS);
/// Bytes read at once, a multiple of every element size, so that data are widened while they are in the cache.
const READ_BYTES: usize = if cfg!(test) { 64 } else { 256 << 10 };
/// The output matrix, which a tied model may store a second time.
const LM_HEAD: &str = "lm_head.weight";
/// Suffixes of the two tensors that hold a tensor in MXFP4: blocks and scales.
const PACKED_SUFFIXES: [&str; 2] = ["_blocks", "_scales"];
/// Suffixes of buffers that old versions of `transformers` saved with the weights.
const IGNORED_SUFFIXES: [&str; 3] = [".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"];

/// The weights of a model directory, opened and checked against the model, but not read yet.
pub struct ModelWeights {
    dir: PathBuf,
    shape: ModelShape,
    table: TensorTable,
    files: Vec<TensorFile>,
    /// Index in `files` by tensor name.
    place: HashMap<String, usize>,
}

#[derive(Clone, Copy)]
struct LocatedTensor<'a> {
    name: &'a str,
    file: &'a TensorFile,
    info: &'a TensorInfo,
}

/// Source of the elements of a part.
#[derive(Clone, Copy)]
enum PartSource<'a> {
    Plain(LocatedTensor<'a>),
    /// Blocks and scales, in the table's order of elements.
    Mxfp4 {
        blocks: LocatedTensor<'a>,
        scales: LocatedTensor<'a>,
    },
}

#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

impl ModelWeights {
    /// Opens the weights in `dir` and checks all names, shapes and formats against those of `shape`.
    ///
    /// # Errors
    /// Missing, damaged or inconsistent files, and links out of the directory; missing or unexpected tensors, wrong shapes and formats.
    /// Each error contains the file.
    pub fn open(dir: &Path, shape: &ModelShape) -> Result<Self> {
        let (files, place) = open_files(&ModelDir::open(dir)?)?;
        let weights = Self { dir: dir.to_path_buf(), shape: shape.clone(), table: TensorTable::new(shape), files, place };
        weights.parts()?;
        Ok(weights)
    }

    /// Passes every weight to `write`, widened from F32, BF16 or F16. The arguments are the first element's index in the flat range of the
    /// model's [`TensorTable`] and a block of elements. Padding is not passed.
    ///
    /// # Errors
    /// A file that cannot be read; a weight that is not finite; a second copy of a tied embedding that differs. Each error contains the
    /// file. Errors of `write`.
    pub fn read(&self, mut write: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        let parts = self.parts()?;
        if let Some(copy) = self.find(LM_HEAD).filter(|_| self.shape.tied) {
            let embedding = parts.iter().find_map(|(spec, _, source)| match source {
                PartSource::Plain(tensor) if spec.role == Role::Wte => Some(*tensor),
                _ => None,
            });
            if let Some(embedding) = embedding {
                expect_same(embedding, copy)?;
            }
        }
        let mut reader = Reader::default();
        parts.into_iter().try_for_each(|(spec, part, source)| reader.read_part(spec, &part, source, &mut write))
    }

    /// Checks all names, shapes and formats, and returns the source of each part of each tensor in the table.
    fn parts(&self) -> Result<Vec<(&TensorSpec, HfPart, PartSource<'_>)>> {
        let (mut parts, mut missing) = (vec![], vec![]);
        let mut unexpected: BTreeSet<&str> = self.place.keys().map(String::as_str).filter(|name| !is_ignored(name)).collect();
        if let (true, Some(copy)) = (self.shape.tied && unexpected.remove(LM_HEAD), self.find(LM_HEAD)) {
            check(LM_HEAD, copy, &[self.shape.vocab, self.shape.channels])?;
        }
        for (spec, part) in self.table.specs().iter().flat_map(|spec| spec.parts().map(move |part| (spec, part))) {
            // A bare model, saved without its head, has names without the prefix.
            let names = [Some(part.name.as_str()), part.name.strip_prefix(self.shape.base_prefix())];
            let mut take = |name: &str| unexpected.remove(name).then(|| self.find(name)).flatten();
            let plain = names.into_iter().flatten().find_map(&mut take);
            let packed = PACKED_SUFFIXES.map(|suffix| format!("{}{suffix}", part.name));
            let [blocks, scales] = packed.each_ref().map(|name| if plain.is_none() && part.may_be_packed() { take(name) } else { None });
            match (plain, blocks.zip(scales)) {
                (Some(tensor), _) => {
                    check(tensor.name, tensor, &spec.part_shape(&part))?;
                    parts.push((spec, part, PartSource::Plain(tensor)));
                }
                (None, Some((blocks, scales))) => {
                    check_packed(blocks, scales, spec, &part)?;
                    parts.push((spec, part, PartSource::Mxfp4 { blocks, scales }));
                }
                (None, None) => missing.push(part.name),
            }
        }
        let path = if self.files.len() == 1 { self.files[0].path() } else { &self.dir };
        let list = |names: Vec<&str>| {
            let quoted: Vec<String> = names.iter().take(3).map(|name| format!("{name:?}")).collect();
            format!("{}{}", quoted.join(", "), if names.len() > 3 { ", ..." } else { "" })
        };
        match (missing.len(), unexpected.len()) {
            (0, 0) => Ok(parts),
            (0, n) => {
                Err(Error::format(path, format_args!("{n} tensors that the model does not have: {}", list(Vec::from_iter(unexpected)))))
            }
            (n, _) => {
                Err(Error::format(path, format_args!("{n} tensors are missing: {}", list(missing.iter().map(String::as_str).collect()))))
            }
        }
    }

    fn find(&self, name: &str) -> Option<LocatedTensor<'_>> {
        let (name, &idx) = self.place.get_key_value(name)?;
        let file = &self.files[idx];
        Some(LocatedTensor { name, file, info: file.info(name)? })
    }
}

/// Open files, and the index of the file of each tensor.
type Files = (Vec<TensorFile>, HashMap<String, usize>);

fn open_files(dir: &ModelDir) -> Result<Files> {
    let (single, index) = (dir.file(SINGLE)?, dir.file(INDEX)?);
    if single.exists() {
        let file = TensorFile::open(&single)?;
        let place = file.names().map(|name| (name.to_string(), 0)).collect();
        return Ok((vec![file], place));
    }
    if index.exists() { open_shards(dir, &index) } else { Err(no_weights(dir.path())) }
}

fn open_shards(dir: &ModelDir, index_path: &Path) -> Result<Files> {
    let wrong = |cause: String| Error::format(index_path, cause);
    let bytes = disk::read_small(index_path, INDEX_BYTES_MAX)?;
    let Index { weight_map: UniqueMap(weight_map) } = serde_json::from_slice(&bytes).map_err(|e| wrong(e.to_string()))?;
    let names: BTreeSet<&String> = weight_map.iter().map(|(_, shard)| shard).collect();
    if let Some(name) = names.iter().find(|name| !is_plain_file_name(name)) {
        return Err(wrong(format!("shard {name:?} is not a file in this directory")));
    }
    let files = names.iter().map(|name| TensorFile::open(&dir.file(name)?)).collect::<Result<Vec<_>>>()?;
    let order: BTreeMap<&String, usize> = names.into_iter().zip(0..).collect();
    let place: HashMap<String, usize> = weight_map.iter().map(|(name, shard)| (name.clone(), order[shard])).collect();
    for (name, &idx) in &place {
        if files[idx].info(name).is_none() {
            return Err(wrong(format!("places {name:?} in {}, which does not hold it", files[idx].path().display())));
        }
    }
    for (idx, file) in files.iter().enumerate() {
        if let Some(name) = file.names().find(|name| place.get(*name) != Some(&idx) && !is_ignored(name)) {
            return Err(wrong(format!("does not place {name:?} in {}, which holds it", file.path().display())));
        }
    }
    Ok((files, place))
}

/// The error when there are no safetensors. For weights in other formats it contains the command that converts them.
fn no_weights(dir: &Path) -> Error {
    let others = ["pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack"];
    let Some(other) = others.into_iter().find(|name| dir.join(name).exists()) else {
        return Error::format(dir, format_args!("neither {SINGLE} nor {INDEX} is there; --init random needs none"));
    };
    let (class, name) = ("AutoModelForCausalLM", dir.display());
    let convert = format!("python -c \"from transformers import {class}; {class}.from_pretrained('{name}').save_pretrained('{name}')\"");
    Error::format(dir, format_args!("{other} is there, but only safetensors are read; write them with: {convert}"))
}

/// Buffers of the reader.
#[derive(Default)]
struct Reader {
    raw: Vec<u8>,
    scales: Vec<u8>,
    block: Vec<f32>,
    column: Vec<f32>,
}

impl Reader {
    /// Passes the part of `spec` in `source` to `write`, in blocks that are contiguous in the flat range.
    fn read_part(
        &mut self,
        spec: &TensorSpec,
        part: &HfPart,
        source: PartSource<'_>,
        write: &mut impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let (cols, first) = (spec.row_elems(), spec.offset_elems + part.row_start * spec.row_elems());
        let elems = part.rows * cols;
        match source {
            PartSource::Plain(tensor) if part.transposed => self.read_transposed(part, tensor, (first, cols), write),
            PartSource::Plain(tensor) => {
                self.read_in_order(first, elems, write, |reader, start| tensor.read(start, &mut reader.raw, &mut reader.block))
            }
            PartSource::Mxfp4 { blocks, scales } => {
                self.read_in_order(first, elems, write, |reader, start| reader.unpack(blocks, scales, start))
            }
        }
    }

    /// Reads a source in the table's order of elements; `fill` fills the block from a given element on.
    fn read_in_order(
        &mut self,
        first: usize,
        elems: usize,
        write: &mut impl FnMut(usize, &[f32]) -> Result<()>,
        fill: impl Fn(&mut Self, usize) -> Result<()>,
    ) -> Result<()> {
        for start in (0..elems).step_by(BLOCK_ELEMS) {
            self.block.resize(BLOCK_ELEMS.min(elems - start), 0.0);
            fill(self, start)?;
            write(first + start, &self.block)?;
        }
        Ok(())
    }

    /// Reads a transposed matrix, in which every row of the table has one element in each row of the file. As many rows as fit a block are
    /// gathered at a time. They begin at element `first` and have `cols` elements.
    fn read_transposed(
        &mut self,
        part: &HfPart,
        source: LocatedTensor<'_>,
        (first, cols): (usize, usize),
        write: &mut impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let (matrices, rows) = part.matrices();
        let step = (BLOCK_ELEMS / cols).max(1);
        for (matrix, row) in (0..matrices).flat_map(|matrix| (0..rows).step_by(step).map(move |row| (matrix * rows, row))) {
            self.block.resize(step.min(rows - row) * cols, 0.0);
            self.gather(source, matrix * cols + row, rows, cols)?;
            write(first + (matrix + row) * cols, &self.block)?;
        }
        Ok(())
    }

    /// Fills the block with the elements from `start` on, which is the beginning of an MXFP4 block.
    fn unpack(&mut self, blocks: LocatedTensor<'_>, scales: LocatedTensor<'_>, start: usize) -> Result<()> {
        self.raw.resize(self.block.len() / 2, 0);
        blocks.file.read(blocks.info, start / 2, &mut self.raw)?;
        self.scales.resize(self.block.len() / mxfp4::BLOCK_ELEMS, 0);
        scales.file.read(scales.info, start / mxfp4::BLOCK_ELEMS, &mut self.scales)?;
        mxfp4::widen(&self.raw, &self.scales, &mut self.block);
        blocks.expect_finite(start, &self.block)
    }

    /// Fills the block with rows of the table of `cols` elements. In the file these rows are columns, in rows of `file_cols`; the first
    /// column begins at element `start`.
    fn gather(&mut self, source: LocatedTensor<'_>, start: usize, file_cols: usize, cols: usize) -> Result<()> {
        self.column.resize(self.block.len() / cols, 0.0);
        for col in 0..cols {
            source.read(start + col * file_cols, &mut self.raw, &mut self.column)?;
            let target = self.block[col..].iter_mut().step_by(cols);
            target.zip(&self.column).for_each(|(to, from)| *to = *from);
        }
        Ok(())
    }
}

/// The second copy of a tied token embedding must be identical, because training would discard it.
fn expect_same(embedding: LocatedTensor<'_>, copy: LocatedTensor<'_>) -> Result<()> {
    let elems = embedding.info.shape.iter().product::<usize>();
    let (mut raw, mut first, mut second) = (vec![], vec![], vec![]);
    for start in (0..elems).step_by(BLOCK_ELEMS) {
        for (source, block) in [(embedding, &mut first), (copy, &mut second)] {
            block.resize(BLOCK_ELEMS.min(elems - start), 0.0);
            source.read(start, &mut raw, block)?;
        }
        if first.iter().zip(&second).any(|(a, b)| a.to_bits() != b.to_bits()) {
            let cause = format_args!("{LM_HEAD} is not the token embedding, but config.json ties them");
            return Err(Error::format(copy.file.path(), cause));
        }
    }
    Ok(())
}

impl LocatedTensor<'_> {
    /// Fills `out` with elements from `start` on, widened and checked to be finite; `raw` is a buffer for the file's bytes.
    fn read(&self, start: usize, raw: &mut Vec<u8>, out: &mut [f32]) -> Result<()> {
        let elem_bytes = self.info.dtype.bitsize() / 8;
        let at_once = READ_BYTES / elem_bytes;
        for (part, start) in out.chunks_mut(at_once).zip((start..).step_by(at_once)) {
            raw.resize(part.len() * elem_bytes, 0);
            self.file.read(self.info, start * elem_bytes, raw)?;
            match self.info.dtype {
                Dtype::BF16 => widen::<bf16>(raw, part),
                Dtype::F16 => widen::<f16>(raw, part),
                _ => widen::<f32>(raw, part),
            }
            self.expect_finite(start, part)?;
        }
        Ok(())
    }

    /// An error if `block`, which begins at element `start`, has a value that is not finite. A model with one NaN cannot train: every loss
    /// is NaN, and every step is skipped.
    fn expect_finite(&self, start: usize, block: &[f32]) -> Result<()> {
        let Some(idx) = first_nonfinite(block) else { return Ok(()) };
        let cause = format_args!("tensor {} holds {} at element {} of {:?}", self.name, block[idx], start + idx, self.info.shape);
        Err(Error::format(self.file.path(), cause))
    }
}

fn widen<E: Element>(raw: &[u8], out: &mut [f32]) {
    for (bytes, x) in raw.chunks_exact(size_of::<E>()).zip(out) {
        *x = bytemuck::pod_read_unaligned::<E>(bytes).to_f32();
    }
}

fn check(name: &str, source: LocatedTensor<'_>, shape: &[usize]) -> Result<()> {
    let TensorInfo { dtype, shape: found, .. } = source.info;
    if found != shape {
        return Err(Error::format(source.file.path(), format_args!("tensor {name} has shape {found:?}, config.json implies {shape:?}")));
    }
    match dtype {
        Dtype::F32 | Dtype::BF16 | Dtype::F16 => Ok(()),
        _ => Err(Error::format(source.file.path(), format_args!("tensor {name} is {dtype}; only F32, BF16 and F16 are read"))),
    }
}

/// Checks a tensor in MXFP4, which has the table's order of elements: blocks of 16 bytes along each row of each matrix, and one scale for
/// each block.
fn check_packed(blocks: LocatedTensor<'_>, scales: LocatedTensor<'_>, spec: &TensorSpec, part: &HfPart) -> Result<()> {
    let (matrices, rows) = part.matrices();
    let of_row = spec.row_elems() / mxfp4::BLOCK_ELEMS;
    let shapes = [vec![matrices, rows, of_row, mxfp4::BLOCK_BYTES], vec![matrices, rows, of_row]];
    for (tensor, shape) in [blocks, scales].into_iter().zip(shapes) {
        let TensorInfo { dtype, shape: found, .. } = tensor.info;
        if !spec.row_elems().is_multiple_of(mxfp4::BLOCK_ELEMS) || *found != shape || *dtype != Dtype::U8 {
            let cause = format_args!(
                "tensor {} is {dtype} {found:?}, config.json implies U8 {shape:?} for rows of {}",
                tensor.name,
                spec.row_elems()
            );
            return Err(Error::format(tensor.file.path(), cause));
        }
    }
    Ok(())
}

fn is_ignored(name: &str) -> bool {
    IGNORED_SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
}
