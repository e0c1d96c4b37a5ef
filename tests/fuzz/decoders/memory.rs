//! Memory that its owner changes while a decoder reads it.
//!
//! The changes come before loads that the input names, and not whenever another thread gets its turn: every place
//! between two loads can be met, and an input that found something finds it again. [`super::race`] has a real thread.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

use kvsluice_transport::shared::{Heap, Shared, SharedMut};

use super::input::Input;

/// A store of the memory's owner, before the load that comes `loads` after the change before it.
#[derive(Clone, Copy)]
pub(super) struct Change {
    loads: u8,
    pub(super) at: usize,
    pub(super) word: u64,
}

impl Change {
    /// Up to seven changes of words within `places`.
    pub(super) fn read(input: &mut Input<'_>, places: &[Range<usize>]) -> Vec<Self> {
        let count = input.byte() % 8;
        let change = |_| {
            let (loads, range) = (input.byte(), &places[input.byte() as usize % places.len()]);
            let at = range.start + input.below(range.len() / 8) * 8;
            let word = input.word();
            Self { loads, at, word }
        };
        // Taken from the end.
        let mut changes: Vec<_> = (0..count).map(change).collect();
        changes.reverse();
        changes
    }
}

/// A segment whose words change as it is read.
#[derive(Clone)]
pub(super) struct Shifting {
    pub(super) words: Heap,
    changes: Rc<RefCell<Vec<Change>>>,
    loads: Rc<Cell<u8>>,
}

impl Shifting {
    pub(super) fn new(words: &Heap, changes: Vec<Change>) -> Self {
        let loads = changes.last().map_or(0, |next| next.loads);
        Self {
            words: words.clone(),
            changes: Rc::new(RefCell::new(changes)),
            loads: Rc::new(Cell::new(loads)),
        }
    }

    fn step(&self) {
        if self.changes.borrow().is_empty() {
            return;
        }
        if let Some(left) = self.loads.get().checked_sub(1) {
            self.loads.set(left);
            return;
        }
        let mut changes = self.changes.borrow_mut();
        if let Some(change) = changes.pop() {
            self.words.store(change.at, change.word);
            self.loads.set(changes.last().map_or(0, |next| next.loads));
        }
    }
}

impl Shared for Shifting {
    fn size(&self) -> usize {
        self.words.size()
    }

    fn load(&self, at: usize) -> u64 {
        self.step();
        self.words.load(at)
    }

    fn load_u32(&self, at: usize) -> u32 {
        self.step();
        self.words.load_u32(at)
    }

    fn bytes_out(&self, at: usize, into: &mut [u8]) {
        self.step();
        self.words.bytes_out(at, into);
    }
}

impl SharedMut for Shifting {
    fn store(&self, at: usize, word: u64) {
        self.words.store(at, word);
    }

    fn store_release(&self, at: usize, word: u64) {
        self.words.store_release(at, word);
    }

    fn store_u32(&self, at: usize, word: u32) {
        self.words.store_u32(at, word);
    }

    fn bytes_in(&self, at: usize, bytes: &[u8]) {
        self.words.bytes_in(at, bytes);
    }
}
