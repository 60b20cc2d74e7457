//! Which columns a record has, and what they mean.

use super::mask::{ChatSample, ChatSamples, Conversation, TrainOn};
use super::message;
use super::template::ChatTemplate;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::PathBuf;

/// What `--data-format` can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataFormat {
    /// The one whose columns the first record of a file has.
    Auto,
    /// `text`.
    Text,
    /// `messages` or `conversations`, `tools` beside.
    Messages,
    /// `prompt` and `completion`, text or messages.
    PromptCompletion,
    /// `instruction` and `output`, `input` and `system` beside.
    Alpaca,
    /// `input_ids`, `labels` beside.
    InputIds,
}

impl DataFormat {
    const COLUMNS: [(Self, &[&str]); 6] = [
        (Self::Text, &["text"]),
        (Self::Messages, &["messages"]),
        (Self::Messages, &["conversations"]),
        (Self::PromptCompletion, &["prompt", "completion"]),
        (Self::Alpaca, &["instruction", "output"]),
        (Self::InputIds, &["input_ids"]),
    ];

    /// Whether its records hold answers to prompts, not running text.
    pub(in crate::data) fn has_answers(self) -> bool {
        matches!(self, Self::Messages | Self::PromptCompletion | Self::Alpaca)
    }

    fn name(self) -> String {
        serde_json::to_value(self).ok().and_then(|name| name.as_str().map(String::from)).unwrap_or_default()
    }

    fn fits(self, has: &dyn Fn(&str) -> bool) -> bool {
        Self::COLUMNS.iter().any(|(format, columns)| *format == self && columns.iter().all(|column| has(column)))
    }
}

/// How records are read: what the flags and the model's files say.
pub(crate) struct RecordRules {
    pub(crate) format: DataFormat,
    /// The data's name of a column, by the name that it has here.
    pub(crate) columns: BTreeMap<String, String>,
    pub(crate) train_on: TrainOn,
    /// Whether records may hold answers to prompts.
    pub(in crate::data) has_answers: bool,
    /// The template, or why there is none.
    pub(in crate::data) template: Result<ChatTemplate, String>,
    /// The file that holds it.
    pub(in crate::data) template_file: PathBuf,
}

impl Default for RecordRules {
    fn default() -> Self {
        let template = Err("chat data needs a model with a chat template: --chat-template FILE names one".into());
        Self {
            format: DataFormat::Auto,
            columns: BTreeMap::new(),
            train_on: TrainOn::Auto,
            has_answers: false,
            template,
            template_file: PathBuf::new(),
        }
    }
}

/// What a record says.
#[derive(Debug, PartialEq, Eq)]
pub(in crate::data) enum Content {
    /// A document like those of a text file.
    Text(String),
    /// What a template wrote: nothing stands around it.
    Rendered(ChatSamples),
    /// A prompt and what completes it; the end of text belongs to the completion.
    Completed(ChatSample),
    /// Ids, each with whether it is trained.
    Ids(Vec<(u32, bool)>),
}

/// One record, its columns by the names that they have here.
struct ReadRecord<'a> {
    rules: &'a RecordRules,
    columns: Map<String, Value>,
}

impl RecordRules {
    /// The format of the record `line`, the first of its file.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub(in crate::data) fn detect(&self, line: &str) -> Result<DataFormat, String> {
        let record = self.parse(line)?;
        if self.format != DataFormat::Auto {
            return Ok(self.format);
        }
        let mut fitting: Vec<DataFormat> =
            DataFormat::COLUMNS.iter().map(|(format, _)| *format).filter(|format| format.fits(&|name| record.has(name))).collect();
        fitting.dedup();
        match fitting[..] {
            [format] => Ok(format),
            [] => {
                let found: Vec<_> = record.columns.keys().map(String::as_str).take(8).collect();
                let known = DataFormat::COLUMNS.map(|(_, columns)| columns.join(" with ")).join(", ");
                Err(format!("no column of data (columns: {}; known: {known}); --columns OURS=THEIRS names one", found.join(", ")))
            }
            [one, other, ..] => Err(format!("its columns are those of {} and of {}: choose by --data-format", one.name(), other.name())),
        }
    }

    /// Whether the data's column `name` can say something.
    #[cfg(feature = "parquet")]
    pub(in crate::data) fn reads(&self, name: &str) -> bool {
        let beside = ["tools", "system", "input", "labels"];
        let known = || DataFormat::COLUMNS.iter().flat_map(|(_, columns)| columns.iter()).chain(&beside).any(|column| *column == name);
        self.columns.values().any(|theirs| theirs == name) || known()
    }

    /// What the record `line` of a file of `format` says.
    ///
    /// # Errors
    /// What is wrong with it, in words.
    pub(in crate::data) fn read(&self, format: DataFormat, line: &str) -> Result<Content, String> {
        let record = self.parse(line)?;
        if !format.fits(&|name| record.has(name)) {
            return Err(format!("lacks the columns of {}, which its file has", format.name()));
        }
        match format {
            DataFormat::Auto | DataFormat::Text => {
                self.allow(&[TrainOn::All], format)?;
                Ok(Content::Text(record.text("text")?))
            }
            DataFormat::InputIds => {
                self.allow(&[TrainOn::All], format)?;
                record.ids().map(Content::Ids)
            }
            DataFormat::PromptCompletion if record.columns["prompt"].is_string() => {
                self.allow(&[TrainOn::All, TrainOn::Completion], format)?;
                let (prompt, completion) = (record.text("prompt")?, record.text("completion")?);
                let begin = if self.train_on == TrainOn::All { 0 } else { prompt.len() };
                Ok(Content::Completed(ChatSample::trained_from(begin, prompt + &completion)))
            }
            DataFormat::Messages | DataFormat::PromptCompletion | DataFormat::Alpaca => self.rendered(&record, format),
        }
    }

    /// What decides which tokens a record becomes; `None` where all is as it is for plain text.
    pub(in crate::data) fn identity(&self) -> Option<Value> {
        let template = self.template.as_ref().ok().map(ChatTemplate::identity);
        let is_plain = (self.format, self.train_on) == (DataFormat::Auto, TrainOn::Auto) && self.columns.is_empty() && template.is_none();
        let all = json!({"format": self.format, "columns": self.columns, "train_on": self.train_on, "chat_template": template});
        (!is_plain).then_some(all)
    }

    fn rendered(&self, record: &ReadRecord<'_>, format: DataFormat) -> Result<Content, String> {
        let (messages, prompt) = match format {
            DataFormat::PromptCompletion => {
                let (mut messages, completion) = (record.messages("prompt")?, record.messages("completion")?);
                let prompt = messages.len();
                messages.extend(completion);
                (messages, prompt)
            }
            DataFormat::Alpaca => (record.alpaca()?, 0),
            _ if self.train_on == TrainOn::Completion => self.allow(&[], format).map(|()| (vec![], 0))?,
            _ => (record.messages(if record.has("messages") { "messages" } else { "conversations" })?, 0),
        };
        let template = self.template.as_ref().map_err(Clone::clone)?;
        let conversation = Conversation { messages, tools: record.tools()?, prompt };
        conversation.samples(template, self.train_on).map(Content::Rendered)
    }

    fn allow(&self, allowed: &[TrainOn], format: DataFormat) -> Result<(), String> {
        let is_allowed = self.train_on == TrainOn::Auto && format != DataFormat::Auto || allowed.contains(&self.train_on);
        let word = serde_json::to_value(self.train_on).unwrap_or_default();
        if is_allowed {
            Ok(())
        } else {
            Err(format!("--train-on {}: data of {} has no such part", word.as_str().unwrap_or(""), format.name()))
        }
    }

    fn parse(&self, line: &str) -> Result<ReadRecord<'_>, String> {
        if !line.trim_start().starts_with('{') {
            let array = if line.trim_start().starts_with('[') { "; an array of records is a .json" } else { "" };
            return Err(format!("not an object; each record is one, such as {{\"text\": \"...\"}}{array}"));
        }
        let mut columns: Map<String, Value> = serde_json::from_str(line).map_err(|e| json_cause(&e))?;
        // All are taken before the first is put down: two may have each other's name.
        let mut take = |(ours, theirs): (&String, &String)| {
            let value = columns.remove(theirs).ok_or_else(|| format!("no column {theirs:?}, which --columns names"))?;
            Ok::<_, String>((ours.clone(), value))
        };
        let renamed: Vec<_> = self.columns.iter().map(&mut take).collect::<Result<_, _>>()?;
        columns.extend(renamed);
        Ok(ReadRecord { rules: self, columns })
    }
}

impl ReadRecord<'_> {
    /// Whether a column is there and says something: tables fill what a row lacks with null.
    fn has(&self, name: &str) -> bool {
        self.columns.get(name).is_some_and(|value| !value.is_null())
    }

    fn their_name<'a>(&'a self, name: &'a str) -> &'a str {
        self.rules.columns.get(name).map_or(name, String::as_str)
    }

    fn text(&self, name: &str) -> Result<String, String> {
        let text = self.columns.get(name).and_then(Value::as_str).map(String::from);
        text.ok_or_else(|| format!("`{}` is not a string", self.their_name(name)))
    }

    fn messages(&self, name: &str) -> Result<Vec<Value>, String> {
        let theirs = self.their_name(name);
        let list = self.columns[name].as_array().ok_or_else(|| format!("`{theirs}` is not a list of messages"))?;
        if list.is_empty() {
            return Err(format!("`{theirs}` is empty"));
        }
        let message = |(idx, message)| message::read(message).map_err(|cause| format!("message {idx} of `{theirs}` {cause}"));
        let mut messages: Vec<Value> = list.iter().enumerate().map(message).collect::<Result<_, _>>()?;
        if name != "completion" && self.has("system") && messages[0]["role"] != "system" {
            messages.insert(0, json!({"role": "system", "content": self.text("system")?}));
        }
        Ok(messages)
    }

    /// As LLaMA-Factory reads it: the input follows the instruction in a line of its own.
    fn alpaca(&self) -> Result<Vec<Value>, String> {
        let mut question = self.text("instruction")?;
        if self.has("input") {
            let input = self.text("input")?;
            question += if question.is_empty() || input.is_empty() { "" } else { "\n" };
            question += &input;
        }
        let turn = |role: &str, content: String| json!({"role": role, "content": content});
        let system = if self.has("system") { Some(turn("system", self.text("system")?)) } else { None };
        let turns = [turn("user", question), turn("assistant", self.text("output")?)];
        Ok(system.into_iter().chain(turns).collect())
    }

    /// Some data holds them as JSON in a string.
    fn tools(&self) -> Result<Option<Value>, String> {
        let tools = match self.columns.get("tools") {
            Some(Value::String(text)) if text.trim().is_empty() => Value::Null,
            Some(Value::String(text)) => {
                serde_json::from_str(text).map_err(|e| format!("`{}`: {}", self.their_name("tools"), json_cause(&e)))?
            }
            Some(tools) => tools.clone(),
            None => Value::Null,
        };
        match tools {
            Value::Null => Ok(None),
            Value::Array(list) if list.is_empty() => Ok(None),
            Value::Array(_) => Ok(Some(tools)),
            _ => Err(format!("`{}` is not a list", self.their_name("tools"))),
        }
    }

    /// Labels are -100 where nothing is trained, as `transformers` has them, and else the id itself.
    fn ids(&self) -> Result<Vec<(u32, bool)>, String> {
        let list = |name: &str| {
            let wrong = || format!("`{}` is not a list of token ids", self.their_name(name));
            let values = self.columns[name].as_array().ok_or_else(wrong)?;
            values.iter().map(|value| value.as_i64().ok_or_else(wrong)).collect::<Result<Vec<i64>, _>>()
        };
        let ids = list("input_ids")?;
        let labels = if self.has("labels") { list("labels")? } else { ids.clone() };
        if labels.len() != ids.len() {
            return Err(format!("{} labels for {} token ids", labels.len(), ids.len()));
        }
        let token = |(at, (&id, &label)): (usize, (&i64, &i64))| match u32::try_from(id) {
            Ok(id) if id < 1 << 31 && (label == i64::from(id) || label == -100) => Ok((id, label != -100)),
            _ => Err(format!("token {at} has id {id} and label {label}: a label is the id, or -100")),
        };
        ids.iter().zip(&labels).enumerate().map(token).collect()
    }
}

/// The parser's message with the column, but not with its line, which is always 1.
fn json_cause(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let cause = message.rsplit_once(" at line ").map_or(message.as_str(), |(cause, _)| cause);
    format!("{cause} (column {})", error.column())
}
