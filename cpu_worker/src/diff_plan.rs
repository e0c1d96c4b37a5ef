//! What an upload brings (R16): the immutable outcome of the planner.
#![forbid(unsafe_code)]

use core::ops::Range;

use kvsluice_layout::ids::{BlockCount, DecoderLayer, GroupId, LogicalBlock};

/// What kind of plan it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanKind {
    /// Nothing to upload. The round is finalised all the same (R42).
    Zero,
    /// Want minus held, padded to equal counts per group in common mode.
    Delta,
    /// The whole want of every layer, because one layer's candidates ran out (R32).
    Full,
}

/// One active layer of a [`BlockDiffPlan`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerDiff<'a> {
    /// The layer.
    pub layer: DecoderLayer,
    /// Its group.
    pub group: GroupId,
    /// Blocks to upload, ascending (R30); pads are among them.
    pub upload: &'a [LogicalBlock],
    /// The pads among them, ascending (R31).
    pub pad: &'a [LogicalBlock],
    /// Wanted blocks that a delta plan would have cut; 0 unless the plan is full (R32).
    pub truncated: BlockCount,
}

impl LayerDiff<'_> {
    /// Number of blocks to upload. Derived from the list, so that the two cannot disagree (R16).
    pub fn new_blocks(&self) -> BlockCount {
        BlockCount(u32::try_from(self.upload.len()).unwrap_or(u32::MAX))
    }
}

/// The plan of one upload: immutable for everyone but the planner, which reuses its memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockDiffPlan {
    pub(crate) kind: PlanKind,
    pub(crate) layers: Vec<LayerEntry>,
    pub(crate) uploads: Vec<LogicalBlock>,
    pub(crate) pads: Vec<LogicalBlock>,
    pub(crate) common_new_slots: Vec<(GroupId, BlockCount)>,
    pub(crate) has_common_slots: bool,
    pub(crate) max_id: Option<LogicalBlock>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LayerEntry {
    pub(crate) layer: DecoderLayer,
    pub(crate) group: GroupId,
    pub(crate) upload: Range<usize>,
    pub(crate) pad: Range<usize>,
    pub(crate) truncated: u32,
}

impl BlockDiffPlan {
    /// The kind of plan.
    pub fn kind(&self) -> PlanKind {
        self.kind
    }

    /// The active layers, in input order.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = LayerDiff<'_>> {
        self.layers.iter().map(|entry| LayerDiff {
            layer: entry.layer,
            group: entry.group,
            upload: self.uploads.get(entry.upload.clone()).unwrap_or_default(),
            pad: self.pads.get(entry.pad.clone()).unwrap_or_default(),
            truncated: BlockCount(entry.truncated),
        })
    }

    /// New slots of each group with an active layer, ascending by group: in common mode, unless the plan is full.
    pub fn common_new_slots(&self) -> Option<&[(GroupId, BlockCount)]> {
        self.has_common_slots.then_some(&self.common_new_slots)
    }

    /// The largest id of want, tail and valid held of all active layers (R38); `None` if all are empty.
    pub fn max_id(&self) -> Option<LogicalBlock> {
        self.max_id
    }
}
