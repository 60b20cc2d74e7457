//! Runs of two processes that train together on CPUs over TCP.

use crate::harness::*;
use std::net::TcpListener;
use std::process::Command;

/// Two micro-batches a step, with a gradient share each.
pub const CUT: [&str; 4] = ["--device=cpu", "--threads=1", "--bucket-mib=0.03125", "--gradient-shares=2"];

/// Writes `processes.toml` for a model of several buckets. Its part of a checkpoint is larger than the data.
pub fn settings(harness: &Harness) {
    let config = std::fs::read_to_string(harness.path("model/config.json")).unwrap();
    harness.write("wide/config.json", config.replace("\"hidden_size\": 16", "\"hidden_size\": 64"));
    harness.settings("processes.toml", "wide", "data.txt", "");
}

/// The digest of a single process, which a pair with these flags must reach.
pub fn alone(harness: &Harness, config: &str, flags: &[&str]) -> Result<String, String> {
    let alone = ["--gpus=1", "--gradient-accumulation-steps=2"];
    harness.remove("whole");
    harness.run(harness.train_by(config, "whole", &[&CUT[..], &alone, flags].concat())).digest()
}

/// Starts both processes of a run into `out`. `change` modifies the command of each.
pub fn both(harness: &Harness, config: &str, out: &str, flags: &[&str], change: impl Fn(usize, Command) -> Command) -> [Running; 2] {
    let port = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr()).unwrap().port();
    let rendezvous = format!("--rendezvous=127.0.0.1:{port}");
    [0, 1].map(|process| {
        let process_flag = format!("--process={process}");
        let own = ["--gradient-accumulation-steps=1", "--processes=2", &process_flag, &rendezvous];
        let command: Command = harness.train_by(config, out, &[&CUT[..], &own, flags].concat());
        let mut command = change(process, command);
        command.env("SUPEROFFLOAD_RUN_TOKEN", "a token that nobody guesses");
        harness.spawn_as(command, &format!("process-{process}"))
    })
}
