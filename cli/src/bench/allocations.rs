//! Counts heap allocations, so that "none on the hot path" is measured and not believed (P8).

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations and reallocations of this process so far.
pub(super) fn count() -> u64 {
    ALLOCATIONS.load(Ordering::Relaxed) // Relaxed: a number that orders nothing.
}

// SAFETY: every call is passed on unchanged to the system's allocator, which keeps the contract; counting touches
// nothing but an atomic and does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are those of `System::alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: `block` came from `System` through this allocator, with this layout.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, bytes: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as in `dealloc`; the caller's promise about `bytes` is that of `System::realloc`.
        unsafe { System.realloc(block, layout, bytes) }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn p8_an_allocation_is_counted() {
        let before = super::count();
        drop(std::hint::black_box(Vec::<u64>::with_capacity(7)));
        assert!(super::count() > before);
    }
}
