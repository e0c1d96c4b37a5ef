//! Each invariant on a state that holds it, and on one that does not: a check that never goes red proves nothing.

use core::num::NonZeroU32;

use kvsluice_layout::ids::{
    BlockCount, DecoderLayer, LogicalBlock, OperationId, PoolGeneration, Rank, RequestEpoch, ResidentSlot,
};
use kvsluice_layout::planted::with_planted;

use super::*;
use crate::ledger::{Ack, Acked, Ledger, Operation, Pending, Submission, Submitted};
use crate::planner::{LayerInput, PlanInput, Planner, TableMode};
use crate::retain::{RetainInput, RetainLayer, RetainPlanner};

const ID: &[u8] = b"solo";
const EPOCH: RequestEpoch = RequestEpoch(2);
const GENERATION: PoolGeneration = PoolGeneration(3);
const LAYER: DecoderLayer = DecoderLayer(10);
const GROUP: GroupId = GroupId(4);

/// One request of one layer on one rank.
struct Bench {
    ledger: Ledger,
    owners: Owners,
    residency: Residency,
}

fn bench() -> Bench {
    let mut ledger = Ledger::new(NonZeroU32::MIN);
    ledger.open(ID, EPOCH).unwrap();
    Bench {
        ledger,
        owners: Owners::new([(GROUP, BlockCount(8))]),
        residency: Residency::new(EPOCH, GENERATION, [(LAYER, GROUP)]),
    }
}

impl Bench {
    fn submit(&mut self, number: u64, bytes: u64) -> Operation<Pending> {
        let submission = Submission {
            request_epoch: EPOCH,
            operation: OperationId(number),
            pool_generation: GENERATION,
            revision: SelectionRevision(number),
            bytes,
        };
        match self.ledger.submit(ID, &submission) {
            Ok(Submitted::Pending(operation)) => operation,
            other => panic!("{other:?}"),
        }
    }

    /// Stages an upload of the blocks.
    fn stage(&mut self, number: u64, want: &[u32]) -> Operation<Pending> {
        let want: Vec<LogicalBlock> = want.iter().map(|id| LogicalBlock(*id)).collect();
        let table = &self.residency.tables()[0];
        let layers = [LayerInput {
            layer: LAYER,
            group: GROUP,
            active: true,
            want: &want,
            held: table.logical_by_slot(),
            held_valid: table.valid(),
            tail: &[],
        }];
        let input = PlanInput {
            seq_blocks: BlockCount(100),
            table_mode: TableMode::PerLayer,
            layers: &layers,
        };
        let mut planner = Planner::new();
        let plan = planner.plan(&input).unwrap();
        let operation = self.submit(number, 64);
        self.residency.stage_upload(&operation, plan, &mut self.owners).unwrap();
        operation
    }

    /// Stages a retention of the first slot.
    fn stage_retain(&mut self, number: u64) -> Operation<Pending> {
        let table = &self.residency.tables()[0];
        let keep = [ResidentSlot(0)];
        let layers = [RetainLayer {
            layer: LAYER,
            active: true,
            physical_by_slot: table.physical_by_slot(),
            valid: table.valid(),
            keep: &keep,
        }];
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
        let plan = planner.plan_retain_group(&input).unwrap();
        let operation = self.submit(number, 0);
        self.residency.stage_retain(&operation, &[(GROUP, plan)]).unwrap();
        operation
    }

    fn commit(&mut self, operation: &Operation<Pending>) {
        let ack = Ack {
            key: operation.key(),
            revision: operation.revision(),
            rank: Rank(0),
        };
        match self.ledger.ack(ID, &ack) {
            Ok(Acked::Committed(evidence)) => {
                self.residency
                    .commit(&evidence, &mut self.owners, &mut Vec::new())
                    .unwrap();
            }
            other => panic!("{other:?}"),
        }
    }

    fn state(&self) -> RequestState {
        self.ledger.state(ID).unwrap()
    }

    /// What the tables and the staged operation refer to.
    fn holders(&self) -> Vec<(GroupId, PhysicalBlock, Reference)> {
        let tables = self.residency.tables().iter();
        let named = tables
            .flat_map(|table| table.named())
            .map(|block| (GROUP, *block, Reference::Layer));
        let staged = self.residency.destinations().iter();
        named
            .chain(staged.map(|(group, block)| (*group, *block, Reference::Transfer)))
            .collect()
    }
}

/// The invariant that a check found broken.
fn found(outcome: Result<(), Broken>) -> Option<&'static str> {
    outcome.err().map(|broken| broken.invariant)
}

#[test]
fn i2_a_table_that_names_a_block_its_groups_owner_has_not_is_found() {
    let mut bench = bench();
    let upload = bench.stage(1, &[40, 41]);
    bench.commit(&upload);
    assert_eq!(check_residency(&bench.residency, &bench.owners), Ok(()));
    for other in [
        Owners::new([(GROUP, BlockCount(8))]),
        Owners::new([(GroupId(5), BlockCount(8))]),
    ] {
        assert_eq!(found(check_residency(&bench.residency, &other)), Some("I2"));
    }
    bench
        .owners
        .of(GROUP)
        .unwrap()
        .release(PhysicalBlock(1), Reference::Layer)
        .unwrap();
    assert_eq!(found(check_residency(&bench.residency, &bench.owners)), Some("I2"));
}

#[test]
fn i3_what_is_staged_follows_the_committed_state_and_is_what_the_ledger_has_pending() {
    let mut bench = bench();
    let upload = bench.stage(1, &[40, 41]);
    assert_eq!(check_residency(&bench.residency, &bench.owners), Ok(()));
    assert_eq!(check_ledger(&bench.state(), &bench.residency), Ok(()));
    let other = RequestState {
        pending: None,
        ..bench.state()
    };
    assert_eq!(found(check_ledger(&other, &bench.residency)), Some("I3"));
    bench.commit(&upload);
    assert_eq!(check_ledger(&bench.state(), &bench.residency), Ok(()));
    bench.stage_retain(2);
    assert_eq!(check_residency(&bench.residency, &bench.owners), Ok(()));
    assert_eq!(check_ledger(&bench.state(), &bench.residency), Ok(()));
}

#[test]
fn i4_revisions_move_at_a_commit_only_by_one_and_never_back() {
    let at = |g, r| (MapRevision(g), SelectionRevision(r));
    let check = |before, after, committed| found(check_progress(before, after, committed));
    assert_eq!(check(at(3, 7), at(3, 7), false), None);
    assert_eq!(check(at(3, 7), at(4, 8), true), None, "bytes move g and r");
    assert_eq!(check(at(3, 7), at(3, 9), true), None, "R44: a zero delta moves r alone");
    for (after, committed) in [
        (at(3, 8), false),
        (at(4, 7), false),
        (at(3, 7), true),
        (at(4, 7), true),
        (at(3, 6), true),
        (at(2, 8), true),
        (at(5, 8), true),
    ] {
        assert_eq!(check(at(3, 7), after, committed), Some("I4"), "{after:?} {committed}");
    }
    let mut bench = bench();
    let upload = bench.stage(1, &[40]);
    bench.commit(&upload);
    let ahead = RequestState {
        revision: SelectionRevision(2),
        ..bench.state()
    };
    assert_eq!(found(check_ledger(&ahead, &bench.residency)), Some("I4"));
}

#[test]
fn i5_a_block_is_free_or_owned_with_exactly_its_references() {
    let mut bench = bench();
    let upload = bench.stage(1, &[40, 41]);
    bench.commit(&upload);
    bench.stage(2, &[40, 41, 42]);
    let mut holders = bench.holders();
    for (block, kind) in [(0, Reference::Prefix), (1, Reference::Regular)] {
        bench
            .owners
            .of(GROUP)
            .unwrap()
            .acquire(PhysicalBlock(block), kind)
            .unwrap();
        holders.push((GROUP, PhysicalBlock(block), kind));
    }
    let check = |holders: &[_]| found(check_references(&bench.owners, holders.iter().copied()));
    assert_eq!((holders.len(), check(&holders)), (5, None));
    for missing in 0..holders.len() {
        let mut fewer = holders.clone();
        fewer.remove(missing);
        assert_eq!(check(&fewer), Some("I5"), "without {:?}", holders[missing]);
    }
    let kinds = [
        Reference::Layer,
        Reference::Regular,
        Reference::Prefix,
        Reference::Transfer,
    ];
    for (block, kind) in (0..9).flat_map(|block| kinds.map(|kind| (block, kind))) {
        let mut more = holders.clone();
        more.push((GROUP, PhysicalBlock(block), kind));
        assert_eq!(check(&more), Some("I5"), "block {block} {kind:?}");
    }
}

#[test]
fn i5_a_block_that_is_free_twice_is_found() {
    let mut bench = bench();
    let upload = bench.stage(1, &[40]);
    bench.commit(&upload);
    let owner = bench.owners.of(GROUP).unwrap();
    owner.acquire(PhysicalBlock(0), Reference::Prefix).unwrap();
    with_planted("r54_r55_frees_shared", || {
        for kind in [Reference::Layer, Reference::Prefix] {
            assert_eq!(owner.release(PhysicalBlock(0), kind), Ok(true));
        }
    });
    let broken = check_references(&bench.owners, []).unwrap_err();
    assert_eq!(
        broken.to_string(),
        format!("I5 is broken: {:?} of {GROUP:?} is free twice", PhysicalBlock(0))
    );
}

#[test]
fn i6_a_block_in_flight_is_known_to_the_owner_and_written_by_one_operation() {
    let mut bench = bench();
    let upload = bench.stage(1, &[40, 41]);
    bench.commit(&upload);
    bench.stage(2, &[40, 41, 42]);
    let check = |blocks: &[(u64, u32)]| {
        let destinations = blocks
            .iter()
            .map(|(operation, block)| (*operation, GROUP, PhysicalBlock(*block)));
        found(check_in_flight(&bench.owners, destinations))
    };
    assert_eq!(check(&[(2, 2)]), None);
    assert_eq!(check(&[(2, 2), (2, 2)]), None, "two ranks of one operation");
    assert_eq!(check(&[(2, 2), (3, 2)]), Some("I6"), "two writers");
    assert_eq!(check(&[(1, 0)]), Some("I6"), "its transfer ended");
    assert_eq!(check(&[(1, 5)]), Some("I6"), "it is free");
    let elsewhere = check_in_flight(&bench.owners, [(2, GroupId(5), PhysicalBlock(2))]);
    assert_eq!(found(elsewhere), Some("I6"), "no such group");
}

#[test]
fn i7_a_request_that_is_not_as_before_is_found() {
    let mut bench = bench();
    let before = bench.residency.clone();
    let upload = bench.stage(1, &[40]);
    assert_eq!(found(check_restored(&before, &bench.residency)), Some("I7"));
    let aborted = bench.ledger.abort(ID, EPOCH, upload.key().operation).unwrap();
    bench
        .residency
        .abort(&aborted)
        .unwrap()
        .settle(&mut bench.owners)
        .unwrap();
    assert_eq!(check_restored(&before, &bench.residency), Ok(()));
}

#[test]
fn i8_the_ledger_is_never_ahead_of_a_rank_and_equal_once_it_is_published() {
    let mut bench = bench();
    let upload = bench.stage(1, &[40]);
    bench.commit(&upload);
    let check = |g, r, published| {
        let rank = RankView {
            map_revision: MapRevision(g),
            revision: SelectionRevision(r),
            tables: Vec::new(),
        };
        found(check_order(&bench.state(), &rank, published))
    };
    assert_eq!([check(1, 1, true), check(1, 1, false), check(2, 2, false)], [None; 3]);
    for (g, r, published) in [(0, 0, false), (0, 0, true), (2, 2, true), (1, 2, true), (2, 1, true)] {
        assert_eq!(check(g, r, published), Some("I8"), "{g} {r} {published}");
    }
}

#[test]
fn i9_ranks_that_differ_in_a_revision_or_a_table_are_found() {
    let mut bench = bench();
    let upload = bench.stage(1, &[40, 41]);
    bench.commit(&upload);
    let view = RankView {
        map_revision: MapRevision(1),
        revision: SelectionRevision(1),
        tables: bench.residency.tables().to_vec(),
    };
    let check = |other: RankView| check_ranks(&[view.clone(), view.clone(), other]);
    assert_eq!(check(view.clone()), Ok(()));
    let others = [
        RankView {
            map_revision: MapRevision(2),
            ..view.clone()
        },
        RankView {
            revision: SelectionRevision(2),
            ..view.clone()
        },
        RankView {
            tables: Vec::new(),
            ..view.clone()
        },
    ];
    for other in others {
        let broken = check(other).unwrap_err();
        assert_eq!(
            (broken.invariant, broken.detail.as_str()),
            ("I9", "rank 1 and rank 2 differ")
        );
    }
}
