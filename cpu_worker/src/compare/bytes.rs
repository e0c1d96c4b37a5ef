//! Byte comparison of KV (R67, R68): all layers, all heads, the valid range, nothing else.
#![forbid(unsafe_code)]

use kvsluice_layout::ids::{DecoderLayer, TokenCount};
use kvsluice_layout::planted::planted;
use thiserror::Error;

use crate::selection::BlockSelection;

/// The KV of one head of one layer, gathered in slot order.
#[derive(Clone, Copy, Debug)]
pub struct HeadKv<'a> {
    /// The layer.
    pub layer: DecoderLayer,
    /// The head within it.
    pub head: u32,
    /// K and V of a token, bytes.
    pub token_bytes: usize,
    /// How many leading tokens count; what lies behind them is not compared.
    pub valid: TokenCount,
    /// The tokens.
    pub bytes: &'a [u8],
}

impl<'a> HeadKv<'a> {
    fn valid_bytes(&self) -> Option<&'a [u8]> {
        let behind = if planted("r67_reads_past_valid") {
            self.bytes.len()
        } else {
            0
        };
        self.bytes
            .get(..self.valid.index().checked_mul(self.token_bytes)?.max(behind))
    }
}

/// All heads that one way made for one selection.
#[derive(Clone, Copy, Debug)]
pub struct KvDump<'a> {
    /// The selection, which is an input of the harness (R11).
    pub selection: &'a BlockSelection,
    /// Every head of every layer, in one order on both sides.
    pub heads: &'a [HeadKv<'a>],
}

/// Why two dumps are not equal, or cannot be compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum BytesError {
    /// The selections differ, so that equal bytes are not asked for (R10, R11).
    #[error("the two sides were made for different selections: fix one and run both ways again")]
    OtherSelection,
    /// The sides have different numbers of heads.
    #[error("{expected} heads on one side, {found} on the other")]
    Heads {
        /// Heads expected.
        expected: usize,
        /// Heads found.
        found: usize,
    },
    /// A head has another name, size or valid count.
    #[error("head {index} of the dump differs in layer, head, token size or valid count")]
    Shape {
        /// Place in the dump.
        index: usize,
    },
    /// A head has fewer bytes than its valid count says.
    #[error("{layer:?} head {head}: fewer bytes than {valid} tokens have")]
    Short {
        /// The layer.
        layer: DecoderLayer,
        /// The head.
        head: u32,
        /// Tokens said to be valid.
        valid: TokenCount,
    },
    /// A byte differs.
    #[error("{layer:?} head {head} byte {offset}: expected {expected:#04x}, found {found:#04x}")]
    Differs {
        /// The layer.
        layer: DecoderLayer,
        /// The head.
        head: u32,
        /// Byte within the head.
        offset: usize,
        /// Byte expected.
        expected: u8,
        /// Byte found.
        found: u8,
    },
}

/// Compares two dumps and returns how many bytes were equal. The first difference fails (R67); a copy does no arithmetic
/// and gets no tolerance, whatever the dtype (R68).
pub fn compare_bytes(expected: &KvDump<'_>, found: &KvDump<'_>) -> Result<u64, BytesError> {
    if expected.selection != found.selection && !planted("r10_r11_r70_other_selections") {
        return Err(BytesError::OtherSelection);
    }
    if expected.heads.len() != found.heads.len() {
        return Err(BytesError::Heads {
            expected: expected.heads.len(),
            found: found.heads.len(),
        });
    }
    let mut equal = 0;
    for (index, (a, b)) in expected.heads.iter().zip(found.heads).enumerate() {
        if (a.layer, a.head, a.token_bytes, a.valid) != (b.layer, b.head, b.token_bytes, b.valid) {
            return Err(BytesError::Shape { index });
        }
        let (layer, head) = (a.layer, a.head);
        let short = BytesError::Short {
            layer,
            head,
            valid: a.valid,
        };
        let (a, b) = (a.valid_bytes().ok_or(short)?, b.valid_bytes().ok_or(short)?);
        let tolerated = |a: u8, b: u8| planted("r68_copies_with_tolerance") && a.abs_diff(b) <= 1;
        let mut pairs = a.iter().zip(b).enumerate();
        if let Some((offset, (&expected, &found))) = pairs.find(|(_, (a, b))| a != b && !tolerated(**a, **b)) {
            return Err(BytesError::Differs {
                layer,
                head,
                offset,
                expected,
                found,
            });
        }
        equal += a.len() as u64;
    }
    Ok(equal)
}

#[cfg(test)]
mod tests {
    use kvsluice_layout::ids::{BlockCount, GroupId, LogicalBlock, RequestEpoch, SelectionRevision};
    use kvsluice_layout::planted::with_planted;

    use super::*;
    use crate::selection::LayerSelection;

    fn selection(blocks: &[u32]) -> BlockSelection {
        let layer = LayerSelection {
            layer: DecoderLayer(0),
            group: GroupId(0),
            logical_blocks: blocks.iter().map(|id| LogicalBlock(*id)).collect(),
            ranked_tail: Vec::new(),
        };
        let (epoch, revision) = (RequestEpoch(1), SelectionRevision(1));
        BlockSelection::new(epoch, revision, TokenCount(2), BlockCount(9), vec![layer]).unwrap()
    }

    const TOKEN_BYTES: usize = 8;

    fn heads(bytes: &[u8]) -> Vec<HeadKv<'_>> {
        let head = |layer, head| HeadKv {
            layer: DecoderLayer(layer),
            head,
            token_bytes: TOKEN_BYTES,
            valid: TokenCount(3),
            bytes,
        };
        vec![head(0, 0), head(0, 1), head(4, 0), head(4, 1)]
    }

    fn compare(a: &[HeadKv<'_>], b: &[HeadKv<'_>]) -> Result<u64, BytesError> {
        let selection = selection(&[5, 2]);
        compare_bytes(
            &KvDump {
                selection: &selection,
                heads: a,
            },
            &KvDump {
                selection: &selection,
                heads: b,
            },
        )
    }

    #[test]
    fn r67_one_flipped_byte_anywhere_in_the_valid_range_fails() {
        let good: Vec<u8> = (0..32).collect();
        assert_eq!(compare(&heads(&good), &heads(&good)), Ok(4 * 24));
        for head in 0..4 {
            for offset in 0..24 {
                let mut bad = good.clone();
                bad[offset] ^= 0x10;
                let mut found = heads(&good);
                found[head].bytes = &bad;
                let refused = compare(&heads(&good), &found);
                assert!(
                    matches!(refused, Err(BytesError::Differs { offset: at, .. }) if at == offset),
                    "{refused:?}"
                );
            }
        }
    }

    #[test]
    fn r67_bytes_past_the_valid_count_are_not_compared() {
        let good: Vec<u8> = (0..32).collect();
        let mut other = good.clone();
        other[24..].fill(0xee);
        let outcome = || compare(&heads(&good), &heads(&other));
        assert_eq!(outcome(), Ok(4 * 24));
        assert!(
            with_planted("r67_reads_past_valid", outcome).is_err(),
            "the planted fault is not seen"
        );
    }

    #[test]
    fn r68_a_copy_that_is_off_by_one_ulp_fails() {
        let value = 1.5_f32;
        let near = f32::from_bits(value.to_bits() + 1);
        let (a, b) = (value.to_le_bytes().repeat(6), near.to_le_bytes().repeat(6));
        let outcome = || compare(&heads(&a), &heads(&b));
        assert!(matches!(outcome(), Err(BytesError::Differs { offset: 0, .. })));
        assert!(
            with_planted("r68_copies_with_tolerance", outcome).is_ok(),
            "the planted fault is not seen"
        );
    }

    #[test]
    fn r70_a_token_and_a_block_selection_are_policies_and_no_bytewise_failure() {
        // Six tokens by score and the blocks around them: other positions, so other bytes. That is no `Differs`.
        let policy = |block_size, blocks: &[u32]| {
            let layer = LayerSelection {
                layer: DecoderLayer(0),
                group: GroupId(0),
                logical_blocks: blocks.iter().map(|id| LogicalBlock(*id)).collect(),
                ranked_tail: Vec::new(),
            };
            let (epoch, revision) = (RequestEpoch(1), SelectionRevision(1));
            BlockSelection::new(epoch, revision, TokenCount(block_size), BlockCount(18), vec![layer]).unwrap()
        };
        let (tokens, blocks) = (policy(1, &[2, 5, 6, 7, 11, 16]), policy(2, &[2, 3, 5]));
        let (a, b) = ([1; 24], [2; 24]);
        let (a, b) = (heads(&a), heads(&b));
        let dump = |selection, heads| KvDump { selection, heads };
        let (tokens, blocks) = (dump(&tokens, &a), dump(&blocks, &b));
        for (a, b) in [(&tokens, &blocks), (&blocks, &tokens)] {
            let outcome = || compare_bytes(a, b);
            assert_eq!(outcome(), Err(BytesError::OtherSelection));
            let failed = with_planted("r10_r11_r70_other_selections", outcome);
            assert!(
                matches!(failed, Err(BytesError::Differs { .. })),
                "the planted fault is not seen"
            );
        }
    }

    #[test]
    fn r10_r11_other_selections_and_other_shapes_are_not_compared() {
        let bytes = [0; 24];
        let (a, b) = (selection(&[5, 2]), selection(&[2, 5]));
        let heads = heads(&bytes);
        let dump = |selection| KvDump {
            selection,
            heads: &heads,
        };
        let other = || compare_bytes(&dump(&a), &dump(&b));
        assert_eq!(other(), Err(BytesError::OtherSelection));
        assert!(
            with_planted("r10_r11_r70_other_selections", other).is_ok(),
            "the planted fault is not seen"
        );
        assert_eq!(
            compare(&heads, &heads[1..]),
            Err(BytesError::Heads { expected: 4, found: 3 })
        );
        let mut longer = heads.clone();
        longer[2].valid = TokenCount(2);
        assert_eq!(compare(&heads, &longer), Err(BytesError::Shape { index: 2 }));
        let mut short = heads.clone();
        short[3].bytes = &bytes[1..];
        let (layer, head, valid) = (DecoderLayer(4), 1, TokenCount(3));
        assert_eq!(compare(&heads, &short), Err(BytesError::Short { layer, head, valid }));
    }
}
