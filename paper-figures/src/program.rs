//! The programs that produce lines: their command lines and their output.
//!
//! Programs run in the folder that contains all figures, so that paths of models are the same for every figure.

use crate::config::{Flags, Program};
use crate::error::{Error, Result};
use crate::{lines, parameters, timeline, training, weight_flow};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Folders of the programs and of the figures.
#[derive(Clone, Debug)]
pub struct Programs {
    /// Folder of the binaries.
    pub binaries: PathBuf,
    /// Folder of the figures.
    pub figures: PathBuf,
}

impl Programs {
    /// Runs a program once and returns its lines.
    ///
    /// # Errors
    /// An error if the program is missing, fails, or prints anything except JSON lines.
    pub fn lines(&self, program: Program, flags: &Flags) -> Result<Vec<Value>> {
        let mut lines = self.call(program, flags)?;
        lines.iter_mut().for_each(plain_kernel);
        Ok(lines)
    }

    /// Refuses to record measurements that cannot be repeated, if the program has no commit in its version or if the sources have changed
    /// since.
    ///
    /// # Errors
    /// `Usage` with the remedy.
    pub fn check_recordable(&self) -> Result<()> {
        let program = self.binaries.join("superoffload");
        let version = output(Command::new(&program).arg("--version"))?;
        if !version.contains("(commit ") {
            let cause = "does not know its commit; build it in a clone, or with SUPEROFFLOAD_COMMIT set";
            return Err(Error::Usage(format!("--record: {} {cause}", program.display())));
        }
        // Without git, or outside a clone, the check cannot detect changes.
        let mut git = Command::new("git");
        git.current_dir(&self.figures).args(["status", "--porcelain", "--", ":/", ":/!paper-figures/*/*"]);
        let changed = output(&mut git).unwrap_or_default();
        match changed.lines().next() {
            None => Ok(()),
            Some(first) => Err(Error::Usage(format!("--record: the sources are not those of the commit ({}); commit first", first.trim()))),
        }
    }

    fn call(&self, program: Program, flags: &Flags) -> Result<Vec<Value>> {
        let (features, flags) = without_features(flags);
        let binaries = features.map_or_else(|| Ok(self.binaries.clone()), |features| self.build(&features))?;
        let call = |program: &str, words: &[&str]| self.command(&binaries.join(program), words, &flags);
        let superoffload = |words: &[&str]| call("superoffload", words);
        match program {
            Program::BenchStep => print(&mut superoffload(&["bench", "step"])),
            Program::BenchTimeline => traced(&mut superoffload(&["bench", "step"])),
            Program::Simulate => print(&mut superoffload(&["simulate", "--json"])),
            Program::SimulateTimeline => traced(&mut superoffload(&["simulate", "--json"])),
            Program::Plan => print(&mut superoffload(&["plan", "--json"])),
            Program::Train => trained(&mut superoffload(&["train", "--digest"])),
            Program::HostAdam => print(&mut call("host_adam", &[])),
            Program::HostFacts => print(&mut call("host_facts", &[])),
            Program::DeviceFacts => print(&mut call("device_facts", &[])),
            Program::InverseError => print(&mut call("inverse_error", &[])),
            Program::WeightFlow => {
                weight_flow::line(&flags).map(|line| vec![line]).map_err(|cause| Error::Program { command: "weight-flow".into(), cause })
            }
            Program::Parameters => parameters::line(&self.figures, &flags).map(|line| vec![line]),
        }
    }

    /// Builds `superoffload` with exactly `features`, in a separate target folder, in which cargo reuses artifacts between builds.
    fn build(&self, features: &str) -> Result<PathBuf> {
        let target = self.figures.join("../target/builds");
        let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        cargo.current_dir(&self.figures).args(["build", "--release", "--package", "superoffload", "--bin", "superoffload"]);
        output(cargo.args(["--no-default-features", "--features", features, "--target-dir"]).arg(&target))?;
        Ok(target.join("release"))
    }

    /// Returns the command `program words --flag value ...`. `true` passes a flag without a value; `false` and an empty string omit the
    /// flag.
    fn command(&self, program: &Path, words: &[&str], flags: &Flags) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.figures).args(words);
        for (flag, value) in flags {
            match value {
                toml::Value::Boolean(false) => &mut command,
                toml::Value::String(value) if value.is_empty() => &mut command,
                toml::Value::Boolean(true) => command.arg(format!("--{flag}")),
                value => command.arg(format!("--{flag}")).arg(lines::plain(value)),
            };
        }
        command
    }
}

/// Separates the features of the build from the flags of the program.
fn without_features(flags: &Flags) -> (Option<String>, Flags) {
    let mut flags = flags.clone();
    (flags.remove("features").map(|features| lines::plain(&features)), flags)
}

/// Runs a program and returns its standard output.
fn output(command: &mut Command) -> Result<String> {
    let failed = |command: &Command, cause: String| {
        let words = std::iter::once(command.get_program()).chain(command.get_args()).map(|word| word.to_string_lossy());
        Error::Program { command: words.collect::<Vec<_>>().join(" "), cause }
    };
    let output = command.output().map_err(|error| failed(command, format!("{error}; cargo build --workspace builds it")))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let message = String::from_utf8_lossy(&output.stderr);
    Err(failed(command, message.trim().lines().next_back().unwrap_or("it said nothing").into()))
}

/// Runs a program and returns its JSON lines.
fn print(command: &mut Command) -> Result<Vec<Value>> {
    let text = output(command)?;
    let parse = |line: &str| {
        let failed = |error| Error::Program { command: command.get_program().display().to_string(), cause: format!("{error} in {line:?}") };
        serde_json::from_str(line).map_err(failed)
    };
    text.lines().map(parse).collect()
}

/// Runs a program with a trace and adds the timeline to its lines.
fn traced(command: &mut Command) -> Result<Vec<Value>> {
    let (_folder, path) = scratch("trace.json")?;
    let mut lines = print(command.arg("--trace").arg(&path))?;
    let timeline = timeline::read(&path)?;
    for line in &mut lines {
        line["timeline"] = timeline.clone();
        shorten(line, "/settings/trace");
    }
    Ok(lines)
}

/// Runs a training run and returns its lines, which come from its files.
fn trained(command: &mut Command) -> Result<Vec<Value>> {
    let (_folder, path) = scratch("run")?;
    let text = output(command.arg("--output-dir").arg(&path))?;
    let mut lines = training::lines(&path, &text)?;
    lines.iter_mut().for_each(|line| shorten(line, "/settings/output_dir"));
    Ok(lines)
}

/// Reduces the path at `pointer` to its file name, because the folder existed only during this call.
fn shorten(line: &mut Value, pointer: &str) {
    let Some(path) = line.pointer_mut(pointer) else { return };
    let name = path.as_str().and_then(|path| path.rsplit('/').next()).map(str::to_owned);
    *path = Value::from(name);
}

/// Keeps only the version number of the kernel's release; the rest identifies the builder.
fn plain_kernel(line: &mut Value) {
    let Some(release) = line.pointer_mut("/machine/kernel") else { return };
    let version = |text: &str| text.split(|c: char| c != '.' && !c.is_ascii_digit()).next().map(str::to_owned);
    *release = Value::from(release.as_str().and_then(version));
}

/// A path in a temporary folder, which the drop of the returned `TempDir` removes.
fn scratch(name: &str) -> Result<(tempfile::TempDir, PathBuf)> {
    let folder = tempfile::tempdir().map_err(|source| Error::Io { path: std::env::temp_dir(), source })?;
    let path = folder.path().join(name);
    Ok((folder, path))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn programs() -> Programs {
        Programs { binaries: "/bin".into(), figures: "/".into() }
    }

    #[test]
    fn flags_become_arguments() {
        let flags = toml::from_str("lr = 0.003\nname = \"a b\"\non = true\noff = false\nempty = \"\"\n").unwrap();
        let command = programs().command(Path::new("superoffload"), &["bench", "step"], &flags);
        let words: Vec<_> = command.get_args().map(|word| word.to_str().unwrap()).collect();
        assert_eq!(words, ["bench", "step", "--lr", "0.003", "--name", "a b", "--on"]);
    }

    #[test]
    fn features_are_for_cargo() {
        let flags = toml::from_str("features = \"stv,mpam\"\nsteps = 4\n").unwrap();
        let (features, rest) = without_features(&flags);
        assert_eq!((features.as_deref(), rest), (Some("stv,mpam"), toml::from_str("steps = 4").unwrap()));
        assert_eq!(without_features(&Flags::new()), (None, Flags::new()));
    }

    #[test]
    fn every_line_is_a_result_and_the_last_words_are_the_cause() {
        let script = |script: &str| print(Command::new("/bin/sh").args(["-c", script]));
        assert_eq!(script("echo a table >&2; echo '{\"a\": 1}'").unwrap(), [json!({"a": 1})]);
        assert!(script("echo a table; echo '{\"a\": 1}'").is_err());
        let error = script("echo first >&2; echo 'no room' >&2; exit 1").unwrap_err().to_string();
        assert!(error.starts_with("run /bin/sh -c") && error.ends_with(": no room"), "{error}");
        assert!(script("echo '{'").is_err());
    }

    #[test]
    fn a_kernel_is_its_version() {
        let mut line = json!({"machine": {"kernel": "6.18.44-someone-v1"}});
        plain_kernel(&mut line);
        assert_eq!(line["machine"]["kernel"], "6.18.44");
    }

    #[test]
    fn folders_of_one_call_are_left_out() {
        let mut line = json!({"settings": {"trace": "/a/b/trace.json", "model": null}});
        for name in ["trace", "model", "missing"] {
            shorten(&mut line, &format!("/settings/{name}"));
        }
        assert_eq!(line, json!({"settings": {"trace": "trace.json", "model": null}}));
    }
}
