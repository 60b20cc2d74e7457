//! Plain English as a test: how often prose leaves the noun out ("what is kept", "whose it is") or lets data speak ("the plan says"), for each 1000
//! words, and doc comments that do not begin with their subject.

use std::fs;
use std::path::{Path, PathBuf};

/// Words of each kind that are counted.
const COUNTED: [(&str, &[&str]); 3] = [
    ("what", &["what", "whatever"]),
    ("who", &["who", "whose", "whom", "whoever"]),
    ("tell, say or hear", &["tell", "tells", "told", "say", "says", "said", "hear", "hears", "heard"]),
];
/// Most of them for each 1000 words of pages and of docstrings.
pub(super) const OF_PAGES: [f64; 3] = [2.0, 1.0, 1.0];
/// Most of them for each 1000 words of comments.
const OF_COMMENTS: [f64; 3] = [4.0, 1.5, 2.0];
/// Pages that are counted alone, and folders with pages that are counted together.
const PAGES: [&str; 3] = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"];
const FOLDERS: [&str; 8] = ["docs/guide", "docs", "src", "tests", "examples", "paper-figures", "ptx", "resctrl"];
/// Beginnings of a doc comment that name no subject.
const HEADLESS: [&str; 7] = ["What", "Whose", "Of its", "As there", "The same", "Those", "That"];

pub(super) fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()))
}

/// Words of `text`: runs of letters and apostrophes.
pub(super) fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_ascii_alphabetic() || c == '\'')).filter(|word| !word.is_empty())
}

/// Complaints about `text`, which is `name`, where a kind of word is more frequent than `bounds` allow.
pub(super) fn complaints(name: &str, text: &str, bounds: [f64; 3]) -> Vec<String> {
    let all = words(text).count().max(1) as f64;
    let count = |kind: &[&str]| words(text).filter(|word| kind.contains(&word.to_ascii_lowercase().as_str())).count() as f64;
    let rates = COUNTED.iter().map(|(kind, listed)| (kind, 1000.0 * count(listed) / all));
    let over = rates.zip(bounds).filter(|((_, rate), bound)| rate > bound);
    over.map(|((kind, rate), bound)| format!("{name}: {rate:.1} \"{kind}\" for each 1000 words, at most {bound}")).collect()
}

/// `text` without its parts from `open` to `close`, for each of which `instead` stands.
pub(super) fn without(text: &str, open: &str, close: &str, instead: &str) -> String {
    let (mut out, mut rest) = (String::new(), text);
    while let Some((before, behind)) = rest.split_once(open) {
        let Some((_, after)) = behind.split_once(close) else { break };
        out += before;
        out += instead;
        rest = after;
    }
    out + rest
}

/// The prose of a page: without blocks of code, tables, code in lines, targets of links and HTML tags.
fn prose(page: &str) -> String {
    let text = without(page, "```", "```", "");
    let is_prose = |line: &&str| !line.trim_start().starts_with('|') && !line.starts_with("    ");
    let text = text.lines().filter(is_prose).collect::<Vec<_>>().join("\n");
    let text = without(&text, "`", "`", "X");
    without(&without(&text, "](", ")", ""), "<", ">", "")
}

/// Pages in `folder` and in its folders, without the log of measurements.
fn pages(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).unwrap_or_else(|e| panic!("list {}: {e}", folder.display()));
    let (folders, files): (Vec<_>, Vec<_>) = entries.map(|entry| entry.unwrap().path()).partition(|path| path.is_dir());
    let files = files.into_iter().filter(|path| path.extension().is_some_and(|end| end == "md"));
    let folders = folders.iter().filter(|folder| !folder.ends_with("paper-figures/log"));
    files.chain(folders.flat_map(|folder| pages(folder))).collect()
}

/// Comments of the Rust code `text`, a line each, without code in them.
fn comments(text: &str) -> String {
    let lines = text.lines().filter_map(|line| line.trim_start().strip_prefix("//"));
    let lines = lines.map(|line| without(line.trim_start_matches(['/', '!']), "`", "`", "X"));
    lines.collect::<Vec<_>>().join("\n")
}

/// Whether a line of code is the first of a doc comment, after the line `before`, and does not begin with its subject.
fn is_headless(before: &str, line: &str) -> bool {
    let doc = |line: &str| line.trim_start().strip_prefix("///").or(line.trim_start().strip_prefix("//!")).map(str::to_owned);
    let begins =
        |text: &str| HEADLESS.iter().any(|head| text.trim_start().strip_prefix(head).is_some_and(|rest| rest.starts_with([' ', ','])));
    doc(before).is_none_or(|before| before.trim().is_empty()) && doc(line).is_some_and(|text| begins(&text))
}

#[test]
fn pages_and_comments_name_their_subjects() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut wrong = Vec::new();
    for page in PAGES {
        wrong.extend(complaints(page, &prose(&read(&root.join(page))), OF_PAGES));
    }
    for folder in FOLDERS {
        let pages = pages(&root.join(folder));
        assert!(!pages.is_empty(), "no page in {folder}");
        let all: String = pages.iter().map(|path| prose(&read(path)) + "\n").collect();
        wrong.extend(complaints(folder, &all, OF_PAGES));
    }
    let sources: Vec<_> = super::sources(root).into_iter().filter(|path| path.starts_with(root.join("src"))).collect();
    let all: String = sources.iter().map(|path| comments(&read(path)) + "\n").collect();
    wrong.extend(complaints("comments in src", &all, OF_COMMENTS));
    for path in &sources {
        let text = read(path);
        let lines: Vec<&str> = text.lines().collect();
        let pairs = [""].into_iter().chain(lines.iter().copied()).zip(&lines);
        let headless = pairs.enumerate().filter(|(_, (before, line))| is_headless(before, line));
        wrong.extend(headless.map(|(at, (_, line))| format!("{}:{}: {}", path.display(), at + 1, line.trim())));
    }
    assert!(wrong.is_empty(), "name the subject by its noun:\n{}", wrong.join("\n"));
}

#[test]
fn the_counts_see_prose_alone() {
    let page = "Who says what?\n\n    what indented\n\n```\nwhat fenced\n```\n| what | table |\n`what` [link](what.md) <b what>\n";
    assert_eq!(words(&prose(page)).collect::<Vec<_>>(), ["Who", "says", "what", "X", "link"]);
    let found = complaints("page", &prose(page), OF_PAGES);
    assert_eq!(found[0], "page: 200.0 \"what\" for each 1000 words, at most 2");
    assert_eq!(found.len(), 3);
    assert_eq!(comments("let a = 1; // none\n    /// What `who` is.\n//! Told.\n"), " What X is.\n Told.");
    assert!(
        is_headless("}", "/// What is kept.") && is_headless("///", "    //! Those, too.") && is_headless("", "/// The same for weights.")
    );
    assert!(
        !is_headless("/// The slices", "/// That are sent.") && !is_headless("}", "/// Thatched.") && !is_headless("}", "// What is kept.")
    );
}
