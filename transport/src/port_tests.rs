//! A port against bytes that no producer writes.

use kvsluice_layout::ids::{PoolGeneration, Position, ProcessEpoch};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::{Operation, PlanDraft};
use kvsluice_layout::refusal::Refusal;
use kvsluice_layout::region::RECLAIM_AT;

use crate::port::{Incoming, Outcome, Port};
use crate::producer::tests::{Bench, PRODUCER, operation, receive, upload};
use crate::ring::PlanWriter;
use crate::shared::{Heap, Shared, SharedMut};

#[test]
fn x33_a_first_position_that_is_none_is_survived() {
    let bench = Bench::new(1);
    let shape = bench.producer.shape();
    let positions = [1, 63, 0x7ff8, u64::MAX, u64::MAX - 63, u64::MAX / 2, 1 << 63];
    for first in positions.into_iter().step_by(if cfg!(miri) { 3 } else { 1 }) {
        let ring = Heap::new(bench.producer.map().control_bytes());
        for word in [0, 1, first.wrapping_add(1), u64::MAX] {
            // Miri takes its time for each word, and every position above is near a line that is stored to.
            let step = if cfg!(miri) { 511 } else { 1 };
            (0..shape.bytes / 8)
                .step_by(step)
                .for_each(|at| ring.store(shape.at + at * 8, word));
            let (rank, leases) = (bench.segments[0].clone(), LeaseTable::new(&bench.geometry));
            let mut port = Port::new(
                ring.clone(),
                rank,
                shape,
                leases,
                ProcessEpoch(1),
                PRODUCER,
                Position(first),
            );
            let _ = (port.has_next(), port.receive(), port.receive());
        }
    }
}

#[test]
fn x9_a_record_whose_producer_word_was_changed_is_rejected_and_not_waited_for() {
    let mut bench = Bench::new(1);
    let at = bench.producer.publish(&upload(1, &[(1, 1)])).expect("published");
    let word = bench.producer.shape().at + bench.producer.shape().offset(at.0) + 32;
    bench.control.store(word, bench.control.load(word) ^ 1);
    let incoming = bench.ports[0].receive().expect("framing holds");
    let checksum = |refusal| matches!(refusal, Refusal::Checksum { .. });
    assert!(
        matches!(incoming, Some(Incoming::Rejected { position, refusal, .. }) if position == at && checksum(refusal)),
        "{incoming:?}"
    );
    bench.producer.poll();
    let completion = bench.producer.next_completion().expect("an answer");
    assert_eq!(
        bench.producer.counts().conflicting,
        1,
        "it does not answer the record that was published"
    );
    assert_eq!(completion.position, at);
}

#[test]
fn x24a_behind_a_reset_that_is_read_and_not_applied_the_old_generation_is_stale_and_the_new_one_premature() {
    let mut bench = Bench::new(1);
    let keep = |generation| {
        let mut draft = PlanDraft::new();
        let pool_generation = PoolGeneration(generation);
        draft.keep(
            b"request",
            Operation {
                pool_generation,
                ..operation(generation)
            },
        );
        draft
    };
    let mut reset = PlanDraft::new();
    reset.reset(PoolGeneration(2));
    // A producer that breaks X24: the real one refuses both.
    let shape = bench.producer.shape();
    let mut ring = PlanWriter::new(bench.control.clone(), shape, RECLAIM_AT, 0, bench.producer.tail().0);
    for draft in [&reset, &keep(1), &keep(2)] {
        let bytes = draft.encoded_bytes().expect("short") as u64;
        ring.write(draft, PRODUCER, bytes).expect("encodes");
    }
    ring.commit();
    let port = &mut bench.ports[0];
    let reset = receive(port);
    for found in [1, 2] {
        let stale = Refusal::StaleGeneration { found, expected: 2 };
        let incoming = port.receive().expect("framing holds");
        assert!(
            matches!(incoming, Some(Incoming::Rejected { refusal, .. }) if refusal == stale),
            "{incoming:?}"
        );
    }
    port.set_generation(PoolGeneration(2));
    port.finish(reset, &Outcome::done(0, 0, 0));
    let draft = keep(2);
    ring.write(&draft, PRODUCER, draft.encoded_bytes().expect("short") as u64)
        .expect("encodes");
    ring.commit();
    let _applied = receive(port);
}
