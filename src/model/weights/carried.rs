//! Tensors that training carries over: frozen tensors, and those of a multimodal model beside its text part, byte for byte, in one file. The
//! file also lists all tensors of the source in their order, so that an export can mirror the source without it.

use super::load::{ModelWeights, PartSource};
use super::safetensors::{METADATA, TensorFile};
use crate::error::{Error, Result};
use crate::model::shape::ModelShape;
use crate::model::tensors::{HfPart, Role, TensorSpec};
use crate::model_dir::ModelDir;
use ::safetensors::tensor::{Dtype, TensorInfo};
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::{HashMap, HashSet};
use std::path::Path;

/// The beginning of the header of every such file, after its length.
pub(crate) const HEAD: &str = "{\"__metadata__\":{\"superoffload\":\"carried tensors\"}";
/// The tensor of bytes that lists the source, as JSON.
const SOURCE: &str = "superoffload.source";
/// Bytes of a tensor that are in memory at once.
const PIECE_BYTES: usize = if cfg!(test) { 64 } else { 1 << 20 };
/// Maximum size of the list of the source.
const SOURCE_BYTES_MAX: usize = 256 << 20;

/// A tensor of the source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceTensor {
    /// Name in the files of the source.
    pub name: String,
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    /// The trained tensor that it is, by the name in the family's row; `None` if it is carried.
    pub trained: Option<String>,
    /// The carried table that it is, by the name in the family's row, if some of its rows are trained.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) trained_rows: Option<String>,
}

impl SourceTensor {
    fn bytes(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

impl ModelWeights {
    /// Checks that an export can mirror these files. Experts in MXFP4 cannot be trained beside frozen tensors.
    ///
    /// # Errors
    /// Tensors that do not fit the model; `Unsupported` with the name of a trained tensor in MXFP4.
    pub(crate) fn check_frozen(&self) -> Result<()> {
        if self.shape().frozen.is_empty() {
            return Ok(());
        }
        let is_trained =
            |(spec, _, source): &&(&TensorSpec, HfPart, PartSource<'_>)| !spec.frozen && matches!(source, PartSource::Mxfp4 { .. });
        match self.parts()?.iter().find(is_trained) {
            None => Ok(()),
            Some((_, part, _)) => Err(Error::Unsupported(format!(
                "{}: {} is in MXFP4 and would be trained beside frozen tensors; freeze it too, or convert the model to bfloat16 first",
                self.dir().display(),
                part.name
            ))),
        }
    }

    /// All tensors of these files in order.
    fn source(&self) -> Result<Vec<SourceTensor>> {
        let parts = self.parts()?;
        let plain = |source: &PartSource<'_>| if let PartSource::Plain(tensor) = source { Some(tensor.name.to_string()) } else { None };
        let names_of = |holds: fn(&TensorSpec) -> bool| -> HashMap<String, String> {
            let chosen = || parts.iter().filter(|(spec, ..)| !spec.frozen && holds(spec));
            let mut names: HashMap<_, _> = chosen().filter_map(|(_, part, source)| Some((plain(source)?, part.name.clone()))).collect();
            let embedding = chosen().find(|(spec, ..)| matches!(spec.role, Role::Wte | Role::WteRows));
            if let Some((copy, (_, part, _))) = self.tied_copy().zip(embedding) {
                names.insert(copy.name.to_string(), part.name.clone());
            }
            names
        };
        let whole = names_of(|spec| spec.first_token().is_none());
        let rows = names_of(|spec| spec.first_token().is_some());
        let tensor = |name: &str, TensorInfo { dtype, shape, .. }: &TensorInfo| {
            let (trained, trained_rows) = (whole.get(name).cloned(), rows.get(name).cloned());
            SourceTensor { name: name.to_string(), dtype: *dtype, shape: shape.clone(), trained, trained_rows }
        };
        Ok(self.in_order().map(|located| tensor(located.name, located.info)).collect())
    }

    /// Size of the file that [`ModelWeights::write_carried`] writes.
    ///
    /// # Errors
    /// Tensors that do not fit the model.
    pub(crate) fn carried_bytes(&self) -> Result<u64> {
        let (header, list, carried) = self.carried()?;
        Ok((header.len() + list.len() + carried.iter().map(SourceTensor::bytes).sum::<usize>()) as u64)
    }

    /// Size of the file of carried tensors of the model of `shape` in the directory `dir`; 0 if `shape` carries none, or `dir` has no weights.
    ///
    /// # Errors
    /// Errors of [`ModelWeights::open`].
    pub(crate) fn carried_bytes_in(dir: &Path, shape: &ModelShape) -> Result<u64> {
        match shape.carries_tensors() && Self::are_in(&ModelDir::open(dir)?)? {
            true => Self::open(dir, shape)?.carried_bytes(),
            false => Ok(0),
        }
    }

    /// Passes the file of carried tensors to `write`, piece by piece.
    ///
    /// # Errors
    /// A file that cannot be read; errors of `write`.
    pub(crate) fn write_carried(&self, mut write: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let (header, list, carried) = self.carried()?;
        write(&header)?;
        write(&list)?;
        for tensor in self.in_order().filter(|tensor| carried.iter().any(|carried| carried.name == tensor.name)) {
            read_pieces(tensor.file, tensor.info, &mut write)?;
        }
        Ok(())
    }

    /// The beginning of the file of carried tensors: its header and the list of the source; and the tensors that follow.
    fn carried(&self) -> Result<(Vec<u8>, Vec<u8>, Vec<SourceTensor>)> {
        let source = self.source()?;
        let list = serde_json::to_vec(&source).map_err(|e| Error::format(SOURCE, e))?;
        let carried: Vec<SourceTensor> = source.into_iter().filter(|tensor| tensor.trained.is_none()).collect();
        let entry = |dtype: Dtype, shape: &[usize], start: usize, end: usize| {
            json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]}).to_string()
        };
        let (mut text, mut end) = (format!("{HEAD},\"{SOURCE}\":{}", entry(Dtype::U8, &[list.len()], 0, list.len())), list.len());
        for tensor in &carried {
            let start = end;
            end += tensor.bytes();
            text.push_str(&format!(",{}:{}", json!(tensor.name), entry(tensor.dtype, &tensor.shape, start, end)));
        }
        text.push('}');
        text.push_str(&" ".repeat(text.len().next_multiple_of(8) - text.len()));
        Ok(([&(text.len() as u64).to_le_bytes(), text.as_bytes()].concat(), list, carried))
    }
}

/// Passes the bytes of a tensor to `write`, piece by piece.
fn read_pieces(file: &TensorFile, info: &TensorInfo, write: &mut impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
    let (bytes, mut piece) = (info.data_offsets.1 - info.data_offsets.0, Vec::new());
    for start in (0..bytes).step_by(PIECE_BYTES) {
        piece.resize(PIECE_BYTES.min(bytes - start), 0);
        file.read(info, start, &mut piece)?;
        write(&piece)?;
    }
    Ok(())
}

/// An open file of carried tensors.
pub struct CarriedTensors {
    file: TensorFile,
    source: Vec<SourceTensor>,
}

impl CarriedTensors {
    /// Opens the file at `path`.
    ///
    /// # Errors
    /// A file that cannot be read, does not hold the tensors that it lists, or lists one twice.
    pub fn open(path: &Path) -> Result<Self> {
        let file = TensorFile::open(path)?;
        let list = file.info(SOURCE).filter(|info| info.dtype == Dtype::U8 && info.shape.len() == 1 && info.shape[0] <= SOURCE_BYTES_MAX);
        let list = list.ok_or_else(|| Error::format(path, "holds no list of the source's tensors"))?;
        let mut bytes = vec![0; list.shape[0]];
        file.read(list, 0, &mut bytes)?;
        let source: Vec<SourceTensor> = serde_json::from_slice(&bytes).map_err(|e| Error::format(path, format_args!("{SOURCE}: {e}")))?;
        let fits = |tensor: &&SourceTensor| {
            let info = file.info(&tensor.name).filter(|_| tensor.name != SOURCE && tensor.name != METADATA);
            info.map_or(tensor.trained.is_some(), |info| info.dtype == tensor.dtype && info.shape == tensor.shape)
        };
        if let Some(tensor) = source.iter().find(|tensor| !fits(tensor)) {
            return Err(Error::format(path, format_args!("does not hold {:?} as it lists it", tensor.name)));
        }
        let mut names = HashSet::new();
        match source.iter().find(|tensor| !names.insert(&tensor.name)) {
            None => Ok(Self { file, source }),
            Some(tensor) => Err(Error::format(path, format_args!("lists {:?} twice", tensor.name))),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        self.file.path()
    }

    /// All tensors of the source in order.
    pub fn source(&self) -> &[SourceTensor] {
        &self.source
    }

    /// Passes the bytes of the carried tensor `name` to `write`, piece by piece.
    ///
    /// # Errors
    /// An unknown name; a file that cannot be read; errors of `write`.
    pub fn read(&self, name: &str, mut write: impl FnMut(&[u8]) -> Result<()>) -> Result<()> {
        let info = self.file.info(name).ok_or_else(|| Error::format(self.path(), format_args!("holds no tensor {name:?}")))?;
        read_pieces(&self.file, info, &mut write)
    }
}
