//! Replays the corpora of the fuzzers through their entry points, in seconds and on a stable compiler.

#[path = "../fuzz/doors.rs"]
mod doors;

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

/// Time limit of an input, far above the usual time even where other tests keep all CPUs busy.
const LONGEST: Duration = Duration::from_secs(20);

#[test]
fn no_input_of_the_corpora_panics_or_takes_long() {
    let corpora = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus");
    for (door, _) in doors::DOORS {
        let files: Vec<_> = fs::read_dir(corpora.join(door)).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(files.len() > 10, "{door}: {} files", files.len());
        for path in files {
            let (input, begin) = (fs::read(&path).unwrap(), Instant::now());
            // The panic message names only the source location, not the input.
            let held = std::panic::catch_unwind(|| doors::call(door, &input)).is_ok();
            assert!(held && begin.elapsed() < LONGEST, "{} after {:?}: {held}", path.display(), begin.elapsed());
        }
    }
}

/// Every entry point must have a corpus and a fuzzer, and every corpus an entry point.
#[test]
fn every_door_has_a_corpus_and_a_fuzzer() {
    let fuzz = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz");
    let names = |dir: &str| {
        let entries = fs::read_dir(fuzz.join(dir)).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().path().file_stem().unwrap().to_str().unwrap().to_string()).collect();
        names.sort();
        names
    };
    let mut doors: Vec<_> = doors::DOORS.iter().map(|(door, _)| door.to_string()).collect();
    doors.sort();
    assert_eq!((names("corpus"), names("fuzz_targets")), (doors.clone(), doors));
}

/// Valid files must be accepted. Fuzzing an entry point that rejects everything would be useless.
#[test]
fn valid_files_get_through_the_doors() {
    let read = |path: &str| fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(path)).unwrap();
    let shape = superoffload::internals::model::ModelShape::parse(&read("config_json/llama.json"), Path::new("config.json"));
    assert!(shape.is_ok(), "{shape:?}");
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("trainer_state.json"), doors::sealed(read("manifest/right.json").as_bytes())).unwrap();
    fs::write(dir.path().join("state.bin"), [0; 192]).unwrap();
    fs::create_dir(dir.path().join("model")).unwrap();
    fs::write(dir.path().join("model/config.json"), "{}").unwrap();
    let manifest = superoffload::internals::checkpoint::verify(dir.path());
    assert!(manifest.is_ok(), "{manifest:?}");
    for settings in ["settings_toml/full.toml", "settings_yaml/full.yaml", "settings_json/full.json"] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(settings);
        let loaded = superoffload::internals::config::file::load(&path);
        assert!(loaded.is_ok(), "{loaded:?}");
    }
    let deepspeed = Some(Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/deepspeed/full.json"));
    let understood = superoffload::TrainOptions { deepspeed, ..Default::default() }.over_config_file();
    assert!(understood.is_ok(), "{understood:?}");
}

/// Packed experts are accepted, and NaN scales are rejected with their position.
#[test]
fn packed_experts_are_read_and_scales_that_are_no_numbers_refused() {
    let load = |name: &str| {
        let (corpus, dir) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/mxfp4"), tempfile::tempdir().unwrap());
        fs::copy(corpus.join(name), dir.path().join("model.safetensors")).unwrap();
        doors::load_weights(doors::PACKED_CONFIG, dir.path())
    };
    assert!(load("file-right").unwrap().iter().any(|x| x.abs() > 1.0) && load("file-plain").is_ok() && load("file-scale-0").is_ok());
    for (name, words) in [("file-scale-255", "proj_blocks holds NaN at element 0"), ("file-both-forms", "that the model does not have")] {
        let refused = load(name).unwrap_err().to_string();
        assert!(refused.contains(words), "{name}: {refused}");
    }
}

/// Carried tensors are read, and a list that the file contradicts is refused.
#[test]
fn carried_tensors_are_read_and_lists_that_do_not_fit_refused() {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/carried");
    let read = |name: &str| doors::read_carried(&corpus.join(name));
    assert_eq!((read("file-right").unwrap(), read("file-one-not-listed").unwrap()), (20, 12));
    for (name, words) in [
        ("file-listed-twice", "lists \"visual.a\" twice"),
        ("file-one-missing", "does not hold \"visual.c\" as it lists it"),
        ("file-cut-short", "bytes of tensors, its header describes"),
    ] {
        let refused = read(name).unwrap_err().to_string();
        assert!(refused.contains(words), "{name}: {refused}");
    }
}
