//! Names of repositories on the hub: `org/name` or `org/name@revision`. Names of data sets may end in `:config` or `:config:split`.

use crate::disk::is_plain_file_name;
use std::fmt;

/// Default revision of a model.
const MODEL_REVISION: &str = "main";
/// Default revision of a data set: the hub's conversion to Parquet, `config/split/*.parquet`.
const DATA_REVISION: &str = "refs/convert/parquet";
const SPLIT: &str = "train";
/// File extensions of data. A path with one of these is never a repository's name.
const EXTENSIONS: [&str; 10] = ["txt", "json", "jsonl", "parquet", "bin", "gz", "zst", "csv", "arrow", "feather"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RepoKind {
    Model,
    Dataset,
}

/// One split of a data set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DataPart {
    /// Configuration of the data set. `None` selects the only one, or `default`.
    pub(super) config: Option<String>,
    pub(super) split: String,
}

/// A repository at a branch, tag or commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubName {
    pub(super) kind: RepoKind,
    pub(super) repo: String,
    pub(super) revision: String,
    /// The split of a data set. Unused for models.
    pub(super) part: DataPart,
    text: String,
}

impl HubName {
    /// Parses the name of a model; `None` if `text` does not have the form of a name.
    pub(super) fn model(text: &str) -> Option<Self> {
        Self::parse(text, text, RepoKind::Model, DataPart { config: None, split: SPLIT.into() })
    }

    /// Parses the name of a data set; `None` if `text` does not have the form of a name.
    pub(super) fn data(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let (repo, config) = (parts.next()?, parts.next());
        let part = DataPart { config: config.map(String::from), split: parts.next().unwrap_or(SPLIT).into() };
        let is_valid = parts.next().is_none() && part.config.iter().chain([&part.split]).all(|word| is_word(word));
        let is_file = EXTENSIONS.iter().any(|extension| repo.rsplit_once('.').is_some_and(|(_, end)| end == *extension));
        if is_valid && !is_file { Self::parse(text, repo, RepoKind::Dataset, part) } else { None }
    }

    fn parse(text: &str, name: &str, kind: RepoKind, part: DataPart) -> Option<Self> {
        let (repo, revision) = name.split_once('@').unwrap_or((name, kind.revision()));
        let (organisation, name) = repo.split_once('/')?;
        let is_valid = is_word(organisation) && is_word(name) && revision.split('/').all(is_plain_file_name);
        is_valid.then(|| Self { kind, repo: repo.into(), revision: revision.into(), part, text: text.into() })
    }

    /// The arguments of `hf download` for this repository.
    pub(super) fn arguments(&self) -> String {
        let Self { kind, repo, revision, .. } = self;
        let of = if *kind == RepoKind::Dataset { " --repo-type dataset" } else { "" };
        if revision == MODEL_REVISION { format!("{repo}{of}") } else { format!("{repo}{of} --revision {revision}") }
    }
}

impl RepoKind {
    fn revision(self) -> &'static str {
        match self {
            Self::Model => MODEL_REVISION,
            Self::Dataset => DATA_REVISION,
        }
    }

    /// The flag that takes names of this kind.
    pub(super) fn flag(self) -> &'static str {
        match self {
            Self::Model => "--model",
            Self::Dataset => "--data",
        }
    }

    /// The kind's name in folders of the cache and in URLs of the hub.
    pub(super) fn plural(self) -> &'static str {
        match self {
            Self::Model => "models",
            Self::Dataset => "datasets",
        }
    }
}

/// Prints the name as the user wrote it.
impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

fn is_word(word: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    word.starts_with(|c: char| c.is_ascii_alphanumeric()) && word.chars().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_has_two_words_and_may_have_a_revision() {
        for (text, repo, revision) in [
            ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "main"),
            ("meta-llama/Llama-3.1-8B@v1.0", "meta-llama/Llama-3.1-8B", "v1.0"),
            ("a/b@refs/pr/1", "a/b", "refs/pr/1"),
            ("a/b@main", "a/b", "main"),
        ] {
            let name = HubName::model(text).unwrap();
            assert_eq!((name.repo.as_str(), name.revision.as_str(), name.to_string().as_str()), (repo, revision, text));
        }
        for text in
            ["/a", "../a", "a", "a/b/c", "a/..", ".a/b", "a/b@", "a/b@../c", "a/b@c//d", "a/b c", "a/", "a b/c", "llama-8b", "a/b:c"]
        {
            assert_eq!(HubName::model(text), None, "{text}");
        }
    }

    #[test]
    fn data_may_name_a_part() {
        for (text, revision, config, split) in [
            ("a/b", DATA_REVISION, None, "train"),
            ("a/b:en", DATA_REVISION, Some("en"), "train"),
            ("a/b-2.1@v1:en:test", "v1", Some("en"), "test"),
        ] {
            let name = HubName::data(text).unwrap();
            let part = DataPart { config: config.map(String::from), split: split.into() };
            assert_eq!((name.revision.as_str(), name.part, name.kind), (revision, part, RepoKind::Dataset));
        }
        for text in ["data/a.jsonl", "data/a.txt.gz", "a/b:", "a/b::test", "a/b:c:../d", "a/b:c:d:e", "a", "./a", "/a/b"] {
            assert_eq!(HubName::data(text), None, "{text}");
        }
    }
}
