//! The block selector: token scores in, blocks out (R28, R33–R36).
#![forbid(unsafe_code)]

use kvsluice_layout::ids::{BlockCount, LogicalBlock, TokenCount};
use kvsluice_layout::planted::planted;
use thiserror::Error;

use crate::block_set::BlockSet;

/// What one selection is made from.
#[derive(Clone, Copy, Debug)]
pub struct SelectInput<'a> {
    /// One score per token; those past `seq_len` are not looked at.
    pub scores: &'a [f64],
    /// Tokens per block.
    pub block_size: TokenCount,
    /// Committed tokens of the sequence: draft tokens are not among them (R34).
    pub seq_len: TokenCount,
    /// Blocks wanted in all.
    pub budget: BlockCount,
    /// First whole blocks that are always selected.
    pub sink: BlockCount,
    /// Last whole blocks that are always selected.
    pub recent: BlockCount,
}

/// The outcome of a selection, borrowed from the [`Selector`] that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Selected<'a> {
    /// Selected blocks, ascending.
    pub selected: &'a [LogicalBlock],
    /// All other whole blocks, best first (R15).
    pub ranked_tail: &'a [LogicalBlock],
    /// How many blocks are selected: min(n, max(budget, |sink ∪ recent|)) of n whole blocks (R36).
    pub effective_budget: BlockCount,
    /// Tokens after the last whole block. They belong to no selected block and stay resident apart (R34, R35).
    pub partial_tail: TokenCount,
}

/// Why nothing was selected.
#[derive(Clone, Copy, Debug, PartialEq, Error)]
pub enum SelectError {
    /// The block size is 0.
    #[error("block size 0: a block has at least one token")]
    ZeroBlockSize,
    /// Fewer scores than tokens.
    #[error("{found} scores for a sequence of {expected} tokens")]
    ShortScores {
        /// Scores given.
        found: usize,
        /// Tokens of the sequence.
        expected: u32,
    },
    /// The score of a token of the sequence is NaN or infinite.
    #[error("the score of token {token} is {score}: scores must be finite")]
    NonFiniteScore {
        /// Token position.
        token: usize,
        /// Its score.
        score: f64,
    },
    /// The scores of a block are finite and their sum is not.
    #[error("the scores of {block:?} sum to {sum}: scale them down")]
    NonFiniteSum {
        /// The block.
        block: LogicalBlock,
        /// The sum of its scores in index order.
        sum: f64,
    },
}

/// Makes selections. Holds the scratch, so that a selection allocates nothing once the longest sequence was seen.
#[derive(Debug, Default)]
pub struct Selector {
    ranked: Vec<u128>,
    picked: BlockSet<LogicalBlock>,
    selected: Vec<LogicalBlock>,
    tail: Vec<LogicalBlock>,
}

impl Selector {
    /// A selector without scratch yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Selects whole blocks: the first `sink`, the last `recent`, then the best by (−score, id) up to `budget`.
    ///
    /// A block's score is the sum of its tokens' scores in index order, in f64. Errors in the order of the variants of
    /// [`SelectError`]. Cost: one pass over the scores and a sort of the n ranked blocks.
    pub fn select(&mut self, input: &SelectInput<'_>) -> Result<Selected<'_>, SelectError> {
        let block_size = input.block_size.index();
        if block_size == 0 {
            return Err(SelectError::ZeroBlockSize);
        }
        let Some(scores) = input.scores.get(..input.seq_len.index()) else {
            return Err(SelectError::ShortScores {
                found: input.scores.len(),
                expected: input.seq_len.get(),
            });
        };
        if !planted("r33_accepts_nan")
            && let Some((token, &score)) = scores.iter().enumerate().find(|(_, score)| !score.is_finite())
        {
            return Err(SelectError::NonFiniteScore { token, score }); // R33
        }
        // R35: the token scores are cut to whole blocks; what is left over stays apart (R34).
        let mut blocks = input.seq_len.get() / input.block_size.get();
        if planted("r34_r35_counts_the_partial_block") {
            blocks = input.seq_len.get().div_ceil(input.block_size.get());
        }
        let sink = input.sink.get().min(blocks);
        let recent = input.recent.get().min(blocks - sink);
        let middle = sink..blocks - recent;

        self.ranked.clear();
        for (id, tokens) in (0_u32..).zip(scores.chunks_exact(block_size)) {
            let sum = tokens.iter().fold(0.0, |sum, score| sum + score);
            if !sum.is_finite() && !planted("r33_accepts_nan") {
                return Err(SelectError::NonFiniteSum {
                    block: LogicalBlock(id),
                    sum,
                });
            }
            if middle.contains(&id) {
                self.ranked.push(rank_key(sum, id));
            }
        }
        // R33: the id is the low half of the key, so equal scores fall to the lower id.
        if planted("r33_no_tie_break") {
            self.ranked.sort_unstable_by_key(|key| (key >> 32, u128::MAX - key));
        } else {
            self.ranked.sort_unstable();
        }

        // R36: sink and recent over the budget raise it, and the effective budget says so.
        let always = sink + recent;
        let effective = input.budget.get().max(always).min(blocks);
        let free = (effective - always) as usize;
        self.picked.reset(blocks as usize);
        for id in (0..sink).chain(middle.end..blocks) {
            self.picked.insert(LogicalBlock(id));
        }
        for &key in self.ranked.iter().take(free) {
            self.picked.insert(block_of(key));
        }
        self.selected.clear();
        self.picked.append_to(&mut self.selected);
        self.tail.clear();
        self.tail
            .extend(self.ranked.iter().skip(free).map(|&key| block_of(key)));
        if planted("r28_expands_to_tokens") {
            let tokens = |block: &LogicalBlock| (block.get() * block_size as u32..).take(block_size);
            self.selected = self.selected.iter().flat_map(tokens).map(LogicalBlock).collect();
        }
        if planted("r15_tail_by_id") {
            self.tail.sort_unstable();
        }
        Ok(Selected {
            selected: &self.selected,
            ranked_tail: &self.tail,
            effective_budget: if planted("r36_hides_the_effective_budget") {
                input.budget
            } else {
                BlockCount(effective)
            },
            partial_tail: TokenCount(input.seq_len.get() % input.block_size.get()),
        })
    }
}

/// A number that sorts as (−score, id). The usual order-preserving image of an f64 (flip all bits of a negative one, the
/// sign bit of a positive one), inverted for descending order.
fn rank_key(score: f64, id: u32) -> u128 {
    // R33: −0.0 + 0.0 is 0.0, so that the two zeros have one image.
    let bits = if planted("r33_minus_zero") {
        score.to_bits()
    } else {
        (score + 0.0).to_bits()
    };
    let ascending = if bits >> 63 == 1 { !bits } else { bits | 1 << 63 };
    u128::from(!ascending) << 32 | u128::from(id)
}

/// The block of a [`rank_key`].
fn block_of(key: u128) -> LogicalBlock {
    LogicalBlock((key & u128::from(u32::MAX)) as u32)
}

#[cfg(test)]
mod tests {
    use kvsluice_layout::planted::with_planted;

    use super::*;

    fn input(scores: &[f64], block_size: u32, budget: u32) -> SelectInput<'_> {
        SelectInput {
            scores,
            block_size: TokenCount(block_size),
            seq_len: TokenCount(scores.len() as u32),
            budget: BlockCount(budget),
            sink: BlockCount(0),
            recent: BlockCount(0),
        }
    }

    fn run(input: &SelectInput<'_>) -> Result<(Vec<u32>, Vec<u32>, u32), SelectError> {
        let mut selector = Selector::new();
        let out = selector.select(input)?;
        let numbers = |ids: &[LogicalBlock]| ids.iter().map(|id| id.get()).collect::<Vec<_>>();
        Ok((
            numbers(out.selected),
            numbers(out.ranked_tail),
            out.effective_budget.get(),
        ))
    }

    #[test]
    fn f7_r34_r35_a_partial_block_is_in_neither_list() {
        let scores = [1.0, 2.0, 3.0, 4.0, 99.0];
        let mut selector = Selector::new();
        let mut of = |seq_len, sink| {
            let input = SelectInput {
                seq_len: TokenCount(seq_len),
                sink: BlockCount(sink),
                ..input(&scores, 4, 9)
            };
            let out = selector.select(&input).unwrap();
            (out.selected.len(), out.ranked_tail.len(), out.partial_tail.get())
        };
        for sink in [0, 9] {
            for (seq_len, whole, partial) in [(3, 0, 3), (4, 1, 0), (5, 1, 1)] {
                assert_eq!(of(seq_len, sink), (whole, 0, partial));
            }
        }
        let with_fault = with_planted("r34_r35_counts_the_partial_block", || of(5, 9));
        assert_ne!(with_fault, (1, 0, 1), "the planted fault is not seen");
    }

    #[test]
    fn r33_ties_fall_to_the_lower_id() {
        let tie = || run(&input(&[1.0; 4], 1, 2)).unwrap();
        assert_eq!(tie(), (vec![0, 1], vec![2, 3], 2));
        assert_ne!(
            with_planted("r33_no_tie_break", tie),
            tie(),
            "the planted fault is not seen"
        );
    }

    #[test]
    fn r33_the_best_score_comes_first_also_below_zero() {
        let scores = [-1.0, 2.0, 0.0, -3.0, 5e-324, f64::MAX, -f64::MAX, 1.0];
        assert_eq!(run(&input(&scores, 1, 0)).unwrap().1, [5, 1, 7, 4, 2, 0, 3, 6]);
    }

    #[test]
    fn r33_minus_zero_equals_zero() {
        let zeros = || run(&input(&[-0.0, 0.0, -0.0], 1, 1)).unwrap();
        assert_eq!(zeros(), (vec![0], vec![1, 2], 1));
        // A block's sum starts at 0.0 and cannot be −0.0, so the key itself is what can be wrong.
        let equal = || rank_key(-0.0, 0) == rank_key(0.0, 0);
        assert!(
            equal() && !with_planted("r33_minus_zero", equal),
            "the planted fault is not seen"
        );
    }

    #[test]
    fn r33_nan_and_infinite_scores_and_sums_are_refused() {
        let refused = |scores: &[f64], b| run(&input(scores, b, 1)).is_err();
        for bad in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            assert!(refused(&[1.0, bad], 1));
            assert!(refused(&[1.0, 1.0, bad], 2), "also in the partial tail");
        }
        assert!(
            refused(&[f64::MAX, f64::MAX, -f64::MAX, -f64::MAX], 4),
            "the sum overflows in index order"
        );
        assert!(!refused(&[f64::MAX, -f64::MAX, f64::MAX, -f64::MAX], 4));
        assert!(
            !with_planted("r33_accepts_nan", || refused(&[1.0, f64::NAN], 1)),
            "the planted fault is not seen"
        );
    }

    #[test]
    fn r36_sink_and_recent_over_the_budget_raise_the_effective_budget() {
        let scores = [5.0, 4.0, 3.0, 2.0, 1.0];
        let many = SelectInput {
            sink: BlockCount(2),
            recent: BlockCount(2),
            ..input(&scores, 1, 2)
        };
        let raised = || run(&many).unwrap();
        assert_eq!(raised(), (vec![0, 1, 3, 4], vec![2], 4));
        assert_ne!(
            with_planted("r36_hides_the_effective_budget", raised),
            raised(),
            "the planted fault is not seen"
        );
        let all = SelectInput {
            sink: BlockCount(u32::MAX),
            recent: BlockCount(u32::MAX),
            ..input(&scores, 1, 0)
        };
        assert_eq!(run(&all).unwrap(), (vec![0, 1, 2, 3, 4], vec![], 5));
    }

    #[test]
    fn r15_the_tail_is_in_score_order() {
        let tail = || run(&input(&[1.0, 5.0, 3.0, 4.0], 1, 1)).unwrap().1;
        assert_eq!(tail(), [3, 2, 0]);
        assert_ne!(
            with_planted("r15_tail_by_id", tail),
            [3, 2, 0],
            "the planted fault is not seen"
        );
    }

    #[test]
    fn r28_a_selection_is_blocks_whatever_the_block_size() {
        let scores: Vec<f64> = (0..128).map(f64::from).collect();
        for (block_size, best) in [(1, 127), (2, 63), (32, 3), (64, 1)] {
            let selected = || run(&input(&scores, block_size, 1)).unwrap().0;
            assert_eq!(selected(), [best]); // F1
            let tokens = with_planted("r28_expands_to_tokens", selected);
            assert_eq!(
                tokens != [best],
                block_size > 1,
                "the planted fault is not seen: {tokens:?}"
            );
        }
    }
}
