//! A plan for every product of a step, and products in parts.
//!
//! The library's answer depends on shape, format and micro-batch. The sweep asks for all products of the models that ship and of small models,
//! in micro-batches of 1,024 to 131,072 tokens. It computes nothing.

use super::fp8::{self, needs_fp8};
use super::harness::Bench;
use super::kernels::Suite;
use super::matmul;
use super::products::{Factors, check_all};
use super::report::{Outcome, require};
use std::collections::BTreeSet;
use std::io::Write;
use std::path::Path;
use superoffload::internals::device::{FirstWay, MatmulLayout, MatmulShape, ProductRequest, ProductWay};
use superoffload::internals::dtype::Dtype;
use superoffload::internals::model::presets::PRESETS;
use superoffload::internals::model::{ModelShape, products};

/// Small models by name: channels, heads, key heads, channels of a head, channels inside the MLP, vocabulary.
const SMALL: [(&str, [usize; 6]); 5] = [
    ("SmolLM2-135M", [576, 9, 3, 64, 1536, 49_152]),
    ("Qwen2.5-0.5B", [896, 14, 2, 64, 4864, 151_936]),
    ("Qwen3-0.6B", [1024, 16, 8, 128, 3072, 151_936]),
    ("Qwen2.5-1.5B", [1536, 12, 2, 128, 8960, 151_936]),
    ("Granite-8B", [4096, 32, 8, 128, 14_336, 49_159]),
];
/// The model of [`SMALL`] with the products that cuBLASLt refuses.
const IN_SMALL_SUITES: &str = "Qwen2.5-0.5B";
/// Tokens of the smallest and of the largest micro-batch, of which each is twice as large as the one before.
const TOKENS: [usize; 2] = [1 << 10, 1 << 17];
/// FP8 products have multiples of this number of rows, columns and terms.
const GRAIN: usize = 16;

pub fn cases<W: Write>(suite: &mut Suite<'_, W>) {
    if suite.bench.same_bits {
        return;
    }
    let shipped = PRESETS.map(|(name, config)| (name, config.to_string()));
    let mut models: Vec<_> = shipped.into_iter().chain(SMALL.map(|(name, sizes)| (name, small(sizes)))).collect();
    // The library takes minutes for all of them.
    models.retain(|(name, _)| suite.bench.full || *name == IN_SMALL_SUITES);
    for (name, config) in models {
        for (factors, format) in [(Factors::Bfloat16, ""), (Factors::Fp8, " in FP8")] {
            let mut lines = Vec::new();
            suite.case(&format!("plans of {name}{format}"), |bench, _| {
                plan_all(bench, &ModelShape::parse(&config, Path::new(name))?, factors, &mut lines)
            });
            lines.iter().for_each(|line| suite.report.print_line(line));
        }
    }
}

fn small([channels, heads, kv_heads, head_dim, width, vocab]: [usize; 6]) -> String {
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "hidden_size": channels, "num_hidden_layers": 2, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "intermediate_size": width, "vocab_size": vocab,
        "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true,
    });
    config.to_string()
}

/// Asks for the plans of all products of `shape`. Adds a line to `lines` for each product that is computed in parts. Fails with the products
/// that have no plan.
fn plan_all(bench: &mut Bench, shape: &ModelShape, factors: Factors, lines: &mut Vec<String>) -> Outcome {
    if factors == Factors::Fp8 {
        needs_fp8(bench)?;
    }
    let mut missing = Vec::new();
    for request in requests(shape, factors) {
        match bench.subject.dev.choose_product(request) {
            Ok(Some(product)) if product.way != ProductWay::Whole => lines.push(format!("  {product}")),
            Ok(_) => {}
            Err(e) => missing.push(e.to_string()),
        }
    }
    require(missing.is_empty(), || missing.join("\n"))?;
    Ok(0.0)
}

/// Every product of micro-batches of all [`TOKENS`], each once. In FP8, those of layers with sizes that FP8 permits.
fn requests(shape: &ModelShape, factors: Factors) -> BTreeSet<ProductRequest> {
    let tokens = std::iter::successors(Some(TOKENS[0]), |tokens| Some(2 * tokens)).take_while(|tokens| *tokens <= TOKENS[1]);
    let all = tokens.flat_map(|tokens| products(shape, tokens)).filter(|MatmulShape { m, n, k, .. }| {
        factors == Factors::Bfloat16 || [m, n, k].into_iter().all(|size| *size != shape.vocab && size.is_multiple_of(GRAIN))
    });
    let request = |product: MatmulShape| {
        let [a, b] = factors.formats(product.layout);
        let layout = if factors == Factors::Fp8 { MatmulLayout::Nt } else { product.layout };
        ProductRequest { shape: MatmulShape { layout, ..product }, formats: [a, b, Dtype::Bfloat16], bias: false }
    };
    all.map(request).collect()
}

/// Products that a device computes in parts from the `first_way` on.
pub fn parts<W: Write>(suite: &mut Suite<'_, W>, first_way: FirstWay) {
    let long = MatmulLayout::ALL.map(|layout| MatmulShape { layout, m: 896, n: 912, k: 4096 });
    if first_way == FirstWay::Slices {
        matmul::in_slices(suite);
        suite.case("long products in slices by signed sums", |bench, random| check_all(bench, random, &long, Factors::Bfloat16));
    }
    let way = if first_way == FirstWay::Slices { "in slices" } else { "widened" };
    fp8::in_parts(suite, way);
    suite.case(&format!("long products in FP8 {way} by signed sums"), |bench, random| check_all(bench, random, &long, Factors::Fp8));
}
