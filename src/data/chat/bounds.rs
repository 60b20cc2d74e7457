//! Limits of a chat template that are checked before memory is allocated: its source, the widths in its formats, and its JSON output.
//!
//! The template engine parses expressions and chains by recursion, pads to any width, and serialises a list that holds one list many times
//! as often as it is held. A sandbox ends where that goes too far; these limits name the cause.

use crate::units::Bytes;

/// Bytes of a source; the largest have some tens of kilobytes.
const SOURCE_BYTES_MAX: usize = 1 << 20;
/// Words and signs within one tag: each may be one more level of an expression. Long ones have some hundred.
const TAG_TOKENS_MAX: usize = 4096;
/// Tags of `elif` in a source: each is a level, too.
const ELIFS_MAX: usize = 1000;
/// Width or precision of a format.
const FORMAT_WIDTH_MAX: usize = 10_000;
/// All widths and precisions of a text that is formatted.
const FORMAT_WIDTHS_MAX: usize = 1 << 20;
/// Spaces that JSON may be indented by.
const INDENT_MAX: usize = 1000;
/// Lists and objects within each other in JSON; the parser of records takes no more.
pub(super) const JSON_DEPTH_MAX: usize = 128;
/// Text of a rendering, and JSON in it: it is encoded in one piece, at some hundred bytes a byte.
pub(super) const TEXT_BYTES_MAX: usize = 4 << 20;

/// Whether a template is compiled at all.
///
/// # Errors
/// The limit that it exceeds, in words.
pub(super) fn check_source(source: &str) -> Result<(), String> {
    if source.len() > SOURCE_BYTES_MAX {
        return Err(format!(
            "the chat template has {}: at most {} are compiled",
            Bytes(source.len() as u64),
            Bytes(SOURCE_BYTES_MAX as u64)
        ));
    }
    let (mut rest, mut done, mut elifs) = (source, 0, 0);
    while let Some(at) = next_tag(rest) {
        let tag = Tag::read(&rest[at..]);
        elifs += usize::from(tag.is_elif);
        if tag.tokens > TAG_TOKENS_MAX || elifs > ELIFS_MAX {
            let line = 1 + source[..done + at].matches('\n').count();
            let cause = if elifs > ELIFS_MAX {
                format!("more than {ELIFS_MAX} tags of elif")
            } else {
                format!("more than {TAG_TOKENS_MAX} words and signs in one tag")
            };
            return Err(format!("the chat template, line {line}: {cause}"));
        }
        done += at + tag.bytes;
        rest = &source[done..];
    }
    Ok(())
}

/// Where the next tag begins.
pub(super) fn next_tag(source: &str) -> Option<usize> {
    let opens = |pair: &[u8]| pair[0] == b'{' && matches!(pair[1], b'{' | b'%' | b'#');
    source.as_bytes().windows(2).position(opens)
}

/// Bytes of the tag that `source` begins with, its end included.
pub(super) fn tag_bytes(source: &str) -> usize {
    Tag::read(source).bytes
}

/// A tag of a template, up to where it closes.
#[derive(Default)]
struct Tag {
    bytes: usize,
    tokens: usize,
    is_elif: bool,
}

impl Tag {
    /// The tag that `source` begins with.
    fn read(source: &str) -> Self {
        let bytes = source.as_bytes();
        if bytes[1] == b'#' {
            return Self { bytes: source.find("#}").map_or(source.len(), |end| end + 2), ..Self::default() };
        }
        let closes = if bytes[1] == b'{' { "}}" } else { "%}" };
        let is_elif = source[2..].trim_start_matches(['-', '+']).trim_start().starts_with("elif");
        let (mut at, mut tokens, mut open) = (2, 0, 0usize);
        while at < bytes.len() && !(open == 0 && source.as_bytes()[at..].starts_with(closes.as_bytes())) {
            tokens += usize::from(!bytes[at].is_ascii_whitespace());
            open = match bytes[at] {
                b'(' | b'[' | b'{' => open + 1,
                b')' | b']' | b'}' => open.saturating_sub(1),
                _ => open,
            };
            at += token_bytes(&bytes[at..]);
        }
        Self { bytes: (at + closes.len()).min(source.len()), tokens, is_elif }
    }
}

/// Bytes of the text, the word, the white space or the sign that `bytes` begin with.
pub(super) fn token_bytes(bytes: &[u8]) -> usize {
    let run = |is_part: fn(u8) -> bool| bytes.iter().take_while(|byte| is_part(**byte)).count();
    match bytes[0] {
        quote @ (b'"' | b'\'') => text_bytes(bytes, quote),
        byte if is_word(byte) => run(is_word),
        byte if byte.is_ascii_whitespace() => run(|byte| byte.is_ascii_whitespace()),
        _ => 1,
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_' || !byte.is_ascii()
}

/// Bytes of a text with both its quotes.
fn text_bytes(bytes: &[u8], quote: u8) -> usize {
    let mut at = 1;
    while at < bytes.len() && bytes[at] != quote {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(bytes.len())
}

/// Whether the widths and precisions of `format`, as `str.format` has it, are such as a template may ask for.
///
/// # Errors
/// The limit that they exceed, in words.
pub(super) fn check_braces(format: &str) -> Result<(), String> {
    let specs = brace_specs(format);
    check_widths(specs.iter().flat_map(|spec| numbers(spec)))
}

/// Whether a format as `str.format` has it asks for a width or a precision.
pub(super) fn has_brace_width(format: &str) -> bool {
    brace_specs(format).iter().any(|spec| numbers(spec).next().is_some())
}

/// The specification behind the colon of each field.
fn brace_specs(format: &str) -> Vec<String> {
    // Doubled ones are text.
    let format = format.replace("{{", "");
    let fields = format.split('{').skip(1).filter_map(|field| field.split('}').next()?.split_once(':'));
    fields.map(|(_, spec)| spec.into()).collect()
}

/// As [`check_braces`], of a format as `%` has it.
///
/// # Errors
/// As [`check_braces`].
pub(super) fn check_percents(format: &str) -> Result<(), String> {
    check_widths(specs(format).flat_map(numbers))
}

/// Whether a format as `%` has it asks for a width or a precision.
pub(super) fn has_width(format: &str) -> bool {
    specs(format).any(|spec| numbers(spec).next().is_some())
}

/// Values that a format as `%` has it takes.
pub(super) fn conversions(format: &str) -> usize {
    format.replace("%%", "").matches('%').count()
}

/// The flags, width and precision between each `%` and its letter.
fn specs(format: &str) -> impl Iterator<Item = &str> {
    format.split('%').skip(1).map(|field| {
        let spec = field.strip_prefix('(').and_then(|keyed| keyed.split_once(')')).map_or(field, |(_, spec)| spec);
        let end = spec.find(|c: char| !matches!(c, '#' | '0'..='9' | '-' | ' ' | '+' | '.')).unwrap_or(spec.len());
        &spec[..end]
    })
}

/// The numbers in a text; `None` for one that is larger than any.
fn numbers(text: &str) -> impl Iterator<Item = Option<usize>> {
    text.split(|c: char| !c.is_ascii_digit())
        .filter(|digits| !digits.is_empty())
        .map(|digits| digits.parse().ok())
        .collect::<Vec<_>>()
        .into_iter()
}

/// Whether a text may be filled up to so many characters.
///
/// # Errors
/// The limit, in words.
pub(super) fn check_width(width: usize) -> Result<(), String> {
    check_widths(std::iter::once(Some(width)))
}

fn check_widths(widths: impl Iterator<Item = Option<usize>>) -> Result<(), String> {
    let mut all = 0;
    for width in widths {
        let width = width.filter(|width| *width <= FORMAT_WIDTH_MAX);
        all += width.ok_or_else(|| format!("a format asks for more than {FORMAT_WIDTH_MAX} characters"))?;
        if all > FORMAT_WIDTHS_MAX {
            return Err(format!("the formats of one text ask for more than {FORMAT_WIDTHS_MAX} characters"));
        }
    }
    Ok(())
}

/// Whether JSON may be indented by so many spaces.
///
/// # Errors
/// The limit, in words.
pub(super) fn check_indent(indent: usize) -> Result<(), String> {
    if indent > INDENT_MAX { Err(format!("an indent of {indent}: at most {INDENT_MAX} spaces are made")) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_may_have_so_many_tokens_a_tag_and_text_does_not_count() {
        let long = |part: &str| format!("a\n{{{{ {}1 }}}}", part.repeat(TAG_TOKENS_MAX));
        for part in ["-", "not ", "1+", "1 if 1 else ", "'a'~", "[", "{", "(", "x."] {
            let refused = check_source(&long(part)).unwrap_err();
            assert_eq!(refused, "the chat template, line 2: more than 4096 words and signs in one tag", "{part}");
        }
        let blocks = |part: &str| format!("{{%- if {} x %}}", part.repeat(TAG_TOKENS_MAX));
        assert!(check_source(&blocks("1+")).is_err() && check_source("{% if 1 %}").is_ok());
        let elifs = |count: usize| format!("{{% if 1 %}}{}{{% endif %}}", "{%- elif 1 %}".repeat(count));
        assert!(check_source(&elifs(ELIFS_MAX)).is_ok());
        assert_eq!(check_source(&elifs(ELIFS_MAX + 1)).unwrap_err(), "the chat template, line 1: more than 1000 tags of elif");
        // A text, a comment and text outside of tags may be long; a closing brace within a text or an object closes no tag.
        let words = "- ".repeat(2 * TAG_TOKENS_MAX);
        for source in [format!("{{{{ '{words}' }}}}{words}"), format!("{{# {words} #}}"), format!("{{{{ \"\\\"{words}\" }}}}")] {
            assert_eq!(check_source(&source), Ok(()));
        }
        for hidden in ["'}}'", "{'a': {'b': 1}}", "[{}]"] {
            assert!(check_source(&format!("{{{{ {hidden} ~ {words} }}}}")).is_err(), "{hidden}");
        }
        let refused = check_source(&"a".repeat(SOURCE_BYTES_MAX + 1)).unwrap_err();
        assert_eq!(refused, "the chat template has 1.0 MiB: at most 1.0 MiB are compiled");
        for odd in ["{", "{{", "{%", "{#", "{{'", "{{\"\\", "}}", "{{ é", "{%elif"] {
            assert_eq!(check_source(odd), Ok(()), "{odd}");
        }
    }

    #[test]
    fn formats_bound_their_widths_and_numbers_in_text_are_no_widths() {
        for ok in ["{:>10000} in 20261123", "{{:>99999}}", "{0} {name[123456]}", "a 99999 }", "{:5>10}", ""] {
            assert_eq!(check_braces(ok), Ok(()), "{ok}");
        }
        for wide in ["{:>10001}", "{:.70000e}", "{x:>100000000000}", "{:99999999999999999999999}", "{:0>9{:>99999}}"] {
            assert_eq!(check_braces(wide).unwrap_err(), "a format asks for more than 10000 characters", "{wide}");
        }
        for ok in ["%10000d", "100 % 99999", "%% 9", "%(key99999)s", "%5.2f%s"] {
            let is_ok = check_percents(ok).is_ok();
            assert_eq!(is_ok, ok != "100 % 99999", "{ok}");
        }
        for wide in ["%.99999f", "%-10001s", "%(a)099999d", "%+ 99999x"] {
            assert!(check_percents(wide).is_err(), "{wide}");
        }
        let many = "{:>10000}".repeat(1 + FORMAT_WIDTHS_MAX / 10_000);
        assert_eq!(check_braces(&many).unwrap_err(), "the formats of one text ask for more than 1048576 characters");
    }

    #[test]
    fn json_is_indented_by_few_spaces() {
        assert!(check_indent(INDENT_MAX).is_ok() && check_indent(INDENT_MAX + 1).is_err());
    }
}
