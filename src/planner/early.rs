//! The part of the flat order that leaves early. For a tied embedding, the output matrix's gradient completes the gradient of every row,
//! except the rows that the batch uses.

use super::budget::Workload;
use super::rules::Policy;
use super::site::Site;
use crate::bucket::layout::BucketLayout;
use crate::data::rows::batch::distinct;
use crate::error::{Error, Result};
use crate::model::tensors::{Module, Role, TensorTable};
use crate::request::choices::EarlyRows;
use std::ops::Range;

/// The padded flat range of the embedding, if its buckets leave early; else an empty range.
///
/// # Errors
/// `Usage` if early rows are requested and impossible.
pub(super) fn early_table(requested: EarlyRows, workload: &Workload<'_>, table: &TensorTable) -> Result<Range<usize>> {
    let obstacle = obstacle(workload);
    match (requested, obstacle) {
        (EarlyRows::On, Some(obstacle)) => Err(Error::usage(format!("--early-rows on: {obstacle}"))),
        (EarlyRows::Auto, None) if !pays(workload) => Ok(0..0),
        (EarlyRows::On | EarlyRows::Auto, None) => Ok(embedding(table)),
        (EarlyRows::Off, _) | (EarlyRows::Auto, Some(_)) => Ok(0..0),
    }
}

/// Checks that a bucket leaves early if that is requested.
///
/// # Errors
/// `Usage` if early rows are requested but no bucket of the plan leaves early.
pub(super) fn check_early(requested: EarlyRows, layout: &BucketLayout) -> Result<()> {
    if requested != EarlyRows::On || !layout.early().is_empty() {
        return Ok(());
    }
    Err(Error::usage(
        "--early-rows on: no bucket with its optimizer on the CPU lies wholly in the embedding; use a smaller --bucket-mib, or fewer \
         --resident-buckets",
    ))
}

fn obstacle(workload: &Workload<'_>) -> Option<&'static str> {
    match workload {
        Workload { recipe, .. } if !recipe.model.tied => Some("the model's output matrix is not its embedding"),
        Workload { recipe, .. } if !recipe.model.trains_output() => Some("the embedding is frozen"),
        Workload { site: Site { ranks: 2.., .. }, .. } => {
            Some("cannot be combined with several --gpus: a gradient is complete only after all GPUs have added their parts")
        }
        Workload { segments, .. } if !segments.is_whole() => {
            Some("cannot be combined with --layer-order segments: the output matrix's gradient is computed with the first segment's")
        }
        Workload { recipe, .. } if recipe.step.shares > 1 => {
            Some("cannot be combined with several --gradient-shares: a gradient is complete only after all shares are added")
        }
        Workload { protocol, .. } if protocol.rules.policy != Policy::Deferred => {
            Some("needs --strategy superoffload with the technique stv and --rollback deferred: rows are stepped before the verdict")
        }
        _ => None,
    }
}

/// Whether early rows save time. Rows of the batch are stepped twice, which is cheap if most rows are not in the batch.
fn pays(workload: &Workload<'_>) -> bool {
    2 * distinct(workload.recipe.step.micro_batch * workload.recipe.step.seq_length, workload.shape().vocab) <= workload.shape().vocab
}

fn embedding(table: &TensorTable) -> Range<usize> {
    let Some(wte) = table.find(Module::Embed, Role::Wte) else { return 0..0 };
    let next = table.specs().iter().find(|spec| spec.offset_elems > wte.offset_elems).map(|spec| spec.offset_elems);
    wte.offset_elems..next.unwrap_or(table.flat_elems())
}
