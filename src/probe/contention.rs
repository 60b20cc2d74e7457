//! Rates of copies, products and the optimizer under concurrent load, relative to their rates alone.

use super::copies::{Copies, CopyDirection};
use super::product::Product;
use super::samples::Samples;
use super::states::States;
use super::timer::Timer;
use super::work_done::WorkDone;
use crate::device::{Device, EventId, Kernels, Stream};
use crate::engine::pool::Pool;
use crate::engine::step_job::StepJob;
use crate::error::Result;
use crate::hardware::profile::Contention;
use crate::hardware::sourced::Number;
use crate::host::pool::Job;

/// Seconds of products in a sample.
const PRODUCTS_S: f64 = 0.1;
/// Maximum number of operations enqueued at once, below the capacity of a launch queue.
const ENQUEUED_MAX: f64 = 512.0;
/// Ratio of the copies' duration to that of the products alone.
const LONGER: f64 = 1.5;
/// Number of turns of copies, optimizer and both. Turns alternate, so that variations over time affect all three.
const TURNS: usize = 3;

/// The load of a turn.
#[derive(Clone, Copy)]
struct Mix {
    copies: bool,
    adam: bool,
}

/// Bytes per second moved in a turn.
struct Moved {
    each_way: f64,
    adam: f64,
}

/// The products, copies and optimizer that are measured together.
pub(crate) struct Contenders<'a> {
    pub product: Product,
    pub copies: Copies,
    pub states: &'a States,
    pub pool: Pool<StepJob>,
}

impl Contenders<'_> {
    /// Measures the contention for about `time_s`.
    ///
    /// # Errors
    /// Errors of the device and the pool.
    pub(crate) fn measure<D: Kernels>(&mut self, timer: &mut Timer<'_, D>, both_ways_bytes_per_s: f64, time_s: f64) -> Result<Contention> {
        let matmul = self.matmul_under_copies(timer, both_ways_bytes_per_s, 0.3 * time_s)?;
        let (copies, adam) = self.copies_beside_adam(timer, 0.7 * time_s)?;
        Ok(Contention { matmul_under_copies: matmul.sourced(), copies_under_adam: copies, adam_under_copies: adam })
    }

    /// The relative rate of products during copies in both directions.
    fn matmul_under_copies<D: Kernels>(&self, timer: &mut Timer<'_, D>, both_ways_bytes_per_s: f64, time_s: f64) -> Result<Samples> {
        let (product, copies, bytes) = (self.product, self.copies, self.copies.bucket_bytes());
        let once_s = timer.seconds(|dev| product.enqueue(dev, product.n))?;
        let products = (PRODUCTS_S.min(time_s / 4.0) / once_s).clamp(1.0, ENQUEUED_MAX) as usize;
        let enqueue = |dev: &mut D| (0..products).try_for_each(|_| product.enqueue(dev, product.n));
        let done = timer.dev.event()?;
        let shares = timer.samples(time_s, |timer| {
            let alone_s = timer.seconds(enqueue)?;
            let count = (LONGER * alone_s * both_ways_bytes_per_s / bytes as f64).clamp(1.0, ENQUEUED_MAX) as usize;
            (0..count).try_for_each(|_| CopyDirection::BOTH.into_iter().try_for_each(|way| copies.enqueue(timer.dev, way, bytes)))?;
            let start_ns = timer.dev.now_ns();
            enqueue(timer.dev)?;
            timer.dev.record(done, Stream::Compute)?;
            timer.dev.synchronize(done)?;
            let beside_s = timer.since(start_ns);
            timer.settle()?;
            Ok(alone_s / beside_s)
        })?;
        Ok(shares.fraction_of(1.0))
    }

    /// The relative rates of copies and the optimizer while both run.
    fn copies_beside_adam<D: Device>(&mut self, timer: &mut Timer<'_, D>, time_s: f64) -> Result<(Number, Number)> {
        let ends = [timer.dev.event()?, timer.dev.event()?];
        let each_s = time_s / (3 * TURNS) as f64;
        let (mut copies, mut adam) = (Vec::new(), Vec::new());
        for _ in 0..TURNS {
            let mut turn = |copies, adam| self.turn(timer, ends, Mix { copies, adam }, each_s);
            let (copies_alone, adam_alone, both) = (turn(true, false)?, turn(false, true)?, turn(true, true)?);
            copies.push(both.each_way / copies_alone.each_way);
            adam.push(both.adam / adam_alone.adam);
        }
        let fraction = |shares| Samples::new(shares).fraction_of(1.0).sourced();
        Ok((fraction(copies), fraction(adam)))
    }

    /// Keeps the load `beside` running for `time_s`, from one driver thread as in a step.
    fn turn<D: Device>(&mut self, timer: &mut Timer<'_, D>, ends: [EventId; 2], beside: Mix, time_s: f64) -> Result<Moved> {
        let (bytes, start_ns) = (self.copies.bucket_bytes(), timer.dev.now_ns());
        let (mut adam, mut ways, mut job) = (WorkDone::default(), [WorkDone::default(); 2], 0);
        let is_short = |adam: WorkDone, ways: [WorkDone; 2]| {
            (beside.adam && adam.done == 0.0) || (beside.copies && ways.iter().any(|way| way.done == 0.0))
        };
        while timer.since(start_ns) < time_s || is_short(adam, ways) {
            if beside.adam && self.pool.is_idle()? {
                let work = self.states.adam(job);
                adam.next(timer.dev.now_ns(), work.traffic_bytes() as f64);
                self.pool.submit(work);
                job += 1;
            }
            for (way, end) in CopyDirection::BOTH.into_iter().zip(ends) {
                if beside.copies && timer.dev.is_done(end)? {
                    self.copies.enqueue(timer.dev, way, bytes)?;
                    timer.dev.record(end, way.stream())?;
                    ways[way as usize].next(timer.dev.now_ns(), bytes as f64);
                }
            }
            timer.dev.idle()?;
        }
        while !self.pool.is_idle()? {
            timer.dev.idle()?;
        }
        timer.settle()?;
        Ok(Moved { each_way: ways.iter().map(|way| way.rate(start_ns)).sum::<f64>() / 2.0, adam: adam.rate(start_ns) })
    }
}
