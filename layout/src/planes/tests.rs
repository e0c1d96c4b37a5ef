//! The map against an independent count: every byte of both pools is marked with what a rank says it holds there.

use super::*;
use crate::geometry::{Attention, Dtype, LayerSpec, Sharding};
use crate::ids::PhysicalBlock;
use crate::planted::with_planted;
use crate::presets::{Sizing, preset};

/// A small random geometry: every kind, order and sharding, tiny blocks, at times with aliases.
fn random(seed: u64) -> Geometry {
    let mut rng = fastrand::Rng::with_seed(seed);
    let ranks: u32 = rng.choice([1, 2, 3, 4, 6, 8]).unwrap();
    let order = |rng: &mut fastrand::Rng| {
        if rng.bool() {
            PoolOrder::LayerFirst
        } else {
            PoolOrder::BlockFirst
        }
    };
    let groups: Vec<GroupSpec> = (0..rng.u32(1..5))
        .map(|_| GroupSpec {
            block_tokens: rng.u32(1..6),
            attention: if rng.bool() {
                Attention::Full
            } else {
                Attention::SlidingWindow { window_tokens: 8 }
            },
            source_blocks: rng.u32(1..8),
            gather_blocks: 0,
            device_blocks: rng.u32(1..6),
            source_null: None,
            device_null: Some(PhysicalBlock(0)),
            host_order: order(&mut rng),
            device_order: order(&mut rng),
        })
        .collect();
    let mut layers: Vec<LayerSpec> = Vec::new();
    for index in 0..groups.len() as u32 + rng.u32(0..6) {
        let aliased = rng.usize(0..layers.len() + 1);
        if index >= groups.len() as u32 && aliased < layers.len() && rng.bool() {
            let owner = layers[aliased].clone();
            layers.push(LayerSpec {
                alias_of: Some(DecoderLayer(aliased as u32)),
                ..owner
            });
            continue;
        }
        let divisors: Vec<u32> = (1..=ranks).filter(|heads| ranks.is_multiple_of(*heads)).collect();
        let kv_heads = if rng.bool() {
            ranks * rng.u32(1..3)
        } else {
            rng.choice(divisors).unwrap()
        };
        let head_dim = rng.u32(1..5);
        let kv = match rng.u32(0..3) {
            0 => KvKind::Separate { kv_heads, head_dim },
            1 => KvKind::Fused { kv_heads, head_dim },
            _ => KvKind::Latent { width: rng.u32(1..9) },
        };
        let sharding = if rng.u32(0..4) == 0 {
            Sharding::Replicated
        } else {
            Sharding::Heads
        };
        let group = GroupId(index % groups.len() as u32);
        layers.push(LayerSpec {
            group,
            kv,
            sharding,
            alias_of: None,
        });
    }
    let dtype = rng.choice([Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::Fp8]).unwrap();
    Geometry {
        model: format!("random {seed}"),
        dtype,
        ranks,
        groups,
        layers,
    }
}

/// Bytes of a pool, each with the one thing that lies there.
struct Marks(Vec<Option<[u32; 4]>>);

impl Marks {
    fn new(bytes: u64) -> Self {
        Self(vec![None; bytes as usize])
    }

    fn mark(&mut self, at: u64, bytes: u64, inside: Extent, what: [u32; 4]) -> Result<(), String> {
        let end = at + bytes;
        if at < inside.offset || end > inside.offset + inside.bytes || end > self.0.len() as u64 {
            return Err(format!("{what:?} at {at}..{end} lies outside its group {inside:?}"));
        }
        for byte in at..end {
            match &mut self.0[byte as usize] {
                Some(other) => return Err(format!("{what:?} and {other:?} overlap at byte {byte}")),
                free => *free = Some(what),
            }
        }
        Ok(())
    }
}

/// The heads that `rank` attends with, straight from the definition of tensor parallelism.
fn heads_of(rank: u32, ranks: u32, layer: &LayerSpec) -> std::ops::Range<u32> {
    match layer.kv {
        KvKind::Latent { .. } => 0..1,
        KvKind::Separate { kv_heads, .. } | KvKind::Fused { kv_heads, .. } => {
            if layer.sharding == Sharding::Replicated {
                0..kv_heads
            } else if ranks <= kv_heads {
                let each = kv_heads / ranks;
                rank * each..(rank + 1) * each
            } else {
                let head = rank / (ranks / kv_heads);
                head..head + 1
            }
        }
    }
}

/// Everything that X7 and X8 promise of a map, checked byte by byte.
fn check(geometry: &Geometry) -> Result<(), String> {
    let map = GeometryMap::new(geometry).map_err(|error| error.to_string())?;
    let mut host = Marks::new(map.pool_bytes());
    let mut devices: Vec<Marks> = (0..geometry.ranks).map(|_| Marks::new(map.device_bytes())).collect();
    let mut block_bytes = vec![0; geometry.groups.len()];
    let ensure = |holds: bool, what: &str, layer: usize| {
        if holds {
            Ok(())
        } else {
            Err(format!("layer {layer}: {what}"))
        }
    };
    for (l, spec) in geometry.layers.iter().enumerate() {
        let layer = DecoderLayer(l as u32);
        let at = map.layer(layer).ok_or("layer missing")?;
        let group = &geometry.groups[spec.group.index()];
        let extent = map.group(spec.group).ok_or("group missing")?;
        let elements = u64::from(group.block_tokens) * spec.kv.token_elements();
        let expected = elements * geometry.dtype.bytes();
        if let Some(owner) = spec.alias_of {
            ensure(Some(at) == map.layer(owner), "an alias has the tensor of its owner", l)?;
            for rank in (0..geometry.ranks).map(Rank) {
                ensure(
                    map.planes(rank, layer) == map.planes(rank, owner),
                    "aliases coincide",
                    l,
                )?;
            }
            continue;
        }
        let mut held = 0;
        for rank in 0..geometry.ranks {
            let heads = heads_of(rank, geometry.ranks, spec);
            let planes = map.planes(Rank(rank), layer);
            ensure(planes.len() == spec.kv.planes() as usize, "number of planes", l)?;
            let shard_bytes: u64 = planes.iter().map(|plane| plane.bytes).sum();
            ensure(
                shard_bytes * u64::from(at.shards) == expected,
                "shards add up to the block",
                l,
            )?;
            ensure(
                map.shard_block_bytes(Rank(rank), layer) == shard_bytes,
                "shard_block_bytes",
                l,
            )?;
            ensure(map.writeback_slot_bytes() >= shard_bytes, "a slot holds a shard", l)?;
            // The first rank of each set of heads marks the host pool; the others must name the same bytes.
            let twin = (0..rank).find(|&other| heads_of(other, geometry.ranks, spec) == heads);
            if let Some(twin) = twin {
                ensure(
                    planes == map.planes(Rank(twin), layer),
                    "equal heads are equal bytes",
                    l,
                )?;
            }
            for (p, plane) in planes.iter().enumerate() {
                let what = |block| [at.tensor, p as u32, heads.start, block];
                for block in 0..if twin.is_none() { group.source_blocks } else { 0 } {
                    host.mark(plane.host_at(SourceBlock(block)), plane.bytes, extent.host, what(block))?;
                    held += plane.bytes;
                }
                for block in 0..group.device_blocks {
                    let place = plane.device_at(DestinationBlock(block));
                    devices[rank as usize].mark(place, plane.bytes, extent.device, what(block))?;
                }
                let strides = [
                    (
                        group.host_order,
                        plane.host_stride,
                        plane.bytes * u64::from(at.shards),
                        extent.block_bytes,
                    ),
                    (
                        group.device_order,
                        plane.device_stride,
                        plane.bytes,
                        extent.device_block_bytes,
                    ),
                ];
                for (order, stride, layer_first, block_first) in strides {
                    let wanted = if order == PoolOrder::LayerFirst {
                        layer_first
                    } else {
                        block_first
                    };
                    ensure(stride == wanted, "blocks follow each other in the order of the pool", l)?;
                }
            }
        }
        ensure(
            held == expected * u64::from(group.source_blocks),
            "ranks together hold every byte once",
            l,
        )?;
        let all: u64 = map.shard_planes(layer).iter().map(|plane| plane.bytes).sum();
        ensure(all == expected, "shard_planes hold every byte", l)?;
        block_bytes[spec.group.index()] += expected;
    }
    for (g, bytes) in block_bytes.into_iter().enumerate() {
        ensure(
            map.block_bytes(GroupId(g as u32)) == bytes,
            "block_bytes of its group",
            g,
        )?;
    }
    Ok(())
}

#[test]
fn x3_no_block_lies_in_the_header_of_the_pool_segment() {
    let lowest = || {
        let map = GeometryMap::new(&preset("sample-hybrid").unwrap()).unwrap();
        let layers = (0..map.geometry().layers.len() as u32).map(DecoderLayer);
        let planes = layers.flat_map(|layer| map.shard_planes(layer));
        planes.map(|plane| plane.host_at(SourceBlock(0))).min().unwrap()
    };
    assert!(lowest() >= crate::segment::HEADER_BYTES as u64);
    #[cfg(feature = "planted")]
    assert_eq!(
        crate::planted::with_planted("x3_blocks_over_header", lowest),
        0,
        "the planted fault is not seen"
    );
}

#[test]
fn x8_in_random_geometries_every_byte_has_one_owner_and_every_rank_its_heads() {
    for seed in 0..300 {
        check(&random(seed)).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
}

#[test]
fn x8_the_check_goes_red_for_each_planted_fault() {
    for fault in ["x8_skip_shard", "x8_alias_owns_memory", "field_32_one_block_size"] {
        let caught = with_planted(fault, || (0..300).filter(|&seed| check(&random(seed)).is_err()).count());
        assert!(caught > 0, "{fault} was not noticed");
    }
}

#[test]
fn field_32_groups_of_other_block_sizes_each_keep_their_whole_pool() {
    let geometry = Geometry {
        model: "hybrid".into(),
        dtype: Dtype::Bf16,
        ranks: 2,
        groups: [16, 32, 64]
            .map(|block_tokens| GroupSpec {
                block_tokens,
                attention: Attention::Full,
                source_blocks: 10,
                gather_blocks: 0,
                device_blocks: 4,
                source_null: None,
                device_null: None,
                host_order: PoolOrder::BlockFirst,
                device_order: PoolOrder::LayerFirst,
            })
            .into(),
        layers: (0..6)
            .map(|layer| LayerSpec {
                group: GroupId(layer % 3),
                kv: KvKind::Separate {
                    kv_heads: 2,
                    head_dim: 64,
                },
                sharding: Sharding::Heads,
                alias_of: None,
            })
            .collect(),
    };
    let map = GeometryMap::new(&geometry).unwrap();
    let token = 2 * 2 * 64 * 2;
    for (group, tokens) in [(0, 16), (1, 32), (2, 64)] {
        assert_eq!(map.block_bytes(GroupId(group)), 2 * tokens * token);
        assert_eq!(
            map.group(GroupId(group)).unwrap().host.bytes,
            10 * 2 * tokens * token,
            "not divided by groups"
        );
    }
}

#[test]
fn x7_a_map_is_a_pure_function_of_its_geometry() {
    let (one, two) = (
        GeometryMap::new(&random(7)).unwrap(),
        GeometryMap::new(&random(7)).unwrap(),
    );
    assert_eq!(format!("{one:?}"), format!("{two:?}"));
}

#[test]
fn field_36_every_rank_has_the_same_device_pool() {
    for seed in 0..50 {
        let map = GeometryMap::new(&random(seed)).unwrap();
        let device = |rank, layer| -> Vec<(u64, u64, u64)> {
            let planes = map.planes(Rank(rank), layer).iter();
            planes
                .map(|plane| (plane.device_offset, plane.device_stride, plane.bytes))
                .collect()
        };
        for layer in (0..map.geometry().layers.len() as u32).map(DecoderLayer) {
            for rank in 1..map.geometry().ranks {
                assert_eq!(
                    device(rank, layer),
                    device(0, layer),
                    "seed {seed}: rank {rank}, {layer:?}"
                );
            }
        }
    }
}

#[test]
fn field_35_a_plane_states_the_fragment_that_one_copy_moves_and_not_the_page() {
    for (ranks, fragment) in [(1, 32 << 10), (2, 16 << 10), (8, 4 << 10), (16, 4 << 10)] {
        let sizing = Sizing {
            ranks: Some(ranks),
            ..Sizing::default()
        };
        let map = GeometryMap::new(&sizing.apply(preset("llama-3.1-70b").unwrap()).unwrap()).unwrap();
        assert_eq!(map.planes(Rank(0), DecoderLayer(0))[0].bytes, fragment, "{ranks} ranks");
    }
}

#[test]
fn x9_an_unknown_rank_layer_or_group_has_no_bytes() {
    let map = GeometryMap::new(&random(1)).unwrap();
    let (ranks, layers) = (map.geometry().ranks, map.geometry().layers.len() as u32);
    assert!(map.planes(Rank(ranks), DecoderLayer(0)).is_empty());
    assert!(map.planes(Rank(0), DecoderLayer(layers)).is_empty());
    assert!(map.planes(Rank(u32::MAX), DecoderLayer(u32::MAX)).is_empty());
    assert!(map.shard_planes(DecoderLayer(layers)).is_empty());
    assert_eq!(map.layer(DecoderLayer(layers)), None);
    assert_eq!(map.block_bytes(GroupId(u32::MAX)), 0);
}

#[test]
fn x8_sizes_that_overflow_are_refused_by_name() {
    let too_large = |change: fn(&mut Geometry)| {
        let mut geometry = random(1);
        change(&mut geometry);
        match GeometryMap::new(&geometry) {
            Err(GeometryError::TooLarge { field, .. }) => field,
            other => panic!("not refused: {other:?}"),
        }
    };
    let huge = |kv: KvKind| move |g: &mut Geometry| g.layers.iter_mut().for_each(|layer| layer.kv = kv);
    let mut geometry = random(1);
    huge(KvKind::Latent { width: u32::MAX })(&mut geometry);
    geometry.groups[0].block_tokens = u32::MAX;
    assert!(
        matches!(GeometryMap::new(&geometry), Err(GeometryError::TooLarge { field, .. }) if field == "layers[0].kv")
    );
    assert_eq!(
        too_large(|g| {
            g.layers
                .iter_mut()
                .for_each(|layer| layer.kv = KvKind::Latent { width: 1 << 20 });
            g.groups[0].source_blocks = 1 << 28;
        }),
        "groups[0].source_blocks"
    );
    assert_eq!(
        too_large(|g| {
            g.layers
                .iter_mut()
                .for_each(|layer| layer.kv = KvKind::Latent { width: 1 << 20 });
            g.groups[0].device_blocks = 1 << 28;
        }),
        "groups[0].device_blocks"
    );
}

#[test]
fn field_12_a_cut_of_the_pool_splits_no_block() {
    for seed in 0..50 {
        let mut geometry = random(seed);
        // Larger blocks, so that the pool has pages inside groups.
        geometry.groups.iter_mut().for_each(|group| group.source_blocks *= 300);
        let map = GeometryMap::new(&geometry).unwrap();
        let mut cuts = std::collections::BTreeSet::new();
        for limit in (0..=map.pool_bytes()).step_by(1024) {
            let cut = map.cut_at_or_below(limit);
            assert!(
                cut <= limit && cut.is_multiple_of(REGION_ALIGN),
                "seed {seed}: {cut} for {limit}"
            );
            cuts.insert(cut);
        }
        for l in 0..geometry.layers.len() as u32 {
            let blocks = geometry.groups[geometry.layers[l as usize].group.index()].source_blocks;
            for plane in map.shard_planes(DecoderLayer(l)) {
                for start in (0..blocks).map(|block| plane.host_at(SourceBlock(block))) {
                    let split = cuts.range(start + 1..start + plane.bytes).next();
                    assert_eq!(split, None, "seed {seed}: layer {l} at {start}");
                }
            }
        }
        let ends: Vec<u64> = map
            .groups
            .iter()
            .map(|group| group.host.offset + group.host.bytes)
            .collect();
        assert!(
            ends.iter().all(|end| cuts.contains(end)),
            "seed {seed}: a group's end is a cut"
        );
    }
}
