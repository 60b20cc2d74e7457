//! Fine-tuning starts within the planned memory: weights are read from their files into the state block by block, without a second copy.

use crate::program::Workspace;
use crate::support::{emulator, settings};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::json;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::process::Command;
use superoffload::Plan;
use superoffload::internals::model::{ModelShape, TensorTable};
use superoffload::internals::planner::Machine;

/// 51 million parameters, in layers with transposed matrices in the file.
const CONFIG: &str = r#"{
    "architectures": ["GPT2LMHeadModel"], "n_embd": 512, "n_layer": 16, "n_head": 8, "n_positions": 64, "vocab_size": 256,
    "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"
}"#;

/// All state is on the host. The first forward pass has enough tokens to take far longer than stopping the run.
const SETTINGS: &str = "device = \"cpu\"\nthreads = 2\nbucket-mib = 1.0\nslots = 2\nseq-length = 64\nper-device-train-batch-size = 2\n\
                        max-steps = 9\nsave-steps = 9\nresident-buckets = 0\n";

/// Memory classes that the first step or the first save touches first. The CPU device's memory becomes resident when touched.
const TOUCHED_LATER: [&str; 3] = ["gradients", "activations", "checkpoint copies"];

/// Tolerance for memory that the plan does not count on the CPU: the program's heap and stacks.
const TOLERANCE: f64 = 0.02;

/// Writes the directory `model` with all-zero weights: a header, and a hole in the file.
fn write_model(workspace: &Workspace) -> ModelShape {
    let config = workspace.write("model/config.json", CONFIG);
    let shape = ModelShape::read(&config).unwrap();
    let (mut header, mut end) = (serde_json::Map::new(), 0);
    let table = TensorTable::new(&shape);
    for (spec, part) in table.specs().iter().flat_map(|spec| spec.parts().map(move |part| (spec, part))) {
        let start = end;
        end += 2 * part.rows * spec.row_elems();
        header.insert(part.name.clone(), json!({"dtype": "BF16", "shape": spec.part_shape(&part), "data_offsets": [start, end]}));
    }
    let header = serde_json::Value::from(header).to_string();
    let mut file = File::create(workspace.path("model/model.safetensors")).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len((8 + header.len() + end) as u64).unwrap();
    shape
}

/// Peak memory of the run when its first step begins, without the file-backed pages of the program. The run is killed then.
fn peak_at_start(command: &mut Command) -> u64 {
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let printed: Vec<String> = lines.take_while(|line| !line.starts_with("device ")).collect();
    kill(Pid::from_raw(child.id() as i32), Signal::SIGSTOP).unwrap();
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap();
    child.kill().unwrap();
    let output = child.wait_with_output().unwrap();
    let kib = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    let peak = kib("VmHWM:").zip(kib("RssFile:")).map(|(peak, file)| (peak - file) << 10);
    peak.unwrap_or_else(|| panic!("no run: {printed:?} {output:?}"))
}

#[test]
fn a_start_from_a_checkpoint_takes_the_memory_that_the_plan_counts() {
    // The memory of an emulated program includes that of its emulator.
    if emulator().is_some() {
        return;
    }
    let workspace = Workspace::new();
    let shape = write_model(&workspace);
    let (model, data) = (workspace.path("model"), workspace.path("data.txt"));
    let text = format!("model = {model:?}\ndata = {data:?}\n{SETTINGS}");
    workspace.write("run.toml", &text);
    let plan = Plan::new(&settings(&text).request(&shape), &Machine::cpu(2), true).unwrap();
    let later =
        plan.forecast.memory.iter().filter(|class| TOUCHED_LATER.contains(&class.name)).map(|class| class.bytes as u64).sum::<u64>();
    let planned = plan.balances()[1].needed - later;
    let peak = peak_at_start(&mut workspace.train("out", &[]));
    let off = peak as f64 / planned as f64 - 1.0;
    assert!(off.abs() < TOLERANCE, "{peak} bytes at most, {planned} planned, {:+.1} %\n{plan}", off * 1e2);
}
