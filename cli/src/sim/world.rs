//! The processes of a channel in one thread, and everything that can happen to them.
//!
//! Each method is one action of one process. Afterwards the checker reads what the process stored.

mod pause;
mod takeover;
mod workers;

use fastrand::Rng;
use kvsluice_layout::ids::{GroupId, ProcessEpoch, SourceBlock};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::PlanDraft;
use kvsluice_layout::record::Kind;
use kvsluice_transport::counting::{Counting, until_crash};
use kvsluice_transport::producer::{Producer, PublishError};
use kvsluice_transport::shared::Heap;

use super::client::{Client, HostTags, Mode, Proposal, View};
use super::history::History;
use super::memory::{Probe, Stored};
use super::model::{Model, Violation, check};
use super::seat::Seat;
use super::shape::{GROUPS, HOST_BLOCKS, Shape};

/// The producer process.
struct Process {
    producer: Producer<Probe, Heap>,
    client: Client,
}

/// What holds a rank.
enum Place {
    Alive(Box<Seat>),
    /// The process is gone; the kernel knows, and the producer will.
    Dead,
    /// The producer has taken it off.
    Empty,
}

/// What happened, for the report.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) producer_deaths: u64,
    pub(super) takeovers: u64,
    pub(super) worker_deaths: u64,
    pub(super) joins: u64,
    pub(super) resets: u64,
    pub(super) published: u64,
    pub(super) refused: u64,
    pub(super) full: u64,
    pub(super) aborts: u64,
    pub(super) refills: u64,
    pub(super) scribbles: u64,
    pub(super) adopted: u64,
    pub(super) drains: u64,
}

/// A channel and its processes.
pub(super) struct World {
    shape: Shape,
    control: Probe,
    pool: Counting<Heap>,
    producer: Option<Process>,
    places: Vec<Place>,
    pub(super) model: Model,
    tags: HostTags,
    pub(super) history: History,
    pub(super) tally: Tally,
    pub(super) random: Rng,
    pub(super) now_ns: u64,
    epochs: u64,
    operations: u64,
    log: Vec<Stored>,
    draft: PlanDraft,
    /// Workers that the last write-back was asked of: what one of them saved is gone with its segment.
    savers: Vec<Option<u64>>,
    /// Whether devices of workers that join fail at times.
    pub(super) faulty: bool,
}

impl World {
    pub(super) fn new(seed: u64, ranks: u32) -> anyhow::Result<Self> {
        let shape = Shape::new(ranks)?;
        let ring = shape.regions.ring_at()..shape.regions.ring_at() + shape.regions.ring_bytes();
        let control = Probe::new(shape.regions.control_bytes(), ring.clone());
        let pool = Counting {
            memory: Heap::new(shape.map.pool_bytes() as usize),
            fuse: control.fuse().clone(),
        };
        let epoch = ProcessEpoch(1);
        let leases = LeaseTable::new(&shape.map);
        let producer = Producer::new(control.clone(), shape.regions.clone(), leases, epoch);
        let mut world = Self {
            model: Model::new(ranks, ring.start, ring.len(), epoch.0),
            shape,
            pool,
            producer: Some(Process {
                producer,
                client: Client::new(Mode::NeedsReset, 0),
            }),
            control,
            places: (0..ranks).map(|_| Place::Empty).collect(),
            tags: HostTags::new(),
            history: History::default(),
            tally: Tally::default(),
            random: Rng::with_seed(seed),
            now_ns: 0,
            epochs: 1,
            operations: 0,
            log: Vec::new(),
            draft: PlanDraft::new(),
            savers: Vec::new(),
            faulty: false,
        };
        world.observe_producer(false)?;
        Ok(world)
    }

    pub(super) fn ranks(&self) -> u32 {
        self.shape.ranks()
    }

    fn epoch(&mut self) -> ProcessEpoch {
        self.epochs += 1;
        ProcessEpoch(self.epochs)
    }

    fn seat(&self, rank: u32) -> Option<&Seat> {
        match self.places.get(rank as usize) {
            Some(Place::Alive(seat)) => Some(seat),
            _ => None,
        }
    }

    fn seat_mut(&mut self, rank: u32) -> Option<&mut Seat> {
        match self.places.get_mut(rank as usize) {
            Some(Place::Alive(seat)) => Some(seat),
            _ => None,
        }
    }

    // The producer.

    pub(super) fn has_producer(&self) -> bool {
        self.producer.is_some()
    }

    fn observe_producer(&mut self, flushed: bool) -> Result<(), Violation> {
        self.control.take_log(&mut self.log);
        self.model.producer_stored(&self.log, self.control.heap(), flushed)
    }

    /// One action of the producer, which may crash in it. `flushes`: the action makes visible what was enqueued.
    fn produce<T>(
        &mut self,
        flushes: bool,
        action: impl FnOnce(&mut Producer<Probe, Heap>) -> T,
    ) -> Result<Option<T>, Violation> {
        let Some(process) = &mut self.producer else {
            return Ok(None);
        };
        match until_crash(|| action(&mut process.producer)) {
            Some(value) => {
                self.observe_producer(flushes)?;
                Ok(Some(value))
            }
            None => {
                self.producer_died()?;
                Ok(None)
            }
        }
    }

    /// Ends the producer between two stores: here, or where its fuse ended it.
    pub(super) fn producer_died(&mut self) -> Result<(), Violation> {
        self.producer = None;
        self.control.fuse().disarm();
        self.tally.producer_deaths += 1;
        self.history.add("the producer dies", self.model.tail, 0);
        self.control.take_log(&mut self.log);
        self.model.producer_died(&self.log, self.control.heap())
    }

    /// Lets the producer make so many more stores.
    pub(super) fn arm_producer(&mut self, stores: u64) {
        self.control.fuse().arm(stores);
        self.history.add("the producer will die at store", stores, 0);
    }

    /// The workload asks for something, and gets it or is refused.
    pub(super) fn publish(&mut self) -> Result<(), Violation> {
        let Some(process) = &mut self.producer else {
            return Ok(());
        };
        if !matches!(process.client.mode, Mode::Running | Mode::Recovering) {
            return Ok(());
        }
        let view = View {
            leases: process.producer.leases(),
            model: &self.model,
            generation: process.producer.generation().0,
        };
        let Some(mut proposal) = process.client.propose(&view, &mut self.tags, &mut self.random) else {
            return Ok(());
        };
        if self.random.u16(0..300) == 0 {
            // A record of an older generation, by a workload that missed a Reset.
            proposal.spec.generation = proposal.spec.generation.saturating_sub(1);
        }
        let computed = std::mem::take(&mut proposal.computed);
        if !computed.is_empty() && !self.compute(&computed) {
            return Ok(());
        }
        self.ask(proposal)
    }

    /// Launches compute that writes blocks, on every rank.
    fn compute(&mut self, blocks: &[(u32, u32, u64)]) -> bool {
        let seats: Vec<&Seat> = (0..self.ranks()).filter_map(|rank| self.seat(rank)).collect();
        if seats.len() != self.places.len() {
            return false;
        }
        let launched = seats
            .iter()
            .filter(|seat| seat.launch_writer(&self.shape, blocks))
            .count();
        let whole = launched == seats.len();
        for &(group, block, tag) in blocks {
            self.model.set_device_tag(group, block, whole.then_some(tag));
        }
        if !whole && let Some(process) = &mut self.producer {
            process.client.mode = Mode::NeedsReset; // some ranks computed and some did not
        }
        whole
    }

    /// Asks for a record: in the open batch, or visible at once.
    fn ask(&mut self, mut proposal: Proposal) -> Result<(), Violation> {
        let Some(process) = &mut self.producer else {
            return Ok(());
        };
        self.operations += 1;
        proposal.spec.operation = self.operations;
        proposal.spec.draft(&mut self.draft);
        let generation = process.producer.generation().0;
        let at_once = self.random.u8(0..4) == 0;
        let answer = until_crash(|| match at_once {
            true => process.producer.publish(&self.draft),
            false => process.producer.enqueue(&self.draft),
        });
        let Some(answer) = answer else {
            if at_once {
                self.model.attempted(proposal.spec, generation);
            }
            return self.producer_died();
        };
        if let Ok(position) = answer {
            self.model.accepted(proposal.spec.clone(), position.0, generation)?;
        }
        self.observe_producer(at_once && answer.is_ok())?;
        match answer {
            Ok(position) => {
                self.tally.published += 1;
                self.history.add("accepted", position.0, proposal.spec.kind as u64);
                if proposal.spec.kind == Kind::WriteBack {
                    self.savers = (0..self.ranks()).map(|rank| self.model.seated(rank)).collect();
                }
                if let Some(process) = &mut self.producer {
                    process.client.accepted(position.0, proposal, &mut self.tags);
                }
            }
            Err(error) => {
                self.tally.refused += 1;
                match error {
                    PublishError::Full { .. } => self.tally.full += 1,
                    PublishError::RankMissing { .. } | PublishError::ResetNeeded { .. } => self.needs_reset(),
                    _ => {}
                }
                self.history.add("refused", self.operations, proposal.spec.kind as u64);
            }
        }
        Ok(())
    }

    fn needs_reset(&mut self) {
        if let Some(process) = &mut self.producer
            && process.client.mode == Mode::Running
        {
            process.client.mode = Mode::NeedsReset;
        }
    }

    /// Asks for an Abort of a random operation in flight.
    pub(super) fn abort(&mut self) -> Result<(), Violation> {
        let open: Vec<u64> = self.model.open_data().collect();
        let Some(&target) = open.get(self.random.usize(0..open.len().max(1))) else {
            return Ok(());
        };
        self.tally.aborts += 1;
        self.ask(Client::control(Kind::Abort, target, 0))
    }

    /// Asks for a Reset to the next generation.
    pub(super) fn reset(&mut self) -> Result<(), Violation> {
        let Some(process) = &self.producer else { return Ok(()) };
        let generation = process.producer.generation().0 + 1;
        self.tally.resets += 1;
        self.ask(Client::control(Kind::Reset, 0, generation))
    }

    /// Asks for a Reset where one is due.
    pub(super) fn reset_where_due(&mut self) -> Result<(), Violation> {
        let Some(process) = &mut self.producer else {
            return Ok(());
        };
        if process.client.mode == Mode::Running && process.producer.closed().is_some() {
            process.client.mode = Mode::NeedsReset;
        }
        let missing = matches!(process.producer.closed(), Some(PublishError::RankMissing { .. }));
        match process.client.mode {
            Mode::NeedsReset if !missing => self.reset(),
            _ => Ok(()),
        }
    }

    pub(super) fn flush(&mut self) -> Result<(), Violation> {
        self.produce(true, Producer::flush).map(|_| ())
    }

    /// The producer polls and the workload takes in what ended.
    pub(super) fn poll(&mut self, thorough: bool) -> Result<(), Violation> {
        let polled = self.produce(false, |producer| match thorough {
            true => producer.poll_thorough(),
            false => producer.poll(),
        })?;
        if polled.is_none() {
            return Ok(());
        }
        self.take_completions()?;
        self.recover()
    }

    fn take_completions(&mut self) -> Result<(), Violation> {
        while let Some(process) = &mut self.producer
            && let Some(completion) = process.producer.next_completion()
        {
            self.history
                .add("ended", completion.position.0, completion.terminal as u64);
            self.model.completed(&completion)?;
            let open = process.producer.closed().is_none();
            let saved = process.client.completed(&completion, open);
            self.save(&saved)?;
        }
        Ok(())
    }

    /// Checks what a write-back saved on every rank, and puts it into the pool.
    fn save(&mut self, saved: &[(u32, u64, u32, u32, u64)]) -> Result<(), Violation> {
        let same = |rank: u32, saver: &Option<u64>| self.model.seated(rank) == *saver && self.model.is_sound(rank);
        let whole = (0..)
            .zip(&self.savers)
            .all(|(rank, saver)| same(rank, saver) && self.seat(rank).is_some());
        if !whole {
            return Ok(()); // one of the areas is gone: the host blocks stay empty
        }
        for &(layer, slot, _, _, tag) in saved {
            for rank in 0..self.ranks() {
                let Some(seat) = self.seat(rank) else { continue };
                let wrong = self.shape.slot_mismatches(&seat.write_back, slot, rank, layer, tag);
                check(wrong == 0, "D6 a write-back saves what compute wrote", || {
                    format!("rank {rank}, slot {slot}: {wrong} bytes differ")
                })?;
            }
        }
        for &(_, _, group, host, tag) in saved {
            self.fill(group, host, tag)?;
        }
        Ok(())
    }

    /// Writes a block of the pool. The producer may die in the middle: then the block holds nothing (X25a).
    fn fill(&mut self, group: u32, block: u32, tag: u64) -> Result<(), Violation> {
        self.tags.set(group, block, None);
        if self.producer.is_none() {
            return Ok(());
        }
        match until_crash(|| self.shape.fill(&self.pool, group, block, tag)) {
            Some(()) => {
                self.tags.set(group, block, Some(tag));
                Ok(())
            }
            None => self.producer_died(),
        }
    }

    /// Refills a random block of the pool as soon as the leases let it.
    pub(super) fn refill(&mut self) -> Result<(), Violation> {
        let group = self.random.u32(0..GROUPS as u32);
        let block = self.random.u32(0..HOST_BLOCKS);
        let Some(process) = &self.producer else { return Ok(()) };
        if process
            .producer
            .leases()
            .source_leases(GroupId(group), SourceBlock(block))
            > 0
        {
            return Ok(());
        }
        check(
            !self.model.uses_host(group, block),
            "X14 sources stand until every rank is terminal",
            || format!("block {block} of group {group} is refilled"),
        )?;
        self.tally.refills += 1;
        let tag = self.tags.fresh();
        self.history.add("refill", u64::from(block), tag);
        self.fill(group, block, tag)
    }
}
