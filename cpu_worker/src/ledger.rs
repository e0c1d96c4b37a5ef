//! The ledger of uploads: which operation of which request is pending, and when it commits (R42–R50, R59, R60).
//!
//! A request has a residency revision g and a selection revision r. An operation is submitted with what it will make of
//! them; it commits when **every** rank has acknowledged exactly that, and until then g and r stay as they are. An
//! operation without bytes takes the same way and moves r alone (R42, R44). Memory: 40 bytes per operation of the current
//! epoch (a retry finds its result, R47), and per request id ever seen the id and its highest epoch (an old epoch never
//! opens again).
#![forbid(unsafe_code)]

use core::num::NonZeroU32;
use std::collections::HashMap;

use kvsluice_layout::ids::{MapRevision, OperationId, PoolGeneration, Rank, RequestEpoch, SelectionRevision};
use kvsluice_layout::planted::planted;

use crate::rank_set::RankSet;

mod operation;
mod refusal;
#[cfg(test)]
mod tests;

pub use operation::{Aborted, Committed, Operation, OperationKey, Pending};
pub use refusal::{AckError, OpenError, SubmitError};

/// What is asked of [`Ledger::submit`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submission {
    /// Life of the request.
    pub request_epoch: RequestEpoch,
    /// The operation; above every earlier one of this epoch.
    pub operation: OperationId,
    /// Generation of the device pools.
    pub pool_generation: PoolGeneration,
    /// Selection revision that the commit makes.
    pub revision: SelectionRevision,
    /// Bytes to move.
    pub bytes: u64,
}

/// One rank's word that it has applied an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ack {
    /// What the rank applied.
    pub key: OperationKey,
    /// The selection revision it holds now.
    pub revision: SelectionRevision,
    /// The rank.
    pub rank: Rank,
}

/// Outcome of an accepted [`Ledger::submit`].
#[derive(Debug, PartialEq, Eq)]
pub enum Submitted {
    /// A new operation: stage it.
    Pending(Operation<Pending>),
    /// A retry: the operation exists, and nothing is to be done again (R47).
    Reused {
        /// Residency revision of the operation.
        map_revision: MapRevision,
        /// Selection revision of the operation.
        revision: SelectionRevision,
    },
}

/// Outcome of an accepted [`Ledger::ack`].
#[derive(Debug, PartialEq, Eq)]
pub enum Acked {
    /// Counted for its rank; others are still to come.
    Recorded,
    /// The last rank: the request is at the operation's revisions now.
    Committed(Operation<Committed>),
    /// Said before; nothing changed (R46).
    Duplicate,
    /// Of something that is over; nothing changed (R46).
    Ignored,
}

/// Outcome of [`Ledger::finish`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finished {
    /// The request is gone.
    Finished,
    /// An operation is pending: the request goes with its last acknowledgement or its abort.
    Draining,
    /// Unknown request or another epoch.
    Ignored,
}

/// What is known of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestState {
    /// Its current life.
    pub epoch: RequestEpoch,
    /// Committed residency revision g.
    pub map_revision: MapRevision,
    /// Committed selection revision r.
    pub revision: SelectionRevision,
    /// The operation that is pending, if any.
    pub pending: Option<OperationId>,
}

/// Acknowledgements that changed nothing, by kind (R46).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AckCounters {
    /// Said before.
    pub duplicate: u64,
    /// Of something that is over or unknown.
    pub ignored: u64,
    /// Errors of a rank.
    pub refused: u64,
}

/// All requests of one producer.
#[derive(Debug)]
pub struct Ledger {
    ranks: NonZeroU32,
    /// By the whole opaque id (R49).
    requests: HashMap<Box<[u8]>, Request>,
    counters: AckCounters,
}

#[derive(Debug)]
struct Request {
    highest_epoch: RequestEpoch,
    /// `None` once finished.
    life: Option<Life>,
}

/// One epoch of one request.
#[derive(Debug)]
struct Life {
    epoch: RequestEpoch,
    map_revision: MapRevision,
    revision: SelectionRevision,
    pending: Option<Entry>,
    /// Ranks that acknowledged `pending`. Kept between operations for its memory.
    acked: RankSet,
    /// Earlier operations, ascending.
    past: Vec<Past>,
    finishing: bool,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    key: OperationKey,
    revision: SelectionRevision,
    bytes: u64,
}

impl Entry {
    fn evidence<State>(&self) -> Operation<State> {
        Operation::new(self.key, self.revision, self.bytes)
    }
}

#[derive(Clone, Copy, Debug)]
struct Past {
    operation: OperationId,
    /// `None` if it was aborted.
    committed: Option<(PoolGeneration, MapRevision, SelectionRevision)>,
}

impl Ledger {
    /// An empty ledger for `ranks` ranks.
    pub fn new(ranks: NonZeroU32) -> Self {
        Self {
            ranks,
            requests: HashMap::new(),
            counters: AckCounters::default(),
        }
    }

    /// Opens a life of `request`, at g = 0 and r = 0. Returns the operation of the life before it that was still
    /// pending: it is aborted.
    pub fn open(&mut self, request: &[u8], epoch: RequestEpoch) -> Result<Option<Operation<Aborted>>, OpenError> {
        self.resume(request, epoch, MapRevision(0), SelectionRevision(0))
    }

    /// The same for a life that an earlier producer began and every rank holds at these revisions (X25).
    pub fn resume(
        &mut self,
        request: &[u8],
        epoch: RequestEpoch,
        map_revision: MapRevision,
        revision: SelectionRevision,
    ) -> Result<Option<Operation<Aborted>>, OpenError> {
        let life = Life {
            epoch,
            map_revision,
            revision,
            pending: None,
            acked: RankSet::default(),
            past: Vec::new(),
            finishing: false,
        };
        let request = identity(request);
        let Some(known) = self.requests.get_mut(request) else {
            self.requests.insert(
                request.into(),
                Request {
                    highest_epoch: epoch,
                    life: Some(life),
                },
            );
            return Ok(None);
        };
        if epoch <= known.highest_epoch {
            return Err(OpenError::StaleEpoch {
                found: epoch,
                highest: known.highest_epoch,
            });
        }
        known.highest_epoch = epoch;
        let old = known.life.replace(life);
        Ok(old.and_then(|life| life.pending).map(|entry| entry.evidence()))
    }

    /// Accepts an operation, or finds that it is a retry of one. Errors in the order of the variants of
    /// [`SubmitError`]; an operation that was already accepted is found right after `Finishing`.
    pub fn submit(&mut self, request: &[u8], submission: &Submission) -> Result<Submitted, SubmitError> {
        let life = self.life(request).ok_or(SubmitError::UnknownRequest)?;
        let (found, current) = (submission.request_epoch, life.epoch);
        if found < current {
            return Err(SubmitError::StaleEpoch { found, current });
        }
        if found > current {
            return Err(SubmitError::FutureEpoch { found, current });
        }
        if life.finishing {
            return Err(SubmitError::Finishing);
        }
        let operation = submission.operation;
        if let Some(reused) = life.reuse(operation) {
            return reused;
        }
        if let Some(highest) = life.highest_issued().filter(|highest| operation <= *highest) {
            return Err(SubmitError::OperationOrder {
                found: operation,
                highest,
            });
        }
        if let Some(pending) = life.pending {
            return Err(SubmitError::PendingExists {
                pending: pending.key.operation,
            });
        }
        if submission.revision <= life.revision {
            return Err(SubmitError::StaleRevision {
                found: submission.revision,
                current: life.revision,
            });
        }
        if submission.bytes == 0 && planted("r42_zero_delta_not_finalised") {
            return Ok(Submitted::Reused {
                map_revision: life.map_revision,
                revision: life.revision,
            });
        }
        // R44: the residency advances only with bytes.
        let advance = submission.bytes > 0 || planted("r44_zero_delta_moves_g");
        let map_revision = MapRevision(life.map_revision.get() + u64::from(advance));
        let entry = Entry {
            key: OperationKey {
                request_epoch: submission.request_epoch,
                operation,
                pool_generation: submission.pool_generation,
                map_revision,
            },
            revision: submission.revision,
            bytes: submission.bytes,
        };
        life.acked.clear();
        life.pending = Some(entry);
        if submission.bytes == 0 && planted("r42_zero_delta_skips_ranks") {
            life.commit(entry);
        }
        Ok(Submitted::Pending(entry.evidence()))
    }

    /// Takes one rank's acknowledgement. The last rank commits the operation (R50, R60).
    pub fn ack(&mut self, request: &[u8], ack: &Ack) -> Result<Acked, AckError> {
        let outcome = self.try_ack(request, ack);
        match outcome {
            Ok(Acked::Duplicate) => self.counters.duplicate += 1,
            Ok(Acked::Ignored) => self.counters.ignored += 1,
            Err(_) => self.counters.refused += 1,
            Ok(Acked::Recorded | Acked::Committed(_)) => {}
        }
        outcome
    }

    fn try_ack(&mut self, request: &[u8], ack: &Ack) -> Result<Acked, AckError> {
        let ranks = self.ranks.get();
        if ack.rank.get() >= ranks {
            return Err(AckError::UnknownRank { rank: ack.rank, ranks });
        }
        let Some(known) = self.requests.get_mut(identity(request)) else {
            return Ok(Acked::Ignored);
        };
        let Some(life) = &mut known.life else {
            return Ok(Acked::Ignored);
        };
        if ack.key.request_epoch < life.epoch && !planted("r46_epoch_ignored") {
            return Ok(Acked::Ignored);
        }
        if ack.key.request_epoch > life.epoch {
            return Err(AckError::Future { key: ack.key });
        }
        let operation = ack.key.operation;
        if life.highest_issued().is_none_or(|highest| operation > highest) {
            return Err(AckError::Future { key: ack.key });
        }
        let Some(entry) = life.pending.filter(|entry| entry.key.operation == operation) else {
            // Over, or never issued: repeated or old, and harmless either way.
            let said = (ack.key.pool_generation, ack.key.map_revision, ack.revision);
            let duplicate = life.past(operation).is_some_and(|past| past.committed == Some(said));
            if planted("r46_stale_ack_moves_back") && duplicate {
                (life.map_revision, life.revision) = (ack.key.map_revision, ack.revision);
            }
            return Ok(if duplicate { Acked::Duplicate } else { Acked::Ignored });
        };
        // R45: every part of the key.
        let same = (ack.key, ack.revision) == (entry.key, entry.revision);
        if !same && !planted("r45_knows_operations_by_number") {
            return Err(AckError::Conflict {
                found: ack.key,
                found_revision: ack.revision,
                expected: entry.key,
                expected_revision: entry.revision,
            });
        }
        if !life.acked.insert(ack.rank) {
            return Ok(Acked::Duplicate);
        }
        if life.acked.count() < ranks && !planted("r50_r60_first_rank_commits") {
            return Ok(Acked::Recorded);
        }
        life.commit(entry);
        if life.finishing {
            known.life = None;
        }
        Ok(Acked::Committed(entry.evidence()))
    }

    /// Gives up a pending operation: g and r stay, and its id is used up (R59). `None` if it is not pending in `epoch`.
    pub fn abort(&mut self, request: &[u8], epoch: RequestEpoch, operation: OperationId) -> Option<Operation<Aborted>> {
        let known = self.requests.get_mut(identity(request))?;
        let life = known.life.as_mut().filter(|life| life.epoch == epoch)?;
        let entry = life.pending.take_if(|entry| entry.key.operation == operation)?;
        life.past.push(Past {
            operation,
            committed: None,
        });
        if life.finishing {
            known.life = None;
        }
        Some(entry.evidence())
    }

    /// Ends the life `epoch` of `request`, at once or with its pending operation.
    pub fn finish(&mut self, request: &[u8], epoch: RequestEpoch) -> Finished {
        let Some(known) = self.requests.get_mut(identity(request)) else {
            return Finished::Ignored;
        };
        match &mut known.life {
            Some(life) if life.epoch == epoch => {
                if life.pending.is_some() {
                    life.finishing = true;
                    return Finished::Draining;
                }
            }
            _ => return Finished::Ignored,
        }
        known.life = None;
        Finished::Finished
    }

    /// What is known of `request`; `None` if it is not open.
    pub fn state(&self, request: &[u8]) -> Option<RequestState> {
        let life = self.requests.get(identity(request))?.life.as_ref()?;
        Some(RequestState {
            epoch: life.epoch,
            map_revision: life.map_revision,
            revision: life.revision,
            pending: life.pending.map(|entry| entry.key.operation),
        })
    }

    /// Acknowledgements that changed nothing so far.
    pub fn counters(&self) -> AckCounters {
        self.counters
    }

    fn life(&mut self, request: &[u8]) -> Option<&mut Life> {
        self.requests.get_mut(identity(request))?.life.as_mut()
    }
}

impl Life {
    fn highest_issued(&self) -> Option<OperationId> {
        let last = self.past.last().map(|past| past.operation);
        self.pending.map(|entry| entry.key.operation).max(last)
    }

    fn past(&self, operation: OperationId) -> Option<&Past> {
        let index = self.past.binary_search_by_key(&operation, |past| past.operation).ok()?;
        self.past.get(index)
    }

    /// R47: what a retry of `operation` gets; `None` if it was never accepted.
    fn reuse(&self, operation: OperationId) -> Option<Result<Submitted, SubmitError>> {
        if let Some(entry) = self.pending.filter(|entry| entry.key.operation == operation) {
            if planted("r47_retry_uploads_again") {
                return Some(Ok(Submitted::Pending(entry.evidence())));
            }
            let (map_revision, revision) = (entry.key.map_revision, entry.revision);
            return Some(Ok(Submitted::Reused { map_revision, revision }));
        }
        Some(match self.past(operation)?.committed {
            Some((_, map_revision, revision)) => Ok(Submitted::Reused { map_revision, revision }),
            None => Err(SubmitError::Aborted { operation }),
        })
    }

    fn commit(&mut self, entry: Entry) {
        let key = entry.key;
        self.pending = None;
        self.map_revision = key.map_revision;
        self.revision = entry.revision;
        let committed = Some((key.pool_generation, key.map_revision, entry.revision));
        self.past.push(Past {
            operation: key.operation,
            committed,
        });
    }
}

/// R49: a request is its whole id. (The known fault took what stands before the second hyphen.)
fn identity(request: &[u8]) -> &[u8] {
    if planted("r49_splits_ids") {
        let second = request.iter().enumerate().filter(|(_, byte)| **byte == b'-').nth(1);
        return second.and_then(|(end, _)| request.get(..end)).unwrap_or(request);
    }
    request
}
