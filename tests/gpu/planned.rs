//! Compares the memory in a plan with an engine's allocations: every class, to the byte.

use std::collections::BTreeMap;
use superoffload::internals::device::{DeviceKind, Kernels, RING_CHUNK_BYTES};
use superoffload::internals::engine::Engine;
use superoffload::internals::model::ActivationPlan;

/// Names of device allocations, and the classes that count them. Activations have the names of their own plan.
const ON_DEVICE: [(&str, &str); 28] = [
    ("weights", "weights"),
    ("gradients", "gradients"),
    ("frozen weights", "frozen weights"),
    ("unused gradients", "unused gradients"),
    ("packed experts", "packed experts"),
    ("expanded experts", "expanded experts"),
    ("gradient sums", "gradient sums"),
    ("passing sums", "passing sums"),
    ("segment boundaries", "segment boundaries"),
    ("weight slices", "weight slices"),
    ("gradient slices", "gradient slices"),
    ("peers' gradients", "peers' gradients"),
    ("resident parameters", "resident p, m, v"),
    ("resident lower halves", "resident p, m, v"),
    ("resident m", "resident p, m, v"),
    ("resident v", "resident p, m, v"),
    ("paged parameters", "paged p, m, v"),
    ("paged m", "paged p, m, v"),
    ("paged v", "paged p, m, v"),
    ("gradient staging", "cast staging"),
    ("parameter staging", "cast staging"),
    ("norm partials", "norm partials"),
    ("non-finite flag", "norm partials"),
    ("kernels' scratch", "kernel scratch"),
    ("scores of attention", "scores of attention"),
    ("packed documents", "packed documents"),
    ("documents", "packed documents"),
    ("matrix workspace", "matrix workspace"),
];

const ON_HOST: [(&str, &str); 19] = [
    ("parameters", "offloaded p, m, v"),
    ("lower halves", "offloaded p, m, v"),
    ("m", "offloaded p, m, v"),
    ("v", "offloaded p, m, v"),
    ("gradient slots", "gradient slots"),
    ("gradient sums", "gradients' sums"),
    ("parameter slots", "parameter slots"),
    ("layers.input", "kept activations"),
    ("layers.attn_out", "kept activations"),
    ("layers.lse", "kept activations"),
    ("kept boundaries", "kept boundaries"),
    ("batches", "batches, norm"),
    ("norm partials", "batches, norm"),
    ("non-finite flag", "batches, norm"),
    ("losses", "batches, norm"),
    ("rows of experts", "batches, norm"),
    ("embedding rows", "batches, norm"),
    ("numbers of the reference", "batches, norm"),
    ("bounce buffer", "batches, norm"),
];

/// Classes that the engine does not allocate: migrating pages, and memory of other components.
const NOT_TAKEN: [&str; 11] = [
    "paged states here",
    "exchange",
    "slices under way",
    "NCCL's buffers",
    "timeline",
    "data",
    "lists of pinned pages",
    "lists of pinned copies",
    "rounding of states",
    "context, libraries",
    "process, driver",
];

/// Compares every class of the engine's plan with its allocations on a device of kind `on`. A GPU plan may run on the CPU device, which
/// needs no memory of its own and ends a ring with its last byte instead of a whole chunk. If the slices of several ranks have equal
/// lengths, all ranks allocate as much as this one.
pub fn check<D: Kernels>(engine: &Engine<D>, on: DeviceKind) -> Result<(), String> {
    let (plan, shape) = (engine.plan(), engine.shape());
    let activations = ActivationPlan::new(plan.micro_batch(shape)).map_err(|error| error.to_string())?;
    let class_of = |name: &str, classes: &[(&'static str, &'static str)]| match classes.iter().find(|(known, _)| *known == name) {
        Some((_, "parameter slots")) if plan.placement.rings.weights.is_some() && plan.site.ranks == 1 => Ok("streamed weights"),
        Some((_, class)) => Ok(*class),
        None if name == "attention workspace" => Ok("attention workspace"),
        None if activations.allocations().iter().any(|known| known.name == name) => Ok("activations"),
        None => Err(format!("no class counts {name}")),
    };
    let mut taken: BTreeMap<&str, usize> = BTreeMap::new();
    for (name, bytes) in engine.device_allocations().into_iter().filter(|(_, bytes)| *bytes > 0) {
        *taken.entry(class_of(name, &ON_DEVICE)?).or_default() += bytes;
    }
    for (name, bytes) in engine.host_memory().allocations() {
        *taken.entry(class_of(name, &ON_HOST)?).or_default() += bytes;
    }
    let attention = shape.attention(plan.recipe.step.micro_batch, plan.recipe.step.seq_length, 0);
    let own: Vec<_> = if on == plan.site.machine.kind {
        vec![]
    } else {
        plan.site.machine.kind.own_memory(plan.recipe.numerics.attention, &[attention], None, plan.recipe.separates_documents())
    };
    for class in &plan.forecast.memory {
        if NOT_TAKEN.contains(&class.name) || own.iter().any(|own| own.name == class.name) {
            continue;
        }
        let rings = plan.placement.rings;
        let ring = [("weights", rings.weights), ("gradients", rings.grads), ("gradient sums", rings.sums)]
            .iter()
            .any(|(name, ring)| *name == class.name && ring.is_some());
        let rounded = if ring && on != plan.site.machine.kind { plan.site.ranks * RING_CHUNK_BYTES } else { 1 };
        let bytes = plan.site.ranks * taken.remove(class.name).unwrap_or(0);
        if !(class.bytes.saturating_sub(rounded - 1)..=class.bytes).contains(&bytes) {
            return Err(format!("{}: {bytes} bytes taken, {} planned\n{plan}", class.name, class.bytes));
        }
    }
    if taken.is_empty() { Ok(()) } else { Err(format!("not planned: {taken:?}\n{plan}")) }
}
