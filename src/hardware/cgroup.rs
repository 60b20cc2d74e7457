//! Limits that control groups set for this process: those of its own group and of every group above it.

use super::cpu_list::CpuList;
use super::parse;
use std::fs;
use std::path::{Component, Path, PathBuf};

/// A limit and the file that sets it.
#[derive(Clone, Debug, PartialEq)]
pub struct Limit<T> {
    pub value: T,
    pub file: PathBuf,
}

/// The tightest limits from the process's group up to the root. `None`: unlimited, or no control groups.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct CgroupLimits {
    /// CPU time in units of one CPU; 1.5 is one and a half CPUs.
    pub(crate) cpu_quota: Option<Limit<f64>>,
    /// Permitted CPUs.
    pub cpus: Option<Limit<CpuList>>,
    /// Memory in bytes.
    pub(crate) memory_bytes: Option<Limit<u64>>,
}

impl CgroupLimits {
    /// Reads the limits of the calling process in the tree at `root` (normally `/`), for cgroups v1, v2 and both together.
    pub fn read(root: &Path) -> Self {
        let v2 = directories(root, None);
        let (cpu, memory, cpuset) = (directories(root, Some("cpu")), directories(root, Some("memory")), directories(root, Some("cpuset")));
        let quotas = limits(&v2, "cpu.max", parse::cpu_max).chain(limits_v1_quota(&cpu));
        let memories = limits(&v2, "memory.max", parse::memory_max).chain(limits(&memory, "memory.limit_in_bytes", parse::memory_max));
        let mut cpus = limits(&v2, "cpuset.cpus.effective", cpus).chain(limits(&cpuset, "cpuset.effective_cpus", cpus));
        Self {
            cpu_quota: quotas.min_by(|a, b| a.value.total_cmp(&b.value)),
            memory_bytes: memories.min_by_key(|limit| limit.value),
            // The effective set of the nearest group is a subset of those above it.
            cpus: cpus.next(),
        }
    }
}

fn cpus(text: &str) -> Option<CpuList> {
    CpuList::parse(text).filter(|cpus| !cpus.is_empty())
}

/// The limits in `file` of each of `directories`.
fn limits<T>(directories: &[PathBuf], file: &str, parse: impl Fn(&str) -> Option<T>) -> impl Iterator<Item = Limit<T>> {
    directories.iter().map(move |dir| dir.join(file)).filter_map(move |file| {
        let value = parse(&fs::read_to_string(&file).ok()?)?;
        Some(Limit { value, file })
    })
}

/// CPU quotas of v1, which splits a quota over two files.
fn limits_v1_quota(directories: &[PathBuf]) -> impl Iterator<Item = Limit<f64>> {
    directories.iter().filter_map(|dir| {
        let period = fs::read_to_string(dir.join("cpu.cfs_period_us")).ok()?;
        let file = dir.join("cpu.cfs_quota_us");
        let value = parse::quota_cpus(&fs::read_to_string(&file).ok()?, &period)?;
        Some(Limit { value, file })
    })
}

/// Directories from the process's own group up to the mount point, of v1's `controller` or of v2. Empty if it is not mounted.
fn directories(root: &Path, controller: Option<&str>) -> Vec<PathBuf> {
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap_or_default();
    let (mounts, groups) = (read("proc/self/mountinfo"), read("proc/self/cgroup"));
    let Some((mount_root, mount_point)) = mounts.lines().find_map(|line| mount(line, controller)) else { return Vec::new() };
    let group = groups.lines().find_map(|line| group(line, controller)).unwrap_or("/");
    let top = root.join(mount_point.trim_start_matches('/'));
    relative(group, mount_root).ancestors().map(|path| top.join(path)).collect()
}

/// Root and mount point in a line of `mountinfo`, if the line mounts the wanted hierarchy.
fn mount<'a>(line: &'a str, controller: Option<&str>) -> Option<(&'a str, &'a str)> {
    let (front, back) = line.split_once(" - ")?;
    let (mut front, mut back) = (front.split(' ').skip(3), back.split(' '));
    let (fstype, options) = (back.next()?, back.nth(1)?);
    let wanted = match controller {
        None => fstype == "cgroup2",
        Some(controller) => fstype == "cgroup" && options.split(',').any(|option| option == controller),
    };
    wanted.then_some((front.next()?, front.next()?))
}

/// The path in a line of `/proc/self/cgroup`, `4:memory:/path` or v2's `0::/path`, if the line is of the wanted hierarchy.
fn group<'a>(line: &'a str, controller: Option<&str>) -> Option<&'a str> {
    let mut fields = line.splitn(3, ':');
    let (id, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let wanted = match controller {
        None => id == "0" && controllers.is_empty(),
        Some(controller) => controllers.split(',').any(|name| name == controller),
    };
    wanted.then_some(path)
}

/// `group` relative to the mount; the mount point itself if the group is outside the container's view.
fn relative<'a>(group: &'a str, mount_root: &str) -> &'a Path {
    let inside = Path::new(group).strip_prefix(mount_root).unwrap_or(Path::new(""));
    if inside.components().all(|part| matches!(part, Component::Normal(_))) { inside } else { Path::new("") }
}

#[cfg(test)]
mod tests {
    use super::super::topology::tests::tree;
    use super::*;

    const V2: (&str, &str) = ("proc/self/mountinfo", "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw\n");

    #[test]
    fn the_tightest_of_all_parents_wins() {
        let dir = tree(&[
            V2,
            ("proc/self/cgroup", "0::/slice/job\n"),
            ("sys/fs/cgroup/slice/cpu.max", "150000 100000\n"),
            ("sys/fs/cgroup/slice/memory.max", "8589934592\n"),
            ("sys/fs/cgroup/slice/job/cpu.max", "400000 100000\n"),
            ("sys/fs/cgroup/slice/job/memory.max", "max\n"),
            ("sys/fs/cgroup/memory.max", "17179869184\n"),
            ("sys/fs/cgroup/slice/cpuset.cpus.effective", "0-7\n"),
            ("sys/fs/cgroup/slice/job/cpuset.cpus.effective", "2-3\n"),
            ("sys/fs/cgroup/cpu.max", "nonsense\n"),
        ]);
        let limits = CgroupLimits::read(dir.path());
        assert_eq!(limits.cpu_quota, Some(Limit { value: 1.5, file: dir.path().join("sys/fs/cgroup/slice/cpu.max") }));
        assert_eq!(limits.memory_bytes.unwrap().value, 8 << 30);
        assert_eq!(limits.cpus.unwrap().value.as_slice(), [2, 3]);
    }

    #[test]
    fn version_1_and_containers_that_see_a_part() {
        let dir = tree(&[
            (
                "proc/self/mountinfo",
                "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n\
                 35 31 0:32 /docker/abc /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n",
            ),
            ("proc/self/cgroup", "4:memory:/docker/abc/x\n1:cpuacct,cpu:/y\n0::/\n"),
            ("sys/fs/cgroup/cpu,cpuacct/y/cpu.cfs_quota_us", "200000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/y/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "-1\n"),
            ("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n"),
            ("sys/fs/cgroup/memory/x/memory.limit_in_bytes", "9223372036854771712\n"),
            ("sys/fs/cgroup/memory/memory.limit_in_bytes", "1073741824\n"),
        ]);
        let limits = CgroupLimits::read(dir.path());
        assert_eq!(limits.cpu_quota.unwrap().value, 2.0);
        assert_eq!(limits.memory_bytes.unwrap().value, 1 << 30);
        assert_eq!(limits.cpus, None);
    }

    #[test]
    fn a_group_outside_the_mount_means_the_mount_point() {
        assert_eq!(relative("/a/b", "/a"), Path::new("b"));
        assert_eq!(relative("/a/b", "/c"), Path::new(""));
        assert_eq!(relative("/../../b", "/"), Path::new(""));
    }

    #[test]
    fn nothing_there_is_no_limit() {
        assert_eq!(CgroupLimits::read(tree(&[V2]).path()), CgroupLimits::default());
        assert_eq!(CgroupLimits::read(tree(&[]).path()), CgroupLimits::default());
    }
}
