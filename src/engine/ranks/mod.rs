//! Exchange of gradients, weights, activations and reports between ranks, and their rendezvous.

pub(super) mod exchange;
mod exchange_order;
mod gradient_groups;
mod handover;
mod nccl_transport;
pub(crate) mod peer_exchange;
pub(crate) mod rendezvous;
mod shards;
mod sums;
mod tcp_transport;
