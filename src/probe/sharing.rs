//! Rates of products and of the optimizer while both run on the same cores, relative to their rates alone.

use super::product::{Product, SMALLEST};
use super::samples::Samples;
use super::states::States;
use super::timer::Timer;
use super::work_done::WorkDone;
use crate::device::{EventId, Kernels, Stream};
use crate::engine::pool::Pool;
use crate::engine::step_job::StepJob;
use crate::error::Result;
use crate::hardware::sourced::Number;
use crate::host::doorbell::Doorbell;
use crate::host::pool::Job;
use std::sync::Arc;

/// Number of products enqueued at once: enough to hide the driver's work, and few enough to end soon.
const PRODUCTS: usize = 8;
/// Number of turns of each load alone and of both, so that other load on a shared machine affects all of them.
const TURNS: usize = 5;

/// Relative rates, above 0 and at most 1.
pub(crate) struct Sharing {
    /// Rate of products during the optimizer.
    pub matmul: Number,
    /// Rate of the optimizer during products.
    pub adam: Number,
}

/// Small products, as in a step, and optimizer passes on the same cores.
pub(crate) struct Sharers<'a> {
    pub product: Product,
    pub states: &'a States,
    pub pool: Pool<StepJob>,
    /// Doorbell of the pool and the device.
    pub bell: Arc<Doorbell>,
}

impl Sharers<'_> {
    /// Measures both alone and together for about `time_s`.
    ///
    /// # Errors
    /// Errors of the device and the pool.
    pub(crate) fn measure<D: Kernels>(&mut self, timer: &mut Timer<'_, D>, time_s: f64) -> Result<Sharing> {
        let (end, each_s) = (timer.dev.event()?, time_s / (3 * TURNS) as f64);
        let (mut matmul, mut adam) = (Vec::new(), Vec::new());
        for _ in 0..TURNS {
            let mut turn = |products, adam| self.turn(timer, end, (products, adam), each_s);
            let ((products_alone, _), (_, adam_alone), both) = (turn(true, false)?, turn(false, true)?, turn(true, true)?);
            matmul.push(both.0 / products_alone);
            adam.push(both.1 / adam_alone);
        }
        let fraction = |fractions| Samples::new(fractions).fraction_of(1.0).sourced();
        Ok(Sharing { matmul: fraction(matmul), adam: fraction(adam) })
    }

    /// Products per second and optimizer bytes per second, while the requested load runs for `time_s`.
    fn turn<D: Kernels>(
        &mut self,
        timer: &mut Timer<'_, D>,
        end: EventId,
        (products, adam): (bool, bool),
        time_s: f64,
    ) -> Result<(f64, f64)> {
        let (start_ns, mut job) = (timer.dev.now_ns(), 0);
        let (mut computed, mut stepped) = (WorkDone::default(), WorkDone::default());
        let is_short = |computed: WorkDone, stepped: WorkDone| (products && computed.done == 0.0) || (adam && stepped.done == 0.0);
        while timer.since(start_ns) < time_s || is_short(computed, stepped) {
            if adam && self.pool.is_idle()? {
                let work = self.states.adam(job);
                stepped.next(timer.dev.now_ns(), work.traffic_bytes() as f64);
                self.pool.submit(work);
                job += 1;
            }
            if products && timer.dev.is_done(end)? {
                (0..PRODUCTS).try_for_each(|_| self.product.enqueue(timer.dev, SMALLEST))?;
                timer.dev.record(end, Stream::Compute)?;
                computed.next(timer.dev.now_ns(), PRODUCTS as f64);
            }
            self.rest(timer.dev, end, (products, adam))?;
        }
        while !self.pool.is_idle()? {
            self.rest(timer.dev, end, (false, true))?;
        }
        timer.settle()?;
        Ok((computed.rate(start_ns), stepped.rate(start_ns)))
    }

    /// Waits until a running operation ends, or advances a simulated device.
    fn rest<D: Kernels>(&self, dev: &mut D, end: EventId, (products, adam): (bool, bool)) -> Result<()> {
        if !dev.idle()? {
            self.bell.wait_until(|| (adam && is_over(&self.pool.is_idle())) || (products && is_over(&dev.is_done(end))));
        }
        Ok(())
    }
}

/// Whether the operation has ended or failed. The next caller that checks it receives the error.
fn is_over(is_done: &Result<bool>) -> bool {
    !matches!(is_done, Ok(false))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceKind;
    use crate::device::cpu::StreamOrder;
    use crate::device::sim::SimDevice;
    use crate::dtype::Dtype;
    use crate::hardware::rates::tests::round_rates;
    use crate::hardware::topology::Topology;
    use crate::memory::DeviceMemory;
    use crate::optim::moments::Moments;
    use crate::optim::simd::Isa;
    use crate::probe::workers::Workers;

    fn topology() -> Topology {
        Topology { caches: Vec::new(), memory_available_bytes: Some(1 << 28), ..Topology::this_machine() }
    }

    #[test]
    fn a_simulated_machine_shares_by_its_rates() {
        let mut rates = round_rates();
        (rates.cpu_device_under_adam, rates.adam_under_cpu_device, rates.kernel_s) = (0.3, 0.6, 1e-6);
        let states = States::leaked(&topology());
        let (mut dev, pool) =
            SimDevice::new("cpus", &rates, (DeviceKind::Cpu, DeviceMemory::Shared), (1, Isa::Scalar, Moments::Float32), 0);
        let product = Product::new(&mut dev, Dtype::Bfloat16, 2048).unwrap();
        let mut sharers = Sharers { product, states: &states, pool: Pool::Simulated(pool), bell: Arc::default() };
        let Sharing { matmul, adam } = sharers.measure(&mut Timer::new(&mut dev).unwrap(), 1.0).unwrap();
        assert!((matmul.value - 0.3).abs() < 0.02 && (adam.value - 0.6).abs() < 0.02, "{} {}", matmul.value, adam.value);
    }

    #[test]
    fn this_machines_cores_are_shared() {
        let (topology, bell) = (topology(), Arc::new(Doorbell::default()));
        let states = States::leaked(&topology);
        let mut dev = crate::launch::open::cpu(1, StreamOrder::Threads, bell.clone(), 0).unwrap();
        let product = Product::new(&mut dev, Dtype::Bfloat16, 128).unwrap();
        let pool = Workers::ringing(bell.clone(), &topology, 1).unwrap().pool;
        let mut sharers = Sharers { product, states: &states, pool, bell };
        let Sharing { matmul, adam } = sharers.measure(&mut Timer::new(&mut dev).unwrap(), 0.05).unwrap();
        assert!([matmul, adam].iter().all(|fraction| fraction.value > 0.0 && fraction.value <= 1.0));
    }
}
