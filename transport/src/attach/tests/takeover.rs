//! A new producer calls: what survives, and whoever does not answer, or lies (X25).

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::clock::Monotonic;
use crate::link::Link;
use crate::segment::reopen_writable;
use crate::shared::{Shared, SharedMut};
use crate::test_process::{Second, listen, part, say};

/// A worker as far as takeover goes.
struct Worker {
    survivor: Survivor,
    state: Held,
    _lock: RoleLock,
}

struct Held {
    surviving: Surviving,
    control: OwnedFd,
    pool: OwnedFd,
    rank: OwnedFd,
    refuse: Option<Mismatch>,
    /// It waits to attach.
    nothing: bool,
}

impl SurvivorState for Held {
    fn holdings(&mut self, call: &Call) -> Result<Option<Holdings<'_>>, Mismatch> {
        assert_ne!(call.producer_epoch, self.surviving.producer_epoch);
        match self.refuse.clone() {
            Some(mismatch) => Err(mismatch),
            None if self.nothing => Ok(None),
            None => Ok(Some(Holdings {
                surviving: self.surviving.clone(),
                control: self.control.as_fd(),
                pool: self.pool.as_fd(),
                rank: self.rank.as_fd(),
            })),
        }
    }

    fn residency(&mut self) -> Vec<u8> {
        vec![7; 100_000]
    }
}

impl Worker {
    fn surviving(dir: &ChannelDir, rank: u32, incarnation: u64, control: OwnedFd, pool: OwnedFd, own: OwnedFd) -> Self {
        let epoch = 20 + u64::from(rank);
        let lock = lock(dir, Role::Rank(Rank(rank)), epoch);
        Self {
            survivor: Survivor::new(Listener::bind(&lock).unwrap(), HASH, Limits::default()).unwrap(),
            state: Held {
                surviving: Surviving {
                    rank: Rank(rank),
                    worker_epoch: ProcessEpoch(epoch),
                    pid: std::process::id(),
                    channel: ChannelId(0xc4),
                    incarnation: Incarnation(incarnation),
                    producer_epoch: ProcessEpoch(11),
                    mode: Mode::Memfd,
                },
                control,
                pool,
                rank: own,
                refuse: None,
                nothing: false,
            },
            _lock: lock,
        }
    }

    fn simple(dir: &ChannelDir, rank: u32, incarnation: u64) -> Self {
        let [control, pool] = [SegmentKind::Control, SegmentKind::Pool].map(|kind| make(kind, 11).descriptor);
        let own = make(SegmentKind::Rank(Rank(rank)), 11).descriptor;
        Self::surviving(dir, rank, incarnation, control, pool, own)
    }

    fn poll(&mut self) -> Vec<Verdict> {
        self.survivor.poll(0, &mut self.state).unwrap()
    }
}

fn call(epoch: u64) -> Call {
    Call {
        protocol: PROTOCOL,
        layout_hash: HASH,
        producer_epoch: ProcessEpoch(epoch),
        pid: std::process::id(),
    }
}

fn take_over(lock: &RoleLock, call: Call, workers: &mut [Worker]) -> Reunion {
    let mut takeover = Takeover::start(lock, call, 0, PATIENCE_NS).unwrap();
    while !takeover.poll(0) {
        for worker in &mut *workers {
            assert!(worker.poll().is_empty());
        }
    }
    takeover.finish()
}

#[test]
fn x25_a_new_producer_takes_over_what_a_worker_kept_through_the_death_of_the_old_one() {
    let run = |folder: &str| {
        // The old producer, in a process of its own: attaches one worker, then is killed.
        let dir = channel(folder.as_ref(), &Peers::default());
        let mut producer = Producer::start(&dir, 11, Limits::default());
        producer.admission.pool.memory.store(1024, 42);
        say("open");
        while producer.poll(0).is_empty() {
            std::thread::yield_now();
        }
        say("attached");
        listen();
    };
    if let Some(folder) = part() {
        return run(&folder);
    }
    let temp = tempfile::tempdir().unwrap();
    let dir = channel(temp.path(), &Peers::default());
    let mut old = Second::start(temp.path().to_str().unwrap());
    assert_eq!(old.hear(), "open");
    let worker_lock = lock(&dir, Role::Rank(Rank(0)), 20);
    let joining = Joining::start(&worker_lock, hello(0, 20), 0, u64::MAX).unwrap();
    let offer = joining.wait(&Monotonic::default()).unwrap();
    assert_eq!(offer.producer.holder().pid, Some(old.pid()));
    let segments = offer.open().unwrap();
    let accepted = offer.accept().unwrap();
    assert_eq!(old.hear(), "attached");
    assert!(!accepted.producer.is_dead());
    old.kill();
    assert!(accepted.producer.is_dead());

    drop(worker_lock);
    let Accepted {
        control, pool, rank, ..
    } = accepted;
    let mut workers = [Worker::surviving(&dir, 0, 3, control, pool, rank)];
    let producer = lock(&dir, Role::Producer, 12);
    let reunion = take_over(&producer, call(12), &mut workers);
    assert!(reunion.unusable.is_empty() && reunion.silent.is_empty(), "{reunion:?}");
    let (channel, incarnation, latest, older) = Reunion::latest(reunion.survived).unwrap();
    assert_eq!(
        (channel, incarnation, older.len()),
        (ChannelId(0xc4), Incarnation(3), 0)
    );
    latest[0].ask_report().unwrap();
    assert!(workers[0].poll().is_empty());
    assert_eq!(latest[0].reported().unwrap(), Some(vec![7; 100_000]));
    assert_eq!(latest[0].reported().unwrap(), None, "a report comes once");

    // The pool is warm, and the new producer writes it.
    let pool = reopen_writable(&latest[0].pool, SegmentKind::Pool, Mode::Memfd).unwrap();
    let pool = crate::segment::MappingMut::writable(&pool, 4096).unwrap();
    assert_eq!(pool.load(1024), 42);
    pool.store(1024, 43);
    assert_eq!(segments.pool.load(1024), 43);
    latest[0].adopt(Incarnation(4), ProcessEpoch(12)).unwrap();
    let verdicts = workers[0].poll();
    let [
        Verdict::Adopted {
            incarnation: Incarnation(4),
            producer_epoch: ProcessEpoch(12),
            producer,
            ..
        },
    ] = &verdicts[..]
    else {
        panic!("{verdicts:?}")
    };
    assert!(!producer.is_dead());
}

#[test]
fn x25_without_a_live_worker_the_start_is_cold_at_once() {
    let temp = tempfile::tempdir().unwrap();
    let dir = channel(temp.path(), &Peers::default());
    let producer = lock(&dir, Role::Producer, 12);
    // What a killed worker leaves: its lock file and its socket.
    std::fs::write(dir.path_of("rank-1.lock"), "20 99\n").unwrap();
    std::fs::set_permissions(dir.path_of("rank-1.lock"), PermissionsExt::from_mode(0o600)).unwrap();
    drop(std::os::unix::net::UnixListener::bind(dir.path_of("rank-1.sock")).unwrap());
    let mut takeover = Takeover::start(&producer, call(12), 0, PATIENCE_NS).unwrap();
    assert!(takeover.poll(0), "nobody is waited for");
    let reunion = takeover.finish();
    assert!(reunion.silent.is_empty() && reunion.unusable.is_empty());
    assert!(Reunion::latest(reunion.survived).is_none());
}

#[test]
fn x25_a_worker_that_waits_to_attach_is_neither_taken_over_nor_complained_about() {
    let temp = tempfile::tempdir().unwrap();
    let dir = channel(temp.path(), &Peers::default());
    let mut workers = [Worker::simple(&dir, 0, 3)];
    workers[0].state.nothing = true;
    let producer = lock(&dir, Role::Producer, 12);
    let reunion = take_over(&producer, call(12), &mut workers);
    assert!(reunion.unusable.is_empty() && reunion.silent.is_empty(), "{reunion:?}");
    assert!(reunion.survived.is_empty());
}

#[test]
fn x25_workers_of_an_older_incarnation_drain_and_attach_anew() {
    let temp = tempfile::tempdir().unwrap();
    let dir = channel(temp.path(), &Peers::default());
    let mut workers = [
        Worker::simple(&dir, 0, 3),
        Worker::simple(&dir, 1, 2),
        Worker::simple(&dir, 3, 3),
    ];
    let producer = lock(&dir, Role::Producer, 12);
    let reunion = take_over(&producer, call(12), &mut workers);
    let (_, incarnation, latest, older) = Reunion::latest(reunion.survived).unwrap();
    assert_eq!(incarnation, Incarnation(3));
    assert_eq!(
        latest.iter().map(|one| one.surviving.rank.get()).collect::<Vec<_>>(),
        [0, 3]
    );
    older[0].drain("incarnation 2 is not the latest").unwrap();
    let verdicts = workers[1].poll();
    let [Verdict::Drain { reason }] = &verdicts[..] else {
        panic!("{verdicts:?}")
    };
    assert_eq!(reason, "incarnation 2 is not the latest");
    // Only the caller may adopt, under the epoch it called with.
    latest[0].adopt(Incarnation(4), ProcessEpoch(13)).unwrap();
    assert!(workers[0].poll().is_empty());
}

#[test]
fn x25_a_worker_that_lives_but_does_not_answer_is_named_and_not_waited_for_for_ever() {
    let temp = tempfile::tempdir().unwrap();
    let dir = channel(temp.path(), &Peers::default());
    let _hung = Worker::simple(&dir, 1, 3);
    let producer = lock(&dir, Role::Producer, 12);
    let mut takeover = Takeover::start(&producer, call(12), 0, PATIENCE_NS).unwrap();
    assert!(!takeover.poll(0));
    assert_eq!(takeover.ready().count(), 1);
    assert!(takeover.poll(PATIENCE_NS));
    let reunion = takeover.finish();
    let [(Rank(1), holder)] = reunion.silent[..] else {
        panic!("{reunion:?}")
    };
    assert_eq!(holder.pid, Some(std::process::id()));
}

#[test]
fn x25_only_the_holder_of_the_producers_lock_can_take_a_worker_over() {
    let temp = tempfile::tempdir().unwrap();
    let dir = channel(temp.path(), &Peers::default());
    let mut worker = Worker::simple(&dir, 0, 3);
    let ask = |worker: &mut Worker, call: Call| {
        let link = Link::connect(&dir, Role::Rank(Rank(0))).unwrap();
        link.send(&ProducerSays::Takeover(call), &[]).unwrap();
        assert!(worker.poll().is_empty());
        let received = link.try_receive().unwrap().unwrap();
        assert!(received.descriptors.is_empty());
        let WorkerSays::Refused(mismatch) = received.read().unwrap() else {
            panic!("handed over")
        };
        mismatch.to_string()
    };
    let said = ask(&mut worker, call(12));
    assert!(said.contains("lock of producer is not there"), "{said}");
    let _producer = lock(&dir, Role::Producer, 12);
    let said = ask(&mut worker, call(13));
    assert!(said.contains("lock of producer is free, or of another epoch"), "{said}");
    let said = ask(
        &mut worker,
        Call {
            layout_hash: 1,
            ..call(12)
        },
    );
    assert!(
        said.contains("layout hash is 0000000000000001, expected 0000000000001a40"),
        "{said}"
    );
    let said = ask(
        &mut worker,
        Call {
            protocol: Protocol { major: 9, minor: 0 },
            ..call(12)
        },
    );
    assert!(said.contains("protocol version is 9.0, expected 1.0"), "{said}");
    worker.state.refuse = Some(Mismatch::occupied("producer", "pid 1", Some(99)));
    let said = ask(&mut worker, call(12));
    assert!(
        said.contains("producer is pid 1, expected pid 99; stop that process first"),
        "{said}"
    );
}

#[test]
fn x33_a_survivor_that_lies_is_unusable_and_nothing_worse() {
    let temp = tempfile::tempdir().unwrap();
    let dir = channel(temp.path(), &Peers::default());
    let mut workers = [
        Worker::simple(&dir, 0, 3),
        Worker::simple(&dir, 1, 3),
        Worker::simple(&dir, 2, 3),
    ];
    workers[0].state.surviving.rank = Rank(1);
    workers[1].state.surviving.worker_epoch = ProcessEpoch(5);
    workers[2].state.refuse = Some(Mismatch::new("x", "a\nb", "c", "d"));
    let producer = lock(&dir, Role::Producer, 12);
    let reunion = take_over(&producer, call(12), &mut workers);
    let said: Vec<_> = reunion
        .unusable
        .iter()
        .map(|(rank, mismatch)| format!("{rank}: {mismatch}"))
        .collect();
    assert_eq!(
        said[0],
        "0: rank is 1, expected 0; expel that worker and start it again"
    );
    assert!(
        said[1].starts_with("1: lock of rank-1 is free, or of another epoch"),
        "{said:?}"
    );
    assert_eq!(said[2], "2: x is a\\nb, expected c; d");
    assert!(reunion.survived.is_empty());
}
