//! Numbers, texts and errors as bytes, for messages between processes of one program.

use crate::error::Error;
use std::io;
use std::path::{Path, PathBuf};

/// Writes a message.
#[derive(Default)]
pub(in crate::data) struct MessageWriter(Vec<u8>);

/// Reads a message; `None` everywhere where its bytes end.
pub(in crate::data) struct MessageReader<'a>(&'a [u8]);

/// Operations of errors; the first stands for all others.
const OPERATIONS: [&str; 3] = ["read", "open", "lock"];

impl MessageWriter {
    pub(in crate::data) fn into_bytes(self) -> Vec<u8> {
        self.0
    }

    #[cfg(feature = "parquet")]
    pub(in crate::data) fn bytes(&self) -> usize {
        self.0.len()
    }

    pub(in crate::data) fn number(&mut self, number: usize) {
        self.0.extend_from_slice(&(number as u64).to_le_bytes());
    }

    pub(in crate::data) fn text(&mut self, text: &str) {
        self.number(text.len());
        self.0.extend_from_slice(text.as_bytes());
    }

    pub(in crate::data) fn ids(&mut self, ids: &[u32]) {
        self.number(ids.len());
        self.0.extend_from_slice(bytemuck::cast_slice(ids));
    }

    pub(in crate::data) fn error(&mut self, error: &Error) {
        let (kind, first, second) = match error {
            Error::Io { operation, path, source } => {
                self.number(0);
                self.number(OPERATIONS.iter().position(|known| known == operation).unwrap_or(0));
                self.number(source.raw_os_error().unwrap_or(0) as usize);
                return self.texts(path, &source.to_string());
            }
            Error::Format { path, cause } => (1, path.as_path(), cause.clone()),
            Error::Usage(message) => (2, Path::new(""), message.clone()),
            Error::Unsupported(message) => (3, Path::new(""), message.clone()),
            other => (4, Path::new(""), other.to_string()),
        };
        self.number(kind);
        self.texts(first, &second);
    }

    fn texts(&mut self, path: &Path, text: &str) {
        self.text(&path.to_string_lossy());
        self.text(text);
    }
}

impl<'a> MessageReader<'a> {
    pub(in crate::data) fn of(message: &'a [u8]) -> Self {
        Self(message)
    }

    /// Bytes of the message that were not read.
    #[cfg(feature = "parquet")]
    pub(in crate::data) fn bytes_left(&self) -> usize {
        self.0.len()
    }

    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    pub(in crate::data) fn number(&mut self) -> Option<usize> {
        let bytes = self.take(size_of::<u64>())?.try_into().ok()?;
        usize::try_from(u64::from_le_bytes(bytes)).ok()
    }

    pub(in crate::data) fn text(&mut self) -> Option<&'a str> {
        let length = self.number()?;
        str::from_utf8(self.take(length)?).ok()
    }

    pub(in crate::data) fn ids(&mut self) -> Option<Vec<u32>> {
        self.values()
    }

    /// Values that were written as ids.
    pub(in crate::data) fn values<T: bytemuck::Pod>(&mut self) -> Option<Vec<T>> {
        let bytes = self.number()?.checked_mul(size_of::<u32>())?;
        let bytes = self.take(bytes).filter(|bytes| bytes.len().is_multiple_of(size_of::<T>()))?;
        Some(bytemuck::pod_collect_to_vec(bytes))
    }

    /// So many values, each by `read`.
    pub(in crate::data) fn list<T>(&mut self, mut read: impl FnMut(&mut Self) -> Option<T>) -> Option<Vec<T>> {
        let count = self.number()?;
        (0..count).map(|_| read(self)).collect()
    }

    pub(in crate::data) fn error(&mut self) -> Option<Error> {
        let kind = self.number()?;
        if kind == 0 {
            let (operation, code) = (OPERATIONS.get(self.number()?).unwrap_or(&OPERATIONS[0]), self.number()? as i32);
            let (path, text) = (self.text()?, self.text()?);
            let source = if code == 0 { io::Error::other(text) } else { io::Error::from_raw_os_error(code) };
            return Some(Error::io(operation, path, source));
        }
        let (path, text) = (PathBuf::from(self.text()?), self.text()?.to_string());
        Some(match kind {
            1 => Error::Format { path, cause: text },
            2 => Error::Usage(text),
            3 => Error::Unsupported(text),
            _ => Error::resource("read a foreign file", text),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_come_back_and_an_end_is_noticed_everywhere() {
        let mut writer = MessageWriter::default();
        writer.number(7);
        writer.text("é");
        writer.ids(&[1, u32::MAX]);
        let message = writer.into_bytes();
        let read = |message: &[u8]| {
            let mut parts = MessageReader::of(message);
            Some((parts.number()?, parts.text()?.to_string(), parts.ids()?))
        };
        assert_eq!(read(&message), Some((7, "é".into(), vec![1, u32::MAX])));
        assert!((0..message.len()).all(|cut| read(&message[..cut]).is_none()));
        assert!(MessageReader::of(&[0xff; 8]).ids().is_none() && MessageReader::of(&[0xff; 8]).text().is_none());
    }

    #[test]
    fn errors_keep_their_kind_and_words() {
        for error in [
            Error::io("read", "a", io::Error::from_raw_os_error(2)),
            Error::io("open", "a", io::Error::other("odd")),
            Error::format("a", "odd"),
            Error::usage("odd"),
            Error::Unsupported("odd".into()),
        ] {
            let mut writer = MessageWriter::default();
            writer.error(&error);
            let message = writer.into_bytes();
            let back = MessageReader::of(&message).error().unwrap();
            assert_eq!((back.to_string(), back.exit_code()), (error.to_string(), error.exit_code()));
        }
    }
}
