//! Loads a directory's safetensors into the flat fp32 range, one block at a time; neither the model nor a tensor is in memory as a whole.

use super::safetensors::{TensorFile, UniqueMap};
use crate::device::CORRECTION_PARTS;
use crate::disk::{self, is_plain_file_name};
use crate::dtype::mxfp4::{self, Mxfp4};
use crate::dtype::{Element, first_nonfinite};
use crate::error::{Error, Result};
use crate::model::correction;
use crate::model::family::Names;
use crate::model::shape::ModelShape;
use crate::model::tensors::{HfPart, TensorSpec, TensorTable};
use crate::model::text_part::{Layout, TextPart};
use crate::model_dir::{INDEX, INDEX_BYTES_MAX, ModelDir, SINGLE};
use crate::optim::PIECE_ELEMS;
use ::safetensors::tensor::{Dtype, TensorInfo};
use half::{bf16, f16};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

/// Elements passed to the writer at once; few in tests, so that small tensors have many blocks. In addition, the reader holds a strip or a
/// second copy.
const BLOCK_ELEMS: usize = if cfg!(test) { 96 } else { 1 << 20 };
const _: () = assert!(BLOCK_ELEMS.is_multiple_of(mxfp4::BLOCK_ELEMS));
/// Two blocks take at most the memory that the plan counts for a piece of state.
const _: () = assert!(2 * BLOCK_ELEMS <= PIECE_ELEMS);
/// Elements of a strip of a transposed matrix. A block and a strip take the memory that the plan counts for a piece of state.
const STRIP_ELEMS: usize = if cfg!(test) { 300 } else { PIECE_ELEMS - BLOCK_ELEMS };
/// Bytes read at once, a multiple of every element size, so that data are widened while they are in the cache.
const READ_BYTES: usize = if cfg!(test) { 64 } else { 256 << 10 };
/// Remedy for layers behind the last one that the configuration counts.
const BEYOND_REMEDY: &str =
    "; they predict further tokens (MTP) and are not trained: save the model with save_pretrained of transformers, which leaves them out";
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
    /// Names of the text part of a multimodal model in these files.
    layout: Option<Layout>,
    /// Whether the configuration ties an output matrix that these files have with values of its own.
    breaks_tie: bool,
}

#[derive(Clone, Copy)]
pub(super) struct LocatedTensor<'a> {
    pub(super) name: &'a str,
    pub(super) file: &'a TensorFile,
    pub(super) info: &'a TensorInfo,
}

/// Source of the elements of a part.
#[derive(Clone, Copy)]
pub(super) enum PartSource<'a> {
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
    /// Opens the weights in `dir` and checks all names, shapes and formats against those of `shape`. An output matrix that the shape ties,
    /// and that has values of its own here, is not tied: see [`ModelWeights::shape`].
    ///
    /// # Errors
    /// Missing, damaged or inconsistent files, and links out of the directory; missing or unexpected tensors, wrong shapes and formats.
    /// Each error contains the file.
    pub fn open(dir: &Path, shape: &ModelShape) -> Result<Self> {
        let mut weights = Self::of_files(&ModelDir::open(dir)?, shape)?;
        if weights.finds_another_head()? {
            weights.breaks_tie = true;
            weights.shape = weights.shape.untied_if(true);
            weights.table = TensorTable::new(&weights.shape);
        }
        weights.parts()?;
        Ok(weights)
    }

    /// `shape` with its tie as the weights in `dir` decide it; they are not checked otherwise. A directory without weights decides nothing.
    ///
    /// # Errors
    /// Files that are damaged or cannot be read.
    pub(crate) fn decided_tie(dir: &ModelDir, shape: ModelShape) -> Result<ModelShape> {
        if !shape.tied || !Self::are_in(dir)? {
            return Ok(shape);
        }
        let weights = Self::of_files(dir, &shape)?;
        let has_head = weights.finds_another_head()?;
        Ok(shape.untied_if(has_head))
    }

    /// These weights for `shape`, the same model with other tensors frozen.
    ///
    /// # Errors
    /// Errors of [`ModelWeights::check_frozen`].
    pub(crate) fn freezing(self, shape: ModelShape) -> Result<Self> {
        let weights = Self { table: TensorTable::new(&shape), shape, ..self };
        weights.check_frozen().map(|()| weights)
    }

    /// Whether `dir` has weights.
    pub(super) fn are_in(dir: &ModelDir) -> Result<bool> {
        Ok(dir.file(SINGLE)?.exists() || dir.file(INDEX)?.exists())
    }

    fn of_files(dir: &ModelDir, shape: &ModelShape) -> Result<Self> {
        let (files, place) = open_files(dir)?;
        let layout = shape.family.text_part().map(|part| layout_of(part, shape.family.spec().names, &place, dir.path())).transpose()?;
        let (shape, table, dir) = (shape.clone(), TensorTable::new(shape), dir.path().to_path_buf());
        Ok(Self { dir, shape, table, files, place, layout, breaks_tie: false })
    }

    /// The model of these weights.
    pub fn shape(&self) -> &ModelShape {
        &self.shape
    }

    /// The directory of these weights.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// A line for people where the configuration ties two tensors that differ.
    pub(crate) fn note(&self) -> Option<String> {
        let head = self.names_in_files(self.names().head).0;
        let line = || {
            format!(
                "{}: config.json ties {head} to the token embedding, but their values differ; they are trained as two tensors",
                self.dir.display()
            )
        };
        self.breaks_tie.then(line)
    }

    /// Passes every trained weight to `write`, widened from F32, BF16 or F16. The arguments are the first element's index in the flat range of
    /// the model's [`TensorTable`] and a block of elements. Padding is not passed.
    ///
    /// # Errors
    /// A file that cannot be read; a weight that is not finite. Each error contains the file. Errors of `write`.
    pub fn read(&self, write: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        self.read_some(|spec| !spec.frozen, write)
    }

    /// As [`ModelWeights::read`], for frozen weights in the compute format and their range.
    ///
    /// # Errors
    /// As [`ModelWeights::read`].
    pub fn read_frozen(&self, write: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        self.read_some(|spec| spec.frozen && !spec.packed, write)
    }

    /// Passes the frozen weights that stay in MXFP4 to `write`, as the files have them. The arguments are the first element's index in their
    /// range, and whole blocks.
    ///
    /// # Errors
    /// As [`ModelWeights::read`].
    pub fn read_packed(&self, mut write: impl FnMut(usize, Mxfp4<'_>) -> Result<()>) -> Result<()> {
        let mut reader = Reader::default();
        for (spec, part, source) in self.parts()? {
            if let PartSource::Mxfp4 { blocks, scales } = source
                && spec.packed
            {
                let first = spec.offset_elems + part.row_start * spec.row_elems();
                reader.read_packed((blocks, scales), part.rows * spec.row_elems(), |start, numbers| write(first + start, numbers))?;
            }
        }
        Ok(())
    }

    fn read_some(&self, holds: impl Fn(&TensorSpec) -> bool, mut write: impl FnMut(usize, &[f32]) -> Result<()>) -> Result<()> {
        let mut reader = Reader::default();
        let parts = self.parts()?.into_iter().filter(|(spec, ..)| holds(spec));
        parts.into_iter().try_for_each(|(spec, part, source)| reader.read_part(spec, &part, source, &mut write))
    }

    fn names(&self) -> &'static Names {
        self.shape.family.spec().names
    }

    /// The names under which these files may have the tensor that the family's row calls `name`. A bare model, saved without its head,
    /// has names without the prefix.
    fn names_in_files(&self, name: &str) -> (String, Option<String>) {
        match self.layout.zip(self.shape.family.text_part()) {
            Some((layout, part)) => (layout.name_from(part.layouts[0], name), None),
            None => (name.to_string(), name.strip_prefix(self.names().prefix).map(String::from)),
        }
    }

    fn find_of_row(&self, name: &str) -> Option<LocatedTensor<'_>> {
        let (name, bare) = self.names_in_files(name);
        self.find(&name).or_else(|| self.find(&bare?))
    }

    /// The second copy of the token embedding that a tied model may have as its output matrix.
    pub(super) fn tied_copy(&self) -> Option<LocatedTensor<'_>> {
        self.find_of_row(self.names().head).filter(|_| self.shape.tied)
    }

    /// Whether files have an output matrix that the shape ties, with other values than the token embedding's.
    fn finds_another_head(&self) -> Result<bool> {
        let Some(copy) = self.tied_copy() else { return Ok(false) };
        check(copy.name, copy, &[self.shape.vocab, self.shape.channels])?;
        let Names { prefix, wte, .. } = self.names();
        // Without an embedding, the error is that of a missing tensor.
        let embedding = self.find_of_row(&format!("{prefix}{wte}.weight"));
        embedding.filter(|embedding| embedding.info.shape == copy.info.shape).map_or(Ok(false), |embedding| differ(embedding, copy))
    }

    /// Whether the tensor `name` is one that training neither reads nor changes.
    fn is_unused(&self, name: &str) -> bool {
        is_ignored(name) || self.shape.family.text_part().is_some_and(|part| part.carries(name))
    }

    /// Checks all names, shapes and formats, and returns the source of each part of each tensor in the table.
    pub(super) fn parts(&self) -> Result<Vec<(&TensorSpec, HfPart, PartSource<'_>)>> {
        let (mut parts, mut missing) = (vec![], vec![]);
        let mut unexpected: BTreeSet<&str> = self.place.keys().map(String::as_str).filter(|name| !self.is_unused(name)).collect();
        if let Some(copy) = self.tied_copy() {
            unexpected.remove(copy.name);
        }
        for (spec, part) in self.table.all().flat_map(|spec| spec.parts().map(move |part| (spec, part))) {
            let (name, bare) = self.names_in_files(&part.name);
            // Trained rows are part of a frozen table, which takes the tensor.
            let mut take = |name: &str| (part.file_rows.is_some() || unexpected.remove(name)).then(|| self.find(name)).flatten();
            let plain = [Some(&name), bare.as_ref()].into_iter().flatten().find_map(|name| take(name));
            let packed = PACKED_SUFFIXES.map(|suffix| format!("{name}{suffix}"));
            let [blocks, scales] = packed.each_ref().map(|name| if plain.is_none() && part.may_be_packed() { take(name) } else { None });
            match (plain, blocks.zip(scales)) {
                (Some(tensor), _) if spec.packed => return Err(not_packed(tensor)),
                (Some(tensor), _) => parts.push((spec, oriented(tensor, spec, part)?, PartSource::Plain(tensor))),
                (None, Some((blocks, scales))) => {
                    check_packed(blocks, scales, spec, &part)?;
                    parts.push((spec, part, PartSource::Mxfp4 { blocks, scales }));
                }
                (None, None) if part.file_rows.is_some() => {}
                (None, None) => missing.push(name),
            }
        }
        self.expect_none(&missing, &unexpected)?;
        Ok(parts)
    }

    fn expect_none(&self, missing: &[String], unexpected: &BTreeSet<&str>) -> Result<()> {
        let path = if self.files.len() == 1 { self.files[0].path() } else { &self.dir };
        match (missing.len(), unexpected.len()) {
            (0, 0) => Ok(()),
            (0, n) => {
                let remedy = if unexpected.iter().all(|name| self.is_beyond_the_last_layer(name)) { BEYOND_REMEDY } else { "" };
                let names = listed(unexpected.iter().copied());
                Err(Error::format(path, format_args!("{n} tensors that the model does not have: {names}{remedy}")))
            }
            (n, _) => Err(Error::format(path, format_args!("{n} tensors are missing: {}", listed(missing.iter().map(String::as_str))))),
        }
    }

    /// Whether `name` is of a layer that the configuration does not count, or that is stored apart from the decoder.
    fn is_beyond_the_last_layer(&self, name: &str) -> bool {
        let Names { prefix, layers, .. } = self.names();
        if name.starts_with("mtp.") {
            return true;
        }
        let of_layer = name.strip_prefix(prefix).and_then(|name| name.strip_prefix(layers)).and_then(|name| name.strip_prefix('.'));
        let number = of_layer.and_then(|name| name.split('.').next()?.parse::<usize>().ok());
        number.is_some_and(|number| number >= self.shape.layers.len())
    }

    /// All tensors in the order of the files.
    pub(super) fn in_order(&self) -> impl Iterator<Item = LocatedTensor<'_>> {
        self.files.iter().enumerate().flat_map(|(idx, file)| {
            let mut names: Vec<&str> = file.names().filter(|name| self.place.get(*name) == Some(&idx)).collect();
            names.sort_by_key(|name| (file.info(name).map(|info| info.data_offsets), *name));
            names.into_iter().filter_map(|name| self.find(name))
        })
    }

    pub(super) fn find(&self, name: &str) -> Option<LocatedTensor<'_>> {
        let (name, &idx) = self.place.get_key_value(name)?;
        let file = &self.files[idx];
        Some(LocatedTensor { name, file, info: file.info(name)? })
    }
}

/// The first names of a list, quoted.
fn listed<'a>(names: impl ExactSizeIterator<Item = &'a str>) -> String {
    let more = if names.len() > 3 { ", ..." } else { "" };
    let quoted: Vec<String> = names.take(3).map(|name| format!("{name:?}")).collect();
    format!("{}{more}", quoted.join(", "))
}

/// The names of the text part among the tensors in `place`: those of the layout in which the token embedding is found.
fn layout_of(part: &TextPart, names: &Names, place: &HashMap<String, usize>, dir: &Path) -> Result<Layout> {
    let embedding = |layout: &Layout| format!("{}{}.weight", layout.prefix, names.wte);
    let mut found = part.layouts.iter().filter(|layout| place.contains_key(&embedding(layout)));
    match (found.next(), found.next()) {
        (Some(layout), None) => Ok(*layout),
        (Some(first), Some(second)) => {
            let (first, second) = (embedding(first), embedding(second));
            Err(Error::format(dir, format_args!("two token embeddings, {first} and {second}: which one is the text part's is not known")))
        }
        (None, _) => {
            let all: Vec<String> = part.layouts.iter().map(embedding).collect();
            Err(Error::format(dir, format_args!("no token embedding of the text part; looked for {}", all.join(", "))))
        }
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
    strip: Vec<f32>,
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
            PartSource::Plain(tensor) if part.split => self.read_split(tensor, (first, elems), write),
            PartSource::Plain(tensor) if part.interleaved.is_some() => self.read_rows(part, tensor, (first, cols), write),
            PartSource::Plain(tensor) if part.transposed => self.read_transposed(part, tensor, (first, cols), write),
            PartSource::Plain(tensor) => {
                let before = part.file_rows.map_or(0, |rows| rows.first * cols);
                self.read_in_order(first, elems, write, |reader, start| tensor.read(before + start, &mut reader.raw, &mut reader.block))
            }
            PartSource::Mxfp4 { blocks, scales } => {
                self.read_in_order(first, elems, write, |reader, start| reader.unpack(blocks, scales, start))
            }
        }
    }

    /// Reads a correction of few elements, which the table has in parts.
    fn read_split(
        &mut self,
        source: LocatedTensor<'_>,
        (first, elems): (usize, usize),
        write: &mut impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.strip.resize(elems, 0.0);
        source.read(0, &mut self.raw, &mut self.strip)?;
        for part in 0..CORRECTION_PARTS {
            self.block.clear();
            self.block.extend(self.strip.iter().map(|&x| correction::split(x)[part]));
            write(first + part * elems, &self.block)?;
        }
        Ok(())
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

    /// Reads rows whose order in the file is not that of the table, a run of neighbours at a time.
    fn read_rows(
        &mut self,
        part: &HfPart,
        source: LocatedTensor<'_>,
        (first, cols): (usize, usize),
        write: &mut impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let runs = part.interleaved.into_iter().flat_map(|order| order.runs(part.rows));
        for (row, table_row, rows) in runs {
            let fill = |reader: &mut Self, start| source.read(row * cols + start, &mut reader.raw, &mut reader.block);
            self.read_in_order(first + table_row * cols, rows * cols, write, fill)?;
        }
        Ok(())
    }

    /// Reads transposed matrices, in which every row of the table has one element in each row of the file. The rows of the table begin at
    /// element `first` and have `cols` elements. A strip of columns of the file is read at a time, so that reads are long.
    fn read_transposed(
        &mut self,
        part: &HfPart,
        source: LocatedTensor<'_>,
        (first, cols): (usize, usize),
        write: &mut impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        let (matrices, rows) = part.matrices();
        let (width, step) = ((STRIP_ELEMS / cols).clamp(1, rows), (BLOCK_ELEMS / cols).max(1));
        for (matrix, strip) in (0..matrices).flat_map(|matrix| (0..rows).step_by(width).map(move |strip| (matrix * rows, strip))) {
            let width = width.min(rows - strip);
            self.read_strip(source, matrix * cols + strip, (rows, width), cols)?;
            for row in (0..width).step_by(step) {
                self.block.resize(step.min(width - row) * cols, 0.0);
                transpose(&self.strip[row..], width, &mut self.block, cols);
                write(first + (matrix + strip + row) * cols, &self.block)?;
            }
        }
        Ok(())
    }

    /// Reads `width` elements of each of `cols` rows of the file. The rows have `file_cols` elements, and the first element is `start`.
    fn read_strip(&mut self, source: LocatedTensor<'_>, start: usize, (file_cols, width): (usize, usize), cols: usize) -> Result<()> {
        self.strip.resize(width * cols, 0.0);
        if width == file_cols {
            return source.read(start, &mut self.raw, &mut self.strip);
        }
        let rows = self.strip.chunks_mut(width).zip((start..).step_by(file_cols));
        rows.into_iter().try_for_each(|(row, start)| source.read(start, &mut self.raw, row))
    }

    /// Fills the block with the elements from `start` on, which is the beginning of an MXFP4 block.
    fn unpack(&mut self, blocks: LocatedTensor<'_>, scales: LocatedTensor<'_>, start: usize) -> Result<()> {
        let mut block = std::mem::take(&mut self.block);
        self.read_codes((blocks, scales), start, block.len())?.widen(&mut block);
        self.block = block;
        blocks.expect_finite(start, &self.block)
    }

    /// Passes all `elems` elements of a tensor in MXFP4 to `write`, with the index of each piece's first element.
    fn read_packed(
        &mut self,
        source @ (blocks, _): (LocatedTensor<'_>, LocatedTensor<'_>),
        elems: usize,
        mut write: impl FnMut(usize, Mxfp4<'_>) -> Result<()>,
    ) -> Result<()> {
        for start in (0..elems).step_by(BLOCK_ELEMS) {
            let numbers = self.read_codes(source, start, BLOCK_ELEMS.min(elems - start))?;
            for (nth, _) in numbers.scales.iter().enumerate().filter(|(_, scale)| **scale >= mxfp4::UNSAFE_SCALE) {
                let (first, mut block) = (nth * mxfp4::BLOCK_ELEMS, [0.0; mxfp4::BLOCK_ELEMS]);
                numbers.slice(first, block.len()).widen(&mut block);
                blocks.expect_finite(start + first, &block)?;
            }
            write(start, numbers)?;
        }
        Ok(())
    }

    /// Reads `elems` elements from `start` on; both are whole MXFP4 blocks.
    fn read_codes(&mut self, (blocks, scales): (LocatedTensor<'_>, LocatedTensor<'_>), start: usize, elems: usize) -> Result<Mxfp4<'_>> {
        let ([code, scale], bytes) = (Mxfp4::bytes(start), Mxfp4::bytes(elems));
        self.raw.resize(bytes[0], 0);
        blocks.file.read(blocks.info, code, &mut self.raw)?;
        self.scales.resize(bytes[1], 0);
        scales.file.read(scales.info, scale, &mut self.scales)?;
        Ok(Mxfp4 { codes: &self.raw, scales: &self.scales })
    }
}

/// Writes the first columns of `from`, whose rows have `width` elements, as the rows of `to`, which have `cols` elements. Tiles keep the
/// cache lines of both in use.
fn transpose(from: &[f32], width: usize, to: &mut [f32], cols: usize) {
    const TILE: usize = 16;
    for (tile, rows) in to.chunks_mut(TILE * cols).enumerate() {
        for first in (0..cols).step_by(TILE) {
            for (row, to) in rows.chunks_exact_mut(cols).enumerate() {
                let to = &mut to[first..cols.min(first + TILE)];
                (first..).zip(to).for_each(|(col, to)| *to = from[col * width + tile * TILE + row]);
            }
        }
    }
}

/// Whether two tensors of one shape differ in a bit.
fn differ(embedding: LocatedTensor<'_>, copy: LocatedTensor<'_>) -> Result<bool> {
    let elems = embedding.info.shape.iter().product::<usize>();
    let (mut raw, mut first, mut second) = (vec![], vec![], vec![]);
    for start in (0..elems).step_by(BLOCK_ELEMS) {
        for (source, block) in [(embedding, &mut first), (copy, &mut second)] {
            block.resize(BLOCK_ELEMS.min(elems - start), 0.0);
            source.read(start, &mut raw, block)?;
        }
        if first.iter().zip(&second).any(|(a, b)| a.to_bits() != b.to_bits()) {
            return Ok(true);
        }
    }
    Ok(false)
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

/// `part` in the orientation that `tensor` has, after a check of the tensor.
fn oriented(tensor: LocatedTensor<'_>, spec: &TensorSpec, part: HfPart) -> Result<HfPart> {
    let part = spec.oriented(part, &tensor.info.shape);
    check(tensor.name, tensor, &spec.part_shape(&part))?;
    if part.either_way && part.matrices().1 == spec.row_elems() {
        let cause = format_args!(
            "tensor {} has square matrices, {:?}: whether they are [out, in] or [in, out] cannot be decided; such experts are not supported",
            tensor.name, tensor.info.shape
        );
        return Err(Error::format(tensor.file.path(), cause));
    }
    Ok(part)
}

/// The error of experts that `config.json` says are in MXFP4, and that the files hold in another format.
fn not_packed(tensor: LocatedTensor<'_>) -> Error {
    let (name, dtype) = (tensor.name, tensor.info.dtype);
    let cause = format_args!("tensor {name} is {dtype}, config.json implies MXFP4; remove quantization_config from config.json");
    Error::format(tensor.file.path(), cause)
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
