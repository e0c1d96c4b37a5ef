//! A port against bytes that no producer writes.

use kvsluice_layout::ids::{Position, ProcessEpoch};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::refusal::Refusal;

use crate::port::{Incoming, Port};
use crate::producer::tests::{Bench, PRODUCER, upload};
use crate::shared::{Heap, Shared, SharedMut};

#[test]
fn x33_a_first_position_that_is_none_is_survived() {
    let bench = Bench::new(1);
    let shape = bench.producer.shape();
    for first in [1, 63, 0x7ff8, u64::MAX, u64::MAX - 63, u64::MAX / 2, 1 << 63] {
        let ring = Heap::new(bench.producer.map().control_bytes());
        for word in [0, 1, first.wrapping_add(1), u64::MAX] {
            (0..shape.bytes / 8).for_each(|at| ring.store(shape.at + at * 8, word));
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
