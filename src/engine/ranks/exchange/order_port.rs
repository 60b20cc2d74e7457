//! The port of an exchange for orders.

use crate::device::Kernels;
use crate::engine::protocol::order::Order;
use crate::engine::save::frozen_state::FrozenState;
use crate::error::{Error, Result};
use crate::planner::plan::Plan;
use crate::ranks::progress::ORDER_WORDS;

/// Arguments of an order.
pub(crate) type OrderWords = [u64; ORDER_WORDS];

/// Orders of rank 0 to all ranks, and the data that belong to an order: parts of micro-batches and words of state.
///
/// Methods poll, unless their documentation says that they wait.
pub(crate) trait OrderPort<D: Kernels> {
    /// On rank 0, issues an order to all other ranks, once they have completed the order before it.
    fn give_order(&mut self, _dev: &mut D, _order: Order, _words: OrderWords) -> Result<()> {
        Ok(())
    }

    /// On rank 0, waits until all other ranks have completed their order.
    fn await_done(&mut self, _dev: &mut D) -> Result<()> {
        Ok(())
    }

    /// Waits for the order that rank 0 issues after `seen` other orders.
    ///
    /// # Errors
    /// `Resource` on a single rank; the failure that ended another rank.
    fn next_order(&mut self, _dev: &mut D, _seen: u64) -> Result<(Order, OrderWords)> {
        Err(Error::resource("wait for an order", "this rank is the only one"))
    }

    /// Publishes that this rank has completed its order.
    fn publish_done(&self) {}

    /// On rank 0, makes `plan` available to the other ranks for the next [`Order::Replan`].
    fn announce(&mut self, _plan: &Plan) {}

    /// The plan that all ranks change to.
    fn announced(&self) -> Option<Plan> {
        None
    }

    /// Makes this rank's part of the state of a save available to rank 0.
    fn publish_frozen(&mut self, _state: FrozenState) {}

    /// On rank 0, takes the parts of the state that the other ranks have published.
    fn take_frozen(&mut self) -> Vec<FrozenState> {
        Vec::new()
    }

    /// Index in this rank's memory of a part of a step's micro-batches, if the part belongs to this rank. Parts are counted micro-batch by
    /// micro-batch, with one part for each rank of a sequence group.
    fn place(&self, part: usize) -> Option<usize> {
        Some(part)
    }

    /// The part of a step's micro-batches at index `place` of this rank's memory.
    fn part(&self, place: usize) -> usize {
        place
    }

    /// On rank 0, takes the buffer for a micro-batch of other ranks.
    fn word_buffer(&mut self) -> Vec<i32> {
        Vec::new()
    }

    /// Returns the buffer.
    fn return_word_buffer(&mut self, _word_buffer: Vec<i32>) {}

    /// Sends a part of a micro-batch to its rank.
    fn send_part(&mut self, _part: usize, _words: &mut dyn Iterator<Item = &[i32]>) {}

    /// Copies the micro-batch for index `place` of this rank's memory from the words that rank 0 has sent, if it has.
    fn sent_batch(&self, _place: usize, _memory: &mut [i32]) {}

    /// Writes the words that belong to an order, for rank 0 or from rank 0, beginning at `start`.
    fn post(&self, _start: usize, _words: &[f32]) {}

    /// Reads these words.
    fn mail(&self, _start: usize, _words: &mut [f32]) {}

    /// Words of state that one order can carry. A single rank sends no state.
    fn mail_words(&self) -> usize {
        usize::MAX
    }
}
