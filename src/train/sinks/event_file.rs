//! TensorBoard's event file: scalars of every step, under the tags that Hugging Face writes and some of our own.
//!
//! A file is records; a record is its length, the length's checksum, an `Event`, and that one's checksum. An `Event` is a message of
//! protocol buffers with five fields that matter here (tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto), too few
//! for a library.

use super::{SinkKind, SinkStart, StepSink};
use crate::config::options::ReportTo;
use crate::disk::{Dir, FileKind, OutFile, OwnMark, OwnedName};
use crate::error::{Error, Result};
use crate::hardware::topology::host_name;
use crate::metrics::{EvalLine, StepMetrics};
use crate::train::observer::Observer;
use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Its folder in the output directory: empty, or with a file of events in it.
const EVENTS: OwnedName = OwnedName { pattern: "tb", kind: "folder of events", mark: OwnMark::Folder(has_events) };
pub(super) static SINK: SinkKind =
    SinkKind { name: &EVENTS, contents: "events for TensorBoard", logger: Some(ReportTo::Tensorboard), open };
const EVENTS_PREFIX: &str = "events.out.tfevents.";
/// The version record that TensorBoard's readers expect first.
const VERSION: &[u8] = b"brain.Event:2";

struct EventFile {
    file: OutFile,
    record: Vec<u8>,
}

fn open(start: &SinkStart, _: &mut dyn Observer) -> Result<Box<dyn StepSink>> {
    Ok(Box::new(EventFile::create(start.dir, start.step)?))
}

impl EventFile {
    /// Creates a file in the folder of `dir` that continues after `step`; TensorBoard drops later steps of earlier files.
    ///
    /// # Errors
    /// `Io` when the file cannot be written, `Format` when the folder's name is taken by something else.
    fn create(dir: &Dir, step: u64) -> Result<Self> {
        let folder = match dir.kind(EVENTS.pattern)? {
            None => dir.create_dir(EVENTS.pattern)?,
            Some(FileKind::Dir) => dir.open_dir(EVENTS.pattern)?,
            Some(_) => return Err(Error::format(dir.join(EVENTS.pattern), "not a directory")),
        };
        let now = since_1970();
        let host = host_name().unwrap_or_else(|| "host".into());
        let name = format!("{EVENTS_PREFIX}{}.{host}.{}.{}", now.as_secs(), std::process::id(), now.subsec_nanos());
        let mut events = Self { file: folder.create_file(name)?, record: Vec::with_capacity(1024) };
        events.append(&Message::event(now).bytes(3, VERSION))?;
        if step > 0 {
            // A session start invalidates all earlier events from its step on.
            events.append(&Message::event(now).varint(2, step + 1).bytes(7, &Message::default().varint(1, 1).0))?;
        }
        Ok(events)
    }

    fn append(&mut self, event: &Message) -> Result<()> {
        let length = (event.0.len() as u64).to_le_bytes();
        self.record.clear();
        self.record.extend(length);
        self.record.extend(masked_crc(&length).to_le_bytes());
        self.record.extend(&event.0);
        self.record.extend(masked_crc(&event.0).to_le_bytes());
        self.file.write(&self.record)
    }
}

impl StepSink for EventFile {
    fn kind(&self) -> &'static SinkKind {
        &SINK
    }

    fn step(&mut self, metrics: &StepMetrics) -> Result<()> {
        let mut scalars = scalars(metrics).to_vec();
        scalars.extend(metrics.objective.iter().flat_map(|line| line.numbers()).map(|(name, number)| (name, Some(number))));
        self.append(&event(since_1970(), metrics.step, &scalars))
    }

    fn evaluation(&mut self, line: &EvalLine) -> Result<()> {
        let metrics = &line.metrics;
        let numbers = metrics.objective.iter().flat_map(|line| line.numbers());
        let numbers: Vec<_> = numbers.map(|(name, number)| (format!("eval/{name}"), number)).collect();
        let mut scalars = vec![("eval/loss", Some(metrics.eval_loss)), ("eval/perplexity", Some(metrics.eval_perplexity))];
        scalars.extend(numbers.iter().map(|(name, number)| (name.as_str(), Some(*number))));
        self.append(&event(since_1970(), metrics.step, &scalars))
    }
}

fn has_events(folder: &Dir) -> Result<bool> {
    let names = folder.names()?;
    let is_events = |name: &OsString| {
        let file = OwnedName { pattern: "", kind: "file of events", mark: OwnMark::File(begins_with_version) };
        Ok(name.to_string_lossy().starts_with(EVENTS_PREFIX) && file.is_own(folder, name)?)
    };
    let found: Result<Vec<bool>> = names.iter().map(is_events).collect();
    Ok(names.is_empty() || found?.contains(&true))
}

/// The first record holds nothing but a time and the version.
fn begins_with_version(mut file: File) -> io::Result<bool> {
    let version = Message::event(Duration::ZERO).bytes(3, VERSION);
    let mut record = vec![0; 12 + version.0.len()];
    if let Err(e) = file.read_exact(&mut record) {
        return if e.kind() == io::ErrorKind::UnexpectedEof { Ok(false) } else { Err(e) };
    }
    let is_length = record[..8] == (version.0.len() as u64).to_le_bytes();
    Ok(is_length && record[8..12] == masked_crc(&record[..8]).to_le_bytes() && record.ends_with(VERSION))
}

fn since_1970() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// `scalars` of `step`; `None` is left out.
fn event(now: Duration, step: u64, scalars: &[(&str, Option<f64>)]) -> Message {
    let scalars = scalars.iter().filter_map(|&(tag, value)| Some((tag, value?)));
    let value = |(tag, value): (&str, f64)| Message::default().bytes(1, tag.as_bytes()).float(2, value as f32);
    let summary = scalars.map(value).fold(Message::default(), |summary, value| summary.bytes(1, &value.0));
    Message::event(now).varint(2, step).bytes(5, &summary.0)
}

/// The scalars shown for a step.
fn scalars(m: &StepMetrics) -> [(&'static str, Option<f64>); 16] {
    let counts = &m.counts;
    [
        ("train/loss", Some(f64::from(m.loss))),
        ("train/grad_norm", m.grad_norm),
        ("train/learning_rate", Some(m.learning_rate)),
        ("train/epoch", Some(m.epoch)),
        ("train/loss_scale", Some(f64::from(m.loss_scale))),
        ("speed/step_ms", Some(m.step_ms)),
        ("speed/tokens_per_second", Some(m.tokens_per_second)),
        ("speed/model_tflops", Some(m.model_tflops)),
        ("offload/exposed_optimizer_ms", Some(m.exposed_cpu_ms)),
        ("offload/exposed_copies_ms", Some(m.exposed_transfer_ms)),
        ("offload/exposed_peers_ms", Some(m.exposed_peer_ms).filter(|_| m.exposed_peer_rank.is_some())),
        ("offload/speculated", Some(counts.speculated as f64)),
        ("offload/rolled_back", Some(counts.rolled_back as f64)),
        ("experts/largest_over_mean", m.expert_load.map(|load| load.largest_over_mean)),
        ("experts/unused_share", m.expert_load.map(|load| load.unused_fraction)),
        ("memory/resident_gib", Some(m.rss_bytes as f64 / (1u64 << 30) as f64)),
    ]
}

/// TensorFlow's checksum of a record, turned and shifted so that the checksum of data that holds checksums is no weaker.
fn masked_crc(data: &[u8]) -> u32 {
    crc32c::crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// A message of protocol buffers, as it is written.
#[derive(Debug, Default)]
struct Message(Vec<u8>);

impl Message {
    /// An `Event` with its time.
    fn event(now: Duration) -> Self {
        Self::default().key(1, 1).raw(&now.as_secs_f64().to_le_bytes())
    }

    fn raw(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    fn number(mut self, mut value: u64) -> Self {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
        self
    }

    /// Number of a field, and how its value is written: 0 as a number, 1 and 5 as eight and four bytes, 2 as bytes behind their length.
    fn key(self, field: u64, wire: u64) -> Self {
        self.number(field << 3 | wire)
    }

    fn varint(self, field: u64, value: u64) -> Self {
        self.key(field, 0).number(value)
    }

    fn bytes(self, field: u64, value: &[u8]) -> Self {
        self.key(field, 2).number(value.len() as u64).raw(value)
    }

    fn float(self, field: u64, value: f32) -> Self {
        self.key(field, 5).raw(&value.to_le_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::protocol::coordinator::Counts;
    use std::fs;

    fn metrics(grad_norm: Option<f64>) -> StepMetrics {
        StepMetrics {
            objective: None,
            step: 300,
            epoch: 0.25,
            loss: 2.5,
            grad_norm,
            learning_rate: 1e-3,
            loss_scale: 1.0,
            verdict: "commit",
            step_ms: 10.0,
            replan_ms: 0.0,
            save_wait_ms: 0.0,
            tokens_per_second: 4096.0,
            model_tflops: 0.5,
            counts: Counts { speculated: 4, ..Counts::default() },
            exposed_cpu_ms: 0.0,
            exposed_transfer_ms: 0.125,
            exposed_peer_ms: 0.0,
            exposed_peer_rank: None,
            d2h_bytes: 0,
            h2d_bytes: 0,
            expert_load: None,
            rss_bytes: 3 << 29,
        }
    }

    /// TensorBoard 2.21 wrote these bytes for the same two events.
    #[test]
    fn a_record_is_tensorboards_to_the_byte() {
        let now = Duration::from_millis(1_700_000_000_500);
        let scalar = Message::default().bytes(1, b"train/loss").float(2, 2.5);
        let events =
            [Message::event(now).bytes(3, VERSION), Message::event(now).varint(2, 300).bytes(5, &Message::default().bytes(1, &scalar.0).0)];
        let dir = tempfile::tempdir().unwrap();
        let file = Dir::open(dir.path()).unwrap().create_file("events").unwrap();
        let mut written = EventFile { file, record: vec![] };
        events.iter().for_each(|event| written.append(event).unwrap());
        assert_eq!(fs::read(dir.path().join("events")).unwrap(), include_bytes!("../../../tests/golden/tensorboard/events"));
    }

    #[test]
    fn a_norm_that_is_not_finite_is_left_out() {
        let has_norm =
            |metrics: StepMetrics| String::from_utf8_lossy(&event(Duration::ZERO, 1, &scalars(&metrics)).0).contains("train/grad_norm");
        assert!(has_norm(metrics(Some(1.5))) && !has_norm(metrics(None)));
    }

    #[test]
    fn a_folder_is_known_by_the_events_in_it() {
        let tmp = tempfile::tempdir().unwrap();
        let (dir, folder) = (Dir::open(tmp.path()).unwrap(), tmp.path().join("tb"));
        let own = || EVENTS.is_own(&dir, "tb").unwrap();
        fs::create_dir(&folder).unwrap();
        assert!(own());
        fs::write(folder.join("notes"), "brain.Event:2").unwrap();
        assert!(!own());
        let mut events = include_bytes!("../../../tests/golden/tensorboard/events").to_vec();
        for (at, is_own) in [(events.len(), true), (0, false), (9, false), (20, true), (30, false)] {
            let flipped = events.get_mut(at).map(|byte| std::mem::replace(byte, !*byte));
            fs::write(folder.join("events.out.tfevents.1.host.2.3"), &events).unwrap();
            assert_eq!(own(), is_own, "{at}");
            flipped.iter().for_each(|byte| events[at] = *byte);
        }
        fs::write(folder.join("events.out.tfevents.1.host.2.3"), "").unwrap();
        assert!(own(), "its first record was not yet written");
    }

    #[test]
    fn a_file_in_the_folders_place_is_refused_and_a_link_not_followed() {
        let tmp = tempfile::tempdir().unwrap();
        let dir = Dir::open(tmp.path()).unwrap();
        fs::create_dir(tmp.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("elsewhere", tmp.path().join(EVENTS.pattern)).unwrap();
        assert!(EventFile::create(&dir, 0).is_err());
        assert_eq!(fs::read_dir(tmp.path().join("elsewhere")).unwrap().count(), 0);
        fs::remove_file(tmp.path().join(EVENTS.pattern)).unwrap();
        EventFile::create(&dir, 0).unwrap();
        assert!(EVENTS.is_own(&dir, "tb").unwrap());
        EventFile::create(&dir, 7).unwrap();
        assert_eq!(fs::read_dir(tmp.path().join(EVENTS.pattern)).unwrap().count(), 2);
    }
}
