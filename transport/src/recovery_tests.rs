//! What a takeover finds, and what it must not do with it.

use kvsluice_layout::ids::{GroupId, PhysicalBlock, PoolGeneration, ProcessEpoch, Rank};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::PlanDraft;
use kvsluice_layout::refusal::Refusal;

use crate::port::{Incoming, Outcome, Port};
use crate::producer::PublishError;
use crate::producer::tests::{Bench, receive, upload};
use crate::shared::Heap;

const SUCCESSOR: ProcessEpoch = ProcessEpoch(0xCAFE);

#[test]
fn x14_a_takeover_keeps_the_leases_of_a_plan_whose_block_an_ended_plan_used_before() {
    let mut bench = Bench::new(1);
    // The first stays open, so the journal still holds the second when the third takes over its block.
    bench.producer.publish(&upload(1, &[(1, 1)])).expect("published");
    bench.producer.publish(&upload(2, &[(2, 5)])).expect("published");
    let _first = receive(&mut bench.ports[0]);
    let second = receive(&mut bench.ports[0]);
    bench.ports[0].finish(second, &Outcome::done(64, 0, 0));
    bench.producer.poll_thorough();
    bench
        .producer
        .publish(&upload(3, &[(3, 5)]))
        .expect("block 5 is free again");
    let mut producer = bench.take_over(SUCCESSOR);
    let block = PhysicalBlock(5);
    assert_eq!(
        producer.leases().device_leases(GroupId(0), block),
        1,
        "the third still writes it"
    );
    let refused = producer.publish(&upload(4, &[(4, 5)]));
    assert_eq!(
        refused,
        Err(PublishError::Refused(Refusal::DestinationInFlight { row: 0, id: 5 }))
    );
    let third = receive(&mut bench.ports[0]);
    bench.ports[0].finish(third, &Outcome::done(64, 0, 0));
    producer.poll_thorough();
    assert_eq!(producer.leases().device_leases(GroupId(0), block), 0);
}

#[test]
fn x16_answers_to_an_earlier_producer_are_no_duplicates_for_its_successor() {
    let mut bench = Bench::new(1);
    bench.producer.publish(&upload(1, &[(1, 1)])).expect("published");
    let ticket = receive(&mut bench.ports[0]);
    bench.ports[0].finish(ticket, &Outcome::done(64, 0, 0));
    let mut producer = bench.take_over(SUCCESSOR);
    assert_eq!((producer.in_flight(), producer.counts().duplicate), (0, 0));
    producer.publish(&upload(2, &[(2, 5)])).expect("published");
    let ticket = receive(&mut bench.ports[0]);
    bench.ports[0].finish(ticket, &Outcome::done(64, 0, 0));
    producer.poll_thorough();
    assert_eq!((producer.in_flight(), producer.counts().duplicate), (0, 0));
}

#[test]
fn x10_a_worker_that_joins_beside_an_open_batch_starts_at_a_word_that_is_no_record() {
    let mut bench = Bench::new(2);
    bench.producer.lose(Rank(1));
    let mut reset = PlanDraft::new();
    reset.reset(PoolGeneration(2));
    bench.producer.enqueue(&reset).expect("written, not committed");
    let segment = Heap::new(bench.producer.map().rank_bytes());
    let first = bench.producer.join(Rank(1), segment.clone(), ProcessEpoch(0xB2), 7);
    let (shape, leases) = (bench.producer.shape(), LeaseTable::new(&bench.geometry));
    let mut port = Port::new(
        bench.control.clone(),
        segment,
        shape,
        leases,
        ProcessEpoch(0xB2),
        SUCCESSOR,
        first,
    );
    // The producer dies here. Its successor writes where the worker reads, or the worker would never be served.
    let mut producer = bench.take_over(SUCCESSOR);
    assert_eq!(producer.tail(), first);
    assert!(matches!(port.receive(), Ok(None)));
    producer.publish(&reset).expect("a Reset passes");
    assert!(matches!(port.receive(), Ok(Some(Incoming::Plan(_)))));
}

#[test]
fn x10_reclaim_stays_below_a_batch_that_is_not_committed() {
    let mut bench = Bench::new(1);
    let done = bench.producer.tail();
    bench.producer.enqueue(&upload(1, &[(1, 1)])).expect("written");
    bench.producer.lose(Rank(0));
    let mut reset = PlanDraft::new();
    reset.reset(PoolGeneration(2));
    assert_eq!(bench.producer.reclaim(), done);
    bench
        .producer
        .enqueue(&reset)
        .expect("written behind it, with its commit word");
    let producer = bench.take_over(SUCCESSOR);
    assert_eq!(
        (producer.tail(), producer.in_flight()),
        (done, 0),
        "nothing was published"
    );
}
