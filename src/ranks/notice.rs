//! Notices: messages by which processes replicate the progress of their ranks. On the [`wire`](super::wire) a body has the topic's numbers,
//! then bytes. The reader checks each length against its maximum before it allocates memory.

use super::wire::{Seal, damage};
use std::io::{self, Read, Write};

/// Numbers of the longest notice, an order: its code and its arguments.
const NUMBERS_MAX: usize = 7;

/// Maximum number of bytes in the tail of a notice. Longer data is split into several notices.
pub(crate) const TAIL_MAX: usize = 1 << 20;

/// The topic of a notice. The description of each topic lists its numbers and then its tail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Topic {
    /// Heartbeat.
    Alive,
    /// Facts that must agree before step 0, as text.
    Agreement,
    /// Request to stop the run.
    Stop,
    /// End of the run: its outcome, as text.
    Over,
    /// Failure of a rank: rank; cause, as text.
    Failed,
    /// One more bucket of a rank is written: rank.
    Written,
    /// One more bucket is pulled: rank.
    Pulled,
    /// Weights are final: rank, bucket, version.
    Settled,
    /// Partial sums of the norm: index of the first; values.
    Partials,
    /// More partial sums of a rank are published: rank, count.
    PartialsPublished,
    /// Loss of a gradient share: share, bits.
    Loss,
    /// Losses and non-finite flag of a rank are published: rank, flag, step.
    Reported,
    /// Outcome of a step, from rank 0: step, norm, loss, flag.
    Outcome,
    /// An order: its code and its arguments.
    Order,
    /// One more order is carried out: rank.
    Done,
    /// A rank arrived at the meeting of all ranks: rank.
    Met,
    /// Report of a rank for a step: rank; amounts.
    Amounts,
    /// Rows of experts: rank, index of the first; rows.
    ExpertRows,
    /// Words for the mail: index of the first; words.
    Mail,
    /// Rendezvous: the sender has all its connections.
    Ready,
    /// Rendezvous: all processes are connected, and the run begins.
    Begin,
}

impl Topic {
    const ALL: [(Self, usize); 21] = [
        (Self::Alive, 0),
        (Self::Agreement, 0),
        (Self::Stop, 0),
        (Self::Over, 0),
        (Self::Failed, 1),
        (Self::Written, 1),
        (Self::Pulled, 1),
        (Self::Settled, 3),
        (Self::Partials, 1),
        (Self::PartialsPublished, 2),
        (Self::Loss, 2),
        (Self::Reported, 3),
        (Self::Outcome, 4),
        (Self::Order, NUMBERS_MAX),
        (Self::Done, 1),
        (Self::Met, 1),
        (Self::Amounts, 1),
        (Self::ExpertRows, 2),
        (Self::Mail, 1),
        (Self::Ready, 0),
        (Self::Begin, 0),
    ];

    fn numbers(self) -> usize {
        Self::ALL[self as usize].1
    }
}

/// A message between two processes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Notice {
    pub(crate) topic: Topic,
    numbers: [u64; NUMBERS_MAX],
    pub(crate) tail: Vec<u8>,
}

impl Notice {
    /// A notice of `topic` with its `numbers`.
    ///
    /// # Panics
    /// If the topic has another count of numbers.
    pub(crate) fn new(topic: Topic, numbers: &[u64]) -> Self {
        assert_eq!(numbers.len(), topic.numbers(), "{topic:?}");
        let mut all = [0; NUMBERS_MAX];
        all[..numbers.len()].copy_from_slice(numbers);
        Self { topic, numbers: all, tail: Vec::new() }
    }

    /// Sets the tail of the notice.
    ///
    /// # Panics
    /// If the tail is longer than [`TAIL_MAX`].
    pub(crate) fn with(self, tail: Vec<u8>) -> Self {
        assert!(tail.len() <= TAIL_MAX, "{:?} of {} bytes", self.topic, tail.len());
        Self { tail, ..self }
    }

    /// Sets the tail to `text`, cut to the maximum length.
    pub(crate) fn with_text(self, text: &str) -> Self {
        let end = (0..=text.len().min(TAIL_MAX)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        self.with(text.as_bytes()[..end].to_vec())
    }

    /// The numbers of the notice, as many as its topic has.
    pub(crate) fn numbers(&self) -> &[u64] {
        &self.numbers[..self.topic.numbers()]
    }

    /// The tail as text. Invalid UTF-8 is replaced.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.tail).into_owned()
    }

    /// The tail as 32-bit words. An incomplete word at the end is ignored.
    pub(crate) fn words(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.tail.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes))
    }

    /// The tail as 64-bit words. An incomplete word at the end is ignored.
    pub(crate) fn long_words(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        self.tail.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes))
    }

    /// Writes the notice as the next message of `seal`.
    ///
    /// # Errors
    /// Errors of `out`.
    pub(super) fn write(&self, out: &mut impl Write, seal: &mut Seal) -> io::Result<()> {
        let mut numbers = [0; 8 * NUMBERS_MAX];
        let places = numbers.as_chunks_mut().0.iter_mut();
        places.zip(self.numbers()).for_each(|(place, number): (&mut [u8; 8], _)| *place = number.to_le_bytes());
        seal.write(out, self.topic as u8, &numbers[..8 * self.numbers().len()], &self.tail)
    }

    /// Reads the next message of `seal`.
    ///
    /// # Errors
    /// Errors of `input`; `InvalidData` if the message is invalid or not the next one.
    pub(super) fn read(input: &mut impl Read, seal: &mut Seal) -> io::Result<Self> {
        let head = seal.head(input)?;
        let wrong = |field: &str, value: usize| damage(format!("a notice with {field} {value}"));
        let (topic, count) = *Topic::ALL.get(usize::from(head.kind)).ok_or_else(|| wrong("topic", head.kind.into()))?;
        let tail = head.length.checked_sub(8 * count).filter(|tail| *tail <= TAIL_MAX).ok_or_else(|| wrong("length", head.length))?;
        let (mut numbers, mut tail) = ([0; 8 * NUMBERS_MAX], vec![0; tail]);
        seal.body(input, &head, (&mut numbers[..8 * count], &mut tail), |_| format!("{topic:?}"))?;
        let mut all = [0; NUMBERS_MAX];
        for (number, bytes) in all.iter_mut().zip(numbers.as_chunks().0) {
            *number = u64::from_le_bytes(*bytes);
        }
        Ok(Self { topic, numbers: all, tail })
    }
}

/// The processes that receive a notice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    All,
    /// The process of rank 0.
    First,
}

/// Sends notices to other processes. It never blocks.
pub(crate) trait Outbox: Send + Sync {
    /// Enqueues `notice` for sending.
    fn send(&self, to: Audience, notice: Notice);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A reader that records the largest buffer it was given.
    struct Counted<'a>(&'a [u8], usize);

    impl Read for Counted<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            self.1 = self.1.max(out.len());
            self.0.read(out)
        }
    }

    proptest! {
        #[test]
        fn written_values_read_back(topic in 0..Topic::ALL.len(), numbers: [u64; NUMBERS_MAX], tail: Vec<u8>, rest: Vec<u8>) {
            let (topic, count) = Topic::ALL[topic];
            let notice = Notice::new(topic, &numbers[..count]).with(tail);
            let mut bytes = Vec::new();
            notice.write(&mut bytes, &mut Seal::default()).unwrap();
            let whole = bytes.len();
            bytes.extend(rest);
            let mut input = &bytes[..];
            prop_assert_eq!(Notice::read(&mut input, &mut Seal::default()).unwrap(), notice);
            prop_assert_eq!(input.len(), bytes.len() - whole, "nothing beyond it is taken");
            for end in 0..whole {
                prop_assert!(Notice::read(&mut &bytes[..end], &mut Seal::default()).is_err(), "cut at {}", end);
            }
        }

        #[test]
        fn noise_with_a_good_checksum_is_refused_or_a_notice_and_takes_little_memory(
            kind: u8,
            bytes in prop::collection::vec(any::<u8>(), 0..200),
        ) {
            let mut noise = Vec::new();
            Seal::default().write(&mut noise, kind, &[], &bytes).unwrap();
            let mut input = Counted(&noise, 0);
            if let Ok(notice) = Notice::read(&mut input, &mut Seal::default()) {
                prop_assert!(notice.tail.len() <= noise.len());
            }
            prop_assert!(input.1 <= noise.len());
        }
    }

    /// A peer that has the token can send any length with a valid checksum.
    #[test]
    fn a_length_beyond_the_most_is_refused_before_memory_is_taken() {
        // Topics without numbers and with the most numbers.
        for (topic, numbers) in [(Topic::Over, 0), (Topic::Order, NUMBERS_MAX)] {
            for length in [8 * numbers + TAIL_MAX + 1, 1 << 22] {
                let mut head = Vec::new();
                Seal::default().write(&mut head, topic as u8, &[], &vec![0; length]).unwrap();
                head.truncate(17);
                let mut input = Counted(&head, 0);
                let refused = Notice::read(&mut input, &mut Seal::default()).unwrap_err();
                assert_eq!((refused.kind(), refused.to_string()), (io::ErrorKind::InvalidData, format!("a notice with length {length}")));
                assert!(input.1 <= 17);
            }
        }
        let mut short = Vec::new();
        Seal::default().write(&mut short, Topic::Order as u8, &[0; 8], &[]).unwrap();
        assert_eq!(Notice::read(&mut &short[..], &mut Seal::default()).unwrap_err().to_string(), "a notice with length 8");
        let mut unknown = Vec::new();
        Seal::default().write(&mut unknown, 200, &[], &[]).unwrap();
        assert_eq!(Notice::read(&mut &unknown[..], &mut Seal::default()).unwrap_err().to_string(), "a notice with topic 200");
    }

    #[test]
    fn topics_have_their_places_in_the_table() {
        Topic::ALL.iter().enumerate().for_each(|(at, (topic, _))| assert_eq!(*topic as usize, at));
        let long = Notice::new(Topic::Over, &[]).with_text(&"ä".repeat(TAIL_MAX));
        assert_eq!(long.text(), "ä".repeat(TAIL_MAX / 2));
    }
}
