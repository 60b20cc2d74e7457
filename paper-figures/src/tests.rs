//! Tests that violate each rule of `check` once, and a test of the committed figures.

use super::*;
use std::fs;

const CONFIG: &str = r#"
minutes = 0
[plot]
kind = "lines"
x = "size"
y = "rate"
[[series]]
name = "paper"
origin = "paper"
x = "size"
y = "rate"
[[series]]
name = "ours"
origin = "model"
files = ["results/lines.jsonl"]
x = "bandwidth_gbps"
y = "efficiency_percent"
[[run]]
program = "weight-flow"
out = "results/lines.jsonl"
flags = { bandwidth-gbps = [100, 200], batch = 1, seq-length = 1024, peak-tflops = 700 }
echo = { bandwidth-gbps = "bandwidth_gbps", batch = "batch", seq-length = "seq_length", peak-tflops = "peak_tflops" }
quick = { bandwidth-gbps = 100 }
"#;

/// A folder with one valid figure.
struct Folder {
    dir: tempfile::TempDir,
}

impl Folder {
    fn new() -> Self {
        let folder = Self { dir: tempfile::tempdir().unwrap() };
        fs::create_dir(folder.path("fig-00_test")).unwrap();
        folder.write("fig-00_test/README.md", "# Figure 0: a test\n\nClaim: c\n\nNeeds: nothing.\n");
        folder.write("fig-00_test/config.toml", CONFIG);
        folder.write("fig-00_test/expected.csv", "size,rate\n100,12.8\n200,22.6\n");
        let table = "<!-- begin: written by `paper-figures table` -->\n<!-- end -->\n";
        folder.write("README.md", table);
        folder.record().unwrap();
        for command in [&["plot", "all"][..], &["table"]] {
            folder.run(command).unwrap();
        }
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn write(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).unwrap();
    }

    fn run(&self, args: &[&str]) -> Result<Output> {
        run_in(self.dir.path(), args)
    }

    /// Runs the figure's sweeps into its own folder.
    fn record(&self) -> Result<Output> {
        let program = self.path("superoffload");
        fs::write(&program, "#!/bin/sh\necho 'superoffload 0.1.0 (commit 0a)'\n").unwrap();
        fs::set_permissions(&program, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        self.run(&["run", "fig-00", "--record", "--programs", self.dir.path().to_str().unwrap()])
    }

    /// Output of `check` after `change` of the configuration.
    fn complaint(&self, change: &str) -> String {
        self.write("fig-00_test/config.toml", &format!("{CONFIG}{change}"));
        self.check()
    }

    fn check(&self) -> String {
        let output = self.run(&["check"]).unwrap();
        assert_ne!(output.is_good, output.text.contains("fig-00") || output.text.contains("README"));
        output.text
    }
}

fn run_in(dir: &Path, args: &[&str]) -> Result<Output> {
    let dir = dir.to_str().unwrap();
    run(&Args::try_parse_from(["paper-figures", "--dir", dir].iter().chain(args)).unwrap())
}

#[test]
fn a_good_figure_passes() {
    let folder = Folder::new();
    assert_eq!(folder.check(), "every figure is as its lines say\n");
    assert!(folder.run(&["list"]).unwrap().text.contains("fig-00    same shape -                  0  a test"));
    assert!(fs::read_to_string(folder.path("README.md")).unwrap().contains("fig-00_test/figure.png"));
}

#[test]
fn a_figure_without_data_fails_unless_it_names_its_missing_input() {
    let folder = Folder::new();
    let config = |pending: &str| CONFIG.replace("minutes = 0", &format!("minutes = 0\npending = \"{pending}\""));
    folder.write("fig-00_test/config.toml", &config("a GPU"));
    assert!(folder.check().contains("it has data, and says that it waits for a GPU"));
    fs::remove_file(folder.path("fig-00_test/results/lines.jsonl")).unwrap();
    folder.run(&["plot", "fig-00"]).unwrap();
    folder.run(&["table"]).unwrap();
    assert_eq!(folder.check(), "every figure is as its lines say\n");
    assert!(fs::read_to_string(folder.path("README.md")).unwrap().contains("not run here: a GPU"));
    folder.write("fig-00_test/config.toml", CONFIG);
    assert!(folder.check().contains("no data"));
}

#[test]
fn a_value_that_never_reached_a_program_fails() {
    let folder = Folder::new();
    let lines = fs::read_to_string(folder.path("fig-00_test/results/lines.jsonl")).unwrap();
    folder.write("fig-00_test/results/lines.jsonl", &lines.replace("\"bandwidth_gbps\":200.0", "\"bandwidth_gbps\":100.0"));
    assert!(folder.check().contains("bandwidth-gbps 200 never reached a program"));
}

#[test]
fn a_series_that_draws_nothing_fails() {
    let folder = Folder::new();
    folder.write("fig-00_test/config.toml", &CONFIG.replace("y = \"efficiency_percent\"", "y = \"efficiency\""));
    assert!(folder.check().contains("\"ours\" draws nothing: no line has \"bandwidth_gbps\" and \"efficiency\""));
    folder.write("fig-00_test/config.toml", &CONFIG.replace("y = \"rate\"\n[[series]]", "y = \"rates\"\n[[series]]"));
    assert!(folder.check().contains("\"paper\" draws nothing"));
}

#[test]
fn a_missing_or_empty_table_of_the_paper_fails() {
    let folder = Folder::new();
    folder.write("fig-00_test/expected.csv", "size,rate\n");
    assert!(folder.check().contains("expected.csv has no rows"));
    fs::remove_file(folder.path("fig-00_test/expected.csv")).unwrap();
    let figures = figure::all(folder.dir.path()).unwrap();
    assert!(check::check(&figures[0], false).unwrap()[0].contains("no expected.csv"));
}

#[test]
fn a_trend_that_reversed_fails() {
    let folder = Folder::new();
    let trend = |above: &str, below: &str| format!("[[trend]]\nclaim = \"c\"\nabove = \"{above}\"\nbelow = \"{below}\"\nfactor = 0.99\n");
    let (_, passes) = (folder.complaint(&trend("paper", "ours")), folder.complaint(&trend("ours", "paper")));
    assert_eq!(passes, "every figure is as its lines say\n");
    folder.write("fig-00_test/expected.csv", "size,rate\n100,12.8\n200,32.6\n");
    assert!(folder.complaint(&trend("ours", "paper")).contains("reversed: c: ours is 22.63"));
    folder.write("fig-00_test/expected.csv", "size,rate\n1,12.8\n");
    assert!(folder.complaint(&trend("ours", "paper")).contains("no place in common"));
}

#[test]
fn facts_hold_or_fail() {
    let folder = Folder::new();
    let fact = |path: &str, rule: &str| format!("[[fact]]\nclaim = \"c\"\nfiles = [\"results/lines.jsonl\"]\npath = \"{path}\"\n{rule}\n");
    assert!(folder.complaint(&fact("efficiency_percent", "at_most = 20")).contains("not so: c: efficiency_percent is 22.63"));
    assert!(folder.complaint(&fact("efficiency_percent", "at_least = 20")).contains("not so: c: efficiency_percent is 12.76"));
    assert!(folder.complaint(&fact("efficiency_percent", "same = true")).contains("differs"));
    assert!(folder.complaint(&fact("missing", "at_least = 0")).contains("no line has missing"));
    assert!(folder.complaint(&fact("bench", "at_least = 0")).contains("not so"), "a text is no number");
    assert_eq!(folder.complaint(&fact("batch", "same = true\nat_most = 1")), "every figure is as its lines say\n");
}

#[test]
fn runs_that_end_worse_than_the_seeds_differ_fail() {
    let folder = Folder::new();
    let rule = "[[no_worse]]\nclaim = \"c\"\nfiles = [\"results/runs.jsonl\"]\nwhere = { dtype = \"fp8\" }\nthan = { dtype = \"bf16\" }\npath = \"loss\"\n";
    let complaint = |of_fp8: [f64; 2]| {
        let line = |dtype, loss| format!("{{\"dtype\":\"{dtype}\",\"loss\":{loss}}}\n");
        let lines = [line("bf16", 3.0), line("bf16", 3.2), line("fp8", of_fp8[0]), line("fp8", of_fp8[1])];
        folder.write("fig-00_test/results/runs.jsonl", &lines.concat());
        folder.complaint(rule)
    };
    assert_eq!(complaint([3.2, 3.39]), "every figure is as its lines say\n");
    assert!(complaint([3.2, 3.45]).contains("not so: c: loss is 0.22500 above, and the spread is 0.20000"));
    folder.write("fig-00_test/results/runs.jsonl", "{\"dtype\":\"fp8\",\"loss\":3.0}\n");
    assert!(folder.complaint(rule).contains("no two lines of each kind have loss: c"));
}

#[test]
fn runs_are_compared_with_the_reference_run_of_their_seed() {
    let folder = Folder::new();
    let rule = "[[paired]]\nclaim = \"c\"\nfiles = [\"results/runs.jsonl\"]\nwhere = { moments = \"int8\" }\nthan = { moments = \"float32\" }\n\
                by = \"seed\"\npath = \"loss\"\nerrors = 2.0\nat_most = 0.05\n";
    let complaint = |of_int8: &[f64]| {
        let line = |moments, (seed, loss): (usize, &f64)| format!("{{\"moments\":\"{moments}\",\"seed\":{seed},\"loss\":{loss}}}\n");
        let reference = [3.0, 3.1, 3.02].iter().enumerate().map(|run| line("float32", run));
        let lines: String = reference.chain(of_int8.iter().enumerate().map(|run| line("int8", run))).collect();
        folder.write("fig-00_test/results/runs.jsonl", &lines);
        folder.complaint(rule)
    };
    assert_eq!(complaint(&[3.03, 3.13, 3.05]), "every figure is as its lines say\n");
    // The mean is below the limit, but two standard errors more are not.
    assert!(complaint(&[3.0, 3.1, 3.1]).contains("not so: c: the mean difference is below 0.0800 only, and 0.05 is the limit"));
    // One seed is far worse than the worst reference; the others are far better, but vary little.
    let rule_of_all = rule.replace("at_most = 0.05", "at_most = 9.0");
    complaint(&[3.0, 3.25, 3.0]);
    assert!(folder.complaint(&rule_of_all).contains("not so: c: the worst run is 0.1500 above, and the spread is 0.1000"));
    assert!(complaint(&[3.0, 3.1]).contains("2 of 3 runs are paired by seed: c"));
}

#[test]
fn lines_that_should_be_the_same_are_compared() {
    let folder = Folder::new();
    let lines = fs::read_to_string(folder.path("fig-00_test/results/lines.jsonl")).unwrap();
    let rule = "[[same]]\nclaim = \"c\"\nfile = \"results/other.jsonl\"\nlike = \"results/lines.jsonl\"\nby = [\"bandwidth_gbps\"]\npaths = [\"efficiency_percent\", \"batch\"]\n";
    let complaint = |other: &str| {
        folder.write("fig-00_test/results/other.jsonl", other);
        folder.complaint(rule)
    };
    assert_eq!(complaint(&lines), "every figure is as its lines say\n");
    assert!(complaint("").contains("results/other.jsonl has no lines: c"));
    assert!(complaint(&lines.replace("\"batch\":1.0", "\"batch\":2.0")).contains("line 1 of results/other.jsonl has another batch"));
    assert!(complaint(&lines.replace("200.0", "300.0")).contains("line 2 of results/other.jsonl has no like in results/lines.jsonl"));
    assert!(complaint("{\"bandwidth_gbps\":200.0}\n").contains("line 1 of results/other.jsonl has another efficiency_percent"));
}

#[test]
fn a_deviation_needs_a_reason() {
    let folder = Folder::new();
    let compare = "[[compare]]\npaper = \"paper\"\nours = \"ours\"\nwithin = 0.05\n";
    let sentence = |folder: &Folder| folder.run(&["show", "fig-00"]).unwrap().text;
    let deviates = CONFIG.replace("minutes = 0", "minutes = 0\ndeviates = true\nwhy = \"w\"");
    folder.write("fig-00_test/config.toml", &deviates);
    assert!(sentence(&folder).contains("deviates; w"), "{}", sentence(&folder));
    folder.write("fig-00_test/config.toml", &format!("{CONFIG}{compare}"));
    assert!(sentence(&folder).contains("reproduced: within 0.3 % of the paper"), "{}", sentence(&folder));
    folder.write("fig-00_test/expected.csv", "size,rate\n100,12.8\n200,45.2\n");
    assert!(sentence(&folder).contains("deviates: ours is -50 % off at 200"), "{}", sentence(&folder));
    assert!(folder.check().contains("config.toml does not say why"));
}

#[test]
fn a_picture_or_a_table_of_other_lines_fails() {
    let folder = Folder::new();
    folder.write("fig-00_test/expected.csv", "size,rate\n100,12.8\n200,24.6\n");
    assert!(folder.check().contains("figure.svg is not what its lines draw"));
    folder.run(&["plot", "fig-00"]).unwrap();
    assert_eq!(folder.check(), "every figure is as its lines say\n");
    folder.write("fig-00_test/config.toml", &CONFIG.replace("minutes = 0", "minutes = 7"));
    assert!(folder.check().contains("README.md: not what the lines say"));
}

#[test]
fn kicking_the_tires_leaves_committed_results() {
    let folder = Folder::new();
    let out = folder.path("out");
    let before = fs::read_to_string(folder.path("fig-00_test/results/lines.jsonl")).unwrap();
    let output = folder.run(&["all", "--kick-the-tires", "--out", out.to_str().unwrap()]).unwrap();
    assert!(output.is_good, "{}", output.text);
    assert_eq!(fs::read_to_string(folder.path("fig-00_test/results/lines.jsonl")).unwrap(), before);
    assert_eq!(fs::read_to_string(out.join("fig-00_test/results/lines.jsonl")).unwrap().lines().count(), 1);
    assert!(out.join("fig-00_test/figure.png").exists());
}

#[test]
fn a_refusal_is_a_result_only_where_it_may_be() {
    let folder = Folder::new();
    let refused = CONFIG.replace("batch = 1", "batch = -1");
    folder.write("fig-00_test/config.toml", &refused);
    assert!(folder.record().err().unwrap().to_string().contains("batch is no positive number"));
    folder.write("fig-00_test/config.toml", &refused.replace("quick", "refusal = \"no positive number\"\nquick"));
    folder.record().unwrap();
    let lines = fs::read_to_string(folder.path("fig-00_test/results/lines.jsonl")).unwrap();
    assert!(lines.starts_with("{\"refused\":"), "{lines}");
}

#[test]
fn a_run_that_ended_early_goes_on_where_it_was() {
    let folder = Folder::new();
    let lines = || fs::read_to_string(folder.path("fig-00_test/results/lines.jsonl")).unwrap();
    let (before, unfinished) = (lines(), folder.path("fig-00_test/unfinished.jsonl"));
    // The second of three calls is refused.
    let broken = CONFIG.replace("[100, 200]", "[100, -1, 200]");
    folder.write("fig-00_test/config.toml", &broken);
    assert!(folder.record().err().unwrap().to_string().contains("bandwidth-gbps is no positive number"));
    assert_eq!(lines(), before, "nothing is written until all is there");
    let kept = fs::read_to_string(&unfinished).unwrap();
    assert_eq!(kept.lines().count(), 1);
    // The next run reuses these lines instead of repeating the measurement.
    let efficiency = lines::number(&serde_json::from_str(before.lines().next().unwrap()).unwrap(), "efficiency_percent").unwrap();
    fs::write(&unfinished, kept.replace(&efficiency.to_string(), "99.5")).unwrap();
    folder.write("fig-00_test/config.toml", CONFIG);
    folder.record().unwrap();
    assert!(lines().lines().next().unwrap().contains("99.5"), "{}", lines());
    assert_eq!(lines().lines().nth(1), before.lines().nth(1));
    assert!(!unfinished.exists());
}

#[test]
fn a_run_touches_the_published_lines_only_to_record_them() {
    let folder = Folder::new();
    let (lines, picture, out) = ("fig-00_test/results/lines.jsonl", "fig-00_test/figure.svg", folder.path("out"));
    let before = [lines, picture].map(|name| fs::read(folder.path(name)).unwrap());
    folder.write("fig-00_test/config.toml", &CONFIG.replace("batch = 1", "batch = 2"));
    let message = folder.run(&["run", "fig-00", "--out", out.to_str().unwrap()]).unwrap().text;
    assert!(message.contains("2 lines of 2 calls") && message.contains("out/fig-00_test"), "{message}");
    assert_eq!([lines, picture].map(|name| fs::read(folder.path(name)).unwrap()), before);
    assert_ne!(fs::read(out.join(lines)).unwrap(), before[0], "the new lines are there");
    folder.write("fig-00_test/config.toml", CONFIG);
    assert!(folder.run(&["check"]).unwrap().is_good, "a run breaks no check");
}

#[test]
fn runs_without_a_commit_are_not_recorded() {
    let folder = Folder::new();
    let before = fs::read(folder.path("fig-00_test/results/lines.jsonl")).unwrap();
    folder.write("superoffload", "#!/bin/sh\necho superoffload 0.1.0\n");
    let refused = folder.run(&["run", "fig-00", "--record", "--programs", folder.dir.path().to_str().unwrap()]).err().unwrap();
    assert!(refused.exit_code() == 2 && refused.to_string().contains("does not know its commit"), "{refused}");
    assert_eq!(fs::read(folder.path("fig-00_test/results/lines.jsonl")).unwrap(), before);
}

#[test]
fn the_list_has_a_line_for_each_figure() {
    let list = run_in(Path::new(env!("CARGO_MANIFEST_DIR")), &["list"]).unwrap().text;
    assert_eq!(list.lines().count(), 1 + 24, "{list}");
    assert!(list.lines().all(|line| line.chars().count() <= 120), "{list}");
    assert!(list.contains("\nfig-06    reproduced -                  1  efficiency of streaming weights"), "{list}");
    assert!(list.contains("\ntable-2   deviates   gpu, builds "), "{list}");
}

#[test]
fn numbers_of_the_verdict_come_from_lines() {
    let folder = Folder::new();
    let config = |why: &str| {
        CONFIG.replace("minutes = 0", &format!("minutes = 0\nwhy = \"{why}\"")).replace("name = \"ours\"", "name = \"ours\"\nid = \"o\"")
    };
    folder.write("fig-00_test/config.toml", &config("a share of 99 % at 200"));
    assert!(folder.check().contains("`why` has a typed number of a result: 99"));
    folder.write("fig-00_test/config.toml", &config("a share of {[o@300]} %"));
    assert!(folder.run(&["list"]).is_ok() && folder.run(&["show", "fig-00"]).err().unwrap().to_string().contains("no point at"));
    folder.write("fig-00_test/config.toml", &config("a share of {[o@200] | 1} %"));
    folder.run(&["table"]).unwrap();
    assert_eq!(folder.check(), "every figure is as its lines say\n");
    assert!(fs::read_to_string(folder.path("README.md")).unwrap().contains("a share of 22.6 %"));
    let page = folder.path("fig-00_test/README.md");
    fs::write(&page, format!("{}\nIt is <!--= [o@200] -->99<!--/--> %.\n", fs::read_to_string(&page).unwrap())).unwrap();
    assert!(folder.check().contains("fig-00_test/README.md: not what the lines say"));
    folder.run(&["table"]).unwrap();
    assert!(fs::read_to_string(&page).unwrap().contains("-->23<!--/--> %"));
}

#[test]
fn a_line_of_a_workload_that_no_series_takes_is_named() {
    let folder = Folder::new();
    let rule = "[[complete]]\nworkload = \"batch 1\"\nfiles = [\"results/*.jsonl\"]\nwhere = { batch = 1 }\n";
    assert_eq!(folder.complaint(rule), "every figure is as its lines say\n");
    folder.write("fig-00_test/results/newer.jsonl", "{\"batch\":1,\"unix_seconds\":7}\n{\"batch\":2}\n");
    let complaint = folder.complaint(rule);
    assert!(complaint.contains("no series takes a line of batch 1: unix_seconds 7") && complaint.lines().count() == 1, "{complaint}");
    assert_eq!(
        folder.complaint(&format!("{rule}except = {{ \"another day\" = {{ unix_seconds = 7 }} }}\n")),
        "every figure is as its lines say\n"
    );
}

#[test]
fn only_affected_figures_are_run() {
    let folder = Folder::new();
    let out = folder.path("out");
    let message = |args: &[&str]| folder.run(&[&["run", "fig-00", "--out", out.to_str().unwrap()], args].concat()).unwrap().text;
    assert!(message(&["--only", "gpu"]).contains("lines.jsonl does not need gpu"));
    folder.write("fig-00_test/config.toml", &CONFIG.replace("quick", "needs = \"gpu\"\nquick"));
    assert!(message(&[]).contains("lines.jsonl needs gpu"));
    assert!(message(&["--with", "gpu"]).contains("2 lines of 2 calls") && message(&["--only", "gpu"]).contains("2 lines of 2 calls"));
}

#[test]
fn claims_are_run_again_and_judged() {
    let folder = Folder::new();
    let out = folder.path("out");
    let reproduce = |args: &[&str]| folder.run(&[&["reproduce", "--out", out.to_str().unwrap()], args].concat()).unwrap();
    assert!(reproduce(&["--dry-run"]).is_good && !out.exists());
    let output = reproduce(&[]);
    assert!(output.is_good && output.text.starts_with("C1   fig-00    confirmed  1 of 1 sweeps run again"), "{}", output.text);
    assert!(out.join("fig-00_test/figure.png").exists());
    assert!(reproduce(&["C1", "--kick-the-tires"]).is_good);
    assert_eq!(folder.run(&["reproduce", "C2"]).err().unwrap().to_string(), "no claim C2: there are C1 to C1");
    // A published value that the program does not give fails.
    let lines = fs::read_to_string(folder.path("fig-00_test/results/lines.jsonl")).unwrap();
    let value = lines::number(&serde_json::from_str(lines.lines().next().unwrap()).unwrap(), "efficiency_percent").unwrap();
    folder.write("fig-00_test/results/lines.jsonl", &lines.replace(&value.to_string(), "99.5"));
    let output = reproduce(&[]);
    assert!(
        !output.is_good && output.text.contains("FAILED     ours at 100 is 12.7") && output.text.contains("99.5 was published"),
        "{}",
        output.text
    );
    // A sweep that needs a GPU is not run without one.
    folder.write("fig-00_test/results/lines.jsonl", &lines);
    folder.write("fig-00_test/config.toml", &CONFIG.replace("quick", "needs = \"gpu\"\nquick"));
    if machine::Machine::this().gpus.is_empty() {
        assert!(reproduce(&[]).text.contains("not run    published lines agree"));
    }
}

#[test]
fn missing_files_are_errors() {
    let folder = Folder::new();
    let error = |args: &[&str]| folder.run(args).err().unwrap();
    assert_eq!(error(&["show", "fig-99"]).to_string(), "no figure fig-99: there are fig-00");
    assert_eq!(error(&["show", "fig-99"]).exit_code(), 2);
    assert_eq!(run_in(Path::new("/nowhere"), &["list"]).err().unwrap().exit_code(), 1);
    folder.write("fig-00_test/config.toml", &CONFIG.replace("weight-flow", "host-adam"));
    let out = folder.path("out");
    assert!(
        error(&["--programs", "/nowhere", "run", "fig-00", "--out", out.to_str().unwrap()])
            .to_string()
            .contains("cargo build --workspace builds it")
    );
}

#[test]
fn committed_results_are_right() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    let output = run_in(dir, &["check"]).unwrap();
    assert!(output.is_good, "{}", output.text);
    let figures = figure::all(dir).unwrap();
    assert_eq!(figures.len(), 24);
    for figure in figures {
        let text = show(&figure).unwrap();
        assert!(text.contains("arXiv 2509.21271") && text.starts_with(&figure.label), "{text}");
    }
}

#[test]
fn shapes_of_table_4_are_the_papers() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR"));
    let figures = figure::all(dir).unwrap();
    let table = find(&figures, "table-4").unwrap();
    for row in table.expected().unwrap().rows {
        let text = fs::read_to_string(table.folder.join(format!("{}.json", row[0]))).unwrap();
        let config: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!([config["n_layer"].to_string(), config["n_embd"].to_string()], [row[2].clone(), row[3].clone()], "{}", row[0]);
    }
}
