//! The host block store: which blocks of the trace lie in which frames of the pool segment, and when a frame may be
//! filled with another.
//!
//! The pool is a cache in front of a backing store, here the generator of [`kvsluice_layout::content`]. A frame is filled
//! again only when no record in flight leases it (X14), the least recently used first. The directory in the control
//! segment says what each frame holds, such that a new producer finds the pool warm whatever the store at which the old
//! one died (X25a).
//!
//! The last frames of a group, [K, N), are its gather region: where records of source kind *copy* are gathered.

mod directory;
mod recency;

use std::collections::HashMap;
use std::sync::Arc;

use kvsluice_layout::content;
use kvsluice_layout::ids::{DecoderLayer, GroupId, SourceBlock};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::planes::{GeometryMap, Plane};
use kvsluice_layout::planted::planted;
use kvsluice_layout::region::RegionMap;
use kvsluice_transport::death;
use kvsluice_transport::shared::SharedMut;
use thiserror::Error;
use xxhash_rust::xxh3::Xxh3;

use directory::Entry;
use recency::Recency;

/// Names the content of a block: the trace's hash of a prefix block. Equal tags are equal bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct BlockTag(pub u64);

/// Why a block has no frame. Nothing but the order of use has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Error)]
pub enum StoreError {
    /// Every frame is leased, or belongs to the record that is being made.
    #[error("group {group}: no frame of {frames} is free, {leased} are leased: await completions, or enlarge the pool")]
    NoFrame {
        /// The group.
        group: GroupId,
        /// Frames that blocks may lie in.
        frames: u32,
        /// Frames that records in flight read.
        leased: u32,
    },
    /// The gather region is too small, or its frames are leased.
    #[error("group {group}: {wanted} gather frames wanted, {free} of {frames} free: await completions, or enlarge it")]
    NoGather {
        /// The group.
        group: GroupId,
        /// Frames wanted.
        wanted: u32,
        /// Frames that are not leased.
        free: u32,
        /// Frames of the region.
        frames: u32,
    },
    /// The geometry has no such group.
    #[error("no group {group}")]
    UnknownGroup {
        /// The group.
        group: GroupId,
    },
}

/// What the store counted since its start.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StoreCounts {
    /// Blocks found in the pool.
    pub hits: u64,
    /// Blocks filled in.
    pub fills: u64,
    /// Blocks that made room.
    pub evictions: u64,
    /// Blocks of an earlier producer whose checksum held.
    pub warm: u64,
    /// Blocks of an earlier producer that were not what the directory said.
    pub damaged: u64,
    /// Bytes copied into the gather region.
    pub gather_bytes: u64,
    /// Bytes of gather frames that were taken (R2: not the same as the bytes copied into them).
    pub gather_frame_bytes: u64,
}

/// What is known of one frame.
#[derive(Clone, Copy, Default)]
struct Frame {
    entry: Entry,
    /// The bytes were found, not made: their checksum is to be compared first (X25a).
    unproven: bool,
    /// Record that last used the frame.
    record: u64,
}

/// One plane of one shard of one tensor, with the seed of its content but for the tag.
struct Part {
    plane: Plane,
    tensor: u32,
    shard: u32,
    index: u32,
}

struct Group {
    frames: Vec<Frame>,
    /// K.
    gather_start: u32,
    null: Option<SourceBlock>,
    /// Frames that every rank has registered (X31).
    ready: u32,
    by_tag: HashMap<BlockTag, SourceBlock>,
    recency: Recency,
    parts: Vec<Part>,
}

/// The blocks of the pool. `C` is the control segment, `P` the pool; this process writes both.
pub struct HostStore<C, P> {
    control: C,
    pool: P,
    map: Arc<GeometryMap>,
    region: RegionMap,
    groups: Vec<Group>,
    /// The record that is being made.
    record: u64,
    buffer: Vec<u8>,
    counts: StoreCounts,
}

impl<C: SharedMut, P: SharedMut> HostStore<C, P> {
    /// The store of a new channel: no frame holds a block.
    pub fn new(control: C, pool: P, map: Arc<GeometryMap>, region: RegionMap) -> Self {
        let numbers = 0..map.geometry().groups.len() as u32;
        let groups: Vec<Group> = numbers.map(|group| Group::new(&map, GroupId(group))).collect();
        let largest = groups
            .iter()
            .flat_map(|group| &group.parts)
            .map(|part| part.plane.bytes)
            .max();
        Self {
            groups,
            buffer: vec![0; largest.unwrap_or(0) as usize],
            control,
            pool,
            map,
            region,
            record: 1,
            counts: StoreCounts::default(),
        }
    }

    /// The store of a channel that is taken over: valid directory entries are believed, and their bytes are compared
    /// with their checksum before the first lease (X25a).
    pub fn recover(control: C, pool: P, map: Arc<GeometryMap>, region: RegionMap) -> Self {
        let mut store = Self::new(control, pool, map, region);
        for (number, group) in (0..).zip(&mut store.groups) {
            for (index, frame) in (0..group.gather_start).zip(&mut group.frames) {
                let block = SourceBlock(index);
                let at = store.region.directory_at(GroupId(number), block);
                let Some(at) = at.filter(|_| group.null != Some(block)) else {
                    continue;
                };
                frame.entry = Entry::read(&store.control, at);
                let tag = BlockTag(frame.entry.owner);
                // Two frames with one tag: the second was valid first and its block was filled again elsewhere.
                if frame.entry.valid && !group.by_tag.contains_key(&tag) {
                    frame.unproven = true;
                    group.by_tag.insert(tag, block);
                    group.recency.touch(block);
                } else {
                    frame.entry.valid = false;
                }
            }
        }
        store
    }

    /// What was counted since the start.
    pub fn counts(&self) -> StoreCounts {
        self.counts
    }

    /// Blocks that lie in the pool.
    pub fn held_blocks(&self) -> u64 {
        self.groups.iter().map(|group| group.by_tag.len() as u64).sum()
    }

    /// Frames of `group` that blocks may lie in: a record of more blocks finds no room.
    pub fn frames(&self, group: GroupId) -> u32 {
        self.groups.get(group.index()).map_or(0, Group::usable)
    }

    /// Limits every group to the frames that lie below `pinned_bytes` whole: what every rank has registered (X31).
    pub fn set_pinned(&mut self, pinned_bytes: u64, leases: &mut LeaseTable) {
        for (number, group) in (0..).zip(&mut self.groups) {
            let of_part = |part: &Part| blocks_below(&part.plane, pinned_bytes);
            let ready = group.parts.iter().map(of_part).min().unwrap_or(0);
            group.ready = ready.min(group.frames.len() as u64) as u32;
            leases.set_ready(GroupId(number), group.ready);
        }
    }

    /// Begins a record: what [`ensure`](Self::ensure) and [`take_gather`](Self::take_gather) return from now on stays
    /// until the next call, so that one record's blocks do not push each other out before it is published and leased.
    pub fn begin_record(&mut self) {
        self.record += 1;
    }

    /// The frame that holds the block `tag`, filled in first where it is not in the pool.
    ///
    /// # Errors
    /// [`StoreError::NoFrame`] while no frame may be filled again.
    pub fn ensure(&mut self, group: GroupId, tag: BlockTag, leases: &LeaseTable) -> Result<SourceBlock, StoreError> {
        let record = self.record;
        let state = self
            .groups
            .get_mut(group.index())
            .ok_or(StoreError::UnknownGroup { group })?;
        let ready = state.ready;
        if let Some(&block) = state.by_tag.get(&tag) {
            if block.get() < ready && self.is_proven(group, block) {
                self.counts.hits += 1;
                self.used(group, block, record);
                return Ok(block);
            }
            self.forget(group, block);
        }
        let block = self.victim(group, leases)?;
        if self.forget(group, block) {
            self.counts.evictions += 1;
        }
        self.fill(group, block, tag);
        self.used(group, block, record);
        Ok(block)
    }

    /// Takes `wanted` frames of the gather region for the record that is being made.
    ///
    /// # Errors
    /// [`StoreError::NoGather`] where fewer are free; none is taken then.
    pub fn take_gather(
        &mut self,
        group: GroupId,
        wanted: u32,
        leases: &LeaseTable,
        out: &mut Vec<SourceBlock>,
    ) -> Result<(), StoreError> {
        let state = self
            .groups
            .get_mut(group.index())
            .ok_or(StoreError::UnknownGroup { group })?;
        let region = state.gather_start..state.frames.len() as u32;
        let frames = region.len() as u32;
        let null = state.null;
        let ready = state.ready;
        let is_free = |block: &SourceBlock| {
            Some(*block) != null && block.get() < ready && leases.source_leases(group, *block) == 0
        };
        let free = || region.clone().map(SourceBlock).filter(is_free);
        let (from, count) = (out.len(), wanted as usize);
        out.extend(free().take(count));
        if out.len() - from < count {
            out.truncate(from);
            let free = free().count() as u32;
            return Err(StoreError::NoGather {
                group,
                wanted,
                free,
                frames,
            });
        }
        self.counts.gather_frame_bytes += u64::from(wanted) * self.map.block_bytes(group);
        Ok(())
    }

    /// Copies the bytes of `layer`, all shards, from the frame `from` into the gather frame `to`. Returns their number.
    pub fn gather(&mut self, layer: DecoderLayer, from: SourceBlock, to: SourceBlock) -> u64 {
        let mut copied = 0;
        for plane in self.map.shard_planes(layer) {
            let Some(buffer) = self.buffer.get_mut(..plane.bytes as usize) else {
                continue;
            };
            self.pool.bytes_out(plane.host_at(from) as usize, buffer);
            self.pool.bytes_in(plane.host_at(to) as usize, buffer);
            copied += plane.bytes;
        }
        self.counts.gather_bytes += copied;
        copied
    }

    fn used(&mut self, group: GroupId, block: SourceBlock, record: u64) {
        if let Some(state) = self.groups.get_mut(group.index()) {
            state.recency.touch(block);
            if let Some(frame) = state.frames.get_mut(block.index()) {
                frame.record = record;
            }
        }
    }

    /// The least recently used frame that nothing needs.
    fn victim(&self, group: GroupId, leases: &LeaseTable) -> Result<SourceBlock, StoreError> {
        let state = self
            .groups
            .get(group.index())
            .ok_or(StoreError::UnknownGroup { group })?;
        let early = planted("r26_early_release");
        let of_record = |block: &SourceBlock| state.frames.get(block.index()).is_some_and(|f| f.record == self.record);
        let mut oldest_first = state.recency.oldest_first().filter(|block| block.get() < state.ready);
        let found = oldest_first.find(|block| {
            // X14: a frame that a record in flight reads is not written.
            !of_record(block) && (early || leases.source_leases(group, *block) == 0)
        });
        found.ok_or_else(|| {
            let is_leased = |block: &SourceBlock| leases.source_leases(group, *block) > 0;
            StoreError::NoFrame {
                group,
                frames: state.usable(),
                leased: state.recency.oldest_first().filter(is_leased).count() as u32,
            }
        })
    }

    /// Takes a block out of the map. True if the frame held one.
    fn forget(&mut self, group: GroupId, block: SourceBlock) -> bool {
        let Some(state) = self.groups.get_mut(group.index()) else {
            return false;
        };
        let Some(frame) = state.frames.get_mut(block.index()) else {
            return false;
        };
        let held = std::mem::replace(&mut frame.entry.valid, false);
        frame.unproven = false;
        if held {
            state.by_tag.remove(&BlockTag(frame.entry.owner));
        }
        held
    }

    /// X25a: invalid → bytes → checksum, owner, generation + 1 → valid, so that whoever finds an entry valid finds its
    /// bytes whole.
    fn fill(&mut self, group: GroupId, block: SourceBlock, tag: BlockTag) {
        let Self {
            control,
            pool,
            groups,
            region,
            buffer,
            counts,
            ..
        } = self;
        let Some(state) = groups.get_mut(group.index()) else {
            return;
        };
        let Group {
            frames, by_tag, parts, ..
        } = state;
        let (Some(frame), Some(at)) = (frames.get_mut(block.index()), region.directory_at(group, block)) else {
            return;
        };
        if planted("x25a_valid_first") {
            frame.entry.publish(control, at, tag.0, 0);
        } else {
            frame.entry.invalidate(control, at);
        }
        death::point("fill-invalid");
        let mut sum = Xxh3::new();
        for part in parts {
            let Some(bytes) = buffer.get_mut(..part.plane.bytes as usize) else {
                continue;
            };
            content::fill(content::seed(tag.0, part.tensor, part.shard, part.index), bytes);
            sum.update(bytes);
            pool.bytes_in(part.plane.host_at(block) as usize, bytes);
        }
        death::point("fill-bytes");
        frame.entry.publish(control, at, tag.0, sum.digest());
        frame.unproven = false;
        by_tag.insert(tag, block);
        counts.fills += 1;
    }

    /// True where the frame's bytes are what the directory says; they are looked at once after a takeover.
    fn is_proven(&mut self, group: GroupId, block: SourceBlock) -> bool {
        let Self {
            pool,
            groups,
            buffer,
            counts,
            ..
        } = self;
        let Some(state) = groups.get_mut(group.index()) else {
            return false;
        };
        let Some(frame) = state.frames.get_mut(block.index()) else {
            return false;
        };
        if !frame.unproven {
            return true;
        }
        let mut sum = Xxh3::new();
        for part in &state.parts {
            let Some(bytes) = buffer.get_mut(..part.plane.bytes as usize) else {
                continue;
            };
            pool.bytes_out(part.plane.host_at(block) as usize, bytes);
            sum.update(bytes);
        }
        let whole = sum.digest() == frame.entry.checksum || planted("x25a_checksum_unread");
        frame.unproven = false;
        if whole {
            counts.warm += 1;
        } else {
            counts.damaged += 1;
        }
        whole
    }
}

impl Group {
    fn new(map: &GeometryMap, group: GroupId) -> Self {
        let geometry = map.geometry();
        let spec = geometry.group(group);
        let (frames, gather_start) = spec.map_or((0, 0), |spec| (spec.source_blocks, spec.gather_start().get()));
        let null = spec.and_then(|spec| spec.source_null);
        let owners = (0..)
            .zip(&geometry.layers)
            .filter(|(_, layer)| layer.group == group && layer.alias_of.is_none());
        let mut parts = Vec::new();
        for (number, _) in owners {
            let layer = DecoderLayer(number);
            let planes = map.shard_planes(layer);
            let Some(of) = map.layer(layer) else { continue };
            let per_shard = (planes.len() as u32 / of.shards.max(1)).max(1);
            parts.extend((0..).zip(planes).map(|(at, plane)| Part {
                plane: *plane,
                tensor: of.tensor,
                shard: at / per_shard,
                index: at % per_shard,
            }));
        }
        Self {
            frames: vec![Frame::default(); frames as usize],
            gather_start,
            null,
            ready: frames,
            by_tag: HashMap::with_capacity(gather_start as usize),
            recency: Recency::new(
                (0..gather_start).map(SourceBlock).filter(|block| null != Some(*block)),
                frames,
            ),
            parts,
        }
    }

    fn usable(&self) -> u32 {
        self.gather_start - u32::from(self.null.is_some_and(|null| null.get() < self.gather_start))
    }
}

/// Blocks of a plane, from the first, that lie below an offset of the pool whole.
fn blocks_below(plane: &Plane, limit: u64) -> u64 {
    let first_end = plane.host_offset + plane.bytes;
    let behind = limit.checked_sub(first_end);
    behind.map_or(0, |behind| behind / plane.host_stride.max(1) + 1)
}

#[cfg(test)]
mod tests;
