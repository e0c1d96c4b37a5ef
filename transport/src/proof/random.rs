//! Random worlds: any order of publishing, answering, dying, joining and lying (X10, X12, X15–X17, X24, X25).
//!
//! The account of [`World`] checks every step. The seed of a failing run is in its message.

use fastrand::Rng;
use kvsluice_layout::ids::{PoolGeneration, Position, Rank};
use kvsluice_layout::plan::PlanDraft;
use kvsluice_layout::planted::with_planted;
use kvsluice_layout::record::{NEW_SLOT, RetainMode};
use kvsluice_layout::refusal::Refusal;

use super::world::{BLOCKS, World};
use crate::port::Outcome;
use crate::producer::PublishError;

/// Steps of one world, and worlds of one test.
const STEPS: u32 = if cfg!(miri) { 25 } else { 6_000 };
const SEEDS: u64 = if cfg!(miri) { 1 } else { 30 };

fn outcome(random: &mut Rng) -> Outcome {
    match random.u8(0..12) {
        0 => Outcome::failed(),
        1 => Outcome::superseded(random.bool(), 3),
        2 => Outcome::rejected(Refusal::Table {
            row: 0,
            slot: 1,
            found: 2,
        }),
        _ => Outcome::done(random.u64(0..1000), 7, random.u64(0..2)),
    }
}

/// A plan of any kind. Most obey the rules; some name a block that is in use, and are refused.
fn draft(world: &mut World, random: &mut Rng) -> PlanDraft {
    let mut free = world.free_device_blocks();
    if random.u8(0..10) == 0 {
        free = (1..BLOCKS).collect();
    }
    random.shuffle(&mut free);
    free.truncate(random.usize(1..12));
    let with =
        |random: &mut Rng, from: u32, to: u32| free.iter().map(|d| (random.u32(from..to), *d)).collect::<Vec<_>>();
    match random.u8(0..12) {
        0 => world.keep(),
        1 => world.ballast(random.usize(0..6_000)),
        2 => {
            let pairs: Vec<_> = free.chunks_exact(2).map(|moved| (moved[0], moved[1])).collect();
            world.retain(RetainMode::ByteMove, &pairs)
        }
        3 => {
            let pairs: Vec<_> = free
                .iter()
                .map(|d| (if random.bool() { NEW_SLOT } else { d % 7 }, *d))
                .collect();
            let mode = if random.bool() {
                RetainMode::SharedTable
            } else {
                RetainMode::LayerTables
            };
            world.retain(mode, &pairs)
        }
        4 => {
            let mut hosts: Vec<u32> = (0..BLOCKS).collect();
            random.shuffle(&mut hosts);
            let pairs: Vec<_> = free.iter().copied().zip(hosts).collect();
            world.write_back(&pairs)
        }
        5 => {
            let pairs = with(random, BLOCKS - 8, BLOCKS);
            world.upload(1, &pairs)
        }
        _ => {
            let pairs = with(random, 0, BLOCKS - 8);
            world.upload(random.u32(1..4), &pairs)
        }
    }
}

/// What a world may meet.
#[derive(Clone, Copy)]
struct Climate {
    deaths: bool,
    lies: bool,
}

fn live(seed: u64, ranks: u32, climate: Climate) -> World {
    let mut random = Rng::with_seed(seed);
    let mut world = World::new(ranks, format!("seed {seed}"));
    let mut targets: Vec<Position> = Vec::new();
    for step in 0..STEPS {
        world.label = format!("seed {seed}, step {step}");
        let rank = random.u32(0..ranks);
        match random.u8(0..40) {
            0..10 => {
                let draft = draft(&mut world, &mut random);
                let written = if random.bool() {
                    world.enqueue(&draft)
                } else {
                    world.publish(&draft)
                };
                match written {
                    Ok(position) => targets.push(position),
                    Err(Some(error)) => world.check_refusal(&draft, &error),
                    Err(None) => {}
                }
            }
            10..14 => world.flush(),
            14..22 => {
                world.receive(rank);
            }
            22..32 => world.finish(rank, random.usize(0..8), &outcome(&mut random)),
            32..35 => world.poll(),
            35 if !targets.is_empty() => {
                let target = targets.swap_remove(random.usize(0..targets.len()));
                let _ = world.abort(target);
            }
            36 if random.u8(0..8) == 0 => {
                let reset = world.reset();
                let _ = if random.bool() {
                    world.enqueue(&reset)
                } else {
                    world.publish(&reset)
                };
            }
            37 if climate.deaths => match random.u8(0..8) {
                0 => world.take_over(),
                1 => world.kill_worker(rank),
                2 if !world.lives(rank) || random.bool() => world.lose(rank),
                3 => world.producer_fuse().arm(random.u64(0..400)),
                4 => world.worker_fuse(rank).arm(random.u64(0..60)),
                _ => world.revive(),
            },
            38 if climate.lies => world.lie(rank, &mut random),
            _ if step % 500 == 499 => {
                world.label = format!("seed {seed}, settling after step {step}");
                world.settle();
                targets.clear();
            }
            _ => {}
        }
        targets.truncate(64);
    }
    world.label = format!("seed {seed}, at its end");
    world.disarm();
    world.settle();
    world
}

fn all_seeds(from: u64, climate: Climate) -> Vec<World> {
    let seeds = from..from + SEEDS;
    seeds
        .map(|seed| live(seed, [1, 2, 4][(seed % 3) as usize], climate))
        .collect()
}

#[test]
fn x12_x14_x15_a_quiet_world_of_any_order_keeps_its_account() {
    let climate = Climate {
        deaths: false,
        lies: false,
    };
    for world in all_seeds(1_000, climate) {
        assert_eq!(
            (world.producer().counts().stale, world.producer().counts().conflicting),
            (0, 0)
        );
    }
}

#[test]
fn x24_x25_a_world_of_deaths_keeps_its_account() {
    let worlds = all_seeds(
        2_000,
        Climate {
            deaths: true,
            lies: false,
        },
    );
    let crashes: u64 = worlds.iter().map(|world| world.crashes).sum();
    println!("{crashes} processes ended");
    assert!(cfg!(miri) || crashes > 500, "{crashes} deaths: the climate is too mild");
}

#[test]
fn x16_stray_repeated_and_conflicting_answers_are_counted_and_fail_one_operation_at_most() {
    let worlds = all_seeds(
        3_000,
        Climate {
            deaths: false,
            lies: true,
        },
    );
    let counts: Vec<_> = worlds.iter().map(|world| world.producer().counts()).collect();
    assert!(cfg!(miri) || counts.iter().any(|counts| counts.stale > 0));
    assert!(cfg!(miri) || counts.iter().any(|counts| counts.conflicting > 0));
    for (world, counts) in worlds.iter().zip(counts) {
        assert_eq!(counts.conflicting, world.conflicts, "{}", world.label);
    }
}

#[test]
#[cfg_attr(miri, ignore = "runs until it finds each")]
fn x35_random_worlds_find_each_planted_fault() {
    let climate = Climate {
        deaths: true,
        lies: false,
    };
    for fault in [
        "x11_first_rank_completes",
        "x14_takeover_forgets_leases",
        "x15_release_before_abort_ends",
        "x9_skip_in_flight",
        "x12_lost_terminal",
    ] {
        let red = std::panic::catch_unwind(|| with_planted(fault, || all_seeds(2_000, climate))).is_err();
        assert!(red, "{fault} was not found");
    }
}

#[test]
#[cfg_attr(
    miri,
    ignore = "fills the ring, which takes Miri an hour; what it does the others do too"
)]
fn x17_a_full_ring_names_the_rank_and_the_pid_that_hold_it_and_lets_aborts_and_resets_pass() {
    let mut world = World::new(4, "full".into());
    let first = loop {
        let keep = world.keep();
        match world.publish(&keep) {
            Ok(_) => {
                for rank in [0, 2, 3] {
                    world.receive(rank);
                    world.finish(rank, 0, &Outcome::done(0, 0, 0));
                }
                world.poll();
            }
            Err(Some(PublishError::Full {
                needed,
                free,
                oldest: Some(oldest),
            })) => {
                assert!(free < needed, "{free} of {needed}");
                assert_eq!(oldest.rank, Rank(1));
                assert_eq!(oldest.pid, world.pid(1));
                let message = world
                    .publish(&keep)
                    .expect_err("still full")
                    .expect("no crash")
                    .to_string();
                let named = format!("held by rank 1 (pid {})", oldest.pid);
                assert!(message.contains(&named), "{message}");
                break oldest.position;
            }
            other => panic!("{other:?}"),
        }
    };
    // X10: the reserve is for these, and ends too.
    let _ = world.abort(first).expect("an Abort passes");
    let reset = world.reset();
    let _ = world.enqueue(&reset).expect("a Reset passes");
    world.flush();
    let mut resets = 0;
    let error = loop {
        let reset = world.reset();
        match world.enqueue(&reset) {
            Ok(_) => resets += 1,
            Err(error) => break error,
        }
    };
    assert!(
        matches!(error, Some(PublishError::Full { .. })) && resets > 20,
        "{error:?} after {resets}"
    );
    world.settle();
}

#[test]
fn x10_a_record_that_can_never_fit_is_refused_at_once_with_the_sizes() {
    let mut world = World::new(1, "large".into());
    let limit = world.producer().shape().max_record();
    let fits = world.ballast(limit as usize - 168);
    let _ = world.publish(&fits).expect("the largest record");
    let large = world.ballast(limit as usize - 168 + 64);
    let error = world.publish(&large).expect_err("too large");
    assert_eq!(
        error,
        Some(PublishError::TooLarge {
            bytes: limit + 64,
            limit
        })
    );
    let mut reset = PlanDraft::new();
    reset.reset(PoolGeneration(9));
    assert!(world.publish(&reset).is_ok());
    world.settle();
}
