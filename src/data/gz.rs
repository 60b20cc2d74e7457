//! Bytes of a data file from begin to end, uncompressed where its name ends in `.gz`.

use crate::disk::InFile;
use crate::error::{Error, Result};
use flate2::bufread::MultiGzDecoder;
use sha2::{Digest, Sha256};
use std::io::{self, BufReader, Read};
use std::path::Path;

/// Text of a compressed file is at most so many times its size: real text is below 50.
pub(super) const EXPANSION_MAX: u64 = 200;
/// What a small file may expand to in any case.
pub(super) const SMALL_BYTES: u64 = 16 << 20;

/// Whether the file at `path` is compressed, by its name.
pub(super) fn is_compressed(path: &Path) -> bool {
    path.extension().is_some_and(|extension| extension == "gz")
}

/// A file that is read in order, and the checksum of what was read.
pub(super) struct InOrder {
    file: InFile,
    offset: u64,
    sha256: Sha256,
}

/// The bytes of one file in order.
pub(super) enum ByteReader {
    Plain(InOrder),
    Gz { decoder: Box<MultiGzDecoder<BufReader<InOrder>>>, made: u64 },
}

impl InOrder {
    /// Fills `out` as far as there are bytes; returns how many.
    fn fill(&mut self, out: &mut [u8]) -> Result<usize> {
        let here = out.len().min((self.file.bytes() - self.offset) as usize);
        self.file.read_at(self.offset, &mut out[..here])?;
        self.sha256.update(&out[..here]);
        self.offset += here as u64;
        Ok(here)
    }
}

impl Read for InOrder {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.fill(out).map_err(io::Error::other)
    }
}

impl ByteReader {
    pub(super) fn new(file: InFile) -> Self {
        let is_gz = is_compressed(file.path());
        let file = InOrder { file, offset: 0, sha256: Sha256::new() };
        if is_gz {
            Self::Gz { decoder: Box::new(MultiGzDecoder::new(BufReader::with_capacity(1 << 16, file))), made: 0 }
        } else {
            Self::Plain(file)
        }
    }

    fn in_order(&self) -> &InOrder {
        match self {
            Self::Plain(file) => file,
            Self::Gz { decoder, .. } => decoder.get_ref().get_ref(),
        }
    }

    pub(super) fn file(&self) -> &InFile {
        &self.in_order().file
    }

    /// Bytes of the file read so far.
    pub(super) fn offset(&self) -> u64 {
        self.in_order().offset
    }

    /// Fills `out` as far as there are bytes; returns how many.
    ///
    /// # Errors
    /// `Io`; `Format` for what is no gzip, ends early, or expands to more than data does.
    pub(super) fn fill(&mut self, out: &mut [u8]) -> Result<usize> {
        let mut filled = 0;
        while filled < out.len() {
            let read = match self {
                Self::Plain(file) => file.fill(&mut out[filled..])?,
                Self::Gz { decoder, .. } => {
                    decoder.read(&mut out[filled..]).map_err(|e| Error::format(self.file().path(), format_args!("gzip: {e}")))?
                }
            };
            if read == 0 {
                break;
            }
            filled += read;
        }
        if let Self::Gz { made, .. } = self {
            *made += filled as u64;
            let (made, max) = (*made, (EXPANSION_MAX * self.file().bytes()).max(SMALL_BYTES));
            if made > max {
                return Err(Error::format(
                    self.file().path(),
                    format_args!("expands to more than {max} bytes, {EXPANSION_MAX} times its size"),
                ));
            }
        }
        Ok(filled)
    }

    /// SHA-256 of the file's bytes.
    pub(super) fn digest(self) -> [u8; 32] {
        let file = match self {
            Self::Plain(file) => file,
            Self::Gz { decoder, .. } => decoder.into_inner().into_inner(),
        };
        file.sha256.finalize().into()
    }
}
