//! Evidence of what became of an operation.
#![forbid(unsafe_code)]

use core::fmt;
use core::marker::PhantomData;

use kvsluice_layout::ids::{MapRevision, OperationId, PoolGeneration, RequestEpoch, SelectionRevision};

/// Names one operation (R45).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OperationKey {
    /// Life of the request.
    pub request_epoch: RequestEpoch,
    /// The operation within it.
    pub operation: OperationId,
    /// Generation of the device pools it was planned for.
    pub pool_generation: PoolGeneration,
    /// Residency revision that its commit makes.
    pub map_revision: MapRevision,
}

/// State of an [`Operation`]: accepted, and not yet acknowledged by all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending;
/// State of an [`Operation`]: acknowledged by all ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Committed;
/// State of an [`Operation`]: given up, nothing of it counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aborted;

/// Evidence that an operation is in a state. Only the ledger makes one, so that the steps of R43 cannot be taken in
/// another order: staging asks for an `Operation<Pending>`, a commit of tables for an `Operation<Committed>`.
#[derive(PartialEq, Eq)]
pub struct Operation<State> {
    key: OperationKey,
    revision: SelectionRevision,
    bytes: u64,
    state: PhantomData<State>,
}

impl<State> Operation<State> {
    pub(super) fn new(key: OperationKey, revision: SelectionRevision, bytes: u64) -> Self {
        Self {
            key,
            revision,
            bytes,
            state: PhantomData,
        }
    }

    /// What names it.
    pub fn key(&self) -> OperationKey {
        self.key
    }

    /// Selection revision that its commit makes.
    pub fn revision(&self) -> SelectionRevision {
        self.revision
    }

    /// Bytes that it moves; 0 for a metadata operation.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl<State> fmt::Debug for Operation<State> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} {:?}", self.key, self.revision)
    }
}
