//! Text files in blocks: UTF-8 that is checked as it comes, a byte-order mark left out, lines.

use crate::data::checksum::hex;
use crate::data::read::compression::ByteReader;
use crate::disk::{InFile, Stamp};
use crate::error::{Error, Result};
use std::path::Path;

const BLOCK_BYTES: usize = 256 << 10;
/// Longest line; it is held in memory.
pub(in crate::data) const LINE_BYTES_MAX: usize = 64 << 20;

/// Reads one file from begin to end.
pub(in crate::data) struct TextReader {
    bytes: ByteReader,
    stamp: Stamp,
    /// The last block, of which `used` bytes are text and the rest up to `filled` begins a character.
    buffer: Vec<u8>,
    used: usize,
    filled: usize,
    /// Bytes of text so far.
    made: u64,
}

impl TextReader {
    /// # Errors
    /// `Io` when it cannot be opened; `Format` when it is no regular file.
    pub(in crate::data) fn open(path: &Path) -> Result<Self> {
        let file = InFile::open(path)?;
        let stamp = file.stamp()?;
        Ok(Self { bytes: ByteReader::new(file)?, stamp, buffer: vec![0; BLOCK_BYTES + 4], used: 0, filled: 0, made: 0 })
    }

    /// Bytes of the file read so far.
    pub(in crate::data) fn offset(&self) -> u64 {
        self.bytes.offset()
    }

    /// The next text, at most some hundred kilobytes; `None` after the last.
    ///
    /// # Errors
    /// `Io`; `Format` that names the byte offset of invalid UTF-8, or that reports a change of the file.
    pub(in crate::data) fn next(&mut self) -> Result<Option<&str>> {
        self.buffer.copy_within(self.used..self.filled, 0);
        self.filled -= self.used;
        let is_first = self.made == 0;
        let read = self.bytes.fill(&mut self.buffer[self.filled..self.filled + BLOCK_BYTES])?;
        self.filled += read;
        self.made += read as u64;
        if self.filled == 0 {
            return if self.bytes.file().stamp()? == self.stamp { Ok(None) } else { Err(self.changed()) };
        }
        self.used = match str::from_utf8(&self.buffer[..self.filled]) {
            Ok(text) => text.len(),
            Err(e) if e.error_len().is_none() && read > 0 => e.valid_up_to(),
            Err(e) => {
                let at = self.made - (self.filled - e.valid_up_to()) as u64;
                return Err(Error::format(self.bytes.file().path(), format_args!("byte offset {at}: not UTF-8")));
            }
        };
        let text = str::from_utf8(&self.buffer[..self.used]).unwrap_or_default();
        Ok(Some(text.strip_prefix('\u{feff}').filter(|_| is_first).unwrap_or(text)))
    }

    /// SHA-256 of the bytes read, in hexadecimal.
    pub(in crate::data) fn sha256(self) -> String {
        hex(self.bytes.digest())
    }

    fn changed(&self) -> Error {
        Error::format(self.bytes.file().path(), "the file changed while it was read")
    }
}

/// Assembles records from blocks of text.
pub(in crate::data) trait RecordParts {
    /// Gives `each` the records that end in `block`, with numbers from 1 on.
    ///
    /// # Errors
    /// `Format` for a record that is too long for memory, or for unexpected content; errors of `each`.
    fn push(&mut self, path: &Path, block: &str, each: impl FnMut(u64, &str) -> Result<()>) -> Result<()>;

    /// The file ends.
    ///
    /// # Errors
    /// `Format` when it should not yet; those of `each`.
    fn finish(self, path: &Path, each: impl FnOnce(u64, &str) -> Result<()>) -> Result<()>;
}

/// Puts lines together from blocks.
#[derive(Default)]
pub(in crate::data) struct Lines {
    begun: String,
    number: u64,
}

impl RecordParts for Lines {
    /// Lines come without their end.
    fn push(&mut self, path: &Path, block: &str, mut each: impl FnMut(u64, &str) -> Result<()>) -> Result<()> {
        for part in block.split_inclusive('\n') {
            if self.begun.len() + part.len() > LINE_BYTES_MAX {
                let cause = format_args!("line {}: longer than the {LINE_BYTES_MAX} bytes that a line may have", self.number + 1);
                return Err(Error::format(path, cause));
            }
            self.begun.push_str(part);
            if part.ends_with('\n') {
                self.number += 1;
                let line = std::mem::take(&mut self.begun);
                each(self.number, line.trim_end_matches('\n'))?;
                self.begun = line;
                self.begun.clear();
            }
        }
        Ok(())
    }

    /// The last line, if no line end follows it.
    fn finish(self, _: &Path, each: impl FnOnce(u64, &str) -> Result<()>) -> Result<()> {
        if self.begun.is_empty() { Ok(()) } else { each(self.number + 1, &self.begun) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use sha2::{Digest, Sha256};

    fn read(content: &[u8]) -> Result<String> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        let mut reader = TextReader::open(file.path())?;
        let mut all = String::new();
        while let Some(text) = reader.next()? {
            all.push_str(text);
        }
        assert_eq!(reader.sha256(), hex(Sha256::digest(content)));
        Ok(all)
    }

    #[test]
    fn characters_cross_blocks_and_faults_have_their_offset() {
        for shift in 0..4 {
            let text = "x".repeat(BLOCK_BYTES - shift) + "𝄞é\u{feff}y";
            assert_eq!(read(text.as_bytes()).unwrap(), text);
            let at = |bytes: &[u8]| read(&[&b"x".repeat(BLOCK_BYTES - shift)[..], bytes].concat()).unwrap_err().to_string();
            assert!(at(b"ab\xffd").ends_with(&format!("byte offset {}: not UTF-8", BLOCK_BYTES - shift + 2)));
            assert!(at("𝄞".as_bytes().split_last().unwrap().1).ends_with(&format!("byte offset {}: not UTF-8", BLOCK_BYTES - shift)));
        }
        assert_eq!(read("\u{feff}\u{feff}a".as_bytes()).unwrap(), "\u{feff}a");
        assert_eq!(read(b"").unwrap(), "");
    }

    #[test]
    fn a_file_that_changes_while_it_is_read_is_an_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "abc").unwrap();
        let mut reader = TextReader::open(file.path()).unwrap();
        assert_eq!(reader.next().unwrap(), Some("abc"));
        std::fs::write(file.path(), "abcd").unwrap();
        assert!(reader.next().unwrap_err().to_string().ends_with("changed while it was read"));
    }

    proptest! {
        #[test]
        fn lines_are_those_of_the_whole_text(text in "[ab\n\r]{0,40}", cut: usize) {
            let (head, tail) = text.split_at(cut % (text.len() + 1));
            let (mut lines, mut found) = (Lines::default(), Vec::new());
            for block in [head, tail] {
                lines.push(Path::new("x"), block, |number, line| { found.push((number, line.to_string())); Ok(()) }).unwrap();
            }
            lines.finish(Path::new("x"), |number, line| { found.push((number, line.to_string())); Ok(()) }).unwrap();
            let found_lines: Vec<&str> = found.iter().map(|(_, line)| line.trim_end_matches('\r')).collect();
            let all_lines: Vec<&str> = text.split_inclusive('\n').map(|line| line.trim_end_matches(['\r', '\n'])).collect();
            prop_assert_eq!(found_lines, all_lines);
            let in_order = found.iter().map(|(number, _)| *number).eq(1..=found.len() as u64);
            prop_assert!(in_order);
        }
    }
}
