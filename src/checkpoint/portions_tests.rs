use super::*;
use crate::checkpoint::format::TensorEntry;
use crate::checkpoint::tests::trainer;
use crate::optim::moments::Moments;
use serde_json::json;

/// A manifest of tensors of these sizes.
fn manifest(moments: Moments, sizes: &[usize]) -> Manifest {
    let run = json!({"moments": moments}).as_object().unwrap().clone();
    let mut manifest = Manifest::new(trainer(1), run);
    let mut offset = 0;
    for (nth, &elems) in sizes.iter().enumerate() {
        manifest.tensors.push(TensorEntry { name: nth.to_string(), shape: vec![elems], offset, elems: elems as u64 });
        offset += manifest.arrays().bytes(elems) as u64;
    }
    manifest
}

/// All portions, after checks that they have all elements in order.
fn portions_of(manifest: &Manifest, elems_max: usize, grain: usize) -> Vec<Portion> {
    let list = manifest.arrays();
    let arrays: Vec<_> = (0..manifest.tensors.len()).flat_map(|nth| list.parts().map(move |part| (nth, part))).collect();
    let found = portions(manifest, arrays.iter().copied(), (elems_max, grain));
    let mut expected = arrays.into_iter().filter(|(nth, _)| manifest.tensors[*nth].elems > 0);
    let (mut now, mut end) = (None, 0);
    for Portion { pieces, elems, .. } in &found {
        assert_eq!(*elems, pieces.iter().map(|piece| piece.elems.len()).sum::<usize>());
        assert!(*elems <= elems_max.max(grain.max(list.unit_elems())));
        for StatePiece { tensor, part, elems } in pieces {
            if end == now.map_or(0, |(nth, _): (usize, StatePart)| manifest.tensors[nth].elems as usize) {
                (now, end) = (expected.next(), 0);
            }
            assert_eq!((now, elems.start), (Some((*tensor, *part)), end));
            end = elems.end;
            assert!(end == manifest.tensors[*tensor].elems as usize || end % grain == 0, "{elems:?}");
        }
    }
    assert_eq!(expected.next(), None);
    found
}

/// Chunks in which the bytes of a portion lie.
fn chunks(manifest: &Manifest, portion: &Portion) -> Range<usize> {
    let list = manifest.arrays();
    let place = |piece: &StatePiece, elem: usize| {
        let tensor = &manifest.tensors[piece.tensor];
        tensor.offset as usize + list.offset(piece.part, tensor.elems as usize) + list[piece.part].bytes(elem)
    };
    let (first, last) = (&portion.pieces[0], portion.pieces.last().unwrap());
    place(first, first.elems.start) / CHUNK_BYTES..place(last, last.elems.end).div_ceil(CHUNK_BYTES)
}

#[test]
fn each_chunk_is_in_one_portion() {
    for moments in [Moments::Float32, Moments::Bfloat16] {
        let manifest = manifest(moments, &[97 * 1001, 0, 13, 3 << 20, 1, 800_000]);
        let portions = portions_of(&manifest, 1 << 19, 1);
        let mut next = 0;
        for portion in &portions {
            let chunks = chunks(&manifest, portion);
            assert_eq!(chunks, next..next + 1, "{moments:?}");
            next = chunks.end;
        }
    }
}

#[test]
fn portions_have_all_elements_in_order_whatever_their_size() {
    for moments in [Moments::Float32, Moments::Bfloat16, Moments::Int8] {
        let manifest = manifest(moments, &[97 * 1001, 0, 13, 300_000]);
        for (elems_max, grain) in [(1000, 1), (1000, 128), (1, 1), (1 << 19, 128), (usize::MAX / 2, 1)] {
            portions_of(&manifest, elems_max, grain);
        }
    }
}
