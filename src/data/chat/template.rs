//! Chat templates: Jinja as `transformers` renders it, byte for byte, with a limit on work and memory.

use super::bounds::{self, TEXT_BYTES_MAX};
use super::date::Day;
use super::filters;
use super::integers::{INTEGER_MARK, template_value};
use super::methods::invalid;
use super::named::TOOL_USE;
use super::{methods, python, rewrite};
use crate::data::checksum;
use crate::data::sandbox::{SandboxTask, guard};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value, escape_formatter};
use serde_json::{Number, Value as Json};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::OnceLock;

/// Work of one rendering: an instruction costs 1, and so do 64 bytes that are made. So it bounds memory, too, but for lists that
/// are joined ([`limited`]).
const FUEL: u64 = 2_000_000;
/// Work of all renderings of a record, two for each answer.
const RECORD_FUEL: u64 = 100_000_000;
const NAME: &str = "chat template";
/// Output of the tags of `{% generation %}`: private characters, which no tokenizer's text holds.
const MARKS: [(&str, char); 2] = [("generation", '\u{10fffc}'), ("endgeneration", '\u{10fffd}')];

/// A template with its variables besides messages. It is compiled at its first use.
pub(in crate::data) struct ChatTemplate {
    /// As its file has it.
    file: String,
    /// As the engine compiles it.
    source: String,
    special_tokens: serde_json::Map<String, Json>,
    end_token: OnceLock<String>,
    day: Day,
    has_marks: bool,
    identity: String,
    compiled: OnceLock<Result<Environment<'static>, String>>,
    after_answers: OnceLock<Option<String>>,
    /// The template for conversations with tools, if that is another.
    tool_use: Option<Box<ChatTemplate>>,
}

/// The renderings of one record, turn by turn, within the limits of a record.
pub(super) struct Renderings<'a> {
    environment: &'a Environment<'static>,
    has_marks: bool,
    messages: Vec<Value>,
    /// Template variables that all renderings of the record share.
    context: BTreeMap<String, Value>,
    fuel: u64,
}

/// The text of a conversation, and the spans that the template marks as generated.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Rendered {
    pub(super) text: String,
    pub(super) generated: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// The template `source`; templates name `special_tokens` (`bos_token`, ...), and `day` when they ask for the date.
    ///
    /// # Errors
    /// For a source that is too large to be compiled, in words.
    pub(in crate::data) fn new(source: &str, special_tokens: serde_json::Map<String, Json>, day: Day) -> Result<Self, String> {
        let own = source.to_string();
        let source = source.replace("\r\n", "\n");
        bounds::check_source(&source)?;
        let date = if source.contains("strftime_now") { day.to_string() } else { String::new() };
        let tokens = Json::Object(special_tokens.clone());
        let identity = checksum::sha256(format!("{source}\n{tokens}\n{date}").as_bytes());
        let (source, has_marks) = with_marks(&source);
        let (end_token, compiled, after_answers) = (OnceLock::new(), OnceLock::new(), OnceLock::new());
        Ok(Self { file: own, source, special_tokens, end_token, day, has_marks, identity, compiled, after_answers, tool_use: None })
    }

    /// This template with another one for conversations with tools.
    pub(super) fn with_tool_use(self, tool_use: Self) -> Self {
        let identity = checksum::sha256(format!("{}\n{}", self.identity, tool_use.identity).as_bytes());
        Self { identity, tool_use: Some(Box::new(tool_use)), ..self }
    }

    /// The template of a conversation that has `tools` or has none.
    pub(super) fn for_tools(&self, tools: Option<&Json>) -> &Self {
        self.tool_use.as_deref().filter(|_| tools.is_some()).unwrap_or(self)
    }

    /// The template as its file has it.
    pub(in crate::data) fn file(&self) -> &str {
        &self.file
    }

    /// Sets `eos_token` to `token`, the end of text in use, which is known once the tokenizer is read. The first call counts.
    pub(in crate::data) fn end_with(&self, token: &str) {
        self.end_token.get_or_init(|| token.into());
        if let Some(template) = &self.tool_use {
            template.end_with(token);
        }
    }

    /// The template, ready to be rendered.
    ///
    /// # Errors
    /// A description of the fault in the source.
    pub(in crate::data) fn compiled(&self) -> Result<&Environment<'static>, String> {
        let compile = || guard(SandboxTask::Compile, || environment(self.source.clone(), self.day)).and_then(|compiled| compiled);
        if let Some(tool_use) = &self.tool_use {
            tool_use.compiled().map_err(|cause| format!("{TOOL_USE}: {cause}"))?;
        }
        self.compiled.get_or_init(compile).as_ref().map_err(Clone::clone)
    }

    /// Identity of all inputs that determine the template's output.
    pub(super) fn identity(&self) -> &str {
        &self.identity
    }

    /// Whether the template marks generated text with `{% generation %}`.
    pub(super) fn has_marks(&self) -> bool {
        self.has_marks
    }

    /// The text from the end of an answer to the end of the next user message, where the template writes no end after answers.
    pub(super) fn after_answers(&self) -> Option<&str> {
        self.after_answers.get_or_init(|| self.find_after_answers()).as_deref()
    }

    fn find_after_answers(&self) -> Option<String> {
        const WORD: &str = "word";
        let turn = |role: &str| serde_json::json!({"role": role, "content": WORD});
        let mut renderings = self.renderings(&["user", "assistant", "user"].map(turn), None).ok()?;
        let (answered, requested) = (renderings.render(2, false).ok()?.text, renderings.whole().ok()?.text);
        if answered.ends_with(WORD) { requested.strip_prefix(&answered).map(String::from) } else { None }
    }

    /// A conversation of one user message, `prompt`, up to the point where the model begins to answer. `variables` are those of all
    /// records.
    ///
    /// # Errors
    /// As [`Renderings::given`] and [`Renderings::render`].
    pub(in crate::data) fn asking(&self, prompt: &str, variables: &serde_json::Map<String, Json>) -> Result<String, String> {
        let messages = [serde_json::json!({"role": "user", "content": prompt})];
        self.renderings(&messages, None)?.given(variables)?.render(1, true).map(|rendered| rendered.text)
    }

    /// The renderings of `messages`.
    ///
    /// # Errors
    /// Errors of [`Self::compiled`]; a description of the fault for messages that hold characters of [`MARKS`].
    pub(super) fn renderings(&self, messages: &[Json], tools: Option<&Json>) -> Result<Renderings<'_>, String> {
        let environment = self.compiled()?;
        messages.iter().chain(tools).try_for_each(|json| check_marks(self.has_marks, json))?;
        let special_tokens = self.special_tokens.iter().map(|(name, token)| (name.clone(), template_value(token)));
        let end_token = self.end_token.get().map(|token| ("eos_token".into(), Value::from(token.as_str())));
        let tools = tools.map_or(Value::from(()), template_value);
        let context = special_tokens.chain(end_token).chain([("tools".into(), tools), ("documents".into(), ().into())]).collect();
        let messages = messages.iter().map(template_value).collect();
        Ok(Renderings { environment, has_marks: self.has_marks, messages, context, fuel: RECORD_FUEL })
    }
}

/// The engine with the template `source`, as `transformers` sets its own up.
fn environment(source: String, day: Day) -> Result<Environment<'static>, String> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.map_err(|e| e.to_string())?);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(methods::call);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_formatter(write_value);
    filters::add(&mut environment);
    environment.add_function("raise_exception", |message: String| -> Result<Value, Error> { Err(invalid(message)) });
    environment.add_function("strftime_now", move |format: &str| {
        day.format(format).ok_or_else(|| invalid(format!("strftime_now: unknown format {format:?}")))
    });
    for (tag, mark) in MARKS {
        environment.add_function(format!("_{tag}"), move |_: Kwargs| mark.to_string());
    }
    environment.add_template_owned(NAME, rewrite::like_python(&source)).map_err(|e| cause(&e))?;
    Ok(environment)
}

/// Whether a value holds no character that marks text, where a template has marks.
fn check_marks(has_marks: bool, json: &Json) -> Result<(), String> {
    match has_marks && MARKS.iter().any(|(_, mark)| json.to_string().contains(*mark)) {
        true => Err("holds a private character (U+10FFFC or U+10FFFD) that marks trained text".into()),
        false => Ok(()),
    }
}

impl Renderings<'_> {
    /// As they are, with `variables` of the template beside messages and tools.
    ///
    /// # Errors
    /// For variables that hold a character that marks text, in words.
    pub(super) fn given(mut self, variables: &serde_json::Map<String, Json>) -> Result<Self, String> {
        variables.values().try_for_each(|json| check_marks(self.has_marks, json))?;
        self.context.extend(variables.iter().map(|(name, json)| (name.clone(), template_value(json))));
        Ok(self)
    }

    /// The text of all messages.
    ///
    /// # Errors
    /// As [`Self::render`].
    pub(super) fn whole(&mut self) -> Result<Rendered, String> {
        self.render(self.messages.len(), false)
    }

    /// The text of the first `turns` messages; with `prompts`, up to where the model begins to answer.
    ///
    /// # Errors
    /// A description of an exception of the template, or of a limit of the template or the record that is exceeded.
    pub(super) fn render(&mut self, turns: usize, prompts: bool) -> Result<Rendered, String> {
        self.render_with(turns, prompts, &[])
    }

    /// As [`Self::render`], with each message of `replacements` in the place of the one with its index.
    ///
    /// # Errors
    /// As [`Self::render`].
    pub(super) fn render_with(&mut self, turns: usize, prompts: bool, replacements: &[(usize, Json)]) -> Result<Rendered, String> {
        let (mut context, mut messages) = (self.context.clone(), self.messages[..turns].to_vec());
        for (turn, message) in replacements {
            messages[*turn] = template_value(message);
        }
        context.insert("messages".into(), messages.into());
        context.insert("add_generation_prompt".into(), prompts.into());
        let template = self.environment.get_template(NAME).map_err(|e| cause(&e))?;
        let captured = guard(SandboxTask::Render, || template.render_captured(Value::from(context)))?.map_err(|e| cause(&e))?;
        self.pay(captured.state().fuel_levels().map_or(0, |(used, _)| used) + turns as u64)?;
        let text = captured.into_output();
        if text.len() > TEXT_BYTES_MAX {
            return Err(format!("{} bytes of text, at most {TEXT_BYTES_MAX} go through a chat template", text.len()));
        }
        if text.contains(INTEGER_MARK) {
            return Err("has an integer beyond 64 bits where a text is joined to others".into());
        }
        Ok(if self.has_marks { without_marks(&text) } else { Rendered { text, generated: Vec::new() } })
    }

    fn pay(&mut self, fuel: u64) -> Result<(), String> {
        let turns = self.messages.len();
        let why = "it renders the conversation again for each answer";
        let exhausted =
            || format!("the chat template takes too long for {turns} messages, because {why}; cut them into shorter conversations");
        self.fuel = self.fuel.checked_sub(fuel).ok_or_else(exhausted)?;
        Ok(())
    }
}

/// The template's error as one line.
fn cause(error: &Error) -> String {
    let cause = error.detail().map_or_else(|| error.kind().to_string(), String::from).replace('\n', " ");
    let limit = if error.kind() == ErrorKind::OutOfFuel { " (it loops for ever, or makes too much text)" } else { "" };
    match error.line() {
        Some(line) => format!("the chat template, line {line}: {cause}{limit}"),
        None => format!("the chat template: {cause}{limit}"),
    }
}

/// Writes `value` as Python does: small and large numbers with an exponent.
fn write_value(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    if matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable | ValueKind::Map) {
        check_defined(state, value, bounds::JSON_DEPTH_MAX)?;
    }
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    let float = if is_float { f64::try_from(value.clone()).ok().and_then(Number::from_f64) } else { None };
    match float {
        Some(number) => Ok(out.write_str(&python::number_text(&number))?),
        None => escape_formatter(out, state, value),
    }
}

/// Checks that all items of a list or map are defined: the engine and Python write undefined items differently.
fn check_defined(state: &mut State, value: &Value, depth: usize) -> Result<(), Error> {
    if depth == 0 {
        return Err(invalid(format!("more than {} lists and objects within each other", bounds::JSON_DEPTH_MAX)));
    }
    for item in value.try_iter()? {
        state.consume_fuel(1)?;
        let item = if value.kind() == ValueKind::Map { value.get_item(&item)? } else { item };
        match item.kind() {
            ValueKind::Undefined => return Err(invalid("a list or an object that is written holds an undefined value")),
            ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => check_defined(state, &item, depth - 1)?,
            _ => {}
        }
    }
    Ok(())
}

/// `source` with a call that writes a mark in place of each tag of `{% generation %}`, with the tag's trimming; and whether `source` has
/// such a tag.
fn with_marks(source: &str) -> (String, bool) {
    let mut out = String::with_capacity(source.len());
    let (mut rest, mut has_marks) = (source, false);
    while let Some(at) = rest.find("{%") {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let end = rest.find("%}").map_or(rest.len(), |end| end + 2);
        let (tag, after) = rest.split_at(end);
        let name = tag.trim_start_matches("{%").trim_start_matches(['-', '+']).trim_end_matches("%}").trim_end_matches(['-', '+']).trim();
        if MARKS.iter().any(|(mark, _)| *mark == name) {
            has_marks = true;
            out.push_str(&tag.replacen(name, &format!("call _{name}() %}}{{% endcall"), 1));
            rest = after;
        } else {
            out.push_str("{%");
            rest = &rest[2..];
        }
    }
    out.push_str(rest);
    (out, has_marks)
}

fn without_marks(marked: &str) -> Rendered {
    let (mut text, mut generated, mut begin) = (String::with_capacity(marked.len()), Vec::new(), None);
    for c in marked.chars() {
        match MARKS.iter().position(|(_, mark)| *mark == c) {
            Some(0) => begin = Some(text.len()),
            Some(_) => generated.extend(begin.take().map(|begin| begin..text.len())),
            None => text.push(c),
        }
    }
    Rendered { text, generated }
}
