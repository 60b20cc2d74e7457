//! Linear and logarithmic axes: conversion of values to positions, and round ticks.

/// An axis.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Axis {
    low: f64,
    high: f64,
    is_log: bool,
    from: f64,
    to: f64,
}

impl Axis {
    /// An axis for `values` with its ends at the positions `from` and `to`. A linear axis includes 0. A logarithmic axis has some margin at
    /// both ends and ignores values that are not positive.
    pub fn of(values: impl Iterator<Item = f64>, is_log: bool, from: f64, to: f64) -> Self {
        let values: Vec<_> = values.filter(|value| value.is_finite() && (!is_log || *value > 0.0)).collect();
        let low = values.iter().copied().fold(f64::INFINITY, f64::min);
        let high = values.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        match (values.is_empty(), is_log) {
            (true, _) => Self { low: 1.0, high: 10.0, is_log, from, to },
            (_, true) => Self { low: low / 1.25, high: high * 1.25, is_log, from, to },
            (_, false) => {
                let high = if high > 0.0 { high } else { 1.0 };
                Self { low: low.min(0.0), high: high + 0.06 * (high - low.min(0.0)), is_log, from, to }
            }
        }
    }

    /// Sets the upper end of a linear axis to `high`, if given.
    pub fn up_to(self, high: Option<f64>) -> Self {
        Self { high: high.filter(|_| !self.is_log).unwrap_or(self.high), ..self }
    }

    /// Position of `value`.
    pub fn place(&self, value: f64) -> f64 {
        let fraction =
            if self.is_log { (value / self.low).ln() / (self.high / self.low).ln() } else { (value - self.low) / (self.high - self.low) };
        self.from + (self.to - self.from) * fraction.clamp(0.0, 1.0)
    }

    /// Position of the base of bars.
    pub fn floor(&self) -> f64 {
        self.place(if self.is_log { self.low } else { 0.0 })
    }

    /// About six round values.
    pub fn ticks(&self) -> Vec<f64> {
        if self.is_log { self.log_ticks() } else { self.linear_ticks() }
    }

    fn linear_ticks(&self) -> Vec<f64> {
        let raw = (self.high - self.low) / 6.0;
        let power = 10f64.powf(raw.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|step| *step >= raw).unwrap_or(raw);
        let range = (self.low / step).ceil() as i64..=(self.high / step).floor() as i64;
        range.map(|index| index as f64 * step).collect()
    }

    /// Powers of ten; on short axes also their multiples by 2 and 5.
    fn log_ticks(&self) -> Vec<f64> {
        let decades = (self.high / self.low).log10();
        let factors: &[f64] = if decades < 3.0 { &[1.0, 2.0, 5.0] } else { &[1.0] };
        let powers = self.low.log10().floor() as i32..=self.high.log10().ceil() as i32;
        let all = powers.flat_map(|power| factors.iter().map(move |factor| factor * 10f64.powi(power)));
        all.filter(|tick| (self.low..=self.high).contains(tick)).collect()
    }
}

/// Formats a number without insignificant digits.
pub fn label(value: f64) -> String {
    match value.abs() {
        0.0 => "0".into(),
        large if large >= 1e6 => format!("{:.3}M", value / 1e6).replace(".000", ""),
        medium if medium >= 10.0 => format!("{value:.0}"),
        _ => {
            let text = format!("{value:.3}");
            text.trim_end_matches('0').trim_end_matches('.').into()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn linear_axes_begin_at_zero() {
        let axis = Axis::of([20.0, 100.0].into_iter(), false, 0.0, 106.0);
        assert_eq!((axis.place(0.0), axis.place(100.0)), (0.0, 100.0));
        assert_eq!(axis.ticks(), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0]);
        assert_eq!(axis.up_to(Some(200.0)).place(100.0), 53.0);
    }

    #[test]
    fn logarithmic_axes_give_each_decade_the_same_room() {
        let axis = Axis::of([1.0, 100.0].into_iter(), true, 500.0, 0.0);
        assert!((axis.place(10.0) - (axis.place(1.0) + axis.place(100.0)) / 2.0).abs() < 1e-9);
        assert_eq!(axis.ticks(), [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]);
        assert_eq!(Axis::of([1.0, 1e5].into_iter(), true, 0.0, 1.0).ticks(), [1.0, 10.0, 100.0, 1e3, 1e4, 1e5]);
    }

    #[test]
    fn an_axis_of_nothing_or_of_zeros_has_ticks() {
        for is_log in [false, true] {
            assert!(!Axis::of(std::iter::empty(), is_log, 0.0, 1.0).ticks().is_empty());
            assert!(!Axis::of([0.0, f64::NAN].into_iter(), is_log, 0.0, 1.0).ticks().is_empty());
        }
    }

    #[test]
    fn labels_name_the_missing_columns() {
        assert_eq!([0.0, 0.25, 2.0, 1280.0, 2e6].map(label), ["0", "0.25", "2", "1280", "2M"]);
    }
}
