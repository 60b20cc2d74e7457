//! Conformance of devices: one binary, without cargo or a test harness, to be copied to a machine with a GPU. Its cases are those of
//! `superoffload selftest`, and so are its options: `gpu --help` lists them. It exits 1 if a case failed, 2 if it could not do what was
//! asked.

#[path = "gpu/mod.rs"]
mod suite;

use clap::Parser;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use suite::run::{Request, conduct};
use superoffload::{Error, Result};

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    request: Request,
    /// Where to write every case with its time and its largest error as a part of the bound.
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

fn main() -> ExitCode {
    match run(&Cli::parse_from(without_harness(std::env::args()))) {
        Ok(code) => ExitCode::from(code),
        Err(e) => {
            // Nobody can be told that telling failed.
            let _ = writeln!(std::io::stdout(), "error: {e}");
            ExitCode::from(2)
        }
    }
}

fn run(Cli { request, json }: &Cli) -> Result<u8> {
    let report = conduct(request, std::io::stdout(), &[])?;
    if let Some(path) = json {
        std::fs::write(path, format!("{:#}\n", report.json())).map_err(|e| Error::io("write", path, e))?;
    }
    Ok(u8::from(report.has_failed()))
}

/// cargo test hands every binary the options of the usual harness; these change nothing here.
fn without_harness(mut args: impl Iterator<Item = String>) -> Vec<String> {
    let mut ours = Vec::new();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--nocapture" | "--no-capture" | "--quiet" | "-q" => {}
            "--test-threads" => drop(args.next()),
            _ if arg.starts_with("--test-threads=") => {}
            _ => ours.push(arg),
        }
    }
    ours
}
