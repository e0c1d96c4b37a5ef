//! Requests that finish while something of theirs is in flight, and the last one that does (F11, F12).

use kvsluice_cpu_worker::rounds::WorkloadOptions;
use kvsluice_layout::ids::BlockCount;
use kvsluice_layout::record::Kind;

use crate::rig::{Rig, few, goes_red, sample};

fn options(seed: u64) -> WorkloadOptions {
    WorkloadOptions {
        budget: BlockCount(6),
        finish_rate: 0.5,
        ..few(seed, 12)
    }
}

#[test]
fn f11_f12_requests_that_finish_while_they_upload_end_after_it_and_leave_the_pools_free() {
    let run = || {
        for seed in 0..3 {
            let mut rig = Rig::late(&sample(2, 64, 40), options(seed));
            rig.finish();
            assert_eq!(rig.rounds.tally().requests, 12, "seed {seed}");
            assert!(rig.log.len() < 12 * 4, "seed {seed}: none finished early");
        }
    };
    run();
    for fault in ["r54_r55_frees_shared", "r54_ignores_transfers"] {
        assert!(goes_red(fault, run), "the planted fault {fault} is not seen");
    }
}

#[test]
fn f11_f12_the_last_request_finishes_with_an_upload_in_flight() {
    let options = WorkloadOptions {
        finish_rate: 0.0,
        concurrency: 1,
        requests: Some(1),
        ..options(4)
    };
    let mut rig = Rig::late(&sample(4, 64, 40), options);
    rig.publish_until("the second upload", |rig| rig.published(Kind::Upload) == 2);
    rig.rounds.stop();
    rig.finish();
    assert_eq!(rig.log.len(), 1, "the round that was cut short does not count");
    let uploads = rig.ranks.iter().map(|end| end.worker.counts().done);
    // Reset, two uploads, one retain, and the last record.
    assert!(
        uploads.into_iter().all(|done| done == 5),
        "the upload in flight came to its end on every rank"
    );
}
