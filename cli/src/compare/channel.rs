//! A channel within this process: the production producer, store and workers on heap memory, with host devices that are
//! driven step by step and are as late as they may be.

use std::collections::HashMap;
use std::sync::{Arc, mpsc};

use anyhow::{Context, Result, bail, ensure};
use kvsluice_cpu_worker::store::{BlockTag, HostStore};
use kvsluice_gpu_worker::copy::HostPool;
use kvsluice_gpu_worker::device::adversary::Adversary;
use kvsluice_gpu_worker::device::host::{HostDevice, HostEngine, KernelMemory, KernelState, Stepper};
use kvsluice_gpu_worker::device::{Access, Device, DeviceSpec, HostSpan, TableSlot};
use kvsluice_gpu_worker::tables::{ROW_HEADER_WORDS, TableLimits, TableStore};
use kvsluice_gpu_worker::worker::{Step, Verifier, Verify, Worker, WorkerSpec};
use kvsluice_layout::geometry::Geometry;
use kvsluice_layout::ids::{
    DecoderLayer, DestinationBlock, GroupId, LogicalBlock, PhysicalBlock, PoolGeneration, ProcessEpoch, Rank,
    SourceBlock, TokenCount,
};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::PlanDraft;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::record::Terminal;
use kvsluice_layout::region::{MIN_RING_BYTES, RegionMap};
use kvsluice_transport::port::Port;
use kvsluice_transport::producer::{Completion, Producer};
use kvsluice_transport::shared::{Heap, SharedMut};

use super::kv::{LayerKv, Shape, Source};

/// Nanoseconds that a step stands for.
const STEP_NS: u64 = 1000;

/// One rank.
struct RankEnd {
    worker: Worker<Heap, Heap, HostDevice>,
    stepper: Stepper,
    engine: HostEngine,
    now_ns: u64,
}

/// The channel.
pub(super) struct Channel {
    // Dropped first: their devices copy from `pool` until they are gone.
    ranks: Vec<RankEnd>,
    pub(super) producer: Producer<Heap, Heap>,
    pub(super) store: HostStore<Heap, Heap>,
    pool: Heap,
    pub(super) map: Arc<GeometryMap>,
    source: Source,
    /// Block of the sequence whose numbers a frame holds.
    filled: HashMap<(GroupId, SourceBlock), LogicalBlock>,
    table_row_words: u32,
}

/// The bytes that one rank's attention finds for one layer: valid tokens, and the planes of each block.
type Found = (DecoderLayer, u32, Vec<Vec<Vec<u8>>>);

impl Channel {
    /// A channel whose ranks are at generation 1.
    pub(super) fn new(map: Arc<GeometryMap>, source: Source) -> Result<Self> {
        let geometry = map.geometry();
        let blocks_max = geometry
            .groups
            .iter()
            .map(|group| group.device_blocks)
            .max()
            .unwrap_or(1);
        let record_bytes = geometry.layers.len() * (64 + 16 * blocks_max as usize);
        let ring_bytes = (4 * record_bytes).next_power_of_two().max(MIN_RING_BYTES);
        let regions = RegionMap::new(geometry, ring_bytes, 0, 64)?;
        let control = Heap::new(regions.control_bytes());
        let pool = Heap::new(map.pool_bytes() as usize);
        let epoch = ProcessEpoch(1);
        let producer = Producer::new(control.clone(), regions.clone(), LeaseTable::new(&map), epoch);
        let store = HostStore::new(control.clone(), pool.clone(), map.clone(), regions);
        let limits = TableLimits {
            requests_max: 1,
            blocks_max,
        };
        let mut channel = Self {
            ranks: Vec::new(),
            producer,
            store,
            pool,
            source,
            filled: HashMap::new(),
            table_row_words: ROW_HEADER_WORDS + blocks_max,
            map: map.clone(),
        };
        for rank in (0..geometry.ranks).map(Rank) {
            let segment = Heap::new(channel.producer.map().rank_bytes());
            let worker_epoch = ProcessEpoch(2 + u64::from(rank.get()));
            let first = channel.producer.join(rank, segment.clone(), worker_epoch, 0);
            let shape = channel.producer.shape();
            let port = Port::new(
                control.clone(),
                segment,
                shape,
                LeaseTable::new(&map),
                worker_epoch,
                epoch,
                first,
            );
            port.set_pinned(map.pool_bytes());
            let end = open_rank(rank, port, limits, &channel)?;
            channel.ranks.push(end);
        }
        let mut reset = PlanDraft::new();
        reset.reset(PoolGeneration(1));
        channel.run(&reset)?;
        Ok(channel)
    }

    /// The frame that holds a block of the sequence, filled first where it is not in the pool.
    pub(super) fn frame(&mut self, group: GroupId, block: LogicalBlock) -> Result<SourceBlock> {
        let tag = BlockTag(u64::from(block.get()));
        let frame = self.store.ensure(group, tag, self.producer.leases())?;
        if self.filled.insert((group, frame), block) != Some(block) {
            self.fill(group, frame, block);
        }
        Ok(frame)
    }

    /// Writes the numbers of a block into its frame. Nothing leases it: it was given out for the record being made.
    fn fill(&self, group: GroupId, frame: SourceBlock, block: LogicalBlock) {
        let layers = (0..).map(DecoderLayer).zip(&self.map.geometry().layers);
        for (layer, _) in layers.filter(|(_, spec)| spec.group == group && spec.alias_of.is_none()) {
            let Some(of) = self.map.layer(layer) else { continue };
            let planes = self.map.shard_planes(layer);
            let per_shard = (planes.len() as u32 / of.shards.max(1)).max(1);
            for (at, plane) in (0..).zip(planes) {
                let place = (of.tensor, at / per_shard, at % per_shard);
                let bytes = self.source.plane(block, place, plane.bytes);
                self.pool.bytes_in(plane.host_at(frame) as usize, &bytes);
            }
        }
    }

    /// Publishes a record and drives everything until every rank has answered it.
    pub(super) fn run(&mut self, draft: &PlanDraft) -> Result<Completion> {
        self.producer.publish(draft)?;
        loop {
            let mut moved = false;
            for rank in &mut self.ranks {
                moved |= rank.step()?;
            }
            self.producer.poll_thorough();
            if let Some(completion) = self.producer.next_completion() {
                let Completion {
                    kind, terminal, reason, ..
                } = completion;
                ensure!(
                    terminal == Terminal::Done,
                    "{kind:?} ended as {terminal:?} (reason {reason}) and not as Done"
                );
                return Ok(completion);
            }
            ensure!(
                moved,
                "a record waits for ranks that have nothing to do; please report this"
            );
        }
    }

    /// What attention finds through the device tables of `request`, on every rank, in every layer.
    pub(super) fn read(&mut self, request: &[u8]) -> Result<Vec<LayerKv>> {
        let mut kv = Vec::new();
        for number in 0..self.ranks.len() as u32 {
            let (rank, map, row_words) = (Rank(number), self.map.clone(), self.table_row_words);
            let look = move |memory: &KernelMemory<'_>, slot| find(memory, slot, &map, rank, row_words);
            for (layer, valid, blocks) in self
                .launch(rank, request, look)?
                .context("a table that names no memory")?
            {
                let shape = Shape::of(&self.map, layer, self.source.dtype).context("a layer without a shape")?;
                kv.push(LayerKv::new(
                    (rank, layer, shape),
                    TokenCount(valid),
                    blocks.into_iter(),
                ));
            }
        }
        Ok(kv)
    }

    /// Flips one bit of what attention finds: the negative control.
    pub(super) fn flip_byte(&mut self, request: &[u8], rank: Rank, layer: DecoderLayer) -> Result<()> {
        let (map, row_words) = (self.map.clone(), self.table_row_words);
        let flip = move |memory: &KernelMemory<'_>, slot| {
            let view = memory.table(slot)?;
            let block = memory.word(view, layer.get() * row_words + ROW_HEADER_WORDS)?;
            let plane = map.planes(rank, layer).first()?;
            let at = plane.device_at(DestinationBlock(block)) + plane.bytes / 2;
            let mut byte = [0];
            memory.read(at, &mut byte).ok()?;
            memory.write(at, &byte.map(|byte| byte ^ 1)).ok()
        };
        self.launch(rank, request, flip)?
            .context("no byte to flip: the first table is empty")
    }

    /// True where no rank holds a table any more, and nothing is leased.
    pub(super) fn is_empty(&self) -> bool {
        let tables = self.ranks.iter().map(|rank| rank.worker.tables().export().count());
        tables.sum::<usize>() == 0 && self.producer.leases().leased_blocks() == 0
    }

    /// Runs a kernel on a rank's compute queue, with the slot of a request's table.
    fn launch<T: Send + 'static>(
        &mut self,
        rank: Rank,
        request: &[u8],
        kernel: impl Fn(&KernelMemory<'_>, TableSlot) -> T + Send + 'static,
    ) -> Result<T> {
        let end = self.ranks.get_mut(rank.index()).context("no such rank")?;
        let slot = end
            .worker
            .tables()
            .get(request)
            .context("the request has no table")?
            .slot();
        let (found, result) = mpsc::channel();
        end.engine.launch(move |memory: &KernelMemory<'_>| {
            // The receiver outlives the kernel, which is run below.
            let _ = found.send(kernel(memory, slot));
            KernelState::Finished
        })?;
        end.stepper.run();
        match result.try_recv() {
            Ok(result) => Ok(result),
            Err(_) => bail!("a kernel did not run: the device is lost"),
        }
    }
}

impl RankEnd {
    /// One step of the worker and one of its device. True where one of them moved.
    fn step(&mut self) -> Result<bool> {
        self.now_ns += STEP_NS;
        let worked = self.worker.step(self.now_ns)? == Step::Worked;
        let device = self.stepper.step() == kvsluice_gpu_worker::device::host::Step::Worked;
        Ok(worked || device)
    }
}

fn open_rank(rank: Rank, port: Port<Heap, Heap>, limits: TableLimits, channel: &Channel) -> Result<RankEnd> {
    let map = &channel.map;
    let spec = DeviceSpec::allocate(map.device_bytes(), TableStore::new(map, limits).spec());
    let largest = (0..map.geometry().layers.len() as u32).flat_map(|layer| map.planes(rank, DecoderLayer(layer)));
    let adversary = Adversary {
        // Torn, but so that the time does not grow with the size of a block.
        piece_bytes_max: largest.map(|plane| plane.bytes / 3).max().unwrap_or(0).max(1),
        ..Adversary::late(channel.source.seed ^ u64::from(rank.get()))
    };
    let mut device = HostDevice::stepped(spec, adversary)?;
    let ends = [map.pool_bytes()];
    // SAFETY: the device is dropped before the channel's clone of the pool. It reads only frames that a record in flight
    // leases, which nobody writes meanwhile (X14), and makes no reference to them.
    let span = unsafe { HostSpan::new(channel.pool.base(), map.pool_bytes(), Access::ReadOnly) };
    let pool = HostPool::new(device.register_all(span, &ends)?, &ends);
    // The numbers are not the content that a verifier knows: they are compared here.
    let verifier = Verifier::new(Verify::Off, &mut device, 0)?;
    let (stepper, engine) = (device.stepper(), device.engine());
    let spec = WorkerSpec {
        rank,
        pool,
        write_back: None,
        write_back_slots: (0, 0),
        tables: limits,
        verifier,
        watchdog_ns: 0,
    };
    Ok(RankEnd {
        worker: Worker::new(port, GeometryMap::clone(map), device, spec),
        stepper,
        engine,
        now_ns: 0,
    })
}

/// Reads every block that the table in `slot` names. `None` for a table that names what is not there.
fn find(memory: &KernelMemory<'_>, slot: TableSlot, map: &GeometryMap, rank: Rank, words: u32) -> Option<Vec<Found>> {
    let view = memory.table(slot)?;
    let layers = 0..map.geometry().layers.len() as u32;
    let of_layer = |number: u32| {
        let (layer, row) = (DecoderLayer(number), number * words);
        let (valid, blocks) = (memory.word(view, row)?, memory.word(view, row + 1)?);
        let of_block = |at: u32| {
            let block = DestinationBlock(memory.word(view, row + ROW_HEADER_WORDS + at)?);
            let of_plane = |plane: &kvsluice_layout::planes::Plane| {
                let mut bytes = vec![0; plane.bytes as usize];
                memory.read(plane.device_at(block), &mut bytes).ok()?;
                Some(bytes)
            };
            map.planes(rank, layer).iter().map(of_plane).collect::<Option<Vec<_>>>()
        };
        Some((layer, valid, (0..blocks).map(of_block).collect::<Option<Vec<_>>>()?))
    };
    layers.map(of_layer).collect()
}

/// The geometry with pools that hold the whole sequence of `blocks` blocks, and a gather region for all of it.
pub(super) fn sized(mut geometry: Geometry, blocks: u32) -> Geometry {
    for group in &mut geometry.groups {
        group.gather_blocks = blocks;
        group.source_blocks = 2 * blocks;
        group.device_blocks = 2 * blocks + 1; // a full plan brings all it wants beside what is held (R32)
        group.source_null = None;
        group.device_null = group.device_null.map(|_| PhysicalBlock(0));
    }
    geometry
}
