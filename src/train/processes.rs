//! A run of several processes: how they come to agree before the first step, what those behind process 0 do, and how all end.

use super::observer::{Observer, Summary};
use super::run_lock::host_name;
use super::text;
use crate::bucket::layout::BucketLayout;
use crate::checkpoint::parts::{self, MeetingPlace};
use crate::config::options::{CastSide, Technique};
use crate::config::settings::Settings;
use crate::data::checksum::hex;
use crate::data::rows::Packing;
use crate::device::cpu::CpuDevice;
use crate::disk::{self, Dir};
use crate::engine::orders::RankEngine;
use crate::engine::watchdog::Alarm;
use crate::error::{Error, Result};
use crate::launch::engine::Launcher;
use crate::launch::processes;
use crate::model::activations::LossTile;
use crate::model::shape::ModelShape;
use crate::model_dir::{CONFIG, ModelDir};
use crate::planner::plan::Plan;
use crate::ranks::links::{EndOfRun, LastResort, Links};
use crate::ranks::rendezvous::{Meeting, differs};
use crate::ranks::run_token::{RunToken, TOKEN_VARIABLE};
use crate::signals::StopFlag;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

/// A file with a run token is no longer.
const TOKEN_BYTES_MAX: u64 = 4096;

/// Settings that say something of one process or its machine, or of what process 0 does alone: it deals the data and writes all files.
const OF_ONE_PROCESS: [&str; 22] = [
    "process",
    "rendezvous",
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

/// What process 0 has decided of the run, for the plans of all others.
#[derive(Serialize, Deserialize)]
struct Proposal {
    per_device_train_batch_size: usize,
    gradient_accumulation_steps: Option<usize>,
    gradient_shares: Option<usize>,
    packing: Packing,
    bucket_mib: Option<f64>,
    cast: CastSide,
    without: Vec<Technique>,
    loss_tile: Option<LossTile>,
    /// What a plan that obeys comes to: names and values.
    facts: Vec<(String, String)>,
    /// What shows that output directories are one.
    meeting_place: String,
}

impl Proposal {
    fn new(plan: &Plan, shape: &ModelShape, settings: &Settings, meeting_place: String) -> Self {
        let fixed = plan.fixed(settings);
        Self {
            per_device_train_batch_size: fixed.per_device_train_batch_size,
            gradient_accumulation_steps: fixed.gradient_accumulation_steps,
            gradient_shares: fixed.gradient_shares,
            packing: fixed.packing,
            bucket_mib: fixed.bucket_mib,
            cast: fixed.cast,
            without: fixed.without,
            loss_tile: fixed.loss_tile,
            facts: facts(plan, shape),
            meeting_place,
        }
    }

    fn over(&self, own: &Settings) -> Settings {
        Settings {
            per_device_train_batch_size: self.per_device_train_batch_size,
            gradient_accumulation_steps: self.gradient_accumulation_steps,
            gradient_shares: self.gradient_shares,
            packing: self.packing,
            bucket_mib: self.bucket_mib,
            cast: self.cast,
            without: self.without.clone(),
            loss_tile: self.loss_tile,
            is_batch_open: false,
            ..own.clone()
        }
    }
}

/// What decides bits, and what slices travel by.
fn facts(plan: &Plan, shape: &ModelShape) -> Vec<(String, String)> {
    let Plan { dtype, link_dtype, moments, rules, layout, batch, seq_length, grad_accum_steps, shares, ranks, loss_tile, hyper, .. } = plan;
    let model = hex(Sha256::digest(format!("{shape:?}")));
    let facts = [
        ("model", model[..16].to_string()),
        ("buckets", cut(layout)),
        ("devices", ranks.to_string()),
        ("gradient shares", format!("{shares} of {grad_accum_steps} micro-batches")),
        ("micro-batch", format!("{batch} x {seq_length}")),
        ("rows with several documents", plan.separates_documents.to_string()),
        ("loss tile", format!("{} x {}", loss_tile.rows, loss_tile.vocab)),
        ("formats", format!("{dtype}, {link_dtype} on the link, moments in {moments}")),
        ("rules of the step", format!("{rules:?}")),
        ("AdamW", format!("{hyper:?}")),
        ("attention", format!("{:?}", plan.attention)),
        ("router loss", plan.router_aux_loss_coef.to_string()),
    ];
    facts.map(|(name, value)| (name.to_string(), value)).to_vec()
}

fn cut(layout: &BucketLayout) -> String {
    format!("{} of {} elements, {} in all", layout.count(), layout.bucket_elems(), layout.flat_elems())
}

/// Meets the other processes of the run of `settings`.
///
/// # Errors
/// `Usage` without a run token, or where processes differ; those of [`Links::meet`].
pub(super) fn meet(settings: &Settings, stop: &StopFlag, observer: &mut dyn Observer) -> Result<Links> {
    let Settings { process, processes, .. } = *settings;
    let address = settings.rendezvous.clone().unwrap_or_default();
    let meeting = Meeting { address, process, processes, token: token(settings)? };
    let last_resort = observer.on_alarm().map(|alarm| -> LastResort { Box::new(move |why| alarm(Alarm::Stall(why))) });
    observer.note(&format!("process {process} of {processes}: meeting the others at {}", meeting.address));
    let host = host_name().unwrap_or_else(|| "an unnamed host".into());
    let links = Links::meet(&meeting, host, what_is_shared(settings)?, stop, last_resort)?;
    observer.note(&format!("all {processes} processes are here: {}", links.names().join(", ")));
    Ok(links)
}

fn token(settings: &Settings) -> Result<RunToken> {
    if let Some(file) = &settings.run_token_file {
        let bytes = disk::read_small(file, TOKEN_BYTES_MAX)?;
        return RunToken::new(&String::from_utf8_lossy(&bytes), file.display());
    }
    let missing = format!(
        "{TOKEN_VARIABLE} is not set, nor --run-token-file; give all processes of the run one secret: {TOKEN_VARIABLE}=$(openssl rand -hex 16)"
    );
    RunToken::new(&std::env::var(TOKEN_VARIABLE).map_err(|_| Error::usage(missing))?, TOKEN_VARIABLE)
}

/// What all processes must have been told alike.
fn what_is_shared(settings: &Settings) -> Result<Map<String, Value>> {
    let told = serde_json::to_value(settings).map_err(|e| Error::format("the settings", e))?;
    let told = told.as_object().cloned().unwrap_or_default();
    let shared = told.into_iter().filter(|(name, _)| !OF_ONE_PROCESS.contains(&name.as_str()));
    let program = ("the program".to_string(), env!("SUPEROFFLOAD_LONG_VERSION").into());
    Ok([program].into_iter().chain(shared.map(|(name, value)| (format!("--{}", name.replace('_', "-")), value))).collect())
}

/// Process 0 tells the others what it has decided. They find what is returned in their output directories, which are this `output_dir`; nobody
/// needs it once all have their engines.
///
/// # Errors
/// The disk's.
pub(super) fn propose(links: &Links, (plan, shape): (&Plan, &ModelShape), settings: &Settings, output_dir: &Dir) -> Result<MeetingPlace> {
    let (place, sign) = MeetingPlace::create(output_dir)?;
    let proposal = serde_json::to_string(&Proposal::new(plan, shape, settings, sign)).map_err(|e| Error::format("the proposal", e))?;
    links.propose(&proposal);
    Ok(place)
}

/// What a process behind process 0 does: it plans as process 0 says, and follows.
///
/// # Errors
/// What is missing or differs here; what ended another process.
pub(super) fn follow(settings: &Settings, links: &Links, stop: &StopFlag, observer: &mut dyn Observer) -> Result<Summary> {
    // Data comes from process 0.
    let without_data = Settings { data: Vec::new(), eval_data: Vec::new(), ..settings.clone() };
    let found = text::find_sources(&without_data, false, stop, &mut |news| super::setup::hear(observer, news))?;
    let settings = Settings { model: found.model, ..settings.clone() };
    let shape = match settings.model.as_deref().map(ModelDir::open).transpose()? {
        Some(dir) => ModelShape::read(&dir.file(CONFIG)?)?,
        None => ModelShape::demo(),
    };
    let proposal: Proposal = match links.proposal()? {
        Ok(proposal) => serde_json::from_str(&proposal).map_err(|e| Error::format("the proposal of process 0", e))?,
        Err(end) => return ended(links, end),
    };
    let (launch, settings) = Launcher::new(&proposal.over(&settings))?;
    let plan = launch.plan(&settings, &shape, false)?;
    expect_alike(links, &proposal.facts, &facts(&plan, &shape))?;
    MeetingPlace::find(&settings.output_dir, &proposal.meeting_place, &links.names()[0])?;
    observer.note(&plan.to_string());
    observer.note(&format!("process {} follows process 0, which tells of steps", links.process()));
    let save = |engine: &mut RankEngine<CpuDevice>, words| parts::save_own(engine, &settings.output_dir, words);
    match processes::follow(&plan, &shape, &launch.topology, links, save) {
        Error::Rank { .. } => links.end_of_run().and_then(|end| ended(links, end)),
        own => Err(own),
    }
}

/// # Errors
/// `Usage` that names what differs, and both values.
fn expect_alike(links: &Links, first: &[(String, String)], own: &[(String, String)]) -> Result<()> {
    let Some(((name, theirs), (_, ours))) = first.iter().zip(own).find(|(theirs, ours)| theirs != ours) else { return Ok(()) };
    let process = links.process();
    let names = |process: usize| links.names()[process].split_once(" on ").map_or("", |(_, host)| host);
    Err(Error::usage(differs(name, [(0, names(0), theirs.clone()), (process, names(process), ours.clone())])))
}

/// How a run that process 0 ended ends here.
fn ended(links: &Links, end: EndOfRun) -> Result<Summary> {
    let EndOfRun { step, max_steps, interrupted, failure } = end;
    match failure {
        Some(cause) => Err(Error::Rank { name: links.names()[0].clone(), cause }),
        None => Ok(Summary { process: links.process(), step, max_steps, interrupted, ..Summary::default() }),
    }
}

/// Tells the other processes how the run ended here, and gives that back.
///
/// # Errors
/// Those of `outcome`.
pub(super) fn part(links: Links, outcome: Result<Summary>) -> Result<Summary> {
    let failed = |error: &Error| match error {
        // Who fails tells it itself.
        Error::Rank { .. } if links.process() > 0 => EndOfRun::default(),
        Error::Interrupted(_) => EndOfRun { interrupted: true, ..EndOfRun::default() },
        error => EndOfRun { failure: Some(error.to_string()), ..EndOfRun::default() },
    };
    let end = match &outcome {
        Ok(Summary { failure: Some(error), .. }) | Err(error) => failed(error),
        Ok(Summary { step, max_steps, interrupted, .. }) => {
            EndOfRun { step: *step, max_steps: *max_steps, interrupted: *interrupted, failure: None }
        }
    };
    links.close(&end);
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::KEYS;

    #[test]
    fn what_is_of_one_process_is_a_setting_and_the_rest_is_compared() {
        for name in OF_ONE_PROCESS {
            assert!(KEYS.iter().any(|key| key.name == name), "{name}");
        }
        let shared = what_is_shared(&Settings { processes: 2, process: 1, ..Settings::demo() }).unwrap();
        for name in ["the program", "--processes", "--seq-length", "--learning-rate", "--seed", "--train-length"] {
            assert!(shared.contains_key(name), "{name} is not in {shared:?}");
        }
        assert!(!shared.contains_key("--process"));
    }
}
