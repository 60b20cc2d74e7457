//! R25: a long run neither grows nor slows down.

use crate::harness::*;
use std::fs;
use std::time::{Duration, Instant};

pub const CAMPAIGN: Campaign = Campaign {
    id: "R25",
    what: "one run of two minutes or of SUPEROFFLOAD_SOAK_SECONDS, a checkpoint every 200 steps: memory after the first quarter grows by less than 1 MiB, open files stay as \
           many, the middle step's time at the end is that of the beginning within a half",
    runs: 1,
    smoke: 0,
    start,
};

/// Duration of the run.
fn length() -> Duration {
    let seconds = std::env::var("SUPEROFFLOAD_SOAK_SECONDS").ok().and_then(|seconds| seconds.parse().ok());
    Duration::from_secs(seconds.unwrap_or(120))
}

/// Memory in KiB, and number of open files.
type Sample = (u64, u64);

fn start(_: &Harness) -> Result<Trial, String> {
    Ok(Box::new(|harness, turn| {
        turn.kind = format!("{} s", length().as_secs());
        harness.remove("soak");
        let flags = ["--max-steps", "100000000", "--save-steps", "200", "--save-total-limit", "2", "--logging-steps", "1000"];
        let mut child = harness.spawn(harness.train("soak", &flags));
        let (begin, mut samples) = (Instant::now(), vec![]);
        while begin.elapsed() < length() && child.is_running() {
            std::thread::sleep(Duration::from_millis(250));
            samples.extend(sample(child.child.id()));
        }
        nix::sys::signal::kill(child.pid(), nix::sys::signal::Signal::SIGTERM).map_err(|e| format!("ended before its time: {e}"))?;
        let outcome = child.finish();
        expect(outcome.code == 75, || format!("{outcome}"))?;
        grows_not(&samples)?;
        slows_not(harness, turn)
    }))
}

fn sample(pid: u32) -> Option<Sample> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let kib = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.parse().ok())?;
    Some((kib, fs::read_dir(format!("/proc/{pid}/fd")).ok()?.count() as u64))
}

/// Checkpoint files are open briefly, so the maxima of both parts are compared.
fn grows_not(samples: &[Sample]) -> Result<(), String> {
    let (early, late) = (&samples[samples.len() / 4..samples.len() / 2], &samples[samples.len() * 3 / 4..]);
    let most = |part: &[Sample], of: fn(&Sample) -> u64| part.iter().map(of).max().unwrap_or(0);
    let memory = [early, late].map(|part| most(part, |sample| sample.0));
    let files = [early, late].map(|part| most(part, |sample| sample.1));
    expect(memory[1] <= memory[0] + 1024, || format!("memory grew from {} to {} KiB", memory[0], memory[1]))?;
    expect(files[1] <= files[0], || format!("open files grew from {} to {}", files[0], files[1]))
}

fn slows_not(harness: &Harness, turn: &mut Turn) -> Result<(), String> {
    let text = fs::read_to_string(harness.path("soak/metrics.jsonl")).map_err(|e| e.to_string())?;
    let times: Vec<f64> =
        text.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok()?["step_ms"].as_f64()).collect();
    expect(times.len() > 1000, || format!("only {} steps", times.len()))?;
    let middle = |part: &[f64]| {
        let mut part = part.to_vec();
        part.sort_by(f64::total_cmp);
        part[part.len() / 2]
    };
    let quarter = times.len() / 4;
    let (early, late) = (middle(&times[quarter..2 * quarter]), middle(&times[3 * quarter..]));
    turn.kind = format!("{}, {} steps", turn.kind, times.len());
    expect(late < 1.5 * early, || format!("the middle step took {early:.3} ms early, {late:.3} ms late"))
}
