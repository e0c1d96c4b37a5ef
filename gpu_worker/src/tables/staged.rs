//! A change of one request's tables, before it counts.

use std::sync::Arc;

use kvsluice_layout::ids::{
    DecoderLayer, GroupId, MapRevision, PhysicalBlock, PoolGeneration, RequestEpoch, SelectionRevision,
};
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{NEW_SLOT, Pair};
use thiserror::Error;

use super::{Shape, State, Table, image};
use crate::device::TableSlot;

/// Why no change of a request begins. The producer sent an operation that does not follow from this rank's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StageError {
    /// The operation is about other pools.
    #[error("found {found:?}, expected {expected:?}")]
    Generation {
        /// Generation of the operation.
        found: PoolGeneration,
        /// Generation of this rank.
        expected: PoolGeneration,
    },
    /// Another life of the request is still here.
    #[error("found {found:?}, expected {expected:?}; end that one first")]
    Epoch {
        /// Epoch of the operation.
        found: RequestEpoch,
        /// Epoch of the state.
        expected: RequestEpoch,
    },
    /// The operation leads back.
    #[error("the operation leads to revisions {found:?}, before {least:?} where the request is")]
    Revision {
        /// Revisions (g, r) of the operation.
        found: (MapRevision, SelectionRevision),
        /// Revisions (g, r) of the state.
        least: (MapRevision, SelectionRevision),
    },
    /// A change of this request is staged already: stage again after its swap.
    #[error("a change of this request is staged; stage again after its swap")]
    Busy,
    /// No slot is free.
    #[error("{requests_max} requests have tables, which is the most; end one, or raise requests_max")]
    Full {
        /// Most requests.
        requests_max: u32,
    },
}

/// What is wrong with a row of a change. The change is to be discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum TableFault {
    /// The geometry has no such layer or group.
    #[error("no such layer or group: {found}")]
    Unknown {
        /// Number of the layer or group.
        found: u32,
    },
    /// More blocks than a table holds.
    #[error("a table of {found} blocks, {blocks_max} is the most; raise blocks_max")]
    TooLong {
        /// Blocks of the new table.
        found: usize,
        /// Most blocks.
        blocks_max: u32,
    },
    /// More valid tokens than the blocks hold.
    #[error("{found} valid tokens in blocks that hold {most}")]
    Valid {
        /// Valid tokens of the row.
        found: u32,
        /// Tokens that its blocks hold.
        most: u64,
    },
    /// The old slot does not hold the named block: this rank's table is not the one that the plan was made from.
    #[error("slot {slot} holds {found:?}, the plan says {expected:?}")]
    Slot {
        /// The old slot.
        slot: u32,
        /// What it holds here.
        found: Option<PhysicalBlock>,
        /// What the plan says.
        expected: PhysicalBlock,
    },
    /// A block that does not belong to the request, or is outside the pool.
    #[error("{block:?} does not belong to the request")]
    NotOwned {
        /// The block.
        block: PhysicalBlock,
    },
}

/// A row of a Keep or a Retain: the table that it makes.
#[derive(Clone, Copy, Debug)]
pub struct NewTable<'a> {
    /// (Old slot or new, physical block), or (physical block read, written), in slot order.
    pub pairs: &'a [Pair],
    /// What each block holds by the producer's account, or nothing.
    pub tags: &'a [u64],
    /// Tokens that are valid.
    pub valid_tokens: u32,
}

/// A private copy of a request's state, to be changed and then swapped in or discarded, whole. Rows come from a plan
/// that passed the lease check: ids in range, no block twice in a row (X9).
///
/// # Drop behaviour
/// Dropping it changes nothing, but the store still counts it as staged: give it to
/// [`TableStore::swap`](super::TableStore::swap) or [`TableStore::discard`](super::TableStore::discard).
#[derive(Debug)]
#[must_use = "swap or discard it"]
pub struct Staged {
    shape: Arc<Shape>,
    next: State,
    slot: TableSlot,
    generation: PoolGeneration,
    ended: bool,
    /// Owner sets have been added to since they were last sorted.
    unsettled: bool,
}

impl Staged {
    pub(super) const fn new(shape: Arc<Shape>, next: State, slot: TableSlot, generation: PoolGeneration) -> Self {
        Self {
            shape,
            next,
            slot,
            generation,
            ended: false,
            unsettled: false,
        }
    }

    pub(super) fn into_parts(self) -> (State, PoolGeneration) {
        (self.next, self.generation)
    }

    pub(super) fn settle(&mut self) {
        if std::mem::take(&mut self.unsettled) {
            self.next.settle();
        }
    }

    pub(super) const fn is_ended(&self) -> bool {
        self.ended
    }

    /// Where the device keeps the request's table.
    pub const fn slot(&self) -> TableSlot {
        self.slot
    }

    /// Writes the new table image into `out`, for [`Device::write_table`](crate::device::Device::write_table).
    pub fn image(&self, out: &mut Vec<u32>) {
        image(&self.next, &self.shape, out);
    }

    /// An upload: the written blocks of `group` belong to the request from now on.
    pub fn own(&mut self, group: GroupId, blocks: impl IntoIterator<Item = u32>) -> Result<(), TableFault> {
        let (_, pool) = self.shape_of(group)?;
        let owned = &mut self
            .next
            .groups
            .get_mut(group.index())
            .ok_or(TableFault::Unknown { found: group.0 })?
            .owned;
        for block in blocks {
            if block >= pool {
                return Err(TableFault::NotOwned {
                    block: PhysicalBlock(block),
                });
            }
            owned.push(block);
        }
        self.unsettled = true;
        Ok(())
    }

    /// Blocks of `group` that no table of its layers names leave the owner set (R55: the producer retires the same).
    pub fn own_only_named(&mut self, group: GroupId) -> Result<(), TableFault> {
        let unknown = TableFault::Unknown { found: group.0 };
        let State { groups, layers, .. } = &mut self.next;
        let of = groups.get_mut(group.index()).ok_or(unknown)?;
        of.owned.clear();
        if of.shared {
            of.owned.extend(&of.table.blocks);
        } else {
            let tables = self.shape.layers_of(group).filter_map(|layer| layers.get(layer));
            of.owned.extend(tables.flat_map(|table| &table.blocks));
        }
        self.unsettled = true;
        Ok(())
    }

    /// A shared remap: one table for all layers of `group`, from (old slot or new, physical block) in slot order (R51).
    pub fn remap_shared(&mut self, group: GroupId, table: NewTable<'_>) -> Result<(), TableFault> {
        let pairs = table.pairs;
        self.settle();
        let shared = self.group(group)?.shared;
        for pair in pairs {
            // Active layers had equal entries (R53), and a rank does not know which are active: one layer suffices.
            let holds = |layer| self.next.table(group, layer).and_then(|table| held(table, pair.source));
            let found = if shared {
                held(&self.group(group)?.table, pair.source)
            } else {
                let mut layers = self.shape.layers_of(group).map(holds);
                layers.find(|found| *found == Some(pair.destination)).flatten()
            };
            self.check(group, pair, found)?;
        }
        self.check_size(group, table)?;
        let of = self
            .next
            .groups
            .get_mut(group.index())
            .ok_or(TableFault::Unknown { found: group.0 })?;
        of.shared = true;
        of.table.set(table);
        for layer in self.shape.layers_of(group) {
            self.next.layers.get_mut(layer).into_iter().for_each(Table::clear);
        }
        Ok(())
    }

    /// A layer remap: the table of `layer`, from (old slot or new, physical block) in slot order (R53).
    pub fn remap_layer(&mut self, layer: DecoderLayer, table: NewTable<'_>) -> Result<(), TableFault> {
        let pairs = table.pairs;
        self.settle();
        let group = self.group_of(layer)?;
        for pair in pairs {
            let old = self.next.table(group, layer.index());
            self.check(group, pair, old.and_then(|old| held(old, pair.source)))?;
        }
        self.check_size(group, table)?;
        self.replace_layer(group, layer, table)
    }

    /// A byte move: the table of `layer` becomes the blocks written, in slot order, a block that stays named as (block,
    /// block). What is read belongs to the request; what is written does from now on.
    pub fn move_layer(&mut self, layer: DecoderLayer, table: NewTable<'_>) -> Result<(), TableFault> {
        let pairs = table.pairs;
        self.settle();
        let group = self.group_of(layer)?;
        for pair in pairs {
            self.check_owned(group, pair.source)?;
        }
        self.own(group, pairs.iter().map(|pair| pair.destination))?;
        self.check_size(group, table)?;
        self.replace_layer(group, layer, table)
    }

    /// The request ends with this change: it owns nothing, and its slot is free after the swap.
    pub fn end(&mut self) {
        self.next.clear(&self.shape);
        self.ended = true;
    }

    fn replace_layer(&mut self, group: GroupId, layer: DecoderLayer, table: NewTable<'_>) -> Result<(), TableFault> {
        let State { groups, layers, .. } = &mut self.next;
        let of = groups
            .get_mut(group.index())
            .ok_or(TableFault::Unknown { found: group.0 })?;
        if std::mem::replace(&mut of.shared, false) {
            // From shared to per layer: every layer starts from what it had.
            for layer in self.shape.layers_of(group) {
                if let Some(own) = layers.get_mut(layer) {
                    own.copy_from(&of.table);
                }
            }
            of.table.clear();
        }
        layers
            .get_mut(layer.index())
            .ok_or(TableFault::Unknown { found: layer.0 })?
            .set(table);
        // R8: the owner set is no table's, and stays.
        if planted("r8_a_table_is_the_owner_set") {
            of.owned = table.pairs.iter().map(|pair| pair.destination).collect();
            self.unsettled = true;
        }
        Ok(())
    }

    fn check_size(&self, group: GroupId, table: NewTable<'_>) -> Result<(), TableFault> {
        let NewTable {
            pairs, valid_tokens, ..
        } = table;
        let blocks_max = self.shape.limits.blocks_max;
        if pairs.len() > blocks_max as usize {
            return Err(TableFault::TooLong {
                found: pairs.len(),
                blocks_max,
            });
        }
        let (block_tokens, _) = self.shape_of(group)?;
        let most = pairs.len() as u64 * u64::from(block_tokens);
        if u64::from(valid_tokens) > most {
            return Err(TableFault::Valid {
                found: valid_tokens,
                most,
            });
        }
        Ok(())
    }

    /// A pair of a remap: a block that was in a table already is in the slot that the plan says, and so belongs to the
    /// request (I2); a new one must have been uploaded for it.
    fn check(&self, group: GroupId, pair: &Pair, found: Option<u32>) -> Result<(), TableFault> {
        if pair.source == NEW_SLOT {
            return self.check_owned(group, pair.destination);
        }
        if found == Some(pair.destination) || planted("trust_old_slots") {
            return Ok(());
        }
        let (slot, expected) = (pair.source, PhysicalBlock(pair.destination));
        Err(TableFault::Slot {
            slot,
            found: found.map(PhysicalBlock),
            expected,
        })
    }

    fn check_owned(&self, group: GroupId, block: u32) -> Result<(), TableFault> {
        match self.group(group)?.owned.binary_search(&block) {
            Ok(_) => Ok(()),
            Err(_) if planted("tables_name_any_block") => Ok(()),
            Err(_) => Err(TableFault::NotOwned {
                block: PhysicalBlock(block),
            }),
        }
    }

    fn group(&self, group: GroupId) -> Result<&super::Group, TableFault> {
        self.next
            .groups
            .get(group.index())
            .ok_or(TableFault::Unknown { found: group.0 })
    }

    fn group_of(&self, layer: DecoderLayer) -> Result<GroupId, TableFault> {
        self.shape
            .groups
            .get(layer.index())
            .copied()
            .ok_or(TableFault::Unknown { found: layer.0 })
    }

    fn shape_of(&self, group: GroupId) -> Result<(u32, u32), TableFault> {
        self.shape
            .blocks
            .get(group.index())
            .copied()
            .ok_or(TableFault::Unknown { found: group.0 })
    }
}

/// What a slot of a table holds.
fn held(table: &Table, slot: u32) -> Option<u32> {
    table.blocks.get(slot as usize).copied()
}
