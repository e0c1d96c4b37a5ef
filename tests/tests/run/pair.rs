//! `kvsluice run` from end to end: one producer and several workers as processes, every byte checked.

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use crate::running::{Ended, Program};

fn run(args: &[&str], planted: &str) -> Ended {
    Program::run(args, planted).end()
}

/// Everything matched, nothing leaked, nothing is left.
fn is_good(ended: &Ended, ranks: u64) {
    ended.left_nothing();
    assert_eq!(ended.code, Some(0), "{}", ended.log);
    assert_eq!(ended.number("/mismatched_bytes"), 0);
    assert_eq!(ended.number("/leaked_blocks"), 0);
    assert_eq!(ended.number("/ranks"), ranks);
    assert!(
        ended.number("/verified_bytes") >= ended.number("/bytes_h2d"),
        "{:?}",
        ended.report
    );
    assert!(ended.number("/bytes_h2d") > 0);
    assert!(ended.number("/verified_table_bytes") > 0);
    assert!(ended.number("/completions/done") > 0);
    assert_eq!(
        ended.number("/completions/failed") + ended.number("/completions/rejected"),
        0
    );
}

#[test]
fn two_and_four_ranks_play_the_built_in_trace_and_every_byte_matches() {
    for ranks in [2, 4] {
        let ended = run(&["--ranks", &ranks.to_string(), "--requests", "120"], "");
        is_good(&ended, ranks);
        assert_eq!(ended.number("/requests"), 120);
    }
}

#[test]
fn the_report_has_the_keys_that_it_promises_and_as_many_processes_as_roles() {
    let ended = run(&["--requests", "20"], "");
    is_good(&ended, 2);
    let report = ended.report.unwrap();
    for pointer in [
        "/requests",
        "/plans",
        "/rows",
        "/ids",
        "/bytes_h2d",
        "/cpu_gather_bytes",
        "/verified_bytes",
        "/mismatched_bytes",
        "/leaked_blocks",
        "/ranks",
        "/device",
        "/wall_s",
        "/gib_per_s",
        "/pids/producer",
        "/pids/workers/1",
        "/completions/done",
        "/completions/failed",
        "/completions/rejected",
        "/completions/superseded",
        "/completions/duplicate",
        "/completions/stale",
        "/latency_us/publish_to_done/p50",
        "/latency_us/publish_to_done/p99",
        "/latency_us/publish_to_done/p999",
        "/trace/file",
        "/trace/requests",
        "/costs/h2d_bytes",
    ] {
        assert!(
            report.pointer(pointer).is_some_and(|value| !value.is_null()),
            "{pointer} in {report}"
        );
    }
    let workers = report["pids"]["workers"].as_array().unwrap().iter();
    let pids: BTreeSet<_> = workers
        .chain([&report["pids"]["producer"]])
        .map(Value::to_string)
        .collect();
    assert_eq!(pids.len(), 3, "{report}");
}

#[test]
fn a_geometry_with_several_groups_windows_latent_planes_and_replicas_goes_the_whole_way() {
    is_good(&run(&["--preset", "sample-hybrid", "--requests", "40"], ""), 4);
}

#[test]
fn copied_sources_and_byte_moves_and_layer_tables_end_with_the_right_bytes() {
    let few = ["--requests", "30"];
    let copied = run(
        &[&few[..], &["--source-mode", "copy", "--gather-blocks", "64"]].concat(),
        "",
    );
    is_good(&copied, 2);
    assert!(copied.number("/cpu_gather_bytes") > 0);
    let source_only = run(
        &[&few[..], &["--table-mode", "per-layer", "--retain", "byte-move"]].concat(),
        "",
    );
    is_good(&source_only, 2);
    assert_eq!(source_only.number("/cpu_gather_bytes"), 0);
}

#[test]
fn under_a_hostile_device_every_byte_matches_for_each_of_twenty_seeds() {
    for seed in 1..=20 {
        let seed = seed.to_string();
        let ended = run(&["--adversary", &seed, "--seed", &seed, "--requests", "12"], "");
        println!("seed {seed}");
        is_good(&ended, 2);
    }
}

#[test]
fn aborts_early_finishes_and_retries_leave_no_wrong_byte_and_no_leak() {
    let rates = [
        "--abort-rate",
        "0.2",
        "--finish-rate",
        "0.1",
        "--retry-rate",
        "0.2",
        "--requests",
        "40",
    ];
    let ended = run(&rates, "");
    is_good(&ended, 2);
    assert!(ended.number("/completions/superseded") > 0);
}

#[test]
fn x14_a_source_that_is_released_early_shows_as_wrong_bytes() {
    // Late device reads and many requests for a small pool: what is reused too early is overwritten before it is read.
    let pressure = [
        "--adversary=3",
        "--concurrency=64",
        "--source-blocks=24",
        "--device-blocks=512",
    ];
    let args = [&pressure[..], &["--requests=60"]].concat();
    let ended = run(&args, "r26_early_release");
    assert_eq!(ended.code, Some(1), "{}", ended.log);
    assert!(ended.number("/mismatched_bytes") > 0, "{}", ended.log);
    assert!(
        ended.log.contains("bytes on the device are not what they must be"),
        "{}",
        ended.log
    );
    ended.left_nothing();
    is_good(&run(&args, ""), 2);
}

#[test]
fn the_real_conversation_trace_is_played_where_it_is_at_hand() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let places = ["../shared", "../../shared"].map(|up| root.join(up).join("traces/mooncake_conversation.jsonl"));
    let Some(trace) = places.iter().find(|trace| trace.is_file()) else {
        println!("SKIPPED: no mooncake_conversation.jsonl beside this checkout");
        return;
    };
    is_good(&run(&["--requests", "100", "--trace", trace.to_str().unwrap()], ""), 2);
}

#[test]
fn r67_bytes_are_verified_through_the_devices_tables_after_every_change_of_one() {
    for args in [
        &["--retain=auto"][..],
        &["--retain=byte-move"],
        &["--preset", "sample-hybrid"],
    ] {
        let args = [args, &["--requests=40"]].concat();
        is_good(&run(&args, ""), if args.len() > 2 { 4 } else { 2 });
    }
    // The bytes of every operation are where it put them, and attention reads them in another order.
    let ended = run(&["--requests=20"], "d10_image_in_another_order");
    assert_eq!(ended.code, Some(1), "{}", ended.log);
    assert!(ended.number("/mismatched_bytes") > 0);
}
