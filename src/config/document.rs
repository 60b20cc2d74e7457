//! Parses TOML, YAML and JSON into one tree that keeps the position of every key and value.

use crate::disk;
use crate::error::{Error, Result};
use serde::Deserialize;
use serde::de::{self, Deserializer, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_saphyr::Spanned as YamlSpanned;
use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// Largest size of a configuration file.
const BYTES_MAX: u64 = 1 << 20;
/// Largest nesting depth and number of values.
const DEPTH_MAX: usize = 32;
const NODES_MAX: usize = 20_000;
/// Largest number of values from expanded YAML anchors. A file of a few lines could otherwise expand to a billion values.
const ALIASED_MAX: usize = 10_000;

/// Longest part of an offending line that an error message shows, in characters.
const SHOWN_CHARS: usize = 60;

/// Syntax of a file, which follows from its extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Syntax {
    Toml,
    Yaml,
    Json,
}

impl Syntax {
    fn of(path: &Path) -> Result<Self> {
        match path.extension().and_then(|extension| extension.to_str()).map(str::to_lowercase).as_deref() {
            Some("toml") => Ok(Self::Toml),
            Some("yaml" | "yml") => Ok(Self::Yaml),
            Some("json") => Ok(Self::Json),
            _ => Err(Error::usage(format!("{}: the name of a configuration ends with .toml, .yaml, .yml or .json", path.display()))),
        }
    }
}

/// A line and a column, counted from 1, in characters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub line: usize,
    pub column: usize,
}

impl Place {
    pub(super) const START: Self = Self { line: 1, column: 1 };

    /// The place of the byte `offset` of `text`.
    fn of(text: &str, offset: usize) -> Self {
        let before = text.get(..offset).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        Self { line: 1 + before.matches('\n').count(), column: 1 + before[line_start..].chars().count() }
    }

    fn of_yaml(location: serde_saphyr::Location) -> Self {
        // Columns and lines of a file of a megabyte.
        Self { line: location.line() as usize, column: location.column() as usize }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "line {}, column {}", self.line, self.column)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum NodeValue {
    Null,
    Truth(bool),
    Integer(i128),
    Float(f64),
    Text(String),
    List(Vec<DocumentNode>),
    Table(Vec<DocumentEntry>),
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct DocumentNode {
    pub at: Place,
    pub value: NodeValue,
}

impl DocumentNode {
    /// The value in the notation of the command line.
    pub(super) fn text(&self) -> String {
        match &self.value {
            NodeValue::Text(text) => text.clone(),
            NodeValue::Truth(truth) => truth.to_string(),
            NodeValue::Integer(number) => number.to_string(),
            NodeValue::Float(number) => format!("{number:?}"),
            NodeValue::List(all) => all.iter().map(Self::text).collect::<Vec<_>>().join(","),
            NodeValue::Table(_) | NodeValue::Null => String::new(),
        }
    }
}

/// A key, its place, and its value.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct DocumentEntry {
    pub at: Place,
    pub key: String,
    pub node: DocumentNode,
}

/// A file's text and its parsed tree.
#[derive(Debug)]
pub(super) struct Document {
    text: String,
    pub entries: Vec<DocumentEntry>,
}

/// The error is a sentence of one line that names the place.
type Parsed<T> = std::result::Result<T, String>;

impl Document {
    /// Reads the file at `path` and returns the result of `take`. An error of `take` is a sentence, to which the file's name is added.
    ///
    /// # Errors
    /// `Io` or `Format` when the file cannot be read. `Usage` that names file, line and column when the syntax is wrong.
    pub(super) fn read<T>(path: &Path, take: impl FnOnce(Self) -> Parsed<T>) -> Result<T> {
        let bytes = disk::read_small(path, BYTES_MAX)?;
        let syntax = Syntax::of(path)?;
        let text = String::from_utf8(bytes).map_err(|e| format!("not UTF-8 at byte {}", e.utf8_error().valid_up_to()));
        let read = text.and_then(|text| Self::parse(text, syntax)).and_then(take);
        read.map_err(|cause| Error::usage(format!("{}: {cause}", path.display())))
    }

    /// Parses `text`. Duplicate keys are an error.
    ///
    /// # Errors
    /// A line that names the place of the syntax error.
    pub(super) fn parse(text: String, syntax: Syntax) -> Parsed<Self> {
        let root = match syntax {
            Syntax::Toml => toml_root(&text),
            Syntax::Yaml => yaml_root(&text),
            Syntax::Json => json_root(&text),
        };
        match root {
            Ok(DocumentNode { value: NodeValue::Table(entries), .. }) => Ok(Self { text, entries }),
            Ok(DocumentNode { value: NodeValue::Null, .. }) => Ok(Self { text, entries: Vec::new() }),
            Ok(other) => Err(show(&text, other.at, "expected keys with values")),
            // The parsers append their own place to the message.
            Err((Some(place), message)) => Err(show(&text, place, message.split(" at line ").next().unwrap_or_default())),
            Err((None, message)) => Err(one_line(&message)),
        }
    }

    /// The options with only `name` set.
    ///
    /// # Errors
    /// A line that names the place of the value of the wrong type.
    pub(super) fn setting<T: de::DeserializeOwned>(&self, name: &str, node: DocumentNode) -> Parsed<T> {
        let at = node.at;
        let given = T::deserialize(de::value::MapDeserializer::new([(name, node)].into_iter()));
        given.map_err(|cause: de::value::Error| self.at(at, &format!("`{name}`: {cause}")))
    }

    /// An error of one line with the place of the `message` and the offending text.
    fn at(&self, place: Place, message: &str) -> String {
        show(&self.text, place, message)
    }
}

fn show(text: &str, place: Place, message: &str) -> String {
    let line: String = text.lines().nth(place.line.saturating_sub(1)).unwrap_or_default().trim().chars().take(SHOWN_CHARS).collect();
    format!("{place} `{}`: {}", line.escape_debug(), one_line(message))
}

fn one_line(message: &str) -> String {
    message.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// A syntax error's message, and its place if that is known.
type SyntaxError = (Option<Place>, String);

fn toml_root(text: &str) -> std::result::Result<DocumentNode, SyntaxError> {
    let table = DeTable::parse(text).map_err(|e| (e.span().map(|span| Place::of(text, span.start)), e.message().to_string()))?;
    let span = table.span();
    Ok(toml_node(text, Spanned::new(span, DeValue::Table(table.into_inner()))))
}

fn toml_node(text: &str, node: Spanned<DeValue>) -> DocumentNode {
    let at = Place::of(text, node.span().start);
    let value = match node.into_inner() {
        DeValue::String(text) => NodeValue::Text(text.into_owned()),
        DeValue::Boolean(truth) => NodeValue::Truth(truth),
        DeValue::Integer(number) => match i128::from_str_radix(number.as_str(), number.radix()) {
            Ok(integer) => NodeValue::Integer(integer),
            Err(_) => NodeValue::Text(number.as_str().into()),
        },
        DeValue::Float(number) => number.as_str().parse().map_or_else(|_| NodeValue::Text(number.as_str().into()), NodeValue::Float),
        DeValue::Datetime(time) => NodeValue::Text(time.to_string()),
        DeValue::Array(all) => NodeValue::List(all.into_iter().map(|node| toml_node(text, node)).collect()),
        DeValue::Table(all) => {
            let entry = |(key, node): (Spanned<_>, _)| {
                let at = Place::of(text, key.span().start);
                let key: std::borrow::Cow<str> = key.into_inner();
                DocumentEntry { at, key: key.into_owned(), node: toml_node(text, node) }
            };
            NodeValue::Table(all.into_iter().map(entry).collect())
        }
    };
    DocumentNode { at, value }
}

fn yaml_root(text: &str) -> std::result::Result<DocumentNode, SyntaxError> {
    let options = serde_saphyr::options! {
        budget: serde_saphyr::budget! {
            max_depth: DEPTH_MAX,
            max_nodes: NODES_MAX,
            max_aliases: ALIASED_MAX,
            max_documents: 1,
        },
        alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: ALIASED_MAX },
        with_snippet: false,
    };
    let read = serde_saphyr::from_str_with_options::<YamlNode>(text, options);
    read.map(|node| node.0).map_err(|e| (e.location().map(Place::of_yaml), e.without_snippet().to_string()))
}

struct YamlNode(DocumentNode);

impl<'de> Deserialize<'de> for YamlNode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let node = YamlSpanned::<YamlValue>::deserialize(deserializer)?;
        Ok(Self(DocumentNode { at: Place::of_yaml(node.referenced), value: node.value.0 }))
    }
}

struct YamlValue(NodeValue);

impl<'de> Deserialize<'de> for YamlValue {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        deserializer.deserialize_any(YamlVisitor).map(Self)
    }
}

struct YamlVisitor;

impl<'de> Visitor<'de> for YamlVisitor {
    type Value = NodeValue;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a value")
    }
    fn visit_unit<E>(self) -> std::result::Result<NodeValue, E> {
        Ok(NodeValue::Null)
    }
    fn visit_none<E>(self) -> std::result::Result<NodeValue, E> {
        Ok(NodeValue::Null)
    }
    fn visit_bool<E>(self, truth: bool) -> std::result::Result<NodeValue, E> {
        Ok(NodeValue::Truth(truth))
    }
    fn visit_i64<E>(self, number: i64) -> std::result::Result<NodeValue, E> {
        Ok(NodeValue::Integer(number.into()))
    }
    fn visit_u64<E>(self, number: u64) -> std::result::Result<NodeValue, E> {
        Ok(NodeValue::Integer(number.into()))
    }
    fn visit_f64<E>(self, number: f64) -> std::result::Result<NodeValue, E> {
        Ok(NodeValue::Float(number))
    }
    fn visit_str<E>(self, text: &str) -> std::result::Result<NodeValue, E> {
        Ok(NodeValue::Text(text.into()))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> std::result::Result<NodeValue, A::Error> {
        let mut all = Vec::new();
        while let Some(YamlNode(node)) = list.next_element()? {
            all.push(node);
        }
        Ok(NodeValue::List(all))
    }
    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<NodeValue, A::Error> {
        let mut all = Vec::new();
        while let Some((key, YamlNode(node))) = map.next_entry::<YamlSpanned<String>, _>()? {
            all.push(DocumentEntry { at: Place::of_yaml(key.referenced), key: key.value, node });
        }
        Ok(NodeValue::Table(all))
    }
}

fn json_root(text: &str) -> std::result::Result<DocumentNode, SyntaxError> {
    let place = |e: &serde_json::Error| Place { line: e.line().max(1), column: e.column().max(1) };
    let root: &RawValue = serde_json::from_str(text).map_err(|e| (Some(place(&e)), e.to_string()))?;
    json_node(text, root.get(), 0)
}

/// The value with the text `raw`, a slice of `text`.
fn json_node(text: &str, raw: &str, depth: usize) -> std::result::Result<DocumentNode, SyntaxError> {
    let start = offset_in(text, raw);
    let at = Place::of(text, start);
    let wrong = |cause: serde_json::Error| (Some(at), cause.to_string());
    if depth > DEPTH_MAX {
        return Err((Some(at), format!("nested deeper than {DEPTH_MAX}")));
    }
    let value = match raw.as_bytes().first() {
        Some(b'{') => NodeValue::Table(json_entries(text, start, serde_json::from_str(raw).map_err(wrong)?, depth)?),
        Some(b'[') => {
            let all: Vec<&RawValue> = serde_json::from_str(raw).map_err(wrong)?;
            NodeValue::List(all.into_iter().map(|item| json_node(text, item.get(), depth + 1)).collect::<std::result::Result<_, _>>()?)
        }
        _ => json_scalar(serde_json::from_str(raw).map_err(wrong)?),
    };
    Ok(DocumentNode { at, value })
}

fn json_scalar(value: serde_json::Value) -> NodeValue {
    match value {
        serde_json::Value::Bool(truth) => NodeValue::Truth(truth),
        serde_json::Value::String(text) => NodeValue::Text(text),
        serde_json::Value::Number(number) => {
            number.as_i128().map_or_else(|| NodeValue::Float(number.as_f64().unwrap_or(f64::NAN)), NodeValue::Integer)
        }
        _ => NodeValue::Null,
    }
}

fn json_entries(text: &str, start: usize, pairs: JsonPairs, depth: usize) -> std::result::Result<Vec<DocumentEntry>, SyntaxError> {
    let (mut end, mut keys, mut all) = (start, HashSet::new(), Vec::new());
    for (key, raw) in pairs.0 {
        // Between two values stand a comma, spaces and the key, which begins with the first quotation mark.
        let at = Place::of(text, end + text[end..].find('"').unwrap_or(0));
        if !keys.insert(key.clone()) {
            return Err((Some(at), format!("duplicate key `{}`", key.escape_debug())));
        }
        all.push(DocumentEntry { at, key, node: json_node(text, raw.get(), depth + 1)? });
        end = offset_in(text, raw.get()) + raw.get().len();
    }
    Ok(all)
}

/// The byte offset of `part`, a slice of `text`.
fn offset_in(text: &str, part: &str) -> usize {
    part.as_ptr().addr().saturating_sub(text.as_ptr().addr())
}

/// An object's keys and values in order, with duplicates.
struct JsonPairs<'t>(Vec<(String, &'t RawValue)>);

impl<'de> Deserialize<'de> for JsonPairs<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct PairsVisitor;
        impl<'de> Visitor<'de> for PairsVisitor {
            type Value = JsonPairs<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<JsonPairs<'de>, A::Error> {
                let mut all = Vec::new();
                while let Some(pair) = map.next_entry()? {
                    all.push(pair);
                }
                Ok(JsonPairs(all))
            }
        }
        deserializer.deserialize_map(PairsVisitor)
    }
}

impl<'de> IntoDeserializer<'de> for DocumentNode {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for DocumentNode {
    type Error = de::value::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> std::result::Result<V::Value, Self::Error> {
        match self.value {
            NodeValue::Null => visitor.visit_unit(),
            NodeValue::Truth(truth) => visitor.visit_bool(truth),
            NodeValue::Integer(number) => match (u64::try_from(number), i64::try_from(number)) {
                (Ok(number), _) => visitor.visit_u64(number),
                (_, Ok(number)) => visitor.visit_i64(number),
                _ => visitor.visit_f64(number as f64),
            },
            NodeValue::Float(number) => visitor.visit_f64(number),
            NodeValue::Text(text) => visitor.visit_string(text),
            NodeValue::List(all) => de::value::SeqDeserializer::new(all.into_iter()).deserialize_any(visitor),
            NodeValue::Table(all) => {
                de::value::MapDeserializer::new(all.into_iter().map(|entry| (entry.key, entry.node))).deserialize_any(visitor)
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> std::result::Result<V::Value, Self::Error> {
        visitor.visit_some(self)
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> std::result::Result<V::Value, Self::Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        name: &'static str,
        variants: &'static [&'static str],
        visitor: V,
    ) -> std::result::Result<V::Value, Self::Error> {
        match self.value {
            NodeValue::Text(word) => word.into_deserializer().deserialize_enum(name, variants, visitor),
            _ => self.deserialize_any(visitor),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple tuple_struct map
        struct identifier ignored_any
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entries(text: &str, syntax: Syntax) -> Parsed<Vec<DocumentEntry>> {
        Document::parse(text.into(), syntax).map(|document| document.entries)
    }

    /// Keys with their places, as `line:column`.
    fn places(text: &str, syntax: Syntax) -> Vec<String> {
        let show = |entry: &DocumentEntry| {
            let (key, value) = (entry.at, entry.node.at);
            format!("{} {}:{} {}:{}", entry.key, key.line, key.column, value.line, value.column)
        };
        entries(text, syntax).unwrap().iter().map(show).collect()
    }

    fn values(text: &str, syntax: Syntax) -> Vec<NodeValue> {
        entries(text, syntax).unwrap().into_iter().map(|entry| entry.node.value).collect()
    }

    #[test]
    fn keys_and_values_know_their_places_in_all_three() {
        let expected = ["a 1:1 1:5", "b 2:1 2:5"];
        assert_eq!(places("a = 1\nb = 'é'", Syntax::Toml), expected);
        assert_eq!(places("a:  1\nb:  é\n", Syntax::Yaml), expected);
        assert_eq!(places("{\"é\": {}, \"b\":\n [1]}", Syntax::Json), ["é 1:2 1:7", "b 1:11 2:2"]);
    }

    #[test]
    fn the_three_formats_are_equal() {
        use NodeValue::{Float, Integer, Text, Truth};
        let scalars = [Integer(1_000), Float(5e-5), Text("x y".into()), Truth(true), Integer(-3)];
        assert_eq!(values("a = 1_000\nb = 5e-5\nc = 'x y'\nd = true\ne = -3", Syntax::Toml), scalars);
        assert_eq!(values("a: 1000\nb: 5e-5\nc: x y\nd: true\ne: -3", Syntax::Yaml), scalars);
        assert_eq!(values("{\"a\": 1000, \"b\": 5e-5, \"c\": \"x y\", \"d\": true, \"e\": -3}", Syntax::Json), scalars);
        assert_eq!(values("a = 0xff", Syntax::Toml), [Integer(255)]);
        for (text, syntax) in [("a: null", Syntax::Yaml), ("a:", Syntax::Yaml), ("{\"a\": null}", Syntax::Json)] {
            assert_eq!(values(text, syntax), [NodeValue::Null], "{text}");
        }
        let list = values("a: &x [1]\nb: *x", Syntax::Yaml);
        assert!(matches!(&list[..], [NodeValue::List(a), NodeValue::List(b)] if a[0].value == b[0].value), "{list:?}");
        assert_eq!(entries("# nothing\n", Syntax::Yaml), Ok(vec![]));
    }

    #[test]
    fn hostile_documents_are_refused_in_one_line() {
        let bomb = (0..9).fold("a0: &a0 [x]\n".to_string(), |text, i| {
            text + &format!("a{}: &a{} [{}]\n", i + 1, i + 1, vec![format!("*a{i}"); 9].join(","))
        });
        let many = format!("a: [{}]", "1,".repeat(100_000));
        let cases = [
            (bomb, Syntax::Yaml, "alias"),
            (many, Syntax::Yaml, "nodes"),
            (format!("a: {}", "[".repeat(5_000)), Syntax::Yaml, "recursion limit"),
            ("a: 1\na: 2".into(), Syntax::Yaml, "line 2"),
            ("a: 1\n---\nb: 2".into(), Syntax::Yaml, "document"),
            ("a: {b: 1, b: 2}".into(), Syntax::Yaml, "duplicate"),
            ("a: &x *x".into(), Syntax::Yaml, "line 1"),
            ("a: !!python/object:os.system x\nb: [".into(), Syntax::Yaml, "line"),
            ("- 1\n- 2".into(), Syntax::Yaml, "expected keys with values"),
            ("[1]".into(), Syntax::Json, "expected keys with values"),
            ("{\"a\": 1,\n \"a\": 2}".into(), Syntax::Json, "line 2, column 2"),
            ("{\"a\": {\"b\": 1, \"b\": 2}}".into(), Syntax::Json, "duplicate key `b`"),
            ("{\"a\": 1,}".into(), Syntax::Json, "line 1, column 9"),
            (format!("{{\"a\": {}1{}}}", "[".repeat(40_000), "]".repeat(40_000)), Syntax::Json, "nested deeper than 32"),
            (String::new(), Syntax::Json, "EOF"),
        ];
        for (text, syntax, word) in cases {
            let message = entries(&text, syntax).unwrap_err();
            assert!(message.contains(word) && !message.contains('\n') && message.len() < 400, "{word}: {message}");
        }
    }

    #[test]
    fn the_extension_determines_the_format_of_a_file() {
        let of = |name: &str| Syntax::of(Path::new(name));
        assert_eq!((of("a.toml").unwrap(), of("a.YML").unwrap(), of("b.yaml").unwrap()), (Syntax::Toml, Syntax::Yaml, Syntax::Yaml));
        assert_eq!(of("c.json").unwrap(), Syntax::Json);
        assert!(of("run.cfg").unwrap_err().to_string().contains("run.cfg: the name of a configuration ends with"));
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC*|[a-z_=\\[\\]{}'\"., &*:!<>|0-9\n-]*") {
            for syntax in [Syntax::Toml, Syntax::Yaml, Syntax::Json] {
                if let Err(message) = entries(&text, syntax) {
                    prop_assert!(!message.contains('\n'), "{}", message);
                }
            }
        }

        /// JSON is a subset of YAML.
        #[test]
        fn json_and_yaml_agree(pairs in prop::collection::btree_map("[a-z]{1,6}", (any::<i64>(), "[ -~]{0,12}", any::<bool>()), 0..6)) {
            let json = serde_json::to_string(&pairs).unwrap();
            let plain = |text: &str, syntax| {
                let values = values(text, syntax);
                let inner = |value: NodeValue| if let NodeValue::List(all) = value { all.into_iter().map(|node| node.value).collect() } else { vec![] };
                values.into_iter().map(inner).collect::<Vec<Vec<_>>>()
            };
            prop_assert_eq!(plain(&json, Syntax::Json), plain(&json, Syntax::Yaml));
        }
    }
}
