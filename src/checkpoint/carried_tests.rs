use super::*;
use crate::checkpoint::export_tensors;
use crate::checkpoint::tests::{save_step, tensors};
use crate::disk::faults::{self, Mode};
use crate::model::shape::ModelShape;
use crate::model::tensors::TensorTable;
use proptest::prelude::*;
use std::fs;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn weights(name: &str) -> ModelWeights {
    let dir = golden(name);
    ModelWeights::open(&dir, &ModelShape::read(&dir.join("config.json")).unwrap()).unwrap()
}

fn carrier(name: &str) -> Carrier {
    Carrier::of(weights(name)).unwrap()
}

fn record_names(dir: &Path) -> Vec<String> {
    let names = fs::read_dir(dir.join(RECORDS.pattern)).into_iter().flatten();
    let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| name.contains("carried"));
    names.sort();
    names
}

/// Keeps the tensors of the golden model `name` in `dir`; the path of their file, and the record.
fn kept(dir: &Path, name: &str) -> (PathBuf, Map<String, Value>) {
    let run = carrier(name).kept_in(&Dir::open(dir).unwrap(), Map::new()).unwrap();
    let file = CarriedFile::of(&run, dir).unwrap().unwrap();
    (dir.join(RECORDS.pattern).join(file.name()), run)
}

/// A checkpoint in `dir` whose run has this record.
fn checkpoint(dir: &Path, run: &Map<String, Value>) -> Loaded {
    let path = save_step(dir, 4, &tensors(1), None).unwrap().path;
    let mut manifest = crate::checkpoint::tests::true_manifest(&path);
    manifest["run"] = run.clone().into();
    crate::checkpoint::tests::forge(&path, &manifest);
    super::super::open(&path).unwrap()
}

#[test]
fn the_file_has_every_carried_tensor_byte_for_byte_and_lists_the_source() {
    for name in ["gemma3_vision", "mistral3_vision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe_4_57"] {
        let tmp = tempfile::tempdir().unwrap();
        let (path, _) = kept(tmp.path(), name);
        assert_eq!(path.metadata().unwrap().len(), weights(name).carried_bytes().unwrap());
        let carried = CarriedTensors::open(&path).unwrap();
        let bytes = fs::read(golden(name).join("model.safetensors")).unwrap();
        let source = safetensors::SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(carried.source().len(), source.len(), "{name}");
        let mut found = 0;
        for tensor in carried.source() {
            let want = source.tensor(&tensor.name).unwrap();
            assert_eq!((tensor.dtype, &tensor.shape[..]), (want.dtype(), want.shape()));
            if tensor.trained.is_none() {
                let mut have = Vec::new();
                let keep = |piece: &[u8]| {
                    have.extend_from_slice(piece);
                    Ok(())
                };
                carried.read(&tensor.name, keep).unwrap();
                assert!(have == want.data(), "{name} {}", tensor.name);
                found += 1;
            }
        }
        assert!(found > 8 && found < source.len() - 10, "{name}: {found}");
        let text_alone = ["q_proj", "embed_tokens"].map(|part| carried.source().iter().find(|tensor| tensor.name.contains(part)).unwrap());
        assert!(text_alone[1].trained.is_some() && carried.read(&text_alone[1].name, |_| Ok(())).is_err());
    }
}

#[test]
fn a_file_that_is_there_is_not_written_again_and_a_foreign_one_keeps_its_bytes() {
    let tmp = tempfile::tempdir().unwrap();
    let (dir, mut carrier) = (Dir::open(tmp.path()).unwrap(), carrier("qwen3_vl"));
    let bytes = carrier.missing_bytes(Some(&dir)).unwrap();
    let run = carrier.kept_in(&dir, Map::new()).unwrap();
    let [name] = record_names(tmp.path()).try_into().unwrap();
    let path = tmp.path().join(RECORDS.pattern).join(&name);
    assert_eq!((path.metadata().unwrap().len(), carrier.missing_bytes(Some(&dir)).unwrap()), (bytes, 0));
    faults::arm(None);
    assert_eq!(carrier.kept_in(&dir, Map::new()).unwrap(), run);
    assert_eq!(faults::disarm(), []);
    fs::write(&path, "mine").unwrap();
    assert_eq!(carrier.kept_in(&dir, Map::new()).unwrap(), run);
    assert_eq!(record_names(tmp.path()), [name.clone(), format!("{name}.foreign-1")]);
    assert_eq!(fs::read_to_string(format!("{}.foreign-1", path.display())).unwrap(), "mine");
    // Another model's tensors lie beside them.
    kept(tmp.path(), "qwen2_5_vl");
    assert_eq!(record_names(tmp.path()).len(), 3);
}

#[test]
fn remains_of_a_killed_run_go_and_foreign_files_beside_them_stay() {
    let tmp = tempfile::tempdir().unwrap();
    let (path, _) = kept(tmp.path(), "qwen3_vl");
    let bytes = fs::read(&path).unwrap();
    let folder = path.parent().unwrap();
    for (name, content) in [("1", &bytes[..20]), ("2", &bytes[..]), ("3", b"mine: this is no such file"), ("4", b"")] {
        fs::write(folder.join(format!(".carried.safetensors.tmp-{name}")), content).unwrap();
    }
    remove_remains(&Dir::open(folder).unwrap()).unwrap();
    let own = path.file_name().unwrap().to_str().unwrap();
    assert_eq!(record_names(tmp.path()), [".carried.safetensors.tmp-3", own]);
}

#[test]
fn a_disk_that_fails_leaves_the_whole_file_or_none() {
    for at in 0.. {
        let tmp = tempfile::tempdir().unwrap();
        let (dir, mut carrier) = (Dir::open(tmp.path()).unwrap(), carrier("qwen3_vl"));
        drop(Records::open(&dir).unwrap());
        faults::arm(Some((at, Mode::Error)));
        let result = carrier.kept_in(&dir, Map::new());
        let reached = faults::disarm().len() > at;
        let names = record_names(tmp.path());
        if !reached {
            result.unwrap();
            assert!(at > 4 && names.len() == 1, "{at} {names:?}");
            break;
        }
        assert!(result.unwrap_err().to_string().contains("No space left"));
        assert!(
            names.is_empty()
                || names == record_names(tmp.path()) && CarriedTensors::open(&tmp.path().join(RECORDS.pattern).join(&names[0])).is_ok()
        );
        carrier.kept_in(&dir, Map::new()).unwrap();
        assert_eq!(record_names(tmp.path()).len(), 1);
    }
}

#[test]
fn a_checkpoint_finds_its_file_also_where_a_later_run_moved_it() {
    let tmp = tempfile::tempdir().unwrap();
    let (path, run) = kept(tmp.path(), "qwen3_vl");
    let loaded = checkpoint(tmp.path(), &run);
    assert_eq!(find(&loaded).unwrap().unwrap().0.canonicalize().unwrap(), path.canonicalize().unwrap());
    fs::create_dir(tmp.path().join("previous-1")).unwrap();
    let moved = tmp.path().join("previous-1/checkpoint-4");
    fs::rename(loaded.dir(), &moved).unwrap();
    let moved = super::super::open(&moved).unwrap();
    assert!(find(&moved).unwrap().is_some());
    assert!(find(&checkpoint(tmp.path(), &Map::new())).unwrap().is_none());

    let intact = fs::read(&path).unwrap();
    let mut damaged = intact.clone();
    *damaged.last_mut().unwrap() ^= 1;
    fs::write(&path, damaged).unwrap();
    let fault = |loaded: &Loaded| find(loaded).unwrap_err().to_string();
    assert!(fault(&moved).contains("damaged: its checksum differs from the one in the checkpoint"), "{}", fault(&moved));
    fs::remove_file(&path).unwrap();
    assert!(fault(&moved).contains("carries over are missing: no carried-") && fault(&moved).contains("previous-1/checkpoint-4"));
}

#[test]
fn a_missing_or_damaged_file_comes_again_from_the_model_and_from_no_other() {
    let (tmp, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (path, run) = kept(tmp.path(), "qwen3_vl");
    let loaded = checkpoint(tmp.path(), &run);
    let whole = fs::read(&path).unwrap();
    let resumed = |model: &'static str| Carrier::resumed(&loaded, || Ok(weights(model)));
    // A run that goes on in another directory takes the file along.
    let elsewhere = Dir::open(other.path()).unwrap();
    assert_eq!(resumed("qwen2_vl").unwrap().kept_in(&elsewhere, Map::new()).unwrap(), run);
    assert_eq!(fs::read(other.path().join(RECORDS.pattern).join(path.file_name().unwrap())).unwrap(), whole);
    let dir = Dir::open(tmp.path()).unwrap();
    for content in [&whole[..100], b""] {
        fs::write(&path, content).unwrap();
        assert_eq!(resumed("qwen3_vl").unwrap().kept_in(&dir, Map::new()).unwrap(), run);
        assert_eq!(fs::read(&path).unwrap(), whole);
    }
    fs::remove_file(&path).unwrap();
    let refused = resumed("qwen2_vl").unwrap().kept_in(&dir, Map::new()).unwrap_err().to_string();
    assert!(refused.contains("qwen2_vl: its carried tensors are not those of the checkpoint"), "{refused}");
    assert_eq!(record_names(tmp.path()), [""; 0]);
    let gone = Carrier::resumed(&loaded, || Err(Error::format("model", "gone"))).err().unwrap().to_string();
    assert!(gone.contains("carries over are missing"), "{gone}");
}

#[test]
fn records_without_sense_are_refused() {
    let tmp = tempfile::tempdir().unwrap();
    for record in [Value::Null, serde_json::json!({"bytes": 1}), serde_json::json!({"bytes": 1, "sha256": "../../etc/passwd"})] {
        let run = Map::from_iter([(KEY.to_string(), record)]);
        let message = find(&checkpoint(tmp.path(), &run)).unwrap_err().to_string();
        assert!(message.contains("its record of carried tensors: "), "{message}");
    }
}

/// Writes all tensors of the source that the file at `path` describes, with trained tensors of 0.
fn mirrored(path: &Path, out: &Path) -> Result<()> {
    let (carried, table) = (CarriedTensors::open(path)?, TensorTable::new(weights("qwen3_vl_moe_4_57").shape()));
    let items = export_tensors::of_source(&carried, &table, None)?;
    export_tensors::write(&Dir::open(out)?, items, u64::MAX, |_, values| {
        values.fill(0.0);
        Ok(())
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// The header and the list of the source have the same digits and names, so that a changed byte often leaves valid JSON.
    #[test]
    fn a_damaged_file_is_an_error_or_a_whole_export(changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), any::<bool>()), 0..4)) {
        let tmp = tempfile::tempdir().unwrap();
        let (path, _) = kept(tmp.path(), "qwen3_vl_moe_4_57");
        let mut bytes = fs::read(&path).unwrap();
        for (at, byte, is_digit) in &changes {
            let at = at.index(bytes.len());
            bytes[at] = if *is_digit { b'0' + byte % 10 } else { *byte };
        }
        fs::write(&path, &bytes).unwrap();
        let out = tmp.path().join("out");
        fs::create_dir(&out).unwrap();
        let exported = mirrored(&path, &out);
        prop_assert!(exported.is_ok() || !changes.is_empty());
        if exported.is_ok() {
            let file = fs::read(out.join("model.safetensors")).unwrap();
            prop_assert!(safetensors::SafeTensors::deserialize(&file).is_ok());
        }
    }
}
