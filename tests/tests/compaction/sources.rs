//! Source blocks while transfers read them, and sources that are not the layer's own.

use kvsluice_cpu_worker::rounds::WorkloadOptions;
use kvsluice_gpu_worker::device::adversary::Adversary;
use kvsluice_gpu_worker::worker::Step;
use kvsluice_layout::geometry::Geometry;
use kvsluice_layout::ids::{
    BlockCount, DecoderLayer, DestinationBlock, GroupId, MapRevision, OperationId, PoolGeneration, Rank, RequestEpoch,
    SelectionRevision, SourceBlock,
};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::{Operation, PlanDraft};
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::presets::preset;
use kvsluice_layout::record::{SourceKind, Terminal};
use kvsluice_layout::refusal::Refusal;
use kvsluice_transport::producer::{Completion, Producer, PublishError};
use kvsluice_transport::shared::Shared;

use crate::rig::{Memory, Own, PRODUCER, RankEnd, Rig, few, goes_red, sample};

/// The bytes of every frame that a record in flight reads.
fn leased_frames(rig: &Rig) -> Vec<(SourceBlock, Vec<u8>)> {
    let (map, leases) = (&rig.memory.map, rig.rounds.producer().leases());
    let frames = (0..map.geometry().groups[0].source_blocks).map(SourceBlock);
    let read = |frame: SourceBlock| {
        let mut all = Vec::new();
        for layer in 0..map.geometry().layers.len() as u32 {
            for plane in map.shard_planes(DecoderLayer(layer)) {
                let mut bytes = vec![0; plane.bytes as usize];
                rig.memory.pool.bytes_out(plane.host_at(frame) as usize, &mut bytes);
                all.extend(bytes);
            }
        }
        (frame, all)
    };
    frames
        .filter(|frame| leases.source_leases(GroupId(0), *frame) > 0)
        .map(read)
        .collect()
}

#[test]
fn r26_f16_a_source_is_not_filled_again_before_the_transfer_that_reads_it_has_ended() {
    let run = || {
        let options = WorkloadOptions {
            budget: BlockCount(10),
            ..few(3, 16)
        };
        let mut rig = Rig::late(&sample(2, 20, 128), options);
        rig.publish_until("uploads of several requests", |rig| rig.observer.uploads.len() > 8);
        // The events of all of it are delayed: no rank moves, and the producer goes on as far as it can.
        let before = leased_frames(&rig);
        assert!(before.len() > 4, "{} frames are leased", before.len());
        (0..500).for_each(|_| rig.step_rounds());
        let after = leased_frames(&rig);
        assert!(
            before.iter().all(|frame| after.contains(frame)),
            "bytes changed under a transfer"
        );
        rig.finish();
    };
    run();
    assert!(goes_red("r26_early_release", run), "the planted fault is not seen");
}

/// sample-hybrid, and the same with layer 1 in another group than it is.
fn honest_and_hostile() -> [Geometry; 2] {
    let honest = preset("sample-hybrid").unwrap();
    let mut hostile = honest.clone();
    hostile.layers[1].group = GroupId(2);
    [honest, hostile]
}

#[test]
fn f9_a_source_of_another_groups_owner_is_refused_by_the_producer_and_by_every_rank() {
    let [honest, hostile] = honest_and_hostile();
    let memory = Memory::new(&honest);
    let mut draft = PlanDraft::new();
    let operation = Operation {
        request_epoch: RequestEpoch(1),
        operation_id: OperationId(1),
        pool_generation: PoolGeneration(1),
        map_revision: MapRevision(1),
        selection_revision: SelectionRevision(1),
    };
    draft.upload(b"wrong-owner", operation);
    let pair = (SourceBlock(3), DestinationBlock(5));
    draft.row(DecoderLayer(1), GroupId(2), SourceKind::SourceOnly, [pair]);

    let mut producer = memory.producer();
    let mut ranks = join(&memory, &mut producer);
    reset(&mut producer, &mut ranks);
    let refused = producer.publish(&draft);
    assert!(
        matches!(refused, Err(PublishError::Refused(Refusal::Group { .. }))),
        "{refused:?}"
    );

    // A producer that checks against another geometry publishes it; no rank believes it.
    let memory = Memory::new(&honest);
    let leases = LeaseTable::new(&GeometryMap::new(&hostile).unwrap());
    let mut producer = Producer::new(memory.own(&memory.control), memory.regions.clone(), leases, PRODUCER);
    let mut ranks = join(&memory, &mut producer);
    reset(&mut producer, &mut ranks);
    producer.publish(&draft).unwrap();
    let completion = settle(&mut producer, &mut ranks);
    assert_eq!(completion.terminal, Terminal::Rejected);
    for end in &ranks {
        let counts = end.worker.counts();
        assert_eq!(
            (counts.rejected, counts.bytes_h2d, counts.fragments),
            (1, 0, 0),
            "rank {}",
            end.rank
        );
        assert_eq!(end.worker.tables().export().count(), 0);
    }
}

fn join(memory: &Memory, producer: &mut Producer<Own, Own>) -> Vec<RankEnd> {
    let ranks = (0..memory.map.geometry().ranks).map(Rank);
    ranks
        .map(|rank| RankEnd::join(memory, producer, rank, Adversary::late(rank.0.into())))
        .collect()
}

fn reset(producer: &mut Producer<Own, Own>, ranks: &mut [RankEnd]) {
    let mut draft = PlanDraft::new();
    draft.reset(PoolGeneration(1));
    producer.publish(&draft).unwrap();
    assert_eq!(settle(producer, ranks).terminal, Terminal::Done);
}

fn settle(producer: &mut Producer<Own, Own>, ranks: &mut [RankEnd]) -> Completion {
    loop {
        let mut idle = true;
        for end in ranks.iter_mut() {
            idle &= end.step_worker() == Step::Idle;
            end.stepper.step();
        }
        producer.poll_thorough();
        if let Some(completion) = producer.next_completion() {
            return completion;
        }
        assert!(!idle, "a record that nobody answers");
    }
}
