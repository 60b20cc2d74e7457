//! A model directory that `transformers` loads: original names, original layout, shards with an index.

use super::best::find_best;
use super::export_config;
use super::export_dir::ExportDir;
use super::find::use_newest;
use super::writer::write_model_file;
use crate::checkpoint::{self, Loaded};
use crate::disk::{Dir, OutFile};
use crate::dtype::{Dtype, Element};
use crate::error::{Error, Result};
use crate::model::shape::ModelShape;
use crate::model::tensors::{HfPart, TensorSpec, TensorTable};
use crate::model::weights::position;
use crate::model::weights::safetensors::METADATA;
use crate::model_dir::{CONFIG, INDEX, SINGLE};
use half::{bf16, f16};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Default limit of one shard: 5 GB.
pub(crate) const MAX_SHARD_BYTES: u64 = 5_000_000_000;
/// Elements narrowed and written at once; few in tests, so that small tensors have many blocks.
const WRITE_ELEMS: usize = if cfg!(test) { 100 } else { 1 << 18 };

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Options {
    /// Format of the weights; `None`: the one of `config.json`, or float32 if it has none.
    pub dtype: Option<Dtype>,
    /// A shard holds at most this many bytes of tensors, or one tensor.
    pub(crate) max_shard_bytes: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self { dtype: None, max_shard_bytes: MAX_SHARD_BYTES }
    }
}

/// The result of [`export_checkpoint`].
#[derive(Debug)]
pub(crate) struct Exported {
    pub checkpoint: PathBuf,
    pub step: u64,
    /// A line for each newer checkpoint that was damaged, and for each limit of the file system.
    pub warnings: Vec<String>,
}

/// Writes a model directory: `model_files` (`config.json` among them, which decides names and shapes) and the weights
/// that `read` gives, one tensor of the table at a time into a buffer of its length. The directory is written beside
/// and renamed. Returns a warning about limits of the file system.
///
/// # Errors
/// `out_dir` exists and is not an empty directory, or is a link; a `config.json` that is missing or not supported; an error that `read`
/// reports; a file cannot be written.
pub(crate) fn export(
    out_dir: &Path,
    model_files: &[(String, Vec<u8>)],
    options: Options,
    read: impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<Option<String>> {
    let place = ExportDir::open(out_dir)?;
    let mut config = Config::parse(&out_dir.join(CONFIG), model_files)?;
    let dtype = config.resolve_dtype(options.dtype)?;
    export_config::add_old_names(&mut config.map);
    let mut tmp = place.begin()?;
    let dir = tmp.dir();
    for (name, bytes) in model_files.iter().filter(|(name, _)| name != CONFIG) {
        write_model_file(dir, name, bytes)?;
    }
    dir.write_file(CONFIG, &pretty(&Value::Object(config.map)))?;
    let table = TensorTable::new(&config.shape);
    write_weights(dir, &shards(&table, dtype, options.max_shard_bytes), dtype, read)?;
    place.publish(&mut tmp)
}

/// Exports a checkpoint: `dir` itself, or the newest checkpoint in `dir` whose parameters and model files are good. Reads nothing else of a
/// checkpoint, so damage in the optimizer's moments is not detected.
///
/// # Errors
/// No good checkpoint; otherwise as [`export`].
pub(crate) fn export_checkpoint(dir: &Path, out_dir: &Path, options: Options) -> Result<Exported> {
    let (checkpoint, written, warnings) = use_newest(dir, |path| export_one(path, out_dir, options))?;
    Ok(Exported { step: written.step, checkpoint, warnings: warnings.into_iter().chain(written.warning).collect() })
}

/// Exports the best checkpoint of the output directory `dir`, as its newest checkpoint names it.
///
/// # Errors
/// Errors of [`find_best`]; `Format` if the best checkpoint is gone or damaged; otherwise as [`export`].
pub(crate) fn export_best(dir: &Path, out_dir: &Path, options: Options) -> Result<Exported> {
    let best = find_best(dir)?;
    let written = export_one(&best.path, out_dir, options)?.map_err(|fault| best.fault(dir, &fault))?;
    Ok(Exported { step: written.step, checkpoint: best.path, warnings: best.warnings.into_iter().chain(written.warning).collect() })
}

/// Names and contents of the files of a model.
type ModelFiles = Vec<(String, Vec<u8>)>;

/// The result of [`export_one`].
struct WrittenExport {
    step: u64,
    warning: Option<String>,
}

/// Exports the checkpoint at `path`. The inner error is a fault of the checkpoint, and the outer error is that of another file.
fn export_one(path: &Path, out_dir: &Path, options: Options) -> Result<Result<WrittenExport>> {
    let (mut loaded, model_files) = match open_model(path) {
        Ok(opened) => opened,
        Err(fault) => return Ok(Err(fault)),
    };
    let mut is_faulty = false;
    let written = export(out_dir, &model_files, options, |spec, out| loaded.read_params(&spec.name, out).inspect_err(|_| is_faulty = true));
    match written {
        Ok(warning) => Ok(Ok(WrittenExport { step: loaded.manifest().trainer.step, warning })),
        Err(fault) if is_faulty => Ok(Err(fault)),
        Err(failure) => Err(failure),
    }
}

/// The checkpoint at `path` and its model files, which describe its tensors.
fn open_model(path: &Path) -> Result<(Loaded, ModelFiles)> {
    let loaded = checkpoint::open(path)?;
    let model_files = loaded.read_model_files()?;
    expect_model(&loaded, path, &model_files)?;
    Ok((loaded, model_files))
}

fn expect_model(loaded: &Loaded, dir: &Path, model_files: &[(String, Vec<u8>)]) -> Result<()> {
    let table = TensorTable::new(&Config::parse(&dir.join(CONFIG), model_files)?.shape);
    loaded.expect_tensors(table.specs().iter().map(|spec| (spec.name.as_str(), spec.shape.as_slice())))
}

/// A `config.json` and the model shape parsed from it.
struct Config {
    path: PathBuf,
    map: Map<String, Value>,
    shape: ModelShape,
}

impl Config {
    fn parse(path: &Path, model_files: &[(String, Vec<u8>)]) -> Result<Self> {
        let wrong = |cause: String| Error::format(path, cause);
        let file = model_files.iter().find(|(name, _)| name == CONFIG).ok_or_else(|| wrong("missing".into()))?;
        let text = std::str::from_utf8(&file.1).map_err(|e| wrong(e.to_string()))?;
        let shape = ModelShape::parse(text, path)?;
        let mut map: Map<String, Value> = serde_json::from_str(text).map_err(|e| wrong(e.to_string()))?;
        // Weights that were quantized in the source are exported unquantized.
        map.remove("quantization_config");
        Ok(Self { path: path.to_path_buf(), map, shape })
    }

    /// The format to write; the configuration is updated to it.
    fn resolve_dtype(&mut self, wanted: Option<Dtype>) -> Result<Dtype> {
        let mut keys = vec!["dtype", "torch_dtype"];
        keys.retain(|&key| self.map.get(key).is_some_and(|value| !value.is_null()));
        let message = match (wanted, keys.first()) {
            (Some(dtype), _) => Value::from(dtype.to_string()),
            (None, Some(&key)) => self.map[key].clone(),
            (None, None) => Value::from("float32"),
        };
        let known = serde_json::from_value(message.clone()).ok().filter(|dtype: &Dtype| *dtype != Dtype::Int32 && !dtype.is_fp8());
        let dtype: Dtype = known.ok_or_else(|| Error::Unsupported(format!("{}: weights of dtype {message}", self.path.display())))?;
        // Every version of transformers reads the older name.
        for key in if keys.is_empty() { vec!["torch_dtype"] } else { keys } {
            self.map.insert(key.into(), Value::from(dtype.to_string()));
        }
        Ok(dtype)
    }
}

fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}

/// A Hugging Face tensor to write.
type Item<'a> = (&'a TensorSpec, HfPart);

/// All tensors in forward order, divided into shards. Parts of one of ours are neighbours, so that it is read once.
fn shards(table: &TensorTable, dtype: Dtype, max_shard_bytes: u64) -> Vec<Vec<Item<'_>>> {
    let mut shards: Vec<Vec<Item>> = vec![];
    let mut shard_bytes = 0;
    for item in table.specs().iter().rev().flat_map(|spec| spec.parts().map(move |part| (spec, part))) {
        let bytes = item_bytes(&item, dtype) as u64;
        match shards.last_mut() {
            Some(shard) if shard_bytes + bytes <= max_shard_bytes => shard.push(item),
            _ => {
                shards.push(vec![item]);
                shard_bytes = 0;
            }
        }
        shard_bytes += bytes;
    }
    shards
}

fn item_bytes((spec, part): &Item<'_>, dtype: Dtype) -> usize {
    part.rows * spec.row_elems() * dtype.bytes()
}

fn write_weights(
    dir: &Dir,
    shards: &[Vec<Item<'_>>],
    dtype: Dtype,
    mut read: impl FnMut(&TensorSpec, &mut [f32]) -> Result<()>,
) -> Result<()> {
    let (mut weight_map, mut total_bytes) = (Map::new(), 0);
    let (mut tensor, mut held) = (vec![], None);
    for (shard, number) in shards.iter().zip(1..) {
        let name = if shards.len() == 1 { SINGLE.into() } else { format!("model-{number:05}-of-{:05}.safetensors", shards.len()) };
        let mut file = dir.create_file(&name)?;
        file.write(&header(shard, dtype))?;
        for item in shard {
            let (spec, part) = item;
            if held != Some(spec.index) {
                tensor.resize(spec.elems(), 0.0);
                read(spec, &mut tensor)?;
                held = Some(spec.index);
            }
            write_part(&mut file, item, &tensor, dtype)?;
            weight_map.insert(part.name.clone(), Value::from(name.as_str()));
            total_bytes += item_bytes(item, dtype);
        }
        file.sync()?;
    }
    let index = json!({"metadata": {"total_size": total_bytes}, "weight_map": weight_map});
    if shards.len() > 1 { dir.write_file(INDEX, &pretty(&index)).map(drop) } else { Ok(()) }
}

/// The length, then the JSON, padded so that the tensors are aligned.
fn header(shard: &[Item<'_>], dtype: Dtype) -> Vec<u8> {
    let code = match dtype {
        Dtype::Bfloat16 => "BF16",
        Dtype::Float16 => "F16",
        _ => "F32",
    };
    let (mut map, mut start) = (Map::new(), 0);
    map.insert(METADATA.into(), json!({"format": "pt"}));
    for item in shard {
        let ((spec, part), end) = (item, start + item_bytes(item, dtype));
        map.insert(part.name.clone(), json!({"dtype": code, "shape": spec.part_shape(part), "data_offsets": [start, end]}));
        start = end;
    }
    let mut text = Value::Object(map).to_string();
    text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
    [&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat()
}

fn write_part(file: &mut OutFile, (spec, part): &Item<'_>, tensor: &[f32], dtype: Dtype) -> Result<()> {
    let elems = part.rows * spec.row_elems();
    for start in (0..elems).step_by(WRITE_ELEMS) {
        let values = (start..elems.min(start + WRITE_ELEMS)).map(|i| tensor[position(spec, part, i)]);
        match dtype {
            Dtype::Bfloat16 => write_block::<bf16>(file, values)?,
            Dtype::Float16 => write_block::<f16>(file, values)?,
            _ => write_block::<f32>(file, values)?,
        }
    }
    Ok(())
}

fn write_block<E: Element>(file: &mut OutFile, values: impl Iterator<Item = f32>) -> Result<()> {
    let block: Vec<E> = values.map(E::from_f32).collect();
    file.write(bytemuck::cast_slice(&block))
}
