//! Columns of the type `Json` of the library `datasets`: a table holds such a value as JSON in a string, and the file's metadata names the
//! type.

use parquet::file::metadata::FileMetaData;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Key of the metadata that `datasets` writes.
const METADATA: &str = "huggingface";

/// The places of `Json` values within a row or a value of it.
#[derive(Debug, PartialEq)]
enum JsonPlace {
    Here,
    Within(BTreeMap<String, JsonPlace>),
    Each(Box<JsonPlace>),
}

/// The columns of a file that hold `Json` values.
#[derive(Debug, Default, PartialEq)]
pub(super) struct JsonColumns(BTreeMap<String, JsonPlace>);

impl JsonColumns {
    /// Finds the JSON columns that the metadata of a file names; unreadable metadata names none.
    pub(super) fn of(metadata: &FileMetaData) -> Self {
        let entries = metadata.key_value_metadata().into_iter().flatten();
        let text = entries.filter(|entry| entry.key == METADATA).find_map(|entry| entry.value.as_deref());
        text.and_then(|text| serde_json::from_str(text).ok()).map_or_else(Self::default, |metadata: Value| Self::in_metadata(&metadata))
    }

    fn in_metadata(metadata: &Value) -> Self {
        metadata["info"]["features"].as_object().map_or_else(Self::default, |features| Self(places(features)))
    }

    /// Puts the values of `Json` columns of a row in place of their strings.
    ///
    /// # Errors
    /// For a string that is no JSON, in words that name the column.
    pub(super) fn decode(&self, row: &mut Map<String, Value>) -> Result<(), String> {
        self.0.iter().try_for_each(|(name, place)| match row.get_mut(name) {
            Some(value) => place.decode(value).map_err(|cause| format!("column {name}: {cause}")),
            None => Ok(()),
        })
    }
}

impl JsonPlace {
    /// The place within a value of the type `feature`, if there is one.
    fn of(feature: &Value) -> Option<Self> {
        match feature {
            Value::Array(list) => list.first().and_then(Self::of).map(|place| Self::Each(place.into())),
            Value::Object(keys) if keys.get("_type").is_some_and(Value::is_string) => {
                if keys["_type"] == "Json" {
                    return Some(Self::Here);
                }
                keys.get("feature").and_then(Self::of).map(|place| Self::Each(place.into()))
            }
            Value::Object(fields) => Some(places(fields)).filter(|places| !places.is_empty()).map(Self::Within),
            _ => None,
        }
    }

    fn decode(&self, value: &mut Value) -> Result<(), String> {
        match (self, value) {
            (Self::Here, value) => {
                if let Value::String(text) = value {
                    *value = serde_json::from_str(text).map_err(|e| format!("a value of type Json cannot be read: {e}"))?;
                }
                Ok(())
            }
            (Self::Each(place), Value::Array(list)) => list.iter_mut().try_for_each(|value| place.decode(value)),
            // A sequence of structures is stored as a structure of lists.
            (Self::Each(place), Value::Object(lists)) => match &**place {
                Self::Within(places) => places.iter().try_for_each(|(name, place)| match lists.get_mut(name) {
                    Some(Value::Array(list)) => list.iter_mut().try_for_each(|value| place.decode(value)),
                    _ => Ok(()),
                }),
                _ => Ok(()),
            },
            (Self::Within(places), Value::Object(fields)) => places.iter().try_for_each(|(name, place)| match fields.get_mut(name) {
                Some(value) => place.decode(value),
                None => Ok(()),
            }),
            _ => Ok(()),
        }
    }
}

fn places(features: &Map<String, Value>) -> BTreeMap<String, JsonPlace> {
    features.iter().filter_map(|(name, feature)| Some((name.clone(), JsonPlace::of(feature)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn decoded(features: Value, mut row: Value) -> Result<Value, String> {
        let columns = JsonColumns::in_metadata(&json!({"info": {"features": features}}));
        columns.decode(row.as_object_mut().unwrap()).map(|()| row)
    }

    #[test]
    fn values_of_the_type_are_decoded_wherever_they_stand() {
        let (text, json_type) = (json!({"dtype": "string", "_type": "Value"}), json!({"_type": "Json"}));
        let features = json!({
            "a": json_type, "b": {"feature": {"x": json_type, "y": text}, "_type": "List"}, "c": [json_type], "d": {"e": {"f": json_type}},
            "g": {"feature": {"x": json_type}, "_type": "Sequence"}, "t": text, "_type": text,
        });
        let held = "{\"k\": [null, 1]}";
        let row = json!({"a": held, "b": [{"x": held, "y": held}, {"x": null}], "c": [held, "\"s\""], "d": {"e": {"f": held}},
            "g": {"x": [held]}, "t": held, "_type": "z"});
        let value = json!({"k": [null, 1]});
        let expected = json!({"a": value, "b": [{"x": value, "y": held}, {"x": null}], "c": [value, "s"], "d": {"e": {"f": value}},
            "g": {"x": [value]}, "t": held, "_type": "z"});
        assert_eq!(decoded(features, row), Ok(expected));
    }

    #[test]
    fn a_string_that_is_no_json_is_refused_and_odd_metadata_names_no_column() {
        let refused = decoded(json!({"a": {"_type": "Json"}}), json!({"a": "{"})).unwrap_err();
        assert!(refused.starts_with("column a: a value of type Json cannot be read: EOF"), "{refused}");
        for odd in [json!(null), json!([]), json!({"a": 5}), json!({"a": {"_type": 5}}), json!({"a": {"_type": "List"}}), json!({"a": []})]
        {
            assert_eq!(decoded(odd.clone(), json!({"a": "{"})), Ok(json!({"a": "{"})), "{odd}");
        }
    }
}
