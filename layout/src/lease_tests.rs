//! What the lease table refuses, and how long a block stays leased.

use super::*;
use crate::ids::DecoderLayer;
use crate::plan::{Operation, PlanDraft};
use crate::presets::preset;

fn map() -> GeometryMap {
    GeometryMap::new(&preset("sample-hybrid").expect("preset")).expect("geometry")
}

fn pair(source: u32, destination: u32) -> Pair {
    Pair { source, destination }
}

fn upload(layer: u32, group: u32, pairs: &[(u32, u32)]) -> PlanDraft {
    let mut draft = PlanDraft::new();
    draft.upload(b"r", Operation::default());
    add(&mut draft, layer, group, 1, pairs);
    draft
}

fn add(draft: &mut PlanDraft, layer: u32, group: u32, kind: u16, pairs: &[(u32, u32)]) {
    draft.raw_row(layer, group, kind, 0, pairs.iter().map(|&(s, d)| pair(s, d)));
}

fn retain(mode: RetainMode, layer: Option<u32>, group: u32, pairs: &[(u32, u32)]) -> PlanDraft {
    let mut draft = PlanDraft::new();
    draft.retain(b"r", Operation::default(), mode);
    let pairs = pairs.iter().map(|&(s, d)| pair(s, d));
    draft.table_row(layer.map(DecoderLayer), GroupId(group), 1, pairs);
    draft
}

fn write_back(layer: u32, group: u32, pairs: &[(u32, u32)]) -> PlanDraft {
    let mut draft = PlanDraft::new();
    draft.write_back(b"r", Operation::default(), 0);
    add(&mut draft, layer, group, 0, pairs);
    draft
}

fn two(mut draft: PlanDraft, layer: u32, group: u32, pairs: &[(u32, u32)]) -> PlanDraft {
    add(&mut draft, layer, group, 1, pairs);
    draft
}

/// Every refusal of X9 that rows can meet, with its code and what it must say. Group 0: sources [0, 40) and gathered
/// [40, 48), 0 null; devices [0, 24), 0 null. Layers 0, 4 and 6 are of group 0, and 6 is an alias of 0.
fn refusals() -> Vec<(PlanDraft, u16, &'static str)> {
    let mut counted = upload(0, 0, &[(1, 1)]);
    counted.valid(2);
    let mut rows_of_keep = PlanDraft::new();
    rows_of_keep.keep(b"r", Operation::default());
    add(&mut rows_of_keep, 0, 0, 1, &[]);
    let mut unknown_kind = upload(0, 0, &[(1, 1)]);
    add(&mut unknown_kind, 4, 0, 3, &[(1, 2)]);
    let mut gathered = PlanDraft::new();
    gathered.upload(b"r", Operation::default());
    add(&mut gathered, 0, 0, 2, &[(39, 1)]);
    vec![
        (rows_of_keep, 6, "rows of a record without rows: found 1, expected 0"),
        (counted, 7, "row 0: valid count: found 2, expected at most 1"),
        (
            upload(9, 0, &[(1, 1)]),
            9,
            "row 0: layer 9 is unknown: the geometry has 9 layers",
        ),
        (
            upload(ALL_LAYERS, 0, &[(1, 1)]),
            9,
            "row 0: layer 4294967295 is unknown",
        ),
        (
            retain(RetainMode::SharedTable, Some(0), 0, &[(1, 1)]),
            9,
            "row 0: layer 0 is unknown",
        ),
        (upload(0, 1, &[(1, 1)]), 10, "row 0: group: found 1, expected 0"),
        (
            retain(RetainMode::SharedTable, None, 4, &[(1, 1)]),
            10,
            "row 0: group: found 4, expected 4",
        ),
        (
            two(upload(0, 0, &[(1, 1)]), 0, 0, &[(2, 2)]),
            11,
            "row 1: layer 0 fills a tensor that an earlier row",
        ),
        (
            two(upload(0, 0, &[(1, 1)]), 6, 0, &[(2, 2)]),
            11,
            "row 1: layer 6 fills a tensor that an earlier row",
        ),
        (unknown_kind, 12, "row 1: source kind 3 is not one that was negotiated"),
        (upload(0, 0, &[(40, 1)]), 13, "row 0: source 40 is outside [0, 40)"),
        (gathered, 13, "row 0: source 39 is outside [40, 48)"),
        (
            upload(0, 0, &[(u32::MAX, 1)]),
            13,
            "row 0: source 4294967295 is outside [0, 40)",
        ),
        (
            retain(RetainMode::LayerTables, Some(0), 0, &[(24, 1)]),
            13,
            "row 0: source 24 is outside [0, 24)",
        ),
        (upload(0, 0, &[(1, 24)]), 14, "row 0: destination 24 is outside [0, 24)"),
        (
            write_back(0, 0, &[(1, 48)]),
            14,
            "row 0: destination 48 is outside [0, 48)",
        ),
        (upload(0, 0, &[(0, 1)]), 15, "row 0: 0 is the null block of its pool"),
        (upload(0, 0, &[(1, 0)]), 15, "row 0: 0 is the null block of its pool"),
        (upload(3, 3, &[(1, 11)]), 15, "row 0: 11 is the null block of its pool"),
        (
            upload(0, 0, &[(1, 5), (2, 6), (3, 5)]),
            16,
            "row 0: destination 5 appears twice",
        ),
        (
            retain(RetainMode::SharedTable, None, 0, &[(0, 5), (1, 5)]),
            16,
            "row 0: destination 5 appears twice",
        ),
        (
            upload(0, 0, &[(1, 20)]),
            17,
            "row 0: destination 20 is leased by an operation in flight",
        ),
        (
            upload(0, 0, &[(30, 1)]),
            18,
            "row 0: source 30 is written by an operation in flight",
        ),
        (
            upload(0, 0, &[(36, 1)]),
            19,
            "row 0: source 36 is not pinned yet: all ranks have registered the first 35",
        ),
    ]
}

/// A table in which an upload writes device block 20 of group 0, a write-back writes host block 30, and host blocks from
/// 35 on are not pinned; the gather region is, for the rows that name it.
fn busy() -> LeaseTable {
    let mut table = LeaseTable::new(&map());
    for held in [upload(0, 0, &[(3, 20)]), write_back(4, 0, &[(4, 30)])] {
        table.check(&held.lease_rows()).expect("free blocks");
        table.take(&held.lease_rows());
    }
    table.set_ready(GroupId(0), 35);
    table
}

#[test]
fn x9_every_refusal_names_the_row_what_was_found_and_what_was_expected() {
    let mut table = busy();
    let leased = table.leased_blocks();
    for (draft, code, message) in refusals() {
        let refusal = table.check(&draft.lease_rows()).expect_err(message);
        let said = refusal.to_string();
        assert!(
            refusal.code() == code && said.contains(message),
            "{}: {said:?}, not {message:?}",
            refusal.code()
        );
        assert_eq!(table.leased_blocks(), leased, "a check changes no lease");
    }
}

#[test]
fn x9_rows_whose_pairs_lie_outside_the_record_are_refused() {
    let mut table = LeaseTable::new(&map());
    let pairs = [pair(1, 1)];
    for (pairs_at, count, end) in [(1, 1, 2), (u32::MAX, 1, 1 << 32), (0, u32::MAX, u64::from(u32::MAX))] {
        let row = RowRecord {
            source_kind: 1,
            pairs_at,
            pairs: count,
            ..RowRecord::default()
        };
        let rows = Rows {
            kind: Kind::Upload,
            mode: None,
            rows: &[row],
            pairs: &pairs,
        };
        let expected = Refusal::RowCounts {
            row: 0,
            what: "end of pairs",
            found: end,
            expected: 1,
        };
        assert_eq!(table.check(&rows), Err(expected));
    }
}

#[cfg(feature = "planted")]
#[test]
fn x9_the_checks_find_what_a_planted_fault_lets_through() {
    use crate::planted::with_planted;
    let passes = |draft: &PlanDraft| busy().check(&draft.lease_rows()).is_ok();
    let (twice, busy_destination) = (upload(0, 0, &[(1, 5), (3, 5)]), upload(0, 0, &[(1, 20)]));
    assert!(!passes(&twice) && !passes(&busy_destination));
    assert!(with_planted("x9_skip_duplicates", || passes(&twice)));
    assert!(with_planted("x9_skip_in_flight", || passes(&busy_destination)));
    let null = upload(0, 0, &[(1, 0)]);
    assert!(!passes(&null) && with_planted("x9_skip_null", || passes(&null)));
}

#[test]
fn x9_one_block_may_be_the_destination_of_several_layers_and_layers_that_alias_may_have_tables_apart() {
    let mut table = LeaseTable::new(&map());
    let layers = two(upload(0, 0, &[(1, 5)]), 4, 0, &[(1, 5)]);
    assert_eq!(
        table.check(&layers.lease_rows()),
        Ok(()),
        "a block holds all layers of its group"
    );
    table.take(&layers.lease_rows());
    assert_eq!(table.leased_blocks(), 2);
    table.release(&layers.lease_rows());
    assert_eq!(table.leased_blocks(), 0);
    let mut tables = retain(RetainMode::LayerTables, Some(0), 0, &[(0, 5)]);
    tables.table_row(Some(DecoderLayer(6)), GroupId(0), 1, [pair(0, 6)]);
    assert_eq!(table.check(&tables.lease_rows()), Ok(()));
    let mut groups = retain(RetainMode::SharedTable, None, 0, &[(0, 5)]);
    groups.table_row(None, GroupId(1), 1, [pair(0, 5)]);
    assert_eq!(
        table.check(&groups.lease_rows()),
        Ok(()),
        "one id of two groups is two blocks (X5)"
    );
}

#[test]
fn x14_a_block_in_k_operations_is_free_after_k() {
    let mut table = LeaseTable::new(&map());
    let readers: Vec<_> = (1..=9).map(|d| upload(0, 0, &[(7, d)])).collect();
    for (taken, draft) in readers.iter().enumerate() {
        assert_eq!(table.source_leases(GroupId(0), SourceBlock(7)), taken as u32);
        table.check(&draft.lease_rows()).expect("readers share");
        table.take(&draft.lease_rows());
    }
    let refill = write_back(4, 0, &[(10, 7)]);
    for left in (1..=9_u32).rev() {
        assert_eq!(table.source_leases(GroupId(0), SourceBlock(7)), left);
        let refused = Refusal::DestinationInFlight { row: 0, id: 7 };
        assert_eq!(
            table.check(&refill.lease_rows()),
            Err(refused),
            "nobody writes what {left} read"
        );
        table.release(&readers[left as usize - 1].lease_rows());
    }
    assert_eq!(table.leased_blocks(), 0);
    assert_eq!(table.check(&refill.lease_rows()), Ok(()));
}

#[test]
fn x14_a_writer_is_alone_with_its_block_and_readers_share() {
    // Every kind that leases a block. Each uses block 5, and other blocks of its own.
    let of_the_device = |own: u32| {
        [
            ("upload", false, upload(0, 0, &[(own, 5)])),
            ("write-back", true, write_back(0, 0, &[(5, own)])),
            ("table", true, retain(RetainMode::LayerTables, Some(0), 0, &[(0, 5)])),
            (
                "shared table",
                true,
                retain(RetainMode::SharedTable, None, 0, &[(0, 5)]),
            ),
            (
                "move from",
                false,
                retain(RetainMode::ByteMove, Some(0), 0, &[(5, own)]),
            ),
            ("move to", false, retain(RetainMode::ByteMove, Some(0), 0, &[(own, 5)])),
        ]
    };
    let of_the_host = |own: u32| {
        [
            ("upload", true, upload(0, 0, &[(5, own)])),
            ("write-back", false, write_back(0, 0, &[(own, 5)])),
        ]
    };
    let sides = [
        (of_the_device(8).to_vec(), of_the_device(9).to_vec()),
        (of_the_host(8).to_vec(), of_the_host(9).to_vec()),
    ];
    let map = map();
    for (first, second) in sides {
        for (held, held_reads, holder) in &first {
            for (wanted, wanted_reads, other) in &second {
                let mut table = LeaseTable::new(&map);
                table.take(&holder.lease_rows());
                let passes = table.check(&other.lease_rows()).is_ok();
                assert_eq!(passes, *held_reads && *wanted_reads, "{wanted} beside {held}");
                table.release(&holder.lease_rows());
                assert_eq!(table.leased_blocks(), 0, "{held}");
                assert_eq!(table.check(&other.lease_rows()), Ok(()), "{wanted} after {held}");
            }
        }
    }
}

#[test]
fn x14_a_block_with_two_writers_in_a_journal_is_written_until_both_are_released() {
    let (ended, running) = (upload(0, 0, &[(1, 5)]), upload(0, 0, &[(2, 5)]));
    let reader = retain(RetainMode::SharedTable, None, 0, &[(0, 5)]);
    let orders: [[&PlanDraft; 3]; 3] = [
        [&ended, &running, &reader],
        [&reader, &ended, &running],
        [&running, &reader, &ended],
    ];
    let map = map();
    for order in orders {
        let mut table = LeaseTable::new(&map);
        for draft in [&ended, &running, &reader] {
            table.take(&draft.lease_rows());
        }
        for (left, draft) in order.iter().enumerate() {
            let refused = Refusal::DestinationInFlight { row: 0, id: 5 };
            assert_eq!(table.check(&reader.lease_rows()), Err(refused), "{left} released");
            table.release(&draft.lease_rows());
        }
        assert_eq!((table.leased_blocks(), table.check(&reader.lease_rows())), (0, Ok(())));
    }
}

#[test]
fn x9_stamps_that_run_out_start_again_and_find_the_same_duplicates() {
    let mut table = LeaseTable::new(&map());
    let (fine, twice) = (
        two(upload(0, 0, &[(1, 5), (2, 6)]), 4, 0, &[(1, 5)]),
        upload(0, 0, &[(1, 5), (2, 5)]),
    );
    for stamp in [u32::MAX - 9, u32::MAX - 3, u32::MAX - 2, u32::MAX - 1, u32::MAX] {
        table.stamp = stamp;
        for _ in 0..6 {
            assert_eq!(table.check(&fine.lease_rows()), Ok(()), "from {stamp}");
            let refused = Refusal::DuplicateDestination { row: 0, id: 5 };
            assert_eq!(table.check(&twice.lease_rows()), Err(refused), "from {stamp}");
        }
        assert!(table.stamp < 100, "from {stamp}: {}", table.stamp);
    }
}

#[test]
fn x9_a_record_whose_rows_share_their_pairs_overflows_no_count() {
    let mut table = LeaseTable::new(&map());
    let draft = upload(0, 0, &[(1, 5)]);
    table.groups[0].blocks[HOST][1].lease = WRITTEN - 1;
    table.take(&draft.lease_rows());
    assert_eq!(table.source_leases(GroupId(0), SourceBlock(1)), WRITTEN - 1);
}
