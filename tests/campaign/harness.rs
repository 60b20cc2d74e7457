//! Runs the program on a model so small that a run takes a tenth of a second, always with a timeout.

use crate::record::{Failure, Record};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::process::ExitStatusExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A campaign of the list.
pub struct Campaign {
    /// Identifier in the list.
    pub id: &'static str,
    /// The actions and the required properties.
    pub what: &'static str,
    /// Number of runs of the complete campaign.
    pub runs: u64,
    /// Number of runs that show that the campaign itself works.
    pub smoke: u64,
    /// Prepares the campaign. An error is the reason that it cannot run here.
    pub start: fn(&Harness) -> Result<Trial, String>,
}

/// Performs one run. An error is a failure of the program.
pub type Trial = Box<dyn FnMut(&Harness, &mut Turn) -> Result<(), String>>;

/// Parameters and results of a run.
pub struct Turn {
    /// Index of the run, starting at 0.
    pub index: u64,
    /// Random numbers of this run alone, so that it can be repeated without earlier runs.
    pub rng: ChaCha8Rng,
    /// Kind of the run, for the statistics.
    pub kind: String,
    /// Number of tries in this run, if it makes several.
    pub tries: u64,
    /// Nothing is left to try: this run does not count, and it is the last.
    pub over: bool,
}

impl Turn {
    /// A number below `bound`.
    pub fn pick(&mut self, bound: u64) -> u64 {
        self.rng.next_u64() % bound
    }

    /// One of `choices`.
    pub fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.pick(choices.len() as u64) as usize]
    }
}

/// Timeout of every process, far above the usual time.
const PATIENCE: Duration = Duration::from_secs(120);

/// The device of all runs: `SUPEROFFLOAD_DEVICE`, else the CPU.
pub fn device() -> String {
    std::env::var("SUPEROFFLOAD_DEVICE").unwrap_or_else(|_| "cpu".into())
}

/// Settings of every run. Flags take precedence.
const SETTINGS: &str = include_str!("../run.toml");

/// A llama with six thousand parameters and byte tokens.
const CONFIG: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 32, "vocab_size": 256, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true
}"#;

/// The program, and a directory with `run.toml`, `model/config.json` and `data.txt`. Runs write into directories next to them.
pub struct Harness {
    pub program: PathBuf,
    pub seed: u64,
    /// A smoke test: long runs may be shortened.
    pub is_smoke: bool,
    dir: tempfile::TempDir,
}

impl Harness {
    pub fn new(program: Option<PathBuf>, seed: u64, is_smoke: bool) -> Result<Self, String> {
        let program = program.unwrap_or_else(|| env!("CARGO_BIN_EXE_superoffload").into());
        let program = program.canonicalize().map_err(|e| format!("--program {}: {e}", program.display()))?;
        let harness = Self { program, seed, is_smoke, dir: tempfile::tempdir().map_err(|e| e.to_string())? };
        harness.write("model/config.json", CONFIG);
        harness.write("data.txt", (0..400).map(|i| format!("line {i} squared is {}\n", i * i)).collect::<String>());
        harness.settings("run.toml", "model", "data.txt", "");
        Ok(harness)
    }

    /// Performs the runs of one campaign and counts results. Of several `jobs`, each has a thread and a directory, and performs every
    /// `jobs`-th run.
    pub fn campaign(&self, campaign: &Campaign, runs: Range<u64>, most: Option<Duration>, jobs: usize) -> Result<Record, String> {
        let begin = Instant::now();
        let others: Vec<Self> =
            (1..jobs).map(|_| Self::new(Some(self.program.clone()), self.seed, self.is_smoke)).collect::<Result<_, _>>()?;
        let records: Vec<Record> = std::thread::scope(|scope| {
            let of_job = |(job, harness): (usize, Self)| {
                let runs = runs.clone().skip(job + 1).step_by(jobs);
                scope.spawn(move || harness.runs_of(campaign, runs, most))
            };
            let spawned: Vec<_> = others.into_iter().enumerate().map(of_job).collect();
            let first = self.runs_of(campaign, runs.clone().step_by(jobs), most);
            std::iter::once(first).chain(spawned.into_iter().map(|job| job.join().expect("panics are caught"))).collect()
        });
        let mut record = records.into_iter().reduce(Record::and).expect("at least one job");
        record.seconds = begin.elapsed().as_secs_f64();
        Ok(record)
    }

    /// Performs the given runs of the campaign sequentially.
    fn runs_of(&self, campaign: &Campaign, runs: impl Iterator<Item = u64>, most: Option<Duration>) -> Record {
        let begin = Instant::now();
        let mut record = Record::new(self, campaign);
        let started = catch_unwind(AssertUnwindSafe(|| (campaign.start)(self))).unwrap_or_else(|panic| Err(output(&*panic)));
        match started {
            Err(why) => record.not_run = Some(why),
            Ok(mut trial) => {
                for index in runs {
                    if most.is_some_and(|most| begin.elapsed() > most) || !self.turn(&mut trial, index, &mut record) {
                        break;
                    }
                }
            }
        }
        record
    }

    /// Performs one run. Returns false if nothing was left to try.
    fn turn(&self, trial: &mut Trial, index: u64, record: &mut Record) -> bool {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        rng.set_stream(index);
        let mut turn = Turn { index, rng, kind: String::new(), tries: 1, over: false };
        let result = catch_unwind(AssertUnwindSafe(|| trial(self, &mut turn)));
        if turn.over {
            record.is_over = true;
            return false;
        }
        record.runs += turn.tries;
        *record.kinds.entry(turn.kind.clone()).or_default() += turn.tries;
        let message = match result {
            Ok(Ok(())) => return true,
            Ok(Err(message)) => message,
            Err(panic) => format!("the campaign panicked: {}", output(&*panic)),
        };
        record.failures.push(Failure { index, kind: turn.kind, message });
        true
    }

    /// CPUs that a run may use.
    pub fn cpus(&self) -> u64 {
        std::thread::available_parallelism().map_or(1, |cpus| cpus.get() as u64)
    }

    /// Whether `train` has this flag. Campaigns also run older programs.
    pub fn has_flag(&self, flag: &str) -> bool {
        let mut help = Command::new(&self.program);
        help.args(["train", "--help"]);
        self.run(help).stdout.contains(flag)
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, content).unwrap();
        path
    }

    /// Writes a configuration file.
    pub fn settings(&self, name: &str, model: &str, data: &str, more: &str) {
        let (model, data) = (self.path(model), self.path(data));
        self.write(name, format!("device = {:?}\nmodel = {model:?}\ndata = {data:?}\n{SETTINGS}\n{more}\n", device()));
    }

    /// The command `train` with the configuration file `config`, the output directory `out` and these flags.
    pub fn train_by(&self, config: &str, out: &str, flags: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.args(["train", "--config"]).arg(self.path(config)).arg("--output-dir").arg(self.path(out)).args(flags);
        command
    }

    pub fn train(&self, out: &str, flags: &[&str]) -> Command {
        self.train_by("run.toml", out, flags)
    }

    /// Resumes from the newest checkpoint in `out`.
    pub fn resume(&self, out: &str, flags: &[&str]) -> Command {
        self.train(out, &[&["--resume-from-checkpoint", "auto"], flags].concat())
    }

    /// The digest of the state in `checkpoint`.
    pub fn digest_of(&self, checkpoint: &Path) -> Result<String, String> {
        run(Command::new(&self.program).arg("digest").arg(checkpoint), &self.path("digest")).digest()
    }

    /// Runs the command to its end.
    pub fn run(&self, mut command: Command) -> Outcome {
        run(&mut command, &self.path("run"))
    }

    /// Starts the command. Its output goes to files that can be read during the run.
    pub fn spawn(&self, command: Command) -> Running {
        self.spawn_as(command, "run")
    }

    /// Starts one of several concurrent commands, with `name` for its output files.
    pub fn spawn_as(&self, mut command: Command, name: &str) -> Running {
        Running::start(&mut command, &self.path(name))
    }

    /// An uninterrupted run: its digest and duration.
    pub fn reference(&self, out: &str, flags: &[&str]) -> Result<(String, Duration), String> {
        self.remove(out);
        let begin = Instant::now();
        let digest = self.run(self.train(out, flags)).digest()?;
        Ok((digest, begin.elapsed()))
    }

    pub fn remove(&self, name: &str) {
        let path = self.path(name);
        if path.exists() {
            fs::remove_dir_all(path).unwrap();
        }
    }

    /// Creates an empty directory.
    pub fn fresh(&self, name: &str) {
        self.remove(name);
        fs::create_dir(self.path(name)).unwrap();
    }

    /// Replaces the directory `to` by a copy of `from`.
    pub fn copy(&self, from: &str, to: &str) {
        self.remove(to);
        copy_dir(&self.path(from), &self.path(to));
    }

    /// Checks that a finished run left no temporary files in `out`.
    pub fn expect_tidy(&self, out: &str) -> Result<(), String> {
        let names = names(&self.path(out));
        let parts = names.iter().filter(|name| [".tmp-", ".old-", ".del-"].iter().any(|part| name.contains(part)));
        expect(parts.count() == 0, || format!("remains of a save: {names:?}"))
    }
}

fn output(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without words").to_string()
}

pub fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let target = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy_dir(&entry.path(), &target),
            false => drop(fs::copy(entry.path(), target).unwrap()),
        }
    }
}

/// The names in `dir`, sorted; empty if the directory does not exist.
pub fn names(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

/// The steps of the checkpoints in `dir`, ascending.
pub fn checkpoints(dir: &Path) -> Vec<u64> {
    let mut steps: Vec<u64> = names(dir).iter().filter_map(|name| name.strip_prefix("checkpoint-")?.parse().ok()).collect();
    steps.sort_unstable();
    steps
}

/// Every regular file below `dir`, sorted.
pub fn files(dir: &Path) -> Vec<PathBuf> {
    let paths = names(dir).into_iter().map(|name| dir.join(name));
    paths.flat_map(|path| if path.is_dir() { files(&path) } else { vec![path] }).collect()
}

pub fn expect(holds: bool, otherwise: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(otherwise()) }
}

/// A child process with its output in files. It is killed when this is dropped.
pub struct Running {
    pub child: Child,
    files: [PathBuf; 2],
    begin: Instant,
}

impl Running {
    fn start(command: &mut Command, files: &Path) -> Self {
        let files = ["out", "err"].map(|extension| files.with_extension(extension));
        let [stdout, stderr] = files.each_ref().map(|file| Stdio::from(File::create(file).unwrap()));
        let child = command.current_dir("/").stdin(Stdio::null()).stdout(stdout).stderr(stderr).spawn().unwrap();
        Self { child, files, begin: Instant::now() }
    }

    /// The output so far.
    pub fn stdout(&self) -> String {
        String::from_utf8_lossy(&fs::read(&self.files[0]).unwrap()).into_owned()
    }

    pub fn pid(&self) -> nix::unistd::Pid {
        nix::unistd::Pid::from_raw(self.child.id() as i32)
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().unwrap().is_none()
    }

    /// Waits until `holds`. Returns false if the child ends first.
    pub fn wait_until(&mut self, mut holds: impl FnMut(&Self) -> bool) -> bool {
        let deadline = Instant::now() + PATIENCE;
        while self.is_running() && Instant::now() < deadline {
            if holds(self) {
                return true;
            }
            std::thread::sleep(Duration::from_micros(300));
        }
        false
    }

    /// Waits for the end of the child, up to the timeout.
    pub fn finish(mut self) -> Outcome {
        let deadline = Instant::now() + PATIENCE;
        while self.is_running() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_micros(500));
        }
        let hung = self.is_running();
        let status = if hung { self.kill() } else { self.child.wait().unwrap() };
        let text = |file: &PathBuf| String::from_utf8_lossy(&fs::read(file).unwrap()).into_owned();
        let code = status.code().or_else(|| status.signal().map(|signal| -signal)).unwrap();
        Outcome { code, hung, stdout: text(&self.files[0]), stderr: text(&self.files[1]), seconds: self.begin.elapsed().as_secs_f64() }
    }

    /// Kills the child with `kill -9`.
    pub fn kill(&mut self) -> std::process::ExitStatus {
        self.child.kill().unwrap();
        self.child.wait().unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill().and_then(|()| self.child.wait());
        }
    }
}

pub fn run(command: &mut Command, files: &Path) -> Outcome {
    Running::start(command, files).finish()
}

/// The exit code and the output of a process.
#[derive(Debug)]
pub struct Outcome {
    /// Exit code, or the negative number of the signal that ended the process.
    pub code: i32,
    pub hung: bool,
    pub stdout: String,
    pub stderr: String,
    pub seconds: f64,
}

impl Outcome {
    /// The digest, which is the last line of a successful run.
    pub fn digest(&self) -> Result<String, String> {
        let digest = self.stdout.lines().last().and_then(|line| line.strip_prefix("digest: "));
        digest.filter(|_| self.code == 0).map(str::to_string).ok_or_else(|| format!("no digest: {self}"))
    }

    /// Checks that the run succeeded with this digest.
    pub fn expect_digest(&self, digest: &str) -> Result<(), String> {
        let found = self.digest()?;
        expect(found == digest, || format!("digest {found} instead of {digest}"))
    }

    /// Checks for an orderly end: one of these exit codes, one line of error with exit 1 or 2, no panic, no signal, no timeout.
    pub fn expect_orderly(&self, codes: &[i32]) -> Result<(), String> {
        expect(!self.hung, || format!("hangs: {self}"))?;
        expect(codes.contains(&self.code), || format!("exit {} is none of {codes:?}: {self}", self.code))?;
        expect(!self.stderr.contains("panicked"), || format!("panicked: {self}"))?;
        let errors = self.stderr.lines().filter(|line| !line.starts_with("warning: ")).count();
        let wanted = usize::from(matches!(self.code, 1 | 2));
        expect(errors == wanted, || format!("{errors} lines of error with exit {}: {self}", self.code))
    }

    /// The step of the checkpoint from which the run resumed; 0 if it started from the beginning.
    pub fn resumed_from(&self) -> u64 {
        let line = self.stdout.lines().find_map(|line| line.split_once("resuming from "));
        line.and_then(|(_, path)| path.rsplit_once("checkpoint-")?.1.parse().ok()).unwrap_or(0)
    }
}

impl std::fmt::Display for Outcome {
    /// One line with the exit code and the ends of both outputs.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let end = |text: &str| {
            let chars: Vec<char> = text.trim().chars().collect();
            chars[chars.len().saturating_sub(300)..].iter().collect::<String>().replace('\n', " | ")
        };
        write!(f, "exit {} after {:.1} s; says: {}; errors: {}", self.code, self.seconds, end(&self.stdout), end(&self.stderr))
    }
}

/// Number of runs by kind.
pub type Kinds = BTreeMap<String, u64>;
