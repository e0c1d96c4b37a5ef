//! The checker: an account of the channel that shares no code with it.
//!
//! It sees what the workload meant ([`Spec`]), every store of the producer and of the workers in order ([`Stored`]), and
//! what the simulator did to them; it reads records and answers by the offsets of `docs/protocol.md`. From that it knows
//! of every record which rank owes an answer, and of every block who uses it. The first rule that does not hold ends the
//! run with a [`Violation`].

mod ranks;

use std::collections::{BTreeMap, VecDeque};

use kvsluice_layout::record::{Kind, RetainMode};
use kvsluice_layout::region::{INCARNATION_AT, RECLAIM_AT};
use kvsluice_transport::producer::Completion;
use kvsluice_transport::shared::{Heap, Shared};
use thiserror::Error;

use super::memory::Stored;
use super::shape::{DEVICE_BLOCKS, GROUPS, HOST_BLOCKS, RANKS_MAX};
use super::spec::{Spec, Use};

const DONE: u8 = 1;
const SUPERSEDED: u8 = 2;
const REJECTED: u8 = 3;
const FAILED: u8 = 4;
const RANK_LOST: u8 = 5;

/// A rule that does not hold.
#[derive(Debug, Error)]
#[error("{rule}: {what}")]
pub(super) struct Violation {
    /// The rule's name.
    pub(super) rule: &'static str,
    /// What was seen.
    pub(super) what: String,
}

/// Fails with a rule unless `holds`.
pub(super) fn check(holds: bool, rule: &'static str, what: impl FnOnce() -> String) -> Result<(), Violation> {
    match holds {
        true => Ok(()),
        false => Err(Violation { rule, what: what() }),
    }
}

/// What a rank said about a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answer {
    Owed,
    /// Status and digest.
    Given(u8, u64),
    /// The rank had no worker, or lost it.
    Lost,
    /// The rank's segment is scribbled over: it may seem to say anything.
    Wild,
}

/// A record that the producer accepted.
struct Record {
    spec: Option<Spec>,
    uses: Vec<Use>,
    bytes: u64,
    checksum: u64,
    producer: u64,
    published: bool,
    answers: [Answer; RANKS_MAX as usize],
    /// Aborts of it that are not settled.
    aborts: u32,
    aborted: bool,
    /// Every rank is terminal.
    ended: bool,
    /// And every Abort of it has ended: its blocks are free.
    settled: bool,
    /// Incarnation that last reported its end.
    reported: u64,
}

impl Record {
    fn kind(&self) -> Kind {
        self.spec.as_ref().map_or(Kind::Padding, |spec| spec.kind)
    }
}

/// A worker that the membership names.
struct Seat {
    epoch: u64,
    first: u64,
    consumed: u64,
    generation: u64,
    left: Option<Left>,
    wild: bool,
    /// Its device fails at times.
    faulty: bool,
}

/// A rank has left its generation, because a change of its tables failed (R59).
#[derive(Clone, Copy)]
struct Left {
    /// The one that it was at.
    generation: u64,
    /// What it had consumed.
    consumed: u64,
    /// The change that failed.
    cause: Option<u64>,
    /// The producer has heard of it.
    known: bool,
}

/// Users of one block.
#[derive(Clone, Copy, Default)]
struct Users {
    readers: u32,
    writers: u32,
}

/// What the account has seen.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Seen {
    /// Records that were published.
    pub(super) records: u64,
    /// Answers of ranks.
    pub(super) answers: u64,
    /// Operations whose every rank was Done.
    pub(super) done: u64,
    /// Operations that ended otherwise.
    pub(super) not_done: u64,
}

/// The account.
pub(super) struct Model {
    ranks: u32,
    ring: (usize, u64),
    records: BTreeMap<u64, Record>,
    unpublished: VecDeque<u64>,
    /// What a dead producer was publishing, and its generation.
    attempt: Option<(Spec, u64)>,
    seats: Vec<Option<Seat>>,
    host: Vec<Users>,
    device: Vec<Users>,
    /// Tag of what each device block holds on all ranks, where one is known.
    device_tags: Vec<Option<u64>>,
    /// Position behind the last published record.
    pub(super) tail: u64,
    reclaim: u64,
    incarnation: u64,
    producer: u64,
    last_reset: u64,
    highest_operation: u64,
    /// The first store of a takeover must be the incarnation.
    expects_incarnation: bool,
    pub(super) seen: Seen,
}

impl Model {
    pub(super) fn new(ranks: u32, ring_at: usize, ring_bytes: usize, producer: u64) -> Self {
        let blocks = GROUPS * HOST_BLOCKS.max(DEVICE_BLOCKS) as usize;
        Self {
            ranks,
            ring: (ring_at, ring_bytes as u64),
            records: BTreeMap::new(),
            unpublished: VecDeque::new(),
            attempt: None,
            seats: (0..ranks).map(|_| None).collect(),
            host: vec![Users::default(); blocks],
            device: vec![Users::default(); blocks],
            device_tags: vec![None; blocks],
            tail: 0,
            reclaim: 0,
            incarnation: 1,
            producer,
            last_reset: 0,
            highest_operation: 0,
            expects_incarnation: true,
            seen: Seen::default(),
        }
    }

    fn at(group: u32, block: u32) -> usize {
        group as usize * HOST_BLOCKS.max(DEVICE_BLOCKS) as usize + block as usize
    }

    /// Tag of what a device block holds on every rank.
    pub(super) fn device_tag(&self, group: u32, block: u32) -> Option<u64> {
        self.device_tags.get(Self::at(group, block)).copied().flatten()
    }

    /// Compute gave a device block another content, on every rank.
    pub(super) fn set_device_tag(&mut self, group: u32, block: u32, tag: Option<u64>) {
        if let Some(at) = self.device_tags.get_mut(Self::at(group, block)) {
            *at = tag;
        }
    }

    /// True where a record in flight uses a host block: a refill of it now would be seen by a device (X14).
    pub(super) fn uses_host(&self, group: u32, block: u32) -> bool {
        let users = self.host.get(Self::at(group, block));
        users.is_some_and(|users| users.readers + users.writers > 0)
    }

    /// Device blocks that records of the journal name.
    pub(super) fn journal_uses(&self) -> impl Iterator<Item = Use> {
        self.records
            .values()
            .flat_map(|record| &record.uses)
            .copied()
            .filter(|one| one.device)
    }

    /// True where a write-back is in flight, or was not read yet: its slots are in use.
    pub(super) fn writes_back(&self) -> bool {
        let open = |record: &Record| !record.settled || record.reported != self.incarnation;
        self.records
            .values()
            .any(|record| record.kind() == Kind::WriteBack && open(record))
    }

    /// The first data record that is not settled.
    pub(super) fn first_open(&self) -> Option<Spec> {
        let position = self.open_data().next()?;
        self.records.get(&position)?.spec.clone()
    }

    /// Positions of data records that are not settled.
    pub(super) fn open_data(&self) -> impl Iterator<Item = u64> {
        let open = |record: &Record| !record.settled && record.spec.as_ref().is_some_and(Spec::is_data);
        self.records
            .iter()
            .filter(move |(_, record)| open(record))
            .map(|(position, _)| *position)
    }

    /// True where the rank's worker is a member that nobody scribbles over.
    pub(super) fn is_sound(&self, rank: u32) -> bool {
        self.seat(rank).is_some_and(|seat| !seat.wild)
    }

    fn seat(&self, rank: u32) -> Option<&Seat> {
        self.seats.get(rank as usize).and_then(Option::as_ref)
    }

    // The producer.

    /// The producer accepted a plan at `position`; no reader may see it yet.
    pub(super) fn accepted(&mut self, spec: Spec, position: u64, generation: u64) -> Result<(), Violation> {
        if spec.is_data() {
            let open = (0..self.ranks).all(|rank| self.seat(rank).is_some_and(|seat| seat.is_at(generation)));
            check(
                open,
                "X24 data records pass only when every rank is present at the generation",
                || format!("{:?} at {position}", spec.kind),
            )?;
        }
        if spec.kind == Kind::Reset {
            self.last_reset = position;
        }
        let uses = spec.uses();
        for one in &uses {
            let users = self.users(one);
            let taken = users.writers > 0 || one.writes && users.readers > 0;
            check(!taken, "X14 no block is handed out while leased", || {
                format!("{one:?} by a plan at {position}")
            })?;
        }
        for one in &uses {
            self.take(one, 1);
        }
        if spec.kind == Kind::Abort {
            let target = self.records.get_mut(&spec.target);
            if let Some(target) = target {
                target.aborts += 1;
                target.aborted = true;
                if target.settled {
                    // The producer has not heard of its end: the blocks stay leased until this Abort has ended (X15).
                    target.settled = false;
                    let uses = target.uses.clone();
                    uses.iter().for_each(|one| self.take(one, 1));
                }
            }
        }
        self.unpublished.push_back(position);
        self.insert(position, Some(spec), uses);
        self.settle(position); // where no rank is there to answer
        Ok(())
    }

    fn users(&mut self, one: &Use) -> Users {
        let side = if one.device { &self.device } else { &self.host };
        side.get(Self::at(one.group, one.block)).copied().unwrap_or_default()
    }

    fn take(&mut self, one: &Use, by: i32) {
        let side = if one.device { &mut self.device } else { &mut self.host };
        if let Some(users) = side.get_mut(Self::at(one.group, one.block)) {
            let count = if one.writes {
                &mut users.writers
            } else {
                &mut users.readers
            };
            *count = count.saturating_add_signed(by);
        }
    }

    fn insert(&mut self, position: u64, spec: Option<Spec>, uses: Vec<Use>) {
        let mut answers = [Answer::Lost; RANKS_MAX as usize];
        for (answer, seat) in answers.iter_mut().zip(&self.seats) {
            *answer = match seat {
                Some(seat) if position >= seat.first && seat.wild => Answer::Wild,
                Some(seat) if position >= seat.first => Answer::Owed,
                _ => Answer::Lost,
            };
        }
        let record = Record {
            spec,
            uses,
            bytes: 0,
            checksum: 0,
            producer: self.producer,
            published: false,
            answers,
            aborts: 0,
            aborted: false,
            ended: false,
            settled: false,
            reported: 0,
        };
        self.records.insert(position, record);
    }

    /// What the producer stored in one action. `flushed`: the action makes visible what was accepted.
    pub(super) fn producer_stored(&mut self, log: &[Stored], control: &Heap, flushed: bool) -> Result<(), Violation> {
        self.control_stores(log)?;
        let visible = control.load(self.ring_at(self.tail)) == self.tail + 1;
        let expected = flushed && !self.unpublished.is_empty();
        check(
            visible == expected,
            "X10 a batch is visible once it is committed, and not before",
            || format!("visible {visible}, expected {expected}, at {}", self.tail),
        )?;
        self.scan(control)
    }

    /// The producer died while it published this plan at once: readers may see it, though nobody was told so.
    pub(super) fn attempted(&mut self, spec: Spec, generation: u64) {
        self.attempt = Some((spec, generation));
    }

    /// The producer died: what it had accepted is published as a whole or not at all.
    pub(super) fn producer_died(&mut self, log: &[Stored], control: &Heap) -> Result<(), Violation> {
        self.control_stores(log)?;
        if control.load(self.ring_at(self.tail)) == self.tail + 1 {
            self.scan(control)?;
        }
        self.attempt = None;
        for position in std::mem::take(&mut self.unpublished) {
            let Some(record) = self.records.remove(&position) else {
                continue;
            };
            if !record.settled {
                record.uses.iter().for_each(|one| self.take(one, -1));
            }
            if let Some(spec) = record.spec.filter(|spec| spec.kind == Kind::Abort && !record.settled) {
                self.abort_ended(spec.target);
            }
        }
        check(
            control.load(self.ring_at(self.tail)) == 0,
            "X10 the word at the tail is never a commit",
            || format!("found {:#x} at {}", control.load(self.ring_at(self.tail)), self.tail),
        )
    }

    fn ring_at(&self, position: u64) -> usize {
        self.ring.0 + (position % self.ring.1) as usize
    }

    fn control_stores(&mut self, log: &[Stored]) -> Result<(), Violation> {
        for stored in log {
            if std::mem::take(&mut self.expects_incarnation) {
                let first = matches!(stored, Stored::Word { at, word }
                    if *at == INCARNATION_AT && *word == self.incarnation);
                check(first, "X25 the incarnation is stored before any other word", || {
                    format!("{stored:?}")
                })?;
            }
            match *stored {
                Stored::Word { at: RECLAIM_AT, word } => self.reclaimed(word)?,
                Stored::Word { .. } => {}
                Stored::Lines { at, bytes } => self.overwritten(at, bytes)?,
                Stored::Commit { at, .. } => self.overwritten(at, 8)?,
            }
        }
        Ok(())
    }

    fn overwritten(&self, at: usize, bytes: usize) -> Result<(), Violation> {
        let from = (at - self.ring.0) as u64;
        let behind = from.wrapping_sub(self.reclaim) % self.ring.1;
        let live = self.tail - self.reclaim;
        let over = live > 0 && (behind < live || behind + bytes as u64 > self.ring.1);
        check(!over, "X11 a record's bytes stand until every rank is terminal", || {
            format!(
                "{bytes} bytes at {from} of the ring, in flight [{}, {})",
                self.reclaim, self.tail
            )
        })
    }

    fn reclaimed(&mut self, to: u64) -> Result<(), Violation> {
        let from = self.reclaim;
        check(
            to >= from && to <= self.tail,
            "X10 reclaim only grows, up to what is committed",
            || format!("{from} to {to}, tail {}", self.tail),
        )?;
        for (position, record) in self.records.range(..to) {
            let over = record.settled && record.published;
            check(over, "X11 reclaim passes a record after every rank is terminal", || {
                format!("{:?} at {position}: {:?}", record.kind(), record.answers)
            })?;
        }
        self.reclaim = to;
        self.prune();
        Ok(())
    }

    /// Forgets records that are over, reported, and out of the journal.
    fn prune(&mut self) {
        while let Some(entry) = self.records.first_entry() {
            let record = entry.get();
            let reported = record.kind() == Kind::Padding || record.reported == self.incarnation;
            if *entry.key() >= self.reclaim || !record.settled || !reported {
                break;
            }
            entry.remove();
        }
    }

    /// Reads the records that have become visible, by the words of docs/protocol.md.
    fn scan(&mut self, control: &Heap) -> Result<(), Violation> {
        let mut at = self.tail;
        while control.load(self.ring_at(at)) == at + 1 {
            let word = |model: &Self, index: usize| control.load(model.ring_at(at) + index * 8);
            let header = word(self, 2);
            let bytes = header & 0xffff_ffff;
            if (header >> 32) & 0xffff == Kind::Padding as u64 {
                self.insert(at, None, Vec::new());
            } else {
                if self.unpublished.is_empty()
                    && let Some((spec, generation)) = self.attempt.take()
                {
                    self.accepted(spec, at, generation)?;
                }
                let expected = self.unpublished.pop_front();
                check(
                    expected == Some(at),
                    "X10 nothing is published that nobody asked for",
                    || format!("found a record at {at}, expected {expected:?}"),
                )?;
            }
            let (checksum, producer) = (word(self, 1), word(self, 4));
            let Some(record) = self.records.get_mut(&at) else { break };
            (record.bytes, record.checksum, record.published) = (bytes, checksum, true);
            if let Some(spec) = &record.spec {
                let words = spec.words(producer, bytes);
                let from = self.ring.0 + (at % self.ring.1) as usize + 16;
                let same = words
                    .iter()
                    .zip(0..)
                    .all(|(word, index)| control.load(from + index * 8) == *word);
                check(
                    same && producer == record.producer,
                    "X5 a record says what was meant",
                    || format!("{:?} at {at}", spec.kind),
                )?;
                if !matches!(spec.kind, Kind::Reset) {
                    let new = spec.operation > self.highest_operation;
                    self.highest_operation = self.highest_operation.max(spec.operation);
                    check(new, "X25 nothing is published twice", || {
                        format!("operation {} at {at}", spec.operation)
                    })?;
                }
            }
            self.seen.records += 1;
            self.settle(at);
            at += bytes.max(64);
        }
        self.tail = at;
        let whole = self.unpublished.is_empty()
            || control.load(self.ring_at(at)) == 0 && {
                // A batch that is still open: nothing of it may be visible.
                self.unpublished.front().is_some_and(|first| *first >= at)
            };
        check(whole, "X10 a batch is visible as a whole", || {
            format!("{:?} are missing", self.unpublished)
        })?;
        check(
            control.load(self.ring_at(at)) == 0,
            "X10 the word at the tail is never a commit",
            || format!("found {:#x} at {at}", control.load(self.ring_at(at))),
        )
    }

    /// Ends the account of a record whose every rank is terminal, and of the Aborts that name it.
    fn settle(&mut self, position: u64) {
        let ranks = self.ranks as usize;
        let Some(record) = self.records.get_mut(&position) else {
            return;
        };
        if record.settled || record.answers.contains(&Answer::Owed) {
            return;
        }
        let first = !std::mem::replace(&mut record.ended, true);
        record.settled = record.aborts == 0;
        let uses = if record.settled {
            record.uses.clone()
        } else {
            Vec::new()
        };
        let mut answers = record.answers.iter().take(ranks);
        let done = answers.all(|answer| matches!(answer, Answer::Given(DONE, _) | Answer::Wild));
        let spec = record.spec.clone();
        uses.iter().for_each(|one| self.take(one, -1));
        let Some(spec) = spec.filter(|_| first) else { return };
        match done {
            true => self.seen.done += 1,
            false => self.seen.not_done += 1,
        }
        self.moved(&spec, done);
        if spec.kind == Kind::Abort {
            self.abort_ended(spec.target);
        }
    }

    fn abort_ended(&mut self, target: u64) {
        if let Some(record) = self.records.get_mut(&target) {
            record.aborts = record.aborts.saturating_sub(1);
        }
        self.settle(target);
    }

    /// Notes what the device blocks hold after a plan.
    fn moved(&mut self, spec: &Spec, done: bool) {
        let moves = spec.mode == Some(RetainMode::ByteMove);
        if spec.kind != Kind::Upload && !moves {
            return;
        }
        for row in &spec.rows {
            for &(source, destination, tag) in row.pairs.iter().take(row.valid) {
                if !(moves && source == destination) {
                    self.set_device_tag(row.group, destination, done.then_some(tag));
                }
            }
        }
    }

    /// The producer reported an end.
    pub(super) fn completed(&mut self, completion: &Completion) -> Result<(), Violation> {
        let (position, incarnation) = (completion.position.0, self.incarnation);
        let Some(record) = self.records.get_mut(&position) else {
            return check(false, "X12 an end is reported of a record in flight", || {
                format!("{completion:?}")
            });
        };
        let owed = record.answers.contains(&Answer::Owed);
        check(!owed, "X12 an operation ends after the last of its ranks", || {
            format!("{completion:?}: {:?}", record.answers)
        })?;
        check(record.reported != incarnation, "X12 an operation ends once", || {
            format!("{completion:?}")
        })?;
        record.reported = incarnation;
        let left = self.seats.iter_mut().flatten().filter_map(|seat| seat.left.as_mut());
        left.for_each(|left| left.known |= left.cause == Some(position));
        let operation = record.spec.as_ref().map_or(0, |spec| match spec.kind {
            Kind::Reset => 0,
            _ => spec.operation,
        });
        let same = completion.operation.operation_id.0 == operation && completion.kind == record.kind();
        check(same, "X12 an end names its operation", || {
            format!("{completion:?}, expected {operation}")
        })?;
        let answers = record.answers.iter().take(self.ranks as usize);
        let status = |answer: &Answer| match answer {
            Answer::Given(status, _) => *status,
            Answer::Wild => DONE,
            Answer::Owed | Answer::Lost => RANK_LOST,
        };
        let worst = answers.clone().map(status).max().unwrap_or(RANK_LOST);
        let wild = record.answers.contains(&Answer::Wild);
        let found = completion.terminal as u8;
        check(
            found == worst || wild && found > worst,
            "X12 the result is the worst of the ranks",
            || format!("{completion:?}: {:?}", record.answers),
        )?;
        let mut digests = answers.filter_map(|answer| match answer {
            Answer::Given(_, digest) => Some(*digest),
            _ => None,
        });
        if !wild && worst == DONE {
            let first = digests.next();
            let equal = digests.all(|digest| Some(digest) == first);
            check(
                completion.digest.is_some() == equal,
                "I9 equal digests are reported, and only those",
                || format!("{completion:?}: {:?}", record.answers),
            )?;
            let whole = record.kind() == Kind::Retain; // else the owner sets may differ, after an upload that failed
            check(
                equal || !whole,
                "I9 the tables of all ranks are equal after a Retain",
                || format!("{completion:?}: {:?}", record.answers),
            )?;
        }
        self.prune();
        Ok(())
    }

    // Membership.

    /// Everything has ended: nothing is owed, used or unreported.
    pub(super) fn drained(&self) -> Result<(), Violation> {
        for (position, record) in &self.records {
            let padding = record.kind() == Kind::Padding;
            let over = record.settled && (padding || record.reported == self.incarnation);
            check(over, "X12 no published plan is lost", || {
                format!("{:?} at {position}: {:?}", record.kind(), record.answers)
            })?;
        }
        let used = |users: &Users| users.readers + users.writers > 0;
        let leaked = self.host.iter().chain(&self.device).filter(|users| used(users)).count();
        check(leaked == 0, "checker: its own account is balanced", || {
            format!("{leaked} blocks")
        })
    }
}
