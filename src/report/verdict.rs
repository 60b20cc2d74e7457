//! Describes the outcome of a run in words.

use super::history::{History, WAITS};
use super::html::{last_name, number};
use super::past_run::PastRun;
use crate::simulate::outcome::of_a_large_product;
use crate::units::Count;
use serde_json::Value;

/// Fraction of time below which waiting is not mentioned.
const WORTH_SAYING: f64 = 0.05;

/// A summary sentence: progress, loss, speed, and bottleneck.
pub(super) fn sentence(run: &PastRun) -> String {
    let history = &run.history;
    if history.steps == 0 {
        return "No step has been written yet.".into();
    }
    let loss = match (history.first_loss.is_finite(), history.last_loss.is_finite()) {
        (true, true) => format!("the loss went from {} to {}", number(history.first_loss), number(history.last_loss)),
        (_, false) => "the loss of its last step is not a number".into(),
        (false, true) => format!("the loss of its last step is {}", number(history.last_loss)),
    };
    format!("{}; {loss}{}{}.", progress(run), tokens(history), bound(history).map_or(String::new(), |bound| format!("; {bound}")))
}

/// The number of completed steps, compared to all steps.
pub(super) fn progress(run: &PastRun) -> String {
    let last = run.history.last_step;
    match run.setup.as_ref().map(|setup| setup.max_steps) {
        Some(all) if last >= all => format!("Finished: all {} steps are done", number(all as f64)),
        Some(all) => format!("{} of {} steps are done", number(last as f64), number(all as f64)),
        None if last == 1 => "1 step is done; no checkpoint has the total".into(),
        None => format!("{} steps are done; no checkpoint has their total", number(last as f64)),
    }
}

fn tokens(history: &History) -> String {
    let speed = history.mean_tokens_per_second();
    let work = history
        .mean_tflops_and_fraction()
        .map_or(String::new(), |(tflops, fraction)| format!(" and {} TFLOP/s{}", number(tflops), of_a_large_product(Some(fraction))));
    if speed.is_finite() { format!(" over {} tokens, at {} tokens/s{work}", number(history.tokens), number(speed)) } else { String::new() }
}

/// Breakdown of the steps' time in milliseconds: compute first, then waiting.
pub(super) fn step_times(history: &History) -> Vec<(String, f64)> {
    let waits = WAITS.iter().zip(history.exposed_ms).map(|(resource, ms)| (format!("waiting for {resource}"), ms));
    std::iter::once(("compute and all else".to_string(), history.compute_ms())).chain(waits).collect()
}

/// The bottleneck, if the times are known.
pub(super) fn bound(history: &History) -> Option<String> {
    let times = step_times(history);
    let percent = |ms: f64| format!("{:.0}\u{a0}%", 100.0 * ms / history.total_ms);
    let (longest, second) = times[1..].iter().fold((None, 0.0), |best, (name, ms)| if *ms > best.1 { (Some(name), *ms) } else { best });
    let compute = times[0].1;
    if !history.total_ms.is_finite() || history.total_ms <= 0.0 {
        return None;
    }
    Some(match longest {
        Some(wait) if second > compute => format!("{wait} was the limit, {} of the time", percent(second)),
        Some(wait) if second > WORTH_SAYING * history.total_ms => {
            format!("compute was the limit, {} of the time, before {wait}, {}", percent(compute), percent(second))
        }
        _ => format!("compute was the limit, {} of the time", percent(compute)),
    })
}

/// Model, data and device of the run, as far as they are known.
pub(super) fn subject(run: &PastRun) -> String {
    let Some(setup) = &run.setup else { return "No checkpoint can be read, so model, data and settings are not known.".into() };
    let model = run.setting("model").as_str().map_or("the built-in model".into(), last_name);
    let (shape, data) = (run.part("model"), &run.part("data")["files"]);
    let mut parts = vec![format!("{model}, {} parameters", Count(setup.params as usize))];
    parts.extend(shape["num_hidden_layers"].as_u64().map(|layers| format!("{layers} layers of width {}", shape["hidden_size"])));
    parts.push(format!("on {}", files(data, run.setting("data"))));
    parts.extend(run.part("numerics")["computed_on"].as_str().map(|device| format!("computed on {device}")));
    parts.extend(run.setting("dtype").as_str().map(|dtype| format!("in {dtype}")));
    parts.join(" · ")
}

/// The data files recorded in the checkpoint, or else those of the settings.
fn files(recorded: &Value, requested: &Value) -> String {
    let named = |files: &Value, name: fn(&Value) -> Option<&str>| -> Vec<String> {
        files.as_array().into_iter().flatten().filter_map(name).map(last_name).collect()
    };
    let names = Some(named(recorded, |file| file["name"].as_str())).filter(|names| !names.is_empty());
    let names = names.unwrap_or_else(|| named(requested, Value::as_str));
    match names.as_slice() {
        [] => "unknown data".into(),
        [one] => one.clone(),
        [first, rest @ ..] => format!("{first} and {} more", rest.len()),
    }
}

/// Formats milliseconds with a readable unit.
pub(super) fn duration(ms: f64) -> String {
    match ms / 1e3 {
        s if !s.is_finite() => "unknown".into(),
        s if s < 1.0 => format!("{} ms", number(ms)),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.1} min", s / 60.0),
        s => format!("{:.1} h", s / 3600.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn run(history: History) -> PastRun {
        PastRun {
            name: "x".into(),
            history,
            setup: None,
            checkpoints: vec![],
            older_checkpoints: 0,
            has_timeline: false,
            drawn_steps: vec![],
            samples: None,
        }
    }

    #[test]
    fn data_have_the_names_of_the_checkpoint_or_else_of_the_settings() {
        let (recorded, requested) = (json!([{"name": "data/a.txt"}, {"name": "b.txt"}]), json!(["data/chat.jsonl"]));
        assert_eq!(files(&recorded, &requested), "a.txt and 1 more");
        assert_eq!([files(&Value::Null, &requested), files(&json!([]), &Value::Null)], ["chat.jsonl", "unknown data"]);
    }

    #[test]
    fn the_sentence_names_the_bottleneck_of_the_run() {
        let history = |exposed_ms| History {
            steps: 4,
            last_step: 4,
            first_loss: 5.0,
            last_loss: 2.0,
            tokens: 4000.0,
            total_ms: 2000.0,
            exposed_ms,
            ..History::default()
        };
        let text = sentence(&run(history([0.0, 300.0, 0.0])));
        assert!(text.contains("the loss went from 5 to 2 over 4,000 tokens, at 2,000 tokens/s"), "{text}");
        assert!(text.ends_with("compute was the limit, 85\u{a0}% of the time, before waiting for copies, 15\u{a0}%."), "{text}");
        let facts = serde_json::json!({"matmul_flops": 8e14});
        let on_a_gpu = sentence(&run(History { gflop: 4e5, facts, ..history([0.0; 3]) }));
        assert!(on_a_gpu.contains("at 2,000 tokens/s and 200 TFLOP/s (25 % of a large product); compute"), "{on_a_gpu}");
        assert_eq!(bound(&history([1500.0, 0.0, 0.0])).unwrap(), "waiting for the optimizer was the limit, 75\u{a0}% of the time");
        assert_eq!(bound(&history([0.0; 3])).unwrap(), "compute was the limit, 100\u{a0}% of the time");
        assert_eq!(sentence(&run(History::default())), "No step has been written yet.");
        let without = sentence(&run(History { steps: 1, last_step: 1, first_loss: f64::NAN, last_loss: f64::NAN, ..History::default() }));
        assert_eq!(without, "1 step is done; no checkpoint has the total; the loss of its last step is not a number.");
    }
}
