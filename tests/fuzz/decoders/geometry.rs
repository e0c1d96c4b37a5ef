//! A geometry of any numbers: what is accepted gives every block of every rank a place of its own in both pools.

use kvsluice_layout::geometry::{
    Attention, Dtype, Geometry, GroupSpec, KvKind, LayerSpec, MAX_POOL_BYTES, PoolOrder, Sharding,
};
use kvsluice_layout::ids::{DecoderLayer, DestinationBlock, GroupId, PhysicalBlock, Rank, SourceBlock};
use kvsluice_layout::planes::{GeometryMap, POOL_AT};
use kvsluice_layout::region::{DIRECTORY_ENTRY_BYTES, MIN_RING_BYTES, RegionMap};

use super::input::Input;

pub fn geometry(data: &[u8]) {
    let mut input = Input(data);
    let again = input.byte();
    let geometry = read(&mut input);
    let Ok(map) = GeometryMap::new(&geometry) else { return };
    assert!(map.pool_bytes() <= MAX_POOL_BYTES && map.device_bytes() <= MAX_POOL_BYTES);
    assert_places(&geometry, &map);
    let slots = input.number() as usize;
    let Ok(regions) = RegionMap::new(&geometry, MIN_RING_BYTES, slots, map.writeback_slot_bytes() as usize) else {
        return;
    };
    let last = geometry.groups.len() as u32 - 1;
    let end = regions.directory_at(GroupId(last), SourceBlock(geometry.groups[last as usize].source_blocks));
    assert!(end.is_some_and(|end| end <= regions.control_bytes() && end % DIRECTORY_ENTRY_BYTES == 0));
    if let Some(at) = (slots as u64)
        .checked_sub(1)
        .and_then(|last| regions.write_back_at(last))
    {
        assert!(at + regions.write_back_slot_bytes() <= regions.rank_bytes());
    }
    if again % 16 == 0 {
        let text = toml::to_string(&geometry).expect("a geometry is TOML");
        assert_eq!(Geometry::from_toml(&text).expect("its own text"), geometry);
    }
}

fn read(input: &mut Input<'_>) -> Geometry {
    let dtype = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::Fp8][input.below(4)];
    let ranks = input.number() % 9;
    let (groups, layers) = (input.below(5), input.below(9));
    let order = |bit: u8| {
        if bit & 1 == 0 {
            PoolOrder::LayerFirst
        } else {
            PoolOrder::BlockFirst
        }
    };
    let group = |input: &mut Input<'_>| {
        let flags = input.byte();
        GroupSpec {
            block_tokens: input.number(),
            attention: match flags & 4 {
                0 => Attention::Full,
                _ => Attention::SlidingWindow {
                    window_tokens: input.number(),
                },
            },
            source_blocks: input.number(),
            gather_blocks: if flags & 8 == 0 { 0 } else { input.number() },
            device_blocks: input.number(),
            source_null: (flags & 16 != 0).then(|| SourceBlock(input.number())),
            device_null: (flags & 32 != 0).then(|| PhysicalBlock(input.number())),
            host_order: order(flags),
            device_order: order(flags >> 1),
        }
    };
    let layer = |input: &mut Input<'_>| {
        let flags = input.byte();
        let (kv_heads, head_dim) = (input.number(), input.number());
        LayerSpec {
            group: GroupId(u32::from(flags >> 5)),
            kv: match flags % 4 {
                0 => KvKind::Fused { kv_heads, head_dim },
                1 => KvKind::Latent { width: kv_heads },
                _ => KvKind::Separate { kv_heads, head_dim },
            },
            sharding: if flags & 4 == 0 {
                Sharding::Heads
            } else {
                Sharding::Replicated
            },
            alias_of: (flags & 8 != 0).then(|| DecoderLayer(input.number() % 16)),
        }
    };
    Geometry {
        model: "fuzz".to_owned(),
        dtype,
        ranks,
        groups: (0..groups).map(|_| group(input)).collect(),
        layers: (0..layers).map(|_| layer(input)).collect(),
    }
}

/// The first and the last block of every plane lie in the pool, and no two planes share a byte of them.
fn assert_places(geometry: &Geometry, map: &GeometryMap) {
    for rank in 0..geometry.ranks {
        let mut device = Vec::new();
        let mut host = Vec::new();
        for (index, layer) in (0..).zip(&geometry.layers) {
            if layer.alias_of.is_some() {
                continue;
            }
            let group = &geometry.groups[layer.group.index()];
            let planes = map.planes(Rank(rank), DecoderLayer(index));
            assert!(!planes.is_empty());
            for plane in planes {
                let (hosts, devices) = (group.source_blocks, group.device_blocks);
                let ends = |count: u32| [0, 1, count - 1].into_iter().filter(move |block| *block < count);
                host.extend(ends(hosts).map(|block| (plane.host_at(SourceBlock(block)), plane.bytes)));
                device.extend(ends(devices).map(|block| (plane.device_at(DestinationBlock(block)), plane.bytes)));
            }
        }
        // X3: the header lies in front.
        assert!(host.iter().all(|(at, _)| *at >= POOL_AT));
        for (mut ranges, end) in [(host, map.pool_bytes()), (device, map.device_bytes())] {
            ranges.sort_unstable();
            ranges.dedup();
            assert!(
                ranges.iter().all(|(at, bytes)| *bytes > 0 && at + bytes <= end),
                "{ranges:?} in {end}"
            );
            assert!(
                ranges.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0),
                "{ranges:?}"
            );
        }
    }
}
