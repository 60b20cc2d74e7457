//! Launches of kernels on the GPU, with one file for each file of PTX.

mod attention;
mod bias;
mod cross_entropy;
mod delta;
mod documents;
mod embed;
#[cfg(test)]
mod emulator;
mod experts;
mod gated_norm;
mod grid;
mod grouped;
mod key_gradients;
mod latent;
#[cfg(test)]
mod launch_tests;
mod mxfp4;
mod norm;
mod normed_values;
mod packed;
mod pointwise;
mod product;
mod quantize;
mod rope;
mod route;
mod scores;
mod short_conv;
mod sinks;
mod teacher;
pub(super) mod transfer;

use super::modules::PtxSource;
pub(super) use delta::check_delta;

/// PTX files that every model needs, with the kernels that they export.
pub(super) fn sources() -> impl Iterator<Item = &'static PtxSource> {
    let transformer =
        [&attention::SOURCE, &bias::SOURCE, &cross_entropy::SOURCE, &embed::SOURCE, &norm::SOURCE, &pointwise::SOURCE, &rope::SOURCE];
    transfer::SOURCES.iter().chain(transformer)
}

/// PTX files for documents, mixtures of experts, delta rules, blocks of queries, latent attention, products in parts, attention by products, normed values, FP8, MXFP4, sinks and teachers. They take megabytes and
/// are loaded on first use.
pub(super) static LATER: [&PtxSource; 18] = [
    &delta::SOURCE,
    &documents::SOURCE,
    &experts::SOURCE,
    &gated_norm::SOURCE,
    &grouped::SOURCE,
    &grouped::HOPPER_SOURCE,
    &grouped::TABLES_SOURCE,
    &key_gradients::SOURCE,
    &latent::SOURCE,
    &mxfp4::SOURCE,
    &normed_values::SOURCE,
    &product::SOURCE,
    &quantize::SOURCE,
    &route::SOURCE,
    &scores::SOURCE,
    &short_conv::SOURCE,
    &sinks::SOURCE,
    &teacher::SOURCE,
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    /// Text of a PTX file below `ptx`; generated files are stored compressed.
    fn committed(name: &str) -> String {
        let path = Path::new("ptx").join(name);
        if name.starts_with("generated/") {
            let packed = std::fs::read(format!("{}.zst", path.display())).unwrap();
            return String::from_utf8(zstd::decode_all(&packed[..]).unwrap()).unwrap();
        }
        std::fs::read_to_string(path).unwrap()
    }

    #[test]
    fn every_file_unpacks_to_its_text_without_comments() {
        for PtxSource { file, .. } in sources().chain(LATER) {
            let text = committed(file.name);
            let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
            assert!(file.text().unwrap().lines().eq(code), "{}", file.name);
        }
    }
}
