//! The KV that is moved: real numbers, so that attention over it means something, and where each head's lie in a block.

use kvsluice_cpu_worker::compare::attention::encode;
use kvsluice_cpu_worker::compare::bytes::HeadKv;
use kvsluice_cpu_worker::compare::logits::Dtype;
use kvsluice_layout::content;
use kvsluice_layout::geometry::{KvKind, LayerSpec};
use kvsluice_layout::ids::{DecoderLayer, LogicalBlock, Rank, TokenCount};
use kvsluice_layout::planes::GeometryMap;

/// Makes the bytes of every block of the sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    pub(super) seed: u64,
    pub(super) dtype: Dtype,
}

impl Source {
    /// One plane of one shard of a block: numbers in [−2, 2), by place.
    pub(super) fn plane(&self, block: LogicalBlock, (tensor, shard, index): (u32, u32, u32), bytes: u64) -> Vec<u8> {
        let elements = bytes as usize / element_bytes(self.dtype);
        let mut words = vec![0; elements * 4];
        let tag = content::seed(self.seed, block.get(), 0, 0);
        content::fill(content::seed(tag, tensor, shard, index), &mut words);
        let (words, _) = words.as_chunks::<4>();
        let value = |word: &[u8; 4]| (u32::from_le_bytes(*word) >> 8) as f32 / (1 << 22) as f32 - 2.0;
        encode(self.dtype, words.iter().map(value))
    }

    /// The planes that `rank` holds of a block of `layer`.
    pub(super) fn planes(
        &self,
        map: &GeometryMap,
        rank: Rank,
        layer: DecoderLayer,
        block: LogicalBlock,
    ) -> Vec<Vec<u8>> {
        let Some(of) = map.layer(layer) else { return Vec::new() };
        let shard = rank.get() * of.shards / map.geometry().ranks;
        let planes = (0..).zip(map.planes(rank, layer));
        planes
            .map(|(index, plane)| self.plane(block, (of.tensor, shard, index), plane.bytes))
            .collect()
    }
}

pub(super) fn element_bytes(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => 4,
        Dtype::Bf16 => 2,
    }
}

/// How the heads of one layer lie in the blocks of one rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Shape {
    /// KV heads of the rank; a latent counts as one.
    pub(super) heads: usize,
    /// Bytes of one token of K, and as many of V, of one head.
    half_bytes: usize,
    block_tokens: usize,
    /// K and V are two planes, and not the two halves of one.
    separate: bool,
    /// K and V of a token are side by side.
    latent: bool,
}

impl Shape {
    /// `None` for a layer that the geometry lacks.
    pub(super) fn of(map: &GeometryMap, layer: DecoderLayer, dtype: Dtype) -> Option<Self> {
        let spec: &LayerSpec = map.geometry().layer(layer)?;
        let shards = spec.shards(map.geometry().ranks);
        let (heads, half) = match spec.kv {
            KvKind::Separate { kv_heads, head_dim } | KvKind::Fused { kv_heads, head_dim } => {
                (kv_heads / shards, head_dim as usize * element_bytes(dtype))
            }
            KvKind::Latent { width } => (1, width as usize * element_bytes(dtype) / 2),
        };
        Some(Self {
            heads: heads as usize,
            half_bytes: half,
            block_tokens: map.geometry().group(spec.group)?.block_tokens as usize,
            separate: matches!(spec.kv, KvKind::Separate { .. }),
            latent: matches!(spec.kv, KvKind::Latent { .. }),
        })
    }

    /// Bytes of one token of one head: K, then V.
    pub(super) fn token_bytes(&self) -> usize {
        2 * self.half_bytes
    }

    /// Bytes of one block of one head.
    pub(super) fn block_bytes(&self) -> usize {
        self.block_tokens * self.token_bytes()
    }

    /// Appends the tokens of `head` in a block, whose planes are given, to `out`: K, then V, token by token.
    fn append(&self, head: usize, planes: &[Vec<u8>], out: &mut Vec<u8>) {
        let half = self.half_bytes;
        let first = planes.first().map_or(&[][..], Vec::as_slice);
        let (keys, values) = match planes {
            [keys, values] if self.separate => (keys.as_slice(), values.as_slice()),
            _ => first.split_at(first.len() / 2),
        };
        for token in 0..self.block_tokens {
            let at = (token * self.heads + head) * half;
            let parts = if self.latent {
                [
                    first.get(2 * at..2 * at + half),
                    first.get(2 * at + half..2 * (at + half)),
                ]
            } else {
                [keys.get(at..at + half), values.get(at..at + half)]
            };
            parts.into_iter().flatten().for_each(|part| out.extend_from_slice(part));
        }
    }
}

/// All KV of one layer on one rank, in slot order.
#[derive(Clone, Debug)]
pub(super) struct LayerKv {
    pub(super) rank: Rank,
    pub(super) layer: DecoderLayer,
    pub(super) shape: Shape,
    pub(super) valid: TokenCount,
    /// By head.
    pub(super) heads: Vec<Vec<u8>>,
}

impl LayerKv {
    /// The heads of blocks whose planes are given in slot order.
    pub(super) fn new(
        (rank, layer, shape): (Rank, DecoderLayer, Shape),
        valid: TokenCount,
        blocks: impl Iterator<Item = Vec<Vec<u8>>>,
    ) -> Self {
        let mut heads = vec![Vec::new(); shape.heads];
        for planes in blocks {
            for (head, out) in heads.iter_mut().enumerate() {
                shape.append(head, &planes, out);
            }
        }
        Self {
            rank,
            layer,
            shape,
            valid,
            heads,
        }
    }

    /// The same blocks in another order of their slots.
    pub(super) fn in_slot_order(&self, slots: impl Iterator<Item = usize> + Clone) -> Self {
        let size = self.shape.block_bytes();
        let of_head = |head: &Vec<u8>| {
            let blocks = slots
                .clone()
                .filter_map(|slot| head.get(slot * size..(slot + 1) * size));
            blocks.flatten().copied().collect()
        };
        Self {
            heads: self.heads.iter().map(of_head).collect(),
            ..*self
        }
    }

    /// The heads as the comparison takes them, numbered across the ranks.
    pub(super) fn head_kv(&self) -> impl Iterator<Item = HeadKv<'_>> {
        (0..).zip(&self.heads).map(|(head, bytes)| HeadKv {
            layer: self.layer,
            head: self.rank.get() * self.shape.heads as u32 + head,
            token_bytes: self.shape.token_bytes(),
            valid: self.valid,
            bytes,
        })
    }
}
