//! Compares the metadata of a parquet file with the file's size before anything is allocated: rejects a footer that nests too deeply, and
//! pages that expand to more than data does.

use super::shape::{self, FOOTER, PAGE_HEADER};
use super::thrift::{ThriftKind, ThriftReader};
use crate::data::read::compression::{EXPANSION_MAX, SMALL_BYTES};
use crate::disk::InFile;
use crate::error::{Error, Result};
use parquet::basic::Compression;
use parquet::file::metadata::{ColumnChunkMetaData, RowGroupMetaData};
use parquet::schema::types::Type;

const FOOTER_BYTES_MAX: u64 = 64 << 20;
/// Columns within columns.
const SCHEMA_DEPTH_MAX: usize = 64;
const SCHEMA_COLUMNS_MAX: u64 = 100_000;
/// A page is in memory whole.
const PAGE_BYTES_MAX: u64 = 256 << 20;
/// A value of a dictionary takes many times its bytes.
const DICTIONARY_BYTES_MAX: u64 = 16 << 20;
/// The least that a value takes in a dictionary.
const DICTIONARY_VALUE_BYTES: i64 = 4;
/// Bytes that are read to find the header of a page, tried in order: most headers are small, and statistics may make one large.
const HEADER_BYTES: [u64; 3] = [1 << 10, 64 << 10, 16 << 20];

/// Fields of a page header.
#[derive(Default)]
struct ParquetPage {
    header_bytes: u64,
    expanded: i64,
    stored: i64,
    /// Values of a dictionary.
    dictionary_values: Option<i64>,
}

/// Whether the footer can be read: its length is as declared, and the library can recurse into its schema without a stack overflow.
///
/// # Errors
/// `Format` for one that cannot; `Io`.
pub(super) fn check_footer(file: &InFile) -> Result<()> {
    let wrong = |cause: &str| Err(Error::format(file.path(), cause));
    let (bytes, mut tail) = (file.bytes(), [0; 8]);
    if bytes < 12 {
        return wrong("not a parquet file: too short");
    }
    file.read_at(bytes - 8, &mut tail)?;
    if tail[4..] != *b"PAR1" {
        return wrong("not a parquet file, or truncated: it does not end with PAR1");
    }
    let footer_bytes = u64::from(u32::from_le_bytes([tail[0], tail[1], tail[2], tail[3]]));
    if footer_bytes > (bytes - 12).min(FOOTER_BYTES_MAX) {
        return wrong("its footer is longer than the file, or than 64 MiB");
    }
    let mut footer = vec![0; footer_bytes as usize];
    file.read_at(bytes - 8 - footer_bytes, &mut footer)?;
    match shape::check(&mut ThriftReader::new(&footer), FOOTER).and_then(|()| schema_depth(&footer)) {
        Some(depth) if depth <= SCHEMA_DEPTH_MAX => Ok(()),
        Some(_) => wrong("its columns are nested too deeply"),
        None => wrong("its footer cannot be read"),
    }
}

/// Depth of nested columns; `None` for a malformed footer.
fn schema_depth(footer: &[u8]) -> Option<usize> {
    let (mut reader, mut last) = (ThriftReader::new(footer), 0);
    while let Some((number, kind)) = reader.field(&mut last)? {
        if number == 2 && kind == ThriftKind::LIST {
            let (kind, count) = reader.list()?;
            return (kind == ThriftKind::STRUCT && count <= SCHEMA_COLUMNS_MAX).then(|| depth_of(&mut reader, count))?;
        }
        reader.skip(kind)?;
    }
    None
}

fn depth_of(reader: &mut ThriftReader<'_>, count: u64) -> Option<usize> {
    // Children that are still to come, for each column that is open.
    let (mut open, mut deepest): (Vec<i64>, usize) = (Vec::new(), 0);
    for _ in 0..count {
        let (mut last, mut children) = (0, 0);
        while let Some((number, kind)) = reader.field(&mut last)? {
            if number == 5 { children = reader.integer()? } else { reader.skip(kind)? }
        }
        while open.last() == Some(&0) {
            open.pop();
        }
        if let Some(left) = open.last_mut() {
            *left -= 1;
        }
        if children > 0 {
            open.push(children);
        }
        deepest = deepest.max(open.len());
    }
    Some(deepest)
}

/// Whether every page of the wanted columns of the row group lies in the file and expands to no more than data does.
///
/// # Errors
/// A description of the fault.
pub(super) fn check_pages(file: &InFile, group: &RowGroupMetaData, wanted: &Type) -> std::result::Result<(), String> {
    let is_wanted = |column: &&ColumnChunkMetaData| {
        let root = column.column_path().parts().first();
        wanted.get_fields().iter().any(|field| Some(field.name()) == root.map(String::as_str))
    };
    group
        .columns()
        .iter()
        .filter(is_wanted)
        .try_for_each(|column| check_column(file, column).map_err(|cause| format!("column {}: {cause}", column.column_path().string())))
}

/// Whether the compression of a column is one that is read.
fn check_compression(file: &InFile, column: &ColumnChunkMetaData) -> std::result::Result<(), String> {
    match column.compression() {
        Compression::UNCOMPRESSED | Compression::SNAPPY | Compression::GZIP(_) | Compression::ZSTD(_) => Ok(()),
        other => {
            let (name, read) = (other.to_string(), "Snappy, gzip, Zstandard and no compression are read");
            let (name, path) = (name.split('(').next().unwrap_or_default(), file.path().display());
            let again = format!("import pyarrow.parquet as p; p.write_table(p.read_table('{path}'), '{path}', compression='zstd')");
            Err(format!("compressed by {name}: {read}; write the file again: python -c \"{again}\""))
        }
    }
}

fn check_column(file: &InFile, column: &ColumnChunkMetaData) -> std::result::Result<(), String> {
    check_compression(file, column)?;
    let (mut at, length) = column.byte_range();
    let end = at.checked_add(length).filter(|end| *end <= file.bytes()).ok_or("lies outside the file")?;
    while at < end {
        let page = ParquetPage::read(file, at, end).ok_or_else(|| format!("the page at byte {at} cannot be read"))?;
        let stored = u64::try_from(page.stored).ok().filter(|stored| *stored <= end - at - page.header_bytes);
        let stored = stored.ok_or_else(|| format!("the page at byte {at} runs beyond its column"))?;
        page.check(stored).map_err(|cause| format!("the page at byte {at} {cause}"))?;
        at += page.header_bytes + stored;
    }
    Ok(())
}

impl ParquetPage {
    fn read(file: &InFile, at: u64, end: u64) -> Option<Self> {
        HEADER_BYTES.iter().find_map(|most| {
            let mut bytes = vec![0; (*most).min(end - at) as usize];
            file.read_at(at, &mut bytes).ok()?;
            shape::check(&mut ThriftReader::new(&bytes), PAGE_HEADER)?;
            Self::parse(&mut ThriftReader::new(&bytes))
        })
    }

    fn parse(reader: &mut ThriftReader<'_>) -> Option<Self> {
        let (mut page, mut last) = (Self::default(), 0);
        while let Some((number, kind)) = reader.field(&mut last)? {
            match number {
                2 => page.expanded = reader.integer()?,
                3 => page.stored = reader.integer()?,
                7 if kind == ThriftKind::STRUCT => page.dictionary_values = Some(first_integer(reader)?),
                _ => reader.skip(kind)?,
            }
        }
        page.header_bytes = reader.offset() as u64;
        Some(page)
    }

    fn check(&self, stored: u64) -> std::result::Result<(), String> {
        let most = if self.dictionary_values.is_some() { DICTIONARY_BYTES_MAX } else { PAGE_BYTES_MAX };
        let most = most.min((EXPANSION_MAX * stored).max(SMALL_BYTES));
        if !u64::try_from(self.expanded).is_ok_and(|expanded| expanded <= most) {
            return Err(format!("would take {} bytes, of {stored}: at most {most} are read", self.expanded));
        }
        match self.dictionary_values {
            Some(values) if !(0..=self.expanded / DICTIONARY_VALUE_BYTES).contains(&values) => {
                Err(format!("holds {values} values in {} bytes", self.expanded))
            }
            _ => Ok(()),
        }
    }
}

/// Field 1 of a structure, the rest of which is left out.
fn first_integer(reader: &mut ThriftReader<'_>) -> Option<i64> {
    let (mut value, mut last) = (0, 0);
    while let Some((number, kind)) = reader.field(&mut last)? {
        if number == 1 { value = reader.integer()? } else { reader.skip(kind)? }
    }
    Some(value)
}
