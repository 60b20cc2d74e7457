//! Text from outside as a terminal may have it: paths, names, tokens and records can hold characters that a terminal obeys.

use std::fmt::Display;

/// Whether a terminal obeys `c` in place of showing it: a control character (C0, DEL, C1), a separator of lines, or a mark that turns the
/// direction of writing.
fn is_obeyed(c: char) -> bool {
    c.is_control() || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// `text` on one line, characters that a terminal obeys escaped as in Rust.
pub(crate) fn printable(text: impl Display) -> String {
    escaped(text, |_| false, |c, out| out.extend(c.escape_default()))
}

/// `text` in its lines, with its tabs; other characters that a terminal obeys are escaped as in Rust.
pub fn printable_lines(text: impl Display) -> String {
    escaped(text, |c| matches!(c, '\n' | '\t'), |c, out| out.extend(c.escape_default()))
}

/// JSON of the same meaning without a character that a terminal obeys: such characters stand in strings alone, where JSON escapes each.
pub fn printable_json(json: impl Display) -> String {
    // All of them lie below U+10000, so that one escape is enough.
    escaped(json, |_| false, |c, out| out.push_str(&format!("\\u{:04x}", u32::from(c))))
}

fn escaped(text: impl Display, stays: fn(char) -> bool, escape: fn(char, &mut String)) -> String {
    let text = text.to_string();
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if is_obeyed(c) && !stays(c) { escape(c, &mut out) } else { out.push(c) }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVIL: &str = "a\u{1b}[31mb\r\u{9b}\u{7f}\n\tc\u{202e}\u{2066}\u{61c}\u{2028}é\"\\";

    #[test]
    fn text_keeps_its_lines_and_only_single_lines_lose_them() {
        assert_eq!(printable_lines(EVIL), "a\\u{1b}[31mb\\r\\u{9b}\\u{7f}\n\tc\\u{202e}\\u{2066}\\u{61c}\\u{2028}é\"\\");
        assert_eq!(printable(EVIL), "a\\u{1b}[31mb\\r\\u{9b}\\u{7f}\\n\\tc\\u{202e}\\u{2066}\\u{61c}\\u{2028}é\"\\");
    }

    #[test]
    fn json_means_the_same_and_holds_nothing_that_a_terminal_obeys() {
        let all: String = (0..0x2100).filter_map(char::from_u32).collect();
        for text in [EVIL, &all] {
            let json = printable_json(serde_json::to_string(text).unwrap());
            assert!(!json.contains(is_obeyed), "{json}");
            assert_eq!(serde_json::from_str::<String>(&json).unwrap(), text);
        }
        assert!(printable_json("\"\u{9b}\u{202e}\"").eq("\"\\u009b\\u202e\""));
    }
}
