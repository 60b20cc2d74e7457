//! Saves beside steps: the same bytes as saves that stop training, and every way in which one can end.

use crate::checkpoint;
use crate::config::options::{DeviceChoice, ReplanChoice};
use crate::config::settings::Settings;
use crate::disk::faults::{self, Mode};
use crate::faults::Injection;
use crate::metrics::StepMetrics;
use crate::optim::moments::Moments;
use crate::optim::schedule::{LrScheduler, TrainLength};
use crate::planner::plan::Plan;
use crate::request::choices::{MastersChoice, ResidentBuckets, SaveMemory};
use crate::signals::StopFlag;
use crate::sweep::sweep;
use crate::train::observer::Observer;
use crate::train::tests::{SMALL_MODEL, SMALL_MODEL_TEXT};
use crate::train::{RunFacts, Summary, train};
use crate::units::Bytes;
use serde_json::Value;
use std::fs;
use std::path::Path;

/// A model of 0.24 M parameters on a few tokens, in `dir`; each save takes about a second, longer than a step even where other tests
/// keep all CPUs busy.
fn slow(dir: &Path, steps: u64, save_steps: u64) -> Settings {
    Settings {
        model: Some(SMALL_MODEL.into()),
        data: vec![SMALL_MODEL_TEXT.into()],
        output_dir: dir.to_path_buf(),
        train_length: TrainLength::Steps(steps),
        device: DeviceChoice::Cpu,
        threads: Some(2),
        seq_length: 8,
        per_device_train_batch_size: 1,
        lr_scheduler_type: LrScheduler::Constant,
        save_steps,
        save_rate: Some(Bytes(STATE_BYTES)),
        report_to: Vec::new(),
        save_memory: SaveMemory::Auto,
        ..Settings::demo()
    }
}

/// About the bytes of the model's state.
const STATE_BYTES: u64 = 2_861_000;

/// Steps, notes and warnings in order. It acts once, after a line.
#[derive(Default)]
struct Recorder {
    lines: Vec<String>,
    waits_ms: Vec<f64>,
    device_copies: usize,
    /// The end of the line, and the action.
    act: Option<(String, Box<dyn FnOnce()>)>,
}

impl Observer for Recorder {
    fn begin(&mut self, plan: &Plan, _: &RunFacts) {
        self.device_copies = plan.placement.save_copies.device;
    }
    fn step(&mut self, metrics: &StepMetrics) {
        self.waits_ms.push(metrics.save_wait_ms);
        self.push(format!("step {}", metrics.step));
    }
    fn note(&mut self, line: &str) {
        self.push(line.into());
    }
    fn warn(&mut self, line: &str) {
        self.lines.push(format!("warning: {line}"));
    }
}

impl Recorder {
    fn push(&mut self, line: String) {
        let act = self.act.take_if(|(end, _)| line.ends_with(&*end));
        self.lines.push(line);
        act.into_iter().for_each(|(_, act)| act());
    }

    fn acting(step: u64, act: impl FnOnce() + 'static) -> Self {
        Self::acting_after(&format!("step {step}"), act)
    }

    fn acting_after(line: &str, act: impl FnOnce() + 'static) -> Self {
        Self { act: Some((line.into(), Box::new(act))), ..Self::default() }
    }

    /// All but that steps waited for a save for long, as they may on a busy machine.
    fn warnings(&self) -> Vec<&str> {
        let is_other = |line: &&str| line.starts_with("warning: ") && !line.contains("a larger --save-steps avoids that");
        self.lines.iter().map(String::as_str).filter(is_other).collect()
    }

    fn place(&self, text: &str) -> usize {
        self.lines.iter().position(|line| line.contains(text)).unwrap_or_else(|| panic!("no {text}: {:?}", self.lines))
    }
}

fn run(settings: &Settings) -> (Summary, Recorder) {
    let mut recorder = Recorder::default();
    let summary = train(settings, &StopFlag::default(), &mut recorder).unwrap();
    (summary, recorder)
}

/// The manifest without the settings, which name the number of steps.
fn manifest(checkpoint: &Path) -> Value {
    let mut manifest = serde_json::to_value(checkpoint::verify(checkpoint).unwrap()).unwrap();
    let trainer = manifest["trainer"].as_object_mut().unwrap();
    trainer.remove("settings").unwrap();
    trainer.remove("scheduler").unwrap();
    manifest
}

fn expect_same(checkpoint: &Path, expected: &Path) {
    assert_eq!(manifest(checkpoint), manifest(expected), "{checkpoint:?}");
    assert!(fs::read(checkpoint.join("state.bin")).unwrap() == fs::read(expected.join("state.bin")).unwrap(), "{checkpoint:?}");
}

/// Runs of 7 steps that save after each second step, beside the next ones, and runs that end where those save.
fn expect_saves_of(settings: impl Fn(&Path, u64, u64) -> Settings) -> Recorder {
    let dir = tempfile::tempdir().unwrap();
    let long = dir.path().join("long");
    let (summary, recorder) = run(&settings(&long, 7, 2));
    assert!(summary.failure.is_none(), "{:?}", summary.failure);
    assert!(recorder.place("checkpoint-2") > recorder.place("step 3"), "not beside steps: {:?}", recorder.lines);
    for step in [2, 4, 6] {
        let short = dir.path().join(step.to_string());
        assert!(run(&Settings { save_rate: None, ..settings(&short, step, 100) }).0.failure.is_none());
        let name = format!("checkpoint-{step}");
        expect_same(&long.join(&name), &short.join(&name));
    }
    recorder
}

#[test]
fn a_checkpoint_that_is_saved_beside_steps_is_that_of_a_run_that_stops() {
    let recorder = expect_saves_of(slow);
    assert!(recorder.waits_ms.iter().sum::<f64>() > 100.0, "steps waited for the disk: {:?}", recorder.waits_ms);
}

#[test]
fn copies_of_states_let_steps_go_on_and_change_no_byte() {
    for (nth, memory) in [SaveMemory::Size(Bytes(STATE_BYTES / 4)), SaveMemory::Size(Bytes(1 << 40))].into_iter().enumerate() {
        // Each save takes two seconds.
        let rate = Some(Bytes(STATE_BYTES / 2));
        let recorder =
            expect_saves_of(|dir, steps, save_steps| Settings { save_memory: memory, save_rate: rate, ..slow(dir, steps, save_steps) });
        assert!(nth == 0 || recorder.waits_ms[2] < 1500.0, "{:?}", recorder.waits_ms);
    }
}

#[test]
fn any_order_of_events_clips_skips_and_narrow_moments_are_saved_alike() {
    let spoiled = |step| Injection { step, share: 0, element: 5, value: f32::INFINITY };
    for seed in 0..4 {
        expect_saves_of(|dir, steps, save_steps| Settings {
            adversary: Some(seed),
            threads: Some(1),
            moments: if seed % 2 == 0 { Moments::Float32 } else { Moments::Bfloat16 },
            masters: if seed == 1 && cfg!(feature = "repartition") { MastersChoice::Split } else { MastersChoice::Auto },
            max_grad_norm: if seed < 2 { 1e-3 } else { 1.0 },
            inject: if seed == 2 { vec![spoiled(2), spoiled(3)] } else { Vec::new() },
            save_memory: SaveMemory::Size(Bytes(STATE_BYTES / 2 * (seed % 3))),
            // Without memory for copies, the device may have no state.
            resident_buckets: ResidentBuckets::Count(if seed % 3 > 0 && cfg!(feature = "repartition") { 2 } else { 0 }),
            ..slow(dir, steps, save_steps)
        });
    }
}

#[test]
fn the_parts_of_several_ranks_are_saved_beside_steps_as_they_are_while_training_stops() {
    for (gpus, adversary) in [(2, None), (4, None), (2, Some(1)), (3, Some(2))] {
        expect_saves_of(|dir, steps, save_steps| Settings {
            gpus,
            adversary,
            threads: Some(if adversary.is_some() { 1 } else { 2 }),
            moments: if gpus == 3 { Moments::Int8 } else { Moments::Float32 },
            max_grad_norm: if gpus == 4 { 1e-3 } else { 1.0 },
            save_memory: SaveMemory::Size(Bytes(STATE_BYTES / 2 * (gpus as u64 % 3))),
            resident_buckets: ResidentBuckets::Count(if gpus == 2 && cfg!(feature = "repartition") { 2 } else { 0 }),
            ..slow(dir, steps, save_steps)
        });
    }
}

#[cfg(feature = "repartition")]
#[test]
fn states_that_the_device_copies_within_its_memory_are_saved_alike() {
    for (gpus, adversary, moments) in [(1, None, Moments::Float32), (1, Some(3), Moments::Int8), (2, Some(4), Moments::Bfloat16)] {
        let recorder = expect_saves_of(|dir, steps, save_steps| Settings {
            gpus,
            adversary,
            moments,
            threads: Some(if adversary.is_some() { 1 } else { 2 }),
            max_grad_norm: 1e-3,
            save_memory: SaveMemory::Size(Bytes(4 * STATE_BYTES)),
            resident_buckets: ResidentBuckets::Count(7),
            ..slow(dir, steps, save_steps)
        });
        assert_eq!(recorder.device_copies, 7, "every state of the device");
    }
}

#[cfg(feature = "repartition")]
#[test]
fn states_that_leave_the_device_from_their_own_memory_are_saved_alike() {
    for seed in (0..6).step_by(sweep(5, 1)) {
        let recorder = expect_saves_of(|dir, steps, save_steps| Settings {
            adversary: Some(seed),
            threads: Some(1),
            gpus: if seed < 4 { 1 } else { 2 },
            max_grad_norm: if seed % 2 == 0 { 1e-3 } else { 1.0 },
            resident_buckets: ResidentBuckets::Count(7),
            ..slow(dir, steps, save_steps)
        });
        assert_eq!(recorder.device_copies, 0, "no state has a copy within the device");
    }
}

#[test]
fn an_evaluation_beside_a_save_neither_waits_for_it_nor_changes() {
    let dir = tempfile::tempdir().unwrap();
    let eval_data = dir.path().join("eval.txt");
    fs::write(&eval_data, "A model that is evaluated has other data than it learns from. ".repeat(8)).unwrap();
    let run_of = |name: &str, save_memory| {
        let out = dir.path().join(name);
        let settings = Settings { eval_data: vec![eval_data.clone()], eval_steps: Some(3), save_memory, ..slow(&out, 4, 2) };
        let (summary, recorder) = run(&settings);
        assert!(summary.failure.is_none(), "{:?}", summary.failure);
        let metrics = fs::read_to_string(out.join("metrics.jsonl")).unwrap();
        let rows = metrics.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        (rows.filter_map(|row| row["eval_loss"].as_f64()).collect::<Vec<_>>(), recorder, out.join("checkpoint-4"))
    };
    let (losses, recorder, beside) = run_of("beside", SaveMemory::Auto);
    let (expected, _, stopping) = run_of("stopping", SaveMemory::Off);
    assert!(losses.len() == 2 && losses == expected, "{losses:?} {expected:?}");
    let evaluated = recorder.lines.iter().position(|line| line.contains("eval") && !line.contains("eval.txt"));
    assert!(evaluated.unwrap() < recorder.place("checkpoint-2"), "{:?}", recorder.lines);
    expect_same(&beside, &stopping);
}

/// The signal comes before a save begins, while states are read and written, when the next save is due, and when a save was published.
#[test]
fn a_signal_in_any_phase_of_a_save_ends_a_run_after_that_save_and_one_of_its_last_step() {
    for (line, last) in [("step 2", Some(2)), ("step 3", Some(3)), ("step 4", Some(4)), ("checkpoint-2", None)] {
        let dir = tempfile::tempdir().unwrap();
        let stop = StopFlag::default();
        let request = stop.clone();
        let mut recorder = Recorder::acting_after(line, move || request.request());
        let summary = train(&slow(dir.path(), 50, 2), &stop, &mut recorder).unwrap();
        assert!(summary.failure.is_none() && summary.interrupted && last.is_none_or(|last| summary.step == last), "{line}: {summary:?}");
        let saved = [2, summary.step].map(|step| format!("checkpoint-{step}"));
        saved.iter().for_each(|name| drop(checkpoint::verify(&dir.path().join(name)).unwrap()));
        assert!(saved[0] == saved[1] || recorder.place(&saved[0]) < recorder.place(&saved[1]), "{:?}", recorder.lines);
        let names = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        assert!(names.into_iter().all(|name| !name.starts_with(".checkpoint-")), "{line}");
    }
}

#[test]
fn a_run_that_changes_its_plan_during_a_save_saves_alike() {
    let dir = tempfile::tempdir().unwrap();
    let run_of = |name: &str, replan| {
        let out = dir.path().join(name);
        let (summary, recorder) = run(&Settings { replan, ..slow(&out, 12, 2) });
        assert!(summary.failure.is_none(), "{:?}", summary.failure);
        (out, recorder)
    };
    let (moved, recorder) = run_of("moved", ReplanChoice::Random);
    let (kept, _) = run_of("kept", ReplanChoice::Off);
    let moves = recorder.lines.iter().filter(|line| line.contains(": another plan in ")).count();
    assert!(moves > 1, "{:?}", recorder.lines);
    (2..=12).step_by(2).map(|step| format!("checkpoint-{step}")).for_each(|name| expect_same(&moved.join(&name), &kept.join(&name)));
}

#[test]
fn a_running_run_is_read_from_its_newest_whole_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let place = out.clone();
    let mut recorder = Recorder::acting(5, move || {
        let (found, warnings) = checkpoint::find(&place, checkpoint::Check::Now).unwrap();
        assert!(found.ends_with("checkpoint-2") && warnings.is_empty(), "{found:?} {warnings:?}");
        fs::write(place.with_file_name("digest"), checkpoint::digest::digest_checkpoint(&found).unwrap()).unwrap();
    });
    // A save takes two seconds.
    let settings = Settings { save_rate: Some(Bytes(STATE_BYTES / 2)), ..slow(&out, 6, 2) };
    let summary = train(&settings, &StopFlag::default(), &mut recorder).unwrap();
    assert!(summary.failure.is_none(), "{:?}", summary.failure);
    let digest = fs::read_to_string(dir.path().join("digest")).unwrap();
    assert_eq!(checkpoint::digest::digest_checkpoint(&out.join("checkpoint-2")).unwrap(), digest);
    [4, 6].into_iter().for_each(|step| drop(checkpoint::verify(&out.join(format!("checkpoint-{step}"))).unwrap()));
}

#[test]
fn a_save_that_is_due_while_one_runs_waits_for_it_and_one_line_says_so() {
    let dir = tempfile::tempdir().unwrap();
    let settings = Settings { save_rate: Some(Bytes(STATE_BYTES / 3)), ..slow(dir.path(), 4, 1) };
    let (summary, recorder) = run(&settings);
    assert!(summary.failure.is_none());
    let warnings: Vec<_> = recorder.lines.iter().filter(|line| line.contains("a larger --save-steps avoids that")).collect();
    assert_eq!(warnings.len(), 1, "{:?}", recorder.lines);
    (1..5).for_each(|step| drop(checkpoint::verify(&dir.path().join(format!("checkpoint-{step}"))).unwrap()));
}

/// Runs 7 steps that save after each second step, and `act`s on the output directory while the save after step 2 runs.
fn act_beside_save(act: impl FnOnce(&Path) + 'static) -> (tempfile::TempDir, Summary, Recorder) {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("out");
    let place = out.clone();
    let mut recorder = Recorder::acting(3, move || act(&place));
    let summary = train(&slow(&out, 7, 2), &StopFlag::default(), &mut recorder).unwrap();
    (dir, summary, recorder)
}

#[test]
fn a_directory_that_is_removed_during_a_save_is_created_again_with_the_state_of_a_later_step() {
    let (dir, summary, recorder) = act_beside_save(|out| fs::remove_dir_all(out).unwrap());
    assert!(summary.failure.is_none(), "{:?}", summary.failure);
    let warnings = recorder.warnings();
    assert!(warnings.len() == 2 && warnings[0].contains("out was removed during the run"), "{warnings:?}");
    assert!(warnings[1].contains("metrics.jsonl was removed or replaced"), "{warnings:?}");
    let saved = |step| checkpoint::verify(&dir.path().join(format!("out/checkpoint-{step}")));
    assert!(saved(2).is_err() && saved(3).or(saved(4)).is_ok());
    [4, 6, 7].into_iter().for_each(|step| drop(saved(step).unwrap()));
}

#[test]
fn a_directory_that_is_moved_during_a_save_is_followed() {
    let (dir, summary, recorder) = act_beside_save(|out| fs::rename(out, out.with_file_name("moved")).unwrap());
    assert!(summary.failure.is_none(), "{:?}", summary.failure);
    assert!(recorder.place("was moved during the run, which continues in") < recorder.place("moved/checkpoint-2"));
    [2, 4, 6, 7].into_iter().for_each(|step| drop(checkpoint::verify(&dir.path().join(format!("moved/checkpoint-{step}"))).unwrap()));
}

#[test]
fn a_link_that_takes_the_directorys_place_during_a_save_ends_the_run() {
    let (dir, summary, _) = act_beside_save(|out| {
        fs::remove_dir_all(out).unwrap();
        fs::create_dir(out.with_file_name("elsewhere")).unwrap();
        std::os::unix::fs::symlink("elsewhere", out).unwrap();
    });
    let failure = summary.failure.expect("a link leads nowhere").to_string();
    assert!(failure.starts_with("create ") && failure.ends_with("out: File exists (os error 17)"), "{failure}");
    assert_eq!(summary.lost[0], "steps 1 to 4, all since the start");
    assert_eq!(fs::read_dir(dir.path().join("elsewhere")).unwrap().count(), 0);
}

#[test]
fn old_checkpoints_are_removed_beside_steps() {
    let dir = tempfile::tempdir().unwrap();
    let (summary, recorder) = run(&Settings { save_total_limit: Some(1), ..slow(dir.path(), 7, 2) });
    assert!(summary.failure.is_none() && recorder.warnings().is_empty(), "{:?}", recorder.lines);
    let names = fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(names.filter(|name| name.contains("checkpoint")).collect::<Vec<_>>(), ["checkpoint-7"]);
}

#[test]
fn a_save_that_fails_beside_steps_ends_the_run_and_leaves_the_checkpoint_before() {
    let of_state = |accesses: &[(&'static str, std::path::PathBuf)], step: u64| -> Vec<usize> {
        let is_wanted = |path: &Path| path.to_string_lossy().contains(&format!("checkpoint-{step}.tmp"));
        accesses.iter().enumerate().filter(|(_, (_, path))| is_wanted(path)).map(|(at, _)| at).collect()
    };
    let attempt = |at| {
        let dir = tempfile::tempdir().unwrap();
        faults::arm(at);
        let outcome = run(&Settings { save_rate: None, ..slow(dir.path(), 6, 2) });
        (dir, outcome, faults::disarm())
    };
    let (_, _, accesses) = attempt(None);
    let all = of_state(&accesses, 4);
    assert!(all.len() > 12, "{accesses:?}");
    for at in all.into_iter().step_by(sweep(9, 1)) {
        let (dir, (summary, recorder), accesses) = attempt(Some((at, Mode::Error)));
        let names = || fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        if accesses.get(at).is_none_or(|(_, path)| !path.to_string_lossy().contains("checkpoint-4.tmp")) {
            continue;
        }
        let failure = summary.failure.unwrap_or_else(|| panic!("{:?} was ignored: {:?}", accesses[at], recorder.lines)).to_string();
        assert!(failure.contains("No space left"), "{failure}");
        assert!(names().all(|name| !name.starts_with('.') || !name.contains("checkpoint")), "{:?}", names().collect::<Vec<_>>());
        checkpoint::verify(&dir.path().join("checkpoint-2")).unwrap();
    }
}
