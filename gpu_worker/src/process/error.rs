//! Why a worker process ends with an error.

use kvsluice_layout::geometry::GeometryError;
use kvsluice_layout::region::RegionError;
use kvsluice_transport::attach::AttachError;
use kvsluice_transport::link::LinkError;
use kvsluice_transport::lock::LockError;
use kvsluice_transport::names::ChannelNameError;
use kvsluice_transport::runtime_dir::RuntimeDirError;
use thiserror::Error;

use crate::copy::ChunkError;
use crate::device::{OpenError, RegisterError};
use crate::worker::WorkerError;

/// Why a worker process ends with an error.
#[derive(Debug, Error)]
pub enum ProcessError {
    /// Channel name.
    #[error(transparent)]
    Name(#[from] ChannelNameError),
    /// Runtime folder.
    #[error(transparent)]
    RuntimeDir(#[from] RuntimeDirError),
    /// The channel's folder or this worker's lock in it was deleted while nobody else was there to say so (X27).
    #[error(transparent)]
    Gone(RuntimeDirError),
    /// The rank is taken.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// No producer, or one that does not fit.
    #[error(transparent)]
    Attach(#[from] AttachError),
    /// The worker's own socket.
    #[error("the worker's socket: {0}")]
    Link(#[from] LinkError),
    /// The geometry.
    #[error(transparent)]
    Geometry(#[from] GeometryError),
    /// Sizes of the regions.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Cutting the pool for registration.
    #[error(transparent)]
    Chunk(#[from] ChunkError),
    /// The device.
    #[error(transparent)]
    Device(#[from] OpenError),
    /// Pinning.
    #[error(transparent)]
    Register(#[from] RegisterError),
    /// The core stopped.
    #[error(transparent)]
    Worker(#[from] WorkerError),
    /// The system.
    #[error("{step}: {source}")]
    System {
        /// What was tried.
        step: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// Stopped before it was attached.
    #[error("stopped before a producer took this worker in")]
    Stopped,
    /// The producer died while this worker attached.
    #[error("the producer died while this worker attached to it; start a producer")]
    ProducerGone,
    /// A new producer goes on without this worker's device.
    #[error("a new producer starts cold: {reason}; start this worker again")]
    Drained {
        /// Why.
        reason: String,
    },
}

impl ProcessError {
    /// True where the producer went away before this worker was its own: the next one can be attached to.
    pub(super) fn is_producer_gone(&self) -> bool {
        matches!(self, Self::ProducerGone | Self::Attach(AttachError::Link { .. }))
    }

    /// This worker has no producer, for the moment or any more.
    pub(super) fn is_unattached(&self) -> bool {
        let never = matches!(self, Self::Attach(AttachError::NoProducer { .. }));
        never || self.is_producer_gone() || matches!(self, Self::Stopped | Self::Drained { .. } | Self::Gone(_))
    }
}
