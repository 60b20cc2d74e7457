//! `superoffload sample`: a model that has learned its text by heart says it, and what is drawn depends on the seed alone.

use crate::program::{Outcome, Workspace, program, run};
use std::path::PathBuf;

fn sample(run_dir: &PathBuf, flags: &[&str]) -> Outcome {
    run(program(&["sample"]).arg(run_dir).args(flags))
}

/// What was written, without the last line's end.
fn text(run_dir: &PathBuf, flags: &[&str]) -> String {
    let outcome = sample(run_dir, flags);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    outcome.stdout.strip_suffix('\n').unwrap().to_string()
}

/// A run that learned the alphabet by heart.
fn alphabet(workspace: &Workspace, flags: &[&str]) -> PathBuf {
    let data = workspace.write("alphabet.txt", "abcdefghijklmnopqrstuvwxyz".repeat(40));
    let data = format!("--data={}", data.display());
    run(&mut workspace.train("out", &[&[data.as_str(), "--max-steps=120", "--save-steps=120"], flags].concat())).digest();
    workspace.path("out")
}

#[test]
fn a_text_that_was_learned_is_written_and_prompts_do_not_change_each_other() {
    let workspace = Workspace::new();
    let out = alphabet(&workspace, &[]);
    assert_eq!(text(&out, &["--prompt", "abc", "--max-new-tokens", "5"]), "defgh");
    let several = text(&out, &["--prompt", "xyz", "--prompt", "a longer one: mno", "--max-new-tokens=4"]);
    assert_eq!(several, "> xyz\nabcd\n\n> a longer one: mno\npqrs\n");
    let many: Vec<String> = ('a'..='l').map(|letter| format!("--prompt={letter}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).chain(["--max-new-tokens=1"]).collect();
    let of_many = text(&out, &many);
    assert!(of_many.contains("> a\nb\n") && of_many.contains("> l\nm\n"), "more prompts than rows: {of_many}");
    // The same from a checkpoint, and where neither model nor data are there any more.
    std::fs::remove_dir_all(workspace.path("model")).unwrap();
    std::fs::remove_file(workspace.path("alphabet.txt")).unwrap();
    assert_eq!(text(&out.join("checkpoint-120"), &["--prompt=abc", "--max-new-tokens=5", "--threads=1"]), "defgh");
}

#[test]
fn drawn_text_depends_on_the_seed_alone() {
    let workspace = Workspace::new();
    run(&mut workspace.train("out", &["--max-steps=2"])).digest();
    let out = workspace.path("out");
    let drawn = |seed: &str, flags: &[&str]| text(&out, &[&["--prompt=ideas", "--temperature=1", "--seed", seed], flags].concat());
    let first = drawn("1", &[]);
    assert_eq!(first, drawn("1", &["--threads=1"]));
    assert_ne!(first, drawn("2", &[]));
    assert!(drawn("1", &["--prompt=another"]).contains(&format!("> ideas\n{first}\n")), "whichever prompts there are beside");
}

#[test]
fn lines_of_json_have_the_ids_and_log_probabilities_of_each_text() {
    let workspace = Workspace::new();
    let out = alphabet(&workspace, &[]);
    let lines = text(&out, &["--prompt=xyz", "--prompt=ab", "--samples=2", "--max-new-tokens=3", "--json"]);
    let lines: Vec<serde_json::Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let prompts: Vec<_> = lines.iter().map(|line| line["prompt"].as_str().unwrap()).collect();
    assert_eq!(prompts, ["xyz", "xyz", "ab", "ab"]);
    assert_eq!((&lines[0]["completion"], &lines[0]["prompt_ids"]), (&"abc".into(), &serde_json::json!([120, 121, 122])));
    assert_eq!(lines[0]["completion_ids"], serde_json::json!([97, 98, 99]));
    let logps: Vec<f64> = lines[0]["old_logps"].as_array().unwrap().iter().map(|logp| logp.as_f64().unwrap()).collect();
    assert!(logps.len() == 3 && logps.iter().all(|logp| (-0.5..0.0).contains(logp)), "it was learned by heart: {logps:?}");
}

#[test]
fn a_prompt_goes_through_the_runs_chat_template_and_an_answer_ends() {
    let workspace = Workspace::new();
    let template = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}~{% endfor %}{% if add_generation_prompt %}<a>{% endif %}";
    let template = workspace.write("own.jinja", template);
    let chat = r#"{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}"#;
    let data = workspace.write("chats.jsonl", format!("{chat}\n").repeat(8));
    let (data, template) = (format!("--data={}", data.display()), format!("--chat-template={}", template.display()));
    // The byte `~` ends a text.
    let flags = [&data, &template, "--tokenizer=bytes", "--eos-token=126", "--max-steps=120", "--save-steps=120"];
    run(&mut workspace.train("out", &flags)).digest();
    let out = workspace.path("out");
    assert_eq!(text(&out, &["--prompt", "hi"]), "yes");
    std::fs::remove_file(workspace.path("own.jinja")).unwrap();
    assert_eq!(text(&out, &["--prompt", "hi"]), "yes", "through the template's text in the checkpoint");
}

#[test]
fn invalid_options_are_refused() {
    let workspace = Workspace::new();
    run(&mut workspace.train("out", &["--max-steps=1"])).digest();
    let out = workspace.path("out");
    for (flags, words) in [
        (&["--prompt="][..], &["prompt \"\"", "no token"][..]),
        (&["--prompt=a", "--temperature=-1"], &["--temperature -1", "must be at least 0"]),
        (&["--prompt=a", "--temperature=nan"], &["--temperature NaN"]),
        (&["--prompt=a", "--max-new-tokens=0"], &["--max-new-tokens 0"]),
        (&["--prompt=a", "--samples=0"], &["--samples 0", "from 1 to 65536"]),
        (&[], &["--prompt"]),
    ] {
        sample(&out, flags).refused(2, words);
    }
    sample(&workspace.path("model"), &["--prompt=a"]).refused(1, &["no good checkpoint"]);
}

#[test]
fn prompts_are_answered_at_evaluations_and_drawn_in_the_report() {
    let workspace = Workspace::new();
    let prompts = workspace.write("prompts.txt", "abc\n\n<b>xyz\n");
    let (prompts, held) = (format!("--prompts={}", prompts.display()), format!("--eval-data={}", workspace.path("data.txt").display()));
    let without = alphabet(&workspace, &[&held, "--eval-steps=60"]);
    let digest = run(program(&["digest"]).arg(&without)).stdout.lines().last().unwrap().to_string();
    std::fs::rename(&without, workspace.path("without")).unwrap();
    let out = alphabet(&workspace, &[&held, "--eval-steps=60", &prompts]);
    assert_eq!(run(program(&["digest"]).arg(&out)).stdout.lines().last(), Some(digest.as_str()), "nothing of it is learned");
    let evaluations = workspace.metrics("out").into_iter().filter(|line| line.get("eval_loss").is_some()).collect::<Vec<_>>();
    assert_eq!(evaluations.len(), 2);
    let last = &evaluations[1]["samples"];
    assert!(last[0]["prompt"] == "abc" && last[0]["text"].as_str().unwrap().starts_with("defgh"), "{last}");
    let page = workspace.path("report.html");
    assert_eq!(run(program(&["report", "-o"]).arg(&page).arg(&out)).code, 0);
    let page = std::fs::read_to_string(page).unwrap();
    let samples = page.split("<h2>Samples</h2>").nth(1).unwrap().split("</section>").next().unwrap();
    assert!(samples.contains("abc<mark>defgh") && samples.contains("After step 120") && samples.contains("&lt;b&gt;xyz"), "{samples}");
    let refused = |flags: &[&str]| run(&mut workspace.train("refused", flags));
    refused(&[&prompts]).refused(2, &["--prompts", "--eval-data or --eval-split"]);
    workspace.write("prompts.txt", "\n");
    refused(&[&prompts, &held]).refused(2, &["--prompts", "0 prompts, one a line"]);
    workspace.write("prompts.txt", "much longer than a row has tokens");
    refused(&[&prompts, &held]).refused(2, &["--prompts", "a prompt of 33 tokens, rows have 16"]);
}
