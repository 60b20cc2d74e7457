use super::*;
use crate::fake::Fake;
use crate::{Machine, PREFIX, Profile, prepare};
use proptest::prelude::*;
use std::cell::Cell;
use std::path::PathBuf;
use std::process::{Child, Command};
use std::rc::Rc;

/// A tree with CPUs, monitor groups and threads of other programs.
struct Shared {
    _dir: tempfile::TempDir,
    root: PathBuf,
    journal: PathBuf,
}

fn foreign(name: &str) -> GroupPath {
    GroupPath::try_from(name.to_owned()).unwrap()
}

fn own_group(name: &str) -> GroupPath {
    GroupPath::control(&format!("{PREFIX}{name}")).unwrap()
}

impl Shared {
    fn new(tids: &[i32]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (root, journal) = (dir.path().join("resctrl"), dir.path().join("run/journal"));
        Fake::mount(&root);
        let (tree, _) = Fake::open(&root, usize::MAX);
        for group in ["p0", "p0/mon_groups/m0", "mon_groups/m1"] {
            tree.create(&foreign(group)).unwrap();
        }
        tree.set_cpus(&foreign("p0"), &"2-4".parse().unwrap()).unwrap();
        tree.set_cpus(&foreign("p0/mon_groups/m0"), &"3".parse().unwrap()).unwrap();
        tree.set_cpus(&foreign("mon_groups/m1"), &"0".parse().unwrap()).unwrap();
        for (tid, groups) in tids.iter().zip([&["p0", "p0/mon_groups/m0"][..], &["p0"], &["/", "mon_groups/m1"], &["/"]]) {
            for group in groups {
                tree.add_tasks(&foreign(group.trim_matches('/')), &[*tid]).unwrap();
            }
        }
        Self { _dir: dir, root, journal }
    }

    fn session(&self, commands: usize) -> (Session, Rc<Cell<usize>>) {
        let (tree, left) = Fake::open(&self.root, commands);
        (Session::with_tree(tree, &self.journal).unwrap(), left)
    }

    /// Simulates kill -9: no change is undone, and the lock is released.
    fn kill(mut session: Session) {
        session.kept = true;
    }

    /// Undoes the changes as the next start does, with a fake kernel that accepts `commands` commands.
    fn recover(&self, commands: usize) -> Result<Vec<String>> {
        let (session, _) = self.session(commands);
        session.restore()
    }

    fn tree(&self) -> std::collections::BTreeMap<PathBuf, String> {
        let mut files = Fake::snapshot(&self.root);
        files.remove(&self.root.join("info/last_cmd_status"));
        files
    }
}

/// Idle processes of other programs, which end when this value is dropped.
struct Idle {
    children: Vec<Child>,
    tids: Vec<i32>,
}

impl Idle {
    fn new(count: usize) -> Self {
        let children: Vec<_> = (0..count).map(|_| Command::new("sleep").arg("1000").spawn().unwrap()).collect();
        let tids = children.iter().map(|child| child.id() as i32).collect();
        Self { children, tids }
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn everything_is_as_it_was_after_a_drop() {
    let idle = Idle::new(4);
    let machine = Shared::new(&idle.tids);
    let before = machine.tree();
    let (mut session, _) = machine.session(usize::MAX);
    session.create(&own_group("adam")).unwrap();
    session.add_cpus(&own_group("adam"), &"0,3-5".parse().unwrap()).unwrap();
    session.add_cpus(&own_group("adam"), &"2".parse().unwrap()).unwrap();
    assert_eq!(session.move_tasks(&own_group("adam"), &[idle.tids.clone(), vec![i32::MAX]].concat()).unwrap(), 4);
    session.set_schemata(&own_group("adam"), &Schemata::parse("MB:0=20\nL3:1=f").unwrap()).unwrap();
    let tree = session.tree();
    assert_eq!(tree.cpus(&own_group("adam")).unwrap().to_string(), "0,2-5");
    assert_eq!(tree.cpus(&foreign("p0/mon_groups/m0")).unwrap().to_string(), "");
    assert_eq!(tree.tasks(&own_group("adam")).unwrap(), idle.tids);
    drop(session);
    assert_eq!(machine.tree(), before);
    assert_eq!(describe_journal(&machine.journal).unwrap(), None);
}

#[test]
fn kept_groups_stay_until_their_removal_is_requested() {
    let machine = Shared::new(&[]);
    let before = machine.tree();
    let (mut session, _) = machine.session(usize::MAX);
    let cores = (0..6).map(|cpu| CpuSet::from_iter([cpu])).collect();
    let lines = prepare(&mut session, &Profile::load("paper").unwrap(), &Machine { l3_domains: vec![cores] }, None).unwrap();
    assert!(lines.iter().any(|line| line.starts_with("superoffload-adam: MB:0=20;1=20 L3:0=f;1=f, CPUs 1-5")), "{lines:?}");
    session.keep().unwrap();
    assert_ne!(machine.tree(), before);
    let held = describe_journal(&machine.journal).unwrap().unwrap();
    assert!(held.starts_with("superoffload-driver, superoffload-adam: prepared by process "), "{held}");
    let notes = machine.recover(usize::MAX).unwrap();
    assert_eq!(notes, ["returned CPUs 2-4 to p0", "removed group superoffload-adam", "removed group superoffload-driver"]);
    assert_eq!(machine.tree(), before);
}

#[test]
fn out_of_closids_is_an_error_and_leaves_nothing() {
    let machine = Shared::new(&[]);
    let before = machine.tree();
    let (mut session, _) = machine.session(usize::MAX);
    ["a", "b"].iter().for_each(|name| session.create(&own_group(name)).unwrap());
    let error = session.create(&own_group("c")).unwrap_err();
    assert!(error.to_string().ends_with("superoffload-c: No space left on device (os error 28): Out of CLOSIDs"), "{error}");
    assert_eq!(error.condition(), crate::Condition::OutOfGroups);
    drop(session);
    assert_eq!(machine.tree(), before);
}

#[test]
fn only_its_own_groups_are_changed() {
    let machine = Shared::new(&[]);
    let (mut session, _) = machine.session(usize::MAX);
    let wanted = Schemata::parse("L3:0=f").unwrap();
    for error in [
        session.create(&foreign("p1")).unwrap_err(),
        session.set_schemata(&foreign("p0"), &wanted).unwrap_err(),
        session.add_cpus(&GroupPath::root(), &"0".parse().unwrap()).unwrap_err(),
        session.move_tasks(&foreign("p0"), &[1]).unwrap_err(),
        session.give_tasks_to(&foreign("p0"), Uid::from_raw(1)).unwrap_err(),
    ] {
        assert_eq!(error.condition(), crate::Condition::Refused, "{error}");
    }
    session.create(&own_group("adam")).unwrap();
    let error = session.create(&own_group("adam")).unwrap_err().to_string();
    assert!(error.starts_with("create group superoffload-adam: it exists"), "{error}");
    let error = session.set_schemata(&own_group("adam"), &Schemata::parse("L3:7=f").unwrap()).unwrap_err().to_string();
    assert_eq!(error, "schemata of superoffload-adam: L3:7=f: there is no domain 7, only 0, 1");
}

#[test]
fn a_journal_of_another_tree_is_not_touched() {
    let machine = Shared::new(&[]);
    let (mut session, _) = machine.session(usize::MAX);
    session.create(&own_group("adam")).unwrap();
    session.keep().unwrap();
    let error = restore(Path::new("/elsewhere"), &machine.journal).unwrap_err().to_string();
    assert!(error.ends_with("resctrl: restore that first"), "{error}");
    assert!(describe_journal(&machine.journal).unwrap().is_some());
}

/// A change that a session can make.
#[derive(Clone, Debug)]
enum Change {
    Create(usize),
    Cpus(usize, Vec<u32>),
    Tasks(usize, Vec<usize>),
    Schemata(usize),
}

fn changes() -> impl Strategy<Value = Vec<Change>> {
    let change = prop_oneof![
        (0usize..3).prop_map(Change::Create),
        (0usize..3, prop::collection::vec(0u32..6, 1..4)).prop_map(|(group, cpus)| Change::Cpus(group, cpus)),
        (0usize..3, prop::collection::vec(0usize..4, 1..4)).prop_map(|(group, tasks)| Change::Tasks(group, tasks)),
        (0usize..3).prop_map(Change::Schemata),
    ];
    prop::collection::vec(change, 1..8).prop_map(|changes| [vec![Change::Create(0)], changes].concat())
}

fn apply(session: &mut Session, change: &Change, tids: &[i32]) -> Result<()> {
    let groups = [own_group("a"), own_group("b"), own_group("a").monitor("m").unwrap()];
    match change {
        Change::Create(group) => session.create(&groups[*group]),
        Change::Cpus(group, cpus) => session.add_cpus(&groups[*group], &cpus.iter().copied().collect()),
        Change::Tasks(group, tasks) => {
            session.move_tasks(&groups[*group], &tasks.iter().map(|&task| tids[task]).collect::<Vec<_>>()).map(drop)
        }
        Change::Schemata(group) => session.set_schemata(&groups[*group], &Schemata::parse("MB:0=20").unwrap()).map(drop),
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// A session is killed before an arbitrary command, and so is the first restore. The next start leaves the tree as it was.
    #[test]
    fn killed_anywhere_the_next_start_undoes_everything(changes in changes(), commands in 0usize..20, again in 0usize..12) {
        let idle = Idle::new(4);
        let machine = Shared::new(&idle.tids);
        let before = machine.tree();
        let (mut session, left) = machine.session(commands);
        for change in &changes {
            // A rejected or failed change must not matter either.
            let _ = apply(&mut session, change, &idle.tids);
            if left.get() == 0 {
                break;
            }
        }
        Shared::kill(session);
        let (tree, _) = Fake::open(&machine.root, again);
        let interrupted = Session::with_tree(tree, &machine.journal).unwrap();
        if let Some(record) = interrupted.journal.record() {
            let _ = undo(&interrupted.tree, &record.entries);
        }
        Shared::kill(interrupted);
        machine.recover(usize::MAX).unwrap();
        prop_assert_eq!(machine.tree(), before);
    }
}
