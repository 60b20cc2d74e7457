//! Just enough of Thrift's compact protocol to look at numbers of a parquet file before it is read.

/// Nested structures that are followed.
const DEPTH_MAX: usize = 16;

/// Reads from the beginning of some bytes.
pub(super) struct ThriftReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// The kind of a value, as the protocol numbers it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct ThriftKind(u8);

impl ThriftKind {
    pub(super) const BYTE: Self = Self(3);
    pub(super) const DOUBLE: Self = Self(7);
    pub(super) const TEXT: Self = Self(8);
    pub(super) const LIST: Self = Self(9);
    pub(super) const STRUCT: Self = Self(12);

    pub(super) fn is_bool(self) -> bool {
        matches!(self.0, 1 | 2)
    }

    pub(super) fn is_integer(self) -> bool {
        matches!(self.0, 4..=6)
    }
}

impl<'a> ThriftReader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes read.
    pub(super) fn offset(&self) -> usize {
        self.at
    }

    /// The next field of a structure, by number and kind; `None` at its end. `last` is the number of the field before.
    pub(super) fn field(&mut self, last: &mut i64) -> Option<Option<(i64, ThriftKind)>> {
        let head = self.byte()?;
        if head == 0 {
            return Some(None);
        }
        *last = if head >> 4 == 0 { self.integer()? } else { last.wrapping_add(i64::from(head >> 4)) };
        Some(Some((*last, ThriftKind(head & 15))))
    }

    /// Kind and number of a list's elements.
    pub(super) fn list(&mut self) -> Option<(ThriftKind, u64)> {
        let head = self.byte()?;
        let count = if head >> 4 == 15 { self.unsigned()? } else { u64::from(head >> 4) };
        Some((ThriftKind(head & 15), count))
    }

    pub(super) fn integer(&mut self) -> Option<i64> {
        self.unsigned().map(|value| (value >> 1) as i64 ^ -((value & 1) as i64))
    }

    /// Passes over a value; `None` for a list of bools, which have no bytes to some readers and one each to others.
    pub(super) fn skip(&mut self, kind: ThriftKind) -> Option<()> {
        self.skip_nested(kind, 0)
    }

    fn skip_nested(&mut self, kind: ThriftKind, depth: usize) -> Option<()> {
        match kind.0 {
            // The kind of a field holds the value of a bool.
            1 | 2 => Some(()),
            3 => self.byte().map(|_| ()),
            4..=6 => self.unsigned().map(|_| ()),
            7 => self.bytes(8).map(|_| ()),
            8 => {
                let length = self.unsigned()?;
                self.bytes(usize::try_from(length).ok()?).map(|_| ())
            }
            9 | 10 if depth < DEPTH_MAX => {
                let (kind, count) = self.list()?;
                if kind.is_bool() {
                    return (count == 0).then_some(());
                }
                (0..count).try_for_each(|_| self.skip_nested(kind, depth + 1))
            }
            12 if depth < DEPTH_MAX => {
                let mut last = 0;
                while let Some((_, kind)) = self.field(&mut last)? {
                    self.skip_nested(kind, depth + 1)?;
                }
                Some(())
            }
            // Maps are nowhere in parquet's structures.
            _ => None,
        }
    }

    /// A number without a sign.
    pub(super) fn unsigned(&mut self) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            value |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Some(value);
            }
        }
        None
    }

    fn byte(&mut self) -> Option<u8> {
        let byte = self.bytes.get(self.at).copied()?;
        self.at += 1;
        Some(byte)
    }

    /// The next `length` bytes.
    pub(super) fn bytes(&mut self, length: usize) -> Option<&'a [u8]> {
        let bytes = self.bytes.get(self.at..self.at.checked_add(length)?)?;
        self.at += length;
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn numbers_are_read_as_thrift_writes_them() {
        let integer = |bytes: &[u8]| ThriftReader::new(bytes).integer();
        assert_eq!([integer(&[0]), integer(&[1]), integer(&[2]), integer(&[0xac, 2])], [Some(0), Some(-1), Some(1), Some(150)]);
        assert_eq!((integer(&[0x80]), integer(&[0xff; 11])), (None, None));
        // Field 2 is 150, field 4 a structure with a text and a list of two, field 20 a bool.
        let bytes = [0x25, 0xac, 2, 0x2c, 0x18, 1, b'x', 0x19, 0x25, 2, 4, 0, 1, 40, 0];
        let (mut reader, mut last, mut found) = (ThriftReader::new(&bytes), 0, Vec::new());
        while let Some((number, kind)) = reader.field(&mut last).unwrap() {
            found.push(number);
            reader.skip(kind).unwrap();
        }
        assert_eq!((found, reader.offset()), (vec![2, 4, 20], bytes.len()));
    }

    proptest! {
        #[test]
        fn arbitrary_bytes_are_read_or_refused(bytes: Vec<u8>, kind in 0u8..16) {
            let mut reader = ThriftReader::new(&bytes);
            let _ = reader.skip(ThriftKind(kind));
            prop_assert!(reader.offset() <= bytes.len());
        }
    }
}
