//! README and guide show real output: the sample run's losses, exact in the printed digits, its first lines, the table of models that fit,
//! and the samples of `plan` and `bench step`. Every link between documents is valid.

use crate::program::{program, run};
use crate::support::emulator;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};

const STEPS: u64 = 300;

fn text_of(document: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(document)).unwrap()
}

/// The fields of step lines that are equal on every machine: step, loss, gradient norm, learning rate, and the mark of a clipped or skipped
/// step. Speeds differ.
fn steps(text: &str) -> Vec<(u64, Vec<&str>)> {
    let lines = text.lines().filter(|line| line.starts_with("step ") && line.contains("  loss "));
    let words = lines.map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mark = |words: &[&str]| ["clipped", "skipped"].into_iter().find(|mark| words.last() == Some(mark)).unwrap_or_default();
    words.map(|words| (words[1].parse().unwrap(), vec![words[3], words[5], words[7], mark(&words)])).collect()
}

/// Output of the demo up to the line of step `until`, after which the run is terminated.
fn demo(out: &Path, until: u64) -> String {
    let mut child = program(&["train", "--device", "cpu", "--output-dir"]).arg(out).spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let mut printed = String::new();
    for line in lines {
        printed.push_str(&line);
        printed.push('\n');
        if until < STEPS && line.starts_with(&format!("step {until:>6} ")) {
            kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
        }
    }
    let code = child.wait().unwrap().code();
    assert_eq!(code, Some(if until < STEPS { 75 } else { 0 }), "{printed}");
    printed
}

/// Compares ten steps. `SUPEROFFLOAD_SAMPLE_STEPS=300 cargo test --release --test main sample_run` compares the whole run, which takes
/// minutes.
#[test]
fn the_sample_run_is_the_run() {
    let requested = std::env::var("SUPEROFFLOAD_SAMPLE_STEPS").ok().map(|steps| steps.parse().unwrap());
    let until = requested.unwrap_or(if emulator().is_some() { 1 } else { 10 });
    let readme = text_of("README.md");
    let sample = steps(&readme);
    assert_eq!(sample.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [1, 10, 100, 200, 300]);
    let dir = tempfile::tempdir().unwrap();
    let printed = demo(dir.path(), until);
    let printed_steps = steps(&printed);
    for (step, line) in sample.iter().filter(|(step, _)| *step <= until) {
        let found = printed_steps.iter().find(|(other, _)| other == step).unwrap_or_else(|| panic!("no line of step {step}: {printed}"));
        assert_eq!(&found.1, line, "step {step} of README.md is not the program's");
    }
    let text = fs::read_to_string(dir.path().join("metrics.jsonl")).unwrap();
    let metrics: Vec<Value> = text.lines().skip(1).map(|line| serde_json::from_str(line).unwrap()).collect();
    let sum = |key: &str| metrics.iter().map(|line| line[key].as_u64().unwrap()).sum::<u64>();
    let buckets = format!("{} bucket steps committed, {} clipped, {} skipped;", sum("committed"), sum("clipped"), sum("skipped"));
    assert!(printed.contains(&buckets), "the summary is not the sum of its steps: {buckets}");
    assert!(until < STEPS || readme.contains(&buckets), "README.md does not say {buckets}");
}

/// Parts of the first lines that depend on the machine become dashes: the host's memory, the processor and its instruction set.
fn without_machine(line: &str) -> String {
    let kept = match line.split_whitespace().next() {
        Some("memory") => line.split_once(" planned of "),
        Some("device") => line.split_once(" threads, "),
        _ => None,
    };
    kept.map_or(line.to_string(), |(kept, _)| format!("{kept} -"))
}

/// A dry run prints the lines of the run that do not need its steps.
#[test]
fn the_first_lines_of_the_guide_are_those_of_the_demo() {
    let guide = text_of("docs/guide/watching.md");
    let sample = guide.split_once("```text\nmodel ").unwrap().1.split("\n```").next().unwrap();
    let mut dry = program(&["train", "--dry-run", "--device=cpu", "--threads=2", "--output-dir=runs/demo"]);
    let printed = run(dry.current_dir(std::env::temp_dir()));
    let labels = ["model ", "data ", "plan ", "memory ", "files ", "device "];
    let printed_steps: Vec<_> = printed.stdout.lines().filter(|line| labels.iter().any(|label| line.starts_with(label))).collect();
    let guides: Vec<_> = format!("model {sample}").lines().map(without_machine).collect();
    let printed_steps: Vec<_> = printed_steps.into_iter().skip_while(|line| !line.starts_with("model ")).map(without_machine).collect();
    assert_eq!(printed_steps, guides, "docs/guide/watching.md: {printed:?}");
}

#[test]
fn the_help_of_train_explains_the_built_in_model() {
    let help = run(&mut program(&["train", "--help"])).stdout;
    let words = help.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains("the built-in model is trained with") && words.contains("--learning-rate 3e-3"), "{help}");
}

/// The rows of a document's table: model, flags of the machine, GPU memory, host memory, and tokens per second or that the model does not
/// fit. README has a sixth column that marks measured rows.
fn fits(document: &str) -> Vec<[String; 5]> {
    let rows = document.lines().filter(|line| line.starts_with("| `") && line.contains("--hardware "));
    let cells =
        |row: &str| row.trim_matches('|').split('|').take(5).map(|cell| cell.trim().trim_matches('`').to_string()).collect::<Vec<_>>();
    rows.map(|row| cells(row).try_into().unwrap()).collect()
}

/// README is short, and its rows are rows of the guide's table.
#[test]
fn readme_is_short_and_its_rows_are_the_guides() {
    let readme = text_of("README.md");
    assert!(readme.lines().count() <= 130 && readme.len() <= 8 << 10, "{} lines, {} bytes", readme.lines().count(), readme.len());
    assert!(text_of("ARCHITECTURE.md").len() <= 12 << 10);
    let (guide, rows) = (fits(&text_of("docs/guide/what-fits.md")), fits(&readme));
    assert_eq!(rows.len(), 8);
    for row in rows {
        assert!(guide.contains(&row), "docs/guide/what-fits.md lacks {row:?}");
    }
}

/// The cells of a row, from a simulation of the best plan. `plan` prefers the same plan, but then searches three more times.
fn fit(model: &str, machine: &str) -> [String; 5] {
    let mut command = program(&["simulate", "--seq-length=4096", "--per-device-train-batch-size=4", "--steps=3", "--json"]);
    let printed = run(command.args(["--model-config", model]).args(machine.split_whitespace()));
    if printed.code != 0 {
        printed.refused(1, &["memory are available"]);
        return [model.into(), machine.into(), "does not fit".into(), String::new(), String::new()];
    }
    let line: Value = serde_json::from_str(&printed.stdout).unwrap_or_else(|_| panic!("{printed:?}"));
    let gib = |key: &str| format!("{:.1} GiB", line[key].as_f64().unwrap() / f64::from(1 << 30));
    let rate = format!("{:.0}", line["tokens_per_second"].as_f64().unwrap());
    [model.into(), machine.into(), gib("device_planned_bytes"), gib("host_planned_bytes"), rate]
}

/// Compares one row. `SUPEROFFLOAD_FITS=all cargo test --release --test main what_fits` compares all.
#[test]
fn the_table_of_fitting_models_matches_the_planner() {
    let rows = fits(&text_of("docs/guide/what-fits.md"));
    assert_eq!(rows.len(), 23);
    let all = std::env::var("SUPEROFFLOAD_FITS").is_ok_and(|which| which == "all");
    let requested = match all {
        // With fewer techniques plans differ. An emulator takes minutes for one.
        _ if emulator().is_some() || !cfg!(feature = "repartition") => 0,
        true => rows.len(),
        false => 1,
    };
    for row in rows.iter().take(requested) {
        assert_eq!(&fit(&row[0], &row[1]), row, "docs/guide/what-fits.md: {} on {}", row[0], row[1]);
    }
}

/// The guide's sample of `plan`. By default the time of the chosen plan alone is compared;
/// `SUPEROFFLOAD_FITS=all cargo test --release --test main sample_of_plan` compares all lines, which takes a minute or two.
#[test]
fn the_sample_of_plan_is_what_the_planner_says() {
    if emulator().is_some() || !cfg!(all(feature = "stv", feature = "deadline-order", feature = "repartition", feature = "weight-flow")) {
        return;
    }
    let guide = text_of("docs/guide/will-it-fit.md");
    let machine = "--hardware gh200-96 --seq-length 4096 --per-device-train-batch-size 4";
    let sample = guide.split_once(&format!("superoffload plan --model llama-8b {machine}\n```\n\n```text\n")).unwrap().1;
    let sample = sample.split("\n```").next().unwrap();
    if std::env::var("SUPEROFFLOAD_FITS").is_ok_and(|which| which == "all") {
        let printed = run(program(&["plan", "--model", "llama-8b"]).args(machine.split_whitespace()));
        assert!(printed.stdout.starts_with(&format!("{sample}\n")), "docs/guide/will-it-fit.md: {printed:?}");
    }
    let chosen = "simulate --json --steps=3 --model-config=llama-8b --activations=keep --weights=flow --resident-buckets=16";
    let printed = run(program(&[]).args(chosen.split_whitespace()).args(machine.split_whitespace()));
    let line: Value = serde_json::from_str(&printed.stdout).unwrap_or_else(|_| panic!("{printed:?}"));
    let (ms, tokens) = (line["step_ms"]["median"].as_f64().unwrap(), line["tokens_per_second"].as_f64().unwrap());
    let step =
        format!("  step       {ms:.1} ms, {tokens:.0} tokens/s, {:.1} model TFLOP/s", line["speed"]["model_tflops"].as_f64().unwrap());
    assert!(sample.contains(&step), "docs/guide/will-it-fit.md does not show {step:?}");
}

/// The guide states the least host memory with which a large model fits on a small card without gradient shares, and the time of a step.
#[test]
fn the_least_host_memory_of_the_guide_is_the_planners() {
    if emulator().is_some() || !cfg!(all(feature = "repartition", feature = "weight-flow")) {
        return;
    }
    let guide = text_of("docs/guide/will-it-fit.md").split_whitespace().collect::<Vec<_>>().join(" ");
    let least: u64 = guide.split_once("with moments in float32 it then fits from ").unwrap().1.split(' ').next().unwrap().parse().unwrap();
    let on = |gib: u64, plan: &[&str]| {
        let task = "simulate --json --steps=2 --model-config=llama-8b --hardware=h200-pcie5 --hbm-limit=23GiB --seq-length=4096 \
            --per-device-train-batch-size=1 --gradient-accumulation-steps=32 --masters=float32";
        run(program(&[]).args(task.split_whitespace()).args(plan).arg(format!("--host-limit={gib}GiB")))
    };
    on(least - 1, &[]).refused(1, &["8030261248 parameters", "--masters auto would fit"]);
    // The result of the search is set by flags, because searching takes long.
    let printed = on(least, &["--layer-order=segments:4,4", "--bucket-mib=16"]);
    let line: Value = serde_json::from_str(&printed.stdout).unwrap_or_else(|_| panic!("{printed:?}"));
    let claim = format!("{least} GiB of host memory, planned at {:.0} s a step", line["step_ms"]["median"].as_f64().unwrap() / 1e3);
    assert!(guide.contains(&claim), "docs/guide/will-it-fit.md does not say {claim:?}");
}

/// The page of performance states the errors of the predictions that were registered before their runs.
#[test]
fn errors_of_registered_predictions_are_those_of_the_lines() {
    let step_ms = |file: &str, at: fn(&Value) -> &Value| -> BTreeMap<String, f64> {
        let lines = text_of(&format!("paper-figures/predictions/{file}"));
        let line = |line: &str| serde_json::from_str::<Value>(line).unwrap();
        lines.lines().map(line).map(|line| (line["name"].as_str().unwrap().into(), at(&line).as_f64().unwrap())).collect()
    };
    let (predicted, measured) =
        (step_ms("predicted.jsonl", |line| &line["step_ms"]), step_ms("measured.jsonl", |line| &line["step_ms"]["median"]));
    let mut errors: Vec<f64> = measured.iter().map(|(name, ms)| 100.0 * (predicted[name] / ms - 1.0).abs()).collect();
    errors.sort_by(f64::total_cmp);
    let median = (errors[(errors.len() - 1) / 2] + errors[errors.len() / 2]) / 2.0;
    let (count, within) = (errors.len(), errors.iter().filter(|&&error| error <= 10.0).count());
    let page = text_of("docs/performance.md").split_whitespace().collect::<Vec<_>>().join(" ");
    let claims = [
        format!("{} steps on one H200 were predicted", predicted.len()),
        format!("{count} of them ran"),
        format!("The median error is {median:.1} %, and {within} of {count} are within 10 %"),
        format!("The largest error is {:.0} %", errors[count - 1]),
    ];
    claims.iter().for_each(|claim| assert!(page.contains(claim), "docs/performance.md does not say {claim:?}"));
}

/// The guide's table of verified cards matches the records.
#[test]
fn verified_cards_are_recorded() {
    let guide = text_of("docs/guide/install.md");
    let (suites, runs) = (text_of("tests/campaigns/gpu.jsonl"), text_of("paper-figures/results/h200-replan.jsonl"));
    let rows = guide.split_once("| card | driver |").unwrap().1.lines().skip(2).take_while(|line| line.starts_with('|'));
    let rows: Vec<Vec<_>> = rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect();
    assert!(!rows.is_empty());
    for row in rows {
        let [card, driver, commit, passed, failed, digest] = row[..] else { panic!("{row:?}") };
        let suite = format!("\"check\":\"conformance, as four processes beside each other\",\"passed\":{passed},\"failed\":{failed},");
        let is_of = |line: &str, words: &[String]| words.iter().all(|word| line.contains(word));
        let words = [format!("\"gpu\":\"{card}\",\"driver\":\"{driver}\""), format!("\"commit\":\"{commit}"), suite];
        assert!(suites.lines().any(|line| is_of(line, &words)), "{row:?}");
        let words = [format!("\"gpu\":\"{card}\""), format!("\"commit\":\"{commit}"), format!("\"digest\":\"{digest}")];
        assert_eq!(runs.lines().filter(|line| is_of(line, &words)).count(), 2, "{row:?}");
    }
}

/// The guide's sample of `bench step` is a committed measurement.
#[test]
fn the_sample_of_bench_step_is_a_line() {
    let lines = text_of("paper-figures/results/h200-step.jsonl");
    let line =
        lines.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()).find(|line| line["unix_seconds"] == 1795326780).unwrap();
    let number = |pointer: &str| line.pointer(pointer).and_then(Value::as_f64).unwrap();
    let sample = [
        format!(
            "  step         {:.1} ms, {:.1} to {:.1} over 8 steps",
            number("/step_ms/median"),
            number("/step_ms/min"),
            number("/step_ms/max")
        ),
        format!("  tokens       {:.0} a second", number("/tokens_per_second")),
        format!(
            "  model        {:.3} TFLOP/s ({:.0} % of a large product)",
            number("/speed/model_tflops"),
            100.0 * number("/speed/model_share")
        ),
        format!("  device busy  {:.1} %", 100.0 * number("/exposed/device_busy_share")),
        format!("  adam         {:.2} Gparam/s, {:.2} GB/s", number("/adam/busy_gparams_per_s"), number("/adam/busy_gb_per_s")),
    ];
    let guide = text_of("docs/guide/machine.md");
    for part in sample {
        assert!(guide.contains(&part), "docs/guide/machine.md does not show {part:?}");
    }
}

/// README's speed of W1 is the label of a bar in figure A, which `paper-figures check` compares with its lines.
#[test]
fn the_speed_of_the_highlights_is_a_bar_of_figure_a() {
    let readme = text_of("README.md");
    let (_, claim) = readme.split_once("every optimizer state on the CPU reaches ").unwrap();
    let label = format!(">{}<", claim.split(' ').next().unwrap());
    assert!(text_of("paper-figures/fig-a_public-systems/figure.svg").contains(&label), "figure A has no bar {label:?}");
}

/// Finds every Markdown file of the repository.
fn documents(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_string();
        let is_ours = !name.starts_with('.') && name != "target";
        if is_ours && path.is_dir() {
            documents(&path, found);
        } else if is_ours && name.ends_with(".md") {
            found.push(path);
        }
    }
}

/// Targets of the links and images in `text`, outside code.
fn links(text: &str) -> Vec<String> {
    let is_prose = |line: &&str| !line.starts_with("    ");
    let prose = text.split("```").step_by(2).flat_map(|part| part.lines().filter(is_prose).map(str::to_string).collect::<Vec<_>>());
    let prose = prose.map(|line| line.split('`').step_by(2).collect::<Vec<_>>().join("")).collect::<Vec<_>>().join("\n");
    let ends = |rest: &str, end: char| rest.split_once(end).map(|(target, _)| target.to_string());
    let written = prose.split("](").skip(1).filter_map(|rest| ends(rest, ')'));
    let attributes = ["href=\"", "src=\""].into_iter().flat_map(|name| prose.split(name).skip(1).filter_map(|rest| ends(rest, '"')));
    written.chain(attributes).collect()
}

/// The anchor that GitHub generates for a heading.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

#[test]
fn every_link_between_documents_leads_somewhere() {
    let mut all = Vec::new();
    documents(Path::new(env!("CARGO_MANIFEST_DIR")), &mut all);
    assert!(all.len() > 20, "{all:?}");
    let mut broken = Vec::new();
    for document in &all {
        let own = fs::read_to_string(document).unwrap();
        for link in links(&own).into_iter().filter(|link| !link.contains("://")) {
            let (file, heading) = link.split_once('#').unwrap_or((link.as_str(), ""));
            let target = if file.is_empty() { document.clone() } else { document.parent().unwrap().join(file) };
            let has_heading = || {
                fs::read_to_string(&target)
                    .unwrap()
                    .lines()
                    .any(|line| line.starts_with('#') && anchor(line.trim_start_matches('#').trim()) == heading)
            };
            if !target.exists() || !heading.is_empty() && !has_heading() {
                broken.push(format!("{}: {link}", document.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
}
