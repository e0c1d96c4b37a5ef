//! How bytes move between the processes of a channel: segments, ring, completions, waiting, attach, recovery.

#[cfg(not(loom))]
#[cfg(not(loom))]
#[cfg(not(loom))]
#[cfg(not(loom))]
#[cfg(not(loom))]
#[cfg(not(loom))]
#[cfg(not(loom))]

#[cfg(all(test, not(loom)))]

pub mod clock;
pub mod limits;
pub mod lock;
pub mod members;
pub mod names;
pub mod peers;
pub mod port;
pub mod producer;
pub mod recovery;
pub mod ring;
pub mod runtime_dir;
pub mod segment;
pub mod shared;
pub mod slots;
mod test_process;
