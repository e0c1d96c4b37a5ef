//! The worker process: attach, open the device, run the core, wait, and outlive its producer (X20, X23, X25).

mod audit;
mod error;
mod event;
mod join;
mod options;

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crossbeam_utils::Backoff;
use kvsluice_layout::export::ResidencyExport;
use kvsluice_layout::ids::{ProcessEpoch, Rank};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::region::{
    PRODUCER_SLEEPING_AT, PRODUCER_WAKE_AT, WORKER_SLEEPING_AT, WORKER_WAKE_AT, layout_hash,
};
use kvsluice_transport::attach::{
    Accepted, Call, Holdings, Limits, Mismatch, Segments, Surviving, Survivor, SurvivorState, Verdict,
};
use kvsluice_transport::clean::clean;
use kvsluice_transport::clock::{Clock, Monotonic};
use kvsluice_transport::link::{Link, Listener};
use kvsluice_transport::liveness::Life;
use kvsluice_transport::lock::RoleLock;
use kvsluice_transport::names::{ChannelName, Role};
use kvsluice_transport::peers::Peers;
use kvsluice_transport::port::Port;
use kvsluice_transport::ring::RingShape;
use kvsluice_transport::runtime_dir::{RuntimeDir, RuntimeDirError};
use kvsluice_transport::segment::{Mapping, MappingMut};
use kvsluice_transport::shared::Shared;
use kvsluice_transport::wait::{Futexes, Idle, Waiter, wake_sleepers};
use kvsluice_transport::watcher::{DoorWatch, PeerWatch, Watcher};

use crate::device::Device;
use crate::device::host::HostDevice;
use crate::worker::{Step, Verify, Worker, WorkerCounts};

pub use error::ProcessError;
pub use event::Event;
pub use options::WorkerOptions;

use audit::Audit;
use join::{fit, join, open_device, seat, source_kinds};

/// Patience between two looks at the stop flag while idle.
const LOOK: Duration = Duration::from_millis(50);
/// How often progress is told.
const PROGRESS: Duration = Duration::from_millis(200);

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
            // Asked to stop while it is attached to nobody: it holds nothing.
            Err(error) if error.is_unattached() && stop.load(Ordering::Relaxed) => break Ok(()),
            // X25: what was accepted goes with its device; the worker attaches anew, under a new epoch. X27: so does one that
            // nobody can find in its folder any more.
            Err(away @ (ProcessError::Drained { .. } | ProcessError::Gone(_))) => {
                let reason = match away {
                    ProcessError::Drained { reason } => reason,
                    gone => gone.to_string(),
                };
                let rank = options.rank.0;
                tell(Event::Drained { rank, reason });
                until_ns = clock.now_ns().saturating_add(patience_ns);
            }
            Err(gone) if gone.is_producer_gone() && clock.now_ns() < until_ns => {
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
        verified_table_bytes: counts.verified_table_bytes,
        mismatched_bytes: counts.mismatched_bytes,
        repeated: counts.repeated,
    });
    ended.map(|()| counts)
}

/// The folder where the channel is, with the users who may take part (X20).
fn runtime_of(options: &WorkerOptions) -> Result<RuntimeDir, RuntimeDirError> {
    let peers = Peers::with(options.allowed_uids.iter().copied());
    RuntimeDir::open(&RuntimeDir::choose(options.runtime_dir.as_deref()), &peers)
}

/// X27: the last process of a channel takes its folder away. Where another one lives, this does nothing.
fn leave(options: &WorkerOptions) {
    let cleaned = || -> Result<(), Box<dyn std::error::Error>> {
        let runtime = runtime_of(options)?;
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
    let dir = runtime_of(options)?;
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
    let audit = (options.verify == Verify::Full).then(|| Audit::new(opened.device.engine(), map.clone(), options.rank));
    let worker = Worker::new(port, map, opened.device, opened.spec);
    let mut process = Process::new(worker, pool, segment, survivor, accepted, clock, options.rank)?;
    process.audit = audit;
    tell(Event::Ready {
        pid: std::process::id(),
        rank: options.rank.0,
        device,
    });
    let ended = process.run(&lock, stop, tell);
    process.tell_progress(tell);
    total.add(&process.counts());
    ended
}

/// A running worker process.
struct Process {
    // Dropped in this order: the worker, with its device, before the memory that the device reads and writes.
    worker: Worker<Mapping, MappingMut, HostDevice>,
    _pool: Mapping,
    segment: MappingMut,
    control: Mapping,
    /// Looks through the device's tables, where everything is verified.
    audit: Option<Audit>,
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
    /// The process that this worker works for, unless it is proven dead.
    producer_lives: Option<u32>,
}

/// Who answers at the door.
struct Doorkeeper<'a> {
    door: &'a Door,
    worker: &'a Worker<Mapping, MappingMut, HostDevice>,
}

impl SurvivorState for Doorkeeper<'_> {
    fn holdings(&mut self, call: &Call) -> Result<Option<Holdings<'_>>, Mismatch> {
        // Its own producer called while this worker still knocked at its door.
        if call.producer_epoch == self.door.surviving.producer_epoch {
            return Ok(None);
        }
        // X20: the lock of a producer that lives may have been deleted from under it; its proof cannot.
        if let Some(pid) = self.door.producer_lives {
            return Err(Mismatch::occupied("producer", format!("pid {}", call.pid), Some(pid)));
        }
        Ok(Some(Holdings {
            surviving: self.door.surviving.clone(),
            control: self.door.control.as_fd(),
            pool: self.door.pool.as_fd(),
            rank: self.door.segment.as_fd(),
        }))
    }

    fn residency(&mut self) -> Vec<u8> {
        export(self.worker)
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
            producer_lives: None,
        };
        Ok(Self {
            control: worker.port().control().clone(),
            worker,
            _pool: pool,
            segment,
            audit: None,
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

    fn run(&mut self, lock: &RoleLock, stop: &AtomicBool, tell: &mut dyn FnMut(Event)) -> Result<(), ProcessError> {
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
            let audited = match &mut self.audit {
                Some(audit) if !self.worker.is_resetting() => {
                    audit.look(self.worker.tables());
                    audit.is_idle()
                }
                _ => true,
            };
            let is_quiet = step != Step::Running && self.worker.open_operations() == 0 && audited;
            if is_quiet && stop.load(Ordering::Relaxed) {
                self.notice_death(tell); // a supervisor's stop may overtake the watcher
                return Ok(());
            }
            if is_quiet && self.lost {
                lock.check_still_there().map_err(ProcessError::Gone)?;
            }
            let now_ns = self.clock.now_ns();
            let counts = self.counts();
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

    /// What the worker counted, and what the looks through its tables found.
    fn counts(&self) -> WorkerCounts {
        let mut counts = self.worker.counts();
        let (verified, mismatched) = self.audit.as_ref().map_or((0, 0), Audit::found);
        counts.verified_table_bytes += verified;
        counts.mismatched_bytes += mismatched;
        counts
    }

    fn tell_progress(&self, tell: &mut dyn FnMut(Event)) {
        let counts = self.counts();
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
        let proof = self.producer.proof();
        self.door.producer_lives = (!proof.is_dead()).then(|| proof.holder().shown_pid().unwrap_or(0));
        let mut doorkeeper = Doorkeeper {
            door: &self.door,
            worker: &self.worker,
        };
        for verdict in self.survivor.poll(now_ns, &mut doorkeeper)? {
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
    let export = ResidencyExport {
        pool_generation: worker.port().generation(),
        digest: tables.digest(),
        requests: tables.export().map(|request| request.to_export()).collect(),
    };
    serde_json::to_vec(&export).unwrap_or_default()
}
