//! What can be said of cuDNN's plans without a GPU: cuDNN compiles them for one that is only described to it.

use super::*;
use crate::device::footprint::gpu::attention_workspace_bytes;
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
    let call = AttentionCall::backward(&AttentionBackward { dout, qkv, documents: None, out, lse, dqkv, shape: SHAPE }).unwrap();
    let places: Vec<_> = parts_of(&SHAPE, &part).map(|place| (place.sequence, place.group)).collect();
    assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1)]);
    let last = call.addresses_of(&part, PartPlace { sequence: 1, group: 1 });
    let of = |role: AttentionTensor| last[role as usize];
    // Sequence 1 begins at row 512; the second group has heads 4 to 7, and key head 1 behind eight of queries.
    assert_eq!(of(AttentionTensor::Q), qkv.addr() + (512 * 12 * 128 + 4 * 128) * 2);
    assert_eq!(of(AttentionTensor::Dk), dqkv.addr() + (512 * 12 * 128 + (8 + 1) * 128) * 2);
    assert_eq!(of(AttentionTensor::V), qkv.addr() + (512 * 12 * 128 + (10 + 1) * 128) * 2);
    assert_eq!(of(AttentionTensor::Dout), dout.addr() + (512 * 8 * 128 + 4 * 128) * 2);
    assert_eq!(of(AttentionTensor::Lse), lse.addr() + (8 * 512 + 4 * 512) * 4);
}

/// Needs cuDNN and NVRTC (see `Libraries`), and a `libcuda.so.1` that says that it has loaded what cuDNN compiled: the
/// driver or, first in `LD_LIBRARY_PATH`, a stand-in with every function of `cuda.h`. There `cuLibraryLoadData`,
/// `cuLibraryGetKernel`, `cuLibraryUnload`, `cuKernel{GetFunction,GetAttribute,SetAttribute}`,
/// `cuFunc{GetAttribute,SetAttribute}` and `cuOccupancyMaxActiveBlocksPerMultiprocessor` return 0, all others 34.
#[test]
#[ignore = "needs cuDNN, and a driver or a stand-in for one"]
fn cudnn_compiles_its_fused_kernels_for_every_kind_of_graph() {
    let cudnn = Cudnn::open(&Libraries::new(&[], 13)).unwrap();
    let device =
        Descriptor::build(cudnn, DescriptorKind::DeviceProperties, |device| device.set(Attribute::DeviceJson, H200.trim().as_bytes()));
    let target = Target::Described(device.unwrap());
    let mha = AttentionShape { kv_heads: 8, ..SHAPE };
    let windowed = AttentionShape { window: Some(128), ..SHAPE };
    let odd = AttentionShape { batch: 1, seq_length: 77, heads: 3, kv_heads: 1, head_dim: 40, ..SHAPE };
    for (shape, name) in [(SHAPE, "gqa"), (mha, "mha"), (windowed, "window"), (odd, "odd")] {
        for (dtype, deterministic) in [(Dtype::Bfloat16, true), (Dtype::Bfloat16, false), (Dtype::Float16, true)] {
            let case = format!("{name} {dtype} deterministic: {deterministic}");
            let plans =
                Plans::build(cudnn, &target, &shape, (dtype, supported(&shape, dtype, AttentionLimits::of(9)).unwrap()), deterministic)
                    .unwrap_or_else(|e| panic!("{case}: {e}"));
            assert!(plans.forward.json().contains("\"finalizeMode\":\"SDPA_FWD\""), "{case}");
            assert!(plans.backward.json().contains("\"finalizeMode\":\"SDPA_BWD\""), "{case}");
            assert_eq!(plans.workspace_bytes(), attention_workspace_bytes(&shape, deterministic), "{case}");
        }
    }
}
