//! The configuration file: TOML whose keys are the flags of `train`.

use crate::config::aliases::{self, Translation};
use crate::config::settings::{FILE_ONLY, TrainOptions};
use crate::disk;
use crate::error::{Error, Result};
use clap::Arg;
use serde::Deserialize;
use serde::de::IntoDeserializer;
use std::ops::Range;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeString, DeTable, DeValue};

/// No configuration is larger.
const BYTES_MAX: u64 = 1 << 20;

/// Longest part of an offending line that an error message shows, in characters.
const SHOWN_CHARS: usize = 60;

/// Reads the options that the file at `path` sets. Relative paths in it mean what they mean on the command line.
///
/// # Errors
/// `Io` or `Format` when it cannot be read; `Usage` that names file, line and key when it is no TOML, sets a key that is no flag (the
/// nearest one is named) or that is set twice, or gives a key a value of the wrong type.
pub fn load(path: &Path) -> Result<TrainOptions> {
    let bytes = disk::read_small(path, BYTES_MAX)?;
    let text = str::from_utf8(&bytes).map_err(|e| Error::usage(format!("{}: not UTF-8 at byte {}", path.display(), e.valid_up_to())))?;
    parse(text).map_err(|cause| Error::usage(format!("{}: {cause}", path.display())))
}

impl TrainOptions {
    /// These options over those of the file that `--config` names, if it names one.
    pub fn over_config_file(self) -> Result<Self> {
        match &self.config {
            Some(path) => load(path).map(|file| self.over(file)),
            None => Ok(self),
        }
    }
}

/// The flags that a configuration file may set: all but `--config`. Besides, it may hold [`FILE_ONLY`].
fn known_keys() -> Vec<Arg> {
    let command = <TrainOptions as clap::Args>::augment_args(clap::Command::new("train"));
    command.get_arguments().filter(|flag| flag.get_long().is_some_and(|name| name != "config")).cloned().collect()
}

/// Parses a configuration file; an error is one line without the file's name.
fn parse(text: &str) -> std::result::Result<TrainOptions, String> {
    let written = DeTable::parse(text).map_err(|e| at(text, e.span(), e.message()))?;
    let (span, known, mut ignored) = (written.span(), known_keys(), Vec::new());
    let mut table = DeTable::new();
    for (key, value) in written.into_inner() {
        let Some((key, value)) = translate(text, &known, key, value, &mut ignored)? else { continue };
        let line = line_number(text, key.span().start);
        if let Some((twice, _)) = table.get_key_value(&key) {
            let twice: &Spanned<DeString> = twice;
            return Err(format!("line {line}: `{}` is already set in line {}", key.get_ref(), line_number(text, twice.span().start)));
        }
        table.insert(key, value);
    }
    let options = toml::Deserializer::from(Spanned::new(span, table)).into_deserializer();
    // Without the text at hand the library's message is one sentence and the key, which is what is wanted here.
    let options = TrainOptions::deserialize(options).map_err(|e| at(text, e.span(), &e.to_string()))?;
    Ok(TrainOptions { ignored, ..options })
}

type TomlEntry<'t> = (Spanned<DeString<'t>>, Spanned<DeValue<'t>>);

/// Spells a key and its value as the flags do and checks that the key is known; `None` when nothing is left to set.
fn translate<'t>(
    text: &str,
    known: &[Arg],
    key: Spanned<DeString<'t>>,
    value: Spanned<DeValue<'t>>,
    ignored: &mut Vec<String>,
) -> std::result::Result<Option<TomlEntry<'t>>, String> {
    let number = line_number(text, key.span().start);
    let dashed = key.get_ref().replace('_', "-");
    let name = aliases::plain_name(&dashed);
    let respelled = |name: &str, word: String| {
        let word = Spanned::new(value.span(), DeValue::String(word.into()));
        Some((Spanned::new(key.span(), name.to_string().into()), word))
    };
    match aliases::outcome(name, &as_text(value.get_ref())).map_err(|cause| format!("line {number}: {cause}"))? {
        Translation::Nothing => Ok(None),
        Translation::Flag(flag, word) => Ok(respelled(flag, word)),
        Translation::Ignored(line) => {
            ignored.push(line);
            Ok(None)
        }
        Translation::AsWritten => match (known.iter().find(|flag| flag.get_long() == Some(name)), value.get_ref()) {
            (Some(flag), DeValue::String(word)) => Ok(respelled(name, aliases::choice(flag, word))),
            (None, _) if !FILE_ONLY.contains(&name) => {
                Err(format!("line {number}: unknown key `{}`{}", key.get_ref().escape_debug(), hint(known, name)))
            }
            _ => Ok(Some((Spanned::new(key.span(), name.to_string().into()), value))),
        },
    }
}

fn hint(known: &[Arg], name: &str) -> String {
    let names = known.iter().filter_map(Arg::get_long).chain(FILE_ONLY.iter().copied());
    let nearest = names.max_by(|a, b| strsim::jaro_winkler(a, name).total_cmp(&strsim::jaro_winkler(b, name)));
    nearest.map(|nearest| format!("; the nearest key is `{nearest}`")).unwrap_or_default()
}

/// A value as it would stand on the command line.
fn as_text(value: &DeValue) -> String {
    match value {
        DeValue::String(text) => text.to_string(),
        DeValue::Boolean(truth) => truth.to_string(),
        DeValue::Integer(number) => number.as_str().into(),
        DeValue::Float(number) => number.as_str().into(),
        DeValue::Array(all) => all.iter().map(|value| as_text(value.get_ref())).collect::<Vec<_>>().join(","),
        DeValue::Table(_) | DeValue::Datetime(_) => String::new(),
    }
}

/// One line that says where in `text` the `message` belongs, and shows the place.
fn at(text: &str, span: Option<Range<usize>>, message: &str) -> String {
    let message = message.split_whitespace().collect::<Vec<_>>().join(" ");
    let Some(span) = span else { return message };
    let number = line_number(text, span.start);
    let line: String = text.lines().nth(number - 1).unwrap_or_default().trim().chars().take(SHOWN_CHARS).collect();
    format!("line {number} `{}`: {message}", line.escape_debug())
}

/// The number, from 1, of the line that holds byte `offset`.
fn line_number(text: &str, offset: usize) -> usize {
    1 + text.bytes().take(offset).filter(|&byte| byte == b'\n').count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::options::{Injection, Technique};
    use crate::config::settings::tests::{command_line, flags, sample, sample_options};
    use proptest::prelude::*;

    #[test]
    fn every_flag_can_be_set_in_the_file_under_both_spellings() {
        for flag in flags().into_iter().filter(|flag| flag.get_long() != Some("config")) {
            let (name, value) = sample(&flag);
            for key in [name.clone(), name.replace('-', "_")] {
                let bare = parse(&format!("{key} = {value}"));
                let read = bare.or_else(|_| parse(&format!("{key} = '{value}'")));
                assert_eq!(read, Ok(sample_options(&flag)), "{key}");
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
    fn names_of_other_programs_mean_here_what_they_mean_on_the_command_line() {
        let text = "model_name_or_path = 'm'\nbf16 = true\nfp16 = false\nwarmup_steps = 0.1\nmax_seq_length = 8\ndataset = ['a', 'b']\n\
            strategy = 'zero_offload'\noptim = 'adamw_torch'\ntf32 = true\nlr_scheduler_type = 'constant_with_warmup'\nreport_to = ['none']";
        let read = parse(text).unwrap();
        let flags =
            ["--model=m", "--dtype=bfloat16", "--warmup-ratio=0.1", "--seq-length=8", "--data", "a", "b", "--strategy=zero-offload"];
        let flags = command_line(&[&flags[..], &["--lr-scheduler-type=constant", "--report-to=none"]].concat()).unwrap();
        assert_eq!(TrainOptions { ignored: Vec::new(), ..read.clone() }, flags);
        assert!(read.ignored.len() == 1 && read.ignored[0].starts_with("tf32 ("), "{:?}", read.ignored);
        assert_eq!(parse("seed = 1\ndeepspeed = 'ds.json'").unwrap_err().split(':').next(), Some("line 2"));
    }

    #[test]
    fn errors_name_line_key_and_cause() {
        let cases: &[(&str, &[&str])] = &[
            ("seed = 1\nlerning_rate = 1", &["line 2", "unknown key `lerning_rate`", "`learning-rate`"]),
            ("config = 'x'", &["line 1", "unknown key `config`"]),
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
            ("seed =\nslots = 1", &["line 1 `seed =`"]),
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
