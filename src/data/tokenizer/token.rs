//! A token in a text, and where characters of a text begin.

/// An id and the range of bytes in the text that it stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C)]
pub(in crate::data) struct Token {
    pub(in crate::data) id: u32,
    pub(in crate::data) start: u32,
    pub(in crate::data) end: u32,
}

impl Token {
    /// This token of a text that begins so many bytes later.
    pub(super) fn after(self, bytes: usize) -> Self {
        Self { start: self.start + bytes as u32, end: self.end + bytes as u32, ..self }
    }
}

/// The last character boundary of `text` up to `at`.
pub(in crate::data) fn floor_boundary(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|&at| text.is_char_boundary(at)).unwrap_or(0)
}
