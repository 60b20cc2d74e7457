//! The lines that a run prints before its first step and after its last one.

use super::tests::tiny;
use super::*;
use crate::config::options::Resume;
use crate::metrics::StepMetrics;
use crate::optim::schedule::TrainLength;
use crate::planner::plan::Plan;
use serde_json::json;
use std::fs;
use std::path::Path;

/// The lines of a run up to its first step, without warnings and details.
#[derive(Default)]
struct Lines {
    before: Vec<String>,
    details: Vec<String>,
    has_stepped: bool,
}

impl Lines {
    fn add(&mut self, text: &str) {
        if !self.has_stepped {
            self.before.extend(text.lines().map(String::from));
        }
    }
}

impl Observer for Lines {
    fn begin(&mut self, _: &Plan, facts: &RunFacts) {
        self.add(&facts.to_string());
    }
    fn step(&mut self, _: &StepMetrics) {
        self.has_stepped = true;
    }
    fn note(&mut self, line: &str) {
        self.add(line);
    }
    fn detail(&mut self, line: &str) {
        self.details.extend(line.lines().map(String::from));
    }
    fn warn(&mut self, _: &str) {}
}

const LABELS: [&str; 6] = ["model   ", "data    ", "plan    ", "memory  ", "files   ", "device  "];

/// Runs `settings` in `dir`; the six lines before its first step.
#[track_caller]
fn six_lines(dir: &Path, settings: Settings) -> Lines {
    let mut lines = Lines::default();
    let summary = train(&Settings { output_dir: dir.join("out"), ..settings }, &StopFlag::default(), &mut lines).unwrap();
    assert!(summary.failure.is_none() && lines.has_stepped, "{summary}");
    // Several ranks may name a slow one.
    assert!(summary.to_string().lines().count() <= 6 + usize::from(summary.peers.is_some()), "{summary}");
    let labels: Vec<_> = lines.before.iter().map(|line| &line[..8.min(line.len())]).collect();
    assert_eq!(labels, LABELS, "{:#?}", lines.before);
    lines
}

#[test]
fn a_run_on_text_and_its_resume_print_six_lines_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("text.txt");
    fs::write(&data, "All work and no play. ".repeat(40)).unwrap();
    let settings = Settings { data: vec![data], ..tiny(dir.path()) };
    let Lines { before, details, .. } = six_lines(dir.path(), settings.clone());
    assert!(before[0].starts_with("model   built in: LlamaForCausalLM, 3.6 M parameters in bfloat16; 6 layers of 256, "), "{before:?}");
    assert!(before[1].contains(" tokens, ") && before[1].contains(" passes in steps 1 to 2; from "), "{before:?}");
    assert!(before[2].contains("plan    8 tokens a step, ") && before[5].starts_with("device  cpu (1 thread, "), "{before:?}");
    for detail in ["plan", "  optimizer   AdamW on 1 thread,", "pages   ", "resctrl ", "--packing auto is wrapped: "] {
        assert!(details.iter().any(|line| line.starts_with(detail)), "{detail:?} is not in {details:#?}");
    }
    let resumed = Settings { train_length: TrainLength::Steps(3), resume_from_checkpoint: Some(Resume::Auto), ..settings };
    let Lines { before, .. } = six_lines(dir.path(), resumed);
    assert!(before[0].ends_with("checkpoint-2") && before[0].contains("; resuming from "), "{before:?}");
    assert!(before[1].contains(" in steps 3 to 3; from "), "{before:?}");
}

#[test]
fn a_run_on_conversations_prints_six_lines_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let (data, template) = (dir.path().join("chat.jsonl"), dir.path().join("chat.jinja"));
    let turn = |role: &str, content: String| json!({"role": role, "content": content});
    let record = |n| format!("{}\n", json!({"messages": [turn("user", format!("q{n}")), turn("assistant", format!("a{n}"))]}));
    fs::write(&data, (0..40).map(record).collect::<String>()).unwrap();
    let answer = "{% generation %}{{ m.content }}{% endgeneration %}";
    let whole =
        format!("{{% for m in messages %}}{{% if m.role == 'user' %}}{{{{ m.content }}}}{{% else %}}{answer}{{% endif %}}{{% endfor %}}");
    fs::write(&template, whole).unwrap();
    let settings = Settings { data: vec![data], chat_template: Some(template), eval_split: "0.1".parse().ok(), ..tiny(dir.path()) };
    let Lines { before, details, .. } = six_lines(dir.path(), settings);
    assert!(before[1].contains("% trained)") && before[1].contains("; evaluated on "), "{before:?}");
    assert!(details.iter().any(|line| line.starts_with("packing ")), "{details:#?}");
}

#[test]
fn a_run_of_two_ranks_prints_six_lines_before_the_first_step() {
    let dir = tempfile::tempdir().unwrap();
    let Lines { before, .. } = six_lines(dir.path(), Settings { gpus: 2, ..tiny(dir.path()) });
    assert!(before[2].contains("plan    16 tokens a step, "), "{before:?}");
}

#[test]
fn a_start_without_a_checkpoint_to_resume_from_is_part_of_the_first_line() {
    let dir = tempfile::tempdir().unwrap();
    let Lines { before, .. } = six_lines(dir.path(), Settings { resume_from_checkpoint: Some(Resume::Auto), ..tiny(dir.path()) });
    assert!(before[0].contains("; no checkpoint in ") && before[0].ends_with(": starting afresh"), "{before:?}");
}
