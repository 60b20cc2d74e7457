//! The host code for several GPUs with a fake CUDA driver (`fake_gpus/driver.c`): contexts, streams, events, memory and their order. The
//! fake driver ends a run that makes a call which a real driver would not tolerate.

use crate::program::{CONFIG, Outcome, Workspace, program, run};
use crate::support::emulator;
use crate::sweep::{PROMPTLY, sweep};
use serde_json::Value;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::OnceLock;
use std::time::Instant;

/// Whether the tests run in an emulator. Its programs cannot load libraries built here.
fn is_emulated() -> bool {
    emulator().is_some()
}

/// Builds a library from its C source.
fn build(source: &str) -> Vec<u8> {
    let workspace = Workspace::new();
    let (source, library) = (workspace.write("library.c", source), workspace.path("library.so"));
    let built = Command::new("cc").args(["-O1", "-w", "-shared", "-fPIC", "-o"]).arg(&library).arg(source).arg("-lpthread").output();
    let built = built.unwrap_or_else(|e| panic!("cc: {e}; a C compiler is needed"));
    assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
    std::fs::read(library).unwrap()
}

/// A directory with the fake driver and the fake cuBLASLt.
fn driver(workspace: &Workspace) -> PathBuf {
    static BUILT: OnceLock<Vec<u8>> = OnceLock::new();
    let library = workspace.write("libraries/libcuda.so.1", BUILT.get_or_init(|| build(include_str!("fake_gpus/driver.c"))));
    let products = library.with_file_name("libcublasLt.so.13");
    if !products.exists() {
        std::fs::hard_link(&library, products).unwrap();
    }
    library.parent().unwrap().to_path_buf()
}

/// A run on these GPUs.
fn train(fake: &[(&str, &str)], flags: &[&str]) -> Outcome {
    train_in(&Workspace::new(), fake, flags)
}

/// A run in a workspace that outlives it.
fn train_in(workspace: &Workspace, fake: &[(&str, &str)], flags: &[&str]) -> Outcome {
    train_by(workspace, "--attention=plain", fake, flags)
}

fn train_by(workspace: &Workspace, attention: &str, fake: &[(&str, &str)], flags: &[&str]) -> Outcome {
    let libraries = driver(workspace);
    let named = format!("--cuda-libraries={}", libraries.display());
    let common = ["--device=cuda", attention, "--hardware=h200-pcie5", "--bucket-mib=0.03125", &named];
    let mut command = workspace.train("out", &[&common, flags].concat());
    command.env("LD_LIBRARY_PATH", &libraries).envs(fake.iter().copied());
    run(&mut command)
}

/// The driver's counts of direct pulls, staged pulls and waits between ranks. Asserts that nothing has leaked.
fn counted(outcome: &Outcome) -> [usize; 3] {
    let line = outcome.stdout.lines().find(|line| line.starts_with("fake driver: ")).unwrap_or_else(|| panic!("{outcome:?}"));
    let numbers: Vec<usize> = line.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect();
    let [direct, staged, waits, left, contexts, ..] = numbers[..] else { panic!("{line}") };
    assert_eq!((left, contexts), (0, 0), "{line}");
    [direct, staged, waits]
}

#[test]
fn several_gpus_start_pull_and_end_in_an_order_that_a_driver_accepts() {
    if is_emulated() {
        return;
    }
    for (gpus, shares, resident) in [("2", 2, "0"), ("all", 2, "all"), ("3", 6, "1")] {
        let (gpus, shares, count) = (format!("--gpus={gpus}"), format!("--gradient-shares={shares}"), if gpus == "3" { "3" } else { "2" });
        let resident = if cfg!(feature = "repartition") { format!("--resident-buckets={resident}") } else { "--slots=2".into() };
        let flags = [&gpus, &shares, &resident, "--gradient-accumulation-steps=2"];
        let outcome = train(&[("FAKE_GPUS", count)], &flags);
        let [direct, staged, waits] = counted(&outcome);
        assert!(direct > 0 && staged == 0 && waits > 0, "{flags:?}: {outcome:?}");
        assert!(outcome.stdout.contains("GPU 0 (0000:0F:00.0), GPU 1 (0000:1F:00.0)"), "{outcome:?}");
        assert!(outcome.stdout.contains("GB/s from each other, over direct links between GPUs"), "{outcome:?}");
        // The driver exists, but the library that reports links does not.
        let links = if count == "2" { "GPU 0 and GPU 1: unknown link (" } else { "each two of 3 GPUs: unknown link (" };
        assert!(outcome.stdout.lines().any(|line| line.contains(links) && line.ends_with("; direct")), "{outcome:?}");
    }
}

/// Two groups of two ranks, and one group of four in which pairs share a key head.
#[test]
fn gpus_that_share_sequences_pull_rows_where_there_is_a_link_and_where_there_is_none() {
    if is_emulated() {
        return;
    }
    let machines = [("FAKE_MODELS_ARE_ONE", true), ("FAKE_NO_LINK", false)];
    for (nth, ranks) in ["--sequence-ranks=2", "--sequence-ranks=4"].into_iter().enumerate() {
        for &(links, has_links) in sweep(&machines[nth..][..1], &machines) {
            let fake = [("FAKE_GPUS", "4"), (links, "")];
            let pulls = |flags: &[&str]| {
                let [direct, staged, waits] = counted(&train(&fake, flags));
                assert_eq!((direct > 0, staged > 0), (has_links, !has_links), "{flags:?}");
                [direct + staged, waits]
            };
            let [apart, shared] = [pulls(&["--gpus=4"]), pulls(&["--gpus=4", ranks])];
            assert!(shared[0] > apart[0] && shared[1] > apart[1], "{ranks}: {apart:?}, then {shared:?}");
        }
    }
}

/// The number between the texts `before` and `behind` in the output.
fn number(outcome: &Outcome, before: &str, behind: &str) -> usize {
    let number = outcome.stdout.lines().find_map(|line| line.strip_prefix(before)?.split_once(behind)?.0.trim().parse().ok());
    number.unwrap_or_else(|| panic!("{before}...{behind}: {outcome:?}"))
}

/// A rank that fills a launch queue would block in the driver, and its memory could not be pulled.
#[test]
fn a_step_of_many_layers_fills_no_queue_where_peers_read_the_gpu() {
    if is_emulated() {
        return;
    }
    let workspace = Workspace::new();
    workspace.write("model/config.json", CONFIG.replace("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 200"));
    // Updates run on the GPU, so all weights are available at once.
    let resident = if cfg!(feature = "repartition") { "--resident-buckets=all" } else { "--slots=2" };
    let ahead = |more: &[&str]| {
        let outcome =
            train_in(&workspace, &[("FAKE_GPUS", "4")], &[&["--gpus=4", "--gradient-shares=4", "--max-steps=2", resident], more].concat());
        assert_eq!(outcome.code, 0, "{outcome:?}");
        // All weights are pulled anew, and the first layers do not wait for those of the last layers.
        let [buckets, pulls] =
            [number(&outcome, "  buckets ", " of"), number(&outcome, "fake driver had ", " pulls before a forward pass")];
        let all = 3 * buckets;
        let least = usize::from(cfg!(feature = "repartition"));
        assert!(all > 300 && (least..=all / 2).contains(&pulls), "{pulls} pulls before a forward pass, of {all}");
        number(&outcome, "fake driver was behind by ", " operations")
    };
    let spans = format!("--trace={}", workspace.path("trace.json").display());
    for more in [vec![], vec![spans.as_str()]] {
        let ahead = ahead(&more);
        assert!((100..=1000).contains(&ahead), "{more:?}: {ahead}");
    }
}

/// The timeline shows waits for the driver and for late launches.
#[test]
fn calls_in_which_the_host_stays_long_have_a_track() {
    if is_emulated() {
        return;
    }
    let workspace = Workspace::new();
    let trace = workspace.path("trace.json");
    let flags = ["--gpus=2", "--gradient-shares=2", &format!("--trace={}", trace.display())];
    assert_eq!(train_in(&workspace, &[("FAKE_GPUS", "2"), ("FAKE_SLOW", "")], &flags).code, 0);
    let trace: Value = serde_json::from_slice(&std::fs::read(trace).unwrap()).unwrap();
    let events = trace["traceEvents"].as_array().unwrap();
    for rank in 0..2 {
        let track =
            events.iter().find(|event| event["args"]["name"] == format!("rank {rank} calls")).unwrap_or_else(|| panic!("rank {rank}"));
        let is_slow = |event: &&Value| event["tid"] == track["tid"] && event["name"] == "pull" && event["dur"].as_f64().unwrap() >= 1000.0;
        assert!(events.iter().filter(is_slow).count() > 10, "rank {rank}");
    }
}

#[test]
fn one_gpu_waits_for_nobody() {
    if is_emulated() {
        return;
    }
    let outcome = train(&[], &["--gradient-shares=2", "--gradient-accumulation-steps=2"]);
    assert_eq!(counted(&outcome), [0, 0, 0]);
}

/// A program started by its path, as by a service, runs without an activated environment.
#[test]
fn a_program_finds_the_libraries_of_the_environment_that_it_is_installed_in() {
    if is_emulated() {
        return;
    }
    let workspace = Workspace::new();
    let libraries = driver(&workspace);
    let train = |program: &Path, cuda: &str| {
        let mut command = Command::new(program);
        command.args(["train", "--config"]).arg(workspace.path("run.toml")).arg("--output-dir").arg(workspace.path(cuda));
        command.args(["--device=cuda", "--attention=plain", "--hardware=h200-pcie5", "--max-steps=1"]);
        run(command
            .env("LD_LIBRARY_PATH", &libraries)
            .env("FAKE_CUDA", cuda)
            .env("PATH", "")
            .env("HOME", "/nowhere")
            .env_remove("VIRTUAL_ENV"))
    };
    let program = workspace.path("venv/bin/superoffload");
    std::fs::create_dir_all(program.parent().unwrap()).unwrap();
    // A separate process copies the file. A child of another test could inherit this process's writable descriptor, which would block its
    // execution.
    assert_eq!(run(Command::new("cp").arg(env!("CARGO_BIN_EXE_superoffload")).arg(&program)).code, 0);
    std::fs::remove_file(libraries.join("libcublasLt.so.13")).unwrap();
    // A hard link to the driver's file. A copy would be a second library with its own state.
    let install = |folder: &str, name: &str| {
        let folder = workspace.path("venv/lib/python3.12/site-packages/nvidia").join(folder).join("lib");
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::hard_link(libraries.join("libcuda.so.1"), folder.join(name)).unwrap();
    };
    for (cuda, package) in [("13000", "'nvidia-cublas==13.*'"), ("12080", "'nvidia-cublas-cu12==12.*'")] {
        train(&program, cuda).refused(1, &["open libcublasLt.so.", package]);
    }
    install("cublas", "libcublasLt.so.12");
    assert_eq!([train(&program, "13000").code, train(&program, "12080").code], [0, 0], "any driver serves what is of an older CUDA");
    train(&program, "11080").refused(1, &["driver for CUDA 11", "driver 525"]);
    std::fs::remove_dir_all(workspace.path("venv/lib/python3.12/site-packages/nvidia/cublas")).unwrap();
    install("cu13", "libcublasLt.so.13");
    assert_eq!(train(&program, "13010").code, 0);
    train(&program, "12000").refused(1, &["open libcublasLt.so.12", "'nvidia-cublas-cu12==12.*'"]);
}

/// cuDNN has the same file name for every release of CUDA.
#[test]
fn a_cudnn_that_is_built_for_a_newer_cuda_than_the_drivers_is_refused() {
    if is_emulated() {
        return;
    }
    let workspace = Workspace::new();
    let libraries = driver(&workspace);
    let install = |name| std::fs::hard_link(libraries.join("libcuda.so.1"), libraries.join(name)).unwrap();
    ["libcudnn.so.9", "libnvrtc.so.12", "libnvrtc.so.13", "libcublasLt.so.12"].into_iter().for_each(install);
    let train = |cuda, cudnn| train_by(&workspace, "--attention=cudnn", &[("FAKE_CUDA", cuda), ("FAKE_CUDNN", cudnn)], &[]);
    train("13000", "13040").refused(1, &["open cuDNN", "libcudnn_graph.so.9"]);
    install("libcudnn_graph.so.9");
    let words = ["libcudnn.so.9 is built for CUDA 13, but the driver supports CUDA 12", "'nvidia-cudnn-cu12==9.*'", "--cuda-libraries"];
    train("12080", "13040").refused(1, &words);
    // The library is accepted first and rejected later, because it is not cuDNN.
    for (cuda, cudnn) in [("13000", "13040"), ("12000", "12090"), ("13000", "12090")] {
        train(cuda, cudnn).refused(1, &["find cudnn", "libcudnn.so.9", "this version of the library lacks it"]);
    }
}

/// Trainings use the portable kernels, too, and not only the kernel cases. Only kernels of experts have a portable variant.
#[test]
fn a_suite_of_portable_kernels_trains_by_these_too() {
    if is_emulated() {
        return;
    }
    let workspace = Workspace::new();
    let libraries = driver(&workspace);
    let suite = |flags: &[&str]| {
        let mut command = program(&["selftest", "--device=cuda", "--require-gpu", "--small", "--attention=plain"]);
        run(command.args(flags).arg("training/losses of Qwen3Moe in bfloat16").env("LD_LIBRARY_PATH", &libraries).env("FAKE_PORTABLE", "1"))
    };
    assert!(suite(&[]).stderr.contains("kernels for Hopper alone"), "this driver sees which are taken");
    let portable = suite(&["--portable"]);
    let message = [&portable.stdout, &portable.stderr].map(|text| text.contains("kernels for Hopper alone"));
    assert!(portable.stdout.contains(", portable kernels") && message == [false; 2], "{portable:?}");
    assert!(portable.stdout.contains("FAILED training/losses"), "nothing is computed here: {portable:?}");
}

/// Kernels of experts are loaded for models with experts, and the driver accepts their launches.
#[test]
fn models_with_experts_start_and_end_on_gpus() {
    if is_emulated() {
        return;
    }
    for architecture in
        ["Qwen3MoeForCausalLM", "OlmoeForCausalLM", "MixtralForCausalLM", "GptOssForCausalLM", "Gemma4ForCausalLM", "DeepseekV3ForCausalLM"]
    {
        let kv_heads = if architecture.starts_with("Deepseek") { 4 } else { 2 };
        let config = serde_json::json!({
            "architectures": [architecture], "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": kv_heads,
            "head_dim": 8, "intermediate_size": 32, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2,
            "mlp_only_layers": [1], "vocab_size": 256, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
            "rope_scaling": {"rope_type": "default"}, "tie_word_embeddings": false,
            "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "n_shared_experts": 1,
            "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.0, "first_k_dense_replace": 1,
            "hidden_size_per_layer_input": 0, "enable_moe_block": true, "top_k_experts": 2, "global_head_dim": 264,
            "rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}},
        });
        for gpus in ["--gpus=1", "--gpus=2"] {
            let workspace = Workspace::new();
            let model = workspace.write("model/config.json", config.to_string());
            let model = format!("--model={}", model.parent().unwrap().display());
            let outcome = train_in(&workspace, &[], &[&model, "--init=random", "--tokenizer=bytes", gpus]);
            assert_eq!(outcome.code, 0, "{architecture} {gpus}: {outcome:?}");
            assert_eq!(counted(&outcome)[0] > 0, gpus == "--gpus=2", "{architecture}: {outcome:?}");
        }
    }
}

#[test]
fn a_run_that_resumes_under_another_library_logs_it() {
    if is_emulated() {
        return;
    }
    let workspace = Workspace::new();
    let resume = |version, steps| train_in(&workspace, &[("FAKE_CUBLASLT", version)], &[steps, "--resume-from-checkpoint=auto"]);
    let message = "cuBLASLt was \"130100\" and is \"130200\": from here on results may differ from a run without the change";
    let value = [("130100", "--max-steps=1"), ("130100", "--max-steps=2"), ("130200", "--max-steps=3"), ("130200", "--max-steps=4")]
        .map(|(version, steps)| resume(version, steps).stderr.contains(message));
    assert_eq!(value, [false, false, true, false]);
}

/// The driver checks that freed objects are not used and that nothing leaks.
#[test]
fn a_gpu_uses_no_returned_memory_after_a_plan_changes() {
    if is_emulated() {
        return;
    }
    for seed in 1..4 {
        let masters = if cfg!(feature = "repartition") && seed > 1 { "--masters=split" } else { "--masters=float32" };
        let flags = ["--replan=random", &format!("--seed={seed}"), masters];
        let outcome = train(&[], &flags);
        assert_eq!(counted(&outcome), [0, 0, 0]);
        assert!(outcome.stdout.contains(": another plan in "), "{outcome:?}");
        // Two GPUs drop their peer mappings before the change.
        let outcome = train(&[], &[&flags[..], &["--gpus=2"]].concat());
        let [direct, staged, waits] = counted(&outcome);
        assert!(direct > 0 && staged == 0 && waits > 0 && outcome.stdout.contains(": another plan in "), "{outcome:?}");
    }
}

/// Numbers of allocations and page locks of a run.
fn taken(outcome: &Outcome) -> [usize; 2] {
    let line = outcome.stdout.lines().find(|line| line.starts_with("fake driver took: ")).unwrap_or_else(|| panic!("{outcome:?}"));
    let numbers: Vec<usize> = line.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect();
    numbers.try_into().unwrap_or_else(|_| panic!("{line}"))
}

/// The digest in the output, before the line of the driver.
fn digest(outcome: &Outcome) -> &str {
    assert_eq!(outcome.code, 0, "{outcome:?}");
    outcome.stdout.lines().find_map(|line| line.strip_prefix("digest: ")).unwrap_or_else(|| panic!("no digest: {outcome:?}"))
}

#[test]
fn a_gpu_without_memory_before_the_first_step_is_refused_and_leaves_nothing() {
    if is_emulated() {
        return;
    }
    let flags = ["--replan=off", "--save-memory=off"];
    let at_start = taken(&train(&[], &flags));
    for (variable, calls) in ["FAKE_NO_MEMORY", "FAKE_NO_PINS"].into_iter().zip(at_start) {
        for nth in (1..=calls).step_by(sweep(3, 1)) {
            let outcome = train(&[(variable, &nth.to_string())], &flags);
            outcome.refused(1, &["CUDA error 2"]);
            counted(&outcome);
        }
    }
}

/// Pages of copies of the GPU's states are locked at the start and by the first save. Where the system refuses that, the states are copied by
/// way of another buffer. A refusal of any other lock ends the run before its first step.
#[test]
fn a_save_whose_copies_cannot_be_page_locked_changes_no_bit() {
    if is_emulated() {
        return;
    }
    let [stopping, beside] = ["--save-memory=off", "--save-memory=auto"].map(|memory| train(&[], &["--replan=off", memory]));
    let ([_, at_start], [_, with_copies]) = (taken(&stopping), taken(&beside));
    assert!(with_copies > at_start && digest(&beside) == digest(&stopping), "{beside:?}");
    let mut tolerated = 0;
    for nth in 1..=with_copies {
        let outcome = train(&[("FAKE_NO_PINS", &nth.to_string())], &["--replan=off"]);
        match outcome.code {
            0 => assert_eq!(digest(&outcome), digest(&stopping), "{nth}"),
            _ => outcome.refused(1, &["CUDA error 2"]),
        }
        tolerated += usize::from(outcome.code == 0);
        counted(&outcome);
    }
    assert_eq!(tolerated, with_copies - at_start);
}

/// A run with a save to come locks the pages of copies of the GPU's states beside its steps, and unlocks all. A run whose only save is the
/// last one locks none.
#[cfg(feature = "repartition")]
#[test]
fn pages_of_copies_are_locked_beside_steps_where_a_save_is_to_come() {
    if is_emulated() {
        return;
    }
    let run =
        |limit: &str, gpus: &str, every: &str| train(&[], &["--replan=off", "--resident-buckets=all", "--max-steps=9", limit, gpus, every]);
    let beside = |gpus: &str, every: &str| {
        // Exactly the memory that the plan needs leaves none for copies on the GPU.
        let refused = run("--hbm-limit=1100MiB", gpus, every).stderr;
        let needed = refused.split_once(" bytes)").and_then(|(before, _)| before.rsplit_once('(')).map_or("", |(_, bytes)| bytes);
        let outcome = run(&format!("--hbm-limit={needed}"), gpus, every);
        let lines = outcome.stdout.lines().filter_map(|line| line.strip_prefix("fake driver locked beside steps: "));
        let [line] = lines.collect::<Vec<_>>()[..] else { panic!("{outcome:?}") };
        let (beside, left) = line.split_once(", and ").expect("two numbers");
        assert!(left == "0 were left" && counted(&outcome).len() == 3, "{line}");
        (beside.parse::<usize>().unwrap(), digest(&outcome).to_string())
    };
    for gpus in ["--gpus=1", "--gpus=2"] {
        let (with, without) = (beside(gpus, "--save-steps=4"), beside(gpus, "--save-steps=9"));
        assert!(with.0 > 0 && without.0 == 0 && with.1 == without.1, "{with:?} {without:?}");
    }
}

#[test]
fn a_gpu_that_gets_no_memory_for_another_plan_goes_on_with_the_old_one() {
    if !is_emulated() {
        keeps_the_old_plan_without_memory(&["--gpus=1"]);
    }
}

/// Working weights of split masters leave the model's weights before a change of plan and return after it. None is lost where either fails.
#[cfg(feature = "repartition")]
#[test]
fn a_gpu_that_gets_no_memory_for_another_plan_keeps_split_masters() {
    if !is_emulated() {
        keeps_the_old_plan_without_memory(&["--gpus=1", "--masters=split"]);
    }
}

/// One of the GPUs gets no memory. All continue with the old plan.
#[test]
fn gpus_of_which_one_gets_no_memory_for_another_plan_go_on_with_the_old_one() {
    if !is_emulated() {
        keeps_the_old_plan_without_memory(&["--gpus=2"]);
    }
}

/// Each third allocation of the first other plan fails once, or each one in a full sweep, and each page lock or, with several GPUs, each
/// third one. The old plan stays, with the same bits.
fn keeps_the_old_plan_without_memory(more: &[&str]) {
    let flags = |replan| [&["--seed=1", "--save-memory=off", replan], more].concat();
    let kept = train(&[], &flags("--replan=off"));
    let at_start = taken(&kept);
    let each_pin = if more.contains(&"--gpus=1") { 1 } else { sweep(3, 1) };
    for (which, variable) in ["FAKE_NO_MEMORY", "FAKE_NO_PINS"].into_iter().enumerate() {
        let mut refused = 0;
        for nth in (at_start[which] + 1..).step_by([sweep(3, 1), each_pin][which]) {
            let outcome = train(&[(variable, &nth.to_string())], &flags("--replan=random"));
            counted(&outcome);
            if outcome.stdout.contains(": another plan in ") {
                // All allocations of the first plan were tried.
                break;
            }
            let why = outcome.stderr.lines().find(|line| line.contains("the plan stays, and the search for faster plans ends here: "));
            assert!(why.is_some_and(|why| why.contains("CUDA error 2")), "{variable} {nth}: {outcome:?}");
            assert_eq!(digest(&outcome), digest(&kept), "{variable} {nth}");
            refused += 1;
        }
        assert!(refused > 1, "{variable}: only {refused} pieces of memory");
    }
    // If the old plan's memory is not available again either, the run ends. Its checkpoints stay.
    let outcome = train(&[("FAKE_NO_MEMORY", &format!("{}+", at_start[0] + 1))], &flags("--replan=random"));
    outcome.refused(1, &["CUDA error 2"]);
    assert!(outcome.stdout.contains("checkpoint"), "{outcome:?}");
    counted(&outcome);
}

#[test]
fn without_a_link_gradients_pass_through_host_memory_with_a_warning() {
    if is_emulated() {
        return;
    }
    let outcome = train(&[("FAKE_NO_LINK", "")], &["--gpus=2"]);
    let [direct, staged, waits] = counted(&outcome);
    assert!(direct == 0 && staged > 0 && waits > 0, "{outcome:?}");
    assert!(outcome.stderr.contains("; no direct access, so that gradients and weights pass through host memory"), "{outcome:?}");
    // Half of the links' rate in both directions in `h200-pcie5`.
    let planned = "peers       25.2 GB/s from each other, through host memory, in buffers of the driver that are not counted here";
    assert!(outcome.stdout.contains(planned), "{outcome:?}");
}

#[test]
fn gpus_that_cannot_train_together_are_refused_and_leave_nothing() {
    if is_emulated() {
        return;
    }
    train(&[], &["--gpus=3"]).refused(2, &["--gpus 3", "there are 2 GPUs", "--gpus 2"]);
    train(&[("FAKE_MODELS", "")], &["--gpus=2"]).refused(1, &["GPU 0 (0000:0F:00.0) is a Fake 0", "GPU 1 (0000:1F:00.0) is a Fake 1"]);
    let other = train(&[("FAKE_ALGORITHMS", "")], &["--gpus=2"]);
    other.refused(1, &["rank 1", "algorithm 70", "algorithm 71"]);
    counted(&other);
}

/// A run of two processes without NCCL. `fake` sets the visible GPUs of each.
fn train_as_two(fake: [&[(&str, &str)]; 2], flags: &[&str]) -> Vec<Outcome> {
    train_as_two_in(&Workspace::new(), fake, flags)
}

/// A run of two processes with NCCL.
fn train_by_nccl(fake: [&[(&str, &str)]; 2], flags: &[&str]) -> Vec<Outcome> {
    static BUILT: OnceLock<Vec<u8>> = OnceLock::new();
    let workspace = Workspace::new();
    workspace.write("libraries/libnccl.so.2", BUILT.get_or_init(|| build(include_str!("fake_gpus/nccl.c"))));
    train_as_two_in(&workspace, fake, flags)
}

fn train_as_two_in(workspace: &Workspace, fake: [&[(&str, &str)]; 2], flags: &[&str]) -> Vec<Outcome> {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let libraries = driver(workspace);
    let (named, rendezvous) = (format!("--cuda-libraries={}", libraries.display()), format!("--rendezvous=127.0.0.1:{port}"));
    let start = |process: usize| {
        let process_flag = format!("--process={process}");
        let common =
            ["--attention=plain", "--hardware=h200-pcie5", "--bucket-mib=0.03125", "--processes=2", &named, &rendezvous, &process_flag];
        let mut command = workspace.train("out", &[&common, flags].concat());
        let command = command.env("LD_LIBRARY_PATH", &libraries).env("SUPEROFFLOAD_RUN_TOKEN", "a token that nobody guesses");
        command.envs(fake[process].iter().copied()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let children: Vec<_> = (0..2).map(start).collect();
    children.into_iter().map(|child| child.wait_with_output().unwrap().into()).collect()
}

/// Each process opens the GPU with its index and frees everything.
#[test]
fn processes_of_one_machine_take_a_gpu_each() {
    if is_emulated() {
        return;
    }
    let resident = if cfg!(feature = "repartition") { "--resident-buckets=1" } else { "--slots=2" };
    for flags in [&[][..], &["--device=cuda", "--gradient-shares=4", resident], &["--strategy=no-offload", "--max-grad-norm=0.5"]] {
        let outcomes = train_as_two([&[]; 2], flags);
        for (process, outcome) in outcomes.iter().enumerate() {
            assert_eq!(outcome.code, 0, "{flags:?}: {outcome:?}");
            assert_eq!(counted(outcome), [0, 0, 0], "what others have comes over the network");
            let takes = format!("process {process} takes GPU {process} (0000:{process}F:00.0), one for each process of its machine");
            assert!(outcome.stdout.contains(&takes), "{outcome:?}");
            let gave: Vec<_> = outcome.stdout.lines().filter(|line| line.starts_with("fake driver: GPU ")).collect();
            assert!(gave.len() == 1 && gave[0].starts_with(&format!("fake driver: GPU {process} gave ")), "{gave:?}");
        }
    }
}

#[test]
fn processes_whose_gpus_are_too_few_or_differ_are_refused_on_both_sides() {
    if is_emulated() {
        return;
    }
    let refused = |fake: [&[(&str, &str)]; 2], flags: &[&str], code, words: &[&str]| {
        for outcome in train_as_two(fake, flags) {
            outcome.refused(code, words);
            counted(&outcome);
        }
    };
    let one = &[("FAKE_GPUS", "1")][..];
    refused([one, one], &[], 2, &["--processes 2", "sees GPUs: 1, processes on its machine: 2"]);
    refused([&[("FAKE_MODELS", "")]; 2], &[], 1, &["process 0 on ", " has a Fake 0", "process 1 on ", " has a Fake 1"]);
    refused([&[], &[("FAKE_GPUS", "0")]], &[], 1, &["process 1 on ", " has none: ", "--device cpu"]);
    // This difference is detected when all processes have opened their GPUs.
    let outcomes = train_as_two([&[], &[("FAKE_CUBLASLT", "130200")]], &[]);
    outcomes[1].refused(2, &["cuBLASLt: 130100 for process 0 on ", "130200 for process 1 on "]);
    outcomes[0].refused(1, &["process 1 on ", "cuBLASLt: "]);
}

/// The fake NCCL's counts in a process: exchanges, communicators and aborted communicators.
fn swapped(outcome: &Outcome) -> [usize; 3] {
    let line = outcome.stdout.lines().find_map(|line| line.strip_prefix("fake nccl: ")).unwrap_or_else(|| panic!("{outcome:?}"));
    let numbers: Vec<usize> = line.split(|c: char| !c.is_ascii_digit()).filter_map(|number| number.parse().ok()).collect();
    numbers.try_into().unwrap_or_else(|_| panic!("{line}"))
}

/// Both processes make equally many calls in one order with matching sizes, and each destroys its communicator.
#[test]
fn slices_pass_by_nccl_in_one_order_where_all_have_it() {
    if is_emulated() {
        return;
    }
    let resident = if cfg!(feature = "repartition") { "--resident-buckets=1" } else { "--slots=2" };
    for flags in
        [&[][..], &["--gradient-shares=4", "--gradient-accumulation-steps=2", resident], &["--strategy=zero-offload", "--transport=nccl"]]
    {
        let outcomes = train_by_nccl([&[]; 2], flags);
        for outcome in &outcomes {
            assert_eq!((outcome.code, counted(outcome)), (0, [0; 3]), "{flags:?}: {outcome:?}");
            assert!(outcome.stdout.contains("gradients and weights pass from GPU to GPU by NCCL 2.28.9"), "{outcome:?}");
        }
        let [[swaps, opened, aborted], other] = [&outcomes[0], &outcomes[1]].map(swapped);
        assert!(swaps > 10 && (opened, aborted) == (1, 1) && other == [swaps, 1, 1], "{flags:?}: {outcomes:?}");
    }
    let outcomes = train_by_nccl([&[]; 2], &["--transport=tcp"]);
    assert!(outcomes.iter().all(|outcome| outcome.code == 0 && !outcome.stdout.contains("fake nccl")), "{outcomes:?}");
}

#[test]
fn missing_or_failing_nccl_is_reported_with_a_remedy() {
    if is_emulated() {
        return;
    }
    for outcome in train_as_two([&[]; 2], &["--transport=nccl"]) {
        outcome
            .refused(1, &["use --transport nccl: process 0 on ", "open libnccl.so.2", "pip install 'nvidia-nccl-cu13'", "--transport tcp"]);
    }
    let outcomes = train_as_two([&[]; 2], &[]);
    let message = |outcome: &Outcome| outcome.code == 0 && outcome.stderr.contains("gradients and weights pass over TCP: process 0 on ");
    assert!(outcomes.iter().all(message), "{outcomes:?}");
    let old = &[("FAKE_NCCL", "22602")][..];
    for outcome in train_by_nccl([&[], old], &["--transport=nccl"]) {
        outcome.refused(1, &["process 1 on ", "libnccl.so.2 is NCCL 2.26.2, and 2.27 is the oldest that works"]);
    }
    for outcome in train_by_nccl([&[], &[("FAKE_NCCL", "22901")]], &["--transport=nccl"]) {
        outcome.refused(1, &["process 0 on ", " has NCCL 2.28.9, process 1 on ", " has 2.29.1"]);
    }
    // One process fails while the other waits for it in an exchange.
    let start = Instant::now();
    for outcome in train_by_nccl([&[], &[("FAKE_NCCL_FAILS", "2")]], &[]) {
        outcome
            .refused(1, &["exchange slices with the GPUs of other processes", "NCCL error 2 (unhandled system error)", "--transport tcp"]);
        assert_eq!(swapped(&outcome)[1..], [1, 1], "{outcome:?}");
    }
    assert!(start.elapsed() < PROMPTLY, "{:?}", start.elapsed());
}

#[test]
fn a_communicator_of_nccl_that_never_ends_keeps_no_process_and_hides_no_cause() {
    if is_emulated() {
        return;
    }
    let (hangs, start) = (("FAKE_NCCL_HANGS", ""), Instant::now());
    for outcome in train_by_nccl([&[hangs], &[hangs, ("FAKE_NCCL_FAILS", "2")]], &[]) {
        outcome.refused(1, &["process 1 on ", "NCCL error 2 (unhandled system error)"]);
    }
    assert!(start.elapsed() < PROMPTLY, "{:?}", start.elapsed());
}

/// Code 46, which the driver returns if another process has exclusive use of the GPU, at each call that finds and opens a GPU.
#[test]
fn a_gpu_in_use_by_another_process_is_recognized_by_the_drivers_code() {
    if is_emulated() {
        return;
    }
    for call in 0..12 {
        let outcome = train(&[("FAKE_FAIL", &format!("{call},46"))], &[]);
        outcome.refused(1, &["CUDA error 46 ", "another process has exclusive use of the GPU"]);
    }
}

#[test]
fn a_gpu_that_is_lost_ends_all_ranks_at_once_and_is_named() {
    if is_emulated() {
        return;
    }
    for after in ["0", "7", "60"] {
        let start = Instant::now();
        let outcome = train(&[("FAKE_FAULT", after)], &["--gpus=2"]);
        outcome.refused(1, &["rank 1 (GPU 1): pull ", "CUDA error 700", "context is lost", "last checkpoint"]);
        counted(&outcome);
        assert!(start.elapsed() < PROMPTLY, "{:?}", start.elapsed());
    }
}
