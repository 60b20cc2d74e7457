//! A pass as a job of the thread pool. The tensors are split into pieces of about equal size. Small tensors share a piece, which avoids a
//! hand-over for each of them.

use crate::fp_mode::DefaultMode;
use crate::tensor::Tensor;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use superoffload::internals::host::Job;
use superoffload::internals::optim::{AdamKernels, BLOCK, fold};
use superoffload::internals::units::NormSq;

/// Number of elements of a piece: a multiple of the norm's block size, 1.8 MB of fp32 state and gradients, a few hundred microseconds on
/// one core.
const PIECE_ELEMS: usize = 16 * BLOCK;

/// A range of one tensor.
struct Part {
    tensor: usize,
    elems: Range<usize>,
    /// Index of the part's first partial sum of squares.
    first_partial: usize,
}

/// The tensors of a step, split into pieces.
pub(crate) struct Request {
    tensors: Vec<Tensor>,
    kernels: AdamKernels,
    parts: Vec<Part>,
    /// Ranges of indices into `parts`.
    pieces: Vec<Range<usize>>,
    /// Partial sums of squares, as the bits of `f32` values.
    partials: Vec<AtomicU32>,
    nonfinite: AtomicBool,
}

impl Request {
    pub(crate) fn new(tensors: Vec<Tensor>, kernels: AdamKernels) -> Self {
        let (mut parts, mut pieces, mut partials, mut left) = (Vec::new(), Vec::new(), 0, 0);
        for (tensor, elems) in tensors.iter().map(|tensor| tensor.elems).enumerate() {
            for start in (0..elems).step_by(PIECE_ELEMS) {
                let elems = start..elems.min(start + PIECE_ELEMS);
                if elems.len() > left {
                    pieces.push(parts.len()..parts.len());
                    left = PIECE_ELEMS;
                }
                left -= elems.len();
                let blocks = elems.len().div_ceil(BLOCK);
                parts.push(Part { tensor, elems, first_partial: partials });
                partials += blocks;
                if let Some(piece) = pieces.last_mut() {
                    piece.end = parts.len();
                }
            }
        }
        let partials = (0..partials).map(|_| AtomicU32::new(0)).collect();
        Self { tensors, kernels, parts, pieces, partials, nonfinite: AtomicBool::new(false) }
    }

    /// Partial sums of squares with their positions in the flat order. Valid after a pass that computes sums.
    fn sums(&self) -> impl Iterator<Item = ((usize, usize), &[AtomicU32])> {
        self.parts.iter().map(|part| {
            let blocks = part.elems.len().div_ceil(BLOCK);
            (self.tensors[part.tensor].place(part.elems.start), &self.partials[part.first_partial..][..blocks])
        })
    }

    /// Whether both requests step the same state arrays.
    pub(crate) fn follows(&self, before: &Self) -> bool {
        self.tensors.len() == before.tensors.len() && self.tensors.iter().zip(&before.tensors).all(|(next, before)| next.follows(before))
    }

    /// # Safety
    /// The counts of all tensors are valid, and no other code accesses them.
    pub(crate) unsafe fn count_steps(&self) {
        // SAFETY: guaranteed by the caller.
        self.tensors.iter().for_each(|tensor| unsafe { tensor.count_step() });
    }

    pub(crate) fn saw_nonfinite(&self) -> bool {
        self.nonfinite.load(Ordering::Relaxed)
    }

    /// # Safety
    /// The gradient of `part` is valid, and no other code writes it.
    unsafe fn sum_squares(&self, part: &Part) {
        let mut sums = [0.0; PIECE_ELEMS / BLOCK];
        let sums = &mut sums[..part.elems.len().div_ceil(BLOCK)];
        // SAFETY: guaranteed by the caller.
        let grads = unsafe { self.tensors[part.tensor].grads(&part.elems) };
        self.nonfinite.fetch_or(self.kernels.partials(grads, sums), Ordering::Relaxed);
        for (place, sum) in self.partials[part.first_partial..].iter().zip(sums) {
            place.store(sum.to_bits(), Ordering::Relaxed);
        }
    }
}

/// Partial sums of all requests in the flat order, each slice with its position.
fn in_order<'a>(requests: &[&'a Request]) -> Vec<((usize, usize), &'a [AtomicU32])> {
    let mut sums: Vec<_> = requests.iter().flat_map(|request| request.sums()).collect();
    sums.sort_unstable_by_key(|&(place, _)| place);
    sums
}

/// Adds the partial sums of one part.
fn add(sum: NormSq, partials: &[AtomicU32]) -> NormSq {
    let mut values = [0.0; PIECE_ELEMS / BLOCK];
    for (value, bits) in values.iter_mut().zip(partials) {
        *value = f32::from_bits(bits.load(Ordering::Relaxed));
    }
    fold(sum, &values[..partials.len()])
}

/// The sum of squares over the gradients of all requests.
pub(crate) fn squares_of(requests: &[&Request]) -> NormSq {
    in_order(requests).iter().fold(NormSq(0.0), |sum, (_, partials)| add(sum, partials))
}

/// The sum of squares of each parameter's gradient, by parameter index.
pub(crate) fn squares_by_parameter(requests: &[&Request]) -> BTreeMap<usize, f64> {
    let mut by_parameter = BTreeMap::new();
    for ((index, _), partials) in in_order(requests) {
        let sum = by_parameter.entry(index).or_insert(0.0);
        *sum = add(NormSq(*sum), partials).0;
    }
    by_parameter
}

pub(crate) enum PassKind {
    /// Computes sums of squares.
    Sums,
    /// Computes sums of squares, and writes the weights of a step without clipping.
    Speculate,
    /// Steps the state with the gradients of `before` times `scale`, then does the work of `Speculate`.
    CommitThenSpeculate { before: Arc<Request>, scale: f32 },
    /// Steps the state with the gradients of `before` times `scale`, and computes sums of squares.
    CommitThenSums { before: Arc<Request>, scale: f32 },
    /// Writes the weights of a step with gradients times `scale`. The state is unchanged.
    Weights { scale: f32 },
    /// Steps the state with gradients times `scale`. The weights are unchanged.
    Commit { scale: f32 },
    /// Steps the state with gradients times `scale`, and writes the new weights.
    StepAtOnce { scale: f32 },
    /// Takes changes of the weights into the state; then does the work of `StepAtOnce`.
    Step { scale: f32 },
}

/// One pass over all gradients.
pub(crate) struct Pass {
    request: Arc<Request>,
    kind: PassKind,
}

impl Pass {
    pub(crate) fn new(request: &Arc<Request>, kind: PassKind) -> Self {
        Self { request: request.clone(), kind }
    }
}

// SAFETY: the Python side keeps all tensors of a request alive until its passes are done. `overlap` has checked that written memory is not
// shared, and the parts of different pieces are disjoint.
unsafe impl Job for Pass {
    fn label(&self) -> (&'static str, u32) {
        ("cpu_adam", 0)
    }

    fn traffic_bytes(&self) -> u64 {
        0
    }

    fn pieces(&self) -> usize {
        self.request.pieces.len()
    }

    unsafe fn run(&self, piece: usize) {
        let _mode = DefaultMode::enter();
        let request = &*self.request;
        for part in &request.parts[request.pieces[piece].clone()] {
            let (tensor, kernels) = (&request.tensors[part.tensor], request.kernels);
            // SAFETY: the job has exclusive access to this memory (see above), and the caller runs each piece once.
            unsafe {
                match &self.kind {
                    PassKind::Sums => request.sum_squares(part),
                    PassKind::Speculate => {
                        request.sum_squares(part);
                        tensor.speculate(kernels, 1.0, &part.elems);
                    }
                    PassKind::CommitThenSpeculate { before, scale } => {
                        request.sum_squares(part);
                        tensor.commit_then_speculate(kernels, &before.tensors[part.tensor], *scale, &part.elems);
                    }
                    PassKind::CommitThenSums { before, scale } => {
                        request.sum_squares(part);
                        before.tensors[part.tensor].commit(kernels, *scale, &part.elems);
                    }
                    PassKind::Weights { scale } => tensor.speculate(kernels, *scale, &part.elems),
                    PassKind::Commit { scale } => tensor.commit(kernels, *scale, &part.elems),
                    PassKind::StepAtOnce { scale } => tensor.step(kernels, *scale, &part.elems),
                    PassKind::Step { scale } => {
                        tensor.take_changes(&part.elems);
                        tensor.step(kernels, *scale, &part.elems);
                    }
                }
            }
        }
    }
}
