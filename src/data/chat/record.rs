//! Columns of a record, and their meaning.

use super::ids::{self, IdColumn};
use super::mask::{Conversation, TrainOn};
use super::message::{self, ReadMessage};
use super::pair::{PairTexts, take_common};
use super::parts::PartRoles;
use super::rollout::{ADVANTAGE, OLD_LOGPS, REF_LOGPS, Rollout, RolloutColumns};
use super::sample::{ChatSample, ChatSamples};
use super::teacher::{TEACHER_IDS, TEACHER_LOGPROBS, TEACHER_PROBS, Taught, TeacherColumns};
use super::template::ChatTemplate;
use super::token_weights::{self, ROUNDED, WEIGHTS};
use super::{foreign_names, integers, lost, non_finite, template_variables, tool_calls};
use crate::data::loss_weight::LossWeight;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

/// The version of the rules by which records and text become tokens and masks. Version 1 kept no number.
pub(crate) const RULES_VERSION: u32 = 3;

/// Values of `--data-format`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum DataFormat {
    /// The format with the columns of a file's first record.
    Auto,
    /// `text`.
    Text,
    /// `messages` or `conversations`, `tools` beside.
    Messages,
    /// `prompt` and `completion`, text or messages.
    PromptCompletion,
    /// `instruction` and `output`, `input` and `system` beside.
    Alpaca,
    /// `input_ids`, `labels`, masks or `weights` beside.
    InputIds,
    /// `chosen` and `rejected`, `prompt` beside or in both: pairs of answers, for --loss.
    Preference,
    /// `prompt_ids`, `completion_ids` and `advantage`, log-probabilities beside: samples, for --loss.
    Rollouts,
    /// `input_ids`, or `prompt_ids` and `completion_ids`, with `teacher_ids` and `teacher_probs` or `teacher_logprobs`, for --loss distill.
    Teacher,
}

impl DataFormat {
    const COLUMNS: [(Self, &[&str]); 10] = [
        (Self::Text, &["text"]),
        (Self::Messages, &["messages"]),
        (Self::Messages, &["conversations"]),
        (Self::PromptCompletion, &["prompt", "completion"]),
        (Self::Alpaca, &["instruction", "output"]),
        (Self::InputIds, &["input_ids"]),
        (Self::Preference, &["chosen", "rejected"]),
        (Self::Rollouts, &["prompt_ids", "completion_ids", ADVANTAGE]),
        (Self::Teacher, &["input_ids", TEACHER_IDS]),
        (Self::Teacher, &["prompt_ids", "completion_ids", TEACHER_IDS]),
    ];

    /// Whether its records hold answers to prompts, not running text.
    pub(in crate::data) fn has_answers(self) -> bool {
        matches!(self, Self::Messages | Self::PromptCompletion | Self::Alpaca | Self::Preference)
    }

    fn name(self) -> String {
        serde_json::to_value(self).ok().and_then(|name| name.as_str().map(String::from)).unwrap_or_default()
    }

    fn fits(self, has: &dyn Fn(&str) -> bool) -> bool {
        Self::COLUMNS.iter().any(|(format, columns)| *format == self && columns.iter().all(|column| has(column)))
    }
}

/// Rules for reading records, from the flags and the model's files.
pub(crate) struct RecordRules {
    pub(crate) format: DataFormat,
    /// The data's name of a column, by the name that it has here.
    pub(crate) columns: BTreeMap<String, String>,
    pub(crate) train_on: TrainOn,
    /// Variables of the template, which a record's own go before.
    pub(in crate::data) template_variables: Map<String, Value>,
    /// Whether records may hold answers to prompts.
    pub(in crate::data) has_answers: bool,
    /// The template, or why there is none.
    pub(in crate::data) template: Result<ChatTemplate, String>,
    /// The file that holds it.
    pub(in crate::data) template_file: PathBuf,
    /// The roles for which the template takes content in parts.
    pub(in crate::data) part_roles: PartRoles,
}

impl Default for RecordRules {
    fn default() -> Self {
        let template = Err("chat data needs a model with a chat template; use --chat-template FILE".into());
        Self {
            format: DataFormat::Auto,
            columns: BTreeMap::new(),
            train_on: TrainOn::Auto,
            template_variables: Map::new(),
            has_answers: false,
            template,
            template_file: PathBuf::new(),
            part_roles: PartRoles::default(),
        }
    }
}

/// Content of a record.
#[derive(Debug, PartialEq)]
pub(in crate::data) enum Content {
    /// A document like those of a text file.
    Text(String),
    /// Output of a template; no tokens are added before or after it.
    Rendered(ChatSamples),
    /// A prompt and its completion; the end of text belongs to the completion.
    Completed(ChatSample),
    /// Ids with their weights.
    Ids(Vec<(u32, LossWeight)>),
    /// Two answers to a prompt.
    Pair(PairTexts),
    /// A sampled completion with its numbers.
    Rollout(Rollout),
    /// Ids with a teacher's tokens.
    Taught(Taught),
}

/// A record that was read.
#[derive(Debug)]
pub(in crate::data) struct ReadContent {
    pub(in crate::data) content: Content,
    /// Sentences about columns, keys and messages of it that decide something elsewhere and nothing here.
    pub(in crate::data) remarks: BTreeSet<String>,
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
    /// A description of the fault in the record.
    pub(in crate::data) fn detect(&self, line: &str) -> Result<DataFormat, String> {
        let record = self.parse(line)?;
        if self.format != DataFormat::Auto {
            return Ok(self.format);
        }
        let mut fitting: Vec<DataFormat> =
            DataFormat::COLUMNS.iter().map(|(format, _)| *format).filter(|format| format.fits(&|name| record.has(name))).collect();
        fitting.dedup();
        // Data of other formats may have these columns, too. Pairs, rollouts and teachers are read for a loss of their own alone.
        let has_teacher = fitting.pop_if(|last| *last == DataFormat::Teacher).is_some();
        let has_rollouts = fitting.pop_if(|last| *last == DataFormat::Rollouts).is_some();
        let has_pairs = fitting.pop_if(|last| *last == DataFormat::Preference).is_some();
        match fitting[..] {
            [format] => Ok(format),
            [] if has_pairs => Err("its columns are those of pairs of answers: train on pairs with --loss dpo".into()),
            [] if has_teacher => Err("its columns are those of a teacher's tokens: train on them with --loss distill".into()),
            [] if has_rollouts => Err("its columns are those of sampled completions: train on completions with --loss dapo".into()),
            [] => {
                let found: Vec<_> = record.columns.keys().map(String::as_str).take(8).collect();
                let known = DataFormat::COLUMNS.map(|(_, columns)| columns.join(" with ")).join(", ");
                Err(format!("no known column (columns: {}; known: {known}); map one with --columns OURS=THEIRS", found.join(", ")))
            }
            [one, other, ..] => Err(format!("its columns match {} and {}; choose one with --data-format", one.name(), other.name())),
        }
    }

    /// Whether the values of the data's column `name` are read, or looked at to warn of them.
    #[cfg(feature = "parquet")]
    pub(in crate::data) fn reads(&self, name: &str) -> bool {
        self.decides(name) || foreign_names::is_looked_at(name)
    }

    /// Whether the data's column `name` decides which tokens a record becomes.
    fn decides(&self, name: &str) -> bool {
        let beside = ["tools", "system", "input", "history", "labels", WEIGHTS, "chat_template_kwargs", OLD_LOGPS, REF_LOGPS];
        let beside = beside.iter().chain(&ids::MASKS).chain(&[TEACHER_PROBS, TEACHER_LOGPROBS]);
        let known = || DataFormat::COLUMNS.iter().flat_map(|(_, columns)| columns.iter()).chain(beside).any(|column| *column == name);
        self.columns.values().any(|foreign_name| foreign_name == name) || known()
    }

    /// The content of the record `line` of a file of `format`.
    ///
    /// # Errors
    /// As [`Self::read_with_remarks`].
    pub(in crate::data) fn read(&self, format: DataFormat, line: &str) -> Result<Content, String> {
        self.read_with_remarks(format, line).map(|read| read.content)
    }

    /// As [`Self::read`], with remarks about the parts that were not read.
    ///
    /// # Errors
    /// The fault of the record, in words.
    pub(in crate::data) fn read_with_remarks(&self, format: DataFormat, line: &str) -> Result<ReadContent, String> {
        let record = self.parse(line)?;
        if !format.fits(&|name| record.has(name)) {
            return Err(format!("lacks the columns of {}, which its file has", format.name()));
        }
        let mut remarks = record.remarks(format)?;
        let content = match format {
            DataFormat::Auto | DataFormat::Text => {
                self.allow(&[TrainOn::All], format)?;
                Content::Text(record.text("text")?)
            }
            DataFormat::InputIds => {
                self.allow(&[TrainOn::All], format)?;
                record.ids(&mut remarks).map(Content::Ids)?
            }
            DataFormat::PromptCompletion if record.columns["prompt"].is_string() => {
                self.allow(&[TrainOn::All, TrainOn::Completion], format)?;
                let (prompt, completion) = (record.text("prompt")?, record.text("completion")?);
                let begin = if self.train_on == TrainOn::All { 0 } else { prompt.len() };
                Content::Completed(ChatSample::trained_from(begin, prompt + &completion))
            }
            DataFormat::Preference => {
                self.allow(&[TrainOn::Completion], format)?;
                record.pair(&mut remarks).map(Content::Pair)?
            }
            DataFormat::Rollouts => {
                self.allow(&[TrainOn::Completion], format)?;
                record.rollout().map(Content::Rollout)?
            }
            DataFormat::Teacher => {
                self.allow(&[TrainOn::Completion], format)?;
                record.taught(&mut remarks).map(Content::Taught)?
            }
            DataFormat::Messages | DataFormat::PromptCompletion | DataFormat::Alpaca => self.rendered(&record, format, &mut remarks)?,
        };
        Ok(ReadContent { content, remarks })
    }

    /// All settings that determine the tokens of a record; `None` where records are read as plain text.
    pub(in crate::data) fn identity(&self) -> Option<Value> {
        let template = self.template.as_ref().ok().map(ChatTemplate::identity);
        let is_plain = (self.format, self.train_on) == (DataFormat::Auto, TrainOn::Auto) && self.columns.is_empty() && template.is_none();
        let mut all = json!({"format": self.format, "columns": self.columns, "train_on": self.train_on, "chat_template": template});
        if template.is_some() && !self.template_variables.is_empty() {
            all["chat_template_kwargs"] = self.template_variables.clone().into();
        }
        (!is_plain).then_some(all)
    }

    fn rendered(&self, record: &ReadRecord<'_>, format: DataFormat, remarks: &mut BTreeSet<String>) -> Result<Content, String> {
        let (messages, prompt) = match format {
            DataFormat::PromptCompletion => {
                let (mut messages, completion) = (record.messages("prompt", remarks)?, record.messages("completion", remarks)?);
                let prompt = messages.len();
                messages.extend(completion);
                (messages, prompt)
            }
            DataFormat::Alpaca => (record.alpaca()?, 0),
            _ if self.train_on == TrainOn::Completion => self.allow(&[], format).map(|()| (vec![], 0))?,
            _ => (record.messages(if record.has("messages") { "messages" } else { "conversations" }, remarks)?, 0),
        };
        let template = self.template.as_ref().map_err(Clone::clone)?;
        let (tools, variables) = (record.tools()?, record.template_variables()?);
        let template = template.for_tools(tools.as_ref());
        let conversation = Conversation { messages, tools, variables, prompt };
        let samples = conversation.samples(template, self.train_on)?;
        remarks.extend(lost::remarks(&conversation.messages, &samples.samples));
        Ok(Content::Rendered(samples))
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
            return Err(format!("not an object; each record must be an object, such as {{\"text\": \"...\"}}{array}"));
        }
        let mut columns = self.columns_of(line)?;
        // All are taken before the first is put down: two may have each other's name.
        let mut take = |(own_name, foreign_name): (&String, &String)| {
            let value = columns.remove(foreign_name).ok_or_else(|| format!("no column {foreign_name:?}, which --columns names"))?;
            Ok::<_, String>((own_name.clone(), value))
        };
        let renamed: Vec<_> = self.columns.iter().map(&mut take).collect::<Result<_, _>>()?;
        columns.extend(renamed);
        Ok(ReadRecord { rules: self, columns })
    }

    /// The columns of the record `line`, which may hold numbers of Python where they decide nothing.
    fn columns_of(&self, line: &str) -> Result<Map<String, Value>, String> {
        integers::parse(line).or_else(|error| {
            let finite = non_finite::without(line, |name| self.decides(name))?;
            // The error of the line as it is names the right column.
            integers::parse(&finite).map_err(|_| error)
        })
    }
}

impl ReadRecord<'_> {
    /// Whether a column is there and not null: tables fill missing values with null.
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

    /// Sentences about columns that are not read. Of text none decides anything.
    fn remarks(&self, format: DataFormat) -> Result<BTreeSet<String>, String> {
        let read = [
            ("history", DataFormat::Alpaca),
            (WEIGHTS, DataFormat::InputIds),
            (WEIGHTS, DataFormat::Teacher),
            ("chosen", DataFormat::Preference),
            ("rejected", DataFormat::Preference),
        ];
        let is_read = |name: &str| read.contains(&(name, format));
        let remarks = if format == DataFormat::Text { vec![] } else { foreign_names::of_columns(&self.columns, is_read)? };
        Ok(remarks.into_iter().collect())
    }

    fn messages(&self, name: &str, remarks: &mut BTreeSet<String>) -> Result<Vec<Value>, String> {
        let foreign_name = self.their_name(name);
        let list = self.columns[name].as_array().ok_or_else(|| format!("`{foreign_name}` is not a list of messages"))?;
        if list.is_empty() {
            return Err(format!("`{foreign_name}` is empty"));
        }
        let mut read = |(idx, message): (usize, &Value)| {
            let read = message::read(message, |role| self.takes_parts(role));
            let ReadMessage { message, remarks: found } = read.map_err(|cause| format!("message {idx} of `{foreign_name}` {cause}"))?;
            remarks.extend(found);
            Ok::<_, String>(message)
        };
        let mut messages: Vec<Value> = list.iter().enumerate().map(&mut read).collect::<Result<_, _>>()?;
        let follows_prompt = name == "completion" || self.has("prompt") && ["chosen", "rejected"].contains(&name);
        if !follows_prompt && messages[0]["role"] != "system" {
            messages.splice(0..0, self.system()?);
        }
        Ok(messages)
    }

    /// The prompt and both answers, as texts.
    fn pair(&self, remarks: &mut BTreeSet<String>) -> Result<PairTexts, String> {
        let columns = ["prompt", "chosen", "rejected"].map(|name| self.columns.get(name).filter(|value| !value.is_null()));
        if columns.into_iter().flatten().all(Value::is_string) {
            let prompt = if self.has("prompt") { Some(self.text("prompt")?) } else { None };
            return PairTexts::of_text(prompt, self.text("chosen")?, self.text("rejected")?);
        }
        let mut prompt = if self.has("prompt") { Some(self.messages("prompt", remarks)?) } else { None };
        let mut answers = [self.messages("chosen", remarks)?, self.messages("rejected", remarks)?];
        let prompt = prompt.take().unwrap_or_else(|| take_common(&mut answers));
        let template = self.rules.template.as_ref().map_err(Clone::clone)?;
        let (tools, variables) = (self.tools()?, self.template_variables()?);
        PairTexts::of_messages(&prompt, answers, template.for_tools(tools.as_ref()), (tools.as_ref(), &variables))
    }

    /// The completion, and the numbers of its tokens.
    fn rollout(&self) -> Result<Rollout, String> {
        let column = |name| IdColumn { name: self.their_name(name), value: &self.columns[name] };
        let optional = |name| self.has(name).then(|| column(name));
        let [prompt, completion, advantage] = ["prompt_ids", "completion_ids", ADVANTAGE].map(column);
        RolloutColumns { prompt, completion, advantage, old: optional(OLD_LOGPS), reference: optional(REF_LOGPS) }.read()
    }

    /// The tokens, and the teacher's tokens for each of them that is trained.
    fn taught(&self, remarks: &mut BTreeSet<String>) -> Result<Taught, String> {
        let column = |name| IdColumn { name: self.their_name(name), value: &self.columns[name] };
        let (tokens, prompt) = if self.has("input_ids") {
            (self.ids(remarks)?, 0)
        } else if self.has(WEIGHTS) {
            return Err(format!("`{}` is read beside `input_ids`; leave the column out", self.their_name(WEIGHTS)));
        } else {
            let ids = |name, weight| {
                let ids = ids::marked(&column(name), None, &[])?.into_iter();
                Ok::<Vec<_>, String>(ids.map(|(id, _)| (id, weight)).collect())
            };
            let (prompt, completion) = (ids("prompt_ids", LossWeight::NONE)?, ids("completion_ids", LossWeight::WHOLE)?);
            let length = prompt.len();
            ([prompt, completion].concat(), length)
        };
        let optional = |name| self.has(name).then(|| column(name));
        let (probs, logprobs) = (optional(TEACHER_PROBS), optional(TEACHER_LOGPROBS));
        TeacherColumns { ids: column(TEACHER_IDS), probs, logprobs, first: prompt }.read(tokens)
    }

    /// Whether the template goes over the parts of a message of `role`.
    fn takes_parts(&self, role: &str) -> bool {
        let RecordRules { template, template_variables, part_roles, .. } = self.rules;
        let has_tools = self.tools().is_ok_and(|tools| tools.is_some());
        template.as_ref().is_ok_and(|template| part_roles.are_written(template, template_variables, has_tools, role))
    }

    /// The turn of the column `system`, of which an empty text makes none.
    fn system(&self) -> Result<Option<Value>, String> {
        let text = if self.has("system") { self.text("system")? } else { String::new() };
        Ok((!text.is_empty()).then(|| turn("system", text)))
    }

    /// As LLaMA-Factory reads it: the input follows the instruction in a line of its own, and both follow the turns of `history`.
    fn alpaca(&self) -> Result<Vec<Value>, String> {
        let mut question = self.text("instruction")?;
        if self.has("input") {
            let input = self.text("input")?;
            question += if question.is_empty() || input.is_empty() { "" } else { "\n" };
            question += &input;
        }
        let turns = [turn("user", question), turn("assistant", self.text("output")?)];
        Ok(self.system()?.into_iter().chain(self.history()?).chain(turns).collect())
    }

    /// The turns of the column `history`, pairs of a question and its answer.
    fn history(&self) -> Result<Vec<Value>, String> {
        let wrong = || format!("`{}` is not a list of pairs, each a question and its answer", self.their_name("history"));
        let pair = |pair: &Value| match pair.as_array().map(Vec::as_slice) {
            Some([Value::String(question), Value::String(answer)]) => {
                Ok([turn("user", question.clone()), turn("assistant", answer.clone())])
            }
            _ => Err(wrong()),
        };
        let pairs = if self.has("history") { self.columns["history"].as_array().ok_or_else(wrong)? } else { &vec![] };
        Ok(pairs.iter().map(pair).collect::<Result<Vec<_>, _>>()?.concat())
    }

    /// Some data holds them as JSON in a string.
    fn tools(&self) -> Result<Option<Value>, String> {
        let tools = self.columns.get("tools").unwrap_or(&Value::Null);
        tool_calls::tools(tools).map_err(|cause| format!("`{}` {cause}", self.their_name("tools")))
    }

    /// The variables of the template for this record: its own go before those of all records.
    fn template_variables(&self) -> Result<Map<String, Value>, String> {
        let mut variables = self.rules.template_variables.clone();
        if self.has("chat_template_kwargs") {
            let wrong = |cause| format!("`{}` {cause}", self.their_name("chat_template_kwargs"));
            variables.extend(template_variables::of(&self.columns["chat_template_kwargs"]).map_err(wrong)?);
        }
        Ok(variables)
    }

    /// The token ids, with labels, masks and weights beside them.
    fn ids(&self, remarks: &mut BTreeSet<String>) -> Result<Vec<(u32, LossWeight)>, String> {
        let column = |name| IdColumn { name: self.their_name(name), value: &self.columns[name] };
        let masks: Vec<_> = ids::MASKS.into_iter().filter(|name| self.has(name)).map(column).collect();
        let labels = self.has("labels").then(|| column("labels"));
        let marked = ids::marked(&column("input_ids"), labels.as_ref(), &masks)?;
        let weights = self.has(WEIGHTS).then(|| token_weights::read(&column(WEIGHTS), marked.len())).transpose()?;
        remarks.extend(weights.as_ref().is_some_and(|weights| weights.are_rounded).then(|| ROUNDED.to_string()));
        let weight = |at: usize| weights.as_ref().map_or(LossWeight::WHOLE, |weights| weights.weights[at]);
        let weighted = |(at, (id, is_trained))| (id, if is_trained { weight(at) } else { LossWeight::NONE });
        Ok(marked.into_iter().enumerate().map(weighted).collect())
    }
}

fn turn(role: &str, content: String) -> Value {
    json!({"role": role, "content": content})
}
