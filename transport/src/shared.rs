//! The one layer between the protocol and shared memory (X1, X2, X35).
//!
//! Every load and store of a word that another process may touch at the same time goes through [`Shared`] or
//! [`SharedMut`], by byte offset into a segment; there are no references to shared bytes. The protocol is generic over
//! these traits, so that the same code runs on a mapped segment, on the heap (Miri, ThreadSanitizer, the simulator),
//! on loom's atomics, and under a counter that ends the process at its k-th store (crash enumeration).

#[cfg(loom)]
pub(crate) use loom::sync::atomic::{AtomicU64, Ordering, fence};
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::{AtomicU64, Ordering, fence};

use std::sync::Arc;

use kvsluice_layout::planted::planted;

/// A segment that this process may read.
///
/// Offsets are bytes from the segment's start. A word's offset is a multiple of 8 (of 4 for `load_u32`). A word is
/// always accessed with the same size. Implementations panic when an offset lies outside the segment: callers derive
/// offsets from a region map that was checked against the segment's size at attach, never from bytes a peer wrote.
pub trait Shared {
    /// Size of the segment in bytes.
    fn size(&self) -> usize;

    /// Reads a word without ordering.
    fn load(&self, at: usize) -> u64;

    /// Reads a word such that later reads see what its writer stored before it (X2a).
    fn load_acquire(&self, at: usize) -> u64 {
        let word = self.load(at);
        // pairs with: SharedMut::store_release of the same word, in the process that owns it.
        fence(Ordering::Acquire);
        word
    }

    /// Asks for the line at `at` ahead of its use. A hint: nothing is read, and `at` may lie outside the segment.
    #[inline]
    fn prefetch(&self, _at: usize) {}

    /// Reads a 32-bit word (a futex counter) without ordering.
    fn load_u32(&self, at: usize) -> u32;

    /// Copies `into.len()` words out, word by word, without ordering.
    fn copy_out(&self, at: usize, into: &mut [u64]) {
        for (i, word) in into.iter_mut().enumerate() {
            *word = self.load(at + i * 8);
        }
    }

    /// Copies bytes out of a range that no process writes meanwhile (a leased block, an answered write-back).
    fn bytes_out(&self, at: usize, into: &mut [u8]);
}

/// A segment that this process alone may write (X1).
pub trait SharedMut: Shared {
    /// Writes a word without ordering.
    fn store(&self, at: usize, word: u64);

    /// Writes a word such that whoever acquires it sees every earlier store of this process.
    fn store_release(&self, at: usize, word: u64);

    /// Asks to own the line at `at` ahead of a store. A hint: nothing is written, and `at` may lie outside the segment.
    #[inline]
    fn prefetch_write(&self, _at: usize) {}

    /// Writes a 32-bit word (a futex counter).
    fn store_u32(&self, at: usize, word: u32);

    /// Copies words in, word by word, without ordering.
    fn copy_in(&self, at: usize, words: &[u64]) {
        for (i, word) in words.iter().enumerate() {
            self.store(at + i * 8, *word);
        }
    }

    /// Copies bytes into a range that no process reads meanwhile (a block that nobody leases).
    fn bytes_in(&self, at: usize, bytes: &[u8]);
}

/// Orders this process's earlier stores before its later loads: the Dekker step between "I sleep" and "is there work"
/// on one side, and "there is work" and "does it sleep" on the other (X29).
#[inline]
pub fn full_fence() {
    if planted("x29_no_fence") {
        return;
    }
    // pairs with: full_fence in the peer, between its own store and its own load.
    fence(Ordering::SeqCst);
}

/// A segment on the heap, shared by the threads of one process.
///
/// The in-process back end: tests, Miri, ThreadSanitizer, loom and the simulator run the protocol on it. Clones share
/// the same words.
#[derive(Clone, Debug)]
pub struct Heap {
    words: Arc<[AtomicU64]>,
}

impl Heap {
    /// A segment of `bytes` bytes (rounded up to whole words), all zero.
    pub fn new(bytes: usize) -> Self {
        Self {
            words: (0..bytes.div_ceil(8)).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Address of the first byte, for a device that copies from it or into it. Valid while a clone lives.
    #[cfg(not(loom))]
    pub fn base(&self) -> *mut u8 {
        // The words are atomics, which may change behind a shared reference.
        self.words.as_ptr().cast_mut().cast()
    }
}

impl Shared for Heap {
    fn size(&self) -> usize {
        self.words.len() * 8
    }

    #[inline]
    fn load(&self, at: usize) -> u64 {
        self.words[at / 8].load(Ordering::Relaxed)
    }

    #[cfg(kvsluice_tsan)]
    fn load_acquire(&self, at: usize) -> u64 {
        // X2a: ThreadSanitizer does not understand fences.
        // pairs with: Heap::store_release of the same word.
        self.words[at / 8].load(Ordering::Acquire)
    }

    #[inline]
    fn load_u32(&self, at: usize) -> u32 {
        self.load(at & !7) as u32
    }

    fn bytes_out(&self, at: usize, into: &mut [u8]) {
        let mut at = at;
        let mut rest = into;
        while !rest.is_empty() {
            let within = at % 8;
            let (part, behind) = rest.split_at_mut(rest.len().min(8 - within));
            part.copy_from_slice(&self.load(at - within).to_le_bytes()[within..within + part.len()]);
            at += part.len();
            rest = behind;
        }
    }
}

impl SharedMut for Heap {
    #[inline]
    fn store(&self, at: usize, word: u64) {
        self.words[at / 8].store(word, Ordering::Relaxed);
    }

    #[inline]
    fn store_release(&self, at: usize, word: u64) {
        // pairs with: Shared::load_acquire of the same word.
        self.words[at / 8].store(word, Ordering::Release);
    }

    fn store_u32(&self, at: usize, word: u32) {
        self.store(at & !7, u64::from(word));
    }

    fn bytes_in(&self, at: usize, bytes: &[u8]) {
        let mut at = at;
        let mut rest = bytes;
        while !rest.is_empty() {
            let within = at % 8;
            let (part, behind) = rest.split_at(rest.len().min(8 - within));
            let mut word = self.load(at - within).to_le_bytes();
            word[within..within + part.len()].copy_from_slice(part);
            self.store(at - within, u64::from_le_bytes(word));
            at += part.len();
            rest = behind;
        }
    }
}
