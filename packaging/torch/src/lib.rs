//! The extension module behind `superoffload.torch`: this project's Adam over the memory of torch's tensors on the CPU.
//!
//! It knows addresses alone, so that it links neither torch nor a version of Python. The Python side looks after what an address stands
//! for: dense, contiguous, on the CPU, alive until [`step`](_cpu_adam) returns.

mod pieces;
mod pools;
mod tensor;

use pieces::{Pass, Request};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use superoffload::internals::engine::Verdict;
use superoffload::internals::optim::{AdamHyper, AdamKernels, Isa};
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
        let kernels = kernels(isa)?;
        let groups: Vec<AdamHyper> = groups.into_iter().map(hyper).collect();
        let tensors = given.into_iter().map(|given| Tensor::new(given, &groups).map_err(PyValueError::new_err));
        let tensors = tensors.collect::<PyResult<Vec<_>>>()?;
        if let Some((one, other)) = tensor::overlap(tensors.iter().flat_map(Tensor::spans).collect()) {
            let whose = if one == other { format!("arrays of parameter {one}") } else { format!("parameters {one} and {other}") };
            let why = format!("step: {whose} share memory: weights, gradient and state each need their own, as .clone() gives");
            return Err(PyValueError::new_err(why));
        }
        py.detach(move || run(Request::new(tensors, kernels), threads, max_grad_norm)).map_err(|e| PyRuntimeError::new_err(e.to_string()))
    }
}

fn run(request: Request, threads: usize, max_grad_norm: Option<f64>) -> superoffload::Result<(Option<f64>, Option<f32>)> {
    let request = std::sync::Arc::new(request);
    let Some(max_norm) = max_grad_norm else {
        pools::run(Pass::step(&request, 1.0), threads)?;
        return Ok((None, Some(1.0)));
    };
    pools::run(Pass::norm(&request), threads)?;
    let norm = request.norm();
    let scale = match Verdict::new(norm, request.saw_nonfinite(), max_norm) {
        Verdict::Commit => 1.0,
        Verdict::Clip(scale) => scale.0,
        Verdict::SkipNonFinite => return Ok((Some(norm.0), None)),
    };
    pools::run(Pass::step(&request, scale), threads)?;
    Ok((Some(norm.0), Some(scale)))
}
