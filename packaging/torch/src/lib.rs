//! The extension module of `superoffload.torch`. It runs this project's Adam kernels on the memory of torch's CPU tensors.
//!
//! The module gets only addresses, so it depends neither on torch nor on a Python version. The Python side ensures that each address
//! belongs to a dense, contiguous CPU tensor that lives until [`step`](_cpu_adam) returns.

mod arrays;
mod fp_mode;
mod pieces;
mod pools;
mod tensor;

use pieces::{Pass, PassKind, Request, squares_of};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::Arc;
use superoffload::internals::engine::{SpeculationHistory, Verdict};
use superoffload::internals::optim::{AdamHyper, AdamKernels, BLOCK, ClipMemory, ClipRule, Isa, MomentGroup, MomentKind};
use superoffload::internals::units::{ClipScale, NormSq};
use tensor::{Addresses, Formats, MomentFormat, Span, Tensor};

/// A parameter group: lr, beta1, beta2, eps, weight decay.
type Hyper = (f64, f64, f64, f64, f64);
/// A parameter: index, addresses, formats, number of elements, offset in the flat order, step number, group.
type Given = (usize, Addresses, Formats, usize, usize, u64, usize);

fn kernels(isa: &str) -> PyResult<AdamKernels> {
    let named = if isa == "auto" { Ok(Isa::detect()) } else { isa.parse() };
    named.and_then(AdamKernels::new).map_err(|error| PyValueError::new_err(format!("isa: {error}")))
}

fn hyper((lr, beta1, beta2, eps, weight_decay): Hyper) -> AdamHyper {
    AdamHyper { lr, beta1, beta2, eps, weight_decay }
}

#[pymodule]
mod _cpu_adam {
    use super::*;

    /// Number of elements in a block of the gradient norm. A tensor that is split at multiples of this number has a bit-identical norm.
    #[pymodule_export]
    const NORM_BLOCK: usize = BLOCK;

    /// Instruction sets that this CPU supports, slowest first.
    #[pyfunction]
    fn instruction_sets() -> Vec<&'static str> {
        Isa::available().into_iter().map(Isa::name).collect()
    }

    /// The indices of two ranges (address, bytes) that overlap, if there are any.
    #[pyfunction]
    fn overlap(spans: Vec<(usize, usize)>) -> Option<(usize, usize)> {
        let spans = spans.into_iter().enumerate().map(|(owner, (start, bytes))| Span { start, bytes, owner, written: true });
        tensor::overlap(spans.collect())
    }

    /// Number of elements in a group of moments in 8 bits. A parameter's moments begin with a group.
    #[pymodule_export]
    const MOMENT_GROUP: usize = MomentGroup::ELEMS;

    /// Bytes of one moment of `elems` elements in this format.
    #[pyfunction]
    fn moment_bytes(format: MomentFormat, elems: usize) -> usize {
        format.bytes(elems)
    }

    /// Largest beta1 that moments in this format can follow.
    #[pyfunction]
    fn beta1_max(format: MomentFormat) -> f64 {
        format.beta1_max()
    }

    /// Stores `elems` values of a moment in 8 bits. The values are float32. The `second` moment is rounded at random, by
    /// a fixed key.
    #[pyfunction]
    fn pack_moment(second: bool, from_address: usize, to_address: usize, elems: usize) -> PyResult<()> {
        tensor::pack_moment(kind(second), (from_address, to_address), elems).map_err(PyValueError::new_err)
    }

    /// Writes the float32 values of a moment that is stored in 8 bits; see [`pack_moment`].
    #[pyfunction]
    fn unpack_moment(second: bool, from_address: usize, to_address: usize, elems: usize) -> PyResult<()> {
        tensor::unpack_moment(kind(second), (from_address, to_address), elems).map_err(PyValueError::new_err)
    }

    const fn kind(second: bool) -> MomentKind {
        if second { MomentKind::Second } else { MomentKind::First }
    }

    #[pymodule_export]
    use super::arrays::Arrays;

    /// Returns the sum of squares over the gradients of all updates, and whether a gradient has NaN or infinity. The updates must have run
    /// a pass that computes sums. Parameters are added in the order of their indices, so the sum does not depend on the distribution of
    /// parameters over updates.
    #[pyfunction]
    fn squares(updates: Vec<PyRef<'_, Update>>) -> (f64, bool) {
        let requests: Vec<&Request> = updates.iter().map(|update| &*update.request).collect();
        (squares_of(&requests).0, requests.iter().any(|request| request.saw_nonfinite()))
    }

    /// Returns the sum of squares of each parameter's gradient, by parameter index.
    #[pyfunction]
    fn squares_by_parameter(updates: Vec<PyRef<'_, Update>>) -> BTreeMap<usize, f64> {
        pieces::squares_by_parameter(&updates.iter().map(|update| &*update.request).collect::<Vec<_>>())
    }

    /// Returns the gradient norm for a sum of squares, and the factor for all gradients; the factor is `None` if a gradient is not finite.
    /// `max_grad_norm` 0 disables clipping.
    #[pyfunction]
    fn verdict(squares: f64, saw_nonfinite: bool, max_grad_norm: f64) -> (f64, Option<f32>) {
        let norm = NormSq(squares).norm(1.0);
        let rule = ClipRule::GlobalNorm { max_norm: max_grad_norm };
        let scale = match Verdict::new(norm, saw_nonfinite, rule, &mut ClipMemory::default()) {
            Verdict::Commit => Some(1.0),
            Verdict::Clip(scale) => Some(scale.0),
            Verdict::SkipNonFinite => None,
        };
        (norm.0, scale)
    }

    /// Runs a step of all updates with gradients times `scale`, and increments the step counts. Python runs no signal handler before this
    /// function returns, so after Ctrl-C weights, moments and step counts belong to the same step.
    #[pyfunction]
    fn step(py: Python<'_>, updates: Vec<PyRef<'_, Update>>, scale: f32) -> PyResult<()> {
        updates.iter().try_for_each(|update| {
            update.run(py, PassKind::Step { scale })?;
            // SAFETY: the pass is done. The Python side owns the counts and accesses them only with the GIL held.
            unsafe { update.request.count_steps() };
            Ok(())
        })
    }

    /// Gradients together with the arrays that a step of them reads and writes. Each method runs one pass over these arrays without the
    /// GIL. The arrays must stay in place until the last pass has returned.
    #[pyclass(frozen)]
    pub(crate) struct Update {
        request: Arc<Request>,
        threads: usize,
    }

    #[pymethods]
    impl Update {
        #[new]
        pub(super) fn new(given: Vec<Given>, groups: Vec<Hyper>, threads: usize, isa: &str) -> PyResult<Self> {
            let kernels = kernels(isa)?;
            let groups: Vec<AdamHyper> = groups.into_iter().map(hyper).collect();
            let tensors = given.into_iter().map(|given| Tensor::new(given, &groups).map_err(PyValueError::new_err));
            let tensors = tensors.collect::<PyResult<Vec<_>>>()?;
            match tensor::overlap(tensors.iter().flat_map(Tensor::spans).collect()) {
                Some(both) => Err(arrays::shared(both)),
                None => Ok(Self::of(tensors, kernels, threads)),
            }
        }

        /// Computes the gradients' sums of squares.
        pub(super) fn sums(&self, py: Python<'_>) -> PyResult<()> {
            self.run(py, PassKind::Sums)
        }

        /// Computes the gradients' sums of squares, and writes the new weights of a step without clipping.
        fn speculate(&self, py: Python<'_>) -> PyResult<()> {
            self.run(py, PassKind::Speculate)
        }

        /// Steps the state as `before.commit(scale)` does, then does the work of `speculate`, in one pass over memory.
        fn commit_then_speculate(&self, py: Python<'_>, before: &Self, scale: f32) -> PyResult<()> {
            let before = self.after(before, "commit_then_speculate")?;
            self.run(py, PassKind::CommitThenSpeculate { before, scale })
        }

        /// Steps the state as `before.commit(scale)` does, and computes the gradients' sums of squares, in one pass.
        fn commit_then_sums(&self, py: Python<'_>, before: &Self, scale: f32) -> PyResult<()> {
            let before = self.after(before, "commit_then_sums")?;
            self.run(py, PassKind::CommitThenSums { before, scale })
        }

        /// Writes the new weights of a step with gradients times `scale`. The state is unchanged.
        fn weights(&self, py: Python<'_>, scale: f32) -> PyResult<()> {
            self.run(py, PassKind::Weights { scale })
        }

        /// Steps the state with gradients times `scale`, and writes the new weights.
        fn step(&self, py: Python<'_>, scale: f32) -> PyResult<()> {
            self.run(py, PassKind::StepAtOnce { scale })
        }

        /// Steps the state with gradients times `scale`. The weights are unchanged.
        fn commit(&self, py: Python<'_>, scale: f32) -> PyResult<()> {
            self.run(py, PassKind::Commit { scale })
        }
    }

    impl Update {
        pub(crate) fn of(tensors: Vec<Tensor>, kernels: AdamKernels, threads: usize) -> Self {
            Self { request: Arc::new(Request::new(tensors, kernels)), threads }
        }

        /// The request of the previous step, which must have the same state arrays.
        fn after(&self, before: &Self, operation: &str) -> PyResult<Arc<Request>> {
            if self.request.follows(&before.request) {
                return Ok(before.request.clone());
            }
            Err(PyValueError::new_err(format!("{operation}: the previous step has other arrays")))
        }

        fn run(&self, py: Python<'_>, kind: PassKind) -> PyResult<()> {
            let pass = Pass::new(&self.request, kind);
            py.detach(|| pools::run(pass, self.threads)).map_err(|error| PyRuntimeError::new_err(error.to_string()))
        }
    }

    /// The engine's rule that decides from recent steps whether speculation is worthwhile.
    #[pyclass]
    #[derive(Default)]
    struct History(SpeculationHistory);

    #[pymethods]
    impl History {
        #[new]
        fn new() -> Self {
            Self::default()
        }

        /// Records the factor that [`verdict`] returned.
        fn record(&mut self, scale: Option<f32>) {
            let verdict = match scale {
                Some(1.0) => Verdict::Commit,
                Some(scale) => Verdict::Clip(ClipScale(scale)),
                None => Verdict::SkipNonFinite,
            };
            self.0.record(verdict);
        }

        fn pays(&self) -> bool {
            self.0.pays()
        }
    }
}
