//! One HTML page about training runs: what `superoffload report` writes. It reads output directories and changes nothing in them.
//!
//! [`past_run`] and `run_setup` read a directory, `history` adds up its metrics, `curve` keeps what is drawn of them, `samples` reads
//! documents for those who ask; `sections` says what stands on the page in which order, in the words of `verdict` and `asked`; `chart`,
//! `timeline` and `html` draw and write it.

mod asked;
mod chart;
mod curve;
mod history;
mod html;
mod past_run;
mod run_setup;
mod samples;
mod sections;
mod timeline;
mod verdict;

use crate::disk::{ResultFile, ResultKind};
use crate::error::{Error, Result};
use past_run::PastRun;
use samples::DataSamples;
use std::io::Write;
use std::path::{Path, PathBuf};

const REPORT: ResultKind = ResultKind { name: "report", head: html::HEAD, flag: "--out", operation: "write report" };
/// As many as there are colours that everybody can tell apart.
const RUNS_MAX: usize = 6;

/// Writes a page about the runs in the directories `paths` to `out`; text of their data is in it only `with_samples`.
///
/// # Errors
/// `Usage` for too many runs, a directory that is none of a run, or an `out` that is something else than a report; `Io` when a file cannot
/// be read or written.
pub(crate) fn write_report(paths: &[PathBuf], out: &Path, with_samples: bool) -> Result<()> {
    if paths.len() > RUNS_MAX {
        return Err(Error::usage(format_args!("report: {} runs, at most {RUNS_MAX} can be told apart on one page", paths.len())));
    }
    let file = ResultFile::open(out, &REPORT)?;
    let mut runs = paths.iter().map(|path| PastRun::read(path)).collect::<Result<Vec<_>>>()?;
    if with_samples {
        runs.iter_mut().for_each(|run| run.samples = Some(DataSamples::of(run.setup.as_ref())));
    }
    let page = sections::page(&runs);
    file.write(|out| out.write_all(page.as_bytes()))
}
