//! Evaluation: forward passes between steps. It writes nothing that training reads.

use super::executor::Engine;
use super::protocol::order::Order;
use super::step::Pass;
use super::watch::driver_state::DriverActivity;
use crate::data::loss_weight::inverse_of_units;
use crate::data::rows::batch::{Batches, CountedTargets};
use crate::device::{Kernels, Stream};
use crate::error::Result;
use crate::faults::FaultPhase;
use crate::model::MicroStep;
use crate::model::tensors::Module;

/// The loss of some micro-batches under the current weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Evaluated {
    /// Weighted mean over the counted targets.
    pub loss: f64,
    /// Number of counted targets.
    pub targets: usize,
}

impl<D: Kernels> Engine<D> {
    /// Evaluates as many micro-batches as a step has, distributed to ranks and partial sums like those of a step. So the loss has the same
    /// bits on any number of ranks, and equals the loss of a step with this data. Training is not affected.
    ///
    /// # Errors
    /// Errors of `batches`; `Resource` when a token, target, position or document is out of range; errors of the device; the failure that
    /// ended another rank.
    pub fn evaluate(&mut self, batches: &mut impl Batches) -> Result<Evaluated> {
        let targets = self.read_micro_batches(batches)?;
        Ok(Evaluated { loss: self.evaluate_read(targets)?, targets: targets.targets })
    }

    /// Weighted mean of the loss of the micro-batches that were read last, over their counted `targets`; 0 if there are none.
    ///
    /// # Errors
    /// Errors of the device; the failure that ended another rank.
    pub(crate) fn evaluate_read(&mut self, targets: CountedTargets) -> Result<f64> {
        if targets.units == 0 {
            return Ok(0.0);
        }
        let micro_steps = self.plan.micro_batches_of_rank();
        self.lead(Order::Evaluate, [targets.units, micro_steps as u64, 0, 0, 0, 0])?;
        let evaluated = self.run_evaluation(targets.units, micro_steps, &[]);
        self.named(evaluated)?;
        self.await_done()?;
        Ok(self.exchange.losses())
    }

    /// Runs this rank's part of the first `micro_steps` micro-batches of an evaluation, whose targets have `weight_units` in all. Copies
    /// the logits that follow the tokens at `places` of its first micro-batch to host memory.
    pub(super) fn run_evaluation(&mut self, weight_units: u64, micro_steps: usize, places: &[usize]) -> Result<()> {
        self.driver_state.set_activity(DriverActivity::Enqueuing, 0);
        let per_partial_sum = self.plan.micro_batches_per_partial_sum();
        for micro_step in 0..micro_steps {
            let head_rows = self.upload_inputs(micro_step)?;
            self.forward_modules(micro_step == 0)?;
            self.wait_for_params(Module::Head)?;
            let (first, inv_weight) = (micro_step % per_partial_sum == 0, inverse_of_units(weight_units));
            let micro = MicroStep { first, inv_weight, loss_scale: 1.0, balance: 0.0, head_rows };
            let places = if micro_step == 0 { places } else { &[] };
            self.with_weights(Module::Head, Pass::FORWARD, |engine| {
                engine.model.head(&mut engine.dev, micro, None)?;
                engine.send_reference(micro_step)?;
                engine.send_logits(places)
            })?;
            self.module_enqueued()?;
            if (micro_step + 1).is_multiple_of(per_partial_sum) {
                self.report.add_loss(&mut self.dev, self.model.activations.loss, micro_step / per_partial_sum)?;
            }
        }
        self.dev.record(self.compute_tail, Stream::Compute)?;
        self.block_until(DriverActivity::Device, 0, |engine| engine.dev.is_done(engine.compute_tail))?;
        self.exchange.publish_losses(self.report.losses(&self.host));
        // Idle time of an evaluation does not belong to a step.
        self.count_waits_of_streams();
        self.idle.reset();
        self.driver_state.set_activity(DriverActivity::Else, 0);
        self.inject(FaultPhase::Evaluate)
    }
}
