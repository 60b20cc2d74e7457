//! What all cases share: the device, the host's memory and threads, sizes, limits; and the line that each leaves.

use crate::limits::{Limit, Limits};
use microbench::facts::{Facts, join};
use serde_json::{Value, json};
use superoffload::internals::device::Kernels;
use superoffload::internals::hardware::Topology;
use superoffload::internals::host::{HostMemory, PinnedSlice};
use superoffload::internals::memory::Addressing;
use superoffload::internals::probe::{Samples, States, Timer, kernels::Small};
use superoffload::{Error, Result};

/// How large and how long.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bytes of the largest copy, and of the largest tensor in fp32.
    pub max_bytes: usize,
    /// Seconds of a case.
    pub seconds: f64,
    /// Parameters that the pipeline steps.
    pub pipeline_params: usize,
    /// Rows of the product that keeps the device busy.
    pub product: usize,
    /// Models are so many times as small.
    pub shrink: usize,
}

impl Sizes {
    /// Those of a run, or small ones; what was asked for wins.
    pub fn new(is_quick: bool, max_bytes: Option<usize>, seconds: Option<f64>) -> Self {
        let (bytes, time_s, pipeline_params, product, shrink) =
            if is_quick { (1 << 20, 0.002, 1 << 18, 128, 64) } else { (1 << 30, 0.2, 1 << 27, 4096, 1) };
        let (max_bytes, seconds) = (max_bytes.unwrap_or(bytes).max(SMALLEST_BYTES), seconds.unwrap_or(time_s));
        Self { max_bytes, seconds, pipeline_params, product, shrink }
    }

    /// `first`, and four times as many again and again, up to the largest.
    pub fn by_four(&self, first: usize) -> impl Iterator<Item = usize> + use<> {
        let max = self.max_bytes;
        std::iter::successors(Some(first.min(max)), |size| Some(4 * size)).take_while(move |&size| size <= max)
    }
}

/// Less is no copy worth a name.
const SMALLEST_BYTES: usize = 64 << 10;

/// A device, and all that it is measured with.
pub struct DeviceBench<'a, D> {
    /// The device and its clock.
    pub timer: Timer<'a, D>,
    /// Where host memory comes from; outlives the device.
    pub memory: &'a mut HostMemory,
    /// The machine.
    pub topology: &'a Topology,
    /// The optimizer's state for loads.
    pub states: &'a States,
    /// What a device with memory of its own sees of the host's.
    pub addressing: Option<Addressing>,
    /// How large and how long.
    pub sizes: Sizes,
    /// What the machine could do at best.
    pub limits: Limits,
    /// Launches.
    pub small: Small,
    /// The same on every line.
    pub facts: Facts,
}

impl<D: Kernels> DeviceBench<'_, D> {
    /// Host memory that copies reach directly.
    ///
    /// # Errors
    /// `Resource` when there is no such memory.
    pub fn registered(&mut self, bytes: usize) -> Result<PinnedSlice> {
        let memory = self.memory.alloc("device facts", bytes)?;
        self.timer.dev.pin(memory)?;
        Ok(memory)
    }

    /// Prints the line of a case whose data were right.
    ///
    /// # Errors
    /// `Resource` naming the case when they were not.
    pub fn line(&self, case: &str, is_right: bool, fields: Value) -> Result<()> {
        if !is_right {
            return Err(Error::resource(format!("verify {case} {fields}"), "the data are not what they should be"));
        }
        let line = self.facts.line(join(json!({ "case": case, "verified": true, "device": self.timer.dev.describe() }), fields));
        println!("{line}");
        Ok(())
    }
}

/// A rate and the limit beside it.
pub fn rate(rates: &Samples, limit: &Limit) -> Value {
    let (value, limit_value) = (rates.median() * 1e-9, limit.bytes_per_s * 1e-9);
    json!({ "gb_per_s": value, "spread": rates.spread(), "limit_gb_per_s": limit_value, "limit": limit.what, "share_of_limit": value / limit_value })
}
