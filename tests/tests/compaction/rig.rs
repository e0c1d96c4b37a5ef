//! The parts of a channel on heap memory: a producer that plays rounds, or records that a test makes itself, and ranks
//! that are stepped one by one.

use std::sync::{Arc, mpsc};

use kvsluice_cpu_worker::rounds::{RoundRecord, Rounds, WorkloadOptions};
use kvsluice_cpu_worker::store::HostStore;
use kvsluice_cpu_worker::trace::Trace;
use kvsluice_gpu_worker::copy::HostPool;
use kvsluice_gpu_worker::device::adversary::Adversary;
use kvsluice_gpu_worker::device::host::{self, HostDevice, HostEngine, KernelMemory, KernelState, Stepper};
use kvsluice_gpu_worker::device::{Access, Device, DeviceSpec, HostSpan, TableSlot};
use kvsluice_gpu_worker::tables::{TableLimits, TableStore};
use kvsluice_gpu_worker::worker::{Step, Verifier, Verify, Worker, WorkerSpec};
use kvsluice_layout::geometry::Geometry;
use kvsluice_layout::ids::{ProcessEpoch, Rank};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::planted::with_planted;
use kvsluice_layout::presets::{Sizing, preset};
use kvsluice_layout::record::Kind;
use kvsluice_layout::region::RegionMap;
use kvsluice_transport::clock::Simulated;
use kvsluice_transport::counting::{Counting, Fuse};
use kvsluice_transport::port::Port;
use kvsluice_transport::producer::Producer;
use kvsluice_transport::shared::Heap;

use crate::observer::Observer;
use crate::through_tables::{Found, Looked, differing, find};

pub(crate) const PRODUCER: ProcessEpoch = ProcessEpoch(0xA11CE);
/// Most blocks in the table of one layer.
pub(crate) const BLOCKS_MAX: u32 = 128;
pub(crate) const RING_BYTES: usize = 1 << 18;
/// Steps after which a test says that nothing comes to an end any more.
const STEPS_MAX: u32 = 200_000;

/// A sample geometry with small pools.
pub(crate) fn sample(ranks: u32, source_blocks: u32, device_blocks: u32) -> Geometry {
    let sizing = Sizing {
        source_blocks: Some(source_blocks),
        device_blocks: Some(device_blocks),
        gather_blocks: None,
        ranks: Some(ranks),
    };
    sizing.apply(preset("sample").unwrap()).unwrap()
}

/// Memory as the process that writes it sees it: it may end before any of its stores.
pub(crate) type Own = Counting<Heap>;

/// The memory of a channel: what outlives its processes.
pub(crate) struct Memory {
    pub(crate) map: Arc<GeometryMap>,
    pub(crate) regions: RegionMap,
    pub(crate) control: Heap,
    pub(crate) pool: Heap,
    /// Ends the producer.
    pub(crate) fuse: Fuse,
}

impl Memory {
    pub(crate) fn new(geometry: &Geometry) -> Self {
        let map = Arc::new(GeometryMap::new(geometry).unwrap());
        let regions = RegionMap::new(geometry, RING_BYTES, 0, 64).unwrap();
        Self {
            control: Heap::new(regions.control_bytes()),
            pool: Heap::new(map.pool_bytes() as usize),
            map,
            regions,
            fuse: Fuse::default(),
        }
    }

    /// Memory as the producer writes it.
    pub(crate) fn own(&self, memory: &Heap) -> Own {
        Counting {
            memory: memory.clone(),
            fuse: self.fuse.clone(),
        }
    }

    pub(crate) fn producer(&self) -> Producer<Own, Own> {
        let leases = LeaseTable::new(&self.map);
        Producer::new(self.own(&self.control), self.regions.clone(), leases, PRODUCER)
    }

    pub(crate) fn store(&self) -> HostStore<Own, Own> {
        HostStore::new(
            self.own(&self.control),
            self.own(&self.pool),
            self.map.clone(),
            self.regions.clone(),
        )
    }

    pub(crate) fn rounds(
        &self,
        producer: Producer<Own, Own>,
        store: HostStore<Own, Own>,
        options: WorkloadOptions,
    ) -> Rounds<Own, Own, Own, Trace> {
        let clock = Arc::new(Simulated::default());
        let mut rounds = Rounds::new(producer, store, self.map.clone(), Trace::sample(), options, clock).unwrap();
        rounds.keep_log();
        rounds
    }
}

/// One rank: its worker, what drives its device, and its engine.
pub(crate) struct RankEnd {
    pub(crate) rank: Rank,
    pub(crate) worker: Worker<Heap, Own, HostDevice>,
    pub(crate) stepper: Stepper,
    pub(crate) engine: HostEngine,
    /// With what ends the worker.
    pub(crate) segment: Own,
    pub(crate) epoch: ProcessEpoch,
    now_ns: u64,
    /// Read by the device as long as the worker lives.
    _pool: Heap,
}

impl RankEnd {
    /// A worker that joins `producer`.
    pub(crate) fn join(memory: &Memory, producer: &mut Producer<Own, Own>, rank: Rank, adversary: Adversary) -> Self {
        let map = &memory.map;
        let segment = Counting::new(Heap::new(memory.regions.rank_bytes()));
        // A worker that comes back is another process.
        let epoch = ProcessEpoch(0xB0B0 + u64::from(rank.0) + producer.tail().0 * 64);
        let first = producer.join(rank, segment.clone(), epoch, 100 + rank.0);
        let leases = LeaseTable::new(map);
        let shape = producer.shape();
        let port = Port::new(
            memory.control.clone(),
            segment.clone(),
            shape,
            leases,
            epoch,
            producer.epoch(),
            first,
        );
        port.set_pinned(map.pool_bytes());
        let tables = TableLimits {
            requests_max: 32,
            blocks_max: BLOCKS_MAX,
        };
        let spec = DeviceSpec::allocate(map.device_bytes(), TableStore::new(map, tables).spec());
        let mut device = HostDevice::stepped(spec, adversary).unwrap();
        let ends = [map.pool_bytes()];
        // SAFETY: `_pool` keeps the memory until after the worker and its device are dropped; it is written only by the
        // store, between steps.
        let span = unsafe { HostSpan::new(memory.pool.base(), map.pool_bytes(), Access::ReadOnly) };
        let pool = HostPool::new(device.register_all(span, &ends).unwrap(), &ends);
        let verifier = Verifier::new(Verify::Full, &mut device, 1 << 14).unwrap();
        let (stepper, engine) = (device.stepper(), device.engine());
        let spec = WorkerSpec {
            rank,
            pool,
            write_back: None,
            write_back_slots: (0, 0),
            tables,
            verifier,
            watchdog_ns: 0,
        };
        Self {
            rank,
            worker: Worker::new(port, GeometryMap::clone(map), device, spec),
            stepper,
            engine,
            segment,
            epoch,
            now_ns: 0,
            _pool: memory.pool.clone(),
        }
    }

    /// Id, table and revision r of the one request that has state here.
    pub(crate) fn open_request(&self) -> (Vec<u8>, TableSlot, u64) {
        let mut requests = self.worker.tables().export();
        let request = requests.next().expect("an open request");
        assert!(requests.next().is_none(), "more than one request is open");
        (
            request.request().to_vec(),
            request.slot(),
            request.selection_revision().0,
        )
    }

    /// One step of the worker, without its device.
    pub(crate) fn step_worker(&mut self) -> Step {
        self.now_ns += 1000;
        self.worker.step(self.now_ns).unwrap()
    }

    /// One step of the worker, then of its device.
    pub(crate) fn step(&mut self) -> Step {
        let step = self.step_worker();
        if step != Step::Worked {
            self.stepper.step();
        }
        step
    }

    /// Runs `kernel` on the compute queue, and steps the device until it has run.
    pub(crate) fn compute<T: Send + 'static>(&mut self, kernel: impl Fn(&KernelMemory<'_>) -> T + Send + 'static) -> T {
        let (found, result) = mpsc::channel();
        let launched = self.engine.launch(move |memory: &KernelMemory<'_>| {
            let _ = found.send(kernel(memory));
            KernelState::Finished
        });
        launched.unwrap();
        for _ in 0..STEPS_MAX {
            if let Ok(result) = result.try_recv() {
                return result;
            }
            assert_ne!(self.stepper.step(), host::Step::Idle, "a kernel did not run");
        }
        panic!("a kernel did not run");
    }
}

/// A workload and its ranks.
pub(crate) struct Rig {
    // Dropped first: the devices read the pool.
    pub(crate) ranks: Vec<RankEnd>,
    pub(crate) rounds: Rounds<Own, Own, Own, Trace>,
    pub(crate) observer: Observer,
    pub(crate) memory: Memory,
    pub(crate) log: Vec<RoundRecord>,
    pub(crate) looked: Looked,
    pub(crate) seed: u64,
}

impl Rig {
    pub(crate) fn new(geometry: &Geometry, options: WorkloadOptions, adversary: impl Fn(Rank) -> Adversary) -> Self {
        let memory = Memory::new(geometry);
        let mut producer = memory.producer();
        let join = |rank| RankEnd::join(&memory, &mut producer, rank, adversary(rank));
        let ranks = (0..geometry.ranks).map(Rank).map(join).collect();
        let observer = Observer::new(&memory, &producer);
        let rounds = memory.rounds(producer, memory.store(), options);
        Self {
            ranks,
            rounds,
            observer,
            memory,
            log: Vec::new(),
            looked: Looked::default(),
            seed: options.seed,
        }
    }

    /// A rig whose devices are late, torn and interleaved, by the workload's seed.
    pub(crate) fn late(geometry: &Geometry, options: WorkloadOptions) -> Self {
        let seed = options.seed;
        Self::new(geometry, options, |rank| Adversary::late(seed << 8 | u64::from(rank.0)))
    }

    /// One step of the producer, whose records the observer sees before any rank.
    pub(crate) fn step_rounds(&mut self) {
        self.rounds
            .step()
            .unwrap_or_else(|error| panic!("seed {}: {error}", self.seed));
        self.observer.look();
        self.log.extend(self.rounds.take_log());
    }

    /// One step of everything; what attention finds is looked at wherever a rank's tables changed.
    pub(crate) fn step(&mut self) {
        self.step_rounds();
        for rank in 0..self.ranks.len() {
            self.step_rank(rank);
        }
    }

    /// One step of one rank.
    pub(crate) fn step_rank(&mut self, rank: usize) -> Step {
        let step = self.ranks[rank].step();
        self.looked
            .look(&mut self.ranks[rank], &self.observer, &self.memory.map);
        step
    }

    /// Steps everything until `until`.
    pub(crate) fn step_until(&mut self, what: &str, mut until: impl FnMut(&mut Self) -> bool) {
        for _ in 0..STEPS_MAX {
            if until(self) {
                return;
            }
            self.step();
        }
        panic!("seed {}: no end of waiting for {what}", self.seed);
    }

    /// Steps everything, and stops between the publication of the record that `published` waits for and the ranks.
    pub(crate) fn publish_until(&mut self, what: &str, published: impl Fn(&Self) -> bool) {
        for _ in 0..STEPS_MAX {
            self.step_rounds();
            if published(self) {
                return;
            }
            for rank in 0..self.ranks.len() {
                self.step_rank(rank);
            }
        }
        panic!("seed {}: no end of waiting for {what}", self.seed);
    }

    /// Records of a kind that were published so far.
    pub(crate) fn published(&self, kind: Kind) -> u64 {
        self.observer.kinds.get(&kind).copied().unwrap_or(0)
    }

    /// What attention on a rank finds for the one request that is open.
    pub(crate) fn find(&mut self, rank: usize) -> Vec<Found> {
        let (end, map) = (&mut self.ranks[rank], self.memory.map.clone());
        let (slot, number) = (end.open_request().1, end.rank);
        end.compute(move |memory| find(memory, &map, number, slot))
    }

    /// Bytes that a rank's attention finds and that are not those of the table that its request stands at.
    pub(crate) fn differing(&mut self, rank: usize) -> Option<u64> {
        let found = self.find(rank);
        let end = &self.ranks[rank];
        let (request, _, r) = end.open_request();
        let tables = self.observer.tables_from(&request, r);
        differing(&self.memory.map, end.rank, &found, &tables[0])
    }

    /// Plays to the end: everything is free then, and every byte that attention found was right (F12).
    pub(crate) fn finish(&mut self) {
        self.step_until("the end of the workload", |rig| rig.rounds.is_over());
        let seed = self.seed;
        assert_eq!(self.rounds.leaked_blocks(), 0, "seed {seed}: blocks are left");
        for rank in &self.ranks {
            let counts = rank.worker.counts();
            assert_eq!(rank.worker.tables().export().count(), 0, "seed {seed}: tables are left");
            assert_eq!(rank.worker.open_operations(), 0, "seed {seed}");
            assert_eq!(
                (counts.mismatched_bytes, counts.rejected),
                (0, 0),
                "seed {seed}: {counts:?}"
            );
        }
        // A worker that came last may have had nothing to do.
        let verified = |rank: &RankEnd| rank.worker.counts().verified_bytes > 0;
        assert!(self.ranks.iter().any(verified), "seed {seed}: nothing was verified");
        self.looked.check(seed);
    }
}

/// Few requests of the built-in trace.
pub(crate) fn few(seed: u64, requests: u64) -> WorkloadOptions {
    WorkloadOptions {
        seed,
        requests: Some(requests),
        ..WorkloadOptions::default()
    }
}

/// True where `body` panics.
pub(crate) fn is_red(body: impl FnOnce()) -> bool {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(body)).is_err()
}

/// True where `body` panics with a planted fault, which is how a test shows that it can.
pub(crate) fn goes_red(fault: &'static str, body: impl FnOnce()) -> bool {
    is_red(|| with_planted(fault, body))
}
