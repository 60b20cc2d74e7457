//! The elements of a JSON array, one at a time, however the file comes in blocks.

use super::text::{LINE_BYTES_MAX, RecordParts};
use crate::error::{Error, Result};
use crate::units::counted;
use std::path::Path;

/// Assembles elements of an array. It looks at brackets, strings and commas alone; the parser of records validates the elements.
#[derive(Default)]
pub(in crate::data) struct Elements {
    begun: String,
    number: u64,
    state: State,
    depth: usize,
    in_string: bool,
    escaped: bool,
}

#[derive(Default, PartialEq)]
enum State {
    #[default]
    Before,
    Within,
    After,
}

impl Elements {
    /// Whether `c` ends an element.
    fn takes(&mut self, c: char) -> bool {
        if self.in_string {
            (self.escaped, self.in_string) = (!self.escaped && c == '\\', self.escaped || c != '"');
            return false;
        }
        match c {
            '"' => self.in_string = true,
            '[' | '{' => self.depth += 1,
            ']' if self.depth == 0 => self.state = State::After,
            ']' | '}' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        self.state == State::After || c == ',' && self.depth == 0
    }
}

impl RecordParts for Elements {
    fn push(&mut self, path: &Path, block: &str, mut each: impl FnMut(u64, &str) -> Result<()>) -> Result<()> {
        for c in block.chars() {
            match self.state {
                State::Before if c == '[' => self.state = State::Within,
                State::Within => {
                    if !self.takes(c) {
                        self.begun.push(c);
                        if self.begun.len() > LINE_BYTES_MAX {
                            let cause = format_args!("record {}: longer than {LINE_BYTES_MAX} bytes", self.number + 1);
                            return Err(Error::format(path, cause));
                        }
                        continue;
                    }
                    self.number += 1;
                    each(self.number, self.begun.trim())?;
                    self.begun.clear();
                }
                _ if c.is_whitespace() => {}
                State::Before => return Err(Error::format(path, "not an array of records; lines of records are .jsonl")),
                State::After => {
                    return Err(Error::format(path, format_args!("unexpected data after the array of {}", counted(self.number, "record"))));
                }
            }
        }
        Ok(())
    }

    fn finish(self, path: &Path, _: impl FnOnce(u64, &str) -> Result<()>) -> Result<()> {
        if self.state == State::After { Ok(()) } else { Err(Error::format(path, format_args!("ends within record {}", self.number + 1))) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn elements(blocks: &[&str]) -> Result<Vec<(u64, String)>> {
        let (mut elements, mut found) = (Elements::default(), Vec::new());
        for block in blocks {
            elements.push(Path::new("x.json"), block, |number, text| {
                found.push((number, text.to_string()));
                Ok(())
            })?;
        }
        elements.finish(Path::new("x.json"), |_, _| Ok(()))?;
        Ok(found)
    }

    proptest! {
        #[test]
        fn elements_are_those_of_the_parser(texts in prop::collection::vec("[a\"\\\\,{}\\[\\]é]{0,6}", 1..6), cut: usize) {
            let records: Vec<_> = texts.iter().map(|text| serde_json::json!({"text": text, "list": [text, [1, {}]]})).collect();
            let whole = serde_json::to_string_pretty(&records).unwrap();
            let at = (0..=cut % (whole.len() + 1)).rev().find(|&at| whole.is_char_boundary(at)).unwrap();
            let found = elements(&[&whole[..at], &whole[at..]]).unwrap();
            prop_assert!(found.iter().map(|(number, _)| *number).eq(1..=records.len() as u64));
            let parsed: Vec<serde_json::Value> = found.iter().map(|(_, text)| serde_json::from_str(text).unwrap()).collect();
            prop_assert_eq!(parsed, records);
        }
    }

    #[test]
    fn non_arrays_are_refused() {
        for (text, cause) in [
            ("{\"text\": 1}", "x.json: not an array of records; lines of records are .jsonl"),
            ("[{\"a\": 1}, {\"b\"", "x.json: ends within record 2"),
            ("[{}] x", "x.json: unexpected data after the array of 1 record"),
            ("  ", "x.json: ends within record 1"),
        ] {
            assert_eq!(elements(&[text]).unwrap_err().to_string(), cause);
        }
    }
}
