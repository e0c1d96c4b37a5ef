//! Every decoder of bytes that a peer, a file or a dead process wrote, as a function of one input (X33).
//!
//! Each panics where the product panics, and where something was accepted that breaks a rule. `tests/scripts/fuzz.sh`
//! runs them under libFuzzer; `cargo test -p kvsluice-tests --test decoders` runs them over a few thousand inputs.

mod answers;
mod channel;
mod control;
mod geometry;
mod input;
mod journal;
mod lines;
mod memory;
mod plan;
mod port;
mod race;
mod soundness;
mod store;
mod texts;

pub use answers::answers;
pub use control::control;
pub use geometry::geometry;
pub use journal::journal;
pub use lines::lines;
pub use plan::plan;
pub use port::port;
pub use race::race;
pub use store::store;
pub use texts::texts;
