//! One request played round by round in one way: the decision core and the channel do what they do in production, only
//! the selection and the way of retention are given.

mod retention;

use std::num::NonZeroU32;

use anyhow::{Context, Result, bail, ensure};
use kvsluice_cpu_worker::cost::MovementCounters;
use kvsluice_cpu_worker::diff_plan::{BlockDiffPlan, PlanKind};
use kvsluice_cpu_worker::ledger::{Ack, Acked, Committed, Ledger, Operation, Pending, Submission, Submitted};
use kvsluice_cpu_worker::owner::Owners;
use kvsluice_cpu_worker::planner::{LayerInput, PlanInput, Planner, TableMode};
use kvsluice_cpu_worker::residency::Residency;
use kvsluice_cpu_worker::retain::RetainKind;
use kvsluice_cpu_worker::selection::BlockSelection;
use kvsluice_cpu_worker::table::LayerTable;
use kvsluice_layout::geometry::LayerSpec;
use kvsluice_layout::ids::{
    BlockCount, DecoderLayer, GroupId, LogicalBlock, OperationId, PoolGeneration, Rank, RequestEpoch,
    SelectionRevision, SourceBlock,
};
use kvsluice_layout::plan::{self, PlanDraft};
use kvsluice_layout::planes::GeometryMap;
use kvsluice_layout::record::{RetainMode, SourceKind};
use serde::Serialize;

use super::channel::Channel;
use super::kv::{LayerKv, Shape, Source};

const REQUEST: &[u8] = b"compared";
const EPOCH: RequestEpoch = RequestEpoch(1);
const GENERATION: PoolGeneration = PoolGeneration(1);

/// How blocks come to the device (X6).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Sources {
    /// Gathered on the CPU first.
    Copy,
    /// Read in place.
    SourceOnly,
}

/// How kept blocks stay (R51, R53).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Retaining {
    /// Bytes move to the front.
    ByteMove,
    /// One new table for all layers of a group.
    SharedRemap,
    /// A new table for each layer.
    LayerRemap,
}

impl Retaining {
    fn kind(self) -> RetainKind {
        match self {
            Self::ByteMove => RetainKind::ExistingByteMovePlan,
            Self::SharedRemap => RetainKind::SharedTableRemap,
            Self::LayerRemap => RetainKind::LayerTableRemap,
        }
    }

    fn mode(self) -> RetainMode {
        match self {
            Self::ByteMove => RetainMode::ByteMove,
            Self::SharedRemap => RetainMode::SharedTable,
            Self::LayerRemap => RetainMode::LayerTables,
        }
    }
}

/// One of the six ways.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(super) struct Way {
    pub(super) sources: Sources,
    pub(super) retaining: Retaining,
}

/// What the devices held after one round.
#[derive(Clone)]
pub(super) struct Held {
    /// What attention finds through the tables, by rank and layer.
    pub(super) found: Vec<LayerKv>,
    /// What it should find, made anew from the numbers of the blocks.
    pub(super) expected: Vec<LayerKv>,
    /// By layer: block of the sequence in each slot.
    blocks: Vec<(DecoderLayer, Vec<LogicalBlock>)>,
}

impl Held {
    /// What attention should find, in the order of the sequence.
    pub(super) fn in_order(&self) -> Vec<LayerKv> {
        let of_layer = |kv: &LayerKv| {
            let blocks = self.blocks.iter().find(|(layer, _)| *layer == kv.layer);
            let mut slots: Vec<_> = blocks
                .into_iter()
                .flat_map(|(_, blocks)| blocks.iter().zip(0..))
                .collect();
            slots.sort_unstable();
            kv.in_slot_order(slots.into_iter().map(|(_, slot)| slot))
        };
        self.expected.iter().map(of_layer).collect()
    }
}

/// What one way came to.
#[derive(Clone)]
pub(super) struct Played {
    pub(super) rounds: Vec<Held>,
    pub(super) costs: MovementCounters,
    /// Device blocks that retention freed; not the same as bytes moved (R66).
    pub(super) blocks_released: u64,
    /// Everything was free after the end (F12).
    pub(super) left_nothing: bool,
}

/// Plays `selections` in one way. `Err` of the inner result says why the way is not applicable.
pub(super) fn play(
    channel: &mut Channel,
    source: Source,
    selections: &[BlockSelection],
    way: Way,
    flip_byte: bool,
) -> Result<Result<Played, String>> {
    let mut player = Player::new(channel, source, way)?;
    let mut rounds = Vec::new();
    for (index, selection) in selections.iter().enumerate() {
        player.upload(selection)?;
        if let Err(why) = player.retain(selection)? {
            return Ok(Err(why));
        }
        if flip_byte && index + 1 == selections.len() {
            player.channel.flip_byte(REQUEST, Rank(0), DecoderLayer(0))?;
        }
        rounds.push(player.held()?);
    }
    player.finish(rounds).map(Ok)
}

struct Player<'a> {
    channel: &'a mut Channel,
    source: Source,
    way: Way,
    layers: Vec<(DecoderLayer, GroupId)>,
    ledger: Ledger,
    owners: Owners,
    planner: Planner,
    residency: Residency,
    operation: OperationId,
    /// By layer of `layers`: slots that the devices' tables have.
    device_slots: Vec<u32>,
    draft: PlanDraft,
    costs: MovementCounters,
    blocks_released: u64,
}

impl<'a> Player<'a> {
    fn new(channel: &'a mut Channel, source: Source, way: Way) -> Result<Self> {
        let geometry = channel.map.geometry();
        let own =
            |(number, spec): (u32, &LayerSpec)| spec.alias_of.is_none().then_some((DecoderLayer(number), spec.group));
        let layers: Vec<_> = (0..).zip(&geometry.layers).filter_map(own).collect();
        let mut ledger = Ledger::new(NonZeroU32::new(geometry.ranks).context("a geometry without ranks")?);
        ledger.open(REQUEST, EPOCH)?;
        Ok(Self {
            ledger,
            owners: Owners::of_geometry(geometry)?,
            planner: Planner::new(),
            residency: Residency::new(EPOCH, GENERATION, layers.iter().copied()),
            operation: OperationId(0),
            device_slots: vec![0; layers.len()],
            layers,
            draft: PlanDraft::new(),
            costs: MovementCounters::default(),
            blocks_released: 0,
            channel,
            source,
            way,
        })
    }

    /// Uploads what a selection wants and the devices have not (R29–R32, R42).
    fn upload(&mut self, selection: &BlockSelection) -> Result<()> {
        let mut planner = std::mem::take(&mut self.planner);
        let layers: Vec<LayerInput<'_>> = selection
            .layers()
            .iter()
            .zip(self.residency.tables())
            .map(|(layer, table)| LayerInput {
                layer: layer.layer,
                group: layer.group,
                active: true,
                want: &layer.logical_blocks,
                held: table.logical_by_slot(),
                held_valid: table.valid(),
                tail: &layer.ranked_tail,
            })
            .collect();
        let plan = planner.plan(&PlanInput {
            seq_blocks: selection.seq_blocks(),
            table_mode: TableMode::Common,
            layers: &layers,
        })?;
        self.transfer(plan)?;
        self.planner = planner;
        Ok(())
    }

    fn transfer(&mut self, plan: &BlockDiffPlan) -> Result<()> {
        let bytes = |layer, blocks: usize| layer_bytes(&self.channel.map, layer) * blocks as u64;
        let planned = plan.layers().map(|row| bytes(row.layer, row.upload.len())).sum();
        let operation = self.submit(planned)?;
        self.residency.stage_upload(&operation, plan, &mut self.owners)?;
        let before = self.channel.store.counts();
        self.encode_upload(plan, header_of(&operation))?;
        let after = self.channel.store.counts();
        self.costs.cpu_gather_bytes += after.gather_bytes - before.gather_bytes;
        self.costs.cpu_destination_bytes += after.gather_frame_bytes - before.gather_frame_bytes;
        let moved = self.publish()?;
        self.costs.h2d_bytes += moved.min(planned);
        self.costs.gpu_scatter_bytes += moved.saturating_sub(planned);
        let committed = self.acknowledge(&operation)?;
        self.residency.commit(&committed, &mut self.owners, &mut Vec::new())?;
        if plan.kind() == PlanKind::Full {
            self.device_slots.fill(0); // R32: nothing of the old tables is kept
        }
        Ok(())
    }

    fn encode_upload(&mut self, plan: &BlockDiffPlan, header: plan::Operation) -> Result<()> {
        if plan.kind() == PlanKind::Zero {
            self.draft.keep(REQUEST, header); // R42
            return Ok(());
        }
        self.draft.upload(REQUEST, header);
        self.channel.store.begin_record();
        let gathered = self.gather_frames(plan)?;
        let (kind, copies) = match self.way.sources {
            Sources::SourceOnly => (SourceKind::SourceOnly, false),
            Sources::Copy => (SourceKind::Copy, true),
        };
        for (layer, pairs) in self.residency.uploads() {
            let (_, group) = self
                .layers
                .iter()
                .find(|(of, _)| *of == layer)
                .context("a layer that is not played")?;
            let frames = gathered
                .iter()
                .find(|(of, _)| of == group)
                .map_or(&[][..], |(_, frames)| frames);
            let mut row = Vec::new();
            for (index, (block, destination)) in pairs.enumerate() {
                let mut source = self.channel.frame(*group, block)?;
                if copies {
                    let &to = frames.get(index).context("a block without a gather frame")?;
                    self.channel.store.gather(layer, source, to);
                    source = to;
                }
                row.push((source, destination));
            }
            if !row.is_empty() {
                self.draft.row(layer, *group, kind, row);
            }
        }
        Ok(())
    }

    /// By group: as many gather frames as the upload has destinations in it.
    fn gather_frames(&mut self, plan: &BlockDiffPlan) -> Result<Vec<(GroupId, Vec<SourceBlock>)>> {
        let mut gathered = Vec::new();
        for owner in self.owners.all().iter().filter(|_| self.way.sources == Sources::Copy) {
            let of_group = plan.layers().filter(|row| row.group == owner.group());
            let wanted = of_group.map(|row| row.new_blocks()).max().unwrap_or_default();
            let mut frames = Vec::new();
            let leases = self.channel.producer.leases();
            self.channel
                .store
                .take_gather(owner.group(), wanted.get(), leases, &mut frames)?;
            gathered.push((owner.group(), frames));
        }
        Ok(gathered)
    }

    fn table(&self, layer: DecoderLayer) -> Option<&LayerTable> {
        self.residency.tables().iter().find(|table| table.layer() == layer)
    }

    /// Layers whose tensor is that of `layer`.
    fn aliases(&self, layer: DecoderLayer) -> Vec<DecoderLayer> {
        let map = &self.channel.map;
        let tensor = map.layer(layer).map(|layer| layer.tensor);
        let all = (0..map.geometry().layers.len() as u32).map(DecoderLayer);
        all.filter(|other| *other != layer && map.layer(*other).map(|other| other.tensor) == tensor)
            .collect()
    }

    /// Reads what the devices hold, and makes what they should hold.
    fn held(&mut self) -> Result<Held> {
        let found = self.channel.read(REQUEST)?;
        let map = &self.channel.map;
        let mut blocks = Vec::new();
        for table in self.residency.tables() {
            let of_slots: Option<Vec<LogicalBlock>> = table.logical_by_slot().iter().copied().collect();
            let of_slots = of_slots.context("a slot without a block")?;
            for layer in [table.layer()].into_iter().chain(self.aliases(table.layer())) {
                blocks.push((layer, of_slots.clone()));
            }
        }
        blocks.sort_by_key(|(layer, _)| *layer);
        let ranks = (0..map.geometry().ranks).map(Rank);
        let places = ranks.flat_map(|rank| blocks.iter().map(move |of_layer| (rank, of_layer)));
        let expected = places.map(|(rank, (layer, of_slots))| expected(map, &self.source, rank, *layer, of_slots));
        Ok(Held {
            expected: expected.collect::<Result<_>>()?,
            found,
            blocks,
        })
    }

    /// The last record of the request: its tables are dropped, and everything is free (F12).
    fn finish(mut self, rounds: Vec<Held>) -> Result<Played> {
        let header = plan::Operation {
            request_epoch: EPOCH,
            operation_id: OperationId(self.operation.get() + 1),
            pool_generation: GENERATION,
            map_revision: self.residency.map_revision(),
            selection_revision: SelectionRevision(self.residency.revision().get() + 1),
        };
        self.ledger.finish(REQUEST, EPOCH);
        self.draft
            .retain(REQUEST, header, RetainMode::SharedTable)
            .last_of_request();
        self.publish()?;
        self.residency
            .close(&mut self.owners, &mut Vec::new())?
            .settle(&mut self.owners)?;
        let fresh = Owners::of_geometry(self.channel.map.geometry())?;
        let free = |owners: &Owners| {
            owners
                .all()
                .iter()
                .map(|owner| owner.free_blocks())
                .collect::<Vec<BlockCount>>()
        };
        Ok(Played {
            rounds,
            costs: self.costs,
            blocks_released: self.blocks_released,
            left_nothing: self.channel.is_empty() && free(&self.owners) == free(&fresh),
        })
    }

    fn submit(&mut self, bytes: u64) -> Result<Operation<Pending>> {
        self.operation = OperationId(self.operation.get() + 1);
        let submission = Submission {
            request_epoch: EPOCH,
            operation: self.operation,
            pool_generation: GENERATION,
            revision: SelectionRevision(self.residency.revision().get() + 1),
            bytes,
        };
        match self.ledger.submit(REQUEST, &submission)? {
            Submitted::Pending(operation) => Ok(operation),
            Submitted::Reused { .. } => bail!("operation {} is not new; please report this", self.operation),
        }
    }

    /// Publishes the draft and returns the bytes that it moved, over all ranks.
    fn publish(&mut self) -> Result<u64> {
        self.costs.metadata_bytes += self.draft.encoded_bytes().unwrap_or(0) as u64;
        let completion = self.channel.run(&self.draft)?;
        let ranks_agree = completion.digest.is_some();
        ensure!(
            ranks_agree,
            "the ranks hold different tables after {:?}",
            completion.operation
        ); // I9
        Ok(completion.bytes_moved)
    }

    /// Tells the ledger of every rank's Done (R50).
    fn acknowledge(&mut self, operation: &Operation<Pending>) -> Result<Operation<Committed>> {
        for rank in (0..self.channel.map.geometry().ranks).map(Rank) {
            let (key, revision) = (operation.key(), operation.revision());
            if let Acked::Committed(committed) = self.ledger.ack(REQUEST, &Ack { key, revision, rank })? {
                return Ok(committed);
            }
        }
        bail!("every rank acknowledged {operation:?} and it is not committed; please report this")
    }
}

/// What attention on `rank` should find in `layer`, whose slots hold `blocks`.
fn expected(
    map: &GeometryMap,
    source: &Source,
    rank: Rank,
    layer: DecoderLayer,
    blocks: &[LogicalBlock],
) -> Result<LayerKv> {
    let shape = Shape::of(map, layer, source.dtype).context("a layer without a shape")?;
    let group = map.layer(layer).and_then(|of| map.geometry().group(of.group));
    let tokens = group.map_or(0, |group| group.block_tokens) * blocks.len() as u32;
    let planes = blocks.iter().map(|block| source.planes(map, rank, layer, *block));
    Ok(LayerKv::new(
        (rank, layer, shape),
        kvsluice_layout::ids::TokenCount(tokens),
        planes,
    ))
}

/// Bytes of one block of a layer, over all ranks.
fn layer_bytes(map: &GeometryMap, layer: DecoderLayer) -> u64 {
    (0..map.geometry().ranks)
        .map(|rank| map.shard_block_bytes(Rank(rank), layer))
        .sum()
}

fn header_of(operation: &Operation<Pending>) -> plan::Operation {
    let key = operation.key();
    plan::Operation {
        request_epoch: key.request_epoch,
        operation_id: key.operation,
        pool_generation: key.pool_generation,
        map_revision: key.map_revision,
        selection_revision: operation.revision(),
    }
}
