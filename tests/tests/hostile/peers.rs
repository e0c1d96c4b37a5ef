//! Peers that never get as far as a segment: half a handshake, and more connections than anybody has places for.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvsluice_layout::ids::{ChannelId, Incarnation, PoolGeneration, ProcessEpoch, Rank};
use kvsluice_layout::region::layout_hash;
use kvsluice_layout::segment::SegmentKind;
use kvsluice_transport::attach::{
    Admission, Admitted, Arrival, AttachError, Hello, Joining, Limits, Mismatch, PROTOCOL, Reception, Welcome,
};
use kvsluice_transport::clock::{Clock, Monotonic};
use kvsluice_transport::link::{Link, LinkError, Listener, Peer};
use kvsluice_transport::lock::RoleLock;
use kvsluice_transport::names::{ChannelName, Role};
use kvsluice_transport::peers::{Peers, own_uid};
use kvsluice_transport::runtime_dir::{ChannelDir, RuntimeDir};
use kvsluice_transport::segment::{Created, Memfd, Mode, NewSegment, Reserve, create, reopen_read_only};
use serde_json::json;

use crate::second::{Second, part, say};

/// Connections that the flood makes; the environment asks for more.
const CONNECTIONS: u64 = 100_000;
const EPOCH: ProcessEpoch = ProcessEpoch(11);

fn connections() -> u64 {
    let asked = std::env::var("KVSLUICE_CONNECTIONS").ok();
    asked.and_then(|count| count.parse().ok()).unwrap_or(CONNECTIONS)
}

fn channel(folder: &Path, peers: &Peers) -> ChannelDir {
    let runtime = RuntimeDir::open(folder, peers).expect("runtime folder");
    runtime
        .channel(&ChannelName::new("engine").expect("name"))
        .expect("channel")
}

/// Lets every worker in that the reception finds in order.
struct Host {
    control: Created,
    pool: Created,
}

fn segment(kind: SegmentKind) -> Created {
    let segment = NewSegment {
        kind,
        bytes: 4096,
        layout_hash: layout_hash(),
        channel: ChannelId(1),
        creator_epoch: EPOCH,
    };
    let created = create(&Memfd { hardened: false }, &segment, &Reserve::default()).expect("segment");
    created.make_ready();
    created
}

impl Admission for Host {
    fn admit(&mut self, hello: &Hello, _: &Peer) -> Result<Admitted, Mismatch> {
        let welcome = Welcome {
            protocol: PROTOCOL,
            channel: ChannelId(1),
            incarnation: Incarnation(1),
            producer_epoch: EPOCH,
            ranks: 1,
            ring_lines: 512,
            writeback_bytes: 0,
            mode: Mode::Memfd,
            pool_generation: PoolGeneration(1),
            capability: json!({}),
        };
        Ok(Admitted {
            welcome,
            control: reopen_read_only(&self.control.descriptor).expect("control"),
            pool: reopen_read_only(&self.pool.descriptor).expect("pool"),
            rank: segment(SegmentKind::Rank(hello.rank)).hand_over().expect("rank").0,
        })
    }
}

/// Connects again and again: says nothing, hangs up at once, or sends half a handshake.
fn flood(folder: &str, count: u64, only: &Peers) {
    let dir = channel(Path::new(folder), only);
    let mut random = fastrand::Rng::with_seed(1);
    let mut kept = Vec::new();
    let mut made = 0;
    while made < count {
        let link = match Link::connect(&dir, Role::Producer) {
            Ok(link) => link,
            // The queue is full of ourselves: what is at its head has to be let go first.
            Err(LinkError::Busy { .. } | LinkError::System { .. }) => {
                kept.clear();
                std::thread::yield_now();
                continue;
            }
            Err(error) => panic!("{error}"),
        };
        made += 1;
        let half = match random.u32(..5) {
            0 => json!({ "say": "hello", "protocol": { "major": 1, "minor": 0 } }),
            1 => json!({ "say": "attached" }),
            2 => json!([[[["x"]]]]),
            _ => json!(null),
        };
        if half.is_null() || link.send(&half, &[]).is_ok() {
            kept.push(link);
        }
        if kept.len() >= 64 {
            kept.swap_remove(random.usize(..64));
        }
    }
    say("flooded");
}

/// Floods a reception while a worker attaches again and again; returns how often it did.
fn attach_under_flood(peers: &Peers, uid: Option<u32>, count: u64) -> u64 {
    let temp = tempfile::tempdir().expect("folder");
    let folder = temp.path().join("run");
    let dir = channel(&folder, peers);
    if peers.shared() {
        std::fs::set_permissions(temp.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).expect("mode");
    }
    let lock = RoleLock::acquire(&dir, Role::Producer, EPOCH, Duration::ZERO).expect("lock");
    let listener = Listener::bind(&lock).expect("socket");
    let mut reception = Reception::new(listener, layout_hash(), 1, Limits::default()).expect("reception");
    let mut host = Host {
        control: segment(SegmentKind::Control),
        pool: segment(SegmentKind::Pool),
    };
    let done = AtomicBool::new(false);
    let part = format!("flood {} {count}", folder.display());
    let mut second = Second::start(&part, uid);
    let attached = std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let lock = RoleLock::acquire(&dir, Role::Rank(Rank(0)), ProcessEpoch(21), Duration::ZERO).expect("lock");
            let clock = Monotonic::default();
            let mut attached = 0_u64;
            while !done.load(Ordering::Relaxed) {
                let hello = Hello {
                    protocol: PROTOCOL,
                    layout_hash: layout_hash(),
                    rank: Rank(0),
                    worker_epoch: ProcessEpoch(21),
                    pid: std::process::id(),
                    capability: json!({}),
                };
                // A worker that was crowded out knocks again; that it need not is for the limits to make likely.
                let mut joining = match Joining::start(&lock, hello, clock.now_ns(), u64::MAX / 2) {
                    Ok(joining) => joining,
                    Err(AttachError::Link { .. }) => continue,
                    Err(error) => panic!("{error}"),
                };
                let offer = loop {
                    match joining.poll(clock.now_ns()) {
                        Ok(Some(offer)) => break Some(offer),
                        Ok(None) if done.load(Ordering::Relaxed) => break None,
                        Ok(None) => std::thread::yield_now(),
                        Err(_) => break None,
                    }
                };
                attached += u64::from(offer.is_some_and(|offer| offer.accept().is_ok()));
            }
            attached
        });
        let clock = Monotonic::default();
        while second.overhear().is_none() {
            let arrivals = reception
                .poll(clock.now_ns(), &mut host)
                .expect("the reception goes on");
            for arrival in arrivals {
                assert!(!matches!(arrival, Arrival::Failed { .. }), "{arrival:?}");
            }
        }
        done.store(true, Ordering::Relaxed);
        worker.join().expect("the worker does not panic")
    });
    let turned = reception.turned();
    let strangers = turned.of_other_users + turned.crowded_out + turned.silent + turned.unintelligible;
    assert!(strangers > 0, "{turned:?}");
    assert_eq!(turned.of_other_users > 0, uid.is_some(), "{turned:?}");
    attached
}

#[test]
fn x33_a_flood_of_half_handshakes_keeps_no_worker_from_attaching() {
    if let Some([_, folder, count]) = part().as_deref() {
        return flood(folder, count.parse().expect("a count"), &Peers::default());
    }
    let attached = attach_under_flood(&Peers::default(), None, connections());
    assert!(attached > 0, "the honest worker got in");
}

#[test]
fn x33_a_flood_by_a_user_who_is_no_peer_is_turned_away_unread() {
    const ALLOWED: u32 = 4711;
    const STRANGER: u32 = 4712;
    if let Some([_, folder, count]) = part().as_deref() {
        // A stranger finds the folder in order if it allows its owner.
        return flood(folder, count.parse().expect("a count"), &Peers::with([0, ALLOWED]));
    }
    if own_uid() != 0 {
        return eprintln!("only root can start a process of another user");
    }
    let attached = attach_under_flood(&Peers::with([ALLOWED]), Some(STRANGER), connections() / 5);
    assert!(attached > 0, "the honest worker got in");
}
