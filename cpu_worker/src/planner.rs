//! The planner: what is wanted and not held, made into a plan of uploads (R29–R32, R38–R40).
//!
//! Three passes over the lists: ranges (a running maximum, which the compiler vectorises), membership (a bit per block),
//! and the lists of the plan, which come out of the bits ascending. No list is sorted and no pass is quadratic.
#![forbid(unsafe_code)]

use kvsluice_layout::ids::{BlockCount, DecoderLayer, GroupId, LogicalBlock};
use kvsluice_layout::planted::planted;
use thiserror::Error;

use crate::block_set::BlockSet;
use crate::diff_plan::{BlockDiffPlan, LayerEntry, PlanKind};

/// How attention finds the resident blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableMode {
    /// One table per group: its layers get equally many new slots, the shorter ones padded from their tails.
    Common,
    /// One table per layer: every layer uploads its own delta, nothing is padded.
    PerLayer,
}

/// One layer as the planner sees it.
#[derive(Clone, Copy, Debug)]
pub struct LayerInput<'a> {
    /// The layer.
    pub layer: DecoderLayer,
    /// Its group.
    pub group: GroupId,
    /// Inactive layers (sliding window, other) are checked for a repeated number only and left out of the plan (R25).
    pub active: bool,
    /// Wanted blocks, each once.
    pub want: &'a [LogicalBlock],
    /// Resident block by slot; a hole is `None` (R39).
    pub held: &'a [Option<LogicalBlock>],
    /// How many leading slots of `held` count.
    pub held_valid: BlockCount,
    /// Further candidates, best first.
    pub tail: &'a [LogicalBlock],
}

impl<'a> LayerInput<'a> {
    /// The slots that count.
    fn valid_slots(&self) -> &'a [Option<LogicalBlock>] {
        self.held.get(..self.held_valid.index()).unwrap_or(self.held)
    }
}

/// What a plan is made from.
#[derive(Clone, Copy, Debug)]
pub struct PlanInput<'a> {
    /// Blocks of the sequence; every id is below (R40).
    pub seq_blocks: BlockCount,
    /// How attention finds the blocks.
    pub table_mode: TableMode,
    /// The layers, in the order of the plan.
    pub layers: &'a [LayerInput<'a>],
}

/// Why there is no plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum PlanError {
    /// A layer number is given twice, active or not.
    #[error("{layer:?} is given twice")]
    DuplicateLayer {
        /// The layer.
        layer: DecoderLayer,
    },
    /// More slots are said to be valid than there are.
    #[error("{layer:?}: {valid} valid slots of {len}")]
    HeldValid {
        /// The layer.
        layer: DecoderLayer,
        /// Slots said to be valid.
        valid: BlockCount,
        /// Slots given.
        len: usize,
    },
    /// An id is not a block of the sequence.
    #[error("{layer:?}: {block:?} in a sequence of {seq_blocks} blocks")]
    OutOfRange {
        /// The layer.
        layer: DecoderLayer,
        /// The id.
        block: LogicalBlock,
        /// Blocks of the sequence.
        seq_blocks: BlockCount,
    },
    /// A block is wanted twice.
    #[error("{layer:?}: {block:?} is wanted twice")]
    DuplicateWant {
        /// The layer.
        layer: DecoderLayer,
        /// The block.
        block: LogicalBlock,
    },
    /// A block is in two valid slots.
    #[error("{layer:?}: {block:?} is held in two slots")]
    DuplicateHeld {
        /// The layer.
        layer: DecoderLayer,
        /// The block.
        block: LogicalBlock,
    },
}

/// Makes plans. Holds the scratch and the plan, so that planning allocates nothing once the largest input was seen.
/// Memory: 3 bits per (active layer, block up to the largest id).
#[derive(Debug)]
pub struct Planner {
    numbers: Vec<DecoderLayer>,
    scratch: Vec<LayerScratch>,
    groups: Vec<GroupNeed>,
    plan: BlockDiffPlan,
}

impl Default for Planner {
    fn default() -> Self {
        let plan = BlockDiffPlan {
            kind: PlanKind::Zero,
            layers: Vec::new(),
            uploads: Vec::new(),
            pads: Vec::new(),
            common_new_slots: Vec::new(),
            has_common_slots: false,
            max_id: None,
        };
        Self {
            numbers: Vec::new(),
            scratch: Vec::new(),
            groups: Vec::new(),
            plan,
        }
    }
}

/// The sets of one active layer.
#[derive(Debug, Default)]
struct LayerScratch {
    want: BlockSet<LogicalBlock>,
    held: BlockSet<LogicalBlock>,
    pad: BlockSet<LogicalBlock>,
    /// |want − held|.
    delta: u32,
}

/// What the layers of a group need together, in common mode.
#[derive(Clone, Copy, Debug)]
struct GroupNeed {
    group: GroupId,
    /// n: the largest delta.
    slots: u32,
    /// m: the smallest number of blocks that a layer can come up with, counted up to n.
    available: u32,
}

impl Planner {
    /// A planner without scratch yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the plan for `input`; it stays valid until the next call.
    ///
    /// Errors in the order of the variants of [`PlanError`], each over all layers before the next. Cost: linear in the
    /// lists, plus one word per 64 blocks up to the largest id and active layer.
    pub fn plan(&mut self, input: &PlanInput<'_>) -> Result<&BlockDiffPlan, PlanError> {
        self.check_layers(input)?;
        let max_id = self.check_ranges(input)?;
        let bound = max_id.map_or(0, |id| id.index() + 1);
        self.fill_sets(input, bound)?;

        let full = match input.table_mode {
            TableMode::Common => {
                self.count_groups(input);
                self.pad(input, bound)
            }
            TableMode::PerLayer => false,
        };
        self.write_plan(input, full, max_id);
        Ok(&self.plan)
    }

    fn check_layers(&mut self, input: &PlanInput<'_>) -> Result<(), PlanError> {
        self.numbers.clear();
        self.numbers.extend(input.layers.iter().map(|layer| layer.layer));
        self.numbers.sort_unstable();
        if let Some(&[layer, _]) = self.numbers.array_windows().find(|[a, b]| a == b) {
            return Err(PlanError::DuplicateLayer { layer });
        }
        for layer in active(input) {
            if layer.held_valid.index() > layer.held.len() {
                let (valid, len) = (layer.held_valid, layer.held.len());
                return Err(PlanError::HeldValid {
                    layer: layer.layer,
                    valid,
                    len,
                });
            }
        }
        Ok(())
    }

    /// R38, R40: the largest id, once all are known to be blocks of the sequence.
    fn check_ranges(&self, input: &PlanInput<'_>) -> Result<Option<LogicalBlock>, PlanError> {
        let mut max = None;
        for layer in active(input) {
            // R38: every element counts; the tail is in score order, so its last is not its largest.
            let tail = if planted("r38_tail_last_is_max") {
                layer.tail.last().copied()
            } else {
                largest(layer.tail)
            };
            let tail = tail.filter(|_| !planted("r40_tail_unchecked"));
            let layer_max = largest(layer.want).max(tail).max(largest_held(layer.valid_slots()));
            if let Some(block) = layer_max.filter(|block| block.get() >= input.seq_blocks.get()) {
                return Err(PlanError::OutOfRange {
                    layer: layer.layer,
                    block,
                    seq_blocks: input.seq_blocks,
                });
            }
            max = max.max(layer_max);
        }
        Ok(max)
    }

    fn fill_sets(&mut self, input: &PlanInput<'_>, bound: usize) -> Result<(), PlanError> {
        let layers = active(input).count();
        if self.scratch.len() < layers {
            self.scratch.resize_with(layers, LayerScratch::default);
        }
        let mut duplicate_held = None;
        for (layer, scratch) in active(input).zip(&mut self.scratch) {
            scratch.want.reset(bound);
            for &block in layer.want {
                if !scratch.want.insert(block) {
                    return Err(PlanError::DuplicateWant {
                        layer: layer.layer,
                        block,
                    });
                }
            }
            scratch.held.reset(bound);
            for &slot in layer.valid_slots() {
                let hole = planted("r39_hole_is_block_zero").then_some(LogicalBlock(0));
                let Some(block) = slot.or(hole) else { continue }; // R39
                if !scratch.held.insert(block) {
                    // Reported only when no layer wants a block twice.
                    duplicate_held = duplicate_held.or(Some((layer.layer, block)));
                }
            }
            scratch.delta = scratch.want.difference_len(&scratch.held); // R29
        }
        duplicate_held.map_or(Ok(()), |(layer, block)| Err(PlanError::DuplicateHeld { layer, block }))
    }

    /// n of each group: the largest delta of its layers.
    fn count_groups(&mut self, input: &PlanInput<'_>) {
        self.groups.clear();
        for (layer, scratch) in active(input).zip(&self.scratch) {
            self.groups.push(GroupNeed {
                group: layer.group,
                slots: scratch.delta,
                available: u32::MAX,
            });
        }
        // The largest first within a group, so that it is the one that stays.
        self.groups
            .sort_unstable_by_key(|need| (need.group, u32::MAX - need.slots));
        self.groups.dedup_by_key(|need| need.group);
    }

    /// R31: fills the shortfall of each layer from its tail, in rank order. True if a layer's candidates run out (R32).
    fn pad(&mut self, input: &PlanInput<'_>, bound: usize) -> bool {
        let pad_anything = planted("r31_pad_duplicates");
        for (layer, scratch) in active(input).zip(&mut self.scratch) {
            let Some(need) = need_of(&mut self.groups, layer.group) else {
                continue;
            };
            let LayerScratch { want, held, pad, delta } = scratch;
            pad.reset(bound);
            let mut count = *delta;
            for block in in_rank_order(layer.tail) {
                if count == need.slots {
                    break;
                }
                if (pad_anything || !want.contains(block) && !held.contains(block)) && pad.insert(block) {
                    count += 1;
                }
            }
            need.available = need.available.min(count);
        }
        !planted("r32_no_full_fallback") && self.groups.iter().any(|need| need.available < need.slots)
    }

    fn write_plan(&mut self, input: &PlanInput<'_>, full: bool, max_id: Option<LogicalBlock>) {
        let Self {
            scratch, groups, plan, ..
        } = self;
        plan.layers.clear();
        plan.uploads.clear();
        plan.pads.clear();
        for (layer, sets) in active(input).zip(scratch) {
            let (upload_start, pad_start) = (plan.uploads.len(), plan.pads.len());
            let mut truncated = 0;
            match (input.table_mode, full) {
                _ if planted("r30_order_of_want") => {
                    let missing = layer.want.iter().filter(|block| !sets.held.contains(**block));
                    plan.uploads.extend(missing);
                }
                // R30: what comes out of a set is ascending.
                (TableMode::PerLayer, _) => sets.want.append_difference(&sets.held, &mut plan.uploads),
                (TableMode::Common, false) => {
                    sets.want
                        .append_difference_and(&sets.held, &sets.pad, &mut plan.uploads);
                    sets.pad.append_to(&mut plan.pads);
                }
                (TableMode::Common, true) => {
                    // R32: the whole plan, all layers.
                    sets.want.append_to(&mut plan.uploads);
                    let available = need_of(groups, layer.group).map_or(0, |need| need.available);
                    truncated = sets.delta.saturating_sub(available);
                    if planted("r16_truncation_unsaid") {
                        truncated = 0;
                    }
                }
            }
            plan.layers.push(LayerEntry {
                layer: layer.layer,
                group: layer.group,
                upload: upload_start..plan.uploads.len(),
                pad: pad_start..plan.pads.len(),
                truncated,
            });
        }
        plan.kind = match (full, plan.uploads.is_empty()) {
            (true, _) => PlanKind::Full,
            (false, true) => PlanKind::Zero,
            (false, false) => PlanKind::Delta,
        };
        plan.max_id = max_id;
        plan.has_common_slots = input.table_mode == TableMode::Common && !full;
        plan.common_new_slots.clear();
        if plan.has_common_slots {
            plan.common_new_slots
                .extend(groups.iter().map(|need| (need.group, BlockCount(need.slots))));
        }
    }
}

fn need_of(groups: &mut [GroupNeed], group: GroupId) -> Option<&mut GroupNeed> {
    let index = groups.binary_search_by_key(&group, |need| need.group).ok()?;
    groups.get_mut(index)
}

/// The tail as it is ranked, best first.
fn in_rank_order(tail: &[LogicalBlock]) -> impl Iterator<Item = LogicalBlock> {
    let by_id = planted("r29_drop_rank_order").then(|| {
        let mut sorted = tail.to_vec();
        sorted.sort_unstable();
        sorted
    });
    let ranked = if by_id.is_some() { &[] } else { tail };
    by_id.into_iter().flatten().chain(ranked.iter().copied())
}

fn active<'a>(input: &PlanInput<'a>) -> impl Iterator<Item = &'a LayerInput<'a>> {
    let all = planted("r25_packs_inactive_layers");
    input.layers.iter().filter(move |layer| layer.active || all) // R25
}

/// The largest id in a slot. One more than an id stands for it, so that a hole is the smallest of all.
fn largest_held(slots: &[Option<LogicalBlock>]) -> Option<LogicalBlock> {
    let above = slots.iter().fold(0, |max: u64, slot| {
        max.max(slot.map_or(0, |block| u64::from(block.get()) + 1))
    });
    let max = above.checked_sub(1)?;
    u32::try_from(max).ok().map(LogicalBlock)
}

/// The largest id of a list. A fold without an early exit, so that the compiler makes it a vector loop.
fn largest(blocks: &[LogicalBlock]) -> Option<LogicalBlock> {
    let max = blocks.iter().fold(0, |max: u32, block| max.max(block.get()));
    (!blocks.is_empty()).then_some(LogicalBlock(max))
}

#[cfg(test)]
mod tests;
