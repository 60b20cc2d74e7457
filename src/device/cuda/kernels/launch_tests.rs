//! What every kernel launches, for vectors and for single elements: names, blocks and arguments, as `launches.txt` lists them.
//!
//! A GPU runs what this list says. A change of the list is a change of grids, of arguments or of their order.

use super::super::launch::{Arg, LaunchConfig, Queue};
use super::*;
use crate::optim::adam::{AdamConsts, AdamHyper};

const LISTED: &str = include_str!("launches.txt");

/// A list instead of a GPU.
#[derive(Default)]
struct List(String);

impl List {
    fn add(&mut self, stream: Stream, what: &str, args: &[u64]) -> Result<()> {
        self.0 += &format!("{} {what}:", stream.name());
        args.iter().for_each(|arg| self.0 += &format!(" {arg:x}"));
        self.0 += "\n";
        Ok(())
    }
}

impl Queue for List {
    fn launch<const N: usize>(
        &mut self,
        stream: Stream,
        name: &'static str,
        dtype: Option<Dtype>,
        launch: LaunchConfig,
        args: [Arg; N],
    ) -> Result<()> {
        let LaunchConfig { grid, block, shared_bytes } = launch;
        assert_eq!(shared_bytes, 0);
        let name = dtype.map_or(name.into(), |dtype| format!("{name} {dtype}"));
        self.add(stream, &format!("{name} {grid:?} {block:?}"), &args.map(|arg| arg.0))
    }

    fn scratch(&mut self, elems: usize) -> Result<DeviceSlice> {
        self.add(Stream::Compute, "scratch", &[elems as u64])?;
        Ok(DeviceSlice { addr: 0x7777_0000_0000, elems, dtype: Dtype::Float32 })
    }

    fn zero(&mut self, x: DeviceSlice) -> Result<()> {
        self.add(Stream::Compute, "zero", &[x.addr, x.bytes() as u64])
    }

    fn copy(&mut self, stream: Stream, src: DeviceSlice, dst: DeviceSlice) -> Result<()> {
        self.add(stream, "copy", &[src.addr, dst.addr, src.bytes() as u64])
    }
}

/// Arguments of a case: each has its own addresses, `skew` elements behind aligned ones.
struct Room {
    dtype: Dtype,
    skew: usize,
    given: u64,
}

impl Room {
    fn of(&mut self, elems: usize, dtype: Dtype) -> DeviceSlice {
        self.given += 1;
        DeviceSlice { addr: (self.given << 32) + (self.skew * dtype.bytes()) as u64, elems, dtype }
    }

    /// In the format of the case.
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

/// Rows of `cols` through the kernels that go by rows.
fn rows(list: &mut List, r: &mut Room, rows: usize, cols: usize) -> Result<()> {
    let n = rows * cols;
    let (vocab, places) = (50, 40);
    embed::embed(list, r.i(rows), r.i(rows), r.x(vocab * cols), None, r.x(n), cols)?;
    embed::embed(list, r.i(rows), r.i(rows), r.x(vocab * cols), Some(r.x(places * cols)), r.x(n), cols)?;
    embed::embed_backward(list, r.i(rows), r.i(rows), r.x(n), r.x(vocab * cols), true, None, false, cols)?;
    embed::embed_backward(list, r.i(rows), r.i(rows), r.x(n), r.x(vocab * cols), false, Some(r.x(places * cols)), true, cols)?;
    bias::bias_backward(list, r.x(n), r.x(cols), false)?;
    bias::bias_backward(list, r.x(n), r.x(cols), true)?;
    norm::rms_norm(list, r.x(n), r.x(cols), 1e-5, r.x(n), r.f(rows))?;
    norm::rms_norm_backward(list, r.x(n), r.x(n), r.x(cols), r.f(rows), r.x(n), r.x(cols), true)?;
    norm::layer_norm(list, r.x(n), r.x(cols), r.x(cols), 1e-6, r.x(n), r.f(2 * rows))?;
    norm::layer_norm_backward(list, r.x(n), r.x(n), r.x(cols), r.f(2 * rows), r.x(n), r.x(cols), r.x(cols), false)?;
    pointwise::swiglu(list, r.x(2 * n), r.x(n), cols)?;
    pointwise::swiglu_backward(list, r.x(n), r.x(2 * n), r.x(2 * n), cols)?;
    pointwise::gelu(list, r.x(n), r.x(n))?;
    pointwise::gelu_backward(list, r.x(n), r.x(n), r.x(n))?;
    let dx = r.x(n);
    pointwise::gelu_backward(list, dx, r.x(n), dx)?;
    cross_entropy::cross_entropy_stats(list, r.x(n), r.i(rows), r.f(3 * rows), 17, cols, true)?;
    cross_entropy::cross_entropy_grad(list, r.x(n), r.i(rows), r.f(3 * rows), 18, cols, 0.25)?;
    cross_entropy::cross_entropy_loss(list, r.f(3 * rows), r.f(1), 0.5, true)
}

fn heads(list: &mut List, r: &mut Room, shape: AttentionShape, rotary_dim: usize) -> Result<()> {
    let (n, out, d) = (shape.tokens() * shape.qkv_cols(), shape.tokens() * shape.out_cols(), shape.head_dim);
    let (normed, lse) = (shape.tokens() * (shape.heads + shape.kv_heads), shape.tokens() * shape.heads);
    rope::qk_norm(list, r.x(n), r.x(d), r.x(d), 1e-5, r.x(n), r.f(normed), shape)?;
    rope::qk_norm_backward(list, r.x(n), r.x(n), r.x(d), r.x(d), r.f(normed), r.x(d), r.x(d), true, shape)?;
    rope::rope(list, r.x(n), r.i(shape.tokens()), r.f(shape.seq_length * rotary_dim), rotary_dim, false, shape)?;
    rope::rope(list, r.x(n), r.i(shape.tokens()), r.f(shape.seq_length * rotary_dim), rotary_dim, true, shape)?;
    attention::attention(list, r.x(n), None, r.x(out), r.f(lse), shape)?;
    attention::attention_backward(list, r.x(out), r.x(n), Some(r.i(shape.tokens())), r.x(out), r.f(lse), r.x(n), shape)
}

fn transfer(list: &mut List, r: &mut Room, elems: usize) -> Result<()> {
    for stream in Stream::ALL {
        transfer::cast(list, stream, r.f(elems), r.x(elems))?;
        transfer::cast(list, stream, r.x(elems), r.f(elems))?;
    }
    transfer::grad_norm_partials(list, r.x(elems), r.f(elems.div_ceil(crate::optim::norm::BLOCK)), r.i(1))?;
    let consts = AdamConsts::new(&AdamHyper { lr: 1e-3, beta1: 0.9, beta2: 0.95, eps: 1e-8, weight_decay: 0.1 }, 3, true);
    let (params, m, v, grads, out) = (r.f(elems), r.f(elems), r.f(elems), r.x(elems), r.x(elems));
    transfer::adam_step(list, AdamArgs { params, m, v, grads, out, consts, scale: 0.7 })?;
    transfer::poke(list, r.x(elems), elems / 2, 7.0)
}

fn listing() -> Result<String> {
    let shape = AttentionShape { batch: 2, seq_length: 300, heads: 8, kv_heads: 2, head_dim: 128, scale: 0.088, window: None };
    let odd = AttentionShape { batch: 1, seq_length: 67, heads: 3, kv_heads: 1, head_dim: 7, scale: 0.4, window: Some(40) };
    let mut list = List::default();
    for (dtype, skew) in [(Dtype::Bfloat16, 0), (Dtype::Float16, 1), (Dtype::Float32, 0)] {
        let mut room = Room { dtype, skew, given: 0 };
        [(600, 2560), (67, 515), (1, 1), (16384, 40)].into_iter().try_for_each(|(m, n)| rows(&mut list, &mut room, m, n))?;
        heads(&mut list, &mut room, shape, 128)?;
        heads(&mut list, &mut room, odd, 4)?;
        [1, 4096, 9001].into_iter().try_for_each(|elems| transfer(&mut list, &mut room, elems))?;
    }
    Ok(list.0)
}

#[test]
fn launches_are_those_that_are_listed() {
    let now = listing().unwrap();
    for (line, (now, listed)) in now.lines().zip(LISTED.lines()).enumerate() {
        assert_eq!(now, listed, "launches.txt:{}", line + 1);
    }
    assert_eq!(now.lines().count(), LISTED.lines().count());
}
