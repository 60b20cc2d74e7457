//! The decoder of a multimodal model, from `config.json`: its keys lie in `text_config`, or in old files beside the keys of the whole model.

use super::keys::{INDEX_MAX, Keys};
use crate::data::encode::media_token::MediaToken;
use crate::error::Result;
use crate::model::family::Family;
use crate::model::shape::ModelShape;
use crate::model::text_part::TextPart;
use serde_json::{Map, Value};

/// Key of the object with the decoder's keys.
pub(super) const NESTED: &str = "text_config";
const TIED: &str = "tie_word_embeddings";
/// Keys that files have at either level.
const EITHER_LEVEL: [&str; 1] = ["initializer_range"];

/// The shape that `read` makes of the keys of the decoder of `family`, with the tokens of other input than text.
pub(super) fn decoder(top: &Keys, family: Family, part: &TextPart, read: impl FnOnce(&Keys) -> Result<ModelShape>) -> Result<ModelShape> {
    let nested = match top.get(NESTED) {
        Some(Value::Object(map)) => Some(map),
        None if part.may_be_flat => None,
        None => return Err(top.missing(NESTED, "an object with the keys of the text part")),
        Some(other) => return Err(top.wrong(NESTED, other, "an object")),
    };
    let within = if nested.is_some() { "text_config." } else { "" };
    let mut map = nested.unwrap_or(top.map).clone();
    complete(&mut map, top, part);
    let keys = Keys { map: &map, within, ..*top };
    if nested.is_some() {
        expect_type(&keys, family)?;
    }
    Ok(ModelShape { media_tokens: media_tokens(top, &keys, part)?, ..read(&keys)? })
}

fn expect_type(keys: &Keys, family: Family) -> Result<()> {
    let known: Vec<&str> = family.decoders().collect();
    match keys.get("model_type") {
        Some(kind) if !kind.as_str().is_some_and(|kind| known.contains(&kind)) => {
            Err(keys.unsupported("model_type", kind, &format!("known: {}", known.join(", "))))
        }
        _ => Ok(()),
    }
}

/// Adds to the decoder's keys those of the other level that count, and the class's defaults of missing ones.
fn complete(map: &mut Map<String, Value>, top: &Keys, part: &TextPart) {
    for key in EITHER_LEVEL {
        if let Some(value) = top.get(key).filter(|_| map.get(key).is_none_or(Value::is_null)) {
            map.insert(key.into(), value.clone());
        }
    }
    // Classes that once were flat also tie by the nested key alone.
    let either_ties = part.may_be_flat && map.get(TIED) == Some(&Value::Bool(true));
    if let Some(tied) = top.get(TIED).filter(|_| !either_ties) {
        map.insert(TIED.into(), tied.clone());
    }
    for (key, value) in part.defaults {
        let number = if value.fract() == 0.0 { Value::from(*value as u64) } else { Value::from(*value) };
        map.entry(*key).or_insert(number);
    }
}

/// The tokens of other input than text, from either level, or by the class's defaults.
fn media_tokens(top: &Keys, keys: &Keys, part: &TextPart) -> Result<Vec<MediaToken>> {
    let token = |(names, default): &(&'static [&'static str], u32)| {
        let places = names.iter().flat_map(|name| [(top, *name), (keys, *name)]);
        match places.into_iter().find(|(keys, name)| keys.get(name).is_some()) {
            None => Ok(MediaToken { key: names[0], id: *default }),
            Some((keys, key)) => match keys.whole(key)? {
                id if id <= INDEX_MAX => Ok(MediaToken { key, id: id as u32 }),
                id => Err(keys.bad(key, format_args!("{id} is outside 0 to {INDEX_MAX}"))),
            },
        }
    };
    part.media.iter().map(token).collect()
}
