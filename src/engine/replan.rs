//! Another plan between two steps: buckets change their side of the link, layers what they keep, slots their number. What a step computes
//! stays the same, bit for bit: weights follow from the state, and the rest holds nothing between steps. Of several ranks all go over, at
//! the same step, or none.

use super::counters::Exposed;
use super::exchange::{Order, Words};
use super::executor::{Engine, staging};
use super::hall::RankMemory;
use super::scratch::StepScratch;
use super::vitals::Doing;
use crate::config::options::FaultPhase;
use crate::device::Kernels;
use crate::error::{Error, Result};
use crate::planner::plan::Plan;

impl<D: Kernels> Engine<D> {
    /// Goes on by the places of `plan`, on all ranks; everything else stays as it is. Returns why the old places are kept, if they are: there
    /// is no memory for the new ones. Memory is given back before other memory is taken, so that a move needs no more than either plan.
    ///
    /// # Errors
    /// The device's; `Resource` when the old memory cannot be had again either; what ended another rank. The state is whole all the same,
    /// and can be read.
    ///
    /// # Panics
    /// If the plans differ in more than places.
    pub fn replan(&mut self, plan: Plan) -> Result<Option<Error>> {
        let start = self.dev.now_ns();
        self.flush()?;
        self.await_done()?;
        self.exchange.announce(&plan);
        self.lead(Order::Replan, Words::default())?;
        let moved = self.change_places(plan);
        let kept = self.named(moved)?;
        self.send_weights()?;
        self.driver_span("replan", self.train_step as u32, start);
        self.forget_the_move();
        Ok(kept)
    }

    /// What each rank does of it: nothing is under way, and weights are still to be sent.
    pub(super) fn change_places(&mut self, plan: Plan) -> Result<Option<Error>> {
        self.vitals.now(Doing::Moving, 0);
        self.block_until(Doing::Moving, 0, |engine| Ok(engine.transfers.are_done()))?;
        self.exchange.leave(&mut self.dev)?;
        let (old, new) = (self.plan.clone(), self.plan.with_places_of(plan));
        let refusal = self.arrange(new).err();
        self.strike(FaultPhase::Move)?;
        let kept = self.exchange.agree(refusal)?;
        if kept.is_some() {
            self.arrange(old)?;
        }
        let (memory, stepped) = (RankMemory::of(&self.model), self.stepped());
        self.exchange.meet_again(&mut self.dev, memory, stepped, &self.vitals)?;
        self.forget_the_move();
        self.vitals.now(Doing::Else, 0);
        Ok(kept)
    }

    /// What was moved and waited for is no step's.
    fn forget_the_move(&mut self) {
        self.counters.adam_busy_ns = self.pool.busy_ns();
        self.counters_reported = self.counters;
        self.count_waits_of_streams();
        self.exposed = Exposed::default();
    }

    /// Has memory lie as `plan` says, whatever there is of it and wherever buckets are. After an error the scratch is missing.
    fn arrange(&mut self, plan: Plan) -> Result<()> {
        let (exchange, (dev, host), bounce) = (&mut self.exchange, (&mut self.dev, &mut self.host), &self.memory.bounce);
        exchange.rearrange((dev, host), &plan.layout)?;
        self.scratch.give_back((dev, host))?;
        let (slices, states) = (exchange.slices(), &mut self.memory.states);
        states.bring_to_host(slices, (dev, host), bounce)?;
        states.send_to_device(slices, (dev, host), bounce)?;
        exchange.take((dev, host), &plan)?;
        let shape = self.model.shape.clone();
        (self.scratch, self.model, self.flow) = StepScratch::take(&plan, &shape, exchange.slices(), (dev, host), bounce)?;
        self.coordinator.rearrange(&plan.layout, staging(&plan));
        self.transfers.rearrange(dev, &plan.layout, plan.param_slots)?;
        self.plan = plan;
        Ok(())
    }
}
