//! How bytes move between the processes of a channel: segments, ring, completions, waiting, attach, recovery.

pub mod shared;
