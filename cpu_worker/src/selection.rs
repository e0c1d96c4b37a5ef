//! One round's selection for all layers (R15): immutable once made.
#![forbid(unsafe_code)]

use kvsluice_layout::ids::{
    BlockCount, DecoderLayer, GroupId, LogicalBlock, RequestEpoch, SelectionRevision, TokenCount,
};
use thiserror::Error;

use crate::block_set::BlockSet;

/// One layer of a [`BlockSelection`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerSelection {
    /// The layer.
    pub layer: DecoderLayer,
    /// Its group.
    pub group: GroupId,
    /// Selected blocks, in coordinates of the original sequence.
    pub logical_blocks: Vec<LogicalBlock>,
    /// Further candidates, best first: score order, not ascending ids.
    pub ranked_tail: Vec<LogicalBlock>,
}

/// What shall be resident, per layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockSelection {
    request_epoch: RequestEpoch,
    revision: SelectionRevision,
    block_size: TokenCount,
    seq_blocks: BlockCount,
    layers: Vec<LayerSelection>,
}

/// Why lists are no selection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SelectionError {
    /// The block size is 0.
    #[error("block size 0: a block has at least one token")]
    ZeroBlockSize,
    /// A layer is given twice.
    #[error("{layer:?} is given twice")]
    DuplicateLayer {
        /// The layer.
        layer: DecoderLayer,
    },
    /// A block is not one of the sequence (R40).
    #[error("block {block} in a sequence of {seq_blocks} blocks")]
    OutOfRange {
        /// The block number.
        block: u64,
        /// Blocks of the sequence.
        seq_blocks: BlockCount,
    },
    /// A block is selected twice.
    #[error("{layer:?}: {block:?} is selected twice")]
    DuplicateBlock {
        /// The layer.
        layer: DecoderLayer,
        /// The block.
        block: LogicalBlock,
    },
}

impl BlockSelection {
    /// Checks the lists and keeps them as they are; the order of a tail is never touched.
    pub fn new(
        request_epoch: RequestEpoch,
        revision: SelectionRevision,
        block_size: TokenCount,
        seq_blocks: BlockCount,
        layers: Vec<LayerSelection>,
    ) -> Result<Self, SelectionError> {
        if block_size.get() == 0 {
            return Err(SelectionError::ZeroBlockSize);
        }
        let mut numbers: Vec<DecoderLayer> = layers.iter().map(|layer| layer.layer).collect();
        numbers.sort_unstable();
        if let Some(&[layer, _]) = numbers.array_windows().find(|[a, b]| a == b) {
            return Err(SelectionError::DuplicateLayer { layer });
        }
        let mut seen = BlockSet::default();
        for layer in &layers {
            let largest = layer.logical_blocks.iter().chain(&layer.ranked_tail).max();
            if let Some(block) = largest.filter(|block| block.get() >= seq_blocks.get()) {
                return Err(SelectionError::OutOfRange {
                    block: block.get().into(),
                    seq_blocks,
                });
            }
            seen.reset(largest.map_or(0, |block| block.index() + 1));
            if let Some(&block) = layer.logical_blocks.iter().find(|block| !seen.insert(**block)) {
                return Err(SelectionError::DuplicateBlock {
                    layer: layer.layer,
                    block,
                });
            }
        }
        Ok(Self {
            request_epoch,
            revision,
            block_size,
            seq_blocks,
            layers,
        })
    }

    /// The life of the request that it is for.
    pub fn request_epoch(&self) -> RequestEpoch {
        self.request_epoch
    }

    /// Its revision; grows with every selection of the request.
    pub fn revision(&self) -> SelectionRevision {
        self.revision
    }

    /// Tokens per block.
    pub fn block_size(&self) -> TokenCount {
        self.block_size
    }

    /// Blocks of the sequence.
    pub fn seq_blocks(&self) -> BlockCount {
        self.seq_blocks
    }

    /// The layers, in the order given.
    pub fn layers(&self) -> &[LayerSelection] {
        &self.layers
    }
}

/// Blocks found by [`crate::whole_blocks::validate_whole_blocks`], as blocks of a sequence of `seq_blocks` (R40).
pub fn blocks_of_sequence(blocks: &[u64], seq_blocks: BlockCount) -> Result<Vec<LogicalBlock>, SelectionError> {
    blocks
        .iter()
        .map(|&block| match u32::try_from(block) {
            Ok(number) if number < seq_blocks.get() => Ok(LogicalBlock(number)),
            _ => Err(SelectionError::OutOfRange { block, seq_blocks }),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use kvsluice_layout::planted::with_planted;

    use super::*;
    use crate::whole_blocks::validate_whole_blocks;

    fn layer(layer: u32, selected: &[u32], tail: &[u32]) -> LayerSelection {
        let blocks = |ids: &[u32]| ids.iter().map(|id| LogicalBlock(*id)).collect();
        LayerSelection {
            layer: DecoderLayer(layer),
            group: GroupId(4),
            logical_blocks: blocks(selected),
            ranked_tail: blocks(tail),
        }
    }

    fn selection(layers: Vec<LayerSelection>) -> Result<BlockSelection, SelectionError> {
        BlockSelection::new(
            RequestEpoch(1),
            SelectionRevision(2),
            TokenCount(16),
            BlockCount(200),
            layers,
        )
    }

    #[test]
    fn r15_a_selection_keeps_the_order_of_its_tails() {
        let made = selection(vec![layer(3, &[1, 5], &[7, 0, 2])]).unwrap();
        assert_eq!(made.layers()[0].ranked_tail, [7, 0, 2].map(LogicalBlock));
        assert_eq!(
            (made.request_epoch(), made.revision()),
            (RequestEpoch(1), SelectionRevision(2))
        );
        assert_eq!(
            (made.block_size(), made.seq_blocks()),
            (TokenCount(16), BlockCount(200))
        );
    }

    #[test]
    fn r40_a_selection_is_of_its_sequence_and_has_no_repeats() {
        assert!(matches!(
            selection(vec![layer(0, &[200], &[])]),
            Err(SelectionError::OutOfRange { block: 200, .. })
        ));
        assert!(matches!(
            selection(vec![layer(0, &[], &[200])]),
            Err(SelectionError::OutOfRange { block: 200, .. })
        ));
        for block in [0, 1, 63, 64, 128, 199] {
            assert!(selection(vec![layer(0, &[block], &[])]).is_ok());
            assert!(matches!(
                selection(vec![layer(0, &[block, block], &[])]),
                Err(SelectionError::DuplicateBlock { .. })
            ));
        }
        let no_tokens = BlockSelection::new(
            RequestEpoch(1),
            SelectionRevision(2),
            TokenCount(0),
            BlockCount(8),
            vec![],
        );
        assert_eq!(no_tokens, Err(SelectionError::ZeroBlockSize));
        let twice = vec![layer(0, &[], &[]), layer(1, &[], &[]), layer(0, &[], &[])];
        assert!(matches!(
            selection(twice),
            Err(SelectionError::DuplicateLayer { layer: DecoderLayer(0) })
        ));
    }

    #[test]
    fn r3_r37_an_engines_token_list_becomes_blocks_only_if_it_is_whole_and_of_the_sequence() {
        let whole = validate_whole_blocks(&[6, 7, 2, 3], 2).unwrap();
        assert_eq!(
            blocks_of_sequence(&whole, BlockCount(4)),
            Ok(vec![LogicalBlock(3), LogicalBlock(1)])
        );
        assert!(blocks_of_sequence(&whole, BlockCount(3)).is_err());
        assert!(blocks_of_sequence(&[1 << 32], BlockCount(u32::MAX)).is_err());
        // R3: what is not whole goes the way of copies.
        let is_whole = || validate_whole_blocks(&[5, 6, 2, 3], 2).is_ok();
        assert!(!is_whole());
        assert!(
            with_planted("r3_r37_unaligned_is_whole", is_whole),
            "the planted fault is not seen"
        );
    }
}
