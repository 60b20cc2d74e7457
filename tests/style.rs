//! House rules as a test: what a reader of this repository should never meet.

mod builds;
mod face;
mod floors;
mod messages;
mod names;
mod outside;
mod prose;
mod sizes;

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Longest file of the engine, in lines.
const LINES_MAX: usize = 800;

/// Longest function, in lines.
const FUNCTION_LINES_MAX: usize = 70;

/// Folders with Rust sources.
const SOURCES: [&str; 7] = ["src", "resctrl", "microbench", "packaging/torch/src", "paper-figures", "tests", "third_party"];

/// Texts that may not stand in code (comments are free to explain), and where they may after all.
struct Rule {
    words: &'static [&'static str],
    allowed_in: &'static [&'static str],
    why: &'static str,
}

const RULES: [Rule; 7] = [
    Rule { words: &["todo!", "unimplemented!", "dbg!"], allowed_in: &[], why: "unfinished work is not committed" },
    Rule { words: &["#[ignore]"], allowed_in: &[], why: "an ignored test says why: #[ignore = \"reason\"]" },
    Rule {
        words: &["unsafe ", "unsafe(", "allow(unsafe_code)"],
        allowed_in: &[
            "src/device/cpu",
            "src/device/cuda",
            "src/host/pages.rs",
            "src/host/pinned.rs",
            "src/host/pool.rs",
            "src/engine/hops.rs",
            "src/engine/save/frozen_state.rs",
            "src/engine/step_job.rs",
            // They make devices, and promise what the maker of one must.
            "src/launch/open.rs",
            // A fork, and what the child does first.
            "src/data/sandbox/process.rs",
            "tests/gpu/run.rs",
            "microbench/src/bin/device_facts/main.rs",
            "src/optim/simd.rs",
            "src/optim/simd",
            "src/probe/mod.rs",
            "src/probe/states.rs",
            "src/probe/together.rs",
            "microbench/src/bin",
            "microbench/src/stream.rs",
            // Memory of torch's tensors, of which it knows addresses.
            "packaging/torch/src",
            "tests/alloc.rs",
            "third_party/cuda-driver-shim",
        ],
        why: "unsafe stays where lib.rs says it is",
    },
    Rule {
        words: &[
            "fp16_params",
            "sub_group",
            "momentum_buffer",
            "revert",
            "STAGES_AHEAD",
            "stage_range",
            "SlotRing",
            "Havoc",
            "Wishes",
            "obey(",
        ],
        // Its keys are DeepSpeed's.
        allowed_in: &["src/config/deepspeed.rs", "src/config/deepspeed_keys.rs", "src/config/deepspeed_tests.rs"],
        why: "one word per thing: params_bf16, bucket, m, module, free list, fault injector, request, run_commands",
    },
    Rule {
        words: &["println!", "eprintln!", "print!", "eprint!"],
        allowed_in: &["src/main.rs", "paper-figures", "microbench"],
        why: "only a main.rs talks to a person",
    },
    // No lock in the step: threads meet only in a `Doorbell`'s counters, a stream's queue of one producer and one consumer, the pool's
    // generation and the team's gate, all of them atomics; a waiter spins and then parks. Nor is there a lock below, in the allocator:
    // tests/alloc.rs. Ranks meet in the rendezvous between two steps alone; downloads and text are done before the first. Links and slice
    // connections belong to threads of sockets: a driver only tries a channel, and no thread holds the lock while it waits for a socket.
    Rule {
        words: &["Mutex", "RwLock", "Condvar", "LazyLock", "ReentrantLock"],
        allowed_in: &[
            "tests/alloc.rs",
            // Between the threads of a save; the driver meets them in `SaveBoard` alone.
            "src/checkpoint/placed_state.rs",
            "src/checkpoint/save_rate.rs",
            "src/checkpoint/writers.rs",
            // Of tests that count operations.
            "src/disk.rs",
            "src/engine/ranks/rendezvous.rs",
            "src/ranks/links.rs",
            "src/hub",
            "src/data/encode/pipeline.rs",
            "src/data/sandbox",
            "src/data/tokenizer/byte_level.rs",
        ],
        why: "the step takes no lock",
    },
    Rule {
        words: &["mpsc"],
        allowed_in: &[
            "src/host/pool.rs",
            "src/sync.rs",
            "src/data/encode/pipeline.rs",
            "src/checkpoint/engine_state.rs",
            "src/checkpoint/read_ahead.rs",
            "src/checkpoint/writers.rs",
            "tests/alloc.rs",
            // Before a step, between steps, or beside a search.
            "src/parallel.rs",
            "src/hub/download.rs",
            "src/search/progress.rs",
            "tests/hub.rs",
            "src/ranks/links.rs",
            "src/ranks/slice_connections.rs",
            "src/ranks/handshake_server.rs",
            "src/ranks/rendezvous.rs",
            "src/ranks/rendezvous_tests.rs",
            "src/ranks/progress_tests.rs",
        ],
        why: "a channel blocks: never within a step",
    },
];

#[test]
fn sources_follow_the_house_rules() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = sources(root);
    assert!(files.len() > 20, "found only {} files below {}", files.len(), root.display());
    let complaints: Vec<String> = files.iter().flat_map(|file| complaints(root, file)).collect();
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

/// Types that two builds define, each for itself: with a GPU, and without.
const TWINS: [&str; 2] = ["GpuDevice", "VisibleGpu"];

#[test]
fn every_type_of_the_engine_has_a_name_of_its_own() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut owners: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for file in sources(root) {
        let name = file.strip_prefix(root).unwrap().to_str().unwrap();
        if name.starts_with("src/") && !name.contains("tests") {
            let text = fs::read_to_string(&file).unwrap_or_else(|e| panic!("read {name}: {e}"));
            text.lines().filter_map(type_name).for_each(|ty| owners.entry(ty.into()).or_default().push(name.into()));
        }
    }
    assert!(owners.len() > 300, "found only {} types", owners.len());
    let doubles: Vec<_> = owners.iter().filter(|(name, files)| files.len() > 1 && !TWINS.contains(&name.as_str())).collect();
    assert!(doubles.is_empty(), "a search for one of these types finds another one: {doubles:#?}");
}

/// The type that `line` defines; modules of tests are indented.
fn type_name(line: &str) -> Option<&str> {
    let mut words = line.split(' ').skip_while(|word| word.starts_with("pub") || word.starts_with("super") || *word == "unsafe");
    words.next().filter(|keyword| ["struct", "enum", "trait", "type"].contains(keyword))?;
    words.next()?.split(|c: char| !c.is_alphanumeric() && c != '_').next()
}

#[test]
fn every_rule_bites() {
    for rule in &RULES {
        for word in rule.words {
            assert_eq!(broken_rules("src/x.rs", &format!("let x = 1; {word} {{")).len(), 1, "{word}");
            assert_eq!(broken_rules("src/x.rs", &format!("let x = 1; // {word}")).len(), 0, "{word}");
        }
        for allowed in rule.allowed_in {
            assert_eq!(broken_rules(allowed, rule.words[0]).len(), 0, "{allowed}");
        }
    }
    assert_eq!(broken_rules("src/host/pinned.rs.rs", "unsafe {").len(), 1);
}

/// Every Rust file but this one, whose table holds the words.
fn sources(root: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders: Vec<_> = SOURCES.iter().map(|folder| root.join(folder)).collect();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|e| panic!("list {}: {e}", folder.display())) {
            let path = entry.unwrap().path();
            match path.extension() {
                _ if path.is_dir() => folders.push(path),
                Some(extension) if extension == "rs" && path != root.join("tests/style.rs") => files.push(path),
                _ => {}
            }
        }
    }
    files.sort();
    files
}

fn complaints(root: &Path, file: &Path) -> Vec<String> {
    let text = fs::read_to_string(file).unwrap_or_else(|e| panic!("read {}: {e}", file.display()));
    let name = file.strip_prefix(root).unwrap().to_str().unwrap();
    let lines = text.lines().enumerate();
    let mut complaints: Vec<_> = lines
        .flat_map(|(index, line)| broken_rules(name, line).into_iter().map(move |why| format!("{name}:{}: {why}", index + 1)))
        .collect();
    let count = text.lines().count();
    if count > LINES_MAX && name.starts_with("src/") {
        complaints.push(format!("{name}: {count} lines, at most {LINES_MAX}"));
    }
    let too_long = functions(&text).into_iter().filter(|(_, lines)| *lines > FUNCTION_LINES_MAX);
    complaints.extend(too_long.map(|(line, lines)| format!("{name}: `{}` has {lines} lines, at most {FUNCTION_LINES_MAX}", line.trim())));
    complaints
}

/// The functions in `text`, which rustfmt has formatted: the line that each begins with, and how many it has.
fn functions(text: &str) -> Vec<(&str, usize)> {
    let indent = |line: &str| line.len() - line.trim_start().len();
    let begins = |line: &str| line.trim_start().split(' ').take_while(|word| *word != "fn").all(is_qualifier) && line.contains("fn ");
    let lines: Vec<&str> = text.lines().collect();
    let starts = (0..lines.len()).filter(|&at| begins(lines[at]));
    let length = |at: usize| {
        let ends = |line: &&str| indent(line) == indent(lines[at]) && (line.ends_with('}') || line.ends_with(';'));
        lines[at..].iter().position(ends).map_or(1, |behind| behind + 1)
    };
    starts.map(|at| (lines[at], length(at))).collect()
}

fn is_qualifier(word: &str) -> bool {
    word.starts_with("pub") || ["const", "unsafe", "async", "extern", "\"C\""].contains(&word)
}

#[test]
fn functions_are_measured_from_their_first_line_to_their_last() {
    let text =
        "impl A {\n    pub(crate) fn a(\n        x: u8,\n    ) -> u8 {\n        x\n    }\n\n    fn b(self);\n}\nfn c() {}\nlet fn_d = 1;\n";
    assert_eq!(functions(text), [("    pub(crate) fn a(", 5), ("    fn b(self);", 1), ("fn c() {}", 1)]);
}

/// Why `line` of the file `name` is against the rules.
fn broken_rules(name: &str, line: &str) -> Vec<&'static str> {
    let code = line.split("//").next().unwrap_or_default();
    let applies = |rule: &&Rule| !rule.allowed_in.iter().any(|allowed| Path::new(name).starts_with(allowed));
    let breaks = |rule: &&Rule| rule.words.iter().any(|word| code.contains(word));
    RULES.iter().filter(applies).filter(breaks).map(|rule| rule.why).collect()
}
