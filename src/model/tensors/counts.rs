//! Numbers of parameters, and of rows of gates.

use super::{Module, Role, TensorSpec, TensorTable};

impl TensorSpec {
    /// Leading rows of gates in a projection to queries, keys and values; 0 without gates.
    pub(in crate::model) fn gate_rows(&self) -> usize {
        self.files.iter().filter_map(|file| file.interleaved.map(|order| order.gate_rows(file.rows))).sum()
    }

    /// Elements in the products of a token: all, or those of the experts that it uses.
    fn multiplied_elems(&self) -> usize {
        self.elems() / self.experts.0 * self.experts.1
    }
}

impl TensorTable {
    /// Number of parameters, trained and frozen, without padding.
    pub fn params(&self) -> usize {
        self.all().filter(|spec| spec.first_token().is_none()).map(TensorSpec::elems).sum()
    }

    /// Number of trained parameters, without padding.
    pub fn trained_params(&self) -> usize {
        self.specs.iter().map(TensorSpec::elems).sum()
    }

    /// Number of parameters in matrix products: all matrices, with only the experts that a token uses. A tied embedding counts as the
    /// output matrix; an embedding alone does not count.
    pub(crate) fn matmul_params(&self) -> usize {
        self.product_matrices().map(TensorSpec::multiplied_elems).sum()
    }

    /// Parameters of [`TensorTable::matmul_params`] by product: the forward pass, gradients of inputs, and gradients of weights.
    pub(in crate::model) fn multiplied_params(&self) -> [usize; 3] {
        let counts: [fn(&Self, &TensorSpec) -> bool; 3] =
            [|_, _| true, |table, spec| table.runs_backward(table.reads(spec)), |_, spec| !spec.frozen];
        let [forward, to_input, to_weight] =
            counts.map(|counts| self.product_matrices().filter(|spec| counts(self, spec)).map(TensorSpec::multiplied_elems).sum());
        [forward, to_input, to_weight + self.output_rows().map_or(0, TensorSpec::elems)]
    }

    /// The trained rows of a frozen output matrix.
    fn output_rows(&self) -> Option<&TensorSpec> {
        self.find(Module::Head, Role::LmHeadRows).or_else(|| self.find(Module::Embed, Role::WteRows).filter(|_| self.is_tied()))
    }

    /// Whether the output matrix is the token embedding.
    fn is_tied(&self) -> bool {
        self.find(Module::Head, Role::LmHead).is_none()
    }

    /// The module that multiplies by the matrix `spec`.
    fn reads(&self, spec: &TensorSpec) -> Module {
        if spec.role == Role::Wte { Module::Head } else { spec.module }
    }

    /// The matrices `[out, in]` of the matrix products: see [`TensorTable::matmul_params`].
    pub(crate) fn product_matrices(&self) -> impl Iterator<Item = &TensorSpec> {
        let tied = self.is_tied();
        let is_other = |spec: &TensorSpec| matches!(spec.role, Role::Wpe | Role::DeltaConv | Role::WteRows | Role::LmHeadRows);
        let counts = move |spec: &&TensorSpec| spec.shape.len() == 2 && !is_other(spec) && (tied || spec.role != Role::Wte);
        self.all().filter(counts)
    }
}
