//! A graph that is replayed while its table is replaced (F15), and what ends a retention: its events, never a number of
//! steps (R57, R58).

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};

use kvsluice_cpu_worker::rounds::{Keeping, WorkloadOptions};
use kvsluice_gpu_worker::device::host::{KernelMemory, KernelState};
use kvsluice_layout::ids::BlockCount;
use kvsluice_layout::record::Kind;

use crate::rig::{Rig, few, goes_red, sample};
use crate::through_tables::find_in;

/// What a replay saw.
struct Replayed {
    turns: u32,
    /// Every turn read what the first one read.
    steady: bool,
}

/// Launches a replay that looks its table up once and reads through it in every turn until it is told to end.
fn replay(rig: &Rig) -> (Arc<AtomicBool>, mpsc::Receiver<Replayed>) {
    let end = &rig.ranks[0];
    let (_, slot, _) = end.open_request();
    let (rank, map) = (end.rank, rig.memory.map.clone());
    let over = Arc::new(AtomicBool::new(false));
    let (ended, result) = mpsc::channel();
    let (mut view, mut first, mut turns, mut steady) = (None, None, 0, true);
    let told = over.clone();
    let kernel = move |memory: &KernelMemory<'_>| {
        let view = *view.get_or_insert_with(|| memory.table(slot).unwrap());
        let found = find_in(memory, view, &map, rank);
        turns += 1;
        steady &= *first.get_or_insert_with(|| found.clone()) == found;
        // Relaxed: test and device are one thread.
        if !told.load(Ordering::Relaxed) {
            return KernelState::Again;
        }
        let _ = ended.send(Replayed { turns, steady });
        KernelState::Finished
    };
    end.engine.launch(kernel).unwrap();
    (over, result)
}

fn replaced_during_replay(keeping: Keeping) {
    for seed in 0..2 {
        let options = WorkloadOptions {
            concurrency: 1,
            budget: BlockCount(6),
            keeping,
            ..few(seed, 2)
        };
        let mut rig = Rig::late(&sample(1, 64, 20), options);
        rig.publish_until("the second retain", |rig| {
            rig.log.len() == 1 && rig.published(Kind::Retain) == 2
        });
        let (over, result) = replay(&rig);
        let plans = rig.rounds.tally().plans;
        let (request, _, r) = rig.ranks[0].open_request();
        for _ in 0..3000 {
            // R58: thousands of steps are no evidence.
            rig.step_rounds();
            rig.ranks[0].step();
            assert_eq!(rig.log.len(), 1, "seed {seed}: retained while the old table is read");
        }
        assert_eq!(rig.rounds.tally().plans, plans, "seed {seed}");
        let now = rig.ranks[0].open_request();
        assert_eq!(
            (&now.0, now.2),
            (&request, r),
            "seed {seed}: the tables changed under the replay"
        );
        over.store(true, Ordering::Relaxed);
        rig.finish();
        let Replayed { turns, steady } = result.try_recv().expect("the replay ended");
        assert!(
            turns > 10 && steady,
            "seed {seed}: a replay of {turns} turns saw a table or a block change"
        );
    }
}

#[test]
fn f15_r57_r58_a_retention_waits_for_the_event_behind_a_replay_and_the_replay_sees_one_table() {
    for keeping in [Keeping::Auto, Keeping::ByteMove] {
        replaced_during_replay(keeping);
        let red = goes_red("r57_no_reader_fence", || replaced_during_replay(keeping));
        assert!(red, "{keeping:?}: the planted fault is not seen");
    }
}
