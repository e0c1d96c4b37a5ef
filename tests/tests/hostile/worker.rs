//! A worker that writes whatever it can, beside an honest one, below a producer process as it runs in production.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use kvsluice_cpu_worker::process::{Event, OnRankLost, ProducerOptions, run_producer};
use kvsluice_cpu_worker::rounds::WorkloadOptions;
use kvsluice_gpu_worker::process::{WorkerOptions, random_epoch, run_worker};
use kvsluice_gpu_worker::worker::Verify;
use kvsluice_layout::capability::{Capability, SelectionUnit, SourceKinds};
use kvsluice_layout::geometry::Geometry;
use kvsluice_layout::ids::{Position, Rank};
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::planted::with_planted;
use kvsluice_layout::presets::{Sizing, preset};
use kvsluice_layout::record::TerminalSlot;
use kvsluice_layout::region::{
    BROKEN_AT, CONSUMED_AT, RANK_GENERATION_AT, RECLAIM_AT, RegionMap, TERMINALS_AT, WORKER_EPOCH_AT,
    WORKER_SLEEPING_AT, WORKER_WAKE_AT, layout_hash,
};
use kvsluice_transport::attach::{Accepted, Hello, Joining, PROTOCOL, Segments};
use kvsluice_transport::clock::{Clock, Monotonic};
use kvsluice_transport::lock::RoleLock;
use kvsluice_transport::members::read_member;
use kvsluice_transport::names::{ChannelName, Role};
use kvsluice_transport::peers::Peers;
use kvsluice_transport::ring::RingShape;
use kvsluice_transport::runtime_dir::RuntimeDir;
use kvsluice_transport::shared::{Shared, SharedMut};
use kvsluice_transport::slots::write_slot;

use crate::second::{Second, listen, part, say, seed};

pub(crate) const CHANNEL: &str = "engine";
/// Words that the hostile worker writes before it says that it has done its worst.
const WORDS: u64 = 400_000;
/// Plans that are published beside the hostile worker, and again once it is gone.
const PLANS: u64 = 1000;

pub(crate) fn geometry() -> Geometry {
    let sizing = Sizing {
        // Few sources, so that one that is free is refilled at once, and destinations enough to want them.
        source_blocks: Some(24),
        device_blocks: Some(512),
        ranks: Some(2),
        ..Sizing::default()
    };
    sizing.apply(preset("sample").expect("preset")).expect("sizing")
}

/// An honest worker: verifies every byte on a late device until it is told to stop.
pub(crate) fn honest(folder: &str, rank: u32) {
    let options = WorkerOptions {
        allowed_uids: Vec::new(),
        channel: CHANNEL.into(),
        runtime_dir: Some(folder.into()),
        rank: Rank(rank),
        geometry: geometry(),
        copy_threads: 1,
        adversary: Some(7),
        verify: Verify::Full,
        chunk_bytes_max: 1 << 30,
        attach_patience: Duration::from_secs(60),
        watchdog: Duration::ZERO,
        requests_max: 64,
    };
    static STOP: AtomicBool = AtomicBool::new(false);
    std::thread::spawn(|| {
        listen();
        STOP.store(true, Ordering::Relaxed);
    });
    let mut told = String::new();
    let ended = run_worker(&options, &STOP, &mut |event| match event {
        kvsluice_gpu_worker::process::Event::Ready { .. } => say("ready"),
        kvsluice_gpu_worker::process::Event::Summary {
            verified_bytes,
            mismatched_bytes,
            ..
        } => told = format!("verified {} mismatched {mismatched_bytes}", verified_bytes > 0),
        _ => {}
    });
    match ended {
        Ok(_) => say(&told),
        Err(error) => say(&format!("{told} but {error}")),
    }
}

/// Attaches like any worker.
fn attach(folder: &str, rank: u32) -> (RoleLock, Accepted, Segments, u64) {
    let runtime = RuntimeDir::open(Path::new(folder), &Peers::default()).expect("runtime folder");
    let dir = runtime
        .channel(&ChannelName::new(CHANNEL).expect("name"))
        .expect("channel");
    let epoch = random_epoch().expect("epoch");
    let lock = RoleLock::acquire(&dir, Role::Rank(Rank(rank)), epoch, Duration::ZERO).expect("lock");
    let kinds = SourceKinds {
        source_only: true,
        copy: false,
    };
    let capability = Capability::of(&geometry(), SelectionUnit::Block, kinds, epoch);
    let hello = Hello {
        protocol: PROTOCOL,
        layout_hash: layout_hash(),
        rank: Rank(rank),
        worker_epoch: epoch,
        pid: std::process::id(),
        capability: serde_json::to_value(capability).expect("capability"),
    };
    let clock = Monotonic::default();
    let offer = loop {
        // The producer may not listen yet.
        let joining = Joining::start(&lock, hello.clone(), clock.now_ns(), u64::MAX / 2);
        if let Ok(offer) = joining.and_then(|joining| joining.wait(&clock)) {
            break offer;
        }
        std::thread::yield_now();
    };
    let segments = offer.open().expect("segments");
    let accepted = offer.accept().expect("accepted");
    (lock, accepted, segments, epoch.get())
}

/// Writes over everything that it may write, until it is killed.
fn hostile(folder: &str, seed: u64) {
    let (_lock, accepted, segments, epoch) = attach(folder, 1);
    let (control, own) = (&segments.control, &segments.rank);
    let geometry = GeometryMap::new(&geometry()).expect("geometry");
    let ring_bytes = accepted.welcome.ring_lines as usize * 64;
    let slot_bytes = geometry.writeback_slot_bytes() as usize;
    let map = RegionMap::new(geometry.geometry(), ring_bytes, 0, slot_bytes).expect("regions");
    while read_member(control, &map, Rank(1)).epoch.get() != epoch {
        std::thread::yield_now();
    }
    let shape = RingShape {
        at: map.ring_at(),
        bytes: map.ring_bytes(),
    };
    let mut random = fastrand::Rng::with_seed(seed);
    let words = [
        WORKER_EPOCH_AT,
        BROKEN_AT,
        CONSUMED_AT,
        TERMINALS_AT,
        WORKER_SLEEPING_AT,
        WORKER_WAKE_AT,
    ];
    let mut written = 0;
    loop {
        // Lies about every record in flight, then about everything else.
        let mut at = control.load_acquire(RECLAIM_AT);
        let end = at + shape.bytes as u64;
        while at < end && control.load_acquire(shape.at + shape.offset(at)) == at + 1 {
            let mut record = [0; 8];
            control.copy_out(shape.at + shape.offset(at), &mut record);
            answer(own, shape, at, &record, epoch, &mut random);
            at += (record[2] & 0xffff_ffff).max(64);
            written += 8;
        }
        for _ in 0..random.usize(..64) {
            let word = [0, 1, u64::MAX, at + 1, random.u64(..), random.u64(..) >> 32][random.usize(..6)];
            let anywhere = random.usize(..own.size() / 8) * 8;
            own.store(
                if random.bool() {
                    words[random.usize(..words.len())]
                } else {
                    anywhere
                },
                word,
            );
            written += 1;
        }
        // The generation that lets data records pass, or nothing more would happen here.
        own.store(RANK_GENERATION_AT, record_generation(control));
        if written > WORDS {
            say("done my worst");
            written = 0;
        }
        std::thread::yield_now();
    }
}

fn record_generation(control: &impl Shared) -> u64 {
    control.load(kvsluice_layout::region::GENERATION_AT)
}

/// An answer that is right, half right or wrong, some of them twice.
fn answer(own: &impl SharedMut, shape: RingShape, at: u64, record: &[u64; 8], epoch: u64, random: &mut fastrand::Rng) {
    let mut slot = TerminalSlot {
        commit: at + 1,
        identity: record[1],
        producer_epoch: record[4],
        worker_epoch: epoch,
        status: 1,
        partial: 0,
        reason: random.u16(..),
        row: random.u32(..),
        bytes_moved: random.u64(..),
        device_ns: random.u64(..),
        digest: random.u64(..),
    };
    match random.u32(..8) {
        0 => slot.identity = random.u64(..),
        1 => slot.producer_epoch = random.u64(..),
        2 => slot.worker_epoch = random.u64(..),
        3 => slot.status = random.u8(..),
        4 => own.store(kvsluice_layout::region::SLOTS_AT + shape.offset(at), random.u64(..)),
        _ => {}
    }
    write_slot(own, shape, Position(at), &slot);
}

/// Runs a producer with an honest and a hostile worker; then replaces the hostile one. Returns what the honest ones saw
/// and how the producer ended.
fn run(seed: u64, fault: &'static str) -> (Vec<String>, Result<u64, String>) {
    let temp = tempfile::tempdir().expect("folder");
    let folder = temp.path().to_str().expect("a path");
    let options = ProducerOptions {
        runtime_dir: Some(temp.path().to_owned()),
        ring_bytes: 1 << 18,
        on_rank_lost: OnRankLost::Wait,
        drain_patience_ms: 60_000,
        workload: WorkloadOptions {
            rounds: 1000,
            concurrency: 64,
            drift: 1.0,
            abort_rate: 0.1,
            retry_rate: 0.1,
            ..WorkloadOptions::default()
        },
        ..ProducerOptions::new(CHANNEL, geometry())
    };
    let (stop, plans) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let producer = scope.spawn(|| {
            let ended = with_planted(fault, || {
                run_producer(&options, &stop, &mut |event| {
                    if let Event::Progress { plans: now, .. } = event {
                        plans.store(now, Ordering::Relaxed);
                    }
                })
            });
            ended
                .map(|summary| summary.leaked_blocks)
                .map_err(|error| error.to_string())
        });
        let mut first = Second::start(&format!("honest {folder} 0"), None);
        let mut hostile = Second::start(&format!("hostile {folder} {seed}"), None);
        let mut honest = vec![first.hear()];
        // Until much was published beside it, or it has had every chance to stall the channel.
        let mut times = 0;
        while plans.load(Ordering::Relaxed) < PLANS && times < 50 && !producer.is_finished() {
            times += u32::from(hostile.overhear().is_some());
            std::thread::sleep(Duration::from_millis(2));
        }
        hostile.kill();
        let mut second = Second::start(&format!("honest {folder} 1"), None);
        let mut enough = None;
        // The channel goes on as if nothing had been.
        while !producer.is_finished() {
            if second.overhear().is_some() {
                enough = Some(plans.load(Ordering::Relaxed) + PLANS);
            }
            if enough.is_some_and(|enough| plans.load(Ordering::Relaxed) >= enough) {
                stop.store(true, Ordering::Relaxed);
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let ended = producer.join().expect("the producer does not panic");
        first.tell("stop");
        second.tell("stop");
        honest.push(first.hear());
        honest.push(second.hear());
        (honest, ended)
    })
}

/// Plays the part that this process has, if it has one.
fn played() -> bool {
    match part().as_deref() {
        Some([role, folder, rank]) if role == "honest" => honest(folder, rank.parse().expect("a rank")),
        Some([_, folder, seed]) => hostile(folder, seed.parse().expect("a seed")),
        _ => return false,
    }
    true
}

const FINE: &str = "verified true mismatched 0";

#[test]
fn x33_a_worker_that_writes_over_all_that_it_may_harms_only_its_own_operations() {
    if played() {
        return;
    }
    let seed = seed(0x33);
    let (honest, ended) = run(seed, "none");
    assert_eq!(ended, Ok(0), "the producer ends well and leaks nothing; seed {seed}");
    assert_eq!(
        honest,
        ["ready", FINE, FINE],
        "no source was free before its time; seed {seed}"
    );
}

#[test]
fn x11_x33_an_operation_that_the_hostile_rank_ends_alone_is_found() {
    if played() {
        return;
    }
    let seed = seed(0x33);
    let (honest, ended) = run(seed, "x11_first_rank_completes");
    let early = honest.get(1).is_some_and(|said| said != FINE);
    assert!(early || ended != Ok(0), "seed {seed}: {honest:?}, {ended:?}");
}
