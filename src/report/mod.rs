//! The HTML page about training runs that `superoffload report` writes. It reads output directories and does not change them.
//!
//! [`past_run`] and `run_setup` read a directory. `history` aggregates its metrics, `curve` reduces them for drawing, and `samples` reads
//! documents on request. `sections` defines content and order of the page, with texts from `verdict` and `requested`. `chart`, `timeline`
//! and `html` draw and format.

mod chart;
mod curve;
mod history;
mod html;
mod past_run;
mod requested;
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
/// Maximum number of runs on a page: the number of colours that are easy to distinguish.
const RUNS_MAX: usize = 6;

/// Writes a page about the runs in the directories `paths` to `out`. It contains text of the training data only if `with_samples` is set.
///
/// # Errors
/// `Usage` for too many runs, a directory without a run, or an `out` that exists and is not a report; `Io` if a file cannot be read or
/// written.
pub(crate) fn write_report(paths: &[PathBuf], out: &Path, with_samples: bool) -> Result<()> {
    if paths.len() > RUNS_MAX {
        return Err(Error::usage(format_args!("report: {} runs, at most {RUNS_MAX} can be distinguished on one page", paths.len())));
    }
    let file = ResultFile::open(out, &REPORT)?;
    let mut runs = paths.iter().map(|path| PastRun::read(path)).collect::<Result<Vec<_>>>()?;
    if with_samples {
        for run in &mut runs {
            run.samples = Some(DataSamples::of(run.setup.as_ref()));
        }
    }
    let page = sections::page(&runs);
    file.write(|out| out.write_all(page.as_bytes()))
}
