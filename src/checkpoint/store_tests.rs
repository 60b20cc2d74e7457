//! Saves on file systems that cannot rename directories, in directories that somebody changes meanwhile.

use super::tests::{model_files, names, newest_step, read_back, save_step, small, sources, tidy, trainer};
use super::{SaveRate, Writer, verify};
use crate::disk::{Dir, faults};
use serde_json::Map;
use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};

#[test]
fn checkpoints_in_the_lower_layer_of_an_overlay_are_rotated_and_replaced() {
    let dir = tempfile::tempdir().unwrap();
    for step in [1, 2, 3] {
        save_step(dir.path(), step, &small(step), None).unwrap();
    }
    faults::arm_overlay([1, 2, 3].map(|step| dir.path().join(format!("checkpoint-{step}"))).into());
    let replaced = save_step(dir.path(), 3, &small(9), None);
    let rotated = save_step(dir.path(), 4, &small(4), Some(2));
    faults::disarm();
    assert_eq!((replaced.unwrap().warnings, rotated.unwrap().warnings), (vec![], vec![]));
    assert_eq!(names(dir.path()), ["checkpoint-3", "checkpoint-4"]);
    assert!(read_back(&dir.path().join("checkpoint-3"), &small(9)).unwrap());
}

/// A run died while it removed a checkpoint copied aside: the rest has the name, and the copy is whole.
#[test]
fn the_rest_of_a_removal_gives_way_to_the_whole_copy() {
    let dir = tempfile::tempdir().unwrap();
    save_step(dir.path(), 4, &small(4), None).unwrap();
    fs::rename(dir.path().join("checkpoint-4"), dir.path().join(".checkpoint-4.old-1")).unwrap();
    fs::create_dir(dir.path().join("checkpoint-4")).unwrap();
    fs::write(dir.path().join("checkpoint-4/state.bin"), "the rest").unwrap();
    assert_eq!(newest_step(dir.path()), Some(4));
    assert_eq!((tidy(dir.path()), names(dir.path())), (vec![], vec!["checkpoint-4".to_string()]));
    verify(&dir.path().join("checkpoint-4")).unwrap();
}

#[test]
fn a_checkpoint_that_its_owner_protects_is_kept_silently() {
    let dir = tempfile::tempdir().unwrap();
    for step in [1, 2, 3] {
        save_step(dir.path(), step, &small(step), None).unwrap();
    }
    fs::set_permissions(dir.path().join("checkpoint-1"), fs::Permissions::from_mode(0o555)).unwrap();
    symlink("checkpoint-1", dir.path().join("checkpoint-0")).unwrap();
    let saved = save_step(dir.path(), 4, &small(4), Some(1)).unwrap();
    assert_eq!((saved.warnings, names(dir.path())), (vec![], ["checkpoint-0", "checkpoint-1", "checkpoint-4"].map(String::from).into()));
    fs::set_permissions(dir.path().join("checkpoint-1"), fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn checkpoints_with_removed_or_replaced_files_are_not_published() {
    for (damage, is_replaced) in
        ["state.bin", "trainer_state.json", "model/config.json"].into_iter().flat_map(|file| [(file, false), (file, true)])
    {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = Writer::create(&Dir::open(dir.path()).unwrap(), trainer(1), Map::new(), SaveRate::default()).unwrap();
        sources(&small(1)).for_each(|tensor| writer.tensor(tensor).unwrap());
        writer.complete(&model_files()).unwrap();
        let path = writer.dir().path().join(damage);
        let bytes = fs::read(&path).unwrap();
        // Held open, so that no other file gets its number.
        let _held = fs::File::open(&path).unwrap();
        fs::remove_file(&path).unwrap();
        if is_replaced {
            fs::write(path, bytes).unwrap();
        }
        let refused = writer.publish(None, Default::default()).unwrap_err().to_string();
        assert!(refused.contains(&format!("{damage} was removed or replaced while the checkpoint was written")), "{refused}");
        assert_eq!(names(dir.path()), [""; 0]);
    }
}
