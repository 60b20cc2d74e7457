//! Numbers in texts. A text holds an expression in braces, and the program fills in its value from the lines.
//!
//! `{[w1@W1] / [z2@W1] | 1}` is the quotient of the series `w1` and `z2` in the category `W1`, with one digit behind the point. `[name]` is a
//! number of `config.toml`. `[max w1]`, `[min w1]`, `[mean w1]`, `[sum w1]` and `[count w1]` combine all points of a series, and
//! `[max w1/z2]` the quotients of two series. Operators are `+ - * /`, with parentheses.
//! Numbers of results that are typed, and not filled in, are errors.

use crate::error::Result;
use crate::figure::Figure;
use crate::lines;
use crate::series::{self, Curve};
use std::collections::BTreeMap;

/// Marks around a number of a page.
const BEGIN: &str = "<!--=";
const END: &str = "<!--/-->";
/// Words behind a number that make it a result.
const UNITS: [&str; 10] = ["%", "times", "TFLOP/s", "GB/s", "ms", "s", "GiB/s", "tokens/s", "blocks", "seconds"];
/// Words between the numbers of one list.
const JOINING: [&str; 6] = ["to", "and", "or", "at", "of", "from"];

/// Numbers of a figure that texts can use.
pub struct Numbers {
    curves: BTreeMap<String, Curve>,
    named: BTreeMap<String, Vec<f64>>,
}

impl Numbers {
    /// The numbers of `figure`.
    ///
    /// # Errors
    /// Errors of reading data.
    pub fn of(figure: &Figure) -> Result<Self> {
        let series = figure.config.series.iter().zip(series::curves(figure)?);
        let curves = series.filter(|(series, _)| !series.id.is_empty()).map(|(series, curve)| (series.id.clone(), curve)).collect();
        let mut named = BTreeMap::new();
        for (name, number) in &figure.config.number {
            let all = figure.select(&number.files, |line| lines::holds(line, &number.only))?;
            let value = |line| match lines::field(line, &number.path)? {
                serde_json::Value::Array(values) => Some(values.len() as f64),
                value => value.as_f64(),
            };
            named.insert(name.clone(), all.iter().filter_map(value).collect());
        }
        Ok(Self { curves, named })
    }

    /// Fills in the expressions in `text`.
    ///
    /// # Errors
    /// A sentence about the first expression that has no value.
    pub fn fill(&self, text: &str) -> std::result::Result<String, String> {
        let (mut out, mut rest) = (String::new(), text);
        while let Some((before, behind)) = rest.split_once('{') {
            let (expression, after) = behind.split_once('}').ok_or_else(|| format!("no brace closes {behind:?}"))?;
            out += before;
            out += &self.value(expression).map_err(|cause| format!("{{{expression}}}: {cause}"))?;
            rest = after;
        }
        Ok(out + rest)
    }

    /// Fills in the numbers of a page: each stands between `<!--= expression -->` and `<!--/-->`.
    ///
    /// # Errors
    /// A sentence about the first expression that has no value or no end.
    pub fn page(&self, text: &str) -> std::result::Result<String, String> {
        let (mut out, mut rest) = (String::new(), text);
        while let Some((before, behind)) = rest.split_once(BEGIN) {
            let parts = behind.split_once("-->").and_then(|(expression, after)| Some((expression, after.split_once(END)?.1)));
            let (expression, after) = parts.ok_or_else(|| format!("{BEGIN} without {END}"))?;
            let value = self.value(expression).map_err(|cause| format!("{expression}: {cause}"))?;
            out += &format!("{before}{BEGIN}{expression}-->{value}{END}");
            rest = after;
        }
        Ok(out + rest)
    }

    fn value(&self, expression: &str) -> std::result::Result<String, String> {
        let (formula, digits) = expression.rsplit_once('|').unwrap_or((expression, "0"));
        let digits: usize = digits.trim().parse().map_err(|_| format!("{:?} is no number of digits", digits.trim()))?;
        let mut parser = Parser { numbers: self, rest: formula.trim() };
        let value = parser.sum()?;
        match parser.rest {
            "" if value.is_finite() => Ok(grouped(&format!("{value:.digits$}"))),
            "" => Err("no finite value".into()),
            rest => Err(format!("{rest:?} is too much")),
        }
    }

    fn reference(&self, name: &str) -> std::result::Result<f64, String> {
        let unknown = || format!("no series and no number is named {name:?}");
        if let Some((id, label)) = name.split_once('@') {
            let curve = self.curves.get(id).ok_or_else(unknown)?;
            let point = curve.points.iter().find(|point| point.label == label && !point.does_not_fit);
            return point.map(|point| point.y).ok_or_else(|| format!("{:?} has no point at {label:?}", curve.name));
        }
        let (fold, name) = name.split_once(' ').unwrap_or(("last", name));
        let values: Vec<f64> = self.values(name).ok_or_else(unknown)?;
        let last = *values.last().ok_or_else(|| format!("no line has {name:?}"))?;
        match fold {
            "last" => Ok(last),
            "min" => Ok(values.into_iter().fold(last, f64::min)),
            "max" => Ok(values.into_iter().fold(last, f64::max)),
            "sum" => Ok(values.into_iter().sum()),
            "count" => Ok(values.len() as f64),
            "mean" => Ok(values.iter().sum::<f64>() / values.len() as f64),
            fold => Err(format!("{fold:?} combines nothing: min, max, mean, sum, count")),
        }
    }
}

impl Numbers {
    /// All points of a series, all lines of a number, or for `a/b` the quotients of two series in each category that both have.
    fn values(&self, name: &str) -> Option<Vec<f64>> {
        if let Some((above, below)) = name.split_once('/') {
            let pairs = series::common(self.curves.get(above)?, self.curves.get(below)?);
            return Some(pairs.map(|(above, below)| above.y / below.y).collect());
        }
        let ys = self.curves.get(name).map(|curve| curve.points.iter().map(|point| point.y).collect());
        ys.or_else(|| self.named.get(name).cloned())
    }
}

/// A formula that is being read.
struct Parser<'a> {
    numbers: &'a Numbers,
    rest: &'a str,
}

impl Parser<'_> {
    fn eat(&mut self, word: char) -> bool {
        let found = self.rest.trim_start().strip_prefix(word);
        self.rest = found.unwrap_or(self.rest);
        found.is_some()
    }

    fn sum(&mut self) -> std::result::Result<f64, String> {
        let mut value = self.product()?;
        loop {
            if self.eat('+') {
                value += self.product()?;
            } else if self.eat('-') {
                value -= self.product()?;
            } else {
                self.rest = self.rest.trim_start();
                return Ok(value);
            }
        }
    }

    fn product(&mut self) -> std::result::Result<f64, String> {
        let mut value = self.atom()?;
        loop {
            if self.eat('*') {
                value *= self.atom()?;
            } else if self.eat('/') {
                value /= self.atom()?;
            } else {
                return Ok(value);
            }
        }
    }

    fn atom(&mut self) -> std::result::Result<f64, String> {
        if self.eat('(') {
            let value = self.sum()?;
            return if self.eat(')') { Ok(value) } else { Err("a parenthesis is not closed".into()) };
        }
        if self.eat('[') {
            let (name, rest) = self.rest.split_once(']').ok_or("a bracket is not closed")?;
            self.rest = rest;
            return self.numbers.reference(name);
        }
        let text = self.rest.trim_start();
        let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        self.rest = &text[end..];
        text[..end].parse().map_err(|_| format!("a number or a name in brackets is expected at {text:?}"))
    }
}

/// A number with commas between groups of three digits, from ten thousand on.
fn grouped(number: &str) -> String {
    let (whole, fraction) = number.split_once('.').map_or((number, ""), |(whole, _)| (whole, &number[whole.len()..]));
    if whole.trim_start_matches('-').len() < 5 {
        return number.into();
    }
    let groups: Vec<&str> = whole.as_bytes().rchunks(3).rev().filter_map(|group| std::str::from_utf8(group).ok()).collect();
    format!("{}{fraction}", groups.join(","))
}

/// Numbers of results that `text` holds outside braces. A number is one of a result if a unit of results follows it or its list.
pub fn typed(text: &str) -> Vec<String> {
    let mut plain = String::new();
    let mut rest = text;
    while let Some((before, behind)) = rest.split_once('{') {
        plain += before;
        plain += "_";
        rest = behind.split_once('}').map_or("", |(_, after)| after);
    }
    plain += rest;
    let plain =
        plain.split('(').map(|part| part.split_once(')').filter(|(inner, _)| inner.contains("paper")).map_or(part, |(_, after)| after));
    let plain = plain.collect::<Vec<_>>().join(" ");
    let words: Vec<&str> = plain.split_whitespace().map(|word| word.trim_matches(|c: char| ",;:.()".contains(c))).collect();
    let is_number = |word: &str| word.starts_with(|c: char| c.is_ascii_digit()) && word.parse::<f64>().is_ok();
    let is_result = |index: usize| {
        let after = words[index + 1..].iter().find(|word| !is_number(word) && !JOINING.contains(word));
        after.is_some_and(|word| UNITS.contains(word))
    };
    (0..words.len()).filter(|&index| is_number(words[index]) && is_result(index)).map(|index| words[index].to_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Marker, Origin};
    use crate::series::Point;

    fn numbers() -> Numbers {
        let point = |(label, y): (&str, f64)| Point { label: label.into(), x: None, y, spread: None, does_not_fit: false };
        let curve = |name: &str, points: &[(&str, f64)]| Curve {
            name: name.into(),
            origin: Origin::Measured,
            scattered: false,
            colour: 0,
            shade: 1.0,
            marker: Marker::Circle,
            points: points.iter().copied().map(point).collect(),
        };
        let curves = [("w", curve("ours", &[("5B", 519.0), ("H200: W1", 364.5)])), ("z", curve("theirs", &[("5B", 158.0)]))];
        Numbers {
            curves: curves.into_iter().map(|(id, curve)| (id.into(), curve)).collect(),
            named: BTreeMap::from([("tokens".into(), vec![1.0, 458_752.0]), ("none".into(), Vec::new())]),
        }
    }

    #[test]
    fn expressions_become_numbers() {
        let fill = |text: &str| numbers().fill(text).unwrap();
        assert_eq!(fill("{[w@5B] / [z@5B] | 1} times"), "3.3 times");
        assert_eq!(fill("{100 * (1 - [w@H200: W1] / [w@5B])} %, {[tokens]}"), "30 %, 458,752");
        assert_eq!(fill("{[min w]} to {[max w]}, {[sum tokens] - 2 | 1}, {[count w]}, {[mean w]}"), "364 to 519, 458,751.0, 2, 442");
        assert_eq!(fill("{[max w/z] | 2}"), "3.28");
        assert_eq!(fill("nothing to fill in"), "nothing to fill in");
    }

    #[test]
    fn expressions_without_a_value_are_errors() {
        let cause = |text: &str| numbers().fill(text).unwrap_err();
        assert!(cause("{[w@7B]}").contains("\"ours\" has no point at \"7B\""));
        assert!(cause("{[q@5B]}").contains("no series and no number is named \"q@5B\""));
        assert!(cause("{[none]}").contains("no line has \"none\""));
        assert!(cause("{[w@5B] / ([tokens] - [tokens])}").contains("no finite value"));
        for broken in ["{", "{[w@5B}", "{(1}", "{1 2}", "{x}", "{1 | x}", "{[avg w]}", "{}"] {
            assert!(!cause(broken).is_empty(), "{broken}");
        }
    }

    #[test]
    fn numbers_of_a_page_are_replaced() {
        let page = |text: &str| numbers().page(text);
        let text = "ours <!--= [w@5B] -->1<!--/--> of <!--= [w@5B] / [z@5B] | 1 --><!--/-->.";
        assert_eq!(page(text).unwrap(), "ours <!--= [w@5B] -->519<!--/--> of <!--= [w@5B] / [z@5B] | 1 -->3.3<!--/-->.");
        assert!(page("<!--= [w@7B] -->1<!--/-->").unwrap_err().contains("no point"));
        assert!(page("<!--= [w@5B] -->1").unwrap_err().contains("without"));
    }

    #[test]
    fn typed_results_are_found() {
        assert_eq!(typed("it gains 2.0 times at 2B, 3B, and 1.8 at 20B"), ["2.0"]);
        assert_eq!(typed("43, 218 and 209 TFLOP/s on 2 GPUs"), ["43", "218", "209"]);
        assert_eq!(typed("{[w@5B]} TFLOP/s, with 4 x 4096 tokens, and 16 cores"), [""; 0]);
        assert_eq!(typed("1.6 times (paper: 2.5 times at 15B)"), ["1.6"]);
        assert_eq!(typed("it takes 881 ms;"), ["881"]);
    }
}
