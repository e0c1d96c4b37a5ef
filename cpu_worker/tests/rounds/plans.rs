//! What the producer does: it plans, submits, stages and dispatches uploads and retentions, and retries.

use std::collections::BTreeSet;

use kvsluice_cpu_worker::diff_plan::PlanKind;
use kvsluice_cpu_worker::invariants::{RankView, check_restored};
use kvsluice_cpu_worker::ledger::{Operation, Pending, Submission, SubmitError, Submitted};
use kvsluice_cpu_worker::owner::OwnerError;
use kvsluice_cpu_worker::planner::{LayerInput, PlanInput, TableMode};
use kvsluice_cpu_worker::residency::StageError;
use kvsluice_cpu_worker::retain::{RetainInput, RetainKind, RetainLayer, RetainPlan, RetainPlanner};
use kvsluice_cpu_worker::table::LayerTable;
use kvsluice_layout::ids::{
    BlockCount, DecoderLayer, GroupId, LogicalBlock, OperationId, ResidentSlot, SelectionRevision,
};

use crate::world::*;

impl World {
    pub(crate) fn submit(&mut self, index: usize, bytes: u64) -> Outcome<Option<Operation<Pending>>> {
        let request = &self.requests[index];
        let highest = request.operations.keys().next_back().copied();
        let Some(residency) = &request.residency else {
            return Ok(None);
        };
        let submission = Submission {
            request_epoch: request.epoch,
            operation: OperationId(highest.map_or(0, |highest| highest + 1)),
            pool_generation: GENERATION,
            revision: SelectionRevision(residency.revision().get() + 1),
            bytes,
        };
        let busy = request
            .operations
            .values()
            .any(|known| known.state == KnownState::Pending);
        match self.ledger.submit(request.name.as_bytes(), &submission) {
            Ok(Submitted::Pending(operation)) if !busy => {
                self.accepted += 1;
                Ok(Some(operation))
            }
            Err(SubmitError::Finishing) if request.finishing => Ok(None),
            Err(SubmitError::PendingExists { .. }) if busy => Ok(None),
            other => Err(format!("{submission:?} gave {other:?}").into()),
        }
    }

    pub(crate) fn upload(&mut self, index: usize) -> Outcome {
        let Some(residency) = self.requests[index].residency.clone() else {
            return Ok(());
        };
        let lists: Vec<(Vec<LogicalBlock>, Vec<LogicalBlock>)> = LAYERS
            .iter()
            .map(|_| {
                let mut ids: Vec<LogicalBlock> = (0..SEQ_BLOCKS).map(LogicalBlock).collect();
                self.rng.shuffle(&mut ids);
                let tail = ids.split_off(self.rng.usize(0..5));
                (ids, tail)
            })
            .collect();
        let zero = self.rng.u32(0..4) == 0;
        let layers: Vec<LayerInput<'_>> = LAYERS
            .iter()
            .zip(&lists)
            .zip(residency.tables())
            .map(|((&(layer, group, active), (want, tail)), table)| LayerInput {
                layer: DecoderLayer(layer),
                group: GroupId(group),
                active,
                want: if zero { &[] } else { want },
                held: table.logical_by_slot(),
                held_valid: table.valid(),
                tail,
            })
            .collect();
        let table_mode = if self.rng.bool() {
            TableMode::Common
        } else {
            TableMode::PerLayer
        };
        let input = PlanInput {
            seq_blocks: BlockCount(SEQ_BLOCKS),
            table_mode,
            layers: &layers,
        };
        let plan = self.planner.plan(&input)?.clone();
        let bytes = if plan.kind() == PlanKind::Zero { 0 } else { 4096 };
        let Some(operation) = self.submit(index, bytes)? else {
            return Ok(());
        };
        let request = &mut self.requests[index];
        let Some(residency) = &mut request.residency else {
            return Ok(());
        };
        let before = residency.clone();
        match residency.stage_upload(&operation, &plan, &mut self.owners) {
            Ok(()) => {
                request.before = Some(before);
                self.dispatch(index, &operation);
                Ok(())
            }
            Err(StageError::Owner(OwnerError::Exhausted { .. })) => {
                check_restored(&before, residency)?; // refused without effect
                self.dispatch_nothing(index, &operation)
            }
            Err(error) => Err(error.into()),
        }
    }

    pub(crate) fn retain(&mut self, index: usize) -> Outcome {
        let Some(residency) = self.requests[index].residency.clone() else {
            return Ok(());
        };
        let same = self.rng.bool();
        let shared_keep: Vec<u32> = (0..12).filter(|_| self.rng.bool()).collect();
        let keeps: Vec<Vec<ResidentSlot>> = residency
            .tables()
            .iter()
            .map(|table| {
                let wanted = |rng: &mut fastrand::Rng, slot: u32| {
                    if same { shared_keep.contains(&slot) } else { rng.bool() }
                };
                (0..table.valid().get())
                    .filter(|slot| wanted(&mut self.rng, *slot))
                    .map(ResidentSlot)
                    .collect()
            })
            .collect();
        let supports_layer_tables = self.rng.bool();
        let mut plans: Vec<(GroupId, RetainPlan)> = Vec::new();
        for group in [GroupId(0), GroupId(5)] {
            let layers: Vec<RetainLayer<'_>> = LAYERS
                .iter()
                .zip(residency.tables())
                .zip(&keeps)
                .filter(|((_, table), _)| table.group() == group)
                .map(|((&(layer, _, active), table), keep)| RetainLayer {
                    layer: DecoderLayer(layer),
                    active,
                    physical_by_slot: table.physical_by_slot(),
                    valid: table.valid(),
                    keep,
                })
                .collect();
            let input = RetainInput {
                request_epoch: residency.request_epoch(),
                pool_generation: GENERATION,
                expected_request_epoch: residency.request_epoch(),
                expected_pool_generation: GENERATION,
                supports_layer_tables,
                layers: &layers,
                protected: &[],
            };
            plans.push((group, RetainPlanner::new().plan_retain_group(&input)?.clone()));
        }
        let moves = plans
            .iter()
            .any(|(_, plan)| plan.kind() == RetainKind::ExistingByteMovePlan);
        let Some(operation) = self.submit(index, if moves { 4096 } else { 0 })? else {
            return Ok(());
        };
        let request = &mut self.requests[index];
        let Some(residency) = &mut request.residency else {
            return Ok(());
        };
        request.before = Some(residency.clone());
        let plans: Vec<(GroupId, &RetainPlan)> = plans.iter().map(|(group, plan)| (*group, plan)).collect();
        residency.stage_retain(&operation, &plans)?;
        self.dispatch(index, &operation);
        Ok(())
    }

    /// Hands a staged operation to every rank.
    pub(crate) fn dispatch(&mut self, index: usize, operation: &Operation<Pending>) {
        self.serial += 1;
        self.draws += 1;
        self.learn(index, operation, KnownState::Pending);
        let Some(residency) = &self.requests[index].residency else {
            return;
        };
        for rank in 0..self.ranks {
            self.executions.push(Execution {
                request: index,
                rank,
                key: operation.key(),
                view: RankView {
                    map_revision: operation.key().map_revision,
                    revision: operation.revision(),
                    tables: residency
                        .staged_tables()
                        .map(<[LayerTable]>::to_vec)
                        .unwrap_or_default(),
                },
                destinations: residency.destinations().to_vec(),
                serial: self.serial,
            });
        }
    }

    /// An accepted operation that could not be staged is aborted at once.
    pub(crate) fn dispatch_nothing(&mut self, index: usize, operation: &Operation<Pending>) -> Outcome {
        self.draws += 1;
        self.learn(index, operation, KnownState::Aborted);
        let request = &self.requests[index];
        let aborted = self
            .ledger
            .abort(request.name.as_bytes(), request.epoch, operation.key().operation);
        ensure(aborted.is_some(), || {
            "an operation without blocks could not be aborted".to_owned()
        })
    }

    pub(crate) fn learn(&mut self, index: usize, operation: &Operation<Pending>, state: KnownState) {
        let (key, revision) = (operation.key(), operation.revision());
        let known = Known {
            key,
            revision,
            acked: BTreeSet::new(),
            state,
        };
        self.requests[index].operations.insert(key.operation.get(), known);
    }

    /// R47: a retry of any earlier operation stages nothing and draws nothing.
    pub(crate) fn retry(&mut self, index: usize) -> Outcome {
        let request = &self.requests[index];
        let choice = self.rng.usize(0..request.operations.len().max(1));
        let Some(known) = request.operations.values().nth(choice).cloned() else {
            return Ok(());
        };
        if request.residency.is_none() {
            return Ok(());
        }
        let submission = Submission {
            request_epoch: request.epoch,
            operation: known.key.operation,
            pool_generation: GENERATION,
            revision: SelectionRevision(self.rng.u64(0..9)),
            bytes: self.rng.u64(0..2),
        };
        let reused = Submitted::Reused {
            map_revision: known.key.map_revision,
            revision: known.revision,
        };
        let answer = self.ledger.submit(request.name.as_bytes(), &submission);
        let fits = match &answer {
            Ok(answer) => known.state != KnownState::Aborted && *answer == reused,
            Err(SubmitError::Aborted { .. }) => known.state == KnownState::Aborted,
            Err(error) => request.finishing && *error == SubmitError::Finishing,
        };
        ensure(fits, || format!("retry of {known:?} gave {answer:?}"))
    }
}
