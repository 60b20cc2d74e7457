//! Casts and filling.

use super::Compute;
use super::arithmetic::{CpuArithmetic, by_float};
use super::pointwise::{cast, cast_elems, zero};
use crate::device::cpu::CpuDevice;
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{Cast, Checked, Launch, Poke, Stream, Zero};
use crate::dtype::{Dtype, Element};
use crate::error::{Error, Result};

/// Supports all formats, including int32.
impl Launch<Zero> for CpuDevice {
    fn accept(&mut self, kernel: Checked<Zero>) -> Result<()> {
        match kernel.x.dtype().bytes() {
            2 => self.compute(kernel, |Zero { x }, cx, memory| zero::<u16>(cx, memory.write(x))),
            _ => self.compute(kernel, |Zero { x }, cx, memory| zero::<u32>(cx, memory.write(x))),
        }
    }
}

impl Launch<Cast> for CpuDevice {
    fn accept(&mut self, kernel: Checked<Cast>) -> Result<()> {
        let (from, to) = (kernel.src.dtype(), kernel.dst.dtype());
        if from == to {
            return match to.bytes() {
                2 => self.beside(kernel, |Cast { src, dst, .. }, memory| memory.write::<u16>(dst).copy_from_slice(memory.read(src))),
                _ => self.beside(kernel, |Cast { src, dst, .. }, memory| memory.write::<u32>(dst).copy_from_slice(memory.read(src))),
            };
        }
        if from != Dtype::Float32 && to != Dtype::Float32 {
            return Err(Error::Unsupported(format!("a cast from {from} to {to}")));
        }
        let isa = self.compute.isa();
        by_float!(from, S => by_float!(to, D => match kernel.stream {
            Stream::Compute => self.compute(kernel, |Cast { src, dst, .. }, cx, memory| cast::<S, D>(cx, memory.read(src), memory.write(dst))),
            // A copy stream converts on its own thread.
            _ => self.beside(kernel, move |Cast { src, dst, .. }, memory| cast_elems::<S, D>(isa, memory.read(src), memory.write(dst))),
        }))
    }
}

impl CpuArithmetic for Poke {
    fn run<T: Element>(self, _: &mut Compute, memory: &TaskMemory<'_>) {
        memory.write::<T>(self.x)[self.index] = T::from_f32(self.value);
    }
}
