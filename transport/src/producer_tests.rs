//! The producer and its ports on one heap: what is published is answered once per rank, in any order.
#![allow(clippy::expect_used, clippy::panic, reason = "a test fails by panicking")]

use kvsluice_layout::ids::{
    DecoderLayer, DestinationBlock, GroupId, OperationId, PoolGeneration, Position, ProcessEpoch, Rank, RequestEpoch,
    SourceBlock,
};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::{Operation, PlanDraft};
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::presets::{Sizing, preset};
use kvsluice_layout::record::{SourceKind, Terminal};
use kvsluice_layout::region::{MIN_RING_BYTES, RegionMap, SLOTS_AT, TERMINALS_AT};

use crate::port::{Incoming, Outcome, Port, Ticket};
use crate::producer::{Producer, PublishError};
use crate::shared::{Heap, Shared, SharedMut};

/// One channel on the heap, with `ranks` ports that have answered their first Reset.
pub(crate) struct Bench {
    pub(crate) geometry: GeometryMap,
    pub(crate) control: Heap,
    pub(crate) segments: Vec<Heap>,
    pub(crate) producer: Producer<Heap, Heap>,
    pub(crate) ports: Vec<Port<Heap, Heap>>,
}

pub(crate) const PRODUCER: ProcessEpoch = ProcessEpoch(0xA11CE);

pub(crate) fn worker_epoch(rank: u32) -> ProcessEpoch {
    ProcessEpoch(0xB0B0 + u64::from(rank))
}

impl Bench {
    pub(crate) fn new(ranks: u32) -> Self {
        let sizing = Sizing {
            source_blocks: Some(64),
            device_blocks: Some(64),
            ranks: Some(ranks),
            ..Sizing::default()
        };
        let geometry = sizing.apply(preset("sample").expect("preset")).expect("sizing");
        let geometry = GeometryMap::new(&geometry).expect("geometry");
        let map = RegionMap::new(geometry.geometry(), MIN_RING_BYTES, 0, 64).expect("region");
        let control = Heap::new(map.control_bytes());
        let mut producer = Producer::new(control.clone(), map.clone(), LeaseTable::new(&geometry), PRODUCER);
        let shape = producer.shape();
        let mut segments = Vec::new();
        let mut ports = Vec::new();
        for rank in 0..ranks {
            let segment = Heap::new(map.rank_bytes());
            let first = producer.join(Rank(rank), segment.clone(), worker_epoch(rank), 100 + rank);
            let leases = LeaseTable::new(&geometry);
            ports.push(Port::new(
                control.clone(),
                segment.clone(),
                shape,
                leases,
                worker_epoch(rank),
                PRODUCER,
                first,
            ));
            segments.push(segment);
        }
        let mut bench = Self {
            geometry,
            control,
            segments,
            producer,
            ports,
        };
        bench.reset(PoolGeneration(1));
        bench
    }

    /// A producer that takes over from this bench's, with every worker alive and shaken hands with.
    pub(crate) fn take_over(&mut self, epoch: ProcessEpoch) -> Producer<Heap, Heap> {
        let survivors = self.segments.iter().zip(0..);
        let survivors = survivors.map(|(segment, r)| (Rank(r), segment.clone(), worker_epoch(r), 100 + r));
        let (map, leases) = (self.producer.map().clone(), LeaseTable::new(&self.geometry));
        let taken = Producer::take_over(self.control.clone(), map, leases, epoch, survivors.collect());
        self.ports.iter_mut().for_each(|port| port.accept_producer(epoch));
        taken.expect("taken over")
    }

    pub(crate) fn reset(&mut self, generation: PoolGeneration) {
        let mut draft = PlanDraft::new();
        draft.reset(generation);
        self.producer.publish(&draft).expect("reset passes");
        for port in &mut self.ports {
            let ticket = receive(port);
            port.set_generation(generation);
            port.finish(ticket, &Outcome::done(0, 0, 0));
        }
        self.producer.poll();
        assert_eq!(
            self.producer.next_completion().map(|c| c.terminal),
            Some(Terminal::Done)
        );
    }
}

pub(crate) fn receive(port: &mut Port<Heap, Heap>) -> Ticket {
    match port.receive() {
        Ok(Some(Incoming::Plan(ticket))) => ticket,
        other => panic!("expected a plan, found {other:?}"),
    }
}

pub(crate) fn operation(id: u64) -> Operation {
    Operation {
        request_epoch: RequestEpoch(1),
        operation_id: OperationId(id),
        pool_generation: PoolGeneration(1),
        ..Operation::default()
    }
}

pub(crate) fn upload(id: u64, pairs: &[(u32, u32)]) -> PlanDraft {
    let mut draft = PlanDraft::new();
    let pairs = pairs.iter().map(|&(s, d)| (SourceBlock(s), DestinationBlock(d)));
    draft
        .upload(b"request", operation(id))
        .row(DecoderLayer(0), GroupId(0), SourceKind::SourceOnly, pairs);
    draft
}

#[test]
fn x12_an_operation_is_done_only_when_every_rank_is_done() {
    let mut bench = Bench::new(2);
    let position = bench.producer.publish(&upload(1, &[(3, 5)])).expect("published");
    let tickets: Vec<_> = bench.ports.iter_mut().map(receive).collect();
    for (rank, (port, ticket)) in bench.ports.iter_mut().zip(tickets).enumerate() {
        assert_eq!(bench.producer.poll(), 0, "not before rank {rank}");
        assert_eq!(bench.producer.leases().source_leases(GroupId(0), SourceBlock(3)), 1);
        port.finish(ticket, &Outcome::done(64, 10, 7));
    }
    assert_eq!(bench.producer.poll(), 1);
    let completion = bench.producer.next_completion().expect("completion");
    assert_eq!((completion.position, completion.terminal), (position, Terminal::Done));
    assert_eq!((completion.bytes_moved, completion.digest), (128, Some(7)));
    assert_eq!(bench.producer.leases().leased_blocks(), 0);
    assert_eq!(bench.producer.reclaim(), bench.producer.tail());
}

#[test]
fn x10_records_wrap_behind_padding_and_none_is_lost_for_many_laps() {
    let seed = 0x5EED;
    let mut random = fastrand::Rng::with_seed(seed);
    let mut bench = Bench::new(4);
    let mut open: Vec<Vec<Ticket>> = (0..4).map(|_| Vec::new()).collect();
    let (mut published, mut done) = (0_u64, 0_u64);
    let (plans, laps) = if cfg!(miri) { (60, 0) } else { (20_000, 50) };
    while done < plans {
        let length = random.usize(1..40);
        let mut blocks: Vec<u32> = (0..64).collect();
        random.shuffle(&mut blocks);
        let free = |b: &u32| {
            bench
                .producer
                .leases()
                .device_leases(GroupId(0), kvsluice_layout::ids::PhysicalBlock(*b))
                == 0
        };
        let pairs: Vec<_> = blocks
            .iter()
            .copied()
            .filter(free)
            .take(length)
            .map(|b| (random.u32(0..64), b))
            .collect();
        if !pairs.is_empty() && bench.producer.enqueue(&upload(published + 1, &pairs)).is_ok() {
            published += 1;
        }
        if random.bool() {
            bench.producer.flush();
        }
        for (port, open) in bench.ports.iter_mut().zip(&mut open) {
            while random.u8(0..4) != 0 {
                match port.receive().expect("whole ring") {
                    Some(Incoming::Plan(ticket)) => open.push(ticket),
                    Some(other) => panic!("seed {seed}: {other:?}"),
                    None => break,
                }
            }
            while !open.is_empty() && random.u8(0..3) != 0 {
                let ticket = open.swap_remove(random.usize(0..open.len()));
                port.finish(ticket, &Outcome::done(1, 1, 0));
            }
        }
        bench.producer.poll();
        while let Some(completion) = bench.producer.next_completion() {
            assert_eq!(completion.terminal, Terminal::Done, "seed {seed}");
            assert_eq!(completion.bytes_moved, 4, "seed {seed}: once per rank");
            done += 1;
        }
    }
    assert!(
        bench.producer.tail().0 > laps * MIN_RING_BYTES as u64,
        "many laps: {}",
        bench.producer.tail()
    );
}

#[test]
fn x25_a_new_producer_finds_in_the_journal_exactly_what_is_in_flight() {
    let mut bench = Bench::new(2);
    let first = bench.producer.publish(&upload(1, &[(3, 5)])).expect("published");
    let second = bench.producer.publish(&upload(2, &[(4, 6)])).expect("published");
    bench
        .producer
        .enqueue(&upload(3, &[(7, 7)]))
        .expect("written, never committed");
    let ticket = receive(&mut bench.ports[0]);
    bench.ports[0].finish(ticket, &Outcome::done(64, 0, 0));
    let mut producer = bench.take_over(ProcessEpoch(0xCAFE));
    assert_eq!(producer.incarnation().0, 2);
    assert_eq!(producer.in_flight(), 2, "the third was never published");
    assert_eq!(producer.leases().source_leases(GroupId(0), SourceBlock(7)), 0);
    for port in &mut bench.ports {
        while let Ok(Some(Incoming::Plan(ticket))) = port.receive() {
            port.finish(ticket, &Outcome::done(64, 0, 0));
        }
    }
    producer.poll();
    let ended: Vec<Position> = std::iter::from_fn(|| producer.next_completion())
        .map(|c| c.position)
        .collect();
    assert_eq!(ended, [first, second]);
    assert_eq!(producer.leases().leased_blocks(), 0);
    producer.publish(&upload(4, &[(7, 7)])).expect("the channel goes on");
}

#[test]
fn x15_an_abort_names_an_operation_and_never_a_padding_or_an_abort() {
    let mut bench = Bench::new(1);
    let mut abort = PlanDraft::new();
    let mut refused = |bench: &mut Bench, position| {
        abort.abort(b"request", operation(9), position);
        bench.producer.publish(&abort)
    };
    // Up to the wrap: the next record goes behind a padding.
    let pairs: Vec<_> = (1..51).map(|b| (b, b)).collect();
    let mut at = Position(0);
    while at.0 < MIN_RING_BYTES as u64 {
        at = bench.producer.publish(&upload(1, &pairs)).expect("published");
        if at.0 < MIN_RING_BYTES as u64 {
            let ticket = receive(&mut bench.ports[0]);
            bench.ports[0].finish(ticket, &Outcome::done(0, 0, 0));
            bench.producer.poll();
        }
    }
    let padding = bench.producer.reclaim();
    assert!(padding < at && bench.producer.in_flight() == 2);
    assert_eq!(
        refused(&mut bench, padding),
        Err(PublishError::NotInFlight { position: padding })
    );
    let first = refused(&mut bench, at).expect("an operation in flight");
    assert_eq!(
        refused(&mut bench, first),
        Err(PublishError::NotInFlight { position: first })
    );
}

#[test]
fn x10_a_ring_that_nobody_reads_does_not_fill_up_with_resets() {
    let mut bench = Bench::new(1);
    bench.producer.lose(Rank(0));
    let mut reset = PlanDraft::new();
    for generation in 2..if cfg!(miri) { 300 } else { 2000 } {
        reset.reset(PoolGeneration(generation));
        bench
            .producer
            .publish(&reset)
            .expect("each Reset is terminal at once and makes room");
        bench.producer.poll();
        assert_eq!(
            bench.producer.next_completion().map(|c| c.terminal),
            Some(Terminal::RankLost)
        );
    }
    assert_eq!(bench.producer.reclaim(), bench.producer.tail());
}

#[test]
fn x24_the_slots_of_a_lost_rank_are_read_once_more_whatever_its_hint_says() {
    let mut bench = Bench::new(1);
    let first = bench.producer.publish(&upload(1, &[(1, 1)])).expect("published");
    let second = bench.producer.publish(&upload(2, &[(2, 2)])).expect("published");
    let _unanswered = receive(&mut bench.ports[0]);
    let ticket = receive(&mut bench.ports[0]);
    bench.producer.poll_thorough();
    // The worker dies between its answer and its hint.
    let hint = bench.segments[0].load(TERMINALS_AT);
    bench.ports[0].finish(ticket, &Outcome::done(64, 0, 0));
    bench.segments[0].store(TERMINALS_AT, hint);
    bench.producer.lose(Rank(0));
    let ended: Vec<_> = std::iter::from_fn(|| bench.producer.next_completion()).collect();
    let ended: Vec<_> = ended.iter().map(|c| (c.position, c.terminal)).collect();
    assert_eq!(ended, [(second, Terminal::Done), (first, Terminal::RankLost)]);
}

#[test]
fn x33_absurd_counters_of_several_ranks_do_not_overflow_the_statistics() {
    let bench = Bench::new(2);
    for segment in &bench.segments {
        segment.store(TERMINALS_AT, u64::MAX);
    }
    assert_eq!(bench.producer.counts().duplicate, u64::MAX);
}

#[test]
fn x16_an_answer_given_twice_is_counted_and_changes_nothing() {
    let mut bench = Bench::new(1);
    let at = bench.producer.publish(&upload(1, &[(1, 1)])).expect("published");
    let ticket = receive(&mut bench.ports[0]);
    bench.ports[0].finish(ticket, &Outcome::done(64, 0, 0));
    bench.producer.poll();
    assert_eq!(
        bench.producer.next_completion().map(|c| c.terminal),
        Some(Terminal::Done)
    );
    let slot = SLOTS_AT + bench.producer.shape().offset(at.0);
    bench.segments[0].store(slot + 32, Terminal::Failed as u64);
    bench.segments[0].store_release(slot, at.0 + 1);
    bench.segments[0].store(TERMINALS_AT, bench.segments[0].load(TERMINALS_AT) + 1);
    assert_eq!(
        (bench.producer.poll_thorough(), bench.producer.counts().duplicate),
        (0, 1)
    );
    assert_eq!((bench.producer.counts().done, bench.producer.counts().failed), (2, 0));
}

#[test]
fn x14_field_17_a_ticket_or_a_draft_that_is_dropped_frees_nothing() {
    let mut bench = Bench::new(1);
    let draft = upload(1, &[(3, 5)]);
    let _ = bench.producer.publish(&draft).expect("published");
    drop(draft);
    // As where a worker's handler panics: its duty to answer is gone, the device may still read.
    drop(receive(&mut bench.ports[0]));
    bench.producer.poll_thorough();
    assert_eq!(bench.producer.leases().source_leases(GroupId(0), SourceBlock(3)), 1);
    assert_eq!(bench.ports[0].unanswered(), 1);
    let said = bench
        .producer
        .publish(&upload(2, &[(4, 5)]))
        .expect_err("the block is written");
    assert!(said.to_string().contains("plan refused: "), "{said}");
    // X23: only the end of the process, which is proven, ends what it may still touch.
    bench.producer.lose(Rank(0));
    assert_eq!(bench.producer.leases().source_leases(GroupId(0), SourceBlock(3)), 0);
}

#[test]
fn x12_field_24_an_answer_finds_its_record_however_fast_it_comes() {
    let mut bench = Bench::new(1);
    for id in 1..40 {
        // Two records of one batch, answered before the producer looks again: last first.
        let _ = bench.producer.enqueue(&upload(id, &[(1, 1)])).expect("enqueued");
        let _ = bench.producer.enqueue(&upload(id + 100, &[(2, 2)])).expect("enqueued");
        bench.producer.flush();
        let first = receive(&mut bench.ports[0]);
        let second = receive(&mut bench.ports[0]);
        for ticket in [second, first] {
            bench.ports[0].finish(ticket, &Outcome::done(0, 0, 0));
        }
        assert_eq!(bench.producer.poll_thorough(), 2);
        let ended = std::iter::from_fn(|| bench.producer.next_completion());
        assert!(
            ended
                .into_iter()
                .all(|completion| completion.terminal == Terminal::Done)
        );
    }
    let counts = bench.producer.counts();
    assert_eq!((counts.stale, counts.duplicate, counts.conflicting), (0, 0, 0));
}

#[test]
fn x12_field_26_a_producer_that_does_not_look_blocks_no_worker_and_loses_no_answer() {
    let mut bench = Bench::new(1);
    let mut published = 0;
    let said = loop {
        let block = published as u32 % 60;
        match bench.producer.publish(&upload(published + 1, &[(block, 1 + block)])) {
            Ok(_) => published += 1,
            Err(said) => break said.to_string(),
        }
        let ticket = receive(&mut bench.ports[0]);
        // Nobody takes these answers: there is a place for each of them all the same.
        bench.ports[0].finish(ticket, &Outcome::done(0, 0, 0));
    };
    assert!(
        published >= 60 && said.contains("plan refused: "),
        "{published}: {said}"
    );
    bench.producer.poll_thorough();
    let ended = std::iter::from_fn(|| bench.producer.next_completion()).count();
    assert_eq!(ended as u64, published);
}

#[test]
fn x12_field_27_an_answer_to_an_earlier_life_of_the_ids_is_no_answer_to_this_one() {
    let mut bench = Bench::new(1);
    let position = bench.producer.publish(&upload(1, &[(3, 5)])).expect("published");
    let mut slot = [0; 8];
    let ticket = receive(&mut bench.ports[0]);
    bench.ports[0].finish(ticket, &Outcome::done(0, 0, 0));
    let at = kvsluice_layout::region::SLOTS_AT + bench.producer.shape().offset(position.0);
    bench.segments[0].copy_out(at, &mut slot);
    bench.producer.poll();
    // The same request, operation and blocks again: another position, so another record.
    let again = bench.producer.publish(&upload(1, &[(3, 5)])).expect("published");
    let at = kvsluice_layout::region::SLOTS_AT + bench.producer.shape().offset(again.0);
    bench.segments[0].copy_in(at, &slot);
    bench.producer.poll_thorough();
    assert_eq!(
        bench.producer.leases().source_leases(GroupId(0), SourceBlock(3)),
        1,
        "not by the old answer"
    );
    // Nor by the old one under the new commit word.
    slot[0] = again.0 + 1;
    bench.segments[0].copy_in(at, &slot);
    bench.producer.poll_thorough();
    let last = std::iter::from_fn(|| bench.producer.next_completion()).last();
    assert_eq!(last.map(|completion| completion.terminal), Some(Terminal::Failed));
    assert_eq!(bench.producer.counts().conflicting, 1);
}

#[test]
fn x24_a_data_record_while_a_rank_is_missing_or_behind_is_refused_with_rank_and_pid() {
    let mut bench = Bench::new(2);
    bench.producer.lose(Rank(1));
    let said = bench
        .producer
        .publish(&upload(1, &[(3, 5)]))
        .expect_err("a rank is missing")
        .to_string();
    assert_eq!(
        said,
        "rank 1 is missing (last pid 101): only Abort and Reset pass until a worker attaches"
    );
    let segment = Heap::new(bench.producer.map().rank_bytes());
    bench.producer.join(Rank(1), segment, ProcessEpoch(77), 107);
    let said = bench
        .producer
        .publish(&upload(1, &[(3, 5)]))
        .expect_err("its device is empty")
        .to_string();
    assert_eq!(
        said,
        "rank 1 is at pool generation 0, expected 1: publish a Reset and await it"
    );
    assert_eq!(bench.producer.leases().leased_blocks(), 0, "a refusal leases nothing");
}
