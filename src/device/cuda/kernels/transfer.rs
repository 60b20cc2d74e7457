//! The transfer path: casts, the gradient's norm, the optimizer of resident buckets. By hand in `ptx/{cast,grad_norm,adam,scale}.ptx`.
//!
//! Each kernel has a path for aligned vectors and one for single elements, which is for tails, and for everything when an
//! address is not aligned: see [`vectors`].

#[cfg(test)]
#[path = "transfer_tests.rs"]
mod tests;

use crate::device::arguments::{arguments, check};
use crate::device::cuda::CudaDevice;
use crate::device::cuda::launch::{Arg, LaunchConfig, Queue, args, size};
use crate::device::cuda::modules::PtxSource;
use crate::device::{AdamArgs, DeviceSlice, Stream};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::optim::norm::BLOCK;

pub(super) const SOURCES: [PtxSource; 5] = [
    PtxSource {
        file: "cast.ptx",
        ptx: include_str!("../../../../ptx/cast.ptx"),
        typed: &[],
        plain: &["cast_bf16_f32", "cast_f16_f32", "cast_f32_bf16", "cast_f32_f16"],
    },
    PtxSource { file: "copy.ptx", ptx: include_str!("../../../../ptx/copy.ptx"), typed: &[], plain: &["copy_words"] },
    PtxSource { file: "grad_norm.ptx", ptx: include_str!("../../../../ptx/grad_norm.ptx"), typed: &["grad_norm"], plain: &[] },
    PtxSource { file: "adam.ptx", ptx: include_str!("../../../../ptx/adam.ptx"), typed: &["adam_step"], plain: &[] },
    PtxSource { file: "scale.ptx", ptx: include_str!("../../../../ptx/scale.ptx"), typed: &["scale", "poke"], plain: &[] },
];

/// Threads of a block, in every kernel but `poke`.
const THREADS: usize = 256;
/// Elements that a thread of `cast`, `grad_norm` and `adam_step` reads at once.
const VECTOR: usize = 4;
/// Vectors of one thread of `cast`.
const CAST_VECTORS: usize = 4;
/// Bytes of a vector of `scale`, and vectors of one of its threads.
const SCALE_BYTES: usize = 16;
const SCALE_VECTORS: usize = 2;
/// Sums of one block of `grad_norm`: one a warp.
const NORM_WARPS: usize = THREADS / 32;

/// A kernel, its shape and its arguments: all that is decided before it is enqueued, and what the tests emulate.
struct KernelCall<const N: usize> {
    name: &'static str,
    dtype: Option<Dtype>,
    launch: LaunchConfig,
    args: [Arg; N],
}

impl<const N: usize> KernelCall<N> {
    fn enqueue(self, dev: &mut impl Queue, stream: Stream) -> Result<()> {
        dev.launch(stream, self.name, self.dtype, self.launch, self.args)
    }
}

/// See [`crate::device::Kernels::cast`]. Within one format it is a copy.
///
/// # Errors
/// `Unsupported` between the 16-bit formats and for int32; `Resource` when sizes differ or the two overlap.
pub(super) fn cast(dev: &mut impl Queue, stream: Stream, src: DeviceSlice, dst: DeviceSlice) -> Result<()> {
    check("cast", arguments![src.dtype => in src[dst.elems]; dst.dtype => out dst[src.elems]])?;
    if src.dtype == dst.dtype { dev.copy(stream, src, dst) } else { cast_call(src, dst)?.enqueue(dev, stream) }
}

/// Copies whole 32-bit words between the GPU and registered host memory, on the compute stream.
pub(in crate::device::cuda) fn copy_words(dev: &mut impl Queue, from: u64, to: u64, bytes: usize) -> Result<()> {
    let words = bytes / 4;
    let launch = LaunchConfig::new(size(words.div_ceil(THREADS))?, THREADS as u32);
    dev.launch(Stream::Compute, "copy_words", None, launch, args![from, to, words as u64])
}

fn cast_call(src: DeviceSlice, dst: DeviceSlice) -> Result<KernelCall<4>> {
    let name = match (src.dtype, dst.dtype) {
        (Dtype::Bfloat16, Dtype::Float32) => "cast_bf16_f32",
        (Dtype::Float16, Dtype::Float32) => "cast_f16_f32",
        (Dtype::Float32, Dtype::Bfloat16) => "cast_f32_bf16",
        (Dtype::Float32, Dtype::Float16) => "cast_f32_f16",
        (from, to) => return Err(Error::Unsupported(format!("a cast from {from} to {to} on the GPU"))),
    };
    let launch = grid(src.elems, THREADS * CAST_VECTORS * VECTOR)?;
    let vectors = vectors(src.elems, VECTOR, &[src, dst]);
    Ok(KernelCall { name, dtype: None, launch, args: args![src, dst, src.elems as u64, vectors] })
}

/// See [`crate::device::Kernels::grad_norm_partials`].
///
/// # Errors
/// `Resource` when formats or sizes are wrong or arguments overlap.
pub(super) fn grad_norm_partials(dev: &mut impl Queue, grads: DeviceSlice, partials: DeviceSlice, nonfinite: DeviceSlice) -> Result<()> {
    check(
        "grad_norm_partials",
        arguments![
            grads.dtype => in grads[grads.elems];
            Dtype::Float32 => out partials[grads.elems.div_ceil(BLOCK)];
            Dtype::Int32 => out nonfinite[1]
        ],
    )?;
    grad_norm_call(grads, None, partials, nonfinite)?.enqueue(dev, Stream::Compute)
}

fn grad_norm_call(
    grads: DeviceSlice,
    staging: Option<DeviceSlice>,
    partials: DeviceSlice,
    nonfinite: DeviceSlice,
) -> Result<KernelCall<6>> {
    let launch = grid(partials.elems, NORM_WARPS)?;
    let whole = vectors(grads.elems, VECTOR, &[grads, staging.unwrap_or(grads)]) / (BLOCK / VECTOR) as u64;
    let args = args![grads, staging, partials, nonfinite, grads.elems as u64, whole];
    Ok(KernelCall { name: "grad_norm", dtype: Some(grads.dtype), launch, args })
}

/// See [`crate::device::Kernels::adam_step`]. Working weights have the format of the gradients.
///
/// # Errors
/// `Resource` when formats or sizes differ or arguments overlap.
pub(super) fn adam_step(dev: &mut impl Queue, args: AdamArgs) -> Result<()> {
    let AdamArgs { params, m, v, grads, out, .. } = args;
    let n = params.elems;
    check(
        "adam_step",
        arguments![
            Dtype::Float32 => out params[n], out m[n], out v[n];
            grads.dtype => in grads[n], out out[n]
        ],
    )?;
    adam_call(args)?.enqueue(dev, Stream::Compute)
}

fn adam_call(args: AdamArgs) -> Result<KernelCall<16>> {
    let AdamArgs { params, m, v, grads, out, consts: c, scale } = args;
    let elems = params.elems;
    let vectors = vectors(elems, VECTOR, &[params, m, v, grads, out]);
    // A thread each for vectors and for the elements behind them.
    let launch = grid(elems - (VECTOR - 1) * vectors as usize, THREADS)?;
    let args = args![
        params,
        m,
        v,
        grads,
        out,
        elems as u64,
        vectors,
        c.beta1,
        c.one_minus_beta1,
        c.beta2,
        c.one_minus_beta2,
        c.decay,
        c.neg_step_size,
        c.inv_sqrt_bias2,
        c.eps,
        scale
    ];
    Ok(KernelCall { name: "adam_step", dtype: Some(grads.dtype), launch, args })
}

fn scale_call(x: DeviceSlice, factor: f32) -> Result<KernelCall<4>> {
    let vector = SCALE_BYTES / x.dtype.bytes();
    let launch = grid(x.elems, THREADS * SCALE_VECTORS * vector)?;
    let args = args![x, factor, x.elems as u64, vectors(x.elems, vector, &[x])];
    Ok(KernelCall { name: "scale", dtype: Some(x.dtype), launch, args })
}

/// See [`crate::device::Kernels::poke`].
///
/// # Errors
/// `Resource` when there is no such element; `Unsupported` for int32.
pub(super) fn poke(dev: &mut impl Queue, x: DeviceSlice, index: usize, value: f32) -> Result<()> {
    if index >= x.elems {
        return Err(Error::resource("launch poke", format!("element {index} of {}", x.elems)));
    }
    poke_call(x.slice(index, 1), value).enqueue(dev, Stream::Compute)
}

fn poke_call(x: DeviceSlice, value: f32) -> KernelCall<2> {
    KernelCall { name: "poke", dtype: Some(x.dtype), launch: LaunchConfig::new(1, 1), args: args![x, value] }
}

/// Kernels of the transfer path that a training step does not need: for studies of casts on the device.
impl CudaDevice {
    /// [`crate::device::Kernels::grad_norm_partials`] that also writes the gradients as fp32 to `staging`, in one pass: for
    /// copies that move fp32. The bits are those of a cast, except that a float16 NaN may get another payload.
    ///
    /// # Errors
    /// `Resource` when formats or sizes are wrong or arguments overlap.
    pub fn grad_pack_norm(
        &mut self,
        grads: DeviceSlice,
        staging: DeviceSlice,
        partials: DeviceSlice,
        nonfinite: DeviceSlice,
    ) -> Result<()> {
        check(
            "grad_pack_norm",
            arguments![
                grads.dtype => in grads[grads.elems];
                Dtype::Float32 => out staging[grads.elems], out partials[grads.elems.div_ceil(BLOCK)];
                Dtype::Int32 => out nonfinite[1]
            ],
        )?;
        grad_norm_call(grads, Some(staging), partials, nonfinite)?.enqueue(self, Stream::Compute)
    }

    /// `x *= factor` in place: in fp32, rounded once to the format.
    ///
    /// # Errors
    /// `Unsupported` for int32.
    pub fn scale(&mut self, x: DeviceSlice, factor: f32) -> Result<()> {
        scale_call(x, factor)?.enqueue(self, Stream::Compute)
    }
}

/// As many blocks of [`THREADS`] as `items` need when one block takes `per_block` of them.
fn grid(items: usize, per_block: usize) -> Result<LaunchConfig> {
    Ok(LaunchConfig::new(size(items.div_ceil(per_block))?, THREADS as u32))
}

/// Whole vectors of `vector` elements in `elems`, or none if one of the slices does not begin at a multiple of its vector.
fn vectors(elems: usize, vector: usize, slices: &[DeviceSlice]) -> u64 {
    let aligned = |x: &DeviceSlice| x.addr.is_multiple_of((vector * x.dtype.bytes()) as u64);
    if slices.iter().all(aligned) { (elems / vector) as u64 } else { 0 }
}
