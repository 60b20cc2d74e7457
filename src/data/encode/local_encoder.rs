//! A tokenizer and the rules of records in the process that runs both: in a sandbox where one of them is foreign.

use crate::data::chat::record::RecordRules;
use crate::data::tokenizer::{Facts, LocalKind, LocalTokenizer};
use crate::error::{Error, Result};
use std::sync::Arc;

/// Turns text and records into token ids.
pub(super) struct LocalEncoder {
    pub(super) tokenizer: LocalTokenizer,
    /// How records are read.
    pub(super) rules: Arc<RecordRules>,
}

impl LocalEncoder {
    /// The encoder of a tokenizer with these `facts`. A chat template among `rules` learns the end of text.
    pub(super) fn new(kind: LocalKind, facts: &Facts, rules: Arc<RecordRules>) -> Self {
        if let (Ok(template), Some(token)) = (&rules.template, &facts.end_token) {
            template.end_with(token);
        }
        Self { tokenizer: LocalTokenizer::new(kind, facts), rules }
    }
}

/// Compiles the chat template, if there is one.
///
/// # Errors
/// `Format` that names the template's file.
pub(super) fn compile(rules: &RecordRules) -> Result<()> {
    let Ok(template) = &rules.template else { return Ok(()) };
    template.compiled().map(|_| ()).map_err(|cause| Error::format(&rules.template_file, cause))
}
