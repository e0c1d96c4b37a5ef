//! Synthetic block content: what `run` fills the pool with, so that every byte at a destination can be checked.
//!
//! A block's content follows from its tag (the trace's hash of the prefix block), the layer's tensor, the shard, the plane and the
//! place within the plane. Any early reuse, wrong address, swapped plane or shard, and torn copy shows as wrong bytes.

/// 2⁶⁴ / φ, made odd: the increment of SplitMix64 (Steele, Lea, Flood 2014).
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser of SplitMix64.
const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Seed of one plane of one shard of a block. `tensor` is the layer's, so that layers which alias have equal content.
pub const fn seed(tag: u64, tensor: u32, shard: u32, plane: u32) -> u64 {
    let place = (tensor as u64) << 40 ^ (shard as u64) << 20 ^ plane as u64;
    mix(mix(tag.wrapping_add(GOLDEN)) ^ mix(place.wrapping_mul(GOLDEN)))
}

#[inline(always)]
const fn word(seed: u64, index: u64) -> u64 {
    let z = seed.wrapping_add(index.wrapping_mul(GOLDEN));
    z ^ (z >> 29)
}

/// Writes the content of a plane into `bytes`.
pub fn fill(seed: u64, bytes: &mut [u8]) {
    let (words, rest) = bytes.as_chunks_mut::<8>();
    let count = words.len() as u64;
    for (index, into) in (0..).zip(words) {
        *into = word(seed, index).to_le_bytes();
    }
    let last = word(seed, count).to_le_bytes();
    for (into, byte) in rest.iter_mut().zip(last) {
        *into = byte;
    }
}

/// Number of bytes that differ from the content of a plane.
pub fn mismatches(seed: u64, bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<8>();
    let mut differing = 0;
    for (index, found) in (0..).zip(words) {
        differing += u64::from(*found != word(seed, index).to_le_bytes());
    }
    let last = word(seed, words.len() as u64).to_le_bytes();
    if differing == 0 {
        return rest
            .iter()
            .zip(last)
            .filter(|(found, expected)| **found != *expected)
            .count() as u64;
    }
    // The slow count is for the message of a run that has failed anyway.
    let expected = (0..)
        .zip(words)
        .flat_map(|(i, _)| word(seed, i).to_le_bytes())
        .chain(last);
    bytes
        .iter()
        .zip(expected)
        .filter(|(found, expected)| **found != *expected)
        .count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_of_a_filled_plane_is_checked() {
        for len in [0_usize, 1, 7, 8, 9, 64, 100] {
            let mut bytes = vec![0; len];
            let seed = seed(77, 3, 1, 0);
            fill(seed, &mut bytes);
            assert_eq!(mismatches(seed, &bytes), 0, "{len} bytes");
            for i in 0..len {
                bytes[i] ^= 0x10;
                assert_eq!(mismatches(seed, &bytes), 1, "byte {i} of {len}");
                bytes[i] ^= 0x10;
            }
        }
    }

    #[test]
    fn another_tag_layer_shard_or_plane_has_other_content() {
        let mut bytes = vec![0; 64];
        fill(seed(77, 3, 1, 0), &mut bytes);
        for other in [
            seed(78, 3, 1, 0),
            seed(77, 2, 1, 0),
            seed(77, 3, 0, 0),
            seed(77, 3, 1, 1),
        ] {
            assert!(mismatches(other, &bytes) > 50);
        }
    }
}
