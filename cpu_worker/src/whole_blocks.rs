//! Whole-block check of a token selection (R37): decides between source-only upload and the copy path (R3).
#![forbid(unsafe_code)]

use kvsluice_layout::planted::planted;
use thiserror::Error;

/// Why a list of token ids is not a list of whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum WholeBlockError {
    /// The block size is 0.
    #[error("block size 0: a block has at least one token")]
    ZeroBlockSize,
    /// The list does not divide into rows of one block.
    #[error("{len} token ids do not divide into blocks of {block_size}")]
    Ragged {
        /// Number of ids.
        len: usize,
        /// Tokens per block.
        block_size: u64,
    },
    /// A row starts with a negative id. (−B is aligned, so that alignment alone would let it pass.)
    #[error("row {row} starts with the negative token id {first}")]
    Negative {
        /// Row in the list.
        row: usize,
        /// Its first id.
        first: i64,
    },
    /// A row does not start at a block boundary.
    #[error("row {row} starts at token {first}, which is no multiple of {block_size}")]
    Unaligned {
        /// Row in the list.
        row: usize,
        /// Its first id.
        first: i64,
        /// Tokens per block.
        block_size: u64,
    },
    /// A row is not `first, first + 1, …`.
    #[error("row {row} holds token {found} at place {place}, not {first} + {place}")]
    NotWhole {
        /// Row in the list.
        row: usize,
        /// Its first id.
        first: i64,
        /// Place in the row.
        place: usize,
        /// The id found there.
        found: i64,
    },
    /// A block is listed twice.
    #[error("block {block} is listed twice")]
    Duplicate {
        /// Block number.
        block: u64,
    },
}

/// Checks that `ids` are the tokens of whole, distinct blocks of `block_size` tokens, and returns the blocks in the
/// given order (R37). The ids are an engine's, so any `i64` may come; the blocks are plain numbers until the caller has
/// checked them against its sequence ([`crate::selection::BlockSelection`]).
///
/// Errors in the order of the variants of [`WholeBlockError`], each over the whole list before the next.
pub fn validate_whole_blocks(ids: &[i64], block_size: u64) -> Result<Vec<u64>, WholeBlockError> {
    if block_size == 0 {
        return Err(WholeBlockError::ZeroBlockSize);
    }
    // A block larger than the address space cannot be filled by a list: only the empty list divides into it.
    let row_len = usize::try_from(block_size).unwrap_or(usize::MAX);
    if !ids.len().is_multiple_of(row_len) {
        return Err(WholeBlockError::Ragged {
            len: ids.len(),
            block_size,
        });
    }
    let rows = || {
        ids.chunks_exact(row_len)
            .filter_map(|row| row.split_first())
            .enumerate()
    };
    if !planted("r37_no_sign_check")
        && let Some((row, (&first, _))) = rows().find(|(_, (first, _))| **first < 0)
    {
        return Err(WholeBlockError::Negative { row, first });
    }
    let unaligned =
        |first: i64| !first.unsigned_abs().is_multiple_of(block_size) && !planted("r3_r37_unaligned_is_whole");
    if let Some((row, (&first, _))) = rows().find(|(_, (first, _))| unaligned(**first)) {
        return Err(WholeBlockError::Unaligned { row, first, block_size });
    }
    for (row, (&first, rest)) in rows() {
        for (place, &found) in (1..).zip(rest) {
            // The difference, not the sum: first + place may not fit.
            if found.checked_sub(first) != i64::try_from(place).ok() {
                return Err(WholeBlockError::NotWhole {
                    row,
                    first,
                    place,
                    found,
                });
            }
        }
    }
    let blocks: Vec<u64> = rows()
        .map(|(_, (first, _))| first.unsigned_abs() / block_size)
        .collect();
    let mut sorted = blocks.clone();
    sorted.sort_unstable();
    match sorted.array_windows().find(|[a, b]| a == b) {
        Some(&[block, _]) => Err(WholeBlockError::Duplicate { block }),
        None => Ok(blocks),
    }
}

#[cfg(test)]
mod tests {
    use kvsluice_layout::planted::with_planted;

    use super::*;

    #[test]
    fn f1_r37_every_block_size_returns_its_blocks_in_the_given_order() {
        for block_size in [1_i64, 2, 32, 64] {
            let ids: Vec<i64> = [7, 2, 5]
                .iter()
                .flat_map(|b| b * block_size..(b + 1) * block_size)
                .collect();
            assert_eq!(
                validate_whole_blocks(&ids, block_size.unsigned_abs()),
                Ok(vec![7, 2, 5])
            );
        }
        assert_eq!(validate_whole_blocks(&[], 16), Ok(vec![]));
    }

    #[test]
    fn r37_minus_b_is_aligned_so_only_the_sign_check_refuses_it() {
        let refused = |ids: &[i64], b| matches!(validate_whole_blocks(ids, b), Err(WholeBlockError::Negative { .. }));
        assert!(refused(&[-2, -1], 2) && refused(&[-1], 1) && refused(&[i64::MIN], 1));
        assert!(
            with_planted("r37_no_sign_check", || !refused(&[-2, -1], 2)),
            "the planted fault is not seen"
        );
    }

    #[test]
    fn r37_no_number_overflows() {
        assert_eq!(validate_whole_blocks(&[i64::MAX], 1), Ok(vec![i64::MAX.unsigned_abs()]));
        assert_eq!(validate_whole_blocks(&[], u64::MAX), Ok(vec![]));
        assert!(matches!(
            validate_whole_blocks(&[0, i64::MIN], 2),
            Err(WholeBlockError::NotWhole { place: 1, .. })
        ));
        assert!(matches!(
            validate_whole_blocks(&[i64::MAX - 1, i64::MIN], 2),
            Err(WholeBlockError::NotWhole { found: i64::MIN, .. })
        ));
    }
}
