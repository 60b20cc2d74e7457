//! Sums of gradients: in fp32, in the order of the parts, rounded once.

use super::arithmetic::by_float;
use super::isa::{KernelIsa, vectorised};
use crate::device::cpu::CpuDevice;
use crate::device::cpu::task_memory::TaskMemory;
use crate::device::{Checked, Launch, SumSlices};
use crate::dtype::Element;
use crate::error::Result;

/// Elements of one block: their sums stay in the L1 cache.
const BLOCK: usize = 2048;

/// Runs on the thread of the stream; the compute threads do not serve copy streams.
impl Launch<SumSlices> for CpuDevice {
    fn accept(&mut self, kernel: Checked<SumSlices>) -> Result<()> {
        let isa = self.compute.isa();
        by_float!(kernel.dtype(), T => by_float!(kernel.out.dtype(), O => {
            self.beside(kernel, move |kernel, memory| sum_slices::<T, O>(isa, kernel, memory))
        }))
    }
}

fn sum_slices<T: Element, O: Element>(isa: KernelIsa, SumSlices { parts, before, out, .. }: SumSlices, memory: &TaskMemory<'_>) {
    let apart = |slice: &_| *slice != out;
    let parts = parts.map(|part| part.map(|part| Some(part).filter(apart).map(|part| memory.read::<T>(part))));
    let before = before.map(|before| Some(before).filter(apart).map(|before| memory.read::<f32>(before)));
    for (nth, out) in memory.write::<O>(out).chunks_mut(BLOCK).enumerate() {
        let range = nth * BLOCK..nth * BLOCK + out.len();
        let mut sums = Sums { values: [0.0; BLOCK], elems: 0 };
        // An input that is the output slice itself has the format of the output.
        if let Some(before) = before {
            match before {
                Some(before) => sums.add(isa, &before[range.clone()]),
                None => sums.add(isa, &*out),
            }
        }
        for part in parts.iter().flatten() {
            match part {
                Some(part) => sums.add(isa, &part[range.clone()]),
                None => sums.add(isa, &*out),
            }
        }
        convert(isa, &sums.values[..sums.elems], out);
    }
}

/// Sums before rounding; `elems` is 0 before the first term.
struct Sums {
    values: [f32; BLOCK],
    elems: usize,
}

impl Sums {
    fn add<T: Element>(&mut self, isa: KernelIsa, term: &[T]) {
        match self.elems {
            0 => convert(isa, term, &mut self.values[..term.len()]),
            elems => add(isa, term, &mut self.values[..elems]),
        }
        self.elems = term.len();
    }
}

vectorised! {
    fn add<T>(part: &[T], sums: &mut [f32]) {
        sums.iter_mut().zip(part).for_each(|(sum, x)| *sum += x.to_f32());
    }
}

vectorised! {
    fn convert<S, D>(src: &[S], dst: &mut [D]) {
        dst.iter_mut().zip(src).for_each(|(d, s)| *d = D::from_f32(s.to_f32()));
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::{bits, values};
    use super::*;
    use half::{bf16, f16};

    fn assert_sum<T: Element>() {
        let all: Vec<Vec<T>> = (0..5).map(|seed| values(seed, BLOCK - 3)).collect();
        let before: Vec<f32> = values(9, BLOCK - 3);
        for (count, begun) in (1..=all.len()).flat_map(|count| [(count, false), (count, true)]) {
            for isa in KernelIsa::available() {
                let mut sums = Sums { values: [0.0; BLOCK], elems: 0 };
                begun.then(|| sums.add(isa, &before));
                all[..count].iter().for_each(|part| sums.add(isa, part));
                let mut narrow = vec![T::from_f32(0.0); BLOCK - 3];
                convert(isa, &sums.values[..sums.elems], &mut narrow);
                for i in 0..narrow.len() {
                    let terms = begun.then_some(before[i]).into_iter().chain(all[..count].iter().map(|part| part[i].to_f32()));
                    let want = terms.reduce(|sum, term| sum + term).unwrap();
                    assert_eq!(
                        (sums.values[i].to_bits(), bits(&narrow[i..=i])),
                        (want.to_bits(), bits(&[T::from_f32(want)])),
                        "element {i}"
                    );
                }
            }
        }
    }

    #[test]
    fn sums_are_those_of_a_plain_loop_and_rounded_once() {
        assert_sum::<bf16>();
        assert_sum::<f16>();
        assert_sum::<f32>();
    }

    #[test]
    fn a_sum_of_one_part_keeps_its_zeros_signs() {
        let mut sums = Sums { values: [0.0; BLOCK], elems: 0 };
        sums.add(KernelIsa::detect(), &[-0.0f32, 0.0]);
        assert_eq!([0, 1].map(|i| sums.values[i].to_bits()), [0x8000_0000, 0]);
    }
}
