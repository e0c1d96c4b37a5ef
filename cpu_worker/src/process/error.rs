//! Why a producer process ends with an error.

use std::path::PathBuf;

use kvsluice_layout::capability::GeometryHash;
use kvsluice_layout::charter::CharterError;
use kvsluice_layout::geometry::GeometryError;
use kvsluice_layout::ids::Rank;
use kvsluice_layout::region::RegionError;
use kvsluice_transport::attach::TakeoverError;
use kvsluice_transport::link::LinkError;
use kvsluice_transport::lock::LockError;
use kvsluice_transport::names::ChannelNameError;
use kvsluice_transport::producer::Oldest;
use kvsluice_transport::runtime_dir::RuntimeDirError;
use kvsluice_transport::segment::{CreateError, OpenError, PersistError};
use thiserror::Error;

use crate::rounds::RoundsError;
use crate::trace::TraceError;

/// Why a producer process ends with an error.
#[derive(Debug, Error)]
pub enum ProcessError {
    /// Channel name.
    #[error(transparent)]
    Name(#[from] ChannelNameError),
    /// Runtime folder.
    #[error(transparent)]
    RuntimeDir(#[from] RuntimeDirError),
    /// The channel has a producer.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The producer's socket.
    #[error("the producer's socket: {0}")]
    Link(#[from] LinkError),
    /// Looking for workers that survived.
    #[error(transparent)]
    Takeover(#[from] TakeoverError),
    /// The geometry.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// Sizes of the regions.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// A segment cannot be made.
    #[error(transparent)]
    Create(#[from] CreateError),
    /// A segment of an earlier producer cannot be used.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The charter of a channel cannot be written or read.
    #[error(transparent)]
    Charter(#[from] CharterError),
    /// A channel that was made for something else, though perhaps of equal size.
    #[error(
        "the channel was made for {model:?} ({found:?} in {found_ring} bytes of ring), not for {expected:?} in {ring}"
    )]
    OtherCharter {
        /// Model of the channel.
        model: String,
        /// Its geometry.
        found: GeometryHash,
        /// Bytes of its plan ring.
        found_ring: u64,
        /// This producer's geometry.
        expected: GeometryHash,
        /// Bytes of the plan ring that this producer wants.
        ring: u64,
    },
    /// The folder of named segments.
    #[error(transparent)]
    Persist(#[from] PersistError),
    /// The workload.
    #[error(transparent)]
    Rounds(#[from] RoundsError),
    /// The trace.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A worker is proven dead (X23).
    #[error(
        "RankLost: the worker of rank {rank} (pid {pid}) has died; start it again, or let the producer wait with --wait-for-ranks"
    )]
    RankLost {
        /// Its rank.
        rank: Rank,
        /// Its process, 0 where it cannot be told.
        pid: u32,
    },
    /// Workers did not come.
    #[error(
        "no worker attached for rank {ranks} within {waited_ms} ms: start `kvsluice gpu-worker --channel {channel}`"
    )]
    NoWorkers {
        /// The ranks that are missing, separated by commas.
        ranks: String,
        /// The channel.
        channel: String,
        /// How long they were waited for.
        waited_ms: u64,
    },
    /// A worker of the old channel lives and does not answer: what it reads cannot be taken over (X23).
    #[error("the worker of rank {rank} ({holder}) lives and does not answer a new producer; kill it, then start again")]
    Silent {
        /// Its rank.
        rank: Rank,
        /// The process.
        holder: String,
    },
    /// A stop was asked for, and a rank does not let the last operations end.
    #[error("stopped, but not everything ended within {waited_ms} ms; {}", oldest.map_or("nothing is in flight".to_owned(), |oldest| oldest.to_string()))]
    Stuck {
        /// How long it was waited for.
        waited_ms: u64,
        /// What is in flight.
        oldest: Option<Oldest>,
    },
    /// The rounds log.
    #[error("rounds log {path}: {source}")]
    RoundsLog {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The system.
    #[error("{step}: {source}")]
    System {
        /// What was tried.
        step: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}

pub(super) fn system(step: &'static str) -> impl Fn(std::io::Error) -> ProcessError {
    move |source| ProcessError::System { step, source }
}
