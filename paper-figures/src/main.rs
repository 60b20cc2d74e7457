//! `paper-figures` draws and checks every figure and table of the SuperOffload paper, from the recorded lines of runs.

mod check;
mod claim;
mod config;
mod csv;
mod error;
mod figure;
mod lines;
mod machine;
mod numbers;
mod parameters;
mod plot;
mod program;
mod reproduce;
mod run;
mod series;
mod system;
#[cfg(test)]
mod tests;
mod timeline;
mod training;
mod unfinished;
mod verdict;
mod weight_flow;
mod workload;

use clap::{Parser, Subcommand};
use error::{Error, Result};
use figure::Figure;
use program::Programs;
use run::Choice;
use serde_json::Value;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Figures and tables of the SuperOffload paper (arXiv 2509.21271).
#[derive(Parser)]
#[command(name = "paper-figures", version)]
struct Args {
    /// Directory that holds the folders of the figures.
    #[arg(long, global = true, value_name = "DIR", default_value = env!("CARGO_MANIFEST_DIR"), hide_default_value = true)]
    dir: PathBuf,
    /// Directory of the programs [default: this program's].
    #[arg(long, global = true, value_name = "DIR")]
    programs: Option<PathBuf>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List every figure and table, a line each: outcome, resources, minutes on a CPU, title.
    List,
    /// Print a figure's claim and the numbers that the paper reports.
    Show {
        /// `fig-06`, `table-2`.
        id: String,
    },
    /// Run the sweeps of a figure, and draw it from its new lines, in target/paper-figures. A run that ended early is gone on with.
    Run {
        /// `fig-06`.
        id: String,
        /// Write into the figure's own folder, in place of the published lines; the program has to know its commit.
        #[arg(long)]
        record: bool,
        /// Where it writes otherwise [default: target/paper-figures].
        #[arg(long, value_name = "DIR", conflicts_with = "record")]
        out: Option<PathBuf>,
        /// What there is besides a CPU: sweeps that need it are run, too. `builds`: cargo, and minutes for builds by features.
        #[arg(long, value_name = "gpu|builds")]
        with: Vec<String>,
        /// Only the sweeps that need this.
        #[arg(long, value_name = "gpu|builds")]
        only: Option<String>,
    },
    /// Draw a figure from its lines, or `all`.
    Plot {
        /// `fig-06`.
        id: String,
    },
    /// Print the last two steps of each plan of a run, out of the trace that it wrote: a JSON array, one timeline a plan.
    Timelines {
        /// What `superoffload train --trace` wrote.
        trace: PathBuf,
    },
    /// Check lines, pictures and claims of every figure; exit 1 if something is wrong.
    Check,
    /// Write the table of verdicts into the README, and numbers into the figures' pages.
    Table,
    /// Run again and judge the claims of ARTIFACT.md that this machine can check; exit 1 if one fails.
    Reproduce {
        /// `C1`, or none for all claims.
        claims: Vec<String>,
        /// Only cheap sweeps, with small sizes: under a minute.
        #[arg(long)]
        kick_the_tires: bool,
        /// Say what would run and how long, and run nothing.
        #[arg(long)]
        dry_run: bool,
        /// `builds`: cargo, and 20 minutes for builds by features.
        #[arg(long, value_name = "builds")]
        with: Vec<String>,
        /// Where it writes [default: target/reproduce].
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Run, draw and check every figure, in target/paper-figures.
    All {
        /// As in `run`.
        #[arg(long, conflicts_with_all = ["kick_the_tires", "out"])]
        record: bool,
        /// With small sizes on the CPU, in minutes.
        #[arg(long)]
        kick_the_tires: bool,
        /// Where it writes otherwise [default: target/paper-figures, with --kick-the-tires target/kick-the-tires].
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
        /// As in `run`.
        #[arg(long, value_name = "gpu|builds")]
        with: Vec<String>,
    },
}

fn main() -> ExitCode {
    match run(&Args::parse()).and_then(|output| print(&output)) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}

/// Text to print, and whether all checks passed.
struct Output {
    text: String,
    is_good: bool,
}

impl Output {
    fn good(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_good: true }
    }

    fn complaints(wrong: &[String]) -> Self {
        let all = if wrong.is_empty() { "every figure is as its lines say\n".into() } else { format!("{}\n", wrong.join("\n")) };
        Self { text: all, is_good: wrong.is_empty() }
    }
}

fn run(args: &Args) -> Result<Output> {
    let figures = figure::all(&args.dir)?;
    match &args.command {
        Command::List => list(&figures).map(Output::good),
        Command::Show { id } => show(find(&figures, id)?).map(Output::good),
        Command::Run { id, record, out, with, only } => {
            let choice = Choice { is_quick: false, with: with.clone(), only: only.clone() };
            run_one(args, find(&figures, id)?, (*record, out.as_deref()), &choice).map(Output::good)
        }
        Command::Plot { id } if id == "all" => figures.iter().try_for_each(plot::write).map(|()| Output::good("")),
        Command::Plot { id } => plot::write(find(&figures, id)?).map(|()| Output::good("")),
        Command::Timelines { trace } => timeline::of_each_plan(trace).map(|plans| Output::good(format!("{}\n", Value::Array(plans)))),
        Command::Check => check(args, &figures),
        Command::Table => table(args, &figures),
        Command::Reproduce { claims, kick_the_tires, dry_run, with, out } => {
            let options = (*kick_the_tires, *dry_run, with.iter().any(|with| with == "builds"));
            reproduce(args, &figures, (claims, out.as_deref()), options)
        }
        Command::All { kick_the_tires: true, out, with, .. } => kick_the_tires(args, figures, out.as_deref(), with),
        Command::All { record, out, with, .. } => all(args, &figures, (*record, out.as_deref()), with),
    }
}

fn programs(args: &Args) -> Result<Programs> {
    let own_dir = || -> std::io::Result<PathBuf> { Ok(std::env::current_exe()?.parent().unwrap_or(Path::new(".")).into()) };
    let binaries = match &args.programs {
        Some(folder) => std::path::absolute(folder).map_err(|source| Error::Io { path: folder.clone(), source })?,
        None => own_dir().map_err(|source| Error::Io { path: "this program".into(), source })?,
    };
    Ok(Programs { binaries, figures: args.dir.clone() })
}

fn find<'a>(figures: &'a [Figure], id: &str) -> Result<&'a Figure> {
    let known = || figures.iter().map(|figure| figure.id.as_str()).collect::<Vec<_>>().join(", ");
    figures.iter().find(|figure| figure.id == id).ok_or_else(|| Error::Usage(format!("no figure {id}: there are {}", known())))
}

/// One line per figure: id, outcome, resources besides a CPU, minutes on a CPU, title. `show` has the whole verdict.
fn list(figures: &[Figure]) -> Result<String> {
    let mut text = format!("{:<9} {:<10} {:<12} {:>7}  {}\n", "figure", "outcome", "more with", "minutes", "title");
    for figure in figures {
        let outcome = verdict::outcome(figure)?;
        let word = OUTCOMES.into_iter().find(|(start, _)| outcome.starts_with(start)).map_or("not run", |(_, word)| word);
        let mut needs: Vec<&str> = figure.config.run.iter().map(|run| run.needs.as_str()).filter(|needs| !needs.is_empty()).collect();
        needs.dedup();
        let needs = if needs.is_empty() { "-".into() } else { needs.join(", ") };
        text += &format!("{:<9} {word:<10} {needs:<12} {:>7}  {}\n", figure.id, figure.config.minutes, figure.title);
    }
    Ok(text)
}

/// Words of `list`, by the beginning of an outcome.
const OUTCOMES: [(&str, &str); 4] =
    [("reproduced", "reproduced"), ("deviates", "deviates"), ("same shape", "same shape"), ("drawn for this repository", "own")];

/// The figure with its output folder. Output goes to the figure's own folder only with `record`, and only if the program can be rebuilt
/// from its commit.
fn writable(args: &Args, figure: &Figure, (record, out): Recording) -> Result<Figure> {
    if record {
        programs(args)?.check_recordable()?;
        return Ok(figure.clone());
    }
    let out = out.map_or_else(|| args.dir.join("../target/paper-figures"), Path::to_path_buf);
    Ok(figure.clone().with_scratch(&out))
}

/// Whether to record lines, and otherwise the output folder, if the user named one.
type Recording<'a> = (bool, Option<&'a Path>);

fn run_one(args: &Args, figure: &Figure, place: Recording, choice: &Choice) -> Result<String> {
    let (figure, record) = (writable(args, figure, place)?, place.0);
    let message = run::run(&figure, &programs(args)?, choice)?.join("\n");
    if record {
        return Ok(format!("{message}\nnow: plot {}, table, check\n", figure.id));
    }
    plot::write(&figure)?;
    let folder = figure.output_path("");
    Ok(format!("{message}\nlines and picture are in {}; --record replaces the published ones\n", folder.display()))
}

fn show(figure: &Figure) -> Result<String> {
    let table = figure.expected()?;
    let comments: String = table.comments.iter().map(|comment| format!("{comment}\n")).collect();
    let verdict = verdict::verdict(figure)?;
    let head = format!("{}: {}\n{}\nNeeds: {}.\nHere: {verdict}", figure.label, figure.title, figure.claim, figure.needs);
    Ok(format!("{head}\n\n{comments}\n{}", table.aligned()))
}

/// Checks every figure, its picture, and the README's table.
fn check(args: &Args, figures: &[Figure]) -> Result<Output> {
    let mut wrong = Vec::new();
    for figure in figures {
        wrong.extend(check::check(figure, false)?);
        if !plot::is_current(figure)? {
            wrong.push(format!("{}: figure.svg is not what its lines draw: run `plot {}`", figure.id, figure.id));
        }
    }
    for (path, text) in pages(args, figures)? {
        if std::fs::read_to_string(&path).map_err(|source| Error::Io { path: path.clone(), source })? != text {
            wrong.push(format!("{}: not what the lines say: run `table`", path.strip_prefix(&args.dir).unwrap_or(&path).display()));
        }
    }
    Ok(Output::complaints(&wrong))
}

fn table(args: &Args, figures: &[Figure]) -> Result<Output> {
    for (path, text) in pages(args, figures)? {
        std::fs::write(&path, text).map_err(|source| Error::Io { path, source })?;
    }
    Ok(Output::good(""))
}

/// Prints the machine and the plan at once, and the verdicts at the end.
fn reproduce(args: &Args, figures: &[Figure], (ids, out): (&[String], Option<&Path>), options: (bool, bool, bool)) -> Result<Output> {
    let ((is_quick, is_dry, builds), machine, all) = (options, machine::Machine::this(), claim::all(figures));
    let unknown = ids.iter().find(|id| !all.iter().any(|claim| claim.id == **id));
    if let Some(id) = unknown {
        return Err(Error::Usage(format!("no claim {id}: there are C1 to C{}", all.len())));
    }
    let claims: Vec<_> = all.into_iter().filter(|claim| ids.is_empty() || ids.contains(&claim.id)).collect();
    let out = out.map_or_else(|| args.dir.join("../target/reproduce"), Path::to_path_buf);
    let resources = claim::Resources { gpus: machine.gpus.len() as u64, builds };
    let options = reproduce::Options { is_quick, resources, out: &out };
    let superchip = machine.superchip().map(|name| format!("{name}: `superoffload superchip-check` measures it, too\n"));
    print(&Output::good(format!("{machine}\n{}{}\n", superchip.unwrap_or_default(), reproduce::plan(&claims, &options))))?;
    if is_dry {
        return Ok(Output::good(""));
    }
    let programs = programs(args)?;
    let mut verdicts = Vec::new();
    for claim in &claims {
        verdicts.push((claim.id.clone(), claim.figure.id.clone(), reproduce::judge(claim, &programs, &options)?));
    }
    let (text, is_good) = reproduce::report(&verdicts);
    Ok(Output { text, is_good })
}

/// Pages with numbers from lines, as they should be.
fn pages(args: &Args, figures: &[Figure]) -> Result<Vec<(PathBuf, String)>> {
    let path = args.dir.join("README.md");
    let mut pages = vec![(path.clone(), verdict::readme(&path, &verdict::table(figures)?)?)];
    let artifact = args.dir.join("ARTIFACT.md");
    if artifact.exists() {
        pages.push((artifact.clone(), verdict::readme(&artifact, &claim::table(figures)?)?));
    }
    for figure in figures {
        pages.push((figure.folder.join("README.md"), verdict::page(figure)?));
    }
    Ok(pages)
}

fn all(args: &Args, figures: &[Figure], place: Recording, with: &[String]) -> Result<Output> {
    let choice = Choice { with: with.into(), ..Choice::default() };
    let mut wrong = Vec::new();
    for figure in figures {
        let figure = writable(args, figure, place)?;
        run::run(&figure, &programs(args)?, &choice)?;
        plot::write(&figure)?;
        wrong.extend(check::check(&figure, false)?);
    }
    if !place.0 {
        return Ok(Output::complaints(&wrong));
    }
    table(args, figures)?;
    check(args, figures)
}

/// Runs all sweeps with quick values, draws all figures into a separate folder, and applies every check.
fn kick_the_tires(args: &Args, figures: Vec<Figure>, out: Option<&Path>, with: &[String]) -> Result<Output> {
    let out = out.map_or_else(|| args.dir.join("../target/kick-the-tires"), Path::to_path_buf);
    if out.exists() {
        std::fs::remove_dir_all(&out).map_err(|source| Error::Io { path: out.clone(), source })?;
    }
    let choice = Choice { is_quick: true, with: with.into(), only: None };
    let (mut message, mut wrong) = (Vec::new(), Vec::new());
    for figure in figures {
        let figure = figure.with_scratch(&out);
        message.extend(run::run(&figure, &programs(args)?, &choice)?);
        plot::write(&figure)?;
        wrong.extend(check::check(&figure, true)?);
    }
    let output = Output::complaints(&wrong);
    Ok(Output { text: format!("{}\n{}", message.join("\n"), output.text), ..output })
}

/// A broken pipe (for example of `| head`) is not an error.
fn print(output: &Output) -> Result<ExitCode> {
    match std::io::stdout().write_all(output.text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Error::Io { path: "standard output".into(), source: error }),
        _ => Ok(ExitCode::from(u8::from(!output.is_good))),
    }
}
