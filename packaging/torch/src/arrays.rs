//! State arrays of an optimizer for CPU parameters. Their addresses are checked once and used in many steps.

use crate::tensor::{Addresses, Format, MomentFormat, Span, Tensor, overlap};
use crate::{_cpu_adam::Update, Hyper, hyper, kernels};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use superoffload::internals::optim::AdamHyper;

/// Addresses of fp32 weights, first moments, second moments, working weights, and step count. The address of the working weights is 0 if
/// the parameter itself is in fp32.
type Places = (usize, usize, usize, usize, usize);
/// A parameter: index, addresses, formats of moments and working weights, number of elements, offset in the flat order, and parameter
/// group.
type Given = (usize, Places, (MomentFormat, Format), usize, usize, usize);

/// A parameter and its state, without a gradient.
struct Array {
    given: Given,
}

impl Array {
    fn addresses(&self, gradient: usize) -> Addresses {
        let (p, m, v, out, _) = self.given.1;
        (p, m, v, gradient, out)
    }

    /// Creates the tensor of a step with a gradient at this address and in this format.
    fn tensor(&self, gradient: usize, format: Format, groups: &[AdamHyper]) -> Result<Tensor, String> {
        let (index, (.., count), (moments, weights), elems, first, group) = self.given;
        Tensor::counted((index, self.addresses(gradient), (moments, format, weights), elems, first, count, group), groups)
    }

    fn written(&self) -> impl Iterator<Item = Span> {
        let (owner, (p, m, v, out, count), (moments, weights), elems, ..) = self.given;
        let span = |start: usize, bytes| Span { start, bytes: if start == 0 { 0 } else { bytes }, owner, written: true };
        let moment = moments.bytes(elems);
        [span(p, 4 * elems), span(m, moment), span(v, moment), span(out, elems * weights.bytes()), span(count, 4)].into_iter()
    }
}

/// Parameters and their state, which are stepped together.
#[pyclass(frozen)]
pub(crate) struct Arrays {
    arrays: Vec<Array>,
    /// All memory that a step writes, sorted by address, without overlaps.
    written: Vec<Span>,
}

#[pymethods]
impl Arrays {
    #[new]
    fn new(given: Vec<Given>) -> PyResult<Self> {
        let arrays: Vec<Array> = given.into_iter().map(|given| Array { given }).collect();
        let mut written: Vec<Span> = arrays.iter().flat_map(Array::written).filter(|span| span.bytes > 0).collect();
        written.sort_unstable_by_key(|span| span.start);
        if let Some(both) = overlap(written.clone()) {
            return Err(shared(both));
        }
        Ok(Self { arrays, written })
    }

    /// Creates a step from the gradients at `addresses`. A gradient has the format of its working weights unless `others` lists its
    /// position with another format.
    fn gradients(
        &self,
        addresses: Vec<usize>,
        others: Vec<(usize, Format)>,
        groups: Vec<Hyper>,
        threads: usize,
        isa: &str,
    ) -> PyResult<Update> {
        let groups: Vec<AdamHyper> = groups.into_iter().map(hyper).collect();
        let mut formats: Vec<Format> = self.arrays.iter().map(|array| array.given.2.1).collect();
        for (position, format) in others {
            *formats.get_mut(position).ok_or_else(|| PyValueError::new_err("gradients: there is no such position"))? = format;
        }
        let mut tensors = Vec::with_capacity(self.arrays.len());
        if addresses.len() != self.arrays.len() {
            return Err(PyValueError::new_err(format!("gradients: {} of {} parameters", addresses.len(), self.arrays.len())));
        }
        for ((array, address), format) in self.arrays.iter().zip(addresses).zip(formats) {
            let tensor = array.tensor(address, format, &groups).map_err(PyValueError::new_err)?;
            self.check_apart(Span { start: address, bytes: tensor.elems * format.bytes(), owner: array.given.0, written: false })?;
            tensors.push(tensor);
        }
        Ok(Update::of(tensors, kernels(isa)?, threads))
    }
}

impl Arrays {
    /// Checks that a gradient does not overlap memory that a step writes. Gradients may overlap each other.
    fn check_apart(&self, gradient: Span) -> PyResult<()> {
        let before = self.written.partition_point(|span| span.start < gradient.start + gradient.bytes);
        match self.written[..before].last() {
            Some(last) if gradient.bytes > 0 && last.start + last.bytes > gradient.start => {
                Err(shared((last.owner.min(gradient.owner), last.owner.max(gradient.owner))))
            }
            _ => Ok(()),
        }
    }
}

/// The error for overlapping arrays of two parameters, or of one.
pub(crate) fn shared((one, other): (usize, usize)) -> PyErr {
    let arrays = if one == other { format!("arrays of parameter {one}") } else { format!("parameters {one} and {other}") };
    PyValueError::new_err(format!("step: {arrays} share memory: weights, gradient and state need separate memory; use .clone()"))
}
