//! Numbers and curves with their sources.

use serde::Deserialize;

/// Prefix of the sources of numbers that `probe` measured.
pub(crate) const MEASURED: &str = "measured by superoffload probe";

/// Upper bound of numbers. Larger ones would overflow the derived counters.
const TOO_LARGE: f64 = 1e20;

/// A number or a curve with its source and conflicting sources. The unit is the suffix of its field's name.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Sourced<T> {
    /// The value that is used.
    pub value: T,
    /// A measurement, a document, or an assumption and its reason.
    pub source: String,
    /// Half-width of the interval with nine in ten samples, relative to the value: 0.02 is 2 %. For a curve, that of its worst point.
    /// `None` without samples.
    pub spread: Option<f64>,
    /// Sources that disagree.
    #[serde(default = "Vec::new")]
    pub others: Vec<Other<T>>,
}

/// The value of a conflicting source.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Other<T> {
    /// As [`Sourced::value`].
    pub value: T,
    /// As [`Sourced::source`].
    pub source: String,
}

pub(crate) type Number = Sourced<f64>;

/// A number that depends on another.
pub(crate) type Curve = Sourced<Points>;

/// Points `(x, y)` of a curve in ascending order of `x`.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(transparent)]
pub struct Points(pub Vec<(f64, f64)>);

impl Points {
    /// `y` at `x`. Between two points it is linear in the logarithm of `x`; outside the points it is constant.
    ///
    /// # Panics
    /// If there is no point.
    pub fn at(&self, x: f64) -> f64 {
        let Self(points) = self;
        let after = points.partition_point(|&(at, _)| at <= x);
        let (left, right) = (points[after.saturating_sub(1)], points[after.min(points.len() - 1)]);
        if left.0 == right.0 { left.1 } else { left.1 + (right.1 - left.1) * (x / left.0).ln() / (right.0 / left.0).ln() }
    }

    /// The curve with all rates multiplied by `factor`.
    pub(crate) fn faster(&self, factor: f64) -> Self {
        Self(self.0.iter().map(|(x, rate)| (*x, rate * factor)).collect())
    }
}

/// A value that can have a source.
pub trait Value {
    /// The error in the value, if any.
    fn nonsense(&self) -> Option<String>;

    /// The value in TOML.
    fn toml(&self) -> String;
}

impl Value for f64 {
    fn nonsense(&self) -> Option<String> {
        let makes_sense = *self > 0.0 && *self < TOO_LARGE;
        (!makes_sense).then(|| format!("{self} is not a number above 0 and below {TOO_LARGE:e}"))
    }

    fn toml(&self) -> String {
        if (1e-3..1e6).contains(self) { format!("{self:?}") } else { format!("{self:e}") }
    }
}

impl Value for Points {
    fn nonsense(&self) -> Option<String> {
        let Self(points) = self;
        if points.is_empty() {
            return Some("a curve without points".into());
        }
        let number = points.iter().find_map(|(x, y)| x.nonsense().or_else(|| y.nonsense()));
        let descent = points.windows(2).find(|pair| pair[0].0 >= pair[1].0);
        number.or_else(|| descent.map(|pair| format!("points must ascend, but {} comes before {}", pair[0].0, pair[1].0)))
    }

    fn toml(&self) -> String {
        let points: Vec<_> = self.0.iter().map(|(x, y)| format!("[{}, {}]", x.toml(), y.toml())).collect();
        format!("[{}]", points.join(", "))
    }
}

impl<T: Value> Sourced<T> {
    /// The error in its values, if any.
    pub(super) fn nonsense(&self) -> Option<String> {
        let spread = self.spread.filter(|spread| !(0.0..TOO_LARGE).contains(spread)).map(|spread| format!("spread: {spread} is not one"));
        self.value.nonsense().or(spread).or_else(|| self.others.iter().find_map(|other| other.value.nonsense()))
    }

    /// The value as an inline table of TOML.
    pub(super) fn toml(&self) -> String {
        let pair = |value: &T, source: &str| format!("value = {}, source = {}", value.toml(), quoted(source));
        let spread = self.spread.map_or(String::new(), |spread| format!(", spread = {spread:?}"));
        let others: Vec<_> = self.others.iter().map(|other| format!("{{ {} }}", pair(&other.value, &other.source))).collect();
        let others = if others.is_empty() { String::new() } else { format!(", others = [{}]", others.join(", ")) };
        format!("{{ {}{spread}{others} }}", pair(&self.value, &self.source))
    }
}

/// `text` as a TOML string.
pub(super) fn quoted(text: &str) -> String {
    toml::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_curve_is_straight_over_the_logarithm_and_level_beyond_its_ends() {
        let curve = Points(vec![(1.0, 10.0), (4.0, 30.0), (16.0, 35.0)]);
        let at = [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 99.0].map(|x| curve.at(x));
        assert_eq!(at, [10.0, 10.0, 20.0, 30.0, 32.5, 35.0, 35.0]);
        assert_eq!(Points(vec![(3.0, 7.0)]).at(5.0), 7.0);
    }

    #[test]
    fn nonsense_is_an_error() {
        let message = |points: &[(f64, f64)]| Points(points.to_vec()).nonsense().unwrap_or_default();
        assert_eq!(message(&[(1.0, 2.0), (2.0, 1.0)]), "");
        assert!(message(&[]).contains("without points"));
        assert!(message(&[(2.0, 1.0), (2.0, 1.0)]).contains("2 comes before 2"));
        for bad in [0.0, -1.0, f64::NAN, f64::INFINITY, 1e300] {
            assert!(bad.nonsense().unwrap().contains(&bad.to_string()), "{bad}");
            assert!(message(&[(1.0, bad)]).contains(&bad.to_string()) && message(&[(bad, 1.0)]).contains(&bad.to_string()), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn written_values_read_back(
            value in proptest::num::f64::POSITIVE, points in prop::collection::vec((proptest::num::f64::POSITIVE, 0.0..1e19), 0..4), source in "\\PC*",
        ) {
            let others = vec![Other { value: Points(points.clone()), source: source.clone() }];
            let curve = Curve { value: Points(points), source: source.clone(), spread: None, others };
            let number = Number { value, source, spread: Some(value), others: vec![] };
            #[derive(Deserialize, PartialEq, Debug)]
            struct Both { curve: Curve, number: Number }
            let text = format!("curve = {}\nnumber = {}", curve.toml(), number.toml());
            prop_assert_eq!(toml::from_str::<Both>(&text).unwrap(), Both { curve, number }, "{}", text);
        }
    }
}
