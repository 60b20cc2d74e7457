//! A stand-in for NCCL in tests: devices of one process that behave like devices of several processes. A swap blocks the compute stream of
//! a rank until its peers have entered the swap, and all ranks must enter their swaps in the same order.

use super::stream::{Op, Task};
use crate::device::{DeviceSlice, Swap};
use crate::ranks::RANKS_MAX;
use crate::ranks::progress::ProgressCounters;
use crate::ranks::{NcclUniqueId, RankContext};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Mailbox from one rank to another: address and size of the posted memory. `state` is the number of the swap times 4, plus one of the
/// constants below.
#[derive(Default)]
struct Mailbox {
    state: AtomicU64,
    addr: AtomicU64,
    bytes: AtomicU64,
}

const WITHDRAWN: u64 = 0;
const POSTED: u64 = 1;
const TAKING: u64 = 2;
const TAKEN: u64 = 3;

impl Mailbox {
    fn is(&self, swap: u64, state: u64) -> bool {
        self.state.load(Ordering::Acquire) == swap * 4 + state
    }
}

/// Mailboxes of all pairs of ranks, by sender, then by receiver; and the total number of bytes sent.
#[derive(Default)]
pub(crate) struct NcclStandInHub {
    boxes: [[Mailbox; RANKS_MAX]; RANKS_MAX],
    sent: AtomicU64,
}

impl NcclStandInHub {
    /// Opens a hub, which lives as long as the process, and returns its key.
    pub(crate) fn open() -> NcclUniqueId {
        let hub: &'static Self = Box::leak(Box::default());
        let mut key = NcclUniqueId([0; 128]);
        key.0[..8].copy_from_slice(&(std::ptr::from_ref(hub) as u64).to_le_bytes());
        key
    }

    /// Bytes that all ranks have sent through the hub of this `key`.
    pub(crate) fn sent_bytes(key: &NcclUniqueId) -> u64 {
        Self::of(key).sent.load(Ordering::Relaxed)
    }

    fn of(key: &NcclUniqueId) -> &'static Self {
        // SAFETY: the key holds the address of a hub that `NcclStandInHub::open` has leaked.
        unsafe { &*(u64::from_le_bytes(*key.0.first_chunk().expect("128 bytes")) as *const Self) }
    }
}

/// Connection of one rank to the hub.
#[derive(Clone, Copy)]
pub(super) struct NcclStandIn {
    hub: &'static NcclStandInHub,
    progress: &'static ProgressCounters,
    rank: usize,
    swaps: u64,
}

impl NcclStandIn {
    pub(super) fn open(key: &NcclUniqueId, context: &RankContext) -> Self {
        let progress: &'static Arc<ProgressCounters> = Box::leak(Box::new(context.progress.clone()));
        Self { hub: NcclStandInHub::of(key), progress, rank: context.rank, swaps: 0 }
    }

    /// Operations of the compute stream for the next swap.
    pub(super) fn swap(&mut self, swaps: impl Iterator<Item = Swap>) -> Vec<Op> {
        self.swaps += 1;
        let (nccl, swaps) = (*self, Vec::from_iter(swaps));
        let posts = swaps.iter().map(|&Swap { peer, out, .. }| Task::new("post", move || nccl.post(peer, out)));
        let takes = swaps.iter().map(|&Swap { peer, into, .. }| Task::new("take", move || nccl.take(peer, into)));
        let ends = swaps.iter().map(|&Swap { peer, .. }| Task::new("await", move || nccl.wait(|| nccl.own(peer).is(nccl.swaps, TAKEN))));
        posts.chain(takes).chain(ends).map(Op::Run).collect()
    }

    fn own(&self, peer: usize) -> &'static Mailbox {
        &self.hub.boxes[self.rank][peer]
    }

    fn post(self, peer: usize, out: DeviceSlice) {
        if self.progress.has_failed() {
            return;
        }
        let own = self.own(peer);
        self.hub.sent.fetch_add(out.bytes() as u64, Ordering::Relaxed);
        own.addr.store(out.addr(), Ordering::Relaxed);
        own.bytes.store(out.bytes() as u64, Ordering::Relaxed);
        own.state.store(self.swaps * 4 + POSTED, Ordering::Release);
    }

    fn take(self, peer: usize, into: DeviceSlice) {
        let (mailbox, posted) = (&self.hub.boxes[peer][self.rank], self.swaps * 4 + POSTED);
        self.wait(|| mailbox.is(self.swaps, POSTED));
        let (addr, bytes) = (mailbox.addr.load(Ordering::Relaxed), mailbox.bytes.load(Ordering::Relaxed));
        if self.progress.has_failed() {
            return;
        }
        assert_eq!(bytes, into.bytes() as u64, "swap {} of ranks {} and {peer}", self.swaps, self.rank);
        if mailbox.state.compare_exchange(posted, self.swaps * 4 + TAKING, Ordering::AcqRel, Ordering::Relaxed).is_err() {
            return;
        }
        // SAFETY: sizes agree. The sender frees or overwrites its memory only after this copy: it waits while the state is `TAKING`, and
        // cannot withdraw the memory meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(addr as *const u8, into.addr() as *mut u8, into.bytes()) };
        mailbox.state.store(self.swaps * 4 + TAKEN, Ordering::Release);
    }

    /// Withdraws all posted memory of this rank, so that its memory can be freed.
    pub(super) fn withdraw(&self) {
        for own in &self.hub.boxes[self.rank] {
            loop {
                let state = own.state.load(Ordering::Acquire);
                let is_withdrawn = state % 4 == POSTED
                    && own.state.compare_exchange(state, state - state % 4 + WITHDRAWN, Ordering::AcqRel, Ordering::Relaxed).is_ok();
                if is_withdrawn || !matches!(state % 4, POSTED | TAKING) {
                    break;
                }
                std::thread::yield_now();
            }
        }
    }

    /// Waits for `ready`, or until a rank has failed, because a failed rank posts nothing. Sleeps between polls to leave the core to the
    /// other rank.
    fn wait(self, ready: impl Fn() -> bool) {
        while !ready() && !self.progress.has_failed() {
            std::thread::sleep(Duration::from_micros(20));
        }
    }
}
