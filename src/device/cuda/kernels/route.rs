//! The router of a mixture of experts.

use super::super::launch::{GpuKernel, LaunchConfig, Queue, args, size};
use super::super::modules::{PtxSource, ptx_file};
use super::grid::{WARP, rows_blocks};
use crate::device::kernel::rows;
use crate::device::{
    Combine, Dispatch, Kernel, Route, RouteShape, RouterBackward, RouterBalance, RouterRule, Segments, SigmoidRule, Stream,
};
use crate::error::Result;

pub(super) const SOURCE: PtxSource = PtxSource {
    file: ptx_file!("generated/route.ptx"),
    typed: &["dispatch", "dispatch_any", "combine", "combine_any", "router_backward", "router_balance", "route_scores", "scores_backward"],
    plain: &["route", "segment_counts", "segment_starts", "segment_rows"],
};

/// Constants of `route.cu`: threads of a block, threads of the single block that adds the counts, choices that a block sorts.
const THREADS: usize = 256;
const STARTS_THREADS: u32 = 1024;
const CHUNK: usize = 1024;

impl GpuKernel for Route {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { logits, correction, experts, weights, shape } = self;
        let ([tokens, count, top_k], grid) = (sizes(&shape)?, a_warp_each(&shape)?);
        if let RouterRule::Sigmoid(rule) = shape.rule {
            let SigmoidRule { groups, top_groups, renormalised, scale } = rule;
            let groups = [size(groups)?, size(top_groups)?];
            let args = args![logits, correction, experts, weights, tokens, count, top_k, groups[0], groups[1], renormalised, scale];
            return queue.launch(Stream::Compute, "route_scores", Some(self.float_format()?), grid, args);
        }
        let args = args![logits, experts, weights, tokens, count, top_k, shape.rule == RouterRule::All];
        queue.launch(Stream::Compute, Self::NAME, None, grid, args)
    }
}

impl GpuKernel for Segments {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { experts, bounds, slots, entries, shape } = self;
        let [_, count, _] = sizes(&shape)?;
        let (rows, chunks) = (size(shape.rows())?, size(shape.rows().div_ceil(CHUNK))?);
        // Counts have the same size as fp32 elements.
        let counts = queue.scratch(chunks as usize * shape.experts)?;
        let blocks = LaunchConfig::new(chunks, THREADS as u32);
        queue.launch(Stream::Compute, "segment_counts", None, blocks, args![experts, counts, rows, count])?;
        let one = LaunchConfig::new(1, STARTS_THREADS);
        queue.launch(Stream::Compute, "segment_starts", None, one, args![counts, bounds, chunks, count])?;
        let args = args![experts, counts, slots, entries, rows, count];
        queue.launch(Stream::Compute, "segment_rows", None, blocks, args)
    }
}

impl GpuKernel for Dispatch {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, slots, out, cols } = self;
        let tokens = rows(x, cols);
        let (vectors, blocks) = rows_blocks(tokens, cols, THREADS, &[x, out])?;
        let name = if vectors { "dispatch" } else { "dispatch_any" };
        let args = args![x, slots, out, size(cols)?, size(slots.elems() / tokens)?];
        queue.launch(Stream::Compute, name, Some(self.float_format()?), blocks, args)
    }
}

impl GpuKernel for Combine {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { x, slots, weights, base, out, cols } = self;
        let (dtype, tokens) = (self.float_format()?, rows(out, cols));
        let (vectors, blocks) = rows_blocks(tokens, cols, THREADS, &[x, base.unwrap_or(x), out])?;
        let name = if vectors { "combine" } else { "combine_any" };
        let args = args![x, slots, weights, base, out, size(cols)?, size(slots.elems() / tokens)?];
        queue.launch(Stream::Compute, name, Some(dtype), blocks, args)
    }
}

impl GpuKernel for RouterBackward {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let Self { logits, experts, weights, slots, dweights, dlogits, shape } = self;
        let ([tokens, count, top_k], all, grid) = (sizes(&shape)?, shape.rule == RouterRule::All, a_warp_each(&shape)?);
        let format = Some(self.float_format()?);
        if let RouterRule::Sigmoid(SigmoidRule { renormalised, scale, .. }) = shape.rule {
            let args = args![logits, experts, weights, slots, dweights, dlogits, tokens, count, top_k, renormalised, scale];
            return queue.launch(Stream::Compute, "scores_backward", format, grid, args);
        }
        let args = args![logits, experts, weights, slots, dweights, dlogits, tokens, count, top_k, all];
        queue.launch(Stream::Compute, Self::NAME, format, grid, args)
    }
}

impl GpuKernel for RouterBalance {
    fn enqueue(self, queue: &mut impl Queue) -> Result<()> {
        let ([tokens, count, top_k], layers) = (sizes(&self.shape)?, size(self.layers())?);
        let Self { logits, experts, bounds, stride, dlogits, factor, shape } = self;
        let args = args![logits, experts, bounds, dlogits, tokens, count, top_k, layers, size(stride)?, factor];
        queue.launch(Stream::Compute, Self::NAME, Some(self.float_format()?), a_warp_each(&shape)?, args)
    }
}

fn sizes(shape: &RouteShape) -> Result<[u32; 3]> {
    Ok([size(shape.tokens)?, size(shape.experts)?, size(shape.top_k)?])
}

/// A grid with one warp for each token.
fn a_warp_each(shape: &RouteShape) -> Result<LaunchConfig> {
    Ok(LaunchConfig::new(size(shape.tokens.div_ceil(THREADS / WARP))?, THREADS as u32))
}
