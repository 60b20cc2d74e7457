//! Sequence parallelism (Ulysses): each rank computes its own tokens, except attention, which it computes over all tokens for its own
//! heads.
//!
//! Around attention, ranks exchange a matrix of tokens for a matrix of heads, or the reverse: each rank pulls its missing parts from every
//! other rank. A layer saves attention's input and output with all tokens of this rank's heads. Matrices with all heads of this rank's
//! tokens are in workspaces.

use super::Model;
use super::activation_arrays::SequenceWork;
use super::heads::{HeadShare, SequenceRank, sharers};
use crate::device::{AttentionShape, DeviceSlice, Kernels, MatrixPart, PARTS_MAX, Stream, SumSlices};
use crate::error::Result;

/// Gradients of keys and values, `[T, cols]` each, from the ranks that share a key head, and their sum.
#[derive(Clone, Copy)]
struct SharedParts {
    parts: [DeviceSlice; PARTS_MAX],
    sum: DeviceSlice,
    cols: usize,
}

/// A matrix of a layer that ranks exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Handover {
    /// Queries, keys and values, before attention.
    Qkv,
    /// Attention's output.
    Out,
    /// Attention's output a second time, for the backward pass. The saved output is still in the memory from which it was pulled in the
    /// forward pass.
    KeptOut,
    /// The gradient of attention's output, before attention's backward pass.
    OutGrad,
    /// The gradient of queries, keys and values.
    QkvGrad,
}

impl Handover {
    /// Whether the matrix is newly computed, so that peers may still have to compute it.
    pub(crate) fn is_new(self) -> bool {
        self != Self::KeptOut
    }

    fn is_qkv(self) -> bool {
        matches!(self, Self::Qkv | Self::QkvGrad)
    }

    /// Whether matrices of all heads become matrices of this rank's heads.
    fn is_to_heads(self) -> bool {
        matches!(self, Self::Qkv | Self::OutGrad)
    }
}

/// Matrices of a rank that its peers pull from.
#[derive(Clone, Debug)]
pub(crate) struct SharedActivations {
    /// Matrices of this rank's tokens with all heads.
    qkv: DeviceSlice,
    dout: DeviceSlice,
    /// Matrices of all tokens with this rank's heads; `out` is indexed by layer.
    out: Vec<DeviceSlice>,
    dqkv: DeviceSlice,
}

/// The environment of a pass: a device, and the exchange of sequence parallelism if there is one.
pub(crate) trait PassRunner {
    type Dev: Kernels;

    /// The device of the pass.
    fn dev(&mut self) -> &mut Self::Dev;

    /// Returns when the pulls of this rank's missing parts of `layer` are enqueued.
    fn hand_over(&mut self, handover: Handover, layer: usize) -> Result<()>;
}

/// A device without exchange. With sequence parallelism it computes with the present contents of memory.
impl<D: Kernels> PassRunner for D {
    type Dev = D;

    fn dev(&mut self) -> &mut D {
        self
    }

    fn hand_over(&mut self, _: Handover, _: usize) -> Result<()> {
        Ok(())
    }
}

impl Model {
    /// Whether the model uses sequence parallelism.
    pub(crate) fn shares_sequences(&self) -> bool {
        self.activations.sequence_work.is_some()
    }

    /// Matrices that peers pull from.
    pub(crate) fn shared_activations(&self) -> Option<SharedActivations> {
        let SequenceWork { qkv, dqkv, .. } = self.activations.sequence_work?;
        let out = self.activations.layers.iter().map(|layer| layer.attn_out).collect();
        Some(SharedActivations { qkv, dout: self.activations.dinner, out, dqkv })
    }

    /// Attention shape of this rank's tokens with all heads; used for projections, not for scores.
    pub(super) fn attention_shape(&self, layer: usize) -> AttentionShape {
        self.shape.attention(self.activations.batch, self.own_length(), layer)
    }

    /// Attention shape of all tokens with this rank's heads.
    pub(super) fn heads_shape(&self, layer: usize) -> AttentionShape {
        let act = &self.activations;
        self.shape.attention_of((act.batch, act.seq_length), layer, act.sequence)
    }

    /// Tokens of a sequence on one rank.
    fn own_length(&self) -> usize {
        self.activations.seq_length / self.activations.sequence.ranks
    }

    /// Attention's input and output with all heads of this rank's tokens.
    pub(super) fn own_tokens(&self, layer: usize) -> [DeviceSlice; 2] {
        let act = &self.activations.layers[layer];
        let Some(work) = self.activations.sequence_work else { return [act.qkv, act.attn_out] };
        let shape = self.attention_shape(layer);
        [work.qkv.slice(0, shape.tokens() * shape.qkv_cols()), work.out.slice(0, shape.tokens() * shape.out_cols())]
    }

    /// Attention's input, output and log-sum-exp with all tokens of this rank's heads.
    pub(super) fn own_heads(&self, layer: usize) -> [DeviceSlice; 3] {
        let (act, shape) = (&self.activations.layers[layer], self.heads_shape(layer));
        let tokens = shape.tokens();
        let elems = [tokens * shape.qkv_cols(), tokens * shape.out_cols(), tokens * shape.heads];
        [act.qkv.slice(0, elems[0]), act.attn_out.slice(0, elems[1]), act.lse.slice(0, elems[2])]
    }

    /// This rank's part of all heads' `sinks`, or of their gradients.
    pub(super) fn own_sinks(&self, layer: usize, sinks: DeviceSlice) -> DeviceSlice {
        let heads = HeadShare::of(&self.shape.layers[layer].attn, self.activations.sequence).heads;
        sinks.slice(heads.start, heads.len())
    }

    /// Gradients of attention's output and input with all heads of this rank's tokens.
    pub(super) fn own_tokens_gradients(&self, layer: usize) -> [DeviceSlice; 2] {
        let (act, shape) = (&self.activations, self.attention_shape(layer));
        [act.dinner.slice(0, shape.tokens() * shape.out_cols()), act.dfused.slice(0, shape.tokens() * shape.qkv_cols())]
    }

    /// Gradients of attention's output and input with all tokens of this rank's heads.
    pub(super) fn own_heads_gradients(&self, layer: usize) -> [DeviceSlice; 2] {
        let Some(work) = self.activations.sequence_work else { return self.own_tokens_gradients(layer) };
        let shape = self.heads_shape(layer);
        [work.dout.slice(0, shape.tokens() * shape.out_cols()), work.dqkv.slice(0, shape.tokens() * shape.qkv_cols())]
    }

    /// Enqueues a whole exchange. `pull` copies rows from the rank with the given index among the ranks that share its sequences; `shared`
    /// returns the matrices of that rank.
    pub(crate) fn take_over<'a, D: Kernels>(
        &self,
        dev: &mut D,
        (handover, layer): (Handover, usize),
        shared: impl Fn(usize) -> &'a SharedActivations,
        mut pull: impl FnMut(&mut D, usize, MatrixPart, MatrixPart) -> Result<()>,
    ) -> Result<()> {
        let SequenceRank { rank: own, ranks } = self.activations.sequence;
        for peer in 0..ranks {
            self.pulls_from(peer, shared(peer), (handover, layer), &mut |from, to| pull(dev, peer, from, to))?;
        }
        match self.shared_parts(layer) {
            Some(parts) if handover == Handover::QkvGrad => self.sum_parts(dev, layer, parts, |dev, from, to| pull(dev, own, from, to)),
            _ => Ok(()),
        }
    }

    /// Sums the gradients of keys and values from several ranks, in rank order, and copies the sum to its place.
    fn sum_parts<D: Kernels>(
        &self,
        dev: &mut D,
        layer: usize,
        SharedParts { parts, sum, cols }: SharedParts,
        copy: impl FnOnce(&mut D, MatrixPart, MatrixPart) -> Result<()>,
    ) -> Result<()> {
        let (attn, [_, dqkv]) = (&self.shape.layers[layer].attn, self.own_tokens_gradients(layer));
        let (tokens, sharers) = (sum.elems() / cols, sharers(attn, self.activations.sequence.ranks));
        dev.launch(SumSlices::new(Stream::Compute, &parts[..sharers], None, sum))?;
        copy(dev, sum.part(cols, 0..tokens, 0..cols), dqkv.part(attn.qkv_cols(), 0..tokens, attn.out_cols()..attn.qkv_cols()))
    }

    /// Memory for gradients from several ranks, if they share a key head.
    fn shared_parts(&self, layer: usize) -> Option<SharedParts> {
        let (attn, ranks) = (&self.shape.layers[layer].attn, self.activations.sequence.ranks);
        let work = self.activations.sequence_work.filter(|_| sharers(attn, ranks) > 1)?;
        let (sharers, cols) = (sharers(attn, ranks), 2 * attn.kv_heads * attn.head_dim);
        let elems = self.attention_shape(layer).tokens() * cols;
        let part = |part: usize| work.parts.slice(part.min(sharers) * elems, elems);
        Some(SharedParts { parts: std::array::from_fn(part), sum: part(sharers), cols })
    }

    /// Pulls from one rank.
    fn pulls_from(
        &self,
        peer: usize,
        peer_activations: &SharedActivations,
        (handover, layer): (Handover, usize),
        pull: &mut dyn FnMut(MatrixPart, MatrixPart) -> Result<()>,
    ) -> Result<()> {
        let (act, attn, length) = (&self.activations, &self.shape.layers[layer].attn, self.own_length());
        let (own, ranks) = (act.sequence.rank, act.sequence.ranks);
        let (tokens_of, heads_of) = if handover.is_to_heads() { (peer, own) } else { (own, peer) };
        let columns = HeadShare::of(attn, SequenceRank { rank: heads_of, ranks }).columns(attn, handover.is_qkv());
        let (layer_act, parts) = (&act.layers[layer], self.shared_parts(layer));
        for (all, own) in columns.pairs() {
            for sequence in 0..act.batch {
                let (rows, first) = (sequence * length..(sequence + 1) * length, sequence * act.seq_length + tokens_of * length);
                let of_tokens = |matrix: DeviceSlice| matrix.part(columns.all, rows.clone(), all.clone());
                let of_heads = |matrix: DeviceSlice| matrix.part(columns.own, first..first + length, own.clone());
                let (from, to) = match (handover, parts) {
                    (Handover::Qkv, _) => (of_tokens(peer_activations.qkv), of_heads(layer_act.qkv)),
                    (Handover::OutGrad, _) => (of_tokens(peer_activations.dout), of_heads(self.own_heads_gradients(layer)[0])),
                    (Handover::Out | Handover::KeptOut, _) => (of_heads(peer_activations.out[layer]), of_tokens(self.own_tokens(layer)[1])),
                    (Handover::QkvGrad, Some(SharedParts { parts, cols, .. })) if all.start >= attn.out_cols() => {
                        let all = all.start - attn.out_cols()..all.end - attn.out_cols();
                        (of_heads(peer_activations.dqkv), parts[peer % sharers(attn, ranks)].part(cols, rows.clone(), all))
                    }
                    (Handover::QkvGrad, _) => (of_heads(peer_activations.dqkv), of_tokens(act.dfused)),
                };
                pull(from, to)?;
            }
        }
        Ok(())
    }
}
