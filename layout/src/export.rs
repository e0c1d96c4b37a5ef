//! What a worker tells a new producer about its device at a takeover (X25). Travels as JSON over the handshake.

use serde::{Deserialize, Serialize};

use crate::ids::{MapRevision, PoolGeneration, RequestEpoch, SelectionRevision};

/// The committed state of one rank's device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidencyExport {
    /// Generation of the rank's pools.
    pub pool_generation: PoolGeneration,
    /// Digest over all requests: equal on ranks that hold equal state (I9).
    pub digest: u64,
    /// Every request with a state, in the order of their ids.
    pub requests: Vec<RequestExport>,
}

/// One request's state on one rank.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestExport {
    /// The opaque id, whole (R49).
    pub request: Vec<u8>,
    /// Epoch of the request.
    pub epoch: RequestEpoch,
    /// Residency revision g.
    pub map_revision: MapRevision,
    /// Selection revision r.
    pub selection_revision: SelectionRevision,
    /// Digest of the tables.
    pub digest: u64,
    /// By group: physical blocks that belong to the request, ascending.
    pub owned: Vec<Vec<u32>>,
}
