//! Tests of the parts in a manifest and of reading the files that hold them.

use super::*;
use crate::checkpoint::SaveRate;
use crate::checkpoint::state_writer::StateWriter;
use crate::disk::Dir;
use crate::optim::moments::Moments;
use crate::optim::norm::BLOCK;
use crate::ranks::RANKS_MAX;

const ARRAYS: StateArrays = Moments::Float32.arrays();

fn parts(blocks: usize, bucket: usize, files: usize) -> StateParts {
    let flat = blocks * BLOCK;
    let mut parts = StateParts {
        flat_elems: flat as u64,
        bucket_elems: (bucket * BLOCK) as u64,
        starts: vec![0, 7],
        state_crc32c: vec![Vec::new(); files],
    };
    for rank in 0..files {
        let chunks = parts.file_bytes(rank, ARRAYS).div_ceil(1 << 20);
        parts.state_crc32c[rank] = vec![0; chunks as usize];
    }
    parts
}

#[test]
fn claims_that_make_no_sense_are_refused() {
    let (good, tensors) = (parts(10, 4, 3), [7, 100]);
    good.validate(&tensors, ARRAYS).unwrap();
    let refused = |change: &dyn Fn(&mut StateParts)| {
        let mut parts = good.clone();
        change(&mut parts);
        parts.validate(&tensors, ARRAYS).unwrap_err()
    };
    for flat in [0, 1, u64::MAX, u64::MAX / BLOCK as u64 * BLOCK as u64] {
        assert!(refused(&|parts| parts.flat_elems = flat).starts_with("parts of "), "{flat}");
    }
    for bucket in [0, 1, 11 * BLOCK as u64] {
        assert!(refused(&|parts| parts.bucket_elems = bucket).starts_with("parts of "), "{bucket}");
    }
    for files in [0, 1, RANKS_MAX + 1] {
        assert!(refused(&|parts| parts.state_crc32c.resize(files, vec![0])).contains("files of state"), "{files}");
    }
    for starts in [vec![], vec![0], vec![0, u64::MAX], vec![0, 10 * BLOCK as u64 - 99]] {
        assert!(refused(&|parts| parts.starts.clone_from(&starts)).starts_with("tensors reach beyond"), "{starts:?}");
    }
    assert_eq!(refused(&|parts| parts.state_crc32c[1].push(0)), "state-1.bin has 2 checksums, not 1");
}

/// Files of every number of ranks return the written elements, wherever a reader begins.
#[test]
fn elements_are_found_by_their_place_in_the_flat_order() {
    for (blocks, bucket, files) in [(10, 4, 3), (7, 1, 2), (9, 9, 8), (5, 2, 4)] {
        let (dir, mut parts) = (tempfile::tempdir().unwrap(), parts(blocks, bucket, files));
        let value = |part: StatePart, flat: usize| (3 * flat + part.index()) as f32;
        for rank in 0..files {
            let (own, mut file) =
                (parts.slices(rank), StateWriter::create(&Dir::open(dir.path()).unwrap(), &file_name(rank), SaveRate::default()).unwrap());
            for part in ARRAYS.parts() {
                for (flat, _) in own.pieces(0..own.elems()) {
                    let values: Vec<f32> = flat.map(|at| value(part, at)).collect();
                    file.append(bytemuck::cast_slice(&values)).unwrap();
                }
            }
            let written = file.finish().unwrap();
            assert_eq!(written.id.bytes, parts.file_bytes(rank, ARRAYS));
            parts.state_crc32c[rank] = written.crc32c;
        }
        let mut open = PartFiles::open(dir.path(), &parts, ARRAYS).unwrap();
        open.verify().unwrap();
        for (start, end) in [(0, blocks * BLOCK), (1, 2), (BLOCK - 1, BLOCK + 1), (2 * BLOCK + 5, blocks * BLOCK - 3)] {
            for part in ARRAYS.parts() {
                let mut read = vec![0.0; end - start];
                open.read((part, ARRAYS), start, &mut read).unwrap();
                assert!((start..end).zip(read).all(|(at, read)| read == value(part, at)), "{blocks} {bucket} {files}: {start}..{end}");
            }
        }
    }
}
