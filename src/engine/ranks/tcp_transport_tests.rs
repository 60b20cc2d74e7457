//! Transfers to and from one other process; the test holds the other end of the connections.

use super::*;
use crate::bucket::layout::{BucketLayout, Tier};
use crate::config::settings::Settings;
use crate::device::cpu::{CpuDevice, StreamOrder};
use crate::device::{Launch, Peers, Poke};
use crate::dtype::Dtype;
use crate::engine::ranks::shards::Shards;
use crate::host::doorbell::Doorbell;
use crate::launch::open;
use crate::model::shape::ModelShape;
use crate::optim::norm::BLOCK;
use crate::planner::machine::Machine;
use crate::ranks::RankContext;
use crate::ranks::progress::{CounterSizes, ProgressCounters};
use crate::ranks::wire::SealedConnection;
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

const BUCKETS: usize = 24;
/// A slice is 1 MiB: socket buffers hold a few of them.
const SLICE_BLOCKS: usize = (1 << 18) / BLOCK;

/// The first of two ranks, and the other end of its connections.
struct Pair {
    dev: CpuDevice,
    tcp: TcpTransport,
    flat: [DeviceSlice; 2],
    event: EventId,
    others: [SliceConnection; 2],
    host: HostMemory,
}

impl Pair {
    fn new(seed: u64) -> Self {
        let settings = Settings { seq_length: 8, per_device_train_batch_size: 1, ..Settings::demo() };
        let mut plan = Plan::new(&settings.request(&ModelShape::demo()), &Machine::cpu(1), false).unwrap();
        let layout = BucketLayout::new(2 * SLICE_BLOCKS * BUCKETS * BLOCK, 2 * SLICE_BLOCKS * BLOCK, Tier::Device);
        let slices = Slices::new(layout.clone(), 0, 2);
        plan.placement.layout = layout.clone();
        plan.recipe.numerics.dtype = Dtype::Float32;
        let mut dev = open::cpu(1, StreamOrder::Adversary { seed }, Arc::new(Doorbell::default()), 0).unwrap();
        let [(grads, others), (weights, of_others)] = [SliceKind::Gradients, SliceKind::Weights].map(connections);
        let tcp = TcpTransport::new(&mut dev, &plan, &slices, vec![None, Some(RankConnections { grads, weights: Some(weights) })]).unwrap();
        let flat = [(); 2].map(|()| dev.alloc("flat", layout.flat_elems(), Dtype::Float32).unwrap());
        let (peer_handle, progress) =
            (dev.peer_handle(), Arc::new(ProgressCounters::new(CounterSizes { ranks: 2, ..CounterSizes::default() }, None)));
        dev.admit(RankContext { progress, rank: 0 }, vec![peer_handle.clone(), peer_handle]).unwrap();
        let event = dev.event().unwrap();
        let mut pair = Self { dev, tcp, flat, event, others: [others, of_others], host: HostMemory::default() };
        let [grads, weights] = flat;
        pair.tcp.settle_down(RankMemory { grads, weights, shards: Shards::default(), activations: None });
        pair
    }

    /// Writes `value` to the first element of the slice of `rank` of `bucket`.
    fn write(&mut self, kind: usize, rank: usize, bucket: usize, value: f32) {
        let start = self.tcp.slices.of(rank, bucket).start;
        self.dev.launch(Poke { x: self.flat[kind], index: start, value }).unwrap();
        self.dev.record(self.event, Stream::Compute).unwrap();
    }

    /// Runs everything that can progress.
    fn poll(&mut self) {
        let mut idle = 0;
        while idle < 5 {
            self.tcp.serve(&mut self.dev).unwrap();
            if !self.dev.idle().unwrap() {
                idle += 1;
                std::thread::sleep(Duration::from_millis(2));
            }
        }
    }

    /// The next `count` slices that arrive at the other end: bucket, round, first value.
    fn arrive(&mut self, kind: usize, count: usize) -> Vec<(u32, u64, f32)> {
        let mut arrived = Vec::new();
        for _ in 0..10_000 {
            self.poll_once();
            while self.others[kind].first().is_some() {
                let SliceMessage { bucket, round, bytes } = self.others[kind].take().unwrap();
                assert_eq!(bytes.len(), 1 << 20);
                arrived.push((bucket, round, f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])));
            }
            if arrived.len() == count {
                return arrived;
            }
        }
        panic!("only {arrived:?} of {count} came");
    }

    fn poll_once(&mut self) {
        self.tcp.serve(&mut self.dev).unwrap();
        if !self.dev.idle().unwrap() {
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    /// Like `poll_once` until `has` is true, however long the system takes to deliver.
    fn poll_until(&mut self, has: impl Fn(&TcpTransport) -> bool) {
        let came = (0..20_000).any(|_| {
            self.poll_once();
            has(&self.tcp)
        });
        assert!(came, "what was sent has not come");
        self.poll();
    }

    /// The first weight of the slice of `rank` of `bucket`, after all enqueued work.
    fn weight(&mut self, rank: usize, bucket: usize) -> f32 {
        let (start, seen) = (self.tcp.slices.of(rank, bucket).start, self.host.alloc("seen", 4).unwrap());
        self.dev.copy_d2h(Stream::Gather, self.flat[1].slice(start, 1), seen).unwrap();
        self.poll();
        self.host.lend::<f32>(seen)[0]
    }

    fn send(&self, kind: usize, bucket: u32, round: u64, value: f32) {
        let bytes = Arc::new(value.to_le_bytes().repeat(1 << 18));
        let message = SliceMessage { bucket, round, bytes };
        while !self.others[kind].try_send(&message) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Both ends of a connection.
fn connections(kind: SliceKind) -> (SliceConnection, SliceConnection) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let one = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let start =
        |stream| SliceConnection::start(SealedConnection::bare(stream), (kind, 1 << 20), Arc::default(), |_: &std::io::Error| ()).unwrap();
    (start(one), start(listener.accept().unwrap().0))
}

#[test]
fn gradients_leave_in_their_order_and_may_be_overwritten_when_all_have() {
    let mut pair = Pair::new(7);
    for bucket in 0..BUCKETS {
        pair.write(0, 1, bucket, bucket as f32 + 0.5);
        pair.tcp.send_grads(&mut pair.dev, bucket, 3, pair.event).unwrap();
    }
    pair.poll();
    assert!(!pair.tcp.may_overwrite(&mut pair.dev).unwrap(), "nobody takes them, and there is no place for all");
    let arrived = pair.arrive(0, BUCKETS);
    assert!(arrived.iter().copied().eq((0..BUCKETS).map(|bucket| (bucket as u32, 3, bucket as f32 + 0.5))), "{arrived:?}");
    assert!(pair.tcp.may_overwrite(&mut pair.dev).unwrap());
}

#[test]
fn a_slice_overwritten_after_permission_was_sent_unchanged() {
    for seed in 0..20 {
        let mut pair = Pair::new(seed);
        pair.write(0, 1, 0, 1.5);
        pair.tcp.send_grads(&mut pair.dev, 0, 0, pair.event).unwrap();
        assert!(pair.tcp.may_overwrite(&mut pair.dev).unwrap());
        pair.write(0, 1, 0, 2.5);
        assert_eq!(pair.arrive(0, 1), [(0, 0, 1.5)], "seed {seed}");
    }
}

#[test]
fn gradients_of_another_order_are_an_error() {
    let mut pair = Pair::new(1);
    let has = |pair: &mut Pair, bucket, round| {
        (0..1000)
            .map(|_| {
                std::thread::sleep(Duration::from_millis(1));
                pair.tcp.has_grads(&mut pair.dev, bucket, round)
            })
            .find(|has| !matches!(has, Ok(false)))
            .unwrap()
    };
    pair.send(0, 2, 5, 0.25);
    assert!(has(&mut pair, 2, 5).unwrap());
    let refused = has(&mut pair, 3, 5).unwrap_err().to_string();
    assert!(refused.starts_with("take a slice of rank 1: bucket 2 of round 5"), "{refused}");
    assert!(has(&mut pair, 2, 6).is_err());
}

#[test]
fn weights_are_taken_in_any_order_and_not_before_their_version() {
    let mut pair = Pair::new(2);
    pair.tcp.next_version();
    for (bucket, value) in [(9, 9.5), (4, 4.5)] {
        pair.send(1, bucket, 1, value);
    }
    pair.send(1, 4, 2, 40.5);
    let first = |pair: &mut Pair| [4, 9].map(|bucket| pair.weight(1, bucket));
    pair.poll_until(|tcp| tcp.has_weights(4) && tcp.has_weights(9));
    assert_eq!(first(&mut pair), [4.5, 9.5], "that of the next version waits");
    assert!(!pair.tcp.has_weights(5));
    pair.tcp.next_version();
    assert!(!pair.tcp.has_weights(4));
    pair.poll_until(|tcp| tcp.has_weights(4));
    assert_eq!(first(&mut pair), [40.5, 9.5]);
    // Its own slices are sent in the order in which they become final.
    for (bucket, value) in [(6, 6.5), (1, 1.5)] {
        pair.write(1, 0, bucket, value);
        pair.tcp.send_weights(bucket, pair.event);
        assert_eq!(pair.arrive(1, 1), [(bucket as u32, 2, value)]);
    }
    // The same bucket twice in a version.
    pair.send(1, 4, 2, 41.5);
    let refused = (0..1000).find_map(|_| {
        std::thread::sleep(Duration::from_millis(1));
        pair.tcp.serve(&mut pair.dev).err()
    });
    assert!(refused.unwrap().to_string().contains("bucket 4 of round 2"));
}

/// Fetched weights are transferred again with each fetch, and slices of a later fetch wait for it.
#[test]
fn fetched_weights_arrive_in_the_round_of_their_fetch_only() {
    let mut pair = Pair::new(5);
    pair.tcp.next_version();
    let flat = pair.tcp.slices.layout().range(5).start..pair.tcp.slices.layout().range(6).end;
    let first = |pair: &mut Pair| [5, 6].map(|bucket| pair.weight(1, bucket));
    for (round, [fifth, sixth]) in [(2, [5.25, 6.25]), (3, [50.5, 60.5])] {
        for (bucket, value) in [(5, fifth), (6, sixth)] {
            pair.write(1, 0, bucket, -value);
        }
        // Sent before this rank starts its fetch.
        pair.send(1, 6, round, sixth);
        let before = first(&mut pair);
        assert!(!before.contains(&sixth), "round {round}: {before:?}");
        pair.tcp.fetch(&flat, &[pair.event; BUCKETS]);
        assert_eq!(pair.arrive(1, 2), [(5, round, -fifth), (6, round, -sixth)]);
        pair.poll();
        assert!(!pair.tcp.has_fetched(), "round {round}: one of two has come");
        pair.send(1, 5, round, fifth);
        pair.poll_until(TcpTransport::has_fetched);
        assert_eq!(first(&mut pair), [fifth, sixth], "round {round}");
    }
    // A bucket outside of the fetch.
    pair.send(1, 7, 3, 7.5);
    let refused = (0..1000).find_map(|_| {
        std::thread::sleep(Duration::from_millis(1));
        pair.tcp.serve(&mut pair.dev).err()
    });
    assert!(refused.unwrap().to_string().contains("bucket 7 of round 3"));
}
