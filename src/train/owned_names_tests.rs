use super::*;
use crate::config::options::Resume;
use crate::train::tests::{RecordingObserver, four_steps};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Whether `path`, one in the output directory, is in a table, or below a folder that is.
fn is_owned(path: &Path) -> bool {
    let parts: Vec<&OsStr> = path.iter().collect();
    let beside = |names: &[&OwnedName], name: &OsStr| {
        let is_beside = |owned: &&OwnedName| {
            let pattern = format!(".{}.tmp-#", owned.pattern.trim_start_matches('.')).leak();
            OwnedName { pattern, kind: owned.kind, mark: owned.mark }.matches(name)
        };
        names.iter().any(is_beside)
    };
    match parts[..] {
        [] => true,
        [folder, name, ..] if RECORDS.matches(folder) => {
            RECORD_NAMES.iter().any(|owned| owned.matches(name)) || beside(&RECORD_NAMES, name)
        }
        [name, ..] => named(name).is_some() || beside(&WRITTEN_BESIDE, name),
    }
}

#[test]
fn every_name_that_a_run_creates_renames_or_removes_is_in_a_table() {
    let (_, _, accesses) = four_steps(None);
    let mut seen = 0;
    for (operation, path) in accesses {
        let below: PathBuf = path.iter().skip_while(|part| *part != "out").skip(1).collect();
        seen += usize::from(path.iter().any(|part| part == "out"));
        assert!(is_owned(&below), "{operation} {}", path.display());
    }
    assert!(seen > 30, "{seen}");
    for foreign in ["thesis.tex", ".superoffload/thesis.tex", ".thesis.tmp-1"] {
        assert!(!is_owned(Path::new(foreign)), "{foreign}");
    }
}

/// Every kind of thing that can lie at a name.
const KINDS: [fn(&Path); 6] = [
    |path| fs::write(path, "mine").unwrap(),
    |path| fs::create_dir(path).and_then(|()| fs::write(path.join("thesis.tex"), "mine")).unwrap(),
    |path| symlink("nowhere", path).unwrap(),
    |path| symlink("/", path).unwrap(),
    |path| nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).unwrap(),
    |path| fs::write(path.with_extension("linked"), "mine").and_then(|()| fs::hard_link(path.with_extension("linked"), path)).unwrap(),
];

/// Files in `dir` and below, links as links.
fn listing(dir: &Path) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap()) {
        let (path, kind) = (entry.path(), entry.file_type().unwrap());
        let content = if kind.is_file() { fs::read_to_string(&path).unwrap() } else { format!("{kind:?}") };
        if kind.is_dir() {
            found.extend(listing(&path));
        }
        found.insert(path, content);
    }
    found
}

#[test]
fn a_new_run_is_refused_at_each_name_and_one_that_goes_on_gives_it_another() {
    let needed = ["metrics.jsonl", "trace.json", "tb", ".lock", ".superoffload", "checkpoint-8", ".superoffload/data-sources.json"];
    for (name, make) in needed.into_iter().flat_map(|name| KINDS.map(|make| (name, make))) {
        let tmp = tempfile::tempdir().unwrap();
        let path = |name: &str| tmp.path().join(name);
        fs::create_dir(path("checkpoint-4")).unwrap();
        if name.contains('/') {
            drop(Records::at(tmp.path()).unwrap());
        }
        make(&path(name));
        let (before, dir, mut messages) = (listing(tmp.path()), Dir::open(tmp.path()).unwrap(), RecordingObserver::default());
        let fresh = Settings { output_dir: tmp.path().into(), ..Settings::default() };
        for refused in [claim(&dir, &fresh, &mut messages), check(&dir, &fresh)] {
            let refused = refused.unwrap_err();
            let words = [path(name).display().to_string(), "--output-dir".into(), "--resume-from-checkpoint auto".into()];
            assert!(refused.exit_code() == 2 && words.iter().all(|word| refused.to_string().contains(word)), "{refused}");
        }
        assert_eq!((listing(tmp.path()), messages.0.len()), (before.clone(), 0));
        if name == "checkpoint-8" {
            continue;
        }
        let resumed = Settings { resume_from_checkpoint: Some(Resume::Auto), ..fresh };
        check(&dir, &resumed).unwrap();
        claim(&dir, &resumed, &mut messages).unwrap();
        let [line] = messages.0.try_into().unwrap();
        assert!(line.starts_with(path(name).to_str().unwrap()) && line.ends_with(".foreign-1"), "{line}");
        let moved: BTreeMap<_, _> = before.into_iter().map(|(at, content)| (renamed(at, &path(name)), content)).collect();
        assert_eq!(listing(tmp.path()), moved);
    }
}

/// `path`, or where it is after `foreign` got another name.
fn renamed(path: PathBuf, foreign: &Path) -> PathBuf {
    let aside = PathBuf::from(format!("{}.foreign-1", foreign.display()));
    path.strip_prefix(foreign).map_or(path.clone(), |below| if below == Path::new("") { aside.clone() } else { aside.join(below) })
}

#[test]
fn a_directory_that_is_no_run_s_is_refused_by_a_resume_too_and_names_that_are_not_needed_are_free() {
    let tmp = tempfile::tempdir().unwrap();
    let dir = Dir::open(tmp.path()).unwrap();
    for name in ["trace.json", "tb", ".checkpoint-4.tmp-9", "previous-1", "data.json", "metrics.jsonl.tmp"] {
        fs::write(tmp.path().join(name), "mine").unwrap();
    }
    let free = Settings { trace: Some("elsewhere.json".into()), report_to: vec![], ..Settings::default() };
    check(&dir, &free).unwrap();
    let resumed = Settings { resume_from_checkpoint: Some(Resume::Auto), ..Settings::default() };
    let refused = claim(&dir, &resumed, &mut RecordingObserver::default()).unwrap_err().to_string();
    assert!(refused.contains("tb: not a folder of events of this program") && refused.contains("--report-to none"), "{refused}");
    assert!(refused.contains("and 1 more there") && !refused.contains("auto"), "{refused}");
    fs::create_dir(tmp.path().join("checkpoint-4")).unwrap();
    claim(&dir, &resumed, &mut RecordingObserver::default()).unwrap();
    assert!(tmp.path().join("tb.foreign-1").exists() && tmp.path().join("trace.json.foreign-1").exists());
}
