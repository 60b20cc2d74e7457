//! A model's files as they go into checkpoints and exports: with the chat template and the end of text that the run trains with.

use crate::config::settings::Settings;
use crate::data::encode::prompt;
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::error::{Error, Result};
use crate::model_dir::CONFIG;
use serde_json::{Map, Value, json};

const TEMPLATE: &str = "chat_template.jinja";
/// The template that `transformers` prefers where there are tools.
const OF_TOOLS: &str = "additional_chat_templates/tool_use.jinja";
const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
/// Files that name special tokens by their text.
const BY_TEXT: [&str; 2] = [TOKENIZER_CONFIG, "special_tokens_map.json"];

/// Name and content of a file.
type ModelFile = (String, Vec<u8>);

/// The model's `files`, updated to `settings` and `tokenizer` of the run. Files that already agree stay unchanged, byte for byte.
///
/// # Errors
/// `Format` for a file that is no JSON.
pub(super) fn as_trained(mut files: Vec<ModelFile>, settings: &Settings, tokenizer: &Tokenizer) -> Result<Vec<ModelFile>> {
    let is_chosen = settings.chat_template.is_some() || settings.chat_template_name.is_some();
    if let Some(source) = prompt::template_file(tokenizer).filter(|_| is_chosen) {
        set_template(&mut files, source)?;
    }
    if let Some(id) = tokenizer.end_of_text() {
        set_end_ids(&mut files, id)?;
        if let Some(token) = tokenizer.end_token() {
            set_end_tokens(&mut files, token)?;
        }
    }
    Ok(files)
}

/// The template in the file that wins over every other place.
fn set_template(files: &mut Vec<ModelFile>, source: &str) -> Result<()> {
    files.retain(|(name, _)| ![TEMPLATE, "chat_template.json", OF_TOOLS].contains(&name.as_str()));
    files.push((TEMPLATE.into(), source.as_bytes().to_vec()));
    change(files, TOKENIZER_CONFIG, |config| config.remove("chat_template").is_some())
}

/// The token at which a text ends, in the files that name another one, or in the tokenizer's own if none names any.
fn set_end_tokens(files: &mut [ModelFile], token: &str) -> Result<()> {
    let mut is_named = false;
    for name in BY_TEXT {
        change(files, name, |config| {
            let Some(text) = config.get("eos_token").filter(|text| !text.is_null()) else { return false };
            is_named = true;
            let is_listed = text.as_str().or(text["content"].as_str()) == Some(token);
            if !is_listed {
                config.insert("eos_token".into(), token.into());
            }
            !is_listed
        })?;
    }
    if is_named {
        Ok(())
    } else {
        change(files, TOKENIZER_CONFIG, |config| {
            config.insert("eos_token".into(), token.into());
            true
        })
    }
}

/// The id at which generation stops, before those at which it stopped until now.
fn set_end_ids(files: &mut [ModelFile], id: u32) -> Result<()> {
    let has_generation = files.iter().any(|(name, _)| name == GENERATION_CONFIG);
    change(files, GENERATION_CONFIG, |config| {
        let before = ids(config);
        let is_listed = before.contains(&json!(id));
        if !is_listed {
            let all: Vec<Value> = [json!(id)].into_iter().chain(before).collect();
            config.insert("eos_token_id".into(), if all.len() == 1 { json!(id) } else { all.into() });
        }
        !is_listed
    })?;
    change(files, CONFIG, |config| {
        let before = ids(config);
        // Where it says nothing, the file that counts for generation says it.
        let is_listed = before.contains(&json!(id)) || before.is_empty() && has_generation;
        if !is_listed {
            config.insert("eos_token_id".into(), json!(id));
        }
        !is_listed
    })
}

fn ids(config: &Map<String, Value>) -> Vec<Value> {
    match config.get("eos_token_id") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(all)) => all.clone(),
        Some(one) => vec![one.clone()],
    }
}

/// Changes the JSON file `name`, if there is one and `make` reports a change.
fn change(files: &mut [ModelFile], name: &str, make: impl FnOnce(&mut Map<String, Value>) -> bool) -> Result<()> {
    let Some((_, bytes)) = files.iter_mut().find(|(listed, _)| listed == name) else { return Ok(()) };
    let mut config: Map<String, Value> = serde_json::from_slice(bytes).map_err(|e| Error::format(name, e))?;
    if make(&mut config) {
        *bytes = format!("{:#}\n", Value::Object(config)).into_bytes();
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(all: &[(&str, Value)]) -> Vec<ModelFile> {
        all.iter().map(|(name, json)| (name.to_string(), json.to_string().into_bytes())).collect()
    }

    fn json_of(files: &[ModelFile], name: &str) -> Value {
        serde_json::from_slice(&files.iter().find(|(listed, _)| listed == name).unwrap().1).unwrap()
    }

    #[test]
    fn existing_stop_ids_stay_and_new_ones_come_first() {
        for (config, generation, want) in [
            (json!({"eos_token_id": 2}), json!({"eos_token_id": 0}), (json!(2), json!([2, 0]))),
            (json!({"eos_token_id": [1, 2]}), json!({"eos_token_id": [3, 2]}), (json!([1, 2]), json!([3, 2]))),
            (json!({}), json!({}), (Value::Null, json!(2))),
            (json!({"eos_token_id": null}), json!({"eos_token_id": null}), (Value::Null, json!(2))),
        ] {
            let mut all = files(&[(CONFIG, config), (GENERATION_CONFIG, generation)]);
            set_end_ids(&mut all, 2).unwrap();
            assert_eq!((&json_of(&all, CONFIG)["eos_token_id"], &json_of(&all, GENERATION_CONFIG)["eos_token_id"]), (&want.0, &want.1));
        }
        let mut alone = files(&[(CONFIG, json!({"a": 1}))]);
        set_end_ids(&mut alone, 2).unwrap();
        assert_eq!(json_of(&alone, CONFIG), json!({"a": 1, "eos_token_id": 2}));
    }

    #[test]
    fn tokens_are_named_in_the_files_that_there_are() {
        let described = json!({"eos_token": {"content": "</s>", "lstrip": false}, "x": 1});
        let mut all = files(&[(TOKENIZER_CONFIG, described.clone()), (BY_TEXT[1], json!({}))]);
        set_end_tokens(&mut all, "</s>").unwrap();
        assert_eq!((json_of(&all, TOKENIZER_CONFIG), json_of(&all, BY_TEXT[1])), (described, json!({})));
        set_end_tokens(&mut all, "<e>").unwrap();
        assert_eq!((json_of(&all, TOKENIZER_CONFIG), json_of(&all, BY_TEXT[1])), (json!({"eos_token": "<e>", "x": 1}), json!({})));
        let mut unnamed = files(&[(TOKENIZER_CONFIG, json!({})), (BY_TEXT[1], json!({}))]);
        set_end_tokens(&mut unnamed, "<e>").unwrap();
        assert_eq!((json_of(&unnamed, TOKENIZER_CONFIG), json_of(&unnamed, BY_TEXT[1])), (json!({"eos_token": "<e>"}), json!({})));
    }

    #[test]
    fn a_template_takes_the_place_of_every_other() {
        let mut all = files(&[
            (TEMPLATE, json!("old")),
            (OF_TOOLS, json!("old")),
            (TOKENIZER_CONFIG, json!({"chat_template": [{"name": "default"}], "x": 1})),
        ]);
        set_template(&mut all, "new").unwrap();
        assert_eq!(json_of(&all, TOKENIZER_CONFIG), json!({"x": 1}));
        let templates: Vec<_> =
            all.iter().filter(|(name, _)| name.ends_with(".jinja")).map(|(name, bytes)| (&name[..], &bytes[..])).collect();
        assert_eq!(templates, [(TEMPLATE, &b"new"[..])]);
    }
}
