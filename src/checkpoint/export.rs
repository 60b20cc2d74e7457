//! A model directory that `transformers` loads: original names, original layout, shards with an index.

use super::best::find_best;
use super::export_config;
use super::export_dir::ExportDir;
use super::find::use_newest;
use super::writer::write_model_file;
use super::{carried, export_tensors};
use crate::checkpoint::{self, Loaded};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::model::shape::ModelShape;
use crate::model::tensors::{TensorSpec, TensorTable};
use crate::model::weights::carried::CarriedTensors;
use crate::model_dir::CONFIG;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// Default limit of one shard: 5 GB.
pub(crate) const MAX_SHARD_BYTES: u64 = 5_000_000_000;

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

/// A model to export.
pub(crate) struct Exportable {
    /// Names and contents of its files, `config.json` among them.
    pub(crate) files: ModelFiles,
    pub(crate) shape: ModelShape,
    /// Tensors that the source has beside the trained tensors, if tensors are frozen or the model is the text part of a multimodal one.
    pub(crate) carried: Option<CarriedTensors>,
}

/// Writes a model directory: the files of `model`, and the weights that `read` gives on another thread, one tensor of the table at a time into a
/// buffer of its length. The directory of a model with carried tensors mirrors the source: names, order and configuration are those of the source, and
/// carried tensors have the bytes of the source. The directory is written beside and renamed. Returns a warning about limits of the file system.
///
/// # Errors
/// `out_dir` exists and is not an empty directory, or is a link; a `config.json` that is missing or not supported; carried tensors that are
/// missing or do not fit the model; an error that `read` reports; a file cannot be written.
pub(crate) fn export(
    out_dir: &Path,
    model: &Exportable,
    options: Options,
    read: impl FnMut(&TensorSpec, &mut [f32]) -> Result<()> + Send,
) -> Result<Option<String>> {
    let place = ExportDir::open(out_dir)?;
    let table = TensorTable::new(&model.shape);
    let (config, items) = match &model.carried {
        Some(carried) => (None, export_tensors::of_source(carried, &table, options.dtype)?),
        None if model.shape.carries_tensors() => {
            return Err(Error::format(out_dir.join(CONFIG), "describes a model with tensors that are not trained and not known"));
        }
        None => {
            let mut config = Config::parse(&out_dir.join(CONFIG), model)?;
            let dtype = config.resolve_dtype(options.dtype)?;
            export_config::add_old_names(&mut config.map);
            (Some(export_config::pretty(&Value::Object(config.map))), export_tensors::of_table(&table, dtype))
        }
    };
    let mut tmp = place.begin()?;
    let dir = tmp.dir();
    for (name, bytes) in &model.files {
        let bytes = config.as_ref().filter(|_| name == CONFIG).unwrap_or(bytes);
        write_model_file(dir, name, bytes)?;
    }
    export_tensors::write(dir, items, options.max_shard_bytes, read)?;
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
pub(crate) type ModelFiles = Vec<(String, Vec<u8>)>;

/// The result of [`export_one`].
struct WrittenExport {
    step: u64,
    warning: Option<String>,
}

/// Exports the checkpoint at `path`. The inner error is a fault of the checkpoint, and the outer error is that of another file.
fn export_one(path: &Path, out_dir: &Path, options: Options) -> Result<Result<WrittenExport>> {
    let (mut loaded, model) = match open_model(path) {
        Ok(opened) => opened,
        Err(fault) => return Ok(Err(fault)),
    };
    let carried = if model.shape.carries_tensors() { carried::open(&loaded)? } else { None };
    let model = Exportable { carried, ..model };
    let mut is_faulty = false;
    let written = export(out_dir, &model, options, |spec, out| loaded.read_params(&spec.name, out).inspect_err(|_| is_faulty = true));
    match written {
        Ok(warning) => Ok(Ok(WrittenExport { step: loaded.manifest().trainer.step, warning })),
        Err(fault) if is_faulty => Ok(Err(fault)),
        Err(failure) => Err(failure),
    }
}

/// The checkpoint at `path` and its model, whose files describe its tensors.
fn open_model(path: &Path) -> Result<(Loaded, Exportable)> {
    let loaded = checkpoint::open(path)?;
    let files = loaded.read_model_files()?;
    let shape = loaded.as_trained(parse_shape(&path.join(CONFIG), &files)?)?;
    let table = TensorTable::new(&shape);
    loaded.expect_tensors(table.specs().iter().map(|spec| (spec.name.as_str(), spec.shape.as_slice())))?;
    Ok((loaded, Exportable { files, shape, carried: None }))
}

/// The text of `config.json` among `files`; `path` is for messages.
fn config_text<'a>(path: &Path, files: &'a ModelFiles) -> Result<&'a str> {
    let file = files.iter().find(|(name, _)| name == CONFIG).ok_or_else(|| Error::format(path, "missing"))?;
    std::str::from_utf8(&file.1).map_err(|e| Error::format(path, e))
}

/// The shape that `config.json` among `files` describes.
pub(crate) fn parse_shape(path: &Path, files: &ModelFiles) -> Result<ModelShape> {
    ModelShape::parse(config_text(path, files)?, path)
}

/// A `config.json` that is to be written.
struct Config {
    path: PathBuf,
    map: Map<String, Value>,
}

impl Config {
    fn parse(path: &Path, model: &Exportable) -> Result<Self> {
        let text = config_text(path, &model.files)?;
        let mut map: Map<String, Value> = serde_json::from_str(text).map_err(|e| Error::format(path, e))?;
        // Weights that were quantized in the source are exported unquantized.
        map.remove("quantization_config");
        if ModelShape::parse(text, path)?.tied != model.shape.tied {
            map.insert("tie_word_embeddings".into(), Value::from(model.shape.tied));
        }
        Ok(Self { path: path.to_path_buf(), map })
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
        let known =
            serde_json::from_value(message.clone()).ok().filter(|dtype| matches!(dtype, Dtype::Float32 | Dtype::Bfloat16 | Dtype::Float16));
        let dtype: Dtype = known.ok_or_else(|| Error::Unsupported(format!("{}: weights of dtype {message}", self.path.display())))?;
        // Every version of transformers reads the older name.
        for key in if keys.is_empty() { vec!["torch_dtype"] } else { keys } {
            self.map.insert(key.into(), Value::from(dtype.to_string()));
        }
        Ok(dtype)
    }
}
