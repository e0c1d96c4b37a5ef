//! One accepted operation on its way to its terminal.
//!
//! A job moves through stages, each of which waits for one thing: room in a queue, an event, the verifier. It is Done
//! only behind an event that proved the end of all its reads and writes (X13).

mod copies;
mod tables;

use kvsluice_layout::ids::{PoolGeneration, Position};
use kvsluice_layout::plan::Plan;
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{Kind, Terminal};
use kvsluice_transport::port::{Outcome, Ticket};

use super::{Hands, rows};
use crate::device::{Device, Event, EventState, Queue, TableSlot};
use crate::readers::WriterId;
use crate::tables::Staged;

/// What a job came to.
pub(super) enum Next {
    /// It waits for the device, or for another job.
    Wait,
    /// It waits for room on the device.
    NoRoom,
    /// It moved on.
    Worked,
    /// It is terminal.
    Finish(Outcome),
}

/// Where a job stands.
enum Stage {
    /// Nothing was submitted.
    Unstarted,
    /// Some fragments are submitted: the next are those of `row` from `fragment` on.
    Submitting { row: usize, fragment: usize },
    /// A Reset: what failed before is reported by this event, and not by the one that the Reset ends with.
    Settling(Event),
    /// A Reset: the device's tables are emptied.
    Emptying,
    /// Everything is submitted behind the event.
    Copying(Event),
    /// The bytes are compared with the plan's tags.
    Verifying,
    /// Tables and owner sets change, last: an operation that fails leaves them as they were (R59).
    Applying,
}

/// One accepted operation.
pub(super) struct Job {
    ticket: Ticket,
    stage: Stage,
    writer: Option<WriterId>,
    staged: Option<Staged>,
    superseded: bool,
    failed: bool,
    started_ns: Option<u64>,
    bytes: u64,
    target: Option<u64>,
    generation: Option<PoolGeneration>,
    /// Tables that a Reset has emptied so far.
    emptied: usize,
}

impl Job {
    pub(super) fn new(ticket: Ticket) -> Self {
        Self {
            ticket,
            stage: Stage::Unstarted,
            writer: None,
            staged: None,
            superseded: false,
            failed: false,
            started_ns: None,
            bytes: 0,
            target: None,
            generation: None,
            emptied: 0,
        }
    }

    pub(super) fn ticket(&self) -> &Ticket {
        &self.ticket
    }

    pub(super) fn into_ticket(self) -> Ticket {
        self.ticket
    }

    pub(super) fn kind(&self) -> Kind {
        self.ticket.kind()
    }

    pub(super) fn target(&self) -> Option<Position> {
        self.target.map(Position)
    }

    pub(super) fn set_target(&mut self, target: u64) {
        self.target = Some(target);
    }

    /// The generation that a Reset leads to.
    pub(super) fn generation(&self) -> Option<PoolGeneration> {
        self.generation
    }

    pub(super) fn runs_since(&self, now_ns: u64) -> u64 {
        self.started_ns.map_or(0, |started| now_ns.saturating_sub(started))
    }

    /// An Abort names this job: no more copies are submitted, those submitted are drained (X15).
    pub(super) fn supersede(&mut self) {
        if !planted("x15_abort_ignored") {
            self.superseded = true;
        }
    }

    /// A Reset was read: a job that has not started never will.
    pub(super) fn supersede_unstarted(&mut self) {
        if matches!(self.stage, Stage::Unstarted) {
            self.superseded = true;
        }
    }

    /// Gives back what the job holds on the device, at its terminal. True where a change of tables ends that the device
    /// may have made, and the store has not.
    #[must_use]
    pub(super) fn close<D: Device>(&mut self, hands: &mut Hands<D>) -> bool {
        hands.give(self.ticket.position());
        if let Stage::Copying(event) | Stage::Settling(event) = std::mem::replace(&mut self.stage, Stage::Applying) {
            hands.device.release(event);
        }
        let undefined = self.staged.take().map(|staged| hands.tables.discard(staged)).is_some();
        if let Some(writer) = self.writer.take() {
            hands.readers.retire(&mut hands.device, writer);
        }
        hands.verifier.give_up(self.ticket.position(), &mut hands.device);
        undefined
    }

    /// Moves the job on. `alone`: no other job is open. `target_open`: what an Abort names is not terminal yet.
    pub(super) fn advance<D: Device>(
        &mut self,
        plan: &Plan<'_>,
        hands: &mut Hands<D>,
        now_ns: u64,
        alone: bool,
        target_open: bool,
    ) -> Next {
        let next = match self.stage {
            Stage::Unstarted if self.superseded => Next::Finish(Outcome::superseded(false, 0)),
            Stage::Unstarted => self.start(plan, hands, alone, target_open),
            Stage::Submitting { row, fragment } => self.submit(plan, hands, row, fragment),
            Stage::Settling(event) => match hands.event_state(event) {
                EventState::Pending => Next::Wait,
                EventState::Failed if planted("x24a_reset_inherits_failures") => Next::Finish(Outcome::failed()),
                EventState::Done | EventState::Failed => {
                    self.stage = Stage::Emptying;
                    Next::Worked
                }
            },
            Stage::Emptying => self.empty(hands),
            Stage::Copying(event) => match hands.event_state(event) {
                EventState::Pending if !planted("x13_done_before_event") => Next::Wait,
                state => {
                    self.failed |= state == EventState::Failed;
                    if let Some(writer) = self.writer
                        && !planted("x12_last_event_decides")
                    {
                        self.failed |= hands.readers.failed(&mut hands.device, writer); // X12
                    }
                    self.stage = Stage::Applying;
                    self.copied(plan, hands)
                }
            },
            Stage::Verifying => self.verify(plan, hands),
            Stage::Applying => self.apply(plan, hands),
        };
        // D5: also an operation for which a stalled device never has room.
        let asks =
            matches!(next, Next::Worked) || (matches!(next, Next::NoRoom) && !planted("d5_want_of_room_is_no_run"));
        if asks && self.started_ns.is_none() {
            self.started_ns = Some(now_ns);
        }
        match next {
            Next::Finish(mut outcome) if outcome.terminal == Terminal::Done => {
                outcome.device_ns = self.runs_since(now_ns);
                Next::Finish(outcome)
            }
            next => next,
        }
    }

    fn start<D: Device>(&mut self, plan: &Plan<'_>, hands: &mut Hands<D>, alone: bool, target_open: bool) -> Next {
        match plan.kind() {
            Kind::Upload => self.start_upload(plan, hands),
            Kind::WriteBack => self.start_write_back(plan, hands),
            Kind::Keep | Kind::Retain => self.start_tables(plan, hands),
            Kind::Abort if target_open && !planted("x15_abort_does_not_wait") => Next::Wait,
            Kind::Abort | Kind::Padding => Next::Finish(Outcome::done(0, 0, 0)),
            Kind::Reset if !alone && !planted("x24a_reset_without_drain") => Next::Wait,
            Kind::Reset if hands.readers.any_read() => Next::Wait,
            Kind::Reset => Self::settle(hands).map_or(Next::NoRoom, |event| {
                self.stage = Stage::Settling(event);
                Next::Worked
            }),
        }
    }

    /// Makes the copy queue wait for the engine's reader fence: nothing that was enqueued reads a table or a block behind
    /// the event (X24a). A failure that nobody was told of yet, and one that compute and copies pass to each other by
    /// their fences, ends with this event: else no Reset would ever be Done.
    fn settle<D: Device>(hands: &mut Hands<D>) -> Option<Event> {
        if hands.fence(Queue::CopyIn) {
            hands.device.record(Queue::CopyIn).ok()
        } else {
            None
        }
    }

    /// Makes every table in device memory one without blocks: nothing that is enqueued later finds an old block (X24a).
    fn empty<D: Device>(&mut self, hands: &mut Hands<D>) -> Next {
        // Nothing else is open, so the tables stay what they are until the event.
        let slots: Vec<TableSlot> = hands.tables.export().map(|request| request.slot()).collect();
        let keep = planted("x24a_reset_keeps_device_tables");
        hands.tables.empty_image(&mut hands.image);
        for slot in slots.iter().skip(self.emptied) {
            if !keep && hands.device.write_table(Queue::CopyIn, *slot, &hands.image).is_err() {
                break; // no room yet; a lost device is seen by the step
            }
            self.emptied += 1;
        }
        if self.emptied < slots.len() {
            return Next::NoRoom;
        }
        let Ok(event) = hands.device.record(Queue::CopyIn) else {
            return Next::NoRoom;
        };
        // Compute that is enqueued from now on sees the emptied tables, never one that is just being emptied (D10).
        if hands.device.wait(Queue::Compute, event).is_err() {
            hands.device.release(event);
            return Next::NoRoom;
        }
        self.stage = Stage::Copying(event);
        Next::Worked
    }

    /// Records the event behind everything that was submitted; tries again where there is no room for it.
    fn close_submits<D: Device>(&mut self, hands: &mut Hands<D>, queue: Queue) -> Next {
        self.stage = Stage::Submitting {
            row: usize::MAX,
            fragment: 0,
        };
        let Ok(event) = hands.device.record(queue) else {
            return Next::NoRoom;
        };
        // Compute that is enqueued from now on sees the new tables and the moved bytes (R57).
        if self.staged.is_some() && hands.device.wait(Queue::Compute, event).is_err() {
            hands.device.release(event);
            return Next::NoRoom;
        }
        hands.give(self.ticket.position());
        self.stage = Stage::Copying(event);
        Next::Worked
    }

    /// The event has fired: all reads have ended and all writes are visible.
    fn copied<D: Device>(&mut self, plan: &Plan<'_>, hands: &mut Hands<D>) -> Next {
        if self.failed {
            return Next::Finish(Outcome::failed());
        }
        if plan.kind() == Kind::Reset {
            let generation = plan.operation().pool_generation;
            if !planted("x24a_tables_survive") {
                hands.tables.reset(generation);
            }
            self.generation = Some(generation);
            return Next::Finish(Outcome::done(0, 0, 0));
        }
        if self.superseded && self.staged.is_none() {
            return Next::Finish(Outcome::superseded(true, self.bytes)); // X15
        }
        if hands.verifier.wants(plan) {
            self.stage = Stage::Verifying;
            return Next::Worked;
        }
        self.apply(plan, hands)
    }

    fn verify<D: Device>(&mut self, plan: &Plan<'_>, hands: &mut Hands<D>) -> Next {
        if hands.is_taken(Queue::CopyOut) {
            return Next::Wait;
        }
        let Hands {
            verifier,
            device,
            map,
            rank,
            counts,
            ..
        } = hands;
        match verifier.advance(plan, *rank, map, device) {
            verify @ (EventState::Done | EventState::Failed) => {
                let (verified, mismatched) = verifier.take();
                counts.verified_bytes += verified;
                counts.mismatched_bytes += mismatched;
                if mismatched > 0 {
                    tracing::error!(rank = rank.0, position = %self.ticket.position(), mismatched, "wrong bytes");
                }
                if verify == EventState::Failed && !planted("r59_unverified_applies") {
                    return Next::Finish(Outcome::failed());
                }
                self.stage = Stage::Applying;
                Next::Worked
            }
            EventState::Pending => Next::Wait,
        }
    }
}
