//! Ranks that share sequences. Several ranks compute nearly the results of one, and equal numbers of ranks give equal bits.

use crate::program::{Workspace, run};
use crate::support::{Noise, digest, grad_ring, load, random_params, resident, settings, tiny_llama};
use crate::sweep::{PROMPTLY, sweep};
use std::path::Path;
use std::time::Instant;
use superoffload::internals::data::{Batch, Batches, Packing};
use superoffload::internals::device::Kernels;
use superoffload::internals::engine::Engine;
use superoffload::internals::hardware::Topology;
use superoffload::internals::launch::{UseEngine, on_cpus};
use superoffload::internals::model::{ModelShape, TensorSpec, TensorTable};
use superoffload::internals::optim::StatePart;
use superoffload::internals::planner::Machine;
use superoffload::{Plan, Result};

/// Tokens of a sequence, and sequences of a micro-batch.
const LENGTH: usize = 16;
const ROWS: usize = 2;

/// The tiny model of a golden file, optionally with other head counts.
fn golden(name: &str, heads: Option<(usize, usize)>) -> ModelShape {
    changed(name, |config| {
        if let Some((heads, kv_heads)) = heads {
            (config["num_attention_heads"], config["num_key_value_heads"]) = (heads.into(), kv_heads.into());
            config["head_dim"] = 8.into();
        }
    })
}

/// The tiny model of a golden file with `layers` layers and other head counts.
fn deep(name: &str, layers: usize, (heads, kv_heads): (usize, usize)) -> ModelShape {
    changed(name, |config| {
        (config["num_attention_heads"], config["num_key_value_heads"]) = (heads.into(), kv_heads.into());
        (config["head_dim"], config["num_hidden_layers"]) = (8.into(), layers.into());
    })
}

fn changed(name: &str, change: impl FnOnce(&mut serde_json::Value)) -> ModelShape {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name).join("config.json");
    let mut config: serde_json::Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    change(&mut config);
    ModelShape::parse(&config.to_string(), &path).unwrap()
}

/// Families with all variants of attention: windows, soft caps, sinks, norms of queries and keys, biases, learned positions, experts.
const FAMILIES: [(&str, Option<(usize, usize)>); 15] = [
    ("llama", None),
    ("gpt2", None),
    ("gemma2", None),
    ("gemma3", None),
    ("gemma4", None),
    ("gemma4_moe", None),
    ("gpt_oss", None),
    ("mistral", Some((4, 4))),
    ("qwen3", None),
    ("olmo2", None),
    ("olmoe", None),
    ("qwen2_moe", None),
    ("qwen2", Some((8, 1))),
    ("phi3", None),
    ("llama", Some((10, 5))),
];

/// Weights that are large enough to make attention selective.
fn weights(seed: u64) -> impl Fn(&TensorSpec) -> Vec<f32> {
    let small = random_params(seed);
    move |spec| small(spec).into_iter().map(|x| if x == 1.0 { x } else { 15.0 * x }).collect()
}

/// Rows of two documents. The second one crosses the boundary between two ranks. Some targets are ignored, and some have a weight.
#[derive(Clone)]
struct Documents(Noise);

impl Batches for Documents {
    fn fill(&mut self, batch: &mut Batch<'_>) -> Result<()> {
        self.0.fill(batch)?;
        batch.targets.iter_mut().step_by(3).for_each(|target| *target = -1);
        batch.targets.iter_mut().skip(1).step_by(3).for_each(|target| *target |= 1000 << 19);
        let Some(documents) = batch.documents.as_mut() else { return Ok(()) };
        for (positions, documents) in batch.positions.chunks_exact_mut(LENGTH).zip(documents.chunks_exact_mut(LENGTH)) {
            positions[5..].iter_mut().for_each(|position| *position -= 5);
            documents[5..].fill(5);
        }
        Ok(())
    }
}

/// Losses of some steps, the first moments after the first step, and the digest.
struct Steps(u64);

type Outcome = (Vec<f32>, Vec<f32>, String);

impl UseEngine for Steps {
    type Output = Outcome;

    fn run<D: Kernels>(self, mut engine: Engine<D>) -> Result<Outcome> {
        load(&mut engine, weights(self.0));
        let mut batches = Documents(Noise::new(self.0, engine.shape().vocab));
        let (mut losses, mut moments) = (Vec::new(), vec![0.0; engine.table().flat_elems()]);
        for step in 0..4 {
            let before = engine.evaluate(&mut batches.clone())?;
            losses.push(engine.step(1e-3, &mut batches)?.loss);
            assert_eq!(before.loss as f32, losses[step], "an evaluation of a step's data");
            if step == 0 {
                engine.flush()?;
                engine.read_state(StatePart::M, 0, &mut moments)?;
            }
        }
        Ok((losses, moments, digest(&mut engine)))
    }
}

/// Runs `shape` with these lines and the common settings.
fn steps(shape: &ModelShape, seed: u64, lines: &str) -> Outcome {
    steps_of(shape, seed, lines, |_| ())
}

fn steps_of(shape: &ModelShape, seed: u64, lines: &str, change: impl FnOnce(&mut Plan)) -> Outcome {
    let text = format!(
        "device = 'cpu'\nseq-length = {LENGTH}\nper-device-train-batch-size = {ROWS}\nmax-steps = 9\nbucket-mib = 0.125\n\
         weight-decay = 0.1\n{lines}"
    );
    let mut plan = Plan::new(&settings(&text).request(shape), &Machine::cpu(2), false).unwrap_or_else(|error| panic!("{error}: {lines}"));
    plan.recipe.rows.packing = if seed % 2 == 1 { Packing::Bfd } else { Packing::Wrapped };
    if seed.is_multiple_of(3) {
        // Tiles that do not divide the dimensions.
        (plan.recipe.numerics.loss_tile.rows, plan.recipe.numerics.loss_tile.vocab) = (7, 40);
    }
    change(&mut plan);
    on_cpus(&plan, shape, &Topology::this_machine(), Steps(seed)).unwrap_or_else(|error| panic!("{error}: {lines}"))
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0.0, |most, x| x.abs().max(most))
}

/// Results of a single token are equal; sums over tokens are divided differently. Each of the two sums of `n` terms is within `n u` of the
/// exact one, times the sum of their magnitudes, which is assumed to be at most 8 times the largest element of a gradient. In bfloat16 the
/// partial gradient of each rank is rounded as well, and so is that of attention if several ranks share a key head.
#[test]
fn several_ranks_of_a_sequence_match_one_rank() {
    for (nth, (name, heads)) in FAMILIES.into_iter().enumerate() {
        let shape = golden(name, heads);
        for (dtype, unit) in [("float32", 2f32.powi(-24)), ("bfloat16", 2f32.powi(-9))] {
            let lines = |ranks: usize| {
                format!(
                    "gpus = {ranks}\nsequence-ranks = {ranks}\ngradient-accumulation-steps = 2\nmax-grad-norm = 0\ndtype = '{dtype}'\nthreads = {ranks}"
                )
            };
            let (losses, moments, _) = steps(&shape, nth as u64, &lines(1));
            for ranks in [2, 4] {
                let (sharded_losses, other_moments, _) = steps(&shape, nth as u64, &lines(ranks));
                let bound = if dtype == "float32" { (2 * ROWS * LENGTH) as f32 * 8.0 * unit } else { 8.0 * ranks as f32 * unit };
                let loss = (losses[0] - sharded_losses[0]).abs() / losses[0];
                assert!(loss <= bound, "{name} {dtype} on {ranks}: loss {loss}, bound {bound}");
                let difference: Vec<f32> = moments.iter().zip(&other_moments).map(|(one, other)| one - other).collect();
                for spec in TensorTable::new(&shape).specs() {
                    // Gradients of some tensors are pure rounding error: those of key biases, which do not affect the softmax.
                    let least = largest(&moments) / 64.0;
                    let gradient = largest(&difference[spec.range()]) / largest(&moments[spec.range()]).max(least);
                    assert!(gradient <= bound, "{name} {dtype} on {ranks}: gradient of {} {gradient}, bound {bound}", spec.name);
                }
            }
        }
    }
}

#[test]
fn as_many_ranks_of_a_sequence_give_one_digest() {
    for seed in 0..FAMILIES.len() as u64 {
        let (name, heads) = FAMILIES[seed as usize];
        let (shape, ranks) = (golden(name, heads), if seed % 4 < 2 { 2 } else { 4 });
        let clip = ["0", "1.5", "0.05"][seed as usize % 3];
        let fault = if seed % 4 == 1 { "inject = [{step = 3, element = 5, share = 1, value = nan}]\n" } else { "" };
        let dtype = if seed % 2 == 0 { "bfloat16" } else { "float32" };
        let common =
            format!("sequence-ranks = {ranks}\ngradient-shares = {}\nmax-grad-norm = {clip}\ndtype = '{dtype}'\n{fault}", 2 * ranks);
        let on = |gpus: usize, lines: &str| {
            steps(&shape, seed, &format!("{common}gpus = {gpus}\ngradient-accumulation-steps = {}\n{lines}", 4 * ranks / gpus))
        };
        let (losses, _, want) = on(ranks, "strategy = 'no-offload'\nthreads = 1");
        // As many groups as the model has blocks for.
        let groups = 4 / ranks;
        let mut ways: Vec<(usize, String)> = vec![
            (ranks, "strategy = 'zero-offload'\nthreads = 5".into()),
            (ranks, format!("strategy = 'superoffload'\nthreads = 2\nactivations = 'recompute-block'\n{}", resident("superoffload"))),
            (groups * ranks, "threads = 3\nactivations = 'recompute-cheap'\nweights = 'replicated'".into()),
            (ranks, "threads = 3\nactivations = 'host'\nslots = 1".into()),
        ];
        let adversary =
            |nth: usize, policy| (ranks.max(nth % 2 * 4), format!("adversary = {}\nactivations = '{policy}'", 100 * seed as usize + nth));
        ways.extend(
            ["recompute-cheap", "recompute-block", "keep", "host-attention"]
                .into_iter()
                .enumerate()
                .map(|(nth, policy)| adversary(nth, policy)),
        );
        for (gpus, lines) in ways.into_iter().skip(sweep(seed as usize % 2, 0)).step_by(sweep(2, 1)) {
            let (other_losses, _, digest) = on(gpus, &lines);
            assert_eq!((&other_losses, &digest), (&losses, &want), "{name}, {ranks} of {gpus}: {lines}");
        }
    }
}

/// Two buffers alternate for attention's outputs. Peers pull from the buffer into which an output returns, with layers of other policies in
/// between.
#[test]
fn outputs_of_attention_that_come_back_from_the_host_are_handed_over() {
    let mixes = [
        ["host-attention"; 6],
        ["host-attention", "host", "host-attention", "recompute-block", "host-attention", "keep"],
        ["keep", "host-attention", "host-attention", "recompute-cheap", "host-attention", "host-attention"],
    ];
    // With ten heads on four ranks some ranks have more heads. With one key head every rank has a part of its gradient.
    for (seed, (heads, kv_heads)) in [(4, 2), (10, 5), (8, 1)].into_iter().enumerate() {
        let shape = deep("llama", 6, (heads, kv_heads));
        let (seed, ranks) = (seed as u64, if seed == 0 { 2 } else { 4 });
        let lines = |gpus: usize, more: &str| {
            let micro_batches = 4 * ranks / gpus;
            format!(
                "gpus = {gpus}\nsequence-ranks = {ranks}\ngradient-shares = {}\ngradient-accumulation-steps = {micro_batches}\n\
                 max-grad-norm = 0.5\n{more}",
                2 * ranks
            )
        };
        let (losses, _, want) = steps(&shape, seed, &lines(ranks, "strategy = 'no-offload'\nactivations = 'keep'"));
        for (nth, mix) in [0, 1, 2, 0, 1, 2].into_iter().take(sweep(3, 6)).enumerate().map(|(nth, mix)| (nth, mixes[mix])) {
            let way = lines(if nth == 1 { 4 } else { ranks }, &format!("adversary = 8{nth}"));
            let (other_losses, _, digest) =
                steps_of(&shape, seed, &way, |plan| plan.placement.layer_policies = mix.map(|policy| policy.parse().unwrap()).into());
            assert_eq!((&other_losses, &digest), (&losses, &want), "{heads} heads, {mix:?}");
        }
    }
}

/// A module waits for the handovers of its group, and for ring memory that the sums of all ranks free.
#[test]
fn gradients_of_ranks_of_a_sequence_may_lie_in_a_ring() {
    let shape = tiny_llama(12, 32, 64, true);
    for ranks in [2, 4] {
        let lines = |more: &str| {
            format!(
                "gpus = 4\nsequence-ranks = {ranks}\ngradient-shares = 4\ngradient-accumulation-steps = 1\nmax-grad-norm = 0.5\n\
                 activations = 'keep'\nresident-buckets = 0\ndtype = 'float32'\n{more}"
            )
        };
        let (losses, _, want) = steps(&shape, 4, &lines("strategy = 'zero-offload'"));
        for seed in 0..4 {
            let in_ring = |plan: &mut Plan| {
                plan.placement.rings.grads = grad_ring(plan, &TensorTable::new(&shape));
                assert!(plan.placement.rings.grads.is_some(), "{plan}");
            };
            let (other_losses, _, digest) = steps_of(&shape, 4, &lines(&format!("adversary = {seed}")), in_ring);
            assert_eq!((&other_losses, &digest), (&losses, &want), "{ranks} of 4, seed {seed}");
        }
    }
}

/// Sharded weights, with MLPs in tiles of 7 tokens or with FP8 products, and 16 tokens on each of two ranks.
#[test]
fn ranks_of_a_sequence_may_keep_parts_of_the_weights_and_compute_in_tiles_or_fp8() {
    let shape = tiny_llama(12, 32, 64, true);
    let lines = |gpus: usize, more: &str| {
        let micro_batches = 4 / gpus;
        format!(
            "gpus = {gpus}\nsequence-ranks = 2\ngradient-shares = 4\ngradient-accumulation-steps = {micro_batches}\nmax-grad-norm = 0.5\n{more}"
        )
    };
    let sharded = if cfg!(feature = "weight-flow") { "weights = 'sharded'\n" } else { "" };
    let mut digests = Vec::new();
    for products in ["", "matmul-dtype = 'fp8'\n"] {
        let in_tiles = |plan: &mut Plan| plan.recipe.numerics.mlp_tile = products.is_empty().then_some(7);
        let way = format!("{products}strategy = 'no-offload'\nactivations = 'keep'");
        let (losses, _, want) = steps_of(&shape, 4, &lines(2, &way), in_tiles);
        for (nth, policy) in ["keep", "recompute-cheap", "recompute-block", "host", "host-attention"].into_iter().enumerate() {
            let way = format!("{products}{sharded}activations = '{policy}'\nresident-buckets = 0\nadversary = 8{nth}");
            let change = |plan: &mut Plan| {
                in_tiles(plan);
                assert_eq!(plan.placement.rings.weights.is_some(), !sharded.is_empty(), "{plan}");
            };
            let (other_losses, _, digest) = steps_of(&shape, 4, &lines(2 + nth % 2 * 2, &way), change);
            assert_eq!((&other_losses, &digest), (&losses, &want), "{way}");
        }
        digests.push(want);
    }
    assert_ne!(digests[0], digests[1], "8 bits are fewer than 16");
}

/// Each bucket has a block for each of four ranks. Of two micro-batches a step, two ranks have half of every sequence.
const CUT: [&str; 5] = ["--device=cpu", "--bucket-mib=0.03125", "--max-grad-norm=1.5", "--gradient-shares=4", "--sequence-ranks=2"];

fn flags<'a>(gpus: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    CUT.into_iter().chain([gpus]).chain(more.iter().copied()).collect()
}

/// Documents of various lengths, so that rows hold several.
fn documents(workspace: &Workspace) -> String {
    let line = |nth: usize| format!("{{\"text\": \"{}\"}}\n", &"the quick brown fox"[..3 + nth * 5 % 11]);
    let data = workspace.write("documents.jsonl", (0..80).map(line).collect::<String>());
    format!("--data={}", data.display())
}

#[test]
fn two_and_four_devices_that_share_sequences_train_to_the_same_bits_and_files() {
    let workspace = Workspace::new();
    let data = documents(&workspace);
    for (name, more) in [("text", vec![]), ("documents", vec![&*data, "--packing=bfd"])] {
        let train = |out: &str, flags: &[&str]| run(&mut workspace.train(&format!("{name}-{out}"), flags)).digest().to_string();
        let digest = train("2", &flags("--gpus=2", &more));
        for (out, gpus, way) in [
            ("4", "--gpus=4", &["--strategy=zero-offload"][..]),
            ("moved", "--gpus=2", &["--replan=random"]),
            ("adversary", "--gpus=4", &["--adversary=7", "--activations=recompute-block"]),
        ] {
            assert_eq!(train(out, &flags(gpus, &[&more, way].concat())), digest, "{name} {out}");
        }
        let state = |out: &str| std::fs::read(workspace.path(&format!("{name}-{out}/checkpoint-12/state.bin"))).unwrap();
        assert!(state("2") == state("4"), "files do not depend on how many devices there are");
        // Two micro-batches on one device give nearly the same losses. In bfloat16 a partial gradient is rounded by 2^-9.
        train("1", &[&["--device=cpu", "--bucket-mib=0.03125", "--max-grad-norm=1.5", "--gradient-shares=2"], &more[..]].concat());
        for (shared, alone) in workspace.metrics(&format!("{name}-2")).iter().zip(workspace.metrics(&format!("{name}-1"))) {
            let [shared, alone] = [shared, &alone].map(|line| line["loss"].as_f64().unwrap());
            assert!((shared - alone).abs() < alone / 100.0, "{name}: loss {shared}, alone {alone}");
        }
    }
}

#[test]
fn a_run_resumes_with_the_same_sequence_ranks_only() {
    let workspace = Workspace::new();
    let whole = run(&mut workspace.train("whole", &flags("--gpus=2", &[]))).digest().to_string();
    workspace.copy_checkpoints("whole", "resumed", &[6]);
    assert_eq!(run(&mut workspace.resume("resumed", &flags("--gpus=4", &[]))).digest(), whole);
    let default_sums = ["--device=cpu", "--bucket-mib=0.03125", "--max-grad-norm=1.5", "--sequence-ranks=2", "--gpus=2"];
    workspace.copy_checkpoints("whole", "unsaid", &[6]);
    assert_eq!(run(&mut workspace.resume("unsaid", &default_sums)).digest(), whole, "shares are the checkpoint's");
    for alone in [&["--gpus=1"][..], &["--gpus=2"], &["--gpus=4", "--sequence-ranks=4"]] {
        let of_four = if alone.contains(&"--sequence-ranks=4") { 4 } else { 1 };
        workspace.copy_checkpoints("whole", "other", &[6]);
        let other = [&["--device=cpu", "--bucket-mib=0.03125", "--max-grad-norm=1.5"], alone].concat();
        let words = [&format!("sequence_ranks = 2, this run has {of_four}"), "use --sequence-ranks 2", "--allow-changed numerics"];
        run(&mut workspace.resume("other", &other)).refused(2, &words);
        let allowed = run(&mut workspace.resume("other", &[&other[..], &["--allow-changed=numerics"]].concat()));
        assert!(allowed.code == 0 && allowed.stderr.contains("sequence_ranks was 2"), "{allowed:?}");
        std::fs::remove_dir_all(workspace.path("other")).unwrap();
    }
}

#[test]
fn ranks_that_cannot_share_sequences_so_are_refused_with_a_way_out() {
    let workspace = Workspace::new();
    let cases: [(&[&str], &[&str]); 8] = [
        (&["--gpus=4", "--sequence-ranks=0"], &["--sequence-ranks 0", "at least 1"]),
        (&["--gpus=4", "--sequence-ranks=3"], &["--sequence-ranks 3", "must divide --gpus 4"]),
        (&["--sequence-ranks=2"], &["--sequence-ranks 2", "must divide --gpus 1"]),
        (&["--gpus=2", "--sequence-ranks=2", "--seq-length=15"], &["--sequence-ranks 2", "must divide --seq-length 15"]),
        // Four query heads on two key heads.
        (&["--gpus=3", "--sequence-ranks=3", "--seq-length=15"], &["4 query heads on 2 key heads", "use 1, 2, 4"]),
        (&["--gpus=8", "--sequence-ranks=8", "--bucket-mib=0.0625"], &["--sequence-ranks 8", "use 1, 2, 4"]),
        (
            &["--gpus=2", "--sequence-ranks=2", "--gradient-shares=6", "--gradient-accumulation-steps=2"],
            &["--gradient-shares 6", "2 micro-batches", "times --sequence-ranks 2"],
        ),
        (&["--gpus=2", "--sequence-ranks=2", "--router-aux-loss-coef=0.1"], &["--router-aux-loss-coef 0.1", "0 with --sequence-ranks"]),
    ];
    for (flags, words) in cases {
        run(&mut workspace.train("out", &[&["--device=cpu"], flags].concat())).refused(2, words);
    }
}

#[test]
fn a_rank_that_fails_at_a_handover_ends_all_and_a_stalled_one_is_reported() {
    let workspace = Workspace::new();
    for (rank, kind) in [(1, "error"), (3, "panic"), (0, "error"), (2, "hang")] {
        workspace.settings(&format!("faults = [{{rank = {rank}, step = 2, phase = 'hand-over', kind = '{kind}'}}]"));
        let start = Instant::now();
        let failed = run(&mut workspace.train(kind, &flags("--gpus=4", &["--stall-limit=1"])));
        assert!(start.elapsed() < PROMPTLY, "{kind} took {:?}", start.elapsed());
        let words = match kind {
            "hang" => "rank 3        waits for activations of rank 2",
            "panic" => "rank 3: it panicked; see the message above",
            _ => "HandOver of step 2: it was to fail (faults)",
        };
        let is_named = failed.stderr.contains(words) && failed.stderr.contains(&format!("rank {rank}"));
        assert!(failed.code == 1 && is_named, "{rank} {kind}: {failed:?}");
    }
}
