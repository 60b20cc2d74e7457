//! A prompt as a model is given it: in the words of the run's chat template, if it has one.

use super::media_token::find;
use super::text_work::{Done, TextWork};
use super::tokenizer_handle::Tokenizer;
use crate::data::chat::ChatTemplate;
use crate::error::{Error, Result};
use crate::signals::StopFlag;

/// The cause for which records of `tokenizer` go through no chat template; `None` where they go through one.
pub(crate) fn lacking_template(tokenizer: &Tokenizer) -> Option<&str> {
    tokenizer.rules().template.as_ref().err().map(String::as_str)
}

/// The chat template that records of `tokenizer` go through, as its file has it.
pub(crate) fn template_file(tokenizer: &Tokenizer) -> Option<&str> {
    tokenizer.rules().template.as_ref().ok().map(ChatTemplate::file)
}

/// The ids of `prompt`, up to where the model begins to answer: as a user's message through the chat template of `tokenizer`'s rules, else
/// as the beginning of a document.
///
/// # Errors
/// `Usage` for a prompt without a token, with a token of other input than text, or one that template or tokenizer refuse; `Interrupted`.
pub(crate) fn ids(tokenizer: &Tokenizer, prompt: &str, stop: &StopFlag) -> Result<Vec<u32>> {
    let refuse = |cause: &str| Error::usage(format!("prompt {prompt:?}: {cause}"));
    let done = tokenizer.run(&[TextWork::Prompt(prompt)], stop, |_, cause| refuse(&cause))?;
    let ids = match done.into_iter().next() {
        Some(Done::Ids(ids)) if !ids.is_empty() => ids,
        _ => return Err(refuse("it has no token; give a longer prompt")),
    };
    match ids.iter().zip(1..).find_map(|(id, nth)| Some((find(tokenizer.media_tokens(), *id)?, nth))) {
        None => Ok(ids),
        Some((token, nth)) => Err(refuse(&format!("token {nth} {}", token.refusal()))),
    }
}
