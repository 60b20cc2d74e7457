//! Fields of a parquet file's structures. The library reads a field by its number and ignores its kind, and may then find a list that
//! takes no bytes and declares billions of elements: such files are refused before the library reads them. The structures are those of
//! <https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift>.

use super::thrift::{ThriftKind, ThriftReader};

/// Type of a value.
pub(super) enum ParquetValue {
    Bool,
    Byte,
    Number,
    Double,
    Text,
    Struct(StructFields),
    List(&'static ParquetValue),
}

/// The fields of a structure, from number 1 on.
pub(super) type StructFields = &'static [ParquetValue];

use ParquetValue::{Bool, Byte, Double, List, Number, Struct, Text};

const EMPTY: ParquetValue = Struct(&[]);
const KEY_VALUES: ParquetValue = List(&Struct(&[Text, Text]));
const STATISTICS: ParquetValue = Struct(&[Text, Text, Number, Number, Text, Text, Bool, Bool, Number]);
const TIME: ParquetValue = Struct(&[Bool, Struct(&[EMPTY, EMPTY, EMPTY])]);
const LOGICAL_TYPE: ParquetValue = Struct(&[
    EMPTY,
    EMPTY,
    EMPTY,
    EMPTY,
    Struct(&[Number, Number]),
    EMPTY,
    TIME,
    TIME,
    EMPTY,
    Struct(&[Byte, Bool]),
    EMPTY,
    EMPTY,
    EMPTY,
    EMPTY,
    EMPTY,
    Struct(&[Byte]),
    Struct(&[Text]),
    Struct(&[Text, Number]),
]);
const SCHEMA_ELEMENT: ParquetValue = Struct(&[Number, Number, Number, Text, Number, Number, Number, Number, Number, LOGICAL_TYPE]);
const SIZES: ParquetValue = Struct(&[Number, List(&Number), List(&Number)]);
const BOX: ParquetValue = Struct(&[Double, Double, Double, Double, Double, Double, Double, Double]);
const COLUMN: ParquetValue = Struct(&[
    Number,
    List(&Number),
    List(&Text),
    Number,
    Number,
    Number,
    Number,
    KEY_VALUES,
    Number,
    Number,
    Number,
    STATISTICS,
    List(&Struct(&[Number, Number, Number])),
    Number,
    Number,
    SIZES,
    Struct(&[BOX, List(&Number)]),
]);
const CIPHER: ParquetValue = Struct(&[Text, Text, Bool]);
const COLUMN_KEY: ParquetValue = Struct(&[EMPTY, Struct(&[List(&Text), Text])]);
const COLUMN_CHUNK: ParquetValue = Struct(&[Text, Number, COLUMN, Number, Number, Number, Number, COLUMN_KEY, Text]);
const SORTING: ParquetValue = List(&Struct(&[Number, Bool, Bool]));
const ROW_GROUP: ParquetValue = Struct(&[List(&COLUMN_CHUNK), Number, Number, SORTING, Number, Number, Number]);

/// The footer.
pub(super) const FOOTER: StructFields = &[
    Number,
    List(&SCHEMA_ELEMENT),
    Number,
    List(&ROW_GROUP),
    KEY_VALUES,
    Text,
    List(&Struct(&[EMPTY, EMPTY])),
    Struct(&[CIPHER, CIPHER]),
    Text,
];

/// Fields of the header before each page.
pub(super) const PAGE_HEADER: StructFields = &[
    Number,
    Number,
    Number,
    Number,
    Struct(&[Number, Number, Number, Number, STATISTICS]),
    EMPTY,
    Struct(&[Number, Number, Bool]),
    Struct(&[Number, Number, Number, Number, Number, Number, Bool, STATISTICS]),
];

/// Goes over a structure; `None` where a field is not of its kind, fields do not ascend, or bytes end. Fields that nobody knows are passed
/// over as the library does it, and refused where that takes more turns than bytes.
pub(super) fn check(reader: &mut ThriftReader<'_>, fields: StructFields) -> Option<()> {
    let mut last = 0;
    loop {
        let before = last;
        let Some((number, kind)) = reader.field(&mut last)? else { return Some(()) };
        if number <= before || number > i16::MAX.into() {
            return None;
        }
        match fields.get(number as usize - 1) {
            Some(shape) => shape.check(reader, kind)?,
            None => reader.skip(kind)?,
        }
    }
}

impl ParquetValue {
    fn check(&self, reader: &mut ThriftReader<'_>, kind: ThriftKind) -> Option<()> {
        match self {
            Bool if kind.is_bool() => Some(()),
            Byte if kind == ThriftKind::BYTE => reader.skip(kind),
            Number if kind.is_integer() => reader.skip(kind),
            Double if kind == ThriftKind::DOUBLE => reader.skip(kind),
            Text if kind == ThriftKind::TEXT => reader.skip(kind),
            Struct(fields) if kind == ThriftKind::STRUCT => check(reader, fields),
            List(element) if kind == ThriftKind::LIST => {
                let (kind, count) = reader.list()?;
                // Each takes a byte at least: bytes end before the turns do.
                (0..count).try_for_each(|_| element.check(reader, kind))
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_of_another_kind_is_refused() {
        let passes = |bytes: &[u8]| check(&mut ThriftReader::new(bytes), &[Number, Text, List(&Bool), Struct(&[Bool])]).is_some();
        assert!(passes(&[0x15, 2, 0x18, 1, b'x', 0x19, 0x01, 0x1c, 0x11, 0, 0]), "1, \"x\", an empty list, {{1: true}}");
        assert!(!passes(&[0x18, 1, b'x', 0]) && !passes(&[0x25, 2, 0]), "a text in place of a number, and the reverse");
        assert!(!passes(&[0x18, 1]) && !passes(&[0x15]) && !passes(&[]), "bytes that end");
        assert!(!passes(&[0x15, 2, 5, 2, 2, 0]), "field 1 again, by its number");
        // Fields 5 and 6 are not known: numbers of a list, and bools, which a list may not have.
        assert!(passes(&[0x59, 0x25, 2, 4, 0x11, 0]) && !passes(&[0x59, 0x21, 0]) && !passes(&[0x5b, 1, 0x11, 0]));
    }
}
