//! What a chaos run came to, added up from what the processes tell.
//!
//! - `lost_plans`: operations that a producer published or took over and that never ended though nothing is in flight;
//!   takeovers whose journal ends before a record that a surviving worker has read; and channels that could not be taken
//!   over at all, though a worker had outlived their producer and the mode allows it.
//! - `double_applied`: records that a worker read twice, answers that repeat or contradict one.
//! - `early_reuse`: times that bytes on a device were not what their plan says: a source or a destination was used again
//!   before its terminal state. `mismatched_bytes` is how many.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use kvsluice_cpu_worker::process::Summary;
use serde::Serialize;
use serde_json::{Value, json};

/// Quantiles of durations in milliseconds.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct Recovery {
    pub(crate) p50: f64,
    pub(crate) p99: f64,
    pub(crate) max: f64,
}

impl Recovery {
    /// Of some durations; all zero where there are none.
    pub(crate) fn of(samples: &[Duration]) -> Self {
        let mut sorted: Vec<f64> = samples.iter().map(|sample| sample.as_secs_f64() * 1000.0).collect();
        sorted.sort_by(f64::total_cmp);
        let at = |q: f64| {
            let index = (q * sorted.len().saturating_sub(1) as f64).ceil() as usize;
            let value = sorted.get(index).copied().unwrap_or(0.0);
            (value * 1000.0).round() / 1000.0
        };
        Self {
            p50: at(0.5),
            p99: at(0.99),
            max: at(1.0),
        }
    }
}

/// Counts of a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    pub(super) kills_by_point: BTreeMap<String, u64>,
    pub(super) stops: u64,
    pub(super) restarts: u64,
    /// Channels that a new producer took over.
    pub(super) takeovers: u64,
    /// Channels that a producer made anew.
    pub(super) cold_starts: u64,
    /// Records that were in flight when a producer died, and were taken over.
    pub(super) recovered_records: u64,
    /// Takeovers that adopted what all ranks hold, without a Reset.
    pub(super) adopted: u64,
    /// Requests that went on after them with the blocks that they held.
    pub(super) resumed_requests: u64,
    /// Workers that a new producer sent away, and that attached anew.
    pub(super) drained: u64,
    /// Traces that were played to their end.
    pub(super) played: u64,
    pub(super) lost_plans: u64,
    pub(super) double_applied: u64,
    pub(super) early_reuse: u64,
    pub(super) leaked_blocks: u64,
    pub(super) stale_files: u64,
    pub(super) mismatched_bytes: u64,
    pub(super) verified_bytes: u64,
    /// Operations that failed on a device or were rejected.
    pub(super) failed: u64,
    /// Processes that ended with an error of their own.
    pub(super) gave_up: u64,
    /// Times that nothing went on for too long.
    pub(super) hangs: u64,
    /// From a kill to the next transfer that was Done after the restart.
    pub(crate) recovery: Vec<Duration>,
    /// From the attach of the restarted process to that transfer (P7).
    pub(crate) attach_to_done: Vec<Duration>,
}

impl Tally {
    /// Processes killed.
    pub(crate) fn kills(&self) -> u64 {
        self.kills_by_point.values().sum()
    }

    /// Kills after which data flowed again.
    pub(super) fn recoveries(&self) -> usize {
        self.recovery.len()
    }

    /// Adds what a producer told at its end.
    pub(super) fn ended(&mut self, summary: &Summary) {
        let done = &summary.completions;
        self.lost_plans += done.published.saturating_sub(done.ended());
        self.double_applied += done.duplicate + done.conflicting + done.ended().saturating_sub(done.published);
        self.failed += done.failed + done.rejected;
        self.leaked_blocks += summary.leaked_blocks;
    }

    /// What is wrong, in words; empty if nothing is.
    pub(crate) fn faults(&self) -> Vec<String> {
        let faults = [
            (self.lost_plans, "plans lost"),
            (self.double_applied, "records applied or answered twice"),
            (self.early_reuse, "blocks used again too early"),
            (self.leaked_blocks, "blocks leaked"),
            (self.stale_files, "files left behind"),
            (self.mismatched_bytes, "bytes on the device are not what they must be"),
            (self.failed, "operations failed or were rejected"),
            (self.gave_up, "processes gave up instead of recovering"),
            (self.hangs, "times nothing went on"),
        ];
        let faults = faults.into_iter().filter(|(count, _)| *count > 0);
        faults.map(|(count, what)| format!("{count} {what}")).collect()
    }

    /// The object that `chaos --json` prints.
    pub(super) fn report(&self) -> Value {
        json!({
            "kills": self.kills(),
            "kills_by_point": self.kills_by_point,
            "stops": self.stops,
            "restarts": self.restarts,
            "takeovers": self.takeovers,
            "cold_starts": self.cold_starts,
            "recovered_records": self.recovered_records,
            "adopted": self.adopted,
            "resumed_requests": self.resumed_requests,
            "drained": self.drained,
            "played": self.played,
            "lost_plans": self.lost_plans,
            "double_applied": self.double_applied,
            "early_reuse": self.early_reuse,
            "leaked_blocks": self.leaked_blocks,
            "stale_files": self.stale_files,
            "mismatched_bytes": self.mismatched_bytes,
            "verified_bytes": self.verified_bytes,
            "failed": self.failed,
            "gave_up": self.gave_up,
            "hangs": self.hangs,
            "recoveries": self.recoveries(),
            "recovery_ms": Recovery::of(&self.recovery),
            "attach_to_done_ms": Recovery::of(&self.attach_to_done),
        })
    }
}

/// For people: a few lines.
impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "kills       {}, stops {}, restarts {}",
            self.kills(),
            self.stops,
            self.restarts
        )?;
        for (point, kills) in &self.kills_by_point {
            writeln!(f, "            {point} {kills}")?;
        }
        writeln!(
            f,
            "takeovers   {} with {} records in flight, {} adopted with {} requests, {} cold starts, {} workers sent to \
             attach anew",
            self.takeovers, self.recovered_records, self.adopted, self.resumed_requests, self.cold_starts, self.drained
        )?;
        writeln!(
            f,
            "verified    {}, {} bytes wrong",
            indicatif::BinaryBytes(self.verified_bytes),
            self.mismatched_bytes
        )?;
        let recovery = Recovery::of(&self.recovery);
        writeln!(
            f,
            "recovery    {} of them, kill to Done p50 {} ms, p99 {} ms, max {} ms",
            self.recoveries(),
            recovery.p50,
            recovery.p99,
            recovery.max
        )?;
        match self.faults() {
            faults if faults.is_empty() => write!(f, "faults      none"),
            faults => write!(f, "faults      {}", faults.join(", ")),
        }
    }
}
