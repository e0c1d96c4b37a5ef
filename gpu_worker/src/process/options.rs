//! What a worker process is started with.

use std::path::PathBuf;
use std::time::Duration;

use kvsluice_layout::geometry::Geometry;
use kvsluice_layout::ids::Rank;

use crate::worker::Verify;

/// What a worker process is started with.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// Name of the channel.
    pub channel: String,
    /// Where channels live; `None` for the default.
    pub runtime_dir: Option<PathBuf>,
    /// Users besides this process's own who may take part (X20).
    pub allowed_uids: Vec<u32>,
    /// The rank.
    pub rank: Rank,
    /// The geometry that this rank serves; the producer's must be equal.
    pub geometry: Geometry,
    /// Copy threads of the host device.
    pub copy_threads: usize,
    /// Seed of the adversarial host device.
    pub adversary: Option<u64>,
    /// How much is verified.
    pub verify: Verify,
    /// Largest registered chunk of the pool in bytes (X31).
    pub chunk_bytes_max: u64,
    /// How long to wait for a producer at start.
    pub attach_patience: Duration,
    /// How long an operation may run before the device counts as lost. Zero: for ever.
    pub watchdog: Duration,
    /// Most requests with tables at a time.
    pub requests_max: u32,
}
