//! Loom models of the CPU device's stream queue: they run it in every order that the memory model allows. Run with `tests/threads/loom.sh`.

use super::stream::{Op, OpQueue, Point, QUEUE_OPS};
use crate::host::doorbell::Doorbell;
use crate::sync::thread;
use std::sync::Arc;

#[test]
fn a_queue_keeps_order_and_its_driver_waits_while_it_is_full() {
    const OPS: u64 = QUEUE_OPS as u64 + 1;
    loom::model(|| {
        let (queue, driver) = (Arc::new(OpQueue::new()), Arc::new(Doorbell::default()));
        let (its_queue, its_driver) = (queue.clone(), driver.clone());
        let consumer = thread::spawn(move || {
            for number in 0..OPS {
                its_queue.bell.wait_until(|| its_queue.front().is_some());
                assert!(matches!(its_queue.front(), Some(Op::Wait(Point { ops, .. })) if ops == number));
                its_queue.pop();
                its_driver.ring();
            }
        });
        for ops in 0..OPS {
            driver.wait_until(|| !queue.is_full());
            queue.push(Op::Wait(Point { stream: 0, ops }));
        }
        driver.wait_until(|| queue.done() == OPS);
        consumer.join().unwrap();
    });
}

#[test]
fn a_stream_that_waits_for_another_is_woken() {
    const REACHED: Point = Point { stream: 1, ops: 1 };
    loom::model(|| {
        let (waits, works) = (Arc::new(OpQueue::new()), Arc::new(OpQueue::new()));
        works.push(Op::Wait(REACHED));
        let (its_queue, its_goal) = (waits.clone(), works.clone());
        let waiter = thread::spawn(move || its_queue.wait_for(REACHED, || its_goal.done() == REACHED.ops));
        works.pop();
        OpQueue::wake(REACHED, std::iter::once(&*waits));
        waiter.join().unwrap();
    });
}
