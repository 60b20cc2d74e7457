//! The walk over all fields of a recipe: each with its name, its value in words, and its place in the record of checkpoints.
//!
//! Every struct is destructured without `..`, so the compiler reports a new field here.

use super::part::RunPart;
use super::record::{
    ATTENTION, ATTENTION_BLOCK, CPU_SUM_BLOCK, EXPERT_PRODUCTS, GRADIENT_GROUP, HEAD_ROWS, LOGITS_DTYPE, LONG_SUMS, LOSS_TILE, MATMUL,
    MLP_TILE, OBJECTIVE, PLAIN_MATMUL, Record, SEQUENCE_RANKS, STEP, TOKEN_LOGPS,
};
use super::{Numerics, Recipe, RowOrder, Schedule, StepShape};
use crate::data::checksum::hex;
use crate::device::{Attention, DeviceKind, ExpertProducts, LongSums, PRODUCT_BLOCK};
use crate::model::fp8;
use crate::model::head_rows::HeadRows;
use crate::model::shape::ModelShape;
use crate::objective::Objective;
use crate::optim::moments::Moments;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use std::fmt::Display;

/// A field of a recipe.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RecipeField {
    /// Name in messages.
    name: &'static str,
    /// Value in words.
    value: String,
    /// Title and text of the fact by which processes compare the field. Several fields may be one fact.
    fact: (&'static str, String),
    /// The field's place and value in the record of checkpoints, if it has one.
    pub(super) record: Option<Record>,
}

/// A field that differs between two recipes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Difference {
    pub(crate) name: &'static str,
    pub(crate) was: String,
    pub(crate) is: String,
}

impl Recipe {
    /// The fields in which `is` differs from this recipe.
    pub(crate) fn differences(&self, is: &Self) -> Vec<Difference> {
        let pairs = self.fields().into_iter().zip(is.fields()).filter(|(was, is)| was.value != is.value);
        pairs.map(|(was, is)| Difference { name: was.name, was: was.value, is: is.value }).collect()
    }

    /// Titles and texts of all fields, for comparison between processes.
    pub(crate) fn facts(&self) -> Vec<(&'static str, String)> {
        let mut facts: Vec<_> = self.fields().into_iter().map(|field| field.fact).collect();
        facts.dedup_by_key(|(title, _)| *title);
        facts
    }

    /// All fields.
    pub(super) fn fields(&self) -> Vec<RecipeField> {
        let Self { model, rows, step, numerics, objective, optimizer, schedule, max_grad_norm, router_aux_loss_coef, inject } = self;
        let optimizer = RecipeField::new("AdamW", format!("{optimizer:?}"));
        let [norm, router] =
            [("gradient norm", max_grad_norm), ("router loss", router_aux_loss_coef)].map(|(name, x)| RecipeField::new(name, x));
        let parts = [vec![of_model(model)], of_numerics(numerics), of_step(step), of_rows(rows), of_schedule(schedule)];
        let injected = RecipeField::new("injected values", format!("{inject:?}"));
        let loss = objective.map_or_else(|| "of tokens".into(), |loss| loss.to_string());
        let loss = RecipeField::new("loss", loss).numeric(OBJECTIVE, json!(objective), Some(Value::Null));
        parts.into_iter().flatten().chain([loss, optimizer, norm, router, injected]).chain(of_logps(objective.as_ref())).collect()
    }
}

impl RecipeField {
    fn new(name: &'static str, value: impl Display) -> Self {
        let value = value.to_string();
        Self { name, fact: (name, value.clone()), value, record: None }
    }

    /// This field as a part of the fact `title`, which has `text`.
    fn within(self, (title, text): (&'static str, &String)) -> Self {
        Self { fact: (title, text.clone()), ..self }
    }

    /// This field with its `value` under `key` of the checkpoint's part `part`, and the value `before` of checkpoints without the key.
    fn recorded(self, part: &'static str, key: &'static str, value: Value, before: Option<Value>) -> Self {
        Self { record: Some(Record { part, key: Some(key), value, before }), ..self }
    }

    /// Like [`Self::recorded`], among the numerics.
    fn numeric(self, key: &'static str, value: Value, before: Option<Value>) -> Self {
        self.recorded(RunPart::Numerics.name(), key, value, before)
    }
}

/// The format of log-probabilities of a loss of completions with a reference. Earlier versions did not round them to float32.
fn of_logps(objective: Option<&Objective>) -> Option<RecipeField> {
    let is_rounded = matches!(objective, Some(Objective::Policy(loss)) if loss.has_reference());
    let field = |format| RecipeField::new("log-probabilities of completions", format);
    is_rounded.then(|| field("float32").numeric(TOKEN_LOGPS, json!("float32"), Some(json!("float64"))))
}

/// The model by the checksum of its shape. Checkpoints record its arithmetic with the data and the tokenizer.
fn of_model(model: &ModelShape) -> RecipeField {
    RecipeField::new("model", &hex(Sha256::digest(format!("{model:?}")))[..16])
}

fn of_numerics(numerics: &Numerics) -> Vec<RecipeField> {
    let &Numerics {
        dtype,
        logits_dtype,
        fp8,
        moments,
        attention,
        experts,
        long_sums,
        head_rows,
        loss_tile,
        attention_block,
        mlp_tile,
        device,
        sum_block,
        inverse_rollback,
    } = numerics;
    let formats = format!("{dtype}, moments in {moments}");
    let products = format!("products of {PRODUCT_BLOCK} queries");
    let by = match attention {
        Attention::Plain => "plain",
        Attention::Cudnn { deterministic: true } => "cudnn",
        Attention::Cudnn { deterministic: false } => "cudnn, nondeterministic",
        Attention::Products => &products,
        Attention::CudnnOrProducts { deterministic: true } => &format!("cudnn or {products}"),
        Attention::CudnnOrProducts { deterministic: false } => &format!("cudnn or {products}, nondeterministic"),
    };
    let matmul = if fp8 { fp8::RECIPE } else { PLAIN_MATMUL };
    let of_moments = Record { part: RunPart::Moments.name(), key: None, value: json!(moments), before: Some(json!(Moments::Float32)) };
    vec![
        RecipeField::new("loss tile", loss_tile.to_string()).numeric(LOSS_TILE, json!(loss_tile), None),
        RecipeField::new("attention", format!("{attention:?}")).numeric(ATTENTION, json!(by), None),
        RecipeField::new("products of experts", format!("{experts:?}")).numeric(
            EXPERT_PRODUCTS,
            json!(experts),
            Some(json!(ExpertProducts::Own)),
        ),
        RecipeField::new("long sums of products", format!("{long_sums:?}")).numeric(
            LONG_SUMS,
            json!(long_sums),
            Some(json!(LongSums::Library)),
        ),
        RecipeField::new("rows of the head", format!("{head_rows:?}")).numeric(HEAD_ROWS, json!(head_rows), Some(json!(HeadRows::All))),
        RecipeField::new("format of logits", logits_dtype).numeric(LOGITS_DTYPE, json!(logits_dtype), Some(json!(dtype))),
        // Queries and keys; blocks that had all keys were a number.
        RecipeField::new("block of attention", in_words(attention_block)).numeric(
            ATTENTION_BLOCK,
            json!(attention_block.map(|block| [block; 2])),
            Some(Value::Null),
        ),
        RecipeField::new("tile of the MLP", in_words(mlp_tile)).numeric(MLP_TILE, json!(mlp_tile), Some(Value::Null)),
        RecipeField::new("device", format!("{device:?}")).numeric("computed_on", json!(recorded_kind(device)), None),
        RecipeField::new("block of sums", sum_block.map_or_else(|| "the GPU's".into(), |terms| terms.to_string())).numeric(
            CPU_SUM_BLOCK,
            json!(sum_block),
            Some(Value::Null),
        ),
        RecipeField::new("matrix products", matmul).numeric(MATMUL, json!(matmul), Some(json!(PLAIN_MATMUL))),
        RecipeField::new("format of weights", dtype).within(("formats", &formats)),
        RecipeField { record: Some(of_moments), ..RecipeField::new("format of moments", moments).within(("formats", &formats)) },
        RecipeField::new("inverse rollback", inverse_rollback),
    ]
}

fn recorded_kind(device: DeviceKind) -> &'static str {
    match device {
        DeviceKind::Cpu => "cpu",
        DeviceKind::Gpu => "gpu",
    }
}

fn of_step(step: &StepShape) -> Vec<RecipeField> {
    let &StepShape { micro_batch, seq_length, micro_batches, shares, group, sequence_ranks } = step;
    let (batch, cut) =
        (format!("{micro_batch} x {seq_length}"), format!("{shares} of {micro_batches} micro-batches, in groups of {group}"));
    let (batch, cut) = (("micro-batch", &batch), ("gradient shares", &cut));
    vec![
        RecipeField::new("sequence_ranks", sequence_ranks).numeric(SEQUENCE_RANKS, json!(sequence_ranks), Some(json!(1))),
        RecipeField::new("gradient_group", group).within(cut).numeric(GRADIENT_GROUP, json!(group), Some(json!(1))),
        RecipeField::new("micro-batches", micro_batches).within(cut).recorded(STEP, "micro_batches", json!(micro_batches), None),
        RecipeField::new("gradient_shares", shares).within(cut).recorded(STEP, "gradient_shares", json!(shares), None),
        RecipeField::new("sequences of a micro-batch", micro_batch).within(batch),
        RecipeField::new("tokens of a sequence", seq_length).within(batch),
    ]
}

fn of_rows(rows: &RowOrder) -> Vec<RecipeField> {
    let &RowOrder { packing, overlong, pair_length, held_out, shuffled, seed } = rows;
    vec![
        RecipeField::new("packing", format!("{packing:?}")),
        RecipeField::new("long documents", format!("{overlong:?}")),
        RecipeField::new("length of answers", pair_length.map_or_else(|| "that of rows".into(), |tokens| tokens.to_string())),
        RecipeField::new("documents held out", held_out.map_or_else(|| "none".into(), |split| split.to_string())),
        RecipeField::new("shuffled rows", shuffled),
        RecipeField::new("seed", seed),
    ]
}

fn of_schedule(schedule: &Schedule) -> Vec<RecipeField> {
    let &Schedule { length, scheduler, warmup_steps, warmup_ratio } = schedule;
    vec![
        RecipeField::new("length of training", format!("{length:?}")),
        RecipeField::new("learning rate's schedule", format!("{scheduler:?}")),
        RecipeField::new("warm-up", format!("{warmup_steps} steps")),
        RecipeField::new("fraction of warm-up", warmup_ratio),
    ]
}

/// A block or tile of `size`, where there is one.
fn in_words(size: Option<usize>) -> String {
    size.map_or_else(|| "one piece".into(), |size| size.to_string())
}
