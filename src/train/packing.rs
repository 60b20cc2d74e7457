//! How a run's data becomes rows by default: answers to prompts stay whole, running text is one stream, and a resumed run
//! keeps the rows of its checkpoint. Rows decide kernels and memory, so that this comes before the plan, by the first record of each file.

use super::text::record_flags;
use crate::config::settings::Settings;
use crate::data::encode::text_files;
use crate::data::read::files;
use crate::data::rows::row_rules::Packing;
use crate::disk::named_by;
use crate::error::Result;
use serde::Deserialize;
use serde_json::{Value, json};

/// Key of the setting in a checkpoint.
const PACKING: &str = "packing";

/// `settings` with a choice in place of `auto`, reported by `log`. `saved` are the settings in the checkpoint of a resumed run.
///
/// # Errors
/// Errors of [`files::find_files`]; `Usage` for an invalid flag of records.
pub(crate) fn settle(settings: &Settings, saved: Option<&Value>, log: &mut dyn FnMut(&str)) -> Result<Settings> {
    if settings.packing != Packing::Auto {
        return Ok(settings.clone());
    }
    let (packing, why) = match saved {
        Some(saved) => (of_checkpoint(saved), "as the checkpoint's rows are".into()),
        None => of_data(settings)?,
    };
    log(&format!("--packing auto is {packing}: {why}"));
    Ok(Settings { packing, ..settings.clone() })
}

/// As [`settle`] for a plan, whose data need not be here; without any there is nothing to look at.
pub(crate) fn settle_for_plan(settings: &Settings, log: &mut dyn FnMut(&str)) -> Settings {
    let settled = if settings.data.is_empty() { Ok(settings.clone()) } else { settle(settings, None, log) };
    settled.unwrap_or_else(|unseen| {
        log(&format!("--packing auto is planned as wrapped: {unseen}"));
        settings.clone()
    })
}

/// The settings of a checkpoint with missing ones filled in: older versions always cut rows from one stream.
pub(super) fn completed(saved: &Value) -> Value {
    let mut saved = saved.clone();
    if let Some(settings) = saved.as_object_mut() {
        settings.entry(PACKING).or_insert(json!(Packing::Wrapped));
    }
    saved
}

/// Invalid values are rejected where they are compared.
fn of_checkpoint(saved: &Value) -> Packing {
    Packing::deserialize(&completed(saved)[PACKING]).unwrap_or(Packing::Wrapped)
}

/// The rows of data, and why.
fn of_data(settings: &Settings) -> Result<(Packing, String)> {
    let data = files::find_files(&settings.data).map_err(|error| named_by("--data", error))?;
    let Some(answers) = text_files::with_answers(&data, &record_flags(settings).plain_rules()?) else {
        return Ok((Packing::Wrapped, "the data is one stream of text".into()));
    };
    let evaluated = files::find_files(&settings.eval_data).map_err(|error| named_by("--eval-data", error))?;
    let all = [data.as_slice(), &evaluated].concat();
    Ok(match all.iter().find(|path| !files::is_text(path)) {
        Some(ids) => (Packing::Wrapped, format!("{} does not mark where documents end", ids.display())),
        None => (Packing::Bfd, format!("the records of {} stay whole", answers.display())),
    })
}
