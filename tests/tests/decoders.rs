//! The fuzz functions of every decoder over a few thousand inputs of a fixed seed, so that none rots, and each with a
//! planted fault that it must find (X33). `tests/scripts/fuzz.sh` runs them for long.

#![cfg(test)]
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    unreachable_pub,
    missing_docs,
    reason = "a test fails by panicking, and shares a module with another crate"
)]

#[path = "../fuzz/decoders/mod.rs"]
mod decoders;

use std::fs;
use std::panic::catch_unwind;
use std::path::Path;
use std::thread;

use fastrand::Rng;
use kvsluice_layout::ids::{DecoderLayer, DestinationBlock, GroupId, Position, ProcessEpoch, SourceBlock};
use kvsluice_layout::plan::{Operation, PlanDraft};
use kvsluice_layout::planted::with_planted;
use kvsluice_layout::record::SourceKind;

type Decoder = fn(&[u8]);

/// The golden records and one that names the null block, behind `before`: what the target reads first.
fn records(before: &[u8]) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../layout/golden");
    let bytes = |text: String| {
        let digits: Vec<_> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
        let byte = |two: &[u8]| u8::from_str_radix(str::from_utf8(two).unwrap(), 16).unwrap();
        digits.chunks_exact(2).map(byte).collect::<Vec<_>>()
    };
    let files = fs::read_dir(folder)
        .unwrap()
        .map(|file| fs::read_to_string(file.unwrap().path()).unwrap());
    let mut null = PlanDraft::new();
    null.upload(b"", Operation::default()).row(
        DecoderLayer(0),
        GroupId(0),
        SourceKind::SourceOnly,
        [(SourceBlock(1), DestinationBlock(0))],
    );
    let mut words = vec![0; null.encoded_bytes().unwrap() / 8];
    null.encode(ProcessEpoch(1), Position(0), &mut words).unwrap();
    let null = words.into_iter().flat_map(u64::to_le_bytes).collect();
    let records = files.map(bytes).chain([null]);
    let mut all: Vec<_> = records.map(|record| [before, &record].concat()).collect();
    all.sort();
    all
}

fn files(folder: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let mut all: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|file| fs::read(file.unwrap().path()).unwrap())
        .collect();
    all.sort();
    all
}

/// Random bytes, and seeds with a few bytes changed, moved or cut off.
fn inputs(seeds: &[Vec<u8>], count: u32) -> impl Iterator<Item = Vec<u8>> {
    let mut random = Rng::with_seed(33);
    (0..count).map(move |number| {
        let Some(mut input) = random.choice(seeds).filter(|_| number % 4 != 0).cloned() else {
            let mut input = vec![0; random.usize(..400)];
            random.fill(&mut input);
            return input;
        };
        for _ in 0..random.u32(..4) {
            let at = random.usize(..input.len().max(1));
            match (random.u8(..8), input.get_mut(at)) {
                (0..4, Some(byte)) => *byte ^= 1 << random.u8(..8),
                (4..6, Some(byte)) => *byte = random.u8(..),
                (6, Some(_)) => input.truncate(at),
                _ => input.insert(at, random.u8(..)),
            }
        }
        input
    })
}

/// Runs the decoder over all inputs, and again with a fault until it is found.
fn run(decoder: Decoder, seeds: &[Vec<u8>], count: u32, fault: Option<&'static str>) {
    for input in seeds.iter().cloned().chain(inputs(seeds, count)) {
        decoder(&input);
    }
    let Some(fault) = fault else { return };
    // A thread of its own: what a decoder keeps from input to input is made anew, under the fault.
    let again = || seeds.iter().cloned().chain(inputs(seeds, count));
    let red = |input: Vec<u8>| catch_unwind(|| decoder(&input)).is_err();
    let found = thread::scope(|scope| scope.spawn(|| with_planted(fault, || again().any(red))).join());
    assert!(found.unwrap(), "{fault} was not found");
}

#[test]
fn x9_a_plan_of_any_bytes_is_refused_or_sound() {
    run(decoders::plan, &records(&[]), 20_000, Some("x9_skip_null"));
}

#[test]
fn x33_a_port_takes_only_sound_plans_from_a_ring_of_any_bytes_that_change_meanwhile() {
    run(decoders::port, &records(&[0xff, 0, 0]), 5_000, Some("x9_skip_null"));
}

#[test]
fn x25_a_journal_of_any_bytes_is_refused_or_taken_over_without_a_leak() {
    let seeds = [0x30, 0x10].map(|flags| records(&[flags, 0xff, 0, 0, 0, 0])).concat();
    run(decoders::journal, &seeds, 5_000, Some("x14_takeover_forgets_leases"));
}

#[test]
fn x11_no_block_is_free_before_every_rank_has_answered_whatever_workers_write() {
    let seeds = [vec![0, 0, 0, 1, 8, 1, 5, 0x10, 1, 4, 6, 7, 4]];
    run(decoders::answers, &seeds, 5_000, Some("x11_first_rank_completes"));
}

#[test]
fn x3_a_control_segment_of_any_bytes_is_refused_or_what_its_maker_wrote() {
    // The last one makes a 1 of the charter's `"write_back_slots":0`.
    let slots: [u8; 15] = [2, 0, 1, 0, 2, 6, 0, 1 | 7 << 4, 0, 0, 0, 0, 0, 0, 0];
    let seeds = [&[0, 0, 0][..], &[1, 0, 0], &[2, 0, 0], &[0x42, 0, 0], &slots].map(Vec::from);
    run(decoders::control, &seeds, 5_000, Some("x26_charter_checksum_unread"));
}

#[test]
fn x8_a_geometry_of_any_numbers_is_refused_or_gives_every_block_a_place_of_its_own() {
    // One group of 8 and 4 blocks; layers: fused, latent, and separate under either sharding.
    let group = [0, 16, 8, 4];
    let layers = [0, 2, 8, 1, 8, 8, 2, 2, 4, 6, 2, 4];
    let seeds = [[&[0, 1, 0, 2, 1, 0, 4, 0][..], &group, &layers].concat()];
    run(decoders::geometry, &seeds, 20_000, Some("x3_blocks_over_header"));
}

#[test]
fn x20_a_text_of_any_bytes_is_refused_or_means_the_same_on_both_sides() {
    run(
        decoders::texts,
        &files("../tests/fuzz/seeds/texts"),
        20_000,
        Some("r27_ignore_rows"),
    );
}

#[test]
fn x33_a_line_of_any_bytes_gets_one_answer_and_a_malformed_one_changes_nothing() {
    let domains = ["validate", "select", "plan", "retain", "ledger"];
    let mut seeds = Vec::new();
    for (number, domain) in (0..).zip(domains) {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("../cpu_worker/vectors/{domain}.jsonl"));
        for line in fs::read_to_string(path).unwrap().lines() {
            let vector: serde_json::Value = serde_json::from_str(line).unwrap();
            let single = [vector.clone()];
            let steps = vector
                .get("seq")
                .and_then(|steps| steps.as_array())
                .map_or(&single[..], Vec::as_slice);
            let lines = steps.iter().filter_map(|step| step.get("in")).map(ToString::to_string);
            let text = lines.take(12).collect::<Vec<_>>().join("\n");
            seeds.push([&[number][..], text.as_bytes()].concat());
        }
    }
    let ledger = r#"{"op":"new","ranks":1}
{"op":"open","req":"a","epoch":1}
{"op":"x"}
{"op":"state","req":"a"}"#;
    seeds.push([&[4], ledger.as_bytes()].concat());
    run(decoders::lines, &seeds, 5_000, Some("x33_bad_line_counts"));
}

#[test]
fn x25a_a_directory_of_any_words_never_hands_out_a_frame_twice_or_with_other_bytes() {
    run(decoders::store, &[vec![1; 60]], 5_000, Some("x25a_checksum_unread"));
}

#[test]
fn x33_a_channel_that_another_thread_writes_meanwhile_gives_only_sound_plans() {
    let seeds: Vec<_> = records(&[])
        .windows(2)
        .map(|two| [&[0xff, 0xff], &two[0][..], &two[1][..]].concat())
        .collect();
    run(decoders::race, &seeds, 1_000, Some("x9_skip_null"));
}
