//! Columns, keys and roles that decide something in other programs and are not read here. A record that has one is refused where its text
//! would be wrong; otherwise the run warns once.

use serde_json::{Map, Value};

/// Where a name stands.
#[derive(Clone, Copy, PartialEq)]
enum NamePlace {
    /// A column of a record.
    Column,
    /// A key of a message.
    Key,
    /// The role of a message.
    Role,
}

/// Consequence for a record that has the name.
#[derive(Clone, Copy, PartialEq)]
enum NameVerdict {
    Refused,
    /// The run warns once.
    Remarked,
}

/// One name.
struct ForeignName {
    place: NamePlace,
    name: &'static str,
    verdict: NameVerdict,
    /// The programs that document the name.
    source: &'static str,
    /// The consequence in this program, and the remedy.
    means: &'static str,
}

use NamePlace::{Column, Key, Role};
use NameVerdict::{Refused, Remarked};

const MEDIA: &str = "only text is trained, and a placeholder in the text is trained as text";
const PREFERENCE: &str = "pairs of answers are read with --loss alone";
const NOT_AN_ANSWER: &str = "messages of this role are not trained: answers have the role assistant";
const WEIGHTS: &str = "records have no weight here; give their answers the key `weight`, or their ids the column `weights`";
const BOUNDARIES: &str = "the ids of a record are one document here; give each document a record of its own";

const fn name(place: NamePlace, name: &'static str, verdict: NameVerdict, source: &'static str, means: &'static str) -> ForeignName {
    ForeignName { place, name, verdict, source, means }
}

#[rustfmt::skip]
const NAMES: &[ForeignName] = &[
    name(Column, "functions", Refused, "OpenAI", "the column `tools` holds the schemas, each as {\"type\": \"function\", \"function\": SCHEMA}"),
    name(Column, "mask", Refused, "NVIDIA NeMo", "--train-on and `train` of a message select the trained messages; leave the column out"),
    name(Column, "images", Remarked, "ms-swift, LLaMA-Factory, TRL", MEDIA),
    name(Column, "image", Remarked, "TRL", MEDIA),
    name(Column, "videos", Remarked, "ms-swift, LLaMA-Factory", MEDIA),
    name(Column, "video", Remarked, "ms-swift", MEDIA),
    name(Column, "audios", Remarked, "ms-swift, LLaMA-Factory", MEDIA),
    name(Column, "audio", Remarked, "ms-swift", MEDIA),
    name(Column, "objects", Remarked, "ms-swift", MEDIA),
    name(Column, "chosen", Remarked, "TRL, LLaMA-Factory, axolotl", PREFERENCE),
    name(Column, "rejected", Remarked, "TRL, LLaMA-Factory, axolotl", PREFERENCE),
    name(Column, "rejected_response", Remarked, "ms-swift", PREFERENCE),
    name(Column, "kto_tag", Remarked, "LLaMA-Factory", "unwanted answers would be trained like all other answers"),
    name(Column, "label", Remarked, "TRL, ms-swift", "unwanted answers would be trained like all other answers"),
    name(Column, "history", Remarked, "LLaMA-Factory, ms-swift", "earlier turns are only read beside `instruction` and `output`"),
    name(Column, "system_prompt", Remarked, "OpenOrca, axolotl", "--columns system=system_prompt reads it"),
    name(Column, "documents", Remarked, "transformers", "chat templates receive no documents here"),
    name(Column, "weight", Remarked, "record weights", WEIGHTS),
    name(Column, "sample_weight", Remarked, "record weights", WEIGHTS),
    name(Column, "loss_weight", Remarked, "record weights", WEIGHTS),
    name(Column, "weights", Remarked, "this program", "weights of tokens are only read beside `input_ids`"),
    name(Column, "position_ids", Remarked, "TRL, axolotl", BOUNDARIES),
    name(Column, "seq_lengths", Remarked, "TRL", BOUNDARIES),
    name(Key, "function_call", Refused, "OpenAI", "the key `tool_calls` holds a list of calls, each as {\"type\": \"function\", \"function\": CALL}"),
    name(Key, "train_detail", Refused, "axolotl", "parts of a message cannot be left out here"),
    name(Key, "mask", Refused, "NVIDIA NeMo", "`train` selects whether a message is trained"),
    name(Key, "token_loss_mask", Refused, "NeMo RL", "`train` selects whether a message is trained"),
    name(Key, "images", Remarked, "ms-swift, TRL", MEDIA),
    name(Key, "image", Remarked, "ms-swift", MEDIA),
    name(Key, "videos", Remarked, "ms-swift", MEDIA),
    name(Key, "video", Remarked, "ms-swift", MEDIA),
    name(Key, "audios", Remarked, "ms-swift", MEDIA),
    name(Key, "audio", Remarked, "OpenAI, ms-swift", MEDIA),
    name(Key, "refusal", Remarked, "OpenAI", "not part of the answer here: only `content` is trained"),
    name(Role, "tool_call", Remarked, "ms-swift", NOT_AN_ANSWER),
    name(Role, "function_call", Remarked, "ShareGPT", NOT_AN_ANSWER),
    name(Role, "model", Remarked, "Gemma", NOT_AN_ANSWER),
    name(Role, "gpt", Remarked, "ShareGPT", NOT_AN_ANSWER),
    name(Role, "ai", Remarked, "LangChain", NOT_AN_ANSWER),
    name(Role, "chatgpt", Remarked, "ShareGPT", NOT_AN_ANSWER),
    name(Role, "CHATBOT", Remarked, "Cohere", NOT_AN_ANSWER),
];

/// Columns of media, which a table may hold in bytes: their values are not read, only that they are there.
#[cfg(feature = "parquet")]
const MEDIA_COLUMNS: [&str; 7] = ["images", "image", "videos", "video", "audios", "audio", "objects"];

/// Whether the values of the column `name` are looked at in a table.
#[cfg(feature = "parquet")]
pub(super) fn is_looked_at(name: &str) -> bool {
    NAMES.iter().any(|known| known.place == Column && known.name == name) && !MEDIA_COLUMNS.contains(&name)
}

/// Whether a table's column `name` is one of media, of which it is enough to know that it is there.
#[cfg(feature = "parquet")]
pub(in crate::data) fn is_media(name: &str) -> bool {
    MEDIA_COLUMNS.contains(&name)
}

/// Sentences about the columns of a record that are not read, but for those that `is_read` names.
///
/// # Errors
/// For a column with which the record's text would be wrong.
pub(super) fn of_columns(columns: &Map<String, Value>, is_read: impl Fn(&str) -> bool) -> Result<Vec<String>, String> {
    let mut remarks = output(Column, |name| columns.get(name).is_some_and(|value| has_content(value) && !is_read(name)))
        .map_err(ForeignName::sentence)?;
    if columns.get("attention_mask").and_then(Value::as_array).is_some_and(|mask| mask.iter().any(|value| value == 0)) {
        remarks.push(
            "column `attention_mask` (of transformers) is not read: ids where it is 0 are trained unless `labels` leave them out".into(),
        );
    }
    Ok(remarks)
}

/// Sentences about the keys and the role of a message.
///
/// # Errors
/// For a key with which the message's text would be wrong, in words that follow the message's name.
pub(super) fn of_message(message: &Value) -> Result<Vec<String>, String> {
    let keys = output(Key, |name| has_content(&message[name])).map_err(ForeignName::of_its_message)?;
    let roles = output(Role, |name| message["role"] == name).map_err(ForeignName::of_its_message)?;
    Ok(keys.into_iter().chain(roles).collect())
}

/// The sentences about the names of a place that are there.
///
/// # Errors
/// The first one that is refused.
fn output(place: NamePlace, is_present: impl Fn(&str) -> bool) -> Result<Vec<String>, &'static ForeignName> {
    let present = NAMES.iter().filter(|known| known.place == place && is_present(known.name));
    present.map(|known| if known.verdict == Refused { Err(known) } else { Ok(known.sentence()) }).collect()
}

impl ForeignName {
    /// The name with its place and its source.
    fn subject(&self) -> String {
        let place = match self.place {
            Column => "column",
            Key => "key",
            Role => "role",
        };
        format!("{place} `{}` (of {})", self.name, self.source)
    }

    /// The sentence, in words that follow the name of a message.
    fn of_its_message(&self) -> String {
        format!("has the {}, which is not read: {}", self.subject(), self.means)
    }

    fn sentence(&self) -> String {
        format!("{} is not read: {}", self.subject(), self.means)
    }
}

/// Whether a value differs from the empty values that tables fill in.
fn has_content(value: &Value) -> bool {
    match value {
        Value::Null => false,
        Value::String(text) => !text.is_empty(),
        Value::Array(list) => !list.is_empty(),
        Value::Object(map) => !map.is_empty(),
        Value::Bool(_) | Value::Number(_) => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn each_name_is_refused_or_logged_and_an_empty_value_is_neither() {
        for ForeignName { place, name, verdict, source, .. } in NAMES {
            let of = |value: Value| match place {
                Column => of_columns(json!({*name: value}).as_object().unwrap(), |_| false),
                Key => of_message(&json!({"role": "user", *name: value})),
                Role => of_message(&json!({"role": name})),
            };
            let found = of(json!(1));
            assert_eq!(found.is_err(), *verdict == Refused, "{name}");
            let sentence = found.map_or_else(|refused| refused, |output| output.concat());
            assert!(sentence.contains(&format!("`{name}` (of {source})")) && sentence.contains("is not read: "), "{sentence}");
            for empty in [json!(null), json!([]), json!({}), json!("")] {
                assert_eq!(of(empty).map(|output| output.is_empty()), Ok(*place != Role), "{name}");
            }
        }
    }

    #[test]
    fn columns_that_are_read_and_masks_of_ones_cause_no_warning() {
        let columns = json!({"label": 1, "attention_mask": [1, 1]});
        assert_eq!(of_columns(columns.as_object().unwrap(), |name| name == "label"), Ok(vec![]));
        let padded = json!({"attention_mask": [1, 0]});
        assert!(of_columns(padded.as_object().unwrap(), |_| false).unwrap()[0].contains("`attention_mask`"));
    }
}
