//! How a run's text becomes tokens: the flags, the model's directory and, when a run goes on, its checkpoint decide.

use crate::config::options::TokenizerChoice;
use crate::config::settings::{OnResume, Settings};
use crate::data::chat::find::RecordFlags;
use crate::data::chat::mask::TrainOn;
use crate::data::chat::record::{DataFormat, RecordRules};
use crate::data::dataset::Dataset;
use crate::data::encode::text_files;
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::data::read::files;
use crate::data::rows::row_rules::Packing;
use crate::data::run_sources::KnownSources;
use crate::data::tokenizer::AddBos;
use crate::describe;
use crate::disk::named_by;
use crate::error::{Error, Result};
use crate::hub::HubQuery;
use crate::model::shape::ModelShape;
use crate::model_dir::{CONFIG, ModelDir, expect_exists};
use crate::progress_event::ProgressEvent;
use crate::signals::StopFlag;
use serde_json::Value;
use std::path::PathBuf;
use std::sync::Arc;

/// `settings` with a local path in place of each name on the hub.
///
/// # Errors
/// Errors of [`HubQuery::model`] and [`expect_exists`].
pub(crate) fn find_sources(
    settings: &Settings,
    with_weights: bool,
    stop: &StopFlag,
    emit: &mut dyn FnMut(ProgressEvent<'_>),
) -> Result<Settings> {
    let mut model = None;
    if let Some(path) = &settings.model {
        let found = HubQuery { with_weights, stop, emit }.model(path)?;
        expect_exists(&found)?;
        model = Some(found);
    }
    let mut data = |paths: &[PathBuf]| -> Result<Vec<PathBuf>> {
        paths.iter().map(|path| HubQuery { with_weights, stop, emit: &mut *emit }.data(path)).collect()
    };
    let (data, eval_data) = (data(&settings.data)?, data(&settings.eval_data)?);
    Ok(Settings { model, data, eval_data, ..settings.clone() })
}

/// Loads the readers of the data of `settings` outside a run: the model's shape, the tokenizer, and the settings from [`tokenizer`].
///
/// # Errors
/// Errors of the model's configuration and of [`tokenizer`].
pub(crate) fn reader(settings: &Settings, saved: Option<&Value>) -> Result<(ModelShape, Tokenizer, Settings)> {
    let shape = match settings.model.as_deref().map(ModelDir::open).transpose()? {
        Some(dir) => ModelShape::read(&dir.file(CONFIG)?)?,
        None => ModelShape::demo(),
    };
    let (tokenizer, settings) = tokenizer(settings, &shape, saved, &KnownSources::default())?;
    Ok((shape, tokenizer, settings))
}

/// The tokenizer of a run, and its settings with detected values in place of `auto`: a checkpoint keeps those.
///
/// `saved` are the settings in the checkpoint that the run goes on from. It keeps their choices: other tokens around documents would
/// move every position in the data. Files that are `known` are not read.
///
/// # Errors
/// Errors of [`Tokenizer::load`] and [`files::find_files`]; `Format` for text and a model without a tokenizer; `Usage` for a flag
/// that differs from the checkpoint.
pub(crate) fn tokenizer(
    settings: &Settings,
    shape: &ModelShape,
    saved: Option<&Value>,
    known: &KnownSources,
) -> Result<(Tokenizer, Settings)> {
    let mut settings = saved.map_or_else(|| settings.clone(), |saved| as_before(settings, saved));
    if let Some(saved) = saved {
        expect_same(&settings, saved, &["tokenizer"])?;
    }
    let flags = record_flags(&settings);
    let (rules, day) = (rules(&settings, &flags, known)?, flags.day()?);
    let tokenizer = find(&settings, shape, known, rules.into())?.refusing(shape.media_tokens.clone());
    settings.chat_date = Some(day);
    settings.add_bos = if tokenizer.begin_of_text().is_empty() { AddBos::No } else { AddBos::Yes };
    settings.eos_token = tokenizer.end_of_text().map(|id| id.to_string());
    if tokenizer.is_bytes() {
        settings.tokenizer = TokenizerChoice::Bytes;
    }
    if let Some(saved) = saved {
        expect_same(&settings, saved, &OnResume::Tokens.keys())?;
    }
    Ok((tokenizer, settings))
}

/// A line for people when no token says where documents end.
pub(crate) fn warning(settings: &Settings, tokenizer: &Tokenizer, dataset: &Dataset) -> Option<String> {
    let has_text = ![DataFormat::Rollouts, DataFormat::Teacher].contains(&settings.data_format);
    let unmarked = has_text && dataset.documents() > 1 && tokenizer.end_of_text().is_none();
    let documents = dataset.documents();
    let lack = match settings.packing {
        Packing::Auto | Packing::Wrapped => "are joined without a token between them",
        Packing::Bfd | Packing::Off => "have no token after them that would be learned as their end",
    };
    unmarked.then(|| format!("{documents} documents {lack}, because no end-of-text token is known; set one with --eos-token TOKEN"))
}

/// `settings`, with the choices of the checkpoint where flags are not set.
fn as_before(settings: &Settings, saved: &Value) -> Settings {
    let mut settings = settings.clone();
    if settings.tokenizer == TokenizerChoice::Auto {
        settings.tokenizer = serde_json::from_value(saved["tokenizer"].clone()).unwrap_or(TokenizerChoice::Auto);
    }
    if settings.add_bos == AddBos::Auto {
        // Before there was a choice there was no such token.
        settings.add_bos = serde_json::from_value(saved["add_bos"].clone()).unwrap_or(AddBos::No);
    }
    if settings.train_on == TrainOn::Auto {
        settings.train_on = serde_json::from_value(saved["train_on"].clone()).unwrap_or(TrainOn::Auto);
    }
    if settings.data_format == DataFormat::Auto {
        settings.data_format = serde_json::from_value(saved["data_format"].clone()).unwrap_or(DataFormat::Auto);
    }
    if settings.columns.is_empty() {
        settings.columns = serde_json::from_value(saved["columns"].clone()).unwrap_or_default();
    }
    let text = |key: &str| saved[key].as_str().map(String::from);
    settings.eos_token = settings.eos_token.or_else(|| text("eos_token"));
    settings.chat_template_name = settings.chat_template_name.or_else(|| text("chat_template_name"));
    settings.chat_template_kwargs = settings.chat_template_kwargs.or_else(|| text("chat_template_kwargs"));
    settings.chat_date = settings.chat_date.or_else(|| text("chat_date"));
    settings
}

/// Compares settings, their `auto` resolved, with the checkpoint's; older checkpoints have fewer of them.
fn expect_same(settings: &Settings, saved: &Value, keys: &[&str]) -> Result<()> {
    let now = serde_json::to_value(settings).map_err(|e| Error::usage(format!("settings: {e}")))?;
    let without_bos = Value::from("no");
    for &key in keys {
        let (then, now) = (saved.get(key).or((key == "add_bos").then_some(&without_bos)), &now[key]);
        if let Some(then) = then.filter(|&then| then != now) {
            let flag = describe::flag_name(key);
            let cause = "the data position would mean other tokens; use the former value, or start a new run";
            return Err(Error::usage(format!("--{flag} was {then} when the checkpoint was made and is {now} now: {cause}")));
        }
    }
    Ok(())
}

pub(super) fn record_flags(settings: &Settings) -> RecordFlags<'_> {
    RecordFlags {
        format: settings.data_format,
        columns: &settings.columns,
        train_on: settings.train_on,
        template: settings.chat_template.as_deref(),
        template_name: settings.chat_template_name.as_deref(),
        template_kwargs: settings.chat_template_kwargs.as_deref(),
        date: settings.chat_date.as_deref(),
    }
}

fn rules(settings: &Settings, flags: &RecordFlags<'_>, known: &KnownSources) -> Result<RecordRules> {
    let dir = settings.model.as_deref().map(ModelDir::open).transpose()?;
    let lists = [&settings.data[..], &settings.eval_data];
    let find = |(paths, flag): (&&[PathBuf], _)| known.find_files(paths).map_err(|error| named_by(flag, error));
    let files = lists.iter().zip(["--data", "--eval-data"]).map(find).collect::<Result<Vec<_>>>()?.concat();
    flags.rules(dir.as_ref(), |rules| known.has_answers(&lists, rules).unwrap_or_else(|| text_files::needs_template(&files, rules)))
}

fn find(settings: &Settings, shape: &ModelShape, known: &KnownSources, rules: Arc<RecordRules>) -> Result<Tokenizer> {
    let (dir, end_of_text) = (settings.model.as_deref(), settings.eos_token.as_deref());
    let files = known.find_files(&settings.data)?;
    if !files.is_empty() && !files.iter().any(|file| files::is_text(file)) {
        let requested = end_of_text.is_some() || settings.add_bos == AddBos::Yes;
        let useless = "--eos-token and --add-bos: not available for token ids, between which no token is inserted";
        return if requested { Err(Error::usage(useless)) } else { Ok(Tokenizer::absent(rules)) };
    }
    let (TokenizerChoice::Auto, Some(dir)) = (settings.tokenizer, dir) else {
        return Tokenizer::bytes_with(end_of_text, settings.add_bos, rules);
    };
    let dir = ModelDir::open(dir)?;
    match Tokenizer::load_with(&dir, end_of_text, settings.add_bos, &rules)? {
        Some(tokenizer) => Ok(tokenizer),
        None if shape.vocab == 256 => Tokenizer::bytes_with(end_of_text, settings.add_bos, rules),
        None if text_files::hold_ids(&files, &rules) => Ok(Tokenizer::absent(rules)),
        None => Err(missing(&dir)),
    }
}

/// Text, a model that reads more than bytes, and no `tokenizer.json`.
fn missing(dir: &ModelDir) -> Error {
    let exists = |name: &str| dir.path().join(name).exists();
    let dir = dir.path().display();
    let (found, from) = match () {
        () if exists("tokenizer.model") => ("only tokenizer.model", dir.to_string()),
        () if exists("vocab.json") && exists("merges.txt") => ("only vocab.json and merges.txt", dir.to_string()),
        () => ("nor any other tokenizer", "NAME-OF-THE-MODEL".into()),
    };
    let command = format!("from transformers import AutoTokenizer; AutoTokenizer.from_pretrained('{from}').save_pretrained('{dir}')");
    let cause = format!("no tokenizer.json, {found}; make it with: python -c \"{command}\" (or train on bytes: --tokenizer bytes)");
    Error::format(dir.to_string(), cause)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::TrainOptions;
    use crate::data::encode::tokenizer_handle::tests::{WORDS, model_dir, with_bos};
    use serde_json::json;
    use std::path::Path;

    const TEXT: (&str, &str) = ("data.txt", "a b a b a b");

    fn shape(vocab: usize) -> ModelShape {
        ModelShape { vocab, ..ModelShape::demo() }
    }

    fn options(dir: &Path, data: &str) -> TrainOptions {
        TrainOptions { model: Some(dir.into()), data: Some(vec![dir.join(data)]), ..Default::default() }
    }

    fn settings(dir: &Path) -> Settings {
        Settings::resolve(options(dir, "data.txt")).unwrap()
    }

    #[test]
    fn text_without_a_tokenizer_is_an_error_that_names_files_and_the_command() {
        let command = ["AutoTokenizer.from_pretrained('", "save_pretrained('", "--tokenizer bytes"];
        for (files, found) in [
            (&[TEXT, ("tokenizer.model", "")][..], "only tokenizer.model"),
            (&[TEXT, ("vocab.json", ""), ("merges.txt", "")], "only vocab.json and merges.txt"),
            (&[TEXT, ("vocab.json", "")], "nor any other tokenizer"),
            (&[TEXT], "nor any other tokenizer"),
        ] {
            let dir = model_dir(files);
            let message = tokenizer(&settings(dir.path()), &shape(32000), None, &KnownSources::default()).err().unwrap().to_string();
            assert!(message.contains(found) && command.iter().all(|part| message.contains(part)), "{message}");
        }
    }

    #[test]
    fn bytes_need_256_ids_or_a_flag_and_token_files_need_nothing() {
        let dir = model_dir(&[TEXT, ("ids.bin", "abcd")]);
        let display = |settings: &Settings, vocab| {
            tokenizer(settings, &shape(vocab), None, &KnownSources::default()).map(|(tokenizer, _)| tokenizer.to_string())
        };
        assert_eq!(display(&settings(dir.path()), 256).unwrap(), "bytes (256 ids)");
        let requested = Settings { tokenizer: TokenizerChoice::Bytes, eos_token: Some("299".into()), ..settings(dir.path()) };
        assert_eq!(display(&requested, 300).unwrap(), "bytes (256 ids, end of text 299)");
        let ids = Settings::resolve(options(dir.path(), "ids.bin")).unwrap();
        assert_eq!(display(&ids, 300).unwrap(), "none: the data are token ids");
        for (odd, word) in [
            (Settings { eos_token: Some("</s>".into()), ..settings(dir.path()) }, "--eos-token \"</s>\""),
            (Settings { add_bos: AddBos::Yes, ..settings(dir.path()) }, "--add-bos yes"),
            (Settings { add_bos: AddBos::Yes, ..ids }, "--eos-token and --add-bos"),
        ] {
            let refused = tokenizer(&odd, &shape(256), None, &KnownSources::default()).err().unwrap();
            assert!(refused.exit_code() == 2 && refused.to_string().starts_with(word), "{refused}");
        }
    }

    #[test]
    fn a_resumed_run_keeps_the_choices_of_its_checkpoint() {
        let dir = model_dir(&[TEXT, ("tokenizer.json", &with_bos(WORDS))]);
        let fresh = settings(dir.path());
        let resolve = |settings: &Settings, saved: &Value| {
            tokenizer(settings, &shape(8), Some(saved), &KnownSources::default())
                .map(|(tokenizer, settings)| (tokenizer.begin_of_text().to_vec(), tokenizer.end_of_text(), settings))
        };
        let (_, recorded) = tokenizer(&fresh, &shape(8), None, &KnownSources::default()).unwrap();
        assert_eq!((recorded.add_bos, recorded.eos_token.as_deref()), (AddBos::Yes, Some("7")));
        let saved = serde_json::to_value(&recorded).unwrap();
        assert_eq!(resolve(&fresh, &saved).unwrap(), (vec![1], Some(7), recorded.clone()));
        // The recorded token counts, not the present content of the files.
        let mut moved = saved.clone();
        moved["eos_token"] = json!("0");
        assert_eq!(resolve(&fresh, &moved).unwrap().1, Some(0));
        let older = json!({"seed": 42});
        assert_eq!(resolve(&fresh, &older).unwrap().0, [0; 0]);
        let without = Settings { add_bos: AddBos::No, ..fresh.clone() };
        let bytes = Settings { tokenizer: TokenizerChoice::Bytes, ..fresh.clone() };
        let ends = Settings { eos_token: Some("a".into()), ..fresh.clone() };
        let with = Settings { add_bos: AddBos::Yes, ..fresh.clone() };
        for (settings, saved, words) in [
            (without, &saved, "--add-bos was \"yes\" when the checkpoint was made and is \"no\" now"),
            (bytes, &saved, "--tokenizer was \"auto\""),
            (ends, &saved, "--eos-token was \"7\" when the checkpoint was made and is \"0\" now"),
            (with, &older, "--add-bos was \"no\""),
        ] {
            let refused = resolve(&settings, saved).unwrap_err();
            assert!(refused.exit_code() == 2 && refused.to_string().starts_with(words), "{refused}");
        }
    }
}
