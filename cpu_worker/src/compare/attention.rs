//! A small attention layer on the CPU: turns KV bytes into logits, in f32 or with every step rounded to bf16.
//!
//! softmax(q·K / √d)·V per head, the heads side by side, times an output matrix. Small enough to be read, real enough
//! that a block in the wrong place, a stale row or a missing token shows in the logits.
#![forbid(unsafe_code)]

use kvsluice_layout::ids::TokenCount;
use thiserror::Error;

use super::logits::Dtype;

/// A layer with made-up weights.
#[derive(Clone, Debug)]
pub struct TinyAttention {
    dtype: Dtype,
    heads: usize,
    head_dim: usize,
    /// Vocabulary × (heads · head_dim), row by row.
    output: Vec<f32>,
}

/// Why there are no logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AttentionError {
    /// The query or the number of heads does not fit the layer.
    #[error("{found} {what}, the layer has {expected}")]
    Shape {
        /// What was counted.
        what: &'static str,
        /// What the layer has.
        expected: usize,
        /// What was given.
        found: usize,
    },
    /// A head has fewer bytes than the valid tokens need.
    #[error("head {head}: {found} bytes, {valid} tokens need {expected}")]
    Short {
        /// The head.
        head: usize,
        /// Valid tokens.
        valid: TokenCount,
        /// Bytes needed.
        expected: usize,
        /// Bytes given.
        found: usize,
    },
    /// Attention over nothing has no value.
    #[error("no valid token to attend to")]
    Empty,
}

impl TinyAttention {
    /// A layer whose weights follow from `seed`.
    pub fn new(dtype: Dtype, heads: usize, head_dim: usize, vocabulary: usize, seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let output = (0..vocabulary * heads * head_dim)
            .map(|_| round(dtype, rng.f32() - 0.5))
            .collect();
        Self {
            dtype,
            heads,
            head_dim,
            output,
        }
    }

    /// Bytes of one token of one head: K, then V, little-endian.
    pub fn token_bytes(&self) -> usize {
        2 * self.head_dim * element_bytes(self.dtype)
    }

    /// Logits of one query over the first `valid` tokens of each head's bytes.
    pub fn logits(&self, query: &[f32], heads: &[&[u8]], valid: TokenCount) -> Result<Vec<f32>, AttentionError> {
        let width = self.heads * self.head_dim;
        for (what, expected, found) in [
            ("heads", self.heads, heads.len()),
            ("query elements", width, query.len()),
        ] {
            if expected != found {
                return Err(AttentionError::Shape { what, expected, found });
            }
        }
        if valid.get() == 0 || width == 0 {
            return Err(AttentionError::Empty);
        }
        let mut attended = Vec::with_capacity(width);
        for (head, (bytes, query)) in heads.iter().zip(query.chunks_exact(self.head_dim)).enumerate() {
            let expected = valid.index() * self.token_bytes();
            let short = AttentionError::Short {
                head,
                valid,
                expected,
                found: bytes.len(),
            };
            let bytes = bytes.get(..expected).ok_or(short)?;
            self.attend(query, bytes, &mut attended);
        }
        Ok(self
            .output
            .chunks_exact(width)
            .map(|row| self.dot(row.iter().copied(), attended.iter().copied()))
            .collect())
    }

    fn attend(&self, query: &[f32], bytes: &[u8], attended: &mut Vec<f32>) {
        let half = self.token_bytes() / 2;
        let tokens = || bytes.chunks_exact(self.token_bytes()).map(|token| token.split_at(half));
        let scale = (self.head_dim as f32).sqrt();
        let scores: Vec<f32> = tokens()
            .map(|(key, _)| self.round(self.dot(query.iter().copied(), self.decode(key)) / scale))
            .collect();
        let max = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let weights: Vec<f32> = scores.iter().map(|score| self.round((score - max).exp())).collect();
        let sum = weights.iter().fold(0.0, |sum, weight| self.round(sum + weight));
        let start = attended.len();
        attended.resize(start + self.head_dim, 0.0);
        for ((_, value), weight) in tokens().zip(&weights) {
            let share = self.round(weight / sum);
            for (out, value) in attended.iter_mut().skip(start).zip(self.decode(value)) {
                *out = self.round(*out + self.round(share * value));
            }
        }
    }

    fn dot(&self, a: impl Iterator<Item = f32>, b: impl Iterator<Item = f32>) -> f32 {
        a.zip(b).fold(0.0, |sum, (a, b)| self.round(sum + self.round(a * b)))
    }

    fn decode(&self, bytes: &[u8]) -> impl Iterator<Item = f32> {
        bytes
            .chunks_exact(element_bytes(self.dtype))
            .map(|element| match *element {
                [a, b, c, d] => f32::from_le_bytes([a, b, c, d]),
                [c, d] => f32::from_le_bytes([0, 0, c, d]),
                _ => f32::NAN,
            })
    }

    fn round(&self, value: f32) -> f32 {
        round(self.dtype, value)
    }
}

fn element_bytes(dtype: Dtype) -> usize {
    match dtype {
        Dtype::F32 => 4,
        Dtype::Bf16 => 2,
    }
}

/// The nearest number of the dtype, ties to even.
fn round(dtype: Dtype, value: f32) -> f32 {
    match dtype {
        Dtype::F32 => value,
        Dtype::Bf16 if value.is_nan() => value,
        Dtype::Bf16 => {
            let bits = value.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
            f32::from_bits(rounded & 0xffff_0000)
        }
    }
}

/// The bytes of `values` in the dtype, little-endian: what a KV row holds.
pub fn encode(dtype: Dtype, values: impl IntoIterator<Item = f32>) -> Vec<u8> {
    let mut bytes = Vec::new();
    for value in values {
        let [a, b, c, d] = round(dtype, value).to_le_bytes();
        match dtype {
            Dtype::F32 => bytes.extend([a, b, c, d]),
            Dtype::Bf16 => bytes.extend([c, d]),
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use kvsluice_layout::ids::TokenPosition;

    use super::*;
    use crate::compare::logits::{Tolerance, Tolerances, Trace, compare_logits};

    const HEADS: usize = 2;
    const HEAD_DIM: usize = 4;
    const TOKENS: u32 = 12;

    fn declared() -> Tolerances {
        Tolerances::declare([
            (
                Dtype::F32,
                Tolerance {
                    logit: 1e-5,
                    logprob: 1e-5,
                    mass: 1e-5,
                },
            ),
            (
                Dtype::Bf16,
                Tolerance {
                    logit: 0.03,
                    logprob: 0.03,
                    mass: 0.03,
                },
            ),
        ])
    }

    /// KV of every head, from a seed.
    fn kv(dtype: Dtype) -> Vec<Vec<u8>> {
        let mut rng = fastrand::Rng::with_seed(5);
        let elements = 2 * HEAD_DIM * TOKENS as usize;
        (0..HEADS)
            .map(|_| encode(dtype, (0..elements).map(|_| rng.f32() * 4.0 - 2.0).collect::<Vec<_>>()))
            .collect()
    }

    /// The layer forced along six tokens: position j attends to the first 6 + j tokens of `order`.
    fn forced(dtype: Dtype, kv: &[Vec<u8>], order: &[usize]) -> Trace {
        let layer = TinyAttention::new(dtype, HEADS, HEAD_DIM, 16, 8);
        let gathered: Vec<Vec<u8>> = kv
            .iter()
            .map(|head| {
                let token = |index: &usize| &head[index * layer.token_bytes()..(index + 1) * layer.token_bytes()];
                order.iter().flat_map(token).copied().collect()
            })
            .collect();
        let heads: Vec<&[u8]> = gathered.iter().map(Vec::as_slice).collect();
        let tokens = vec![3, 1, 4, 1, 5, 9];
        let logits = (0..6)
            .map(|position| {
                let mut rng = fastrand::Rng::with_seed(u64::from(tokens[position as usize]) + 100);
                let query: Vec<f32> = (0..HEADS * HEAD_DIM)
                    .map(|_| round(dtype, rng.f32() * 2.0 - 1.0))
                    .collect();
                let logits = layer.logits(&query, &heads, TokenCount(6 + position)).unwrap();
                (TokenPosition(position), logits)
            })
            .collect();
        Trace { dtype, tokens, logits }
    }

    fn in_order() -> Vec<usize> {
        (0..TOKENS as usize).collect()
    }

    #[test]
    fn r11_r12_the_same_kv_gives_the_same_logits_bit_for_bit() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let kv = kv(dtype);
            let (a, b) = (forced(dtype, &kv, &in_order()), forced(dtype, &kv, &in_order()));
            assert_eq!(a, b);
            assert!(compare_logits(&a, &b, &declared()).unwrap().passes());
        }
    }

    #[test]
    fn r69_another_order_of_the_same_tokens_is_within_tolerance_and_not_equal() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let kv = kv(dtype);
            let mut order = in_order();
            order[..6].reverse(); // sums round in another order
            let (a, b) = (forced(dtype, &kv, &in_order()), forced(dtype, &kv, &order));
            assert_ne!(a, b);
            let report = compare_logits(&a, &b, &declared()).unwrap();
            assert!(report.passes(), "{dtype:?}: {report:?}");
        }
    }

    #[test]
    fn r12_a_token_in_the_wrong_place_violates_the_tolerance() {
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let kv = kv(dtype);
            let mut order = in_order();
            order.swap(2, 11); // a row of another block within the valid range
            let report = compare_logits(
                &forced(dtype, &kv, &in_order()),
                &forced(dtype, &kv, &order),
                &declared(),
            );
            let report = report.unwrap();
            assert!(
                report.violation_rate().unwrap() > 0.5 && !report.passes(),
                "{dtype:?}: {report:?}"
            );
        }
    }

    #[test]
    fn bf16_rounds_to_nearest_even() {
        let halves = [
            (0x3f80_7fff, 0x3f80),
            (0x3f80_8000, 0x3f80),
            (0x3f80_8001, 0x3f81),
            (0x3f81_8000, 0x3f82),
        ];
        for (bits, upper) in halves {
            assert_eq!(
                round(Dtype::Bf16, f32::from_bits(bits)).to_bits(),
                upper << 16,
                "{bits:#x}"
            );
        }
        assert!(round(Dtype::Bf16, f32::NAN).is_nan());
        assert_eq!(round(Dtype::Bf16, f32::MAX), f32::INFINITY);
    }

    #[test]
    fn what_does_not_fit_the_layer_is_refused() {
        let layer = TinyAttention::new(Dtype::F32, 1, 2, 3, 1);
        let (query, bytes) = ([0.5; 2], [0; 32]);
        assert!(layer.logits(&query, &[&bytes], TokenCount(2)).is_ok());
        assert!(matches!(
            layer.logits(&query, &[], TokenCount(2)),
            Err(AttentionError::Shape { .. })
        ));
        assert!(matches!(
            layer.logits(&query[1..], &[&bytes], TokenCount(2)),
            Err(AttentionError::Shape { .. })
        ));
        assert!(matches!(
            layer.logits(&query, &[&bytes], TokenCount(3)),
            Err(AttentionError::Short { .. })
        ));
        assert_eq!(
            layer.logits(&query, &[&bytes], TokenCount(0)),
            Err(AttentionError::Empty)
        );
    }
}
