//! Proofs of the protocol on the heap: a crash at every store, random worlds, memory that changes under the reader, and
//! threads for Miri and ThreadSanitizer (X33–X35). They run the production code; only the memory under it differs.

mod crashes;
mod random;
mod world;
