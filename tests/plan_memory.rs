//! A plan counts every byte that an engine takes, for strategies, formats, policies and rings, on the CPU device; `tests/gpu` compares
//! on a GPU, too.

use crate::planned;
use crate::support::{settings, tiny_llama};
use superoffload::Plan;
use superoffload::internals::bucket::Tier;
use superoffload::internals::device::DeviceKind;
use superoffload::internals::hardware::Topology;
use superoffload::internals::host::MemoryPolicy;
use superoffload::internals::launch::cpu_engine;
use superoffload::internals::memory::{Addressing, DeviceMemory};
use superoffload::internals::model::ModelShape;
use superoffload::internals::planner::Machine;

/// Plans for `machine`, takes the memory and compares.
fn compare(toml: &str, shape: &ModelShape, machine: &Machine) -> Plan {
    let plan = Plan::new(&settings(&format!("max-steps = 1\nthreads = 1\n{toml}")), shape, machine, false).unwrap();
    let plan = Plan { host_memory: MemoryPolicy::unbacked(), ..plan };
    let engine = cpu_engine(&plan, shape, &Topology::this_machine()).unwrap();
    planned::check(&engine, DeviceKind::Cpu).unwrap_or_else(|wrong| panic!("{toml}: {wrong}"));
    plan
}

#[test]
fn every_class_of_a_plan_for_cpus_is_what_is_taken() {
    let common = "seq-length = 16\nper-device-train-batch-size = 3\nbucket-mib = 0.03125\n";
    let strategies = ["superoffload", "zero-offload", "no-offload"].map(|name| format!("{common}strategy = \"{name}\"\n"));
    let (demo, small) = (ModelShape::demo(), tiny_llama(6, 64, 300, false));
    for shape in [&demo, &small] {
        for strategy in &strategies {
            for more in [
                "",
                "gradient-shares = 3\n",
                "dtype = \"float32\"\nslots = 3\n",
                "gradient-accumulation-steps = 2\nactivations = \"recompute-block\"\n",
            ] {
                compare(&format!("{strategy}{more}"), shape, &Machine::cpu(2));
            }
            compare(&format!("{strategy}activations = \"host\"\n"), shape, &Machine::cpu(2));
        }
        if cfg!(feature = "superchip-cast") {
            compare(&format!("{}cast = \"device\"\n", strategies[0]), shape, &Machine::cpu(2));
        }
        if cfg!(feature = "weight-flow") {
            let plan = compare(&format!("{}weights = \"flow\"\n", strategies[1]), shape, &Machine::cpu(2));
            assert!(plan.weight_ring.is_some(), "{plan}");
        }
    }
}

/// The plans of GPUs, whose engine the CPU device runs as well: rings in larger chunks, states that page.
#[test]
fn every_class_of_a_plan_for_a_gpu_is_what_is_taken() {
    let gpu = |mib: u64| {
        let device = DeviceMemory::Own { bytes: mib << 20, addressing: Addressing::Managed };
        Machine { kind: DeviceKind::Gpu, device, ..Machine::cpu(8) }
    };
    let (shape, common) = (tiny_llama(12, 1024, 256, true), "seq-length = 64\nper-device-train-batch-size = 1\n");
    let (mut grads, mut weights, mut resident) = (0, 0, 0);
    for mib in (1400..3600).step_by(50) {
        let plan = compare(common, &shape, &gpu(mib));
        grads += usize::from(plan.grad_ring.is_some());
        weights += usize::from(plan.weight_ring.is_some());
        resident += usize::from(plan.layout.offloaded() == 0);
    }
    assert!(grads > 0, "no ring of gradients was tried");
    assert_eq!((weights > 0, resident > 0), (cfg!(feature = "weight-flow"), cfg!(feature = "repartition")));
    let paged = compare(&format!("{common}memory = \"unified\"\nresident-buckets = 0\n"), &shape, &gpu(8000));
    assert!(!paged.layout.elems_in(Tier::Unified).is_empty(), "{paged}");
}
