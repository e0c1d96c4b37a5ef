//! The block table of one layer: which block of the sequence is in which slot, and where it lies.
#![forbid(unsafe_code)]

use kvsluice_layout::ids::{BlockCount, DecoderLayer, GroupId, LogicalBlock, PhysicalBlock};
use thiserror::Error;

use crate::block_set::{BlockNumber, BlockSet};

/// Slots of one layer. Always well formed (I1): as many physical as logical entries, no physical and no logical block in
/// two slots, no more valid slots than slots. A slot without a block of this layer is a hole (`None`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerTable {
    layer: DecoderLayer,
    group: GroupId,
    logical_by_slot: Vec<Option<LogicalBlock>>,
    physical_by_slot: Vec<PhysicalBlock>,
    valid: BlockCount,
}

/// Why lists are no table (I1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TableError {
    /// The two lists differ in length.
    #[error("{layer:?}: {logical} logical and {physical} physical entries")]
    Lengths {
        /// The layer.
        layer: DecoderLayer,
        /// Logical entries.
        logical: usize,
        /// Physical entries.
        physical: usize,
    },
    /// More slots are said to be valid than there are.
    #[error("{layer:?}: {valid} valid slots of {len}")]
    Valid {
        /// The layer.
        layer: DecoderLayer,
        /// Slots said to be valid.
        valid: BlockCount,
        /// Slots given.
        len: usize,
    },
    /// A block of the sequence is in two slots.
    #[error("{layer:?}: {block:?} is in two slots")]
    DuplicateLogical {
        /// The layer.
        layer: DecoderLayer,
        /// The block.
        block: LogicalBlock,
    },
    /// A physical block is in two slots.
    #[error("{layer:?}: {block:?} is in two slots")]
    DuplicatePhysical {
        /// The layer.
        layer: DecoderLayer,
        /// The block.
        block: PhysicalBlock,
    },
}

impl LayerTable {
    /// A table without slots.
    pub fn empty(layer: DecoderLayer, group: GroupId) -> Self {
        Self {
            layer,
            group,
            logical_by_slot: Vec::new(),
            physical_by_slot: Vec::new(),
            valid: BlockCount(0),
        }
    }

    /// A table of the given slots, all lists checked.
    pub fn new(
        layer: DecoderLayer,
        group: GroupId,
        logical_by_slot: Vec<Option<LogicalBlock>>,
        physical_by_slot: Vec<PhysicalBlock>,
        valid: BlockCount,
    ) -> Result<Self, TableError> {
        let table = Self {
            layer,
            group,
            logical_by_slot,
            physical_by_slot,
            valid,
        };
        table.check()?;
        Ok(table)
    }

    /// I1, once more: what the constructor checked still holds.
    pub fn check(&self) -> Result<(), TableError> {
        let layer = self.layer;
        let (logical, physical) = (self.logical_by_slot.len(), self.physical_by_slot.len());
        if logical != physical {
            return Err(TableError::Lengths {
                layer,
                logical,
                physical,
            });
        }
        if self.valid.index() > physical {
            return Err(TableError::Valid {
                layer,
                valid: self.valid,
                len: physical,
            });
        }
        let blocks = self.logical_by_slot.iter().copied().flatten();
        if let Some(block) = first_repeat(blocks) {
            return Err(TableError::DuplicateLogical { layer, block });
        }
        match first_repeat(self.physical_by_slot.iter().copied()) {
            Some(block) => Err(TableError::DuplicatePhysical { layer, block }),
            None => Ok(()),
        }
    }

    /// The layer.
    pub fn layer(&self) -> DecoderLayer {
        self.layer
    }

    /// Its group.
    pub fn group(&self) -> GroupId {
        self.group
    }

    /// Block of the sequence by slot.
    pub fn logical_by_slot(&self) -> &[Option<LogicalBlock>] {
        &self.logical_by_slot
    }

    /// Physical block by slot.
    pub fn physical_by_slot(&self) -> &[PhysicalBlock] {
        &self.physical_by_slot
    }

    /// How many leading slots count.
    pub fn valid(&self) -> BlockCount {
        self.valid
    }

    /// Physical blocks of the valid slots.
    pub fn named(&self) -> &[PhysicalBlock] {
        self.physical_by_slot.get(..self.valid.index()).unwrap_or_default()
    }
}

fn first_repeat<Id: BlockNumber + Ord>(mut blocks: impl Iterator<Item = Id> + Clone) -> Option<Id> {
    let mut seen = BlockSet::default();
    seen.reset(blocks.clone().max().map_or(0, |block| block.number() as usize + 1));
    blocks.find(|block| !seen.insert(*block))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn i1_a_table_has_distinct_blocks_and_no_more_valid_slots_than_slots() {
        let table = |logical: &[u32], physical: &[u32], valid| {
            let logical = logical.iter().map(|id| Some(LogicalBlock(*id))).collect();
            let physical = physical.iter().map(|id| PhysicalBlock(*id)).collect();
            LayerTable::new(DecoderLayer(2), GroupId(1), logical, physical, BlockCount(valid))
        };
        // R18: different numbers in every space, logical 7 in slot 2 at physical 19.
        let good = table(&[4, 5, 7], &[30, 31, 19], 3).unwrap();
        assert_eq!(
            (good.logical_by_slot()[2], good.physical_by_slot()[2]),
            (Some(LogicalBlock(7)), PhysicalBlock(19))
        );
        assert_eq!((good.layer(), good.group()), (DecoderLayer(2), GroupId(1)));
        assert_eq!(good.valid(), BlockCount(3));
        assert_eq!(
            table(&[4, 5, 7], &[30, 31, 19], 2).unwrap().named(),
            [30, 31].map(PhysicalBlock)
        );
        for block in [0, 1, 63, 64, 128] {
            assert!(table(&[block], &[block], 1).is_ok());
            assert!(matches!(
                table(&[block, 9, block], &[30, 31, 19], 3),
                Err(TableError::DuplicateLogical { .. })
            ));
            assert!(matches!(
                table(&[4, 5, 7], &[block, 9, block], 1),
                Err(TableError::DuplicatePhysical { .. })
            ));
        }
        assert!(matches!(table(&[4, 5], &[30], 1), Err(TableError::Lengths { .. })));
        assert!(matches!(table(&[4], &[30], 2), Err(TableError::Valid { .. })));
        assert!(matches!(
            table(&[4, 4], &[30, 31], 2),
            Err(TableError::DuplicateLogical { .. })
        ));
        assert!(matches!(
            table(&[4, 5], &[30, 30], 2),
            Err(TableError::DuplicatePhysical { .. })
        ));
    }
}
