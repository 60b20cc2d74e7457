//! The file list of a repository, and the selection of the files to download.

use super::cache::{is_commit, one_of};
use super::name::DataPart;
use crate::disk::is_plain_file_name;
use crate::model_dir::{ADDITIONAL_TEMPLATES, CONFIG, INDEX, SINGLE};
use serde::Deserialize;
use sha1::Sha1;
use sha2::{Digest, Sha256};
use std::collections::BTreeSet;

/// The files of a repository at one commit, as the hub's API lists them.
#[derive(Deserialize)]
pub(super) struct HubListing {
    #[serde(rename = "sha")]
    pub(super) commit: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    #[serde(rename = "rfilename")]
    name: String,
    size: Option<u64>,
    #[serde(rename = "blobId")]
    blob: Option<String>,
    lfs: Option<LargeFile>,
}

#[derive(Deserialize)]
struct LargeFile {
    sha256: String,
    size: u64,
}

/// A file to download.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemoteFile {
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) checksum: Checksum,
}

/// Checksum of a file in hexadecimal. It is also the name of the file's blob in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Checksum {
    Sha256(String),
    /// SHA-1 of the git blob.
    Git(String),
}

/// A checksum over the bytes received so far.
pub(super) enum ChecksumSoFar {
    Sha256(Box<Sha256>),
    Git(Box<Sha1>),
}

impl HubListing {
    /// Parses the listing in `json` and rejects unsafe file names.
    ///
    /// # Errors
    /// A description of the problem.
    pub(super) fn parse(json: &[u8]) -> Result<Self, String> {
        let listing: Self = serde_json::from_slice(json).map_err(|e| format!("its list of files: {e}"))?;
        if !is_commit(&listing.commit) {
            return Err(format!("its list of files: no commit: {:?}", listing.commit));
        }
        let unsafe_name = listing.siblings.iter().find(|sibling| !sibling.name.split('/').all(is_plain_file_name));
        if let Some(sibling) = unsafe_name {
            Err(format!("its list of files: {:?} is not a safe name", sibling.name))?;
        }
        Ok(listing)
    }

    /// The files of a model to download. Pickle files and code are never selected.
    ///
    /// # Errors
    /// A description of the missing file.
    pub(super) fn model(&self, with_weights: bool) -> Result<Vec<RemoteFile>, String> {
        let companions = self.siblings.iter().filter(|sibling| is_companion(&sibling.name));
        let weights = self.weights();
        if !self.siblings.iter().any(|sibling| sibling.name == CONFIG) {
            return Err("it has no config.json".into());
        }
        if with_weights && weights.is_empty() {
            return Err(format!("it has neither {SINGLE} nor {INDEX}, and other weights are not read"));
        }
        companions.chain(weights.into_iter().filter(|_| with_weights)).map(Sibling::file).collect()
    }

    /// The files of one split of a data set, `config/split/*.parquet`, and their folder.
    ///
    /// # Errors
    /// A description of the missing configuration or split.
    pub(super) fn data(&self, DataPart { config, split }: &DataPart) -> Result<(Vec<RemoteFile>, String), String> {
        let folder = |sibling: &'_ Sibling| {
            sibling.name.rsplit_once('/').filter(|(_, file)| file.ends_with(".parquet")).map(|(dir, _)| dir.to_string())
        };
        let folders: BTreeSet<String> = self.siblings.iter().filter_map(folder).filter(|dir| dir.split('/').count() == 2).collect();
        let configs: BTreeSet<String> = folders.iter().filter_map(|dir| Some(dir.split_once('/')?.0.to_string())).collect();
        let Some(wanted) = config.clone().or_else(|| one_of(configs.into_iter())).map(|config| format!("{config}/{split}")) else {
            return Err(format!("which configuration? it has {}", known(&folders)));
        };
        let files: Vec<_> = self
            .siblings
            .iter()
            .filter(|sibling| folder(sibling).as_ref() == Some(&wanted))
            .map(Sibling::file)
            .collect::<Result<_, _>>()?;
        if files.is_empty() { Err(format!("it has no {wanted}, but {}", known(&folders))) } else { Ok((files, wanted)) }
    }

    /// The weight files with the names that the loader reads. Some repositories hold the same weights twice, as `consolidated.safetensors`.
    fn weights(&self) -> Vec<&Sibling> {
        let has = |name| self.siblings.iter().any(|sibling| sibling.name == name);
        let is_shard = |name: &str| name.starts_with("model") && name.ends_with(".safetensors") && !name.contains('/');
        let is_wanted = |name: &str| if has(SINGLE) { name == SINGLE } else { has(INDEX) && (name == INDEX || is_shard(name)) };
        self.siblings.iter().filter(|sibling| is_wanted(&sibling.name)).collect()
    }
}

/// The available configurations and splits, in the notation of `--data`.
fn known(folders: &BTreeSet<String>) -> String {
    let names: Vec<_> = folders.iter().take(20).map(|dir| format!(":{}", dir.replace('/', ":"))).collect();
    if names.is_empty() { "no config/split/*.parquet at all".into() } else { names.join(", ") }
}

/// Whether a file belongs to the model's configuration, tokenizer or chat template.
fn is_companion(name: &str) -> bool {
    let is_text = [".json", ".jinja", ".txt", ".model"].iter().any(|end| name.ends_with(end));
    let begins = ["tokenizer", "chat_template"].iter().any(|begin| name.starts_with(begin));
    let names = ["config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"];
    let of_media = [
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
        "tekken.json",
        "params.json",
        "configuration.json",
    ];
    let additional = name.strip_prefix(ADDITIONAL_TEMPLATES).and_then(|rest| rest.strip_prefix('/'));
    match additional {
        Some(template) => template.ends_with(".jinja") && !template.contains('/'),
        None => !name.contains('/') && (names.contains(&name) || of_media.contains(&name) || begins && is_text),
    }
}

impl Sibling {
    fn file(&self) -> Result<RemoteFile, String> {
        let is_hex = |text: &str, digits| text.len() == digits && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let of = |bytes, checksum| Ok(RemoteFile { name: self.name.clone(), bytes, checksum });
        match (&self.lfs, &self.blob, self.size) {
            (Some(LargeFile { sha256, size }), _, _) if is_hex(sha256, 64) => of(*size, Checksum::Sha256(sha256.to_ascii_lowercase())),
            (None, Some(blob), Some(size)) if is_hex(blob, 40) => of(size, Checksum::Git(blob.to_ascii_lowercase())),
            _ => Err(format!("its list of files: {} has no size or checksum", self.name)),
        }
    }
}

impl Checksum {
    pub(super) fn hex(&self) -> &str {
        match self {
            Self::Sha256(hex) | Self::Git(hex) => hex,
        }
    }

    /// Starts the checksum of a file of `bytes` bytes.
    pub(super) fn begin(&self, bytes: u64) -> ChecksumSoFar {
        match self {
            Self::Sha256(_) => ChecksumSoFar::Sha256(Box::default()),
            Self::Git(_) => ChecksumSoFar::Git(Box::new(Sha1::new_with_prefix(format!("blob {bytes}\0")))),
        }
    }
}

impl ChecksumSoFar {
    pub(super) fn update(&mut self, bytes: &[u8]) {
        match self {
            Self::Sha256(sum) => sum.update(bytes),
            Self::Git(sum) => sum.update(bytes),
        }
    }

    /// The checksum in hexadecimal.
    pub(super) fn finish(self) -> String {
        let digest = match self {
            Self::Sha256(sum) => sum.finalize().to_vec(),
            Self::Git(sum) => sum.finalize().to_vec(),
        };
        digest.iter().map(|byte| format!("{byte:02x}")).collect()
    }
}
