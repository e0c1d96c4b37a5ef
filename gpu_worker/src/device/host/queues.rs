//! The queues of a host device: a state machine that decides what may run next.
//!
//! No threads, no clock and no copying here: whoever holds the lock asks for a [`Job`], runs it without the lock, and
//! reports it finished. Copy threads and the stepped engine do exactly that, so both have the same queue semantics.

use std::collections::VecDeque;
use std::mem;

use kvsluice_layout::planted::planted;

use super::events::{DONE, EventStates, FAILED, PENDING};
use super::job::{Job, Work, resolve, take_pieces};
use super::kernel::{Kernel, KernelState};
use super::memory::{Piece, Pool, Tables};
use super::pins::HostPins;
use crate::device::adversary::{Dice, Fate};
use crate::device::region::Regions;
use crate::device::{
    DeviceLost, DeviceSpec, Event, Fragment, Queue, RecordError, SubmitError, TableError, TableSlot, WaitError,
};

/// Words of a table that one job writes where the adversary tears.
const TORN_WORDS: u32 = 3;
/// The code that a scripted loss reports: `CUDA_ERROR_ILLEGAL_ADDRESS`, the usual one.
const LOST_CODE: u32 = 700;

/// Bookkeeping of one event's place.
#[derive(Clone, Copy, Default)]
struct Place {
    generation: u32,
    /// Queued waits that name it.
    waits: u32,
    /// Between `record` and `release`.
    live: bool,
}

enum Command {
    /// The first `left` fragments of the line.
    Copies {
        left: usize,
        regions: u64,
        hold: u32,
        fate: Fate,
    },
    Event {
        index: u32,
        muted: bool,
    },
    Wait {
        index: u32,
    },
    Table {
        slot: u32,
        written: u32,
        hold: u32,
    },
    /// Absent while it runs.
    Kernel(Option<Box<dyn Kernel>>),
}

#[derive(Default)]
struct Line {
    commands: VecDeque<Command>,
    fragments: VecDeque<Piece>,
    /// Jobs of the first command that run now.
    running: u32,
    /// The tick from which the first command may start, once it is first.
    ready_at: Option<u64>,
    /// Something failed since the last event.
    failed: bool,
}

/// What a look at the queues found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// A job to run.
    Job,
    /// Something moved on without a job.
    Moved,
    /// The adversary holds what is first.
    Held,
    /// Commands are queued and none can run.
    Blocked,
    /// Nothing is queued.
    Idle,
}

/// Everything that the lock of a host device guards.
pub(super) struct State {
    lines: [Line; 3],
    places: Vec<Place>,
    free: Vec<u32>,
    table_busy: Vec<bool>,
    pub(super) regions: Regions,
    pub(super) pins: HostPins,
    pub(super) dice: Dice,
    pub(super) lost: Option<DeviceLost>,
    /// Jobs that run now, on any queue.
    pub(super) running: u32,
    /// Copy threads that sleep.
    pub(super) sleepers: u32,
    tick: u64,
    turn: usize,
    fragments_max: usize,
    commands_max: usize,
}

impl State {
    pub(super) fn new(spec: &DeviceSpec, dice: Dice) -> Self {
        let line = || Line {
            commands: VecDeque::with_capacity(spec.commands_max as usize),
            fragments: VecDeque::with_capacity(spec.fragments_max as usize),
            ..Line::default()
        };
        Self {
            lines: [line(), line(), line()],
            places: vec![Place::default(); spec.events_max as usize],
            free: (0..spec.events_max).rev().collect(),
            table_busy: vec![false; spec.tables.slots as usize],
            regions: Regions::new(),
            pins: HostPins::default(),
            dice,
            lost: None,
            running: 0,
            sleepers: 0,
            tick: 0,
            turn: 0,
            fragments_max: spec.fragments_max as usize,
            commands_max: spec.commands_max as usize,
        }
    }

    pub(super) fn alive(&self) -> Result<(), DeviceLost> {
        self.lost.map_or(Ok(()), Err)
    }

    /// Counts a tick for what the adversary holds.
    pub(super) fn tick(&mut self) {
        self.tick += 1;
    }

    fn line(&mut self, queue: Queue) -> Option<&mut Line> {
        self.lines
            .get_mut(queue.index())
            .filter(|line| line.commands.len() < self.commands_max)
    }

    pub(super) fn submit(&mut self, queue: Queue, fragments: &[Fragment], pool: &Pool) -> Result<(), SubmitError> {
        self.alive()?;
        let (needed, fragments_max) = (fragments.len(), self.fragments_max);
        let regions = &self.regions;
        let Some(line) = self
            .lines
            .get_mut(queue.index())
            .filter(|line| line.commands.len() < self.commands_max)
        else {
            return Err(SubmitError::Full { queue, needed, free: 0 });
        };
        let before = line.fragments.len();
        if before + needed > fragments_max {
            return Err(SubmitError::Full {
                queue,
                needed,
                free: fragments_max - before,
            });
        }
        let mut mask = 0;
        for (index, fragment) in fragments.iter().enumerate() {
            match resolve(regions, pool, fragment) {
                Ok((piece, bit)) => {
                    mask |= bit;
                    line.fragments.push_back(piece);
                }
                Err(fault) => {
                    line.fragments.truncate(before); // all or none
                    return Err(SubmitError::Place {
                        index,
                        count: needed,
                        fault,
                    });
                }
            }
        }
        if needed > 0 {
            let (hold, fate) = (self.dice.hold(), self.dice.fate());
            line.commands.push_back(Command::Copies {
                left: needed,
                regions: mask,
                hold,
                fate,
            });
            self.regions.hold(mask);
        }
        Ok(())
    }

    pub(super) fn launch(&mut self, kernel: Box<dyn Kernel>) -> Result<(), SubmitError> {
        self.alive()?;
        let queue = Queue::Compute;
        let line = self.line(queue).ok_or(SubmitError::Full {
            queue,
            needed: 0,
            free: 0,
        })?;
        line.commands.push_back(Command::Kernel(Some(kernel)));
        Ok(())
    }

    pub(super) fn write_table(
        &mut self,
        queue: Queue,
        slot: TableSlot,
        words: &[u32],
        tables: &Tables,
    ) -> Result<(), TableError> {
        self.alive()?;
        let spec = tables.spec();
        if words.len() > spec.words as usize {
            return Err(TableError::TooLong {
                found: words.len(),
                words: spec.words,
            });
        }
        let none = TableError::Slot {
            found: slot.0,
            slots: spec.slots,
        };
        if *self.table_busy.get(slot.0 as usize).ok_or(none)? {
            return Err(TableError::Busy { slot: slot.0 });
        }
        let hold = self.dice.hold();
        let line = self.line(queue).ok_or(TableError::Full { queue })?;
        line.commands.push_back(Command::Table {
            slot: slot.0,
            written: 0,
            hold,
        });
        tables.stage(slot.0, words);
        self.table_busy
            .iter_mut()
            .skip(slot.0 as usize)
            .take(1)
            .for_each(|busy| *busy = true);
        Ok(())
    }

    pub(super) fn record(&mut self, queue: Queue, states: &EventStates) -> Result<Event, RecordError> {
        self.alive()?;
        let events_max = self.places.len() as u32;
        let &index = self.free.last().ok_or(RecordError::Exhausted { events_max })?;
        let muted = self.dice.mutes();
        let line = self.line(queue).ok_or(RecordError::Full { queue })?;
        line.commands.push_back(Command::Event { index, muted });
        self.free.pop();
        let place = self
            .places
            .get_mut(index as usize)
            .ok_or(RecordError::Exhausted { events_max })?;
        place.live = true;
        states.set(index, place.generation, PENDING);
        Ok(Event::new(index, place.generation))
    }

    fn place(&mut self, event: Event) -> Option<&mut Place> {
        self.places
            .get_mut(event.index())
            .filter(|place| place.live && place.generation == event.generation())
    }

    pub(super) fn wait(&mut self, queue: Queue, event: Event) -> Result<(), WaitError> {
        self.alive()?;
        self.place(event).ok_or(WaitError::Unknown { event })?;
        let line = self.line(queue).ok_or(WaitError::Full { queue })?;
        line.commands.push_back(Command::Wait {
            index: event.index() as u32,
        });
        if let Some(place) = self.place(event) {
            place.waits += 1;
        }
        Ok(())
    }

    pub(super) fn release(&mut self, event: Event, states: &EventStates) {
        let index = event.index() as u32;
        if let Some(place) = self.place(event) {
            place.live = false;
            place.generation = place.generation.wrapping_add(1);
            let generation = place.generation;
            states.set(index, generation, states.state(index)); // from here on the handle is stale
            self.recycle(index, states);
        }
    }

    /// Frees an event's place once nobody holds it, waits on it, or will still fire it.
    fn recycle(&mut self, index: u32, states: &EventStates) {
        let Some(place) = self.places.get(index as usize) else {
            return;
        };
        if !place.live && place.waits == 0 && states.state(index) != PENDING {
            self.free.push(index);
        }
    }

    /// The device is lost: everything unfinished has failed, and nothing more runs (D7). What is running ends by itself;
    /// regions stay pinned until the device is dropped, since a job may still read them.
    pub(super) fn lose(&mut self, why: DeviceLost, states: &EventStates) {
        self.lost.get_or_insert(why);
        for (index, place) in (0u32..).zip(&self.places) {
            if place.live && states.state(index) == PENDING {
                states.finish(index, FAILED);
            }
        }
        for line in &mut self.lines {
            line.commands.clear();
            line.fragments.clear();
        }
    }

    /// Looks for the next job, over all queues or in one.
    pub(super) fn next(&mut self, only: Option<Queue>, job: &mut Job, states: &EventStates, tables: &Tables) -> Found {
        if self.lost.is_some() {
            return Found::Idle;
        }
        if let Some(queue) = only {
            return self.advance(queue, job, states, tables);
        }
        let first = self.dice.first_queue(self.turn, Queue::ALL.len());
        self.turn = self.turn.wrapping_add(1);
        let mut best = Found::Idle;
        for queue in Queue::ALL.iter().cycle().skip(first).take(Queue::ALL.len()) {
            match self.advance(*queue, job, states, tables) {
                found @ (Found::Job | Found::Moved) => return found,
                Found::Held => best = Found::Held,
                Found::Blocked if best == Found::Idle => best = Found::Blocked,
                Found::Blocked | Found::Idle => {}
            }
        }
        best
    }

    fn advance(&mut self, queue: Queue, job: &mut Job, states: &EventStates, tables: &Tables) -> Found {
        let mut moved = false;
        loop {
            let found = self.first_command(queue, job, states, tables);
            if found != Found::Moved {
                return if moved && found != Found::Job {
                    Found::Moved
                } else {
                    found
                };
            }
            moved = true;
            if self.lost.is_some() || self.dice.single_steps() {
                return Found::Moved;
            }
        }
    }

    /// Looks at the first command of `queue`: `Moved` when it is over.
    fn first_command(&mut self, queue: Queue, job: &mut Job, states: &EventStates, tables: &Tables) -> Found {
        let Self { lines, dice, tick, .. } = self;
        let Some(line) = lines.get_mut(queue.index()) else {
            return Found::Idle;
        };
        let Some(command) = line.commands.front_mut() else {
            return Found::Idle;
        };
        if let Command::Copies { hold, .. } | Command::Table { hold, .. } = command {
            let hold = u64::from(*hold);
            if *line.ready_at.get_or_insert_with(|| *tick + hold) > *tick {
                return Found::Held;
            }
        }
        match command {
            Command::Copies {
                fate: Fate::LoseDevice, ..
            } => {
                self.lose(DeviceLost::Driver { code: LOST_CODE }, states);
                return Found::Moved;
            }
            Command::Copies {
                left,
                fate: fate @ Fate::Fail,
                ..
            } => {
                *fate = Fate::Normal;
                line.failed = true;
                let survivors = dice.survivors(*left);
                line.fragments.drain(..*left - survivors);
                *left = survivors;
                return Found::Moved;
            }
            Command::Copies { left, .. } if *left > 0 => {
                *left -= take_pieces(&mut line.fragments, *left, dice, &mut job.pieces);
                job.work = Work::Pieces;
            }
            Command::Table { slot, written, .. } if *written < tables.spec().words => {
                if line.running > 0 {
                    return Found::Blocked;
                }
                let words = tables.spec().words;
                let to = if dice.tears() {
                    words.min(*written + TORN_WORDS)
                } else {
                    words
                };
                job.work = Work::Table {
                    slot: *slot,
                    from: *written,
                    to,
                };
                *written = to;
            }
            Command::Kernel(kernel) => match kernel.take() {
                Some(kernel) => job.work = Work::Kernel(kernel, KernelState::Again),
                None => return Found::Blocked,
            },
            Command::Copies { .. } | Command::Table { .. } if line.running > 0 => return Found::Blocked,
            Command::Copies { regions, .. } => {
                let regions = *regions;
                self.regions.drop_hold(regions, &mut self.pins);
                return self.over(queue);
            }
            Command::Table { slot, .. } => {
                let slot = *slot;
                tables.swap(slot);
                self.table_busy
                    .iter_mut()
                    .skip(slot as usize)
                    .take(1)
                    .for_each(|busy| *busy = false);
                return self.over(queue);
            }
            Command::Event { muted: true, .. } => return Found::Blocked,
            Command::Event { index, .. } => {
                let index = *index;
                let failed = mem::take(&mut line.failed) && !planted("failure_as_success");
                states.finish(index, if failed { FAILED } else { DONE });
                self.recycle(index, states);
                return self.over(queue);
            }
            Command::Wait { index } => {
                let index = *index;
                match states.state(index) {
                    PENDING => return Found::Blocked,
                    FAILED => line.failed = true, // a failure travels with the waits on it
                    _ => {}
                }
                if let Some(place) = self.places.get_mut(index as usize) {
                    place.waits -= 1;
                }
                self.recycle(index, states);
                return self.over(queue);
            }
        }
        line.running += 1;
        self.running += 1;
        job.queue = queue;
        Found::Job
    }

    fn over(&mut self, queue: Queue) -> Found {
        if let Some(line) = self.lines.get_mut(queue.index()) {
            line.commands.pop_front();
            line.ready_at = None;
        }
        Found::Moved
    }

    /// Takes back a job that ran.
    pub(super) fn finish(&mut self, job: &mut Job) {
        self.running -= 1;
        job.pieces.clear();
        let work = mem::replace(&mut job.work, Work::Pieces);
        let Some(line) = self.lines.get_mut(job.queue.index()) else {
            return;
        };
        line.running -= 1;
        if let Work::Kernel(kernel, state) = work {
            match (state, line.commands.front_mut()) {
                (KernelState::Again, Some(Command::Kernel(first))) => *first = Some(kernel),
                (KernelState::Finished, Some(Command::Kernel(_))) => {
                    self.over(job.queue);
                }
                _ => {} // lost meanwhile
            }
        }
    }
}
