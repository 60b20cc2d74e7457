//! Converts a configuration of another trainer to this program's, with a table of the outcome of each key.

use super::fate::{Fate, FlagValue, set};
use super::rules;
use crate::config::deepspeed::over_deepspeed;
use crate::config::document::{Document, DocumentEntry, DocumentNode, NodeValue};
use crate::config::file::{self, Meaning};
use crate::config::program::Program;
use crate::config::settings::{Settings, TrainOptions};
use crate::error::{Error, Result};
use std::fmt::{self, Display};
use std::path::Path;

/// First lines of every converted configuration.
pub(crate) const HEAD: &str = "# Settings of `superoffload train`, made by `superoffload convert-config`\n";
/// Largest number of characters of a value in the table.
const SHOWN: usize = 40;

/// A parsed configuration of another program.
#[derive(Debug)]
pub(crate) struct Converted {
    path: String,
    program: Program,
    /// A line for each key that is not null.
    rows: Vec<ConvertedKey>,
    /// Flags and values, in the file's order.
    flags: Vec<FlagValue>,
}

#[derive(Debug)]
struct ConvertedKey {
    key: String,
    value: String,
    fate: Fate,
}

/// Reads the configuration at `path`.
///
/// # Errors
/// `Io` or `Format` when the file cannot be read. `Usage` for a file with wrong syntax or of an unknown program.
pub(crate) fn convert(path: &Path) -> Result<Converted> {
    let converted = Document::read(path, |document| Converted::of(path, &document))?;
    if converted.program == Program::DeepSpeed {
        // The DeepSpeed table has more detail, and its translation refuses unavailable keys.
        over_deepspeed(TrainOptions::default(), path)?;
    }
    Ok(converted)
}

impl Converted {
    fn of(path: &Path, document: &Document) -> std::result::Result<Self, String> {
        let entries = &document.entries;
        let program = Program::of(entries).ok_or(
            "line 1, column 1: not a configuration of TRL, axolotl, LLaMA-Factory, accelerate or DeepSpeed: it has none of their keys",
        )?;
        let mut this = Self { path: path.display().to_string(), program, rows: Vec::new(), flags: Vec::new() };
        if program == Program::DeepSpeed {
            this.flags.push(set("deepspeed", NodeValue::Text(this.path.clone())));
            return Ok(this);
        }
        for entry in entries.iter().filter(|entry| entry.node.value != NodeValue::Null) {
            let fate = rules::own(program, entry, entries).unwrap_or_else(|| by_alias(entry));
            let fate = this.checked(fate, document, entry);
            this.rows.push(ConvertedKey { key: entry.key.clone(), value: shown(&entry.node), fate });
        }
        this.add_defaults(entries);
        Ok(this)
    }

    /// Adds the other program's defaults that differ from the defaults here, for keys that the file does not set.
    fn add_defaults(&mut self, entries: &[DocumentEntry]) {
        for (_, flag, value) in rules::DEFAULTS.iter().filter(|(of, ..)| *of == self.program) {
            let is_set = |name: &str| self.flags.iter().any(|(flag, _)| flag == name);
            if is_set(flag) || *flag == "num-train-epochs" && is_set("max-steps") {
                continue;
            }
            let value = match (value.parse(), value.parse()) {
                (Ok(whole), _) => NodeValue::Integer(whole),
                (_, Ok(number)) => NodeValue::Float(number),
                _ => NodeValue::Text((*value).into()),
            };
            self.flags.push(set(flag, value.clone()));
            let fate = Fate::Used(vec![set(flag, value)], format!("the default of {}", self.program));
            self.rows.push(ConvertedKey { key: (*flag).into(), value: "not set".into(), fate });
        }
        for (_, key, why) in
            rules::OTHERWISE.iter().filter(|(of, key, _)| *of == self.program && !entries.iter().any(|entry| entry.key == *key))
        {
            self.rows.push(ConvertedKey { key: (*key).into(), value: "not set".into(), fate: Fate::Ignored((*why).into()) });
        }
    }

    /// Adds the flags of `fate`. Returns [`Fate::Missing`] if a flag rejects its value or contradicts an earlier key.
    fn checked(&mut self, fate: Fate, document: &Document, entry: &DocumentEntry) -> Fate {
        let Fate::Used(flags, remark) = fate else { return fate };
        for (flag, value) in &flags {
            let node = DocumentNode { at: entry.node.at, value: value.clone() };
            if let Err(cause) = document.setting::<TrainOptions>(flag, node) {
                return Fate::Missing(cause.split("`: ").last().unwrap_or_default().into());
            }
            let before = self.flags.iter().find(|(name, _)| name == flag && !is_list(name));
            if before.is_some_and(|(_, before)| before != value) {
                return Fate::Missing(format!("another key already sets --{flag}"));
            }
        }
        for (flag, value) in &flags {
            if !self.flags.iter().any(|(name, known)| (name, known) == (flag, value)) {
                self.flags.push((flag.clone(), value.clone()));
            }
        }
        Fate::Used(flags, remark)
    }

    /// The configuration in TOML.
    ///
    /// # Errors
    /// `Usage` with every unavailable key, or with the reason why the remaining keys do not make a valid run.
    pub(crate) fn toml(&self) -> Result<String> {
        let missing: Vec<_> = self.rows.iter().filter(|row| matches!(row.fate, Fate::Missing(_))).collect();
        if !missing.is_empty() {
            let each: Vec<_> = missing.iter().map(|row| row.to_string()).collect();
            let (path, count) = (&self.path, missing.len());
            return Err(Error::usage(format!("{path}: {count} keys are not available here: {}", each.join("; "))));
        }
        let text = HEAD.to_string() + &self.lines();
        let options = TrainOptions::from_toml(&text).map_err(|e| Error::usage(format!("{}: {e}", self.path)))?;
        if options.model.is_some() || options.data.is_some() {
            Settings::resolve(options).map_err(|e| Error::usage(format!("{}: {e}", self.path)))?;
        }
        Ok(text)
    }

    fn lines(&self) -> String {
        let is_first = |at: &usize| self.flags[..*at].iter().all(|(flag, _)| *flag != self.flags[*at].0);
        let line = |at: usize| {
            let (flag, value) = &self.flags[at];
            let all = self.flags.iter().filter(|(other, _)| other == flag).map(|(_, value)| value);
            format!("{flag} = {}\n", if is_list(flag) { list(all) } else { written(value) })
        };
        (0..self.flags.len()).filter(is_first).map(line).collect()
    }
}

/// Whether several keys may add values to `flag`.
fn is_list(flag: &str) -> bool {
    ["data", "eval-data", "columns"].contains(&flag)
}

fn list<'a>(all: impl Iterator<Item = &'a NodeValue>) -> String {
    let flat = all.flat_map(|value| match value {
        NodeValue::List(nodes) => nodes.iter().map(|node| written(&node.value)).collect(),
        value => vec![written(value)],
    });
    format!("[{}]", flat.collect::<Vec<_>>().join(", "))
}

/// A value in TOML syntax.
fn written(value: &NodeValue) -> String {
    match value {
        NodeValue::Text(text) => serde_json::Value::from(text.as_str()).to_string(),
        NodeValue::Truth(truth) => truth.to_string(),
        NodeValue::Integer(number) => number.to_string(),
        NodeValue::Float(number) => format!("{number:?}").to_lowercase(),
        NodeValue::List(_) => list(std::iter::once(value)),
        NodeValue::Table(_) | NodeValue::Null => "\"\"".into(),
    }
}

/// The fate of a key without a rule of its own in the program's file: its meaning on the command line.
fn by_alias(entry: &DocumentEntry) -> Fate {
    match file::translate(&file::known_keys(), entry) {
        Ok(Meaning::Set(name, node)) => Fate::Used(vec![set(&name, node.value)], String::new()),
        Ok(Meaning::Ignored(line)) => {
            Fate::Ignored(line.split_once(" (").map_or(line.clone(), |(_, why)| why.trim_end_matches(')').into()))
        }
        Ok(Meaning::Nothing) => Fate::Holds,
        Err(cause) => Fate::Missing(cause),
    }
}

fn shown(node: &DocumentNode) -> String {
    let text = match &node.value {
        NodeValue::List(all) if all.iter().any(|item| matches!(item.value, NodeValue::Table(_))) => format!("[{} entries]", all.len()),
        NodeValue::Table(all) => format!("{{{}}}", all.iter().map(|entry| entry.key.as_str()).collect::<Vec<_>>().join(", ")),
        _ => node.text(),
    };
    let text: String = text.escape_debug().collect();
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}

impl Display for ConvertedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}: {}", self.key.escape_debug(), self.value, self.fate)
    }
}

impl Display for Fate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Used(flags, remark) => {
                let flags: Vec<_> = flags.iter().map(|(flag, value)| format!("{flag} = {}", written(value))).collect();
                let remark = if remark.is_empty() { String::new() } else { format!(" ({remark})") };
                write!(f, "{}{remark}", flags.join(", "))
            }
            Self::Holds => f.write_str("always so in this program"),
            Self::Ignored(why) | Self::Missing(why) => f.write_str(why),
        }
    }
}

impl Display for Converted {
    /// Prints the table, one line per key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: a configuration of {}", self.path, self.program)?;
        if self.program == Program::DeepSpeed {
            return write!(f, "; `superoffload train` reads it as it is, and lists every key before the run");
        }
        let keys = self.rows.iter().map(|row| row.key.len() + row.value.len() + 2).max().unwrap_or(0);
        self.rows.iter().try_for_each(|row| {
            let verdict = match row.fate {
                Fate::Used(..) => "used",
                Fate::Holds => "holds",
                Fate::Ignored(_) => "ignored",
                Fate::Missing(_) => "missing",
            };
            write!(f, "\n  {verdict:<8} {:<keys$}  {}", format!("{}: {}", row.key.escape_debug(), row.value), row.fate)
        })
    }
}
