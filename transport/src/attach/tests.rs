use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use kvsluice_layout::capability::{Capability, GeometryHash};
use kvsluice_layout::geometry::MAX_GROUPS;
use kvsluice_layout::segment::SegmentKind;
use serde_json::json;

use super::*;
use crate::clock::{Clock, Monotonic, Simulated};
use crate::link::{Link, LinkError, Listener, MESSAGE_BYTES_MAX, Peer};
use crate::lock::RoleLock;
use crate::names::{ChannelName, Role};
use crate::peers::{Peers, own_uid};
use crate::runtime_dir::{ChannelDir, RuntimeDir};
use crate::segment::{Created, Memfd, Mode, NewSegment, Reserve, create, reopen_read_only, reopen_writable};
use crate::shared::{Shared, SharedMut};
use crate::test_process::{Second, listen, part, say};

const HASH: u64 = 0x1a40;
const PATIENCE_NS: u64 = 5_000_000_000;

fn channel(folder: &Path, peers: &Peers) -> ChannelDir {
    let runtime = RuntimeDir::open(folder, peers).unwrap();
    runtime.channel(&ChannelName::new("engine").unwrap()).unwrap()
}

fn lock(dir: &ChannelDir, role: Role, epoch: u64) -> RoleLock {
    RoleLock::acquire(dir, role, ProcessEpoch(epoch), Duration::ZERO).unwrap()
}

fn make(kind: SegmentKind, epoch: u64) -> Created {
    let segment = NewSegment {
        kind,
        bytes: 4096,
        layout_hash: HASH,
        channel: ChannelId(0xc4),
        creator_epoch: ProcessEpoch(epoch),
    };
    let created = create(&Memfd { hardened: false }, &segment, &Reserve::default()).unwrap();
    created.make_ready();
    created
}

/// A producer as far as attaching goes.
struct Producer {
    reception: Reception,
    admission: Host,
    _lock: RoleLock,
}

struct Host {
    epoch: u64,
    control: Created,
    pool: Created,
    refuse: Option<Mismatch>,
    /// Hands out the control segment in place of the pool.
    mixed_up: bool,
}

impl Admission for Host {
    fn admit(&mut self, hello: &Hello, peer: &Peer) -> Result<Admitted, Mismatch> {
        assert!(peer.pid.is_some() && peer.reliable);
        if let Some(refuse) = self.refuse.clone() {
            return Err(refuse);
        }
        let welcome = Welcome {
            protocol: PROTOCOL,
            channel: ChannelId(0xc4),
            incarnation: Incarnation(3),
            producer_epoch: ProcessEpoch(self.epoch),
            ranks: 4,
            ring_lines: 1024,
            writeback_bytes: 1 << 20,
            mode: Mode::Memfd,
            pool_generation: PoolGeneration(1),
            capability: json!({ "agreed": "everything" }),
        };
        let pool = if self.mixed_up { &self.control } else { &self.pool };
        Ok(Admitted {
            welcome,
            control: reopen_read_only(&self.control.descriptor).unwrap(),
            pool: reopen_read_only(&pool.descriptor).unwrap(),
            rank: make(SegmentKind::Rank(hello.rank), self.epoch).hand_over().unwrap().0,
        })
    }
}

impl Producer {
    fn start(dir: &ChannelDir, epoch: u64, limits: Limits) -> Self {
        let lock = lock(dir, Role::Producer, epoch);
        Self {
            reception: Reception::new(Listener::bind(&lock).unwrap(), HASH, 4, limits).unwrap(),
            admission: Host {
                epoch,
                control: make(SegmentKind::Control, epoch),
                pool: make(SegmentKind::Pool, epoch),
                refuse: None,
                mixed_up: false,
            },
            _lock: lock,
        }
    }

    fn poll(&mut self, now_ns: u64) -> Vec<Arrival> {
        self.reception.poll(now_ns, &mut self.admission).unwrap()
    }
}

fn hello(rank: u32, epoch: u64) -> Hello {
    Hello {
        protocol: PROTOCOL,
        layout_hash: HASH,
        rank: Rank(rank),
        worker_epoch: ProcessEpoch(epoch),
        pid: std::process::id(),
        capability: json!({ "device": "host" }),
    }
}

/// Lets a worker knock and both sides speak until the worker has an answer.
fn knock(producer: &mut Producer, lock: &RoleLock, hello: Hello) -> (Result<Offer, AttachError>, Vec<Arrival>) {
    let mut joining = Joining::start(lock, hello, 0, PATIENCE_NS).unwrap();
    assert!(joining.poll(0).unwrap().is_none());
    let mut arrivals = Vec::new();
    loop {
        arrivals.extend(producer.poll(0));
        match joining.poll(0) {
            Ok(None) => {}
            Ok(Some(offer)) => return (Ok(offer), arrivals),
            Err(error) => return (Err(error), arrivals),
        }
    }
}

#[test]
fn x20_a_worker_attaches_and_gets_its_segments_as_far_as_its_role_allows() {
    let temp = tempfile::tempdir().unwrap();
    let dir = channel(temp.path(), &Peers::default());
    let mut producer = Producer::start(&dir, 11, Limits::default());
    producer.admission.pool.memory.store(1024, 42);
    let lock = lock(&dir, Role::Rank(Rank(2)), 21);
    let (offer, arrivals) = knock(&mut producer, &lock, hello(2, 21));
    assert!(arrivals.is_empty());
    let offer = offer.unwrap();
    assert_eq!(offer.welcome.incarnation, Incarnation(3));
    assert_eq!(offer.welcome.capability, json!({ "agreed": "everything" }));
    let segments = offer.open().unwrap();
    assert_eq!(segments.pool.load(1024), 42);
    segments.rank.store(1024, 1);
    assert!(!offer.producer.is_dead());
    let accepted = offer.accept().unwrap();

    let arrivals = producer.poll(0);
    let [Arrival::Attached(newcomer)] = &arrivals[..] else {
        panic!("{arrivals:?}")
    };
    assert_eq!(newcomer.hello, hello(2, 21));
    assert_eq!(newcomer.proof.holder().pid, Some(std::process::id()));
    assert!(!newcomer.proof.is_dead());
    assert!(newcomer.link.try_receive().unwrap().is_none());
    drop(accepted);
    assert!(matches!(
        newcomer.link.receive(Duration::from_secs(60)),
        Err(LinkError::HungUp)
    ));
}

#[test]
fn x20_every_mismatch_is_an_error_on_both_sides_with_the_field_and_both_values() {
    let temp = tempfile::tempdir().unwrap();
    let dir = channel(temp.path(), &Peers::default());
    let mut producer = Producer::start(&dir, 11, Limits::default());
    let lock = lock(&dir, Role::Rank(Rank(2)), 21);
    let refused = |producer: &mut Producer, hello: Hello, words: &str| {
        let (offer, arrivals) = knock(producer, &lock, hello);
        let said = offer.unwrap_err().to_string();
        assert!(
            said.starts_with("the producer of channel engine refuses this worker: "),
            "{said}"
        );
        assert!(said.contains(words), "{said:?} does not say {words:?}");
        for arrival in &arrivals {
            let Arrival::Failed {
                mismatch,
                was_admitted: false,
                ..
            } = arrival
            else {
                panic!("{arrival:?}")
            };
            assert!(mismatch.to_string().contains(words), "{mismatch}");
        }
        arrivals.len()
    };
    let other = Hello {
        layout_hash: 0xbad,
        ..hello(2, 21)
    };
    assert_eq!(
        refused(
            &mut producer,
            other,
            "layout hash is 0000000000000bad, expected 0000000000001a40"
        ),
        1
    );
    assert_eq!(
        refused(
            &mut producer,
            hello(4, 21),
            "rank is 4, expected 0 to 3; start one worker for each rank"
        ),
        1
    );
    assert_eq!(
        refused(
            &mut producer,
            hello(2, 0),
            "worker epoch is 0, expected a random number"
        ),
        1
    );
    // The lock of the rank must be held, under the epoch that is claimed.
    assert_eq!(
        refused(
            &mut producer,
            hello(1, 21),
            "lock of rank-1 is not there, expected held by pid"
        ),
        1
    );
    assert_eq!(
        refused(
            &mut producer,
            hello(2, 22),
            "lock of rank-2 is free, or of another epoch"
        ),
        1
    );
    let later = Hello {
        protocol: Protocol { major: 2, minor: 5 },
        ..hello(2, 21)
    };
    assert_eq!(
        refused(
            &mut producer,
            later,
            "protocol version is 2.5, expected 1.0; run the same"
        ),
        0
    );
    let minor = Hello {
        protocol: Protocol { major: 1, minor: 9 },
        ..hello(2, 21)
    };
    producer.admission.refuse = Some(Mismatch::new(
        "capability kv_dtype",
        "fp8",
        "bf16",
        "set kv_dtype = \"bf16\"",
    ));
    assert_eq!(
        refused(
            &mut producer,
            minor,
            "capability kv_dtype is fp8, expected bf16; set kv_dtype"
        ),
        1
    );
    producer.admission.refuse = Some(Mismatch::occupied("worker of rank 2", "pid 9", Some(4711)));
    assert_eq!(
        refused(
            &mut producer,
            hello(2, 21),
            "worker of rank 2 is pid 9, expected pid 4711; stop that process"
        ),
        1
    );
    assert_eq!(producer.reception.turned(), Turned::default());
}

#[test]
fn x20_what_the_worker_finds_is_read_by_the_producer_too() {
    let temp = tempfile::tempdir().unwrap();
    let dir = channel(temp.path(), &Peers::default());
    let mut producer = Producer::start(&dir, 11, Limits::default());
    producer.admission.mixed_up = true;
    let lock = lock(&dir, Role::Rank(Rank(2)), 21);
    let (offer, _) = knock(&mut producer, &lock, hello(2, 21));
    let offer = offer.unwrap();
    let mismatch = offer.open().err().unwrap();
    let words = "segment kind of the pool segment is 1, expected 3";
    let said = offer.decline(mismatch).to_string();
    assert!(
        said.starts_with("the producer of channel engine does not fit this worker: "),
        "{said}"
    );
    assert!(said.contains(words), "{said}");
    let arrivals = producer.poll(0);
    let [
        Arrival::Failed {
            mismatch,
            was_admitted: true,
            hello,
        },
    ] = &arrivals[..]
    else {
        panic!("{arrivals:?}")
    };
    assert!(mismatch.to_string().contains(words), "{mismatch}");
    assert_eq!(hello.rank, Rank(2));
}

#[test]
fn x20_a_second_worker_of_a_rank_is_refused_with_the_pid_of_the_first() {
    let temp = tempfile::tempdir().unwrap();
    let dir = channel(temp.path(), &Peers::default());
    let mut producer = Producer::start(&dir, 11, Limits::default());
    let lock = lock(&dir, Role::Rank(Rank(2)), 21);
    let (first, _) = knock(&mut producer, &lock, hello(2, 21));
    let (second, arrivals) = knock(&mut producer, &lock, hello(2, 21));
    let said = second.unwrap_err().to_string();
    let pid = std::process::id();
    assert!(
        said.contains(&format!(
            "worker of rank 2 is pid {pid}, expected pid {pid}; stop that process"
        )),
        "{said}"
    );
    let [Arrival::Failed { mismatch, .. }] = &arrivals[..] else {
        panic!("{arrivals:?}")
    };
    assert_eq!(mismatch.holder_pid, Some(pid));
    // The first goes on undisturbed.
    first.unwrap().accept().unwrap();
    assert!(matches!(producer.poll(0)[..], [Arrival::Attached(_)]));
}

#[test]
fn x20_a_producer_that_is_not_there_or_does_not_answer_is_named_as_that() {
    let temp = tempfile::tempdir().unwrap();
    let dir = channel(temp.path(), &Peers::default());
    let worker = lock(&dir, Role::Rank(Rank(2)), 21);
    let said = Joining::start(&worker, hello(2, 21), 0, PATIENCE_NS)
        .unwrap_err()
        .to_string();
    assert!(
        said.starts_with("channel engine has no producer: nobody listens on "),
        "{said}"
    );
    assert!(
        said.ends_with("engine/producer.sock; start `kvsluice producer` for it"),
        "{said}"
    );

    // A producer that is stopped: its kernel still takes connections.
    let producer = lock(&dir, Role::Producer, 11);
    let _listener = Listener::bind(&producer).unwrap();
    let clock = Simulated::default();
    let mut joining = Joining::start(&worker, hello(2, 21), clock.now_ns(), PATIENCE_NS).unwrap();
    assert!(joining.ready().is_some());
    assert!(joining.poll(clock.now_ns()).unwrap().is_none());
    clock.advance_ns(PATIENCE_NS);
    let said = joining.poll(clock.now_ns()).unwrap_err().to_string();
    assert!(
        said.contains("does not answer within 5000 ms; it may be stopped or overloaded"),
        "{said}"
    );
}

#[test]
fn x33_half_a_handshake_or_a_flood_of_connections_keeps_nobody_from_attaching() {
    let temp = tempfile::tempdir().unwrap();
    let dir = channel(temp.path(), &Peers::default());
    let limits = Limits {
        guests_max: 8,
        ..Limits::default()
    };
    let mut producer = Producer::start(&dir, 11, limits);
    let lock = lock(&dir, Role::Rank(Rank(2)), 21);
    let (first, _) = knock(&mut producer, &lock, hello(2, 21));

    // As many as the listener's queue takes, twice over; some say half a thing, some never read.
    let mut strangers = Vec::new();
    for _ in 0..2 {
        while let Ok(stranger) = Link::connect(&dir, Role::Producer) {
            if strangers.len() % 3 == 0 {
                stranger.send(&json!({ "say": "hello" }), &[]).unwrap();
            }
            strangers.push(stranger);
        }
        // A worker whose knock finds the queue full knocks again.
        let mut joining = Joining::start(&lock, hello(2, 21), 0, PATIENCE_NS).unwrap();
        assert!(joining.ready().is_none() && joining.poll(0).unwrap().is_none());
        for _ in 0..40 {
            producer.poll(0);
        }
        assert!(joining.poll(0).unwrap().is_none());
        while producer.poll(0).is_empty() {}
        let said = joining.poll(0).unwrap_err().to_string();
        assert!(said.contains("worker of rank 2 is pid"), "the queue was passed: {said}");
    }
    let turned = producer.reception.turned();
    assert!(strangers.len() > 200 && turned.crowded_out > 100, "{turned:?}");
    assert_eq!(turned.silent, 0);

    // The one that was greeted before all this has kept its place.
    first.unwrap().accept().unwrap();
    assert!(matches!(producer.poll(0)[..], [Arrival::Attached(_)]));
    // The rest are gone when their time is over.
    producer.poll(limits.first_ns);
    let turned = producer.reception.turned();
    assert!(turned.silent > 0 && turned.silent <= 8, "{turned:?}");
}

#[test]
fn x23_a_worker_that_leaves_between_welcome_and_attached_is_reported() {
    let temp = tempfile::tempdir().unwrap();
    let dir = channel(temp.path(), &Peers::default());
    let mut producer = Producer::start(&dir, 11, Limits::default());
    let lock = lock(&dir, Role::Rank(Rank(2)), 21);
    let (offer, _) = knock(&mut producer, &lock, hello(2, 21));
    drop(offer);
    let arrivals = std::iter::repeat_with(|| producer.poll(0))
        .find(|arrivals| !arrivals.is_empty())
        .unwrap();
    let [
        Arrival::Left {
            hello,
            why: LinkError::HungUp,
        },
    ] = &arrivals[..]
    else {
        panic!("{arrivals:?}")
    };
    assert_eq!(hello.rank, Rank(2));

    let (_offer, _) = knock(&mut producer, &lock, hello.as_ref().clone());
    assert!(producer.poll(Limits::default().rest_ns - 1).is_empty());
    let arrivals = producer.poll(Limits::default().rest_ns);
    assert!(
        matches!(
            &arrivals[..],
            [Arrival::Left {
                why: LinkError::Silent { waited_ms: 60_000 },
                ..
            }]
        ),
        "{arrivals:?}"
    );
}

#[test]
fn x20_a_process_of_another_user_is_turned_away_unless_it_is_allowed() {
    const OTHER: u32 = 4711;
    if let Some(folder) = part() {
        // The second process, as the other user: it knocks without more ado.
        let dir = channel(folder.as_ref(), &Peers::with([0]));
        let lock = lock(&dir, Role::Rank(Rank(2)), 21);
        let joining = Joining::start(&lock, hello(2, 21), 0, PATIENCE_NS).unwrap();
        say("knocked");
        let offer = joining.wait(&Monotonic::default());
        say(&offer.map_or_else(
            |error| error.to_string(),
            |offer| format!("ranks = {}", offer.welcome.ranks),
        ));
        listen();
        return;
    }
    if own_uid() != 0 {
        return eprintln!("only root can start a process as another user");
    }
    let temp = tempfile::tempdir().unwrap();
    std::fs::set_permissions(temp.path(), PermissionsExt::from_mode(0o711)).unwrap();
    for (allowed, word) in [(OTHER + 1, "hung up"), (OTHER, "ranks = 4")] {
        let folder = temp.path().join(allowed.to_string());
        // The folder lets every user in; the door does the choosing.
        let dir = channel(&folder, &Peers::with([allowed]));
        let mut producer = Producer::start(&dir, 11, Limits::default());
        let mut other = Second::start_as(folder.to_str().unwrap(), OTHER);
        assert_eq!(other.hear(), "knocked");
        producer.poll(0);
        let said = other.hear();
        assert!(said.contains(word), "{said}");
        assert_eq!(producer.reception.turned().of_other_users, u64::from(allowed != OTHER));
    }
}

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
}

impl SurvivorState for Held {
    fn holdings(&mut self, call: &Call) -> Result<Holdings<'_>, Mismatch> {
        assert_ne!(call.producer_epoch, self.surviving.producer_epoch);
        match self.refuse.clone() {
            Some(mismatch) => Err(mismatch),
            None => Ok(Holdings {
                surviving: self.surviving.clone(),
                control: self.control.as_fd(),
                pool: self.pool.as_fd(),
                rank: self.rank.as_fd(),
            }),
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

#[test]
fn x20_a_hello_and_a_welcome_of_the_largest_geometry_fit_into_a_message() {
    let capability = Capability {
        block_tokens: Some(vec![u32::MAX; MAX_GROUPS]),
        gather_blocks: Some(vec![u32::MAX; MAX_GROUPS]),
        process_epoch: Some(ProcessEpoch(u64::MAX)),
        geometry_hash: Some(GeometryHash(u64::MAX)),
        ..Capability::default()
    };
    let capability = serde_json::to_value(capability).unwrap();
    let hello = Hello {
        capability: capability.clone(),
        ..hello(63, u64::MAX)
    };
    let welcome = Welcome {
        protocol: PROTOCOL,
        channel: ChannelId(u64::MAX),
        incarnation: Incarnation(u64::MAX),
        producer_epoch: ProcessEpoch(u64::MAX),
        ranks: 64,
        ring_lines: u64::MAX,
        writeback_bytes: u64::MAX,
        mode: Mode::Persistent,
        pool_generation: PoolGeneration(u64::MAX),
        capability,
    };
    let hello = serde_json::to_vec(&WorkerSays::Hello(hello)).unwrap();
    let welcome = serde_json::to_vec(&ProducerSays::Welcome(Box::new(welcome))).unwrap();
    assert!(hello.len().max(welcome.len()) < MESSAGE_BYTES_MAX / 16);
}
