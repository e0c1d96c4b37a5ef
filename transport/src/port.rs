//! A worker's end of the channel: next plan → consumed → terminal.
//!
//! [`Port::receive`] copies a record out, validates the copy and leases what it names; the [`Ticket`] that it returns is
//! the duty to answer, and [`Port::finish`] takes it back, so an operation is answered once by construction (X12).

use std::collections::VecDeque;

use kvsluice_layout::ids::{PoolGeneration, Position, ProcessEpoch};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::Plan;
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{Kind, LINE_WORDS, Terminal, TerminalSlot};
use kvsluice_layout::refusal::Refusal;
use kvsluice_layout::region::{
    BROKEN_AT, BROKEN_FOUND_AT, CONSUMED_AT, PINNED_AT, RANK_GENERATION_AT, TERMINALS_AT, WORKER_EPOCH_AT,
};

use crate::ring::{Broken, PlanReader, RecordAt, RingShape};
use crate::shared::{Shared, SharedMut};
use crate::slots::{prefetch_slot_write, write_slot};

/// How many records ahead a worker asks for the slot of.
const SLOTS_AHEAD: u64 = 4;

/// The duty to answer one record.
///
/// # Drop behaviour
/// Dropping a ticket answers nothing: the operation stays open on this rank, and its blocks stay leased, until the
/// process ends and the producer has proof of it. A lost ticket never frees memory that a device may touch (X14).
#[must_use = "a record that is not answered keeps its blocks leased"]
#[derive(Debug)]
pub struct Ticket {
    at: RecordAt,
    sequence: u64,
    kind: Kind,
}

impl Ticket {
    /// Position of the record.
    pub fn position(&self) -> Position {
        self.at.position
    }

    /// Kind of the record.
    pub fn kind(&self) -> Kind {
        self.kind
    }
}

/// What the ring holds for this rank.
#[derive(Debug)]
pub enum Incoming {
    /// A plan whose bytes, ids and leases hold.
    Plan(Ticket),
    /// A record that was refused and answered with Rejected; nothing was touched.
    Rejected {
        /// Position of the record.
        position: Position,
        /// Operation it named, by its own account.
        operation_id: u64,
        /// Why.
        refusal: Refusal,
    },
    /// The next record is of a producer that this worker has not shaken hands with (X25): it stays where it is.
    AwaitHandshake(ProcessEpoch),
}

/// How an operation ended on this rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Outcome {
    /// Done, Superseded or Failed.
    pub terminal: Terminal,
    /// Some copies of a Superseded operation had been submitted.
    pub partial: bool,
    /// Bytes moved.
    pub bytes_moved: u64,
    /// Nanoseconds from the first submit to the event.
    pub device_ns: u64,
    /// Digest of the request's device state afterwards.
    pub digest: u64,
    /// Why a plan was refused after it had been accepted (tables that differ), with Rejected.
    pub refusal: Option<Refusal>,
}

impl Outcome {
    /// Done, with what was moved.
    pub fn done(bytes_moved: u64, device_ns: u64, digest: u64) -> Self {
        Self {
            terminal: Terminal::Done,
            partial: false,
            bytes_moved,
            device_ns,
            digest,
            refusal: None,
        }
    }

    /// Ended by an Abort.
    pub fn superseded(partial: bool, bytes_moved: u64) -> Self {
        Self {
            terminal: Terminal::Superseded,
            partial,
            bytes_moved,
            device_ns: 0,
            digest: 0,
            refusal: None,
        }
    }

    /// Failed on the device.
    pub fn failed() -> Self {
        Self {
            terminal: Terminal::Failed,
            partial: true,
            bytes_moved: 0,
            device_ns: 0,
            digest: 0,
            refusal: None,
        }
    }

    /// Refused before any copy.
    pub fn rejected(refusal: Refusal) -> Self {
        Self {
            terminal: Terminal::Rejected,
            partial: false,
            bytes_moved: 0,
            device_ns: 0,
            digest: 0,
            refusal: Some(refusal),
        }
    }
}

struct Open {
    position: u64,
    answered: bool,
}

/// A worker's end of the channel. `C` is the control segment (read-only), `R` the rank's own.
pub struct Port<C, R> {
    reader: PlanReader<C>,
    rank: R,
    leases: LeaseTable,
    epoch: ProcessEpoch,
    /// Producers whose records are accepted, newest last: all that this worker shook hands with.
    producers: Vec<ProcessEpoch>,
    generation: PoolGeneration,
    /// Generation of the last Reset that was read, be it applied or not.
    generation_ahead: PoolGeneration,
    copy_sources: bool,
    open: VecDeque<Open>,
    first_sequence: u64,
    terminals: u64,
    /// A record that was read but belongs to a producer not yet known.
    held: Option<RecordAt>,
}

impl<C: Shared, R: SharedMut> Port<C, R> {
    /// The port of a worker that joins at `first` with an empty device. Stores the worker's epoch and the ring position
    /// in the rank segment.
    pub fn new(
        control: C,
        rank: R,
        shape: RingShape,
        leases: LeaseTable,
        epoch: ProcessEpoch,
        producer: ProcessEpoch,
        first: Position,
    ) -> Self {
        rank.store(WORKER_EPOCH_AT, epoch.0);
        rank.store(RANK_GENERATION_AT, 0);
        rank.store_release(CONSUMED_AT, first.0); // pairs with: producer::Producer::consumed
        Self {
            reader: PlanReader::new(control, shape, first),
            rank,
            leases,
            epoch,
            producers: vec![producer],
            generation: PoolGeneration(0),
            generation_ahead: PoolGeneration(0),
            copy_sources: true,
            open: VecDeque::with_capacity(1024),
            first_sequence: 0,
            terminals: 0,
            held: None,
        }
    }

    /// Refuses the source kind "copy", where it was not negotiated.
    pub fn refuse_copy_sources(&mut self) {
        self.copy_sources = false;
    }

    /// Accepts the records of one more producer: it has taken the channel over and shaken hands (X25).
    pub fn accept_producer(&mut self, producer: ProcessEpoch) {
        if !self.producers.contains(&producer) {
            self.producers.push(producer);
        }
    }

    /// The rank segment.
    pub fn rank(&self) -> &R {
        &self.rank
    }

    /// The control segment.
    pub fn control(&self) -> &C {
        self.reader.memory()
    }

    /// Process epoch of this worker.
    pub fn epoch(&self) -> ProcessEpoch {
        self.epoch
    }

    /// Position of the next record to be read.
    pub fn cursor(&self) -> Position {
        self.held.map_or(self.reader.cursor(), |held| held.position)
    }

    /// Generation of this rank's device pool.
    pub fn generation(&self) -> PoolGeneration {
        self.generation
    }

    /// Number of records answered so far, padding included.
    pub fn answers(&self) -> u64 {
        self.terminals
    }

    /// Number of records that were accepted and not answered yet.
    pub fn unanswered(&self) -> usize {
        self.open.iter().filter(|open| !open.answered).count()
    }

    /// True where the record at `position` was accepted and is not answered yet.
    pub fn is_unanswered(&self, position: Position) -> bool {
        let at = self.open.binary_search_by_key(&position.0, |open| open.position);
        at.ok()
            .and_then(|at| self.open.get(at))
            .is_some_and(|open| !open.answered)
    }

    /// True where a record waits: one load, without ordering.
    #[inline]
    pub fn has_next(&self) -> bool {
        self.held.is_some() || self.reader.has_next()
    }

    /// Takes the next record from the ring, where one is committed: copied out, validated, leased and consumed.
    /// Padding is answered on the way.
    ///
    /// # Errors
    /// [`Broken`] for framing that cannot be trusted. It is also stored in the rank segment, for the producer; the
    /// worker drains what it has accepted and detaches.
    pub fn receive(&mut self) -> Result<Option<Incoming>, Broken> {
        loop {
            let at = match self.held.take() {
                Some(held) => held,
                None => {
                    let unanswered = self.open.front().map_or(u64::MAX / 2, |open| open.position);
                    match self.reader.receive(Position(unanswered)) {
                        Ok(Some(at)) => at,
                        Ok(None) => return Ok(None),
                        Err(broken) => {
                            self.rank.store(BROKEN_FOUND_AT, broken.found);
                            // pairs with: producer::Producer::poll, which reads it before its reason.
                            self.rank.store_release(BROKEN_AT, broken.position.0 + 1);
                            return Err(broken);
                        }
                    }
                }
            };
            // A slot that the producer has read is taken back while the records before it are worked on: the slot of a
            // record some places on, if the next ones are as long as this one.
            let ahead = Position(at.position.0 + SLOTS_AHEAD * at.bytes);
            prefetch_slot_write(&self.rank, self.reader.shape(), ahead);
            let record = self.reader.record(at);
            let producer = ProcessEpoch(record.get(4).copied().unwrap_or(0));
            // A record whose bytes do not hold is refused below, whoever it claims to be from (X9).
            let whole = || record.len() == LINE_WORDS || !matches!(Plan::parse(record), Err(Refusal::Checksum { .. }));
            if !self.producers.contains(&producer) && whole() {
                self.held = Some(at);
                return Ok(Some(Incoming::AwaitHandshake(producer)));
            }
            let identity = record.get(1).copied().unwrap_or(0);
            let operation_id = record.get(6).copied().unwrap_or(0);
            if record.len() == LINE_WORDS {
                // Padding: answered like every record, so that reclaim needs no second rule (X11).
                self.consume(at);
                self.answer(at.position, identity, producer, &Outcome::done(0, 0, 0));
                continue;
            }
            let checked = Plan::parse(record).and_then(|plan| {
                let header = plan.header();
                let data = !plan.kind().is_control();
                // Behind a Reset that is still to be applied, the old generation is stale and the new one premature.
                let (found, expected) = (header.pool_generation, self.generation_ahead.0);
                let stale = found != expected || found != self.generation.0;
                if data && stale && !planted("x24a_generation_unchecked") {
                    return Err(Refusal::StaleGeneration { found, expected }); // X24a
                }
                if !self.copy_sources
                    && let Some(row) = plan.rows().iter().position(|row| row.source_kind == 2)
                {
                    return Err(Refusal::SourceKind {
                        row: row as u32,
                        found: 2,
                    });
                }
                let rows = plan.lease_rows();
                self.leases.check(&rows)?; // X9
                self.leases.take(&rows); // X14
                Ok(plan.kind())
            });
            self.consume(at);
            match checked {
                Ok(kind) => {
                    if kind == Kind::Reset {
                        self.generation_ahead = PoolGeneration(record.get(7).copied().unwrap_or(0));
                    }
                    let sequence = self.first_sequence + self.open.len() as u64;
                    self.open.push_back(Open {
                        position: at.position.0,
                        answered: false,
                    });
                    return Ok(Some(Incoming::Plan(Ticket { at, sequence, kind })));
                }
                Err(refusal) => {
                    self.answer(at.position, identity, producer, &Outcome::rejected(refusal));
                    return Ok(Some(Incoming::Rejected {
                        position: at.position,
                        operation_id,
                        refusal,
                    }));
                }
            }
        }
    }

    /// The plan of a ticket: a view of this process's private copy, parsed again without its checksum.
    pub fn plan(&self, ticket: &Ticket) -> Option<Plan<'_>> {
        Plan::parse_checked_before(self.reader.record(ticket.at)).ok()
    }

    /// Answers a record: its leases on this rank end, and its terminal becomes visible to the producer.
    ///
    /// The caller states with [`Terminal::Done`] that a device event proved the end of all reads and writes (X13).
    pub fn finish(&mut self, ticket: Ticket, outcome: &Outcome) {
        let record = self.reader.record(ticket.at);
        let identity = record.get(1).copied().unwrap_or(0);
        let producer = ProcessEpoch(record.get(4).copied().unwrap_or(0));
        // The answer first: the producer waits for it, and nobody but this thread looks at these leases.
        self.answer(ticket.at.position, identity, producer, outcome);
        if let Ok(plan) = Plan::parse_checked_before(self.reader.record(ticket.at)) {
            self.leases.release(&plan.lease_rows());
        }
        if let Some(open) = self.open.get_mut((ticket.sequence - self.first_sequence) as usize) {
            open.answered = true;
        }
        while self.open.front().is_some_and(|open| open.answered) {
            self.open.pop_front();
            self.first_sequence += 1;
        }
    }

    /// Sets the generation of this rank's device pool: the Reset of it is about to be answered (X24a), or a change of
    /// tables has failed, and no generation (0) holds until the next Reset.
    pub fn set_generation(&mut self, generation: PoolGeneration) {
        self.generation = generation;
        if planted("x24a_generation_not_stored") {
            return;
        }
        // pairs with: producer::Producer::refresh_open, after the terminal
        self.rank.store_release(RANK_GENERATION_AT, generation.0);
    }

    /// States how many bytes of the pool this rank has registered (X31).
    pub fn set_pinned(&self, bytes: u64) {
        // pairs with: producer::Producer::pinned_bytes
        self.rank.store_release(PINNED_AT, bytes);
    }

    fn consume(&self, at: RecordAt) {
        // X12: stored before the terminal of the record.
        if !planted("x12_consumed_never") {
            self.rank.store(CONSUMED_AT, at.position.0 + at.bytes);
        }
    }

    fn answer(&mut self, position: Position, identity: u64, producer: ProcessEpoch, outcome: &Outcome) {
        let slot = TerminalSlot {
            commit: position.0 + 1,
            identity,
            producer_epoch: producer.0,
            worker_epoch: self.epoch.0,
            status: outcome.terminal as u8,
            partial: u8::from(outcome.partial),
            reason: outcome.refusal.map_or(0, |r| r.code()),
            row: outcome.refusal.map_or(u32::MAX, |r| r.row()),
            bytes_moved: outcome.bytes_moved,
            device_ns: outcome.device_ns,
            digest: outcome.digest,
        };
        if !planted("x12_lost_terminal") {
            write_slot(&self.rank, self.reader.shape(), position, &slot);
        }
        if planted("x12_terminal_twice") {
            write_slot(&self.rank, self.reader.shape(), position, &slot);
        }
        self.terminals += 1;
        // pairs with: producer::Producer::poll_out_of_order, which looks at the slots only when this word has moved.
        self.rank.store_release(TERMINALS_AT, self.terminals);
    }
}

#[cfg(test)]
#[cfg(not(loom))]
#[path = "port_tests.rs"]
mod tests;
