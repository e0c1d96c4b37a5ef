//! Whole workloads in one process: the real producer, store and rounds on heap memory, and ranks that are as late as they
//! may be.

use kvsluice_layout::geometry::Geometry;
use kvsluice_layout::ids::{BlockCount, ProcessEpoch, Rank};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::planted::with_planted;
use kvsluice_layout::presets::{Sizing, preset};
use kvsluice_layout::record::Kind;
use kvsluice_layout::region::{MIN_RING_BYTES, RegionMap};
use kvsluice_transport::clock::Simulated;
use kvsluice_transport::shared::Heap;

use super::*;
use crate::fake_rank::{FakeRank, RankSpec, Seen};
use crate::trace::Trace;

const PRODUCER: ProcessEpoch = ProcessEpoch(0xA11CE);

struct Bench {
    rounds: Rounds<Heap, Heap, Heap, Trace>,
    ranks: Vec<FakeRank<Heap, Heap, Heap>>,
    control: Heap,
    pool: Heap,
    map: Arc<GeometryMap>,
    joined: u64,
    seed: u64,
}

fn sample(source_blocks: u32, device_blocks: u32, gather_blocks: u32) -> Geometry {
    let sizing = Sizing {
        source_blocks: Some(source_blocks),
        device_blocks: Some(device_blocks),
        gather_blocks: Some(gather_blocks),
        ranks: Some(2),
    };
    sizing.apply(preset("sample").unwrap()).unwrap()
}

impl Bench {
    fn new(geometry: &Geometry, ring_bytes: usize, options: WorkloadOptions) -> Self {
        let map = Arc::new(GeometryMap::new(geometry).unwrap());
        let region = RegionMap::new(geometry, ring_bytes, 0, 64).unwrap();
        let control = Heap::new(region.control_bytes());
        let pool = Heap::new(map.pool_bytes() as usize);
        let producer = Producer::new(control.clone(), region.clone(), LeaseTable::new(&map), PRODUCER);
        let store = HostStore::new(control.clone(), pool.clone(), map.clone(), region);
        let clock = Arc::new(Simulated::default());
        let rounds = Rounds::new(producer, store, map.clone(), Trace::sample(), options, clock).unwrap();
        let seed = options.seed;
        let mut bench = Self {
            rounds,
            ranks: Vec::new(),
            control,
            pool,
            map,
            joined: 0,
            seed,
        };
        for rank in 0..geometry.ranks {
            let joined = bench.join(Rank(rank));
            bench.ranks.push(joined);
        }
        bench
    }

    fn join(&mut self, rank: Rank) -> FakeRank<Heap, Heap, Heap> {
        self.joined += 1;
        let epoch = ProcessEpoch(0xB0B0 + self.joined);
        let producer = self.rounds.producer_mut();
        let (segment, shape) = (Heap::new(producer.map().rank_bytes()), producer.shape());
        let first = producer.join(rank, segment.clone(), epoch, 100 + self.joined as u32);
        let seed = self.seed << 8 | self.joined;
        let spec = RankSpec {
            rank,
            epoch,
            producer: PRODUCER,
            first,
            shape,
            seed,
        };
        FakeRank::new(spec, self.control.clone(), segment, self.pool.clone(), self.map.clone())
    }

    fn step(&mut self) -> bool {
        self.rounds.step().unwrap();
        self.ranks.iter_mut().for_each(FakeRank::step);
        !self.rounds.is_over()
    }

    /// Plays to the end, and looks at what must be so for every workload.
    fn play(mut self) -> (Seen, Tally) {
        let seed = self.seed;
        let mut steps = 0;
        while self.step() {
            steps += 1;
            assert!(
                steps < 200_000,
                "seed {seed}: no end, {} requests open",
                self.rounds.open_requests()
            );
        }
        assert_eq!(self.rounds.leaked_blocks(), 0, "seed {seed}");
        let mut all = Seen::default();
        for rank in &self.ranks {
            assert_eq!(rank.requests(), 0, "seed {seed}: tables are left");
            all.verified += rank.seen.verified;
            all.mismatched += rank.seen.mismatched;
            all.overwritten += rank.seen.overwritten;
            all.contradicting += rank.seen.contradicting;
            all.kinds = std::array::from_fn(|at| all.kinds[at] + rank.seen.kinds[at]);
            all.modes = std::array::from_fn(|at| all.modes[at] + rank.seen.modes[at]);
        }
        assert_eq!(all.contradicting, 0, "seed {seed}");
        (all, self.rounds.tally().clone())
    }
}

fn few(requests: u64) -> WorkloadOptions {
    WorkloadOptions {
        requests: Some(requests),
        ..WorkloadOptions::default()
    }
}

const RING: usize = 1 << 18;

#[test]
fn r43_r57_f12_rounds_of_many_requests_bring_the_right_bytes_and_leave_nothing() {
    for tables in [Tables::Common, Tables::PerLayer] {
        for keeping in [Keeping::Auto, Keeping::ByteMove] {
            for sources in [Sources::SourceOnly, Sources::Copy] {
                let options = WorkloadOptions {
                    tables,
                    keeping,
                    sources,
                    ..few(30)
                };
                let (seen, tally) = Bench::new(&sample(96, 128, 48), RING, options).play();
                let what = format!("{options:?}");
                assert_eq!(
                    (seen.mismatched, seen.overwritten, tally.requests),
                    (0, 0, 30),
                    "{what}"
                );
                assert!(seen.verified > 1 << 20, "{what}: {seen:?}");
                assert_eq!(tally.rounds, 30 * 4, "{what}");
                let costs = tally.costs;
                // R1, R2: what the CPU gathers and what the devices move are told apart, and neither follows from H2D.
                let copied = sources == Sources::Copy;
                assert_eq!(
                    (costs.cpu_gather_bytes > 0, costs.cpu_destination_bytes > 0),
                    (copied, copied),
                    "{what}"
                );
                let moved = keeping == Keeping::ByteMove;
                assert_eq!(
                    (costs.gpu_compaction_bytes > 0, seen.modes[3] > 0),
                    (moved, moved),
                    "{what}"
                );
                assert!(
                    costs.h2d_bytes > 0 && costs.metadata_bytes > 0 && costs.blocks_released > 0,
                    "{what}"
                );
                assert_eq!(costs.gpu_scatter_bytes, 0);
                assert!(seen.modes[1] > 0 && (moved || seen.modes[2] > 0), "{what}: {seen:?}");
            }
        }
    }
}

#[test]
fn r1_r2_r66_source_only_gathers_nothing_and_moves_much_and_blocks_are_released_whether_bytes_move_or_not() {
    let costs = |keeping| {
        let options = WorkloadOptions { keeping, ..few(30) };
        assert_eq!(options.sources, Sources::SourceOnly);
        let (_, tally) = Bench::new(&sample(96, 128, 0), RING, options).play();
        let costs = tally.costs;
        let gathered = [costs.cpu_gather_bytes, costs.cpu_destination_bytes];
        let others = [costs.h2d_bytes, costs.metadata_bytes, costs.blocks_released];
        (gathered, costs.gpu_compaction_bytes > 0, others.map(|cost| cost > 0))
    };
    let both = || [Keeping::ByteMove, Keeping::Auto].map(costs);
    let apart = [true, false].map(|moved| ([0, 0], moved, [true; 3]));
    assert_eq!(both(), apart);
    for fault in [
        "r1_source_only_moves_nothing",
        "r2_h2d_is_what_was_gathered",
        "r66_released_where_bytes_moved",
    ] {
        assert_ne!(
            with_planted(fault, both),
            apart,
            "the planted fault {fault} is not seen"
        );
    }
}

#[test]
fn x8_r25_field_32_groups_of_every_kind_go_through_with_aliases_and_windows() {
    let geometry = preset("sample-hybrid").unwrap();
    for keeping in [Keeping::Auto, Keeping::ByteMove] {
        let options = WorkloadOptions { keeping, ..few(24) };
        let (seen, tally) = Bench::new(&geometry, RING, options).play();
        assert_eq!((seen.mismatched, seen.overwritten, tally.requests), (0, 0, 24));
        assert!(seen.verified > 1 << 20, "{seen:?}");
    }
}

#[test]
fn x15_r47_r59_f11_aborts_retries_and_early_finishes_leave_nothing_and_change_no_byte() {
    for seed in 0..6 {
        let options = WorkloadOptions {
            seed,
            abort_rate: 0.4,
            finish_rate: 0.1,
            retry_rate: 0.3,
            ..few(40)
        };
        let (seen, tally) = Bench::new(&sample(96, 128, 0), RING, options).play();
        assert_eq!(
            (seen.mismatched, seen.overwritten, tally.requests),
            (0, 0, 40),
            "seed {seed}"
        );
        assert!(
            seen.kinds[0] > 0 && tally.retries_reused > 0 && tally.rounds < 160,
            "seed {seed}: {seen:?}"
        );
    }
}

#[test]
fn x14_an_early_release_shows_as_wrong_bytes_at_the_destination() {
    let run = || Bench::new(&sample(40, 128, 0), RING, few(40)).play().0.mismatched;
    assert_eq!(run(), 0);
    assert_ne!(
        with_planted("r26_early_release", run),
        0,
        "the planted fault is not seen"
    );
}

#[test]
fn r57_blocks_that_a_full_plan_replaces_are_not_reused_before_the_retain() {
    let run = || {
        // A budget close to the sequences' length: the tails are short, and candidates run out (R32).
        let agreement = Agreement::PerLayer;
        let options = WorkloadOptions {
            budget: BlockCount(10),
            drift: 1.0,
            rounds: 6,
            agreement,
            ..few(60)
        };
        Bench::new(&sample(96, 64, 0), RING, options).play().0.overwritten
    };
    assert_eq!(run(), 0);
    assert_ne!(
        with_planted("r57_replaced_blocks_freed_early", run),
        0,
        "the planted fault is not seen"
    );
}

#[test]
fn x17_a_small_ring_and_small_device_pools_slow_a_workload_down_and_no_more() {
    let small = WorkloadOptions {
        concurrency: 64,
        agreement: Agreement::PerLayer,
        ..few(60)
    };
    let (seen, tally) = Bench::new(&sample(64, 48, 0), MIN_RING_BYTES, small).play();
    assert_eq!((seen.mismatched, seen.overwritten, tally.requests), (0, 0, 60));
    assert!(tally.preempted > 0, "{tally:?}");
}

#[test]
fn x24_a_lost_rank_stops_data_and_a_new_one_starts_every_request_again() {
    let mut bench = Bench::new(&sample(96, 128, 0), RING, few(40));
    for _ in 0..60 {
        bench.step();
    }
    bench.rounds.producer_mut().lose(Rank(1));
    for _ in 0..50 {
        bench.rounds.step().unwrap();
        bench.ranks[0].step();
    }
    let before = bench.rounds.tally().plans;
    bench.rounds.step().unwrap();
    assert_eq!(
        bench.rounds.tally().plans,
        before,
        "nothing flows while a rank is missing"
    );
    assert_eq!(bench.rounds.producer().in_flight(), 0);
    bench.ranks[1] = bench.join(Rank(1));
    let (seen, tally) = bench.play();
    assert_eq!(
        (seen.mismatched, seen.overwritten, tally.requests, tally.resets),
        (0, 0, 40, 2)
    );
    assert!(tally.restarted > 0);
}

#[test]
fn r59_uploads_that_fail_are_tried_again_and_a_request_that_fails_too_often_ends() {
    let mut bench = Bench::new(
        &sample(96, 128, 0),
        RING,
        WorkloadOptions {
            concurrency: 1,
            ..few(10)
        },
    );
    bench.ranks[1].fail_uploads = 5;
    let (seen, tally) = bench.play();
    assert_eq!((seen.mismatched, tally.requests, tally.requests_failed), (0, 10, 1));
    assert!(seen.kinds[Kind::Upload as usize] > 0);
}

#[test]
fn a_workload_that_is_stopped_ends_with_the_next_step_of_each_request_and_leaves_nothing() {
    let mut bench = Bench::new(&sample(96, 128, 0), RING, few(400));
    for _ in 0..40 {
        bench.step();
    }
    bench.rounds.stop();
    let (seen, tally) = bench.play();
    assert_eq!(seen.mismatched, 0);
    assert!((1..400).contains(&tally.requests), "{}", tally.requests);
}

#[test]
fn r2_the_rounds_log_has_one_line_for_every_round_and_its_costs_add_up() {
    let mut bench = Bench::new(&sample(96, 128, 0), RING, few(20));
    bench.rounds.keep_log();
    let mut log = Vec::new();
    while bench.step() {
        log.extend(bench.rounds.take_log());
    }
    log.extend(bench.rounds.take_log());
    assert_eq!(log.len(), 80);
    let mut sum = Costs::default();
    log.iter().for_each(|round| sum.add(&round.costs));
    assert_eq!(sum.movement(), bench.rounds.tally().costs.movement());
    for upload in [UploadKind::Zero, UploadKind::Delta] {
        assert!(log.iter().any(|round| round.upload == upload), "{upload:?}");
    }
    let line = serde_json::to_string(&log[0]).unwrap();
    assert_eq!(serde_json::from_str::<RoundRecord>(&line).unwrap(), log[0]);
}

#[test]
fn r21_r22_r36_options_that_the_pools_cannot_carry_are_refused_with_the_remedy() {
    let refused = |geometry: &Geometry, options: WorkloadOptions| options.check(geometry).unwrap_err().to_string();
    let copy = WorkloadOptions {
        sources: Sources::Copy,
        ..WorkloadOptions::default()
    };
    let message = refused(&sample(96, 128, 2), copy);
    assert!(
        message.contains("gather region has 2 blocks, 3 are needed: raise --gather-blocks"),
        "{message}"
    );
    let message = refused(&sample(96, 3, 0), WorkloadOptions::default());
    assert!(
        message.contains("needs 3 device blocks, there are 2: raise --device-blocks"),
        "{message}"
    );
    let message = refused(
        &sample(96, 128, 0),
        WorkloadOptions {
            abort_rate: 1.0,
            ..copy
        },
    );
    assert!(message.contains("abort-rate: found 1, expected 0 to 0.9"), "{message}");
}
