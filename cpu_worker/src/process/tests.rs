//! The producer process against ranks in threads of this process: attaching, playing, stopping, and leaving.

use std::path::Path;
use std::sync::Mutex;
use std::thread::{Scope, ScopedJoinHandle};

use kvsluice_layout::capability::{Capability, SelectionUnit, SourceKinds};
use kvsluice_layout::geometry::Geometry;
use kvsluice_layout::presets::{Sizing, preset};
use kvsluice_layout::segment::MAGIC;
use kvsluice_transport::attach::{Accepted, AttachError, Hello, Joining, PROTOCOL, Segments};
use kvsluice_transport::members::read_member;
use kvsluice_transport::ring::RingShape;
use kvsluice_transport::runtime_dir::ChannelDir;
use kvsluice_transport::shared::Shared;

use super::*;
use crate::fake_rank::{FakeRank, RankSpec, Seen};
use crate::rounds::WorkloadOptions;

fn geometry() -> Geometry {
    let sizing = Sizing {
        source_blocks: Some(96),
        ranks: Some(2),
        ..Sizing::default()
    };
    sizing.apply(preset("sample").unwrap()).unwrap()
}

fn options(folder: &Path) -> ProducerOptions {
    ProducerOptions {
        runtime_dir: Some(folder.to_owned()),
        ring_bytes: 1 << 18,
        workload: WorkloadOptions {
            requests: Some(40),
            ..WorkloadOptions::default()
        },
        ..ProducerOptions::new("engine", geometry())
    }
}

fn channel(folder: &Path) -> ChannelDir {
    let runtime = RuntimeDir::open(folder, &Peers::default()).unwrap();
    runtime.channel(&ChannelName::new("engine").unwrap()).unwrap()
}

/// One rank, as far as the producer sees it. It works until `done`.
struct Worker {
    lock: RoleLock,
    geometry: Geometry,
    epoch: ProcessEpoch,
}

impl Worker {
    fn new(folder: &Path, rank: u32) -> Self {
        let epoch = ProcessEpoch(0xB0B0 + u64::from(rank));
        let lock = RoleLock::acquire(&channel(folder), Role::Rank(Rank(rank)), epoch, Duration::ZERO).unwrap();
        Self {
            lock,
            geometry: geometry(),
            epoch,
        }
    }

    fn attach(&self, rank: Rank) -> Result<(Accepted, Segments), AttachError> {
        let kinds = SourceKinds {
            source_only: true,
            copy: false,
        };
        let capability = Capability::of(&self.geometry, SelectionUnit::Block, kinds, self.epoch);
        let hello = Hello {
            protocol: PROTOCOL,
            layout_hash: layout_hash(),
            rank,
            worker_epoch: self.epoch,
            pid: std::process::id(),
            capability: serde_json::to_value(capability).unwrap(),
        };
        let clock = Monotonic::default();
        let offer = loop {
            let joining = Joining::start(&self.lock, hello.clone(), clock.now_ns(), u64::MAX / 2);
            match joining.and_then(|joining| joining.wait(&clock)) {
                Err(AttachError::NoProducer { .. }) => std::thread::yield_now(),
                offer => break offer?,
            }
        };
        let segments = offer.open().unwrap();
        Ok((offer.accept()?, segments))
    }

    fn work(self, rank: u32, done: &AtomicBool) -> Seen {
        let (accepted, segments) = self.attach(Rank(rank)).unwrap();
        let map = Arc::new(GeometryMap::new(&self.geometry).unwrap());
        let ring_bytes = accepted.welcome.ring_lines as usize * 64;
        let slot_bytes = map.writeback_slot_bytes() as usize;
        let region = RegionMap::new(&self.geometry, ring_bytes, 0, slot_bytes).unwrap();
        let Segments {
            control,
            pool,
            rank: segment,
        } = segments;
        let first = loop {
            let member = read_member(&control, &region, Rank(rank));
            if member.epoch == self.epoch {
                break member.first;
            }
            std::thread::yield_now();
        };
        let spec = RankSpec {
            rank: Rank(rank),
            epoch: self.epoch,
            producer: accepted.welcome.producer_epoch,
            first,
            shape: RingShape {
                at: region.ring_at(),
                bytes: ring_bytes,
            },
            seed: u64::from(rank),
        };
        let mut fake = FakeRank::new(spec, control.clone(), segment.clone(), pool.clone(), map);
        let mut answers = 0;
        while !done.load(Ordering::Relaxed) {
            fake.step();
            let answered = fake.port().answers();
            if std::mem::replace(&mut answers, answered) != answered {
                wake_sleepers(&Futexes, &segment, WORKER_WAKE_AT, [(&control, PRODUCER_SLEEPING_AT)]);
            } else {
                std::thread::yield_now();
            }
        }
        // X3: whoever attaches later still finds a pool, whatever was filled in.
        assert_eq!(pool.load(0), u64::from_le_bytes(MAGIC));
        fake.seen
    }
}

fn start<'scope>(
    scope: &'scope Scope<'scope, '_>,
    folder: &Path,
    done: &'scope AtomicBool,
) -> Vec<ScopedJoinHandle<'scope, Seen>> {
    let workers = (0..2).map(|rank| (rank, Worker::new(folder, rank)));
    workers
        .map(|(rank, worker)| scope.spawn(move || worker.work(rank, done)))
        .collect()
}

/// Runs a producer and both ranks; `on_event` may set the stop flag.
fn run(
    options: &ProducerOptions,
    on_event: impl Fn(&Event, &AtomicBool),
) -> (Result<Summary, ProcessError>, Vec<Event>, Seen) {
    let folder = options.runtime_dir.clone().unwrap();
    let (done, stop, events) = (AtomicBool::new(false), AtomicBool::new(false), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        let ranks = start(scope, &folder, &done);
        let ended = run_producer(options, &stop, &mut |event| {
            on_event(&event, &stop);
            events.lock().unwrap().push(event);
        });
        done.store(true, Ordering::Relaxed);
        let mut seen = Seen::default();
        for rank in ranks {
            let of_rank = rank.join().unwrap();
            seen.verified += of_rank.verified;
            seen.mismatched += of_rank.mismatched + of_rank.contradicting + of_rank.overwritten;
        }
        (ended, events.into_inner().unwrap(), seen)
    })
}

#[test]
fn x20_f12_a_workload_is_played_over_a_socket_and_mapped_segments_and_nothing_is_left() {
    let temp = tempfile::tempdir().unwrap();
    let log = temp.path().join("rounds.jsonl");
    let options = ProducerOptions {
        rounds_log: Some(log.clone()),
        ..options(temp.path())
    };
    let (ended, events, seen) = run(&options, |_, _| {});
    let summary = ended.unwrap();
    assert_eq!((summary.requests, summary.leaked_blocks, seen.mismatched), (40, 0, 0));
    assert!(seen.verified > 0 && summary.bytes_h2d > 0 && summary.completions.done >= summary.plans);
    assert_eq!((summary.completions.failed, summary.completions.conflicting), (0, 0));
    let latency = summary.latency_us.publish_to_done;
    assert!(0.05 < latency.p50 && latency.p50 <= latency.p99 && latency.p99 <= latency.p999);
    assert!(
        matches!(&events[0], Event::Ready { channel, incarnation: 1, .. } if channel == "engine"),
        "{events:?}"
    );
    assert_eq!(
        events
            .iter()
            .filter(|event| matches!(event, Event::Attached { .. }))
            .count(),
        2
    );
    assert_eq!(events.last(), Some(&Event::Summary(Box::new(summary.clone()))));
    let line = serde_json::to_string(&events[0]).unwrap();
    assert!(line.starts_with("{\"event\":\"ready\",\"pid\":"), "{line}");
    assert_eq!(
        std::fs::read_to_string(log).unwrap().lines().count() as u64,
        summary.rounds
    );
    for file in ["producer.lock", "producer.sock"] {
        assert!(!channel(temp.path()).path_of(file).exists(), "{file} is left");
    }
}

#[test]
fn x27_a_stop_drains_what_is_in_flight_and_frees_every_block() {
    let temp = tempfile::tempdir().unwrap();
    let mut options = options(temp.path());
    options.workload.requests = None;
    options.workload.rounds = 1000;
    let stop_when_running = |event: &Event, stop: &AtomicBool| {
        stop.fetch_or(
            matches!(event, Event::Progress { plans, .. } if *plans > 0),
            Ordering::Relaxed,
        );
    };
    let (ended, _, seen) = run(&options, stop_when_running);
    let summary = ended.unwrap();
    assert_eq!((summary.leaked_blocks, seen.mismatched), (0, 0));
    assert!(summary.requests < 400, "{}", summary.requests);
}

#[test]
fn x21_named_segments_go_with_a_normal_exit() {
    let temp = tempfile::tempdir().unwrap();
    let shm = tempfile::tempdir_in("/dev/shm").unwrap();
    let residence = Residence::Persistent(shm.path().to_owned());
    let options = ProducerOptions {
        residence,
        ..options(temp.path())
    };
    let (ended, _, seen) = run(&options, |event, _| {
        if matches!(event, Event::Attached { rank: 0, .. }) {
            assert!(std::fs::read_dir(shm.path()).unwrap().count() >= 3);
        }
    });
    assert_eq!((ended.unwrap().leaked_blocks, seen.mismatched), (0, 0));
    assert_eq!(std::fs::read_dir(shm.path()).unwrap().count(), 0);
}

#[test]
fn x26_named_segments_are_recovered_only_for_the_geometry_that_they_were_made_for() {
    let temp = tempfile::tempdir().unwrap();
    let [shm, crashed] = [(); 2].map(|()| tempfile::tempdir_in("/dev/shm").unwrap());
    let with = |folder: &Path, geometry| ProducerOptions {
        residence: Residence::Persistent(folder.to_owned()),
        geometry,
        attach_patience_ms: 0,
        ..options(temp.path())
    };
    let files = ["engine.control", "engine.pool"];
    // What SIGKILL would leave: the files as they were while the channel was in use.
    let keep = |from: &Path, to: &Path| {
        for file in files {
            std::fs::copy(from.join(file), to.join(file)).unwrap();
        }
    };
    let ready = |folder: &Path, geometry, then: &dyn Fn()| {
        let mut recovered = false;
        let ended = run_producer(&with(folder, geometry), &AtomicBool::new(false), &mut |event| {
            then();
            recovered |= matches!(event, Event::Recovered { .. });
        });
        assert!(matches!(ended, Err(ProcessError::NoWorkers { .. })), "{ended:?}");
        recovered
    };
    assert!(!ready(shm.path(), geometry(), &|| keep(shm.path(), crashed.path())));
    // Every size is the same.
    let mut other = geometry();
    other.model = "tuned".into();
    keep(crashed.path(), shm.path());
    assert!(!ready(shm.path(), other, &|| {}));
    keep(crashed.path(), shm.path());
    assert!(ready(shm.path(), geometry(), &|| {}));
}

#[test]
fn x20_a_second_producer_is_refused_with_the_pid_of_the_first() {
    let temp = tempfile::tempdir().unwrap();
    let _first = RoleLock::acquire(&channel(temp.path()), Role::Producer, ProcessEpoch(1), Duration::ZERO).unwrap();
    let stop = AtomicBool::new(false);
    let message = run_producer(&options(temp.path()), &stop, &mut |_| {})
        .unwrap_err()
        .to_string();
    assert!(message.contains(&format!("pid {}", std::process::id())), "{message}");
}

#[test]
fn x20_ranks_that_do_not_come_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let options = ProducerOptions {
        attach_patience_ms: 0,
        ..options(temp.path())
    };
    let message = run_producer(&options, &AtomicBool::new(false), &mut |_| {})
        .unwrap_err()
        .to_string();
    assert!(
        message.starts_with("no worker attached for rank 0, 1 within"),
        "{message}"
    );
    assert!(
        !temp.path().join("engine").exists(),
        "the channel's folder goes with its last process"
    );
}

#[test]
fn r20_a_worker_of_another_geometry_is_refused_on_both_sides_with_the_field() {
    let temp = tempfile::tempdir().unwrap();
    let stop = AtomicBool::new(false);
    let events = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        let mut worker = Worker::new(temp.path(), 1);
        worker.geometry.groups[0].block_tokens = 32;
        let refused = scope.spawn(move || worker.attach(Rank(1)).err().unwrap().to_string());
        let summary = run_producer(&options(temp.path()), &stop, &mut |event| {
            stop.fetch_or(matches!(event, Event::Refused { .. }), Ordering::Relaxed);
            events.lock().unwrap().push(event);
        });
        assert_eq!(summary.unwrap().requests, 0);
        let message = refused.join().unwrap();
        assert!(message.contains("block_tokens is [32], expected [16]"), "{message}");
    });
    let events = events.into_inner().unwrap();
    let says =
        |event: &Event| matches!(event, Event::Refused { rank: 1, reason, .. } if reason.contains("block_tokens"));
    assert!(events.iter().any(says), "{events:?}");
}
