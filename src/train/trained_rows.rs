//! Rows that the head of a new run computes by default: where data has prompts with answers, the rows with trained targets. The choice
//! decides memory, so that it comes before the plan, by the first record of each file.

use super::text::record_flags;
use crate::config::settings::Settings;
use crate::data::chat::mask::TrainOn;
use crate::data::encode::text_files;
use crate::data::read::files;
use crate::disk::named_by;
use crate::error::Result;
use crate::request::choices::HeadRowsChoice;

/// `settings` with a choice in place of `auto`, reported by `log`.
///
/// # Errors
/// Errors of [`files::find_files`]; `Usage` for an invalid flag of records.
pub(crate) fn settle(settings: &Settings, log: &mut dyn FnMut(&str)) -> Result<Settings> {
    if settings.head_rows != HeadRowsChoice::Auto {
        return Ok(settings.clone());
    }
    let data = files::find_files(&settings.data).map_err(|error| named_by("--data", error))?;
    let head_rows = match text_files::with_answers(&data, &record_flags(settings).plain_rules()?) {
        Some(answers) if settings.train_on != TrainOn::All => {
            log(&format!("--head-rows auto is trained: the records of {} have prompts, which are not trained", answers.display()));
            HeadRowsChoice::Trained
        }
        _ => HeadRowsChoice::All,
    };
    Ok(Settings { head_rows, ..settings.clone() })
}

/// As [`settle`] for a plan, whose data need not be here; without any there is nothing to look at.
pub(crate) fn settle_for_plan(settings: &Settings, log: &mut dyn FnMut(&str)) -> Settings {
    let settled = if settings.data.is_empty() { Ok(settings.clone()) } else { settle(settings, log) };
    // The choice of rows by the same data has named the cause.
    settled.unwrap_or_else(|_| settings.clone())
}
