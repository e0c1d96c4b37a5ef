//! A whole channel in one thread, with an account of its own of what must hold, whatever crashes.
//!
//! Every method is one action of the producer or of one worker. An action that crashes (see [`Fuse`]) ends its process;
//! a dead producer is followed by a takeover at once, a dead worker stays in its seat until [`World::lose`]. The account
//! knows what was published, what each rank owes and what it answered, and checks after each action:
//!
//! - a batch is visible as a whole or not at all, and nothing else is (X10);
//! - every rank sees every record once, in order, and overlapping writes never run at a time (X9, X12);
//! - an operation ends once per producer, with the worst of its ranks, and after the last of them (X12);
//! - blocks are leased, the record's bytes stand and `reclaim` stays below, until all ranks are terminal on the operation
//!   and on its Aborts (X11, X14, X15);
//! - the membership that a takeover would read is the one that was stored (X24).

use std::collections::BTreeSet;

use kvsluice_layout::ids::{
    DecoderLayer, DestinationBlock, GroupId, OperationId, PhysicalBlock, PoolGeneration, Position, ProcessEpoch, Rank,
    RequestEpoch, SourceBlock,
};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::{Operation, PlanDraft};
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::planted::planted;
use kvsluice_layout::presets::{Sizing, preset};
use kvsluice_layout::record::{Kind, NEW_SLOT, Pair, RetainMode, SourceKind, Terminal};
use kvsluice_layout::refusal::Refusal;
use kvsluice_layout::region::{MIN_RING_BYTES, RECLAIM_AT, RegionMap, SLOTS_AT, TERMINALS_AT};

use crate::counting::{Counting, Fuse, until_crash};
use crate::members::{Member, read_member};
use crate::port::{Incoming, Outcome, Port, Ticket};
use crate::producer::{Completion, Producer, PublishError};
use crate::ring::RingShape;
use crate::shared::{Heap, Shared, SharedMut};

/// Blocks of each pool of the world's one group. Device block 0 is null; the last sources are the gather region.
pub(crate) const BLOCKS: u32 = 64;
const GATHER_BLOCKS: u32 = 8;
const GROUP: GroupId = GroupId(0);

/// Where a record lies that is being written.
const UNKNOWN: Position = Position(u64::MAX);

/// What a rank's answer to a record is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Answer {
    Owed,
    Given(Terminal),
    Lost,
}

/// The account's entry of one record.
struct Record {
    position: Position,
    bytes: u64,
    kind: Kind,
    operation: Operation,
    draft: PlanDraft,
    /// Position of the operation that an Abort names.
    target: Option<Position>,
    reads: BTreeSet<Block>,
    writes: BTreeSet<Block>,
    published: bool,
    answers: Vec<Answer>,
    received: Vec<bool>,
    /// Incarnation that first tracked it, and the last one that reported its end.
    tracked_in: u64,
    ended_in: Option<u64>,
}

impl Record {
    fn is_owed(&self) -> bool {
        self.answers.contains(&Answer::Owed)
    }

    fn worst(&self) -> Terminal {
        let terminal = |answer: &Answer| match answer {
            Answer::Given(terminal) => *terminal,
            Answer::Owed | Answer::Lost => Terminal::RankLost,
        };
        self.answers.iter().map(terminal).max().unwrap_or(Terminal::RankLost)
    }
}

/// A block of the host pool or of the device pools.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Block {
    Host(u32),
    Device(u32),
}

/// The producer's process.
type Side = Producer<Counting<Heap>, Heap>;

/// A worker process. Without its port it is dead, and nobody has noticed.
struct Worker {
    member: Member,
    pid: u32,
    segment: Counting<Heap>,
    port: Option<Port<Heap, Counting<Heap>>>,
    open: Vec<Ticket>,
}

/// A channel, its processes and the account.
pub(crate) struct World {
    geometry: GeometryMap,
    map: RegionMap,
    shape: RingShape,
    control: Counting<Heap>,
    producer: Side,
    workers: Vec<Option<Worker>>,
    /// One per rank, for each of its workers in turn.
    worker_fuses: Vec<Fuse>,
    records: Vec<Record>,
    /// Operations that a rank has received: none twice, at whatever position.
    applied: BTreeSet<(u32, OperationId)>,
    /// Position behind the last record that readers may see.
    published_to: Position,
    incarnation: u64,
    generation: u64,
    names: u64,
    /// Says which run this is, in every message.
    pub(crate) label: String,
    /// Kinds, terminals and events that happened, for the coverage of a script.
    pub(crate) seen: BTreeSet<String>,
    /// Ends of processes so far.
    pub(crate) crashes: u64,
    /// Answers that workers made up, under the present producer.
    pub(crate) conflicts: u64,
    lies: u64,
}

impl World {
    /// A channel of `ranks` ranks that have all answered their first Reset.
    pub(crate) fn new(ranks: u32, label: String) -> Self {
        let sizing = Sizing {
            source_blocks: Some(BLOCKS),
            gather_blocks: Some(GATHER_BLOCKS),
            device_blocks: Some(BLOCKS),
            ranks: Some(ranks),
        };
        let geometry = sizing.apply(preset("sample").expect("preset")).expect("sizes");
        let geometry = GeometryMap::new(&geometry).expect("geometry");
        let map = RegionMap::new(geometry.geometry(), MIN_RING_BYTES, 0, 64).expect("regions");
        let control = Counting::new(Heap::new(map.control_bytes()));
        let leases = LeaseTable::new(&geometry);
        let producer = Producer::new(control.clone(), map.clone(), leases, ProcessEpoch(1));
        let mut world = Self {
            shape: producer.shape(),
            geometry,
            map,
            control,
            producer,
            workers: (0..ranks).map(|_| None).collect(),
            worker_fuses: (0..ranks).map(|_| Fuse::default()).collect(),
            records: Vec::new(),
            applied: BTreeSet::new(),
            published_to: Position(0),
            incarnation: 1,
            generation: 0,
            names: 1,
            label,
            seen: BTreeSet::new(),
            crashes: 0,
            conflicts: 0,
            lies: 0,
        };
        (0..ranks).for_each(|rank| world.join(rank));
        world.settle();
        world
    }

    pub(crate) fn ranks(&self) -> u32 {
        self.workers.len() as u32
    }

    pub(crate) fn producer(&self) -> &Side {
        &self.producer
    }

    /// The fuse of the producer, of each of them in turn.
    pub(crate) fn producer_fuse(&self) -> &Fuse {
        &self.control.fuse
    }

    /// The fuse of a rank's worker, of each of them in turn.
    pub(crate) fn worker_fuse(&self, rank: u32) -> &Fuse {
        &self.worker_fuses[rank as usize]
    }

    /// True where the rank has a worker that lives.
    pub(crate) fn lives(&self, rank: u32) -> bool {
        self.workers[rank as usize]
            .as_ref()
            .is_some_and(|worker| worker.port.is_some())
    }

    /// Process of a rank's worker.
    pub(crate) fn pid(&self, rank: u32) -> u32 {
        self.workers[rank as usize].as_ref().map_or(0, |worker| worker.pid)
    }

    /// No process dies of a fuse any more.
    pub(crate) fn disarm(&self) {
        self.control.fuse.disarm();
        self.worker_fuses.iter().for_each(Fuse::disarm);
    }

    /// Records that a rank has received and not answered.
    pub(crate) fn open(&self, rank: u32) -> usize {
        self.workers[rank as usize]
            .as_ref()
            .map_or(0, |worker| worker.open.len())
    }

    // The producer's actions.

    /// A draft's operation: a name of its own, the present generation.
    pub(crate) fn operation(&mut self) -> Operation {
        self.names += 1;
        Operation {
            request_epoch: RequestEpoch(1),
            operation_id: OperationId(self.names),
            pool_generation: self.producer.generation(),
            ..Operation::default()
        }
    }

    /// Device blocks that nobody leases.
    pub(crate) fn free_device_blocks(&self) -> Vec<u32> {
        let free = |b: &u32| self.producer.leases().device_leases(GROUP, PhysicalBlock(*b)) == 0;
        (1..BLOCKS).filter(free).collect()
    }

    /// An upload of `pairs` to each of the first `layers` layers.
    pub(crate) fn upload(&mut self, layers: u32, pairs: &[(u32, u32)]) -> PlanDraft {
        let mut draft = PlanDraft::new();
        draft.upload(b"request", self.operation());
        let gathered = pairs
            .first()
            .is_some_and(|(source, _)| *source >= BLOCKS - GATHER_BLOCKS);
        let kind = if gathered {
            SourceKind::Copy
        } else {
            SourceKind::SourceOnly
        };
        for layer in 0..layers {
            let pairs = pairs.iter().map(|&(s, d)| (SourceBlock(s), DestinationBlock(d)));
            draft.row(DecoderLayer(layer), GROUP, kind, pairs);
        }
        draft
    }

    /// A plan that moves nothing, of about `bytes` bytes: pairs that are carried and ignored (R24).
    pub(crate) fn ballast(&mut self, bytes: usize) -> PlanDraft {
        let mut draft = PlanDraft::new();
        let pairs = std::iter::repeat_n((SourceBlock(9999), DestinationBlock(9999)), bytes / 8);
        draft.upload(b"ballast", self.operation());
        draft
            .row(DecoderLayer(0), GROUP, SourceKind::SourceOnly, pairs)
            .valid(0);
        draft
    }

    pub(crate) fn keep(&mut self) -> PlanDraft {
        let mut draft = PlanDraft::new();
        draft.keep(b"request", self.operation());
        draft
    }

    /// A retention: tables over `pairs` of (old slot, block), or moves of (block read, block written).
    pub(crate) fn retain(&mut self, mode: RetainMode, pairs: &[(u32, u32)]) -> PlanDraft {
        let mut draft = PlanDraft::new();
        draft.retain(b"request", self.operation(), mode);
        let layer = (mode != RetainMode::SharedTable).then_some(DecoderLayer(1));
        let pairs = pairs.iter().map(|&(source, destination)| Pair { source, destination });
        draft.table_row(layer, GROUP, 16, pairs);
        draft
    }

    pub(crate) fn write_back(&mut self, pairs: &[(u32, u32)]) -> PlanDraft {
        let mut draft = PlanDraft::new();
        draft.write_back(b"request", self.operation(), 0);
        let pairs = pairs.iter().map(|&(source, destination)| Pair { source, destination });
        draft.raw_row(2, GROUP.0, 0, 0, pairs);
        draft
    }

    /// Writes a draft into the open batch. `None` where the producer crashed, else what it refused the draft with.
    pub(crate) fn enqueue(&mut self, draft: &PlanDraft) -> Result<Position, Option<PublishError>> {
        self.write(draft, Producer::enqueue)
    }

    /// Writes a draft and makes it visible, with the open batch before it.
    pub(crate) fn publish(&mut self, draft: &PlanDraft) -> Result<Position, Option<PublishError>> {
        let position = self.write(draft, Producer::publish)?;
        self.published();
        self.after_producer();
        Ok(position)
    }

    fn write(
        &mut self,
        draft: &PlanDraft,
        act: fn(&mut Side, &PlanDraft) -> Result<Position, PublishError>,
    ) -> Result<Position, Option<PublishError>> {
        let state = |world: &Self| {
            let producer = &world.producer;
            (producer.tail(), producer.leases().leased_blocks(), producer.in_flight())
        };
        let before = state(self);
        let (reads, writes) = blocks_of(draft);
        self.records.push(Record {
            position: UNKNOWN,
            bytes: draft.encoded_bytes().unwrap_or(0) as u64,
            kind: draft.kind(),
            operation: draft.operation(),
            draft: draft.clone(),
            target: (draft.kind() == Kind::Abort).then(|| Position(draft.target())),
            reads,
            writes,
            published: false,
            answers: Vec::new(),
            received: vec![false; self.workers.len()],
            tracked_in: self.incarnation,
            ended_in: None,
        });
        // A crash settles itself whether the record exists.
        let position = self.producer_does(|producer| act(producer, draft)).ok_or(None)?;
        let position = position.map_err(|error| {
            self.records.pop();
            let label = &self.label;
            assert_eq!(before, state(self), "{label}: a refused draft changes nothing: {error}");
            Some(error)
        })?;
        self.written_at(position);
        self.seen.insert(format!("{:?}", draft.kind()));
        if position > before.0 {
            self.seen.insert("padding at the wrap".into());
        }
        self.after_producer();
        Ok(position)
    }

    /// The last record turns out to lie at `position`, which decides who owes it.
    fn written_at(&mut self, position: Position) {
        let owed = |worker: &Option<Worker>| match worker {
            Some(worker) if worker.member.first <= position => Answer::Owed,
            _ => Answer::Lost,
        };
        let answers = self.workers.iter().map(owed).collect();
        if let Some(record) = self.records.last_mut() {
            (record.position, record.answers) = (position, answers);
        }
    }

    /// A refusal must be true.
    pub(crate) fn check_refusal(&self, draft: &PlanDraft, error: &PublishError) {
        let label = &self.label;
        match *error {
            PublishError::Refused(Refusal::DestinationInFlight { id, .. } | Refusal::SourceInFlight { id, .. }) => {
                let (reads, writes) = blocks_of(draft);
                let named: BTreeSet<_> = reads.union(&writes).copied().collect();
                let in_use = |block: Block| matches!(block, Block::Host(b) | Block::Device(b) if b == id);
                let held = self.blocks_held().any(|block| in_use(block) && named.contains(&block));
                assert!(held, "{label}: {error}, and nobody holds it");
            }
            PublishError::Full { needed, free, oldest } => {
                assert!(free < needed, "{label}: {error}");
                let oldest = oldest.unwrap_or_else(|| panic!("{label}: full of nothing"));
                let worker = self.workers[oldest.rank.index()].as_ref();
                assert_eq!(
                    worker.map(|worker| worker.pid),
                    Some(oldest.pid),
                    "{label}: {error} (X17)"
                );
            }
            PublishError::RankMissing { rank, .. } => {
                assert!(self.workers[rank.index()].is_none(), "{label}: {error} (X24)");
            }
            PublishError::ResetNeeded { found, expected, .. } => assert_ne!(found, expected, "{label}: {error} (X24)"),
            ref other => panic!("{label}: {other}"),
        }
    }

    /// Makes the open batch visible.
    pub(crate) fn flush(&mut self) {
        if self.producer_does(Producer::flush).is_some() {
            self.published();
            self.after_producer();
        }
    }

    /// Writes an Abort of the operation at `position`.
    pub(crate) fn abort(&mut self, position: Position) -> Result<Position, Option<PublishError>> {
        let mut draft = PlanDraft::new();
        draft.abort(b"request", self.operation(), position);
        self.enqueue(&draft)
    }

    /// A Reset to the next generation.
    pub(crate) fn reset(&mut self) -> PlanDraft {
        self.generation = self.generation.max(self.producer.generation().0) + 1;
        let mut draft = PlanDraft::new();
        draft.reset(PoolGeneration(self.generation));
        draft
    }

    /// Reads the ranks' answers, also those out of order.
    pub(crate) fn poll(&mut self) {
        self.producer_does(Producer::poll_thorough);
        self.after_producer();
        self.forget();
        // A dead worker may have answered without its hint; a producer learns of that with its death. From one that lies
        // it learns of answers out of order when their turn comes.
        if self.lies == 0 && (0..self.ranks()).all(|rank| self.workers[rank as usize].is_none() || self.lives(rank)) {
            let leased: BTreeSet<Block> = self.blocks_in_flight().collect();
            let found = self.producer.leases().leased_blocks();
            assert_eq!(
                found,
                leased.len(),
                "{}: leased are exactly the blocks in flight (X14)",
                self.label
            );
        }
    }

    /// The producer has proof that the rank's worker is dead.
    pub(crate) fn lose(&mut self, rank: u32) {
        if self.workers[rank as usize].is_none() {
            return;
        }
        self.kill_worker(rank);
        if self.producer_does(|producer| producer.lose(Rank(rank))).is_none() {
            return; // The takeover has found the seat empty.
        }
        self.workers[rank as usize] = None;
        for record in &mut self.records {
            if record.answers[rank as usize] == Answer::Owed {
                record.answers[rank as usize] = Answer::Lost;
            }
        }
        self.after_producer();
    }

    /// The producer notices every dead worker; others take their seats and a Reset.
    pub(crate) fn revive(&mut self) {
        let dead: Vec<u32> = (0..self.ranks()).filter(|rank| !self.lives(*rank)).collect();
        for &rank in &dead {
            self.lose(rank);
            self.join(rank);
        }
        if self.producer.closed().is_some() {
            let reset = self.reset();
            let _ = self.publish(&reset);
            self.drain_workers();
        }
    }

    /// A new worker takes an empty seat, with a fresh segment.
    pub(crate) fn join(&mut self, rank: u32) {
        if self.workers[rank as usize].is_some() {
            return;
        }
        self.names += 1;
        let epoch = ProcessEpoch(0xB000 + self.names);
        let pid = 1000 + self.names as u32;
        let memory = Heap::new(self.map.rank_bytes());
        let taken = memory.clone();
        let Some(first) = self.producer_does(move |producer| producer.join(Rank(rank), taken, epoch, pid)) else {
            return; // Its attach failed half way; it would come again, with another segment.
        };
        self.published();
        self.seen.insert("join".into());
        let segment = Counting {
            memory,
            fuse: self.worker_fuses[rank as usize].clone(),
        };
        let leases = LeaseTable::new(&self.geometry);
        let (control, own, producer) = (self.control.memory.clone(), segment.clone(), self.producer.epoch());
        let port = until_crash(|| Port::new(control, own, self.shape, leases, epoch, producer, first));
        self.crashes += u64::from(port.is_none());
        self.workers[rank as usize] = Some(Worker {
            member: Member { epoch, first },
            pid,
            segment,
            port,
            open: Vec::new(),
        });
        self.after_producer();
    }

    /// The producer dies, and another takes over.
    pub(crate) fn take_over(&mut self) {
        let batch = self.visible();
        assert!(batch.is_empty(), "{}: {batch:?} visible before its commit", self.label);
        self.records.retain(|record| record.published);
        self.successor();
    }

    // The workers' actions.

    /// A worker takes its next record. False where there is none.
    pub(crate) fn receive(&mut self, rank: u32) -> bool {
        let Some(received) = self.worker_does(rank, Port::receive) else {
            return false;
        };
        let label = &self.label;
        let ticket = match received {
            Ok(None) => return false,
            Ok(Some(Incoming::Plan(ticket))) => ticket,
            other => panic!("{label}: rank {rank}: {other:?}"),
        };
        let index = rank as usize;
        let Some(worker) = &mut self.workers[index] else {
            return false;
        };
        let position = ticket.position();
        let due = |record: &&mut Record| !record.received[index] && record.position >= worker.member.first;
        let next = self.records.iter_mut().find(due);
        let next = next.unwrap_or_else(|| panic!("{label}: rank {rank} received {position}, which nobody published"));
        assert_eq!(
            next.position, position,
            "{label}: rank {rank}: each record once, in order (X10)"
        );
        assert!(next.published, "{label}: rank {rank} sees {position} before its commit");
        next.received[index] = true;
        let again = !self.applied.insert((rank, next.operation.operation_id));
        assert!(
            !again || next.kind == Kind::Reset,
            "{label}: rank {rank}: {} twice",
            next.operation.operation_id
        );
        let (reads, writes) = (next.reads.clone(), next.writes.clone());
        for ticket in &worker.open {
            let running = self.records.iter().find(|record| record.position == ticket.position());
            let running = running.unwrap_or_else(|| panic!("{label}: an open ticket of no record"));
            let clash = writes
                .iter()
                .any(|b| running.reads.contains(b) || running.writes.contains(b))
                || reads.iter().any(|b| running.writes.contains(b));
            assert!(
                !clash,
                "{label}: rank {rank}: {position} overlaps {} (X9)",
                running.position
            );
        }
        worker.open.push(ticket);
        true
    }

    /// A worker answers one of its open records, the `nth`. A Reset waits for the records before it (X24a), and is Done.
    pub(crate) fn finish(&mut self, rank: u32, nth: usize, outcome: &Outcome) {
        let index = rank as usize;
        let Some(worker) = &mut self.workers[index] else {
            return;
        };
        if worker.open.is_empty() || worker.port.is_none() {
            return;
        }
        let mut nth = nth % worker.open.len();
        if worker.open[nth].kind() == Kind::Reset {
            nth = 0; // Tickets stand in ring order.
        }
        let ticket = worker.open.remove(nth);
        let (position, kind) = (ticket.position(), ticket.kind());
        let done = Outcome::done(0, 0, 0);
        let outcome = if kind == Kind::Reset { &done } else { outcome };
        let record = self.records.iter().find(|record| record.position == position);
        let generation = record.map_or(PoolGeneration(0), |record| record.operation.pool_generation);
        let answered = self.worker_does(rank, |port| {
            if kind == Kind::Reset {
                port.set_generation(generation);
            }
            port.finish(ticket, outcome);
        });
        if answered.is_some() {
            self.answered(rank, position, outcome.terminal);
        }
    }

    /// A worker that misbehaves: a word in its slots that answers nothing, an answer given twice, or one that does not
    /// belong to the record (X16).
    pub(crate) fn lie(&mut self, rank: u32, random: &mut fastrand::Rng) {
        self.poll(); // What was answered before is taken as it was.
        self.lies += 1;
        let index = rank as usize;
        let Some(worker) = &self.workers[index] else { return };
        let (segment, shape) = (worker.segment.memory.clone(), self.shape);
        let slot = |position: Position| SLOTS_AT + shape.offset(position.0);
        let open: Vec<Position> = worker.open.iter().map(Ticket::position).collect();
        let before = self.producer.counts();
        match random.u8(0..3) {
            0 => {
                // Anywhere in the slots: a word no record of that line has or had.
                let Some(&position) = open.get(random.usize(0..open.len().max(1))) else {
                    return;
                };
                let word = [
                    u64::MAX,
                    position.0 + 1 + shape.bytes as u64,
                    position.0 + 65,
                    position.0 + 2,
                ];
                segment.store(slot(position), word[random.usize(0..4)]);
                self.poll();
                assert!(self.producer.counts().stale >= before.stale);
                segment.store(slot(position), 0);
            }
            1 => {
                let given = |record: &&Record| matches!(record.answers[index], Answer::Given(_));
                let Some(answered) = self.records.iter().rfind(given) else {
                    return;
                };
                segment.store_release(slot(answered.position), answered.position.0 + 1);
                segment.store(TERMINALS_AT, segment.load(TERMINALS_AT) + 1);
            }
            _ => {
                let nth = random.usize(0..open.len().max(1));
                let Some(&position) = open.get(nth) else { return };
                if worker.open[nth].kind() == Kind::Reset {
                    return;
                }
                // The identity of no record, or the status of no end.
                for (at, word) in [
                    (8, random.u64(..)),
                    (16, 1),
                    (24, worker.member.epoch.0),
                    (32, random.u64(..)),
                ] {
                    segment.store(slot(position) + at, word);
                }
                segment.store_release(slot(position), position.0 + 1);
                segment.store(TERMINALS_AT, u64::MAX);
                self.answered(rank, position, Terminal::Failed);
                self.conflicts += 1;
                self.poll();
                assert_eq!(
                    self.producer.counts().conflicting,
                    before.conflicting + 1,
                    "{}",
                    self.label
                );
                // Its proper answer comes too late, and changes nothing.
                self.finish_late(rank, nth);
            }
        }
        self.poll();
    }

    fn finish_late(&mut self, rank: u32, nth: usize) {
        let Some(worker) = &mut self.workers[rank as usize] else {
            return;
        };
        let ticket = worker.open.remove(nth);
        self.worker_does(rank, |port| port.finish(ticket, &Outcome::done(0, 0, 0)));
    }

    /// Ends a worker; its seat is taken until the producer has noticed.
    pub(crate) fn kill_worker(&mut self, rank: u32) {
        let index = rank as usize;
        let Some(worker) = &mut self.workers[index] else {
            return;
        };
        if worker.port.take().is_none() {
            return;
        }
        self.crashes += 1;
        worker.open.clear();
        // What it had answered is what stands in its slots.
        let segment = worker.segment.memory.clone();
        for record in &mut self.records {
            let slot = SLOTS_AT + self.shape.offset(record.position.0);
            if record.answers[index] == Answer::Owed && segment.load(slot) == record.position.0 + 1 {
                let terminal = Terminal::from_slot(segment.load(slot + 32) as u8).expect("a worker's status");
                record.answers[index] = Answer::Given(terminal);
                self.seen.insert("answered, then died".into());
            }
        }
    }

    // Ends.

    /// Brings everything to its end: every seat filled, every record answered, nothing leased.
    pub(crate) fn settle(&mut self) {
        for round in 0.. {
            assert!(round < 8, "{}: does not come to its end", self.label);
            self.flush();
            self.drain_workers();
            let all_live = (0..self.ranks()).all(|rank| self.lives(rank));
            if all_live && self.producer.closed().is_none() && self.producer.in_flight() == 0 {
                break;
            }
            self.revive();
        }
        let label = &self.label;
        assert_eq!(self.producer.leases().leased_blocks(), 0, "{label}: a lease leaked");
        assert_eq!(
            self.producer.reclaim(),
            self.producer.tail(),
            "{label}: ring space leaked"
        );
        for record in &self.records {
            assert!(!record.is_owed(), "{label}: {} was never answered", record.position);
            assert!(record.ended_in.is_some(), "{label}: {} never ended", record.position);
        }
        self.forget();
    }

    /// Receives and answers everything there is, and polls.
    pub(crate) fn drain_workers(&mut self) {
        for rank in 0..self.ranks() {
            while self.receive(rank) {}
            while self.lives(rank) && self.open(rank) > 0 {
                self.finish(rank, 0, &Outcome::done(1, 1, 0));
            }
        }
        self.poll();
    }

    // The account.

    fn producer_does<T>(&mut self, act: impl FnOnce(&mut Side) -> T) -> Option<T> {
        let done = until_crash(|| act(&mut self.producer));
        if done.is_none() {
            for rank in (0..self.ranks()).map(Rank) {
                let found = read_member(&self.control, &self.map, rank);
                let whole = (found.epoch == Member::MISSING.epoch) == (found.first == Member::MISSING.first);
                assert!(
                    whole,
                    "{}: crash: rank {rank}: {found:?} is a mixture (X24)",
                    self.label
                );
            }
            // What was being written when it died is visible with the rest of its batch, or does not exist.
            let visible = self.visible();
            let unpublished = self.records.iter().filter(|record| !record.published);
            if let Some(&last) = visible.last()
                && visible.len() == unpublished.count()
                && self.records.last().is_some_and(|record| record.position == UNKNOWN)
            {
                self.written_at(last);
            }
            let unpublished = self.records.iter().filter(|record| !record.published);
            let batch: Vec<_> = unpublished.map(|record| record.position).collect();
            assert!(
                visible.is_empty() || visible == batch,
                "{}: crash: visible {visible:?} of the batch {batch:?} (X10)",
                self.label
            );
            if visible.is_empty() {
                self.records.retain(|record| record.published);
            }
            self.published();
            self.successor();
        }
        done
    }

    /// A producer takes over, and so on until one lives through it.
    fn successor(&mut self) {
        let mut taken = None;
        while taken.is_none() {
            self.crashes += 1;
            self.names += 1;
            let epoch = ProcessEpoch(0xA000 + self.names);
            let alive = |(worker, rank): (&Option<Worker>, u32)| {
                let worker = worker.as_ref().filter(|worker| worker.port.is_some())?;
                Some((
                    Rank(rank),
                    worker.segment.memory.clone(),
                    worker.member.epoch,
                    worker.pid,
                ))
            };
            let survivors = self.workers.iter().zip(0..).filter_map(alive).collect();
            let (control, map) = (self.control.clone(), self.map.clone());
            let leases = LeaseTable::new(&self.geometry);
            taken = until_crash(|| Producer::take_over(control, map, leases, epoch, survivors));
        }
        let label = &self.label;
        self.producer = match taken {
            Some(Ok(producer)) => producer,
            Some(Err(error)) => panic!("{label}: takeover: {error}"),
            None => return,
        };
        let incarnation = self.producer.incarnation().0;
        assert!(incarnation > self.incarnation, "{label}: the incarnation grows (X22)");
        self.incarnation = incarnation;
        self.seen.insert("takeover".into());
        for index in 0..self.workers.len() {
            let seated = self.producer.member(Rank(index as u32));
            match &mut self.workers[index] {
                Some(Worker {
                    member,
                    port: Some(port),
                    ..
                }) => {
                    assert_eq!(*member, seated, "{label}: rank {index} keeps its seat (X24)");
                    port.accept_producer(self.producer.epoch());
                }
                gone => *gone = None,
            }
            for record in &mut self.records {
                if record.position < seated.first {
                    record.answers[index] = Answer::Lost;
                }
            }
        }
        assert_eq!(
            self.producer.tail(),
            self.published_to,
            "{label}: the tail is behind the last commit (X10)"
        );
        self.after_producer();
        if planted("x25_republish") {
            let owed: Vec<_> = self.records.iter().filter(|record| record.is_owed()).collect();
            let drafts: Vec<_> = owed.iter().map(|record| record.draft.clone()).collect();
            drafts.iter().for_each(|draft| _ = self.publish(draft));
        }
    }

    fn worker_does<T>(&mut self, rank: u32, act: impl FnOnce(&mut Port<Heap, Counting<Heap>>) -> T) -> Option<T> {
        let port = self.workers[rank as usize].as_mut()?.port.as_mut()?;
        let done = until_crash(|| act(port));
        if done.is_none() {
            self.kill_worker(rank);
        }
        done
    }

    /// Drops the records that no takeover can find any more.
    fn forget(&mut self) {
        let reclaim = Position(self.control.load(RECLAIM_AT));
        let kept: BTreeSet<Position> = self.in_flight().map(|record| record.position).collect();
        let ended = |record: &Record| record.ended_in.is_some() && !kept.contains(&record.position);
        self.records
            .retain(|record| record.position >= reclaim || !ended(record));
    }

    fn answered(&mut self, rank: u32, position: Position, terminal: Terminal) {
        let record = self.records.iter_mut().find(|record| record.position == position);
        if let Some(record) = record {
            record.answers[rank as usize] = Answer::Given(terminal);
            self.seen.insert(format!("{:?} {terminal:?}", record.kind));
        }
    }

    /// Every record written is published.
    fn published(&mut self) {
        self.records.iter_mut().for_each(|record| record.published = true);
        self.published_to = self.records.last().map_or(self.published_to, |record| {
            self.published_to.max(Position(record.position.0 + record.bytes))
        });
    }

    /// Positions of the records that a reader finds behind the published ones, padding left out.
    fn visible(&self) -> Vec<Position> {
        let mut found = Vec::new();
        let mut at = self.published_to.0;
        loop {
            let word = self.shape.at + self.shape.offset(at);
            if self.control.load(word) != at + 1 {
                return found;
            }
            let (bytes, kind) = (
                self.control.load(word + 16) as u32,
                (self.control.load(word + 16) >> 32) as u16,
            );
            assert!(
                bytes >= 64,
                "{}: a record of {bytes} bytes is visible at {at}",
                self.label
            );
            if kind != Kind::Padding as u16 {
                found.push(Position(at));
            }
            at += u64::from(bytes);
        }
    }

    fn after_producer(&mut self) {
        while let Some(completion) = self.producer.next_completion() {
            self.ended(&completion);
        }
        self.check();
    }

    fn ended(&mut self, completion: &Completion) {
        let Completion { position, terminal, .. } = *completion;
        let label = &self.label;
        let record = self.records.iter_mut().find(|record| record.position == position);
        let record = record.unwrap_or_else(|| panic!("{label}: {position} ended and was never published"));
        let answers = &record.answers;
        assert!(
            !record.is_owed(),
            "{label}: {position} ended before its last rank: {answers:?} (X12)"
        );
        assert_eq!(
            terminal,
            record.worst(),
            "{label}: {position}: the worst of {answers:?} (X12)"
        );
        assert_ne!(
            record.ended_in,
            Some(self.incarnation),
            "{label}: {position} ended twice (X12)"
        );
        let recovered = record.tracked_in != self.incarnation;
        assert_eq!(completion.recovered, recovered, "{label}: {position} recovered");
        assert_eq!(
            completion.operation, record.operation,
            "{label}: {position}: its operation"
        );
        record.ended_in = Some(self.incarnation);
        if completion.recovered {
            self.seen.insert("recovered".into());
        }
        self.seen.insert(format!("ended {:?} {terminal:?}", completion.kind));
    }

    /// Records that hold their leases: owed themselves, or named by an Abort that is (X15).
    fn in_flight(&self) -> impl Iterator<Item = &Record> {
        let aborting = |position| {
            let names_it = move |abort: &&Record| abort.target == Some(position);
            self.records.iter().filter(names_it).any(Record::is_owed)
        };
        self.records
            .iter()
            .filter(move |record| record.is_owed() || aborting(record.position))
    }

    /// Blocks that the producer may still hold: it has not looked at every answer yet.
    fn blocks_held(&self) -> impl Iterator<Item = Block> {
        let open = |record: &Record| record.ended_in != Some(self.incarnation);
        let aborting = move |position| {
            let names_it = |abort: &Record| abort.target == Some(position) && open(abort);
            self.records.iter().any(names_it)
        };
        let held = move |record: &&Record| open(record) || aborting(record.position);
        let records = self.records.iter().filter(held);
        records.flat_map(|record| record.reads.union(&record.writes).copied())
    }

    fn blocks_in_flight(&self) -> impl Iterator<Item = Block> {
        self.in_flight()
            .flat_map(|record| record.reads.union(&record.writes).copied())
    }

    fn check(&self) {
        let label = &self.label;
        let leases = self.producer.leases();
        for block in self.blocks_in_flight() {
            let held = match block {
                Block::Host(id) => leases.source_leases(GROUP, SourceBlock(id)),
                Block::Device(id) => leases.device_leases(GROUP, PhysicalBlock(id)),
            };
            assert!(held > 0, "{label}: {block:?} is free while a rank may touch it (X14)");
        }
        let reclaim = self.control.load(RECLAIM_AT);
        for record in self.in_flight().filter(|record| record.published) {
            let position = record.position;
            assert!(
                reclaim <= position.0,
                "{label}: reclaim {reclaim} passed {position} (X11)"
            );
            let word = self.shape.at + self.shape.offset(position.0);
            assert_eq!(
                self.control.load(word),
                position.0 + 1,
                "{label}: {position} was overwritten (X11)"
            );
        }
        for (worker, rank) in self.workers.iter().zip(0..) {
            let member = read_member(&self.control, &self.map, Rank(rank));
            let seated = worker.as_ref().map_or(Member::MISSING, |worker| worker.member);
            assert_eq!(member, seated, "{label}: rank {rank}: membership (X24)");
        }
    }
}

/// What a draft reads and writes, by the kinds of X6.
fn blocks_of(draft: &PlanDraft) -> (BTreeSet<Block>, BTreeSet<Block>) {
    let rows = draft.lease_rows();
    let (mut reads, mut writes) = (BTreeSet::new(), BTreeSet::new());
    for row in rows.rows {
        let from = row.pairs_at as usize;
        for &Pair { source, destination } in &rows.pairs[from..from + row.valid as usize] {
            match (rows.kind, rows.mode) {
                (Kind::Upload, _) => {
                    reads.insert(Block::Host(source));
                    writes.insert(Block::Device(destination));
                }
                (Kind::WriteBack, _) => {
                    reads.insert(Block::Device(source));
                    writes.insert(Block::Host(destination));
                }
                (Kind::Retain, Some(RetainMode::ByteMove)) => {
                    writes.insert(Block::Device(source));
                    writes.insert(Block::Device(destination));
                }
                _ => {
                    assert!(source == NEW_SLOT || source < BLOCKS);
                    reads.insert(Block::Device(destination));
                }
            }
        }
    }
    (reads, writes)
}
