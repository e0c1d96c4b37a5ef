//! Where every block lives: the addresses that follow from a geometry (X7, X8).
//!
//! [`GeometryMap`] is a pure function of the [`Geometry`]: producer and workers compute it each for themselves and the
//! agreement on the geometry hash makes the results equal. Its unit is the [`Plane`]: the bytes of one block that lie
//! contiguous in both pools, so one copy moves them.
//!
//! The host pool holds the KV of all ranks. A *tensor* is the KV of one layer and of the layers that alias it; each of
//! its planes holds, per block, the shards side by side: `[shard 0][shard 1]…`. So a rank's part of a plane is one
//! range, although the engine's head-minor order would scatter it. A device pool holds one shard of every tensor.
//!
//! Groups follow each other in both pools. Inside a group, planes are regions of all their blocks (layer-first), or
//! blocks are ranges of all their planes (block-first). Each such region starts on a page, so that a pool can be cut
//! into pinned chunks between two blocks.

use crate::geometry::{Geometry, GeometryError, GroupSpec, KvKind, MAX_POOL_BYTES, PoolOrder};
use crate::ids::{DecoderLayer, DestinationBlock, GroupId, Rank, SourceBlock};
use crate::planted::planted;

/// Alignment of every region of a pool: the page size of x86-64 and the largest one pinning asks for.
pub const REGION_ALIGN: u64 = 4096;
/// Offset of the first block in the pool segment: the header lies in front, on a page of its own.
pub const POOL_AT: u64 = REGION_ALIGN;
/// Alignment of a write-back slot: a cache line.
pub const SLOT_ALIGN: u64 = 64;

/// One rank's bytes of one plane of one layer, for every block: block b lies at offset + b · stride.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plane {
    /// Offset of block 0 in the pool segment, in bytes.
    pub host_offset: u64,
    /// Bytes from one block to the next in the pool segment.
    pub host_stride: u64,
    /// Offset of block 0 in the rank's device pool, in bytes.
    pub device_offset: u64,
    /// Bytes from one block to the next in the device pool.
    pub device_stride: u64,
    /// Contiguous bytes of one block, in both pools.
    pub bytes: u64,
}

impl Plane {
    /// Offset of `block` in the pool segment. Inside the pool for every block of the group; validate ids first (X9).
    #[inline(always)]
    pub const fn host_at(&self, block: SourceBlock) -> u64 {
        self.host_offset + block.0 as u64 * self.host_stride
    }

    /// Offset of `block` in the device pool. Inside the pool for every block of the group; validate ids first (X9).
    #[inline(always)]
    pub const fn device_at(&self, block: DestinationBlock) -> u64 {
        self.device_offset + block.0 as u64 * self.device_stride
    }
}

/// What the map knows of one layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerMap {
    /// The layer's group.
    pub group: GroupId,
    /// Index of the memory behind the layer; layers that alias one tensor have the same.
    pub tensor: u32,
    /// Distinct shards of the layer: how many ranks together hold it once.
    pub shards: u32,
}

/// What the map knows of one group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupMap {
    /// The group's part of the pool segment.
    pub host: Extent,
    /// The group's part of each rank's device pool.
    pub device: Extent,
    /// Bytes of one block in the host pool: all tensors, all shards.
    pub block_bytes: u64,
    /// Bytes of one block in a device pool: all tensors, one shard each.
    pub device_block_bytes: u64,
}

/// A range of bytes in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Length; a multiple of [`REGION_ALIGN`].
    pub bytes: u64,
}

/// The addresses of one geometry. Immutable; owns its copy of the geometry.
#[derive(Clone, Debug)]
pub struct GeometryMap {
    geometry: Geometry,
    groups: Vec<GroupMap>,
    layers: Vec<LayerMap>,
    planes: Vec<Plane>,
    /// By tensor: the planes of all its shards, shard-major.
    tensor_spans: Vec<Span>,
    /// By rank · layers + layer: the planes of that rank's shard, so that the hot path neither divides nor follows an
    /// alias.
    rank_spans: Vec<Span>,
    /// Sorted by offset, without gaps: where the pool may be cut.
    host_regions: Vec<Region>,
    pool_bytes: u64,
    device_bytes: u64,
    writeback_slot_bytes: u64,
}

/// A run of `GeometryMap::planes`.
#[derive(Clone, Copy, Debug)]
struct Span {
    first: usize,
    len: usize,
}

/// Blocks in a row: the one plane of a layer-first group, or all of a block-first one.
#[derive(Clone, Copy, Debug)]
struct Region {
    offset: u64,
    stride: u64,
}

/// The memory behind one layer and its aliases, while the map is made.
struct Tensor {
    group: GroupId,
    shards: u32,
    planes: u32,
    /// Bytes of one plane of one shard of one block.
    plane_bytes: u64,
    /// Where each plane lies: the host pool first, then the device pool.
    places: Vec<(Region, Region)>,
}

impl GeometryMap {
    /// Computes the map of `geometry`.
    ///
    /// # Errors
    /// As [`Geometry::validate`], and [`GeometryError::TooLarge`] for a pool above [`MAX_POOL_BYTES`].
    pub fn new(geometry: &Geometry) -> Result<Self, GeometryError> {
        geometry.validate()?;
        let (layers, mut tensors) = tensors_of(geometry)?;
        // X3: the pool segment begins with its header.
        let mut host = Pool {
            end: if planted("x3_blocks_over_header") { 0 } else { POOL_AT },
            regions: Vec::new(),
        };
        let mut device = Pool::default();
        let mut groups = Vec::with_capacity(geometry.groups.len());
        for (index, group) in geometry.groups.iter().enumerate() {
            let members = || tensors.iter().filter(|tensor| tensor.group.index() == index);
            let planes = |shards: fn(&Tensor) -> u32| -> Option<Vec<u64>> {
                let of = |tensor: &Tensor| tensor.plane_bytes.checked_mul(u64::from(shards(tensor)));
                members()
                    .flat_map(|tensor| (0..tensor.planes).map(move |_| of(tensor)))
                    .collect()
            };
            let too_large = |name| GeometryError::TooLarge {
                field: format!("groups[{index}].{name}"),
                remedy: "fewer blocks, or smaller ones",
            };
            let on_host = planes(|tensor| tensor.shards)
                .and_then(|planes| host.place(group.host_order, group.source_blocks, &planes))
                .ok_or_else(|| too_large("source_blocks"))?;
            let on_device = planes(|_| 1)
                .and_then(|planes| device.place(group.device_order, group.device_blocks, &planes))
                .ok_or_else(|| too_large("device_blocks"))?;
            groups.push(GroupMap {
                host: on_host.extent,
                device: on_device.extent,
                block_bytes: on_host.block_bytes,
                device_block_bytes: on_device.block_bytes,
            });
            let mut places = on_host.planes.into_iter().zip(on_device.planes);
            for tensor in tensors.iter_mut().filter(|tensor| tensor.group.index() == index) {
                tensor.places.extend(places.by_ref().take(tensor.planes as usize));
            }
        }

        let mut planes = Vec::new();
        let tensor_spans: Vec<Span> = tensors.iter().map(|tensor| tensor.lay_out(&mut planes)).collect();
        let ranks = 0..geometry.ranks;
        let rank_spans = ranks
            .flat_map(|rank| layers.iter().map(move |layer| (rank, layer)))
            .filter_map(|(rank, layer)| {
                let all = tensor_spans.get(layer.tensor as usize)?;
                let len = all.len / layer.shards as usize;
                // X7: a rank's shard follows from the geometry alone.
                let shard = if planted("x8_skip_shard") {
                    0
                } else {
                    rank * layer.shards / geometry.ranks
                };
                Some(Span {
                    first: all.first + shard as usize * len,
                    len,
                })
            })
            .collect();
        let largest = tensors
            .iter()
            .map(|tensor| u64::from(tensor.planes) * tensor.plane_bytes)
            .max();
        Ok(Self {
            geometry: geometry.clone(),
            groups,
            layers,
            planes,
            tensor_spans,
            rank_spans,
            host_regions: host.regions,
            pool_bytes: host.end,
            device_bytes: device.end,
            writeback_slot_bytes: largest.unwrap_or(0).next_multiple_of(SLOT_ALIGN),
        })
    }

    /// The geometry that this is the map of.
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Bytes of the pool segment; a multiple of [`REGION_ALIGN`].
    pub fn pool_bytes(&self) -> u64 {
        self.pool_bytes
    }

    /// Bytes of the device pool of each rank, equal on all of them; a multiple of [`REGION_ALIGN`].
    pub fn device_bytes(&self) -> u64 {
        self.device_bytes
    }

    /// Bytes that hold any one rank's shard of any one layer of one block, its planes in a row; a multiple of
    /// [`SLOT_ALIGN`].
    pub fn writeback_slot_bytes(&self) -> u64 {
        self.writeback_slot_bytes
    }

    /// Number of tensors: layers less aliases.
    pub fn tensors(&self) -> u32 {
        self.tensor_spans.len() as u32
    }

    /// The group `group`, if there is one.
    #[inline]
    pub fn group(&self, group: GroupId) -> Option<&GroupMap> {
        self.groups.get(group.index())
    }

    /// The layer `layer`, if there is one.
    #[inline]
    pub fn layer(&self, layer: DecoderLayer) -> Option<LayerMap> {
        self.layers.get(layer.index()).copied()
    }

    /// What `rank` holds of `layer`: K then V, or one plane. Empty for a rank or layer that the geometry lacks.
    #[inline]
    pub fn planes(&self, rank: Rank, layer: DecoderLayer) -> &[Plane] {
        if layer.index() >= self.layers.len() {
            return &[];
        }
        self.span(self.rank_spans.get(rank.index() * self.layers.len() + layer.index()))
    }

    /// The planes of all shards of `layer`, shard-major: together every byte of the layer, once. Empty for a layer that
    /// the geometry lacks.
    pub fn shard_planes(&self, layer: DecoderLayer) -> &[Plane] {
        self.span(
            self.layer(layer)
                .and_then(|layer| self.tensor_spans.get(layer.tensor as usize)),
        )
    }

    /// Bytes of one block of `group` in the host pool: all tensors, all shards. 0 for a group that the geometry lacks.
    pub fn block_bytes(&self, group: GroupId) -> u64 {
        self.group(group).map_or(0, |group| group.block_bytes)
    }

    /// Bytes that `rank` holds of one block of `layer`. 0 for a rank or layer that the geometry lacks.
    pub fn shard_block_bytes(&self, rank: Rank, layer: DecoderLayer) -> u64 {
        self.planes(rank, layer).iter().map(|plane| plane.bytes).sum()
    }

    /// The largest offset up to `limit` where the pool may be cut in two: on a page, and inside no block's bytes, so
    /// that no copy spans two pinned chunks (X31). 0 where there is none.
    pub fn cut_at_or_below(&self, limit: u64) -> u64 {
        if limit >= self.pool_bytes {
            return self.pool_bytes;
        }
        let after = self.host_regions.partition_point(|region| region.offset <= limit);
        let Some(region) = after.checked_sub(1).and_then(|at| self.host_regions.get(at)) else {
            return 0;
        };
        // Regions start on pages, so inside one the pages that are also block boundaries repeat with the lcm.
        let pages = region.stride / gcd(region.stride, REGION_ALIGN);
        let step = pages * REGION_ALIGN;
        region.offset + (limit - region.offset) / step * step
    }

    fn span(&self, span: Option<&Span>) -> &[Plane] {
        span.and_then(|span| self.planes.get(span.first..span.first + span.len))
            .unwrap_or(&[])
    }
}

impl Tensor {
    /// Appends the planes of all shards and returns their place in `planes`.
    fn lay_out(&self, planes: &mut Vec<Plane>) -> Span {
        let first = planes.len();
        for shard in 0..u64::from(self.shards) {
            planes.extend(self.places.iter().map(|(host, device)| Plane {
                host_offset: host.offset + shard * self.plane_bytes,
                host_stride: host.stride,
                device_offset: device.offset,
                device_stride: device.stride,
                bytes: self.plane_bytes,
            }));
        }
        Span {
            first,
            len: planes.len() - first,
        }
    }
}

/// Gives each layer its tensor, and each tensor its shape.
fn tensors_of(geometry: &Geometry) -> Result<(Vec<LayerMap>, Vec<Tensor>), GeometryError> {
    let mut layers: Vec<LayerMap> = Vec::with_capacity(geometry.layers.len());
    let mut tensors: Vec<Tensor> = Vec::new();
    for (index, spec) in geometry.layers.iter().enumerate() {
        let owner = spec.alias_of.filter(|_| !planted("x8_alias_owns_memory"));
        // `validate` allows only earlier layers, so the owner is already resolved.
        if let Some(owner) = owner.and_then(|owner| layers.get(owner.index()).copied()) {
            layers.push(owner);
            continue;
        }
        let shards = spec.shards(geometry.ranks);
        let named = if planted("field_32_one_block_size") {
            GroupId(0)
        } else {
            spec.group
        };
        let plane_bytes = geometry
            .group(named)
            .and_then(|group| plane_elements(spec.kv, group, shards))
            .and_then(|elements| elements.checked_mul(geometry.dtype.bytes()))
            .filter(|&bytes| bytes <= MAX_POOL_BYTES)
            .ok_or_else(|| GeometryError::TooLarge {
                field: format!("layers[{index}].kv"),
                remedy: "fewer tokens per block, heads or elements",
            })?;
        layers.push(LayerMap {
            group: spec.group,
            tensor: tensors.len() as u32,
            shards,
        });
        tensors.push(Tensor {
            group: spec.group,
            shards,
            planes: spec.kv.planes(),
            plane_bytes,
            places: Vec::new(),
        });
    }
    Ok((layers, tensors))
}

/// Elements of one plane of one shard of one block.
fn plane_elements(kv: KvKind, group: &GroupSpec, shards: u32) -> Option<u64> {
    let tokens = u64::from(group.block_tokens);
    let of_heads = |kv_heads: u32, head_dim: u32| {
        tokens
            .checked_mul(u64::from(kv_heads / shards))?
            .checked_mul(u64::from(head_dim))
    };
    match kv {
        KvKind::Separate { kv_heads, head_dim } => of_heads(kv_heads, head_dim),
        KvKind::Fused { kv_heads, head_dim } => of_heads(kv_heads, head_dim)?.checked_mul(2),
        KvKind::Latent { width } => tokens.checked_mul(u64::from(width)),
    }
}

/// One pool while groups are placed in it.
#[derive(Default)]
struct Pool {
    end: u64,
    regions: Vec<Region>,
}

struct Placed {
    extent: Extent,
    block_bytes: u64,
    planes: Vec<Region>,
}

impl Pool {
    /// Places `blocks` blocks of the planes with these sizes. `None` when the pool grows above [`MAX_POOL_BYTES`].
    fn place(&mut self, order: PoolOrder, blocks: u32, plane_bytes: &[u64]) -> Option<Placed> {
        let offset = self.end;
        let block_bytes = plane_bytes
            .iter()
            .try_fold(0u64, |sum, &bytes| sum.checked_add(bytes))?;
        let mut planes = Vec::with_capacity(plane_bytes.len());
        match order {
            PoolOrder::LayerFirst => {
                for &bytes in plane_bytes {
                    planes.push(self.region(blocks, bytes)?);
                }
            }
            PoolOrder::BlockFirst => {
                let mut plane = self.region(blocks, block_bytes)?;
                for bytes in plane_bytes {
                    planes.push(plane);
                    plane.offset += bytes;
                }
            }
        }
        Some(Placed {
            extent: Extent {
                offset,
                bytes: self.end - offset,
            },
            block_bytes,
            planes,
        })
    }

    fn region(&mut self, blocks: u32, stride: u64) -> Option<Region> {
        let region = Region {
            offset: self.end,
            stride,
        };
        let bytes = stride
            .checked_mul(u64::from(blocks))?
            .checked_next_multiple_of(REGION_ALIGN)?;
        self.end = self.end.checked_add(bytes).filter(|&end| end <= MAX_POOL_BYTES)?;
        self.regions.push(region);
        Some(region)
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests;
