//! Access to the values of a JSON object by key; errors contain the key.

use crate::error::{Error, Result};
use crate::model::family::{FamilySpec, Missing, Presence};
use serde_json::{Map, Value};
use std::path::Path;

/// A larger width or count is a mistake. The limit also keeps every product of sizes within 64 bits.
pub(super) const SIZE_MAX: usize = 1 << 24;
/// Token ids and positions are int32.
pub(super) const INDEX_MAX: usize = i32::MAX as usize;

/// An object of the file, read key by key; `null` counts as absent.
pub(super) struct Keys<'a> {
    pub(super) map: &'a Map<String, Value>,
    pub(super) path: &'a Path,
    /// Prefix of the keys in messages: the name of the object inside the file, with a dot.
    pub(super) within: &'static str,
}

impl<'a> Keys<'a> {
    pub(super) fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    pub(super) fn bad(&self, key: &str, cause: impl std::fmt::Display) -> Error {
        Error::format(self.path, format_args!("{}{key}: {cause}", self.within))
    }

    pub(super) fn missing(&self, key: &str, expected: &str) -> Error {
        match self.map.get(key) {
            None => self.bad(key, format_args!("missing; expected {expected}")),
            Some(value) => self.wrong(key, value, expected),
        }
    }

    pub(super) fn wrong(&self, key: &str, value: &Value, expected: &str) -> Error {
        self.bad(key, format_args!("expected {expected}, found {}", brief(value)))
    }

    pub(super) fn unsupported(&self, key: &str, value: &Value, note: &str) -> Error {
        Error::Unsupported(format!("{}: {}{key} = {} ({note})", self.path.display(), self.within, brief(value)))
    }

    /// A non-negative integer.
    pub(super) fn whole(&self, key: &str) -> Result<usize> {
        let expected = "a whole number";
        let value = self.get(key).ok_or_else(|| self.missing(key, expected))?;
        let number = value.as_u64().and_then(|n| usize::try_from(n).ok());
        number.ok_or_else(|| self.wrong(key, value, expected))
    }

    /// A size: at least 1 and at most `max`.
    pub(super) fn count(&self, key: &str, max: usize) -> Result<usize> {
        let number = self.whole(key)?;
        if number == 0 || number > max {
            return Err(self.bad(key, format_args!("{number} is outside 1 to {max}")));
        }
        Ok(number)
    }

    pub(super) fn optional_count(&self, key: &str) -> Result<Option<usize>> {
        self.get(key).map(|_| self.count(key, INDEX_MAX)).transpose()
    }

    pub(super) fn count_or(&self, key: &str, default: usize, max: usize) -> Result<usize> {
        if self.get(key).is_none() { Ok(default) } else { self.count(key, max) }
    }

    /// A size that is derived from other sizes if it is `null` or, depending on `missing`, absent.
    pub(super) fn derived(&self, key: &str, missing: Missing, default: usize) -> Result<usize> {
        match (self.map.get(key), missing) {
            (None, Missing::Derive) | (Some(Value::Null), _) => Ok(default),
            _ => self.count(key, SIZE_MAX),
        }
    }

    /// A number from `min` to `max`.
    pub(super) fn number(&self, key: &str, default: Option<f64>, min: f64, max: f64) -> Result<f64> {
        let number = match (self.get(key), default) {
            (None, Some(default)) => default,
            (None, None) => return Err(self.missing(key, "a number")),
            (Some(value), _) => value.as_f64().ok_or_else(|| self.wrong(key, value, "a number"))?,
        };
        if !(min..=max).contains(&number) {
            return Err(self.bad(key, format_args!("{number:?} is outside {min:?} to {max:?}")));
        }
        Ok(number)
    }

    /// A soft cap; `null` means none. `missing` is the default of an absent key in families with soft caps; other families do not read the
    /// key.
    pub(super) fn softcap(&self, key: &str, missing: Option<Option<f64>>) -> Result<Option<f32>> {
        match (missing, self.map.get(key)) {
            (None, _) | (_, Some(Value::Null)) => Ok(None),
            (Some(missing), None) => Ok(missing.map(|cap| cap as f32)),
            (Some(_), Some(_)) => Ok(Some(self.number(key, None, 1e-3, 1e9)? as f32)),
        }
    }

    /// A factor, 1 by default.
    pub(super) fn factor(&self, key: &str) -> Result<f32> {
        Ok(self.number(key, Some(1.0), 1e-9, 1e9)? as f32)
    }

    /// A list of `count` numbers from `min` to `max`.
    pub(super) fn numbers(&self, key: &str, count: usize, min: f64, max: f64) -> Result<Vec<f32>> {
        let list = self.get(key).and_then(Value::as_array).filter(|list| list.len() == count);
        let numbers: Option<Vec<f64>> = list.and_then(|list| list.iter().map(Value::as_f64).collect());
        let numbers = numbers.filter(|numbers| numbers.iter().all(|number| (min..=max).contains(number)));
        let numbers = numbers.ok_or_else(|| self.missing(key, &format!("a list of {count} numbers from {min} to {max}")))?;
        Ok(numbers.into_iter().map(|number| number as f32).collect())
    }

    pub(super) fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(key, value, "true or false")),
        }
    }

    pub(super) fn rule(&self, rule: Presence) -> Result<bool> {
        match rule {
            Presence::Never => Ok(false),
            Presence::Always => Ok(true),
            Presence::Key(key, default) => self.flag(key, default),
        }
    }

    /// The object at `key`; `None` if it is absent or empty.
    pub(super) fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map).filter(|map| !map.is_empty())),
            Some(other) => Err(self.wrong(key, other, "an object")),
        }
    }

    /// The dictionary of rope parameters under its old or its new key.
    pub(super) fn rope_parameters(&self, empty: &'a Map<String, Value>) -> Result<(&'static str, &'a Map<String, Value>)> {
        for (key, within) in [("rope_scaling", "rope_scaling."), ("rope_parameters", "rope_parameters.")] {
            if let Some(map) = self.object(key)? {
                return Ok((within, map));
            }
        }
        Ok(("", empty))
    }

    /// Whether the experts are in MXFP4.
    pub(super) fn has_mxfp4_experts(&self, spec: &FamilySpec) -> bool {
        spec.moe.as_ref().is_some_and(|moe| moe.is_gpt_oss) && self.quant_method().is_some_and(|method| method == "mxfp4")
    }

    fn quant_method(&self) -> Option<&'a Value> {
        self.get("quantization_config").and_then(|config| config.get("quant_method"))
    }

    /// Rejects features that would change the arithmetic without changing the architecture's name.
    pub(super) fn refuse_unsupported(&self, spec: &FamilySpec) -> Result<()> {
        let experts: &[&str] = if spec.moe.is_some() { &[] } else { &["num_local_experts", "num_experts", "n_routed_experts"] };
        let bidirectional = "use_bidirectional_attention";
        // Attention in both directions between the tokens of an image does not concern text.
        let of_images = (spec.text_part.is_some() || spec.is_gemma4()) && self.get(bidirectional).is_some_and(|scope| scope == "vision");
        let features = [
            if self.has_mxfp4_experts(spec) { "" } else { "quantization_config" },
            "add_cross_attention",
            "scale_attn_by_inverse_layer_idx",
            "is_encoder_decoder",
            if of_images { "" } else { bidirectional },
        ];
        let on = |value: &Value| *value != false && *value != 0;
        if let Some((key, value)) = features.iter().chain(experts).find_map(|key| self.get(key).filter(|v| on(v)).map(|v| (key, v))) {
            let note = match *key {
                "quantization_config" if spec.text_part.is_some() || self.quant_method().is_some_and(|method| method == "fp8") => {
                    "name the repository of the model in bfloat16, often with -BF16 in its name"
                }
                _ => "not supported by this program",
            };
            return Err(self.unsupported(key, value, note));
        }
        match self.flag("is_causal", true)? {
            true => Ok(()),
            false => Err(self.unsupported("is_causal", &Value::from(false), "only causal attention is supported")),
        }
    }

    pub(super) fn dropout(&self) -> Result<Vec<String>> {
        let keys = ["attention_dropout", "residual_dropout", "embedding_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop"];
        let mut ignored = Vec::new();
        for key in keys {
            let probability = self.number(key, Some(0.0), 0.0, 1.0)?;
            if probability != 0.0 {
                ignored.push(format!("{key} = {probability}"));
            }
        }
        Ok(ignored)
    }
}

/// The value for a message, shortened to a readable length.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
