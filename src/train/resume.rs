//! Going on from a checkpoint: which one, whether it means the same run, and its state into the engine.

use super::identity::{self, Run, brief};
use super::observer::Observer;
use super::packing;
use super::session::SavedPosition;
use crate::checkpoint::{self, Check, Loaded, STEPS_MAX, engine_state};
use crate::config::options::Resume;
use crate::config::settings::{OnResume, Settings};
use crate::data::loader::DataPosition;
use crate::describe;
use crate::device::Kernels;
use crate::engine::executor::Engine;
use crate::engine::protocol::loss_scale::LossScale;
use crate::engine::protocol::verdict::SpeculationHistory;
use crate::error::{Error, Result};
use crate::model::shape::ModelShape;
use crate::optim::PIECE_ELEMS;
use crate::optim::clip::{ClipMemory, ClipRule};
use crate::recipe::Recipe;
use crate::recipe::part::RunPart;
use serde::Deserialize;
use serde_json::Value;
use std::ops::Range;
use std::path::Path;

/// The checkpoint to go on from, which passes `check`; `None`: from the start.
///
/// # Errors
/// `Usage` for a path that is no directory; the errors of the named checkpoint, or of all that `auto` finds.
pub(super) fn find(settings: &Settings, check: Check, observer: &mut dyn Observer) -> Result<Option<Loaded>> {
    let output_dir = &settings.output_dir;
    match &settings.resume_from_checkpoint {
        None => Ok(None),
        Some(Resume::Dir(dir)) => {
            if !checkpoint::is_checkpoint(dir) {
                let dir = dir.display();
                return Err(Error::usage(format!(
                    "--resume-from-checkpoint {dir}: not a checkpoint; name {dir}/checkpoint-<step>, or use auto"
                )));
            }
            check.open(dir).map(Some)
        }
        Some(Resume::Auto) => {
            let newest = checkpoint::newest_good(output_dir, check)?;
            match newest.found {
                Some((_, loaded)) => {
                    newest.warnings.iter().for_each(|line| observer.warn(line));
                    Ok(Some(loaded))
                }
                None if newest.warnings.is_empty() => Ok(None),
                None => Err(all_damaged(output_dir, &newest.warnings)),
            }
        }
    }
}

/// Refuses a run without the model or the data that the checkpoint was made with: it would read the built-in ones instead.
///
/// # Errors
/// `Usage` with the flags that are missing, and the command that needs none.
pub(super) fn expect_sources(settings: &Settings, loaded: &Loaded) -> Result<()> {
    let then = &loaded.manifest().trainer.settings;
    let had_data = then["data"].as_array().is_some_and(|data| !data.is_empty());
    let missing = [("--model", settings.model.is_none() && then["model"].is_string()), ("--data", settings.data.is_empty() && had_data)];
    let missing: Vec<_> = missing.into_iter().filter(|(_, is_missing)| *is_missing).map(|(flag, _)| flag).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let dir = match &settings.resume_from_checkpoint {
        Some(Resume::Dir(dir)) => dir,
        _ => &settings.output_dir,
    };
    let (dir, missing) = (dir.display(), missing.join(" and "));
    Err(Error::usage(format!(
        "{missing}: missing, and the run in {dir} was started with it; `superoffload resume {dir}` takes everything from the run's record"
    )))
}

/// `then`, the model of a checkpoint, in the format of `settings`, if they freeze the same tensors.
///
/// # Errors
/// Errors of [`Settings::freezing`]; `Usage` with a tensor that is frozen then or now alone, and for other trained tokens.
pub(super) fn expect_frozen(settings: &Settings, then: ModelShape) -> Result<ModelShape> {
    let now = settings.freezing(then.clone(), settings.model.as_deref())?;
    if then.trained_tokens != now.trained_tokens {
        let words = |shape: &ModelShape| {
            let rows = |tokens: &Range<usize>| format!("trained for the tokens {}..{} alone", tokens.start, tokens.end);
            shape.trained_tokens.as_ref().map_or("not restricted to a range of tokens".to_string(), rows)
        };
        let (was, is) = (words(&then), words(&now));
        return Err(Error::usage(format!(
            "--train-tokens: rows of the token embedding were {was} when the checkpoint was made and are {is} now; a checkpoint has the \
             states of its trained rows alone: use its --train-tokens, or export it and start a new run from the export"
        )));
    }
    let Some(name) = then.frozen.symmetric_difference(&now.frozen).next() else { return Ok(now) };
    let words = |shape: &ModelShape| if shape.frozen.contains(name) { "frozen" } else { "trained" };
    let (was, is) = (words(&then), words(&now));
    Err(Error::usage(format!(
        "--freeze and --train-only: {name} was {was} when the checkpoint was made and is {is} now; a checkpoint has the states of its \
         trained tensors alone: use its --freeze and --train-only, or export it and start a new run from the export"
    )))
}

fn all_damaged(output_dir: &Path, damages: &[String]) -> Error {
    let cause = format_args!(
        "every checkpoint here is damaged: {}; without --resume-from-checkpoint the run begins anew and moves them aside",
        damages.join("; ")
    );
    Error::format(output_dir, cause)
}

/// A checkpoint that means this run.
pub(super) struct Accepted {
    loaded: Loaded,
    position: DataPosition,
    history: SpeculationHistory,
    clip_memory: ClipMemory,
    /// The run that later checkpoints record.
    pub(super) run: Run,
}

/// Compares the checkpoint with this run: its recipe, its data of `sequences` sequences, and `now`, its record.
///
/// # Errors
/// `Usage` with both values for a difference that was not accepted; `Format` for an invalid manifest.
pub(super) fn accept(
    loaded: Loaded,
    settings: &Settings,
    (recipe, sequences): (&Recipe, usize),
    now: Run,
    observer: &mut dyn Observer,
) -> Result<Accepted> {
    let path = loaded.manifest_path();
    let (trainer, recorded) = (&loaded.manifest().trainer, &loaded.manifest().run);
    let then = &recipe.complete(recorded.clone());
    let wrong = |cause: &dyn std::fmt::Display| Error::format(&path, cause);
    let saved = SavedPosition::deserialize(&trainer.data_position).map_err(|e| wrong(&format_args!("data position: {e}")))?;
    let history = SpeculationHistory::deserialize(&trainer.speculation).map_err(|e| wrong(&format_args!("speculation: {e}")))?;
    let DataPosition { epoch, next_sequence } = saved.position;
    if epoch > STEPS_MAX || next_sequence > saved.sequences as u64 {
        return Err(wrong(&format_args!("data position: sequence {next_sequence} of {} in epoch {epoch}", saved.sequences)));
    }
    if !history.is_possible() {
        return Err(wrong(&"speculation: more verdicts than are kept"));
    }
    let rule = ClipRule::GlobalNorm { max_norm: settings.max_grad_norm };
    let clip_memory = rule.resumed(&trainer.clip).map_err(|cause| wrong(&cause))?;
    let settings_now = serde_json::to_value(settings).map_err(|e| Error::usage(format!("settings: {e}")))?;
    expect_same_order(&settings_now, &packing::completed(&trainer.settings))?;
    if let missing @ [_, ..] = identity::unknown(then).as_slice() {
        let (dir, format, missing) = (loaded.dir().display(), loaded.manifest().format_version, missing.join(", "));
        observer.warn(&format!("{dir}: this checkpoint (format {format}) has no record of {missing}, which is not compared"));
    }
    let changes = identity::changes(then, &now);
    accept_changes(settings, &changes, observer)?;
    let position = position_in(settings, saved, sequences, observer)?;
    log_changed_settings(&settings_now, &trainer.settings, observer);
    let run = identity::continued(recorded, now, trainer.step, &changes);
    Ok(Accepted { position, history, clip_memory, run, loaded })
}

impl Accepted {
    /// The checkpoint.
    pub(super) fn dir(&self) -> &Path {
        self.loaded.dir()
    }

    /// Training steps that it stands at.
    pub(super) fn step(&self) -> u64 {
        self.loaded.manifest().trainer.step
    }

    /// State and counters go into the engine; returns where the data goes on.
    ///
    /// # Errors
    /// A tensor that the model does not have or that cannot be read; the device's.
    pub(super) fn restore<D: Kernels>(self, engine: &mut Engine<D>) -> Result<DataPosition> {
        let trainer = &self.loaded.manifest().trainer;
        let mut loss_scale = LossScale::new(engine.plan().recipe.numerics.dtype);
        loss_scale.restore(trainer.loss_scale.scale, trainer.loss_scale.good_steps);
        // Before the state: moments of another format are rounded as that step rounds.
        engine.resume(trainer.step, trainer.optimizer_step, loss_scale, self.history, self.clip_memory)?;
        engine_state::restore(engine, &self.loaded, PIECE_ELEMS)?;
        engine.send_weights()?;
        Ok(self.position)
    }
}

/// A position means the same sequences only in the same order, even if other changes are accepted.
fn expect_same_order(now: &Value, then: &Value) -> Result<()> {
    for key in OnResume::Order.keys() {
        if then[key] != now[key] {
            let (then, now, flag) = (order_word(&then[key]), order_word(&now[key]), describe::flag_name(key));
            return Err(Error::usage(format!(
                "--{flag}: {key} was {then} when the checkpoint was made and is {now} now: its data position would mean other sequences"
            )));
        }
    }
    Ok(())
}

/// A setting that decides the order; a checkpoint omits some while they have the default.
fn order_word(value: &Value) -> String {
    if value.is_null() { "the default".into() } else { brief(value) }
}

/// Each change is accepted by its flag, with a warning, or ends the run.
fn accept_changes(settings: &Settings, changes: &[(RunPart, String)], observer: &mut dyn Observer) -> Result<()> {
    for (part, change) in changes {
        let part_name = part.name();
        let differ = if *part == RunPart::Moments { "differ" } else { "differs" };
        if !settings.allow_changed.contains(part) {
            let remedy = match part {
                RunPart::Moments => "use the former --moments, or --allow-changed moments, which converts them".into(),
                _ => format!("use --allow-changed {part_name} to continue nevertheless"),
            };
            return Err(Error::usage(format!("the {part_name} {differ} from the checkpoint's: {change}; {remedy}")));
        }
        observer.warn(&format!("the {part_name} {differ} from the checkpoint's, as --allow-changed allows: {change}"));
    }
    Ok(())
}

/// Where the data goes on. Where another number of sequences was accepted, a place in their order means nothing: they begin anew.
fn position_in(settings: &Settings, saved: SavedPosition, sequences: usize, observer: &mut dyn Observer) -> Result<DataPosition> {
    if saved.sequences == sequences {
        return Ok(saved.position);
    }
    let (then, epoch) = (saved.sequences, saved.position.epoch);
    if !settings.allow_changed.iter().any(|part| [RunPart::Data, RunPart::Tokenizer].contains(part)) {
        let remedy = "use --allow-changed data to restart the epoch";
        return Err(Error::usage(format!("the checkpoint was made on {then} sequences, the data has {sequences}; {remedy}")));
    }
    observer.warn(&format!("the data had {then} sequences and has {sequences}: epoch {epoch} restarts"));
    Ok(DataPosition { epoch, next_sequence: 0 })
}

/// Other settings may change, and a person should know which.
fn log_changed_settings(now: &Value, then: &Value, observer: &mut dyn Observer) {
    for key in OnResume::Logged.keys() {
        if then[key] != now[key] {
            observer.warn(&describe::changed(key, &then[key], &now[key]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::SaveRate;
    use crate::checkpoint::tests::TensorSource;
    use crate::checkpoint::tests::{any_json, forge, places, true_manifest};
    use crate::checkpoint::{Scheduler, TrainerState, Writer};
    use crate::config::settings::KEYS;
    use crate::data::dataset::tests::counting;
    use crate::data::loader::Loader;
    use crate::data::rows::batch::{Batch, Batches, arrays};
    use crate::data::rows::row_rules::Packing;
    use crate::engine::protocol::verdict::Verdict;
    use crate::recipe::tests::recipe;
    use crate::train::tests::RecordingObserver;
    use proptest::prelude::*;
    use serde_json::json;

    /// Sequences of the data, two tokens each.
    const SEQUENCES: usize = 9;

    fn run() -> Run {
        json!({"model": {"rope_theta": 1e4, "norm_eps": 1e-5}, "tokenizer": "bytes", "data": {"sha256": "a", "files": []},
            "numerics": {"loss_tile": {"rows": 8, "vocab": 9}, "attention": "plain", "attention_block": null,
                "mlp_tile": null, "matmul": "in the format of weights", "sequence_ranks": 1, "gradient_group": 1}})
        .as_object()
        .unwrap()
        .clone()
    }

    fn settings(allow_changed: &[RunPart]) -> Settings {
        Settings { seq_length: 2, allow_changed: allow_changed.to_vec(), ..Settings::default() }
    }

    /// A checkpoint of step 4 in `dir`, made with [`run`] and these settings.
    fn checkpoint(dir: &Path) -> std::path::PathBuf {
        let mut history = SpeculationHistory::default();
        history.record(Verdict::SkipNonFinite);
        let position = DataPosition { epoch: 1, next_sequence: 5 };
        let trainer = TrainerState {
            step: 4,
            optimizer_step: 3,
            loss_scale: checkpoint::SavedLossScale { scale: 256.0, good_steps: 2 },
            scheduler: Scheduler { name: "linear".into(), base_lr: 5e-5, warmup_steps: 0, max_steps: 9 },
            seed: 42,
            data_position: serde_json::to_value(SavedPosition { position, sequences: SEQUENCES }).unwrap(),
            speculation: serde_json::to_value(history).unwrap(),
            clip: Default::default(),
            settings: serde_json::to_value(settings(&[])).unwrap(),
        };
        let mut writer = Writer::create(&crate::disk::Dir::open(dir).unwrap(), trainer, run(), SaveRate::default()).unwrap();
        let part = [1.0; 6];
        writer.tensor(TensorSource { name: "w", shape: &[2, 3], params: &part, m: &part, v: &part }).unwrap();
        writer.finish(&[("config.json".into(), b"{}".to_vec())], None, Default::default()).unwrap().path
    }

    fn resumed(path: &Path, allowed: &[RunPart], sequences: usize, now: Run) -> (Result<Accepted>, Vec<String>) {
        let mut messages = RecordingObserver::default();
        let accepted =
            checkpoint::open(path).and_then(|loaded| accept(loaded, &settings(allowed), (&recipe(), sequences), now, &mut messages));
        (accepted, messages.0)
    }

    #[test]
    fn an_unchanged_run_resumes_silently() {
        let dir = tempfile::tempdir().unwrap();
        let (accepted, messages) = resumed(&checkpoint(dir.path()), &[], SEQUENCES, run());
        let accepted = accepted.unwrap();
        assert_eq!((accepted.position, accepted.run), (DataPosition { epoch: 1, next_sequence: 5 }, run()));
        assert_eq!(messages, [""; 0]);
    }

    #[test]
    fn a_change_is_refused_with_both_values_and_accepted_with_its_flag_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = checkpoint(dir.path());
        let cases = [
            (RunPart::Model, "/model/rope_theta", json!(7.0), "rope_theta was 10000.0 and is 7.0"),
            (RunPart::Model, "/model/norm_eps", json!(0.5), "norm_eps was 0.00001 and is 0.5"),
            (RunPart::Tokenizer, "/tokenizer", json!("x"), "tokenizer was \"bytes\" and is \"x\""),
            (RunPart::Data, "/data/sha256", json!("b"), "was \"a\" and is \"b\""),
            (RunPart::Numerics, "/numerics/loss_tile/rows", json!(4), "rows was 8 and is 4"),
            (RunPart::Numerics, "/numerics/matmul", json!("fp8"), "matmul was \"in the format of weights\" and is \"fp8\""),
            (RunPart::Numerics, "/numerics/attention", json!("cudnn"), "attention was \"plain\" and is \"cudnn\""),
        ];
        for (part, place, value, words) in cases {
            let mut now = Value::from(run());
            *now.pointer_mut(place).unwrap() = value;
            let now = now.as_object().unwrap().clone();
            let others: Vec<_> = RunPart::ALL.into_iter().filter(|other| *other != part).collect();
            for allowed in [&[][..], &others] {
                let error = resumed(&path, allowed, SEQUENCES, now.clone()).0.err().unwrap();
                let message = error.to_string();
                assert!(message.contains(words) && message.contains(&format!("--allow-changed {}", part.name())), "{message}");
                assert_eq!(error.exit_code(), 2);
            }
            let (accepted, messages) = resumed(&path, &[part], SEQUENCES, now.clone());
            assert!(messages.len() == 1 && messages[0].contains(words), "{messages:?}");
            let run = accepted.unwrap().run;
            assert!(run["changed"][0]["step"] == 4 && run["changed"][0]["part"] == part.name(), "{run:?}");
            assert_eq!(run[part.name()], now[part.name()], "from here on compared with the new one");
        }
    }

    #[test]
    fn each_setting_is_compared_by_the_table() {
        let dir = tempfile::tempdir().unwrap();
        let path = checkpoint(dir.path());
        let honest = true_manifest(&path);
        for key in KEYS {
            let (mut manifest, flag) = (honest.clone(), format!("--{}", describe::flag_name(key.name)));
            manifest["trainer"]["settings"][key.name] = json!("other");
            forge(&path, &manifest);
            let (accepted, messages) = resumed(&path, &[], SEQUENCES, run());
            let refused = accepted.err().map(|error| error.to_string());
            match key.on_resume {
                OnResume::Logged => {
                    assert!(refused.is_none() && messages.len() == 1 && messages[0].starts_with(&flag), "{flag}: {messages:?}")
                }
                OnResume::Order => assert!(refused.is_some_and(|refused| refused.starts_with(&flag)), "{flag}"),
                // Tokens are compared before, where the tokenizer is found.
                OnResume::Free | OnResume::Tokens => assert_eq!((refused, messages), (None, vec![]), "{flag}"),
            }
        }
    }

    #[test]
    fn a_checkpoint_without_packing_has_rows_of_one_stream() {
        let dir = tempfile::tempdir().unwrap();
        let path = checkpoint(dir.path());
        let mut older = true_manifest(&path);
        older["trainer"]["settings"].as_object_mut().unwrap().remove("packing").unwrap();
        forge(&path, &older);
        let saved = checkpoint::open(&path).unwrap().manifest().trainer.settings.clone();
        let settled = |packing| packing::settle(&Settings { packing, ..settings(&[]) }, Some(&saved), &mut |_| ()).unwrap();
        let resumes = |packing| {
            accept(checkpoint::open(&path).unwrap(), &settled(packing), (&recipe(), SEQUENCES), run(), &mut RecordingObserver::default())
        };
        assert!(resumes(Packing::Auto).is_ok() && resumes(Packing::Wrapped).is_ok());
        let refused = resumes(Packing::Bfd).err().unwrap().to_string();
        assert!(refused.starts_with("--packing: packing was \"wrapped\"") && refused.contains("is \"bfd\" now"), "{refused}");
    }

    #[test]
    fn another_number_of_sequences_begins_the_data_anew_if_that_is_allowed() {
        let dir = tempfile::tempdir().unwrap();
        let path = checkpoint(dir.path());
        let message = resumed(&path, &[RunPart::Model], 4, run()).0.err().unwrap().to_string();
        assert!(message.contains("9 sequences, the data has 4; use --allow-changed data"), "{message}");
        let (accepted, messages) = resumed(&path, &[RunPart::Data], 4, run());
        assert_eq!(accepted.unwrap().position, DataPosition { epoch: 1, next_sequence: 0 });
        assert!(messages[0].contains("had 9 sequences and has 4: epoch 1 restarts"), "{messages:?}");
    }

    #[test]
    fn positions_and_histories_without_sense_name_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = checkpoint(dir.path());
        let honest = true_manifest(&path);
        let cases = [
            ("/trainer/data_position/epoch", json!(u64::MAX), "data position"),
            ("/trainer/data_position/next_sequence", json!(10), "sequence 10 of 9"),
            ("/trainer/data_position/next_sequence", json!(-1), "data position"),
            ("/trainer/data_position", json!("x"), "data position"),
            ("/trainer/speculation/failures", json!(1 << 16), "speculation"),
            ("/trainer/speculation", json!([]), "speculation"),
        ];
        for (place, value, words) in cases {
            let mut manifest = honest.clone();
            *manifest.pointer_mut(place).unwrap() = value;
            forge(&path, &manifest);
            let error = resumed(&path, &RunPart::ALL, SEQUENCES, run()).0.err().unwrap_or_else(|| panic!("{place}"));
            let message = error.to_string();
            assert!(message.contains("checkpoint-4/trainer_state.json: ") && message.contains(words), "{message}");
            assert_eq!(error.exit_code(), 1);
        }
    }

    #[test]
    fn values_of_another_rule_of_clipping_name_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = checkpoint(dir.path());
        let mut manifest = true_manifest(&path);
        assert_eq!(manifest["trainer"].get("clip"), None, "a rule without memory is not saved");
        manifest["trainer"]["clip"] = json!([0.5]);
        forge(&path, &manifest);
        let message = resumed(&path, &RunPart::ALL, SEQUENCES, run()).0.err().unwrap().to_string();
        assert!(message.ends_with("checkpoint-4/trainer_state.json: clipping: 1 values, and the rule of this run keeps 0"), "{message}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// Any sealed manifest gives an error of one line, or batches.
        #[test]
        fn arbitrary_manifests_are_refused_or_resumed(place: prop::sample::Index, value in any_json(), all: bool) {
            let dir = tempfile::tempdir().unwrap();
            let path = checkpoint(dir.path());
            let mut manifest = true_manifest(&path);
            let places = places(&manifest);
            *manifest.pointer_mut(&places[place.index(places.len())]).unwrap() = value;
            forge(&path, &manifest);
            let allowed = if all { &RunPart::ALL[..] } else { &[] };
            match resumed(&path, allowed, SEQUENCES, run()).0 {
                Err(e) => prop_assert!(!e.to_string().contains('\n'), "{e}"),
                Ok(accepted) => {
                    let trainer = &accepted.loaded.manifest().trainer;
                    let mut scale = LossScale::new(crate::dtype::Dtype::Float16);
                    scale.restore(trainer.loss_scale.scale, trainer.loss_scale.good_steps);
                    scale.update(false);
                    prop_assert!(trainer.optimizer_step < u64::MAX && scale.inverse() > 0.0);
                    let dataset = counting(SEQUENCES * 2 + 1, 2).unwrap();
                    let mut loader = Loader::new(dataset, 7, 1, true, accepted.position).unwrap();
                    let mut memory = [0; arrays(false) * 14];
                    (0..3).for_each(|_| loader.fill(&mut Batch::new(&mut memory, 2, false)).unwrap());
                }
            }
        }
    }
}
