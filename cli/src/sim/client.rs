//! The workload: what the engine around a producer asks for. It lives in the producer process and dies with it.
//!
//! It keeps requests with their blocks and tables, takes a block as soon as the production leases let it, and at times
//! asks for what it must not get.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use kvsluice_layout::ids::{GroupId, PhysicalBlock, SourceBlock};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::record::{ALL_LAYERS, Kind, NEW_SLOT, RetainMode, SourceKind, Terminal};
use kvsluice_transport::producer::Completion;

use super::model::Model;
use super::shape::{DEVICE_BLOCKS, GATHER_START, GROUPS, HOST_BLOCKS, LAYERS, SLOTS, Shape};
use super::spec::{Spec, SpecRow};

/// Most requests at a time.
const REQUESTS: usize = 6;

/// Whether data flows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Mode {
    /// After a takeover: records of the earlier producer are in flight.
    Recovering,
    /// Data flows.
    Running,
    /// The pools must be reset first.
    NeedsReset,
    /// The Reset at this position is in flight.
    Resetting(u64),
}

/// One request.
#[derive(Clone, Debug, Default)]
pub(super) struct Request {
    pub(super) epoch: u64,
    /// Revisions g and r.
    pub(super) revisions: (u64, u64),
    /// By group.
    pub(super) owned: Vec<BTreeSet<u32>>,
    /// By layer.
    pub(super) tables: Vec<Vec<u32>>,
    pub(super) busy: bool,
    /// Owner sets may differ between ranks until the next Retain.
    pub(super) dirty: bool,
}

/// What changes once a record is Done.
#[derive(Clone, Debug)]
enum Change {
    Own(Vec<(u32, u32)>),
    Tables(Vec<Vec<u32>>),
    Nothing,
    End,
    /// Write-back: (row's layer, slot, group, host block, tag).
    Save(Vec<(u32, u64, u32, u32, u64)>),
}

#[derive(Clone, Debug)]
struct Flight {
    request: Vec<u8>,
    kind: Kind,
    change: Change,
}

/// A plan that the workload asks for, with what follows from it.
pub(super) struct Proposal {
    pub(super) spec: Spec,
    change: Change,
    /// Blocks that compute writes before: (group, block, tag).
    pub(super) computed: Vec<(u32, u32, u64)>,
}

/// Host blocks and what they hold; survives the producer, as the pool and its directory do.
pub(super) struct HostTags {
    tags: Vec<Option<u64>>,
    next: u64,
}

impl HostTags {
    pub(super) fn new() -> Self {
        Self {
            tags: vec![None; GROUPS * HOST_BLOCKS as usize],
            next: 1,
        }
    }

    pub(super) fn get(&self, group: u32, block: u32) -> Option<u64> {
        self.tags.get((group * HOST_BLOCKS + block) as usize).copied().flatten()
    }

    pub(super) fn set(&mut self, group: u32, block: u32, tag: Option<u64>) {
        if let Some(to) = self.tags.get_mut((group * HOST_BLOCKS + block) as usize) {
            *to = tag;
        }
    }

    /// A tag that nothing has had.
    pub(super) fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// What the workload looks at when it decides.
pub(super) struct View<'a> {
    pub(super) leases: &'a LeaseTable,
    pub(super) model: &'a Model,
    pub(super) generation: u64,
}

/// The workload of one producer process.
pub(super) struct Client {
    pub(super) requests: BTreeMap<Vec<u8>, Request>,
    flights: BTreeMap<u64, Flight>,
    pub(super) mode: Mode,
    /// By group: device blocks that belong to requests of an earlier producer.
    pub(super) foreign: Vec<BTreeSet<u32>>,
    names: u64,
}

impl Client {
    /// `names`: a number that no earlier client has named requests with.
    pub(super) fn new(mode: Mode, names: u64) -> Self {
        Self {
            requests: BTreeMap::new(),
            flights: BTreeMap::new(),
            mode,
            foreign: vec![BTreeSet::new(); GROUPS],
            names,
        }
    }

    /// True where no operation of a request is in flight.
    pub(super) fn is_idle(&self) -> bool {
        self.flights.is_empty()
    }

    fn is_free(&self, view: &View<'_>, group: u32, block: u32) -> bool {
        let at = group as usize;
        let owned = |request: &Request| request.owned.get(at).is_some_and(|owned| owned.contains(&block));
        view.leases.device_leases(GroupId(group), PhysicalBlock(block)) == 0
            && !self.requests.values().any(owned)
            && !self.foreign.get(at).is_some_and(|foreign| foreign.contains(&block))
    }

    /// Device blocks that may be written, in random order.
    fn free(&self, view: &View<'_>, group: u32, random: &mut Rng) -> Vec<u32> {
        let mut free: Vec<u32> = (1..DEVICE_BLOCKS)
            .filter(|block| self.is_free(view, group, *block))
            .collect();
        random.shuffle(&mut free);
        free
    }

    /// The next plan, if there is something to ask for.
    pub(super) fn propose(&mut self, view: &View<'_>, tags: &mut HostTags, random: &mut Rng) -> Option<Proposal> {
        let idle: Vec<&Vec<u8>> = self
            .requests
            .iter()
            .filter(|(_, request)| !request.busy)
            .map(|(name, _)| name)
            .collect();
        let recovering = self.mode == Mode::Recovering;
        let begin = self.requests.len() < REQUESTS && (idle.is_empty() || random.u8(0..4) == 0);
        if begin || recovering {
            if recovering && self.requests.len() >= 2 {
                return None;
            }
            self.names += 1;
            let mut name = format!("request {}", self.names).into_bytes();
            name.resize(name.len() + random.usize(0..40), b'.');
            let epoch = view.generation << 32 | self.names & 0xffff_ffff;
            let request = Request {
                epoch,
                owned: vec![BTreeSet::new(); GROUPS],
                tables: vec![Vec::new(); LAYERS.len()],
                ..Request::default()
            };
            return self.upload(&name, &request, view, tags, random);
        }
        let name = idle
            .get(random.usize(0..idle.len().max(1)))
            .map(|name| (*name).clone())?;
        let request = self.requests.get(&name)?.clone();
        let owned: usize = request.owned.iter().map(BTreeSet::len).sum();
        match random.u8(0..20) {
            0..6 => self.upload(&name, &request, view, tags, random),
            6..11 if owned > 0 => Some(self.retain(&name, &request, view, random)),
            11..14 if owned > 0 => self.byte_move(&name, &request, view, random),
            14 => Some(self.keep(&name, &request, view, false)),
            15..17 if owned > 0 && !request.dirty => self.write_back(&name, &request, view, tags, random),
            17..19 => Some(self.keep(&name, &request, view, true)),
            _ => self.poach(&name, &request, view, tags, random),
        }
    }

    fn spec(name: &[u8], request: &Request, view: &View<'_>, kind: Kind, mode: Option<RetainMode>) -> Spec {
        Spec {
            kind,
            mode,
            request: name.to_vec(),
            epoch: request.epoch,
            operation: 0,
            generation: view.generation,
            revisions: (request.revisions.0 + 1, request.revisions.1 + 1),
            target: 0,
            last: false,
            rows: Vec::new(),
        }
    }

    fn upload(
        &self,
        name: &[u8],
        request: &Request,
        view: &View<'_>,
        tags: &mut HostTags,
        random: &mut Rng,
    ) -> Option<Proposal> {
        let mut spec = Self::spec(name, request, view, Kind::Upload, None);
        let kind = if random.u8(0..4) == 0 {
            SourceKind::Copy
        } else {
            SourceKind::SourceOnly
        };
        // Pairs that are carried and ignored (R24): they make records long, and the ring full.
        let ballast = if random.u8(0..3) == 0 { random.usize(0..250) } else { 0 };
        let mut blocks = Vec::new();
        for group in 0..GROUPS as u32 {
            let sources = match kind {
                SourceKind::Copy => GATHER_START..HOST_BLOCKS,
                SourceKind::SourceOnly => 0..GATHER_START,
            };
            let filled: Vec<(u32, u64)> = sources
                .filter_map(|block| Some((block, tags.get(group, block)?)))
                .collect();
            if filled.is_empty() {
                continue;
            }
            let wanted = random.usize(0..4);
            let mut pairs = Vec::new();
            for block in self.free(view, group, random).into_iter().take(wanted) {
                let (source, tag) = filled[random.usize(0..filled.len())];
                pairs.push((source, block, tag));
                blocks.push((group, block));
            }
            if pairs.is_empty() {
                continue;
            }
            let valid = pairs.len();
            pairs.resize(valid + ballast, (u32::MAX, u32::MAX, 0));
            spec.rows.extend(Shape::layers_of(group).map(|layer| SpecRow {
                layer,
                group,
                source_kind: kind as u16,
                valid_tokens: 0,
                pairs: pairs.clone(),
                valid,
            }));
        }
        (!blocks.is_empty()).then_some(Proposal {
            spec,
            change: Change::Own(blocks),
            computed: Vec::new(),
        })
    }

    /// Asks for a block that is leased: it must be refused.
    fn poach(
        &self,
        name: &[u8],
        request: &Request,
        view: &View<'_>,
        tags: &mut HostTags,
        random: &mut Rng,
    ) -> Option<Proposal> {
        let group = random.u32(0..GROUPS as u32);
        let leased = |block: &u32| view.leases.device_leases(GroupId(group), PhysicalBlock(*block)) > 0;
        let leased: Vec<u32> = (1..DEVICE_BLOCKS).filter(leased).collect();
        let block = *leased.get(random.usize(0..leased.len().max(1)))?;
        let source = (0..GATHER_START).find_map(|source| Some((source, tags.get(group, source)?)))?;
        let mut spec = Self::spec(name, request, view, Kind::Upload, None);
        spec.rows.extend(Shape::layers_of(group).map(|layer| SpecRow {
            layer,
            group,
            source_kind: SourceKind::SourceOnly as u16,
            valid_tokens: 0,
            pairs: vec![(source.0, block, source.1)],
            valid: 1,
        }));
        Some(Proposal {
            spec,
            change: Change::Nothing,
            computed: Vec::new(),
        })
    }

    /// New tables by remap, shared or per layer: some of the old slots and some of the blocks that were uploaded since.
    fn retain(&self, name: &[u8], request: &Request, view: &View<'_>, random: &mut Rng) -> Proposal {
        let mode = if random.u8(0..3) == 0 {
            RetainMode::LayerTables
        } else {
            RetainMode::SharedTable
        };
        let mut spec = Self::spec(name, request, view, Kind::Retain, Some(mode));
        let mut tables = vec![Vec::new(); LAYERS.len()];
        for (group, owned) in (0..).zip(&request.owned) {
            for layer in Shape::layers_of(group) {
                let first = Shape::layers_of(group).next() == Some(layer);
                if mode == RetainMode::SharedTable && !first {
                    continue;
                }
                let old = request.tables.get(layer as usize).map_or(&[][..], Vec::as_slice);
                let mut pairs: Vec<(u32, u32, u64)> = (0..).zip(old).map(|(slot, block)| (slot, *block, 0)).collect();
                pairs.extend(
                    owned
                        .iter()
                        .filter(|block| !old.contains(block))
                        .map(|block| (NEW_SLOT, *block, 0)),
                );
                pairs.retain(|_| random.u8(0..5) != 0);
                if random.u8(0..3) == 0 {
                    random.shuffle(&mut pairs);
                }
                for pair in &mut pairs {
                    pair.2 = view.model.device_tag(group, pair.1).unwrap_or(0);
                }
                let table: Vec<u32> = pairs.iter().map(|pair| pair.1).collect();
                for to in Shape::layers_of(group).filter(|to| mode == RetainMode::SharedTable || *to == layer) {
                    if let Some(to) = tables.get_mut(to as usize) {
                        to.clone_from(&table);
                    }
                }
                spec.rows.push(SpecRow {
                    layer: if mode == RetainMode::SharedTable {
                        ALL_LAYERS
                    } else {
                        layer
                    },
                    group,
                    source_kind: 0,
                    valid_tokens: random.u32(0..=table.len() as u32 * 2),
                    valid: pairs.len(),
                    pairs,
                });
            }
        }
        Proposal {
            spec,
            change: Change::Tables(tables),
            computed: Vec::new(),
        }
    }

    /// New tables by moving bytes: blocks change places, or move to free ones.
    fn byte_move(&self, name: &[u8], request: &Request, view: &View<'_>, random: &mut Rng) -> Option<Proposal> {
        let mut spec = Self::spec(name, request, view, Kind::Retain, Some(RetainMode::ByteMove));
        let mut tables = Vec::new();
        for group in 0..GROUPS as u32 {
            let mut layers = Shape::layers_of(group).filter_map(|layer| request.tables.get(layer as usize));
            let table = layers.next()?;
            if layers.any(|other| other != table) {
                return None; // layers with tables of their own are left to remaps
            }
            let mut places = table.clone();
            places.extend(self.free(view, group, random).into_iter().take(2));
            if random.bool() {
                random.shuffle(&mut places);
            }
            let pairs: Vec<(u32, u32, u64)> = table
                .iter()
                .zip(&places)
                .map(|(from, to)| (*from, *to, view.model.device_tag(group, *from).unwrap_or(0)))
                .collect();
            for layer in Shape::layers_of(group) {
                tables.push(pairs.iter().map(|pair| pair.1).collect());
                spec.rows.push(SpecRow {
                    layer,
                    group,
                    source_kind: 0,
                    valid_tokens: pairs.len() as u32,
                    valid: pairs.len(),
                    pairs: pairs.clone(),
                });
            }
        }
        spec.rows.iter().any(|row| row.valid > 0).then_some(Proposal {
            spec,
            change: Change::Tables(tables),
            computed: Vec::new(),
        })
    }

    /// Revisions advance and nothing moves; or the request ends.
    fn keep(&self, name: &[u8], request: &Request, view: &View<'_>, last: bool) -> Proposal {
        let mut spec = Self::spec(name, request, view, Kind::Keep, None);
        spec.last = last;
        Proposal {
            spec,
            change: if last { Change::End } else { Change::Nothing },
            computed: Vec::new(),
        }
    }

    /// Compute writes blocks that are in a table, and they are saved to the host pool.
    fn write_back(
        &self,
        name: &[u8],
        request: &Request,
        view: &View<'_>,
        tags: &mut HostTags,
        random: &mut Rng,
    ) -> Option<Proposal> {
        let sound = (0..)
            .take_while(|rank| view.model.seated(*rank).is_some())
            .all(|rank| view.model.is_sound(rank));
        if view.model.writes_back() || !sound {
            return None; // its slots are in use
        }
        let mut spec = Self::spec(name, request, view, Kind::WriteBack, None);
        let group = random.u32(0..GROUPS as u32);
        let mut blocks: Vec<u32> = request.owned.get(group as usize)?.iter().copied().collect();
        random.shuffle(&mut blocks);
        blocks.truncate(random.usize(1..3));
        let mut hosts: Vec<u32> = (0..HOST_BLOCKS)
            .filter(|at| view.leases.source_leases(GroupId(group), SourceBlock(*at)) == 0)
            .collect();
        random.shuffle(&mut hosts);
        let rows = Shape::layers_of(group).count() as u64;
        let used = rows * blocks.len() as u64;
        spec.target = random.u64(0..=SLOTS.checked_sub(used)?);
        let mut computed = Vec::new();
        let mut pairs = Vec::new();
        for (block, host) in blocks.into_iter().zip(hosts) {
            let tag = tags.fresh();
            computed.push((group, block, tag));
            pairs.push((block, host, tag));
        }
        let mut saved = Vec::new();
        let mut slot = spec.target;
        for layer in Shape::layers_of(group) {
            for &(_, host, tag) in &pairs {
                saved.push((layer, slot, group, host, tag));
                slot += 1;
            }
            spec.rows.push(SpecRow {
                layer,
                group,
                source_kind: 0,
                valid_tokens: 0,
                valid: pairs.len(),
                pairs: pairs.clone(),
            });
        }
        (!pairs.is_empty()).then_some(Proposal {
            spec,
            change: Change::Save(saved),
            computed,
        })
    }

    /// An Abort of the record at `position`, a Reset, or neither of a request.
    pub(super) fn control(kind: Kind, target: u64, generation: u64) -> Proposal {
        let spec = Spec {
            kind,
            mode: None,
            request: b"control".to_vec(),
            epoch: 0,
            operation: 0,
            generation,
            revisions: (0, 0),
            target,
            last: false,
            rows: Vec::new(),
        };
        Proposal {
            spec,
            change: Change::Nothing,
            computed: Vec::new(),
        }
    }

    /// A proposal was accepted at `position`.
    pub(super) fn accepted(&mut self, position: u64, proposal: Proposal, tags: &mut HostTags) {
        let Proposal { spec, change, .. } = proposal;
        match spec.kind {
            Kind::Reset => self.mode = Mode::Resetting(position),
            Kind::Abort | Kind::Padding => return,
            _ => {
                let request = self.requests.entry(spec.request.clone()).or_insert_with(|| Request {
                    epoch: spec.epoch,
                    owned: vec![BTreeSet::new(); GROUPS],
                    tables: vec![Vec::new(); LAYERS.len()],
                    ..Request::default()
                });
                request.busy = true;
                request.revisions = spec.revisions;
                if let Change::Save(saved) = &change {
                    // The host blocks are written at the end: they hold nothing until then.
                    saved
                        .iter()
                        .for_each(|&(_, _, group, host, _)| tags.set(group, host, None));
                }
            }
        }
        let flight = Flight {
            request: spec.request,
            kind: spec.kind,
            change,
        };
        self.flights.insert(position, flight);
    }

    /// An operation ended. Returns what a write-back saved: (layer, slot, group, host block, tag).
    pub(super) fn completed(&mut self, completion: &Completion, open: bool) -> Vec<(u32, u64, u32, u32, u64)> {
        let done = completion.terminal == Terminal::Done;
        let Some(flight) = self.flights.remove(&completion.position.0) else {
            return Vec::new();
        };
        if flight.kind == Kind::Reset {
            if self.mode == Mode::Resetting(completion.position.0) {
                self.mode = Mode::NeedsReset;
                if done && open {
                    self.mode = Mode::Running;
                    self.requests.clear();
                    self.foreign.iter_mut().for_each(BTreeSet::clear);
                }
            }
            return Vec::new();
        }
        let Some(request) = self.requests.get_mut(&flight.request) else {
            return Vec::new();
        };
        request.busy = false;
        if !done {
            request.dirty = true;
            let tables = matches!(flight.kind, Kind::Retain | Kind::Keep);
            if (tables || completion.terminal == Terminal::RankLost) && self.mode == Mode::Running {
                self.mode = Mode::NeedsReset;
            }
            return Vec::new();
        }
        match flight.change {
            Change::Own(blocks) => {
                for (group, block) in blocks {
                    if let Some(owned) = request.owned.get_mut(group as usize) {
                        owned.insert(block);
                    }
                }
            }
            Change::Tables(tables) => {
                for (group, owned) in (0..).zip(&mut request.owned) {
                    let named = Shape::layers_of(group).filter_map(|layer| tables.get(layer as usize));
                    *owned = named.flatten().copied().collect();
                }
                request.tables = tables;
                request.dirty = false;
            }
            Change::Nothing => {}
            Change::End => {
                self.requests.remove(&flight.request);
            }
            Change::Save(saved) => return saved,
        }
        Vec::new()
    }

    /// Takes over a request that all ranks report alike (X25).
    pub(super) fn adopt(&mut self, name: Vec<u8>, request: Request) {
        self.requests.insert(name, request);
    }
}
