//! From a directory's safetensors into the flat fp32 range.

use super::safetensors::{TensorFile, UniqueMap};
use super::{INDEX, SINGLE, position};
use crate::disk::{self, is_plain_file_name};
use crate::dtype::{Element, first_nonfinite};
use crate::error::{Error, Result};
use crate::model::shape::ModelShape;
use crate::model::tensors::{HfPart, Role, Stage, TensorSpec, TensorTable};
use crate::model_dir::ModelDir;
use ::safetensors::tensor::{Dtype, TensorInfo};
use half::{bf16, f16};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;

/// Bytes read at once, a multiple of every element; few in tests, so that small tensors have many blocks.
const READ_BYTES: usize = if cfg!(test) { 1 << 10 } else { 4 << 20 };
/// No index is larger: half a million tensors.
const INDEX_BYTES_MAX: u64 = 64 << 20;
/// The output matrix; a tied model may hold it a second time.
const LM_HEAD: &str = "lm_head.weight";
/// Buffers that old versions of `transformers` saved with the weights.
const IGNORED_SUFFIXES: [&str; 3] = [".attn.bias", ".attn.masked_bias", "rotary_emb.inv_freq"];

/// Reads the weights in `dir` into `flat`, which has the layout of `table` and its `flat_elems`. F32, BF16 and F16 are
/// widened; padding is left alone. Names and shapes are all checked before `flat` changes.
///
/// # Errors
/// Missing, damaged or lying files, and links out of the directory; missing or unexpected tensors, wrong shapes and formats, weights that
/// are not finite. Each names its file.
///
/// # Panics
/// If `flat` has another length.
pub fn load(dir: &Path, shape: &ModelShape, table: &TensorTable, flat: &mut [f32]) -> Result<()> {
    assert_eq!(flat.len(), table.flat_elems(), "flat range of the model");
    let weights = Weights::open(&ModelDir::open(dir)?)?;
    for (spec, part, source) in plan(dir, &weights, shape, table)? {
        let out = &mut flat[spec.range()];
        source.for_each_block(|start, block| scatter(spec, part, start, block, out))?;
    }
    match (table.find(Stage::Embed, Role::Wte), weights.find(LM_HEAD)) {
        (Some(wte), Some(copy)) if shape.tied => expect_tied(copy, &flat[wte.range()]),
        _ => Ok(()),
    }
}

/// Puts elements `start..` of a part's file into the tensor `out`.
fn scatter(spec: &TensorSpec, part: &HfPart, start: usize, block: &[f32], out: &mut [f32]) {
    if part.transposed {
        block.iter().zip(start..).for_each(|(&x, i)| out[position(spec, part, i)] = x);
    } else {
        let at = position(spec, part, start);
        out[at..at + block.len()].copy_from_slice(block);
    }
}

/// A second copy of the token embedding must be one: training would lose it.
fn expect_tied(copy: Source<'_>, wte: &[f32]) -> Result<()> {
    let mut same = true;
    copy.for_each_block(|start, block| {
        same &= block.iter().zip(&wte[start..]).all(|(a, b)| a.to_bits() == b.to_bits());
    })?;
    let cause = format_args!("{LM_HEAD} is not the token embedding, but config.json says that they are tied");
    if same { Ok(()) } else { Err(Error::format(copy.file.path(), cause)) }
}

/// All tensors of a directory.
struct Weights {
    files: Vec<TensorFile>,
    /// Tensor name to index in `files`.
    place: HashMap<String, usize>,
}

/// A tensor in its file.
#[derive(Clone, Copy)]
struct Source<'a> {
    name: &'a str,
    file: &'a TensorFile,
    info: &'a TensorInfo,
}

#[derive(Deserialize)]
struct Index {
    weight_map: UniqueMap<String>,
}

impl Weights {
    fn open(dir: &ModelDir) -> Result<Self> {
        let (single, index) = (dir.file(SINGLE)?, dir.file(INDEX)?);
        if single.exists() {
            let file = TensorFile::open(&single)?;
            let place = file.names().map(|name| (name.to_string(), 0)).collect();
            return Ok(Self { files: vec![file], place });
        }
        if index.exists() { Self::open_shards(dir, &index) } else { Err(no_weights(dir.path())) }
    }

    fn open_shards(dir: &ModelDir, index_path: &Path) -> Result<Self> {
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
        Ok(Self { files, place })
    }

    fn find(&self, name: &str) -> Option<Source<'_>> {
        let (name, &idx) = self.place.get_key_value(name)?;
        let file = &self.files[idx];
        Some(Source { name, file, info: file.info(name)? })
    }
}

/// There are no safetensors; weights in other formats are named with the command that converts them.
fn no_weights(dir: &Path) -> Error {
    let others = ["pytorch_model.bin", "pytorch_model.bin.index.json", "tf_model.h5", "flax_model.msgpack"];
    let Some(other) = others.into_iter().find(|name| dir.join(name).exists()) else {
        return Error::format(dir, format_args!("neither {SINGLE} nor {INDEX} is there; --init random needs none"));
    };
    let (class, name) = ("AutoModelForCausalLM", dir.display());
    let convert = format!("python -c \"from transformers import {class}; {class}.from_pretrained('{name}').save_pretrained('{name}')\"");
    Error::format(dir, format_args!("{other} is there, but only safetensors are read; write them with: {convert}"))
}

impl Source<'_> {
    /// Gives the whole tensor to `visit` in blocks: index of the first element, and the elements, widened and finite.
    fn for_each_block(&self, mut visit: impl FnMut(usize, &[f32])) -> Result<()> {
        let (begin, end) = self.info.data_offsets;
        let elem_bytes = self.info.dtype.bitsize() / 8;
        let mut raw = vec![0; READ_BYTES.min(end - begin)];
        let mut block = vec![0.0; raw.len() / elem_bytes];
        for start in (0..end - begin).step_by(READ_BYTES) {
            let raw = &mut raw[..READ_BYTES.min(end - begin - start)];
            self.file.read(self.info, start, raw)?;
            let block = &mut block[..raw.len() / elem_bytes];
            match self.info.dtype {
                Dtype::BF16 => widen::<bf16>(raw, block),
                Dtype::F16 => widen::<f16>(raw, block),
                _ => widen::<f32>(raw, block),
            }
            self.expect_finite(start / elem_bytes, block)?;
            visit(start / elem_bytes, block);
        }
        Ok(())
    }

    /// A model with one NaN learns nothing: every loss is NaN, every step skipped. `block` begins at element `start`.
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

/// Names, shapes and formats of everything, checked: which file's tensor goes into which part of which of ours.
fn plan<'a>(
    dir: &Path,
    weights: &'a Weights,
    shape: &ModelShape,
    table: &'a TensorTable,
) -> Result<Vec<(&'a TensorSpec, &'a HfPart, Source<'a>)>> {
    let (mut plan, mut missing) = (vec![], vec![]);
    let mut unexpected: BTreeSet<&str> = weights.place.keys().map(String::as_str).filter(|name| !is_ignored(name)).collect();
    if let (true, Some(copy)) = (shape.tied && unexpected.remove(LM_HEAD), weights.find(LM_HEAD)) {
        check(LM_HEAD, copy, &[shape.vocab, shape.channels])?;
    }
    for (spec, part) in table.specs().iter().flat_map(|spec| spec.parts.iter().map(move |part| (spec, part))) {
        // A bare model, saved without its head, has names without the prefix.
        let names = [Some(part.name.as_str()), part.name.strip_prefix(shape.base_prefix())];
        let Some(name) = names.into_iter().flatten().find(|name| unexpected.remove(name)) else {
            missing.push(part.name.as_str());
            continue;
        };
        if let Some(source) = weights.find(name) {
            check(name, source, &spec.part_shape(part))?;
            plan.push((spec, part, source));
        }
    }
    let path = if weights.files.len() == 1 { weights.files[0].path() } else { dir };
    let list = |names: Vec<&str>| {
        let quoted: Vec<String> = names.iter().take(3).map(|name| format!("{name:?}")).collect();
        format!("{}{}", quoted.join(", "), if names.len() > 3 { ", ..." } else { "" })
    };
    match (missing.len(), unexpected.len()) {
        (0, 0) => Ok(plan),
        (0, n) => Err(Error::format(path, format_args!("{n} tensors that the model does not have: {}", list(Vec::from_iter(unexpected))))),
        (n, _) => Err(Error::format(path, format_args!("{n} tensors are missing: {}", list(missing)))),
    }
}

fn check(name: &str, source: Source<'_>, shape: &[usize]) -> Result<()> {
    let TensorInfo { dtype, shape: found, .. } = source.info;
    if found != shape {
        return Err(Error::format(source.file.path(), format_args!("tensor {name} has shape {found:?}, config.json says {shape:?}")));
    }
    match dtype {
        Dtype::F32 | Dtype::BF16 | Dtype::F16 => Ok(()),
        _ => Err(Error::format(source.file.path(), format_args!("tensor {name} is {dtype}; only F32, BF16 and F16 are read"))),
    }
}

fn is_ignored(name: &str) -> bool {
    IGNORED_SUFFIXES.iter().any(|suffix| name.ends_with(suffix))
}
