//! Memory that ends its process at a chosen store (X35): how a crash is put between any two stores.
//!
//! Crash enumeration and the simulator run the production code on it. A crash is an unwinding that only [`until_crash`]
//! ends; what the process had in private memory is dropped by its caller, what it had stored stays.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;

use crate::shared::{Shared, SharedMut};

/// What unwinds where the process ends.
struct Crash;

/// Counts the stores of one process, and ends it before the one it is armed for. Clones are one fuse.
#[derive(Clone, Debug, Default)]
pub struct Fuse {
    stores: Rc<Cell<u64>>,
    left: Rc<Cell<Option<u64>>>,
}

impl Fuse {
    /// Lets the process make `stores` more stores and then ends it.
    pub fn arm(&self, stores: u64) {
        self.left.set(Some(stores));
    }

    /// Lets the process live.
    pub fn disarm(&self) {
        self.left.set(None);
    }

    /// True until the process has ended.
    pub fn is_armed(&self) -> bool {
        self.left.get().is_some()
    }

    /// Stores made so far.
    pub fn stores(&self) -> u64 {
        self.stores.get()
    }

    fn burn(&self) {
        match self.left.get() {
            Some(0) => {
                self.left.set(None);
                resume_unwind(Box::new(Crash)); // Without the message of a panic.
            }
            left => self.left.set(left.map(|n| n - 1)),
        }
        self.stores.set(self.stores.get() + 1);
    }
}

/// Runs `process` up to its end or its crash, which is `None`. Other panics go on.
pub fn until_crash<T>(process: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(process)) {
        Ok(value) => Some(value),
        Err(cause) if cause.is::<Crash>() => None,
        Err(cause) => resume_unwind(cause),
    }
}

/// Memory whose stores burn a fuse. Copies go word by word, so a record is cut at any word.
#[derive(Clone, Debug)]
pub struct Counting<M> {
    /// The memory, for a reader of another process.
    pub memory: M,
    /// The fuse of the process that writes it.
    pub fuse: Fuse,
}

impl<M> Counting<M> {
    /// Memory with a fuse of its own.
    pub fn new(memory: M) -> Self {
        Self {
            memory,
            fuse: Fuse::default(),
        }
    }
}

impl<M: Shared> Shared for Counting<M> {
    fn size(&self) -> usize {
        self.memory.size()
    }

    fn load(&self, at: usize) -> u64 {
        self.memory.load(at)
    }

    fn load_u32(&self, at: usize) -> u32 {
        self.memory.load_u32(at)
    }

    fn bytes_out(&self, at: usize, into: &mut [u8]) {
        self.memory.bytes_out(at, into);
    }
}

impl<M: SharedMut> SharedMut for Counting<M> {
    fn store(&self, at: usize, word: u64) {
        self.fuse.burn();
        self.memory.store(at, word);
    }

    fn store_release(&self, at: usize, word: u64) {
        self.fuse.burn();
        self.memory.store_release(at, word);
    }

    fn store_u32(&self, at: usize, word: u32) {
        self.fuse.burn();
        self.memory.store_u32(at, word);
    }

    fn bytes_in(&self, at: usize, bytes: &[u8]) {
        self.fuse.burn();
        self.memory.bytes_in(at, bytes);
    }
}
