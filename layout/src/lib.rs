//! What the bytes of a kvsluice channel mean: ids, geometry, capability, records, region map.
//!
//! No I/O and no unsafe code: everything here is a pure function of its arguments, so both sides of a channel, the
//! simulator and the tests share one definition of every byte.
#![forbid(unsafe_code)]

pub mod capability;
pub mod charter;
pub mod checksum;
pub mod content;
pub mod export;
pub mod geometry;
pub mod ids;
pub mod lease;
pub mod plan;
pub mod planes;
pub mod planted;
pub mod presets;
pub mod record;
pub mod refusal;
pub mod region;
pub mod segment;
