//! One rank's worker process: the production worker on a stepped host device, and the engine beside it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::Context;
use fastrand::Rng;
use kvsluice_gpu_worker::copy::HostPool;
use kvsluice_gpu_worker::device::adversary::Adversary;
use kvsluice_gpu_worker::device::host::{HostDevice, HostEngine, KernelMemory, KernelState, Stepper, TableView};
use kvsluice_gpu_worker::device::{Access, Device, DeviceSpec, HostSpan, TABLE_POISON, TableSlot};
use kvsluice_gpu_worker::tables::{ROW_HEADER_WORDS, TableLimits, TableStore};
use kvsluice_gpu_worker::worker::{Step, Verifier, Verify, Worker, WorkerSpec};
use kvsluice_layout::content;
use kvsluice_layout::ids::{DecoderLayer, PhysicalBlock, Position, ProcessEpoch, Rank};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_transport::counting::until_crash;
use kvsluice_transport::port::Port;
use kvsluice_transport::ring::RingShape;
use kvsluice_transport::shared::Heap;

use super::memory::Probe;
use super::model::{Violation, check};
use super::shape::{DEVICE_BLOCKS, LAYERS, SLOTS, Shape};

/// Requests whose tables a worker holds: more than the workload ever has.
const REQUESTS_MAX: u32 = 64;
/// Simulated time after which an operation that runs means that the device is lost: far more than any stop.
pub(super) const WATCHDOG_NS: u64 = 1_000_000_000;

/// How nasty a rank's device is.
#[derive(Clone, Debug)]
pub(super) struct Nature {
    pub(super) adversary: Adversary,
    /// Small queues, that are full at times.
    pub(super) cramped: bool,
}

impl Nature {
    /// A device that delays, tears and interleaves, and where `faulty` fails now and then.
    pub(super) fn draw(random: &mut Rng, faulty: bool) -> Self {
        let mut adversary = Adversary {
            seed: random.u64(..),
            hold_max: [0, 2, 6, 30][random.usize(0..4)],
            interleave: random.u8(0..8) != 0,
            piece_bytes_max: [0, 0, 10, 24][random.usize(0..4)],
            ..Adversary::default()
        };
        if faulty {
            adversary.fail_copy_ppm = 30_000;
            adversary.lose_device_ppm = 500;
            adversary.mute_event_ppm = 500;
        }
        Self {
            adversary,
            cramped: random.u8(0..4) == 0,
        }
    }

    /// True where operations may fail.
    pub(super) fn is_faulty(&self) -> bool {
        self.adversary.fail_copy_ppm > 0
    }
}

/// What a worker is made from.
pub(super) struct Birth<'a> {
    pub(super) shape: &'a Shape,
    pub(super) control: Heap,
    pub(super) pool: Heap,
    pub(super) segment: Probe,
    pub(super) rank: u32,
    pub(super) epoch: ProcessEpoch,
    pub(super) producer: ProcessEpoch,
    pub(super) first: Position,
}

/// A worker process that lives.
pub(super) struct Seat {
    // First: the device copies from `pool` and into `write_back` until it is gone.
    worker: Worker<Heap, Probe, HostDevice>,
    stepper: Stepper,
    engine: HostEngine,
    /// The write-back area, by itself.
    pub(super) write_back: Heap,
    _pool: Heap,
    pub(super) segment: Probe,
    pub(super) epoch: ProcessEpoch,
    /// Producers that have shaken hands, by a message that has not been read.
    pub(super) handshakes: VecDeque<ProcessEpoch>,
    /// Step before which the process does not run, as under SIGSTOP.
    pub(super) stopped_until: u64,
    rank: u32,
    /// What readers saw change under them.
    torn: Arc<AtomicU64>,
    /// Tables that the device has otherwise than the worker reports them.
    unlike: Arc<AtomicU64>,
}

/// How a worker's step ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Stepped {
    /// It lives.
    Alive(Step),
    /// It crashed at a store.
    Crashed,
    /// It stopped: a lost device, or framing that it does not trust.
    Stopped {
        /// The ring was broken, by its account.
        broken: bool,
    },
}

impl Seat {
    pub(super) fn new(birth: Birth<'_>, nature: &Nature) -> anyhow::Result<Self> {
        let Birth { shape, rank, epoch, .. } = birth;
        let map = &shape.map;
        let ring = RingShape {
            at: shape.regions.ring_at(),
            bytes: shape.regions.ring_bytes(),
        };
        let leases = LeaseTable::new(map);
        let port = Port::new(
            birth.control,
            birth.segment.clone(),
            ring,
            leases,
            epoch,
            birth.producer,
            birth.first,
        );
        let tables = TableLimits {
            requests_max: REQUESTS_MAX,
            blocks_max: DEVICE_BLOCKS,
        };
        let mut spec = DeviceSpec::allocate(map.device_bytes(), TableStore::new(map, tables).spec());
        (spec.events_max, spec.fragments_max, spec.commands_max) = match nature.cramped {
            true => (96, 256, 64),
            false => (1024, 8192, 1024),
        };
        let mut device = HostDevice::stepped(spec, nature.adversary.clone()).context("device")?;
        let (stepper, engine) = (device.stepper(), device.engine());
        let slot_bytes = map.writeback_slot_bytes();
        let write_back = Heap::new((SLOTS * slot_bytes) as usize);
        let mut register = |memory: &Heap, bytes: u64, access| {
            // SAFETY: the seat holds a clone of the memory and drops it after the device. The bytes are atomics, so
            // there is no reference that excludes the copies; they run on this thread, between accesses.
            let span = unsafe { HostSpan::new(memory.base(), bytes, access) };
            let region = device.register_all(span, &[bytes])?;
            anyhow::Ok(HostPool::new(region, &[bytes]))
        };
        let pool = register(&birth.pool, map.pool_bytes(), Access::ReadOnly)?;
        let area = register(&write_back, SLOTS * slot_bytes, Access::ReadWrite)?;
        let verifier = Verifier::new(Verify::Full, &mut device, 4096)?;
        let spec = WorkerSpec {
            rank: Rank(rank),
            pool,
            write_back: Some(area),
            write_back_slots: (SLOTS, slot_bytes),
            tables,
            verifier,
            watchdog_ns: WATCHDOG_NS,
        };
        Ok(Self {
            worker: Worker::new(port, map.clone(), device, spec),
            stepper,
            engine,
            write_back,
            _pool: birth.pool,
            segment: birth.segment,
            epoch,
            handshakes: VecDeque::new(),
            stopped_until: 0,
            rank,
            torn: Arc::default(),
            unlike: Arc::default(),
        })
    }

    /// One step of the worker.
    pub(super) fn step(&mut self, now_ns: u64) -> Stepped {
        match until_crash(|| self.worker.step(now_ns)) {
            Some(Ok(step)) => Stepped::Alive(step),
            Some(Err(error)) => Stepped::Stopped {
                broken: matches!(error, kvsluice_gpu_worker::worker::WorkerError::Broken(_)),
            },
            None => Stepped::Crashed,
        }
    }

    /// Up to so many pieces of work on the device.
    pub(super) fn step_device(&mut self, pieces: u32) -> bool {
        let mut worked = false;
        for _ in 0..pieces {
            if self.stepper.step() != kvsluice_gpu_worker::device::host::Step::Worked {
                break;
            }
            worked = true;
        }
        worked
    }

    /// Reads the next handshake.
    pub(super) fn shake_hands(&mut self) -> bool {
        let producer = self.handshakes.pop_front();
        producer
            .into_iter()
            .for_each(|epoch| self.worker.port_mut().accept_producer(epoch));
        producer.is_some()
    }

    /// The tables of all requests on this rank.
    pub(super) fn tables(&self) -> &TableStore {
        self.worker.tables()
    }

    /// Operations that were accepted and not answered.
    pub(super) fn open_operations(&self) -> usize {
        self.worker.open_operations() + self.worker.port().unanswered()
    }

    /// Bytes at destinations that are wrong, and readers that saw something change (X13, X14, X19, R57).
    pub(super) fn unharmed(&self) -> Result<(), Violation> {
        let wrong = self.worker.counts().mismatched_bytes;
        check(wrong == 0, "X14 sources stand and destinations arrive", || {
            format!("rank {}: {wrong} bytes differ from their tags", self.rank)
        })?;
        let torn = self.torn.load(Ordering::Relaxed);
        check(torn == 0, "X19 R57 compute reads what stands", || {
            format!("rank {}: {torn} reads saw blocks or tables change", self.rank)
        })?;
        let unlike = self.unlike.load(Ordering::Relaxed);
        check(
            unlike == 0,
            "X25 the device has the tables that its rank reports",
            || format!("rank {}: {unlike} tables are others", self.rank),
        )
    }

    /// Every table is of the worker's generation: an earlier Reset left nothing (X24a).
    pub(super) fn has_only_its_generation(&self) -> Result<(), Violation> {
        let generation = self.tables().generation().0;
        let older = self.tables().export().find(|view| view.epoch().0 >> 32 != generation);
        check(older.is_none(), "X24a a Reset empties the tables", || {
            format!(
                "rank {}: {:?} at generation {generation}",
                self.rank,
                older.map(|view| view.epoch())
            )
        })
    }

    /// The engine launches attention over a request's table: it looks the table up once and reads blocks of it in
    /// several turns, which must find the same.
    pub(super) fn launch_reader(&self, shape: &Shape, random: &mut Rng) -> bool {
        let layer = random.u32(0..LAYERS.len() as u32);
        let tables = self.worker.tables();
        let with_table = tables.export().filter(|view| {
            let table = tables.table(view.request(), DecoderLayer(layer));
            table.is_some_and(|(blocks, _)| !blocks.is_empty())
        });
        let slots: Vec<_> = with_table.map(|view| view.slot()).collect();
        let Some(&slot) = slots.get(random.usize(0..slots.len().max(1))) else {
            return false;
        };
        let row = layer * (ROW_HEADER_WORDS + DEVICE_BLOCKS);
        let planes: Vec<_> = shape.map.planes(Rank(self.rank), DecoderLayer(layer)).to_vec();
        let mut turns = match random.u8(0..3) {
            0 => random.u32(20..150),
            _ => random.u32(2..8),
        };
        let nth = random.u32(..);
        let torn = Arc::clone(&self.torn);
        let mut seen: Option<(TableView, Vec<u8>)> = None;
        let look = move |memory: &KernelMemory<'_>, view: TableView| {
            let word = |index| memory.word(view, row + index).unwrap_or(u32::MAX);
            let count = word(1);
            let mut bytes: Vec<u8> = (0..ROW_HEADER_WORDS + count.min(DEVICE_BLOCKS))
                .flat_map(|index| word(index).to_le_bytes())
                .collect();
            if count == 0 {
                return Some(bytes); // the request has ended meanwhile
            }
            let block = word(ROW_HEADER_WORDS + nth % count.min(DEVICE_BLOCKS));
            if count > DEVICE_BLOCKS || block >= DEVICE_BLOCKS {
                return None; // an image that no table has
            }
            for plane in &planes {
                let mut content = vec![0; plane.bytes as usize];
                memory
                    .read(plane.device_at(PhysicalBlock(block).into()), &mut content)
                    .ok()?;
                bytes.extend(content);
            }
            Some(bytes)
        };
        let kernel = move |memory: &KernelMemory<'_>| {
            turns -= 1;
            let view = match &seen {
                Some((view, _)) => Some(*view),
                None => memory.table(slot),
            };
            let found = view.and_then(|view| look(memory, view));
            let changed = seen.as_ref().is_some_and(|(_, bytes)| Some(bytes) != found.as_ref());
            torn.fetch_add(u64::from(changed || found.is_none()), Ordering::Relaxed);
            if seen.is_none() {
                seen = view.zip(found);
            }
            match turns {
                0 => KernelState::Finished,
                _ => KernelState::Again,
            }
        };
        self.engine.launch(kernel).is_ok()
    }

    /// The engine looks at every table that the worker reports. Nothing is in flight, and what changes a table from now on
    /// waits for this kernel.
    pub(super) fn launch_auditor(&self) {
        let tables = self.worker.tables();
        let mut reported = Vec::new();
        for view in tables.export() {
            for layer in 0..LAYERS.len() as u32 {
                let table = tables.table(view.request(), DecoderLayer(layer));
                let (blocks, valid_tokens) = table.unwrap_or_default();
                reported.push((
                    view.slot(),
                    layer * (ROW_HEADER_WORDS + DEVICE_BLOCKS),
                    valid_tokens,
                    blocks.to_vec(),
                ));
            }
        }
        let unlike = Arc::clone(&self.unlike);
        let kernel = move |memory: &KernelMemory<'_>| {
            let differs = |(slot, row, valid_tokens, blocks): &(TableSlot, u32, u32, Vec<u32>)| {
                let Some(view) = memory.table(*slot) else { return true };
                let word = |index| memory.word(view, row + index);
                match (word(1), blocks.as_slice()) {
                    (Some(0 | TABLE_POISON), []) => false, // a request that has no table yet
                    (count, blocks) => {
                        let ids = (ROW_HEADER_WORDS..).map(word).take(blocks.len());
                        word(0) != Some(*valid_tokens)
                            || count != Some(blocks.len() as u32)
                            || !ids.eq(blocks.iter().copied().map(Some))
                    }
                }
            };
            let others = reported.iter().filter(|row| differs(row)).count();
            unlike.fetch_add(others as u64, Ordering::Relaxed);
            KernelState::Finished
        };
        let _ = self.engine.launch(kernel); // a full queue: another time
    }

    /// The engine launches compute that gives blocks new content, plane by plane: what a write-back is to save (D6).
    pub(super) fn launch_writer(&self, shape: &Shape, blocks: &[(u32, u32, u64)]) -> bool {
        let mut writes = Vec::new();
        for &(group, block, tag) in blocks {
            for layer in Shape::layers_of(group) {
                writes.extend(shape.device_planes(self.rank, layer, block, tag));
            }
        }
        let kernel = move |memory: &KernelMemory<'_>| {
            if let Some((seed, at, length)) = writes.pop() {
                let mut bytes = vec![0; length];
                content::fill(seed, &mut bytes);
                let _ = memory.write(at, &bytes); // inside the pool by the geometry
            }
            match writes.is_empty() {
                true => KernelState::Finished,
                false => KernelState::Again,
            }
        };
        self.engine.launch(kernel).is_ok()
    }
}
