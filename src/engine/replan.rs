//! Another plan between two steps: buckets change their side of the link, layers what they keep, slots their number. What a step computes
//! stays the same, bit for bit: weights follow from the state, and the rest holds nothing between steps.

use super::counters::Exposed;
use super::exchange::Exchange;
use super::executor::{Engine, staging};
use super::scratch::StepScratch;
use super::vitals::Doing;
use crate::device::Kernels;
use crate::error::{Error, Result};
use crate::planner::plan::Plan;

impl<D: Kernels, X: Exchange<D>> Engine<D, X> {
    /// Goes on by the places of `plan`; everything else stays as it is. Returns why the old places are kept, if they are: there is no
    /// memory for the new ones. Memory is given back before other memory is taken, so that a move needs no more than either plan.
    ///
    /// # Errors
    /// The device's; `Resource` when the old memory cannot be had again either. The state is whole all the same, and can be read.
    ///
    /// # Panics
    /// If the plans differ in more than places.
    pub fn replan(&mut self, plan: Plan) -> Result<Option<Error>> {
        let start = self.dev.now_ns();
        self.flush()?;
        self.vitals.now(Doing::Moving, 0);
        self.block_until(Doing::Moving, 0, |engine| Ok(engine.transfers.are_done()))?;
        let (old, new) = (self.plan.clone(), self.plan.with_places_of(plan));
        let kept = match self.arrange(new) {
            Ok(()) => None,
            Err(why) => self.arrange(old).map(|()| Some(why))?,
        };
        self.send_weights()?;
        self.driver_span("replan", self.train_step as u32, start);
        // What was moved and waited for is no step's.
        self.counters.adam_busy_ns = self.pool.busy_ns();
        self.counters_reported = self.counters;
        self.count_waits_of_streams();
        self.exposed = Exposed::default();
        self.vitals.now(Doing::Else, 0);
        Ok(kept)
    }

    /// Has memory lie as `plan` says, whatever there is of it and wherever buckets are. After an error the scratch is missing.
    fn arrange(&mut self, plan: Plan) -> Result<()> {
        let (exchange, sides, bounce) = (&mut self.exchange, (&mut self.dev, &mut self.host), &self.memory.bounce);
        exchange.rearrange(&plan.layout)?;
        let (slices, states) = (exchange.slices(), &mut self.memory.states);
        let (dev, host) = sides;
        self.scratch.give_back((dev, host))?;
        states.bring_to_host(slices, (dev, host), bounce)?;
        states.send_to_device(slices, (dev, host), bounce)?;
        let shape = self.model.shape.clone();
        (self.scratch, self.model, self.flow) = StepScratch::take(&plan, &shape, slices, (dev, host), bounce)?;
        self.coordinator.rearrange(&plan.layout, staging(&plan));
        self.transfers.rearrange(dev, &plan.layout, plan.param_slots)?;
        self.plan = plan;
        Ok(())
    }
}
