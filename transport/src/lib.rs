//! How bytes move between the processes of a channel: segments, ring, completions, waiting, attach, recovery.

#[cfg(not(loom))]
pub mod attach;
#[cfg(not(loom))]
pub mod clock;
#[cfg(not(loom))]
pub mod limits;
#[cfg(not(loom))]
pub mod link;
#[cfg(not(loom))]
pub mod liveness;
#[cfg(not(loom))]
pub mod lock;
#[cfg(not(loom))]
pub mod names;
#[cfg(not(loom))]
pub mod parcel;
#[cfg(not(loom))]
pub mod peers;
#[cfg(not(loom))]
pub mod runtime_dir;
#[cfg(not(loom))]
pub mod segment;
pub mod shared;

#[cfg(all(test, not(loom)))]
mod test_process;
