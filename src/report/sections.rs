//! Sections of the page, in the order of importance.

use super::chart::{Chart, ChartRun, ValueAxis, stacked_bar};
use super::curve::StepCurve;
use super::history::{BUCKET_STEPS, DataRecord, History};
use super::html::{self, escape, number, table};
use super::past_run::{CheckpointedStep, PastRun};
use super::requested::{self, RequestedSetting};
use super::samples::DataSamples;
use super::verdict;
use crate::facts::BuildFacts;
use crate::metrics::WrittenSample;
use crate::simulate::outcome::of_a_large_product;
use crate::units::{Bytes, counted};
use serde_json::Value;
use std::collections::BTreeMap;

/// Title of the chart whose curve is exact.
const LEARNING_RATE: &str = "Learning rate";

/// A note about tools for the whole timeline.
const WHOLE_TIMELINE: &str = "<p class=\"note\">All steps, every stream and thread: open the run's <code>trace.json</code> in \
    <a href=\"https://ui.perfetto.dev\" rel=\"noreferrer\">ui.perfetto.dev</a>, which reads it on your machine.</p>\n";

/// Builds the whole page about `runs`.
pub(super) fn page(runs: &[PastRun]) -> String {
    let names: Vec<_> = runs.iter().map(|run| run.name.as_str()).collect();
    let title = names.join(", ");
    let parts = [
        head(runs, &title),
        section("Loss", &format!("{}<div class=\"tall\">{}</div>{}", controls(runs), loss(runs), loss_notes(runs))),
        section("Learning rate and gradient norm", &pair(learning_rate(runs), grad_norm(runs))),
        section("Speed", &pair(speed(runs), step_time(runs))),
        save_waits(runs),
        experts(runs),
        section("Where the time of a step goes", &each(runs, step_time_bar)),
        section("Memory", &each(runs, memory)),
        section("Two steps", &each(runs, two_steps)),
        section("Speculation", &speculation(runs)),
        samples(runs),
        section("Data", &each(runs, data)),
        section("Checkpoints", &each(runs, checkpoints)),
        section("Settings", &settings(runs)),
        section("Machine and build", &machine(runs)),
        section("How to reproduce", &each(runs, command)),
        foot(runs),
    ];
    html::page(&format!("{title} – training report"), &parts.concat())
}

fn section(title: &str, body: &str) -> String {
    format!("<section>\n<h2>{title}</h2>\n{body}</section>\n")
}

fn pair(left: String, right: String) -> String {
    format!("<div class=\"pair\">{left}{right}</div>\n")
}

/// Concatenates `of` of each run, under the run's name if there are several runs.
fn each(runs: &[PastRun], of: impl Fn(&PastRun) -> String) -> String {
    let named =
        |(idx, run): (usize, &PastRun)| if runs.len() > 1 { format!("<h3>{}</h3>\n{}", colour(idx, run), of(run)) } else { of(run) };
    runs.iter().enumerate().map(named).collect()
}

/// A run's name in its colour.
fn colour(idx: usize, run: &PastRun) -> String {
    format!("<b class=\"r{idx}\"><span>{}</span></b>", escape(&run.name))
}

fn head(runs: &[PastRun], title: &str) -> String {
    let (kind, body) = match runs {
        [run] => ("Training run", one_run(run)),
        _ => ("Training runs", comparison(runs)),
    };
    let wrong: String = runs.iter().flat_map(remarks).map(|line| format!("<p class=\"wrong\">{}</p>\n", escape(line))).collect();
    format!("<header>\n<p class=\"what\">{kind}</p>\n<h1>{}</h1>\n{body}{wrong}</header>\n", escape(title))
}

fn one_run(run: &PastRun) -> String {
    let history = &run.history;
    let tile =
        |name: &str, value: String, more: String| format!("<div><dt>{name}</dt><dd>{value} <small>{}</small></dd></div>\n", escape(more));
    let eval = history.last_eval.map_or("no evaluation".into(), |(step, loss)| format!("evaluation {} after step {step}", number(loss)));
    let epochs = history.epoch.map_or(String::new(), |epoch| format!("{} passes over the data", number(epoch)));
    let tiles = [
        tile("Loss, last step", number(history.last_loss), eval),
        tile("Tokens trained", number(history.tokens), epochs),
        tile("Speed, all steps", number(history.mean_tokens_per_second()), format!("tokens/s{}", of_peak(history))),
        tile(
            "Time in steps",
            verdict::duration(history.total_ms),
            format!("{} step{}", number(history.steps as f64), if history.steps == 1 { "" } else { "s" }),
        ),
    ];
    let tiles = if history.steps > 0 { format!("<dl class=\"tiles\">\n{}</dl>\n", tiles.concat()) } else { String::new() };
    format!("<p class=\"what\">{}</p>\n<p class=\"verdict\">{}</p>\n{tiles}", escape(verdict::subject(run)), escape(verdict::sentence(run)))
}

/// ` (76 % of a large product)`, if known.
fn of_peak(history: &History) -> String {
    of_a_large_product(history.mean_tflops_and_fraction().map(|(_, fraction)| fraction))
}

fn comparison(runs: &[PastRun]) -> String {
    let row = |(idx, run): (usize, &PastRun)| {
        let history = &run.history;
        let best = history.best_eval.map_or("none".into(), |(step, loss)| format!("{} after step {step}", number(loss)));
        let (speed, bound) = (history.mean_tokens_per_second(), verdict::bound(history).unwrap_or_default());
        let time = verdict::duration(history.total_ms);
        let speed = number(speed) + &of_peak(history);
        let cells = [number(history.last_loss), best, number(history.tokens), speed, time, verdict::progress(run), bound];
        std::iter::once(colour(idx, run)).chain(cells.iter().map(escape)).collect()
    };
    let rows: Vec<_> = runs.iter().enumerate().map(row).collect();
    let about = |run: &PastRun| format!("<p class=\"what\">{}</p>\n", escape(verdict::subject(run)));
    let head = ["Run", "Loss, last step", "Best evaluation", "Tokens", "Tokens/s", "Time in steps", "Progress", "Bottleneck"];
    format!("{}{}", table(&head, &rows), each(runs, about))
}

/// Remarks about unreadable or unexpected data of a run.
fn remarks(run: &PastRun) -> Vec<String> {
    let (name, history) = (&run.name, &run.history);
    let several = |count: u64, noun: &str, singular: &str, plural: &str| {
        (count > 0).then(|| format!("{name}: {} {}.", counted(count, noun), if count == 1 { singular } else { plural }))
    };
    let cut = history.is_cut_short.then(|| format!("{name}: the last line of metrics.jsonl has no end and was left out."));
    [
        several(
            history.damaged_lines,
            "line",
            "of metrics.jsonl is damaged and was left out",
            "of metrics.jsonl are damaged and were left out",
        ),
        cut,
        several(history.steps_without_loss, "step", "has no loss that is a number", "have no loss that is a number"),
        several(
            history.skipped_steps,
            "step",
            "was skipped, since a gradient was not finite",
            "were skipped, since a gradient was not finite",
        ),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn draw(runs: &[PastRun], title: &str, caption: &str, axis: ValueAxis, of: impl Fn(&History) -> &StepCurve) -> String {
    let curves = runs.iter().map(|run| of(&run.history)).enumerate();
    let drawn = curves.map(|(run, curve)| ChartRun { run, curve, is_exact: title == LEARNING_RATE, dots: None, marks: vec![] }).collect();
    format!("<div>{}{}</div>", Chart { title, caption, axis, runs: drawn }.draw(), legend(runs))
}

fn legend(runs: &[PastRun]) -> String {
    let name = |(idx, run): (usize, &PastRun)| format!("<li class=\"r{idx}\"><i></i>{}</li>", escape(&run.name));
    let names: String = runs.iter().enumerate().map(name).collect();
    if runs.len() > 1 { format!("<ul class=\"names\">{names}</ul>\n") } else { String::new() }
}

fn loss(runs: &[PastRun]) -> String {
    let drawn = runs.iter().enumerate().map(|(run, past)| ChartRun {
        run,
        curve: &past.history.curves.loss,
        is_exact: false,
        dots: Some(&past.history.curves.eval_loss),
        marks: vec![("clip", &past.history.curves.clips), ("skip", &past.history.curves.skips)],
    });
    let caption = "mean over the tokens of a step, in nats. Thin: each step; thick, with its last value: smoothed; points: evaluations, \
                   the best one filled; strokes below: clipped steps; red: skipped steps";
    format!("{}{}", Chart { title: "Loss", caption, axis: ValueAxis::Fitted, runs: drawn.collect() }.draw(), legend(runs))
}

/// Controls for the page's script: the horizontal axis of all charts, and the amount of smoothing.
fn controls(runs: &[PastRun]) -> String {
    let axis = |name: &str| {
        let checked = if name == "steps" { " checked" } else { "" };
        format!("<label><input type=\"radio\" name=\"axis\" value=\"{name}\"{checked}>{name}</label>")
    };
    let clock = |run: &PastRun| {
        let listed = |curve: &StepCurve| curve.points().map(|(step, done)| format!("{step} {done:.1}")).collect::<Vec<_>>().join(" ");
        let (tokens, ms) = (listed(&run.history.curves.tokens_by_step), listed(&run.history.curves.ms_by_step));
        format!("<data class=\"clock\" hidden value=\"\" data-tokens=\"{tokens}\" data-ms=\"{ms}\"></data>\n")
    };
    format!(
        "<form class=\"controls\" hidden>\n<fieldset><legend>All charts over</legend>{}</fieldset>\n<label>Smoothing \
         <input type=\"range\" name=\"smooth\" min=\"0\" max=\"50\" value=\"5\"> <output>5 %</output></label>\n{}</form>\n",
        ["steps", "tokens", "time"].map(axis).concat(),
        runs.iter().map(clock).collect::<String>()
    )
}

/// A table of the evaluations.
fn loss_notes(runs: &[PastRun]) -> String {
    let row = |(idx, run): (usize, &PastRun)| {
        let history = &run.history;
        let eval = |at: Option<(u64, f64)>| {
            at.map(|(step, loss)| format!("{} (perplexity {}) after step {step}", number(loss), number(loss.exp())))
        };
        let seconds = verdict::duration(history.eval_seconds * 1e3);
        let cells = [Some(history.evaluations.to_string()), eval(history.best_eval), eval(history.last_eval), Some(seconds)];
        std::iter::once(colour(idx, run)).chain(cells.into_iter().map(|cell| escape(cell.unwrap_or_default()))).collect()
    };
    let evaluated: Vec<_> = runs.iter().enumerate().filter(|(_, run)| run.history.evaluations > 0).map(row).collect();
    if evaluated.is_empty() { String::new() } else { table(&["Evaluation", "Times", "Best loss", "Last loss", "Time"], &evaluated) }
}

fn learning_rate(runs: &[PastRun]) -> String {
    draw(runs, LEARNING_RATE, "of each step's update", ValueAxis::FromZero, |history| &history.curves.learning_rate)
}

fn grad_norm(runs: &[PastRun]) -> String {
    draw(runs, "Gradient norm", "of all parameters, before clipping", ValueAxis::Fitted, |history| &history.curves.grad_norm)
}

fn speed(runs: &[PastRun]) -> String {
    draw(runs, "Tokens per second", "real tokens, without padding", ValueAxis::FromZero, |history| &history.curves.tokens_per_second)
}

fn step_time(runs: &[PastRun]) -> String {
    draw(runs, "Step time", "milliseconds, from step to step", ValueAxis::FromZero, |history| &history.curves.step_ms)
}

/// The section about waits for saves. Empty if no run waited.
fn save_waits(runs: &[PastRun]) -> String {
    let has_waits = |run: &PastRun| run.history.curves.save_wait_ms.range().is_some_and(|(_, longest)| longest > 0.0);
    if !runs.iter().any(has_waits) {
        return String::new();
    }
    let caption = "milliseconds of a step in which training waited for a checkpoint to be written";
    section("Waits for saves", &draw(runs, "Wait for a save", caption, ValueAxis::FromZero, |history| &history.curves.save_wait_ms))
}

/// The section about load of experts. Empty if no run has experts.
fn experts(runs: &[PastRun]) -> String {
    if runs.iter().all(|run| run.history.curves.expert_largest.range().is_none()) {
        return String::new();
    }
    let caption = "rows of the expert that had most over the mean of its layer, in the worst layer; 1 is even";
    let largest = draw(runs, "Largest load over mean", caption, ValueAxis::Fitted, |history| &history.curves.expert_largest);
    let caption = "percent of all layers' experts that had no row in a step";
    section(
        "Load of experts",
        &pair(largest, draw(runs, "Unused experts", caption, ValueAxis::FromZero, |history| &history.curves.expert_unused)),
    )
}

/// Texts that the models wrote after the prompts of their runs; nothing where no run has any.
fn samples(runs: &[PastRun]) -> String {
    if runs.iter().all(|run| run.history.written.is_empty()) {
        return String::new();
    }
    section("Samples", &each(runs, |run| or_none(written(run), "This run wrote nothing.")))
}

fn written(run: &PastRun) -> String {
    let sample = |step: u64, WrittenSample { prompt, text }: &WrittenSample| {
        let (prompt, text) = (html::escape_whole(prompt), html::escape_whole(text));
        format!(
            "<figure><figcaption>After step {step}</figcaption><pre class=\"sample\" tabindex=\"0\">\n{prompt}<mark>{text}</mark></pre></figure>\n"
        )
    };
    run.history.written.iter().flat_map(|(step, samples)| samples.iter().map(move |of| sample(*step, of))).collect()
}

fn step_time_bar(run: &PastRun) -> String {
    let history = &run.history;
    let part = |(name, ms): (String, f64)| {
        let words = format!("{} a step, {:.1} %", verdict::duration(ms / history.steps.max(1) as f64), 100.0 * ms / history.total_ms);
        (name, ms, words)
    };
    let parts: Vec<_> = verdict::step_times(history).into_iter().map(part).collect();
    or_none(stacked_bar("Mean over all steps", &parts), "No step has a duration.")
}

fn or_none(drawn: String, none: &str) -> String {
    if drawn.is_empty() { format!("<p class=\"none\">{none}</p>\n") } else { drawn }
}

fn memory(run: &PastRun) -> String {
    let Some(memory) = &run.history.memory else { return or_none(String::new(), "The planned memory is unknown.") };
    let bar = |place: &str, classes: &BTreeMap<String, u64>| {
        let mut classes: Vec<_> = classes.iter().collect();
        classes.sort_by_key(|(_, bytes)| std::cmp::Reverse(**bytes));
        let part = |(name, &bytes): (&String, &u64)| (name.clone(), bytes as f64, Bytes(bytes).to_string());
        let all = Bytes(classes.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(**bytes)));
        stacked_bar(&format!("Planned, {place}: {all}"), &classes.into_iter().take(16).map(part).collect::<Vec<_>>())
    };
    let bars = bar("device", &memory.device_bytes) + &bar("host, pinned", &memory.host_bytes);
    bars + &measured_memory(run)
}

/// Measured memory use, for comparison with the plan.
fn measured_memory(run: &PastRun) -> String {
    let of_device = run.history.facts["machine"]["gpu"]["memory_used_bytes"].as_u64();
    let seen = [
        ("The first GPU when steps began, all processes", of_device),
        ("Resident set of this process after its last step", Some(run.history.rss_bytes).filter(|bytes| *bytes > 0)),
    ];
    let row = |(name, bytes): (&str, Option<u64>)| Some(vec![name.into(), Bytes(bytes?).to_string()]);
    let rows: Vec<_> = seen.into_iter().filter_map(row).collect();
    if rows.is_empty() { String::new() } else { table(&["Measured", ""], &rows) }
}

fn two_steps(run: &PastRun) -> String {
    let drawn = run.drawn_steps.iter().zip(["Typical", "Slowest"]).map(|(step, name)| step.draw(name));
    let drawn = or_none(drawn.collect(), "No trace.json in the output directory has three whole steps.");
    drawn + if run.has_timeline { WHOLE_TIMELINE } else { "" }
}

fn speculation(runs: &[PastRun]) -> String {
    let row = |(idx, run): (usize, &PastRun)| {
        let history = &run.history;
        let [speculated, rolled_back, ..] = history.bucket_steps;
        let held = if speculated > 0 { format!("{:.1} %", 100.0 * (1.0 - rolled_back as f64 / speculated as f64)) } else { "none".into() };
        let counts = history.bucket_steps.iter().map(|&count| number(count as f64));
        let steps = [number(history.clipped_steps as f64), number(history.skipped_steps as f64)];
        std::iter::once(colour(idx, run)).chain(counts).chain([held]).chain(steps).collect()
    };
    let head: Vec<_> = ["Bucket steps"]
        .iter()
        .chain(&BUCKET_STEPS)
        .chain(&["speculations that held", "steps clipped", "steps skipped"])
        .copied()
        .collect();
    let rows: Vec<_> = runs.iter().enumerate().map(row).collect();
    let note = "The optimizer steps a bucket of parameters before the gradient norm is known; if the norm changes the step, the bucket \
        is rolled back and stepped again. The weights are bit-identical either way.";
    format!("{}<p class=\"note\">{note}</p>\n", table(&head, &rows))
}

fn data(run: &PastRun) -> String {
    let samples = run.samples.as_ref().map_or(String::new(), |samples| samples.draw(run.setting("seq_length").as_u64()));
    let counts = run.history.data().map_or(String::new(), data_counts);
    or_none(counts, "The data is unknown.") + &samples
}

fn data_counts(data: DataRecord) -> String {
    let fraction = |part: u64, all: f64| format!("{} ({:.1} %)", number(part as f64), 100.0 * part as f64 / all.max(1.0));
    let (rows, row_tokens) = (data.rows as f64, data.row_tokens as f64);
    let counts = [
        ("Documents", if data.documents > 0 { number(data.documents as f64) } else { "not known (token files)".into() }),
        ("Tokens", number(data.tokens as f64)),
        ("Trained tokens", fraction(data.trained_tokens, data.tokens as f64)),
        ("Rows", format!("{} of {} tokens", number(rows), number(row_tokens))),
        ("Padding", fraction(data.padding, rows * row_tokens)),
    ];
    let became = data.packing.map_or(String::new(), |packing| format!("<p class=\"note\">{}</p>\n", escape(packing)));
    let part = |(limit, &count): (&u64, &u64)| (format!("up to {limit}"), count as f64, number(count as f64));
    let lengths: Vec<_> = data.up_to.iter().take(16).map(part).collect();
    let counts: Vec<_> = counts.into_iter().map(|(name, value)| vec![name.into(), value]).collect();
    table(&["Property", ""], &counts) + &became + &stacked_bar("Documents by their length in tokens", &lengths)
}

fn checkpoints(run: &PastRun) -> String {
    let row = |saved: &CheckpointedStep| {
        let state = saved.damage.as_ref().map_or("in order".into(), |damage| format!("<span class=\"wrong\">{}</span>", escape(damage)));
        vec![number(saved.step as f64), Bytes(saved.bytes).to_string(), state]
    };
    let rows: Vec<_> = run.checkpoints.iter().map(row).collect();
    let older =
        if run.older_checkpoints > 0 { format!("<p class=\"note\">and {} older ones</p>\n", run.older_checkpoints) } else { String::new() };
    if rows.is_empty() { or_none(String::new(), "There is none.") } else { table(&["Step", "Size", "Manifest and sizes"], &rows) + &older }
}

fn settings(runs: &[PastRun]) -> String {
    let row = |requested: RequestedSetting| {
        let values = requested.values.iter().map(|value| value.as_ref().map_or("unknown".into(), |value| code(value)));
        [code(&requested.flag), code(&requested.default)].into_iter().chain(values).collect::<Vec<_>>()
    };
    let rows: Vec<_> = requested::unusual(runs).into_iter().map(row).collect();
    let names = runs.iter().map(|run| if runs.len() > 1 { run.name.as_str() } else { "This run" });
    let head: Vec<_> = ["Setting", "Default"].into_iter().chain(names).collect();
    if rows.is_empty() { or_none(String::new(), "No setting is known to differ from its default.") } else { table(&head, &rows) }
}

fn code(text: &str) -> String {
    format!("<code>{}</code>", escape(if text.is_empty() { "none" } else { text }))
}

fn machine(runs: &[PastRun]) -> String {
    let row = |(idx, run): (usize, &PastRun)| {
        let word = |value: &serde_json::Value| value.as_str().map_or_else(|| value.to_string(), str::to_string);
        let known = [&run.part("numerics")["computed_on"], run.setting("gpus"), &run.part("numerics")["attention"], run.setting("isa")];
        let words = known.into_iter().map(|value| if value.is_null() { "unknown".into() } else { escape(word(value)) });
        let timeline = if run.has_timeline { "trace.json" } else { "none" };
        std::iter::once(colour(idx, run)).chain(words).chain([timeline.into()]).collect()
    };
    let rows: Vec<_> = runs.iter().enumerate().map(row).collect();
    let head = ["Run", "Computed on", "Devices", "Attention", "Instruction set asked for", "Timeline"];
    format!("{}{}", table(&head, &rows), each(runs, facts))
}

/// Machine and build, as recorded when the run last started or resumed.
fn facts(run: &PastRun) -> String {
    let facts = &run.history.facts;
    if facts.is_null() {
        return "<p class=\"note\">This run has no record of its machine and build.</p>\n".into();
    }
    let word = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_string);
    let (build, machine) = (&facts["build"], &facts["machine"]);
    let memory = machine["memory_bytes"].as_u64().map_or("unknown".into(), |bytes| Bytes(bytes).to_string());
    let rows = [
        ("Plan", plan(&facts["plan"])),
        ("Device", word(&facts["device"])),
        ("Processor", format!("{}, {} cores, {memory}", word(&machine["cpu"]), machine["cores"])),
        ("System", format!("Linux {} on {}", word(&machine["kernel"]), word(&machine["arch"]))),
        ("Build", format!("superoffload {}, commit {}", word(&build["version"]), word(&build["git_commit"]))),
    ];
    let rows: Vec<_> = rows.into_iter().map(|(name, value)| vec![name.to_string(), escape(value)]).collect();
    table(&["Written by the run", ""], &rows)
}

/// Placement of states and layers, and the predicted step time.
fn plan(plan: &Value) -> String {
    if !plan.is_object() {
        return "unknown".into();
    }
    let layers = plan["layer_policies"].as_object().into_iter().flatten();
    let layers: Vec<_> = layers.map(|(policy, count)| format!("{count} {policy}")).collect();
    let predicted = plan["predicted_step_ms"].as_f64().map_or(String::new(), |ms| format!("; {} a step predicted", verdict::duration(ms)));
    format!(
        "states of {} of {} buckets on the device, optimizer threads: {}; layers: {}{predicted}",
        plan["resident_buckets"],
        plan["buckets"],
        plan["threads"],
        layers.join(", ")
    )
}

fn command(run: &PastRun) -> String {
    let Some(command) = requested::command(run) else { return or_none(String::new(), "No checkpoint has the settings.") };
    let note = "Paths are relative to the directory in which the command was given. The same build, data and command give bit-identical \
        weights.";
    format!("<pre>{}</pre><button hidden>Copy</button>\n<p class=\"note\">{note}</p>\n", html::escape_whole(&command))
}

fn foot(runs: &[PastRun]) -> String {
    let build = BuildFacts::this_program();
    let commit = build.git_commit.map_or(String::new(), |commit| format!(", commit {commit}"));
    let has_text = runs.iter().filter_map(|run| run.samples.as_ref()).any(DataSamples::hold_text);
    let held = if has_text { "samples of the training data" } else { "no training data" };
    format!("<footer>Written by superoffload {}{}. This page loads nothing and holds {held}.</footer>\n", build.version, escape(commit))
}
