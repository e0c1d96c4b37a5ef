//! Which resident slots stay (R51–R53, R56, R61): the keep map of one group, made into the cheapest exact plan.
//!
//! If every active layer keeps the same slots of the same table, the table itself is rewritten with them and no byte
//! moves. If not, each layer gets a table of its own where the device supports that, and otherwise the bytes are moved.
//! The check is made for every plan, whatever the selection method is called (R52).
#![forbid(unsafe_code)]

use core::ops::Range;

use kvsluice_layout::ids::{BlockCount, DecoderLayer, PhysicalBlock, PoolGeneration, RequestEpoch, ResidentSlot};
use kvsluice_layout::planted::planted;
use thiserror::Error;

use crate::block_set::BlockSet;

/// One layer of the group.
#[derive(Clone, Copy, Debug)]
pub struct RetainLayer<'a> {
    /// The layer.
    pub layer: DecoderLayer,
    /// Inactive layers keep what they name and get no table (R7).
    pub active: bool,
    /// Physical block by slot.
    pub physical_by_slot: &'a [PhysicalBlock],
    /// How many leading slots count.
    pub valid: BlockCount,
    /// Slots to keep, in the order that attention shall read them.
    pub keep: &'a [ResidentSlot],
}

impl<'a> RetainLayer<'a> {
    fn named(&self) -> &'a [PhysicalBlock] {
        let len = self.physical_by_slot.len().min(self.valid.index());
        self.physical_by_slot.get(..len).unwrap_or_default()
    }
}

/// What a retain plan is made from: the residency of one group and the keep map for it.
#[derive(Clone, Copy, Debug)]
pub struct RetainInput<'a> {
    /// Request epoch that the keep map was made for.
    pub request_epoch: RequestEpoch,
    /// Pool generation that the keep map was made for.
    pub pool_generation: PoolGeneration,
    /// Request epoch of the residency.
    pub expected_request_epoch: RequestEpoch,
    /// Pool generation of the residency.
    pub expected_pool_generation: PoolGeneration,
    /// True if the device attends through one table per layer.
    pub supports_layer_tables: bool,
    /// The layers of the group.
    pub layers: &'a [RetainLayer<'a>],
    /// Blocks of recent, partial and draft tokens and of the sliding window: never released here (R61).
    pub protected: &'a [PhysicalBlock],
}

/// How the kept slots become the resident ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetainKind {
    /// One new table for all active layers; no byte moves (R51).
    SharedTableRemap,
    /// A new table per active layer; no byte moves (R53).
    LayerTableRemap,
    /// The kept blocks of each layer are packed to the front of its own physical list.
    ExistingByteMovePlan,
}

/// Why there is no retain plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum RetainError {
    /// A layer number is given twice, active or not.
    #[error("{layer:?} is given twice")]
    DuplicateLayer {
        /// The layer.
        layer: DecoderLayer,
    },
    /// The keep map is of another life of the request.
    #[error("keep map of {found:?}, residency of {expected:?}: make a new selection")]
    StaleEpoch {
        /// Epoch of the keep map.
        found: RequestEpoch,
        /// Epoch of the residency.
        expected: RequestEpoch,
    },
    /// The keep map is of another pool generation.
    #[error("keep map of {found:?}, residency of {expected:?}: make a new selection")]
    StaleGeneration {
        /// Generation of the keep map.
        found: PoolGeneration,
        /// Generation of the residency.
        expected: PoolGeneration,
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
    /// A slot to keep is not a valid slot.
    #[error("{layer:?} keeps {slot:?} of {valid} valid slots")]
    SlotOutOfRange {
        /// The layer.
        layer: DecoderLayer,
        /// The slot.
        slot: ResidentSlot,
        /// Valid slots.
        valid: BlockCount,
    },
    /// A slot is kept twice.
    #[error("{layer:?} keeps {slot:?} twice")]
    DuplicateSlot {
        /// The layer.
        layer: DecoderLayer,
        /// The slot.
        slot: ResidentSlot,
    },
}

/// The plan of one retention: immutable for everyone but the planner, which reuses its memory (R57).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RetainPlan {
    kind: RetainKind,
    layers: Vec<(DecoderLayer, Range<usize>)>,
    slots: Vec<ResidentSlot>,
    tables: Vec<PhysicalBlock>,
    released: Vec<PhysicalBlock>,
}

impl RetainPlan {
    /// How the kept slots become the resident ones.
    pub fn kind(&self) -> RetainKind {
        self.kind
    }

    /// The one new table, if the plan is a [`RetainKind::SharedTableRemap`]; empty without an active layer.
    pub fn shared_table(&self) -> Option<&[PhysicalBlock]> {
        (self.kind == RetainKind::SharedTableRemap).then(|| {
            self.layers
                .first()
                .and_then(|(_, range)| self.tables.get(range.clone()))
                .unwrap_or_default()
        })
    }

    /// Each active layer with the slots it keeps and their physical blocks (before any byte is moved), in input order.
    pub fn layers(&self) -> impl ExactSizeIterator<Item = (DecoderLayer, &[ResidentSlot], &[PhysicalBlock])> {
        self.layers.iter().map(|(layer, range)| {
            let slots = self.slots.get(range.clone()).unwrap_or_default();
            (*layer, slots, self.tables.get(range.clone()).unwrap_or_default())
        })
    }

    /// Blocks named by a valid slot of an active layer before and by no layer after, ascending. The owner frees those
    /// that nobody else refers to (R54, R55).
    pub fn released(&self) -> &[PhysicalBlock] {
        &self.released
    }
}

/// Makes retain plans. Holds the scratch and the plan, so that it allocates nothing once the largest input was seen.
#[derive(Debug)]
pub struct RetainPlanner {
    numbers: Vec<DecoderLayer>,
    kept: BlockSet<ResidentSlot>,
    before: BlockSet<PhysicalBlock>,
    after: BlockSet<PhysicalBlock>,
    plan: RetainPlan,
}

impl Default for RetainPlanner {
    fn default() -> Self {
        let plan = RetainPlan {
            kind: RetainKind::SharedTableRemap,
            layers: Vec::new(),
            slots: Vec::new(),
            tables: Vec::new(),
            released: Vec::new(),
        };
        Self {
            numbers: Vec::new(),
            kept: BlockSet::default(),
            before: BlockSet::default(),
            after: BlockSet::default(),
            plan,
        }
    }
}

impl RetainPlanner {
    /// A planner without scratch yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes the retain plan of one group (R53); it stays valid until the next call.
    ///
    /// Errors in the order of the variants of [`RetainError`], each over all active layers before the next. Cost:
    /// linear in the lists, plus one word per 64 blocks up to the largest physical block.
    pub fn plan_retain_group(&mut self, input: &RetainInput<'_>) -> Result<&RetainPlan, RetainError> {
        let kind = if shares_one_table(input) {
            RetainKind::SharedTableRemap
        } else if input.supports_layer_tables {
            RetainKind::LayerTableRemap
        } else {
            RetainKind::ExistingByteMovePlan
        };
        self.plan(input, kind)
    }

    /// The plan of the given kind for `input`, though another may be cheaper: to compare the kinds under one selection
    /// (R11). `None` where one shared table would not be exact (R51).
    ///
    /// # Errors
    /// As [`plan_retain_group`](Self::plan_retain_group).
    pub fn plan_retain_group_as(
        &mut self,
        input: &RetainInput<'_>,
        kind: RetainKind,
    ) -> Result<Option<&RetainPlan>, RetainError> {
        let exact = kind != RetainKind::SharedTableRemap || shares_one_table(input) || planted("r51_shares_anyway");
        Ok(Some(self.plan(input, kind)?).filter(|_| exact))
    }

    fn plan(&mut self, input: &RetainInput<'_>, kind: RetainKind) -> Result<&RetainPlan, RetainError> {
        self.check(input)?;
        let Self { plan, .. } = self;
        plan.layers.clear();
        plan.slots.clear();
        plan.tables.clear();
        for layer in active(input) {
            let start = plan.slots.len();
            plan.slots.extend_from_slice(layer.keep);
            // R51: the blocks of the slots that are kept, not the first so many blocks.
            if planted("r51_prefix") {
                plan.tables.extend(layer.named().iter().take(layer.keep.len()));
            } else {
                // R9: what this layer keeps and nothing else; there is no plan whose layers attend the union.
                let union = active(input)
                    .flat_map(|layer| layer.keep)
                    .filter(|_| planted("r9_union"));
                let extra = union.filter(|slot| !layer.keep.contains(slot));
                plan.tables
                    .extend((layer.keep.iter().chain(extra)).filter_map(|slot| layer.named().get(slot.index())));
            }
            plan.layers.push((layer.layer, start..plan.slots.len()));
        }
        plan.kind = kind;
        self.release(input);
        Ok(&self.plan)
    }

    fn check(&mut self, input: &RetainInput<'_>) -> Result<(), RetainError> {
        self.numbers.clear();
        self.numbers.extend(input.layers.iter().map(|layer| layer.layer));
        self.numbers.sort_unstable();
        if let Some(&[layer, _]) = self.numbers.array_windows().find(|[a, b]| a == b) {
            return Err(RetainError::DuplicateLayer { layer });
        }
        if input.request_epoch != input.expected_request_epoch {
            let (found, expected) = (input.request_epoch, input.expected_request_epoch);
            return Err(RetainError::StaleEpoch { found, expected });
        }
        if input.pool_generation != input.expected_pool_generation && !planted("r53_generation_unchecked") {
            let (found, expected) = (input.pool_generation, input.expected_pool_generation);
            return Err(RetainError::StaleGeneration { found, expected });
        }
        for layer in active(input) {
            if layer.valid.index() > layer.physical_by_slot.len() {
                let (valid, len) = (layer.valid, layer.physical_by_slot.len());
                return Err(RetainError::Valid {
                    layer: layer.layer,
                    valid,
                    len,
                });
            }
        }
        for layer in active(input) {
            if let Some(&slot) = layer.keep.iter().find(|slot| slot.get() >= layer.valid.get()) {
                return Err(RetainError::SlotOutOfRange {
                    layer: layer.layer,
                    slot,
                    valid: layer.valid,
                });
            }
        }
        for layer in active(input) {
            self.kept.reset(layer.valid.index());
            if let Some(&slot) = layer.keep.iter().find(|slot| !self.kept.insert(**slot)) {
                return Err(RetainError::DuplicateSlot {
                    layer: layer.layer,
                    slot,
                });
            }
        }
        Ok(())
    }

    /// Released: what active layers named before, without what any layer names after and what is protected.
    fn release(&mut self, input: &RetainInput<'_>) {
        let Self {
            before, after, plan, ..
        } = self;
        let largest = input
            .layers
            .iter()
            .flat_map(|layer| layer.named())
            .chain(input.protected)
            .max();
        let bound = largest.map_or(0, |block| block.index() + 1);
        before.reset(bound);
        after.reset(bound);
        for layer in input.layers {
            let still = match (layer.active, plan.kind) {
                (false, _) => layer.named(),
                (true, RetainKind::ExistingByteMovePlan) => layer.named().get(..layer.keep.len()).unwrap_or_default(),
                (true, _) => &[],
            };
            for &block in still {
                after.insert(block);
            }
            if layer.active {
                for &block in layer.named() {
                    before.insert(block);
                }
            }
        }
        if plan.kind != RetainKind::ExistingByteMovePlan {
            // R56: what any layer keeps is kept. Disjoint keeps release nothing, though no byte moves.
            let mut kept = plan.tables.as_slice();
            if planted("r56_one_layer_decides") {
                let first = plan.layers.first().and_then(|(_, first)| kept.get(first.clone()));
                kept = first.unwrap_or_default();
            }
            for &block in kept {
                after.insert(block);
            }
        }
        if !planted("r61_clears_protected") {
            for &block in input.protected {
                after.insert(block); // R61
            }
        }
        plan.released.clear();
        before.append_difference(after, &mut plan.released);
    }
}

/// R7, R51: the ordered keep lists and the tables of all active layers are equal, and the order is the resident one.
fn shares_one_table(input: &RetainInput<'_>) -> bool {
    let mut layers = active(input);
    let Some(first) = layers.next() else { return true };
    if planted("r6_one_table_for_all") {
        return true;
    }
    let ascending = first.keep.is_sorted() || planted("r53_any_order");
    ascending && layers.all(|layer| same_keep(layer.keep, first.keep) && layer.named() == first.named())
}

fn same_keep(a: &[ResidentSlot], b: &[ResidentSlot]) -> bool {
    if planted("r7_r52_compare_as_sets") {
        return a.len() == b.len() && a.iter().all(|slot| b.contains(slot));
    }
    a == b
}

fn active<'a>(input: &RetainInput<'a>) -> impl Iterator<Item = &'a RetainLayer<'a>> {
    input.layers.iter().filter(|layer| layer.active)
}

#[cfg(test)]
mod tests;
