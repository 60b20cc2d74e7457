//! Tensors of a layer with a gated delta rule.

use super::interleaved::Interleaved;
use super::{HfPart, Init, Module, Role, TableBuilder};
use crate::device::TAPS;
use crate::model::family::delta::DeltaFiles;
use crate::model::layer_shape::Attn;

impl TableBuilder<'_> {
    /// Tensors of a gated delta rule, without the norms of the residual stream.
    pub(super) fn delta(&mut self, module: Module, attn: Attn, at: impl Fn(&str) -> String) {
        let (heads, channels, init) = (attn.heads, self.shape.channels, self.matrix_init());
        let name = |name: &str| at(&format!("linear_attn.{name}"));
        let (rows, cols) = (attn.qkv_cols(), attn.out_cols());
        self.whole(module, Role::AttnOut, vec![channels, cols], self.residual_init(), name("out_proj.weight"));
        self.whole(module, Role::DeltaNorm, vec![attn.head_dim], Init::Ones, name("norm.weight"));
        self.whole(module, Role::DeltaDecayBias, vec![heads], Init::Ones, name("dt_bias"));
        self.whole(module, Role::DeltaRate, vec![heads], Init::LogUniform { low: 0.01, high: 16.0 }, name("A_log"));
        // A file has a matrix of one row for each channel.
        let conv = HfPart { stacked: Some(rows), ..HfPart::plain(name("conv1d.weight"), 0, rows) };
        self.push(module, Role::DeltaConv, vec![rows, TAPS], init, vec![conv]);
        if self.shape.family.spec().delta == Some(DeltaFiles::ByHead) {
            let (shared, dim) = (heads / attn.kv_heads, attn.head_dim);
            let by_head = [
                (Role::DeltaDecay, "in_proj_ba", Interleaved::new(&[shared, shared]), 2 * heads),
                (Role::Qkv, "in_proj_qkvz", Interleaved::new(&[dim, dim, shared * dim, shared * dim]), rows + cols),
            ];
            for (role, file, order, rows) in by_head {
                let part = HfPart { interleaved: Some(order), ..HfPart::plain(name(&format!("{file}.weight")), 0, rows) };
                self.push(module, role, vec![rows, channels], init, vec![part]);
            }
            return;
        }
        for (role, file, rows) in [
            (Role::DeltaDecay, "in_proj_a", heads),
            (Role::DeltaStrength, "in_proj_b", heads),
            (Role::DeltaGate, "in_proj_z", cols),
            (Role::Qkv, "in_proj_qkv", rows),
        ] {
            self.whole(module, role, vec![rows, channels], init, name(&format!("{file}.weight")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::shape;
    use super::super::{TensorSpec, TensorTable};
    use super::*;

    #[test]
    fn a_gated_delta_rule_has_its_hugging_face_tensors() {
        let table = TensorTable::new(&shape("Qwen3_5ForCausalLM"));
        let specs = table.specs().iter().filter(|spec| spec.module == Module::Layer(0) && spec.name.contains("attn."));
        let found: Vec<_> = specs
            .flat_map(|spec| {
                spec.parts().map(move |part| (part.name.replace("model.layers.0.linear_attn.", ""), spec.part_shape(&part), spec.decay))
            })
            .collect();
        let want = [
            ("out_proj.weight", vec![32, 32], true),
            ("norm.weight", vec![8], false),
            ("dt_bias", vec![4], false),
            ("A_log", vec![4], true),
            ("conv1d.weight", vec![64, 1, 4], true),
            ("in_proj_a.weight", vec![4, 32], true),
            ("in_proj_b.weight", vec![4, 32], true),
            ("in_proj_z.weight", vec![32, 32], true),
            ("in_proj_qkv.weight", vec![64, 32], true),
        ];
        assert_eq!(found, want.map(|(name, shape, decay)| (name.to_string(), shape, decay)));
        let conv = table.find(Module::Layer(0), Role::DeltaConv).unwrap().elems();
        let matrices: usize =
            table.specs().iter().filter(|spec| spec.shape.len() == 2 && spec.role != Role::Wte).map(TensorSpec::elems).sum();
        assert_eq!(table.matmul_params(), matrices - conv);
    }

    /// Three passes over four states of 8 x 8, each with three products of two FLOPs, and scores of four heads of 8 in the other layer.
    #[test]
    fn a_gated_delta_rule_counts_as_its_recurrence() {
        let shape = shape("Qwen3_5ForCausalLM");
        assert_eq!(shape.layers.iter().map(|layer| layer.attn.is_delta()).collect::<Vec<_>>(), [true, false]);
        for tokens in [16, 64] {
            let (count, params) = (tokens as f64, TensorTable::new(&shape).matmul_params() as f64);
            let (rule, scores) = (3.0 * 4.0 * 64.0 * 6.0, 6.0 * 32.0 * count);
            assert_eq!(shape.flops_per_step(1, tokens), count * (6.0 * params + rule + scores));
        }
    }

    /// Two heads of keys of 3 channels, each with two heads of values: rows of the file are moved as `torch.split` and `torch.cat` of
    /// `transformers` move them.
    #[test]
    fn projections_that_alternate_by_head_of_keys_are_put_apart() {
        let order = Interleaved::new(&[3, 3, 6, 6]);
        let file = ["q0", "k0", "v0", "z0", "q1", "k1", "v1", "z1"].into_iter().zip([3, 3, 6, 6].repeat(2));
        let file: Vec<String> = file.flat_map(|(name, rows)| (0..rows).map(move |row| format!("{name}.{row}"))).collect();
        let table: Vec<String> = ["z0", "z1", "q0", "q1", "k0", "k1", "v0", "v1"]
            .into_iter()
            .flat_map(|name| file.iter().filter(move |row| row.starts_with(name)).cloned())
            .collect();
        let part = HfPart { interleaved: Some(order), ..HfPart::plain("in_proj_qkvz.weight".into(), 0, file.len()) };
        for (row, name) in file.iter().enumerate() {
            assert_eq!(table[part.table_row(row)], *name);
        }
        let mut by_run = vec![""; file.len()];
        for (row, table_row, rows) in order.runs(file.len()) {
            (0..rows).for_each(|at| by_run[table_row + at] = &file[row + at]);
        }
        assert_eq!(by_run, table);
    }

    #[test]
    fn a_rule_by_head_has_its_gates_and_decays_before_the_other_rows() {
        let table = TensorTable::new(&shape("Qwen3NextForCausalLM"));
        let rows = |role| table.find(Module::Layer(0), role).map(|spec| (spec.shape[0], spec.gate_rows()));
        assert_eq!(rows(Role::Qkv), Some((64 + 32, 32)), "queries, keys, values and gates");
        assert_eq!(rows(Role::DeltaDecay), Some((4 + 4, 4)), "decays and strengths");
        assert_eq!((rows(Role::DeltaGate), rows(Role::DeltaStrength)), (None, None));
    }

    #[test]
    fn rows_of_gates_and_queries_alternate_in_files_by_head() {
        let table = TensorTable::new(&shape("Qwen3_5ForCausalLM"));
        let spec = table.find(Module::Layer(1), Role::Qkv).unwrap();
        let part = spec.parts().next().unwrap();
        // Four heads of eight channels: gates are rows 0 to 31 of the table, and queries are rows 32 to 63.
        assert_eq!([0, 7, 8, 15, 16, 63].map(|row| part.table_row(row)), [32, 39, 0, 7, 40, 31]);
        assert_eq!((spec.shape[0], spec.gate_rows()), (64 + 2 * 16, 32));
    }
}
