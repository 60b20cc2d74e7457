//! Sweeps: one call for each combination of values, and a check that each value reached the program.

use crate::config::{Flags, Run};
use crate::error::{Error, Result};
use crate::figure::Figure;
use crate::lines;
use crate::program::Programs;
use crate::unfinished::Unfinished;
use serde_json::{Value, json};

/// Selection of sweeps.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// Run only sweeps with values for `--kick-the-tires`, with these values.
    pub is_quick: bool,
    /// Resources of this machine. Sweeps that need other resources are skipped.
    pub with: Vec<String>,
    /// Run only sweeps that need this resource.
    pub only: Option<String>,
}

impl Choice {
    /// Reason to skip a sweep.
    fn objection(&self, run: &Run) -> Option<String> {
        if self.is_quick && run.quick.is_none() {
            return Some("has no quick values".into());
        }
        if let Some(only) = &self.only {
            return (run.needs != *only).then(|| format!("does not need {only}"));
        }
        (!run.needs.is_empty() && !self.with.contains(&run.needs)).then(|| format!("needs {}", run.needs))
    }
}

/// Runs the sweeps of `figure` and writes their lines after the last one. Returns a sentence for each sweep. Reuses the measurements of an
/// unfinished run.
///
/// # Errors
/// An error if a program fails or if no line of its output repeats the values of its flags.
pub fn run(figure: &Figure, programs: &Programs, choice: &Choice) -> Result<Vec<String>> {
    let mut unfinished = Unfinished::open(figure.output_path("unfinished.jsonl"))?;
    let (mut message, mut results) = (Vec::new(), Vec::new());
    for run in &figure.config.run {
        if let Some(objection) = choice.objection(run) {
            message.push(format!("{}: {} {objection}", figure.id, run.out));
            continue;
        }
        let combinations = run.combinations(choice.is_quick);
        let lines = sweep(figure, run, &combinations, programs, &mut unfinished)?;
        message.push(format!("{}: {} of {} in {}", figure.id, plural(lines.len(), "line"), plural(combinations.len(), "call"), run.out));
        results.push((run, lines));
    }
    for (run, lines) in results {
        lines::write(&figure.output_path(&run.out), &lines, run.append && figure.scratch.is_none())?;
    }
    unfinished.end()?;
    Ok(message)
}

fn plural(number: usize, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

fn sweep(figure: &Figure, run: &Run, combinations: &[Flags], programs: &Programs, unfinished: &mut Unfinished) -> Result<Vec<Value>> {
    let mut all = Vec::new();
    for flags in combinations {
        if let Some(lines) = unfinished.find(run.program, flags) {
            all.extend(lines);
            continue;
        }
        let lines = lines_or_refusal(run, flags, programs)?;
        if let Some(flag) = silent_flag(run, flags, &lines) {
            let value = lines::plain(&flags[flag]);
            let cause = format!("no line says {flag} {value} at {}", run.echo[flag]);
            return Err(Error::Program { command: format!("{:?} for {}", run.program, figure.id), cause });
        }
        unfinished.add(run.program, flags, &lines)?;
        all.extend(lines);
    }
    Ok(all)
}

/// The output lines of the program, or one line with its refusal.
fn lines_or_refusal(run: &Run, flags: &Flags, programs: &Programs) -> Result<Vec<Value>> {
    let is_refusal = |cause: &str| run.refusal.as_ref().is_some_and(|words| cause.contains(words));
    match programs.lines(run.program, flags) {
        Err(Error::Program { cause, .. }) if is_refusal(&cause) => Ok(vec![json!({"refused": cause, "flags": flags})]),
        lines => lines,
    }
}

/// A flag whose value no line repeats; `None` if one line repeats all values. The line of a refusal contains the flags themselves.
pub fn silent_flag<'a>(run: &Run, flags: &'a Flags, lines: &[Value]) -> Option<&'a String> {
    let echo = |line: &Value, flag: &String| match line.get("refused") {
        Some(_) => line["flags"].get(flag).cloned(),
        None => lines::field(line, &run.echo[flag]).cloned(),
    };
    let equals = |line: &Value, flag: &String| echo(line, flag).is_some_and(|found| lines::equals(&found, &flags[flag]));
    let differing = |line: &Value| flags.keys().filter(|flag| !equals(line, flag)).collect::<Vec<_>>();
    let closest = lines.iter().map(differing).min_by_key(Vec::len);
    closest.map_or_else(|| flags.keys().next(), |differing| differing.first().copied())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use serde_json::json;

    #[test]
    fn a_value_that_no_line_repeats_is_found() {
        let text = "minutes = 0\n[plot]\nkind = \"bars\"\nx = \"x\"\n[[run]]\nprogram = \"bench-step\"\nout = \"a\"\nflags = { a = 1, b = \"x\" }\necho = { a = \"s.a\", b = \"b\" }\n";
        let run = &Config::parse(text).unwrap().run[0];
        let flags = &run.combinations(false)[0];
        let differing = |lines: &[Value]| silent_flag(run, flags, lines).map(String::as_str);
        assert_eq!(differing(&[json!({"other": 1}), json!({"s": {"a": 1.0}, "b": "x"})]), None);
        assert_eq!(differing(&[json!({"s": {"a": 2}, "b": "x"}), json!({})]), Some("a"));
        // Values from two different lines do not count.
        assert_eq!(differing(&[json!({"s": {"a": 1}}), json!({"b": "x"})]), Some("b"));
        assert_eq!(differing(&[]), Some("a"));
        assert_eq!(differing(&[json!({"refused": "too large", "flags": {"a": 1, "b": "x"}})]), None);
    }
}
