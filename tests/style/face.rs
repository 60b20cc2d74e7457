//! The public interface of the library: its size, its documentation, and that the documentation of `lib.rs` names it.

use std::fs;
use std::path::Path;

/// Limits of the types and functions that `lib.rs` re-exports, and of these with their methods and constants.
const NAMES_MAX: usize = 20;
const ITEMS_MAX: usize = 60;

/// The texts of all files of the library.
fn texts() -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let files = super::sources(root).into_iter().filter(|path| path.starts_with(root.join("src")));
    files.map(|path| fs::read_to_string(&path).unwrap_or_else(|e| panic!("read {}: {e}", path.display()))).collect()
}

/// Names that `lib` makes public, and a complaint for each public module except the hidden `internals`.
fn names(lib: &str) -> (Vec<String>, Vec<String>) {
    let code: String = lib.lines().filter(|line| !line.starts_with("//")).collect::<Vec<_>>().join("\n");
    let uses = code.split(';').filter_map(|item| item.trim().strip_prefix("pub use "));
    let last = |path: &str| path.rsplit("::").next().unwrap_or_default().trim().to_owned();
    let names = uses.flat_map(|path| match path.split_once('{') {
        Some((_, list)) => list.trim_end_matches('}').split(',').map(last).filter(|name| !name.is_empty()).collect(),
        None => vec![last(path)],
    });
    let modules = code.split(';').map(str::trim).filter(|item| item.contains("pub mod") && *item != "#[doc(hidden)]\npub mod internals");
    (names.collect(), modules.map(|item| format!("{item} is public")).collect())
}

/// The number of public methods and constants of the type or trait `name` in `text`, and a complaint for each without documentation.
fn methods(text: &str, name: &str) -> (usize, Vec<String>) {
    let (of_type, of_trait) = (format!("impl {name} {{"), format!("pub trait {name} {{"));
    // The prefix of items in the block, and the line that ends the block.
    let (mut begin, mut end) = ("", String::new());
    let (mut count, mut complaints, mut before) = (0, Vec::new(), "");
    for line in text.lines() {
        let item = line.trim_start();
        if item == of_type || item == of_trait {
            begin = if item == of_type { "pub " } else { "fn " };
            end = format!("{}}}", &line[..line.len() - item.len()]);
        } else if line == end {
            begin = "";
        } else if !begin.is_empty() && item.starts_with(begin) {
            count += 1;
            if !before.starts_with("///") && !before.starts_with("#[") {
                complaints.push(format!("{name}: no docs on `{item}`"));
            }
        }
        before = item;
    }
    (count, complaints)
}

/// Errors in the public interface that `lib` exports from `texts`.
fn complaints(lib: &str, texts: &[String]) -> Vec<String> {
    let (names, mut complaints) = names(lib);
    let mut items = names.len();
    for name in &names {
        let is_named = ["`]", "()`]", "`](", "()"].iter().any(|end| lib.contains(&format!("[`{name}{end}")));
        if !is_named {
            complaints.push(format!("{name} is not in the docs of lib.rs"));
        }
        for (count, missing) in texts.iter().map(|text| methods(text, name)) {
            items += count;
            complaints.extend(missing);
        }
    }
    if names.len() > NAMES_MAX {
        complaints.push(format!("{} types and functions, at most {NAMES_MAX}", names.len()));
    }
    if items >= ITEMS_MAX {
        complaints.push(format!("{items} items with their methods, fewer than {ITEMS_MAX}"));
    }
    complaints
}

#[test]
fn the_face_is_small_and_documented() {
    let lib = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("src/lib.rs")).unwrap();
    let complaints = complaints(&lib, &texts());
    assert!(complaints.is_empty(), "\n{}\n", complaints.join("\n"));
}

#[test]
fn each_fault_of_the_pages_is_detected() {
    let messages = |lib: &str, text: &str| complaints(lib, &[text.to_owned()]);
    assert_eq!(
        messages("//! [`A`]\nmod a;\n#[doc(hidden)]\npub mod internals;\npub use a::A;", "impl A {\n    /// Words.\n    pub fn f() {}\n}"),
        [""; 0]
    );
    assert_eq!(messages("pub mod a;", ""), ["pub mod a is public"]);
    assert_eq!(messages("pub use a::{A};", ""), ["A is not in the docs of lib.rs"]);
    assert_eq!(
        messages("//! [`A`]\npub use a::A;", "impl A {\n    pub fn f() {}\n    fn g() {}\n}\n    pub fn h() {}"),
        ["A: no docs on `pub fn f() {}`"]
    );
    assert_eq!(messages("//! [`T`]\npub use a::T;", "pub trait T {\n    fn f();\n}"), ["T: no docs on `fn f();`"]);
    let many: Vec<_> = (0..=NAMES_MAX).map(|n| format!("N{n}")).collect();
    let docs: String = many.iter().map(|name| format!("//! [`{name}`]\n")).collect();
    let methods: String = (0..ITEMS_MAX - NAMES_MAX - 1).map(|n| format!("    /// Words.\n    pub fn f{n}() {{}}\n")).collect();
    let found = messages(&format!("{docs}pub use a::{{{}}};", many.join(", ")), &format!("impl N0 {{\n{methods}}}"));
    assert_eq!(found, ["21 types and functions, at most 20", "60 items with their methods, fewer than 60"]);
}
