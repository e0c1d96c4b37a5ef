//! What a worker tells a new producer about its device at a takeover (X25). Travels as JSON over the handshake.
//!
//! A block's content is named by the tag that its plan carried; who plans without tags learns whose a block is, and not
//! what lies in it.

use serde::{Deserialize, Serialize};

use crate::ids::{DecoderLayer, GroupId, MapRevision, PoolGeneration, RequestEpoch, SelectionRevision};

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
    /// By group: what belongs to the request.
    pub groups: Vec<GroupExport>,
    /// By layer: its table. Empty for a layer of a group that shares one.
    pub layers: Vec<TableExport>,
}

/// What belongs to a request in one group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupExport {
    /// Its physical blocks, ascending.
    pub owned: Vec<u32>,
    /// The table that all layers of the group share, where they do.
    pub shared: Option<TableExport>,
}

/// One table.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TableExport {
    /// Physical block by resident slot.
    pub blocks: Vec<u32>,
    /// Content tag by resident slot; empty where the plan carried none.
    pub tags: Vec<u64>,
    /// Tokens that are valid.
    pub valid_tokens: u32,
}

impl RequestExport {
    /// The table that `layer` of `group` attends with.
    pub fn table(&self, layer: DecoderLayer, group: GroupId) -> Option<&TableExport> {
        let shared = self.groups.get(group.index())?.shared.as_ref();
        shared.or_else(|| self.layers.get(layer.index()))
    }
}
