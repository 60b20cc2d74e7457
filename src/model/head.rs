//! Output matrix and loss, in tiles: all logits of a batch never exist at once.
//!
//! For some rows (tokens) at a time, every vocabulary tile updates running softmax statistics; then the loss is known,
//! and every tile is turned into its gradient and multiplied on. Unless one tile holds the whole vocabulary, its logits
//! are computed a second time for that: cheaper than keeping them.

use super::Model;
use super::params::LinearParams;
use super::tensors::Module;
use crate::device::{CrossEntropyGrad, CrossEntropyLoss, CrossEntropyStats, DeviceSlice, Kernels, Matmul, MatmulLayout, MatmulShape};
use crate::error::Result;
use std::ops::Range;

/// One micro-step's place in its optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MicroStep {
    /// The first one overwrites loss and gradients, later ones add.
    pub first: bool,
    /// `1 / (targets of the whole optimizer step that count)`: loss and gradients are means over these.
    pub(crate) inv_targets: f32,
    /// Factor on all gradients, not on the loss (fp16).
    pub(crate) loss_scale: f32,
    /// Factor on the loss that balances experts, which adds to gradients alone; 0 is none.
    pub(crate) balance: f32,
}

/// Rows (tokens) whose loss is computed together.
#[derive(Clone, Copy)]
struct Rows {
    hidden: DeviceSlice,
    dhidden: DeviceSlice,
    targets: DeviceSlice,
    stats: DeviceSlice,
    count: usize,
    first: bool,
}

impl Model {
    /// Final norm, logits and loss after all layers' forward: `activations.loss` holds the mean so far. With `train` also
    /// their backward, down to the gradient of the residual stream that leaves the last layer.
    pub(crate) fn head<D: Kernels>(&self, dev: &mut D, micro: MicroStep, train: bool) -> Result<()> {
        self.forward(dev, Module::Head)?;
        let (tokens, step) = (self.activations.tokens.elems(), self.activations.tile.rows);
        for start in (0..tokens).step_by(step) {
            let rows = self.rows(start, step.min(tokens - start));
            self.loss(dev, rows, micro)?;
            if train {
                self.loss_backward(dev, rows, micro)?;
            }
        }
        if train { self.backward(dev, Module::Head, micro) } else { Ok(()) }
    }

    fn rows(&self, start: usize, count: usize) -> Rows {
        let (act, channels) = (&self.activations, self.shape.channels);
        Rows {
            hidden: act.final_norm_out.slice(start * channels, count * channels),
            dhidden: act.dnorm.slice(start * channels, count * channels),
            targets: act.targets.slice(start, count),
            stats: act.loss_stats.slice(0, count * 3),
            count,
            first: start == 0,
        }
    }

    fn loss<D: Kernels>(&self, dev: &mut D, rows: Rows, micro: MicroStep) -> Result<()> {
        let Rows { targets, stats, .. } = rows;
        for tile in self.tiles() {
            let (vocab_start, cols, softcap) = (tile.start, tile.len(), self.shape.logit_softcap);
            let logits = self.logits_tile(dev, rows, &tile)?;
            dev.launch(CrossEntropyStats { logits, targets, stats, vocab_start, cols, softcap, first: vocab_start == 0 })?;
        }
        let (loss, accumulate) = (self.activations.loss, !(micro.first && rows.first));
        dev.launch(CrossEntropyLoss { stats, loss, scale: micro.inv_targets, accumulate })
    }

    fn loss_backward<D: Kernels>(&self, dev: &mut D, rows: Rows, micro: MicroStep) -> Result<()> {
        let one_tile = self.activations.tile.vocab == self.shape.vocab;
        for tile in self.tiles() {
            let logits = match one_tile {
                true => self.activations.logits.slice(0, rows.count * tile.len()),
                false => self.logits_tile(dev, rows, &tile)?,
            };
            let (Rows { targets, stats, .. }, scale) = (rows, micro.inv_targets * micro.loss_scale);
            let (vocab_start, cols, softcap) = (tile.start, tile.len(), self.shape.logit_softcap);
            dev.launch(CrossEntropyGrad { logits, targets, stats, vocab_start, cols, softcap, scale })?;
            self.tile_backward(dev, rows, logits, &tile, !(micro.first && rows.first))?;
        }
        Ok(())
    }

    /// The tile's part of the hidden state's gradient, and its rows of the output matrix's.
    fn tile_backward<D: Kernels>(
        &self,
        dev: &mut D,
        rows: Rows,
        dlogits: DeviceSlice,
        tile: &Range<usize>,
        accumulate: bool,
    ) -> Result<()> {
        let output = self.output_tile(tile);
        let to_hidden = MatmulShape { layout: MatmulLayout::Nn, m: rows.count, n: output.in_cols, k: tile.len() };
        let to_weight = MatmulShape { layout: MatmulLayout::Tn, m: tile.len(), n: output.in_cols, k: rows.count };
        dev.launch(Matmul::plain(to_hidden, [dlogits, output.weight.value, rows.dhidden]).onto_itself(tile.start != 0))?;
        dev.launch(Matmul::plain(to_weight, [dlogits, rows.hidden, output.weight.grad]).onto_itself(accumulate))
    }

    fn logits_tile<D: Kernels>(&self, dev: &mut D, rows: Rows, tile: &Range<usize>) -> Result<DeviceSlice> {
        let logits = self.activations.logits.slice(0, rows.count * tile.len());
        super::forward::linear(dev, &self.output_tile(tile), rows.hidden, None, logits)?;
        Ok(logits)
    }

    /// The output matrix's rows for the tokens of `tile`.
    fn output_tile(&self, tile: &Range<usize>) -> LinearParams {
        let output = self.head.output;
        let mut part = LinearParams { out_cols: tile.len(), ..output };
        let (start, elems) = (tile.start * output.in_cols, tile.len() * output.in_cols);
        part.weight.value = output.weight.value.slice(start, elems);
        part.weight.grad = output.weight.grad.slice(start, elems);
        part
    }

    fn tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (vocab, step) = (self.shape.vocab, self.activations.tile.vocab);
        (0..vocab).step_by(step).map(move |start| start..vocab.min(start + step))
    }
}
