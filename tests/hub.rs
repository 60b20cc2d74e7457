//! Models by their name on the hub, from its cache or downloaded.

use crate::program::{CONFIG, Outcome, Workspace, program, run};
use crate::sweep::PROMPTLY;
use serde_json::Value;
use std::os::unix::fs::symlink;
use std::process::Command;

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A cache in the layout of `huggingface_hub`. The model's config is a link into `blobs`.
fn cache(workspace: &Workspace) {
    workspace.write("cache/models--org--tiny/blobs/c0ffee", CONFIG);
    workspace.write("cache/models--org--tiny/refs/main", COMMIT);
    let config = workspace.path(&format!("cache/models--org--tiny/snapshots/{COMMIT}/config.json"));
    std::fs::create_dir_all(config.parent().unwrap()).unwrap();
    symlink("../../blobs/c0ffee", config).unwrap();
}

/// Runs with this cache and without the hub.
fn with_cache(workspace: &Workspace, command: &mut Command) -> Outcome {
    run(command.env("HF_HUB_CACHE", workspace.path("cache")).env("HF_HUB_OFFLINE", "1"))
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
        run(program(args).env("HF_HUB_CACHE", "/no/where").env("HF_HUB_OFFLINE", "1"))
            .refused(2, &["--model org/tiny: no such directory, and not in the", "/no/where"]);
        workspace.write("org/tiny/config.json", "no JSON");
        let own = with_cache(&workspace, program(args).current_dir(workspace.path("")));
        own.refused(1, &["org/tiny/config.json: "]);
        std::fs::remove_dir_all(workspace.path("org")).unwrap();
    }
}

#[cfg(feature = "hub")]
mod download {
    use super::*;
    use crate::hub_server::{Drip, HubRepo, HubServer, ReceivedRequest, Reply};
    use nix::sys::signal::{Signal, kill};
    use nix::unistd::Pid;
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    /// A run of `model` that uses the hub at `endpoint`.
    fn train(workspace: &Workspace, endpoint: &str, model: &str) -> Command {
        let mut command = workspace.train("out", &[&format!("--model={model}"), "--init=random"]);
        command.envs([("HF_ENDPOINT", endpoint), ("HF_TOKEN", "hf_secret")]).env("HF_HUB_CACHE", workspace.path("cache"));
        without_proxy(&mut command);
        command
    }

    /// Removes proxy settings, because the server is on this machine.
    fn without_proxy(command: &mut Command) -> &mut Command {
        command.env_remove("HF_HUB_OFFLINE").env_remove("http_proxy").env_remove("HTTP_PROXY").env_remove("ALL_PROXY")
    }

    #[test]
    fn a_model_is_downloaded_once_and_trained() {
        let workspace = Workspace::new();
        let repo = HubRepo::new(vec![("config.json", CONFIG.as_bytes().to_vec()), ("evil.py", b"import os".to_vec())]);
        let server = HubServer::start(move |received, _| repo.answer(received));
        let trained = run(&mut train(&workspace, &server.endpoint(), "org/tiny"));
        assert_eq!(trained.digest(), run(&mut workspace.train("by-path", &[])).digest());
        assert!(trained.stdout.contains(&format!("downloading org/tiny at commit {COMMIT}: 1 file of ")), "{trained:?}");
        assert!(!format!("{trained:?}").contains("hf_secret"), "{trained:?}");
        let again = run(&mut train(&workspace, "http://127.0.0.1:1", "org/tiny"));
        assert_eq!((again.digest(), server.received().len()), (trained.digest(), 2), "the second run asks nobody");
        run(&mut train(&workspace, "http://127.0.0.1:1", "org/other"))
            .refused(1, &["download org/other, which is not available locally, from http://127.0.0.1:1: "]);
    }

    #[cfg(feature = "parquet")]
    #[test]
    fn data_is_downloaded_once_and_trained_as_its_file() {
        let workspace = Workspace::new();
        let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/parquet/labels.parquet");
        let bytes = std::fs::read(&file).unwrap();
        let repo = HubRepo::new(vec![("default/train/0000.parquet", bytes.clone()), ("default/test/0000.parquet", bytes)]);
        let server = HubServer::start(move |received, _| {
            repo.answer(&ReceivedRequest {
                path: received.path.replace("/datasets/", "/").replace("/api/", "/api/models/"),
                ..received.clone()
            })
        });
        let by_name = |endpoint: &str, name: &str| {
            let mut command = workspace.train("out", &[&format!("--data={name}"), "--tokenizer=bytes"]);
            run(without_proxy(command.env("HF_ENDPOINT", endpoint).env("HF_HUB_CACHE", workspace.path("cache"))))
        };
        let trained = by_name(&server.endpoint(), "org/tiny");
        let data = format!("--data={}", file.display());
        assert_eq!(trained.digest(), run(&mut workspace.train("by-path", &[&data, "--tokenizer=bytes"])).digest());
        assert!(trained.stdout.contains(&format!("downloading org/tiny at commit {COMMIT}: 1 file of ")), "{trained:?}");
        let again = by_name("http://127.0.0.1:1", "org/tiny:default:train");
        assert_eq!((again.digest(), server.received().len()), (trained.digest(), 2), "the second run asks nobody");
        by_name("http://127.0.0.1:1", "org/tiny:default:test")
            .refused(1, &["download org/tiny:default:test, which is not available locally, from "]);
        by_name("http://127.0.0.1:1", "org/tiny.jsonl").refused(1, &["read org/tiny.jsonl: No such file"]);
    }

    /// Asserts that a run ends soon as interrupted if it is asked to stop while the hub answers the file list with `wrong`.
    fn interrupted_at_the_list(wrong: fn(Reply) -> Reply) {
        let (workspace, (received, requested)) = (Workspace::new(), mpsc::channel());
        let repo = HubRepo::new(vec![("config.json", CONFIG.as_bytes().to_vec())]);
        let server = HubServer::start(move |request, _| {
            received.send(()).unwrap();
            wrong(repo.answer(request))
        });
        let child = train(&workspace, &server.endpoint(), "org/tiny").spawn().unwrap();
        requested.recv_timeout(Duration::from_secs(60)).unwrap();
        let began = Instant::now();
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
        let ended: Outcome = child.wait_with_output().unwrap().into();
        assert!(ended.code == 75 && ended.stdout.contains("interrupted while files were being downloaded"), "{ended:?}");
        assert!(began.elapsed() < PROMPTLY, "{:?}", began.elapsed());
    }

    const PAUSE: Duration = Duration::from_secs(120);

    #[test]
    fn a_signal_ends_a_wait_for_a_list_that_drips() {
        interrupted_at_the_list(|reply| reply.dripping(Drip::Body(PAUSE)));
    }

    #[test]
    fn a_signal_ends_a_wait_for_a_head_that_drips() {
        interrupted_at_the_list(|reply| reply.dripping(Drip::All(PAUSE)));
    }

    #[test]
    fn a_signal_ends_a_wait_for_a_hub_that_stalls_after_its_header() {
        interrupted_at_the_list(|reply| Reply { silence: PAUSE, ..reply.cut(0) });
    }

    #[test]
    fn a_signal_ends_a_download_that_stands_still() {
        let workspace = Workspace::new();
        let repo = HubRepo::new(vec![("config.json", CONFIG.as_bytes().to_vec())]);
        let server = HubServer::start(move |received, before| match before {
            0 => repo.answer(received),
            _ => Reply { silence: Duration::from_secs(60), ..repo.answer(received).cut(10) },
        });
        let began = Instant::now();
        let child = train(&workspace, &server.endpoint(), "org/tiny").spawn().unwrap();
        let partial = workspace.path("cache/models--org--tiny/blobs");
        while !std::fs::read_dir(&partial).into_iter().flatten().flatten().any(|file| file.metadata().is_ok_and(|file| file.len() == 10)) {
            assert!(began.elapsed() < Duration::from_secs(60), "nothing came");
            std::thread::sleep(Duration::from_millis(10));
        }
        kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
        let ended: Outcome = child.wait_with_output().unwrap().into();
        assert!(ended.code == 75 && ended.stdout.contains("interrupted while files were being downloaded"), "{ended:?}");
    }
}
