//! Why a workload cannot go on.
#![forbid(unsafe_code)]

use hdrhistogram::CreationError;
use kvsluice_layout::ids::OperationId;
use kvsluice_transport::producer::PublishError;
use thiserror::Error;

use super::options::OptionsError;
use crate::ledger::{AckError, OpenError, SubmitError};
use crate::owner::OwnerError;
use crate::planner::PlanError;
use crate::residency::{SettleError, StageError};
use crate::retain::RetainError;
use crate::retain_steps::NotDue;
use crate::selector::SelectError;
use crate::store::StoreError;
use crate::trace::TraceError;

/// Why a workload cannot go on.
#[derive(Debug, Error)]
pub enum RoundsError {
    /// The options do not fit the geometry.
    #[error(transparent)]
    Options(#[from] OptionsError),
    /// The trace cannot be read on.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// A record was refused for what it is; waiting does not help.
    #[error("request {request}, round {round}: {source}")]
    Publish {
        /// Number of the request.
        request: u64,
        /// The round.
        round: u32,
        /// Why.
        source: PublishError,
    },
    /// A record needs more than the pools have, although nothing else uses them.
    #[error("request {request}, round {round}: {blocked} for one record alone")]
    TooSmall {
        /// Number of the request.
        request: u64,
        /// The round.
        round: u32,
        /// What is too small, with the remedy.
        blocked: &'static str,
    },
    /// A step of the decision core was refused: a bug, named so that it can be reported.
    #[error("decision core: {0}; please report this")]
    Core(String),
    /// A new operation was taken for a retry.
    #[error("{0:?} is not new; please report this")]
    OperationReused(OperationId),
    /// The latency histogram cannot be made.
    #[error("latency histogram: {0}")]
    Histogram(#[from] CreationError),
}

macro_rules! core_errors {
    ($($error:ty),+) => {
        $(impl From<$error> for RoundsError {
            fn from(error: $error) -> Self {
                Self::Core(error.to_string())
            }
        })+
    };
}

core_errors!(
    AckError,
    NotDue,
    OpenError,
    OwnerError,
    PlanError,
    RetainError,
    SelectError,
    SettleError,
    StageError,
    StoreError,
    SubmitError
);
