//! A worker knocks: what it is given, and everything that keeps it out (X20).

use std::os::unix::fs::PermissionsExt;

use kvsluice_layout::capability::{Capability, GeometryHash};
use kvsluice_layout::geometry::MAX_GROUPS;

use super::*;
use crate::clock::{Clock, Monotonic, Simulated};
use crate::link::{Link, LinkError, MESSAGE_BYTES_MAX};
use crate::peers::own_uid;
use crate::shared::{Shared, SharedMut};
use crate::test_process::{Second, listen, part, say};

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
        said.ends_with("engine/producer.sock; start `kvsluice cpu-worker` for it"),
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
fn x23_a_producer_that_dies_behind_its_welcome_is_gone_and_not_one_that_does_not_fit() {
    let temp = tempfile::tempdir().unwrap();
    let dir = channel(temp.path(), &Peers::default());
    let mut producer = Producer::start(&dir, 11, Limits::default());
    let worker = lock(&dir, Role::Rank(Rank(2)), 21);
    let mut joining = Joining::start(&worker, hello(2, 21), 0, PATIENCE_NS).unwrap();
    assert!(joining.poll(0).unwrap().is_none());
    producer.poll(0);
    producer.poll(0);
    // Its connection outlives it by a moment.
    drop(producer.lock);
    let gone = joining.poll(0).unwrap_err();
    assert!(
        matches!(
            gone,
            AttachError::Link {
                source: LinkError::HungUp,
                ..
            }
        ),
        "{gone}"
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
