//! JSON as Python's `json.dumps(value, ensure_ascii=False)` writes it, which is what templates were made with.

use serde_json::{Number, Value};

/// Writes `value`; with `indent` over several lines.
pub(super) fn dumps(value: &Value, indent: Option<usize>, sort_keys: bool) -> String {
    let mut writer = PythonJson { out: String::new(), indent, sort_keys, depth: 0 };
    writer.write(value);
    writer.out
}

struct PythonJson {
    out: String,
    indent: Option<usize>,
    sort_keys: bool,
    depth: usize,
}

impl PythonJson {
    fn write(&mut self, value: &Value) {
        match value {
            Value::Number(number) => self.out.push_str(&number_text(number)),
            Value::Array(items) => self.list('[', items.iter(), ']', Self::write),
            Value::Object(map) => {
                let mut entries: Vec<_> = map.iter().collect();
                if self.sort_keys {
                    entries.sort_by_key(|(key, _)| *key);
                }
                self.list('{', entries.into_iter(), '}', |writer, (key, value)| {
                    writer.out.push_str(&string(key));
                    writer.out.push_str(": ");
                    writer.write(value);
                });
            }
            Value::String(text) => self.out.push_str(&string(text)),
            Value::Null | Value::Bool(_) => self.out.push_str(&value.to_string()),
        }
    }

    fn list<T>(&mut self, open: char, items: impl ExactSizeIterator<Item = T>, close: char, mut each: impl FnMut(&mut Self, T)) {
        self.out.push(open);
        let count = items.len();
        self.depth += 1;
        for (idx, item) in items.enumerate() {
            if idx > 0 {
                self.out.push_str(if self.indent.is_some() { "," } else { ", " });
            }
            self.new_line();
            each(self, item);
        }
        self.depth -= 1;
        if count > 0 {
            self.new_line();
        }
        self.out.push(close);
    }

    fn new_line(&mut self) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', indent * self.depth));
        }
    }
}

/// As `json.dumps` quotes it: the escapes are those of this parser, too, and DEL stands as it is.
fn string(text: &str) -> String {
    Value::from(text).to_string()
}

/// As `repr` writes a float: the shortest digits, an exponent of two digits below 1e-4 and from 1e16 on.
/// A number as `repr` writes it.
pub(super) fn number_text(number: &Number) -> String {
    let Some(x) = number.as_f64().filter(|_| number.is_f64()) else { return number.to_string() };
    if x == 0.0 || (1e-4..1e16).contains(&x.abs()) {
        return format!("{x:?}");
    }
    let text = format!("{x:e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
    format!("{digits}e{sign}{exponent:0>2}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn json_is_as_python_writes_it() {
        let value = json!({"b": [1, 2.5, 1e-5, 1e16, 123456789.0, -0.0, 2e-7], "a": {"é\"\n\u{7f}\u{1}<&'": [null, true, {}, []]}});
        // json.dumps(value, ensure_ascii=False), and with sort_keys=True, and with indent=2.
        let plain =
            "{\"b\": [1, 2.5, 1e-05, 1e+16, 123456789.0, -0.0, 2e-07], \"a\": {\"é\\\"\\n\u{7f}\\u0001<&'\": [null, true, {}, []]}}";
        assert_eq!(dumps(&value, None, false), plain);
        assert_eq!(dumps(&json!({"b": 1, "a": 2}), None, true), "{\"a\": 2, \"b\": 1}");
        assert_eq!(dumps(&json!({"a": [1, {}], "b": []}), Some(2), false), "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}");
    }
}
