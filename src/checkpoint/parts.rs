//! State in several files, one of each process: `state-<rank>.bin` holds its slices of every bucket, in its own order, all parameters, then
//! all of m, then all of v. Processes write beside each other, so that no state crosses the network; a reader of any number of processes
//! puts tensors together by the flat order.

use super::engine_state::SAVE_ELEMS;
use super::format::TrainerState;
use super::owned::MEETING;
use super::part_save::PartSave;
use super::save_rate::SaveRate;
use super::state_parts::{StateParts, file_name};
use super::state_writer::StateWriter;
use super::store::hidden_of;
use super::writer::Writer;
use crate::bucket::slices::Slices;
use crate::device::Kernels;
use crate::disk::{self, Dir, TmpDir};
use crate::engine::executor::Engine;
use crate::engine::part_saves::SaveSlices;
use crate::error::{Error, Result};
use crate::planner::plan::Plan;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

/// Writes a checkpoint in `output_dir` while training stops: the processes of `engine`, which is flushed, write its state. Only its manifest
/// is missing. This process writes at most `limit` bytes in a second; 0: no limit.
///
/// # Errors
/// Errors of the disk, here or at another process; the error that ended a process.
pub(crate) fn save<D: Kernels>(
    engine: &mut Engine<D>,
    output_dir: &Dir,
    (trainer, run): (TrainerState, Map<String, Value>),
    limit: u64,
) -> Result<Writer> {
    let (step, rate) = (trainer.step, rate(engine, limit));
    let mut writer = begin(engine, output_dir, trainer, run)?;
    let state_crc32c = engine.save_slices(place(step), |engine| write(engine, writer.dir(), rate))?;
    set(engine, &mut writer, state_crc32c);
    Ok(writer)
}

/// Starts a checkpoint in `output_dir` whose state several processes write.
pub(super) fn begin<D: Kernels>(engine: &Engine<D>, output_dir: &Dir, trainer: TrainerState, run: Map<String, Value>) -> Result<Writer> {
    let mut writer = Writer::create_shared(output_dir, trainer, run)?;
    engine.table().specs().iter().for_each(|spec| writer.begin(&spec.name, &spec.shape));
    Ok(writer)
}

/// The rate of each rank of a process that may write `limit` bytes in a second; 0: no limit.
pub(super) fn rate<D: Kernels>(engine: &Engine<D>, limit: u64) -> SaveRate {
    let site = &engine.plan().site;
    SaveRate::new(limit.div_ceil((site.ranks / site.processes) as u64))
}

/// Words by which other processes find the checkpoint after `step` that this process writes.
pub(super) fn place(step: u64) -> [u64; 2] {
    [step, u64::from(std::process::id())]
}

/// Enters the files of all ranks of `engine`, with the checksums of their chunks, into `writer`.
pub(super) fn set<D: Kernels>(engine: &Engine<D>, writer: &mut Writer, state_crc32c: Vec<Vec<u32>>) {
    let layout = engine.slices().layout();
    writer.set_parts(StateParts {
        flat_elems: layout.flat_elems() as u64,
        bucket_elems: layout.bucket_elems() as u64,
        starts: engine.table().specs().iter().map(|spec| spec.offset_elems as u64).collect(),
        state_crc32c,
    });
}

/// Saves the slices of a rank other than rank 0 in its own file of the checkpoint that process 0 writes in the same output directory.
pub(crate) struct PartSaver<'a> {
    output_dir: &'a Path,
    /// Bytes that the process may write in a second; 0: no limit.
    limit: u64,
    /// The save that was begun.
    running: Option<PartSave>,
}

impl<'a> PartSaver<'a> {
    /// A saver into `output_dir` of a process that may write `limit` bytes in a second; 0: no limit.
    pub(crate) fn new(output_dir: &'a Path, limit: u64) -> Self {
        Self { output_dir, limit, running: None }
    }

    /// The directory of the checkpoint that process 0 (process id `pid`) writes for `step`.
    fn dir(&self, [step, pid]: [u64; 2]) -> Result<Dir> {
        Dir::open(self.output_dir)?.open_dir(hidden_of(step, pid))
    }
}

impl<D: Kernels> SaveSlices<D> for PartSaver<'_> {
    fn save(&mut self, engine: &mut Engine<D>, place: [u64; 2]) -> Result<Vec<u32>> {
        let rate = rate(engine, self.limit);
        write(engine, &self.dir(place)?, rate)
    }

    /// A rank without memory for a save beside steps saves its slices at once, and the other ranks wait for it.
    fn begin(&mut self, engine: &mut Engine<D>, place: [u64; 2]) -> Result<()> {
        let (dir, rate) = (self.dir(place)?, rate(engine, self.limit));
        self.running = Some(if engine.save_obstacle().is_some() {
            engine.flush()?;
            PartSave::Written(write(engine, &dir, rate)?)
        } else {
            PartSave::start(engine, (dir, rate), Engine::begin_save_of_own_slices)?
        });
        Ok(())
    }

    fn is_written(&mut self) -> Result<bool> {
        self.running.as_mut().map_or(Ok(true), PartSave::is_written)
    }

    fn finish(&mut self) -> Result<Vec<u32>> {
        let running = self.running.take().ok_or_else(|| Error::resource("save a part of a checkpoint", "no save was begun"))?;
        running.join()
    }
}

/// Writes this rank's file into `dir`, and has it on disk; the checksums of its chunks.
fn write<D: Kernels>(engine: &mut Engine<D>, dir: &Dir, rate: SaveRate) -> Result<Vec<u32>> {
    let (rank, elems, arrays) = (engine.slices().rank(), engine.slices().elems(), engine.plan().optimizer().arrays());
    let (mut file, mut buffer) = (StateWriter::create(dir, &file_name(rank), rate)?, Vec::new());
    file.reserve(arrays.bytes(elems) as u64)?;
    for part in arrays.parts() {
        for start in (0..elems).step_by(SAVE_ELEMS) {
            buffer.resize(SAVE_ELEMS.min(elems - start), 0.0);
            engine.read_slices(part, start, &mut buffer)?;
            arrays[part].stored(&buffer, |bytes| file.append(bytes))?;
        }
    }
    let written = file.finish()?;
    dir.sync()?;
    Ok(written.crc32c)
}

/// Bytes of the largest file that `process` writes of a checkpoint by `plan`.
pub(crate) fn part_bytes(plan: &Plan, process: usize) -> u64 {
    let each = plan.site.ranks / plan.site.processes;
    let elems = |rank| Slices::new(plan.placement.layout.clone(), rank, plan.site.ranks).elems();
    let most = (process * each..(process + 1) * each).map(elems).max().unwrap_or(0);
    plan.optimizer().arrays().bytes(most) as u64
}

/// A directory that shows that several processes have one file system, as checkpoints of theirs need. It goes when this is dropped, or when
/// remains of dead runs do.
pub(crate) struct SharedFolderMarker(TmpDir);

impl SharedFolderMarker {
    /// Creates a meeting place in `output_dir`; returns it with the name by which other processes find it.
    ///
    /// # Errors
    /// Errors of the disk.
    pub(crate) fn create(output_dir: &Dir) -> Result<(Self, String)> {
        let name = hidden_of(0, u64::from(std::process::id()));
        super::store::clean(output_dir)?;
        let place = Self(TmpDir::create(output_dir, &name)?);
        let sign = format!("{:?}", std::time::SystemTime::now());
        place.0.dir().write_file(MEETING, sign.as_bytes())?;
        Ok((place, format!("{name}/{sign}")))
    }

    /// Looks in `output_dir` for the place created by another process, which must use the same output directory.
    ///
    /// # Errors
    /// `Resource` when it is not there within a few seconds: another machine's file system may be late.
    pub(crate) fn find(output_dir: &Path, sought: &str, host: &str) -> Result<()> {
        let (name, sign) = sought.split_once('/').unwrap_or((sought, ""));
        if !disk::is_plain_file_name(name) {
            return Err(Error::resource("look for the run's directory", "process 0 names none"));
        }
        let (file, deadline): (PathBuf, _) = (output_dir.join(name).join(MEETING), Instant::now() + Duration::from_secs(5));
        while disk::read_if_present(&file, 1 << 12)?.as_deref() != Some(sign.as_bytes()) {
            if Instant::now() > deadline {
                let cause =
                    format!("it is not the directory that {host} uses; all processes must save to one directory on a shared file system");
                return Err(Error::resource(format!("use --output-dir {}", output_dir.display()), cause));
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }

    /// Writes a file of a bounded size where `process` will write its parts of checkpoints, beside those of all, and removes it again. A
    /// line for people about limits of that file system.
    ///
    /// # Errors
    /// Errors of the disk.
    pub(crate) fn try_writing(output_dir: &Path, sought: &str, process: usize) -> Result<Option<String>> {
        let name = sought.split_once('/').map_or(sought, |(name, _)| name);
        let (dir, probe) = (Dir::open(&output_dir.join(name))?, format!("probe-{process}"));
        let written = dir.write_file(&probe, &[0; PROBE_BYTES]).and_then(|_| dir.unsynced());
        let removed = dir.kind(&probe).and_then(|kind| kind.map_or(Ok(()), |_| dir.remove(&probe)));
        written.and_then(|line| removed.map(|()| line))
    }
}

/// More than any file system writes without asking for a block.
const PROBE_BYTES: usize = 64 << 10;
