//! Deals the sequences of a dataset as micro-batches, epoch after epoch, from any position.

use crate::data::dataset::Dataset;
use crate::data::rows::batch::{Batch, Batches};
use crate::error::{Error, Result};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Position of a loader, as a checkpoint saves it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct DataPosition {
    /// Passes over the data that are complete.
    pub epoch: u64,
    /// Sequences of this pass that were dealt.
    pub next_sequence: u64,
}

/// An endless source of micro-batches. A batch may span two epochs, so that no sequence is ever left out.
pub struct Loader {
    dataset: Dataset,
    batch_size: usize,
    seed: u64,
    /// This epoch's order; `None` is the order of the data.
    order: Option<Vec<u32>>,
    position: DataPosition,
}

impl Loader {
    /// Deals `batch_size` sequences at a time from `position` on; with `shuffle` in an order that depends on `seed` and
    /// epoch alone.
    ///
    /// # Errors
    /// `Usage` when `position` lies outside the data; `Unsupported` for more than 2^32 sequences.
    pub fn new(dataset: Dataset, batch_size: usize, seed: u64, shuffle: bool, position: DataPosition) -> Result<Self> {
        let sequences = dataset.sequences();
        if position.next_sequence > sequences as u64 {
            let at = position.next_sequence;
            return Err(Error::usage(format!("the checkpoint is at sequence {at} and the data has {sequences}: this is other data")));
        }
        let count = u32::try_from(sequences).map_err(|_| Error::Unsupported(format!("{sequences} sequences in the data")))?;
        let mut order: Option<Vec<u32>> = shuffle.then(|| (0..count).collect());
        if let Some(order) = &mut order {
            shuffle_epoch(order, seed, position.epoch);
        }
        Ok(Self { dataset, batch_size, seed, order, position })
    }

    /// Where the next batch begins.
    pub fn position(&self) -> DataPosition {
        self.position
    }

    /// The dataset from which sequences are taken.
    pub fn dataset(&self) -> &Dataset {
        &self.dataset
    }

    /// Takes the next sequence of the order; after the last one the next epoch begins.
    fn next_sequence(&mut self) -> usize {
        if self.position.next_sequence == self.dataset.sequences() as u64 {
            self.position = DataPosition { epoch: self.position.epoch + 1, next_sequence: 0 };
            if let Some(order) = &mut self.order {
                shuffle_epoch(order, self.seed, self.position.epoch);
            }
        }
        let nth = self.position.next_sequence as usize;
        self.position.next_sequence += 1;
        self.order.as_ref().map_or(nth, |order| order[nth] as usize)
    }
}

impl Batches for Loader {
    /// Fills the batch with the next sequences. Does not allocate.
    ///
    /// # Errors
    /// When a token file cannot be read any more or has changed for the worse; the position is then within the batch.
    ///
    /// # Panics
    /// If the batch has other rows than this loader deals.
    fn fill(&mut self, batch: &mut Batch<'_>) -> Result<()> {
        let seq_length = self.dataset.seq_length();
        assert_eq!((batch.seq_length, batch.tokens.len()), (seq_length, self.batch_size * seq_length));
        batch.rows().try_for_each(|row| {
            let idx = self.next_sequence();
            self.dataset.read_sequence(idx, row)
        })
    }
}

/// Optimizer steps that deal `sequences` sequences `epochs` times, `sequences_per_step` a step: the last step may reach into the next
/// epoch.
///
/// # Panics
/// Never; counts that make no sense give the nearest step count from 1 on.
pub(crate) fn steps_for_epochs(epochs: f64, sequences: usize, sequences_per_step: usize) -> u64 {
    (epochs * sequences as f64 / sequences_per_step as f64).ceil().max(1.0) as u64
}

/// Writes the order of `epoch`: a Fisher-Yates shuffle, which is bit-identical on every platform and in every version.
fn shuffle_epoch(order: &mut [u32], seed: u64, epoch: u64) {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    key[8..16].copy_from_slice(&epoch.to_le_bytes());
    let mut rng = ChaCha8Rng::from_seed(key);
    for (idx, place) in (0..).zip(order.iter_mut()) {
        *place = idx;
    }
    for last in (1..order.len()).rev() {
        order.swap(last, below(&mut rng, last + 1));
    }
}

/// A number below `bound`, each equally likely up to `bound / 2^64`.
fn below(rng: &mut ChaCha8Rng, bound: usize) -> usize {
    ((u128::from(rng.next_u64()) * bound as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::dataset::tests::counting;
    use crate::data::rows::batch::arrays;
    use proptest::prelude::*;

    const SEQ_LENGTH: usize = 3;

    fn loader(sequences: usize, batch_size: usize, seed: u64, shuffle: bool, position: DataPosition) -> Loader {
        Loader::new(counting(sequences * SEQ_LENGTH + 2, SEQ_LENGTH).unwrap(), batch_size, seed, shuffle, position).unwrap()
    }

    /// The sequences of the next `batches` batches, by index.
    fn deal(loader: &mut Loader, batches: usize) -> Vec<usize> {
        let mut memory = vec![0; arrays(false) * loader.batch_size * SEQ_LENGTH];
        let mut dealt = Vec::new();
        for _ in 0..batches {
            let mut batch = Batch::new(&mut memory, SEQ_LENGTH, false);
            loader.fill(&mut batch).unwrap();
            assert!(batch.tokens.iter().zip(&*batch.targets).all(|(token, target)| token + 1 == *target));
            dealt.extend(batch.tokens.chunks(SEQ_LENGTH).map(|sequence| sequence[0] as usize / SEQ_LENGTH));
        }
        dealt
    }

    #[test]
    fn the_order_is_pinned() {
        // From another implementation of ChaCha8. Another order would break the resumption of every checkpoint.
        let mut order = [0; 8];
        shuffle_epoch(&mut order, 42, 0);
        assert_eq!(order, [4, 5, 0, 3, 6, 7, 1, 2]);
        shuffle_epoch(&mut order, 42, 1);
        assert_eq!(order, [6, 0, 5, 3, 7, 2, 1, 4]);
    }

    #[test]
    fn without_shuffling_the_order_is_the_datas_and_batches_span_epochs() {
        let mut loader = loader(5, 3, 1, false, DataPosition::default());
        assert_eq!(deal(&mut loader, 4), [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]);
        assert_eq!(loader.position(), DataPosition { epoch: 2, next_sequence: 2 });
    }

    #[test]
    fn a_position_outside_the_data_is_refused() {
        let dataset = || counting(2 * SEQ_LENGTH + 1, SEQ_LENGTH).unwrap();
        let at = |next_sequence| Loader::new(dataset(), 1, 0, true, DataPosition { epoch: 4, next_sequence });
        assert_eq!(deal(&mut at(2).unwrap(), 2).len(), 2);
        assert!(at(3).err().unwrap().to_string().contains("at sequence 3 and the data has 2"));
    }

    #[test]
    fn epochs_become_steps_that_cover_the_data() {
        assert_eq!(steps_for_epochs(1.0, 10, 4), 3);
        assert_eq!(steps_for_epochs(3.0, 10, 4), 8);
        assert_eq!(steps_for_epochs(0.5, 10, 5), 1);
        assert_eq!(steps_for_epochs(0.01, 10, 5), 1);
        assert_eq!(steps_for_epochs(2.0, 10, 5), 4);
    }

    proptest! {
        #[test]
        fn every_epoch_is_a_permutation_and_they_differ(sequences in 20..200usize, seed: u64) {
            let mut loader = loader(sequences, 1, seed, true, DataPosition::default());
            let epochs: Vec<Vec<usize>> = (0..3).map(|_| deal(&mut loader, sequences)).collect();
            for epoch in &epochs {
                let mut sorted = epoch.clone();
                sorted.sort_unstable();
                prop_assert!(sorted.into_iter().eq(0..sequences));
            }
            prop_assert!(epochs[0] != epochs[1] && epochs[1] != epochs[2] && epochs[0] != epochs[2]);
        }

        #[test]
        fn any_interruption_resumes_the_same_batches(
            (sequences, batch_size, seed, shuffle) in (1..40usize, 1..9usize, any::<u64>(), any::<bool>()),
            stops in prop::collection::vec(0..12usize, 1..6),
        ) {
            let through = deal(&mut loader(sequences, batch_size, seed, shuffle, DataPosition::default()), stops.iter().sum());
            let mut position = DataPosition::default();
            let mut dealt = Vec::new();
            for batches in stops {
                let mut resumed = loader(sequences, batch_size, seed, shuffle, position);
                dealt.extend(deal(&mut resumed, batches));
                position = serde_json::from_str(&serde_json::to_string(&resumed.position()).unwrap()).unwrap();
            }
            prop_assert_eq!(dealt, through);
        }
    }
}
