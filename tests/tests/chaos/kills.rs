//! Both sides killed and stopped from outside, by a seed.

use crate::arena::chaos;

const SEED: &str = "--seed=20261130";

#[test]
fn x22_to_x27_kills_of_both_sides_lose_nothing_and_apply_nothing_twice() {
    for (kill, seconds) in [("producer", "3"), ("worker", "3"), ("both", "7")] {
        let ended = chaos(&[SEED, "--seconds", seconds, "--kill", kill], "", "");
        println!("--kill {kill} {SEED}: {}", ended.report);
        ended.balances();
        let report = &ended.report;
        assert!(ended.kills() > 0 && report["recoveries"].as_u64() > Some(0), "{report}");
        let points = report["kills_by_point"].as_object().expect("an object");
        assert_eq!(
            ended.kills(),
            points.values().filter_map(serde_json::Value::as_u64).sum::<u64>()
        );
        for field in ["restarts", "takeovers", "verified_bytes"] {
            assert!(report[field].is_u64(), "{field} in {report}");
        }
        for quantile in ["p50", "p99", "max"] {
            assert!(report["recovery_ms"][quantile].is_number(), "{quantile} in {report}");
        }
    }
}
