//! The manifest, `trainer_state.json`: its contents, its seal, and its checks.

use super::state_parts::StateParts;
use crate::disk;
use crate::error::{Error, Result};
use crate::optim::clip::ClipMemory;
use crate::optim::moments::Moments;
use crate::optim::state_array::StateArrays;
use crate::recipe::part::RunPart;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::Path;

/// Versions of the layout: 1 had no `run`; 3 has moments in another format than float32, which older readers would take for damage.
/// 4 has the state in files of several processes. 5 has 8-bit moments, whose arrays end with whole groups, in one file or several. A newer
/// one is refused.
const FORMAT_VERSIONS: [u32; 5] = [1, 2, 3, 4, 5];
/// The first version with files of several processes.
pub(super) const PARTS_VERSION: u32 = 4;
/// Bytes of `state.bin` under one checksum.
pub(super) use crate::optim::CHUNK_BYTES;
/// No manifest is larger: a terabyte of state has a million chunks of at most eleven characters each.
const MANIFEST_BYTES_MAX: u64 = 64 << 20;

pub(super) const MANIFEST: &str = "trainer_state.json";
pub(super) const STATE: &str = "state.bin";
pub(super) const MODEL: &str = "model";

/// Where training stands, apart from the tensors.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct TrainerState {
    /// Training steps done; skipped ones count, their data is used up. Names the directory.
    pub step: u64,
    /// Optimizer steps done; skipped ones do not count.
    pub optimizer_step: u64,
    /// Dynamic loss scaling.
    pub(crate) loss_scale: SavedLossScale,
    pub(crate) scheduler: Scheduler,
    /// Seed of everything random in the run.
    pub seed: u64,
    /// Where the loader stands; its own format.
    pub(crate) data_position: Value,
    /// The state of adaptive speculation, in the coordinator's own format.
    pub(crate) speculation: Value,
    /// Values that the rule of clipping keeps from step to step.
    #[serde(default, skip_serializing_if = "ClipMemory::is_empty")]
    pub(crate) clip: ClipMemory,
    /// The settings of the run, for people and for comparison at resume.
    pub settings: Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SavedLossScale {
    /// Factor on the loss.
    pub scale: f32,
    /// Steps without overflow since the scale last changed.
    pub(crate) good_steps: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Scheduler {
    /// `constant`, `linear`, `cosine`, `wsd`.
    pub name: String,
    /// Learning rate after warm-up.
    pub(crate) base_lr: f64,
    /// Steps of warm-up.
    pub(crate) warmup_steps: u64,
    /// Steps at which the schedule ends.
    pub max_steps: u64,
}

/// One tensor in `state.bin`: `elems` fp32 parameters, then as many m, then as many v, in the format of [`Manifest::moments`]. 8-bit moments
/// end with a whole [`MomentGroup`](crate::optim::int8::MomentGroup), with zeros behind the last element.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// Name in the model's table.
    pub name: String,
    pub shape: Vec<usize>,
    /// First byte in `state.bin`.
    pub offset: u64,
    /// Elements.
    pub elems: u64,
}

/// A file in `model/`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileEntry {
    /// Plain file name.
    pub name: String,
    pub bytes: u64,
    pub crc32c: u32,
}

/// Everything in `trainer_state.json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    pub(crate) format_version: u32,
    pub(crate) trainer: TrainerState,
    /// The run's model, tokenizer and data. Open: a reader keeps entries that it does not know.
    #[serde(default)]
    pub run: Map<String, Value>,
    /// The tensors, in the order of `state.bin`.
    pub tensors: Vec<TensorEntry>,
    /// Size of `state.bin`.
    pub(crate) state_bytes: u64,
    /// Checksum of every chunk of 1 MiB of `state.bin`; the last one may be shorter.
    pub(crate) state_crc32c: Vec<u32>,
    /// Files in `model/`.
    pub files: Vec<FileEntry>,
    /// How the state lies in files of several processes, where it does: tensors then have their places in `state.bin` as it would be.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) parts: Option<StateParts>,
}

#[derive(Deserialize)]
struct ManifestVersion {
    format_version: u32,
}

// The file is one JSON object: MANIFEST_HEAD, the manifest, and a seal of fixed length with the checksum of all before it.
pub(super) const MANIFEST_HEAD: &str = "{\"manifest\":";
const SEAL_BYTES: usize = 23;

fn seal(body: &[u8]) -> String {
    format!(",\n\"crc32c\":\"{:08x}\"}}\n", crc32c::crc32c(body))
}

impl Manifest {
    /// A manifest without checksums yet, of the first version that can represent its contents.
    pub(super) fn new(trainer: TrainerState, run: Map<String, Value>) -> Self {
        let format_version = moments_of(&run).map_or(3, first_version).max(2);
        Self { format_version, trainer, run, tensors: vec![], state_bytes: 0, state_crc32c: vec![], files: vec![], parts: None }
    }

    /// The state lies in files of several processes.
    pub(super) fn set_parts(&mut self, parts: StateParts) {
        (self.format_version, self.parts) = (self.format_version.max(PARTS_VERSION), Some(parts));
    }

    /// The bytes of the file, sealed.
    ///
    /// # Errors
    /// If they would not read back as they are: a number that is not finite.
    pub(super) fn encode(&self, path: &Path) -> Result<Vec<u8>> {
        let mut bytes = MANIFEST_HEAD.as_bytes().to_vec();
        serde_json::to_writer(&mut bytes, self).map_err(|e| Error::format(path, e))?;
        bytes.extend(seal(&bytes).into_bytes());
        match Self::decode(path, &bytes) {
            Ok(back) if back == *self => Ok(bytes),
            Ok(_) => Err(Error::format(path, "a value does not read back as it was written")),
            Err(e) => Err(e),
        }
    }

    /// Checks the seal, the version and every claim that can be checked without the other files.
    pub(super) fn decode(path: &Path, bytes: &[u8]) -> Result<Self> {
        let wrong = |cause: &str| Error::format(path, cause);
        let (body, found) = bytes.split_at_checked(bytes.len().wrapping_sub(SEAL_BYTES)).ok_or_else(|| wrong("truncated"))?;
        if found != seal(body).as_bytes() {
            return Err(wrong("damaged or cut short: its checksum differs"));
        }
        let json = body.strip_prefix(MANIFEST_HEAD.as_bytes()).ok_or_else(|| wrong("not a checkpoint's manifest"))?;
        let ManifestVersion { format_version } = serde_json::from_slice(json).map_err(|e| Error::format(path, e))?;
        let [oldest, .., newest] = FORMAT_VERSIONS;
        if format_version > newest {
            // A newer version is not damage: the search for a good checkpoint must not skip it.
            let path = path.display();
            return Err(Error::Unsupported(format!("{path}: format {format_version}, this build reads formats {oldest} to {newest}")));
        }
        let manifest: Self = serde_json::from_slice(json).map_err(|e| Error::format(path, e))?;
        manifest.validate().map_err(|cause| Error::format(path, cause))?;
        Ok(manifest)
    }

    /// The arrays of each tensor in `state.bin`, in order.
    pub fn arrays(&self) -> StateArrays {
        self.moments().arrays()
    }

    /// Format of m and v in `state.bin`.
    pub(crate) fn moments(&self) -> Moments {
        // Manifests that were read are validated; manifests that are written have a format.
        moments_of(&self.run).unwrap_or_default()
    }

    /// Reads and checks the manifest of checkpoint `dir`.
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let path = dir.join(MANIFEST);
        Self::decode(&path, &disk::read_small(&path, MANIFEST_BYTES_MAX)?)
    }
}

/// The first version for state with `moments` in one file.
pub(super) fn first_version(moments: Moments) -> u32 {
    match moments {
        Moments::Float32 => 1,
        Moments::Bfloat16 => 3,
        Moments::Int8 => 5,
    }
}

/// The format of moments that `run` names: float32 where it names none, as before there were others; `None` for one that is not known.
pub(super) fn moments_of(run: &Map<String, Value>) -> Option<Moments> {
    run.get(RunPart::Moments.name()).map_or(Some(Moments::Float32), |named| Moments::deserialize(named).ok())
}
