//! Sweeps: a call for each combination of values, and the proof that each value reached the program.

use crate::config::Run;
use crate::error::{Error, Result};
use crate::figure::Figure;
use crate::lines;
use crate::program::{Flags, Programs};
use serde_json::{Value, json};

/// Which sweeps are run.
#[derive(Clone, Debug)]
pub struct Choice {
    /// With the values for `--kick-the-tires`, and only sweeps that have some.
    pub is_quick: bool,
    /// What this machine has: sweeps that need something else are left out.
    pub with: Vec<String>,
}

/// Runs the sweeps of `figure` and writes their lines; a sentence for each sweep.
///
/// # Errors
/// When a program fails, or prints no line that says what it was asked for. Lines of the sweeps before are kept.
pub fn run(figure: &Figure, programs: &Programs, choice: &Choice) -> Result<Vec<String>> {
    figure.config.run.iter().map(|run| sweep(figure, run, programs, choice)).collect()
}

fn sweep(figure: &Figure, run: &Run, programs: &Programs, choice: &Choice) -> Result<String> {
    if choice.is_quick && run.quick.is_none() {
        return Ok(format!("{}: {} has no quick values", figure.id, run.out));
    }
    if !run.needs.is_empty() && !choice.with.contains(&run.needs) {
        return Ok(format!("{}: {} needs {}", figure.id, run.out, run.needs));
    }
    let combinations = run.combinations(choice.is_quick);
    let mut all = Vec::new();
    for flags in &combinations {
        let lines = lines_or_refusal(run, flags, programs)?;
        if let Some(flag) = silent_flag(run, flags, &lines) {
            let value = lines::plain(&flags[flag]);
            let cause = format!("no line says {flag} {value} at {}", run.echo[flag]);
            return Err(Error::Program { command: format!("{:?} for {}", run.program, figure.id), cause });
        }
        all.extend(lines);
    }
    lines::write(&figure.output_path(&run.out), &all, run.append && figure.scratch.is_none())?;
    Ok(format!("{}: {} lines of {} calls in {}", figure.id, all.len(), combinations.len(), run.out))
}

/// What the program prints, or one line with its refusal.
fn lines_or_refusal(run: &Run, flags: &Flags, programs: &Programs) -> Result<Vec<Value>> {
    let is_refusal = |cause: &str| run.refusal.as_ref().is_some_and(|words| cause.contains(words));
    match programs.lines(run.program, flags) {
        Err(Error::Program { cause, .. }) if is_refusal(&cause) => Ok(vec![json!({"refused": cause, "flags": flags})]),
        lines => lines,
    }
}

/// A flag whose value no line repeats; `None` when one line repeats them all. A refusal holds the flags themselves.
pub fn silent_flag<'a>(run: &Run, flags: &'a Flags, lines: &[Value]) -> Option<&'a String> {
    let echo = |line: &Value, flag: &String| match line.get("refused") {
        Some(_) => line["flags"].get(flag).cloned(),
        None => lines::field(line, &run.echo[flag]).cloned(),
    };
    let says = |line: &Value, flag: &String| echo(line, flag).is_some_and(|found| lines::says(&found, &flags[flag]));
    let silent = |line: &Value| flags.keys().filter(|flag| !says(line, flag)).collect::<Vec<_>>();
    let closest = lines.iter().map(silent).min_by_key(Vec::len);
    closest.map_or_else(|| flags.keys().next(), |silent| silent.first().copied())
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
        let silent = |lines: &[Value]| silent_flag(run, flags, lines).map(String::as_str);
        assert_eq!(silent(&[json!({"other": 1}), json!({"s": {"a": 1.0}, "b": "x"})]), None);
        assert_eq!(silent(&[json!({"s": {"a": 2}, "b": "x"}), json!({})]), Some("a"));
        // Values from two different lines are no proof.
        assert_eq!(silent(&[json!({"s": {"a": 1}}), json!({"b": "x"})]), Some("b"));
        assert_eq!(silent(&[]), Some("a"));
        assert_eq!(silent(&[json!({"refused": "too large", "flags": {"a": 1, "b": "x"}})]), None);
    }
}
