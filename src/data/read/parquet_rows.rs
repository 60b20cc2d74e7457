//! Rows of a parquet file as records: each is an object of JSON, as a line of JSON lines is. Only columns that the records use are read;
//! memory holds a page of each.
//!
//! Sizes and counts in a file's metadata are checked before they are used ([`bounds`], [`shape`], [`deltas`]). Panics of the library are
//! errors. All of it happens in a sandbox ([`child_reader`]).

mod bounds;
mod child_reader;
mod deltas;
mod json_columns;
mod shape;
mod thrift;

pub(in crate::data) use self::child_reader::for_each_in_sandbox;
use self::deltas::CheckedGroup;
use self::json_columns::JsonColumns;
use super::compression::{EXPANSION_MAX, SMALL_BYTES};
use crate::data::chat::foreign_names::is_media;
use crate::data::sandbox::{SandboxTask, guard};
use crate::disk::InFile;
use crate::error::{Error, Result};
use parquet::errors::Result as ParquetResult;
use parquet::file::reader::{FileReader, RowGroupReader, SerializedFileReader};
use parquet::record::{Field, Row};
use parquet::schema::types::Type;
use serde_json::{Map, Number, Value};
use std::fmt::Display;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;

/// Cost of a row in addition to its text, which bounds a file of empty rows.
const ROW_BYTES: u64 = 16;

/// Called with a row's number, from 1 on, its record, and the approximate number of bytes read; returns whether to go on.
pub(in crate::data) type EachRow<'a> = &'a mut dyn FnMut(u64, &str, u64) -> Result<bool>;

/// A file with its footer read.
pub(in crate::data) struct ParquetRows {
    file: InFile,
    reader: SerializedFileReader<File>,
    rows: u64,
    json_columns: JsonColumns,
}

impl ParquetRows {
    /// # Errors
    /// `Io`; `Format` for a file that is no parquet file, or has contradictory metadata.
    pub(in crate::data) fn open(path: &Path) -> Result<Self> {
        let file = InFile::open(path)?;
        bounds::check_footer(&file)?;
        let opened = guard(SandboxTask::Rows, || SerializedFileReader::new(file.clone_file()?).map_err(|e| Error::format(path, e)));
        let reader = opened.map_err(|cause| Error::format(path, cause))??;
        let rows = reader.metadata().row_groups().iter().map(|group| u64::try_from(group.num_rows()).unwrap_or(0)).sum();
        let json_columns = JsonColumns::of(reader.metadata().file_metadata());
        Ok(Self { file, reader, rows, json_columns })
    }

    /// Gives `each` the rows until it wants no more: the columns that `wants` names, all of them null where there is none.
    ///
    /// # Errors
    /// `Format` that names row group and cause; those of `each`.
    pub(in crate::data) fn for_each(&self, wants: impl Fn(&str) -> bool, each: EachRow<'_>) -> Result<()> {
        let (stamp, mut progress) = (self.file.stamp()?, RowCount { unread: self.media_names(&wants), ..RowCount::default() });
        let Some(wanted) = self.projection(&wants) else { return each(1, &self.names(), 0).map(|_| ()) };
        for group in 0..self.reader.num_row_groups() {
            if !self.read_group(group, &wanted, &mut progress, each)? {
                return Ok(());
            }
        }
        if self.file.stamp()? == stamp { Ok(()) } else { Err(self.error("the file changed while it was read")) }
    }

    /// Whether `each` wants more.
    fn read_group(&self, group: usize, wanted: &Type, count: &mut RowCount, each: EachRow<'_>) -> Result<bool> {
        let wrong = |cause: &dyn Display| self.error(format_args!("row group {group}: {cause}"));
        let metadata = self.reader.metadata().row_group(group);
        guard(SandboxTask::Rows, || bounds::check_pages(&self.file, metadata, wanted))
            .and_then(|checked| checked)
            .map_err(|cause| wrong(&cause))?;
        let reader = CheckedGroup(contained(|| self.reader.get_row_group(group)).map_err(|cause| wrong(&cause))?);
        let mut rows = contained(|| reader.get_row_iter(Some(wanted.clone()))).map_err(|cause| wrong(&cause))?;
        while let Some(row) = contained(|| rows.next().transpose()).map_err(|cause| wrong(&cause))? {
            count.number += 1;
            let mut record = fields(&row, true).map_err(|cause| wrong(&format_args!("row {}: {cause}", count.number)))?;
            self.json_columns.decode(&mut record).map_err(|cause| wrong(&format_args!("row {}: {cause}", count.number)))?;
            record.extend(std::mem::take(&mut count.unread).into_iter().map(|name| (name, true.into())));
            let record = Value::Object(record).to_string();
            count.made += record.len() as u64 + ROW_BYTES;
            let most = (EXPANSION_MAX * self.file.bytes()).max(SMALL_BYTES);
            if count.made > most {
                return Err(wrong(&format_args!("the file expands to more than {most} bytes, {EXPANSION_MAX} times its size")));
            }
            let offset = (self.file.bytes() as f64 * count.number as f64 / self.rows.max(1) as f64) as u64;
            if !each(count.number, &record, offset.min(self.file.bytes()))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The schema with the wanted columns alone; `None` where there is none.
    fn projection(&self, wants: &impl Fn(&str) -> bool) -> Option<Type> {
        let schema = self.reader.metadata().file_metadata().schema();
        let fields: Vec<Arc<Type>> = schema.get_fields().iter().filter(|field| wants(field.name())).cloned().collect();
        let is_any = !fields.is_empty();
        Type::group_type_builder(schema.name()).with_fields(fields).build().ok().filter(|_| is_any)
    }

    /// Columns of media that are there and not wanted. The first row has them with no more than that, so that someone may warn of them.
    fn media_names(&self, wants: &impl Fn(&str) -> bool) -> Vec<String> {
        let fields = self.reader.metadata().file_metadata().schema().get_fields();
        fields.iter().map(|field| field.name()).filter(|name| is_media(name) && !wants(name)).map(String::from).collect()
    }

    /// A record that has nothing but the names of the columns.
    fn names(&self) -> String {
        let fields = self.reader.metadata().file_metadata().schema().get_fields();
        Value::Object(fields.iter().map(|field| (field.name().to_string(), Value::Null)).collect()).to_string()
    }

    fn error(&self, cause: impl Display) -> Error {
        Error::format(self.file.path(), cause)
    }
}

/// How far the reading is.
#[derive(Default)]
struct RowCount {
    number: u64,
    /// Bytes of text.
    made: u64,
    /// Names of columns of media, until the first row has them.
    unread: Vec<String>,
}

fn contained<T>(call: impl FnOnce() -> ParquetResult<T>) -> std::result::Result<T, String> {
    guard(SandboxTask::Rows, call).and_then(|read| read.map_err(|e| e.to_string()))
}

/// The fields of a row or, without `nulls`, of a structure in it: a table fills in the keys that other rows have.
fn fields(row: &Row, nulls: bool) -> std::result::Result<Map<String, Value>, String> {
    let entry = |(name, field): (&String, &Field)| Ok((name.clone(), value(field).map_err(|cause| format!("column {name}: {cause}"))?));
    row.get_column_iter().filter(|(_, field)| nulls || !matches!(field, Field::Null)).map(entry).collect()
}

/// A field as JSON. Bytes are text: columns of text may lack the mark of their type.
fn value(field: &Field) -> std::result::Result<Value, String> {
    let float = |number: f64| Number::from_f64(number).map_or(Value::Null, Value::Number);
    Ok(match field {
        Field::Null => Value::Null,
        Field::Bool(is_so) => (*is_so).into(),
        Field::Byte(number) => (*number).into(),
        Field::Short(number) => (*number).into(),
        Field::Int(number) => (*number).into(),
        Field::Long(number) => (*number).into(),
        Field::UByte(number) => (*number).into(),
        Field::UShort(number) => (*number).into(),
        Field::UInt(number) => (*number).into(),
        Field::ULong(number) => (*number).into(),
        Field::Float(number) => float(f64::from(*number)),
        Field::Double(number) => float(*number),
        Field::Str(text) => text.as_str().into(),
        Field::Bytes(bytes) => str::from_utf8(bytes.data()).map_err(|_| "bytes that are not UTF-8")?.into(),
        Field::Group(row) => fields(row, false)?.into(),
        Field::ListInternal(list) => Value::Array(list.elements().iter().map(value).collect::<std::result::Result<_, _>>()?),
        Field::MapInternal(map) => {
            let key = |field: &Field| if let Field::Str(text) = field { text.clone() } else { field.to_string() };
            let entries = map.entries().iter().map(|(name, field)| Ok((key(name), value(field)?)));
            Value::Object(entries.collect::<std::result::Result<_, String>>()?)
        }
        other => other.to_string().into(),
    })
}

#[cfg(test)]
mod tests;
