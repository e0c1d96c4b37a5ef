//! The rules of retention.

use kvsluice_layout::planted::with_planted;

use super::*;

type Layer = (Vec<PhysicalBlock>, Vec<ResidentSlot>, bool);

fn layer(physical: &[u32], keep: &[u32]) -> Layer {
    let slots = keep.iter().map(|slot| ResidentSlot(*slot)).collect();
    (
        physical.iter().map(|block| PhysicalBlock(*block)).collect(),
        slots,
        true,
    )
}

fn inactive(mut layer: Layer) -> Layer {
    layer.2 = false;
    layer
}

fn rows(layers: &[Layer]) -> Vec<RetainLayer<'_>> {
    (0..)
        .zip(layers)
        .map(|(number, (physical_by_slot, keep, active))| RetainLayer {
            layer: DecoderLayer(number),
            active: *active,
            physical_by_slot,
            valid: BlockCount(physical_by_slot.len() as u32),
            keep,
        })
        .collect()
}

fn input<'a>(layers: &'a [RetainLayer<'a>], supports_layer_tables: bool) -> RetainInput<'a> {
    RetainInput {
        request_epoch: RequestEpoch(1),
        pool_generation: PoolGeneration(2),
        expected_request_epoch: RequestEpoch(1),
        expected_pool_generation: PoolGeneration(2),
        supports_layer_tables,
        layers,
        protected: &[],
    }
}

/// (kind, table of each active layer, released)
fn retain(layers: &[Layer], supports_layer_tables: bool) -> (RetainKind, Vec<Vec<u32>>, Vec<u32>) {
    let rows = rows(layers);
    let mut planner = RetainPlanner::new();
    let plan = planner.plan_retain_group(&input(&rows, supports_layer_tables)).unwrap();
    let numbers = |ids: &[PhysicalBlock]| ids.iter().map(|id| id.get()).collect();
    (
        plan.kind(),
        plan.layers().map(|(_, _, table)| numbers(table)).collect(),
        numbers(plan.released()),
    )
}

#[test]
fn r51_the_table_is_rewritten_with_the_slots_that_are_kept() {
    let remap = || retain(&[layer(&[10, 11, 12], &[0, 2]), layer(&[10, 11, 12], &[0, 2])], true);
    assert_eq!(remap(), (RetainKind::SharedTableRemap, vec![vec![10, 12]; 2], vec![11]));
    assert_ne!(
        with_planted("r51_prefix", remap),
        remap(),
        "the planted fault is not seen"
    );
}

#[test]
fn r51_a_shared_table_is_there_only_where_it_is_exact() {
    let of = |layers: &[Layer]| {
        let rows = rows(layers);
        let mut planner = RetainPlanner::new();
        let plan = planner.plan_retain_group(&input(&rows, true)).unwrap();
        plan.shared_table().map(<[PhysicalBlock]>::to_vec)
    };
    let shared = Some([10, 12].map(PhysicalBlock).to_vec());
    assert_eq!(
        of(&[layer(&[10, 11, 12], &[0, 2]), layer(&[10, 11, 12], &[0, 2])]),
        shared
    );
    assert_eq!(
        of(&[layer(&[10, 11, 12], &[0, 2]), layer(&[10, 11, 12], &[1, 2])]),
        None
    );
    assert_eq!(
        of(&[layer(&[10, 11, 12], &[0, 2]), layer(&[10, 13, 12], &[0, 2])]),
        None,
        "other tables"
    );
    assert_eq!(of(&[inactive(layer(&[10], &[0]))]), Some(vec![]));
}

#[test]
fn r53_a_layer_comes_once_and_any_block_number_is_released() {
    let twice = [layer(&[10], &[0]), layer(&[11], &[0])];
    let mut rows = rows(&twice);
    rows[1].layer = rows[0].layer;
    let refused = RetainPlanner::new().plan_retain_group(&input(&rows, true)).unwrap_err();
    let layer_0 = DecoderLayer(0);
    assert_eq!(refused, RetainError::DuplicateLayer { layer: layer_0 });
    for block in [0, 1, 63, 64, 128, 5_000] {
        assert_eq!(retain(&[layer(&[block], &[])], true).2, [block]);
    }
}

#[test]
fn r11_r51_any_kind_can_be_asked_for_and_a_shared_table_only_where_it_is_exact() {
    let kinds = |second: &[u32]| {
        let layers = [layer(&[10, 11, 12], &[0, 2]), layer(&[10, 11, 12], second)];
        let rows = rows(&layers);
        let of = |kind| {
            let mut planner = RetainPlanner::new();
            let plan = planner.plan_retain_group_as(&input(&rows, true), kind).unwrap();
            plan.map(|plan| (plan.kind() == kind, plan.released().to_vec()))
        };
        [
            of(RetainKind::ExistingByteMovePlan),
            of(RetainKind::SharedTableRemap),
            of(RetainKind::LayerTableRemap),
        ]
    };
    let released = |block: &[u32]| Some((true, block.iter().map(|id| PhysicalBlock(*id)).collect()));
    assert_eq!(kinds(&[0, 2]), [released(&[12]), released(&[11]), released(&[11])]);
    assert_eq!(kinds(&[1, 2]), [released(&[12]), None, released(&[])]);
}

#[test]
fn r6_no_single_table_serves_layers_that_keep_different_slots() {
    let layers = [layer(&[10, 11, 12], &[0, 2]), layer(&[10, 11, 12], &[1, 2])];
    let remap = || retain(&layers, true);
    assert_eq!(
        remap(),
        (RetainKind::LayerTableRemap, vec![vec![10, 12], vec![11, 12]], vec![])
    );
    let moved = || retain(&layers, false);
    let (kind, _, released) = moved();
    assert_eq!((kind, released), (RetainKind::ExistingByteMovePlan, vec![12]));
    for plan in [&remap as &dyn Fn() -> _, &moved] {
        let shared = with_planted("r6_one_table_for_all", plan);
        assert_ne!(shared, plan(), "the planted fault is not seen");
    }
}

#[test]
fn r9_every_plan_attends_what_its_layer_keeps_and_no_union() {
    let subsets: [&[u32]; 8] = [&[], &[0], &[1], &[2], &[0, 1], &[0, 2], &[1, 2], &[0, 1, 2]];
    let exact = || {
        let both = subsets.iter().flat_map(|a| subsets.iter().map(move |b| (*a, *b)));
        both.into_iter().all(|(a, b)| {
            let of = |keep: &[u32]| keep.iter().map(|slot| 10 + slot).collect::<Vec<_>>();
            [true, false].iter().all(|layer_tables| {
                let (_, tables, _) = retain(&[layer(&[10, 11, 12], a), layer(&[10, 11, 12], b)], *layer_tables);
                tables == [of(a), of(b)]
            })
        })
    };
    assert!(exact());
    assert!(!with_planted("r9_union", exact), "the planted fault is not seen");
}

#[test]
fn r7_r52_equal_sets_in_another_order_share_no_table() {
    let remap = || retain(&[layer(&[10, 11, 12], &[0, 2]), layer(&[10, 11, 12], &[2, 0])], true);
    assert_eq!(remap().0, RetainKind::LayerTableRemap);
    assert_ne!(
        with_planted("r7_r52_compare_as_sets", remap),
        remap(),
        "the planted fault is not seen"
    );
}

#[test]
fn r53_a_shared_table_keeps_the_resident_order() {
    let remap = || retain(&[layer(&[10, 11, 12], &[2, 0]), layer(&[10, 11, 12], &[2, 0])], true);
    assert_eq!(remap().0, RetainKind::LayerTableRemap);
    assert_ne!(
        with_planted("r53_any_order", remap),
        remap(),
        "the planted fault is not seen"
    );
}

#[test]
fn r7_one_inactive_layer_may_differ_and_keeps_what_it_names() {
    let layers = [layer(&[10, 11], &[1]), inactive(layer(&[10, 11], &[0]))];
    assert_eq!(
        retain(&layers, true),
        (RetainKind::SharedTableRemap, vec![vec![11]], vec![])
    );
}

#[test]
fn r53_epoch_generation_bounds_and_repeats_are_checked_in_this_order() {
    let layers = [layer(&[10, 11], &[5, 0, 0])];
    let mut rows = rows(&layers);
    rows[0].valid = BlockCount(3);
    let mut planner = RetainPlanner::new();
    let mut error = |input: &RetainInput<'_>| planner.plan_retain_group(input).unwrap_err();
    let good = input(&rows, true);
    let old = RetainInput {
        request_epoch: RequestEpoch(0),
        pool_generation: PoolGeneration(1),
        ..good
    };
    assert!(matches!(error(&old), RetainError::StaleEpoch { .. }));
    let stale = RetainInput {
        request_epoch: RequestEpoch(1),
        ..old
    };
    assert!(matches!(error(&stale), RetainError::StaleGeneration { .. }));
    assert!(
        with_planted("r53_generation_unchecked", || matches!(
            error(&stale),
            RetainError::Valid { .. }
        )),
        "the planted fault is not seen"
    );
    assert!(matches!(error(&good), RetainError::Valid { .. }));
    rows[0].valid = BlockCount(2);
    assert!(matches!(
        error(&input(&rows, true)),
        RetainError::SlotOutOfRange {
            slot: ResidentSlot(5),
            ..
        }
    ));
    rows[0].keep = &layers[0].1[1..];
    assert!(matches!(
        error(&input(&rows, true)),
        RetainError::DuplicateSlot {
            slot: ResidentSlot(0),
            ..
        }
    ));
}

#[test]
fn r56_disjoint_keeps_move_nothing_and_release_nothing() {
    let remap = || retain(&[layer(&[10, 11], &[0]), layer(&[10, 11], &[1])], true);
    assert_eq!(remap(), (RetainKind::LayerTableRemap, vec![vec![10], vec![11]], vec![]));
    assert_ne!(
        with_planted("r56_one_layer_decides", remap),
        remap(),
        "the planted fault is not seen"
    );
}

#[test]
fn r61_recent_partial_draft_and_window_blocks_are_never_released() {
    let layers = [layer(&[10, 11, 12], &[0])];
    let rows = rows(&layers);
    let released = || {
        let mut planner = RetainPlanner::new();
        let input = RetainInput {
            protected: &[PhysicalBlock(12), PhysicalBlock(90)],
            ..input(&rows, true)
        };
        planner.plan_retain_group(&input).unwrap().released().to_vec()
    };
    assert_eq!(released(), [PhysicalBlock(11)]);
    assert_ne!(
        with_planted("r61_clears_protected", released),
        released(),
        "the planted fault is not seen"
    );
}
