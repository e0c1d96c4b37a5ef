//! A producer that writes whatever it can, before a worker process as it runs in production.

use std::path::Path;
use std::time::{Duration, Instant};

use kvsluice_layout::capability::{Capability, SelectionUnit, SourceKinds};
use kvsluice_layout::ids::{
    ChannelId, Incarnation, MapRevision, OperationId, PoolGeneration, Position, ProcessEpoch, Rank, RequestEpoch,
    SelectionRevision,
};
use kvsluice_layout::plan::{Operation, PlanDraft, encode_padding, seal};
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::record::{LINE_WORDS, Pair, RetainMode};
use kvsluice_layout::region::{BROKEN_AT, CONSUMED_AT, PRODUCER_WAKE_AT, RegionMap, WORKER_SLEEPING_AT, layout_hash};
use kvsluice_layout::segment::SegmentKind;
use kvsluice_transport::attach::{Admission, Admitted, Arrival, Hello, Limits, Mismatch, PROTOCOL, Reception, Welcome};
use kvsluice_transport::clock::{Clock, Monotonic};
use kvsluice_transport::link::{Listener, Peer};
use kvsluice_transport::lock::RoleLock;
use kvsluice_transport::members::{Member, write_member};
use kvsluice_transport::names::{ChannelName, Role};
use kvsluice_transport::peers::Peers;
use kvsluice_transport::ring::RingShape;
use kvsluice_transport::runtime_dir::RuntimeDir;
use kvsluice_transport::segment::{
    Created, Mapping, MappingMut, Memfd, Mode, NewSegment, Reserve, create, reopen_read_only,
};
use kvsluice_transport::shared::{Shared, SharedMut};
use kvsluice_transport::wait::{Futexes, wake_sleepers};

use crate::second::{Second, part, seed};
use crate::worker::{CHANNEL, geometry, honest};

const EPOCH: ProcessEpoch = ProcessEpoch(11);
const RING_BYTES: usize = 1 << 17;
/// Records of one lawful life.
const RECORDS: u64 = 3000;
/// Lives that end with a broken ring.
const LIVES: u64 = 5;
const HANG: Duration = Duration::from_secs(60);

/// Lets the worker in, with segments of the sizes that it derives itself.
struct Host {
    map: RegionMap,
    control: Created,
    pool: Created,
    rank: Option<Mapping>,
}

impl Host {
    fn new(geometry: &GeometryMap) -> Self {
        let slot_bytes = geometry.writeback_slot_bytes() as usize;
        let map = RegionMap::new(geometry.geometry(), RING_BYTES, 0, slot_bytes).expect("regions");
        let made = |kind, bytes| {
            let created = segment(kind, bytes);
            created.make_ready();
            created
        };
        Self {
            control: made(SegmentKind::Control, map.control_bytes()),
            pool: made(SegmentKind::Pool, geometry.pool_bytes() as usize),
            map,
            rank: None,
        }
    }
}

fn segment(kind: SegmentKind, bytes: usize) -> Created {
    let segment = NewSegment {
        kind,
        bytes,
        layout_hash: layout_hash(),
        channel: ChannelId(1),
        creator_epoch: EPOCH,
    };
    create(&Memfd { hardened: false }, &segment, &Reserve::default()).expect("segment")
}

impl Admission for Host {
    fn admit(&mut self, hello: &Hello, _: &Peer) -> Result<Admitted, Mismatch> {
        let kinds = SourceKinds {
            source_only: true,
            copy: false,
        };
        let capability = Capability::of(&geometry(), SelectionUnit::Block, kinds, EPOCH);
        let welcome = Welcome {
            protocol: PROTOCOL,
            channel: ChannelId(1),
            incarnation: Incarnation(1),
            producer_epoch: EPOCH,
            ranks: 2,
            ring_lines: RING_BYTES as u64 / 64,
            writeback_bytes: 0,
            mode: Mode::Memfd,
            pool_generation: PoolGeneration(1),
            capability: serde_json::to_value(capability).expect("capability"),
        };
        let rank = segment(SegmentKind::Rank(hello.rank), self.map.rank_bytes());
        rank.make_ready();
        let (descriptor, reader) = rank.hand_over().expect("rank");
        self.rank = Some(reader);
        Ok(Admitted {
            welcome,
            control: reopen_read_only(&self.control.descriptor).expect("control"),
            pool: reopen_read_only(&self.pool.descriptor).expect("pool"),
            rank: descriptor,
        })
    }
}

/// A worker process that has attached to this hostile producer, and the ring as the producer writes it.
struct Victim {
    process: Second,
    control: MappingMut,
    pool: MappingMut,
    rank: Mapping,
    shape: RingShape,
    tail: u64,
    // Its end would make the producer suspect.
    _arrival: Arrival,
}

impl Victim {
    fn attach(reception: &mut Reception, host: &mut Host, folder: &str, first: u64) -> Self {
        let mut process = Second::start(&format!("honest {folder} 0"), None);
        let clock = Monotonic::default();
        let arrival = loop {
            let arrivals = reception.poll(clock.now_ns(), host).expect("reception");
            if let Some(arrival) = arrivals.into_iter().next() {
                break arrival;
            }
            std::thread::sleep(Duration::from_millis(1));
        };
        let Arrival::Attached(newcomer) = &arrival else {
            panic!("{arrival:?}")
        };
        let member = Member {
            epoch: newcomer.hello.worker_epoch,
            first: Position(first),
        };
        let control = host.control.memory.clone();
        let shape = RingShape {
            at: host.map.ring_at(),
            bytes: RING_BYTES,
        };
        control.store(shape.at + shape.offset(first), 0);
        write_member(&control, &host.map, Rank(0), member);
        assert_eq!(process.hear(), "ready");
        Self {
            process,
            control,
            pool: host.pool.memory.clone(),
            rank: host.rank.take().expect("admitted"),
            shape,
            tail: first,
            _arrival: arrival,
        }
    }

    fn wake(&self) {
        wake_sleepers(
            &Futexes,
            &self.control,
            PRODUCER_WAKE_AT,
            [(&self.rank, WORKER_SLEEPING_AT)],
        );
    }

    /// True where the worker has read all but the last quarter of the ring.
    fn has_room(&self) -> bool {
        self.rank.load(CONSUMED_AT) + RING_BYTES as u64 / 4 >= self.tail
    }

    fn make_room(&self) {
        let began = Instant::now();
        while !self.has_room() {
            assert!(
                began.elapsed() < HANG,
                "the worker hangs at {}",
                self.rank.load(CONSUMED_AT)
            );
            self.wake();
            std::thread::yield_now();
        }
    }

    /// Commits a record whose framing is right, whatever it says.
    fn commit(&mut self, record: &[u64], bytes: u64) {
        let at = self.shape.at + self.shape.offset(self.tail);
        self.control.copy_in(at + 8, &record[1..]);
        let next = self.tail + bytes;
        self.control.store(self.shape.at + self.shape.offset(next), 0);
        self.control.store_release(at, self.tail + 1);
        self.tail = next;
        self.wake();
    }

    fn publish(&mut self, draft: &PlanDraft, spoil: impl FnOnce(&mut [u64])) {
        self.make_room();
        let bytes = draft.encoded_bytes().expect("a length") as u64;
        let to_end = (RING_BYTES - self.shape.offset(self.tail)) as u64;
        if to_end < bytes {
            let mut line = [0; LINE_WORDS];
            encode_padding(EPOCH, Position(self.tail), to_end as u32, &mut line);
            self.commit(&line, to_end);
        }
        let mut record = vec![0; bytes as usize / 8];
        draft.encode(EPOCH, Position(self.tail), &mut record).expect("encoded");
        spoil(&mut record);
        seal(&mut record);
        self.commit(&record, bytes);
    }
}

/// A plan of any kind, whose ids may or may not be any.
fn draft(random: &mut fastrand::Rng, id: u64) -> PlanDraft {
    let mut draft = PlanDraft::new();
    let operation = Operation {
        request_epoch: RequestEpoch(random.u64(1..3)),
        operation_id: OperationId(id),
        pool_generation: PoolGeneration(1),
        map_revision: MapRevision(random.u64(..4)),
        selection_revision: SelectionRevision(random.u64(..4)),
    };
    let request = [b"a".as_slice(), b"b", b""][random.usize(..3)];
    match random.u32(..10) {
        0 => draft.keep(request, operation),
        1 => draft.write_back(request, operation, random.u64(..) >> random.u32(..64)),
        2 => draft.abort(request, operation, Position(random.u64(..) >> random.u32(..64))),
        3 => draft.reset(PoolGeneration(1)),
        4..6 => {
            let modes = [RetainMode::SharedTable, RetainMode::LayerTables, RetainMode::ByteMove];
            draft.retain(request, operation, modes[random.usize(..3)])
        }
        _ => draft.upload(request, operation),
    };
    let any = |random: &mut fastrand::Rng| {
        let choices = [
            random.u32(..90),
            random.u32(..90),
            random.u32(..200),
            u32::MAX,
            random.u32(..),
        ];
        choices[[0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4][random.usize(..13)]]
    };
    for row in 0..random.u32(..4) {
        let pairs: Vec<_> = (0..random.usize(..6))
            .map(|_| Pair {
                source: any(random),
                destination: any(random),
            })
            .collect();
        let layer = if random.u32(..8) == 0 { random.u32(..) } else { row };
        draft.raw_row(layer, random.u32(..8) / 7, random.u16(..4), random.u32(..64), pairs);
    }
    if random.u32(..20) == 0 {
        draft.must_understand(random.u32(..));
    }
    draft
}

fn reception(folder: &Path) -> (RoleLock, Reception) {
    let runtime = RuntimeDir::open(folder, &Peers::default()).expect("runtime folder");
    let dir = runtime
        .channel(&ChannelName::new(CHANNEL).expect("name"))
        .expect("channel");
    let lock = RoleLock::acquire(&dir, Role::Producer, EPOCH, Duration::ZERO).expect("lock");
    let listener = Listener::bind(&lock).expect("socket");
    let reception = Reception::new(listener, layout_hash(), 2, Limits::default()).expect("reception");
    (lock, reception)
}

#[test]
fn x33_a_producer_with_arbitrary_plans_gets_an_answer_to_each_and_the_worker_lives_on() {
    if let Some([_, folder, rank]) = part().as_deref() {
        return honest(folder, rank.parse().expect("a rank"));
    }
    let seed = seed(0x34);
    let mut random = fastrand::Rng::with_seed(seed);
    let temp = tempfile::tempdir().expect("folder");
    let folder = temp.path().to_str().expect("a path");
    let (_lock, mut reception) = reception(temp.path());
    let mut host = Host::new(&GeometryMap::new(&geometry()).expect("geometry"));
    let mut victim = Victim::attach(&mut reception, &mut host, folder, 0);
    let mut reset = PlanDraft::new();
    victim.publish(reset.reset(PoolGeneration(1)), |_| {});
    for id in 0..RECORDS {
        let draft = draft(&mut random, id);
        let spoiled = random.u32(..3);
        victim.publish(&draft, |record| {
            for _ in 0..spoiled {
                // Not the epoch: a stranger's record waits for a handshake.
                let at = [2, random.usize(5..16), random.usize(..record.len())][random.usize(..3)];
                match at {
                    0 | 1 | 4 => {}
                    // Kind and version, not the length.
                    2 => record[2] ^= 1 << random.u32(32..64),
                    _ => record[at] = [random.u64(..), random.u64(..) >> 32, record[at] ^ 1][random.usize(..3)],
                }
            }
        });
        // What the worker may be reading just now, but for the framing.
        let begin = victim.rank.load(CONSUMED_AT).max(victim.tail.saturating_sub(1024));
        if begin + 128 < victim.tail && random.bool() {
            let at = random.u64(begin + 64..victim.tail) & !7;
            // The first lines of records, with their lengths, are left alone: see the other test.
            let (line, ring) = (at & !63, victim.shape);
            let begins_record = victim.control.load(ring.at + ring.offset(line)) == line + 1;
            if !begins_record && at != line {
                victim.control.store(ring.at + ring.offset(at), random.u64(..));
            }
        }
        for _ in 0..16 {
            let at = random.usize(..victim.pool.size() / 8) * 8;
            victim.pool.store(at, random.u64(..));
        }
    }
    let end = victim.tail;
    let began = Instant::now();
    while victim.rank.load(CONSUMED_AT) != end {
        let said = victim.process.overhear();
        assert!(
            said.is_none() && began.elapsed() < HANG,
            "seed {seed}: stopped before {end}: {said:?}"
        );
        victim.wake();
        std::thread::yield_now();
    }
    victim.process.tell("stop");
    let said = victim.process.hear();
    assert!(!said.contains("but"), "seed {seed}: {said}");
}

#[test]
fn x9_x33_a_producer_that_scribbles_over_the_ring_ends_the_worker_in_order_or_not_at_all() {
    if let Some([_, folder, rank]) = part().as_deref() {
        return honest(folder, rank.parse().expect("a rank"));
    }
    let seed = seed(0x35);
    let mut random = fastrand::Rng::with_seed(seed);
    let temp = tempfile::tempdir().expect("folder");
    let folder = temp.path().to_str().expect("a path");
    let (_lock, mut reception) = reception(temp.path());
    let mut broken = 0;
    for life in 0..LIVES {
        let mut host = Host::new(&GeometryMap::new(&geometry()).expect("geometry"));
        let first = random.u64(..1 << 40) & !63;
        let mut victim = Victim::attach(&mut reception, &mut host, folder, first);
        let mut reset = PlanDraft::new();
        victim.publish(reset.reset(PoolGeneration(1)), |_| {});
        let mut said = None;
        for id in 0..200 {
            victim.publish(&draft(&mut random, id), |_| {});
            for _ in 0..random.usize(..8) {
                // Where the worker reads, or anywhere, header and all.
                let near = victim.shape.at + victim.shape.offset(victim.tail.saturating_sub(random.u64(..512)) & !7);
                let anywhere = random.usize(..victim.control.size() / 8) * 8;
                let at = if random.bool() { near } else { anywhere };
                let word = [random.u64(..), random.u64(..) >> 32, victim.tail + 1, u64::MAX][random.usize(..4)];
                victim.control.store(at, word);
            }
            victim.wake();
            said = victim.process.overhear();
            // A 0 in the place of a commit word is no record to come: the worker waits, and still listens.
            if said.is_some() || !victim.has_room() || victim.rank.load(BROKEN_AT) != 0 {
                break;
            }
        }
        victim.process.tell("stop");
        let said = said.unwrap_or_else(|| victim.process.hear());
        let in_order = !said.contains("but") || said.contains("but broken record at");
        assert!(in_order, "seed {seed}, life {life}: {said}");
        broken += u64::from(said.contains("broken record at"));
    }
    assert!(broken > 0, "seed {seed}: no worker noticed");
}
