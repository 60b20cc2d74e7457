//! Rows of a parquet file that a sandbox reads: it sends them in batches, and the error that ends them.

use super::{EachRow, ParquetRows};
use crate::data::sandbox::codec::{MessageReader, MessageWriter};
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
    let mut wants_more = true;
    while wants_more {
        let message = stream.next(stop).map_err(wrong)?;
        wants_more = take(&message, each)?;
    }
    Ok(())
}

/// Reads the rows, in the sandbox.
fn send_rows(path: &Path, wants: &dyn Fn(&str) -> bool, send: &mut dyn FnMut(&[u8]) -> bool) {
    let (mut batch, mut wants_more) = (MessageWriter::default(), true);
    let read = ParquetRows::open(path).and_then(|rows| {
        rows.for_each(wants, &mut |number, record, offset| {
            for value in [ROW, number as usize, offset as usize] {
                batch.number(value);
            }
            batch.text(record);
            // A consumer of the first row alone need not wait for a full batch.
            if number == 1 || batch.bytes() >= BATCH_BYTES {
                wants_more = send(&std::mem::take(&mut batch).into_bytes());
            }
            Ok(wants_more)
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
    let odd = |tag: usize, left: usize| {
        let place = format_args!("part {tag} at byte {} of {}", message.len() - left, message.len());
        Error::resource("read rows", format_args!("the reader process sent an invalid message: {place}"))
    };
    loop {
        let left = parts.bytes_left();
        let Some(tag) = parts.number() else { return if left == 0 { Ok(true) } else { Err(odd(0, left)) } };
        match tag {
            END => return Ok(false),
            ERROR => return Err(parts.error().unwrap_or_else(|| odd(tag, left))),
            ROW => {
                let mut row = || Some((parts.number()?, parts.number()?, parts.text()?));
                let (number, offset, record) = row().ok_or_else(|| odd(tag, left))?;
                if !each(number as u64, record, offset as u64)? {
                    return Ok(false);
                }
            }
            _ => return Err(odd(tag, left)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers of the rows of `message`, and the outcome.
    fn taken(message: &[u8]) -> (Vec<u64>, Result<bool>) {
        let mut numbers = Vec::new();
        let outcome = take(message, &mut |number, _, _| {
            numbers.push(number);
            Ok(true)
        });
        (numbers, outcome)
    }

    #[test]
    fn a_message_that_is_cut_or_has_an_unknown_part_is_an_error_that_names_the_place() {
        let mut writer = MessageWriter::default();
        [ROW, 7, 0].into_iter().for_each(|value| writer.number(value));
        writer.text("{}");
        let row = writer.into_bytes();
        assert!(matches!(taken(&row), (numbers, Ok(true)) if numbers == [7]));
        let end = [&row[..], &(END as u64).to_le_bytes()].concat();
        assert!(matches!(taken(&end), (numbers, Ok(false)) if numbers == [7]));
        for cut in 1..row.len() {
            let (numbers, outcome) = taken(&row[..cut]);
            assert!(numbers.is_empty() && outcome.is_err(), "{cut} bytes");
        }
        let (numbers, outcome) = taken(&[&row[..], &9u64.to_le_bytes()].concat());
        let error = outcome.unwrap_err().to_string();
        assert_eq!((numbers, error.as_str()), (vec![7], "read rows: the reader process sent an invalid message: part 9 at byte 34 of 42"));
    }
}
