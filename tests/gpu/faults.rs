//! What cannot be done is an error, and the device goes on.

use super::harness::Harness;
use super::report::{Missed, Outcome, Report, require};
use std::io::Write;
use std::panic::{AssertUnwindSafe, catch_unwind};
use superoffload::device::{AdamArgs, AttentionShape, DeviceSlice, Kernels, MatmulLayout, MatmulShape, Stream};
use superoffload::dtype::Dtype;
use superoffload::error::{Error, Result};
use superoffload::optim::adam::{AdamConsts, AdamHyper};
use superoffload::optim::norm::BLOCK;

const FP32: Dtype = Dtype::Float32;

pub fn run<W: Write>(report: &mut Report<W>, harness: &mut Harness) {
    report.case("faults/memory that no device has", || impossible_alloc(harness));
    for (name, call) in WRONG_CALLS {
        report.case(&format!("faults/{name}"), || refused(harness, call));
    }
}

/// Beyond every address space, so that no system can promise it.
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

/// Lets a kernel read where no memory is.
#[cfg(feature = "cuda")]
pub fn read_nowhere(harness: &mut Harness) -> Result<()> {
    let nowhere = DeviceSlice { addr: 1 << 16, elems: 256, dtype: FP32 };
    harness.dev.gelu(nowhere, part(harness.device, 0, 256, FP32))?;
    harness.synchronize(Stream::Compute)
}

/// This program, started with `args`, loses its GPU: it ends by itself, and says what is lost and what helps.
#[cfg(feature = "cuda")]
pub fn lost_gpu(args: &[&str]) -> Outcome {
    let run = std::env::current_exe().and_then(|this| std::process::Command::new(this).args(args).output());
    let output = run.map_err(|e| Missed::Failed(format!("start this program again: {e}")))?;
    let says = String::from_utf8_lossy(&output.stdout);
    let clear = ["CUDA error 7", "resume from the last checkpoint"].iter().all(|words| says.contains(words));
    require(output.status.code() == Some(2) && clear, || format!("{}: {says}", output.status))?;
    Ok(0.0)
}

/// The call gives an error, enqueues nothing that breaks the device, and does not panic.
fn refused(harness: &mut Harness, call: WrongCall) -> Outcome {
    let room = harness.device;
    match catch_unwind(AssertUnwindSafe(|| call(&mut *harness.dev, room))) {
        Ok(Err(e)) => require(!e.to_string().is_empty(), || "an error without words".into())?,
        Ok(Ok(())) => return Err(Missed::Failed("was accepted".into())),
        Err(_) => return Err(Missed::Failed("panicked".into())),
    }
    require(harness.is_alive(), || "the device does not work afterwards".into())?;
    Ok(0.0)
}

/// A call with arguments that do not fit, on memory of the given room.
type WrongCall = fn(&mut dyn Kernels, DeviceSlice) -> Result<()>;

/// The `index`-th part of the room.
fn part(room: DeviceSlice, index: usize, elems: usize, dtype: Dtype) -> DeviceSlice {
    DeviceSlice { addr: room.addr + (index << 16) as u64, elems, dtype }
}

/// Integers in a part of the room that nothing else uses.
fn tokens(room: DeviceSlice, elems: usize) -> DeviceSlice {
    part(room, 7, elems, Dtype::Int32)
}

const HEADS: AttentionShape = AttentionShape { batch: 1, seq_length: 2, heads: 2, kv_heads: 1, head_dim: 8, scale: 1.0, window: None };

#[rustfmt::skip]
const WRONG_CALLS: [(&str, WrongCall); 30] = [
    ("gelu of another size", |dev, room| dev.gelu(part(room, 0, 6, FP32), part(room, 1, 5, FP32))),
    ("gelu of another format", |dev, room| dev.gelu(part(room, 0, 6, FP32), part(room, 1, 6, Dtype::Bfloat16))),
    ("gelu of integers", |dev, room| dev.gelu(part(room, 0, 6, Dtype::Int32), part(room, 1, 6, Dtype::Int32))),
    ("gelu onto a part of its input", |dev, room| dev.gelu(part(room, 0, 64, FP32), part(room, 0, 128, FP32).slice(32, 64))),
    ("gelu_backward of another size", |dev, room| dev.gelu_backward(part(room, 0, 5, FP32), part(room, 1, 6, FP32), part(room, 2, 6, FP32))),
    ("swiglu of half a row", |dev, room| dev.swiglu(part(room, 0, 9, FP32), part(room, 1, 6, FP32), 3)),
    ("swiglu_backward of another size", |dev, room| dev.swiglu_backward(part(room, 0, 6, FP32), part(room, 1, 12, FP32), part(room, 2, 11, FP32), 3)),
    ("matmul onto a base of another size", |dev, room| {
        let (shape, at) = (MatmulShape { layout: MatmulLayout::Nt, m: 2, n: 3, k: 4 }, |index, elems| part(room, index, elems, FP32));
        dev.matmul(shape, at(0, 8), at(1, 12), None, Some(at(3, 5)), at(2, 6))
    }),
    ("embed of a table of another width", |dev, room| {
        dev.embed(tokens(room, 4), tokens(room, 4), part(room, 1, 10, FP32), None, part(room, 2, 16, FP32), 4)
    }),
    ("embed of tokens that are floats", |dev, room| {
        dev.embed(part(room, 0, 4, FP32), tokens(room, 4), part(room, 1, 12, FP32), None, part(room, 2, 16, FP32), 4)
    }),
    ("embed of too few positions", |dev, room| {
        dev.embed(tokens(room, 4), tokens(room, 3), part(room, 1, 12, FP32), None, part(room, 2, 16, FP32), 4)
    }),
    ("embed_backward of another size", |dev, room| {
        dev.embed_backward(tokens(room, 4), tokens(room, 4), part(room, 1, 15, FP32), part(room, 2, 12, FP32), false, None, false, 4)
    }),
    ("matmul of another size", |dev, room| {
        let shape = MatmulShape { layout: MatmulLayout::Nt, m: 2, n: 3, k: 4 };
        super::matmul::plain(dev, shape, part(room, 0, 8, FP32), part(room, 1, 12, FP32), part(room, 2, 5, FP32))
    }),
    ("matmul of two formats", |dev, room| {
        let shape = MatmulShape { layout: MatmulLayout::Nn, m: 2, n: 3, k: 4 };
        super::matmul::plain(dev, shape, part(room, 0, 8, Dtype::Bfloat16), part(room, 1, 12, FP32), part(room, 2, 6, FP32))
    }),
    ("matmul onto its input", |dev, room| {
        let shape = MatmulShape { layout: MatmulLayout::Nn, m: 4, n: 4, k: 4 };
        super::matmul::plain(dev, shape, part(room, 0, 16, FP32), part(room, 1, 16, FP32), part(room, 1, 16, FP32))
    }),
    ("bias_backward of half a row", |dev, room| dev.bias_backward(part(room, 0, 10, FP32), part(room, 1, 4, FP32), false)),
    ("rms_norm with too few statistics", |dev, room| {
        dev.rms_norm(part(room, 0, 12, FP32), part(room, 1, 4, FP32), 1e-5, part(room, 2, 12, FP32), part(room, 3, 2, FP32))
    }),
    ("rms_norm_backward with too few statistics", |dev, room| {
        let at = |index, elems| part(room, index, elems, FP32);
        dev.rms_norm_backward(at(0, 12), at(1, 12), at(2, 4), at(3, 2), at(4, 12), at(5, 4), false)
    }),
    ("layer_norm with statistics of the wrong format", |dev, room| {
        let at = |index, elems| part(room, index, elems, FP32);
        dev.layer_norm(at(0, 12), at(1, 4), at(2, 4), 1e-5, at(3, 12), part(room, 4, 6, Dtype::Float16))
    }),
    ("layer_norm_backward of another size", |dev, room| {
        let at = |index, elems| part(room, index, elems, FP32);
        dev.layer_norm_backward(at(0, 12), at(1, 12), at(2, 4), at(3, 6), at(4, 11), at(5, 4), at(6, 4), false)
    }),
    ("qk_norm onto its input", |dev, room| {
        let at = |index, elems| part(room, index, elems, FP32);
        dev.qk_norm(at(0, 64), at(1, 8), at(2, 8), 1e-5, at(0, 64), at(3, 6), HEADS)
    }),
    ("qk_norm_backward with too few statistics", |dev, room| {
        let at = |index, elems| part(room, index, elems, FP32);
        dev.qk_norm_backward(at(0, 64), at(1, 64), at(2, 8), at(3, 8), at(4, 5), at(5, 8), at(6, 8), false, HEADS)
    }),
    ("rope of more channels than a head has", |dev, room| {
        dev.rope(part(room, 0, 64, FP32), tokens(room, 2), part(room, 1, 24, FP32), 12, false, HEADS)
    }),
    ("rope of too few positions", |dev, room| {
        dev.rope(part(room, 0, 64, FP32), tokens(room, 1), part(room, 1, 16, FP32), 8, false, HEADS)
    }),
    ("attention of heads that do not divide", |dev, room| {
        let shape = AttentionShape { heads: 3, kv_heads: 2, ..HEADS };
        dev.attention(part(room, 0, 112, Dtype::Bfloat16), None, part(room, 1, 48, Dtype::Bfloat16), part(room, 2, 6, FP32), shape)
    }),
    ("attention_backward with too few statistics", |dev, room| {
        let at = |index, elems| part(room, index, elems, Dtype::Bfloat16);
        dev.attention_backward(at(0, 32), at(1, 64), None, at(2, 32), part(room, 3, 3, FP32), at(4, 64), HEADS)
    }),
    ("cross_entropy_stats of another size", |dev, room| {
        dev.cross_entropy_stats(part(room, 0, 11, FP32), part(room, 1, 3, Dtype::Int32), part(room, 2, 9, FP32), 0, 4, true)
    }),
    ("cast onto its source", |dev, room| dev.cast(Stream::Compute, part(room, 0, 8, FP32), part(room, 0, 8, Dtype::Bfloat16))),
    ("grad_norm_partials with too few partials", |dev, room| {
        dev.grad_norm_partials(part(room, 0, BLOCK + 1, FP32), part(room, 1, 1, FP32), part(room, 2, 1, Dtype::Int32))
    }),
    ("adam_step of another size", |dev, room| {
        let at = |index, elems| part(room, index, elems, FP32);
        let consts = AdamConsts::new(&AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.9, eps: 1e-8, weight_decay: 0.0 }, 1, true);
        dev.adam_step(AdamArgs { params: at(0, 8), m: at(1, 8), v: at(2, 7), grads: at(3, 8), out: at(4, 8), consts, scale: 1.0 })
    }),
];
