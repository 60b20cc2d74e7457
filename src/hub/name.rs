//! What a repository on the hub is called: `org/name`, or `org/name@revision`.

use crate::disk::is_plain_file_name;
use std::fmt;

/// The revision where none is named.
const DEFAULT_REVISION: &str = "main";

/// A repository, and a branch, tag or commit of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HubName {
    pub(super) repo: String,
    pub(super) revision: String,
}

impl HubName {
    /// The repository that `text` names, if it has the form of a name.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let (repo, revision) = text.split_once('@').unwrap_or((text, DEFAULT_REVISION));
        let (organisation, name) = repo.split_once('/')?;
        let is_valid = is_word(organisation) && is_word(name) && revision.split('/').all(is_plain_file_name);
        is_valid.then(|| Self { repo: repo.into(), revision: revision.into() })
    }
}

impl fmt::Display for HubName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { repo, revision } = self;
        if revision == DEFAULT_REVISION { f.write_str(repo) } else { write!(f, "{repo}@{revision}") }
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
    fn a_name_has_two_words_and_may_have_a_revision() {
        for (text, repo, revision) in [
            ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B", "main"),
            ("meta-llama/Llama-3.1-8B@v1.0", "meta-llama/Llama-3.1-8B", "v1.0"),
            ("a/b@refs/pr/1", "a/b", "refs/pr/1"),
            ("a/b@main", "a/b", "main"),
        ] {
            let name = HubName::parse(text).unwrap();
            assert_eq!((name.repo.as_str(), name.revision.as_str()), (repo, revision));
            assert_eq!(name.to_string(), text.trim_end_matches("@main"));
        }
        for text in ["/a", "../a", "a", "a/b/c", "a/..", ".a/b", "a/b@", "a/b@../c", "a/b@c//d", "a/b c", "a/", "a b/c", "llama-8b"] {
            assert_eq!(HubName::parse(text), None, "{text}");
        }
    }
}
