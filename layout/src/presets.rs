//! Geometries of known models, with the public figures they come from.
//!
//! Block sizes, pool orders and null blocks are those of vLLM: 16 tokens per block (64 for MLA, which its FlashMLA
//! kernels ask for), one tensor per layer on the device, block 0 as the null block. The host pool is block-first, so
//! that a block is one range. Pools are sized for a small machine; [`Sizing`] changes that.

use thiserror::Error;

use crate::geometry::{Attention, Dtype, Geometry, GeometryError, GroupSpec, KvKind, LayerSpec, PoolOrder, Sharding};
use crate::ids::{DecoderLayer, GroupId, PhysicalBlock, SourceBlock};

type Make = fn() -> Geometry;

const PRESETS: [(&str, Make); 8] = [
    ("llama-3.1-8b", llama_3_1_8b),
    ("llama-3.1-70b", llama_3_1_70b),
    ("qwen3-32b", qwen3_32b),
    ("gemma-3-27b", gemma_3_27b),
    ("gpt-oss-120b", gpt_oss_120b),
    ("deepseek-v3", deepseek_v3),
    ("sample", sample),
    ("sample-hybrid", sample_hybrid),
];

/// A name that is no preset. The user causes it.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("no preset is called {name:?}: did you mean {nearest:?}? There are {names}")]
pub struct PresetError {
    /// The name as given.
    pub name: String,
    /// The preset whose name is closest to it.
    pub nearest: &'static str,
    /// All names, separated by commas.
    pub names: String,
}

/// Names of all presets.
pub fn names() -> impl Iterator<Item = &'static str> {
    PRESETS.iter().map(|(name, _)| *name)
}

/// The preset `name`.
///
/// # Errors
/// [`PresetError`], with all names and the nearest one, for a name that is none.
pub fn preset(name: &str) -> Result<Geometry, PresetError> {
    if let Some((_, make)) = PRESETS.iter().find(|(known, _)| *known == name) {
        return Ok(make());
    }
    let nearest = names().min_by_key(|known| edits(name, known)).unwrap_or_default();
    let names = names().collect::<Vec<_>>().join(", ");
    Err(PresetError {
        name: name.to_owned(),
        nearest,
        names,
    })
}

/// Sizes that differ from those of a preset or a file. `None` keeps what the geometry says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sizing {
    /// N of every group: blocks of the host pool.
    pub source_blocks: Option<u32>,
    /// Size of the gather region of every group, in blocks.
    pub gather_blocks: Option<u32>,
    /// Blocks of the device pool of every group.
    pub device_blocks: Option<u32>,
    /// Tensor-parallel size.
    pub ranks: Option<u32>,
}

impl Sizing {
    /// `geometry` with these sizes, validated.
    ///
    /// # Errors
    /// As [`Geometry::validate`].
    pub fn apply(self, mut geometry: Geometry) -> Result<Geometry, GeometryError> {
        geometry.ranks = self.ranks.unwrap_or(geometry.ranks);
        for group in &mut geometry.groups {
            group.source_blocks = self.source_blocks.unwrap_or(group.source_blocks);
            group.gather_blocks = self.gather_blocks.unwrap_or(group.gather_blocks);
            group.device_blocks = self.device_blocks.unwrap_or(group.device_blocks);
        }
        geometry.validate()?;
        Ok(geometry)
    }
}

/// Meta's `Llama-3.1-8B/config.json`: 32 layers, 8 KV heads of hidden 4096 / 32 heads = 128, bfloat16. 131,072 bytes
/// per token.
fn llama_3_1_8b() -> Geometry {
    uniform(
        "llama-3.1-8b",
        1,
        32,
        KvKind::Separate {
            kv_heads: 8,
            head_dim: 128,
        },
    )
}

/// Meta's `Llama-3.1-70B/config.json`: 80 layers, 8 KV heads of hidden 8192 / 64 heads = 128, bfloat16; two ranks, as
/// its weights need two 80 GB GPUs. 327,680 bytes per token.
fn llama_3_1_70b() -> Geometry {
    uniform(
        "llama-3.1-70b",
        2,
        80,
        KvKind::Separate {
            kv_heads: 8,
            head_dim: 128,
        },
    )
}

/// Alibaba's `Qwen3-32B/config.json`: 64 layers, 8 KV heads, `head_dim` 128, bfloat16. 262,144 bytes per token.
fn qwen3_32b() -> Geometry {
    uniform(
        "qwen3-32b",
        1,
        64,
        KvKind::Separate {
            kv_heads: 8,
            head_dim: 128,
        },
    )
}

/// Google's `gemma-3-27b-it/config.json`: 62 layers, 16 KV heads, `head_dim` 128, `sliding_window` 1024 and
/// `sliding_window_pattern` 6, so every sixth layer is global, bfloat16. 507,904 bytes per token.
fn gemma_3_27b() -> Geometry {
    let kv = KvKind::Separate {
        kv_heads: 16,
        head_dim: 128,
    };
    windowed("gemma-3-27b", 62, 1024, 6, kv)
}

/// OpenAI's `gpt-oss-120b/config.json`: 36 layers, 8 KV heads, `head_dim` 64, `sliding_window` 128; `layer_types`
/// alternates and begins with sliding attention; KV in bfloat16. 73,728 bytes per token.
fn gpt_oss_120b() -> Geometry {
    let kv = KvKind::Separate {
        kv_heads: 8,
        head_dim: 64,
    };
    windowed("gpt-oss-120b", 36, 128, 2, kv)
}

/// DeepSeek's `DeepSeek-V3/config.json`: 61 layers, `kv_lora_rank` 512 and `qk_rope_head_dim` 64, which every rank
/// holds whole; KV in bfloat16; eight ranks, one node. 61 · 576 · 2 = 70,272 bytes per token.
fn deepseek_v3() -> Geometry {
    let mut geometry = uniform("deepseek-v3", 8, 61, KvKind::Latent { width: 512 + 64 });
    for group in &mut geometry.groups {
        group.block_tokens = 64;
    }
    geometry
}

/// Four layers small enough for a first run: 1 KiB per plane of a block.
fn sample() -> Geometry {
    uniform(
        "sample",
        1,
        4,
        KvKind::Separate {
            kv_heads: 2,
            head_dim: 16,
        },
    )
}

/// Every feature of a geometry at once, tiny, for tests: other block sizes, counts, orders and null blocks per group;
/// K and V apart, fused, latent and replicated; fewer heads than ranks; an aliased layer; a gather region.
fn sample_hybrid() -> Geometry {
    use PoolOrder::{BlockFirst, LayerFirst};
    let separate = KvKind::Separate {
        kv_heads: 8,
        head_dim: 4,
    };
    let fused = KvKind::Fused {
        kv_heads: 2,
        head_dim: 8,
    };
    let latent = KvKind::Latent { width: 20 };
    let whole = KvKind::Separate {
        kv_heads: 3,
        head_dim: 4,
    };
    Geometry {
        model: "sample-hybrid".to_owned(),
        dtype: Dtype::F16,
        ranks: 4,
        groups: vec![
            GroupSpec {
                gather_blocks: 8,
                source_null: Some(SourceBlock(0)),
                ..group(16, Attention::Full, (48, LayerFirst), (24, LayerFirst))
            },
            group(
                8,
                Attention::SlidingWindow { window_tokens: 32 },
                (40, BlockFirst),
                (20, LayerFirst),
            ),
            GroupSpec {
                device_null: None,
                ..group(32, Attention::Full, (32, BlockFirst), (16, BlockFirst))
            },
            GroupSpec {
                device_null: Some(PhysicalBlock(11)),
                ..group(4, Attention::Full, (24, LayerFirst), (12, BlockFirst))
            },
        ],
        layers: vec![
            layer(0, separate),
            layer(1, fused),
            layer(2, latent),
            LayerSpec {
                sharding: Sharding::Replicated,
                ..layer(3, whole)
            },
            layer(0, separate),
            layer(1, separate),
            LayerSpec {
                alias_of: Some(DecoderLayer(0)),
                ..layer(0, separate)
            },
            layer(2, latent),
            layer(3, fused),
        ],
    }
}

/// One full-attention group of `layers` equal layers.
fn uniform(model: &str, ranks: u32, layers: usize, kv: KvKind) -> Geometry {
    Geometry {
        model: model.to_owned(),
        dtype: Dtype::Bf16,
        ranks,
        groups: vec![vllm_group(Attention::Full)],
        layers: vec![layer(0, kv); layers],
    }
}

/// Group 0 full, group 1 sliding: every `period`-th layer is full, the others have the window.
fn windowed(model: &str, layers: u32, window_tokens: u32, period: u32, kv: KvKind) -> Geometry {
    Geometry {
        model: model.to_owned(),
        dtype: Dtype::Bf16,
        ranks: 1,
        groups: vec![
            vllm_group(Attention::Full),
            vllm_group(Attention::SlidingWindow { window_tokens }),
        ],
        layers: (1..=layers)
            .map(|nth| layer(u32::from(!nth.is_multiple_of(period)), kv))
            .collect(),
    }
}

fn vllm_group(attention: Attention) -> GroupSpec {
    group(
        16,
        attention,
        (256, PoolOrder::BlockFirst),
        (128, PoolOrder::LayerFirst),
    )
}

fn group(block_tokens: u32, attention: Attention, host: (u32, PoolOrder), device: (u32, PoolOrder)) -> GroupSpec {
    GroupSpec {
        block_tokens,
        attention,
        source_blocks: host.0,
        gather_blocks: 0,
        device_blocks: device.0,
        source_null: None,
        device_null: Some(PhysicalBlock(0)),
        host_order: host.1,
        device_order: device.1,
    }
}

fn layer(group: u32, kv: KvKind) -> LayerSpec {
    LayerSpec {
        group: GroupId(group),
        kv,
        sharding: Sharding::Heads,
        alias_of: None,
    }
}

/// Levenshtein distance: insertions, deletions and replacements from `from` to `to`.
fn edits(from: &str, to: &str) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (done, a) in from.bytes().enumerate() {
        let mut left = done + 1;
        let mut next = vec![left];
        for (above, b) in row.windows(2).zip(to.bytes()) {
            let &[diagonal, above] = above else { continue };
            left = (diagonal + usize::from(a != b)).min(above + 1).min(left + 1);
            next.push(left);
        }
        row = next;
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Rank;
    use crate::planes::GeometryMap;

    #[test]
    fn x8_each_preset_has_the_bytes_per_token_that_its_model_is_known_for() {
        // 2 · layers · KV heads · head dim · bytes, except where a latent replaces both K and V.
        for (name, bytes) in [
            ("llama-3.1-8b", 131_072),
            ("llama-3.1-70b", 327_680),
            ("qwen3-32b", 262_144),
            ("gemma-3-27b", 507_904),
            ("gpt-oss-120b", 73_728),
            ("deepseek-v3", 61 * 576 * 2),
            ("sample", 512),
        ] {
            let geometry = preset(name).unwrap();
            assert_eq!(geometry.token_bytes(), bytes, "{name}");
            let map = GeometryMap::new(&geometry).unwrap();
            let per_block: u64 = (0..geometry.groups.len() as u32)
                .map(|g| map.block_bytes(GroupId(g)))
                .sum();
            assert_eq!(per_block, bytes * u64::from(geometry.groups[0].block_tokens), "{name}");
        }
    }

    #[test]
    fn x8_each_preset_is_valid_survives_toml_and_maps_every_layer_of_every_rank() {
        for name in names() {
            let geometry = preset(name).unwrap();
            assert_eq!(geometry.model, name);
            assert_eq!(
                Geometry::from_toml(&toml::to_string(&geometry).unwrap()).unwrap(),
                geometry,
                "{name}"
            );
            let map = GeometryMap::new(&geometry).unwrap();
            for rank in (0..geometry.ranks).map(Rank) {
                for (l, layer) in geometry.layers.iter().enumerate() {
                    let planes = map.planes(rank, DecoderLayer(l as u32));
                    assert_eq!(planes.len(), layer.kv.planes() as usize, "{name} rank {rank} layer {l}");
                }
            }
        }
    }

    #[test]
    fn x8_windowed_models_have_their_global_layers_where_the_model_has_them() {
        let full = |name| -> Vec<usize> {
            let layers = preset(name).unwrap().layers;
            (0..layers.len()).filter(|&l| layers[l].group == GroupId(0)).collect()
        };
        assert_eq!(
            full("gemma-3-27b"),
            [5, 11, 17, 23, 29, 35, 41, 47, 53, 59],
            "five local layers per global one"
        );
        assert_eq!(full("gpt-oss-120b"), (0..18).map(|n| 2 * n + 1).collect::<Vec<_>>());
        let window = |name: &str| preset(name).unwrap().groups[1].attention;
        assert_eq!(window("gemma-3-27b"), Attention::SlidingWindow { window_tokens: 1024 });
        assert_eq!(window("gpt-oss-120b"), Attention::SlidingWindow { window_tokens: 128 });
    }

    #[test]
    fn x8_a_latent_layer_is_whole_on_every_rank_and_heads_are_split() {
        let map = GeometryMap::new(&preset("deepseek-v3").unwrap()).unwrap();
        let first = map.planes(Rank(0), DecoderLayer(60));
        assert_eq!(map.layer(DecoderLayer(60)).unwrap().shards, 1);
        assert!((1..8).all(|rank| map.planes(Rank(rank), DecoderLayer(60)) == first));
        let map = GeometryMap::new(&preset("llama-3.1-70b").unwrap()).unwrap();
        assert_eq!(
            map.shard_block_bytes(Rank(1), DecoderLayer(79)),
            2 * 16 * 4 * 128 * 2,
            "4 of 8 heads"
        );
    }

    #[test]
    fn x8_the_hybrid_sample_has_every_feature() {
        let geometry = preset("sample-hybrid").unwrap();
        let map = GeometryMap::new(&geometry).unwrap();
        let any = |has: fn(&LayerSpec) -> bool| geometry.layers.iter().any(has);
        assert!(any(|layer| matches!(layer.kv, KvKind::Separate { .. })));
        assert!(any(|layer| matches!(layer.kv, KvKind::Fused { .. })));
        assert!(any(|layer| matches!(layer.kv, KvKind::Latent { .. })));
        assert!(any(|layer| layer.sharding == Sharding::Replicated) && any(|layer| layer.alias_of.is_some()));
        assert_eq!(
            map.layer(DecoderLayer(1)).unwrap().shards,
            2,
            "two heads, each on two of four ranks"
        );
        assert_eq!(map.layer(DecoderLayer(6)), map.layer(DecoderLayer(0)));
        let mut sizes: Vec<u32> = geometry.groups.iter().map(|group| group.block_tokens).collect();
        sizes.sort_unstable();
        sizes.dedup();
        assert_eq!(sizes.len(), 4);
    }

    #[test]
    fn x8_sizing_changes_the_sizes_that_it_names_and_no_other() {
        let sizing = Sizing {
            source_blocks: Some(99),
            ranks: Some(4),
            ..Sizing::default()
        };
        let sized = sizing.apply(preset("llama-3.1-8b").unwrap()).unwrap();
        assert_eq!(
            (
                sized.groups[0].source_blocks,
                sized.groups[0].device_blocks,
                sized.ranks
            ),
            (99, 128, 4)
        );
        let refused = Sizing {
            ranks: Some(3),
            ..Sizing::default()
        }
        .apply(sized)
        .unwrap_err();
        assert!(
            refused.to_string().contains("multiple or a divisor of ranks = 3"),
            "{refused}"
        );
    }

    #[test]
    fn x8_an_unknown_preset_is_refused_with_the_nearest_name_and_all_names() {
        for (name, nearest) in [
            ("llama-3.1-7b", "llama-3.1-8b"),
            ("gptoss120b", "gpt-oss-120b"),
            ("samples", "sample"),
        ] {
            let refused = preset(name).unwrap_err();
            assert_eq!(refused.nearest, nearest);
            assert!(names().all(|known| refused.to_string().contains(known)), "{refused}");
        }
        assert_eq!(edits("kitten", "sitting"), 3);
        assert_eq!((edits("", "abc"), edits("abc", "")), (3, 3));
    }
}
