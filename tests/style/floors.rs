//! The permitted imports between folders of `src/`. Folders of any depth, and files next to them, import each other without cycles.
//!
//! An import is a `use` of this crate, or an inline path that starts with `crate`, `super` or `self`, outside of tests. It refers to the
//! file that defines the name: re-exports are followed. A `pub use` whose name its own file does not need, or of all names of a module, only
//! forwards. A file that refers to its own submodules (`part::name` after `mod part;`) imports nothing.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Folders of `src/`, and files next to them, from the bottom floor up. Each may import its own floor and those below, without cycles.
const FLOORS: [&[&str]; 15] = [
    &[
        "describe",
        "disk",
        "dtype",
        "error",
        "faults",
        "hub",
        "memory",
        "model_dir",
        "objective",
        "pair_loss",
        "parallel",
        "policy_loss",
        "progress_event",
        "scalar",
        "signals",
        "sync",
        "teacher_loss",
        "trace",
        "units",
    ],
    &["data", "hardware", "optim"],
    &["bucket", "device", "host", "model", "ranks"],
    &["recipe"],
    &["request"],
    &["planner"],
    &["engine"],
    &["checkpoint", "facts", "metrics"],
    &["simulate"],
    &["search"],
    // Planner, search, engine and ranks know recipes, requests and plans, but no settings.
    &["config"],
    &["launch"],
    &["bench", "doctor", "probe", "report", "superchip", "train"],
    &["commands", "internals", "lib"],
    &["main"],
];

/// Imports by file or folder name.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// Segments of a path from the root of the crate.
pub(super) type Segments = Vec<String>;

struct Module {
    file: String,
    tokens: Vec<String>,
    uses: Vec<Use>,
}

/// One name of a `use`.
pub(super) struct Use {
    is_public: bool,
    pub(super) path: Segments,
    name: String,
}

#[test]
fn imports_keep_to_the_floors() {
    let complaints = complaints(&files_below("src"));
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[test]
fn other_programs_have_no_circles() {
    for folder in ["paper-figures/src", "resctrl/src"] {
        assert_eq!(a_circle(&imports(&modules(&files_below(folder)))), None, "{folder}");
    }
}

/// Names below `folder`, and texts, of its Rust files.
fn files_below(folder: &str) -> Vec<(String, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let text = |path: &Path| fs::read_to_string(path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()));
    let name = |path: &Path| path.strip_prefix(root.join(folder)).ok()?.to_str().map(str::to_owned);
    super::sources(root).into_iter().filter_map(|path| Some((name(&path)?, text(&path)))).collect()
}

#[test]
fn each_complaint_is_found() {
    let messages =
        |files: &[(&str, &str)]| complaints(&files.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect::<Vec<_>>());
    let lib = ("lib.rs", "mod bucket; mod host; mod engine;");
    let engine = ("engine/mod.rs", "mod a; mod b; pub use a::Step;");
    let (a, b) = (("engine/a.rs", "pub struct Step;"), ("engine/b.rs", "use super::Step;"));
    let up = ["host.rs imports engine/a.rs, which is on a higher floor"];
    let with = |host: &str| messages(&[lib, engine, a, b, ("bucket.rs", "pub use crate::engine::Step as S;"), ("host.rs", host)]);
    for host in [
        "use crate::engine::Step;",
        "use super::engine::{b, a::{self, Step as S}};",
        "fn f() { crate::engine::Step }",
        "use crate::{engine::Step};",
        "fn f<'a>(c: &'a char) { '\"'; super::engine::a::g(c) }",
    ] {
        assert!(with(host).contains(&up[0].to_string()), "{host}: {:?}", with(host));
    }
    assert_eq!(with("use crate::bucket::S;"), up, "through the re-export of a room that only passes the name on");
    for host in [
        "// use crate::engine::Step;\n/* crate::engine::Step */ const WORDS: &str = r#\"\"crate::engine::Step\"#;",
        "#[cfg(test)]\nmod tests { use crate::engine::Step; fn f() { if true {} } }\nuse crate::bucket::*;",
        "#[cfg(all(test, feature = \"stv\"))]\nuse crate::engine::{a, b};",
    ] {
        assert_eq!(with(host), [""; 0], "{host}");
    }
    let all = ("engine/mod.rs", "mod a; mod b; pub use a::*; fn f() { 2 * 2 }");
    let with_all = messages(&[lib, all, a, ("engine/b.rs", "use super::*;"), ("bucket.rs", ""), ("host.rs", "use crate::engine::Step;")]);
    assert_eq!(with_all, up, "through the re-export of all names");
    let circle =
        messages(&[lib, ("bucket.rs", "use crate::host::H;"), ("host.rs", "mod h; pub use h::H;"), ("host/h.rs", "pub struct H;")]);
    assert_eq!(circle, [""; 0]);
    let files =
        [lib, ("bucket.rs", "use crate::host::H;"), ("host.rs", "mod h; mod i; pub use h::H;"), ("host/i.rs", "use crate::bucket;")];
    assert_eq!(messages(&[&files[..], &[("host/h.rs", "")]].concat()), ["a circle of folders: bucket, host"]);
    let files = [lib, engine, ("engine/a.rs", "use super::b;"), b];
    assert_eq!(messages(&files), ["a circle of files: engine/a.rs, engine/b.rs"]);
    assert_eq!(messages(&[("lib.rs", "mod attic;"), ("attic.rs", "")]), ["attic stands on no floor"]);
}

#[test]
fn circles_of_folders_are_found_at_any_depth() {
    let files = |watch: &str, step: &str| {
        let files = [
            ("lib.rs", "mod engine;"),
            ("engine/mod.rs", "mod memory; mod watch; mod step;"),
            ("engine/memory/mod.rs", "mod states; mod shards;"),
            ("engine/memory/states.rs", "use crate::engine::watch::Watched; use super::shards::Shards;"),
            ("engine/memory/shards.rs", "pub struct Shards;"),
            ("engine/watch.rs", "mod parts; pub struct Watched;"),
            ("engine/watch/parts.rs", watch),
            ("engine/step.rs", step),
        ];
        complaints(&files.map(|(name, text)| (name.to_string(), text.to_string())))
    };
    assert_eq!(files("use super::Watched;", "use super::memory::shards::Shards; use super::watch::Watched;"), [""; 0]);
    let circle = ["a circle of folders: engine/memory, engine/watch"];
    assert_eq!(files("use crate::engine::memory::shards::Shards;", ""), circle);
    let circle = ["a circle of folders: engine/memory, engine/watch, engine/step"];
    assert_eq!(files("fn f() { crate::engine::step::g() }", "use super::memory::shards::Shards;"), circle);
}

/// Errors in `files`, which are names below `src/` with their texts.
fn complaints(files: &[(String, String)]) -> Vec<String> {
    let imports = imports(&modules(files));
    let mut complaints: Vec<_> =
        imports.keys().map(|file| folder(file)).filter(|folder| floor(folder).is_none()).collect::<BTreeSet<_>>().into_iter().collect();
    complaints.iter_mut().for_each(|folder| folder.push_str(" stands on no floor"));
    let edges = imports.iter().flat_map(|(file, targets)| targets.iter().map(move |target| (file, target)));
    let up = edges.filter(|(file, target)| floor(&folder(file)) < floor(&folder(target)));
    complaints.extend(up.map(|(file, target)| format!("{file} imports {target}, which is on a higher floor")));
    complaints.extend(a_circle(&imports));
    complaints
}

/// A cycle of files, or else one of folders.
fn a_circle(imports: &Graph) -> Option<String> {
    if let Some(files) = circle(imports) {
        return Some(format!("a circle of files: {}", files.join(", ")));
    }
    let mut folders = Graph::new();
    for (from, to) in imports.iter().flat_map(|(file, targets)| targets.iter().filter_map(|target| neighbours(file, target))) {
        folders.entry(from).or_default().insert(to);
    }
    circle(&folders).map(|folders| format!("a circle of folders: {}", folders.join(", ")))
}

/// The folders of one parent that hold `file` and `target`; `None` if one of the two lies in a folder of the other. A file that declares
/// modules is one with the folder of its name.
fn neighbours(file: &str, target: &str) -> Option<(String, String)> {
    let segments = |file: &str| file.trim_end_matches(".rs").trim_end_matches("/mod").split('/').map(str::to_owned).collect::<Segments>();
    let (from, to) = (segments(file), segments(target));
    let common = from.iter().zip(&to).take_while(|(from, to)| from == to).count();
    (common < from.len().min(to.len())).then(|| (from[..=common].join("/"), to[..=common].join("/")))
}

fn folder(file: &str) -> String {
    file.split('/').next().unwrap_or(file).trim_end_matches(".rs").to_owned()
}

fn floor(folder: &str) -> Option<usize> {
    FLOORS.iter().position(|folders| folders.contains(&folder))
}

/// A cycle of `graph`, if there is one, starting at its first name.
fn circle(graph: &Graph) -> Option<Vec<String>> {
    let mut graph = graph.clone();
    // A node without edges to the remaining ones is not part of a cycle.
    loop {
        let left: BTreeSet<_> = graph.keys().cloned().collect();
        graph.values_mut().for_each(|targets| targets.retain(|target| left.contains(target)));
        graph.retain(|_, targets| !targets.is_empty());
        if graph.len() == left.len() {
            break;
        }
    }
    let mut way = vec![graph.keys().next()?.clone()];
    loop {
        let next = graph[&way[way.len() - 1]].first()?.clone();
        if let Some(start) = way.iter().position(|name| *name == next) {
            let mut circle = way.split_off(start);
            let first = (0..circle.len()).min_by_key(|&i| circle[i].clone())?;
            circle.rotate_left(first);
            return Some(circle);
        }
        way.push(next);
    }
}

/// The modules that non-test code declares, by path, including `main`.
fn modules(files: &[(String, String)]) -> BTreeMap<Segments, Module> {
    let root = if files.iter().any(|(file, _)| file == "lib.rs") { "lib" } else { "main" };
    let path_of = |file: &str| -> Segments {
        let name = file.trim_end_matches(".rs").trim_end_matches("/mod");
        if name == root { Vec::new() } else { name.split('/').map(str::to_owned).collect() }
    };
    let mut modules: BTreeMap<_, _> = files
        .iter()
        .map(|(file, text)| {
            let tokens = product(tokens(text));
            (path_of(file), Module { file: file.clone(), uses: uses(&tokens), tokens })
        })
        .collect();
    // Parents come first, so that the submodules of a dropped module are dropped, too.
    for at in modules.keys().cloned().collect::<Vec<_>>() {
        let Some((name, parent)) = at.split_last() else { continue };
        let declares = |module: &Module| module.tokens.windows(3).any(|t| t[0] == "mod" && t[1] == *name && t[2] == ";");
        if name != "main" && !modules.get(parent).is_some_and(declares) {
            modules.remove(&at);
        }
    }
    modules
}

/// The imports of each file.
fn imports(modules: &BTreeMap<Segments, Module>) -> Graph {
    modules.iter().map(|(at, module)| (module.file.clone(), imported(modules, at))).collect()
}

/// The files that the module at `at` imports.
fn imported(modules: &BTreeMap<Segments, Module>, at: &Segments) -> BTreeSet<String> {
    let module = &modules[at];
    let needs = |name: &String| name != "*" && without_uses(&module.tokens).contains(&name);
    let used = module.uses.iter().filter(|item| !item.is_public || needs(&item.name)).map(|item| item.path.clone());
    let inline = paths(&module.tokens);
    let targets = used.chain(inline).filter_map(|path| absolute(modules, at, &path)).map(|path| file_of(modules, path, 0));
    targets.filter(|file| *file != module.file).collect()
}

/// The absolute path in this crate; `None` if it refers to another crate.
fn absolute(modules: &BTreeMap<Segments, Module>, at: &Segments, path: &[String]) -> Option<Segments> {
    let supers = path.iter().take_while(|segment| *segment == "super").count();
    let relative = |rest: &[String]| [&at[..at.len().saturating_sub(supers)], rest].concat();
    match path.first()?.as_str() {
        "crate" | "superoffload" => Some(path[1..].to_vec()),
        "self" => Some(relative(&path[1..])),
        "super" => Some(relative(&path[supers..])),
        _ => Some(relative(path)).filter(|_| modules.contains_key(&relative(&path[..1]))),
    }
}

/// The file that defines the name `path`.
fn file_of(modules: &BTreeMap<Segments, Module>, path: Segments, depth: usize) -> String {
    let at = (0..=path.len()).rev().map(|end| &path[..end]).find(|start| modules.contains_key(*start)).expect("lib.rs is the root");
    let (module, rest) = (&modules[at], &path[at.len()..]);
    let target = rest.first().and_then(|name| passed_on(modules, at, name, depth));
    match target {
        Some(target) if depth < 8 => file_of(modules, [&target, &rest[1..]].concat(), depth + 1),
        _ => module.file.clone(),
    }
}

/// The absolute path of `name` if the module at `at` imports it, by its name or with all names of a module that has it.
fn passed_on(modules: &BTreeMap<Segments, Module>, at: &[String], name: &String, depth: usize) -> Option<Segments> {
    let uses = &modules[at].uses;
    if let Some(item) = uses.iter().find(|item| item.name == *name) {
        return absolute(modules, &at.to_vec(), &item.path);
    }
    let globs = uses.iter().filter(|item| item.is_public && item.name == "*" && depth < 8);
    let mut of_all = globs.filter_map(|item| absolute(modules, &at.to_vec(), &item.path)).filter(|target| modules.contains_key(target));
    of_all.find(|target| defines(&modules[target], name) || passed_on(modules, target, name, depth + 1).is_some()).map(|mut target| {
        target.push(name.clone());
        target
    })
}

/// Whether an item of the module is called so.
fn defines(module: &Module, name: &String) -> bool {
    let kinds = ["struct", "enum", "trait", "fn", "const", "static", "type", "mod"];
    module.tokens.windows(2).any(|words| kinds.contains(&words[0].as_str()) && words[1] == *name)
}

/// Identifiers, `::` and other symbols, without comments, strings and characters.
pub(super) fn tokens(text: &str) -> Vec<String> {
    let (mut tokens, mut rest) = (Vec::new(), text);
    let after = |text: &str, end: &str| text.find(end).map_or("", |at| &text[at + end.len()..]).len();
    while let Some(first) = rest.chars().next() {
        let word = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        let quote = rest[word..].trim_start_matches('#');
        let skipped = match &rest[..word] {
            "" if rest.starts_with("//") => rest.len() - after(rest, "\n"),
            "" if rest.starts_with("/*") => rest.len() - after(rest, "*/"),
            "" if first == '"' => string(rest),
            "" if first == '\'' => character(rest),
            "r" | "br" if quote.starts_with('"') => {
                let end = format!("\"{}", "#".repeat(rest.len() - word - quote.len()));
                rest.len() - after(&quote[1..], &end)
            }
            "" if rest.starts_with("::") => 2,
            "" => first.len_utf8(),
            _ => word,
        };
        let is_code = word > 0 && !(quote.starts_with('"') && ["r", "br"].contains(&&rest[..word])) || rest.starts_with("::");
        if is_code || word == 0 && skipped == first.len_utf8() && !first.is_whitespace() {
            tokens.push(rest[..skipped].to_owned());
        }
        rest = &rest[skipped..];
    }
    tokens
}

/// Length of the string literal at the start of `text`.
fn string(text: &str) -> usize {
    let mut escaped = true;
    let end = text.find(|c| {
        let ends = c == '"' && !escaped;
        escaped = c == '\\' && !escaped;
        ends
    });
    end.map_or(text.len(), |end| end + 1)
}

/// Length of the character literal at the start of `text`, or of the quote of a lifetime.
fn character(text: &str) -> usize {
    let inner = text[1..].chars().next().map_or(0, char::len_utf8);
    match text[1..].strip_prefix('\\') {
        Some(escape) => escape[1..].find('\'').map_or(text.len(), |end| end + 4),
        None if text[1 + inner..].starts_with('\'') => inner + 2,
        None => 1,
    }
}

/// The tokens without test items.
pub(super) fn product(tokens: Vec<String>) -> Vec<String> {
    let (mut kept, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        let words = tokens[at..].iter().take(7).map(String::as_str).collect::<Vec<_>>().concat();
        if words.starts_with("#[cfg(test)]") || words.starts_with("#[cfg(all(test") {
            at += item(&tokens[at..]);
        } else {
            kept.push(tokens[at].clone());
            at += 1;
        }
    }
    kept
}

/// Length of the item at the start of `tokens`: up to a `;`, to its closing brace, or to that of the enclosing block.
fn item(tokens: &[String]) -> usize {
    let mut open = 0;
    let end = tokens.iter().position(|token| {
        let closes = token == "}";
        open += i32::from(token == "{") - i32::from(closes);
        open < 0 || open == 0 && (closes || token == ";")
    });
    end.map_or(tokens.len(), |end| if open < 0 { end } else { end + 1 })
}

pub(super) fn uses(tokens: &[String]) -> Vec<Use> {
    let mut uses = Vec::new();
    for at in (0..tokens.len()).filter(|&at| is_use(&tokens[at..])) {
        let is_public = tokens[..at].iter().rev().take_while(|t| !["}", ";", "{", "]"].contains(&t.as_str())).any(|token| token == "pub");
        let end = tokens[at..].iter().position(|token| token == ";").map_or(tokens.len(), |end| at + end);
        tree(&tokens[at + 1..end], &[], &mut |path, name| uses.push(Use { is_public, path, name }));
    }
    uses
}

/// Calls `each` with every path of a `use` and its local name.
fn tree(tokens: &[String], before: &[String], each: &mut impl FnMut(Segments, String)) {
    let mut path = before.to_vec();
    let mut rest = tokens.iter().enumerate().filter(|(_, token)| *token != "::");
    while let Some((at, token)) = rest.next() {
        match token.as_str() {
            "{" => {
                let mut depth = 0;
                let comma = |token: &String| {
                    depth += i32::from(token == "{") - i32::from(token == "}");
                    depth == 0 && token == ","
                };
                let inner = &tokens[at + 1..tokens.iter().rposition(|token| token == "}").unwrap_or(tokens.len())];
                inner.split(comma).filter(|branch| !branch.is_empty()).for_each(|branch| tree(branch, &path, each));
                return;
            }
            "as" => {
                let name = rest.next().map_or_else(String::new, |(_, name)| name.clone());
                return each(path, name);
            }
            "*" => return each(path, "*".into()),
            "self" if !path.is_empty() => {}
            _ => path.push(token.clone()),
        }
    }
    let name = path.last().cloned().unwrap_or_default();
    each(path, name);
}

/// Whether `tokens` start with a `use` item, and not with the bound `+ use<>`.
fn is_use(tokens: &[String]) -> bool {
    tokens[0] == "use" && tokens.get(1).is_some_and(|next| next != "<")
}

/// The tokens outside of `use` and `mod` items.
fn without_uses(tokens: &[String]) -> Vec<&String> {
    let (mut kept, mut at) = (Vec::new(), 0);
    while at < tokens.len() {
        if is_use(&tokens[at..]) || tokens[at] == "mod" && tokens.get(at + 2).is_some_and(|end| end == ";") {
            at += tokens[at..].iter().position(|token| token == ";").unwrap_or(tokens.len() - at);
        } else {
            kept.push(&tokens[at]);
        }
        at += 1;
    }
    kept
}

/// Inline paths of this crate.
fn paths(tokens: &[String]) -> Vec<Segments> {
    let tokens = without_uses(tokens);
    let is = |at: usize, word: &str| tokens.get(at).is_some_and(|token| *token == word);
    let starts = |at: usize| {
        let is_root = ["crate", "super", "self", "superoffload"].iter().any(|word| is(at, word));
        is_root && is(at + 1, "::") && (at == 0 || !is(at - 1, "::"))
    };
    let path = |at: usize| {
        tokens[at..].chunks(2).scan(true, |is_path, pair| {
            let segment = is_path.then(|| pair[0].clone());
            *is_path = pair.get(1).is_some_and(|token| *token == "::");
            segment
        })
    };
    (0..tokens.len()).filter(|&at| starts(at)).map(|at| path(at).collect()).collect()
}
