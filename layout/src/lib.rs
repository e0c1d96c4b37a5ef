//! What the bytes of a kvsluice channel mean: ids, geometry, capability, records, region map.
//!
//! No I/O and no unsafe code: everything here is a pure function of its arguments, so both sides of a channel, the
//! simulator and the tests share one definition of every byte.
#![forbid(unsafe_code)]

pub mod ids;
pub mod planted;
pub mod segment;
