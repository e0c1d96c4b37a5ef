//! Shared memory that tells the checker what its process stores, in order, up to the store at which the process ends.

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

use kvsluice_layout::record::LINE_BYTES;
use kvsluice_transport::counting::{Counting, Fuse};
use kvsluice_transport::shared::{Heap, Shared, SharedMut};

const WORDS: usize = LINE_BYTES / 8;

/// One store, as the checker sees it.
#[derive(Clone, Copy, Debug)]
pub(super) enum Stored {
    /// A word outside the lines.
    Word {
        /// Offset in the segment.
        at: usize,
        /// The word.
        word: u64,
    },
    /// A range of the lines was written, or its writer died in it.
    Lines {
        /// Offset in the segment.
        at: usize,
        /// Bytes.
        bytes: usize,
    },
    /// The first word of a line, with the line as it was at that moment.
    Commit {
        /// Offset in the segment.
        at: usize,
        /// The line.
        line: [u64; WORDS],
    },
}

/// A segment under watch. `lines` is its plan ring or its terminal slots.
#[derive(Clone, Debug)]
pub(super) struct Probe {
    inner: Counting<Heap>,
    lines: Range<usize>,
    log: Rc<RefCell<Vec<Stored>>>,
}

impl Probe {
    pub(super) fn new(bytes: usize, lines: Range<usize>) -> Self {
        Self {
            inner: Counting::new(Heap::new(bytes)),
            lines,
            log: Rc::default(),
        }
    }

    /// The memory itself: for the other processes, and for whoever scribbles.
    pub(super) fn heap(&self) -> &Heap {
        &self.inner.memory
    }

    /// The fuse of the process that writes the segment.
    pub(super) fn fuse(&self) -> &Fuse {
        &self.inner.fuse
    }

    /// Moves the stores since the last call into `into`.
    pub(super) fn take_log(&self, into: &mut Vec<Stored>) {
        into.clear();
        into.append(&mut self.log.borrow_mut());
    }

    fn stored(&self, at: usize, word: u64) {
        let stored = if !self.lines.contains(&at) {
            Stored::Word { at, word }
        } else if at.is_multiple_of(LINE_BYTES) {
            let mut line = [0; WORDS];
            self.heap().copy_out(at, &mut line);
            Stored::Commit { at, line }
        } else {
            Stored::Lines { at, bytes: 8 }
        };
        self.log.borrow_mut().push(stored);
    }
}

impl Shared for Probe {
    fn size(&self) -> usize {
        self.inner.size()
    }

    fn load(&self, at: usize) -> u64 {
        self.inner.load(at)
    }

    fn load_u32(&self, at: usize) -> u32 {
        self.inner.load_u32(at)
    }

    fn bytes_out(&self, at: usize, into: &mut [u8]) {
        self.inner.bytes_out(at, into);
    }
}

impl SharedMut for Probe {
    fn store(&self, at: usize, word: u64) {
        self.inner.store(at, word);
        self.stored(at, word);
    }

    fn store_release(&self, at: usize, word: u64) {
        self.inner.store_release(at, word);
        self.stored(at, word);
    }

    fn store_u32(&self, at: usize, word: u32) {
        self.inner.store_u32(at, word);
    }

    fn copy_in(&self, at: usize, words: &[u64]) {
        self.log.borrow_mut().push(Stored::Lines {
            at,
            bytes: words.len() * 8,
        });
        self.inner.copy_in(at, words);
    }

    fn bytes_in(&self, at: usize, bytes: &[u8]) {
        self.inner.bytes_in(at, bytes);
    }
}
