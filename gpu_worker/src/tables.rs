//! What attention iterates over: the block tables of every request on this rank (R8, R51–R53, D10).
//!
//! Two things are kept apart (R8): per layer, or shared by a group's layers, the *table*, physical blocks in slot order
//! with a count of valid tokens; and per group the *owner set*, the blocks that belong to the request. An operation
//! stages its changes ([`TableStore::stage`], [`Staged`]), lets the device write the new image, and then swaps all of
//! them in at once ([`TableStore::swap`]); until then, and after a failure, the old state stands (R57, R59). What the device
//! has after a failure is undefined: the worker is of no pool generation then, until a Reset.
//!
//! Equal state has an equal digest on every rank (I9): it is a hash of the state alone, never of a rank's own addresses
//! or of the order in which requests came.

mod staged;

use std::collections::BTreeMap;
use std::sync::Arc;

use kvsluice_layout::export::{GroupExport, RequestExport, TableExport};
use kvsluice_layout::ids::{DecoderLayer, GroupId, MapRevision, PoolGeneration, RequestEpoch, SelectionRevision};
use kvsluice_layout::plan::Operation;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::planted::planted;
use xxhash_rust::xxh3::Xxh3;

pub use staged::{NewTable, StageError, Staged, TableFault};

use crate::device::{TABLE_POISON, TableSlot, TableSpec};

/// Words in front of the block ids of one layer in a table image: valid tokens, then number of blocks.
pub const ROW_HEADER_WORDS: u32 = 2;

/// Sizes of a [`TableStore`], fixed at start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TableLimits {
    /// Most requests at a time.
    pub requests_max: u32,
    /// Most blocks in the table of one layer.
    pub blocks_max: u32,
}

/// What the geometry says about tables.
#[derive(Debug)]
struct Shape {
    limits: TableLimits,
    /// By layer: its group.
    groups: Vec<GroupId>,
    /// By group: tokens of a block, and blocks of the device pool.
    blocks: Vec<(u32, u32)>,
}

impl Shape {
    const fn row_words(&self) -> u32 {
        ROW_HEADER_WORDS + self.limits.blocks_max
    }

    fn layers_of(&self, group: GroupId) -> impl Iterator<Item = usize> {
        self.groups
            .iter()
            .enumerate()
            .filter(move |(_, of)| **of == group)
            .map(|(layer, _)| layer)
    }
}

/// One table.
#[derive(Debug, Default)]
struct Table {
    /// Physical block by resident slot.
    blocks: Vec<u32>,
    /// Content tag by resident slot, for the next producer (X25); empty where the plan carried none.
    tags: Vec<u64>,
    valid_tokens: u32,
}

/// Of one group: who owns what, and the table of its layers where they share one.
#[derive(Debug, Default)]
struct Group {
    /// Ascending and distinct once [`State::settle`]d.
    owned: Vec<u32>,
    shared: bool,
    table: Table,
}

/// All that a rank knows of one request.
#[derive(Debug, Default)]
struct State {
    /// The opaque id, whole (R49).
    request: Vec<u8>,
    epoch: RequestEpoch,
    map_revision: MapRevision,
    selection_revision: SelectionRevision,
    groups: Vec<Group>,
    /// By layer; unused where the group shares.
    layers: Vec<Table>,
}

impl State {
    fn empty(shape: &Shape) -> Self {
        let mut state = Self::default();
        state.clear(shape);
        state
    }

    /// Forgets everything and keeps the memory.
    fn clear(&mut self, shape: &Shape) {
        self.groups.resize_with(shape.blocks.len(), Group::default);
        self.layers.resize_with(shape.groups.len(), Table::default);
        for group in &mut self.groups {
            group.owned.clear();
            group.shared = true;
            group.table.clear();
        }
        self.layers.iter_mut().for_each(Table::clear);
    }

    fn copy_from(&mut self, other: &Self) {
        (self.epoch, self.map_revision) = (other.epoch, other.map_revision);
        self.selection_revision = other.selection_revision;
        for (group, from) in self.groups.iter_mut().zip(&other.groups) {
            group.owned.clone_from(&from.owned);
            group.shared = from.shared;
            group.table.copy_from(&from.table);
        }
        for (layer, from) in self.layers.iter_mut().zip(&other.layers) {
            layer.copy_from(from);
        }
    }

    /// The table that `layer` of `group` attends with.
    fn table(&self, group: GroupId, layer: usize) -> Option<&Table> {
        let group = self.groups.get(group.index())?;
        if group.shared {
            Some(&group.table)
        } else {
            self.layers.get(layer)
        }
    }

    fn settle(&mut self) {
        for group in &mut self.groups {
            group.owned.sort_unstable();
            group.owned.dedup();
        }
    }

    /// XXH3-64 of the canonical form: lengths in front of everything that has one, so that no two states have one form.
    fn digest(&self, shape: &Shape) -> u64 {
        let mut hash = Xxh3::new();
        hash.update(&(self.request.len() as u64).to_le_bytes());
        hash.update(&self.request);
        for number in [self.epoch.0, self.map_revision.0, self.selection_revision.0] {
            hash.update(&number.to_le_bytes());
        }
        for group in &self.groups {
            hash.update(&[u8::from(group.shared)]);
            hash_ids(&mut hash, &group.owned);
            if group.shared {
                group.table.hash(&mut hash);
            }
        }
        for (layer, group) in self.layers.iter().zip(&shape.groups) {
            if self.groups.get(group.index()).is_some_and(|group| !group.shared) {
                layer.hash(&mut hash);
            }
        }
        hash.digest()
    }
}

impl Table {
    fn clear(&mut self) {
        self.blocks.clear();
        self.tags.clear();
        self.valid_tokens = 0;
    }

    fn copy_from(&mut self, other: &Self) {
        self.blocks.clone_from(&other.blocks);
        self.tags.clone_from(&other.tags);
        self.valid_tokens = other.valid_tokens;
    }

    /// Makes it the physical blocks of `row`, in their order.
    fn set(&mut self, row: NewTable<'_>) {
        self.blocks.clear();
        self.blocks.extend(row.pairs.iter().map(|pair| pair.destination));
        self.tags.clear();
        self.tags.extend_from_slice(row.tags);
        self.valid_tokens = row.valid_tokens;
    }

    fn export(&self) -> TableExport {
        TableExport {
            blocks: self.blocks.clone(),
            tags: self.tags.clone(),
            valid_tokens: self.valid_tokens,
        }
    }

    fn hash(&self, hash: &mut Xxh3) {
        hash.update(&self.valid_tokens.to_le_bytes());
        hash_ids(hash, &self.blocks);
    }
}

fn hash_ids(hash: &mut Xxh3, ids: &[u32]) {
    hash.update(&(ids.len() as u64).to_le_bytes());
    if planted("digest_without_order") {
        let sum = ids.iter().fold(0u64, |sum, &id| sum + u64::from(id));
        return hash.update(&sum.to_le_bytes());
    }
    let mut bytes = [0; 256];
    for ids in ids.chunks(bytes.len() / 4) {
        for (word, id) in bytes.chunks_exact_mut(4).zip(ids) {
            word.copy_from_slice(&id.to_le_bytes());
        }
        hash.update(bytes.get(..ids.len() * 4).unwrap_or(&[]));
    }
}

/// A request in the store.
#[derive(Debug)]
struct Entry {
    slot: TableSlot,
    /// Absent until the first swap.
    state: Option<State>,
    digest: u64,
    /// A change is staged: the next one waits.
    staged: bool,
}

/// A request as a takeover reports it (X25).
#[derive(Clone, Copy, Debug)]
pub struct RequestView<'a> {
    request: &'a [u8],
    entry: &'a Entry,
    state: &'a State,
}

impl<'a> RequestView<'a> {
    /// The opaque id, whole (R49).
    pub const fn request(&self) -> &'a [u8] {
        self.request
    }

    /// Epoch of the request.
    pub const fn epoch(&self) -> RequestEpoch {
        self.state.epoch
    }

    /// Residency revision g.
    pub const fn map_revision(&self) -> MapRevision {
        self.state.map_revision
    }

    /// Selection revision r.
    pub const fn selection_revision(&self) -> SelectionRevision {
        self.state.selection_revision
    }

    /// Digest of the whole state; equal on all ranks (I9).
    pub const fn digest(&self) -> u64 {
        self.entry.digest
    }

    /// Where the device keeps the table.
    pub const fn slot(&self) -> TableSlot {
        self.entry.slot
    }

    /// Whether an operation is about to change it: the device may hold the next table already.
    pub const fn is_changing(&self) -> bool {
        self.entry.staged
    }

    /// Physical blocks of `group` that belong to the request, ascending. Empty for a group that the geometry lacks.
    pub fn owned(&self, group: GroupId) -> &'a [u32] {
        self.state.groups.get(group.index()).map_or(&[], |group| &group.owned)
    }

    /// All of it, as the next producer reads it.
    pub fn to_export(&self) -> RequestExport {
        let group = |group: &Group| GroupExport {
            owned: group.owned.clone(),
            shared: group.shared.then(|| group.table.export()),
        };
        RequestExport {
            request: self.request.to_vec(),
            epoch: self.epoch(),
            map_revision: self.map_revision(),
            selection_revision: self.selection_revision(),
            digest: self.digest(),
            groups: self.state.groups.iter().map(group).collect(),
            layers: self.state.layers.iter().map(Table::export).collect(),
        }
    }

    /// Whether the layers of `group` share one table.
    pub fn is_shared(&self, group: GroupId) -> bool {
        self.state.groups.get(group.index()).is_some_and(|group| group.shared)
    }
}

/// The outcome of a swap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Swapped {
    /// Digest of the request's new state, for the terminal slot (X12).
    pub digest: u64,
    /// The request has ended; its slot is free.
    pub ended: bool,
}

/// The tables of all requests on one rank.
#[derive(Debug)]
pub struct TableStore {
    shape: Arc<Shape>,
    entries: BTreeMap<Box<[u8]>, Entry>,
    generation: PoolGeneration,
    free_slots: Vec<TableSlot>,
    /// States of ended or replaced requests, for reuse.
    spare: Vec<State>,
    digest: u64,
}

impl TableStore {
    /// An empty store for the layers and groups of `map`.
    pub fn new(map: &GeometryMap, limits: TableLimits) -> Self {
        let geometry = map.geometry();
        let shape = Shape {
            limits,
            groups: geometry.layers.iter().map(|layer| layer.group).collect(),
            blocks: geometry
                .groups
                .iter()
                .map(|group| (group.block_tokens, group.device_blocks))
                .collect(),
        };
        Self {
            shape: Arc::new(shape),
            entries: BTreeMap::new(),
            generation: PoolGeneration::default(),
            free_slots: (0..limits.requests_max).rev().map(TableSlot).collect(),
            spare: Vec::new(),
            digest: 0,
        }
    }

    /// Writes the image of a request that has no block into `out`: what a slot holds after a Reset.
    pub fn empty_image(&self, out: &mut Vec<u32>) {
        image(&State::empty(&self.shape), &self.shape, out);
    }

    /// The tables that a device needs for this store: one slot per request, one row per layer, each of the same stride
    /// from start to end (field bug 33).
    pub fn spec(&self) -> TableSpec {
        let words = (self.shape.groups.len() as u32).saturating_mul(self.shape.row_words());
        TableSpec {
            slots: self.shape.limits.requests_max,
            words,
        }
    }

    /// Begins a change of `request` by `operation`: a private copy of its state, or a new one.
    pub fn stage(&mut self, request: &[u8], operation: &Operation) -> Result<Staged, StageError> {
        if operation.pool_generation != self.generation {
            return Err(StageError::Generation {
                found: operation.pool_generation,
                expected: self.generation,
            });
        }
        if let Some(entry) = self.entries.get_mut(request) {
            if entry.staged {
                return Err(StageError::Busy);
            }
            if let Some(state) = &entry.state {
                check_order(state, operation)?;
            }
            entry.staged = true;
        } else {
            let requests_max = self.shape.limits.requests_max;
            let slot = self.free_slots.pop().ok_or(StageError::Full { requests_max })?;
            self.entries.insert(
                request.into(),
                Entry {
                    slot,
                    state: None,
                    digest: 0,
                    staged: true,
                },
            );
        }
        let mut next = self.spare.pop().unwrap_or_else(|| State::empty(&self.shape));
        let entry = self.entries.get(request);
        match entry.and_then(|entry| entry.state.as_ref()) {
            Some(state) => next.copy_from(state),
            None => next.clear(&self.shape),
        }
        next.request.clear();
        next.request.extend_from_slice(request);
        next.epoch = operation.request_epoch;
        next.map_revision = operation.map_revision;
        next.selection_revision = operation.selection_revision;
        let slot = entry.map_or(TableSlot(0), |entry| entry.slot);
        Ok(Staged::new(Arc::clone(&self.shape), next, slot, self.generation))
    }

    /// Makes a staged change the state of its request, all of it at once. `None` where a Reset came in between: then it
    /// is discarded.
    pub fn swap(&mut self, mut staged: Staged) -> Option<Swapped> {
        staged.settle();
        let ended = staged.is_ended();
        let (next, generation) = staged.into_parts();
        let entry = self
            .entries
            .get_mut(next.request.as_slice())
            .filter(|_| generation == self.generation);
        let Some(entry) = entry else {
            self.spare.push(next);
            return None;
        };
        let digest = next.digest(&self.shape);
        self.digest = self.digest.wrapping_sub(entry.digest).wrapping_add(digest);
        entry.digest = digest;
        entry.staged = false;
        if ended {
            self.digest = self.digest.wrapping_sub(digest);
            self.remove(&next.request);
            self.spare.push(next);
        } else {
            self.spare.extend(entry.state.replace(next));
        }
        Some(Swapped { digest, ended })
    }

    /// Drops a staged change: the old state stands (R59).
    pub fn discard(&mut self, staged: Staged) {
        let (next, generation) = staged.into_parts();
        let entry = self
            .entries
            .get_mut(next.request.as_slice())
            .filter(|_| generation == self.generation);
        if let Some(entry) = entry {
            entry.staged = false;
            if entry.state.is_none() {
                self.remove(&next.request);
            }
        }
        self.spare.push(next);
    }

    fn remove(&mut self, request: &[u8]) {
        if let Some(entry) = self.entries.remove(request) {
            self.free_slots.push(entry.slot);
            self.spare.extend(entry.state);
        }
    }

    /// Empties all tables and owner sets for a new pool generation (X24a). Idempotent.
    pub fn reset(&mut self, generation: PoolGeneration) {
        while let Some((_, entry)) = self.entries.pop_first() {
            self.free_slots.push(entry.slot);
            self.spare.extend(entry.state);
        }
        self.digest = 0;
        self.generation = generation;
    }

    /// The generation of the pools that this state is about.
    pub const fn generation(&self) -> PoolGeneration {
        self.generation
    }

    /// Number of groups.
    pub fn groups(&self) -> u32 {
        self.shape.blocks.len() as u32
    }

    /// Digest of the state of all requests: equal on all ranks that hold equal state, whatever the order of events (I9).
    pub const fn digest(&self) -> u64 {
        self.digest
    }

    /// Every request with a state, in the order of their ids: what a worker reports at a takeover (X25).
    pub fn export(&self) -> impl Iterator<Item = RequestView<'_>> {
        self.entries.iter().filter_map(|(request, entry)| {
            Some(RequestView {
                request,
                entry,
                state: entry.state.as_ref()?,
            })
        })
    }

    /// One request.
    pub fn get(&self, request: &[u8]) -> Option<RequestView<'_>> {
        let (request, entry) = self.entries.get_key_value(request)?;
        Some(RequestView {
            request,
            entry,
            state: entry.state.as_ref()?,
        })
    }

    /// The table of `layer`: physical blocks by slot, and valid tokens.
    pub fn table(&self, request: &[u8], layer: DecoderLayer) -> Option<(&[u32], u32)> {
        let group = *self.shape.groups.get(layer.index())?;
        let table = self.entries.get(request)?.state.as_ref()?.table(group, layer.index())?;
        Some((&table.blocks, table.valid_tokens))
    }
}

/// No operation moves a request back, and another epoch is another life (R46, X22).
fn check_order(state: &State, operation: &Operation) -> Result<(), StageError> {
    if operation.request_epoch != state.epoch {
        return Err(StageError::Epoch {
            found: operation.request_epoch,
            expected: state.epoch,
        });
    }
    if operation.map_revision < state.map_revision || operation.selection_revision < state.selection_revision {
        return Err(StageError::Revision {
            found: (operation.map_revision, operation.selection_revision),
            least: (state.map_revision, state.selection_revision),
        });
    }
    Ok(())
}

/// Writes the image of `state` into `out`: a row per layer, each [`ROW_HEADER_WORDS`] and the block ids, poison behind.
fn image(state: &State, shape: &Shape, out: &mut Vec<u32>) {
    out.clear();
    let row_words = shape.row_words() as usize;
    for (layer, &group) in shape.groups.iter().enumerate() {
        let end = out.len() + row_words;
        if let Some(table) = state.table(group, layer) {
            out.extend([table.valid_tokens, table.blocks.len() as u32]);
            out.extend(&table.blocks);
            if planted("d10_image_in_another_order") {
                let ids = out.len() - table.blocks.len();
                out.get_mut(ids..).into_iter().for_each(<[u32]>::reverse);
            }
        }
        out.resize(end, TABLE_POISON); // field bug 34
    }
}

#[cfg(test)]
mod tests;
