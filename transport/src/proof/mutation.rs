//! A ring that changes while a port decodes it (X33).
//!
//! A hostile producer's thread swaps whole, sealed records, and words of them, at the very place that a port reads from.
//! What the port accepts must be sound in the copy that it uses, whatever the ring held before or after.

use std::sync::atomic::{AtomicBool, Ordering};

use fastrand::Rng;
use kvsluice_layout::ids::{OperationId, Position, ProcessEpoch};
use kvsluice_layout::lease::LeaseTable;
use kvsluice_layout::plan::{Operation, Plan, PlanDraft, encode_padding};
use kvsluice_layout::planted::{planted, with_planted};
use kvsluice_layout::record::{Kind, LINE_WORDS};

use super::StopAtEnd;
use crate::port::{Incoming, Outcome, Port};
use crate::producer::tests::{Bench, PRODUCER, upload};
use crate::shared::{Heap, Shared, SharedMut};

const ROUNDS: u32 = if cfg!(miri) { 40 } else { 30_000 };
/// Blocks of both pools of [`Bench`]; device block 0 is its null block.
const BLOCKS: u32 = 64;

/// Records for the start of the ring: sound ones, one with ids of no pool, a padding, and one that lies about its length.
fn records() -> Vec<Vec<u64>> {
    let of_the_first_generation = |pairs: &[(u32, u32)]| {
        let mut draft = upload(1, pairs);
        let rows: Vec<_> = draft.lease_rows().pairs.to_vec();
        draft.upload(
            b"request",
            Operation {
                operation_id: OperationId(1),
                ..Operation::default()
            },
        );
        draft.raw_row(0, 0, 1, 0, rows);
        draft
    };
    let many: Vec<_> = (1..40).map(|block| (block, block)).collect();
    let drafts: [PlanDraft; 3] = [
        of_the_first_generation(&[(3, 5), (4, 6)]),
        of_the_first_generation(&many),
        of_the_first_generation(&[(3, 1 << 30), (u32::MAX, u32::MAX)]),
    ];
    let mut records: Vec<Vec<u64>> = Vec::new();
    for draft in &drafts {
        let mut record = vec![0; draft.encoded_bytes().expect("short") / 8];
        draft.encode(PRODUCER, Position(0), &mut record).expect("encodes");
        records.push(record);
    }
    let mut padding = [0; LINE_WORDS];
    encode_padding(PRODUCER, Position(0), 128, &mut padding);
    records.push(padding.to_vec());
    let mut long = records[0].clone();
    long[2] = long[2] & !0xFFFF_FFFF | 1 << 31;
    records.push(long);
    records
}

/// Stores records, lets them stand for a moment, and stores parts of others over them, until told to stop.
fn mutate(ring: &Heap, at: usize, stop: &AtomicBool) {
    let mut random = Rng::with_seed(7);
    let records = records();
    while !stop.load(Ordering::Relaxed) {
        let record = &records[random.usize(0..records.len())];
        ring.store(at, 0);
        ring.copy_in(at + 8, &record[1..]);
        ring.store_release(at, record[0]);
        for _ in 0..random.u32(0..2_000) {
            std::hint::spin_loop();
        }
        match random.u8(0..6) {
            0 => ring.store(at + 8 * random.usize(0..64), random.u64(..)),
            1 => {
                let other = &records[random.usize(0..records.len())];
                let from = random.usize(0..other.len());
                ring.copy_in(at + from * 8, &other[from..]);
            }
            _ => {}
        }
    }
}

/// Decodes at the mutated place. Returns how many records were accepted, rejected and broken.
fn decode() -> [u32; 3] {
    let bench = Bench::new(1);
    let (ring, shape, stop) = (bench.control.clone(), bench.producer.shape(), AtomicBool::new(false));
    ring.store(shape.at, 0); // The bench's own Reset lies there.
    let mut seen = [0; 3];
    std::thread::scope(|scope| {
        scope.spawn(|| mutate(&ring, shape.at, &stop));
        let _stop = StopAtEnd(&stop);
        for _ in 0..ROUNDS {
            let (control, rank) = (bench.control.clone(), bench.segments[0].clone());
            let leases = LeaseTable::new(&bench.geometry);
            let mut port = Port::new(control, rank, shape, leases, ProcessEpoch(1), PRODUCER, Position(0));
            match port.receive() {
                Ok(Some(Incoming::Plan(ticket))) => {
                    let plan = port.plan(&ticket).expect("an accepted plan stays one");
                    // What a port would see that looked at the ring again after its checks.
                    if planted("x2_use_the_shared_bytes") {
                        std::thread::yield_now();
                    }
                    let mut shared = vec![0; plan.header().length_bytes as usize / 8];
                    ring.copy_out(shape.at, &mut shared);
                    let used = if planted("x2_use_the_shared_bytes") {
                        Plan::parse_checked_before(&shared).expect("what was checked")
                    } else {
                        plan
                    };
                    assert_eq!(used.kind(), Kind::Upload);
                    for pair in used.rows().iter().flat_map(|row| used.pairs(row)) {
                        let sound = pair.source < BLOCKS && (1..BLOCKS).contains(&pair.destination);
                        assert!(sound, "{pair:?} was accepted");
                    }
                    port.finish(ticket, &Outcome::done(0, 0, 0));
                    seen[0] += 1;
                }
                Ok(Some(Incoming::Rejected { .. })) => seen[1] += 1,
                Ok(Some(Incoming::AwaitHandshake(_)) | None) => {}
                Err(_) => seen[2] += 1,
            }
        }
    });
    seen
}

#[test]
fn x33_a_ring_that_changes_during_decoding_panics_nothing_and_no_id_outside_its_pool_is_accepted() {
    let mut seen = [0; 3];
    // As often as it takes to meet every end, on whatever machine.
    for _ in 0..100 {
        let more = decode();
        seen = std::array::from_fn(|end| seen[end] + more[end]);
        if cfg!(miri) || seen.iter().all(|count| *count > 0) {
            return;
        }
    }
    panic!("accepted, rejected, broken: {seen:?}");
}

#[test]
#[cfg_attr(miri, ignore = "needs many rounds")]
fn x33_a_port_that_used_the_shared_bytes_after_its_checks_would_be_found() {
    let red = || std::panic::catch_unwind(|| with_planted("x2_use_the_shared_bytes", decode)).is_err();
    assert!((0..100).any(|_| red()));
}
