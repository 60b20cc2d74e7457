//! The number of parameters of a GPT-2 shape, from its `config.json`: `L (12 h^2 + 13 h) + V h + S h`.
//!
//! The count adds 2 h for the final norm. The paper's sizes omit more than these parameters.

use crate::config::Flags;
use crate::error::{Error, Result};
use serde_json::{Value, json};
use std::path::Path;

/// Returns the line for the file named by `model-config`, relative to `folder`.
///
/// # Errors
/// `Usage` if the flag is missing; errors of reading the file or of missing sizes.
pub fn line(folder: &Path, flags: &Flags) -> Result<Value> {
    let name = flags.get("model-config").and_then(toml::Value::as_str);
    let name = name.ok_or_else(|| Error::Usage("parameters: model-config is no path".into()))?;
    let path = folder.join(name);
    let text = std::fs::read_to_string(&path).map_err(|source| Error::Io { path: path.clone(), source })?;
    let format = |cause: String| Error::Format { path: path.clone(), cause };
    let config: Value = serde_json::from_str(&text).map_err(|error| format(error.to_string()))?;
    let size = |key: &str| config[key].as_u64().ok_or_else(|| format(format!("{key} is no number")));
    let (layers, channels, vocab, positions) = (size("n_layer")?, size("n_embd")?, size("vocab_size")?, size("n_positions")?);
    let params = layers * (12 * channels * channels + 13 * channels) + (vocab + positions + 2) * channels;
    Ok(json!({"bench": "parameters", "model": {"config": name, "layers": layers, "channels": channels, "vocab": vocab, "params": params}}))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_what_gpt_2_has() {
        let dir = tempfile::tempdir().unwrap();
        let count = |text: &str| {
            std::fs::write(dir.path().join("c.json"), text).unwrap();
            line(dir.path(), &toml::from_str("model-config = \"c.json\"").unwrap())
        };
        let gpt2 = count("{\"n_layer\":12,\"n_embd\":768,\"vocab_size\":50257,\"n_positions\":1024}").unwrap();
        assert_eq!(gpt2["model"]["params"], 124_439_808);
        assert!(count("{}").unwrap_err().to_string().ends_with("n_layer is no number"));
        assert!(line(dir.path(), &Flags::new()).is_err());
    }
}
