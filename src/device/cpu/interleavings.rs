//! The queue of a stream of the CPU device in every order that the memory model allows, by loom: `tests/threads/loom.sh`.

use super::stream::{Op, RING_OPS, Ring};
use crate::host::doorbell::Doorbell;
use crate::sync::thread;
use std::sync::Arc;

#[test]
fn a_ring_keeps_order_and_its_driver_waits_while_it_is_full() {
    const OPS: u64 = RING_OPS as u64 + 1;
    loom::model(|| {
        let (ring, driver) = (Arc::new(Ring::new()), Arc::new(Doorbell::default()));
        let (its_ring, its_driver) = (ring.clone(), driver.clone());
        let consumer = thread::spawn(move || {
            for number in 0..OPS {
                its_ring.bell.wait_until(|| its_ring.front().is_some());
                assert!(matches!(its_ring.front(), Some(Op::Wait { ops, .. }) if ops == number));
                its_ring.pop();
                its_driver.ring();
            }
        });
        for ops in 0..OPS {
            driver.wait_until(|| !ring.is_full());
            ring.push(Op::Wait { stream: 0, ops });
        }
        driver.wait_until(|| ring.done() == OPS);
        consumer.join().unwrap();
    });
}
