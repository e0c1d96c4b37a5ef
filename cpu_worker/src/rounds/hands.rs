//! What the requests work with: the channel, the store, the decision core, and the scratch that they share.

use std::collections::HashMap;
use std::sync::Arc;

use kvsluice_layout::ids::{BlockCount, OperationId, Position, Rank, SelectionRevision, SourceBlock};
use kvsluice_layout::plan::PlanDraft;
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::planted::planted;
use kvsluice_transport::clock::Clock;
use kvsluice_transport::producer::{Producer, PublishError};
use kvsluice_transport::shared::{Shared, SharedMut};

use super::error::RoundsError;
use super::layers::{LayerPlan, most_wanted};
use super::options::WorkloadOptions;
use super::report::Tally;
use super::request::Request;
use super::upload::SourceMap;
use crate::ledger::{Ack, Acked, Committed, Ledger, Operation, Pending, Submission, Submitted};
use crate::owner::Owners;
use crate::planner::Planner;
use crate::retain::RetainPlanner;
use crate::selector::Selector;
use crate::store::HostStore;

/// What a record has no room in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Blocked {
    /// The plan ring, or the reserve.
    Ring,
    /// A device pool.
    Device,
    /// The host pool.
    Host,
    /// The channel: a rank is missing or at another generation.
    Channel,
}

/// The outcome of publishing a record.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Launch {
    /// It is in flight.
    Flying,
    /// It waits for room.
    Blocked(Blocked),
}

/// A record in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    pub(super) request: u64,
    pub(super) published_ns: u64,
    pub(super) is_abort: bool,
}

/// What the requests work with.
pub(super) struct Hands<C, R, P> {
    pub(super) producer: Producer<C, R>,
    pub(super) store: HostStore<C, P>,
    pub(super) map: Arc<GeometryMap>,
    pub(super) options: WorkloadOptions,
    pub(super) layers: Vec<LayerPlan>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) ledger: Ledger,
    pub(super) owners: Owners,
    pub(super) selector: Selector,
    pub(super) scores: Vec<f64>,
    pub(super) planner: Planner,
    pub(super) retain_planners: Vec<RetainPlanner>,
    pub(super) draft: PlanDraft,
    pub(super) sources: SourceMap,
    /// By group: gather frames of the record that is being made, by destination.
    pub(super) gather_frames: Vec<Vec<SourceBlock>>,
    pub(super) flights: HashMap<u64, Flight>,
    pub(super) tally: Tally,
    pub(super) published: bool,
}

impl<C: SharedMut, R: Shared, P: SharedMut> Hands<C, R, P> {
    /// Enqueues the draft for a request, or says what it waits for.
    pub(super) fn publish(&mut self, request: &mut Request) -> Result<Result<Position, Blocked>, RoundsError> {
        let position = match self.producer.enqueue(&self.draft) {
            Ok(position) => position,
            Err(PublishError::Full { .. }) => return Ok(Err(Blocked::Ring)), // X17
            Err(PublishError::RankMissing { .. } | PublishError::ResetNeeded { .. }) => {
                return Ok(Err(Blocked::Channel));
            }
            Err(source) => {
                return Err(RoundsError::Publish {
                    request: request.number,
                    round: request.round,
                    source,
                });
            }
        };
        self.fly(position, request.number, false);
        let rows = self.draft.lease_rows();
        self.tally.plans += 1;
        self.tally.rows += rows.rows.len() as u64;
        self.tally.ids += rows.pairs.len() as u64;
        request.record.costs.metadata_bytes += self.draft.encoded_bytes().unwrap_or(0) as u64;
        Ok(Ok(position))
    }

    pub(super) fn fly(&mut self, position: Position, request: u64, is_abort: bool) {
        let published_ns = self.clock.now_ns();
        self.flights.insert(
            position.get(),
            Flight {
                request,
                published_ns,
                is_abort,
            },
        );
        self.published = true;
    }

    /// Submits the next operation of a request.
    pub(super) fn submit(
        &mut self,
        request: &mut Request,
        bytes: u64,
    ) -> Result<(Submission, Operation<Pending>), RoundsError> {
        // R23, R48: a resumed upload leads where the first attempt did.
        let revision = if planted("r23_r48_each_attempt_is_a_selection") {
            request.issued.1
        } else {
            request.residency.revision()
        };
        let submission = Submission {
            request_epoch: request.residency.request_epoch(),
            operation: OperationId(request.operation.get() + 1),
            pool_generation: request.residency.pool_generation(),
            revision: SelectionRevision(revision.get() + 1),
            bytes,
        };
        match self.ledger.submit(&request.id, &submission)? {
            Submitted::Pending(operation) => {
                request.operation = submission.operation;
                request.issued = request.issued.max((operation.key().map_revision, operation.revision()));
                Ok((submission, operation))
            }
            Submitted::Reused { .. } => Err(RoundsError::OperationReused(submission.operation)),
        }
    }

    /// Gives up an operation whose record was not published: its destinations go back at once.
    pub(super) fn withdraw(&mut self, request: &mut Request, submission: &Submission) -> Result<(), RoundsError> {
        if let Some(aborted) = self
            .ledger
            .abort(&request.id, submission.request_epoch, submission.operation)
        {
            request.residency.abort(&aborted)?.settle(&mut self.owners)?;
        }
        Ok(())
    }

    /// Tells the ledger of every rank's Done; the last one commits (R50, R60).
    pub(super) fn acknowledge(
        &mut self,
        request: &Request,
        operation: &Operation<Pending>,
    ) -> Result<Operation<Committed>, RoundsError> {
        for rank in 0..self.map.geometry().ranks {
            let ack = Ack {
                key: operation.key(),
                revision: operation.revision(),
                rank: Rank(rank),
            };
            if let Acked::Committed(committed) = self.ledger.ack(&request.id, &ack)? {
                return Ok(committed);
            }
        }
        Err(RoundsError::Core(format!(
            "every rank acknowledged {operation:?} and it is not committed"
        )))
    }

    /// True where every group has the blocks that the request will want first.
    pub(super) fn has_room(&self, request: &Request) -> bool {
        self.layers.iter().all(|plan| {
            let wanted = most_wanted(plan.need, plan.block_tokens, request.blocks_max());
            let owner = self.owners.all().get(plan.group.index());
            owner.is_some_and(|owner| owner.free_blocks() >= BlockCount(wanted))
        })
    }
}
