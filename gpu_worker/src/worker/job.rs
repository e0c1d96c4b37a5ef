//! One accepted operation on its way to its terminal.
//!
//! A job moves through stages, each of which waits for one thing: room in a queue, an event, the verifier. It is Done
//! only behind an event that proved the end of all its reads and writes (X13).

use kvsluice_layout::ids::{DecoderLayer, GroupId, PhysicalBlock, PoolGeneration, Position};
use kvsluice_layout::plan::Plan;
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{Kind, RetainMode, RowRecord, Terminal};
use kvsluice_layout::refusal::Refusal;
use kvsluice_transport::port::{Outcome, Ticket};

use super::{Hands, rows};
use crate::device::{Device, Event, EventState, Fragment, Queue, SubmitError, TableError, TableSlot};
use crate::readers::{StartError, WriterId};
use crate::tables::{NewTable, StageError, Staged, TableFault};

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

    /// Gives back what the job holds on the device, at its terminal.
    pub(super) fn close<D: Device>(&mut self, hands: &mut Hands<D>) {
        hands.give(self.ticket.position());
        if let Stage::Copying(event) | Stage::Settling(event) = std::mem::replace(&mut self.stage, Stage::Applying) {
            hands.device.release(event);
        }
        if let Some(staged) = self.staged.take() {
            hands.tables.discard(staged);
        }
        if let Some(writer) = self.writer.take() {
            hands.readers.retire(&mut hands.device, writer);
        }
        hands.verifier.give_up(self.ticket.position(), &mut hands.device);
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

    fn start_upload<D: Device>(&mut self, plan: &Plan<'_>, hands: &mut Hands<D>) -> Next {
        if hands.is_taken(Queue::CopyIn) {
            return Next::Wait;
        }
        let writer = match self.writer {
            Some(writer) => writer,
            None => match hands.readers.open() {
                Ok(writer) => *self.writer.insert(writer),
                Err(_) => return Next::Wait,
            },
        };
        let destinations = plan.rows().iter().flat_map(|row| {
            let group = GroupId(row.group);
            plan.pairs(row)
                .iter()
                .map(move |pair| (group, PhysicalBlock(pair.destination)))
        });
        match hands
            .readers
            .start(&mut hands.device, Queue::CopyIn, writer, destinations)
        {
            Ok(()) => {}
            // Held by a reader without a fence (X18), or no room: try again. A lost device is seen by the step.
            Err(StartError::Held { .. }) => return Next::Wait,
            Err(StartError::Record(_) | StartError::Wait(_)) => return Next::NoRoom,
            Err(StartError::Unknown { .. }) => return Next::Finish(Outcome::failed()),
        }
        hands.take(Queue::CopyIn, self.ticket.position());
        self.stage = Stage::Submitting { row: 0, fragment: 0 };
        Next::Worked
    }

    fn start_write_back<D: Device>(&mut self, plan: &Plan<'_>, hands: &mut Hands<D>) -> Next {
        let (slots, _) = hands.write_back_slots;
        let pairs: u64 = plan.rows().iter().map(|row| u64::from(row.valid)).sum();
        let from = plan.header().target;
        let to = from.saturating_add(pairs);
        if to > slots || hands.write_back.is_none() {
            return Next::Finish(Outcome::rejected(Refusal::WriteBackRange { from, to, slots }));
        }
        if hands.is_taken(Queue::CopyOut) {
            return Next::Wait;
        }
        // D6: a copy to the host starts behind the compute that made its bytes.
        if !planted("d6_no_compute_fence") && !hands.fence(Queue::CopyOut) {
            return Next::NoRoom;
        }
        hands.take(Queue::CopyOut, self.ticket.position());
        self.stage = Stage::Submitting { row: 0, fragment: 0 };
        Next::Worked
    }

    /// Submits rows until the queue is full; the event goes behind the last one.
    fn submit<D: Device>(&mut self, plan: &Plan<'_>, hands: &mut Hands<D>, row: usize, fragment: usize) -> Next {
        let queue = if plan.kind() == Kind::WriteBack {
            Queue::CopyOut
        } else {
            Queue::CopyIn
        };
        let mut worked = false;
        let mut skip = fragment;
        for (at, record) in plan.rows().iter().enumerate().skip(row) {
            if self.superseded {
                break;
            }
            self.plan_row(plan, hands, at, record);
            let mut rest = hands.planner.fragments().get(skip..).unwrap_or(&[]);
            let mut most = hands.device.submit_max();
            while !rest.is_empty() {
                let (now, later) = rest.split_at(rest.len().min(most));
                match hands.device.submit(queue, now) {
                    Ok(()) => {
                        worked = true;
                        skip += now.len();
                        hands.counts.fragments += now.len() as u64;
                        self.bytes += now.iter().map(Fragment::bytes).sum::<u64>();
                        rest = later;
                    }
                    Err(SubmitError::Full { free, .. }) if free > 0 && free < now.len() => most = free,
                    Err(SubmitError::Full { .. }) => {
                        self.stage = Stage::Submitting {
                            row: at,
                            fragment: skip,
                        };
                        return if worked { Next::Worked } else { Next::NoRoom };
                    }
                    Err(error) => {
                        tracing::error!(rank = hands.rank.0, position = %self.ticket.position(), %error, "submit");
                        self.failed = true;
                        rest = &[];
                    }
                }
            }
            skip = 0;
            if self.failed {
                break;
            }
            if let Some(writer) = self.writer
                && let Ok(event) = hands.device.record(Queue::CopyIn)
                && let Err(event) = hands.readers.layer_ready(writer, DecoderLayer(record.layer), event)
            {
                hands.device.release(event);
            }
        }
        self.close_submits(hands, queue)
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

    fn plan_row<D: Device>(&self, plan: &Plan<'_>, hands: &mut Hands<D>, at: usize, record: &RowRecord) {
        hands.planner.clear();
        let pairs = plan.pairs(record);
        let planes = hands.map.planes(hands.rank, DecoderLayer(record.layer));
        match (plan.kind(), &hands.write_back) {
            (Kind::WriteBack, Some(area)) => {
                let before: u64 = plan.rows().iter().take(at).map(|row| u64::from(row.valid)).sum();
                let (_, slot_bytes) = hands.write_back_slots;
                let first = plan.header().target.saturating_add(before).saturating_mul(slot_bytes);
                hands.planner.write_back(area, first, slot_bytes, planes, pairs);
            }
            _ => {
                hands.planner.upload(&hands.pool, planes, pairs);
            }
        }
    }

    /// Keep and Retain: stages the new tables, moves bytes where the plan says so, and has the device swap its image.
    fn start_tables<D: Device>(&mut self, plan: &Plan<'_>, hands: &mut Hands<D>) -> Next {
        let mut staged = match hands.tables.stage(plan.request(), &plan.operation()) {
            Ok(staged) => staged,
            Err(StageError::Busy) => return Next::Wait,
            Err(error) => return Next::Finish(Outcome::rejected(refusal_of_stage(&error))),
        };
        if let Err(refusal) = stage_rows(plan, &mut staged) {
            hands.tables.discard(staged);
            return Next::Finish(Outcome::rejected(refusal));
        }
        if plan.kind() == Kind::Keep && !plan.is_last_of_request() {
            // Metadata only: the image on the device stays (R42).
            return self.swap(hands, staged);
        }
        if hands.is_taken(Queue::CopyIn) {
            hands.tables.discard(staged);
            return Next::Wait;
        }
        match self.enqueue_tables(plan, hands, &staged) {
            Ok(true) => {
                hands.take(Queue::CopyIn, self.ticket.position());
                self.staged = Some(staged);
                self.close_submits(hands, Queue::CopyIn)
            }
            Ok(false) => {
                hands.tables.discard(staged);
                Next::NoRoom
            }
            Err(refusal) => {
                hands.tables.discard(staged);
                Next::Finish(Outcome::rejected(refusal))
            }
        }
    }

    /// Enqueues the new image, then the moves, behind the last reader (R57). False where there is no room yet; nothing
    /// that cannot be enqueued again was.
    fn enqueue_tables<D: Device>(
        &mut self,
        plan: &Plan<'_>,
        hands: &mut Hands<D>,
        staged: &Staged,
    ) -> Result<bool, Refusal> {
        let moves = plan.mode() == Some(RetainMode::ByteMove);
        for (at, row) in plan.rows().iter().enumerate().filter(|_| moves) {
            order_row(plan, hands, at, row)?; // refused before the first move
        }
        if !planted("r57_no_reader_fence") && !hands.fence(Queue::CopyIn) {
            return Ok(false);
        }
        staged.image(&mut hands.image);
        match hands.device.write_table(Queue::CopyIn, staged.slot(), &hands.image) {
            Ok(()) => {}
            Err(TableError::Slot { .. } | TableError::TooLong { .. }) => return Err(rows(0)),
            Err(TableError::Busy { .. } | TableError::Full { .. } | TableError::Lost(_)) => return Ok(false),
        }
        for (at, row) in plan.rows().iter().enumerate().filter(|_| moves) {
            order_row(plan, hands, at, row)?;
            self.submit_moves(hands, row);
        }
        Ok(true)
    }

    fn submit_moves<D: Device>(&mut self, hands: &mut Hands<D>, row: &RowRecord) {
        let Hands {
            moves,
            map,
            rank,
            planner,
            device,
            counts,
            ..
        } = hands;
        let Some(order) = moves.get_mut(row.group as usize) else {
            return;
        };
        let planes = map.planes(*rank, DecoderLayer(row.layer));
        for batch in order.batches() {
            planner.clear();
            planner.moves(planes, batch);
            for fragments in planner.fragments().chunks(device.submit_max()) {
                if let Err(error) = device.submit(Queue::CopyIn, fragments) {
                    // Some moves may have run: the operation has failed, and its blocks are undefined.
                    tracing::error!(rank = rank.0, position = %self.ticket.position(), %error, "moves");
                    self.failed = true;
                    return;
                }
                let bytes: u64 = fragments.iter().map(Fragment::bytes).sum();
                self.bytes += bytes;
                counts.fragments += fragments.len() as u64;
            }
        }
    }

    fn swap<D: Device>(&mut self, hands: &mut Hands<D>, staged: Staged) -> Next {
        match hands.tables.swap(staged) {
            Some(swapped) => Next::Finish(Outcome::done(self.bytes, 0, swapped.digest)),
            None => Next::Finish(Outcome::superseded(true, self.bytes)),
        }
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

    /// All bytes are where the plan wants them: tables and owner sets follow.
    fn apply<D: Device>(&mut self, plan: &Plan<'_>, hands: &mut Hands<D>) -> Next {
        if let Some(staged) = self.staged.take() {
            return self.swap(hands, staged);
        }
        match plan.kind() {
            Kind::Upload => self.own(plan, hands),
            _ => Next::Finish(Outcome::done(self.bytes, 0, 0)),
        }
    }

    /// The written blocks belong to the request from now on; its tables do not name them yet.
    fn own<D: Device>(&mut self, plan: &Plan<'_>, hands: &mut Hands<D>) -> Next {
        let mut staged = match hands.tables.stage(plan.request(), &plan.operation()) {
            Ok(staged) => staged,
            Err(StageError::Busy) => return Next::Wait, // the request's other change ends first
            Err(error) => return Next::Finish(Outcome::rejected(refusal_of_stage(&error))),
        };
        for (at, row) in plan.rows().iter().enumerate() {
            let blocks = plan.pairs(row).iter().map(|pair| pair.destination);
            if staged.own(GroupId(row.group), blocks).is_err() {
                hands.tables.discard(staged);
                return Next::Finish(Outcome::rejected(rows(at)));
            }
        }
        self.swap(hands, staged)
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

/// Orders the moves of one row in the group's [`MoveOrder`](crate::moves::MoveOrder).
fn order_row<D: Device>(plan: &Plan<'_>, hands: &mut Hands<D>, at: usize, row: &RowRecord) -> Result<(), Refusal> {
    let null = hands
        .map
        .geometry()
        .group(GroupId(row.group))
        .and_then(|group| group.device_null);
    // The null block holds nothing that anybody reads: it serves where a cycle needs a scratch block.
    let scratch: Vec<u32> = null.iter().map(|block| block.0).collect();
    let order = hands.moves.get_mut(row.group as usize).ok_or_else(|| rows(at))?;
    order.order(plan.pairs(row), &scratch).map_err(|_| rows(at))
}

/// Applies the rows of a Keep or Retain to a staged state.
fn stage_rows(plan: &Plan<'_>, staged: &mut Staged) -> Result<(), Refusal> {
    for (at, row) in plan.rows().iter().enumerate() {
        let table = NewTable {
            pairs: plan.pairs(row),
            tags: plan.tags(row),
            valid_tokens: row.valid_tokens,
        };
        let (layer, group) = (DecoderLayer(row.layer), GroupId(row.group));
        let applied = match plan.mode() {
            Some(RetainMode::SharedTable) => staged.remap_shared(group, table),
            Some(RetainMode::LayerTables) => staged.remap_layer(layer, table),
            Some(RetainMode::ByteMove) => staged.move_layer(layer, table),
            None => Ok(()),
        };
        applied.map_err(|fault| refusal_of_table(at, &fault))?;
    }
    if plan.kind() == Kind::Retain {
        for (at, row) in plan.rows().iter().enumerate() {
            staged
                .own_only_named(GroupId(row.group))
                .map_err(|fault| refusal_of_table(at, &fault))?; // R55
        }
    }
    if plan.is_last_of_request() {
        staged.end();
    }
    Ok(())
}

fn refusal_of_stage(error: &StageError) -> Refusal {
    match error {
        StageError::Generation { found, expected } => Refusal::StaleGeneration {
            found: found.0,
            expected: expected.0,
        },
        StageError::Epoch { found, expected } => Refusal::Revision {
            found: found.0,
            expected: expected.0,
        },
        StageError::Revision { found, least } => Refusal::Revision {
            found: found.0.0,
            expected: least.0.0,
        },
        StageError::Full { requests_max } => Refusal::Requests {
            found: *requests_max,
            most: *requests_max,
        },
        StageError::Busy => Refusal::Revision { found: 0, expected: 0 },
    }
}

fn refusal_of_table(at: usize, fault: &TableFault) -> Refusal {
    match fault {
        TableFault::Slot { slot, expected, .. } => Refusal::Table {
            row: at as u32,
            slot: *slot,
            found: expected.0,
        },
        _ => rows(at),
    }
}
