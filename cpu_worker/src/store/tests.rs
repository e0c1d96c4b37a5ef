//! The store on a heap, small enough to watch every frame.

use std::cell::Cell;
use std::rc::Rc;

use kvsluice_layout::geometry::PoolOrder;
use kvsluice_layout::ids::{DestinationBlock, PoolGeneration};
use kvsluice_layout::plan::{Operation, PlanDraft};
use kvsluice_layout::planted::with_planted;
use kvsluice_layout::presets::{Sizing, preset};
use kvsluice_layout::record::SourceKind;
use kvsluice_layout::region::MIN_RING_BYTES;
use kvsluice_transport::shared::{Heap, Shared};

use super::*;

const GROUP: GroupId = GroupId(0);

struct Bench<M> {
    control: M,
    pool: M,
    map: Arc<GeometryMap>,
    region: RegionMap,
    leases: LeaseTable,
}

fn bench(frames: u32, gather: u32) -> Bench<Heap> {
    let sizing = Sizing {
        source_blocks: Some(frames),
        gather_blocks: Some(gather),
        ..Sizing::default()
    };
    bench_of(sizing.apply(preset("sample").unwrap()).unwrap())
}

fn bench_of(geometry: kvsluice_layout::geometry::Geometry) -> Bench<Heap> {
    let map = Arc::new(GeometryMap::new(&geometry).unwrap());
    let region = RegionMap::new(map.geometry(), MIN_RING_BYTES, 0, 64).unwrap();
    Bench {
        control: Heap::new(region.control_bytes()),
        pool: Heap::new(map.pool_bytes() as usize),
        leases: LeaseTable::new(&map),
        map,
        region,
    }
}

impl<M: SharedMut + Clone> Bench<M> {
    fn store(&self) -> HostStore<M, M> {
        HostStore::new(
            self.control.clone(),
            self.pool.clone(),
            self.map.clone(),
            self.region.clone(),
        )
    }

    fn recover(&self) -> HostStore<M, M> {
        HostStore::recover(
            self.control.clone(),
            self.pool.clone(),
            self.map.clone(),
            self.region.clone(),
        )
    }

    /// Bytes of a frame that are not those of `tag`, over all layers and shards.
    fn mismatches(&self, group: GroupId, block: SourceBlock, tag: u64) -> u64 {
        let layers = (0..)
            .zip(&self.map.geometry().layers)
            .filter(|(_, layer)| layer.group == group);
        let mut wrong = 0;
        for (number, _) in layers {
            let layer = DecoderLayer(number);
            let of = self.map.layer(layer).unwrap();
            let planes = self.map.shard_planes(layer);
            let per_shard = planes.len() as u32 / of.shards;
            for (at, plane) in (0..).zip(planes) {
                let mut bytes = vec![0; plane.bytes as usize];
                self.pool.bytes_out(plane.host_at(block) as usize, &mut bytes);
                let seed = content::seed(tag, of.tensor, at / per_shard, at % per_shard);
                wrong += content::mismatches(seed, &bytes);
            }
        }
        wrong
    }
}

fn lease(leases: &mut LeaseTable, block: SourceBlock) {
    let mut draft = PlanDraft::new();
    let operation = Operation {
        pool_generation: PoolGeneration(1),
        ..Operation::default()
    };
    let pair = [(block, DestinationBlock(1))];
    draft
        .upload(b"r", operation)
        .row(DecoderLayer(0), GROUP, SourceKind::SourceOnly, pair);
    leases.take(&draft.lease_rows());
}

#[test]
fn x8_a_filled_block_holds_every_layer_and_shard_of_its_tag_in_every_group() {
    let bench = bench_of(preset("sample-hybrid").unwrap());
    let mut store = bench.store();
    for group in (0..4).map(GroupId) {
        for tag in [5, 6] {
            let block = store.ensure(group, BlockTag(tag), &bench.leases).unwrap();
            let spec = bench.map.geometry().group(group).unwrap();
            assert!(block < spec.gather_start() && Some(block) != spec.source_null);
            assert_eq!(bench.mismatches(group, block, tag), 0);
            assert_ne!(bench.mismatches(group, block, tag + 1), 0);
        }
    }
}

#[test]
fn x14_a_leased_frame_is_not_filled_again_however_old_it_is() {
    let run = || {
        let mut bench = bench(3, 0);
        let mut store = bench.store();
        let leased = store.ensure(GROUP, BlockTag(100), &bench.leases).unwrap();
        lease(&mut bench.leases, leased);
        for tag in 101..110 {
            store.begin_record();
            store.ensure(GROUP, BlockTag(tag), &bench.leases).unwrap();
        }
        bench.mismatches(GROUP, leased, 100)
    };
    assert_eq!(run(), 0);
    assert_ne!(
        with_planted("r26_early_release", run),
        0,
        "the planted fault is not seen"
    );
}

#[test]
fn x17_blocks_of_one_record_stay_and_a_pool_that_is_too_small_says_so() {
    let bench = bench(3, 0);
    let mut store = bench.store();
    for tag in 0..3 {
        store.ensure(GROUP, BlockTag(tag), &bench.leases).unwrap();
    }
    let refused = store.ensure(GROUP, BlockTag(3), &bench.leases).unwrap_err();
    assert_eq!(
        refused,
        StoreError::NoFrame {
            group: GROUP,
            frames: 3,
            leased: 0
        }
    );
    assert!(
        refused.to_string().contains("no frame of 3 is free, 0 are leased"),
        "{refused}"
    );
    store.begin_record();
    store.ensure(GROUP, BlockTag(3), &bench.leases).unwrap();
    assert_eq!(
        store.counts(),
        StoreCounts {
            fills: 4,
            evictions: 1,
            ..StoreCounts::default()
        }
    );
    store.ensure(GROUP, BlockTag(1), &bench.leases).unwrap();
    assert_eq!(
        store.counts().hits,
        1,
        "the least recently used block made room, not this one"
    );
}

#[test]
fn r2_gathering_copies_one_layers_bytes_and_counts_them_apart_from_the_frames_it_takes() {
    let mut bench = bench(6, 2);
    let mut store = bench.store();
    let from = store.ensure(GROUP, BlockTag(9), &bench.leases).unwrap();
    let mut frames = Vec::new();
    store.take_gather(GROUP, 2, &bench.leases, &mut frames).unwrap();
    assert_eq!(frames, [SourceBlock(4), SourceBlock(5)]);
    let layers = (0..4).map(DecoderLayer);
    let copied: u64 = layers.map(|layer| store.gather(layer, from, SourceBlock(5))).sum();
    assert_eq!(bench.mismatches(GROUP, SourceBlock(5), 9), 0);
    let block = bench.map.block_bytes(GROUP);
    assert_eq!(
        (copied, store.counts().gather_bytes, store.counts().gather_frame_bytes),
        (block, block, 2 * block)
    );

    lease(&mut bench.leases, SourceBlock(4));
    let refused = store.take_gather(GROUP, 2, &bench.leases, &mut frames).unwrap_err();
    assert_eq!(
        refused,
        StoreError::NoGather {
            group: GROUP,
            wanted: 2,
            free: 1,
            frames: 2
        }
    );
    assert_eq!(frames.len(), 2);
}

#[test]
fn x31_frames_that_a_rank_has_not_registered_are_not_used() {
    for order in [PoolOrder::LayerFirst, PoolOrder::BlockFirst] {
        let mut geometry = preset("sample").unwrap();
        geometry.groups[0].host_order = order;
        let mut bench = bench_of(geometry);
        let mut store = bench.store();
        // The last byte of block 1 decides: in layer order that is in the last plane.
        let planes = (0..4).flat_map(|layer| bench.map.shard_planes(DecoderLayer(layer)));
        let end = planes
            .map(|plane| plane.host_at(SourceBlock(1)) + plane.bytes)
            .max()
            .unwrap();
        for (pinned, frames) in [(end, 2), (end - 1, 1), (bench.map.pool_bytes(), 256), (0, 0)] {
            store.set_pinned(pinned, &mut bench.leases);
            for tag in 0..6 {
                store.begin_record();
                let found = store.ensure(GROUP, BlockTag(1000 + tag), &bench.leases);
                assert_eq!(found.is_ok(), frames > 0);
                assert!(
                    found.is_err() || found.unwrap().get() < frames || frames < 256,
                    "{order:?} {pinned}"
                );
            }
        }
    }
}

#[test]
fn x25_a_new_producer_finds_the_pool_warm() {
    let bench = bench(4, 0);
    let mut store = bench.store();
    let blocks: Vec<_> = (20..24)
        .map(|tag| store.ensure(GROUP, BlockTag(tag), &bench.leases).unwrap())
        .collect();
    let mut store = bench.recover();
    for (tag, block) in (20..24).zip(blocks) {
        assert_eq!(store.ensure(GROUP, BlockTag(tag), &bench.leases), Ok(block));
        assert_eq!(store.ensure(GROUP, BlockTag(tag), &bench.leases), Ok(block));
    }
    assert_eq!(
        store.counts(),
        StoreCounts {
            hits: 8,
            warm: 4,
            ..StoreCounts::default()
        },
        "compared once each"
    );
}

#[test]
fn x25a_damaged_bytes_are_found_before_the_first_lease() {
    let run = || {
        let bench = bench(4, 0);
        let block = bench.store().ensure(GROUP, BlockTag(20), &bench.leases).unwrap();
        let at = bench.map.shard_planes(DecoderLayer(2))[1].host_at(block) as usize;
        bench.pool.store(at, !bench.pool.load(at));
        let mut store = bench.recover();
        store.begin_record();
        let block = store.ensure(GROUP, BlockTag(20), &bench.leases).unwrap();
        (bench.mismatches(GROUP, block, 20), store.counts().damaged)
    };
    assert_eq!(run(), (0, 1));
    assert_ne!(
        with_planted("x25a_checksum_unread", run),
        (0, 1),
        "the planted fault is not seen"
    );
}

/// Memory of a process that dies: nothing is stored any more once `left` stores were made. Bytes count per chunk.
#[derive(Clone)]
struct Dying {
    heap: Heap,
    left: Rc<Cell<u64>>,
}

impl Dying {
    fn lives(&self) -> bool {
        let left = self.left.get();
        self.left.set(left.saturating_sub(1));
        left > 0
    }
}

impl Shared for Dying {
    fn size(&self) -> usize {
        self.heap.size()
    }
    fn load(&self, at: usize) -> u64 {
        self.heap.load(at)
    }
    fn load_u32(&self, at: usize) -> u32 {
        self.heap.load_u32(at)
    }
    fn bytes_out(&self, at: usize, into: &mut [u8]) {
        self.heap.bytes_out(at, into);
    }
}

impl SharedMut for Dying {
    fn store(&self, at: usize, word: u64) {
        if self.lives() {
            self.heap.store(at, word);
        }
    }
    fn store_release(&self, at: usize, word: u64) {
        if self.lives() {
            self.heap.store_release(at, word);
        }
    }
    fn store_u32(&self, at: usize, word: u32) {
        if self.lives() {
            self.heap.store_u32(at, word);
        }
    }
    fn bytes_in(&self, at: usize, bytes: &[u8]) {
        for (index, chunk) in bytes.chunks(512).enumerate() {
            if self.lives() {
                self.heap.bytes_in(at + index * 512, chunk);
            }
        }
    }
}

#[test]
fn x25a_a_refill_that_dies_at_any_store_leaves_no_valid_entry_with_other_bytes() {
    let run = || {
        let mut wrong = 0;
        for left in 0.. {
            let Bench {
                control,
                pool,
                map,
                region,
                leases,
            } = bench(1, 0);
            let left = Rc::new(Cell::new(left));
            let dying = |heap: Heap| Dying {
                heap,
                left: left.clone(),
            };
            let bench = Bench {
                control: dying(control),
                pool: dying(pool),
                map,
                region,
                leases,
            };
            let mut store = bench.store();
            for tag in [30, 31] {
                store.begin_record();
                store.ensure(GROUP, BlockTag(tag), &bench.leases).unwrap();
            }
            if left.get() > 0 {
                break; // it lived to the end
            }
            left.set(u64::MAX);
            let recovered = bench.recover();
            let entry = recovered.groups[0].frames[0].entry;
            wrong += u64::from(entry.valid && bench.mismatches(GROUP, SourceBlock(0), entry.owner) > 0);
        }
        wrong
    };
    assert_eq!(run(), 0);
    assert_ne!(
        with_planted("x25a_valid_first", run),
        0,
        "the planted fault is not seen"
    );
}
