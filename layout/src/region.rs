//! Where everything lies in the control segment and in a rank segment: a pure function of geometry and sizes.
//!
//! Words that different moments touch lie on lines of their own, two lines apart, so that neither side's polling
//! disturbs the other's stores.

use crate::charter::CHARTER_HEAD_BYTES;
use crate::geometry::Geometry;
use crate::ids::{GroupId, MAX_RANKS, Rank, SourceBlock};
use crate::record::{HEADER_BYTES, LINE_BYTES, Pair, RowRecord, TerminalSlot};
use thiserror::Error;

const PAGE_BYTES: usize = 4096;

/// Room in a charter's text for all but its groups and layers: sizes, capability, and the name of the model escaped.
const CHARTER_BASE_BYTES: usize = 3072;
/// Room in a charter's text for one group, its part of the capability included.
const CHARTER_GROUP_BYTES: usize = 384;
/// Room in a charter's text for one layer.
const CHARTER_LAYER_BYTES: usize = 128;

/// Control segment: incarnation of the channel (X22). Stored before any other word of a new producer (X25).
pub const INCARNATION_AT: usize = PAGE_BYTES;
/// Control segment: process epoch of the producer.
pub const PRODUCER_EPOCH_AT: usize = PAGE_BYTES + 8;
/// Control segment: generation of the device pools that data records are for (X24a).
pub const GENERATION_AT: usize = PAGE_BYTES + 16;
/// Control segment: position below which ring bytes may be reused (X10).
pub const RECLAIM_AT: usize = PAGE_BYTES + 128;
/// Control segment: 1 while the producer sleeps (X29).
pub const PRODUCER_SLEEPING_AT: usize = PAGE_BYTES + 256;
/// Control segment: 32-bit counter that workers sleep on (X29).
pub const PRODUCER_WAKE_AT: usize = PAGE_BYTES + 384;
/// Control segment: first membership entry (X24).
pub const MEMBERSHIP_AT: usize = 2 * PAGE_BYTES;
/// Bytes of one membership entry: selector, then two copies of (worker epoch, first position).
pub const MEMBER_BYTES: usize = 64;
/// Control segment: the charter, behind the membership of [`MAX_RANKS`] ranks.
pub const CHARTER_AT: usize = MEMBERSHIP_AT + MAX_RANKS as usize * MEMBER_BYTES;
/// Bytes of one entry of the block directory: state, owner, checksum, and a spare word (X25a).
pub const DIRECTORY_ENTRY_BYTES: usize = 32;
/// Bit of a directory entry's state word, generation · 2 + valid: the entry vouches for the block's bytes (X25a).
pub const DIRECTORY_VALID: u64 = 1;

/// Rank segment: process epoch of the worker.
pub const WORKER_EPOCH_AT: usize = PAGE_BYTES;
/// Rank segment: generation of the rank's device pool.
pub const RANK_GENERATION_AT: usize = PAGE_BYTES + 8;
/// Rank segment: bytes of the pool that the rank has registered (X31).
pub const PINNED_AT: usize = PAGE_BYTES + 16;
/// Rank segment: 1 + position of a record with broken framing, 0 while there is none (X9).
pub const BROKEN_AT: usize = PAGE_BYTES + 24;
/// Rank segment: the word found where that record's commit word or length should be.
pub const BROKEN_FOUND_AT: usize = PAGE_BYTES + 32;
/// Rank segment: position behind the last consumed record (X12).
pub const CONSUMED_AT: usize = PAGE_BYTES + 128;
/// Rank segment: number of terminals written, a hint for arrivals out of order (X12).
pub const TERMINALS_AT: usize = PAGE_BYTES + 136;
/// Rank segment: 1 while the worker sleeps (X29).
pub const WORKER_SLEEPING_AT: usize = PAGE_BYTES + 256;
/// Rank segment: 32-bit counter that the producer sleeps on (X29).
pub const WORKER_WAKE_AT: usize = PAGE_BYTES + 384;
/// Rank segment: first terminal slot.
pub const SLOTS_AT: usize = 2 * PAGE_BYTES;

/// Smallest ring: the reserve of 64 lines is an eighth of it.
pub const MIN_RING_BYTES: usize = 512 * LINE_BYTES;
/// Largest ring: the length field of a record and its padding stay far below 2³².
pub const MAX_RING_BYTES: usize = 1 << 30;

/// Sizes that a channel was asked for and that no segment can have.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum RegionError {
    /// Ring size.
    #[error("ring of {found} bytes: expected a power of two from {MIN_RING_BYTES} to {MAX_RING_BYTES}")]
    Ring {
        /// Bytes asked for.
        found: usize,
    },
    /// Number of ranks.
    #[error("{found} ranks: expected 1 to {MAX_RANKS}")]
    Ranks {
        /// Ranks asked for.
        found: u32,
    },
    /// A segment that no address can reach.
    #[error("{what} needs more than {} bytes: ask for fewer blocks", usize::MAX)]
    Size {
        /// The segment.
        what: &'static str,
    },
}

/// Where everything lies in the segments of one channel.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RegionMap {
    ranks: u32,
    ring_bytes: usize,
    ring_at: usize,
    directory_at: Vec<usize>,
    control_bytes: usize,
    write_back_at: usize,
    write_back_slots: usize,
    write_back_slot_bytes: usize,
    rank_bytes: usize,
}

impl RegionMap {
    /// The map of a channel with a plan ring of `ring_bytes` and `write_back_slots` slots per rank, each of
    /// `write_back_slot_bytes` (a multiple of 64: the largest shard of one block of one layer).
    ///
    /// # Errors
    /// [`RegionError`] names the size that does not fit.
    pub fn new(
        geometry: &Geometry,
        ring_bytes: usize,
        write_back_slots: usize,
        write_back_slot_bytes: usize,
    ) -> Result<Self, RegionError> {
        let ranks = geometry.ranks;
        if !(1..=MAX_RANKS).contains(&ranks) {
            return Err(RegionError::Ranks { found: ranks });
        }
        if !ring_bytes.is_power_of_two() || !(MIN_RING_BYTES..=MAX_RING_BYTES).contains(&ring_bytes) {
            return Err(RegionError::Ring { found: ring_bytes });
        }
        let control = || RegionError::Size {
            what: "control segment",
        };
        // A function of the counts, which equal geometry hashes vouch for, and not of the text.
        let charter_bytes = CHARTER_HEAD_BYTES
            + CHARTER_BASE_BYTES
            + geometry.groups.len() * CHARTER_GROUP_BYTES
            + geometry.layers.len() * CHARTER_LAYER_BYTES;
        let ring_at = (CHARTER_AT + charter_bytes).next_multiple_of(PAGE_BYTES);
        let mut end = ring_at + ring_bytes;
        let mut directory_at = Vec::with_capacity(geometry.groups.len());
        for group in &geometry.groups {
            directory_at.push(end);
            let bytes = (group.source_blocks as usize)
                .checked_mul(DIRECTORY_ENTRY_BYTES)
                .ok_or_else(control)?;
            end = end
                .checked_add(bytes)
                .and_then(|e| e.checked_next_multiple_of(PAGE_BYTES))
                .ok_or_else(control)?;
        }
        let write_back_at = SLOTS_AT + ring_bytes;
        let rank_bytes = write_back_slots
            .checked_mul(write_back_slot_bytes)
            .and_then(|bytes| bytes.checked_add(write_back_at))
            .and_then(|bytes| bytes.checked_next_multiple_of(PAGE_BYTES))
            .ok_or(RegionError::Size { what: "rank segment" })?;
        Ok(Self {
            ranks,
            ring_bytes,
            ring_at,
            directory_at,
            control_bytes: end,
            write_back_at,
            write_back_slots,
            write_back_slot_bytes,
            rank_bytes,
        })
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u32 {
        self.ranks
    }

    /// Bytes of the plan ring, a power of two.
    pub fn ring_bytes(&self) -> usize {
        self.ring_bytes
    }

    /// Control segment: first byte of the plan ring.
    pub fn ring_at(&self) -> usize {
        self.ring_at
    }

    /// Bytes of the control segment.
    pub fn control_bytes(&self) -> usize {
        self.control_bytes
    }

    /// Bytes that a charter's text may have.
    pub fn charter_room(&self) -> usize {
        self.ring_at - CHARTER_AT - CHARTER_HEAD_BYTES
    }

    /// Control segment: membership entry of a rank.
    pub fn member_at(&self, rank: Rank) -> usize {
        MEMBERSHIP_AT + rank.index() * MEMBER_BYTES
    }

    /// Control segment: directory entry of a source block; `None` for an unknown group. The caller checks the block.
    pub fn directory_at(&self, group: GroupId, block: SourceBlock) -> Option<usize> {
        self.directory_at
            .get(group.index())
            .map(|at| at + block.index() * DIRECTORY_ENTRY_BYTES)
    }

    /// Bytes of a rank segment.
    pub fn rank_bytes(&self) -> usize {
        self.rank_bytes
    }

    /// Slots of a rank's write-back area.
    pub fn write_back_slots(&self) -> usize {
        self.write_back_slots
    }

    /// Rank segment: first byte of a write-back slot; `None` outside the area.
    pub fn write_back_at(&self, slot: u64) -> Option<usize> {
        let slot = usize::try_from(slot)
            .ok()
            .filter(|slot| *slot < self.write_back_slots)?;
        Some(self.write_back_at + slot * self.write_back_slot_bytes)
    }

    /// Bytes of one write-back slot.
    pub fn write_back_slot_bytes(&self) -> usize {
        self.write_back_slot_bytes
    }
}

/// Hash of sizes, offsets and meanings of the base layout (X3): two builds that disagree about a byte refuse each other.
pub fn layout_hash() -> u64 {
    let facts = format!(
        "incarnation {INCARNATION_AT} producer-epoch {PRODUCER_EPOCH_AT} generation {GENERATION_AT} reclaim {RECLAIM_AT} \
         producer-sleeping {PRODUCER_SLEEPING_AT} producer-wake {PRODUCER_WAKE_AT} members {MEMBERSHIP_AT} \
         member {MEMBER_BYTES} selector,(epoch,first)x2 charter {CHARTER_AT} length,xxh3,json \
         {CHARTER_BASE_BYTES} {CHARTER_GROUP_BYTES} {CHARTER_LAYER_BYTES} directory {DIRECTORY_ENTRY_BYTES} state,owner,checksum,spare \
         worker-epoch {WORKER_EPOCH_AT} rank-generation {RANK_GENERATION_AT} pinned {PINNED_AT} broken {BROKEN_AT} \
         {BROKEN_FOUND_AT} consumed {CONSUMED_AT} terminals {TERMINALS_AT} worker-sleeping {WORKER_SLEEPING_AT} \
         worker-wake {WORKER_WAKE_AT} slots {SLOTS_AT} line {LINE_BYTES} header {HEADER_BYTES} row {} pair {} slot {} \
         checksum xxh3-64^rotl32(commit)",
        size_of::<RowRecord>(),
        size_of::<Pair>(),
        size_of::<TerminalSlot>(),
    );
    xxhash_rust::xxh3::xxh3_64(facts.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::presets::preset;

    fn map(ring: usize) -> Result<RegionMap, RegionError> {
        let geometry = preset("sample").expect("sample preset");
        RegionMap::new(&geometry, ring, 8, 256)
    }

    #[test]
    fn x3_the_layout_hash_is_the_one_that_this_major_version_shipped_with() {
        assert_eq!(format!("{:#018x}", layout_hash()), "0x535d1c6edaea8fba");
    }

    #[test]
    fn regions_follow_each_other_without_overlap() {
        let map = map(MIN_RING_BYTES).expect("valid sizes");
        assert!(map.member_at(Rank(MAX_RANKS - 1)) + MEMBER_BYTES <= CHARTER_AT);
        assert!(CHARTER_AT + CHARTER_HEAD_BYTES + map.charter_room() <= map.ring_at());
        let directory = map.directory_at(GroupId(0), SourceBlock(0)).expect("group 0");
        assert!(map.ring_at() + map.ring_bytes() <= directory && directory < map.control_bytes());
        let first = map.write_back_at(0).expect("slot 0");
        assert!(SLOTS_AT + map.ring_bytes() <= first);
        assert!(map.write_back_at(7).expect("slot 7") + 256 <= map.rank_bytes());
        assert_eq!(map.write_back_at(8), None);
    }

    #[test]
    fn x10_a_ring_that_is_too_small_or_no_power_of_two_is_refused_with_its_size() {
        for ring in [0, 4096, MIN_RING_BYTES + 64, MAX_RING_BYTES * 2] {
            let message = map(ring).expect_err("refused").to_string();
            assert!(message.contains(&format!("ring of {ring} bytes")), "{message}");
        }
    }
}
