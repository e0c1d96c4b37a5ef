//! The host device: an asynchronous device without a GPU (D2).
//!
//! Its memory is private to the process, its copies run later than their submit, and its events complete in queue order
//! only. Two engines run the same queues: copy threads ([`HostDevice::open`]), or whoever calls [`Stepper::step`]
//! ([`HostDevice::stepped`]), which makes it deterministic for a simulator, for crash enumeration and for Miri. An
//! [`Adversary`] makes either of them as nasty as the contract allows.

mod events;
mod job;
mod kernel;
mod memory;
mod pins;
mod queues;
#[cfg(test)]
pub(crate) mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread::{self, JoinHandle};

use parking_lot::{Condvar, Mutex, MutexGuard};

use super::adversary::{Adversary, Dice};
use super::{
    ComputeQueue, Device, DeviceLost, DeviceSpec, Event, EventState, Fragment, HostSpan, OpenError, Pinned, Queue,
    RecordError, RegionId, RegisterError, SubmitError, TableError, TableSlot, TableSpec, UnregisterError, WaitError,
};

use events::EventStates;
use job::{Job, Work};
pub use kernel::{HostEngine, Kernel, KernelFault, KernelMemory, KernelState, TableView};
use memory::{Pool, Tables};
use queues::{Found, State};

/// Rounds that an idle copy thread spins before it sleeps: some microseconds.
const SPIN_ROUNDS: u32 = 256;

/// The code of a kernel that panicked: `CUDA_ERROR_LAUNCH_FAILED`.
const KERNEL_CODE: u32 = 719;

/// What all threads of a device share.
struct Shared {
    state: Mutex<State>,
    /// Rung when there may be something to do, or a job has ended.
    bell: Condvar,
    /// Counts rings, so that a spinning thread sees one without the lock.
    rings: AtomicU32,
    states: EventStates,
    pool: Pool,
    tables: Tables,
}

impl Shared {
    /// Tells the copy threads that there is something to do. Called with the lock held.
    fn wake(&self, state: &State) {
        // Relaxed: a hint for spinners; the lock orders everything that they then read.
        self.rings.fetch_add(1, Ordering::Relaxed);
        if state.sleepers > 0 {
            self.bell.notify_all();
        }
    }

    /// Looks for a job and runs it, without the lock.
    fn work<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        only: Option<Queue>,
        job: &mut Job,
    ) -> (MutexGuard<'a, State>, Found) {
        let found = state.next(only, job, &self.states, &self.tables);
        match found {
            Found::Job => {
                let ran = MutexGuard::unlocked(&mut state, || catch_unwind(AssertUnwindSafe(|| self.run(job))));
                state.finish(job);
                if ran.is_err() {
                    state.lose(DeviceLost::Driver { code: KERNEL_CODE }, &self.states);
                }
                self.wake(&state);
                if let Err(panic) = ran {
                    resume_unwind(panic); // a kernel of the engine's: its own failure, and the end of this device
                }
            }
            Found::Moved => self.wake(&state),
            Found::Held | Found::Blocked | Found::Idle => {}
        }
        (state, found)
    }

    fn run(&self, job: &mut Job) {
        match &mut job.work {
            Work::Pieces => {
                for piece in &job.pieces {
                    // SAFETY: `State::submit` checked both ranges against a registered region and the pool, which do
                    // not overlap each other (`Regions::register`) nor, for a move, themselves. The region cannot be
                    // unregistered while the submit is queued, and dropping the device waits for running jobs.
                    unsafe { piece.run() };
                }
            }
            Work::Table { slot, from, to } => self.tables.write(*slot, *from, *to),
            Work::Kernel(kernel, state) => *state = kernel.run(&KernelMemory::new(self)),
        }
    }

    /// The life of a copy thread.
    fn copy_thread(&self) {
        let mut job = Job::new();
        let mut state = self.state.lock();
        while state.lost.is_none() {
            let found;
            (state, found) = self.work(state, None, &mut job);
            if matches!(found, Found::Job | Found::Moved) {
                continue;
            }
            let heard = self.rings.load(Ordering::Relaxed);
            MutexGuard::unlocked(&mut state, || self.spin(heard));
            if self.rings.load(Ordering::Relaxed) == heard && state.lost.is_none() {
                // Rings are rung under the lock, which is held here: none is missed.
                state.sleepers += 1;
                self.bell.wait(&mut state);
                state.sleepers -= 1;
            }
        }
    }

    fn spin(&self, heard: u32) {
        for _ in 0..SPIN_ROUNDS {
            if self.rings.load(Ordering::Relaxed) != heard {
                return;
            }
            std::hint::spin_loop();
        }
    }
}

/// What a step found to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A piece of work was done, or a held submit came nearer to its start.
    Worked,
    /// Work is queued, and all of it waits for an event that has not fired.
    Blocked,
    /// Nothing is queued, or the device is lost.
    Idle,
}

/// Drives a [`stepped`](HostDevice::stepped) host device: each call does the next piece of work on the caller's thread.
/// Beside copy threads it is one more of them.
pub struct Stepper {
    shared: Arc<Shared>,
    job: Job,
}

impl Stepper {
    /// Does one piece of work on a queue of the adversary's choice.
    pub fn step(&mut self) -> Step {
        self.step_on(None)
    }

    /// Does one piece of work on `queue`: for schedules that a test chooses itself.
    pub fn step_queue(&mut self, queue: Queue) -> Step {
        self.step_on(Some(queue))
    }

    /// Steps until nothing can move.
    pub fn run(&mut self) -> Step {
        loop {
            let step = self.step();
            if step != Step::Worked {
                return step;
            }
        }
    }

    fn step_on(&mut self, only: Option<Queue>) -> Step {
        let mut state = self.shared.state.lock();
        state.tick();
        match self.shared.work(state, only, &mut self.job).1 {
            Found::Job | Found::Moved | Found::Held => Step::Worked,
            Found::Blocked => Step::Blocked,
            Found::Idle => Step::Idle,
        }
    }
}

/// An asynchronous device in the memory of this process.
///
/// # Drop behaviour
/// Queued work is discarded, running copies are waited for, then memory is unpinned and freed: no byte of a registered
/// region is touched afterwards.
pub struct HostDevice {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    name: String,
    fragments_max: usize,
    holds: bool,
}

impl HostDevice {
    /// Opens a device whose work is done by `copy_threads` threads (at least one).
    pub fn open(spec: DeviceSpec, copy_threads: usize, adversary: Adversary) -> Result<Self, OpenError> {
        if copy_threads == 0 {
            return Err(OpenError::Spec {
                field: "copy_threads",
                found: 0,
                least: 1,
            });
        }
        let mut device = Self::stepped(spec, adversary)?;
        device.name = format!("host device, {copy_threads} copy threads");
        for index in 0..copy_threads {
            let shared = Arc::clone(&device.shared);
            let thread = thread::Builder::new().name(format!("kvsluice-copy-{index}"));
            let thread = thread.spawn(move || shared.copy_thread());
            device.threads.push(thread.map_err(|_| OpenError::Memory {
                what: "a copy thread",
                bytes: 0,
            })?);
        }
        Ok(device)
    }

    /// Opens a device without threads: its work is done by [`Stepper::step`].
    pub fn stepped(spec: DeviceSpec, adversary: Adversary) -> Result<Self, OpenError> {
        if let ComputeQueue::Adopt { .. } = spec.compute {
            let remedy = "create it here, and let the engine launch on HostDevice::engine()";
            return Err(OpenError::Adopt {
                what: "a compute queue",
                device: "host device",
                remedy,
            });
        }
        let sizes = [("events_max", spec.events_max), ("fragments_max", spec.fragments_max)];
        for (field, found) in sizes.into_iter().chain([("commands_max", spec.commands_max)]) {
            if found == 0 {
                return Err(OpenError::Spec {
                    field,
                    found: 0,
                    least: 1,
                });
            }
        }
        let dice = Dice::new(adversary);
        let holds = dice.holds();
        let shared = Shared {
            bell: Condvar::new(),
            rings: AtomicU32::new(0),
            states: EventStates::new(spec.events_max),
            pool: Pool::open(&spec.pool)?,
            tables: Tables::open(spec.tables)?,
            state: Mutex::new(State::new(&spec, dice)),
        };
        let name = String::from("host device, stepped");
        let fragments_max = spec.fragments_max as usize;
        Ok(Self {
            shared: Arc::new(shared),
            threads: Vec::new(),
            name,
            fragments_max,
            holds,
        })
    }

    /// What drives the device, beside its copy threads if it has any.
    pub fn stepper(&self) -> Stepper {
        Stepper {
            shared: Arc::clone(&self.shared),
            job: Job::new(),
        }
    }

    /// The engine's side of the device: compute is launched there.
    pub fn engine(&self) -> HostEngine {
        HostEngine {
            shared: Arc::clone(&self.shared),
        }
    }

    /// Chunks of host memory that are pinned now: for leak checks.
    pub fn pinned_chunks(&self) -> u32 {
        self.shared.state.lock().pins.chunks
    }
}

impl Device for HostDevice {
    fn name(&self) -> &str {
        &self.name
    }

    fn pool_bytes(&self) -> u64 {
        self.shared.pool.bytes()
    }

    fn tables(&self) -> TableSpec {
        self.shared.tables.spec()
    }

    fn submit_max(&self) -> usize {
        self.fragments_max
    }

    fn register(&mut self, span: HostSpan, chunk_ends: &[u64]) -> Result<RegionId, RegisterError> {
        let mut state = self.shared.state.lock();
        state.alive()?;
        state.regions.register(span, chunk_ends, self.shared.pool.range())
    }

    fn pin_next(&mut self, region: RegionId) -> Result<Pinned, RegisterError> {
        let mut state = self.shared.state.lock();
        state.alive()?;
        let State {
            regions, pins, dice, ..
        } = &mut *state;
        pins.refuse_next = dice.refuses_pin();
        regions.pin_next(region, pins)
    }

    fn unregister(&mut self, region: RegionId) -> Result<(), UnregisterError> {
        let mut state = self.shared.state.lock();
        let State { regions, pins, .. } = &mut *state;
        regions.unregister(region, pins)
    }

    fn submit(&mut self, queue: Queue, fragments: &[Fragment]) -> Result<(), SubmitError> {
        let mut state = self.shared.state.lock();
        if let Some(lost) = state.pins.surface_sticky() {
            state.lose(lost, &self.shared.states);
        }
        state.submit(queue, fragments, &self.shared.pool)?;
        self.shared.wake(&state);
        Ok(())
    }

    fn write_table(&mut self, queue: Queue, slot: TableSlot, words: &[u32]) -> Result<(), TableError> {
        let mut state = self.shared.state.lock();
        state.write_table(queue, slot, words, &self.shared.tables)?;
        self.shared.wake(&state);
        Ok(())
    }

    fn record(&mut self, queue: Queue) -> Result<Event, RecordError> {
        let mut state = self.shared.state.lock();
        let event = state.record(queue, &self.shared.states)?;
        self.shared.wake(&state);
        Ok(event)
    }

    fn wait(&mut self, queue: Queue, event: Event) -> Result<(), WaitError> {
        let mut state = self.shared.state.lock();
        state.wait(queue, event)?;
        self.shared.wake(&state);
        Ok(())
    }

    fn poll(&mut self, event: Event) -> EventState {
        let found = self.shared.states.poll(event);
        if self.holds && found == EventState::Pending {
            let mut state = self.shared.state.lock();
            state.tick();
            self.shared.wake(&state);
        }
        found
    }

    fn release(&mut self, event: Event) {
        self.shared.state.lock().release(event, &self.shared.states);
    }

    fn health(&self) -> Result<(), DeviceLost> {
        self.shared.state.lock().alive()
    }

    fn condemn(&mut self) {
        let mut state = self.shared.state.lock();
        state.lose(DeviceLost::Condemned, &self.shared.states);
        self.shared.wake(&state);
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.lose(DeviceLost::Closed, &self.shared.states);
        self.shared.wake(&state);
        // A stepper on another thread may be in the middle of a job.
        while state.running > 0 {
            state.sleepers += 1;
            self.shared.bell.wait(&mut state);
            state.sleepers -= 1;
        }
        drop(state);
        for thread in self.threads.drain(..) {
            // A copy thread that panicked has already said so; the device closes all the same.
            let _ = thread.join();
        }
        let mut state = self.shared.state.lock();
        let State { regions, pins, .. } = &mut *state;
        regions.clear(pins);
    }
}
