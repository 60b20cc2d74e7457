//! `config.toml` of a figure: what is drawn, what must hold, and the sweeps that produce its lines.

use serde::Deserialize;
use std::collections::BTreeMap;

/// Everything that one figure says about itself.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Minutes that `run` takes, all sweeps that need no GPU together.
    pub minutes: f64,
    /// What was found: why numbers differ from the paper's, or what was compared instead.
    #[serde(default)]
    pub why: String,
    /// The claim does not hold in our data: the word for figures that have no series to compare with the paper's.
    #[serde(default)]
    pub deviates: bool,
    /// The paper has no such figure: it is drawn for this repository.
    #[serde(default)]
    pub own: bool,
    /// What is missing, where nothing was run yet.
    #[serde(default)]
    pub pending: String,
    /// What our lines were made on.
    #[serde(default)]
    pub hardware: String,
    /// How it is drawn.
    pub plot: Plot,
    /// More frames, below that of `plot`, each with axes and a legend of its own.
    #[serde(default)]
    pub frame: Vec<Plot>,
    /// What is drawn.
    #[serde(default)]
    pub series: Vec<Series>,
    /// Series of ours against series of the paper.
    #[serde(default)]
    pub compare: Vec<Compare>,
    /// Orders between series, which the paper claims.
    #[serde(default)]
    pub trend: Vec<Trend>,
    /// Bounds on single fields of lines.
    #[serde(default)]
    pub fact: Vec<Fact>,
    /// Runs that must end about as well as others.
    #[serde(default)]
    pub no_worse: Vec<NoWorse>,
    /// Files whose lines say the same.
    #[serde(default)]
    pub same: Vec<Same>,
    /// Sweeps.
    #[serde(default)]
    pub run: Vec<Run>,
}

/// Kind and axes of the picture.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Plot {
    /// What the frame shows, where there are several; series say which one they are drawn in.
    #[serde(default)]
    pub name: String,
    /// What a point becomes.
    pub kind: Kind,
    /// Name and unit of the horizontal axis.
    pub x: String,
    /// Name and unit of the vertical axis, with the convention by which it was counted.
    #[serde(default)]
    pub y: String,
    /// Logarithmic horizontal axis (lines only).
    #[serde(default)]
    pub log_x: bool,
    /// Logarithmic vertical axis.
    #[serde(default)]
    pub log_y: bool,
    /// Where a linear vertical axis ends; where the highest value says so by default.
    #[serde(default)]
    pub y_max: Option<f64>,
    /// All panels of a timeline have one scale, so that their lengths can be compared.
    #[serde(default)]
    pub one_scale: bool,
}

/// What a point becomes.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A bar in the group of its category; groups stand in order of appearance.
    Bars,
    /// A marker, joined to the one before.
    Lines,
    /// A horizontal bar for each series, with its name at the left and its x as a second number at the right.
    Rows,
    /// A panel of lanes: the series is one line that holds a timeline.
    Timeline,
}

/// Where a series' numbers come from; each is drawn in its own manner.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Origin {
    /// Printed in the paper or read off its figures: `expected.csv`.
    Paper,
    /// A formula.
    Model,
    /// The engine on a virtual machine.
    Simulated,
    /// A run.
    Measured,
}

/// Form of the points of a curve.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Marker {
    /// Of everything that is not simulated, by default.
    Circle,
    /// Of what is simulated.
    Square,
    /// For a second series of one colour and origin.
    Triangle,
    /// For a third.
    Diamond,
}

/// One curve, one colour of bars, or one panel.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Series {
    /// Name in the legend, with the machine: unique in the figure.
    pub name: String,
    /// Where the numbers come from.
    pub origin: Origin,
    /// Name of the frame that it is drawn in; that of `plot` by default.
    #[serde(default)]
    pub frame: String,
    /// Files of JSON lines, relative to the figure's folder; none: `expected.csv`.
    #[serde(default)]
    pub files: Vec<String>,
    /// Only lines (rows) that hold these values at these paths (columns).
    #[serde(default, rename = "where")]
    pub only: BTreeMap<String, toml::Value>,
    /// Only lines where these numbers are above zero.
    #[serde(default)]
    pub positive: Vec<String>,
    /// Path (column) of the point's place.
    #[serde(default)]
    pub x: String,
    /// Path (column) of its height, or of the timeline's lanes.
    pub y: String,
    /// Path (column) of what the height is divided by.
    #[serde(default)]
    pub over: Option<String>,
    /// Factor that brings x to the axis' unit.
    #[serde(default = "one")]
    pub x_scale: f64,
    /// Factor that brings y to the axis' unit.
    #[serde(default = "one")]
    pub y_scale: f64,
    /// What is added then: with a factor of -100, 100 makes idle percent of a busy share.
    #[serde(default)]
    pub y_offset: f64,
    /// FLOP rates of lines count causal attention: count it in full, as the paper does.
    #[serde(default)]
    pub full_attention: bool,
    /// The height is how many lines up to the point's have one above zero.
    #[serde(default)]
    pub counted: bool,
    /// Path (column) of the category, by which points of two series are the same place; x where there is none. Several, with
    /// spaces between, make one category of all their values.
    #[serde(default)]
    pub label: String,
    /// Names of categories, by what the line says.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// Category whose height the others are percent of.
    #[serde(default)]
    pub whole: Option<String>,
    /// Markers only.
    #[serde(default)]
    pub scattered: bool,
    /// Index of its colour, the same for one system from several sources; its own place by default.
    #[serde(default)]
    pub colour: Option<usize>,
    /// Form of its points; by its origin by default.
    #[serde(default)]
    pub marker: Option<Marker>,
}

fn one() -> f64 {
    1.0
}

/// How far a series of ours may lie from one of the paper's to count as reproduced.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Compare {
    /// Name of the paper's series.
    pub paper: String,
    /// Name of ours.
    pub ours: String,
    /// Relative deviation, 0.1 for 10 %, allowed at every point.
    pub within: f64,
}

/// An order that the paper claims: fails when it is reversed at a place that both series have.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Trend {
    /// The claim in words.
    pub claim: String,
    /// Name of the series that is higher.
    pub above: String,
    /// Name of the series that is lower.
    pub below: String,
    /// By which factor at least.
    #[serde(default = "one")]
    pub factor: f64,
}

/// What single fields of lines must hold.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Fact {
    /// The claim in words.
    pub claim: String,
    /// Files of JSON lines.
    pub files: Vec<String>,
    /// Which lines; there must be one.
    #[serde(default, rename = "where")]
    pub only: BTreeMap<String, toml::Value>,
    /// The field.
    pub path: String,
    /// Lower bound.
    #[serde(default)]
    pub at_least: Option<f64>,
    /// Upper bound.
    #[serde(default)]
    pub at_most: Option<f64>,
    /// All lines hold the same value.
    #[serde(default)]
    pub same: bool,
}

/// Runs with several seeds that end about as well as others: their mean is above the others' by no more than the others' spread.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct NoWorse {
    /// The claim in words.
    pub claim: String,
    /// Files of JSON lines.
    pub files: Vec<String>,
    /// Which lines.
    #[serde(rename = "where")]
    pub only: BTreeMap<String, toml::Value>,
    /// The others.
    pub than: BTreeMap<String, toml::Value>,
    /// The field; less is better.
    pub path: String,
}

/// Two ways to one result: each line of `file` has its like, which says the same.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Same {
    /// The claim in words.
    pub claim: String,
    /// File of JSON lines.
    pub file: String,
    /// Another.
    pub like: String,
    /// Two lines are alike where these fields are.
    pub by: Vec<String>,
    /// Fields that are then equal, floats to the bit.
    pub paths: Vec<String>,
}

/// A sweep: one call of a program for each combination of its flags' values.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// What is called.
    pub program: Program,
    /// What it takes besides a CPU; such sweeps are skipped unless asked for.
    #[serde(default)]
    pub needs: String,
    /// Flags without dashes; a list is swept, anything else is passed to every call. An empty string is a flag that is not
    /// given. `features` is none of the program's: cargo builds the program with these features alone, and that one is called.
    pub flags: BTreeMap<String, toml::Value>,
    /// Where a line says what each flag was.
    pub echo: BTreeMap<String, String>,
    /// File of the lines, relative to the figure's folder.
    pub out: String,
    /// Lines are added to the file, which others write, too; else it is written anew.
    #[serde(default)]
    pub append: bool,
    /// Words by which the program refuses what does not fit: that is a result, too, and leaves a line that says so.
    #[serde(default)]
    pub refusal: Option<String>,
    /// Smaller values for `--kick-the-tires`; without them the sweep is left out there.
    #[serde(default)]
    pub quick: Option<BTreeMap<String, toml::Value>>,
}

/// A program or formula that prints JSON lines.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case")]
pub enum Program {
    /// `superoffload bench step`.
    BenchStep,
    /// `superoffload bench step --trace`: the line also holds the timeline of two steps.
    BenchTimeline,
    /// `superoffload simulate`.
    Simulate,
    /// `superoffload simulate --trace`.
    SimulateTimeline,
    /// `superoffload plan`.
    Plan,
    /// `superoffload train`: a line a step and one for the end.
    Train,
    /// `host_adam`.
    HostAdam,
    /// `host_facts`.
    HostFacts,
    /// `device_facts`.
    DeviceFacts,
    /// `inverse_error`.
    InverseError,
    /// The formula of streamed weights.
    WeightFlow,
    /// Parameters counted from a `config.json`.
    Parameters,
}

impl Config {
    /// Parses the file and checks what types cannot.
    ///
    /// # Errors
    /// What TOML or a rule says is wrong.
    pub fn parse(text: &str) -> Result<Self, String> {
        let config: Self = toml::from_str(text).map_err(|error| error.to_string())?;
        let names: Vec<_> = config.series.iter().map(|series| series.name.as_str()).collect();
        let pairs = config.compare.iter().map(|rule| (&rule.paper, &rule.ours));
        for name in pairs.chain(config.trend.iter().map(|rule| (&rule.above, &rule.below))).flat_map(|(a, b)| [a, b]) {
            if !names.contains(&name.as_str()) {
                return Err(format!("no series is named {name:?}"));
            }
        }
        for (index, name) in names.iter().enumerate() {
            if names[..index].contains(name) {
                return Err(format!("two series are named {name:?}"));
            }
        }
        config.run.iter().try_for_each(Run::check)?;
        config.frames_are_known()?;
        Ok(config)
    }

    /// The frames from top to bottom.
    pub fn frames(&self) -> impl Iterator<Item = &Plot> {
        std::iter::once(&self.plot).chain(&self.frame)
    }

    /// The series of a frame have the frame's index.
    pub fn frame_of(&self, series: &Series) -> usize {
        self.frames().position(|frame| !series.frame.is_empty() && frame.name == series.frame).unwrap_or(0)
    }

    /// Every frame has a name of its own, and each series names one that there is.
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

impl Run {
    /// Every flag must come back in a line: a value that a program ignored shall not pass for a measurement.
    fn check(&self) -> Result<(), String> {
        let silent = self.flags.keys().find(|flag| !self.echo.contains_key(*flag));
        let unknown = self.quick.iter().flatten().map(|(flag, _)| flag).find(|flag| !self.flags.contains_key(*flag));
        match (silent, unknown) {
            (Some(flag), _) => Err(format!("run into {}: nothing says where a line echoes {flag}", self.out)),
            (_, Some(flag)) => Err(format!("run into {}: quick sets {flag}, which is no flag of it", self.out)),
            _ => Ok(()),
        }
    }

    /// The flags' values of every call, the last flag changing fastest.
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
    fn refuses_what_cannot_be_checked() {
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
