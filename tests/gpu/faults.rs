//! Invalid operations are errors, after which the device continues to work.

use super::harness::Harness;
use super::report::{Missed, Outcome, Report, require};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use superoffload::internals::device::*;
use superoffload::internals::dtype::Dtype;
use superoffload::internals::optim::{AdamConsts, AdamHyper, BLOCK};
use superoffload::{Error, Result};

const FP32: Dtype = Dtype::Float32;

pub fn run<W: Write>(report: &mut Report<W>, harness: &mut Harness) {
    report.case("faults/memory that no device has", || impossible_alloc(harness));
    for (name, call) in WRONG_CALLS {
        report.case(&format!("faults/{name}"), || refused(harness, call));
    }
}

/// Larger than any address space, so that no system can overcommit it.
fn impossible_alloc(harness: &mut Harness) -> Outcome {
    for elems in [1usize << 56, usize::MAX / 8] {
        match catch_unwind(AssertUnwindSafe(|| harness.dev.alloc("the impossible", elems, FP32))) {
            Ok(Err(e @ Error::Resource { .. })) => require(e.to_string().contains("the impossible"), || format!("names nothing: {e}"))?,
            Ok(other) => return Err(Missed::Failed(format!("{elems} floats: {other:?}"))),
            Err(_) => return Err(Missed::Failed(format!("{elems} floats: panicked"))),
        }
    }
    require(harness.is_alive(), || "the device does not work afterwards".into())?;
    Ok(0.0)
}

/// Launches a kernel that reads outside of any memory: 32 TiB after a table of one token.
#[cfg(feature = "cuda")]
pub fn read_nowhere(harness: &mut Harness) -> Result<()> {
    const CHANNELS: usize = 4096;
    let (tokens, positions) = (part(harness.device, 0, 1, Dtype::Int32), part(harness.device, 1, 1, Dtype::Int32));
    let (wte, out) = (part(harness.device, 2, CHANNELS, FP32), part(harness.device, 3, CHANNELS, FP32));
    let host = harness.host.slice(0, 4);
    harness.memory.lend_mut::<i32>(host)[0] = i32::MAX;
    harness.dev.copy_h2d(Stream::Compute, host, tokens)?;
    harness.dev.launch(Embed { tokens, positions, wte, wpe: None, out, channels: CHANNELS })?;
    harness.synchronize(Stream::Compute)
}

/// A child process of this program loses its GPU. It must end by itself, with the loss and the remedy in its error.
#[cfg(feature = "cuda")]
pub fn lost_gpu() -> Outcome {
    let run = std::env::current_exe().and_then(|this| std::process::Command::new(this).args(["selftest", "--lose-gpu"]).output());
    let output = run.map_err(|e| Missed::Failed(format!("start this program again: {e}")))?;
    let printed = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    let clear = ["CUDA error 7", "resume from the last checkpoint"].iter().all(|words| printed.contains(words));
    let has_given_up = output.status.code().is_some_and(|code| code != 0);
    require(has_given_up && clear, || format!("{}: {printed}", output.status))?;
    Ok(0.0)
}

/// The call must return an error without a panic, and the device must continue to work.
fn refused(harness: &mut Harness, call: WrongCall) -> Outcome {
    let memory = harness.device;
    match catch_unwind(AssertUnwindSafe(|| call(&mut *harness.dev, memory))) {
        Ok(Err(e)) => require(!e.to_string().is_empty(), || "an error without words".into())?,
        Ok(Ok(())) => return Err(Missed::Failed("was accepted".into())),
        Err(_) => return Err(Missed::Failed("panicked".into())),
    }
    require(harness.is_alive(), || "the device does not work afterwards".into())?;
    Ok(0.0)
}

/// A call with invalid arguments in the memory `memory`.
type WrongCall = fn(&mut dyn Kernels, DeviceSlice) -> Result<()>;

/// The `index`-th part of the room.
fn part(memory: DeviceSlice, index: usize, elems: usize, dtype: Dtype) -> DeviceSlice {
    memory.view(index << 16, elems, dtype)
}

/// Launches an embedding of four channels from tokens, positions and a table.
fn embed(dev: &mut dyn Kernels, [tokens, positions, wte, out]: [DeviceSlice; 4]) -> Result<()> {
    dev.launch(Embed { tokens, positions, wte, wpe: None, out, channels: 4 })
}

/// Integers in a part of the room that nothing else uses.
fn tokens(memory: DeviceSlice, elems: usize) -> DeviceSlice {
    part(memory, 7, elems, Dtype::Int32)
}

const HEADS: AttentionShape =
    AttentionShape { batch: 1, seq_length: 2, heads: 2, kv_heads: 1, head_dim: 8, scale: 1.0, window: None, softcap: None };

#[rustfmt::skip]
const WRONG_CALLS: [(&str, WrongCall); 31] = [
    ("scale_add onto its base", |dev, memory| {
        let base = part(memory, 1, 6, FP32);
        dev.launch(ScaleAdd { x: part(memory, 0, 6, FP32), scale: 1.0, base: Some(base), out: base })
    }),
    ("gelu of another size", |dev, memory| dev.launch(Gelu { x: part(memory, 0, 6, FP32), out: part(memory, 1, 5, FP32) })),
    ("gelu of another format", |dev, memory| dev.launch(Gelu { x: part(memory, 0, 6, FP32), out: part(memory, 1, 6, Dtype::Bfloat16) })),
    ("gelu of integers", |dev, memory| dev.launch(Gelu { x: part(memory, 0, 6, Dtype::Int32), out: part(memory, 1, 6, Dtype::Int32) })),
    ("gelu onto a part of its input", |dev, memory| dev.launch(Gelu { x: part(memory, 0, 64, FP32), out: part(memory, 0, 128, FP32).slice(32, 64) })),
    ("gelu_backward of another size", |dev, memory| dev.launch(GeluBackward { dout: part(memory, 0, 5, FP32), x: part(memory, 1, 6, FP32), dx: part(memory, 2, 6, FP32) })),
    ("swiglu of half a row", |dev, memory| dev.launch(Swiglu { gate_up: part(memory, 0, 9, FP32), out: part(memory, 1, 6, FP32), cols: 3 })),
    ("swiglu_backward of another size", |dev, memory| {
        dev.launch(SwigluBackward { dout: part(memory, 0, 6, FP32), gate_up: part(memory, 1, 12, FP32), dgate_up: part(memory, 2, 11, FP32), cols: 3 })
    }),
    ("matmul onto a base of another size", |dev, memory| {
        let (shape, at) = (MatmulShape { layout: MatmulLayout::Nt, m: 2, n: 3, k: 4 }, |index, elems| part(memory, index, elems, FP32));
        dev.launch(Matmul { shape, a: at(0, 8), a_pitch: None, b: at(1, 12), bias: None, base: Some(at(3, 5)), c: at(2, 6) })
    }),
    ("embed of a table of another width", |dev, memory| {
        embed(dev, [tokens(memory, 4), tokens(memory, 4), part(memory, 1, 10, FP32), part(memory, 2, 16, FP32)])
    }),
    ("embed of tokens that are floats", |dev, memory| {
        embed(dev, [part(memory, 0, 4, FP32), tokens(memory, 4), part(memory, 1, 12, FP32), part(memory, 2, 16, FP32)])
    }),
    ("embed of too few positions", |dev, memory| {
        embed(dev, [tokens(memory, 4), tokens(memory, 3), part(memory, 1, 12, FP32), part(memory, 2, 16, FP32)])
    }),
    ("embed_backward of another size", |dev, memory| {
        dev.launch(EmbedBackward {
            tokens: tokens(memory, 4),
            positions: tokens(memory, 4),
            dout: part(memory, 1, 15, FP32),
            dwte: part(memory, 2, 12, FP32),
            first_token: 0,
            accumulate_wte: false,
            dwpe: None,
            accumulate_wpe: false,
            channels: 4,
        })
    }),
    ("matmul of another size", |dev, memory| {
        let shape = MatmulShape { layout: MatmulLayout::Nt, m: 2, n: 3, k: 4 };
        dev.launch(Matmul::plain(shape, [part(memory, 0, 8, FP32), part(memory, 1, 12, FP32), part(memory, 2, 5, FP32)]))
    }),
    ("matmul of two formats", |dev, memory| {
        let shape = MatmulShape { layout: MatmulLayout::Nn, m: 2, n: 3, k: 4 };
        dev.launch(Matmul::plain(shape, [part(memory, 0, 8, Dtype::Bfloat16), part(memory, 1, 12, FP32), part(memory, 2, 6, FP32)]))
    }),
    ("matmul onto its input", |dev, memory| {
        let shape = MatmulShape { layout: MatmulLayout::Nn, m: 4, n: 4, k: 4 };
        dev.launch(Matmul::plain(shape, [part(memory, 0, 16, FP32), part(memory, 1, 16, FP32), part(memory, 1, 16, FP32)]))
    }),
    ("bias_backward of half a row", |dev, memory| dev.launch(BiasBackward { dout: part(memory, 0, 10, FP32), dbias: part(memory, 1, 4, FP32), accumulate: false })),
    ("rms_norm with too few statistics", |dev, memory| {
        let at = |index, elems| part(memory, index, elems, FP32);
        dev.launch(RmsNorm { x: at(0, 12), weight: at(1, 4), plus_one: false, eps: 1e-5, out: at(2, 12), rstd: at(3, 2) })
    }),
    ("rms_norm_backward with too few statistics", |dev, memory| {
        let at = |index, elems| part(memory, index, elems, FP32);
        let (dout, x, weight, rstd) = (at(0, 12), at(1, 12), at(2, 4), at(3, 2));
        dev.launch(RmsNormBackward { dout, x, weight, plus_one: false, rstd, dx: at(4, 12), dweight: at(5, 4), accumulate: false })
    }),
    ("layer_norm with statistics of the wrong format", |dev, memory| {
        let at = |index, elems| part(memory, index, elems, FP32);
        let stats = part(memory, 4, 6, Dtype::Float16);
        dev.launch(LayerNorm { x: at(0, 12), weight: at(1, 4), bias: at(2, 4), eps: 1e-5, out: at(3, 12), stats })
    }),
    ("layer_norm_backward of another size", |dev, memory| {
        let at = |index, elems| part(memory, index, elems, FP32);
        let (dout, x, weight, stats) = (at(0, 12), at(1, 12), at(2, 4), at(3, 6));
        dev.launch(LayerNormBackward { dout, x, weight, stats, dx: at(4, 11), dweight: at(5, 4), dbias: at(6, 4), accumulate: false })
    }),
    ("qk_norm onto its input", |dev, memory| {
        let at = |index, elems| part(memory, index, elems, FP32);
        let (qkv, q_weight, k_weight) = (at(0, 64), at(1, 8), at(2, 8));
        dev.launch(QkNorm { qkv, q_weight, k_weight, plus_one: false, eps: 1e-5, out: qkv, rstd: at(3, 6), shape: HEADS })
    }),
    ("qk_norm_backward with too few statistics", |dev, memory| {
        let at = |index, elems| part(memory, index, elems, FP32);
        let (dqkv, qkv, q_weight, k_weight) = (at(0, 64), at(1, 64), at(2, 8), at(3, 8));
        let (rstd, dq_weight, dk_weight) = (at(4, 5), at(5, 8), at(6, 8));
        dev.launch(QkNormBackward { dqkv, qkv, q_weight, k_weight, plus_one: false, rstd, dq_weight, dk_weight, accumulate: false, shape: HEADS })
    }),
    ("rope of more channels than a head has", |dev, memory| {
        let (qkv, positions, table) = (part(memory, 0, 64, FP32), tokens(memory, 2), part(memory, 1, 24, FP32));
        dev.launch(Rope { qkv, positions, table, rotary_dim: 12, interleaved: false, inverse: false, shape: HEADS })
    }),
    ("rope of too few positions", |dev, memory| {
        let (qkv, positions, table) = (part(memory, 0, 64, FP32), tokens(memory, 1), part(memory, 1, 16, FP32));
        dev.launch(Rope { qkv, positions, table, rotary_dim: 8, interleaved: true, inverse: false, shape: HEADS })
    }),
    ("attention of heads that do not divide", |dev, memory| {
        let shape = AttentionShape { heads: 3, kv_heads: 2, ..HEADS };
        let (qkv, out, lse) = (part(memory, 0, 112, Dtype::Bfloat16), part(memory, 1, 48, Dtype::Bfloat16), part(memory, 2, 6, FP32));
        dev.launch(AttentionForward { qkv, documents: None, out, lse, shape })
    }),
    ("attention_backward with too few statistics", |dev, memory| {
        let at = |index, elems| part(memory, index, elems, Dtype::Bfloat16);
        let (dout, qkv, out, lse) = (at(0, 32), at(1, 64), at(2, 32), part(memory, 3, 3, FP32));
        dev.launch(AttentionBackward { dout, qkv, documents: None, out, lse, dqkv: at(4, 64), shape: HEADS, block: None })
    }),
    ("cross_entropy_stats of another size", |dev, memory| {
        let (logits, targets, stats) = (part(memory, 0, 11, FP32), part(memory, 1, 3, Dtype::Int32), part(memory, 2, 9, FP32));
        dev.launch(CrossEntropyStats { logits, targets, stats, vocab_start: 0, cols: 4, softcap: None, first: true })
    }),
    ("cast onto its source", |dev, memory| {
        dev.launch(Cast { stream: Stream::Compute, src: part(memory, 0, 8, FP32), dst: part(memory, 0, 8, Dtype::Bfloat16) })
    }),
    ("grad_norm_partials with too few partials", |dev, memory| {
        let (grads, partials, nonfinite) = (part(memory, 0, BLOCK + 1, FP32), part(memory, 1, 1, FP32), part(memory, 2, 1, Dtype::Int32));
        dev.launch(GradNormPartials { stream: Stream::Compute, grads, partials, nonfinite })
    }),
    ("adam_step of another size", |dev, memory| {
        let at = |index, elems| part(memory, index, elems, FP32);
        let consts = AdamConsts::new(&AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.9, eps: 1e-8, weight_decay: 0.0 }, 1, true);
        dev.launch(Adam { first: 0, params: at(0, 8), m: at(1, 8), v: at(2, 7), grads: at(3, 8), out: at(4, 8), consts, scale: 1.0 })
    }),
];
