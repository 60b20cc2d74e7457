//! R18 to R21 and R26: millions of mutated files at every entry point. This fuzzing is not guided by coverage; `fuzz/run.sh` is.

use crate::doors;
use crate::harness::*;
use crate::mutate::{Corpus, mutate};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::SeedableRng;
use std::fs;
use std::panic::catch_unwind;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

macro_rules! fuzz {
    ($name:ident, $id:literal, $door:literal, $what:literal) => {
        pub const $name: Campaign = Campaign {
            id: $id,
            what: concat!(
                $what,
                ", mutated from the corpus fuzz/corpus/",
                $door,
                ": no panic, no abort, no second of time, no 256 MiB of memory"
            ),
            runs: 1_000_000,
            smoke: 1,
            start: |_| start($door),
        };
    };
}

fuzz!(SETTINGS, "R18a", "settings_toml", "configuration files");
fuzz!(SETTINGS_YAML, "R18c", "settings_yaml", "configuration files in YAML");
fuzz!(SETTINGS_JSON, "R18d", "settings_json", "configuration files in JSON");
fuzz!(DEEPSPEED, "R18e", "deepspeed", "configurations of DeepSpeed");
fuzz!(CONFIG, "R18b", "config_json", "config.json");
fuzz!(WEIGHTS, "R19a", "safetensors", "safetensors files and headers");
fuzz!(INDEX, "R19b", "index", "indices of sharded weights");
fuzz!(PARQUET, "R19c", "parquet", "parquet files");
fuzz!(TOKENIZER, "R20", "tokenizer", "tokenizer directories");
fuzz!(TEMPLATE, "R20b", "chat_template", "chat templates and records");
fuzz!(SOURCE, "R20c", "template", "sources of chat templates, without a sandbox");
fuzz!(FORMAT, "R20d", "format", "formats of chat templates, without a sandbox");
fuzz!(JSON, "R20e", "tojson", "JSON that chat templates write, without a sandbox");
fuzz!(NORMALIZER, "R20f", "normalizer", "normalizers of tokenizers, without a sandbox");
fuzz!(MANIFEST, "R21a", "manifest", "checkpoint manifests, sealed with a right checksum");
fuzz!(PROFILE, "R26a", "resctrl_profile", "profiles of cache and bandwidth");

/// Number of inputs per process.
const BATCH: u64 = 20_000;

/// Time limit of one input, and memory limit of a batch.
const INPUT_TIME: Duration = Duration::from_secs(1);
const BATCH_KIB: u64 = 256 << 10;

/// Every batch is a separate process. An abort ends only this process, and its last input is kept.
fn start(door: &'static str) -> Result<Trial, String> {
    Corpus::read(door)?;
    Ok(Box::new(move |harness, turn| {
        // Runs count inputs; a turn is a batch.
        let first = turn.index * BATCH;
        turn.tries = BATCH;
        turn.kind = "inputs".into();
        turn.over = first >= 1_000_000;
        if turn.over {
            return Ok(());
        }
        let runs = if harness.is_smoke { 200 } else { BATCH };
        turn.tries = runs;
        let mut command = Command::new(std::env::current_exe().unwrap());
        let seed = harness.seed.wrapping_mul(1 << 32).wrapping_add(turn.index).to_string();
        command.args(["--door", door, "--seed", &seed, "--runs", &runs.to_string()]);
        command.env("CAMPAIGN_INPUT", harness.path("input"));
        // Memory of thread arenas must not count as memory of an input.
        command.env("MALLOC_ARENA_MAX", "1");
        let outcome = harness.run(command);
        expect(outcome.code == 0, || {
            let input = fs::read(harness.path("input")).unwrap_or_default();
            format!("seed {seed}: {outcome}; input {:?}", String::from_utf8_lossy(&input).chars().take(400).collect::<String>())
        })
    }))
}

/// The child process: passes mutated inputs to the entry point.
pub fn batch(door: &str, seed: u64, runs: u64) -> Result<(), String> {
    let corpus = Corpus::read(door)?;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let keep = std::env::var_os("CAMPAIGN_INPUT").map(PathBuf::from);
    for _ in 0..runs {
        let input = mutate(&corpus, &mut rng);
        if let Some(keep) = &keep {
            fs::write(keep, &input).map_err(|e| e.to_string())?;
        }
        let begin = Instant::now();
        catch_unwind(|| doors::call(door, &input)).map_err(|_| "panicked".to_string())?;
        expect(begin.elapsed() < INPUT_TIME, || format!("took {:.1} s", begin.elapsed().as_secs_f64()))?;
    }
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    expect(peak.is_none_or(|kib| kib < BATCH_KIB), || format!("took {} KiB of memory", peak.unwrap_or(0)))
}
