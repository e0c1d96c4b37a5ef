//! The order of a retention (R57), as types: a step that is out of order does not compile, and a step without its
//! evidence gives the retention back unchanged.
//!
//! `Planned` → the request runs and nothing conflicts → `Admitted` → the last reader and transfer ended → `Quiet` → all
//! affected tables and valid lengths are applied → `Applied` → all ranks acknowledged and the owner committed →
//! `Retired`, which is what the ledger's acknowledgement is published from.
#![forbid(unsafe_code)]

use kvsluice_layout::ids::{DecoderLayer, GroupId, PhysicalBlock};
use kvsluice_layout::planted::planted;
use thiserror::Error;

use crate::ledger::{Committed, Operation, OperationKey, Pending};
use crate::owner::Owners;
use crate::residency::{Residency, SettleError};

/// What the request is doing besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Activity {
    /// The engine still runs the request.
    pub running: bool,
    /// A verify step of the request has not ended.
    pub verifying: bool,
    /// An upload of the request has not ended.
    pub uploading: bool,
    /// The request is being preempted.
    pub preempting: bool,
}

/// Who still reads or writes blocks of the request. Counted from their completion events, which are the only evidence
/// that they ended: a new schedule step is none (R58).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outstanding {
    /// Attention calls and replayed graphs without a completion event.
    pub readers: u32,
    /// Transfers without a completion event.
    pub transfers: u32,
    /// Schedule steps since the retention was planned. Not looked at.
    pub steps: u64,
}

/// Why a step is not due.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum NotDue {
    /// The request does not run or something conflicts: try again, or plan again.
    #[error("retention is not admitted while {0:?}")]
    Conflict(Activity),
    /// Completion events are missing.
    #[error("{} readers and {} transfers have not ended", .0.readers, .0.transfers)]
    InUse(Outstanding),
    /// A table was not applied: the others must not be used alone.
    #[error("the table of {0:?} is not applied")]
    Unapplied(DecoderLayer),
}

/// The plan is made and its operation is pending.
#[derive(Debug)]
pub struct Planned;
/// The request runs and nothing conflicts.
#[derive(Debug)]
pub struct Admitted;
/// Nothing reads or writes the old tables.
#[derive(Debug)]
pub struct Quiet;
/// All affected tables and valid lengths are applied.
#[derive(Debug)]
pub struct Applied;
/// Committed: the old references are retired.
#[derive(Debug)]
pub struct Retired {
    /// Blocks that became free.
    pub released: Vec<(GroupId, PhysicalBlock)>,
}

/// One retention in one step of its order.
///
/// Drop behaviour: nothing happens. The old tables stay in use until [`Retention::commit`]; an abort goes through the
/// ledger and [`Residency::abort`].
#[derive(Debug)]
pub struct Retention<Step> {
    key: OperationKey,
    affected: Vec<DecoderLayer>,
    step: Step,
}

/// A step, or the retention as it was and why the step is not due.
pub type Step<Next, Now> = Result<Retention<Next>, (Retention<Now>, NotDue)>;

impl<State> Retention<State> {
    /// The operation.
    pub fn key(&self) -> OperationKey {
        self.key
    }

    fn enter<Next>(self, step: Next) -> Retention<Next> {
        Retention {
            key: self.key,
            affected: self.affected,
            step,
        }
    }
}

impl Retention<Planned> {
    /// A retention whose plan changes the tables of `affected`.
    pub fn new(operation: &Operation<Pending>, affected: Vec<DecoderLayer>) -> Self {
        Self {
            key: operation.key(),
            affected,
            step: Planned,
        }
    }

    /// Goes on if the request runs and no verify, upload or preemption conflicts.
    pub fn admit(self, activity: Activity) -> Step<Admitted, Planned> {
        let conflict = !activity.running || activity.verifying || activity.uploading || activity.preempting;
        if conflict && !planted("r57_no_guard") {
            return Err((self, NotDue::Conflict(activity)));
        }
        Ok(self.enter(Admitted))
    }
}

impl Retention<Admitted> {
    /// Goes on when the last reader and transfer have ended (R58).
    pub fn quiesce(self, outstanding: Outstanding) -> Step<Quiet, Admitted> {
        let stepped = planted("r58_next_step_is_evidence") && outstanding.steps > 0;
        if (outstanding.readers > 0 || outstanding.transfers > 0) && !stepped {
            return Err((self, NotDue::InUse(outstanding)));
        }
        Ok(self.enter(Quiet))
    }
}

impl Retention<Quiet> {
    /// Goes on when every affected layer's table and valid length is applied.
    pub fn apply(self, applied: &[DecoderLayer]) -> Step<Applied, Quiet> {
        match self.affected.iter().find(|layer| !applied.contains(layer)) {
            Some(&layer) => Err((self, NotDue::Unapplied(layer))),
            None => Ok(self.enter(Applied)),
        }
    }
}

impl Retention<Applied> {
    /// Commits on the evidence of all ranks: the owner takes the new generation and the old references are retired.
    pub fn commit(
        self,
        evidence: &Operation<Committed>,
        residency: &mut Residency,
        owners: &mut Owners,
    ) -> Result<Retention<Retired>, (Box<Self>, SettleError)> {
        if evidence.key() != self.key {
            let error = SettleError::NotStaged {
                found: evidence.key(),
                staged: Some(self.key),
            };
            return Err((Box::new(self), error));
        }
        let mut released = Vec::new();
        match residency.commit(evidence, owners, &mut released) {
            Ok(()) => Ok(self.enter(Retired { released })),
            Err(error) => Err((Box::new(self), error)),
        }
    }
}

impl Retention<Retired> {
    /// Blocks that became free; recorded apart from the bytes that were moved (R66).
    pub fn released(&self) -> &[(GroupId, PhysicalBlock)] {
        &self.step.released
    }
}

#[cfg(test)]
mod tests {
    use core::num::NonZeroU32;

    use kvsluice_layout::ids::{OperationId, PoolGeneration, RequestEpoch, SelectionRevision};
    use kvsluice_layout::planted::with_planted;

    use super::*;
    use crate::ledger::{Ledger, Submission, Submitted};

    fn planned() -> Retention<Planned> {
        let mut ledger = Ledger::new(NonZeroU32::MIN);
        ledger.open(b"r", RequestEpoch(1)).unwrap();
        let submission = Submission {
            request_epoch: RequestEpoch(1),
            operation: OperationId(1),
            pool_generation: PoolGeneration(0),
            revision: SelectionRevision(1),
            bytes: 0,
        };
        let Submitted::Pending(operation) = ledger.submit(b"r", &submission).unwrap() else {
            panic!("a new operation")
        };
        Retention::new(&operation, vec![DecoderLayer(0), DecoderLayer(2)])
    }

    #[test]
    fn r57_a_retention_needs_a_running_request_and_no_conflict() {
        let free = Activity {
            running: true,
            ..Activity::default()
        };
        let conflicts = [
            Activity::default(),
            Activity {
                verifying: true,
                ..free
            },
            Activity {
                uploading: true,
                ..free
            },
            Activity {
                preempting: true,
                ..free
            },
        ];
        for activity in conflicts {
            let (_back, why) = planned().admit(activity).unwrap_err();
            assert_eq!(why, NotDue::Conflict(activity));
            assert!(with_planted("r57_no_guard", || planned().admit(activity).is_ok()));
        }
        assert!(planned().admit(free).is_ok());
    }

    #[test]
    fn r58_the_next_schedule_step_is_no_evidence_of_completion() {
        let admitted = || {
            planned()
                .admit(Activity {
                    running: true,
                    ..Activity::default()
                })
                .unwrap()
        };
        for busy in [
            Outstanding {
                readers: 1,
                ..Outstanding::default()
            },
            Outstanding {
                transfers: 1,
                ..Outstanding::default()
            },
        ] {
            let later = Outstanding { steps: 1_000, ..busy };
            assert!(admitted().quiesce(busy).is_err() && admitted().quiesce(later).is_err());
            assert!(with_planted("r58_next_step_is_evidence", || admitted()
                .quiesce(later)
                .is_ok()));
        }
        assert!(admitted().quiesce(Outstanding::default()).is_ok());
    }

    #[test]
    fn f15_r57_all_affected_tables_are_applied_or_none_counts() {
        let quiet = planned()
            .admit(Activity {
                running: true,
                ..Activity::default()
            })
            .unwrap()
            .quiesce(Outstanding::default())
            .unwrap();
        let (quiet, why) = quiet.apply(&[DecoderLayer(0)]).unwrap_err();
        assert_eq!(why, NotDue::Unapplied(DecoderLayer(2)));
        assert!(
            quiet
                .apply(&[DecoderLayer(2), DecoderLayer(1), DecoderLayer(0)])
                .is_ok()
        );
    }
}
