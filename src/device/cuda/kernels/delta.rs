//! The gated delta rule. Heads are computed in groups whose matrices fit into the scratch memory.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::bias::fold_columns;
use crate::device::footprint::gpu::DeltaScratch;
use crate::device::{CHUNK, DeltaRule, DeltaRuleBackward, DeltaShape, DeviceSlice, Kernel, Stream};
use crate::dtype::Dtype;
use crate::error::{Error, Result};

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/delta.ptx"),
    typed: &[],
    plain: &[
        "delta_spans",
        "delta_states_64",
        "delta_states_128",
        BFLOAT_64.units,
        BFLOAT_64.prepare,
        BFLOAT_64.scan,
        BFLOAT_64.scan_backward,
        BFLOAT_64.gradients,
        BFLOAT_128.units,
        BFLOAT_128.prepare,
        BFLOAT_128.scan,
        BFLOAT_128.scan_backward,
        BFLOAT_128.gradients,
        HALF_64.units,
        HALF_64.prepare,
        HALF_64.scan,
        HALF_64.scan_backward,
        HALF_64.gradients,
        HALF_128.units,
        HALF_128.prepare,
        HALF_128.scan,
        HALF_128.scan_backward,
        HALF_128.gradients,
    ],
};

/// Kernels for one width and format.
struct DeltaKernelNames {
    units: &'static str,
    prepare: &'static str,
    states: &'static str,
    scan: &'static str,
    scan_backward: &'static str,
    gradients: &'static str,
}

macro_rules! names {
    ($width:literal, $format:literal) => {
        DeltaKernelNames {
            units: concat!("delta_units_", $width, "_", $format),
            prepare: concat!("delta_prepare_", $width, "_", $format),
            states: concat!("delta_states_", $width),
            scan: concat!("delta_scan_", $width, "_", $format),
            scan_backward: concat!("delta_scan_backward_", $width, "_", $format),
            gradients: concat!("delta_gradients_", $width, "_", $format),
        }
    };
}

const BFLOAT_64: DeltaKernelNames = names!("64", "bf16");
const BFLOAT_128: DeltaKernelNames = names!("128", "bf16");
const HALF_64: DeltaKernelNames = names!("64", "f16");
const HALF_128: DeltaKernelNames = names!("128", "f16");

impl DeltaKernelNames {
    /// # Errors
    /// `Unsupported` unless there are kernels for this shape and format.
    fn of(shape: &DeltaShape, dtype: Dtype) -> Result<&'static Self> {
        match (shape.width, dtype) {
            (64, Dtype::Bfloat16) => Ok(&BFLOAT_64),
            (128, Dtype::Bfloat16) => Ok(&BFLOAT_128),
            (64, Dtype::Float16) => Ok(&HALF_64),
            (128, Dtype::Float16) => Ok(&HALF_128),
            (width, _) => Err(Error::Unsupported(format!(
                "delta rules of heads of {width} channels in {dtype} on a GPU: its kernels take 64 or 128 channels in bfloat16 or float16"
            ))),
        }
    }
}

/// # Errors
/// `Unsupported` unless there are kernels for this shape and format.
pub(in super::super) fn check_delta(shape: &DeltaShape, dtype: Dtype) -> Result<()> {
    DeltaKernelNames::of(shape, dtype).map(|_| ())
}

/// Constants of `delta.cu`: threads of a block; columns of a state that a block scans; elements between the rows of a tile beyond its columns.
const THREADS: usize = 256;
const SCAN_COLS: usize = 64;
const PADDING: usize = 8;
/// Channels of a lane of `delta_units`.
const UNIT_LANE: usize = 4;

/// The inputs of both passes.
struct Inputs {
    qkv: DeviceSlice,
    a: DeviceSlice,
    b: DeviceSlice,
    a_log: DeviceSlice,
    dt_bias: DeviceSlice,
    documents: Option<DeviceSlice>,
}

/// A group of heads of one call.
struct Group<'a> {
    shape: DeltaShape,
    names: &'static DeltaKernelNames,
    inputs: &'a Inputs,
    memory: Memory,
    /// First key head and first value head.
    first: [usize; 2],
}

/// Arrays of the scratch memory; see [`DeltaScratch`].
#[derive(Clone, Copy)]
struct Memory {
    key_heads: usize,
    spans: DeviceSlice,
    units: DeviceSlice,
    lengths: DeviceSlice,
    gates: DeviceSlice,
    u: DeviceSlice,
    w: DeviceSlice,
    corrections: DeviceSlice,
    dcorrections: DeviceSlice,
    p: DeviceSlice,
    inverse: DeviceSlice,
    states: DeviceSlice,
    dstates: DeviceSlice,
    vectors: DeviceSlice,
    sums: DeviceSlice,
}

impl Memory {
    fn new(queue: &mut impl Queue, shape: &DeltaShape) -> Result<Self> {
        let DeltaScratch { key_heads, spans, units, lengths, gates, rows, squares, states, vectors, sums } = DeltaScratch::new(shape);
        let memory = queue.scratch(DeltaScratch::new(shape).total() / Dtype::Float32.bytes())?;
        let mut start = 0;
        let mut take = |bytes: usize| {
            start += bytes;
            memory.view(start - bytes, bytes / Dtype::Float32.bytes(), Dtype::Float32)
        };
        Ok(Self {
            key_heads,
            spans: take(spans),
            units: take(units),
            lengths: take(lengths),
            gates: take(gates),
            u: take(rows),
            w: take(rows),
            corrections: take(rows),
            dcorrections: take(rows),
            p: take(squares),
            inverse: take(squares),
            states: take(states),
            dstates: take(states),
            vectors: take(vectors),
            sums: take(sums),
        })
    }
}

/// Bytes of tiles of `rows` rows and `cols` columns in shared memory.
fn tiles(rows: usize, cols: usize) -> usize {
    rows * (cols + PADDING) * Dtype::Bfloat16.bytes()
}

impl Group<'_> {
    /// Calls `run` for every group of heads of `shape`.
    ///
    /// # Errors
    /// `Unsupported` for operands that begin within vectors of 16 bytes.
    fn each<Q: Queue>(
        queue: &mut Q,
        shape: DeltaShape,
        (names, inputs, memory): (&'static DeltaKernelNames, &Inputs, Memory),
        aligned: &[DeviceSlice],
        run: impl Fn(&mut Q, &Group<'_>) -> Result<()>,
    ) -> Result<()> {
        if let Some(x) = aligned.iter().find(|x| !x.addr().is_multiple_of(16)) {
            return Err(Error::Unsupported(format!("a delta rule on memory at {:#x}, no multiple of 16 bytes", x.addr())));
        }
        let sharing = shape.value_heads / shape.key_heads;
        for first in (0..shape.key_heads).step_by(memory.key_heads) {
            run(queue, &Group { shape, names, inputs, memory, first: [first, first * sharing] })?;
        }
        Ok(())
    }

    /// Value heads of the group.
    fn heads(&self) -> usize {
        self.memory.key_heads * self.shape.value_heads / self.shape.key_heads
    }

    fn chunks(&self) -> usize {
        self.shape.tokens().div_ceil(CHUNK)
    }

    /// Enqueues the kernel `name` on blocks of `grid`, with tiles of `shared` bytes.
    fn launch<const N: usize>(
        &self,
        queue: &mut impl Queue,
        name: &'static str,
        (grid, shared): ([usize; 3], usize),
        args: [super::super::launch::Arg; N],
    ) -> Result<()> {
        let [x, y, z] = grid;
        let blocks = LaunchConfig { grid: [size(x)?, size(y)?, size(z)?], block: [THREADS as u32, 1, 1], shared_bytes: size(shared)? };
        queue.launch(Stream::Compute, name, None, blocks, args)
    }

    /// Everything of a chunk that does not depend on the state.
    fn prepare(&self, queue: &mut impl Queue, with_inverse: bool) -> Result<()> {
        let Self { shape, names, inputs: Inputs { qkv, a, b, a_log, dt_bias, documents }, memory, first: [first_key, first] } = self;
        let (tokens, key_heads, all_key_heads, d) = (shape.tokens(), memory.key_heads, shape.key_heads, shape.width);
        let wide = |count: usize, deep| Ok(LaunchConfig { grid: [size(count)?, deep, 1], block: [THREADS as u32, 1, 1], shared_bytes: 0 });
        let args = args![*documents, memory.spans, size(tokens)?, size(shape.seq_length)?];
        queue.launch(Stream::Compute, "delta_spans", None, wide(tokens.div_ceil(THREADS), 1)?, args)?;
        let (keys, all_keys) = (size(key_heads)?, size(all_key_heads)?);
        let args = args![*qkv, memory.units, memory.lengths, size(tokens)?, keys, size(*first_key)?, all_keys, size(shape.qkv_cols())?];
        let units = (tokens * key_heads).div_ceil(THREADS * UNIT_LANE / d);
        queue.launch(Stream::Compute, names.units, None, wide(units, 2)?, args)?;
        let Memory { spans, units, gates, u, w, p, inverse, .. } = *memory;
        let inverse = with_inverse.then_some(inverse);
        let (heads, first, all) = (size(self.heads())?, size(*first)?, size(shape.value_heads)?);
        let args =
            args![*qkv, *a, *b, *a_log, *dt_bias, spans, units, gates, u, w, p, inverse, size(tokens)?, keys, heads, first, all_keys, all];
        let shared = 2 * tiles(CHUNK, d) + 2 * tiles(CHUNK, CHUNK);
        self.launch(queue, names.prepare, ([self.chunks(), self.heads(), 1], shared), args)
    }

    /// Tokens of a block of a scan, and the grid of all: one block for the documents that begin in a row, or in as many tokens as a chunk has.
    fn scans(&self) -> (usize, [usize; 3]) {
        let window = if self.inputs.documents.is_some() { CHUNK } else { self.shape.seq_length };
        (window, [self.shape.tokens().div_ceil(window), self.heads(), self.shape.width / SCAN_COLS])
    }

    fn output(&self, queue: &mut impl Queue, out: DeviceSlice) -> Result<()> {
        let (d, tokens, (window, grid)) = (self.shape.width, size(self.shape.tokens())?, self.scans());
        let Memory { key_heads, spans, units, gates, u, w, p, .. } = self.memory;
        let (first, all) = (size(self.first[1])?, size(self.shape.value_heads)?);
        let args = args![spans, units, gates, u, w, p, out, tokens, size(window)?, size(key_heads)?, size(self.heads())?, first, all];
        self.launch(queue, self.names.scan, (grid, scan_bytes(d)), args)
    }

    fn gradients(&self, queue: &mut impl Queue, kernel: &DeltaRuleBackward) -> Result<()> {
        let DeltaRuleBackward { dout, dqkv, da, db, .. } = *kernel;
        let (d, tokens, (window, grid)) = (self.shape.width, size(self.shape.tokens())?, self.scans());
        let Memory { spans, units, lengths, gates, u, w, corrections, dcorrections, p, inverse, states, dstates, vectors, sums, .. } =
            self.memory;
        let (window, keys, heads) = (size(window)?, size(self.memory.key_heads)?, size(self.heads())?);
        let (first, all_keys, all) = (size(self.first[1])?, size(self.shape.key_heads)?, size(self.shape.value_heads)?);
        let args = args![spans, units, gates, u, w, corrections, states, tokens, window, keys, heads];
        self.launch(queue, self.names.states, (grid, states_bytes(d)), args)?;
        let args = args![spans, units, gates, w, p, dout, dcorrections, dstates, tokens, window, keys, heads, first, all];
        self.launch(queue, self.names.scan_backward, (grid, scan_bytes(d)), args)?;
        let Inputs { qkv, a, a_log, dt_bias, .. } = *self.inputs;
        let args = args![
            dout,
            qkv,
            a,
            a_log,
            dt_bias,
            spans,
            units,
            lengths,
            gates,
            u,
            w,
            inverse,
            corrections,
            dcorrections,
            states,
            dstates,
            vectors,
            sums,
            dqkv,
            da,
            db,
            tokens,
            keys,
            heads,
            first,
            all_keys,
            all,
        ];
        let shared = 5 * tiles(CHUNK, d) + tiles(CHUNK, CHUNK);
        self.launch(queue, self.names.gradients, ([self.chunks(), self.memory.key_heads, 1], shared), args)
    }
}

/// Shared memory of the scan of the states, which reads no queries.
fn states_bytes(d: usize) -> usize {
    tiles(d, SCAN_COLS) + 2 * tiles(CHUNK, SCAN_COLS) + 2 * tiles(CHUNK, d)
}

/// Shared memory of the other scans.
fn scan_bytes(d: usize) -> usize {
    states_bytes(d) + tiles(CHUNK, d) + tiles(CHUNK, CHUNK)
}

impl GpuKernel for DeltaRule {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { qkv, a, b, a_log, dt_bias, documents, out, shape } = self;
        let names = DeltaKernelNames::of(&shape, self.float_format()?)?;
        let inputs = Inputs { qkv, a, b, a_log, dt_bias, documents };
        let memory = Memory::new(queue, &shape)?;
        Group::each(queue, shape, (names, &inputs, memory), &[qkv, out], |queue, group| {
            group.prepare(queue, false)?;
            group.output(queue, out)
        })
    }
}

impl GpuKernel for DeltaRuleBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { dout, qkv, a, b, a_log, dt_bias, documents, dqkv, da_log, ddt_bias, accumulate, shape, .. } = self;
        let names = DeltaKernelNames::of(&shape, self.float_format()?)?;
        let inputs = Inputs { qkv, a, b, a_log, dt_bias, documents };
        let memory = Memory::new(queue, &shape)?;
        Group::each(queue, shape, (names, &inputs, memory), &[qkv, dout, dqkv], |queue, group| {
            group.prepare(queue, true)?;
            group.gradients(queue, &self)
        })?;
        fold_columns(queue, memory.sums, shape.tokens().div_ceil(CHUNK), (da_log, Some(ddt_bias)), accumulate)
    }
}
