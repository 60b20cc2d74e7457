//! The expected memory, traffic and step time of a plan.

use super::peer_traffic::PeerTraffic;
use super::predict::Prediction;
use crate::device::footprint::MemoryClass;
use crate::model::activations::LossTile;

/// The expected memory, traffic and step time of a plan.
#[derive(Clone, Debug)]
pub struct Forecast {
    /// All memory classes.
    pub memory: Vec<MemoryClass>,
    /// Additional host memory for loading and saving, which steps do not need.
    pub transient_bytes: u64,
    /// Bytes that ranks exchange in a step.
    pub peer_traffic: PeerTraffic,
    /// The predicted step time, if rates are known.
    pub predicted: Option<Prediction>,
    /// The simulated step time, if a simulation chose the plan.
    pub simulated_step_ms: Option<f64>,
    /// The tile of the loss with unlimited memory: a function of the model and the micro-batch.
    pub usual_tile: LossTile,
}
