//! Steps that take all micro-batches through a segment of layers before the next segment have the bits of steps that take one micro-batch
//! after the other, and move fewer bytes over the link.

use crate::exactness::{Kind, seeds};
use crate::program::{CONFIG, Workspace, program, run as run_program};
use crate::support::{Noise, digest, load, random_params, settings, start, tiny_llama};
use superoffload::internals::data::{Batch, Batches, RandomTokens};
use superoffload::internals::device::Kernels;
use superoffload::internals::engine::{Counts, Engine};
use superoffload::internals::hardware::Topology;
use superoffload::internals::host::RING_GRAIN_BYTES;
use superoffload::internals::launch::{UseEngine, on_cpus};
use superoffload::internals::memory::RingShape;
use superoffload::internals::model::{ModelShape, TensorTable};
use superoffload::internals::planner::Machine;
use superoffload::{Plan, Result};

const STEPS: u64 = 5;

/// Packing with other losses than that of tokens, twice without one.
const LOSSES: [Option<&str>; 5] = [
    None,
    None,
    Some("bfd\"\nloss = \"dpo\"\nbeta = 0.3\ndata = [\"records.jsonl\"]\ndata-format = \"preference"),
    Some("bfd\"\nloss = \"dapo\"\nbeta = 0.1\ndata = [\"records.jsonl\"]\ndata-format = \"rollouts"),
    Some("bfd\"\nloss = \"distill\"\nkd-ratio = 0.7\nloss-top-k = 2\ndata = [\"records.jsonl\"]\ndata-format = \"teacher"),
];

/// Random choices of one case.
struct Pick(u64);

impl Pick {
    /// One of `choices`, for the `nth` question.
    fn of<T: Copy>(&self, nth: u64, choices: &[T]) -> T {
        let mixed = (self.0 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(nth.wrapping_mul(0xd1b5_4a32_d192_ed03));
        choices[((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as usize % choices.len()]
    }
}

/// Random tokens in rows of two documents, or of the pairs, completions or documents that a loss of these has. One of four targets counts.
#[derive(Clone)]
struct Text(Noise, RandomTokens);

impl Text {
    fn new(shape: &ModelShape) -> Self {
        Self(Noise::new(5, shape.vocab), RandomTokens::new(5, shape.vocab))
    }
}

impl Batches for Text {
    fn fill(&mut self, batch: &mut Batch<'_>) -> Result<()> {
        if batch.list.is_some() {
            self.1.fill(batch)?
        } else {
            self.0.fill(batch)?
        }
        batch.targets.iter_mut().enumerate().filter(|(at, _)| at % 4 > 0).for_each(|(_, target)| *target = -1);
        if batch.list.is_some() {
            return Ok(());
        }
        let second = 3 + self.0.next() % 4;
        for (place, document) in batch.documents.iter_mut().flat_map(|documents| documents.iter_mut()).enumerate() {
            *document = if place as i32 % 8 < second { 0 } else { second };
        }
        Ok(())
    }
}

/// Digest, losses with the numbers of other losses than that of tokens, evaluated loss and logits. Ranks that share sequences compute no logits.
type Bits = (String, Vec<(u32, String)>, u32, Vec<u32>);

struct Ran {
    bits: Bits,
    counts: Counts,
    /// Bytes that crossed the link, to the device and to the host.
    crossed: [u64; 2],
}

/// Runs steps, then an evaluation, which takes one micro-batch after the other in every order.
struct Steps;

impl UseEngine for Steps {
    type Output = Ran;

    fn run<D: Kernels>(self, mut engine: Engine<D>) -> Result<Ran> {
        load(&mut engine, random_params(5));
        let mut batches = Text::new(engine.shape());
        let (mut counts, mut crossed, mut losses) = (Counts::default(), [0; 2], Vec::new());
        for _ in 0..STEPS {
            let report = engine.step(1e-2, &mut batches)?;
            counts += report.counts;
            crossed = [crossed[0] + report.counters.h2d_bytes, crossed[1] + report.counters.d2h_bytes];
            losses.push((report.loss.to_bits(), format!("{:?}", report.objective)));
        }
        let loss = engine.evaluate(&mut batches.clone())?.loss as f32;
        let has_logits = engine.plan().recipe.step.sequence_ranks == 1 && engine.plan().recipe.objective.is_none();
        let logits = if has_logits { engine.logits(&mut batches)? } else { Vec::new() };
        let logits = logits.into_iter().map(f32::to_bits).collect();
        Ok(Ran { bits: (digest(&mut engine), losses, loss.to_bits(), logits), counts, crossed })
    }
}

fn run(plan: &Plan, shape: &ModelShape) -> Ran {
    on_cpus(plan, shape, &Topology::this_machine(), Steps).unwrap()
}

fn plan(lines: &str, shape: &ModelShape) -> Plan {
    Plan::new(&settings(&format!("{lines}\nseed = 5\nseq-length = 8\nmax-steps = 99")).request(shape), &Machine::cpu(2), false).unwrap()
}

/// The shortest gradient ring that holds any segment and two buckets, if it saves memory.
fn segment_ring(plan: &Plan, shape: &ModelShape) -> Option<RingShape> {
    let (table, segments) = (TensorTable::new(shape), &plan.placement.segments);
    let grain = RING_GRAIN_BYTES / plan.recipe.numerics.dtype.bytes();
    let longest = (0..segments.count()).map(|segment| segments.flat_range(segment, &table).len()).max().unwrap();
    let period_elems = (longest + 2 * plan.placement.layout.bucket_elems()).next_multiple_of(grain);
    let layout = &plan.placement.layout;
    let ringed_elems = if plan.site.ranks == 1 { layout.offloaded_elems() } else { layout.flat_elems() } / grain * grain;
    (ringed_elems > period_elems).then_some(RingShape { ringed_elems, period_elems })
}

#[test]
fn segments_of_layers_change_no_bit() {
    let (mut speculated, mut skipped, mut clipped, mut ringed, mut streamed, mut halves, mut summed) = (0, 0, 0, 0, 0, 0, 0);
    let mut losses = [0; 2];
    for seed in seeds(120) {
        let pick = Pick(seed);
        let (layers, channels) = pick.of(0, &[(5, 32), (9, 32), (12, 32), (8, 64)]);
        let (kind, tied) = (pick.of(17, &[Kind::Llama, Kind::Delta, Kind::Moe, Kind::Gemma, Kind::Latent]), pick.of(18, &[false, true]));
        let fp8 = if kind.excludes_fp8() { "dtype = \"bfloat16\"" } else { "matmul-dtype = \"fp8\"" };
        let shape = kind.model()(layers, channels, pick.of(1, &[64, 300]), tied);
        let (each, turn) = (pick.of(2, &[1, 2, 3, 4]), pick.of(3, &[0, 1, 2, 3, 4]));
        let (shares, each_share) = pick.of(4, &[(1, 1), (1, 2), (1, 4), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2)]);
        let group = if shares == 4 { pick.of(5, &[1, 2]) } else { 1 };
        let loss = pick.of(22, &LOSSES);
        let fault =
            pick.of(6, &["", "", "{step = 2, element = 5000, share = 0, value = \"nan\"}", "{step = 3, element = 9000, value = 1e3}"]);
        let common = format!(
            "{}\nmoments = \"{}\"\nmax-grad-norm = {}\ngradient-accumulation-steps = {}\ngradient-shares = {shares}\n\
             gradient-group = {group}\ninject = [{fault}]\n{}\nhead-rows = \"{}\"\nlogits-dtype = \"{}\"\npacking = \"{}\"\nper-device-train-batch-size = 2\nlearning-rate = 1e-2\nweight-decay = 0.1",
            pick.of(7, &["dtype = \"bfloat16\"", fp8, "dtype = \"float16\"", "dtype = \"float32\"", fp8]),
            pick.of(8, &["float32", "bfloat16", "int8"]),
            pick.of(9, &["0.0", "1e-3", "1.7", "1e9"]),
            shares * each_share,
            kind.balance(),
            if tied { "all" } else { pick.of(19, &["all", "trained"]) },
            pick.of(23, &["auto", "float32"]),
            loss.unwrap_or(pick.of(20, &["wrapped", "bfd"])),
        );
        let want = run(&plan(&format!("strategy = \"no-offload\"\nthreads = 1\n{common}"), &shape), &shape);
        let flow = cfg!(feature = "weight-flow") && pick.of(10, &[true, true, false]);
        let strategy = pick.of(11, &["superoffload", "superoffload", "zero-offload"]);
        let may_split = cfg!(feature = "repartition") && strategy == "superoffload" && !common.starts_with("dtype = \"float");
        let way = format!(
            "strategy = \"{}\"\nlayer-order = \"segments:{each},{turn}\"\nweights = \"{}\"\nbucket-mib = {}\nslots = {}\nactivations = \"{}\"\n\
             without = [{}]\nmasters = \"{}\"\ndevice = \"cpu\"\nadversary = {seed}",
            strategy,
            if flow { "flow" } else { "auto" },
            pick.of(12, &[0.0078, 0.0156, 0.03]),
            pick.of(13, &[1, 2, 3]),
            pick.of(14, &["auto", "keep", "recompute-cheap", "recompute-block"]),
            pick.of(15, &["", "\"adaptive\""]),
            if may_split { pick.of(21, &["float32", "split"]) } else { "float32" },
        );
        let request = settings(&format!("{way}\n{common}\nseed = 5\nseq-length = 8\nmax-steps = 99")).request(&shape);
        // A long segment leaves nothing to stream.
        let Ok(mut plan) = Plan::new(&request, &Machine::cpu(2), false) else { continue };
        if pick.of(16, &[true, true, false]) {
            plan.placement.rings.grads = segment_ring(&plan, &shape);
        }
        let have = run(&plan, &shape);
        assert!(have.bits == want.bits, "seed {seed}:\n{way}\n{common}");
        (speculated, skipped) = (speculated + have.counts.speculated, skipped + have.counts.skipped);
        (clipped, ringed) = (clipped + have.counts.clipped, ringed + usize::from(plan.placement.rings.grads.is_some()));
        streamed += usize::from(plan.placement.rings.weights.is_some());
        halves += usize::from(plan.placement.rings.split_masters);
        losses[usize::from(tied)] += usize::from(loss.is_some());
        summed += usize::from(plan.placement.rings.sums.is_some());
    }
    assert!(skipped > 0 && clipped > 0 && ringed > 0 && summed > 0, "{skipped} {clipped} {ringed} {summed}");
    assert!(losses.iter().all(|cases| *cases > 1), "{losses:?}");
    assert_eq!((speculated > 0, streamed > 0), (cfg!(feature = "stv"), cfg!(feature = "weight-flow")));
    assert_eq!(halves > 0, cfg!(all(feature = "weight-flow", feature = "repartition")));
}

/// Settings of one case on several ranks, which decide the bits.
struct RanksCase {
    shape: ModelShape,
    common: String,
    ranks: usize,
    /// Ranks that share each sequence.
    sequence_ranks: usize,
    /// Micro-batches of each rank.
    each: usize,
}

impl RanksCase {
    fn of(pick: &Pick) -> Self {
        let (ranks, sequence_ranks) = pick.of(0, &[(2, 1), (3, 1), (4, 1), (2, 2), (4, 2)]);
        let (rounds, each_share) = pick.of(1, &[(1, 2), (2, 1), (2, 2), (3, 1)]);
        let (kind, tied) = (pick.of(2, &[Kind::Llama, Kind::Delta, Kind::Moe, Kind::Gemma, Kind::Latent]), pick.of(3, &[false, true]));
        let kind = if sequence_ranks > 1 { Kind::Llama } else { kind };
        let fp8 = if kind.excludes_fp8() { "dtype = \"bfloat16\"" } else { "matmul-dtype = \"fp8\"" };
        let common = format!(
            "{}\nmoments = \"{}\"\nmax-grad-norm = {}\ngradient-shares = {}\ngradient-group = {}\nsequence-ranks = {sequence_ranks}\ninject = [{}]\n\
             {}\nhead-rows = \"{}\"\nlogits-dtype = \"{}\"\npacking = \"{}\"\nper-device-train-batch-size = 2\nlearning-rate = 1e-2\nweight-decay = 0.1",
            pick.of(4, &["dtype = \"bfloat16\"", fp8, "dtype = \"float16\"", "dtype = \"float32\""]),
            pick.of(5, &["float32", "bfloat16", "int8"]),
            pick.of(6, &["0.0", "1e-3", "1.7", "1e9"]),
            ranks * rounds,
            if ranks == 4 { pick.of(7, &[1, 2, 4]) } else { pick.of(7, &[1, ranks]) },
            pick.of(8, &["", "", "{step = 2, element = 5000, share = 1, value = \"nan\"}", "{step = 3, element = 9000, value = 1e3}"]),
            kind.balance(),
            if tied { "all" } else { pick.of(9, &["all", "trained"]) },
            pick.of(21, &["auto", "float32"]),
            if sequence_ranks > 1 { "wrapped" } else { pick.of(20, &LOSSES).unwrap_or(pick.of(10, &["wrapped", "bfd"])) },
        );
        Self { shape: kind.model()(9, 64, 64, tied), common, ranks, sequence_ranks, each: rounds * each_share }
    }

    /// The plan on `ranks` ranks for the same steps.
    fn plan(&self, ranks: usize, way: &str) -> Result<Plan> {
        let accumulated = self.each * self.ranks / ranks;
        let lines = format!("{way}\n{}\ngpus = {ranks}\ngradient-accumulation-steps = {accumulated}", self.common);
        let lines = format!("{lines}\nseed = 5\nseq-length = 8\nmax-steps = 99");
        Plan::new(&settings(&lines).request(&self.shape), &Machine::cpu(2), false)
    }
}

#[test]
fn segments_of_layers_on_several_ranks_change_no_bit() {
    let (mut speculated, mut skipped, mut clipped, mut kept, mut sharded, mut shared) = (0, 0, 0, 0, 0, 0);
    let (mut ringed, mut summed, mut ran) = (0, 0, 0);
    for seed in seeds(210).step_by(crate::sweep::sweep(2, 1)) {
        let pick = Pick(seed + 1004);
        let case = RanksCase::of(&pick);
        let Ok(reference) = case.plan(case.sequence_ranks, "strategy = \"no-offload\"\nthreads = 1\nbucket-mib = 0.0625") else { continue };
        let (each, turn) = (pick.of(11, &[1, 2, 3, 4]), pick.of(12, &[0, 1, 2, 3, 4]));
        let weights = if cfg!(feature = "weight-flow") { pick.of(13, &["replicated", "sharded", "fully-sharded"]) } else { "auto" };
        let way = format!(
            "strategy = \"{}\"\nlayer-order = \"segments:{each},{turn}\"\nweights = \"{weights}\"\nbucket-mib = {}\nslots = {}\nactivations = \"{}\"\n\
             without = [{}]\ndevice = \"cpu\"\nadversary = {seed}",
            pick.of(14, &["superoffload", "superoffload", "zero-offload", "no-offload"]),
            pick.of(15, &[0.0157, 0.02, 0.03]) * case.ranks as f64,
            pick.of(16, &[1, 2, 3]),
            pick.of(17, &["auto", "keep", "recompute-cheap", "recompute-block"]),
            pick.of(18, &["", "\"adaptive\""]),
        );
        let Ok(mut plan) = case.plan(case.ranks, &way) else { continue };
        if pick.of(19, &[true, true, false]) {
            plan.placement.rings.grads = segment_ring(&plan, &case.shape);
        }
        let (want, have) = (run(&reference, &case.shape), run(&plan, &case.shape));
        assert!(have.bits == want.bits, "seed {seed}:\n{way}\n{}\ngpus = {}", case.common, case.ranks);
        (ran, speculated, skipped) = (ran + 1, speculated + have.counts.speculated, skipped + have.counts.skipped);
        let (layout, rings) = (&plan.placement.layout, plan.placement.rings);
        (clipped, ringed) = (clipped + have.counts.clipped, ringed + usize::from(rings.grads.is_some()));
        kept += usize::from(rings.grads.is_some() && layout.offloaded() < layout.count());
        summed += usize::from(rings.sums.is_some());
        sharded += usize::from(rings.weights.is_some());
        shared += usize::from(case.sequence_ranks > 1);
    }
    assert!(ran > 8 && skipped > 0 && clipped > 0 && ringed > 0 && summed > 0 && shared > 0, "{ran} {skipped} {clipped} {ringed} {summed}");
    assert_eq!((speculated > 0, kept > 0), (cfg!(feature = "stv"), cfg!(feature = "repartition")));
    assert_eq!(sharded > 2, cfg!(feature = "weight-flow"), "{sharded}");
}

/// The number of micro-batches changes no byte on the link: weights come once for the forward and once for the backward pass, and gradients
/// leave once.
#[cfg(feature = "weight-flow")]
#[test]
fn segments_move_weights_twice_a_step_and_gradients_once() {
    let shape = tiny_llama(12, 64, 64, false);
    let (table, crossed) = (TensorTable::new(&shape), |order: &str, count: usize| {
        let lines = format!(
            "strategy = \"zero-offload\"\nweights = \"flow\"\nlayer-order = \"{order}\"\nbucket-mib = 0.0156\nper-device-train-batch-size = 2\n\
             gradient-accumulation-steps = {count}\ngradient-shares = {count}\nmax-grad-norm = 0.0"
        );
        let plan = plan(&lines, &shape);
        let ran = run(&plan, &shape);
        assert_eq!(ran.counts.skipped, 0);
        (ran.crossed, plan)
    });
    let whole = crossed("whole", 4).0[0];
    for (each, turn) in [(1, 1), (2, 3), (3, 2)] {
        let order = format!("segments:{each},{turn}");
        let ([to_device, to_host], plan) = crossed(&order, 4);
        let (ring, segments) = (plan.placement.rings.weights.unwrap(), &plan.placement.segments);
        let beside = plan.placement.layout.offloaded_elems() - ring.ringed_elems;
        let turn_elems = segments.flat_range(segments.count() - 1, &table).len();
        // Weights outside the ring were copied once before the first step.
        let most = STEPS as usize * (2 * ring.ringed_elems - turn_elems) + (STEPS as usize + 1) * beside;
        assert!(to_device as usize <= 2 * most, "{to_device} bytes instead of {}, {order}", 2 * most);
        assert_eq!(to_host as usize, 2 * STEPS as usize * plan.placement.layout.offloaded_elems(), "{order}");
        assert_eq!([to_device, to_host], crossed(&order, 7).0, "{order}");
        assert!(to_device < whole / 2, "{to_device} and {whole}, {order}");
    }
}

#[test]
fn an_order_without_segments_is_refused_with_a_remedy() {
    let refused = |lines: &str, shape: &ModelShape| {
        let lines = format!("{lines}\nlayer-order = \"segments:2,1\"\nseq-length = 8\nmax-steps = 9");
        Plan::new(&settings(&lines).request(shape), &Machine::cpu(2), false).unwrap_err().to_string()
    };
    let untied = tiny_llama(5, 32, 64, false);
    for (lines, shape, words) in [
        ("gpus = 2\nprocesses = 2", &untied, "--processes 1"),
        ("head-rows = \"trained\"", &tiny_llama(5, 32, 64, true), "--head-rows all"),
        ("activations = \"host\"", &untied, "--activations auto"),
    ] {
        let message = refused(lines, shape);
        assert!(message.starts_with("--layer-order segments:2,1 ") && message.contains(words), "{message}");
        assert!(message.ends_with("or --layer-order whole"), "{message}");
    }
}

/// The spans of visits on a timeline of one step.
fn visits(order: &str) -> Vec<(&'static str, u32)> {
    let shape = tiny_llama(3, 32, 64, false);
    let lines = format!("layer-order = \"{order}\"\ngradient-accumulation-steps = 2\nseed = 5\nseq-length = 8\nmax-steps = 9");
    let plan = Plan::new(&settings(&lines).request(&shape), &Machine::cpu(2), true).unwrap();
    let mut engine = start(&plan, &shape, random_params(5));
    engine.step(1e-2, &mut Text::new(&shape)).unwrap();
    engine.flush().unwrap();
    let tracks = engine.finish().unwrap();
    let driver = tracks.iter().find(|track| track.track == "driver").unwrap();
    driver.spans().iter().map(|span| (span.name, span.index)).filter(|(name, _)| name.starts_with("segment")).collect()
}

#[test]
fn each_visit_of_the_timeline_names_its_segment() {
    let twice = |name, segment| [(name, segment); 2];
    let expected = [("segment forward", 0), ("segment turn", 1), ("segment backward", 0)].map(|(name, segment)| twice(name, segment));
    assert_eq!(visits("segments:2,1"), expected.concat());
    assert!(visits("whole").is_empty());
}

#[test]
fn the_facts_of_a_plan_name_its_order() {
    let workspace = Workspace::new();
    let model = workspace.write("three-layers.json", CONFIG.replace("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 3"));
    let flags =
        ["simulate", "--json", "--hardware=h200-pcie5", "--seq-length=16", "--gradient-accumulation-steps=4", "--steps=1", "--model"];
    for (order, loss) in [("whole", None), ("segments:1,1", None), ("segments:1,1", Some("--loss=dpo"))] {
        let outcome = run_program(program(&flags).arg(&model).args(["--layer-order", order, "--warmup=0"]).args(loss));
        let line: serde_json::Value = serde_json::from_str(outcome.stdout.trim()).unwrap();
        assert_eq!(line["plan"]["layer_order"], order, "{outcome:?}");
    }
}
