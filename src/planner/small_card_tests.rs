//! Steps of many micro-batches on small GPUs.

use super::tests::{FLOW, GIB, REPARTITION, fitting, llama_8b, qwen3_4b, refusal, settings};
use crate::config::settings::Settings;
use crate::optim::moments::Moments;
use crate::request::choices::LayerOrder;
use crate::units::Bytes;

/// 131,072 tokens a step on small GPUs: the fp32 sums of 32 partial sums are on the host and pass through three bucket buffers on the
/// device.
#[test]
fn sums_that_do_not_fit_the_device_lie_on_the_host() {
    if !(FLOW && REPARTITION) {
        return;
    }
    let shares =
        Settings { per_device_train_batch_size: 1, gradient_accumulation_steps: Some(32), gradient_shares: Some(32), ..settings() };
    let packed = Settings { moments: Moments::Bfloat16, ..shares.clone() };
    for (shape, gpu, host) in [(llama_8b(), 23, 120), (qwen3_4b(), 8, 64)] {
        let limited =
            |settings: &Settings| Settings { hbm_limit: Some(Bytes(gpu * GIB)), host_limit: Some(Bytes(host * GIB)), ..settings.clone() };
        let plan = fitting(&shape, &limited(&packed));
        let class = |name: &str| plan.forecast.memory.iter().find(|class| class.name == name).map_or(0, |class| class.bytes);
        let (flat, offloaded, bucket) =
            (plan.placement.layout.flat_elems(), plan.placement.layout.offloaded_elems(), plan.placement.layout.bucket_elems());
        assert!(plan.placement.rings.sums_on_host && plan.placement.rings.grads.is_some(), "{plan}");
        assert_eq!((class("gradients' sums"), class("gradient sums")), (4 * offloaded, 4 * (flat - offloaded)), "{plan}");
        assert_eq!(class("passing sums"), 3 * 4 * bucket, "{plan}");
        // The sums cross the link 31 times in each direction.
        let predicted = plan.forecast.predicted.unwrap();
        assert!(predicted.link_s > 31.0 * (4 * offloaded) as f64 / 51e9 && predicted.step_s >= predicted.link_s, "{plan}");
        assert!(plan.to_string().contains(" of gradient sums are kept in host memory and added on the device"), "{plan}");
        // fp32 moments do not fit next to the sums, and a single share, which accumulates on the device, does not fit either.
        let too_much = refusal(&shape, &limited(&Settings { layer_order: LayerOrder::Whole, ..shares.clone() }));
        assert!(too_much.contains("; --moments bfloat16 would fit"), "{too_much}");
    }
    let one = Settings {
        layer_order: LayerOrder::Whole,
        gradient_shares: None,
        hbm_limit: Some(Bytes(8 * GIB)),
        host_limit: Some(Bytes(64 * GIB)),
        ..packed
    };
    let advice = refusal(&qwen3_4b(), &one);
    assert!(advice.contains("; --gradient-shares 32 would fit"), "{advice}");
    let advice = refusal(&qwen3_4b(), &Settings { moments: Moments::Float32, ..one });
    assert!(advice.contains("; --moments bfloat16 --gradient-shares 32 would fit"), "{advice}");
}

#[test]
fn a_refusal_counts_smaller_batches_that_fit_in_segments_of_layers() {
    let of_gib = |gib| Some(Bytes(gib * GIB));
    let int8 = Settings { moments: Moments::Int8, gradient_accumulation_steps: Some(8), ..settings() };
    let message = refusal(&qwen3_4b(), &Settings { hbm_limit: of_gib(8), host_limit: of_gib(64), ..int8 });
    let way_out = if FLOW { "--per-device-train-batch-size 1 would fit" } else { "no smaller batch or sequence would fit either" };
    assert!(message.contains(way_out), "{message}");
}
