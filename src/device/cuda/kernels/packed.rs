//! Attention by cuDNN or by products over rows of several documents: documents of similar length are gathered, computed as separate sequences, and
//! scattered back. See [`documents`](crate::device::documents).

use super::super::CudaDevice;
use super::super::error::check;
use super::super::packed::Packed;
use super::documents::DocumentCopies;
use crate::device::documents::{DocumentTable, batch_block, batch_shape, batch_shapes};
use crate::device::footprint::gpu::{DocumentScratch, document_scratch};
use crate::device::{AttentionBackward, AttentionForward, AttentionShape, AttentionWay, Device, DeviceSlice, Kernel, Stream};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use cust::sys;

impl CudaDevice {
    /// Compiles the plans for documents of any length, and allocates scratch memory for them.
    pub(in super::super) fn prepare_documents(&mut self, shape: &AttentionShape, dtype: Dtype) -> Result<()> {
        self.reserve_documents(shape)?;
        if self.attention.way(shape) == AttentionWay::Products {
            let batches: Vec<_> = batch_shapes(shape).map(|batch| (batch, None)).collect();
            return self.reserve_scores(&batches, dtype).map(drop);
        }
        let Some(sdpa) = &mut self.sdpa else { return Ok(()) };
        let block = sdpa.block(shape);
        let batches: Vec<_> = batch_shapes(shape).map(|batch| (batch, batch_block(shape, block, &batch))).collect();
        sdpa.prepare(&batches, dtype)
    }

    fn reserve_documents(&mut self, shape: &AttentionShape) -> Result<()> {
        let elems = document_scratch(shape).total() / Dtype::Float32.bytes();
        if self.packed.scratch.elems() < elems {
            self.free(self.packed.scratch)?;
            self.packed.scratch = self.alloc("packed documents", elems, Dtype::Float32)?;
        }
        Ok(())
    }

    /// Sends the table of documents to the GPU; kernels enqueued later use it.
    pub(in super::super) fn send_documents(&mut self, documents: DocumentTable) -> Result<()> {
        if self.packed.table.elems() < 2 * documents.tokens {
            self.free(self.packed.table)?;
            self.packed.table = self.alloc("documents", 2 * documents.tokens, Dtype::Int32)?;
        }
        let bytes: &[u8] = bytemuck::cast_slice(&documents.documents);
        let (to, raw) = (self.packed.table.addr(), &self.streams[Stream::Compute as usize]);
        // SAFETY: the table has room for one document per token. The driver has read pageable memory when the call returns.
        let status = unsafe { sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), raw.0) };
        check(status, || "send a table of documents".into())?;
        self.packed.documents = documents;
        Ok(())
    }

    /// The copies of each batch of documents, and the shape of the batch.
    ///
    /// # Errors
    /// `Unsupported` for shapes and formats that cuDNN's kernels do not support; `Resource` if the number of tokens differs from the last
    /// table of documents.
    fn document_batches(&mut self, shape: &AttentionShape, dtype: Dtype) -> Result<Vec<(DocumentCopies, AttentionShape)>> {
        self.prepare_documents(shape, dtype)?;
        let Packed { documents, table, .. } = &self.packed;
        if documents.tokens != shape.tokens() {
            let cause = format!("documents of {} tokens were announced, and attention goes over {}", documents.tokens, shape.tokens());
            return Err(Error::resource("run attention", cause));
        }
        let copies = |batch: &_, part| Ok((DocumentCopies::new(*table, batch, part, shape.seq_length)?, part));
        documents.batches().iter().map(|batch| copies(batch, batch_shape(shape, batch.length))).collect()
    }

    /// Queries of a block of the backward pass for rows; `None` for those of each batch.
    fn default_block(&self, shape: &AttentionShape) -> Option<usize> {
        let fused = self.attention.way(shape) == AttentionWay::Fused;
        self.sdpa.as_ref().filter(|_| fused).map(|sdpa| sdpa.block(shape))
    }

    pub(in super::super) fn attend_packed(&mut self, kernel: &AttentionForward) -> Result<()> {
        let AttentionForward { qkv, out, lse, shape, .. } = *kernel;
        let dtype = kernel.float_format()?;
        for (copies, part) in self.document_batches(&shape, dtype)? {
            let gathered = GatheredDocuments::new(self.packed.scratch, &shape, &part, dtype);
            copies.gather(self, qkv, gathered.qkv)?;
            let one = AttentionForward { qkv: gathered.qkv, documents: None, out: gathered.out, lse: gathered.lse, shape: part };
            self.attend(&one)?;
            copies.scatter(self, gathered.out, out)?;
            copies.scatter_lse(self, gathered.lse, lse)?;
        }
        Ok(())
    }

    pub(in super::super) fn attend_packed_backward(&mut self, kernel: &AttentionBackward) -> Result<()> {
        let AttentionBackward { dout, qkv, out, lse, dqkv, shape, block, .. } = *kernel;
        let dtype = kernel.float_format()?;
        let block = block.or_else(|| self.default_block(&shape));
        for (copies, part) in self.document_batches(&shape, dtype)? {
            let gathered = GatheredDocuments::new(self.packed.scratch, &shape, &part, dtype);
            for (rows, padded) in [(dout, gathered.dout), (qkv, gathered.qkv), (out, gathered.out)] {
                copies.gather(self, rows, padded)?;
            }
            copies.gather_lse(self, lse, gathered.lse)?;
            let GatheredDocuments { dout, qkv, out, lse, dqkv: padded } = gathered;
            let block = block.map(|block| batch_block(&shape, block, &part));
            self.attend_backward(&AttentionBackward { dout, qkv, documents: None, out, lse, dqkv: padded, shape: part, block })?;
            copies.scatter(self, padded, dqkv)?;
        }
        Ok(())
    }
}

/// Gathered operands of one batch of documents, in the scratch memory.
struct GatheredDocuments {
    qkv: DeviceSlice,
    dqkv: DeviceSlice,
    out: DeviceSlice,
    dout: DeviceSlice,
    lse: DeviceSlice,
}

impl GatheredDocuments {
    fn new(scratch: DeviceSlice, shape: &AttentionShape, part: &AttentionShape, dtype: Dtype) -> Self {
        let DocumentScratch { qkv, out, .. } = document_scratch(shape);
        let (qkv_elems, out_elems) = (part.tokens() * part.qkv_cols(), part.tokens() * part.out_cols());
        let at = |bytes: usize, elems, dtype| DeviceSlice::at(scratch.addr() + bytes as u64, elems, dtype);
        Self {
            qkv: at(0, qkv_elems, dtype),
            dqkv: at(qkv, qkv_elems, dtype),
            out: at(2 * qkv, out_elems, dtype),
            dout: at(2 * qkv + out, out_elems, dtype),
            lse: at(2 * (qkv + out), part.tokens() * part.heads, Dtype::Float32),
        }
    }
}
