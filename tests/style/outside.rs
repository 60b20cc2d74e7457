//! Packages outside the workspace: the extension module and the fuzzers. No build of the workspace compiles them, so that this file checks
//! the names that they import, and their lock files.

use super::floors::{tokens, uses};
use std::fs;
use std::path::Path;

const PACKAGES: [&str; 2] = ["packaging/torch", "fuzz"];
/// Folders of their sources.
const FOLDERS: [&str; 3] = ["packaging/torch/src", "fuzz", "fuzz/fuzz_targets"];

fn text(path: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).unwrap_or_else(|e| panic!("read {path}: {e}"))
}

/// The tokens between the braces of `mod name`.
fn module<'a>(tokens: &'a [String], name: &str) -> Option<&'a [String]> {
    let start = tokens.windows(3).position(|three| three[0] == "mod" && three[1] == name && three[2] == "{")? + 3;
    let mut depth = 1;
    let length = tokens[start..].iter().position(|token| {
        depth += i32::from(token == "{") - i32::from(token == "}");
        depth == 0
    })?;
    Some(&tokens[start..start + length])
}

/// Imports of `source` that `internals` does not have.
fn missing(source: &str, internals: &str) -> Vec<String> {
    let internals = tokens(internals);
    let exists = |path: &[String]| {
        let (name, modules) = path.split_last()?;
        let at = modules.iter().try_fold(&internals[..], |at, part| module(at, part))?;
        at.contains(name).then_some(())
    };
    let imported = uses(&tokens(source)).into_iter().map(|found| found.path);
    let internal = imported.filter(|path| path.starts_with(&["superoffload".to_string(), "internals".to_string()]));
    internal.filter(|path| exists(&path[2..]).is_none()).map(|path| path.join("::")).collect()
}

#[test]
fn their_imports_exist() {
    let internals = text("src/internals.rs");
    for folder in FOLDERS {
        let entries = fs::read_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(folder)).unwrap();
        let files = entries.map(|entry| entry.unwrap().path()).filter(|path| path.extension().is_some_and(|name| name == "rs"));
        let sources: Vec<_> = files.map(|file| (fs::read_to_string(&file).unwrap(), file)).collect();
        assert!(!sources.is_empty(), "{folder} has no sources");
        for (source, file) in sources {
            assert_eq!(missing(&source, &internals), Vec::<String>::new(), "{}: not in src/internals.rs", file.display());
        }
    }
}

#[test]
fn a_missing_import_is_found() {
    let internals = "pub mod host { pub use crate::host::homes::WorkerNodes; pub mod deep { pub use crate::a::Inner; } } pub mod data { pub use crate::b::Homes; }";
    let found = |source: &str| missing(source, internals);
    assert_eq!(found("use superoffload::internals::host::{WorkerNodes, deep::Inner};\nuse std::fs;"), Vec::<String>::new());
    assert_eq!(found("use superoffload::internals::host::{Homes, WorkerNodes};"), ["superoffload::internals::host::Homes"]);
    assert_eq!(found("use superoffload::internals::disk::Lock;"), ["superoffload::internals::disk::Lock"]);
}

#[test]
fn their_lock_files_have_the_engines_dependencies() {
    let manifest: toml::Table = text("Cargo.toml").parse().unwrap();
    let is_optional = |value: &toml::Value| value.get("optional").and_then(toml::Value::as_bool) == Some(true);
    let needed = manifest["dependencies"].as_table().unwrap().iter().filter(|(_, value)| !is_optional(value));
    let needed: Vec<&String> = needed.map(|(name, _)| name).collect();
    for package in PACKAGES {
        let lock: toml::Table = text(&format!("{package}/Cargo.lock")).parse().unwrap();
        let engine = lock["package"].as_array().unwrap().iter().find(|entry| entry["name"].as_str() == Some("superoffload")).unwrap();
        let locked: Vec<&str> =
            engine["dependencies"].as_array().unwrap().iter().filter_map(|name| name.as_str()?.split(' ').next()).collect();
        for name in &needed {
            assert!(
                locked.contains(&name.as_str()),
                "{package}/Cargo.lock lacks {name}: run `cargo check --manifest-path {package}/Cargo.toml`"
            );
        }
    }
}
