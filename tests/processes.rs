//! Several processes with one or several ranks each, connected over TCP on one machine. They must give the same bits as the devices of one
//! process, and end together.

use crate::program::{Outcome, STEPS, Workspace, program, run};
use crate::resume::{await_line, send};
use crate::sweep::{PROMPTLY, sweep};
use nix::sys::signal::Signal;
use std::fs;
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub const TOKEN: (&str, &str) = ("SUPEROFFLOAD_RUN_TOKEN", "a token that nobody guesses");

/// Environment variables of launchers, under which these tests may run.
pub const LAUNCHERS: [&str; 6] =
    ["RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS"];

/// Buckets of 16 KiB and twelve micro-batches with a share each, for any number of devices that divides twelve. A save takes each rank more
/// time than a step.
const CUT: [&str; 6] =
    ["--device=cpu", "--bucket-mib=0.03125", "--max-grad-norm=1.5", "--gradient-shares=12", "--threads=1", "--save-steps=6"];

/// Weights sharded over the ranks of each process, and over all ranks.
#[cfg(feature = "weight-flow")]
const PARTLY: &str = "--weights=sharded";
#[cfg(feature = "weight-flow")]
const FULLY: &str = "--weights=fully-sharded";

/// Numbers of processes, and of ranks in each, for these two flags, and the runs that try them without `SUPEROFFLOAD_SWEEP=all`.
#[cfg(feature = "weight-flow")]
const SHARED: [(&str, [usize; 2], &[usize]); 7] = [
    (PARTLY, [2, 2], &[0, 2]),
    (PARTLY, [2, 3], &[0]),
    (PARTLY, [3, 2], &[1]),
    (FULLY, [2, 2], &[1]),
    (FULLY, [2, 3], &[2]),
    (FULLY, [3, 2], &[0]),
    (FULLY, [2, 1], &[0]),
];

pub fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

pub fn flags<'a>(ranks: usize, more: &[&'a str]) -> Vec<String>
where
    'static: 'a,
{
    let accumulation = format!("--gradient-accumulation-steps={}", 12 / ranks);
    let name = |flag: &str| flag.split('=').next().map(str::to_string);
    let open = CUT.iter().filter(|flag| more.iter().all(|output| name(output) != name(flag)));
    open.chain(more).map(ToString::to_string).chain([accumulation]).collect()
}

/// A workspace with a model of several buckets, each divisible among six ranks.
fn deep() -> Workspace {
    let workspace = Workspace::new();
    workspace.write("model/config.json", crate::program::CONFIG.replace("\"num_hidden_layers\": 1", "\"num_hidden_layers\": 8"));
    workspace
}

/// The command `train` of one process of a run.
pub fn one(workspace: &Workspace, out: &str, flags: &[String]) -> Command {
    let mut command = workspace.train(out, &flags.iter().map(String::as_str).collect::<Vec<_>>());
    LAUNCHERS.iter().for_each(|name| _ = command.env_remove(name));
    command.env(TOKEN.0, TOKEN.1);
    command
}

/// Starts `processes` processes of a run.
pub fn start(workspace: &Workspace, out: &str, processes: usize, more: &[&str]) -> Vec<Child> {
    start_in(workspace, out, [processes, 1], more)
}

/// Starts `processes` processes with `ranks` ranks each.
pub fn start_in(workspace: &Workspace, out: &str, [processes, ranks]: [usize; 2], more: &[&str]) -> Vec<Child> {
    let rendezvous = format!("--rendezvous=127.0.0.1:{}", free_port());
    let all = flags(processes * ranks, &[more, &[&rendezvous]].concat());
    let command = |process: usize| {
        let numbers = [format!("--processes={processes}"), format!("--process={process}"), format!("--gpus={ranks}")];
        one(workspace, out, &[&all[..], &numbers].concat())
    };
    (0..processes).map(|process| command(process).spawn().unwrap()).collect()
}

pub fn ends(children: Vec<Child>) -> Vec<Outcome> {
    children.into_iter().map(|child| child.wait_with_output().unwrap().into()).collect()
}

#[test]
fn several_processes_print_at_most_six_lines_before_the_first_step() {
    let (workspace, rendezvous) = (Workspace::new(), format!("--rendezvous=127.0.0.1:{}", free_port()));
    let command = |process: usize| {
        let mut command = program(&["train", "--config"]);
        command.arg(workspace.path("run.toml")).arg("--output-dir").arg(workspace.path("out"));
        command.args(flags(2, &[&rendezvous, "--processes=2", "--max-steps=2"])).arg(format!("--process={process}"));
        LAUNCHERS.iter().for_each(|name| _ = command.env_remove(name));
        command.env(TOKEN.0, TOKEN.1);
        command
    };
    let [first, second] = ends((0..2).map(|process| command(process).spawn().unwrap()).collect()).try_into().unwrap();
    assert_eq!((first.code, second.code), (0, 0), "{first:?} {second:?}");
    let before: Vec<&str> = first.stdout.lines().take_while(|line| !line.starts_with("step ")).collect();
    let labels: Vec<&str> = before.iter().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(labels, ["model", "data", "plan", "memory", "files", "device"], "{before:#?}");
    assert!(before[5].ends_with("; process 0 of 2"), "{before:#?}");
    assert!(second.stdout.lines().count() <= 6, "{second:?}");
}

/// The digest of process 0 of a run. Checks that all processes have finished.
fn digest(workspace: &Workspace, out: &str, processes: usize, more: &[&str]) -> String {
    digest_in(workspace, out, [processes, 1], more)
}

/// The digest of a run with this number of processes and ranks.
fn digest_in(workspace: &Workspace, out: &str, layout: [usize; 2], more: &[&str]) -> String {
    let outcomes = ends(start_in(workspace, out, layout, more));
    for (process, outcome) in outcomes.iter().enumerate().skip(1) {
        assert!(outcome.code == 0 && outcome.stderr.is_empty(), "{outcome:?}");
        let last = format!("\nfinished {STEPS} of {STEPS} steps: process {process} followed process 0\n");
        assert!(outcome.stdout.ends_with(&last), "{outcome:?}");
    }
    let digest = outcomes[0].digest().to_string();
    // Each rank has saved its part, and there are no other files.
    let saved = run(program(&["digest"]).arg(workspace.path(out)));
    assert_eq!(saved.digest(), digest);
    let files = workspace.names(&format!("{out}/checkpoint-{STEPS}"), "state");
    assert_eq!(files, Vec::from_iter((0..layout[0] * layout[1]).map(|rank| format!("state-{rank}.bin"))));
    assert_eq!(workspace.names(out, "."), [".lock", ".superoffload"], "remains in {out}");
    digest
}

/// The digest of a run on the devices of one process.
pub fn digest_of_one(workspace: &Workspace, out: &str, gpus: usize, more: &[&str]) -> String {
    let gpus_flag = format!("--gpus={gpus}");
    run(&mut one(workspace, out, &flags(gpus, &[more, &[&gpus_flag]].concat()))).digest().to_string()
}

#[test]
fn two_three_and_four_processes_train_to_the_bits_of_one() {
    let workspace = Workspace::new();
    let eval = format!("--eval-data={}", workspace.path("data.txt").display());
    let more: &[&str] = &[&eval, "--eval-steps=5"];
    let whole = digest_of_one(&workspace, "one", 1, more);
    assert_eq!(digest_of_one(&workspace, "ranks", 4, more), whole);
    for processes in [2, 3, 4] {
        let out = processes.to_string();
        assert_eq!(digest(&workspace, &out, processes, more), whole, "{processes} processes");
        for (one, several) in workspace.metrics("one").iter().zip(workspace.metrics(&out)) {
            for key in ["loss", "grad_norm", "learning_rate", "verdict", "epoch", "eval_loss"] {
                assert_eq!(one[key], several[key], "{key} of step {} of {processes} processes", one["step"]);
            }
        }
    }
    let clips = workspace.metrics("2").iter().filter(|line| line["verdict"] == "clip").count();
    assert!(clips > 0, "nothing was clipped");
}

#[test]
fn formats_faults_and_places_do_not_change_that() {
    let workspace = Workspace::new();
    let (resident, split) = match cfg!(feature = "repartition") {
        true => ("--resident-buckets=1", &["--resident-buckets=2", "--masters=split", "--moments=bfloat16"]),
        false => ("--resident-buckets=0", &["--strategy=no-offload", "--masters=split", "--moments=bfloat16"]),
    };
    for (nth, (file, flags)) in [
        (
            "inject = [{step = 3, element = 5000, share = 7, value = 'nan'}, {step = 5, element = 9, share = 2, value = 1e3}]",
            &["--dtype=float16"][..],
        ),
        ("", &["--dtype=float32", resident]),
        ("", &["--strategy=zero-offload", "--moments=bfloat16"]),
        ("", &["--moments=int8", resident]),
        ("", split),
    ]
    .into_iter()
    .enumerate()
    {
        workspace.settings(file);
        let whole = digest_of_one(&workspace, &format!("one-{nth}"), 1, flags);
        assert_eq!(digest(&workspace, &format!("two-{nth}"), 2, flags), whole, "{flags:?}");
        let skips = workspace.metrics(&format!("two-{nth}")).iter().filter(|line| line["verdict"] == "skip").count();
        assert_eq!(skips, usize::from(nth == 0), "{flags:?}");
    }
}

/// Streams run in any order that events permit. Slices are sent after they are written, and not overwritten before.
#[test]
fn slices_wait_for_their_inputs() {
    let workspace = Workspace::new();
    let whole = digest_of_one(&workspace, "one", 1, &["--dtype=float32"]);
    for seed in sweep(16..18, 1..100) {
        let adversary = format!("--adversary={seed}");
        assert_eq!(digest(&workspace, &format!("two-{seed}"), 2, &["--dtype=float32", &adversary]), whole, "seed {seed}");
    }
}

#[test]
fn ranks_of_several_processes_train_to_the_bits_of_one_rank() {
    let workspace = deep();
    let eval = format!("--eval-data={}", workspace.path("data.txt").display());
    let runs = [
        &["--bucket-mib=0.0625", &eval[..], "--eval-steps=5"][..],
        &["--bucket-mib=0.125", "--strategy=zero-offload", "--dtype=float32"],
        &["--strategy=no-offload"],
    ];
    for (nth, flags) in runs.into_iter().enumerate() {
        let whole = digest_of_one(&workspace, &format!("one-{nth}"), 1, flags);
        for layout in [[2, 2], [2, 3], [3, 2]].into_iter().take(sweep([3, 1, 1], [3, 2, 1])[nth]) {
            let out = format!("{}x{}-{nth}", layout[0], layout[1]);
            assert_eq!(digest_in(&workspace, &out, layout, flags), whole, "{layout:?} with {flags:?}");
            for (one, several) in workspace.metrics(&format!("one-{nth}")).iter().zip(workspace.metrics(&out)) {
                for key in ["loss", "grad_norm", "verdict", "eval_loss"] {
                    assert_eq!(one[key], several[key], "{key} of step {} of {out}", one["step"]);
                }
            }
        }
        let clips = workspace.metrics(&format!("2x2-{nth}")).iter().filter(|line| line["verdict"] == "clip").count();
        assert!(clips > 0, "nothing was clipped");
    }
    let sharing = digest_of_one(&workspace, "sharing", 4, &["--sequence-ranks=2"]);
    assert_eq!(digest_in(&workspace, "sharing-2x2", [2, 2], &["--sequence-ranks=2"]), sharing, "each two share their sequences");
}

/// Sharded and fully sharded weights give the bits of one rank with all weights, with evaluation, clipping and groups, and after a resume
/// with other layouts.
#[cfg(feature = "weight-flow")]
#[test]
fn processes_whose_ranks_share_the_weights_train_to_the_bits_of_one_rank() {
    let workspace = deep();
    let eval = format!("--eval-data={}", workspace.path("data.txt").display());
    let runs = [
        &["--bucket-mib=0.0625", &eval[..], "--eval-steps=5"][..],
        &["--bucket-mib=0.125", "--strategy=zero-offload", "--dtype=float32", "--gradient-group=3"],
        &["--bucket-mib=0.0625", "--strategy=no-offload", "--gradient-group=2"],
    ];
    for (nth, flags) in runs.into_iter().enumerate() {
        let whole = digest_of_one(&workspace, &format!("one-{nth}"), 1, flags);
        for (weights, layout, _) in SHARED.into_iter().filter(|(.., tried)| sweep(*tried, &[0, 1, 2]).contains(&nth)) {
            let out = format!("{}x{}-{nth}{weights}", layout[0], layout[1]);
            let sharded = [flags, &[weights]].concat();
            assert_eq!(digest_in(&workspace, &out, layout, &sharded), whole, "{layout:?} with {sharded:?}");
            for (one, several) in workspace.metrics(&format!("one-{nth}")).iter().zip(workspace.metrics(&out)) {
                for key in ["loss", "grad_norm", "verdict", "eval_loss"] {
                    assert_eq!(one[key], several[key], "{key} of step {} of {out}", one["step"]);
                }
            }
        }
        let clips = workspace.metrics(&format!("one-{nth}")).iter().filter(|line| line["verdict"] == "clip").count();
        assert!(clips > 0, "nothing was clipped");
    }
    let sharing = ["--bucket-mib=0.0625", "--sequence-ranks=2"];
    let whole = digest_of_one(&workspace, "sharing", 4, &sharing);
    assert_eq!(digest_in(&workspace, "sharing-2x2", [2, 2], &[&sharing[..], &[FULLY]].concat()), whole, "each two share their sequences");
    let resume = ["--bucket-mib=0.0625", "--resume-from-checkpoint=auto"];
    let [sharded, fully_sharded] = [PARTLY, FULLY].map(|weights| [&resume[..], &[weights]].concat());
    let whole = digest_of_one(&workspace, "whole", 1, &["--bucket-mib=0.0625"]);
    let [partly, fully] = [PARTLY, FULLY].map(|weights| move |layout: &str| format!("{layout}-0{weights}"));
    let resumes = [
        (partly("2x2"), [1, 1], &resume[..]),
        ("one-0".into(), [3, 2], &sharded),
        (partly("2x3"), [2, 2], &fully_sharded),
        (fully("2x1"), [2, 2], &sharded),
        (partly("2x3"), [2, 2], &sharded),
        (partly("2x2"), [2, 3], &resume),
        (fully("3x2"), [1, 1], &resume),
    ];
    for (nth, (from, layout, flags)) in resumes.into_iter().take(sweep(4, 7)).enumerate() {
        let out = format!("{from}-{}x{}-{nth}", layout[0], layout[1]);
        workspace.copy_checkpoints(&from, &out, &[6]);
        let resumed = if layout[0] == 1 { digest_of_one(&workspace, &out, 1, flags) } else { digest_in(&workspace, &out, layout, flags) };
        assert_eq!(resumed, whole, "{out}");
    }
}

/// Sharded weights with streams that run in any order that events permit, with a starving stream, injected faults and float16.
#[cfg(feature = "weight-flow")]
#[test]
fn slices_that_a_process_shares_are_whole_whatever_runs_first() {
    let workspace = deep();
    workspace.settings("inject = [{step = 3, element = 5000, share = 7, value = 'nan'}, {step = 5, element = 9, share = 2, value = 1e3}]");
    let whole = |group: &str| digest_of_one(&workspace, &format!("one{group}"), 1, &["--dtype=float16", "--bucket-mib=0.0625", group]);
    let whole = ["--gradient-group=1", "--gradient-group=2"].map(|group| (group, whole(group)));
    let seeds = sweep(17..18, 1..100);
    for (weights, seed) in
        [(PARTLY, 0), (FULLY, 1)].into_iter().flat_map(|(weights, first)| seeds.clone().map(move |seed| (weights, seed + first)))
    {
        let (group, whole) = &whole[seed % 2];
        let (adversary, out) = (format!("--adversary={seed}"), format!("2x2-{seed}{weights}"));
        let flags = ["--dtype=float16", "--bucket-mib=0.0625", weights, group, &adversary];
        assert_eq!(&digest_in(&workspace, &out, [2, 2], &flags), whole, "seed {seed} with {flags:?}");
        let verdicts = workspace.metrics(&out);
        assert!(["skip", "clip"].iter().all(|kind| verdicts.iter().any(|line| line["verdict"] == *kind)), "{verdicts:?}");
    }
}

/// Streams run in any order that events permit. Slices are pulled after they have arrived, and not overwritten before.
#[test]
fn pulls_wait_for_slices_that_come_from_other_processes() {
    let workspace = deep();
    let whole = |group: &str| digest_of_one(&workspace, &format!("one{group}"), 1, &["--dtype=float32", "--bucket-mib=0.0625", group]);
    let whole = ["--gradient-group=1", "--gradient-group=2"].map(|group| (group, whole(group)));
    for seed in sweep(16..18, 1..100) {
        let (group, whole) = &whole[seed % 2];
        let (adversary, out) = (format!("--adversary={seed}"), format!("2x2-{seed}"));
        let flags = ["--dtype=float32", "--bucket-mib=0.0625", group, &adversary];
        assert_eq!(&digest_in(&workspace, &out, [2, 2], &flags), whole, "seed {seed} with {group}");
    }
}

/// Twelve shares in groups of two or three. A group is summed within a process if its ranks compute one group per round, and by the slice's
/// owner otherwise.
#[test]
fn groups_of_shares_have_the_same_bits_wherever_they_are_summed() {
    let workspace = deep();
    for (nth, flags) in [&[][..], &["--strategy=zero-offload"], &["--strategy=no-offload"]].into_iter().enumerate() {
        let group = if nth == 1 { "--gradient-group=3" } else { "--gradient-group=2" };
        let flat = [flags, &["--bucket-mib=0.0625"]].concat();
        let grouped = [&flat[..], &[group]].concat();
        let whole = digest_of_one(&workspace, &format!("one-{nth}"), 1, &grouped);
        if nth == 0 {
            assert_ne!(digest_of_one(&workspace, "flat", 1, &flat), whole, "{group} rounds groups");
        }
        assert_eq!(digest_of_one(&workspace, &format!("ranks-{nth}"), 4, &grouped), whole);
        for layout in [[2, 2], [2, 3], [2, 1], [3, 1]].into_iter().take(sweep([4, 1, 1], [4; 3])[nth]) {
            let out = format!("{}x{}-{nth}", layout[0], layout[1]);
            assert_eq!(digest_in(&workspace, &out, layout, &grouped), whole, "{layout:?} with {grouped:?}");
        }
        let clips = workspace.metrics(&format!("2x2-{nth}")).iter().filter(|line| line["verdict"] == "clip").count();
        assert!(clips > 0, "nothing was clipped");
    }
    // Groups are part of the numerics, so a resumed run keeps them.
    let resume: &[&str] = &["--bucket-mib=0.0625", "--resume-from-checkpoint=auto"];
    let whole = digest_of_one(&workspace, "whole", 1, &["--bucket-mib=0.0625", "--gradient-group=2"]);
    for (from, layout) in [("2x2-0", [1, 1]), ("one-0", [2, 2]), ("3x1-0", [2, 3])] {
        let out = format!("{from}-{}x{}", layout[0], layout[1]);
        workspace.copy_checkpoints(from, &out, &[6]);
        let resumed = if layout[0] == 1 { digest_of_one(&workspace, &out, 1, resume) } else { digest_in(&workspace, &out, layout, resume) };
        assert_eq!(resumed, whole, "{out}");
    }
    workspace.copy_checkpoints("one-0", "other", &[6]);
    let other = |more: &[&str]| run(&mut one(&workspace, "other", &flags(1, &[resume, &["--gradient-group=3"], more].concat())));
    other(&[]).refused(2, &["gradient_group was 2 and is 3", "--allow-changed numerics"]);
    assert_ne!(other(&["--allow-changed=numerics"]).digest(), whole);
}

#[test]
fn a_run_goes_on_with_another_number_of_processes() {
    let workspace = Workspace::new();
    let whole = digest_of_one(&workspace, "one", 1, &[]);
    digest(&workspace, "four", 4, &[]);
    digest(&workspace, "two", 2, &[]);
    digest_in(&workspace, "pairs", [2, 2], &[]);
    let resumes = [
        ("one", [2, 1]),
        ("two", [1, 1]),
        ("four", [3, 1]),
        ("pairs", [1, 1]),
        ("four", [2, 2]),
        ("four", [1, 1]),
        ("two", [4, 1]),
        ("one", [2, 2]),
        ("pairs", [3, 1]),
    ];
    for (from, layout) in resumes.into_iter().take(sweep(5, 9)) {
        let out = format!("{from}-{}x{}", layout[0], layout[1]);
        workspace.copy_checkpoints(from, &out, &[6]);
        let resume: &[&str] = &["--resume-from-checkpoint=auto"];
        let resumed = if layout[0] == 1 { digest_of_one(&workspace, &out, 1, resume) } else { digest_in(&workspace, &out, layout, resume) };
        assert_eq!(resumed, whole, "{out}");
    }
    // An exported model does not depend on the layout.
    let weights = |out: &str| {
        let exported = workspace.path(&format!("exported-{out}"));
        let _ = fs::remove_dir_all(&exported);
        let outcome = run(program(&["export"]).arg(workspace.path(out)).arg(&exported));
        assert_eq!(outcome.code, 0, "{outcome:?}");
        fs::read(exported.join("model.safetensors")).unwrap()
    };
    assert!(weights("four") == weights("one") && weights("two-1x1") == weights("one"));
    // Damage in any file is detected, and the previous checkpoint is used.
    let state = workspace.path("four/checkpoint-12/state-2.bin");
    let mut bytes = fs::read(&state).unwrap();
    bytes[100] ^= 1;
    fs::write(&state, bytes).unwrap();
    run(program(&["digest"]).arg(workspace.path("four/checkpoint-12"))).refused(1, &["state-2.bin: damaged"]);
    assert_eq!(digest(&workspace, "four", 2, &["--resume-from-checkpoint=auto"]), whole);
}

#[test]
fn processes_without_one_output_directory_are_refused_before_the_first_step() {
    let workspace = Workspace::new();
    let rendezvous = format!("--rendezvous=127.0.0.1:{}", free_port());
    let all = flags(2, &["--processes=2", &rendezvous]);
    let command = |out: &str, process: &str| one(&workspace, out, &[&all[..], &[process.to_string()]].concat()).spawn().unwrap();
    let outcomes = ends(vec![command("here", "--process=0"), command("there", "--process=1")]);
    outcomes[1].refused(1, &["--output-dir ", "/there: ", "it is not the directory that process 0 on ", "a shared file system"]);
    outcomes[0].refused(1, &["process 1 on ", "/there: "]);
    assert_eq!(workspace.names("here", "."), [".lock", ".superoffload"]);
}

#[test]
fn launchers_number_this_process() {
    let workspace = Workspace::new();
    let whole = digest_of_one(&workspace, "one", 1, &[]);
    let job = free_port().to_string();
    let torch = |process: &str| {
        vec![("RANK", process.to_string()), ("WORLD_SIZE", "2".into()), ("MASTER_ADDR", "127.0.0.1".into()), ("MASTER_PORT", job.clone())]
    };
    let mpi = |process: &str| {
        let numbers =
            [("OMPI_COMM_WORLD_RANK", process), ("OMPI_COMM_WORLD_SIZE", "2"), ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"), ("MASTER_PORT", &job)];
        numbers.map(|(name, value)| (name, value.to_string())).to_vec()
    };
    let slurm = |process: &str| {
        let numbers = [
            ("SLURM_PROCID", process),
            ("SLURM_STEP_NUM_TASKS", "2"),
            ("SLURM_STEP_NODELIST", "localhost,node-[2-3]"),
            ("SLURM_JOB_ID", &job),
        ];
        numbers.map(|(name, value)| (name, value.to_string())).to_vec()
    };
    type Environment<'a> = &'a dyn Fn(&str) -> Vec<(&'static str, String)>;
    let launchers: [(&str, Environment<'_>); 3] = [("torchrun", &torch), ("mpirun", &mpi), ("srun", &slurm)];
    for (name, environment) in launchers {
        let command = |process: usize| one(&workspace, name, &flags(2, &[])).envs(environment(&process.to_string())).spawn().unwrap();
        let outcomes = ends((0..2).map(command).collect());
        assert!(outcomes[0].digest() == whole && outcomes[1].code == 0, "{name}: {outcomes:?}");
    }
    let refused = run(one(&workspace, "out", &flags(2, &["--processes=3"])).envs(torch("0")));
    refused.refused(2, &["--processes 3 contradicts WORLD_SIZE=2 of torchrun"]);
}

#[test]
fn processes_that_differ_are_refused_with_both_values() {
    let workspace = Workspace::new();
    let rendezvous = format!("--rendezvous=127.0.0.1:{}", free_port());
    let command = |process: usize, more: &[&str]| {
        let numbers = ["--processes=2".to_string(), format!("--process={process}")];
        one(&workspace, "out", &[&flags(2, &[more, &[&rendezvous]].concat())[..], &numbers].concat())
    };
    for (more, words) in
        [(["--seq-length=8"], "--seq-length: 16 for process 0 on "), (["--learning-rate=0.5"], "--learning-rate: 0.01 for process 0 on ")]
    {
        let first = command(0, &[]).spawn().unwrap();
        let second = command(1, &more).spawn().unwrap();
        ends(vec![first, second]).iter().for_each(|outcome| outcome.refused(2, &[words, " for process 1 on "]));
    }
    // A different model under the same name is detected when process 0 has read its own.
    workspace.write("other/config.json", crate::program::CONFIG.replace("\"intermediate_size\": 64", "\"intermediate_size\": 96"));
    let other = format!("--model={}", workspace.path("other").display());
    let outcomes = ends(vec![command(0, &[]).spawn().unwrap(), command(1, &[&other]).spawn().unwrap()]);
    outcomes[1].refused(2, &["model: ", " for process 0 on ", " for process 1 on "]);
    outcomes[0].refused(1, &["process 1 on ", "model: "]);
    // A different token, and no token.
    let (mut first, mut second) = (command(0, &[]).spawn().unwrap(), command(1, &[]));
    run(second.env(TOKEN.0, "another token, as long")).refused(1, &["has another run token"]);
    first.kill().unwrap();
    first.wait().unwrap();
    run(command(0, &[]).env_remove(TOKEN.0)).refused(2, &[TOKEN.0, "--run-token-file"]);
    run(command(0, &[]).env(TOKEN.0, "short")).refused(2, &[TOKEN.0, "can be guessed"]);
    let file = format!("--run-token-file={}", workspace.write("token", "short").display());
    run(&mut command(0, &[&file])).refused(2, &["token: a run token of 5 bytes", "can be guessed"]);
}

#[test]
fn options_unsupported_in_several_processes_are_refused_with_a_remedy() {
    let workspace = Workspace::new();
    for (flags, words) in [
        (&["--processes=2", "--process=0"][..], &["--processes 2", "--rendezvous HOST:PORT"][..]),
        (&["--processes=2", "--rendezvous=a:1"], &["--processes 2", "--process is missing"]),
        (&["--processes=2", "--process=2", "--rendezvous=a:1"], &["--process 2", "less than --processes 2"]),
        (&["--processes=2", "--process=0", "--rendezvous=a"], &["--rendezvous a", "HOST:PORT"]),
        (&["--processes=9", "--process=0", "--rendezvous=a:1"], &["--processes 9", "at most 8"]),
        (&["--rendezvous=a:1"], &["--rendezvous a:1", "needs --processes 2"]),
        (&["--processes=2", "--process=0", "--rendezvous=a:1", "--gpus=all"], &["--gpus all", "a number"]),
        (&["--processes=3", "--process=0", "--rendezvous=a:1", "--gpus=3"], &["--processes 3 times --gpus 3", "at most 8"]),
        (&["--processes=2", "--process=0", "--rendezvous=a:1", "--gpus=3", "--sequence-ranks=2"], &["--sequence-ranks 2", "--gpus 3"]),
        (&["--processes=2", "--process=0", "--rendezvous=a:1", "--weights=sharded"], &["--weights sharded", "replicated"]),
    ] {
        let mut command = workspace.train("out", &[&["--device=cpu"], flags].concat());
        LAUNCHERS.iter().for_each(|name| _ = command.env_remove(name));
        run(&mut command).refused(2, words);
    }
    for command in ["plan", "simulate"] {
        let model = if command == "plan" { "--model=qwen3-4b" } else { "--model-config=qwen3-4b" };
        run(&mut program(&[command, model, "--hardware=h200-x2", "--processes=2"])).refused(2, &["--processes 2", "h200-x2", "`network`"]);
    }
}

/// Process 0 prints the line, with the state of a single process with as many devices.
#[test]
fn a_bench_of_several_processes_is_one_line_with_the_digest_of_one() {
    let workspace = Workspace::new();
    let config = format!("--model-config={}", workspace.path("model/config.json").display());
    let bench = |more: &[&str]| {
        let flags = ["--device=cpu", "--threads=1", "--seq-length=16", "--warmup=1", "--steps=3", "--clip=every-2", "--digest"];
        let mut command = program(&[&["bench", "step", &config], &flags[..], more].concat());
        LAUNCHERS.iter().for_each(|name| _ = command.env_remove(name));
        command.env(TOKEN.0, TOKEN.1);
        command
    };
    let line =
        |outcome: &Outcome| -> serde_json::Value { serde_json::from_str(&outcome.stdout).unwrap_or_else(|e| panic!("{e}: {outcome:?}")) };
    let whole = run(&mut bench(&["--gpus=2"]));
    let rendezvous = format!("--rendezvous=127.0.0.1:{}", free_port());
    let of = |process: &str| bench(&["--processes=2", &rendezvous, process]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let outcomes = ends(vec![of("--process=0"), of("--process=1")]);
    assert!(outcomes.iter().all(|outcome| outcome.code == 0) && outcomes[1].stdout.is_empty(), "{outcomes:?}");
    let (one, two) = (line(&whole), line(&outcomes[0]));
    assert!(one["digest"].is_string(), "{one}");
    for key in ["digest", "loss", "verdicts", "tokens_per_step"] {
        assert_eq!(two[key], one[key], "{key}");
    }
    for key in ["committed", "clipped"] {
        assert_eq!(two["bucket_steps"][key], one["bucket_steps"][key], "both step their slices: {key}");
    }
    assert_eq!(two["settings"]["processes"], 2);
    // Differing processes are rejected as in training.
    let other = bench(&["--processes=2", &rendezvous, "--process=1", "--seed=8"]).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    for outcome in ends(vec![of("--process=0"), other.unwrap()]) {
        let message = "error: --seed: 42 for process 0 on ";
        assert!(outcome.code == 2 && outcome.stderr.contains(message) && outcome.stdout.is_empty(), "{outcome:?}");
    }
}

/// Phases in which a process is killed while it hangs.
const PHASES: [(&str, u64); 12] = [
    ("start", 1),
    ("write", 1),
    ("module", 2),
    ("backward", 2),
    ("sum", 2),
    ("grads-out", 2),
    ("optimize", 2),
    ("params-in", 2),
    ("verdict", 2),
    ("gather", 2),
    ("flush", 3),
    ("read", 3),
];

/// Kills process `victim` of two while it hangs in a phase. The other process ends in time and names it, and the resumed run reaches
/// `whole`.
fn kill_in(workspace: &Workspace, (phase, step): (&str, u64), (victim, ranks): (usize, usize), whole: &str) {
    let out = format!("{phase}-{victim}-{ranks}");
    // The last rank of the victim.
    let rank = victim * ranks + ranks - 1;
    workspace.settings(&format!("faults = [{{rank = {rank}, step = {step}, phase = '{phase}', kind = 'hang'}}]"));
    let mut children = start_in(workspace, &out, [2, ranks], &["--save-steps=2"]);
    await_line(&mut children[victim], "all 2 processes are here");
    std::thread::sleep(Duration::from_millis(500));
    for child in &mut children {
        assert_eq!(child.try_wait().unwrap(), None, "{out}: nobody ends before somebody is killed");
    }
    let killed = Instant::now();
    children[victim].kill().unwrap();
    let other = ends(children).remove(1 - victim);
    assert!(killed.elapsed() < PROMPTLY, "{out} took {:?}", killed.elapsed());
    other.refused(1, &[&format!("process {victim} on "), "it ended before the end of the run"]);
    workspace.settings("");
    assert_eq!(digest(workspace, &out, 2, &["--save-steps=2", "--resume-from-checkpoint=auto"]), whole, "{out} goes on");
}

#[test]
fn a_process_that_is_killed_ends_the_other_and_the_run_goes_on() {
    let workspace = Workspace::new();
    let whole = digest_of_one(&workspace, "one", 1, &[]);
    let phases = sweep(vec![PHASES[0], PHASES[3], PHASES[8], PHASES[11]], PHASES.to_vec());
    for (nth, phase) in phases.into_iter().enumerate() {
        kill_in(&workspace, phase, (nth % 2, 1), &whole);
        if nth % 2 == 1 {
            kill_in(&workspace, phase, (nth / 2 % 2, 2), &whole);
        }
    }
}

#[test]
fn a_process_that_fails_is_named_by_all() {
    let workspace = Workspace::new();
    workspace.settings("faults = [{rank = 2, step = 2, phase = 'sum'}]");
    let outcomes = ends(start(&workspace, "out", 3, &[]));
    for outcome in &outcomes {
        outcome.refused(1, &["process 2 on ", "of step 2: it was to fail (faults)"]);
    }
    // With several ranks in a process, the error also names the rank.
    workspace.settings("faults = [{rank = 3, step = 2, phase = 'backward'}]");
    for outcome in &ends(start_in(&workspace, "pairs", [2, 2], &[])) {
        outcome.refused(1, &["process 1 on ", ": rank 3: ", "of step 2: it was to fail (faults)"]);
    }
}

#[test]
fn a_signal_to_any_process_saves_at_one_step_and_all_exit_with_75() {
    let workspace = Workspace::new();
    let long: &[&str] = &["--max-steps=400", "--save-steps=1000"];
    let whole = digest_of_one(&workspace, "whole", 1, long);
    for (message, ranks) in [(0, 1), (1, 1), (1, 2)] {
        let out = format!("told-{message}-{ranks}");
        let mut children = start_in(&workspace, &out, [2, ranks], long);
        await_line(&mut children[0], "step      3");
        send(&children[message], Signal::SIGTERM);
        let outcomes = ends(children);
        assert!(outcomes.iter().all(|outcome| outcome.code == 75 && outcome.stderr.is_empty()), "{outcomes:?}");
        let steps = workspace.metrics(&out).len();
        assert!(outcomes[0].stdout.contains("\ninterrupted at step "), "{outcomes:?}");
        assert!(
            outcomes[1].stdout.ends_with(&format!("interrupted at step {steps} of 400: process 1 followed process 0\n")),
            "{outcomes:?}"
        );
        assert_eq!(workspace.names(&out, "checkpoint-"), [format!("checkpoint-{steps}")]);
        if message < sweep(1, 2) {
            let resumed = ends(start(&workspace, &out, 2, &[long, &["--resume-from-checkpoint=auto"]].concat()));
            assert_eq!(resumed[0].digest(), whole, "{out}");
        }
    }
    // Schedulers signal all processes at about the same time. A forwarded signal must not count as a second one.
    let mut children = start(&workspace, "all", 2, long);
    await_line(&mut children[0], "step      3");
    for child in children.iter().rev() {
        send(child, Signal::SIGTERM);
        std::thread::sleep(Duration::from_millis(250));
    }
    assert!(ends(children).iter().all(|outcome| outcome.code == 75), "all are told");
}
