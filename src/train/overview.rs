//! The lines before the first step, from settings, plan and data.

use super::extent::RunExtent;
use crate::bucket::layout::Tier;
use crate::config::settings::Settings;
use crate::error::printable;
use crate::memory::DeviceMemory;
use crate::planner::budget::Balance;
use crate::planner::plan::Plan;
use crate::units::Bytes;

/// The work of a step, the place of the optimizer, and the predicted time: `2048 tokens a step, optimizer states of 14 of 16 buckets in
/// host memory; predicted: 881 ms a step, about 4 minutes in all, limited by the device, at the rates of h200-pcie5`.
pub(super) fn describe_plan(plan: &Plan, extent: &RunExtent) -> String {
    let (count, offloaded) = (plan.placement.layout.count(), plan.placement.layout.offloaded());
    let unified = plan.placement.layout.buckets_in(Tier::Unified).len();
    let states = match offloaded {
        0 if unified > 0 => format!("optimizer states of {unified} of {count} buckets in unified memory"),
        0 => "every optimizer state on the device".into(),
        _ => format!("optimizer states of {offloaded} of {count} buckets offloaded"),
    };
    let streamed = plan.placement.rings.weights.map_or(String::new(), |ring| {
        format!(", {} of weights streamed", Bytes((ring.ringed_elems * plan.recipe.numerics.dtype.bytes()) as u64))
    });
    let limit = plan.forecast.predicted.map_or(String::new(), |predicted| format!(", limited by {}", predicted.bottleneck()));
    let profile = &plan.site.machine.rates.profile;
    let time = |time| format!("predicted: {time}{limit}, at the rates of {profile}");
    let time = extent.predicted().map_or("no predicted time on a CPU".into(), time);
    format!("{} tokens a step, {states}{streamed}; {time}", plan.tokens_per_step())
}

/// Planned and available memory: `device 79.1 GiB of 139.7 GiB, host 52.9 GiB of 251.0 GiB are planned`.
pub(super) fn describe_memory(plan: &Plan) -> String {
    let [device, host] = plan.balances();
    let each = if plan.site.ranks > 1 { "each GPU" } else { "GPU" };
    let hosts = if plan.site.processes > 1 { "host of each process" } else { "host" };
    match plan.site.machine.device {
        DeviceMemory::Shared => format!("{} {}", hosts, planned_of(host)),
        DeviceMemory::Own { .. } => format!("{each} {}; {hosts} {}", planned_of(device), planned_of(host)),
    }
}

fn planned_of(Balance { needed, available, .. }: Balance) -> String {
    match available {
        u64::MAX => format!("{} planned", Bytes(needed)),
        _ => format!("{} planned of {} available", Bytes(needed), Bytes(available)),
    }
}

/// The output directory, the checkpoints of `checkpoint_bytes` that the run will write there, and the `carried_bytes` that it writes once.
pub(super) fn describe_files(settings: &Settings, extent: &RunExtent, (checkpoint_bytes, carried_bytes): (u64, u64)) -> String {
    let (dir, bytes) = (printable(settings.output_dir.display()), Bytes(checkpoint_bytes));
    let limit = settings.save_total_limit.filter(|limit| *limit > 0);
    let checkpoints = match (extent.saves(settings.save_steps), limit) {
        (0, _) => format!("{dir}; no checkpoint to write"),
        (1, None) => format!("{dir}; 1 checkpoint of {bytes}"),
        (1, Some(_)) => format!("{dir}; 1 checkpoint of {bytes}, --save-total-limit removes older ones"),
        (saves, Some(limit)) if limit as u64 >= saves => format!("{dir}; {saves} checkpoints of {bytes}"),
        (saves, Some(limit)) => format!("{dir}; {saves} checkpoints of {bytes}, of which the newest {limit} stay"),
        (saves, None) => {
            let all = Bytes(checkpoint_bytes.saturating_mul(saves));
            format!("{dir}; {saves} checkpoints of {bytes}, {all} in all (--save-total-limit N keeps the newest N)")
        }
    };
    match carried_bytes {
        0 => checkpoints,
        _ if extent.saves(settings.save_steps) == 0 => checkpoints,
        bytes => format!("{checkpoints}; carried tensors of {}, once", Bytes(bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::shape::ModelShape;
    use crate::planner::machine::Machine;

    #[test]
    fn the_files_line_states_number_size_and_retention_of_checkpoints() {
        let settings = |save_total_limit| Settings { output_dir: "out".into(), save_steps: 4, save_total_limit, ..Settings::demo() };
        let line = |first, last, limit| describe_files(&settings(limit), &RunExtent::of_steps(first, last), (3 << 20, 0));
        assert_eq!(line(1, 4, None), "out; 1 checkpoint of 3.0 MiB");
        assert_eq!(line(1, 10, None), "out; 3 checkpoints of 3.0 MiB, 9.0 MiB in all (--save-total-limit N keeps the newest N)");
        assert_eq!(line(1, 10, Some(0)), line(1, 10, None));
        assert_eq!(line(1, 10, Some(2)), "out; 3 checkpoints of 3.0 MiB, of which the newest 2 stay");
        assert_eq!(line(5, 10, Some(2)), "out; 2 checkpoints of 3.0 MiB");
        assert_eq!(line(5, 8, Some(2)), "out; 1 checkpoint of 3.0 MiB, --save-total-limit removes older ones");
        assert_eq!(line(9, 8, None), "out; no checkpoint to write");
        let carrying = |first, last| describe_files(&settings(None), &RunExtent::of_steps(first, last), (3 << 20, 5 << 20));
        assert_eq!(carrying(1, 4), "out; 1 checkpoint of 3.0 MiB; carried tensors of 5.0 MiB, once");
        assert_eq!(carrying(9, 8), line(9, 8, None));
    }

    #[test]
    fn plan_and_memory_are_a_line_each() {
        let plan = Plan::new(&Settings::demo().request(&ModelShape::demo()), &Machine::cpu(2), false).unwrap();
        let line = describe_plan(&plan, &RunExtent::of_steps(1, 300));
        assert!(line.starts_with("2048 tokens a step, ") && line.ends_with("; no predicted time on a CPU"), "{line}");
        let memory = describe_memory(&plan);
        assert!(memory.starts_with("host ") && memory.contains(" planned") && !memory.contains('\n'), "{memory}");
    }
}
