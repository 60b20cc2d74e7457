//! Which part of the flat order leaves early: rows of a tied embedding have their gradient when the output matrix has it, but for those that
//! the batch uses.

use super::budget::Workload;
use super::rules::Policy;
use crate::bucket::layout::BucketLayout;
use crate::config::options::EarlyRows;
use crate::data::batch::distinct;
use crate::error::{Error, Result};
use crate::model::tensors::{Module, Role, TensorTable};
use std::ops::Range;

/// The flat range of the embedding, with what padding ends it, if buckets in it are to leave early.
///
/// # Errors
/// `Usage` when that is asked for and cannot be.
pub(super) fn early_table(asked: EarlyRows, workload: &Workload<'_>, table: &TensorTable) -> Result<Range<usize>> {
    let obstacle = obstacle(workload);
    match (asked, obstacle) {
        (EarlyRows::On, Some(obstacle)) => Err(Error::usage(format!("--early-rows on: {obstacle}"))),
        (EarlyRows::Auto, None) if !pays(workload) => Ok(0..0),
        (EarlyRows::On | EarlyRows::Auto, None) => Ok(embedding(table)),
        (EarlyRows::Off, _) | (EarlyRows::Auto, Some(_)) => Ok(0..0),
    }
}

/// Asked for, but no bucket of the plan leaves early.
///
/// # Errors
/// `Usage`, then.
pub(super) fn check_early(asked: EarlyRows, layout: &BucketLayout) -> Result<()> {
    if asked != EarlyRows::On || !layout.early().is_empty() {
        return Ok(());
    }
    Err(Error::usage(
        "--early-rows on: no bucket whose optimizer the pool runs lies in the embedding alone; use a smaller --bucket-mib, or fewer \
         --resident-buckets",
    ))
}

fn obstacle(workload: &Workload<'_>) -> Option<&'static str> {
    match workload {
        Workload { shape, .. } if !shape.tied => Some("the model's output matrix is not its embedding"),
        Workload { ranks: 2.., .. } => Some("cannot be combined with several --gpus: a gradient is whole when all have added theirs"),
        Workload { shares: 2.., .. } => Some("cannot be combined with several --gradient-shares: a gradient is whole when all are added"),
        Workload { rules, .. } if rules.policy != Policy::Deferred => {
            Some("needs --strategy superoffload with the technique stv and --rollback deferred: rows are stepped before the verdict")
        }
        _ => None,
    }
}

/// Rows of the batch are stepped twice: that is little where most rows are not of it.
fn pays(workload: &Workload<'_>) -> bool {
    2 * distinct(workload.batch * workload.seq_length, workload.shape.vocab) <= workload.shape.vocab
}

fn embedding(table: &TensorTable) -> Range<usize> {
    let Some(wte) = table.find(Module::Embed, Role::Wte) else { return 0..0 };
    let next = table.specs().get(wte.index + 1).map(|spec| spec.offset_elems);
    wte.offset_elems..next.unwrap_or(table.flat_elems())
}
