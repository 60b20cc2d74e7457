//! The configuration file in TOML, YAML or JSON, with the flags of `train` as keys.

use crate::config::aliases::{self, Translation};
use crate::config::deepspeed::over_deepspeed;
use crate::config::document::{Document, DocumentEntry, DocumentNode, NodeValue, Place, Syntax};
use crate::config::program::{Program, identifies_a_program};
use crate::config::settings::{FILE_ONLY, TrainOptions};
use crate::disk::named_by;
use crate::error::{Error, Result};
use clap::Arg;
use std::collections::HashMap;
use std::path::Path;

/// Reads the options of the file at `path` as TOML, YAML or JSON, according to its extension. A null value counts as not set.
/// Relative paths in the file have the same base as on the command line.
///
/// # Errors
/// `Io` or `Format` when it cannot be read; `Usage` that names file, line, column and key when it is not well written, sets a key that is
/// no flag (the nearest one is named) or that is set twice, or gives a key a value of the wrong type.
pub fn load(path: &Path) -> Result<TrainOptions> {
    Document::read(path, |document| options(&document))
}

impl TrainOptions {
    /// The options of a configuration file in TOML with the content `text`.
    ///
    /// # Errors
    /// As [`load`], without the name of a file.
    pub fn from_toml(text: &str) -> Result<Self> {
        Document::parse(text.into(), Syntax::Toml).and_then(|document| options(&document)).map_err(Error::usage)
    }

    /// Merges these options over the file of `--config`, and the result over the DeepSpeed configuration if one is named.
    pub fn over_config_file(self) -> Result<Self> {
        let options = match &self.config {
            Some(path) => load(path).map(|file| self.over(file)).map_err(|error| named_by("--config", error))?,
            None => self,
        };
        match options.deepspeed.clone() {
            Some(path) => over_deepspeed(options, &path).map_err(|error| named_by("--deepspeed", error)),
            None => Ok(options),
        }
    }
}

/// The flags that a configuration file may set: all except `--config`. It may also contain the keys of [`FILE_ONLY`].
pub(super) fn known_keys() -> Vec<Arg> {
    let command = <TrainOptions as clap::Args>::augment_args(clap::Command::new("train"));
    command.get_arguments().filter(|flag| flag.get_long().is_some_and(|name| name != "config")).cloned().collect()
}

/// The options of a file. An error is one line with every invalid key, without the file's name.
fn options(document: &Document) -> std::result::Result<TrainOptions, String> {
    let (known, mut set, mut options, mut faults) = (known_keys(), HashMap::new(), TrainOptions::default(), Vec::new());
    for entry in document.entries.iter().filter(|entry| entry.node.value != NodeValue::Null) {
        let (name, node) = match translate(&known, entry) {
            Ok(Meaning::Set(name, node)) => (name, node),
            Ok(Meaning::Nothing) => continue,
            Ok(Meaning::Ignored(line)) => {
                options.ignored.push(line);
                continue;
            }
            Err(cause) => {
                faults.push(format!("{}: {cause}", entry.at));
                continue;
            }
        };
        if let Some(before) = set.insert(name.clone(), entry.at) {
            let before: Place = before;
            return Err(format!("{}: `{name}` is already set in line {}", entry.at, before.line));
        }
        // A file with faults may belong to another program, with other meanings of its values.
        if faults.is_empty() {
            options = options.over(document.setting(&name, node)?);
        }
    }
    if faults.is_empty() { Ok(options) } else { Err(all_faults(document, &faults)) }
}

/// The faults of a file, with a hint if it belongs to another program.
fn all_faults(document: &Document, faults: &[String]) -> String {
    let program = Program::of(&document.entries).map(|program| {
        format!(
            "; this is a configuration of {program}: `superoffload convert-config FILE` lists the meaning of each key and converts the file"
        )
    });
    faults.join("; ") + &program.unwrap_or_default()
}

/// Translation of a key and its value.
pub(super) enum Meaning {
    Set(String, DocumentNode),
    Ignored(String),
    Nothing,
}

/// Spells a key and its value as the flags do and checks that the key is known.
///
/// # Errors
/// The fault of the key, without its place.
pub(super) fn translate(known: &[Arg], entry: &DocumentEntry) -> std::result::Result<Meaning, String> {
    let dashed = entry.key.replace('_', "-");
    let name = aliases::plain_name(&dashed);
    let word = |word: String| DocumentNode { at: entry.node.at, value: NodeValue::Text(word) };
    match aliases::outcome(name, &entry.node.text())? {
        Translation::Nothing => Ok(Meaning::Nothing),
        Translation::Flag(flag, value) => Ok(Meaning::Set(flag.into(), word(value))),
        Translation::Ignored(line) => Ok(Meaning::Ignored(line)),
        Translation::AsWritten => match (known.iter().find(|flag| flag.get_long() == Some(name)), &entry.node.value) {
            (Some(flag), NodeValue::Text(text)) => Ok(Meaning::Set(name.into(), word(aliases::choice(flag, text)))),
            (None, _) if !FILE_ONLY.contains(&name) => Err(format!("unknown key `{}`{}", entry.key.escape_debug(), hint(known, name))),
            _ => Ok(Meaning::Set(name.into(), entry.node.clone())),
        },
    }
}

/// The key that was probably meant, if `name` is a misspelling. Keys that only look similar have other meanings, and so have keys of other
/// programs.
fn hint(known: &[Arg], name: &str) -> String {
    if identifies_a_program(name) {
        return String::new();
    }
    let names = known.iter().filter_map(Arg::get_long).chain(FILE_ONLY.iter().copied()).chain(aliases::names());
    let slips = |other: &str| strsim::osa_distance(other, name);
    let nearest = names.min_by_key(|other| slips(other)).filter(|other| slips(other) <= (name.chars().count() / 5).clamp(1, SLIPS_MAX));
    nearest.map(|nearest| format!("; the nearest key is `{nearest}`")).unwrap_or_default()
}

/// Largest edit distance of a misspelling.
const SLIPS_MAX: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::tests::{command_line, flags, sample, sample_options};
    use crate::faults::Injection;
    use crate::request::choices::Technique;
    use proptest::prelude::*;

    fn parse_as(text: &str, syntax: Syntax) -> std::result::Result<TrainOptions, String> {
        options(&Document::parse(text.into(), syntax)?)
    }

    fn parse(text: &str) -> std::result::Result<TrainOptions, String> {
        parse_as(text, Syntax::Toml)
    }

    #[test]
    fn every_flag_can_be_set_in_the_file_under_both_spellings() {
        for flag in flags().into_iter().filter(|flag| flag.get_long() != Some("config")) {
            let (name, value) = sample(&flag);
            for key in [name.clone(), name.replace('-', "_")] {
                let bare = parse(&format!("{key} = {value}"));
                let read = bare.or_else(|_| parse(&format!("{key} = '{value}'")));
                assert_eq!(read, Ok(sample_options(&flag)), "{key}");
                for syntax in [Syntax::Yaml, Syntax::Json] {
                    let quote =
                        |value: &str| if syntax == Syntax::Json { format!("{{\"{key}\": {value}}}") } else { format!("{key}: {value}") };
                    let bare = parse_as(&quote(&value), syntax);
                    let read = bare.or_else(|_| parse_as(&quote(&format!("\"{value}\"")), syntax));
                    assert_eq!(read, Ok(sample_options(&flag)), "{key} {syntax:?}");
                }
            }
        }
    }

    #[test]
    fn lists_may_be_one_string_and_injections_may_be_words_or_numbers() {
        assert_eq!(parse("data = 'a.txt'").unwrap().data, Some(vec!["a.txt".into()]));
        assert_eq!(parse("without = ['stv', 'grace-adam']").unwrap().without, Some(vec![Technique::Stv, Technique::GraceAdam]));
        let text = "inject = [{step=3, element=7, value='-inf'}, {step=4, element=8, value=2.5}, {step=5, element=9, value=nan}]";
        let inject = parse(text).unwrap().inject.unwrap();
        assert_eq!(inject[0], Injection { step: 3, element: 7, share: 0, value: f32::NEG_INFINITY });
        assert_eq!(inject[1], Injection { step: 4, element: 8, share: 0, value: 2.5 });
        assert!(inject[2].value.is_nan() && inject.len() == 3);
        assert_eq!(parse("learning-rate = 1").unwrap().learning_rate, Some(1.0));
    }

    #[test]
    fn names_of_other_programs_have_the_meaning_of_their_flags() {
        let text = "model_name_or_path = 'm'\nbf16 = true\nfp16 = false\nwarmup_steps = 0.1\nmax_seq_length = 8\ndataset = ['a', 'b']\n\
            strategy = 'zero_offload'\noptim = 'adamw_torch'\ntf32 = true\nlr_scheduler_type = 'constant_with_warmup'\nreport_to = ['none']";
        let read = parse(text).unwrap();
        let flags =
            ["--model=m", "--dtype=bfloat16", "--warmup-ratio=0.1", "--seq-length=8", "--data", "a", "b", "--strategy=zero-offload"];
        let flags = command_line(&[&flags[..], &["--lr-scheduler-type=constant", "--report-to=none"]].concat()).unwrap();
        assert_eq!(TrainOptions { ignored: Vec::new(), ..read.clone() }, flags);
        assert!(read.ignored.len() == 1 && read.ignored[0].starts_with("tf32 ("), "{:?}", read.ignored);
        assert_eq!(parse("seed = 1\noptim = 'lion'").unwrap_err().split(':').next(), Some("line 2, column 1"));
    }

    #[test]
    fn keys_of_other_programs_are_no_misspellings() {
        let message = parse_as("base_model: x\ndatasets: y\nsave_stepps: 3\n", Syntax::Yaml).unwrap_err();
        assert!(message.contains("unknown key `datasets`; line 3, column 1: unknown key `save_stepps`; the nearest key"), "{message}");
        assert!(message.contains("a configuration of axolotl") && !message.contains("`dataset`"), "{message}");
    }

    #[test]
    fn errors_name_line_key_and_cause() {
        let cases: &[(&str, &[&str])] = &[
            ("seed = 1\nlerning_rate = 1", &["line 2", "unknown key `lerning_rate`", "`learning-rate`"]),
            ("config = 'x'", &["line 1", "unknown key `config`"]),
            ("a1 = 1\nseed = 1\nb2 = 2", &["line 1, column 1: unknown key `a1`; line 3, column 1: unknown key `b2`"]),
            ("\ninject_ = 1", &["line 2", "`inject`"]),
            ("seed = 1\n\nlearning-rate = 'fast'", &["line 3", "`learning-rate`", "expected f64"]),
            ("seq_length = 1.5", &["line 1", "`seq-length`", "floating point `1.5`"]),
            ("seed = -1", &["line 1", "`seed`", "-1"]),
            ("dtype = 'int8'", &["line 1", "`dtype`", "int8", "bfloat16"]),
            ("resident-buckets = 'x'", &["line 1", "`resident-buckets`", "number of buckets, `auto` or `all`"]),
            ("hbm-limit = '80 gigs'", &["line 1", "`hbm-limit`", "expected a size"]),
            ("inject = [{step=1, element=1, value=true}]", &["line 1", "inject", "a number or a word"]),
            ("inject = [{step=1, elemnt=1, value=1}]", &["line 1", "inject", "elemnt"]),
            ("[seed]\nx = 1", &["line 1", "`seed`", "expected u64"]),
            ("seed = 1\nlearning-rate = fast", &["line 2", "learning-rate = fast"]),
            ("seed =\nslots = 1", &["line 1, column 7 `seed =`"]),
            ("seed = 1\nseed = 2", &["line 2", "seed", "duplicate"]),
            ("bf16 = true\ndtype = 'float32'", &["line 1", "line 2", "`dtype`", "already set"]),
            ("optim = 'lion'", &["line 1", "optim lion", "adamw_torch"]),
            ("adam_beta1 = 1\nadam-beta1 = 2", &["line 1", "line 2", "`adam-beta1`", "already set"]),
        ];
        for (text, parts) in cases {
            let message = parse(text).unwrap_err();
            for part in *parts {
                assert!(message.contains(part), "{part:?} is not in {message:?}");
            }
            assert!(!message.contains('\n'), "{message:?}");
        }
    }

    #[test]
    fn the_file_is_named_and_flags_win_over_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.toml");
        std::fs::write(&path, "seed = 7\nslots = 2\n").unwrap();
        let flags = TrainOptions { config: Some(path.clone()), slots: Some(3), ..Default::default() };
        let merged = flags.over_config_file().unwrap();
        assert_eq!((merged.seed, merged.slots), (Some(7), Some(3)));
        std::fs::write(&path, b"seed = 7 # \xff").unwrap();
        let message = load(&path).unwrap_err().to_string();
        assert!(message.contains("run.toml") && message.contains("byte 11"), "{message}");
        assert!(matches!(load(dir.path()), Err(Error::Format { .. })));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC*|[a-z_=\\[\\]{}'\"., 0-9\n-]*") {
            let _ = parse(&text);
        }

        #[test]
        fn no_value_of_a_known_key_panics(key in prop::sample::select(known_keys().iter().filter_map(Arg::get_long).map(str::to_string).collect::<Vec<_>>()), value in "[-+a-z0-9.'\"\\[\\]{}=, \n]{0,40}") {
            if let Err(message) = parse(&format!("{key} = {value}")) {
                prop_assert!(message.starts_with("line ") && !message.contains('\n'), "{}", message);
            }
        }
    }
}
