//! How bytes move between the processes of a channel: segments, ring, completions, waiting, attach, recovery.

// The protocol: runs on any memory, and so also under loom.
pub mod charter;
pub mod clock;
#[cfg(not(loom))]
pub mod counting;
#[cfg(not(loom))]
pub mod death;
pub mod members;
pub mod port;
pub mod producer;
pub mod recovery;
pub mod ring;
pub mod shared;
pub mod slots;
pub mod wait;

// The operating system.
#[cfg(not(loom))]
pub mod attach;
#[cfg(not(loom))]
pub mod clean;
#[cfg(not(loom))]
pub mod doctor;
#[cfg(not(loom))]
pub mod event_bridge;
#[cfg(not(loom))]
pub mod inspect;
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
#[cfg(not(loom))]
pub mod watcher;

#[cfg(test)]
#[cfg(loom)]
mod loom_tests;
#[cfg(test)]
#[cfg(not(loom))]
mod proof;
#[cfg(test)]
#[cfg(not(loom))]
mod test_process;
