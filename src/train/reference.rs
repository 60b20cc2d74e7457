//! Reference log-probabilities of pairs of answers: sums over each answer, under the weights that a run begins with, or those of another
//! model. They are computed once, before step 0, and kept in the output directory. A checkpoint holds their checksum.

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

/// The record of reference sums.
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

/// In the run of a checkpoint, key of the checksum of the sums.
const REFERENCE_SHA256: &str = "pair_reference";
/// Remedy for a run that goes on without its reference.
const REMEDY: &str = "put the file of the run back, or start a new run";

/// The sums of all data of a run.
#[derive(Serialize, Deserialize)]
struct KeptReference {
    train: ReferenceSums,
    eval: Option<ReferenceSums>,
}

/// The sums of a dataset.
#[derive(PartialEq, Serialize, Deserialize)]
struct ReferenceSums {
    /// Checksum of the tokens of its pairs.
    tokens: String,
    /// The sums of the chosen and the rejected answer of each pair, as the bits of 64-bit floats.
    sums: Vec<[u64; 2]>,
}

/// The datasets that need reference sums.
pub(super) struct ReferenceData<'a> {
    pub(super) dataset: &'a mut Dataset,
    pub(super) eval_dataset: Option<&'a mut Dataset>,
}

impl ReferenceData<'_> {
    /// Computes the sums under the weights of `engine`, and keeps them in the output directory and their checksum in `run`.
    ///
    /// # Errors
    /// Errors of the engine and of the data; `Io` when the sums cannot be written; `Interrupted`.
    pub(super) fn compute<D: Kernels>(
        &mut self,
        engine: &mut Engine<D>,
        (output_dir, run): (&Path, &mut Run),
        stop: &StopFlag,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let start = Instant::now();
        let train = ReferenceSums::compute(self.dataset, engine, stop, observer)?;
        let eval = self.eval_dataset.as_mut().map(|dataset| ReferenceSums::compute(dataset, engine, stop, observer)).transpose()?;
        let pairs = train.sums.len() + eval.as_ref().map_or(0, |eval| eval.sums.len());
        let kept = KeptReference { train, eval };
        Records::at(output_dir)?.write(&REFERENCE, &kept)?;
        run.insert(REFERENCE_SHA256.into(), kept.sha256().into());
        observer.detail(&format!("reference log-probabilities of {} in {:.1} s", counted(pairs, "pair"), start.elapsed().as_secs_f64()));
        self.take(kept, output_dir)
    }

    /// Takes the sums that the run of a checkpoint has kept in the output directory, or in `former_dir`, where the checkpoint is. Sums of
    /// the latter are written into the output directory.
    ///
    /// # Errors
    /// `Format` that names the file when it is missing or is not that of `run`; `Usage` for other evaluation data; `Io` when the sums cannot
    /// be written.
    pub(super) fn restore(&mut self, (output_dir, former_dir): (&Path, &Path), run: &Run) -> Result<()> {
        let of_run = |kept: &KeptReference| run.get(REFERENCE_SHA256).is_some_and(|sha256| *sha256 == kept.sha256());
        let find = |dir: &Path| REFERENCE.read(dir).filter(of_run);
        if let Some(kept) = find(output_dir) {
            return self.take(kept, output_dir);
        }
        let wrong = || wrong(former_dir, "not the reference log-probabilities that the checkpoint was trained with");
        let kept = find(former_dir).ok_or_else(wrong)?;
        Records::at(output_dir)?.write(&REFERENCE, &kept)?;
        self.take(kept, output_dir)
    }

    fn take(&mut self, kept: KeptReference, output_dir: &Path) -> Result<()> {
        kept.train.give(self.dataset).ok_or_else(|| wrong(output_dir, "reference log-probabilities of other data"))?;
        let Some(dataset) = &mut self.eval_dataset else { return Ok(()) };
        kept.eval.and_then(|eval| eval.give(dataset)).ok_or_else(|| {
            let cause = "the run began without a reference for this data; use the former evaluation data, or start a new run";
            Error::usage(format_args!("--eval-data: {cause}"))
        })
    }
}

/// The error for a record of sums that does not fit.
fn wrong(output_dir: &Path, cause: &str) -> Error {
    Error::format(output_dir.join(".superoffload").join(REFERENCE.file.pattern), format_args!("{cause}; {REMEDY}"))
}

impl KeptReference {
    fn sha256(&self) -> String {
        let all = [&self.train].into_iter().chain(&self.eval);
        let bytes = all.flat_map(|sums| sums.tokens.bytes().chain(sums.sums.as_flattened().iter().flat_map(|bits| bits.to_le_bytes())));
        checksum::sha256(&bytes.collect::<Vec<_>>())
    }
}

impl ReferenceSums {
    /// Computes the sums of the pairs of `dataset` under the weights of `engine`.
    fn compute<D: Kernels>(dataset: &Dataset, engine: &mut Engine<D>, stop: &StopFlag, observer: &mut dyn Observer) -> Result<Self> {
        let (mut rows, mut sums) = (EvalSequences::of(dataset), Vec::with_capacity(dataset.pairs()));
        let places = dataset.seq_length() / PAIR_TOKENS_MIN;
        while !rows.is_over() {
            if stop.is_set() {
                return Err(Error::Interrupted("the reference log-probabilities were computed".into()));
            }
            let first = rows.next();
            let found = engine.pair_sums(&mut rows)?;
            for (row, found) in (first..dataset.sequences()).zip(found.chunks_exact(places)) {
                sums.extend_from_slice(&found[..dataset.pairs_of(row).len()]);
            }
            observer.progress(
                "computing reference log-probabilities",
                rows.next().min(dataset.sequences()) as u64,
                dataset.sequences() as u64,
            );
        }
        Ok(Self { tokens: dataset.pairs_digest()?, sums: sums.into_iter().map(|sums| sums.map(f64::to_bits)).collect() })
    }

    /// Gives the sums to `dataset`; `None` if they are those of other data.
    fn give(self, dataset: &mut Dataset) -> Option<()> {
        let fits = self.sums.len() == dataset.pairs() && dataset.pairs_digest().is_ok_and(|tokens| tokens == self.tokens);
        fits.then(|| dataset.set_references(self.sums.into_iter().map(|sums| sums.map(f64::from_bits)).collect()))
    }
}
