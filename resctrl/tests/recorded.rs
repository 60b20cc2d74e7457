//! Tests on recorded trees, without their kernels.
//!
//! `trees/linux-*.txt` were recorded in virtual machines whose kernels found RDT. `trees/grace.txt` was written from the documentation and
//! the driver of MPAM, because no machine with MPAM was available.

use std::fs;
use std::path::Path;
use std::process::Command;
use superoffload_resctrl::{Discovery, GroupPath, Info, Machine, Profile, Schemata, Tree, discover, total};

/// Unpacks a recording: for each file a line `== PATH`, followed by its text.
fn unpack(name: &str) -> tempfile::TempDir {
    let recording = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/trees").join(name);
    let text = fs::read_to_string(&recording).unwrap_or_else(|e| panic!("read {}: {e}", recording.display()));
    let dir = tempfile::tempdir().unwrap();
    for file in text.strip_prefix("== ").unwrap().split("\n== ") {
        let (path, text) = file.split_once('\n').unwrap_or((file, ""));
        let path = dir.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    if !dir.path().join("tasks").exists() {
        fs::write(dir.path().join("tasks"), "1\n").unwrap();
    }
    dir
}

fn groups(root: &Path) -> Vec<String> {
    let Discovery::Mounted(found) = discover(root).unwrap() else { panic!("is mounted") };
    found.groups.iter().map(ToString::to_string).collect()
}

/// A machine with one cache per element; the element is the cache's number of cores.
fn machine(caches: &[u32]) -> Machine {
    let mut next = 0u32..;
    let domain = |&cores: &u32| next.by_ref().take(cores as usize).map(|cpu| [cpu].into_iter().collect()).collect();
    Machine { l3_domains: caches.iter().map(domain).collect() }
}

fn adam() -> GroupPath {
    GroupPath::control("superoffload-adam").unwrap()
}

#[test]
fn groups_that_the_program_made_read_back_the_same_from_old_and_new_kernels() {
    for kernel in ["linux-6.12.txt", "linux-7.3.txt"] {
        let dir = unpack(kernel);
        let tree = Tree::open(dir.path()).unwrap();
        assert_eq!(tree.info().unwrap().num_closids(), Some(8), "{kernel}");
        let groups = groups(dir.path());
        assert_eq!(groups[1], "p0: MB:0=50;1=100 L3:0=fff;1=fff, cpus none, 1 tasks, mon_groups m0", "{kernel}");
        assert_eq!(groups[2], "superoffload-adam: MB:0=20;1=20 L3:0=f;1=f, cpus 1,3, 0 tasks", "{kernel}");
        assert_eq!(groups[3], "superoffload-driver: MB:0=100;1=100 L3:0=ff0;1=ff0, cpus 0,2, 0 tasks", "{kernel}");
        let counters = tree.counters(&adam()).unwrap();
        assert_eq!(counters.iter().filter(|counter| counter.domain == "mon_L3_01").count(), 3, "{kernel}");
        assert!(total(&counters, "mbm_local_bytes") > Some(0), "{kernel}");
        assert_eq!(total(&counters, "mbm_other_bytes"), None, "{kernel}");
    }
}

/// The kernel that recorded the tree accepted exactly this command for the profile, on its two caches of two cores.
#[test]
fn a_profile_becomes_the_command_that_the_kernel_took() {
    for kernel in ["linux-6.12.txt", "linux-7.3.txt"] {
        let dir = unpack(kernel);
        let tree = Tree::open(dir.path()).unwrap();
        let (info, default) = (tree.info().unwrap(), tree.schemata(&GroupPath::root()).unwrap());
        let (fitted, notes) = Profile::load("paper").unwrap().fit(&machine(&[2, 2]), &info, &default).unwrap();
        assert_eq!(default.command(&fitted[1].schemata, &info).unwrap(), "L3:0=f;1=f\nMB:0=20;1=20\n", "{kernel}");
        assert_eq!(tree.cpus(&fitted[1].path).unwrap(), fitted[1].cpus, "{kernel}");
        assert_eq!(tree.schemata(&fitted[1].path).unwrap().rounded(&fitted[1].schemata), [], "{kernel}");
        assert!(notes.is_empty());
    }
}

#[test]
fn a_grace_takes_the_papers_numbers_and_its_own_domain_ids() {
    let dir = unpack("grace.txt");
    let tree = Tree::open(dir.path()).unwrap();
    let (info, default) = (tree.info().unwrap(), tree.schemata(&GroupPath::root()).unwrap());
    let (fitted, notes) = Profile::load("paper").unwrap().fit(&machine(&[72]), &info, &default).unwrap();
    assert!(notes.is_empty(), "{notes:?}");
    let command = default.command(&fitted[1].schemata, &info).unwrap();
    assert_eq!(command, "L3:36=f\nMB:36=20\n", "the line that nobody knows is not written");
    // The driver shows one less than the value in force. The difference is reported, and nothing is written again.
    let rounded = tree.schemata(&adam()).unwrap().rounded(&fitted[1].schemata);
    assert_eq!(rounded.iter().map(|r| (r.domain, r.wanted, r.got)).collect::<Vec<_>>(), [(36, 20, 19)]);
    assert_eq!(default.command(&Schemata::parse("L3:36=f0f").unwrap(), &info).unwrap(), "L3:36=f0f\n", "masks may have gaps");
    let counters = tree.counters(&GroupPath::root()).unwrap();
    assert_eq!((total(&counters, "llc_occupancy"), total(&counters, "mbm_local_bytes")), (Some(112 << 20), None));
    assert_eq!(Info::num_closids(&info), Some(40));
}

/// Runs the program. Returns its exit status and its output.
fn run(args: &[&str], root: &Path) -> (i32, String) {
    let journal = root.join("no-journal");
    // For tests of another architecture, the environment names an emulator and a folder of programs: see tests/aarch64/run.sh.
    let [emulator, programs] = ["SUPEROFFLOAD_EMULATOR", "SUPEROFFLOAD_PROGRAMS"].map(std::env::var_os);
    let built = env!("CARGO_BIN_EXE_superoffload-resctrl");
    let program = programs.map_or(built.into(), |dir| Path::new(&dir).join("superoffload-resctrl"));
    let mut command = Command::new(emulator.as_deref().unwrap_or(program.as_ref()));
    let output = command.args(emulator.map(|_| program)).args(args).arg("--root").arg(root).arg("--journal").arg(journal).output().unwrap();
    (output.status.code().unwrap(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}

#[test]
fn the_program_shows_a_tree() {
    let dir = unpack("grace.txt");
    let (status, message) = run(&["status"], dir.path());
    assert_eq!(status, 0, "{message}");
    assert!(message.starts_with("journal: nothing to undo\nL3 cbm_mask fff min_cbm_bits 1 num_closids 40, L3_MON"), "{message}");
    assert!(message.contains("superoffload-adam: MB:36=19 L3:36=f MB_HLIM:36=0, cpus 7-71, 0 tasks\n"), "{message}");
    assert!(message.contains("/ mon_L3_36 llc_occupancy: 117440512\n/ mon_L3_36 mbm_local_bytes: unavailable\n"), "{message}");
}

#[test]
fn each_condition_has_its_exit_status_and_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let nowhere = dir.path().join("nowhere");
    for (args, root, status, words) in [
        (&["status"][..], dir.path(), 4, "resctrl is not mounted"),
        (&["prepare", "--profile", "paper"], &nowhere, 3, "not offered by this CPU or kernel"),
        (&["prepare", "--profile", "papre"], dir.path(), 2, "neither a file nor one of paper, cache-only"),
        (&["prepare", "--profile", "paper", "--user", "nobody-of-that-name"], dir.path(), 2, "no such user"),
    ] {
        let (code, message) = run(args, root);
        let line = message.lines().last().unwrap();
        assert!(code == status && line.contains(words) && line.starts_with("superoffload-resctrl: "), "{code} {message}");
    }
    assert_eq!(run(&["restore"], dir.path()), (0, "nothing to undo\n".into()));
}
