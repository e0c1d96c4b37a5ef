//! The producer dies in the middle of its rounds, and another one takes the channel over (F13, X25).

use kvsluice_cpu_worker::rounds::WorkloadOptions;
use kvsluice_cpu_worker::store::HostStore;
use kvsluice_gpu_worker::device::adversary::Adversary;
use kvsluice_gpu_worker::worker::Step;
use kvsluice_layout::export::ResidencyExport;
use kvsluice_layout::ids::{BlockCount, DecoderLayer, GroupId, ProcessEpoch, Rank, SourceBlock};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_transport::producer::Producer;
use kvsluice_transport::shared::{Shared, SharedMut};

use crate::every_store::found;
use crate::rig::{Own, RankEnd, Rig, few, goes_red, sample};

const SUCCESSOR: ProcessEpoch = ProcessEpoch(0xCAFE);

/// Changes a byte of every frame that nothing in flight reads.
fn damage(rig: &Rig, producer: &Producer<Own, Own>) {
    let map = &rig.memory.map;
    for frame in (0..map.geometry().groups[0].source_blocks).map(SourceBlock) {
        if producer.leases().source_leases(GroupId(0), frame) == 0 && frame.0.is_multiple_of(3) {
            let at = map.shard_planes(DecoderLayer(2))[0].host_at(frame) as usize;
            let mut byte = [0];
            rig.memory.pool.bytes_out(at, &mut byte);
            rig.memory.pool.bytes_in(at, &byte.map(|byte| byte ^ 1));
        }
    }
}

#[test]
fn f13_x25_a_new_producer_awaits_what_is_in_flight_and_plays_on_with_right_bytes() {
    let run = || {
        for seed in 0..3 {
            let options = WorkloadOptions {
                budget: BlockCount(6),
                ..few(seed, 6)
            };
            let mut rig = Rig::late(&sample(2, 48, 64), options);
            rig.publish_until("records in flight", |rig| {
                rig.log.len() > 5 && rig.rounds.producer().in_flight() > 2
            });
            let survivors = rig
                .ranks
                .iter()
                .map(|end| (end.rank, end.segment.clone(), end.epoch, 7))
                .collect();
            let (control, regions) = (rig.memory.own(&rig.memory.control), rig.memory.regions.clone());
            let leases = LeaseTable::new(&rig.memory.map);
            let producer = Producer::take_over(control.clone(), regions.clone(), leases, SUCCESSOR, survivors).unwrap();
            assert!(producer.in_flight() > 2, "seed {seed}: the journal is followed on");
            damage(&rig, &producer);
            let store = HostStore::recover(
                control,
                rig.memory.own(&rig.memory.pool),
                rig.memory.map.clone(),
                regions,
            );
            rig.rounds = rig.memory.rounds(producer, store, options);
            rig.observer.accept_producer(SUCCESSOR);
            // What is in flight ends; then the ranks wait until they have shaken hands (X25).
            let mut waiting = [false; 2];
            while waiting != [true; 2] {
                rig.step_rounds();
                for (rank, waiting) in waiting.iter_mut().enumerate() {
                    *waiting |= rig.step_rank(rank) == Step::AwaitHandshake;
                }
            }
            assert_eq!(rig.rounds.tally().resets, 0, "seed {seed}");
            rig.ranks
                .iter_mut()
                .for_each(|end| end.worker.port_mut().accept_producer(SUCCESSOR));
            rig.finish();
            let counts = rig.rounds.store().counts();
            assert!(counts.warm > 0 && counts.damaged > 0, "seed {seed}: {counts:?}");
            assert_eq!(rig.rounds.tally().requests, 6, "seed {seed}");
        }
    };
    run();
    for fault in ["x25a_checksum_unread", "x24a_reset_keeps_device_tables"] {
        assert!(goes_red(fault, run), "the planted fault {fault} is not seen");
    }
}

#[test]
fn x33_a_report_that_no_producer_can_have_brought_about_is_not_adopted_and_harms_nothing() {
    type Change = fn(&mut ResidencyExport);
    let changes: [(&str, Change); 9] = [
        ("another generation", |report| report.pool_generation.0 += 1),
        ("a request twice", |report| {
            report.requests.extend(report.requests.last().cloned())
        }),
        ("an id of no trace", |report| {
            report.requests[0].request = b"someone-else".to_vec()
        }),
        ("an id behind the trace", |report| {
            report.requests[0].request = b"request-99999999".to_vec()
        }),
        ("an epoch to come", |report| report.requests[0].epoch.0 = u64::MAX),
        ("a revision without a next", |report| {
            report.requests[0].selection_revision.0 = u64::MAX
        }),
        ("a block outside the pool", |report| {
            report.requests[0].groups[0].owned.push(u32::MAX)
        }),
        ("a block of two requests", |report| {
            let block = report.requests[0].groups[0].owned[0];
            report.requests[1].groups[0].owned.push(block);
        }),
        ("a group that is none", |report| {
            let groups = &mut report.requests[0].groups;
            groups.extend(groups.last().cloned());
        }),
    ];
    let options = WorkloadOptions {
        budget: BlockCount(6),
        ..few(5, 6)
    };
    for (at, (what, change)) in (0..).zip(changes) {
        let mut rig = Rig::late(&sample(2, 48, 64), options);
        let held = |rig: &Rig| rig.ranks.iter().map(|end| end.worker.tables().export().count()).min();
        rig.step_until("requests with tables", |rig| rig.log.len() > 5 && held(rig) > Some(1));
        let epoch = ProcessEpoch(SUCCESSOR.0 + at);
        let (mut rounds, mut reports) = found(&mut rig, options, epoch);
        change(&mut reports[0]);
        assert_eq!(rounds.adopt(&reports[0]).unwrap(), None, "{what}");
        rig.rounds = rounds;
        rig.observer.accept_producer(epoch);
        for end in &mut rig.ranks {
            end.worker.port_mut().accept_producer(epoch);
        }
        rig.finish();
        assert_eq!(
            (rig.rounds.tally().requests, rig.rounds.tally().resets),
            (6, 1),
            "{what}"
        );
    }
}

#[test]
fn x24_a_rank_that_is_lost_while_nothing_is_in_flight_is_reset_when_it_is_back() {
    let run = || {
        let options = WorkloadOptions {
            budget: BlockCount(6),
            ..few(6, 6)
        };
        let mut rig = Rig::late(&sample(2, 48, 64), options);
        // No request has a table yet: each wants an upload next.
        rig.step_until("the first Reset", |rig| rig.rounds.tally().resets == 1);
        let (mut rounds, reports) = found(&mut rig, options, SUCCESSOR);
        // While the ranks still register, no record can be made that would be refused.
        let pin = |rig: &Rig, bytes| rig.ranks.iter().for_each(|end| end.worker.port().set_pinned(bytes));
        pin(&rig, 0);
        assert!(rounds.adopt(&reports[0]).unwrap().is_some());
        drop(rig.ranks.remove(1));
        let producer = rounds.producer_mut();
        producer.lose(Rank(1));
        let end = RankEnd::join(&rig.memory, producer, Rank(1), Adversary::late(6));
        rig.ranks.push(end);
        rig.rounds = rounds;
        rig.observer.accept_producer(SUCCESSOR);
        rig.ranks
            .iter_mut()
            .for_each(|end| end.worker.port_mut().accept_producer(SUCCESSOR));
        for _ in 0..10_000 {
            rig.step();
        }
        assert_eq!(rig.rounds.tally().resets, 1);
        pin(&rig, rig.memory.map.pool_bytes());
        rig.finish();
    };
    run();
    assert!(
        goes_red("x24_a_quiet_loss_is_missed", run),
        "the planted fault is not seen"
    );
}
