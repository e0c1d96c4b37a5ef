//! The producer's end of the channel: draft → publish → in flight → terminal.
//!
//! A [`PlanDraft`] is checked, leased and published; from then on the journal holds it. [`Producer::poll`] reads the
//! ranks' terminal slots and returns leases and ring space; [`Producer::next_completion`] hands out what ended. No
//! handle stands for a plan in flight: nothing that a caller drops, forgets or times out on can free memory that a
//! device may still touch (X14).

mod answers;
mod outcome;
mod seats;

use std::collections::VecDeque;

use kvsluice_layout::ids::{Incarnation, PoolGeneration, Position, ProcessEpoch, Rank};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::{Plan, PlanDraft};
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{Kind, Terminal};
use kvsluice_layout::region::{
    BROKEN_AT, BROKEN_FOUND_AT, CONSUMED_AT, GENERATION_AT, INCARNATION_AT, PINNED_AT, PRODUCER_EPOCH_AT, RECLAIM_AT,
    RegionMap, TERMINALS_AT,
};

pub use outcome::{Completion, Counts, Oldest, PublishError};

use crate::members::{Member, write_member};
use crate::recovery::Journaled;
use crate::ring::{ClaimError, PlanWriter, RingShape};
use crate::shared::{Shared, SharedMut};

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
}

#[cfg(test)]
#[cfg(not(loom))]
#[path = "producer_tests.rs"]
pub(crate) mod tests;
