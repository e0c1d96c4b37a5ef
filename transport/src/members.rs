//! Membership: which worker process answers for each rank, and from which record on (X24).
//!
//! Each entry of the control segment holds two copies of (worker epoch, first position) and a selector. The copy that
//! the selector does not name is written, then the selector is stored with release: a reader, and a producer that takes
//! over after a crash at any store, sees the old pair or the new one, never a mixture.

use kvsluice_layout::ids::{Position, ProcessEpoch, Rank};
use kvsluice_layout::planted::planted;
use kvsluice_layout::region::RegionMap;

use crate::shared::{Shared, SharedMut};

/// First position of a rank that answers for nothing.
pub const NEVER: Position = Position(u64::MAX);

/// Which process answers for a rank.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Member {
    /// Process epoch of the worker; 0 while the rank is missing.
    pub epoch: ProcessEpoch,
    /// First record that this worker answers; records below it are RankLost for the rank.
    pub first: Position,
}

impl Member {
    /// No worker.
    pub const MISSING: Self = Self {
        epoch: ProcessEpoch(0),
        first: NEVER,
    };
}

fn copy_at(map: &RegionMap, rank: Rank, copy: u64) -> usize {
    map.member_at(rank) + 8 + (copy & 1) as usize * 16
}

/// The entry of a rank.
pub fn read_member<M: Shared>(control: &M, map: &RegionMap, rank: Rank) -> Member {
    let selector = control.load_acquire(map.member_at(rank)); // pairs with: members::write_member
    let at = copy_at(map, rank, selector);
    Member {
        epoch: ProcessEpoch(control.load(at)),
        first: Position(control.load(at + 8)),
    }
}

/// Replaces the entry of a rank.
pub fn write_member<M: SharedMut>(control: &M, map: &RegionMap, rank: Rank, member: Member) {
    let step = u64::from(!planted("x24_member_in_place"));
    let selector = control.load(map.member_at(rank)).wrapping_add(step);
    let at = copy_at(map, rank, selector);
    control.store(at, member.epoch.0);
    control.store(at + 8, member.first.0);
    control.store_release(map.member_at(rank), selector); // pairs with: members::read_member
}
