//! No thread allocates in a step, and the memory of a run stays constant. This test is a separate binary without a harness, so that nothing
//! else allocates while the allocator watches.
#![allow(unsafe_code)]

#[path = "support.rs"]
#[expect(dead_code, reason = "shared with the other test binary")]
mod support;

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;
use superoffload::internals::bucket::{BucketLayout, Tier};
use superoffload::internals::data::{DataPosition, Dataset, Loader, Preparation, RowRules, Tokenizer};
use superoffload::internals::device::Kernels;
use superoffload::internals::engine::{Counts, Engine, FrozenState, Watchdog};
use superoffload::internals::hardware::Topology;
use superoffload::internals::launch::{UseEngine, on_cpus};
use superoffload::internals::metrics::rss_bytes;
use superoffload::internals::model::{ModelShape, TensorTable};
use superoffload::internals::optim::StatePart;
use superoffload::internals::planner::Machine;
use superoffload::{Plan, Result, Settings};
use support::{emulator, grad_ring, load, random_params, resident, settings, start, tiny_llama, tiny_moe};

/// The system's allocator. While watching, it records the backtrace of the first allocation.
struct Watched;

static WATCHING: AtomicBool = AtomicBool::new(false);
static FIRST: Mutex<Option<String>> = Mutex::new(None);

fn notice() {
    // Stops watching first, because taking the backtrace allocates.
    if WATCHING.load(Ordering::SeqCst) && WATCHING.swap(false, Ordering::SeqCst) {
        *FIRST.lock().unwrap() = Some(Backtrace::force_capture().to_string());
    }
}

// SAFETY: every call is forwarded to the system's allocator unchanged.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        notice();
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        notice();
        // SAFETY: guaranteed by the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        notice();
        // SAFETY: guaranteed by the caller.
        unsafe { System.realloc(block, layout, bytes) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: guaranteed by the caller.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

/// The backtrace of the first allocation of any thread during `work`.
fn first_allocation(work: impl FnOnce()) -> Option<String> {
    WATCHING.store(true, Ordering::SeqCst);
    work();
    WATCHING.store(false, Ordering::SeqCst);
    FIRST.lock().unwrap().take()
}

const WARM_UP_STEPS: u64 = 3;
const STEPS: u64 = 20;

/// Settings with real threads and two micro-batches a step.
const COMMON: &str = "threads = 2\nbucket-mib = 0.03125\nslots = 2\nseq-length = 16\nper-device-train-batch-size = 2\n\
                      gradient-accumulation-steps = 2\nweight-decay = 0.1\nmax-steps = 99\n";

const STRATEGIES: [&str; 4] = [
    "strategy = \"superoffload\"\n",
    "strategy = \"superoffload\"\nwithout = [\"adaptive\"]\n",
    "strategy = \"zero-offload\"\n",
    "strategy = \"no-offload\"\n",
];

fn main() {
    let found = first_allocation(|| std::thread::scope(|s| assert!(s.spawn(|| vec![1u8; 9].len()).join().is_ok_and(|len| len == 9))));
    assert!(found.is_some(), "the allocator does not notice");
    for strategy in STRATEGIES {
        let committed = steps(strategy, "max-grad-norm = 0\n");
        assert!(committed.committed > 0 && committed.clipped == 0, "{strategy}{committed:?}");
        let clipped = steps(strategy, "max-grad-norm = 1e-3\n");
        assert!(clipped.committed == 0 && clipped.clipped > 0, "{strategy}{clipped:?}");
        let skipped = steps(strategy, "dtype = \"float16\"\ninject = [{step = 5, element = 7, value = \"nan\"}]\n");
        assert!(skipped.skipped > 0 && skipped.skipped < skipped.committed + skipped.clipped, "{strategy}{skipped:?}");
    }
    STRATEGIES.iter().for_each(|strategy| _ = steps(strategy, "moments = \"bfloat16\"\n"));
    STRATEGIES.iter().for_each(|strategy| _ = steps(strategy, "moments = \"int8\"\n"));
    let on_device = STRATEGIES.iter().filter(|strategy| strategy.contains("no-offload") || !resident(strategy).is_empty());
    on_device.for_each(|strategy| _ = steps(strategy, "masters = \"split\"\n"));
    // The number of rows per expert changes in every step.
    steps(STRATEGIES[1], "# experts\n");
    steps(STRATEGIES[1], "gradient-shares = 2\n");
    if cfg!(feature = "weight-flow") {
        steps(STRATEGIES[1], "gradient-shares = 2\nweights = \"flow\"\nlayer-order = \"segments:2,1\"\n");
    }
    steps(STRATEGIES[1], "gradient-shares = 2\nlayer-order = \"segments:1,0\"\n# experts\n");
    steps_of(STRATEGIES[1], "gradient-shares = 2\n", |plan| plan.placement.rings.sums_on_host = true);
    if cfg!(feature = "stv") {
        let late_rows = |plan: &mut Plan| assert!(!plan.placement.layout.early().is_empty(), "{plan}");
        steps_of(STRATEGIES[1], "early-rows = \"on\"\n", late_rows);
    }
    // A save reads the state of the step before the watched ones.
    steps(STRATEGIES[2], "save-memory = \"0\"\n");
    STRATEGIES[..3].iter().for_each(|strategy| _ = steps(strategy, "save-memory = \"4MiB\"\n"));
    steps(STRATEGIES[2], "gpus = 2\nsave-memory = \"4MiB\"\n");
    STRATEGIES.iter().for_each(|strategy| _ = steps(strategy, "gpus = 2\n"));
    steps(STRATEGIES[1], "gpus = 2\nsequence-ranks = 2\n");
    if cfg!(feature = "weight-flow") {
        steps(STRATEGIES[1], "gpus = 2\nweights = \"sharded\"\n");
    }
    steps_of(STRATEGIES[1], "gpus = 2\ngradient-shares = 4\nweights = \"auto\"\n", |plan| {
        plan.placement.rings.grads = grad_ring(plan, &TensorTable::new(&shape_of("weights")));
        assert!(plan.placement.rings.grads.is_some(), "{plan}");
    });
    if cfg!(feature = "superchip-cast") {
        steps(STRATEGIES[1], "cast = \"device\"\n");
    }
    if cfg!(feature = "weight-flow") {
        STRATEGIES[..3].iter().for_each(|strategy| _ = steps(strategy, "weights = \"flow\"\n"));
    }
    steps_of(STRATEGIES[3], "", |plan| {
        plan.placement.layout = BucketLayout::new(plan.placement.layout.flat_elems(), plan.placement.layout.bucket_elems(), Tier::Unified);
    });
    // The memory of an emulated program includes that of its emulator.
    if emulator().is_none() {
        memory_stays_flat();
    }
}

/// Trains on the built-in text with a timeline. Panics with a backtrace if a step after the warm-up allocates.
fn steps(strategy: &str, more: &str) -> Counts {
    steps_of(strategy, more, |_| ())
}

fn steps_of(strategy: &str, more: &str, change: impl FnOnce(&mut Plan)) -> Counts {
    let settings = settings(&format!("{COMMON}{}{strategy}{more}", resident(strategy)));
    let shape = shape_of(more);
    let mut plan = Plan::new(&settings.request(&shape), &Machine::cpu(2), true).unwrap();
    change(&mut plan);
    let name = format!("{strategy}{more}");
    on_cpus(&plan, &shape, &Topology::this_machine(), Watch { name, loader: loader(&settings, &shape) }).unwrap()
}

/// The model of a case. It has experts if a comment in `more` names them, enough layers for a weight ring if `more` asks for one, and a
/// vocabulary with buckets inside the embedding if some leave early.
fn shape_of(more: &str) -> ModelShape {
    let model = if more.contains("experts") { tiny_moe } else { tiny_llama };
    model(if more.contains("weights") { 12 } else { 2 }, 64, if more.contains("early") { 1024 } else { 256 }, true)
}

/// Steps under the watching allocator, on one or several devices.
struct Watch {
    name: String,
    loader: Loader,
}

impl UseEngine for Watch {
    type Output = Counts;

    fn run<D: Kernels>(self, mut engine: Engine<D>) -> Result<Counts> {
        let (Self { name, mut loader }, plan) = (self, engine.plan().clone());
        load(&mut engine, random_params(1));
        let (mut counts, watched) = (Counts::default(), engine.watched());
        let mut train = |engine: &mut Engine<D>, steps| (0..steps).for_each(|_| counts += engine.step(1e-3, &mut loader).unwrap().counts);
        // The limit is so long that the watchdog never raises an alarm, which would allocate.
        let dog = Watchdog::start(watched, Duration::from_secs(3600), Box::new(|alarm| panic!("{alarm:?}"))).unwrap();
        train(&mut engine, WARM_UP_STEPS);
        if !plan.placement.layout.elems_in(Tier::Device).is_empty() {
            // Steps after a change of plan must not allocate either.
            assert!(engine.replan(plan).unwrap().is_none());
        }
        train(&mut engine, WARM_UP_STEPS);
        let states = if name.contains("save-memory") { engine.begin_save().unwrap() } else { Vec::new() };
        let readers: Vec<_> = states.into_iter().map(read_slowly).collect();
        let found = first_allocation(|| {
            for _ in 0..STEPS {
                train(&mut engine, 1);
                dog.poll_now();
            }
        });
        drop(dog);
        readers.into_iter().for_each(|reader| reader.join().unwrap());
        assert!(found.is_none(), "{name}allocates: {}", found.unwrap_or_default());
        assert!(loader.position().epoch == 1, "an epoch ended while the allocator watched");
        Ok(counts)
    }
}

/// Reads the state of a save in another thread, slowly. The thread has started when this returns.
fn read_slowly(state: FrozenState) -> JoinHandle<()> {
    let (started, start) = mpsc::channel();
    let thread = std::thread::spawn(move || {
        let mut bytes = vec![0; 1 << 10];
        started.send(()).unwrap();
        while let Some(bucket) = state.next().unwrap() {
            let array_bytes = 4 * state.range(bucket).len();
            for start in (0..array_bytes).step_by(bytes.len()) {
                let out = &mut bytes[..(array_bytes - start).min(1 << 10)];
                state.read(bucket, StatePart::PARAMS, start, out).unwrap();
                std::thread::sleep(Duration::from_micros(20));
            }
            state.saved(bucket);
        }
    });
    start.recv().unwrap();
    thread
}

/// The loader starts at a position where the epoch ends during the watched steps.
fn loader(settings: &Settings, shape: &ModelShape) -> Loader {
    let dataset = Dataset::open(
        &settings.data,
        &Tokenizer::bytes(),
        shape.vocab,
        RowRules::wrapped(settings.seq_length),
        &mut Preparation::default(),
    )
    .unwrap();
    let groups = (settings.gpus / settings.sequence_ranks) as u64;
    let sequences = settings.per_device_train_batch_size as u64 * 2 * groups * (2 * WARM_UP_STEPS + STEPS / 2);
    let position = DataPosition { epoch: 0, next_sequence: dataset.sequences() as u64 - sequences };
    Loader::new(dataset, settings.per_device_train_batch_size, settings.seed, true, position).unwrap()
}

/// Compares the resident memory after 100 and 1,000 steps. There is no timeline, because its buffer grows into memory as it fills.
fn memory_stays_flat() {
    let settings = settings(&format!("{COMMON}{}{}max-grad-norm = 1\n", resident(STRATEGIES[1]), STRATEGIES[1]));
    let shape = tiny_llama(1, 32, 256, true);
    let plan = Plan::new(&settings.request(&shape), &Machine::cpu(2), true).unwrap();
    let (mut engine, mut loader) = (start(&plan, &shape, random_params(1)), loader(&settings, &shape));
    let mut rss_after = |steps| {
        (0..steps).for_each(|_| _ = engine.step(1e-3, &mut loader).unwrap());
        rss_bytes()
    };
    let (early, late) = (rss_after(100), rss_after(900));
    assert!(late.abs_diff(early) < (1 << 20).max(early / 100), "{early} bytes after 100 steps, {late} after 1,000");
}
