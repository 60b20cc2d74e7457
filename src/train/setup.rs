//! Everything before step 0: model, data, plan, and, once there is an engine, the state to begin from.

use super::evaluation::Evaluation;
use super::extent::RunExtent;
use super::facts_line::RunDescription;
use super::observer::Observer;
use super::prompts::Prompts;
use super::reference::{self, ReferenceData};
use super::run_dir::RunDir;
use super::run_facts::RunFacts;
use super::save_times::describe_save_times;
use super::session::{CheckpointContents, Session};
use super::{frozen, identity, model_files, overview, packing, previous_run, resume, resume_numerics, text, trained_rows};
use crate::checkpoint::carried::Carrier;
use crate::checkpoint::frozen::record_frozen;
use crate::checkpoint::parts::part_bytes;
use crate::checkpoint::{Check, Loaded, checkpoint_bytes};
use crate::config::options::InitChoice;
use crate::config::settings::Settings;
use crate::data;
use crate::data::context::Preparation;
use crate::data::dataset::Dataset;
use crate::data::encode::tokenizer_handle::Tokenizer;
use crate::data::host_bytes::host_bytes;
use crate::data::loader::{DataPosition, Loader, steps_for_epochs};
use crate::data::prepared::cache::remove_others;
use crate::data::rows::row_rules::Packing;
use crate::data::run_sources::KnownSources;
use crate::device::Kernels;
use crate::disk::Dir;
use crate::engine::executor::Engine;
use crate::error::{Error, Result, printable};
use crate::facts::{DataFacts, MachineFacts};
use crate::hardware::limits::check_file_size;
use crate::hardware::peer_route::PeerRoute;
use crate::hardware::selected_profile::SelectedProfile;
use crate::hub::cache::Snapshot;
use crate::launch::context::check_context;
use crate::launch::engine::Launcher;
use crate::model::layer_shape::Attn;
use crate::model::shape::{DEMO_CONFIG, ModelShape};
use crate::model::tensors::TensorTable;
use crate::model::weights::{self, ModelWeights};
use crate::model_dir::{CONFIG, ModelDir};
use crate::optim::schedule::TrainLength;
use crate::optim::state_array::StatePart;
use crate::planner::plan::Plan;
use crate::planner::site::Site;
use crate::progress_event::ProgressEvent;
use crate::recipe::part::RunPart;
use crate::signals::StopFlag;
use crate::units::{Count, counted};
use std::mem;
use std::path::{Path, PathBuf};

/// A model as it was found.
struct ModelSource {
    shape: ModelShape,
    /// The files to export it with.
    files: Vec<(String, Vec<u8>)>,
    /// Initial weights of a new run; `None` if they are random.
    weights: Option<ModelWeights>,
    /// Weights of the reference of a new run, if they are those of another model.
    reference: Option<ModelWeights>,
    /// Carried tensors of a run that goes on.
    carrier: Option<Carrier>,
}

impl ModelSource {
    /// The model of `settings`, and of the checkpoint that the run goes on from. Weights are checked as far as can be without reading them.
    fn find(settings: &Settings, resumed: Option<&Loaded>, stop: &StopFlag) -> Result<Self> {
        let Some(dir) = &settings.model else {
            let (shape, files) =
                (settings.freezing(ModelShape::demo(), None)?, vec![(CONFIG.to_string(), DEMO_CONFIG.as_bytes().to_vec())]);
            frozen::expect_weights(&shape, false)?;
            let reference = reference::weights(settings, &shape, stop)?;
            return Ok(Self { shape, files, weights: None, reference, carrier: None });
        };
        let shape = ModelShape::read(&ModelDir::open(dir)?.file(CONFIG)?)?;
        let (files, open) = (weights::model_files(dir, shape.family)?, |shape: &ModelShape| ModelWeights::open(dir, shape));
        if let Some(loaded) = resumed {
            let shape = resume::expect_frozen(settings, loaded.as_trained(shape)?)?;
            let carrier = frozen::carrier(loaded, &shape, || open(&shape))?;
            return Ok(Self { carrier, shape, files, weights: None, reference: None });
        }
        let weights = (settings.init == InitChoice::Checkpoint).then(|| open(&shape)).transpose()?;
        if weights.is_none() && shape.family.text_part().is_some() {
            let architecture = shape.family.architecture();
            let remedy = "use --init checkpoint, or the architecture of the text model alone";
            return Err(Error::usage(format!("--init random: an export of {architecture} has more tensors than training makes; {remedy}")));
        }
        let shape = settings.freezing(weights.as_ref().map_or(shape, |weights| weights.shape().clone()), Some(dir))?;
        frozen::expect_weights(&shape, weights.is_some())?;
        let weights = weights.map(|weights| weights.freezing(shape.clone())).transpose()?;
        let reference = reference::weights(settings, &shape, stop)?;
        Ok(Self { shape, files, weights, reference, carrier: None })
    }

    /// Bytes of carried tensors that the first save writes into the folder of records.
    fn carried_bytes(&self, output_dir: Option<&Dir>) -> Result<u64> {
        match (&self.carrier, &self.weights) {
            (Some(carrier), _) => carrier.missing_bytes(output_dir),
            (None, Some(weights)) if self.shape.carries_tensors() => weights.carried_bytes(),
            (None, _) => Ok(0),
        }
    }

    /// The size of a checkpoint.
    fn checkpoint_bytes(&self, plan: &Plan) -> u64 {
        checkpoint_bytes(TensorTable::new(&self.shape).trained_params(), plan.optimizer().arrays(), &self.files)
    }
}

/// A run that is read, checked and planned, and lacks its engine.
pub(super) struct PreparedRun<'a> {
    launch: &'a Launcher,
    settings: Settings,
    source: ModelSource,
    plan: Plan,
    dataset: Dataset,
    /// The evaluation dataset.
    eval_dataset: Option<Dataset>,
    tokenizer: Tokenizer,
    /// Known facts of the run's data sources.
    known: KnownSources,
    run: identity::Run,
    resumed: Option<resume::Accepted>,
    /// Prompts that the model is sampled after at evaluations.
    prompts: Option<Prompts>,
    /// Bytes that the first save writes once.
    carried_bytes: u64,
    max_steps: u64,
    data: String,
}

/// `settings` with a local path in place of each name on the hub.
///
/// # Errors
/// Errors of [`text::find_sources`].
pub(super) fn find_sources(settings: &Settings, with_weights: bool, stop: &StopFlag, observer: &mut dyn Observer) -> Result<Settings> {
    text::find_sources(settings, with_weights, stop, &mut |event| forward_progress(observer, event))
}

pub(super) fn forward_progress(observer: &mut dyn Observer, event: ProgressEvent<'_>) {
    match event {
        ProgressEvent::Note(line) => observer.note(line),
        ProgressEvent::Detail(line) => observer.detail(line),
        ProgressEvent::Warn(line) => observer.warn(line),
        ProgressEvent::Progress { activity, done, all } => observer.progress(activity, done, all),
    }
}

/// Reads, checks and plans the run of `settings`, which goes on from a checkpoint that passes `check`; without a `run_dir` nothing is
/// written but tokens into the cache.
///
/// # Errors
/// Missing, broken or too large inputs; nothing has been trained yet.
pub(super) fn prepare<'a>(
    settings: &Settings,
    launch: &'a Launcher,
    (run_dir, check): (Option<&RunDir>, Check),
    stop: &StopFlag,
    observer: &mut dyn Observer,
) -> Result<PreparedRun<'a>> {
    let resumed = resume::find(settings, check, observer)?;
    resumed.as_ref().map_or(Ok(()), |loaded| resume::expect_sources(settings, loaded))?;
    observer.detail(&format!("reading {}", printable(describe_sources(settings))));
    log_peers(launch, observer);
    launch.warnings(settings).iter().for_each(|line| observer.warn(line));
    launch.chosen.rates_from.as_ref().and_then(SelectedProfile::unsteady).iter().for_each(|line| observer.warn(line));
    let source = ModelSource::find(settings, resumed.as_ref(), stop)?;
    source.weights.as_ref().and_then(ModelWeights::note).iter().for_each(|line| observer.warn(line));
    source.shape.describe_trained_tokens().iter().for_each(|line| observer.note(&format!("tokens  {line}")));
    check_context(settings, &source.shape, settings.model.as_deref().unwrap_or(Path::new("the built-in model")))?
        .iter()
        .for_each(|line| observer.warn(line));
    let kept = resumed.as_ref().map(|loaded| resume_numerics::settings(settings, loaded, launch.chosen.is_gpu(), observer)).transpose()?;
    let saved = resumed.as_ref().map(|loaded| &loaded.manifest().trainer.settings);
    let settings = &packing::settle(kept.as_ref().unwrap_or(settings), saved, &mut |line| observer.detail(line))?;
    let settings = &trained_rows::settle(settings, &mut |line| observer.detail(line))?;
    let mut known = known_sources(settings, resumed.as_ref());
    let settings = &Settings { data_bytes: data_bytes(settings, &known), ..settings.clone() };
    let plan = launch.plan(settings, &source.shape, true)?;
    let settings = &settings.settled(plan.split());
    let comparable = resumed.as_ref().filter(|_| !settings.allow_changed.contains(&RunPart::Tokenizer));
    let saved = comparable.map(|loaded| &loaded.manifest().trainer.settings);
    let (tokenizer, settings) = text::tokenizer(settings, &source.shape, saved, &known)?;
    let source = ModelSource { files: model_files::as_trained(source.files, &settings, &tokenizer)?, ..source };
    let (dataset, eval_dataset) = open_data(&settings, &source.shape, &tokenizer, &mut known, run_dir.map(RunDir::path), stop, observer)?;
    text::warning(&settings, &tokenizer, &dataset).iter().for_each(|line| observer.warn(line));
    let prompts = Prompts::of(&settings, &tokenizer)?;
    let mut run = identify(&settings, &source.shape, &tokenizer, &known, run_dir.map(RunDir::path), stop, observer)?;
    plan.recipe.record(&mut run);
    record_frozen(&mut run, &source.shape);
    identity::record_directory(&mut run);
    settings.model.as_deref().and_then(Snapshot::at).iter().for_each(|snapshot| identity::record_model(&mut run, snapshot));
    let resumed =
        resumed.map(|loaded| resume::accept(loaded, &settings, (&plan.recipe, dataset.sequences()), run.clone(), observer)).transpose()?;
    let run = resumed.as_ref().map_or(run, |accepted| accepted.run.clone());
    let max_steps = max_steps(&settings, &dataset);
    let carried_bytes = source.carried_bytes(run_dir.map(RunDir::dir))?;
    if let Some(run_dir) = run_dir.filter(|_| resumed.as_ref().is_none_or(|accepted| accepted.step() < max_steps)) {
        run_dir.expect_free_bytes(source.checkpoint_bytes(&plan) + carried_bytes)?;
        check_file_size(format_args!("write a checkpoint into {}", run_dir.path().display()), part_bytes(&plan, 0))?;
    }
    passes_a_step(plan.recipe.step.micro_batch * plan.recipe.step.micro_batches, dataset.sequences())
        .iter()
        .for_each(|line| observer.detail(line));
    let data = describe_dataset(&dataset, eval_dataset.as_ref(), &tokenizer, settings.seq_length);
    let tokenizer = tokenizer.closed();
    Ok(PreparedRun {
        launch,
        settings,
        source,
        plan,
        dataset,
        eval_dataset,
        tokenizer,
        known,
        run,
        resumed,
        prompts,
        carried_bytes,
        max_steps,
        data,
    })
}

/// The line on the data of a run.
fn describe_dataset(dataset: &Dataset, eval_dataset: Option<&Dataset>, tokenizer: &Tokenizer, seq_length: usize) -> String {
    let trained = 100.0 - 100.0 * dataset.untrained() as f64 / dataset.tokens() as f64;
    let has_masks = dataset.untrained() > 0 || tokenizer.reads_answers();
    let trained = if has_masks { format!(" ({trained:.1} % trained)") } else { String::new() };
    let evaluated = eval_dataset.map_or(String::new(), |data| format!("; evaluated on {}", counted(data.sequences(), "sequence")));
    let (tokens, sequences) = (dataset.tokens(), dataset.sequences());
    format!("{}{trained}, {} of {seq_length}; tokenizer {tokenizer}{evaluated}", counted(tokens, "token"), counted(sequences, "sequence"))
}

impl PreparedRun<'_> {
    /// Its plan and the model's shape, which the engine is made from.
    pub(super) fn blueprint(&self) -> (Plan, ModelShape) {
        (self.plan.clone(), self.source.shape.clone())
    }

    /// The requested settings, with detected and chosen values.
    pub(super) fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Reports a run that will have no engine.
    pub(super) fn log(&self, observer: &mut dyn Observer) {
        observer.detail(&self.plan.to_string());
        let extent = self.extent();
        self.warn_of_passes(extent, observer);
        observer.note(&self.facts(describe_device(self.launch, &self.plan, &self.planned_device())).to_string());
        observer.note(&extent.planned());
    }

    /// The device as the plan has it.
    fn planned_device(&self) -> String {
        let Site { threads, isa, .. } = self.plan.site;
        if self.launch.chosen.is_gpu() { "not opened yet".into() } else { format!("cpu ({}, {isa})", counted(threads, "thread")) }
    }

    /// The facts of this run on `device`.
    fn facts(&self, device: String) -> RunFacts {
        let Self { launch, settings, source, plan, max_steps, .. } = self;
        let extent = self.extent();
        let passes = if extent.is_over() { String::new() } else { format!("; {extent}") };
        let of_one = launch.chosen.rates_from.as_ref().and_then(|from| Some(from.profile.gpu.as_ref()?.matmul_flops.value));
        RunFacts {
            model: format!("{}{}", describe_model(settings, plan, &source.shape), self.start()),
            data: format!("{}{passes}; from {}", self.data, printable(describe_data(settings))),
            plan: overview::describe_plan(plan, &extent),
            memory: overview::describe_memory(plan),
            files: overview::describe_files(settings, &extent, (source.checkpoint_bytes(plan), self.carried_bytes)),
            device,
            matmul_flops: of_one.map(|of_one| of_one * settings.cut().ranks() as f64),
            step: self.step(),
            max_steps: *max_steps,
            logging_steps: settings.logging_steps,
        }
    }

    /// The state that the run begins from, if it is not the model's.
    fn start(&self) -> String {
        let Settings { resume_from_checkpoint, output_dir, .. } = &self.settings;
        match (&self.resumed, resume_from_checkpoint) {
            (Some(accepted), _) => format!("; resuming from {}", printable(accepted.dir().display())),
            (None, Some(_)) => format!("; no checkpoint in {}: starting afresh", printable(output_dir.display())),
            (None, None) => String::new(),
        }
    }

    /// Steps already done.
    fn step(&self) -> u64 {
        self.resumed.as_ref().map_or(0, resume::Accepted::step)
    }

    /// The steps that are still to be done.
    fn extent(&self) -> RunExtent {
        RunExtent::new(&self.plan, &self.dataset, rows_per_step(&self.settings), (self.step(), self.max_steps))
    }

    /// Running text may pass often; records that do are learned by heart.
    fn warn_of_passes(&self, extent: RunExtent, observer: &mut dyn Observer) {
        let holds_records = self.settings.packing != Packing::Wrapped;
        extent.warning().filter(|_| holds_records).iter().for_each(|line| observer.warn(line));
    }

    /// A session with `engine`, ready for its first step.
    ///
    /// # Errors
    /// Errors before the first step.
    pub(super) fn session<D: Kernels>(
        self,
        mut engine: Engine<D>,
        run_dir: RunDir,
        stop: &StopFlag,
        observer: &mut dyn Observer,
    ) -> Result<Session<D>> {
        self.warn_of_passes(self.extent(), observer);
        let device = describe_device(self.launch, &self.plan, &engine.describe());
        let mut facts = self.facts(with_driver(&device, &engine.versions()));
        facts.files += &describe_save_times(&run_dir, &self.settings, &self.plan, &self.extent())?;
        let Self {
            launch,
            settings,
            source,
            plan,
            mut dataset,
            mut eval_dataset,
            tokenizer,
            known,
            mut run,
            resumed,
            prompts,
            carried_bytes: _,
            max_steps,
            data,
        } = self;
        let ModelSource { shape, files, weights, reference, carrier } = source;
        resume_numerics::record_versions(engine.versions(), &mut run, observer);
        let former_dir = resumed.as_ref().map(|accepted| accepted.dir().parent().unwrap_or(Path::new("")).to_path_buf());
        let position = match resumed {
            Some(accepted) => accepted.restore(&mut engine)?,
            None => begin(&mut engine, settings.seed, reference.as_ref().or(weights.as_ref()))?,
        };
        frozen::read(&mut engine, reference.as_ref().or(weights.as_ref()).or_else(|| carrier.as_ref()?.weights()))?;
        let partition = launch.divide_cpus(&settings, &plan, |line| observer.warn(line))?;
        previous_run::move_aside(run_dir.dir(), engine.train_step())?.iter().for_each(|line| observer.warn(line));
        remove_others(run_dir.dir(), &known);
        known.save(run_dir.path(), tokenizer.rules())?;
        if plan.recipe.objective.is_some_and(|objective| objective.has_reference()) {
            let mut data = ReferenceData { dataset: &mut dataset, eval_dataset: eval_dataset.as_mut(), is_given: reference.is_some() };
            match &former_dir {
                None => data.compute(&mut engine, (run_dir.path(), &mut run), stop, observer)?,
                Some(former_dir) => data.restore((run_dir.path(), former_dir), &run)?,
            }
        }
        replace_reference(&mut engine, reference, settings.seed, weights.as_ref())?;
        let evaluation = eval_dataset.map(|eval| Evaluation::new(&settings, eval, position, dataset.sequences()));
        let loader = Loader::new(dataset, plan.recipe.step.micro_batch, settings.seed, !settings.no_shuffle, position)?;
        let rates = launch.chosen.rates_from.as_ref().map(|rates| format!("rates   {rates}"));
        let pages = engine.host_memory().report(Path::new("/"));
        engine.product_notes().iter().for_each(|line| observer.warn(line));
        observer.detail(&plan.to_string());
        rates.into_iter().chain([format!("pages   {pages}"), format!("resctrl {partition}")]).for_each(|line| observer.detail(&line));
        shape.ignored_dropout.iter().for_each(|key| observer.warn(&format!("dropout is not applied: config.json sets {key}")));
        observer.begin(&plan, &facts);
        let schedule = plan.recipe.lr_schedule(max_steps);
        let about = RunDescription {
            machine: MachineFacts::new(&launch.topology),
            device,
            model: model_place(&settings),
            data,
            data_counts: DataFacts::new(loader.dataset()),
            max_steps,
            matmul_flops: facts.matmul_flops,
        };
        let carrier = carrier.or_else(|| weights.and_then(Carrier::of));
        let contents = CheckpointContents { settings, model_files: files, carrier, run, plan, prompts, about };
        Session::new(engine, loader, evaluation, schedule, contents, run_dir, observer)
    }
}

/// Data sources recorded by the run that `resumed` continues. Where data or tokens may have changed, they are read anew.
fn known_sources(settings: &Settings, resumed: Option<&Loaded>) -> KnownSources {
    let may_change = [RunPart::Data, RunPart::Tokenizer].iter().any(|part| settings.allow_changed.contains(part));
    let run_dir = resumed.filter(|_| !may_change).and_then(|loaded| loaded.dir().parent());
    run_dir.map(KnownSources::load).unwrap_or_default()
}

/// Opens the training and evaluation data, tokenizing and caching where needed; `observer` gets the progress. Afterwards `known`
/// describes the data of this run.
fn open_data(
    settings: &Settings,
    shape: &ModelShape,
    tokenizer: &Tokenizer,
    known: &mut KnownSources,
    output_dir: Option<&Path>,
    stop: &StopFlag,
    observer: &mut dyn Observer,
) -> Result<(Dataset, Option<Dataset>)> {
    let emit = |event: ProgressEvent<'_>| forward_progress(observer, event);
    let preparation = Preparation::new(stop, data::context::cache(), output_dir.map(Path::to_path_buf), emit);
    let mut preparation = preparation.knowing(mem::take(known));
    let rules = settings.row_rules();
    let opened = if let Some(split) = settings.eval_split {
        let split = (split, settings.seed);
        let (kept, held_out) = Dataset::open_split(&settings.data, tokenizer, shape.vocab, rules, split, &mut preparation)?;
        (kept, Some(held_out))
    } else {
        let mut open = |paths: &[PathBuf]| Dataset::open(paths, tokenizer, shape.vocab, rules, &mut preparation);
        let dataset = open(&settings.data)?;
        (dataset, (!settings.eval_data.is_empty()).then(|| open(&settings.eval_data)).transpose()?)
    };
    *known = preparation.into_known();
    Ok(opened)
}

/// The run's model, tokenizer and data.
fn identify(
    settings: &Settings,
    shape: &ModelShape,
    tokenizer: &Tokenizer,
    known: &KnownSources,
    output_dir: Option<&Path>,
    stop: &StopFlag,
    observer: &mut dyn Observer,
) -> Result<identity::Run> {
    let mut progress = |file: &Path, done| {
        observer.progress("checking data", done, file.metadata().map_or(done, |metadata| metadata.len()));
        if stop.is_set() { Err(Error::Interrupted("the data was checked".into())) } else { Ok(()) }
    };
    identity::of(shape, tokenizer, &settings.data, known, output_dir, &mut progress)
}

/// Host memory that training and evaluation data take while steps run.
fn data_bytes(settings: &Settings, known: &KnownSources) -> u64 {
    let Settings { data, eval_data, eval_split, no_shuffle, .. } = settings;
    let evaluated = if eval_data.is_empty() { 0 } else { host_bytes(eval_data, known, settings.row_rules(), false, None) };
    host_bytes(data, known, settings.row_rules(), !no_shuffle, *eval_split) + evaluated
}

/// `DIR and a.txt`.
fn describe_sources(settings: &Settings) -> String {
    let model = settings.model.as_ref().map_or(String::new(), |_| format!("{} and ", model_place(settings)));
    model + &describe_data(settings)
}

/// `a.txt`, `a.txt with 3 more`, `the built-in text`.
fn describe_data(settings: &Settings) -> String {
    match &settings.data[..] {
        [] => "the built-in text".into(),
        [path] => path.display().to_string(),
        [path, others @ ..] => format!("{} with {} more", path.display(), others.len()),
    }
}

fn max_steps(settings: &Settings, dataset: &Dataset) -> u64 {
    match settings.train_length {
        TrainLength::Steps(steps) => steps,
        TrainLength::Epochs(epochs) => steps_for_epochs(epochs, dataset.sequences(), rows_per_step(settings)),
    }
}

/// Reports the links between GPUs; with a warning where gradients and weights have to pass through host memory.
fn log_peers(launch: &Launcher, observer: &mut dyn Observer) {
    let is_slower = launch.chosen.machine.rates.peer_route == PeerRoute::Host;
    launch.chosen.peers.iter().for_each(|line| if is_slower { observer.warn(line) } else { observer.detail(line) });
}

/// A line for people where each step of so many `rows` passes over the data several times.
fn passes_a_step(rows: usize, sequences: usize) -> Option<String> {
    let passes = rows / sequences.max(1);
    let line =
        || format!("a step takes {rows} sequences, the data has {sequences}: each step passes over the data at least {passes} times");
    (passes >= 2).then(line)
}

fn rows_per_step(settings: &Settings) -> usize {
    settings.per_device_train_batch_size * settings.micro_batches()
}

/// `device` and the driver among the `versions` of a GPU.
fn with_driver(device: &str, versions: &[(&str, String)]) -> String {
    let driver = versions.iter().find(|(name, _)| *name == "driver");
    driver.map_or(device.to_string(), |(_, version)| format!("{device}, driver {version}"))
}

/// The device of process 0, and the number of processes.
fn describe_device(launch: &Launcher, plan: &Plan, device: &str) -> String {
    let Launcher { topology, chosen } = launch;
    let why = chosen.note.as_ref().map_or(String::new(), |note| format!("; auto: {note}"));
    let gpus: Vec<_> = chosen.gpus.iter().map(ToString::to_string).collect();
    let gpus = if gpus.is_empty() { String::new() } else { gpus.join(", ") + ": " };
    let processes = if plan.site.processes > 1 { format!("; process 0 of {}", plan.site.processes) } else { String::new() };
    format!("{gpus}{device} on {}{why}{processes}", topology.cpu_model.as_deref().unwrap_or("an unnamed processor"))
}

/// The model's directory, or its name on the hub with the commit.
fn model_place(settings: &Settings) -> String {
    let Some(dir) = &settings.model else { return "built in".into() };
    Snapshot::at(dir).map_or(dir.display().to_string(), |Snapshot { repo, commit }| format!("{repo}@{commit}"))
}

/// Place, architecture and size of the model, and the format that it computes in.
fn describe_model(settings: &Settings, plan: &Plan, shape: &ModelShape) -> String {
    let (from, params, dtype) = (printable(model_place(settings)), Count(plan.params()), plan.recipe.numerics.dtype);
    let (ModelShape { channels, vocab, layers, .. }, Attn { heads, kv_heads, .. }) = (shape, shape.first_attention());
    let (architecture, layers) = (shape.family.architecture(), layers.len());
    format!(
        "{from}: {architecture}, {params} parameters in {dtype}; {} of {channels}, {} ({kv_heads} kv), vocabulary {vocab}",
        counted(layers, "layer"),
        counted(*heads, "head")
    )
}

/// Gives `engine` the first weights of its run in the place of those of the `reference`, if it has those.
fn replace_reference<D: Kernels>(
    engine: &mut Engine<D>,
    reference: Option<ModelWeights>,
    seed: u64,
    weights: Option<&ModelWeights>,
) -> Result<()> {
    if reference.is_none() {
        return Ok(());
    }
    begin(engine, seed, weights)?;
    frozen::read(engine, weights)
}

/// First weights: random, or the model's own.
fn begin<D: Kernels>(engine: &mut Engine<D>, seed: u64, weights: Option<&ModelWeights>) -> Result<DataPosition> {
    match weights {
        Some(weights) => weights.read(|start, block| engine.write_state(StatePart::PARAMS, start, block))?,
        None => engine.init_state(seed, engine.plan().site.threads)?,
    }
    engine.send_weights()?;
    Ok(DataPosition::default())
}
