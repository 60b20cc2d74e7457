//! Settings of a run that differ from the defaults, and a command line with the same settings.

use super::past_run::PastRun;
use crate::config::options::InitChoice;
use crate::config::settings::Settings;
use crate::describe::{self, as_word, named, words, written};
use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// Placeholder for a default that records omit.
const LEFT_OUT: &str = "default";

const OUTPUT_DIR: &str = "output_dir";

/// A setting with its default and the value of each run; `None` if a run's value is unknown.
pub(super) struct RequestedSetting {
    pub(super) flag: String,
    pub(super) default: String,
    pub(super) values: Vec<Option<String>>,
}

/// The default settings of a run with a model, or of a run with the built-in model.
fn defaults(run: &PastRun) -> Value {
    let with_model = || Settings { init: InitChoice::Checkpoint, ..Settings::default() };
    describe::value(&if run.setting("model").is_string() { with_model() } else { Settings::demo() })
}

fn settings(run: &PastRun) -> Option<&Map<String, Value>> {
    run.setup.as_ref()?.settings.as_object()
}

/// Settings that differ from the default in one of `runs`, or that differ between runs.
pub(super) fn unusual(runs: &[PastRun]) -> Vec<RequestedSetting> {
    let defaults: Vec<_> = runs.iter().map(defaults).collect();
    let keys: BTreeSet<_> = runs.iter().filter_map(settings).flat_map(Map::keys).collect();
    let is_unusual = |key: &str| {
        let mut known = runs.iter().zip(&defaults).filter_map(|(run, defaults)| Some((settings(run)?.get(key)?, &defaults[key])));
        let first = runs.iter().find_map(|run| settings(run)?.get(key));
        known.any(|(value, default)| value != default || Some(value) != first)
    };
    let requested = |key: &str| {
        let words = |value: &Value| written(named(key, value).1);
        let default = defaults.first().and_then(|all| all.get(key)).map(words);
        let left_out = || default.is_none().then(|| LEFT_OUT.into());
        let value = |run| settings(run)?.get(key).map(words).or_else(left_out);
        let sample = runs.iter().find_map(|run| settings(run)?.get(key)).unwrap_or(&Value::Null);
        let values = runs.iter().map(value).collect();
        RequestedSetting { flag: named(key, sample).0, default: default.unwrap_or_else(|| LEFT_OUT.into()), values }
    };
    keys.into_iter().filter(|key| is_unusual(key)).map(|key| requested(key)).collect()
}

/// Settings of a resume, which a fresh run does not need.
const OF_A_RESUME: [&str; 2] = ["resume_from_checkpoint", "allow_changed"];

/// A command line that starts a fresh run with the settings of `run` in a new output directory. Paths are relative to the directory of the
/// original command.
pub(super) fn command(run: &PastRun) -> Option<String> {
    let (settings, defaults) = (settings(run)?, defaults(run));
    let is_set = |key: &str, value: &Value| defaults.get(key) != Some(value) && !value.is_null() && !Settings::is_file_only(key);
    let is_of_a_start = |key: &str| key != OUTPUT_DIR && !OF_A_RESUME.contains(&key);
    let text = settings.iter().filter(|(key, value)| is_set(key, value) && is_of_a_start(key)).map(|(key, value)| argument(key, value));
    let before = settings.get(OUTPUT_DIR).and_then(Value::as_str).unwrap_or("run").trim_end_matches('/');
    let fresh = argument(OUTPUT_DIR, &format!("{before}-again").into());
    Some(["superoffload train".into(), fresh].into_iter().chain(text).collect::<Vec<_>>().join(" \\\n  "))
}

fn argument(key: &str, value: &Value) -> String {
    words(key, value).iter().map(|word| as_word(word)).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn arguments_are_those_of_a_shell() {
        assert_eq!(argument("train_length", &json!({"steps": 40})), "--max-steps 40");
        assert_eq!(argument("data", &json!(["a b.txt", "it's.txt"])), r"--data 'a b.txt' 'it'\''s.txt'");
        assert_eq!(argument("no_shuffle", &json!(true)), "--no-shuffle=true");
        assert_eq!(argument("without", &json!(["stv", "mpam"])), "--without stv,mpam");
    }
}
