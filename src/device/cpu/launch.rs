//! [`Kernels`] for the CPU: checks what a kernel is given, picks its number format and enqueues it.

use super::CpuDevice;
use super::compute::{ComputeRef, view, view_mut};
use super::kernels::attention_backward::Forward;
use super::kernels::cross_entropy::Tile;
use super::kernels::{
    Compute, attention, attention_backward, cross_entropy, embed, matmul, norm, optimizer, pointwise, qk_norm, reduce, rope,
};
use crate::device::arguments::{arguments, check, check_documents, check_shape, rows};
use crate::device::{AdamArgs, AttentionShape, DeviceSlice, Kernels, MatmulShape, Stream};
use crate::dtype::{Dtype, Element};
use crate::error::{Error, Result};
use crate::optim::adam::{AdamState, AdamStep};
use crate::optim::norm::BLOCK;
use half::{bf16, f16};

/// Device memory, seen from inside a task.
#[derive(Clone, Copy)]
struct TaskMemory(());

impl TaskMemory {
    fn read<T: bytemuck::Pod>(self, slice: DeviceSlice) -> &'static [T] {
        // SAFETY: a `TaskMemory` exists only in tasks; the streams' order and `check` keep writers away.
        unsafe { view(slice) }
    }

    fn write<T: bytemuck::Pod>(self, slice: DeviceSlice) -> &'static mut [T] {
        // SAFETY: as above; `check` saw that no other argument overlaps, and a kernel asks for each argument once.
        unsafe { view_mut(slice) }
    }
}

impl CpuDevice {
    /// Enqueues a kernel on the compute stream.
    fn launch(&mut self, name: &'static str, kernel: impl FnOnce(&mut Compute, TaskMemory) + Copy + Send + 'static) -> Result<()> {
        let compute = ComputeRef(self.compute.compute);
        // SAFETY: this is a task of the compute stream, and follows the reference once.
        self.enqueue(Stream::Compute, name, move || kernel(unsafe { compute.get() }, TaskMemory(())))
    }
}

/// Compiles `$body` for each float format and runs the one for `$dtype`.
macro_rules! by_float {
    ($dtype:expr, $t:ident => $body:expr) => {
        match $dtype {
            Dtype::Float32 => {
                type $t = f32;
                $body
            }
            Dtype::Bfloat16 => {
                type $t = bf16;
                $body
            }
            Dtype::Float16 => {
                type $t = f16;
                $body
            }
            Dtype::Int32 => Err(Error::Unsupported("arithmetic on int32".into())),
        }
    };
}

impl Kernels for CpuDevice {
    fn prepare_attention(&mut self, shape: AttentionShape, _dtype: Dtype) -> Result<()> {
        check_shape("attention", &shape)
    }

    fn embed(
        &mut self,
        tokens: DeviceSlice,
        positions: DeviceSlice,
        wte: DeviceSlice,
        wpe: Option<DeviceSlice>,
        out: DeviceSlice,
        channels: usize,
    ) -> Result<()> {
        let (dtype, t, vocab) = (out.dtype, tokens.elems, rows(wte, channels) * channels);
        check("embed", arguments![dtype => in wte[vocab], out out[t * channels]; Dtype::Int32 => in tokens[t], in positions[t]])?;
        if let Some(wpe) = wpe {
            check("embed", arguments![dtype => in wpe[rows(wpe, channels) * channels], out out[t * channels]])?;
        }
        by_float!(dtype, T => self.launch("embed", move |cx, memory| {
            let wpe = wpe.map(|wpe| memory.read::<T>(wpe));
            let entries = (memory.read(tokens), memory.read(positions));
            embed::embed::<T>(cx, entries, memory.read(wte), wpe, memory.write(out), channels);
        }))
    }

    fn embed_backward(
        &mut self,
        tokens: DeviceSlice,
        positions: DeviceSlice,
        dout: DeviceSlice,
        dwte: DeviceSlice,
        accumulate_wte: bool,
        dwpe: Option<DeviceSlice>,
        accumulate_wpe: bool,
        channels: usize,
    ) -> Result<()> {
        let (dtype, t, vocab) = (dout.dtype, tokens.elems, rows(dwte, channels) * channels);
        check(
            "embed_backward",
            arguments![dtype => in dout[t * channels], out dwte[vocab]; Dtype::Int32 => in tokens[t], in positions[t]],
        )?;
        if let Some(dwpe) = dwpe {
            let table = rows(dwpe, channels) * channels;
            check("embed_backward", arguments![dtype => in dout[t * channels], in dwte[vocab], out dwpe[table]])?;
        }
        by_float!(dtype, T => self.launch("embed_backward", move |cx, memory| {
            let dout = memory.read::<T>(dout);
            embed::embed_backward(cx, memory.read(tokens), dout, memory.write(dwte), accumulate_wte, channels);
            if let Some(dwpe) = dwpe {
                embed::embed_backward(cx, memory.read(positions), dout, memory.write(dwpe), accumulate_wpe, channels);
            }
        }))
    }

    fn matmul(
        &mut self,
        shape: MatmulShape,
        a: DeviceSlice,
        b: DeviceSlice,
        bias: Option<DeviceSlice>,
        base: Option<DeviceSlice>,
        c: DeviceSlice,
    ) -> Result<()> {
        let MatmulShape { m, n, k, .. } = shape;
        let apart = base.filter(|base| *base != c);
        check("matmul", arguments![c.dtype => in a[m * k], in b[k * n], out c[m * n]])?;
        if let Some(bias) = bias {
            check("matmul", arguments![c.dtype => in bias[n], out c[m * n]])?;
        }
        if let Some(base) = apart {
            check("matmul", arguments![c.dtype => in base[m * n], out c[m * n]])?;
        }
        by_float!(c.dtype, T => self.launch("matmul", move |cx, memory| {
            let (bias, product) = (bias.map(|bias| memory.read::<T>(bias)), memory.write::<T>(c));
            if let Some(base) = apart {
                pointwise::copy(cx, memory.read(base), product);
            }
            matmul::matmul::<T>(cx, shape, memory.read(a), memory.read(b), bias, product, base.is_some());
        }))
    }

    fn bias_backward(&mut self, dout: DeviceSlice, dbias: DeviceSlice, accumulate: bool) -> Result<()> {
        let cols = dbias.elems;
        check("bias_backward", arguments![dout.dtype => in dout[rows(dout, cols) * cols], out dbias[cols]])?;
        by_float!(dout.dtype, T => self.launch("bias_backward", move |cx, memory| {
            reduce::bias_backward::<T>(cx, memory.read(dout), memory.write(dbias), accumulate);
        }))
    }

    fn rms_norm(&mut self, x: DeviceSlice, weight: DeviceSlice, eps: f32, out: DeviceSlice, rstd: DeviceSlice) -> Result<()> {
        let (cols, rows) = (weight.elems, rstd.elems);
        let n = rows * cols;
        check("rms_norm", arguments![x.dtype => in x[n], in weight[cols], out out[n]; Dtype::Float32 => out rstd[rows]])?;
        by_float!(x.dtype, T => self.launch("rms_norm", move |cx, memory| {
            norm::rms_norm::<T>(cx, memory.read(x), memory.read(weight), eps, memory.write(out), memory.write(rstd));
        }))
    }

    fn rms_norm_backward(
        &mut self,
        dout: DeviceSlice,
        x: DeviceSlice,
        weight: DeviceSlice,
        rstd: DeviceSlice,
        dx: DeviceSlice,
        dweight: DeviceSlice,
        accumulate: bool,
    ) -> Result<()> {
        let (cols, n) = (weight.elems, rstd.elems * weight.elems);
        check(
            "rms_norm_backward",
            arguments![
                x.dtype => in dout[n], in x[n], in weight[cols], out dx[n], out dweight[cols];
                Dtype::Float32 => in rstd[rows(x, cols)]
            ],
        )?;
        by_float!(x.dtype, T => self.launch("rms_norm_backward", move |cx, memory| {
            let (dout, x, weight, rstd) = (memory.read::<T>(dout), memory.read(x), memory.read(weight), memory.read(rstd));
            norm::rms_norm_backward(cx, dout, x, weight, rstd, memory.write(dx), (memory.write(dweight), accumulate));
        }))
    }

    fn layer_norm(
        &mut self,
        x: DeviceSlice,
        weight: DeviceSlice,
        bias: DeviceSlice,
        eps: f32,
        out: DeviceSlice,
        stats: DeviceSlice,
    ) -> Result<()> {
        let cols = weight.elems;
        let n = rows(x, cols) * cols;
        check(
            "layer_norm",
            arguments![
                x.dtype => in x[n], in weight[cols], in bias[cols], out out[n];
                Dtype::Float32 => out stats[2 * rows(x, cols)]
            ],
        )?;
        by_float!(x.dtype, T => self.launch("layer_norm", move |cx, memory| {
            let affine = (memory.read::<T>(weight), memory.read(bias));
            norm::layer_norm(cx, memory.read(x), affine, eps, memory.write(out), memory.write(stats));
        }))
    }

    fn layer_norm_backward(
        &mut self,
        dout: DeviceSlice,
        x: DeviceSlice,
        weight: DeviceSlice,
        stats: DeviceSlice,
        dx: DeviceSlice,
        dweight: DeviceSlice,
        dbias: DeviceSlice,
        accumulate: bool,
    ) -> Result<()> {
        let cols = weight.elems;
        let n = rows(x, cols) * cols;
        check(
            "layer_norm_backward",
            arguments![
                x.dtype => in dout[n], in x[n], in weight[cols], out dx[n], out dweight[cols], out dbias[cols];
                Dtype::Float32 => in stats[2 * rows(x, cols)]
            ],
        )?;
        by_float!(x.dtype, T => self.launch("layer_norm_backward", move |cx, memory| {
            let (dout, x, weight, stats) = (memory.read::<T>(dout), memory.read(x), memory.read(weight), memory.read(stats));
            let parameters = (memory.write(dweight), memory.write(dbias), accumulate);
            norm::layer_norm_backward(cx, dout, x, weight, stats, memory.write(dx), parameters);
        }))
    }

    fn qk_norm(
        &mut self,
        qkv: DeviceSlice,
        q_weight: DeviceSlice,
        k_weight: DeviceSlice,
        eps: f32,
        out: DeviceSlice,
        rstd: DeviceSlice,
        shape: AttentionShape,
    ) -> Result<()> {
        let (n, normed, d) = (shape.tokens() * shape.qkv_cols(), shape.tokens() * (shape.heads + shape.kv_heads), shape.head_dim);
        check_shape("qk_norm", &shape)?;
        check(
            "qk_norm",
            arguments![qkv.dtype => in qkv[n], in q_weight[d], in k_weight[d], out out[n]; Dtype::Float32 => out rstd[normed]],
        )?;
        by_float!(qkv.dtype, T => self.launch("qk_norm", move |cx, memory| {
            let weights = (memory.read::<T>(q_weight), memory.read(k_weight));
            qk_norm::qk_norm(cx, &shape, memory.read(qkv), weights, eps, memory.write(out), memory.write(rstd));
        }))
    }

    fn qk_norm_backward(
        &mut self,
        dqkv: DeviceSlice,
        qkv: DeviceSlice,
        q_weight: DeviceSlice,
        k_weight: DeviceSlice,
        rstd: DeviceSlice,
        dq_weight: DeviceSlice,
        dk_weight: DeviceSlice,
        accumulate: bool,
        shape: AttentionShape,
    ) -> Result<()> {
        let (n, normed, d) = (shape.tokens() * shape.qkv_cols(), shape.tokens() * (shape.heads + shape.kv_heads), shape.head_dim);
        check_shape("qk_norm_backward", &shape)?;
        check(
            "qk_norm_backward",
            arguments![
                qkv.dtype => out dqkv[n], in qkv[n], in q_weight[d], in k_weight[d], out dq_weight[d], out dk_weight[d];
                Dtype::Float32 => in rstd[normed]
            ],
        )?;
        by_float!(qkv.dtype, T => self.launch("qk_norm_backward", move |cx, memory| {
            let weights = (memory.read::<T>(q_weight), memory.read(k_weight));
            let gradients = (memory.write(dq_weight), memory.write(dk_weight), accumulate);
            qk_norm::qk_norm_backward(cx, &shape, memory.write(dqkv), memory.read(qkv), weights, memory.read(rstd), gradients);
        }))
    }

    fn rope(
        &mut self,
        qkv: DeviceSlice,
        positions: DeviceSlice,
        table: DeviceSlice,
        rotary_dim: usize,
        inverse: bool,
        shape: AttentionShape,
    ) -> Result<()> {
        check_shape("rope", &shape)?;
        let (n, angles) = (shape.tokens() * shape.qkv_cols(), shape.seq_length * rotary_dim);
        check(
            "rope",
            arguments![qkv.dtype => out qkv[n]; Dtype::Float32 => in table[angles]; Dtype::Int32 => in positions[shape.tokens()]],
        )?;
        if rotary_dim > shape.head_dim || !rotary_dim.is_multiple_of(2) {
            return Err(Error::resource("launch rope", format!("cannot rotate {rotary_dim} of {} channels", shape.head_dim)));
        }
        by_float!(qkv.dtype, T => self.launch("rope", move |cx, memory| {
            rope::rope::<T>(cx, &shape, memory.write(qkv), memory.read(positions), (memory.read(table), rotary_dim), inverse);
        }))
    }

    fn attention(
        &mut self,
        qkv: DeviceSlice,
        documents: Option<DeviceSlice>,
        out: DeviceSlice,
        lse: DeviceSlice,
        shape: AttentionShape,
    ) -> Result<()> {
        check_shape("attention", &shape)?;
        check_documents("attention", documents, &shape)?;
        let (n, out_elems) = (shape.tokens() * shape.qkv_cols(), shape.tokens() * shape.out_cols());
        let lse_elems = shape.tokens() * shape.heads;
        check("attention", arguments![qkv.dtype => in qkv[n], out out[out_elems]; Dtype::Float32 => out lse[lse_elems]])?;
        by_float!(qkv.dtype, T => self.launch("attention", move |cx, memory| {
            let documents = documents.map(|documents| memory.read(documents));
            attention::attention::<T>(cx, &shape, memory.read(qkv), documents, memory.write(out), memory.write(lse));
        }))
    }

    fn attention_backward(
        &mut self,
        dout: DeviceSlice,
        qkv: DeviceSlice,
        documents: Option<DeviceSlice>,
        out: DeviceSlice,
        lse: DeviceSlice,
        dqkv: DeviceSlice,
        shape: AttentionShape,
    ) -> Result<()> {
        check_shape("attention_backward", &shape)?;
        check_documents("attention_backward", documents, &shape)?;
        let (n, out_elems) = (shape.tokens() * shape.qkv_cols(), shape.tokens() * shape.out_cols());
        check(
            "attention_backward",
            arguments![
                qkv.dtype => in dout[out_elems], in qkv[n], in out[out_elems], out dqkv[n];
                Dtype::Float32 => in lse[shape.tokens() * shape.heads]
            ],
        )?;
        by_float!(qkv.dtype, T => self.launch("attention_backward", move |cx, memory| {
            let (dout, qkv, out, lse) = (memory.read::<T>(dout), memory.read(qkv), memory.read(out), memory.read(lse));
            let documents = documents.map(|documents| memory.read(documents));
            attention_backward::attention_backward(cx, &shape, Forward { dout, qkv, documents, out, lse }, memory.write(dqkv));
        }))
    }

    fn swiglu(&mut self, gate_up: DeviceSlice, out: DeviceSlice, cols: usize) -> Result<()> {
        let n = rows(out, cols) * cols;
        check("swiglu", arguments![out.dtype => in gate_up[2 * n], out out[n]])?;
        by_float!(out.dtype, T => self.launch("swiglu", move |cx, memory| {
            pointwise::swiglu::<T>(cx, memory.read(gate_up), memory.write(out), cols);
        }))
    }

    fn swiglu_backward(&mut self, dout: DeviceSlice, gate_up: DeviceSlice, dgate_up: DeviceSlice, cols: usize) -> Result<()> {
        let n = rows(dout, cols) * cols;
        check("swiglu_backward", arguments![dout.dtype => in dout[n], in gate_up[2 * n], out dgate_up[2 * n]])?;
        by_float!(dout.dtype, T => self.launch("swiglu_backward", move |cx, memory| {
            pointwise::swiglu_backward::<T>(cx, memory.read(dout), memory.read(gate_up), memory.write(dgate_up), cols);
        }))
    }

    fn gelu(&mut self, x: DeviceSlice, out: DeviceSlice) -> Result<()> {
        check("gelu", arguments![x.dtype => in x[out.elems], out out[x.elems]])?;
        by_float!(x.dtype, T => self.launch("gelu", move |cx, memory| {
            pointwise::gelu::<T>(cx, memory.read(x), memory.write(out));
        }))
    }

    fn gelu_backward(&mut self, dout: DeviceSlice, x: DeviceSlice, dx: DeviceSlice) -> Result<()> {
        check("gelu_backward", arguments![x.dtype => in x[dx.elems], out dx[x.elems]])?;
        if dout != dx {
            check("gelu_backward", arguments![x.dtype => in dout[x.elems], out dx[x.elems]])?;
        }
        by_float!(x.dtype, T => self.launch("gelu_backward", move |cx, memory| {
            let dx_elems = memory.write::<T>(dx);
            if dout != dx {
                pointwise::copy(cx, memory.read(dout), dx_elems);
            }
            pointwise::gelu_backward(cx, memory.read(x), dx_elems);
        }))
    }

    fn cross_entropy_stats(
        &mut self,
        logits: DeviceSlice,
        targets: DeviceSlice,
        stats: DeviceSlice,
        vocab_start: usize,
        cols: usize,
        first: bool,
    ) -> Result<()> {
        let t = targets.elems;
        check(
            "cross_entropy_stats",
            arguments![logits.dtype => in logits[t * cols]; Dtype::Int32 => in targets[t]; Dtype::Float32 => out stats[3 * t]],
        )?;
        by_float!(logits.dtype, T => self.launch("cross_entropy_stats", move |cx, memory| {
            let tile = Tile { targets: memory.read(targets), vocab_start, cols };
            cross_entropy::stats::<T>(cx, tile, memory.read(logits), memory.write(stats), first);
        }))
    }

    fn cross_entropy_grad(
        &mut self,
        logits: DeviceSlice,
        targets: DeviceSlice,
        stats: DeviceSlice,
        vocab_start: usize,
        cols: usize,
        scale: f32,
    ) -> Result<()> {
        let t = targets.elems;
        check(
            "cross_entropy_grad",
            arguments![logits.dtype => out logits[t * cols]; Dtype::Int32 => in targets[t]; Dtype::Float32 => in stats[3 * t]],
        )?;
        by_float!(logits.dtype, T => self.launch("cross_entropy_grad", move |cx, memory| {
            let tile = Tile { targets: memory.read(targets), vocab_start, cols };
            cross_entropy::grad::<T>(cx, tile, memory.write(logits), memory.read(stats), scale);
        }))
    }

    fn cross_entropy_loss(&mut self, stats: DeviceSlice, loss: DeviceSlice, scale: f32, accumulate: bool) -> Result<()> {
        check("cross_entropy_loss", arguments![Dtype::Float32 => in stats[rows(stats, 3) * 3], out loss[1]])?;
        self.launch("cross_entropy_loss", move |_, memory| {
            cross_entropy::loss(memory.read(stats), &mut memory.write(loss)[0], scale, accumulate);
        })
    }

    fn zero(&mut self, x: DeviceSlice) -> Result<()> {
        self.launch("zero", move |cx, memory| match x.dtype.bytes() {
            2 => pointwise::zero::<u16>(cx, memory.write(x)),
            _ => pointwise::zero::<u32>(cx, memory.write(x)),
        })
    }

    fn cast(&mut self, stream: Stream, src: DeviceSlice, dst: DeviceSlice) -> Result<()> {
        check("cast", arguments![src.dtype => in src[dst.elems]; dst.dtype => out dst[src.elems]])?;
        if src.dtype == dst.dtype {
            // SAFETY: inside a task; `check` saw that sizes agree and that the two do not overlap.
            return self.enqueue(stream, "cast", move || unsafe {
                std::ptr::copy_nonoverlapping(src.addr as *const u8, dst.addr as *mut u8, dst.bytes());
            });
        }
        if src.dtype != Dtype::Float32 && dst.dtype != Dtype::Float32 {
            return Err(Error::Unsupported(format!("a cast from {} to {}", src.dtype, dst.dtype)));
        }
        let isa = self.compute.isa();
        by_float!(src.dtype, S => by_float!(dst.dtype, D => match stream {
            Stream::Compute => self.launch("cast", move |cx, memory| {
                pointwise::cast::<S, D>(cx, memory.read(src), memory.write(dst));
            }),
            // The compute threads belong to the compute stream: a copy stream converts by itself.
            // SAFETY: inside a task; `check` saw that the two do not overlap.
            _ => self.enqueue(stream, "cast", move || unsafe { pointwise::cast_elems::<S, D>(isa, view(src), view_mut(dst)) }),
        }))
    }

    fn grad_norm_partials(&mut self, grads: DeviceSlice, partials: DeviceSlice, nonfinite: DeviceSlice) -> Result<()> {
        check(
            "grad_norm_partials",
            arguments![
                grads.dtype => in grads[grads.elems];
                Dtype::Float32 => out partials[grads.elems.div_ceil(BLOCK)];
                Dtype::Int32 => out nonfinite[1]
            ],
        )?;
        by_float!(grads.dtype, T => self.launch("grad_norm_partials", move |cx, memory| {
            let (partials, nonfinite) = (memory.write(partials), memory.write(nonfinite));
            optimizer::grad_norm_partials::<T>(cx, memory.read(grads), partials, &mut nonfinite[0]);
        }))
    }

    fn adam_step(&mut self, args: AdamArgs) -> Result<()> {
        let AdamArgs { params, m, v, grads, out, consts, scale } = args;
        let n = params.elems;
        check(
            "adam_step",
            arguments![
                Dtype::Float32 => out params[n], out m[n], out v[n];
                grads.dtype => in grads[n];
                out.dtype => out out[n]
            ],
        )?;
        by_float!(grads.dtype, G => by_float!(out.dtype, O => self.launch("adam_step", move |cx, memory| {
            let state = AdamState { params: memory.write(params), m: memory.write(m), v: memory.write(v) };
            let step = AdamStep { consts, scale };
            optimizer::adam_step::<G, O>(cx, step, state, memory.read(grads), memory.write(out));
        })))
    }

    fn poke(&mut self, x: DeviceSlice, index: usize, value: f32) -> Result<()> {
        if index >= x.elems {
            return Err(Error::resource("launch poke", format!("element {index} of {}", x.elems)));
        }
        by_float!(x.dtype, T => self.launch("poke", move |_, memory| memory.write::<T>(x)[index] = <T as Element>::from_f32(value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::cpu::Schedule;
    use crate::device::{Device, MatmulLayout};
    use std::sync::Arc;

    /// A device, and what its memory holds once all streams are done.
    struct Harness(CpuDevice);

    impl Harness {
        fn new() -> Self {
            Self::with_schedule(Schedule::Threads)
        }

        fn with_schedule(schedule: Schedule) -> Self {
            Self(CpuDevice::new(2, schedule, Arc::default(), 0).unwrap())
        }

        fn with<T: bytemuck::Pod>(&mut self, dtype: Dtype, values: &[T]) -> DeviceSlice {
            let slice = self.0.alloc("test", values.len(), dtype).unwrap();
            // SAFETY: no task knows this memory yet.
            unsafe { view_mut::<T>(slice) }.copy_from_slice(values);
            slice
        }

        fn floats(&mut self, values: &[f32]) -> DeviceSlice {
            self.with(Dtype::Float32, values)
        }

        fn read<T: bytemuck::Pod>(&mut self, slice: DeviceSlice) -> Vec<T> {
            for stream in Stream::ALL {
                let event = self.0.event().unwrap();
                self.0.record(event, stream).unwrap();
                self.0.synchronize(event).unwrap();
            }
            // SAFETY: every task has run.
            unsafe { view::<T>(slice) }.to_vec()
        }
    }

    fn message(result: Result<()>) -> String {
        result.unwrap_err().to_string()
    }

    #[test]
    fn arguments_that_do_not_fit_are_errors_that_name_them() {
        let mut harness = Harness::new();
        let x = harness.floats(&[1.0; 6]);
        let out = harness.floats(&[0.0; 6]);
        let tokens = harness.with(Dtype::Int32, &[0i32; 6]);
        let small = out.slice(0, 5);
        assert_eq!(message(harness.0.gelu(x, small)), "launch gelu: x holds 6 float32, not 5 float32");
        assert_eq!(message(harness.0.swiglu(x, tokens, 3)), "launch swiglu: gate_up holds 6 float32, not 12 int32");
        assert_eq!(message(harness.0.cross_entropy_loss(x, x.slice(2, 1), 1.0, false)), "launch cross_entropy_loss: loss overlaps stats");
        assert_eq!(message(harness.0.poke(tokens, 0, 1.0)), "unsupported: arithmetic on int32");
        assert_eq!(message(harness.0.poke(x, 6, 1.0)), "launch poke: element 6 of 6");
        let shape = AttentionShape { batch: 1, seq_length: 1, heads: 3, kv_heads: 2, head_dim: 1, scale: 1.0, window: None };
        assert!(message(harness.0.attention(x, None, out, small, shape)).ends_with("makes no sense"));
        let shape = AttentionShape { kv_heads: 1, ..shape };
        let (qkv, table) = (x.slice(0, 5), out.slice(0, 2));
        assert_eq!(message(harness.0.rope(qkv, tokens.slice(0, 1), table, 2, false, shape)), "launch rope: cannot rotate 2 of 1 channels");
        assert_eq!(harness.read::<f32>(out), [0.0; 6]);
    }

    #[test]
    fn products_add_to_their_base_wherever_it_lies() {
        let mut harness = Harness::new();
        let shape = MatmulShape { layout: MatmulLayout::Nt, m: 2, n: 1, k: 1 };
        let (a, b, bias) = (harness.floats(&[1.0, 2.0]), harness.floats(&[3.0]), harness.floats(&[0.5]));
        let (base, c) = (harness.floats(&[10.0, 20.0]), harness.floats(&[9.0; 2]));
        harness.0.matmul(shape, a, b, Some(bias), Some(base), c).unwrap();
        assert_eq!((harness.read::<f32>(c), harness.read::<f32>(base)), (vec![13.5, 26.5], vec![10.0, 20.0]));
        harness.0.matmul(shape, a, b, None, Some(c), c).unwrap();
        assert_eq!(harness.read::<f32>(c), [16.5, 32.5]);
        harness.0.matmul(shape, a, b, None, None, c).unwrap();
        assert_eq!(harness.read::<f32>(c), [3.0, 6.0]);
        let (row, both) = (MatmulShape { m: 1, ..shape }, harness.floats(&[0.0; 3]));
        let overlapping = harness.0.matmul(shape, a, b, None, Some(both.slice(0, 2)), both.slice(1, 2));
        assert_eq!(message(overlapping), "launch matmul: c overlaps base");
        let short = harness.0.matmul(row, a.slice(0, 1), b, None, Some(base), c.slice(0, 1));
        assert_eq!(message(short), "launch matmul: base holds 2 float32, not 1 float32");
    }

    #[test]
    fn gelu_backward_works_in_place_and_apart() {
        let mut harness = Harness::new();
        let (x, dout, apart) = (harness.floats(&[0.5, -1.0]), harness.floats(&[1.0, 2.0]), harness.floats(&[9.0; 2]));
        harness.0.gelu_backward(dout, x, apart).unwrap();
        harness.0.gelu_backward(dout, x, dout).unwrap();
        let (apart, in_place) = (harness.read::<f32>(apart), harness.read::<f32>(dout));
        assert!(apart == in_place && apart != [1.0, 2.0]);
    }

    #[test]
    fn casts_run_on_every_stream() {
        let mut harness = Harness::new();
        let values: Vec<f32> = (0..20_000).map(|i| i as f32 * 0.37).collect();
        let src = harness.floats(&values);
        for stream in Stream::ALL {
            let narrow = harness.0.alloc("narrow", values.len(), Dtype::Bfloat16).unwrap();
            let back = harness.0.alloc("back", values.len(), Dtype::Float32).unwrap();
            harness.0.cast(stream, src, narrow).unwrap();
            harness.0.cast(stream, narrow, back).unwrap();
            let want: Vec<bf16> = values.iter().map(|&x| Element::from_f32(x)).collect();
            assert_eq!(harness.read::<bf16>(narrow), want);
            assert_eq!(harness.read::<f32>(back), want.iter().map(|&x| Element::to_f32(x)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn tasks_of_one_stream_run_in_order() {
        run_in_order(Harness::new());
        (0..8).for_each(|seed| run_in_order(Harness::with_schedule(Schedule::Adversary { seed })));
    }

    fn run_in_order(mut harness: Harness) {
        let (x, loss) = (harness.floats(&[5.0; 4]), harness.floats(&[1.0]));
        let tokens = harness.with(Dtype::Int32, &[1i32, 0]);
        let table = harness.with(Dtype::Bfloat16, &[1.0f32, 2.0, 3.0, 4.0].map(<bf16 as Element>::from_f32));
        let rows = harness.0.alloc("rows", 4, Dtype::Bfloat16).unwrap();
        harness.0.embed(tokens, tokens, table, None, rows, 2).unwrap();
        harness.0.cast(Stream::Compute, rows, x).unwrap();
        harness.0.poke(x, 3, 7.0).unwrap();
        let product = harness.floats(&[0.0; 4]);
        let shape = MatmulShape { layout: MatmulLayout::Nt, m: 2, n: 2, k: 2 };
        harness.0.matmul(shape, x, x, None, None, product).unwrap();
        harness.0.zero(x).unwrap();
        harness.0.zero(tokens).unwrap();
        assert_eq!(harness.read::<f32>(product), [25.0, 31.0, 31.0, 50.0]);
        assert_eq!((harness.read::<f32>(x), harness.read::<i32>(tokens)), (vec![0.0; 4], vec![0, 0]));
        let stats = harness.floats(&[2.0, 1.0, -1.0]);
        harness.0.cross_entropy_loss(stats, loss, 2.0, true).unwrap();
        assert_eq!(harness.read::<f32>(loss), [7.0]);
    }

    #[test]
    fn norm_and_step_of_a_resident_bucket() {
        let mut harness = Harness::new();
        let n = BLOCK + 10;
        let grads = harness.floats(&vec![2.0; n]);
        let (partials, nonfinite) = (harness.floats(&[9.0; 2]), harness.with(Dtype::Int32, &[0i32]));
        harness.0.grad_norm_partials(grads, partials, nonfinite).unwrap();
        assert_eq!((harness.read::<f32>(partials), harness.read::<i32>(nonfinite)), (vec![4.0 * BLOCK as f32, 40.0], vec![0]));
        let [params, m, v] = [1.0, 0.0, 0.0].map(|x| harness.floats(&vec![x; n]));
        let out = harness.0.alloc("out", n, Dtype::Float16).unwrap();
        let consts = crate::optim::adam::AdamConsts::new(
            &crate::optim::adam::AdamHyper { lr: 0.25, beta1: 0.5, beta2: 0.5, eps: 0.0, weight_decay: 0.0 },
            1,
            true,
        );
        harness.0.adam_step(AdamArgs { params, m, v, grads, out, consts, scale: 0.5 }).unwrap();
        // The first step of Adam moves by the learning rate.
        assert_eq!(harness.read::<f16>(out), vec![f16::from_f32(0.75); n]);
        assert_eq!((harness.read::<f32>(params)[n - 1], harness.read::<f32>(m)[0], harness.read::<f32>(v)[0]), (0.75, 0.5, 0.5));
    }
}
