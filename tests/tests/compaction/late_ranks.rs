//! One rank is late: nothing is committed, and what was resident stays readable on all of them (R50, R60, F14).

use kvsluice_cpu_worker::rounds::{Agreement, WorkloadOptions};
use kvsluice_gpu_worker::device::host::KernelMemory;
use kvsluice_layout::ids::{BlockCount, DecoderLayer};
use kvsluice_layout::planted::with_planted;
use kvsluice_layout::record::Kind;

use crate::rig::{Rig, few, is_red, sample};
use crate::through_tables::read_block;

/// One request at a time on two ranks, its layers with lists of their own.
fn alone(seed: u64) -> Rig {
    let options = WorkloadOptions {
        concurrency: 1,
        budget: BlockCount(6),
        agreement: Agreement::PerLayer,
        ..few(seed, 2)
    };
    Rig::late(&sample(2, 64, 64), options)
}

/// Lets rank 0 end what was published while rank 1 does nothing, and then waits in vain for a commit.
fn rank_1_is_late(rig: &mut Rig) {
    let done = rig.ranks[0].worker.counts().done;
    while rig.ranks[0].worker.counts().done == done {
        rig.step_rounds();
        rig.step_rank(0);
    }
    let (rounds, plans) = (rig.log.len(), rig.rounds.tally().plans);
    for _ in 0..1000 {
        rig.step_rounds();
        rig.step_rank(0);
    }
    assert_eq!(rig.log.len(), rounds, "a round was committed without rank 1");
    assert_eq!(
        rig.rounds.tally().plans,
        plans,
        "something followed an operation that rank 1 has not ended"
    );
}

#[test]
fn r50_r60_f14_a_late_upload_commits_nothing_and_every_rank_reads_the_old_residency() {
    let run = |fault: Option<&'static str>| {
        for seed in 0..3 {
            let mut rig = alone(seed);
            rig.publish_until("the second upload", |rig| {
                rig.log.len() == 1 && rig.published(Kind::Upload) == 2
            });
            let before: Vec<_> = (0..2).map(|rank| rig.find(rank)).collect();
            assert!(before[0].iter().all(|layer| !layer.blocks.is_empty()));
            match fault {
                Some(fault) => with_planted(fault, || rank_1_is_late(&mut rig)),
                None => rank_1_is_late(&mut rig),
            }
            for (rank, before) in before.iter().enumerate() {
                assert!(
                    rig.find(rank) == *before,
                    "seed {seed}: rank {rank} reads something else"
                );
                assert_eq!(rig.differing(rank), Some(0), "seed {seed}: rank {rank}");
            }
            rig.finish();
        }
    };
    run(None);
    assert!(
        is_red(|| run(Some("x11_first_rank_completes"))),
        "the planted fault is not seen"
    );
}

#[test]
fn r57_r60_f14_a_late_retain_frees_no_block_that_the_late_rank_still_reads() {
    let run = |fault: Option<&'static str>| {
        for seed in 0..3 {
            let mut rig = alone(seed);
            rig.publish_until("the second retain", |rig| {
                rig.log.len() == 1 && rig.published(Kind::Retain) == 2
            });
            let before: Vec<_> = (0..2).map(|rank| rig.find(rank)).collect();
            match fault {
                Some(fault) => with_planted(fault, || rank_1_is_late(&mut rig)),
                None => rank_1_is_late(&mut rig),
            }
            assert!(
                rig.find(1) == before[1],
                "seed {seed}: the late rank reads something else"
            );
            assert!(rig.find(0) != before[0], "seed {seed}: rank 0 has its new tables");
            // What rank 0's old tables named still holds its bytes: the owner has retired nothing.
            let (map, number) = (rig.memory.map.clone(), rig.ranks[0].rank);
            for (layer, old) in (0..).map(DecoderLayer).zip(before[0].clone()) {
                let mut now = Vec::new();
                for block in old.blocks {
                    let map = map.clone();
                    let read = move |memory: &KernelMemory<'_>| read_block(memory, &map, number, layer, block);
                    now.push(rig.ranks[0].compute(read));
                }
                assert!(now == old.bytes, "seed {seed}: {layer:?} lost its old bytes");
            }
            rig.finish();
        }
    };
    run(None);
    assert!(
        is_red(|| run(Some("x11_first_rank_completes"))),
        "the planted fault is not seen"
    );
}
