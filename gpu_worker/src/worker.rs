//! The worker's core: from a plan in the ring to its terminal, without blocking and without an operating system.
//!
//! [`Worker::step`] does what can be done now: it polls the device for operations that run, reads ahead in the ring so
//! that an Abort is seen while copies run (X15), and starts what may start. The process loop, the simulator and the
//! tests call it; only they know how to wait.

mod job;
mod verify;

use kvsluice_layout::ids::{PoolGeneration, Position, Rank};
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{Kind, Terminal};
use kvsluice_layout::refusal::Refusal;
use kvsluice_transport::death;
use kvsluice_transport::port::{Incoming, Outcome, Port};
use kvsluice_transport::ring::Broken;
use kvsluice_transport::shared::{Shared, SharedMut};
use thiserror::Error;

use crate::copy::{CopyPlanner, HostPool};
use crate::device::{Device, DeviceLost, EventState, Queue};
use crate::moves::MoveOrder;
use crate::readers::Readers;
use crate::tables::{TableLimits, TableStore};
use job::{Job, Next};
pub use verify::{Verifier, Verify};

/// Most operations that a worker holds at a time: it reads ahead up to here.
const JOBS_MAX: usize = 1024;

/// Why a worker stops. What it had accepted is answered by then.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum WorkerError {
    /// The ring cannot be trusted (X9).
    #[error(transparent)]
    Broken(#[from] Broken),
    /// The device is gone (D7).
    #[error(transparent)]
    DeviceLost(#[from] DeviceLost),
}

/// What a worker counted since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerCounts {
    /// Operations answered Done.
    pub done: u64,
    /// Operations answered Failed.
    pub failed: u64,
    /// Operations answered Rejected.
    pub rejected: u64,
    /// Operations answered Superseded.
    pub superseded: u64,
    /// Bytes copied from the host.
    pub bytes_h2d: u64,
    /// Bytes copied to the host.
    pub bytes_d2h: u64,
    /// Bytes moved inside the device (R1).
    pub bytes_d2d: u64,
    /// Fragments submitted.
    pub fragments: u64,
    /// Bytes compared with what the plan says they are.
    pub verified_bytes: u64,
    /// Bytes compared in the blocks that the device's tables name, as attention reads them.
    pub verified_table_bytes: u64,
    /// Bytes that were something else.
    pub mismatched_bytes: u64,
    /// Records that were read at or below the position of an earlier one (X12): 0.
    pub repeated: u64,
}

impl WorkerCounts {
    /// Adds what another worker of the same rank counted.
    pub fn add(&mut self, other: &Self) {
        let pairs = [
            (&mut self.done, other.done),
            (&mut self.failed, other.failed),
            (&mut self.rejected, other.rejected),
            (&mut self.superseded, other.superseded),
            (&mut self.bytes_h2d, other.bytes_h2d),
            (&mut self.bytes_d2h, other.bytes_d2h),
            (&mut self.bytes_d2d, other.bytes_d2d),
            (&mut self.fragments, other.fragments),
            (&mut self.verified_bytes, other.verified_bytes),
            (&mut self.verified_table_bytes, other.verified_table_bytes),
            (&mut self.mismatched_bytes, other.mismatched_bytes),
            (&mut self.repeated, other.repeated),
        ];
        for (sum, more) in pairs {
            *sum += more;
        }
    }
}

/// What one step came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// Something moved: step again at once.
    Worked,
    /// Operations run on the device; nothing to do until an event.
    Running,
    /// Nothing runs and nothing waits in the ring.
    Idle,
    /// The next record waits for a handshake with a new producer (X25).
    AwaitHandshake,
}

/// Host memory and limits that a worker is opened with.
pub struct WorkerSpec {
    /// The rank.
    pub rank: Rank,
    /// The pool segment, registered with the device.
    pub pool: HostPool,
    /// The write-back area of the rank's segment, registered writable; `None` where it has no slots.
    pub write_back: Option<HostPool>,
    /// Slots of the write-back area, and bytes of each.
    pub write_back_slots: (u64, u64),
    /// Limits of the tables.
    pub tables: TableLimits,
    /// What to verify, with a registered private buffer.
    pub verifier: Verifier,
    /// Nanoseconds after which an operation that runs means that the device is lost (D5). 0: never.
    pub watchdog_ns: u64,
}

/// The parts of a worker that jobs work with.
struct Hands<D> {
    device: D,
    map: GeometryMap,
    rank: Rank,
    pool: HostPool,
    write_back: Option<HostPool>,
    write_back_slots: (u64, u64),
    planner: CopyPlanner,
    moves: Vec<MoveOrder>,
    readers: Readers,
    tables: TableStore,
    image: Vec<u32>,
    verifier: Verifier,
    counts: WorkerCounts,
    /// By queue: who has submitted copies and not yet an event behind them.
    takers: [Option<Position>; 3],
}

/// One rank's worker. `C` is the control segment, `R` the rank's own, `D` its device.
pub struct Worker<C, R, D> {
    port: Port<C, R>,
    hands: Hands<D>,
    jobs: Vec<Job>,
    /// A Reset is in `jobs`: nothing behind it is read before it is answered (X24a).
    barrier: bool,
    broken: Option<Broken>,
    /// The last record that was accepted.
    newest: Option<Position>,
    watchdog_ns: u64,
}

impl<C: Shared, R: SharedMut, D: Device> Worker<C, R, D> {
    /// A worker with an empty device at a port.
    pub fn new(port: Port<C, R>, map: GeometryMap, device: D, spec: WorkerSpec) -> Self {
        let groups = &map.geometry().groups;
        let hands = Hands {
            rank: spec.rank,
            pool: spec.pool,
            write_back: spec.write_back,
            write_back_slots: spec.write_back_slots,
            planner: CopyPlanner::with_capacity(4096),
            moves: groups.iter().map(|group| MoveOrder::new(group.device_blocks)).collect(),
            readers: Readers::new(&map, JOBS_MAX as u32),
            tables: TableStore::new(&map, spec.tables),
            image: Vec::new(),
            verifier: spec.verifier,
            counts: WorkerCounts::default(),
            takers: [None; 3],
            device,
            map,
        };
        Self {
            port,
            hands,
            jobs: Vec::new(),
            barrier: false,
            broken: None,
            newest: None,
            watchdog_ns: spec.watchdog_ns,
        }
    }

    /// The port.
    pub fn port(&self) -> &Port<C, R> {
        &self.port
    }

    /// The port, for handshakes and watermarks.
    pub fn port_mut(&mut self) -> &mut Port<C, R> {
        &mut self.port
    }

    /// The tables of all requests: what a takeover exports.
    pub fn tables(&self) -> &TableStore {
        &self.hands.tables
    }

    /// Whether a Reset is open: the device's tables may be emptied already.
    pub fn is_resetting(&self) -> bool {
        self.barrier
    }

    /// The device, for an engine's compute queue.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.hands.device
    }

    /// The readers, for an engine that waits on layers (X18).
    pub fn readers_mut(&mut self) -> (&mut Readers, &mut D) {
        (&mut self.hands.readers, &mut self.hands.device)
    }

    /// What was counted since the start.
    pub fn counts(&self) -> WorkerCounts {
        self.hands.counts
    }

    /// Operations that were accepted and not answered.
    pub fn open_operations(&self) -> usize {
        self.jobs.len()
    }

    /// Does what can be done at `now_ns`, by a clock that never goes back.
    ///
    /// # Errors
    /// [`WorkerError`] once everything accepted is answered and the worker must stop.
    pub fn step(&mut self, now_ns: u64) -> Result<Step, WorkerError> {
        if let Err(lost) = self.hands.device.health() {
            return Err(self.give_up(lost));
        }
        let mut worked = self.advance(now_ns);
        let mut handshake = false;
        while !self.barrier && self.broken.is_none() && self.jobs.len() < JOBS_MAX {
            match self.port.receive() {
                Ok(None) => break,
                Ok(Some(Incoming::AwaitHandshake(_))) => {
                    handshake = true;
                    break;
                }
                Ok(Some(Incoming::Rejected {
                    position,
                    operation_id,
                    refusal,
                })) => {
                    tracing::warn!(rank = self.hands.rank.0, %position, operation_id, %refusal, "plan rejected");
                    self.hands.counts.rejected += 1;
                }
                Ok(Some(Incoming::Plan(ticket))) => {
                    let position = ticket.position();
                    self.hands.counts.repeated += u64::from(self.newest.is_some_and(|newest| position <= newest));
                    self.newest = Some(position);
                    self.jobs.push(Job::new(ticket));
                }
                Err(broken) => self.broken = Some(broken),
            }
            worked = true;
            let arrived = self.jobs.len().saturating_sub(1);
            match self.jobs.last().map(Job::kind) {
                Some(Kind::Abort) => self.abort(arrived),
                Some(Kind::Reset) => self.begin_reset(),
                _ => {}
            }
        }
        worked |= self.advance(now_ns);
        self.hands.readers.sweep(&mut self.hands.device);
        if let Err(lost) = self.hands.device.health() {
            return Err(self.give_up(lost));
        }
        if self.watchdog_ns > 0 && self.jobs.iter().any(|job| job.runs_since(now_ns) > self.watchdog_ns) {
            self.hands.device.condemn(); // D5: nothing waits for ever.
            return Err(self.give_up(DeviceLost::Condemned));
        }
        if let Some(broken) = self.broken
            && self.jobs.is_empty()
        {
            return Err(broken.into());
        }
        Ok(match () {
            () if worked => Step::Worked,
            () if !self.jobs.is_empty() => Step::Running,
            () if handshake => Step::AwaitHandshake,
            () => Step::Idle,
        })
    }

    /// Moves every job on as far as it goes; answers those that ended.
    fn advance(&mut self, now_ns: u64) -> bool {
        let mut worked = false;
        let mut at = 0;
        while at < self.jobs.len() {
            let alone = self.jobs.len() == 1;
            let Some(job) = self.jobs.get_mut(at) else { break };
            let target_open = job.target().is_some_and(|target| {
                // An Abort is answered once what it names is terminal here (X15).
                self.port.is_unanswered(target)
            });
            let next = match self.port.plan(job.ticket()) {
                Some(plan) => job.advance(&plan, &mut self.hands, now_ns, alone, target_open),
                None => Next::Finish(Outcome::failed()), // parsed once before: cannot happen on a private copy
            };
            match next {
                Next::Wait | Next::NoRoom => at += 1,
                Next::Worked => {
                    worked = true;
                    at += 1;
                }
                Next::Finish(outcome) => {
                    worked = true;
                    let job = self.jobs.remove(at);
                    self.finish(job, &outcome);
                }
            }
        }
        worked
    }

    fn finish(&mut self, mut job: Job, outcome: &Outcome) {
        if job.close(&mut self.hands) && !planted("r59_x25_undefined_tables_are_reported") {
            // Attention may read tables that nobody else knows of, with blocks that are somebody else's: of no generation
            // until a Reset, so that no plan passes and no successor adopts what this rank reports.
            self.port.set_generation(PoolGeneration(0)); // before the terminal
        }
        let counts = &mut self.hands.counts;
        match job.kind() {
            Kind::Upload => counts.bytes_h2d += outcome.bytes_moved,
            Kind::WriteBack => counts.bytes_d2h += outcome.bytes_moved,
            Kind::Retain => counts.bytes_d2d += outcome.bytes_moved,
            _ => {}
        }
        match outcome.terminal {
            Terminal::Done => counts.done += 1,
            Terminal::Failed | Terminal::RankLost => counts.failed += 1,
            Terminal::Rejected => counts.rejected += 1,
            Terminal::Superseded => counts.superseded += 1,
        }
        if let Some(refusal) = outcome.refusal {
            tracing::warn!(rank = self.hands.rank.0, position = %job.ticket().position(), %refusal, "plan rejected");
        }
        if job.kind() == Kind::Reset {
            if outcome.terminal == Terminal::Done
                && let Some(generation) = job.generation()
            {
                self.port.set_generation(generation); // X24a: before the terminal
            }
            self.barrier = false;
        }
        death::point("copied");
        self.port.finish(job.into_ticket(), outcome);
    }

    fn abort(&mut self, arrived: usize) {
        let target = self.jobs.get_mut(arrived).and_then(|job| {
            let target = self.port.plan(job.ticket())?.header().target;
            job.set_target(target);
            Some(target)
        });
        if let Some(job) = self
            .jobs
            .iter_mut()
            .find(|job| target == Some(job.ticket().position().0))
        {
            job.supersede();
        }
    }

    /// A Reset drains what runs and supersedes what has not started (X24a).
    fn begin_reset(&mut self) {
        self.barrier = true;
        for job in &mut self.jobs {
            if !matches!(job.kind(), Kind::Reset | Kind::Abort) {
                job.supersede_unstarted();
            }
        }
    }

    /// The device is lost: everything accepted ends as Failed, once (D7).
    fn give_up(&mut self, lost: DeviceLost) -> WorkerError {
        for job in std::mem::take(&mut self.jobs) {
            self.finish(job, &Outcome::failed());
        }
        lost.into()
    }
}

impl<D: Device> Hands<D> {
    /// An event behind all compute so far, which `queue` waits for (X19, D6).
    fn fence(&mut self, queue: Queue) -> bool {
        let Ok(fence) = self.device.record(Queue::Compute) else {
            return false;
        };
        let waits = self.device.wait(queue, fence);
        self.device.release(fence);
        waits.is_ok()
    }

    /// Whether an operation is in the middle of its submits on `queue`. Nobody else records an event there meanwhile: a
    /// device reports a failed copy with the first event behind it, whose operation would fail in its place (X12).
    fn is_taken(&self, queue: Queue) -> bool {
        self.takers.get(queue.index()).is_some_and(Option::is_some)
    }

    fn take(&mut self, queue: Queue, position: Position) {
        if let Some(taker) = self.takers.get_mut(queue.index()) {
            *taker = Some(position);
        }
    }

    /// The operation at `position` has its event, or has ended.
    fn give(&mut self, position: Position) {
        for taker in &mut self.takers {
            taker.take_if(|taker| *taker == position);
        }
    }

    fn event_state(&mut self, event: crate::device::Event) -> EventState {
        let state = self.device.poll(event);
        if state != EventState::Pending {
            self.device.release(event);
        }
        state
    }
}

/// A refusal that names only the row.
fn rows(row: usize) -> Refusal {
    Refusal::Rows { row: row as u32 }
}

#[cfg(test)]
mod tests;
