//! Rules for figures. Every rule returns a sentence for each violation.

use crate::config::{Compare, Complete, Fact, Kind, NoWorse, Origin, Paired, Run, Same, Series, Trend};
use crate::error::Result;
use crate::figure::Figure;
use crate::lines;
use crate::numbers::{self, Numbers};
use crate::run::silent_flag;
use crate::series::{self, Curve, SPEED};
use serde_json::Value;

/// Returns all violations of `figure`. If `is_quick`, its sweeps ran with the values for `--kick-the-tires`.
///
/// # Errors
/// Errors of reading any file except `expected.csv`.
pub fn check(figure: &Figure, is_quick: bool) -> Result<Vec<String>> {
    let table = match figure.expected() {
        Err(error) => return Ok(vec![format!("{}: no expected.csv: {error}", figure.id)]),
        Ok(table) => table,
    };
    let mut wrong = if is_quick { Vec::new() } else { crate::plot::faults(figure)? };
    if table.rows.is_empty() {
        wrong.push("expected.csv has no rows".into());
    }
    let config = &figure.config;
    let curves = series::curves(figure)?;
    wrong.extend(data(figure)?);
    wrong.extend(text(figure)?);
    for (series, curve) in config.series.iter().zip(&curves) {
        wrong.extend(drawn(figure, series, curve)?);
    }
    for run in &config.run {
        wrong.extend(sweep(figure, run, is_quick)?);
    }
    for rule in &config.complete {
        wrong.extend(complete(figure, rule)?);
    }
    wrong.extend(config.trend.iter().filter_map(|rule| trend(&curves, rule)));
    wrong.extend(config.compare.iter().filter_map(|rule| explained(&curves, rule, &config.why)));
    if config.pending.is_empty() {
        for rule in &config.fact {
            wrong.extend(fact(figure, rule)?);
        }
        for rule in &config.no_worse {
            wrong.extend(no_worse(figure, rule)?);
        }
        for rule in &config.paired {
            wrong.extend(paired(figure, rule)?);
        }
        for rule in &config.same {
            wrong.extend(same(figure, rule)?);
        }
    }
    Ok(wrong.into_iter().map(|cause| format!("{}: {cause}", figure.id)).collect())
}

/// The verdict's numbers come from lines.
fn text(figure: &Figure) -> Result<Vec<String>> {
    let typed = numbers::typed(&figure.config.why).into_iter();
    let mut wrong: Vec<_> = typed.map(|number| format!("`why` has a typed number of a result: {number}; fill it in from a line")).collect();
    wrong.extend(Numbers::of(figure)?.fill(&figure.config.why).err().map(|cause| format!("`why`: {cause}")));
    Ok(wrong)
}

/// Finds lines of a workload that no series takes. The message names the file and the line's own facts.
fn complete(figure: &Figure, rule: &Complete) -> Result<Vec<String>> {
    let mut taken = Vec::new();
    for series in &figure.config.series {
        taken.extend(series::lines(figure, series)?);
    }
    let is_excepted = |line: &Value| rule.except.values().any(|selection| lines::holds(line, selection));
    let all = figure.select(&rule.files, |line| lines::holds(line, &rule.only) && !is_excepted(line))?;
    let facts = |line: &Value| {
        let fact = |path: &str| lines::field(line, path).map(|value| format!("{path} {}", lines::text(value)));
        ["unix_seconds", "machine.gpu.name", "settings.gpus", "settings.seq_length", SPEED].into_iter().filter_map(fact).collect::<Vec<_>>()
    };
    let text = |line| format!("no series takes a line of {}: {}", rule.workload, facts(line).join(", "));
    Ok(all.iter().filter(|line| !taken.contains(line)).map(text).collect())
}

/// Names and origins of the series that have lines, without the paper's series.
///
/// # Errors
/// Errors of reading files.
pub fn ours(figure: &Figure) -> Result<Vec<(String, Origin)>> {
    let mut names = Vec::new();
    for series in figure.config.series.iter().filter(|series| series.origin != Origin::Paper) {
        if !series::lines(figure, series)?.is_empty() {
            names.push((series.name.clone(), series.origin));
        }
    }
    Ok(names)
}

/// A figure must either have data or name the missing data in `pending`.
fn data(figure: &Figure) -> Result<Option<String>> {
    let has_data = !ours(figure)?.is_empty();
    Ok(match figure.config.pending.as_str() {
        "" if !has_data => Some("no data: no series but the paper's has a line".into()),
        pending if !pending.is_empty() && has_data => Some(format!("it has data, and says that it waits for {pending}")),
        _ => None,
    })
}

/// A series must draw at least one point. If no line has the fields to draw, or if no row of the paper's table matches, `config.toml` is
/// wrong.
fn drawn(figure: &Figure, series: &Series, curve: &Curve) -> Result<Option<String>> {
    let mut lines = series::lines(figure, series)?;
    lines.retain(|line| line.get("refused").is_none());
    let has_points = match figure.config.plot.kind {
        Kind::Timeline => lines.iter().any(|line| lines::field(line, &series.y).is_some()),
        Kind::Bars | Kind::Lines | Kind::Rows => !curve.points.is_empty(),
    };
    let has_lines = !lines.is_empty() || series.origin == Origin::Paper;
    Ok((has_lines && !has_points).then(|| format!("{:?} draws nothing: no line has {:?} and {:?}", series.name, series.x, series.y)))
}

/// Every combination of a sweep with results must have a line that repeats its values.
fn sweep(figure: &Figure, run: &Run, is_quick: bool) -> Result<Vec<String>> {
    let found = figure.lines(std::slice::from_ref(&run.out))?;
    // The scratch folder contains lines only of quick sweeps; lines of all other sweeps are checked against the full values.
    let is_quick = is_quick && figure.output_path(&run.out).exists();
    let silent = |flags| silent_flag(run, flags, &found).map(|flag| (flag, &flags[flag]));
    let combinations = if found.is_empty() { Vec::new() } else { run.combinations(is_quick) };
    let missing = combinations.iter().filter_map(silent);
    Ok(missing.map(|(flag, value)| format!("{}: {flag} {value} never reached a program: no line says so", run.out)).collect())
}

fn by_name<'a>(curves: &'a [Curve], name: &str) -> Option<&'a Curve> {
    curves.iter().find(|curve| curve.name == name).filter(|curve| !curve.points.is_empty())
}

/// Returns the first place at which the order that the paper claims is reversed.
fn trend(curves: &[Curve], rule: &Trend) -> Option<String> {
    let (above, below) = (by_name(curves, &rule.above)?, by_name(curves, &rule.below)?);
    let mut pairs = series::common(above, below).peekable();
    if pairs.peek().is_none() {
        return Some(format!("{:?} and {:?} have no place in common: {}", rule.above, rule.below, rule.claim));
    }
    let (high, low) = pairs.find(|(high, low)| !high.does_not_fit && !low.does_not_fit && high.y < rule.factor * low.y)?;
    let cause = format!("{} is {} and {} is {} at {}", rule.above, high.y, rule.below, low.y, high.label);
    Some(format!("reversed: {}: {cause}", rule.claim))
}

/// The largest relative deviation of our series from the paper's, with its sign and place.
pub fn deviation(curves: &[Curve], rule: &Compare) -> Option<(f64, String)> {
    let pairs = series::common(by_name(curves, &rule.paper)?, by_name(curves, &rule.ours)?);
    let deviations = pairs.map(|(paper, ours)| (ours.y / paper.y - 1.0, ours.label.clone()));
    deviations.max_by(|a, b| a.0.abs().total_cmp(&b.0.abs()))
}

/// A deviation larger than `within` needs an explanation in `why`.
fn explained(curves: &[Curve], rule: &Compare, why: &str) -> Option<String> {
    let (deviation, place) = deviation(curves, rule)?;
    let is_silent = deviation.abs() > rule.within && why.is_empty();
    is_silent.then(|| format!("{} is {:+.0} % off the paper at {place}, and config.toml does not say why", rule.ours, 100.0 * deviation))
}

fn fact(figure: &Figure, rule: &Fact) -> Result<Option<String>> {
    let all = figure.lines(&rule.files)?;
    let values: Vec<_> =
        all.iter().filter(|line| lines::holds(line, &rule.only)).filter_map(|line| lines::field(line, &rule.path)).collect();
    let is_outside = |value: f64| rule.at_least.is_some_and(|low| value < low) || rule.at_most.is_some_and(|high| value > high);
    let has_bounds = rule.at_least.is_some() || rule.at_most.is_some();
    let outside = values.iter().find(|value| has_bounds && value.as_f64().is_none_or(is_outside));
    Ok(match (values.first(), outside) {
        (None, _) => Some(format!("no line has {}: {}", rule.path, rule.claim)),
        (_, Some(value)) => Some(format!("not so: {}: {} is {value}", rule.claim, rule.path)),
        (Some(first), _) if rule.same && values.iter().any(|value| value != first) => {
            Some(format!("not so: {}: {} differs", rule.claim, rule.path))
        }
        _ => None,
    })
}

/// The mean of the runs must not exceed the mean of the reference runs by more than the spread of the reference runs.
fn no_worse(figure: &Figure, rule: &NoWorse) -> Result<Option<String>> {
    let all = figure.lines(&rule.files)?;
    let of = |wanted| all.iter().filter(|line| lines::holds(line, wanted)).filter_map(|line| lines::number(line, &rule.path)).collect();
    let (ours, others): (Vec<f64>, Vec<f64>) = (of(&rule.only), of(&rule.than));
    if ours.len() < 2 || others.len() < 2 {
        return Ok(Some(format!("no two lines of each kind have {}: {}", rule.path, rule.claim)));
    }
    let spread = spread(&others);
    let worse = mean(&ours) - mean(&others);
    let text = || format!("not so: {}: {} is {worse:.5} above, and the spread is {spread:.5}", rule.claim, rule.path);
    Ok((worse > spread).then(text))
}

/// Runs and reference runs of equal seeds: see [`Paired`].
fn paired(figure: &Figure, rule: &Paired) -> Result<Option<String>> {
    let all = figure.lines(&rule.files)?;
    let of = |wanted| all.iter().filter(|line| lines::holds(line, wanted)).collect::<Vec<_>>();
    let (ours, others) = (of(&rule.only), of(&rule.than));
    let value = |line: &Value| lines::number(line, &rule.path);
    let partner = |line: &Value| others.iter().find(|other| lines::field(other, &rule.by) == lines::field(line, &rule.by));
    let pairs: Vec<_> = ours.iter().filter_map(|line| Some((value(line)?, value(partner(line)?)?))).collect();
    if pairs.len() < 2 || pairs.len() != ours.len() || ours.len() != others.len() {
        return Ok(Some(format!("{} of {} runs are paired by {}: {}", pairs.len(), ours.len().max(others.len()), rule.by, rule.claim)));
    }
    let (runs, references): (Vec<_>, Vec<_>) = pairs.iter().copied().unzip();
    let differences: Vec<_> = pairs.iter().map(|(run, reference)| run - reference).collect();
    let bound = mean(&differences) + rule.errors * standard_error(&differences);
    let excess = largest(&runs) - largest(&references);
    Ok(if bound > rule.at_most {
        Some(format!("not so: {}: the mean difference is below {bound:.4} only, and {} is the limit", rule.claim, rule.at_most))
    } else {
        let spread = spread(&references);
        (excess > spread).then(|| format!("not so: {}: the worst run is {excess:.4} above, and the spread is {spread:.4}", rule.claim))
    })
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn largest(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::MIN, f64::max)
}

fn spread(values: &[f64]) -> f64 {
    largest(values) - values.iter().copied().fold(f64::MAX, f64::min)
}

/// Standard error of the mean.
fn standard_error(values: &[f64]) -> f64 {
    let (mean, count) = (mean(values), values.len() as f64);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    (squares / (count - 1.0) / count).sqrt()
}

/// Finds the first line that has no matching line in `like`, or that differs from its matching line.
fn same(figure: &Figure, rule: &Same) -> Result<Option<String>> {
    // Compare only files from the same place: either both are in the scratch folder, or neither is.
    if figure.output_path(&rule.file).exists() != figure.output_path(&rule.like).exists() {
        return Ok(None);
    }
    let lines = |file: &String| figure.lines(std::slice::from_ref(file));
    let (ours, others) = (lines(&rule.file)?, lines(&rule.like)?);
    let agree = |path: &String, a: &Value, b: &Value| lines::field(a, path).is_some() && lines::field(a, path) == lines::field(b, path);
    let differs = |line: &Value| match others.iter().find(|other| rule.by.iter().all(|path| agree(path, line, other))) {
        None => Some("no like".into()),
        Some(like) => rule.paths.iter().find(|path| !agree(path, line, like)).map(|path| format!("another {path}")),
    };
    let found = ours.iter().enumerate().find_map(|(index, line)| differs(line).map(|difference| (index + 1, difference)));
    let claim = &rule.claim;
    Ok(match found {
        _ if ours.is_empty() => Some(format!("{} has no lines: {claim}", rule.file)),
        Some((line, difference)) => Some(format!("not so: {claim}: line {line} of {} has {difference} in {}", rule.file, rule.like)),
        None => None,
    })
}
