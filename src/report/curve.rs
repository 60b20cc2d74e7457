//! A curve over the steps of a run, in bounded memory for any number of steps. Extreme values are kept.

/// Maximum number of stretches in a curve: about the width of a page in pixels.
const STRETCHES_MAX: usize = 480;
/// Upper limit of values that are drawn. Larger values are measurement errors, and would hide all others.
const DRAWABLE_MAX: f64 = 1e30;

/// A range of successive steps.
#[derive(Clone, Copy, Debug)]
struct Stretch {
    first_x: f64,
    last_x: f64,
    /// Points with the lowest and the highest value, among those that can be drawn.
    low: (f64, f64),
    high: (f64, f64),
    sum: f64,
    count: u64,
}

impl Stretch {
    fn of(x: f64, y: f64) -> Self {
        let is_drawable = y.is_finite() && y.abs() < DRAWABLE_MAX;
        let (low, high) = if is_drawable { (y, y) } else { (f64::INFINITY, f64::NEG_INFINITY) };
        let sum = if is_drawable { y } else { 0.0 };
        Self { first_x: x, last_x: x, low: (x, low), high: (x, high), sum, count: is_drawable.into() }
    }

    fn and(self, next: Self) -> Self {
        Self {
            first_x: self.first_x,
            last_x: next.last_x,
            low: if next.low.1 < self.low.1 { next.low } else { self.low },
            high: if next.high.1 > self.high.1 { next.high } else { self.high },
            sum: self.sum + next.sum,
            count: self.count + next.count,
        }
    }
}

/// Points in the order of steps.
#[derive(Clone, Debug)]
pub(super) struct StepCurve {
    stretches: Vec<Stretch>,
    /// Number of points in a full stretch, and in the last stretch.
    stretch_points: u64,
    last_points: u64,
}

impl Default for StepCurve {
    fn default() -> Self {
        Self { stretches: Vec::new(), stretch_points: 1, last_points: 0 }
    }
}

impl StepCurve {
    /// Adds a point. A `y` that is not finite leaves a gap.
    pub(super) fn push(&mut self, x: f64, y: f64) {
        let point = Stretch::of(x, y);
        match self.stretches.last_mut() {
            Some(last) if self.last_points < self.stretch_points => {
                *last = last.and(point);
                self.last_points += 1;
            }
            _ => {
                self.merge_if_full();
                self.stretches.push(point);
                self.last_points = 1;
            }
        }
    }

    /// Merges pairs of stretches when the maximum number is reached.
    fn merge_if_full(&mut self) {
        if self.stretches.len() == STRETCHES_MAX {
            self.stretches = self.stretches.chunks(2).map(|pair| pair.iter().skip(1).fold(pair[0], |all, next| all.and(*next))).collect();
            self.stretch_points *= 2;
        }
    }

    /// Segments of the curve without a gap, in the order of steps: the lowest and the highest point of each stretch.
    pub(super) fn pieces(&self) -> Vec<Vec<(f64, f64)>> {
        let without_gap = self.stretches.chunk_by(|one, next| (one.count > 0) == (next.count > 0)).filter(|piece| piece[0].count > 0);
        without_gap.map(|piece| piece.iter().flat_map(|stretch| in_order(stretch.low, stretch.high)).collect()).collect()
    }

    /// All points of [`StepCurve::pieces`].
    pub(super) fn points(&self) -> impl Iterator<Item = (f64, f64)> {
        self.pieces().into_iter().flatten()
    }

    /// Middle, mean, and number of points of each stretch.
    pub(super) fn means(&self) -> Vec<(f64, f64, u64)> {
        let known = self.stretches.iter().filter(|stretch| stretch.count > 0);
        known.map(|stretch| ((stretch.first_x + stretch.last_x) / 2.0, stretch.sum / stretch.count as f64, stretch.count)).collect()
    }

    /// The moving average over a window of at most one twentieth of the steps. The page's script offers other window widths.
    pub(super) fn smoothed(&self) -> Vec<(f64, f64)> {
        let means = self.means();
        let reach = means.len() / 40;
        let smooth = |at: usize| {
            let window = &means[at.saturating_sub(reach)..(at + reach + 1).min(means.len())];
            let (sum, count) = window.iter().fold((0.0, 0), |(sum, all), &(_, mean, count)| (sum + mean * count as f64, all + count));
            (means[at].0, sum / count as f64)
        };
        (0..means.len()).map(smooth).collect()
    }

    /// The lowest and highest `y`; `None` without points.
    pub(super) fn range(&self) -> Option<(f64, f64)> {
        self.points().map(|(_, y)| (y, y)).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
    }

    /// The first and last `x`, including points that cannot be drawn.
    pub(super) fn steps(&self) -> Option<(f64, f64)> {
        Some((self.stretches.first()?.first_x, self.stretches.last()?.last_x))
    }
}

fn in_order(low: (f64, f64), high: (f64, f64)) -> impl Iterator<Item = (f64, f64)> {
    let (first, second) = if low.0 <= high.0 { (low, high) } else { (high, low) };
    std::iter::once(first).chain((second != first).then_some(second))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn curve(ys: impl IntoIterator<Item = f64>) -> StepCurve {
        let mut curve = StepCurve::default();
        ys.into_iter().enumerate().for_each(|(x, y)| curve.push(x as f64, y));
        curve
    }

    #[test]
    fn few_points_are_all_drawn() {
        assert_eq!(curve([3.0, 1.0, 2.0]).pieces(), [[(0.0, 3.0), (1.0, 1.0), (2.0, 2.0)]]);
        assert_eq!(curve([]).range(), None);
    }

    #[test]
    fn a_million_points_keep_their_extremes_and_their_mean_in_bounded_memory() {
        let spike = |x: u64| match x {
            123_457 => 99.0,
            765_431 => -99.0,
            _ => (x % 2) as f64,
        };
        let curve = curve((0..1_000_000).map(spike));
        assert!(curve.stretches.len() <= STRETCHES_MAX && curve.points().count() <= 2 * STRETCHES_MAX);
        let points: Vec<_> = curve.points().collect();
        assert!(points.contains(&(123_457.0, 99.0)) && points.contains(&(765_431.0, -99.0)) && points.is_sorted_by_key(|point| point.0));
        assert_eq!((curve.range(), curve.steps()), (Some((-99.0, 99.0)), Some((0.0, 999_999.0))));
        assert!(curve.smoothed().iter().all(|(_, y)| (y - 0.5).abs() < 0.01));
    }

    #[test]
    fn missing_numbers_are_gaps() {
        let gapped = curve([1.0, f64::NAN, 2.0, f64::INFINITY, 1e300]);
        assert_eq!(gapped.pieces(), [[(0.0, 1.0)], [(2.0, 2.0)]]);
        assert_eq!(gapped.steps(), Some((0.0, 4.0)));
        assert!(curve([f64::NAN; 9]).smoothed().is_empty());
    }
}
