//! The part of a request that search and replanning vary.

use super::choices::{ActivationsChoice, CastSide, LayerOrder, MastersChoice, ResidentBuckets, Technique, WeightsChoice};
use super::cut::StepSplit;
use crate::describe::{flag, value};
use serde_json::Value;

/// The choices that a search may change where they are open: the split of a step, and the placement with its queues. No bit of a result
/// depends on them, besides the split.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// Split of a step into micro-batches.
    pub split: StepSplit,
    /// Activations that layers keep for their backward pass.
    pub activations: ActivationsChoice,
    /// Placement of layer weights.
    pub weights: WeightsChoice,
    /// Order in which a step goes through layers and micro-batches.
    pub layer_order: LayerOrder,
    /// Tail buckets with their optimizer states on the device.
    pub resident_buckets: ResidentBuckets,
    /// Storage of these buckets' master weights.
    pub masters: MastersChoice,
    /// Size of a bucket in MiB of working weights; `None`: the plan decides.
    pub bucket_mib: Option<f64>,
    /// Side that converts gradients.
    pub cast: CastSide,
    /// Compute threads, and as many optimizer threads; `None`: one for each core.
    pub threads: Option<usize>,
    /// Reusable host slots of each kind; `None`: the usual number.
    pub slots: Option<usize>,
    /// Techniques that are turned off.
    pub without: Vec<Technique>,
}

impl Wanted {
    /// Flags that turn the choices of `from` into these, the most important first.
    pub(crate) fn flags(&self, from: &Self) -> Vec<String> {
        let pairs = self.values().into_iter().zip(from.values());
        pairs.filter(|(now, from)| now.1 != from.1).map(|((name, value), _)| flag(name, &value)).collect()
    }

    /// All choices, the most important first.
    fn values(&self) -> [(&'static str, Value); 12] {
        let Self { split, activations, weights, layer_order, resident_buckets, masters, bucket_mib, cast, threads, slots, without } = self;
        let StepSplit { micro_batch, accumulation } = split;
        [
            ("per_device_train_batch_size", value(micro_batch)),
            ("gradient_accumulation_steps", value(accumulation)),
            ("activations", value(activations)),
            ("weights", value(weights)),
            ("layer_order", value(layer_order)),
            ("resident_buckets", value(resident_buckets)),
            ("masters", value(masters)),
            ("bucket_mib", value(bucket_mib)),
            ("cast", value(cast)),
            ("threads", value(threads)),
            ("slots", value(slots)),
            ("without", value(without)),
        ]
    }
}
