//! `bench step`: times steps with random tokens and random weights.

use super::options::StepOptions;
use super::record::{MemoryPeaks, StepRecord};
use crate::checkpoint::engine_state;
use crate::config::settings::Settings;
use crate::device::{Engines, Kernels, Peers};
use crate::engine::executor::Engine;
use crate::error::{Error, Result};
use crate::facts::{BuildFacts, MachineFacts, ModelFacts, PlanFacts};
use crate::hardware::gpu::{GpuSamples, Sampler};
use crate::hardware::parse::meminfo_bytes;
use crate::host::perf::{WORKER_ROLE, WorkerCounters};
use crate::launch::agreement::ProcessGroup;
use crate::launch::context::check_context;
use crate::launch::engine::{Launcher, UseEngine};
use crate::launch::gpu;
use crate::launch::processes::{FollowEngine, ThisProcess};
use crate::memory::MemorySpace;
use crate::metrics::MemoryUse;
use crate::model::shape::ModelShape;
use crate::planner::plan::Plan;
use crate::progress_event::ProgressEvent;
use crate::ranks::links::{EndOfRun, LastResort};
use crate::request::choices::SaveMemory;
use crate::signals::StopFlag;
use crate::simulate::random_tokens::{RandomData, RandomTokens};
use crate::simulate::timed::Steps;
use crate::trace::file::TraceFile;
use crate::units::counted;
use std::fmt::Display;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Rows and columns of the matrix product that gives the speed ceiling, and the duration of its measurement.
const CEILING_ELEMS: usize = 8192;
const CEILING_TIME: Duration = Duration::from_secs(2);

#[derive(Clone, Debug)]
pub(crate) struct StepBench {
    settings: Settings,
    config: String,
    shape: ModelShape,
    steps: Steps,
    data: RandomData,
}

struct Measurement<'a> {
    bench: &'a StepBench,
    launch: &'a Launcher,
    /// Settings of the benchmark with the number of GPUs resolved.
    settings: &'a Settings,
    /// Plan of all ranks.
    plan: &'a Plan,
    /// FLOP/s of a large matrix product on a GPU; see [`super::ceiling::matmul_flops`].
    matmul_flops: Option<f64>,
    log: &'a mut dyn FnMut(&dyn Display),
}

impl StepBench {
    /// Resolves `options`.
    ///
    /// # Errors
    /// `Usage` that names an option that makes no sense; errors in the model's configuration.
    pub(crate) fn new(mut options: StepOptions) -> Result<Self> {
        options.check()?;
        let (model, shape) = options.take_model()?;
        let StepOptions { warmup, steps, clip, data, train, .. } = options;
        let settings = Settings { save_memory: SaveMemory::Off, ..Settings::resolve_over(Settings::default(), train)? };
        let shape = settings.freezing(shape, Some(&model))?;
        check_context(&settings, &shape, &model)?;
        let steps = Steps { warmup, timed: steps, clip };
        Ok(Self { settings, config: model.display().to_string(), shape, steps, data })
    }

    /// Runs the benchmark; `log` receives progress lines. With several processes, only process 0 returns the record. `last_resort` ends a
    /// process that hangs.
    ///
    /// # Errors
    /// `Usage`, `Resource` or `Io` for options, devices, memory and files; the failure that ended another process.
    pub(crate) fn run(&self, last_resort: Option<LastResort>, log: &mut dyn FnMut(&dyn Display)) -> Result<Option<StepRecord>> {
        if self.settings.processes == 1 {
            return self.lead(None, log).map(Some);
        }
        let process_group = ProcessGroup::meet(&self.settings, &StopFlag::default(), last_resort, &mut |news| pass_on(news, log))?;
        let outcome = if self.settings.process == 0 {
            self.lead(Some(&process_group), log).map(Some)
        } else {
            self.follow(&process_group).map(|()| None)
        };
        // A process other than process 0 that ends because another one failed does not report that failure again.
        let failure = outcome.as_ref().err().filter(|error| self.settings.process == 0 || !matches!(error, Error::Rank { .. }));
        let end = failure.map_or_else(EndOfRun::default, |error| process_group.links.end_by(error));
        process_group.links.close(end);
        outcome
    }

    /// Times the steps of a single process, or of process 0 of several.
    fn lead(&self, process_group: Option<&ProcessGroup>, log: &mut dyn FnMut(&dyn Display)) -> Result<StepRecord> {
        let (launch, settings) =
            process_group.map_or_else(|| Launcher::new(&self.settings), |process_group| process_group.launcher(&self.settings))?;
        let chosen = &launch.chosen;
        if let Some(why) = &chosen.note {
            log(&format_args!("no GPU: {why}"));
        }
        for line in &chosen.peers {
            log(line);
        }
        for line in &launch.warnings(&settings) {
            log(&format_args!("warning: {line}"));
        }
        if let Some(rates_from) = &chosen.rates_from {
            log(&format_args!("rates: {rates_from}"));
        }
        let plan = launch.plan_for(&settings, &self.shape, settings.trace.is_some(), self.steps.clip)?;
        let settings = settings.settled(plan.split());
        log(&plan);
        let matmul_flops = chosen.gpus.first().map(|gpu| matmul_ceiling(&plan, gpu.index)).transpose()?;
        let user = Measurement { bench: self, launch: &launch, settings: &settings, plan: &plan, matmul_flops, log };
        let Some(process_group) = process_group else { return launch.engine(&plan, &self.shape, user) };
        process_group.propose(&plan, &settings, String::new())?;
        ThisProcess { launch: &launch, plan: &plan, shape: &self.shape, links: &process_group.links }.lead(user, &Stepping)
    }

    /// Runs the orders of process 0 until the benchmark ends.
    fn follow(&self, process_group: &ProcessGroup) -> Result<()> {
        let end = match process_group.plan(&self.settings, &self.shape)? {
            Ok((launch, plan, _)) => {
                let this = ThisProcess { launch: &launch, plan: &plan, shape: &self.shape, links: &process_group.links };
                match this.follow(&Stepping, |_| Ok(None)) {
                    Error::Rank { .. } => process_group.links.end_of_run()?,
                    own => return Err(own),
                }
            }
            Err(end) => end,
        };
        process_group.links.failure_of(end).map_or(Ok(()), Err)
    }
}

/// A follower that runs steps and saves nothing.
struct Stepping;

impl FollowEngine for Stepping {
    fn run<D: Kernels + Peers>(&self, engine: &mut Engine<D>, settle_down: impl FnOnce() -> Result<()>) -> Result<()> {
        engine.follow(settle_down)
    }
}

impl UseEngine for Measurement<'_> {
    type Output = StepRecord;

    /// Initializes `engine` with random weights, runs the steps, and ends it.
    fn run<D: Kernels>(self, mut engine: Engine<D>) -> Result<StepRecord> {
        let Self { bench, launch, settings, plan, matmul_flops, log } = self;
        let trace = settings.trace.as_deref().map(TraceFile::open).transpose()?;
        let start = Instant::now();
        engine.init_state(settings.seed, engine.plan().site.threads)?;
        engine.send_weights()?;
        let init_seconds = start.elapsed().as_secs_f64();
        let warn = |line: &str| log(&format_args!("warning: {line}"));
        let partition = launch.divide_cpus(settings, plan, warn)?;
        engine.product_notes().iter().for_each(|line| log(line));
        let Steps { warmup, timed: steps, clip } = bench.steps;
        log(&format_args!("random weights in {init_seconds:.1} s; {} of warm-up, then {steps}, clipping {clip}", counted(warmup, "step")));
        let mut tokens = RandomTokens::new(settings.seed, bench.shape.vocab).drawn_as(&bench.data);
        let start = Instant::now();
        bench.steps.warm_up(&mut engine, &mut tokens)?;
        log(&format_args!("warm-up in {:.1} s", start.elapsed().as_secs_f64()));
        let mut counters = WorkerCounters::start(WORKER_ROLE)?;
        let sampler = launch.chosen.is_gpu().then(Sampler::start);
        let timed = bench.steps.time(&mut engine, &mut tokens, log)?;
        let perf = counters.read()?;
        let (gpu, gpu_unwatched) = watched(sampler);
        let products = engine.product_algorithms();
        let (device, host_memory) = (engine.describe(), engine.host_memory().report(Path::new("/")));
        let memory = memory_peaks(plan, launch.topology.memory_available_bytes);
        let digest = settings.digest.then(|| engine_state::digest(&mut engine)).transpose()?;
        engine.flush()?;
        let tracks = engine.finish()?;
        trace.map(|trace| trace.write(&tracks)).transpose()?;
        let outcome = timed.outcome(&bench.shape, plan, matmul_flops, &tracks);
        Ok(StepRecord {
            bench: "step",
            unix_seconds: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            build: BuildFacts::this_program(),
            machine: MachineFacts::new(&launch.topology),
            device,
            gpus: launch.chosen.gpus.clone(),
            model: ModelFacts::new(bench.config.clone(), &bench.shape),
            clip: bench.steps.clip,
            data: bench.data.clone(),
            warmup: bench.steps.warmup,
            steps: bench.steps.timed,
            settings: settings.clone(),
            rates: launch.chosen.rates_from.as_ref().map(ToString::to_string),
            plan: PlanFacts::new(plan),
            partition,
            init_seconds,
            outcome,
            digest,
            products,
            memory,
            host_memory,
            perf,
            gpu,
            gpu_unwatched,
        })
    }
}

/// Passes a message of the rendezvous to `log`.
fn pass_on(news: ProgressEvent<'_>, log: &mut dyn FnMut(&dyn Display)) {
    match news {
        ProgressEvent::Note(line) | ProgressEvent::Detail(line) => log(&line),
        ProgressEvent::Warn(line) => log(&format_args!("warning: {line}")),
        ProgressEvent::Progress { .. } => {}
    }
}

/// FLOP/s of large matrix products in the plan's format, measured over seconds: the speed that the GPU sustains under its power limit.
fn matmul_ceiling(plan: &Plan, ordinal: usize) -> Result<f64> {
    let mut dev = gpu::open(ordinal, plan.site.cuda_libraries.clone(), Engines::OWN, 0, false)?;
    super::ceiling::matmul_flops(&mut dev, plan.recipe.numerics.dtype, CEILING_ELEMS, CEILING_TIME)
}

/// Samples of the GPU, or the reason why there are none.
fn watched(sampler: Option<Result<Sampler>>) -> (Option<GpuSamples>, Option<String>) {
    match sampler.map(|sampler| sampler.and_then(Sampler::stop)) {
        None => (None, None),
        Some(Ok(samples)) => (Some(samples), None),
        Some(Err(cause)) => (None, Some(cause.to_string())),
    }
}

/// Memory use of `plan` while its engine lives. `available_before` is the memory that was available before the engine started.
fn memory_peaks(plan: &Plan, available_before: Option<u64>) -> MemoryPeaks {
    let read_kib_field = |path: &str, key| meminfo_bytes(&std::fs::read_to_string(path).unwrap_or_default(), key);
    let available_now = read_kib_field("/proc/meminfo", "MemAvailable");
    MemoryPeaks {
        device_planned_bytes: plan.bytes_at(MemorySpace::Device),
        host_planned_bytes: plan.bytes_at(MemorySpace::Host),
        classes: MemoryUse::of(plan),
        rss_peak_bytes: read_kib_field("/proc/self/status", "VmHWM"),
        available_drop_bytes: available_before.zip(available_now).map(|(before, now)| before.saturating_sub(now)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::options::{DeviceChoice, GpuCount, TrainDtype};
    use crate::config::settings::TrainOptions;
    use crate::data::rows::batch::{Batch, Batches, arrays};
    use crate::model::shape::DEMO_CONFIG;
    use crate::request::choices::ActivationsChoice;

    /// Runs a small benchmark with these flags and returns its JSON line.
    fn line(clip: &str, train: TrainOptions) -> serde_json::Value {
        let small = [("num_hidden_layers\": 6", "num_hidden_layers\": 2"), ("size\": 256", "size\": 128"), ("heads\": 8", "heads\": 4")];
        let config = small.iter().fold(DEMO_CONFIG.to_string(), |config, (from, to)| config.replace(from, to));
        line_of(&config, clip, RandomData::default(), train)
    }

    fn line_of(config: &str, clip: &str, data: RandomData, train: TrainOptions) -> serde_json::Value {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, config).unwrap();
        let (device, threads) = (Some(DeviceChoice::Cpu), Some(2));
        let train =
            TrainOptions { model: Some(path), device, threads, seq_length: Some(16), per_device_train_batch_size: Some(2), ..train };
        let options = StepOptions { warmup: 1, steps: 5, clip: clip.parse().unwrap(), data, out: None, train };
        let mut printed = Vec::new();
        let record = StepBench::new(options).unwrap().run(None, &mut |line| printed.push(line.to_string())).unwrap().unwrap();
        assert_eq!(printed.len(), 3, "the plan, the beginning and the warm-up, no surprise: {printed:?}");
        assert!(
            printed[0].starts_with("plan") && printed[2].starts_with("warm-up in") && record.to_string().contains("Gparam/s"),
            "{record}"
        );
        serde_json::to_value(&record).unwrap()
    }

    #[test]
    fn tokens_of_a_step_become_micro_batches_of_the_requested_size() {
        let line = line("never", TrainOptions { tokens_per_step: Some(96), ..TrainOptions::default() });
        assert_eq!((&line["tokens_per_step"], &line["settings"]["gradient_accumulation_steps"]), (&96.into(), &3.into()));
    }

    #[test]
    fn the_line_holds_settings_facts_and_consistent_rates() {
        let line = line("never", TrainOptions { dtype: Some(TrainDtype::Float32), ..TrainOptions::default() });
        assert_eq!((&line["bench"], &line["settings"]["seq_length"], &line["clip"]), (&"step".into(), &16.into(), &"never".into()));
        assert_eq!((&line["model"]["layers"], &line["plan"]["strategy"]), (&2.into(), &"superoffload".into()));
        assert!(line["build"]["features"].is_array() && line["machine"]["arch"].is_string() && line["device"].is_string());
        let number = |section: &str, key: &str| line[section][key].as_f64().unwrap_or_else(|| panic!("{section}.{key}"));
        let seconds = number("step_ms", "median") / 1e3;
        assert!(number("step_ms", "min") <= seconds * 1e3 && seconds * 1e3 <= number("step_ms", "max"));
        assert_eq!(line["step_ms"]["samples"].as_array().unwrap().len(), 5);
        let close = |a: f64, b: f64| (a / b - 1.0).abs() < 1e-9;
        assert!(close(line["tokens_per_second"].as_f64().unwrap(), 32.0 / seconds));
        assert!(close(number("speed", "model_tflops"), number("speed", "model_flops") / seconds / 1e12));
        // Every offloaded parameter is sent once as a gradient and returns once as a weight, 4 bytes each way.
        let offloaded = number("plan", "offloaded_elems");
        for (section, key, expected) in [("link", "d2h_bytes", 4.0), ("link", "h2d_bytes", 4.0), ("adam", "params", 1.0)] {
            let per_param = number(section, key) / offloaded;
            // The last buckets of a step may be counted in the next step's report: over five steps, at most one step's worth.
            assert!((per_param - expected).abs() <= expected / 5.0, "{section}.{key}: {per_param}");
        }
        // Bytes a parameter in fp32: 32 for a synchronous step; 36 for a deferred step in one pass, or 28 for its commit and 20 for its
        // speculation in two passes; 20 for the first speculation. The first speculation of the step before the timed steps may be counted
        // late, for at most one in five parameters.
        let bytes_per_param = number("adam", "busy_gb_per_s") / number("adam", "busy_gparams_per_s");
        assert!((26.3..48.1).contains(&bytes_per_param), "{bytes_per_param}");
        assert!((0.0..=1.0).contains(&number("exposed", "device_busy_share")));
        assert!(number("memory", "device_planned_bytes") > 0.0 && number("memory", "rss_peak_bytes") > 0.0);
        assert!(number("loss", "first").is_finite() && line["gpu"].is_null() && line["gpu_unwatched"].is_null());
        assert!(line["speed"]["matmul_tflops"].is_null() && line["link"]["d2h_busy_gb_per_s"].is_null());
    }

    #[test]
    fn several_devices_are_timed_as_one_step() {
        let timed = |count| line("every-2", TrainOptions { gpus: Some(GpuCount::Count(count)), ..TrainOptions::default() });
        let (one, two) = (timed(1), timed(2));
        assert_eq!((&two["settings"]["gpus"], &one["tokens_per_step"], &two["tokens_per_step"]), (&2.into(), &32.into(), &64.into()));
        assert_eq!(two["verdicts"], one["verdicts"]);
        assert_eq!(two["speed"]["model_flops"], one["speed"]["model_flops"], "each device's");
        assert!(one.get("digest").is_none(), "nobody asked for it");
    }

    #[test]
    fn one_and_two_devices_end_with_one_digest() {
        let digest = |gpus, accumulate, seed| {
            let gpus = Some(GpuCount::Count(gpus));
            let (digest, seed, gradient_shares, gradient_accumulation_steps) = (Some(true), Some(seed), Some(2), Some(accumulate));
            let train = TrainOptions { gpus, digest, seed, gradient_shares, gradient_accumulation_steps, ..TrainOptions::default() };
            line("every-2", train)["digest"].as_str().unwrap().to_owned()
        };
        assert_eq!(digest(2, 1, 7), digest(1, 2, 7));
        assert_ne!(digest(2, 1, 7), digest(2, 1, 8));
    }

    #[test]
    fn clipping_happens_at_the_requested_rate() {
        // Steps 2 to 6 are timed.
        for (clip, clipped) in [("never", 0), ("always", 5), ("every-2", 3), ("every-5", 1)] {
            let line = line(clip, TrainOptions::default());
            let verdicts = serde_json::json!({"commit": 5 - clipped, "clip": clipped, "skip": 0});
            assert_eq!(line["verdicts"], verdicts, "{clip}");
            let buckets = line["plan"]["buckets"].as_u64().unwrap();
            assert_eq!(line["bucket_steps"]["clipped"], clipped * buckets, "{clip}");
        }
    }

    #[test]
    fn skewed_tokens_load_few_experts() {
        let small = [("50304", "512"), ("2048", "64"), ("1024", "32"), ("\"num_hidden_layers\": 16", "\"num_hidden_layers\": 2")];
        let config =
            small.iter().fold(include_str!("../model/presets/olmoe-1b-7b.json").to_string(), |text, (from, to)| text.replace(from, to));
        let load = |skew: &str| {
            let line = line_of(
                &config,
                "never",
                RandomData { token_skew: skew.parse().unwrap(), ..RandomData::default() },
                TrainOptions::default(),
            );
            (line["expert_largest_over_mean"].as_f64().unwrap(), line.get("token_skew").and_then(serde_json::Value::as_f64))
        };
        let ((even, no_skew), (uneven, skew)) = (load("0"), load("3"));
        assert!(uneven > 1.5 * even, "{even} and {uneven}");
        assert_eq!((no_skew, skew), (None, Some(3.0)));
    }

    #[test]
    fn a_timeline_shows_the_speed_of_copies() {
        let dir = tempfile::tempdir().unwrap();
        let trace = dir.path().join("trace.json");
        let line = line("never", TrainOptions { trace: Some(trace.clone()), ..TrainOptions::default() });
        assert!(trace.exists());
        for way in ["d2h", "h2d"] {
            let (busy, mean) = (&line["link"][format!("{way}_busy_gb_per_s")], &line["link"][format!("{way}_gb_per_s")]);
            assert!(busy.as_f64().unwrap() >= mean.as_f64().unwrap(), "{way}: {busy} and {mean}");
        }
    }

    #[test]
    fn recomputed_flops_count_for_the_device_alone() {
        let line = line("never", TrainOptions { activations: Some(ActivationsChoice::RecomputeBlock), ..TrainOptions::default() });
        assert_eq!((&line["plan"]["recomputed_layers"], &line["plan"]["layer_policies"]["recompute-block"]), (&2.into(), &2.into()));
        assert!(line["speed"]["hardware_flops"].as_f64() > line["speed"]["model_flops"].as_f64());
    }

    #[test]
    fn random_tokens_repeat_with_the_seed_and_targets_follow_inputs() {
        let batch = |seed| {
            let mut memory = [0; arrays(false) * 64];
            let mut batch = Batch::new(&mut memory, 64, false);
            RandomTokens::new(seed, 50).fill(&mut batch).unwrap();
            let counted = batch.count_targets(50).unwrap();
            assert!(batch.tokens[1..] == batch.targets[..63] && counted.targets == 64);
            batch.tokens.to_vec()
        };
        assert!(batch(1) == batch(1) && batch(1) != batch(2));
    }
}
