//! Generates `docs/reliability.md` from the records: a row for each campaign, and all recorded failures.

use crate::list::CAMPAIGNS;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

/// Converts one line of a record to a row.
type ToRow = fn(&Value) -> Row;

/// The record files in tests/campaigns/, with the conversion of their lines.
const RECORDS: [(&str, ToRow); 5] =
    [("reliability.jsonl", campaign), ("adam.jsonl", adam), ("exactness.jsonl", exactness), ("gpu.jsonl", gpu), ("threads.jsonl", threads)];

/// Risks of the list that were not tried here, or only in part.
const NOT_RUN: [(&str, &str); 11] = [
    ("R6", "as a campaign, states saved by several processes, which `tests/processes.rs` does with one to four"),
    ("R12", "on a real GPU: the GPU suite asks for memory that no device has, and the plan refuses before"),
    ("R13", "on a real GPU: the GPU suite loses its GPU in a child process once, by a kernel that reads nowhere"),
    ("R14", "as a campaign, a panic in a worker, and one thread stopped alone, which `tests/faults.rs` does once by a debugger's call"),
    ("R15", "as a campaign, an event that is never signalled, which `tests/faults.rs` does once"),
    ("R16", "as a campaign, a GPU that fails among several"),
    ("R24", "Miri on what calls the kernel or vector instructions, and the thread sanitizer"),
    ("R25", "24 hours, and half an hour on a GPU"),
    ("R29", "failures of loggers on the network: there are none"),
    ("R31", "200 steps and three seeds: ten steps of four comparisons"),
    ("R30", "states on an NVMe disk: there is no such tier"),
];

/// One record.
struct Row {
    id: String,
    what: String,
    /// The part of `what` that differs between records of one row: a fuzz target, an instruction set, a check.
    detail: String,
    runs: u64,
    /// The reason why there was no run.
    not_run: Option<String>,
    failures: u64,
    commit: String,
    machine: String,
    command: String,
    /// One line for each failure in the record.
    shown: Vec<String>,
}

pub fn print() -> Result<(), String> {
    crate::print_line(page()?.trim_end());
    Ok(())
}

/// Checks that the committed page matches the records.
pub fn check() -> Result<(), String> {
    let committed = fs::read_to_string(root().join("docs/reliability.md")).map_err(|e| format!("docs/reliability.md: {e}"))?;
    let same = committed == page()?;
    if same { Ok(()) } else { Err("docs/reliability.md is not what tests/campaigns/ gives: superoffload-campaign --report".into()) }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn page() -> Result<String, String> {
    let mut rows = fuzzed(&lines("fuzz.jsonl")?);
    rows.extend(mutants(&lines("ranks_mutants.jsonl")?));
    for (name, row) in RECORDS {
        rows.extend(lines(name)?.iter().map(row));
    }
    rows.sort_by_key(|row| (rank(&row.id), row.what.clone(), row.command.clone()));
    Ok([HEAD, &table(&rows), &failures(&rows), &missing(&rows)].concat())
}

/// The lines of a record file; none if it does not exist.
fn lines(record: &str) -> Result<Vec<Value>, String> {
    let path = root().join("tests/campaigns").join(record);
    let text = fs::read_to_string(&path).unwrap_or_default();
    text.lines().map(|line| serde_json::from_str(line).map_err(|e| format!("{}: {e}", path.display()))).collect()
}

/// Sort key of an identifier, by its number.
fn rank(id: &str) -> (u32, String) {
    let digits: String = id.chars().filter(char::is_ascii_digit).collect();
    (digits.parse().unwrap_or(u32::MAX), id.to_string())
}

const HEAD: &str = "# Reliability: runs that were tried, and runs that failed

`superoffload-campaign --report` makes this page from the records in `tests/campaigns/`, and a test compares the two. A row adds up all records of one
campaign. A failure stays on this page until a later commit replaces its record. `tests/campaign/run-all.sh OUT` repeats the campaigns, and the sources in
`tests/campaign/` define each of them. *(changes)* beside a commit: the working tree had uncommitted changes.

";

fn table(rows: &[Row]) -> String {
    let mut text =
        "| id | campaign | runs | failures | newest commit | machines | command |\n|---|---|---:|---:|---|---|---|\n".to_string();
    for group in rows.chunk_by(|one, other| (&one.id, &one.what, &one.command) == (&other.id, &other.what, &other.command)) {
        text += &line_of(group);
    }
    text
}

/// The table row for the sum of `records`, which belong to one campaign.
fn line_of(records: &[Row]) -> String {
    let Row { id, what, command, .. } = &records[0];
    let newest = &records[records.len() - 1].commit;
    let (hash, changes) = newest.split_once(' ').unwrap_or((newest, ""));
    let commit = format!("{} {changes}", hash.chars().take(10).collect::<String>());
    let runs: u64 = records.iter().map(|record| record.runs).sum();
    let not_run = records.iter().find_map(|record| record.not_run.as_ref()).filter(|_| runs == 0);
    let runs = not_run.map_or_else(|| runs.to_string(), |why| format!("not run: {why}"));
    let failures: u64 = records.iter().map(|record| record.failures).sum();
    let details = distinct(records.iter().map(|record| &record.detail)).join("; ");
    let what = if details.is_empty() { what.clone() } else { format!("{what}: {details}") };
    let machines = distinct(records.iter().map(|record| &record.machine)).join("; ");
    format!("| {id} | {} | {runs} | {failures} | {} | {machines} | `{command}` |\n", what.replace('|', "\\|"), commit.trim_end())
}

/// The distinct non-empty texts, in order.
fn distinct<'a>(texts: impl Iterator<Item = &'a String>) -> Vec<String> {
    let mut found: Vec<String> = Vec::new();
    for text in texts.filter(|text| !text.is_empty()) {
        if !found.contains(text) {
            found.push(text.clone());
        }
    }
    found
}

fn failures(rows: &[Row]) -> String {
    let mut text = "\n## Failures\n\n".to_string();
    let failed: Vec<&Row> = rows.iter().filter(|row| row.failures > 0).collect();
    if failed.is_empty() {
        return text + "None.\n";
    }
    for row in failed {
        let shown = row.shown.len() as u64;
        text += &format!("### {}: {} failed; runs: {}\n\n", row.id, row.failures, row.runs);
        row.shown.iter().for_each(|line| text += &format!("- {line}\n"));
        text += &if shown < row.failures { format!("- and {} more\n\n", row.failures - shown) } else { "\n".into() };
    }
    text
}

fn missing(rows: &[Row]) -> String {
    let mut text = "\n## Not run, or not in full\n\n".to_string();
    let recorded = |id: &str| rows.iter().any(|row| row.id == id);
    let absent = CAMPAIGNS.iter().filter(|campaign| !recorded(campaign.id)).map(|campaign| (campaign.id, "no record yet"));
    let mut all: Vec<_> = NOT_RUN.into_iter().chain(absent).collect();
    all.sort_by_key(|(id, _)| rank(id));
    all.iter().for_each(|(id, why)| text += &format!("- {id}: {why}\n"));
    text
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_string)
}

/// A message shortened for a table, without newlines and backticks.
fn short(message: &str) -> String {
    let line = message.replace(['\n', '`'], " ");
    let cut: String = line.chars().take(300).collect();
    if cut.len() < line.len() { cut + " ..." } else { cut }
}

fn campaign(line: &Value) -> Row {
    let failed = line["failed"].as_array().cloned().unwrap_or_default();
    let shown = failed.iter().map(|f| format!("run {} ({}): `{}`", f["run"], text(&f["kind"]), short(&text(&f["message"]))));
    Row {
        id: text(&line["id"]),
        what: text(&line["what"]),
        detail: String::new(),
        runs: line["runs"].as_u64().unwrap_or(0),
        not_run: line["not_run"].as_str().map(str::to_owned),
        failures: line["failures"].as_u64().unwrap_or(0),
        commit: text(&line["commit"]) + if line["dirty"] == true { " (changes)" } else { "" },
        machine: format!(
            "{}{}, {} cores",
            line["gpu"].as_str().filter(|gpu| !gpu.is_empty()).map_or(String::new(), |gpu| format!("{gpu} beside ")),
            text(&line["cpu"]),
            line["cores"],
        ),
        command: text(&line["command"]).split(" --seed ").next().unwrap_or_default().to_owned(),
        shown: shown.collect(),
    }
}

/// A row for each fuzz target. Its runs are one search, because each run starts with the inputs found by the previous ones.
fn fuzzed(lines: &[Value]) -> Vec<Row> {
    let mut targets: BTreeMap<String, Vec<&Value>> = BTreeMap::new();
    lines.iter().for_each(|line| targets.entry(text(&line["target"])).or_default().push(line));
    targets.into_iter().map(|(target, runs)| fuzz(&target, &runs)).collect()
}

fn fuzz(target: &str, runs: &[&Value]) -> Row {
    let number = |run: &Value, name: &str| run[name].as_u64().unwrap_or(0);
    let sum = |name: &str| runs.iter().map(|run| number(run, name)).sum::<u64>();
    let most = |name: &str| runs.iter().map(|run| number(run, name)).max().unwrap_or(0);
    let id = match target {
        "settings_toml" | "settings_yaml" | "settings_json" | "deepspeed" | "config_json" => "R18",
        "safetensors" | "index" => "R19",
        "tokenizer" | "chat_template" => "R20",
        "manifest" => "R21",
        _ => "R26",
    };
    let last = runs[runs.len() - 1];
    let causes = runs.iter().filter_map(|run| Some(format!("{target}: {}", run["cause"].as_str()?)));
    Row {
        id: id.into(),
        what: "fuzzed by coverage, with the address sanitizer".into(),
        detail: format!("{target}, {} s, at most {} MiB", sum("seconds"), most("peak_rss_mb")),
        runs: sum("executions"),
        not_run: None,
        failures: sum("failures"),
        commit: text(&last["commit"]),
        machine: text(&last["compiler"]),
        command: "fuzz/run.sh TARGET SECONDS".into(),
        shown: causes.collect(),
    }
}

/// One row for the mutants. A failure is a mutant that no test detects.
fn mutants(lines: &[Value]) -> Option<Row> {
    let last = lines.last()?;
    let unnoticed: Vec<String> = lines.iter().filter(|line| line["red"] != true).map(|line| text(&line["mutant"])).collect();
    Some(Row {
        id: "R24".into(),
        what: "mistakes that the protocol of ranks could make, each made: failures are those that no test of it notices".into(),
        detail: String::new(),
        runs: lines.len() as u64,
        not_run: None,
        failures: unnoticed.len() as u64,
        commit: text(&last["commit"]),
        machine: format!("{}, {} cores, {}", text(&last["cpu"]), last["cores"], text(&last["profile"])),
        command: "cargo test --test main ranks_mutants -- --ignored".into(),
        shown: unnoticed,
    })
}

fn adam(line: &Value) -> Row {
    let passes = line["mismatched_bits"].as_object().cloned().unwrap_or_default();
    let bits = passes
        .values()
        .flat_map(|sets| sets.as_object().cloned().unwrap_or_default().into_iter().map(|(_, bits)| bits.as_u64().unwrap_or(1)));
    let sets: Vec<String> =
        passes.values().next().and_then(Value::as_object).map(|sets| sets.keys().cloned().collect()).unwrap_or_default();
    Row {
        id: "R8".into(),
        what: "random states through each pass of Adam, rolled back and redone, against the specification; failures are differing bits"
            .into(),
        detail: sets.join(", "),
        runs: line["vectors"].as_u64().unwrap_or(0),
        not_run: None,
        failures: bits.sum(),
        commit: text(&line["commit"]),
        machine: format!("{}, {} cores, {}", text(&line["cpu"]), line["cores"], text(&line["target"])),
        command: "SUPEROFFLOAD_VECTORS=1000000 cargo test --release --lib campaign".into(),
        shown: vec![],
    }
}

fn exactness(line: &Value) -> Row {
    let (cases, equal) = (line["cases"].as_u64().unwrap_or(0), line["runs_equal_to_reference"].as_u64().unwrap_or(0));
    Row {
        id: "R8c".into(),
        what: "random models, settings, spikes and timings, speculating, against the synchronous step: the same digest".into(),
        detail: String::new(),
        runs: equal,
        not_run: None,
        failures: u64::from(line["passed"] != true),
        commit: text(&line["commit"]),
        machine: format!("{}, {} cores, {}", text(&line["cpu"]), line["cores"], text(&line["profile"])),
        command: format!("SUPEROFFLOAD_CASES={cases} cargo test --release --test main exactness"),
        shown: vec![],
    }
}

fn threads(line: &Value) -> Row {
    let (tool, with) = (text(&line["tool"]), text(&line["with"]));
    let (how, script) = match tool.starts_with("miri") {
        true => ("interpreted, which finds undefined behaviour and data races", "miri"),
        false => ("in every order that the memory model allows", "loom"),
    };
    Row {
        id: "R24".into(),
        what: format!("by {tool} with {with}, {how}"),
        detail: text(&line["tests"]),
        runs: line["runs"].as_u64().unwrap_or(0),
        not_run: None,
        failures: line["failures"].as_u64().unwrap_or(0),
        commit: text(&line["commit"]),
        machine: text(&line["rust"]),
        command: format!("tests/threads/{script}.sh tests/campaigns/threads.jsonl"),
        shown: vec![],
    }
}

fn gpu(line: &Value) -> Row {
    let check = text(&line["check"]);
    let number = |key: &str| line[key].as_u64().unwrap_or(0);
    Row {
        id: if check == "killed-runs" { "R1" } else { "R24" }.into(),
        what: "on a GPU".into(),
        detail: check,
        runs: number("passed") + number("failed"),
        not_run: None,
        failures: number("failed") + number("errors") + number("hazards"),
        commit: text(&line["commit"]),
        machine: format!("{}, driver {}", text(&line["gpu"]), text(&line["driver"])),
        command: "tests/gpu/verify.sh DIR".into(),
        shown: line["failed_cases"].as_array().into_iter().flatten().map(text).collect(),
    }
}
