//! Examples in `packaging/deploy`, as far as a machine without a cluster or containers can test them. The program accepts their commands,
//! an interrupted run continues, and images install the released wheel.

use crate::program::{Workspace, program, run};
use crate::support::emulator;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::Command;

/// Exit code of a run that was interrupted and can be resumed.
const INTERRUPTED: i32 = 75;

fn text_of(file: &str) -> String {
    fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(file)).unwrap_or_else(|e| panic!("{file}: {e}"))
}

#[test]
fn the_job_of_kubernetes_runs_a_valid_command_and_ignores_interruptions() {
    let job: Value = serde_saphyr::from_str(&text_of("packaging/deploy/job.yaml")).unwrap();
    let (pod, container) = (&job["spec"]["template"]["spec"], &job["spec"]["template"]["spec"]["containers"][0]);
    let args: Vec<_> = container["args"].as_array().unwrap().iter().map(|arg| arg.as_str().unwrap()).collect();
    // The parser reports an unknown flag only if it has accepted all other arguments.
    run(program(&args).arg("--no-such-flag=1")).refused(2, &["unexpected argument '--no-such-flag'"]);
    let codes: Vec<_> =
        job["spec"]["podFailurePolicy"]["rules"].as_array().unwrap().iter().filter_map(|rule| rule.get("onExitCodes")).collect();
    assert_eq!(codes.iter().map(|codes| &codes["operator"]).collect::<Vec<_>>(), ["In", "NotIn"]);
    for codes in codes {
        assert_eq!((&codes["containerName"], &codes["values"]), (&container["name"], &json!([INTERRUPTED])));
    }
    let mount = &container["volumeMounts"][0];
    assert_eq!(mount["name"], pod["volumes"][0]["name"]);
    assert!(args[1].starts_with(mount["mountPath"].as_str().unwrap()), "{args:?}");
}

#[test]
fn a_signalled_slurm_job_is_queued_again_and_resumes() {
    if emulator().is_some() {
        return;
    }
    let workspace = Workspace::new();
    let (out, script) = (workspace.path("out"), concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/deploy/train.slurm"));
    let settings = format!("{{device: cpu, seq-length: 16, per-device-train-batch-size: 1, max-steps: 1000000, output-dir: {out:?}}}");
    let settings = workspace.write("job.yaml", settings);
    let mut last = 0;
    for _ in 0..2 {
        let mut job = Command::new("bash");
        job.arg(script).arg(&settings).env("SUPEROFFLOAD", env!("CARGO_BIN_EXE_superoffload")).env("REQUEUE", "echo requeued");
        let mut job = job.stdout(std::process::Stdio::piped()).spawn().unwrap();
        let mut output = BufReader::new(job.stdout.take().unwrap());
        let begins = output.by_ref().lines().map(Result::unwrap).find(|line| line.starts_with("step "));
        kill(Pid::from_raw(job.id() as i32), Signal::SIGTERM).unwrap();
        let mut rest = String::new();
        output.read_to_string(&mut rest).unwrap();
        assert!(begins.is_some() && job.wait().unwrap().success() && rest.ends_with(": queued again\nrequeued\n"), "{rest}");
        let steps = workspace.names("out", "checkpoint-").into_iter().filter_map(|name| name["checkpoint-".len()..].parse::<u64>().ok());
        let newest = steps.max().unwrap_or(0);
        assert!(newest > last, "no checkpoint after step {last}");
        last = newest;
    }
}

/// A replacement for `srun`. It starts a task per node, terminates one of them, and exits like the tasks.
const SRUN: &str = r#"
shift
export SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_JOB_ID=$PORT
SLURM_PROCID=1 "$@" & other=$!
SLURM_PROCID=0 "$@" & first=$!
until compgen -G "$OUT/metrics.jsonl" > /dev/null && [ "$(wc -l < "$OUT/metrics.jsonl")" -gt 3 ]; do sleep 0.05; done
kill -TERM $other
wait $first && wait $other
"#;

#[test]
fn the_job_of_several_machines_starts_a_process_on_each_and_is_queued_again() {
    if emulator().is_some() {
        return;
    }
    let workspace = Workspace::new();
    let (out, script) = (workspace.path("out"), concat!(env!("CARGO_MANIFEST_DIR"), "/packaging/deploy/processes.slurm"));
    let settings = format!("{{seq-length: 16, threads: 1, per-device-train-batch-size: 1, max-steps: 1000000, output-dir: {out:?}}}");
    let (settings, srun) = (workspace.write("job.yaml", settings), workspace.write("srun", SRUN));
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut job = Command::new("bash");
    job.arg(script).arg(&settings).env("SUPEROFFLOAD", env!("CARGO_BIN_EXE_superoffload")).env("REQUEUE", "echo requeued");
    job.env("DEVICE", "cpu");
    let srun = format!("bash {}", srun.display());
    let ended = run(job.env("SRUN", srun).env("OUT", &out).env("PORT", port.to_string()));
    let words = ["; process 0 of 2\n", ": process 1 followed process 0\n", ": queued again\nrequeued\n"];
    assert!(ended.code == 0 && words.iter().all(|word| ended.stdout.contains(word)), "{ended:?}");
    assert_eq!(workspace.names("out", "checkpoint-").len(), 1);
}

/// Runs the install commands of the examples with the released wheels in `/dist` and CUDA 12's libraries, and compares the arguments of
/// `pip`.
#[test]
fn images_install_the_wheel_that_is_released() {
    let example = |name: &str| text_of(&format!("packaging/deploy/{name}"));
    let between = |text: String, start: &str, end: &str| text.split_once(start).unwrap().1.split_once(end).unwrap().0.to_string();
    let (image, definition) = (example("Dockerfile"), example("superoffload.def"));
    let commands = [
        between(image.clone(), "RUN --mount=type=bind,target=/dist \\\n", "\nWORKDIR"),
        between(definition.clone(), "%post\n", "%runscript").replace("{{ CUDA }}", "$CUDA"),
    ];
    assert!(image.contains("ARG CUDA=cu13\n") && definition.contains("%arguments\n    CUDA=cu13\n"));
    assert!(image.contains("ENTRYPOINT [\"superoffload\"]\n") && definition.contains("%runscript\n    exec superoffload \"$@\"\n"));
    assert!(text_of("packaging/pyproject.toml").contains("\ncu12 = [\"nvidia-"));
    let readme = text_of("README.md");
    let wheel = readme.split_whitespace().find_map(|word| word.strip_prefix("'./dist/")?.strip_suffix("[cu13]'")).unwrap();
    let workspace = Workspace::new();
    // If the tests run in an emulator, the shell still runs natively.
    let machine = run(Command::new("uname").arg("-m"));
    for command in commands {
        for machine in ["x86_64", "aarch64"] {
            workspace.write(&format!("dist/{}", wheel.replace("x86_64", machine)), "");
        }
        let dist = workspace.path("dist").display().to_string();
        let mut shell = Command::new("bash");
        shell.arg("-euc").arg(format!("pip() {{ echo \"$@\"; }}\n{}", command.replace("/dist", &dist))).env("CUDA", "cu12");
        let requested = format!("install --no-cache-dir {dist}/{}[cu12]\n", wheel.replace("x86_64", machine.stdout.trim()));
        assert_eq!(run(&mut shell).stdout, requested, "{command}");
    }
}
