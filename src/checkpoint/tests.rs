use super::format::{CHUNK_BYTES, MANIFEST, MODEL, Manifest, STATE};
use super::store::{Newest, is_damage};
use super::writer::Saved;
use super::*;
use crate::checkpoint::SaveRate;
use crate::disk::Dir;
use crate::disk::faults::{self, Mode};
use crate::dtype::Element;
use crate::error::{Error, Result};
use crate::optim::moments::Moments;
use crate::optim::state_array::StatePart;
use half::bf16;
use proptest::prelude::*;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value, json};
use std::fs;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};

/// Name, shape, and the three parts.
pub(super) type Tensor = (String, Vec<usize>, [Vec<f32>; 3]);

pub(super) fn trainer(step: u64) -> TrainerState {
    TrainerState {
        step,
        optimizer_step: step,
        loss_scale: SavedLossScale { scale: 65536.0, good_steps: 17 },
        scheduler: Scheduler { name: "cosine".into(), base_lr: 3.0000000000000004e-4, warmup_steps: 100, max_steps: 2000 },
        seed: u64::MAX,
        data_position: json!({"epoch": 1, "window": 12345}),
        speculation: json!([true, false, true]),
        clip: Default::default(),
        settings: json!({"max_grad_norm": 0.1}),
    }
}

/// Two tensors that chunks of 1 MiB cut at odd places, an empty one, and every kind of float.
pub(super) fn tensors(seed: u64) -> Vec<Tensor> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let special = [0x7fc0_1234, 0xff80_0001, 0x8000_0000, 1, 0x807f_ffff, 0x7f80_0000];
    let mut part = |elems: usize| -> Vec<f32> {
        let mut bits: Vec<u32> = (0..elems).map(|_| rng.next_u32()).collect();
        bits.iter_mut().zip(special).for_each(|(b, s)| *b = s);
        bits.into_iter().map(f32::from_bits).collect()
    };
    [("wte", vec![97, 1001]), ("empty", vec![0, 3]), ("norm", vec![13])]
        .map(|(name, shape)| {
            let elems = shape.iter().product();
            (name.to_string(), shape, [part(elems), part(elems), part(elems)])
        })
        .into()
}

pub(super) fn small(seed: u64) -> Vec<Tensor> {
    tensors(seed).split_off(1)
}

/// One tensor to save: three slices as long as the product of `shape`.
#[derive(Clone, Copy)]
pub(crate) struct TensorSource<'a> {
    pub(crate) name: &'a str,
    pub(crate) shape: &'a [usize],
    pub(crate) params: &'a [f32],
    pub(crate) m: &'a [f32],
    pub(crate) v: &'a [f32],
}

/// The arrays of AdamW's state.
const ADAMW: [StatePart; 3] = [StatePart::PARAMS, StatePart::M, StatePart::V];

impl Writer {
    pub(crate) fn tensor(&mut self, tensor: TensorSource<'_>) -> Result<()> {
        let TensorSource { name, shape, params, m, v } = tensor;
        self.begin(name, shape);
        for (part, elems) in ADAMW.into_iter().zip([params, m, v]) {
            assert_eq!(elems.len(), shape.iter().product::<usize>(), "tensor {name} of shape {shape:?}");
            self.elems(part, elems)?;
        }
        Ok(())
    }
}

/// Writes a whole checkpoint with an empty `run` into `output_dir`: every tensor, the model's files, the manifest.
pub(crate) fn save<'a>(
    output_dir: &Path,
    trainer: &TrainerState,
    model_files: &[(String, Vec<u8>)],
    tensors: impl IntoIterator<Item = TensorSource<'a>>,
    total_limit: Option<NonZeroUsize>,
) -> Result<Saved> {
    let mut writer = Writer::create(&Dir::open(output_dir)?, trainer.clone(), Map::new(), SaveRate::default())?;
    for tensor in tensors {
        writer.tensor(tensor)?;
    }
    writer.finish(model_files, total_limit, Default::default())
}

pub(super) fn sources(tensors: &[Tensor]) -> impl Iterator<Item = TensorSource<'_>> {
    tensors.iter().map(|(name, shape, [params, m, v])| TensorSource { name, shape, params, m, v })
}

pub(super) fn model_files() -> Vec<(String, Vec<u8>)> {
    vec![("config.json".into(), b"{}".to_vec()), ("tokenizer.json".into(), vec![7; 300])]
}

pub(super) fn save_step(dir: &Path, step: u64, tensors: &[Tensor], limit: Option<usize>) -> crate::error::Result<Saved> {
    save(dir, &trainer(step), &model_files(), sources(tensors), limit.and_then(NonZeroUsize::new))
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

pub(super) fn read_back(dir: &Path, wanted: &[Tensor]) -> crate::error::Result<bool> {
    let mut loaded = open(dir)?;
    let mut same = true;
    for (name, shape, parts) in wanted {
        let elems = shape.iter().product();
        for (part, expected) in ADAMW.into_iter().zip(parts) {
            let mut read = vec![0.0; elems];
            loaded.read_elems(name, part, 0, &mut read)?;
            same &= bits(&read) == bits(expected);
        }
    }
    Ok(same)
}

/// The newest checkpoint in `dir` of which all bytes are good.
fn newest_good(dir: &Path) -> Result<Newest<Manifest>> {
    newest_by(dir, |path| Ok(verify(path)))
}

pub(super) fn newest_step(dir: &Path) -> Option<u64> {
    newest_good(dir).unwrap().found.map(|(_, manifest)| manifest.trainer.step)
}

pub(super) fn tidy(dir: &Path) -> Vec<String> {
    clean(&Dir::open(dir).unwrap()).unwrap()
}

pub(super) fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn files_of(checkpoint: &Path) -> Vec<PathBuf> {
    let model = checkpoint.join(MODEL);
    vec![checkpoint.join(STATE), checkpoint.join(MANIFEST), model.join("config.json"), model.join("tokenizer.json")]
}

/// Verification fails with one line that names `file`.
fn assert_refused(checkpoint: &Path, file: &Path) {
    let message = verify(checkpoint).expect_err("damage went unnoticed").to_string();
    assert!(message.contains(file.to_str().unwrap()) && !message.contains('\n'), "{message}");
}

#[test]
fn every_bit_comes_back() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = tensors(1);
    let saved = save_step(dir.path(), 7, &tensors, None).unwrap();
    assert_eq!((saved.path.clone(), saved.warnings), (dir.path().join("checkpoint-7"), vec![]));
    assert_eq!(verify(&saved.path).unwrap().trainer, trainer(7));
    assert!(read_back(&saved.path, &tensors).unwrap());
    assert_eq!(open(&saved.path).unwrap().read_model_files().unwrap(), model_files());
    assert_eq!(names(dir.path()), ["checkpoint-7"]);
}

#[test]
fn a_tensor_list_of_another_model_is_refused_and_the_difference_named() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_step(dir.path(), 1, &small(1), None).unwrap().path;
    let mut loaded = open(&path).unwrap();
    let same: [(&str, &[usize]); 2] = [("empty", &[0, 3]), ("norm", &[13])];
    loaded.expect_tensors(same).unwrap();
    let error = |model: &[(&'static str, &'static [usize])]| loaded.expect_tensors(model.iter().copied()).unwrap_err().to_string();
    assert!(error(&[("empty", &[0, 3]), ("norm", &[14])]).contains("holds norm [13] where the model has norm [14]"));
    assert!(error(&[("empty", &[0, 3])]).contains("where the model has nothing"));
    assert!(loaded.read_params("norm", &mut [0.0; 12]).unwrap_err().to_string().contains("13 elements, expected 12"));
    assert!(loaded.read_params("nose", &mut [0.0; 12]).unwrap_err().to_string().contains("no tensor nose"));
    let message = loaded.read_elems("norm", StatePart::M, 4, &mut [0.0; 10]).unwrap_err().to_string();
    assert!(message.contains("has 13 elements, expected 14"), "{message}");
}

#[test]
fn files_cut_short_or_grown_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = save_step(dir.path(), 1, &tensors(2), None).unwrap().path;
    for file in files_of(&checkpoint) {
        let whole = fs::read(&file).unwrap();
        let n = whole.len();
        let cuts = [0, 1, 2, 22, 23, 24, n / 2, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, n.saturating_sub(23), n - 1];
        for cut in cuts.into_iter().filter(|&cut| cut < n) {
            fs::write(&file, &whole[..cut]).unwrap();
            assert_refused(&checkpoint, &file);
        }
        fs::write(&file, [&whole[..], b"\0"].concat()).unwrap();
        assert_refused(&checkpoint, &file);
        fs::remove_file(&file).unwrap();
        assert_refused(&checkpoint, &file);
        fs::create_dir(&file).unwrap();
        assert_refused(&checkpoint, &file);
        fs::remove_dir(&file).unwrap();
        fs::write(&file, &whole).unwrap();
    }
    verify(&checkpoint).unwrap();
}

#[test]
fn every_flipped_bit_is_noticed() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = save_step(dir.path(), 1, &small(3), None).unwrap().path;
    let mut rng = ChaCha8Rng::seed_from_u64(4);
    for file in files_of(&checkpoint) {
        let whole = fs::read(&file).unwrap();
        for _ in 0..500 {
            let bit = rng.next_u64() as usize % (whole.len() * 8);
            let mut damaged = whole.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            fs::write(&file, damaged).unwrap();
            assert_refused(&checkpoint, &file);
        }
        fs::write(&file, whole).unwrap();
    }
    verify(&checkpoint).unwrap();
}

#[test]
fn swapped_chunks_are_noticed_also_when_only_one_tensor_is_read() {
    let dir = tempfile::tempdir().unwrap();
    let tensor = |name: &str, elems: usize| (name.to_string(), vec![elems], [0, 1, 2].map(|i| vec![i as f32; elems]));
    let tensors = vec![tensor("w", 200_000), tensor("last", 10)];
    let checkpoint = save_step(dir.path(), 1, &tensors, None).unwrap().path;
    let file = checkpoint.join(STATE);
    let mut state = fs::read(&file).unwrap();
    let (a, b) = state.split_at_mut(CHUNK_BYTES);
    a.swap_with_slice(&mut b[..CHUNK_BYTES]);
    fs::write(&file, state).unwrap();
    assert_refused(&checkpoint, &file);
    let (mut loaded, mut params, mut last) = (open(&checkpoint).unwrap(), vec![0.0; 200_000], [9.0; 10]);
    for _ in 0..2 {
        let error = loaded.read_params("w", &mut params).unwrap_err().to_string();
        assert!(error.contains("bytes 0..1048576"), "{error}");
        // The damaged chunk must not be taken for the one that was read before it.
        last.fill(9.0);
        loaded.read_params("last", &mut last).unwrap();
        assert_eq!(last, [0.0; 10]);
    }
}

#[test]
fn the_newest_good_one_is_found_and_the_damaged_ones_are_named() {
    let dir = tempfile::tempdir().unwrap();
    assert!(newest_good(&dir.path().join("absent")).unwrap().found.is_none());
    for step in [2, 10, 9] {
        save_step(dir.path(), step, &small(step), None).unwrap();
    }
    fs::create_dir(dir.path().join("checkpoint-11")).unwrap();
    fs::create_dir(dir.path().join("checkpoint-0012")).unwrap();
    fs::write(dir.path().join("checkpoint-10").join(MODEL).join("config.json"), "{ ").unwrap();
    fs::rename(dir.path().join("checkpoint-2"), dir.path().join("checkpoint-20")).unwrap();
    let newest = newest_good(dir.path()).unwrap();
    assert_eq!(newest.found.unwrap().0, dir.path().join("checkpoint-9"));
    let wrong = ["checkpoint-20: holds step 2", "checkpoint-11/trainer_state.json", "checkpoint-10/model/config.json: damaged"];
    assert_eq!(newest.warnings.len(), wrong.len());
    assert!(newest.warnings.iter().zip(wrong).all(|(w, part)| w.contains(part)), "{:?}", newest.warnings);
}

#[test]
fn the_limit_removes_the_oldest_but_never_the_one_just_saved() {
    let dir = tempfile::tempdir().unwrap();
    for step in [8, 9, 10] {
        save_step(dir.path(), step, &small(step), Some(2)).unwrap();
    }
    assert_eq!(names(dir.path()), ["checkpoint-10", "checkpoint-9"]);
    // A half-copied checkpoint does not count, and a run that went back keeps its latest one.
    fs::create_dir(dir.path().join("checkpoint-3")).unwrap();
    save_step(dir.path(), 5, &small(5), Some(1)).unwrap();
    assert_eq!(names(dir.path()), ["checkpoint-3", "checkpoint-5"]);
}

#[test]
fn content_is_durable_before_the_name_and_the_name_before_the_old_one_goes() {
    let dir = tempfile::tempdir().unwrap();
    save_step(dir.path(), 1, &small(1), None).unwrap();
    faults::arm(None);
    save_step(dir.path(), 1, &small(2), None).unwrap();
    let pid = std::process::id();
    let log: Vec<String> = faults::disarm()
        .into_iter()
        .map(|(operation, path)| {
            let path = path.strip_prefix(dir.path()).unwrap().display().to_string();
            format!("{operation} {}", path.replace(&format!("-{pid}"), ""))
        })
        .collect();
    let tmp = ".checkpoint-1.tmp";
    assert_eq!(
        log,
        [
            format!("create {tmp}"),
            format!("create {tmp}/state.bin"),
            format!("write {tmp}/state.bin"),
            format!("fsync {tmp}/state.bin"),
            format!("create {tmp}/model"),
            format!("create {tmp}/model/config.json"),
            format!("write {tmp}/model/config.json"),
            format!("fsync {tmp}/model/config.json"),
            format!("create {tmp}/model/tokenizer.json"),
            format!("write {tmp}/model/tokenizer.json"),
            format!("fsync {tmp}/model/tokenizer.json"),
            format!("fsync {tmp}/model"),
            format!("create {tmp}/trainer_state.json"),
            format!("write {tmp}/trainer_state.json"),
            format!("fsync {tmp}/trainer_state.json"),
            format!("fsync {tmp}"),
            "rename checkpoint-1".into(),
            format!("rename {tmp}"),
            "fsync ".into(),
            "remove .checkpoint-1.old".into(),
        ]
    );
}

/// A directory with checkpoints 1 and 2, in which saving `step` fails at operation `at`; `None` once the save succeeds.
fn fail_at(step: u64, at: usize, mode: Mode) -> Option<(tempfile::TempDir, crate::error::Result<Saved>)> {
    let dir = tempfile::tempdir().unwrap();
    save_step(dir.path(), 1, &small(1), None).unwrap();
    save_step(dir.path(), 2, &small(2), None).unwrap();
    faults::arm(Some((at, mode)));
    let result = save_step(dir.path(), step, &tensors(9), Some(2));
    let reached = faults::disarm().len() > at;
    reached.then_some((dir, result))
}

#[test]
fn a_failed_save_is_one_error_line_and_leaves_all_other_files() {
    for step in [2, 3] {
        let mut failures = 0;
        while let Some((dir, result)) = fail_at(step, failures, Mode::Error) {
            failures += 1;
            match result {
                // Only tidying up failed: the checkpoint is there and the failure is a warning.
                Ok(saved) => {
                    assert_eq!(saved.warnings.len(), 1, "{saved:?}");
                    assert!(read_back(&saved.path, &tensors(9)).unwrap());
                }
                Err(e) => {
                    let message = e.to_string();
                    assert!(message.contains("checkpoint-") || message.starts_with("fsync"), "{message}");
                    assert!(message.contains("No space left") && !message.contains('\n'), "{message}");
                    assert!(matches!(e, Error::Io { .. }) && e.exit_code() == 1);
                    assert!(!names(dir.path()).iter().any(|n| n.contains(".tmp-")), "{:?}", names(dir.path()));
                    assert!(read_back(&dir.path().join("checkpoint-1"), &small(1)).unwrap());
                    verify(&dir.path().join("checkpoint-2")).unwrap();
                }
            }
            assert!(newest_step(dir.path()).unwrap() >= 2);
        }
        assert!(failures > 20, "{failures}");
    }
}

#[test]
fn a_run_that_dies_anywhere_in_a_save_leaves_a_good_checkpoint_and_the_next_one_tidies_up() {
    for step in [2, 3] {
        let mut crashes = 0;
        while let Some((dir, _)) = fail_at(step, crashes, Mode::Crash) {
            crashes += 1;
            let newest = newest_good(dir.path()).unwrap();
            let (path, manifest) = newest.found.expect("no good checkpoint is left");
            assert_eq!(newest.warnings, Vec::<String>::new());
            let expected = if manifest.tensors.len() == 3 { tensors(9) } else { small(2) };
            assert!(manifest.trainer.step >= 2 && read_back(&path, &expected).unwrap());
            assert_eq!(tidy(dir.path()), Vec::<String>::new());
            assert!(names(dir.path()).iter().all(|n| !n.starts_with('.')), "{:?}", names(dir.path()));
            assert!(newest_step(dir.path()).unwrap() >= 2);
        }
        assert!(crashes > 20, "{crashes}");
    }
}

#[test]
fn a_hidden_checkpoint_of_a_dead_run_is_recognized_after_its_pid_is_reused() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    save_step(dir.path(), 4, &small(4), None).unwrap();
    let keep =
        [".checkpoint-4.bak-1", ".checkpoint-4.tmp-x", ".checkpoint-8.del-1", ".checkpoint-8.tmp-2", ".git", "checkpoint-4", "elsewhere"];
    let alive = std::os::unix::process::parent_id();
    for name in [keep[0], keep[1], keep[3], keep[4], keep[6], &format!(".checkpoint-8.tmp-{alive}"), ".checkpoint-8.del-999999999"] {
        fs::create_dir(path(name)).unwrap();
    }
    fs::write(path("elsewhere/file"), "").unwrap();
    fs::write(path(".checkpoint-8.tmp-2/thesis.tex"), "mine").unwrap();
    std::os::unix::fs::symlink("elsewhere", path(".checkpoint-8.del-1")).unwrap();
    fs::rename(path("checkpoint-4"), path(".checkpoint-4.old-1")).unwrap();
    assert_eq!(tidy(dir.path()), Vec::<String>::new());
    assert_eq!(names(dir.path()), keep);
    assert!(path("elsewhere/file").exists() && newest_step(dir.path()) == Some(4));
}

#[test]
fn a_checkpoint_that_was_moved_aside_is_kept_until_another_one_has_its_name() {
    let dir = tempfile::tempdir().unwrap();
    save_step(dir.path(), 4, &small(4), None).unwrap();
    fs::rename(dir.path().join("checkpoint-4"), dir.path().join(".checkpoint-4.old-1")).unwrap();
    std::os::unix::fs::symlink("nowhere", dir.path().join("checkpoint-4")).unwrap();
    let warnings = tidy(dir.path());
    assert!(
        warnings.len() == 1 && warnings[0].contains(".checkpoint-4.old-1: kept under this name, because checkpoint-4 is not"),
        "{warnings:?}"
    );
    // The link may lead to a disk that is not mounted: nothing goes on beside it.
    assert!(newest_good(dir.path()).unwrap_err().to_string().contains("checkpoint-4: No such file"));
    fs::remove_file(dir.path().join("checkpoint-4")).unwrap();
    assert_eq!((tidy(dir.path()), names(dir.path())), (vec![], vec!["checkpoint-4".to_string()]));
}

#[test]
fn an_entry_with_a_checkpoints_name_gives_way_to_it() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    fs::write(path("target"), "mine").unwrap();
    for (step, target) in [(1, "nowhere"), (2, "checkpoint-2"), (3, "target")] {
        std::os::unix::fs::symlink(target, path(&format!("checkpoint-{step}"))).unwrap();
    }
    fs::write(path("checkpoint-4"), "mine").unwrap();
    for step in 1..=4 {
        let saved = save_step(dir.path(), step, &small(step), None).unwrap();
        let word = format!("checkpoint-{step}: not a checkpoint of this program; it is now checkpoint-{step}.foreign-1");
        assert!(saved.warnings.len() == 1 && saved.warnings[0].ends_with(&word));
        assert!(read_back(&path(&format!("checkpoint-{step}")), &small(step)).unwrap(), "{saved:?}");
    }
    assert_eq!(names(dir.path()).len(), 2 * 4 + 1);
    assert_eq!([path("target"), path("checkpoint-4.foreign-1")].map(|path| fs::read_to_string(path).unwrap()), ["mine", "mine"]);
}

#[test]
fn its_size_is_known_before_it_is_written() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = tensors(1);
    let path = save_step(dir.path(), 1, &tensors, None).unwrap().path;
    let params = tensors.iter().map(|(_, _, [params, ..])| params.len()).sum();
    let bytes: u64 = files_of(&path).iter().filter(|file| !file.ends_with(MANIFEST)).map(|file| file.metadata().unwrap().len()).sum();
    assert_eq!(checkpoint_bytes(params, Moments::Float32.arrays(), &model_files()), bytes);
}

#[test]
fn the_digest_of_a_checkpoint_is_the_digest_of_the_state() {
    let dir = tempfile::tempdir().unwrap();
    let tensors = tensors(5);
    let path = save_step(dir.path(), 3, &tensors, None).unwrap().path;
    let mut digest = digest::StateDigest::new(3, Moments::Float32.arrays());
    tensors.iter().for_each(|(_, _, parts)| ADAMW.into_iter().zip(parts).for_each(|(part, elems)| digest.update(part, elems)));
    let hex = digest.finish();
    assert_eq!(digest::digest_checkpoint(&path).unwrap(), hex);
    assert!(hex.len() == 64 && hex.bytes().all(|b| b.is_ascii_hexdigit()));
    // sha256 of eight zero bytes.
    let zero = "af5570f5a1810b7af78caf4bc70a660f0df51e42baf91d4de5b2328de0e83dfc";
    assert_eq!(digest::StateDigest::new(0, Moments::Float32.arrays()).finish(), zero);
}

#[test]
fn every_finite_number_reads_back_to_the_bit() {
    let dir = tempfile::tempdir().unwrap();
    let mut rng = ChaCha8Rng::seed_from_u64(6);
    let mut trainer = trainer(1);
    trainer.settings = (0..2000).map(|_| f64::from_bits(rng.next_u64())).filter(|x| x.is_finite()).map(Value::from).collect();
    let path = save(dir.path(), &trainer, &[], sources(&small(1)), None).unwrap().path;
    assert_eq!(verify(&path).unwrap().trainer, trainer);
}

#[test]
fn a_number_that_json_cannot_hold_fails_the_save() {
    let dir = tempfile::tempdir().unwrap();
    let mut trainer = trainer(1);
    trainer.loss_scale.scale = f32::NAN;
    save(dir.path(), &trainer, &[], sources(&small(1)), None).unwrap_err();
    assert!(names(dir.path()).is_empty());
}

/// Writes `json` as a manifest with a correct seal.
pub(crate) fn forge(checkpoint: &Path, json: &Value) {
    let body = format!("{{\"manifest\":{json}");
    let crc = crc32c::crc32c(body.as_bytes());
    fs::write(checkpoint.join(MANIFEST), format!("{body},\n\"crc32c\":\"{crc:08x}\"}}\n")).unwrap();
}

pub(crate) fn true_manifest(checkpoint: &Path) -> Value {
    serde_json::to_value(verify(checkpoint).unwrap()).unwrap()
}

#[test]
fn a_sealed_manifest_that_lies_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = save_step(dir.path(), 1, &small(1), None).unwrap().path;
    let honest = true_manifest(&checkpoint);
    // The true content, where the manifest may not look for it.
    fs::copy(checkpoint.join(MODEL).join("config.json"), checkpoint.join("config.json")).unwrap();
    let lies = [
        ("/files/0/name", json!("../config.json")),
        ("/files/0/name", json!(checkpoint.join("config.json"))),
        ("/format_version", json!(0)),
        ("/format_version", json!(4)),
        ("/files/0/name", json!("..")),
        ("/files/0/name", json!("tokenizer.json")),
        ("/tensors/1/offset", json!(12)),
        ("/tensors/1/shape", json!([12])),
        ("/tensors/1/elems", json!(u64::MAX)),
        ("/tensors/1/shape", json!([u64::MAX, u64::MAX])),
        ("/tensors/1/name", json!("empty")),
        ("/state_bytes", json!(155)),
        ("/state_crc32c", json!([])),
        ("/state_crc32c/0", json!(0)),
        ("/trainer/step", json!(STEPS_MAX + 1)),
        ("/trainer/step", json!(0)),
        ("/trainer/optimizer_step", json!(2)),
        ("/trainer/optimizer_step", json!(u64::MAX)),
        ("/trainer/optimizer_step", json!(-1)),
        ("/trainer/loss_scale/scale", json!(-1.0)),
        ("/trainer/loss_scale/scale", json!(0.0)),
        ("/trainer/loss_scale/scale", json!(1e-45)),
        ("/trainer/loss_scale/scale", json!(3e38)),
        ("/trainer/loss_scale/scale", json!(1e300)),
        ("/trainer/loss_scale/scale", json!(3.0)),
        ("/trainer/loss_scale/scale", json!(null)),
        ("/trainer/loss_scale/good_steps", json!(2000)),
        ("/trainer/loss_scale/good_steps", json!(u64::MAX)),
        ("/trainer/scheduler/base_lr", json!(-1e-3)),
        ("/trainer/scheduler/base_lr", json!(null)),
        ("/run", json!([])),
        ("/run", json!({"moments": "int8"})),
        ("/run", json!({"moments": "int4"})),
        ("/run", json!({"moments": "bfloat16"})),
    ];
    forge(&checkpoint, &honest);
    verify(&checkpoint).unwrap();
    for (place, lie) in lies {
        let mut manifest = honest.clone();
        *manifest.pointer_mut(place).unwrap() = lie.clone();
        forge(&checkpoint, &manifest);
        assert!(verify(&checkpoint).is_err(), "{place} = {lie}");
    }
}

/// Moments in bfloat16 are two bytes each in the file, and in the digest; a reader of before refuses the format as one that it does not
/// know.
#[test]
fn packed_moments_are_stored_as_they_are_and_have_a_format_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let run = json!({"moments": "bfloat16"}).as_object().unwrap().clone();
    let mut tensors = tensors(9);
    // Moments are bfloat16 values: state comes from an engine that has rounded them.
    let short = |x: &mut f32| *x = <bf16 as Element>::from_f32(*x).to_f32();
    tensors.iter_mut().for_each(|(_, _, [_, m, v])| [m, v].into_iter().flatten().for_each(short));
    let mut writer = Writer::create(&crate::disk::Dir::open(dir.path()).unwrap(), trainer(3), run.clone(), SaveRate::default()).unwrap();
    sources(&tensors).try_for_each(|tensor| writer.tensor(tensor)).unwrap();
    let path = writer.finish(&model_files(), None, Default::default()).unwrap().path;
    assert!(read_back(&path, &tensors).unwrap());
    let (manifest, params) = (verify(&path).unwrap(), tensors.iter().map(|(_, _, [params, ..])| params.len()).sum::<usize>());
    assert_eq!((manifest.format_version, manifest.state_bytes, manifest.moments()), (3, 8 * params as u64, Moments::Bfloat16));
    let mut digest = digest::StateDigest::new(3, Moments::Bfloat16.arrays());
    tensors.iter().for_each(|(_, _, parts)| ADAMW.into_iter().zip(parts).for_each(|(part, elems)| digest.update(part, elems)));
    assert_eq!(digest::digest_checkpoint(&path).unwrap(), digest.finish());
    let mut older = true_manifest(&path);
    older["format_version"] = json!(2);
    forge(&path, &older);
    assert!(verify(&path).unwrap_err().to_string().contains("moments in bfloat16, which format 2 does not have"));
}

/// 8-bit moments of a tensor end with a whole group, in the file and in the digest.
#[test]
fn moments_in_8_bits_are_stored_in_groups_and_have_a_format_of_their_own() {
    let dir = tempfile::tempdir().unwrap();
    let run = json!({"moments": "int8"}).as_object().unwrap().clone();
    let mut tensors = tensors(9);
    let arrays = Moments::Int8.arrays();
    for (_, _, parts) in &mut tensors {
        for (part, values) in ADAMW.into_iter().zip(parts) {
            // State comes from an engine that has rounded it.
            let mut stored = vec![0; arrays[part].bytes(values.len())];
            arrays[part].store(values, crate::optim::moments::Rounding { key: 1, first: 0 }, &mut stored);
            arrays[part]
                .load(values, |bytes| {
                    bytes.copy_from_slice(&stored);
                    Ok(())
                })
                .unwrap();
        }
    }
    let mut writer = Writer::create(&crate::disk::Dir::open(dir.path()).unwrap(), trainer(3), run.clone(), SaveRate::default()).unwrap();
    sources(&tensors).try_for_each(|tensor| writer.tensor(tensor)).unwrap();
    let path = writer.finish(&model_files(), None, Default::default()).unwrap().path;
    assert!(read_back(&path, &tensors).unwrap());
    let bytes = |params: usize| (4 * params + 2 * 132 * params.div_ceil(128)) as u64;
    let (manifest, sum) = (verify(&path).unwrap(), tensors.iter().map(|(_, _, [params, ..])| bytes(params.len())).sum::<u64>());
    assert_eq!((manifest.format_version, manifest.state_bytes, manifest.moments()), (5, sum, Moments::Int8));
    let mut digest = digest::StateDigest::new(3, arrays);
    tensors.iter().for_each(|(_, _, parts)| ADAMW.into_iter().zip(parts).for_each(|(part, elems)| digest.update(part, elems)));
    assert_eq!(digest::digest_checkpoint(&path).unwrap(), digest.finish());
    let mut older = true_manifest(&path);
    older["format_version"] = json!(3);
    forge(&path, &older);
    assert!(verify(&path).unwrap_err().to_string().contains("moments in int8, which format 3 does not have"));
}

#[test]
fn a_manifest_keeps_all_facts_of_a_run_including_unknown_ones() {
    let dir = tempfile::tempdir().unwrap();
    let run = json!({"model": {"rope_theta": 1e4}, "of a later version": [1, {"x": null}]});
    let mut writer =
        Writer::create(&crate::disk::Dir::open(dir.path()).unwrap(), trainer(4), run.as_object().unwrap().clone(), SaveRate::default())
            .unwrap();
    sources(&small(1)).for_each(|tensor| writer.tensor(tensor).unwrap());
    let path = writer.finish(&[], None, Default::default()).unwrap().path;
    let manifest = verify(&path).unwrap();
    assert_eq!((manifest.format_version, Value::from(manifest.run)), (2, run));
}

#[test]
fn format_1_is_read_without_facts_of_its_run() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/checkpoint-format-1/checkpoint-2");
    let manifest = verify(&path).unwrap();
    assert_eq!((manifest.format_version, manifest.trainer.step, manifest.run.len()), (1, 2, 0));
    let digest = "1e51f0ccfcf6d8f5655b60c4e4f761ebf2703926e0f37180a090ffbe629982ba";
    assert_eq!(digest::digest_checkpoint(&path).unwrap(), digest);
}

#[test]
fn a_newer_format_is_named_and_not_passed_over() {
    let dir = tempfile::tempdir().unwrap();
    save_step(dir.path(), 1, &small(1), None).unwrap();
    let newer = save_step(dir.path(), 2, &small(1), None).unwrap().path;
    let mut manifest = true_manifest(&newer);
    manifest["format_version"] = json!(6);
    manifest["of a later version"] = json!(true);
    forge(&newer, &manifest);
    for error in [verify(&newer).unwrap_err(), newest_good(dir.path()).unwrap_err()] {
        let message = error.to_string();
        assert!(message.contains("checkpoint-2/trainer_state.json: format 6, this build reads formats 1 to 5"), "{message}");
    }
}

#[test]
fn an_unreadable_checkpoint_does_not_count_as_damaged() {
    let of_system = |code| Error::io("read", "/proc/self/status", std::io::Error::from_raw_os_error(code));
    for (code, name) in [(5, "EIO"), (13, "EACCES"), (116, "ESTALE"), (12, "ENOMEM"), (2, "ENOENT of a name that is listed")] {
        assert!(!is_damage(&of_system(code)), "{name}");
    }
    assert!(is_damage(&Error::io("read", "/nowhere/state.bin", std::io::Error::from_raw_os_error(2))));
    assert!(is_damage(&Error::io("read", "/proc/self/status", std::io::ErrorKind::UnexpectedEof.into())));

    let dir = tempfile::tempdir().unwrap();
    save_step(dir.path(), 1, &small(1), None).unwrap();
    let newest = save_step(dir.path(), 2, &small(1), None).unwrap().path;
    let link = |target: &str, path: &Path| std::os::unix::fs::symlink(target, path).unwrap();
    fs::remove_file(newest.join(STATE)).unwrap();
    assert_eq!(newest_step(dir.path()), Some(1), "a missing file is damage");
    for target in [STATE, "/nowhere"] {
        link(target, &newest.join(STATE));
        let message = newest_good(dir.path()).unwrap_err().to_string();
        assert!(message.contains("checkpoint-2/state.bin: "), "{message}");
        fs::remove_file(newest.join(STATE)).unwrap();
    }
    let older = dir.path().join("checkpoint-1").join(STATE);
    fs::rename(&older, dir.path().join("kept")).unwrap();
    [&older, &newest.join(STATE)].into_iter().for_each(|state| link("/nowhere", state));
    fs::create_dir(dir.path().join("checkpoint-4")).unwrap();
    let message = newest_good(dir.path()).unwrap_err().to_string();
    let causes = ["checkpoint-2/state.bin: ", "checkpoint-1/state.bin: ", "checkpoint-4/trainer_state.json: "];
    assert!(message.starts_with("find the newest good checkpoint in ") && causes.iter().all(|cause| message.contains(cause)), "{message}");
    fs::remove_dir(dir.path().join("checkpoint-4")).unwrap();
    fs::rename(dir.path().join("kept"), &older).unwrap();
    fs::remove_file(newest.join(STATE)).unwrap();
    link("/nowhere", &dir.path().join("checkpoint-3"));
    let message = newest_good(dir.path()).unwrap_err().to_string();
    assert!(message.contains("checkpoint-3: No such file"), "{message}");
    fs::remove_file(dir.path().join("checkpoint-3")).unwrap();
    fs::write(dir.path().join("checkpoint-3"), "").unwrap();
    let newest = newest_good(dir.path()).unwrap();
    assert!(newest.found.is_some() && newest.warnings[0].ends_with("checkpoint-3: not a directory"), "{newest:?}");
}

#[test]
fn a_file_of_terabytes_that_are_holes_is_refused_before_memory_is_taken() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = save_step(dir.path(), 1, &small(1), None).unwrap().path;
    let honest = true_manifest(&checkpoint);
    for bytes in [(256 << 20) + 1, 1u64 << 43] {
        fs::File::create(checkpoint.join(MODEL).join("config.json")).unwrap().set_len(bytes).unwrap();
        let mut manifest = honest.clone();
        manifest["files"][0]["bytes"] = json!(bytes);
        forge(&checkpoint, &manifest);
        let message = open(&checkpoint).err().unwrap().to_string();
        assert!(message.contains("trainer_state.json: file \"config.json\" of ") && message.contains("at most 268435456"), "{message}");
    }
    let many = (0..17).map(|n| json!({"name": n.to_string(), "bytes": 256 << 20, "crc32c": 0}));
    let manifest = Value::Object(honest.as_object().unwrap().clone().into_iter().chain([("files".into(), many.collect())]).collect());
    forge(&checkpoint, &manifest);
    assert!(verify(&checkpoint).unwrap_err().to_string().contains("file \"16\""), "together they are too much");
}

#[test]
fn messages_stay_in_one_line_whatever_names_a_manifest_holds() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = save_step(dir.path(), 1, &small(1), None).unwrap().path;
    let mut manifest = true_manifest(&checkpoint);
    manifest["evil\n\u{1b}[31m"] = json!(1);
    forge(&checkpoint, &manifest);
    let message = verify(&checkpoint).unwrap_err().to_string();
    assert!(message.contains("evil\\n\\u{1b}[31m"), "{message}");
    let mut manifest = true_manifest(&save_step(dir.path(), 2, &small(1), None).unwrap().path);
    manifest["tensors"][1]["name"] = json!("no\nrm");
    forge(&checkpoint, &manifest);
    let message = open(&checkpoint).unwrap().expect_tensors([("empty", &[0usize, 3][..])]).unwrap_err().to_string();
    assert!(message.contains("holds no\\nrm [13]"), "{message}");
}

/// Numbers at which counters and sizes break.
const EXTREMES: [u64; 9] = [u64::MAX, 1 << 63, 1 << 53, (1 << 53) + 1, u32::MAX as u64, 1 << 43, 2000, 1, 0];

pub(crate) fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        prop::sample::select(&EXTREMES).prop_map(Value::from),
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".{0,8}".prop_map(Value::from),
    ];
    leaf.prop_recursive(3, 16, 4, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((".{0,6}", inner), 0..4).prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

/// Every place in `json`, as pointers.
pub(crate) fn places(json: &Value) -> Vec<String> {
    let below = |key: &str, value: &Value| places(value).into_iter().map(move |place| format!("/{key}{place}")).collect::<Vec<_>>();
    let deeper: Vec<String> = match json {
        Value::Object(map) => map.iter().flat_map(|(key, value)| below(key, value)).collect(),
        Value::Array(list) => list.iter().enumerate().flat_map(|(idx, value)| below(&idx.to_string(), value)).collect(),
        _ => vec![],
    };
    [String::new()].into_iter().chain(deeper).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn arbitrary_manifests_never_panic(place: prop::sample::Index, value in any_json()) {
        let dir = tempfile::tempdir().unwrap();
        let checkpoint = save_step(dir.path(), 1, &small(1), None).unwrap().path;
        let mut manifest = true_manifest(&checkpoint);
        let places = places(&manifest);
        *manifest.pointer_mut(&places[place.index(places.len())]).unwrap() = value;
        forge(&checkpoint, &manifest);
        let answers = [verify(&checkpoint).err(), digest::digest_checkpoint(&checkpoint).err(), newest_good(dir.path()).err()];
        prop_assert!(answers.into_iter().flatten().all(|e| !e.to_string().contains('\n')));
    }

    #[test]
    fn arbitrary_bytes_are_no_manifest(bytes in prop::collection::vec(any::<u8>(), 0..100)) {
        prop_assert!(Manifest::decode(Path::new("x"), &bytes).is_err());
    }
}

#[test]
fn a_state_that_no_training_goes_on_from_is_refused_with_tensor_and_element() {
    let dir = tempfile::tempdir().unwrap();
    let cases = [
        (0, f32::NAN, "parameters of norm is NaN at element 5"),
        (1, f32::NEG_INFINITY, "m of norm is -inf at element 5"),
        (2, f32::INFINITY, "v of norm is inf at element 5"),
        (2, -1e-30, "v of norm is -1e-30 at element 5"),
    ];
    for (step, (part, value, text)) in (1..).zip(cases) {
        let mut parts = [0, 1, 2].map(|_| vec![0.25f32; 13]);
        let read = |parts: &[Vec<f32>; 3]| {
            let tensor = ("norm".to_string(), vec![13], parts.clone());
            let saved = save_step(dir.path(), step, &[tensor], None).unwrap();
            let mut loaded = open(&saved.path).unwrap();
            // In two pieces, so that the element's place is counted from the tensor's first.
            ADAMW.into_iter().try_for_each(|part| {
                loaded.read_state("norm", part, 0, &mut [0.0; 3]).and_then(|()| loaded.read_state("norm", part, 3, &mut [0.0; 10]))
            })
        };
        read(&parts).unwrap();
        parts[part][5] = value;
        let message = read(&parts).unwrap_err().to_string();
        assert!(message.contains(&format!("checkpoint-{step}: {text}")), "{message}");
    }
}
