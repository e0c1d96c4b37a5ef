//! A process ends at its k-th store to shared memory, and whoever comes after it plays on to the end (X14, X24, X25, X25a).
//!
//! Every byte goes through the tables as attention reads them; at the end nothing is leased, owned or in a table; and
//! after each death of the producer, once the journal has drained, all ranks hold the same.

use std::ops::Range;

use kvsluice_cpu_worker::adoption::agree;
use kvsluice_cpu_worker::rounds::{Rounds, WorkloadOptions};
use kvsluice_cpu_worker::store::HostStore;
use kvsluice_cpu_worker::trace::Trace;
use kvsluice_gpu_worker::device::adversary::Adversary;
use kvsluice_layout::export::ResidencyExport;
use kvsluice_layout::ids::{BlockCount, ProcessEpoch, Rank};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_transport::counting::until_crash;
use kvsluice_transport::producer::Producer;

use crate::rig::{Own, RankEnd, Rig, few, goes_red, sample};

const RANKS: u32 = 2;
/// Steps after which a test says that nothing comes to an end any more.
const STEPS_MAX: u32 = 200_000;

/// What happened in one play.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Played {
    /// Stores of the process that is to die: of the producer from the start, of the worker from its seat on.
    stores: u64,
    deaths: u64,
    /// Takeovers that adopted what all ranks held.
    adopted: u64,
}

fn options(seed: u64, aborts: f64) -> WorkloadOptions {
    WorkloadOptions {
        budget: BlockCount(6),
        rounds: 3,
        concurrency: 3,
        abort_rate: aborts,
        ..few(seed, 4)
    }
}

/// A sample of every store in `all`, which is told and can be had again; every one with `KVSLUICE_CRASH_EVERY=1`.
fn points(what: &str, all: Range<u64>, by_default: u64) -> impl Iterator<Item = u64> {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let every = number("KVSLUICE_CRASH_EVERY").unwrap_or(by_default).max(1);
    let from = number("KVSLUICE_CRASH_FROM").unwrap_or_else(|| fastrand::u64(..)) % every;
    println!(
        "{what}: {} of {} stores, KVSLUICE_CRASH_EVERY={every} KVSLUICE_CRASH_FROM={from}",
        (all.end - all.start).div_ceil(every),
        all.end - all.start
    );
    all.skip(from as usize).step_by(every as usize)
}

/// The producer dies before the stores in `deaths`, each counted from the last death.
fn kill_producer(seed: u64, aborts: f64, deaths: &[u64]) -> Played {
    let options = options(seed, aborts);
    let mut rig = Rig::late(&sample(RANKS, 48, 64), options);
    let mut played = Played::default();
    let mut next = deaths.iter();
    let mut arm = |rig: &Rig| next.next().into_iter().for_each(|stores| rig.memory.fuse.arm(*stores));
    arm(&rig);
    for _ in 0..STEPS_MAX {
        if until_crash(|| rig.step_rounds()).is_none() {
            loop {
                played.deaths += 1;
                arm(&rig);
                if let Some(adopted) = until_crash(|| take_over(&mut rig, options, played.deaths)) {
                    played.adopted += u64::from(adopted);
                    break;
                }
            }
        }
        for rank in 0..rig.ranks.len() {
            rig.step_rank(rank);
        }
        if rig.rounds.is_over() {
            break;
        }
    }
    played.stores = rig.memory.fuse.stores();
    rig.memory.fuse.disarm();
    rig.finish();
    assert_eq!(rig.rounds.tally().requests, 4, "seed {seed}, deaths {deaths:?}");
    played
}

/// What a producer process does first when it finds a channel: it reads the journal and lets it drain. Returns the rounds
/// that it would play, and what the ranks report.
pub(crate) fn found(
    rig: &mut Rig,
    options: WorkloadOptions,
    epoch: ProcessEpoch,
) -> (Rounds<Own, Own, Own, Trace>, Vec<ResidencyExport>) {
    rig.observer.look();
    let memory = &rig.memory;
    let (control, pool) = (memory.own(&memory.control), memory.own(&memory.pool));
    let survivors = rig
        .ranks
        .iter()
        .map(|end| (end.rank, end.segment.clone(), end.epoch, 7))
        .collect();
    let leases = LeaseTable::new(&memory.map);
    let mut producer = Producer::take_over(control.clone(), memory.regions.clone(), leases, epoch, survivors).unwrap();
    let store = HostStore::recover(control, pool, memory.map.clone(), memory.regions.clone());
    for _ in 0..STEPS_MAX {
        if producer.in_flight() == 0 {
            break;
        }
        for rank in 0..rig.ranks.len() {
            rig.step_rank(rank);
        }
        producer.poll_thorough();
    }
    assert_eq!(producer.in_flight(), 0, "the journal does not drain");
    let reports = rig.ranks.iter().map(|end| ResidencyExport {
        pool_generation: end.worker.port().generation(),
        digest: end.worker.tables().digest(),
        requests: end
            .worker
            .tables()
            .export()
            .map(|request| request.to_export())
            .collect(),
    });
    let reports = reports.collect();
    (rig.memory.rounds(producer, store, options), reports)
}

/// The whole takeover. True where the residency was adopted.
fn take_over(rig: &mut Rig, options: WorkloadOptions, life: u64) -> bool {
    let epoch = ProcessEpoch(0xCAFE + life);
    let (mut rounds, reports) = found(rig, options, epoch);
    let agreed = agree(reports, RANKS as usize);
    let open = rounds.producer().closed().is_none();
    let adopted = match agreed {
        Ok(report) => rounds.adopt(&report).unwrap().is_some(),
        Err(why) => {
            // Only an Abort may have found an operation at different points.
            assert!(options.abort_rate > 0.0, "{why}");
            false
        }
    };
    assert!(
        adopted || !open || options.abort_rate > 0.0,
        "an open channel is adopted"
    );
    rig.rounds = rounds;
    rig.observer.accept_producer(epoch);
    for end in &mut rig.ranks {
        end.worker.port_mut().accept_producer(epoch);
    }
    adopted
}

/// The worker of rank 1 dies before its store number `death`, and another takes its seat.
fn kill_worker(seed: u64, death: Option<u64>) -> Played {
    const DEAD: usize = 1;
    let mut rig = Rig::late(&sample(RANKS, 48, 64), options(seed, 0.2));
    let mut played = Played::default();
    let fuse = rig.ranks[DEAD].segment.fuse.clone();
    let joined = fuse.stores();
    death.into_iter().for_each(|stores| fuse.arm(stores));
    for _ in 0..STEPS_MAX {
        rig.step_rounds();
        for rank in 0..rig.ranks.len() {
            if until_crash(|| rig.step_rank(rank)).is_some() {
                continue;
            }
            played.deaths += 1;
            drop(rig.ranks.remove(DEAD));
            let producer = rig.rounds.producer_mut();
            producer.lose(Rank(DEAD as u32)); // X24: after the proof of its death
            let end = RankEnd::join(&rig.memory, producer, Rank(DEAD as u32), Adversary::late(seed));
            rig.ranks.insert(DEAD, end);
        }
        if rig.rounds.is_over() {
            break;
        }
    }
    played.stores = fuse.stores() - joined;
    fuse.disarm();
    rig.finish();
    assert_eq!(rig.rounds.tally().requests, 4, "seed {seed}, death {death:?}");
    played
}

#[test]
fn x25_the_producer_may_die_at_any_store_and_its_successor_plays_on() {
    let stores = kill_producer(1, 0.0, &[]).stores;
    let (mut plays, mut sum) = (0, Played::default());
    for death in points("the producer", 0..stores, 53) {
        let played = kill_producer(1, 0.0, &[death]);
        plays += 1;
        sum.adopted += played.adopted;
        sum.deaths += played.deaths;
    }
    println!("{plays} plays, {sum:?}");
    // Plays differ by a few stores: one of the last may not be reached.
    assert!(sum.deaths * 20 >= plays * 19, "{sum:?} in {plays} plays");
    assert!(sum.adopted * 2 > sum.deaths, "most takeovers adopt: {sum:?}");
}

#[test]
fn x25_a_successor_may_die_too_while_it_takes_over_or_soon_after() {
    let stores = kill_producer(2, 0.3, &[]).stores;
    let soon = 200;
    for second in points("the successor", 0..soon, 29) {
        let first = stores * (second + 1) / (soon + 20);
        let played = kill_producer(2, 0.3, &[first, second, second / 2]);
        assert_eq!(played.deaths, 3, "deaths {first}, {second}");
    }
}

#[test]
fn x24_a_worker_may_die_at_any_store_and_another_takes_its_seat() {
    let stores = kill_worker(3, None).stores;
    let (mut plays, mut deaths) = (0, 0);
    for death in points("the worker", 0..stores, 17) {
        plays += 1;
        deaths += kill_worker(3, Some(death)).deaths;
    }
    assert!(deaths * 20 >= plays * 19, "{deaths} deaths in {plays} plays");
}

#[test]
fn faults_of_a_successor_and_of_a_new_worker_are_seen() {
    for fault in ["x10_commit_early", "x25_slots_are_mistaken"] {
        let red = goes_red(fault, || {
            for death in (100..1500).step_by(97) {
                kill_producer(1, 0.0, &[death]);
            }
        });
        assert!(red, "the planted fault {fault} is not seen");
    }
    let red = goes_red("x24a_tables_survive", || {
        kill_worker(3, Some(100));
    });
    assert!(red, "the planted fault is not seen");
}
