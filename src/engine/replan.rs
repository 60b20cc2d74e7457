//! Change of plan between two steps: buckets change their tier, layers change the activations that they keep for the backward pass, and the
//! number of slots changes. The results of steps stay bit-identical, because weights are derived from the state and all other affected
//! memory holds nothing between steps. Either all ranks change plans at the same step, or none does.

use super::executor::{Engine, staging};
use super::memory::scratch::StepScratch;
use super::protocol::order::Order;
use super::ranks::exchange::OrderWords;
use super::ranks::rendezvous::RankMemory;
use super::watch::driver_state::DriverActivity;
use crate::device::Kernels;
use crate::error::{Error, Result};
use crate::faults::FaultPhase;
use crate::planner::plan::Plan;

impl<D: Kernels> Engine<D> {
    /// Changes all ranks to the placement of `plan`; all else stays as it is. Returns an error if memory for the new placement is not
    /// available; the old placement is then restored. Memory is freed before other memory is allocated, so that a change needs no more than
    /// the larger of the two plans.
    ///
    /// # Errors
    /// Errors of the device; `Resource` when the old memory cannot be allocated again either; the failure that ended another rank. The
    /// state stays complete and can be read.
    ///
    /// # Panics
    /// If the plans differ in more than placement.
    pub fn replan(&mut self, plan: Plan) -> Result<Option<Error>> {
        let start = self.dev.now_ns();
        self.flush()?;
        self.await_done()?;
        self.exchange.announce(&plan);
        self.lead(Order::Replan, OrderWords::default())?;
        let moved = self.change_placement(plan);
        let kept = self.named(moved)?;
        self.send_weights()?;
        self.driver_span("replan", self.steps.train() as u32, start);
        self.exclude_replan_from_report();
        Ok(kept)
    }

    /// Changes this rank to the placement of `plan`. No work may be pending; the weights must be sent afterwards.
    pub(super) fn change_placement(&mut self, plan: Plan) -> Result<Option<Error>> {
        self.driver_state.set_activity(DriverActivity::Moving, 0);
        self.block_until(DriverActivity::Moving, 0, |engine| Ok(engine.transfers.are_done()))?;
        self.exchange.leave(&mut self.dev)?;
        let (old, new) = (self.plan.clone(), self.plan.with_placement_of(plan));
        let refusal = self.arrange(new).err();
        self.inject(FaultPhase::Move)?;
        let kept = self.exchange.agree(refusal)?;
        if kept.is_some() {
            self.arrange(old)?;
        }
        let (memory, stepped) = (RankMemory::of(&self.model), self.stepped());
        self.exchange.meet_again(&mut self.dev, memory, stepped, &self.driver_state)?;
        self.exclude_replan_from_report();
        self.driver_state.set_activity(DriverActivity::Else, 0);
        Ok(kept)
    }

    /// Excludes the bytes and times of the change from the next step's report.
    fn exclude_replan_from_report(&mut self) {
        self.counters.adam_busy_ns = self.pool.busy_ns();
        self.reported.exclude(self.counters);
        self.count_waits_of_streams();
        self.idle.reset();
    }

    /// Moves memory to the placement of `plan`, from any state of allocation. After an error the scratch memory is missing.
    fn arrange(&mut self, plan: Plan) -> Result<()> {
        let (exchange, (dev, host), memory) = (&mut self.exchange, (&mut self.dev, &mut self.host), &mut self.memory);
        self.scratch.give_back((dev, host))?;
        memory.free_weights(dev)?;
        exchange.rearrange((dev, host), &plan.placement.layout)?;
        let (slices, states) = (exchange.slices(), &mut memory.states);
        states.bring_to_host(slices, (dev, host), &memory.bounce_buffer)?;
        states.send_to_device(slices, (dev, host), &memory.bounce_buffer)?;
        exchange.take((dev, host), &plan)?;
        memory.take_weights(&plan, &**exchange, dev)?;
        let (shape, slices) = (self.model.shape.clone(), exchange.slices());
        (self.scratch, self.model, self.flow) = StepScratch::take(&plan, &shape, slices, memory, (dev, host))?;
        self.coordinator.rearrange(&plan.placement.layout, staging(&plan));
        self.transfers.rearrange(dev, &plan.placement.layout, plan.placement.param_slots)?;
        self.plan = plan;
        Ok(())
    }
}
