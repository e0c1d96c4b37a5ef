//! The second half of a round: the keep map → a retain plan per group → one Retain record, or none where every table
//! stays; and the last record of a request.

use kvsluice_layout::ids::{
    DecoderLayer, GroupId, LogicalBlock, OperationId, PhysicalBlock, ResidentSlot, SelectionRevision,
};
use kvsluice_layout::plan;
use kvsluice_layout::record::{NEW_SLOT, Pair, RetainMode};
use kvsluice_transport::shared::{Shared, SharedMut};

use super::error::RoundsError;
use super::hands::{Hands, Launch};
use super::layers::LayerPlan;
use super::options::Keeping;
use super::report::RetainedBy;
use super::request::{Ending, Request, Retaining, Step};
use super::upload::header_of;
use crate::block_set::BlockSet;
use crate::retain::{RetainInput, RetainKind, RetainLayer, RetainPlan, RetainPlanner};
use crate::retain_steps::{Activity, Outstanding, Retention};
use crate::table::LayerTable;

/// A group whose tables change, and how.
type Change<'a> = (GroupId, &'a RetainPlan);

impl<C: SharedMut, R: Shared, P: SharedMut> Hands<C, R, P> {
    /// Publishes the retention of a round. `None` where every table stays as the devices have it: the round is over.
    ///
    /// # Errors
    /// [`RoundsError`]; where there is only no room, the request is as it was.
    pub(super) fn launch_retain(&mut self, request: &mut Request) -> Result<Option<Launch>, RoundsError> {
        let started_ns = self.clock.now_ns();
        let keeps = keep_maps(&self.layers, request);
        let changes = |request: &Request, index: usize| {
            let (table, keep) = (request.residency.tables().get(index)?, keeps.get(index)?);
            let devices = request.device_slots.get(index).copied()?;
            let replaced = request.residency.replaced();
            let other = devices != table.valid().get() || replaced.iter().any(|(group, _)| *group == table.group());
            Some(other || keep.len() != table.valid().index())
        };
        let changed: Vec<GroupId> = {
            let layers = self.layers.iter().enumerate();
            let mut groups: Vec<GroupId> = layers
                .filter(|(index, _)| changes(request, *index) == Some(true))
                .map(|(_, plan)| plan.group)
                .collect();
            groups.sort_unstable();
            groups.dedup();
            groups
        };
        if changed.is_empty() {
            return Ok(None);
        }
        // Byte moves are per tensor and tables per layer: a byte move cannot say what becomes of an alias's table.
        let aliased = self.layers.iter().any(|plan| !plan.aliases.is_empty());
        let mut layer_tables = self.options.keeping == Keeping::Auto || aliased;
        self.retain_planners.resize_with(changed.len(), RetainPlanner::new);
        let mut retain_planners = std::mem::take(&mut self.retain_planners);
        let plans = loop {
            let plans = plan_groups(
                &mut retain_planners,
                &changed,
                &self.layers,
                request,
                &keeps,
                layer_tables,
            )?;
            let moves = plans
                .iter()
                .any(|(_, plan)| plan.kind() == RetainKind::ExistingByteMovePlan);
            if !moves || moved_bytes(&plans, &self.layers, request) > 0 {
                break plans;
            }
            layer_tables = true; // every kept block is at the front already: only the table gets shorter
        };
        let launch = self.publish_retain(request, &plans, started_ns);
        self.retain_planners = retain_planners;
        launch.map(Some)
    }

    fn publish_retain(
        &mut self,
        request: &mut Request,
        plans: &[Change<'_>],
        started_ns: u64,
    ) -> Result<Launch, RoundsError> {
        let bytes = moved_bytes(plans, &self.layers, request);
        let planned_ns = self.clock.now_ns();
        let (submission, operation) = self.submit(request, bytes)?;
        request.residency.stage_retain(&operation, plans)?;
        let staged_ns = self.clock.now_ns();
        self.encode_retain(request, plans, header_of(&operation));
        if let Err(blocked) = self.publish(request)? {
            self.withdraw(request, &submission)?;
            return Ok(Launch::Blocked(blocked));
        }
        let retain_us = &mut request.record.costs.retain_us;
        add_us(&mut retain_us.plan, planned_ns.saturating_sub(started_ns));
        add_us(&mut retain_us.allocator, staged_ns.saturating_sub(planned_ns));
        add_us(&mut retain_us.metadata, self.clock.now_ns().saturating_sub(staged_ns));
        request.record.retained_by = Some(retained_by(plans, &self.layers, request, self.options.tags));

        let affected: Vec<DecoderLayer> = plans
            .iter()
            .flat_map(|(_, plan)| plan.layers().map(|(layer, ..)| layer))
            .collect();
        let activity = Activity {
            running: true,
            ..Activity::default()
        };
        // R57: the upload of this round is committed and nothing else of the request is in flight; the workers hold the
        // record back until their own readers have ended.
        let retention = Retention::new(&operation, affected.clone())
            .admit(activity)
            .map_err(|(_, why)| why)?;
        let retention = retention.quiesce(Outstanding::default()).map_err(|(_, why)| why)?;
        request.step = Step::Retaining(Box::new(Retaining {
            operation,
            retention,
            affected,
        }));
        Ok(Launch::Flying)
    }

    /// Writes the complete new tables of the changed groups into the draft, in slot order.
    fn encode_retain(&mut self, request: &Request, plans: &[Change<'_>], header: plan::Operation) {
        let Self {
            draft, layers, options, ..
        } = self;
        let mode = match retained_by(plans, layers, request, options.tags) {
            RetainedBy::SharedTable => RetainMode::SharedTable,
            RetainedBy::LayerTables => RetainMode::LayerTables,
            RetainedBy::ByteMove => RetainMode::ByteMove,
        };
        draft.retain(&request.id, header, mode);
        for (group, plan) in plans {
            let spec = layers.iter().find(|layer| layer.group == *group);
            let block_tokens = spec.map_or(0, |layer| layer.block_tokens);
            for (row, (layer, keep, physical)) in plan.layers().enumerate() {
                if mode == RetainMode::SharedTable && row > 0 {
                    continue;
                }
                let index = layers.iter().position(|plan| plan.layer == layer);
                let Some((index, of)) = index.and_then(|index| Some((index, layers.get(index)?))) else {
                    continue;
                };
                let Some(table) = request.residency.tables().get(index) else {
                    continue;
                };
                let devices = request.device_slots.get(index).copied().unwrap_or(0);
                let pairs = pairs_of(plan.kind(), mode, keep, physical, table, devices);
                let tags = tags_of(request, keep, table);
                let valid_tokens = pairs.len() as u32 * block_tokens;
                let aliases = if mode == RetainMode::LayerTables {
                    &of.aliases[..]
                } else {
                    &[]
                };
                for layer in [layer].iter().chain(aliases) {
                    let layer = (mode != RetainMode::SharedTable).then_some(*layer);
                    draft.table_row(layer, *group, valid_tokens, pairs.iter().copied());
                    if options.tags {
                        draft.tags(tags.iter().copied());
                    }
                }
            }
        }
    }

    /// Publishes the last record of a request: its tables are dropped, and on Done everything that it holds is freed.
    ///
    /// # Errors
    /// [`RoundsError`]; where there is only no room, the request is as it was.
    pub(super) fn launch_end(&mut self, request: &mut Request, ending: Ending) -> Result<Launch, RoundsError> {
        let residency = &request.residency;
        self.ledger.finish(&request.id, residency.request_epoch());
        // The ledger knows the request no more; its revisions go on where they were.
        let header = plan::Operation {
            request_epoch: residency.request_epoch(),
            operation_id: OperationId(request.operation.get() + 1),
            pool_generation: residency.pool_generation(),
            map_revision: request.issued.0,
            selection_revision: SelectionRevision(request.issued.1.get() + 1),
        };
        self.draft
            .retain(&request.id, header, RetainMode::SharedTable)
            .last_of_request();
        Ok(match self.publish(request)? {
            Ok(_) => {
                request.step = Step::Ended(ending);
                Launch::Flying
            }
            Err(blocked) => Launch::Blocked(blocked),
        })
    }
}

/// By planned layer: the slots that stay, which are those of wanted blocks and those that this round brought.
fn keep_maps(layers: &[LayerPlan], request: &Request) -> Vec<Vec<ResidentSlot>> {
    let mut wanted = BlockSet::<LogicalBlock>::default();
    let mut keeps = Vec::with_capacity(layers.len());
    for (index, table) in request.residency.tables().iter().enumerate() {
        wanted.reset(request.blocks.index());
        for &block in request
            .selection
            .get(index)
            .map_or(&[][..], |selection| &selection.logical_blocks)
        {
            wanted.insert(block);
        }
        let devices = request.device_slots.get(index).copied().unwrap_or(0);
        let slots = (0..table.valid().get()).zip(table.logical_by_slot());
        let stays = |slot: u32, block: &Option<LogicalBlock>| {
            slot >= devices || block.is_some_and(|block| wanted.contains(block))
        };
        keeps.push(
            slots
                .filter(|(slot, block)| stays(*slot, block))
                .map(|(slot, _)| ResidentSlot(slot))
                .collect(),
        );
    }
    keeps
}

fn plan_groups<'a>(
    planners: &'a mut [RetainPlanner],
    groups: &[GroupId],
    layers: &[LayerPlan],
    request: &Request,
    keeps: &[Vec<ResidentSlot>],
    supports_layer_tables: bool,
) -> Result<Vec<Change<'a>>, RoundsError> {
    let (epoch, generation) = (request.residency.request_epoch(), request.residency.pool_generation());
    let mut plans = Vec::with_capacity(groups.len());
    for (planner, &group) in planners.iter_mut().zip(groups) {
        let of_group = layers.iter().zip(request.residency.tables()).zip(keeps);
        let rows: Vec<RetainLayer<'_>> = of_group
            .filter(|((plan, _), _)| plan.group == group)
            .map(|((plan, table), keep)| RetainLayer {
                layer: plan.layer,
                active: true,
                physical_by_slot: table.physical_by_slot(),
                valid: table.valid(),
                keep,
            })
            .collect();
        let plan = planner.plan_retain_group(&RetainInput {
            request_epoch: epoch,
            pool_generation: generation,
            expected_request_epoch: epoch,
            expected_pool_generation: generation,
            supports_layer_tables,
            layers: &rows,
            // R61: sink, recent and window blocks are wanted, so their slots are kept.
            protected: &[],
        })?;
        plans.push((group, plan));
    }
    Ok(plans)
}

/// Bytes that byte moves move, over all ranks; a block that stays where it is moves none.
fn moved_bytes(plans: &[Change<'_>], layers: &[LayerPlan], request: &Request) -> u64 {
    let moving = plans
        .iter()
        .filter(|(_, plan)| plan.kind() == RetainKind::ExistingByteMovePlan);
    let mut bytes = 0;
    for (layer, _, physical) in moving.flat_map(|(_, plan)| plan.layers()) {
        let of = layers
            .iter()
            .zip(request.residency.tables())
            .find(|(plan, _)| plan.layer == layer);
        let Some((plan, table)) = of else { continue };
        let moved = physical
            .iter()
            .zip(table.named())
            .filter(|(from, to)| from != to)
            .count();
        bytes += plan.bytes * moved as u64;
    }
    bytes
}

/// How one record retains all of `plans`: it changes all tables or none (R57), so its groups go the way that the least
/// able of them needs. A shared table whose layers hold different blocks in one slot is said layer by layer where the
/// record says what the slots hold, because a shared row has one tag for a slot.
fn retained_by(plans: &[Change<'_>], layers: &[LayerPlan], request: &Request, tags: bool) -> RetainedBy {
    let kind = plans.iter().map(|(_, plan)| RetainedBy::from(plan.kind())).max();
    let slots = |group: GroupId| {
        let of_group = layers
            .iter()
            .zip(request.residency.tables())
            .filter(move |(plan, _)| plan.group == group);
        of_group.map(|(_, table)| table.logical_by_slot())
    };
    let alike = |(group, _): &Change<'_>| slots(*group).zip(slots(*group).skip(1)).all(|(a, b)| a == b);
    match kind.unwrap_or(RetainedBy::SharedTable) {
        RetainedBy::SharedTable if tags && !plans.iter().all(alike) => RetainedBy::LayerTables,
        kind => kind,
    }
}

fn pairs_of(
    kind: RetainKind,
    mode: RetainMode,
    keep: &[ResidentSlot],
    physical: &[PhysicalBlock],
    table: &LayerTable,
    devices: u32,
) -> Vec<Pair> {
    let remap = |(slot, block): (&ResidentSlot, &PhysicalBlock)| Pair {
        source: if slot.get() < devices { slot.get() } else { NEW_SLOT },
        destination: block.get(),
    };
    let moved = |(from, to): (&PhysicalBlock, &PhysicalBlock)| Pair {
        source: from.get(),
        destination: to.get(),
    };
    match (mode, kind) {
        (RetainMode::ByteMove, RetainKind::ExistingByteMovePlan) => {
            physical.iter().zip(table.named()).map(moved).collect()
        }
        // A remap inside a record of byte moves: every block stays where it is.
        (RetainMode::ByteMove, _) => physical.iter().zip(physical).map(moved).collect(),
        _ => keep.iter().zip(physical).map(remap).collect(),
    }
}

/// What attention finds in the kept slots.
fn tags_of(request: &Request, keep: &[ResidentSlot], table: &LayerTable) -> Vec<u64> {
    let logical = |slot: &ResidentSlot| table.logical_by_slot().get(slot.index()).copied().flatten();
    let tag = |slot: &ResidentSlot| request.tag(logical(slot)?);
    keep.iter().map(|slot| tag(slot).map_or(0, |tag| tag.0)).collect()
}

/// Adds nanoseconds to a term in µs.
pub(super) fn add_us(term: &mut Option<f64>, ns: u64) {
    *term = Some(term.unwrap_or(0.0) + ns as f64 / 1000.0);
}
