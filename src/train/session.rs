//! Steps, metrics and checkpoints of a run that is set up.

mod ending;
mod reported_saves;
mod save_beside;
mod saving;

use self::reported_saves::ReportedSaves;
use self::save_beside::SaveBeside;
use super::evaluation::{Evaluation, Progress, ReportSums};
use super::facts_line::{FactsLine, RunDescription};
use super::feed::Feed;
use super::identity::Run;
use super::observer::Observer;
use super::prompts::Prompts;
use super::replanner::{ReplanStep, Replanner};
use super::run_dir::RunDir;
use super::sinks::{SinkStart, StepSinks};
use super::skips::Skips;
use crate::checkpoint::carried::Carrier;
use crate::checkpoint::engine_state;
use crate::config::settings::Settings;
use crate::data::dataset::Dataset;
use crate::data::loader::{DataPosition, Loader};
use crate::data::rows::batch::CountedTargets;
use crate::device::Kernels;
use crate::engine::executor::{Engine, StepReport};
use crate::engine::protocol::coordinator::Counts;
use crate::engine::protocol::counters::Exposed;
use crate::engine::protocol::verdict::Verdict;
use crate::engine::watch::watchdog::Watchdog;
use crate::error::{Error, Result};
use crate::host::perf::{WORKER_ROLE, WorkerCounters};
use crate::metrics::{EvalLine, EvalMetrics, ObjectiveLine, StepMetrics, WrittenSample, rss_bytes};
use crate::model::head_rows::HeadRows;
use crate::model::shape::ModelShape;
use crate::optim::schedule::LrSchedule;
use crate::planner::plan::Plan;
use crate::ranks::RANKS_MAX;
use crate::signals::StopFlag;
use std::ffi::OsString;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Where the data goes on, and how much of it there was.
#[derive(Clone, Copy, Debug, serde::Serialize, serde::Deserialize)]
pub(super) struct SavedPosition {
    #[serde(flatten)]
    pub(super) position: DataPosition,
    pub(super) sequences: usize,
}

/// Measurements so far.
#[derive(Clone, Copy, Debug, Default)]
struct SessionTotals {
    steps: u64,
    time: Duration,
    first_loss: Option<f32>,
    last_loss: f32,
    counts: Counts,
    exposed: Exposed,
    /// By rank.
    exposed_to_peers_ns: [u64; RANKS_MAX],
}

/// The work of a step, on average over the data: padding does not count.
#[derive(Clone, Copy, Debug)]
struct StepWork {
    tokens: f64,
    flops: f64,
}

impl StepWork {
    /// A step over `rows` of the rows of `dataset`. Where the head computes trained rows alone, its FLOPs for other tokens do not count.
    fn mean(shape: &ModelShape, dataset: &Dataset, rows: usize, head_rows: HeadRows) -> Self {
        let documents = dataset.lengths();
        let tokens: f64 = documents.iter().map(|(length, count)| *length as f64 * *count as f64).sum();
        let of_a_step = |all: f64| all * rows as f64 / dataset.sequences() as f64;
        let left_out = match head_rows {
            HeadRows::All => 0.0,
            HeadRows::Trained => shape.output_flops() * tokens * dataset.untrained() as f64 / dataset.tokens() as f64,
        };
        Self { tokens: of_a_step(tokens), flops: of_a_step(shape.flops_of(&documents) - left_out) }
    }
}

/// The contents of every checkpoint of a run besides its state.
pub(super) struct CheckpointContents {
    pub(super) settings: Settings,
    /// The files that an export needs besides the weights.
    pub(super) model_files: Vec<(String, Vec<u8>)>,
    /// Tensors beside the trained ones, if the model has any.
    pub(super) carrier: Option<Carrier>,
    /// The run's model, tokenizer and data.
    pub(super) run: Run,
    /// Of all ranks.
    pub(super) plan: Plan,
    /// Prompts that the model is sampled after at evaluations.
    pub(super) prompts: Option<Prompts>,
    /// Facts of the first line of `metrics.jsonl` that the session does not know.
    pub(super) about: RunDescription,
}

/// A run between two steps.
pub(crate) struct Session<D: Kernels> {
    engine: Engine<D>,
    feed: Feed,
    schedule: LrSchedule,
    settings: Settings,
    run_dir: RunDir,
    model_files: Arc<[(String, Vec<u8>)]>,
    carrier: Option<Carrier>,
    run: Run,
    sinks: StepSinks,
    /// The evaluation, if any, with its last results.
    evaluation: Option<Evaluation>,
    prompts: Option<Prompts>,
    evaluated: Option<EvalMetrics>,
    progress: Progress,
    step_work: StepWork,
    totals: SessionTotals,
    last_step_end: Option<Instant>,
    skips: Skips,
    /// The save that runs beside the steps. The engine, which its thread reads, is declared and dropped before it.
    background: Option<SaveBeside>,
    /// The lines about saves that the run has written.
    reported_saves: ReportedSaves,
    /// Time for which saves stopped the run, until a step has reported it.
    save_wait: Duration,
    /// Step and name of the last checkpoint.
    saved: Option<(u64, OsString)>,
    save_failed: bool,
    /// Whether the engine's state is that of its last step.
    is_sound: bool,
    /// Lost results that saved steps cannot restore.
    lost: Option<String>,
    perf: Option<WorkerCounters>,
    /// The plan of all ranks.
    plan: Plan,
    replanner: Replanner,
    /// Time of the change to the present plan, until a step has reported it.
    replanned: Duration,
}

impl<D: Kernels> Session<D> {
    /// A session that starts with the engine's next step.
    ///
    /// # Errors
    /// `Io` when the metrics cannot be written, or the optimizer's threads cannot be counted.
    pub(super) fn new(
        engine: Engine<D>,
        loader: Loader,
        evaluation: Option<Evaluation>,
        schedule: LrSchedule,
        contents: CheckpointContents,
        run_dir: RunDir,
        observer: &mut dyn Observer,
    ) -> Result<Self> {
        let CheckpointContents { settings, model_files, carrier, run, plan, prompts, about } = contents;
        let step = engine.train_step();
        let (cut, head_rows) = (plan.recipe.step, plan.recipe.numerics.head_rows);
        let step_work = StepWork::mean(engine.shape(), loader.dataset(), cut.micro_batch * cut.micro_batches, head_rows);
        let facts = FactsLine::new(about, step, &settings, engine.plan(), engine.shape(), (step_work.tokens, step_work.flops));
        let start = SinkStart { dir: run_dir.dir(), step, facts: &facts };
        let sinks = StepSinks::open(&settings.report_to, &start, observer)?;
        let totals = SessionTotals::default();
        let replanner = Replanner::new(&settings, &plan);
        let perf = settings.perf_counters.then(|| WorkerCounters::start(WORKER_ROLE)).transpose()?;
        Ok(Self {
            engine,
            feed: Feed::new(loader),
            schedule,
            run_dir,
            model_files: model_files.into(),
            carrier,
            sinks,
            evaluation,
            prompts,
            evaluated: None,
            progress: Progress::new(&settings, &run),
            settings,
            step_work,
            totals,
            last_step_end: None,
            skips: Skips::of(&run),
            run,
            background: None,
            reported_saves: ReportedSaves::default(),
            save_wait: Duration::ZERO,
            saved: None,
            save_failed: false,
            is_sound: true,
            lost: None,
            perf,
            plan,
            replanner,
            replanned: Duration::ZERO,
        })
    }

    /// Watches the engine's threads, if the observer handles alarms, until the watchdog is dropped.
    ///
    /// # Errors
    /// `Resource` when a thread cannot start.
    pub(crate) fn watch(&self, observer: &mut dyn Observer) -> Result<Option<Watchdog>> {
        let limit = Duration::from_secs(self.settings.stall_limit);
        observer.on_alarm().map(|on_alarm| Watchdog::start(self.engine.watched(), limit, on_alarm)).transpose()
    }

    /// Whether the last step is done, or no evaluation found a lower loss for long enough.
    pub(crate) fn is_done(&self) -> bool {
        self.engine.train_step() >= self.schedule.max_steps || self.progress.given_up().is_some()
    }

    /// One step and its metrics; then another plan, if there is a better one.
    ///
    /// # Errors
    /// Errors of the engine, the data or the disk, or too many skipped steps; [`Session::end`] decides whether the state can be saved.
    pub(crate) fn step(&mut self, observer: &mut dyn Observer) -> Result<()> {
        // The time between two steps counts: a backlog of updates may have filled it.
        let start = self.last_step_end.unwrap_or_else(Instant::now);
        let learning_rate = self.schedule.lr(self.engine.optimizer_step());
        let data = self.engine.read_data(&mut self.feed)?;
        let report = self.engine.run_step(learning_rate, data).inspect_err(|_| self.is_sound = false)?;
        self.feed.step_done();
        let end = Instant::now();
        self.last_step_end = Some(end);
        let waited = self.engine.take_save_wait().min(end - start);
        self.save_wait += waited;
        let metrics = self.measure(&report, end - start);
        observer.step(&metrics);
        let skipped = report.verdict == Verdict::SkipNonFinite;
        let before = if skipped { self.last_begun() } else { None };
        self.skips.record(metrics.step, skipped, before.as_ref().map(|(_, path)| path.as_path()));
        self.skips.warning().iter().for_each(|line| observer.warn(line));
        self.sinks.step(&metrics, observer).inspect_err(|_| self.lost = Some(format!("the metrics of step {}", metrics.step)))?;
        self.skips.check(self.settings.max_skipped_steps)?;
        self.replan_if_better(&report, end - start - waited, observer)
    }

    /// Goes over to another plan, if the step before, which took `time`, calls for one.
    fn replan_if_better(&mut self, report: &StepReport, time: Duration, observer: &mut dyn Observer) -> Result<()> {
        let steps = (self.engine.train_step(), self.schedule.max_steps);
        let next = self.replanner.next(&self.plan, steps, report, time);
        let (plan, words) = match next {
            Ok(ReplanStep::Move(plan, words)) if !self.is_done() => (plan, words),
            Ok(ReplanStep::Move(..) | ReplanStep::Stay) => return Ok(()),
            Ok(ReplanStep::Note(words)) => {
                observer.note(&format!("step {}: {words}", steps.0));
                return Ok(());
            }
            Err(error) => {
                observer.warn(&format!("the search for faster plans ends here: {error}"));
                return Ok(());
            }
        };
        let start = Instant::now();
        self.end_background(observer)?;
        self.engine.flush().inspect_err(|_| self.is_sound = false)?;
        let kept = self.engine.replan(plan.clone())?;
        self.replanned = start.elapsed();
        self.last_step_end = Some(Instant::now());
        match kept {
            None => {
                observer.note(&format!("step {}: another plan in {:.1} s: {words}", steps.0, self.replanned.as_secs_f64()));
                self.plan = self.plan.with_placement_of(plan);
            }
            Some(error) => {
                observer.warn(&format!("step {}: the plan stays, and the search for faster plans ends here: {error}", steps.0));
                self.replanner = Replanner::Off;
            }
        }
        Ok(())
    }

    /// Evaluates before the first step, if that is due, or where the run that goes on had no time to.
    ///
    /// # Errors
    /// As [`Session::evaluate_if_due`].
    pub(crate) fn evaluate_on_start(&mut self, stop: &StopFlag, observer: &mut dyn Observer) -> Result<()> {
        let begins = self.evaluation.as_ref().is_some_and(|evaluation| evaluation.is_due_on_start(self.engine.train_step()));
        if begins || self.progress.is_unfinished() { self.evaluate(stop, observer) } else { Ok(()) }
    }

    /// Evaluates after a step, if that is due.
    ///
    /// # Errors
    /// The engine's, the data's or the disk's.
    pub(crate) fn evaluate_if_due(&mut self, stop: &StopFlag, observer: &mut dyn Observer) -> Result<()> {
        let (step, position, sequences) = (self.engine.train_step(), self.feed.position(), self.feed.sequences());
        let is_last = step >= self.schedule.max_steps;
        let is_due = self.evaluation.as_mut().is_some_and(|evaluation| evaluation.is_due(step, is_last, position, sequences));
        if is_due { self.evaluate(stop, observer) } else { Ok(()) }
    }

    /// All of the evaluation's data, unless `stop` is set meanwhile.
    fn evaluate(&mut self, stop: &StopFlag, observer: &mut dyn Observer) -> Result<()> {
        let Some(evaluation) = &self.evaluation else { return Ok(()) };
        self.progress.begin();
        let (start, mut all, mut loss_sum, mut counted) = (Instant::now(), evaluation.sequences(), 0.0, CountedTargets::default());
        let mut report = ReportSums::default();
        while !all.is_over() {
            if stop.is_set() {
                return Ok(());
            }
            let targets = self.engine.read_micro_batches(&mut all)?;
            let loss = self.engine.evaluate_read(targets).inspect_err(|_| self.is_sound = false)?;
            loss_sum += loss * targets.weight();
            counted = counted + targets;
            report.add(self.engine.reported(), targets.weight());
        }
        let objective = report.metrics(self.engine.plan().recipe.objective, counted.weight()).map(ObjectiveLine::from);
        let eval_loss = loss_sum / counted.weight().max(f64::MIN_POSITIVE);
        let eval_perplexity = eval_loss.exp();
        let eval_seconds = start.elapsed().as_secs_f64();
        let (step, eval_tokens) = (self.engine.train_step(), counted.targets as u64);
        let metrics = EvalMetrics { step, eval_loss, eval_perplexity, objective, eval_tokens, eval_seconds };
        self.evaluated = Some(metrics);
        self.progress.record(metrics.step, eval_loss, self.totals.steps == 0 && metrics.step > 0);
        self.last_step_end = Some(Instant::now());
        observer.note(&metrics.to_string());
        let samples = self.write_samples(stop, observer)?;
        let lost = || Some(format!("the evaluation after step {}", metrics.step));
        self.sinks.evaluation(&EvalLine { metrics, samples }, observer).inspect_err(|_| self.lost = lost())
    }

    /// Samples the model after the prompts of the run; nothing where it has none, or `stop` is set meanwhile.
    fn write_samples(&mut self, stop: &StopFlag, observer: &mut dyn Observer) -> Result<Vec<WrittenSample>> {
        let Some(prompts) = &self.prompts else { return Ok(Vec::new()) };
        let written = prompts.write(&mut self.engine, stop);
        self.last_step_end = Some(Instant::now());
        let samples = match written {
            Err(Error::Interrupted(_)) => Vec::new(),
            other => other.inspect_err(|_| self.is_sound = false)?,
        };
        samples.iter().for_each(|WrittenSample { prompt, text }| observer.note(&format!("sample  {prompt:?} is followed by {text:?}")));
        Ok(samples)
    }

    fn measure(&mut self, report: &StepReport, time: Duration) -> StepMetrics {
        let totals = &mut self.totals;
        totals.steps += 1;
        totals.time += time;
        totals.first_loss.get_or_insert(report.loss);
        totals.last_loss = report.loss;
        totals.counts += report.counts;
        totals.exposed += report.exposed;
        totals.exposed_to_peers_ns.iter_mut().zip(report.exposed_to_peers_ns).for_each(|(total, ns)| *total += ns);
        let (seconds, position) = (time.as_secs_f64(), self.feed.position());
        StepMetrics {
            step: self.engine.train_step(),
            epoch: position.epoch as f64 + position.next_sequence as f64 / self.feed.sequences() as f64,
            loss: report.loss,
            grad_norm: Some(report.grad_norm.0).filter(|norm| norm.is_finite()),
            learning_rate: report.learning_rate,
            loss_scale: report.loss_scale,
            verdict: match report.verdict {
                Verdict::Commit => "commit",
                Verdict::Clip(_) => "clip",
                Verdict::SkipNonFinite => "skip",
            },
            step_ms: seconds * 1e3,
            replan_ms: std::mem::take(&mut self.replanned).as_secs_f64() * 1e3,
            save_wait_ms: std::mem::take(&mut self.save_wait).as_secs_f64() * 1e3,
            tokens_per_second: self.step_work.tokens / seconds,
            model_tflops: self.step_work.flops / seconds / 1e12,
            counts: report.counts,
            exposed_cpu_ms: report.exposed.cpu_ns as f64 / 1e6,
            exposed_transfer_ms: report.exposed.transfer_ns as f64 / 1e6,
            exposed_peer_ms: report.exposed.peer_ns as f64 / 1e6,
            exposed_peer_rank: report.most_exposed_to_peers(),
            objective: report.objective.map(ObjectiveLine::from),
            d2h_bytes: report.counters.d2h_bytes,
            h2d_bytes: report.counters.h2d_bytes,
            expert_load: report.expert_load,
            rss_bytes: rss_bytes(),
        }
    }

    /// See [`engine_state::digest`].
    pub(crate) fn digest(&mut self) -> Result<String> {
        engine_state::digest(&mut self.engine)
    }
}
