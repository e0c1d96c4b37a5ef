//! `kvsluice chaos` for a few seconds: both sides killed and stopped by a seed, and nothing lost.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Stdio};

use serde_json::Value;

const SEED: &str = "20261130";

fn chaos(kill: &str, seconds: &str) -> Value {
    let folder = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvsluice-under-test"));
    command.args(["chaos", "--json", "--seed", SEED, "--seconds", seconds, "--kill", kill]);
    command.arg("--runtime-dir").arg(folder.path());
    let ended = command.stdin(Stdio::null()).output().unwrap();
    let (out, log) = (
        String::from_utf8_lossy(&ended.stdout),
        String::from_utf8_lossy(&ended.stderr),
    );
    assert!(
        ended.status.success(),
        "--kill {kill}, seed {SEED}: {}\n{log}{out}",
        ended.status
    );
    assert_eq!(
        std::fs::read_dir(folder.path()).unwrap().count(),
        0,
        "files are left\n{log}"
    );
    serde_json::from_str(out.lines().last().unwrap()).unwrap()
}

#[test]
fn x22_to_x27_kills_of_both_sides_lose_nothing_and_apply_nothing_twice() {
    for (kill, seconds) in [("producer", "3"), ("worker", "3"), ("both", "7")] {
        let report = chaos(kill, seconds);
        let faults = [
            "lost_plans",
            "double_applied",
            "early_reuse",
            "leaked_blocks",
            "stale_files",
            "mismatched_bytes",
            "failed",
            "gave_up",
            "hangs",
        ];
        for fault in faults {
            assert_eq!(report[fault], 0, "--kill {kill}, seed {SEED}: {fault} in {report}");
        }
        assert!(
            report["kills"].as_u64() > Some(0) && report["recoveries"].as_u64() > Some(0),
            "{report}"
        );
    }
}
