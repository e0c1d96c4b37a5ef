//! The producer dies in the middle of its rounds, and another one takes the channel over (F13, X25).

use kvsluice_cpu_worker::rounds::WorkloadOptions;
use kvsluice_cpu_worker::store::HostStore;
use kvsluice_gpu_worker::worker::Step;
use kvsluice_layout::ids::{BlockCount, DecoderLayer, GroupId, ProcessEpoch, SourceBlock};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_transport::producer::Producer;
use kvsluice_transport::shared::{Heap, Shared, SharedMut};

use crate::rig::{Rig, few, goes_red, sample};

const SUCCESSOR: ProcessEpoch = ProcessEpoch(0xCAFE);

/// Changes a byte of every frame that nothing in flight reads.
fn damage(rig: &Rig, producer: &Producer<Heap, Heap>) {
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
            let (control, regions) = (rig.memory.control.clone(), rig.memory.regions.clone());
            let leases = LeaseTable::new(&rig.memory.map);
            let producer = Producer::take_over(control.clone(), regions.clone(), leases, SUCCESSOR, survivors).unwrap();
            assert!(producer.in_flight() > 2, "seed {seed}: the journal is followed on");
            damage(&rig, &producer);
            let store = HostStore::recover(control, rig.memory.pool.clone(), rig.memory.map.clone(), regions);
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
