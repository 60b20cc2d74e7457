//! R10: a control group with less memory than the run needs.

use crate::harness::*;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

pub const CAMPAIGN: Campaign = Campaign {
    id: "R10",
    what: "a memory limit of 1.05, 1.00, 0.95 and 0.8 times the largest resident size of the unlimited run: it is done, or refused with one \
           line; the kernel never kills it",
    runs: 20,
    smoke: 0,
    start,
};

const FRACTIONS: [f64; 4] = [1.05, 1.0, 0.95, 0.8];

/// Twenty million parameters: their states are far larger than the program itself.
const CONFIG: &str = r#"{
    "architectures": ["LlamaForCausalLM"], "hidden_size": 512, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 8, "intermediate_size": 1536, "vocab_size": 256, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": true
}"#;

/// A control group for the run, which is removed at the end.
struct Group {
    path: PathBuf,
    limit: &'static str,
}

impl Group {
    fn new() -> Result<Self, String> {
        let name = format!("superoffload-campaign-{}", std::process::id());
        let roots = [("/sys/fs/cgroup", "memory.max"), ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")];
        let mut why = String::new();
        for (root, limit) in roots {
            let path = Path::new(root).join(&name);
            match fs::create_dir(&path) {
                Ok(()) if path.join(limit).exists() => return Ok(Self { path, limit }),
                Ok(()) => why = fs::remove_dir(&path).map_or_else(|e| e.to_string(), |()| format!("{root} has no memory controller")),
                Err(e) => why = format!("{root}: {e}"),
            }
        }
        Err(format!("no control group with a memory limit can be made: {why}"))
    }

    fn set(&self, bytes: Option<u64>) -> Result<(), String> {
        let text = bytes.map_or(if self.limit == "memory.max" { "max".into() } else { "-1".into() }, |bytes| bytes.to_string());
        fs::write(self.path.join(self.limit), text).map_err(|e| format!("set {}: {e}", self.limit))
    }

    /// The command, run inside this group from its start.
    fn holding(&self, train: &Command) -> Command {
        let mut command = Command::new("sh");
        command
            .args(["-c", "echo $$ > \"$0\"/cgroup.procs && exec \"$@\""])
            .arg(&self.path)
            .arg(train.get_program())
            .args(train.get_args());
        command
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.path);
    }
}

fn start(harness: &Harness) -> Result<Trial, String> {
    // Files in a memory file system would count as memory of the run.
    let on_disk = nix::sys::statfs::statfs(&harness.path("")).is_ok_and(|fs| fs.filesystem_type() != nix::sys::statfs::TMPFS_MAGIC);
    expect(on_disk, || "the temporary directory is in memory: set TMPDIR".into())?;
    let group = Group::new()?;
    harness.write("large/config.json", CONFIG);
    harness.settings("large.toml", "large", "data.txt", "");
    let train = |harness: &Harness| {
        harness.remove("limited");
        harness.train_by("large.toml", "limited", &["--max-steps", "2"])
    };
    let (mut whole, mut peak) = (harness.spawn(group.holding(&train(harness))), 0.0);
    whole.wait_until(|run| {
        peak = resident_bytes(run.child.id()).unwrap_or(peak);
        false
    });
    let digest = whole.finish().digest()?;
    Ok(Box::new(move |harness, turn| {
        let fraction = FRACTIONS[turn.index as usize % 4];
        group.set(Some((peak * fraction) as u64))?;
        let outcome = harness.run(group.holding(&train(harness)));
        group.set(None)?;
        turn.kind = format!(
            "{fraction}: {}",
            match outcome.code {
                0 => "done",
                1 | 2 => "refused",
                _ => "killed",
            }
        );
        outcome.expect_orderly(&[0, 1, 2])?;
        if outcome.code == 0 { outcome.expect_digest(&digest) } else { Ok(()) }
    }))
}

/// The maximum resident size so far.
fn resident_bytes(pid: u32) -> Option<f64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let kib: f64 = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse().ok())?;
    Some(kib * 1024.0)
}
