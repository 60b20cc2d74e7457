//! Gradients of keys and values, accumulated over blocks of queries.

use super::arithmetic::CpuArithmetic;
use super::split::Chunks;
use super::{Compute, ROW_BLOCK};
use crate::device::AddKeyGradients;
use crate::device::cpu::task_memory::TaskMemory;
use crate::dtype::Element;

impl CpuArithmetic for AddKeyGradients {
    fn run<T: Element>(self, cx: &mut Compute, memory: &TaskMemory<'_>) {
        let Self { pitch, columns, width, begun, done, .. } = self;
        let (rows, sums) = (memory.write::<T>(self.dqkv), memory.write::<f32>(self.sums));
        let parts = (Chunks::new(rows, ROW_BLOCK * pitch), Chunks::new(sums, ROW_BLOCK * 2 * width));
        cx.team.for_each(parts, |block, (rows, sums)| {
            for (i, (row, sums)) in rows.chunks_exact_mut(pitch).zip(sums.chunks_exact_mut(2 * width)).enumerate() {
                let key = block * ROW_BLOCK + i;
                for (first, sums) in columns.into_iter().zip(sums.chunks_exact_mut(width)) {
                    add(&mut row[first..first + width], sums, key < begun, key < done);
                }
            }
        });
    }
}

fn add<T: Element>(gradient: &mut [T], sums: &mut [f32], is_begun: bool, is_done: bool) {
    for (gradient, sum) in gradient.iter_mut().zip(sums) {
        let total = if is_begun { *sum } else { 0.0 } + gradient.to_f32();
        if is_done { *gradient = T::from_f32(total) } else { *sum = total }
    }
}
