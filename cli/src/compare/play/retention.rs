//! The second half of a round: the keep map, made into new tables in the way that is asked for.

use anyhow::Result;
use kvsluice_cpu_worker::retain::{RetainInput, RetainKind, RetainLayer, RetainPlan, RetainPlanner};
use kvsluice_cpu_worker::retain_steps::{Activity, Outstanding, Retention};
use kvsluice_cpu_worker::selection::{BlockSelection, LayerSelection};
use kvsluice_cpu_worker::table::LayerTable;
use kvsluice_layout::ids::{DecoderLayer, GroupId, LogicalBlock, PhysicalBlock, ResidentSlot};
use kvsluice_layout::plan;
use kvsluice_layout::planted::planted;
use kvsluice_layout::record::{NEW_SLOT, Pair, RetainMode};

use super::{EPOCH, GENERATION, Player, REQUEST, Sources, header_of, layer_bytes};

impl Player<'_> {
    /// Keeps what a selection wants and what came with its upload, in the way that is asked for (R57).
    pub(super) fn retain(&mut self, selection: &BlockSelection) -> Result<Result<(), String>> {
        let keeps = self.keep_maps(selection);
        let mut kind = self.way.retaining.kind();
        let mut plans = match self.plan_retain(&keeps, kind)? {
            Ok(plans) => plans,
            Err(why) => return Ok(Err(why)),
        };
        let mut moved = self.moved_bytes(&plans);
        if kind == RetainKind::ExistingByteMovePlan && moved == 0 {
            // Every kept block is at the front already: no byte moves, the tables get shorter.
            kind = RetainKind::LayerTableRemap;
            plans = self.plan_retain(&keeps, kind)?.map_err(anyhow::Error::msg)?;
        }
        if kind != RetainKind::ExistingByteMovePlan {
            moved = 0;
        }
        let operation = self.submit(moved)?;
        let staged: Vec<(GroupId, &RetainPlan)> = plans.iter().map(|(group, plan)| (*group, plan)).collect();
        self.residency.stage_retain(&operation, &staged)?;
        self.encode_retain(&plans, header_of(&operation));
        let affected: Vec<DecoderLayer> = plans
            .iter()
            .flat_map(|(_, plan)| plan.layers().map(|row| row.0))
            .collect();
        let running = Activity {
            running: true,
            ..Activity::default()
        };
        let retention = Retention::new(&operation, affected.clone())
            .admit(running)
            .map_err(|(_, why)| why)?;
        let retention = retention.quiesce(Outstanding::default()).map_err(|(_, why)| why)?;
        // R1: what moved is what the ranks report, also where the CPU gathers nothing.
        let moved = match (self.publish()?, self.way.sources) {
            (_, Sources::SourceOnly) if planted("r1_source_only_moves_nothing") => 0,
            (moved, _) => moved,
        };
        self.costs.gpu_compaction_bytes += moved;
        let committed = self.acknowledge(&operation)?;
        let retention = retention.apply(&affected).map_err(|(_, why)| why)?;
        let retired = retention
            .commit(&committed, &mut self.residency, &mut self.owners)
            .map_err(|(_, why)| why)?;
        if moved > 0 || !planted("r66_released_where_bytes_moved") {
            self.blocks_released += retired.released().len() as u64; // R66: whether bytes moved or not
        }
        for (slots, table) in self.device_slots.iter_mut().zip(self.residency.tables()) {
            *slots = table.valid().get();
        }
        Ok(Ok(()))
    }

    fn keep_maps(&self, selection: &BlockSelection) -> Vec<Vec<ResidentSlot>> {
        let tables = self.residency.tables().iter().zip(&self.device_slots);
        let of_layer = |(layer, (table, &devices)): (&LayerSelection, (&LayerTable, &u32))| {
            let slots = (0..table.valid().get()).zip(table.logical_by_slot());
            let wanted =
                |block: &Option<LogicalBlock>| block.is_some_and(|block| layer.logical_blocks.contains(&block));
            let kept = slots.filter(|(slot, block)| *slot >= devices || wanted(block));
            kept.map(|(slot, _)| ResidentSlot(slot)).collect()
        };
        selection.layers().iter().zip(tables).map(of_layer).collect()
    }

    /// A plan of `kind` per group, or why there is none.
    fn plan_retain(
        &self,
        keeps: &[Vec<ResidentSlot>],
        kind: RetainKind,
    ) -> Result<Result<Vec<(GroupId, RetainPlan)>, String>> {
        let aliased = self
            .channel
            .map
            .geometry()
            .layers
            .iter()
            .position(|spec| spec.alias_of.is_some());
        if let (RetainKind::ExistingByteMovePlan, Some(layer)) = (kind, aliased) {
            return Ok(Err(format!(
                "a byte move is of tensors, and layer {layer} has none of its own"
            )));
        }
        let mut plans = Vec::new();
        for owner in self.owners.all() {
            let of_group = self
                .residency
                .tables()
                .iter()
                .zip(keeps)
                .filter(|(table, _)| table.group() == owner.group());
            let row = |(table, keep): (&'_ LayerTable, &'_ Vec<ResidentSlot>)| (table.clone(), keep.clone());
            let rows: Vec<_> = of_group.map(row).collect();
            let layers: Vec<RetainLayer<'_>> = rows
                .iter()
                .map(|(table, keep)| RetainLayer {
                    layer: table.layer(),
                    active: true,
                    physical_by_slot: table.physical_by_slot(),
                    valid: table.valid(),
                    keep,
                })
                .collect();
            let input = RetainInput {
                request_epoch: EPOCH,
                pool_generation: GENERATION,
                expected_request_epoch: EPOCH,
                expected_pool_generation: GENERATION,
                supports_layer_tables: true,
                layers: &layers,
                protected: &[],
            };
            let mut planner = RetainPlanner::new();
            let Some(plan) = planner.plan_retain_group_as(&input, kind)? else {
                let group = owner.group();
                return Ok(Err(format!(
                    "the layers of group {group} keep different slots: no one table is exact (R51)"
                )));
            };
            plans.push((owner.group(), plan.clone()));
        }
        Ok(Ok(plans))
    }

    fn moved_bytes(&self, plans: &[(GroupId, RetainPlan)]) -> u64 {
        let mut bytes = 0;
        for (layer, _, physical) in plans.iter().flat_map(|(_, plan)| plan.layers()) {
            let named = self.table(layer).map_or(&[][..], LayerTable::named);
            let moved = physical.iter().zip(named).filter(|(from, to)| from != to).count();
            bytes += layer_bytes(&self.channel.map, layer) * moved as u64;
        }
        bytes
    }

    /// The complete new tables of every group, in slot order.
    fn encode_retain(&mut self, plans: &[(GroupId, RetainPlan)], header: plan::Operation) {
        let moving = plans
            .iter()
            .any(|(_, plan)| plan.kind() == RetainKind::ExistingByteMovePlan);
        let mode = match self.way.retaining.mode() {
            RetainMode::ByteMove if !moving => RetainMode::LayerTables,
            mode => mode,
        };
        let mut draft = std::mem::take(&mut self.draft);
        draft.retain(REQUEST, header, mode);
        for (group, plan) in plans {
            let block_tokens = self
                .channel
                .map
                .geometry()
                .group(*group)
                .map_or(0, |spec| spec.block_tokens);
            let rows = if mode == RetainMode::SharedTable { 1 } else { usize::MAX };
            for (layer, keep, physical) in plan.layers().take(rows) {
                let pairs = self.pairs(mode, layer, keep, physical);
                let valid_tokens = pairs.len() as u32 * block_tokens;
                for layer in [layer].into_iter().chain(self.aliases(layer)) {
                    let layer = (mode != RetainMode::SharedTable).then_some(layer);
                    draft.table_row(layer, *group, valid_tokens, pairs.iter().copied());
                    if mode != RetainMode::LayerTables {
                        break; // A shared row speaks for all layers, and byte moves have no aliases.
                    }
                }
            }
        }
        self.draft = draft;
    }

    fn pairs(
        &self,
        mode: RetainMode,
        layer: DecoderLayer,
        keep: &[ResidentSlot],
        physical: &[PhysicalBlock],
    ) -> Vec<Pair> {
        let of = self.layers.iter().position(|(of, _)| *of == layer);
        let devices = of.and_then(|at| self.device_slots.get(at)).copied().unwrap_or(0);
        let named = self.table(layer).map_or(&[][..], LayerTable::named);
        let remap = |(slot, block): (&ResidentSlot, &PhysicalBlock)| Pair {
            source: if slot.get() < devices { slot.get() } else { NEW_SLOT },
            destination: block.get(),
        };
        let moved = |(from, to): (&PhysicalBlock, &PhysicalBlock)| Pair {
            source: from.get(),
            destination: to.get(),
        };
        match mode {
            RetainMode::ByteMove => physical.iter().zip(named).map(moved).collect(),
            _ => keep.iter().zip(physical).map(remap).collect(),
        }
    }
}
