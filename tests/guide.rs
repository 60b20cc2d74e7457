//! The guide: every chapter is listed, the program accepts its commands, and its flags are those of the program. Links are checked together
//! with those of all documents.

use crate::program::program;
use std::fs;
use std::path::{Path, PathBuf};

fn chapter(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/guide").join(name)
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Every file of the guide except its table of contents.
fn chapters() -> Vec<String> {
    let entries = fs::read_dir(chapter("")).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<_> = entries.filter(|name| name != "SUMMARY.md").collect();
    names.sort();
    names
}

#[test]
fn every_chapter_is_in_the_summary_once() {
    let summary = read(&chapter("SUMMARY.md"));
    let links = summary.lines().filter_map(|line| line.split_once("](")?.1.strip_suffix(')').map(String::from));
    let mut links: Vec<_> = links.collect();
    links.sort();
    assert_eq!(links, chapters());
    assert!(read(&chapter("../book.toml")).contains("src = \"guide\""));
}

/// The commands in ```console blocks. A backslash continues a line.
fn commands(text: &str) -> Vec<String> {
    let blocks = text.split("```console\n").skip(1).map(|rest| rest.split("```").next().unwrap_or_default().replace("\\\n", " "));
    let lines: Vec<String> = blocks.flat_map(|block| block.lines().map(String::from).collect::<Vec<_>>()).collect();
    lines.into_iter().filter(|line| line.starts_with("superoffload ")).collect()
}

/// The parser's error for a command with an added unknown flag. The parser reports that flag only if it has accepted all other arguments.
fn complaint(command: &str) -> String {
    let words = command.split('#').next().unwrap_or_default().split_whitespace().skip(1).map(|word| word.trim_matches('\''));
    let output = program(&[]).args(words).arg("--no-such-flag=1").output().unwrap();
    assert_eq!(output.status.code(), Some(2), "{command}: {output:?}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn commands_are_understood() {
    let mut count = 0;
    for name in chapters() {
        for command in commands(&read(&chapter(&name))) {
            let message = complaint(&command);
            assert!(message.contains("unexpected argument '--no-such-flag'"), "{name}: {command}: {message}");
            count += 1;
        }
    }
    assert!(count >= 20, "{count} commands");
    assert!(!complaint("superoffload train --lerning-rate 1").contains("no-such-flag"));
    assert!(!complaint("superoffload train --dtype int8").contains("no-such-flag"));
}

/// The flags of `train` as a table, from its help.
fn flags() -> String {
    let output = program(&["train", "--help"]).output().unwrap();
    let help = String::from_utf8(output.stdout).unwrap();
    let mut rows: Vec<(String, String)> = Vec::new();
    for line in help.lines().map(str::trim).skip_while(|line| *line != "Options:").skip(1).take_while(|line| !line.starts_with("Without "))
    {
        let (flag, words) = line.split_once("  ").map_or((line, ""), |(flag, words)| (flag, words.trim()));
        // The line of a value has the form `- word: meaning`.
        let value = line.strip_prefix("- ").and_then(|line| line.split_once(": "));
        match (["--", "-h, ", "-v, "].iter().any(|start| flag.starts_with(start)), rows.last_mut()) {
            (true, _) => rows.push((flag.trim_start_matches("-h, ").trim_start_matches("-v, ").into(), words.into())),
            (false, Some((_, help))) => match value {
                Some((word, meaning)) => *help += &format!("<br>`{word}`: {}", meaning.trim()),
                None => *help = format!("{help} {line}").trim().trim_end_matches(" Possible values:").to_string(),
            },
            _ => {}
        }
    }
    let cell = |text: &str| text.replace('|', "\\|");
    rows.iter().map(|(flag, help)| format!("| `{}` | {} |\n", cell(flag), cell(help))).collect()
}

/// `SUPEROFFLOAD_WRITE_FLAGS=1` writes the chapter.
#[test]
fn the_reference_has_the_flags_of_the_program() {
    let head = "# Flags\n\nFlags of `superoffload train`. The same names are the keys of a configuration file; other common names are\n\
                [understood, too](from-other-trainers.md).\n\n| flag | |\n|---|---|\n";
    let whole = format!("{head}{}", flags());
    if std::env::var_os("SUPEROFFLOAD_WRITE_FLAGS").is_some() {
        fs::write(chapter("flags.md"), &whole).unwrap();
    }
    assert!(
        whole.matches("\n| `--").count() > 70 && whole.contains("| `--seq-length <N>` | Tokens of a sequence [default: 1024] |"),
        "{whole}"
    );
    assert_eq!(read(&chapter("flags.md")), whole, "SUPEROFFLOAD_WRITE_FLAGS=1 cargo test --test main guide:: writes it again");
}
