//! The planner's rules, and a slow planner written from the contract to compare with.

use std::collections::{BTreeMap, BTreeSet};

use kvsluice_layout::planted::with_planted;

use super::*;

/// Lists of a layer with the layer and group number.
#[derive(Clone, Debug)]
struct Layer {
    layer: u32,
    group: u32,
    active: bool,
    want: Vec<LogicalBlock>,
    held: Vec<Option<LogicalBlock>>,
    tail: Vec<LogicalBlock>,
}

fn blocks(ids: &[u32]) -> Vec<LogicalBlock> {
    ids.iter().map(|id| LogicalBlock(*id)).collect()
}

fn layer(layer: u32, want: &[u32], held: &[u32], tail: &[u32]) -> Layer {
    let held = held.iter().map(|id| Some(LogicalBlock(*id))).collect();
    Layer {
        layer,
        group: 0,
        active: true,
        want: blocks(want),
        held,
        tail: blocks(tail),
    }
}

fn inputs(layers: &[Layer]) -> Vec<LayerInput<'_>> {
    layers
        .iter()
        .map(|layer| LayerInput {
            layer: DecoderLayer(layer.layer),
            group: GroupId(layer.group),
            active: layer.active,
            want: &layer.want,
            held: &layer.held,
            held_valid: BlockCount(layer.held.len() as u32),
            tail: &layer.tail,
        })
        .collect()
}

/// (kind, (upload, pad, truncated) of each active layer, slots of each group, largest id)
type Plain = (
    PlanKind,
    Vec<(Vec<u32>, Vec<u32>, u32)>,
    Option<Vec<(u32, u32)>>,
    Option<u32>,
);

fn plan(planner: &mut Planner, table_mode: TableMode, seq_blocks: u32, layers: &[Layer]) -> Result<Plain, PlanError> {
    let layers = inputs(layers);
    let plan = planner.plan(&PlanInput {
        seq_blocks: BlockCount(seq_blocks),
        table_mode,
        layers: &layers,
    })?;
    let numbers = |ids: &[LogicalBlock]| ids.iter().map(|id| id.get()).collect();
    let rows = plan
        .layers()
        .map(|row| (numbers(row.upload), numbers(row.pad), row.truncated.get()))
        .collect();
    let slots = plan
        .common_new_slots()
        .map(|slots| slots.iter().map(|(group, n)| (group.get(), n.get())).collect());
    Ok((plan.kind(), rows, slots, plan.max_id().map(LogicalBlock::get)))
}

fn common(layers: &[Layer]) -> Plain {
    plan(&mut Planner::new(), TableMode::Common, 128, layers).unwrap()
}

#[test]
fn r29_held_is_taken_out_of_want() {
    let layers = [layer(0, &[5, 1, 9], &[1], &[])];
    for mode in [TableMode::Common, TableMode::PerLayer] {
        let (kind, rows, ..) = plan(&mut Planner::new(), mode, 12, &layers).unwrap();
        assert_eq!((kind, rows), (PlanKind::Delta, vec![(vec![5, 9], vec![], 0)])); // R30: ascending
    }
}

#[test]
fn r29_the_shortfall_is_filled_in_rank_order() {
    let layers = [layer(0, &[1, 2], &[], &[]), layer(1, &[3], &[], &[19, 4, 5])];
    let second = || common(&layers).1.remove(1);
    assert_eq!(second(), (vec![3, 19], vec![19], 0));
    assert_ne!(
        with_planted("r29_drop_rank_order", second),
        second(),
        "the planted fault is not seen"
    );
}

#[test]
fn f6_r31_pads_repeat_neither_want_nor_held_nor_each_other() {
    let layers = [layer(0, &[5, 6, 7], &[1], &[]), layer(3, &[5], &[1], &[5, 1, 8, 8, 2])];
    let second = || common(&layers).1.remove(1);
    assert_eq!(second(), (vec![2, 5, 8], vec![2, 8], 0));
    assert_ne!(
        with_planted("r31_pad_duplicates", second),
        second(),
        "the planted fault is not seen"
    );
}

#[test]
fn f4_f5_r32_one_exhausted_tail_sends_all_layers_of_all_groups_to_the_full_plan() {
    let mut layers = [
        layer(0, &[5, 6, 7], &[7], &[]),
        layer(1, &[5], &[1], &[5, 1]),
        layer(2, &[3, 4], &[4], &[]),
    ];
    layers[2].group = 1;
    let rows = || common(&layers);
    let full = vec![
        (vec![5, 6, 7], vec![], 1),
        (vec![5], vec![], 0),
        (vec![3, 4], vec![], 0),
    ];
    assert_eq!(rows(), (PlanKind::Full, full, None, Some(7)));
    assert_ne!(
        with_planted("r32_no_full_fallback", rows),
        rows(),
        "the planted fault is not seen"
    );
}

#[test]
fn r38_the_largest_id_may_be_anywhere() {
    let max = |layers: &[Layer]| common(layers).3;
    let layers = [layer(0, &[2], &[1], &[127, 4, 3])];
    assert_eq!(max(&layers), Some(127));
    assert_ne!(
        with_planted("r38_tail_last_is_max", || max(&layers)),
        Some(127),
        "the planted fault is not seen"
    );
    assert_eq!(max(&[layer(0, &[2], &[99], &[4])]), Some(99));
    assert_eq!(max(&[layer(0, &[], &[], &[])]), None);
}

#[test]
fn r39_a_hole_is_no_member() {
    let mut holes = layer(0, &[0, 3], &[3], &[]);
    holes.held = vec![None, Some(LogicalBlock(3)), None];
    let rows = || common(&[holes.clone()]).1;
    assert_eq!(rows(), [(vec![0], vec![], 0)]);
    holes.held.pop();
    let rows = || common(&[holes.clone()]).1;
    assert_ne!(
        with_planted("r39_hole_is_block_zero", rows),
        rows(),
        "the planted fault is not seen"
    );
}

#[test]
fn r40_every_list_is_checked_against_the_sequence() {
    let error = |layers: &[Layer]| plan(&mut Planner::new(), TableMode::PerLayer, 8, layers).unwrap_err();
    for wrong in [
        layer(4, &[8], &[], &[]),
        layer(4, &[], &[8], &[]),
        layer(4, &[], &[], &[0, 8, 0]),
    ] {
        let (layer, block) = (DecoderLayer(4), LogicalBlock(8));
        assert_eq!(
            error(&[wrong]),
            PlanError::OutOfRange {
                layer,
                block,
                seq_blocks: BlockCount(8)
            }
        );
    }
    let beyond = [layer(4, &[1], &[], &[0, 8])];
    let planned = || plan(&mut Planner::new(), TableMode::PerLayer, 8, &beyond).is_ok();
    assert!(
        !planned() && with_planted("r40_tail_unchecked", planned),
        "the planted fault is not seen"
    );
    assert!(matches!(
        error(&[layer(0, &[u32::MAX], &[], &[])]),
        PlanError::OutOfRange { .. }
    ));
}

#[test]
fn r39_slots_past_the_valid_ones_are_not_held_and_there_are_no_more_valid_ones_than_slots() {
    let mut layers = [layer(0, &[5, 6], &[5, 6], &[])];
    let plan = |layers: &[Layer], valid: u32| {
        let mut inputs = inputs(layers);
        inputs[0].held_valid = BlockCount(valid);
        let input = PlanInput {
            seq_blocks: BlockCount(8),
            table_mode: TableMode::PerLayer,
            layers: &inputs,
        };
        let mut planner = Planner::new();
        let plan = planner.plan(&input)?;
        let uploads = plan.layers().flat_map(|row| row.upload.to_vec());
        Ok(uploads.map(LogicalBlock::get).collect::<Vec<_>>())
    };
    assert_eq!(
        [0, 1, 2].map(|valid| plan(&layers, valid)),
        [Ok(vec![5, 6]), Ok(vec![6]), Ok(vec![])]
    );
    let (layer, valid, len) = (DecoderLayer(0), BlockCount(3), 2);
    assert_eq!(plan(&layers, 3), Err(PlanError::HeldValid { layer, valid, len }));
    layers[0].active = false;
    assert_eq!(plan(&layers, 3), Ok(vec![]), "R25: an inactive layer is not looked at");
}

#[test]
fn r25_a_layer_comes_once_also_where_it_is_inactive() {
    let mut layers = [
        layer(4, &[1], &[], &[]),
        layer(2, &[1], &[], &[]),
        layer(4, &[], &[], &[]),
    ];
    for active in [true, false] {
        layers[2].active = active;
        let refused = plan(&mut Planner::new(), TableMode::PerLayer, 8, &layers).unwrap_err();
        assert_eq!(refused, PlanError::DuplicateLayer { layer: DecoderLayer(4) });
    }
}

#[test]
fn f2_f3_r42_an_empty_delta_is_a_plan_of_kind_zero() {
    let (kind, rows, slots, max) = common(&[layer(0, &[1, 2], &[2, 1], &[]), layer(1, &[], &[], &[])]);
    assert_eq!((kind, slots, max), (PlanKind::Zero, Some(vec![(0, 0)]), Some(2)));
    assert_eq!(rows, vec![(vec![], vec![], 0); 2]);
}

#[test]
fn f8_r25_inactive_layers_are_no_rows() {
    let mut layers = [
        layer(0, &[1], &[], &[]),
        layer(1, &[7, 7, 999], &[], &[]),
        layer(2, &[2], &[], &[]),
    ];
    layers[1].active = false; // a sliding-window layer between two full ones
    let inputs = inputs(&layers);
    let mut planner = Planner::new();
    let input = PlanInput {
        seq_blocks: BlockCount(8),
        table_mode: TableMode::Common,
        layers: &inputs,
    };
    let mut rows = || {
        let plan = planner.plan(&input).ok()?;
        Some(plan.layers().map(|row| row.layer.get()).collect::<Vec<_>>())
    };
    assert_eq!(rows(), Some(vec![0, 2]));
    let packed = with_planted("r25_packs_inactive_layers", rows);
    assert_eq!(packed, None, "the planted fault is not seen");
}

#[test]
fn r16_the_counts_of_a_plan_agree_with_its_lists() {
    let padded = [layer(0, &[1, 2], &[], &[]), layer(1, &[3], &[], &[19, 4])];
    let cut = [layer(0, &[1, 2, 3], &[], &[]), layer(1, &[4, 5, 6], &[6], &[])];
    let check = |layers: &[Layer]| {
        let mut planner = Planner::new();
        let layers = inputs(layers);
        let input = PlanInput {
            seq_blocks: BlockCount(128),
            table_mode: TableMode::Common,
            layers: &layers,
        };
        let plan = planner.plan(&input).unwrap();
        for (row, input) in plan.layers().zip(&layers) {
            assert_eq!(row.new_blocks().index(), row.upload.len());
            assert!(
                row.pad
                    .iter()
                    .all(|pad| row.upload.contains(pad) && !input.want.contains(pad))
            );
            let slots = plan.common_new_slots().map(|slots| slots[0].1);
            assert!(slots.is_none_or(|slots| slots == row.new_blocks()));
        }
        let truncated = plan.layers().map(|row| row.truncated.get()).collect::<Vec<_>>();
        (plan.kind(), plan.common_new_slots().is_some(), truncated)
    };
    assert_eq!(check(&padded), (PlanKind::Delta, true, vec![0, 0]));
    // Layer 1 comes up with two blocks where layer 0 needs three: one of layer 0's would have been cut.
    let full = || check(&cut);
    assert_eq!(full(), (PlanKind::Full, false, vec![1, 0]));
    assert_ne!(
        with_planted("r16_truncation_unsaid", full),
        full(),
        "the planted fault is not seen"
    );
}

#[test]
fn r30_an_upload_is_ascending_whatever_the_order_of_want_and_tail() {
    let tail = [11, 3, 8, 2];
    let of = |want: &[u32]| common(&[layer(0, want, &[4], &tail), layer(1, &[20, 21, 22, 23, 24], &[], &[])]).1;
    let wants = [[9, 4, 1], [1, 9, 4], [4, 1, 9]];
    for want in wants {
        assert_eq!(
            of(&want)[0],
            (vec![1, 3, 8, 9, 11], vec![3, 8, 11], 0),
            "R29: three pads by rank"
        );
    }
    assert_ne!(
        with_planted("r30_order_of_want", || of(&wants[0])),
        of(&wants[0]),
        "the planted fault is not seen"
    );
}

/// The plan as the contract words it, with sets of its own.
fn slow_plan(table_mode: TableMode, layers: &[Layer]) -> Plain {
    let active: Vec<&Layer> = layers.iter().filter(|layer| layer.active).collect();
    let held = |layer: &Layer| layer.held.iter().flatten().map(|id| id.get()).collect::<BTreeSet<_>>();
    let want = |layer: &Layer| layer.want.iter().map(|id| id.get()).collect::<BTreeSet<_>>();
    let delta = |layer: &Layer| want(layer).difference(&held(layer)).copied().collect::<Vec<_>>();
    let candidates = |layer: &Layer| {
        let mut seen: BTreeSet<u32> = want(layer).union(&held(layer)).copied().collect();
        layer
            .tail
            .iter()
            .map(|id| id.get())
            .filter(|id| seen.insert(*id))
            .collect::<Vec<_>>()
    };
    let max = active
        .iter()
        .flat_map(|l| l.want.iter().chain(&l.tail).chain(l.held.iter().flatten()))
        .max();
    let max = max.map(|id| id.get());
    let kind = |rows: &[(Vec<u32>, Vec<u32>, u32)]| {
        if rows.iter().all(|row| row.0.is_empty()) {
            PlanKind::Zero
        } else {
            PlanKind::Delta
        }
    };
    if table_mode == TableMode::PerLayer {
        let rows: Vec<_> = active.iter().map(|layer| (delta(layer), vec![], 0)).collect();
        return (kind(&rows), rows, None, max);
    }
    let mut needs: BTreeMap<u32, (usize, usize)> = BTreeMap::new();
    for layer in &active {
        let (slots, available) = needs.entry(layer.group).or_insert((0, usize::MAX));
        *slots = delta(layer).len().max(*slots);
        *available = (delta(layer).len() + candidates(layer).len()).min(*available);
    }
    if needs.values().any(|(slots, available)| available < slots) {
        let truncated = |layer: &Layer| delta(layer).len().saturating_sub(needs[&layer.group].1) as u32;
        let rows = active
            .iter()
            .map(|layer| (want(layer).into_iter().collect(), vec![], truncated(layer)))
            .collect();
        return (PlanKind::Full, rows, None, max);
    }
    let rows: Vec<_> = active
        .iter()
        .map(|layer| {
            let mut upload = delta(layer);
            let mut pads = candidates(layer);
            pads.truncate(needs[&layer.group].0 - upload.len());
            pads.sort_unstable();
            upload.extend(&pads);
            upload.sort_unstable();
            (upload, pads, 0)
        })
        .collect();
    let slots = needs
        .iter()
        .map(|(group, (slots, _))| (*group, *slots as u32))
        .collect();
    (kind(&rows), rows, Some(slots), max)
}

#[test]
fn r29_r30_r31_r32_random_plans_equal_those_of_a_slow_planner() {
    let mut planner = Planner::new();
    for seed in 0..3_000_u64 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let seq_blocks = rng.u32(1..200);
        let layers: Vec<Layer> = (0..rng.u32(0..6))
            .map(|number| {
                let mut ids: Vec<u32> = (0..seq_blocks).collect();
                rng.shuffle(&mut ids);
                let want = rng.usize(0..=ids.len().min(12));
                let tail = rng.usize(want..=ids.len().min(40).max(want));
                let mut layer = layer(number, &ids[..want], &[], &ids[want / 2..tail]);
                rng.shuffle(&mut ids);
                let held = rng.usize(0..=ids.len().min(12));
                layer.held = ids[..held]
                    .iter()
                    .map(|id| rng.u32(0..5).gt(&0).then_some(LogicalBlock(*id)))
                    .collect();
                layer.group = rng.u32(0..2) * 7;
                layer.active = rng.u32(0..5) > 0;
                layer
            })
            .collect();
        for mode in [TableMode::Common, TableMode::PerLayer] {
            let fast = plan(&mut planner, mode, seq_blocks, &layers).unwrap();
            assert_eq!(fast, slow_plan(mode, &layers), "seed {seed}, {mode:?}, {layers:?}");
        }
    }
}
