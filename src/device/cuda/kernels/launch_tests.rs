//! Launches of every kernel, with vectors and with single elements: names, grids and arguments, compared with `launches.txt`.
//!
//! A changed list means changed grids, arguments or order of arguments. With `SUPEROFFLOAD_WRITE_LAUNCHES=1` the test writes the list.

use super::super::group_tables::GroupTables;
use super::super::launch::{Arg, GpuKernel, LaunchConfig, Queue};
use super::attention::{plain, plain_backward};
use super::documents::DocumentCopies;
use crate::device::documents::{DocumentTable, batch_shape};
use crate::device::*;
use crate::dtype::Dtype;
use crate::error::Result;
use crate::optim::adam::{AdamConsts, AdamHyper};
use crate::optim::int8::{GROUP, MomentGroup};
use crate::optim::norm::BLOCK;
use crate::pair_loss::{PairLoss, PairLossKind};
use crate::policy_loss::{PolicyLoss, PolicyLossKind};
use crate::teacher_loss::TeacherLoss;

const LISTED: &str = include_str!("launches.txt");

/// A queue that lists launches.
#[derive(Default)]
struct List {
    lines: String,
    is_hopper: bool,
    /// Whether cuBLASLt computes expert products.
    by_cublaslt: bool,
}

impl List {
    fn add(&mut self, stream: Stream, label: &str, args: &[u64]) -> Result<()> {
        self.lines += &format!("{} {label}:", stream.name());
        args.iter().for_each(|arg| self.lines += &format!(" {arg:x}"));
        self.lines += "\n";
        Ok(())
    }
}

impl Queue for List {
    fn is_hopper(&self) -> bool {
        self.is_hopper
    }

    fn group_tables(&self) -> Option<GroupTables> {
        self.by_cublaslt.then_some(GroupTables(0x6666_0000_0000))
    }

    fn multiply_groups(&mut self, shape: GroupedShape, dtype: Dtype) -> Result<()> {
        self.add(Stream::Compute, &format!("cuBLASLt {dtype} {shape:?}"), &[])
    }

    fn launch<const N: usize>(
        &mut self,
        stream: Stream,
        name: &'static str,
        dtype: Option<Dtype>,
        blocks: LaunchConfig,
        args: [Arg; N],
    ) -> Result<()> {
        let LaunchConfig { grid, block, shared_bytes } = blocks;
        let shared = if shared_bytes > 0 { format!(" {shared_bytes} shared bytes") } else { String::new() };
        let name = dtype.map_or(name.into(), |dtype| format!("{name} {dtype}"));
        self.add(stream, &format!("{name} {grid:?} {block:?}{shared}"), &args.map(|arg| arg.0))
    }

    fn scratch(&mut self, elems: usize) -> Result<DeviceSlice> {
        self.add(Stream::Compute, "scratch", &[elems as u64])?;
        Ok(DeviceSlice::at(0x7777_0000_0000, elems, Dtype::Float32))
    }

    fn zero(&mut self, x: DeviceSlice) -> Result<()> {
        self.add(Stream::Compute, "zero", &[x.addr(), x.bytes() as u64])
    }

    fn copy(&mut self, stream: Stream, src: DeviceSlice, dst: DeviceSlice) -> Result<()> {
        self.add(stream, "copy", &[src.addr(), dst.addr(), src.bytes() as u64])
    }
}

/// Operands of a case: each has its own address, `skew` elements after an aligned address.
struct TestMemory {
    dtype: Dtype,
    skew: usize,
    given: u64,
}

impl TestMemory {
    fn of(&mut self, elems: usize, dtype: Dtype) -> DeviceSlice {
        self.given += 1;
        DeviceSlice::at((self.given << 32) + (self.skew * dtype.bytes()) as u64, elems, dtype)
    }

    /// A slice in the format of the case.
    fn x(&mut self, elems: usize) -> DeviceSlice {
        self.of(elems, self.dtype)
    }

    fn f(&mut self, elems: usize) -> DeviceSlice {
        self.of(elems, Dtype::Float32)
    }

    fn i(&mut self, elems: usize) -> DeviceSlice {
        self.of(elems, Dtype::Int32)
    }
}

/// Row kernels on rows of `cols`.
fn rows(list: &mut List, r: &mut TestMemory, rows: usize, cols: usize) -> Result<()> {
    let n = rows * cols;
    let (vocab, places) = (50 * cols, 40 * cols);
    let mut embed = |r: &mut TestMemory, learned: bool| {
        let (tokens, positions, wte) = (r.i(rows), r.i(rows), r.x(vocab));
        let wpe = learned.then(|| r.x(places));
        Embed { tokens, positions, wte, wpe, out: r.x(n), channels: cols }.enqueue(list)
    };
    embed(r, false)?;
    embed(r, true)?;
    let mut embed_backward = |r: &mut TestMemory, accumulate_wte, learned: bool, accumulate_wpe| {
        let (tokens, positions, dout, dwte) = (r.i(rows), r.i(rows), r.x(n), r.x(vocab));
        let dwpe = learned.then(|| r.x(places));
        let first_token = if learned { 0 } else { 7 };
        EmbedBackward { tokens, positions, dout, dwte, first_token, accumulate_wte, dwpe, accumulate_wpe, channels: cols }.enqueue(list)
    };
    embed_backward(r, true, false, false)?;
    embed_backward(r, false, true, true)?;
    BiasBackward { dout: r.x(n), dbias: r.x(cols), accumulate: false }.enqueue(list)?;
    BiasBackward { dout: r.x(n), dbias: r.x(cols), accumulate: true }.enqueue(list)?;
    RmsNorm { x: r.x(n), weight: r.x(cols), plus_one: false, eps: 1e-5, out: r.x(n), rstd: r.f(rows) }.enqueue(list)?;
    let (dout, x, weight, rstd, dx, dweight) = (r.x(n), r.x(n), r.x(cols), r.f(rows), r.x(n), r.x(cols));
    RmsNormBackward { dout, x, weight, plus_one: false, rstd, dx, dweight, accumulate: true }.enqueue(list)?;
    LayerNorm { x: r.x(n), weight: r.x(cols), bias: r.x(cols), eps: 1e-6, out: r.x(n), stats: r.f(2 * rows) }.enqueue(list)?;
    let (dout, x, weight, stats, dx) = (r.x(n), r.x(n), r.x(cols), r.f(2 * rows), r.x(n));
    LayerNormBackward { dout, x, weight, stats, dx, dweight: r.x(cols), dbias: r.x(cols), accumulate: false }.enqueue(list)?;
    Swiglu { gate_up: r.x(2 * n), out: r.x(n), cols }.enqueue(list)?;
    SwigluBackward { dout: r.x(n), gate_up: r.x(2 * n), dgate_up: r.x(2 * n), cols }.enqueue(list)?;
    Gelu { x: r.x(n), out: r.x(n) }.enqueue(list)?;
    GeluBackward { dout: r.x(n), x: r.x(n), dx: r.x(n) }.enqueue(list)?;
    let dx = r.x(n);
    GeluBackward { dout: dx, x: r.x(n), dx }.enqueue(list)?;
    let (logits, targets, stats) = (r.x(n), r.i(rows), r.f(3 * rows));
    CrossEntropyStats { logits, targets, stats, vocab_start: 17, cols, softcap: None, first: true }.enqueue(list)?;
    let (logits, targets, stats) = (r.x(n), r.i(rows), r.f(3 * rows));
    let gradients = r.dtype;
    CrossEntropyGrad { logits, gradients, targets, stats, vocab_start: 18, cols, softcap: None, scale: 0.25 }.enqueue(list)?;
    let (targets, stats) = (r.i(rows), r.f(3 * rows));
    CrossEntropyLoss { targets, stats, loss: r.f(1), scale: 0.5, accumulate: true }.enqueue(list)
}

/// Losses of three pairs, and a gradient with a scale for each row.
fn pairs(list: &mut List, r: &mut TestMemory, rows: usize, cols: usize) -> Result<()> {
    let loss = PairLoss { kind: PairLossKind::Robust, beta: 0.5, label_smoothing: 0.25, margin: 2.0, alpha: 0.0 };
    let (targets, stats, scales) = (r.i(rows), r.f(3 * rows), r.f(rows));
    let (pairs, sums, totals, report) = (r.i(24), r.i(12), r.i(12), r.f(6));
    let (step_pairs, scale) = (4.0, 0.5);
    PairLosses { pairs, targets, stats, scales, sums, totals, report, loss, step_pairs, scale, accumulate: true }.enqueue(list)?;
    [None, Some(30.0)].into_iter().try_for_each(|softcap| {
        let (logits, gradients) = (r.x(rows * cols), r.dtype);
        CrossEntropyRowGrad { logits, gradients, targets, stats, scales, vocab_start: 18, cols, softcap }.enqueue(list)
    })
}

/// 16-bit gradients in the place of fp32 logits: of the cross-entropy, with a scale for each row, and of a teacher's tokens.
fn fp32_logits(list: &mut List, r: &mut TestMemory, rows: usize, cols: usize) -> Result<()> {
    let (gradients, vocab_start, top_k) = (r.dtype, 18, 7);
    let (logits, targets, stats, scales) = (r.f(rows * cols), r.i(rows), r.f(3 * rows), r.f(rows));
    for softcap in [None, Some(30.0)] {
        CrossEntropyGrad { logits, gradients, targets, stats, vocab_start, cols, softcap, scale: 0.25 }.enqueue(list)?;
        CrossEntropyRowGrad { logits, gradients, targets, stats, scales, vocab_start, cols, softcap }.enqueue(list)?;
    }
    let (pitch, teacher, entries) = (2 * cols, r.i(2 * top_k * rows), r.f((top_k + 1) * rows));
    let logits = logits.view(0, rows * pitch, gradients);
    TeacherGrad { logits, pitch, targets, teacher, entries, top_k, vocab_start, cols }.enqueue(list)
}

/// Losses of completions.
fn completions(list: &mut List, r: &mut TestMemory, rows: usize) -> Result<()> {
    let loss = PolicyLoss { kind: PolicyLossKind::Grpo, epsilon: 0.25, epsilon_high: 0.5, beta: 0.125, max_completion_length: 512 };
    let (tokens, targets, stats, scales, totals, report) = (r.i(4 * rows), r.i(rows), r.f(3 * rows), r.f(rows), r.i(12), r.f(6));
    PolicyLosses { tokens, targets, stats, scales, totals, report, loss, count: 4.0, scale: 0.5, accumulate: true }.enqueue(list)
}

/// A loss of distillation.
fn teachers(list: &mut List, r: &mut TestMemory, rows: usize, cols: usize) -> Result<()> {
    let top_k = 7;
    let (targets, teacher, stats, entries) = (r.i(rows), r.i(2 * top_k * rows), r.f(3 * rows), r.f((top_k + 1) * rows));
    let (vocab_start, logits) = (18, r.x(rows * cols));
    for softcap in [None, Some(30.0)] {
        TeacherStats { logits, targets, teacher, stats, entries, top_k, vocab_start, cols, softcap, first: true }.enqueue(list)?;
    }
    let (scales, totals, report, loss) = (r.f(rows), r.i(12), r.f(6), TeacherLoss { kd_ratio: 0.75, top_k });
    for softcap in [None, Some(30.0)] {
        let (weight, scale, accumulate) = (4.0, 0.5, true);
        TeacherLosses { teacher, targets, stats, entries, scales, totals, report, loss, softcap, weight, scale, accumulate }
            .enqueue(list)?;
    }
    TeacherGrad { logits, pitch: cols, targets, teacher, entries, top_k, vocab_start, cols }.enqueue(list)
}

fn scatter(list: &mut List, r: &mut TestMemory, rows: usize, channels: usize) -> Result<()> {
    for (stream, below, skipped) in [(Stream::H2d, 128, 0), (Stream::Compute, 1024, 8.min(channels - 1)), (Stream::H2d, 1025, 0)] {
        let (rows, packed, table) = (r.i(rows), r.x(rows * channels - skipped), r.x(50 * channels));
        ScatterRows { stream, rows, packed, table, below, skipped, channels }.enqueue(list)?;
    }
    Ok(())
}

fn heads(list: &mut List, r: &mut TestMemory, shape: AttentionShape, rotary_dim: usize) -> Result<()> {
    let (n, out, d) = (shape.tokens() * shape.qkv_cols(), shape.tokens() * shape.out_cols(), shape.head_dim);
    let (normed, lse) = (shape.tokens() * (shape.heads + shape.kv_heads), shape.tokens() * shape.heads);
    let (qkv, q_weight, k_weight) = (r.x(n), r.x(d), r.x(d));
    QkNorm { qkv, q_weight, k_weight, plus_one: false, eps: 1e-5, out: r.x(n), rstd: r.f(normed), shape }.enqueue(list)?;
    let (dqkv, qkv, q_weight, k_weight, rstd) = (r.x(n), r.x(n), r.x(d), r.x(d), r.f(normed));
    let (dq_weight, dk_weight) = (r.x(d), r.x(d));
    QkNormBackward { dqkv, qkv, q_weight, k_weight, plus_one: false, rstd, dq_weight, dk_weight, accumulate: true, shape }.enqueue(list)?;
    for inverse in [false, true] {
        let (qkv, positions, table) = (r.x(n), r.i(shape.tokens()), r.f(shape.seq_length * rotary_dim));
        Rope { qkv, positions, table, rotary_dim, interleaved: false, inverse, shape }.enqueue(list)?;
    }
    plain(AttentionForward { qkv: r.x(n), documents: None, out: r.x(out), lse: r.f(lse), shape }, list)?;
    let (dout, qkv, documents) = (r.x(out), r.x(n), Some(r.i(shape.tokens())));
    plain_backward(AttentionBackward { dout, qkv, documents, out: r.x(out), lse: r.f(lse), dqkv: r.x(n), shape, block: None }, list)
}

/// Kernels of some families only: scale factors, GELU gates, weights plus one, soft caps.
fn family_rows(list: &mut List, r: &mut TestMemory, rows: usize, cols: usize) -> Result<()> {
    let n = rows * cols;
    let x = r.x(n);
    ScaleAdd { x, scale: 0.5, base: None, out: x }.enqueue(list)?;
    ScaleAdd { x: r.x(n), scale: 1.0, base: Some(r.x(n)), out: r.x(n) }.enqueue(list)?;
    Geglu { gate_up: r.x(2 * n), out: r.x(n), cols }.enqueue(list)?;
    GegluBackward { dout: r.x(n), gate_up: r.x(2 * n), dgate_up: r.x(2 * n), cols }.enqueue(list)?;
    RmsNorm { x: r.x(n), weight: r.x(cols), plus_one: true, eps: 1e-5, out: r.x(n), rstd: r.f(rows) }.enqueue(list)?;
    let (dout, x, weight, rstd, dx, dweight) = (r.x(n), r.x(n), r.x(cols), r.f(rows), r.x(n), r.x(cols));
    RmsNormBackward { dout, x, weight, plus_one: true, rstd, dx, dweight, accumulate: true }.enqueue(list)?;
    let (logits, targets, stats, softcap) = (r.x(n), r.i(rows), r.f(3 * rows), Some(30.0));
    CrossEntropyStats { logits, targets, stats, vocab_start: 17, cols, softcap, first: true }.enqueue(list)?;
    let gradients = r.dtype;
    CrossEntropyGrad { logits, gradients, targets, stats, vocab_start: 18, cols, softcap, scale: 0.25 }.enqueue(list)
}

/// Weights plus one, norms over one head and over all heads, rotation of adjacent pairs, soft caps.
fn family_heads(list: &mut List, r: &mut TestMemory, shape: AttentionShape, rotary_dim: usize) -> Result<()> {
    let (n, out, d) = (shape.tokens() * shape.qkv_cols(), shape.tokens() * shape.out_cols(), shape.head_dim);
    let all = shape.tokens() * (shape.heads + shape.kv_heads);
    let whole = (shape.heads * d, shape.kv_heads * d, 2 * shape.tokens());
    for ((q, k, stats), plus_one) in [((d, d, all), true), (whole, false), (whole, true)] {
        let (qkv, q_weight, k_weight, rstd) = (r.x(n), r.x(q), r.x(k), r.f(stats));
        QkNorm { qkv, q_weight, k_weight, plus_one, eps: 1e-5, out: r.x(n), rstd, shape }.enqueue(list)?;
        let (dqkv, dq_weight, dk_weight, accumulate) = (r.x(n), r.x(q), r.x(k), plus_one);
        QkNormBackward { dqkv, qkv, q_weight, k_weight, plus_one, rstd, dq_weight, dk_weight, accumulate, shape }.enqueue(list)?;
    }
    let (qkv, positions, table) = (r.x(n), r.i(shape.tokens()), r.f(shape.seq_length * rotary_dim));
    Rope { qkv, positions, table, rotary_dim, interleaved: true, inverse: true, shape }.enqueue(list)?;
    let shape = AttentionShape { softcap: Some(50.0), ..shape };
    let (attended, lse) = (r.x(out), r.f(shape.tokens() * shape.heads));
    plain(AttentionForward { qkv, documents: None, out: attended, lse, shape }, list)?;
    plain_backward(AttentionBackward { dout: r.x(out), qkv, documents: None, out: attended, lse, dqkv: r.x(n), shape, block: None }, list)
}

fn transfer(list: &mut List, r: &mut TestMemory, elems: usize) -> Result<()> {
    for stream in Stream::ALL {
        Cast { stream, src: r.f(elems), dst: r.x(elems) }.enqueue(list)?;
        Cast { stream, src: r.x(elems), dst: r.f(elems) }.enqueue(list)?;
    }
    GradNormPartials { stream: Stream::Compute, grads: r.x(elems), partials: r.f(elems.div_ceil(BLOCK)), nonfinite: r.i(1) }
        .enqueue(list)?;
    let consts = AdamConsts::new(&AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }, 3, true);
    let (params, m, v, grads, out) = (r.f(elems), r.f(elems), r.f(elems), r.x(elems), r.x(elems));
    Adam { first: 77, params, m, v, grads, out, consts, scale: 0.7 }.enqueue(list)?;
    let narrow = |x: DeviceSlice| DeviceSlice::at(x.addr(), elems, Dtype::Bfloat16);
    let (weights, lower) = (narrow(out), DeviceSlice::at(params.addr(), elems, Dtype::Uint16));
    SplitAdam { first: 77, weights, lower, m, v, grads: narrow(grads), consts, scale: 0.7 }.enqueue(list)?;
    let [m, v] = [m, v].map(narrow);
    SplitAdam { first: 77, weights, lower, m, v, grads: narrow(grads), consts, scale: 0.7 }.enqueue(list)?;
    Adam { first: 77, params, m, v, grads, out, consts, scale: 0.7 }.enqueue(list)?;
    // The kernels of 8-bit moments take whole groups at aligned addresses.
    if elems.is_multiple_of(GROUP) && [params, grads, out].iter().all(|x| x.addr().is_multiple_of(16)) {
        let groups = |x: DeviceSlice| DeviceSlice::at(x.addr(), elems / GROUP * size_of::<MomentGroup>(), Dtype::Uint8);
        let [m, v] = [m, v].map(groups);
        SplitAdam { first: 256, weights, lower, m, v, grads: narrow(grads), consts, scale: 0.7 }.enqueue(list)?;
        Adam { first: 256, params, m, v, grads, out, consts, scale: 0.7 }.enqueue(list)?;
    }
    Poke { x: r.x(elems), index: elems / 2, value: 7.0 }.enqueue(list)
}

fn sums(list: &mut List, r: &mut TestMemory, elems: usize) -> Result<()> {
    SumSlices::new(Stream::Compute, &[r.x(elems), r.x(elems)], Some(r.f(elems)), r.f(elems)).enqueue(list)?;
    SumSlices::new(Stream::D2h, &[r.x(elems)], None, r.x(elems)).enqueue(list)
}

/// A layer of experts over `tokens` of `cols` channels.
fn experts(list: &mut List, r: &mut TestMemory, tokens: usize, cols: usize) -> Result<()> {
    let shape = RouteShape { tokens, experts: 10, top_k: 3, rule: RouterRule::All };
    let (rows, n, width) = (shape.rows(), shape.rows() * cols, cols + 8);
    RouterLogits { x: r.x(tokens * cols), weight: r.x(10 * cols), bias: None, logits: r.f(tokens * 10), channels: cols }.enqueue(list)?;
    let (logits, chosen, weights) = (r.f(tokens * 10), r.i(rows), r.f(rows));
    Route { logits, correction: None, experts: chosen, weights, shape }.enqueue(list)?;
    let rule = SigmoidRule { groups: 5, top_groups: 2, renormalised: true, scale: 2.5 };
    let by_score = RouteShape { rule: RouterRule::Sigmoid(rule), ..shape };
    Route { logits, correction: Some(r.x(3 * 10)), experts: chosen, weights, shape: by_score }.enqueue(list)?;
    let (bounds, slots, entries) = (r.i(11), r.i(rows), r.i(rows));
    Segments { experts: chosen, bounds, slots, entries, shape }.enqueue(list)?;
    let mut product = |layout, a, b, c, accumulate| {
        let shape = GroupedShape { layout, experts: 10, rows, outs: width, ins: cols };
        GroupedMatmul { shape, a, b, bounds, c, accumulate }.enqueue(list)
    };
    let (x, y, w) = (r.x(n), r.x(rows * width), r.x(10 * cols * width));
    product(MatmulLayout::Nt, x, w, y, false)?;
    product(MatmulLayout::Nn, y, w, x, false)?;
    product(MatmulLayout::Tn, y, x, w, true)?;
    Dispatch { x: r.x(tokens * cols), slots, out: x, cols }.enqueue(list)?;
    let (base, out) = (Some(r.x(tokens * cols)), r.x(tokens * cols));
    Combine { x, slots, weights: Some(weights), base, out, cols }.enqueue(list)?;
    Combine { x, slots, weights: None, base: None, out, cols }.enqueue(list)?;
    SegmentSums { x, weights: Some(weights), entries, bounds, out: r.x(10 * cols), accumulate: true, cols }.enqueue(list)?;
    ExpertBias { x, bias: r.x(10 * cols), experts: chosen, entries, cols }.enqueue(list)?;
    ClampedSwiglu { gate_up: r.x(2 * n), out: r.x(n), alpha: 1.5, limit: 7.0 }.enqueue(list)?;
    for activation in [ExpertActivation::Swiglu, ExpertActivation::Clamped { alpha: 1.5, limit: 7.0 }, ExpertActivation::Geglu] {
        let (gate_up, dgate_up, weighted, dweights) = (r.x(2 * n), r.x(2 * n), r.x(n), r.f(rows));
        ExpertBackward { da: x, gate_up, weights, entries, dgate_up, weighted, dweights, activation, cols }.enqueue(list)?;
    }
    ExpertBiasDot { dout: x, bias: r.x(10 * cols), experts: chosen, entries, dweights: r.f(rows), cols }.enqueue(list)?;
    let (dweights, dlogits) = (r.f(rows), r.x(tokens * 10));
    ScaleChoices { weights, experts: chosen, scale: r.x(10), out: r.f(rows) }.enqueue(list)?;
    let (scale, dscale) = (r.x(10), r.x(10));
    ScaleChoicesBackward { weights, entries, bounds, scale, dweights, dscale, accumulate: true }.enqueue(list)?;
    RouterBackward { logits, experts: chosen, weights, slots, dweights, dlogits, shape }.enqueue(list)?;
    RouterBackward { logits, experts: chosen, weights, slots, dweights, dlogits, shape: by_score }.enqueue(list)?;
    RouterBalance { logits, experts: chosen, bounds, stride: 11, dlogits, factor: 0.5, shape }.enqueue(list)
}

fn sinks(list: &mut List, r: &mut TestMemory, shape: AttentionShape) -> Result<()> {
    let (n, rows, heads) = (shape.tokens() * shape.out_cols(), shape.tokens() * shape.heads, shape.heads);
    Sinks { sinks: r.x(heads), out: r.x(n), lse: r.f(rows), shape }.enqueue(list)?;
    let (dout, out, lse) = (r.x(n), r.x(n), r.f(rows));
    SinksBackward { dout, out, lse, sinks: r.x(heads), dsinks: r.x(heads), accumulate: true, shape }.enqueue(list)
}

/// Two key heads in rows of eight heads, where the last key of a block is the first without a sum; then columns that fit no vector.
fn key_gradients(list: &mut List, r: &mut TestMemory) -> Result<()> {
    for (keys, pitch, columns, width) in [(700, 1536, [1024, 1280], 256), (67, 35, [7, 21], 14)] {
        let (dqkv, sums) = (r.x(keys * pitch), r.f(keys * 2 * width));
        AddKeyGradients { dqkv, sums, pitch, columns, width, begun: keys - 1, done: 3 }.enqueue(list)?;
    }
    Ok(())
}

/// Two rows of two documents each, all four padded to the same length: gather and scatter.
fn documents(list: &mut List, r: &mut TestMemory, shape: AttentionShape) -> Result<()> {
    let starts: Vec<i32> = (0..2 * 700).map(|token| if token % 700 < 300 { 0 } else { 300 }).collect();
    let table = DocumentTable::new(&starts, 700);
    let batch = &table.batches()[0];
    let part = batch_shape(&shape, batch.length);
    let copies = DocumentCopies::new(r.i(2 * starts.len()), batch, part, 700)?;
    let (rows, padded) = (r.x(starts.len() * shape.out_cols()), r.x(part.tokens() * shape.out_cols()));
    copies.gather(list, rows, padded)?;
    copies.scatter(list, padded, rows)?;
    let (rows, padded) = (r.f(starts.len() * shape.heads), r.f(part.tokens() * shape.heads));
    copies.gather_lse(list, rows, padded)?;
    copies.scatter_lse(list, padded, rows)
}

/// Scales and 8-bit numbers of a matrix smaller than a tile and of a large matrix.
fn fp8(list: &mut List, r: &mut TestMemory) -> Result<()> {
    for (rows, cols, format) in [(16, 48, Dtype::Float8E4m3), (16384, 4096, Dtype::Float8E5m2)] {
        let (n, scale) = (rows * cols, r.f(1));
        AbsMaxScale { x: r.x(n), scale, format }.enqueue(list)?;
        AbsMaxScale { x: r.x(n - 3), scale, format }.enqueue(list)?;
        let [out, transposed] = [(); 2].map(|()| Some(r.of(n, format)));
        Quantize { x: r.x(n), scale, out, transposed, cols }.enqueue(list)?;
        Quantize { x: r.x(n), scale, out: None, transposed, cols }.enqueue(list)?;
        scaling(list, r, (rows, cols), Some(ScaleCell { scale, format }))?;
        scaling(list, r, (rows, cols), None)?;
    }
    Ok(())
}

/// Kernels that compute the scale of their output.
fn scaling(list: &mut List, r: &mut TestMemory, (rows, cols): (usize, usize), cell: Option<ScaleCell>) -> Result<()> {
    let n = rows * cols;
    let (x, weight, rstd, out) = (r.x(n), r.x(cols), r.f(rows), r.x(n));
    WithScale { kernel: RmsNorm { x, weight, plus_one: false, eps: 1e-5, out, rstd }, cell }.enqueue(list)?;
    let (dout, dx, dweight) = (r.x(n), r.x(n), r.x(cols));
    WithScale { kernel: RmsNormBackward { dout, x, weight, plus_one: true, rstd, dx, dweight, accumulate: true }, cell }.enqueue(list)?;
    let (bias, stats) = (r.x(cols), r.f(2 * rows));
    WithScale { kernel: LayerNorm { x, weight, bias, eps: 1e-6, out, stats }, cell }.enqueue(list)?;
    let kernel = LayerNormBackward { dout, x, weight, stats, dx, dweight, dbias: r.x(cols), accumulate: false };
    WithScale { kernel, cell }.enqueue(list)?;
    let [gate_up, dgate_up] = [(); 2].map(|()| r.x(2 * n));
    WithScale { kernel: Swiglu { gate_up, out, cols }, cell }.enqueue(list)?;
    WithScale { kernel: SwigluBackward { dout, gate_up, dgate_up, cols }, cell }.enqueue(list)?;
    WithScale { kernel: Geglu { gate_up, out, cols }, cell }.enqueue(list)?;
    WithScale { kernel: GegluBackward { dout, gate_up, dgate_up, cols }, cell }.enqueue(list)?;
    WithScale { kernel: Gelu { x, out }, cell }.enqueue(list)?;
    WithScale { kernel: GeluBackward { dout, x, dx }, cell }.enqueue(list)?;
    WithScale { kernel: ScaleAdd { x, scale: 0.5, base: None, out }, cell }.enqueue(list)
}

/// Gates of attention's output.
fn gates(list: &mut List, r: &mut TestMemory, elems: usize) -> Result<()> {
    let [dout, x, gate, dx, dgate] = [(); 5].map(|()| r.x(elems));
    SigmoidGate { x, gate, out: dx }.enqueue(list)?;
    SigmoidGateBackward { dout, x, gate, dx, dgate }.enqueue(list)
}

/// Kernels of gated delta nets; with `documents`, rows of several documents.
fn delta(list: &mut List, r: &mut TestMemory, shape: DeltaShape, with_documents: bool) -> Result<()> {
    let DeltaShape { seq_length, value_heads, width, .. } = shape;
    let (t, channels) = (shape.tokens(), shape.qkv_cols());
    let (n, out_elems, gates) = (t * channels, t * shape.out_cols(), t * value_heads);
    let documents = with_documents.then(|| r.i(t));
    ShortConv { x: r.x(n), weight: r.x(4 * channels), documents, out: r.x(n), seq_length }.enqueue(list)?;
    let (dout, x, weight, dx, dweight) = (r.x(n), r.x(n), r.x(4 * channels), r.x(n), r.x(4 * channels));
    ShortConvBackward { dout, x, weight, documents, dx, dweight, accumulate: true, seq_length }.enqueue(list)?;
    GatedNorm { x: r.x(out_elems), gate: r.x(out_elems), weight: r.x(width), eps: 1e-6, out: r.x(out_elems) }.enqueue(list)?;
    let [dout, x, gate, dx, dgate] = [(); 5].map(|()| r.x(out_elems));
    GatedNormBackward { dout, x, gate, weight: r.x(width), eps: 1e-6, dx, dgate, dweight: r.x(width), accumulate: false }.enqueue(list)?;
    if r.dtype == Dtype::Float32 || r.skew > 0 {
        return Ok(());
    }
    let (qkv, a, b, a_log, dt_bias) = (r.x(n), r.x(gates), r.x(gates), r.x(value_heads), r.x(value_heads));
    DeltaRule { qkv, a, b, a_log, dt_bias, documents, out: r.x(out_elems), shape }.enqueue(list)?;
    let (dout, dqkv, da, db, da_log, ddt_bias) = (r.x(out_elems), r.x(n), r.x(gates), r.x(gates), r.x(value_heads), r.x(value_heads));
    DeltaRuleBackward { dout, qkv, a, b, a_log, dt_bias, documents, dqkv, da, db, da_log, ddt_bias, accumulate: true, shape }.enqueue(list)
}

/// Norms of queries, keys and values, and a factor.
fn normed_values(list: &mut List, r: &mut TestMemory, shape: AttentionShape) -> Result<()> {
    for values_are_keys in [false, true] {
        let heads = NormedHeads::of(&shape, values_are_keys);
        let (tokens, d) = (shape.tokens(), shape.head_dim);
        let (qkv, out, rstd) = (r.x(tokens * heads.raw() * d), r.x(tokens * heads.all() * d), r.f(tokens * heads.raw()));
        let [q_weight, k_weight, dq_weight, dk_weight] = [(); 4].map(|()| r.x(d));
        QkvNorm { qkv, q_weight, k_weight, eps: 1e-6, out, rstd, tokens, heads }.enqueue(list)?;
        let (dout, accumulate) = (out, values_are_keys);
        QkvNormBackward { dout, qkv, q_weight, k_weight, rstd, dq_weight, dk_weight, accumulate, tokens, heads }.enqueue(list)?;
    }
    ScaleBy { x: r.x(4097), factor: r.x(1) }.enqueue(list)
}

fn latents(list: &mut List) -> Result<()> {
    for (dtype, skew) in [(Dtype::Bfloat16, 0), (Dtype::Float16, 1), (Dtype::Float32, 0)] {
        let mut memory = TestMemory { dtype, skew, given: 0 };
        latent(list, &mut memory, 600, LatentHeads { heads: 20, plain: 128, rotary: 64, value: 128, interleaved: true })?;
        latent(list, &mut memory, 67, LatentHeads { heads: 3, plain: 5, rotary: 6, value: 7, interleaved: false })?;
    }
    Ok(())
}

/// Heads of latent attention, and their width.
fn latent(list: &mut List, r: &mut TestMemory, tokens: usize, heads: LatentHeads) -> Result<()> {
    let (all, projected, d) = (tokens * heads.query_cols(), r.x(tokens * heads.projected_cols()), heads.head_dim());
    let (queries, key, qkv) = (r.x(all), r.x(tokens * heads.rotary), r.x(3 * all));
    let (positions, table) = (r.of(tokens, Dtype::Int32), r.f(tokens * heads.rotary));
    AssembleHeads { queries, projected, key, positions, table, qkv, heads }.enqueue(list)?;
    let (dqueries, dprojected, dkey) = (queries, projected, key);
    AssembleHeadsBackward { dqkv: qkv, positions, table, dqueries, dprojected, dkey, heads }.enqueue(list)?;
    let (x, out) = (queries, r.x(tokens * heads.heads * heads.value));
    ResizeRows { x, out, from: d, to: heads.value }.enqueue(list)?;
    ResizeRows { x: out, out: x, from: heads.value, to: d }.enqueue(list)
}

/// The softmax of a tile of scores, and the rounding of sums of key gradients.
fn scores(list: &mut List, r: &mut TestMemory, shape: AttentionShape, lanes: usize) -> Result<()> {
    let AttentionShape { seq_length, heads, kv_heads, head_dim, .. } = shape;
    let across_sequences = lanes > kv_heads;
    let (query, rows, key) = (seq_length / 2, seq_length - seq_length / 2, 0);
    let (sequence, kv_head, member, members) = (0, 0, 1, heads / kv_heads - 1);
    let (keys, pitch) = (seq_length, seq_length.next_multiple_of(8));
    let tile = ScoreTile { sequence, kv_head, member, members, lanes, across_sequences, query, rows, key, keys, pitch };
    let (n, t) = (tile.elems(), shape.tokens());
    for softcap in [None, Some(30.0)] {
        let shape = AttentionShape { softcap, ..shape };
        let (scores, probabilities, lse) = (r.f(n), r.x(n), r.f(t * heads));
        MaskedSoftmax { scores, probabilities, lse, tile, shape }.enqueue(list)?;
        let (dprobabilities, dout, out, dscores) = (r.f(n), r.x(t * shape.out_cols()), r.x(t * shape.out_cols()), r.x(n));
        SoftmaxBackward { scores, dprobabilities, dout, out, lse, probabilities, dscores, tile, shape }.enqueue(list)?;
    }
    let (size, strides) = ([seq_length, head_dim, lanes], [shape.qkv_cols(), head_dim]);
    let (sums, dqkv) = (r.f(size.iter().product()), r.x(t * shape.qkv_cols()));
    RoundSums { sums, out: StridedMatrices::of(dqkv, heads * head_dim, size, strides), size }.enqueue(list)
}

/// A last block that is not full, and whole blocks.
fn mxfp4(list: &mut List, r: &mut TestMemory) -> Result<()> {
    for elems in [32, 8192 + 64, 8192 * 4096] {
        let [codes, scales] = [elems / 2, elems / 32].map(|bytes| r.of(bytes, Dtype::Uint8));
        ExpandMxfp4 { codes, scales, out: r.x(elems) }.enqueue(list)?;
    }
    Ok(())
}

fn listing() -> Result<String> {
    let shape =
        AttentionShape { batch: 2, seq_length: 300, heads: 8, kv_heads: 2, head_dim: 128, scale: 0.088, window: None, softcap: None };
    let odd = AttentionShape { batch: 1, seq_length: 67, heads: 3, kv_heads: 1, head_dim: 7, scale: 0.4, window: Some(40), softcap: None };
    let mut list = List::default();
    for (dtype, skew) in [(Dtype::Bfloat16, 0), (Dtype::Float16, 1), (Dtype::Float32, 0)] {
        let mut memory = TestMemory { dtype, skew, given: 0 };
        [(600, 2560), (67, 515), (1, 1), (16384, 40)].into_iter().try_for_each(|(m, n)| rows(&mut list, &mut memory, m, n))?;
        heads(&mut list, &mut memory, shape, 128)?;
        heads(&mut list, &mut memory, odd, 4)?;
        [1, 4096, 9001].into_iter().try_for_each(|elems| transfer(&mut list, &mut memory, elems))?;
    }
    for (dtype, skew) in [(Dtype::Bfloat16, 0), (Dtype::Float16, 1), (Dtype::Float32, 0)] {
        sums(&mut list, &mut TestMemory { dtype, skew, given: 0 }, 4097)?;
    }
    for (dtype, skew) in [(Dtype::Bfloat16, 0), (Dtype::Float16, 1), (Dtype::Float32, 0)] {
        let mut memory = TestMemory { dtype, skew, given: 0 };
        experts(&mut list, &mut memory, 600, 2560)?;
        experts(&mut list, &mut memory, 67, 515)?;
        sinks(&mut list, &mut memory, odd)?;
        [(600, 2560), (67, 515), (1, 1)].into_iter().try_for_each(|(m, n)| family_rows(&mut list, &mut memory, m, n))?;
        family_heads(&mut list, &mut memory, shape, 128)?;
        family_heads(&mut list, &mut memory, odd, 4)?;
    }
    documents(&mut list, &mut TestMemory { dtype: Dtype::Bfloat16, skew: 0, given: 0 }, shape)?;
    fp8(&mut list, &mut TestMemory { dtype: Dtype::Bfloat16, skew: 0, given: 0 })?;
    list.is_hopper = true;
    for dtype in [Dtype::Bfloat16, Dtype::Float16, Dtype::Float32] {
        let mut memory = TestMemory { dtype, skew: 0, given: 0 };
        experts(&mut list, &mut memory, 600, 2560)?;
        experts(&mut list, &mut memory, 67, 515)?;
    }
    for (dtype, skew) in [(Dtype::Bfloat16, 0), (Dtype::Float16, 1), (Dtype::Float32, 0)] {
        let mut memory = TestMemory { dtype, skew, given: 0 };
        [(600, 2560), (67, 515), (1, 1)].into_iter().try_for_each(|(m, n)| scatter(&mut list, &mut memory, m, n))?;
    }
    for (dtype, skew) in [(Dtype::Bfloat16, 0), (Dtype::Float16, 1), (Dtype::Float32, 0)] {
        key_gradients(&mut list, &mut TestMemory { dtype, skew, given: 0 })?;
    }
    for (dtype, skew) in [(Dtype::Bfloat16, 0), (Dtype::Float16, 1), (Dtype::Float32, 0)] {
        pairs(&mut list, &mut TestMemory { dtype, skew, given: 0 }, 600, 2560)?;
        let mut memory = TestMemory { dtype, skew, given: 0 };
        completions(&mut list, &mut TestMemory { dtype, skew, given: 0 }, 600)?;
        teachers(&mut list, &mut TestMemory { dtype, skew, given: 0 }, 600, 2560)?;
        [600 * 4096, 67 * 515, 1].into_iter().try_for_each(|elems| gates(&mut list, &mut memory, elems))?;
    }
    list.by_cublaslt = true;
    experts(&mut list, &mut TestMemory { dtype: Dtype::Bfloat16, skew: 0, given: 0 }, 600, 2560)?;
    let wide = DeltaShape { batch: 2, seq_length: 300, key_heads: 2, value_heads: 4, width: 128 };
    // More heads than the scratch memory takes at once.
    let long = DeltaShape { batch: 1, seq_length: 65536, key_heads: 8, value_heads: 16, width: 64 };
    for (dtype, skew) in [(Dtype::Bfloat16, 0), (Dtype::Float16, 0), (Dtype::Float16, 1), (Dtype::Float32, 0)] {
        let mut memory = TestMemory { dtype, skew, given: 0 };
        delta(&mut list, &mut memory, wide, true)?;
        delta(&mut list, &mut memory, long, false)?;
    }
    mxfp4(&mut list, &mut TestMemory { dtype: Dtype::Bfloat16, skew: 0, given: 0 })?;
    for (dtype, skew) in [(Dtype::Bfloat16, 0), (Dtype::Float16, 1)] {
        let mut memory = TestMemory { dtype, skew, given: 0 };
        [(600, 2560), (67, 515), (3, 40_000)].into_iter().try_for_each(|(m, n)| fp32_logits(&mut list, &mut memory, m, n))?;
        scores(&mut list, &mut TestMemory { dtype, skew, given: 0 }, shape, 2)?;
        normed_values(&mut list, &mut TestMemory { dtype, skew, given: 0 }, shape)?;
        scores(&mut list, &mut TestMemory { dtype, skew, given: 0 }, AttentionShape { kv_heads: 1, window: Some(200), ..shape }, 2)?;
    }
    latents(&mut list)?;
    Ok(list.lines)
}

#[test]
fn launches_are_those_that_are_listed() {
    let now = listing().unwrap();
    if std::env::var_os("SUPEROFFLOAD_WRITE_LAUNCHES").is_some() {
        std::fs::write(concat!(env!("CARGO_MANIFEST_DIR"), "/src/device/cuda/kernels/launches.txt"), &now).unwrap();
        return;
    }
    for (line, (now, listed)) in now.lines().zip(LISTED.lines()).enumerate() {
        assert_eq!(now, listed, "launches.txt:{}", line + 1);
    }
    assert_eq!(now.lines().count(), LISTED.lines().count());
}

#[test]
fn delta_rules_without_kernels_are_refused_by_name() {
    let refused = |dtype, skew, width| {
        let (mut list, mut r) = (List::default(), TestMemory { dtype, skew, given: 0 });
        let shape = DeltaShape { batch: 1, seq_length: 8, key_heads: 1, value_heads: 1, width };
        let (qkv, a, b, a_log, dt_bias, out) = (r.x(8 * 3 * width), r.x(8), r.x(8), r.x(1), r.x(1), r.x(8 * width));
        DeltaRule { qkv, a, b, a_log, dt_bias, documents: None, out, shape }.enqueue(&mut list).unwrap_err().to_string()
    };
    assert!(refused(Dtype::Float32, 0, 64).contains("heads of 64 channels in float32"));
    assert!(refused(Dtype::Bfloat16, 0, 32).contains("heads of 32 channels in bfloat16"));
    assert!(refused(Dtype::Bfloat16, 1, 64).contains("no multiple of 16 bytes"));
}

#[test]
fn a_last_row_that_ends_within_a_vector_is_scattered_by_element() {
    let name = |missing: usize| {
        let (mut list, mut r) = (List::default(), TestMemory { dtype: Dtype::Bfloat16, skew: 0, given: 0 });
        let (rows, packed, table) = (r.i(5), r.x(5 * 24 - missing), r.x(50 * 24));
        ScatterRows { stream: Stream::H2d, rows, packed, table, below: 0, skipped: 0, channels: 24 }.enqueue(&mut list).unwrap();
        list.lines.split(' ').nth(1).unwrap().to_string()
    };
    assert_eq!([0, 8, 12].map(name), ["scatter_rows", "scatter_rows", "scatter_rows_any"]);
}

#[test]
fn fp8_of_other_formats_and_within_vectors_is_refused() {
    let (format, memory) = (Dtype::Float8E4m3, |dtype, skew| TestMemory { dtype, skew, given: 0 });
    let enqueued = |kernel: &dyn Fn(&mut List) -> Result<()>| {
        let mut list = List::default();
        kernel(&mut list).map_or_else(|e| e.to_string(), |()| list.lines)
    };
    let refused = |dtype, skew| {
        let mut r = memory(dtype, skew);
        let kernel = AbsMaxScale { x: r.x(256), scale: r.f(1), format };
        enqueued(&|list| kernel.enqueue(list))
    };
    let scaling = |dtype, skew| {
        let mut r = memory(dtype, skew);
        let cell = Some(ScaleCell { scale: r.f(1), format });
        let kernel = WithScale { kernel: Gelu { x: r.x(256), out: r.x(256) }, cell };
        enqueued(&|list| kernel.enqueue(list))
    };
    assert!(refused(Dtype::Float32, 0).contains("FP8 of float32: kernels take bfloat16"));
    assert!(refused(Dtype::Bfloat16, 1).contains("kernels take multiples of 16"));
    assert!(refused(Dtype::Bfloat16, 0).contains("abs_max_scale"));
    assert!(scaling(Dtype::Float16, 0).contains("FP8 of float16: kernels take bfloat16"));
    assert!(scaling(Dtype::Bfloat16, 1).contains("gelu bfloat16"));
}
