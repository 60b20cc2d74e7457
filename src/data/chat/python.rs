//! JSON as Python's `json.dumps` writes it, which templates expect.

use super::bounds::{JSON_DEPTH_MAX, TEXT_BYTES_MAX, check_indent};
use super::integers::BigInteger;
use minijinja::Value;
use minijinja::value::{Kwargs, ValueKind};
use serde_json::Number;

/// How JSON is laid out: the options of the filter `tojson`, as `transformers` defines it.
pub(super) struct JsonLayout {
    ensure_ascii: bool,
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

impl JsonLayout {
    /// The layout that a template asks for: by place in the order of `ensure_ascii`, `indent`, `separators` and `sort_keys`, or by name.
    ///
    /// # Errors
    /// A sentence about the option that is wrong.
    pub(super) fn new(by_place: &[Value], by_name: &Kwargs) -> Result<Self, String> {
        const NAMES: [&str; 4] = ["ensure_ascii", "indent", "separators", "sort_keys"];
        let names: Vec<&str> = by_name.args().collect();
        let taken = &NAMES[..by_place.len().min(NAMES.len())];
        if by_place.len() > NAMES.len() || names.iter().any(|name| !NAMES.contains(name) || taken.contains(name)) {
            return Err(format!("options are {}, each once; it has {} and {}", NAMES.join(", "), by_place.len(), names.join(", ")));
        }
        let option = |at: usize| by_place.get(at).cloned().or_else(|| by_name.peek::<Value>(NAMES[at]).ok()).unwrap_or(().into());
        let indent = indent_text(&option(1))?;
        let separators = separators(&option(2))?;
        let item = if indent.is_some() { "," } else { ", " };
        let (item_separator, key_separator) = separators.unwrap_or_else(|| (item.into(), ": ".into()));
        Ok(Self { ensure_ascii: option(0).is_true(), indent, item_separator, key_separator, sort_keys: option(3).is_true() })
    }

    /// `value` as JSON of at most as much text as a rendering may have.
    ///
    /// # Errors
    /// A description of the exceeded limit, or of a value that Python's `json.dumps` does not write.
    pub(super) fn dumps(&self, value: &Value) -> Result<String, String> {
        let mut writer = PythonJson { out: String::new(), layout: self, depth: 0 };
        writer.write(value)?;
        Ok(writer.out)
    }
}

/// One level of indentation: so many spaces, or a text.
fn indent_text(indent: &Value) -> Result<Option<String>, String> {
    match (indent.kind(), indent.as_str()) {
        (ValueKind::None, _) => Ok(None),
        (_, Some(text)) => check_indent(text.len()).map(|()| Some(text.into())),
        (ValueKind::Number | ValueKind::Bool, _) => {
            let spaces = i64::try_from(indent.clone()).map_err(|_| format!("an indent of {indent}: neither spaces nor a text"))?;
            let spaces = usize::try_from(spaces).unwrap_or(0);
            check_indent(spaces).map(|()| Some(" ".repeat(spaces)))
        }
        _ => Err(format!("an indent of {indent}: neither spaces nor a text")),
    }
}

/// The texts between items, and between a key and its value.
fn separators(pair: &Value) -> Result<Option<(String, String)>, String> {
    if pair.is_none() {
        return Ok(None);
    }
    let texts: Option<Vec<String>> =
        pair.try_iter().ok().and_then(|texts| texts.take(3).map(|text| text.as_str().map(String::from)).collect());
    match texts.as_deref() {
        Some([item, key]) => Ok(Some((item.clone(), key.clone()))),
        _ => Err(format!("separators {pair}: expected a pair of texts")),
    }
}

struct PythonJson<'a> {
    out: String,
    layout: &'a JsonLayout,
    depth: usize,
}

impl PythonJson<'_> {
    fn write(&mut self, value: &Value) -> Result<(), String> {
        match value.kind() {
            ValueKind::None => self.push("null"),
            ValueKind::Bool => self.push(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.push(&number(value)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => self.list(['[', ']'], items(value)?, |writer, item| writer.write(&item)),
            ValueKind::Map => {
                let entries = self.entries(value)?.into_iter();
                self.list(['{', '}'], entries, |writer, (key, value)| {
                    writer.string(&key)?;
                    writer.push(&writer.layout.key_separator)?;
                    writer.write(&value)
                })
            }
            ValueKind::Plain if value.downcast_object_ref::<BigInteger>().is_some() => self.push(&value.to_string()),
            kind => Err(not_json(&kind.to_string())),
        }
    }

    /// The keys of a map as texts, with their values.
    fn entries(&self, map: &Value) -> Result<Vec<(String, Value)>, String> {
        let mut keys: Vec<Value> = items(map)?.collect();
        if self.layout.sort_keys {
            if keys.windows(2).any(|pair| pair[0].kind() != pair[1].kind()) {
                return Err("sort_keys: keys of different types have no order".into());
            }
            keys.sort();
        }
        let entry = |key: Value| {
            let text = match key.kind() {
                ValueKind::String => key.as_str().unwrap_or_default().into(),
                ValueKind::None => "null".into(),
                ValueKind::Bool => key.is_true().to_string(),
                ValueKind::Number => number(&key),
                kind => return Err(format!("a key of type {kind} has no JSON")),
            };
            let value = map.get_item(&key).map_err(|e| e.to_string())?;
            Ok((text, value))
        };
        keys.into_iter().map(entry).collect()
    }

    fn list<T>(
        &mut self,
        [open, close]: [char; 2],
        items: impl Iterator<Item = T>,
        mut each: impl FnMut(&mut Self, T) -> Result<(), String>,
    ) -> Result<(), String> {
        if self.depth == JSON_DEPTH_MAX {
            return Err(format!("more than {JSON_DEPTH_MAX} lists and objects within each other"));
        }
        self.out.push(open);
        let mut items = items.peekable();
        let is_empty = items.peek().is_none();
        self.depth += 1;
        for (at, item) in items.enumerate() {
            if at > 0 {
                self.push(&self.layout.item_separator)?;
            }
            self.new_line()?;
            each(self, item)?;
        }
        self.depth -= 1;
        if !is_empty {
            self.new_line()?;
        }
        self.push(close.encode_utf8(&mut [0; 4]))
    }

    fn new_line(&mut self) -> Result<(), String> {
        let Some(indent) = &self.layout.indent else { return Ok(()) };
        self.push("\n")?;
        (0..self.depth).try_for_each(|_| self.push(indent))
    }

    /// As `json.dumps` quotes it: the escapes are those of this parser, too, and with `ensure_ascii` of all that is not printable ASCII.
    fn string(&mut self, text: &str) -> Result<(), String> {
        let quoted = serde_json::Value::from(text).to_string();
        if !self.layout.ensure_ascii {
            return self.push(&quoted);
        }
        for c in quoted.chars() {
            match c {
                ' '..='~' => self.push(c.encode_utf8(&mut [0; 4]))?,
                _ => c.encode_utf16(&mut [0; 2]).iter().try_for_each(|unit| self.push(&format!("\\u{unit:04x}")))?,
            }
        }
        Ok(())
    }

    /// Writes `text`, unless there is too much of it.
    fn push(&mut self, text: &str) -> Result<(), String> {
        if self.out.len() + text.len() > TEXT_BYTES_MAX {
            return Err(format!("more than {TEXT_BYTES_MAX} bytes of text"));
        }
        self.out.push_str(text);
        Ok(())
    }
}

/// The items of a list, or the keys of a map.
fn items(value: &Value) -> Result<impl Iterator<Item = Value>, String> {
    value.try_iter().map_err(|e| e.to_string())
}

fn not_json(kind: &str) -> String {
    format!("a value of type {kind} has no JSON")
}

/// A number as `repr` writes it; JSON of Python has names for infinities and NaN.
pub(super) fn number(value: &Value) -> String {
    let float = f64::try_from(value.clone()).ok().filter(|_| !value.is_integer());
    match float {
        None => value.to_string(),
        Some(float) => Number::from_f64(float).map_or_else(|| not_finite(float).into(), |number| number_text(&number)),
    }
}

fn not_finite(float: f64) -> &'static str {
    match (float.is_nan(), float > 0.0) {
        (true, _) => "NaN",
        (false, true) => "Infinity",
        (false, false) => "-Infinity",
    }
}

/// A number as `repr` writes it: the shortest digits, an exponent of two digits below 1e-4 and from 1e16 on.
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

    fn dumps(value: &serde_json::Value, options: &[(&str, Value)]) -> Result<String, String> {
        let value = Value::from(minijinja::value::Serde(value));
        JsonLayout::new(&[], &options.iter().cloned().collect()).and_then(|layout| layout.dumps(&value))
    }

    #[test]
    fn json_is_as_python_writes_it() {
        let value = json!({"b": [1, 2.5, 1e-5, 1e16, 123456789.0, -0.0, 2e-7], "a": {"é\"\n\u{7f}\u{1}<&'": [null, true, {}, []]}});
        // json.dumps(value, ensure_ascii=False), and with sort_keys=True, with indent=2, and with ensure_ascii=True.
        let plain =
            "{\"b\": [1, 2.5, 1e-05, 1e+16, 123456789.0, -0.0, 2e-07], \"a\": {\"é\\\"\\n\u{7f}\\u0001<&'\": [null, true, {}, []]}}";
        assert_eq!(dumps(&value, &[]).unwrap(), plain);
        let sorted = dumps(&json!({"b": 1, "a": 2}), &[("sort_keys", true.into())]);
        assert_eq!(sorted.unwrap(), "{\"a\": 2, \"b\": 1}");
        let indented = dumps(&json!({"a": [1, {}], "b": []}), &[("indent", 2.into())]);
        assert_eq!(indented.unwrap(), "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": []\n}");
        let ascii = dumps(&json!("é\u{7f}🙂"), &[("ensure_ascii", true.into())]);
        assert_eq!(ascii.unwrap(), "\"\\u00e9\\u007f\\ud83d\\ude42\"");
        assert_eq!(JsonLayout::new(&[], &Kwargs::from_iter([] as [(&str, Value); 0])).unwrap().dumps(&f64::NAN.into()).unwrap(), "NaN");
    }

    #[test]
    fn json_is_bounded_while_it_is_written() {
        let deep = |depth: usize| (0..depth).fold(json!(1), |inner, _| json!([inner]));
        assert!(dumps(&deep(JSON_DEPTH_MAX), &[]).is_ok());
        let refused = dumps(&deep(JSON_DEPTH_MAX + 1), &[]).unwrap_err();
        assert_eq!(refused, "more than 128 lists and objects within each other");
        let text = |bytes: usize| dumps(&json!("a".repeat(bytes)), &[]);
        assert!(text(TEXT_BYTES_MAX - 2).is_ok());
        assert_eq!(text(TEXT_BYTES_MAX - 1).unwrap_err(), "more than 4194304 bytes of text");
        let list = json!(vec![1; 10_000]);
        assert!(dumps(&list, &[("indent", 2.into())]).is_ok() && dumps(&list, &[("indent", 1000.into())]).is_err());
        let wide = Value::from_iter([" ".repeat(1000).as_str(), ""]);
        assert!(dumps(&list, &[("separators", wide)]).is_err());
    }
}
