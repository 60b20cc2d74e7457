//! Where a chat template comes from: the file that a flag names, or the model's directory.

use super::date::Day;
use super::mask::TrainOn;
use super::record::{DataFormat, RecordRules};
use super::template::ChatTemplate;
use super::template_variables;
use crate::disk;
use crate::error::{Error, Result};
use crate::model_dir::ModelDir;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// No template is larger; the largest have some tens of kilobytes.
const BYTES_MAX: u64 = 16 << 20;

/// What the flags say of records.
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
    /// How records are read with a model in `dir`. A template is looked for only where one is named or asked for, as `asks_for_template` says
    /// of the data: of plain text it says nothing.
    ///
    /// # Errors
    /// `Usage` for a flag that makes no sense; `Io` and `Format` for a template that is there and cannot be used.
    pub(crate) fn rules(&self, dir: Option<&ModelDir>, asks_for_template: impl FnOnce(&RecordRules) -> bool) -> Result<RecordRules> {
        let rules = self.plain_rules()?;
        let rules = RecordRules { has_answers: asks_for_template(&rules), ..rules };
        let needs_template = self.template.is_some() || self.template_name.is_some() || rules.has_answers;
        if needs_template { self.with_template(rules, dir) } else { Ok(rules) }
    }

    /// As [`RecordFlags::rules`], without a template: what tells formats apart.
    ///
    /// # Errors
    /// `Usage` for a flag that makes no sense.
    pub(crate) fn plain_rules(&self) -> Result<RecordRules> {
        let pair = |pair: &String| {
            let named = pair.split_once('=').filter(|(ours, theirs)| !ours.is_empty() && !theirs.is_empty());
            let named = named.map(|(ours, theirs)| (ours.to_string(), theirs.to_string()));
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
    /// `Usage` for what is no day.
    pub(crate) fn day(&self) -> Result<String> {
        self.parsed_day().map(|day| day.to_string())
    }

    fn parsed_day(&self) -> Result<Day> {
        let wrong = |date| Error::usage(format!("--chat-date {date}: expected a day as YYYY-MM-DD"));
        self.date.map_or_else(|| Ok(Day::today()), |date| Day::parse(date).ok_or_else(|| wrong(date)))
    }

    /// `rules` with the template, which is not compiled here.
    fn with_template(&self, rules: RecordRules, dir: Option<&ModelDir>) -> Result<RecordRules> {
        let Some((template_file, source)) = self.source(dir)? else {
            let place = dir.map_or("the built-in model has".into(), |dir| {
                format!("{} has no chat_template.jinja, and its tokenizer_config.json", dir.path().display())
            });
            let none = format!("{place} no chat template: --chat-template FILE names one");
            return Ok(RecordRules { template: Err(none), ..rules });
        };
        let special_tokens = dir.map_or(Ok(Map::new()), special_tokens)?;
        let template = ChatTemplate::new(&source, special_tokens, self.parsed_day()?);
        let template = Ok(template.map_err(|cause| Error::format(&template_file, cause))?);
        Ok(RecordRules { template, template_file, ..rules })
    }

    /// The template and the file that holds it.
    fn source(&self, dir: Option<&ModelDir>) -> Result<Option<(PathBuf, String)>> {
        if let Some(path) = self.template {
            let text = read(path)?.ok_or_else(|| Error::io("read", path, std::io::ErrorKind::NotFound.into()))?;
            return Ok(Some((path.into(), text)));
        }
        let Some(dir) = dir else { return Ok(None) };
        let (own, config) = (dir.file("chat_template.jinja")?, dir.file("tokenizer_config.json")?);
        if self.template_name.is_none()
            && let Some(text) = read(&own)?
        {
            return Ok(Some((own, text)));
        }
        let named = |templates: &Value| match (templates, self.template_name) {
            (Value::String(text), None) => Some(text.clone()),
            (Value::Array(list), name) => {
                let named = list.iter().find(|entry| entry["name"] == name.unwrap_or("default"));
                named.and_then(|entry| entry["template"].as_str()).map(String::from)
            }
            _ => None,
        };
        let found = named(&json(&config)?["chat_template"]);
        match (found, self.template_name) {
            (None, Some(name)) => Err(Error::usage(format!("--chat-template-name {name}: {} has no such template", config.display()))),
            (found, _) => Ok(found.map(|text| (config, text))),
        }
    }
}

fn read(path: &Path) -> Result<Option<String>> {
    let bytes = disk::read_if_present(path, BYTES_MAX)?;
    bytes.map(|bytes| String::from_utf8(bytes).map_err(|_| Error::format(path, "not UTF-8"))).transpose()
}

fn json(path: &Path) -> Result<Value> {
    let text = read(path)?;
    text.map_or(Ok(Value::Null), |text| serde_json::from_str(&text).map_err(|e| Error::format(path, e)))
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
