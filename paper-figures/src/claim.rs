//! Claims of the artifact: one for each figure and table of the paper, and the ablation by features. The table in `ARTIFACT.md` is written
//! from here.

use crate::config::{Origin, Program, Run};
use crate::error::Result;
use crate::figure::Figure;
use crate::verdict;

/// Figures that the paper does not have.
const OURS: [&str; 2] = ["table-2b", "table-2c"];
/// The figure whose sweeps build the program by features.
const ABLATION: &str = "table-2";
/// Figures of which `superoffload superchip-check` measures values on the paper's hardware.
const OF_SUPERCHIPS: [&str; 5] = ["fig-07", "fig-10", "fig-15", "table-1", "table-2"];

/// A claim, which a command checks.
#[derive(Clone, Debug)]
pub struct Claim<'a> {
    /// `C1`.
    pub id: String,
    /// The figure or table.
    pub figure: &'a Figure,
    /// The claim is that of builds by features, not that of the figure.
    pub is_by_builds: bool,
}

/// What a machine has besides CPUs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// GPUs.
    pub gpus: u64,
    /// Cargo, and minutes for builds.
    pub builds: bool,
}

/// The claims, in the order of the figures.
pub fn all(figures: &[Figure]) -> Vec<Claim<'_>> {
    let of_paper = figures.iter().filter(|figure| !figure.config.own && !OURS.contains(&figure.id.as_str()));
    let by_builds = figures.iter().filter(|figure| figure.id == ABLATION).map(|figure| (figure, true));
    let all = of_paper.map(|figure| (figure, false)).chain(by_builds);
    all.enumerate().map(|(index, (figure, is_by_builds))| Claim { id: format!("C{}", index + 1), figure, is_by_builds }).collect()
}

impl Claim<'_> {
    /// The claim in one sentence.
    pub fn text(&self) -> String {
        match self.is_by_builds {
            true => "A build that lacks techniques does and takes the same as the full build with them switched off.".into(),
            false => self.figure.claim.clone(),
        }
    }

    /// The sweeps that the claim needs.
    pub fn sweeps(&self) -> impl Iterator<Item = &Run> {
        self.figure.config.run.iter().filter(|run| (run.needs == "builds") == self.is_by_builds)
    }

    /// The sweeps that run on a machine with `resources`.
    pub fn possible(&self, resources: Resources) -> impl Iterator<Item = &Run> {
        self.sweeps().filter(move |run| objection(run, resources).is_none())
    }

    /// The command that checks this claim alone.
    pub fn command(&self) -> String {
        let with = if self.is_by_builds { " --with builds" } else { "" };
        format!("`paper-figures reproduce {}{with}`", self.id)
    }

    /// The allowed difference between a new line and the published one, and from the paper.
    fn tolerance(&self) -> String {
        let config = &self.figure.config;
        let has = |origins: &[Origin]| config.series.iter().any(|series| origins.contains(&series.origin));
        let exact =
            (self.is_by_builds || has(&[Origin::Model, Origin::Simulated])).then(|| "simulated and computed values: none".to_owned());
        let rules = config.fact.len() + config.trend.len() + config.same.len();
        let measured = (has(&[Origin::Measured]) && rules > 0).then(|| {
            format!(
                "measured values: {rules} {} of the figure {}",
                if rules == 1 { "rule" } else { "rules" },
                if rules == 1 { "holds" } else { "hold" }
            )
        });
        let within = config.compare.iter().map(|rule| rule.within).reduce(f64::max).filter(|_| !self.is_by_builds);
        let within = within.map(|within| format!("the paper's values: {:.0} %", 100.0 * within));
        [exact, measured, within].into_iter().flatten().collect::<Vec<_>>().join("; ")
    }

    /// Checkable parts on a superchip.
    fn on_superchip(&self) -> &'static str {
        let is_measured = OF_SUPERCHIPS.contains(&self.figure.id.as_str()) && !self.is_by_builds;
        if is_measured { "as one GPU, and `superchip-check`" } else { "as one GPU" }
    }

    /// Checkable parts on a machine with `resources`.
    fn part(&self, resources: Resources) -> String {
        let possible: Vec<_> = self.possible(resources).collect();
        let is_gpu = |run: &&&Run| run.needs == "gpu";
        let (gpu, all) = (possible.iter().filter(is_gpu).count(), self.sweeps().count());
        match (possible.len(), gpu) {
            (0, _) => "published lines".into(),
            (some, 0) if possible.iter().all(|run| is_exact(run)) => format!("{some} of {all} sweeps: no measurement"),
            (some, 0) => format!("{some} of {all} sweeps"),
            (some, gpu) => format!("{some} of {all} sweeps, {gpu} on the GPU"),
        }
    }
}

/// Whether the program computes or simulates, so that a line does not depend on the machine.
pub fn is_exact(run: &Run) -> bool {
    matches!(run.program, Program::Simulate | Program::SimulateTimeline | Program::Plan | Program::WeightFlow | Program::Parameters)
}

/// The missing resource of a sweep.
pub fn objection(run: &Run, resources: Resources) -> Option<String> {
    let gpus = run.gpus();
    match run.needs.as_str() {
        "" => None,
        "gpu" if gpus <= resources.gpus => None,
        "gpu" if gpus == 1 => Some("needs a GPU".into()),
        "gpu" => Some(format!("needs {gpus} GPUs")),
        "builds" if resources.builds => None,
        needs => Some(format!("needs {needs}")),
    }
}

/// The table of claims for `ARTIFACT.md`.
///
/// # Errors
/// Errors of reading data.
pub fn table(figures: &[Figure]) -> Result<String> {
    let head = "| | the paper's claim | here | command | minutes | tolerance | CPU only | one GPU | two GPUs | superchip |";
    let mut text = format!("{head}\n|---|---|---|---|---:|---|---|---|---|---|\n");
    for claim in all(figures) {
        let (figure, on) = (claim.figure, |gpus| claim.part(Resources { gpus, builds: claim.is_by_builds }));
        let outcome = if claim.is_by_builds { "reproduced".into() } else { verdict::outcome(figure)? };
        let minutes = if claim.is_by_builds { "20".into() } else { figure.config.minutes.to_string() };
        let name = format!("[{}]({}/README.md)", figure.label, figure.folder_name());
        let cells = [
            claim.id.clone(),
            format!("{name}: {}", claim.text()),
            outcome,
            claim.command(),
            minutes,
            claim.tolerance(),
            on(0),
            on(1),
            on(2),
            claim.on_superchip().into(),
        ];
        text += &format!("| {} |\n", cells.join(" | "));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn every_figure_and_table_of_the_paper_has_a_claim() {
        let figures = crate::figure::all(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
        let claims = all(&figures);
        assert_eq!(claims.len(), 16 + 1);
        assert_eq!((claims[0].id.as_str(), claims[0].figure.id.as_str()), ("C1", "fig-03"));
        assert!(claims[16].is_by_builds && claims[16].sweeps().count() == 2);
        let table = table(&figures).unwrap();
        assert_eq!(table.lines().count(), 2 + 17);
        assert!(table.lines().all(|line| line.matches(" | ").count() == 9 || line.starts_with("|---")), "{table}");
    }

    #[test]
    fn a_sweep_names_the_resource_that_it_misses() {
        let figures = crate::figure::all(Path::new(env!("CARGO_MANIFEST_DIR"))).unwrap();
        let claims = all(&figures);
        let of = |id: &str| claims.iter().find(|claim| claim.figure.id == id).unwrap();
        let count = |id: &str, gpus| of(id).possible(Resources { gpus, builds: false }).count();
        assert_eq!([0, 1, 2].map(|gpus| count("table-2", gpus)), [2, 3, 4]);
        let run = of("table-2").sweeps().last().unwrap();
        let missing = |gpus| objection(run, Resources { gpus, builds: false });
        assert_eq!([missing(0), missing(2)], [Some("needs 2 GPUs".into()), None]);
        assert_eq!(count("table-2", 2), of("table-2").sweeps().count());
        assert_eq!(claims[16].possible(Resources { gpus: 2, builds: false }).count(), 0);
    }
}
