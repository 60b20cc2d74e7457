//! The implementation of expert products: cuBLASLt if possible, because it is faster, else this program's kernels.

use super::machine::{GroupedLayouts, Machine};
use crate::device::{DeviceKind, ExpertProducts};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::model::shape::ModelShape;
use crate::request::choices::ExpertProductsChoice;

const BY_CUBLASLT: &str = "multiplied by cuBLASLt (13.8 or newer, on Hopper or Blackwell in data centres)";

/// The implementation, and the line that explains it to the user.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ExpertEngine {
    pub(crate) by: ExpertProducts,
    pub(crate) note: Option<String>,
}

impl ExpertEngine {
    /// This program's kernels, without an explanation.
    const OWN: Self = Self { by: ExpertProducts::Own, note: None };

    /// The `requested` implementation; `auto` depends on the machine.
    ///
    /// # Errors
    /// `Usage` if cuBLASLt is requested and does not support the model.
    pub(super) fn of(requested: ExpertProductsChoice, shape: &ModelShape, dtype: Dtype, machine: &Machine) -> Result<Self> {
        if machine.kind == DeviceKind::Cpu || shape.experts() == 0 {
            return Ok(Self::OWN);
        }
        let by_cublaslt = Self { by: ExpertProducts::Cublaslt, note: Some(BY_CUBLASLT.into()) };
        let own = |why: &str| Self { note: Some(format!("multiplied by this program's kernels: {why}")), ..Self::OWN };
        Ok(match (requested, obstacle(shape, dtype), &machine.grouped_layouts) {
            (ExpertProductsChoice::Own, None, GroupedLayouts::Usable) => {
                own("as set by flag or checkpoint; cuBLASLt is faster (--expert-products cublaslt)")
            }
            (ExpertProductsChoice::Own, ..) => Self { note: Some("multiplied by this program's kernels".into()), ..Self::OWN },
            (ExpertProductsChoice::Cublaslt, Some(obstacle), _) => {
                return Err(Error::usage(format!("--expert-products cublaslt: {obstacle}; or use --expert-products own")));
            }
            (ExpertProductsChoice::Auto, Some(obstacle), _) => own(obstacle),
            (ExpertProductsChoice::Cublaslt, None, _) | (_, None, GroupedLayouts::Usable) => by_cublaslt,
            (_, None, GroupedLayouts::Unusable(why)) => own(why),
            (_, None, GroupedLayouts::Unknown) => {
                own("the profile has no rates of cuBLASLt, which runs use from 13.8 on, on Hopper and Blackwell in data centres \
                    (--expert-products cublaslt plans with it)")
            }
        })
    }
}

/// A reason why cuBLASLt cannot compute the expert products: it needs 16-bit formats and rows of whole 16-byte vectors.
fn obstacle(shape: &ModelShape, dtype: Dtype) -> Option<&'static str> {
    let mut sizes = shape.layers.iter().filter_map(|layer| layer.mlp.moe()).flat_map(|moe| [shape.channels, moe.ffn.width]);
    match dtype {
        Dtype::Float32 => Some("cuBLASLt supports 16-bit formats only; use --dtype bfloat16"),
        _ if sizes.any(|size| !size.is_multiple_of(8)) => Some("cuBLASLt needs multiples of 8 channels, in a token and in an expert"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::Settings;
    use crate::planner::plan::Plan;

    fn olmoe() -> ModelShape {
        crate::model::presets::shape("olmoe-1b-7b".as_ref()).unwrap()
    }

    fn gpu(grouped_layouts: GroupedLayouts) -> Machine {
        Machine { kind: DeviceKind::Gpu, grouped_layouts, ..Machine::cpu(4) }
    }

    fn engine(choice: ExpertProductsChoice, shape: &ModelShape, dtype: Dtype, machine: &Machine) -> Result<ExpertEngine> {
        ExpertEngine::of(choice, shape, dtype, machine)
    }

    #[test]
    fn cublaslt_multiplies_by_experts_in_16_bits_and_whole_vectors() {
        let (mut shape, machine, narrow) = (olmoe(), gpu(GroupedLayouts::Usable), Dtype::Bfloat16);
        let by = |choice, shape: &ModelShape, dtype| engine(choice, shape, dtype, &machine).map(|engine| engine.by);
        for choice in [ExpertProductsChoice::Auto, ExpertProductsChoice::Cublaslt] {
            assert_eq!(by(choice, &shape, narrow).unwrap(), ExpertProducts::Cublaslt);
            assert_eq!(engine(choice, &ModelShape::demo(), narrow, &machine).unwrap(), ExpertEngine::OWN, "it has no experts");
            assert_eq!(engine(choice, &shape, narrow, &Machine::cpu(4)).unwrap(), ExpertEngine::OWN);
        }
        assert_eq!(by(ExpertProductsChoice::Own, &shape, narrow).unwrap(), ExpertProducts::Own);
        let refused = |shape: &ModelShape, dtype| by(ExpertProductsChoice::Cublaslt, shape, dtype).unwrap_err().to_string();
        assert!(refused(&shape, Dtype::Float32).contains("--expert-products cublaslt: cuBLASLt supports 16-bit formats only"));
        assert_eq!(by(ExpertProductsChoice::Auto, &shape, Dtype::Float32).unwrap(), ExpertProducts::Own);
        shape.channels += 4;
        assert!(refused(&shape, narrow).contains("multiples of 8 channels"));
        assert_eq!(by(ExpertProductsChoice::Auto, &shape, narrow).unwrap(), ExpertProducts::Own);
    }

    #[test]
    fn auto_uses_the_machine_s_devices_and_shows_the_reason() {
        let of = |choice, layouts| engine(choice, &olmoe(), Dtype::Bfloat16, &gpu(layouts)).unwrap();
        let old = || GroupedLayouts::Unusable("cuBLASLt is 13.1".into());
        let auto = of(ExpertProductsChoice::Auto, old());
        assert_eq!(auto.note.as_deref(), Some("multiplied by this program's kernels: cuBLASLt is 13.1"));
        let slower = of(ExpertProductsChoice::Own, GroupedLayouts::Usable).note.unwrap();
        assert!(slower.ends_with("cuBLASLt is faster (--expert-products cublaslt)"), "{slower}");
        assert_eq!(of(ExpertProductsChoice::Own, old()).note.as_deref(), Some("multiplied by this program's kernels"));
        let without_rates = of(ExpertProductsChoice::Auto, GroupedLayouts::Unknown);
        assert!(without_rates.by == ExpertProducts::Own && without_rates.note.unwrap().contains("no rates of cuBLASLt"));
        // If cuBLASLt is requested and missing, the device reports it later.
        let requested = of(ExpertProductsChoice::Cublaslt, old());
        assert_eq!(requested, ExpertEngine { by: ExpertProducts::Cublaslt, note: Some(BY_CUBLASLT.into()) });
    }

    #[test]
    fn other_gpus_use_cublaslt_where_a_profile_has_its_rate() {
        let by = |profile: &str| {
            let machine = Machine::of(&crate::hardware::profile::Profile::load(profile).unwrap());
            engine(ExpertProductsChoice::Auto, &olmoe(), Dtype::Bfloat16, &machine).unwrap().by
        };
        assert_eq!(
            ["h200-pcie5", "h200-x4", "gh200-96"].map(by),
            [ExpertProducts::Cublaslt, ExpertProducts::Cublaslt, ExpertProducts::Own]
        );
    }

    #[test]
    fn plans_use_the_rate_of_the_product_implementation() {
        let device = crate::memory::DeviceMemory::Own { bytes: 1 << 40, addressing: crate::memory::Addressing::Separate };
        let machine = Machine { device, ..gpu(GroupedLayouts::Usable) };
        let settings = Settings { per_device_train_batch_size: 8, seq_length: 4096, ..Settings::demo() };
        let plan =
            |expert_products| Plan::new(&Settings { expert_products, ..settings.clone() }.request(&olmoe()), &machine, false).unwrap();
        let [own, by_cublaslt] = [ExpertProductsChoice::Own, ExpertProductsChoice::Auto].map(plan);
        let step_s = |plan: &Plan| plan.forecast.predicted.as_ref().unwrap().step_s;
        assert!(step_s(&by_cublaslt) < step_s(&own));
        assert!(by_cublaslt.to_string().contains("  experts     multiplied by cuBLASLt"), "{by_cublaslt}");
        assert!(own.to_string().contains("  experts     multiplied by this program's kernels"), "{own}");
    }
}
