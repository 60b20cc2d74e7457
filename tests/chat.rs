//! Training on chat data: what is trained, what a resume keeps, and what is refused.

use crate::program::{Workspace, run};
use std::os::unix::process::CommandExt;
use std::process::Stdio;
use std::time::{Duration, Instant};

/// Marks of turns, as small as they can be.
const TEMPLATE: &str = "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}";

/// Forty short conversations, and flags that train on them by bytes.
fn chats(workspace: &Workspace, answer: &str) -> Vec<String> {
    let chat = |n: usize| {
        let (question, answer) = (format!("what is {n} plus one?"), format!("{answer} {}", n + 1));
        serde_json::json!({"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}).to_string()
    };
    let data = workspace.write("chat.jsonl", (0..40).map(chat).collect::<Vec<_>>().join("\n"));
    let template = workspace.write("chat.jinja", TEMPLATE);
    vec![format!("--data={}", data.display()), format!("--chat-template={}", template.display()), "--seq-length=48".into()]
}

fn train(workspace: &Workspace, out: &str, flags: &[String], more: &[&str]) -> crate::program::Outcome {
    let flags: Vec<&str> = flags.iter().map(String::as_str).chain(more.iter().copied()).collect();
    run(&mut workspace.train(out, &flags))
}

#[test]
fn chats_are_trained_by_their_answers_and_a_resume_keeps_their_boundaries() {
    let workspace = Workspace::new();
    let flags = chats(&workspace, "that is");
    let whole = train(&workspace, "whole", &flags, &[]);
    let trained = whole.stdout.lines().find(|line| line.contains("% trained)")).unwrap_or_else(|| panic!("{whole:?}"));
    assert!(trained.contains("tokens ("), "{trained}");
    let (digest, all) = (whole.digest().to_string(), train(&workspace, "all", &flags, &["--train-on=all"]));
    assert!(all.digest() != digest && all.stdout.contains("tokens (100.0 % trained)"), "{all:?}");
    workspace.copy_checkpoints("whole", "resumed", &[6]);
    let resumed = train(&workspace, "resumed", &flags, &["--resume-from-checkpoint=auto"]);
    assert_eq!(resumed.digest(), digest);
    workspace.copy_checkpoints("whole", "other", &[6]);
    let other = train(&workspace, "other", &flags, &["--resume-from-checkpoint=auto", "--train-on=all"]);
    other.refused(2, &["--train-on", "all"]);
    workspace.write("chat.jinja", TEMPLATE.replace("<a>", "[a]"));
    workspace.copy_checkpoints("whole", "changed", &[6]);
    train(&workspace, "changed", &flags, &["--resume-from-checkpoint=auto"]).refused(2, &["chat_template", "--allow-changed tokenizer"]);
}

#[test]
fn several_devices_train_on_chats_to_the_bits_of_one() {
    let workspace = Workspace::new();
    let flags = chats(&workspace, "that is");
    let cut = ["--device=cpu", "--bucket-mib=0.03125", "--gradient-shares=2"];
    let one = train(&workspace, "1", &flags, &[&cut[..], &["--gradient-accumulation-steps=2"]].concat());
    let two = train(&workspace, "2", &flags, &[&cut[..], &["--gpus=2", "--gradient-accumulation-steps=1"]].concat());
    assert_eq!(one.digest(), two.digest());
}

#[test]
fn chats_without_an_answer_or_a_template_are_refused() {
    let workspace = Workspace::new();
    let flags = chats(&workspace, "that is");
    let without = &flags[..1];
    train(&workspace, "out", without, &[]).refused(1, &["chat.jsonl", "line 1", "--chat-template"]);
    let requested = (0..40).map(|_| "{\"messages\": [{\"role\": \"user\", \"content\": \"hello?\"}]}").collect::<Vec<_>>().join("\n");
    workspace.write("chat.jsonl", requested);
    train(&workspace, "out", &flags, &[]).refused(1, &["chat.jsonl", "line 1", "no token is trained", "40 of 40"]);
    assert!(workspace.names("out", "checkpoint-").is_empty());
}

/// Lists that double are one instruction each, and more than memory after forty; texts that do are counted. A namespace within itself has
/// no end when it is written.
#[test]
fn a_template_that_works_without_end_ends_the_program() {
    let workspace = Workspace::new();
    let flags = chats(&workspace, "it is");
    let repeated = |x: &str, next: &str| {
        format!("{{% set ns = namespace(x={x}) %}}{{% for i in range(60) %}}{{% set ns.x = {next} %}}{{% endfor %}}{{{{ ns.x | length }}}}")
    };
    // A slow machine does not fill the memory before the time is over.
    let memory_or_time = ["1.0 GiB of memory", "5 s of CPU time"]
        .map(|limit| format!("line 1: rendering one conversation by the chat template takes more than {limit}"));
    let memory_or_time = memory_or_time.each_ref().map(String::as_str);
    for (x, next, message) in [
        ("[1, 2]", "ns.x + ns.x", &memory_or_time[..]),
        ("'ab'", "ns.x + ns.x", &["ran out of fuel"]),
        ("'a'", "ns, 'a' ~ ns.x", &["takes more than 64.0 MiB of stack"]),
    ] {
        workspace.write("chat.jinja", repeated(x, next) + TEMPLATE);
        let outcome = train(&workspace, "out", &flags, &[]);
        assert_eq!(outcome.stderr.matches("error: ").count(), 1, "{outcome:?}");
        let message = message.iter().find(|words| outcome.stderr.contains(**words)).unwrap_or(&message[0]);
        outcome.refused(1, &[*message]);
    }
}

/// Two values that take exponential time to be compared, in a template that costs little and takes little.
const SPINS: &str = "{% set a = namespace(x=[1], y=[1]) %}{% for i in range(60) %}{% set a.x = [a.x, a.x] %}{% set a.y = [a.y, a.y] %}\
    {% endfor %}{{ a.x == a.y }}";

/// States of the processes in a group, but for those that have ended and were not waited for.
fn group(id: u32) -> usize {
    let stat = |entry: std::fs::DirEntry| std::fs::read_to_string(entry.path().join("stat")).ok();
    let is_member = |stat: &String| {
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        fields.get(2) == Some(&id.to_string().as_str()) && fields[0] != "Z"
    };
    std::fs::read_dir("/proc").unwrap().flatten().filter_map(stat).filter(is_member).count()
}

/// A killed program can end nothing itself; the process that renders works for seconds.
#[test]
fn no_process_outlives_a_program_that_is_killed() {
    let workspace = Workspace::new();
    let flags = chats(&workspace, "it is");
    workspace.write("chat.jinja", SPINS);
    let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
    let mut command = workspace.train("out", &flags);
    command.process_group(0).stdout(Stdio::null()).stderr(Stdio::null());
    let mut child = command.spawn().unwrap();
    let id = child.id();
    let wait = |event: &str, is_so: &dyn Fn() -> bool| {
        let began = Instant::now();
        while !is_so() {
            assert!(began.elapsed() < Duration::from_secs(30), "{event}: {} processes", group(id));
            std::thread::sleep(Duration::from_millis(10));
        }
        began.elapsed()
    };
    wait("it renders", &|| group(id) >= 3);
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(wait("it is gone", &|| group(id) == 0) < Duration::from_secs(3));
}

/// Plain text never goes through a template, be it broken or changed.
#[test]
fn a_chat_template_does_not_affect_plain_text() {
    let workspace = Workspace::new();
    workspace.write("model/chat_template.jinja", "{% for %}");
    let lines = (0..60).map(|n| format!("{{\"text\": \"line {n} of a document\"}}")).collect::<Vec<_>>().join("\n");
    let jsonl = format!("--data={}", workspace.write("text.jsonl", lines).display());
    for flags in [&[][..], &[jsonl.as_str()]] {
        let digest = run(&mut workspace.train("whole", flags)).digest().to_string();
        workspace.copy_checkpoints("whole", "resumed", &[6]);
        workspace.write("model/chat_template.jinja", "{{ 1 }}");
        let resumed = run(&mut workspace.resume("resumed", flags));
        assert_eq!(resumed.digest(), digest);
        // Documents are joined without a mark between them, which is all that there is to say.
        assert!(resumed.stderr.lines().all(|line| line.contains("--eos-token TOKEN")), "{resumed:?}");
        workspace.write("model/chat_template.jinja", "{% for %}");
        std::fs::remove_dir_all(workspace.path("resumed")).unwrap();
    }
    let chats = &chats(&workspace, "that is")[..1];
    train(&workspace, "chat", chats, &[]).refused(1, &["chat_template.jinja", "line 1"]);
}
