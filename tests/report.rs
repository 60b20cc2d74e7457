//! `superoffload report`: the page shows the values of the metrics, text of files is escaped, and damaged lines are counted. With
//! `SUPEROFFLOAD_BROWSER=chromium` (a path) a browser opens the page and must report no errors.

use crate::campaign::record;
use crate::program::{Outcome, STEPS, Workspace, copy_dir, program, run};
use serde_json::{Value, json};
use std::fs;
use std::process::Command;

/// Titles of the page's sections, in order.
const SECTIONS: [&str; 12] = [
    "Loss",
    "Learning rate and gradient norm",
    "Speed",
    "Where the time of a step goes",
    "Memory",
    "Two steps",
    "Speculation",
    "Data",
    "Checkpoints",
    "Settings",
    "Machine and build",
    "How to reproduce",
];

/// Number of lanes in the timelines of two steps.
const LANES: usize = 2 * 3;

/// The flag that includes samples of the data.
const WITH_SAMPLES: &[&str] = &["--with-samples"];

/// Writes a page about the runs `names` of `workspace`.
fn report(workspace: &Workspace, names: &[&str], flags: &[&str]) -> Outcome {
    let mut command = program(&["report", "-o"]);
    command.arg(workspace.path("report.html")).args(names.iter().map(|name| workspace.path(name))).args(flags);
    run(&mut command)
}

fn page(workspace: &Workspace, names: &[&str]) -> String {
    page_with(workspace, names, &[])
}

fn page_with(workspace: &Workspace, names: &[&str], flags: &[&str]) -> String {
    let outcome = report(workspace, names, flags);
    assert_eq!(outcome.code, 0, "{outcome:?}");
    let page = fs::read_to_string(workspace.path("report.html")).unwrap();
    assert!(page.len() < 2_000_000 && page.starts_with("<!doctype html>\n<!-- superoffload report -->"));
    page
}

/// A workspace in which the run `plain` has trained and evaluated.
fn trained() -> Workspace {
    let workspace = Workspace::new();
    let eval = workspace.write("held.txt", "Ideas sleep furiously, and colourless ones are green.\n".repeat(8));
    let outcome = run(workspace.train("plain", &["--eval-steps", "4", "--eval-data"]).arg(eval));
    assert_eq!(outcome.code, 0, "{outcome:?}");
    workspace
}

/// A number between 1 and 10 as the page prints it, with three decimals.
fn short(x: f64) -> String {
    assert!((1.0..10.0).contains(&x), "{x}");
    format!("{x:.3}")
}

/// Checks that all elements of every `<svg>` are nested properly, with quoted attributes and without a bare `<` or `&`.
fn check_svg(page: &str) -> usize {
    let mut open: Vec<&str> = Vec::new();
    let mut count = 0;
    for piece in page.split('<').skip(1) {
        let (tag, text) = piece.split_once('>').unwrap_or((piece, ""));
        let name = tag.trim_start_matches('/').split([' ', '\n', '/']).next().unwrap();
        if open.is_empty() && name != "svg" {
            continue;
        }
        assert!(tag.matches('"').count().is_multiple_of(2) && !text.contains('"'), "{tag}");
        assert!(text.match_indices('&').all(|(at, _)| text[at..].contains(';')), "{text}");
        assert!(!tag.contains("NaN") && !tag.contains("inf"), "{tag}");
        match () {
            () if tag.starts_with('/') => assert_eq!(open.pop(), Some(name), "{tag}"),
            () if tag.ends_with('/') => {}
            () => {
                open.push(name);
                count += usize::from(name == "svg");
            }
        }
    }
    assert!(open.is_empty(), "{open:?}");
    count
}

#[test]
fn every_section_and_number_is_that_of_the_metrics() {
    let workspace = trained();
    let page = page(&workspace, &["plain"]);
    let at: Vec<_> = SECTIONS.iter().map(|name| page.find(&format!("<h2>{name}</h2>")).expect(name)).collect();
    assert!(at.is_sorted() && page.contains("<h2>Waits for saves</h2>"), "{at:?}");
    let (steps, evals): (Vec<Value>, Vec<Value>) = workspace.metrics("plain").into_iter().partition(|line| line.get("loss").is_some());
    assert_eq!((steps.len() as u64, evals.len()), (STEPS, 3));
    let sum = |key: &str| steps.iter().map(|line| line[key].as_f64().unwrap()).sum::<f64>();
    let loss = |line: &Value, key: &str| short(line[key].as_f64().unwrap());
    let output = format!("the loss went from {} to {}", loss(&steps[0], "loss"), loss(&steps[11], "loss"));
    assert!(page.contains(&format!("Finished: all {STEPS} steps are done; {output}")), "{output}");
    let tokens_trained: f64 =
        steps.iter().map(|line| (line["tokens_per_second"].as_f64().unwrap() * line["step_ms"].as_f64().unwrap() / 1e3).round()).sum();
    let tokens = if tokens_trained >= 1000.0 {
        format!("{},{:03}", tokens_trained as u64 / 1000, tokens_trained as u64 % 1000)
    } else {
        tokens_trained.to_string()
    };
    assert!(page.contains(&format!("over {tokens} tokens")), "{tokens}");
    assert!(page.contains(&format!("evaluation {} after step {STEPS}", loss(&evals[2], "eval_loss"))));
    for key in ["speculated", "rolled_back", "committed", "clipped"] {
        assert!(page.contains(&format!("<td>{}</td>", sum(key))), "{key} {}", sum(key));
    }
    for class in ["gradients", "weights", "gradient slots"] {
        assert!(page.contains(&format!("</i>{class} <b>")), "{class}");
    }
    let in_order = workspace.names("plain", "checkpoint-").len();
    assert!(in_order > 0 && page.matches("<td>in order</td>").count() == in_order);
    assert!(
        page.contains("--eval-steps 4")
            && page.contains("<td><code>eval-steps</code></td><td><code>not set</code></td><td><code>4</code></td>")
    );
    let plan = &workspace.metrics_and_facts("plain")[0]["facts"]["plan"];
    let states = format!("<td>Plan</td><td>states of {} of {} buckets on the device, ", plan["resident_buckets"], plan["buckets"]);
    assert!(page.contains(&states) && page.contains("layers: 1 "), "{states}");
    assert!(page.contains("<td>Build</td>") && page.contains(concat!("superoffload ", env!("CARGO_PKG_VERSION"), ", commit ")));
    assert_eq!((page.matches("<div class=\"plot\">").count(), page.matches("class=\"dot ").count()), (6, 1));
    assert_eq!(check_svg(&page), 6 * 2 + 4 + LANES);
    let strokes = |class: &str| page.split_once(&format!("<path class=\"{class} r0\"")).unwrap().1.split('"').nth(3).unwrap().to_string();
    let best = evals.iter().min_by(|a, b| a["eval_loss"].as_f64().unwrap().total_cmp(&b["eval_loss"].as_f64().unwrap())).unwrap();
    let at = |place: &str| place.trim_end_matches("h0").split(',').map(|x| x.parse::<f64>().unwrap()).collect::<Vec<_>>();
    let dots: Vec<_> = strokes("dot").split('M').skip(1).map(at).collect();
    let place = at(strokes("best").trim_start_matches('M'));
    assert!(dots.len() == 3 && dots.contains(&place) && dots.iter().all(|dot| dot[1] <= place[1]), "{dots:?} {place:?}");
    assert!(page.contains(&format!("\">best {}</text>", loss(best, "eval_loss"))), "{best}");
    assert_eq!(page.matches("href=\"https://ui.perfetto.dev\"").count(), 1);
    for title in ["Typical: step ", "Slowest: step "] {
        let step = page.split_once(title).unwrap().1.split_once(", ").unwrap().0.parse::<u64>().unwrap();
        assert!((2..=STEPS).contains(&step), "{title}{step}");
    }
    let output = |attribute: &str| -> Vec<f64> {
        let text = page.split_once(&format!(" {attribute}=\"")).unwrap().1.split_once('"').unwrap().0;
        text.split(' ').map(|number| number.parse().unwrap()).collect()
    };
    let (by_step, ms_by_step, means) = (output("data-tokens"), output("data-ms"), output("data-means"));
    assert_eq!(by_step.last().unwrap().to_string(), tokens_trained.to_string());
    assert!((ms_by_step.last().unwrap() - sum("step_ms")).abs() < 0.1 && ms_by_step.len() == 2 * steps.len(), "{ms_by_step:?}");
    let expected = steps.iter().flat_map(|line| [line["step"].as_f64().unwrap(), line["loss"].as_f64().unwrap(), 1.0]);
    assert!(means.iter().zip(expected).all(|(output, is)| (output / is - 1.0).abs() < 1e-4) && means.len() == 3 * steps.len(), "{means:?}");
    let counts = &workspace.metrics_and_facts("plain")[0]["facts"]["data_counts"];
    let rows = format!("<td>{} of 16 tokens</td>", counts["rows"]);
    assert!(page.contains(&rows) && page.contains("<td>0 (0.0 %)</td>") && counts["padding"] == 0, "{counts}");
}

/// The command on the page trains to the same losses.
#[test]
fn the_command_on_the_page_repeats_the_run() {
    let workspace = trained();
    let page = page(&workspace, &["plain"]);
    let command = page.split_once("<pre>").unwrap().1.split_once("</pre>").unwrap().0.replace("\\\n", " ").replace("&#39;", "'");
    let words = command.split_whitespace().skip(1).map(|word| word.trim_matches('\''));
    let again = run(program(&[]).args(words));
    assert_eq!(again.code, 0, "{again:?}");
    let losses = |name: &str| workspace.metrics(name).iter().map(|line| line["loss"].clone()).collect::<Vec<_>>();
    assert_eq!(losses("plain-again"), losses("plain"), "the command names a new output directory");
}

#[test]
fn several_runs_are_drawn_over_each_other_and_differences_are_shown() {
    let workspace = trained();
    assert_eq!(run(&mut workspace.train("other", &["--learning-rate", "0.5", "--replan", "off"])).code, 0);
    let page = page(&workspace, &["plain", "other"]);
    let replan = ["replan", "default", "default", "off"].map(|word| format!("<td><code>{word}</code></td>")).concat();
    assert!(page.contains(&replan), "a default that records leave out is not unknown: {page}");
    assert!(page.contains("<h1>plain, other</h1>") && page.contains("<td><code>0.5</code></td>"));
    assert_eq!(page.matches("<path class=\"smooth r0\"").count(), 6);
    assert_eq!(page.matches("<path class=\"smooth r1\"").count(), 6);
    assert_eq!(check_svg(&page), 6 * 2 + 2 * (4 + LANES));
}

#[test]
fn an_invalid_timeline_is_reported_and_the_rest_is_shown() {
    let workspace = trained();
    let trace = workspace.path("plain/trace.json");
    fs::remove_file(&trace).unwrap();
    std::os::unix::fs::symlink(workspace.path("held.txt"), &trace).unwrap();
    let page = page(&workspace, &["plain"]);
    assert!(page.contains("No trace.json in the output directory has three whole steps.") && !page.contains("Typical: step"));
    assert!(!page.contains("perfetto"));
    assert_eq!(check_svg(&page), 6 * 2 + 4);
}

#[test]
fn memory_is_reported_as_planned_and_as_measured() {
    let workspace = Workspace::new();
    let (memory, machine) = (json!({"device_bytes": {"weights": 3_u64 << 30}}), json!({"gpu": {"memory_used_bytes": 5_u64 << 30}}));
    let facts = json!({"facts": {"from_step": 0, "memory": memory, "machine": machine}});
    workspace.write("gpu/metrics.jsonl", format!("{facts}\n{{\"step\":1,\"rss_bytes\":{}}}\n", 7_u64 << 30));
    let page = page(&workspace, &["gpu"]);
    for words in ["Planned, device: 3.0 GiB", "all processes</td><td>5.0 GiB</td>", "last step</td><td>7.0 GiB</td>"] {
        assert!(page.contains(words), "{words} {page}");
    }
    workspace.write("none/metrics.jsonl", "{\"step\":1,\"memory\":{\"host_bytes\":{\"weights\":3}}}\n");
    assert!(!self::page(&workspace, &["none"]).contains("Measured"));
}

#[test]
fn names_from_files_are_text_and_damage_is_counted() {
    let workspace = Workspace::new();
    let name = "<script>alert(1)</script>&\"'".replace('/', "|");
    let lines = "{\"step\":1,\"loss\":null,\"memory\":{\"device_bytes\":{\"<b>\":3},\"host_bytes\":{\"<svg onload=x>\":9}}}\nbroken\n{\"step\":2,\"lo";
    workspace.write(&format!("{name}/metrics.jsonl"), lines);
    let page = page(&workspace, &[&name]);
    assert!(!page.contains("<script>alert") && !page.contains("<svg onload") && page.contains("&lt;script&gt;alert(1)"));
    assert!(page.contains("1 line of metrics.jsonl is damaged") && page.contains("has no end") && page.contains("1 step has no loss"));
    assert!(page.contains("no checkpoint has the total") && page.contains("No step has this value."));
    check_svg(&page);
}

/// Six long runs with jumping values, an evaluation after each step, and every other step clipped.
#[test]
fn the_largest_page_is_below_two_megabytes() {
    let workspace = Workspace::new();
    let line = |step: u64| {
        let (x, verdict) = ((step * 7919 % 1000) as f64 / 100.0, if step.is_multiple_of(2) { "clip" } else { "skip" });
        format!(
            "{{\"step\":{step},\"loss\":{x},\"grad_norm\":{x},\"learning_rate\":{x},\"verdict\":\"{verdict}\",\"step_ms\":{x},\
             \"tokens_per_second\":{x}}}\n{{\"step\":{step},\"eval_loss\":{x},\"eval_seconds\":1e300}}\n"
        )
    };
    workspace.write("long/metrics.jsonl", (1..=3000).map(line).collect::<String>());
    let page = page(&workspace, &["long"; 6]);
    assert!(page.len() > 300_000, "{}", page.len());
    check_svg(&page);
}

/// Writes seven conversations to `chat.jsonl`, on which the run `chat` trains two steps.
fn chatted() -> Workspace {
    let workspace = Workspace::new();
    let output = |role: &str, content: String| json!({"role": role, "content": content});
    let line = |n: usize| json!({"messages": [output("user", format!("<b>quagga{n}</b> &\t?")), output("assistant", format!("okapi{n}"))]});
    let lines: Vec<String> = (0..7).map(|n| line(n).to_string()).collect();
    let data = format!("--data={}", workspace.write("chat.jsonl", lines.join("\n")).display());
    let template = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[a]{% endif %}";
    let template = format!("--chat-template={}", workspace.write("chat.jinja", template).display());
    assert_eq!(run(&mut workspace.train("chat", &[&data, &template, "--max-steps=2", "--seq-length=64"])).code, 0);
    workspace
}

#[test]
fn text_of_the_data_is_on_the_page_only_on_request() {
    let workspace = chatted();
    let without = page(&workspace, &["chat"]);
    assert!(!["quagga", "okapi", "No samples"].iter().any(|word| without.contains(word)) && without.contains("holds no training data"));
    let with = page_with(&workspace, &["chat"], WITH_SAMPLES);
    let sample = "[u]&lt;b&gt;quagga4&lt;/b&gt; &amp;\t?\n[a]<mark>okapi4\n</mark></pre>";
    assert!(with.contains(sample) && with.contains("<figcaption>chat.jsonl, record 5: 32 tokens</figcaption>"), "{with}");
    assert!(!with.contains("okapi5") && !with.contains("<b>quagga") && with.contains("holds samples of the training data"));
    assert_eq!(with.matches("<pre class=\"sample\"").count(), 5);
    assert_eq!(page_with(&workspace, &["chat"; 2], WITH_SAMPLES).matches("<pre class=\"sample\"").count(), 10);
}

#[test]
fn unavailable_samples_are_one_line_and_the_rest_is_shown() {
    let workspace = chatted();
    // As on another machine: another location, and no model directory.
    copy_dir(&workspace.path("chat"), &workspace.path("elsewhere"));
    fs::remove_dir_all(workspace.path("model")).unwrap();
    assert!(page_with(&workspace, &["elsewhere"], WITH_SAMPLES).contains("<mark>okapi0"), "the checkpoint has the tokenizer");
    let none = |name: &str, words: &str| {
        let page = page_with(&workspace, &[name], WITH_SAMPLES);
        let line = page.split_once("<p class=\"none\">No samples of the data: ").expect(&page).1.split_once("</p>").unwrap().0;
        assert!(line.contains(words) && !page.contains("okapi"), "{line}");
        assert!(SECTIONS.iter().all(|section| page.contains(&format!("<h2>{section}</h2>"))) && page.contains("holds no training data"));
    };
    let data = workspace.path("chat.jsonl");
    let all = fs::read_to_string(&data).unwrap();
    fs::write(&data, all.replace("okapi", "okapis")).unwrap();
    none("elsewhere", "chat.jsonl: changed since: ");
    fs::write(&data, all).unwrap();
    fs::remove_file(workspace.path("chat.jinja")).unwrap();
    none("elsewhere", "chat.jinja: ");
    fs::remove_file(&data).unwrap();
    none("elsewhere", "chat.jsonl: No such file");
    let metrics =
        |settings: Value| format!("{}\n", json!({"facts": {"from_step": 0, "settings": settings, "model": {"params": 1}, "max_steps": 1}}));
    let ids = workspace.write("ids.bin", [0; 8]);
    for (name, settings, words) in [
        ("plain", json!({"data": []}), "it is the text that ships with the program."),
        ("ids", json!({"data": [ids]}), "it is token ids."),
        ("odd", json!({"data": 5, "model": [], "eos_token": {}}), "settings: invalid type"),
    ] {
        workspace.write(&format!("{name}/metrics.jsonl"), metrics(settings));
        none(name, words);
    }
    workspace.write("bare/metrics.jsonl", "{\"step\":1}\n");
    none("bare", "no record has the settings of the data.");
}

#[test]
fn folders_without_a_run_or_a_report_are_refused_in_one_line() {
    let workspace = Workspace::new();
    workspace.write("mine.html", "<!doctype html>\n<p>mine");
    fs::create_dir(workspace.path("empty")).unwrap();
    report(&workspace, &["empty"], &[]).refused(2, &["empty", "not the output directory of a run"]);
    report(&workspace, &["missing"], &[]).refused(1, &["missing", "No such file"]);
    report(&workspace, &["data.txt"], &[]).refused(1, &["data.txt", "Not a directory"]);
    report(&workspace, &["empty"; 7], &[]).refused(2, &["7 runs, at most 6"]);
    assert!(!workspace.path("report.html").exists());
    workspace.write("run/metrics.jsonl", "{\"step\":1,\"loss\":2.5}\n");
    let onto = |out: &str| run(program(&["report", "-o"]).arg(workspace.path(out)).arg(workspace.path("run")));
    onto("mine.html").refused(2, &["mine.html", "not a report of this program"]);
    assert!(fs::read_to_string(workspace.path("mine.html")).unwrap().ends_with("mine"));
    assert_eq!((onto("new.html").code, onto("new.html").code), (0, 0));
}

/// A browser that opens pages. Without one the test is skipped.
struct Browser<'a> {
    program: std::ffi::OsString,
    workspace: &'a Workspace,
}

impl Browser<'_> {
    /// Opens the report at the fragment `at` and returns the browser's output. Console messages fail the test.
    fn open(&self, at: &str, flags: &[&str]) -> String {
        let common = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"];
        let address = format!("file://{}{at}", self.workspace.path("report.html").display());
        let shown = run(Command::new(&self.program).args(common).args(flags).arg(address));
        assert!(shown.code == 0 && !shown.stderr.contains("CONSOLE"), "{}", shown.stderr);
        shown.stdout
    }

    /// The colour of the page's upper left corner for a preference of light (1) or dark (0).
    fn paper(&self, scheme: u8) -> [u8; 3] {
        let png = self.workspace.path("page.png");
        self.open(
            "",
            &[
                "--window-size=1200,5000",
                &format!("--screenshot={}", png.display()),
                &format!("--blink-settings=preferredColorScheme={scheme}"),
            ],
        );
        first_pixel(&fs::read(png).unwrap())
    }

    /// Number of pages when printed.
    fn sheets(&self) -> usize {
        let pdf = self.workspace.path("page.pdf");
        self.open("", &["--no-pdf-header-footer", &format!("--print-to-pdf={}", pdf.display())]);
        let pdf = String::from_utf8_lossy(&fs::read(pdf).unwrap()).into_owned();
        assert!(pdf.starts_with("%PDF-") && pdf.trim_end().ends_with("%%EOF"));
        pdf.matches("/Type /Page\n").count()
    }
}

/// The first pixel of a PNG, which no filter modifies.
fn first_pixel(png: &[u8]) -> [u8; 3] {
    let (mut rest, mut packed) = (&png[8..], Vec::new());
    while let [a, b, c, d, kind @ ..] = rest {
        let (kind, data) = kind.split_at(4);
        let length = u32::from_be_bytes([*a, *b, *c, *d]) as usize;
        packed.extend_from_slice(if kind == b"IDAT" { &data[..length] } else { &[] });
        rest = &data[length + 4..];
    }
    let mut begin = [0; 4];
    std::io::Read::read_exact(&mut flate2::read::ZlibDecoder::new(&packed[..]), &mut begin).unwrap();
    [begin[1], begin[2], begin[3]]
}

/// Light, dark and printed pages of one run and of several. A line of `tests/campaigns/browser.jsonl` records the result.
#[test]
fn a_browser_draws_the_page_and_has_no_complaint() {
    let Some(program) = std::env::var_os("SUPEROFFLOAD_BROWSER") else { return };
    let workspace = trained();
    assert_eq!(run(&mut workspace.train("other", &["--learning-rate", "0.05", "--max-steps", "9"])).code, 0);
    let version = run(Command::new(&program).arg("--version")).stdout.trim().to_string();
    let browser = Browser { program, workspace: &workspace };
    let mut pages = Vec::new();
    for runs in [&["plain"][..], &["plain", "other"]] {
        let bytes = page_with(&workspace, runs, WITH_SAMPLES).len();
        let shown = browser.open("", &["--dump-dom"]);
        // The script ran, so its hash matches the content policy: each chart has its readout.
        assert_eq!(shown.matches("<output hidden").count(), 5, "{shown}");
        let turned = browser.open("#axis=tokens&smooth=0", &["--dump-dom"]);
        assert_eq!(turned.matches(">tokens</text>").count(), 5, "each chart is drawn anew: {turned}");
        let line = |class: &str| {
            turned.split_once(&format!("<path class=\"{class} r0\"")).unwrap().1.split_once(" d=\"").unwrap().1.split_once('"').unwrap().0
        };
        let places = |line: &str| line.split(['M', 'L', ',']).filter_map(|x| x.parse::<f64>().ok()).collect::<Vec<_>>();
        let (raw, smooth) = (places(line("raw")), places(line("smooth")));
        assert!(raw.len() == 2 * STEPS as usize && raw.len() == smooth.len(), "{turned}");
        assert!(raw.iter().zip(&smooth).all(|(raw, smooth)| (raw - smooth).abs() < 0.3), "{raw:?} {smooth:?}");
        assert_eq!(browser.open("#axis=time&smooth=50", &["--dump-dom"]).matches(">s</text>").count(), 5);
        let (light, dark, sheets) = (browser.paper(1), browser.paper(0), browser.sheets());
        assert!(light.iter().all(|part| *part > 240) && dark.iter().all(|part| *part < 40), "{light:?} {dark:?}");
        assert!((2..=8 * runs.len()).contains(&sheets), "{sheets} sheets");
        pages.push(
            json!({"runs": runs.len(), "bytes": bytes, "charts": 5, "complaints": 0, "light": light, "dark": dark, "sheets": sheets}),
        );
    }
    record("browser", json!({"browser": version, "pages": pages}));
}

/// Routers with tied logits select the first experts. With different weights, experts differ.
#[test]
fn the_load_of_experts_is_shown_for_models_with_experts() {
    let workspace = Workspace::new();
    let train = |name: &str, std: f64, flags: &[&str]| {
        let config = serde_json::json!({
            "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 32, "moe_intermediate_size": 16, "num_experts": 8,
            "num_experts_per_tok": 3, "mlp_only_layers": [1], "vocab_size": 256, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
            "tie_word_embeddings": false, "initializer_range": std,
        });
        let file = workspace.write(&format!("model-{name}/config.json"), config.to_string());
        let model = format!("--model={}", file.parent().unwrap().display());
        let outcome =
            run(&mut workspace.train(name, &[&["--init=random", "--tokenizer=bytes", "--gradient-shares=2", &model], flags].concat()));
        assert_eq!(outcome.code, 0, "{outcome:?}");
        let metrics = workspace.metrics(name);
        metrics.iter().map(|line| ["expert_largest_over_mean", "expert_unused_share"].map(|key| line[key].as_f64().unwrap())).collect()
    };
    let ties: Vec<[f64; 2]> = train("ties", 0.0, &["--gradient-accumulation-steps=4"]);
    assert_eq!(ties[0], [8.0 / 3.0, 5.0 / 8.0]);
    let (one, two): (Vec<[f64; 2]>, Vec<_>) =
        (train("one", 0.5, &["--gradient-accumulation-steps=4"]), train("two", 0.5, &["--gradient-accumulation-steps=2", "--gpus=2"]));
    assert!(one == two && one.iter().all(|[largest, unused]| (1.0..8.0 / 3.0).contains(largest) && *unused < 0.6), "{one:?} {two:?}");
    let drawn = page(&workspace, &["one"]);
    assert!(drawn.contains("<h2>Load of experts</h2>") && check_svg(&drawn) > 6);
    assert_eq!(run(&mut workspace.train("dense", &[])).code, 0);
    assert!(
        !page(&workspace, &["dense"]).contains("Load of experts") && workspace.metrics("dense")[0].get("expert_unused_share").is_none()
    );
}
