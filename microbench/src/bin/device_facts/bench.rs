//! Common parts of all cases: the device, the host's memory and threads, sizes, physical limits, and the output line of a case.

use crate::limits::{Limit, Limits};
use microbench::facts::{Facts, join};
use serde_json::{Value, json};
use superoffload::internals::device::Kernels;
use superoffload::internals::hardware::Topology;
use superoffload::internals::host::{HostMemory, PinnedSlice};
use superoffload::internals::memory::Addressing;
use superoffload::internals::probe::{Samples, States, Timer, kernels::SmallKernels};
use superoffload::{Error, Result};

/// Sizes and durations of the cases.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    /// Bytes of the largest copy, and of the largest tensor in fp32.
    pub max_bytes: usize,
    /// Time for each case.
    pub seconds: f64,
    /// Parameters that the pipeline updates.
    pub pipeline_params: usize,
    /// Rows of the matrix product that keeps the device busy.
    pub product: usize,
    /// Divisor of the dimensions of models.
    pub shrink: usize,
}

impl Sizes {
    /// Sizes of a full run, or small sizes if `is_quick`. The arguments override both.
    pub fn new(is_quick: bool, max_bytes: Option<usize>, seconds: Option<f64>) -> Self {
        let (bytes, time_s, pipeline_params, product, shrink) =
            if is_quick { (1 << 20, 0.002, 1 << 18, 128, 64) } else { (1 << 30, 0.2, 1 << 27, 4096, 1) };
        let (max_bytes, seconds) = (max_bytes.unwrap_or(bytes).max(SMALLEST_BYTES), seconds.unwrap_or(time_s));
        Self { max_bytes, seconds, pipeline_params, product, shrink }
    }

    /// Sizes from `first` to the largest copy, each four times as large as the previous one.
    pub fn by_four(&self, first: usize) -> impl Iterator<Item = usize> + use<> {
        let max = self.max_bytes;
        std::iter::successors(Some(first.min(max)), |size| Some(4 * size)).take_while(move |&size| size <= max)
    }
}

/// The smallest allowed value of `max_bytes`.
const SMALLEST_BYTES: usize = 64 << 10;

/// A device and everything that measurements on it need.
pub struct DeviceBench<'a, D> {
    /// The device and its clock.
    pub timer: Timer<'a, D>,
    /// Allocator of host memory; outlives the device.
    pub memory: &'a mut HostMemory,
    /// The machine.
    pub topology: &'a Topology,
    /// The optimizer's state for CPU loads.
    pub states: &'a States,
    /// Access of a device with its own memory to the host's memory.
    pub addressing: Option<Addressing>,
    /// Sizes and durations of the cases.
    pub sizes: Sizes,
    /// Physical limits of the machine.
    pub limits: Limits,
    /// Measured launch times.
    pub small: SmallKernels,
    /// The facts that every output line contains.
    pub facts: Facts,
}

impl<D: Kernels> DeviceBench<'_, D> {
    /// Allocates host memory and registers it with the device, for direct copies.
    ///
    /// # Errors
    /// `Resource` if there is not enough memory.
    pub fn registered(&mut self, bytes: usize) -> Result<PinnedSlice> {
        let memory = self.memory.alloc("device facts", bytes)?;
        self.timer.dev.pin(memory)?;
        Ok(memory)
    }

    /// Prints the line of a case if its data were right.
    ///
    /// # Errors
    /// `Resource` that names the case if the data were wrong.
    pub fn line(&self, case: &str, is_right: bool, fields: Value) -> Result<()> {
        if !is_right {
            return Err(Error::resource(format!("verify {case} {fields}"), "the data are not what they should be"));
        }
        let line = self.facts.line(join(json!({ "case": case, "verified": true, "device": self.timer.dev.describe() }), fields));
        println!("{line}");
        Ok(())
    }
}

/// JSON fields for a rate and its limit.
pub fn rate(rates: &Samples, limit: &Limit) -> Value {
    let (value, limit_value) = (rates.median() * 1e-9, limit.bytes_per_s * 1e-9);
    json!({ "gb_per_s": value, "spread": rates.spread(), "limit_gb_per_s": limit_value, "limit": limit.what, "share_of_limit": value / limit_value })
}
