//! The engine as the runner of a model's passes.

use super::executor::Engine;
use super::watch::driver_state::DriverActivity;
use crate::device::Kernels;
use crate::error::Result;
use crate::faults::FaultPhase;
use crate::model::sequence::{Handover, PassRunner};

/// Runs the engine's passes. While the driver waits for peers, it keeps running the event loop.
impl<D: Kernels> PassRunner for Engine<D> {
    type Dev = D;

    fn dev(&mut self) -> &mut D {
        &mut self.dev
    }

    fn hand_over(&mut self, handover: Handover, layer: usize) -> Result<()> {
        if !self.model.shares_sequences() {
            return Ok(());
        }
        self.inject(FaultPhase::HandOver)?;
        if handover.is_new() {
            self.exchange.hand_over(&mut self.dev)?;
            self.wait_for_peers(DriverActivity::HandOver, self.plan.recipe.step.sequence_ranks, |engine| {
                Ok(engine.exchange.is_handed_over())
            })?;
        }
        self.exchange.take_over(&mut self.dev, &self.model, (handover, layer))
    }
}
