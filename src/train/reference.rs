//! Log-probabilities of a reference, under the weights that a run begins with, or those of another model: sums over each answer of a pair, and
//! a number for each token of completions that come without them. They are computed once, before step 0, and kept in the output directory. A
//! checkpoint holds their checksum.

use super::evaluation::EvalSequences;
use super::identity::Run;
use super::observer::Observer;
use crate::config::settings::Settings;
use crate::data::checksum;
use crate::data::dataset::Dataset;
use crate::device::Kernels;
use crate::disk::{OwnMark, OwnedName, Records, RunRecord};
use crate::engine::executor::Engine;
use crate::error::{Error, Result, printable};
use crate::hub::HubQuery;
use crate::model::shape::ModelShape;
use crate::model::weights::ModelWeights;
use crate::model_dir::{CONFIG, ModelDir, expect_exists};
use crate::pair_loss::PAIR_TOKENS_MIN;
use crate::signals::StopFlag;
use crate::units::counted;
use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::path::Path;
use std::time::Instant;

/// The weights of the model of `--reference`, if it is given. A run of `shape` computes with them, so the models may differ in their weights
/// alone.
///
/// # Errors
/// Errors of the model's files; `Usage` for a model of another shape.
pub(super) fn weights(settings: &Settings, shape: &ModelShape, stop: &StopFlag) -> Result<Option<ModelWeights>> {
    let Some(model) = &settings.reference else { return Ok(None) };
    let dir = HubQuery { with_weights: true, stop, emit: &mut |_| () }.model(model)?;
    expect_exists(&dir)?;
    let weights = ModelWeights::open(&dir, &ModelShape::read(&ModelDir::open(&dir)?.file(CONFIG)?)?)?;
    let ModelShape { frozen, trained_tokens, packs_experts, init_std, ignored_dropout, media_tokens, .. } = shape.clone();
    let same = ModelShape { frozen, trained_tokens, packs_experts, init_std, ignored_dropout, media_tokens, ..weights.shape().clone() };
    let given = format!("--reference {}", printable(dir.display()));
    if same != *shape {
        return Err(Error::usage(format_args!(
            "{given}: its config.json describes another model than that of --model; weights alone may differ"
        )));
    }
    weights.freezing(shape.clone()).map(Some)
}

/// The record of reference sums of pairs.
pub(super) const REFERENCE: RunRecord = RunRecord {
    file: OwnedName {
        pattern: "pair-reference.json",
        kind: "record of reference sums",
        mark: OwnMark::Head("{\"superoffload\":\"pair reference\","),
    },
    old_name: "pair-reference.json",
    // Some 45 bytes for each of at most 8 million pairs.
    bytes_max: 1 << 30,
};
/// The record of reference log-probabilities of tokens.
pub(super) const TOKEN_REFERENCE: RunRecord = RunRecord {
    file: OwnedName {
        pattern: "token-reference.json",
        kind: "record of reference log-probabilities",
        mark: OwnMark::Head("{\"superoffload\":\"token reference\","),
    },
    old_name: "token-reference.json",
    // 8 bytes a token.
    bytes_max: 1 << 32,
};

/// In the run of a checkpoint, key of the checksum of the sums.
const REFERENCE_SHA256: &str = "pair_reference";
/// Key of the checksum of the log-probabilities of tokens.
const TOKEN_REFERENCE_SHA256: &str = "token_reference";
/// Remedy for a run that goes on without its reference.
const REMEDY: &str = "put the file of the run back, or start a new run";

/// The numbers of all data of a run.
#[derive(Serialize, Deserialize)]
struct KeptReference {
    train: ReferenceNumbers,
    eval: Option<ReferenceNumbers>,
}

/// The numbers of a dataset. A dataset of completions that all come with a reference has none.
#[derive(Default, PartialEq, Serialize, Deserialize)]
struct ReferenceNumbers {
    /// Checksum of the tokens of its pairs or completions.
    tokens: String,
    /// The sums of the chosen and the rejected answer of each pair, as the bits of 64-bit floats.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    sums: Vec<[u64; 2]>,
    /// The log-probability of each trained token of completions, as the bits of a 32-bit float in 8 hexadecimal digits.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    logps: String,
}

/// Hexadecimal digits of a log-probability.
const DIGITS: usize = 8;

/// Where and under which key a run keeps its reference.
struct ReferencePlace {
    record: &'static RunRecord,
    sha256: &'static str,
}

impl ReferencePlace {
    /// The place for the reference of pairs, or else of completions.
    fn of(has_pairs: bool) -> Self {
        match has_pairs {
            true => Self { record: &REFERENCE, sha256: REFERENCE_SHA256 },
            false => Self { record: &TOKEN_REFERENCE, sha256: TOKEN_REFERENCE_SHA256 },
        }
    }

    /// The error for a record in `output_dir` that does not fit.
    fn wrong(&self, output_dir: &Path, cause: &str) -> Error {
        Error::format(output_dir.join(".superoffload").join(self.record.file.pattern), format_args!("{cause}; {REMEDY}"))
    }
}

/// The datasets of a run whose loss has a reference.
pub(super) struct ReferenceData<'a> {
    pub(super) dataset: &'a mut Dataset,
    pub(super) eval_dataset: Option<&'a mut Dataset>,
    /// Whether `--reference` names the model of the reference.
    pub(super) is_given: bool,
}

impl ReferenceData<'_> {
    /// Computes the numbers under the weights of `engine`, and keeps them in the output directory and their checksum in `run`. Completions that
    /// all come with a reference need no pass.
    ///
    /// # Errors
    /// Errors of the engine and of the data; `Unsupported` for too many tokens; `Io` when the numbers cannot be written; `Interrupted`.
    pub(super) fn compute<D: Kernels>(
        &mut self,
        engine: &mut Engine<D>,
        (output_dir, run): (&Path, &mut Run),
        stop: &StopFlag,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        if !self.is_lacking() {
            if self.is_given {
                observer.warn("--reference has no effect: every completion has `ref_logps`");
            }
            return Ok(());
        }
        let (start, place) = (Instant::now(), self.place());
        self.check_size(place.record)?;
        let train = ReferenceNumbers::compute(self.dataset, engine, stop, observer)?;
        let eval = self.eval_dataset.as_mut().map(|dataset| ReferenceNumbers::compute(dataset, engine, stop, observer)).transpose()?;
        let kept = KeptReference { train, eval };
        Records::at(output_dir)?.write(place.record, &kept)?;
        run.insert(place.sha256.into(), kept.sha256().into());
        observer.detail(&format!("reference log-probabilities of {} in {:.1} s", kept.count(), start.elapsed().as_secs_f64()));
        self.take(kept, output_dir)
    }

    /// Takes the numbers that the run of a checkpoint has kept in the output directory, or in `former_dir`, where the checkpoint is. Numbers of
    /// the latter are written into the output directory.
    ///
    /// # Errors
    /// `Format` that names the file when it is missing or is not that of `run`; `Usage` for other evaluation data; `Io` when the numbers cannot
    /// be written.
    pub(super) fn restore(&mut self, (output_dir, former_dir): (&Path, &Path), run: &Run) -> Result<()> {
        if !self.is_lacking() {
            return Ok(());
        }
        let place = self.place();
        let sha256 = run.get(place.sha256);
        if sha256.is_none() && !self.dataset.lacks_reference() {
            return Err(without_reference());
        }
        let of_run = |kept: &KeptReference| sha256.is_some_and(|sha256| *sha256 == kept.sha256());
        let find = |dir: &Path| place.record.read(dir).filter(of_run);
        if let Some(kept) = find(output_dir) {
            return self.take(kept, output_dir);
        }
        let wrong = || place.wrong(former_dir, "not the reference log-probabilities that the checkpoint was trained with");
        let kept = find(former_dir).ok_or_else(wrong)?;
        Records::at(output_dir)?.write(place.record, &kept)?;
        self.take(kept, output_dir)
    }

    /// Whether a dataset needs numbers.
    fn is_lacking(&self) -> bool {
        self.dataset.lacks_reference() || self.eval_dataset.as_ref().is_some_and(|dataset| dataset.lacks_reference())
    }

    /// Rejects more tokens of completions than `record` may have.
    fn check_size(&self, record: &RunRecord) -> Result<()> {
        let trained = |dataset: &Dataset| dataset.tokens() as u64 - dataset.untrained();
        let tokens = trained(self.dataset) + self.eval_dataset.as_ref().map_or(0, |dataset| trained(dataset));
        if self.dataset.pairs() > 0 || tokens <= record.bytes_max / 16 * 15 / DIGITS as u64 {
            return Ok(());
        }
        Err(Error::Unsupported(format!(
            "--beta with {tokens} tokens of completions, whose reference does not fit its record; add `ref_logps` to the data"
        )))
    }

    fn place(&self) -> ReferencePlace {
        ReferencePlace::of(self.dataset.pairs() > 0)
    }

    fn take(&mut self, kept: KeptReference, output_dir: &Path) -> Result<()> {
        let place = self.place();
        kept.train.give(self.dataset).ok_or_else(|| place.wrong(output_dir, "reference log-probabilities of other data"))?;
        let Some(dataset) = &mut self.eval_dataset else { return Ok(()) };
        kept.eval.unwrap_or_default().give(dataset).ok_or_else(without_reference)
    }
}

/// The error for evaluation data that a run has no reference for.
fn without_reference() -> Error {
    let cause = "the run began without a reference for this data; use the former evaluation data, or start a new run";
    Error::usage(format_args!("--eval-data: {cause}"))
}

impl KeptReference {
    fn sha256(&self) -> String {
        let all = [&self.train].into_iter().chain(&self.eval);
        let bytes = all.flat_map(|numbers| {
            let sums = numbers.sums.as_flattened().iter().flat_map(|bits| bits.to_le_bytes());
            numbers.tokens.bytes().chain(sums).chain(numbers.logps.bytes())
        });
        checksum::sha256(&bytes.collect::<Vec<_>>())
    }

    /// `12 pairs` or `345 tokens`.
    fn count(&self) -> String {
        let of = |numbers: &dyn Fn(&ReferenceNumbers) -> usize| numbers(&self.train) + self.eval.as_ref().map_or(0, numbers);
        match of(&|numbers| numbers.logps.len() / DIGITS) {
            0 => counted(of(&|numbers| numbers.sums.len()), "pair"),
            tokens => counted(tokens, "token"),
        }
    }
}

impl ReferenceNumbers {
    /// Computes the numbers of `dataset` under the weights of `engine`; none if it lacks none.
    fn compute<D: Kernels>(dataset: &Dataset, engine: &mut Engine<D>, stop: &StopFlag, observer: &mut dyn Observer) -> Result<Self> {
        let mut numbers = Self::default();
        if !dataset.lacks_reference() {
            return Ok(numbers);
        }
        let (mut rows, has_pairs) = (EvalSequences::of(dataset), dataset.pairs() > 0);
        while !rows.is_over() {
            if stop.is_set() {
                return Err(Error::Interrupted("the reference log-probabilities were computed".into()));
            }
            match has_pairs {
                true => numbers.add_pairs(dataset, engine, &mut rows)?,
                false => numbers.add_tokens(engine, &mut rows)?,
            }
            observer.progress(
                "computing reference log-probabilities",
                rows.next().min(dataset.sequences()) as u64,
                dataset.sequences() as u64,
            );
        }
        Ok(Self { tokens: dataset.documents_digest()?, ..numbers })
    }

    /// Adds the sums of the pairs of the next rows.
    fn add_pairs<D: Kernels>(&mut self, dataset: &Dataset, engine: &mut Engine<D>, rows: &mut EvalSequences<'_>) -> Result<()> {
        let (first, places) = (rows.next(), dataset.seq_length() / PAIR_TOKENS_MIN);
        let found = engine.pair_sums(rows)?;
        for (row, found) in (first..dataset.sequences()).zip(found.chunks_exact(places)) {
            self.sums.extend(found[..dataset.pairs_of(row).len()].iter().map(|sums| sums.map(f64::to_bits)));
        }
        Ok(())
    }

    /// Adds the log-probabilities of the tokens of the next rows.
    fn add_tokens<D: Kernels>(&mut self, engine: &mut Engine<D>, rows: &mut EvalSequences<'_>) -> Result<()> {
        for logp in engine.token_references(rows)? {
            if !logp.is_finite() {
                let cause =
                    format!("a token has the log-probability {logp}; check the weights of the reference, or add `ref_logps` to the data");
                return Err(Error::resource("compute the reference", cause));
            }
            // Writing to a string does not fail.
            _ = write!(self.logps, "{:08x}", logp.to_bits());
        }
        Ok(())
    }

    /// Gives the numbers to `dataset`; `None` if they are those of other data.
    fn give(self, dataset: &mut Dataset) -> Option<()> {
        if !dataset.lacks_reference() {
            return Some(());
        }
        let fits = dataset.documents_digest().is_ok_and(|tokens| tokens == self.tokens);
        if dataset.pairs() > 0 {
            let fits = fits && self.sums.len() == dataset.pairs();
            return fits.then(|| dataset.set_references(self.sums.into_iter().map(|sums| sums.map(f64::from_bits)).collect()));
        }
        let digits = self.logps.as_bytes().chunks(DIGITS);
        let logp = |digits| u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok().map(f32::from_bits);
        let logps = digits.map(logp).collect::<Option<Vec<f32>>>()?;
        (fits && dataset.set_token_references(logps).ok()?).then_some(())
    }
}
