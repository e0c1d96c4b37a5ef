//! Records: their bytes, their versions, and what parsing refuses.
//!
//! The bytes of each kind are in `layout/golden/`. `KVSLUICE_BLESS=1 cargo test -p kvsluice-layout` writes them anew, which
//! a change of the major version alone may do (X3).

use std::path::PathBuf;

use fastrand::Rng;
use zerocopy::IntoBytes;

use super::*;
use crate::ids::GroupId;
use crate::lease::LeaseTable;
use crate::planes::GeometryMap;
use crate::presets::preset;
use crate::record::{NEW_SLOT, Terminal, TerminalSlot};

const EPOCH: ProcessEpoch = ProcessEpoch(0x0E0E_0000_0000_0001);
const AT: Position = Position(0x1_0040);

fn operation() -> Operation {
    Operation {
        request_epoch: RequestEpoch(0x1111),
        operation_id: OperationId(0x2222),
        pool_generation: PoolGeneration(0x3333),
        map_revision: MapRevision(0x4444),
        selection_revision: SelectionRevision(0x5555),
    }
}

fn pair(source: u32, destination: u32) -> Pair {
    Pair { source, destination }
}

fn blocks(pairs: &[(u32, u32)]) -> Vec<(SourceBlock, DestinationBlock)> {
    let ids = pairs.iter();
    ids.map(|&(s, d)| (SourceBlock(s), DestinationBlock(d))).collect()
}

/// One draft of every kind and mode, for the geometry `sample-hybrid`.
pub(crate) fn drafts() -> Vec<(&'static str, PlanDraft)> {
    let made = |(name, make): (_, Make)| {
        let mut draft = PlanDraft::new();
        make(&mut draft);
        (name, draft)
    };
    makers().into_iter().map(made).collect()
}

/// Makes a plan of any draft.
type Make = fn(&mut PlanDraft);

/// What makes them.
fn makers() -> Vec<(&'static str, Make)> {
    let mut makers: Vec<(_, Make)> = Vec::new();
    let mut add = |name, make: Make| makers.push((name, make));
    add("upload", |draft| {
        // Ragged rows (R25): a full layer, a window of one block, and a row whose last pair does not count (R24).
        draft
            .upload(b"request-7", operation())
            .row(
                DecoderLayer(0),
                GroupId(0),
                SourceKind::SourceOnly,
                blocks(&[(1, 2), (3, 4), (5, 6)]),
            )
            .row(DecoderLayer(1), GroupId(1), SourceKind::SourceOnly, blocks(&[(7, 8)]))
            .row(
                DecoderLayer(4),
                GroupId(0),
                SourceKind::Copy,
                blocks(&[(40, 9), (0xDEAD, 0xBEEF)]),
            )
            .valid(1)
            .tags([11, 12, 13, 14, 15, 16])
            .last_of_request();
    });
    add("keep", |draft| _ = draft.keep(b"request-7", operation()));
    add("retain-shared", |draft| {
        let table = [pair(0, 5), pair(NEW_SLOT, 6)];
        draft
            .retain(b"request-7", operation(), RetainMode::SharedTable)
            .table_row(None, GroupId(1), 24, table);
    });
    add("retain-layers", |draft| {
        draft
            .retain(b"request-7", operation(), RetainMode::LayerTables)
            .table_row(Some(DecoderLayer(0)), GroupId(0), 40, [pair(2, 5), pair(0, 6)])
            .table_row(Some(DecoderLayer(6)), GroupId(0), 40, [pair(1, 7)]);
    });
    add("retain-moves", |draft| {
        draft.retain(b"request-7", operation(), RetainMode::ByteMove).table_row(
            Some(DecoderLayer(2)),
            GroupId(2),
            8,
            [pair(3, 0), pair(4, 3)],
        );
    });
    add("write-back", |draft| {
        draft
            .write_back(b"request-7", operation(), 5)
            .raw_row(3, 3, 0, 0, [pair(4, 20), pair(5, 21)]);
    });
    add("abort", |draft| {
        _ = draft.abort(b"request-7", operation(), Position(0x9_0000))
    });
    add("reset", |draft| _ = draft.reset(PoolGeneration(0x3334)));
    makers
}

fn encode(draft: &PlanDraft) -> Vec<u64> {
    let mut record = vec![0xAAAA_AAAA_AAAA_AAAA; draft.encoded_bytes().expect("short") / 8];
    draft.encode(EPOCH, AT, &mut record).expect("encodes");
    record
}

fn golden(name: &str, bytes: &[u8]) {
    let line = |line: &[u8]| line.iter().map(|byte| format!("{byte:02x}")).collect::<String>() + "\n";
    let found: String = bytes.chunks(32).map(line).collect();
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("golden/{name}.hex"));
    if std::env::var_os("KVSLUICE_BLESS").is_some() {
        std::fs::write(&path, &found).expect("written");
    }
    let expected = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert_eq!(
        found, expected,
        "the bytes of {name} have changed: is this another major version (X3)?"
    );
}

#[test]
#[cfg_attr(miri, ignore = "reads files")]
fn x3_the_bytes_of_every_record_kind_and_of_the_terminal_slot_are_golden() {
    for (name, draft) in drafts() {
        golden(name, encode(&draft).as_bytes());
    }
    let mut padding = [0; 8];
    encode_padding(EPOCH, AT, 640, &mut padding);
    golden("padding", padding.as_bytes());
    let slot = TerminalSlot {
        commit: AT.0 + 1,
        identity: 0x0123_4567_89AB_CDEF,
        producer_epoch: EPOCH.0,
        worker_epoch: 0xB0B,
        status: Terminal::Superseded as u8,
        partial: 1,
        reason: 0x0203,
        row: 0x0405_0607,
        bytes_moved: 0x1000,
        device_ns: 0x2000,
        digest: 0x3000,
    };
    golden("terminal-slot", slot.as_bytes());
}

#[test]
fn x5_every_field_of_a_record_lies_where_the_protocol_says() {
    let record = encode(&drafts()[0].1);
    let bytes = record.as_bytes();
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    let half = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
    assert_eq!(word(0), AT.0 + 1, "the commit word comes first (X10)");
    assert_eq!(word(8), checksum(AT.0 + 1, &record[2..]));
    assert_eq!(
        (half(16) as usize, half(20)),
        (bytes.len(), 0x0100_0002),
        "length; version 1.0 of kind 2"
    );
    assert_eq!((half(24), half(28)), (FLAG_FINAL, FLAG_TAGS));
    assert_eq!(
        [word(32), word(40), word(48), word(56)],
        [EPOCH.0, 0x1111, 0x2222, 0x3333]
    );
    assert_eq!([word(64), word(72), word(80)], [0x4444, 0x5555, 0]);
    assert_eq!(
        [half(88), half(92), half(96), half(100)],
        [3, 6, 9, 0],
        "rows, pairs, request bytes, mode"
    );
    assert_eq!(&bytes[128..137], b"request-7");
    // The first row: layer, group, source kind and flags, valid, first pair, pairs, valid tokens.
    assert_eq!([half(144), half(148), half(152), half(156)], [0, 0, 1, 3]);
    assert_eq!([half(160), half(164), half(168), half(172)], [0, 3, 0, 0]);
    assert_eq!(
        [half(144 + 64 + 12), half(144 + 64 + 16), half(144 + 64 + 20)],
        [1, 4, 2],
        "one of two pairs counts"
    );
    assert_eq!([half(240), half(244), half(248), half(252)], [1, 2, 3, 4], "pairs");
    assert_eq!(word(240 + 48), 11, "tags");
}

#[test]
fn r23_equal_inputs_give_equal_bytes_whatever_a_draft_was_used_for_before() {
    let unequal = || -> Vec<&str> {
        let mut reused = PlanDraft::new();
        let mut differs = |make: Make| {
            let mut fresh = PlanDraft::new();
            make(&mut fresh);
            // Everything that a draft can hold, and no plan here has.
            reused
                .write_back(b"something longer than the others", operation(), 0x7777)
                .raw_row(8, 3, 1, 5, [pair(9, 9)])
                .tags([0x99])
                .must_understand(u32::MAX);
            reused.mode = 3;
            make(&mut reused);
            encode(&fresh) != encode(&reused)
        };
        let makers = makers().into_iter().map(|(name, make)| (name, differs(make)));
        makers.filter_map(|(name, differs)| differs.then_some(name)).collect()
    };
    assert_eq!(unequal(), Vec::<&str>::new());
    #[cfg(feature = "planted")]
    assert_eq!(
        crate::planted::with_planted("r23_a_draft_keeps_what_it_had", unequal).len(),
        makers().len(),
        "the planted fault is not seen"
    );
}

#[test]
fn x5_what_was_written_is_what_is_read() {
    for (name, draft) in drafts() {
        let record = encode(&draft);
        let plan = Plan::parse(&record).unwrap_or_else(|refusal| panic!("{name}: {refusal}"));
        assert_eq!((plan.kind(), plan.position()), (draft.kind(), AT), "{name}");
        assert_eq!(
            (plan.operation(), plan.request()),
            (draft.operation(), draft.request()),
            "{name}"
        );
        assert_eq!(plan.header().target, draft.target(), "{name}");
        let (rows, written) = (plan.lease_rows(), draft.lease_rows());
        assert_eq!(
            (rows.rows, rows.pairs, rows.mode),
            (written.rows, written.pairs, written.mode),
            "{name}"
        );
    }
}

#[test]
fn r24_r25_rows_are_ragged_and_pairs_past_the_valid_count_are_carried_and_ignored() {
    let (_, draft) = drafts().swap_remove(0);
    let record = encode(&draft);
    let plan = Plan::parse(&record).expect("parses");
    let valid = || -> Vec<_> { plan.rows().iter().map(|row| plan.pairs(row).len()).collect() };
    assert_eq!((valid(), plan.pair_count()), (vec![3, 1, 1], 6));
    assert_eq!(plan.tags(&plan.rows()[2]), [15]);
    let map = GeometryMap::new(&preset("sample-hybrid").expect("preset")).expect("geometry");
    let mut leases = LeaseTable::new(&map);
    assert_eq!(
        leases.check(&plan.lease_rows()),
        Ok(()),
        "(57005, 48879) is no block of any pool"
    );
    #[cfg(feature = "planted")]
    crate::planted::with_planted("r24_valid_count_unread", || {
        assert_eq!(valid(), [3, 1, 2], "the planted fault is not seen");
        let checked = leases.check(&plan.lease_rows());
        assert!(checked.is_err(), "the planted fault is not seen");
    });
    leases.take(&plan.lease_rows());
    assert_eq!(leases.leased_blocks(), 2 * 5);
}

#[test]
fn x4_a_record_of_a_later_minor_version_is_read_and_its_unknown_must_understand_bit_refused() {
    // Version 1.7 adds a section behind ours and may-ignore bits that say so.
    let mut record = encode(&drafts()[0].1);
    record.extend([0x77; 16]);
    let length = (record.len() * 8) as u64;
    record[2] = length | (Kind::Upload as u64) << 32 | 0x0107 << 48;
    record[3] |= 0xF0 << 32;
    seal(&mut record);
    let plan = Plan::parse(&record).expect("a minor version only adds");
    assert_eq!((plan.rows().len(), plan.pair_count()), (3, 6));
    let mut strict = drafts().swap_remove(1).1;
    strict.must_understand(0x40);
    let record = encode(&strict);
    let refusal = Plan::parse(&record).expect_err("unknown");
    assert_eq!(refusal, Refusal::Flags { bits: 0x40 });
    assert_eq!(
        refusal.to_string(),
        "unsupported: unknown must-understand bits 0x40: upgrade the worker"
    );
}

/// The record of a draft with one word changed, sealed again.
fn spoilt(name: &str, word: usize, value: impl Fn(u64) -> u64) -> Vec<u64> {
    let (_, draft) = drafts().into_iter().find(|(known, _)| *known == name).expect("a draft");
    let mut record = encode(&draft);
    record[word] = value(record[word]);
    seal(&mut record);
    record
}

#[test]
fn x9_what_parsing_refuses_says_what_was_found_and_what_was_expected() {
    let low = |value: u64| move |word: u64| word & !0xFFFF_FFFF | value;
    let high = |value: u64| move |word: u64| word & 0xFFFF_FFFF | value << 32;
    let upload = encode(&drafts()[0].1);
    let mut changed = upload.clone();
    changed[20] ^= 1;
    let cases: Vec<(Vec<u64>, u16, &str)> = vec![
        (changed, 1, "the record was changed after it was written"),
        (
            spoilt("upload", 2, |w| w ^ 0x0300 << 48),
            2,
            "record version: found 0x0200, expected major 0x0100",
        ),
        (
            spoilt("upload", 3, |w| w | 0x8000_0000),
            3,
            "unknown must-understand bits 0x80000000",
        ),
        (
            spoilt("upload", 2, |w| w & !(0xFFFF << 32) | 99 << 32),
            4,
            "unknown record kind 99",
        ),
        (spoilt("upload", 12, high(1)), 5, "mode 1 does not go with this kind"),
        (
            spoilt("retain-moves", 12, high(4)),
            5,
            "mode 4 does not go with this kind",
        ),
        (spoilt("upload", 2, low(64)), 6, "record bytes: found 64, expected 384"),
        (
            spoilt("upload", 11, low(u32::MAX.into())),
            6,
            "row and pair counts: found 4294967295, expected 6",
        ),
        (
            spoilt("upload", 11, high(u32::MAX.into())),
            6,
            "row and pair counts: found 3, expected 4294967295",
        ),
        (
            spoilt("upload", 11, low(1)),
            6,
            "bytes behind the last pair: found 112, expected 63",
        ),
        (
            spoilt("upload", 12, low(257)),
            8,
            "request id of 257 bytes, expected at most 256",
        ),
        (upload[..8].to_vec(), 1, "checksum"),
        (Vec::new(), 6, "record words: found 0, expected 8"),
    ];
    for (record, code, message) in cases {
        let refusal = Plan::parse(&record).expect_err(message);
        let said = refusal.to_string();
        assert!(
            refusal.code() == code && said.contains(message),
            "code {}: {said:?}, not {message:?}",
            refusal.code()
        );
    }
}

#[test]
fn x9_a_draft_that_cannot_be_encoded_is_refused_with_the_sizes() {
    let mut draft = PlanDraft::new();
    draft.keep(&[b'x'; 257], operation());
    let mut record = vec![0; 64];
    let refusal = draft.encode(EPOCH, AT, &mut record).expect_err("too long");
    assert_eq!(
        refusal,
        Refusal::RequestBytes {
            found: 257,
            expected: 256
        }
    );
    draft.keep(&[b'x'; 256], operation());
    assert_eq!(draft.encoded_bytes(), Some(384));
    let refusal = draft.encode(EPOCH, AT, &mut record).expect_err("another length");
    assert!(
        refusal.to_string().starts_with("record bytes: found 512, expected 384"),
        "{refusal}"
    );
    let mut upload = drafts().swap_remove(0).1;
    upload.tags([17]);
    let refusal = upload.encode(EPOCH, AT, &mut record).expect_err("tags");
    assert!(
        refusal.to_string().starts_with("tags: found 7, expected 6"),
        "{refusal}"
    );
    let mut longest = drafts().swap_remove(1).1;
    longest.keep(&[0; 256], operation());
    assert!(Plan::parse(&encode(&longest)).is_ok_and(|plan| plan.request().len() == MAX_REQUEST_BYTES));
}

/// One random change, and often the seal of somebody who means it.
fn mutate(record: &mut Vec<u64>, random: &mut Rng) {
    for _ in 0..random.u32(1..6) {
        let at = random.usize(0..record.len());
        match random.u8(0..8) {
            0 => record[at] ^= 1 << random.u32(0..64),
            1 => record[at] = random.u64(..),
            2 => record[at] = record[at] & !0xFFFF_FFFF | random.u64(0..64),
            3 => record[at] = record[at] & 0xFFFF_FFFF | random.u64(0..64) << 32,
            4 => record[at] = [0, u64::MAX, u64::from(u32::MAX), 1 << 63][random.usize(0..4)],
            5 => record[random.usize(2..16)] ^= 1 << random.u32(0..64),
            6 => record.truncate(random.usize(1..=record.len())),
            _ => record.push(random.u64(..)),
        }
        if record.len() < 16 {
            record.resize(16, 0);
        }
    }
    if random.u8(0..4) != 0 {
        if random.bool() {
            record[2] = record[2] & !0xFFFF_FFFF | (record.len() * 8) as u64;
        }
        seal(record);
    }
}

/// What a plan that passed names: every id within its pool, no null block, no destination twice in a row (X9).
fn names_only_blocks(map: &GeometryMap, plan: &Plan<'_>) -> bool {
    plan.rows().iter().all(|row| {
        let Some(group) = map.geometry().groups.get(row.group as usize) else {
            return false;
        };
        let layer = map.geometry().layers.get(row.layer as usize);
        let placed = match plan.mode() {
            Some(RetainMode::SharedTable) => row.layer == ALL_LAYERS,
            _ => layer.is_some_and(|layer| layer.group.0 == row.group),
        };
        let host = |id: u32| id < group.source_blocks && group.source_null.is_none_or(|null| null.0 != id);
        let device = |id: u32| id < group.device_blocks && group.device_null.is_none_or(|null| null.0 != id);
        let pairs = plan.pairs(row);
        let named = pairs.iter().all(|p| match (plan.kind(), plan.mode()) {
            (Kind::Upload, _) => {
                let gathered = p.source >= group.gather_start().0;
                let of_its_kind =
                    SourceKind::from_code(row.source_kind).is_some_and(|k| (k == SourceKind::Copy) == gathered);
                of_its_kind && host(p.source) && device(p.destination)
            }
            (Kind::WriteBack, _) => device(p.source) && host(p.destination),
            (Kind::Retain, Some(RetainMode::ByteMove)) => device(p.source) && device(p.destination),
            (Kind::Retain, Some(_)) => {
                (p.source == NEW_SLOT || p.source < group.device_blocks) && device(p.destination)
            }
            _ => false,
        });
        let mut destinations: Vec<_> = pairs.iter().map(|p| p.destination).collect();
        destinations.sort_unstable();
        let once = destinations.windows(2).all(|two| two[0] != two[1]);
        placed && named && once && row.valid <= row.pairs && pairs.len() == row.valid as usize
    })
}

/// Parses and checks `count` mutations. Returns how many passed, and a bit per refusal code seen.
fn mutations(count: u32, seed: u64) -> (u32, u32) {
    let map = GeometryMap::new(&preset("sample-hybrid").expect("preset")).expect("geometry");
    let mut leases = LeaseTable::new(&map);
    let records: Vec<_> = drafts().iter().map(|(_, draft)| encode(draft)).collect();
    let mut random = Rng::with_seed(seed);
    let (mut passed, mut codes) = (0, 0_u32);
    for round in 0..count {
        let mut record = records[random.usize(0..records.len())].clone();
        mutate(&mut record, &mut random);
        let checked = Plan::parse(&record).and_then(|plan| leases.check(&plan.lease_rows()).map(|()| plan));
        match checked {
            Ok(plan) => {
                assert!(names_only_blocks(&map, &plan), "seed {seed}, round {round}: {plan:?}");
                leases.take(&plan.lease_rows());
                leases.release(&plan.lease_rows());
                passed += 1;
            }
            Err(refusal) => codes |= 1 << refusal.code(),
        }
    }
    assert_eq!(leases.leased_blocks(), 0, "seed {seed}");
    (passed, codes)
}

#[test]
fn x33_a_mutated_record_is_refused_or_names_only_blocks_and_nothing_panics() {
    let count = if cfg!(miri) { 50 } else { 200_000 };
    let (passed, codes) = mutations(count, 0x5EED);
    assert!(
        cfg!(miri) || (passed > 1_000 && codes.count_ones() >= 14),
        "{passed} passed, refusals {codes:#b}"
    );
}

#[cfg(feature = "planted")]
#[test]
#[cfg_attr(miri, ignore = "runs many rounds to find a rare one")]
fn x9_mutations_find_a_check_that_is_left_out() {
    let red = |fault| {
        let found = || crate::planted::with_planted(fault, || mutations(200_000, 0x5EED));
        std::panic::catch_unwind(found).is_err()
    };
    assert!(red("x9_skip_duplicates"));
    assert!(red("x9_skip_null"));
}
