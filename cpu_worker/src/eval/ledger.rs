//! `kvsluice eval ledger`: lines are operations on one ledger.

use core::num::NonZeroU32;
use std::collections::HashMap;

use kvsluice_layout::ids::{MapRevision, OperationId, PoolGeneration, Rank, RequestEpoch, SelectionRevision};
use kvsluice_layout::planted::planted;
use serde_json::{Value, json};

use super::fields::{BadInput, Fields};
use super::refusal;
use crate::ledger::{
    Ack, AckError, Acked, Finished, Ledger, OpenError, OperationKey, Submission, SubmitError, Submitted,
};

/// The vectors know one generation of the pools.
const POOL_GENERATION: PoolGeneration = PoolGeneration(0);

/// A sequence of operations: nothing before its first `new`.
#[derive(Debug, Default)]
pub(super) struct Sequence(Option<State>);

#[derive(Debug)]
struct State {
    ledger: Ledger,
    ranks: u64,
    /// Ranks in the order in which they were first heard of. The core's rank numbers have 32 bits; which rank is which
    /// does not matter to it.
    rank_names: HashMap<u64, Rank>,
}

impl Sequence {
    pub(super) fn answer(&mut self, fields: &Fields<'_>) -> Result<Value, BadInput> {
        let op = fields.text("op")?;
        if op == "new" {
            let ranks = fields.count("ranks")?;
            // More ranks than the core can count never all acknowledge, and neither do as many as it can.
            let counted = NonZeroU32::new(super::names::saturated(ranks));
            let counted = counted.ok_or_else(|| BadInput("`ranks`: there is at least one rank".to_owned()))?;
            self.0 = Some(State {
                ledger: Ledger::new(counted),
                ranks,
                rank_names: HashMap::new(),
            });
            return Ok(json!({ "ok": true }));
        }
        let state = self
            .0
            .as_mut()
            .ok_or_else(|| BadInput(format!("{op:?} before the first \"new\"")))?;
        match op.as_str() {
            "open" => state.open(fields),
            "submit" => state.submit(fields),
            "ack" => state.ack(fields),
            "abort" => state.abort(fields),
            "finish" => state.finish(fields),
            "state" => state.state(fields),
            _ => {
                if planted("x33_bad_line_counts") {
                    state.ledger = Ledger::new(NonZeroU32::MIN);
                }
                Err(BadInput(format!("`op`: {op:?} is no operation of a ledger")))
            }
        }
    }
}

fn request(fields: &Fields<'_>) -> Result<String, BadInput> {
    fields.text("req")
}

fn epoch(fields: &Fields<'_>) -> Result<RequestEpoch, BadInput> {
    fields.count("epoch").map(RequestEpoch)
}

fn operation(fields: &Fields<'_>) -> Result<OperationId, BadInput> {
    fields.count("operation_id").map(OperationId)
}

impl State {
    fn open(&mut self, fields: &Fields<'_>) -> Result<Value, BadInput> {
        Ok(match self.ledger.open(request(fields)?.as_bytes(), epoch(fields)?) {
            Ok(_) => json!({ "ok": true, "g": 0, "r": 0 }),
            Err(error @ OpenError::StaleEpoch { .. }) => refusal("stale_epoch", &error),
        })
    }

    fn submit(&mut self, fields: &Fields<'_>) -> Result<Value, BadInput> {
        let submission = Submission {
            request_epoch: epoch(fields)?,
            operation: operation(fields)?,
            pool_generation: POOL_GENERATION,
            revision: SelectionRevision(fields.count("revision")?),
            bytes: fields.count("bytes")?,
        };
        let (state, g, r) = match self.ledger.submit(request(fields)?.as_bytes(), &submission) {
            Ok(Submitted::Pending(operation)) => ("pending", operation.key().map_revision, operation.revision()),
            Ok(Submitted::Reused { map_revision, revision }) => ("reused", map_revision, revision),
            Err(error) => return Ok(refusal(submit_word(&error), &error)),
        };
        Ok(json!({ "ok": true, "state": state, "g": g, "r": r }))
    }

    fn ack(&mut self, fields: &Fields<'_>) -> Result<Value, BadInput> {
        let request = request(fields)?;
        let key = OperationKey {
            request_epoch: epoch(fields)?,
            operation: operation(fields)?,
            pool_generation: POOL_GENERATION,
            map_revision: MapRevision(fields.count("g")?),
        };
        let revision = SelectionRevision(fields.count("r")?);
        let rank = self.rank(fields.count("rank")?);
        Ok(
            match self.ledger.ack(request.as_bytes(), &Ack { key, revision, rank }) {
                Ok(acked) => json!({ "ok": true, "result": match acked {
                Acked::Recorded => "recorded",
                Acked::Committed(_) => "committed",
                Acked::Duplicate => "duplicate",
                Acked::Ignored => "ignored",
            } }),
                Err(error) => {
                    let word = match error {
                        AckError::UnknownRank { .. } => "unknown_rank",
                        AckError::Future { .. } => "future",
                        AckError::Conflict { .. } => "conflict",
                    };
                    refusal(word, &error)
                }
            },
        )
    }

    fn abort(&mut self, fields: &Fields<'_>) -> Result<Value, BadInput> {
        let aborted = self
            .ledger
            .abort(request(fields)?.as_bytes(), epoch(fields)?, operation(fields)?);
        Ok(json!({ "ok": true, "result": if aborted.is_some() { "aborted" } else { "ignored" } }))
    }

    fn finish(&mut self, fields: &Fields<'_>) -> Result<Value, BadInput> {
        Ok(
            json!({ "ok": true, "result": match self.ledger.finish(request(fields)?.as_bytes(), epoch(fields)?) {
            Finished::Finished => "finished",
            Finished::Draining => "draining",
            Finished::Ignored => "ignored",
        } }),
        )
    }

    fn state(&self, fields: &Fields<'_>) -> Result<Value, BadInput> {
        Ok(match self.ledger.state(request(fields)?.as_bytes()) {
            Some(state) => json!({
                "ok": true,
                "known": true,
                "epoch": state.epoch,
                "g": state.map_revision,
                "r": state.revision,
                "pending": state.pending,
            }),
            None => json!({ "ok": true, "known": false }),
        })
    }

    fn rank(&mut self, rank: u64) -> Rank {
        if rank >= self.ranks {
            return Rank(u32::MAX);
        }
        let next = Rank(u32::try_from(self.rank_names.len()).unwrap_or(u32::MAX));
        *self.rank_names.entry(rank).or_insert(next)
    }
}

fn submit_word(error: &SubmitError) -> &'static str {
    match error {
        SubmitError::UnknownRequest => "unknown_request",
        SubmitError::StaleEpoch { .. } => "stale_epoch",
        SubmitError::FutureEpoch { .. } => "future_epoch",
        SubmitError::Finishing => "finishing",
        SubmitError::Aborted { .. } => "aborted",
        SubmitError::OperationOrder { .. } => "operation_order",
        SubmitError::PendingExists { .. } => "pending_exists",
        SubmitError::StaleRevision { .. } => "stale_revision",
    }
}
