//! State between the engine, checkpoints and digests, a piece of a tensor at a time: no tensor is ever held whole beside it.

use super::digest::StateDigest;
use super::reader::Loaded;
use crate::device::Kernels;
use crate::engine::executor::Engine;
use crate::error::{Error, Result};
use crate::optim::PIECE_ELEMS;
use crate::optim::int8::whole_groups;
use crate::optim::state_array::{StateArrays, StatePart};
use std::ops::Range;
use std::sync::mpsc;
use std::{mem, thread};

/// Elements that a save reads at once, so that they and the pieces of its writers fit the memory planned for saves.
pub(crate) const SAVE_ELEMS: usize = PIECE_ELEMS / 4;

/// The digest of the state, flushed: optimizer step, then all arrays of every tensor. A second thread adds up a piece while the
/// next is read.
///
/// # Errors
/// The device's; no thread to be had.
pub(crate) fn digest<D: Kernels>(engine: &mut Engine<D>) -> Result<String> {
    engine.flush()?;
    let mut digest = StateDigest::new(engine.optimizer_step(), engine.plan().optimizer().arrays());
    // Nothing waits in between, so that at most three pieces are held.
    let (read, pieces) = mpsc::sync_channel::<(StatePart, Vec<f32>)>(0);
    let (used, spare) = mpsc::channel();
    let add_up = move || {
        for (part, elems) in pieces {
            digest.update(part, &elems);
            // Nobody reads any more after the last piece.
            let _ = used.send(elems);
        }
        digest.finish()
    };
    let adder =
        thread::Builder::new().name("digest".into()).spawn(add_up).map_err(|e| Error::resource("start a thread that adds up", e))?;
    let done = for_each_piece(engine, PIECE_ELEMS, |part, elems| {
        let piece = mem::replace(elems, spare.try_recv().unwrap_or_default());
        read.send((part, piece)).expect("it takes pieces until there are no more");
        Ok(())
    });
    drop(read);
    let digest = adder.join().expect("adding up does not fail");
    done.map(|()| digest)
}

/// Reads all state in canonical order, at most `piece_elems` elements at a time. `each` may keep a piece and leave another vector in its
/// place.
///
/// # Errors
/// The device's; those of `each`.
pub(crate) fn for_each_piece<D: Kernels>(
    engine: &mut Engine<D>,
    piece_elems: usize,
    mut each: impl FnMut(StatePart, &mut Vec<f32>) -> Result<()>,
) -> Result<()> {
    let (specs, arrays, mut buffer) = (engine.table().specs().to_vec(), engine.plan().optimizer().arrays(), Vec::new());
    for spec in &specs {
        for (part, piece) in pieces(arrays, spec.elems(), piece_elems) {
            buffer.resize(piece.len(), 0.0);
            engine.read_state(part, spec.offset_elems + piece.start, &mut buffer)?;
            each(part, &mut buffer)?;
        }
    }
    Ok(())
}

/// Puts the state of a checkpoint into the engine, which has its counters. Several threads read, and at most `piece_elems` elements are on
/// their way.
///
/// # Errors
/// A tensor that the model does not have, that cannot be read, or with values that training cannot continue from; errors of the device.
pub(crate) fn restore<D: Kernels>(engine: &mut Engine<D>, loaded: &Loaded, piece_elems: usize) -> Result<()> {
    let specs = engine.table().specs().to_vec();
    loaded.expect_tensors(specs.iter().map(|spec| (spec.name.as_str(), spec.shape.as_slice())))?;
    let grain = engine.plan().optimizer().arrays().unit_elems();
    loaded.for_each_piece((piece_elems, grain), Loaded::read_state, |piece, elems| {
        engine.write_state(piece.part, specs[piece.tensor].offset_elems + piece.elems.start, elems)
    })
}

/// The pieces of a tensor of `elems` elements: all of its parameters, then all of each further array. A piece has whole groups of 8-bit
/// moments.
fn pieces(arrays: StateArrays, elems: usize, piece_elems: usize) -> impl Iterator<Item = (StatePart, Range<usize>)> {
    let piece_elems = whole_groups(piece_elems);
    let of = move |part| (0..elems).step_by(piece_elems).map(move |start| (part, start..elems.min(start + piece_elems)));
    arrays.parts().flat_map(of)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::digest::digest_checkpoint;
    use crate::checkpoint::{self, SaveRate, SavedLossScale, Scheduler, TrainerState, Writer};
    use crate::config::settings::Settings;
    use crate::device::cpu::CpuDevice;
    use crate::disk::Dir;
    use crate::hardware::topology::Topology;
    use crate::launch::engine::cpu_engine;
    use crate::model::shape::ModelShape;
    use crate::optim::moments::Moments;
    use crate::planner::machine::Machine;
    use crate::planner::plan::Plan;
    use crate::request::choices::ResidentBuckets;
    use serde_json::Value;
    use std::path::{Path, PathBuf};

    /// The built-in model with one layer and its last buckets on the device, where the technique is there, so that tensors lie on both
    /// sides.
    fn engine(moments: Moments) -> Engine<CpuDevice> {
        let shape = ModelShape::demo().with_layers(1);
        let resident = if cfg!(feature = "repartition") { 2 } else { 0 };
        let settings =
            Settings { moments, resident_buckets: ResidentBuckets::Count(resident), seq_length: 16, threads: Some(1), ..Settings::demo() };
        let plan = Plan::new(&settings.request(&shape), &Machine::cpu(1), false).unwrap();
        assert!(plan.placement.layout.offloaded() > 0 && plan.placement.layout.count() - plan.placement.layout.offloaded() == resident);
        cpu_engine(&plan, &shape, &Topology::this_machine()).unwrap()
    }

    fn digest_by(engine: &mut Engine<CpuDevice>, piece_elems: usize) -> String {
        let mut digest = StateDigest::new(3, engine.plan().optimizer().arrays());
        let update = |part, elems: &mut Vec<f32>| {
            digest.update(part, elems);
            Ok(())
        };
        for_each_piece(engine, piece_elems, update).unwrap();
        digest.finish()
    }

    fn save(engine: &mut Engine<CpuDevice>, dir: &Path, piece_elems: usize) -> PathBuf {
        let trainer = TrainerState {
            step: 3,
            optimizer_step: 3,
            loss_scale: SavedLossScale { scale: 1.0, good_steps: 0 },
            scheduler: Scheduler { name: "constant".into(), base_lr: 1e-3, warmup_steps: 0, max_steps: 9 },
            seed: 0,
            data_position: Value::Null,
            speculation: Value::Null,
            clip: Default::default(),
            settings: Value::Null,
        };
        let run = serde_json::json!({"moments": engine.plan().recipe.numerics.moments}).as_object().unwrap().clone();
        let mut writer = Writer::create(&Dir::open(dir).unwrap(), trainer, run, SaveRate::default()).unwrap();
        engine.table().specs().iter().for_each(|spec| writer.begin(&spec.name, &spec.shape));
        writer.reserve().unwrap();
        for_each_piece(engine, piece_elems, |part, elems| writer.elems(part, elems)).unwrap();
        writer.finish(&[], None, Default::default()).unwrap().path
    }

    #[test]
    fn state_is_the_same_in_pieces_of_any_size() {
        expect_same_in_pieces(Moments::Float32);
        expect_same_in_pieces(Moments::Bfloat16);
        expect_same_in_pieces(Moments::Int8);
    }

    fn expect_same_in_pieces(moments: Moments) {
        let (mut first, dir) = (engine(moments), tempfile::tempdir().unwrap());
        for spec in first.table().specs().to_vec() {
            for (scale, part) in (1..).zip(moments.arrays().parts()) {
                // Every element of all parts is another number, none of them below zero.
                let elems: Vec<f32> = spec.range().map(|at| (at * 3 + scale) as f32).collect();
                first.write_state(part, spec.offset_elems, &elems).unwrap();
            }
        }
        let whole = digest_by(&mut first, usize::MAX);
        for piece_elems in [1000, 65_537] {
            assert_eq!(digest_by(&mut first, piece_elems), whole, "read in pieces of {piece_elems}");
            let path = save(&mut first, dir.path(), piece_elems);
            assert_eq!(digest_checkpoint(&path).unwrap(), whole, "saved in pieces of {piece_elems}");
            let mut second = engine(moments);
            restore(&mut second, &checkpoint::open(&path).unwrap(), piece_elems).unwrap();
            assert_eq!(digest_by(&mut second, usize::MAX), whole, "restored in pieces of {piece_elems}");
        }
    }
}
