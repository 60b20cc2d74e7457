//! Rows of several documents, for an attention that supports one document per sequence. Each document is padded to one of a few lengths,
//! and documents of the same padded length are computed together. Causal attention sees no later tokens, so padding after a document does
//! not change its bits. Neighbouring documents do not change them either, because the shape of a batch depends on the padded length alone.

use super::AttentionShape;

/// Padded lengths are multiples of this number of tokens. A document of more than 128 tokens fills at least half of its padded length, a
/// document of more than 1024 tokens at least two thirds.
const UNIT: usize = 128;
/// Tokens of a batch, unless one document has more: enough to fill a GPU, and small beside its other memory.
const BATCH_TOKENS: usize = 4096;

/// A document of a micro-batch: its first token, counted over all rows, and its number of tokens. The layout is the one that the GPU's
/// kernels read.
#[cfg(any(test, feature = "cuda"))]
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct PackedDocument {
    pub(crate) first: i32,
    pub(crate) tokens: i32,
}

/// Documents of a micro-batch that are computed together.
#[cfg(any(test, feature = "cuda"))]
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct DocumentBatch {
    /// Tokens of each document, with padding.
    pub(crate) length: usize,
    /// Indices in the table.
    pub(crate) documents: std::ops::Range<usize>,
}

/// The documents of a micro-batch, short ones first.
#[cfg(any(test, feature = "cuda"))]
#[derive(Clone, Debug, Default)]
pub(crate) struct DocumentTable {
    pub(crate) documents: Vec<PackedDocument>,
    /// Tokens of all documents.
    pub(crate) tokens: usize,
}

#[cfg(any(test, feature = "cuda"))]
impl DocumentTable {
    /// Builds the table. `starts` has, for each token, the index in its row of `seq_length` at which its document begins.
    pub(crate) fn new(starts: &[i32], seq_length: usize) -> Self {
        let mut documents: Vec<PackedDocument> = Vec::new();
        for (token, start) in starts.iter().enumerate() {
            match documents.last_mut() {
                Some(document) if *start as usize != token % seq_length => document.tokens += 1,
                _ => documents.push(PackedDocument { first: token as i32, tokens: 1 }),
            }
        }
        documents.sort_by_key(|document| padded_length(document.tokens as usize));
        Self { documents, tokens: starts.len() }
    }

    /// All documents in batches of the same padded length.
    pub(crate) fn batches(&self) -> Vec<DocumentBatch> {
        let mut batches: Vec<DocumentBatch> = Vec::new();
        for (place, document) in self.documents.iter().enumerate() {
            let length = padded_length(document.tokens as usize);
            match batches.last_mut() {
                Some(batch) if batch.length == length && batch.documents.len() < documents_per_batch(length) => batch.documents.end += 1,
                _ => batches.push(DocumentBatch { length, documents: place..place + 1 }),
            }
        }
        batches
    }
}

/// The next of 1, 2, 4, 8, 12, 16, 24, 32, 48, ... units.
fn padded_length(tokens: usize) -> usize {
    let units = tokens.div_ceil(UNIT);
    let power = units.next_power_of_two();
    let between = power / 4 * 3;
    UNIT * if power > 8 && units <= between { between } else { power }
}

/// Documents of a padded length that are computed together.
fn documents_per_batch(length: usize) -> usize {
    (BATCH_TOKENS / length).max(1)
}

/// Shape of a batch of documents of a padded `length`, in layers of attention `shape`.
pub(crate) fn batch_shape(shape: &AttentionShape, length: usize) -> AttentionShape {
    AttentionShape { batch: documents_per_batch(length), seq_length: length, ..*shape }
}

/// Queries of a block of the backward pass for a batch of documents; `block` is the block size for rows. If a row is one block, so is a
/// document, although its padding may be longer than a row.
pub(crate) fn batch_block(row: &AttentionShape, block: usize, batch: &AttentionShape) -> usize {
    if block < row.seq_length { block.min(batch.seq_length) } else { batch.seq_length }
}

/// Shapes of all possible batches, from short documents to documents that fill a row.
pub(crate) fn batch_shapes(shape: &AttentionShape) -> impl Iterator<Item = AttentionShape> + use<> {
    let (shape, longest) = (*shape, padded_length(shape.seq_length));
    let next = |length: &usize| Some(padded_length(length + 1));
    std::iter::successors(Some(UNIT), next).take_while(move |length| *length <= longest).map(move |length| batch_shape(&shape, length))
}

/// Maximum tokens of a batch, with padding.
pub(crate) fn most_tokens(shape: &AttentionShape) -> usize {
    BATCH_TOKENS.max(padded_length(shape.seq_length))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: AttentionShape =
        AttentionShape { batch: 2, seq_length: 3000, heads: 4, kv_heads: 2, head_dim: 64, scale: 1.0, window: None, softcap: None };

    /// Starts of documents with these lengths, which fill rows of `seq_length`.
    fn starts(lengths: &[usize], seq_length: usize) -> Vec<i32> {
        let mut starts = Vec::new();
        lengths.iter().for_each(|length| starts.extend(vec![(starts.len() % seq_length) as i32; *length]));
        starts
    }

    #[test]
    fn documents_of_rows_that_are_one_block_are_one_block() {
        let row = |seq_length| AttentionShape { seq_length, ..SHAPE };
        let blocks = |seq_length, block| {
            let row = row(seq_length);
            batch_shapes(&row).map(|batch| (batch.seq_length, batch_block(&row, block, &batch))).collect::<Vec<_>>()
        };
        // Rows of 1 and 300 tokens are padded to 128 and 512.
        assert_eq!(blocks(1, 1), [(128, 128)]);
        assert_eq!(blocks(300, 300), [(128, 128), (256, 256), (512, 512)]);
        assert_eq!(blocks(512, 256), [(128, 128), (256, 256), (512, 256)]);
    }

    #[test]
    fn lengths_are_padded_by_less_than_half() {
        assert_eq!([1, 128, 129, 256, 257, 1024].map(padded_length), [128, 128, 256, 256, 512, 1024]);
        assert_eq!([1025, 1537, 2049, 3073, 4097, 6145].map(padded_length), [1536, 2048, 3072, 4096, 6144, 8192]);
        for tokens in 1..20_000 {
            let padded = padded_length(tokens);
            assert!(tokens <= padded && (padded <= UNIT || 2 * tokens > padded), "{tokens}: {padded}");
            assert_eq!(padded_length(padded), padded);
        }
    }

    #[test]
    fn every_document_is_in_one_batch_whose_size_depends_on_its_length_alone() {
        // Two rows; the first document of the second row begins at the same index as the first document of the first row.
        let lengths = [100, 1, 700, 90, 109, 200, 800];
        let table = DocumentTable::new(&starts(&lengths, 1000), 1000);
        assert_eq!(table.tokens, 2000);
        let mut seen: Vec<_> = table.documents.iter().map(|document| (document.first, document.tokens)).collect();
        assert!(table.documents.is_sorted_by_key(|document| padded_length(document.tokens as usize)));
        seen.sort_unstable();
        assert_eq!(seen, [(0, 100), (100, 1), (101, 700), (801, 90), (891, 109), (1000, 200), (1200, 800)]);
        let batches: Vec<_> = table.batches().into_iter().map(|batch| (batch.length, batch.documents)).collect();
        assert_eq!(batches, [(128, 0..4), (256, 4..5), (1024, 5..7)]);
    }

    #[test]
    fn a_batch_takes_as_many_as_there_is_room_for() {
        let table = DocumentTable::new(&starts(&[1500; 4], 3000), 3000);
        let batches: Vec<_> = table.batches().into_iter().map(|batch| batch.documents).collect();
        assert_eq!(batches, [0..2, 2..4]);
        assert_eq!(batch_shape(&SHAPE, 1536), AttentionShape { batch: 2, seq_length: 1536, ..SHAPE });
    }

    #[test]
    fn shapes_are_known_before_the_data_are() {
        let shapes: Vec<_> = batch_shapes(&SHAPE).map(|shape| (shape.batch, shape.seq_length)).collect();
        assert_eq!(shapes, [(32, 128), (16, 256), (8, 512), (4, 1024), (2, 1536), (2, 2048), (1, 3072)]);
        assert!(batch_shapes(&SHAPE).all(|shape| shape.tokens() <= most_tokens(&SHAPE)));
        assert_eq!(most_tokens(&AttentionShape { seq_length: 5000, ..SHAPE }), 6144);
    }
}
