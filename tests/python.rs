//! The Python package is typed as the program's flags are. What it does is tested by `packaging/test.sh`, with the wheel.

use clap::{Arg, ArgAction, Args, Command};
use std::any::TypeId;
use std::fs;
use std::path::{Path, PathBuf};
use superoffload::TrainOptions;

/// What `train` and `start` name themselves.
const OWN: [&str; 2] = ["model", "data"];

/// The settings as a dict's keys, each with its help.
fn stub() -> String {
    let command = TrainOptions::augment_args(Command::new("train"));
    let key = |arg: &Arg| format!("    {}: {}\n    \"\"\"{}.\"\"\"\n", arg.get_id(), kind(arg), arg.get_help().unwrap_or_default());
    let shown = command.get_arguments().filter(|arg| !arg.is_hide_set() && !OWN.contains(&arg.get_id().as_str()));
    let keys: String = shown.map(key).collect();
    format!(
        "# Written by SUPEROFFLOAD_WRITE_FLAGS=1 cargo test --test main python::\n\
         from collections.abc import Sequence\nfrom os import PathLike\nfrom typing import Literal, TypedDict\n\n\
         class Settings(TypedDict, total=False):\n    \"\"\"What a run can be told.\"\"\"\n\n{keys}"
    )
}

/// The type of an option's value in Python; a list where the option takes several.
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

/// `SUPEROFFLOAD_WRITE_FLAGS=1` writes it.
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
