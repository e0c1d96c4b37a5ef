//! Operations on one request, from plan to commit or abort.

use core::num::NonZeroU32;

use kvsluice_layout::ids::{OperationId, Rank, SelectionRevision, TokenCount};
use kvsluice_layout::planted::with_planted;

use super::*;
use crate::invariants::check_residency;
use crate::ledger::{Ack, Acked, Ledger, Submission, Submitted};
use crate::planner::{LayerInput, PlanInput, Planner, TableMode};
use crate::retain::{RetainInput, RetainLayer, RetainPlanner};
use crate::retain_steps::{Activity, Outstanding, Retention};
use crate::selection::{BlockSelection, LayerSelection};
use crate::selector::{SelectInput, Selector};

const EPOCH: RequestEpoch = RequestEpoch(3);
const GENERATION: PoolGeneration = PoolGeneration(4);

/// One request of layers 10 and 11 in group 2, with a ledger of two ranks and a pool of 8 blocks.
struct Bench {
    ledger: Ledger,
    owners: Owners,
    residency: Residency,
    planner: Planner,
    operation: u64,
}

fn bench() -> Bench {
    let mut ledger = Ledger::new(NonZeroU32::MIN.saturating_add(1));
    ledger.open(b"req-1-2", EPOCH).unwrap();
    let layers = [10, 11].map(|layer| (DecoderLayer(layer), GroupId(2)));
    Bench {
        ledger,
        owners: Owners::new([(GroupId(2), BlockCount(8))]),
        residency: Residency::new(EPOCH, GENERATION, layers),
        planner: Planner::new(),
        operation: 0,
    }
}

impl Bench {
    fn submit(&mut self, bytes: u64) -> Operation<Pending> {
        self.operation += 1;
        let submission = Submission {
            request_epoch: EPOCH,
            operation: OperationId(self.operation),
            pool_generation: GENERATION,
            revision: SelectionRevision(self.operation),
            bytes,
        };
        match self.ledger.submit(b"req-1-2", &submission).unwrap() {
            Submitted::Pending(operation) => operation,
            Submitted::Reused { .. } => panic!("a new operation"),
        }
    }

    fn plan(&mut self, wants: [&[u32]; 2]) -> BlockDiffPlan {
        let wants = wants.map(|ids| ids.iter().map(|id| LogicalBlock(*id)).collect::<Vec<_>>());
        let layers: Vec<LayerInput<'_>> = self
            .residency
            .tables()
            .iter()
            .zip(&wants)
            .map(|(table, want)| LayerInput {
                layer: table.layer(),
                group: table.group(),
                active: true,
                want,
                held: table.logical_by_slot(),
                held_valid: table.valid(),
                tail: &[],
            })
            .collect();
        let input = PlanInput {
            seq_blocks: BlockCount(100),
            table_mode: TableMode::PerLayer,
            layers: &layers,
        };
        self.planner.plan(&input).unwrap().clone()
    }

    /// Submits and stages an upload of what is wanted.
    fn stage(&mut self, wants: [&[u32]; 2]) -> Operation<Pending> {
        let plan = self.plan(wants);
        let operation = self.submit(if plan.kind() == PlanKind::Zero { 0 } else { 64 });
        self.residency
            .stage_upload(&operation, &plan, &mut self.owners)
            .unwrap();
        operation
    }

    fn ack(&mut self, operation: &Operation<Pending>, rank: u32) -> Acked {
        let ack = Ack {
            key: operation.key(),
            revision: operation.revision(),
            rank: Rank(rank),
        };
        self.ledger.ack(b"req-1-2", &ack).unwrap()
    }

    fn commit(&mut self, operation: &Operation<Pending>) -> Vec<(GroupId, PhysicalBlock)> {
        assert_eq!(self.ack(operation, 1), Acked::Recorded);
        let Acked::Committed(evidence) = self.ack(operation, 0) else {
            panic!("the last rank")
        };
        let mut retired = Vec::new();
        self.residency
            .commit(&evidence, &mut self.owners, &mut retired)
            .unwrap();
        retired
    }

    /// Submits and stages a retention of the slots.
    fn stage_retain(&mut self, keeps: [&[u32]; 2]) -> (RetainKind, Operation<Pending>) {
        let keeps = keeps.map(|slots| slots.iter().map(|slot| ResidentSlot(*slot)).collect::<Vec<_>>());
        let layers: Vec<RetainLayer<'_>> = self
            .residency
            .tables()
            .iter()
            .zip(&keeps)
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
        let plan = RetainPlanner::new().plan_retain_group(&input).unwrap().clone();
        let operation = self.submit(0);
        self.residency.stage_retain(&operation, &[(GroupId(2), &plan)]).unwrap();
        (plan.kind(), operation)
    }

    fn retain(&mut self, keeps: [&[u32]; 2]) -> (RetainKind, Vec<(GroupId, PhysicalBlock)>) {
        let (kind, operation) = self.stage_retain(keeps);
        (kind, self.commit(&operation))
    }

    fn tables(&self) -> [Vec<u32>; 2] {
        [0, 1].map(|layer| {
            self.residency.tables()[layer]
                .named()
                .iter()
                .map(|block| block.get())
                .collect()
        })
    }

    fn free(&self) -> u32 {
        self.owners.all()[0].free_blocks().get()
    }
}

#[test]
fn r43_r50_r60_an_upload_counts_when_every_rank_has_it_and_not_before() {
    let mut bench = bench();
    let operation = bench.stage([&[40, 41], &[50]]);
    assert_eq!(bench.ack(&operation, 1), Acked::Recorded);
    assert_eq!(
        (bench.residency.map_revision(), bench.tables()),
        (MapRevision(0), [vec![], vec![]])
    );
    let Acked::Committed(evidence) = bench.ack(&operation, 0) else {
        panic!("the last rank")
    };
    bench
        .residency
        .commit(&evidence, &mut bench.owners, &mut Vec::new())
        .unwrap();
    assert_eq!(
        (bench.residency.map_revision(), bench.residency.revision()),
        (MapRevision(1), SelectionRevision(1))
    );
    // R4, R54: one physical block carries a block of each layer, and the layers' rows differ.
    assert_eq!(bench.tables(), [vec![0, 1], vec![0]]);
    let logical = |layer: usize| bench.residency.tables()[layer].logical_by_slot().to_vec();
    assert_eq!(logical(0), [Some(LogicalBlock(40)), Some(LogicalBlock(41))]);
    assert_eq!(logical(1), [Some(LogicalBlock(50))]);
}

#[test]
fn r4_the_rows_of_an_upload_name_their_own_blocks_and_destinations() {
    let mut bench = bench();
    let first = bench.stage([&[40, 41], &[50]]);
    bench.commit(&first);
    bench.stage([&[40, 41, 42], &[50, 51, 52]]);
    let numbers = |(logical, block): (LogicalBlock, DestinationBlock)| (logical.get(), block.get());
    let rows = || {
        let uploads = bench.residency.uploads();
        uploads
            .map(|(layer, pairs)| (layer.get(), pairs.map(numbers).collect()))
            .collect::<Vec<(u32, Vec<(u32, u32)>)>>()
    };
    assert_eq!(rows(), [(10, vec![(42, 2)]), (11, vec![(51, 2), (52, 3)])]);
    assert_ne!(
        with_planted("r4_shares_a_column", rows),
        rows(),
        "the planted fault is not seen"
    );
}

#[test]
fn r17_a_residency_names_its_life_its_slots_and_what_is_pending() {
    let mut bench = bench();
    let pending = |bench: &Bench| (bench.residency.pending_upload(), bench.residency.pending_retain());
    assert_eq!(
        (bench.residency.request_epoch(), bench.residency.pool_generation()),
        (EPOCH, GENERATION)
    );
    let upload = bench.stage([&[40, 41], &[50]]);
    assert_eq!(pending(&bench), (Some(upload.key()), None));
    let staged = bench.residency.staged_tables().unwrap();
    assert_eq!(staged[0].logical_by_slot(), [40, 41].map(|id| Some(LogicalBlock(id))));
    let nothing: [Vec<u32>; 2] = Default::default();
    assert_eq!(bench.tables(), nothing, "what is staged is not resident");
    bench.commit(&upload);
    let table = &bench.residency.tables()[0];
    assert_eq!(table.physical_by_slot(), [PhysicalBlock(0), PhysicalBlock(1)]);
    assert_eq!(
        bench
            .residency
            .tables()
            .iter()
            .map(|table| table.valid().get())
            .collect::<Vec<_>>(),
        [2, 1]
    );
    let more = bench.stage([&[40, 41, 42], &[50]]);
    bench.commit(&more);
    assert_eq!(bench.residency.replaced(), [], "what is appended replaces nothing");
    let (_, retain) = bench.stage_retain([&[0], &[0]]);
    assert_eq!(pending(&bench), (None, Some(retain.key())));
    assert_ne!(
        with_planted("r17_any_pending_is_an_upload", || pending(&bench)),
        pending(&bench),
        "the planted fault is not seen"
    );
    bench.commit(&retain);
    assert_eq!((pending(&bench), bench.residency.staged_tables()), ((None, None), None));
    assert_eq!(
        (bench.residency.map_revision(), bench.residency.revision()),
        (MapRevision(2), SelectionRevision(3))
    );
}

#[test]
fn f2_r42_r44_a_zero_delta_is_finalised_by_all_ranks_and_moves_r_alone() {
    let mut bench = bench();
    let upload = bench.stage([&[40], &[50]]);
    bench.commit(&upload);
    let zero = bench.stage([&[40], &[50]]);
    assert_eq!(bench.residency.destinations(), []);
    assert_eq!(bench.residency.pending_upload(), Some(zero.key()));
    assert_eq!(bench.commit(&zero), []);
    assert_eq!(
        (bench.residency.map_revision(), bench.residency.revision()),
        (MapRevision(1), SelectionRevision(2))
    );
}

#[test]
fn r43_i3_any_other_order_is_refused() {
    let mut bench = bench();
    let plan = bench.plan([&[1], &[]]);
    let operation = bench.stage([&[1], &[]]);
    let again = |bench: &Bench| {
        let (mut residency, mut owners) = (bench.residency.clone(), bench.owners.clone());
        residency.stage_upload(&operation, &plan, &mut owners)
    };
    let busy = StageError::Busy {
        staged: operation.key(),
    };
    assert_eq!(again(&bench), Err(busy));
    assert_eq!(
        with_planted("r43_stages_over_what_is_staged", || again(&bench)),
        Ok(()),
        "the planted fault is not seen"
    );
    bench.ack(&operation, 0);
    let Acked::Committed(evidence) = bench.ack(&operation, 1) else {
        panic!("the last rank")
    };
    bench
        .residency
        .commit(&evidence, &mut bench.owners, &mut Vec::new())
        .unwrap();
    let twice = bench.residency.commit(&evidence, &mut bench.owners, &mut Vec::new());
    assert_eq!(
        twice,
        Err(SettleError::NotStaged {
            found: operation.key(),
            staged: None
        })
    );
    let stale = bench.residency.stage_upload(&operation, &plan, &mut bench.owners);
    assert!(
        matches!(stale, Err(StageError::OtherState { .. })),
        "g + 1 is committed by now"
    );
    let zero = bench.submit(0);
    let moving = bench.residency.stage_upload(&zero, &plan, &mut bench.owners);
    assert_eq!(
        moving,
        Err(StageError::Bytes {
            bytes: 0,
            plan_moves: true
        })
    );
}

#[test]
fn r45_an_operation_of_another_life_or_pool_is_not_staged() {
    let mut bench = bench();
    let plan = bench.plan([&[1], &[]]);
    let operation = bench.submit(64);
    let layers = || [10, 11].map(|layer| (DecoderLayer(layer), GroupId(2)));
    let mut stage = |mut other: Residency| other.stage_upload(&operation, &plan, &mut bench.owners);
    for (epoch, generation) in [(2, 4), (4, 4), (3, 3), (3, 5)] {
        let refused = stage(Residency::new(
            RequestEpoch(epoch),
            PoolGeneration(generation),
            layers(),
        ));
        assert!(
            matches!(refused, Err(StageError::OtherState { .. })),
            "{epoch} {generation}: {refused:?}"
        );
    }
    let mut ahead = Residency::new(EPOCH, GENERATION, layers());
    ahead.map_revision = MapRevision(1);
    assert!(matches!(stage(ahead), Err(StageError::OtherState { .. })));
    // R8: a layer is resident in its group only.
    for other in [[(DecoderLayer(10), GroupId(3))], [(DecoderLayer(12), GroupId(2))]] {
        let (layer, group) = (DecoderLayer(10), GroupId(2));
        let refused = stage(Residency::new(EPOCH, GENERATION, other));
        assert_eq!(refused, Err(StageError::UnknownLayer { layer, group }));
    }
    assert_eq!(stage(Residency::new(EPOCH, GENERATION, layers())), Ok(()));
}

#[test]
fn i3_a_staged_operation_that_does_not_follow_is_found() {
    let mut bench = bench();
    bench.stage([&[1], &[]]);
    let check = |change: fn(&mut Residency)| {
        let mut residency = bench.residency.clone();
        change(&mut residency);
        check_residency(&residency, &bench.owners)
            .err()
            .map(|broken| broken.invariant)
    };
    assert_eq!(check(|_| {}), None);
    assert_eq!(
        check(|residency| residency.map_revision = MapRevision(1)),
        None,
        "a zero delta keeps g"
    );
    let breaks: [fn(&mut Residency); 4] = [
        |residency| residency.map_revision = MapRevision(2),
        |residency| residency.staged.as_mut().unwrap().key.map_revision = MapRevision(2),
        |residency| residency.request_epoch = RequestEpoch(4),
        |residency| residency.pool_generation = PoolGeneration(5),
    ];
    for change in breaks {
        assert_eq!(check(change), Some("I3"));
    }
}

#[test]
fn r59_i7_an_abort_restores_tables_and_free_blocks_once_the_transfers_ended() {
    let mut bench = bench();
    let upload = bench.stage([&[40], &[50]]);
    bench.commit(&upload);
    let (before, free) = (bench.residency.clone(), bench.owners.all()[0].free().to_vec());
    let operation = bench.stage([&[40, 41, 42], &[50]]);
    bench.ack(&operation, 0);
    let aborted = bench
        .ledger
        .abort(b"req-1-2", EPOCH, operation.key().operation)
        .unwrap();
    let abandoned = bench.residency.abort(&aborted).unwrap();
    assert_eq!(bench.residency, before);
    assert_eq!(bench.free(), 5, "I6: a device may still write the two destinations");
    abandoned.settle(&mut bench.owners).unwrap();
    assert_eq!(bench.owners.all()[0].free(), free);
}

#[test]
fn a_pool_that_is_too_small_refuses_the_whole_upload() {
    let mut bench = bench();
    let before = bench.residency.clone();
    let plan = bench.plan([&[0, 1, 2, 3, 4, 5, 6, 7, 8], &[]]);
    let operation = bench.submit(64);
    let refused = bench.residency.stage_upload(&operation, &plan, &mut bench.owners);
    assert!(matches!(refused, Err(StageError::Owner(OwnerError::Exhausted { .. }))));
    assert_eq!(
        (bench.residency, bench.owners.all()[0].free_blocks()),
        (before, BlockCount(8))
    );
}

#[test]
fn r51_r55_a_shared_remap_frees_what_no_layer_names_and_only_uncounts_what_is_shared() {
    let mut bench = bench();
    let upload = bench.stage([&[40, 41, 42, 43], &[50, 51, 52, 53]]);
    bench.commit(&upload);
    bench
        .owners
        .of(GroupId(2))
        .unwrap()
        .acquire(PhysicalBlock(1), Reference::Prefix)
        .unwrap();
    let (kind, retired) = bench.retain([&[0, 3], &[0, 3]]);
    assert_eq!(
        (kind, bench.tables()),
        (RetainKind::SharedTableRemap, [vec![0, 3], vec![0, 3]])
    );
    assert_eq!(retired, [(GroupId(2), PhysicalBlock(2))]);
    assert_eq!(
        bench.residency.tables()[0].logical_by_slot(),
        [Some(LogicalBlock(40)), Some(LogicalBlock(43))]
    );
    assert_eq!(
        (bench.residency.map_revision(), bench.residency.revision()),
        (MapRevision(1), SelectionRevision(2))
    );
}

#[test]
fn r8_r56_tables_change_without_the_owner_and_the_owner_without_the_tables() {
    let mut bench = bench();
    let upload = bench.stage([&[40, 41], &[50, 51]]);
    bench.commit(&upload);
    let (kind, retired) = bench.retain([&[0], &[1]]);
    assert_eq!(
        (kind, bench.tables()),
        (RetainKind::LayerTableRemap, [vec![0], vec![1]])
    );
    assert_eq!(
        (retired, bench.free()),
        (vec![], 6),
        "disjoint keeps: nothing moved, nothing released"
    );
    let tables = bench.tables();
    bench
        .owners
        .of(GroupId(2))
        .unwrap()
        .acquire(PhysicalBlock(0), Reference::Regular)
        .unwrap();
    assert_eq!(bench.tables(), tables);
}

#[test]
fn f16_r54_a_block_that_a_transfer_reads_outlives_its_tables() {
    let mut bench = bench();
    let upload = bench.stage([&[40], &[50]]);
    bench.commit(&upload);
    bench
        .owners
        .of(GroupId(2))
        .unwrap()
        .acquire(PhysicalBlock(0), Reference::Transfer)
        .unwrap();
    let (_, retired) = bench.retain([&[], &[]]);
    assert_eq!((retired, bench.free()), (vec![], 7));
    assert_eq!(
        bench
            .owners
            .of(GroupId(2))
            .unwrap()
            .release(PhysicalBlock(0), Reference::Transfer),
        Ok(true)
    );
}

#[test]
fn f11_f12_a_closed_life_gives_everything_back() {
    let mut bench = bench();
    let upload = bench.stage([&[40, 41], &[50]]);
    bench.commit(&upload);
    bench.stage([&[40, 41, 42], &[50]]);
    let mut retired = Vec::new();
    let abandoned = bench.residency.close(&mut bench.owners, &mut retired).unwrap();
    assert_eq!((retired.len(), abandoned.blocks().len()), (2, 1));
    abandoned.settle(&mut bench.owners).unwrap();
    assert_eq!(bench.owners.all()[0].free_blocks(), BlockCount(8));
}

#[test]
fn r15_r29_the_order_of_the_scores_survives_from_the_selector_to_the_pads() {
    let mut selector = Selector::new();
    let mut layer = |layer, scores: &[f64], budget| {
        let out = selector
            .select(&SelectInput {
                scores,
                block_size: TokenCount(1),
                seq_len: TokenCount(5),
                budget: BlockCount(budget),
                sink: BlockCount(0),
                recent: BlockCount(0),
            })
            .unwrap();
        LayerSelection {
            layer: DecoderLayer(layer),
            group: GroupId(2),
            logical_blocks: out.selected.to_vec(),
            ranked_tail: out.ranked_tail.to_vec(),
        }
    };
    let layers = vec![
        layer(10, &[5.0, 4.0, 3.0, 0.0, 0.0], 3),
        layer(11, &[0.1, 0.2, 0.9, 0.3, 0.7], 1),
    ];
    let (block_size, seq_blocks) = (TokenCount(1), BlockCount(5));
    let selection = BlockSelection::new(EPOCH, SelectionRevision(1), block_size, seq_blocks, layers).unwrap();
    let inputs: Vec<LayerInput<'_>> = selection
        .layers()
        .iter()
        .map(|layer| LayerInput {
            layer: layer.layer,
            group: layer.group,
            active: true,
            want: &layer.logical_blocks,
            held: &[],
            held_valid: BlockCount(0),
            tail: &layer.ranked_tail,
        })
        .collect();
    let mut planner = Planner::new();
    let input = PlanInput {
        seq_blocks: selection.seq_blocks(),
        table_mode: TableMode::Common,
        layers: &inputs,
    };
    let plan = planner.plan(&input).unwrap();
    let pads: Vec<Vec<u32>> = plan
        .layers()
        .map(|row| row.pad.iter().map(|block| block.get()).collect())
        .collect();
    assert_eq!(pads, [vec![], vec![3, 4]], "blocks 4 (0.7) and 3 (0.3), not 0 and 1");
}

#[test]
fn r32_a_full_plan_replaces_the_tables() {
    let (mut bench, freed) = fully_planned();
    assert_eq!(freed, []);
    assert_eq!(bench.tables(), [vec![2, 3], vec![2]]);
    let old = [0, 1, 0, 1].map(|block| (GroupId(2), PhysicalBlock(block)));
    assert_eq!(bench.residency.replaced(), old, "each layer named both");

    // R57: the devices' tables name the old blocks until the retention, also if it is aborted first.
    let (_, retain) = bench.stage_retain([&[0, 1], &[0]]);
    let aborted = bench.ledger.abort(b"req-1-2", EPOCH, retain.key().operation).unwrap();
    let abandoned = bench.residency.abort(&aborted).unwrap();
    assert_eq!((abandoned.blocks().len(), bench.residency.replaced().len()), (0, 4));
    let (_, retain) = bench.stage_retain([&[0, 1], &[0]]);
    assert_eq!(bench.commit(&retain), old[..2]);
    assert_eq!(bench.residency.replaced(), []);

    let early = with_planted("r57_replaced_blocks_freed_early", || fully_planned().1);
    assert_eq!(early, old[..2], "the planted fault is not seen");
}

#[test]
fn r32_a_life_that_ends_gives_up_what_was_replaced() {
    let (bench, _) = fully_planned();
    let mut owners = bench.owners;
    let mut retired = Vec::new();
    bench
        .residency
        .close(&mut owners, &mut retired)
        .unwrap()
        .settle(&mut owners)
        .unwrap();
    assert_eq!((retired.len(), owners.all()[0].free_blocks()), (4, BlockCount(8)));
}

/// Two blocks for each layer, then a full plan for others, committed; and what that freed.
fn fully_planned() -> (Bench, Vec<(GroupId, PhysicalBlock)>) {
    let mut bench = bench();
    let upload = bench.stage([&[40, 41], &[50, 51]]);
    bench.commit(&upload);
    let want = [LogicalBlock(40), LogicalBlock(60)];
    let held = [Some(LogicalBlock(40)), Some(LogicalBlock(41))];
    let row = |layer, want| LayerInput {
        layer: DecoderLayer(layer),
        group: GroupId(2),
        active: true,
        want,
        held: &held,
        held_valid: BlockCount(2),
        tail: &[],
    };
    let layers = [row(10, &want), row(11, &want[..1])];
    let input = PlanInput {
        seq_blocks: BlockCount(100),
        table_mode: TableMode::Common,
        layers: &layers,
    };
    let plan = bench.planner.plan(&input).unwrap().clone();
    assert_eq!(plan.kind(), PlanKind::Full);
    let operation = bench.submit(64);
    bench
        .residency
        .stage_upload(&operation, &plan, &mut bench.owners)
        .unwrap();
    let rows: Vec<usize> = bench.residency.uploads().map(|(_, pairs)| pairs.count()).collect();
    assert_eq!(rows, [2, 1]);
    let freed = bench.commit(&operation);
    (bench, freed)
}

#[test]
fn r57_a_retention_commits_after_all_its_steps_and_names_what_it_released() {
    let mut bench = bench();
    let upload = bench.stage([&[40, 41], &[50, 51]]);
    bench.commit(&upload);
    let (_, operation) = bench.stage_retain([&[1], &[1]]);
    let retention = Retention::new(&operation, vec![DecoderLayer(10), DecoderLayer(11)]);
    let retention = retention
        .admit(Activity {
            running: true,
            ..Activity::default()
        })
        .unwrap();
    let retention = retention.quiesce(Outstanding::default()).unwrap();
    assert_eq!(
        bench.tables(),
        [vec![0, 1], vec![0, 1]],
        "the old tables are in use until the commit"
    );
    let retention = retention.apply(&[DecoderLayer(10), DecoderLayer(11)]).unwrap();
    bench.ack(&operation, 0);
    let Acked::Committed(evidence) = bench.ack(&operation, 1) else {
        panic!("the last rank")
    };
    let retention = retention
        .commit(&evidence, &mut bench.residency, &mut bench.owners)
        .unwrap();
    assert_eq!(retention.released(), [(GroupId(2), PhysicalBlock(0))]);
    assert_eq!(bench.tables(), [vec![1], vec![1]]);
}

#[test]
fn x25_a_resumed_residency_references_what_its_tables_name_and_holds_the_rest_until_the_retention() {
    let mut bench = bench();
    let group = GroupId(2);
    let (layers, blocks) = ([10, 11], [3, 5, 6].map(PhysicalBlock));
    bench.owners.of(group).unwrap().claim(&blocks).unwrap();
    let table = |layer, logical: [u32; 2], physical: [u32; 2]| {
        let logical = logical.map(|block| Some(LogicalBlock(block))).to_vec();
        let physical = physical.map(PhysicalBlock).to_vec();
        LayerTable::new(DecoderLayer(layer), group, logical, physical, BlockCount(2)).unwrap()
    };
    let tables = vec![table(layers[0], [40, 41], [3, 5]), table(layers[1], [50, 41], [3, 5])];
    let revisions = (MapRevision(4), SelectionRevision(9));
    let owned = blocks.map(|block| (group, block)).to_vec();
    let resumed = Residency::resumed(EPOCH, GENERATION, revisions, tables.clone(), owned, &mut bench.owners).unwrap();
    let references = |owners: &Owners| {
        blocks.map(|block| {
            let of = owners.all()[0].references(block);
            (of.layers, of.transfers)
        })
    };
    assert_eq!(references(&bench.owners), [(2, 0), (2, 0), (0, 1)]);
    assert_eq!(resumed.replaced(), [(group, PhysicalBlock(6))]);
    assert_eq!((resumed.tables(), resumed.staged_tables()), (&tables[..], None));
    assert_eq!((resumed.map_revision(), resumed.revision()), revisions);
    let mut retired = Vec::new();
    let abandoned = resumed.close(&mut bench.owners, &mut retired).unwrap();
    assert_eq!((abandoned.blocks().len(), retired.len()), (0, 3));
    assert_eq!(bench.owners.all()[0].free_blocks(), BlockCount(8));
}
