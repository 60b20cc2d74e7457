//! Expert products with the shapes of three models, under even and uneven loads, next to a loop of single products.

use crate::bench::DeviceBench;
use half::bf16;
use serde_json::{Value, json};
use std::ops::Range;
use superoffload::Result;
use superoffload::internals::device::{
    DeviceSlice, GroupedMatmul, GroupedShape, Kernel, Kernels, Matmul, MatmulLayout, MatmulShape, Stream, Zero,
};
use superoffload::internals::dtype::Dtype;
use superoffload::internals::host::PinnedSlice;
use superoffload::internals::probe::{Samples, fill, upload_bounds};

/// The experts of a model's layer, and the average number of rows per expert in a batch of tokens.
struct Model {
    name: &'static str,
    experts: usize,
    rows: usize,
    /// Rows and columns of an expert's two weights: gate and up in one matrix, and down.
    weights: [(usize, usize); 2],
}

/// Models, each with a batch of 16,384 tokens.
const MODELS: [Model; 3] = [
    Model { name: "olmoe-1b-7b", experts: 64, rows: 2048, weights: [(2048, 2048), (2048, 1024)] },
    Model { name: "gpt-oss-20b", experts: 32, rows: 2048, weights: [(5760, 2880), (2880, 2880)] },
    Model { name: "qwen3-30b-a3b", experts: 128, rows: 1024, weights: [(1536, 2048), (2048, 768)] },
];

/// Distribution of rows over experts.
#[derive(Clone, Copy, Debug)]
enum ExpertLoad {
    /// Every expert has the same number of rows.
    Uniform,
    /// The first expert has 16 times as many rows as the last one, nearly three times the mean; one in the middle has none.
    Skewed,
}

impl ExpertLoad {
    const ALL: [Self; 2] = [Self::Uniform, Self::Skewed];

    const fn name(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Skewed => "skewed",
        }
    }

    /// Number of rows of each expert, `mean` on average. Large and small numbers alternate.
    fn rows(self, experts: usize, mean: usize) -> Vec<usize> {
        let weight = |expert: usize| match self {
            Self::Uniform => 1.0,
            Self::Skewed if expert == experts / 2 => 0.0,
            Self::Skewed => (-4.0 * (expert * 5 % experts) as f64 / experts as f64).exp2(),
        };
        let total: f64 = (0..experts).map(weight).sum();
        let end = |experts_before: usize| ((0..experts_before).map(weight).sum::<f64>() / total * (experts * mean) as f64).round() as usize;
        (0..experts).map(|expert| end(expert + 1) - end(expert)).collect()
    }
}

/// Memory for the largest case: the operands, and two results to compare.
struct GroupedMemory {
    x: DeviceSlice,
    y: DeviceSlice,
    weights: DeviceSlice,
    results: [DeviceSlice; 2],
    read: [PinnedSlice; 2],
}

impl GroupedMemory {
    fn new<D: Kernels>(bench: &mut DeviceBench<'_, D>, shapes: &[GroupedShape]) -> Result<Self> {
        let most = |elems: fn(&GroupedShape) -> usize| shapes.iter().map(elems).max().unwrap_or(0);
        let (x, y, weights) = (most(|s| s.rows * s.ins), most(|s| s.rows * s.outs), most(|s| s.experts * s.outs * s.ins));
        let mut alloc = |name, elems| bench.timer.dev.alloc(name, elems, Dtype::Bfloat16);
        let result = x.max(y).max(weights);
        let (x, y, weights) = (alloc("rows in", x)?, alloc("rows out", y)?, alloc("weights of experts", weights)?);
        let results = [alloc("grouped products", result)?, alloc("single products", result)?];
        fill(bench.timer.dev, &[x, y, weights])?;
        let read = [bench.registered(2 * result)?, bench.registered(2 * result)?];
        Ok(Self { x, y, weights, results, read })
    }

    /// Operands of a product of `shape`, and its result in buffer `which` of the two.
    fn operands(&self, shape: GroupedShape, which: usize) -> [DeviceSlice; 3] {
        let GroupedShape { layout, experts, rows, outs, ins } = shape;
        let (x, y, weights) = (rows * ins, rows * outs, experts * outs * ins);
        let result = |elems| self.results[which].slice(0, elems);
        let [x_in, y_in, weights_in] = [(self.x, x), (self.y, y), (self.weights, weights)].map(|(memory, elems)| memory.slice(0, elems));
        match layout {
            MatmulLayout::Nt => [x_in, weights_in, result(y)],
            MatmulLayout::Nn => [y_in, weights_in, result(x)],
            MatmulLayout::Tn => [y_in, x_in, result(weights)],
        }
    }
}

/// Measures every product of every layer under every load.
///
/// # Errors
/// Errors of the device; `Resource` if grouped and single products differ.
pub fn measure<D: Kernels>(bench: &mut DeviceBench<'_, D>) -> Result<()> {
    let shrink = bench.sizes.shrink;
    let layers: Vec<(&Model, GroupedShape)> = MODELS
        .iter()
        .flat_map(|model| model.weights.map(|(outs, ins)| (model, outs / shrink, ins / shrink)))
        .map(|(model, outs, ins)| {
            let experts = model.experts / shrink.isqrt();
            (model, GroupedShape { layout: MatmulLayout::Nt, experts, rows: experts * model.rows / shrink, outs, ins })
        })
        .collect();
    let shapes: Vec<_> = layers.iter().map(|(_, shape)| *shape).collect();
    let memory = GroupedMemory::new(bench, &shapes)?;
    for (model, shape) in layers {
        for load in ExpertLoad::ALL {
            let rows = load.rows(shape.experts, shape.rows / shape.experts);
            let bounds = upload_bounds(bench.timer.dev, &rows)?;
            for layout in MatmulLayout::ALL {
                case(bench, &memory, (model.name, load), GroupedShape { layout, ..shape }, (&rows, bounds))?;
            }
        }
    }
    Ok(())
}

/// Compares one grouped product with the loop, times both, and prints the line.
fn case<D: Kernels>(
    bench: &mut DeviceBench<'_, D>,
    memory: &GroupedMemory,
    (model, load): (&str, ExpertLoad),
    shape: GroupedShape,
    (rows, bounds): (&[usize], DeviceSlice),
) -> Result<()> {
    let [a, b, c] = memory.operands(shape, 0);
    let grouped = GroupedMatmul { shape, a, b, bounds, c, accumulate: false };
    let single = singles(shape, rows, memory.operands(shape, 1));
    let run_single = |dev: &mut D| single.iter().try_for_each(|product| product.enqueue(dev));
    bench.timer.seconds(|dev| dev.launch(grouped).and_then(|()| run_single(dev)))?;
    let is_right = agree(bench, memory, c.elems(), shape)?;
    let (flops, time_s) = (grouped.flops(), bench.sizes.seconds);
    let grouped_times = bench.timer.rates(time_s, flops, |dev| dev.launch(grouped))?;
    let one_by_one = bench.timer.rates(time_s, flops, run_single)?;
    let fields = describe(&grouped, &grouped_times, &one_by_one);
    let mean = shape.rows as f64 / shape.experts as f64;
    let largest = rows.iter().max().map_or(0.0, |&most| most as f64 / mean);
    let which = json!({ "model": model, "load": load.name(), "largest_over_mean": largest });
    bench.line("grouped", is_right, microbench::facts::join(which, fields))
}

/// Sizes and rates. The traffic counts each operand once.
fn describe(grouped: &GroupedMatmul, grouped_times: &Samples, one_by_one: &Samples) -> Value {
    let GroupedShape { layout, experts, rows, outs, ins } = grouped.shape;
    let product = match layout {
        MatmulLayout::Nt => "output",
        MatmulLayout::Nn => "input's gradient",
        MatmulLayout::Tn => "weights' gradient",
    };
    let rates = |samples: &Samples| (samples.median() * 1e-12, samples.median() / grouped.flops() * grouped.bytes() * 1e-9);
    let ((tflops, gb_per_s), (loop_tflops, loop_gb_per_s)) = (rates(grouped_times), rates(one_by_one));
    json!({
        "product": product, "experts": experts, "rows": rows, "outs": outs, "ins": ins, "us": 1e6 * grouped.flops() / grouped_times.median(),
        "tflops": tflops, "gb_per_s": gb_per_s, "spread": grouped_times.spread(),
        "loop_tflops": loop_tflops, "loop_gb_per_s": loop_gb_per_s, "loop_spread": one_by_one.spread(), "share_of_loop": tflops / loop_tflops,
    })
}

/// One expert's work in the loop.
enum Single {
    Product(Matmul),
    /// The gradient of an expert's weights without rows: zeros.
    Nothing(DeviceSlice),
}

impl Single {
    fn enqueue<D: Kernels>(&self, dev: &mut D) -> Result<()> {
        match *self {
            Self::Product(product) => dev.launch(product),
            Self::Nothing(x) => dev.launch(Zero { x }),
        }
    }
}

/// The products of `shape` as one product per expert.
fn singles(shape: GroupedShape, rows: &[usize], [a, b, c]: [DeviceSlice; 3]) -> Vec<Single> {
    let GroupedShape { layout, outs, ins, .. } = shape;
    let starts = rows.iter().scan(0, |end, rows| Some(std::mem::replace(end, *end + rows)));
    let part = |whole: DeviceSlice, items: Range<usize>, cols: usize| whole.slice(items.start * cols, items.len() * cols);
    let one = |(expert, (start, &rows)): (usize, (usize, &usize))| {
        let (rows_of, weight_of) = (start..start + rows, expert..expert + 1);
        let (m, n, k, operands) = match layout {
            MatmulLayout::Nt => (rows, outs, ins, [part(a, rows_of.clone(), ins), part(b, weight_of, outs * ins), part(c, rows_of, outs)]),
            MatmulLayout::Nn => (rows, ins, outs, [part(a, rows_of.clone(), outs), part(b, weight_of, outs * ins), part(c, rows_of, ins)]),
            MatmulLayout::Tn => (outs, ins, rows, [part(a, rows_of.clone(), outs), part(b, rows_of, ins), part(c, weight_of, outs * ins)]),
        };
        match (rows, layout) {
            (0, MatmulLayout::Tn) => Some(Single::Nothing(operands[2])),
            (0, _) => None,
            _ => Some(Single::Product(Matmul::plain(MatmulShape { layout, m, n, k }, operands))),
        }
    };
    starts.zip(rows).enumerate().filter_map(one).collect()
}

/// Whether both results agree up to the order of summation and one rounding to bf16.
fn agree<D: Kernels>(bench: &mut DeviceBench<'_, D>, memory: &GroupedMemory, elems: usize, shape: GroupedShape) -> Result<bool> {
    let read = memory.read.map(|place| place.slice(0, 2 * elems));
    for (result, place) in memory.results.into_iter().zip(read) {
        bench.timer.seconds(|dev| dev.copy_d2h(Stream::D2h, result.slice(0, elems), place))?;
    }
    let [grouped, single] = read.map(|place| bench.memory.lend::<bf16>(place));
    let terms = shape.rows.max(shape.outs).max(shape.ins) as f32;
    let is_near = |(a, b): (&bf16, &bf16)| (a.to_f32() - b.to_f32()).abs() <= a.to_f32().abs() / 128.0 + terms * f32::EPSILON;
    let part_elems = elems.div_ceil(std::thread::available_parallelism().map_or(1, usize::from));
    let parts = || grouped.chunks(part_elems).zip(single.chunks(part_elems));
    Ok(std::thread::scope(|scope| {
        let threads: Vec<_> = parts().map(|(a, b)| scope.spawn(move || a.iter().zip(b).all(is_near))).collect();
        threads.into_iter().all(|thread| thread.join().unwrap_or(false))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_rows_fall_to_experts_however_they_are_loaded() {
        for model in &MODELS {
            let [even, skewed] = ExpertLoad::ALL.map(|load| load.rows(model.experts, model.rows));
            assert!(even.iter().all(|&rows| rows == model.rows), "{even:?}");
            assert_eq!(skewed.iter().sum::<usize>(), model.experts * model.rows);
            let most = *skewed.iter().max().unwrap() as f64 / model.rows as f64;
            assert!((2.7..3.3).contains(&most) && skewed.iter().filter(|&&rows| rows == 0).count() == 1, "{most} {skewed:?}");
        }
    }
}
