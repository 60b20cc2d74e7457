//! The Python package has type hints for the program's flags, and a wheel of the present build works in an empty environment.
//! `packaging/test.sh` tests the released wheel.

use crate::program::{Outcome, run};
use crate::support::emulator;
use clap::{Arg, ArgAction, Args, Command};
use std::any::TypeId;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command as Process;
use superoffload::TrainOptions;

/// Settings that `train` and `start` have as separate parameters.
const OWN: [&str; 2] = ["model", "data"];

/// The settings as keys of a typed dictionary, each with its help.
fn stub() -> String {
    let command = TrainOptions::augment_args(Command::new("train"));
    let key = |arg: &Arg| format!("    {}: {}\n    \"\"\"{}.\"\"\"\n", arg.get_id(), kind(arg), arg.get_help().unwrap_or_default());
    let shown = command.get_arguments().filter(|arg| !arg.is_hide_set() && !OWN.contains(&arg.get_id().as_str()));
    let keys: String = shown.map(key).collect();
    format!(
        "# Written by SUPEROFFLOAD_WRITE_FLAGS=1 cargo test --test main python::\n\
         from collections.abc import Sequence\nfrom os import PathLike\nfrom typing import Literal, TypedDict\n\n\
         class Settings(TypedDict, total=False):\n    \"\"\"Settings of a training run.\"\"\"\n\n{keys}"
    )
}

/// The Python type of an option's value; a list if the option takes several values.
fn kind(arg: &Arg) -> String {
    let words: Vec<_> = arg.get_possible_values().iter().map(|value| value.get_name().to_owned()).collect();
    let one = match words.as_slice() {
        [yes, no] if yes == "true" && no == "false" => "bool".into(),
        [] => scalar(arg).to_owned(),
        _ => format!("Literal[{}]", words.iter().map(|word| format!("{word:?}")).collect::<Vec<_>>().join(", ")),
    };
    if matches!(arg.get_action(), ArgAction::Append) { format!("{one} | Sequence[{one}]") } else { one }
}

fn scalar(arg: &Arg) -> &'static str {
    let parser = arg.get_value_parser().type_id();
    let is = |types: &[TypeId]| types.iter().any(|id| parser == *id);
    if is(&[TypeId::of::<u64>(), TypeId::of::<usize>()]) {
        "int"
    } else if is(&[TypeId::of::<f64>()]) {
        "float"
    } else if is(&[TypeId::of::<PathBuf>()]) {
        "str | PathLike[str]"
    } else {
        // Words or numbers: `all` or 2, 8GiB or bytes.
        "str | int | float"
    }
}

/// `SUPEROFFLOAD_WRITE_FLAGS=1` writes the file.
#[test]
fn the_package_is_typed_as_the_flags_are() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("packaging/python/superoffload/_settings.pyi");
    let stub = stub();
    if std::env::var_os("SUPEROFFLOAD_WRITE_FLAGS").is_some() {
        fs::write(&path, &stub).unwrap();
    }
    for line in [
        "    learning_rate: float\n",
        "    max_steps: int\n",
        "    digest: bool\n",
        "    dtype: Literal[\"bfloat16\", \"float16\", \"float32\"]\n",
        "    output_dir: str | PathLike[str]\n",
        "    gpus: str | int | float\n",
        "    \"\"\"Peak learning rate [default: 5e-5].\"\"\"\n",
    ] {
        assert!(stub.contains(line), "{line} is not in\n{stub}");
    }
    assert!(!stub.contains("adversary") && stub.contains("    without: Literal["), "{stub}");
    assert_eq!(
        fs::read_to_string(path).unwrap_or_default(),
        stub,
        "SUPEROFFLOAD_WRITE_FLAGS=1 cargo test --test main python:: writes it again"
    );
}

/// A program in the repository's directory, without the user's environment.
fn clean(program: &Path, home: &Path, args: &[&str]) -> Process {
    let mut clean = Process::new(program);
    clean.args(args).current_dir(env!("CARGO_MANIFEST_DIR"));
    clean.env_clear().env("PATH", "/usr/bin:/bin").env("HOME", home).env("PYTHONDONTWRITEBYTECODE", "1");
    clean
}

/// The output of a command that must succeed.
fn done(command: &mut Process) -> Outcome {
    let outcome = run(command);
    assert_eq!(outcome.code, 0, "{command:?}:\n{}{}", outcome.stdout, outcome.stderr);
    outcome
}

/// The Python on `PATH` as an absolute path, if the package supports its version.
fn system_python() -> Option<PathBuf> {
    let script = "import sys; assert sys.version_info >= (3, 10); print(sys.executable)";
    let text = Process::new("python3").args(["-c", script]).output().ok().filter(|text| text.status.success())?;
    Some(String::from_utf8(text.stdout).unwrap().trim().into())
}

/// Skips the test of the wheel if a requirement is missing. In CI, which has all of them, this is a failure.
fn left_out(why: &str) {
    assert!(std::env::var_os("SUPEROFFLOAD_REQUIRE_PYTHON").is_none() || emulator().is_some(), "the wheel is not tested: {why}");
    // Not printed by a macro, because the test harness would capture the line.
    std::io::stderr().write_all(format!("LEFT OUT: the wheel is not tested: {why}\n").as_bytes()).unwrap();
}

/// A bare environment as for a service: no activated environment and an empty `PATH`.
#[test]
fn the_wheel_in_a_bare_environment_trains_the_demo_and_passes_the_packages_tests() {
    let Some(system) = system_python().filter(|_| emulator().is_none()) else {
        return left_out("there is no python3 from 3.10 on for it");
    };
    let dir = tempfile::tempdir().unwrap();
    let (home, bare, built) = (dir.path(), dir.path().join("bare"), env!("CARGO_BIN_EXE_superoffload"));
    let path = |name: &str| bare.join("bin").join(name);
    if run(clean(&system, home, &["-m", "venv"]).arg(&bare)).code != 0 {
        return left_out("this python3 makes no environments: Debian has that in the package python3-venv");
    }
    let wheel = done(clean(&path("python"), home, &["packaging/wheel.py", built]).arg(home)).stdout;
    done(&mut clean(&path("pip"), home, &["install", "--quiet", "--no-index", wheel.trim()]));
    let demo = ["train", "--device=cpu", "--max-steps=1", "--digest", "--output-dir=run"];
    assert_eq!(done(clean(&path("superoffload"), home, &demo).current_dir(home)).digest().len(), 64);
    let tests = ["-W", "ignore", "-m", "unittest", "discover", "-s", "packaging/python/tests", "-p", "test_superoffload.py"];
    let text = done(&mut clean(&path("python"), home, &tests)).stderr;
    let ran = text.lines().find_map(|line| line.strip_prefix("Ran ")?.split(' ').next()?.parse::<usize>().ok());
    assert!(ran > Some(15), "{text}");
}
