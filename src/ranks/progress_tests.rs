//! Tests of the progress counters of one process, and of counters that processes replicate to each other.

use super::*;

fn progress(ranks: usize) -> ProgressCounters {
    ProgressCounters::new(
        CounterSizes {
            ranks,
            buckets: 3,
            norm_partials: 4,
            partial_sums: 2,
            mail_words: 5,
            on_gpus: ranks == 3,
            ..CounterSizes::default()
        },
        None,
    )
}

#[test]
fn reports_of_all_ranks_equal_the_last_report() {
    let progress = progress(3);
    for rank in [2, 0] {
        progress.publish_written(rank);
        progress.publish_pulled(rank);
        progress.publish_met(rank);
        progress.publish_report(rank, rank == 2, 7);
    }
    assert!(
        !progress.all_met(1)
            && !progress.all_written(0)
            && !progress.all_pulled(1)
            && progress.all_pulled(0)
            && progress.reports(7).is_none()
    );
    progress.publish_written(1);
    progress.publish_pulled(1);
    progress.publish_met(1);
    progress.write_loss(1, 0.5);
    progress.write_loss(0, 1.0);
    progress.publish_report(1, false, 7);
    assert!(progress.all_written(0) && !progress.all_written(1) && progress.all_pulled(1) && progress.all_met(1) && !progress.all_met(2));
    assert_eq!((progress.reports(7), progress.reports(8)), (Some(true), None));
}

#[test]
fn a_publication_has_a_time_for_all_peers() {
    let (progress, before) = (progress(2), now_ns());
    progress.publish_written(1);
    let at = progress.published_ns(0);
    assert!(before <= at && at <= now_ns() && progress.published_ns(1) == 0);
}

#[test]
fn mirrored_ranks_have_the_publications_of_rank_0() {
    let progress = ProgressCounters::mirrored(
        CounterSizes { ranks: 3, buckets: 3, norm_partials: 4, partial_sums: 3, mail_words: 5, ..CounterSizes::default() },
        3,
    );
    assert!(progress.ranks() == 3 && !progress.all_written(0) && !progress.all_pulled(1) && progress.settled(2, 1) == 0);
    progress.publish_written(0);
    progress.publish_pulled(0);
    progress.publish_settled(0, 1, 4);
    progress.publish_norm_partials(0, 2);
    progress.publish_report(0, false, 1);
    progress.give_order(1, [0; ORDER_WORDS]);
    assert!(progress.all_written(0) && !progress.all_written(1) && progress.all_pulled(1) && progress.all_done());
    assert_eq!([0, 2].map(|rank| (progress.settled(rank, 1), progress.settled(rank, 0))), [(4, 0); 2]);
    assert_eq!([0, 2].map(|rank| progress.published_norm_partials(rank)), [Some(2), None]);
    assert_eq!(progress.reports(1), Some(false));
    assert_eq!(progress.published_ns(0), 0);
}

#[test]
fn orders_come_one_after_the_other_with_their_mail() {
    let progress = progress(2);
    assert!(progress.all_done() && progress.next_order(0).is_none());
    progress.post(0, 3, [8, 9]);
    progress.give_order(4, [1, 2, 3, 4, 5, 6]);
    assert_eq!(progress.next_order(0), Some((4, [1, 2, 3, 4, 5, 6])));
    assert!(progress.mail(2).eq([0, 8, 9]) && !progress.all_done() && progress.next_order(1).is_none());
    progress.publish_done(1);
    assert!(progress.all_done());
}

/// An outbox that delivers notices to the counters of another process at once.
struct RecordingOutbox(std::sync::mpsc::Sender<(Audience, Notice)>);

impl Outbox for RecordingOutbox {
    fn send(&self, to: Audience, notice: Notice) {
        self.0.send((to, notice)).unwrap();
    }
}

#[test]
fn publications_of_a_rank_reach_the_counters_of_other_processes() {
    let sizes = CounterSizes { ranks: 2, buckets: 3, norm_partials: 4, partial_sums: 2, experts: 2, mail_words: 5, on_gpus: false };
    let (message, received) = std::sync::mpsc::channel();
    let names = || vec!["process 0 on a".to_string(), "process 1 on b".to_string()];
    let progress = |process| {
        ProgressCounters::linked(sizes, RemoteProcesses { process, names: names(), outbox: Arc::new(RecordingOutbox(message.clone())) })
    };
    let (first, second) = (progress(0), progress(1));
    let pass = |from: usize, to: &ProgressCounters| received.try_iter().map(|(_, notice)| to.receive(from, &notice).unwrap()).count();
    second.publish_written(1);
    second.publish_settled(1, 2, 7);
    second.write_norm_partials(1, &[0.5, -0.0]);
    second.publish_norm_partials(1, 2);
    second.write_loss(1, 2.5);
    second.publish_report(1, true, 3);
    second.write_amounts(1, (10..10 + AMOUNTS as u64).map(|amount| amount << 32));
    second.write_expert_rows(1, &[3, 4]);
    second.post(1, 4, [9]);
    second.publish_met(1);
    assert_eq!(pass(1, &first), 10);
    assert_eq!((first.written(1), first.settled(1, 2), first.published_norm_partials(1), first.reported(1)), (1, 7, Some(2), 3));
    let mut norm_partials = [0.0; 2];
    first.read_norm_partials(1, &mut norm_partials);
    assert_eq!(norm_partials.map(f32::to_bits), [0.5f32.to_bits(), (-0.0f32).to_bits()]);
    first.publish_report(0, false, 3);
    assert_eq!((first.reports(3), first.losses().collect::<Vec<_>>()), (Some(true), vec![0.0, 2.5]));
    assert!(first.amounts(1).eq(second.amounts(1)) && first.expert_rows(1).eq([3, 4]) && first.mail(4).eq([9]));
    first.publish_outcome(3, StepOutcome { norm_sq: 0.1, nonfinite: true, loss: 0.2 });
    first.post(0, 0, [5, 6]);
    first.give_order(8, [1, 2, 3, 4, 5, 6]);
    // Progress counters do not forward notices that they received.
    assert_eq!(pass(0, &second), 4);
    assert_eq!(second.outcome(3), first.outcome(3));
    assert!(second.next_order(0) == Some((8, [1, 2, 3, 4, 5, 6])) && second.mail(0).take(2).eq([5, 6]) && !first.all_done());
    second.publish_done(1);
    second.fail(1, "no memory");
    assert!(pass(1, &first) == 2 && first.all_done());
    assert_eq!(first.failure().unwrap().to_string(), "process 1 on b: no memory");
}

/// Two processes of two ranks each.
#[test]
fn ranks_of_a_process_meet_locally_and_communicate_as_one_process() {
    let sizes = CounterSizes { ranks: 4, buckets: 3, mail_words: 2, ..CounterSizes::default() };
    let (message, received) = std::sync::mpsc::channel();
    let names = ["process 0 on a", "process 1 on b"].map(String::from).to_vec();
    let progress = [0, 1].map(|process| {
        ProgressCounters::linked(
            sizes,
            RemoteProcesses { process, names: names.clone(), outbox: Arc::new(RecordingOutbox(message.clone())) },
        )
    });
    let [first, second] = &progress;
    assert_eq!([first.local_ranks(), second.local_ranks()], [0..2, 2..4]);
    [2, 3].into_iter().for_each(|rank| second.publish_written(rank));
    assert!(second.all_written(0) && !first.all_written(0), "each waits for its own");
    second.publish_pulled(3);
    second.publish_relayed(2);
    assert_eq!((second.relayed_to_all(), second.all_pulled(1)), (0, false));
    second.publish_relayed(3);
    second.publish_pulled(2);
    assert_eq!((second.relayed_to_all(), second.all_pulled(1), first.relayed_to_all()), (1, true, 0));
    let notices: Vec<_> = received.try_iter().collect();
    assert_eq!(notices.len(), 4, "what is carried is nobody else's business");
    for (_, notice) in notices {
        first.receive(1, &notice).unwrap();
        assert!(first.receive(0, &notice).is_err(), "it is of the other process");
    }
    assert_eq!([2, 3].map(|rank| (first.written(rank), first.pulled(rank))), [(1, 1); 2]);
    // Rank 1 addresses rank 0 alone.
    first.post(1, 0, [7]);
    first.post(0, 0, [8]);
    assert_eq!(Vec::from_iter(received.try_iter().map(|(to, _)| to)), [Audience::First, Audience::All]);
    second.fail(3, "no memory");
    assert_eq!(second.failure().unwrap().to_string(), "process 1 on b: rank 3: no memory");
    assert_eq!(received.try_recv().unwrap().1.text(), "rank 3: no memory");
    // A rank that has finished its work ends only its own process.
    first.leave(0);
    assert!(first.has_failed() && received.try_recv().is_err());
}

#[test]
fn invalid_notices_are_not_applied() {
    let sizes = CounterSizes { ranks: 2, buckets: 3, norm_partials: 4, partial_sums: 2, experts: 2, mail_words: 5, on_gpus: false };
    let (message, _received) = std::sync::mpsc::channel();
    let names = ["process 0 on a", "process 1 on b"].map(String::from).to_vec();
    let progress = ProgressCounters::linked(sizes, RemoteProcesses { process: 0, names, outbox: Arc::new(RecordingOutbox(message)) });
    let words = |count: usize| vec![0; 4 * count];
    for (from, topic, numbers, tail) in [
        (1, Topic::Written, &[0][..], vec![]),
        (1, Topic::Settled, &[1, 3, 1], vec![]),
        (1, Topic::PartialsPublished, &[1, 5], vec![]),
        (1, Topic::Partials, &[3], words(2)),
        (1, Topic::Partials, &[u64::MAX], words(1)),
        (1, Topic::Mail, &[5], words(1)),
        (1, Topic::ExpertRows, &[1, 1], words(4)),
        (1, Topic::Loss, &[2, 0], vec![]),
        (1, Topic::Loss, &[0, 1 << 32], vec![]),
        (1, Topic::Outcome, &[1, 0, 0, 0], vec![]),
        (1, Topic::Order, &[0; 7], vec![]),
        (1, Topic::Alive, &[], vec![]),
    ] {
        let notice = Notice::new(topic, numbers).with(tail);
        assert!(progress.receive(from, &notice).is_err_and(|why| why.starts_with(&format!("{topic:?}"))), "{notice:?}");
    }
    assert!(progress.receive(0, &Notice::new(Topic::Order, &[0; 7])).is_ok());
}

#[test]
fn the_first_failure_is_reported() {
    let progress = progress(3);
    assert!(progress.failure().is_none());
    progress.fail(1, "no memory");
    progress.fail(2, "rank 1 is gone");
    assert_eq!(progress.failure().unwrap().to_string(), "rank 1 (GPU 1): no memory");
}

#[test]
fn an_outcome_comes_back_to_the_bit() {
    let (progress, outcome) = (progress(2), StepOutcome { norm_sq: f64::NAN, nonfinite: true, loss: -0.0 });
    progress.publish_outcome(3, outcome);
    let read = progress.outcome(3).unwrap();
    assert_eq!((read.norm_sq.to_bits(), read.nonfinite, read.loss.to_bits()), (f64::NAN.to_bits(), true, 0x8000_0000));
    assert!(progress.outcome(4).is_none());
}
