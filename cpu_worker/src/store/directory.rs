//! One entry of the block directory: what a frame of the pool holds, by the word of its owner (X25a).

use kvsluice_transport::shared::{Shared, SharedMut, full_fence};

const OWNER_AT: usize = 8;
const CHECKSUM_AT: usize = 16;

/// What a frame holds: words 0 to 2 of its entry (generation · 2 + valid, owner tag, checksum).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Entry {
    /// How often the frame was filled.
    pub(super) generation: u64,
    /// The rest is true.
    pub(super) valid: bool,
    /// Tag of the block.
    pub(super) owner: u64,
    /// XXH3-64 of its bytes, plane by plane.
    pub(super) checksum: u64,
}

impl Entry {
    /// The entry at `at` of the control segment, as an earlier producer left it.
    pub(super) fn read(control: &impl Shared, at: usize) -> Self {
        let state = control.load_acquire(at); // pairs with: directory::Entry::publish
        Self {
            generation: state >> 1,
            valid: state & 1 == 1,
            owner: control.load(at + OWNER_AT),
            checksum: control.load(at + CHECKSUM_AT),
        }
    }

    /// Says that the frame holds nothing, before its first byte changes.
    pub(super) fn invalidate(&mut self, control: &impl SharedMut, at: usize) {
        self.valid = false;
        control.store(at, self.generation << 1);
        // The bytes that follow must not be stored first. Nobody reads concurrently: it is for a crash in between.
        full_fence();
    }

    /// Says what the frame holds, after its last byte is in place.
    pub(super) fn publish(&mut self, control: &impl SharedMut, at: usize, owner: u64, checksum: u64) {
        *self = Self {
            generation: self.generation + 1,
            valid: true,
            owner,
            checksum,
        };
        control.store(at + OWNER_AT, owner);
        control.store(at + CHECKSUM_AT, checksum);
        // pairs with: directory::Entry::read
        control.store_release(at, self.generation << 1 | 1);
    }
}
