//! What is resident for one request (R17), and how an operation changes it (R43, R57, R59).
//!
//! An operation is staged beside the tables that are in use: its destinations are allocated and the next tables are made,
//! but nothing of it counts until the ledger gives the evidence that all ranks have applied it. Then the tables change
//! places and the owner gives up what is named no more. On abort the staged tables are dropped and the tables in use were
//! never touched; the destinations go back when the transfers that may still write them have ended ([`Abandoned`]).
#![forbid(unsafe_code)]

use kvsluice_layout::ids::{
    BlockCount, DecoderLayer, DestinationBlock, GroupId, LogicalBlock, MapRevision, PhysicalBlock, PoolGeneration,
    RequestEpoch, ResidentSlot, SelectionRevision,
};
use kvsluice_layout::planted::planted;
use thiserror::Error;

use crate::diff_plan::{BlockDiffPlan, PlanKind};
use crate::ledger::{Aborted, Committed, Operation, OperationKey, Pending};
use crate::owner::{OwnerError, Owners, Reference};
use crate::retain::{RetainKind, RetainPlan};
use crate::table::{LayerTable, TableError};

/// Why an operation was not staged. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StageError {
    /// The operation is of another life of the request, of another pool generation, or does not follow the revisions.
    #[error("{found:?} does not follow {epoch:?}, {generation:?}, {revision:?}")]
    OtherState {
        /// The operation.
        found: OperationKey,
        /// Epoch of the residency.
        epoch: RequestEpoch,
        /// Pool generation of the residency.
        generation: PoolGeneration,
        /// Committed map revision.
        revision: MapRevision,
    },
    /// Another operation is staged.
    #[error("{staged:?} is staged: one operation at a time")]
    Busy {
        /// The staged operation.
        staged: OperationKey,
    },
    /// The operation moves bytes and the plan does not, or the other way round.
    #[error("an operation of {bytes} bytes for a plan that {}", if *.plan_moves { "moves blocks" } else { "moves nothing" })]
    Bytes {
        /// Bytes of the operation.
        bytes: u64,
        /// True if the plan moves blocks.
        plan_moves: bool,
    },
    /// The plan has a layer that the residency has not, or in another group.
    #[error("{layer:?} of {group:?} is not resident here")]
    UnknownLayer {
        /// The layer.
        layer: DecoderLayer,
        /// Its group in the plan.
        group: GroupId,
    },
    /// The plan was not made for these tables.
    #[error("the plan was made for other tables: {0}")]
    Table(#[from] TableError),
    /// No blocks for it.
    #[error(transparent)]
    Owner(#[from] OwnerError),
}

/// Why evidence did not settle what is staged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SettleError {
    /// Nothing or something else is staged. Nothing changed.
    #[error("evidence for {found:?}, staged is {staged:?}")]
    NotStaged {
        /// The operation of the evidence.
        found: OperationKey,
        /// What is staged.
        staged: Option<OperationKey>,
    },
    /// A reference was missing: the owner and the tables disagree, which no input can bring about. Reset the pools.
    #[error(transparent)]
    Owner(#[from] OwnerError),
}

/// Destinations of an operation that was aborted, while a transfer may still write them (R59, I6).
///
/// Drop behaviour: dropping it leaks the blocks until the pool is reset. That is the safe side: a device could still
/// write them. Give them back with [`Abandoned::settle`] once every rank's transfer has ended.
#[derive(Debug, PartialEq, Eq)]
#[must_use = "the blocks stay reserved until the transfers have ended and `settle` is called"]
pub struct Abandoned(Vec<(GroupId, PhysicalBlock)>);

impl Abandoned {
    /// The blocks, by group.
    pub fn blocks(&self) -> &[(GroupId, PhysicalBlock)] {
        &self.0
    }

    /// Gives the blocks back. The caller has seen the end of the transfer on every rank.
    pub fn settle(self, owners: &mut Owners) -> Result<(), OwnerError> {
        // In reverse, so that the free list is as it was before the plan (I7).
        for &(group, block) in self.0.iter().rev() {
            owners.of(group)?.release(block, Reference::Transfer)?;
        }
        Ok(())
    }
}

/// The resident blocks of one life of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Residency {
    request_epoch: RequestEpoch,
    pool_generation: PoolGeneration,
    map_revision: MapRevision,
    revision: SelectionRevision,
    tables: Vec<LayerTable>,
    /// Blocks of tables that a full plan replaced, each with a transfer reference: the devices name them until their
    /// group is retained (R32, R57).
    replaced: Vec<(GroupId, PhysicalBlock)>,
    staged: Option<Staged>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Staged {
    key: OperationKey,
    what: StagedWhat,
    /// What the tables will be.
    tables: Vec<LayerTable>,
    /// Destinations, each with a transfer reference.
    destinations: Vec<(GroupId, PhysicalBlock)>,
    /// Groups whose tables a retention rewrites on the devices.
    rewrites: Vec<GroupId>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StagedWhat {
    /// New blocks behind the valid slots.
    Append,
    /// New blocks in place of all slots (R32).
    Replace,
    /// Fewer slots.
    Retain,
}

impl Residency {
    /// Nothing resident, at g = 0 and r = 0, for these layers.
    pub fn new(
        request_epoch: RequestEpoch,
        pool_generation: PoolGeneration,
        layers: impl IntoIterator<Item = (DecoderLayer, GroupId)>,
    ) -> Self {
        Self {
            request_epoch,
            pool_generation,
            map_revision: MapRevision(0),
            revision: SelectionRevision(0),
            tables: layers
                .into_iter()
                .map(|(layer, group)| LayerTable::empty(layer, group))
                .collect(),
            replaced: Vec::new(),
            staged: None,
        }
    }

    /// What an earlier producer made resident and every rank holds (X25): the tables, and all blocks that belong to the
    /// request, each once. The caller has claimed them, so that each has a transfer reference: the tables' references
    /// take the place of those that they name, and what they do not name stays until its group is retained.
    pub fn resumed(
        request_epoch: RequestEpoch,
        pool_generation: PoolGeneration,
        revisions: (MapRevision, SelectionRevision),
        tables: Vec<LayerTable>,
        owned: Vec<(GroupId, PhysicalBlock)>,
        owners: &mut Owners,
    ) -> Result<Self, OwnerError> {
        for table in &tables {
            let owner = owners.of(table.group())?;
            let mut named = table.named().iter();
            named.try_for_each(|block| owner.acquire(*block, Reference::Layer))?;
        }
        let mut replaced = Vec::new();
        for (group, block) in owned {
            let owner = owners.of(group)?;
            if owner.references(block).layers == 0 {
                replaced.push((group, block));
            } else {
                owner.release(block, Reference::Transfer)?;
            }
        }
        let (map_revision, revision) = revisions;
        Ok(Self {
            request_epoch,
            pool_generation,
            map_revision,
            revision,
            tables,
            replaced,
            staged: None,
        })
    }

    /// Life of the request.
    pub fn request_epoch(&self) -> RequestEpoch {
        self.request_epoch
    }

    /// Generation of the device pools that the physical blocks are of.
    pub fn pool_generation(&self) -> PoolGeneration {
        self.pool_generation
    }

    /// Committed residency revision g.
    pub fn map_revision(&self) -> MapRevision {
        self.map_revision
    }

    /// Committed selection revision r.
    pub fn revision(&self) -> SelectionRevision {
        self.revision
    }

    /// The tables in use.
    pub fn tables(&self) -> &[LayerTable] {
        &self.tables
    }

    /// Blocks that the tables in use no longer name and the devices' tables still do, until the next retention of their
    /// group.
    pub fn replaced(&self) -> &[(GroupId, PhysicalBlock)] {
        &self.replaced
    }

    /// The tables that the staged operation will make, if one is staged.
    pub fn staged_tables(&self) -> Option<&[LayerTable]> {
        self.staged.as_ref().map(|staged| staged.tables.as_slice())
    }

    /// The upload that is staged, if any (R17, R45).
    pub fn pending_upload(&self) -> Option<OperationKey> {
        self.staged
            .as_ref()
            .filter(|staged| staged.what != StagedWhat::Retain || planted("r17_any_pending_is_an_upload"))
            .map(|staged| staged.key)
    }

    /// The retention that is staged, if any (R17, R45).
    pub fn pending_retain(&self) -> Option<OperationKey> {
        self.staged
            .as_ref()
            .filter(|staged| staged.what == StagedWhat::Retain)
            .map(|staged| staged.key)
    }

    /// Destinations of the staged operation, by group.
    pub fn destinations(&self) -> &[(GroupId, PhysicalBlock)] {
        self.staged.as_ref().map_or(&[], |staged| &staged.destinations)
    }

    /// What the staged upload brings: each layer with its (logical block, destination) pairs in slot order.
    pub fn uploads(
        &self,
    ) -> impl Iterator<Item = (DecoderLayer, impl Iterator<Item = (LogicalBlock, DestinationBlock)>)> {
        let upload = self.staged.as_ref().filter(|staged| staged.what != StagedWhat::Retain);
        upload.into_iter().flat_map(|staged| {
            self.tables.iter().zip(&staged.tables).map(|(old, new)| {
                let kept = if staged.what == StagedWhat::Append {
                    old.valid().index()
                } else {
                    0
                };
                // R4: the row's own column. (The known fault took one column for all rows.)
                let shared = staged.tables.first().filter(|_| planted("r4_shares_a_column"));
                let slots = shared
                    .unwrap_or(new)
                    .logical_by_slot()
                    .iter()
                    .zip(new.physical_by_slot())
                    .skip(kept);
                let pairs = slots.filter_map(|(logical, block)| Some(((*logical)?, DestinationBlock::from(*block))));
                (new.layer(), pairs)
            })
        })
    }

    /// Stages an upload: allocates its destinations and makes the tables of after its commit (R43). A zero plan is staged
    /// like any other, so that its round is finalised too (R42).
    ///
    /// Layers of one group share the destinations: one physical block carries a block of each of them.
    pub fn stage_upload(
        &mut self,
        operation: &Operation<Pending>,
        plan: &BlockDiffPlan,
        owners: &mut Owners,
    ) -> Result<(), StageError> {
        self.check_operation(operation, plan.kind() != PlanKind::Zero)?;
        let mut needs: Vec<(GroupId, BlockCount)> =
            plan.layers().map(|layer| (layer.group, layer.new_blocks())).collect();
        needs.sort_unstable_by_key(|(group, count)| (*group, u32::MAX - count.get()));
        needs.dedup_by_key(|(group, _)| *group);
        let destinations = allocate(owners, &needs)?;
        match self.tables_after_upload(plan, &destinations) {
            Ok(tables) => {
                let what = if plan.kind() == PlanKind::Full {
                    StagedWhat::Replace
                } else {
                    StagedWhat::Append
                };
                self.staged = Some(Staged {
                    key: operation.key(),
                    what,
                    tables,
                    destinations,
                    rewrites: Vec::new(),
                });
                Ok(())
            }
            Err(error) => {
                Abandoned(destinations).settle(owners)?;
                Err(error)
            }
        }
    }

    /// Stages a retention, one plan per group. Nothing is allocated; the tables in use stay until the commit (R57, R59).
    pub fn stage_retain(
        &mut self,
        operation: &Operation<Pending>,
        plans: &[(GroupId, &RetainPlan)],
    ) -> Result<(), StageError> {
        let moves = plans
            .iter()
            .any(|(_, plan)| plan.kind() == RetainKind::ExistingByteMovePlan);
        self.check_operation(operation, moves)?;
        let mut tables = self.tables.clone();
        for &(group, plan) in plans {
            for (layer, keep, physical) in plan.layers() {
                let table = table_of(&mut tables, layer, group)?;
                let logical_of = |slot: &ResidentSlot| table.logical_by_slot().get(slot.index()).copied().flatten();
                let logical = keep.iter().map(logical_of).collect();
                let physical = match plan.kind() {
                    // The kept bytes are packed to the front of the layer's own blocks.
                    RetainKind::ExistingByteMovePlan => table.named().iter().take(keep.len()).copied().collect(),
                    RetainKind::SharedTableRemap | RetainKind::LayerTableRemap => physical.to_vec(),
                };
                *table = LayerTable::new(layer, group, logical, physical, block_count(keep.len()))?;
            }
        }
        let (key, what) = (operation.key(), StagedWhat::Retain);
        self.staged = Some(Staged {
            key,
            what,
            tables,
            destinations: Vec::new(),
            rewrites: plans.iter().map(|(group, _)| *group).collect(),
        });
        Ok(())
    }

    /// Makes the staged tables the ones in use, on the evidence that all ranks hold them. Appends the blocks that became
    /// free to `retired` (R55). A full plan frees none: the devices' tables name the old blocks until the retention.
    pub fn commit(
        &mut self,
        operation: &Operation<Committed>,
        owners: &mut Owners,
        retired: &mut Vec<(GroupId, PhysicalBlock)>,
    ) -> Result<(), SettleError> {
        let staged = self.take_staged(operation.key())?;
        let tables = self.tables.iter().zip(&staged.tables);
        let changed = tables.filter(|(old, new)| old.named() != new.named());
        // New references first: a block that stays is never without one.
        for (_, new) in changed.clone() {
            let owner = owners.of(new.group())?;
            new.named()
                .iter()
                .try_for_each(|block| owner.acquire(*block, Reference::Layer))?;
        }
        if staged.what == StagedWhat::Replace && !planted("r57_replaced_blocks_freed_early") {
            for (old, _) in changed.clone() {
                let owner = owners.of(old.group())?;
                for &block in old.named() {
                    owner.acquire(block, Reference::Transfer)?; // R57
                    self.replaced.push((old.group(), block));
                }
            }
        }
        for (old, _) in changed {
            release_all(owners, old.group(), old.named(), Reference::Layer, retired)?;
        }
        for (group, block) in staged.destinations {
            release_all(owners, group, &[block], Reference::Transfer, retired)?;
        }
        for (group, block) in self
            .replaced
            .extract_if(.., |(group, _)| staged.rewrites.contains(group))
        {
            release_all(owners, group, &[block], Reference::Transfer, retired)?;
        }
        self.tables = staged.tables;
        self.map_revision = operation.key().map_revision; // R44
        self.revision = operation.revision();
        Ok(())
    }

    /// Drops what is staged; the tables in use, g and r are as they were (R59, I7).
    pub fn abort(&mut self, operation: &Operation<Aborted>) -> Result<Abandoned, SettleError> {
        let staged = self.take_staged(operation.key())?;
        if planted("r59_abort_keeps_tables") {
            self.tables = staged.tables;
        }
        Ok(Abandoned(staged.destinations))
    }

    /// Ends this life: gives up every reference of its tables. Appends the blocks that became free to `retired`. What was
    /// still staged is abandoned.
    pub fn close(
        self,
        owners: &mut Owners,
        retired: &mut Vec<(GroupId, PhysicalBlock)>,
    ) -> Result<Abandoned, OwnerError> {
        for table in &self.tables {
            release_all(owners, table.group(), table.named(), Reference::Layer, retired)?;
        }
        for (group, block) in self.replaced {
            release_all(owners, group, &[block], Reference::Transfer, retired)?;
        }
        Ok(Abandoned(self.staged.map_or(Vec::new(), |staged| staged.destinations)))
    }

    fn check_operation(&self, operation: &Operation<Pending>, plan_moves: bool) -> Result<(), StageError> {
        let found = operation.key();
        let (epoch, generation, revision) = (self.request_epoch, self.pool_generation, self.map_revision);
        let follows = found.map_revision.get().checked_sub(revision.get()) == Some(u64::from(operation.bytes() > 0));
        if found.request_epoch != epoch || found.pool_generation != generation || !follows {
            return Err(StageError::OtherState {
                found,
                epoch,
                generation,
                revision,
            });
        }
        if let Some(staged) = &self.staged
            && !planted("r43_stages_over_what_is_staged")
        {
            return Err(StageError::Busy { staged: staged.key }); // I3
        }
        if plan_moves != (operation.bytes() > 0) {
            return Err(StageError::Bytes {
                bytes: operation.bytes(),
                plan_moves,
            });
        }
        Ok(())
    }

    fn tables_after_upload(
        &self,
        plan: &BlockDiffPlan,
        destinations: &[(GroupId, PhysicalBlock)],
    ) -> Result<Vec<LayerTable>, StageError> {
        let mut tables = self.tables.clone();
        for row in plan.layers() {
            let (layer, group) = (row.layer, row.group);
            let table = table_of(&mut tables, layer, group)?;
            let kept = if plan.kind() == PlanKind::Full {
                0
            } else {
                table.valid().index()
            };
            let new = destinations
                .iter()
                .filter(|(of, _)| *of == group)
                .map(|(_, block)| *block);
            let uploaded = row.upload.iter().map(|block| Some(*block));
            let logical: Vec<_> = table
                .logical_by_slot()
                .iter()
                .take(kept)
                .copied()
                .chain(uploaded)
                .collect();
            let physical: Vec<_> = table
                .named()
                .iter()
                .take(kept)
                .copied()
                .chain(new.take(row.upload.len()))
                .collect();
            let valid = block_count(physical.len());
            *table = LayerTable::new(layer, group, logical, physical, valid)?;
        }
        Ok(tables)
    }

    fn take_staged(&mut self, found: OperationKey) -> Result<Staged, SettleError> {
        match self.staged.take_if(|staged| staged.key == found) {
            Some(staged) => Ok(staged),
            None => Err(SettleError::NotStaged {
                found,
                staged: self.staged.as_ref().map(|staged| staged.key),
            }),
        }
    }
}

fn table_of(tables: &mut [LayerTable], layer: DecoderLayer, group: GroupId) -> Result<&mut LayerTable, StageError> {
    let found = tables
        .iter_mut()
        .find(|table| table.layer() == layer && table.group() == group);
    found.ok_or(StageError::UnknownLayer { layer, group })
}

fn allocate(owners: &mut Owners, needs: &[(GroupId, BlockCount)]) -> Result<Vec<(GroupId, PhysicalBlock)>, OwnerError> {
    let mut destinations = Vec::new();
    let mut blocks = Vec::new();
    for &(group, count) in needs {
        blocks.clear();
        if let Err(error) = owners.of(group).and_then(|owner| owner.allocate(count, &mut blocks)) {
            // All or nothing, over all groups.
            Abandoned(destinations).settle(owners)?;
            return Err(error);
        }
        destinations.extend(blocks.iter().map(|block| (group, *block)));
    }
    Ok(destinations)
}

fn release_all(
    owners: &mut Owners,
    group: GroupId,
    blocks: &[PhysicalBlock],
    kind: Reference,
    freed: &mut Vec<(GroupId, PhysicalBlock)>,
) -> Result<(), OwnerError> {
    let owner = owners.of(group)?;
    for &block in blocks {
        if owner.release(block, kind)? {
            freed.push((group, block));
        }
    }
    Ok(())
}

fn block_count(len: usize) -> BlockCount {
    BlockCount(u32::try_from(len).unwrap_or(u32::MAX))
}

#[cfg(test)]
mod tests;
