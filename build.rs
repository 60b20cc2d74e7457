//! Tells the program its features and its commit: `SUPEROFFLOAD_COMMIT` if it is set, otherwise what the clone's `.git` says. No git is run.
//! Packs the kernels by hand, and takes the generated ones as they are packed in `ptx/generated`.

use std::fs;
use std::path::{Path, PathBuf};

/// Of Zstandard. 22 takes longer and saves 0.1 % more.
const LEVEL: i32 = 19;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=SUPEROFFLOAD_COMMIT");
    let given = std::env::var("SUPEROFFLOAD_COMMIT").ok().filter(|commit| !commit.is_empty());
    let commit = given.or_else(|| head(&git_dir()?));
    let version = std::env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let version = commit.as_ref().map_or(version.clone(), |commit| format!("{version} (commit {commit})"));
    let features = features();
    let named = if features.is_empty() { "no features".into() } else { format!("features {features}") };
    println!("cargo:rustc-env=SUPEROFFLOAD_VERSION={version}");
    println!("cargo:rustc-env=SUPEROFFLOAD_LONG_VERSION={version}, {named}");
    println!("cargo:rustc-env=SUPEROFFLOAD_FEATURES={features}");
    if let Some(commit) = commit {
        println!("cargo:rustc-env=SUPEROFFLOAD_COMMIT={commit}");
    }
    if std::env::var_os("CARGO_FEATURE_CUDA").is_some() {
        let out = std::env::var_os("OUT_DIR").map(PathBuf::from).unwrap_or_default();
        pack_ptx(Path::new("ptx"), &out).unwrap_or_else(|e| panic!("pack the kernels below ptx: {e}"));
    }
}

/// Writes `NAME.ptx.zst` below `out` for each kernel in `dir` and below: packs `NAME.ptx` without comment lines, and copies `NAME.ptx.zst`.
fn pack_ptx(dir: &Path, out: &Path) -> std::io::Result<()> {
    println!("cargo:rerun-if-changed={}", dir.display());
    fs::create_dir_all(out.join(dir))?;
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            pack_ptx(&path, out)?;
        } else if path.extension().is_some_and(|extension| extension == "ptx") {
            let text = fs::read_to_string(&path)?;
            let code: String = text.split_inclusive('\n').filter(|line| !line.trim_start().starts_with("//")).collect();
            fs::write(out.join(format!("{}.zst", path.display())), zstd::encode_all(code.as_bytes(), LEVEL)?)?;
        } else if path.extension().is_some_and(|extension| extension == "zst") {
            fs::copy(&path, out.join(&path))?;
        }
    }
    Ok(())
}

/// Those that are on, by name, between commas.
fn features() -> String {
    let all = std::env::var("CARGO_CFG_FEATURE").unwrap_or_default();
    let mut named: Vec<_> = all.split(',').filter(|name| !["", "default"].contains(name)).collect();
    named.sort_unstable();
    named.join(",")
}

/// `.git` of this package, or where its file points: a worktree has a file.
fn git_dir() -> Option<PathBuf> {
    let dot_git = Path::new(&std::env::var_os("CARGO_MANIFEST_DIR")?).join(".git");
    if dot_git.is_dir() {
        return Some(dot_git);
    }
    let pointer = read(&dot_git)?;
    Some(dot_git.parent()?.join(pointer.strip_prefix("gitdir:")?.trim()))
}

/// The commit that `HEAD` names, itself or through a branch.
fn head(git_dir: &Path) -> Option<String> {
    let head = read(&git_dir.join("HEAD"))?;
    let Some(branch) = head.strip_prefix("ref: ") else { return is_commit(&head).then_some(head) };
    // Branches of a worktree are the clone's.
    let common = read(&git_dir.join("commondir")).map_or_else(|| git_dir.to_path_buf(), |dir| git_dir.join(dir));
    let loose = read(&common.join(branch));
    let commit = loose.or_else(|| {
        let packed = read(&common.join("packed-refs"))?;
        packed.lines().find_map(|line| line.strip_suffix(branch)?.strip_suffix(' ').map(str::to_string))
    })?;
    is_commit(&commit).then_some(commit)
}

fn is_commit(text: &str) -> bool {
    text.len() >= 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// A file's text, trimmed, if it is there; then a change of it is a reason to build again.
fn read(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    println!("cargo:rerun-if-changed={}", path.display());
    Some(text.trim().to_string())
}
