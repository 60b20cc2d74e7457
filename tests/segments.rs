//! Steps that take all micro-batches through a segment of layers before the next segment have the bits of steps that take one micro-batch
//! after the other, and move fewer bytes over the link.

use crate::exactness::{Kind, seeds};
use crate::program::{CONFIG, Workspace, program, run as run_program};
use crate::support::{Noise, digest, random_params, settings, start, tiny_llama};
use superoffload::internals::data::{Batch, Batches};
use superoffload::internals::engine::Counts;
use superoffload::internals::host::RING_GRAIN_BYTES;
use superoffload::internals::memory::RingShape;
use superoffload::internals::model::{ModelShape, TensorTable};
use superoffload::internals::planner::Machine;
use superoffload::{Plan, Result};

const STEPS: u64 = 5;

/// Random choices of one case.
struct Pick(u64);

impl Pick {
    /// One of `choices`, for the `nth` question.
    fn of<T: Copy>(&self, nth: u64, choices: &[T]) -> T {
        let mixed = (self.0 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(nth.wrapping_mul(0xd1b5_4a32_d192_ed03));
        choices[((mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 40) as usize % choices.len()]
    }
}

/// Random tokens in rows of two documents. One of four targets counts.
#[derive(Clone)]
struct Text(Noise);

impl Batches for Text {
    fn fill(&mut self, batch: &mut Batch<'_>) -> Result<()> {
        self.0.fill(batch)?;
        batch.targets.iter_mut().enumerate().filter(|(at, _)| at % 4 > 0).for_each(|(_, target)| *target = -1);
        let second = 3 + self.0.next() % 4;
        for (place, document) in batch.documents.iter_mut().flat_map(|documents| documents.iter_mut()).enumerate() {
            *document = if place as i32 % 8 < second { 0 } else { second };
        }
        Ok(())
    }
}

/// Digest, losses, evaluated loss and logits.
type Bits = (String, Vec<u32>, u32, Vec<u32>);

struct Ran {
    bits: Bits,
    counts: Counts,
    /// Bytes that crossed the link, to the device and to the host.
    crossed: [u64; 2],
}

/// Runs steps, then an evaluation, which takes one micro-batch after the other in every order.
fn run(plan: &Plan, shape: &ModelShape) -> Ran {
    let mut engine = start(plan, shape, random_params(5));
    let (mut batches, mut counts, mut crossed, mut losses) = (Text(Noise::new(5, shape.vocab)), Counts::default(), [0; 2], Vec::new());
    for _ in 0..STEPS {
        let report = engine.step(1e-2, &mut batches).unwrap();
        counts += report.counts;
        crossed = [crossed[0] + report.counters.h2d_bytes, crossed[1] + report.counters.d2h_bytes];
        losses.push(report.loss.to_bits());
    }
    let loss = engine.evaluate(&mut batches.clone()).unwrap().loss as f32;
    let logits: Vec<u32> = engine.logits(&mut batches).unwrap().into_iter().map(f32::to_bits).collect();
    Ran { bits: (digest(&mut engine), losses, loss.to_bits(), logits), counts, crossed }
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
    let ringed_elems = plan.placement.layout.offloaded_elems() / grain * grain;
    (ringed_elems > period_elems).then_some(RingShape { ringed_elems, period_elems })
}

#[test]
fn segments_of_layers_change_no_bit() {
    let (mut speculated, mut skipped, mut clipped, mut ringed, mut streamed, mut halves, mut summed) = (0, 0, 0, 0, 0, 0, 0);
    for seed in seeds(120) {
        let pick = Pick(seed);
        let (layers, channels) = pick.of(0, &[(5, 32), (9, 32), (12, 32), (8, 64)]);
        let (kind, tied) = (pick.of(17, &[Kind::Llama, Kind::Delta, Kind::Moe]), pick.of(18, &[false, true]));
        let (experts, fp8) = (kind == Kind::Moe, if kind == Kind::Delta { "dtype = \"bfloat16\"" } else { "matmul-dtype = \"fp8\"" });
        let shape = kind.model()(layers, channels, pick.of(1, &[64, 300]), tied);
        let (each, turn) = (pick.of(2, &[1, 2, 3, 4]), pick.of(3, &[0, 1, 2, 3, 4]));
        let (shares, each_share) = pick.of(4, &[(1, 1), (1, 2), (1, 4), (2, 1), (3, 1), (4, 1), (2, 2), (3, 2)]);
        let group = if shares == 4 { pick.of(5, &[1, 2]) } else { 1 };
        let fault =
            pick.of(6, &["", "", "{step = 2, element = 5000, share = 0, value = \"nan\"}", "{step = 3, element = 9000, value = 1e3}"]);
        let common = format!(
            "{}\nmoments = \"{}\"\nmax-grad-norm = {}\ngradient-accumulation-steps = {}\ngradient-shares = {shares}\n\
             gradient-group = {group}\ninject = [{fault}]\n{}\nhead-rows = \"{}\"\npacking = \"{}\"\nper-device-train-batch-size = 2\nlearning-rate = 1e-2\nweight-decay = 0.1",
            pick.of(7, &["dtype = \"bfloat16\"", fp8, "dtype = \"float16\"", "dtype = \"float32\"", fp8]),
            pick.of(8, &["float32", "bfloat16", "int8"]),
            pick.of(9, &["0.0", "1e-3", "1.7", "1e9"]),
            shares * each_share,
            if experts { "router-aux-loss-coef = 0.5" } else { "" },
            if tied { "all" } else { pick.of(19, &["all", "trained"]) },
            pick.of(20, &["wrapped", "bfd"]),
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
        summed += usize::from(plan.placement.rings.sums.is_some());
    }
    assert!(skipped > 0 && clipped > 0 && ringed > 0 && summed > 0, "{skipped} {clipped} {ringed} {summed}");
    assert_eq!((speculated > 0, streamed > 0), (cfg!(feature = "stv"), cfg!(feature = "weight-flow")));
    assert_eq!(halves > 0, cfg!(all(feature = "weight-flow", feature = "repartition")));
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
        ("gpus = 2", &untied, "--gpus 1"),
        ("head-rows = \"trained\"", &tiny_llama(5, 32, 64, true), "--head-rows all"),
        ("activations = \"host\"", &untied, "--activations auto"),
    ] {
        let message = refused(lines, shape);
        assert!(message.starts_with("--layer-order segments:2,1 ") && message.contains(words), "{message}");
        assert!(message.ends_with("or --layer-order whole"), "{message}");
    }
}

#[test]
fn the_facts_of_a_plan_name_its_order() {
    let workspace = Workspace::new();
    let model = workspace.write("three-layers.json", CONFIG.replace("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 3"));
    let flags =
        ["simulate", "--json", "--hardware=h200-pcie5", "--seq-length=16", "--gradient-accumulation-steps=4", "--steps=1", "--model"];
    for order in ["whole", "segments:1,1"] {
        let outcome = run_program(program(&flags).arg(&model).args(["--layer-order", order, "--warmup=0"]));
        let line: serde_json::Value = serde_json::from_str(outcome.stdout.trim()).unwrap();
        assert_eq!(line["plan"]["layer_order"], order, "{outcome:?}");
    }
}
