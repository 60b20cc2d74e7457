//! Numbers of any size for every flag: the program refuses them in one line or runs. It never panics, and it allocates no memory in
//! proportion to the number.

use super::options::StepOptions;
use super::simulate::Simulation;
use crate::config::settings::{Settings, TrainOptions};
use crate::hardware::profile::Profile;
use crate::model::shape::{DEMO_CONFIG, ModelShape};
use crate::planner::machine::Machine;
use crate::planner::plan::Plan;
use clap::{Args, Command, FromArgMatches};
use proptest::prelude::*;
use std::path::Path;
use std::sync::OnceLock;
use tempfile::TempDir;

/// Flags that fix the plan, so that no search runs. A search takes long.
const CLOSED: [&str; 11] = [
    "--seq-length=64",
    "--per-device-train-batch-size=1",
    "--weights=replicated",
    "--activations=keep",
    "--resident-buckets=0",
    "--bucket-mib=16",
    "--slots=8",
    "--cast=host",
    "--threads=4",
    "--without=stv",
    "--steps=2",
];
const EDGES: [&str; 16] = [
    "0",
    "1",
    "-1",
    "3",
    "4294967295",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "1e308",
    "5e-324",
    "nan",
    "inf",
    "0.5",
    "1-18446744073709551615",
];
/// Limits of the simulated run: more steps take longer and test no larger numbers.
const STEPS_MAX: u64 = 100;
const TOKENS_MAX: usize = 1 << 16;

/// A small model: the size of the model does not change how flags are checked.
fn model() -> String {
    static MODEL: OnceLock<TempDir> = OnceLock::new();
    let dir = MODEL.get_or_init(|| {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("config.json"), DEMO_CONFIG).unwrap();
        dir
    });
    format!("--model={}", dir.path().join("config.json").display())
}

fn command() -> Command {
    StepOptions::augment_args(Command::new("step")).args_override_self(true)
}

/// Flags that take a number, found by the value names of their help.
fn numeric() -> &'static [String] {
    static FLAGS: OnceLock<Vec<String>> = OnceLock::new();
    FLAGS.get_or_init(|| {
        let is_number = |name: &str| {
            ["N", "X", "SIZE", "SECONDS", "SEED", "SHARE", "LEAST-MOST"].iter().any(|kind| name.split('|').any(|word| word == *kind))
        };
        let command = command();
        let of = command.get_arguments().filter(|arg| arg.get_value_names().is_some_and(|names| names.iter().any(|name| is_number(name))));
        of.filter_map(|arg| arg.get_long().map(String::from)).collect()
    })
}

/// Parses and checks flags, plans with them and, if the step is small, simulates it. Any error is accepted; a panic is not.
fn judge(message: &[String]) {
    let args = ["step"].into_iter().chain(CLOSED).map(String::from).chain([model()]).chain(message.iter().cloned());
    let Ok(matches) = command().try_get_matches_from(args) else { return };
    let options = StepOptions::from_arg_matches(&matches).unwrap();
    let train = TrainOptions { data: Some(vec!["corpus.txt".into()]), ..options.train.clone() };
    let shape = ModelShape::parse(DEMO_CONFIG, Path::new("demo")).unwrap();
    if let Ok(settings) = Settings::resolve(train) {
        settings.schedule().warmup(u64::MAX);
        let request = settings.on_gpus(2).map(|settings| settings.request(&shape));
        drop(request.and_then(|request| Plan::new(&request, &Machine::cpu(4), false)?.check_fits(&request)));
    }
    let is_short = options.warmup.saturating_add(options.steps) <= STEPS_MAX;
    let Ok(simulation) = Simulation::new(options, Profile::load("h200-x2").unwrap()) else { return };
    if is_short && simulation.tokens() <= TOKENS_MAX {
        drop(simulation.run());
    }
}

/// Replaces a number of a TOML profile by `number`. In a curve, every rate becomes `number`.
fn with(old: &str, number: &str) -> String {
    let point = |point: &str| format!("[{}, {number}]", point.trim_matches(['[', ']']).split(',').next().unwrap());
    match old.starts_with('[') {
        true => format!("[{}]", old.split("], [").map(point).collect::<Vec<_>>().join(", ")),
        false => number.into(),
    }
}

#[test]
fn every_flag_that_takes_a_number_is_tried_at_every_edge() {
    assert!(numeric().len() >= 35, "{:?}", numeric());
    numeric().iter().for_each(|flag| EDGES.iter().for_each(|edge| judge(&[format!("--{flag}={edge}")])));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn numbers_of_any_size_together_are_refused_or_run(
        message in prop::collection::vec((prop::sample::select(numeric()), prop_oneof![
            prop::sample::select(&EDGES[..]).prop_map(String::from),
            any::<u64>().prop_map(|n| n.to_string()),
            (0u32..64).prop_map(|power| (1u64 << power).to_string()),
        ]), 1..5),
    ) {
        judge(&message.iter().map(|(flag, value)| format!("--{flag}={value}")).collect::<Vec<_>>());
    }

    #[test]
    fn profiles_with_any_number_are_refused_or_simulated(
        at in any::<prop::sample::Index>(),
        value in prop::sample::select(&["5e-324", "1e-300", "1e-12", "1e-3", "1", "1e9", "1e15", "9.9e19"][..]),
    ) {
        let text = Profile::load("h200-pcie5").unwrap().to_string();
        let parts: Vec<_> = text.match_indices("value = ").map(|(begin, word)| begin + word.len()).collect();
        let begin = at.get(&parts);
        let length = text[*begin..].find(", source").unwrap();
        let changed = format!("{}{}{}", &text[..*begin], with(&text[*begin..begin + length], value), &text[begin + length..]);
        if let Ok(profile) = Profile::parse(&changed, Path::new("changed.toml")) {
            let matches = command().try_get_matches_from(["step", &model()].into_iter().chain(CLOSED)).unwrap();
            let run = Simulation::new(StepOptions::from_arg_matches(&matches).unwrap(), profile).and_then(|simulation| simulation.run());
            if let Ok(record) = run {
                prop_assert!(record.outcome.step_ms.median.is_finite(), "{changed}");
            }
        }
    }
}
