//! The memory of a host device: its block pool, its tables, and the only code that moves bytes.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use kvsluice_layout::planted::planted;

use crate::device::{OpenError, PlaceFault, PoolMemory, TABLE_POISON, TableSpec};

/// Alignment of an allocated pool: a page, as a driver would give.
const POOL_ALIGN: usize = 4096;

/// The block pool: memory of this process that only copies and kernels touch, through raw pointers.
pub(super) struct Pool {
    base: NonNull<u8>,
    bytes: u64,
    /// Present where the pool is ours to free.
    owned: Option<Layout>,
}

// SAFETY: a pool is an address range; whoever copies through it keeps the ordering rules of queues and events, and no
// reference to its bytes is ever made.
unsafe impl Send for Pool {}
// SAFETY: as above: `&Pool` gives out addresses only.
unsafe impl Sync for Pool {}

impl Pool {
    pub(super) fn open(memory: &PoolMemory) -> Result<Self, OpenError> {
        let (address, bytes) = match memory {
            PoolMemory::Allocate { bytes } => (None, *bytes),
            PoolMemory::Adopt(pool) => (Some(pool.address()), pool.bytes()),
        };
        if bytes == 0 {
            return Err(OpenError::Spec {
                field: "pool bytes",
                found: 0,
                least: 1,
            });
        }
        let none = OpenError::Memory {
            what: "the block pool",
            bytes,
        };
        if let Some(address) = address {
            let base = NonNull::new(std::ptr::with_exposed_provenance_mut(address as usize)).ok_or(none)?;
            return Ok(Self {
                base,
                bytes,
                owned: None,
            });
        }
        let layout = usize::try_from(bytes)
            .ok()
            .and_then(|bytes| Layout::from_size_align(bytes, POOL_ALIGN).ok());
        let layout = layout.ok_or(none.clone())?;
        // SAFETY: the layout's size is not 0, checked above.
        let base = NonNull::new(unsafe { alloc_zeroed(layout) }).ok_or(none)?;
        Ok(Self {
            base,
            bytes,
            owned: Some(layout),
        })
    }

    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Address and size, to keep host regions apart from the pool.
    pub(super) fn range(&self) -> (u64, u64) {
        (self.base.as_ptr() as u64, self.bytes)
    }

    /// The address of pool bytes that a copy may use.
    pub(super) fn resolve(&self, offset: u64, bytes: u64) -> Result<*mut u8, PlaceFault> {
        if bytes == 0 {
            return Err(PlaceFault::Empty);
        }
        match offset.checked_add(bytes) {
            Some(end) if end <= self.bytes => Ok(self.base.as_ptr().wrapping_add(offset as usize)),
            _ => Err(PlaceFault::Device {
                offset,
                bytes,
                pool_bytes: self.bytes,
            }),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        if let Some(layout) = self.owned {
            // SAFETY: allocated in `open` with this layout; the last user of the device is gone, so no copy runs.
            unsafe { dealloc(self.base.as_ptr(), layout) };
        }
    }
}

/// A contiguous copy with its addresses resolved, or what is left of it.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) from: *const u8,
    pub(super) to: *mut u8,
    pub(super) bytes: usize,
}

// SAFETY: addresses that were checked against a registered region and the pool; which thread copies does not matter.
unsafe impl Send for Piece {}

impl Piece {
    /// Cuts `bytes` off, from the end or from the start, and returns the cut part. `bytes` is at most what is left.
    pub(super) fn cut(&mut self, bytes: usize, from_end: bool) -> Self {
        self.bytes -= bytes;
        let skip = if from_end { self.bytes } else { 0 };
        let cut = Self {
            from: self.from.wrapping_add(skip),
            to: self.to.wrapping_add(skip),
            bytes,
        };
        if !from_end {
            self.from = self.from.wrapping_add(bytes);
            self.to = self.to.wrapping_add(bytes);
        }
        cut
    }

    /// Moves the bytes.
    ///
    /// # Safety
    /// Both ranges are valid for the length, and do not overlap.
    pub(super) unsafe fn run(self) {
        // SAFETY: the caller's promise. Raw pointers on both sides: the source may be shared memory, where a broken peer
        // changes bytes under us. That can give us wrong bytes, never a wrong address, since no byte is interpreted.
        unsafe { std::ptr::copy_nonoverlapping(self.from, self.to, self.bytes) }
    }
}

/// The tables: per slot two buffers in "device memory", the words staged for the next write, and which buffer counts.
/// Words are atomics, since a compute queue may read one buffer while a copy queue swaps it (D10).
pub(super) struct Tables {
    spec: TableSpec,
    buffers: [Box<[AtomicU32]>; 2],
    staged: Box<[AtomicU32]>,
    current: Box<[AtomicU32]>,
}

fn words(count: usize, value: u32) -> Result<Box<[AtomicU32]>, OpenError> {
    let mut words = Vec::new();
    let none = |_| OpenError::Memory {
        what: "the tables",
        bytes: count as u64 * 4,
    };
    words.try_reserve_exact(count).map_err(none)?;
    words.resize_with(count, || AtomicU32::new(value));
    Ok(words.into_boxed_slice())
}

impl Tables {
    pub(super) fn open(spec: TableSpec) -> Result<Self, OpenError> {
        let slots = spec.slots as usize;
        let total = slots.saturating_mul(spec.words as usize);
        Ok(Self {
            spec,
            buffers: [words(total, TABLE_POISON)?, words(total, TABLE_POISON)?],
            staged: words(total, TABLE_POISON)?,
            current: words(slots, 0)?,
        })
    }

    pub(super) const fn spec(&self) -> TableSpec {
        self.spec
    }

    fn row<'a>(&self, words: &'a [AtomicU32], slot: u32) -> &'a [AtomicU32] {
        let stride = self.spec.words as usize;
        let start = slot as usize * stride;
        words.get(start..start + stride).unwrap_or(&[])
    }

    /// Stages `new` for the next write of `slot`, poison behind it. The slot has no write queued.
    pub(super) fn stage(&self, slot: u32, new: &[u32]) {
        let mut new = new.iter();
        for word in self.row(&self.staged, slot) {
            // Relaxed: the queue's mutex orders the staging before the write that reads it.
            match new.next() {
                Some(&value) => word.store(value, Ordering::Relaxed),
                None if planted("stale_table_tail") => {}
                None => word.store(TABLE_POISON, Ordering::Relaxed), // field bug 34
            }
        }
    }

    /// The buffer that a reader which starts now uses.
    pub(super) fn current(&self, slot: u32) -> Option<usize> {
        // pairs with: device/host/memory.rs::swap
        self.current
            .get(slot as usize)
            .map(|current| current.load(Ordering::Acquire) as usize & 1)
    }

    /// Copies staged words `from..to` into the buffer that is not in use.
    pub(super) fn write(&self, slot: u32, from: u32, to: u32) {
        let spare = self.current(slot).unwrap_or(0) ^ usize::from(!planted("table_in_place"));
        let Some(buffer) = self.buffers.get(spare) else { return };
        let (source, target) = (self.row(&self.staged, slot), self.row(buffer, slot));
        for (new, word) in source.iter().zip(target).take(to as usize).skip(from as usize) {
            // Relaxed: `swap` publishes the buffer.
            word.store(new.load(Ordering::Relaxed), Ordering::Relaxed);
        }
    }

    /// Makes the written buffer the one that counts: one store.
    pub(super) fn swap(&self, slot: u32) {
        if let Some(current) = self.current.get(slot as usize) {
            // One copy engine writes a slot at a time, so load and store need not be one operation.
            // pairs with: device/host/memory.rs::current
            current.store(current.load(Ordering::Relaxed) ^ 1, Ordering::Release);
        }
    }

    /// One word of a buffer.
    pub(super) fn word(&self, slot: u32, buffer: usize, index: u32) -> Option<u32> {
        let row = self.row(self.buffers.get(buffer)?, slot);
        row.get(index as usize).map(|word| word.load(Ordering::Relaxed))
    }
}
