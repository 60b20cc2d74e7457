//! The recipe's part of a checkpoint's entry `run`: which fields it has, under which keys, and the values of older checkpoints without
//! them.

use super::Recipe;
use serde_json::{Map, Value};

/// Entry of `run` with the cut of steps.
pub(crate) const STEP: &str = "step";
/// Among the numerics, the key of the loss's tile.
pub(crate) const LOSS_TILE: &str = "loss_tile";
/// Key of the format of layers' matrix products.
pub(crate) const MATMUL: &str = "matmul";
/// Value of [`MATMUL`] for products in the format of weights.
pub(crate) const PLAIN_MATMUL: &str = "in the format of weights";
/// Key of the implementation of the matrix products of experts.
pub(crate) const EXPERT_PRODUCTS: &str = "expert_products";
/// Key of the way in which long sums of products are computed.
pub(crate) const LONG_SUMS: &str = "long_sums";
/// Key of the rows that the head computes.
pub(crate) const HEAD_ROWS: &str = "head_rows";
/// Key of the format of logits.
pub(crate) const LOGITS_DTYPE: &str = "logits_dtype";
/// Key of the loss of pairs, absent for the loss of tokens.
pub(crate) const OBJECTIVE: &str = "pair_loss";
/// Key of the format in which a loss of completions with a reference computes log-probabilities.
pub(crate) const TOKEN_LOGPS: &str = "token_logps";
/// Key of the implementation of attention.
pub(crate) const ATTENTION: &str = "attention";
/// Key of the block of attention's backward pass; null if it runs in one piece.
pub(crate) const ATTENTION_BLOCK: &str = "attention_block";
/// Key of the tokens of a tile of the MLP; null if it runs in one piece.
pub(crate) const MLP_TILE: &str = "mlp_tile";
/// Key of the terms of a block of long sums on the CPU; null on a GPU, and for sums in one chain.
pub(crate) const CPU_SUM_BLOCK: &str = "cpu_sum_block";
/// Key of the number of ranks that share each sequence.
pub(crate) const SEQUENCE_RANKS: &str = "sequence_ranks";
/// Key of the number of shares in a group with a rounded sum.
pub(crate) const GRADIENT_GROUP: &str = "gradient_group";

/// A field's place and value in a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Record {
    /// The entry of `run`.
    pub(super) part: &'static str,
    /// The key within the entry; `None` if the field is the whole entry.
    pub(super) key: Option<&'static str>,
    pub(super) value: Value,
    /// The value of checkpoints from before the field existed; `None` if all checkpoints have it.
    pub(super) before: Option<Value>,
}

impl Recipe {
    /// Writes the recorded fields into `run`.
    pub(crate) fn record(&self, run: &mut Map<String, Value>) {
        for Record { part, key, value, .. } in self.records() {
            match key {
                None => drop(run.insert(part.into(), value)),
                Some(key) => run.entry(part).or_insert_with(|| Map::new().into())[key] = value,
            }
        }
    }

    /// `then`, the record of a checkpoint, with the values of fields that were added to the recipe later. An entry that `then` lacks stays
    /// missing, unless the field is the whole entry.
    pub(crate) fn complete(&self, mut then: Map<String, Value>) -> Map<String, Value> {
        for Record { part, key, before, .. } in self.records() {
            let Some(before) = before else { continue };
            match key {
                None => drop(then.entry(part).or_insert(before)),
                Some(key) => {
                    if let Some(entry) = then.get_mut(part).and_then(Value::as_object_mut) {
                        entry.entry(key).or_insert(before);
                    }
                }
            }
        }
        then
    }

    fn records(&self) -> impl Iterator<Item = Record> {
        self.fields().into_iter().filter_map(|field| field.record)
    }
}
