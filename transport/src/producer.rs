//! The producer's end of the channel: draft → publish → in flight → terminal.
//!
//! A [`PlanDraft`] is checked, leased and published; from then on the journal holds it. [`Producer::poll`] reads the
//! ranks' terminal slots and returns leases and ring space; [`Producer::next_completion`] hands out what ended. No
//! handle stands for a plan in flight: nothing that a caller drops, forgets or times out on can free memory that a
//! device may still touch (X14).

use std::collections::VecDeque;

use kvsluice_layout::ids::{Incarnation, PoolGeneration, Position, ProcessEpoch, Rank};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::{Operation, Plan, PlanDraft};
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{Kind, Terminal, TerminalSlot};
use kvsluice_layout::refusal::Refusal;
use kvsluice_layout::region::{
    BROKEN_AT, BROKEN_FOUND_AT, CONSUMED_AT, GENERATION_AT, INCARNATION_AT, PINNED_AT, PRODUCER_EPOCH_AT,
    RANK_GENERATION_AT, RECLAIM_AT, RegionMap, TERMINALS_AT,
};
use thiserror::Error;

use crate::members::{Member, write_member};
use crate::recovery::Journaled;
use crate::ring::{ClaimError, PlanWriter, RingShape};
use crate::shared::{Shared, SharedMut};
use crate::slots::{SlotState, prefetch_slot, read_slot};

/// How many answers ahead a producer asks for while it finds them.
const SLOTS_AHEAD: usize = 4;

/// Who keeps the ring from moving: named in every error about a full ring (X17).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Oldest {
    /// Position of the oldest record in flight.
    pub position: Position,
    /// Its operation.
    pub operation_id: u64,
    /// The first rank that has not answered it.
    pub rank: Rank,
    /// That rank's process.
    pub pid: u32,
}

impl std::fmt::Display for Oldest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            position,
            operation_id,
            rank,
            pid,
        } = self;
        write!(
            f,
            "operation {operation_id} at {position}, held by rank {rank} (pid {pid})"
        )
    }
}

/// Why a draft was not published. The draft is as it was, and nothing is leased.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum PublishError {
    /// The plan breaks a rule (X9).
    #[error("plan refused: {0}")]
    Refused(#[from] Refusal),
    /// The record can never fit the ring.
    #[error("record of {bytes} bytes: the largest that this ring takes is {limit}: split the plan or enlarge the ring")]
    TooLarge {
        /// Bytes of the record.
        bytes: u64,
        /// Largest record.
        limit: u64,
    },
    /// The ring is full (X17).
    #[error("ring full: {needed} bytes needed, {free} free; {}", oldest.map_or(String::new(), |o| format!("oldest: {o}")))]
    Full {
        /// Bytes needed, padding at the wrap included.
        needed: u64,
        /// Bytes free for this kind of record.
        free: u64,
        /// The oldest record in flight.
        oldest: Option<Oldest>,
    },
    /// A rank has no worker (X24).
    #[error("rank {rank} is missing (last pid {pid}): only Abort and Reset pass until a worker attaches")]
    RankMissing {
        /// The rank.
        rank: Rank,
        /// Process that held it last, 0 for none.
        pid: u32,
    },
    /// A rank's device is of another generation (X24).
    #[error("rank {rank} is at pool generation {found}, expected {expected}: publish a Reset and await it")]
    ResetNeeded {
        /// The rank.
        rank: Rank,
        /// Its generation.
        found: u64,
        /// The channel's.
        expected: u64,
    },
    /// An Abort that names nothing in flight.
    #[error("abort of {position}: no operation in flight is there: it is terminal already")]
    NotInFlight {
        /// The position.
        position: Position,
    },
}

/// How an operation ended, over all ranks (X12).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Completion {
    /// Position of the record.
    pub position: Position,
    /// Kind of the record.
    pub kind: Kind,
    /// What it would lead to.
    pub operation: Operation,
    /// The worst terminal of all ranks: the operation may commit only if this is Done.
    pub terminal: Terminal,
    /// A rank with that terminal.
    pub rank: Rank,
    /// Reason of a Rejected, see [`kvsluice_layout::refusal::reason`].
    pub reason: u16,
    /// Row that the reason names, or `u32::MAX`.
    pub row: u32,
    /// Bytes moved, summed over ranks.
    pub bytes_moved: u64,
    /// Device time in nanoseconds, the longest of the ranks.
    pub device_ns: u64,
    /// Digest of the request's device state, where all ranks gave the same one (I9).
    pub digest: Option<u64>,
    /// The record was published by an earlier producer and taken over with the journal.
    pub recovered: bool,
}

/// What the producer counted since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Operations that were published, or taken over with the journal: once nothing is in flight, as many have ended.
    pub published: u64,
    /// Operations that ended Done.
    pub done: u64,
    /// Operations that ended Failed.
    pub failed: u64,
    /// Operations that ended Rejected.
    pub rejected: u64,
    /// Operations that ended Superseded.
    pub superseded: u64,
    /// Operations that ended RankLost.
    pub rank_lost: u64,
    /// Answers that repeat one already taken.
    pub duplicate: u64,
    /// Words in a slot that answer no record of its line.
    pub stale: u64,
    /// Answers that do not belong to the record they answer: the operation fails on that rank (X16).
    pub conflicting: u64,
}

/// One line: the window of records in flight is walked at every poll. What else a completion says is in the record.
struct InFlight {
    position: u64,
    /// Ranks that have not answered.
    pending: u64,
    bytes_moved: u64,
    device_ns: u64,
    digest: u64,
    bytes: u32,
    row: u32,
    /// Aborts in flight that name this operation: its leases outlast them (X15).
    aborts: u32,
    reason: u16,
    kind: Kind,
    worst: Terminal,
    worst_rank: u8,
    digests: Digests,
    released: bool,
    recovered: bool,
}

const _: () = assert!(size_of::<InFlight>() == 64);

/// What the ranks that have answered said about the request's device state.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Digests {
    None,
    Equal,
    Differ,
}

/// A record that is in the ring and not followed yet.
struct Written {
    padding: Option<(Position, u64)>,
    position: Position,
    bytes: u64,
    /// The operation that an Abort names, as an index of those in flight.
    target: Option<usize>,
}

struct RankState<R> {
    member: Member,
    segment: Option<R>,
    pid: u32,
    /// Sequence of the first record in flight that this rank may not have answered.
    cursor: u64,
    terminals_seen: u64,
    answers: u64,
    /// All of the worker's answers were taken by this producer: it was not taken over.
    counted: bool,
    stray: u64,
}

/// The producer's end of the channel. `C` is the control segment, `R` a rank segment (read-only).
pub struct Producer<C, R> {
    map: RegionMap,
    ring: PlanWriter<C>,
    epoch: ProcessEpoch,
    generation: PoolGeneration,
    ranks: Vec<RankState<R>>,
    leases: LeaseTable,
    in_flight: VecDeque<InFlight>,
    /// Sequence of `in_flight[0]`.
    first_sequence: u64,
    completions: VecDeque<Completion>,
    counts: Counts,
    /// Why data records may not pass now; `None` while they may.
    closed: Option<PublishError>,
    polls: u64,
}

impl<C: SharedMut, R: Shared> Producer<C, R> {
    /// The producer of a new channel: the control segment is all zero behind its header. No rank has a worker yet.
    pub fn new(control: C, map: RegionMap, leases: LeaseTable, epoch: ProcessEpoch) -> Self {
        control.store_release(INCARNATION_AT, 1); // X25: before any other word.
        control.store(PRODUCER_EPOCH_AT, epoch.0);
        for rank in 0..map.ranks() {
            write_member(&control, &map, Rank(rank), Member::MISSING);
        }
        let shape = RingShape {
            at: map.ring_at(),
            bytes: map.ring_bytes(),
        };
        let ring = PlanWriter::new(control, shape, RECLAIM_AT, 0, 0);
        Self::assemble(map, ring, leases, epoch, PoolGeneration(0))
    }

    pub(crate) fn assemble(
        map: RegionMap,
        ring: PlanWriter<C>,
        leases: LeaseTable,
        epoch: ProcessEpoch,
        generation: PoolGeneration,
    ) -> Self {
        let ranks = (0..map.ranks())
            .map(|_| RankState {
                member: Member::MISSING,
                segment: None,
                pid: 0,
                cursor: 0,
                terminals_seen: 0,
                answers: 0,
                counted: false,
                stray: 0,
            })
            .collect();
        let lines = map.ring_bytes() / 64;
        let mut producer = Self {
            map,
            ring,
            epoch,
            generation,
            ranks,
            leases,
            // A record takes two lines or more, its padding one: nothing is allocated after start.
            in_flight: VecDeque::with_capacity(lines),
            first_sequence: 0,
            completions: VecDeque::with_capacity(lines),
            counts: Counts::default(),
            closed: None,
            polls: 0,
        };
        producer.refresh_open();
        producer
    }

    /// The region map of the channel.
    pub fn map(&self) -> &RegionMap {
        &self.map
    }

    /// The control segment.
    pub fn control(&self) -> &C {
        self.ring.memory()
    }

    /// Process epoch of this producer.
    pub fn epoch(&self) -> ProcessEpoch {
        self.epoch
    }

    /// Incarnation of the channel.
    pub fn incarnation(&self) -> Incarnation {
        Incarnation(self.control().load(INCARNATION_AT))
    }

    /// Generation of the device pools that data records are for.
    pub fn generation(&self) -> PoolGeneration {
        self.generation
    }

    /// Leases of the records in flight.
    pub fn leases(&self) -> &LeaseTable {
        &self.leases
    }

    /// Limits the blocks that may be leased: see [`LeaseTable::set_ready`] (X31).
    pub fn leases_mut(&mut self) -> &mut LeaseTable {
        &mut self.leases
    }

    /// What was counted since the start.
    pub fn counts(&self) -> Counts {
        let mut counts = self.counts;
        if self.in_flight.is_empty() {
            // A slot is read once, so an answer that is repeated shows only in the rank's own count (X16).
            // What a worker answered to an earlier producer cannot be told from it.
            let repeated = self.ranks.iter().filter(|rank| rank.counted).filter_map(|rank| {
                let terminals = rank.segment.as_ref()?.load(TERMINALS_AT);
                Some(terminals.saturating_sub(rank.answers))
            });
            counts.duplicate = repeated.fold(0, u64::saturating_add); // X33: the word is the rank's
        }
        counts
    }

    /// Counts from here on: what the ranks answered to an earlier producer repeats nothing that this one takes (X16).
    pub(crate) fn disown_answers(&mut self) {
        for rank in &mut self.ranks {
            if let Some(segment) = &rank.segment {
                rank.answers = segment.load(TERMINALS_AT);
            }
        }
    }

    /// Number of records in flight, padding included.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// The ring's shape.
    pub fn shape(&self) -> RingShape {
        self.ring.shape()
    }

    /// Position behind the last record.
    pub fn tail(&self) -> Position {
        self.ring.tail()
    }

    /// Position below which ring space may be reused.
    pub fn reclaim(&self) -> Position {
        self.ring.reclaim()
    }

    /// The worker of a rank.
    pub fn member(&self, rank: Rank) -> Member {
        self.ranks.get(rank.index()).map_or(Member::MISSING, |r| r.member)
    }

    /// The segment of a rank that has a worker.
    pub fn segment(&self, rank: Rank) -> Option<&R> {
        self.ranks.get(rank.index()).and_then(|r| r.segment.as_ref())
    }

    /// Process of a rank's worker, the last one where it is missing.
    pub fn pid(&self, rank: Rank) -> u32 {
        self.ranks.get(rank.index()).map_or(0, |r| r.pid)
    }

    /// Position behind the last record that a rank has consumed.
    pub fn consumed(&self, rank: Rank) -> Option<Position> {
        self.segment(rank).map(|s| Position(s.load_acquire(CONSUMED_AT))) // pairs with: port::Port::consume
    }

    /// Bytes of the pool that every rank has registered (X31): what lies above may not be leased.
    pub fn pinned_bytes(&self) -> u64 {
        let pinned = self.ranks.iter().map(|rank| match &rank.segment {
            Some(segment) => segment.load_acquire(PINNED_AT), // pairs with: port::Port::set_pinned
            None => 0,
        });
        pinned.min().unwrap_or(0)
    }

    /// The first rank that reported broken framing, with the position and the word it found (X9).
    pub fn broken(&self) -> Option<(Rank, Position, u64)> {
        self.ranks.iter().zip(0..).find_map(|(rank, index)| {
            let segment = rank.segment.as_ref()?;
            let at = segment.load_acquire(BROKEN_AT); // pairs with: port::Port::receive
            (at != 0).then(|| (Rank(index), Position(at - 1), segment.load(BROKEN_FOUND_AT)))
        })
    }

    /// Checks a draft, leases what it names and writes it into the ring, not visible before [`flush`](Self::flush).
    /// Returns its position, which names it from now on.
    ///
    /// # Errors
    /// [`PublishError`]: the draft is as it was, nothing is leased, nothing is written.
    pub fn enqueue(&mut self, draft: &PlanDraft) -> Result<Position, PublishError> {
        let written = self.write(draft)?;
        self.hold(draft, &written);
        Ok(written.position)
    }

    /// Makes every enqueued record visible to the ranks, with one release store. The caller then wakes sleepers.
    pub fn flush(&mut self) {
        self.ring.commit();
    }

    /// [`enqueue`](Self::enqueue) and [`flush`](Self::flush) of one draft.
    ///
    /// # Errors
    /// As [`enqueue`](Self::enqueue).
    pub fn publish(&mut self, draft: &PlanDraft) -> Result<Position, PublishError> {
        let written = self.write(draft)?;
        self.flush();
        // While the ranks already read: nobody but this thread looks at the leases.
        self.hold(draft, &written);
        Ok(written.position)
    }

    /// Checks a draft and writes its record.
    #[inline]
    fn write(&mut self, draft: &PlanDraft) -> Result<Written, PublishError> {
        let kind = draft.kind();
        let control = kind.is_control();
        if !control
            && let Some(closed) = self.closed
            && !planted("x24_always_open")
        {
            return Err(closed); // X24
        }
        let target = if kind == Kind::Abort {
            Some(self.abort_target(draft)?)
        } else {
            None
        };
        let bytes = draft.encoded_bytes().map_or(u64::MAX, |bytes| bytes as u64);
        self.ring.claim(bytes, control).map_err(|error| match error {
            ClaimError::TooLarge { bytes, limit } => PublishError::TooLarge { bytes, limit },
            ClaimError::Full { needed, free } => PublishError::Full {
                needed,
                free,
                oldest: self.oldest(),
            },
        })?;
        self.leases.check(&draft.lease_rows())?; // X9
        let (padding, position) = self.ring.write(draft, self.epoch, bytes)?;
        Ok(Written {
            padding,
            position,
            bytes,
            target,
        })
    }

    /// Leases what a written record names, and follows it until it is terminal.
    #[inline]
    fn hold(&mut self, draft: &PlanDraft, written: &Written) {
        self.leases.take(&draft.lease_rows()); // X14
        if let Some(op) = written.target.and_then(|target| self.in_flight.get_mut(target)) {
            op.aborts += 1; // X15
        }
        if let Some((at, length)) = written.padding {
            self.track(at, length, Kind::Padding, false);
        }
        self.track(written.position, written.bytes, draft.kind(), false);
        if draft.kind() == Kind::Reset {
            self.generation = draft.operation().pool_generation;
            self.control().store_release(GENERATION_AT, self.generation.0); // read by inspecting peers only
            self.refresh_open();
        }
    }

    /// Reads the ranks' answers, in ring order per rank and, now and then, those that came out of order. Returns the
    /// number of completions that wait for [`next_completion`](Self::next_completion).
    pub fn poll(&mut self) -> usize {
        self.polls = self.polls.wrapping_add(1);
        // The hint shares a line with words that the rank stores for every record: looking at it on each poll would
        // slow the rank's answers down.
        let thorough = self.polls.is_multiple_of(64);
        self.poll_ranks(thorough)
    }

    /// Like [`poll`](Self::poll), and looks for answers out of order at once: for a caller about to sleep.
    pub fn poll_thorough(&mut self) -> usize {
        self.poll_ranks(true)
    }

    /// The next operation that ended, in the order in which they ended.
    pub fn next_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    /// The oldest record in flight and who holds it.
    pub fn oldest(&self) -> Option<Oldest> {
        let op = self.in_flight.iter().find(|op| op.pending != 0)?;
        let rank = Rank(op.pending.trailing_zeros());
        let operation_id = Self::record(&self.ring, op).get(6).copied().unwrap_or(0);
        Some(Oldest {
            position: Position(op.position),
            operation_id,
            rank,
            pid: self.pid(rank),
        })
    }

    /// Puts a worker at `rank`: it answers every record from the tail on, which it should read first as a Reset (X24).
    /// The entry is stored before the caller publishes that Reset, and an open batch before the entry: the word at
    /// `first` must be one that no reader takes for a commit (X10).
    pub fn join(&mut self, rank: Rank, segment: R, epoch: ProcessEpoch, pid: u32) -> Position {
        self.flush();
        let first = self.ring.tail();
        let member = Member { epoch, first };
        write_member(self.ring.memory(), &self.map, rank, member);
        self.seat(rank, segment, member, pid);
        if let Some(state) = self.ranks.get_mut(rank.index()) {
            state.counted = true;
        }
        first
    }

    /// Takes the worker off `rank` after proof of its death (X23): its slots are read once more, every record that it
    /// still owes ends as RankLost for it, and data records are refused until a worker joins.
    pub fn lose(&mut self, rank: Rank) {
        if !planted("x24_slots_unread") {
            self.poll_thorough();
            // The hint died with the rank: every slot is read, hint or not.
            self.read_behind_cursor(rank.index());
        }
        let Some(state) = self.ranks.get_mut(rank.index()) else {
            return;
        };
        state.segment = None;
        state.member = Member::MISSING;
        write_member(self.ring.memory(), &self.map, rank, Member::MISSING);
        for index in 0..self.in_flight.len() {
            if self.in_flight[index].pending & (1 << rank.0) != 0 {
                self.answer(index, rank, Terminal::RankLost, None);
            }
        }
        self.refresh_open();
        self.advance();
    }

    /// Looks again whether data records may pass: all ranks present, and all at the channel's generation.
    pub fn refresh_open(&mut self) {
        let generation = self.generation.0;
        self.closed = self.ranks.iter().zip(0..).find_map(|(state, index)| {
            let rank = Rank(index);
            let Some(segment) = &state.segment else {
                return Some(PublishError::RankMissing { rank, pid: state.pid });
            };
            let found = segment.load_acquire(RANK_GENERATION_AT); // pairs with: port::Port::set_generation
            (found != generation).then_some(PublishError::ResetNeeded {
                rank,
                found,
                expected: generation,
            })
        });
    }

    /// Why data records may not pass now.
    pub fn closed(&self) -> Option<PublishError> {
        self.closed
    }

    pub(crate) fn seat(&mut self, rank: Rank, segment: R, member: Member, pid: u32) {
        let cursor = self.first_sequence;
        if let Some(state) = self.ranks.get_mut(rank.index()) {
            *state = RankState {
                member,
                segment: Some(segment),
                pid,
                cursor,
                terminals_seen: 0,
                answers: 0,
                counted: false,
                stray: 0,
            };
        }
        self.refresh_open();
    }

    /// Adds a record to those in flight. Ranks without a worker have lost it already.
    #[inline]
    fn track(&mut self, position: Position, bytes: u64, kind: Kind, recovered: bool) {
        let mut pending = 0;
        let mut missing = None;
        for (state, index) in self.ranks.iter().zip(0_u8..) {
            if state.segment.is_some() && position >= state.member.first {
                pending |= 1 << index;
            } else {
                missing = Some(index);
            }
        }
        self.counts.published += u64::from(kind != Kind::Padding);
        self.in_flight.push_back(InFlight {
            position: position.0,
            pending,
            bytes_moved: 0,
            device_ns: 0,
            digest: 0,
            bytes: bytes as u32, // At most the ring's size, which is far below 2^32.
            row: u32::MAX,
            aborts: 0,
            reason: 0,
            kind,
            worst: if missing.is_some() {
                Terminal::RankLost
            } else {
                Terminal::Done
            },
            worst_rank: missing.unwrap_or(0),
            digests: Digests::None,
            released: false,
            recovered,
        });
        if pending == 0 && !recovered {
            self.complete(self.in_flight.len() - 1);
        }
    }

    /// The record of an operation, as far as it was copied: all of it, or the first line of a padding record.
    #[inline]
    fn record<'a>(ring: &'a PlanWriter<C>, op: &InFlight) -> &'a [u64] {
        let bytes = if op.kind == Kind::Padding {
            64
        } else {
            u64::from(op.bytes)
        };
        ring.record(Position(op.position), bytes)
    }

    /// Ends the records of a journal that no rank owes: once all are tracked, since an Abort further on may hold the
    /// leases of an earlier one (X15).
    pub(crate) fn complete_unowed(&mut self) {
        for at in 0..self.in_flight.len() {
            if self.in_flight[at].pending == 0 {
                self.complete(at);
            }
        }
    }

    /// Adds a record that a takeover read from the journal: its leases are held like those of any record in flight.
    pub(crate) fn track_journaled(&mut self, record: Journaled) {
        if let Ok(plan) = Plan::parse_checked_before(self.ring.record(record.position, record.bytes)) {
            if !planted("x14_takeover_forgets_leases") {
                self.leases.take(&plan.lease_rows());
            }
            let target = plan.header().target;
            if plan.kind() == Kind::Abort
                && let Some(op) = self.in_flight.iter_mut().find(|op| op.position == target)
            {
                op.aborts += 1; // X15
            }
        }
        self.track(record.position, record.bytes, record.kind, true);
    }

    fn abort_target(&self, draft: &PlanDraft) -> Result<usize, PublishError> {
        let position = draft.target();
        let found = self.in_flight.binary_search_by_key(&position, |op| op.position).ok();
        found
            .filter(|&index| {
                self.in_flight
                    .get(index)
                    .is_some_and(|op| op.pending != 0 && !op.kind.is_control() && op.kind != Kind::Padding)
            })
            .ok_or(PublishError::NotInFlight {
                position: Position(position),
            })
    }

    fn poll_ranks(&mut self, thorough: bool) -> usize {
        let shape = self.ring.shape();
        let mut advanced = false;
        for index in 0..self.ranks.len() {
            let rank = Rank(index as u32);
            let bit = 1_u64 << index;
            let end = self.first_sequence + self.in_flight.len() as u64;
            loop {
                let state = &mut self.ranks[index];
                state.cursor = state.cursor.max(self.first_sequence);
                if state.cursor == end {
                    break;
                }
                let at = (state.cursor - self.first_sequence) as usize;
                let op = &self.in_flight[at];
                if op.pending & bit == 0 {
                    state.cursor += 1;
                    continue;
                }
                let Some(segment) = &state.segment else { break };
                match read_slot(segment, shape, Position(op.position)) {
                    SlotState::Answered(slot) => {
                        // The next answers are probably there too, each a line to be fetched from the other core.
                        if let Some(ahead) = self.in_flight.get(at + SLOTS_AHEAD) {
                            prefetch_slot(segment, shape, Position(ahead.position));
                        }
                        state.cursor += 1;
                        advanced = true;
                        self.take_answer(at, rank, &slot);
                    }
                    SlotState::Open => break,
                    SlotState::Stray(word) => {
                        self.stray(index, word);
                        break;
                    }
                }
            }
            if thorough && self.ranks[index].cursor + 1 < end {
                advanced |= self.poll_out_of_order(index);
            }
        }
        // A record that no rank owes is terminal from the start.
        if advanced || self.in_flight.front().is_some_and(|op| op.pending == 0) {
            self.advance();
        }
        self.completions.len()
    }

    fn poll_out_of_order(&mut self, index: usize) -> bool {
        let state = &mut self.ranks[index];
        let Some(segment) = &state.segment else { return false };
        let terminals = segment.load_acquire(TERMINALS_AT); // a hint only; pairs with: port::Port::answer
        if terminals == state.terminals_seen {
            return false;
        }
        state.terminals_seen = terminals;
        self.read_behind_cursor(index)
    }

    /// Reads the slots of the records behind the first one that the rank has not answered.
    fn read_behind_cursor(&mut self, index: usize) -> bool {
        let Some(state) = self.ranks.get(index) else {
            return false;
        };
        let from = (state.cursor + 1).saturating_sub(self.first_sequence) as usize;
        let shape = self.ring.shape();
        let mut advanced = false;
        for at in from..self.in_flight.len() {
            if self.in_flight[at].pending & (1 << index) == 0 {
                continue;
            }
            let Some(segment) = &self.ranks[index].segment else {
                break;
            };
            if let SlotState::Answered(slot) = read_slot(segment, shape, Position(self.in_flight[at].position)) {
                advanced = true;
                self.take_answer(at, Rank(index as u32), &slot);
            }
        }
        advanced
    }

    fn stray(&mut self, index: usize, word: u64) {
        // Counted once per value: a stray word stays where it is until the rank overwrites it.
        if let Some(state) = self.ranks.get_mut(index)
            && state.stray != word
        {
            state.stray = word;
            self.counts.stale += 1; // X16
        }
    }

    /// Matches an answer against the record it answers (X12), and takes it.
    #[inline]
    fn take_answer(&mut self, at: usize, rank: Rank, slot: &TerminalSlot) {
        let record = Self::record(&self.ring, &self.in_flight[at]);
        let word = |i: usize| record.get(i).copied().unwrap_or(0);
        let (identity, producer_epoch) = (word(1), word(4));
        let state = &mut self.ranks[rank.index()];
        state.answers += 1;
        let epoch = state.member.epoch.0;
        // X12: the answer is to this record, whoever published it.
        let producer = if planted("x12_current_epoch") {
            self.epoch.0
        } else {
            producer_epoch
        };
        let belongs = slot.identity == identity && slot.producer_epoch == producer && slot.worker_epoch == epoch;
        let terminal = match Terminal::from_slot(slot.status) {
            Some(terminal) if belongs => terminal,
            _ => {
                self.counts.conflicting += 1; // X16: an error for this operation only
                Terminal::Failed
            }
        };
        self.answer(at, rank, terminal, Some(slot));
    }

    #[inline]
    fn answer(&mut self, at: usize, rank: Rank, terminal: Terminal, slot: Option<&TerminalSlot>) {
        let op = &mut self.in_flight[at];
        op.pending &= !(1 << rank.0);
        if let Some(slot) = slot {
            op.bytes_moved = op.bytes_moved.saturating_add(slot.bytes_moved);
            op.device_ns = op.device_ns.max(slot.device_ns);
            if op.digests == Digests::None {
                (op.digest, op.digests) = (slot.digest, Digests::Equal);
            } else if op.digest != slot.digest {
                op.digests = Digests::Differ;
            }
        }
        if terminal > op.worst || planted("x12_last_rank_decides") {
            op.worst = terminal;
            op.worst_rank = rank.0 as u8; // Below MAX_RANKS, 64.
            op.reason = slot.map_or(0, |s| s.reason);
            op.row = slot.map_or(u32::MAX, |s| s.row);
        }
        let early = planted("x11_first_rank_completes") && !op.released;
        if op.pending == 0 || early {
            self.complete(at);
        }
    }

    /// Every rank is terminal: the leases end, unless an Abort of the operation is still in flight (X15).
    #[inline]
    fn complete(&mut self, at: usize) {
        let op = &mut self.in_flight[at];
        if op.kind == Kind::Padding {
            op.released = true;
            return;
        }
        let plan = Plan::parse_checked_before(Self::record(&self.ring, op)).ok();
        let (operation, target) = plan.map_or((Operation::default(), u64::MAX), |plan| {
            (plan.operation(), plan.header().target)
        });
        let (kind, worst) = (op.kind, op.worst);
        self.completions.push_back(Completion {
            position: Position(op.position),
            kind,
            operation,
            terminal: worst,
            rank: Rank(u32::from(op.worst_rank)),
            reason: op.reason,
            row: op.row,
            bytes_moved: op.bytes_moved,
            device_ns: op.device_ns,
            digest: (op.digests == Digests::Equal).then_some(op.digest),
            recovered: op.recovered,
        });
        if (op.aborts == 0 || planted("x15_release_before_abort_ends")) && !op.released {
            op.released = true;
            if let Some(plan) = plan {
                self.leases.release(&plan.lease_rows());
            }
        }
        match worst {
            Terminal::Done => self.counts.done += 1,
            Terminal::Failed => self.counts.failed += 1,
            Terminal::Rejected => self.counts.rejected += 1,
            Terminal::Superseded => self.counts.superseded += 1,
            Terminal::RankLost => self.counts.rank_lost += 1,
        }
        match kind {
            Kind::Reset => self.refresh_open(),
            Kind::Abort => self.abort_ended(target),
            _ => {}
        }
    }

    /// An Abort of the operation at `target` is terminal on every rank.
    fn abort_ended(&mut self, target: u64) {
        let Ok(index) = self.in_flight.binary_search_by_key(&target, |op| op.position) else {
            return;
        };
        let Some(op) = self.in_flight.get_mut(index) else {
            return;
        };
        op.aborts = op.aborts.saturating_sub(1);
        if op.aborts == 0 && op.pending == 0 {
            self.release(index);
        }
    }

    fn release(&mut self, at: usize) {
        let op = &mut self.in_flight[at];
        if op.released {
            return;
        }
        op.released = true;
        if let Ok(plan) = Plan::parse_checked_before(Self::record(&self.ring, op)) {
            self.leases.release(&plan.lease_rows());
        }
    }

    /// Moves `reclaim` over every record at the front whose leases have ended (X11). A record that is not committed
    /// stays, answered by nobody or not: a takeover would take the records behind it for published ones.
    fn advance(&mut self) {
        let committed = self.ring.committed();
        let ended = |op: &InFlight| op.pending == 0 && op.released && Position(op.position) < committed;
        while self.in_flight.front().is_some_and(ended) {
            self.in_flight.pop_front();
            self.first_sequence += 1;
        }
        let reclaim = self.in_flight.front().map_or(committed, |op| Position(op.position));
        self.ring.set_reclaim(reclaim);
    }
}

#[cfg(test)]
#[cfg(not(loom))]
#[path = "producer_tests.rs"]
pub(crate) mod tests;
