//! The extension module behind `superoffload.torch`: this project's Adam over the memory of torch's tensors on the CPU.
//!
//! It knows addresses alone, so that it links neither torch nor a version of Python. The Python side looks after what an address stands
//! for: dense, contiguous, on the CPU, alive until [`step`](_cpu_adam) returns.

mod pieces;
mod pools;
mod tensor;

use pieces::{Pass, PassKind, Request};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
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

    /// Steps all tensors in one go. Returns the gradients' norm if `max_grad_norm` is given, and their factor; no factor: the step was left
    /// out, because a gradient was not finite.
    #[pyfunction]
    fn step(
        py: Python<'_>,
        given: Vec<Given>,
        groups: Vec<Hyper>,
        threads: usize,
        isa: &str,
        max_grad_norm: Option<f64>,
    ) -> PyResult<(Option<f64>, Option<f32>)> {
        let update = Update::new(given, groups, threads, isa)?;
        let Some(max_norm) = max_grad_norm else {
            update.step(py, 1.0)?;
            return Ok((None, Some(1.0)));
        };
        update.sums(py)?;
        let (norm, scale) = judge([&update], max_norm);
        if let Some(scale) = scale {
            update.step(py, scale)?;
        }
        Ok((Some(norm), scale))
    }

    /// The norm of the gradients of all updates, in their order, whose squares have been summed, and the factor on each; none: a gradient is
    /// not finite. `max_grad_norm` 0 does not clip.
    #[pyfunction]
    fn verdict(updates: Vec<PyRef<'_, Update>>, max_grad_norm: f64) -> (f64, Option<f32>) {
        judge(updates.iter().map(|update| &**update), max_grad_norm)
    }

    /// Gradients with all that a step of them touches. A method is a pass over them, with the GIL released; what they touch must stay where
    /// it is until the last one has returned.
    #[pyclass(frozen)]
    pub(super) struct Update {
        pub(super) request: Arc<Request>,
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
            if let Some((one, other)) = tensor::overlap(tensors.iter().flat_map(Tensor::spans).collect()) {
                let whose = if one == other { format!("arrays of parameter {one}") } else { format!("parameters {one} and {other}") };
                let why = format!("step: {whose} share memory: weights, gradient and state each need their own, as .clone() gives");
                return Err(PyValueError::new_err(why));
            }
            Ok(Self { request: Arc::new(Request::new(tensors, kernels)), threads })
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
        /// Steps state and weights in one pass.
        pub(super) fn step(&self, py: Python<'_>, scale: f32) -> PyResult<()> {
            self.run(py, PassKind::Step { scale })
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

fn judge<'a>(updates: impl IntoIterator<Item = &'a _cpu_adam::Update>, max_norm: f64) -> (f64, Option<f32>) {
    let (mut sum, mut saw_nonfinite) = (NormSq(0.0), false);
    for update in updates {
        sum = update.request.fold_onto(sum);
        saw_nonfinite |= update.request.saw_nonfinite();
    }
    let norm = sum.norm(1.0);
    let scale = match Verdict::new(norm, saw_nonfinite, max_norm) {
        Verdict::Commit => Some(1.0),
        Verdict::Clip(scale) => Some(scale.0),
        Verdict::SkipNonFinite => None,
    };
    (norm.0, scale)
}
