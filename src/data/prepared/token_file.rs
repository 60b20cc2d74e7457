//! Pre-tokenised `.bin` files: token ids one after another, little-endian, no header.
//!
//! The ids are 16 or 32 bits wide. `NAME.bin.json` beside the file sets the width (`{"dtype": "uint16"}` or `"uint32"`); without
//! it the name does (`NAME.u16.bin`, `NAME.u32.bin`); else they are as wide as the model's vocabulary needs: 16 bits
//! up to 65536 ids.
//!
//! A file is read where it lies, a few kilobytes at a time: it may be larger than memory, and one that shrinks under a
//! running training is an error and no crash. All of it is checked once, on all CPUs; a later start of the run knows the result
//! by the file's size, time and inode.

use crate::data::context::Preparation;
use crate::data::encode::media_token::{MediaToken, find};
use crate::data::loss_weight::VOCAB_MAX;
use crate::data::prepared::checked_files::{Check, CheckedFiles};
use crate::data::prepared::parallel_scan::{BLOCK_BYTES, scan};
use crate::disk::{self, InFile};
use crate::error::{Error, Result};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

/// Bytes that one read takes, on the stack.
const READ_BYTES: usize = 16 << 10;

/// An open file of token ids, all below the vocabulary size.
pub(crate) struct TokenFile {
    file: InFile,
    width: Width,
    vocab_size: usize,
    tokens: usize,
    /// Bits that are the id.
    id_bits: u32,
    /// Ids that the file must not have.
    media: Vec<MediaToken>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Deserialize)]
enum Width {
    #[serde(rename = "uint16")]
    U16 = 2,
    #[serde(rename = "uint32")]
    U32 = 4,
}

/// The sidecar file with the width has one key.
const SIDECAR_BYTES_MAX: u64 = 1 << 20;

#[derive(serde::Deserialize)]
struct Sidecar {
    dtype: Width,
}

impl TokenFile {
    /// Opens the file and checks every id in it against `vocab_size` and against `media`, which it must not have,
    /// unless `checked` knows the result.
    ///
    /// # Errors
    /// `Io` when it cannot be read; `Format` that names the byte offset of an id outside the vocabulary or in `media`, for a file that is
    /// empty or ends within an id, and for a faulty sidecar file; `Interrupted`.
    pub(in crate::data) fn open(
        path: &Path,
        (vocab_size, media): (usize, &[MediaToken]),
        checked: &mut CheckedFiles,
        preparation: &mut Preparation<'_>,
    ) -> Result<Self> {
        let file = InFile::open(path)?;
        let bytes = file.bytes() as usize;
        let declared = declared_width(path)?;
        let (guessed, width) = (declared.is_none(), declared.unwrap_or(natural_width(vocab_size)));
        if bytes == 0 {
            return Err(Error::format(path, "the file is empty"));
        }
        if !bytes.is_multiple_of(width as usize) {
            return Err(Error::format(path, format!("truncated: {bytes} bytes are not a whole number of {}-byte tokens", width as usize)));
        }
        let opened = Self { file, width, vocab_size, tokens: bytes / width as usize, id_bits: u32::MAX, media: media.to_vec() };
        let width_is = if guessed { "surely not more" } else { "told" };
        let without: String = media.iter().map(|token| format!(", not {}", token.id)).collect();
        let claim = format!("ids of {} bits ({width_is}) below {vocab_size}{without}", 8 * width as usize);
        let check = Check { path: path.to_path_buf(), claim, stamp: opened.file.stamp()? };
        checked.once(check, || opened.check_all(guessed, preparation))?;
        Ok(opened)
    }

    /// A file of 32-bit ids below `vocab_size` with their weights ([`crate::data::loss_weight`]), that somebody else vouches for.
    pub(in crate::data) fn trusted(file: InFile, vocab_size: usize) -> Self {
        let tokens = file.bytes() as usize / Width::U32 as usize;
        Self { file, width: Width::U32, vocab_size, tokens, id_bits: VOCAB_MAX as u32 - 1, media: Vec::new() }
    }

    /// How many tokens the file holds.
    pub(crate) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Reads the words of tokens `start..start + out.len()`; those that are not trained are negative.
    ///
    /// # Errors
    /// `Io` when the file has become shorter, `Format` when it now holds an id outside the vocabulary.
    pub(crate) fn read(&self, start: usize, out: &mut [i32]) -> Result<()> {
        let width = self.width as usize;
        let mut buffer = [0; READ_BYTES];
        let mut offset = start * width;
        for part in out.chunks_mut(READ_BYTES / width) {
            let raw = &mut buffer[..part.len() * width];
            self.file.read_at(offset as u64, raw)?;
            for (token, raw) in part.iter_mut().zip(raw.chunks_exact(width)) {
                *token = self.checked(raw, offset)?;
                offset += width;
            }
        }
        Ok(())
    }

    fn check_all(&self, width_is_a_guess: bool, preparation: &mut Preparation<'_>) -> Result<()> {
        let may_be_wide = self.width == Width::U16 && width_is_a_guess && self.tokens >= 4 && self.tokens.is_multiple_of(2);
        let is_narrow = AtomicBool::new(!may_be_wide);
        scan(&self.file, &format!("checking {}", self.file.path().display()), preparation, |block, bytes| {
            if !is_narrow.load(Ordering::Relaxed) && bytemuck::cast_slice::<u8, u16>(bytes).iter().skip(1).step_by(2).any(|&id| id != 0) {
                is_narrow.store(true, Ordering::Relaxed);
            }
            self.check_block(block as usize * BLOCK_BYTES, bytes)
        })?;
        if !is_narrow.load(Ordering::Relaxed) {
            let cause = "every second 16-bit token is 0: these look like uint32; name the file .u32.bin, or .u16.bin if they are not";
            return Err(Error::format(self.file.path(), cause));
        }
        Ok(())
    }

    /// Checks `bytes` at `offset` of the file.
    fn check_block(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        let largest = match self.width {
            Width::U16 => bytemuck::cast_slice::<u8, u16>(bytes).iter().copied().max().map_or(0, u32::from),
            Width::U32 => bytemuck::cast_slice::<u8, u32>(bytes).iter().copied().max().unwrap_or(0),
        };
        if (largest as usize) < self.vocab_size && self.media.is_empty() {
            return Ok(());
        }
        let width = self.width as usize;
        bytes.chunks_exact(width).zip((offset..).step_by(width)).try_for_each(|(raw, offset)| self.checked(raw, offset).map(|_| ()))
    }

    fn checked(&self, raw: &[u8], offset: usize) -> Result<i32> {
        let id = raw.iter().rev().fold(0, |id: u32, &byte| id << 8 | u32::from(byte));
        if let Some(token) = find(&self.media, id) {
            return Err(Error::format(self.file.path(), format!("byte offset {offset}: a token {}", token.refusal())));
        }
        if ((id & self.id_bits) as usize) < self.vocab_size {
            return Ok(id as i32);
        }
        Err(Error::format(
            self.file.path(),
            format!("byte offset {offset}: token id {id} is outside the vocabulary of {}", self.vocab_size),
        ))
    }
}

/// Width of the ids in the file at `path`, if its name or its sidecar file sets it: see the module.
fn declared_width(path: &Path) -> Result<Option<Width>> {
    let mut sidecar = path.as_os_str().to_owned();
    sidecar.push(".json");
    let Some(json) = disk::read_if_present(Path::new(&sidecar), SIDECAR_BYTES_MAX)? else { return Ok(width_from_name(path)) };
    serde_json::from_slice(&json).map(|sidecar: Sidecar| Some(sidecar.dtype)).map_err(|e| Error::format(&sidecar, e))
}

fn width_from_name(path: &Path) -> Option<Width> {
    match Path::new(path.file_stem()?).extension()?.to_str()? {
        "u16" => Some(Width::U16),
        "u32" => Some(Width::U32),
        _ => None,
    }
}

fn natural_width(vocab_size: usize) -> Width {
    if vocab_size <= 1 << 16 { Width::U16 } else { Width::U32 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::signals::StopFlag;
    use proptest::prelude::*;
    use std::cell::Cell;
    use std::path::PathBuf;

    fn written(name: &str, bytes: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        (dir, path)
    }

    fn open(path: &Path, vocab_size: usize) -> Result<TokenFile> {
        TokenFile::open(path, (vocab_size, &[]), &mut CheckedFiles::default(), &mut Preparation::default())
    }

    fn refusal(name: &str, bytes: &[u8], vocab_size: usize) -> String {
        let (_dir, path) = written(name, bytes);
        open(&path, vocab_size).err().expect("refused").to_string()
    }

    #[test]
    fn a_token_of_an_image_is_refused_with_its_byte_offset_also_after_a_check_without_such_tokens() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a.u16.bin");
        std::fs::write(&path, bytemuck::cast_slice(&[1u16, 2, 9, 3])).unwrap();
        let open = |media: &[MediaToken]| {
            let mut checked = CheckedFiles::load(Some(dir.path()));
            let opened = TokenFile::open(&path, (10, media), &mut checked, &mut Preparation::default())?;
            checked.save().map(|()| opened.tokens())
        };
        let image = |id| MediaToken { key: "image_token_id", id };
        assert_eq!((open(&[]).unwrap(), open(&[image(7)]).unwrap()), (4, 4));
        let message = open(&[image(7), image(9)]).unwrap_err().to_string();
        assert!(message.contains("a.u16.bin: byte offset 4: a token has id 9, which is image_token_id in config.json"), "{message}");
    }

    #[test]
    fn the_width_comes_from_the_sidecar_then_the_name_then_the_vocabulary() {
        let tokens = |name: &str, vocab_size| {
            let (_dir, path) = written(name, &[1, 0, 0, 0]);
            open(&path, vocab_size).unwrap().tokens()
        };
        assert_eq!((tokens("a.bin", 1 << 16), tokens("a.bin", (1 << 16) + 1)), (2, 1));
        assert_eq!((tokens("a.u16.bin", 1 << 20), tokens("a.u32.bin", 256)), (2, 1));
        let (_dir, path) = written("a.u16.bin", &[1, 0, 0, 0]);
        std::fs::write(path.with_file_name("a.u16.bin.json"), r#"{"dtype": "uint32"}"#).unwrap();
        assert_eq!(open(&path, 256).unwrap().tokens(), 1);
        std::fs::write(path.with_file_name("a.u16.bin.json"), r#"{"dtype": "int64"}"#).unwrap();
        let message = open(&path, 256).err().unwrap().to_string();
        assert!(message.contains("a.u16.bin.json") && message.contains("int64"), "{message}");
    }

    #[test]
    fn a_bad_file_is_named_with_the_place() {
        assert!(refusal("empty.bin", &[], 256).contains("empty.bin: the file is empty"));
        assert!(refusal("odd.bin", &[1, 0, 2], 256).contains("odd.bin: truncated: 3 bytes"));
        let mut bytes = vec![0; 3 * BLOCK_BYTES];
        for wrong in [BLOCK_BYTES + 70_001, BLOCK_BYTES + 90_001, 2 * BLOCK_BYTES + 1] {
            bytes[wrong] = 1;
        }
        let message = refusal("big.bin", &bytes, 256);
        let place = format!("big.bin: byte offset {}: token id 256 is outside the vocabulary of 256", BLOCK_BYTES + 70_000);
        assert!(message.contains(&place), "{message}");
        assert!(refusal("wide.bin", &[0, 0, 0, 0x80], 1 << 20).contains("byte offset 0: token id 2147483648"));
    }

    #[test]
    fn a_guess_of_uint16_that_is_surely_wrong_is_refused() {
        let wide = [7, 0, 0, 0, 9, 0, 0, 0];
        assert!(refusal("a.bin", &wide, 256).contains("look like uint32"));
        let (_dir, path) = written("a.u16.bin", &wide);
        assert_eq!(open(&path, 256).unwrap().tokens(), 4, "told, not guessed");
        let (_dir, path) = written("a.bin", &[7, 0, 0, 0, 9, 0, 1, 0]);
        assert_eq!(open(&path, 256).unwrap().tokens(), 4);
    }

    #[test]
    fn a_file_is_checked_once_and_again_when_it_has_changed() {
        let (dir, path) = written("a.bin", &[1, 0, 2, 0]);
        let checks = |vocab_size| {
            let mut checked = CheckedFiles::load(Some(dir.path()));
            let read = Cell::new(false);
            let mut preparation = Preparation::new(&StopFlag::default(), None, Some(dir.path().into()), |_| read.set(true));
            TokenFile::open(&path, (vocab_size, &[]), &mut checked, &mut preparation).map(|_| checked.save().unwrap())?;
            drop(preparation);
            Ok::<_, Error>(read.get())
        };
        assert!(checks(256).unwrap() && !checks(256).unwrap() && checks(3).unwrap());
        std::fs::write(&path, [1, 0, 2, 0, 9, 0]).unwrap();
        assert!(checks(3).is_err() && checks(3).is_err());
    }

    #[test]
    fn a_set_flag_ends_the_check() {
        let (_dir, path) = written("a.bin", &[1; 4 * BLOCK_BYTES]);
        let stop = StopFlag::default();
        stop.request();
        let mut preparation = Preparation::new(&stop, None, Some("/".into()), |_| ());
        let stopped = TokenFile::open(&path, (1 << 20, &[]), &mut CheckedFiles::default(), &mut preparation);
        assert_eq!(stopped.err().unwrap().exit_code(), 75);
    }

    #[test]
    fn a_file_that_shrinks_or_changes_under_the_run_is_an_error() {
        let (_dir, path) = written("a.bin", &[1, 0, 2, 0]);
        let file = open(&path, 256).unwrap();
        std::fs::write(&path, [1, 0, 0, 9]).unwrap();
        assert!(file.read(0, &mut [0; 2]).unwrap_err().to_string().contains("byte offset 2"));
        std::fs::write(&path, [1, 0]).unwrap();
        assert!(matches!(file.read(0, &mut [0; 2]), Err(Error::Io { .. })));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn any_range_reads_the_ids_that_were_written(ids in prop::collection::vec(0..50_000u32, 2..20_000), wide: bool, cut: (u16, u16)) {
            let bytes: Vec<u8> = ids.iter().flat_map(|id| id.to_le_bytes()[..if wide { 4 } else { 2 }].to_vec()).collect();
            let (_dir, path) = written(if wide { "a.u32.bin" } else { "a.u16.bin" }, &bytes);
            let start = cut.0 as usize % ids.len();
            let mut out = vec![-1; cut.1 as usize % (ids.len() - start)];
            open(&path, 50_000).unwrap().read(start, &mut out).unwrap();
            prop_assert!(out.iter().zip(&ids[start..]).all(|(&read, &id)| read == id as i32));
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes: Vec<u8>, sidecar: Option<Vec<u8>>, vocab_size in 0..100_000usize) {
            let (_dir, path) = written("a.bin", &bytes);
            if let Some(sidecar) = sidecar {
                std::fs::write(path.with_file_name("a.bin.json"), sidecar).unwrap();
            }
            let _ = open(&path, vocab_size);
        }
    }
}
