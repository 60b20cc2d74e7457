//! Counts that lie within a page, beside values that are written as differences: the library allocates by them, so they are held against
//! the page first. The format: <https://parquet.apache.org/docs/file-format/data-pages/encodings/>.

use super::thrift::ThriftReader;
use crate::data::read::compression::{EXPANSION_MAX, SMALL_BYTES};
use parquet::basic::Encoding;
use parquet::bloom_filter::Sbbf;
use parquet::column::page::{Page, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result};
use parquet::file::metadata::RowGroupMetaData;
use parquet::file::reader::RowGroupReader;
use parquet::record::reader::RowIter;
use parquet::schema::types::{ColumnDescPtr, Type};

/// Size of a length in memory.
const LENGTH_BYTES: u64 = 4;

/// A row group that checks its pages before they are decoded.
pub(super) struct CheckedGroup<'a>(pub(super) Box<dyn RowGroupReader + 'a>);

impl RowGroupReader for CheckedGroup<'_> {
    fn metadata(&self) -> &RowGroupMetaData {
        self.0.metadata()
    }

    fn num_columns(&self) -> usize {
        self.0.num_columns()
    }

    fn get_column_page_reader(&self, column: usize) -> Result<Box<dyn PageReader>> {
        let pages = self.0.get_column_page_reader(column)?;
        Ok(Box::new(CheckedPages { pages, column: self.metadata().schema_descr().column(column) }))
    }

    fn get_column_bloom_filter(&self, column: usize) -> Option<&Sbbf> {
        self.0.get_column_bloom_filter(column)
    }

    fn get_row_iter(&self, projection: Option<Type>) -> Result<RowIter<'_>> {
        RowIter::from_row_group(projection, self)
    }
}

struct CheckedPages {
    pages: Box<dyn PageReader>,
    column: ColumnDescPtr,
}

impl Iterator for CheckedPages {
    type Item = Result<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for CheckedPages {
    fn get_next_page(&mut self) -> Result<Option<Page>> {
        let page = self.pages.get_next_page()?;
        if let Some(page) = &page {
            let levels = [self.column.max_rep_level(), self.column.max_def_level()].iter().filter(|most| **most > 0).count();
            check(page, levels).ok_or_else(|| ParquetError::General("a page's counts do not fit to its bytes".into()))?;
        }
        Ok(page)
    }

    fn peek_next_page(&mut self) -> Result<Option<PageMetadata>> {
        self.pages.peek_next_page()
    }

    fn skip_next_page(&mut self) -> Result<()> {
        self.pages.skip_next_page()
    }

    fn at_record_boundary(&mut self) -> Result<bool> {
        self.pages.at_record_boundary()
    }
}

/// `None` for a malformed page; `levels` kinds of levels stand before its values. Bit-packed levels, which no writer combines with delta
/// encodings, would leave the beginning of the values unknown.
fn check(page: &Page, levels: usize) -> Option<()> {
    let (values, encoding, count) = match page {
        Page::DataPage { encoding, .. } if !is_of_differences(*encoding) => return Some(()),
        Page::DataPage { rep_level_encoding, def_level_encoding, .. }
            if levels > 0 && [rep_level_encoding, def_level_encoding] != [&Encoding::RLE; 2] =>
        {
            return None;
        }
        Page::DataPage { buf, num_values, encoding, .. } => {
            let values = (0..levels).try_fold(&buf[..], |bytes, _| {
                let (length, rest) = bytes.split_first_chunk()?;
                rest.get(u32::from_le_bytes(*length) as usize..)
            });
            (values?, encoding, num_values)
        }
        Page::DataPageV2 { buf, num_values, encoding, rep_levels_byte_len, def_levels_byte_len, .. } => {
            (buf.get(*rep_levels_byte_len as usize + *def_levels_byte_len as usize..)?, encoding, num_values)
        }
        Page::DictionaryPage { .. } => return Some(()),
    };
    check_values(values, *encoding, (*count).into())
}

fn is_of_differences(encoding: Encoding) -> bool {
    matches!(encoding, Encoding::DELTA_BINARY_PACKED | Encoding::DELTA_LENGTH_BYTE_ARRAY | Encoding::DELTA_BYTE_ARRAY)
}

/// `None` where `bytes` declare more than `most` values, or more than so few bytes may hold.
fn check_values(bytes: &[u8], encoding: Encoding, most: u64) -> Option<()> {
    if !is_of_differences(encoding) {
        return Some(());
    }
    let mut reader = ThriftReader::new(bytes);
    let numbers = Differences::read(&mut reader, bytes, most)?;
    if encoding == Encoding::DELTA_BYTE_ARRAY {
        // Lengths of the prefixes that values share with the one before; behind them lengths of the suffixes.
        numbers.skip(&mut reader)?;
        Differences::read(&mut reader, bytes, most)?;
    }
    Some(())
}

/// The beginning of numbers that are written as differences.
struct Differences {
    /// Numbers in a block, and in a part of it, which has its own width in bits.
    block: u64,
    parts: u64,
    count: u64,
}

impl Differences {
    fn read(reader: &mut ThriftReader<'_>, bytes: &[u8], most: u64) -> Option<Self> {
        let read = Self { block: reader.unsigned()?, parts: reader.unsigned()?, count: reader.unsigned()? };
        let length = bytes.len() as u64;
        let is_sane = read.parts <= length && read.count <= most && read.count * LENGTH_BYTES <= (EXPANSION_MAX * length).max(SMALL_BYTES);
        reader.integer()?;
        is_sane.then_some(read)
    }

    fn skip(&self, reader: &mut ThriftReader<'_>) -> Option<()> {
        let part = self.block.checked_div(self.parts)?;
        let mut left = self.count.saturating_sub(1);
        while left > 0 {
            reader.integer()?;
            let widths = reader.bytes(self.parts as usize)?;
            for width in widths.iter().take(left.div_ceil(part.max(1)) as usize) {
                reader.bytes(usize::try_from(part.checked_mul((*width).into())? / 8).ok()?)?;
            }
            left = left.saturating_sub(self.block);
        }
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks of 128 in four parts; `count` numbers, the first 0.
    fn header(count: &[u8]) -> Vec<u8> {
        [&[0x80, 1, 4], count, &[0]].concat()
    }

    #[test]
    fn counts_are_held_against_the_page() {
        for encoding in [Encoding::DELTA_BINARY_PACKED, Encoding::DELTA_LENGTH_BYTE_ARRAY] {
            assert!(check_values(&header(&[3]), encoding, 3).is_some());
            assert!(check_values(&header(&[3]), encoding, 2).is_none());
            // 2^31 numbers in eight bytes, which a page may declare, too; more parts than bytes.
            assert!(check_values(&header(&[0x80, 0x80, 0x80, 0x80, 8]), encoding, 1 << 31).is_none());
            assert!(check_values(&[0x80, 1, 6, 3, 0], encoding, 3).is_none());
            assert!(check_values(&[0x80], encoding, 3).is_none());
        }
        assert!(check_values(&[0x80], Encoding::PLAIN, 3).is_some());
    }

    #[test]
    fn values_begin_behind_their_levels() {
        let page = |def_level_encoding, count: u8| Page::DataPage {
            buf: [&[1, 0, 0, 0, 9][..], &header(&[count])].concat().into(),
            num_values: 3,
            encoding: Encoding::DELTA_LENGTH_BYTE_ARRAY,
            def_level_encoding,
            rep_level_encoding: Encoding::RLE,
            statistics: None,
        };
        assert!(check(&page(Encoding::RLE, 3), 1).is_some() && check(&page(Encoding::RLE, 4), 1).is_none());
        #[expect(deprecated)]
        let packed = page(Encoding::BIT_PACKED, 3);
        assert!(check(&packed, 1).is_none() && check(&page(Encoding::RLE, 3), 2).is_none());
    }

    #[test]
    fn the_second_count_of_shared_beginnings_is_found_behind_the_first_numbers() {
        // Three numbers: their smallest difference, four widths of which the first counts, 32 numbers of two bits.
        let shared = |width: u8, bytes: usize| [header(&[3]), vec![0, width, 9, 9, 9], vec![0; bytes]].concat();
        let both = |count: &[u8]| [shared(2, 8), header(count)].concat();
        let check = |bytes: &[u8]| check_values(bytes, Encoding::DELTA_BYTE_ARRAY, 3);
        assert!(check(&both(&[3])).is_some() && check(&both(&[4])).is_none());
        assert!(check(&shared(2, 8)).is_none() && check(&shared(255, 8)).is_none());
        assert!(check(&[header(&[1]), header(&[1])].concat()).is_some());
    }
}
