//! Runs that end at any moment resume to the same bits: kill -9, signals, damaged checkpoints, a full disk.

use crate::campaign::record;
use crate::faults::limited;
#[cfg(feature = "weight-flow")]
use crate::program::CONFIG;
use crate::program::{Outcome, STEPS, Workspace, program, run};
use crate::support::emulator;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};
use std::fs;
use std::io::{BufRead, BufReader};
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

/// Trains the uninterrupted reference run and returns its digest.
fn reference(workspace: &Workspace, flags: &[&str]) -> String {
    run(&mut workspace.train("whole", flags)).digest().to_string()
}

/// The only hidden names that a run leaves.
const HIDDEN: [&str; 2] = [".lock", ".superoffload"];

/// Checks that `out` holds a finished run: one line of metrics per step, and no temporary files.
fn assert_whole(workspace: &Workspace, out: &str) {
    let steps: Vec<_> = workspace.metrics(out).iter().map(|line| line["step"].as_u64().unwrap()).collect();
    assert_eq!(steps, Vec::from_iter(1..=STEPS), "metrics of {out}");
    assert_eq!(workspace.names(out, "."), HIDDEN, "remains in {out}");
}

fn pick(rng: &mut ChaCha8Rng, bound: u64) -> u64 {
    rng.next_u64() % bound
}

/// Waits until the `nth` checkpoint write in `dir` begins. Returns false if the process ends first.
pub fn await_write(child: &mut Child, dir: &Path, nth: usize) -> bool {
    let mut seen = std::collections::BTreeSet::new();
    while child.try_wait().unwrap().is_none() {
        let names = fs::read_dir(dir).into_iter().flatten().flatten().map(|entry| entry.file_name());
        seen.extend(names.filter(|name| name.to_string_lossy().contains(".tmp-") && name.to_string_lossy().starts_with(".checkpoint-")));
        if seen.len() >= nth {
            return true;
        }
    }
    false
}

/// Counts of one campaign of kills.
#[derive(Debug, Default)]
struct Campaign {
    kills: u64,
    inside_write: u64,
    /// Runs that were killed at least once. `missed` counts those that finished before.
    runs: u64,
    missed: u64,
    resumed_equal: u64,
    failures: Vec<String>,
}

impl Campaign {
    /// Starts or resumes the run in `out` and kills it. Returns false if it finished before.
    fn kill_once(&mut self, workspace: &Workspace, out: &str, whole: Duration, rng: &mut ChaCha8Rng) -> bool {
        let aim = self.inside_write * 2 <= self.kills;
        let mut child = workspace.resume(out, &[]).spawn().unwrap();
        let micros = whole.as_micros() as u64;
        let delay = if aim {
            await_write(&mut child, &workspace.path(out), 1 + pick(rng, 3) as usize);
            pick(rng, 1500)
        } else {
            pick(rng, micros)
        };
        std::thread::sleep(Duration::from_micros(delay));
        child.kill().unwrap();
        if child.wait().unwrap().code().is_some() {
            return false;
        }
        self.kills += 1;
        self.inside_write += u64::from(workspace.names(out, ".checkpoint-").iter().any(|name| name.contains(".tmp-")));
        true
    }

    /// Kills one run up to three times, half of them during a write, and then lets it finish.
    fn one_run(&mut self, workspace: &Workspace, digest: &str, whole: Duration, rng: &mut ChaCha8Rng) {
        let out = format!("run-{}", self.runs + self.missed);
        let hits = (0..1 + pick(rng, 3)).take_while(|_| self.kill_once(workspace, &out, whole, rng)).count();
        self.missed += u64::from(hits == 0);
        self.runs += u64::from(hits > 0);
        let resumed = run(&mut workspace.resume(&out, &[]));
        if resumed.code == 0 && resumed.digest() == digest {
            self.resumed_equal += u64::from(hits > 0);
        } else {
            self.failures.push(format!("{out}: {resumed:?}"));
        }
        assert_whole(workspace, &out);
        fs::remove_dir_all(workspace.path(&out)).unwrap();
    }

    /// The record of the campaign.
    fn result(&self, seed: u64) -> serde_json::Value {
        serde_json::json!({
            "kills": self.kills, "inside_write": self.inside_write, "runs": self.runs, "resumed_equal": self.resumed_equal,
            "failures": self.failures.len(), "seed": seed,
        })
    }
}

/// Default number of kills.
const KILLS: u64 = 12;

/// `SUPEROFFLOAD_KILLS=100 cargo test --release --test main kill_9` runs and records the long campaign. Slow machines may use fewer kills
/// than the default.
#[test]
fn kill_9_at_any_moment_loses_nothing() {
    let requested: Option<u64> = std::env::var("SUPEROFFLOAD_KILLS").ok().map(|n| n.parse().unwrap());
    let (kills, seed) = (requested.unwrap_or(KILLS), 20260);
    let workspace = Workspace::new();
    let start = Instant::now();
    let digest = reference(&workspace, &[]);
    let (whole, mut rng, mut campaign) = (start.elapsed(), ChaCha8Rng::seed_from_u64(seed), Campaign::default());
    while campaign.kills < kills || campaign.inside_write * 2 < campaign.kills {
        campaign.one_run(&workspace, &digest, whole, &mut rng);
        assert!(campaign.missed < 20 * kills, "hardly a kill hits: {campaign:?}");
    }
    if kills > KILLS {
        record("resume", campaign.result(seed));
    }
    assert!(campaign.failures.is_empty() && campaign.resumed_equal == campaign.runs, "{campaign:?}");
}

/// Starts a run and kills it when it reports that the checkpoint of `step` is written.
fn die_after_checkpoint(workspace: &Workspace, out: &str, step: u64, flags: &[&str]) {
    let mut child = workspace.train(out, flags).spawn().unwrap();
    await_line(&mut child, &format!("checkpoint-{step}"));
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Reads the program's output until a line contains `words`.
pub fn await_line(child: &mut Child, words: &str) {
    let stdout = child.stdout.as_mut().unwrap();
    let found = BufReader::with_capacity(1, stdout).lines().map_while(Result::ok).any(|line| line.contains(words));
    assert!(found, "never said {words:?}");
}

#[test]
fn a_resumed_run_may_be_laid_out_anew() {
    let workspace = Workspace::new();
    let digest = reference(&workspace, &[]);
    let layouts: [&[&str]; 8] = [
        &["--threads", "1"],
        &["--bucket-mib", "0.002"],
        &["--slots", "1"],
        &["--strategy", "zero-offload"],
        &["--strategy", "no-offload"],
        &["--isa", "scalar"],
        &["--without", "stv,deadline-order", "--resident-buckets", "0"],
        &["--adversary", "7", "--device", "cpu"],
    ];
    for (idx, flags) in layouts.iter().enumerate() {
        let out = format!("layout-{idx}");
        workspace.copy_checkpoints("whole", &out, &[6]);
        assert_eq!(run(&mut workspace.resume(&out, flags)).digest(), digest, "{flags:?}");
        assert_whole(&workspace, &out);
    }
}

/// A model with weights that can stream. The ring of a GPU has pages of 32 MiB, that of the CPU device pages of 4 KiB.
#[cfg(feature = "weight-flow")]
pub fn streamable() -> String {
    let width = if std::env::var("SUPEROFFLOAD_DEVICE").is_ok_and(|device| device == "cuda") { 768 } else { 32 };
    let layers = CONFIG.replace("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 12");
    layers.replace("\"hidden_size\": 32", &format!("\"hidden_size\": {width}")).replace(": 64,", &format!(": {},", 2 * width))
}

/// Resumes with weights on the device after weights streamed, and the other way round.
#[cfg(feature = "weight-flow")]
#[test]
fn a_run_whose_weights_stream_is_resumed() {
    let workspace = Workspace::new();
    workspace.write("model/config.json", streamable());
    let flags = |weights| ["--save-steps", "6", "--resident-buckets", "0", "--weights", weights];
    let digest = reference(&workspace, &["--save-steps", "6"]);
    die_after_checkpoint(&workspace, "streams", 6, &flags("flow"));
    for weights in ["flow", "stationary"] {
        workspace.copy_checkpoints("streams", weights, &[6]);
        assert_eq!(run(&mut workspace.resume(weights, &flags(weights))).digest(), digest, "{weights}");
        assert_whole(&workspace, weights);
    }
}

/// Checkpoints of a run that streams halves of its masters are those of float32 masters, too.
#[cfg(all(feature = "weight-flow", feature = "repartition"))]
#[test]
fn runs_that_stream_halves_of_masters_write_the_bytes_of_float32_masters_and_resume_from_them() {
    for moments in ["float32", "bfloat16", "int8"] {
        let workspace = Workspace::new();
        workspace.write("model/config.json", streamable());
        let whole = ["--save-steps", "6", "--moments", moments];
        let halves = [&whole[..], &["--resident-buckets", "1", "--weights", "flow", "--masters", "split"]].concat();
        let digest = reference(&workspace, &whole);
        let outcome = run(&mut workspace.train("halves", &halves));
        assert_eq!(outcome.digest(), digest);
        assert!(outcome.stdout.contains("those on the host stepped after the verdict"), "{outcome:?}");
        let state = |out: &str| fs::read(workspace.path(&format!("{out}/checkpoint-12/state.bin"))).unwrap();
        assert!(state("halves") == state("whole"), "moments in {moments}");
        for (nth, (from, flags)) in [("whole", &halves[..]), ("halves", &whole), ("halves", &halves)].into_iter().enumerate() {
            let out = format!("resumed-{nth}");
            workspace.copy_checkpoints(from, &out, &[6]);
            assert_eq!(run(&mut workspace.resume(&out, flags)).digest(), digest, "{out}");
            assert_whole(&workspace, &out);
        }
    }
}

/// Packed moments have the same format in checkpoints as in memory, and a run with them can be resumed with another layout.
#[test]
fn packed_moments_are_resumed() {
    expect_resumed("bfloat16", |wide| wide / 12 * 8..=wide / 12 * 8);
    // Tensors end with whole groups.
    expect_resumed("int8", |wide| wide / 12 * 6..=wide / 12 * 7);
}

/// `bytes` are those of the state with packed moments, of a state with float32 moments of so many bytes.
fn expect_resumed(moments: &str, bytes: impl Fn(u64) -> RangeInclusive<u64>) {
    let (workspace, packed) = (Workspace::new(), ["--moments", moments]);
    let (digest, wide) = (reference(&workspace, &packed), run(&mut workspace.train("wide", &[])).digest().to_string());
    assert_ne!(digest, wide);
    let of = |out: &str| run(program(&["digest"]).arg(workspace.path(&format!("{out}/checkpoint-12")))).digest().to_string();
    let size = |out: &str| fs::metadata(workspace.path(&format!("{out}/checkpoint-12/state.bin"))).unwrap().len();
    assert_eq!((of("whole"), of("wide")), (digest.clone(), wide));
    assert!(bytes(size("wide")).contains(&size("whole")), "{} bytes in {moments}, {} in float32", size("whole"), size("wide"));
    die_after_checkpoint(&workspace, "killed", 6, &packed);
    assert_eq!(run(&mut workspace.resume("killed", &packed)).digest(), digest);
    assert_whole(&workspace, "killed");
    for (idx, flags) in
        [&["--strategy", "no-offload"][..], &["--isa", "scalar", "--threads", "1"], &["--resident-buckets", "0"]].iter().enumerate()
    {
        let out = format!("layout-{idx}");
        workspace.copy_checkpoints("whole", &out, &[6]);
        assert_eq!(run(&mut workspace.resume(&out, &[&packed, *flags].concat())).digest(), digest, "{flags:?}");
    }
}

/// Checkpoints hold float32 masters, whichever way a run stores them in memory. A resume may change it, alone and with several ranks.
#[test]
fn runs_with_split_masters_write_the_bytes_of_float32_masters_and_resume_from_them() {
    for moments in ["float32", "bfloat16", "int8"] {
        let workspace = Workspace::new();
        let common = ["--strategy", "no-offload", "--moments", moments, "--gradient-shares", "2", "--bucket-mib", "0.0703125"];
        let flags = |masters: &'static str| [&common[..], &["--masters", masters]].concat();
        let digest = reference(&workspace, &flags("float32"));
        assert_eq!(run(&mut workspace.train("split", &flags("split"))).digest(), digest);
        let state = |out: &str| fs::read(workspace.path(&format!("{out}/checkpoint-12/state.bin"))).unwrap();
        assert!(state("split") == state("whole"), "moments in {moments}");
        for (from, masters) in [("whole", "split"), ("split", "float32"), ("split", "split")] {
            let out = format!("{from}-{masters}");
            workspace.copy_checkpoints(from, &out, &[6]);
            assert_eq!(run(&mut workspace.resume(&out, &flags(masters))).digest(), digest, "{out}");
            assert_whole(&workspace, &out);
        }
        workspace.copy_checkpoints("whole", "ranks", &[6]);
        let on_two = [&flags("split")[..], &["--gpus", "2"]].concat();
        assert_eq!(run(&mut workspace.resume("ranks", &on_two)).digest(), digest);
    }
}

/// Routing and its balance are recomputed from the weights, so checkpoints hold nothing else about experts.
#[test]
fn a_run_of_a_model_with_experts_is_resumed() {
    let (workspace, golden) = (Workspace::new(), Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden"));
    // Bytes that are valid tokens for a vocabulary of 64.
    workspace.write("data.txt", Vec::from_iter((0..400u32).map(|n| (n * n).to_string())).concat());
    workspace.settings("tokenizer = 'bytes'\nrouter-aux-loss-coef = 0.01\nbucket-mib = 0.0078125");
    for family in ["qwen3_moe", "gpt_oss"] {
        workspace.write("model/config.json", fs::read(golden.join(family).join("config.json")).unwrap());
        let [wide, packed, int8] = ["float32", "bfloat16", "int8"].map(|moments| {
            let (whole, killed) = (format!("{family}-{moments}"), format!("{family}-{moments}-killed"));
            let flags = ["--device", "cpu", "--resident-buckets", "0", "--moments", moments];
            let digest = run(&mut workspace.train(&whole, &flags)).digest().to_string();
            die_after_checkpoint(&workspace, &killed, 6, &flags);
            assert_eq!(run(&mut workspace.resume(&killed, &flags)).digest(), digest, "{killed}");
            assert_whole(&workspace, &killed);
            let moved = format!("{whole}-moved");
            workspace.copy_checkpoints(&whole, &moved, &[6]);
            let anew = ["--device", "cpu", "--strategy", "no-offload", "--moments", moments];
            assert_eq!(run(&mut workspace.resume(&moved, &anew)).digest(), digest, "{moved}");
            digest
        });
        assert!(wide != packed && wide != int8 && packed != int8, "{family}");
    }
}

#[test]
fn a_run_of_a_model_with_experts_beside_an_mlp_is_resumed_on_two_ranks() {
    expect_resumed_on_two_ranks("gemma4_moe");
}

#[test]
fn a_run_of_a_model_with_latent_attention_is_resumed_on_two_ranks() {
    expect_resumed_on_two_ranks("deepseek_v3_lora");
}

fn expect_resumed_on_two_ranks(family: &str) {
    let (workspace, golden) = (Workspace::new(), Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(family));
    workspace.write("data.txt", Vec::from_iter((0..400u32).map(|n| (n * n).to_string())).concat());
    workspace.settings("tokenizer = 'bytes'\nbucket-mib = 0.03125\ndevice = 'cpu'\ngradient-shares = 2");
    workspace.write("model/config.json", fs::read(golden.join("config.json")).unwrap());
    let digest = run(&mut workspace.train("whole", &[])).digest().to_string();
    workspace.copy_checkpoints("whole", "resumed", &[6]);
    assert_eq!(run(&mut workspace.resume("resumed", &["--gpus", "2"])).digest(), digest);
    assert_whole(&workspace, "resumed");
}

#[test]
fn gradient_accumulation_and_loss_scale_are_resumed() {
    let workspace = Workspace::new();
    for (name, flags, settings) in [
        ("accumulation", ["--gradient-accumulation-steps", "3"], ""),
        ("shares", ["--gradient-shares", "3"], ""),
        ("scale", ["--dtype", "float16"], "inject = [{step = 3, element = 5, value = 'inf'}, {step = 9, element = 7, value = 'nan'}]"),
        ("schedule", ["--lr-scheduler-type", "cosine"], "warmup-steps = 8"),
    ] {
        workspace.settings(settings);
        let digest = run(&mut workspace.train(name, &flags)).digest().to_string();
        let killed = format!("{name}-killed");
        die_after_checkpoint(&workspace, &killed, 6, &flags);
        assert_eq!(run(&mut workspace.resume(&killed, &flags)).digest(), digest, "{name}");
        assert_whole(&workspace, &killed);
        for (whole, resumed) in workspace.metrics(name).iter().zip(workspace.metrics(&killed)) {
            for key in ["loss", "grad_norm", "learning_rate", "loss_scale", "verdict", "epoch"] {
                assert_eq!(whole[key], resumed[key], "{key} of step {} of {name}", whole["step"]);
            }
        }
    }
    let scales: Vec<_> = workspace.metrics("scale").iter().map(|line| line["loss_scale"].as_f64().unwrap()).collect();
    assert_eq!((scales[0], scales[5], scales[11]), (65536.0, 32768.0, 16384.0));
}

/// The cut of a step belongs to the run. Without flags the checkpoint's cut is used, and different flags are reported.
#[test]
fn a_resumed_run_keeps_its_shares_and_micro_batches() {
    let (workspace, flags) = (Workspace::new(), ["--gradient-accumulation-steps", "4", "--gradient-shares", "2"]);
    let digest = run(&mut workspace.train("whole", &flags)).digest().to_string();
    assert_ne!(run(&mut workspace.train("one", &flags[..2])).digest(), digest);
    let resume = |name: &str, flags: &[&str]| {
        workspace.copy_checkpoints("whole", name, &[6]);
        run(&mut workspace.resume(name, flags))
    };
    assert_eq!(resume("kept", &[]).digest(), digest);
    assert_eq!(resume("said", &flags).digest(), digest);
    let changed = resume("changed", &["--gradient-shares", "4"]);
    assert_ne!(changed.digest(), digest);
    assert!(changed.stderr.contains("--gradient-shares was 2 before and is 4 from here on"), "{changed:?}");
    let undivided = ["the checkpoint's steps have 4 micro-batches", "--gradient-accumulation-steps 4 --gradient-shares 2"];
    resume("undivided", &["--gradient-shares", "3"]).refused(2, &undivided);
}

/// Whatever does not fit the devices, one line has all necessary flags together, and the run continues with them.
#[test]
fn a_resume_on_other_devices_is_advised_all_flags_at_once() {
    let workspace = Workspace::new();
    run(&mut workspace.train("one", &["--max-steps=4"])).digest();
    let resume = |name: &str, flags: &[&str]| {
        workspace.copy_checkpoints("one", name, &[4]);
        run(&mut workspace.resume(name, &[&["--device=cpu"], flags].concat()))
    };
    let cases: [(&[&str], &str); 6] = [
        (&["--gpus=2"], "--gradient-accumulation-steps 1 --gradient-shares 2"),
        (&["--gpus=2", "--gradient-accumulation-steps=1"], "--gradient-accumulation-steps 1 --gradient-shares 2"),
        (&["--gpus=2", "--gradient-accumulation-steps=3"], "--gradient-accumulation-steps 3 --gradient-shares 2"),
        (&["--gpus=2", "--gradient-shares=2"], "--gradient-accumulation-steps 1 --gradient-shares 2"),
        (&["--gpus=4", "--tokens-per-step=128"], "--gradient-accumulation-steps 1 --gradient-shares 4"),
        (&["--gpus=3"], "--gradient-accumulation-steps 1 --gradient-shares 3"),
    ];
    for (nth, (flags, advised)) in cases.into_iter().enumerate() {
        resume(&format!("refused-{nth}"), flags).refused(2, &["the checkpoint's steps have 1 micro-batch in 1 gradient share", advised]);
        let output: Vec<&str> = flags.iter().copied().filter(|flag| !flag.starts_with("--gradient")).chain(advised.split(' ')).collect();
        let resumed = resume(&format!("advised-{nth}"), &output);
        resumed.digest();
        let devices = flags[0].trim_start_matches("--gpus=").parse::<usize>().unwrap();
        let steps = advised.split(' ').nth(1).unwrap().parse::<usize>().unwrap();
        let message = format!("warning: the checkpoint's steps have 1 micro-batch, and those from here on have {}\n", devices * steps);
        assert!(resumed.stderr.contains(&message), "{resumed:?}");
    }
}

#[test]
fn digest_names_the_bits_of_a_checkpoint() {
    let workspace = Workspace::new();
    let digest = reference(&workspace, &["--save-total-limit", "2"]);
    assert_eq!(workspace.names("whole", "checkpoint-"), ["checkpoint-10", "checkpoint-12"]);
    let of = |step| run(program(&["digest"]).arg(workspace.path(&format!("whole/checkpoint-{step}")))).digest().to_string();
    assert_eq!(of(12), digest);
    assert_ne!(of(10), digest);
    let done = run(&mut workspace.resume("whole", &[]));
    assert_eq!(done.digest(), digest, "nothing is left to do");
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_is_used() {
    let workspace = Workspace::new();
    let digest = reference(&workspace, &[]);
    let flip = |path: &Path| {
        let mut bytes = fs::read(path).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 4;
        fs::write(path, bytes).unwrap();
    };
    let halve = |path: &Path| fs::write(path, &fs::read(path).unwrap()[..50]).unwrap();
    let remove = |path: &Path| fs::remove_file(path).unwrap();
    type Damage<'a> = (&'a str, &'a dyn Fn(&Path));
    let damages: [Damage<'_>; 6] = [
        ("state.bin", &flip),
        ("state.bin", &halve),
        ("state.bin", &remove),
        ("trainer_state.json", &flip),
        ("trainer_state.json", &remove),
        ("model/config.json", &flip),
    ];
    for (idx, (file, damage)) in damages.into_iter().enumerate() {
        let out = format!("damaged-{idx}");
        workspace.copy_checkpoints("whole", &out, &[6, 8]);
        let path = workspace.path(&format!("{out}/checkpoint-8/{file}"));
        damage(&path);
        if !file.starts_with("model") {
            run(program(&["digest"]).arg(path.parent().unwrap())).refused(1, &[file]);
        }
        let resumed = run(&mut workspace.resume(&out, &[]));
        assert_eq!(resumed.digest(), digest, "{file}");
        let named = resumed.stderr.lines().any(|line| line.starts_with("warning: ") && line.contains(path.to_str().unwrap()));
        assert!(named && resumed.stdout.contains("checkpoint-6\n"), "{resumed:?}");
        assert_whole(&workspace, &out);
    }
}

#[test]
fn without_a_checkpoint_auto_starts_afresh_and_a_directory_is_an_error() {
    let workspace = Workspace::new();
    let digest = reference(&workspace, &[]);
    let fresh = run(&mut workspace.resume("fresh", &[]));
    assert_eq!(fresh.digest(), digest);
    assert!(fresh.stdout.contains("starting afresh"), "{fresh:?}");
    let dir = workspace.path("model");
    run(&mut workspace.train("x", &["--resume-from-checkpoint", dir.to_str().unwrap()])).refused(2, &["model", "not a checkpoint", "auto"]);
    let path = workspace.path("whole/checkpoint-4");
    assert_eq!(run(&mut workspace.train("y", &["--resume-from-checkpoint", path.to_str().unwrap()])).digest(), digest);
}

#[test]
fn a_fresh_run_does_not_overwrite_an_earlier_one() {
    let workspace = Workspace::new();
    let digest = reference(&workspace, &["--max-steps", "2"]);
    let again = run(&mut workspace.train("whole", &["--seed", "7"]));
    assert_ne!(again.digest(), digest);
    assert!(again.stderr.contains("previous-1"), "{again:?}");
    let old = workspace.path("whole/previous-1/checkpoint-2");
    assert_eq!(run(program(&["digest"]).arg(old)).digest(), digest);
}

#[test]
fn a_checkpoint_is_continued_on_the_same_data_only_and_changes_are_logged() {
    let workspace = Workspace::new();
    run(&mut workspace.train("part", &["--max-steps", "4"]));
    run(&mut workspace.resume("part", &["--seed", "7"])).refused(2, &["seed was 42", "is 7"]);
    run(&mut workspace.resume("part", &["--seq-length", "8"])).refused(2, &["sequences"]);
    let changed = run(&mut workspace.resume("part", &["--learning-rate", "0.5"]));
    assert!(changed.code == 0 && changed.stderr.contains("--learning-rate was 0.01 before and is 0.5"), "{changed:?}");
}

#[test]
fn going_back_moves_the_abandoned_checkpoints_aside() {
    let workspace = Workspace::new();
    let digest = reference(&workspace, &[]);
    let early = workspace.path("whole/checkpoint-2");
    let back = run(&mut workspace.train("whole", &["--resume-from-checkpoint", early.to_str().unwrap(), "--max-steps", "3"]));
    assert!(back.code == 0 && back.stderr.contains("previous-1"), "{back:?}");
    assert!(workspace.path("whole/previous-1/checkpoint-12").is_dir() && !workspace.path("whole/checkpoint-12").exists());
    assert_eq!(run(&mut workspace.resume("whole", &[])).digest(), digest, "auto goes on from the new branch");
}

#[test]
fn a_full_disk_leaves_the_last_checkpoint() {
    let workspace = Workspace::new();
    let digest = reference(&workspace, &[]);
    let early = run(&mut workspace.train("full", &["--max-steps", "4"])).digest().to_string();
    // With a limit of a few kilobytes per file, the metrics fit and the state does not.
    let train = workspace.resume("full", &[]);
    run(&mut limited(&train, 60)).refused(1, &["write a checkpoint into", "ulimit -f allows files of 30.0 KiB", "raise it"]);
    let mut child = workspace.resume("full", &["--max-steps=1000000", "--save-steps=1000"]).spawn().unwrap();
    await_line(&mut child, "step      9");
    limit_files(&child, 30 << 10);
    let ended: Outcome = child.wait_with_output().unwrap().into();
    ended.refused(1, &["write", "full/", "File too large"]);
    assert_eq!(workspace.names("full", "."), HIDDEN);
    assert_eq!(run(program(&["digest"]).arg(workspace.path("full/checkpoint-4"))).digest(), early);
    assert_eq!(run(&mut workspace.resume("full", &[])).digest(), digest);
    assert_whole(&workspace, "full");
}

/// Limits the size of all files of `child` from now on.
pub fn limit_files(child: &Child, bytes: u64) {
    let pid = format!("--pid={}", child.id());
    let status = Command::new("prlimit").args([pid, format!("--fsize={bytes}")]).status();
    assert!(status.unwrap_or_else(|e| panic!("prlimit: {e}; it is part of util-linux")).success());
}

pub fn send(child: &Child, signal: Signal) {
    kill(Pid::from_raw(child.id() as i32), signal).unwrap();
}

/// Whether the mask `name` (`SigCgt`: caught, `SigIgn`: ignored) of `process` has `signal`.
pub fn has_signal(process: &str, name: &str, signal: Signal) -> bool {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim_start_matches(':');
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal as i32 - 1) & 1 == 1
}

/// The signals that request a stop. Children of tests under `nohup` ignore hang-ups like the tests.
pub fn stop_signals() -> impl Iterator<Item = Signal> {
    let all = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGXCPU];
    all.into_iter().filter(|&signal| signal != Signal::SIGHUP || !has_signal("self", "SigIgn", signal))
}

pub fn await_listening(child: &mut Child) {
    while !stop_signals().all(|signal| has_signal(&child.id().to_string(), "SigCgt", signal)) {
        assert_eq!(child.try_wait().unwrap(), None, "it ended before it listened");
        std::thread::sleep(Duration::from_micros(200));
    }
}

#[test]
fn a_signal_in_any_phase_saves_and_the_run_goes_on() {
    let workspace = Workspace::new();
    let digest = reference(&workspace, &[]);
    type Phase<'a> = (&'a str, &'a dyn Fn(&mut Child, &Path));
    let phases: [Phase; 4] = [
        ("start", &|child, _| await_listening(child)),
        ("plan", &|child, _| await_line(child, "plan")),
        ("steps", &|child, _| await_line(child, "step      3")),
        ("save", &|child, dir| assert!(await_write(child, dir, 2))),
    ];
    // For an emulated program the kernel shows the emulator's handlers, so the test cannot detect the program's own ones.
    let unseen = usize::from(emulator().is_some());
    for (phase, wait) in phases.into_iter().skip(unseen) {
        for signal in stop_signals() {
            let out = format!("{phase}-{signal}");
            let mut child = workspace.train(&out, &[]).spawn().unwrap();
            wait(&mut child, &workspace.path(&out));
            send(&child, signal);
            let ended: Outcome = child.wait_with_output().unwrap().into();
            assert_eq!(ended.code, 75, "{out}: {ended:?}");
            let output = ended.stdout.contains("interrupted at step") || phase == "start" && ended.stdout.contains("interrupted while ");
            assert!(ended.stderr.is_empty() && output, "{ended:?}");
            let steps = if ended.stdout.contains("interrupted while ") { 0 } else { workspace.metrics(&out).len() };
            assert!(steps == 0 || workspace.path(&format!("{out}/checkpoint-{steps}")).is_dir(), "{out}: no checkpoint of {steps}");
            assert_eq!(run(&mut workspace.resume(&out, &[])).digest(), digest, "{out}");
            assert_whole(&workspace, &out);
        }
    }
}
