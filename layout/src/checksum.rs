//! The checksum of a record: XXH3-64 of all bytes behind the checksum word, folded with the commit word.
//!
//! Most records are small, and a record is whole lines: three lines have 176 bytes to sum, four have 240, and XXH3 takes
//! one path for both. That path is written out here for those two lengths, on words; it takes less than half the time
//! of the crate's, which serves every other length. The values are the same.

use xxhash_rust::xxh3::xxh3_64;
use zerocopy::IntoBytes;

/// Checksum of a record: of its words behind the checksum word, and of its commit word, so that a record that appears at
/// another position is refused too.
#[inline]
pub fn checksum(commit: u64, behind: &[u64]) -> u64 {
    let sum = match behind.len() {
        22 => behind.first_chunk().map_or(0, middle::<22>),
        30 => behind.first_chunk().map_or(0, middle::<30>),
        _ => xxh3_64(behind.as_bytes()),
    };
    sum ^ commit.rotate_left(32)
}

// The constants are those of the XXH3 specification (xxHash, doc/xxhash_spec.md): words of its default secret, at the
// offsets that its path for 129 to 240 bytes takes them from.
/// Bytes 0 to 128.
#[rustfmt::skip]
const FIRST: [u64; 16] = [
    0xbe4ba423396cfeb8, 0x1cad21f72c81017c, 0xdb979083e96dd4de, 0x1f67b3b7a4a44072,
    0x78e5c0cc4ee679cb, 0x2172ffcc7dd05a82, 0x8e2443f7744608b8, 0x4c263a81e69035e0,
    0xcb00c391bb52283c, 0xa32e531b8b65d088, 0x4ef90da297486471, 0xd8acdea946ef1938,
    0x3f349ce33f76faa8, 0x1d4f0bc7c7bbdcf9, 0x3159b4cd4be0518a, 0x647378d9c97e9fc8,
];
/// Bytes 3 to 115.
#[rustfmt::skip]
const LATER: [u64; 14] = [
    0x81017cbe4ba42339, 0x6dd4de1cad21f72c, 0xa44072db979083e9, 0xe679cb1f67b3b7a4,
    0xd05a8278e5c0cc4e, 0x4608b82172ffcc7d, 0x9035e08e2443f774, 0x52283c4c263a81e6,
    0x65d088cb00c391bb, 0x486471a32e531b8b, 0xef19384ef90da297, 0x76faa8d8acdea946,
    0xbbdcf93f349ce33f, 0xe0518a1d4f0bc7c7,
];
/// Bytes 119 to 135: the last 17 of the 136 that a secret has at least.
const LAST: [u64; 2] = [0x7378d9c97e9fc831, 0xebd33483acc5ea64];
const PRIME64_1: u64 = 0x9e37_79b1_85eb_ca87;
const PRIME_MX1: u64 = 0x1656_6791_9e37_79f9;

/// XXH3-64 of 136 to 240 bytes, in whole words.
fn middle<const WORDS: usize>(words: &[u64; WORDS]) -> u64 {
    let bytes = WORDS as u64 * 8;
    let (pairs, _) = words.as_chunks::<2>();
    let (first, _) = FIRST.as_chunks::<2>();
    let (later, _) = LATER.as_chunks::<2>();
    let mut sum = bytes.wrapping_mul(PRIME64_1);
    for (words, secret) in pairs.iter().zip(first) {
        sum = sum.wrapping_add(mix(words, secret));
    }
    sum = avalanche(sum);
    for (words, secret) in pairs.iter().skip(first.len()).zip(later) {
        sum = sum.wrapping_add(mix(words, secret));
    }
    if let Some(words) = words.last_chunk() {
        sum = sum.wrapping_add(mix(words, &LAST));
    }
    avalanche(sum)
}

#[inline(always)]
fn mix(words: &[u64; 2], secret: &[u64; 2]) -> u64 {
    let product = u128::from(words[0].to_le() ^ secret[0]) * u128::from(words[1].to_le() ^ secret[1]);
    product as u64 ^ (product >> 64) as u64
}

#[inline(always)]
fn avalanche(sum: u64) -> u64 {
    let sum = (sum ^ sum >> 37).wrapping_mul(PRIME_MX1);
    sum ^ sum >> 32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn x5_the_checksum_is_xxh3_at_every_length_that_a_record_has() {
        let seed = 0xC0DE;
        let mut random = fastrand::Rng::with_seed(seed);
        for lines in 1..40 {
            let words: Vec<u64> = (2..lines * 8).map(|_| random.u64(..)).collect();
            let expected = xxh3_64(words.as_bytes()) ^ 65_u64.rotate_left(32);
            assert_eq!(checksum(65, &words), expected, "{lines} lines, seed {seed:#x}");
        }
    }
}
