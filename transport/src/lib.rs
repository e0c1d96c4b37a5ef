//! How bytes move between the processes of a channel: segments, ring, completions, waiting, attach, recovery.

pub mod members;
pub mod port;
pub mod producer;
pub mod recovery;
pub mod ring;
pub mod shared;
pub mod slots;
