//! Random recipes, which decide the bits of a training, and random placements, which must not.

use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};
use std::path::Path;

/// The inputs of a run that decide its bits.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub family: &'static str,
    layers: usize,
    /// The file with the data.
    pub data: &'static str,
    /// Line of the configuration file that injects gradients.
    pub injection: &'static str,
    step: Step,
    seed: u8,
    /// Its settings of `RECIPE`.
    flags: Vec<&'static str>,
}

/// The cut of an optimizer step.
#[derive(Clone, Copy, Debug)]
struct Step {
    shares: usize,
    /// Consecutive shares that are summed and rounded as a group.
    group: usize,
    /// Micro-batches of a share.
    micro_batches: usize,
    sequence_ranks: usize,
}

/// Devices that train together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Devices {
    pub processes: usize,
    pub gpus: usize,
}

impl Devices {
    fn ranks(self) -> usize {
        self.processes * self.gpus
    }

    /// Whether these devices can share the step: each has whole shares, and those of one process share sequences.
    fn can_share(self, step: Step) -> bool {
        step.shares.is_multiple_of(self.ranks()) && self.gpus.is_multiple_of(step.sequence_ranks)
    }
}

/// One way to run a recipe.
#[derive(Clone, Debug)]
pub struct Placement {
    /// Index into the devices that can share the recipe's step.
    devices: usize,
    /// KiB of a bucket on each rank.
    bucket_kib: Option<usize>,
    /// Index into `weights` of the devices.
    weights: usize,
    adversary: Option<u16>,
    /// Its settings of `PLACEMENT`.
    flags: Vec<&'static str>,
}

/// The families of models, by their directories in `tests/golden`.
const FAMILIES: [&str; 20] = [
    "llama",
    "gpt2",
    "gpt_oss",
    "qwen3_moe",
    "gemma2",
    "gemma3",
    "glm4",
    "glm4_moe",
    "granite",
    "mistral",
    "mixtral",
    "olmo2",
    "olmo3",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3_yarn",
    "seed_oss",
    "starcoder2",
];

/// Shares, shares of a group, micro-batches of a share, and ranks of a sequence.
const STEPS: [(usize, usize, usize, usize); 11] = [
    (1, 1, 1, 1),
    (2, 1, 1, 1),
    (4, 1, 1, 1),
    (1, 1, 2, 1),
    (2, 1, 2, 1),
    (3, 1, 1, 1),
    (4, 2, 1, 1),
    (6, 1, 1, 1),
    (2, 1, 1, 2),
    (4, 1, 1, 2),
    (4, 1, 1, 4),
];

/// One text, and documents of several lengths.
pub const DATA: [&str; 2] = ["data.txt", "documents.jsonl"];

const INJECTIONS: [&str; 4] = [
    "",
    "",
    "inject = [{step = 2, element = 5000, value = 'nan'}]",
    "inject = [{step = 2, element = 77, value = 1e3}, {step = 3, element = 3000, value = 'inf'}]",
];

/// Alternative settings of a recipe; the empty one is the default.
const RECIPE: [&[&str]; 7] = [
    &["", "--dtype=float32", "--dtype=float16", "--matmul-dtype=fp8"],
    &["", "--moments=bfloat16", "--moments=int8"],
    &["", "--max-grad-norm=0", "--max-grad-norm=1.7", "--max-grad-norm=0.4", "--max-grad-norm=1e-3"],
    &["--seq-length=8", "--seq-length=16", "--seq-length=24"],
    &["--per-device-train-batch-size=1", "--per-device-train-batch-size=2"],
    &["", "--packing=bfd", "--packing=off"],
    &["", "--lr-scheduler-type=cosine", "--router-aux-loss-coef=0.5"],
];

/// Devices on which a recipe may run.
const DEVICES: [Devices; 11] = [
    Devices { processes: 1, gpus: 1 },
    Devices { processes: 1, gpus: 2 },
    Devices { processes: 1, gpus: 4 },
    Devices { processes: 2, gpus: 1 },
    Devices { processes: 2, gpus: 2 },
    Devices { processes: 1, gpus: 3 },
    Devices { processes: 3, gpus: 1 },
    Devices { processes: 1, gpus: 6 },
    Devices { processes: 2, gpus: 3 },
    Devices { processes: 3, gpus: 2 },
    Devices { processes: 4, gpus: 1 },
];

/// Alternative settings of a placement; the empty one is the default.
const PLACEMENT: [&[&str]; 11] = [
    &[
        "",
        "--resident-buckets=0",
        "--resident-buckets=1",
        "--resident-buckets=3",
        "--resident-buckets=all",
        "--strategy=zero-offload",
        "--strategy=no-offload",
        "--without=repartition,mpam",
    ],
    &["", "", "--masters=split"],
    &["", "--threads=1"],
    &["", "--slots=1", "--slots=2", "--slots=5"],
    &[
        "",
        "--activations=keep",
        "--activations=recompute-cheap",
        "--activations=recompute-block",
        "--activations=host-attention",
        "--activations=host",
    ],
    &[
        "",
        "--without=stv",
        "--without=deadline-order",
        "--without=adaptive",
        "--without=early-commit",
        "--without=adaptive,deadline-order,early-commit",
        "--without=grace-adam",
    ],
    &["", "--cast=device", "--cast=host"],
    &["", "", "", "", "--early-rows=off", "--early-rows=on"],
    &["", "--isa=scalar", "--huge-pages=off"],
    &["--save-steps=9", "--save-steps=1"],
    &["", "", "", "--replan=random"],
];

/// Placements of weights, by whether the run has several processes and whether a process has several devices.
fn weights(devices: Devices) -> &'static [&'static str] {
    match (devices.processes > 1, devices.gpus > 1) {
        (false, false) => &["", "", "--weights=flow"],
        (false, true) => &["", "--weights=replicated", "--weights=sharded"],
        (true, false) => &["", "", "--weights=fully-sharded"],
        (true, true) => &["", "--weights=replicated", "--weights=sharded", "--weights=fully-sharded"],
    }
}

/// One setting of each row, without those that are the default.
fn settings(rows: &'static [&'static [&'static str]]) -> impl Strategy<Value = Vec<&'static str>> {
    let choices: Vec<_> = rows.iter().map(|row| select(*row)).collect();
    choices.prop_map(|chosen| chosen.into_iter().filter(|setting| !setting.is_empty()).collect())
}

pub fn recipes() -> impl Strategy<Value = Recipe> {
    let step =
        select(&STEPS[..]).prop_map(|(shares, group, micro_batches, sequence_ranks)| Step { shares, group, micro_batches, sequence_ranks });
    let files = (select(&DATA[..]), select(&INJECTIONS[..]));
    (select(&FAMILIES[..]), select(&[2usize, 2, 2, 2, 3, 8][..]), files, step, any::<u8>(), settings(&RECIPE))
        .prop_map(|(family, layers, (data, injection), step, seed, flags)| Recipe { family, layers, data, injection, step, seed, flags })
}

pub fn placements() -> impl Strategy<Value = Placement> {
    let bucket_kib = prop::option::weighted(0.8, select(&[64usize, 8, 16, 24][..]));
    (0..DEVICES.len(), bucket_kib, 0..12usize, prop::option::of(any::<u16>()), settings(&PLACEMENT))
        .prop_map(|(devices, bucket_kib, weights, adversary, flags)| Placement { devices, bucket_kib, weights, adversary, flags })
}

impl Recipe {
    /// The family's tiny configuration with byte tokens, this number of layers, and widths that FP8 permits.
    pub fn config(&self) -> String {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(self.family).join("config.json");
        let mut config: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
        let changes = [("vocab_size", 256), ("intermediate_size", 48), ("moe_intermediate_size", 16), ("num_hidden_layers", self.layers)];
        let more = [("n_layer", self.layers)];
        for (key, value) in changes.into_iter().chain(more) {
            if let Some(known) = config.get_mut(key) {
                *known = json!(value);
            }
        }
        for key in ["layer_types", "no_rope_layers"] {
            if let Some(Value::Array(kinds)) = config.get_mut(key) {
                *kinds = kinds.clone().into_iter().cycle().take(self.layers).collect();
            }
        }
        config.to_string()
    }

    /// Model, data and injected gradients, for messages.
    pub fn inputs(&self) -> String {
        format!("on {}, {} of {} layers {}", self.data, self.family, self.layers, self.injection)
    }

    /// The devices of a placement of this recipe.
    pub fn devices(&self, placement: &Placement) -> Devices {
        let possible: Vec<Devices> = DEVICES.into_iter().filter(|devices| devices.can_share(self.step)).collect();
        possible[placement.devices % possible.len()]
    }

    /// The flags of `train` for this recipe by this placement, without those of several processes.
    pub fn flags(&self, placement: &Placement) -> Vec<String> {
        let (devices, step) = (self.devices(placement), self.step);
        let ranks = devices.ranks();
        let mut flags = vec![
            format!("--seed={}", self.seed),
            format!("--gradient-shares={}", step.shares),
            format!("--gradient-accumulation-steps={}", step.shares * step.micro_batches / ranks),
            format!("--gpus={}", devices.gpus),
        ];
        if step.group > 1 {
            flags.push(format!("--gradient-group={}", step.group));
        }
        if step.sequence_ranks > 1 {
            flags.push(format!("--sequence-ranks={}", step.sequence_ranks));
        }
        if let Some(kib) = placement.bucket_kib {
            flags.push(format!("--bucket-mib={}", (kib * ranks) as f64 / 1024.0));
        }
        if let Some(seed) = placement.adversary {
            flags.push(format!("--adversary={seed}"));
        }
        let weights = weights(devices);
        let chosen = [weights[placement.weights % weights.len()]].into_iter().filter(|setting| !setting.is_empty());
        let settings = self.flags.iter().copied().chain(chosen).chain(placement.flags.iter().copied());
        flags.extend(settings.map(String::from));
        flags
    }
}
