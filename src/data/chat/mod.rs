//! Records of chat data: their columns ([`record`], [`message`]), the text that a model sees of them ([`template`]) and the trained part of
//! this text ([`mask`], by [`marks`] or by [`span`]).

mod bounds;
mod choices;
mod date;
mod filters;
pub(crate) mod find;
pub(in crate::data) mod foreign_names;
mod ids;
mod integers;
mod lost;
mod marks;
pub(crate) mod mask;
mod message;
mod methods;
mod named;
mod non_finite;
mod order;
pub(crate) mod pair;
mod parts;
mod probe;
mod python;
pub(crate) mod record;
mod rewrite;
pub(crate) mod rollout;
pub(crate) mod sample;
pub(in crate::data) mod span;
pub(in crate::data) mod teacher;
mod template;
mod template_variables;
mod token_weights;
mod tool_calls;

use self::date::Day;
use self::record::{Content, DataFormat, RecordRules};
use self::sample::ChatSample;
pub(super) use self::template::ChatTemplate;

/// The texts of a record of messages by the template `source`, in this process: for fuzzers, which do not follow child processes.
///
/// # Errors
/// A description of the fault in the template or in the record.
pub fn render_in_this_process(source: &str, record: &str) -> Result<Vec<String>, String> {
    let template = ChatTemplate::new(source, serde_json::Map::new(), Day::today());
    let rules = RecordRules { template, ..RecordRules::default() };
    match rules.read(DataFormat::Messages, record)? {
        Content::Rendered(chat) => Ok(chat.samples.into_iter().map(|ChatSample { text, .. }| text).collect()),
        other => Err(format!("no messages: {other:?}")),
    }
}

#[cfg(test)]
mod hostile_tests;
#[cfg(test)]
mod mask_tests;
#[cfg(test)]
mod parity_tests;
#[cfg(test)]
mod record_tests;
#[cfg(test)]
mod remark_tests;
#[cfg(test)]
mod snippet_tests;
#[cfg(test)]
mod split_tests;
#[cfg(test)]
mod tests;
