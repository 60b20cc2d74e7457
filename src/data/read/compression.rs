//! Bytes of a data file from begin to end, uncompressed where its name ends in `.gz` or `.zst`, in either case of letters.

use crate::disk::InFile;
use crate::error::{Error, Result};
use flate2::bufread::MultiGzDecoder;
use sha2::{Digest, Sha256};
use std::io::{self, BufReader, Read};
use std::path::Path;
use zstd::stream::read::Decoder as ZstdDecoder;

const GZIP: &str = "gz";
const ZSTANDARD: &str = "zst";
/// A frame with a larger window is refused: the window would be in memory whole.
const WINDOW_LOG_MAX: u32 = 27;
/// Text of a compressed file is at most so many times its size: real text is below 50.
pub(in crate::data) const EXPANSION_MAX: u64 = 200;
/// Expanded size that a small file may have whatever its ratio.
pub(in crate::data) const SMALL_BYTES: u64 = 16 << 20;

/// Whether the file at `path` is compressed, by its name.
pub(in crate::data) fn is_compressed(path: &Path) -> bool {
    has_extension(path, GZIP) || has_extension(path, ZSTANDARD)
}

/// Whether the name of the file at `path` ends in `extension`, in either case of letters.
pub(in crate::data) fn has_extension(path: &Path, extension: &str) -> bool {
    path.extension().is_some_and(|found| found.eq_ignore_ascii_case(extension))
}

/// A file that is read in order, and the checksum of the bytes read so far.
pub(in crate::data) struct InOrder {
    file: InFile,
    offset: u64,
    sha256: Sha256,
}

/// The bytes of one file in order.
pub(in crate::data) enum ByteReader {
    Plain(InOrder),
    Compressed { decoder: Decoder, made: u64 },
}

/// Decoder of a compressed file.
pub(in crate::data) enum Decoder {
    Gzip(Box<MultiGzDecoder<BufReader<InOrder>>>),
    Zstandard(Box<ZstdDecoder<'static, BufReader<InOrder>>>),
}

impl InOrder {
    /// Fills `out` as far as there are bytes; returns how many.
    fn fill(&mut self, out: &mut [u8]) -> Result<usize> {
        let count = out.len().min((self.file.bytes() - self.offset) as usize);
        self.file.read_at(self.offset, &mut out[..count])?;
        self.sha256.update(&out[..count]);
        self.offset += count as u64;
        Ok(count)
    }
}

impl Read for InOrder {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.fill(out).map_err(io::Error::other)
    }
}

impl ByteReader {
    /// # Errors
    /// `Resource` where there is no memory for a decoder.
    pub(in crate::data) fn new(file: InFile) -> Result<Self> {
        let path = file.path().to_path_buf();
        let is_empty = file.bytes() == 0;
        let file = InOrder { file, offset: 0, sha256: Sha256::new() };
        // An empty file is an empty text under any name.
        if is_compressed(&path) && !is_empty {
            Ok(Self::Compressed { decoder: Decoder::new(&path, file)?, made: 0 })
        } else {
            Ok(Self::Plain(file))
        }
    }

    fn in_order(&self) -> &InOrder {
        match self {
            Self::Plain(file) => file,
            Self::Compressed { decoder, .. } => decoder.in_order(),
        }
    }

    pub(in crate::data) fn file(&self) -> &InFile {
        &self.in_order().file
    }

    /// Bytes of the file read so far.
    pub(in crate::data) fn offset(&self) -> u64 {
        self.in_order().offset
    }

    /// Fills `out` as far as there are bytes; returns how many.
    ///
    /// # Errors
    /// `Io`; `Format` for a file that is not compressed as its extension implies, ends early, or expands to more than data does.
    pub(in crate::data) fn fill(&mut self, out: &mut [u8]) -> Result<usize> {
        let mut filled = 0;
        while filled < out.len() {
            let read = match self {
                Self::Plain(file) => file.fill(&mut out[filled..])?,
                Self::Compressed { decoder, .. } => {
                    decoder.read(&mut out[filled..]).map_err(|cause| Error::format(self.file().path(), cause))?
                }
            };
            if read == 0 {
                break;
            }
            filled += read;
        }
        if let Self::Compressed { made, .. } = self {
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
    pub(in crate::data) fn digest(self) -> [u8; 32] {
        let file = match self {
            Self::Plain(file) => file,
            Self::Compressed { decoder, .. } => decoder.into_in_order(),
        };
        file.sha256.finalize().into()
    }
}

impl Decoder {
    /// The decoder that the name at `path` asks for.
    fn new(path: &Path, file: InOrder) -> Result<Self> {
        let file = BufReader::with_capacity(1 << 16, file);
        if has_extension(path, GZIP) {
            return Ok(Self::Gzip(Box::new(MultiGzDecoder::new(file))));
        }
        let start = || {
            let mut decoder = ZstdDecoder::with_buffer(file)?;
            decoder.window_log_max(WINDOW_LOG_MAX).map(|()| decoder)
        };
        start().map(|decoder| Self::Zstandard(Box::new(decoder))).map_err(|e| Error::resource(format_args!("unpack {}", path.display()), e))
    }

    /// The next bytes, or a description of the fault.
    fn read(&mut self, out: &mut [u8]) -> std::result::Result<usize, String> {
        match self {
            Self::Gzip(decoder) => decoder.read(out).map_err(|e| format!("gzip: {e}")),
            Self::Zstandard(decoder) => decoder.read(out).map_err(|e| format!("zstd: {e}")),
        }
    }

    fn in_order(&self) -> &InOrder {
        match self {
            Self::Gzip(decoder) => decoder.get_ref().get_ref(),
            Self::Zstandard(decoder) => decoder.get_ref().get_ref(),
        }
    }

    fn into_in_order(self) -> InOrder {
        match self {
            Self::Gzip(decoder) => decoder.into_inner().into_inner(),
            Self::Zstandard(decoder) => decoder.finish().into_inner(),
        }
    }
}
