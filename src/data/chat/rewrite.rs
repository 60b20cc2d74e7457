//! Rewrites operations on which the template engine and Python differ as calls of functions that behave as Python does.
//!
//! The engine has no hook for its operators, so they are written otherwise before a template is compiled:
//!
//! | source | becomes | Python |
//! |---|---|---|
//! | `for x in VALUE` | `for x in (VALUE)\|_each` | None is an error |
//! | `for k, v in VALUE` | `for k, v in (VALUE)\|_each_unpacked` | a text is unpacked into its characters, too |
//! | `VALUE[1:]` | `_sliced(VALUE)[1:]` | None and undefined values are errors |
//! | `LEFT % RIGHT` | `_modulo(LEFT, RIGHT)` | a text is a format |
//! | `LEFT < RIGHT` | `_less(LEFT, RIGHT)` | values of different types are errors |
//! | `LEFT in RIGHT` | `_in(LEFT, RIGHT)` | in a text there is nothing but text |
//!
//! An operator with ambiguous operands is not rewritten.

use super::bounds::{next_tag, tag_bytes, token_bytes};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Words that are no operand.
const KEYWORDS: [&str; 12] = ["and", "or", "not", "in", "is", "if", "else", "elif", "for", "set", "recursive", "do"];
/// Comparisons, and the functions that take their place.
const COMPARISONS: [(&str, &str); 6] =
    [("<", "_less("), ("<=", "_less_equal("), (">", "_greater("), (">=", "_greater_equal("), ("in", "_in("), ("not in", "_not_in(")];
/// Operators that bind as tightly as `%`.
const PRODUCTS: [&str; 4] = ["*", "/", "//", "%"];

/// `source` with calls in place of such operations.
pub(super) fn like_python(source: &str) -> String {
    let (mut out, mut rest) = (String::with_capacity(source.len() + 64), source);
    while let Some(at) = next_tag(rest) {
        let (text, from) = rest.split_at(at);
        let (tag, after) = from.split_at(tag_bytes(from));
        out.push_str(text);
        match tag.as_bytes()[1] {
            b'#' => out.push_str(tag),
            _ => out.push_str(&TagTokens::read(tag).rewritten()),
        }
        rest = match raw_bytes(tag, after) {
            0 => after,
            raw => {
                out.push_str(&after[..raw]);
                &after[raw..]
            }
        };
    }
    out.push_str(rest);
    out
}

/// Bytes of the text after a tag that opens a raw block.
fn raw_bytes(tag: &str, after: &str) -> usize {
    let is_raw = tag.starts_with("{%") && tag[2..].trim_start_matches(['-', '+']).trim_start().starts_with("raw");
    if is_raw { after.find("endraw").unwrap_or(after.len()) } else { 0 }
}

/// The words and signs of a tag.
struct TagTokens<'a> {
    tag: &'a str,
    /// Where each begins, and its text.
    tokens: Vec<(usize, &'a str)>,
    /// For each bracket the index of its partner.
    partners: BTreeMap<usize, usize>,
    is_statement: bool,
}

/// Text around a part of a tag.
struct Wrap {
    start: usize,
    end: usize,
    open: &'static str,
    close: &'static str,
}

#[derive(Default)]
struct Changes {
    wraps: Vec<Wrap>,
    /// Bytes of operators that become commas, by where they begin.
    commas: BTreeMap<usize, usize>,
}

impl<'a> TagTokens<'a> {
    fn read(tag: &'a str) -> Self {
        let (mut at, mut tokens) = (2, Vec::new());
        let end = tag.len().saturating_sub(2).max(at);
        while at < end {
            let double = tag.get(at..at + 2).filter(|pair| at + 2 <= end && ["**", "//", "==", "!=", "<=", ">="].contains(pair));
            let bytes = double.map_or_else(|| token_bytes(&tag.as_bytes()[at..end]), str::len).min(end - at);
            let Some(token) = tag.get(at..at + bytes) else { break };
            if !token.trim().is_empty() {
                tokens.push((at, token));
            }
            at += bytes;
        }
        // The signs of white space control.
        tokens.retain(|(at, token)| !(matches!(*token, "-" | "+") && (*at == 2 || at + 1 == end)));
        let partners = partners(&tokens);
        Self { tag, tokens, partners, is_statement: tag.as_bytes()[1] == b'%' }
    }

    fn text(&self, idx: usize) -> &'a str {
        self.tokens.get(idx).map_or("", |(_, token)| token)
    }

    fn end_of(&self, idx: usize) -> usize {
        self.tokens[idx].0 + self.tokens[idx].1.len()
    }

    /// Whether the token may end an operand.
    fn ends_operand(&self, idx: usize) -> bool {
        let token = self.text(idx);
        let is_name_of_tag = self.is_statement && idx == 0;
        !is_name_of_tag && (matches!(token, ")" | "]" | "}") || self.is_word(idx))
    }

    /// Whether the token is a name, a number or a text.
    fn is_word(&self, idx: usize) -> bool {
        let token = self.text(idx);
        let first = token.chars().next().unwrap_or(' ');
        (first.is_alphanumeric() || matches!(first, '_' | '"' | '\'')) && !KEYWORDS.contains(&token)
    }

    /// The first token of the value that ends with this token: a name, text or bracket with attributes, calls, subscripts and filters.
    fn value_start(&self, mut idx: usize) -> Option<usize> {
        loop {
            if !self.ends_operand(idx) {
                return None;
            }
            if let Some(opener) = self.partners.get(&idx) {
                let continues = matches!(self.text(*opener), "(" | "[") && *opener > 0 && self.ends_operand(opener - 1);
                if !continues {
                    return Some(*opener);
                }
                idx = opener - 1;
            } else if idx >= 2 && matches!(self.text(idx - 1), "." | "|") {
                idx -= 2;
            } else {
                return Some(idx);
            }
        }
    }

    /// The last token of the value that begins with this token, signs and powers included.
    fn value_end(&self, mut idx: usize) -> Option<usize> {
        while matches!(self.text(idx), "-" | "+") {
            idx += 1;
        }
        let mut end = match self.partners.get(&idx) {
            Some(partner) if *partner > idx => *partner,
            None if self.is_word(idx) => idx,
            _ => return None,
        };
        loop {
            end = match self.text(end + 1) {
                "." | "|" if self.is_word(end + 2) => end + 2,
                "(" | "[" => *self.partners.get(&(end + 1))?,
                "**" => self.value_end(end + 2)?,
                _ => return Some(end),
            };
        }
    }

    fn rewritten(&self) -> String {
        let mut changes = Changes::default();
        self.loops(&mut changes);
        for idx in 1..self.tokens.len() {
            match self.text(idx) {
                "[" => self.slice(idx, &mut changes),
                "%" => self.modulo(idx, &mut changes),
                _ => self.comparison(idx, &mut changes),
            }
        }
        changes.apply(self.tag)
    }

    /// Wraps the value that a loop iterates over.
    fn loops(&self, changes: &mut Changes) {
        let Some(of) = self.loops_in() else { return };
        let end = self.outside(of + 1, &["if", "recursive"]);
        if of + 1 >= end {
            return;
        }
        let unpacks = (1..of).any(|idx| self.text(idx) == ",");
        let close = if unpacks { ")|_each_unpacked" } else { ")|_each" };
        changes.wraps.push(Wrap { start: self.tokens[of + 1].0, end: self.end_of(end - 1), open: "(", close });
    }

    /// A subscript with a colon outside of further brackets.
    fn slice(&self, idx: usize, changes: &mut Changes) {
        let Some(closer) = self.partners.get(&idx).filter(|closer| **closer > idx) else { return };
        let (mut at, mut is_slice) = (idx + 1, false);
        while at < *closer {
            is_slice |= self.text(at) == ":";
            at = self.partners.get(&at).copied().unwrap_or(at) + 1;
        }
        if let Some(start) = self.value_start(idx - 1).filter(|_| is_slice) {
            changes.wraps.push(Wrap { start: self.tokens[start].0, end: self.end_of(idx - 1), open: "_sliced(", close: ")" });
        }
    }

    fn modulo(&self, idx: usize, changes: &mut Changes) {
        let operands = || Some((self.value_start(idx - 1)?, self.value_end(idx + 1)?));
        let Some((start, end)) = operands() else { return };
        let before = start.checked_sub(1).map_or("", |before| self.text(before));
        let is_sign = matches!(before, "-" | "+") && !(start >= 2 && self.ends_operand(start - 2));
        if PRODUCTS.contains(&before) || before == "**" || is_sign {
            return;
        }
        changes.call([idx, idx], self, [start, end], "_modulo(");
    }

    fn comparison(&self, idx: usize, changes: &mut Changes) {
        let is_negated = self.text(idx) == "in" && self.text(idx - 1) == "not";
        let sign = if is_negated { "not in" } else { self.text(idx) };
        let Some((_, open)) = COMPARISONS.iter().find(|(of, _)| *of == sign).filter(|_| Some(idx) != self.loops_in()) else { return };
        let first = idx - usize::from(is_negated);
        let operands = || Some([self.compared_start(first)?, self.compared_end(idx)?]);
        if let Some(range) = operands() {
            changes.call([first, idx], self, range, open);
        }
    }

    /// The word between the variables of a loop and its list.
    fn loops_in(&self) -> Option<usize> {
        (self.is_statement && self.text(0) == "for").then(|| self.outside(1, &["in"]))
    }

    /// The first token outside of brackets that is one of `words`.
    fn outside(&self, from: usize, words: &[&str]) -> usize {
        let mut idx = from;
        while idx < self.tokens.len() && !words.contains(&self.text(idx)) {
            idx = self.partners.get(&idx).copied().filter(|partner| *partner > idx).unwrap_or(idx) + 1;
        }
        idx
    }

    /// The first token of the left operand of a comparison, unless this operand is another comparison.
    fn compared_start(&self, operator: usize) -> Option<usize> {
        let mut idx = operator;
        while idx > 0 {
            let before = idx - 1;
            match self.text(before) {
                "and" | "or" | "not" | "if" | "elif" | "else" | "," | ":" | "=" | "(" | "[" | "{" => break,
                "in" | "is" | "==" | "!=" | "<" | "<=" | ">" | ">=" => return None,
                _ if self.is_statement && before == 0 => break,
                _ => idx = self.partners.get(&before).copied().filter(|opener| *opener < before).unwrap_or(before),
            }
        }
        (idx < operator).then_some(idx)
    }

    /// The last token of the right operand of a comparison, unless this operand is another comparison.
    fn compared_end(&self, operator: usize) -> Option<usize> {
        let mut idx = operator;
        while idx + 1 < self.tokens.len() {
            let next = idx + 1;
            match self.text(next) {
                "and" | "or" | "if" | "else" | "," | ":" | ")" | "]" | "}" | "recursive" => break,
                "not" | "in" | "is" | "==" | "!=" | "<" | "<=" | ">" | ">=" => return None,
                _ => idx = self.partners.get(&next).copied().filter(|closer| *closer > next).unwrap_or(next),
            }
        }
        (idx > operator).then_some(idx)
    }
}

impl Changes {
    /// The operator between these tokens becomes the comma of a call that begins with `open`.
    fn call(&mut self, [first, last]: [usize; 2], tokens: &TagTokens<'_>, [start, end]: [usize; 2], open: &'static str) {
        let at = tokens.tokens[first].0;
        self.commas.insert(at, tokens.end_of(last) - at);
        self.wraps.push(Wrap { start: tokens.tokens[start].0, end: tokens.end_of(end), open, close: ")" });
    }

    /// `tag` with these changes.
    fn apply(mut self, tag: &str) -> String {
        if self.wraps.is_empty() {
            return tag.into();
        }
        // Of those that begin at one place the longest is outside, and of those that end at one place the shortest is inside.
        self.wraps.sort_by_key(|wrap| (wrap.start, Reverse(wrap.end)));
        let mut closes: Vec<(usize, Reverse<usize>, &str)> =
            self.wraps.iter().map(|wrap| (wrap.end, Reverse(wrap.start), wrap.close)).collect();
        closes.sort();
        let (mut opens, mut closes) = (self.wraps.iter().peekable(), closes.into_iter().peekable());
        let (mut out, mut skipped) = (String::with_capacity(tag.len() + 32), 0);
        for (at, c) in tag.char_indices() {
            while let Some((_, _, close)) = closes.next_if(|(end, _, _)| *end <= at) {
                out.push_str(close);
            }
            while let Some(wrap) = opens.next_if(|wrap| wrap.start <= at) {
                out.push_str(wrap.open);
            }
            if let Some(bytes) = self.commas.get(&at) {
                out.push(',');
                skipped = at + bytes;
            }
            // An error names its line.
            if at >= skipped || c == '\n' {
                out.push(c);
            }
        }
        out
    }
}

/// For each bracket the index of its partner.
fn partners(tokens: &[(usize, &str)]) -> BTreeMap<usize, usize> {
    let (mut open, mut partners) = (Vec::new(), BTreeMap::new());
    for (idx, (_, token)) in tokens.iter().enumerate() {
        match *token {
            "(" | "[" | "{" => open.push(idx),
            ")" | "]" | "}" => {
                if let Some(opener) = open.pop() {
                    partners.extend([(opener, idx), (idx, opener)]);
                }
            }
            _ => {}
        }
    }
    partners
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_become_calls_where_their_operands_are_certain() {
        for (source, expected) in [
            ("{%- for x in y -%}", "{%- for x in (y)|_each -%}"),
            ("{% for k, v in a.items() if v in b %}", "{% for k, v in (a.items())|_each_unpacked if _in(v , b) %}"),
            ("{% for x in [1, 2] + f(a in b) recursive %}", "{% for x in ([1, 2] + f(_in(a , b)))|_each recursive %}"),
            ("{{ a.b(c)[1:]|d }}", "{{ _sliced(a.b(c))[1:]|d }}"),
            ("{{ a[b[1:]][c:{'d': 1}.d] }}", "{{ _sliced(a[_sliced(b)[1:]])[c:{'d': 1}.d] }}"),
            ("{{ [1:] }} {{ a[{'b': 1}] }} {{ (a)[:1] }}", "{{ [1:] }} {{ a[{'b': 1}] }} {{ _sliced((a))[:1] }}"),
            ("{% if x[1:] %}{% if (x)[1:] %}", "{% if _sliced(x)[1:] %}{% if _sliced((x))[1:] %}"),
            ("{{ 'a %s' % b.c|d(e) ~ f }}", "{{ _modulo('a %s' , b.c|d(e)) ~ f }}"),
            ("{{ -7 % 3 }}{{ 2 * 7 % 3 }}{{ 1 - a % -b }}", "{{ -7 % 3 }}{{ 2 * 7 % 3 }}{{ 1 - _modulo(a , -b) }}"),
            ("{{ a % b % c }}{{ '%s' % (a, b[1:]) }}", "{{ _modulo(a , b) % c }}{{ _modulo('%s' , (a, _sliced(b)[1:])) }}"),
            ("{%- if a|length < 2 and not b + 1 >= c -%}", "{%- if _less(a|length , 2) and not _greater_equal(b + 1 , c) -%}"),
            ("{{ a < b < c }}{{ a in b < c }}{{ 'a < b' }}", "{{ a < b < c }}{{ a in b < c }}{{ 'a < b' }}"),
            ("{{ f(x=a>b, y=[c<=d]) }}", "{{ f(x=_greater(a,b), y=[_less_equal(c,d)]) }}"),
            ("{% for x in y if x not in z %}", "{% for x in (y)|_each if _not_in(x , z) %}"),
            ("{% for x in (a in b) %}", "{% for x in ((_in(a , b)))|_each %}"),
            ("{% if 'a' in b.c|d and not e not\n in f %}", "{% if _in('a' , b.c|d) and not _not_in(e ,\n f) %}"),
            ("{{ 'a'in'b' }}{{ a is in b }}{{ a is not in b }}", "{{ _in('a','b') }}{{ a is in b }}{{ a is not in b }}"),
            ("{{ a % 2 < b[:1] % c }}", "{{ _less(_modulo(a , 2) , _modulo(_sliced(b)[:1] , c)) }}"),
            ("{# a < b #}{% raw %}{{ a < b }}{% endraw %}a < b", "{# a < b #}{% raw %}{{ a < b }}{% endraw %}a < b"),
        ] {
            assert_eq!(like_python(source), expected);
        }
        for odd in [
            "{",
            "{{",
            "{%",
            "{%}",
            "{{}}",
            "{% for %}",
            "{% for x in %}",
            "{{ % }}",
            "{{ < }}",
            "{{ é[1:",
            "{{ ]:[ }}",
            "{{ '",
            "{%-%}",
            "{% raw %}",
        ] {
            assert_eq!(like_python(odd), odd);
        }
    }
}
