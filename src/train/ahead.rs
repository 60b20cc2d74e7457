//! Prepares the text of a run ahead of training.

use super::observer::Observer;
use super::setup::{find_sources, forward_progress};
use super::text;
use crate::config::settings::Settings;
use crate::data::context::{self, Preparation};
use crate::data::prepare_ahead::PreparedText;
use crate::error::{Error, Result};
use crate::progress_event::ProgressEvent;
use crate::signals::StopFlag;

/// Prepares the text of `settings`, that to learn from and that to evaluate on, where training will find it.
///
/// # Errors
/// The errors of training for its model, tokenizer and data.
pub(crate) fn prepare(settings: &Settings, stop: &StopFlag, observer: &mut dyn Observer) -> Result<Vec<PreparedText>> {
    if settings.data.is_empty() {
        return Err(Error::usage("prepare: --data is missing: files, directories or a name on the hub"));
    }
    let settings = &find_sources(settings, false, stop, observer)?;
    let (shape, tokenizer, settings) = text::reader(settings, None)?;
    let mut preparation = Preparation::new(stop, context::cache(), None, |event: ProgressEvent<'_>| forward_progress(observer, event));
    let parts = [&settings.data, &settings.eval_data].into_iter().filter(|paths| !paths.is_empty());
    parts.map(|paths| PreparedText::new(paths, &tokenizer, shape.vocab, &mut preparation)).collect()
}
