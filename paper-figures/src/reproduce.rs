//! `paper-figures reproduce`: runs the sweeps that this machine can run, and gives a verdict on each claim.

use crate::check;
use crate::claim::{self, Claim, Resources};
use crate::config::{Origin, Run};
use crate::error::{Error, Result};
use crate::figure::Figure;
use crate::plot;
use crate::program::Programs;
use crate::run::{self, Choice};
use crate::series;
use std::path::Path;

/// Largest relative difference between a new simulated value and the published one. The simulation is exact, so this is only for the digits
/// of printed numbers.
const EXACT: f64 = 1e-9;
/// Sweeps of a claim that `--kick-the-tires` runs must be this cheap: figures of at most so many minutes.
const QUICK_MINUTES: f64 = 1.0;

/// Options of a reproduction.
pub struct Options<'a> {
    /// Small sizes, and only cheap sweeps.
    pub is_quick: bool,
    /// This machine's resources.
    pub resources: Resources,
    /// Folder of new lines and pictures.
    pub out: &'a Path,
}

/// Verdict on a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// New lines agree with the published ones, and every rule holds.
    Confirmed(String),
    /// No sweep runs here. The published lines agree with the picture and the rules.
    Unchecked(String),
    /// New or published lines violate a rule.
    Failed(String),
}

/// The plan of a reproduction: one line for each claim, before anything runs.
pub fn plan(claims: &[Claim<'_>], options: &Options<'_>) -> String {
    let mut text = String::new();
    let mut minutes = 0.0;
    for claim in claims {
        let chosen = chosen(claim, options);
        let missing = claim.sweeps().find_map(|run| claim::objection(run, options.resources));
        let part = match (chosen.len(), missing) {
            (0, Some(missing)) => format!("published lines only: {missing}"),
            (0, None) => "published lines only: too long for this check".into(),
            (some, missing) => {
                minutes += if options.is_quick { 0.1 } else { claim.figure.config.minutes };
                let rest = missing.map(|missing| format!("; the rest {missing}")).unwrap_or_default();
                format!("{some} of {} sweeps{rest}", claim.sweeps().count())
            }
        };
        text += &format!("{:<4} {:<9} {part}\n", claim.id, claim.figure.id);
    }
    text + &format!("about {} min\n", f64::max(minutes.ceil(), 1.0))
}

/// The sweeps of a claim that run.
fn chosen<'a>(claim: &'a Claim<'_>, options: &Options<'_>) -> Vec<&'a Run> {
    let is_cheap = |run: &&Run| !options.is_quick || run.quick.is_some() && claim.figure.config.minutes <= QUICK_MINUTES;
    claim.possible(options.resources).filter(is_cheap).collect()
}

/// Runs the sweeps of `claim` into the folder of `options`, and judges their lines.
///
/// # Errors
/// Errors of reading or writing files. An error of a program is a verdict.
pub fn judge(claim: &Claim<'_>, programs: &Programs, options: &Options<'_>) -> Result<Outcome> {
    let sweeps = chosen(claim, options);
    let mut figure = claim.figure.clone().with_scratch(options.out);
    figure.config.run = sweeps.iter().map(|&run| run.clone()).collect();
    let choice = Choice { is_quick: options.is_quick, with: vec!["gpu".into(), "builds".into()], only: None };
    match run::run(&figure, programs, &choice) {
        Err(Error::Program { command, cause }) => return Ok(Outcome::Failed(format!("{command}: {cause}"))),
        outcome => outcome?,
    };
    let mut wrong = Vec::new();
    if !sweeps.is_empty() {
        plot::write(&figure)?;
        wrong.extend(differing(claim.figure, &figure)?);
    }
    // Lines of a small run are too few for the rules of the full one.
    let judged = if options.is_quick { claim.figure.clone() } else { figure };
    wrong.extend(check::check(&judged, false)?);
    let all = claim.sweeps().count();
    Ok(match (wrong.first(), sweeps.len()) {
        (Some(first), _) => Outcome::Failed(first.clone()),
        (None, 0) => Outcome::Unchecked("published lines agree with picture and rules; no sweep runs here".into()),
        (None, some) => Outcome::Confirmed(format!("{some} of {all} sweeps run again; every rule holds")),
    })
}

/// The first computed or simulated value that is not the published one.
fn differing(published: &Figure, new: &Figure) -> Result<Option<String>> {
    for (old, new) in series::curves(published)?.iter().zip(series::curves(new)?) {
        let is_exact = matches!(old.origin, Origin::Model | Origin::Simulated);
        let pair = series::common(old, &new).find(|(old, new)| is_exact && (new.y - old.y).abs() > EXACT * old.y.abs());
        if let Some((old_point, new_point)) = pair {
            let (name, place) = (&old.name, &old_point.label);
            return Ok(Some(format!("{name} at {place} is {}, and {} was published", new_point.y, old_point.y)));
        }
    }
    Ok(None)
}

/// The table of verdicts, and whether none of them is a failure.
pub fn report(verdicts: &[(String, String, Outcome)]) -> (String, bool) {
    let word = |outcome: &Outcome| match outcome {
        Outcome::Confirmed(text) => ("confirmed", text.clone()),
        Outcome::Unchecked(text) => ("not run", text.clone()),
        Outcome::Failed(text) => ("FAILED", text.clone()),
    };
    let row = |(id, figure, outcome): &(String, String, Outcome)| {
        let (word, text) = word(outcome);
        format!("{id:<4} {figure:<9} {word:<10} {text}\n")
    };
    let count = |is: fn(&Outcome) -> bool| verdicts.iter().filter(|(_, _, outcome)| is(outcome)).count();
    let [confirmed, unchecked, failed] = [
        count(|outcome| matches!(outcome, Outcome::Confirmed(_))),
        count(|outcome| matches!(outcome, Outcome::Unchecked(_))),
        count(|outcome| matches!(outcome, Outcome::Failed(_))),
    ];
    let rows: String = verdicts.iter().map(row).collect();
    (format!("{rows}{confirmed} confirmed, {unchecked} not run here, {failed} failed\n"), failed == 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_in_the_table_and_in_the_status() {
        let verdict = |id: &str, outcome| (id.to_owned(), "fig-06".to_owned(), outcome);
        let good = [verdict("C1", Outcome::Confirmed("a".into())), verdict("C2", Outcome::Unchecked("b".into()))];
        let (text, is_good) = report(&good);
        assert!(is_good && text.ends_with("1 confirmed, 1 not run here, 0 failed\n"), "{text}");
        assert!(text.starts_with("C1   fig-06    confirmed  a\nC2   fig-06    not run    b\n"), "{text}");
        let (text, is_good) = report(&[verdict("C1", Outcome::Failed("c".into()))]);
        assert!(!is_good && text.contains("FAILED     c"), "{text}");
    }
}
