//! Documents of a run's data in tokenized form, shown on request. They are read again with the run's settings, tokenizer and templates.

use super::html::{escape, escape_whole, last_name};
use super::run_setup::RunSetup;
use crate::config::settings::Settings;
use crate::data::encode::marked_text::ShownDocument;
use crate::data::encode::text_files::first_documents;
use crate::data::read::files::find_files;
use crate::error::{Error, Result};
use crate::signals::StopFlag;
use crate::train::text;
use crate::units::Bytes;
use serde::Deserialize;
use serde_json::Value;
use std::fmt::Write;
use std::path::PathBuf;

/// Number of documents shown for a run.
const SHOWN: usize = 5;

/// The first documents of a run's data, or the reason why there are none.
pub(super) struct DataSamples(std::result::Result<Vec<ShownDocument>, String>);

impl DataSamples {
    /// Reads the samples of the run of `setup`. An error appears on the page, because the rest of the report does not need the samples.
    pub(super) fn of(setup: Option<&RunSetup>) -> Self {
        let setup = setup.ok_or_else(|| "no record has the settings of the data".to_string());
        Self(setup.and_then(|setup| match read(setup) {
            Ok(documents) if documents.is_empty() => Err(textless(&setup.settings["data"]).into()),
            read => read.map_err(|cause| format!("{cause}; the paths come from the settings of the run")),
        }))
    }

    /// Whether the samples contain text of the data.
    pub(super) fn hold_text(&self) -> bool {
        self.0.is_ok()
    }

    /// Draws the documents. Documents longer than `row_tokens` are marked.
    pub(super) fn draw(&self, row_tokens: Option<u64>) -> String {
        match &self.0 {
            Err(cause) => format!("<p class=\"none\">No samples of the data: {}.</p>\n", escape(cause)),
            Ok(documents) => {
                let legend = "<p class=\"note\">The first documents, as the model reads them; <mark>trained text</mark> is marked.</p>\n";
                legend.to_string() + &documents.iter().map(|document| draw(document, row_tokens)).collect::<String>()
            }
        }
    }
}

/// Why the data at `paths` has no documents to show.
fn textless(paths: &Value) -> &'static str {
    if paths.as_array().is_some_and(|paths| !paths.is_empty()) { "it is token ids" } else { "it is the text that ships with the program" }
}

/// Reads the first documents of the data that `setup` names. The files must have the same size as in the run.
fn read(setup: &RunSetup) -> Result<Vec<ShownDocument>> {
    let data = setup.settings.get("data").map(Vec::<PathBuf>::deserialize).transpose();
    let data = data.map_err(|cause| Error::format("the run's settings", cause))?.unwrap_or_default();
    let chat_template = setup.settings["chat_template"].as_str().map(PathBuf::from);
    let settings = Settings { model: setup.model_dir.clone(), data, chat_template, ..Settings::default() };
    let files = find_files(&settings.data)?;
    let (_, tokenizer, _) = text::reader(&settings, Some(&setup.settings))?;
    let documents = first_documents(&files, &tokenizer, SHOWN, &StopFlag::default())?;
    documents.iter().try_for_each(|document| expect_same(document, &setup.run["data"]["files"]))?;
    Ok(documents)
}

/// Compares the size of the document's file with the size recorded by the run.
fn expect_same(document: &ShownDocument, recorded: &Value) -> Result<()> {
    let known = recorded.as_array().into_iter().flatten().find(|file| file["name"] == document.file.as_str());
    let then = known.and_then(|file| file["bytes"].as_u64());
    let now = std::fs::metadata(&document.file).map_err(|e| Error::io("read", &document.file, e))?.len();
    match then.filter(|then| *then != now) {
        Some(then) => Err(Error::format(&document.file, format_args!("changed since: {} now, {} then", Bytes(now), Bytes(then)))),
        None => Ok(()),
    }
}

fn draw(document: &ShownDocument, row_tokens: Option<u64>) -> String {
    let place = document.line.map_or(String::new(), |line| format!(", record {line}"));
    let tokens = document.tokens.map_or("the beginning".into(), |tokens| format!("{tokens} tokens"));
    let is_longer = document.tokens.zip(row_tokens).is_some_and(|(tokens, row)| tokens as u64 > row);
    let longer = if is_longer { ", more than a row has" } else { "" };
    let untrained =
        if document.pieces.iter().any(|piece| piece.weight.is_trained()) { "" } else { "; nothing of it is trained: it was left out" };
    let title = escape(format!("{}{place}: {tokens}{longer}{untrained}", last_name(&document.file)));
    let text = document.pieces.iter().fold(String::new(), |mut all, piece| {
        let text = escape_whole(&piece.text);
        let weight = piece.shown_weight().map_or(String::new(), |weight| format!(" title=\"weight {weight}\""));
        // Writing to a string cannot fail.
        let _ = if piece.weight.is_trained() { write!(all, "<mark{weight}>{text}</mark>") } else { write!(all, "{text}") };
        all
    });
    format!("<figure><figcaption>{title}</figcaption><pre class=\"sample\" tabindex=\"0\">\n{text}</pre></figure>\n")
}
