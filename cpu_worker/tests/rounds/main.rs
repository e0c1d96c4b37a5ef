//! Random rounds against the real ledger, tables and owners, with the invariants I1–I9 and the exact references checked
//! after every step: uploads, zero deltas, retentions, retries, late, repeated, old and made-up acknowledgements, aborts,
//! finishes and restarts, over 1 to 8 ranks.
//!
//! A failure names its seed; `KVSLUICE_SEED=<seed>` runs that seed alone.

mod plans;
mod ranks;
mod world;

use kvsluice_cpu_worker::invariants::Broken;
use kvsluice_layout::planted::with_planted;
use world::{Outcome, World};

fn run(seed: u64, steps: u64) -> Outcome<u64> {
    let mut world = World::new(seed);
    for step in 0..steps {
        world
            .step()
            .map_err(|error| format!("seed {seed} step {step}: {error}"))?;
    }
    world
        .wind_down()
        .map_err(|error| format!("seed {seed}, winding down: {error}"))?;
    Ok(world.commits)
}

#[test]
fn f10_f11_f12_f13_f14_random_rounds_keep_every_invariant() {
    const STEPS: u64 = 1_000_000;
    let seeds: Vec<u64> = match std::env::var("KVSLUICE_SEED").map(|seed| seed.parse()) {
        Ok(Ok(seed)) => vec![seed],
        _ => (0..20).collect(),
    };
    let mut commits = 0;
    for seed in &seeds {
        commits += run(*seed, STEPS / seeds.len() as u64).unwrap();
    }
    println!("{commits} commits in {STEPS} steps");
    assert!(
        commits > STEPS / 200,
        "only {commits} commits: the rounds do not get anywhere"
    );
}

#[test]
fn each_planted_fault_breaks_an_invariant() {
    let faults = [
        ("driver_settles_early", "I"),
        ("r60_counts_acks", ""),
        ("r46_epoch_ignored", ""),
        ("r50_r60_first_rank_commits", ""),
        ("r47_retry_uploads_again", "retry"),
        ("r49_splits_ids", ""),
        ("r46_stale_ack_moves_back", "I4"),
        ("r44_zero_delta_moves_g", ""),
        ("r42_zero_delta_not_finalised", ""),
        ("r42_zero_delta_skips_ranks", ""),
        ("r54_r55_frees_shared", ""),
        ("r54_ignores_prefix", ""),
        ("r54_ignores_transfers", ""),
        ("r59_abort_keeps_tables", "I7"),
    ];
    for (fault, expected) in faults {
        let outcome = with_planted(fault, || (0..4).try_for_each(|seed| run(seed, 4_000).map(|_| ())));
        let error = outcome.expect_err(fault).to_string();
        assert!(error.contains(expected), "{fault} was seen as: {error}");
        println!("{fault}: {}", error.chars().take(160).collect::<String>());
    }
}

#[test]
fn a_broken_invariant_says_what_it_found() {
    let broken = Broken {
        invariant: "I5",
        detail: "physical block 3".to_owned(),
    };
    assert_eq!(broken.to_string(), "I5 is broken: physical block 3");
}
