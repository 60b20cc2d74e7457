//! Memory for copies of states that wait to be saved, so that steps need not wait for the disk.

use super::budget::{FrozenSizes, Rings, Workload, balances, own_memory};
use super::placement::SaveCopies;
use super::plan::Plan;
use super::resolve::SLOTS;
use crate::bucket::layout::{BucketLayout, Tier};
use crate::bucket::slices::Slices;
use crate::device::footprint::MemoryClass;
use crate::memory::{DeviceMemory, MemorySpace};
use crate::model::tensors::TensorTable;
use crate::optim::split::Masters;
use crate::optim::state_array::StateArrays;
use crate::request::choices::SaveMemory;
use crate::units::Bytes;

/// Name of the memory for copies, in both spaces.
const COPIES: &str = "checkpoint copies";
/// Name of the pinned host memory through which copies leave the device.
const STAGED: &str = "staged checkpoint copies";
/// Name of the page lists of pinned copies.
const LISTS: &str = "lists of pinned copies";

impl Workload<'_> {
    /// Memory of copies for which the request names a size, before a plan divides it. Each copy has the state of a bucket, of which each
    /// rank has its slice.
    pub(super) fn requested_copies_classes(&self, layout: &BucketLayout) -> impl Iterator<Item = MemoryClass> + use<> {
        let host = match self.site.save_memory {
            SaveMemory::Off | SaveMemory::Auto => 0,
            SaveMemory::Size(bytes) => self.fitting(layout, bytes.0.saturating_mul(self.site.processes as u64)),
        };
        self.copies_classes(layout, SaveCopies { host, device: 0 })
    }

    /// Sets the copies of a run whose other memory is `classes`, and replaces the memory of requested copies by theirs. The device has as
    /// many as fit, the host as many as were requested or fit.
    pub(super) fn take_copies(&self, (layout, rings): (&BucketLayout, Rings), classes: &mut Vec<MemoryClass>) -> SaveCopies {
        classes.retain(|class| ![COPIES, LISTS].contains(&class.name));
        let stops = obstacle(layout, rings).is_some();
        let copies = if stops { SaveCopies::default() } else { self.copies(layout, classes) };
        classes.extend(self.copies_classes(layout, copies));
        copies
    }

    fn copies(&self, layout: &BucketLayout, classes: &[MemoryClass]) -> SaveCopies {
        let (ranks, processes) = (self.site.ranks, self.site.processes);
        let [on_device, on_host] = balances(&self.site.machine, classes, (ranks, processes), self.transient_bytes);
        // Each process has a host of its own.
        let host_bytes = match self.site.save_memory {
            SaveMemory::Off => 0,
            SaveMemory::Auto => on_host.free().unwrap_or(0),
            SaveMemory::Size(bytes) => bytes.0,
        };
        let host_bytes = host_bytes.saturating_mul(processes as u64);
        // With shared memory, copies in both spaces take the same bytes. Free memory is left to copies of the host, which serve all buckets.
        let (device_bytes, shared) = match self.site.machine.device {
            DeviceMemory::Own { .. } => (on_device.free().unwrap_or(0) * ranks as u64, 0),
            DeviceMemory::Shared if self.site.save_memory == SaveMemory::Auto => (0, 0),
            DeviceMemory::Shared => (host_bytes / 2, self.copy_bytes(layout) as u64),
        };
        let with = |device: usize| {
            let (all, staged) = (self.fitting(layout, host_bytes - device as u64 * shared), SaveCopies { host: 0, device }.staged());
            let copies = SaveCopies { host: all.checked_sub(staged)?, device };
            (copies.host >= copies.direct(resident(layout))).then_some(copies)
        };
        [self.copies_on_device(layout, device_bytes), 0].into_iter().find_map(with).unwrap_or_default()
    }

    /// Copies that fit `bytes` of all devices together: at most one of each bucket whose state is there. A device copies states in its
    /// own form, so it must be that of checkpoints.
    fn copies_on_device(&self, layout: &BucketLayout, bytes: u64) -> usize {
        let fitting = (bytes / self.copy_bytes(layout) as u64) as usize;
        if self.protocol.masters == Masters::Float32 { resident(layout).min(fitting) } else { 0 }
    }

    /// The memory of `copies`, and of the page lists of those that are pinned.
    fn copies_classes(&self, layout: &BucketLayout, copies: SaveCopies) -> impl Iterator<Item = MemoryClass> + use<> {
        let (one, staged) = (self.copy_bytes(layout), copies.staged());
        let lists = if copies == SaveCopies::default() { 0 } else { self.list_bytes(layout, copies.direct(resident(layout)) + staged) };
        let class = |name, space, bytes| MemoryClass { name, space, bytes };
        let classes = [
            class(COPIES, MemorySpace::Device, copies.device * one),
            class(COPIES, MemorySpace::Host, copies.host * one),
            class(STAGED, MemorySpace::Host, staged * one),
            class(LISTS, MemorySpace::Host, lists),
        ];
        classes.into_iter().filter(|class| class.bytes > 0)
    }

    /// Bytes of the page lists of `pinned` copies.
    fn list_bytes(&self, layout: &BucketLayout, pinned: usize) -> usize {
        self.site.ranks * self.site.machine.kind.page_list_bytes(pinned * self.copy_bytes(layout))
    }

    /// Copies that fit `bytes` of the host: at most one of each bucket, with the page lists of all that may be pinned.
    fn fitting(&self, layout: &BucketLayout, bytes: u64) -> usize {
        let bytes = bytes.saturating_sub(self.list_bytes(layout, resident(layout)) as u64);
        layout.count().min((bytes / self.copy_bytes(layout) as u64) as usize)
    }

    fn copy_bytes(&self, layout: &BucketLayout) -> usize {
        copy_bytes(self.recipe.optimizer().arrays(), layout, self.site.ranks)
    }
}

impl Plan {
    /// Why a save must stop training; `None` if it can run beside steps.
    pub(crate) fn save_obstacle(&self) -> Option<String> {
        let (layout, copies) = (&self.placement.layout, self.placement.save_copies);
        let is_short = copies.host < copies.direct(resident(layout));
        let bytes = Bytes((self.copy_bytes() * resident(layout)) as u64);
        let too_little = is_short.then(|| format!("copies of the states on the device take {bytes} of --save-memory"));
        obstacle(layout, self.placement.rings).or(too_little)
    }

    /// This plan with the memory for copies that a run of it takes. Plans that no run follows lack it, unless a size was requested.
    pub(crate) fn with_save_copies(mut self) -> Self {
        if self.placement.save_copies == SaveCopies::default() {
            let Self { recipe, site, protocol, placement, forecast } = &mut self;
            let (transient_bytes, frozen) = (forecast.transient_bytes, FrozenSizes::of(&TensorTable::new(&recipe.model)));
            let (own_memory, segments) = (&own_memory(recipe, site.machine.kind)[..], &placement.segments);
            let workload = Workload { recipe, site, protocol, segments, slots: SLOTS, transient_bytes, frozen, own_memory };
            placement.save_copies = workload.take_copies((&placement.layout, placement.rings), &mut forecast.memory);
        }
        self
    }

    /// Bytes of states that copies can have while they wait to be saved.
    pub(crate) fn save_copy_bytes(&self) -> u64 {
        let SaveCopies { host, device } = self.placement.save_copies;
        ((host + device) * self.copy_bytes()) as u64
    }

    /// Seconds in which states leave the devices from their own memory, which the next step waits for, once the slots are pinned.
    pub(crate) fn copied_first_s(&self) -> f64 {
        let bytes = self.placement.save_copies.direct(resident(&self.placement.layout)) * self.copy_bytes();
        bytes as f64 / self.site.ranks as f64 / self.site.machine.rates.to_host_bytes_per_s
    }

    fn copy_bytes(&self) -> usize {
        copy_bytes(self.optimizer().arrays(), &self.placement.layout, self.site.ranks)
    }
}

/// Bytes of a slot for the state of a bucket. Each rank has a slot for its slice.
fn copy_bytes(arrays: StateArrays, layout: &BucketLayout, ranks: usize) -> usize {
    (0..ranks).map(|rank| arrays.bytes(Slices::new(layout.clone(), rank, ranks).slice_elems())).sum()
}

/// Number of buckets whose states are on the device.
fn resident(layout: &BucketLayout) -> usize {
    layout.count() - layout.offloaded()
}

/// Why a save must stop training, however much memory there is.
fn obstacle(layout: &BucketLayout, rings: Rings) -> Option<String> {
    if rings.split_masters {
        return Some("masters on the host are split, and halves of them are streamed weights".into());
    }
    (!layout.buckets_in(Tier::Unified).is_empty()).then(|| "states are in unified memory".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::settings::Settings;
    use crate::planner::machine::Machine;
    use crate::planner::tests::{GIB, h200, qwen3_4b};
    use crate::request::choices::{MastersChoice, ResidentBuckets};

    fn run_plan(settings: Settings, machine: &Machine) -> Plan {
        Plan::new(&settings.request(&qwen3_4b()), machine, true).unwrap()
    }

    fn settings(save_memory: SaveMemory) -> Settings {
        Settings { seq_length: 1024, per_device_train_batch_size: 1, save_memory, ..Settings::default() }
    }

    #[test]
    fn the_device_copies_as_many_states_as_fit_its_free_memory_and_the_host_the_rest() {
        let small =
            Settings { hbm_limit: Some(Bytes(80 * GIB)), resident_buckets: ResidentBuckets::Count(120), ..settings(SaveMemory::Auto) };
        let plan = run_plan(small, &h200());
        let (resident, copies) = (resident(&plan.placement.layout), plan.placement.save_copies);
        assert!((1..resident).contains(&copies.device), "{copies:?}, {resident} resident");
        let [device, host] = plan.balances();
        assert!(device.free().unwrap() < plan.copy_bytes() as u64 && host.free().is_some(), "{device:?} {host:?}");
        assert!(copies.host >= copies.direct(resident) && plan.save_obstacle().is_none());
        let waits = plan.copied_first_s() * plan.site.machine.rates.to_host_bytes_per_s;
        assert_eq!(waits as usize, (resident - copies.device) * plan.copy_bytes());
    }

    #[test]
    fn a_plan_that_no_run_follows_takes_the_copies_of_a_run_on_request() {
        let request = settings(SaveMemory::Auto).request(&qwen3_4b());
        let [shown, run] = [false, true].map(|is_run| Plan::new(&request, &h200(), is_run).unwrap());
        assert_eq!(shown.save_copy_bytes(), 0);
        let states = run.optimizer().arrays().bytes(run.trained_params()) as u64;
        let (with, again) = (shown.clone().with_save_copies(), shown.clone().with_save_copies().with_save_copies());
        assert!(with.save_copy_bytes() >= states && run.save_copy_bytes() >= states, "{with}");
        assert!(with.bytes_at(MemorySpace::Host) > shown.bytes_at(MemorySpace::Host), "{with}");
        assert_eq!((again.placement.save_copies, again.forecast.memory.len()), (with.placement.save_copies, with.forecast.memory.len()));
    }

    #[test]
    fn no_state_is_copied_within_a_device_that_stores_it_otherwise_or_without_memory_for_staged_copies() {
        let split = Settings { masters: MastersChoice::Split, ..settings(SaveMemory::Auto) };
        assert_eq!(run_plan(split, &h200()).placement.save_copies.device, 0);
        for memory in [SaveMemory::Off, SaveMemory::Size(Bytes(GIB / 100))] {
            let plan = run_plan(settings(memory), &h200());
            assert_eq!(plan.placement.save_copies, SaveCopies::default());
            assert!(plan.forecast.memory.iter().all(|class| !class.name.contains("checkpoint copies")));
        }
    }
}
