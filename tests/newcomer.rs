//! Messages that a new user reads first: each states its meaning and the remedy.

use crate::program::{CONFIG, Workspace, program, run};
use serde_json::json;

#[test]
fn a_finished_run_logs_it_and_has_one_digest_by_either_name() {
    let workspace = Workspace::new();
    let first = run(&mut workspace.train("out", &["--max-steps", "4"]));
    let digest = first.digest();
    let again = run(&mut workspace.resume("out", &["--max-steps", "4"]));
    assert_eq!(again.digest(), digest);
    assert!(again.stdout.contains("\nnothing to do: step 4 was already done\n"), "{again:?}");
    assert!(!again.stdout.contains("steps 5 to 4") && !again.stdout.contains("no step was done"), "{again:?}");
    let fewer = run(&mut workspace.resume("out", &["--max-steps", "2"]));
    assert!(fewer.stdout.contains("nothing to do: step 4 was already done, 2 were asked for"), "{fewer:?}");
    assert!(fewer.stderr.contains("--max-steps was 4 before and is 2 from here on"), "{fewer:?}");
    let (out, checkpoint) = (workspace.path("out"), workspace.path("out/checkpoint-4"));
    let of = |dir: &std::path::Path| run(program(&["digest"]).arg(dir));
    assert_eq!(of(&checkpoint).stdout, format!("digest: {digest}\n"));
    assert_eq!(of(&out).stdout, format!("checkpoint {}\ndigest: {digest}\n", checkpoint.display()));
    of(&workspace.path("model")).refused(1, &["model", "no good checkpoint"]);
    // An output directory may be named like a checkpoint.
    let odd = workspace.path("checkpoint-9");
    std::fs::rename(&out, &odd).unwrap();
    assert_eq!(of(&odd).stdout, format!("checkpoint {}\ndigest: {digest}\n", odd.join("checkpoint-4").display()));
}

#[test]
fn rotary_models_go_beyond_their_positions_with_a_warning_and_learned_ones_do_not() {
    let workspace = Workspace::new();
    let beyond = run(&mut workspace.train("out", &["--seq-length", "128", "--max-steps", "2"]));
    assert_eq!(beyond.code, 0, "{beyond:?}");
    let model = workspace.path("model");
    let words = ["warning: --seq-length 128", model.to_str().unwrap(), "64 positions (max_position_embeddings in its config.json)"];
    assert!(words.iter().all(|word| beyond.stderr.contains(word)), "{beyond:?}");
    let gpt2 = json!({"architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 8,
        "vocab_size": 256, "layer_norm_epsilon": 1e-5, "activation_function": "gelu_new"});
    workspace.write("model/config.json", gpt2.to_string());
    let words = ["--seq-length 16", model.to_str().unwrap(), "8 positions (n_positions in its config.json)", "use --seq-length 8 or less"];
    run(&mut workspace.train("gpt", &[])).refused(2, &words);
    workspace.write("model/config.json", CONFIG);
}

#[test]
fn a_cpu_run_shows_one_memory_and_counts_small_models_in_millions() {
    let workspace = Workspace::new();
    let printed = run(&mut workspace.train("out", &["--max-steps", "1"])).stdout;
    assert!(printed.contains("host memory, compute") && printed.contains("host memory, optimizer"), "{printed}");
    assert!(!printed.contains("device memory") && !printed.contains("sum_l"), "{printed}");
    let config = workspace.path("model/config.json");
    let mut bench =
        program(&["bench", "step", "--device=cpu", "--seq_length=8", "--threads=1", "--warmup=0", "--steps=1", "--model-config"]);
    let output = run(bench.arg(&config)).stderr;
    assert!(output.contains(" k parameters on") && !output.contains("0.000 B"), "{output}");
}

#[test]
fn a_file_that_is_no_profile_is_refused_in_one_line() {
    let workspace = Workspace::new();
    let profile = workspace.write("box.toml", "version = 1\n[host]\ncpus = {value = 1}\n");
    let path = profile.to_str().unwrap();
    run(&mut program(&["plan", "--model", "llama-8b", "--hardware", path])).refused(1, &[path, "line "]);
    run(&mut program(&["plan", "--model", "llama-8b", "--hardware", "/dev/null"])).refused(1, &["/dev/null"]);
    run(&mut program(&["plan", "--model", "llama-9b", "--hardware", "gb200"])).refused(2, &["--model llama-9b", "llama-8b"]);
    let model = workspace.path("model");
    let planned = |init: &[&str]| run(program(&["plan", "--hardware", "h200-pcie5", "--model"]).arg(&model).args(init));
    let (message, plain) = (planned(&["--init", "checkpoint"]), planned(&[]));
    assert!(message.code == 0 && message.stdout == plain.stdout, "weights of a checkpoint need no other memory: {message:?}");
}
