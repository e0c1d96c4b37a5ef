//! A rank for tests: real bytes and tables, and as late with everything as the contract allows.

use std::collections::HashMap;
use std::sync::Arc;

use kvsluice_layout::content;
use kvsluice_layout::ids::{
    DecoderLayer, DestinationBlock, GroupId, PoolGeneration, Position, ProcessEpoch, Rank, SourceBlock,
};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::Plan;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::record::{ALL_LAYERS, Kind, NEW_SLOT, Pair, RetainMode, RowRecord};
use kvsluice_transport::port::{Incoming, Outcome, Port, Ticket};
use kvsluice_transport::ring::RingShape;
use kvsluice_transport::shared::{Shared, SharedMut};

/// What a rank saw.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Seen {
    pub(crate) verified: u64,
    pub(crate) mismatched: u64,
    /// Blocks that an upload wrote while a table named them.
    pub(crate) overwritten: u64,
    /// Rows whose old slots or revisions did not fit.
    pub(crate) contradicting: u64,
    pub(crate) kinds: [u64; 8],
    pub(crate) modes: [u64; 4],
}

/// The tables of one request, by layer.
type Tables = Vec<Vec<u32>>;

pub(crate) struct FakeRank<C, R, P> {
    rank: Rank,
    map: Arc<GeometryMap>,
    pool: P,
    device: Vec<u8>,
    port: Port<C, R>,
    open: Vec<Ticket>,
    tables: HashMap<Vec<u8>, (Tables, u64, u64)>,
    random: fastrand::Rng,
    pub(crate) seen: Seen,
    /// Fails the next so many uploads.
    pub(crate) fail_uploads: u32,
}

pub(crate) struct RankSpec {
    pub(crate) rank: Rank,
    pub(crate) epoch: ProcessEpoch,
    pub(crate) producer: ProcessEpoch,
    pub(crate) first: Position,
    pub(crate) shape: RingShape,
    pub(crate) seed: u64,
}

impl<C: Shared, R: SharedMut, P: Shared> FakeRank<C, R, P> {
    pub(crate) fn new(spec: RankSpec, control: C, segment: R, pool: P, map: Arc<GeometryMap>) -> Self {
        let leases = LeaseTable::new(&map);
        let pinned_bytes = map.pool_bytes();
        let RankSpec {
            rank,
            epoch,
            producer,
            first,
            shape,
            seed,
        } = spec;
        let port = Port::new(control, segment, shape, leases, epoch, producer, first);
        port.set_pinned(pinned_bytes);
        Self {
            rank,
            device: vec![0xEE; map.device_bytes() as usize],
            pool,
            port,
            map,
            open: Vec::new(),
            tables: HashMap::new(),
            random: fastrand::Rng::with_seed(seed),
            seen: Seen::default(),
            fail_uploads: 0,
        }
    }

    /// The port.
    pub(crate) fn port(&self) -> &Port<C, R> {
        &self.port
    }

    /// Requests with tables.
    pub(crate) fn requests(&self) -> usize {
        self.tables.len()
    }

    /// Takes what the ring holds and ends some of it, in any order.
    pub(crate) fn step(&mut self) {
        while let Some(incoming) = self.port.receive().unwrap() {
            match incoming {
                Incoming::Plan(ticket) => self.open.push(ticket),
                other => panic!("rank {}: {other:?}", self.rank),
            }
        }
        self.abort_unstarted();
        for _ in 0..self.random.usize(0..=self.open.len().max(1)) {
            if self.open.is_empty() {
                break;
            }
            let at = self.random.usize(..self.open.len());
            let waits = match self.open[at].kind() {
                Kind::Reset => self.open.len() > 1,
                Kind::Abort => self
                    .open
                    .iter()
                    .any(|other| other.position() == self.target(&self.open[at])),
                _ => false,
            };
            if !waits {
                let ticket = self.open.swap_remove(at);
                self.run(ticket);
            }
        }
    }

    fn target(&self, ticket: &Ticket) -> Position {
        Position(self.port.plan(ticket).unwrap().header().target)
    }

    /// Half of the operations that an Abort names have not started.
    fn abort_unstarted(&mut self) {
        let aborts: Vec<_> = self.open.iter().filter(|ticket| ticket.kind() == Kind::Abort).collect();
        let targets: Vec<_> = aborts.into_iter().map(|ticket| self.target(ticket)).collect();
        for target in targets {
            let at = self.open.iter().position(|ticket| ticket.position() == target);
            if let Some(at) = at.filter(|_| self.random.bool()) {
                let ticket = self.open.swap_remove(at);
                self.seen.kinds[0] += 1;
                self.port.finish(ticket, &Outcome::superseded(false, 0));
            }
        }
    }

    fn run(&mut self, ticket: Ticket) {
        let Self {
            port,
            map,
            pool,
            device,
            tables,
            seen,
            rank,
            ..
        } = self;
        let plan = port.plan(&ticket).unwrap();
        let operation = plan.operation();
        seen.kinds[plan.kind() as usize] += 1;
        let (g, r) = (operation.map_revision.get(), operation.selection_revision.get());
        let mut bytes = 0;
        let mut digest = 0;
        match plan.kind() {
            Kind::Upload if self.fail_uploads > 0 => {
                self.fail_uploads -= 1;
                port.finish(ticket, &Outcome::failed());
                return;
            }
            Kind::Upload => {
                for row in plan.rows() {
                    for pair in plan.pairs(row) {
                        let named = |(tables, ..): &(Tables, u64, u64)| {
                            let of_group = tables.iter().zip(&map.geometry().layers);
                            of_group
                                .filter(|(_, spec)| spec.group.0 == row.group)
                                .any(|(t, _)| t.contains(&pair.destination))
                        };
                        seen.overwritten += u64::from(tables.values().any(named));
                        for plane in map.planes(*rank, DecoderLayer(row.layer)) {
                            let to = plane.device_at(DestinationBlock(pair.destination)) as usize;
                            let into = &mut device[to..to + plane.bytes as usize];
                            pool.bytes_out(plane.host_at(SourceBlock(pair.source)) as usize, into);
                            bytes += plane.bytes;
                        }
                    }
                    verify(
                        map,
                        *rank,
                        device,
                        DecoderLayer(row.layer),
                        plan.pairs(row),
                        plan.tags(row),
                        seen,
                    );
                }
            }
            Kind::Keep | Kind::Retain => {
                let layers = map.geometry().layers.len();
                let (of_request, old_g, old_r) = tables
                    .entry(plan.request().to_vec())
                    .or_insert_with(|| (vec![Vec::new(); layers], 0, 0));
                seen.contradicting += u64::from(g < *old_g || r < *old_r);
                (*old_g, *old_r) = (g, r);
                if let Some(mode) = plan.mode() {
                    seen.modes[mode as usize] += 1;
                    bytes = move_bytes(map, *rank, device, &plan);
                    for row in plan.rows() {
                        for layer in layers_of(map, row) {
                            let table = &mut of_request[layer.index()];
                            seen.contradicting += remap(mode, plan.pairs(row), table);
                            let spec = map.geometry().group(GroupId(row.group)).unwrap();
                            assert_eq!(row.valid_tokens, table.len() as u32 * spec.block_tokens);
                            verify(map, *rank, device, layer, plan.pairs(row), plan.tags(row), seen);
                        }
                    }
                }
                digest = content::seed(g, r as u32, 0, 0);
                for (layer, table) in (0..).zip(&*of_request) {
                    digest = table
                        .iter()
                        .fold(digest, |digest, block| content::seed(digest, layer, *block, 1));
                }
                if plan.is_last_of_request() {
                    tables.remove(plan.request());
                }
            }
            Kind::Reset => {
                tables.clear();
                device.fill(0xEE);
                port.set_generation(PoolGeneration(operation.pool_generation.0));
            }
            _ => {}
        }
        port.finish(ticket, &Outcome::done(bytes, 0, digest));
    }
}

fn layers_of(map: &GeometryMap, row: &RowRecord) -> Vec<DecoderLayer> {
    if row.layer != ALL_LAYERS {
        return vec![DecoderLayer(row.layer)];
    }
    let layers = (0..)
        .zip(&map.geometry().layers)
        .filter(|(_, spec)| spec.group.0 == row.group);
    layers.map(|(number, _)| DecoderLayer(number)).collect()
}

/// The new table; returns how many old slots did not hold the named block.
fn remap(mode: RetainMode, pairs: &[Pair], table: &mut Vec<u32>) -> u64 {
    let fits = |pair: &&Pair| {
        mode == RetainMode::ByteMove
            || pair.source == NEW_SLOT
            || table.get(pair.source as usize) == Some(&pair.destination)
    };
    let wrong = pairs.iter().filter(|pair| !fits(pair)).count() as u64;
    *table = pairs.iter().map(|pair| pair.destination).collect();
    wrong
}

/// Carries out a byte move, all moves at once.
fn move_bytes(map: &GeometryMap, rank: Rank, device: &mut [u8], plan: &Plan<'_>) -> u64 {
    if plan.mode() != Some(RetainMode::ByteMove) {
        return 0;
    }
    let before = device.to_vec();
    let mut bytes = 0;
    for row in plan.rows() {
        for pair in plan.pairs(row).iter().filter(|pair| pair.source != pair.destination) {
            for plane in map.planes(rank, DecoderLayer(row.layer)) {
                let [from, to] = [pair.source, pair.destination].map(|b| plane.device_at(DestinationBlock(b)) as usize);
                let len = plane.bytes as usize;
                device[to..to + len].copy_from_slice(&before[from..from + len]);
                bytes += plane.bytes;
            }
        }
    }
    bytes
}

fn verify(
    map: &GeometryMap,
    rank: Rank,
    device: &[u8],
    layer: DecoderLayer,
    pairs: &[Pair],
    tags: &[u64],
    seen: &mut Seen,
) {
    let of = map.layer(layer).unwrap();
    let shard = rank.0 * of.shards / map.geometry().ranks;
    for (pair, tag) in pairs.iter().zip(tags) {
        for (index, plane) in (0..).zip(map.planes(rank, layer)) {
            let at = plane.device_at(DestinationBlock(pair.destination)) as usize;
            let seed = content::seed(*tag, of.tensor, shard, index);
            seen.verified += plane.bytes;
            seen.mismatched += content::mismatches(seed, &device[at..at + plane.bytes as usize]);
        }
    }
}
