//! The first half of a round: selection → plan → staged destinations and leased sources → an Upload or Keep record.

use kvsluice_layout::ids::{BlockCount, GroupId, LogicalBlock, Position, SourceBlock};
use kvsluice_layout::plan;
use kvsluice_layout::record::SourceKind;
use kvsluice_transport::shared::{Shared, SharedMut};

use super::error::RoundsError;
use super::hands::{Blocked, Hands, Launch};
use super::layers::LayerPlan;
use super::options::{Sources, Tables, WorkloadOptions};
use super::report::UploadKind;
use super::request::{Request, Step, Transfer};
use super::scores::{Purpose, draw};
use crate::diff_plan::{BlockDiffPlan, PlanKind};
use crate::ledger::{Finished, Submission, Submitted};
use crate::owner::Owner;
use crate::planner::{LayerInput, PlanError, PlanInput, Planner, TableMode};
use crate::store::StoreError;

/// Where the blocks of one record lie in the pool, by group and logical block: each is looked for once.
#[derive(Debug, Default)]
pub(super) struct SourceMap {
    frames: Vec<Option<SourceBlock>>,
    blocks: usize,
}

impl SourceMap {
    fn reset(&mut self, groups: usize, blocks: BlockCount) {
        self.blocks = blocks.index();
        self.frames.clear();
        self.frames.resize(groups * self.blocks, None);
    }

    fn at(&mut self, group: GroupId, block: LogicalBlock) -> Option<&mut Option<SourceBlock>> {
        self.frames.get_mut(group.index() * self.blocks + block.index())
    }
}

impl<C: SharedMut, R: Shared, P: SharedMut> Hands<C, R, P> {
    /// Plans the round of a request and publishes its upload, or its Keep where nothing is missing (R42).
    ///
    /// # Errors
    /// [`RoundsError`]; where there is only no room, the request is as it was.
    pub(super) fn launch_upload(&mut self, request: &mut Request) -> Result<Launch, RoundsError> {
        request.select(&self.layers, &self.options, &mut self.selector, &mut self.scores)?;
        let mut planner = std::mem::take(&mut self.planner);
        let launch = plan_round(&mut planner, &self.layers, request, self.options.tables)
            .map_err(RoundsError::from)
            .and_then(|plan| self.launch_planned(request, plan));
        self.planner = planner;
        launch
    }

    fn launch_planned(&mut self, request: &mut Request, plan: &BlockDiffPlan) -> Result<Launch, RoundsError> {
        // Everything that may run short is looked at before anything is taken.
        let short = |owner: &Owner| new_blocks(plan, owner.group()) > owner.free_blocks();
        if self.owners.all().iter().any(short) {
            return Ok(Launch::Blocked(Blocked::Device));
        }
        match self.fill_sources(request, plan) {
            Ok(()) => {}
            Err(StoreError::NoFrame { .. } | StoreError::NoGather { .. }) => return Ok(Launch::Blocked(Blocked::Host)),
            Err(error) => return Err(error.into()),
        }
        let rows = self.layers.iter().zip(plan.layers());
        let bytes = rows.map(|(layer, row)| layer.bytes * row.upload.len() as u64).sum();
        note_plan(plan, request);
        let (submission, operation) = self.submit(request, bytes)?;
        request.residency.stage_upload(&operation, plan, &mut self.owners)?;
        self.encode_upload(request, header_of(&operation));
        request.record.attempts += 1;
        let position = match self.publish(request)? {
            Ok(position) => position,
            Err(blocked) => {
                self.withdraw(request, &submission)?;
                return Ok(Launch::Blocked(blocked));
            }
        };
        let replaces = plan.kind() == PlanKind::Full;
        let mut transfer = Transfer {
            operation,
            terminal: None,
            aborting: false,
            replaces,
        };
        if bytes > 0 {
            self.disturb(request, &mut transfer, &submission, position)?;
        }
        request.step = Step::Uploading(Box::new(transfer));
        Ok(Launch::Flying)
    }

    /// Brings every block of a plan into the pool, and takes the gather frames where sources are copied.
    fn fill_sources(&mut self, request: &Request, plan: &BlockDiffPlan) -> Result<(), StoreError> {
        let Self {
            store,
            producer,
            sources,
            gather_frames,
            owners,
            options,
            ..
        } = self;
        let leases = producer.leases();
        store.begin_record();
        sources.reset(owners.all().len(), request.blocks);
        for layer in plan.layers() {
            for &block in layer.upload {
                let (Some(source), Some(tag)) = (sources.at(layer.group, block), request.tag(block)) else {
                    continue;
                };
                if source.is_none() {
                    *source = Some(store.ensure(layer.group, tag, leases)?);
                }
            }
        }
        gather_frames.resize_with(owners.all().len(), Vec::new);
        for (owner, frames) in owners.all().iter().zip(gather_frames) {
            frames.clear();
            if options.sources == Sources::Copy {
                store.take_gather(owner.group(), new_blocks(plan, owner.group()).get(), leases, frames)?;
            }
        }
        Ok(())
    }

    /// Writes the rows of the staged upload into the draft: one per layer that needs blocks, ragged (R4, R24, R25).
    fn encode_upload(&mut self, request: &mut Request, header: plan::Operation) {
        let Self {
            draft,
            store,
            layers,
            sources,
            gather_frames,
            options,
            map,
            ..
        } = self;
        if request.residency.destinations().is_empty() {
            draft.keep(&request.id, header); // R42
            return;
        }
        draft.upload(&request.id, header);
        let before = store.counts();
        for (plan, (layer, pairs)) in layers.iter().zip(request.residency.uploads()) {
            let mut pairs = pairs.peekable();
            if pairs.peek().is_none() {
                continue;
            }
            let source_kind = match options.sources {
                Sources::SourceOnly => SourceKind::SourceOnly,
                Sources::Copy => SourceKind::Copy,
            };
            let gathered = gather_frames.get(plan.group.index()).map_or(&[][..], Vec::as_slice);
            let mut tags = Vec::new();
            let mut rows = Vec::new();
            for (index, (block, destination)) in pairs.enumerate() {
                let Some(source) = sources.at(plan.group, block).and_then(|source| *source) else {
                    continue;
                };
                let source = match (source_kind, gathered.get(index)) {
                    // A gather frame stands for a destination: each layer's bytes of it are those of its own block.
                    (SourceKind::Copy, Some(&frame)) => {
                        store.gather(layer, source, frame);
                        frame
                    }
                    _ => source,
                };
                rows.push((source, destination));
                tags.extend(request.tag(block).map(|tag| tag.0));
            }
            draft.row(layer, plan.group, source_kind, rows);
            if options.tags {
                draft.tags(tags);
            }
        }
        let after = store.counts();
        let costs = &mut request.record.costs;
        costs.cpu_gather_bytes += after.gather_bytes - before.gather_bytes;
        costs.cpu_destination_bytes += (0..)
            .zip(gather_frames)
            .map(|(group, frames)| frames.len() as u64 * map.block_bytes(GroupId(group)))
            .sum::<u64>();
    }

    /// What happens to uploads at a rate: retries, aborts, and requests that finish meanwhile.
    fn disturb(
        &mut self,
        request: &mut Request,
        transfer: &mut Transfer,
        submission: &Submission,
        position: Position,
    ) -> Result<(), RoundsError> {
        let WorkloadOptions {
            seed,
            abort_rate,
            finish_rate,
            retry_rate,
            ..
        } = self.options;
        let keys = [
            request.number,
            submission.request_epoch.get(),
            submission.operation.get(),
        ];
        if draw(seed, Purpose::Retry, &keys) < retry_rate {
            // R47: a retry finds its operation, and nothing is done again.
            if let Submitted::Reused { .. } = self.ledger.submit(&request.id, submission)? {
                self.tally.retries_reused += 1;
            }
        }
        if draw(seed, Purpose::Abort, &keys) < abort_rate {
            self.draft.abort(&request.id, header_of(&transfer.operation), position);
            // Where it does not pass (the reserve is used up too), the upload simply ends by itself.
            if let Ok(abort) = self.producer.enqueue(&self.draft) {
                self.fly(abort, request.number, true);
                transfer.aborting = true;
            }
        }
        if draw(seed, Purpose::Finish, &keys) < finish_rate {
            // F11: the outcome of the transfer still counts; then the request is over.
            let finished = self.ledger.finish(&request.id, submission.request_epoch);
            request.finished = finished == Finished::Draining;
        }
        Ok(())
    }
}

/// What a ledger operation is called on the wire.
pub(super) fn header_of<State>(operation: &crate::ledger::Operation<State>) -> plan::Operation {
    let key = operation.key();
    plan::Operation {
        request_epoch: key.request_epoch,
        operation_id: key.operation,
        pool_generation: key.pool_generation,
        map_revision: key.map_revision,
        selection_revision: operation.revision(),
    }
}

fn note_plan(plan: &BlockDiffPlan, request: &mut Request) {
    let record = &mut request.record;
    record.upload = match plan.kind() {
        PlanKind::Zero => UploadKind::Zero,
        PlanKind::Delta => UploadKind::Delta,
        PlanKind::Full => UploadKind::Full,
    };
    record.uploaded = plan.layers().map(|layer| layer.upload.len() as u64).sum();
    record.pads = plan.layers().map(|layer| layer.pad.len() as u64).sum();
    record.truncated = plan.layers().map(|layer| u64::from(layer.truncated.get())).sum();
}

/// The plan of a round: what the selection wants and the tables have not.
fn plan_round<'a>(
    planner: &'a mut Planner,
    layers: &[LayerPlan],
    request: &Request,
    tables: Tables,
) -> Result<&'a BlockDiffPlan, PlanError> {
    let of_layers = layers.iter().zip(&request.selection).zip(request.residency.tables());
    let layers: Vec<LayerInput<'_>> = of_layers
        .map(|((layer, selection), table)| LayerInput {
            layer: layer.layer,
            group: layer.group,
            active: true,
            want: &selection.logical_blocks,
            held: table.logical_by_slot(),
            held_valid: table.valid(),
            tail: &selection.ranked_tail,
        })
        .collect();
    let table_mode = match tables {
        Tables::Common => TableMode::Common,
        Tables::PerLayer => TableMode::PerLayer,
    };
    planner.plan(&PlanInput {
        seq_blocks: request.blocks,
        table_mode,
        layers: &layers,
    })
}

/// Device blocks that a plan needs in a group: its layers share them.
fn new_blocks(plan: &BlockDiffPlan, group: GroupId) -> BlockCount {
    let of_group = plan.layers().filter(|layer| layer.group == group);
    of_group.map(|layer| layer.new_blocks()).max().unwrap_or_default()
}

/// Bytes that an upload names, over all ranks.
pub(super) fn planned_bytes(layers: &[LayerPlan], request: &Request) -> u64 {
    let uploads = request.residency.uploads();
    layers
        .iter()
        .zip(uploads)
        .map(|(plan, (_, pairs))| plan.bytes * pairs.count() as u64)
        .sum()
}
