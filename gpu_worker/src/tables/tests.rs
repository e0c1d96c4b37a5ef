//! Tables: rewritten with what is kept, all or nothing, and of equal digest on equal ranks.

use kvsluice_layout::geometry::Geometry;
use kvsluice_layout::ids::{OperationId, PhysicalBlock};
use kvsluice_layout::planted::with_planted;
use kvsluice_layout::record::{NEW_SLOT, Pair};

use super::*;

const GROUP: GroupId = GroupId(0);
const LIMITS: TableLimits = TableLimits {
    requests_max: 3,
    blocks_max: 6,
};

/// Layers 0, 1 and 2 in group 0 (4 tokens a block), layer 3 in group 1 (8 tokens a block).
fn store() -> TableStore {
    let group = |tokens| format!("[[groups]]\nblock_tokens = {tokens}\nsource_blocks = 64\ndevice_blocks = 64\n");
    let layer = |group| format!("[[layers]]\ngroup = {group}\nkv = {{ latent = {{ width = 4 }} }}\n");
    let head = "model = \"t\"\ndtype = \"f32\"\nranks = 1\n";
    let text = [
        head.to_owned(),
        group(4),
        group(8),
        layer(0),
        layer(0),
        layer(0),
        layer(1),
    ]
    .concat();
    TableStore::new(&GeometryMap::new(&Geometry::from_toml(&text).unwrap()).unwrap(), LIMITS)
}

fn operation(g: u64, r: u64) -> Operation {
    Operation {
        request_epoch: RequestEpoch(7),
        operation_id: OperationId(g * 100 + r),
        pool_generation: PoolGeneration::default(),
        map_revision: MapRevision(g),
        selection_revision: SelectionRevision(r),
    }
}

fn new_table(pairs: &[Pair], valid_tokens: u32) -> NewTable<'_> {
    NewTable {
        pairs,
        tags: &[],
        valid_tokens,
    }
}

fn pairs(ids: &[(u32, u32)]) -> Vec<Pair> {
    ids.iter()
        .map(|&(source, destination)| Pair { source, destination })
        .collect()
}

/// A store whose `request` holds `blocks` in one shared table of group 0.
fn holding(request: &[u8], blocks: &[u32]) -> TableStore {
    let mut store = store();
    let mut staged = store.stage(request, &operation(1, 1)).unwrap();
    staged.own(GROUP, blocks.iter().copied()).unwrap();
    let new: Vec<_> = blocks.iter().map(|&block| (NEW_SLOT, block)).collect();
    staged
        .remap_shared(GROUP, new_table(&pairs(&new), blocks.len() as u32 * 4))
        .unwrap();
    store.swap(staged).unwrap();
    store
}

#[test]
fn r51_a_shared_table_is_rewritten_with_the_kept_slots() {
    let mut store = holding(b"a", &[10, 11, 12]);
    let mut staged = store.stage(b"a", &operation(2, 2)).unwrap();
    staged
        .remap_shared(GROUP, new_table(&pairs(&[(0, 10), (2, 12)]), 8))
        .unwrap();
    assert_eq!(
        store.table(b"a", DecoderLayer(1)),
        Some(([10, 11, 12].as_slice(), 12)),
        "old until the swap"
    );
    staged.own_only_named(GROUP).unwrap();
    store.swap(staged).unwrap();
    for layer in 0..3 {
        assert_eq!(store.table(b"a", DecoderLayer(layer)), Some(([10, 12].as_slice(), 8)));
    }
    assert_eq!(store.get(b"a").unwrap().owned(GROUP), [10, 12]);
}

#[test]
fn r8_a_new_table_of_a_layer_changes_no_owner() {
    let owned = || {
        let mut store = holding(b"a", &[10, 11, 12]);
        let mut staged = store.stage(b"a", &operation(2, 2)).unwrap();
        let kept = pairs(&[(0, 10), (2, 12)]);
        staged.remap_layer(DecoderLayer(0), new_table(&kept, 8)).unwrap();
        store.swap(staged).unwrap();
        store.get(b"a").unwrap().owned(GROUP).to_vec()
    };
    assert_eq!(owned(), [10, 11, 12]);
    assert_ne!(
        with_planted("r8_a_table_is_the_owner_set", owned),
        owned(),
        "the planted fault is not seen"
    );
}

#[test]
fn r6_r8_layers_keep_different_slots_and_the_owner_set_is_apart() {
    let mut store = holding(b"a", &[10, 11, 12]);
    let mut staged = store.stage(b"a", &operation(2, 2)).unwrap();
    staged
        .remap_layer(DecoderLayer(0), new_table(&pairs(&[(0, 10), (2, 12)]), 8))
        .unwrap();
    staged
        .remap_layer(DecoderLayer(1), new_table(&pairs(&[(2, 12), (1, 11)]), 8))
        .unwrap();
    store.swap(staged).unwrap();
    let table = |store: &TableStore, layer| store.table(b"a", DecoderLayer(layer)).unwrap().0.to_vec();
    assert_eq!(table(&store, 0), [10, 12]);
    assert_eq!(table(&store, 1), [12, 11], "slot order, not block order");
    assert_eq!(
        table(&store, 2),
        [10, 11, 12],
        "a layer that is not named keeps what it had"
    );
    assert_eq!(store.get(b"a").unwrap().owned(GROUP), [10, 11, 12], "no owner changed");
    assert!(!store.get(b"a").unwrap().is_shared(GROUP));
    // And the other way round: an owner is added, no table changes; then all layers share again.
    let mut staged = store.stage(b"a", &operation(3, 3)).unwrap();
    staged.own(GROUP, [20]).unwrap();
    store.swap(staged).unwrap();
    assert_eq!(table(&store, 1), [12, 11]);
    let mut staged = store.stage(b"a", &operation(4, 4)).unwrap();
    staged
        .remap_shared(GROUP, new_table(&pairs(&[(1, 11), (NEW_SLOT, 20)]), 5))
        .unwrap();
    staged.own_only_named(GROUP).unwrap();
    store.swap(staged).unwrap();
    assert_eq!(store.get(b"a").unwrap().owned(GROUP), [11, 20]);
    assert_eq!(table(&store, 2), [11, 20]);
}

#[test]
fn r53_a_byte_move_leaves_the_blocks_written_in_slot_order() {
    let mut store = holding(b"a", &[10, 11, 12]);
    let mut staged = store.stage(b"a", &operation(2, 2)).unwrap();
    staged
        .move_layer(DecoderLayer(0), new_table(&pairs(&[(10, 10), (12, 11)]), 8))
        .unwrap();
    let unowned = staged.move_layer(DecoderLayer(1), new_table(&pairs(&[(13, 10)]), 4));
    assert_eq!(
        unowned,
        Err(TableFault::NotOwned {
            block: PhysicalBlock(13)
        })
    );
    store.discard(staged);
    let mut staged = store.stage(b"a", &operation(2, 2)).unwrap();
    staged
        .move_layer(DecoderLayer(0), new_table(&pairs(&[(10, 10), (12, 30)]), 8))
        .unwrap();
    store.swap(staged).unwrap();
    assert_eq!(store.table(b"a", DecoderLayer(0)), Some(([10, 30].as_slice(), 8)));
    assert_eq!(store.get(b"a").unwrap().owned(GROUP), [10, 11, 12, 30]);
}

#[test]
fn r59_a_change_that_is_refused_or_discarded_leaves_no_trace() {
    let mut store = holding(b"a", &[10, 11, 12]);
    let before = (store.digest(), store.free_slots.len());
    let faults = [
        (
            pairs(&[(0, 11)]),
            4,
            TableFault::Slot {
                slot: 0,
                found: Some(PhysicalBlock(10)),
                expected: PhysicalBlock(11),
            },
        ),
        (
            pairs(&[(3, 11)]),
            4,
            TableFault::Slot {
                slot: 3,
                found: None,
                expected: PhysicalBlock(11),
            },
        ),
        (
            pairs(&[(NEW_SLOT, 40)]),
            4,
            TableFault::NotOwned {
                block: PhysicalBlock(40),
            },
        ),
        (pairs(&[(1, 11)]), 5, TableFault::Valid { found: 5, most: 4 }),
        (
            pairs(&[(NEW_SLOT, 10); 7]),
            5,
            TableFault::TooLong {
                found: 7,
                blocks_max: 6,
            },
        ),
    ];
    let refused = |store: &mut TableStore| {
        let mut all = true;
        for (row, valid, fault) in &faults {
            let mut staged = store.stage(b"a", &operation(2, 2)).unwrap();
            staged.own(GROUP, [50]).unwrap();
            staged
                .remap_layer(DecoderLayer(0), new_table(&pairs(&[(2, 12)]), 4))
                .unwrap();
            all &= staged.remap_layer(DecoderLayer(1), new_table(row, *valid)) == Err(*fault);
            store.discard(staged);
        }
        let mut staged = store.stage(b"b", &operation(1, 1)).unwrap();
        all &= staged.own(GROUP, [64])
            == Err(TableFault::NotOwned {
                block: PhysicalBlock(64),
            });
        store.discard(staged);
        all
    };
    assert!(refused(&mut store));
    assert_eq!((store.digest(), store.free_slots.len()), before);
    assert_eq!(store.table(b"a", DecoderLayer(0)), Some(([10, 11, 12].as_slice(), 12)));
    for fault in ["trust_old_slots", "tables_name_any_block"] {
        assert!(!with_planted(fault, || refused(&mut store)), "{fault} goes unnoticed");
    }
}

#[test]
fn r45_an_operation_that_does_not_follow_is_refused() {
    let mut store = holding(b"a", &[10]);
    let refused = |store: &mut TableStore, operation: Operation| store.stage(b"a", &operation).map(drop).unwrap_err();
    let stale = Operation {
        pool_generation: PoolGeneration(9),
        ..operation(2, 2)
    };
    let expected = PoolGeneration::default();
    assert_eq!(
        refused(&mut store, stale),
        StageError::Generation {
            found: PoolGeneration(9),
            expected
        }
    );
    let other = Operation {
        request_epoch: RequestEpoch(8),
        ..operation(2, 2)
    };
    let expected = RequestEpoch(7);
    assert_eq!(
        refused(&mut store, other),
        StageError::Epoch {
            found: RequestEpoch(8),
            expected
        }
    );
    assert!(matches!(
        refused(&mut store, operation(0, 2)),
        StageError::Revision { .. }
    ));
    assert!(matches!(
        refused(&mut store, operation(2, 0)),
        StageError::Revision { .. }
    ));
    let staged = store.stage(b"a", &operation(1, 2)).unwrap(); // a zero delta: only r advances (R42)
    assert_eq!(refused(&mut store, operation(2, 2)), StageError::Busy);
    store.swap(staged).unwrap();
    assert_eq!(store.get(b"a").unwrap().selection_revision(), SelectionRevision(2));
}

#[test]
fn r49_a_request_is_its_whole_id_and_its_end_frees_everything() {
    let mut store = store();
    let ids: [&[u8]; 3] = [b"chat-7-1", b"chat-7-2", &[0xff; 256]];
    for id in ids {
        let mut staged = store.stage(id, &operation(1, 1)).unwrap();
        staged.own(GROUP, [id.len() as u32 % 64]).unwrap();
        store.swap(staged).unwrap();
    }
    assert_eq!(
        store.stage(b"chat", &operation(1, 1)).map(drop),
        Err(StageError::Full { requests_max: 3 })
    );
    let exported: Vec<_> = store
        .export()
        .map(|view| (view.request(), view.epoch(), view.owned(GROUP).len()))
        .collect();
    assert_eq!(exported, ids.map(|id| (id, RequestEpoch(7), 1)));
    for id in ids {
        let mut staged = store.stage(id, &operation(2, 2)).unwrap();
        staged.end();
        assert!(store.swap(staged).unwrap().ended);
    }
    assert_eq!(
        (store.export().count(), store.digest(), store.free_slots.len()),
        (0, 0, 3)
    );
}

#[test]
fn x24a_a_reset_empties_everything_and_outdates_what_is_staged() {
    let mut store = holding(b"a", &[10, 11]);
    let staged = store.stage(b"a", &operation(2, 2)).unwrap();
    for _ in 0..2 {
        store.reset(PoolGeneration(5));
        assert_eq!(
            (store.export().count(), store.digest(), store.free_slots.len()),
            (0, 0, 3)
        );
    }
    assert_eq!(store.swap(staged), None);
    assert_eq!(store.export().count(), 0);
    assert!(matches!(
        store.stage(b"a", &operation(3, 3)),
        Err(StageError::Generation { .. })
    ));
}

/// Two ranks that see the same operations, requests interleaved differently. True where their digests agree after
/// every operation, and differ from those of a rank that keeps the same blocks in another slot order.
fn digests_tell_state_from_state() -> bool {
    let run = |order: [&'static [u8]; 4], kept: &[(u32, u32)]| {
        let mut store = store();
        let mut digests = BTreeMap::new();
        for request in order {
            let g = store.get(request).map_or(1, |view| view.map_revision().0 + 1);
            let mut staged = store.stage(request, &operation(g, g)).unwrap();
            if g == 1 {
                staged.own(GROUP, [12, 10, 11]).unwrap();
                staged
                    .remap_shared(
                        GROUP,
                        new_table(&pairs(&[(NEW_SLOT, 10), (NEW_SLOT, 11), (NEW_SLOT, 12)]), 12),
                    )
                    .unwrap();
            } else {
                staged.remap_layer(DecoderLayer(1), new_table(&pairs(kept), 8)).unwrap();
            }
            digests.insert((request, g), store.swap(staged).unwrap().digest);
        }
        (digests, store.digest())
    };
    let rank_0 = run([b"a", b"a", b"b", b"b"], &[(0, 10), (2, 12)]);
    let rank_1 = run([b"b", b"a", b"b", b"a"], &[(0, 10), (2, 12)]);
    let other = run([b"b", b"a", b"b", b"a"], &[(2, 12), (0, 10)]);
    rank_0 == rank_1 && rank_0.1 != other.1 && rank_0.0 != other.0
}

#[test]
fn i9_equal_state_has_an_equal_digest_on_every_rank_and_another_slot_order_another() {
    assert!(digests_tell_state_from_state());
    assert!(!with_planted("digest_without_order", digests_tell_state_from_state));
}

#[test]
fn field_33_field_34_an_image_has_one_stride_and_poison_behind_each_row() {
    let mut store = holding(b"a", &[10, 11, 12]);
    let mut staged = store.stage(b"a", &operation(2, 2)).unwrap();
    staged
        .remap_layer(DecoderLayer(1), new_table(&pairs(&[(1, 11)]), 3))
        .unwrap();
    let mut image = vec![1; 3];
    staged.image(&mut image);
    assert_eq!(image.len() as u32, store.spec().words);
    const P: u32 = TABLE_POISON;
    let whole = [12, 3, 10, 11, 12, P, P, P];
    assert_eq!(
        image,
        [whole, [3, 1, 11, P, P, P, P, P], whole, [0, 0, P, P, P, P, P, P]].concat()
    );
    staged.end();
    staged.image(&mut image);
    assert!(image.chunks(8).all(|row| row == [0, 0, P, P, P, P, P, P]));
    store.discard(staged);
}
