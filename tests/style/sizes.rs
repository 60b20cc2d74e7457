//! Sizes of traits and structs of `src/`. A trait or struct beyond them holds more than one idea.

use super::floors::{product, tokens};
use std::fs;
use std::path::Path;

/// Largest number of methods of a trait.
const METHODS_MAX: usize = 25;

/// Largest number of fields of a struct. Settings of a user are as many as there are flags.
const FIELDS_MAX: usize = 30;

/// Folder whose structs may have any number of fields.
const SETTINGS: &str = "src/config/";

#[test]
fn traits_and_structs_have_one_idea() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut complaints = Vec::new();
    for file in super::sources(root) {
        let name = file.strip_prefix(root).unwrap().to_str().unwrap();
        let text = fs::read_to_string(&file).unwrap_or_else(|e| panic!("read {name}: {e}"));
        let is_free = |fault: &Oversize| fault.keyword == "struct" && name.starts_with(SETTINGS);
        for fault in oversizes(&text).into_iter().filter(|fault| name.starts_with("src/") && !is_free(fault)) {
            complaints.push(format!("{name}: {} {} has {} members", fault.keyword, fault.name, fault.members));
        }
    }
    assert!(complaints.is_empty(), "a trait has at most {METHODS_MAX} methods, a struct {FIELDS_MAX} fields:\n{}\n", complaints.join("\n"));
}

#[test]
fn members_are_counted() {
    let methods =
        |count: usize| format!("pub(crate) trait T<D: Kernels>: A + B {{ {} }}", "fn f(x: [u8; 2]) -> u8 { if x { 1 } }".repeat(count));
    let fields = |count: usize| format!("struct S<C> {{ {} }}", "pub(super) f: Box<dyn Fn(u8) -> A<{ 1 }>>, g: (A, B),".repeat(count / 2));
    let of = |text: &str| oversizes(text).into_iter().map(|fault| (fault.keyword, fault.members)).collect::<Vec<_>>();
    assert_eq!((of(&methods(25)), of(&methods(26))), (vec![], vec![("trait", 26)]));
    assert_eq!((of(&fields(30)), of(&fields(32))), (vec![], vec![("struct", 32)]));
    assert_eq!(of("struct T(u8); struct U; fn f() { let trait_ = 1; }"), []);
    assert_eq!(of(&format!("#[cfg(test)] mod tests {{ {} }} {}", methods(26), fields(32))), [("struct", 32)]);
}

/// A trait or struct with too many members.
struct Oversize {
    keyword: &'static str,
    name: String,
    members: usize,
}

/// The traits and structs of `text` outside of tests that are too large.
fn oversizes(text: &str) -> Vec<Oversize> {
    let tokens = product(tokens(text));
    let mut found = Vec::new();
    for at in 0..tokens.len().saturating_sub(1) {
        let (keyword, max) = match tokens[at].as_str() {
            "trait" => ("trait", METHODS_MAX),
            "struct" => ("struct", FIELDS_MAX),
            _ => continue,
        };
        let members = members(&tokens[at..], if keyword == "trait" { "fn" } else { ":" });
        if members > max {
            found.push(Oversize { keyword, name: tokens[at + 1].clone(), members });
        }
    }
    found
}

/// How often `mark` stands in the braces of the item at the start of `tokens`, outside of inner brackets.
fn members(tokens: &[String], mark: &str) -> usize {
    let Some(begin) = tokens.iter().position(|token| token == "{" || token == ";").filter(|&begin| tokens[begin] == "{") else { return 0 };
    let (mut depth, mut members) = (0, 0);
    for (before, token) in tokens[begin..].iter().zip(&tokens[begin + 1..]) {
        match token.as_str() {
            "}" if depth == 0 => break,
            "{" | "(" | "[" | "<" => depth += 1,
            "}" | ")" | "]" => depth -= 1,
            ">" if before != "-" && before != "=" => depth -= 1,
            word if word == mark && depth == 0 => members += 1,
            _ => {}
        }
    }
    members
}
