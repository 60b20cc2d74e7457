//! The place of a decoder in the configuration and the files of a multimodal model.

/// How a multimodal model holds a decoder.
#[derive(Debug)]
pub(crate) struct TextPart {
    /// Whether old files have the decoder's keys beside the keys of the whole model, instead of in `text_config`.
    pub(crate) may_be_flat: bool,
    /// Accepted values of `model_type` in `text_config`.
    pub(crate) model_types: &'static [&'static str],
    /// Values of missing keys: the defaults of the class in `transformers`.
    pub(crate) defaults: &'static [(&'static str, f64)],
    /// Names of the decoder in files. The first has the names of the family's row.
    pub(crate) layouts: [Layout; 3],
    /// Beginnings of the names of carried tensors, after an optional `model.`.
    pub(super) carried: &'static [&'static str],
    /// Keys of the ids that stand for images, sound or video in a text, each under its alternative names, with the default of the class.
    pub(crate) media: &'static [(&'static [&'static str], u32)],
}

/// Names of a decoder's tensors in files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) prefix: &'static str,
    pub(crate) head: &'static str,
}

impl Layout {
    /// The name in files of this layout of the tensor that files of the layout `other` call `name`.
    pub(crate) fn name_from(self, other: Self, name: &str) -> String {
        match name.strip_prefix(other.prefix) {
            _ if name == other.head => self.head.to_string(),
            Some(rest) => format!("{}{rest}", self.prefix),
            None => name.to_string(),
        }
    }
}

impl TextPart {
    /// Whether files may hold the tensor `name` beside the decoder.
    pub(crate) fn carries(&self, name: &str) -> bool {
        let name = name.strip_prefix("model.").unwrap_or(name);
        self.carried.iter().any(|begin| name.starts_with(begin))
    }
}
