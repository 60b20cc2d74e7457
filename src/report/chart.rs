//! Charts as SVG without scripts, for any page width: positions are relative to the plot area, and text and strokes have a fixed size.

use super::curve::StepCurve;
use super::html::{escape, number};
use std::fmt::Write;

/// Side length of the coordinate system of the curves, before it is stretched to the plot area.
const SIDE: f64 = 1000.0;
/// Ratio of the ends of a value axis from which the axis is logarithmic, if `ValueAxis` allows it.
const LOG_FROM: f64 = 30.0;
/// Minimum distance between labels at the ends of curves, in percent of the height.
const LABEL_GAP: f64 = 7.0;

/// Lower end of a value axis.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum ValueAxis {
    /// The axis starts at zero.
    FromZero,
    /// The axis starts at the lowest value. It is logarithmic if values differ much.
    Fitted,
}

/// Curves and marks of one run.
pub(super) struct ChartRun<'a> {
    /// Index of the run, which selects the colour.
    pub(super) run: usize,
    pub(super) curve: &'a StepCurve,
    /// Whether the values are exact, so that smoothing is not needed.
    pub(super) is_exact: bool,
    /// Separate points, for evaluations.
    pub(super) dots: Option<&'a StepCurve>,
    /// Marks below the curves: a style and the marked steps.
    pub(super) marks: Vec<(&'static str, &'a StepCurve)>,
}

/// A plot area with the curves of all runs.
pub(super) struct Chart<'a> {
    pub(super) title: &'a str,
    /// Unit and meaning of the values.
    pub(super) caption: &'a str,
    pub(super) axis: ValueAxis,
    pub(super) runs: Vec<ChartRun<'a>>,
}

/// Maps values to positions on an axis, from 0 to 1.
struct Scale {
    from: f64,
    to: f64,
    is_log: bool,
}

impl Scale {
    fn new(from: f64, to: f64, is_log: bool) -> Self {
        // An axis with a single value shows it in the middle.
        let margin = if to > from { 0.0 } else { from.abs().max(1e-12) / 2.0 };
        Self { from: from - margin, to: to + margin, is_log }
    }

    fn fraction(&self, value: f64) -> f64 {
        let along = |x: f64| if self.is_log { x.ln() } else { x };
        (along(value) - along(self.from)) / (along(self.to) - along(self.from))
    }

    /// About `count` round values on the axis.
    fn ticks(&self, count: f64) -> Vec<f64> {
        if self.is_log {
            let decades = self.from.log10().floor() as i32..=self.to.log10().ceil() as i32;
            let steps: &[f64] = if (self.to / self.from).log10() > 2.5 { &[1.0] } else { &[1.0, 3.0] };
            let all = decades.flat_map(|power| steps.iter().map(move |step| step * 10f64.powi(power)));
            return all.filter(|tick| (self.from..=self.to).contains(tick)).collect();
        }
        let rough = (self.to - self.from) / count;
        let power = 10f64.powf(rough.log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|digit| digit * power).into_iter().find(|&step| step >= rough).unwrap_or(rough);
        let first = (self.from / step).ceil();
        let last = ((self.to / step).floor() - first).clamp(0.0, 3.0 * count);
        (0..=last as u32).map(|at| (first + f64::from(at)) * step).collect()
    }
}

impl Chart<'_> {
    /// Draws the chart as a figure. Without data, the figure has a sentence instead.
    pub(super) fn draw(&self) -> String {
        let scales = self.scales();
        let axis = if scales.as_ref().is_some_and(|(_, y)| y.is_log) { "; logarithmic axis" } else { "" };
        let caption = format!("<figcaption><b>{}</b> {}{axis}</figcaption>", escape(self.title), escape(self.caption));
        let Some((x, y)) = scales else {
            return format!("<figure>{caption}<p class=\"none\">No step has this value.</p></figure>\n");
        };
        let mut svg = String::new();
        self.grid(&mut svg, &x, &y);
        let _ =
            write!(svg, "<svg class=\"curves\" width=\"100%\" height=\"100%\" viewBox=\"0 0 {SIDE} {SIDE}\" preserveAspectRatio=\"none\">");
        for run in &self.runs {
            run.curves(&mut svg, &x, &y);
        }
        svg.push_str("</svg>\n");
        self.end_labels(&mut svg, &y);
        self.best_label(&mut svg, &x, &y);
        let label = format!("{}: {}{axis}", self.title, self.caption);
        format!(
            "<figure>{caption}<div class=\"plot\"><svg class=\"chart\" xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-label=\"{}\" \
             width=\"100%\" height=\"100%\" data-x=\"{} {}\" data-y=\"{} {} {}\">\n{svg}</svg></div></figure>\n",
            escape(label),
            x.from,
            x.to,
            y.from,
            y.to,
            u8::from(y.is_log)
        )
    }

    /// The step axis and the value axis.
    fn scales(&self) -> Option<(Scale, Scale)> {
        let hull = |a: (f64, f64), b: (f64, f64)| (a.0.min(b.0), a.1.max(b.1));
        let curves = || self.runs.iter().flat_map(|run| std::iter::once(run.curve).chain(run.dots));
        let (first, last) = curves().filter_map(StepCurve::steps).reduce(hull)?;
        let (low, high) = curves().filter_map(StepCurve::range).reduce(hull)?;
        let is_log = self.axis == ValueAxis::Fitted && low > 0.0 && high / low > LOG_FROM;
        let low = if self.axis == ValueAxis::FromZero { low.min(0.0) } else { low };
        let margin = if is_log { 0.0 } else { (high - low) * 0.06 };
        let below = if self.axis == ValueAxis::FromZero { 0.0 } else { margin };
        Some((Scale::new(first, last, false), Scale::new(low - below, high + margin, is_log)))
    }

    fn grid(&self, svg: &mut String, x: &Scale, y: &Scale) {
        for tick in y.ticks(4.0) {
            let at = 100.0 * (1.0 - y.fraction(tick));
            let _ = writeln!(svg, "<line class=\"grid\" x1=\"0\" x2=\"100%\" y1=\"{at:.2}%\" y2=\"{at:.2}%\"/>");
            let _ = writeln!(svg, "<text class=\"tick\" x=\"-8\" y=\"{at:.2}%\" dy=\"4\" text-anchor=\"end\">{}</text>", tick_text(tick));
        }
        for tick in x.ticks(4.0).into_iter().filter(|tick| tick.fract() == 0.0) {
            let at = 100.0 * x.fraction(tick);
            let _ = writeln!(
                svg,
                "<text class=\"tick x\" x=\"{at:.2}%\" y=\"100%\" dy=\"18\" text-anchor=\"middle\">{}</text>",
                tick_text(tick)
            );
        }
        svg.push_str("<line class=\"axis\" x1=\"0\" x2=\"100%\" y1=\"100%\" y2=\"100%\"/>\n");
        svg.push_str("<text class=\"tick unit\" x=\"-14\" y=\"100%\" dy=\"18\" text-anchor=\"end\">step</text>\n");
    }

    /// Draws each curve's last value beside its end, moved if two labels would overlap.
    fn end_labels(&self, svg: &mut String, y: &Scale) {
        let end = |run: &ChartRun| run.line().last().map(|&(_, value)| (100.0 * (1.0 - y.fraction(value)), value, run.run));
        let mut ends: Vec<_> = self.runs.iter().filter_map(end).collect();
        ends.sort_by(|a, b| a.0.total_cmp(&b.0));
        // From the lowest label upwards, because the step axis is below the plot area.
        let mut free_to = 98.0;
        for (at, value, run) in ends.into_iter().rev() {
            let at = at.min(free_to);
            free_to = at - LABEL_GAP;
            let _ = writeln!(svg, "<text class=\"end r{run}\" x=\"100%\" y=\"{at:.2}%\" dx=\"8\" dy=\"4\">{}</text>", number(value));
        }
    }
}

impl Chart<'_> {
    /// Labels the best evaluation if there is one run. Labels of several runs would overlap; the tables have their numbers.
    fn best_label(&self, svg: &mut String, x: &Scale, y: &Scale) {
        let [run] = self.runs.as_slice() else { return };
        let Some((step, value)) = run.best() else { return };
        let (across, down) = (100.0 * x.fraction(step), 100.0 * (1.0 - y.fraction(value)));
        let anchor = ["start", "middle", "end"][usize::from(across > 12.0) + usize::from(across > 88.0)];
        let _ = writeln!(
            svg,
            "<text class=\"mark r{}\" data-step=\"{step}\" x=\"{across:.2}%\" y=\"{down:.2}%\" dy=\"-12\" text-anchor=\"{anchor}\">best {}</text>",
            run.run,
            number(value)
        );
    }
}

impl ChartRun<'_> {
    /// The lowest separate point; the first one if several are equal.
    fn best(&self) -> Option<(f64, f64)> {
        self.dots.iter().flat_map(|dots| dots.points()).min_by(|a, b| a.1.total_cmp(&b.1))
    }

    /// Points of the thick line.
    fn line(&self) -> Vec<(f64, f64)> {
        if self.is_exact { self.curve.points().collect() } else { self.curve.smoothed() }
    }

    /// Attribute with the data that the page's script smooths. Empty for exact curves.
    fn means(&self) -> String {
        let mean = |(step, mean, count)| format!("{step} {mean:.4e} {count}");
        let means: Vec<_> = self.curve.means().into_iter().map(mean).collect();
        if self.is_exact || means.is_empty() { String::new() } else { format!(" data-means=\"{}\"", means.join(" ")) }
    }

    fn curves(&self, svg: &mut String, x: &Scale, y: &Scale) {
        for piece in self.curve.pieces() {
            path(svg, "raw", self.run, &piece, "", x, y);
        }
        path(svg, "smooth", self.run, &self.line(), &self.means(), x, y);
        for (style, marks) in &self.marks {
            ticks_below(svg, style, self.run, marks, x);
        }
        let dots: Vec<_> = self.dots.iter().flat_map(|dots| dots.points()).collect();
        for style in ["dot", "hole"] {
            points_alone(svg, style, self.run, &dots, x, y);
        }
        points_alone(svg, "best", self.run, self.best().as_slice(), x, y);
    }
}

/// Coordinates of a point in SVG.
fn place((step, value): (f64, f64), x: &Scale, y: &Scale) -> String {
    format!("{:.1},{:.1}", SIDE * x.fraction(step), SIDE * (1.0 - y.fraction(value)))
}

/// Draws a line through `points`. A line with a single point has no length, and is visible because of its round cap.
fn path(svg: &mut String, style: &str, run: usize, points: &[(f64, f64)], attributes: &str, x: &Scale, y: &Scale) {
    let places: Vec<_> = points.iter().map(|&point| place(point, x, y)).collect();
    let end = if places.len() == 1 { "h0" } else { "" };
    element(svg, style, run, &format!("M{}{end}", places.join("L")), attributes, places.is_empty());
}

/// Draws each point as a stroke without length. Its round cap stays round when the plot area is stretched, unlike a circle.
fn points_alone(svg: &mut String, style: &str, run: usize, points: &[(f64, f64)], x: &Scale, y: &Scale) {
    let strokes: String = points.iter().map(|&point| format!("M{}h0", place(point, x, y))).collect();
    element(svg, style, run, &strokes, "", points.is_empty());
}

/// Draws short strokes on the step axis.
fn ticks_below(svg: &mut String, style: &str, run: usize, marks: &StepCurve, x: &Scale) {
    let strokes: String = marks.points().map(|(step, _)| format!("M{:.1},970V1000", SIDE * x.fraction(step))).collect();
    element(svg, style, run, &strokes, "", strokes.is_empty());
}

fn element(svg: &mut String, style: &str, run: usize, strokes: &str, attributes: &str, is_empty: bool) {
    if !is_empty {
        let _ = writeln!(svg, "<path class=\"{style} r{run}\" vector-effect=\"non-scaling-stroke\" d=\"{strokes}\"{attributes}/>");
    }
}

/// A short text for a tick: `20k`, `0.5`, `3e-5`.
fn tick_text(tick: f64) -> String {
    match tick.abs() {
        0.0 => "0".into(),
        size if size >= 1e15 => format!("{tick:e}"),
        size if size >= 1e9 => format!("{}B", round(tick / 1e9)),
        size if size >= 1e6 => format!("{}M", round(tick / 1e6)),
        size if size >= 1e4 => format!("{}k", round(tick / 1e3)),
        size if size < 1e-3 => format!("{:e}", round(tick * 1e12) / 1e12).chars().take(12).collect(),
        _ => round(tick).to_string(),
    }
}

/// Removes rounding errors of binary fractions.
fn round(x: f64) -> f64 {
    (x * 1e6).round() / 1e6
}

/// Draws a stacked bar of 100 %. Each part has a name, a value, and a text for the value.
pub(super) fn stacked_bar(label: &str, parts: &[(String, f64, String)]) -> String {
    let all: f64 = parts.iter().map(|(_, value, _)| value).sum();
    if !all.is_finite() || all <= 0.0 {
        return String::new();
    }
    let (mut at, mut svg, mut legend) = (0.0, String::new(), String::new());
    for (idx, (name, value, words)) in parts.iter().enumerate().filter(|(_, (_, value, _))| *value > 0.0) {
        let (width, style, name) = (100.0 * value / all, idx % 8, escape(name));
        let _ = writeln!(
            svg,
            "<rect class=\"p{style}\" x=\"{at:.3}%\" y=\"0\" width=\"{width:.3}%\" height=\"100%\"><title>{name}: {words}</title></rect>"
        );
        let _ = writeln!(legend, "<li class=\"p{style}\"><i></i>{name} <b>{words}</b></li>");
        at += width;
    }
    let label = escape(label);
    format!(
        "<figure><figcaption>{label}</figcaption><svg class=\"bar\" xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" aria-label=\"{label}\" \
         width=\"100%\" height=\"22\">\n{svg}</svg><ul class=\"legend\">\n{legend}</ul></figure>\n"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_round_and_inside() {
        assert_eq!(Scale::new(0.0, 300.0, false).ticks(4.0), [0.0, 100.0, 200.0, 300.0]);
        assert_eq!(Scale::new(2.1, 5.6, false).ticks(4.0), [3.0, 4.0, 5.0]);
        assert_eq!(Scale::new(0.02, 90.0, true).ticks(4.0), [0.1, 1.0, 10.0]);
        assert_eq!(Scale::new(5.0, 5.0, false).fraction(5.0), 0.5);
        assert_eq!([20_000.0, 0.5, 3e-5, 0.0, 1e6].map(tick_text), ["20k", "0.5", "3e-5", "0", "1M"]);
    }

    #[test]
    fn nothing_to_draw_is_a_sentence_and_one_point_is_a_point() {
        let mut curve = StepCurve::default();
        let draw = |curve: &StepCurve| {
            let runs = vec![ChartRun { run: 0, curve, is_exact: false, dots: None, marks: vec![] }];
            Chart { title: "Loss <", caption: "c", axis: ValueAxis::Fitted, runs }.draw()
        };
        assert!(draw(&curve).contains("No step has this value."));
        curve.push(1.0, 2.0);
        let drawn = draw(&curve);
        assert!(drawn.contains("d=\"M500.0,500.0h0\"") && drawn.contains("Loss &lt;") && !drawn.contains("NaN"), "{drawn}");
        assert!(drawn.contains("<b>Loss &lt;</b> c</figcaption>") && drawn.contains("aria-label=\"Loss &lt;: c\""), "{drawn}");
        curve.push(2.0, 200.0);
        let drawn = draw(&curve);
        assert!(drawn.contains("</b> c; logarithmic axis</figcaption>") && drawn.contains("Loss &lt;: c; logarithmic axis\""), "{drawn}");
    }

    #[test]
    fn a_bar_is_whole_and_leaves_out_zeros() {
        let bar = stacked_bar("time", &[("a".into(), 3.0, "3 s".into()), ("b".into(), 0.0, "0 s".into()), ("c".into(), 1.0, "1 s".into())]);
        assert!(
            bar.contains("width=\"75.000%\"") && bar.contains("x=\"75.000%\" y=\"0\" width=\"25.000%\"") && !bar.contains("0 s"),
            "{bar}"
        );
        assert_eq!(stacked_bar("time", &[]), "");
    }
}
