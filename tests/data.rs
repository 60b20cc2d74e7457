//! Data that is too large for memory, run by the program: prepared once, in bounded memory, seen on its way, ended by a signal.

use crate::program::{Outcome, Workspace, program, run};
use crate::sweep::PROMPTLY;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const MIB: u64 = 1 << 20;
/// Text of which the program keeps no more in memory, with room to spare.
const TOO_LARGE: u64 = 5 * MIB;
/// Resident memory of a run of the tiny model, data aside: program, engine and libraries.
const WITHOUT_DATA: u64 = 64 * MIB;

/// `train` with a cache of its own.
fn train(workspace: &Workspace, out: &str, flags: &[&str]) -> Command {
    let mut command = workspace.train(out, flags);
    command.env("SUPEROFFLOAD_CACHE", workspace.path("cache"));
    command
}

/// Writes at least `bytes` of text with words that differ into `name`.
fn write_text(workspace: &Workspace, name: &str, bytes: u64) -> PathBuf {
    write_lines(workspace, name, bytes, sentence)
}

/// A sentence, of which no other is the same.
fn sentence(state: u64) -> String {
    format!("The {:x} furious ideas of {} sleep, colourless — green; {}", state >> 40, state >> 58, state >> 50)
}

/// A record of ten sentences as text.
fn text_record(state: u64) -> String {
    serde_json::json!({"text": sentence(state).repeat(10)}).to_string()
}

/// A record of a question and an answer, ten sentences in all.
fn chat_record(state: u64) -> String {
    let turn = |role: &str, sentences| serde_json::json!({"role": role, "content": sentence(state).repeat(sentences)});
    serde_json::json!({"messages": [turn("user", 4), turn("assistant", 6)]}).to_string()
}

/// Writes lines of random numbers into `name`, until it has `bytes`.
fn write_lines(workspace: &Workspace, name: &str, bytes: u64, line: impl Fn(u64) -> String) -> PathBuf {
    let path = workspace.path(name);
    let mut file = std::io::BufWriter::new(fs::File::create(&path).unwrap());
    let (mut written, mut state) = (0, 1u64);
    while written < bytes {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let line = line(state) + "\n";
        file.write_all(line.as_bytes()).unwrap();
        written += line.len() as u64;
    }
    file.flush().unwrap();
    path
}

/// A byte-level BPE of 300 ids in the model directory, and a model with as many.
fn add_tokenizer(workspace: &Workspace) {
    let byte = |byte: u32| match byte {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => char::from_u32(byte).unwrap(),
        0..=0x20 => char::from_u32(0x100 + byte).unwrap(),
        0x7f..=0xa0 => char::from_u32(0x121 + byte - 0x7f).unwrap(),
        _ => char::from_u32(0x143).unwrap(),
    };
    let mut vocab: serde_json::Map<String, serde_json::Value> = (0..256).map(|id| (byte(id).to_string(), id.into())).collect();
    let merges = [["Ġ", "s"], ["e", "e"], ["Ġs", "l"], ["ee", "p"], ["Ġ", "f"], ["i", "d"], ["e", "a"], ["o", "u"], ["r", "s"]];
    for (id, [left, right]) in (256..).zip(merges) {
        vocab.insert(format!("{left}{right}"), id.into());
    }
    let tokenizer = serde_json::json!({
        "version": "1.0", "added_tokens": [], "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    });
    workspace.write("model/tokenizer.json", tokenizer.to_string());
    workspace.write("model/config.json", crate::program::CONFIG.replace("\"vocab_size\": 256", "\"vocab_size\": 300"));
}

/// Runs to the end; returns the peak of its resident memory, too.
fn run_measured(command: &mut Command) -> (Outcome, u64) {
    let child = command.spawn().unwrap();
    let status = PathBuf::from(format!("/proc/{}/status", child.id()));
    let watch = std::thread::spawn(move || {
        let mut peak = 0;
        while let Some(bytes) = peak_bytes(&status) {
            peak = bytes;
            std::thread::sleep(Duration::from_millis(5));
        }
        peak
    });
    let outcome = child.wait_with_output().unwrap().into();
    (outcome, watch.join().unwrap())
}

/// `VmHWM`, which only rises; `None` once the process has ended.
fn peak_bytes(status: &Path) -> Option<u64> {
    let status = fs::read_to_string(status).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() * 1024)
}

#[test]
fn large_text_is_prepared_once_and_trains_to_the_bits_of_its_token_file() {
    let workspace = Workspace::new();
    let text = write_text(&workspace, "large.txt", TOO_LARGE);
    let ids: Vec<u8> = fs::read(&text).unwrap().into_iter().flat_map(|byte| [byte, 0]).collect();
    fs::write(workspace.path("large.bin"), ids).unwrap();
    let (text, bin) = (text.to_str().unwrap(), workspace.path("large.bin"));
    let reference = run(&mut train(&workspace, "bin", &["--data", bin.to_str().unwrap()]));
    let first = run(&mut train(&workspace, "first", &["--data", text]));
    assert_eq!(first.digest(), reference.digest());
    assert!(first.stdout.starts_with("reading ") && first.stdout.contains("preparing 5.0 MiB of text in "), "{first:?}");
    let second = run(&mut train(&workspace, "second", &["--data", text]));
    assert_eq!(second.digest(), reference.digest());
    assert!(!second.stdout.contains("preparing "), "{second:?}");
    assert_eq!(workspace.names("cache", "").len(), 2, "a folder and its lock");
    assert!(workspace.path("first/.superoffload/data-checked.json").exists());
}

/// What stands where a file of data was.
fn replaced_by(path: &Path, kind: &str) {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => fs::remove_dir(path).unwrap(),
        Ok(_) => fs::remove_file(path).unwrap(),
        Err(_) => {}
    }
    match kind {
        "a pipe" => nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap(),
        "a directory" => fs::create_dir(path).unwrap(),
        _ => {}
    }
}

/// What the guide says of resumes: tokens come from where they were prepared.
#[test]
fn a_resume_reads_no_data_that_is_as_it_was_and_goes_on_without() {
    let workspace = Workspace::new();
    let path = write_lines(&workspace, "large.jsonl", TOO_LARGE, text_record);
    let resumed = |steps: u64| {
        let flags = ["--data", path.to_str().unwrap(), "--resume-from-checkpoint=auto", &format!("--max-steps={steps}")];
        run(&mut train(&workspace, "out", &flags))
    };
    let digest = run(&mut train(&workspace, "whole", &["--data", path.to_str().unwrap()])).digest().to_string();
    resumed(3).digest();
    let file = fs::File::options().write(true).open(&path).unwrap();
    let before = file.metadata().unwrap();
    // No text, for whoever reads it.
    file.write_all_at(&vec![0xff; before.len() as usize], 0).unwrap();
    file.set_modified(before.modified().unwrap()).unwrap();
    resumed(6).digest();
    for (steps, kind, cause) in [(8, "", "No such file"), (10, "a pipe", "not a regular file"), (12, "a directory", "not a regular file")] {
        replaced_by(&path, kind);
        let outcome = resumed(steps);
        let message: Vec<_> = outcome.stdout.lines().filter(|line| line.contains("large.jsonl") && line.contains(cause)).collect();
        let [message] = message[..] else { panic!("{kind}: {outcome:?}") };
        assert!(
            message.contains("training continues with the tokens that were prepared from it, in ") && message.contains("/cache/"),
            "{message}"
        );
        if steps == 12 {
            assert_eq!(outcome.digest(), digest);
        }
    }
    let [folder, _] = workspace.names("cache", "").try_into().unwrap();
    fs::rename(workspace.path("cache"), workspace.path("aside")).unwrap();
    let gone = ["large.jsonl: not a regular file", &format!("/cache/{folder} is not there; restore the file")];
    resumed(14).refused(1, &gone);
    fs::create_dir(workspace.path("cache")).unwrap();
    crate::program::copy_dir(&workspace.path("aside").join(&folder), &workspace.path("cache").join(&folder));
    fs::write(workspace.path("cache").join(&folder).join("tokens.u32"), "").unwrap();
    resumed(14).refused(1, &["large.jsonl: not a regular file", "tokens.u32: 0 bytes instead of ", "restore the file"]);
}

/// A prompt and what completes it.
fn answer(n: u64) -> String {
    serde_json::json!({"prompt": format!("{n} times {n} is "), "completion": format!("{}", n * n)}).to_string() + "\n"
}

#[test]
fn a_resume_works_without_cached_data_and_after_the_run_was_moved() {
    let workspace = Workspace::new();
    let (path, eval) = (workspace.path("small.jsonl"), workspace.path("eval.jsonl"));
    let write = || {
        fs::write(&path, (0..90).map(answer).collect::<String>()).unwrap();
        fs::write(&eval, (90..99).map(answer).collect::<String>()).unwrap();
    };
    write();
    let evaluated =
        |out: &str| workspace.metrics(out).into_iter().rfind(|line| line.get("eval_loss").is_some()).unwrap()["eval_loss"].clone();
    let resume = |out: &str, more: &[&str]| {
        let flags = ["--data", path.to_str().unwrap(), "--eval-data", eval.to_str().unwrap(), "--eval-steps=6", "--device=cpu", "--gpus=2"];
        run(&mut train(&workspace, out, &[&flags, more].concat()))
    };
    let auto = ["--resume-from-checkpoint=auto", "--max-steps=12"];
    let digest = resume("whole", &["--max-steps=12"]).digest().to_string();
    resume("out", &["--max-steps=6"]).digest();
    assert!(!workspace.path("cache").exists(), "small text is kept beside the run");
    replaced_by(&path, "");
    replaced_by(&eval, "");
    let checkpoint = workspace.path("out/checkpoint-6");
    let other = resume("other", &["--max-steps=12", "--resume-from-checkpoint", checkpoint.to_str().unwrap()]);
    assert_eq!(other.digest(), digest);
    fs::rename(workspace.path("out"), workspace.path("moved")).unwrap();
    let moved = resume("moved", &auto);
    assert_eq!((moved.digest(), evaluated("moved")), (digest.as_str(), evaluated("whole")));
    for name in ["small.jsonl", "eval.jsonl"] {
        let message = |line: &&str| {
            line.contains(name) && line.contains("training continues with the tokens") && line.contains("/moved/.superoffload/tokens/")
        };
        assert_eq!(moved.stdout.lines().filter(message).count(), 1, "{moved:?}");
    }
    resume("moved", &["--resume-from-checkpoint=auto", "--max-steps=13", "--allow-changed=data"])
        .refused(1, &["small.jsonl: No such file"]);
    // What is back is taken for what it is.
    write();
    resume("moved", &["--resume-from-checkpoint=auto", "--max-steps=13"]).digest();
    fs::write(&path, (1..90).map(answer).collect::<String>()).unwrap();
    resume("moved", &["--resume-from-checkpoint=auto", "--max-steps=14"]).refused(2, &["the data differs from the checkpoint's"]);
    resume("moved", &["--max-steps=1"]).digest();
    assert_eq!(workspace.names("moved/.superoffload/tokens", "").len(), 4, "two folders and their locks: what other data left has gone");
}

#[test]
fn a_directory_of_data_may_lose_files_and_may_not_gain_any() {
    let workspace = Workspace::new();
    for name in ["a", "b", "c"] {
        workspace.write(&format!("corpus/{name}.txt"), format!("the words of {name} ").repeat(60));
    }
    let corpus = workspace.path("corpus");
    let resume = |out: &str, more: &str| {
        run(&mut train(&workspace, out, &["--data", corpus.to_str().unwrap(), "--eval-split=1", "--resume-from-checkpoint=auto", more]))
    };
    let digest = resume("whole", "--max-steps=12").digest().to_string();
    resume("out", "--max-steps=6").digest();
    fs::remove_file(corpus.join("a.txt")).unwrap();
    fs::remove_file(corpus.join("c.txt")).unwrap();
    let less = resume("out", "--max-steps=9");
    assert!(
        less.stdout.contains("a.txt: No such file") && less.stdout.contains(", and the same for 1 more: training continues"),
        "{less:?}"
    );
    fs::remove_dir_all(&corpus).unwrap();
    assert_eq!(resume("out", "--max-steps=12").digest(), digest);
    for name in ["d", "e"] {
        workspace.write(&format!("corpus/{name}.txt"), format!("other words of {name} ").repeat(60));
    }
    resume("out", "--max-steps=13").refused(2, &["the data differs from the checkpoint's", "file 1 was "]);
}

#[test]
fn text_that_was_prepared_ahead_is_found_by_training() {
    let workspace = Workspace::new();
    let large = write_text(&workspace, "large.txt", TOO_LARGE);
    let config = workspace.path("run.toml");
    let prepare = |data: &Path, cache: &str| {
        let mut command = program(&["prepare", "--config"]);
        run(command.arg(&config).arg(data).env("SUPEROFFLOAD_CACHE", workspace.path(cache)))
    };
    let first = prepare(&large, "cache");
    let [folder, _] = workspace.names("cache", "").try_into().unwrap();
    let bytes = fs::metadata(&large).unwrap().len();
    for words in
        [format!("prepared  {bytes} tokens of 1 document, 100.0 % trained\n"), " M tokens/s (".into(), format!("/cache/{folder}\n")]
    {
        assert!(first.stdout.contains(&words), "{words:?} is not in {first:?}");
    }
    let trained = run(&mut train(&workspace, "out", &["--data", large.to_str().unwrap()]));
    assert!(!trained.stdout.contains("preparing "), "{trained:?}");
    let again = prepare(&large, "cache");
    assert!(again.stdout.starts_with(&format!("found  {bytes} tokens")) && !again.stdout.contains("tokens/s"), "{again:?}");
    let small = prepare(&workspace.write("small.txt", "a few words"), "cache");
    assert_eq!(small.stdout, "nothing to prepare: each run tokenizes up to 11 B of text itself\n");
    let ids = prepare(&workspace.write("ids.bin", [1, 0]), "cache");
    assert_eq!(ids.stdout, "nothing to prepare: token files are read where they are\n");
    workspace.write("file", "");
    prepare(&large, "file/cache").refused(1, &["create ", "/file/cache: "]);
    prepare(&workspace.path("none.txt"), "cache").refused(1, &["none.txt: No such file"]);
    run(&mut program(&["prepare"])).refused(2, &["prepare: --data is missing"]);
}

#[test]
fn without_a_home_prepared_text_lies_beside_the_run() {
    let workspace = Workspace::new();
    let text = write_text(&workspace, "large.txt", TOO_LARGE);
    let mut command = workspace.train("out", &["--data", text.to_str().unwrap(), "--max-steps", "1"]);
    run(command.env_remove("SUPEROFFLOAD_CACHE").env_remove("HOME").env_remove("XDG_CACHE_HOME")).digest();
    assert_eq!(workspace.names("out/.superoffload/prepared", "").len(), 2);
}

#[test]
fn memory_does_not_grow_with_the_text() {
    for (message, peak) in peaks(&Workspace::new(), 12 * MIB) {
        // Nine million tokens of four bytes.
        assert!(peak > MIB && peak < WITHOUT_DATA + 32 * MIB, "{peak} bytes for 12 MiB: {message}");
    }
}

/// Makes a line of a random number.
type Line = fn(u64) -> String;

/// Lines of text, records of text, and conversations, whose rows are whole ones.
const KINDS: [(&str, Line); 3] = [("large.txt", sentence), ("text.jsonl", text_record), ("chat.jsonl", chat_record)];

/// What a step on `bytes` of each kind said of its data, and the peak of its memory.
fn peaks(workspace: &Workspace, bytes: u64) -> Vec<(String, u64)> {
    add_tokenizer(workspace);
    workspace.write("model/chat_template.jinja", "{% for m in messages %}<{{ m.role[0] }}>{{ m.content }}\n{% endfor %}");
    let measured = |(name, line): &(&str, Line)| {
        let (text, start) = (write_lines(workspace, name, bytes, line), Instant::now());
        let flags = ["--data", text.to_str().unwrap(), "--max-steps=1", "--seq-length=512"];
        let (outcome, peak) = run_measured(&mut train(workspace, &format!("out-{name}"), &flags));
        outcome.digest();
        fs::remove_file(&text).unwrap();
        let data = outcome.stdout.lines().find(|line| line.starts_with("data ")).unwrap();
        (format!("{name}: {:.1} s, peak {:.0} MB; {data}", start.elapsed().as_secs_f64(), peak as f64 / 1e6), peak)
    };
    KINDS.iter().map(measured).collect()
}

/// A gigabyte, within the 300 MB beside the model that are promised.
/// `cargo test --release --test main a_gigabyte -- --ignored --nocapture`.
#[test]
#[ignore = "takes minutes, and 6 GB of disk"]
fn a_gigabyte_of_each_kind_is_prepared_within_300_mb() {
    for (message, peak) in peaks(&Workspace::new(), 1_000_000_000) {
        let _ = writeln!(std::io::stdout(), "{message}");
        assert!(peak < WITHOUT_DATA + 300_000_000, "{message}");
    }
}

/// Starts a run on text whose preparation takes a while, and returns when it has begun.
fn start_preparing(workspace: &Workspace, text: &Path) -> (Child, BufReader<std::process::ChildStdout>) {
    let mut child = train(workspace, "out", &["--data", text.to_str().unwrap(), "--max-steps", "1"]).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    while !line.contains("preparing ") {
        line.clear();
        assert!(lines.read_line(&mut line).unwrap() > 0, "it ended");
    }
    (child, lines)
}

#[test]
fn a_signal_ends_the_preparation_at_once_and_leaves_nothing() {
    let workspace = Workspace::new();
    add_tokenizer(&workspace);
    let text = write_text(&workspace, "large.txt", 60 * MIB);
    let (child, mut lines) = start_preparing(&workspace, &text);
    let requested = Instant::now();
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    let outcome: Outcome = child.wait_with_output().unwrap().into();
    assert!(requested.elapsed() < PROMPTLY, "{:?}", requested.elapsed());
    let mut last = String::new();
    lines.read_line(&mut last).unwrap();
    assert_eq!((outcome.code, last.trim()), (75, "interrupted while data was being read: nothing was trained"), "{outcome:?}");
    assert!(workspace.names("cache", "").iter().all(|name| name.ends_with(".lock")), "{:?}", workspace.names("cache", ""));
}

#[test]
fn a_killed_preparation_is_done_again_by_the_next_run() {
    let workspace = Workspace::new();
    let text = write_text(&workspace, "large.txt", 30 * MIB);
    let (mut child, _lines) = start_preparing(&workspace, &text);
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(workspace.names("cache", ".").len(), 1, "what it wrote is there");
    run(&mut train(&workspace, "out", &["--data", text.to_str().unwrap(), "--max-steps", "1"])).digest();
    assert_eq!((workspace.names("cache", ".").len(), workspace.names("cache", "").len()), (0, 2));
}

#[test]
fn two_runs_that_want_the_same_text_prepare_it_once() {
    let workspace = Workspace::new();
    let text = write_text(&workspace, "large.txt", 20 * MIB);
    let (first, mut lines) = start_preparing(&workspace, &text);
    let second = run(&mut train(&workspace, "second", &["--data", text.to_str().unwrap(), "--max-steps", "1"]));
    second.digest();
    assert!(
        second.stdout.contains("another run prepares this text: waiting for it") && !second.stdout.contains("preparing "),
        "{second:?}"
    );
    let mut rest = String::new();
    std::io::Read::read_to_string(&mut lines, &mut rest).unwrap();
    assert!(Outcome::from(first.wait_with_output().unwrap()).code == 0 && rest.contains(second.digest()), "{rest}");
}
