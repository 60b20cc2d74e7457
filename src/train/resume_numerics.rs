//! A resumed run keeps settings of its checkpoint: how a step is cut into micro-batches and shares, unless flags change it, and
//! the plan's decisions that change bits, unless a change is allowed. Changes of GPU, driver and libraries are only reported.

use super::identity::{Run, differences};
use super::observer::Observer;
use crate::checkpoint::Loaded;
use crate::config::checks::STEP_TOKENS_MAX;
use crate::config::settings::Settings;
use crate::describe;
use crate::device::{ExpertProducts, LongSums};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::model::activations::LossTile;
use crate::model::head_rows::HeadRows;
use crate::recipe::part::RunPart;
use crate::recipe::record::{
    ATTENTION, EXPERT_PRODUCTS, GRADIENT_GROUP, HEAD_ROWS, LOGITS_DTYPE, LONG_SUMS, LOSS_TILE, SEQUENCE_RANKS, STEP,
};
use crate::request::choices::{AttentionChoice, ExpertProductsChoice, HeadRowsChoice, LogitsDtypeChoice};
use crate::units::counted;
use serde::Deserialize;
use serde_json::Value;
use std::fmt::Display;

/// Key of the versions (besides program and plan) on which the device's bits depend.
const COMPUTED_WITH: &str = "computed_with";

/// How the steps of a checkpoint are cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
struct SavedStep {
    micro_batches: usize,
    gradient_shares: usize,
}

/// Writes `versions` of the device into the record of its run, and reports those that differ from the checkpoint's. A machine
/// gets another driver without being asked, and a run is not to end for it.
pub(super) fn record_versions(versions: Vec<(&'static str, String)>, run: &mut Run, observer: &mut dyn Observer) {
    let now: Value = versions.into_iter().map(|(name, version)| (name.to_string(), version.into())).collect::<Run>().into();
    let then = run.get(COMPUTED_WITH).unwrap_or(&Value::Null);
    let changes = if then.is_null() { Vec::new() } else { differences(COMPUTED_WITH, then, &now) };
    if !changes.is_empty() {
        observer.warn(&format!("{}: from here on results may differ from a run without the change", changes.join(", ")));
    }
    run.insert(COMPUTED_WITH.into(), now);
}

/// `settings`, completed from the checkpoint where flags are not set; differences are reported. `on_gpu`: whether the run goes
/// on there.
///
/// # Errors
/// `Format` for an invalid checkpoint; `Usage` when flags do not fit the settings kept from it.
pub(super) fn settings(settings: &Settings, loaded: &Loaded, on_gpu: bool, observer: &mut dyn Observer) -> Result<Settings> {
    let (then, sequence_ranks) = (step_shape(loaded)?, numeric(loaded, SEQUENCE_RANKS));
    let is_allowed = settings.allow_changed.contains(&RunPart::Numerics);
    expect_same_degree(settings, sequence_ranks)?;
    // A share of other parts of sequences is another thing.
    let gradient_shares = Some(then.gradient_shares).filter(|_| settings.sequence_ranks == sequence_ranks);
    if settings.gradient_accumulation_steps.is_none() && !then.micro_batches.is_multiple_of(settings.cut().groups()) {
        return Err(cannot_be_kept(settings, then, loaded));
    }
    let accumulation = settings.gradient_accumulation_steps.unwrap_or(then.micro_batches / settings.cut().groups());
    let kept = Settings {
        gradient_shares: settings.gradient_shares.or(gradient_shares),
        gradient_group: settings.gradient_group.or_else(|| Some(numeric(loaded, GRADIENT_GROUP)).filter(|group| *group > 1)),
        gradient_accumulation_steps: Some(accumulation),
        loss_tile: if is_allowed { None } else { loss_tile(loaded)? },
        long_sums: match recorded(loaded, LONG_SUMS) {
            _ if is_allowed || !on_gpu => None,
            then => Some(long_sums(then).map_err(|e| Error::format(loaded.manifest_path(), format_args!("{LONG_SUMS}: {e}")))?),
        },
        head_rows: match settings.head_rows {
            requested if is_allowed => requested,
            requested => head_rows(requested, recorded(loaded, HEAD_ROWS))
                .map_err(|e| Error::format(loaded.manifest_path(), format_args!("{HEAD_ROWS}: {e}")))?,
        },
        logits_dtype: match settings.logits_dtype {
            requested if is_allowed => requested,
            requested => logits_dtype(requested, recorded(loaded, LOGITS_DTYPE), settings.weight_dtype())
                .map_err(|e| Error::format(loaded.manifest_path(), format_args!("{LOGITS_DTYPE}: {e}")))?,
        },
        attention: match settings.attention {
            AttentionChoice::Auto if !is_allowed && on_gpu => attention(recorded(loaded, ATTENTION)),
            requested => requested,
        },
        expert_products: match settings.expert_products {
            requested if is_allowed || !on_gpu => requested,
            requested => expert_products(requested, recorded(loaded, EXPERT_PRODUCTS))
                .map_err(|e| Error::format(loaded.manifest_path(), format_args!("{EXPERT_PRODUCTS}: {e}")))?,
        },
        ..settings.clone()
    };
    kept.check_counts().map_err(|error| if has_given_steps(settings) { error } else { cannot_be_kept(settings, then, loaded) })?;
    log_changed_cut(&kept, then, observer);
    Ok(kept)
}

/// The attention of a checkpoint where `auto` may choose another one now: models with soft caps had plain kernels before there were products.
fn attention(then: Option<&Value>) -> AttentionChoice {
    match then.and_then(Value::as_str) {
        Some("plain") => AttentionChoice::Plain,
        Some(then) if then.starts_with("products") => AttentionChoice::Products,
        _ => AttentionChoice::Auto,
    }
}

/// Whether nothing of how steps are cut is the checkpoint's.
fn has_given_steps(settings: &Settings) -> bool {
    settings.gradient_accumulation_steps.is_some() && settings.gradient_shares.is_some()
}

/// Reports where steps are cut otherwise than the checkpoint's.
fn log_changed_cut(kept: &Settings, then: SavedStep, observer: &mut dyn Observer) {
    let (now, partial_sums) = (kept.micro_batches(), kept.cut().partial_sums());
    if then.micro_batches != now {
        observer.warn(&format!(
            "the checkpoint's steps have {}, and those from here on have {now}",
            counted(then.micro_batches, "micro-batch")
        ));
    }
    if then.gradient_shares != partial_sums {
        observer.warn(&describe::changed("gradient_shares", &then.gradient_shares.into(), &partial_sums.into()));
    }
}

/// The error when the checkpoint's steps cannot be cut as `settings` require, with all the flags that cut them otherwise.
fn cannot_be_kept(settings: &Settings, then: SavedStep, loaded: &Loaded) -> Error {
    let devices = settings.cut().ranks_in_words();
    let all = settings.tokens_per_step.map_or(devices.clone(), |tokens| format!("--tokens-per-step {tokens} with {devices}"));
    let partial_sums = counted(then.gradient_shares, "gradient share");
    let text = format!("{all}: the checkpoint's steps have {} in {partial_sums}", counted(then.micro_batches, "micro-batch"));
    let remedy = match cut_anew(settings, then, numeric(loaded, GRADIENT_GROUP)) {
        Some(flags) => format!("use {flags} to divide steps differently, or use fewer devices"),
        None => "use fewer devices".into(),
    };
    Error::usage(format!("{text}; {remedy}"))
}

/// Flags with which steps are cut so that the run can continue: as near to the checkpoint and to `settings` as possible.
fn cut_anew(settings: &Settings, then: SavedStep, group: usize) -> Option<String> {
    let group = settings.gradient_group.or(Some(group).filter(|group| *group > 1));
    let cut = |partial_sums: usize| {
        let open = Settings { gradient_shares: Some(partial_sums), gradient_group: group, ..settings.clone() };
        let steps = match settings.gradient_accumulation_steps {
            None if settings.tokens_per_step.is_some() => open.cut().splits(open.split()).ok()?.first()?.accumulation?,
            text => text.unwrap_or(then.micro_batches.div_ceil(settings.cut().groups())),
        };
        let cut = Settings { gradient_accumulation_steps: Some(steps), ..open };
        cut.check_counts().ok().map(|()| format!("--gradient-accumulation-steps {steps} --gradient-shares {partial_sums}"))
    };
    let ranks = settings.cut().ranks();
    settings.gradient_shares.into_iter().chain([then.gradient_shares, ranks, ranks * group.unwrap_or(1)]).find_map(cut)
}

/// Rejects another degree here, before values derived from it are compared.
fn expect_same_degree(settings: &Settings, then: usize) -> Result<()> {
    let now = settings.sequence_ranks;
    if then == now || settings.allow_changed.contains(&RunPart::Numerics) {
        return Ok(());
    }
    Err(Error::usage(format!(
        "the checkpoint was trained with {SEQUENCE_RANKS} = {then}, this run has {now}; use --sequence-ranks {then}, or --allow-changed \
            numerics"
    )))
}

/// The number `key` of the checkpoint's numerics: 1 if it is missing (older versions), 0 (which no run has) if it is invalid.
fn numeric(loaded: &Loaded, key: &str) -> usize {
    recorded(loaded, key).map_or(1, |number| number.as_u64().unwrap_or(0) as usize)
}

/// Checkpoints older than shares keep the micro-batches among their settings.
fn step_shape(loaded: &Loaded) -> Result<SavedStep> {
    let manifest = loaded.manifest();
    let micro_batches = || manifest.trainer.settings["gradient_accumulation_steps"].as_u64().unwrap_or(1) as usize;
    let shape = match manifest.run.get(STEP) {
        Some(step) => SavedStep::deserialize(step).map_err(|e| Error::format(loaded.manifest_path(), format_args!("step: {e}")))?,
        None => SavedStep { micro_batches: micro_batches(), gradient_shares: 1 },
    };
    let SavedStep { micro_batches, gradient_shares } = shape;
    let possible = 1..=STEP_TOKENS_MAX;
    let parts = micro_batches.saturating_mul(numeric(loaded, SEQUENCE_RANKS));
    if !possible.contains(&micro_batches) || gradient_shares == 0 || !parts.is_multiple_of(gradient_shares) {
        let cause = format_args!("step: {gradient_shares} gradient shares of {micro_batches} micro-batches");
        return Err(Error::format(loaded.manifest_path(), cause));
    }
    Ok(shape)
}

/// The value of `key` in the checkpoint's numerics.
fn recorded<'a>(loaded: &'a Loaded, key: &str) -> Option<&'a Value> {
    loaded.manifest().run.get(RunPart::Numerics.name()).and_then(|numerics| numerics.get(key))
}

/// Kernels of expert products: the same as `then`, unless `requested` selects others. Older checkpoints used the program's own kernels.
fn expert_products(requested: ExpertProductsChoice, then: Option<&Value>) -> serde_json::Result<ExpertProductsChoice> {
    match (requested, then) {
        (ExpertProductsChoice::Auto, Some(then)) => ExpertProducts::deserialize(then).map(ExpertProductsChoice::from),
        (ExpertProductsChoice::Auto, None) => Ok(ExpertProductsChoice::Own),
        (requested, _) => Ok(requested),
    }
}

/// Rows of the head: those of a checkpoint, `then`, unless `requested` selects others. Older checkpoints computed all rows.
fn head_rows(requested: HeadRowsChoice, then: Option<&Value>) -> serde_json::Result<HeadRowsChoice> {
    match (requested, then) {
        (HeadRowsChoice::Auto, Some(then)) => HeadRows::deserialize(then).map(HeadRowsChoice::from),
        (HeadRowsChoice::Auto, None) => Ok(HeadRowsChoice::All),
        (requested, _) => Ok(requested),
    }
}

/// The format of logits: that of a checkpoint, `then`, unless `requested` is another. Older checkpoints had logits in the format of the weights,
/// `of_weights`, and 16 bits are always those of the weights.
fn logits_dtype(requested: LogitsDtypeChoice, then: Option<&Value>, of_weights: Dtype) -> serde_json::Result<LogitsDtypeChoice> {
    Ok(match (requested, then.map(Dtype::deserialize).transpose()?) {
        (LogitsDtypeChoice::Auto, Some(Dtype::Float32)) => LogitsDtypeChoice::Float32,
        (LogitsDtypeChoice::Auto, _) => of_weights.into(),
        (requested, _) => requested,
    })
}

/// The way of long sums of a checkpoint. Older checkpoints left them to the library.
fn long_sums(then: Option<&Value>) -> serde_json::Result<LongSums> {
    then.map_or(Ok(LongSums::Library), LongSums::deserialize)
}

fn loss_tile(loaded: &Loaded) -> Result<Option<LossTile>> {
    let Some(tile) = recorded(loaded, LOSS_TILE) else { return Ok(None) };
    let wrong = |cause: &dyn Display| Error::format(loaded.manifest_path(), format_args!("{LOSS_TILE}: {cause}"));
    let tile = LossTile::deserialize(tile).map_err(|e| wrong(&e))?;
    let LossTile { rows, vocab, tail } = tile;
    if rows == 0 || vocab <= tail {
        Err(wrong(&format_args!("{rows} rows of {vocab}, of which {tail} are a tail")))
    } else {
        Ok(Some(tile))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::tests::RecordingObserver;
    use serde_json::json;

    #[test]
    fn a_run_resumes_with_its_expert_products_unless_others_are_requested() {
        let requested = |requested, then: Option<Value>| expert_products(requested, then.as_ref());
        let (auto, own, cublaslt) = (ExpertProductsChoice::Auto, ExpertProductsChoice::Own, ExpertProductsChoice::Cublaslt);
        assert_eq!(requested(auto, Some(json!(ExpertProducts::Cublaslt))).unwrap(), cublaslt);
        assert_eq!(requested(auto, Some(json!(ExpertProducts::Own))).unwrap(), own);
        assert_eq!(requested(auto, None).unwrap(), own, "a checkpoint of before");
        assert_eq!(requested(own, Some(json!(ExpertProducts::Cublaslt))).unwrap(), own, "which is compared, and refused, later");
        assert!(requested(auto, Some(json!("somebody"))).unwrap_err().to_string().contains("unknown variant `somebody`"));
    }

    #[test]
    fn a_run_resumes_with_its_attention() {
        let then = ["plain", "products of 1024 queries", "products", "cudnn", "cudnn or products of 1024 queries"];
        let kept = then.map(|then| attention(Some(&json!(then))));
        let (products, auto) = (AttentionChoice::Products, AttentionChoice::Auto);
        assert_eq!((kept, attention(None)), ([AttentionChoice::Plain, products, products, auto, auto], auto));
    }

    #[test]
    fn a_run_resumes_with_the_rows_of_its_head_unless_others_are_requested() {
        let (auto, all, trained) = (HeadRowsChoice::Auto, HeadRowsChoice::All, HeadRowsChoice::Trained);
        assert_eq!(head_rows(auto, Some(&json!("trained"))).unwrap(), trained);
        assert_eq!(head_rows(auto, None).unwrap(), all, "a checkpoint of before");
        assert_eq!(head_rows(all, Some(&json!("trained"))).unwrap(), all, "which is compared, and refused, later");
        assert!(head_rows(auto, Some(&json!("some"))).unwrap_err().to_string().contains("unknown variant `some`"));
    }

    #[test]
    fn a_run_resumes_with_the_format_of_its_logits_unless_another_is_requested() {
        let of = |requested, then: Option<Value>| logits_dtype(requested, then.as_ref(), Dtype::Bfloat16);
        let (auto, bfloat16, float32) = (LogitsDtypeChoice::Auto, LogitsDtypeChoice::Bfloat16, LogitsDtypeChoice::Float32);
        assert_eq!(of(auto, Some(json!("float32"))).unwrap(), float32);
        assert_eq!(of(auto, Some(json!("bfloat16"))).unwrap(), bfloat16);
        assert_eq!(of(auto, Some(json!("float16"))).unwrap(), bfloat16, "the format of the weights, which is compared later");
        assert_eq!(of(auto, None).unwrap(), bfloat16, "a checkpoint of before");
        assert_eq!(logits_dtype(auto, None, Dtype::Float32).unwrap(), float32);
        assert_eq!(of(bfloat16, Some(json!("float32"))).unwrap(), bfloat16, "which is compared, and refused, later");
        assert!(of(auto, Some(json!("some"))).unwrap_err().to_string().contains("unknown variant `some`"));
    }

    #[test]
    fn a_run_keeps_the_way_of_its_long_sums() {
        assert_eq!(long_sums(Some(&json!("slices"))).unwrap(), LongSums::Slices);
        assert_eq!(long_sums(Some(&json!("library"))).unwrap(), LongSums::Library);
        assert_eq!(long_sums(None).unwrap(), LongSums::Library, "a checkpoint of before");
        assert!(long_sums(Some(&json!(2))).is_err());
    }

    #[test]
    fn another_driver_is_logged_and_recorded_and_an_unchanged_one_is_not() {
        let (mut run, mut messages) = (Run::new(), RecordingObserver::default());
        let on = |driver: &str, cudnn: Option<&str>| {
            let cudnn = cudnn.map(|version| ("cuDNN", version.to_string()));
            [("GPU", "NVIDIA H200".to_string()), ("driver", driver.to_string())].into_iter().chain(cudnn).collect::<Vec<_>>()
        };
        // An older checkpoint has no versions; plain attention needs no cuDNN.
        for versions in [on("580.65", None), on("580.65", Some("91600")), on("580.82", Some("91700")), on("580.82", None), Vec::new()] {
            record_versions(versions, &mut run, &mut messages);
        }
        let message = "driver was \"580.65\" and is \"580.82\", cuDNN was \"91600\" and is \"91700\": from here on results may differ";
        assert!(messages.0.len() == 1 && messages.0[0].starts_with(message), "{:?}", messages.0);
        assert_eq!(run[COMPUTED_WITH], json!({}));
    }
}
