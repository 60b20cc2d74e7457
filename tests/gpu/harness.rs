//! A device with memory that is laid out anew for every case, and cases: buffers, a call, and expected results.
//!
//! All memory around the buffers and all outputs hold bytes of 0xff before a call, which is NaN in every float format. So reads outside a
//! buffer affect the result, and writes outside are visible in the guards.

use super::bounds::Near;
use super::formats::{decode, encode, same};
use super::report::{Missed, Outcome};
use std::borrow::Cow;
use std::ops::{Index, Range};
use superoffload::internals::device::{AttentionShape, DeviceSlice, EventId, Kernels, Stream};
use superoffload::internals::dtype::Dtype;
use superoffload::internals::host::{HostMemory, PinnedSlice};
use superoffload::{Error, Result};

const POISON: u8 = 0xff;
/// Bytes between buffers, and the alignment of buffers.
const GUARD: usize = 256;

/// A buffer of a case.
#[derive(Clone, Copy)]
pub struct Handle(usize);

struct Buffer {
    name: &'static str,
    dtype: Dtype,
    before: Vec<u8>,
    want: Option<Want>,
}

/// The expected content of a buffer that a call writes.
pub enum Want {
    /// The reference's bits.
    Same,
    /// Numbers near these values.
    Near(Vec<Near>),
    /// These bits.
    Bits(Vec<u8>),
    /// The bits of another buffer after the same call.
    As(Handle),
    /// The bits of these elements of another buffer after the same call.
    Part(Handle, Vec<Range<usize>>),
    /// Any content.
    Any,
}

/// The buffers of a case on a device.
pub struct Slices(Vec<DeviceSlice>);

impl Index<Handle> for Slices {
    type Output = DeviceSlice;
    fn index(&self, handle: Handle) -> &DeviceSlice {
        &self.0[handle.0]
    }
}

/// A device, and the memory of one case on both sides.
pub struct Harness {
    // Dropped before the host memory that its copies use.
    pub dev: Box<dyn Kernels>,
    pub device: DeviceSlice,
    pub host: PinnedSlice,
    done: EventId,
    pub memory: HostMemory,
}

impl Harness {
    /// A device with memory for cases of `bytes`.
    pub fn new(mut dev: Box<dyn Kernels>, bytes: usize) -> Result<Self> {
        let mut memory = HostMemory::default();
        let host = memory.alloc("cases", bytes)?;
        dev.pin(host)?;
        let (device, done) = (dev.alloc("cases", bytes / 4, Dtype::Int32)?, dev.event()?);
        Ok(Self { dev, device, host, done, memory })
    }

    /// Waits for everything enqueued on `stream`.
    pub fn synchronize(&mut self, stream: Stream) -> Result<()> {
        self.dev.record(self.done, stream)?;
        self.dev.synchronize(self.done)
    }

    /// Copies `before` to the device, makes the call, and copies the memory back, all on `stream`.
    fn run(&mut self, stream: Stream, before: &[u8], slices: &Slices, call: Call) -> Result<Vec<u8>> {
        let (host, device) = (self.host.slice(0, before.len()), self.device.slice(0, before.len() / 4));
        self.memory.lend_mut(host).copy_from_slice(before);
        self.dev.copy_h2d(stream, host, device)?;
        let called = call(&mut *self.dev, slices);
        self.dev.copy_d2h(stream, device, host)?;
        self.synchronize(stream)?;
        called?;
        Ok(self.memory.lend(host).to_vec())
    }

    /// Whether the device still works after a failure.
    pub fn is_alive(&mut self) -> bool {
        self.run(Stream::Compute, &[POISON; GUARD], &Slices(Vec::new()), &|_, _| Ok(())).is_ok_and(|after| after == [POISON; GUARD])
    }
}

/// A call of one or a few kernels.
pub type Call<'a> = &'a dyn Fn(&mut dyn Kernels, &Slices) -> Result<()>;

/// The device under test and the reference device.
pub struct Bench {
    pub subject: Harness,
    pub reference: Harness,
    /// Whether the tested device guarantees the reference's bits everywhere.
    pub same_bits: bool,
    /// Whether to test the sizes of real workloads.
    pub full: bool,
    /// Whether cuBLASLt computes expert products.
    pub by_cublaslt: bool,
    /// Whether attention of a shape is computed by products.
    pub by_products: fn(&AttentionShape) -> bool,
}

/// A call with its inputs and expected results.
pub struct Case {
    stream: Stream,
    buffers: Vec<Buffer>,
    optional: bool,
    aligned: bool,
}

impl Default for Case {
    fn default() -> Self {
        Self::on(Stream::Compute)
    }
}

impl Case {
    /// A case that enqueues its call on `stream`.
    pub fn on(stream: Stream) -> Self {
        Self { stream, buffers: Vec::new(), optional: false, aligned: false }
    }

    /// An input buffer.
    pub fn input(&mut self, name: &'static str, dtype: Dtype, values: &[f32]) -> Handle {
        self.push(name, dtype, encode(dtype, values), None)
    }

    /// An input buffer of integers.
    pub fn ints(&mut self, name: &'static str, values: &[i32]) -> Handle {
        self.push(name, Dtype::Int32, bytemuck::cast_slice(values).to_vec(), None)
    }

    /// An input buffer with the given bits.
    pub fn bits(&mut self, name: &'static str, dtype: Dtype, bytes: Vec<u8>) -> Handle {
        self.push(name, dtype, bytes, None)
    }

    /// A buffer that is overwritten.
    pub fn output(&mut self, name: &'static str, dtype: Dtype, elems: usize, want: Want) -> Handle {
        self.push(name, dtype, vec![POISON; elems * dtype.bytes()], Some(want))
    }

    /// A buffer that is read and written.
    pub fn updated(&mut self, name: &'static str, dtype: Dtype, before: &[f32], want: Want) -> Handle {
        self.push(name, dtype, encode(dtype, before), Some(want))
    }

    /// One integer that is read and written.
    pub fn updated_int(&mut self, name: &'static str, before: i32, after: i32) -> Handle {
        self.updated_ints(name, &[before], &[after])
    }

    /// Integers that are read and written.
    pub fn updated_ints(&mut self, name: &'static str, before: &[i32], after: &[i32]) -> Handle {
        let bits = |words: &[i32]| bytemuck::cast_slice(words).to_vec();
        self.push(name, Dtype::Int32, bits(before), Some(Want::Bits(bits(after))))
    }

    /// A buffer to which `gained` is added, or that is overwritten with it if there is nothing `before`.
    pub fn gradient(&mut self, name: &'static str, dtype: Dtype, before: Option<&[f32]>, gained: Vec<Near>) -> Handle {
        match before {
            None => self.output(name, dtype, gained.len(), Want::Near(gained)),
            Some(before) => {
                let sums = gained.into_iter().zip(before).map(|(near, &before)| near.plus(f64::from(before)));
                self.updated(name, dtype, before, Want::Near(sums.collect()))
            }
        }
    }

    /// Permits the device to report the call as unsupported.
    pub fn optional(&mut self, optional: bool) {
        self.optional = optional;
    }

    /// Buffers start only at aligned addresses, as in the engine. Otherwise the call is also made on buffers that start one element later.
    pub fn aligned(&mut self) {
        self.aligned = true;
    }

    fn push(&mut self, name: &'static str, dtype: Dtype, before: Vec<u8>, want: Option<Want>) -> Handle {
        self.buffers.push(Buffer { name, dtype, before, want });
        Handle(self.buffers.len() - 1)
    }

    /// Makes the call on both devices and compares every element. Returns the largest error relative to its bound.
    pub fn check(self, bench: &mut Bench, call: Call) -> Outcome {
        let reference = match self.needs_reference(bench) {
            true => Some(self.run(&mut bench.reference, 0, call)?),
            false => None,
        };
        let first = match self.run(&mut bench.subject, 0, call) {
            Err(e @ Error::Unsupported(_)) if self.optional => return Err(Missed::Skipped(e.to_string())),
            first => first?,
        };
        let mut worst = self.compare(&first, reference.as_deref(), bench.same_bits, "")?;
        let second = self.run(&mut bench.subject, 0, call)?;
        if first != second {
            return Err(Missed::Failed("the same call gave other bits".into()));
        }
        if !self.aligned {
            let skewed = self.run(&mut bench.subject, 1, call)?;
            worst = worst.max(self.compare(&skewed, reference.as_deref(), bench.same_bits, " begun one element further")?);
        }
        Ok(worst)
    }

    fn needs_reference(&self, bench: &Bench) -> bool {
        bench.same_bits || self.buffers.iter().any(|b| matches!(b.want, Some(Want::Same)))
    }

    /// The first byte of each buffer if all start `skew` elements after an aligned address, and finally the total size.
    fn starts(&self, skew: usize) -> Vec<usize> {
        let mut end = 0;
        let mut start = |b: &Buffer| {
            let start = (end + GUARD).next_multiple_of(GUARD) + skew * b.dtype.bytes();
            end = start + b.before.len();
            start
        };
        let mut starts: Vec<_> = self.buffers.iter().map(&mut start).collect();
        starts.push((end + GUARD).next_multiple_of(GUARD));
        starts
    }

    /// The content of the buffers after the call. Asserts that the memory around them is unchanged.
    fn run(&self, harness: &mut Harness, skew: usize, call: Call) -> Result<Vec<Vec<u8>>> {
        let starts = self.starts(skew);
        let mut memory = vec![POISON; starts[self.buffers.len()]];
        for (b, &start) in self.buffers.iter().zip(&starts) {
            memory[start..start + b.before.len()].copy_from_slice(&b.before);
        }
        let slice = |(b, &start): (&Buffer, &usize)| {
            let elems = b.before.len() / b.dtype.bytes();
            harness.device.view(start, elems, b.dtype)
        };
        let slices = Slices(self.buffers.iter().zip(&starts).map(slice).collect());
        let mut after = harness.run(self.stream, &memory, &slices, call)?;
        let mut content = Vec::new();
        for (b, &start) in self.buffers.iter().zip(&starts) {
            let bytes = start..start + b.before.len();
            content.push(after[bytes.clone()].to_vec());
            let unwritten = b.want.is_none() && after[bytes.clone()] == b.before;
            if unwritten || b.want.is_some() {
                after[bytes].fill(POISON);
            }
        }
        match after.iter().position(|&byte| byte != POISON) {
            Some(at) => Err(Error::resource("run a case", format!("wrote outside of its outputs: {}", self.place(&starts, at)))),
            None => Ok(content),
        }
    }

    /// A description of the position of byte `at`.
    fn place(&self, starts: &[usize], at: usize) -> String {
        let after = starts[..self.buffers.len()].iter().rposition(|&start| start <= at);
        after.map_or("before all buffers".into(), |i| {
            let (b, offset) = (&self.buffers[i], at - starts[i]);
            format!("element {} of {} with {}", offset / b.dtype.bytes(), b.name, b.before.len() / b.dtype.bytes())
        })
    }

    fn compare(&self, got: &[Vec<u8>], reference: Option<&[Vec<u8>]>, same_bits: bool, how: &str) -> Outcome {
        let mut worst = 0f64;
        for (i, b) in self.buffers.iter().enumerate() {
            let fail = |e: String| Missed::Failed(format!("{}{how} {e}", b.name));
            let bits = match &b.want {
                None | Some(Want::Any) => continue,
                Some(Want::Bits(bits)) => Some(Cow::Borrowed(&bits[..])),
                Some(Want::As(other)) => Some(Cow::Borrowed(&got[other.0][..])),
                Some(Want::Part(other, at)) => {
                    let bytes = b.dtype.bytes();
                    let part = at.iter().flat_map(|at| &got[other.0][at.start * bytes..at.end * bytes]);
                    Some(Cow::Owned(part.copied().collect()))
                }
                Some(Want::Same) => reference.map(|r| Cow::Borrowed(&r[i][..])),
                Some(Want::Near(near)) => {
                    worst = worst.max(compare_near(b.dtype, &got[i], near).map_err(fail)?);
                    reference.filter(|_| same_bits).map(|r| Cow::Borrowed(&r[i][..]))
                }
            };
            bits.map_or(Ok(()), |bits| compare_bits(b.dtype, &got[i], &bits)).map_err(fail)?;
        }
        Ok(worst)
    }
}

fn compare_bits(dtype: Dtype, got: &[u8], want: &[u8]) -> std::result::Result<(), String> {
    if got == want {
        return Ok(());
    }
    let pairs = || got.chunks_exact(dtype.bytes()).zip(want.chunks_exact(dtype.bytes()));
    let differs = |(g, w): (&[u8], &[u8])| !same(dtype, g, w);
    let count = pairs().filter(|&pair| differs(pair)).count();
    let Some(at) = pairs().position(differs) else { return Ok(()) };
    let show = |bytes: &[u8]| {
        let bytes = &bytes[at * dtype.bytes()..][..dtype.bytes()];
        let hex: String = bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect();
        format!("{} (0x{hex})", decode(dtype, bytes)[0])
    };
    Err(format!("[{at}]: {}, reference {}; {count} of {} differ", show(got), show(want), pairs().count()))
}

/// The largest error relative to its bound.
fn compare_near(dtype: Dtype, got: &[u8], near: &[Near]) -> std::result::Result<f64, String> {
    let got = decode(dtype, got);
    assert_eq!(got.len(), near.len(), "a case expects as many numbers as the buffer holds");
    let outside = |(&got, near): (&f32, &Near)| !near.admits(dtype, got);
    let worst = got.iter().zip(near).map(|(&got, near)| near.ratio(dtype, got)).fold(0.0, f64::max);
    let Some(at) = got.iter().zip(near).position(outside) else { return Ok(worst) };
    let count = got.iter().zip(near).filter(|&pair| outside(pair)).count();
    let Near { want, error } = near[at];
    Err(format!(
        "[{at}]: {}, exact {want:e} within {error:.1e}; {count} of {} outside, up to {worst:.1} times the bound",
        got[at],
        got.len()
    ))
}
