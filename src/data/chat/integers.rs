//! Integers of records as Python reads them: of any size, and `-0` as 0. The parser of JSON makes floats of both.
//!
//! An integer beyond 64 bits stands in a parsed record as a text that begins with a private character; a template is given the integer. A
//! column itself is no template's: there such an integer stays the float that the parser makes of it.

use minijinja::Value;
use minijinja::value::{Object, ObjectRepr};
use serde::de::DeserializeOwned;
use serde_json::Value as Json;
use std::fmt;
use std::sync::Arc;

/// The beginning of a text that stands for an integer.
pub(super) const INTEGER_MARK: char = '\u{10fffb}';
/// This character in JSON of ASCII characters alone.
const ESCAPED_MARK: &str = "\\udbff\\udffb";
/// Fewer digits make no integer beyond 64 bits.
const DIGITS_MIN: usize = 19;

/// An integer beyond 128 bits, which a template can only write.
#[derive(Debug)]
pub(super) struct BigInteger(String);

impl Object for BigInteger {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Parses the JSON `text` with the integers that Python reads in it.
///
/// # Errors
/// For JSON that is broken or holds the private character, in words.
pub(super) fn parse<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    if holds_mark(text) {
        return Err(format!("holds a private character (U+{:X}) that marks integers", u32::from(INTEGER_MARK)));
    }
    let parsed = may_differ(text).then(|| serde_json::from_str(&marked(text)).ok()).flatten();
    // The error of the text as it is names the right column.
    parsed.map_or_else(|| serde_json::from_str(text).map_err(|e| json_cause(&e)), Ok)
}

/// The parser's message with the column, but not with its line, which is always 1.
fn json_cause(error: &serde_json::Error) -> String {
    let message = error.to_string();
    let cause = message.rsplit_once(" at line ").map_or(message.as_str(), |(cause, _)| cause);
    format!("{cause} (column {})", error.column())
}

/// Whether `text` holds the private character that marks integers.
fn holds_mark(text: &str) -> bool {
    let is_escape =
        |at: usize| text.as_bytes()[at..].get(..ESCAPED_MARK.len()).is_some_and(|e| e.eq_ignore_ascii_case(ESCAPED_MARK.as_bytes()));
    text.contains(INTEGER_MARK) || text.match_indices("\\u").any(|(at, _)| is_escape(at))
}

/// Whether there are so many digits, or a zero with a sign, anywhere.
fn may_differ(text: &str) -> bool {
    let mut digits = 0;
    let has_long = text.bytes().any(|byte| {
        digits = if byte.is_ascii_digit() { digits + 1 } else { 0 };
        digits >= DIGITS_MIN
    });
    has_long || text.contains("-0")
}

/// The JSON `text` with marked texts in place of integers that the parser does not hold, and without signs of zeros.
fn marked(text: &str) -> String {
    let (mut out, mut rest, mut depth) = (String::with_capacity(text.len() + 16), text, 0usize);
    while let Some(first) = rest.bytes().next() {
        let bytes = match first {
            b'"' => string_bytes(rest),
            b'-' | b'0'..=b'9' => rest.bytes().take_while(|byte| matches!(byte, b'0'..=b'9' | b'+' | b'-' | b'.' | b'e' | b'E')).count(),
            _ => rest.bytes().take_while(|byte| !matches!(byte, b'"' | b'-' | b'0'..=b'9')).count(),
        };
        let (part, after) = rest.split_at(bytes);
        rest = after;
        depth = part.bytes().filter(|_| first != b'"').fold(depth, |depth, byte| match byte {
            b'[' | b'{' => depth + 1,
            b']' | b'}' => depth.saturating_sub(1),
            _ => depth,
        });
        match part {
            "-0" => out.push('0'),
            _ if depth > 1 && is_large_integer(part) => out.extend(["\"", INTEGER_MARK.encode_utf8(&mut [0; 4]), part, "\""]),
            _ => out.push_str(part),
        }
    }
    out
}

/// Bytes of the string that `text` begins with, with both its quotes.
fn string_bytes(text: &str) -> usize {
    let (bytes, mut at) = (text.as_bytes(), 1);
    while at < bytes.len() && bytes[at] != b'"' {
        at += if bytes[at] == b'\\' { 2 } else { 1 };
    }
    // An escape may be cut off at the end.
    (at + 1).min(bytes.len())
}

fn is_large_integer(number: &str) -> bool {
    let digits = number.strip_prefix('-').unwrap_or(number);
    let is_integer = !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()) && !digits.starts_with('0');
    is_integer && number.parse::<i64>().is_err() && number.parse::<u64>().is_err()
}

/// A parsed value as a template is given it.
pub(super) fn template_value(json: &Json) -> Value {
    match json {
        Json::Null => ().into(),
        Json::Bool(bool) => (*bool).into(),
        Json::Number(number) => {
            let integer = number.as_i64().map(Value::from).or_else(|| number.as_u64().map(Value::from));
            integer.unwrap_or_else(|| number.as_f64().into())
        }
        Json::String(text) => text.strip_prefix(INTEGER_MARK).map_or_else(|| text.as_str().into(), integer),
        Json::Array(items) => items.iter().map(template_value).collect(),
        Json::Object(entries) => Value::from_pairs(entries.iter().map(|(key, value)| (key.as_str(), template_value(value)))),
    }
}

fn integer(digits: &str) -> Value {
    match digits.parse::<i128>() {
        Ok(integer) => integer.into(),
        Err(_) => Value::from_object(BigInteger(digits.into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The output of a template for the JSON `text` within a list.
    fn written(text: &str) -> String {
        template_value(&parse::<Json>(&format!("[[{text}]]")).unwrap()).to_string()
    }

    #[test]
    fn integers_are_those_of_python() {
        let huge = "9".repeat(400);
        for integer in ["0", "-1", "18446744073709551615", "18446744073709551616", "-9223372036854775809", "100000000000000000000", &huge] {
            assert_eq!(written(integer), format!("[[{integer}]]"));
        }
        assert_eq!(written("-0"), "[[0]]");
        assert_eq!(written(r#"{"a": -0, "b": [100000000000000000000]}"#), "[[{'a': 0, 'b': [100000000000000000000]}]]");
        for float in ["-0.0", "1.5"] {
            assert_eq!(written(float), format!("[[{float}]]"));
        }
        for text in ["-0", "100000000000000000000", "a\\", "a\\\\\\\" -0 ", "100000000000000000000]"] {
            let quoted = Json::from(text).to_string();
            assert_eq!(parse::<Json>(&format!("[[{quoted}]]")).unwrap()[0][0], text);
        }
        // A column itself is read by no template.
        assert_eq!(parse::<Json>(r#"{"text": 100000000000000000000}"#).unwrap()["text"], 1e20);
    }

    #[test]
    fn broken_json_is_refused_at_its_place_and_a_mark_wherever_it_stands() {
        for (text, cause) in [
            ("[[100000000000000000000, 007]]", "invalid number (column 27)"),
            ("[[-00, 100000000000000000000]]", "invalid number (column 5)"),
            ("[[100000000000000000000", "EOF while parsing a list (column 23)"),
            (r#"[["100000000000000000000\"#, "EOF while parsing a string (column 25)"),
        ] {
            assert_eq!(parse::<Json>(text).unwrap_err(), cause);
        }
        for held in ["[\"\u{10fffb}5\"]", r#"["\udbff\udffb5"]"#, r#"["\uDBFF\uDFFB5"]"#] {
            let refused = parse::<Json>(held).unwrap_err();
            assert_eq!(refused, "holds a private character (U+10FFFB) that marks integers");
        }
    }
}
