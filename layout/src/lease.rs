//! Leases of blocks, and the checks that come before them (X9, X14).
//!
//! Both sides of a channel keep one [`LeaseTable`]: the producer checks before it publishes, a worker before any copy,
//! by the same code. (group, source block) and (group, physical block) are the lease keys. A lease is a count: a block in
//! k operations is free after k. A writer lease is exclusive to one plan; where a takeover finds two in a journal, whose
//! first has ended, the block stays written until both are released.
//!
//! Cost: 8 bytes per block and side. A pair costs one look at its source and one at its destination when it is checked,
//! and again when it is leased and released; nothing is sorted or hashed.

use crate::geometry::Geometry;
use crate::ids::{GroupId, PhysicalBlock, SourceBlock};
use crate::planes::GeometryMap;
use crate::planted::planted;
use crate::record::{ALL_LAYERS, Kind, NEW_SLOT, Pair, RetainMode, RowRecord, SourceKind};
use crate::refusal::Refusal;

/// The rows of a draft or of a plan, as the lease table reads them.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    /// Kind of the record.
    pub kind: Kind,
    /// Mode of a Retain.
    pub mode: Option<RetainMode>,
    /// The rows.
    pub rows: &'a [RowRecord],
    /// All pairs of the record.
    pub pairs: &'a [Pair],
}

/// Bit of `lease` in a block that a plan writes; the other bits count.
const WRITTEN: u32 = 1 << 31;
/// A null block that is no block.
const NO_NULL: u32 = u32::MAX;

const HOST: usize = 0;
const DEVICE: usize = 1;

#[derive(Clone, Copy, Default)]
struct Block {
    /// Number of leases, with [`WRITTEN`] while one of them writes.
    lease: u32,
    /// Row that last named the block as a destination: finds duplicates without sorting (X9).
    stamp: u32,
}

struct Group {
    /// Blocks of the host pool and of the device pool.
    blocks: [Vec<Block>; 2],
    null: [u32; 2],
    gather_start: u32,
    /// Host blocks that every rank has registered; the rest may not be leased yet (X31).
    ready: u32,
    /// Plan that last had a row for all layers of the group.
    stamp: u32,
}

struct Layer {
    group: u32,
    tensor: u32,
}

/// One end of a pair: which pool it names, within which ids, and whether the plan needs it for itself alone.
#[derive(Clone, Copy)]
struct End {
    side: usize,
    from: u32,
    to: u32,
    exclusive: bool,
}

/// Checks plans and holds the leases of those that run.
pub struct LeaseTable {
    groups: Vec<Group>,
    layers: Vec<Layer>,
    /// Plan that last filled the tensor.
    tensors: Vec<u32>,
    stamp: u32,
}

impl LeaseTable {
    /// A table without leases for the pools of `map`; every host block counts as pinned.
    pub fn new(map: &GeometryMap) -> Self {
        let geometry: &Geometry = map.geometry();
        let skip_null = planted("x9_skip_null");
        let blocks = |count: u32, null: u32| {
            let mut blocks = vec![Block::default(); count as usize];
            // A null block is one that is never free.
            if let Some(block) = blocks.get_mut(null as usize) {
                block.lease = WRITTEN;
            }
            blocks
        };
        let groups = geometry
            .groups
            .iter()
            .map(|spec| {
                (
                    spec,
                    spec.source_null.filter(|_| !skip_null).map_or(NO_NULL, |b| b.0),
                    spec.device_null.filter(|_| !skip_null).map_or(NO_NULL, |b| b.0),
                )
            })
            .map(|(spec, source_null, device_null)| Group {
                blocks: [
                    blocks(spec.source_blocks, source_null),
                    blocks(spec.device_blocks, device_null),
                ],
                null: [source_null, device_null],
                gather_start: spec.gather_start().0,
                ready: spec.source_blocks,
                stamp: 0,
            })
            .collect();
        let layers = (0..geometry.layers.len() as u32)
            .filter_map(|l| map.layer(crate::ids::DecoderLayer(l)))
            .map(|layer| Layer {
                group: layer.group.0,
                tensor: layer.tensor,
            })
            .collect();
        Self {
            groups,
            layers,
            tensors: vec![0; map.tensors() as usize],
            stamp: 0,
        }
    }

    /// Sets how many host blocks of `group` every rank has registered (X31).
    pub fn set_ready(&mut self, group: GroupId, blocks: u32) {
        if let Some(group) = self.groups.get_mut(group.index()) {
            group.ready = blocks;
        }
    }

    /// Checks every row of a plan against the geometry and the leases (X9). Changes no lease.
    ///
    /// # Errors
    /// The first [`Refusal`] in the order of rows and of pairs within a row, sources before destinations.
    #[inline]
    pub fn check(&mut self, plan: &Rows<'_>) -> Result<(), Refusal> {
        let plan_stamp = self.next_stamp(2 * plan.rows.len());
        for (row, at) in plan.rows.iter().zip(0_u32..) {
            let pairs = Self::row_pairs(at, row, plan.pairs)?;
            self.check_place(at, row, plan, plan_stamp)?;
            let (source, destination) = self.ends(at, row, plan)?;
            let Some(group) = self.groups.get_mut(row.group as usize) else {
                continue;
            };
            let quick_stamp = plan_stamp + 1 + 2 * at;
            if !group.all_free(pairs, source, destination, quick_stamp) {
                group.refuse(at, pairs, source, destination, quick_stamp + 1)?;
            }
        }
        Ok(())
    }

    /// Leases what a checked plan names, until [`release`](Self::release) of the same plan (X14).
    #[inline]
    pub fn take(&mut self, plan: &Rows<'_>) {
        self.each(plan, |lease, exclusive| {
            // The count is held below its bit: only a hostile record, whose rows share their pairs, gets there.
            let more = u32::from(lease & !WRITTEN != !WRITTEN);
            (lease + more) | if exclusive { WRITTEN } else { 0 }
        });
    }

    /// Returns the leases of a plan that was taken.
    #[inline]
    pub fn release(&mut self, plan: &Rows<'_>) {
        self.each(plan, |lease, _| {
            // X14: free after the last lease, and written until then.
            let left = lease.saturating_sub(1);
            if left == WRITTEN { 0 } else { left }
        });
    }

    /// Operations that lease a source block: 0 where it may be refilled (X14).
    pub fn source_leases(&self, group: GroupId, block: SourceBlock) -> u32 {
        self.leases(group, HOST, block.index())
    }

    /// Operations that lease a physical block: 0 where it may be written.
    pub fn device_leases(&self, group: GroupId, block: PhysicalBlock) -> u32 {
        self.leases(group, DEVICE, block.index())
    }

    /// Blocks that are leased, over all groups and both sides: 0 where nothing is in flight.
    pub fn leased_blocks(&self) -> usize {
        let leased = |group: &Group, side: usize| {
            let blocks = group.blocks[side].iter().zip(0..);
            blocks
                .filter(|(block, id)| block.lease != 0 && *id != group.null[side])
                .count()
        };
        self.groups
            .iter()
            .map(|group| leased(group, HOST) + leased(group, DEVICE))
            .sum()
    }

    fn leases(&self, group: GroupId, side: usize, block: usize) -> u32 {
        let Some(group) = self.groups.get(group.index()) else {
            return 0;
        };
        match group.blocks[side].get(block).map_or(0, |b| b.lease) {
            _ if block == group.null[side] as usize => 0,
            WRITTEN.. => 1,
            readers => readers,
        }
    }

    /// A stamp for the plan, followed by one for each of its rows.
    fn next_stamp(&mut self, rows: usize) -> u32 {
        let rows = u32::try_from(rows).unwrap_or(u32::MAX - 1);
        let plan_stamp = self
            .stamp
            .checked_add(1)
            .filter(|s| s.checked_add(rows).is_some())
            .unwrap_or_else(|| {
                // Stamps have run out: forget the old ones once in some four billion rows.
                self.tensors.fill(0);
                for group in &mut self.groups {
                    group.stamp = 0;
                    group.blocks.iter_mut().flatten().for_each(|b| b.stamp = 0);
                }
                1
            });
        self.stamp = plan_stamp.saturating_add(rows);
        plan_stamp
    }

    fn row_pairs<'a>(at: u32, row: &RowRecord, pairs: &'a [Pair]) -> Result<&'a [Pair], Refusal> {
        if row.valid > row.pairs {
            let (found, expected) = (u64::from(row.valid), u64::from(row.pairs));
            return Err(Refusal::RowCounts {
                row: at,
                what: "valid count",
                found,
                expected,
            });
        }
        let end = u64::from(row.pairs_at) + u64::from(row.pairs);
        if end > pairs.len() as u64 {
            return Err(Refusal::RowCounts {
                row: at,
                what: "end of pairs",
                found: end,
                expected: pairs.len() as u64,
            });
        }
        let from = row.pairs_at as usize;
        // R24: ids past the valid count are ignored.
        let valid = if planted("r24_valid_count_unread") {
            row.pairs
        } else {
            row.valid
        };
        Ok(pairs.get(from..from + valid as usize).unwrap_or(&[]))
    }

    /// Layer and group of a row exist, belong together, and no tensor is filled twice.
    fn check_place(&mut self, at: u32, row: &RowRecord, plan: &Rows<'_>, plan_stamp: u32) -> Result<(), Refusal> {
        let layers = self.layers.len() as u32;
        let shared = plan.kind == Kind::Retain && plan.mode == Some(RetainMode::SharedTable);
        if shared {
            let groups = self.groups.len() as u32;
            if row.layer != ALL_LAYERS {
                return Err(Refusal::Layer {
                    row: at,
                    layer: row.layer,
                    layers,
                });
            }
            let group = self.groups.get_mut(row.group as usize);
            let group = group.ok_or(Refusal::Group {
                row: at,
                found: row.group,
                expected: groups,
            })?;
            if group.stamp == plan_stamp {
                return Err(Refusal::TensorTwice {
                    row: at,
                    layer: row.layer,
                });
            }
            group.stamp = plan_stamp;
            return Ok(());
        }
        let layer = self.layers.get(row.layer as usize);
        let layer = layer.ok_or(Refusal::Layer {
            row: at,
            layer: row.layer,
            layers,
        })?;
        if row.group != layer.group {
            return Err(Refusal::Group {
                row: at,
                found: row.group,
                expected: layer.group,
            });
        }
        // A table belongs to a layer, bytes to a tensor: layers that alias may share bytes but not be filled twice.
        if plan.mode != Some(RetainMode::LayerTables)
            && let Some(tensor) = self.tensors.get_mut(layer.tensor as usize)
        {
            if *tensor == plan_stamp {
                return Err(Refusal::TensorTwice {
                    row: at,
                    layer: row.layer,
                });
            }
            *tensor = plan_stamp;
        }
        Ok(())
    }

    /// What source and destination of a row's pairs name; no source end where it is a slot.
    fn ends(&self, at: u32, row: &RowRecord, plan: &Rows<'_>) -> Result<(Option<End>, End), Refusal> {
        let sizes = self
            .groups
            .get(row.group as usize)
            .map_or([0, 0], |g| [g.blocks[HOST].len(), g.blocks[DEVICE].len()]);
        let end = |side: usize, exclusive| End {
            side,
            from: 0,
            to: sizes[side] as u32,
            exclusive,
        };
        Ok(match (plan.kind, plan.mode) {
            (Kind::Upload, _) => {
                let gather_start = self.groups.get(row.group as usize).map_or(0, |g| g.gather_start);
                let mut source = end(HOST, false);
                match SourceKind::from_code(row.source_kind) {
                    Some(SourceKind::SourceOnly) => source.to = gather_start,
                    Some(SourceKind::Copy) => source.from = gather_start,
                    None => {
                        return Err(Refusal::SourceKind {
                            row: at,
                            found: row.source_kind,
                        });
                    }
                }
                (Some(source), end(DEVICE, true))
            }
            (Kind::WriteBack, _) => (Some(end(DEVICE, false)), end(HOST, true)),
            (Kind::Retain, Some(RetainMode::ByteMove)) => (Some(end(DEVICE, true)), end(DEVICE, true)),
            (Kind::Retain, _) => (None, end(DEVICE, false)),
            (Kind::Padding | Kind::Keep | Kind::Abort | Kind::Reset, _) => {
                return Err(Refusal::Counts {
                    what: "rows of a record without rows",
                    found: 1,
                    expected: 0,
                });
            }
        })
    }

    /// Changes the lease of every block that a plan names. `change` gets the lease, and whether the plan has the block for
    /// itself.
    #[inline]
    fn each(&mut self, plan: &Rows<'_>, change: impl Fn(u32, bool) -> u32 + Copy) {
        for (row, at) in plan.rows.iter().zip(0_u32..) {
            let (Ok(pairs), Ok((source, destination))) =
                (Self::row_pairs(at, row, plan.pairs), self.ends(at, row, plan))
            else {
                continue; // `check` has refused such a row.
            };
            let Some(group) = self.groups.get_mut(row.group as usize) else {
                continue;
            };
            if let Some(end) = source {
                group.change(pairs.iter().map(|pair| pair.source), end, change);
            }
            group.change(pairs.iter().map(|pair| pair.destination), destination, change);
        }
    }
}

impl Group {
    /// True where every pair of a row may be leased now: ids in their ranges, no null block, no destination twice, no
    /// lease in the way. One end at a time and nothing decided per pair, so that each pass is a short loop over one
    /// table; which pair it was that failed is [`refuse`](Self::refuse)'s to find.
    #[inline]
    fn all_free(&mut self, pairs: &[Pair], source: Option<End>, destination: End, row_stamp: u32) -> bool {
        let sources_free = match source {
            Some(end) => {
                let blocks = self.usable(end);
                // A lease has its WRITTEN bit, or no bit at all: what all of them have is in the sum of their bits.
                let leases = pairs.iter().fold(0, |leases, pair| {
                    let block = blocks.get(pair.source.wrapping_sub(end.from) as usize);
                    leases | block.map_or(u32::MAX, |block| block.lease)
                });
                leases <= end.limit()
            }
            None => self.first_bad_slot(pairs).is_none(),
        };
        let blocks = &mut self.blocks[destination.side];
        let mut twice = 0;
        let leases = pairs.iter().fold(0, |leases, pair| {
            let Some(block) = blocks.get_mut(pair.destination as usize) else {
                return u32::MAX;
            };
            twice |= u32::from(block.stamp == row_stamp);
            block.stamp = row_stamp;
            leases | block.lease
        });
        sources_free && twice == 0 && leases <= destination.limit()
    }

    /// The blocks of a source end, so that looking one up is also the check of its range.
    #[inline]
    fn usable(&self, end: End) -> &[Block] {
        let to = if end.side == HOST {
            end.to.min(self.ready)
        } else {
            end.to
        };
        self.blocks[end.side].get(end.from as usize..to as usize).unwrap_or(&[])
    }

    /// Finds the first pair of a row that may not be leased. A source refuses only once the destinations of the pairs
    /// before it have passed.
    ///
    /// # Errors
    /// Its [`Refusal`].
    #[cold]
    fn refuse(
        &mut self,
        at: u32,
        pairs: &[Pair],
        source: Option<End>,
        destination: End,
        row_stamp: u32,
    ) -> Result<(), Refusal> {
        let bad_source = match source {
            Some(end) => self.first_bad_source(pairs, end),
            None => self.first_bad_slot(pairs),
        };
        let sound = bad_source.and_then(|bad| pairs.get(..bad)).unwrap_or(pairs);
        if let Some(pair) = self.first_bad_destination(sound, destination, row_stamp) {
            return Err(self.destination_refusal(at, pair.destination, destination));
        }
        match bad_source.and_then(|bad| pairs.get(bad)) {
            Some(pair) => Err(self.source_refusal(at, pair.source, source)),
            None => Ok(()),
        }
    }

    /// Index of the first pair whose source may not be read (or, exclusively, taken) now.
    fn first_bad_source(&self, pairs: &[Pair], end: End) -> Option<usize> {
        let blocks = self.usable(end);
        pairs.iter().position(|pair| {
            let block = blocks.get(pair.source.wrapping_sub(end.from) as usize);
            block.is_none_or(|block| block.lease > end.limit()) || pair.source == self.null[end.side]
        })
    }

    /// Index of the first pair whose source is no slot of a table.
    fn first_bad_slot(&self, pairs: &[Pair]) -> Option<usize> {
        let slots = self.blocks[DEVICE].len() as u32;
        pairs
            .iter()
            .position(|pair| pair.source >= slots && pair.source != NEW_SLOT)
    }

    /// The first pair whose destination may not be written (or read, for tables) now, or is named twice in the row.
    fn first_bad_destination<'a>(&mut self, pairs: &'a [Pair], end: End, row_stamp: u32) -> Option<&'a Pair> {
        let null = self.null[end.side];
        let skip_duplicates = planted("x9_skip_duplicates");
        let blocks = &mut self.blocks[end.side];
        pairs.iter().find(|pair| {
            let Some(block) = blocks.get_mut(pair.destination as usize) else {
                return true;
            };
            let twice = block.stamp == row_stamp && !skip_duplicates;
            block.stamp = row_stamp;
            twice || block.lease > end.limit() || pair.destination == null
        })
    }

    /// Why a source is refused: the first reason that holds for it.
    #[cold]
    fn source_refusal(&self, row: u32, id: u32, end: Option<End>) -> Refusal {
        let Some(end) = end else {
            let to = self.blocks[DEVICE].len() as u32;
            return Refusal::SourceRange { row, id, from: 0, to };
        };
        let (from, to, ready) = (end.from, end.to, self.ready);
        if id < from || id >= to {
            Refusal::SourceRange { row, id, from, to }
        } else if id == self.null[end.side] {
            Refusal::NullBlock { row, id }
        } else if end.side == HOST && id >= ready {
            Refusal::NotPinned { row, id, ready } // X31
        } else {
            Refusal::SourceInFlight { row, id }
        }
    }

    /// Why a destination is refused: the first reason that holds for it.
    #[cold]
    fn destination_refusal(&self, row: u32, id: u32, end: End) -> Refusal {
        let block = self.blocks[end.side].get(id as usize);
        let blocked = block.is_some_and(|block| block.lease > end.limit());
        if id >= end.to {
            Refusal::DestinationRange { row, id, to: end.to }
        } else if id == self.null[end.side] {
            Refusal::NullBlock { row, id }
        } else if blocked {
            Refusal::DestinationInFlight { row, id }
        } else {
            Refusal::DuplicateDestination { row, id }
        }
    }

    #[inline]
    fn change(&mut self, ids: impl Iterator<Item = u32>, end: End, change: impl Fn(u32, bool) -> u32) {
        let blocks = &mut self.blocks[end.side];
        ids.for_each(|id| {
            if let Some(block) = blocks.get_mut(id as usize) {
                block.lease = change(block.lease, end.exclusive);
            }
        });
    }
}

impl End {
    /// The largest lease that a block may have for this end to take it.
    #[inline]
    fn limit(self) -> u32 {
        if planted("x9_skip_in_flight") {
            u32::MAX
        } else if self.exclusive {
            0
        } else {
            WRITTEN - 1
        }
    }
}

#[cfg(test)]
#[path = "lease_tests.rs"]
mod tests;
