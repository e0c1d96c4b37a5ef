//! What attention finds: a kernel that walks a device's own tables and reads the blocks that they name.

use std::collections::HashMap;

use kvsluice_gpu_worker::device::TableSlot;
use kvsluice_gpu_worker::device::host::{KernelMemory, TableView};
use kvsluice_gpu_worker::tables::ROW_HEADER_WORDS;
use kvsluice_layout::content;
use kvsluice_layout::ids::{DecoderLayer, DestinationBlock, Rank};
use kvsluice_layout::planes::GeometryMap;

use crate::observer::{Observer, Tags};
use crate::rig::{BLOCKS_MAX, RankEnd};

/// Words of one layer's row in a table image.
const ROW_WORDS: u32 = ROW_HEADER_WORDS + BLOCKS_MAX;

/// One layer through the table: valid tokens, physical blocks, and their bytes, plane by plane.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Found {
    pub(crate) valid_tokens: u32,
    pub(crate) blocks: Vec<u32>,
    pub(crate) bytes: Vec<Vec<Vec<u8>>>,
}

/// Every layer of the request whose table is in `slot`.
pub(crate) fn find(memory: &KernelMemory<'_>, map: &GeometryMap, rank: Rank, slot: TableSlot) -> Vec<Found> {
    find_in(memory, memory.table(slot).unwrap(), map, rank)
}

/// Every layer of a table that was looked up before.
pub(crate) fn find_in(memory: &KernelMemory<'_>, view: TableView, map: &GeometryMap, rank: Rank) -> Vec<Found> {
    let word = |index| memory.word(view, index).unwrap();
    let layers = 0..map.geometry().layers.len() as u32;
    let of_layer = |layer: u32| {
        let row = layer * ROW_WORDS;
        let count = word(row + 1);
        if count == u32::MAX {
            return Found::default(); // never written: all poison
        }
        let blocks: Vec<u32> = (0..count).map(|at| word(row + ROW_HEADER_WORDS + at)).collect();
        let read = |block: &u32| read_block(memory, map, rank, DecoderLayer(layer), *block);
        Found {
            valid_tokens: word(row),
            bytes: blocks.iter().map(read).collect(),
            blocks,
        }
    };
    layers.map(of_layer).collect()
}

/// The planes of one block of a layer.
pub(crate) fn read_block(
    memory: &KernelMemory<'_>,
    map: &GeometryMap,
    rank: Rank,
    layer: DecoderLayer,
    block: u32,
) -> Vec<Vec<u8>> {
    let read = |plane: &kvsluice_layout::planes::Plane| {
        let mut bytes = vec![0; plane.bytes as usize];
        memory
            .read(plane.device_at(DestinationBlock(block)), &mut bytes)
            .unwrap();
        bytes
    };
    map.planes(rank, layer).iter().map(read).collect()
}

/// Bytes of one block that are not the content of `tag`.
pub(crate) fn wrong_bytes(map: &GeometryMap, rank: Rank, layer: DecoderLayer, tag: u64, planes: &[Vec<u8>]) -> u64 {
    let of = map.layer(layer).unwrap();
    let shard = rank.0 * of.shards / map.geometry().ranks;
    let planes = (0..).zip(planes);
    planes
        .map(|(index, bytes)| content::mismatches(content::seed(tag, of.tensor, shard, index), bytes))
        .sum()
}

/// Bytes that differ from what a table with these tags holds; `None` where the tables have other sizes.
pub(crate) fn differing(map: &GeometryMap, rank: Rank, found: &[Found], tags: &Tags) -> Option<u64> {
    let mut wrong = 0;
    for (layer, (found, tags)) in (0..).map(DecoderLayer).zip(found.iter().zip(tags)) {
        let group = map.geometry().group(map.layer(layer)?.group)?;
        if found.blocks.len() != tags.len() || found.valid_tokens != group.block_tokens * tags.len() as u32 {
            return None;
        }
        let blocks = found.bytes.iter().zip(tags);
        wrong += blocks
            .map(|(planes, tag)| wrong_bytes(map, rank, layer, *tag, planes))
            .sum::<u64>();
    }
    Some(wrong)
}

/// What was looked at so far.
#[derive(Default, Debug)]
pub(crate) struct Looked {
    /// Digest of the tables of a rank's request when it was last looked at.
    last: HashMap<(u32, Vec<u8>), u64>,
    pub(crate) verified: u64,
    pub(crate) mismatched: u64,
    /// Times that a table was looked at.
    pub(crate) tables: u64,
}

impl Looked {
    /// Looks at every request of a rank whose tables changed, through the tables in device memory: they hold, whole, one
    /// of the tables that were published, and no older one than the rank has said Done for.
    pub(crate) fn look(&mut self, end: &mut RankEnd, observer: &Observer, map: &std::sync::Arc<GeometryMap>) {
        let rank = end.rank;
        let changed = |request: &kvsluice_gpu_worker::tables::RequestView<'_>| {
            let key = (rank.0, request.request().to_vec());
            (self.last.get(&key) != Some(&request.digest())).then_some((
                key.1,
                request.slot(),
                request.selection_revision().0,
                request.digest(),
            ))
        };
        let changed: Vec<_> = end
            .worker
            .tables()
            .export()
            .filter_map(|request| changed(&request))
            .collect();
        for (request, slot, r, digest) in changed {
            self.last.insert((rank.0, request.clone()), digest);
            let of_map = map.clone();
            let found = end.compute(move |memory| find(memory, &of_map, rank, slot));
            let bytes: u64 = found
                .iter()
                .flat_map(|layer| layer.bytes.iter().flatten())
                .map(|p| p.len() as u64)
                .sum();
            let candidates = observer.tables_from(&request, r);
            let wrong = candidates
                .iter()
                .filter_map(|tags| differing(map, rank, &found, tags))
                .min();
            self.tables += 1;
            self.verified += bytes;
            self.mismatched += wrong.unwrap_or(bytes.max(1));
        }
    }

    pub(crate) fn check(&self, seed: u64) {
        assert_eq!(
            self.mismatched, 0,
            "seed {seed}: wrong bytes through the tables: {self:?}"
        );
        assert!(
            self.verified > 0 && self.tables > 0,
            "seed {seed}: nothing was looked at"
        );
    }
}
