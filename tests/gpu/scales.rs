//! Kernels that compute the scale of their output: it must equal that of a separate pass, without other changes.

use super::fp8::{FORMATS, needs_fp8};
use super::harness::{Bench, Case, Slices, Want};
use super::kernels::Suite;
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use superoffload::internals::device::{
    AbsMaxScale, DeviceSlice, Geglu, GegluBackward, Gelu, GeluBackward, Kernel, Kernels, Launch, LayerNorm, LayerNormBackward, RmsNorm,
    RmsNormBackward, ScaleAdd, ScaleCell, Swiglu, SwigluBackward, WithScale, Zero,
};
use superoffload::internals::dtype::Dtype;

const BF16: Dtype = Dtype::Bfloat16;
const FP32: Dtype = Dtype::Float32;
/// Rows and columns: one element, less than a block, odd tails, whole vectors, and rows that exceed registers in the forward or backward
/// pass.
const MATRICES: [(usize, usize); 8] = [(1, 1), (3, 7), (65, 33), (129, 64), (67, 768), (5, 2560), (3, 9728), (2, 33_000)];
const FULL: (usize, usize) = (512, 4096);
/// Larger than any scale of a test without infinities.
const HIGH: f32 = 1e36;

/// Kinds of inputs.
#[derive(Clone, Copy)]
enum Values {
    Ordinary,
    Zeros,
    /// Ordinary values, with one larger value or NaN at this index.
    Odd(f32, fn(usize) -> usize),
    Wild,
}

const VALUES: [Values; 7] = [
    Values::Ordinary,
    Values::Zeros,
    Values::Odd(-3e4, |_| 0),
    Values::Odd(3e4, |elems| elems - 1),
    Values::Odd(f32::NEG_INFINITY, |elems| elems / 2),
    Values::Odd(f32::NAN, |elems| elems - 1),
    Values::Wild,
];

impl Values {
    fn draw(self, random: &mut Random, elems: usize) -> Vec<f32> {
        let mut x = match self {
            Self::Zeros => vec![0.0; elems],
            Self::Wild => random.wild(BF16, elems),
            Self::Ordinary | Self::Odd(..) => random.uniform(BF16, elems),
        };
        if let Self::Odd(odd, place) = self {
            x[place(elems)] = odd;
        }
        x
    }
}

/// A device that has a kernel with and without its scale.
trait Scales<K>: Launch<K> + Launch<WithScale<K>>
where
    K: Kernel,
    WithScale<K>: Kernel,
{
}

impl<K: Kernel, D: Launch<K> + Launch<WithScale<K>> + ?Sized> Scales<K> for D where WithScale<K>: Kernel {}

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    let full = suite.full(BF16);
    for size in MATRICES.into_iter().chain(full.then_some(FULL)) {
        for (kernel, check) in KERNELS {
            let name = format!("largest that {kernel} writes, {}x{}", size.0, size.1);
            suite.case(&name, |bench, random| {
                needs_fp8(bench)?;
                for (format, values) in FORMATS.into_iter().flat_map(|format| VALUES.map(|values| (format, values))) {
                    check(&mut Check { bench, random, format, values, size })?;
                }
                Ok(0.0)
            });
        }
    }
}

/// Context of a kernel's check.
struct Check<'a> {
    bench: &'a mut Bench,
    random: &'a mut Random,
    format: Dtype,
    values: Values,
    /// Rows and columns of the normalised matrix, or of a gate's output.
    size: (usize, usize),
}

type Checked = fn(&mut Check<'_>) -> Outcome;

const KERNELS: [(&str, Checked); 13] = [
    ("rms_norm", |check| check.rms(false)),
    ("rms_norm plus one", |check| check.rms(true)),
    ("rms_norm backward", |check| check.rms_backward(false)),
    ("rms_norm plus one, backward", |check| check.rms_backward(true)),
    ("layer_norm", |check| check.layer()),
    ("layer_norm backward", |check| check.layer_backward()),
    ("swiglu", |check| check.gate(|gate_up, out, cols| Swiglu { gate_up, out, cols })),
    ("swiglu backward", |check| check.gate_backward(|dout, gate_up, dgate_up, cols| SwigluBackward { dout, gate_up, dgate_up, cols })),
    ("geglu", |check| check.gate(|gate_up, out, cols| Geglu { gate_up, out, cols })),
    ("geglu backward", |check| check.gate_backward(|dout, gate_up, dgate_up, cols| GegluBackward { dout, gate_up, dgate_up, cols })),
    ("gelu", |check| check.elements(|[x, _], out| Gelu { x, out })),
    ("gelu backward", |check| check.elements(|[x, dout], dx| GeluBackward { dout, x, dx })),
    ("scale_add", |check| check.elements(|[x, base], out| ScaleAdd { x, scale: 0.3, base: Some(base), out })),
];

impl Check<'_> {
    fn draw(&mut self, elems: usize) -> Vec<f32> {
        self.values.draw(self.random, elems)
    }

    fn elems(&self) -> usize {
        self.size.0 * self.size.1
    }

    fn rms(&mut self, plus_one: bool) -> Outcome {
        let ((rows, cols), mut case) = (self.size, Case::default());
        let (x, weight) = (case.input("x", BF16, &self.draw(rows * cols)), case.input("weight", BF16, &self.random.uniform(BF16, cols)));
        let rstd = case.output("rstd", FP32, rows, Want::Any);
        let kernel = |at: &Slices, out| RmsNorm { x: at[x], weight: at[weight], plus_one, eps: 1e-5, out, rstd: at[rstd] };
        self.check(case, None, rows * cols, kernel)
    }

    fn rms_backward(&mut self, plus_one: bool) -> Outcome {
        let ((rows, cols), mut case) = (self.size, Case::default());
        let (dout, x) = (case.input("dout", BF16, &self.draw(rows * cols)), case.input("x", BF16, &self.random.uniform(BF16, rows * cols)));
        let weight = case.input("weight", BF16, &self.random.uniform(BF16, cols));
        let (rstd, dweight) = (case.input("rstd", FP32, &self.random.positive(rows)), case.output("dweight", BF16, cols, Want::Any));
        let before = self.draw(rows * cols);
        self.check(case, Some(&before), rows * cols, |at, dx| {
            let (dout, x, weight, rstd, dweight) = (at[dout], at[x], at[weight], at[rstd], at[dweight]);
            RmsNormBackward { dout, x, weight, plus_one, rstd, dx, dweight, accumulate: false }
        })
    }

    fn layer(&mut self) -> Outcome {
        let ((rows, cols), mut case) = (self.size, Case::default());
        let (x, weight) = (case.input("x", BF16, &self.draw(rows * cols)), case.input("weight", BF16, &self.random.uniform(BF16, cols)));
        let (bias, stats) = (case.input("bias", BF16, &self.draw(cols)), case.output("stats", FP32, 2 * rows, Want::Any));
        let kernel = |at: &Slices, out| LayerNorm { x: at[x], weight: at[weight], bias: at[bias], eps: 1e-5, out, stats: at[stats] };
        self.check(case, None, rows * cols, kernel)
    }

    fn layer_backward(&mut self) -> Outcome {
        let ((rows, cols), mut case) = (self.size, Case::default());
        let (dout, x) = (case.input("dout", BF16, &self.draw(rows * cols)), case.input("x", BF16, &self.random.uniform(BF16, rows * cols)));
        let weight = case.input("weight", BF16, &self.random.uniform(BF16, cols));
        let stats = case.input("stats", FP32, &self.random.positive(2 * rows));
        let [dweight, dbias] = ["dweight", "dbias"].map(|name| case.output(name, BF16, cols, Want::Any));
        let before = self.draw(rows * cols);
        self.check(case, Some(&before), rows * cols, |at, dx| {
            let (dout, x, weight, stats, dweight, dbias) = (at[dout], at[x], at[weight], at[stats], at[dweight], at[dbias]);
            LayerNormBackward { dout, x, weight, stats, dx, dweight, dbias, accumulate: false }
        })
    }

    fn gate<K: Kernel>(&mut self, kernel: impl Fn(DeviceSlice, DeviceSlice, usize) -> K) -> Outcome
    where
        WithScale<K>: Kernel,
        for<'a> dyn Kernels + 'a: Scales<K>,
    {
        let (cols, mut case) = (self.size.1, Case::default());
        let gate_up = case.input("gate_up", BF16, &self.draw(2 * self.elems()));
        self.check(case, None, self.elems(), |at, out| kernel(at[gate_up], out, cols))
    }

    fn gate_backward<K: Kernel>(&mut self, kernel: impl Fn(DeviceSlice, DeviceSlice, DeviceSlice, usize) -> K) -> Outcome
    where
        WithScale<K>: Kernel,
        for<'a> dyn Kernels + 'a: Scales<K>,
    {
        let (cols, mut case) = (self.size.1, Case::default());
        let dout = case.input("dout", BF16, &self.draw(self.elems()));
        let gate_up = case.input("gate_up", BF16, &self.random.uniform(BF16, 2 * self.elems()));
        self.check(case, None, 2 * self.elems(), |at, dgate_up| kernel(at[dout], at[gate_up], dgate_up, cols))
    }

    fn elements<K: Kernel>(&mut self, kernel: impl Fn([DeviceSlice; 2], DeviceSlice) -> K) -> Outcome
    where
        WithScale<K>: Kernel,
        for<'a> dyn Kernels + 'a: Scales<K>,
    {
        let mut case = Case::default();
        let inputs = ["x", "other"].map(|name| case.input(name, BF16, &self.draw(self.elems())));
        self.check(case, None, self.elems(), |at, out| kernel(inputs.map(|input| at[input]), out))
    }

    /// Compares the kernel alone and with a scale. Both write a matrix of `elems` elements, which contains `before` if that is read. The
    /// scale is compared with that of a separate pass, also if it starts at a higher value.
    fn check<K: Kernel>(
        &mut self,
        mut case: Case,
        before: Option<&[f32]>,
        elems: usize,
        kernel: impl Fn(&Slices, DeviceSlice) -> K,
    ) -> Outcome
    where
        WithScale<K>: Kernel,
        for<'a> dyn Kernels + 'a: Scales<K>,
    {
        case.aligned();
        let mut matrix = |name, want| match before {
            Some(before) => case.updated(name, BF16, before, want),
            None => case.output(name, BF16, elems, want),
        };
        let alone = matrix("what it writes alone", Want::Any);
        let [with_scale, again] = ["what it writes with a scale", "what it writes again"].map(|name| matrix(name, Want::As(alone)));
        let of_pass = case.output("the scale of a pass", FP32, 1, Want::Any);
        let found = case.output("the scale that it finds", FP32, 1, Want::As(of_pass));
        let is_number = matches!(self.values, Values::Ordinary | Values::Zeros);
        let high =
            case.updated("a higher scale", FP32, &[HIGH], if is_number { Want::Bits(HIGH.to_le_bytes().to_vec()) } else { Want::Any });
        let format = self.format;
        case.check(self.bench, &|dev, at| {
            let scaled = |out, scale| WithScale { kernel: kernel(at, out), cell: Some(ScaleCell { scale, format }) };
            dev.launch(kernel(at, at[alone]))?;
            dev.launch(Zero { x: at[found] })?;
            dev.launch(scaled(at[with_scale], at[found]))?;
            dev.launch(AbsMaxScale { x: at[with_scale], scale: at[of_pass], format })?;
            dev.launch(scaled(at[again], at[high]))
        })
    }
}
