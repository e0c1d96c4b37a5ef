//! The geometry: which KV a model keeps, how it is grouped into blocks, and which rank holds what (X8).
//!
//! A geometry is data: written once, in a preset or a TOML file, checked by [`Geometry::validate`], and fixed from then
//! on, because [`GeometryMap`](crate::planes::GeometryMap) copies it and hands out only shared references. Every
//! address of a channel follows from it, so both sides compare its hash before they exchange a byte (R20).

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::ids::{DecoderLayer, GroupId, PhysicalBlock, SourceBlock};

mod validate;

/// Most decoder layers of one geometry.
pub const MAX_LAYERS: usize = 1024;
/// Most KV-cache groups of one geometry.
pub const MAX_GROUPS: usize = 64;
/// Most blocks in one pool of one group. Far below `u32::MAX`, so that an id never collides with a sentinel.
pub const MAX_BLOCKS: u32 = 1 << 28;
/// Most bytes in one pool: what a 47-bit user address space can map.
pub const MAX_POOL_BYTES: u64 = 1 << 47;
/// Most bytes in the name of a model.
pub const MAX_MODEL_NAME_BYTES: usize = 256;

/// The KV cache of one model, on one host: what the blocks of a channel are.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Geometry {
    /// Name of the model, for people and for the geometry hash; 1 to [`MAX_MODEL_NAME_BYTES`] bytes.
    pub model: String,
    /// Type of every KV element.
    pub dtype: Dtype,
    /// Tensor-parallel size: number of workers of the channel, 1 to [`MAX_RANKS`](crate::ids::MAX_RANKS).
    pub ranks: u32,
    /// KV-cache groups, by [`GroupId`].
    pub groups: Vec<GroupSpec>,
    /// Decoder layers, by [`DecoderLayer`].
    pub layers: Vec<LayerSpec>,
}

/// Type of one KV element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// IEEE single precision, 4 bytes.
    F32,
    /// IEEE half precision, 2 bytes.
    F16,
    /// bfloat16, 2 bytes.
    Bf16,
    /// 8-bit float of either kind, 1 byte.
    Fp8,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Fp8 => 1,
        }
    }
}

/// Layers that share one allocation of blocks: one block id names the KV of all of them (R54).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GroupSpec {
    /// Block size B in tokens. Groups of one model may differ.
    pub block_tokens: u32,
    /// Which tokens the layers of this group attend to.
    #[serde(default)]
    pub attention: Attention,
    /// N: blocks of the host pool, 1 to [`MAX_BLOCKS`].
    pub source_blocks: u32,
    /// Size of the gather region [K, N), K = N − this: where the producer gathers rows of source kind *copy*. 0 by
    /// default, so K = N (R3).
    #[serde(default)]
    pub gather_blocks: u32,
    /// Blocks of each rank's device pool, 1 to [`MAX_BLOCKS`].
    pub device_blocks: u32,
    /// The host block that no plan may name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source_null: Option<SourceBlock>,
    /// The device block that no plan may name. vLLM keeps block 0 for this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_null: Option<PhysicalBlock>,
    /// Order of the host pool.
    #[serde(default)]
    pub host_order: PoolOrder,
    /// Order of each rank's device pool.
    #[serde(default)]
    pub device_order: PoolOrder,
}

impl GroupSpec {
    /// K: the first block of the gather region [K, N).
    pub const fn gather_start(&self) -> SourceBlock {
        SourceBlock(self.source_blocks.saturating_sub(self.gather_blocks))
    }
}

/// Which tokens a group attends to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Attention {
    /// All earlier tokens.
    #[default]
    Full,
    /// The last `window_tokens` tokens.
    SlidingWindow {
        /// Width of the window in tokens.
        window_tokens: u32,
    },
}

/// What varies slowest in a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolOrder {
    /// Each plane of each layer holds all its blocks in a row: the tensors of an engine.
    #[default]
    LayerFirst,
    /// Each block holds all its layers in a row: one contiguous range per block.
    BlockFirst,
}

/// One decoder layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LayerSpec {
    /// The group whose blocks this layer uses.
    pub group: GroupId,
    /// Shape of the layer's KV.
    pub kv: KvKind,
    /// How ranks share the KV heads. Without meaning for [`KvKind::Latent`], which every rank holds whole.
    #[serde(default)]
    pub sharding: Sharding,
    /// An earlier layer of the same group and shape whose tensor this layer uses. It has no memory of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub alias_of: Option<DecoderLayer>,
}

/// Shape of the KV of one layer. A plane is what lies contiguous for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum KvKind {
    /// Two planes, K and V, each `[block_tokens, kv_heads, head_dim]`.
    Separate {
        /// KV heads of the whole model.
        kv_heads: u32,
        /// Elements of one head.
        head_dim: u32,
    },
    /// One plane `[2, block_tokens, kv_heads, head_dim]`: K and V of one block side by side.
    Fused {
        /// KV heads of the whole model.
        kv_heads: u32,
        /// Elements of one head.
        head_dim: u32,
    },
    /// One plane `[block_tokens, width]`: the compressed KV of multi-head latent attention.
    Latent {
        /// Elements of one token: latent rank plus rotary part.
        width: u32,
    },
}

impl KvKind {
    /// Number of planes of one block.
    pub const fn planes(self) -> u32 {
        match self {
            Self::Separate { .. } => 2,
            Self::Fused { .. } | Self::Latent { .. } => 1,
        }
    }

    /// Elements of one token, all heads: 2 · kv_heads · head_dim, or the latent width. Saturates.
    pub const fn token_elements(self) -> u64 {
        match self {
            Self::Separate { kv_heads, head_dim } | Self::Fused { kv_heads, head_dim } => {
                2u64.saturating_mul(kv_heads as u64 * head_dim as u64)
            }
            Self::Latent { width } => width as u64,
        }
    }
}

/// How ranks share the KV heads of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Sharding {
    /// Each rank holds kv_heads / ranks heads; with more ranks than heads, ranks / kv_heads ranks hold the same head.
    #[default]
    Heads,
    /// Every rank holds all heads.
    Replicated,
}

impl LayerSpec {
    /// Number of distinct shards over `ranks` ranks: min(ranks, kv_heads) by heads, 1 where every rank holds all.
    pub fn shards(&self, ranks: u32) -> u32 {
        match (self.kv, self.sharding) {
            (KvKind::Separate { kv_heads, .. } | KvKind::Fused { kv_heads, .. }, Sharding::Heads) => {
                ranks.min(kv_heads)
            }
            (KvKind::Separate { .. } | KvKind::Fused { .. }, Sharding::Replicated) | (KvKind::Latent { .. }, _) => 1,
        }
    }
}

/// A geometry that cannot be used. The author of the preset or of the TOML file causes it.
#[derive(Debug, Error, PartialEq)]
pub enum GeometryError {
    /// A field has a value that its rule does not allow.
    #[error("geometry field {field}: found {found}, expected {expected}; {remedy}")]
    Field {
        /// Path of the field, as in the TOML file.
        field: String,
        /// Its value.
        found: String,
        /// What the rule asks for.
        expected: String,
        /// What to change.
        remedy: &'static str,
    },
    /// A pool that this geometry describes is larger than a process can map.
    #[error("geometry field {field}: found a size above {MAX_POOL_BYTES} bytes, expected at most that; {remedy}")]
    TooLarge {
        /// What grew too large.
        field: String,
        /// What to change.
        remedy: &'static str,
    },
    /// The text is not TOML, or not a geometry.
    #[error("geometry text: {0}")]
    Toml(#[from] toml::de::Error),
}

impl Geometry {
    /// Reads and validates a geometry from TOML.
    ///
    /// # Errors
    /// [`GeometryError::Toml`] for text that is not a geometry, else as [`Geometry::validate`].
    pub fn from_toml(text: &str) -> Result<Self, GeometryError> {
        let geometry: Self = toml::from_str(text)?;
        geometry.validate()?;
        Ok(geometry)
    }

    /// The group `group`, if there is one.
    pub fn group(&self, group: GroupId) -> Option<&GroupSpec> {
        self.groups.get(group.index())
    }

    /// The layer `layer`, if there is one.
    pub fn layer(&self, layer: DecoderLayer) -> Option<&LayerSpec> {
        self.layers.get(layer.index())
    }

    /// Bytes of KV per token over all layers and ranks, aliased layers counted once. Saturates.
    pub fn token_bytes(&self) -> u64 {
        let owners = self.layers.iter().filter(|layer| layer.alias_of.is_none());
        owners
            .map(|layer| layer.kv.token_elements().saturating_mul(self.dtype.bytes()))
            .fold(0, u64::saturating_add)
    }
}
