//! Where a chat template comes from: the file that a flag names, or the model's directory.

use super::date::Day;
use super::mask::TrainOn;
use super::named::{DEFAULT, FoundTemplate, NamedTemplates, TOOL_USE, json, read};
use super::record::{DataFormat, RecordRules};
use super::template::ChatTemplate;
use super::template_variables;
use crate::disk::named_by;
use crate::error::{Error, Result};
use crate::model_dir::ModelDir;
use serde_json::{Map, Value};
use std::path::Path;

/// Command-line flags that control how records are read.
pub(crate) struct RecordFlags<'a> {
    pub(crate) format: DataFormat,
    /// `messages=chat,tools=functions`.
    pub(crate) columns: &'a [String],
    pub(crate) train_on: TrainOn,
    pub(crate) template: Option<&'a Path>,
    pub(crate) template_name: Option<&'a str>,
    /// Variables of the template, an object of JSON.
    pub(crate) template_kwargs: Option<&'a str>,
    /// `YYYY-MM-DD`.
    pub(crate) date: Option<&'a str>,
}

impl RecordFlags<'_> {
    /// The rules for reading records with a model in `dir`. A template is loaded only where a flag names one or the data needs one, as
    /// `needs_template` decides; plain text needs none.
    ///
    /// # Errors
    /// `Usage` for a flag that makes no sense; `Io` and `Format` for a template that is there and cannot be used.
    pub(crate) fn rules(&self, dir: Option<&ModelDir>, needs_template: impl FnOnce(&RecordRules) -> bool) -> Result<RecordRules> {
        let rules = self.plain_rules()?;
        let rules = RecordRules { has_answers: needs_template(&rules), ..rules };
        let needs_template = self.template.is_some() || self.template_name.is_some() || rules.has_answers;
        if needs_template { self.with_template(rules, dir) } else { Ok(rules) }
    }

    /// As [`RecordFlags::rules`], without a template: these rules suffice to detect the format.
    ///
    /// # Errors
    /// `Usage` for a flag that makes no sense.
    pub(crate) fn plain_rules(&self) -> Result<RecordRules> {
        let pair = |pair: &String| {
            let named = pair.split_once('=').filter(|(own_name, foreign_name)| !own_name.is_empty() && !foreign_name.is_empty());
            let named = named.map(|(own_name, foreign_name)| (own_name.to_string(), foreign_name.to_string()));
            named.ok_or_else(|| Error::usage(format!("--columns {pair}: expected OURS=THEIRS, such as messages=chat")))
        };
        let columns = self.columns.iter().map(pair).collect::<Result<_>>()?;
        let template_variables = self.template_variables()?;
        Ok(RecordRules { format: self.format, columns, train_on: self.train_on, template_variables, ..RecordRules::default() })
    }

    fn template_variables(&self) -> Result<Map<String, Value>> {
        let Some(json) = self.template_kwargs else { return Ok(Map::new()) };
        template_variables::of(&json.into()).map_err(|cause| Error::usage(format!("--chat-template-kwargs {json} {cause}")))
    }

    /// The day of a run, in words: the flag's, or today.
    ///
    /// # Errors
    /// `Usage` for a flag that is no day.
    pub(crate) fn day(&self) -> Result<String> {
        self.parsed_day().map(|day| day.to_string())
    }

    fn parsed_day(&self) -> Result<Day> {
        let wrong = |date| Error::usage(format!("--chat-date {date}: expected a day as YYYY-MM-DD"));
        self.date.map_or_else(|| Ok(Day::today()), |date| Day::parse(date).ok_or_else(|| wrong(date)))
    }

    /// `rules` with the template, which is not compiled here.
    fn with_template(&self, rules: RecordRules, dir: Option<&ModelDir>) -> Result<RecordRules> {
        let (found, tool_use) = match self.found(dir)? {
            Ok(found) => found,
            Err(none) => return Ok(RecordRules { template: Err(none), ..rules }),
        };
        let (special_tokens, day) = (dir.map_or(Ok(Map::new()), special_tokens)?, self.parsed_day()?);
        let template = |found: &FoundTemplate| {
            ChatTemplate::new(&found.source, special_tokens.clone(), day).map_err(|cause| Error::format(&found.file, cause))
        };
        let tool_use = tool_use.as_ref().map(template).transpose()?;
        let template = template(&found)?;
        let template = Ok(tool_use.into_iter().fold(template, ChatTemplate::with_tool_use));
        Ok(RecordRules { template, template_file: found.file, ..rules })
    }

    /// The template, and the one for conversations with tools if that is another; or, in words, why there is none.
    fn found(&self, dir: Option<&ModelDir>) -> Result<std::result::Result<(FoundTemplate, Option<FoundTemplate>), String>> {
        if let Some(path) = self.template {
            let missing = || named_by("--chat-template", Error::io("read", path, std::io::ErrorKind::NotFound.into()));
            let source = read(path)?.ok_or_else(missing)?;
            return Ok(Ok((FoundTemplate { file: path.into(), source }, None)));
        }
        let Some(dir) = dir else { return Ok(Err("the built-in model has no chat template; use --chat-template FILE".into())) };
        let (templates, place) = (NamedTemplates::read(dir)?, dir.path().display());
        if let Some(name) = self.template_name {
            let unknown = || Error::usage(format!("--chat-template-name {name}: {place} has no such template; {}", known(&templates)));
            return templates.anywhere(name).map(|found| Ok((found, None))).ok_or_else(unknown);
        }
        let none = || match templates.names() {
            names if names.is_empty() => {
                format!("{place} has no chat_template.jinja, and its tokenizer_config.json no chat template; use --chat-template FILE")
            }
            names => format!("{place}: none of its chat templates ({names}) is named default; choose one with --chat-template-name NAME"),
        };
        Ok(templates.counted(DEFAULT).map(|found| (found, templates.counted(TOOL_USE))).ok_or_else(none))
    }
}

/// The names of `templates`, as a part of a sentence.
fn known(templates: &NamedTemplates) -> String {
    match templates.names() {
        names if names.is_empty() => "it has none".into(),
        names => format!("it has: {names}"),
    }
}

/// `bos_token`, `eos_token` and their like, by text.
fn special_tokens(dir: &ModelDir) -> Result<Map<String, Value>> {
    let mut tokens = Map::new();
    for name in ["special_tokens_map.json", "tokenizer_config.json"] {
        let Value::Object(entries) = json(&dir.file(name)?)? else { continue };
        for (key, value) in entries.into_iter().filter(|(key, _)| key.ends_with("_token")) {
            let text = value.as_str().or(value["content"].as_str()).map(String::from);
            tokens.extend(text.map(|text| (key, text.into())));
        }
    }
    Ok(tokens)
}
