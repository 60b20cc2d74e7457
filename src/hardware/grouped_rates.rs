//! Implementations of expert products on a device, and their rates.

use super::profile::{CpuDevice, Gpu};
use super::sourced::{Curve, Points};
use clap::ValueEnum;

/// The implementation of expert products on a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ExpertProducts {
    /// The engine's own kernels.
    Own,
    /// cuBLASLt's grouped layouts, from 13.8 on.
    Cublaslt,
}

/// Assumed rate of the program's own kernels relative to single products, for profiles without a measurement. On an H200, which has kernels
/// made for Hopper, the ratio is 0.74 with a thousand rows per expert. The portable kernels are slower relative to a library that uses
/// Hopper's instructions.
const OWN_FRACTION: f64 = 0.55;
/// Assumed rate of cuBLASLt's grouped layouts relative to single products. On an H200 the ratio is at least 0.96 for the shapes of three
/// models (`paper-figures/results/h200-grouped.jsonl`).
const CUBLASLT_FRACTION: f64 = 0.9;
/// On CPUs expert products are consecutive single products.
const CPU_FRACTION: f64 = 1.0;

/// The rate of one implementation.
#[derive(Clone, Debug, PartialEq)]
enum GroupedRate {
    /// FLOP/s by the mean number of rows of an expert.
    Measured(Points),
    /// A fraction of the rate of single products with an expert's size.
    Assumed(f64),
}

impl GroupedRate {
    /// The measured rate if there is one, else the assumed fraction.
    fn new(measured: Option<&Curve>, assumed: f64) -> Self {
        measured.map_or(Self::Assumed(assumed), |curve| Self::Measured(curve.value.clone()))
    }

    fn faster(&self, factor: f64) -> Self {
        match self {
            Self::Measured(curve) => Self::Measured(curve.faster(factor)),
            Self::Assumed(fraction) => Self::Assumed(*fraction),
        }
    }
}

/// The rates of all implementations, and the chosen one.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct GroupedRates {
    own: GroupedRate,
    cublaslt: GroupedRate,
    by: ExpertProducts,
}

impl GroupedRates {
    pub(super) fn of_gpu(gpu: &Gpu) -> Self {
        let own = GroupedRate::new(gpu.grouped_flops_by_rows.as_ref(), OWN_FRACTION);
        let cublaslt = GroupedRate::new(gpu.cublaslt_grouped_flops_by_rows.as_ref(), CUBLASLT_FRACTION);
        Self { own, cublaslt, by: ExpertProducts::Own }
    }

    pub(super) fn of_cpus(cpus: &CpuDevice) -> Self {
        let own = GroupedRate::new(cpus.grouped_flops_by_rows.as_ref(), CPU_FRACTION);
        Self { cublaslt: own.clone(), own, by: ExpertProducts::Own }
    }

    /// Rates equal to those of single products.
    #[cfg(test)]
    pub(super) fn whole() -> Self {
        let [own, cublaslt] = [GroupedRate::Assumed(1.0), GroupedRate::Assumed(1.0)];
        Self { own, cublaslt, by: ExpertProducts::Own }
    }

    /// These rates with another chosen implementation.
    pub(super) fn by(self, by: ExpertProducts) -> Self {
        Self { by, ..self }
    }

    /// Rates of a device that computes `factor` times as fast.
    pub(super) fn faster(&self, factor: f64) -> Self {
        Self { own: self.own.faster(factor), cublaslt: self.cublaslt.faster(factor), by: self.by }
    }

    fn chosen(&self) -> &GroupedRate {
        match self.by {
            ExpertProducts::Own => &self.own,
            ExpertProducts::Cublaslt => &self.cublaslt,
        }
    }

    /// FLOP/s with `rows` mean rows per expert. `single` is the rate of a single product of an expert.
    pub(super) fn flops(&self, rows: usize, single: f64) -> f64 {
        match self.chosen() {
            GroupedRate::Measured(by_rows) => by_rows.at(rows as f64),
            GroupedRate::Assumed(fraction) => fraction * single,
        }
    }

    /// The assumed fraction of the rate of single products; `None` if the rate was measured.
    pub(super) fn assumed_fraction(&self) -> Option<f64> {
        match self.chosen() {
            GroupedRate::Measured(_) => None,
            GroupedRate::Assumed(fraction) => Some(*fraction),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::ExpertProducts;
    use crate::hardware::profile::{ASSUMED, Gpu, Profile};
    use crate::hardware::rates::Rates;
    use crate::hardware::sourced::{Curve, Points};
    use std::path::Path;

    /// The assumed machine's rates with `own` and `cublaslt` in its GPU's profile, after a round trip through a file.
    fn rates(own: Option<Points>, cublaslt: Option<Points>) -> Rates {
        let mut profile = Profile::load(ASSUMED).unwrap();
        let curve = |value| Curve { value, source: String::new(), spread: None, others: Vec::new() };
        let gpu = profile.gpu.take().unwrap();
        let gpu = Gpu { grouped_flops_by_rows: own.map(curve), cublaslt_grouped_flops_by_rows: cublaslt.map(curve), ..gpu };
        profile.gpu = Some(gpu);
        Rates::of(&Profile::parse(&profile.to_string(), Path::new("x")).unwrap())
    }

    #[test]
    fn products_of_experts_have_a_measured_or_an_assumed_rate() {
        let assumed = rates(None, None);
        for (by, fraction) in [(ExpertProducts::Own, 0.55), (ExpertProducts::Cublaslt, 0.9)] {
            let assumed = assumed.multiplying_experts_by(by);
            assert_eq!(assumed.grouped_flops(2048, 512), fraction * assumed.matmul_flops(512));
            assert_eq!(assumed.grouped_flops(64, 512), fraction * assumed.matmul_flops(64));
            let text = format!(
                "products of experts at {:.0} % of the rate of single ones, assumed: h200-pcie5 has no measured rate",
                100.0 * fraction
            );
            assert_eq!(assumed.unknown_grouped(), Some(text));
            assert_eq!(assumed.with_faster_device(2.0).grouped_flops(2048, 512), 2.0 * assumed.grouped_flops(2048, 512));
        }
    }

    #[test]
    fn each_implementation_of_products_has_its_own_rate() {
        let curve = |few, many| Some(Points(vec![(128.0, few), (2048.0, many)]));
        let own = rates(curve(1e14, 3e14), curve(2e14, 4e14));
        let by_cublaslt = own.multiplying_experts_by(ExpertProducts::Cublaslt);
        assert_eq!([128, 512, 4096].map(|rows| own.grouped_flops(rows, 512)), [1e14, 2e14, 3e14]);
        assert_eq!([128, 512, 4096].map(|rows| by_cublaslt.grouped_flops(rows, 512)), [2e14, 3e14, 4e14]);
        assert_eq!([&own, &by_cublaslt].map(Rates::unknown_grouped), [None, None]);
        assert_eq!(by_cublaslt.with_faster_device(2.0).grouped_flops(128, 512), 4e14);
        assert_eq!(by_cublaslt.multiplying_experts_by(ExpertProducts::Own), own);
    }
}
