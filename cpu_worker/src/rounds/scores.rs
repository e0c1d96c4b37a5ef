//! Seeded scores, in place of a model's attention: a pure function of (seed, request, layer, selection, block), so that a
//! retry makes the same selection without another draw (R47) and every run with one seed is the same.
#![forbid(unsafe_code)]

use super::options::WorkloadOptions;

/// What a number is drawn for. Each purpose has numbers of its own, so that the rate of aborts does not move the scores.
#[derive(Clone, Copy, Debug)]
pub(super) enum Purpose {
    Base = 1,
    Drift,
    Agreement,
    Abort,
    Finish,
    Retry,
}

/// The finaliser of SplitMix64 (Steele, Lea, Flood 2014).
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A number in [0, 1) for these keys.
pub(super) fn draw(seed: u64, purpose: Purpose, keys: &[u64]) -> f64 {
    let start = mix(seed ^ (purpose as u64) << 56);
    let mixed = keys
        .iter()
        .fold(start, |mixed, key| mix(mixed.wrapping_add(0x9E37_79B9_7F4A_7C15) ^ key));
    (mixed >> 11) as f64 / (1_u64 << 53) as f64
}

/// Scores of the tokens of `blocks` blocks of `block_tokens` tokens each, and of `partial` more. `ranking` names the
/// layers that rank alike.
pub(super) fn token_scores(
    options: &WorkloadOptions,
    (request, ranking, round): (u64, u64, u32),
    (blocks, block_tokens, partial): (u32, u32, u32),
    out: &mut Vec<f64>,
) {
    out.clear();
    for block in 0..=blocks {
        let tokens = if block == blocks { partial } else { block_tokens };
        let block = u64::from(block);
        let base = draw(options.seed, Purpose::Base, &[request, ranking, block]);
        let drift = draw(options.seed, Purpose::Drift, &[request, ranking, block, round.into()]);
        let score = base + options.drift * drift;
        // Tokens of a block differ, so that a block's score is a sum and not a multiple.
        out.extend((0..tokens).map(|token| score * (1.0 + f64::from(token % 7) / 64.0)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r47_the_same_keys_draw_the_same_scores_and_other_keys_others() {
        let options = WorkloadOptions::default();
        let scores = |request, ranking, round| {
            let mut out = Vec::new();
            token_scores(&options, (request, ranking, round), (5, 16, 3), &mut out);
            assert_eq!(out.len(), 5 * 16 + 3);
            assert!(out.iter().all(|score| (0.0..2.0).contains(score)));
            out
        };
        assert_eq!(scores(1, 2, 3), scores(1, 2, 3));
        for other in [scores(2, 2, 3), scores(1, 3, 3), scores(1, 2, 4)] {
            assert_ne!(other, scores(1, 2, 3));
        }
    }
}
