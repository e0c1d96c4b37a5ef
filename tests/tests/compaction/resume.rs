//! An upload that is done again: the same plan, through the same ledger (R23, R47, R48).

use kvsluice_cpu_worker::rounds::WorkloadOptions;
use kvsluice_layout::ids::BlockCount;

use crate::observer::SeenUpload;
use crate::rig::{Rig, few, goes_red, sample};

/// The uploads of one request, and the revisions (g, r) after each of its rounds.
fn play(seed: u64, abort_rate: f64) -> (Vec<SeenUpload>, Vec<(u64, u64)>, u32) {
    let options = WorkloadOptions {
        concurrency: 1,
        budget: BlockCount(6),
        abort_rate,
        ..few(seed, 3)
    };
    let mut rig = Rig::late(&sample(2, 64, 40), options);
    rig.finish();
    let revisions = rig
        .log
        .iter()
        .map(|round| (round.map_revision, round.selection_revision));
    let attempts = rig.log.iter().map(|round| round.attempts).sum();
    (rig.observer.uploads.clone(), revisions.collect(), attempts)
}

#[test]
fn r23_r48_an_upload_that_is_resumed_has_the_same_plan_and_commits_through_the_same_ledger() {
    let run = || {
        for seed in 0..3 {
            let (straight, straight_revisions, _) = play(seed, 0.0);
            let (resumed, revisions, attempts) = play(seed, 0.7);
            assert!(
                resumed.len() > straight.len() && attempts > revisions.len() as u32,
                "seed {seed}: none resumed"
            );
            // R23: but for their operation ids, all attempts at one upload are one plan, that of the undisturbed run.
            let mut plans: Vec<(&[u8], &[u64])> = Vec::new();
            for upload in &resumed {
                let plan = (upload.request.as_slice(), upload.words.as_slice());
                if plans.last() != Some(&plan) {
                    plans.push(plan);
                }
            }
            let expected: Vec<_> = straight
                .iter()
                .map(|u| (u.request.as_slice(), u.words.as_slice()))
                .collect();
            assert!(plans == expected, "seed {seed}: a resumed upload has another plan");
            // R48: every attempt is an operation of its own, and g and r are where they would be without aborts.
            let of_one = |pair: &[SeenUpload; 2]| pair[0].request == pair[1].request;
            let ids = resumed.array_windows().filter(|pair| of_one(pair));
            assert!(
                ids.into_iter().all(|[a, b]| a.operation_id < b.operation_id),
                "seed {seed}"
            );
            assert_eq!(revisions, straight_revisions, "seed {seed}");
        }
    };
    run();
    for fault in ["r23_r48_each_attempt_is_a_selection", "r59_abort_keeps_tables"] {
        assert!(goes_red(fault, run), "the planted fault {fault} is not seen");
    }
}
