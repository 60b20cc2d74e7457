//! Tests of cuDNN's plans without a GPU: cuDNN compiles them for a GPU that is only described.

use super::*;
use sys::{Attribute, Descriptor, DescriptorKind};

const H200: &str = include_str!("h200.json");

const SHAPE: AttentionShape =
    AttentionShape { batch: 2, seq_length: 512, heads: 8, kv_heads: 2, head_dim: 128, scale: 0.088_388_346, window: None, softcap: None };

#[test]
fn shapes_that_cudnn_does_not_take_name_the_other_attention() {
    let odd = AttentionShape { head_dim: 100, ..SHAPE };
    let wide = AttentionShape { head_dim: 264, ..SHAPE };
    let hopper = AttentionLimits::of(9);
    for (shape, dtype) in [(SHAPE, Dtype::Float32), (odd, Dtype::Bfloat16), (wide, Dtype::Float16)] {
        let message = supported(&shape, dtype, hopper).unwrap_err().to_string();
        assert!(message.contains("--attention plain"), "{message}");
    }
    assert_eq!(supported(&SHAPE, Dtype::Float16, hopper).unwrap(), DataType::F16);
}

#[test]
fn each_generation_has_limits_of_its_own() {
    let wide = AttentionShape { head_dim: 256, ..SHAPE };
    assert!(supported(&wide, Dtype::Bfloat16, AttentionLimits::of(9)).is_ok());
    for generation in [8, 10, 12] {
        let limits = AttentionLimits::of(generation);
        assert!(supported(&SHAPE, Dtype::Bfloat16, limits).is_ok(), "{generation}");
        let message = supported(&wide, Dtype::Bfloat16, limits).unwrap_err().to_string();
        assert!(message.contains("multiples of 8 up to 128") && message.contains("--attention plain"), "{generation}: {message}");
    }
    for (generation, version, deterministic, is_taken) in
        [(8, 91_000, true, true), (9, 91_000, true, true), (10, 91_800, true, false), (12, 91_801, true, true), (12, 91_000, false, true)]
    {
        let checked = AttentionLimits::of(generation).check_version(version, deterministic);
        assert_eq!(checked.is_ok(), is_taken, "{generation} {version} {deterministic}");
        assert!(is_taken || checked.unwrap_err().to_string().contains("needs 91801"));
    }
}

#[test]
fn keys_and_values_follow_the_queries_of_a_row() {
    let qkv = DeviceSlice::at(4096, SHAPE.tokens() * SHAPE.qkv_cols(), Dtype::Bfloat16);
    assert_eq!(qkv_addresses(qkv, &SHAPE), [4096, 4096 + 8 * 128 * 2, 4096 + 10 * 128 * 2]);
}

#[test]
fn parts_of_the_backward_pass_cover_it_once() {
    let part = AttentionShape { batch: 1, heads: 4, kv_heads: 1, ..SHAPE };
    let slice = |first: u64, elems: usize, dtype| DeviceSlice::at(first << 32, elems, dtype);
    let (tokens, bf16) = (SHAPE.tokens(), Dtype::Bfloat16);
    let [qkv, dqkv] = [1, 2].map(|first| slice(first, tokens * SHAPE.qkv_cols(), bf16));
    let [out, dout] = [3, 4].map(|first| slice(first, tokens * SHAPE.out_cols(), bf16));
    let lse = slice(5, tokens * SHAPE.heads, Dtype::Float32);
    let backward = AttentionBackward { dout, qkv, documents: None, out, lse, dqkv, shape: SHAPE, block: None };
    let call = AttentionCall::backward(&backward, 512).unwrap();
    let places: Vec<_> = parts_of(&SHAPE, &part).map(|place| (place.sequence, place.group)).collect();
    assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1)]);
    let last = call.addresses_of(&part, PartPlace { sequence: 1, group: 1 }, &ScoreBlock { queries: 0..512, keys: 0..512 });
    let of = |role: AttentionTensor| last[role as usize];
    // Sequence 1 begins at row 512. The second group has heads 4 to 7, and key head 1, whose columns follow those of eight query heads.
    assert_eq!(of(AttentionTensor::Q), qkv.addr() + (512 * 12 * 128 + 4 * 128) * 2);
    assert_eq!(of(AttentionTensor::Dk), dqkv.addr() + (512 * 12 * 128 + (8 + 1) * 128) * 2);
    assert_eq!(of(AttentionTensor::V), qkv.addr() + (512 * 12 * 128 + (10 + 1) * 128) * 2);
    assert_eq!(of(AttentionTensor::Dout), dout.addr() + (512 * 8 * 128 + 4 * 128) * 2);
    assert_eq!(of(AttentionTensor::Lse), lse.addr() + (8 * 512 + 4 * 512) * 4);
    let block = call.addresses_of(&part, PartPlace { sequence: 1, group: 1 }, &ScoreBlock { queries: 256..384, keys: 128..384 });
    use AttentionTensor::{Dk, Dout, Dq, Dv, K, Lse, Out, Q, V};
    for (role, rows) in [(Q, 256), (Dq, 256), (Out, 256), (Dout, 256), (Lse, 256), (K, 128), (V, 128), (Dk, 128), (Dv, 128)] {
        let row = match role {
            Lse => 4,
            Out | Dout => 8 * 128 * 2,
            _ => 12 * 128 * 2,
        };
        assert_eq!(block[role as usize] - last[role as usize], rows * row, "{role:?}");
    }
}

/// Backward plans without compiled plans.
fn in_blocks(shape: AttentionShape, part: AttentionShape, block: usize) -> BackwardPlans {
    BackwardPlans { part, ..BackwardPlans::new((shape, Dtype::Bfloat16, block), true) }
}

#[test]
fn every_size_of_a_block_is_wanted_once() {
    let limits = AttentionLimits::of(9);
    let sizes = |shape, block| {
        let sizes = in_blocks(shape, shape, block).sizes().into_iter();
        sizes.map(|BlockSize { queries, keys, is_causal }| (queries, keys, is_causal)).collect::<Vec<_>>()
    };
    assert_eq!(sizes(SHAPE, 512), [(512, 512, true)]);
    assert_eq!(sizes(SHAPE, 192), [(128, 128, true), (128, 192, false), (192, 192, false), (192, 192, true)]);
    // Independent of the length of the sequence.
    assert_eq!(sizes(AttentionShape { seq_length: 1 << 20, ..SHAPE }, 1 << 14).len(), 2);
    // With a window, all blocks except the first have the same size.
    let windowed = AttentionShape { seq_length: 2048, window: Some(128), ..SHAPE };
    assert_eq!(sizes(windowed, 256), [(256, 256, true), (256, 384, true)]);
    let wanted = in_blocks(windowed, windowed, 256).wanted(limits, true).unwrap();
    assert_eq!(wanted.len(), 2);
    let odd = AttentionShape { head_dim: 100, ..SHAPE };
    assert!(in_blocks(odd, odd, 512).wanted(limits, true).is_err());
}

/// An H200 by description only.
fn h200(cudnn: Cudnn) -> Descriptor {
    let described = |device: &Descriptor| device.set(Attribute::DeviceJson, H200.trim().as_bytes());
    Descriptor::build(cudnn, DescriptorKind::DeviceProperties, described).unwrap()
}

/// Has the requirements of the test below.
#[test]
#[ignore = "needs cuDNN, and a driver or a stand-in for one"]
fn threads_compile_side_by_side() {
    let cudnn = Cudnn::open(&Libraries::new(&[], 13)).unwrap();
    let shape = AttentionShape { batch: 1, seq_length: 32768, heads: 32, kv_heads: 8, ..SHAPE };
    let wanted = BackwardPlans::new((shape, Dtype::Bfloat16, 4096), true).wanted(AttentionLimits::of(9), true).unwrap();
    let seconds = |threads: usize| {
        let mut targets: Vec<_> = (0..threads).map(|_| Target::Described(h200(cudnn))).collect();
        let begin = std::time::Instant::now();
        make_all(&mut targets, &wanted, || Ok(()), |target, wanted| wanted.build(cudnn, target)).unwrap();
        begin.elapsed().as_secs_f64()
    };
    seconds(1);
    let (one, two) = (seconds(1), seconds(2));
    assert!(two < 0.75 * one, "one thread {one:.2} s, two {two:.2} s");
}

/// Sums after block `index` of a part of [`SHAPE`] with one sequence, the second, and one key head, the second.
fn added(plans: &BackwardPlans, index: usize) -> Vec<AddKeyGradients> {
    let [dqkv, sums] = [(SHAPE.tokens() * SHAPE.qkv_cols(), Dtype::Bfloat16), (plans.sums(), Dtype::Float32)]
        .map(|(elems, dtype)| DeviceSlice::at(1 << 32, elems, dtype));
    plans.add_gradients(&SHAPE, PartPlace { sequence: 1, group: 1 }, index, (dqkv, sums))
}

#[test]
fn queries_have_sums_over_blocks_of_keys() {
    let plans = in_blocks(SHAPE, AttentionShape { batch: 1, heads: 4, kv_heads: 1, ..SHAPE }, 192);
    // Blocks of 192, 192 and 128 queries, which see one, two and three blocks of keys.
    assert_eq!(plans.blocks.len(), 6);
    let rows = |add: &AddKeyGradients| (add.keys(), add.begun, add.done);
    let of_queries = [0, 1, 2, 3, 4, 5].map(|index| added(&plans, index).get(1).map(rows));
    assert_eq!(of_queries, [None, Some((192, 0, 0)), Some((192, 192, 192)), Some((128, 0, 0)), Some((128, 128, 0)), Some((128, 128, 128))]);
    let of_keys = [0, 1, 2, 3, 4, 5].map(|index| rows(&added(&plans, index)[0]));
    assert_eq!(of_keys, [(192, 0, 0), (192, 192, 0), (192, 0, 0), (192, 192, 192), (192, 192, 192), (128, 0, 128)]);
    let last = added(&plans, 5)[1];
    // Columns of the second group of four heads, in halves. Their sums follow the sums of 512 keys and values of one head.
    assert_eq!((last.columns, last.width), ([4 * 128, 6 * 128], 2 * 128));
    assert_eq!(last.dqkv.addr(), (1 << 32) + (512 + 384) * 12 * 128 * 2);
    assert_eq!((last.sums.addr(), last.sums.elems()), ((1 << 32) + 512 * 2 * 128 * 4, 128 * 4 * 128));
    assert_eq!(plans.sums(), 512 * 2 * 128 + 192 * 4 * 128);
}

#[test]
fn sums_begin_with_the_first_block_that_sees_a_key_and_end_with_the_last() {
    let part = AttentionShape { batch: 1, heads: 4, kv_heads: 1, ..SHAPE };
    let windowed = AttentionShape { window: Some(128), ..SHAPE };
    let plans = in_blocks(windowed, part, 256);
    // The second block begins at query 256, which sees keys from 129 on.
    assert_eq!(added(&plans, 1).len(), 1, "keys behind a window are not cut");
    let [first, last] = [0, 1].map(|index| added(&plans, index)[0]);
    assert_eq!((first.keys(), first.begun, first.done), (256, 0, 128));
    assert_eq!((last.keys(), last.begun, last.done), (384, 128, 384));
    assert_eq!((first.columns, first.width), ([(8 + 1) * 128, (10 + 1) * 128], 128));
    assert_eq!((last.dqkv.addr(), last.sums.addr()), ((1 << 32) + (512 + 128) * 12 * 128 * 2, (1 << 32) + 128 * 256 * 4));
    // Without a window all keys are summed until the last block; each sequence of a part has its own sums.
    let plans = in_blocks(SHAPE, AttentionShape { batch: 2, ..part }, 256);
    let dqkv = DeviceSlice::at(1 << 32, SHAPE.tokens() * SHAPE.qkv_cols(), Dtype::Bfloat16);
    let sums = DeviceSlice::at(1 << 40, plans.sums(), Dtype::Float32);
    let adds = plans.add_gradients(&SHAPE, PartPlace { sequence: 0, group: 0 }, 0, (dqkv, sums));
    assert_eq!(adds.iter().map(|add| (add.keys(), add.begun, add.done)).collect::<Vec<_>>(), [(256, 0, 0); 2]);
    assert_eq!(adds[1].dqkv.addr() - adds[0].dqkv.addr(), 512 * 12 * 128 * 2);
    assert_eq!(adds[1].sums.addr() - adds[0].sums.addr(), 512 * 256 * 4);
    let adds = plans.add_gradients(&SHAPE, PartPlace { sequence: 0, group: 0 }, 1, (dqkv, sums));
    assert_eq!(adds.len(), 4, "keys and queries of two sequences");
    assert_eq!(adds[3].sums.addr() - adds[1].sums.addr(), 256 * 4 * 128 * 4);
}

#[test]
fn one_block_is_enqueued_whole_and_several_one_by_one() {
    let part = AttentionShape { batch: 1, heads: 4, kv_heads: 1, ..SHAPE };
    let lengths = |block| in_blocks(SHAPE, part, block).steps(&SHAPE).iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!((lengths(512), lengths(256)), (vec![4], vec![1; 12]));
}

/// Needs cuDNN and NVRTC (see `Libraries`), and a `libcuda.so.1` that claims to load compiled code. This is the driver or, first in
/// `LD_LIBRARY_PATH`, a stand-in with every function of `cuda.h`. In the stand-in `cuLibraryLoadData`, `cuLibraryGetKernel`,
/// `cuLibraryUnload`, `cuKernel{GetFunction,GetAttribute,SetAttribute}`, `cuFunc{GetAttribute,SetAttribute}` and
/// `cuOccupancyMaxActiveBlocksPerMultiprocessor` return 0, all other functions 34.
#[test]
#[ignore = "needs cuDNN, and a driver or a stand-in for one"]
fn cudnn_compiles_its_fused_kernels_for_every_kind_of_graph() {
    let cudnn = Cudnn::open(&Libraries::new(&[], 13)).unwrap();
    let mut targets = [(); 2].map(|()| Target::Described(h200(cudnn)));
    let mut compile = |wanted: &[WantedGraph]| make_all(&mut targets, wanted, || Ok(()), |target, wanted| wanted.build(cudnn, target));
    let mha = AttentionShape { kv_heads: 8, ..SHAPE };
    let windowed = AttentionShape { window: Some(128), ..SHAPE };
    let odd = AttentionShape { batch: 1, seq_length: 77, heads: 3, kv_heads: 1, head_dim: 40, ..SHAPE };
    for (shape, name) in [(SHAPE, "gqa"), (mha, "mha"), (windowed, "window"), (odd, "odd")] {
        for (dtype, deterministic) in [(Dtype::Bfloat16, true), (Dtype::Bfloat16, false), (Dtype::Float16, true)] {
            let limits = AttentionLimits::of(9);
            let forward =
                compile(&[WantedGraph::forward((shape, dtype), limits).unwrap()]).unwrap_or_else(|e| panic!("{name} {dtype}: {e}"));
            let forward = &forward[0];
            assert!(forward.json().contains("\"finalizeMode\":\"SDPA_FWD\""), "{name} {dtype}");
            for block in [shape.seq_length, 192, 40] {
                let case = format!("{name} {dtype} deterministic: {deterministic}, blocks of {block}");
                let mut plans = BackwardPlans::new((shape, dtype, block), deterministic);
                let made = compile(&plans.wanted(limits, deterministic).unwrap()).unwrap_or_else(|e| panic!("{case}: {e}"));
                plans.take(&mut made.into_iter());
                assert!((0..plans.blocks.len()).all(|block| plans.plan(block).workspace_bytes() > 0), "{case}");
                assert!(plans.plans.iter().all(|(_, plan)| plan.json().contains("\"finalizeMode\":\"SDPA_BWD\"")), "{case}");
                let bytes = plans.workspace_bytes(deterministic);
                assert_eq!(bytes.max(forward.workspace_bytes()), attention_workspace_bytes(&shape, block, deterministic), "{case}");
            }
        }
    }
}
