//! Crates have the same features in all commands that documents name, so that the engine is compiled once for programs and tests.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

/// Crates with their features, as Cargo resolves them for `args`.
fn crates(args: &[&str]) -> BTreeSet<String> {
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["tree", "--offline", "--locked", "--prefix", "none", "--format", "{p} [{f}]"]).args(args);
    let tree = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).output().unwrap();
    assert!(tree.status.success(), "{}", String::from_utf8_lossy(&tree.stderr));
    // A crate that is listed a second time has a mark.
    String::from_utf8(tree.stdout).unwrap().lines().map(|line| line.trim_end_matches(" (*)").to_string()).collect()
}

#[test]
fn the_engine_is_compiled_once_for_programs_and_tests() {
    // An emulated machine has the tests without Cargo.
    if !Path::new(env!("CARGO")).exists() {
        return;
    }
    let tests = crates(&["--workspace", "--edges", "normal,build,dev"]);
    assert!(tests.iter().any(|line| line.starts_with("nix v")), "{tests:?}");
    for programs in [&["--workspace"][..], &["--package", "superoffload"]] {
        let others: Vec<_> = crates(&[programs, &["--edges", "normal,build"]].concat()).difference(&tests).cloned().collect();
        assert!(others.is_empty(), "add the features that tests turn on to Cargo.toml: {programs:?} builds {others:#?}");
    }
}
