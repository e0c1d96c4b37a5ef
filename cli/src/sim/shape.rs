//! The model that is simulated: as small as it can be with every feature that matters to a protocol.

use kvsluice_layout::content;
use kvsluice_layout::geometry::{Attention, Dtype, Geometry, GroupSpec, KvKind, LayerSpec, PoolOrder, Sharding};
use kvsluice_layout::ids::{DecoderLayer, GroupId, PhysicalBlock, Rank};
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::region::{MIN_RING_BYTES, RegionMap};
use kvsluice_transport::shared::{Heap, Shared, SharedMut};

/// Most ranks of a simulation.
pub(super) const RANKS_MAX: u32 = 8;
/// KV-cache groups.
pub(super) const GROUPS: usize = 2;
/// Group of each decoder layer.
pub(super) const LAYERS: [u32; 3] = [0, 0, 1];
/// Blocks of each host pool, and the first of its gather region.
pub(super) const HOST_BLOCKS: u32 = 24;
pub(super) const GATHER_START: u32 = 19;
/// Blocks of each device pool. Block 0 is the null block.
pub(super) const DEVICE_BLOCKS: u32 = 24;
/// Slots of a rank's write-back area.
pub(super) const SLOTS: u64 = 8;

/// Geometry and region map for a number of ranks.
pub(super) struct Shape {
    pub(super) map: GeometryMap,
    pub(super) regions: RegionMap,
}

impl Shape {
    /// Two groups of other block sizes: K and V apart, one head per rank, and a latent plane that every rank holds.
    pub(super) fn new(ranks: u32) -> anyhow::Result<Self> {
        let group = |block_tokens, host_order| GroupSpec {
            block_tokens,
            attention: Attention::Full,
            source_blocks: HOST_BLOCKS,
            gather_blocks: HOST_BLOCKS - GATHER_START,
            device_blocks: DEVICE_BLOCKS,
            source_null: None,
            device_null: Some(PhysicalBlock(0)),
            host_order,
            device_order: PoolOrder::LayerFirst,
        };
        let layer = |group, kv| LayerSpec {
            group: GroupId(group),
            kv,
            sharding: Sharding::Heads,
            alias_of: None,
        };
        let heads = KvKind::Separate {
            kv_heads: ranks,
            head_dim: 8,
        };
        let latent = KvKind::Latent { width: 5 };
        let kinds = LAYERS.map(|of| layer(of, if of == 0 { heads } else { latent }));
        let geometry = Geometry {
            model: "simulated".to_owned(),
            dtype: Dtype::Fp8,
            ranks,
            groups: vec![group(2, PoolOrder::BlockFirst), group(4, PoolOrder::LayerFirst)],
            layers: kinds.to_vec(),
        };
        let map = GeometryMap::new(&geometry)?;
        let slot_bytes = map.writeback_slot_bytes() as usize;
        let regions = RegionMap::new(&geometry, MIN_RING_BYTES, SLOTS as usize, slot_bytes)?;
        Ok(Self { map, regions })
    }

    /// Ranks of the channel.
    pub(super) fn ranks(&self) -> u32 {
        self.map.geometry().ranks
    }

    /// Layers of a group.
    pub(super) fn layers_of(group: u32) -> impl Iterator<Item = u32> + Clone {
        (0..)
            .zip(LAYERS)
            .filter(move |(_, of)| *of == group)
            .map(|(layer, _)| layer)
    }

    /// Seeds of the planes that a rank holds of a block of a layer, with their place and length on the device.
    pub(super) fn device_planes(
        &self,
        rank: u32,
        layer: u32,
        block: u32,
        tag: u64,
    ) -> impl Iterator<Item = (u64, u64, usize)> {
        let (rank, layer) = (Rank(rank), DecoderLayer(layer));
        let (tensor, shards) = self.map.layer(layer).map_or((0, 1), |map| (map.tensor, map.shards));
        let shard = rank.0 * shards / self.ranks();
        let planes = self.map.planes(rank, layer).iter().zip(0..);
        planes.map(move |(plane, index)| {
            let seed = content::seed(tag, tensor, shard, index);
            (seed, plane.device_at(PhysicalBlock(block).into()), plane.bytes as usize)
        })
    }

    /// Writes the content of `tag` into a block of the host pool: all layers of its group, all shards.
    pub(super) fn fill(&self, pool: &impl SharedMut, group: u32, block: u32, tag: u64) {
        let mut bytes = [0; 256];
        for layer in Self::layers_of(group).map(DecoderLayer) {
            let Some(map) = self.map.layer(layer) else { continue };
            let planes = self.map.shard_planes(layer);
            let per_shard = (planes.len() / map.shards as usize).max(1);
            for (plane, at) in planes.iter().zip(0..) {
                let seed = content::seed(tag, map.tensor, (at / per_shard) as u32, (at % per_shard) as u32);
                if let Some(bytes) = bytes.get_mut(..plane.bytes as usize) {
                    content::fill(seed, bytes);
                    pool.bytes_in(plane.host_at(kvsluice_layout::ids::SourceBlock(block)) as usize, bytes);
                }
            }
        }
    }

    /// Bytes of a write-back slot that are not those of `tag`: what `rank` holds of one block of one layer.
    pub(super) fn slot_mismatches(&self, area: &Heap, slot: u64, rank: u32, layer: u32, tag: u64) -> u64 {
        let mut at = slot as usize * self.map.writeback_slot_bytes() as usize;
        let mut bytes = [0; 256];
        let mut mismatches = 0;
        for (seed, _, length) in self.device_planes(rank, layer, 0, tag) {
            if let Some(bytes) = bytes.get_mut(..length) {
                area.bytes_out(at, bytes);
                mismatches += content::mismatches(seed, bytes);
            }
            at += length;
        }
        mismatches
    }
}
