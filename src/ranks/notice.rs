//! What processes tell each other of their ranks, and how that looks on the wire: a length, a kind, the kind's numbers, and bytes.
//! Whoever reads trusts nothing: a length is compared with the most that is allowed before memory is taken for it.

use std::io::{self, Read, Write};

/// Numbers that the longest kind has: an order's, and its number.
const NUMBERS_MAX: usize = 7;

/// Bytes that go with a notice at most; what is longer is cut into several.
pub(crate) const TAIL_MAX: usize = 1 << 20;

/// What a notice is about. Its numbers, in their order, stand behind it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Topic {
    /// The sender lives.
    Alive,
    /// What must agree before step 0, as text.
    Agreement,
    /// Somebody asks the run to stop.
    Stop,
    /// The run is over: how, as text.
    Over,
    /// A rank cannot go on: rank; why, as text.
    Failed,
    /// One more bucket of a rank is written: rank.
    Written,
    /// One more bucket is pulled: rank.
    Pulled,
    /// Weights are final: rank, bucket, version.
    Settled,
    /// Partial sums of the norm: first; values.
    Partials,
    /// So many more partial sums are told: rank, count.
    PartialsTold,
    /// The loss of a share: share, bits.
    Loss,
    /// Losses and flag are told: rank, flag, step.
    Reported,
    /// What rank 0 found in a step: step, norm, loss, flag.
    Outcome,
    /// An order: its number and what goes with it.
    Order,
    /// One more order is carried out: rank.
    Done,
    /// A rank has come to where all meet: rank.
    Met,
    /// What a rank did in a step: rank; amounts.
    Amounts,
    /// Rows of experts: rank, first; rows.
    ExpertRows,
    /// Words for the mail: first; words.
    Mail,
}

impl Topic {
    const ALL: [(Self, usize); 19] = [
        (Self::Alive, 0),
        (Self::Agreement, 0),
        (Self::Stop, 0),
        (Self::Over, 0),
        (Self::Failed, 1),
        (Self::Written, 1),
        (Self::Pulled, 1),
        (Self::Settled, 3),
        (Self::Partials, 1),
        (Self::PartialsTold, 2),
        (Self::Loss, 2),
        (Self::Reported, 3),
        (Self::Outcome, 4),
        (Self::Order, NUMBERS_MAX),
        (Self::Done, 1),
        (Self::Met, 1),
        (Self::Amounts, 1),
        (Self::ExpertRows, 2),
        (Self::Mail, 1),
    ];

    fn numbers(self) -> usize {
        Self::ALL[self as usize].1
    }
}

/// Something that one process tells another.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Notice {
    pub(crate) topic: Topic,
    numbers: [u64; NUMBERS_MAX],
    pub(crate) tail: Vec<u8>,
}

impl Notice {
    /// A notice about `topic` with its `numbers`.
    ///
    /// # Panics
    /// If they are not as many as the topic has.
    pub(crate) fn new(topic: Topic, numbers: &[u64]) -> Self {
        assert_eq!(numbers.len(), topic.numbers(), "{topic:?}");
        let mut all = [0; NUMBERS_MAX];
        all[..numbers.len()].copy_from_slice(numbers);
        Self { topic, numbers: all, tail: Vec::new() }
    }

    /// The same with these bytes.
    ///
    /// # Panics
    /// If they are more than [`TAIL_MAX`].
    pub(crate) fn with(self, tail: Vec<u8>) -> Self {
        assert!(tail.len() <= TAIL_MAX, "{:?} of {} bytes", self.topic, tail.len());
        Self { tail, ..self }
    }

    /// The same with `text`, cut where it is too long.
    pub(crate) fn saying(self, text: &str) -> Self {
        let end = (0..=text.len().min(TAIL_MAX)).rev().find(|end| text.is_char_boundary(*end)).unwrap_or(0);
        self.with(text.as_bytes()[..end].to_vec())
    }

    /// Its numbers: as many as its topic has.
    pub(crate) fn numbers(&self) -> &[u64] {
        &self.numbers[..self.topic.numbers()]
    }

    /// Its bytes as text; what is none is replaced.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.tail).into_owned()
    }

    /// Its bytes as words; those at the end that make no whole word are none.
    pub(crate) fn words(&self) -> impl ExactSizeIterator<Item = u32> + '_ {
        self.tail.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes))
    }

    /// The same as long words.
    pub(crate) fn long_words(&self) -> impl ExactSizeIterator<Item = u64> + '_ {
        self.tail.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes))
    }

    /// Writes it.
    ///
    /// # Errors
    /// Those of `out`.
    pub(crate) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut bytes = Vec::with_capacity(5 + 8 * NUMBERS_MAX + self.tail.len());
        let length = 1 + 8 * self.numbers().len() + self.tail.len();
        bytes.extend((length as u32).to_le_bytes());
        bytes.push(self.topic as u8);
        self.numbers().iter().for_each(|number| bytes.extend(number.to_le_bytes()));
        bytes.extend(&self.tail);
        out.write_all(&bytes)
    }

    /// Reads one.
    ///
    /// # Errors
    /// Those of `input`; `InvalidData` for what is no notice.
    pub(crate) fn read(input: &mut impl Read) -> io::Result<Self> {
        let wrong = |what: &str, value: usize| io::Error::new(io::ErrorKind::InvalidData, format!("a notice with {what} {value}"));
        let length = u32::from_le_bytes(array(input)?) as usize;
        if length == 0 || length > 1 + 8 * NUMBERS_MAX + TAIL_MAX {
            return Err(wrong("length", length));
        }
        let [number] = array(input)?;
        let (topic, count) = *Topic::ALL.get(usize::from(number)).ok_or_else(|| wrong("topic", usize::from(number)))?;
        let tail = (length - 1).checked_sub(8 * count).filter(|tail| *tail <= TAIL_MAX).ok_or_else(|| wrong("length", length))?;
        let mut notice = Self { topic, numbers: [0; NUMBERS_MAX], tail: Vec::new() };
        for number in &mut notice.numbers[..count] {
            *number = u64::from_le_bytes(array(input)?);
        }
        notice.tail.resize(tail, 0);
        input.read_exact(&mut notice.tail)?;
        Ok(notice)
    }
}

/// Which other processes are told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    All,
    /// The one of rank 0.
    First,
}

/// What takes notices to other processes. It never blocks.
pub(crate) trait Outbox: Send + Sync {
    /// Sends `notice` on its way.
    fn tell(&self, to: Audience, notice: Notice);
}

/// The next bytes, as many as the array has.
///
/// # Errors
/// Those of `input`.
pub(super) fn array<const N: usize>(input: &mut impl Read) -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    input.read_exact(&mut bytes).map(|()| bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A source that counts what was taken from it.
    struct Counted<'a>(&'a [u8], usize);

    impl Read for Counted<'_> {
        fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
            self.1 = self.1.max(out.len());
            self.0.read(out)
        }
    }

    proptest! {
        #[test]
        fn what_is_written_reads_back(topic in 0..Topic::ALL.len(), numbers: [u64; NUMBERS_MAX], tail: Vec<u8>, rest: Vec<u8>) {
            let (topic, count) = Topic::ALL[topic];
            let notice = Notice::new(topic, &numbers[..count]).with(tail);
            let mut bytes = Vec::new();
            notice.write(&mut bytes).unwrap();
            let whole = bytes.len();
            bytes.extend(rest);
            let mut input = &bytes[..];
            prop_assert_eq!(Notice::read(&mut input).unwrap(), notice);
            prop_assert_eq!(input.len(), bytes.len() - whole, "nothing beyond it is taken");
            for end in 0..whole {
                prop_assert!(Notice::read(&mut &bytes[..end]).is_err(), "cut at {}", end);
            }
        }

        #[test]
        fn noise_is_refused_or_a_notice_and_takes_little_memory(bytes in prop::collection::vec(any::<u8>(), 0..200), length in 0u32..100) {
            for head in [&[][..], &length.to_le_bytes()] {
                let noise = [head, &bytes].concat();
                let mut input = Counted(&noise, 0);
                if let Ok(notice) = Notice::read(&mut input) {
                    prop_assert!(notice.tail.len() <= noise.len());
                }
                prop_assert!(input.1 <= TAIL_MAX);
            }
        }
    }

    #[test]
    fn a_length_beyond_the_most_is_refused_before_memory_is_taken() {
        for length in [0, 2 + 8 * NUMBERS_MAX as u32 + TAIL_MAX as u32, u32::MAX] {
            let mut bytes = length.to_le_bytes().to_vec();
            bytes.extend([0; 64]);
            let refused = Notice::read(&mut &bytes[..]).unwrap_err();
            assert_eq!((refused.kind(), refused.to_string()), (io::ErrorKind::InvalidData, format!("a notice with length {length}")));
        }
        // A topic without numbers has no more bytes for it.
        let mut bytes = (2 + TAIL_MAX as u32).to_le_bytes().to_vec();
        bytes.push(Topic::Over as u8);
        assert_eq!(Notice::read(&mut &bytes[..]).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn topics_have_their_places_in_the_table() {
        Topic::ALL.iter().enumerate().for_each(|(at, (topic, _))| assert_eq!(*topic as usize, at));
        let long = Notice::new(Topic::Over, &[]).saying(&"ä".repeat(TAIL_MAX));
        assert_eq!(long.text(), "ä".repeat(TAIL_MAX / 2));
    }
}
