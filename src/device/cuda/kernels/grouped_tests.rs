//! Tests of expert products for cuBLASLt: emulated kernels write the tables, the test multiplies as cuBLASLt reads them, and the results
//! are compared with products by definition.

use super::*;
use crate::device::DeviceSlice;
use crate::device::cuda::group_tables::{GroupRoles, Segmented};
use crate::device::cuda::kernels::emulator::{EmulatedMemory, run};
use crate::device::cuda::launch::Arg;
use half::bf16;

const OUTS: usize = 16;
const INS: usize = 24;
/// Rows of each expert.
const LOADS: [&[usize]; 4] = [&[3, 0, 5, 1], &[0, 0], &[7], &[0, 2, 0]];

/// A GPU whose cuBLASLt is emulated by this file.
struct Library {
    memory: EmulatedMemory,
    tables: GroupTables,
    /// Whether the library writes sums of no terms; some releases leave these results unchanged.
    writes_empty_sums: bool,
}

impl Library {
    fn number<T: bytemuck::Pod>(&self, addr: u64) -> T {
        self.memory.read(DeviceSlice::at(addr, size_of::<T>(), Dtype::Float8E4m3))[0]
    }

    /// Column-major rows and columns of an expert's matrix.
    fn sizes(&self, of: Segmented, expert: usize) -> [usize; 2] {
        of.sizes().map(|size| self.number::<i32>(self.tables.sizes(size) + 4 * expert as u64) as usize)
    }

    fn element(&self, of: Segmented, expert: usize, (row, col): (usize, usize)) -> DeviceSlice {
        let [rows, columns] = self.sizes(of, expert);
        assert!(row < rows && col < columns, "({row}, {col}) of {rows} x {columns}");
        let first: u64 = self.number(self.tables.addresses(of) + 8 * expert as u64);
        DeviceSlice::at(first + 2 * (col * rows + row) as u64, 1, Dtype::Bfloat16)
    }

    fn value(&self, of: Segmented, expert: usize, at: (usize, usize)) -> f32 {
        self.memory.read::<bf16>(self.element(of, expert, at))[0].to_f32()
    }

    fn multiply(&mut self, layout: MatmulLayout, expert: usize) {
        let GroupRoles { factors: [(a, transpose_a), (b, transpose_b)], result, .. } = GroupRoles::of(layout);
        let turned = |transposed, (row, col)| if transposed { (col, row) } else { (row, col) };
        let terms = self.sizes(a, expert)[usize::from(!transpose_a)];
        assert_eq!(terms, self.sizes(b, expert)[usize::from(transpose_b)], "factors do not fit");
        let [rows, columns] = self.sizes(result, expert);
        let [one, beta] = self.tables.factors().map(|at| self.number::<f32>(at));
        for at in (0..columns).flat_map(|col| (0..rows).map(move |row| (row, col))) {
            let term = |k| self.value(a, expert, turned(transpose_a, (at.0, k))) * self.value(b, expert, turned(transpose_b, (k, at.1)));
            let base = if beta == 0.0 { 0.0 } else { beta * self.value(result, expert, at) };
            let sum = one * (0..terms).map(term).sum::<f32>() + base;
            if terms > 0 || self.writes_empty_sums {
                let to = self.element(result, expert, at);
                self.memory.write(to, &[bf16::from_f32(sum)]);
            }
        }
    }
}

impl Queue for Library {
    fn is_hopper(&self) -> bool {
        true
    }

    fn group_tables(&self) -> Option<GroupTables> {
        Some(self.tables)
    }

    fn multiply_groups(&mut self, shape: GroupedShape, dtype: Dtype) -> Result<()> {
        assert_eq!(dtype, Dtype::Bfloat16);
        (0..shape.experts).for_each(|expert| self.multiply(shape.layout, expert));
        Ok(())
    }

    fn launch<const N: usize>(
        &mut self,
        stream: Stream,
        name: &'static str,
        dtype: Option<Dtype>,
        blocks: LaunchConfig,
        args: [Arg; N],
    ) -> Result<()> {
        assert_eq!((stream, dtype), (Stream::Compute, None));
        run(&mut self.memory, &TABLES_SOURCE.file.text()?, name, blocks, &args);
        Ok(())
    }

    fn scratch(&mut self, _: usize) -> Result<DeviceSlice> {
        unreachable!("cuBLASLt has a workspace")
    }

    fn zero(&mut self, _: DeviceSlice) -> Result<()> {
        unreachable!("only weights of experts without rows are zeroed")
    }

    fn copy(&mut self, _: Stream, _: DeviceSlice, _: DeviceSlice) -> Result<()> {
        unreachable!("nothing is copied")
    }
}

/// Small integers, so that their sums are exact.
fn numbers(seed: usize, elems: usize) -> Vec<bf16> {
    (0..elems).map(|i| bf16::from_f32(((i * 7 + i / 5 + seed) % 5) as f32 - 2.0)).collect()
}

/// The products by definition.
fn expected(shape: GroupedShape, bounds: &[i32], [x, y, w]: &[Vec<bf16>; 3], accumulate: bool) -> Vec<f32> {
    let expert_of = |row: usize| bounds.iter().skip(1).position(|&end| row < end as usize).unwrap();
    let (x_at, y_at) = (|row: usize, i: usize| x[row * INS + i].to_f32(), |row: usize, o: usize| y[row * OUTS + o].to_f32());
    let w_at = |expert: usize, o: usize, i: usize| w[(expert * OUTS + o) * INS + i].to_f32();
    let rows = 0..shape.rows;
    match shape.layout {
        MatmulLayout::Nt => rows
            .flat_map(|row| (0..OUTS).map(move |o| (row, o)))
            .map(|(row, o)| (0..INS).map(|i| x_at(row, i) * w_at(expert_of(row), o, i)).sum())
            .collect(),
        MatmulLayout::Nn => rows
            .flat_map(|row| (0..INS).map(move |i| (row, i)))
            .map(|(row, i)| (0..OUTS).map(|o| y_at(row, o) * w_at(expert_of(row), o, i)).sum())
            .collect(),
        MatmulLayout::Tn => (0..shape.experts * OUTS * INS)
            .map(|at| {
                let (expert, o, i) = (at / INS / OUTS, at / INS % OUTS, at % INS);
                let rows = bounds[expert] as usize..bounds[expert + 1] as usize;
                let base = if accumulate { w_at(expert, o, i) } else { 0.0 };
                base + rows.map(|row| y_at(row, o) * x_at(row, i)).sum::<f32>()
            })
            .collect(),
    }
}

fn product_matches(layout: MatmulLayout, load: &[usize], accumulate: bool, writes_empty_sums: bool) {
    let (experts, rows) = (load.len(), load.iter().sum::<usize>());
    let bounds: Vec<i32> = (0..=experts).map(|e| load[..e].iter().sum::<usize>() as i32).collect();
    let held = [numbers(1, rows * INS), numbers(2, rows * OUTS), numbers(3, experts * OUTS * INS)];
    let result = GroupRoles::of(layout).result as usize;
    let mut memory = EmulatedMemory::default();
    let tables = memory.with(Dtype::Float8E4m3, 0, &vec![0xa5_u8; GroupTables::BYTES]);
    let at = memory.with(Dtype::Int32, 0, &bounds);
    // A result without accumulation begins as NaN.
    let places = [0, 1, 2].map(|which| {
        let values = if which == result && !accumulate { vec![bf16::NAN; held[which].len()] } else { held[which].clone() };
        memory.with(Dtype::Bfloat16, 0, &values)
    });
    let [x, y, w] = places;
    let [a, b, c] = match layout {
        MatmulLayout::Nt => [x, w, y],
        MatmulLayout::Nn => [y, w, x],
        MatmulLayout::Tn => [y, x, w],
    };
    let shape = GroupedShape { layout, experts, rows, outs: OUTS, ins: INS };
    let mut library = Library { memory, tables: GroupTables(tables.addr()), writes_empty_sums };
    GroupedMatmul { shape, a, b, bounds: at, c, accumulate }.enqueue(&mut library).unwrap();
    let got: Vec<f32> = library.memory.read::<bf16>(c).into_iter().map(bf16::to_f32).collect();
    assert_eq!(got, expected(shape, &bounds, &held, accumulate), "{layout:?} of {load:?}, added: {accumulate}");
}

#[test]
fn products_by_cublaslt_are_those_of_each_expert() {
    for (load, writes_empty_sums) in LOADS.into_iter().flat_map(|load| [(load, false), (load, true)]) {
        product_matches(MatmulLayout::Nt, load, false, writes_empty_sums);
        product_matches(MatmulLayout::Nn, load, false, writes_empty_sums);
        product_matches(MatmulLayout::Tn, load, false, writes_empty_sums);
        product_matches(MatmulLayout::Tn, load, true, writes_empty_sums);
    }
}

#[test]
fn all_experts_together_are_as_many_operations() {
    let as_one = |layout| GroupedShape { layout, experts: 4, rows: 9, outs: OUTS, ins: INS }.as_one();
    let sizes = MatmulLayout::ALL.map(|layout| {
        let MatmulShape { m, n, k, .. } = as_one(layout);
        assert_eq!((as_one(layout).layout, m * n * k), (layout, 9 * OUTS * INS));
        [m, n, k]
    });
    assert_eq!(sizes, [[9, OUTS, INS], [9, INS, OUTS], [OUTS, INS, 9]]);
}

#[test]
fn more_experts_than_a_block_has_threads_have_tables_too() {
    let load: Vec<usize> = (0..300).map(|expert| expert % 3).collect();
    product_matches(MatmulLayout::Nt, &load, false, false);
}

#[test]
fn shapes_that_cublaslt_does_not_support_are_refused() {
    let refused = |dtype: Dtype, ins: usize, skew: u64| {
        let slice_of = |elems| DeviceSlice::at((1 << 32) + skew, elems, dtype);
        let shape = GroupedShape { layout: MatmulLayout::Nt, experts: 1, rows: 8, outs: OUTS, ins };
        let bounds = DeviceSlice::at(1 << 33, 2, Dtype::Int32);
        let (a, b, c) = (slice_of(8 * ins), slice_of(OUTS * ins), slice_of(8 * OUTS));
        let mut library = Library { memory: EmulatedMemory::default(), tables: GroupTables(0), writes_empty_sums: false };
        GroupedMatmul { shape, a, b, bounds, c, accumulate: false }.enqueue(&mut library).unwrap_err().to_string()
    };
    assert!(refused(Dtype::Float32, INS, 0).contains("16 x 24 in float32 by cuBLASLt"));
    assert!(refused(Dtype::Bfloat16, 20, 0).contains("rows of whole 16-byte vectors"));
    assert!(refused(Dtype::Bfloat16, INS, 2).contains("rows of whole 16-byte vectors"));
}
