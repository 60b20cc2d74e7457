//! Saves of several processes, in which each rank writes its own slices.

use super::executor::Engine;
use super::protocol::order::Order;
use super::ranks::exchange::OrderWords;
use super::save::frozen_state::FrozenState;
use crate::bucket::slices::Slices;
use crate::device::Kernels;
use crate::error::{Error, Result};
use crate::optim::CHUNK_BYTES;
use std::ops::Range;

/// Answer of a rank that has written its slices.
const SAVED: f32 = 1.0;

/// The code with which a rank saves its slices.
pub(crate) trait SaveSlices<D: Kernels> {
    /// Saves the slices of `engine`, which is flushed, for the two words of rank 0. Returns the checksums.
    ///
    /// # Errors
    /// Errors of the implementation.
    fn save(&mut self, engine: &mut Engine<D>, words: [u64; 2]) -> Result<Vec<u32>>;

    /// Begins to save them beside steps.
    ///
    /// # Errors
    /// Errors of the implementation.
    fn begin(&mut self, engine: &mut Engine<D>, words: [u64; 2]) -> Result<()>;

    /// Whether the save that was begun has written all slices, or there is none.
    ///
    /// # Errors
    /// The error of the save.
    fn is_written(&mut self) -> Result<bool>;

    /// Waits for the end of the save that was begun. Returns the checksums.
    ///
    /// # Errors
    /// The error of the save.
    fn finish(&mut self) -> Result<Vec<u32>>;
}

/// A rank that saves nothing for itself.
pub(super) struct NoSlices;

impl<D: Kernels> SaveSlices<D> for NoSlices {
    fn save(&mut self, _: &mut Engine<D>, _: [u64; 2]) -> Result<Vec<u32>> {
        Err(no_saves())
    }

    fn begin(&mut self, _: &mut Engine<D>, _: [u64; 2]) -> Result<()> {
        Err(no_saves())
    }

    fn is_written(&mut self) -> Result<bool> {
        Ok(true)
    }

    fn finish(&mut self) -> Result<Vec<u32>> {
        Err(no_saves())
    }
}

fn no_saves() -> Error {
    Error::resource("save", "no rank of this process saves for itself")
}

impl<D: Kernels> Engine<D> {
    /// Obeys an order of a save in which each rank writes its own slices, by `saver`. Returns false for any other order. A save that has
    /// failed ends the rank at its next order.
    ///
    /// # Errors
    /// Errors of `saver`.
    pub(super) fn obey_save_order(&mut self, order: Order, words: OrderWords, saver: &mut impl SaveSlices<D>) -> Result<bool> {
        let (place, is_written) = ([words[0], words[1]], saver.is_written()?);
        match order {
            Order::Save => {
                let crc32c = saver.save(self, place)?;
                self.publish_checksums(&crc32c)?;
            }
            Order::BeginSave if self.plan.site.processes > 1 => saver.begin(self, place)?,
            Order::ReportPart => self.publish_saved(is_written),
            Order::FinishPart => self.publish_checksums(&saver.finish()?)?,
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Lets every rank save its slices, while training stops. `words` are passed to the code that saves; `own` saves this rank's slices.
    /// Returns the checksums by rank.
    ///
    /// # Errors
    /// Errors of `own`; the failure that ended another rank.
    pub(crate) fn save_slices(&mut self, [one, two]: [u64; 2], own: impl FnOnce(&mut Self) -> Result<Vec<u32>>) -> Result<Vec<Vec<u32>>> {
        self.lead(Order::Save, [one, two, 0, 0, 0, 0])?;
        let first = own(self)?;
        self.checksums_after(first)
    }

    /// Begins a save of every rank's slices beside steps. `words` are passed to the code that saves. Returns the state of this rank, which a
    /// thread must read.
    ///
    /// # Errors
    /// Errors of the device; the failure that ended another rank.
    ///
    /// # Panics
    /// If there is an obstacle: see [`Engine::save_obstacle`].
    pub(crate) fn begin_save_of_slices(&mut self, [one, two]: [u64; 2]) -> Result<FrozenState> {
        self.end_save()?;
        self.lead(Order::BeginSave, [one, two, 0, 0, 0, 0])?;
        let own = self.begin_save_of_own_slices();
        let own = self.named(own)?;
        self.await_done()?;
        Ok(own)
    }

    /// Like [`Engine::begin_save_of_slices`], for this rank only.
    ///
    /// # Errors
    /// Errors of the device.
    ///
    /// # Panics
    /// If there is an obstacle: see [`Engine::save_obstacle`].
    pub(crate) fn begin_save_of_own_slices(&mut self) -> Result<FrozenState> {
        assert!(self.save_obstacle().is_none(), "a save that must stop training");
        self.begin_own_save()
    }

    /// Whether all other ranks have written the slices of the save that was begun.
    ///
    /// # Errors
    /// The failure that ended another rank.
    pub(crate) fn have_others_saved(&mut self) -> Result<bool> {
        self.lead(Order::ReportPart, OrderWords::default())?;
        self.await_done()?;
        let mut answers = vec![0.0; self.exchange.slices().ranks()];
        self.exchange.mail(0, &mut answers);
        Ok(answers[1..].iter().all(|answer| *answer == SAVED))
    }

    /// Waits until all ranks have written the slices of the save that was begun; `first` waits for this rank. Returns the checksums by rank.
    ///
    /// # Errors
    /// Errors of `first`; the failure that ended another rank.
    pub(crate) fn await_saved(&mut self, first: impl FnOnce() -> Result<Vec<u32>>) -> Result<Vec<Vec<u32>>> {
        self.lead(Order::FinishPart, OrderWords::default())?;
        self.checksums_after(first()?)
    }

    /// The checksums by rank once all ranks have published theirs; `first` are those of this rank.
    fn checksums_after(&mut self, first: Vec<u32>) -> Result<Vec<Vec<u32>>> {
        self.await_done()?;
        let of_rank = |rank: usize| {
            let place = self.checksums_of(rank);
            let mut words = vec![0.0; place.len()];
            self.exchange.mail(place.start, &mut words);
            words.into_iter().map(f32::to_bits).collect()
        };
        Ok([first].into_iter().chain((1..self.exchange.slices().ranks()).map(of_rank)).collect())
    }

    /// Writes into the mail buffer, for rank 0, whether this rank has written its slices.
    pub(super) fn publish_saved(&self, has_saved: bool) {
        self.exchange.post(self.exchange.slices().rank(), &[if has_saved { SAVED } else { 0.0 }]);
    }

    /// Writes the checksums of this rank's saved slices into the mail buffer, for rank 0.
    pub(super) fn publish_checksums(&self, crc32c: &[u32]) -> Result<()> {
        let place = self.checksums_of(self.exchange.slices().rank());
        if crc32c.len() != place.len() || place.end > self.exchange.mail_words() {
            return Err(Error::resource("report the checksums of a checkpoint", format!("{} do not fit", crc32c.len())));
        }
        let words: Vec<f32> = crc32c.iter().map(|&word| f32::from_bits(word)).collect();
        self.exchange.post(place.start, &words);
        Ok(())
    }

    /// Position of the checksums of `rank` in the mail buffer, after those of lower ranks.
    fn checksums_of(&self, rank: usize) -> Range<usize> {
        let own = self.exchange.slices();
        let chunks = |rank| {
            let peer_slices = Slices::new(own.layout().clone(), rank, own.ranks());
            self.plan.optimizer().arrays().bytes(peer_slices.elems()).div_ceil(CHUNK_BYTES)
        };
        let start = (0..rank).map(chunks).sum();
        start..start + chunks(rank)
    }
}
