//! The states of a host device's events: polled without a lock.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::device::{Event, EventState};

/// Work before the event is not finished.
pub(super) const PENDING: u64 = 0;
/// It is, and visible.
pub(super) const DONE: u64 = 1;
/// It failed.
pub(super) const FAILED: u64 = 2;
const STATE_BITS: u32 = 2;
const STATE_MASK: u64 = (1 << STATE_BITS) - 1;

/// The states of all events, read by polls without the lock: generation above, state below.
pub(super) struct EventStates(Box<[AtomicU64]>);

impl EventStates {
    pub(super) fn new(count: u32) -> Self {
        Self((0..count).map(|_| AtomicU64::new(FAILED)).collect())
    }

    pub(super) fn poll(&self, event: Event) -> EventState {
        // pairs with: device/host/events.rs::EventStates::finish
        let word = self
            .0
            .get(event.index())
            .map_or(FAILED, |word| word.load(Ordering::Acquire));
        match word & STATE_MASK {
            _ if word >> STATE_BITS != u64::from(event.generation()) => EventState::Failed,
            PENDING => EventState::Pending,
            DONE => EventState::Done,
            _ => EventState::Failed,
        }
    }

    /// State of the event in place `index`, whoever holds it.
    pub(super) fn state(&self, index: u32) -> u64 {
        // Relaxed: only called under the lock, as every store is.
        self.0
            .get(index as usize)
            .map_or(FAILED, |word| word.load(Ordering::Relaxed) & STATE_MASK)
    }

    /// Fires the event in place `index`.
    pub(super) fn finish(&self, index: u32, state: u64) {
        if let Some(word) = self.0.get(index as usize) {
            let generation = word.load(Ordering::Relaxed) & !STATE_MASK;
            // Release: the copies before the event happen before whoever sees it (X13). They ran on threads that took
            // the lock afterwards, so they happen before this store.
            // pairs with: device/host/events.rs::EventStates::poll
            word.store(generation | state, Ordering::Release);
        }
    }

    /// Starts a new use of place `index`.
    pub(super) fn set(&self, index: u32, generation: u32, state: u64) {
        if let Some(word) = self.0.get(index as usize) {
            word.store(u64::from(generation) << STATE_BITS | state, Ordering::Release);
        }
    }
}
