//! Both sides killed and stopped from outside, by a seed.

use crate::arena::chaos;

const SEED: &str = "--seed=20261130";

#[test]
fn x22_to_x27_kills_of_both_sides_lose_nothing_and_apply_nothing_twice() {
    for (kill, kills) in [("producer", 30), ("worker", 30), ("both", 60)] {
        // It ends with its last kill; the time is for a run that does not come to it.
        let kills_at_most = format!("--kills={kills}");
        let ended = chaos(&[SEED, "--seconds=600", &kills_at_most, "--kill", kill], "", "");
        println!("--kill {kill} {SEED}: {}", ended.report);
        ended.balances();
        let report = &ended.report;
        assert!(
            ended.kills() >= kills && report["recoveries"].as_u64() > Some(0),
            "{report}"
        );
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
