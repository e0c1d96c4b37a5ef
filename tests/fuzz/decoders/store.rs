//! The block directory and the pool that a dead producer left: `HostStore::recover`.
//!
//! Whatever they say, a block that is handed out lies in a frame of its own that is neither null nor gather, and has the
//! bytes of its tag, unless the directory vouches for others with their own checksum.

use std::cell::RefCell;
use std::sync::Arc;

use kvsluice_cpu_worker::store::{BlockTag, HostStore};
use kvsluice_layout::geometry::{Attention, Dtype, Geometry, GroupSpec, KvKind, LayerSpec, PoolOrder, Sharding};
use kvsluice_layout::ids::{DecoderLayer, GroupId, Rank, SourceBlock};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::planes::{GeometryMap, Plane};
use kvsluice_layout::region::{DIRECTORY_ENTRY_BYTES, MIN_RING_BYTES, RegionMap};
use kvsluice_transport::shared::{Heap, Shared, SharedMut};

use super::input::Input;
use super::memory::{Change, Shifting};

const FRAMES: u32 = 8;
const GATHER: u32 = 2;
const NULL: SourceBlock = SourceBlock(3);
const GROUP: GroupId = GroupId(0);
const BLOCK_BYTES: usize = 32;

struct Pool {
    map: Arc<GeometryMap>,
    regions: RegionMap,
    control: Heap,
    pool: Heap,
    plane: Plane,
    leases: LeaseTable,
    directory: usize,
}

thread_local! {
    static POOL: RefCell<Pool> = RefCell::new(Pool::new());
}

impl Pool {
    fn new() -> Self {
        let geometry = Geometry {
            model: "fuzz".to_owned(),
            dtype: Dtype::Fp8,
            ranks: 1,
            groups: vec![GroupSpec {
                block_tokens: 1,
                attention: Attention::Full,
                source_blocks: FRAMES,
                gather_blocks: GATHER,
                device_blocks: 4,
                source_null: Some(NULL),
                device_null: None,
                host_order: PoolOrder::LayerFirst,
                device_order: PoolOrder::LayerFirst,
            }],
            layers: vec![LayerSpec {
                group: GROUP,
                kv: KvKind::Latent {
                    width: BLOCK_BYTES as u32,
                },
                sharding: Sharding::Replicated,
                alias_of: None,
            }],
        };
        let map = GeometryMap::new(&geometry).expect("a valid geometry");
        let regions = RegionMap::new(&geometry, MIN_RING_BYTES, 0, 64).expect("sizes");
        Self {
            control: Heap::new(regions.control_bytes()),
            pool: Heap::new(map.pool_bytes() as usize),
            plane: map.planes(Rank(0), DecoderLayer(0))[0],
            leases: LeaseTable::new(&map),
            directory: regions.directory_at(GROUP, SourceBlock(0)).expect("a group"),
            map: Arc::new(map),
            regions,
        }
    }

    fn bytes_of(&self, block: SourceBlock) -> [u8; BLOCK_BYTES] {
        let mut bytes = [0; BLOCK_BYTES];
        self.pool.bytes_out(self.plane.host_at(block) as usize, &mut bytes);
        bytes
    }
}

pub fn store(data: &[u8]) {
    POOL.with_borrow(|state| {
        let mut input = Input(data);
        let end = state.directory + FRAMES as usize * DIRECTORY_ENTRY_BYTES;
        let changes = Change::read(&mut input, std::slice::from_ref(&(state.directory..end)));
        for frame in 0..FRAMES {
            let (how, owner) = (input.byte(), u64::from(input.byte() % 16));
            let bytes = [input.byte(); BLOCK_BYTES];
            state
                .pool
                .bytes_in(state.plane.host_at(SourceBlock(frame)) as usize, &bytes);
            let own = xxhash_rust::xxh3::xxh3_64(&bytes);
            let sum = if how & 2 == 0 { own } else { input.word() };
            let entry = [input.word() << 1 | u64::from(how & 1), owner, sum, 0];
            let at = state.directory + frame as usize * DIRECTORY_ENTRY_BYTES;
            state.control.copy_in(at, &entry);
        }
        let steady = changes.is_empty();
        let control = Shifting::new(&state.control, changes);
        let mut store = HostStore::recover(control, state.pool.clone(), state.map.clone(), state.regions.clone());
        store.begin_record();
        let mut handed: Vec<(BlockTag, SourceBlock, [u8; BLOCK_BYTES])> = Vec::new();
        while !input.is_over() && handed.len() < 16 {
            let tag = BlockTag(u64::from(input.byte() % 16));
            let before = store.counts();
            let Ok(block) = store.ensure(GROUP, tag, &state.leases) else {
                break;
            };
            assert!(block.0 < FRAMES - GATHER && block != NULL, "{block} was handed out");
            let counts = store.counts();
            assert_eq!(counts.fills + counts.hits, before.fills + before.hits + 1);
            let bytes = state.bytes_of(block);
            if steady {
                // X25a: what is handed out is what the directory says.
                let at = state.directory + block.index() * DIRECTORY_ENTRY_BYTES;
                assert_eq!(state.control.load(at + 8), tag.0);
                assert_eq!(state.control.load(at + 16), xxhash_rust::xxh3::xxh3_64(&bytes));
            }
            for (other, at, was) in &handed {
                // R33: equal tags are one block; what this record has is not pushed out by it.
                assert_eq!(*other == tag, *at == block, "{other:?} at {at}, {tag:?} at {block}");
                assert!(*at != block || *was == bytes);
            }
            handed.push((tag, block, bytes));
        }
        let mut gathered = Vec::new();
        if store.take_gather(GROUP, GATHER, &state.leases, &mut gathered).is_ok() {
            assert!(
                gathered
                    .iter()
                    .all(|block| block.0 >= FRAMES - GATHER && block.0 < FRAMES)
            );
        }
        assert!(store.held_blocks() <= u64::from(FRAMES - GATHER));
    });
}
