//! The worker process: attach, open the device, run the core, wait, and outlive its producer (X20, X23, X25).

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_utils::Backoff;
use kvsluice_layout::capability::{Capability, CapabilityError, SelectionUnit, SourceKinds, negotiate};
use kvsluice_layout::export::{RequestExport, ResidencyExport};
use kvsluice_layout::geometry::{Geometry, GeometryError};
use kvsluice_layout::ids::{GroupId, Position, ProcessEpoch, Rank};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::region::{
    PRODUCER_SLEEPING_AT, PRODUCER_WAKE_AT, RegionError, RegionMap, WORKER_SLEEPING_AT, WORKER_WAKE_AT, layout_hash,
};
use kvsluice_transport::attach::{
    Accepted, AttachError, Call, Hello, Holdings, Joining, Limits, Mismatch, Offer, PROTOCOL, Segments, Surviving,
    Survivor, SurvivorState, Verdict,
};
use kvsluice_transport::clean::clean;
use kvsluice_transport::clock::{Clock, Monotonic};
use kvsluice_transport::link::{Link, LinkError, Listener};
use kvsluice_transport::liveness::Life;
use kvsluice_transport::lock::{LockError, RoleLock};
use kvsluice_transport::members::read_member;
use kvsluice_transport::names::{ChannelName, ChannelNameError, Role};
use kvsluice_transport::peers::Peers;
use kvsluice_transport::port::Port;
use kvsluice_transport::ring::RingShape;
use kvsluice_transport::runtime_dir::{RuntimeDir, RuntimeDirError};
use kvsluice_transport::segment::{Mapping, MappingMut};
use kvsluice_transport::shared::Shared;
use kvsluice_transport::wait::{Futexes, Idle, Waiter, wake_sleepers};
use kvsluice_transport::watcher::{DoorWatch, PeerWatch, Watcher};
use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::copy::{ChunkError, HostPool, pool_chunk_ends};
use crate::device::adversary::Adversary;
use crate::device::host::HostDevice;
use crate::device::{Access, Device, DeviceSpec, HostSpan, OpenError, RegisterError};
use crate::tables::{TableLimits, TableStore};
use crate::worker::{Step, Verifier, Verify, Worker, WorkerCounts, WorkerError, WorkerSpec};

/// Bytes of the private buffer that verification reads into.
const VERIFY_BYTES: usize = 4 << 20;
/// Patience between two looks at the stop flag while idle.
const LOOK: Duration = Duration::from_millis(50);
/// How often progress is told.
const PROGRESS: Duration = Duration::from_millis(200);

/// What a worker process is started with.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// Name of the channel.
    pub channel: String,
    /// Where channels live; `None` for the default.
    pub runtime_dir: Option<PathBuf>,
    /// The rank.
    pub rank: Rank,
    /// The geometry that this rank serves; the producer's must be equal.
    pub geometry: Geometry,
    /// Copy threads of the host device.
    pub copy_threads: usize,
    /// Seed of the adversarial host device.
    pub adversary: Option<u64>,
    /// How much is verified.
    pub verify: Verify,
    /// Largest registered chunk of the pool in bytes (X31).
    pub chunk_bytes_max: u64,
    /// How long to wait for a producer at start.
    pub attach_patience: Duration,
    /// How long an operation may run before the device counts as lost. Zero: for ever.
    pub watchdog: Duration,
    /// Most requests with tables at a time.
    pub requests_max: u32,
}

/// What a worker process tells.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// Attached; plans are taken from here on.
    Ready {
        /// This process.
        pid: u32,
        /// Its rank.
        rank: u32,
        /// Its device.
        device: String,
    },
    /// From time to time.
    Progress {
        /// Its rank.
        rank: u32,
        /// Bytes compared so far.
        verified_bytes: u64,
        /// Bytes among them that were something else.
        mismatched_bytes: u64,
        /// Records that were read a second time (X12): 0.
        repeated: u64,
    },
    /// The producer is proven dead. What it published is executed; a new producer may take over.
    ProducerLost {
        /// Its rank.
        rank: u32,
        /// The producer's process, 0 where it cannot be told.
        pid: u32,
        /// Position behind the last record that this rank has read: what a new producer must know of.
        consumed: u64,
    },
    /// A new producer has taken the channel over.
    Adopted {
        /// Its rank.
        rank: u32,
        /// The new incarnation.
        incarnation: u64,
    },
    /// A new producer starts cold: this worker's device is given up, and it attaches anew.
    Drained {
        /// Its rank.
        rank: u32,
        /// Why, in the producer's words.
        reason: String,
    },
    /// The last event.
    Summary {
        /// Its rank.
        rank: u32,
        /// What was counted.
        operations: u64,
        /// Bytes copied from the host.
        bytes_h2d: u64,
        /// Bytes copied to the host.
        bytes_d2h: u64,
        /// Bytes moved inside the device.
        bytes_d2d: u64,
        /// Fragments submitted.
        fragments: u64,
        /// Bytes compared.
        verified_bytes: u64,
        /// Bytes that were something else.
        mismatched_bytes: u64,
        /// Records that were read a second time (X12): 0.
        repeated: u64,
    },
}

/// Why a worker process ends with an error.
#[derive(Debug, Error)]
pub enum ProcessError {
    /// Channel name.
    #[error(transparent)]
    Name(#[from] ChannelNameError),
    /// Runtime folder.
    #[error(transparent)]
    RuntimeDir(#[from] RuntimeDirError),
    /// The rank is taken.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// No producer, or one that does not fit.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The worker's own socket.
    #[error("the worker's socket: {0}")]
    Link(#[from] LinkError),
    /// The geometry.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// Sizes of the regions.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Cutting the pool for registration.
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// The device.
    #[error(transparent)]
    Device(#[from] OpenError),
    /// Pinning.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The core stopped.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// The system.
    #[error("{step}: {source}")]
    System {
        /// What was tried.
        step: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// Stopped before it was attached.
    #[error("stopped before a producer took this worker in")]
    Stopped,
    /// The producer died while this worker attached.
    #[error("the producer died while this worker attached to it; start a producer")]
    ProducerGone,
    /// A new producer goes on without this worker's device.
    #[error("a new producer starts cold: {reason}; start this worker again")]
    Drained {
        /// Why.
        reason: String,
    },
}

impl ProcessError {
    /// True where the producer went away before this worker was its own: the next one can be attached to.
    fn is_producer_gone(&self) -> bool {
        matches!(self, Self::ProducerGone | Self::Attach(AttachError::Link { .. }))
    }
}

/// A random process epoch, never 0 (X22).
///
/// # Errors
/// The system has no randomness.
pub fn random_epoch() -> Result<ProcessEpoch, ProcessError> {
    loop {
        let epoch = getrandom::u64().map_err(|error| ProcessError::System {
            step: "draw a process epoch",
            source: std::io::Error::other(error.to_string()),
        })?;
        if epoch != 0 {
            return Ok(ProcessEpoch(epoch));
        }
    }
}

/// Runs a worker until `stop` is set and nothing is open, or until it cannot go on.
///
/// # Errors
/// [`ProcessError`]; everything that was accepted is answered by then, or the device is lost.
pub fn run_worker(
    options: &WorkerOptions,
    stop: &AtomicBool,
    tell: &mut dyn FnMut(Event),
) -> Result<WorkerCounts, ProcessError> {
    let clock = Monotonic::default();
    let patience_ns = options.attach_patience.as_nanos() as u64;
    let mut until_ns = clock.now_ns().saturating_add(patience_ns);
    let mut counts = WorkerCounts::default();
    let ended = loop {
        match serve(options, stop, (clock, until_ns), &mut counts, tell) {
            Err(ProcessError::Drained { reason }) if !stop.load(Ordering::Relaxed) => {
                // X25: what was accepted goes with its device; the worker attaches anew, under a new epoch.
                let rank = options.rank.0;
                tell(Event::Drained { rank, reason });
                until_ns = clock.now_ns().saturating_add(patience_ns);
            }
            Err(gone) if gone.is_producer_gone() && clock.now_ns() < until_ns && !stop.load(Ordering::Relaxed) => {
                tracing::debug!(rank = options.rank.0, error = %gone, "the next producer is waited for");
            }
            ended => break ended,
        }
    };
    leave(options);
    tell(Event::Summary {
        rank: options.rank.0,
        operations: counts.done + counts.failed + counts.rejected + counts.superseded,
        bytes_h2d: counts.bytes_h2d,
        bytes_d2h: counts.bytes_d2h,
        bytes_d2d: counts.bytes_d2d,
        fragments: counts.fragments,
        verified_bytes: counts.verified_bytes,
        mismatched_bytes: counts.mismatched_bytes,
        repeated: counts.repeated,
    });
    ended.map(|()| counts)
}

/// X27: the last process of a channel takes its folder away. Where another one lives, this does nothing.
fn leave(options: &WorkerOptions) {
    let cleaned = || -> Result<(), Box<dyn std::error::Error>> {
        let runtime = RuntimeDir::open(&RuntimeDir::choose(options.runtime_dir.as_deref()), &Peers::default())?;
        clean(&runtime, &ChannelName::new(&options.channel)?, None, random_epoch()?)?;
        Ok(())
    };
    if let Err(error) = cleaned() {
        tracing::debug!(%error, "the channel's folder stays");
    }
}

/// Attaches once and works until `stop` is set, or until this attachment is over. Adds what was done to `total`.
fn serve(
    options: &WorkerOptions,
    stop: &AtomicBool,
    (clock, until_ns): (Monotonic, u64),
    total: &mut WorkerCounts,
    tell: &mut dyn FnMut(Event),
) -> Result<(), ProcessError> {
    let map = GeometryMap::new(&options.geometry)?;
    let epoch = random_epoch()?;
    let dir = RuntimeDir::open(&RuntimeDir::choose(options.runtime_dir.as_deref()), &Peers::default())?;
    let name = ChannelName::new(&options.channel)?;
    let lock = RoleLock::acquire_in(&dir, &name, Role::Rank(options.rank), epoch, Duration::from_millis(200))?;
    let mut survivor = Survivor::new(Listener::bind(&lock)?, layout_hash(), Limits::default())?;
    let offer = join(options, &lock, epoch, &mut survivor, stop, (&clock, until_ns))?;
    let (offer, segments, regions) = fit(options, offer, &map, epoch)?;
    let opened = open_device(options, &map, &segments, &regions)?;
    let accepted = offer.accept()?;
    let Segments {
        control,
        pool,
        rank: segment,
    } = segments;
    let first = seat(&control, &regions, options.rank, epoch, &accepted, stop)?;
    let shape = RingShape {
        at: regions.ring_at(),
        bytes: regions.ring_bytes(),
    };
    let producer = accepted.welcome.producer_epoch;
    let mut port = Port::new(
        control,
        segment.clone(),
        shape,
        LeaseTable::new(&map),
        epoch,
        producer,
        first,
    );
    port.set_pinned(pool.size() as u64);
    if !source_kinds(&map).copy {
        port.refuse_copy_sources();
    }
    let device = opened.device.name().to_owned();
    let worker = Worker::new(port, map, opened.device, opened.spec);
    let mut process = Process::new(worker, pool, segment, survivor, accepted, clock, options.rank)?;
    tell(Event::Ready {
        pid: std::process::id(),
        rank: options.rank.0,
        device,
    });
    let ended = process.run(stop, tell);
    process.tell_progress(tell);
    total.add(&process.worker.counts());
    ended
}

/// The door of a worker that has not attached: it holds nothing that a producer could take over, and says so at once
/// rather than letting the producer wait for it.
struct NothingHeld;

impl SurvivorState for NothingHeld {
    fn holdings(&mut self, _: &Call) -> Result<Option<Holdings<'_>>, Mismatch> {
        Ok(None)
    }
}

/// What this build can do with a geometry: copy needs a gather region in every group.
fn source_kinds(map: &GeometryMap) -> SourceKinds {
    let copy = map.geometry().groups.iter().all(|group| group.gather_blocks > 0);
    SourceKinds {
        source_only: true,
        copy,
    }
}

fn join(
    options: &WorkerOptions,
    lock: &RoleLock,
    epoch: ProcessEpoch,
    survivor: &mut Survivor,
    stop: &AtomicBool,
    (clock, until_ns): (&Monotonic, u64),
) -> Result<Offer, ProcessError> {
    let map = GeometryMap::new(&options.geometry)?;
    let capability = Capability::of(&options.geometry, SelectionUnit::Block, source_kinds(&map), epoch);
    loop {
        survivor.poll(clock.now_ns(), &mut NothingHeld)?;
        let hello = Hello {
            protocol: PROTOCOL,
            layout_hash: layout_hash(),
            rank: options.rank,
            worker_epoch: epoch,
            pid: std::process::id(),
            capability: serde_json::to_value(&capability).unwrap_or_default(),
        };
        let left_ns = until_ns.saturating_sub(clock.now_ns());
        let joined = Joining::start(lock, hello, clock.now_ns(), left_ns).and_then(|joining| joining.wait(clock));
        match joined {
            // The two sides may be started in any order.
            Err(AttachError::NoProducer { .. }) if clock.now_ns() < until_ns && !stop.load(Ordering::Relaxed) => {
                std::thread::sleep(Duration::from_millis(2));
            }
            joined => return Ok(joined?),
        }
    }
}

/// Checks that the producer's welcome fits this worker, field by field, and maps the segments.
fn fit(
    options: &WorkerOptions,
    offer: Offer,
    map: &GeometryMap,
    epoch: ProcessEpoch,
) -> Result<(Offer, Segments, RegionMap), ProcessError> {
    let checked = (|| {
        let theirs = serde_json::from_value(offer.welcome.capability.clone())
            .map_err(|error| Mismatch::new("capability", error, "a capability", "run one release on both sides"))?;
        let ours = Capability::of(&options.geometry, SelectionUnit::Block, source_kinds(map), epoch);
        negotiate(&ours, &theirs)
            .map_err(|error: CapabilityError| Mismatch::new(error.field, error.theirs, error.ours, error.remedy))?;
        let slot_bytes = map.writeback_slot_bytes();
        let slots = offer.welcome.writeback_bytes / slot_bytes.max(1);
        let ring = offer.welcome.ring_lines.saturating_mul(64);
        let regions = RegionMap::new(&options.geometry, ring as usize, slots as usize, slot_bytes as usize)
            .map_err(|error| Mismatch::new("ring lines", offer.welcome.ring_lines, error, "ask for another ring"))?;
        let segments = offer.open()?;
        let sizes = [
            ("control bytes", segments.control.size(), regions.control_bytes()),
            ("pool bytes", segments.pool.size(), map.pool_bytes() as usize),
            ("rank bytes", segments.rank.size(), regions.rank_bytes()),
        ];
        for (field, found, least) in sizes {
            if found < least {
                let remedy = "both sides must derive equal sizes from one geometry";
                return Err(Mismatch::new(field, found, format!("at least {least}"), remedy));
            }
        }
        Ok((segments, regions))
    })();
    match checked {
        Ok((segments, regions)) => Ok((offer, segments, regions)),
        Err(mismatch) => Err(offer.decline(mismatch).into()),
    }
}

struct Opened {
    device: HostDevice,
    spec: WorkerSpec,
}

fn open_device(
    options: &WorkerOptions,
    map: &GeometryMap,
    segments: &Segments,
    regions: &RegionMap,
) -> Result<Opened, ProcessError> {
    let blocks_max = map
        .geometry()
        .groups
        .iter()
        .map(|group| group.device_blocks)
        .max()
        .unwrap_or(1);
    let tables = TableLimits {
        requests_max: options.requests_max,
        blocks_max,
    };
    let spec = DeviceSpec::allocate(map.device_bytes(), TableStore::new(map, tables).spec());
    let adversary = options.adversary.map_or_else(Adversary::default, |seed| {
        // Each rank has its own order of events.
        Adversary::late(seed ^ u64::from(options.rank.0) << 32)
    });
    let mut device = HostDevice::open(spec, options.copy_threads.max(1), adversary)?;
    let ends = pool_chunk_ends(map, options.chunk_bytes_max)?;
    let pool_bytes = ends.last().copied().unwrap_or(0);
    let base = segments.pool.base_ptr().cast_mut();
    // SAFETY: `Process` keeps the mapping until after the worker, and with it the device, is dropped; `fit` has checked
    // its size against the geometry; a read-only span is never written.
    let span = unsafe { HostSpan::new(base, pool_bytes, Access::ReadOnly) };
    let pool = HostPool::new(device.register_all(span, &ends)?, &ends);
    let slots = regions.write_back_slots() as u64;
    let slot_bytes = regions.write_back_slot_bytes() as u64;
    let write_back = match regions.write_back_at(0) {
        Some(at) => {
            let ends = [slots * slot_bytes];
            // SAFETY: the area lies inside the rank's segment, whose size `fit` has checked and whose mapping `Process`
            // keeps until after the device; only the device and this process's atomics touch it.
            let span = unsafe { HostSpan::new(segments.rank.base_mut_ptr().add(at), ends[0], Access::ReadWrite) };
            Some(HostPool::new(device.register_all(span, &ends)?, &ends))
        }
        None => None,
    };
    let verifier = Verifier::new(options.verify, &mut device, VERIFY_BYTES)?;
    let spec = WorkerSpec {
        rank: options.rank,
        pool,
        write_back,
        write_back_slots: (slots, slot_bytes),
        tables,
        verifier,
        watchdog_ns: options.watchdog.as_nanos() as u64,
    };
    Ok(Opened { device, spec })
}

/// Waits until the producer has put this worker at its rank (X24), and returns the first record that it answers.
fn seat(
    control: &Mapping,
    regions: &RegionMap,
    rank: Rank,
    epoch: ProcessEpoch,
    accepted: &Accepted,
    stop: &AtomicBool,
) -> Result<Position, ProcessError> {
    loop {
        let member = read_member(control, regions, rank);
        if member.epoch == epoch {
            return Ok(member.first);
        }
        if stop.load(Ordering::Relaxed) {
            return Err(ProcessError::Stopped);
        }
        if accepted.producer.is_dead() {
            return Err(ProcessError::ProducerGone);
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// A running worker process.
struct Process {
    // Dropped in this order: the worker, with its device, before the memory that the device reads and writes.
    worker: Worker<Mapping, MappingMut, HostDevice>,
    _pool: Mapping,
    segment: MappingMut,
    control: Mapping,
    door: Door,
    survivor: Survivor,
    knocks: DoorWatch,
    producer: PeerWatch,
    // Kept open: its end would make this worker suspect (X23).
    link: Link,
    watcher: Watcher,
    waiter: Waiter<Futexes>,
    clock: Monotonic,
    /// Somebody was at the door since it was last opened.
    knocked: bool,
    /// The producer is proven dead, and nobody has taken over.
    lost: bool,
}

/// What the next producer needs of this worker (X25).
struct Door {
    surviving: Surviving,
    control: OwnedFd,
    pool: OwnedFd,
    segment: OwnedFd,
    residency: Vec<u8>,
    /// The process that this worker works for, unless it is proven dead.
    producer_lives: Option<u32>,
}

impl SurvivorState for Door {
    fn holdings(&mut self, call: &Call) -> Result<Option<Holdings<'_>>, Mismatch> {
        // Its own producer called while this worker still knocked at its door.
        if call.producer_epoch == self.surviving.producer_epoch {
            return Ok(None);
        }
        // X20: the lock of a producer that lives may have been deleted from under it; its proof cannot.
        if let Some(pid) = self.producer_lives {
            return Err(Mismatch::occupied("producer", format!("pid {}", call.pid), Some(pid)));
        }
        Ok(Some(Holdings {
            surviving: self.surviving.clone(),
            control: self.control.as_fd(),
            pool: self.pool.as_fd(),
            rank: self.segment.as_fd(),
            residency: self.residency.clone(),
        }))
    }
}

impl Process {
    fn new(
        worker: Worker<Mapping, MappingMut, HostDevice>,
        pool: Mapping,
        segment: MappingMut,
        survivor: Survivor,
        accepted: Accepted,
        clock: Monotonic,
        rank: Rank,
    ) -> Result<Self, ProcessError> {
        let system = |step| move |source| ProcessError::System { step, source };
        let waiter = Waiter::new(Futexes, Idle::default());
        let bell = waiter.bell().clone();
        let watcher = Watcher::start(Arc::new(move || bell.ring())).map_err(system("start the watcher"))?;
        let producer = watcher
            .peer(accepted.producer, &accepted.link)
            .map_err(system("watch the producer"))?;
        let knocks = watcher
            .door(survivor.ready())
            .map_err(system("watch the worker's socket"))?;
        let welcome = accepted.welcome;
        let surviving = Surviving {
            rank,
            worker_epoch: worker.port().epoch(),
            pid: std::process::id(),
            channel: welcome.channel,
            incarnation: welcome.incarnation,
            producer_epoch: welcome.producer_epoch,
            mode: welcome.mode,
        };
        let (control, pool_fd) = (accepted.control, accepted.pool);
        let door = Door {
            surviving,
            control,
            pool: pool_fd,
            segment: accepted.rank,
            residency: Vec::new(),
            producer_lives: None,
        };
        Ok(Self {
            control: worker.port().control().clone(),
            worker,
            _pool: pool,
            segment,
            door,
            survivor,
            knocks,
            producer,
            link: accepted.link,
            watcher,
            waiter,
            clock,
            knocked: false,
            lost: false,
        })
    }

    fn run(&mut self, stop: &AtomicBool, tell: &mut dyn FnMut(Event)) -> Result<(), ProcessError> {
        let mut answers = self.worker.port().answers();
        let mut told_ns = self.clock.now_ns();
        let mut faults = (0, 0);
        let backoff = Backoff::new();
        loop {
            let step = self.worker.step(self.clock.now_ns());
            if self.worker.port().answers() != answers {
                answers = self.worker.port().answers();
                // X29: once per step, after its terminals.
                wake_sleepers(
                    &Futexes,
                    &self.segment,
                    WORKER_WAKE_AT,
                    [(&self.control, PRODUCER_SLEEPING_AT)],
                );
            }
            let step = step?;
            if step != Step::Running && self.worker.open_operations() == 0 && stop.load(Ordering::Relaxed) {
                self.notice_death(tell); // a supervisor's stop may overtake the watcher
                return Ok(());
            }
            let now_ns = self.clock.now_ns();
            let counts = self.worker.counts();
            // A fault is told at once: this process may be killed before the next time.
            let faulty = std::mem::replace(&mut faults, (counts.mismatched_bytes, counts.repeated)) != faults;
            if faulty || now_ns.saturating_sub(told_ns) > PROGRESS.as_nanos() as u64 {
                told_ns = now_ns;
                self.tell_progress(tell);
            }
            match step {
                Step::Worked => backoff.reset(),
                // The device's own threads need the core more than this loop does.
                Step::Running if backoff.is_completed() => std::thread::sleep(Duration::from_micros(20)),
                Step::Running => backoff.snooze(),
                Step::Idle => self.idle(stop),
                // Only a handshake, which comes through the door, moves this worker on.
                Step::AwaitHandshake => std::thread::sleep(Duration::from_millis(1)),
            }
            self.look_around(now_ns, tell)?;
        }
    }

    fn tell_progress(&self, tell: &mut dyn FnMut(Event)) {
        let counts = self.worker.counts();
        tell(Event::Progress {
            rank: self.door.surviving.rank.0,
            verified_bytes: counts.verified_bytes,
            mismatched_bytes: counts.mismatched_bytes,
            repeated: counts.repeated,
        });
    }

    /// Sleeps until a record, a knock, a death or the stop flag.
    fn idle(&mut self, stop: &AtomicBool) {
        let until_ns = self.clock.now_ns().saturating_add(LOOK.as_nanos() as u64);
        let (port, knocks, producer, lost) = (self.worker.port(), &self.knocks, &self.producer, self.lost);
        let peers = [(self.control.clone(), PRODUCER_WAKE_AT)];
        let knocked = &mut self.knocked;
        self.waiter
            .wait(&self.segment, WORKER_SLEEPING_AT, &peers, &self.clock, until_ns, || {
                *knocked |= knocks.knocked();
                let died = !lost && producer.life() == Life::Dead;
                (port.has_next() || *knocked || died || stop.load(Ordering::Relaxed)).then_some(())
            });
    }

    /// Says once that the producer has ended, if the kernel says so.
    fn notice_death(&mut self, tell: &mut dyn FnMut(Event)) {
        let proof = self.producer.proof();
        if !self.lost && proof.is_dead() {
            self.lost = true; // X25: it changes nothing for what is committed
            let (rank, pid) = (self.door.surviving.rank.0, proof.holder().shown_pid().unwrap_or(0));
            let consumed = self.worker.port().cursor().get();
            tell(Event::ProducerLost { rank, pid, consumed });
        }
    }

    /// Answers the door, and notices the producer's death.
    fn look_around(&mut self, now_ns: u64, tell: &mut dyn FnMut(Event)) -> Result<(), ProcessError> {
        let rank = self.door.surviving.rank.0;
        if self.producer.life() == Life::Dead {
            self.notice_death(tell);
        }
        self.knocked |= self.knocks.knocked();
        // A caller's deadlines pass without a knock: while the producer is gone the door is looked at every time.
        if !std::mem::take(&mut self.knocked) && !self.lost {
            return Ok(());
        }
        self.door.residency = export(&self.worker);
        let proof = self.producer.proof();
        self.door.producer_lives = (!proof.is_dead()).then(|| proof.holder().shown_pid().unwrap_or(0));
        for verdict in self.survivor.poll(now_ns, &mut self.door)? {
            match verdict {
                Verdict::Adopted {
                    incarnation,
                    producer_epoch,
                    link,
                    producer,
                } => {
                    let system = |source| ProcessError::System {
                        step: "watch the producer",
                        source,
                    };
                    self.producer = self.watcher.peer(producer, &link).map_err(system)?;
                    self.link = link;
                    self.lost = false;
                    self.door.surviving.incarnation = incarnation;
                    self.door.surviving.producer_epoch = producer_epoch;
                    self.worker.port_mut().accept_producer(producer_epoch); // X25
                    tell(Event::Adopted {
                        rank,
                        incarnation: incarnation.0,
                    });
                }
                Verdict::Drain { reason } => return Err(ProcessError::Drained { reason }),
            }
        }
        Ok(())
    }
}

/// What this rank's device holds, for a new producer.
fn export(worker: &Worker<Mapping, MappingMut, HostDevice>) -> Vec<u8> {
    let tables = worker.tables();
    let requests = tables.export().map(|request| RequestExport {
        request: request.request().to_vec(),
        epoch: request.epoch(),
        map_revision: request.map_revision(),
        selection_revision: request.selection_revision(),
        digest: request.digest(),
        owned: (0..tables.groups())
            .map(|group| request.owned(GroupId(group)).to_vec())
            .collect(),
    });
    let export = ResidencyExport {
        pool_generation: worker.port().generation(),
        digest: tables.digest(),
        requests: requests.collect(),
    };
    serde_json::to_vec(&export).unwrap_or_default()
}
