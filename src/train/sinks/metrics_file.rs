//! `metrics.jsonl`: facts of the run in the first line, then one line a step, and one an evaluation; kept through resumes, damage and
//! removal. A run that goes on writes its facts before its own lines.

use super::{SinkKind, SinkStart, StepSink};
use crate::disk::{Dir, OwnMark, OwnedName};
use crate::error::{Error, Result};
use crate::metrics::{EvalLine, StepMetrics};
use crate::train::observer::Observer;
use std::fs::File;
use std::io::{self, BufRead, BufReader, BufWriter, Read, Seek, Write};
use std::path::{Path, PathBuf};

/// The file in the output directory: one of its first lines is a line of metrics or facts.
pub(crate) const METRICS: OwnedName = OwnedName { pattern: "metrics.jsonl", kind: "log", mark: OwnMark::File(has_own_line) };
/// Every run has it.
pub(super) static SINK: SinkKind = SinkKind { name: &METRICS, contents: "metrics", logger: None, open };
/// A longer line is none of ours.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// Lines of which one must be a line of metrics or facts.
const LINES_JUDGED: usize = 100;

struct MetricsFile {
    path: PathBuf,
    file: File,
    /// Begins with a line of facts until that is written.
    line: Vec<u8>,
}

fn open(start: &SinkStart, observer: &mut dyn Observer) -> Result<Box<dyn StepSink>> {
    let (metrics, warnings) = MetricsFile::open(start.dir, start.step, start.facts)?;
    for line in &warnings {
        observer.warn(line);
    }
    Ok(Box::new(metrics))
}

impl MetricsFile {
    /// Opens it in `dir` to go on after `step`, with `facts` before the first line: a run that never begins leaves none. Later lines, which
    /// a resumed run will write again, are dropped. So are lines that are not metrics. The returned lines report these and steps that
    /// are missing. The last line may have been cut short by the end of the run: it does not count.
    ///
    /// It is written anew beside and renamed: a run that dies meanwhile must not take the earlier steps with it.
    ///
    /// # Errors
    /// `Io` when the file cannot be read or written, `Format` when the name is not a regular file's.
    fn open(dir: &Dir, step: u64, facts: &impl serde::Serialize) -> Result<(Self, Vec<String>)> {
        let path = dir.join(METRICS.pattern);
        let (earlier, (new, beside)) = (dir.open_log(METRICS.pattern)?, dir.create_beside(METRICS.pattern)?);
        let file = new.into_file();
        let copied = match earlier {
            Some(earlier) => copy_until(step, earlier, &file).map(|copied| copied.in_words(step, &path)),
            None => Ok(vec![]),
        };
        let message =
            copied.map_err(|e| Error::io("copy", &path, e)).and_then(|message| dir.rename(&beside, METRICS.pattern).map(|()| message));
        // The error that ended the copy is the one to report.
        let message = message.inspect_err(|_| drop(dir.remove(&beside)))?;
        let mut this = Self { path, file, line: Vec::with_capacity(1024) };
        this.add_line(facts)?;
        Ok((this, message))
    }

    /// Appends one line.
    ///
    /// # Errors
    /// `Io` when it cannot be written.
    fn write(&mut self, metrics: &impl serde::Serialize) -> Result<()> {
        self.add_line(metrics)?;
        self.file.write_all(&self.line).map_err(|e| Error::io("write", &self.path, e))?;
        self.line.clear();
        Ok(())
    }

    fn add_line(&mut self, value: &impl serde::Serialize) -> Result<()> {
        serde_json::to_writer(&mut self.line, value).map_err(|e| Error::format(&self.path, e))?;
        self.line.push(b'\n');
        Ok(())
    }
}

impl StepSink for MetricsFile {
    fn kind(&self) -> &'static SinkKind {
        &SINK
    }

    fn step(&mut self, metrics: &StepMetrics) -> Result<()> {
        self.write(metrics)
    }

    fn evaluation(&mut self, line: &EvalLine) -> Result<()> {
        self.write(line)
    }

    fn sync(&self) -> Result<()> {
        self.file.sync_data().map_err(|e| Error::io("fsync", &self.path, e))
    }

    fn restore(&mut self, dir: &Dir) -> Result<bool> {
        if self.is_in(dir)? {
            return Ok(false);
        }
        let (copy, beside) = dir.create_beside(METRICS.pattern)?;
        let (mut copy, path) = (copy.into_file(), dir.join(METRICS.pattern));
        let copied = self.file.rewind().and_then(|()| io::copy(&mut self.file, &mut copy));
        copied.map_err(|e| Error::io("copy", &path, e)).inspect_err(|_| drop(dir.remove(&beside)))?;
        if dir.kind(METRICS.pattern)?.is_some() && !METRICS.is_own(dir, METRICS.pattern)? {
            dir.set_aside(METRICS.pattern)?;
        }
        dir.rename(beside, METRICS.pattern)?;
        (self.file, self.path) = (copy, path);
        Ok(true)
    }

    fn is_in(&self, dir: &Dir) -> Result<bool> {
        dir.holds(METRICS.pattern, &self.file)
    }
}

pub(crate) enum MetricsLine {
    /// Facts of a run that goes on after this step.
    Facts(u64),
    /// Metrics of this step.
    Step(u64),
    /// Nothing that can be understood.
    Damaged,
    /// The beginning of a line, and the end of the file.
    CutShort,
}

/// Faults of a log that goes on.
#[derive(Default)]
struct CopiedLog {
    damaged: u64,
    /// The last step of which there is a line.
    last: u64,
}

impl CopiedLog {
    fn in_words(&self, step: u64, path: &Path) -> Vec<String> {
        let path = path.display();
        let damaged = match self.damaged {
            0 => None,
            1 => Some(format!("{path}: 1 line is damaged and was left out")),
            count => Some(format!("{path}: {count} lines are damaged and were left out")),
        };
        let missing = (self.last < step).then(|| format!("{path}: lines of steps {} to {step} are missing", self.last + 1));
        damaged.into_iter().chain(missing).collect()
    }
}

/// Copies the lines up to `step`. No more than one line is in memory.
fn copy_until(step: u64, from: File, to: &File) -> io::Result<CopiedLog> {
    let (mut from, mut to, mut line, mut copied) = (BufReader::new(from), BufWriter::new(to), vec![], CopiedLog::default());
    while let Some(read) = read_line(&mut from, &mut line)? {
        match read {
            MetricsLine::Step(of) if of <= step => {
                copied.last = copied.last.max(of);
                to.write_all(&line)?;
            }
            MetricsLine::Facts(from) if from < step => to.write_all(&line)?,
            MetricsLine::Step(_) | MetricsLine::Facts(_) | MetricsLine::CutShort => {}
            MetricsLine::Damaged => copied.damaged += 1,
        }
    }
    to.flush()?;
    Ok(copied)
}

/// Whether a line of facts, of a step or of an evaluation is among the first.
fn has_own_line(file: File) -> io::Result<bool> {
    let (mut from, mut line) = (BufReader::new(file), vec![]);
    for _ in 0..LINES_JUDGED {
        match read_line(&mut from, &mut line)? {
            None => return Ok(false),
            Some(MetricsLine::Facts(_)) => return Ok(true),
            Some(MetricsLine::Step(_)) if is_own_step(&line) => return Ok(true),
            Some(_) => {}
        }
    }
    Ok(false)
}

/// Whether the line has fields that only this program writes.
fn is_own_step(line: &[u8]) -> bool {
    let line: Option<serde_json::Value> = serde_json::from_slice(line).ok();
    line.is_some_and(|line| ["verdict", "eval_tokens"].iter().any(|key| line.get(key).is_some()))
}

/// Reads the next line into `line`, with its end; `None` at the end of the file.
///
/// # Errors
/// The file's.
pub(crate) fn read_line(from: &mut impl BufRead, line: &mut Vec<u8>) -> io::Result<Option<MetricsLine>> {
    line.clear();
    if from.take(LINE_BYTES_MAX).read_until(b'\n', line)? == 0 {
        return Ok(None);
    }
    if line.last() == Some(&b'\n') {
        return Ok(Some(meaning(line).unwrap_or(MetricsLine::Damaged)));
    }
    let was_long = line.len() as u64 == LINE_BYTES_MAX;
    from.skip_until(b'\n')?;
    Ok(Some(if was_long { MetricsLine::Damaged } else { MetricsLine::CutShort }))
}

fn meaning(line: &[u8]) -> Option<MetricsLine> {
    let line: serde_json::Value = serde_json::from_slice(line).ok()?;
    match line.get("facts") {
        Some(facts) => facts.get("from_step")?.as_u64().map(MetricsLine::Facts),
        None => line.get("step")?.as_u64().map(MetricsLine::Step),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::fs;

    fn dir() -> (tempfile::TempDir, Dir, PathBuf) {
        let tmp = tempfile::tempdir().unwrap();
        let (dir, path) = (Dir::open(tmp.path()).unwrap(), tmp.path().join(METRICS.pattern));
        (tmp, dir, path)
    }

    fn facts(from_step: u64) -> Value {
        json!({"facts": {"from_step": from_step}})
    }

    fn text(path: &Path) -> String {
        fs::read_to_string(path).unwrap()
    }

    #[test]
    fn reopening_drops_the_lines_that_will_be_written_again() {
        let (tmp, dir, path) = dir();
        fs::write(&path, "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n{\"step\":4,\"lo").unwrap();
        let (_, message) = MetricsFile::open(&dir, 2, &facts(2)).unwrap();
        assert_eq!((text(&path).as_str(), message), ("{\"step\":1}\n{\"step\":2}\n", vec![]));
        assert_eq!(fs::read_dir(tmp.path()).unwrap().count(), 1);
    }

    #[test]
    fn facts_come_with_the_first_line_and_stay_with_the_lines_behind_them() {
        let (_tmp, dir, path) = dir();
        let (mut metrics, _) = MetricsFile::open(&dir, 0, &facts(0)).unwrap();
        assert_eq!(text(&path), "", "a run that never began says nothing");
        (1..=4).for_each(|step| metrics.write(&json!({"step": step})).unwrap());
        let part = |from: u64, until: u64| {
            let steps: String = (from + 1..=until).map(|step| format!("{{\"step\":{step}}}\n")).collect();
            format!("{}\n{steps}", facts(from))
        };
        assert_eq!(text(&path), part(0, 4));
        for (from, until) in [(3, 3), (3, 5), (3, 4), (2, 3)] {
            let (mut metrics, message) = MetricsFile::open(&dir, from, &facts(from)).unwrap();
            (from + 1..=until).for_each(|step| metrics.write(&json!({"step": step})).unwrap());
            let whole = if until > from { part(0, from) + &part(from, until) } else { part(0, from) };
            assert_eq!((text(&path), message), (whole, vec![]));
        }
    }

    #[test]
    fn damaged_lines_go_and_are_counted() {
        let (_tmp, dir, path) = dir();
        let long = vec![b' '; LINE_BYTES_MAX as usize + 3];
        let damage: [&[u8]; 6] = [b"\xff", b"{\"step\":1,\"x\":\"\xff\"}", b"", b"{\"step\":-1}", b"{\"step\":1", &long];
        let lines = damage.iter().flat_map(|line| [b"{\"step\":1}", *line]).collect::<Vec<_>>();
        fs::write(&path, lines.join(&b'\n')).unwrap();
        let (_, message) = MetricsFile::open(&dir, 9, &facts(9)).unwrap();
        // Of the last line the end is missing, but it is too long to be one that was cut short.
        assert_eq!(text(&path), "{\"step\":1}\n".repeat(6));
        let [damaged, missing] = message.try_into().unwrap();
        assert!(damaged.ends_with("metrics.jsonl: 6 lines are damaged and were left out"), "{damaged}");
        assert!(missing.ends_with("metrics.jsonl: lines of steps 2 to 9 are missing"), "{missing}");
    }

    #[test]
    fn a_file_that_was_removed_or_replaced_is_made_again() {
        let (tmp, dir, path) = dir();
        fs::write(&path, "{\"step\":1}\n").unwrap();
        let (mut metrics, _) = MetricsFile::open(&dir, 1, &facts(1)).unwrap();
        assert!(!metrics.restore(&dir).unwrap());
        metrics.file.write_all(b"{\"step\":2}\n").unwrap();
        fs::remove_file(&path).unwrap();
        assert!(metrics.restore(&dir).unwrap() && !metrics.restore(&dir).unwrap());
        metrics.file.write_all(b"{\"step\":3}\n").unwrap();
        assert_eq!(text(&path), "{\"step\":1}\n{\"step\":2}\n{\"step\":3}\n");
        fs::write(tmp.path().join("victim"), "mine").unwrap();
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("victim", &path).unwrap();
        assert!(metrics.restore(&dir).unwrap());
        assert_eq!((text(&path).lines().count(), text(&tmp.path().join("victim"))), (3, "mine".into()));
        assert!(tmp.path().join("metrics.jsonl.foreign-1").is_symlink());
    }

    #[test]
    fn files_beside_the_log_stay_and_a_pipe_in_its_place_does_not_block() {
        let (tmp, dir, path) = dir();
        let (victim, beside) = (tmp.path().join("victim"), tmp.path().join(format!(".metrics.jsonl.tmp-{}", std::process::id())));
        fs::write(&victim, "mine").unwrap();
        std::os::unix::fs::symlink(&victim, &beside).unwrap();
        MetricsFile::open(&dir, 0, &facts(0)).unwrap();
        assert!(text(&victim) == "mine" && beside.is_symlink());
        fs::remove_file(&path).unwrap();
        nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let refused = MetricsFile::open(&dir, 0, &facts(0)).err().unwrap().to_string();
        assert!(refused.ends_with("metrics.jsonl: not a regular file"), "{refused}");
    }

    #[test]
    fn a_log_is_known_by_its_lines_and_another_trainers_is_none() {
        let (_tmp, dir, path) = dir();
        let own = |content: String| {
            fs::write(&path, content).unwrap();
            METRICS.is_own(&dir, "metrics.jsonl").unwrap()
        };
        let step = json!({"step": 1, "loss": 2.0, "verdict": "commit"});
        let own_logs = [facts(0).to_string() + "\n", format!("{step}\n"), format!("\0\0\n\n{step}\n"), String::new()];
        assert_eq!(own_logs.map(own), [true; 4]);
        let trainer = json!({"loss": 2.0, "learning_rate": 1e-3, "epoch": 0.5, "step": 1});
        let foreign = ["text".into(), format!("{trainer}\n"), "\n".repeat(200) + &format!("{step}\n"), "{\"facts\": 1}\n".into()];
        assert_eq!(foreign.map(own), [false; 4]);
    }
}
