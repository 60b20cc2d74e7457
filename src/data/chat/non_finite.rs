//! NaN and infinities, which Python writes into JSON and reads from it, and JSON does not have. They pass in columns that are not read.

/// Words of numbers that JSON does not have.
const WORDS: [&str; 3] = ["NaN", "-Infinity", "Infinity"];

/// The record `line` with null in place of each NaN and infinity.
///
/// # Errors
/// For a column that `is_read`, in words.
pub(super) fn without(line: &str, is_read: impl Fn(&str) -> bool) -> Result<String, String> {
    let (mut out, mut rest, mut depth, mut column) = (String::with_capacity(line.len()), line, 0usize, "");
    while let Some(first) = rest.chars().next() {
        if let Some(word) = WORDS.iter().find(|word| rest.starts_with(**word)) {
            if is_read(column) {
                return Err(format!("`{column}` holds {word}, which is not a JSON number"));
            }
            out.push_str("null");
            rest = &rest[word.len()..];
            continue;
        }
        let token_bytes = if first == '"' { text_bytes(rest) } else { first.len_utf8() };
        let (part, after) = rest.split_at(token_bytes);
        match first {
            '{' | '[' => depth += 1,
            '}' | ']' => depth = depth.saturating_sub(1),
            '"' if depth == 1 && after.trim_start().starts_with(':') => column = part.trim_matches('"'),
            _ => {}
        }
        out.push_str(part);
        rest = after;
    }
    Ok(out)
}

/// Bytes of the text that `json` begins with, both quotes included.
fn text_bytes(json: &str) -> usize {
    let mut escaped = false;
    let end = json.bytes().skip(1).position(|byte| {
        let ends = byte == b'"' && !escaped;
        escaped = byte == b'\\' && !escaped;
        ends
    });
    end.map_or(json.len(), |end| end + 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn words_outside_of_texts_become_null_in_columns_that_are_not_read() {
        let of = |line: &str| without(line, |column| column == "text");
        let line = r#"{"text": "NaN \" NaN", "score": NaN, "all": [{"text": -Infinity}, Infinity, 1], "é": "}"}"#;
        let expected = r#"{"text": "NaN \" NaN", "score": null, "all": [{"text": null}, null, 1], "é": "}"}"#;
        assert_eq!(of(line).unwrap(), expected);
        assert_eq!(of(r#"{"a": 1, "text": [NaN]}"#).unwrap_err(), "`text` holds NaN, which is not a JSON number");
        assert_eq!(of(r#"{"text":-Infinity}"#).unwrap_err(), "`text` holds -Infinity, which is not a JSON number");
    }

    proptest! {
        #[test]
        fn a_line_without_such_words_stays_as_it_is(line in "[\\[\\]{}\":,\\\\ é0-9a-z]{0,40}") {
            prop_assert_eq!(without(&line, |_| true).unwrap(), line);
        }
    }
}
