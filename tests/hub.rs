//! Models by their name on the hub.

use crate::program::{CONFIG, Outcome, Workspace, program, run};
use serde_json::Value;
use std::os::unix::fs::symlink;
use std::process::Command;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A cache as `huggingface_hub` makes it, with a model whose config is a link into `blobs`.
fn cache(workspace: &Workspace) {
    workspace.write("cache/models--org--tiny/blobs/c0ffee", CONFIG);
    workspace.write("cache/models--org--tiny/refs/main", COMMIT);
    let config = workspace.path(&format!("cache/models--org--tiny/snapshots/{COMMIT}/config.json"));
    std::fs::create_dir_all(config.parent().unwrap()).unwrap();
    symlink("../../blobs/c0ffee", config).unwrap();
}

fn with_cache(workspace: &Workspace, command: &mut Command) -> Outcome {
    run(command.env("HF_HUB_CACHE", workspace.path("cache")))
}

#[test]
fn a_model_in_the_cache_is_trained_by_name_and_its_commit_recorded() {
    let workspace = Workspace::new();
    cache(&workspace);
    let trained = with_cache(&workspace, &mut workspace.train("out", &["--model=org/tiny"]));
    assert_eq!(trained.digest(), run(&mut workspace.train("by-path", &[])).digest());
    let named = format!("org/tiny@{COMMIT}");
    assert!(trained.stdout.starts_with(&format!("reading {named} and ")), "{trained:?}");
    assert!(trained.stdout.contains(&format!("\nmodel   {named}: LlamaForCausalLM")), "{trained:?}");
    assert_eq!(workspace.metrics_and_facts("out")[0]["facts"]["model"]["config"], *named);
    let state = std::fs::read_to_string(workspace.path("out/checkpoint-12/trainer_state.json")).unwrap();
    let state: Value = serde_json::from_str(&state).unwrap();
    assert_eq!(state["manifest"]["run"]["hub_model"], serde_json::json!({"repo": "org/tiny", "commit": COMMIT}), "{state:#}");
    for revision in ["main", COMMIT] {
        let model = format!("--model=org/tiny@{revision}");
        let resumed = with_cache(&workspace, &mut workspace.resume("out", &[&model]));
        assert_eq!(resumed.digest(), trained.digest());
    }
}

#[test]
fn data_and_plan_take_the_name_and_a_directory_wins_over_the_cache() {
    let workspace = Workspace::new();
    cache(&workspace);
    let data = format!("--data={}", workspace.path("data.txt").display());
    let view = ["data", "--model=org/tiny", &data, "--init=random", "--seq-length=16"];
    let found = with_cache(&workspace, &mut program(&view));
    assert_eq!(found.code, 0, "{found:?}");
    for args in [&view[..], &["plan", "--model=org/tiny", "--hardware=h200-pcie5"]] {
        run(program(args).env("HF_HUB_CACHE", "/no/where"))
            .refused(2, &["--model org/tiny: no such directory, and not in the", "/no/where"]);
        workspace.write("org/tiny/config.json", "no JSON");
        let own = with_cache(&workspace, program(args).current_dir(workspace.path("")));
        own.refused(1, &["org/tiny/config.json: "]);
        std::fs::remove_dir_all(workspace.path("org")).unwrap();
    }
}
