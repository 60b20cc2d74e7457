//! The kernels on the GPU, in a file for each file of PTX.

mod attention;
mod bias;
mod cross_entropy;
mod embed;
#[cfg(test)]
mod emulator;
mod experts;
mod grid;
mod grouped;
#[cfg(test)]
mod launch_tests;
mod norm;
mod pointwise;
mod product;
mod rope;
mod route;
mod sinks;
pub(super) mod transfer;

use super::modules::PtxSource;

/// Every PTX file, with what it exports.
pub(super) fn sources() -> impl Iterator<Item = &'static PtxSource> {
    let transformer = [
        &attention::SOURCE,
        &bias::SOURCE,
        &cross_entropy::SOURCE,
        &embed::SOURCE,
        &experts::SOURCE,
        &grouped::SOURCE,
        &norm::SOURCE,
        &pointwise::SOURCE,
        &rope::SOURCE,
        &route::SOURCE,
        &sinks::SOURCE,
    ];
    transfer::SOURCES.iter().chain(transformer)
}
