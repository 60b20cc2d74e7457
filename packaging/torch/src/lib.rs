//! The extension module behind `superoffload.torch`: this project's Adam over the memory of torch's tensors on the CPU.
//!
//! It knows addresses alone, so that it links neither torch nor a version of Python. The Python side looks after what an address stands
//! for: dense, contiguous, on the CPU, alive until [`step`](_cpu_adam) returns.

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
use superoffload::internals::optim::{AdamHyper, AdamKernels, BLOCK, Isa};
use superoffload::internals::units::{ClipScale, NormSq};
use tensor::{Addresses, Formats, Span, Tensor};

/// Of a parameter group: lr, beta1, beta2, eps, weight decay.
type Hyper = (f64, f64, f64, f64, f64);
/// Of a parameter: index, addresses, formats, elements, place in the flat order, number of the step, group.
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

    /// Elements of a partial sum of squares: where a tensor is cut at a multiple of it, the norm keeps its bits.
    #[pymodule_export]
    const NORM_BLOCK: usize = BLOCK;

    /// Instruction sets that this CPU has, slowest first.
    #[pyfunction]
    fn instruction_sets() -> Vec<&'static str> {
        Isa::available().into_iter().map(Isa::name).collect()
    }

    /// The indices of two ranges of (address, bytes) that overlap, if any do.
    #[pyfunction]
    fn overlap(spans: Vec<(usize, usize)>) -> Option<(usize, usize)> {
        let spans = spans.into_iter().enumerate().map(|(owner, (start, bytes))| Span { start, bytes, owner, written: true });
        tensor::overlap(spans.collect())
    }

    #[pymodule_export]
    use super::arrays::Arrays;

    /// The sum of the squares of all updates' gradients, whose passes that sum them are done, and whether a gradient is not finite.
    /// Parameters are added in the order of their indices, so that the sum does not depend on which update holds which.
    #[pyfunction]
    fn squares(updates: Vec<PyRef<'_, Update>>) -> (f64, bool) {
        let requests: Vec<&Request> = updates.iter().map(|update| &*update.request).collect();
        (squares_of(&requests).0, requests.iter().any(|request| request.saw_nonfinite()))
    }

    /// The sum of squares of each parameter's gradient, by the parameter's index.
    #[pyfunction]
    fn squares_by_parameter(updates: Vec<PyRef<'_, Update>>) -> BTreeMap<usize, f64> {
        pieces::squares_by_parameter(&updates.iter().map(|update| &*update.request).collect::<Vec<_>>())
    }

    /// The norm of gradients with that sum of squares, and the factor on each; none: a gradient is not finite. `max_grad_norm` 0 does not
    /// clip.
    #[pyfunction]
    fn verdict(squares: f64, saw_nonfinite: bool, max_grad_norm: f64) -> (f64, Option<f32>) {
        let norm = NormSq(squares).norm(1.0);
        let scale = match Verdict::new(norm, saw_nonfinite, max_grad_norm) {
            Verdict::Commit => Some(1.0),
            Verdict::Clip(scale) => Some(scale.0),
            Verdict::SkipNonFinite => None,
        };
        (norm.0, scale)
    }

    /// Steps state and weights of all updates, gradients times `scale`, and counts the step. Python runs no handler of a signal before this
    /// returns, so that Ctrl-C finds weights, moments and count of one step.
    #[pyfunction]
    fn step(py: Python<'_>, updates: Vec<PyRef<'_, Update>>, scale: f32) -> PyResult<()> {
        updates.iter().try_for_each(|update| {
            update.run(py, PassKind::Step { scale })?;
            // SAFETY: the pass is done, and the Python side holds the counts, which it touches with the GIL alone.
            unsafe { update.request.count_steps() };
            Ok(())
        })
    }

    /// Gradients with all that a step of them touches. A method is a pass over them, with the GIL released; what they touch must stay where
    /// it is until the last one has returned.
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

        /// Sums the gradients' squares.
        pub(super) fn sums(&self, py: Python<'_>) -> PyResult<()> {
            self.run(py, PassKind::Sums)
        }

        /// Sums their squares and writes the weights of a step without clipping.
        fn speculate(&self, py: Python<'_>) -> PyResult<()> {
            self.run(py, PassKind::Speculate)
        }

        /// The same after the state was stepped as by `before.commit(scale)`, in one pass over it.
        fn commit_then_speculate(&self, py: Python<'_>, before: &Self, scale: f32) -> PyResult<()> {
            if !self.request.follows(&before.request) {
                return Err(PyValueError::new_err("commit_then_speculate: the step before is one of other arrays"));
            }
            self.run(py, PassKind::CommitThenSpeculate { before: before.request.clone(), scale })
        }

        /// Writes the weights of a step whose gradients are taken times `scale`. The state stays as it is.
        fn weights(&self, py: Python<'_>, scale: f32) -> PyResult<()> {
            self.run(py, PassKind::Weights { scale })
        }

        /// Steps the state as that step does. The weights stay as they are.
        fn commit(&self, py: Python<'_>, scale: f32) -> PyResult<()> {
            self.run(py, PassKind::Commit { scale })
        }

        /// Writes the weights of the state as it is.
        fn emit(&self, py: Python<'_>) -> PyResult<()> {
            self.run(py, PassKind::Emit)
        }
    }

    impl Update {
        pub(crate) fn of(tensors: Vec<Tensor>, kernels: AdamKernels, threads: usize) -> Self {
            Self { request: Arc::new(Request::new(tensors, kernels)), threads }
        }

        fn run(&self, py: Python<'_>, kind: PassKind) -> PyResult<()> {
            let pass = Pass::new(&self.request, kind);
            py.detach(|| pools::run(pass, self.threads)).map_err(|error| PyRuntimeError::new_err(error.to_string()))
        }
    }

    /// Whether speculation has lately held often enough to pay: the rule of the engine.
    #[pyclass]
    #[derive(Default)]
    struct History(SpeculationHistory);

    #[pymethods]
    impl History {
        #[new]
        fn new() -> Self {
            Self::default()
        }

        /// Notes what [`verdict`] gave.
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
