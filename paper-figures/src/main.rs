//! `paper-figures`: what the SuperOffload paper reports, figure by figure, and what can be computed again.

mod csv;
mod error;
mod figure;
mod weight_flow;

use clap::{Parser, Subcommand};
use error::{Error, Result};
use figure::Figure;
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
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// List every figure and table: what it shows, what it needs, how far it is reproduced.
    List,
    /// Print a figure's claim and the numbers that the paper reports.
    Show {
        /// `fig-06`, `table-2`.
        id: String,
    },
    /// Compute a figure again: JSON lines, then the largest deviation from the paper. Only `fig-06` so far.
    Run {
        /// `fig-06`.
        id: String,
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

/// What to print, and whether the figure agrees with the paper.
struct Output {
    text: String,
    agrees: bool,
}

fn run(args: &Args) -> Result<Output> {
    let good = |text| Output { text, agrees: true };
    match &args.command {
        Command::List => Ok(good(list(&figure::all(&args.dir)?))),
        Command::Show { id } => show(&find(&args.dir, id)?).map(good),
        Command::Run { id } => run_figure(&find(&args.dir, id)?),
    }
}

fn find(dir: &Path, id: &str) -> Result<Figure> {
    let figures = figure::all(dir)?;
    let known: Vec<_> = figures.iter().map(|figure| figure.id.clone()).collect();
    let found = figures.into_iter().find(|figure| figure.id == id);
    found.ok_or_else(|| Error::Usage(format!("no figure {id}: there are {}", known.join(", "))))
}

fn list(figures: &[Figure]) -> String {
    let rows = figures.iter().map(|figure| [figure.id.clone(), figure.title.clone(), state(figure).into(), figure.needs.clone()].into());
    let header = ["id", "title", "state", "needs"].map(String::from).into();
    csv::Table { comments: Vec::new(), header, rows: rows.collect() }.aligned()
}

fn state(figure: &Figure) -> &'static str {
    if figure.id == weight_flow::ID { "runs: a model" } else { "expected data only" }
}

fn show(figure: &Figure) -> Result<String> {
    let table = figure.expected()?;
    let comments: String = table.comments.iter().map(|comment| format!("{comment}\n")).collect();
    Ok(format!("{}: {}\n{}\n\n{comments}\n{}", figure.label, figure.title, figure.claim, table.aligned()))
}

fn run_figure(figure: &Figure) -> Result<Output> {
    if figure.id != weight_flow::ID {
        return Err(Error::Usage(format!("{} cannot be run: there is expected data only", figure.id)));
    }
    let points = weight_flow::points(&figure.expected()?).map_err(|cause| Error::Format { path: figure.expected_path(), cause })?;
    let deviation = weight_flow::deviation_points_max(&points);
    let agrees = deviation < weight_flow::DEVIATION_POINTS_LIMIT;
    let lines: String = points.iter().map(|point| format!("{}\n", point.json())).collect();
    Ok(Output { text: format!("{lines}{}\n", weight_flow::summary(points.len(), deviation, agrees)), agrees })
}

/// A reader that has seen enough (`| head`) is no error.
fn print(output: &Output) -> Result<ExitCode> {
    match std::io::stdout().write_all(output.text.as_bytes()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Error::Io { path: "standard output".into(), source: error }),
        _ => Ok(ExitCode::from(u8::from(!output.agrees))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run_args(args: &[&str]) -> Result<Output> {
        run(&Args::try_parse_from(["paper-figures"].iter().chain(args)).unwrap())
    }

    #[test]
    fn lists_every_folder() {
        let list = run_args(&["list"]).unwrap().text;
        assert_eq!(list.lines().count(), 1 + 10, "{list}");
        assert!(list.contains("fig-06   efficiency of streaming weights"), "{list}");
        assert_eq!(list.matches("expected data only").count(), 9);
    }

    #[test]
    fn shows_every_folder() {
        for figure in figure::all(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap() {
            let text = show(&figure).unwrap();
            assert!(text.contains("arXiv 2509.21271") && text.starts_with(&figure.label), "{text}");
        }
        assert!(run_args(&["show", "table-2"]).unwrap().text.contains("238.92"));
    }

    #[test]
    fn the_model_of_figure_6_agrees_with_the_paper() {
        let output = run_args(&["run", "fig-06"]).unwrap();
        assert!(output.agrees);
        let lines: Vec<serde_json::Value> = output.text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        assert_eq!(lines.len(), 9 * 3 + 1);
        assert_eq!((&lines[0]["bandwidth_gbps"], &lines[0]["batch"]), (&10.0.into(), &1.into()));
        // The table has one decimal: a fitted peak that is right leaves less than that.
        assert!(lines[27]["deviation_points_max"].as_f64().unwrap() < 0.1);
    }

    #[test]
    fn numbers_that_disagree_fail() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("fig-06_weight-flow");
        std::fs::create_dir(&folder).unwrap();
        std::fs::write(folder.join("README.md"), "# Figure 6: x\n\nClaim: y\n\nNeeds: z\n").unwrap();
        std::fs::write(folder.join("expected.csv"), "bandwidth_gbps,batch_1\n10,3.0\n").unwrap();
        let dir = dir.path().to_str().unwrap();
        assert!(!run_args(&["--dir", dir, "run", "fig-06"]).unwrap().agrees);
    }

    #[test]
    fn what_is_not_there_is_said() {
        let error = |args: &[&str]| run_args(args).err().unwrap();
        assert!(error(&["show", "fig-99"]).to_string().starts_with("no figure fig-99: there are fig-06, fig-07"));
        assert_eq!(error(&["run", "fig-07"]).to_string(), "fig-07 cannot be run: there is expected data only");
        assert_eq!(error(&["run", "fig-07"]).exit_code(), 2);
        assert_eq!(error(&["--dir", "/nowhere", "list"]).exit_code(), 1);
    }
}
