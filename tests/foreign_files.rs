//! The program changes no foreign files. Something foreign is placed at every name that it ever writes; it still trains, resumes, exports,
//! prepares data and writes reports.

use crate::program::{Outcome, STEPS, Workspace, copy_dir, program, run};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use superoffload::internals::train::patterns;

/// The object at a path: a file by its inode and content, a link by its target.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Thing {
    File(u64, Vec<u8>),
    Link(PathBuf),
    Other(u64),
}

/// Kinds of foreign objects, with their descriptions.
const KINDS: [&str; 9] =
    ["file", "JSON", "folder", "link to a file", "link to a folder", "dangling link", "link to the data", "hard link", "pipe"];

/// A workspace next to foreign objects, which links point to.
struct Disk {
    workspace: Workspace,
}

impl Disk {
    fn new() -> Self {
        let workspace = Workspace::new();
        for name in ["root/etc/passwd", "root/thesis.tex", "root/tokens.u32", "root/manifest.json"] {
            workspace.write(name, format!("precious {name}"));
        }
        Self { workspace }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.workspace.path(name)
    }

    /// Creates an object of this kind at `path`, with its parent directories.
    fn plant(&self, kind: &str, path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let content = format!("foreign {}", path.display());
        match kind {
            "file" => fs::write(path, content).unwrap(),
            "JSON" => fs::write(path, format!("{{\"text\": \"{content}\"}}\n")).unwrap(),
            "folder" => {
                fs::create_dir_all(path.join("model")).unwrap();
                fs::write(path.join("thesis.tex"), &content).unwrap();
                fs::write(path.join("model/notes.txt"), content).unwrap();
            }
            "link to a file" => symlink(self.path("root/thesis.tex"), path).unwrap(),
            "link to a folder" => symlink(self.path("root"), path).unwrap(),
            "dangling link" => symlink(self.path("nowhere"), path).unwrap(),
            "link to the data" => symlink(self.path("data.txt"), path).unwrap(),
            "hard link" => fs::hard_link(self.path("root/thesis.tex"), path).unwrap(),
            _ => mkfifo(path, Mode::S_IRWXU).unwrap(),
        }
    }

    /// All objects below the home.
    fn things(&self) -> BTreeMap<PathBuf, Thing> {
        let mut found = BTreeMap::new();
        collect(&self.path(""), &mut found);
        found
    }
}

fn collect(dir: &Path, found: &mut BTreeMap<PathBuf, Thing>) {
    for entry in fs::read_dir(dir).unwrap().map(Result::unwrap) {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        let inode = entry.metadata().unwrap().ino();
        if kind.is_dir() {
            collect(&path, found);
        } else if kind.is_file() {
            found.insert(path.clone(), Thing::File(inode, fs::read(&path).unwrap()));
        } else if kind.is_symlink() {
            found.insert(path.clone(), Thing::Link(fs::read_link(&path).unwrap()));
        } else {
            found.insert(path, Thing::Other(inode));
        }
    }
}

/// Checks that each object of `foreign` still exists, at its path or renamed in the output directory.
fn assert_kept(disk: &Disk, foreign: &BTreeMap<PathBuf, Thing>, outcome: &Outcome) {
    let now = disk.things();
    let mut left: BTreeMap<&Thing, usize> = BTreeMap::new();
    now.values().for_each(|thing| *left.entry(thing).or_default() += 1);
    for (path, thing) in foreign {
        let count = left.get_mut(thing).unwrap_or_else(|| panic!("{} is gone: {thing:?}\n{outcome:?}", path.display()));
        *count = count.checked_sub(1).unwrap_or_else(|| panic!("one name of {} is gone\n{outcome:?}", path.display()));
    }
}

/// All names that the program ever writes, with numbers filled in.
fn names() -> Vec<String> {
    let names: Vec<String> = ["2", "4711"].iter().flat_map(|number| patterns().into_iter().map(|name| name.replace('#', number))).collect();
    assert!(names.len() > 40 && names.contains(&".superoffload/tokens".to_string()), "{names:?}");
    names
}

#[test]
fn a_new_run_among_foreign_things_is_refused_before_it_writes_a_byte() {
    let disk = Disk::new();
    for kind in KINDS {
        let out = kind.replace(' ', "-");
        for name in names().iter().filter(|name| !name.contains('/')) {
            let path = disk.path(&out).join(name);
            if path.symlink_metadata().is_err() {
                disk.plant(kind, &path);
            }
        }
        let before = disk.things();
        for flags in [&[][..], &["--dry-run"], &["--resume-from-checkpoint", "auto"]] {
            let refused = run(&mut disk.workspace.train(&out, flags));
            refused.refused(2, &[disk.path(&out).to_str().unwrap(), "of this program, but the run needs this name", "--output-dir"]);
            assert_eq!(disk.things(), before, "{kind} {flags:?}: {refused:?}");
        }
    }
}

#[test]
fn a_run_that_goes_on_among_foreign_things_keeps_all_of_them() {
    let disk = Disk::new();
    let whole = run(&mut disk.workspace.train("whole", &[])).digest().to_string();
    run(&mut disk.workspace.train("base", &["--max-steps", "4"])).digest();
    for kind in KINDS {
        let (out, before) = (kind.replace(' ', "-"), disk.things());
        copy_dir(&disk.path("base"), &disk.path(&out));
        let own = disk.things();
        // A dangling link may point to an unmounted disk with a newer checkpoint. Next to such a link a run is not resumed.
        let is_in_doubt =
            |name: &str| kind == "dangling link" && !name.contains('/') && (name.starts_with("checkpoint-") || name.contains(".old-"));
        for name in names().into_iter().chain(["checkpoint-8".into(), "checkpoint-6/notes.txt".into()]) {
            // The files that the run depends on stay, and a directory is not replaced by one of its planted entries.
            if ["checkpoint-2", "checkpoint-4", ".superoffload", ".superoffload/manifest.json"].contains(&name.as_str())
                || is_in_doubt(&name)
            {
                continue;
            }
            let path = disk.path(&out).join(name);
            match path.symlink_metadata() {
                Ok(found) if found.is_dir() => fs::remove_dir_all(&path).unwrap(),
                Ok(_) => fs::remove_file(&path).unwrap(),
                Err(_) => {}
            }
            disk.plant(kind, &path);
        }
        let mut foreign = disk.things();
        foreign.retain(|path, thing| own.get(path) != Some(thing) || before.contains_key(path));
        let resumed = run(&mut disk.workspace.resume(&out, &["--save-total-limit", "2"]));
        assert_eq!(resumed.digest(), whole, "{kind}: {resumed:?}");
        for name in
            ["metrics.jsonl", "trace.json", "tb", ".lock", ".superoffload/data-sources.json", ".superoffload/tokens", "checkpoint-8"]
        {
            // Token folders have separate names inside that folder. Its creator does not matter, and its other content stays.
            if kind == "folder" && name == ".superoffload/tokens" || is_in_doubt(name) {
                continue;
            }
            assert!(disk.path(&out).join(format!("{name}.foreign-1")).symlink_metadata().is_ok(), "{kind} {name}");
            let word = name.rsplit('/').next().unwrap();
            assert!(resumed.stderr.contains(&format!("it is now {word}.foreign-1")), "{kind} {name}: {resumed:?}");
        }
        assert_kept(&disk, &foreign, &resumed);
        let again = run(&mut disk.workspace.train(&out, &["--max-steps", "2"]));
        again.digest();
        assert_kept(&disk, &foreign, &again);
        let report = run(program(&["report"]).arg(disk.path(&out)).arg("-o").arg(disk.path(&format!("{out}.html"))));
        assert_eq!(report.code, 0, "{report:?}");
        assert_kept(&disk, &foreign, &report);
    }
    assert_eq!(disk.workspace.metrics("whole").len() as u64, STEPS);
}

#[test]
fn foreign_files_in_output_folders_outlive_rotation_new_runs_and_resumes() {
    let disk = Disk::new();
    run(&mut disk.workspace.train("out", &["--max-steps", "6"])).digest();
    for folder in ["checkpoint-2", "checkpoint-4/model", "checkpoint-6", "tb", ".superoffload", ".superoffload/tokens", "previous-1"] {
        disk.plant("file", &disk.path("out").join(folder).join("notes.txt"));
        disk.plant("folder", &disk.path("out").join(folder).join("tables"));
    }
    let mut foreign = disk.things();
    foreign.retain(|path, _| path.components().any(|part| ["notes.txt", "tables", "root"].iter().any(|name| part.as_os_str() == *name)));
    assert!(foreign.len() >= 7 * 3, "{foreign:?}");
    let rotated = run(&mut disk.workspace.resume("out", &["--save-total-limit", "1"]));
    rotated.digest();
    assert_kept(&disk, &foreign, &rotated);
    assert!(
        rotated.stderr.contains("checkpoint-4.foreign-1: kept, because no run of this program wrote it; the rest of checkpoint-4"),
        "{rotated:?}"
    );
    assert_eq!(disk.workspace.names("out", "checkpoint-12"), ["checkpoint-12"]);
    let fresh = run(&mut disk.workspace.train("out", &["--max-steps", "2"]));
    fresh.digest();
    assert_kept(&disk, &foreign, &fresh);
}

#[test]
fn exports_reports_timelines_and_prepared_text_replace_their_own_kind_alone() {
    let disk = Disk::new();
    run(&mut disk.workspace.train("out", &["--max-steps", "2"])).digest();
    let text = disk.workspace.write("large.txt", "the words of a large text \n".repeat(200_000));
    let prepare = || run(program(&["prepare"]).arg(&text).env("SUPEROFFLOAD_CACHE", disk.path("cache")));
    assert_eq!(prepare().code, 0);
    let key = disk.workspace.names("cache", "").into_iter().find(|name| !name.ends_with(".lock")).unwrap();
    let cached = |name: &str| disk.path("cache").join(name);
    for kind in KINDS {
        fs::remove_dir_all(cached("")).unwrap();
        for name in [key.clone(), format!(".{key}.tmp")] {
            disk.plant(kind, &cached(&name));
        }
        let place = |name: &str| disk.path(&kind.replace(' ', "-")).join(name);
        for name in ["export", ".export.tmp-4711", "report.html", ".report.html.tmp-4711", "t.json", ".t.json.tmp-4711"] {
            disk.plant(kind, &place(name));
        }
        let mut before = disk.things();
        let outcomes = [
            prepare(),
            run(program(&["export"]).arg(disk.path("out")).arg(place("export"))),
            run(program(&["report"]).arg(disk.path("out")).arg("-o").arg(place("report.html"))),
            run(&mut disk.workspace.resume("out", &["--trace", place("t.json").to_str().unwrap()])),
        ];
        for outcome in &outcomes {
            assert!([1, 2].contains(&outcome.code) && outcome.stderr.contains(disk.path("").to_str().unwrap()), "{kind}: {outcome:?}");
        }
        // The resumed run took the lock of its own directory and wrote its process id before it checked the timeline.
        before.remove(&disk.path("out/.lock"));
        assert_kept(&disk, &before, &outcomes[0]);
        // With foreign objects present, each command uses another path.
        let exported = run(program(&["export"]).arg(disk.path("out")).arg(place("other")));
        assert_eq!(exported.code, 0, "{exported:?}");
        let flags = ["--max-steps", "1", "--device", "cpu", "--data", text.to_str().unwrap(), "--trace"];
        let mut train = disk.workspace.train(&format!("run {kind}"), &flags);
        let trained = run(train.arg(place("other.json")).env("SUPEROFFLOAD_CACHE", disk.path("cache")));
        assert!(trained.stderr.contains("prepared text is kept in the output directory instead"), "{kind}: {trained:?}");
        trained.digest();
        assert_kept(&disk, &before, &trained);
    }
}

#[test]
fn data_and_other_inputs_in_the_output_directory_stay_or_are_refused() {
    let disk = Disk::new();
    let rows = "{\"text\": \"the cpu state \"}\n".repeat(100);
    let array = format!("[{}]", rows.trim_end().replace('\n', ","));
    for (name, content) in
        [("p/data.json", &array), ("p/data-tokens/part.jsonl", &rows), ("p/.data/x.jsonl", &rows), ("p/data-sources.json", &array)]
    {
        let path = disk.workspace.write(name, content);
        for _ in 0..2 {
            let trained = run(&mut disk.workspace.train("p", &["--data", path.to_str().unwrap(), "--max-steps", "2"]));
            trained.digest();
            assert_eq!(fs::read_to_string(&path).unwrap(), *content, "{name}");
        }
        let resumed = run(&mut disk.workspace.resume("p", &["--data", path.to_str().unwrap(), "--max-steps", "3"]));
        resumed.digest();
        assert_eq!(fs::read_to_string(&path).unwrap(), *content, "{name}");
    }
    let corpus = disk.workspace.write("corpus/a.jsonl", &rows);
    let before = disk.things();
    let whole = run(&mut disk.workspace.train("corpus", &["--data", disk.path("corpus").to_str().unwrap()]));
    whole.refused(2, &["--data", "corpus", "metrics.jsonl", "would count as data", "another --output-dir"]);
    assert_eq!(disk.things(), before);
    let log = disk.workspace.write("q/metrics.jsonl", &rows);
    run(&mut disk.workspace.train("q", &["--data", log.to_str().unwrap()])).refused(2, &["--data", "the run itself writes metrics.jsonl"]);
    assert_eq!(fs::read_to_string(log).unwrap(), rows);
    run(&mut disk.workspace.train("corpus", &["--data", corpus.to_str().unwrap(), "--max-steps", "2"])).digest();
    let from = disk.path("p/checkpoint-3/model");
    run(&mut disk.workspace.train("p", &["--model", from.to_str().unwrap(), "--init", "random", "--max-steps", "1"])).digest();
}

/// Damage as after a power failure.
#[test]
fn damaged_records_logs_and_timelines_stop_no_resume() {
    let workspace = Workspace::new();
    let whole = run(&mut workspace.train("whole", &[])).digest().to_string();
    run(&mut workspace.train("base", &["--max-steps", "4"])).digest();
    let records = workspace.names("base/.superoffload", "");
    let names = ["trace.json", "metrics.jsonl"].map(String::from).into_iter();
    for name in names.chain(records.iter().filter(|name| name.ends_with(".json")).map(|name| format!(".superoffload/{name}"))) {
        for (damage, content) in [("zeros", vec![0; 4096]), ("nothing", vec![]), ("cut", vec![])] {
            let out = format!("{}-{damage}", name.replace('/', "-"));
            copy_dir(&workspace.path("base"), &workspace.path(&out));
            let path = workspace.path(&out).join(&name);
            let content = if damage == "cut" { fs::read(&path).unwrap()[..20].to_vec() } else { content };
            fs::write(&path, &content).unwrap();
            let resumed = run(&mut workspace.resume(&out, &[]));
            assert_eq!(resumed.digest(), whole, "{out}: {resumed:?}");
            if damage == "zeros" {
                let is_kept =
                    |name: &str| fs::read(workspace.path(&out).join(format!("{name}.foreign-1"))).is_ok_and(|kept| kept == content);
                assert!(is_kept(&name) || is_kept(".superoffload/manifest.json") || is_moved_whole(&workspace, &out), "{out}: {resumed:?}");
                assert!(resumed.stderr.contains("of this program; it is now"), "{resumed:?}");
            }
        }
    }
}

/// Whether the folder of records was renamed as a whole, because it lost its manifest.
fn is_moved_whole(workspace: &Workspace, out: &str) -> bool {
    workspace.path(out).join(".superoffload.foreign-1").is_dir()
}

#[test]
fn a_directory_of_an_earlier_version_resumes_and_its_records_stay() {
    let workspace = Workspace::new();
    let whole = run(&mut workspace.train("whole", &[])).digest().to_string();
    run(&mut workspace.train("old", &["--max-steps", "4"])).digest();
    let old = |name: &str| workspace.path("old").join(name);
    for (now, then) in [("data-checksums.json", "data.json"), ("data-sources.json", "data-sources.json")] {
        let record: serde_json::Value = serde_json::from_slice(&fs::read(old(".superoffload").join(now)).unwrap()).unwrap();
        let content = record["content"].to_string().replace(".superoffload/tokens", "data-tokens");
        fs::write(old(then), content).unwrap();
    }
    fs::rename(old(".superoffload/tokens"), old("data-tokens")).unwrap();
    fs::remove_dir_all(old(".superoffload")).unwrap();
    fs::remove_file(workspace.path("data.txt")).unwrap();
    let kept: Vec<_> = ["data.json", "data-sources.json"].map(|name| fs::read(old(name)).unwrap()).into();
    let resumed = run(&mut workspace.resume("old", &[]));
    assert_eq!(resumed.digest(), whole, "{resumed:?}");
    assert!(resumed.stdout.contains("data-tokens"), "the text is gone: {resumed:?}");
    assert_eq!(Vec::from(["data.json", "data-sources.json"].map(|name| fs::read(old(name)).unwrap())), kept);
    let once_more = run(&mut workspace.resume("old", &["--max-steps", "13"]));
    assert_eq!(once_more.code, 0, "{once_more:?}");
}

#[test]
fn a_hard_linked_backup_of_a_run_is_not_written() {
    let disk = Disk::new();
    run(&mut disk.workspace.train("out", &["--max-steps", "4"])).digest();
    let files = disk.things();
    for path in files.keys().filter(|path| path.starts_with(disk.path("out"))) {
        let backup = disk.path("backup").join(path.strip_prefix(disk.path("out")).unwrap());
        fs::create_dir_all(backup.parent().unwrap()).unwrap();
        fs::hard_link(path, backup).unwrap();
    }
    let mut backup = disk.things();
    backup.retain(|path, _| path.starts_with(disk.path("backup")));
    run(&mut disk.workspace.resume("out", &["--save-total-limit", "1"])).digest();
    run(&mut disk.workspace.train("out", &["--max-steps", "2"])).digest();
    let mut now = disk.things();
    now.retain(|path, _| path.starts_with(disk.path("backup")));
    assert_eq!(now, backup);
}
