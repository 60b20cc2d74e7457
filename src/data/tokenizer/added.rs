//! Added tokens that stand beside `tokenizer.json`: `transformers` adds each that `tokenizer.json` lacks, in this order, with the next free
//! id. The id that a file declares does not count.
//!
//! 1. `added_tokens_decoder` of `tokenizer_config.json`, by id; where the file has none, `added_tokens.json`, by id;
//! 2. the tokens that `pad_token` and its like name, then tokens under names of the model's own (`image_token`);
//! 3. the lists `extra_special_tokens` or `additional_special_tokens`.
//!
//! This is the order of `transformers` 5. Release 4 adds the lists before tokens under a model's own names, and does not add a token that
//! only a key such as `image_token` names.

use super::special_files::{DECODER, SpecialFiles};
use crate::data::checksum;
use crate::error::{Error, Result};
use serde_json::{Map, Value};
use std::collections::HashSet;
use tokenizers::{AddedToken, Tokenizer};

const EXTRA: &str = "extra_special_tokens";
const ADDITIONAL: &str = "additional_special_tokens";
/// Names of special tokens that `transformers` has for every model, in its order.
const NAMES: [&str; 7] = ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];
/// Names of the tokens that this program writes itself: a name alone does not make such a token.
const WRITTEN: [&str; 2] = ["bos_token", "eos_token"];

/// Tokens that `tokenizer.json` lacks, and whether special tokens are cut into pieces.
#[derive(Default)]
pub(super) struct DeclaredTokens {
    tokens: Vec<AddedToken>,
    /// Tokens of the list that only `bos_token` or `eos_token` names.
    only_named: HashSet<String>,
    splits_special: bool,
}

/// A list of tokens without repetition.
struct TokenList {
    tokens: Vec<AddedToken>,
    contents: HashSet<String>,
}

impl DeclaredTokens {
    /// The tokens that `files` declare and `tokenizer` lacks, or has with other flags.
    ///
    /// # Errors
    /// `Format` that names the file and the key of a value that is no token.
    pub(super) fn read(files: &SpecialFiles<'_>, tokenizer: &Tokenizer) -> Result<Self> {
        let known = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        let is_known = |token: &AddedToken| known.values().any(|known| known == token);
        let described = if files.has_decoder() { decoder(files)? } else { added_tokens_file(files, &|id| known.contains_key(&id))? };
        let tokens: Vec<AddedToken> = described.into_iter().filter(|token| !is_known(token)).collect();
        let contents = known.values().chain(&tokens).map(|token| token.content.clone()).collect();
        let mut list = TokenList { tokens, contents };
        let in_vocabulary = |token: &AddedToken| tokenizer.token_to_id(&token.content).is_some();
        let mut only_named = HashSet::new();
        for (name, token) in named(files)? {
            if list.add(&token) && WRITTEN.contains(&name.as_str()) && !in_vocabulary(&token) {
                only_named.insert(token.content);
            }
        }
        for token in extra(files)? {
            only_named.remove(&token.content);
            list.add(&token);
        }
        Ok(Self { tokens: list.tokens, only_named, splits_special: files.config()["split_special_tokens"] == true })
    }

    /// Adds the tokens to `tokenizer`.
    ///
    /// # Errors
    /// The library's, in words.
    pub(super) fn apply(&self, tokenizer: &mut Tokenizer) -> std::result::Result<(), String> {
        tokenizer.set_encode_special_tokens(self.splits_special);
        let added = if self.tokens.is_empty() { Ok(0) } else { tokenizer.add_tokens(self.tokens.iter().cloned()) };
        added.map(|_| ()).map_err(|e| format!("added tokens: {e}"))
    }

    /// Whether only `bos_token` or `eos_token` names the token `content`.
    pub(super) fn is_only_named(&self, content: &str) -> bool {
        self.only_named.contains(content)
    }

    /// Checksum of all that this changes; empty where it changes nothing.
    pub(super) fn identity(&self) -> String {
        if self.tokens.is_empty() && !self.splits_special {
            return String::new();
        }
        let tokens = serde_json::to_string(&self.tokens).unwrap_or_default();
        checksum::sha256(format!("{tokens}\n{}", self.splits_special).as_bytes())
    }
}

impl TokenList {
    /// Adds `token` unless it is there; whether it was added.
    fn add(&mut self, token: &AddedToken) -> bool {
        let is_new = self.contents.insert(token.content.clone());
        self.tokens.extend(is_new.then(|| token.clone()));
        is_new
    }
}

/// The tokens of `added_tokens_decoder`, by id.
fn decoder(files: &SpecialFiles<'_>) -> Result<Vec<AddedToken>> {
    let wrong = |cause: &str| files.wrong_config(format!("{DECODER}: {cause}"));
    let entries = files.config()[DECODER].as_object().ok_or_else(|| wrong("not an object of ids and tokens"))?;
    let entry = |(id, token): (&String, &Value)| {
        let number: u32 = id.parse().map_err(|_| wrong(&format!("{id:?} is not a token's id")))?;
        let token = if token.is_object() { described(token, false) } else { None };
        Ok((number, token.ok_or_else(|| wrong(&format!("{id:?} is not described by an object with its content")))?))
    };
    let mut entries = entries.iter().map(entry).collect::<Result<Vec<_>>>()?;
    entries.sort_by_key(|(id, _)| *id);
    Ok(entries.into_iter().map(|(_, token)| token).collect())
}

/// The tokens of `added_tokens.json`, by id, without the ids of tokens in `tokenizer.json`.
fn added_tokens_file(files: &SpecialFiles<'_>, is_taken: &dyn Fn(u32) -> bool) -> Result<Vec<AddedToken>> {
    let (path, content) = files.added_tokens()?;
    let wrong = |cause: String| Error::format(&path, cause);
    let special: HashSet<String> = special_contents(files)?;
    let entries = match content {
        Value::Null => return Ok(Vec::new()),
        Value::Object(entries) => entries,
        _ => return Err(wrong("not an object of tokens and ids".into())),
    };
    let entry = |(content, id): (String, Value)| {
        let known = id.as_u64().and_then(|id| u32::try_from(id).ok());
        let id = known.ok_or_else(|| wrong(format!("{id} of {content:?} is not a token's id")))?;
        let is_special = special.contains(&content);
        Ok((id, AddedToken::from(content, is_special)))
    };
    let mut entries = entries.into_iter().map(entry).collect::<Result<Vec<_>>>()?;
    entries.retain(|(id, _)| !is_taken(*id));
    entries.sort_by_key(|(id, _)| *id);
    Ok(entries.into_iter().map(|(_, token)| token).collect())
}

/// Contents of tokens that make an entry of `added_tokens.json` special.
fn special_contents(files: &SpecialFiles<'_>) -> Result<HashSet<String>> {
    let named = NAMES.iter().filter_map(|name| described(files.setting(name), true));
    let listed = lists(files)?.into_iter();
    Ok(named.chain(listed).map(|token| token.content).collect())
}

/// Each name of a special token with its token: common names first, then names of the model's own.
fn named(files: &SpecialFiles<'_>) -> Result<Vec<(String, AddedToken)>> {
    let mut own = Map::new();
    for file in files.counted() {
        let Value::Object(entries) = file else { continue };
        let is_own = |name: &str, token: &Value| name.ends_with("_token") && !NAMES.contains(&name) && described(token, true).is_some();
        own.extend(entries.iter().filter(|(name, token)| is_own(name, token)).map(|(name, token)| (name.clone(), token.clone())));
    }
    for file in files.counted() {
        own.extend(file[EXTRA].as_object().into_iter().flatten().map(|(name, token)| (name.clone(), token.clone())));
    }
    let common = NAMES.iter().map(|name| (name.to_string(), files.setting(name).clone()));
    let common = common.filter(|(_, token)| !token.is_null());
    let token = |(name, token): (String, Value)| {
        let wrong = || files.wrong_config(format!("{name}: {token} is neither a token nor a description of one"));
        // Some files hold numbers and flags under such names.
        let described = described(&token, true).ok_or_else(wrong)?;
        Ok((name, AddedToken { special: true, ..described }))
    };
    common.chain(own).map(token).collect()
}

/// The tokens of `extra_special_tokens`, or where that is no list of any, of `additional_special_tokens`.
fn extra(files: &SpecialFiles<'_>) -> Result<Vec<AddedToken>> {
    let listed = lists(files)?;
    if listed.is_empty() { list(files, ADDITIONAL, files.setting(ADDITIONAL)) } else { Ok(listed) }
}

/// The lists of special tokens that are known before `added_tokens.json` is read: those under both names in `tokenizer_config.json`, and
/// `extra_special_tokens` of `special_tokens_map.json`.
fn lists(files: &SpecialFiles<'_>) -> Result<Vec<AddedToken>> {
    let config = files.config();
    let is_empty = |value: &Value| value.as_array().is_none_or(Vec::is_empty) && value.as_object().is_none_or(Map::is_empty);
    let own = if is_empty(&config[EXTRA]) { (ADDITIONAL, &config[ADDITIONAL]) } else { (EXTRA, &config[EXTRA]) };
    let mut all = list(files, own.0, own.1)?;
    if !files.has_decoder() {
        all.extend(list(files, EXTRA, &files.map()[EXTRA])?);
    }
    Ok(all)
}

/// The tokens of a list; an object names its tokens, which [`named`] reads.
fn list(files: &SpecialFiles<'_>, key: &str, value: &Value) -> Result<Vec<AddedToken>> {
    let wrong = |value: &Value| files.wrong_config(format!("{key}: {value} is neither a token nor a description of one"));
    match value {
        Value::Null | Value::Object(_) => Ok(Vec::new()),
        Value::Array(tokens) => tokens.iter().map(|token| described(token, true).ok_or_else(|| wrong(token))).collect(),
        other => Err(wrong(other)),
    }
}

/// The token that is written as its text, or as an object with its content and flags; `None` for anything else. Text makes a special token,
/// and so does an object without the flag where `is_special`.
fn described(token: &Value, is_special: bool) -> Option<AddedToken> {
    if let Some(content) = token.as_str() {
        return Some(AddedToken::from(content, true));
    }
    let content = token["content"].as_str()?;
    let flag = |name: &str, default: bool| token[name].as_bool().unwrap_or(default);
    let special = flag("special", is_special);
    let plain = AddedToken::from(content, special).normalized(flag("normalized", !special));
    Some(plain.lstrip(flag("lstrip", false)).rstrip(flag("rstrip", false)).single_word(flag("single_word", false)))
}

#[cfg(test)]
mod tests {
    use crate::data::encode::tokenizer_handle::tests::{WORDS, load_or_bytes, model_dir};

    const CONFIG: &str = "tokenizer_config.json";

    fn ids(files: &[(&str, &str)]) -> crate::error::Result<Vec<u32>> {
        load_or_bytes(model_dir(&[&[("tokenizer.json", WORDS)], files].concat()).path())?.encode("a <t> b <u>")
    }

    #[test]
    fn invalid_tokens_are_errors_that_name_file_and_key() {
        for (file, content, cause) in [
            (CONFIG, r#"{"added_tokens_decoder": []}"#, "added_tokens_decoder: not an object of ids and tokens"),
            (CONFIG, r#"{"added_tokens_decoder": {"x": {"content": "<t>"}}}"#, "added_tokens_decoder: \"x\" is not a token's id"),
            (CONFIG, r#"{"added_tokens_decoder": {"9": "<t>"}}"#, "added_tokens_decoder: \"9\" is not described by an object"),
            (CONFIG, r#"{"added_tokens_decoder": {"9": {"special": true}}}"#, "added_tokens_decoder: \"9\" is not described"),
            (CONFIG, r#"{"additional_special_tokens": "<t>"}"#, "additional_special_tokens: \"<t>\" is neither a token nor a description"),
            (CONFIG, r#"{"extra_special_tokens": [5]}"#, "extra_special_tokens: 5 is neither"),
            (CONFIG, r#"{"extra_special_tokens": {"image_token": 5}}"#, "image_token: 5 is neither"),
            (CONFIG, r#"{"pad_token": 5}"#, "pad_token: 5 is neither"),
            ("added_tokens.json", "[]", "not an object of tokens and ids"),
            ("added_tokens.json", r#"{"<t>": -1}"#, "-1 of \"<t>\" is not a token's id"),
        ] {
            let refused = ids(&[(file, content)]).unwrap_err().to_string();
            assert!(refused.contains(&format!("{file}: ")) && refused.contains(cause), "{content}: {refused}");
        }
    }

    #[test]
    fn tokens_that_are_added_are_part_of_the_identity() {
        let identity =
            |files: &[(&str, &str)]| load_or_bytes(model_dir(&[&[("tokenizer.json", WORDS)], files].concat()).path()).unwrap().identity();
        let plain = identity(&[]);
        assert!(plain.get("added_tokens").is_none());
        assert_eq!(plain, identity(&[(CONFIG, r#"{"model_max_length": 5, "split_special_tokens": false}"#)]));
        let declared = r#"{"content": "</s>", "special": true, "normalized": false}"#;
        assert_eq!(plain, identity(&[(CONFIG, &format!(r#"{{"added_tokens_decoder": {{"7": {declared}}}}}"#))]));
        let changed = [
            r#"{"pad_token": "<t>"}"#,
            r#"{"pad_token": {"content": "<t>", "lstrip": true}}"#,
            r#"{"additional_special_tokens": ["<t>", "<u>"]}"#,
            r#"{"additional_special_tokens": ["<u>", "<t>"]}"#,
            r#"{"split_special_tokens": true}"#,
        ]
        .map(|config| identity(&[(CONFIG, config)]).to_string());
        let different: std::collections::BTreeSet<_> = changed.iter().chain([&plain.to_string()]).cloned().collect();
        assert_eq!(different.len(), 6, "{changed:?}");
    }

    /// A name alone does not make the token that ends documents: it would be one that the model has never seen.
    #[test]
    fn an_end_of_text_must_be_declared_elsewhere() {
        let end = |files: &[(&str, &str)]| {
            let dir = model_dir(&[&[("tokenizer.json", WORDS)], files].concat());
            load_or_bytes(dir.path()).map(|tokenizer| tokenizer.end_of_text())
        };
        let refused = end(&[(CONFIG, r#"{"eos_token": "<t>"}"#)]).unwrap_err().to_string();
        assert!(refused.ends_with("tokenizer_config.json: eos_token \"<t>\" is not in tokenizer.json"), "{refused}");
        assert_eq!(end(&[(CONFIG, r#"{"eos_token": "<t>", "added_tokens_decoder": {"9": {"content": "<t>"}}}"#)]).unwrap(), Some(8));
        assert_eq!(end(&[(CONFIG, r#"{"eos_token": "<t>", "additional_special_tokens": ["<t>"]}"#)]).unwrap(), Some(8));
        assert_eq!(end(&[(CONFIG, r#"{"eos_token": "a"}"#)]).unwrap(), Some(0));
    }
}
