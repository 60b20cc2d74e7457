//! Idle time of the compute stream by cause.

use super::protocol::counters::Exposed;

/// Cause of a wait of the compute stream.
#[derive(Clone, Copy)]
pub(super) enum IdleCause {
    /// The optimizer, or slots that it held.
    Cpu,
    /// A copy.
    Transfer,
    /// Gradients, weights or reports of peers.
    Peers,
    /// A save that had not read a state yet.
    Save,
}

/// Idle time of the current step, and of the device's streams so far.
pub(super) struct IdleTimes {
    step: Exposed,
    /// Time for saves since it was last taken.
    save_ns: u64,
    /// Times at the last count that streams had waited, and had waited for peers.
    waited_ns: u64,
    waited_for_peers_ns: u64,
}

impl IdleTimes {
    /// The idle times of a device whose streams have waited for `waited_ns` so far.
    pub(super) fn new(waited_ns: u64) -> Self {
        Self { step: Exposed::default(), save_ns: 0, waited_ns, waited_for_peers_ns: 0 }
    }

    /// Idle time of the current step so far.
    pub(super) fn of_step(&self) -> Exposed {
        self.step
    }

    /// Begins a step.
    pub(super) fn reset(&mut self) {
        self.step = Exposed::default();
    }

    /// Adds idle time with this cause.
    pub(super) fn add(&mut self, cause: IdleCause, ns: u64) {
        *match cause {
            IdleCause::Cpu => &mut self.step.cpu_ns,
            IdleCause::Transfer => &mut self.step.transfer_ns,
            IdleCause::Peers => &mut self.step.peer_ns,
            IdleCause::Save => &mut self.save_ns,
        } += ns;
    }

    /// Idle time for saves since the last call.
    pub(super) fn take_save_ns(&mut self) -> u64 {
        std::mem::take(&mut self.save_ns)
    }

    /// Adds the time that streams waited since the last call. The arguments are the times so far, for all events and for peers.
    pub(super) fn count_waits(&mut self, waited_ns: u64, for_peers_ns: u64) {
        let [all, peers] = [waited_ns - self.waited_ns, for_peers_ns - self.waited_for_peers_ns];
        // The two times are rounded down to nanoseconds separately.
        self.add(IdleCause::Transfer, all.saturating_sub(peers));
        self.add(IdleCause::Peers, peers);
        (self.waited_ns, self.waited_for_peers_ns) = (waited_ns, for_peers_ns);
    }
}
