//! `config.toml` of a figure: the plots, the checks, and the sweeps that produce its lines.

use crate::system::System;
use crate::workload::{FILE, Pick, Workload, Workloads};
use serde::Deserialize;
use std::collections::BTreeMap;

/// Values by flag.
pub type Flags = BTreeMap<String, toml::Value>;

/// Configuration of a figure.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Minutes that `run` needs for all sweeps that need no GPU.
    pub minutes: f64,
    /// Findings: the reason for deviations from the paper's numbers, or the comparison that replaces them.
    #[serde(default)]
    pub why: String,
    /// The claim does not hold in our data. For figures without a series to compare with the paper's.
    #[serde(default)]
    pub deviates: bool,
    /// The figure is not in the paper, but was drawn for this repository.
    #[serde(default)]
    pub own: bool,
    /// The missing data, if no sweep has run yet.
    #[serde(default)]
    pub pending: String,
    /// Hardware that produced our lines.
    #[serde(default)]
    pub hardware: String,
    /// Plot of the figure, or its first frame.
    pub plot: Plot,
    /// Further frames below that of `plot`, each with its own axes and legend.
    #[serde(default)]
    pub frame: Vec<Plot>,
    /// The series of the figure.
    #[serde(default)]
    pub series: Vec<Series>,
    /// Comparisons between series of ours and of the paper.
    #[serde(default)]
    pub compare: Vec<Compare>,
    /// Orders between series that the paper claims.
    #[serde(default)]
    pub trend: Vec<Trend>,
    /// Bounds on single fields of lines.
    #[serde(default)]
    pub fact: Vec<Fact>,
    /// Runs whose final result must be about as good as that of reference runs.
    #[serde(default)]
    pub no_worse: Vec<NoWorse>,
    /// Runs that are compared with the reference run of their own seed.
    #[serde(default)]
    pub paired: Vec<Paired>,
    /// Files whose lines must agree.
    #[serde(default)]
    pub same: Vec<Same>,
    /// Workloads of which a series must take every line.
    #[serde(default)]
    pub complete: Vec<Complete>,
    /// Numbers that `why` uses by name.
    #[serde(default)]
    pub number: BTreeMap<String, Number>,
    /// The sweeps.
    #[serde(default)]
    pub run: Vec<Run>,
}

/// Kind and axes of a plot.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Plot {
    /// Name of the frame, for figures with several frames. A series names its frame.
    #[serde(default)]
    pub name: String,
    /// Kind of the plot.
    pub kind: Kind,
    /// Name and unit of the horizontal axis.
    pub x: String,
    /// Name and unit of the vertical axis, with its counting convention.
    #[serde(default)]
    pub y: String,
    /// Logarithmic horizontal axis (lines only).
    #[serde(default)]
    pub log_x: bool,
    /// Logarithmic vertical axis.
    #[serde(default)]
    pub log_y: bool,
    /// Upper end of a linear vertical axis; the default depends on the highest value.
    #[serde(default)]
    pub y_max: Option<f64>,
    /// The categories of bars are compared with each other: settings of one workload. Otherwise the bars within a category are compared.
    #[serde(default)]
    pub across: bool,
    /// All panels of a timeline have the same time scale, so that their lengths are comparable.
    #[serde(default)]
    pub one_scale: bool,
}

/// The representation of points.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A bar in the group of its category. Groups are in order of appearance.
    Bars,
    /// A marker, connected to the previous one.
    Lines,
    /// A horizontal bar for each series, with its name on the left and its x as a second number on the right.
    Rows,
    /// A panel of lanes. The series is one line that contains a timeline.
    Timeline,
}

/// Origin of a series' numbers; each origin has its own drawing style.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// Printed in the paper or read off its figures; from `expected.csv`.
    Paper,
    /// A formula.
    Model,
    /// Simulation by the engine.
    Simulated,
    /// A real run.
    Measured,
}

/// Shape of the markers of a curve.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Marker {
    /// The default, except for simulated series.
    Circle,
    /// The default of simulated series.
    Square,
    /// For a second series with the same colour and origin.
    Triangle,
    /// For a third series with the same colour and origin.
    Diamond,
}

/// One curve, one colour of bars, or one panel.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Series {
    /// Unique name in the legend, including the machine.
    pub name: String,
    /// Short unique name for references in texts.
    #[serde(default)]
    pub id: String,
    /// Workloads of `workloads.toml`, in place of files.
    #[serde(default)]
    pub workloads: Vec<String>,
    /// The workloads that `workloads` names.
    #[serde(skip)]
    pub sources: Vec<Workload>,
    /// The system that was run. It decides the colour.
    #[serde(default)]
    pub system: Option<System>,
    /// Fraction of the system's colour, for several settings of one system in a frame.
    #[serde(default = "one")]
    pub shade: f64,
    /// Selects one of several lines in a category.
    #[serde(default)]
    pub pick: Option<Pick>,
    /// Selects the lines measured from this time on, in seconds of Unix time.
    #[serde(default)]
    pub since: f64,
    /// Draws the range of a line's steps, by its `step_ms`.
    #[serde(default)]
    pub range_of_steps: bool,
    /// Origin of the numbers.
    pub origin: Origin,
    /// Name of the series' frame; by default the frame of `plot`.
    #[serde(default)]
    pub frame: String,
    /// JSON lines files, relative to the figure's folder; a `*` in a file's name stands for any characters. Without files, the series uses
    /// `expected.csv`.
    #[serde(default)]
    pub files: Vec<String>,
    /// Selects the lines (or rows) that have these values at these paths (or columns).
    #[serde(default, rename = "where")]
    pub only: BTreeMap<String, toml::Value>,
    /// Selects the lines in which these numbers are positive.
    #[serde(default)]
    pub positive: Vec<String>,
    /// Path (or column) of the point's x.
    #[serde(default)]
    pub x: String,
    /// Path (or column) of the point's y, or of the timeline's lanes.
    pub y: String,
    /// Path (or column) of a divisor of y.
    #[serde(default)]
    pub over: Option<String>,
    /// Factor that converts x to the unit of the axis.
    #[serde(default = "one")]
    pub x_scale: f64,
    /// Factor that converts y to the unit of the axis.
    #[serde(default = "one")]
    pub y_scale: f64,
    /// Constant added after scaling. With a factor of -100, a constant of 100 converts a busy fraction to an idle percentage.
    #[serde(default)]
    pub y_offset: f64,
    /// Count attention in full, as the paper does. The FLOP rates in lines count causal attention.
    #[serde(default)]
    pub full_attention: bool,
    /// Replace y by the number of lines so far in which y is positive.
    #[serde(default)]
    pub counted: bool,
    /// Path (or column) of the category, which matches points of two series; the default is x. Several paths, separated by spaces, make one
    /// category of all their values.
    #[serde(default)]
    pub label: String,
    /// Names of categories, by the values in the lines.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Category of the total; all values are converted to percent of it.
    #[serde(default)]
    pub whole: Option<String>,
    /// Draw markers only.
    #[serde(default)]
    pub scattered: bool,
    /// Index of the colour, for series that differ by something else than the system. The default is the index of the series.
    #[serde(default)]
    pub colour: Option<usize>,
    /// Shape of the markers; the default depends on the origin.
    #[serde(default)]
    pub marker: Option<Marker>,
}

fn one() -> f64 {
    1.0
}

/// A comparison: the largest deviation of our series from the paper's that counts as reproduced.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Compare {
    /// Name of the paper's series.
    pub paper: String,
    /// Name of our series.
    pub ours: String,
    /// Allowed relative deviation at every point; 0.1 is 10 %.
    pub within: f64,
}

/// An order that the paper claims. The check fails if the order is reversed at a place that both series have.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Trend {
    /// The claim in words.
    pub claim: String,
    /// Name of the series with higher values.
    pub above: String,
    /// Name of the series with lower values.
    pub below: String,
    /// Minimum factor between both series.
    #[serde(default = "one")]
    pub factor: f64,
}

/// A condition on a field of lines.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Fact {
    /// The claim in words.
    pub claim: String,
    /// Files of JSON lines.
    pub files: Vec<String>,
    /// Selects the lines; at least one must match.
    #[serde(default, rename = "where")]
    pub only: BTreeMap<String, toml::Value>,
    /// Path of the field.
    pub path: String,
    /// Lower bound.
    #[serde(default)]
    pub at_least: Option<f64>,
    /// Upper bound.
    #[serde(default)]
    pub at_most: Option<f64>,
    /// All lines must have the same value.
    #[serde(default)]
    pub same: bool,
}

/// Runs with several seeds whose mean must not exceed the mean of reference runs by more than the spread of the reference runs.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct NoWorse {
    /// The claim in words.
    pub claim: String,
    /// Files of JSON lines.
    pub files: Vec<String>,
    /// Selects the runs.
    #[serde(rename = "where")]
    pub only: BTreeMap<String, toml::Value>,
    /// Selects the reference runs.
    pub than: BTreeMap<String, toml::Value>,
    /// Path of the field; lower is better.
    pub path: String,
}

/// Runs compared with reference runs in pairs: the mean of the differences plus `errors` standard errors must not exceed `at_most`, and no
/// run may exceed the worst reference run by more than the spread of the reference runs.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Paired {
    /// The claim in words.
    pub claim: String,
    /// Files of JSON lines.
    pub files: Vec<String>,
    /// Selects the runs.
    #[serde(rename = "where")]
    pub only: BTreeMap<String, toml::Value>,
    /// Selects the reference runs.
    pub than: BTreeMap<String, toml::Value>,
    /// Path of the field that both runs of a pair share.
    pub by: String,
    /// Path of the compared field; lower is better.
    pub path: String,
    /// Number of standard errors: the quantile of Student's distribution for the number of pairs.
    pub errors: f64,
    /// Bound of the mean difference plus its standard errors.
    pub at_most: f64,
}

/// Two ways to compute the same result: each line of `file` must agree with its matching line in `like`.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Same {
    /// The claim in words.
    pub claim: String,
    /// File of JSON lines.
    pub file: String,
    /// The file to compare with.
    pub like: String,
    /// Fields that match two lines.
    pub by: Vec<String>,
    /// Fields that must be equal in matching lines, floats to the bit.
    pub paths: Vec<String>,
}

/// A workload of which every measured line is drawn, so that no newer or better measurement is left out unseen.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Complete {
    /// The workload in words.
    pub workload: String,
    /// Files of JSON lines.
    pub files: Vec<String>,
    /// Selects the lines of the workload.
    #[serde(rename = "where")]
    pub only: BTreeMap<String, toml::Value>,
    /// Selections of lines that are not drawn, by the reason.
    #[serde(default)]
    pub except: BTreeMap<String, BTreeMap<String, toml::Value>>,
}

/// A number of a line, for texts.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Number {
    /// Files of JSON lines.
    pub files: Vec<String>,
    /// Selects the lines; the last one is used.
    #[serde(default, rename = "where")]
    pub only: BTreeMap<String, toml::Value>,
    /// Path of the number. The length of a list is a number, too.
    pub path: String,
}

/// A sweep: one call of a program for each combination of the values of its flags.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// The program to call.
    pub program: Program,
    /// Required resource besides a CPU. Such sweeps run only on request.
    #[serde(default)]
    pub needs: String,
    /// Flags without dashes. A list is swept; any other value applies to every call. An empty string omits the flag. `features` is not a
    /// flag of the program: cargo builds a program with exactly these features for the call.
    pub flags: Flags,
    /// Path in a line that repeats the value of each flag.
    pub echo: BTreeMap<String, String>,
    /// Output file of the lines, relative to the figure's folder.
    pub out: String,
    /// Append lines to the file, which other writers share, instead of replacing it.
    #[serde(default)]
    pub append: bool,
    /// Text in the program's error message if it refuses a case that does not fit. A refusal is a result and produces a line.
    #[serde(default)]
    pub refusal: Option<String>,
    /// Smaller values for `--kick-the-tires`, which skips sweeps without them.
    #[serde(default)]
    pub quick: Option<BTreeMap<String, toml::Value>>,
}

/// A program or formula that prints JSON lines.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Program {
    /// `superoffload bench step`.
    BenchStep,
    /// `superoffload bench step --trace`; the line also contains the timeline of two steps.
    BenchTimeline,
    /// `superoffload simulate`.
    Simulate,
    /// `superoffload simulate --trace`.
    SimulateTimeline,
    /// `superoffload plan`.
    Plan,
    /// `superoffload train`; one line per step and one for the whole run.
    Train,
    /// `host_adam`.
    HostAdam,
    /// `host_facts`.
    HostFacts,
    /// `device_facts`.
    DeviceFacts,
    /// `inverse_error`.
    InverseError,
    /// The formula for streaming weights.
    WeightFlow,
    /// The number of parameters, computed from a `config.json`.
    Parameters,
}

impl Config {
    /// Parses the file and checks the rules that types cannot express.
    ///
    /// # Errors
    /// The message of the TOML parser, or the violated rule.
    pub fn parse(text: &str) -> Result<Self, String> {
        let config: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        let names: Vec<_> = config.series.iter().map(|series| series.name.as_str()).collect();
        let pairs = config.compare.iter().map(|rule| (&rule.paper, &rule.ours));
        for name in pairs.chain(config.trend.iter().map(|rule| (&rule.above, &rule.below))).flat_map(|(a, b)| [a, b]) {
            if !names.contains(&name.as_str()) {
                return Err(format!("no series is named {name:?}"));
            }
        }
        let ids = config.series.iter().map(|series| series.id.as_str()).filter(|id| !id.is_empty());
        for names in [names.clone(), ids.collect()] {
            if let Some((_, name)) = names.iter().enumerate().find(|(index, name)| names[..*index].contains(name)) {
                return Err(format!("two series are named {name:?}"));
            }
        }
        config.series.iter().try_for_each(Series::check)?;
        config.run.iter().try_for_each(Run::check)?;
        config.frames_are_known()?;
        Ok(config)
    }

    /// The frames from top to bottom.
    pub fn frames(&self) -> impl Iterator<Item = &Plot> {
        std::iter::once(&self.plot).chain(&self.frame)
    }

    /// Index of the series' frame.
    pub fn frame_of(&self, series: &Series) -> usize {
        self.frames().position(|frame| !series.frame.is_empty() && frame.name == series.frame).unwrap_or(0)
    }

    /// Checks that every frame has a unique name and that every series names an existing frame.
    fn frames_are_known(&self) -> Result<(), String> {
        let names: Vec<_> = self.frames().map(|frame| frame.name.as_str()).collect();
        let unnamed = names.iter().any(|name| name.is_empty()) && names.len() > 1;
        let twice = names.iter().enumerate().find(|(index, name)| names[..*index].contains(name));
        let lost = self.series.iter().find(|series| !series.frame.is_empty() && !names.contains(&series.frame.as_str()));
        match (unnamed, twice, lost) {
            (true, ..) => Err("one of several frames has no name".into()),
            (_, Some((_, name)), _) => Err(format!("two frames are named {name:?}")),
            (.., Some(series)) => Err(format!("{:?} is drawn in {:?}, which is no frame", series.name, series.frame)),
            _ => Ok(()),
        }
    }
}

impl Series {
    /// Gives the series the workloads that it names. The series' own conditions apply, too.
    ///
    /// # Errors
    /// A sentence if there is no such workload, or if the series names files besides.
    pub fn resolve(&mut self, workloads: &Workloads) -> Result<(), String> {
        if !self.workloads.is_empty() && !self.files.is_empty() {
            return Err(format!("{:?} has workloads and files; the workloads name the files", self.name));
        }
        for name in &self.workloads {
            let workload = workloads.get(name).ok_or_else(|| format!("{:?}: {FILE} has no workload {name:?}", self.name))?;
            self.pick = self.pick.or(workload.pick);
            self.sources.push(workload.clone());
        }
        Ok(())
    }

    /// Checks that the system has a colour, and that letters alone do not tell this program from the paper's system.
    fn check(&self) -> Result<(), String> {
        match self.system {
            _ if self.name.contains("superoffload") => {
                Err(format!("{:?}: SuperOffload is the paper's; ours is \"this program\"", self.name))
            }
            Some(_) if self.colour.is_some() => Err(format!("{:?} has a system and a colour; the system decides the colour", self.name)),
            None if System::is_named_in(&self.name) => Err(format!("{:?} names a system, and `system` is missing", self.name)),
            _ => Ok(()),
        }
    }
}

impl Run {
    /// Checks that every flag has a path in the lines that repeats it, so that an ignored flag does not count as a measurement.
    fn check(&self) -> Result<(), String> {
        let silent = self.flags.keys().find(|flag| !self.echo.contains_key(*flag));
        if matches!(self.program, Program::Simulate | Program::SimulateTimeline) && self.needs.is_empty() && self.quick.is_none() {
            return Err(format!("run into {}: a simulated sweep needs quick values", self.out));
        }
        let unknown = self.quick.iter().flatten().map(|(flag, _)| flag).find(|flag| !self.flags.contains_key(*flag));
        match (silent, unknown) {
            (Some(flag), _) => Err(format!("run into {}: nothing says where a line echoes {flag}", self.out)),
            (_, Some(flag)) => Err(format!("run into {}: quick sets {flag}, which is no flag of it", self.out)),
            _ => Ok(()),
        }
    }

    /// GPUs that a call needs, if it needs one at all.
    pub fn gpus(&self) -> u64 {
        self.flags.get("gpus").and_then(toml::Value::as_integer).and_then(|gpus| gpus.try_into().ok()).unwrap_or(1)
    }

    /// The values of the flags for every call. The last flag changes fastest.
    pub fn combinations(&self, is_quick: bool) -> Vec<BTreeMap<String, toml::Value>> {
        let mut flags = self.flags.clone();
        flags.extend(self.quick.clone().filter(|_| is_quick).into_iter().flatten());
        flags.into_iter().fold(vec![BTreeMap::new()], |combinations, (flag, values)| {
            let values = match values {
                toml::Value::Array(values) => values,
                value => vec![value],
            };
            let with = |known: &BTreeMap<_, _>, value: &toml::Value| {
                let mut known = known.clone();
                known.insert(flag.clone(), value.clone());
                known
            };
            combinations.iter().flat_map(|known| values.iter().map(|value| with(known, value)).collect::<Vec<_>>()).collect()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLOT: &str = "minutes = 0\n[plot]\nkind = \"lines\"\nx = \"a\"\ny = \"b\"\n";
    const RUN: &str = "[[run]]\nprogram = \"bench-step\"\nout = \"results/a.jsonl\"\n";

    fn cause(rest: &str) -> String {
        Config::parse(&format!("{PLOT}{rest}")).unwrap_err()
    }

    #[test]
    fn combines_every_value_with_every_other() {
        let text = format!(
            "{PLOT}{RUN}flags = {{ a = [1, 2], b = [\"x\", \"y\"], c = 3 }}\necho = {{ a = \"a\", b = \"b\", c = \"c\" }}\nquick = {{ a = 1 }}\n"
        );
        let run = &Config::parse(&text).unwrap().run[0];
        assert_eq!(run.combinations(false).len(), 4);
        let quick = run.combinations(true);
        assert_eq!((quick.len(), quick[1]["b"].as_str(), quick[1]["a"].as_integer()), (2, Some("y"), Some(1)));
    }

    #[test]
    fn a_series_takes_workloads_or_files() {
        let workloads: Workloads = toml::from_str("w1 = { files = [\"a\"], where = {}, pick = \"best\" }").unwrap();
        let series = |rest: &str| toml::from_str::<Series>(&format!("name = \"s\"\norigin = \"measured\"\ny = \"ms\"\n{rest}")).unwrap();
        let mut w1 = series("workloads = [\"w1\"]\n");
        w1.resolve(&workloads).unwrap();
        assert_eq!((w1.sources.len(), w1.pick), (1, Some(Pick::Best)));
        assert!(series("workloads = [\"w9\"]\n").resolve(&workloads).unwrap_err().contains("no workload \"w9\""));
        let both = series("workloads = [\"w1\"]\nfiles = [\"a\"]\n").resolve(&workloads);
        assert!(both.unwrap_err().contains("the workloads name the files"));
    }

    #[test]
    fn refuses_uncheckable_settings() {
        assert!(cause("typo = 1\n").contains("unknown field"));
        assert!(cause(&format!("{RUN}flags = {{ a = 1 }}\necho = {{}}\n")).ends_with("nothing says where a line echoes a"));
        assert!(cause(&format!("{RUN}flags = {{}}\necho = {{}}\nquick = {{ z = 1 }}\n")).ends_with("quick sets z, which is no flag of it"));
        assert_eq!(cause("[[trend]]\nclaim = \"c\"\nabove = \"A\"\nbelow = \"B\"\n"), "no series is named \"A\"");
        let series = "[[series]]\nname = \"A\"\norigin = \"paper\"\ny = \"b\"\n";
        assert_eq!(cause(&format!("{series}{series}")), "two series are named \"A\"");
        assert_eq!(cause(&format!("{series}frame = \"F\"\n")), "\"A\" is drawn in \"F\", which is no frame");
        let frame = "[[frame]]\nname = \"F\"\nkind = \"bars\"\nx = \"a\"\n";
        assert_eq!(cause(frame), "one of several frames has no name");
        assert_eq!(
            Config::parse(&format!("{}{frame}{frame}", PLOT.replace("x =", "name = \"P\"\nx ="))).unwrap_err(),
            "two frames are named \"F\""
        );
    }
}
