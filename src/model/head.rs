//! Output matrix and loss, in tiles, so that the logits of a whole batch never exist at once.
//!
//! For a range of rows (tokens), every vocabulary tile updates running softmax statistics, which give the loss. Then every tile is turned
//! into its gradient, which is multiplied into the gradients of the hidden state and of the output matrix. Unless one tile holds the whole
//! vocabulary, logits are computed a second time for this, which is cheaper than saving them. A tail of such a tile ([`LossTile::tail`]) is a
//! tile of its own, and its logits exist together with the others.
//!
//! Logits are in the format of the weights or in fp32, and the gradients of these logits, in the format of the weights, take their place.
//!
//! A loss of pairs needs the sums of log-probabilities of whole answers before the first gradient. So the statistics of all rows come first,
//! then one kernel makes a scale for each row of them, and a second pass over the rows computes the gradients. A loss of sampled completions
//! takes the same two passes, and so does a loss of distillation. Its statistics are those of the tokens that are not the teacher's.
//!
//! [`LossTile::tail`]: super::loss_tile::LossTile::tail

use super::Model;
use super::activation_arrays::{HeadRowsWork, LossWork, ObjectiveWork};
use super::head_rows;
use super::params::{LinearParams, MatrixParam};
use super::tensors::Module;
use crate::device::{
    CrossEntropyGrad, CrossEntropyLoss, CrossEntropyRowGrad, CrossEntropyStats, DeviceSlice, Embed, Kernels, Matmul, MatmulLayout,
    MatmulShape, PairLosses, PolicyLosses, ScatterRows, Stream, TeacherGrad, TeacherLosses, TeacherStats, Zero,
};
use crate::error::Result;
use crate::policy_loss::TOKEN_WORDS;
use crate::teacher_loss::ENTRY_WORDS;
use std::ops::Range;

/// Properties of one micro-step within its optimizer step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct MicroStep {
    /// Whether this is the first micro-step, which overwrites loss and gradients; later ones add.
    pub first: bool,
    /// `1 / (sum of the weights of all targets in the whole optimizer step)`: loss and gradients are weighted means over these targets. With a
    /// loss of pairs `1 / (pairs of the step)`, and with one of completions 1 divided by their number or that of their tokens.
    pub(crate) inv_weight: f32,
    /// Factor on all gradients, not on the loss (fp16).
    pub(crate) loss_scale: f32,
    /// Factor on the loss that balances experts, which affects gradients only; 0 means none.
    pub(crate) balance: f32,
    /// Number of rows in the list of [`super::head_rows::select`], which the head computes; `None`: all rows.
    pub(crate) head_rows: Option<usize>,
}

impl MicroStep {
    /// Pairs, completions or tokens of the step that an objective is a mean of.
    fn count(self) -> f64 {
        self.weight().round()
    }

    /// Sum of the weights of all targets of the step.
    fn weight(self) -> f64 {
        1.0 / f64::from(self.inv_weight)
    }
}

/// Gradients that the head computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HeadGradients {
    /// The gradients of the hidden states, of the output matrix and of the final norm.
    All,
    /// All gradients but that of the output matrix.
    Hidden,
    /// The gradient of the output matrix.
    Matrix,
}

/// A range of rows (tokens) whose loss is computed together, of all rows or of the list of selected rows.
#[derive(Clone, Copy)]
struct Rows {
    /// Indices of selected rows; `None` if the range is one of all rows.
    selected: Option<DeviceSlice>,
    hidden: DeviceSlice,
    dhidden: DeviceSlice,
    targets: DeviceSlice,
    stats: DeviceSlice,
    /// Scales of the gradients, with a loss of pairs, completions or a teacher.
    scales: Option<DeviceSlice>,
    teacher: Option<TeacherRows>,
    count: usize,
    first: bool,
}

/// Gradients of the logits of some rows and columns, in the place of these logits. Their format is that of the weights. Gradients in 16 bits of
/// fp32 logits lie in the first half of each row of logits.
#[derive(Clone, Copy)]
struct LogitsGradient {
    /// Whole rows.
    memory: DeviceSlice,
    /// Elements between the beginnings of two rows.
    pitch: usize,
}

/// The teacher's tokens of a range of rows.
#[derive(Clone, Copy)]
struct TeacherRows {
    words: DeviceSlice,
    entries: DeviceSlice,
    top_k: usize,
}

impl ObjectiveWork {
    /// The teacher's tokens of `count` rows from `start` on; `None` with another loss.
    fn teacher(&self, start: usize, count: usize) -> Option<TeacherRows> {
        let LossWork::Teacher { loss, entries } = self.loss else { return None };
        let (top_k, of_row, places) = (loss.top_k, loss.top_k * ENTRY_WORDS, loss.top_k + 1);
        Some(TeacherRows {
            words: self.list.slice(start * of_row, count * of_row),
            entries: entries.slice(start * places, count * places),
            top_k,
        })
    }
}

impl Model {
    /// Computes final norm, logits and loss after the forward pass of all layers: `activations.loss` then holds the mean so far. With
    /// `gradients` also runs their backward pass, down to the gradient of the residual stream after the last layer.
    pub(crate) fn head<D: Kernels>(&self, dev: &mut D, micro: MicroStep, gradients: Option<HeadGradients>) -> Result<()> {
        self.forward(dev, Module::Head)?;
        if gradients.is_some() && micro.head_rows.zip(self.activations.head_rows).is_some() {
            dev.launch(Zero { x: self.activations.dnorm })?;
        }
        if let Some(work) = self.activations.objective {
            self.objective_loss(dev, micro, work)?;
            if gradients.is_none() {
                return Ok(());
            }
        }
        self.for_each_tile(dev, micro, |dev, rows| {
            if rows.scales.is_none() {
                self.loss(dev, rows, micro)?;
            }
            let Some(gradients) = gradients else { return Ok(()) };
            self.loss_backward(dev, rows, micro, gradients)?;
            self.scatter(dev, rows)
        })?;
        if gradients.is_some() { self.backward(dev, Module::Head, micro) } else { Ok(()) }
    }

    /// Computes the losses of the pairs, completions or tokens of the micro-batch, and the scale of each row's gradient.
    fn objective_loss<D: Kernels>(&self, dev: &mut D, micro: MicroStep, work: ObjectiveWork) -> Result<()> {
        self.for_each_tile(dev, micro, |dev, rows| self.stats(dev, rows))?;
        let ObjectiveWork { loss, list, stats, scales, totals } = work;
        let (targets, report) = (self.objective_targets(micro), self.activations.loss);
        let (stats, scales) = (stats.slice(0, 3 * targets.elems()), scales.slice(0, targets.elems()));
        let (count, scale, accumulate) = (micro.count(), micro.loss_scale, !micro.first);
        match loss {
            LossWork::Pairs { loss, sums } => {
                let (pairs, step_pairs) = (list, count);
                dev.launch(PairLosses { pairs, targets, stats, scales, sums, totals, report, loss, step_pairs, scale, accumulate })
            }
            LossWork::Policy(loss) => {
                let tokens = list.slice(0, TOKEN_WORDS * targets.elems());
                dev.launch(PolicyLosses { tokens, targets, stats, scales, totals, report, loss, count, scale, accumulate })
            }
            LossWork::Teacher { loss, .. } => {
                let Some(TeacherRows { words: teacher, entries, .. }) = work.teacher(0, targets.elems()) else { return Ok(()) };
                let (softcap, weight) = (self.shape.logit_softcap, micro.weight());
                dev.launch(TeacherLosses {
                    teacher,
                    targets,
                    stats,
                    entries,
                    scales,
                    totals,
                    report,
                    loss,
                    softcap,
                    weight,
                    scale,
                    accumulate,
                })
            }
        }
    }

    /// The targets of all rows that the head computes.
    fn objective_targets(&self, micro: MicroStep) -> DeviceSlice {
        let selected = micro.head_rows.zip(self.activations.head_rows);
        selected.map_or(self.activations.targets, |(count, work)| work.targets.slice(0, count))
    }

    /// Computes the gradient of the output matrix that [`HeadGradients::Hidden`] leaves out. The output of the final norm must be that of the
    /// micro-batch: see [`Model::hidden_states`]. A loss of pairs, completions or a teacher is computed again, with its sums: the micro-batches of a
    /// step come in the same order, so the sums of the last share are those of before.
    pub(crate) fn output_matrix_gradient<D: Kernels>(&self, dev: &mut D, micro: MicroStep) -> Result<()> {
        if let Some(work) = self.activations.objective {
            self.objective_loss(dev, micro, work)?;
        }
        self.for_each_tile(dev, micro, |dev, rows| {
            if rows.scales.is_none() {
                self.stats(dev, rows)?;
            }
            self.loss_backward(dev, rows, micro, HeadGradients::Matrix)
        })
    }

    /// Calls `each` for every tile of the rows that the head computes.
    fn for_each_tile<D: Kernels>(&self, dev: &mut D, micro: MicroStep, mut each: impl FnMut(&mut D, Rows) -> Result<()>) -> Result<()> {
        let act = &self.activations;
        let selected = micro.head_rows.zip(act.head_rows);
        let (all, step) = match selected {
            Some((count, _)) => (count, head_rows::piece_rows(act.tile.rows)),
            None => (act.tokens.elems(), act.tile.rows),
        };
        for start in (0..all).step_by(step) {
            let count = step.min(all - start);
            let rows = match selected {
                Some((_, work)) => self.gather(dev, work, start, count)?,
                None => self.rows(start, count),
            };
            each(dev, rows)?;
        }
        Ok(())
    }

    /// The logits that follow the token at `place` of the micro-batch, a tile of the vocabulary at a time, once [`Model::head`] is enqueued.
    /// `take` enqueues a use of each tile, whose memory the next tile overwrites.
    pub(crate) fn logits_at<D: Kernels>(
        &self,
        dev: &mut D,
        place: usize,
        mut take: impl FnMut(&mut D, DeviceSlice, usize) -> Result<()>,
    ) -> Result<()> {
        let rows = self.rows(place, 1);
        self.tiles().try_for_each(|tile| {
            let logits = self.logits_tile(dev, rows, &tile)?;
            take(dev, logits, tile.start)
        })
    }

    /// Softmax statistics and scales of `count` rows from `start` on.
    fn loss_arrays(&self, start: usize, count: usize) -> (DeviceSlice, Option<DeviceSlice>) {
        match self.activations.objective {
            None => (self.activations.loss_stats.slice(0, count * 3), None),
            Some(work) => (work.stats.slice(start * 3, count * 3), Some(work.scales.slice(start, count))),
        }
    }

    fn rows(&self, start: usize, count: usize) -> Rows {
        let (act, channels) = (&self.activations, self.shape.channels);
        let (stats, scales) = self.loss_arrays(start, count);
        Rows {
            selected: None,
            hidden: act.final_norm_out.slice(start * channels, count * channels),
            dhidden: act.dnorm.slice(start * channels, count * channels),
            targets: act.targets.slice(start, count),
            stats,
            scales,
            teacher: self.teacher_rows(start, count),
            count,
            first: start == 0,
        }
    }

    /// The teacher's tokens of `count` rows from `start` on; `None` without a teacher.
    fn teacher_rows(&self, start: usize, count: usize) -> Option<TeacherRows> {
        self.activations.objective.and_then(|work| work.teacher(start, count))
    }

    /// Copies the hidden states of `count` selected rows, from index `start` of the list, into the workspace.
    fn gather<D: Kernels>(&self, dev: &mut D, work: HeadRowsWork, start: usize, count: usize) -> Result<Rows> {
        let (act, channels) = (&self.activations, self.shape.channels);
        let [hidden, dhidden] = [work.hidden, work.dhidden].map(|rows| rows.slice(0, count * channels));
        let [selected, targets] = [work.rows, work.targets].map(|list| list.slice(start, count));
        dev.launch(Embed { tokens: selected, positions: selected, wte: act.final_norm_out, wpe: None, out: hidden, channels })?;
        let (stats, scales) = self.loss_arrays(start, count);
        let teacher = self.teacher_rows(start, count);
        Ok(Rows { selected: Some(selected), hidden, dhidden, targets, stats, scales, teacher, count, first: start == 0 })
    }

    /// Copies the gradients of selected rows to their places in the gradient of all rows, which is zero elsewhere.
    fn scatter<D: Kernels>(&self, dev: &mut D, rows: Rows) -> Result<()> {
        let Some(selected) = rows.selected else { return Ok(()) };
        let (table, channels) = (self.activations.dnorm, self.shape.channels);
        dev.launch(ScatterRows { stream: Stream::Compute, rows: selected, packed: rows.dhidden, table, below: 0, skipped: 0, channels })
    }

    fn loss<D: Kernels>(&self, dev: &mut D, rows: Rows, micro: MicroStep) -> Result<()> {
        self.stats(dev, rows)?;
        let (loss, accumulate) = (self.activations.loss, !(micro.first && rows.first));
        dev.launch(CrossEntropyLoss { targets: rows.targets, stats: rows.stats, loss, scale: micro.inv_weight, accumulate })
    }

    /// Computes the softmax statistics of all logits, or those of the tokens that are not the teacher's.
    fn stats<D: Kernels>(&self, dev: &mut D, rows: Rows) -> Result<()> {
        let Rows { targets, stats, .. } = rows;
        for tile in self.tiles() {
            let (vocab_start, cols, softcap, first) = (tile.start, tile.len(), self.shape.logit_softcap, tile.start == 0);
            let logits = self.logits_tile(dev, rows, &tile)?;
            match rows.teacher {
                None => dev.launch(CrossEntropyStats { logits, targets, stats, vocab_start, cols, softcap, first })?,
                Some(TeacherRows { words: teacher, entries, top_k }) => {
                    dev.launch(TeacherStats { logits, targets, teacher, stats, entries, top_k, vocab_start, cols, softcap, first })?;
                }
            }
        }
        Ok(())
    }

    fn loss_backward<D: Kernels>(&self, dev: &mut D, rows: Rows, micro: MicroStep, gradients: HeadGradients) -> Result<()> {
        // With a loss of pairs, completions or a teacher, the logits in memory are those of the last rows.
        let are_kept = self.activations.tile.holds(self.shape.vocab) && rows.scales.is_none();
        let is_needed = gradients != HeadGradients::Matrix || self.head.output.weight.grad.is_some();
        for tile in self.tiles().filter(|_| is_needed) {
            let logits = if are_kept { self.logits_of(rows, &tile) } else { self.logits_tile(dev, rows, &tile)? };
            let dlogits = self.logits_gradient(dev, rows, micro, logits, &tile)?;
            if gradients != HeadGradients::Matrix {
                self.hidden_gradient(dev, rows, dlogits, &tile)?;
            }
            if gradients != HeadGradients::Hidden {
                let weight = self.output_tile(&tile).weight;
                self.matrix_gradient(dev, rows, dlogits, (weight, &tile), !(micro.first && rows.first))?;
            }
        }
        if gradients == HeadGradients::Hidden { Ok(()) } else { self.token_rows_gradient(dev, rows, micro) }
    }

    /// Computes the gradient of the trained rows of a frozen output matrix, from logits of their tokens alone. The other logits of these rows
    /// of the micro-batch are not needed any more.
    fn token_rows_gradient<D: Kernels>(&self, dev: &mut D, rows: Rows, micro: MicroStep) -> Result<()> {
        let Some(trained) = &self.head.rows else { return Ok(()) };
        for start in trained.tokens.clone().step_by(self.activations.tile.vocab) {
            let tile = start..trained.tokens.end.min(start + self.activations.tile.vocab);
            let logits = self.activations.logits.slice(0, rows.count * tile.len());
            super::linear::linear(dev, &self.output_tile(&tile), rows.hidden, None, logits)?;
            let dlogits = self.logits_gradient(dev, rows, micro, logits, &tile)?;
            self.matrix_gradient(dev, rows, dlogits, (trained.matrix(&tile), &tile), !(micro.first && rows.first))?;
        }
        Ok(())
    }

    /// Turns the logits of the tokens of `tile` into their gradient.
    fn logits_gradient<D: Kernels>(
        &self,
        dev: &mut D,
        rows: Rows,
        micro: MicroStep,
        logits: DeviceSlice,
        tile: &Range<usize>,
    ) -> Result<LogitsGradient> {
        let (Rows { targets, stats, .. }, scale) = (rows, micro.inv_weight * micro.loss_scale);
        let (vocab_start, cols, softcap) = (tile.start, tile.len(), self.shape.logit_softcap);
        let gradients = rows.hidden.dtype();
        match rows.scales {
            None => dev.launch(CrossEntropyGrad { logits, gradients, targets, stats, vocab_start, cols, softcap, scale })?,
            Some(scales) => dev.launch(CrossEntropyRowGrad { logits, gradients, targets, stats, scales, vocab_start, cols, softcap })?,
        }
        let pitch = cols * logits.dtype().bytes() / gradients.bytes();
        let memory = logits.view(0, rows.count * pitch, gradients);
        if let Some(TeacherRows { words: teacher, entries, top_k }) = rows.teacher {
            dev.launch(TeacherGrad { logits: memory, pitch, targets, teacher, entries, top_k, vocab_start, cols })?;
        }
        Ok(LogitsGradient { memory, pitch })
    }

    /// Computes the tile's contribution to the gradient of the hidden state.
    fn hidden_gradient<D: Kernels>(&self, dev: &mut D, rows: Rows, dlogits: LogitsGradient, tile: &Range<usize>) -> Result<()> {
        let output = self.output_tile(tile);
        let shape = MatmulShape { layout: MatmulLayout::Nn, m: rows.count, n: output.in_cols, k: tile.len() };
        let product = Matmul::plain(shape, [dlogits.memory, output.weight.value, rows.dhidden]);
        dev.launch(product.with_pitch(dlogits.pitch).onto_itself(tile.start != 0))
    }

    /// Computes the gradient of `weight`, the rows of the output matrix for the tokens of `tile`, unless it is frozen.
    fn matrix_gradient<D: Kernels>(
        &self,
        dev: &mut D,
        rows: Rows,
        dlogits: LogitsGradient,
        (weight, tile): (MatrixParam, &Range<usize>),
        accumulate: bool,
    ) -> Result<()> {
        let shape = MatmulShape { layout: MatmulLayout::Tn, m: tile.len(), n: self.head.output.in_cols, k: rows.count };
        let Some(grad) = weight.grad else { return Ok(()) };
        dev.launch(Matmul::plain(shape, [dlogits.memory, rows.hidden, grad]).with_pitch(dlogits.pitch).onto_itself(accumulate))
    }

    fn logits_tile<D: Kernels>(&self, dev: &mut D, rows: Rows, tile: &Range<usize>) -> Result<DeviceSlice> {
        let logits = self.logits_of(rows, tile);
        super::linear::linear(dev, &self.output_tile(tile), rows.hidden, None, logits)?;
        Ok(logits)
    }

    /// Memory of the logits of `tile`. Logits of all tiles lie one after the other if they exist together.
    fn logits_of(&self, rows: Rows, tile: &Range<usize>) -> DeviceSlice {
        let start = if self.activations.tile.holds(self.shape.vocab) { tile.start } else { 0 };
        self.activations.logits.slice(rows.count * start, rows.count * tile.len())
    }

    /// The rows of the output matrix for the tokens of `tile`.
    fn output_tile(&self, tile: &Range<usize>) -> LinearParams {
        let output = self.head.output;
        let (start, elems) = (tile.start * output.in_cols, tile.len() * output.in_cols);
        LinearParams { out_cols: tile.len(), weight: output.weight.slice(start, elems), ..output }
    }

    fn tiles(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        self.activations.tile.parts(self.shape.vocab)
    }
}
