//! What was measured again and again, as figures and curves of a profile.

use crate::hardware::sourced::{Curve, MEASURED, Number, Points};

/// Measurements of one thing, ascending; at least one.
#[derive(Clone, Debug)]
pub struct Samples(Vec<f64>);

impl Samples {
    /// # Panics
    /// If there are none.
    pub fn new(mut samples: Vec<f64>) -> Self {
        assert!(!samples.is_empty(), "something was measured");
        samples.sort_by(f64::total_cmp);
        Self(samples)
    }

    /// Those of both.
    pub fn and(self, others: Self) -> Self {
        Self::new([self.0, others.0].concat())
    }

    /// Half are less.
    pub fn median(&self) -> f64 {
        self.0[self.0.len() / 2]
    }

    /// How far nine in ten of the samples lie from each other at most, around the median: 0.02 is plus and minus 2 %.
    pub fn spread(&self) -> f64 {
        let at = |share: f64| self.0[((self.0.len() - 1) as f64 * share).round() as usize];
        (at(0.95) - at(0.05)) / (2.0 * self.median())
    }

    /// The median and where it is from.
    pub(crate) fn sourced(&self) -> Number {
        Number { spread: Some(rounded(self.spread())), ..sourced(self.median(), &self.describe()) }
    }

    /// Of each sample the share of `whole`, at most all of it.
    pub(crate) fn share_of(&self, whole: f64) -> Self {
        Self(self.0.iter().map(|sample| (sample / whole).min(1.0)).collect())
    }

    /// What `amount` takes at each of these rates.
    pub fn inverse(&self, amount: f64) -> Self {
        Self::new(self.0.iter().map(|rate| amount / rate).collect())
    }

    fn describe(&self) -> String {
        let count = self.0.len();
        format!("{count} sample{}, +-{:.1} %", if count == 1 { "" } else { "s" }, 100.0 * self.spread())
    }
}

/// A measured number; `how` says how well.
pub(crate) fn sourced(value: f64, how: &str) -> Number {
    Number { value: rounded(value), source: format!("{MEASURED}: {how}"), spread: None, others: Vec::new() }
}

/// A curve through the medians of `points`, in ascending order.
pub(crate) fn curve(points: &[(f64, Samples)]) -> Curve {
    let medians = points.iter().map(|(x, samples)| (*x, rounded(samples.median()))).collect();
    let how: Vec<_> = points.iter().map(|(_, samples)| samples.describe()).collect();
    let spread = points.iter().map(|(_, samples)| rounded(samples.spread())).reduce(f64::max);
    Curve { value: Points(medians), source: format!("{MEASURED}: {}", how.join("; ")), spread, others: Vec::new() }
}

/// [`curve`] of the shares that `points` have of the last one.
pub(crate) fn share_curve(points: &[(f64, Samples)]) -> Curve {
    let whole = points.last().map_or(1.0, |(_, samples)| samples.median());
    let share = |samples: &Samples| Samples(samples.0.iter().map(|sample| sample / whole).collect());
    curve(&points.iter().map(|(x, samples)| (*x, share(samples))).collect::<Vec<_>>())
}

/// To four digits: more would not be there the next time.
fn rounded(value: f64) -> f64 {
    format!("{value:.3e}").parse().unwrap_or(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_and_its_spread_are_told() {
        let samples = Samples::new((0..101).rev().map(|i| 100.0 + f64::from(i) / 10.0).collect());
        assert_eq!(samples.median(), 105.0);
        assert!((samples.spread() - 4.5 / 105.0).abs() < 1e-9);
        assert_eq!(samples.sourced().source, format!("{MEASURED}: 101 samples, +-4.3 %"));
        assert_eq!((samples.sourced().spread, sourced(1.0, "counted").spread), (Some(0.04286), None));
        assert_eq!(Samples::new(vec![123_456.0]).sourced().value, 123_500.0);
        assert_eq!(samples.share_of(102.0).median(), 1.0);
    }

    #[test]
    fn shares_end_at_all() {
        let points = [(1.0, Samples::new(vec![2.0])), (2.0, Samples::new(vec![8.0, 7.0, 9.0]))];
        assert_eq!(curve(&points).value, Points(vec![(1.0, 2.0), (2.0, 8.0)]));
        assert_eq!(curve(&points).spread, Some(0.125));
        assert_eq!(share_curve(&points).value, Points(vec![(1.0, 0.25), (2.0, 1.0)]));
    }
}
