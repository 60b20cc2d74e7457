//! Numbers and words of configuration files that are read like those of the command line.

use serde::de::{self, Deserializer, Visitor};
use std::fmt;
use std::str::FromStr;

/// Reads a number, a word or a boolean through `FromStr`, like the command line.
pub(crate) fn scalar<'de, D: Deserializer<'de>, T: FromStr<Err: fmt::Display>>(deserializer: D) -> Result<T, D::Error> {
    struct TextValue;
    impl Visitor<'_> for TextValue {
        type Value = String;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a number or a word")
        }
        fn visit_str<E>(self, text: &str) -> Result<String, E> {
            Ok(text.to_string())
        }
        fn visit_i64<E>(self, number: i64) -> Result<String, E> {
            Ok(number.to_string())
        }
        fn visit_u64<E>(self, number: u64) -> Result<String, E> {
            Ok(number.to_string())
        }
        fn visit_f64<E>(self, number: f64) -> Result<String, E> {
            Ok(number.to_string())
        }
    }
    let text = deserializer.deserialize_any(TextValue)?;
    text.parse().map_err(|cause| de::Error::custom(format!("`{text}`: {cause}")))
}

/// Writes `value` as text, because JSON has no NaN.
pub(crate) fn as_text<S: serde::Serializer>(value: &f32, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(value)
}
