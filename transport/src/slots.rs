//! Terminal slots: how a rank answers each record, in any order, without ever blocking (X12).
//!
//! Each rank segment has one 64-byte slot per line of the plan ring. The record at position p answers in slot
//! (p/64) mod lines; the answer is committed by storing p + 1 in the slot's first word. A slot is rewritten only for a
//! record whose predecessor in that line is below `reclaim`, which the ring guarantees: the line itself was reused.

use kvsluice_layout::ids::Position;
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{LINE_BYTES, TerminalSlot};
use kvsluice_layout::region::SLOTS_AT;
use zerocopy::{FromBytes, IntoBytes};

use crate::ring::RingShape;
use crate::shared::{Shared, SharedMut};

const SLOT_WORDS: usize = LINE_BYTES / 8;

#[inline]
fn slot_at(shape: RingShape, position: Position) -> usize {
    SLOTS_AT + shape.offset(position.0)
}

/// Writes the answer of a record into its slot: seven words, then the commit word.
#[inline]
pub fn write_slot<M: SharedMut>(memory: &M, shape: RingShape, position: Position, answer: &TerminalSlot) {
    let at = slot_at(shape, position);
    // Put together from registers: what is stored in small parts and loaded as words right after stalls.
    let words: [u64; SLOT_WORDS] = [
        position.0 + 1,
        answer.identity,
        answer.producer_epoch,
        answer.worker_epoch,
        u64::from(answer.status)
            | u64::from(answer.partial) << 8
            | u64::from(answer.reason) << 16
            | u64::from(answer.row) << 32,
        answer.bytes_moved,
        answer.device_ns,
        answer.digest,
    ];
    if planted("x12_commit_first") {
        memory.store(at, position.0 + 1);
        memory.copy_in(at + 8, &words[1..]);
        return;
    }
    memory.copy_in(at + 8, &words[1..]);
    if planted("x12_relaxed_terminal") {
        memory.store(at, position.0 + 1);
        return;
    }
    // pairs with: slots::read_slot, which acquires the slot's first word.
    memory.store_release(at, position.0 + 1);
}

/// Asks for the slot of the record at `position`, which is to be read soon.
#[inline]
pub fn prefetch_slot<M: Shared>(memory: &M, shape: RingShape, position: Position) {
    memory.prefetch(slot_at(shape, position));
}

/// Asks to own the slot of the record at `position`, which is to be written soon.
#[inline]
pub fn prefetch_slot_write<M: SharedMut>(memory: &M, shape: RingShape, position: Position) {
    memory.prefetch_write(slot_at(shape, position));
}

/// What a slot says about the record at a position.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SlotState {
    /// Not terminal: the slot is empty or answers an earlier record of its line.
    Open,
    /// The answer, copied out once.
    Answered(TerminalSlot),
    /// A word that no worker writes: a position that is still to come, or one of another line.
    Stray(u64),
}

/// Reads the answer of the record at `position`.
#[inline]
pub fn read_slot<M: Shared>(memory: &M, shape: RingShape, position: Position) -> SlotState {
    let at = slot_at(shape, position);
    let commit = memory.load_acquire(at); // pairs with: slots::write_slot
    if commit != position.0 + 1 {
        // An earlier record of this line left its position + 1, one or more laps back.
        let earlier = commit == 0 || (commit <= position.0 && shape.offset(commit - 1) == shape.offset(position.0));
        return if earlier {
            SlotState::Open
        } else {
            SlotState::Stray(commit)
        };
    }
    let mut words = [0_u64; SLOT_WORDS];
    words[0] = commit;
    memory.copy_out(at + 8, &mut words[1..]);
    match TerminalSlot::read_from_bytes(words.as_bytes()) {
        Ok(answer) => SlotState::Answered(answer),
        Err(_) => SlotState::Open, // Sizes are equal by construction.
    }
}
