//! The tile of the loss, and with it the bits, are the same on all machines that hold it.

use super::machine::Machine;
use super::plan::Plan;
use super::tests::{GIB, h200, llama_8b, qwen3_4b, qwen3_14b, settings};
use crate::config::settings::Settings;
use crate::device::DeviceKind;
use crate::dtype::Dtype;
use crate::hardware::profile::Profile;
use crate::memory::{Addressing, DeviceMemory, MemorySpace};
use crate::model::activations::{ActivationPlan, LossTile};
use crate::model::shape::ModelShape;
use crate::objective::ObjectiveKind;
use crate::optim::split::Masters;
use crate::policy_loss::PolicyLossKind;
use crate::request::choices::{LogitsDtypeChoice, MastersChoice};
use crate::units::Bytes;
use proptest::prelude::*;

/// A run gives the same bits on one GPU and on several, although several leave more memory free.
#[test]
fn the_tile_of_the_loss_is_the_same_on_any_machine_that_holds_it() {
    const MACHINES: [(&str, usize); 6] =
        [("h200-x4", 4), ("h200-x2", 2), ("h200-pcie5", 1), ("gh200-96", 1), ("h100-x2", 2), ("h100-x2", 1)];
    for (shape, batch) in [(qwen3_4b(), 4), (llama_8b(), 1), (llama_8b(), 4), (qwen3_14b(), 4)] {
        let plan = |(profile, gpus)| {
            let machine = Machine::of_several(&Profile::load(profile).unwrap(), gpus).unwrap();
            Plan::new(&Settings { per_device_train_batch_size: batch, gpus, ..settings() }.request(&shape), &machine, false).unwrap()
        };
        let plans: Vec<_> = MACHINES.map(plan).into_iter().filter(|plan| plan.shortage().is_none()).collect();
        assert!(
            plans.len() >= 4 && plans.iter().all(|other| other.recipe.numerics.loss_tile == plans[0].recipe.numerics.loss_tile),
            "{plans:?}"
        );
        assert!(plans.iter().all(|plan| !plan.to_string().contains("\n  bits ")), "{plans:?}");
    }
    // A machine on which no other choice fits.
    let plan = Plan::new(&Settings { hbm_limit: Some(Bytes(4 * GIB)), ..settings() }.request(&qwen3_14b()), &h200(), false).unwrap();
    assert_eq!((plan.recipe.numerics.loss_tile.rows, plan.forecast.usual_tile.rows), (1024, 2048), "{plan}");
    assert!(plan.to_string().contains("\n  bits        differ from runs with loss tiles of 2048 rows"), "{plan}");
}

/// The tile has as many rows of fp32 logits as of 16-bit logits.
#[test]
fn fp32_logits_take_twice_the_bytes_and_a_little_more_time() {
    let shape = qwen3_4b();
    let of = |logits_dtype| Plan::new(&Settings { logits_dtype, ..settings() }.request(&shape), &h200(), false).unwrap();
    let [narrow, wide] = [LogitsDtypeChoice::Auto, LogitsDtypeChoice::Float32].map(of);
    assert_eq!(wide.recipe.numerics.loss_tile, narrow.recipe.numerics.loss_tile);
    let tile = |plan: &Plan| {
        let activations = ActivationPlan::new(plan.micro_batch(&shape)).unwrap();
        let logits = activations.allocations().iter().find(|allocation| allocation.name == "logits_tile").unwrap();
        (logits.bytes(), logits.dtype)
    };
    let ((bytes, _), LossTile { rows, vocab, .. }) = (tile(&narrow), narrow.recipe.numerics.loss_tile);
    assert_eq!((bytes, tile(&wide)), (2 * rows * vocab, (2 * bytes, Dtype::Float32)));
    let [narrow, wide] = [narrow, wide].map(|plan| plan.forecast.predicted.unwrap().step_s);
    assert!(narrow < wide && wide < 1.01 * narrow, "{narrow} s and with fp32 logits {wide} s");
}

#[test]
fn logits_are_fp32_for_losses_of_pairs_completions_and_teachers() {
    let of = |choice: LogitsDtypeChoice, dtype, has_objective| choice.resolve(dtype, has_objective).map_err(|error| error.to_string());
    let (auto, bf16, fp32) = (LogitsDtypeChoice::Auto, Dtype::Bfloat16, Dtype::Float32);
    assert_eq!([of(auto, bf16, true), of(auto, bf16, false), of(auto, fp32, true)], [Ok(fp32), Ok(bf16), Ok(fp32)]);
    for dtype in [bf16, Dtype::Float16, fp32] {
        assert_eq!([of(dtype.into(), dtype, true), of(LogitsDtypeChoice::Float32, dtype, false)], [Ok(dtype), Ok(fp32)]);
    }
    let sampled = |loss| Settings { loss, ..settings() }.without_objective().logits_dtype;
    let dapo = ObjectiveKind::Policy(PolicyLossKind::Dapo);
    assert_eq!(
        (sampled(Some(dapo)), sampled(None)),
        (LogitsDtypeChoice::Float32, auto),
        "log-probabilities of samples are those of the loss"
    );
    let refused = of(LogitsDtypeChoice::Bfloat16, Dtype::Float16, true).unwrap_err();
    assert!(refused.contains("--logits-dtype bfloat16 with --dtype float16: use --logits-dtype float16 or float32"), "{refused}");
}

/// A machine with this memory in GiB, and a plan of `shape` on it.
fn plan_in((hbm, host): (u64, u64), settings: &Settings, shape: &ModelShape) -> Plan {
    let device = DeviceMemory::Own { bytes: hbm * GIB, addressing: Addressing::Managed };
    let machine = Machine { host_bytes: host * GIB, kind: DeviceKind::Gpu, device, ..Machine::cpu(16) };
    Plan::new(&settings.request(shape), &machine, false).unwrap()
}

/// In 200 GiB all float32 masters fit with half of the tile. Split masters fit with all of it, and change no bit.
#[test]
fn masters_are_split_before_a_smaller_tile_of_the_loss_changes_bits() {
    let settings = Settings { per_device_train_batch_size: 8, seq_length: 1536, ..Settings::default() };
    let [small, large] = [192, 200].map(|hbm| plan_in((hbm, 36), &settings, &qwen3_14b()));
    for plan in [&small, &large] {
        assert!(plan.shortage().is_none() && plan.protocol.masters == Masters::Split, "{plan}");
        assert_eq!(plan.recipe.numerics.loss_tile, plan.forecast.usual_tile, "{plan}");
    }
    let float32 = Settings { masters: MastersChoice::Float32, ..settings };
    let plan = plan_in((200, 36), &float32, &qwen3_14b());
    assert!(plan.shortage().is_none() && plan.recipe.numerics.loss_tile != plan.forecast.usual_tile, "{plan}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn a_fitting_plan_is_within_its_limits_and_fits_a_larger_machine(
        hbm in 20u64..200, more in 1u64..40, host in 20u64..300, batch in 1usize..9, tokens in 1usize..9, model in 0..3usize,
    ) {
        let shape = [qwen3_4b(), llama_8b(), qwen3_14b()][model].clone();
        let settings = Settings { per_device_train_batch_size: batch, seq_length: tokens * 512, ..Settings::default() };
        let (small, large) = (plan_in((hbm, host), &settings, &shape), plan_in((hbm + more, host), &settings, &shape));
        let tokens = batch * tokens * 512;
        let [tile, larger] = [&small, &large].map(|plan| plan.recipe.numerics.loss_tile);
        prop_assert!(tile.rows <= tokens && tile.rows >= tokens.min(512), "{}", small);
        let is_smaller = tile != larger;
        prop_assert!(!is_smaller || small.to_string().contains("bits        differ from runs with loss tiles of"), "{}", small);
        if small.shortage().is_none() {
            prop_assert!(small.bytes_at(MemorySpace::Device) <= hbm * GIB && small.bytes_at(MemorySpace::Host) <= host * GIB);
            prop_assert!(large.shortage().is_none(), "{}\n{}", small, large);
        }
    }
}
