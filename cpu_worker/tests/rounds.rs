//! Random rounds against the real ledger, tables and owners, with the invariants I1–I9 and the exact references checked
//! after every step: uploads, zero deltas, retentions, retries, late, repeated, old and made-up acknowledgements, aborts,
//! finishes and restarts, over 1 to 8 ranks.
//!
//! A failure names its seed; `KVSLUICE_SEED=<seed>` runs that seed alone.

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::num::NonZeroU32;

use kvsluice_cpu_worker::diff_plan::PlanKind;
use kvsluice_cpu_worker::invariants::{
    Broken, RankView, check_in_flight, check_ledger, check_order, check_progress, check_ranks, check_references,
    check_residency, check_restored,
};
use kvsluice_cpu_worker::ledger::{
    Ack, AckError, Acked, Finished, Ledger, Operation, OperationKey, Pending, Submission, SubmitError, Submitted,
};
use kvsluice_cpu_worker::owner::{OwnerError, Owners, Reference};
use kvsluice_cpu_worker::planner::{LayerInput, PlanInput, Planner, TableMode};
use kvsluice_cpu_worker::residency::{Abandoned, Residency, StageError};
use kvsluice_cpu_worker::retain::{RetainInput, RetainKind, RetainLayer, RetainPlan, RetainPlanner};
use kvsluice_cpu_worker::table::LayerTable;
use kvsluice_layout::ids::{
    BlockCount, DecoderLayer, GroupId, LogicalBlock, MapRevision, OperationId, PhysicalBlock, PoolGeneration, Rank,
    RequestEpoch, ResidentSlot, SelectionRevision,
};
use kvsluice_layout::planted::with_planted;

type Outcome<T = ()> = Result<T, Box<dyn Error>>;

const GENERATION: PoolGeneration = PoolGeneration(6);
const SEQ_BLOCKS: u32 = 10;
const POOL_BLOCKS: u32 = 24;
/// (layer, group, active): two full-attention groups and a sliding-window layer.
const LAYERS: [(u32, u32, bool); 4] = [(0, 0, true), (1, 0, true), (2, 5, false), (3, 5, true)];
/// F1 of ids: equal beginnings, many hyphens, none at all (R49).
const NAMES: [&str; 3] = ["run-7-a", "run-7-b", "solo"];

fn ensure(holds: bool, what: impl FnOnce() -> String) -> Outcome {
    if holds { Ok(()) } else { Err(what().into()) }
}

/// What the driver knows of one operation, apart from the ledger.
#[derive(Clone, Debug)]
struct Known {
    key: OperationKey,
    revision: SelectionRevision,
    acked: BTreeSet<u32>,
    state: KnownState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KnownState {
    Pending,
    Committed,
    Aborted,
}

struct Request {
    name: &'static str,
    epoch: RequestEpoch,
    /// `None` once finished.
    residency: Option<Residency>,
    finishing: bool,
    operations: BTreeMap<u64, Known>,
    /// The residency before the pending operation was staged.
    before: Option<Residency>,
    ranks: Vec<RankView>,
}

/// An operation that a rank has received and not carried out.
struct Execution {
    request: usize,
    rank: u32,
    key: OperationKey,
    view: RankView,
    destinations: Vec<(GroupId, PhysicalBlock)>,
    serial: u64,
}

struct World {
    rng: fastrand::Rng,
    ranks: u32,
    ledger: Ledger,
    owners: Owners,
    planner: Planner,
    requests: Vec<Request>,
    executions: Vec<Execution>,
    messages: Vec<(usize, Ack)>,
    abandoned: Vec<(u64, Abandoned)>,
    sharers: Vec<(GroupId, PhysicalBlock, Reference)>,
    serial: u64,
    /// R47: random draws made for staged operations.
    draws: u64,
    accepted: u64,
    commits: u64,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut rng = fastrand::Rng::with_seed(seed);
        let ranks = rng.u32(1..=8);
        let request = |name| Request {
            name,
            epoch: RequestEpoch(0),
            residency: None,
            finishing: false,
            operations: BTreeMap::new(),
            before: None,
            ranks: Vec::new(),
        };
        Self {
            rng,
            ranks,
            ledger: Ledger::new(NonZeroU32::new(ranks).unwrap_or(NonZeroU32::MIN)),
            owners: Owners::new([
                (GroupId(0), BlockCount(POOL_BLOCKS)),
                (GroupId(5), BlockCount(POOL_BLOCKS)),
            ]),
            planner: Planner::new(),
            requests: NAMES.map(request).into(),
            executions: Vec::new(),
            messages: Vec::new(),
            abandoned: Vec::new(),
            sharers: Vec::new(),
            serial: 0,
            draws: 0,
            accepted: 0,
            commits: 0,
        }
    }

    fn step(&mut self) -> Outcome {
        let request = self.rng.usize(0..NAMES.len());
        match self.rng.u32(0..100) {
            0 => self.open(request),
            1..=16 => self.upload(request),
            17..=26 => self.retain(request),
            27..=29 => self.retry(request),
            30..=57 => self.execute(),
            58..=87 => self.deliver(),
            88..=91 => self.made_up_ack(request),
            92..=93 => self.abort(request),
            94 => self.finish(request),
            _ => self.share(),
        }?;
        self.check()
    }

    fn open(&mut self, index: usize) -> Outcome {
        let request = &mut self.requests[index];
        let stale = self.ledger.open(request.name.as_bytes(), request.epoch);
        ensure(request.epoch.get() == 0 || stale.is_err(), || {
            format!("{} was opened twice", request.name)
        })?;
        request.epoch = RequestEpoch(request.epoch.get() + self.rng.u64(1..3));
        self.ledger.open(request.name.as_bytes(), request.epoch)?;
        let layers = LAYERS.map(|(layer, group, _)| (DecoderLayer(layer), GroupId(group)));
        let fresh = Residency::new(request.epoch, GENERATION, layers);
        let view = RankView {
            map_revision: fresh.map_revision(),
            revision: fresh.revision(),
            tables: fresh.tables().to_vec(),
        };
        request.ranks = vec![view; self.ranks as usize];
        request.operations.clear();
        request.finishing = false;
        request.before = None;
        let old = request.residency.replace(fresh);
        self.close(index, old)
    }

    /// Gives up a life's blocks; what it had staged waits for the ranks (I6).
    fn close(&mut self, index: usize, residency: Option<Residency>) -> Outcome {
        let Some(residency) = residency else { return Ok(()) };
        let key = residency.pending_upload().or(residency.pending_retain());
        let abandoned = residency.close(&mut self.owners, &mut Vec::new())?;
        self.abandon(index, key, abandoned)
    }

    fn abandon(&mut self, index: usize, key: Option<OperationKey>, abandoned: Abandoned) -> Outcome {
        let of_operation = |execution: &&Execution| execution.request == index && Some(execution.key) == key;
        let serial = self.executions.iter().find(of_operation).map(|found| found.serial);
        self.abandoned.push((serial.unwrap_or(0), abandoned));
        self.settle()
    }

    /// Gives abandoned destinations back once no rank has the operation before it any more.
    fn settle(&mut self) -> Outcome {
        let running: BTreeSet<u64> = self.executions.iter().map(|execution| execution.serial).collect();
        let early = with_early_settle();
        for (serial, abandoned) in std::mem::take(&mut self.abandoned) {
            if running.contains(&serial) && !early {
                self.abandoned.push((serial, abandoned));
            } else {
                abandoned.settle(&mut self.owners)?;
            }
        }
        Ok(())
    }

    fn submit(&mut self, index: usize, bytes: u64) -> Outcome<Option<Operation<Pending>>> {
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

    fn upload(&mut self, index: usize) -> Outcome {
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

    fn retain(&mut self, index: usize) -> Outcome {
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
    fn dispatch(&mut self, index: usize, operation: &Operation<Pending>) {
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
    fn dispatch_nothing(&mut self, index: usize, operation: &Operation<Pending>) -> Outcome {
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

    fn learn(&mut self, index: usize, operation: &Operation<Pending>, state: KnownState) {
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
    fn retry(&mut self, index: usize) -> Outcome {
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

    /// One rank carries out one operation: its transfers end, its tables are applied, it acknowledges.
    fn execute(&mut self) -> Outcome {
        if self.executions.is_empty() {
            return Ok(());
        }
        let choice = self.rng.usize(0..self.executions.len());
        let Execution {
            request,
            rank,
            key,
            view,
            ..
        } = self.executions.swap_remove(choice);
        let ack = Ack {
            key,
            revision: view.revision,
            rank: Rank(rank),
        };
        let current = &mut self.requests[request];
        let pending = current.epoch == key.request_epoch
            && current
                .operations
                .get(&key.operation.get())
                .is_some_and(|known| known.state == KnownState::Pending);
        if pending {
            current.ranks[rank as usize] = view;
        }
        self.messages.push((request, ack)); // a superseded operation is acknowledged too, too late
        self.settle()
    }

    /// The network delivers one acknowledgement, any one, and may deliver it again.
    fn deliver(&mut self) -> Outcome {
        if self.messages.is_empty() {
            return Ok(());
        }
        let choice = self.rng.usize(0..self.messages.len());
        let again = self.messages.len() < 40 && self.rng.u32(0..4) == 0;
        let (index, ack) = if again {
            self.messages[choice]
        } else {
            self.messages.swap_remove(choice)
        };
        let request = &mut self.requests[index];
        let live = request.residency.is_some() && request.epoch == ack.key.request_epoch;
        let known = request
            .operations
            .get_mut(&ack.key.operation.get())
            .filter(|known| live && known.key == ack.key);
        let before = self.ledger.state(request.name.as_bytes());
        let answer = self.ledger.ack(request.name.as_bytes(), &ack)?;
        let Some(known) = known else {
            return ensure(answer == Acked::Ignored, || {
                format!("{ack:?} of another life gave {answer:?}")
            });
        };
        match (known.state, &answer) {
            (KnownState::Aborted, Acked::Ignored) | (KnownState::Committed, Acked::Duplicate) => Ok(()),
            (KnownState::Pending, Acked::Duplicate) if known.acked.contains(&ack.rank.get()) => Ok(()),
            (KnownState::Pending, Acked::Recorded) if known.acked.insert(ack.rank.get()) => {
                ensure(known.acked.len() < self.ranks as usize, || {
                    format!("all ranks, and {answer:?}")
                })
            }
            (KnownState::Pending, Acked::Committed(operation)) if known.acked.insert(ack.rank.get()) => {
                // R50, R60: every rank, by number.
                ensure(known.acked.len() == self.ranks as usize, || {
                    format!("{:?} of {}", known.acked, self.ranks)
                })?;
                known.state = KnownState::Committed;
                self.commits += 1;
                let Some(residency) = &mut request.residency else {
                    return Ok(());
                };
                residency.commit(operation, &mut self.owners, &mut Vec::new())?;
                request.before = None;
                let after = (residency.map_revision(), residency.revision());
                check_ranks(&request.ranks)?;
                if let Some(before) = before {
                    check_progress((before.map_revision, before.revision), after, true)?;
                }
                let busy = self
                    .executions
                    .iter()
                    .any(|execution| execution.key == ack.key && execution.request == index);
                ensure(!busy, || {
                    format!("{:?} committed while a rank has still to carry it out", ack.key)
                })?;
                self.finished(index)
            }
            _ => Err(format!("{ack:?} of {known:?} gave {answer:?}").into()),
        }
    }

    /// R46: what no rank can have sent, or a broken one did, changes nothing.
    fn made_up_ack(&mut self, index: usize) -> Outcome {
        let request = &self.requests[index];
        let Some(residency) = &request.residency else {
            return Ok(());
        };
        let pending = request
            .operations
            .values()
            .find(|known| known.state == KnownState::Pending);
        let highest = request.operations.keys().next_back().copied();
        let key = OperationKey {
            request_epoch: request.epoch,
            operation: OperationId(highest.map_or(0, |highest| highest + 1)),
            pool_generation: GENERATION,
            map_revision: residency.map_revision(),
        };
        let ack = Ack {
            key,
            revision: residency.revision(),
            rank: Rank(0),
        };
        let before = self.ledger.state(request.name.as_bytes());
        let name = request.name.as_bytes();
        let answer = match (self.rng.u32(0..5), pending) {
            (0, _) => self.ledger.ack(
                name,
                &Ack {
                    rank: Rank(self.ranks),
                    ..ack
                },
            ),
            (1, _) => self.ledger.ack(name, &ack),
            (2, _) => {
                let request_epoch = RequestEpoch(key.request_epoch.get() + 1);
                self.ledger.ack(
                    name,
                    &Ack {
                        key: OperationKey { request_epoch, ..key },
                        ..ack
                    },
                )
            }
            (3, Some(known)) => {
                let revision = SelectionRevision(known.revision.get() + 1);
                self.ledger.ack(
                    name,
                    &Ack {
                        key: known.key,
                        revision,
                        ..ack
                    },
                )
            }
            (_, Some(known)) => {
                let map_revision = MapRevision(known.key.map_revision.get() + 1);
                self.ledger.ack(
                    name,
                    &Ack {
                        key: OperationKey {
                            map_revision,
                            ..known.key
                        },
                        ..ack
                    },
                )
            }
            _ => return Ok(()),
        };
        let refused = matches!(
            answer,
            Err(AckError::UnknownRank { .. } | AckError::Future { .. } | AckError::Conflict { .. })
        );
        ensure(refused, || format!("a made-up acknowledgement gave {answer:?}"))?;
        ensure(before == self.ledger.state(name), || {
            "a refused acknowledgement changed something".to_owned()
        })
    }

    fn abort(&mut self, index: usize) -> Outcome {
        let request = &mut self.requests[index];
        let Some(known) = request
            .operations
            .values_mut()
            .find(|known| known.state == KnownState::Pending)
        else {
            return Ok(());
        };
        let aborted = self
            .ledger
            .abort(request.name.as_bytes(), request.epoch, known.key.operation);
        let (Some(aborted), Some(residency)) = (aborted, &mut request.residency) else {
            return Err(format!("{known:?} could not be aborted").into());
        };
        known.state = KnownState::Aborted;
        let key = known.key;
        let abandoned = residency.abort(&aborted)?;
        if let Some(before) = request.before.take() {
            check_restored(&before, residency)?; // I7
        }
        let view = RankView {
            map_revision: residency.map_revision(),
            revision: residency.revision(),
            tables: residency.tables().to_vec(),
        };
        request.ranks.fill(view); // ranks that had applied it go back
        self.abandon(index, Some(key), abandoned)?;
        self.finished(index)
    }

    fn finish(&mut self, index: usize) -> Outcome {
        let request = &mut self.requests[index];
        let pending = request
            .operations
            .values()
            .any(|known| known.state == KnownState::Pending);
        let expected = match (request.residency.is_some(), pending) {
            (false, _) => Finished::Ignored,
            (true, true) => Finished::Draining,
            (true, false) => Finished::Finished,
        };
        let answer = self.ledger.finish(request.name.as_bytes(), request.epoch);
        ensure(answer == expected, || {
            format!("finish gave {answer:?}, not {expected:?}")
        })?;
        request.finishing |= answer == Finished::Draining;
        self.finished(index)
    }

    /// F11: a request that is unknown to the ledger has no tables.
    fn finished(&mut self, index: usize) -> Outcome {
        let request = &mut self.requests[index];
        if self.ledger.state(request.name.as_bytes()).is_some() {
            return Ok(());
        }
        request.operations.clear();
        request.finishing = false;
        let residency = request.residency.take();
        self.close(index, residency)
    }

    /// Another request, the prefix cache or a replayed graph takes or drops a reference.
    fn share(&mut self) -> Outcome {
        if self.sharers.len() > 6 || (self.rng.bool() && !self.sharers.is_empty()) {
            let choice = self.rng.usize(0..self.sharers.len());
            let (group, block, kind) = self.sharers.swap_remove(choice);
            self.owners.of(group)?.release(block, kind)?;
            return Ok(());
        }
        let group = if self.rng.bool() { GroupId(0) } else { GroupId(5) };
        let block = PhysicalBlock(self.rng.u32(0..POOL_BLOCKS));
        let kind = [Reference::Regular, Reference::Prefix, Reference::Transfer][self.rng.usize(0..3)];
        let owner = self.owners.of(group)?;
        let owned = owner.references(block).total() > 0;
        ensure(owner.acquire(block, kind).is_ok() == owned, || {
            format!("{block:?} is owned: {owned}")
        })?;
        if owned {
            self.sharers.push((group, block, kind));
        }
        Ok(())
    }

    fn check(&self) -> Result<(), Box<dyn Error>> {
        ensure(self.draws == self.accepted, || {
            format!("{} draws for {}", self.draws, self.accepted)
        })?; // R47
        let live = || {
            self.requests
                .iter()
                .filter_map(|request| Some((request, request.residency.as_ref()?)))
        };
        for (request, residency) in live() {
            check_residency(residency, &self.owners)?;
            let state = self.ledger.state(request.name.as_bytes());
            let state = state.ok_or_else(|| format!("{} has tables and is unknown", request.name))?;
            check_ledger(&state, residency)?;
            for rank in &request.ranks {
                check_order(&state, rank, state.pending.is_none())?;
            }
        }
        let named = live().flat_map(|(_, residency)| residency.tables()).flat_map(|table| {
            table
                .named()
                .iter()
                .map(|block| (table.group(), *block, Reference::Layer))
        });
        let staged = live().flat_map(|(_, residency)| residency.destinations());
        let waiting = self.abandoned.iter().flat_map(|(_, abandoned)| abandoned.blocks());
        let transfers = staged
            .chain(waiting)
            .map(|&(group, block)| (group, block, Reference::Transfer));
        check_references(&self.owners, named.chain(transfers).chain(self.sharers.iter().copied()))?;
        let in_flight = self.executions.iter().flat_map(|execution| {
            execution
                .destinations
                .iter()
                .map(|&(group, block)| (execution.serial, group, block))
        });
        check_in_flight(&self.owners, in_flight)?;
        Ok(())
    }

    /// F12: when every request has finished and every transfer ended, the whole pool is free.
    fn wind_down(&mut self) -> Outcome {
        for index in 0..NAMES.len() {
            self.finish(index)?;
        }
        while !self.executions.is_empty() {
            self.execute()?;
            self.check()?;
        }
        while !self.messages.is_empty() {
            self.deliver()?;
            self.check()?;
        }
        for (group, block, kind) in std::mem::take(&mut self.sharers) {
            self.owners.of(group)?.release(block, kind)?;
        }
        self.check()?;
        let free = self
            .owners
            .all()
            .iter()
            .all(|owner| owner.free_blocks() == BlockCount(POOL_BLOCKS));
        ensure(
            free && self.requests.iter().all(|request| request.residency.is_none()),
            || "F12: not free".to_owned(),
        )
    }
}

/// A fault of the driver itself: destinations of an aborted operation go back while ranks still write them.
fn with_early_settle() -> bool {
    kvsluice_layout::planted::planted("driver_settles_early")
}

fn run(seed: u64, steps: u64) -> Outcome<u64> {
    let mut world = World::new(seed);
    for step in 0..steps {
        world
            .step()
            .map_err(|error| format!("seed {seed} step {step}: {error}"))?;
    }
    world
        .wind_down()
        .map_err(|error| format!("seed {seed}, winding down: {error}"))?;
    Ok(world.commits)
}

#[test]
fn f10_f11_f12_f13_f14_random_rounds_keep_every_invariant() {
    const STEPS: u64 = 1_000_000;
    let seeds: Vec<u64> = match std::env::var("KVSLUICE_SEED").map(|seed| seed.parse()) {
        Ok(Ok(seed)) => vec![seed],
        _ => (0..20).collect(),
    };
    let mut commits = 0;
    for seed in &seeds {
        commits += run(*seed, STEPS / seeds.len() as u64).unwrap();
    }
    println!("{commits} commits in {STEPS} steps");
    assert!(
        commits > STEPS / 200,
        "only {commits} commits: the rounds do not get anywhere"
    );
}

#[test]
fn each_planted_fault_breaks_an_invariant() {
    let faults = [
        ("driver_settles_early", "I"),
        ("ledger_counts_acks", ""),
        ("ledger_epoch_ignored", ""),
        ("ledger_first_rank_commits", ""),
        ("ledger_retry_uploads_again", "retry"),
        ("ledger_splits_ids", ""),
        ("ledger_stale_ack_moves_back", "I4"),
        ("ledger_zero_delta_moves_g", ""),
        ("ledger_zero_delta_not_finalised", ""),
        ("ledger_zero_delta_skips_ranks", ""),
        ("owner_frees_shared", ""),
        ("owner_ignores_prefix", ""),
        ("owner_ignores_transfers", ""),
        ("residency_abort_keeps_tables", "I7"),
    ];
    for (fault, expected) in faults {
        let outcome = with_planted(fault, || (0..4).try_for_each(|seed| run(seed, 4_000).map(|_| ())));
        let error = outcome.expect_err(fault).to_string();
        assert!(error.contains(expected), "{fault} was seen as: {error}");
        println!("{fault}: {}", error.chars().take(160).collect::<String>());
    }
}

#[test]
fn a_broken_invariant_says_what_it_found() {
    let broken = Broken {
        invariant: "I5",
        detail: "physical block 3".to_owned(),
    };
    assert_eq!(broken.to_string(), "I5 is broken: physical block 3");
}
