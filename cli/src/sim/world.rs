//! The processes of a channel in one thread, and everything that can happen to them.
//!
//! Each method is one action of one process. Afterwards the checker reads what the process stored.

use anyhow::Context;
use fastrand::Rng;
use kvsluice_layout::ids::{DecoderLayer, GroupId, Position, ProcessEpoch, Rank, SourceBlock};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::PlanDraft;
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{Kind, TerminalSlot};
use kvsluice_layout::region::{SLOTS_AT, TERMINALS_AT, WORKER_EPOCH_AT};
use kvsluice_transport::counting::{Counting, until_crash};
use kvsluice_transport::producer::{Producer, PublishError};
use kvsluice_transport::shared::{Heap, Shared, SharedMut};
use zerocopy::IntoBytes;

use super::client::{Client, HostTags, Mode, Proposal, Request, View};
use super::history::History;
use super::memory::{Probe, Stored};
use super::model::{Model, Violation, check};
use super::seat::{Birth, Nature, Seat, Stepped};
use super::shape::{GROUPS, HOST_BLOCKS, LAYERS, Shape};

/// Most pieces of work that a device does in one step.
const DEVICE_PIECES: u32 = 10;

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

    /// A new producer takes over from a dead one, with the workers that live.
    pub(super) fn take_over(&mut self) -> Result<(), Violation> {
        let epoch = self.epoch();
        let mut survivors = Vec::new();
        let mut alive = Vec::new();
        let mut client = Client::new(Mode::Recovering, self.epochs << 16);
        for (rank, place) in (0..).zip(&mut self.places) {
            let Place::Alive(seat) = place else {
                *place = Place::Empty;
                alive.push(None);
                continue;
            };
            seat.handshakes.push_back(epoch);
            survivors.push((Rank(rank), seat.segment.heap().clone(), seat.epoch, 100 + rank));
            alive.push(Some(seat.epoch.0));
            for view in seat.tables().export() {
                for (group, foreign) in (0..).zip(&mut client.foreign) {
                    foreign.extend(view.owned(GroupId(group)));
                }
            }
        }
        self.model.takes_over(epoch.0, &alive);
        for one in self.model.journal_uses() {
            client
                .foreign
                .get_mut(one.group as usize)
                .into_iter()
                .for_each(|foreign| {
                    foreign.insert(one.block);
                });
        }
        self.history.add("a producer takes over", epoch.0, self.model.tail);
        let (control, regions) = (self.control.clone(), self.shape.regions.clone());
        let leases = LeaseTable::new(&self.shape.map);
        let taken = until_crash(|| Producer::take_over(control, regions, leases, epoch, survivors));
        let producer = match taken {
            None => return self.producer_died(),
            Some(Err(error)) => {
                return check(false, "X25 a journal that a producer wrote can be read", || {
                    error.to_string()
                });
            }
            Some(Ok(producer)) => producer,
        };
        self.tally.takeovers += 1;
        self.observe_producer(false)?;
        let members: Vec<(u64, u64)> = (0..self.ranks())
            .map(|rank| producer.member(Rank(rank)))
            .map(|member| (member.epoch.0, member.first.0))
            .collect();
        self.model
            .took_over(producer.tail().0, producer.in_flight(), &members)?;
        // A worker that joined as its producer died is not a member: it drains and starts again.
        for rank in 0..self.ranks() {
            if self
                .seat(rank)
                .is_some_and(|seat| self.model.seated(rank) != Some(seat.epoch.0))
            {
                self.kill(rank);
                self.set(rank, Place::Empty);
            }
        }
        self.producer = Some(Process { producer, client });
        if planted("x25_republish") {
            self.republish()?;
        }
        Ok(())
    }

    /// A successor that does not trust the journal, and publishes what it finds there once more.
    fn republish(&mut self) -> Result<(), Violation> {
        let Some(spec) = self.model.first_open() else {
            return Ok(());
        };
        spec.draft(&mut self.draft);
        let draft = std::mem::take(&mut self.draft);
        let position = self.produce(false, |producer| producer.enqueue(&draft))?;
        self.draft = draft;
        if let Some(Ok(position)) = position {
            let generation = spec.generation;
            self.model.accepted(spec, position.0, generation)?;
            self.produce(true, Producer::flush)?;
        }
        Ok(())
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

    /// After a takeover, once the journal is empty: adopts what all ranks report alike, or resets (X25).
    fn recover(&mut self) -> Result<(), Violation> {
        let Some(process) = &self.producer else { return Ok(()) };
        if process.client.mode != Mode::Recovering || process.producer.in_flight() > 0 || !process.client.is_idle() {
            return Ok(());
        }
        let wanted = self.random.u8(0..4) != 0;
        let found = if wanted && process.producer.closed().is_none() {
            self.reported()
        } else {
            None
        };
        let Some(process) = &mut self.producer else {
            return Ok(());
        };
        process.client.mode = match found {
            None => Mode::NeedsReset,
            Some(requests) => {
                self.tally.adopted += 1;
                for (name, request) in requests {
                    process.client.adopt(name, request);
                }
                process
                    .client
                    .foreign
                    .iter_mut()
                    .for_each(std::collections::BTreeSet::clear);
                Mode::Running
            }
        };
        self.history
            .add("recovered", u64::from(process.client.mode == Mode::Running), 0);
        Ok(())
    }

    /// The requests that the workers report, where all of them report the same and are sound.
    fn reported(&self) -> Option<Vec<(Vec<u8>, Request)>> {
        let mine = &self.producer.as_ref()?.client.requests;
        let first = self.seat(0)?.tables();
        let mut requests = Vec::new();
        for rank in 0..self.ranks() {
            let tables = self.seat(rank)?.tables();
            let alike = tables.export().count() == first.export().count()
                && first.export().all(|view| {
                    tables
                        .get(view.request())
                        .is_some_and(|other| other.digest() == view.digest())
                });
            if !alike || !self.model.is_sound(rank) {
                return None;
            }
        }
        for view in first.export().filter(|view| !mine.contains_key(view.request())) {
            let owned: Vec<std::collections::BTreeSet<u32>> = (0..GROUPS as u32)
                .map(|group| view.owned(GroupId(group)).iter().copied().collect())
                .collect();
            let known = (0..)
                .zip(&owned)
                .all(|(group, owned)| owned.iter().all(|block| self.model.device_tag(group, *block).is_some()));
            let tables = (0..LAYERS.len() as u32).map(|layer| {
                let table = first.table(view.request(), DecoderLayer(layer));
                table.map(|(blocks, _)| blocks.to_vec()).unwrap_or_default()
            });
            let request = Request {
                epoch: view.epoch().0,
                revisions: (view.map_revision().0, view.selection_revision().0),
                owned,
                tables: tables.collect(),
                busy: false,
                dirty: false,
            };
            if !known {
                return None;
            }
            requests.push((view.request().to_vec(), request));
        }
        Some(requests)
    }

    // The workers.

    fn set(&mut self, rank: u32, place: Place) {
        if let Some(to) = self.places.get_mut(rank as usize) {
            *to = place;
        }
    }

    fn observe_rank(&mut self, rank: u32) -> Result<(), Violation> {
        let Some(Place::Alive(seat)) = self.places.get(rank as usize) else {
            return Ok(());
        };
        seat.segment.take_log(&mut self.log);
        self.model.rank_stored(rank, seat.epoch.0, &self.log)?;
        if self.model.is_sound(rank) {
            seat.unharmed()?;
        }
        Ok(())
    }

    /// One step of a rank's worker. True where it did something.
    pub(super) fn step_worker(&mut self, rank: u32) -> Result<bool, Violation> {
        let (now_ns, step) = (self.now_ns, self.history.step);
        let Some(seat) = self.seat_mut(rank).filter(|seat| seat.stopped_until <= step) else {
            return Ok(false);
        };
        let generation = seat.tables().generation();
        let stepped = seat.step(now_ns);
        self.observe_rank(rank)?;
        let Some(seat) = self.seat(rank) else { return Ok(false) };
        if seat.tables().generation() != generation && self.model.is_sound(rank) {
            seat.has_only_its_generation()?;
        }
        match stepped {
            Stepped::Alive(step) => {
                if step == kvsluice_gpu_worker::worker::Step::Worked {
                    self.history
                        .add("worked", u64::from(rank), seat.open_operations() as u64);
                }
                Ok(step == kvsluice_gpu_worker::worker::Step::Worked)
            }
            Stepped::Crashed => {
                self.kill(rank);
                Ok(true)
            }
            Stepped::Stopped { broken } => {
                let sound = self.model.is_sound(rank);
                check(!broken || !sound, "X9 a whole ring is never broken", || {
                    format!("rank {rank}")
                })?;
                self.kill(rank);
                Ok(true)
            }
        }
    }

    pub(super) fn step_device(&mut self, rank: u32) -> bool {
        let pieces = self.random.u32(1..=DEVICE_PIECES);
        self.seat_mut(rank).is_some_and(|seat| seat.step_device(pieces))
    }

    pub(super) fn shake_hands(&mut self, rank: u32) -> bool {
        self.seat_mut(rank).is_some_and(Seat::shake_hands)
    }

    pub(super) fn launch(&mut self, rank: u32) {
        let mut random = self.random.fork();
        if let Some(seat) = self.seat(rank) {
            seat.launch_reader(&self.shape, &mut random);
        }
    }

    /// The process of a rank ends here. Its device goes with it: what was queued is never copied.
    pub(super) fn kill(&mut self, rank: u32) {
        if self.seat(rank).is_some() {
            self.tally.worker_deaths += 1;
            self.history.add("a worker dies", u64::from(rank), 0);
            self.set(rank, Place::Dead);
        }
    }

    /// Lets a rank's worker make so many more stores.
    pub(super) fn arm_worker(&mut self, rank: u32, stores: u64) {
        if let Some(seat) = self.seat(rank) {
            seat.segment.fuse().arm(stores);
        }
    }

    /// Stops a rank's process for so many steps, as SIGSTOP does.
    pub(super) fn stop(&mut self, rank: u32, steps: u64) {
        let until = self.history.step + steps;
        if let Some(seat) = self.seat_mut(rank) {
            seat.stopped_until = until;
        }
    }

    /// Lets every process run and live.
    pub(super) fn calm(&mut self) {
        self.control.fuse().disarm();
        for place in &mut self.places {
            if let Place::Alive(seat) = place {
                seat.stopped_until = 0;
                seat.segment.fuse().disarm();
            }
        }
    }

    /// The producer has proof of a worker's death, and takes it off its rank.
    pub(super) fn lose(&mut self, rank: u32) -> Result<(), Violation> {
        if !matches!(self.places.get(rank as usize), Some(Place::Dead)) || self.producer.is_none() {
            return Ok(());
        }
        self.history.add("a rank is lost", u64::from(rank), 0);
        self.model.lost(rank);
        self.set(rank, Place::Empty);
        self.produce(false, |producer| producer.lose(Rank(rank)))?;
        self.take_completions()
    }

    /// A worker starts and joins an empty rank.
    pub(super) fn join(&mut self, rank: u32) -> Result<(), Violation> {
        let Some(process) = &self.producer else { return Ok(()) };
        if !matches!(self.places.get(rank as usize), Some(Place::Empty)) {
            return Ok(());
        }
        let producer = process.producer.epoch();
        let epoch = self.epoch();
        let lines = SLOTS_AT..SLOTS_AT + self.shape.regions.ring_bytes();
        let segment = Probe::new(self.shape.regions.rank_bytes(), lines);
        let heap = segment.heap().clone();
        let first = self.produce(true, |producer| producer.join(Rank(rank), heap, epoch, 100 + rank))?;
        let Some(first) = first else { return Ok(()) };
        self.tally.joins += 1;
        self.history.add("a worker joins", u64::from(rank), first.0);
        let nature = Nature::draw(&mut self.random, self.faulty);
        self.model.joined(rank, epoch.0, first.0, nature.is_faulty())?;
        let seat = self.born(rank, epoch, producer, first, segment, &nature);
        let seat = seat.map_err(|error| Violation {
            rule: "simulator: a worker starts",
            what: format!("{error:#}"),
        })?;
        self.set(rank, Place::Alive(Box::new(seat)));
        self.observe_rank(rank)
    }

    fn born(
        &self,
        rank: u32,
        epoch: ProcessEpoch,
        producer: ProcessEpoch,
        first: Position,
        segment: Probe,
        nature: &Nature,
    ) -> anyhow::Result<Seat> {
        let birth = Birth {
            shape: &self.shape,
            control: self.control.heap().clone(),
            pool: self.pool.memory.clone(),
            segment,
            rank,
            epoch,
            producer,
            first,
        };
        Seat::new(birth, nature).with_context(|| format!("rank {rank}"))
    }

    /// A worker answers once more what it has answered, and says so in its hint (X16).
    pub(super) fn repeat_answer(&mut self, rank: u32) {
        let lines = self.shape.regions.ring_bytes() / 64;
        let at = SLOTS_AT + self.random.usize(0..lines) * 64;
        if let Some(seat) = self.seat(rank) {
            let heap = seat.segment.heap();
            let mut line = [0; 8];
            heap.copy_out(at, &mut line);
            heap.copy_in(at, &line);
            heap.store(TERMINALS_AT, heap.load(TERMINALS_AT).wrapping_add(1));
        }
    }

    /// Hostile words in a rank's segment: anywhere, or in the slots of records in flight, whole answers among them.
    pub(super) fn scribble(&mut self, rank: u32) {
        let Some(seat) = self.seat(rank) else { return };
        let (heap, epoch) = (seat.segment.heap().clone(), seat.epoch.0);
        self.tally.scribbles += 1;
        self.history.add("hostile words", u64::from(rank), 0);
        self.model.scribbled(rank);
        let open: Vec<u64> = self.model.open_data().collect();
        for _ in 0..self.random.u8(1..12) {
            let position = open.get(self.random.usize(0..open.len().max(1)));
            match (self.random.u8(0..3), position) {
                (0, _) | (_, None) => {
                    let words = (heap.size() - WORKER_EPOCH_AT) / 8;
                    let at = WORKER_EPOCH_AT + self.random.usize(0..words) * 8;
                    heap.store(at, self.random.u64(..));
                }
                (kind, Some(position)) => {
                    let at = SLOTS_AT + *position as usize % self.shape.regions.ring_bytes();
                    let mut slot = TerminalSlot {
                        commit: position + 1,
                        status: self.random.u8(0..7),
                        bytes_moved: self.random.u64(..),
                        ..TerminalSlot::default()
                    };
                    if kind == 1 {
                        // Nearly what an honest worker says.
                        let ring = self.shape.regions.ring_at() + *position as usize % self.shape.regions.ring_bytes();
                        slot.identity = self.control.heap().load(ring + 8);
                        slot.producer_epoch = self.control.heap().load(ring + 32);
                        slot.worker_epoch = epoch;
                    }
                    let mut line = [0_u64; 8];
                    line.as_mut_bytes().copy_from_slice(slot.as_bytes());
                    heap.copy_in(at, &line);
                }
            }
        }
    }

    // A pause: everything ends, and what is left must be nothing.

    /// Brings every rank back and looks whether everything has ended. True once it has.
    pub(super) fn is_settled(&mut self) -> Result<bool, Violation> {
        if self.producer.is_none() {
            self.take_over()?;
        }
        for rank in 0..self.ranks() {
            while self.shake_hands(rank) {}
            if self.seat(rank).is_some() && !self.model.is_sound(rank) {
                self.kill(rank); // expelled
            }
            self.lose(rank)?;
            self.join(rank)?;
        }
        self.reset_where_due()?;
        self.flush()?;
        self.poll(true)?;
        let Some(process) = &self.producer else {
            return Ok(false);
        };
        let open: usize = (0..self.ranks())
            .filter_map(|rank| self.seat(rank))
            .map(Seat::open_operations)
            .sum();
        Ok(process.producer.in_flight() == 0
            && process.client.mode == Mode::Running
            && process.producer.closed().is_none()
            && open == 0)
    }

    /// Who holds what, for the message of a pause that does not end.
    pub(super) fn stuck(&self) -> String {
        let process = self.producer.as_ref();
        let oldest = process.and_then(|process| process.producer.oldest());
        let mode = process.map(|process| process.client.mode);
        let open = |rank| self.seat(rank).map(Seat::open_operations);
        let open: Vec<Option<usize>> = (0..self.ranks()).map(open).collect();
        format!("{mode:?}, oldest {oldest:?}, open per rank {open:?}")
    }

    /// Checks what must hold when nothing is in flight.
    pub(super) fn check_settled(&mut self) -> Result<(), Violation> {
        self.tally.drains += 1;
        self.model.drained()?;
        let Some(process) = &self.producer else { return Ok(()) };
        let leased = process.producer.leases().leased_blocks();
        check(leased == 0, "F12 leases return when everything has ended", || {
            format!("{leased} blocks are leased")
        })?;
        let (reclaim, tail) = (process.producer.reclaim().0, process.producer.tail().0);
        check(
            reclaim == tail && tail == self.model.tail,
            "F12 ring space returns when everything has ended",
            || format!("reclaim {reclaim}, tail {tail}, expected {}", self.model.tail),
        )?;
        for (name, request) in &process.client.requests {
            for rank in 0..self.ranks() {
                let Some(tables) = self.seat(rank).map(Seat::tables) else {
                    continue;
                };
                let said = |what: &str| format!("rank {rank}, {}: {what}", String::from_utf8_lossy(name));
                let view = tables.get(name);
                let digest = view.map(|view| view.digest());
                let first = self
                    .seat(0)
                    .and_then(|seat| seat.tables().get(name))
                    .map(|view| view.digest());
                if request.dirty {
                    continue;
                }
                check(digest == first, "I9 the tables of all ranks are equal", || {
                    said("another digest")
                })?;
                for (layer, table) in (0..).zip(&request.tables) {
                    let found = tables
                        .table(name, DecoderLayer(layer))
                        .map_or(&[][..], |(blocks, _)| blocks);
                    check(found == table, "R57 the tables are those that were committed", || {
                        said(&format!("layer {layer}: {found:?}, expected {table:?}"))
                    })?;
                }
                for (group, owned) in (0..).zip(&request.owned) {
                    let found = view.map_or(&[][..], |view| view.owned(GroupId(group)));
                    let same = found.iter().eq(owned);
                    check(same, "R55 a request owns what was committed", || {
                        said(&format!("group {group}: {found:?}, expected {owned:?}"))
                    })?;
                }
            }
        }
        Ok(())
    }
}
