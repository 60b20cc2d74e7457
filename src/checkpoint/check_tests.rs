//! When the state of a checkpoint is checked, and by how many threads it is read.

use super::format::STATE;
use super::tests::{TensorSource, model_files, save, save_step, sources, tensors, trainer};
use super::*;
use crate::optim::state_array::StatePart;
use std::fs;

#[test]
fn a_check_at_the_read_leaves_the_state_to_its_reader() {
    let dir = tempfile::tempdir().unwrap();
    let path = save_step(dir.path(), 1, &tensors(1), None).unwrap().path;
    let flip = |name: &str| {
        let mut bytes = fs::read(path.join(name)).unwrap();
        bytes[1] ^= 1;
        fs::write(path.join(name), bytes).unwrap();
    };
    flip(STATE);
    let mut opened = Check::WhenRead.open(&path).expect("no state is read");
    let found = [Check::Now.open(&path).err(), opened.read_elems("wte", StatePart::PARAMS, 0, &mut [0.0]).err()];
    assert!(found.iter().all(|error| error.as_ref().is_some_and(is_state_damage)), "{found:?}");
    flip("model/config.json");
    let found = [Check::Now, Check::WhenRead].map(|check| check.open(&path).err().expect("a file of the model is damaged"));
    assert!(found.iter().all(|error| error.to_string().contains("config.json") && !is_state_damage(error)), "{found:?}");
    fs::write(path.join(STATE), "").unwrap();
    assert!(Check::WhenRead.open(&path).err().is_some_and(|error| is_state_damage(&error)), "a file of another size");
}

#[test]
fn large_tensors_are_read_by_several_threads() {
    let dir = tempfile::tempdir().unwrap();
    let params: Vec<f32> = (0..1_200_000).map(|i| i as f32).collect();
    let source = TensorSource { name: "large", shape: &[1_200_000], params: &params, m: &params, v: &params };
    let path = save(dir.path(), &trainer(1), &model_files(), [sources(&tensors(3)).next().unwrap(), source], None).unwrap().path;
    let mut read = vec![0.0; params.len()];
    open(&path).unwrap().read_params("large", &mut read).unwrap();
    assert!(read == params);
}
