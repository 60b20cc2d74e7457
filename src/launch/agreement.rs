//! Agreement of a run's processes before the first step, on settings, devices, the plan and library versions.

use super::engine::Launcher;
use super::process_info::{HostResources, ProcessInfo};
use crate::bucket::layout::BucketLayout;
use crate::config::options::TrainTokens;
use crate::config::settings::Settings;
use crate::data::rows::row_rules::Packing;
use crate::device::{Kernels, LongSums};
use crate::disk;
use crate::engine::executor::Engine;
use crate::error::{Error, Result, printable};
use crate::hardware::topology::{Topology, host_name};
use crate::model::activations::LossTile;
use crate::model::shape::ModelShape;
use crate::planner::plan::Plan;
use crate::progress_event::ProgressEvent;
use crate::ranks::hello_message::HelloMessage;
use crate::ranks::links::{EndOfRun, LastResort, Links};
use crate::ranks::rendezvous::{ProcessRendezvous, differs};
use crate::ranks::run_token::{RunToken, TOKEN_VARIABLE};
use crate::request::Request;
use crate::request::choices::{CastSide, ExpertProductsChoice, HeadRowsChoice, LogitsDtypeChoice, Technique, Transport};
use crate::signals::StopFlag;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::fs;
use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::time::Duration;

/// Size limit in bytes of a file with a run token.
const TOKEN_BYTES_MAX: u64 = 4096;
/// Mode bits that let a file's group or all users read it.
const OTHERS_READ: u32 = 0o044;

/// Settings that may differ between processes: they concern one process or machine, or only process 0, which deals the data and writes all
/// files.
const OF_ONE_PROCESS: [&str; 23] = [
    "process",
    "rendezvous",
    "rendezvous_limit",
    "run_token_file",
    "output_dir",
    "model",
    "data",
    "eval_data",
    "chat_template",
    "resume_from_checkpoint",
    "threads",
    "hbm_limit",
    "host_limit",
    "hardware",
    "huge_pages",
    "cuda_libraries",
    "isa",
    "trace",
    "perf_counters",
    "resctrl_group",
    "logging_steps",
    "report_to",
    "digest",
];

/// The processes of a run after the rendezvous.
pub(crate) struct ProcessGroup {
    pub(crate) links: Links,
    /// GPUs, CPUs and transport of this process.
    process_info: ProcessInfo,
    /// This machine before any process of the run has taken memory.
    machine: Topology,
}

/// Process 0's decisions about the run, from which the other processes derive their plans.
#[derive(Serialize, Deserialize)]
pub(crate) struct Proposal {
    per_device_train_batch_size: usize,
    gradient_accumulation_steps: Option<usize>,
    gradient_shares: Option<usize>,
    gradient_group: Option<usize>,
    packing: Packing,
    bucket_mib: Option<f64>,
    cast: CastSide,
    without: Vec<Technique>,
    loss_tile: Option<LossTile>,
    long_sums: Option<LongSums>,
    head_rows: HeadRowsChoice,
    logits_dtype: LogitsDtypeChoice,
    expert_products: ExpertProductsChoice,
    /// Whether the token embedding is also the output matrix, which the weights decide.
    tied: bool,
    /// Tokens whose rows are trained, as process 0 found them.
    trained_tokens: Option<Range<usize>>,
    /// Names and values of the facts in which a plan that follows this proposal must agree.
    facts: Vec<(String, String)>,
    /// Name of a temporary directory below the output directory, which shows whether all processes share a file system. Empty if the run
    /// has no output directory.
    pub(crate) meeting_place: String,
}

impl ProcessGroup {
    /// Meets the other processes of the run of `settings`. A `stop` request in one process is passed to process 0. `last_resort` ends this
    /// process if another process has ended and this one does not react. `emit` receives lines for the user.
    ///
    /// # Errors
    /// `Usage` without a run token or rendezvous address, or where processes differ; errors of [`Links::meet`] and of
    /// [`ProcessInfo::among`].
    pub(crate) fn meet(
        settings: &Settings,
        stop: &StopFlag,
        last_resort: Option<LastResort>,
        emit: &mut dyn FnMut(ProgressEvent<'_>),
    ) -> Result<Self> {
        let Settings { process, processes, gpus: ranks, .. } = *settings;
        let needed = "needs --rendezvous HOST:PORT, or a launcher";
        let address = settings.rendezvous.clone().ok_or_else(|| Error::usage(format!("--processes {processes}: {needed}")))?;
        let limit = Duration::from_secs(settings.rendezvous_limit);
        let token = token(settings, &mut |line| emit(ProgressEvent::Warn(line)))?;
        let rendezvous = ProcessRendezvous { address, process, processes, ranks, token, limit };
        let (machine, host) = (Topology::this_machine(), host_name().unwrap_or_else(|| "an unnamed host".into()));
        let json = |e| Error::format("the message of this process", e);
        let has = serde_json::to_value(HostResources::of_this_process(settings, &machine, &host)?).map_err(json)?;
        let own = HelloMessage { host, facts: shared_settings(settings)?, resources: has, address: None };
        let links = Links::meet(&rendezvous, own, (stop, &mut *emit), last_resort)?;
        emit(ProgressEvent::Detail(&format!("all {processes} processes are here: {}", links.names().join(", "))));
        let all = links
            .resources_by_process()
            .iter()
            .map(HostResources::deserialize)
            .collect::<std::result::Result<Vec<_>, _>>()
            .map_err(json)?;
        let process_info = ProcessInfo::among(&all, links.names(), process, settings)?;
        process_info.notes.iter().for_each(|note| emit(ProgressEvent::Detail(note)));
        // TCP in place of an unavailable NCCL makes steps slower.
        let is_slower = settings.transport == Transport::Auto && process_info.transport == Transport::Tcp;
        for note in process_info.transport_note.iter() {
            emit(if is_slower { ProgressEvent::Warn(note) } else { ProgressEvent::Detail(note) });
        }
        Ok(Self { links, process_info, machine })
    }

    /// Like [`Launcher::new`], restricted to this process's part of its machine.
    ///
    /// # Errors
    /// Errors of [`devices::choose`](super::devices::choose).
    pub(crate) fn launcher(&self, settings: &Settings) -> Result<(Launcher, Settings)> {
        Launcher::among(settings, &self.machine, &self.process_info)
    }

    /// Sends process 0's decisions, and the name of the temporary directory, to the other processes.
    ///
    /// # Errors
    /// `Format` if the proposal cannot be serialized.
    pub(crate) fn propose(&self, plan: &Plan, settings: &Settings, meeting_place: String) -> Result<()> {
        let proposal = serde_json::to_string(&Proposal::new(plan, settings, meeting_place));
        self.links.propose(&proposal.map_err(|e| Error::format("the proposal", e))?);
        Ok(())
    }

    /// The plan of a process other than 0, which follows the proposal of process 0; the end of the run, if that came first.
    ///
    /// # Errors
    /// Errors of a missing or differing fact in this process; the failure of another process.
    pub(crate) fn plan(
        &self,
        settings: &Settings,
        shape: &ModelShape,
    ) -> Result<std::result::Result<(Launcher, Plan, Proposal), EndOfRun>> {
        let proposal: Proposal = match self.links.proposal()? {
            Ok(proposal) => serde_json::from_str(&proposal).map_err(|e| Error::format("the proposal of process 0", e))?,
            Err(end) => return Ok(Err(end)),
        };
        let proposed = proposal.over(settings);
        // Invalid numbers from a damaged process 0 must be an error here, not a panic in the planner.
        proposed.check().map_err(|e| Error::format("the proposal of process 0", e))?;
        let (launch, settings) = self.launcher(&proposed)?;
        let shape = settings.freezing(shape.clone().untied_if(!proposal.tied), None)?;
        let plan = launch.plan(&settings, &shape, false)?.with_save_copies();
        expect_alike(&self.links, &proposal.facts, &facts(&plan))?;
        Ok(Ok((launch, plan, proposal)))
    }
}

impl Proposal {
    fn new(plan: &Plan, settings: &Settings, meeting_place: String) -> Self {
        let Request { recipe, kernels, cut, wanted, .. } = plan.fixed(&settings.request(&plan.recipe.model));
        Self {
            per_device_train_batch_size: wanted.split.micro_batch,
            gradient_accumulation_steps: wanted.split.accumulation,
            gradient_shares: cut.shares,
            gradient_group: cut.group,
            packing: recipe.rows.packing,
            bucket_mib: wanted.bucket_mib,
            cast: wanted.cast,
            without: wanted.without,
            loss_tile: kernels.loss_tile,
            long_sums: kernels.long_sums,
            head_rows: kernels.head_rows,
            logits_dtype: kernels.logits_dtype,
            expert_products: kernels.experts,
            tied: plan.recipe.model.tied,
            trained_tokens: plan.recipe.model.trained_tokens.clone(),
            facts: facts(plan),
            meeting_place,
        }
    }

    fn over(&self, own: &Settings) -> Settings {
        Settings {
            per_device_train_batch_size: self.per_device_train_batch_size,
            gradient_accumulation_steps: self.gradient_accumulation_steps,
            gradient_shares: self.gradient_shares,
            gradient_group: self.gradient_group,
            packing: self.packing,
            bucket_mib: self.bucket_mib,
            cast: self.cast,
            without: self.without.clone(),
            loss_tile: self.loss_tile,
            long_sums: self.long_sums,
            head_rows: self.head_rows,
            logits_dtype: self.logits_dtype,
            expert_products: self.expert_products,
            is_batch_open: false,
            train_tokens: self.trained_tokens.clone().map(TrainTokens::Ids),
            ..own.clone()
        }
    }
}

/// Facts on which result bits, or the sizes of transferred slices, depend.
fn facts(plan: &Plan) -> Vec<(String, String)> {
    let of_plan = [
        ("buckets", cut(&plan.placement.layout)),
        ("devices", plan.site.ranks.to_string()),
        ("format on the link", plan.protocol.link_dtype.to_string()),
        ("rules of the step", format!("{:?}", plan.protocol.rules)),
    ];
    plan.recipe.facts().into_iter().chain(of_plan).map(|(name, value)| (name.to_string(), value)).collect()
}

fn cut(layout: &BucketLayout) -> String {
    format!("{} of {} elements, {} in all", layout.count(), layout.bucket_elems(), layout.flat_elems())
}

/// Checks that all processes compute with the libraries of process 0 before the first step. All engines exist by now.
///
/// # Errors
/// `Usage` with the name of the difference and both values; the failure of another process.
pub(super) fn expect_same_libraries<D: Kernels>(links: &Links, engine: &Engine<D>) -> Result<()> {
    let mut own: Vec<(String, String)> = engine.versions().into_iter().map(|(name, version)| (name.to_string(), version)).collect();
    own.extend(engine.product_algorithms().iter().map(|product| ("matrix product".to_string(), format!("{product:?}"))));
    if links.process() == 0 {
        links.propose(&serde_json::to_string(&own).map_err(|e| Error::format("the versions of libraries", e))?);
        return Ok(());
    }
    let first: Vec<_> = serde_json::from_str(&links.expect_proposal()?).map_err(|e| Error::format("the libraries of process 0", e))?;
    expect_alike(links, &first, &own)
}

/// # Errors
/// `Usage` with the name of the difference and both values.
fn expect_alike(links: &Links, first: &[(String, String)], own: &[(String, String)]) -> Result<()> {
    let Some((name, first_value, own_value)) = difference(first, own) else { return Ok(()) };
    let process = links.process();
    let names = |process: usize| links.names()[process].split_once(" on ").map_or("", |(_, host)| host);
    Err(Error::usage(differs(&name, [(0, names(0), first_value), (process, names(process), own_value)])))
}

/// The name of the first fact that differs, and both values. A fact that one process lacks has the value `nothing`.
fn difference(first: &[(String, String)], own: &[(String, String)]) -> Option<(String, String, String)> {
    let at = |facts: &[(String, String)], nth: usize| facts.get(nth).cloned().unwrap_or_else(|| (String::new(), "nothing".into()));
    let mut pairs = (0..first.len().max(own.len())).map(|nth| (at(first, nth), at(own, nth)));
    let ((name, first_value), (own_name, own_value)) = pairs.find(|(first_value, own_value)| first_value != own_value)?;
    Some((if name.is_empty() { own_name } else { name }, first_value, own_value))
}

/// Reads the run token. Warns if other users may read it or could guess it.
fn token(settings: &Settings, warn: &mut dyn FnMut(&str)) -> Result<RunToken> {
    let (token, source) = match &settings.run_token_file {
        Some(file) => {
            let bytes = disk::read_small(file, TOKEN_BYTES_MAX)?;
            let mode = fs::metadata(file).map_err(|e| Error::io("look at", file, e))?.mode();
            if mode & OTHERS_READ != 0 {
                let path = printable(file.display());
                warn(&format!("{path}: other users may read the run token (mode {:03o}); run chmod 600", mode & 0o777));
            }
            (RunToken::new(&bytes, file.display())?, printable(file.display()))
        }
        None => (token_of_variable()?, TOKEN_VARIABLE.to_owned()),
    };
    if let Some(why) = token.weakness() {
        warn(&format!("{source}: the run token may be guessed: {why}"));
    }
    Ok(token)
}

fn token_of_variable() -> Result<RunToken> {
    let missing = format!(
        "{TOKEN_VARIABLE} is not set, nor --run-token-file; give all processes of the run one secret: {TOKEN_VARIABLE}=$(openssl rand -hex 16)"
    );
    RunToken::new(std::env::var_os(TOKEN_VARIABLE).ok_or_else(|| Error::usage(missing))?.as_bytes(), TOKEN_VARIABLE)
}

/// Settings and program version, which must be equal in all processes.
fn shared_settings(settings: &Settings) -> Result<Map<String, Value>> {
    let message = serde_json::to_value(settings).map_err(|e| Error::format("the settings", e))?;
    let message = message.as_object().cloned().unwrap_or_default();
    let shared = message.into_iter().filter(|(name, _)| !OF_ONE_PROCESS.contains(&name.as_str()));
    let program = ("the program".to_string(), env!("SUPEROFFLOAD_LONG_VERSION").into());
    Ok([program].into_iter().chain(shared.map(|(name, value)| (format!("--{}", name.replace('_', "-")), value))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::KEYS;
    use crate::device::DeviceKind;
    use crate::memory::{Addressing, DeviceMemory};
    use crate::planner::machine::{GroupedLayouts, Machine};

    #[test]
    fn a_fact_that_only_one_process_has_is_a_difference() {
        let facts = |values: &[&str]| values.iter().map(|value| ("product".to_string(), value.to_string())).collect::<Vec<_>>();
        let message = |first: &[&str], own: &[&str]| {
            difference(&facts(first), &facts(own)).map(|(name, first_value, own_value)| [name, first_value, own_value])
        };
        assert_eq!(message(&["a", "b"], &["a", "b"]), None);
        assert_eq!(message(&["a", "b"], &["a", "c"]), Some(["product", "b", "c"].map(String::from)));
        assert_eq!(message(&["a", "b"], &["a"]), Some(["product", "b", "nothing"].map(String::from)));
        assert_eq!(message(&["a"], &["a", "b"]), Some(["product", "nothing", "b"].map(String::from)));
    }

    /// A process does not check its own cuBLASLt: it follows process 0.
    #[test]
    fn expert_products_of_process_0_apply_to_all() {
        let shape = crate::model::presets::shape("olmoe-1b-7b".as_ref()).unwrap();
        let device = DeviceMemory::Own { bytes: 1 << 40, addressing: Addressing::Separate };
        let machine = Machine { kind: DeviceKind::Gpu, device, grouped_layouts: GroupedLayouts::Usable, ..Machine::cpu(4) };
        for (requested, wanted) in
            [(ExpertProductsChoice::Auto, ExpertProductsChoice::Cublaslt), (ExpertProductsChoice::Own, ExpertProductsChoice::Own)]
        {
            let settings = Settings { expert_products: requested, ..Settings::demo() };
            let plan = Plan::new(&settings.request(&shape), &machine, false).unwrap();
            let sent = serde_json::to_string(&Proposal::new(&plan, &settings, String::new())).unwrap();
            let proposal: Proposal = serde_json::from_str(&sent).unwrap();
            assert_eq!(proposal.over(&Settings::demo()).expert_products, wanted);
        }
    }

    #[test]
    fn settings_of_one_process_are_exempt_and_the_rest_is_compared() {
        for name in OF_ONE_PROCESS {
            assert!(KEYS.iter().any(|key| key.name == name), "{name}");
        }
        let shared = shared_settings(&Settings { processes: 2, process: 1, ..Settings::demo() }).unwrap();
        for name in ["the program", "--processes", "--seq-length", "--learning-rate", "--seed", "--train-length"] {
            assert!(shared.contains_key(name), "{name} is not in {shared:?}");
        }
        assert!(!shared.contains_key("--process") && !shared.contains_key("--rendezvous-limit"));
    }
}
