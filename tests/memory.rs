//! Host memory on a machine with a second memory node without CPUs, as a Grace presents its GPU's memory: a run must not use that node.
//! Also reserved huge pages. `tests/guest/run.sh` boots such a machine with a real kernel and runs these tests as root, because they fill a
//! node and change the kernel's pools.

use crate::program::{Workspace, run};
use std::fs;
use std::io::Write;
use std::path::Path;
use superoffload::Result;
use superoffload::internals::hardware::Topology;
use superoffload::internals::host::{HostMemory, HugePagesChoice, MemoryPolicy, PinnedSlice};

const MIB: usize = 1 << 20;
const HUGE: u64 = 2 << 20;

/// The node of the CPUs, and the other node.
const NEAR: usize = 0;
const FAR: usize = 1;

/// The memory policy of a run with two threads on this machine.
fn policy(choice: HugePagesChoice) -> Result<MemoryPolicy> {
    let topology = Topology::this_machine();
    let nodes: Vec<_> = topology.nodes_with_memory().map(|node| (node.id, node.cpus.len())).collect();
    assert_eq!(nodes, [(NEAR, 2), (FAR, 0)], "not the machine that these tests need");
    MemoryPolicy::new(&topology, choice, &[0, 1], 2)
}

fn host(choice: HugePagesChoice) -> HostMemory {
    HostMemory::new(policy(choice).unwrap())
}

fn free_mib(node: usize) -> usize {
    let topology = Topology::this_machine();
    topology.numa_nodes[node].free_bytes.unwrap() as usize / MIB
}

/// Bytes of bound memory on each node, with pages of all sizes, as the kernel counts them.
fn bound_bytes() -> [usize; 2] {
    let maps = fs::read_to_string("/proc/self/numa_maps").unwrap();
    let bound = || maps.lines().filter(|line| line.split(' ').nth(1) == Some(&format!("bind:{NEAR}")));
    let number = |line: &str, name: &str| line.split(' ').find_map(|field| field.strip_prefix(name)?.parse::<usize>().ok()).unwrap_or(0);
    [NEAR, FAR].map(|node| bound().map(|line| number(line, &format!("N{node}=")) * number(line, "kernelpagesize_kB=") * 1024).sum())
}

/// Checks that `block` is complete and writable, and uses no memory of the far node.
fn expect_near(host: &mut HostMemory, block: PinnedSlice) {
    host.lend_mut::<u8>(block).iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    let [near, far] = bound_bytes();
    let report = host.report(Path::new("/"));
    assert!(near >= block.bytes() && far == 0, "{near} bytes near, {far} far: {report}");
    assert!(report.bound_to == [NEAR] && report.nodes.iter().all(|on| on.node == NEAR), "{report}");
    print_fact(&report);
}

/// Prints a line for the transcript.
fn print_fact(fact: impl std::fmt::Display) {
    let _ = writeln!(std::io::stdout(), "         {fact}");
}

/// Pools of huge pages on both nodes, which are emptied on drop.
struct Reserved;

impl Reserved {
    fn new(near: usize, far: usize) -> Self {
        Self::set(NEAR, near);
        Self::set(FAR, far);
        Self
    }

    fn set(node: usize, pages: usize) {
        let pool = format!("/sys/devices/system/node/node{node}/hugepages/hugepages-2048kB/nr_hugepages");
        fs::write(&pool, pages.to_string()).unwrap();
        assert_eq!(fs::read_to_string(&pool).unwrap().trim(), pages.to_string(), "{pool}");
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        [NEAR, FAR].into_iter().for_each(|node| Self::set(node, 0));
    }
}

#[test]
#[ignore = "needs a memory node without CPUs: tests/guest/run.sh"]
fn memory_lies_beside_the_cpus() {
    for choice in [HugePagesChoice::Auto, HugePagesChoice::Off] {
        let mut host = host(choice);
        let block = host.alloc_periodic("test", 100 * MIB, 32 * MIB).unwrap();
        expect_near(&mut host, block);
    }
}

#[test]
#[ignore = "needs a memory node without CPUs: tests/guest/run.sh"]
fn a_full_node_is_an_error_and_nothing_lies_on_the_other() {
    let (far_mib, mut host) = (free_mib(FAR), host(HugePagesChoice::Auto));
    let most = host.alloc("most of it", (free_mib(NEAR) - 96) * MIB).unwrap();
    expect_near(&mut host, most);
    assert!(free_mib(NEAR) < 128 && far_mib > 256, "{} MiB near, {far_mib} far", free_mib(NEAR));
    let error = host.alloc("adam m", 256 * MIB).unwrap_err().to_string();
    assert!(error.contains("256.0 MiB") && error.contains("adam m") && error.contains("on node 0"), "{error}");
    print_fact(error);
    let little = host.alloc("a little more", 16 * MIB).unwrap();
    expect_near(&mut host, little);
    assert!(free_mib(FAR) + 8 > far_mib, "{} MiB left of {far_mib} on the far node", free_mib(FAR));
    print_fact(format!("free on the far node: {far_mib} MiB before, {} MiB after", free_mib(FAR)));
}

#[test]
#[ignore = "needs a memory node without CPUs: tests/guest/run.sh"]
fn reserved_pages_are_used_if_they_suffice() {
    let _pools = Reserved::new(60, 60);
    let mut host = host(HugePagesChoice::Explicit);
    let block = host.alloc_periodic("test", 100 * MIB, 32 * MIB).unwrap();
    expect_near(&mut host, block);
    let pages: Vec<_> = host.report(Path::new("/")).pages.iter().map(|pages| (pages.page_bytes, pages.bytes)).collect();
    assert_eq!(pages, [(HUGE, 100 * MIB as u64)]);
}

#[test]
#[ignore = "needs a memory node without CPUs: tests/guest/run.sh"]
fn too_few_reserved_pages_are_an_error() {
    let error = policy(HugePagesChoice::Explicit).unwrap_err().to_string();
    assert!(error.contains("none are reserved"), "{error}");
    print_fact(error);
    for (near, far) in [(40, 0), (40, 60), (0, 60)] {
        let _pools = Reserved::new(near, far);
        let error = host(HugePagesChoice::Explicit).alloc("adam v", 100 * MIB).unwrap_err().to_string();
        assert!(error.contains("adam v: too few huge pages of 2.0 MiB"), "{near} near, {far} far: {error}");
        print_fact(format!("{near} pages near, {far} far: {error}"));
    }
}

/// The whole program: its memory is as reported.
#[test]
#[ignore = "needs a memory node without CPUs: tests/guest/run.sh"]
fn the_program_trains_in_reserved_pages_to_the_same_bits() {
    let _pools = Reserved::new(60, 60);
    let workspace = Workspace::new();
    let big = [("\"vocab_size\": 256", "\"vocab_size\": 32768"), ("\"hidden_size\": 32", "\"hidden_size\": 128")];
    let config = big.iter().fold(crate::program::CONFIG.to_string(), |config, (old, new)| config.replace(old, new));
    workspace.write("model/config.json", config);
    let train = |out: &str, pages: &str| {
        let printed = run(&mut workspace.train(out, &["--max-steps", "1", "--huge-pages", pages]));
        let host = printed.stdout.lines().find(|line| line.contains("(bound)")).unwrap_or_else(|| panic!("{printed:?}")).to_string();
        (printed.digest().to_string(), host)
    };
    let (reserved, host) = train("reserved", "explicit");
    assert!(host.contains("in pages of 2.0 MiB") && host.contains("on node 0 (bound)") && !host.contains("on node 1"), "{host}");
    print_fact(host);
    let (small, host) = train("small", "off");
    assert!(!host.contains("2.0 MiB"), "{host}");
    assert_eq!(small, reserved);
}
