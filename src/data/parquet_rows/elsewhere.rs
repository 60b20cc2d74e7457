//! Rows of a parquet file that a sandbox reads: it sends them in batches, and the error that ends them.

use super::{EachRow, ParquetRows};
use crate::data::codec::{MessageReader, MessageWriter};
use crate::data::sandbox::{Ended, SandboxStream};
use crate::data::stopped::interrupted;
use crate::error::{Error, Result};
use crate::signals::StopFlag;
use std::path::Path;

/// Rows are sent together from so many bytes on.
const BATCH_BYTES: usize = 64 << 10;

/// Tags of the parts of a message.
const END: usize = 0;
const ROW: usize = 1;
const ERROR: usize = 2;

/// Gives `each` the rows of the file at `path` until it wants no more or `stop` is set: the columns that `wants` names.
///
/// # Errors
/// Errors of [`ParquetRows`] and of `each`; `Format` for a file that exceeds a limit of the sandbox; `Interrupted`.
pub(in crate::data) fn for_each_in_sandbox(
    path: &Path,
    wants: impl Fn(&str) -> bool + Sync,
    stop: &StopFlag,
    each: EachRow<'_>,
) -> Result<()> {
    if cfg!(fuzzing) {
        return ParquetRows::open(path)?.for_each(wants, each);
    }
    let wrong = |ended| match ended {
        Ended::Stopped => interrupted(),
        Ended::Refused(error) => error,
        Ended::Died { cause, .. } => Error::format(path, cause),
    };
    let mut stream = SandboxStream::start(|send| send_rows(path, &wants, send)).map_err(wrong)?;
    let mut goes_on = true;
    while goes_on {
        let message = stream.next(stop).map_err(wrong)?;
        goes_on = take(&message, each)?;
    }
    Ok(())
}

/// Reads the rows, in the sandbox.
fn send_rows(path: &Path, wants: &dyn Fn(&str) -> bool, send: &mut dyn FnMut(&[u8]) -> bool) {
    let (mut batch, mut goes_on) = (MessageWriter::default(), true);
    let read = ParquetRows::open(path).and_then(|rows| {
        rows.for_each(wants, &mut |number, record, offset| {
            [ROW, number as usize, offset as usize].into_iter().for_each(|value| batch.number(value));
            batch.text(record);
            // A consumer of the first row alone need not wait for a full batch.
            if number == 1 || batch.bytes() >= BATCH_BYTES {
                goes_on = send(&std::mem::take(&mut batch).into_bytes());
            }
            Ok(goes_on)
        })
    });
    match read {
        Ok(()) => batch.number(END),
        Err(error) => {
            batch.number(ERROR);
            batch.error(&error);
        }
    }
    send(&batch.into_bytes());
}

/// Gives `each` the rows of a message; returns whether to read another one.
fn take(message: &[u8], each: EachRow<'_>) -> Result<bool> {
    let mut parts = MessageReader::of(message);
    let odd = || Error::resource("read rows", "their process sent what cannot be read");
    while let Some(mark) = parts.number() {
        match mark {
            END => return Ok(false),
            ERROR => return Err(parts.error().unwrap_or_else(odd)),
            _ => {
                let mut row = || Some((parts.number()?, parts.number()?, parts.text()?));
                let (number, offset, record) = row().ok_or_else(odd)?;
                if !each(number as u64, record, offset as u64)? {
                    return Ok(false);
                }
            }
        }
    }
    Ok(true)
}
