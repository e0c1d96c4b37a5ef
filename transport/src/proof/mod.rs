//! Proofs of the protocol on the heap: a crash at every store, random worlds, memory that changes under the reader, and
//! threads for Miri and ThreadSanitizer (X33–X35). They run the production code; only the memory under it differs.

use std::sync::atomic::{AtomicBool, Ordering};

mod crashes;
mod mutation;
mod random;
mod threads;
mod world;

/// Ends the other threads of a test, also where an assertion ends this one.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
