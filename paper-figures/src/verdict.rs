//! Verdicts: one sentence per figure on its reproduction, derived from its data, and the table in the README.

use crate::check;
use crate::config::Origin;
use crate::error::{Error, Result};
use crate::figure::Figure;
use crate::numbers::Numbers;
use crate::series;
use std::path::Path;

/// Lines around the table.
const BEGIN: &str = "<!-- begin: written by `paper-figures table` -->\n";
const END: &str = "<!-- end -->\n";

/// Returns the verdict of a figure: reproduced, deviates, same shape, not run here, or drawn for this repository.
///
/// # Errors
/// Errors of reading data.
pub fn verdict(figure: &Figure) -> Result<String> {
    let found = outcome(figure)?;
    let why = Numbers::of(figure)?.fill(&figure.config.why);
    let why = why.map_err(|cause| Error::Format { path: figure.folder.join("config.toml"), cause: format!("why: {cause}") })?;
    Ok(if why.is_empty() { found } else { format!("{found}; {why}") })
}

/// The first word of the verdict: the figure's outcome, with the largest deviation from the paper.
///
/// # Errors
/// Errors of reading data.
pub fn outcome(figure: &Figure) -> Result<String> {
    let config = &figure.config;
    if check::ours(figure)?.is_empty() {
        return Ok(format!("not run here: {}", config.pending));
    }
    let curves = series::curves(figure)?;
    let deviation = |rule| check::deviation(&curves, rule).map(|(deviation, place)| (deviation, place, rule));
    let worst = config.compare.iter().filter_map(deviation).max_by(|a, b| (a.0.abs() / a.2.within).total_cmp(&(b.0.abs() / b.2.within)));
    Ok(match worst {
        _ if config.own => "drawn for this repository".into(),
        None if config.deviates => "deviates".into(),
        None => "same shape; numbers not compared".into(),
        Some((deviation, _, rule)) if deviation.abs() <= rule.within => {
            format!("reproduced: within {:.1} % of the paper", 100.0 * deviation.abs())
        }
        Some((deviation, place, rule)) => format!("deviates: {} is {:+.0} % off at {place}", rule.ours, 100.0 * deviation),
    })
}

/// Origins of the figure's own lines, for example `simulated, measured`.
///
/// # Errors
/// Errors of reading data.
pub fn ours(figure: &Figure) -> Result<String> {
    let ours = check::ours(figure)?;
    let names = [(Origin::Model, "formula"), (Origin::Simulated, "simulated"), (Origin::Measured, "measured")];
    let found = names.into_iter().filter(|(origin, _)| ours.iter().any(|(_, of)| of == origin));
    Ok(found.map(|(_, name)| name).collect::<Vec<_>>().join(", "))
}

/// Returns the table with a row for each figure.
///
/// # Errors
/// Errors of reading data.
pub fn table(figures: &[Figure]) -> Result<String> {
    let mut text = String::from("| | figure | verdict | our data | minutes |\n|---|---|---|---|---|\n");
    for figure in figures {
        let (folder, config) = (figure.folder_name(), &figure.config);
        let picture =
            format!("<a href=\"{folder}/figure.svg\"><img src=\"{folder}/figure.png\" width=\"180\" alt=\"{}\"></a>", figure.label);
        let data = [ours(figure)?, config.hardware.clone()].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(": ");
        let verdict = verdict(figure)?;
        let row =
            format!("| {picture} | [{}: {}]({folder}/README.md) | {verdict} | {data} | {} |\n", figure.label, figure.title, config.minutes);
        text.push_str(&row);
    }
    Ok(text)
}

/// Returns the figure's README with its numbers filled in.
///
/// # Errors
/// Errors of reading data or the README, and expressions without a value.
pub fn page(figure: &Figure) -> Result<String> {
    let path = figure.folder.join("README.md");
    let text = std::fs::read_to_string(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
    Numbers::of(figure)?.page(&text).map_err(|cause| Error::Format { path, cause })
}

/// Returns the page at `path` with `table` in its place.
///
/// # Errors
/// Errors of reading the README; an error if it has no place for the table.
pub fn readme(path: &Path, table: &str) -> Result<String> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::Io { path: path.into(), source })?;
    let parts = text.split_once(BEGIN).and_then(|(before, rest)| Some((before, rest.split_once(END)?.1)));
    let (before, after) =
        parts.ok_or_else(|| Error::Format { path: path.into(), cause: format!("no place for the table: {:?}", BEGIN.trim()) })?;
    Ok(format!("{before}{BEGIN}{table}{END}{after}"))
}
