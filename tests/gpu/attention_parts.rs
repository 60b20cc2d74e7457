//! Attention of one key head and its query heads must have the same bits alone as with other heads and sequences. A GPU computes the
//! backward pass in parts, of sequences or of heads, to bound its workspace. The parts must change no bit.

use super::harness::{Bench, Case, Handle, Slices, Want};
use super::kernels::Suite;
use super::random::Random;
use super::report::Outcome;
use std::io::Write;
use std::ops::Range;
use superoffload::Result;
use superoffload::internals::device::{AttentionBackward, AttentionForward, AttentionShape, Kernels};
use superoffload::internals::dtype::Dtype;

/// Shapes that a deterministic GPU computes one sequence at a time, and eight query heads at a time.
const FULL: [AttentionShape; 2] = [shape(2, 8192, (32, 4)), shape(1, 12_288, (32, 4))];

const fn shape(batch: usize, seq_length: usize, (heads, kv_heads): (usize, usize)) -> AttentionShape {
    AttentionShape { batch, seq_length, heads, kv_heads, head_dim: 64, scale: 0.125, window: None, softcap: None }
}

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    for dtype in [Dtype::Float16, Dtype::Bfloat16] {
        let full = if suite.full(dtype) { &FULL[..] } else { &[] };
        let small = [shape(2, 70, (8, 2)), AttentionShape { head_dim: 512, ..shape(3, 40, (8, 2)) }];
        for shape in small.iter().chain(full) {
            let AttentionShape { batch, seq_length, heads, kv_heads, head_dim, .. } = shape;
            let of = format!("{dtype} {batch}x{seq_length} tokens, ({heads}+2x{kv_heads})x{head_dim}");
            suite.case(&format!("attention of a head alone {of}"), |bench, random| last_head(bench, random, dtype, shape));
        }
    }
}

/// Both passes for one shape.
struct Passes {
    shape: AttentionShape,
    inputs: [Handle; 2],
    outputs: [Handle; 3],
}

impl Passes {
    /// Passes with these inputs and output gradients. `want` has the expected output, log-sum-exp and gradients.
    fn new(case: &mut Case, dtype: Dtype, shape: AttentionShape, [qkv, dout]: [&[f32]; 2], want: [Want; 3]) -> Self {
        let inputs = [case.input("qkv", dtype, qkv), case.input("dout", dtype, dout)];
        let [out, lse, dqkv] = want;
        let outputs = [
            case.output("out", dtype, dout.len(), out),
            case.output("lse", Dtype::Float32, shape.tokens() * shape.heads, lse),
            case.output("dqkv", dtype, qkv.len(), dqkv),
        ];
        Self { shape, inputs, outputs }
    }

    fn run(&self, dev: &mut dyn Kernels, at: &Slices) -> Result<()> {
        let (shape, [qkv, dout], [out, lse, dqkv]) = (self.shape, self.inputs.map(|x| at[x]), self.outputs.map(|x| at[x]));
        dev.launch(AttentionForward { qkv, documents: None, out, lse, shape })?;
        dev.launch(AttentionBackward { dout, qkv, documents: None, out, lse, dqkv, shape, block: None })
    }
}

/// Compares the last key head of the last sequence.
fn last_head(bench: &mut Bench, random: &mut Random, dtype: Dtype, shape: &AttentionShape) -> Outcome {
    let qkv = random.scaled(dtype, shape.tokens() * shape.qkv_cols(), 3.0);
    let dout = random.uniform(dtype, shape.tokens() * shape.out_cols());
    let [out_at, lse_at, qkv_at] = of_last_head(shape);
    let alone = AttentionShape { batch: 1, heads: shape.heads / shape.kv_heads, kv_heads: 1, ..*shape };
    let (qkv_alone, dout_alone) = (gather(&qkv, &qkv_at), gather(&dout, &out_at));
    let mut case = Case::default();
    case.aligned();
    let whole = Passes::new(&mut case, dtype, *shape, [&qkv, &dout], [(); 3].map(|()| Want::Any));
    let [out, lse, dqkv] = whole.outputs;
    let want = [Want::Part(out, out_at), Want::Part(lse, lse_at), Want::Part(dqkv, qkv_at)];
    let alone = Passes::new(&mut case, dtype, alone, [&qkv_alone, &dout_alone], want);
    case.check(bench, &|dev, at| whole.run(dev, at).and_then(|()| alone.run(dev, at)))
}

/// Ranges of the last key head of the last sequence, and of its query heads, in the output, the log-sum-exp, and `qkv`.
fn of_last_head(shape: &AttentionShape) -> [Vec<Range<usize>>; 3] {
    let AttentionShape { seq_length, heads, kv_heads, head_dim: d, .. } = *shape;
    let readers = heads / kv_heads;
    let rows = shape.tokens() - seq_length..shape.tokens();
    // Columns of heads in a row of `cols` columns.
    let of_row = |row: usize, cols: usize, heads: Range<usize>| row * cols + heads.start * d..row * cols + heads.end * d;
    let out = rows.clone().map(|row| of_row(row, shape.out_cols(), heads - readers..heads));
    let lse = shape.tokens() * heads - readers * seq_length..shape.tokens() * heads;
    let [key, value] = [heads + kv_heads, heads + 2 * kv_heads].map(|end| end - 1..end);
    let of_rows = [heads - readers..heads, key, value];
    let qkv = rows.flat_map(|row| of_rows.clone().map(|heads| of_row(row, shape.qkv_cols(), heads)));
    [out.collect(), vec![lse], qkv.collect()]
}

fn gather(whole: &[f32], at: &[Range<usize>]) -> Vec<f32> {
    at.iter().flat_map(|at| &whole[at.clone()]).copied().collect()
}
