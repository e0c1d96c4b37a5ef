//! Teacher forcing: the same tokens are put in front of every way, and the logits at each position are compared (R12).

use anyhow::{Context, Result};
use kvsluice_cpu_worker::compare::attention::TinyAttention;
use kvsluice_cpu_worker::compare::logits::{Dtype, Trace};
use kvsluice_layout::content;
use kvsluice_layout::ids::{DecoderLayer, TokenPosition};
use kvsluice_layout::planes::GeometryMap;

use super::kv::{LayerKv, element_bytes};
use super::play::Held;
use super::selection::unit;

/// Tokens that the model knows.
const VOCABULARY: usize = 32;

/// The model that is forced: a tiny attention per layer, whose logits are added up.
pub(super) struct Forced {
    dtype: Dtype,
    seed: u64,
    /// Positions that are forced in each round.
    positions: u32,
    layers: Vec<Layer>,
}

/// One layer, with the ranks' shards of it side by side.
struct Layer {
    number: DecoderLayer,
    /// Ranks that hold shards which no rank before them holds.
    ranks: Vec<u32>,
    width: usize,
    attention: TinyAttention,
}

impl Forced {
    /// A model for the layers of `map`, whose weights and tokens follow from `seed`.
    pub(super) fn new(map: &GeometryMap, dtype: Dtype, seed: u64, positions: u32, held: &Held) -> Result<Self> {
        let ranks = map.geometry().ranks;
        let mut layers = Vec::new();
        for (number, _) in (0..).map(DecoderLayer).zip(&map.geometry().layers) {
            let shards = map.layer(number).context("a layer without memory")?.shards;
            let shard = |rank: u32| rank * shards / ranks;
            let firsts: Vec<u32> = (0..ranks)
                .filter(|rank| *rank == 0 || shard(*rank) != shard(rank - 1))
                .collect();
            let of_layer = held
                .found
                .iter()
                .find(|kv| kv.layer == number)
                .context("a layer that was not read")?;
            let heads = of_layer.shape.heads * firsts.len();
            let head_dim = of_layer.shape.token_bytes() / 2 / element_bytes(dtype);
            let weights = content::seed(seed, number.get(), 0, 3);
            layers.push(Layer {
                number,
                ranks: firsts,
                width: heads * head_dim,
                attention: TinyAttention::new(dtype, heads, head_dim, VOCABULARY, weights),
            });
        }
        Ok(Self {
            dtype,
            seed,
            positions,
            layers,
        })
    }

    /// The logits over what a way's attention found, in slot order.
    pub(super) fn found(&self, rounds: &[Held]) -> Result<Trace> {
        self.trace(rounds.iter().map(|held| held.found.clone()))
    }

    /// The logits over the same blocks in the order of the sequence, as they were made on the host.
    pub(super) fn in_order(&self, rounds: &[Held]) -> Result<Trace> {
        self.trace(rounds.iter().map(Held::in_order))
    }

    fn trace(&self, rounds: impl Iterator<Item = Vec<LayerKv>>) -> Result<Trace> {
        let (mut tokens, mut logits) = (Vec::new(), Vec::new());
        for kv in rounds {
            for _ in 0..self.positions {
                let position = tokens.len() as u32;
                let token = (content::seed(self.seed, 0, position, 1) % VOCABULARY as u64) as u32;
                tokens.push(token);
                logits.push((TokenPosition(position), self.logits(&kv, position, token)?));
            }
        }
        Ok(Trace {
            dtype: self.dtype,
            tokens,
            logits,
        })
    }

    fn logits(&self, kv: &[LayerKv], position: u32, token: u32) -> Result<Vec<f32>> {
        let mut sum = vec![0.0; VOCABULARY];
        for layer in &self.layers {
            let of_layer = kv
                .iter()
                .filter(|kv| kv.layer == layer.number && layer.ranks.contains(&kv.rank.get()));
            let mut heads: Vec<&[u8]> = Vec::new();
            let mut valid = None;
            for kv in of_layer {
                heads.extend(kv.heads.iter().map(Vec::as_slice));
                valid = Some(kv.valid);
            }
            let draw = |at: usize| {
                unit(content::seed(
                    self.seed ^ u64::from(position),
                    layer.number.get(),
                    token,
                    at as u32,
                ))
            };
            let query: Vec<f32> = (0..layer.width).map(|at| (draw(at) * 2.0 - 1.0) as f32).collect();
            let valid = valid.context("a layer that was not read")?;
            let of_layer = layer.attention.logits(&query, &heads, valid)?;
            sum.iter_mut().zip(of_layer).for_each(|(sum, logit)| *sum += logit);
        }
        Ok(sum)
    }
}
