//! Repeated measurements, summarized as numbers and curves of a profile.

use crate::hardware::sourced::{Curve, MEASURED, Number, Points};

/// Measurements of one quantity, ascending; at least one.
#[derive(Clone, Debug)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// Sorts the measurements.
    ///
    /// # Panics
    /// If there are none.
    pub fn new(mut samples: Vec<f64>) -> Self {
        assert!(!samples.is_empty(), "something was measured");
        samples.sort_by(f64::total_cmp);
        Self(samples)
    }

    /// The union of both sets.
    pub fn and(self, others: Self) -> Self {
        Self::new([self.0, others.0].concat())
    }

    /// The median.
    pub fn median(&self) -> f64 {
        self.0[self.0.len() / 2]
    }

    /// Half the width of the interval with nine in ten samples, relative to the median: 0.02 is plus or minus 2 %.
    pub fn spread(&self) -> f64 {
        let at = |fraction: f64| self.0[((self.0.len() - 1) as f64 * fraction).round() as usize];
        (at(0.95) - at(0.05)) / (2.0 * self.median())
    }

    /// The median with its source.
    pub(crate) fn sourced(&self) -> Number {
        Number { spread: Some(rounded(self.spread())), ..sourced(self.median(), &self.describe()) }
    }

    /// Each sample as a fraction of `whole`, at most 1.
    pub(crate) fn fraction_of(&self, whole: f64) -> Self {
        Self(self.0.iter().map(|sample| (sample / whole).min(1.0)).collect())
    }

    /// The time for `amount` at each of these rates.
    pub fn inverse(&self, amount: f64) -> Self {
        Self::new(self.0.iter().map(|rate| amount / rate).collect())
    }

    fn describe(&self) -> String {
        let count = self.0.len();
        format!("{count} sample{}, +-{:.1} %", if count == 1 { "" } else { "s" }, 100.0 * self.spread())
    }
}

/// A measured number. `how` describes the measurement.
pub(crate) fn sourced(value: f64, how: &str) -> Number {
    Number { value: rounded(value), source: format!("{MEASURED}: {how}"), spread: None, others: Vec::new() }
}

/// A curve of the medians of `points`, which ascend.
pub(crate) fn curve(points: &[(f64, Samples)]) -> Curve {
    let medians = points.iter().map(|(x, samples)| (*x, rounded(samples.median()))).collect();
    let how: Vec<_> = points.iter().map(|(_, samples)| samples.describe()).collect();
    let spread = points.iter().map(|(_, samples)| rounded(samples.spread())).reduce(f64::max);
    Curve { value: Points(medians), source: format!("{MEASURED}: {}", how.join("; ")), spread, others: Vec::new() }
}

/// A [`curve`] of `points` relative to the last one.
pub(crate) fn fraction_curve(points: &[(f64, Samples)]) -> Curve {
    let whole = points.last().map_or(1.0, |(_, samples)| samples.median());
    let fraction = |samples: &Samples| Samples(samples.0.iter().map(|sample| sample / whole).collect());
    curve(&points.iter().map(|(x, samples)| (*x, fraction(samples))).collect::<Vec<_>>())
}

/// `value` with four significant digits. Further digits are not reproducible.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_and_its_spread_are_shown() {
        let samples = Samples::new((0..101).rev().map(|i| 100.0 + f64::from(i) / 10.0).collect());
        assert_eq!(samples.median(), 105.0);
        assert!((samples.spread() - 4.5 / 105.0).abs() < 1e-9);
        assert_eq!(samples.sourced().source, format!("{MEASURED}: 101 samples, +-4.3 %"));
        assert_eq!((samples.sourced().spread, sourced(1.0, "counted").spread), (Some(0.04286), None));
        assert_eq!(Samples::new(vec![123_456.0]).sourced().value, 123_500.0);
        assert_eq!(samples.fraction_of(102.0).median(), 1.0);
    }

    #[test]
    fn shares_end_at_all() {
        let points = [(1.0, Samples::new(vec![2.0])), (2.0, Samples::new(vec![8.0, 7.0, 9.0]))];
        assert_eq!(curve(&points).value, Points(vec![(1.0, 2.0), (2.0, 8.0)]));
        assert_eq!(curve(&points).spread, Some(0.125));
        assert_eq!(fraction_curve(&points).value, Points(vec![(1.0, 0.25), (2.0, 1.0)]));
    }
}
