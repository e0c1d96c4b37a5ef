//! Why the ledger refuses.
#![forbid(unsafe_code)]

use kvsluice_layout::ids::{OperationId, Rank, RequestEpoch, SelectionRevision};
use thiserror::Error;

use super::OperationKey;

/// Why a request was not opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum OpenError {
    /// The epoch was open before, or a higher one was.
    #[error("{found:?} after {highest:?}: every life of a request needs a higher epoch")]
    StaleEpoch {
        /// Epoch asked for.
        found: RequestEpoch,
        /// Highest epoch ever opened for this request.
        highest: RequestEpoch,
    },
}

/// Why a submission was refused. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum SubmitError {
    /// The request is not open.
    #[error("the request is not open")]
    UnknownRequest,
    /// The epoch is over.
    #[error("{found:?} is over, {current:?} is open")]
    StaleEpoch {
        /// Epoch of the submission.
        found: RequestEpoch,
        /// Open epoch.
        current: RequestEpoch,
    },
    /// The epoch has not begun.
    #[error("{found:?} is not open yet, {current:?} is")]
    FutureEpoch {
        /// Epoch of the submission.
        found: RequestEpoch,
        /// Open epoch.
        current: RequestEpoch,
    },
    /// The request finishes when its pending operation ends.
    #[error("the request is finishing")]
    Finishing,
    /// The operation was aborted; its id is used up.
    #[error("{operation:?} was aborted: submit under a new id")]
    Aborted {
        /// The operation.
        operation: OperationId,
    },
    /// Operations of an epoch go up.
    #[error("{found:?} after {highest:?}: operation ids only grow within an epoch")]
    OperationOrder {
        /// The operation.
        found: OperationId,
        /// Highest accepted one.
        highest: OperationId,
    },
    /// Another operation is pending.
    #[error("{pending:?} is pending: one operation at a time")]
    PendingExists {
        /// The pending operation.
        pending: OperationId,
    },
    /// The selection revision does not grow.
    #[error("{found:?} after {current:?}: selection revisions only grow")]
    StaleRevision {
        /// Revision of the submission.
        found: SelectionRevision,
        /// Committed revision.
        current: SelectionRevision,
    },
}

/// Why an acknowledgement is an error (R46): the peer is broken. Nothing changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AckError {
    /// There is no such rank.
    #[error("{rank:?} of {ranks} ranks")]
    UnknownRank {
        /// The rank.
        rank: Rank,
        /// Number of ranks.
        ranks: u32,
    },
    /// Of an operation or epoch that was never issued.
    #[error("acknowledgement of {:?} {:?}, which was never issued", key.request_epoch, key.operation)]
    Future {
        /// What was acknowledged.
        key: OperationKey,
    },
    /// The operation is pending and is not what the rank says it applied.
    #[error("acknowledgement of {found:?} {found_revision:?}; pending is {expected:?} {expected_revision:?}")]
    Conflict {
        /// What was acknowledged.
        found: OperationKey,
        /// Its selection revision.
        found_revision: SelectionRevision,
        /// What is pending.
        expected: OperationKey,
        /// Its selection revision.
        expected_revision: SelectionRevision,
    },
}
