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

mod account;
mod producing;
mod working;

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
}
