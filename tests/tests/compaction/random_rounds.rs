//! Random rounds with aborts, retries and early finishes, and after every change of a table the bytes through it.

use kvsluice_cpu_worker::rounds::{Agreement, Keeping, WorkloadOptions};
use kvsluice_layout::ids::BlockCount;
use kvsluice_layout::presets::preset;
use kvsluice_layout::record::Kind;

use crate::rig::{Rig, few, goes_red, sample};

fn hostile(seed: u64, keeping: Keeping) -> WorkloadOptions {
    WorkloadOptions {
        keeping,
        budget: BlockCount(6),
        abort_rate: 0.3,
        finish_rate: 0.1,
        retry_rate: 0.3,
        ..few(seed, 8)
    }
}

#[test]
fn f12_r57_r59_random_rounds_on_sample_put_the_right_bytes_before_attention_after_every_round() {
    for seed in 0..3 {
        for keeping in [Keeping::Auto, Keeping::ByteMove] {
            let mut rig = Rig::late(&sample(2, 48, 40), hostile(seed, keeping));
            rig.finish();
            assert!(
                rig.log.len() > 8 && rig.observer.kinds[&Kind::Abort] > 0,
                "seed {seed}: {:?}",
                rig.observer.kinds
            );
            // Every rank's table of every round was looked at, and its bytes were right.
            assert!(
                rig.looked.tables >= 2 * rig.log.len() as u64,
                "seed {seed}: {:?}",
                rig.looked
            );
        }
    }
}

#[test]
fn x8_r25_random_rounds_on_sample_hybrid_put_the_right_bytes_before_attention_after_every_round() {
    let mut rig = Rig::late(&preset("sample-hybrid").unwrap(), hostile(7, Keeping::Auto));
    rig.finish();
    assert!(rig.log.len() > 8, "{:?}", rig.looked);
}

#[test]
fn each_planted_fault_shows_in_random_rounds() {
    let play = |options: WorkloadOptions| Rig::late(&sample(2, 24, 40), options).finish();
    let per_layer = |keeping| WorkloadOptions {
        agreement: Agreement::PerLayer,
        ..hostile(1, keeping)
    };
    for (fault, keeping) in [
        ("moves_in_one_batch", Keeping::ByteMove),
        ("r59_abort_keeps_tables", Keeping::Auto),
        ("r51_prefix", Keeping::Auto),
        ("x11_first_rank_completes", Keeping::Auto),
        ("x8_skip_shard", Keeping::Auto),
    ] {
        let red = goes_red(fault, || play(per_layer(keeping)));
        assert!(red, "the planted fault {fault} is not seen");
    }
}
