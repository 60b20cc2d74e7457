//! Launch of a kernel on the CPU's compute threads: selects its float format and lends it its operands.

use super::CpuDevice;
use super::compute::ComputeRef;
use super::kernels::Compute;
use super::kernels::arithmetic::{CpuArithmetic, by_float};
use super::task_memory::TaskMemory;
use crate::device::kernels::launches;
use crate::device::{Checked, Kernel, Stream};
use crate::error::Result;

launches!(CpuDevice, run_arithmetic: AttentionForward, AttentionBackward, Matmul, ScaledMatmul, BatchedMatmul);

impl CpuDevice {
    /// Enqueues a kernel in its float format.
    fn run_arithmetic<K: CpuArithmetic>(&mut self, kernel: Checked<K>) -> Result<()> {
        by_float!(kernel.float_format()?, T => self.compute(kernel, |kernel, cx, memory| kernel.run::<T>(cx, memory)))
    }

    /// Enqueues a kernel on the compute stream, whose tasks may use the compute threads.
    pub(super) fn compute<K, F>(&mut self, kernel: Checked<K>, run: F) -> Result<()>
    where
        K: Kernel,
        F: FnOnce(K, &mut Compute, &TaskMemory<'_>) + Copy + Send + 'static,
    {
        assert_eq!(kernel.stream(), Stream::Compute, "the compute threads belong to the compute stream");
        let compute = ComputeRef(self.compute.compute);
        // SAFETY: this is a task of the compute stream, and it dereferences the pointer once.
        self.beside(kernel, move |kernel, memory| run(kernel, unsafe { compute.get() }, memory))
    }

    /// Enqueues a kernel on its stream; the stream's own thread runs it.
    pub(super) fn beside<K: Kernel>(
        &mut self,
        kernel: Checked<K>,
        run: impl FnOnce(K, &TaskMemory<'_>) + Copy + Send + 'static,
    ) -> Result<()> {
        let kernel = *kernel;
        self.enqueue(kernel.stream(), K::NAME, move || {
            let operands = kernel.operands();
            run(kernel, &TaskMemory::new(operands.as_ref()));
        })
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::device::cpu::StreamOrder;
    use crate::device::cpu::task_memory::{view, view_mut};
    use crate::device::*;
    use crate::dtype::{Dtype, Element};
    use crate::host::pinned::HostMemory;
    use crate::memory::MemorySpace;
    use crate::optim::norm::BLOCK;
    use half::{bf16, f16};
    use std::sync::Arc;

    /// A device whose memory can be read once all streams are done.
    pub(in crate::device::cpu) struct Harness(pub(in crate::device::cpu) CpuDevice);

    impl Harness {
        fn new() -> Self {
            Self::with_schedule(StreamOrder::Threads)
        }

        fn with_schedule(schedule: StreamOrder) -> Self {
            Self::with_threads(2, schedule)
        }

        pub(in crate::device::cpu) fn with_threads(threads: usize, schedule: StreamOrder) -> Self {
            // SAFETY: each test waits for the operations that it enqueued, and drops no memory of a pending copy.
            Self(unsafe { CpuDevice::new(threads, schedule, Arc::default(), 0) }.unwrap())
        }

        pub(in crate::device::cpu) fn with<T: bytemuck::Pod>(&mut self, dtype: Dtype, values: &[T]) -> DeviceSlice {
            let slice = self.0.alloc("test", values.len(), dtype).unwrap();
            // SAFETY: no task uses this memory yet.
            unsafe { view_mut::<T>(slice) }.copy_from_slice(values);
            slice
        }

        fn floats(&mut self, values: &[f32]) -> DeviceSlice {
            self.with(Dtype::Float32, values)
        }

        pub(in crate::device::cpu) fn read<T: bytemuck::Pod>(&mut self, slice: DeviceSlice) -> Vec<T> {
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
        assert_eq!(message(harness.0.launch(Gelu { x, out: small })), "launch gelu: x holds 6 float32, not 5 float32");
        assert_eq!(
            message(harness.0.launch(Swiglu { gate_up: x, out: tokens, cols: 3 })),
            "launch swiglu: gate_up holds 6 float32, not 12 float32"
        );
        let mixed = message(harness.0.launch(Gelu { x, out: tokens }));
        assert_eq!(mixed, "unsupported: gelu of two formats, x of float32 and out of int32");
        let targets = tokens.slice(0, 2);
        let loss = CrossEntropyLoss { targets, stats: x, loss: x.slice(2, 1), scale: 1.0, accumulate: false };
        assert_eq!(message(harness.0.launch(loss)), "launch cross_entropy_loss: loss overlaps stats");
        assert_eq!(message(harness.0.launch(Poke { x: tokens, index: 0, value: 1.0 })), "unsupported: arithmetic on int32");
        assert_eq!(message(harness.0.launch(Poke { x, index: 6, value: 1.0 })), "launch poke: element 6 of 6");
        let shape = AttentionShape { batch: 1, seq_length: 1, heads: 3, kv_heads: 2, head_dim: 1, scale: 1.0, window: None, softcap: None };
        assert!(
            message(harness.0.launch(AttentionForward { qkv: x, documents: None, out, lse: small, shape })).ends_with("makes no sense")
        );
        let shape = AttentionShape { kv_heads: 1, ..shape };
        let (qkv, table) = (x.slice(0, 5), out.slice(0, 2));
        let rope = Rope { qkv, positions: tokens.slice(0, 1), table, rotary_dim: 2, interleaved: false, inverse: false, shape };
        assert_eq!(message(harness.0.launch(rope)), "launch rope: cannot rotate 2 of 1 channels");
        assert_eq!(harness.read::<f32>(out), [0.0; 6]);
    }

    #[test]
    fn products_in_fp8_use_shapes_of_every_device() {
        let mut harness = Harness::new();
        let [a, b] = [(); 2].map(|()| harness.0.alloc("factor", 32 * 16, Dtype::Float8E4m3).unwrap());
        let (c, scales) = (harness.with(Dtype::Bfloat16, &[bf16::ONE; 16 * 16 + 1]), harness.floats(&[1.0; 8]));
        let whole = ScaledMatmul {
            a: a.slice(0, 16 * 32),
            a_scale: scales.slice(0, 1),
            b,
            b_scale: scales.slice(4, 1),
            bias: None,
            base: None,
            c: c.slice(0, 16 * 16),
            m: 16,
            n: 16,
            k: 32,
        };
        harness.0.launch(whole).unwrap();
        assert_eq!(harness.read::<bf16>(whole.c), [bf16::ZERO; 16 * 16]);
        let mut refused = |kernel: ScaledMatmul| message(harness.0.launch(kernel));
        let neighbours = refused(ScaledMatmul { b_scale: scales.slice(1, 1), ..whole });
        assert_eq!(neighbours, "launch scaled_matmul: b_scale begins at no multiple of 16 bytes");
        assert!(refused(ScaledMatmul { c: c.slice(1, 16 * 16), ..whole }).contains("c begins at no multiple of 16 bytes"));
        assert!(refused(ScaledMatmul { m: 8, ..whole }).contains("a dimension of 8 is no multiple of 16"));
        assert!(refused(ScaledMatmul { a: c.slice(0, 16 * 16), ..whole }).contains("a is bfloat16, no format of 8 bits"));
        assert!(refused(ScaledMatmul { b: b.view(0, 16 * 32, Dtype::Float8E5m2), ..whole }).contains("b holds 512 float8e5m2"));
        assert!(refused(ScaledMatmul { base: Some(scales.view(0, 8, Dtype::Float32)), ..whole }).contains("base holds 8 float32"));
    }

    #[test]
    fn memory_of_another_device_is_refused_by_kernels_and_copies() {
        let (mut harness, mut host) = (Harness::new(), HostMemory::default());
        let (foreign, own) = (Harness::new().floats(&[1.0; 6]), harness.floats(&[2.0; 6]));
        let pinned = host.alloc("test", 24).unwrap();
        let calls = [
            harness.0.launch(Gelu { x: foreign, out: own }),
            harness.0.launch(Zero { x: foreign }),
            harness.0.copy_d2h(Stream::D2h, foreign, pinned),
            harness.0.copy_h2d(Stream::H2d, pinned, foreign),
            harness.0.prefetch(Stream::H2d, foreign, MemorySpace::Device),
        ];
        for call in calls {
            assert!(message(call).contains("are not this device's"));
        }
        assert_eq!(harness.read::<f32>(own), [2.0; 6]);
    }

    #[test]
    fn operands_are_lent_as_the_kernel_declares_them() {
        let mut harness = Harness::new();
        let (x, out) = (harness.floats(&[1.0; 4]), harness.floats(&[0.0; 4]));
        let kernel = Gelu { x, out };
        let refused = |lend: fn(&TaskMemory<'_>, Gelu)| {
            let operands = kernel.operands();
            let memory = TaskMemory::new(operands.as_ref());
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| lend(&memory, kernel))).is_err()
        };
        assert!(!refused(|memory, gelu| _ = (memory.read::<f32>(gelu.x), memory.read::<f32>(gelu.x), memory.write::<f32>(gelu.out))));
        assert!(refused(|memory, gelu| _ = (memory.write::<f32>(gelu.out), memory.write::<f32>(gelu.out))));
        assert!(refused(|memory, gelu| _ = memory.write::<f32>(gelu.x)));
        assert!(refused(|memory, gelu| _ = memory.read::<f32>(gelu.out)));
        assert!(refused(|memory, gelu| _ = memory.read::<f32>(gelu.x.slice(0, 2))));
        assert!(refused(|memory, gelu| _ = memory.read::<u16>(gelu.x)));
    }

    #[test]
    fn products_add_to_their_base_wherever_it_lies() {
        let mut harness = Harness::new();
        let shape = MatmulShape { layout: MatmulLayout::Nt, m: 2, n: 1, k: 1 };
        let (a, b, bias) = (harness.floats(&[1.0, 2.0]), harness.floats(&[3.0]), harness.floats(&[0.5]));
        let (base, c) = (harness.floats(&[10.0, 20.0]), harness.floats(&[9.0; 2]));
        harness.0.launch(Matmul { shape, a, a_pitch: None, b, bias: Some(bias), base: Some(base), c }).unwrap();
        assert_eq!((harness.read::<f32>(c), harness.read::<f32>(base)), (vec![13.5, 26.5], vec![10.0, 20.0]));
        harness.0.launch(Matmul::plain(shape, [a, b, c]).onto_itself(true)).unwrap();
        assert_eq!(harness.read::<f32>(c), [16.5, 32.5]);
        harness.0.launch(Matmul::plain(shape, [a, b, c])).unwrap();
        assert_eq!(harness.read::<f32>(c), [3.0, 6.0]);
        let (row, both) = (MatmulShape { m: 1, ..shape }, harness.floats(&[0.0; 3]));
        let plain = Matmul::plain(shape, [a, b, c]);
        let overlapping = harness.0.launch(Matmul { base: Some(both.slice(0, 2)), c: both.slice(1, 2), ..plain });
        assert_eq!(message(overlapping), "launch matmul: c overlaps base");
        let short = harness.0.launch(Matmul { shape: row, a: a.slice(0, 1), base: Some(base), c: c.slice(0, 1), ..plain });
        assert_eq!(message(short), "launch matmul: base holds 2 float32, not 1 float32");
    }

    /// A product of bfloat16 that fills the fp32 rows of logits, and the products of gradients in the first halves of these rows.
    #[test]
    fn products_write_fp32_and_read_rows_with_a_pitch() {
        let mut harness = Harness::new();
        let numbers = |values: &[f32]| values.iter().map(|&x| <bf16 as Element>::from_f32(x)).collect::<Vec<_>>();
        let (hidden, weight) = (numbers(&[1.0, 2.0, 3.0, 5.0]), numbers(&[256.0, 1.0, 1.0, -2.0, 0.5, 4.0]));
        let [hidden, weight] = [&hidden, &weight].map(|values| harness.with(Dtype::Bfloat16, values));
        let logits = harness.floats(&[0.0; 6]);
        let shape = MatmulShape { layout: MatmulLayout::Nt, m: 2, n: 3, k: 2 };
        harness.0.launch(Matmul::plain(shape, [hidden, weight, logits])).unwrap();
        // 773 and 258 are no numbers of bfloat16.
        assert_eq!(harness.read::<f32>(logits), [258.0, -3.0, 8.5, 773.0, -7.0, 21.5]);
        harness.0.launch(Matmul::plain(shape, [hidden, weight, logits]).onto_itself(true)).unwrap();
        assert_eq!(harness.read::<f32>(logits), [516.0, -6.0, 17.0, 1546.0, -14.0, 43.0]);
        let slopes = harness.with(Dtype::Bfloat16, &numbers(&[1.0, 2.0, -1.0, 99.0, 99.0, 99.0, 3.0, 0.5, 2.0, 99.0, 99.0, 99.0]));
        let out = harness.0.alloc("out", 6, Dtype::Bfloat16).unwrap();
        let to_hidden = MatmulShape { layout: MatmulLayout::Nn, m: 2, n: 2, k: 3 };
        let product = Matmul::plain(to_hidden, [slopes, weight, out.slice(0, 4)]).with_pitch(6);
        harness.0.launch(product).unwrap();
        assert_eq!(harness.read::<bf16>(out.slice(0, 4)), numbers(&[257.5, -7.0, 769.5, 10.0]));
        assert_eq!(product.bytes(), 2.0 * (6 + 6 + 4) as f64, "elements between rows are not read");
        let to_weight = MatmulShape { layout: MatmulLayout::Tn, m: 3, n: 2, k: 2 };
        harness.0.launch(Matmul::plain(to_weight, [slopes, hidden, out]).with_pitch(6)).unwrap();
        assert_eq!(harness.read::<bf16>(out), numbers(&[10.0, 17.0, 3.5, 6.5, 5.0, 8.0]));
        let mut refused = |kernel: Matmul| message(harness.0.launch(kernel));
        assert_eq!(
            refused(Matmul::plain(to_hidden, [slopes, weight, out]).with_pitch(2)),
            "launch matmul: rows of 3 elements of a that begin 2 apart"
        );
        assert_eq!(refused(product.with_pitch(5)), "launch matmul: a holds 12 bfloat16, not 10 bfloat16");
        let with_bias = Matmul { bias: Some(weight.slice(0, 3)), ..Matmul::plain(shape, [hidden, weight, logits]) };
        assert_eq!(refused(with_bias), "unsupported: matmul of two formats, a of bfloat16 and c of float32");
        let narrow = Matmul { base: Some(out), ..Matmul::plain(shape, [hidden, weight, logits]) };
        assert_eq!(refused(narrow), "unsupported: matmul of two formats, base of bfloat16 and c of float32");
    }

    #[test]
    fn gradients_are_in_the_format_of_the_logits_or_in_16_bits() {
        let mut harness = Harness::new();
        let (logits, narrow) = (harness.floats(&[0.5, 1.5, -1.0, 2.0, 0.0, 1.0]), harness.0.alloc("narrow", 6, Dtype::Bfloat16).unwrap());
        let (targets, stats) = (harness.with(Dtype::Int32, &[1i32, -1]), harness.floats(&[1.5, 1.5, 1.5, 0.0, 1.0, 0.0]));
        let (vocab_start, cols, softcap, gradients) = (0, 3, None, Dtype::Float16);
        let grad = CrossEntropyGrad { logits, gradients, targets, stats, vocab_start, cols, softcap, scale: 1.0 };
        assert_eq!(grad.bytes(), (6 * 4 + 6 * 2) as f64);
        harness.0.launch(grad).unwrap();
        let rows = harness.read::<f16>(logits.view(0, 12, Dtype::Float16));
        assert!(rows[0] > f16::ZERO && rows[1] < f16::ZERO && rows[6..9] == [f16::ZERO; 3], "{rows:?}");
        let teacher = harness.with(Dtype::Int32, &[3i32, 0, 1, 0]);
        let entries = harness.floats(&[0.25, 0.75, 7.0, 7.0]);
        let in_place =
            TeacherGrad { logits: logits.view(0, 12, Dtype::Float16), pitch: 6, targets, teacher, entries, top_k: 1, vocab_start, cols };
        harness.0.launch(in_place).unwrap();
        let with_teacher = harness.read::<f16>(logits.view(0, 12, Dtype::Float16));
        assert_eq!(with_teacher[1..3], [0.75, 0.25].map(f16::from_f32), "columns of the target and of the teacher");
        assert_eq!((with_teacher[0], &with_teacher[6..9]), (rows[0], &rows[6..9]));
        let mut refused = |kernel: CrossEntropyGrad| message(harness.0.launch(kernel));
        let wide = refused(CrossEntropyGrad { logits: narrow, gradients: Dtype::Float32, ..grad });
        assert_eq!(wide, "launch cross_entropy_grad: logits of bfloat16 with gradients of float32");
        assert!(refused(CrossEntropyGrad { gradients: Dtype::Int32, ..grad }).ends_with("logits of float32 with gradients of int32"));
        let short = message(harness.0.launch(TeacherGrad { pitch: 2, ..in_place }));
        assert_eq!(short, "launch teacher_grad: rows of 3 columns that begin 2 elements apart");
    }

    #[test]
    fn gelu_backward_works_in_place_and_apart() {
        let mut harness = Harness::new();
        let (x, dout, apart) = (harness.floats(&[0.5, -1.0]), harness.floats(&[1.0, 2.0]), harness.floats(&[9.0; 2]));
        harness.0.launch(GeluBackward { dout, x, dx: apart }).unwrap();
        harness.0.launch(GeluBackward { dout, x, dx: dout }).unwrap();
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
            harness.0.launch(Cast { stream, src, dst: narrow }).unwrap();
            harness.0.launch(Cast { stream, src: narrow, dst: back }).unwrap();
            let want: Vec<bf16> = values.iter().map(|&x| Element::from_f32(x)).collect();
            assert_eq!(harness.read::<bf16>(narrow), want);
            assert_eq!(harness.read::<f32>(back), want.iter().map(|&x| Element::to_f32(x)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn tasks_of_one_stream_run_in_order() {
        run_in_order(Harness::new());
        (0..8).for_each(|seed| run_in_order(Harness::with_schedule(StreamOrder::Adversary { seed })));
    }

    fn run_in_order(mut harness: Harness) {
        let (x, loss) = (harness.floats(&[5.0; 4]), harness.floats(&[1.0]));
        let tokens = harness.with(Dtype::Int32, &[1i32, 0]);
        let table = harness.with(Dtype::Bfloat16, &[1.0f32, 2.0, 3.0, 4.0].map(<bf16 as Element>::from_f32));
        let rows = harness.0.alloc("rows", 4, Dtype::Bfloat16).unwrap();
        harness.0.launch(Embed { tokens, positions: tokens, wte: table, wpe: None, out: rows, channels: 2 }).unwrap();
        harness.0.launch(Cast { stream: Stream::Compute, src: rows, dst: x }).unwrap();
        harness.0.launch(Poke { x, index: 3, value: 7.0 }).unwrap();
        let product = harness.floats(&[0.0; 4]);
        let shape = MatmulShape { layout: MatmulLayout::Nt, m: 2, n: 2, k: 2 };
        harness.0.launch(Matmul::plain(shape, [x, x, product])).unwrap();
        harness.0.launch(Zero { x }).unwrap();
        harness.0.launch(Zero { x: tokens }).unwrap();
        assert_eq!(harness.read::<f32>(product), [25.0, 31.0, 31.0, 50.0]);
        assert_eq!((harness.read::<f32>(x), harness.read::<i32>(tokens)), (vec![0.0; 4], vec![0, 0]));
        let stats = harness.floats(&[2.0, 1.0, -1.0]);
        harness.0.launch(CrossEntropyLoss { targets: tokens.slice(0, 1), stats, loss, scale: 2.0, accumulate: true }).unwrap();
        assert_eq!(harness.read::<f32>(loss), [7.0]);
    }

    #[test]
    fn sums_take_the_place_of_a_part_or_of_the_sum_before_on_any_stream() {
        let (mut harness, n) = (Harness::new(), 5000);
        for stream in Stream::ALL {
            let (a, b, sums) = (harness.floats(&vec![1.0; n]), harness.floats(&vec![2.0; n]), harness.floats(&vec![4.0; n]));
            harness.0.launch(SumSlices::new(stream, &[a, b], Some(sums), sums)).unwrap();
            harness.0.launch(SumSlices::new(stream, &[b], Some(sums), b)).unwrap();
            harness.0.launch(SumSlices::new(stream, &[a, b], None, a)).unwrap();
            let have = (harness.read::<f32>(sums), harness.read::<f32>(b), harness.read::<f32>(a));
            assert_eq!(have, (vec![7.0; n], vec![9.0; n], vec![10.0; n]));
        }
        let (a, narrow) = (harness.floats(&[1.0; 4]), harness.0.alloc("narrow", 4, Dtype::Bfloat16).unwrap());
        let part = harness.with(Dtype::Bfloat16, &[<bf16 as Element>::from_f32(1.5); 4]);
        harness.0.launch(SumSlices::new(Stream::Compute, &[part], Some(a), narrow)).unwrap();
        assert_eq!(harness.read::<bf16>(narrow), [<bf16 as Element>::from_f32(2.5); 4]);
        let refused = [
            (SumSlices::new(Stream::Compute, &[], None, a), "parts are of one format, float32, and their sum of that or float32"),
            (SumSlices::new(Stream::Compute, &[a, part], None, a), "parts are of one format"),
            (SumSlices::new(Stream::Compute, &[a], None, narrow), "parts are of one format, float32"),
            (SumSlices::new(Stream::Compute, &[a], None, a.slice(0, 3)), "part holds 4 float32, not 3 float32"),
            (SumSlices::new(Stream::Compute, &[a.slice(1, 3)], None, a.slice(0, 3)), "out overlaps part"),
        ];
        refused.into_iter().for_each(|(sum, words)| {
            let message = message(harness.0.launch(sum));
            assert!(message.starts_with("launch sum_slices: ") && message.contains(words), "{message}");
        });
    }

    #[test]
    fn norm_and_step_of_a_resident_bucket() {
        let mut harness = Harness::new();
        let n = BLOCK + 10;
        let grads = harness.floats(&vec![2.0; n]);
        let (partials, nonfinite) = (harness.floats(&[9.0; 2]), harness.with(Dtype::Int32, &[0i32]));
        harness.0.launch(GradNormPartials { stream: Stream::Compute, grads, partials, nonfinite }).unwrap();
        assert_eq!((harness.read::<f32>(partials), harness.read::<i32>(nonfinite)), (vec![4.0 * BLOCK as f32, 40.0], vec![0]));
        let [params, m, v] = [1.0, 0.0, 0.0].map(|x| harness.floats(&vec![x; n]));
        let out = harness.0.alloc("out", n, Dtype::Float16).unwrap();
        let consts = crate::optim::adam::AdamConsts::new(
            &crate::optim::adam::AdamHyper { lr: 0.25, beta1: 0.5, beta2: 0.5, eps: 0.0, weight_decay: 0.0 },
            1,
            true,
        );
        harness.0.launch(Adam { first: 0, params, m, v, grads, out, consts, scale: 0.5 }).unwrap();
        // The first step of Adam changes a parameter by the learning rate.
        assert_eq!(harness.read::<f16>(out), vec![f16::from_f32(0.75); n]);
        assert_eq!((harness.read::<f32>(params)[n - 1], harness.read::<f32>(m)[0], harness.read::<f32>(v)[0]), (0.75, 0.5, 0.5));
    }
}
