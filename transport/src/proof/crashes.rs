//! A crash at every store: of the producer, of each takeover, and of a worker.
//!
//! One script walks through every kind of record and every state. It runs once to count the stores that a process makes,
//! and then once per store, with the process ending just before it. Whatever died is replaced, the script goes on, and
//! the account of [`World`] must hold to the end.

use std::collections::BTreeSet;

use kvsluice_layout::planted::with_planted;
use kvsluice_layout::record::{NEW_SLOT, RetainMode};
use kvsluice_layout::refusal::Refusal;

use super::world::World;
use crate::counting::Fuse;
use crate::port::Outcome;

/// Who crashes.
#[derive(Clone, Copy, Debug)]
enum Victim {
    Producer,
    Worker(u32),
}

impl Victim {
    fn fuse(self, world: &World) -> &Fuse {
        match self {
            Self::Producer => world.producer_fuse(),
            Self::Worker(rank) => world.worker_fuse(rank),
        }
    }
}

const DONE: fn() -> Outcome = || Outcome::done(64, 5, 0);

/// Fills the ring up to its last lines, so that the script's first record wraps, over bytes that its answers free. Not
/// part of what is enumerated.
fn prepare(world: &mut World) {
    for (bytes, stays) in [(3_900, false), (11_000, true), (11_000, true), (5_784, true)] {
        let ballast = world.ballast(bytes);
        world.publish(&ballast).expect("room");
        if stays {
            receive_all(world);
        } else {
            world.drain_workers();
        }
    }
}

/// Both ranks take everything that is visible.
fn receive_all(world: &mut World) {
    for rank in 0..world.ranks() {
        while world.receive(rank) {}
    }
}

fn script(world: &mut World) {
    world.drain_workers();
    world.revive();
    // A batch of an upload in place, behind the padding that wraps the ring, and a Keep, answered out of order. The
    // ballast between them is larger than the ring's reserve: it overwrites what the answers above have freed.
    let upload = world.upload(2, &[(1, 1), (2, 2), (3, 3)]);
    let (ballast, keep) = (world.ballast(4_500), world.keep());
    let _ = (world.enqueue(&upload), world.enqueue(&ballast), world.enqueue(&keep));
    world.flush();
    let gathered = world.upload(1, &[(60, 4), (61, 5), (62, 6), (63, 7), (60, 8), (61, 9)]);
    let _ = world.publish(&gathered);
    receive_all(world);
    for (rank, nth) in [(0, 1), (0, 1), (0, 1), (1, 3), (1, 2), (1, 1)] {
        world.finish(rank, nth, &DONE());
        world.poll();
    }
    // The gathered upload is over, the first is not: its destinations are used again behind it.
    world.revive();
    let again = world.upload(1, &[(5, 4), (5, 5)]);
    let _ = world.publish(&again);
    receive_all(world);
    // A successor finds the open batch unpublished, the first upload open, and two writers of block 4 in the journal.
    let lost = world.keep();
    let _ = world.enqueue(&lost);
    world.take_over();
    world.poll();
    world.drain_workers();

    // The three retentions and a write-back in one batch, one of them failing.
    world.revive();
    let table = [(0, 1), (NEW_SLOT, 2)];
    let shared = world.retain(RetainMode::SharedTable, &table);
    let layered = world.retain(RetainMode::LayerTables, &table);
    let moved = world.retain(RetainMode::ByteMove, &[(10, 11), (12, 13)]);
    let saved = world.write_back(&[(3, 20), (4, 21)]);
    for draft in [&shared, &layered, &moved, &saved] {
        let _ = world.enqueue(draft);
    }
    world.flush();
    receive_all(world);
    world.finish(1, 3, &DONE());
    world.finish(0, 0, &DONE());
    world.poll();
    world.finish(1, 0, &Outcome::failed());
    let unlike = Refusal::Table {
        row: 0,
        slot: 0,
        found: 1,
    };
    world.finish(0, 0, &Outcome::rejected(unlike));
    world.drain_workers();

    // An Abort that comes before its operation starts: answered first, then Superseded untouched.
    world.revive();
    let doomed = world.upload(1, &[(6, 14)]);
    if let Ok(position) = world.publish(&doomed) {
        let _ = world.abort(position);
        world.flush();
    }
    receive_all(world);
    for rank in 0..world.ranks() {
        world.finish(rank, 1, &DONE());
        world.poll();
        world.finish(rank, 0, &Outcome::superseded(false, 0));
        world.poll();
    }
    // An Abort of a running operation: the operation ends first, and its blocks outlast it. Its producer dies meanwhile.
    let doomed = world.upload(1, &[(7, 15)]);
    let position = world.publish(&doomed);
    receive_all(world);
    if let Ok(position) = position {
        let _ = world.abort(position);
        world.flush();
    }
    receive_all(world);
    world.finish(0, 0, &Outcome::superseded(true, 64));
    world.finish(1, 0, &Outcome::superseded(true, 64));
    world.poll();
    world.finish(0, 0, &DONE());
    world.take_over();
    world.poll();
    world.finish(1, 0, &DONE());
    world.poll();

    // A worker dies with one record answered, one open and one unread; a batch is open while another joins.
    world.revive();
    for block in [16, 17, 18] {
        let upload = world.upload(1, &[(8, block)]);
        let _ = world.publish(&upload);
    }
    for rank in 0..world.ranks() {
        world.receive(rank);
        world.receive(rank);
        world.finish(rank, 1, &DONE());
    }
    world.kill_worker(1);
    world.poll();
    world.lose(1);
    let _ = world.reset();
    world.join(1);
    let _ = world.reset();
    world.flush();
    world.drain_workers();
    // What is published and not yet read outlives its producer, and is not published again.
    let (last, keep) = (world.upload(4, &[(9, 16), (10, 17)]), world.keep());
    let _ = (world.enqueue(&last), world.enqueue(&keep));
    world.flush();
    world.take_over();
    receive_all(world);
}

/// Runs the script with a crash of `victim` before its store `crash_at`. Returns the stores it made, and the world.
fn run(victim: Victim, crash_at: Option<u64>) -> (u64, World) {
    let at = crash_at.map_or("nowhere".to_owned(), |k| format!("before store {k}"));
    let mut world = World::new(2, format!("{victim:?} crashes {at}"));
    prepare(&mut world);
    let fuse = victim.fuse(&world).clone();
    let from = fuse.stores();
    if let Some(k) = crash_at {
        fuse.arm(k);
    }
    script(&mut world);
    let stores = fuse.stores() - from;
    world.settle();
    assert!(!fuse.is_armed(), "{}: it never came to that store", world.label);
    let last = world.upload(1, &[(1, 1)]);
    let _ = world.publish(&last).expect("the channel goes on");
    world.settle();
    (stores, world)
}

/// Crashes `victim` at every store of the script. Returns their number.
fn enumerate(victim: Victim) -> u64 {
    let (stores, _) = run(victim, None);
    let mut seen = BTreeSet::new();
    for k in 0..stores {
        seen.append(&mut run(victim, Some(k)).1.seen);
    }
    let answered = seen.contains("answered, then died");
    assert!(
        answered || matches!(victim, Victim::Producer),
        "no crash behind an answer: {seen:?}"
    );
    stores
}

#[test]
fn x35_the_script_meets_every_kind_and_every_end() {
    let (_, world) = run(Victim::Producer, None);
    let wanted = [
        "padding at the wrap",
        "recovered",
        "takeover",
        "join",
        "ended Upload Done",
        "ended Upload RankLost",
        "ended Upload Superseded",
        "ended Keep Done",
        "Retain Failed",
        "Retain Rejected",
        "ended Retain Done",
        "ended WriteBack Done",
        "ended Abort Done",
        "ended Reset Done",
    ];
    for event in wanted {
        assert!(world.seen.contains(event), "{event} is missing from {:?}", world.seen);
    }
    assert_eq!(world.producer().counts().conflicting, 0);
}

#[test]
fn x25_the_producer_may_die_at_any_store() {
    let stores = enumerate(Victim::Producer);
    println!("producer: {stores} crash points");
    assert!(stores > 500, "{stores} stores: the script shrank");
}

#[test]
fn x24_a_worker_may_die_at_any_store() {
    for rank in 0..2 {
        let stores = enumerate(Victim::Worker(rank));
        println!("worker of rank {rank}: {stores} crash points");
        assert!(stores > 100, "{stores} stores: the script shrank");
    }
}

/// True where some crash, or none at all, makes the account fail.
fn goes_red(fault: &'static str, victim: Victim) -> bool {
    std::panic::catch_unwind(|| with_planted(fault, || enumerate(victim))).is_err()
}

#[test]
fn x35_the_enumeration_finds_each_planted_fault() {
    let of_the_producer = [
        "x10_commit_early",
        "x10_reclaim_late",
        "x10_stale_tail",
        "x11_first_rank_completes",
        "x14_takeover_forgets_leases",
        "x15_release_before_abort_ends",
        "x24_member_in_place",
        "x25_republish",
    ];
    for fault in of_the_producer {
        assert!(goes_red(fault, Victim::Producer), "{fault} was not found");
    }
    for fault in ["x12_commit_first", "x12_lost_terminal"] {
        assert!(goes_red(fault, Victim::Worker(0)), "{fault} was not found");
    }
}
