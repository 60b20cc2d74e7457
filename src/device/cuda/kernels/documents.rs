//! Copies of documents from packed rows to cuDNN's layout, which has one document in each sequence, and back.

use super::super::launch::{LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::grid::{threads, whole_vectors, wide};
use crate::device::documents::DocumentBatch;
use crate::device::{AttentionShape, DeviceSlice, Stream};
use crate::error::{Error, Result};

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/documents.ptx"),
    typed: &[],
    plain: &["gather_documents", "scatter_documents", "gather_lse", "scatter_lse"],
};

/// Constant of `documents.cu`.
const THREADS: usize = 256;

/// Copies of one batch of documents. `shape` is the shape of the batch, `seq_length` the length of a row, and `table` the positions of the
/// batch's documents.
pub(super) struct DocumentCopies {
    table: DeviceSlice,
    count: u32,
    shape: AttentionShape,
    seq_length: usize,
}

impl DocumentCopies {
    /// `table` is the table of the whole micro-batch.
    pub(super) fn new(table: DeviceSlice, batch: &DocumentBatch, shape: AttentionShape, seq_length: usize) -> Result<Self> {
        let documents = &batch.documents;
        let table = table.slice(2 * documents.start, 2 * documents.len());
        Ok(Self { table, count: size(documents.len())?, shape, seq_length })
    }

    /// Copies the documents of `rows`, `[T, cols]`, to `padded`, `[documents, length, cols]`; padding is zero.
    pub(super) fn gather(&self, queue: &mut impl Queue, rows: DeviceSlice, padded: DeviceSlice) -> Result<()> {
        self.copy(queue, "gather_documents", [rows, padded], padded)
    }

    /// Copies the batch's tokens from `padded` back to `rows`.
    pub(super) fn scatter(&self, queue: &mut impl Queue, padded: DeviceSlice, rows: DeviceSlice) -> Result<()> {
        self.copy(queue, "scatter_documents", [padded, rows], padded)
    }

    /// `padded` is either `from` or `to`.
    fn copy(&self, queue: &mut impl Queue, name: &'static str, [from, to]: [DeviceSlice; 2], padded: DeviceSlice) -> Result<()> {
        let cols = padded.elems() / self.shape.tokens();
        if !whole_vectors(cols, &[from, to]) {
            let addresses = format!("rows of {cols} elements at {:#x} and {:#x} are not aligned to 16 bytes", from.addr(), to.addr());
            return Err(Error::resource("run attention", addresses));
        }
        let vectors = cols / wide(padded.dtype());
        let blocks = LaunchConfig::new(size(self.shape.tokens())?, threads(vectors, 1).min(THREADS) as u32);
        let args = args![from, self.table, to, self.count, size(self.shape.seq_length)?, size(vectors)?];
        queue.launch(Stream::Compute, name, None, blocks, args)
    }

    /// Copies `rows`, `[batch, heads, seq_length]`, to `padded`, `[documents, heads, length]`; padding is zero.
    pub(super) fn gather_lse(&self, queue: &mut impl Queue, rows: DeviceSlice, padded: DeviceSlice) -> Result<()> {
        self.copy_lse(queue, "gather_lse", [rows, padded])
    }

    /// Copies the log-sum-exps of the batch's tokens from `padded` back to `rows`.
    pub(super) fn scatter_lse(&self, queue: &mut impl Queue, padded: DeviceSlice, rows: DeviceSlice) -> Result<()> {
        self.copy_lse(queue, "scatter_lse", [padded, rows])
    }

    fn copy_lse(&self, queue: &mut impl Queue, name: &'static str, [from, to]: [DeviceSlice; 2]) -> Result<()> {
        let AttentionShape { batch, seq_length: length, heads, .. } = self.shape;
        let grid = [size(length.div_ceil(THREADS))?, size(heads)?, size(batch)?];
        let blocks = LaunchConfig { grid, block: [THREADS as u32, 1, 1], shared_bytes: 0 };
        let args = args![from, self.table, to, self.count, size(length)?, size(heads)?, size(self.seq_length)?];
        queue.launch(Stream::Compute, name, None, blocks, args)
    }
}
